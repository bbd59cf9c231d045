"""``aploss predict``: images found, files written, errors."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from pycocotools.coco import COCO

from aploss.cli.main import main
from aploss.cli.predict import find_images
from aploss.data.voc import parse_annotation
from aploss.data.yolo import parse_row
from aploss.detectors import load


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
    assert [category["name"] for category in truth.dataset["categories"]] == list(load(run_folder).class_names)
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
    assert f"{sum(map(len, expected))} objects in 3 images" in capsys.readouterr().out


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


def test_unreadable_images_are_skipped_and_listed_at_the_end(
    run_folder: Path, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (photos / "aa-broken.jpg").write_bytes((photos / "a.jpg").read_bytes()[:300])
    (photos / "empty.png").write_bytes(b"")
    out = tmp_path / "out"
    assert _run(run_folder, photos, "--out", out, "--batch-size", 2) == 1
    error = capsys.readouterr().err
    assert "2 could not be used:" in error
    assert all(name in error for name in ("aa-broken.jpg", "empty.png"))
    assert len(json.loads((out / "images.json").read_text())["images"]) == 3


def test_yolo_labels_hold_the_detections(run_folder: Path, photos: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert _run(run_folder, photos, "--out", out, "--labels", "yolo") == 0
    assert (out / "labels" / "classes.txt").read_text().splitlines() == list(load(run_folder).class_names)
    (prediction,) = load(run_folder).predict(photos / "more" / "a.jpg")
    rows = (out / "labels" / "more" / "a.txt").read_text().splitlines()
    assert len(rows) == len(prediction) > 0
    for row, label, box in zip(rows, prediction.labels, prediction.boxes, strict=True):
        class_id, corners = parse_row(row, (80, 60), where=("a.txt", 1))
        assert class_id == int(label)
        assert corners == pytest.approx(box.tolist(), abs=1e-3)


def test_voc_labels_hold_the_detections(run_folder: Path, photos: Path, tmp_path: Path) -> None:
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


def test_results_inside_the_folder_are_not_processed_again(run_folder: Path, photos: Path) -> None:
    for _ in range(2):
        assert _run(run_folder, photos, "--out", photos / "found", "--quiet") == 0
    assert len(json.loads((photos / "found" / "images.json").read_text())["images"]) == 3


def test_quiet_prints_nothing(
    run_folder: Path, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run(run_folder, photos, "--out", tmp_path, "--quiet") == 0
    captured = capsys.readouterr()
    assert captured.out == captured.err == ""


def test_files_folders_and_patterns_are_found_once_with_different_names(photos: Path) -> None:
    images = find_images([f"{photos}/**/*.jpg", str(photos), str(photos / "more")], exclude=photos / "pictures")
    names = {path.relative_to(photos).as_posix(): name for path, name in images.items()}
    assert list(names.items()) == [("a.jpg", "a"), ("more/a.jpg", "a-2"), ("b.png", "b")]
