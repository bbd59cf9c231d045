"""Ground truth from COCO dicts, and an error for every kind of broken one."""

import copy

import pytest

from aploss.errors import DataError
from aploss.evaluation import GroundTruth, as_ground_truth

GOOD = {
    "images": [{"id": 9}, {"id": 4}],
    "categories": [{"id": 7, "name": "dust"}, {"id": 2, "name": "cell"}],
    "annotations": [
        {"image_id": 9, "category_id": 2, "bbox": [1, 2, 3, 4], "area": 10.5, "iscrowd": 1},
        {"image_id": 4, "category_id": 7, "bbox": [0.5, 0, 2, 2.5], "difficult": 1},
        {"image_id": 4, "category_id": 7, "bbox": [0, 0, 1, 1], "area": None},
    ],
}


def changed(**annotation):
    document = copy.deepcopy(GOOD)
    document["annotations"][1].update(annotation)
    return document


def lacking(section, index, key):
    document = copy.deepcopy(GOOD)
    del document[section][index][key]
    return document


def test_arrays_follow_the_annotations():
    truth = GroundTruth.from_coco(GOOD)
    assert len(truth) == 3
    assert truth.images.tolist() == [4, 9]
    assert truth.categories == {2: "cell", 7: "dust"}
    assert list(truth.categories) == [2, 7]
    assert truth.boxes.tolist() == [[1, 2, 4, 6], [0.5, 0, 2.5, 2.5], [0, 0, 1, 1]]
    assert truth.areas.tolist() == [10.5, 5, 1]
    assert truth.crowd.tolist() == [True, False, False]
    assert truth.difficult.tolist() == [False, True, False]
    assert truth.counted.tolist() == [False, False, True]
    assert as_ground_truth(truth) is truth


def test_categories_without_a_name_or_with_the_same_one_stay_apart():
    document = {
        **GOOD,
        "categories": [{"id": 2, "name": "cell"}, {"id": 7, "name": "cell"}, {"id": 8}],
    }
    names = GroundTruth.from_coco(document).categories
    assert names == {2: "cell", 7: "cell (id 7)", 8: "category 8"}


BROKEN = {
    "not a dict": ([], "not a COCO dict"),
    "no images": ({"annotations": [], "categories": []}, "no 'images'"),
    "no annotations": ({"images": [], "categories": []}, "no 'annotations'"),
    "no categories": ({"images": [], "annotations": []}, "no 'categories'"),
    "images not a list": ({**GOOD, "images": {}}, "'images' is a dict, expected a list"),
    "an image without id": ({**GOOD, "images": [{"id": 4}, {}]}, "images[1] has no 'id'"),
    "the same image twice": (
        {**GOOD, "images": [{"id": 9}, {"id": 4}, {"id": 9}]},
        "images[2] repeats id 9",
    ),
    "the same category twice": (
        {**GOOD, "categories": [{"id": 2}, {"id": 2}]},
        "categories[1] repeats id 2",
    ),
    "unknown image": (changed(image_id=77), "annotations[1]: image_id 77 is not in"),
    "unknown category": (changed(category_id=77), "annotations[1]: category_id 77 is not in"),
    "no box": (lacking("annotations", 1, "bbox"), "annotations[1] has no 'bbox'"),
    "no image id": (lacking("annotations", 1, "image_id"), "annotations[1] has no 'image_id'"),
    "NaN area": (changed(area=float("nan")), "annotations[1]: 'area' is nan"),
    "text for an area": (changed(area="big"), "annotations[1]: 'area' is 'big'"),
    "negative width": (changed(bbox=[5, 5, -1, 2]), "annotations[1]: 'bbox' has a negative width"),
    "crowd that is no flag": (changed(iscrowd="yes"), "annotations[1]: 'iscrowd' is 'yes'"),
    "difficult that is no flag": (changed(difficult=3), "annotations[1]: 'difficult' is 3"),
    "a list for an annotation": (
        {**GOOD, "annotations": [GOOD["annotations"][0], []]},
        "annotations[1] is [], expected an object",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_ground_truth_is_refused_in_one_line(case):
    document, message = BROKEN[case]
    with pytest.raises(DataError) as caught:
        GroundTruth.from_coco(document)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
