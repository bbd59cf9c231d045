"""``aploss app``: detections of one or two runs in the browser, as a Gradio app that works offline.

Each image passes through the detectors once; moving the threshold only redraws. Uploads are kept in a temporary folder
that is removed when the app ends.
"""

import json
import os
import socket
import tempfile
import threading
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
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
  aploss app runs/ap runs/focal
  aploss app model.onnx --port 0
"""

HOST = "127.0.0.1"
PORT = 7860
MAX_FILE_BYTES = 32 * 2**20
MAX_IMAGES = 50  # per upload
MAX_SIDE = 1600  # pixels of the pictures that the browser receives
COLUMNS = ("run", "image", "class", "score", "x1", "y1", "x2", "y2")


def _add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("run", help="run folder, checkpoint or exported file")
    parser.add_argument("other", nargs="?", help="a second one to compare with")
    parser.add_argument("--port", type=int, default=PORT, help=f"port on {HOST}; 0 picks a free one")
    parser.add_argument("--device", default="auto", help="cpu, cuda, mps or auto")


def _run(options: Namespace) -> int:
    """Serves the app until Ctrl-C."""
    from aploss.cli.predict import load_detector

    require_packages("gradio")
    if not 0 <= options.port <= 65535:
        raise ConfigError(f"--port {options.port}: must be between 0 and 65535")
    paths = [path for path in (options.run, options.other) if path is not None]
    viewer = Viewer([Run(path, load_detector(path, options.device)) for path in paths])
    with serve(viewer, options.port) as address:
        print(f"{address}  (local access only; press Ctrl-C to stop)", flush=True)
        try:
            threading.Event().wait()
        except KeyboardInterrupt:
            print()
    return 0


@dataclass(frozen=True)
class Run:
    """A detector and the path it was loaded from."""

    path: str
    detector: "ObjectDetector"

    def card(self) -> str:
        """The model card as HTML: classes, threshold and, where the run folder has them, loss, AP and date."""
        from aploss.reports.run_files import read_json
        from aploss.training.run_folder import Summary

        calibrated = "calibrated" if self.detector.calibration is not None else "not calibrated"
        rows = {"classes": ", ".join(self.detector.class_names), "scores": calibrated}
        if self.detector.draw_threshold is not None:
            rows["threshold"] = f"{self.detector.draw_threshold:.2f} (best F1 on validation)"
        folder = run_folder_of(self.path)
        if folder is not None and folder.summary_file.is_file():
            summary = Summary.read(folder.summary_file)
            rows |= {"detector": summary.detector, "loss": summary.loss, "data": summary.data}
            if summary.AP is not None:
                rows["AP"] = f"{100 * summary.AP:.1f} on {summary.split}"
            started = (read_json(folder.path / "environment.json") or {}).get("started", "")
            rows["trained"] = str(started)[:10]
        cells = "".join(f"<tr><th>{name}</th><td>{escape(text)}</td></tr>" for name, text in rows.items() if text)
        return f"<h2>{escape(self.path)}</h2><table>{cells}</table>"


@dataclass(frozen=True)
class ImageResult:
    """An uploaded image with all detections of each run, whatever their scores."""

    path: str
    predictions: "list[Prediction]"


class Viewer:
    """The functions behind the page, and the page itself."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self.runs = tuple(runs)
        thresholds = [run.detector.draw_threshold for run in self.runs]
        self.threshold = next((one for one in thresholds if one is not None), 0.5)

    def detect(self, files: Sequence[str] | None, threshold: float) -> list[Any]:
        """Passes uploaded images through the detectors; returns their results, then the values of :meth:`show`."""
        from aploss.data.images import read_image

        if len(files or ()) > MAX_IMAGES:
            raise ConfigError(f"{len(files or ())} images: at most {MAX_IMAGES} at a time")
        results = []
        for path in files or ():
            image = read_image(path)  # refuses images with too many pixels before decoding them
            results.append(ImageResult(path, [run.detector.predict(image, threshold=0.0)[0] for run in self.runs]))
        return [results, *self.show(results, threshold)]

    def show(self, results: Sequence[ImageResult], threshold: float) -> list[Any]:
        """The pictures of each run, the rows of the table and the path of the JSON file, at a threshold."""
        pictures: list[list[Any]] = [[] for _ in self.runs]
        rows = []
        for result in results:
            for run, prediction, gallery in zip(self.runs, result.predictions, pictures, strict=True):
                keep = prediction.scores >= threshold
                gallery.append(_picture(result.path, prediction, keep, run.detector.class_names))
                corners, scores = prediction.boxes[keep].tolist(), prediction.scores[keep].tolist()
                names = [name for name, kept in zip(prediction.class_names, keep.tolist(), strict=True) if kept]
                for name, score, box in zip(names, scores, corners, strict=True):
                    numbers = [round(score, 4), *(round(corner, 1) for corner in box)]
                    rows.append([run.path, Path(result.path).name, name, *numbers])
        folder = Path(tempfile.mkdtemp(dir=os.environ.get("GRADIO_TEMP_DIR")))
        document = [dict(zip(COLUMNS, row, strict=True)) for row in rows]
        (folder / "detections.json").write_text(json.dumps(document, indent=1), encoding="utf-8")
        return [*pictures, rows, str(folder / "detections.json")]

    def page(self) -> "Blocks":
        """Builds the Gradio app."""
        import gradio as gr

        with gr.Blocks(title="aploss", analytics_enabled=False) as page:
            gr.HTML("<h1>aploss</h1>")
            with gr.Row():
                for run in self.runs:
                    gr.HTML(run.card())
            limits = f"up to {MAX_FILE_BYTES // 2**20} MB each"
            files = gr.File(label=f"Images ({limits})", file_count="multiple", file_types=["image"], height=140)
            threshold = gr.Slider(0, 1, value=self.threshold, step=0.01, label="Score threshold")
            with gr.Row():
                galleries = [
                    gr.Gallery(label=run.path, columns=1, object_fit="contain", buttons=["download", "fullscreen"])
                    for run in self.runs
                ]
            table = gr.Dataframe(headers=list(COLUMNS), label="Detections", interactive=False, wrap=True)
            download = gr.DownloadButton("Download detections as JSON")
            results = gr.State([])
            shown = [*galleries, table, download]
            # One prediction at a time: detectors and cores are shared.
            files.change(
                _one_line_errors(self.detect), [files, threshold], [results, *shown],
                api_name="detect", concurrency_limit=1, concurrency_id="detector",
            )  # fmt: skip
            threshold.release(
                _one_line_errors(self.show), [results, threshold], shown,
                api_visibility="private", concurrency_limit=1, show_progress="hidden", trigger_mode="always_last",
            )  # fmt: skip
        return page


