"""Small clean datasets of all three formats, for tests to load or to damage."""

from collections.abc import Callable
from pathlib import Path

import pytest
from small_datasets import CLASS_NAMES, SPLITS, write_coco, write_picture, write_voc, write_yolo


@pytest.fixture
def picture() -> Callable[..., Path]:
    return write_picture


@pytest.fixture
def voc_folder(tmp_path: Path) -> Path:
    return write_voc(tmp_path / "voc")


@pytest.fixture
def coco_folder(tmp_path: Path) -> Path:
    return write_coco(tmp_path / "coco")


@pytest.fixture
def yolo_folder(tmp_path: Path) -> Path:
    return write_yolo(tmp_path / "yolo")


@pytest.fixture
def clean_folders(voc_folder: Path, coco_folder: Path, yolo_folder: Path) -> dict[str, Path]:
    return {"voc": voc_folder, "coco": coco_folder, "yolo": yolo_folder}


@pytest.fixture
def expected_boxes() -> dict[str, dict[str, list]]:
    """split → image name → [(label, box)], what every reader must give."""
    return {
        split: {
            name: [(CLASS_NAMES.index(label), list(map(float, box))) for label, *box in boxes]
            for name, boxes in images.items()
        }
        for split, images in SPLITS.items()
    }


@pytest.fixture
def found_boxes() -> Callable:
    """The same of a loaded dataset."""

    def collect(dataset) -> dict[str, list]:
        return {
            dataset.image_path(i).stem: list(
                zip(dataset.target(i)["labels"].tolist(), dataset.target(i)["boxes"].tolist(), strict=True)
            )
            for i in range(len(dataset))
        }

    return collect
