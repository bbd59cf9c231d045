"""Average-precision loss for object detection: exact ranking losses in the place of focal loss.

The loss library is here; the detector tool (extra ``detect``) is in ``aploss.detectors``,
``aploss.data``, ``aploss.evaluation`` and ``aploss.training``, and on the command line.

Example:
    >>> import torch, aploss
    >>> aploss.ap_loss(torch.tensor([2.0, 1.0]), torch.tensor([1, 0]), delta=0)
    tensor(0.)
"""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .losses import *  # noqa: F403


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return version("aploss")
    # Losses are looked up when asked for: `aploss --help` need not wait for torch.
    losses = import_module("aploss.losses")
    if name == "__all__":
        return losses.__all__
    if name in losses.__all__:
        return getattr(losses, name)
    raise AttributeError(f"module 'aploss' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted([*globals(), *import_module("aploss.losses").__all__])
