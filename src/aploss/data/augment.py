"""Training augmentation: SSD's (``paper``), a lighter one, flips alone, or none.

Each preset maps a sample of a dataset to one of a fixed size. Images and boxes are plain tensors; only ``paper``, which
is made of torchvision's transforms, wraps them for torchvision's dispatch.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torchvision import tv_tensors
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

from aploss.data.annotations import Sample, Target
from aploss.errors import ConfigError

PRESETS = ("paper", "light", "flip", "none")
MEAN_COLOUR = (123.0, 117.0, 104.0)  # of ImageNet, which SSD uses as padding
OBJECT_FIELDS = ("labels", "difficult", "crowd")  # one entry per object, beside its box

ZOOM = (0.75, 1.25)  # range of the light preset's zoom
COLOURS = 0.2  # maximal relative change of its brightness and contrast
BRIGHTNESS, CONTRAST = 0, 1  # positions in the random order of ColorJitter's four changes
LEVELS = torch.arange(256, dtype=torch.uint8).expand(3, 1, 256)


def training_transforms(preset: str, size: int | tuple[int, int]) -> Callable[[Tensor, Target], Sample]:
    """The augmentation of one training sample; random numbers come from torch's default generator.

    ``paper`` is the augmentation of SSD (Liu et al. 2016, Section 2.2), which the AP-loss paper adopts: photometric
    distortion, zoom-out up to four times, a crop with a minimal IoU with some object, horizontal flip. ``light`` zooms
    by ±25 %, changes brightness and contrast by ±20 % and flips: enough for small datasets and short training.
    ``flip`` resizes and flips, ``none`` only resizes.

    Args:
        preset: one of :data:`PRESETS`.
        size: side of the square output, or (height, width).

    Returns:
        A function of ``(image, target)``. Objects that vanish are removed with their labels and flags; an image
        without objects stays usable.

    Raises:
        ConfigError: unknown preset, or a size below 8 pixels.

    Example:
        >>> image, no = torch.zeros(3, 60, 80, dtype=torch.uint8), torch.tensor([False])
        >>> boxes = torch.tensor([[8.0, 6.0, 40.0, 30.0]])
        >>> target = dict(boxes=boxes, labels=torch.tensor([2]), difficult=no, crowd=no)
        >>> image, target = training_transforms("none", 40)(image, target)
        >>> image.shape, target["boxes"].tolist()
        (torch.Size([3, 40, 40]), [[4.0, 4.0, 20.0, 20.0]])
    """
    size = (size, size) if isinstance(size, int) else size
    if min(size) < 8:
        raise ConfigError(f"training images of {size[0]}x{size[1]} pixels are too small: give at least 8")
    if preset not in PRESETS:
        raise ConfigError(f"unknown augmentation '{preset}': choose one of {', '.join(PRESETS)}")
    if preset == "paper":
        return PaperAugmentation(size)
    return LightAugmentation(size) if preset == "light" else ResizeAndFlip(size, flip=preset == "flip")


class ResizeAndFlip(nn.Module):
    """Resizes a sample to (height, width) and, if ``flip`` is set, mirrors every second one at random."""

    def __init__(self, size: tuple[int, int], *, flip: bool) -> None:
        super().__init__()
        self.size, self.flip = size, flip

    def forward(self, image: Tensor, target: Target) -> Sample:
        """Resizes one sample."""
        image, boxes = _resize(image, target["boxes"], self.size)
        boxes = _clip(boxes, *self.size)
        target = _keep(target, boxes, _is_large(boxes))
        if self.flip and draw_flip():
            image, target["boxes"] = image.flip(-1), mirrored(target["boxes"], self.size[1])
        return image, target


class PaperAugmentation(nn.Module):
    """SSD's augmentation as torchvision's transforms; output is (height, width)."""

    def __init__(self, size: tuple[int, int]) -> None:
        super().__init__()
        self.limit = 2 * max(size)
        self.transforms = v2.Compose(
            [
                v2.RandomPhotometricDistort(),
                v2.RandomZoomOut(fill=MEAN_COLOUR, side_range=(1.0, 4.0)),
                IoUCrop(),
                v2.RandomHorizontalFlip(),
                v2.Resize(size, antialias=True),
                v2.ClampBoundingBoxes(),  # rounding may put a corner slightly outside
                v2.SanitizeBoundingBoxes(min_size=1, labels_getter=_object_fields),
            ]
        )

    def forward(self, image: Tensor, target: Target) -> Sample:
        """Augments one sample of 8-bit RGB."""
        image, target = shrink_large(image, target, self.limit)
        size = (image.shape[-2], image.shape[-1])
        boxes = tv_tensors.BoundingBoxes(target["boxes"], format="XYXY", canvas_size=size)
        image, target = self.transforms(tv_tensors.Image(image), {**target, "boxes": boxes})
        return image.as_subclass(Tensor), {**target, "boxes": target["boxes"].as_subclass(Tensor)}


def _object_fields(sample: Sample) -> tuple[Tensor, ...]:
    return tuple(sample[1][field] for field in OBJECT_FIELDS)


def shrink_large(image: Tensor, target: Target, limit: int) -> Sample:
    """Shrinks an image whose shorter side exceeds ``limit`` pixels to that limit.

    A photograph of many megapixels has detail that no training image keeps, and zooming it out four times would need
    gigabytes.
    """
    height, width = image.shape[-2:]
    factor = limit / min(height, width)
    if factor >= 1:
        return image, target
    image, boxes = _resize(image, target["boxes"], (round(height * factor), round(width * factor)))
    return image, {**target, "boxes": boxes}


class IoUCrop(v2.RandomIoUCrop):  # type: ignore[misc]
    """torchvision's crop of SSD, which searches for long without objects and divides by zero below four pixels."""

    def forward(self, image: tv_tensors.Image, target: Target) -> Sample:
        """Crops one sample; the boxes of objects whose centre is outside become empty, to be removed later."""
        if not len(target["boxes"]) or min(image.shape[-2:]) * self.min_scale < 1:
            return image, target
        cropped: Sample = super().forward(image, target)
        return cropped


