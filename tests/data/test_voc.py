"""Pascal VOC in its three layouts."""

import shutil
from pathlib import Path

import pytest
from small_datasets import write_picture

from aploss.data.annotations import DetectionDataset
from aploss.data.check import check_dataset
from aploss.data.formats import find_source, load_dataset
from aploss.data.voc import parse_annotation, voc_annotation
from aploss.errors import DataError


@pytest.mark.parametrize("parent", ["", "VOCdevkit"])
def test_a_devkit_has_the_splits_of_each_year(tmp_path, voc_folder, parent, found_boxes, expected_boxes):
    root = tmp_path / "kit"
    for year in ("VOC2007", "VOC2012"):
        shutil.copytree(voc_folder, root / parent / year)
    for split, flag in (("train", "1"), ("val", "-1")):  # lists of single classes are not splits
        (root / parent / "VOC2007" / "ImageSets" / "Main" / f"dog_{split}.txt").write_text(f"a  {flag}\n")
    assert find_source(root).splits == ("2007_train", "2007_val", "2012_train", "2012_val")
    assert found_boxes(load_dataset(root, "2012_train")) == expected_boxes["train"]
    joined = load_dataset(root, "2007_train+2012_val")
    assert len(joined) == 4
    assert joined.image_paths[3].endswith("VOC2012/JPEGImages/d.png")


def test_the_test_images_of_a_benchmark_are_read_without_annotations(tmp_path, voc_folder):
    """07++12: trained on 2007 trainval and test and 2012 trainval, for the test images of 2012."""
    for year, lists in {"2007": {"trainval": "ab", "test": "d"}, "2012": {"trainval": "c", "test": "ef"}}.items():
        root = tmp_path / "VOCdevkit" / f"VOC{year}"
        shutil.copytree(voc_folder / "Annotations", root / "Annotations")
        (root / "ImageSets" / "Main").mkdir(parents=True)
        for split, names in lists.items():
            (root / "ImageSets" / "Main" / f"{split}.txt").write_text("".join(f"{name}\n" for name in names))
            for name in names:
                write_picture(root / "JPEGImages" / f"{name}.png")
    train = load_dataset(tmp_path / "VOCdevkit", "2007_trainval+2007_test+2012_trainval")
    assert sorted(train.image_path(i).stem for i in range(len(train))) == ["a", "b", "c", "d"]
    test = load_dataset(tmp_path / "VOCdevkit", "2012_test", class_names=train.class_names)
    assert [test.image_path(i).stem for i in range(len(test))] == ["e", "f"]
    assert test.num_boxes == 0
    assert [(problem.kind, problem.count) for problem in test.problems] == [("image-without-annotation", 2)]


PLACES = {
    "beside the images": ("{split}/{name}.xml", "{split}/{name}.png"),
    "parallel folders": ("xml/{split}/{name}.xml", "img/{split}/{name}.png"),
    "parallel folders of each split": ("{split}/annotations/{name}.xml", "{split}/images/{name}.png"),
    "two folders without splits": ("labels/{name}.xml", "photos/{name}.png"),
}


@pytest.mark.parametrize(("xml", "image"), PLACES.values(), ids=PLACES)
def test_xml_files_beside_their_images_or_in_a_parallel_folder_are_read(
    tmp_path, voc_folder, xml, image, expected_boxes, found_boxes
):
    root = tmp_path / "other"
    for split, names in expected_boxes.items():
        for name in names:
            for source, target in ((f"Annotations/{name}.xml", xml), (f"JPEGImages/{name}.png", image)):
                place = root / target.format(split=split, name=name)
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(voc_folder / source, place)
    expected = expected_boxes if "split" in xml else {"all": expected_boxes["train"] | expected_boxes["val"]}
    assert find_source(root).splits == tuple(expected)
    for split, boxes in expected.items():
        assert found_boxes(load_dataset(root, split)) == boxes
    assert check_dataset(root).problems == []


def test_images_anywhere_else_are_missing_and_the_message_says_where_they_belong(voc_folder):
    (voc_folder / "JPEGImages").rename(voc_folder / "deep")
    (voc_folder / "JPEGImages" / "far").mkdir(parents=True)
    (voc_folder / "deep" / "a.png").rename(voc_folder / "JPEGImages" / "far" / "a.png")
    with pytest.raises(DataError, match="beside the annotation or in a parallel folder"):
        load_dataset(voc_folder, "train")


