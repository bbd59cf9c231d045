"""Nothing in a dataset may reach outside its folder, expand entities or blow up."""

import json
from pathlib import Path

import pytest

from aploss.cli.main import main
from aploss.data import load_dataset
from aploss.data.folder import DatasetFolder
from aploss.errors import DataError

TRAIN_JSON = "annotations/instances_train2017.json"


@pytest.fixture
def secret(tmp_path, picture) -> Path:
    """An image beside the dataset's folder."""
    return picture(tmp_path / "secret.png")


def refused(folder: Path, split: str | None = "train") -> str:
    """Asserts that loading and checking both refuse the dataset, and returns the message."""
    with pytest.raises(DataError) as caught:
        load_dataset(folder, split)
    assert main(["data", "check", str(folder), "--json"]) == 2
    return str(caught.value)


OUTSIDE = [
    "../../secret.png", "x/../../../secret.png", "..\\..\\secret.png", r"C:\s.png", r"\\server\s.png", "/etc/passwd",
]  # fmt: skip


@pytest.mark.parametrize("path", OUTSIDE)
def test_a_path_cannot_leave_the_folder(tmp_path, path):
    with pytest.raises(DataError, match="outside the dataset's folder"):
        DatasetFolder(tmp_path).inside(path, base="images", named_in="x")


def test_a_coco_file_name_cannot_leave_the_folder(coco_folder, secret):
    content = json.loads((coco_folder / TRAIN_JSON).read_text())
    content["images"][1]["file_name"] = "../../secret.png"
    (coco_folder / TRAIN_JSON).write_text(json.dumps(content))
    assert "instances_train2017.json" in refused(coco_folder)


def test_a_voc_annotation_is_never_paired_with_an_image_outside(voc_folder, secret):
    (voc_folder / "JPEGImages/b.png").unlink()
    xml = voc_folder / "Annotations" / "b.xml"
    xml.write_text(xml.read_text().replace("b.png", "../../secret.png"))
    (voc_folder / "ImageSets/Main/train.txt").write_text("a\n../../secret.png\nb\n")
    dataset = load_dataset(voc_folder, "train")
    assert dataset.image_paths == ["JPEGImages/a.png"]
    assert {problem.kind for problem in dataset.problems} == {"unreadable-annotation", "missing-image"}


def test_a_yolo_list_cannot_leave_the_folder(yolo_folder, secret):
    (yolo_folder / "train.txt").write_text("images/train/a.png\n../../secret.png\n")
    (yolo_folder / "data.yaml").write_text("train: train.txt\nnames: [cat, dog]\n")
    assert "train.txt" in refused(yolo_folder)


@pytest.mark.parametrize("how", ["train", "path"])
@pytest.mark.parametrize("absolute", [False, True])
def test_a_yolo_description_cannot_leave_the_folder(yolo_folder, tmp_path, picture, how, absolute):
    picture(tmp_path / "elsewhere" / "pictures" / "x.png")
    place = str(tmp_path / "elsewhere") if absolute else "../elsewhere"
    text = {
        "train": f"train: {place}/pictures\nnames: [cat]\n",
        "path": f"path: {place}\ntrain: pictures\nnames: [cat]\n",
    }[how]
    (yolo_folder / "data.yaml").write_text(text)
    assert "data.yaml" in refused(yolo_folder)


@pytest.mark.parametrize("format", ["voc", "coco", "yolo"])
def test_a_linked_image_cannot_leave_the_folder(clean_folders, secret, format):
    folder = clean_folders[format]
    image = next(folder.rglob("a.png"))
    image.unlink()
    image.symlink_to(secret)
    assert "symbolic link" in refused(folder)


@pytest.mark.parametrize(
    ("format", "file"),
    [("voc", "Annotations/a.xml"), ("coco", TRAIN_JSON), ("yolo", "labels/train/a.txt"),
     ("voc", "ImageSets/Main/train.txt"), ("yolo", "data.yaml")],
)  # fmt: skip
def test_a_linked_annotation_cannot_leave_the_folder(clean_folders, tmp_path, format, file):
    annotation = clean_folders[format] / file
    annotation.rename(tmp_path / "moved")
    annotation.symlink_to(tmp_path / "moved")
    assert "symbolic link" in refused(clean_folders[format])


def test_links_inside_the_folder_and_a_linked_folder_itself_are_followed(coco_folder, tmp_path):
    image = coco_folder / "train2017" / "a.png"
    image.rename(coco_folder / "stored.png")
    image.symlink_to(coco_folder / "stored.png")
    (tmp_path / "link").symlink_to(coco_folder)
    assert len(load_dataset(tmp_path / "link", "train")) == 3


ENTITIES = {
    "billion laughs": '<!DOCTYPE a [<!ENTITY a "lol"><!ENTITY b "&a;&a;&a;&a;&a;&a;&a;&a;">]>',
    "a file of the system": '<!DOCTYPE a [<!ENTITY b SYSTEM "file:///etc/passwd">]>',
    "a file of the net": '<!DOCTYPE a SYSTEM "http://127.0.0.1:9/a.dtd">',
}


@pytest.mark.parametrize("declaration", ENTITIES.values(), ids=ENTITIES)
def test_xml_entities_are_not_expanded(voc_folder, declaration):
    xml = voc_folder / "Annotations" / "b.xml"
    entity = "&b;" if "ENTITY b" in declaration else "dog"
    text = xml.read_text().replace("<name>dog<", f"<name>{entity}<")
    xml.write_text(f"<?xml version='1.0'?>{declaration}{text}")
    message = refused(voc_folder)
    assert "Annotations/b.xml" in message
    assert "not expanded" in message
    assert "root:" not in message


@pytest.mark.parametrize("name", ["b\\c", "x:1"])
def test_files_whose_names_look_like_paths_of_another_system_are_read(tmp_path, yolo_folder, voc_folder, name):
    (yolo_folder / "images/train/a.png").rename(yolo_folder / f"images/train/{name}.png")
    (yolo_folder / "labels/train/a.txt").rename(yolo_folder / f"labels/train/{name}.txt")
    (tmp_path / "flat").mkdir()
    (voc_folder / "JPEGImages/a.png").rename(tmp_path / f"flat/{name}.png")
    (voc_folder / "Annotations/a.xml").rename(tmp_path / f"flat/{name}.xml")
    for dataset in (load_dataset(yolo_folder, "train"), load_dataset(tmp_path / "flat")):
        assert dataset.problems == []
        assert any(path.endswith(f"{name}.png") for path in dataset.image_paths)


def test_a_few_aliases_are_read(yolo_folder):
    (yolo_folder / "data.yaml").write_text("base: &names [cat, dog]\nnames: *names\ntrain: images/train\n")
    assert load_dataset(yolo_folder, "train").class_names == ("cat", "dog")


def test_a_folder_that_links_to_itself_is_passed_by(coco_folder):
    (coco_folder / "loop").symlink_to("loop")
    (coco_folder / "train2017" / "loop").symlink_to("loop")
    assert len(load_dataset(coco_folder, "train")) == 3
    with pytest.raises(DataError, match="no such file or folder"):
        load_dataset(coco_folder / "loop")
