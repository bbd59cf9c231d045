"""`aploss app` in a real browser, and what its server refuses."""

import base64
import http.client
import io
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from chromium import browser  # noqa: F401 - a fixture
from PIL import Image

from aploss.cli.app import MAX_BYTES, AppServer, make_server
from aploss.cli.main import main
from aploss.detectors import Detector, build_detector
from aploss.errors import ConfigError
from aploss.evaluation import Calibration

NAMES = ("runs/first", "runs/<b>second</b>")  # texts of strangers are shown as they are
SIZES = {"phone": (390, 844), "desktop": (1440, 900)}
DROP = """(async () => {
  const bytes = Uint8Array.from(atob("%s"), (one) => one.charCodeAt(0));
  const transfer = new DataTransfer();
  transfer.items.add(new File([bytes], "%s"));
  document.dispatchEvent(new DragEvent("drop", { dataTransfer: transfer, bubbles: true, cancelable: true }));
  for (let wait = 0; wait < 600; wait++) {
    await new Promise((done) => setTimeout(done, 100));
    if (!/looking at/.test(document.getElementById("status").textContent)) break;
  }
  return document.getElementById("status").textContent;
})()"""
SHOWN = """(() => ({
  boxes: [...document.querySelectorAll("section")].map((one) => one.querySelectorAll("rect.box").length),
  names: [...document.querySelectorAll("h2")].map((one) => one.textContent),
  about: [...document.querySelectorAll(".about")].map((one) => one.textContent),
  columns: new Set([...document.querySelectorAll("section")].map((one) => one.getBoundingClientRect().left)).size,
  wider: document.documentElement.scrollWidth - document.documentElement.clientWidth,
  bold: document.querySelectorAll("b").length,
}))()"""
MOVE = """(() => {
  const slider = document.getElementById("threshold");
  slider.value = %s;
  slider.dispatchEvent(new Event("input"));
})()"""


def _detector(seed: int) -> Detector:
    torch.manual_seed(seed)
    detector = build_detector("retinanet-tiny", class_names=["cat", "dog"], test_size=(64, 128))
    for weight in detector.head.parameters():
        if weight.ndim > 1:
            torch.nn.init.normal_(weight, std=0.05)
    detector.calibration = Calibration(x=[0.0, 0.07, 1.0], y=[0.0, 0.5, 0.9])
    detector.draw_threshold = 0.5
    return detector.eval()


@pytest.fixture(scope="module")
def server() -> Iterator[AppServer]:
    with make_server(NAMES, [_detector(0), _detector(1)]) as one:
        threading.Thread(target=one.serve_forever, daemon=True).start()
        yield one
        one.shutdown()


