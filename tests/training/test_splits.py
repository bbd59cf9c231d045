"""Which splits a run takes, by name or by rule."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import edit_annotations, keep_objects

from aploss.data import find_source
from aploss.errors import ConfigError, DataError
from aploss.training.config import TrainConfig
from aploss.training.splits import RunData, Split, load_run_data, suggest_image_sizes

MakeConfig = Callable[..., TrainConfig]


def names(data: RunData) -> list[str | None]:
    parts = (data.train, data.validation, data.evaluation)
    return [part and (part.name if isinstance(part, Split) else part.split) for part in parts]


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


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ["train", "val", "test"]),
        ({"evaluation": {"split": "none"}}, ["train", "val", None]),
        ({"evaluation": {"split": "val"}}, ["train", "val", "val"]),
    ],
)
def test_splits_follow_from_their_names(make_config: MakeConfig, changes: Any, expected: list[str | None]) -> None:
    data = load_run_data(make_config(**changes))
    assert names(data) == expected
    assert not data.remarks
    assert data.validation is not None
    assert data.validation.dataset.class_names == data.train.class_names == ("red", "green")


def test_names_with_years_are_understood(make_config: MakeConfig, without: Callable[..., str]) -> None:
    folder = without("test", train="train2017", val="val2017")
    data = load_run_data(make_config(data=folder))
    assert names(data) == ["train2017", "val2017", "val2017"]
    assert data.splits == [data.validation]  # evaluated once


def test_without_a_validation_split_images_are_held_out(make_config: MakeConfig, without: Callable[..., str]) -> None:
    config = make_config(data=without("val"), splits={"holdout": 0.25})
    data = load_run_data(config)
    assert data.validation is not None
    parts = (data.train, data.validation.dataset)
    assert list(map(len, parts)) == [12, 4]
    files = [{part.image_path(index) for index in range(len(part))} for part in parts]
    assert not files[0] & files[1]
    assert "25% of the training images are held out" in data.remarks[0]


def test_a_test_split_without_annotations_is_not_measured_on(
    make_config: MakeConfig, without: Callable[..., str]
) -> None:
    folder = without()
    edit_annotations(folder, "test", keep_objects())
    data = load_run_data(make_config(data=folder))
    assert names(data) == ["train", "val", "val"]
    assert "no annotations" in data.remarks[0]


def test_measuring_on_what_is_trained_on_is_remarked(make_config: MakeConfig) -> None:
    data = load_run_data(make_config(splits={"train": "train+val"}, evaluation={"split": "val"}))
    assert any("5 of its 6 images are also in the training split" in text for text in data.remarks)


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
        load_run_data(make_config(**changes))


def test_training_images_without_any_object_are_refused(make_config: MakeConfig, without: Callable[..., str]) -> None:
    folder = without()
    edit_annotations(folder, "train", keep_objects())
    with pytest.raises(DataError, match="no objects to learn from"):
        load_run_data(make_config(data=folder))


def test_images_without_objects_can_be_dropped(make_config: MakeConfig, without: Callable[..., str]) -> None:
    folder = without()
    edit_annotations(folder, "train", keep_objects(3, 4, 5))
    whole, dropped = (load_run_data(make_config(data=folder, splits={"drop_empty": drop})) for drop in (False, True))
    has_objects = whole.train.boxes_per_image > 0
    assert 0 < len(dropped.train) == has_objects.sum() < len(whole.train)
    assert dropped.train.image_ids.tolist() == whole.train.image_ids[has_objects].tolist()
    assert len(dropped.validation.dataset) == len(whole.validation.dataset)


def test_annotations_are_parsed_once(
    make_config: MakeConfig, without: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a part of the training split is held out, and the image size has been looked up before."""
    config = make_config(data=without("val"))
    source, read = find_source(config.data), []
    original = type(source).read

    def counted(self: Any, split: str, *arguments: Any) -> Any:
        read.append(split)
        return original(self, split, *arguments)

    monkeypatch.setattr(type(source), "read", counted)
    suggest_image_sizes("any-cpu", source)
    load_run_data(config, source)
    assert sorted(read) == ["test", "train"]


@pytest.mark.regression("33a370e")
def test_validation_objects_of_unknown_classes_are_refused_or_remarked(
    make_config: MakeConfig, without: Callable[..., str]
) -> None:
    data = without()
    file = Path(data) / "annotations/instances_val.json"
    file.write_text(file.read_text().replace('"red"', '"Red"'))
    with pytest.raises(DataError, match=r"Red.*red, green"):
        load_run_data(make_config(data=data))
    loaded = load_run_data(make_config(data=data, splits={"ignore_unknown_classes": True}))
    assert loaded.validation is not None
    count = sum(one["category_id"] == 1 for one in json.loads(file.read_text())["annotations"])
    assert loaded.validation.ignored_objects == count > 0
    assert [str(count) in remark for remark in loaded.remarks] == [True]
