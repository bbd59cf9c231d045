"""The eval command: what it prints, writes and refuses."""

import json
import shutil
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from aploss.cli.main import main
from aploss.evaluation.metrics import coco_metrics, voc_metrics
from aploss.training.evaluate import detect_split

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
    assert json.loads(printed.out) == expected.as_dict()
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


INVALID = {
    "not JSON": ("dets.json", "[{"),
    "unknown image": ("dets.json", [RESULTS[0], {**RESULTS[1], "image_id": 7}]),
    "results in place of annotations": ("gt.json", RESULTS),
    "annotations in place of results": ("dets.json", TRUTH),
}


@pytest.mark.parametrize("case", INVALID)
def test_an_invalid_file_is_named_in_one_line(case, files, tmp_path, capfd):
    name, content = INVALID[case]
    (tmp_path / name).write_text(content if isinstance(content, str) else json.dumps(content))
    assert evaluate(*files) == 2
    printed = capfd.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"aploss eval: {tmp_path / name}: ")
    assert printed.err.count("\n") == 1


def test_a_folder_that_cannot_be_written_is_named(files, tmp_path, capfd):
    (tmp_path / "scores").write_text("a file is here")
    assert evaluate(*files, f"--out={tmp_path / 'scores'}") == 2
    assert "cannot be written" in capfd.readouterr().err


def annotations_of(shapes: Path) -> Path:
    return shapes / "annotations" / "instances_test.json"


def images_of(shapes: Path) -> list[Path]:
    names = {Path(one["file_name"]).name for one in json.loads(annotations_of(shapes).read_text())["images"]}
    found = [path for path in shapes.rglob("*") if path.name in names]
    return sorted(path for path in found if path.parent.name.startswith("test"))


class TestRun:
    """A run is evaluated on data, at an IoU at which even a random detector finds something."""

    IOU = ("--iou", "0.1", "--json")

    def test_a_run_scores_like_its_predictions(self, run_folder, shapes, tmp_path, capsys):
        words = ["eval", str(run_folder), "--data", str(shapes), "--device", "cpu"]
        assert main([*words, "--split", "test", *self.IOU]) == 0
        expected = json.loads(capsys.readouterr().out)
        found = self.evaluate_predictions(run_folder, images_of(shapes), annotations_of(shapes), tmp_path, capsys)[0]
        assert 0 < found["AP"] == pytest.approx(expected["AP"], abs=1e-6)
        assert found["images"] == expected["images"] == 6

    def test_some_of_the_images_are_matched_by_name_with_a_warning(self, run_folder, shapes, tmp_path, capsys):
        files = images_of(shapes)[3:]  # predict numbers them 1, 2, 3
        found, warnings = self.evaluate_predictions(run_folder, files, annotations_of(shapes), tmp_path, capsys)
        assert "3 of 6 annotated images" in warnings
        truth = json.loads(annotations_of(shapes).read_text())
        names = {path.name for path in files}
        truth["images"] = [one for one in truth["images"] if Path(one["file_name"]).name in names]
        ids = {one["id"] for one in truth["images"]}
        truth["annotations"] = [one for one in truth["annotations"] if one["image_id"] in ids]
        (tmp_path / "part.json").write_text(json.dumps(truth))
        expected = self.evaluate_predictions(run_folder, files, tmp_path / "part.json", tmp_path, capsys)
        assert (found, "") == expected
        assert found["AP"] > 0

    @pytest.mark.parametrize("place", [".", "checkpoints/best.pt"])
    def test_a_run_is_detected_in_batches_of_its_own_size(self, place, run_folder, shapes, tmp_path, monkeypatch):
        shutil.copytree(run_folder, tmp_path / "run")
        (tmp_path / "run" / "config.yaml").write_text("data: builtin\nvalidation: {batch_size: 5}\n")
        sizes = []

        def spy(*arguments, **options):
            sizes.append(options["batch_size"])
            return detect_split(*arguments, **options)

        monkeypatch.setattr("aploss.training.evaluate.detect_split", spy)
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

    def test_images_of_another_split_are_refused(self, run_folder, shapes, tmp_path, capsys):
        self.predict(run_folder, images_of(shapes)[:1], tmp_path)
        document = json.loads((tmp_path / "images.json").read_text())
        document["images"][0]["file_name"] = "elsewhere/other.png"
        (tmp_path / "images.json").write_text(json.dumps(document))
        capsys.readouterr()
        words = ["--annotations", str(annotations_of(shapes))]
        assert main(["eval", "--detections", str(tmp_path / "detections.json"), *words]) == 2
        assert "none of the images" in capsys.readouterr().err

    @staticmethod
    def predict(run: Path, files: list[Path], out: Path) -> None:
        words = ["predict", str(run), *map(str, files), "--out", str(out), "--threshold", "0"]
        assert main([*words, "--device", "cpu", "--quiet"]) == 0

    def evaluate_predictions(self, run: Path, files: list[Path], truth: Path, out: Path, capsys) -> tuple[dict, str]:
        """The metrics of predict's detections, and the warnings."""
        self.predict(run, files, out)
        capsys.readouterr()
        assert main(["eval", "--detections", f"{out}/detections.json", "--annotations", str(truth), *self.IOU]) == 0
        printed = capsys.readouterr()
        return json.loads(printed.out), printed.err


def test_images_without_a_detection_are_said_loudly(tmp_path, capsys):
    files = write(tmp_path, TRUTH, RESULTS[:1])
    assert evaluate(*files) == 0
    assert "warning: 1 of 2 evaluated images" in capsys.readouterr().err


def test_files_of_the_same_name_in_two_folders_are_told_apart(tmp_path, capsys):
    images = [{"id": 5, "file_name": "day/a.png"}, {"id": 6, "file_name": "night/a.png"}]
    truth = {**TRUTH, "images": [{**one, "width": 200, "height": 200} for one in images]}
    truth["annotations"] = [{"id": 1, "image_id": 6, "category_id": 2, "bbox": [0, 80, 20, 20], "iscrowd": 0}]
    # Of predict: image 1 is night/a.png, and class 1 is what the annotations call 2.
    box = {"image_id": 1, "bbox": [0, 80, 20, 20], "score": 0.9}
    results = [{**box, "category_id": 1}, {**box, "category_id": 2}]
    (tmp_path / "gt.json").write_text(json.dumps(truth))
    (tmp_path / "detections.json").write_text(json.dumps(results))
    looked_at = {
        "images": [{"id": 1, "file_name": "/data/night/a.png"}],
        "categories": [{"id": 1, "name": "dust"}, {"id": 2, "name": "lint"}],
        "annotations": [],
    }
    (tmp_path / "images.json").write_text(json.dumps(looked_at))
    files = [f"--annotations={tmp_path / 'gt.json'}", f"--detections={tmp_path / 'detections.json'}"]
    assert evaluate(*files, "--json") == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["AP"] == 1.0
    assert "1 detections left out" in printed.err
    assert "1 of 2 annotated images" in printed.err
