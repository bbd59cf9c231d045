"""Pascal VOC in all its layouts."""

import shutil

import pytest

from aploss.data.check import check_dataset
from aploss.data.load import dataset_splits, load_dataset
from aploss.data.voc import VocFormat, parse_annotation, voc_annotation
from aploss.errors import DataError


def test_a_single_folder_is_read_with_its_own_splits(voc_folder, expected_boxes, found_boxes):
    assert dataset_splits(voc_folder) == ("train", "val")
    for split, expected in expected_boxes.items():
        dataset = load_dataset(voc_folder, split)
        assert found_boxes(dataset) == expected
        assert dataset.class_names == ("cat", "dog")
        assert dataset.problems == []
        assert [dataset.image_id(i) for i in range(len(dataset))] == [*range(1, len(dataset) + 1)]


def test_coordinates_count_from_one_and_include_the_last_pixel(voc_folder):
    (voc_folder / "Annotations" / "d.xml").write_text(
        "<annotation><size><width>64</width><height>48</height></size><object><name>cat</name>"
        "<bndbox><xmin>1</xmin><ymin>1</ymin><xmax>64</xmax><ymax>48</ymax></bndbox></object>"
        "</annotation>"
    )
    dataset = load_dataset(voc_folder, "val")
    assert dataset.boxes(0).tolist() == [[0, 0, 64, 48]]  # the whole image
    assert dataset.problems == []


def test_difficult_and_crowd_flags_are_read(voc_folder):
    xml = voc_folder / "Annotations" / "d.xml"
    text = xml.read_text()
    xml.write_text(text.replace("<difficult>0", "<crowd>1</crowd><difficult>1"))
    _, target = load_dataset(voc_folder, "val")[0]
    assert target["difficult"].tolist() == [True]
    assert target["crowd"].tolist() == [True]


@pytest.mark.parametrize("below", ["VOCdevkit", ""])
def test_the_devkit_has_a_split_for_each_year_and_set(tmp_path, voc_folder, below):
    devkit = tmp_path / "data" / below
    devkit.mkdir(parents=True)
    for year in (2007, 2012):
        shutil.copytree(voc_folder, devkit / f"VOC{year}")
    assert dataset_splits(tmp_path / "data") == (
        "2007_train", "2007_val", "2012_train", "2012_val",
    )  # fmt: skip
    joined = load_dataset(tmp_path / "data", "2007_train+2012_val")
    assert len(joined) == 4
    assert joined.split == "2007_train+2012_val"
    assert [joined.image_id(i) for i in range(4)] == [1, 2, 3, 4]
    assert joined.relative_path(0).endswith("VOC2007/JPEGImages/a.png")
    assert joined.relative_path(3).endswith("VOC2012/JPEGImages/d.png")
    assert len(load_dataset(tmp_path / "data")) == 8
    if below:
        assert dataset_splits(devkit) == dataset_splits(tmp_path / "data")
        assert len(load_dataset(devkit / "VOC2007", "train")) == 3


def test_lists_of_single_classes_name_the_classes_and_are_no_splits(voc_folder):
    main = voc_folder / "ImageSets" / "Main"
    for name in ("cat", "dog", "zebra"):
        (main / f"{name}_train.txt").write_text("a  1\nb -1\nc -1\n")
    assert dataset_splits(voc_folder) == ("train", "val")
    assert load_dataset(voc_folder, "train").class_names == ("cat", "dog", "zebra")


def test_class_order_comes_from_labels_txt_where_there_is_one(voc_folder):
    (voc_folder / "labels.txt").write_text("dog\ncat\n")
    dataset = load_dataset(voc_folder, "val")
    assert dataset.class_names == ("dog", "cat")
    assert dataset.labels(0).tolist() == [1]


def test_given_class_names_decide_order_and_leave_others_out(voc_folder):
    dataset = load_dataset(voc_folder, "train", class_names=["dog"])
    assert dataset.num_boxes == 2
    assert set(dataset.all_labels().tolist()) == {0}
    assert [(p.kind, p.file) for p in dataset.problems] == [("unknown-class", "Annotations/a.xml")]


def test_a_plain_folder_without_lists_is_one_split(tmp_path, voc_folder, expected_boxes, found_boxes):
    plain = tmp_path / "plain"
    shutil.copytree(voc_folder / "Annotations", plain)
    for image in (voc_folder / "JPEGImages").iterdir():
        shutil.copy(image, plain)
    assert dataset_splits(plain) == ("all",)
    dataset = load_dataset(plain)
    assert found_boxes(dataset) == {**expected_boxes["train"], **expected_boxes["val"]}
    assert dataset.problems == []


def test_folders_called_train_and_valid_are_splits(tmp_path, voc_folder):
    root = tmp_path / "exported"
    for split, names in {"train": "abc", "valid": "d"}.items():
        (root / split / "labels").mkdir(parents=True)
        (root / split / "pictures").mkdir()
        for name in names:
            shutil.copy(voc_folder / "Annotations" / f"{name}.xml", root / split / "labels")
            shutil.copy(voc_folder / "JPEGImages" / f"{name}.png", root / split / "pictures")
    assert dataset_splits(root) == ("train", "valid")
    assert len(load_dataset(root, "train")) == 3
    assert load_dataset(root, "val").split == "valid"  # the usual name is understood too


def test_the_same_name_in_two_folders_is_paired_by_folder(tmp_path, voc_folder, picture):
    root = tmp_path / "nested"
    for split, name in (("train", "a"), ("val", "d")):
        (root / "xml" / split).mkdir(parents=True)
        picture(root / "img" / split / "same.png")
        shutil.copy(voc_folder / "Annotations" / f"{name}.xml", root / "xml" / split / "same.xml")
    for split, boxes in (("train", 2), ("val", 1)):
        dataset = load_dataset(root, split)
        assert dataset.relative_path(0) == f"img/{split}/same.png"
        assert dataset.num_boxes == boxes


