"""Training augmentation: SSD's (``paper``), a lighter one, flips alone, or none.

Each preset maps a sample of a dataset to one of a fixed size, by torchvision's transforms. Images and boxes are plain
tensors; :class:`Augmentation` alone wraps them for torchvision's dispatch.
"""

from collections.abc import Callable, Sequence

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
    resize, flip = v2.Resize(size, antialias=True), v2.RandomHorizontalFlip()
    transforms: dict[str, list[nn.Module]] = {
        "paper": [
            v2.RandomPhotometricDistort(),
            v2.RandomZoomOut(fill=MEAN_COLOUR, side_range=(1.0, 4.0)),
            IoUCrop(),
            flip,
            resize,
        ],
        "light": [Zoom(), flip, resize, v2.ColorJitter(brightness=0.2, contrast=0.2)],
        "flip": [resize, flip],
        "none": [resize],
    }
    # A photograph of many megapixels has detail that no training image keeps, and zooming it out would need gigabytes.
    limit = 2 * max(size) if preset in ("paper", "light") else None
    return Augmentation(transforms[preset], limit)


class Augmentation(nn.Module):
    """Applies torchvision's transforms to plain tensors, and removes objects that vanish.

    Args:
        transforms: applied in sequence.
        limit: images whose shorter side exceeds this many pixels are shrunk to it first; None for any size.
    """

    def __init__(self, transforms: Sequence[nn.Module], limit: int | None) -> None:
        super().__init__()
        self.limit = limit
        # Rounding may put a corner slightly outside.
        finish = [v2.ClampBoundingBoxes(), v2.SanitizeBoundingBoxes(min_size=1, labels_getter=_object_fields)]
        self.transforms = v2.Compose([*transforms, *finish])

    def forward(self, image: Tensor, target: Target) -> Sample:
        """Augments one sample of 8-bit RGB."""
        size = (image.shape[-2], image.shape[-1])
        boxes = tv_tensors.BoundingBoxes(target["boxes"], format="XYXY", canvas_size=size)
        image = tv_tensors.Image(image)
        if self.limit is not None and min(size) > self.limit:
            smaller = [round(side * self.limit / min(size)) for side in size]
            image, boxes = F.resize(image, smaller, antialias=True), F.resize(boxes, smaller)
        image, target = self.transforms(image, {**target, "boxes": boxes})
        return image.as_subclass(Tensor), {**target, "boxes": target["boxes"].as_subclass(Tensor)}


def _object_fields(sample: Sample) -> tuple[Tensor, ...]:
    return tuple(sample[1][field] for field in OBJECT_FIELDS)


class IoUCrop(v2.RandomIoUCrop):  # type: ignore[misc]
    """torchvision's crop of SSD, which searches for long without objects and divides by zero below four pixels."""

    def forward(self, image: tv_tensors.Image, target: Target) -> Sample:
        """Crops one sample; the boxes of objects whose centre is outside become empty, to be removed later."""
        if not len(target["boxes"]) or min(image.shape[-2:]) * self.min_scale < 1:
            return image, target
        cropped: Sample = super().forward(image, target)
        return cropped


class Zoom(nn.Module):
    """Crops or pads a sample at random, which zooms in or out by a factor in :data:`ZOOM` without changing its shape.

    Like SSD's crop, it keeps the objects whose centre is inside.
    """

    def forward(self, image: tv_tensors.Image, target: Target) -> Sample:
        """Zooms one sample; the boxes of objects whose centre is outside become empty, to be removed later."""
        height, width = image.shape[-2:]
        share, across, down = torch.rand(3).tolist()
        zoom = ZOOM[0] + share * (ZOOM[1] - ZOOM[0])
        new_height, new_width = max(1, round(height / zoom)), max(1, round(width / zoom))
        left, top = round(abs(new_width - width) * across), round(abs(new_height - height) * down)
        if zoom < 1:
            padding = [left, top, new_width - width - left, new_height - height - top]
            return F.pad(image, padding, fill=list(MEAN_COLOUR)), {**target, "boxes": F.pad(target["boxes"], padding)}
        window = left, top, left + new_width, top + new_height
        centres = (target["boxes"][:, :2] + target["boxes"][:, 2:]).as_subclass(Tensor) / 2  # [n, 2]
        inside = (centres > torch.tensor(window[:2])) & (centres < torch.tensor(window[2:]))
        boxes = F.crop(target["boxes"], top, left, new_height, new_width)
        boxes[~inside.all(dim=1)] = 0
        return F.crop(image, top, left, new_height, new_width), {**target, "boxes": boxes}
