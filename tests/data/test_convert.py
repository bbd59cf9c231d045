"""Conversion between the formats: the same boxes, labels, splits and images."""

import hashlib
import json

import numpy as np
import pytest
from PIL import Image
from small_datasets import edit_json, write_picture

from aploss.data import DetectionDataset, check_dataset, convert_dataset, find_source, load_dataset
from aploss.errors import DataError

FORMATS = ("voc", "coco", "yolo")
TRAIN = "annotations/instances_train2017.json"


def content(dataset) -> dict:
    """Everything that must survive, by the bytes of the image."""
    return {
        hashlib.sha256(dataset.image_path(i).read_bytes()).hexdigest(): (
            dataset.image_size(i),
            dataset.target(i)["boxes"].tolist(),
            [dataset.class_names[label] for label in dataset.target(i)["labels"]],
            dataset.target(i)["labels"].tolist(),
        )
        for i in range(len(dataset))
    }


def assert_same(first, second) -> None:
    assert second.class_names == first.class_names
    assert len(second) == len(first)
    assert content(second) == content(first)  # boxes equal to the last bit


@pytest.fixture
def awkward(tmp_path):
    """Boxes with many digits, at the borders, nearly as small as a pixel; sizes that are primes."""
    generator, images, boxes = np.random.default_rng(7), 6, 30
    sizes = generator.choice([61, 97, 127, 211], (images, 2))
    folder = tmp_path / "coco"
    paths = [write_picture(folder / f"{k}.png", tuple(size)).name for k, size in enumerate(sizes.tolist())]
    shares = np.sort(generator.uniform(0, 1, (images, boxes, 2, 2)), axis=2)
    shares[:, :8, 0, 0], shares[:, :8, 1, 1] = 0, 1
    corners = (shares * sizes[:, None, None, :]).reshape(-1, 4).astype(np.float32)
    count = images * boxes
    dataset = DetectionDataset(
        root=folder,
        class_names=("zoo", "ape & <x>", "ö"),
        image_paths=paths,
        image_sizes=sizes,
        boxes_per_image=[boxes] * images,
        boxes=np.concatenate([corners[:, :2], np.maximum(corners[:, 2:], corners[:, :2] + 1.01)], axis=1),
        labels=generator.integers(0, 3, count),
        crowd=generator.random(count) < 0.2,
        difficult=generator.random(count) < 0.2,
    )
    (folder / "train.json").write_text(json.dumps(dataset.to_coco()))
    return folder


@pytest.mark.parametrize("to", FORMATS)
def test_random_boxes_flags_and_class_order_survive(awkward, tmp_path, to):
    result = convert_dataset(awkward, tmp_path / "new", to=to)
    old, new = load_dataset(awkward, "train"), load_dataset(tmp_path / "new", "train")
    assert old.num_boxes > 100
    assert_same(old, new)
    if to == "yolo":
        marks = [f"{old.annotations.difficult.sum()} 'difficult' marks"]
        assert result.losses == (*marks, f"{old.annotations.crowd.sum()} 'crowd' marks")
        assert not new.annotations.difficult.any()
    else:
        assert result.losses == ()
        for i in range(len(old)):
            assert np.array_equal(new.target(i)["difficult"], old.target(i)["difficult"])
            assert np.array_equal(new.target(i)["crowd"], old.target(i)["crowd"])


@pytest.mark.parametrize("to", FORMATS)
def test_splits_that_share_images_stay_as_they_are(voc_folder, tmp_path, to):
    (voc_folder / "ImageSets/Main/trainval.txt").write_text("d\na\nb\nc\n")
    result = convert_dataset(voc_folder, tmp_path / "new", to=to)
    assert (result.images, result.boxes) == (4, 4)
    assert find_source(tmp_path / "new").splits == ("train", "trainval", "val")
    for split in ("train", "trainval", "val"):
        old, new = load_dataset(voc_folder, split), load_dataset(tmp_path / "new", split)
        assert_same(old, new)
        order = [old.image_path(i).name for i in range(len(old))]
        assert [new.image_path(i).name for i in range(len(new))] == order
    assert len(list((tmp_path / "new").rglob("*.png"))) == 4


def test_images_of_the_same_name_get_different_ones(coco_folder, tmp_path):
    (coco_folder / "val2017/d.png").rename(coco_folder / "val2017/a.png")
    file = coco_folder / "annotations/instances_val2017.json"
    file.write_text(file.read_text().replace("d.png", "a.png"))
    convert_dataset(coco_folder, tmp_path / "new", to="voc")
    names = {path.name for path in (tmp_path / "new/JPEGImages").iterdir()}
    assert names == {"a.png", "b.png", "c.png", "val2017_a.png"}
    for split in ("train2017", "val2017"):
        assert_same(load_dataset(coco_folder, split), load_dataset(tmp_path / "new", split))


def test_what_cannot_be_used_is_left_out_and_told(coco_folder, tmp_path):
    edit_json(coco_folder / TRAIN, lambda coco: coco["annotations"][0].update(bbox=[1, 1, 0, 5]))
    (coco_folder / "train2017/b.png").write_bytes(b"")
    result = convert_dataset(coco_folder, tmp_path / "new", to="voc")
    assert {problem.kind for problem in result.problems} == {"degenerate-box", "unreadable-image"}
    assert (result.images, result.boxes) == (3, 2)
    assert check_dataset(tmp_path / "new").problems == []


def test_what_a_format_cannot_represent_is_listed(coco_folder, tmp_path):
    edit_json(coco_folder / TRAIN, lambda coco: coco["annotations"][0].update(bbox=[10, 10, 0.5, 20], area=5))
    losses = {to: convert_dataset(coco_folder, tmp_path / f"to-{to}", to=to).losses for to in FORMATS}
    assert {to: len(lost) for to, lost in losses.items()} == {"voc": 2, "coco": 0, "yolo": 1}  # also the areas
    assert load_dataset(tmp_path / "to-voc", "train").num_boxes == 2
    assert load_dataset(tmp_path / "to-coco", "train").annotations.areas[0] == 5
    assert load_dataset(tmp_path / "to-yolo", "train").target(0)["boxes"].tolist()[0] == [10, 10, 10.5, 30]


def test_a_rotation_that_the_annotation_ignores_is_taken_out_of_the_image(coco_folder, tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    path = coco_folder / "train2017/a.png"
    with Image.open(path) as image:
        image.save(path, exif=exif)
    convert_dataset(coco_folder, tmp_path / "new", to="yolo")
    old, new = load_dataset(coco_folder, "train")[0], load_dataset(tmp_path / "new", "train")[0]
    assert (old[0] == new[0]).all()
    assert old[1]["boxes"].tolist() == new[1]["boxes"].tolist()
    assert check_dataset(tmp_path / "new").problems == []


def test_nothing_is_overwritten(voc_folder, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").touch()
    with pytest.raises(DataError, match="not an empty folder"):
        convert_dataset(voc_folder, tmp_path / "full", to="coco")
    with pytest.raises(DataError, match="inside the dataset"):
        convert_dataset(voc_folder, voc_folder / "coco", to="coco")
    (tmp_path / "empty").mkdir()
    assert convert_dataset(voc_folder, tmp_path / "empty", to="coco").images == 4


def test_a_conversion_that_fails_leaves_nothing_behind(voc_folder, tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("aploss.data.formats.shutil.copyfile", fail)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(DataError, match="No space left"):
        convert_dataset(voc_folder, tmp_path / "new", to="yolo")
    assert sorted(tmp_path.iterdir()) == before
