"""The eval command: what it prints, writes and refuses."""

import json
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from aploss.cli.main import main
from aploss.evaluation import coco_metrics, voc_metrics

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
    wanted = {"AP", "AP50", "AP75", "APs", "APm", "APl", "per_class"}
    assert wanted <= json.loads(printed.out).keys()


@pytest.mark.parametrize("metric", ["coco", "voc07"])
def test_out_writes_metrics_and_curves(metric, files, tmp_path, capfd):
    folder = tmp_path / "deep" / "scores"
    assert evaluate(*files, f"--out={folder}", "--json", f"--metric={metric}") == 0
    printed = json.loads(capfd.readouterr().out)
    written = json.loads((folder / "metrics.json").read_text())
    assert printed.items() <= written.items()
    assert written["precision_recall"].keys() == {"cell", "dust"}
    assert len(written["precision_recall"]["cell"]["precision"]) == 101
    for name in ("precision-recall.svg", "precision-recall-by-class.svg"):
        assert ElementTree.parse(folder / name).getroot().tag.endswith("svg")
    assert len(list(folder.iterdir())) == 3  # no temporary file is left


def test_out_says_what_it_wrote(files, tmp_path, capfd):
    assert evaluate(*files, f"--out={tmp_path / 'scores'}") == 0
    assert f"wrote {tmp_path / 'scores' / 'metrics.json'}" in capfd.readouterr().err


def test_without_any_object_there_are_metrics_and_no_curves(tmp_path, capsys):
    files = write(tmp_path, {**TRUTH, "annotations": []}, RESULTS)
    assert evaluate(*files, f"--out={tmp_path / 'scores'}", "--json") == 0
    assert json.loads(capsys.readouterr().out)["AP"] is None
    assert [path.name for path in (tmp_path / "scores").iterdir()] == ["metrics.json"]


BROKEN = {
    "not JSON": ("dets.json", "[{", "not JSON"),
    "no such key": ("dets.json", [{"image_id": 1}], "detections[0] has no 'category_id'"),
    "unknown image": (
        "dets.json",
        [RESULTS[0], {**RESULTS[1], "image_id": 7}],
        "detections[1]: image_id 7 is not in the annotations' list",
    ),
    "unknown category": (
        "dets.json",
        [{**RESULTS[0], "category_id": 0}],
        "detections[0]: category_id 0 is not in the annotations' list",
    ),
    "NaN score": (
        "dets.json",
        [{**RESULTS[0], "score": float("nan")}],
        "detections[0]: 'score' is nan, expected a finite number",
    ),
    "negative width": (
        "dets.json",
        [{**RESULTS[0], "bbox": [5, 5, -2, 3]}],
        "detections[0]: 'bbox' has a negative width",
    ),
    "results in place of annotations": ("gt.json", RESULTS, "not a COCO dict"),
    "annotations in place of results": ("dets.json", TRUTH, "expected a list of COCO results"),
    "annotation without image": (
        "gt.json",
        {**TRUTH, "images": [{"id": 1}]},
        "annotations[2]: image_id 2 is not in",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_is_wrong_with_a_file_is_said_in_one_line(case, files, tmp_path, capfd):
    name, content, message = BROKEN[case]
    text = content if isinstance(content, str) else json.dumps(content)
    (tmp_path / name).write_text(text)
    assert evaluate(*files) == 2
    printed = capfd.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"aploss eval: {tmp_path / name}: ")
    assert message in printed.err
    assert printed.err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--iou=2"], "iou is 2.0"),
        (["--metric=voc07", "--iou=0"], "iou is 0.0"),
        (["--max-detections=0"], "max_detections is 0"),
        (["--metric=voc12", "--max-detections=5"], "--max-detections is for --metric coco"),
    ],
)
def test_settings_that_cannot_be_are_refused(arguments, message, files, capfd):
    assert evaluate(*files, *arguments) == 2
    assert message in capfd.readouterr().err


def test_a_folder_that_cannot_be_written_is_named(files, tmp_path, capfd):
    (tmp_path / "scores").write_text("a file is here")
    assert evaluate(*files, f"--out={tmp_path / 'scores'}") == 2
    assert "cannot be written" in capfd.readouterr().err


def test_an_unknown_metric_is_refused_with_the_known_ones(files, capfd):
    assert evaluate(*files, "--metric=iou") == 2
    assert "voc07" in capfd.readouterr().err


def test_missing_files_are_named(tmp_path, capfd):
    gone = tmp_path / "gone.json"
    assert evaluate(f"--annotations={gone}", f"--detections={gone}") == 2
    assert capfd.readouterr().err == f"aploss eval: {gone}: no such file\n"


def test_the_command_runs_as_a_program(files):
    command = [sys.executable, "-m", "aploss", "eval", *files, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["AP50"] == pytest.approx(coco_metrics(TRUTH, RESULTS).AP50)


def test_help_has_examples(capsys):
    with pytest.raises(SystemExit):
        evaluate("--help")
    words = " ".join(capsys.readouterr().out.split())
    assert "aploss eval --annotations gt.json --detections results.json --metric voc07" in words
