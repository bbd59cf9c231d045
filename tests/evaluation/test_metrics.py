"""The metrics object: JSON without NaN and a table that lines up."""

import json
import math

from aploss.evaluation import Metrics, coco_metrics, voc_metrics


def test_json_has_null_where_there_is_no_value(simulate):
    document = json.loads(json.dumps(voc_metrics(*simulate(0)).as_dict(), allow_nan=False))
    assert document["APs"] is None
    assert document["per_class"]["class 3"]["AP"] is None
    assert 0 < document["AP"] < 1
    assert document["metric"] == "voc12"


def test_the_table_has_a_row_per_class_and_lines_up(simulate):
    truth, results = simulate(1)
    metrics = coco_metrics(truth, results)
    lines = metrics.table().splitlines()
    assert len(lines) == 2 + 4 + 2  # header, line, classes, line, mean
    assert len({len(line) for line in lines}) == 1
    assert lines[0].split() == [
        "class", "objects", "detections", "AP", "AP50", "AP75", "APs", "APm", "APl", "AR",
    ]  # fmt: skip
    assert lines[-1].split()[3] == f"{metrics.AP:.3f}"
    assert lines[5].split()[4:] == ["-"] * 7  # the class without objects


def test_columns_without_any_value_are_left_out(simulate):
    assert voc_metrics(*simulate(2)).table().splitlines()[0].split()[3:] == ["AP", "AP50", "AP75"]


def test_a_table_without_classes_still_has_the_mean():
    empty = Metrics(metric="coco", iou="0.50:0.95", images=0, objects=0, detections=0)
    assert empty.table().splitlines()[-1].split() == ["mean", "0", "0"]


def test_the_mean_leaves_undefined_classes_out():
