"""What training does to its images: SSD's augmentation (``paper``), a lighter one, or none.

Each preset ends in one fixed size, and works on what :class:`~aploss.data.annotations.DetectionDataset` gives: an image
and a target whose boxes, labels and flags stay in step. Boxes come as ``tv_tensors.BoundingBoxes`` and leave as plain
tensors: their canvas is the image.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torchvision import tv_tensors
from torchvision.ops import box_iou
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

from aploss.data.annotations import Sample
from aploss.errors import ConfigError

Target = dict[str, Any]

PRESETS = ("paper", "light", "flip", "none")
MEAN_COLOUR = (123.0, 117.0, 104.0)  # of ImageNet, SSD's colour where the picture ends
OBJECT_FIELDS = ("labels", "difficult", "crowd")  # one entry per object, beside its box

ZOOM = (0.75, 1.25)  # lowest and highest factor of the light preset
COLOURS = 0.2  # share by which it changes brightness and contrast at most
BRIGHTNESS, CONTRAST = 0, 1  # the places of the two in ColorJitter's order of four
LEVELS = torch.arange(256, dtype=torch.uint8).expand(3, 1, 256)


def training_transforms(preset: str, size: int | tuple[int, int]) -> v2.Transform:
    """The augmentation of one training sample; random numbers come from torch's own generator.

    ``paper`` is that of SSD (Liu et al. 2016, Section 2.2), which the AP-loss paper adopts: photometric distortion,
    zoom-out up to four times, a crop with a minimal overlap with some object, horizontal flip. ``light`` zooms by ±25
    %, changes brightness and contrast by ±20 % and flips: enough for small sets and short trainings. ``flip`` resizes
    and flips, ``none`` only resizes.

    Args:
        preset: one of :data:`PRESETS`.
        size: side of the square that comes out, or (height, width).

    Returns:
        A transform of ``(image, target)``. Objects that vanish are removed with their labels and flags; an image
        without objects stays usable. Boxes are a plain tensor [n, 4] then.

    Raises:
        ConfigError: for a preset or a size that does not exist.

    Example:
        >>> image = tv_tensors.Image(torch.zeros(3, 60, 80, dtype=torch.uint8))
        >>> boxes = tv_tensors.BoundingBoxes(
        ...     [[8.0, 6.0, 40.0, 30.0]], format="XYXY", canvas_size=(60, 80))
        >>> no = torch.tensor([False])
        >>> target = dict(boxes=boxes, labels=torch.tensor([2]), difficult=no, crowd=no)
        >>> image, target = training_transforms("none", 40)(image, target)
        >>> image.shape, target["boxes"].tolist()
        (torch.Size([3, 40, 40]), [[4.0, 4.0, 20.0, 20.0]])
    """
    height, width = (size, size) if isinstance(size, int) else size
    if min(height, width) < 8:
        raise ConfigError(f"training images of {height}x{width} pixels are too small: give at least 8")
    shrink = ShrinkLarge(2 * max(height, width))
    resize = v2.Resize((height, width), antialias=True)
    if preset == "paper":
        steps = [
            shrink,
            v2.RandomPhotometricDistort(),
            v2.RandomZoomOut(fill=MEAN_COLOUR, side_range=(1.0, 4.0)),
            IoUCrop(),
            v2.RandomHorizontalFlip(),
            resize,
        ]
    elif preset == "light":
        return v2.Compose([shrink, LightAugmentation((height, width))])
    elif preset in ("flip", "none"):
        steps = [resize]
    else:
        raise ConfigError(f"no augmentation '{preset}': choose one of {', '.join(PRESETS)}")
    sanitize = v2.SanitizeBoundingBoxes(min_size=1, labels_getter=_per_object_fields)
    # Rounding may put a corner a hair outside, which would count as an impossible box.
    last = [_PlainBoxes(), Flip()] if preset == "flip" else [_PlainBoxes()]
    return v2.Compose([*steps, v2.ClampBoundingBoxes(), sanitize, *last])


def _per_object_fields(sample: Sample) -> tuple[Tensor, ...]:
    """Labels and flags: one entry per object, kept or removed together with its box."""
    return tuple(sample[1][field] for field in OBJECT_FIELDS)


class _PlainBoxes(nn.Module):
    """The last step: boxes without torchvision's wrapping."""

    def forward(self, image: tv_tensors.Image, target: Target) -> Sample:
        return image, {**target, "boxes": target["boxes"].as_subclass(Tensor)}


