"""``aploss app``: the callbacks behind the page, its limits, and the served page itself."""

import json
import threading
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from aploss.cli.app import COLUMNS, MAX_FILE_MB, MAX_IMAGES, MAX_WAITING, App, model_card, sample_images
from aploss.detectors import Detector
from aploss.errors import ConfigError
from aploss.files import write_json
from aploss.training import Summary, load_config
from aploss.training.run_folder import RunFolder

RUNS = ("runs/first", "runs/<b>second</b>")


@pytest.fixture(scope="module", autouse=True)
def gradio() -> None:
    """Imported by the process that runs these tests alone: it takes seconds."""
    pytest.importorskip("gradio", reason="gradio is not installed (extra `app`)")


@pytest.fixture(scope="module")
def app(random_detector: Callable[[int], Detector]) -> App:
    return App({run: random_detector(seed) for seed, run in enumerate(RUNS)})


@pytest.fixture
def photo(tmp_path: Path) -> str:
    pixels = np.random.default_rng(0).integers(0, 256, (60, 80, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "photo.png")
    return str(tmp_path / "photo.png")


def test_detections_of_both_runs_are_drawn_listed_and_downloadable(app: App, photo: str) -> None:
    *galleries, rows, file = app.detect([photo, photo], 0.5, 0.5)
    for (run, detector), gallery in zip(app.detectors.items(), galleries, strict=True):
        (expected,) = detector.predict(photo)
        assert [caption for _, caption in gallery] == [f"photo.png: {len(expected)} detections"] * 2
        assert [row[1] for row in rows if row[-1] == run][: len(expected)] == pytest.approx(
            expected.scores.tolist(), abs=1e-4
        )
    assert json.loads(Path(file).read_text()) == [dict(zip(COLUMNS, row, strict=True)) for row in rows]


def test_the_threshold_moves_without_another_prediction(app: App, photo: str, monkeypatch: pytest.MonkeyPatch) -> None:
    app.detect([photo], 0.5, 0.5)
    monkeypatch.setattr(Detector, "predict", None)
    assert len(app.detect([photo], 0.0, 0.0)[2]) == 200  # 100 of each run
    assert {row[-1] for row in app.detect([photo], 1.0, 0.0)[2]} == {RUNS[1]}
    assert app.detect(None, 0.5, 0.5)[2] == []  # all images are removed


@pytest.mark.regression("33a370e")
def test_unusable_uploads_are_one_line_with_the_name_of_the_file(
    app: App, photo: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "notes.png").write_text("not an image")
    (tmp_path / "cut.png").write_bytes(Path(photo).read_bytes()[:500])
    for name, side in (("large.png", 5001), ("bomb.png", 20000)):
        Image.new("1", (side, side)).save(tmp_path / name)
    for name in ("notes.png", "cut.png", "large.png", "bomb.png"):
        if name == "large.png":
            monkeypatch.setattr(Image.Image, "load", None)  # the header is enough to reject it
        with pytest.raises(ConfigError, match=rf"^{name}: [^\n]*$"):
            app.detect([str(tmp_path / name)], 0.5, 0.5)
    with pytest.raises(ConfigError, match=str(MAX_IMAGES)):
        app.detect([photo] * (MAX_IMAGES + 1), 0.5, 0.5)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """A run that has been started."""
    run = RunFolder(tmp_path / "run")
    run.create(load_config("demo"))
    return run


def test_the_model_card_has_loss_and_ap_of_the_run_folder(
    random_detector: Callable[[int], Detector], folder: RunFolder
) -> None:
    detector = random_detector(0)
    assert "<b>" not in model_card(RUNS[1], detector)
    assert "<th>loss" not in model_card(str(folder.path), detector)
    values = dict.fromkeys(Summary.__dataclass_fields__)
    numbers = {"AP": 0.5, "split": "<i>test</i>", "loss": "focal", "per_class": {}, "unreadable_images": {}}
    write_json(folder.summary_file, values | numbers)
    card = model_card(str(folder.path / "checkpoints" / "best.pt"), detector)
    for text in ("Focal loss", "50.0 % on &lt;i&gt;test", str(datetime.now().astimezone().year), *detector.class_names):
        assert text in card


def test_samples_are_images_of_the_evaluation_split(photo: str, folder: RunFolder, tmp_path: Path) -> None:
    assert sample_images([str(tmp_path)]) == []
    (tmp_path / "secret.txt").write_text("not an image")
    (tmp_path / "endless.png").symlink_to("/dev/zero")
    paths = [photo, *(str(tmp_path / name) for name in ("secret.txt", "endless.png"))]
    images = [{"id": k, "path": path} for k, path in enumerate(paths)]
    write_json(folder.evaluation / "ground_truth.json", {"images": images})
    assert [Path(path).read_bytes() for path in sample_images([RUNS[0], str(folder.path)])] == [
        Path(photo).read_bytes()
    ]


@pytest.mark.regression("33a370e")
def test_one_request_runs_at_a_time_and_a_limited_number_waits(
    app: App, photo: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import httpx

    running, most, finish = 0, 0, threading.Event()

    def slow(*arguments: object, **options: object) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        finish.wait(60)
        running -= 1
        raise ConfigError("stopped")

    monkeypatch.setattr(Detector, "predict", slow)
    with app.serve(0) as address, httpx.Client(base_url=f"{address}gradio_api", timeout=60) as client:
        (path,) = client.post("/upload", files={"files": ("photo.png", Path(photo).read_bytes())}).json()
        data = [[{"path": path, "meta": {"_type": "gradio.FileData"}}], 0.5, 0.5]
        codes = [client.post("/call/detect", json={"data": data}).status_code for _ in range(MAX_WAITING + 10)]
        finish.set()
    assert most == 1
    assert 0 < codes.count(503) < 11, codes


@pytest.mark.regression("33a370e")
def test_a_malformed_request_is_one_line_on_the_terminal(app: App, capfd: pytest.CaptureFixture[str]) -> None:
    import httpx

    data = [[], [1, 2, 3, 4], [[1], "x", 0.5], [None, "high", 0.5]]
    data.append([[{"path": "/etc/passwd", "meta": {"_type": "gradio.FileData"}}], 0.5, 0.5])
    with app.serve(0) as address, httpx.Client(base_url=f"{address}gradio_api", timeout=60) as client:
        for values in data:
            event = client.post("/call/detect", json={"data": values}).json()["event_id"]
            assert "event: error" in client.get(f"/call/detect/{event}").text
        assert client.post("/call/detect", content=b"[" * 10_000).status_code in (400, 422)
        for path in ("call/nothing", "run/predict"):
            assert httpx.post(f"{address}gradio_api/{path}", json={"data": [], "fn_index": 99}).status_code == 500
    lines = [line for line in capfd.readouterr().err.splitlines() if "Warning" not in line and not line.startswith(" ")]
    assert len(lines) == len(data) + 2
    assert all("request refused: " in line for line in lines)


def test_the_page_is_served_to_this_machine_only_and_answers_the_client(
    app: App, photo: str, tmp_path: Path, refused: Callable[..., str], run_folder: Path
) -> None:
    import httpx
    from gradio_client import Client, handle_file
    from gradio_client.exceptions import AppError

    with app.serve(0) as address:
        assert address.startswith("http://127.0.0.1:")
        page = httpx.get(address).text
        for host in ("fonts.googleapis.com", "cdnjs.cloudflare.com", "gradio.live"):
            assert host not in page
        assert httpx.get(address, headers={"Host": "evil.example"}).status_code == 400
        client = Client(address, verbose=False, download_files=str(tmp_path))
        *galleries, table, file = client.predict([handle_file(photo)], 0.0, 0.0, api_name="/detect")
        assert [len(gallery) for gallery in galleries] == [1, 1]
        assert len(table["data"]) == len(json.loads(Path(file).read_text())) == 200
        Path(photo).write_bytes(b"not an image")
        with pytest.raises(AppError, match=r"photo\.png: "):
            client.predict([handle_file(photo)], 0.5, 0.5, api_name="/detect")
        large = {"files": ("large.png", bytes(MAX_FILE_MB * 2**20 + 1))}
        assert httpx.post(f"{address}gradio_api/upload", files=large).status_code == 413
        port = address.rstrip("/").rpartition(":")[2]
        assert f"--port {port}" in refused("app", run_folder, "--port", port)
    assert "--port 70000" in refused("app", run_folder, "--port", 70000)


def test_urls_in_requests_are_never_resolved(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    import httpx
    import safehttpx

    requested: list[str] = []

    async def record(host: str) -> str:
        requested.append(host)
        raise ValueError("no download in a test")

    monkeypatch.setattr(safehttpx, "async_validate_url", record)
    url = "http://images.example/photo.png"
    file = {"path": url, "url": url, "meta": {"_type": "gradio.FileData"}}
    with app.serve(0) as address, httpx.Client(base_url=f"{address}gradio_api", timeout=60) as client:
        for data in ([[file], 0.5, 0.5], [[], file, 0.5], [[], 0.5, {"nested": [file]}]):
            event = client.post("/call/detect", json={"data": data}).json()["event_id"]
            assert "event: error" in client.get(f"/call/detect/{event}").text
        for path in (url, "HTTPS://images.example/photo.png", "http%3A//images.example/photo.png"):
            assert client.get(f"/file={path}").status_code == 403
            assert httpx.get(f"{address}file={path}").status_code in (403, 404)
    assert requested == []
