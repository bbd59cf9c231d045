"""Boxes on pictures: where the pixels change, and what stays as it was."""

import base64
import io

import numpy as np
import pytest
from PIL import Image

from aploss.reporting.pictures import crop_around, data_uri, draw_boxes, thumbnail


def grey(width: int = 120, height: int = 90) -> Image.Image:
    return Image.new("RGB", (width, height), (128, 128, 128))


def changed(before: Image.Image, after: Image.Image) -> np.ndarray:
    return (np.asarray(before) != np.asarray(after)).any(axis=2)


def test_the_picture_handed_in_is_never_changed() -> None:
    picture = grey()
    draw_boxes(picture, [[10, 10, 50, 50]], captions=["cat"])
    assert not changed(picture, grey()).any()


def test_only_the_frame_of_a_box_is_drawn() -> None:
    marks = changed(grey(), draw_boxes(grey(), [[20, 30, 80, 70]], line_width=2))
    assert marks[30, 20:80].all()
    assert marks[70, 20:80].all()
    assert marks[30:70, 20].all()
    assert marks[30:70, 80].all()
    assert not marks[35:66, 25:76].any()
    assert not marks[:26].any()
    assert not marks[75:].any()


def test_the_frame_has_the_colour_asked_for() -> None:
    drawn = draw_boxes(grey(), [[20, 30, 80, 70]], colours=["#d55e00"], line_width=2)
    assert drawn.getpixel((50, 30)) == (0xD5, 0x5E, 0x00)


def test_dashed_lines_leave_gaps_in_the_colour() -> None:
    drawn = draw_boxes(grey(), [[10, 10, 110, 80]], colours="#d55e00", dashed=True, line_width=2)
    row = [drawn.getpixel((x, 10)) == (0xD5, 0x5E, 0x00) for x in range(12, 108)]
    assert 0.3 < np.mean(row) < 0.8


@pytest.mark.parametrize(
    "box",
    [[-50, -50, -10, -10], [500, 500, 600, 600], [40, 40, 40, 40], [60, 60, 20, 20]],
    ids=["left of it", "right of it", "a point", "turned round"],
)
def test_strange_boxes_are_drawn_without_failing(box: list[float]) -> None:
    assert draw_boxes(grey(), [box], captions=["x"]).size == (120, 90)


@pytest.mark.parametrize("box", [[np.nan, 0, 10, 10], [-50, 5, -10, 9], [200, 5, 210, 9]])
def test_a_box_outside_or_not_finite_is_left_out(box: list[float]) -> None:
    drawn = draw_boxes(grey(), [box], captions=["x"])
    assert not changed(grey(), drawn).any()


def test_a_side_on_the_edge_is_seen_and_one_far_outside_is_not() -> None:
    on_edge = changed(grey(), draw_boxes(grey(), [[0, 0, 120, 90]], line_width=2))
    assert on_edge[:, :3].any(axis=1).all()
    assert on_edge[:, -3:].any(axis=1).all()
    outside = changed(grey(), draw_boxes(grey(), [[-40, 20, 160, 60]], line_width=2))
    assert outside[20].all()
    assert not outside[30:50].any()


def test_huge_coordinates_take_no_time() -> None:
    drawn = draw_boxes(grey(), [[-1e12, 10, 1e12, 50]], dashed=True)
    assert changed(grey(), drawn)[10].all()


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "CMYK", "1", "RGB"])
def test_every_mode_becomes_rgb(mode: str) -> None:
    assert draw_boxes(Image.new(mode, (30, 30)), [[5, 5, 20, 20]]).mode == "RGB"


def test_a_caption_stays_inside_the_picture() -> None:
    picture = grey(200, 100)
    for box in ([180, 2, 199, 20], [150, 80, 199, 99], [-20, -20, 10, 10]):
        marks = changed(picture, draw_boxes(picture, [box], captions=["Ωж 0.5"]))
        plain = changed(picture, draw_boxes(picture, [box]))
        assert (marks & ~plain).sum() > 100


def test_captions_must_be_as_many_as_boxes() -> None:
    with pytest.raises(ValueError, match="2 boxes need as many"):
        draw_boxes(grey(), [[1, 1, 5, 5], [2, 2, 6, 6]], captions=["one"])


def test_no_boxes_give_a_copy() -> None:
    picture = grey()
    copy = draw_boxes(picture, np.zeros((0, 4)))
    assert copy is not picture
    assert not changed(picture, copy).any()


def test_thumbnails_keep_the_shape_and_say_the_factor() -> None:
    small, factor = thumbnail(grey(1200, 600), longest=480)
    assert (small.size, factor) == ((480, 240), 0.4)
    large, factor = thumbnail(grey(60, 30), longest=480)
    assert (large.size, factor) == ((180, 90), 3.0)
    assert thumbnail(grey(3000, 2), longest=480)[0].size == (480, 1)


def test_a_crop_shows_the_surroundings_and_stays_inside() -> None:
    crop, corner = crop_around(grey(), [100, 70, 119, 89], context=1.0)
    assert corner == (81, 51)
    assert crop.size == (39, 39)
    crop, corner = crop_around(grey(), [500, 500, 600, 600])
    assert min(crop.size) >= 1


@pytest.mark.parametrize(("size", "kind"), [((20, 20), "PNG"), ((400, 300), "JPEG")])
def test_a_data_address_holds_the_picture(size: tuple[int, int], kind: str) -> None:
    head, _, body = data_uri(grey(*size)).partition(",")
    assert head == f"data:image/{kind.lower()};base64"
    with Image.open(io.BytesIO(base64.b64decode(body))) as picture:
        assert (picture.format, picture.size) == (kind, size)