@pytest.mark.parametrize(
    "lines", ["a\nc\n", "JPEGImages/a.png\nJPEGImages/c.png\n",
              "JPEGImages/a.png Annotations/a.xml\nJPEGImages/c.png Annotations/c.xml\n",
              "\ufeffa.png\r\n\r\nc.png\r\n"]
)  # fmt: skip
def test_a_list_file_may_hold_ids_images_or_pairs(voc_folder, lines):
    shutil.rmtree(voc_folder / "ImageSets")
    (voc_folder / "mine.txt").write_text(lines, encoding="utf-8")
    assert dataset_splits(voc_folder) == ("mine",)
    for split in ("mine", "mine.txt", str(voc_folder / "mine.txt")):
        dataset = load_dataset(voc_folder, split)
        assert [dataset.image_path(i).name for i in range(len(dataset))] == ["a.png", "c.png"]


def test_a_list_file_outside_the_dataset_may_be_named(tmp_path, voc_folder):
    listing = tmp_path / "elsewhere.txt"
    listing.write_text("b\n")
    assert len(load_dataset(voc_folder, str(listing))) == 1


def test_names_with_spaces_and_dots_are_found(voc_folder):
    for folder, extension in (("Annotations", "xml"), ("JPEGImages", "png")):
        file = voc_folder / folder / f"d.{extension}"
        file.rename(file.with_name(f"my dog 1.v2.{extension}"))
    (voc_folder / "ImageSets/Main/val.txt").write_text("my dog 1.v2\n")
    assert load_dataset(voc_folder, "val").num_boxes == 1


def test_a_size_of_zero_is_taken_from_the_image(voc_folder):
    xml = voc_folder / "Annotations" / "d.xml"
    xml.write_text(xml.read_text().replace("<width>64<", "<width>0<"))
    dataset = load_dataset(voc_folder, "val")
    assert dataset.image_size(0) == (64, 48)
    assert [problem.kind for problem in dataset.problems] == ["missing-size"]


def test_an_annotation_without_any_object_anywhere_says_that_classes_are_missing(voc_folder):
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
    dataset = load_dataset(voc_folder, "val")
    assert dataset.relative_path(0) == "JPEGImages/photograph.png"
    assert check_dataset(voc_folder).findings == []


def test_a_folder_without_xml_is_not_voc(tmp_path):
    assert VocFormat.find(tmp_path) is None


def test_bccd_has_four_splits_and_all_but_two_boxes(bccd):
    assert dataset_splits(bccd) == ("train", "trainval", "val", "test")
    sizes = {split: len(load_dataset(bccd, split)) for split in dataset_splits(bccd)}
    assert sizes == {"train": 205, "trainval": 292, "val": 87, "test": 72}
    whole = load_dataset(bccd)
    assert (len(whole), whole.num_boxes) == (364, 4886)
    assert whole.class_names == ("Platelets", "RBC", "WBC")
    assert sorted((p.kind, p.file) for p in whole.problems) == [
        ("degenerate-box", "Annotations/BloodImage_00338.xml"),
        ("degenerate-box", "Annotations/BloodImage_00343.xml"),
    ]


@pytest.mark.parametrize("width", ["inf", "-inf", "nan", "1e30", "9" * 20, "0", "-64", "4294967296"])
def test_an_impossible_image_size_is_taken_from_the_image(voc_folder, width):
    xml = voc_folder / "Annotations" / "a.xml"
    xml.write_text(xml.read_text().replace("<width>64<", f"<width>{width}<"))
    dataset = load_dataset(voc_folder, "train")
    assert dataset.image_size(0) == (64, 48)
    assert [(p.kind, p.file) for p in dataset.problems] == [("missing-size", "Annotations/a.xml")]


@pytest.mark.parametrize("value", ["1e30", "9" * 20, "1e400"])
def test_a_coordinate_of_many_digits_is_clipped_or_dropped(voc_folder, value):
    xml = voc_folder / "Annotations" / "a.xml"
    xml.write_text(xml.read_text().replace("<xmax>20<", f"<xmax>{value}<"))
    (problem,) = load_dataset(voc_folder, "train").problems
    assert problem.kind in ("out-of-bounds-box", "non-finite-coordinate")


def test_a_list_that_cannot_be_read_is_a_problem(voc_folder):
    (voc_folder / "ImageSets" / "Main" / "train.txt").write_bytes(b"\xff\xfea\x00")
    with pytest.raises(DataError, match=r"train\.txt: not UTF-8"):
        load_dataset(voc_folder, "train")
    assert check_dataset(voc_folder).exit_code == 2


def test_annotations_are_written_as_they_are_read():
    boxes = [[0.0, 0.0, 64.0, 48.0], [1.25, 2.5, 11.0, 22.75]]
    text = voc_annotation(
        "é\udcff.jpg", (64, 48), ["cat", "a & b"], boxes, difficult=[True, False], crowd=[False, True]
    )
    read = parse_annotation("a.xml", text.encode())
    assert (read.file_name, read.size) == ("é\ufffd.jpg", (64, 48))
    assert [list(one.corners) for one in read.objects] == boxes
    assert [(one.name, one.difficult, one.crowd) for one in read.objects] == [
        ("cat", True, False),
        ("a & b", False, True),
    ]
    scored = voc_annotation("a.jpg", (64, 48), ["cat"], [[1 / 3, 0, 9, 9]], scores=[0.5], digits=2)
    assert "<score>0.5000</score>" in scored
    assert "<xmin>1.33</xmin>" in scored
