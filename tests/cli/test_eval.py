"""The eval command: what it prints, writes and refuses."""

import json
import shutil
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from aploss.cli.main import main
from aploss.evaluation.metrics import coco_metrics, voc_metrics
from aploss.training.splits import detect_split

TRUTH = {
    "images": [{"id": 1, "width": 200, "height": 200}, {"id": 2, "width": 200, "height": 200}],
    "categories": [{"id": 1, "name": "cell"}, {"id": 2, "name": "dust"}, {"id": 3, "name": "hair"}],
    "annotations": [
        {"id": 1, "image_id": 1, "category_id": 1, "bbox": [0, 0, 40, 40], "iscrowd": 0},
        {"id": 2, "image_id": 1, "category_id": 1, "bbox": [80, 0, 40, 40], "iscrowd": 0},
        {"id": 3, "image_id": 2, "category_id": 2, "bbox": [0, 80, 20, 20], "iscrowd": 0},
    ],
}
RESULTS = [
    {"image_id": 1, "category_id": 1, "bbox": [0, 0, 40, 36], "score": 0.9},
    {"image_id": 2, "category_id": 1, "bbox": [50, 50, 40, 40], "score": 0.8},
    {"image_id": 1, "category_id": 1, "bbox": [80, 0, 30, 40], "score": 0.7},
    {"image_id": 2, "category_id": 2, "bbox": [0, 80, 20, 20], "score": 0.2},
]


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    return write(tmp_path, TRUTH, RESULTS)


def write(folder: Path, truth, results) -> list[str]:
    (folder / "gt.json").write_text(json.dumps(truth))
    (folder / "dets.json").write_text(json.dumps(results))
    return [f"--annotations={folder / 'gt.json'}", f"--detections={folder / 'dets.json'}"]


def evaluate(*arguments: str) -> int:
    return main(["eval", *arguments])


def test_the_table_shows_every_class_and_the_mean(files, capsys):
    assert evaluate(*files) == 0
    output = capsys.readouterr().out
    assert "COCO metrics, IoU 0.50:0.95: 2 images, 3 objects, 4 detections" in output
    rows = {line.split()[0]: line.split() for line in output.splitlines() if line.strip()}
    # cell: right, wrong, right at IoU 0.5: 51 recall points of 1, 50 of 2/3
    assert float(rows["cell"][4]) == pytest.approx((51 + 50 * 2 / 3) / 101, abs=5e-4)
    assert rows["dust"][3:6] == ["1.000", "1.000", "1.000"]
    assert set(rows["hair"][3:]) == {"-"}
    assert float(rows["mean"][3]) == pytest.approx(coco_metrics(TRUTH, RESULTS).AP, abs=5e-4)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], coco_metrics(TRUTH, RESULTS)),
        (["--iou=0.6"], coco_metrics(TRUTH, RESULTS, iou=0.6)),
        (["--max-detections=1"], coco_metrics(TRUTH, RESULTS, max_detections=1)),
        (["--metric=voc07"], voc_metrics(TRUTH, RESULTS, year=2007)),
        (["--metric=voc12"], voc_metrics(TRUTH, RESULTS, year=2012)),
        (["--metric=voc12", "--iou=0.8"], voc_metrics(TRUTH, RESULTS, year=2012, iou=0.8)),
    ],
)
def test_json_is_one_object_with_the_metrics(arguments, expected, files, capfd):
    assert evaluate(*files, "--json", *arguments) == 0
    printed = capfd.readouterr()
    assert json.loads(printed.out) == {**expected.as_dict(), "ignored_objects": 0}
    assert printed.out.count("\n") == 1
    assert printed.err == ""


@pytest.mark.parametrize("metric", ["coco", "voc07"])
def test_out_writes_metrics_and_curves(metric, files, tmp_path, capfd):
    folder = tmp_path / "deep" / "scores"
    assert evaluate(*files, f"--out={folder}", "--json", f"--metric={metric}") == 0
    printed = json.loads(capfd.readouterr().out)
    written = json.loads((folder / "metrics.json").read_text())
    assert printed.items() <= written.items()
    assert written["precision_recall"].keys() == {"cell", "dust"}
    assert len(written["precision_recall"]["cell"]["precision"]) == 101
    assert ElementTree.parse(folder / "precision-recall.svg").getroot().tag.endswith("svg")
    assert len(list(folder.iterdir())) == 2  # no temporary file is left


def test_without_any_object_there_are_metrics_and_no_curves(tmp_path, capsys):
    files = write(tmp_path, {**TRUTH, "annotations": []}, RESULTS)
    assert evaluate(*files, f"--out={tmp_path / 'scores'}", "--json") == 0
    assert json.loads(capsys.readouterr().out)["AP"] is None
    assert [path.name for path in (tmp_path / "scores").iterdir()] == ["metrics.json"]


class TestRun:
    """A run is evaluated on data, at an IoU at which even a random detector finds something."""

    IOU = ("--iou", "0.1", "--json")

    @pytest.mark.regression("33a370e")
    def test_objects_of_unknown_classes_are_refused_or_counted(self, run_folder, shapes, tmp_path, capsys, refused):
        data = shutil.copytree(shapes, tmp_path / "data")
        file = data / "annotations/instances_test.json"
        truth = json.loads(file.read_text())
        renamed = truth["categories"][0] | {"name": truth["categories"][0]["name"].capitalize()}
        file.write_text(json.dumps(truth | {"categories": [renamed, *truth["categories"][1:]]}))
        count = sum(one["category_id"] == renamed["id"] for one in truth["annotations"])
        words = ["eval", run_folder, "--data", data, "--device", "cpu"]
        line = refused(*words)
        assert all(name in line for name in (renamed["name"], truth["categories"][0]["name"]))
        out = tmp_path / "scores"
        assert main([*map(str, words), "--json", f"--out={out}", "--ignore-unknown-classes"]) == 0
        printed = json.loads(capsys.readouterr().out)
        assert printed["ignored_objects"] == json.loads((out / "metrics.json").read_text())["ignored_objects"] == count
        assert printed["objects"] == len(truth["annotations"]) - count

    @pytest.mark.parametrize("place", [".", "checkpoints/best.pt"])
    def test_a_run_is_detected_in_batches_of_its_own_size(self, place, run_folder, shapes, tmp_path, monkeypatch):
        shutil.copytree(run_folder, tmp_path / "run")
        (tmp_path / "run" / "config.yaml").write_text("data: builtin\nvalidation: {batch_size: 5}\n")
        sizes = []

        def spy(*arguments, **options):
            sizes.append(options["batch_size"])
            return detect_split(*arguments, **options)

        monkeypatch.setattr("aploss.training.splits.detect_split", spy)
        words = ["eval", str(tmp_path / "run" / place), "--data", str(shapes), "--device", "cpu", "--split", "val"]
        assert main(words) == 0
        assert main([*words, "--batch-size", "2"]) == 0
        assert sizes == [5, 2]

    def test_test_is_the_split_unless_another_is_named(self, run_folder, shapes, capsys):
        words = ["eval", str(run_folder), "--data", str(shapes), "--device", "cpu"]
        assert main(words) == 0
        assert "split test\n" in capsys.readouterr().out
        assert main([*words, "--split", "val"]) == 0
        assert ": 2 images, " in capsys.readouterr().out


def test_images_without_a_detection_are_said_loudly(tmp_path, capsys):
    files = write(tmp_path, TRUTH, RESULTS[:1])
    assert evaluate(*files) == 0
    assert "warning: 1 of 2 images" in capsys.readouterr().err
