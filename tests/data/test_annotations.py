"""The dataset type: storage, items, subsets, joining, COCO dict."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from aploss.data.annotations import DetectionDataset, concatenate
from aploss.errors import DataError
from aploss.evaluation import read_ground_truth


@pytest.fixture
def dataset(tmp_path, picture) -> DetectionDataset:
    for name in ("a", "b", "c"):
        picture(tmp_path / f"{name}.png", (40, 30))
    return DetectionDataset(
        root=tmp_path,
        class_names=("cat", "dog"),
        image_paths=("a.png", "b.png", "c.png"),
        image_sizes=[(40, 30)] * 3,
        boxes_per_image=[2, 0, 1],
        boxes=[(1, 2, 11, 22), (5, 5, 15.5, 25.25), (0, 0, 40, 30)],
        labels=[0, 1, 1],
        difficult=[False, True, False],
        crowd=[False, False, True],
        image_ids=[7, 3, 9],
        split="train",
    )


def test_an_item_is_an_image_and_a_target_of_plain_tensors(dataset):
    image, target = dataset[0]
    assert (type(image), image.shape, image.dtype) == (torch.Tensor, (3, 30, 40), torch.uint8)
    dtypes = {name: value.dtype for name, value in target.items() if name != "image_id"}
    flags = dict.fromkeys(("difficult", "crowd"), torch.bool)
    assert dtypes == {"boxes": torch.float32, "labels": torch.int64, **flags}
    assert all(type(target[name]) is torch.Tensor for name in dtypes)
    assert target["difficult"].tolist() == [False, True]
    assert target["image_id"] == 7
    empty = dataset.target(1)
    assert (empty["boxes"].shape, empty["labels"].shape, empty["crowd"].shape) == ((0, 4), (0,), (0,))


def test_changing_an_item_does_not_change_the_dataset(dataset):
    dataset[0][1]["boxes"].fill_(0)
    dataset[0][1]["labels"].fill_(1)
    assert dataset.target(0)["boxes"].tolist()[0] == [1, 2, 11, 22]
    assert dataset.target(0)["labels"].tolist() == [0, 1]


def test_the_coco_dict_has_ids_from_one_and_widths_instead_of_corners(dataset):
    coco = dataset.to_coco()
    assert [image["id"] for image in coco["images"]] == [7, 3, 9]
    assert coco["images"][0] == {"id": 7, "file_name": "a.png", "width": 40, "height": 30}
    assert coco["categories"] == [{"id": 1, "name": "cat"}, {"id": 2, "name": "dog"}]
    assert coco["annotations"][1] == {
        "id": 2,
        "image_id": 7,
        "category_id": 2,
        "bbox": [5, 5, 10.5, 20.25],
        "area": 10.5 * 20.25,
        "iscrowd": 0,
        "difficult": 1,
    }
    assert [(a["image_id"], a["iscrowd"]) for a in coco["annotations"]] == [(7, 0), (7, 0), (9, 1)]


def test_a_subset_keeps_ids_boxes_and_order(dataset):
    part = dataset.subset([2, 0])
    assert part.image_ids.tolist() == [9, 7]
    assert part.target(0)["boxes"].tolist() == [[0, 0, 40, 30]]
    assert part.target(1)["boxes"].tolist() == dataset.target(0)["boxes"].tolist()
    assert part.target(1)["difficult"].tolist() == [False, True]
    assert part.num_boxes == 3
    assert len(dataset.subset([])) == 0
    for wrong in ([3], [-1], [0, 0]):
        with pytest.raises(DataError):
            dataset.subset(wrong)


def test_joining_takes_an_image_once_and_keeps_ids_while_they_are_distinct(dataset):
    joined = concatenate([dataset.subset([0, 1]), dataset.subset([1, 2])], split="all")
    assert joined.image_ids.tolist() == [7, 3, 9]
    assert joined.num_boxes == 3
    assert joined.split == "all"


def test_joining_renumbers_clashing_ids(dataset):
    other = replace(dataset.subset([2]), image_paths=["x.png"], image_ids=[7])
    joined = concatenate([dataset, other], split="both")
    assert joined.image_ids.tolist() == [1, 2, 3, 4]
    assert joined.image_path(3) == dataset.root / "x.png"
    assert joined.target(3)["boxes"].tolist() == [[0, 0, 40, 30]]


WRONG = [
    {"boxes_per_image": [1, 0, 1]}, {"labels": [0, 2, 1]}, {"image_ids": [0, 1, 2]}, {"class_names": ("cat", "cat")},
    {"boxes": [(1, 2, 3)] * 3},
]  # fmt: skip


@pytest.mark.parametrize("changes", WRONG, ids=[next(iter(one)) for one in WRONG])
def test_inconsistent_arrays_are_refused(changes):
    arguments = {"root": ".", "class_names": ("cat", "dog"), "image_paths": "abc", "image_sizes": [(8, 8)] * 3}
    arguments |= {"boxes_per_image": [2, 0, 1], "boxes": [(1, 1, 2, 2)] * 3, "labels": [0, 1, 1]}
    DetectionDataset(**arguments)
    with pytest.raises(DataError):
        DetectionDataset(**{**arguments, **changes})


def test_the_table_of_annotations_is_that_of_the_coco_dict_and_made_once(dataset):
    table, expected = dataset.annotations, read_ground_truth(dataset.to_coco())
    assert dataset.annotations is table
    for column in ("image_ids", "category_ids", "xywh", "areas", "crowd", "difficult", "images"):
        assert np.array_equal(getattr(table, column), getattr(expected, column))
    assert table.categories == expected.categories == {1: "cat", 2: "dog"}
    assert table.counted.tolist() == [True, False, False]
    assert table.boxes[0].tolist() == [1, 2, 11, 22]
