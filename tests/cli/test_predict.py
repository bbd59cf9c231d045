"""`aploss predict`, from the command line to the files."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from pycocotools.coco import COCO

from aploss.cli.main import main
from aploss.cli.predict import find_images
from aploss.data.voc import parse_annotation
from aploss.data.yolo import parse_row
from aploss.detectors import build_detector, load, save_detector
from aploss.evaluation.calibration import Calibration

CLASSES = ("red cell", "white cell")


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a random detector, calibrated so that about half of its detections are drawn."""
    torch.manual_seed(0)
    detector = build_detector("retinanet-tiny", class_names=CLASSES, test_size=(64, 128))
    for layer in (detector.head.classification_head, detector.head.regression_head):
        for weight in layer.parameters():
            if weight.ndim > 1:
                torch.nn.init.normal_(weight, std=0.05)
    detector.calibration = Calibration(x=[0.0, 0.07, 1.0], y=[0.0, 0.5, 0.9])
    detector.draw_threshold = 0.5
    folder = tmp_path_factory.mktemp("run")
    save_detector(detector, folder / "checkpoints" / "best.pt")
    return folder


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    folder = tmp_path / "photos"
    (folder / "more").mkdir(parents=True)
    generator = np.random.default_rng(0)
    for name, size in (("a.jpg", (60, 80)), ("b.png", (50, 50)), ("more/a.jpg", (60, 80))):
        pixels = generator.integers(0, 256, (*size, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / name)
    (folder / "notes.txt").write_text("not an image")
    return folder


def _run(*arguments: object) -> int:
    return main(["predict", *map(str, arguments), "--device", "cpu"])


def test_a_folder_gives_pictures_and_coco_results(
    run_folder: Path, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert _run(run_folder, photos, "--out", out) == 0

    pictures = sorted(p.relative_to(out).as_posix() for p in out.rglob("*") if p.is_file())
    assert pictures == [
        "detections.json", "images.json",
        "pictures/a.jpg", "pictures/b.png", "pictures/more/a.jpg",
    ]  # fmt: skip
    truth = COCO(str(out / "images.json"))
    results = truth.loadRes(str(out / "detections.json"))
    assert [image["file_name"] for image in truth.dataset["images"]] == [
        str(photos / name) for name in ("a.jpg", "b.png", "more/a.jpg")
    ]
    assert [category["name"] for category in truth.dataset["categories"]] == list(CLASSES)
    files = [photos / name for name in ("a.jpg", "b.png", "more/a.jpg")]
    expected = load(run_folder).predict(files)
    for number, prediction in enumerate(expected, start=1):
        entries = results.loadAnns(results.getAnnIds(imgIds=[number]))
        assert 0 < len(entries) == len(prediction)
        for entry, score, label, box in zip(
            entries, prediction.scores, prediction.labels, prediction.boxes, strict=True
        ):
            assert entry["score"] == pytest.approx(float(score))
            assert entry["category_id"] == int(label) + 1
            left, top, width, height = entry["bbox"]
            corners = (left, top, left + width, top + height)
            assert corners == pytest.approx(box.tolist(), abs=1e-2)
    shown, told = capsys.readouterr()
    assert "next: aploss eval --annotations ANNOTATIONS.json --detections " in told
    objects = sum(map(len, expected))
    assert f"{objects} objects in 3 images with a score of at least 0.50" in shown


def test_boxes_are_drawn_with_class_and_score(run_folder: Path, photos: Path, tmp_path: Path) -> None:
    _run(run_folder, photos / "b.png", "--out", tmp_path / "some")
    _run(run_folder, photos / "b.png", "--out", tmp_path / "none", "--threshold", "0.99")
    some, none = (
        np.asarray(Image.open(tmp_path / folder / "pictures" / "b.png")).astype(int) for folder in ("some", "none")
    )
    assert some.shape == none.shape
    assert np.abs(some - none).max() > 100
    original = np.asarray(Image.open(photos / "b.png").resize(none.shape[1::-1], Image.LANCZOS))
    assert np.array_equal(none, original)


def test_unreadable_images_are_passed_over_and_listed_at_the_end(
    run_folder: Path, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (photos / "aa-broken.jpg").write_bytes((photos / "a.jpg").read_bytes()[:300])
    (photos / "empty.png").write_bytes(b"")
    out = tmp_path / "out"
    assert _run(run_folder, photos, photos / "gone.jpg", "--out", out, "--batch-size", 2) == 1
    told = capsys.readouterr().err
    assert "3 could not be used:" in told
    assert "aa-broken.jpg: damaged image" in told
    assert "empty.png: the image file is empty" in told
    assert "gone.jpg: no such image file or folder" in told
    assert len(json.loads((out / "images.json").read_text())["images"]) == 3


def test_yolo_labels_say_what_was_found(run_folder: Path, photos: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert _run(run_folder, photos, "--out", out, "--labels", "yolo") == 0
    assert (out / "labels" / "classes.txt").read_text().splitlines() == list(CLASSES)
    (prediction,) = load(run_folder).predict(photos / "more" / "a.jpg")
    rows = (out / "labels" / "more" / "a.txt").read_text().splitlines()
    assert len(rows) == len(prediction) > 0
    for row, label, box in zip(rows, prediction.labels, prediction.boxes, strict=True):
        class_id, corners = parse_row(row, (80, 60), where=("a.txt", 1))
        assert class_id == int(label)
        assert corners == pytest.approx(box.tolist(), abs=1e-3)


def test_voc_labels_say_what_was_found(run_folder: Path, photos: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert _run(run_folder, photos, "--out", out, "--labels", "voc") == 0
    (prediction,) = load(run_folder).predict(photos / "b.png")
    annotation = parse_annotation("b.xml", (out / "labels" / "b.xml").read_bytes())
    assert annotation.file_name == "b.png"
    assert annotation.size == (50, 50)
    assert not annotation.problems
    assert len(annotation.objects) == len(prediction) > 0
    for found, name, box in zip(annotation.objects, prediction.class_names, prediction.boxes, strict=True):
        assert found.name == name
        assert found.corners == pytest.approx(box.tolist(), abs=0.006)


def test_a_threshold_of_zero_reports_everything(run_folder: Path, photos: Path, tmp_path: Path) -> None:
    assert _run(run_folder, photos / "a.jpg", "--out", tmp_path, "--threshold", 0) == 0
    assert len(json.loads((tmp_path / "detections.json").read_text())) == 100


def test_several_scales_find_other_boxes(run_folder: Path, photos: Path, tmp_path: Path) -> None:
    for folder, more in (("one", []), ("many", ["--multi-scale"])):
        _run(run_folder, photos / "a.jpg", "--out", tmp_path / folder, "--threshold", 0, *more)
    one, many = (json.loads((tmp_path / folder / "detections.json").read_text()) for folder in ("one", "many"))
    assert len(many) == 100
    assert many[0]["score"] >= one[0]["score"]
    assert many != one


def test_results_inside_the_folder_are_not_looked_at_again(run_folder: Path, photos: Path) -> None:
    for _ in range(2):
        assert _run(run_folder, photos, "--out", photos / "found", "--quiet") == 0
    assert len(json.loads((photos / "found" / "images.json").read_text())["images"]) == 3


def test_quiet_says_nothing(run_folder: Path, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(run_folder, photos, "--out", tmp_path, "--quiet") == 0
    captured = capsys.readouterr()
    assert captured.out == captured.err == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{run}", "{photos}/none*.jpg"], "no image matches"),
        (["{photos}", "{photos}"], "is it a run folder"),
        (["nowhere", "{photos}"], "there is no run folder or checkpoint nowhere"),
        (["nowhere.onnx", "{photos}"], "there is no file nowhere.onnx"),
        (["{run}", "{photos}", "--batch-size", "0"], "--batch-size 0"),
        (["{run}", "{photos}", "--out", "{photos}/a.jpg"], "cannot be written"),
    ],
)
def test_mistakes_end_in_one_line_and_exit_code_2(
    arguments: list[str], message: str, run_folder: Path, photos: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    words = [word.format(run=run_folder, photos=photos) for word in arguments]
    out = [] if "--out" in words else ["--out", tmp_path / "out"]
    assert _run(*words, *out) == 2
    told = capsys.readouterr().err
    assert message in told
    assert told.count("\n") == 1


def test_files_folders_and_patterns_are_found_once_with_different_names(photos: Path) -> None:
    images, problems = find_images([f"{photos}/**/*.jpg", str(photos), str(photos / "more"), f"{photos}/*.gif"])
    assert [(image.path.relative_to(photos).as_posix(), image.name) for image in images] == [
        ("a.jpg", "a"),
        ("more/a.jpg", "a-2"),
        ("b.png", "b"),
    ]
    assert problems == [f"{photos}/*.gif: no image matches"]
