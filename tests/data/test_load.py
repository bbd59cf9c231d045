"""Recognising datasets, and the ways to name a split."""

import re

import pytest
from small_datasets import edit_json

from aploss.data.annotations import DetectionDataset
from aploss.data.check import SAMPLED_FILES, fingerprint
from aploss.data.formats import FORMATS, DataFormat, convert_dataset, find_source, load_dataset, register_format
from aploss.errors import ConfigError, DataError

VAL = "annotations/instances_val2017.json"


def names(dataset) -> set[str]:
    return {dataset.image_path(i).stem for i in range(len(dataset))}


@pytest.mark.parametrize("format", ["voc", "coco", "yolo"])
def test_the_usual_layout_is_read_with_its_splits(clean_folders, format, expected_boxes, found_boxes):
    source = find_source(clean_folders[format])
    years = "2017" if format == "coco" else ""
    assert (source.format, source.splits) == (format, (f"train{years}", f"val{years}"))
    for split, expected in expected_boxes.items():
        dataset = source.load(split)
        assert found_boxes(dataset) == expected
        assert (dataset.class_names, dataset.problems) == (("cat", "dog"), [])
        assert dataset.image_size(0) == (64, 48)


def test_no_split_and_joined_splits_mean_every_image_once(clean_folders):
    for folder in clean_folders.values():
        dataset = load_dataset(folder)
        assert names(dataset) == set("abcd")
        assert dataset.num_boxes == 4
        assert dataset.split == "all"
        ids = dataset.image_ids.tolist()
        assert len(set(ids)) == 4
        assert min(ids) >= 1
        assert names(load_dataset(folder, "val+train+val")) == set("abcd")


def test_parts_of_a_split_are_disjoint_complete_and_always_the_same(tmp_path, picture, voc_folder):
    for i in range(40):
        picture(voc_folder / "JPEGImages" / f"x{i:02}.png", (8, 8))
        (voc_folder / "Annotations" / f"x{i:02}.xml").write_text("<annotation></annotation>")
    listing = voc_folder / "ImageSets" / "Main" / "many.txt"
    listing.write_text("".join(f"x{i:02}\n" for i in range(40)))
    first, second = (load_dataset(voc_folder, f"many[{part}]") for part in (":75%", "75%:"))
    assert (len(first), len(second)) == (30, 10)
    assert names(first) | names(second) == {f"x{i:02}" for i in range(40)}
    assert names(second) != {f"x{i:02}" for i in range(30, 40)}  # mixed, not the last ones
    assert names(load_dataset(voc_folder, "many[75%:]")) == names(second)
    third = load_dataset(voc_folder, "many[25%:75%]+val")
    assert len(third) == 21
    assert names(third) <= names(first) | {"d"}


def test_an_unknown_split_is_answered_with_the_known_ones_and_impossible_parts_are_refused(clean_folders):
    for folder in clean_folders.values():
        for split in ("tset", "train[:1.2.3%]"):
            with pytest.raises(DataError, match=rf"no split '{re.escape(split)}'.*train"):
                load_dataset(folder, split)
        with pytest.raises(DataError, match=r"train\[:80%\]"):
            load_dataset(folder, "train[:120%]")


def test_an_empty_folder_is_answered_with_what_was_looked_for(tmp_path):
    with pytest.raises(DataError) as caught:
        load_dataset(tmp_path)
    for word in (str(tmp_path), "data.yaml", "annotations/*.json", "VOCdevkit"):
        assert word in str(caught.value)
    (tmp_path / "photos").mkdir()
    with pytest.raises(DataError, match=r"no such file or folder$"):  # without the name of an unrelated folder
        load_dataset(tmp_path / "absent")
    with pytest.raises(DataError, match=re.escape(f"did you mean '{tmp_path / 'photos'}'?")):
        load_dataset(tmp_path / "photo")
    with pytest.raises(DataError, match="unknown format"):
        load_dataset(tmp_path, format="kitti")
    with pytest.raises(DataError, match="COCO"):
        load_dataset(tmp_path, format="coco")


def test_a_format_without_write_cannot_be_converted_to_and_a_name_is_given_once(coco_folder, tmp_path, monkeypatch):
    class ReadOnly(DataFormat):
        find = read = classmethod(lambda *_: None)

    monkeypatch.setattr(FORMATS, "_entries", dict(FORMATS.items()))
    assert register_format("read-only")(ReadOnly).format == "read-only"
    with pytest.raises(DataError, match="cannot write the format 'read-only'"):
        convert_dataset(coco_folder, tmp_path / "out", to="read-only")
    with pytest.raises(ConfigError, match="'coco'"):
        register_format("coco")(ReadOnly)


