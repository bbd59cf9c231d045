"""``aploss predict``: images found, files written, errors."""

import json
import shutil
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from aploss.cli.main import main
from aploss.cli.predict import find_images
from aploss.data import load_dataset
from aploss.detectors import Detector, load
from aploss.evaluation import voc_metrics

FILES = ["detections.json", "images.json", *(f"pictures/{name}" for name in ("a.jpg", "b.png", "more/a.jpg"))]


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

    assert sorted(path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()) == FILES
    truth = COCO(str(out / "images.json"))
    results = truth.loadRes(str(out / "detections.json"))
    assert [image["file_name"] for image in truth.dataset["images"]] == [
        str(photos / name) for name in ("a.jpg", "b.png", "more/a.jpg")
    ]
    assert [category["name"] for category in truth.dataset["categories"]] == list(load(run_folder).class_names)
    expected = load(run_folder).predict([photos / name for name in ("a.jpg", "b.png", "more/a.jpg")])
    for number, prediction in enumerate(expected, start=1):
        entries = results.loadAnns(results.getAnnIds(imgIds=[number]))
        assert 0 < len(entries) == len(prediction)
        assert [entry["score"] for entry in entries] == pytest.approx(prediction.scores.tolist())
        assert [entry["category_id"] - 1 for entry in entries] == prediction.labels.tolist()
        boxes = np.array([entry["bbox"] for entry in entries])
        boxes[:, 2:] += boxes[:, :2]
        np.testing.assert_allclose(boxes, prediction.boxes, atol=1e-2)
    assert f"{sum(map(len, expected))} objects in 3 images" in capsys.readouterr().out