class Flip(nn.Module):
    """Mirrors every second sample sideways, at random, whose boxes are plain."""

    def forward(self, image: tv_tensors.Image, target: Target) -> Sample:
        """Flips one sample, or leaves it alone."""
        if not draw_flip():
            return image, target
        return F.horizontal_flip(image), {**target, "boxes": mirrored(target["boxes"], image.shape[-1])}


def draw_flip() -> bool:
    """Whether a sample is to be mirrored, at random."""
    return bool(torch.rand(1) < 0.5)


def mirrored(boxes: Tensor, width: float) -> Tensor:
    """Boxes [n, 4] in the mirror image of an image of some width."""
    left, top, right, bottom = boxes.unbind(1)
    return torch.stack([width - right, top, width - left, bottom], dim=1)


class ShrinkLarge(nn.Module):
    """Shrinks an image whose shorter side is above a limit in pixels to that limit.

    A photograph of many megapixels carries detail that no training image keeps, and zooming it out four times would
    need gigabytes.
    """

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit

    def forward(self, image: tv_tensors.Image, target: Target) -> Sample:
        """Shrinks one sample, or leaves it alone."""
        height, width = image.shape[-2:]
        factor = self.limit / min(height, width)
        if factor >= 1:
            return image, target
        size = [round(height * factor), round(width * factor)]
        image = F.resize(image, size, antialias=True)
        return image, {**target, "boxes": F.resize(target["boxes"], size)}


class IoUCrop(nn.Module):
    """SSD's crop: some object's centre is inside it, and overlaps it by a minimal IoU.

    The distribution is that of torchvision's ``RandomIoUCrop`` with its defaults. This one looks at all trials of an
    overlap at once, which makes the preset four times faster on small images, and leaves images whole for which the
    other one searches until chance ends it (no objects) or divides by zero (a side of less than four pixels).
    """

    overlaps = (0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0)  # 1: leave the image as it is
    smallest = 0.3  # share of each side
    aspect_ratios = (0.5, 2.0)
    trials = 40  # for an overlap, before another one is drawn

    def forward(self, image: tv_tensors.Image, target: Target) -> Sample:
        """Crops one sample; objects whose centre is outside go."""
        height, width = F.get_size(image)
        boxes = target["boxes"].as_subclass(Tensor)
        if not len(boxes) or min(height, width) * self.smallest < 1:
            return image, target
        while (overlap := self.overlaps[int(torch.randint(len(self.overlaps), ()))]) < 1:
            crops = self._propose(height, width)  # [at most trials, 4]
            near = (box_iou(crops, boxes) >= overlap) & _centres_inside(crops, boxes)
            fitting = crops[near.any(dim=1)]
            if len(fitting):
                return _crop(image, target, *fitting[0].int().tolist())
        return image, target

    def _propose(self, height: int, width: int) -> Tensor:
        """Random crops of whole pixels with an allowed aspect ratio: [at most trials, 4] xyxy."""
        sides = torch.tensor([width, height])
        shares = self.smallest + (1 - self.smallest) * torch.rand(self.trials, 2)
        extent = (sides * shares).floor()
        corner = ((sides - extent) * torch.rand(self.trials, 2)).floor()
        ratio = extent[:, 0] / extent[:, 1]
        lowest, highest = self.aspect_ratios
        return torch.cat([corner, corner + extent], 1)[(ratio >= lowest) & (ratio <= highest)]


def _crop(image: tv_tensors.Image, target: Target, left: int, top: int, right: int, bottom: int) -> Sample:
    """Cuts a rectangle out of a sample; objects whose centre is outside go."""
    boxes = target["boxes"]
    rectangle = torch.tensor([[left, top, right, bottom]])
    stays = _centres_inside(rectangle, boxes.as_subclass(Tensor))[0]
    cut = F.crop(boxes, top, left, bottom - top, right - left)
    kept = {field: target[field][stays] for field in OBJECT_FIELDS}
    kept["boxes"] = tv_tensors.wrap(cut[stays], like=cut)
    return F.crop(image, top, left, bottom - top, right - left), {**target, **kept}


