"""The classification losses a detector can be trained with, by name."""

import inspect
from typing import Any

from torch import Tensor, nn

from aploss.errors import ConfigError, RunError
from aploss.losses.alrp_loss import ALRPLoss
from aploss.losses.ap_loss import APLoss
from aploss.losses.auc_loss import AUCLoss
from aploss.losses.focal_loss import FocalLoss
from aploss.losses.hinge_ap_loss import HingeAPLoss
from aploss.losses.ohem_cross_entropy import OHEMCrossEntropy
from aploss.losses.rank_sort_loss import RankSortLoss
from aploss.losses.smooth_ap_loss import SmoothAPLoss

__all__ = ["LOSS_NAMES", "describe_loss", "is_loss", "make_loss", "takes_background_column"]

_CLASSES: dict[str, type[nn.Module]] = {
    "ap": APLoss,
    "auc": AUCLoss,
    "focal": FocalLoss,
    "ce-ohem": OHEMCrossEntropy,
    "rank-sort": RankSortLoss,
    "alrp": ALRPLoss,
    "smooth-ap": SmoothAPLoss,
    "hinge-ap": HingeAPLoss,
}
LOSS_NAMES: tuple[str, ...] = tuple(_CLASSES)
CUSTOM = "custom"  # the name of a loss object that is none of ours
NOT_STORED = "process_group"  # belongs to the running processes, not to the detector


class _LossOfTheUser(nn.Module):
    """Stands where a detector was saved with a loss object of the user's own."""

    def forward(self, scores: Tensor, targets: Tensor) -> Tensor:
        raise RunError(
            "this detector was trained with a loss object of your own: to train it further, "
            "set detector.criterion.loss to that object"
        )


def make_loss(name: str, **options: Any) -> nn.Module:
    """The loss of a name.

    Args:
        name: one of ``LOSS_NAMES``.
        options: the keyword arguments of its class, such as ``delta`` for ``"ap"``.

    Raises:
        ConfigError: if there is no such loss or it has no such option.

    Example:
        >>> make_loss("ap", delta=0.5).delta
        0.5
    """
    if name == CUSTOM:
        return _LossOfTheUser()
    if name not in _CLASSES:
        raise ConfigError(f"there is no loss {name!r}; choose one of: {', '.join(LOSS_NAMES)}")
    loss_class = _CLASSES[name]
    allowed = _option_names(loss_class)
    for option in options:
        if option not in allowed:
            raise ConfigError(
                f"loss {name!r} has no option {option!r}; it has: {', '.join(allowed) or 'none'}"
            )
    try:
        return loss_class(**options)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"loss {name!r}: {error}") from error


def describe_loss(loss: nn.Module) -> tuple[str, dict[str, Any]]:
    """The name and options that :func:`make_loss` would make this loss from.

    A loss object that is none of ours is called ``"custom"`` and has no options.
    """
    for name, loss_class in _CLASSES.items():
        if type(loss) is loss_class:
            options = {key: getattr(loss, key) for key in _option_names(type(loss))}
            return name, options
    return CUSTOM, {}


def is_loss(loss: object, *names: str) -> bool:
    """Whether a loss object is of one of these names' classes.

    Example:
        >>> is_loss(make_loss("focal"), "focal", "ce-ohem")
        True
    """
    return isinstance(loss, tuple(_CLASSES[name] for name in names))


def takes_background_column(loss: object) -> bool:
    """Whether the loss is a softmax over K classes and background, rather than K sigmoids."""
    return is_loss(loss, "ce-ohem")


def _option_names(loss_class: type) -> list[str]:
    parameters = inspect.signature(loss_class).parameters.values()
    named = [one.name for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD]
    return [name for name in named if name != NOT_STORED]
