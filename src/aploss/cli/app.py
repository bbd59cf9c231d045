"""``aploss app``: detections of one or two runs in the browser, as a Gradio app that works offline.

Each image passes through the detectors once; moving a threshold only redraws. Uploads are kept in a temporary folder
that is removed when the app stops.
"""

import json
import logging
import math
import os
import shutil
import sys
import tempfile
import threading
from argparse import Namespace
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from functools import lru_cache
from html import escape
from pathlib import Path
from typing import Any

from aploss.cli.predict import load_detector
from aploss.cli.train import run_folder_of
from aploss.data import draw_boxes, read_image
from aploss.data.folder import EXTENSIONS
from aploss.data.images import ImageError, read_sizes
from aploss.detectors.detector import Detector
from aploss.detectors.predict import Prediction
from aploss.errors import AplossError, ConfigError, require_packages
from aploss.plotting.plots import loss_label
from aploss.progress import printable
from aploss.reports.run_files import read_run
from aploss.training.run_folder import Summary

HOST = "127.0.0.1"
MAX_FILE_MB = 32
MAX_IMAGES = 50  # per upload
MAX_MEGAPIXELS = 25  # of an image: about a gigabyte while it is processed
MAX_WAITING = 20  # requests that wait for the detectors; more are refused
MAX_SIDE = 1600  # pixels of the pictures sent to the browser
SAMPLES = 6
UPLOADS_KEPT = (600, 3600)  # seconds between clean-ups, and of age
COLUMNS = ("class", "score", "x1", "y1", "x2", "y2", "image", "run")
STYLE = """
h1, h2 { overflow-wrap: anywhere; margin: 0 !important }
.card, .card * { border: 0 !important; padding: 2px 16px 2px 0 !important; text-align: left; vertical-align: top }
.grid-wrap { min-height: 0 !important; max-height: none !important }
@media (max-width: 600px) { .pictures .grid-container { grid-template-columns: 1fr !important } }
"""


def run_app(options: Namespace) -> int:
    """Serves the app until Ctrl-C."""
    require_packages("gradio")
    paths = [path for path in (options.run, options.other) if path is not None]
    app = App({path: load_detector(path, options.device) for path in paths})
    with app.serve(options.port) as address, suppress(KeyboardInterrupt):
        print(f"{address}  (only reachable from this machine; Ctrl-C stops it)", flush=True)
        threading.Event().wait()
    return 0


def _without_traceback(record: logging.LogRecord) -> bool:
    """The filter of the server's log: an error that a malformed request causes is one line."""
    if record.exc_info:
        record.msg, record.args, record.exc_info = f"request refused: {record.exc_info[1]!r:.200}", (), None
    return True