def test_a_folder_of_two_formats_asks_which(voc_folder):
    (voc_folder / "data.yaml").write_text("train: JPEGImages\nnames: [cat]\n")
    with pytest.raises(DataError, match="voc and yolo"):
        load_dataset(voc_folder)
    assert find_source(voc_folder, format="voc").splits == ("train", "val")


@pytest.mark.parametrize("wrong", [[], ["cat", "cat"], [""], "cat"])
def test_impossible_class_names_are_refused(voc_folder, wrong):
    with pytest.raises(DataError, match="class names"):
        load_dataset(voc_folder, class_names=wrong)


def test_a_split_without_usable_images_says_why(coco_folder):
    for image in (coco_folder / "train2017").iterdir():
        image.unlink()
    with pytest.raises(DataError, match=r"no usable image in split 'train2017': 3 missing-image"):
        load_dataset(coco_folder, "train")


def test_boxes_are_dropped_or_clipped_with_a_record(coco_folder):
    boxes = [[5, 5, 0, 9], [-10, 5, 20, 20], [100, 5, 9, 9], [-0.2, 0, 64.3, 48.1]]  # the last one by rounding alone
    more = [{"id": 50 + i, "image_id": 10, "category_id": 3, "bbox": box} for i, box in enumerate(boxes)]
    edit_json(coco_folder / VAL, lambda content: content["annotations"].extend(more))
    dataset = load_dataset(coco_folder, "val")
    assert dataset.target(0)["boxes"].tolist() == [[10, 10, 30, 30], [0, 5, 10, 25], [0, 0, 64, 48]]
    found = [(problem.kind, problem.file, problem.message[:13]) for problem in dataset.problems]
    kinds = {50: "degenerate-box", 52: "degenerate-box", 51: "out-of-bounds-box"}
    assert found == [(kind, VAL, f"annotation {number}") for number, kind in kinds.items()]


def test_a_source_parses_each_split_once(coco_folder):
    source = find_source(coco_folder)
    whole = source.load()
    train = source.load("train", class_names=whole.class_names)
    (coco_folder / "annotations/instances_train2017.json").unlink()
    assert source.load("train2017") is train
    parts = [source.load(f"train[{part}]") for part in (":50%", "50%:")]
    assert names(parts[0]) | names(parts[1]) == names(train)
    with pytest.raises(DataError, match=r"instances_train2017\.json"):
        source.load("train", class_names=["dog"])


def test_a_fingerprint_is_the_same_in_another_place_and_format(clean_folders, tmp_path):
    for format, folder in clean_folders.items():
        before = fingerprint(load_dataset(folder, "train"))
        assert (before["class_names"], before["images"], before["boxes"]) == (["cat", "dog"], 3, 3)
        moved = folder.rename(tmp_path / f"moved-{format}")
        assert fingerprint(load_dataset(moved, "train")) == before
        converted = tmp_path / f"converted-{format}"
        convert_dataset(moved, converted, to="coco" if format == "yolo" else "yolo")
        assert fingerprint(load_dataset(converted, "train")) == before


def test_a_fingerprint_names_what_changed(coco_folder):
    file = coco_folder / "annotations/instances_train2017.json"
    original, image = file.read_text(), coco_folder / "train2017" / "c.png"
    before = fingerprint(load_dataset(coco_folder, "train"))

    def changed(edit=lambda content: None) -> set[str]:
        file.write_text(original)
        edit_json(file, edit)
        after = fingerprint(load_dataset(coco_folder, "train"))
        return {key for key in before if after[key] != before[key]}

    assert changed() == set()
    assert changed(lambda content: content["annotations"][0].update(bbox=[4, 5, 16, 21])) == {"annotations"}
    assert changed(lambda content: content["annotations"][0].update(iscrowd=1)) == {"annotations"}
    assert changed(lambda content: content["categories"][0].update(name="wolf")) == {"class_names"}
    assert changed(lambda content: content["images"].pop()) == {"images", "annotations", "files"}
    image.write_bytes(image.read_bytes()[:-1] + b"?")
    assert changed() == {"files"}


def test_a_fingerprint_of_many_images_sees_every_file_size(tmp_path):
    count = 2 * SAMPLED_FILES
    paths = [f"{number}.png" for number in range(count)]
    for path in paths:
        (tmp_path / path).write_bytes(b"of its size")
    sizes = {"image_sizes": [(8, 8)] * count, "boxes_per_image": [0] * count, "boxes": [], "labels": []}
    dataset = DetectionDataset(root=tmp_path, class_names=["cat"], image_paths=paths, **sizes)
    before = fingerprint(dataset)
    dataset.image_path(1).write_bytes(b"one byte more")
    assert fingerprint(dataset)["files"] != before["files"]
