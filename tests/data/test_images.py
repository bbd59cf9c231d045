"""Images of every kind as upright 8-bit RGB."""

import numpy as np
import pytest
import torch
from PIL import Image

from aploss.data.images import MAX_PIXELS, ImageError, read_image, read_sizes

GREY = np.arange(12 * 16, dtype=np.uint8).reshape(12, 16)
RGB = np.random.default_rng(0).integers(0, 256, (12, 16, 3), dtype=np.uint8)


def saved(tmp_path, image: Image.Image, name: str, **options):
    path = tmp_path / name
    image.save(path, **options)
    return path


def as_rgb(pixels: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(pixels.copy()).permute(2, 0, 1)


DEEP = Image.fromarray(GREY.astype(np.uint16) * 257)  # 255 · 257 = 65535
PALETTE = Image.fromarray(RGB).quantize(8)
GREY_RGB = np.dstack([GREY] * 3)
CONVERTED = {
    "RGB": (Image.fromarray(RGB), "a.png", RGB),
    "16 bits": (DEEP, "a.png", GREY_RGB),
    "16 bits as TIFF": (DEEP, "a.tif", GREY_RGB),
    "floats up to 1": (Image.fromarray((GREY / 255).astype(np.float32)), "a.tif", GREY_RGB),
    "floats up to 255": (Image.fromarray(GREY.astype(np.float32)), "a.tif", GREY_RGB),
    "a palette": (PALETTE, "a.gif", np.asarray(PALETTE.convert("RGB"))),
    "black and white": (Image.fromarray(GREY > 90), "a.png", np.where(GREY_RGB > 90, 255, 0).astype(np.uint8)),
}


@pytest.mark.parametrize(("image", "name", "expected"), CONVERTED.values(), ids=CONVERTED)
def test_any_kind_of_pixels_becomes_eight_bit_rgb(tmp_path, image, name, expected):
    read = read_image(saved(tmp_path, image, name))
    assert (read.dtype, read.is_contiguous()) == (torch.uint8, True)
    assert torch.equal(read, as_rgb(expected))


def test_cmyk_jpeg_is_converted(tmp_path):
    ink = Image.new("CMYK", (16, 12), (0, 255, 255, 0))  # no cyan: red
    red, green, blue = read_image(saved(tmp_path, ink, "a.jpg", quality=95)).float().mean((1, 2))
    assert red > 200
    assert max(green, blue) < 60


def test_transparent_parts_become_white(tmp_path):
    clear = np.dstack([RGB, np.zeros((12, 16), np.uint8)])
    clear[:6, :, 3] = 255
    image = read_image(saved(tmp_path, Image.fromarray(clear), "a.png"))
    assert torch.equal(image[:, :6], as_rgb(RGB)[:, :6])
    assert bool((image[:, 6:] == 255).all())


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied(tmp_path, orientation):
    # What each EXIF value asks for, in terms of numpy: rows and columns of the stored picture.
    upright = {
        1: RGB,
        2: RGB[:, ::-1],
        3: RGB[::-1, ::-1],
        4: RGB[::-1],
        5: RGB.transpose(1, 0, 2),
        6: np.rot90(RGB, -1),
        7: RGB[::-1, ::-1].transpose(1, 0, 2),
        8: np.rot90(RGB),
    }[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = saved(tmp_path, Image.fromarray(RGB), "a.png", exif=exif)
    assert torch.equal(read_image(path), as_rgb(upright))
    assert read_sizes(path)[0] == (upright.shape[1], upright.shape[0])


def test_an_annotation_made_without_the_exif_rotation_gets_the_image_as_stored(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    path = saved(tmp_path, Image.fromarray(RGB), "a.png", exif=exif)
    assert read_image(path, size=(12, 16)).shape == (3, 16, 12)
    assert torch.equal(read_image(path, size=(16, 12)), as_rgb(RGB))


def test_an_image_of_another_size_than_annotated_is_refused(tmp_path):
    path = saved(tmp_path, Image.fromarray(RGB), "a.png")
    with pytest.raises(ImageError, match=r"a\.png.*32x24.*16x12") as caught:
        read_image(path, size=(32, 24))
    assert caught.value.problem.kind == "size-mismatch"


def test_of_several_frames_the_first_is_read(tmp_path):
    frames = [Image.new("L", (8, 8), value) for value in (10, 200)]
    path = saved(tmp_path, frames[0], "a.tif", save_all=True, append_images=frames[1:])
    assert read_image(path).unique().tolist() == [10]


def test_formats_that_start_other_programs_are_not_opened(tmp_path):
    path = tmp_path / "a.jpg"
    path.write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n")
    with pytest.raises(ImageError, match="not an image"):
        read_image(path)


@pytest.mark.parametrize("factor", [1.2, 2.5])  # Pillow itself warns from 1, refuses from 2
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_a_decompression_bomb_is_refused_before_it_is_decoded(tmp_path, factor, monkeypatch):
    side = int((MAX_PIXELS * factor) ** 0.5)
    path = saved(tmp_path, Image.new("1", (side, side)), "bomb.png")
    assert path.stat().st_size < 100_000

    def must_not_decode(self):
        raise AssertionError("decoded")

    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", must_not_decode)
    for read in (read_sizes, read_image):
        with pytest.raises(ImageError, match="decompression bomb") as caught:
            read(path)
        assert caught.value.problem.kind == "unreadable-image"
