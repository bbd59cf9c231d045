"""A format of one's own, in one file: found, read, checked, converted from and to, trained on."""

import csv
from collections.abc import Sequence
from pathlib import Path

import pytest

from aploss.data import (
    AnnotationBuilder,
    DataFormat,
    DatasetFolder,
    DetectionDataset,
    check_dataset,
    convert_dataset,
    dataset_splits,
    load_dataset,
    register_format,
)
from aploss.data.formats import FORMATS
from aploss.data.load import format_names
from aploss.errors import ConfigError, DataError


@register_format("test-csv")
class CsvFormat(DataFormat):
    """``train.csv`` with rows of image, class, x1, y1, x2, y2; images beside it."""

    looked_for = "CSV (train.csv with image, class and corners)"

    @classmethod
    def find(cls, path: Path) -> "CsvFormat | None":
        if not path.is_dir():
            return None
        folder = DatasetFolder(path)
        lists = [name for name in folder.names("") if name.endswith(".csv")]
        return cls(folder, [name[: -len(".csv")] for name in lists]) if lists else None

    def read(self, split: str, class_names: Sequence[str] | None) -> DetectionDataset:
        file = f"{split}.csv"
        rows = list(csv.reader(self.folder.read_text(file).splitlines()))
        names = tuple(class_names or sorted({row[1] for row in rows if row[1]}))
        builder = AnnotationBuilder(self.folder)
        index_of: dict[str, int] = {}
        for line, (image, name, *corners) in enumerate(rows, start=1):
            path = self.folder.inside(image, named_in=file)
            if image not in index_of and builder.find_image(path, named_in=file):
                index_of[image] = builder.add_image(path, None)
            if name and image in index_of:
                box = [float(value) for value in corners]
                builder.add_box(index_of[image], box, names.index(name), number=line)
        return builder.dataset(
            class_names=names, name=self.name, split=split, describe=lambda image, number: (file, f"line {number}")
        )

    @classmethod
    def write(cls, folder: Path, parts: dict, names: dict[Path, str]) -> list[str]:
        for split, part in parts.items():
            with (folder / f"{split}.csv").open("w", newline="") as file:
                rows = csv.writer(file)
                for index in range(len(part)):
                    image = f"images/{names[part.image_path(index)]}"
                    rows.writerow([image, "", 0, 0, 0, 0])
                    for label, box in zip(part.target(index)["labels"], part.target(index)["boxes"], strict=True):
                        rows.writerow([image, part.class_names[label], *box.tolist()])
        return []


@register_format("test-read-only")
class ReadOnlyFormat(DataFormat):
    """A format that nothing is ever found in."""

    @classmethod
    def find(cls, path: Path) -> None:
        return None

    def read(self, split: str, class_names: Sequence[str] | None) -> DetectionDataset:
        raise AssertionError("nothing was found")


@pytest.fixture
def csv_folder(tmp_path, coco_folder) -> Path:
    """The clean set in the format of this file, written by it."""
    convert_dataset(coco_folder, tmp_path / "csv", to="test-csv")
    return tmp_path / "csv"


def test_a_registered_format_is_recognised_and_read(csv_folder, expected_boxes, found_boxes):
    assert dataset_splits(csv_folder) == ("train2017", "val2017")
    for split, expected in expected_boxes.items():
        dataset = load_dataset(csv_folder, split)
        assert found_boxes(dataset) == expected
        assert dataset.problems == []


def test_the_rules_for_boxes_are_those_of_all_formats(csv_folder):
    with (csv_folder / "train2017.csv").open("a") as file:
        file.write("images/a.png,cat,5,5,5,9\nimages/a.png,cat,-9,5,20,20\n")
    result = check_dataset(csv_folder)
    assert result.format == "test-csv"
    found = {(f.problem.kind, f.problem.file) for f in result.findings}
    assert found - {("class-lists-differ", "csv")} == {
        ("degenerate-box", "train2017.csv"),
        ("out-of-bounds-box", "train2017.csv"),
    }
    assert result.exit_code == 1


def test_registered_formats_are_listed_and_a_name_is_given_once():
    assert {"auto", "coco", "voc", "yolo", "test-csv"} <= set(format_names())
    assert FORMATS.get("test-csv").format == "test-csv"
    with pytest.raises(ConfigError, match="'coco'"):
        register_format("coco")(CsvFormat)
    assert CsvFormat.format == "test-csv"


def test_a_format_that_cannot_be_written_says_so(coco_folder, tmp_path):
    with pytest.raises(DataError, match="'test-read-only' can be read, but not written"):
        convert_dataset(coco_folder, tmp_path / "out", to="test-read-only")
    assert not (tmp_path / "out").exists()
