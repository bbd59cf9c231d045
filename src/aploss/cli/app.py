"""``aploss app``: detections of one or two runs in the browser, as a Gradio app that works offline.

Each image passes through the detectors once; moving the threshold only redraws. Uploads are kept in a temporary folder
that is removed when the app stops.
"""

import json
import os
import tempfile
import threading
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aploss.cli.command import Command, run_folder_of
from aploss.errors import AplossError, ConfigError, require_packages

if TYPE_CHECKING:
    from gradio import Blocks

    from aploss.detectors.predict import ObjectDetector, Prediction

EXAMPLES = """
  aploss app runs/demo
  aploss app runs/ap runs/focal --port 0
"""

HOST = "127.0.0.1"
MAX_FILE_MB = 32
MAX_IMAGES = 50  # per upload
MAX_SIDE = 1600  # pixels of the pictures sent to the browser
COLUMNS = ("run", "image", "class", "score", "x1", "y1", "x2", "y2")
Results = list[tuple[str, "list[Prediction]"]]  # path of each image, and all its detections by each run


def _add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("run", help="run folder, checkpoint or exported file")
    parser.add_argument("other", nargs="?", help="a second one to compare with")
    parser.add_argument("--port", type=int, metavar="N", default=7860, help=f"port on {HOST}; 0 picks a free one")
    parser.add_argument("--device", default="auto", help="cpu, cuda, mps or auto")


def _run(options: Namespace) -> int:
    """Serves the app until Ctrl-C."""
    from aploss.cli.predict import load_detector

    require_packages("gradio")
    paths = [path for path in (options.run, options.other) if path is not None]
    app = App({path: load_detector(path, options.device) for path in paths})
    with app.serve(options.port) as address, suppress(KeyboardInterrupt):
        print(f"{address}  (only reachable from this machine; Ctrl-C stops it)", flush=True)
        threading.Event().wait()
    return 0


@contextmanager
def _shown_on_page() -> Iterator[None]:
    """Shows an error of a callback as one line on the page, without a traceback on the terminal."""
    from gradio import Error

    try:
        yield
    except AplossError as error:
        raise Error(" ".join(str(error).split()), print_exception=False) from None


