"""Which splits a run takes, by name or by rule."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aploss.errors import ConfigError, DataError
from aploss.training.config import TrainConfig
from aploss.training.recipes import merge
from aploss.training.splits import RunData, load_run_data

MakeConfig = Callable[..., TrainConfig]


def names(data: RunData) -> list[str | None]:
    parts = (data.train, data.validation, data.evaluation, data.held_out)
    return [None if part is None else part.split for part in parts]


@pytest.fixture
def without(rectangles: Path, tmp_path: Path) -> Callable[..., str]:
    """The data set without some of its splits, or with other names for them."""

    def copy(*removed: str, **renamed: str) -> str:
        folder = tmp_path / "data"
        shutil.copytree(rectangles, folder)
        for split in removed:
            (folder / "annotations" / f"instances_{split}.json").unlink()
        for split, name in renamed.items():
            (folder / split).rename(folder / name)
            path = folder / "annotations" / f"instances_{split}.json"
            path.rename(path.with_name(f"instances_{name}.json"))
        return str(folder)

    return copy


def test_train_val_and_test_are_found(make_config: MakeConfig) -> None:
    data = load_run_data(make_config())
    assert names(data) == ["train", "val", "test", "test"]
    assert data.remarks == ()
    assert data.validation is not None
    assert data.validation.class_names == data.train.class_names == ("red", "green")


def test_final_numbers_can_be_left_out(make_config: MakeConfig) -> None:
    assert names(load_run_data(make_config(evaluation={"split": "none"}))) == ["train", "val", None, None]


def test_names_with_years_are_understood(make_config: MakeConfig, without: Callable[..., str]) -> None:
    folder = without("test", train="train2017", val="val2017")
    data = load_run_data(make_config(data=folder))
    assert names(data) == ["train2017", "val2017", "val2017", "val2017"]


def test_without_a_validation_split_images_are_held_out(make_config: MakeConfig, without: Callable[..., str]) -> None:
    config = make_config(data=without("val"), splits={"holdout": 0.25})
    data = load_run_data(config)
    assert data.validation is not None
    assert (len(data.train), len(data.validation)) == (12, 4)
    files = [{part.image_path(index) for index in range(len(part))} for part in (data.train, data.validation)]
    assert not files[0] & files[1]
    assert "4 training images are held out" in data.remarks[0]


def test_final_numbers_on_validation_measure_the_calibration_on_test(make_config: MakeConfig) -> None:
    data = load_run_data(make_config(evaluation={"split": "val"}))
    assert names(data) == ["train", "val", "val", "test"]
    assert data.evaluation is data.validation


def test_without_any_other_split_everything_is_measured_on_validation(
    make_config: MakeConfig, without: Callable[..., str]
) -> None:
    data = load_run_data(make_config(data=without("test")))
    assert names(data) == ["train", "val", "val", "val"]


def test_a_test_split_without_annotations_is_not_measured_on(
    make_config: MakeConfig, without: Callable[..., str]
) -> None:
    folder = without()
    path = Path(folder) / "annotations" / "instances_test.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "annotations": []}))
    data = load_run_data(make_config(data=folder))
    assert names(data) == ["train", "val", "val", "val"]
    assert "no annotations" in data.remarks[0]


def test_measuring_on_what_is_trained_on_is_remarked(make_config: MakeConfig) -> None:
    data = load_run_data(make_config(splits={"train": "train+val"}, evaluation={"split": "val"}))
    assert any("5 of the 6 images of val are also trained on" in text for text in data.remarks)


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"data": ""}, ConfigError, "--data"),
        ({"splits": {"train": "monday"}}, DataError, "monday"),
        ({"splits": {"validation": "monday"}}, DataError, "monday"),
        ({"evaluation": {"split": "monday"}}, DataError, "monday"),
        ({"splits": {"format": "xml"}}, DataError, "xml"),
    ],
)
def test_splits_that_are_not_there_are_named(
    make_config: MakeConfig, changes: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        load_run_data(make_config(**merge({}, changes)))


def test_training_images_without_any_object_are_refused(make_config: MakeConfig, without: Callable[..., str]) -> None:
    folder = without()
    path = Path(folder) / "annotations" / "instances_train.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "annotations": []}))
    with pytest.raises(DataError, match="no object to learn from"):
        load_run_data(make_config(data=folder))