def test_unreadable_images_are_skipped_and_listed_at_the_end(
    run_folder: Path, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (photos / "aa-broken.jpg").write_bytes((photos / "a.jpg").read_bytes()[:300])
    (photos / "empty.png").write_bytes(b"")
    out = tmp_path / "out"
    assert _run(run_folder, photos, "--out", out, "--batch-size", 2) == 1
    error = capsys.readouterr().err
    assert "2 images could not be read:" in error
    assert all(name in error for name in ("aa-broken.jpg", "empty.png"))
    assert len(json.loads((out / "images.json").read_text())["images"]) == 3


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


def test_files_folders_and_patterns_are_found_once(photos: Path) -> None:
    images = find_images([f"{photos}/**/*.jpg", str(photos), str(photos / "more")], exclude=photos / "pictures")
    assert [path.relative_to(photos).as_posix() for path in images] == ["a.jpg", "more/a.jpg", "b.png"]


@pytest.mark.regression("33a370e")
def test_a_stopped_command_resumes_and_gives_the_same_files(
    run_folder: Path, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused
) -> None:
    words = (run_folder, photos, "--batch-size", 1, "--quiet", "--out")
    assert _run(*words, tmp_path / "whole") == 0
    predict, seen, limit = Detector.predict, [], 2

    def stop_at_the_limit(detector, images, **options):
        if len(seen) == limit:
            raise KeyboardInterrupt
        seen.append(images)
        return predict(detector, images, **options)

    monkeypatch.setattr(Detector, "predict", stop_at_the_limit)
    out = tmp_path / "out"
    assert _run(*words, out) == 130
    assert "another command" in refused("predict", *words, out, "--threshold", "0.9", "--device", "cpu")
    limit = 99
    (photos / "a.jpg").touch()  # changed since: predicted again
    seen.clear()
    assert _run(*words, out) == 0
    assert len(seen) == 2
    assert sorted(path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()) == FILES
    for name in FILES:
        assert (out / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_memory_does_not_grow_with_the_detections(
    run_folder: Path, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = load(run_folder).predict([photos / "a.jpg"], threshold=0.0)[0]
    monkeypatch.setattr(Detector, "predict", lambda detector, images, **options: [found] * len(images))
    monkeypatch.setattr("aploss.progress.SECONDS_BETWEEN_LINES", float("inf"))  # a line imports more of rich: 8 MB
    peaks = []
    for count in (10, 60):
        for number in range(count):
            (tmp_path / str(count)).mkdir(exist_ok=True)
            shutil.copy(photos / "b.png", tmp_path / str(count) / f"{number}.png")
        tracemalloc.start()
        try:
            assert _run(run_folder, tmp_path / str(count), "--out", tmp_path / f"out-{count}", "--quiet") == 0
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
    assert len(found) == 100  # of which each takes about 300 bytes as Python objects
    assert peaks[1] - peaks[0] < 50 * 100 * 50


def test_results_have_a_folder_of_their_own_by_default(
    run_folder: Path, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for number in ("", "-2"):
        assert _run(run_folder / "checkpoints" / "best.pt", photos, "--quiet") == 0
        assert (tmp_path / "runs" / f"predict-best{number}" / "detections.json").is_file()


@pytest.fixture
def sparse_ids(shapes: Path, tmp_path: Path) -> Path:
    """The test split of the dataset with other ids, which have gaps as COCO's own."""
    data = shutil.copytree(shapes, tmp_path / "data")
    file = data / "annotations/instances_test.json"
    content = json.loads(file.read_text())
    for entry in content["images"] + content["categories"]:
        entry["id"] *= 7
    for entry in content["annotations"]:
        entry |= {"image_id": 7 * entry["image_id"], "category_id": 7 * entry["category_id"]}
    content["categories"].reverse()
    file.write_text(json.dumps(content))
    return data


def test_a_coco_submission_has_the_ids_of_the_annotations(
    run_folder: Path, sparse_ids: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], refused
) -> None:
    file = sparse_ids / "annotations/instances_test.json"
    # The server's own file lists images, but has no annotations.
    info = {key: value for key, value in json.loads(file.read_text()).items() if key != "annotations"}
    (tmp_path / "info.json").write_text(json.dumps(info))
    words = ("--submission", "coco", "--annotations", tmp_path / "info.json", "--out", tmp_path / "out", "--quiet")
    assert _run(run_folder, sparse_ids / "test", *words) == 0
    assert not (tmp_path / "out" / "pictures").exists()
    capsys.readouterr()
    assert main(["eval", str(run_folder), "--data", str(sparse_ids), "--iou", "0.1", "--json"]) == 0
    expected = json.loads(capsys.readouterr().out)["AP"]
    truth = COCO(str(file))
    evaluation = COCOeval(truth, truth.loadRes(str(tmp_path / "out/detections.json")), "bbox")
    evaluation.params.iouThrs = np.array([0.1])
    evaluation.evaluate()
    evaluation.accumulate()
    precision = evaluation.eval["precision"][0, :, :, 0, -1]
    assert 0 < precision[precision >= 0].mean() == pytest.approx(expected, abs=1e-6)
    file.write_text(json.dumps(info | {"images": info["images"][1:]}))
    others = ("--submission", "coco", "--annotations", file, "--out", tmp_path / "other")
    assert info["images"][0]["file_name"] in refused("predict", run_folder, sparse_ids / "test", *others)
    assert not (tmp_path / "other").exists()
    assert "--annotations" in refused("predict", run_folder, sparse_ids / "test", "--submission", "coco")


def test_plain_detections_are_not_evaluated_by_the_ids_of_other_images(
    run_folder: Path, sparse_ids: Path, tmp_path: Path, refused
) -> None:
    file = sparse_ids / "annotations/instances_test.json"
    content = json.loads(file.read_text())
    for entry in content["images"] + content["categories"]:
        entry["id"] //= 7
    content["images"][0]["id"], content["images"][1]["id"] = content["images"][1]["id"], content["images"][0]["id"]
    file.write_text(json.dumps(content | {"annotations": []}))
    assert _run(run_folder, sparse_ids / "test", "--out", tmp_path / "out", "--quiet") == 0
    line = refused("eval", "--annotations", file, "--detections", tmp_path / "out/detections.json")
    assert "--submission coco" in line


def test_a_voc_submission_scores_as_the_run_in_eval(
    run_folder: Path, shapes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], refused
) -> None:
    data, out = tmp_path / "voc", tmp_path / "out"
    assert main(["data", "convert", str(shapes), "--to", "voc", "--out", str(data)]) == 0
    stems = (data / "ImageSets/Main/test.txt").read_text().split()
    images = [next((data / "JPEGImages").glob(f"{stem}.*")) for stem in stems]
    assert _run(run_folder, *images, "--submission", "voc", "--out", out, "--quiet") == 0
    capsys.readouterr()
    words = ["eval", str(run_folder), "--data", str(data), "--split", "test", "--metric", "voc07", "--iou", "0.1"]
    assert main([*words, "--json"]) == 0
    per_class = json.loads(capsys.readouterr().out)["per_class"]
    expected = {name: row["AP"] for name, row in per_class.items() if row["objects"]}
    assert any(expected.values())
    split, rows = load_dataset(data, "test"), []
    for category, name in enumerate(split.class_names, start=1):
        for line in (out / f"comp4_det_test_{name}.txt").read_text().splitlines():
            image, score, *corners = line.split(" ")
            x1, y1, x2, y2 = (float(corner) - start for corner, start in zip(corners, (1, 1, 0, 0), strict=True))
            place = [Path(path).stem for path in split.image_paths].index(image)
            box = {"bbox": [x1, y1, x2 - x1, y2 - y1], "score": float(score)}
            rows.append({"image_id": int(split.image_ids[place]), "category_id": category, **box})
    found = voc_metrics(split.annotations, rows, year=2007, iou=0.1).per_class
    assert {name: found[name]["AP"] for name in expected} == pytest.approx(expected, abs=1e-6)
    assert len(list(out.glob("comp4_det_test_*.txt"))) == len(load(run_folder).class_names)
    (tmp_path / "more").mkdir()
    shutil.copy(images[0], tmp_path / "more")
    line = refused("predict", run_folder, images[0], tmp_path / "more", "--submission", "voc", "--out", out)
    assert images[0].stem in line