class App:
    """The page and its callbacks.

    Args:
        detectors: detectors by the path they were loaded from.
    """

    def __init__(self, detectors: "dict[str, ObjectDetector]") -> None:
        self.detectors = detectors
        thresholds = [detector.draw_threshold for detector in detectors.values()]
        self.threshold = next((one for one in thresholds if one is not None), 0.5)

    @_shown_on_page()
    def detect(self, files: Sequence[str] | None, threshold: float) -> list[Any]:
        """Passes uploaded images through the detectors; returns the results, then the values of :meth:`show`."""
        from aploss.data.images import ImageError, read_image

        files = files or []
        if len(files) > MAX_IMAGES:
            raise ConfigError(f"{len(files)} images: at most {MAX_IMAGES} at a time")
        results: Results = []
        for path in files:
            try:
                image = read_image(path)  # rejects images with too many pixels before decoding them
            except ImageError as error:
                raise ConfigError(f"{Path(path).name}: {error.problem.message}") from None  # without the folder
            results.append((path, [one.predict(image, threshold=0.0)[0] for one in self.detectors.values()]))
        return [results, *self.show(results, threshold)]

    @_shown_on_page()
    def show(self, results: Results, threshold: float) -> list[Any]:
        """The pictures of each run, the rows of the table and the path of the JSON file, at a threshold."""
        from aploss.data import draw_boxes
        from aploss.data.images import read_image

        galleries: dict[str, list[Any]] = {run: [] for run in self.detectors}
        rows: list[list[Any]] = []
        for path, predictions in results:
            image, name = read_image(path).numpy(), Path(path).name
            for (run, detector), found in zip(self.detectors.items(), predictions, strict=True):
                count = int((found.scores >= threshold).sum())  # scores are in descending order
                boxes, labels, scores = (one[:count].numpy() for one in (found.boxes, found.labels, found.scores))
                picture = draw_boxes(image, boxes, labels, detector.class_names, scores, largest=MAX_SIDE)
                galleries[run].append((picture, f"{name}: {count} detections"))
                for label, score, box in zip(found.class_names, scores.tolist(), boxes.tolist(), strict=False):
                    rows.append([run, name, label, round(score, 4), *(round(corner, 1) for corner in box)])
        file = Path(tempfile.mkdtemp(dir=os.environ.get("GRADIO_TEMP_DIR"))) / "detections.json"
        file.write_text(json.dumps([dict(zip(COLUMNS, row, strict=True)) for row in rows], indent=1), encoding="utf-8")
        return [*galleries.values(), rows, str(file)]

    def page(self) -> "Blocks":
        """Builds the page."""
        import gradio as gr

        with gr.Blocks(title="aploss", analytics_enabled=False) as page:
            gr.HTML("<h1>aploss: object detection</h1>")
            with gr.Row():
                for run, detector in self.detectors.items():
                    with gr.Column(min_width=320):
                        gr.HTML(model_card(run, detector))
            label = f"Images (up to {MAX_FILE_MB} MB each)"
            files = gr.File(label=label, file_count="multiple", file_types=["image"], height=140)
            threshold = gr.Slider(0, 1, value=self.threshold, step=0.01, label="Score threshold")
            with gr.Row():
                galleries = [gr.Gallery(label=run, columns=1, object_fit="contain") for run in self.detectors]
            table = gr.Dataframe(headers=list(COLUMNS), label="Detections", interactive=False)
            shown = [*galleries, table, gr.DownloadButton("Download detections as JSON")]
            results = gr.State([])
            # One prediction at a time, since all sessions share the detectors and cores.
            one_at_a_time: dict[str, Any] = {"concurrency_limit": 1, "concurrency_id": "detectors"}
            files.change(self.detect, [files, threshold], [results, *shown], api_name="detect", **one_at_a_time)
            threshold.release(self.show, [results, threshold], shown, api_visibility="private", **one_at_a_time)
        return page  # type: ignore[no-any-return]

    @contextmanager
    def serve(self, port: int) -> Iterator[str]:
        """Serves the page on the loopback interface and yields its address; port 0 picks a free one."""
        with tempfile.TemporaryDirectory(prefix="aploss-app-") as folder:
            os.environ |= {"GRADIO_TEMP_DIR": folder, "GRADIO_ANALYTICS_ENABLED": "False"}  # before the import
            import gradio as gr
            from starlette.middleware import Middleware
            from starlette.middleware.trustedhost import TrustedHostMiddleware

            # Requests for other host names are DNS rebinding: pages of other sites that try to reach this server.
            middleware = [Middleware(TrustedHostMiddleware, allowed_hosts=[HOST, "localhost"])]
            page = self.page()
            try:
                _, address, _ = page.launch(
                    server_name=HOST, server_port=port or None, share=False, quiet=True, prevent_thread_lock=True,
                    max_file_size=MAX_FILE_MB * 2**20, footer_links=[], run_history=False, ssr_mode=False,
                    mcp_server=False, enable_monitoring=False, app_kwargs={"middleware": middleware},
                    theme=gr.themes.Base(font="system-ui", font_mono="monospace"), css="h2 { overflow-wrap: anywhere }",
                )  # fmt: skip
            except (OSError, OverflowError):
                raise ConfigError(f"--port {port} cannot be used; --port 0 picks a free one") from None
            try:
                yield address
            finally:
                page.close(verbose=False)


def model_card(run: str, detector: "ObjectDetector") -> str:
    """The model card of a run as HTML: classes, threshold and, if its folder has a summary, detector, loss and AP."""
    from aploss.training.run_folder import Summary

    rows = {"classes": ", ".join(detector.class_names)}
    if detector.draw_threshold is not None:
        rows["threshold"] = f"{detector.draw_threshold:.2f} (best F1 on validation)"
    folder = run_folder_of(run)
    if folder is not None and folder.summary_file.is_file():
        summary = Summary.read(folder.summary_file)
        ap = "not measured" if summary.AP is None else f"{100 * summary.AP:.1f} on {summary.split}"
        rows |= {"detector": summary.detector, "loss": summary.loss, "AP": ap}
    cells = "".join(f"<tr><th>{name}</th><td>{escape(str(text))}</td></tr>" for name, text in rows.items())
    return f"<h2>{escape(run)}</h2><table>{cells}</table>"


APP = Command(examples=EXAMPLES, add_arguments=_add_arguments, run=_run)