class App:
    """The page and its callback.

    Args:
        detectors: detectors by the path they were loaded from.
    """

    def __init__(self, detectors: dict[str, Detector]) -> None:
        self.detectors = detectors
        # The folder of an upload is named after its content. Moving a threshold only redraws.
        self.predictions = lru_cache(maxsize=4 * MAX_IMAGES)(self._predict)

    def _predict(self, path: str) -> list[Prediction]:
        """All detections in an image by each detector."""
        try:
            (width, height), _ = read_sizes(path)
            if width * height > MAX_MEGAPIXELS * 10**6:  # before anything is decoded
                raise ConfigError(f"{Path(path).name}: {width} x {height} pixels: at most {MAX_MEGAPIXELS} million")
            image = read_image(path)
        except ImageError as error:
            raise ConfigError(f"{Path(path).name}: {error.problem.message}") from None  # without the folder
        return [one.predict(image, threshold=0.0)[0] for one in self.detectors.values()]

    def detect(self, files: Sequence[str] | None, *thresholds: float) -> list[Any]:
        """The pictures of each run at its threshold, the rows of the table and the path of the JSON file."""
        if len(files or ()) > MAX_IMAGES:
            raise ConfigError(f"{len(files or ())} images: at most {MAX_IMAGES} at a time")
        galleries: dict[str, list[Any]] = {run: [] for run in self.detectors}
        rows: list[list[Any]] = []
        for path in files or ():
            predictions, image, name = self.predictions(path), read_image(path), printable(Path(path).name)
            for (run, detector), found, threshold in zip(self.detectors.items(), predictions, thresholds, strict=True):
                count = int((found.scores >= threshold).sum())  # scores are in descending order
                boxes, labels, scores = found.boxes[:count], found.labels[:count], found.scores[:count]
                picture = draw_boxes(image, boxes, labels, detector.class_names, scores, largest=MAX_SIDE)
                galleries[run].append((picture, f"{name}: {count} detections"))
                for label, score, box in zip(found.class_names, scores.tolist(), boxes.tolist(), strict=False):
                    rows.append([label, round(score, 4), *(round(corner, 1) for corner in box), name, run])
        file = Path(tempfile.mkdtemp(dir=os.environ.get("GRADIO_TEMP_DIR"))) / "detections.json"
        file.write_text(json.dumps([dict(zip(COLUMNS, row, strict=True)) for row in rows], indent=1), encoding="utf-8")
        return [*galleries.values(), rows, str(file)]

    def page(self) -> Any:
        """Builds the page."""
        import gradio as gr

        class Page(gr.Blocks):
            async def process_api(self, block_fn: Any, inputs: list[Any], *arguments: Any, **options: Any) -> Any:
                """Shows an error of a request as one line on the page, and one that is not ours on the terminal."""
                try:
                    if '"path": "http' in json.dumps(inputs, default=str):  # Gradio would download it
                        raise ConfigError("images must be uploaded: a URL is not downloaded")
                    return await super().process_api(block_fn, inputs, *arguments, **options)
                except Exception as error:
                    line = printable(" ".join(str(error).split()))[:200]
                    if not isinstance(error, AplossError):
                        print(f"request refused: {type(error).__name__}: {line}", file=sys.stderr)
                    raise gr.Error(line, print_exception=False) from None

        with Page(title="aploss", analytics_enabled=False, delete_cache=UPLOADS_KEPT) as page:
            gr.HTML("<h1>aploss: object detection</h1>")
            sliders = []
            with gr.Row():
                for run, detector in self.detectors.items():
                    with gr.Column(min_width=320):
                        gr.HTML(model_card(run, detector))
                        value = math.floor(100 * (detector.draw_threshold or 0.5)) / 100
                        sliders.append(gr.Slider(0, 1, value=value, step=0.01, label="Score threshold"))
                with gr.Column(min_width=320):
                    label = f"Images (up to {MAX_IMAGES}, {MAX_FILE_MB} MB each)"
                    files = gr.File(label=label, file_count="multiple", file_types=["image"], height=140)
                    if samples := sample_images(self.detectors):
                        gr.HTML("Or choose an image of the evaluation split:")
                        chosen = gr.Gallery(samples, show_label=False, columns=3, allow_preview=False, buttons=[])

                        def select(event: gr.SelectData) -> list[str]:
                            return [samples[event.index]]

                        chosen.select(select, None, files, api_visibility="private")
            look: dict[str, Any] = {"columns": 3 - len(self.detectors), "object_fit": "contain"}
            with gr.Row():
                shown: list[Any] = [gr.Gallery(label=run, elem_classes="pictures", **look) for run in self.detectors]
            with gr.Accordion("Table of detections", open=False):
                shown.append(gr.Dataframe(headers=list(COLUMNS), show_label=False, interactive=False, max_height=400))
            shown.append(gr.DownloadButton("Download detections as JSON"))
            # One prediction at a time, since all sessions share the detectors and cores.
            events = [files.change, *(slider.release for slider in sliders)]
            gr.on(events, self.detect, [files, *sliders], shown, api_name="detect", concurrency_limit=1)
        return page.queue(max_size=MAX_WAITING)

    @contextmanager
    def serve(self, port: int) -> Iterator[str]:
        """Serves the page on the loopback interface and yields its address; port 0 picks a free one."""
        with tempfile.TemporaryDirectory(prefix="aploss-app-") as folder:
            os.environ |= {"GRADIO_TEMP_DIR": folder, "GRADIO_ANALYTICS_ENABLED": "False"}  # before the import
            import gradio as gr
            from starlette.middleware import Middleware
            from starlette.middleware.trustedhost import TrustedHostMiddleware
            from starlette.responses import PlainTextResponse

            def refuse_urls(app: Any) -> Any:
                """ASGI middleware that refuses ``/file=URL``, for which Gradio would download the URL."""
                refusal = PlainTextResponse("a URL is not downloaded", 403)

                async def serve(scope: Any, receive: Any, send: Any) -> None:
                    await (refusal if "=http" in scope.get("path", "").lower() else app)(scope, receive, send)

                return serve

            # Requests for other host names are DNS rebinding: pages of other sites that try to reach this server.
            trusted = Middleware(TrustedHostMiddleware, allowed_hosts=[HOST, "localhost"])
            options = {"middleware": [trusted, Middleware(refuse_urls)]}
            page = self.page()
            logging.getLogger("uvicorn.error").addFilter(_without_traceback)
            try:
                _, address, _ = page.launch(
                    server_name=HOST, server_port=port or None, share=False, quiet=True, prevent_thread_lock=True,
                    max_file_size=MAX_FILE_MB * 2**20, footer_links=[], run_history=False, ssr_mode=False,
                    mcp_server=False, enable_monitoring=False, app_kwargs=options,
                    theme=gr.themes.Base(font="system-ui", font_mono="monospace"), css=STYLE,
                )  # fmt: skip
            except (OSError, OverflowError):
                raise ConfigError(f"--port {port} cannot be used; --port 0 picks a free one") from None
            try:
                yield address
            finally:
                page.close(verbose=False)


