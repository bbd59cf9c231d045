"""Each kind of image fault is planted in a clean set, found, and its file named."""

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


def to_folder(folder: Path) -> None:
    (folder / A).unlink()
    (folder / A).mkdir()


def link(folder: Path) -> None:
    shutil.move(folder / A, folder.parent / "outside.png")
    (folder / A).symlink_to(folder.parent / "outside.png")


# (what, kind, file to be named, how to plant it)
FAULTS = [
    ("no file", "missing-image", A, lambda folder: (folder / A).unlink()),
    ("a link to nothing", "missing-image", A,
     lambda folder: ((folder / A).unlink(), (folder / A).symlink_to(folder / "nothing"))),
    ("an empty file", "unreadable-image", A, lambda folder: (folder / A).write_bytes(b"")),
    ("text", "unreadable-image", A, lambda folder: (folder / A).write_text("<html>404</html>")),
    ("a file cut in two", "unreadable-image", A, cut),
    ("damaged data", "unreadable-image", A, damage),
    ("a folder", "unreadable-image", A, to_folder),
    ("another size", "size-mismatch", A, save(Image.effect_noise((32, 24), 60))),
    ("width and height exchanged", "size-mismatch", A, save(Image.effect_noise((48, 64), 60))),
    ("a bomb", "unreadable-image", A, claim_size(60_000, 60_000)),
    ("a link that leads outside", "path-outside-dataset", A, link),
    ("a copy in another split", "image-in-two-splits", "val2017/d.png",
     lambda folder: shutil.copy(folder / A, folder / "val2017/d.png")),
]  # fmt: skip
DROPPED = {"missing-image", "unreadable-image", "size-mismatch"}


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
