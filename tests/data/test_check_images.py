"""Each kind of image fault is planted in a clean set, found, and its file named."""

import json
import shutil
import struct
import zlib
from pathlib import Path

import pytest
from PIL import Image

from aploss.data import check_dataset

A = "train2017/a.png"
SIZE = (64, 48)


def save(image: Image.Image, **options):
    return lambda folder: image.save(folder / A, **options)


def cut(folder: Path) -> None:
    content = (folder / A).read_bytes()
    (folder / A).write_bytes(content[: len(content) // 2])


def damage(folder: Path) -> None:
    content = bytearray((folder / A).read_bytes())
    middle = len(content) // 2
    content[middle : middle + 50] = bytes(50)
    (folder / A).write_bytes(content)


def claim_size(width: int, height: int):
    """Writes another size into the PNG's header, as a bomb does: the file stays small."""

    def plant(folder: Path) -> None:
        content = bytearray((folder / A).read_bytes())
        content[16:24] = struct.pack(">II", width, height)
        content[29:33] = struct.pack(">I", zlib.crc32(bytes(content[12:29])))
        (folder / A).write_bytes(content)

    return plant


def rotated(folder: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    with Image.open(folder / A) as image:
        image.save(folder / A, exif=exif)


def frames(folder: Path) -> None:
    pictures = [Image.effect_noise(SIZE, 50 + i).convert("RGB") for i in range(3)]
    pictures[0].save(folder / A, format="PNG", save_all=True, append_images=pictures[1:])


def to_folder(folder: Path) -> None:
    (folder / A).unlink()
    (folder / A).mkdir()


def tiny(folder: Path) -> None:
    file = folder / "annotations/instances_train2017.json"
    content = json.loads(file.read_text())
    content["images"][2] |= {"width": 9, "height": 9}  # the image without objects
    file.write_text(json.dumps(content))
    Image.effect_noise((9, 9), 60).save(folder / "train2017/c.png")


def link(folder: Path) -> None:
    shutil.move(folder / A, folder.parent / "outside.png")
    (folder / A).symlink_to(folder.parent / "outside.png")


# (what, kind, file to be named, how to plant it)
FAULTS = [
    ("no file", "missing-image", A, lambda folder: (folder / A).unlink()),
    ("a link to nothing", "missing-image", A,
     lambda folder: ((folder / A).unlink(), (folder / A).symlink_to(folder / "nothing"))),
    ("an empty file", "empty-image", A, lambda folder: (folder / A).write_bytes(b"")),
    ("text", "unreadable-image", A, lambda folder: (folder / A).write_text("<html>404</html>")),
    ("a file cut in two", "truncated-image", A, cut),
    ("damaged data", "truncated-image", A, damage),
    ("a folder", "image-not-a-file", A, to_folder),
    ("another size", "size-mismatch", A, save(Image.effect_noise((32, 24), 60))),
    ("width and height exchanged", "size-mismatch", A, save(Image.effect_noise((48, 64), 60))),
    ("a bomb", "image-too-large", A, claim_size(60_000, 60_000)),
    ("a link that leads outside", "path-outside-dataset",
     "annotations/instances_train2017.json", link),
    ("JPEG data in a PNG's name", "wrong-extension", A,
     save(Image.effect_noise(SIZE, 60), format="JPEG")),
    ("several frames", "several-frames", A, frames),
    ("a rotation that the annotation ignores", "rotated-image", A, rotated),
    ("one colour", "blank-image", A, save(Image.new("RGB", SIZE, "black"))),
    ("a few pixels", "tiny-image", "train2017/c.png", tiny),
    ("a copy in the same split", "same-content", "train2017/b.png",
     lambda folder: shutil.copy(folder / A, folder / "train2017/b.png")),
    ("a copy in another split", "same-content", "val2017/d.png",
     lambda folder: shutil.copy(folder / A, folder / "val2017/d.png")),
    ("an image in no annotation", "image-without-annotation", "train2017/extra.png",
     lambda folder: Image.effect_noise(SIZE, 60).save(folder / "train2017/extra.png")),
]  # fmt: skip
DROPPED = {
    "missing-image", "empty-image", "unreadable-image", "truncated-image", "image-not-a-file",
    "size-mismatch", "image-too-large",
}  # fmt: skip


@pytest.mark.parametrize(("kind", "file", "plant"), [f[1:] for f in FAULTS], ids=[f[0] for f in FAULTS])
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_a_planted_fault_is_found_and_its_file_named(coco_folder, kind, file, plant):
    plant(coco_folder)
    result = check_dataset(coco_folder)
    found = {(finding.problem.kind, finding.problem.file) for finding in result.findings}
    assert (kind, file) in found
    expected = 2 if kind == "path-outside-dataset" else 1 if kind in DROPPED else 0
    assert result.exit_code == expected
    if kind in DROPPED:
        assert result.splits["train2017"].images == 2


def test_a_fast_check_reads_headers_alone(coco_folder):
    cut(coco_folder)
    assert check_dataset(coco_folder).exit_code == 1
    assert check_dataset(coco_folder, decode=False).exit_code == 0
    (coco_folder / A).write_bytes(b"")
    assert check_dataset(coco_folder, decode=False).exit_code == 1