def sample_images(runs: Iterable[str]) -> list[str]:
    """Copies some images of the evaluation split of the first run that has any to the folder of uploads."""
    for folder in filter(None, map(run_folder_of, runs)):
        with suppress(OSError, TypeError, KeyError):  # a folder of images that is gone or a damaged file
            paths = [Path(image["path"]) for image in read_run(folder.path).ground_truth.get("images", [])]
            paths = [path for path in paths[:: max(1, len(paths) // SAMPLES)] if path.suffix.lower() in EXTENSIONS]
            paths = [path for path in paths if path.is_file()]  # a device would be copied without end
            copies = tempfile.mkdtemp(dir=os.environ.get("GRADIO_TEMP_DIR"))
            return [shutil.copy(path, copies) for path in paths[:SAMPLES]]
    return []


def model_card(run: str, detector: Detector) -> str:
    """The model card of a run as HTML: classes and, if its folder has a summary, detector, loss and AP."""
    rows = {"classes": ", ".join(detector.class_names)}
    folder = run_folder_of(run)
    if folder is not None and folder.summary_file.is_file():
        summary = Summary.read(folder.summary_file)
        ap = "not measured" if summary.AP is None else f"{100 * summary.AP:.1f} % on {summary.split}"
        date = datetime.fromtimestamp(folder.summary_file.stat().st_mtime).astimezone()
        rows = {"AP": ap, "loss": loss_label(summary.loss), "detector": summary.detector, "data": summary.data} | rows
        rows["trained"] = f"{date:%d %B %Y}"
    rows["path"] = run
    cells = "".join(f"<tr><th>{name}</th><td>{escape(printable(str(text)))}</td></tr>" for name, text in rows.items())
    title = Path(run).resolve().name if folder is None else folder.path.resolve().name
    return f"<h2>{escape(printable(title))}</h2><table class='card'>{cells}</table>"