@pytest.fixture(scope="module")
def png() -> bytes:
    pixels = np.random.default_rng(0).integers(0, 256, (60, 80, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(buffer := io.BytesIO(), "PNG")
    return buffer.getvalue()


def _post(server: AppServer, body: bytes, **headers: str) -> tuple[int, dict[str, Any]]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    connection.request(
        "POST", "/detect", body, {"X-Aploss": "1", **{k.replace("_", "-"): v for k, v in headers.items()}}
    )
    answer = connection.getresponse()
    return answer.status, json.loads(answer.read())


def test_an_image_is_dropped_once_and_the_threshold_moves_in_the_page(
    browser: Any,  # noqa: F811
    server: AppServer,
    png: bytes,
) -> None:
    image = np.asarray(Image.open(io.BytesIO(png)))
    scores = [detector.predict(image, threshold=0.0)[0].scores for detector in server.detectors]
    address = f"http://127.0.0.1:{server.server_port}/"
    for name, (width, height) in SIZES.items():
        browser.open(address, width, height)
        assert browser.evaluate(DROP % (base64.b64encode(png).decode(), "photo.png")) == "photo.png: 80 x 60 pixels"
        for threshold in (0.5, 0.55, 0.0):
            browser.evaluate(MOVE % threshold)
            shown = browser.evaluate(SHOWN)
            assert shown["boxes"] == [int((one >= threshold).sum()) for one in scores]
        assert len({*shown["boxes"]} | {100}) == 1  # all of them at threshold 0
        assert shown["names"] == list(NAMES)
        assert shown["bold"] == 0
        assert shown["columns"] == (2 if name == "desktop" else 1)  # side by side where there is room
        assert shown["wider"] == 0
        asked = browser.requests()
        assert all(one.startswith(address) for one in asked)
        assert sum(one.endswith("/detect") for one in asked) == 1
        assert browser.faults() == []


def test_damaged_and_large_files_are_refused_with_a_line_in_the_page(
    browser: Any,  # noqa: F811
    server: AppServer,
    png: bytes,
) -> None:
    browser.open(f"http://127.0.0.1:{server.server_port}/", *SIZES["phone"])
    damaged = base64.b64encode(png[:500]).decode()
    assert "broken.png: damaged image" in browser.evaluate(DROP % (damaged, "broken.png"))
    assert "notes.txt: not an image" in browser.evaluate(DROP % (base64.b64encode(b"notes").decode(), "notes.txt"))
    large = browser.evaluate(f"""(() => {{
      const transfer = new DataTransfer();
      transfer.items.add(new File([new Uint8Array({MAX_BYTES + 1})], "large.png"));
      document.dispatchEvent(new DragEvent("drop", {{ dataTransfer: transfer }}));
      return new Promise((done) => setTimeout(() => done(document.getElementById("status").textContent), 100));
    }})()""")
    assert large == "large.png: the file has 32 MB, at most 32 MB are taken"
    assert "photo.png: 80" in browser.evaluate(DROP % (base64.b64encode(png).decode(), "photo.png"))  # it goes on


def test_the_server_answers_with_all_detections_and_the_upright_image(server: AppServer, png: bytes) -> None:
    image = Image.open(io.BytesIO(png)).convert("RGB")
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by a quarter
    image.save(buffer := io.BytesIO(), "JPEG", exif=exif)
    status, answer = _post(server, buffer.getvalue())
    assert status == 200
    assert (answer["width"], answer["height"]) == (60, 80)
    picture = Image.open(io.BytesIO(base64.b64decode(answer["picture"].partition(",")[2])))
    assert picture.size == (60, 80)
    expected = server.detectors[0].predict(Image.open(buffer), threshold=0.0)[0]
    for (label, score, box), *row in zip(
        answer["runs"][0]["detections"], expected.labels, expected.scores, expected.boxes, strict=True
    ):
        assert (label, score, box) == (row[0].item(), row[1].item(), row[2].tolist())


def test_requests_from_elsewhere_and_what_is_no_image_are_refused(server: AppServer, png: bytes) -> None:
    assert server.server_address[0] == "127.0.0.1"
    assert _post(server, png, Host="evil.example")[0] == 403
    assert _post(server, png, X_Aploss="0")[0] == 404  # what another site's page would send
    status, answer = _post(server, b"", Content_Length=str(MAX_BYTES + 1))
    assert (status, answer["error"]) == (413, "the file has 32 MB, at most 32 MB are taken")
    status, answer = _post(server, b"no image")
    assert status == 422
    assert answer["error"].startswith("not an image")
    Image.new("1", (20000, 20000)).save(bomb := io.BytesIO(), "PNG")
    status, answer = _post(server, bomb.getvalue())
    assert status == 422
    assert "decompression bomb" in answer["error"]


def test_mistakes_end_in_one_line(server: AppServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match=f"--port {server.server_port}: .*--port 0 takes a free one"):
        make_server(NAMES, server.detectors, port=server.server_port)
    assert main(["app", str(tmp_path), "--port", "70000"]) == 2
    assert main(["app", str(tmp_path / "nowhere")]) == 2
    told = capsys.readouterr().err
    assert "--port 70000: must be from 0 to 65535" in told
    assert "nowhere" in told
    assert told.count("\n") == 2
