"""Nothing in a dataset may reach outside its folder, expand entities or blow up."""

import json
import os
from pathlib import Path

import pytest
from PIL import Image

from aploss.cli.main import main
from aploss.data import check_dataset, load_dataset
from aploss.data.paths import DatasetFolder
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
    assert main(["data", "check", str(folder)]) == 2
    return str(caught.value)


def paths_outside(secret: Path, up: str) -> list[str]:
    return [
        f"{up}/{secret.name}",
        f"x/{up}/../{secret.name}",
        str(secret),
        f"{up}/{secret.name}".replace("/", "\\"),
        r"C:\secret.png",
        r"\\server\share\secret.png",
        "/etc/passwd",
    ]


@pytest.mark.parametrize("which", range(7))
def test_a_coco_file_name_cannot_leave_the_folder(coco_folder, secret, which):
    content = json.loads((coco_folder / TRAIN_JSON).read_text())
    content["images"][1]["file_name"] = paths_outside(secret, "../..")[which]
    (coco_folder / TRAIN_JSON).write_text(json.dumps(content))
    message = refused(coco_folder)
    assert "instances_train2017.json" in message
    assert "outside the dataset's folder" in message


def test_a_coco_file_name_that_would_leave_the_folder_from_its_root_is_refused_too(coco_folder, secret):
    content = json.loads((coco_folder / TRAIN_JSON).read_text())
    content["images"][1]["file_name"] = f"../{secret.name}"
    (coco_folder / TRAIN_JSON).write_text(json.dumps(content))
    assert "outside the dataset's folder" in refused(coco_folder)


@pytest.mark.parametrize("which", range(7))
def test_a_voc_file_name_cannot_leave_the_folder(voc_folder, secret, which):
    xml = voc_folder / "Annotations" / "b.xml"
    outside = paths_outside(secret, "../..")[which]
    xml.write_text(xml.read_text().replace("b.png", outside))
    assert "Annotations/b.xml" in refused(voc_folder)


@pytest.mark.parametrize("which", range(7))
def test_a_voc_list_cannot_leave_the_folder(voc_folder, secret, which):
    listing = voc_folder / "ImageSets/Main/train.txt"
    listing.write_text(f"a\n{paths_outside(secret, '..')[which]}\n")
    assert "train.txt" in refused(voc_folder)


@pytest.mark.parametrize("which", range(7))
def test_a_yolo_list_cannot_leave_the_folder(yolo_folder, secret, which):
    (yolo_folder / "train.txt").write_text(f"images/train/a.png\n{paths_outside(secret, '..')[which]}\n")
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


@pytest.mark.parametrize("format", ["voc", "coco", "yolo"])
def test_a_linked_image_folder_cannot_leave_the_folder(clean_folders, tmp_path, format):
    folder = clean_folders[format]
    images = next(folder.rglob("a.png")).parent
    images.rename(tmp_path / "moved")
    images.symlink_to(tmp_path / "moved")
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


def test_going_up_inside_the_folder_is_allowed(tmp_path):
    folder = DatasetFolder(tmp_path)
    assert folder.inside("../images/a.png", base="labels", named_in="x") == "images/a.png"
    assert folder.inside("a/../b.png", named_in="x") == "b.png"
    assert folder.inside("..name/a..b.png", named_in="x") == "..name/a..b.png"


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


def test_yaml_cannot_make_objects_and_its_aliases_are_not_multiplied(yolo_folder, tmp_path):
    (yolo_folder / "data.yaml").write_text(
        f"train: images/train\nnames: !!python/object/apply:os.mkdir ['{tmp_path / 'made'}']\n"
    )
    with pytest.raises(DataError, match=r"data\.yaml"):
        load_dataset(yolo_folder, "train")
    assert not (tmp_path / "made").exists()

    levels = ["a0: &a0 [x, x]"] + [f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]" for i in range(1, 40)]
    (yolo_folder / "data.yaml").write_text("\n".join(levels) + "\ntrain: images/train\nnames: [*a39]\n")
    with pytest.raises(DataError, match="every class must have a name"):
        load_dataset(yolo_folder, "train")


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_a_decompression_bomb_is_named_and_left_out(coco_folder):
    bomb = coco_folder / "train2017" / "a.png"
    Image.new("1", (15_000, 15_000)).save(bomb)
    with pytest.raises(DataError, match=r"a\.png: refused as a decompression bomb"):
        load_dataset(coco_folder, "train")[0]
    assert len(load_dataset(coco_folder, "train", verify_images=True)) == 2
    findings = check_dataset(coco_folder).findings
    assert ("image-too-large", "train2017/a.png") in {
        (finding.problem.kind, finding.problem.file) for finding in findings
    }


SPECIAL = [
    ("voc", "Annotations/a.xml"),
    ("voc", "ImageSets/Main/train.txt"),
    ("voc", "labels.txt"),
    ("coco", TRAIN_JSON),
    ("yolo", "labels/train/a.txt"),
    ("yolo", "data.yaml"),
]


@pytest.mark.parametrize("how", ["pipe", "link to itself", "folder"])
@pytest.mark.parametrize(("format", "file"), SPECIAL)
def test_what_is_no_file_in_the_place_of_annotations_is_told_and_not_waited_for(clean_folders, format, file, how):
    place = clean_folders[format] / file
    place.unlink(missing_ok=True)
    if how == "pipe":
        os.mkfifo(place)
    elif how == "link to itself":
        place.symlink_to(place.name)
    else:
        place.mkdir()
    if file == "data.yaml":  # nothing is left that could be a dataset
        with pytest.raises(DataError, match=r"data\.yaml|no dataset found"):
            check_dataset(clean_folders[format])
    else:
        result = check_dataset(clean_folders[format])
        assert result.findings or file == "labels.txt"


@pytest.mark.parametrize("how", ["pipe", "link to itself"])
@pytest.mark.parametrize("format", ["voc", "coco", "yolo"])
def test_what_is_no_file_in_the_place_of_an_image_is_told(clean_folders, format, how):
    image = next(clean_folders[format].rglob("a.png"))
    image.unlink()
    if how == "pipe":
        os.mkfifo(image)
    else:
        image.symlink_to(image.name)
    found = {finding.problem.kind for finding in check_dataset(clean_folders[format]).findings}
    assert found & {"image-not-a-file", "missing-image", "missing-annotation"}


def test_a_folder_that_links_to_itself_is_passed_by(coco_folder):
    (coco_folder / "loop").symlink_to("loop")
    (coco_folder / "train2017" / "loop").symlink_to("loop")
    assert len(load_dataset(coco_folder, "train")) == 3
    with pytest.raises(DataError, match="no such file or folder"):
        load_dataset(coco_folder / "loop")
