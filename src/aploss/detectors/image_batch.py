"""Images of any size, resized for inference and padded into one batch."""

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from aploss.errors import DataError

__all__ = ["pad_images", "resize_image"]


def resize_image(image: Tensor, test_size: tuple[int, int], *, keeps_aspect_ratio: bool) -> Tensor:
    """An image [3, h, w] in the size for inference.

    Args:
        image: floats.
        test_size: with ``keeps_aspect_ratio`` the shorter side and the limit of the longer one,
            otherwise height and width.
        keeps_aspect_ratio: whether the image keeps its shape or is stretched.

    Returns:
        [3, H, W]; the image itself where it has the size already.
    """
    height, width = image.shape[-2:]
    size = test_size
    if keeps_aspect_ratio:
        shorter, longest = test_size
        scale = min(shorter / min(height, width), longest / max(height, width))
        size = (max(1, round(height * scale)), max(1, round(width * scale)))
    if size == (height, width):
        return image
    # Training images are shrunk with antialiasing, too; MPS lacks the operator.
    antialias = image.device.type != "mps" and (size[0] < height or size[1] < width)
    return F.interpolate(
        image[None], size=size, mode="bilinear", align_corners=False, antialias=antialias
    )[0]


def pad_images(
    images: Tensor | Sequence[Tensor], *, colour: Tensor, size_divisor: int
) -> tuple[Tensor, list[tuple[int, int]]]:
    """One batch of images of any size, padded at the right and the bottom.

    Args:
        images: [B, 3, H, W] or a list of [3, h, w].
        colour: of the padding, [3, 1, 1]; the batch is on its device.
        size_divisor: height and width of the batch are multiples of this.

    Returns:
        The batch [B, 3, H, W], and the height and width of each image inside it.

    Raises:
        DataError: if there is no image, or they are not floats.
    """
    sizes = [(image.shape[-2], image.shape[-1]) for image in images]
    if not sizes:
        raise DataError("a detector needs at least one image")
    if not images[0].is_floating_point():
        raise DataError(f"images must be floats in [0, 1], got {images[0].dtype}: divide by 255")
    height, width = (
        -(-max(size[axis] for size in sizes) // size_divisor) * size_divisor for axis in (0, 1)
    )
    if isinstance(images, Tensor) and images.shape[-2:] == (height, width):
        return images.to(colour.device), sizes
    batch = colour.expand(len(sizes), 3, height, width).clone()
    for row, image in zip(batch, images, strict=True):
        row[:, : image.shape[-2], : image.shape[-1]].copy_(image)
    return batch, sizes