def _picture(path: str, prediction: "Prediction", keep: Any, class_names: Sequence[str]) -> tuple[Any, str]:
    """The image with the kept boxes drawn, and its caption."""
    from aploss.data import draw_boxes
    from aploss.data.images import read_image

    boxes, labels, scores = (one[keep].numpy() for one in (prediction.boxes, prediction.labels, prediction.scores))
    picture = draw_boxes(read_image(path).numpy(), boxes, labels, class_names, scores, largest=MAX_SIDE)
    return picture, f"{Path(path).name}: {len(boxes)} detection{'s' * (len(boxes) != 1)}"


def _one_line_errors(function: Any) -> Any:
    """Wraps a callback so that every error reaches the page as one line, and the terminal shows no traceback."""
    import gradio as gr

    def wrapped(*values: Any) -> Any:
        try:
            return function(*values)
        except AplossError as error:
            line = " ".join(str(error).split())
        except Exception as error:
            line = f"unexpected {type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise gr.Error(line, print_exception=False)

    return wrapped


@contextmanager
def serve(viewer: Viewer, port: int) -> Iterator[str]:
    """Serves the page on the loopback interface and yields its address; port 0 picks a free one.

    Raises:
        ConfigError: the port is taken or not permitted.
    """
    try:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((HOST, port))
            port = probe.getsockname()[1]
    except OSError as error:
        raise ConfigError(f"--port {port}: {error.strerror}; --port 0 picks a free one") from error
    with tempfile.TemporaryDirectory(prefix="aploss-app-") as folder:
        os.environ |= {"GRADIO_TEMP_DIR": folder, "GRADIO_ANALYTICS_ENABLED": "False"}  # read when gradio is imported
        import gradio as gr
        from starlette.middleware import Middleware
        from starlette.middleware.trustedhost import TrustedHostMiddleware

        page = viewer.page()
        # Other host names may be DNS rebinding: a page of another site that reaches this machine.
        local_only = Middleware(TrustedHostMiddleware, allowed_hosts=[HOST, "localhost"])
        page.launch(
            server_name=HOST, server_port=port, share=False, quiet=True, prevent_thread_lock=True, inbrowser=False,
            max_file_size=MAX_FILE_BYTES, footer_links=[], run_history=False, ssr_mode=False, mcp_server=False,
            enable_monitoring=False, app_kwargs={"middleware": [local_only]},
            theme=gr.themes.Base(font="system-ui", font_mono="monospace"), css="th { text-align: left }",
        )  # fmt: skip
        try:
            yield f"http://{HOST}:{port}"
        finally:
            page.close(verbose=False)


APP = Command(examples=EXAMPLES, add_arguments=_add_arguments, run=_run)