class LightAugmentation(nn.Module):
    """Zoom, flip, resize to (height, width), brightness and contrast of one sample.

    Equals torchvision's crop or pad, ``RandomHorizontalFlip``, ``Resize``, ``ColorJitter``, ``ClampBoundingBoxes`` and
    ``SanitizeBoundingBoxes`` in sequence, at half their cost: torchvision spends most of a small sample's time on
    dispatch.
    """

    def __init__(self, size: tuple[int, int]) -> None:
        super().__init__()
        self.size = size

    def forward(self, image: Tensor, target: Target) -> Sample:
        """Augments one sample of 8-bit RGB."""
        image, target = shrink_large(image, target, 2 * max(self.size))
        boxes = target["boxes"]
        height, width = image.shape[-2:]
        left, top, right, bottom = draw_zoom(height, width, *ZOOM)
        keep = torch.ones(len(boxes), dtype=torch.bool)
        if min(left, top, width - right, height - bottom) >= 0:
            image = image[:, top:bottom, left:right]
            # Like SSD's crop, it keeps the objects whose centre is inside.
            keep = _centres_inside(torch.tensor([[left, top, right, bottom]]), boxes)[0]
        else:
            padding = [-left, -top, right - width, bottom - height]
            image = F.pad_image(image, padding, fill=list(MEAN_COLOUR))
        height, width = image.shape[-2:]
        boxes = _clip(boxes - torch.tensor([left, top] * 2), height, width)
        if draw_flip():
            image, boxes = image.flip(-1), mirrored(boxes, width)
        image, boxes = _resize(image, boxes, self.size)
        boxes = _clip(boxes, *self.size)
        return _jitter(image), _keep(target, boxes, keep & _is_large(boxes))


def draw_zoom(height: int, width: int, smallest: float, largest: float) -> tuple[int, int, int, int]:
    """The visible window of an image at random: left, top, right, bottom. Zooming in, it lies inside the image; zooming
    out, the image lies inside it; both have the same shape."""
    share, across, down = torch.rand(3).tolist()
    zoom = smallest + share * (largest - smallest)
    new_height, new_width = max(1, round(height / zoom)), max(1, round(width / zoom))
    left, top = round(abs(new_width - width) * across), round(abs(new_height - height) * down)
    if zoom < 1:
        left, top = -left, -top
    return left, top, left + new_width, top + new_height


def draw_flip() -> bool:
    """Whether to mirror a sample, at random."""
    return bool(torch.rand(1) < 0.5)


def mirrored(boxes: Tensor, width: float) -> Tensor:
    """Boxes [n, 4] in the mirror image of an image of this width."""
    left, top, right, bottom = boxes.unbind(1)
    return torch.stack([width - right, top, width - left, bottom], dim=1)


def _resize(image: Tensor, boxes: Tensor, size: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Resizes an image and its boxes [n, 4] to (height, width)."""
    height, width = image.shape[-2:]
    if (height, width) != size:
        image = F.resize_image(image, list(size), antialias=True)
        boxes = boxes * torch.tensor([size[1] / width, size[0] / height] * 2)
    return image, boxes


def _clip(boxes: Tensor, height: int, width: int) -> Tensor:
    return boxes.clamp(boxes.new_zeros(4), boxes.new_tensor([width, height] * 2))


def _is_large(boxes: Tensor) -> Tensor:
    """Which boxes [n, 4] have sides of at least one pixel."""
    return (boxes[:, 2:] - boxes[:, :2] >= 1).all(dim=1)


def _keep(target: Target, boxes: Tensor, keep: Tensor) -> Target:
    """A target with new boxes [n, 4], of which some are kept, bool [n]."""
    return {**target, **{field: target[field][keep] for field in OBJECT_FIELDS}, "boxes": boxes[keep]}


def _centres_inside(crops: Tensor, boxes: Tensor) -> Tensor:
    """Which crops [m, 4] contain the centres of which boxes [n, 4]: bool [m, n]."""
    centres = (boxes[:, :2] + boxes[:, 2:]) / 2  # [n, 2]
    after = centres > crops[:, None, :2]  # [m, n, 2]
    before = centres < crops[:, None, 2:]
    return (after & before).all(dim=2)


def _jitter(image: Tensor) -> Tensor:
    """Changes brightness and contrast in random order."""
    order = torch.randperm(4).tolist()
    brightness, contrast = (torch.empty(1).uniform_(1 - COLOURS, 1 + COLOURS).item() for _ in range(2))
    for change in order:
        if change == BRIGHTNESS:
            image = _look_up(image, F.adjust_brightness_image(LEVELS, brightness))
        elif change == CONTRAST:
            grey = F.rgb_to_grayscale_image(image).float().mean()
            levels = LEVELS.mul(contrast).add_(grey, alpha=1 - contrast).clamp_(0, 255)
            image = _look_up(image, levels.byte())
    return image


def _look_up(image: Tensor, levels: Tensor) -> Tensor:
    """Replaces every value by its new level; bytes.translate is faster than indexing."""
    changed = bytearray(image.numpy().tobytes().translate(levels[0, 0].numpy().tobytes()))
    return torch.frombuffer(changed, dtype=torch.uint8).view(image.shape)