def test_coordinates_count_from_one_and_include_the_last_pixel(voc_folder):
    xml = voc_folder / "Annotations" / "d.xml"
    corners = "<xmin>1</xmin><ymin>1</ymin><xmax>64</xmax><ymax>48</ymax>"
    text = f"<annotation><object><name>cat</name><bndbox>{corners}</bndbox></object></annotation>"
    xml.write_text(text)
    assert load_dataset(voc_folder, "val").target(0)["boxes"].tolist() == [[0, 0, 64, 48]]
    xml.write_text(text.replace("<xmin>1<", "<xmin>0<"))
    assert load_dataset(voc_folder, "val").target(0)["boxes"].tolist() == [[0, 0, 64, 48]]


@pytest.mark.parametrize("lines", ["a\nc\n", "JPEGImages/a.png\nJPEGImages/c.png\n", "a.png a.xml\r\nc.png c.xml\r\n"])
def test_a_list_may_hold_names_or_paths(voc_folder, lines):
    for folder, extension in (("Annotations", "xml"), ("JPEGImages", "png")):
        (voc_folder / f"{folder}/d.{extension}").rename(voc_folder / f"{folder}/my dog 1.v2.{extension}")
    (voc_folder / "ImageSets/Main/mine.txt").write_text(f"{lines}my dog 1.v2\n", encoding="utf-8")
    assert [Path(path).stem for path in load_dataset(voc_folder, "mine").image_paths] == ["a", "c", "my dog 1.v2"]


def test_without_any_object_the_class_names_have_to_be_given(voc_folder):
    for xml in (voc_folder / "Annotations").iterdir():
        xml.write_text("<annotation></annotation>")
    with pytest.raises(DataError, match="give the class names"):
        load_dataset(voc_folder, "train")
    dataset = load_dataset(voc_folder, "train", class_names=["cat"])
    assert (len(dataset), dataset.num_boxes) == (3, 0)


def test_an_image_of_another_name_is_found_by_the_name_in_the_annotation(voc_folder):
    (voc_folder / "JPEGImages/d.png").rename(voc_folder / "JPEGImages/photograph.png")
    xml = voc_folder / "Annotations/d.xml"
    xml.write_text(xml.read_text().replace("d.png", "../JPEGImages/photograph.png"))
    assert load_dataset(voc_folder, "val").image_paths[0] == "JPEGImages/photograph.png"
    assert check_dataset(voc_folder).problems == []


def test_bccd_has_four_splits_and_all_but_two_boxes(bccd):
    assert find_source(bccd).splits == ("train", "trainval", "val", "test")
    sizes = {split: len(load_dataset(bccd, split)) for split in find_source(bccd).splits}
    assert sizes == {"train": 205, "trainval": 292, "val": 87, "test": 72}
    whole = load_dataset(bccd)
    assert (len(whole), whole.num_boxes) == (364, 4886)
    assert whole.class_names == ("Platelets", "RBC", "WBC")
    assert sorted((p.kind, p.file) for p in whole.problems) == [
        ("degenerate-box", "Annotations/BloodImage_00338.xml"),
        ("degenerate-box", "Annotations/BloodImage_00343.xml"),
    ]


@pytest.mark.parametrize("width", ["nan", "1e30", "0", "4294967296"])
def test_an_impossible_image_size_is_read_from_the_image(voc_folder, width):
    xml = voc_folder / "Annotations" / "a.xml"
    xml.write_text(xml.read_text().replace("<width>64<", f"<width>{width}<"))
    dataset = load_dataset(voc_folder, "train")
    assert dataset.image_size(0) == (64, 48)
    assert dataset.problems == []


def test_annotations_are_written_as_they_are_read():
    boxes = [[0.0, 0.0, 64.0, 48.0], [1.25, 2.5, 11.0, 22.75]]
    flags = {"difficult": [True, False], "crowd": [False, True]}
    columns = {"image_paths": ["a.jpg"], "image_sizes": [(64, 48)], "boxes_per_image": [2], "labels": [0, 1]}
    dataset = DetectionDataset(root=".", class_names=["cat", "a & b"], boxes=boxes, **columns, **flags)
    text = voc_annotation(dataset, 0, "é\udcff.jpg")
    assert "<xmin>1</xmin>" in text
    read = parse_annotation("a.xml", text.encode())
    assert (read.file_name, read.size) == ("é\ufffd.jpg", (64, 48))
    assert [list(one["corners"]) for one in read.objects] == boxes
    assert [one["class_name"] for one in read.objects] == ["cat", "a & b"]
    assert {flag: [one[flag] for one in read.objects] for flag in flags} == flags
