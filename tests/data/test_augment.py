"""Augmentation: pixels, boxes, labels and flags stay together, whatever image comes in."""

from typing import Any

import pytest
import torch

from aploss.data.loader import PRESETS, Augmentation, training_transforms
from aploss.errors import ConfigError

Target = dict[str, Any]
GROUND = 200


def make_sample(height: int, width: int, boxes: list[list[float]]) -> tuple[Any, Target]:
    """Object k is painted in the grey 10 k + 10, is difficult when odd, a crowd every third."""
    pixels = torch.full((3, height, width), GROUND, dtype=torch.uint8)
    for k, (x1, y1, x2, y2) in enumerate(boxes):
        pixels[:, int(y1) : int(y2), int(x1) : int(x2)] = 10 * k + 10
    count = torch.arange(len(boxes))
    target = {
        "boxes": torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4),
        "labels": count,
        "difficult": count % 2 == 1,
        "crowd": count % 3 == 0,
        "image_id": 7,
    }
    return pixels, target


NINE = [[x, y, x + 16, y + 12] for y in (4, 36, 68) for x in (6, 46, 86)]


def check_target(image: torch.Tensor, target: Target) -> None:
    height, width = image.shape[-2:]
    boxes = target["boxes"]
    assert boxes.dtype == torch.float32
    assert target["image_id"] == 7
    torch.testing.assert_close(target["difficult"], target["labels"] % 2 == 1)
    torch.testing.assert_close(target["crowd"], target["labels"] % 3 == 0)
    assert len(boxes) == len(target["labels"])
    assert (boxes >= 0).all()
    assert (boxes[:, [0, 2]] <= width).all()
    assert (boxes[:, [1, 3]] <= height).all()


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("size", [64, (48, 80)])
def test_every_preset_gives_the_asked_size_with_boxes_labels_and_flags_in_step(
    preset: str, size: int | tuple[int, int]
) -> None:
    transforms = training_transforms(preset, size)
    torch.manual_seed(0)
    kept = []
    for _ in range(30):
        image, target = transforms(*make_sample(90, 120, NINE))
        assert image.shape == ((3, size, size) if isinstance(size, int) else (3, *size))
        assert image.dtype == torch.uint8
        check_target(image, target)
        sides = target["boxes"][:, 2:] - target["boxes"][:, :2]
        assert (sides >= 1).all()
        kept.append(len(target["labels"]))
    assert (min(kept) < 9) == (preset not in ("flip", "none"))


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("shape", [(90, 120), (1, 1), (3, 200), (200, 2)])
def test_images_without_objects_and_of_a_few_pixels_work(preset: str, shape: tuple[int, int]) -> None:
    transforms = training_transforms(preset, 32)
    torch.manual_seed(1)
    for boxes in ([], [[0.0, 0.0, float(shape[1]), float(shape[0])]]):
        for _ in range(10):
            image, target = transforms(*make_sample(*shape, boxes))
            assert image.shape == (3, 32, 32)
            check_target(image, target)
            assert len(target["labels"]) == len(boxes) or preset == "paper"


@pytest.mark.parametrize(("height", "width"), [(333, 499), (97, 31), (641, 427)])
def test_box_along_the_whole_border_survives_rounding(height: int, width: int) -> None:
    sample = make_sample(height, width, [[0, 0, width, height]])
    for size in (33, 100, 300):
        _, target = training_transforms("none", size)(*sample)
        assert len(target["boxes"]) == 1


def test_box_that_shrinks_below_a_pixel_goes_with_its_label_and_flags() -> None:
    sample = make_sample(400, 400, [[0, 0, 200, 200], [300, 300, 304, 304], [100, 200, 300, 380]])
    _, target = training_transforms("none", 40)(*sample)
    assert target["labels"].tolist() == [0, 2]
    assert target["difficult"].tolist() == [False, False]
    assert target["crowd"].tolist() == [True, False]


def test_large_photographs_are_shrunk_first_and_small_ones_are_not() -> None:
    image, target = Augmentation([], 50)(*make_sample(100, 400, [[40, 20, 80, 60]]))
    assert image.shape == (3, 50, 200)
    assert target["boxes"].tolist() == [[20, 10, 40, 30]]
    small = make_sample(40, 400, [])
    assert torch.equal(Augmentation([], 50)(*small)[0], small[0])


def test_light_zooms_pixels_and_boxes_together() -> None:
    """An object fills its box, whatever the zoom, the flip and the border."""
    torch.manual_seed(3)
    transforms = training_transforms("light", (90, 120))
    widths = []
    for _ in range(40):
        image, target = transforms(*make_sample(90, 120, [[40, 30, 80, 60]]))
        (x1, y1, x2, y2) = target["boxes"][0].tolist()
        dark = (image[0] < 100).nonzero()
        found = [*dark.min(dim=0).values.flip(0).tolist(), *(dark.max(dim=0).values.flip(0) + 1).tolist()]
        assert max(abs(a - b) for a, b in zip(found, (x1, y1, x2, y2), strict=True)) <= 1.5
        widths.append(x2 - x1)
    assert min(widths) < 0.85 * 40 < 1.15 * 40 < max(widths)


def test_unknown_preset_and_tiny_size_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="'strong'"):
        training_transforms("strong", 64)
    with pytest.raises(ConfigError, match="4x64"):
        training_transforms("none", (4, 64))