def _centres_inside(crops: Tensor, boxes: Tensor) -> Tensor:
    """Which crops [m, 4] contain the centres of which boxes [n, 4]: bool [m, n]."""
    centres = (boxes[:, :2] + boxes[:, 2:]) / 2  # [n, 2]
    after = centres > crops[:, None, :2]  # [m, n, 2]
    before = centres < crops[:, None, 2:]
    return (after & before).all(dim=2)


class LightAugmentation(nn.Module):
    """Zoom, flip, resize, brightness and contrast of one sample, vanished objects removed.

    Gives what a zoom of torchvision's crop and pad, ``RandomHorizontalFlip``, ``Resize``, ``ColorJitter``,
    ``ClampBoundingBoxes`` and ``SanitizeBoundingBoxes`` give one after the other, at half their cost: most of a small
    sample's time goes into finding out, transform after transform, what is an image and what a box, and on a CPU that
    also trains, training waits.

    Args:
        size: height and width that come out.
    """

    def __init__(self, size: tuple[int, int]) -> None:
        super().__init__()
        self.size = size

    def forward(self, image: tv_tensors.Image, target: Target) -> Sample:
        """Augments one sample of 8-bit RGB."""
        pixels = image.as_subclass(Tensor)
        boxes = target["boxes"].as_subclass(Tensor)
        height, width = pixels.shape[-2:]
        left, top, right, bottom = draw_zoom(height, width, *ZOOM)
        inside = min(left, top, width - right, height - bottom) >= 0
        if inside:
            pixels = pixels[:, top:bottom, left:right]
            # A cut-out keeps the objects whose centre is inside, as SSD's crop does.
            keep = _centres_inside(torch.tensor([[left, top, right, bottom]]), boxes)[0]
        else:
            padding = [-left, -top, right - width, bottom - height]
            pixels = F.pad_image(pixels, padding, fill=list(MEAN_COLOUR))
        height, width = bottom - top, right - left
        boxes = _clipped(boxes - torch.tensor([left, top] * 2), height, width)
        if draw_flip():
            pixels, boxes = pixels.flip(-1), mirrored(boxes, width)
        if (height, width) != self.size:
            pixels = F.resize_image(pixels, list(self.size), antialias=True)
            boxes = boxes * torch.tensor([self.size[1] / width, self.size[0] / height] * 2)
        boxes = _clipped(boxes, *self.size)
        large = (boxes[:, 2:] - boxes[:, :2] >= 1).all(dim=1)
        keep = keep & large if inside else large
        kept = {field: target[field][keep] for field in OBJECT_FIELDS}
        return tv_tensors.Image(_jitter(pixels)), {**target, **kept, "boxes": boxes[keep]}


def draw_zoom(height: int, width: int, smallest: float, largest: float) -> tuple[int, int, int, int]:
    """The part of an image to be seen, at random: left, top, right, bottom. Zooming in it lies inside the image,
    zooming out the image lies inside it; both have the same shape."""
    share, across, down = torch.rand(3).tolist()
    zoom = smallest + share * (largest - smallest)
    new_height, new_width = max(1, round(height / zoom)), max(1, round(width / zoom))
    left, top = round(abs(new_width - width) * across), round(abs(new_height - height) * down)
    if zoom < 1:
        left, top = -left, -top
    return left, top, left + new_width, top + new_height


def _clipped(boxes: Tensor, height: int, width: int) -> Tensor:
    return boxes.clamp(boxes.new_zeros(4), boxes.new_tensor([width, height] * 2))


def _jitter(pixels: Tensor) -> Tensor:
    """Brightness and contrast, one after the other in random order."""
    order = torch.randperm(4).tolist()
    brightness, contrast = (torch.empty(1).uniform_(1 - COLOURS, 1 + COLOURS).item() for _ in range(2))
    for change in order:
        if change == BRIGHTNESS:
            pixels = _looked_up(pixels, F.adjust_brightness_image(LEVELS, brightness))
        elif change == CONTRAST:
            grey = F.rgb_to_grayscale_image(pixels).float().mean()
            levels = LEVELS.mul(contrast).add_(grey, alpha=1 - contrast).clamp_(0, 255)
            pixels = _looked_up(pixels, levels.byte())
    return pixels


def _looked_up(pixels: Tensor, levels: Tensor) -> Tensor:
    """Every value replaced by that of its level; bytes.translate is faster than any indexing."""
    changed = bytearray(pixels.numpy().tobytes().translate(levels[0, 0].numpy().tobytes()))
    return torch.frombuffer(changed, dtype=torch.uint8).view(pixels.shape)
