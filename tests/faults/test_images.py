"""Image files of twelve kinds in data check, training and prediction: read correctly, or reported by name."""

import json
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from small_datasets import coco_content, write_coco

from aploss.data import load_dataset
from aploss.data.loader import make_training_loader
from aploss.detectors import build_detector, save_detector

RED, BLUE, WHITE = (255, 0, 0), (0, 0, 255), (255, 255, 255)


def two_halves(
    size: tuple[int, int], left: tuple[int, int, int] = RED, right: tuple[int, int, int] = BLUE
) -> Image.Image:
    picture = Image.new("RGB", size, left)
    picture.paste(right, (size[0] // 2, 0, *size))
    return picture


def cmyk(path: Path) -> None:
    two_halves((64, 48)).convert("CMYK").save(path, format="JPEG", quality=100)


def sixteen_bit(path: Path) -> None:
    levels = np.zeros((48, 64), dtype=np.uint16)
    levels[:, :32] = 0x8080
    Image.fromarray(levels).save(path, format="PNG")


def palette_with_alpha(path: Path) -> None:
    picture = Image.new("P", (64, 48), 0)  # index 0 is transparent: white shows through
    picture.putpalette([*BLUE, *RED])
    picture.paste(1, (0, 0, 32, 48))
    picture.save(path, format="PNG", transparency=0)


def rotated(path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 8  # stored turned by a quarter, to be turned back to the left
    two_halves((64, 48)).transpose(Image.Transpose.ROTATE_270).save(path, format="JPEG", quality=100, exif=exif)


def animated(path: Path) -> None:
    frames = [Image.new("RGB", (64, 48), colour) for colour in (WHITE, (0, 255, 0))]
    two_halves((64, 48)).save(path, format="GIF", save_all=True, append_images=frames)


def bomb(path: Path) -> None:
    """A PNG that says it is 30,000 pixels wide and high."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 30_000, 30_000, 8, 2, 0, 0, 0)
    parts = [chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(bytes(1000))), chunk(b"IEND", b"")]
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(parts))


def truncated(path: Path) -> None:
    two_halves((64, 48)).save(path, format="PNG")
    path.write_bytes(path.read_bytes()[:80])


REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {  # how it is made, what it is called
    "truncated": (truncated, "unreadable-image"),
    "0 byte": (lambda path: path.write_bytes(b""), "unreadable-image"),
    "not an image": (lambda path: path.write_text("a picture of a cat"), "unreadable-image"),
    "missing": (lambda path: path.unlink(missing_ok=True), "missing-image"),
    "over the bomb limit": (bomb, "unreadable-image"),
}
READ: dict[
    str, tuple[Callable[[Path], object], tuple[int, int], tuple, tuple]
] = {  # and its size, first and last pixel
    "CMYK": (cmyk, (64, 48), RED, BLUE),
    "16-bit": (sixteen_bit, (64, 48), (128, 128, 128), (0, 0, 0)),
    "palette with alpha": (palette_with_alpha, (64, 48), RED, WHITE),
    "EXIF-rotated": (rotated, (64, 48), RED, BLUE),
    "animated": (animated, (64, 48), RED, BLUE),
    "1x1": (lambda path: Image.new("RGB", (1, 1), RED).save(path, format="PNG"), (1, 1), RED, RED),
    "20000x1": (lambda path: two_halves((20_000, 1)).save(path, format="PNG"), (20_000, 1), RED, BLUE),
}
KINDS = [*REFUSED, *READ]


@pytest.fixture
def dataset(tmp_path: Path) -> Callable[[str], Path]:
    """Makes a COCO dataset of three training images, the first of which is of a kind."""

    def make(kind: str) -> Path:
        folder = write_coco(tmp_path / "data")
        image = folder / "train2017" / "a.png"
        (REFUSED.get(kind) or READ[kind])[0](image)
        if kind in READ:
            width, height = READ[kind][1]
            content = coco_content("train")
            content["images"][0] |= {"width": width, "height": height}
            if kind in ("1x1", "20000x1"):
                content["annotations"][0] |= {"bbox": [0, 0, width, height], "area": width * height}
                del content["annotations"][1]
            (folder / "annotations/instances_train2017.json").write_text(json.dumps(content))
        return folder

    return make


@pytest.mark.parametrize("kind", KINDS)
def test_the_training_loader_replaces_what_cannot_be_read_and_names_it(dataset, kind: str):
    data = load_dataset(dataset(kind), "train")
    batches = make_training_loader(
        data, batch_size=len(data), seed=0, preset="none", size=64, workers=0, skip_unreadable=True
    )
    batch = next(iter(batches.epoch(0)))
    assert len(batch.images) == len(data)
    assert bool(torch.as_tensor(batch.images[0]).isfinite().all())
    unreadable = {data.image_path(index).name: why for index, why in batches.unreadable.items()}
    assert list(unreadable) == (["a.png"] if kind in REFUSED and kind != "missing" else [])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    detector = build_detector("retinanet-short", class_names=["cat"], test_size=(64, 64))
    return save_detector(detector, tmp_path_factory.mktemp("detectors") / "d.pt")


@pytest.mark.parametrize("kind", KINDS)
def test_prediction_continues_and_names_the_image(call_cli, checkpoint, tmp_path: Path, kind: str):
    photos = tmp_path / "photos"
    photos.mkdir()
    Image.effect_noise((64, 48), 60).convert("RGB").save(photos / "good.png")
    odd = photos / "odd.png"
    (REFUSED.get(kind) or READ[kind])[0](odd)
    done = call_cli("predict", checkpoint, photos / "good.png", odd, "--out", tmp_path / "out")
    done.assert_no_traceback()
    images = json.loads((tmp_path / "out/images.json").read_text())["images"]
    sizes = {Path(image["file_name"]).name: (image["width"], image["height"]) for image in images}
    assert sizes.pop("good.png") == (64, 48)
    if kind in REFUSED:
        assert (done.code, sizes) == (1, {})
        assert str(odd) in done.stderr
        return
    assert done.code == 0
    assert sizes == {"odd.png": READ[kind][1]}
    found = json.loads((tmp_path / "out/detections.json").read_text())
    assert all(np.isfinite([*one["bbox"], one["score"]]).all() for one in found)
