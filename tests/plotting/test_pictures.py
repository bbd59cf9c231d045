"""Boxes on pictures: where the pixels change, and what stays as it was."""

import base64
import io

import numpy as np
import pytest
from PIL import Image, ImageColor

from aploss.plotting.pictures import as_picture, contact_sheet, crop_around, data_uri, draw_boxes, outline_boxes
from aploss.plotting.plots import class_colour


def grey(width: int = 120, height: int = 90) -> Image.Image:
    return Image.new("RGB", (width, height), (128, 128, 128))


def outlined(picture: Image.Image, box: list[float], caption: str = "", dashed: bool = False) -> Image.Image:
    return outline_boxes(picture, [box], captions=[caption], colours=["#0072b2"], dashed=[dashed])


def changed(before: Image.Image, after: Image.Image) -> np.ndarray:
    return (np.asarray(before) != np.asarray(after)).any(axis=2)


@pytest.mark.parametrize("box", [[np.nan, 0, 10, 10], [-50, 5, -10, 9], [200, 5, 210, 9]])
def test_a_box_outside_or_not_finite_is_left_out(box: list[float]) -> None:
    drawn = outlined(grey(), box, "x")
    assert not changed(grey(), drawn).any()


def test_a_side_on_the_edge_is_seen_and_one_far_outside_is_not() -> None:
    on_edge = changed(grey(), outlined(grey(), [0, 0, 120, 90]))
    assert on_edge[:, :3].any(axis=1).all()
    assert on_edge[:, -3:].any(axis=1).all()
    outside = changed(grey(), outlined(grey(), [-40, 20, 160, 60]))
    assert outside[20].all()
    assert not outside[30:50].any()


def test_a_caption_stays_inside_the_picture() -> None:
    picture = grey(200, 100)
    for box in ([180, 2, 199, 20], [150, 80, 199, 99], [-20, -20, 10, 10]):
        marks = changed(picture, outlined(picture, box, "Ωж 0.5"))
        plain = changed(picture, outlined(picture, box))
        assert (marks & ~plain).sum() > 100


def test_a_crop_shows_the_surroundings_and_stays_inside() -> None:
    crop, corner = crop_around(grey(), [100, 70, 119, 89], context=1.0)
    assert corner == (81, 51)
    assert crop.size == (39, 39)
    crop, corner = crop_around(grey(100, 100), [40, 40, 60, 60], context=0.5)
    assert (crop.size, corner) == ((40, 40), (30, 30))
    crop, corner = crop_around(grey(), [500, 500, 600, 600])
    assert min(crop.size) >= 1


@pytest.mark.parametrize(("size", "kind"), [((20, 20), "PNG"), ((400, 300), "JPEG")])
def test_a_data_address_holds_the_picture(size: tuple[int, int], kind: str) -> None:
    head, _, body = data_uri(grey(*size)).partition(",")
    assert head == f"data:image/{kind.lower()};base64"
    with Image.open(io.BytesIO(base64.b64decode(body))) as picture:
        assert (picture.format, picture.size) == (kind, size)


NAMES = ("circle", "square", "triangle")


def has_colour(picture: Image.Image, label: int) -> np.ndarray:
    return (np.asarray(picture) == ImageColor.getrgb(class_colour(label))).all(axis=2)


def test_box_lines_are_where_the_box_is_in_the_colour_of_its_class() -> None:
    ground = np.full((300, 400, 3), 90, dtype=np.uint8)
    picture = draw_boxes(ground, [[100, 120, 300, 260]], [1], NAMES)
    assert picture.size == (400, 300)
    lines = has_colour(picture, 1)
    for x, y in [(200, 260), (100, 200), (300, 200), (250, 120)]:
        assert lines[y - 2 : y + 3, x - 2 : x + 3].any()
    assert not lines[140:250, 110:290].any()  # the object itself stays free
    assert not has_colour(picture, 0).any()
    assert (ground == 90).all()


def test_tiny_image_is_enlarged_together_with_its_boxes() -> None:
    picture = draw_boxes(np.zeros((32, 64, 3), np.uint8), [[16, 8, 48, 24]], [0], NAMES)
    assert picture.size == (256, 128)
    rows, columns = np.nonzero(has_colour(picture, 0))
    assert abs(columns.max() - 192) <= 2
    assert abs(rows.max() - 96) <= 2


def test_scores_are_written_and_the_best_box_lies_on_top() -> None:
    ground = np.zeros((300, 300, 3), np.uint8)
    boxes = [[50, 50, 250, 250], [50, 50, 250, 250]]
    for scores, top in (([0.9, 0.2], 0), ([0.2, 0.9], 2)):
        picture = draw_boxes(ground, boxes, [0, 2], NAMES, scores)
        assert has_colour(picture, top)[250].any()
        assert not has_colour(picture, 2 - top)[250].any()
    plain = draw_boxes(ground, boxes[:1], [0], NAMES)
    scored = draw_boxes(ground, boxes[:1], [0], NAMES, [0.5])
    assert has_colour(scored, 0).sum() > has_colour(plain, 0).sum()  # a longer caption


def test_dashed_boxes_have_gaps_and_the_others_none() -> None:
    ground = np.zeros((300, 300, 3), np.uint8)
    boxes = [[20, 40, 280, 120], [20, 160, 280, 280]]
    picture = draw_boxes(ground, boxes, [0, 1], NAMES, dashed=[True, False])
    assert 0.3 < has_colour(picture, 0)[120, 30:270].mean() < 0.8
    assert has_colour(picture, 1)[280, 30:270].mean() == 1


@pytest.mark.parametrize(
    "image",
    [
        np.full((40, 60), 51, np.uint8),
        np.full((40, 60, 3), 51, np.uint8),
        np.full((3, 40, 60), 51, np.uint8),
        np.full((3, 40, 60), 0.2, np.float32),
        Image.new("L", (60, 40), 51),
        Image.new("RGBA", (60, 40), (51, 51, 51, 255)),
    ],
    ids=["grey", "rows first", "channels first", "float", "PIL grey", "PIL alpha"],
)
def test_any_kind_of_image_can_be_drawn_on(image: object) -> None:
    picture = as_picture(image)
    assert (picture.mode, picture.size) == ("RGB", (60, 40))
    assert picture.getpixel((30, 20)) == (51, 51, 51)


def test_contact_sheet_holds_every_picture_at_its_place_without_distortion() -> None:
    colours = [(200, 0, 0), (0, 200, 0), (0, 0, 200), (90, 90, 90), (200, 0, 200)]
    images = [Image.new("RGB", (80, 40), colour) for colour in colours]
    sheet = np.asarray(contact_sheet(images, list("abcde"), tile=100))
    assert sheet.shape[1] == 3 * 108 + 8  # five pictures: three columns
    for number, colour in enumerate(colours):
        rows, columns = np.nonzero((sheet == colour).all(axis=2))
        assert np.ptp(columns) + 1 == 100
        assert np.ptp(rows) + 1 == 50
        assert columns.min() == 8 + (number % 3) * 108


def test_long_captions_are_cut_off_at_their_picture() -> None:
    images = [Image.new("RGB", (50, 50), "red")] * 2
    sheet = np.asarray(contact_sheet(images, ["x" * 300, ""], tile=100))
    below = sheet[110:, 110:]  # where the second caption would be
    assert (below == below[-1, -1]).all()
    with pytest.raises(ValueError, match="2 images and 1 captions"):
        contact_sheet(images, ["one"])
    with pytest.raises(ValueError, match="0 images"):
        contact_sheet([])
