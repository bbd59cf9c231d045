"""Look at what a run finds, in the browser: drop an image, move the threshold, put two runs side by side.

A small server for this machine alone (127.0.0.1), with a page of its own that loads nothing from anywhere. An image
goes through the runs once; the threshold is moved in the page.
"""

import base64
import errno
import io
import json
import tempfile
import threading
import time
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from jsonargparse import ArgumentParser, Namespace

from aploss.cli.command import Command
from aploss.errors import AplossError, ConfigError

if TYPE_CHECKING:
    from aploss.detectors.predict import ObjectDetector

EXAMPLES = """
  aploss app runs/demo
  aploss app runs/ap runs/focal
  aploss app model.onnx --port 0
"""

HOST = "127.0.0.1"
PORT = 7860
MAX_BYTES = 32 * 2**20
LONGEST_SHOWN = 1600  # pixels of the picture that the page gets back
PAGE = {"/": ("index.html", "text/html"), "/app.js": ("app.js", "text/javascript"), "/app.css": ("app.css", "text/css")}
SECURITY = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}


def _add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("run", type=str, help="run folder, checkpoint or exported file of a detector")
    parser.add_argument("other", type=str, nargs="?", help="a second one, to see beside it")
    parser.add_argument("--port", type=int, default=PORT, help="of 127.0.0.1; 0 takes a free one")
    parser.add_argument("--device", type=str, default="auto", help="cpu, cuda, mps or auto")


def _run(options: Namespace) -> int:
    """Serves the page until Ctrl-C."""
    from aploss.cli.predict import load_detector

    if not 0 <= options.port <= 65535:
        raise ConfigError(f"--port {options.port}: must be from 0 to 65535")
    names = [name for name in (options.run, options.other) if name is not None]
    server = make_server(names, [load_detector(name, options.device) for name in names], port=options.port)
    print(f"http://{HOST}:{server.server_port}  (only from this machine; Ctrl-C ends it)", flush=True)
    with server:
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()
    return 0


def make_server(names: Sequence[str], detectors: "Sequence[ObjectDetector]", *, port: int = 0) -> "AppServer":
    """A server on 127.0.0.1 that shows what detectors find; ConfigError where the port is taken or not allowed."""
    try:
        return AppServer(names, detectors, port)
    except OSError as error:
        if error.errno in (errno.EADDRINUSE, errno.EACCES):
            raise ConfigError(f"--port {port}: {error.strerror}; --port 0 takes a free one") from error
        raise


class AppServer(ThreadingHTTPServer):
    """Serves the page and answers with detections, one image at a time."""

    daemon_threads = True

    def __init__(self, names: Sequence[str], detectors: "Sequence[ObjectDetector]", port: int) -> None:
        self.names, self.detectors = tuple(names), tuple(detectors)
        self.busy = threading.Lock()  # detectors and cores are shared
        super().__init__((HOST, port), _Handler)

    def about(self) -> dict[str, Any]:
        """What the page needs to know of the runs."""
        from aploss.plotting.style import class_colour

        runs = [
            {
                "name": name,
                "classes": [
                    {"name": one, "colour": class_colour(label)} for label, one in enumerate(detector.class_names)
                ],
                "threshold": detector.draw_threshold,
                "calibrated": detector.calibration is not None,
            }
            for name, detector in zip(self.names, self.detectors, strict=True)
        ]
        return {"runs": runs, "max_bytes": MAX_BYTES}

    def detect(self, content: bytes) -> dict[str, Any]:
        """All detections of each run in an image file, and the image as it was seen."""
        from torchvision.transforms.v2.functional import to_pil_image

        from aploss.data.images import ImageError, read_image

        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "image"
            file.write_bytes(content)
            try:
                image = read_image(file)
            except ImageError as error:
                raise ConfigError(error.detail) from error
        found = []
        with self.busy:
            for detector in self.detectors:
                start = time.perf_counter()
                (prediction,) = detector.predict(image, threshold=0.0)
                rows = zip(
                    prediction.labels.tolist(), prediction.scores.tolist(), prediction.boxes.tolist(), strict=True
                )
                found.append({"seconds": time.perf_counter() - start, "detections": list(rows)})
        picture = to_pil_image(image)
        picture.thumbnail((LONGEST_SHOWN, LONGEST_SHOWN))
        picture.save(buffer := io.BytesIO(), "JPEG", quality=90)
        shown = f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}"
        height, width = image.shape[1:]
        return {"width": width, "height": height, "picture": shown, "runs": found}


class _Handler(BaseHTTPRequestHandler):
    server: AppServer
    timeout = 60  # of a connection that says nothing

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        if not self._from_here():
            return
        if path == "/about":
            self._answer_json(200, self.server.about())
        elif path in PAGE:
            name, kind = PAGE[path]
            self._answer(200, kind, (files("aploss.cli") / "app_page" / name).read_bytes())
        else:
            self._refuse(404, "there is no such page")

    def do_POST(self) -> None:
        if not self._from_here():
            return
        length = self.headers.get("Content-Length", "")
        # Pages of other sites cannot send this header without being allowed to.
        if self.path != "/detect" or self.headers.get("X-Aploss") != "1":
            self._refuse(404, "images go to /detect")
        elif not length.isascii() or not length.isdecimal():
            self._refuse(411, "the length of the image is missing")
        elif int(length) > MAX_BYTES:
            size = f"{int(length) / 2**20:.0f} MB"
            self._refuse(413, f"the file has {size}, at most {MAX_BYTES // 2**20} MB are taken")
        else:
            self._detect(self.rfile.read(int(length)))

    def _detect(self, content: bytes) -> None:
        try:
            answer = self.server.detect(content)
        except AplossError as error:
            self._refuse(422, " ".join(str(error).splitlines()))
        except Exception as error:  # whatever it is, the server goes on and the page says it
            self._refuse(500, f"unexpected {type(error).__name__}: {' '.join(str(error).split())[:200]}")
        else:
            self._answer_json(200, answer)

    def _from_here(self) -> bool:
        """Refuses names that a stranger's address book leads to this machine."""
        host = self.headers.get("Host", "")
        allowed = host in (f"{name}:{self.server.server_port}" for name in (HOST, "localhost"))
        if not allowed:
            self._refuse(403, f"open http://{HOST}:{self.server.server_port}")
        return allowed

    def _refuse(self, status: int, reason: str) -> None:
        self.close_connection = True
        self._answer_json(status, {"error": reason})

    def _answer_json(self, status: int, document: Any) -> None:
        self._answer(status, "application/json", json.dumps(document).encode())

    def _answer(self, status: int, kind: str, content: bytes) -> None:
        self.send_response(status)
        headers = {"Content-Type": f"{kind}; charset=utf-8", "Content-Length": str(len(content)), **SECURITY}
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Requests are not worth a line."""


APP = Command(examples=EXAMPLES, add_arguments=_add_arguments, run=_run)
