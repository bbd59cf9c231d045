"""The ``light`` preset in one piece: what its parts from torchvision give, at half their cost.

On a CPU that also trains, every millisecond spent on a sample is one that training waits. Most of a
small sample's go into finding out, transform after transform, what is an image and what a box.
"""

import numpy as np
import torch
from torch import Tensor, nn
from torchvision import tv_tensors
from torchvision.transforms.v2 import functional as F

from aploss.data.dataset import Sample

__all__ = ["MEAN_COLOUR", "OBJECT_FIELDS", "LightAugmentation", "draw_zoom"]

MEAN_COLOUR = (123.0, 117.0, 104.0)  # of ImageNet, SSD's colour where the picture ends

OBJECT_FIELDS = ("labels", "difficult", "crowd")  # one entry an object, beside its box
ZOOM = (0.75, 1.25)  # lowest and highest factor
COLOURS = 0.2  # share by which brightness and contrast change at most
BRIGHTNESS, CONTRAST = 0, 1  # the places of the two in ColorJitter's order of four
LEVELS = torch.arange(256, dtype=torch.uint8).expand(3, 1, 256)


class LightAugmentation(nn.Module):
    """Zoom, flip, resize, brightness and contrast of one sample, vanished objects removed.

    Gives bit for bit what a zoom of torchvision's crop and pad, ``RandomHorizontalFlip``,
    ``Resize``, ``ColorJitter``, ``ClampBoundingBoxes`` and ``SanitizeBoundingBoxes`` give one after
    the other, from the same random numbers.

    Args:
        size: height and width that come out.
    """

    def __init__(self, size: tuple[int, int]) -> None:
        super().__init__()
        self.size = size

    def forward(self, image: tv_tensors.Image, target: dict[str, Tensor]) -> Sample:
        """Augments one sample of 8-bit RGB."""
        pixels = image.as_subclass(Tensor)
        boxes = target["boxes"].as_subclass(Tensor).numpy()
        height, width = pixels.shape[-2:]
        left, top, right, bottom = draw_zoom(height, width, *ZOOM)
        keep = np.ones(len(boxes), dtype=bool)
        if min(left, top, width - right, height - bottom) >= 0:
            pixels = pixels[:, top:bottom, left:right]
            # A cut-out keeps the objects whose centre is inside, as SSD's crop does.
            centres = (boxes[:, :2] + boxes[:, 2:]) / 2
            keep = ((centres > (left, top)) & (centres < (right, bottom))).all(axis=1)
        else:
            padding = [-left, -top, right - width, bottom - height]
            pixels = F.pad_image(pixels, padding, fill=list(MEAN_COLOUR))
        height, width = bottom - top, right - left
        boxes = _clipped(boxes - np.array([left, top] * 2, boxes.dtype), height, width)
        if torch.rand(1) < 0.5:
            pixels = pixels.flip(-1)
            boxes[:, [0, 2]] = width - boxes[:, [2, 0]]
        if (height, width) != self.size:
            pixels = F.resize_image(pixels, list(self.size), antialias=True)
            boxes = boxes * np.array([self.size[1] / width, self.size[0] / height] * 2, boxes.dtype)
        boxes = _clipped(boxes, *self.size)
        sides = boxes[:, 2:] - boxes[:, :2]
        keep &= (sides >= 1).all(axis=1)
        kept = {field: target[field][torch.from_numpy(keep)] for field in OBJECT_FIELDS}
        kept["boxes"] = tv_tensors.BoundingBoxes(
            torch.from_numpy(boxes[keep]), format="XYXY", canvas_size=self.size
        )
        return tv_tensors.Image(self._jitter(pixels)), {**target, **kept}

    def _jitter(self, pixels: Tensor) -> Tensor:
        order = torch.randperm(4).tolist()
        bounds = 1 - COLOURS, 1 + COLOURS
        brightness, contrast = (torch.empty(1).uniform_(*bounds).item() for _ in range(2))
        for change in order:
            if change == BRIGHTNESS:
                pixels = _looked_up(pixels, F.adjust_brightness_image(LEVELS, brightness))
            elif change == CONTRAST:
                grey = F.rgb_to_grayscale_image(pixels).float().mean()
                levels = LEVELS.mul(contrast).add_(grey, alpha=1 - contrast).clamp_(0, 255)
                pixels = _looked_up(pixels, levels.byte())
        return pixels


def draw_zoom(
    height: int, width: int, smallest: float, largest: float
) -> tuple[int, int, int, int]:
    """The part of an image to be seen, at random: left, top, right, bottom in its pixels.

    Zooming in it lies inside the image, zooming out the image lies inside it. Both have the same
    shape.
    """
    share, across, down = torch.rand(3).tolist()
    zoom = smallest + share * (largest - smallest)
    new_height, new_width = max(1, round(height / zoom)), max(1, round(width / zoom))
    left, top = round(abs(new_width - width) * across), round(abs(new_height - height) * down)
    if zoom < 1:
        left, top = -left, -top
    return left, top, left + new_width, top + new_height


def _clipped(boxes: np.ndarray, height: int, width: int) -> np.ndarray:
    return boxes.clip(0, np.array([width, height] * 2, boxes.dtype))


def _looked_up(pixels: Tensor, levels: Tensor) -> Tensor:
    """Every value replaced by that of its level; bytes.translate is faster than any indexing."""
    table = levels[0, 0].numpy().tobytes()
    changed = bytearray(pixels.numpy().tobytes().translate(table))
    return torch.frombuffer(changed, dtype=torch.uint8).view(pixels.shape)
