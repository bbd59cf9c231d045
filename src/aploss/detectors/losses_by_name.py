"""The classification losses a detector can be trained with, by name, and back to their names."""

import inspect
from typing import Any

from torch import Tensor, nn

from aploss.errors import ConfigError, RunError, did_you_mean
from aploss.losses.traits import LOSSES, LossTraits, traits_of

CUSTOM = "custom"  # the name of a loss object that is not registered
PLAIN = (type(None), bool, int, float, str, list, tuple, dict)
LOSS_NAMES: tuple[str, ...]  # with those of plugins, so it is looked up anew each time


def __getattr__(name: str) -> Any:
    if name == "LOSS_NAMES":
        return LOSSES.names()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class _LossOfTheUser(nn.Module):
    """Stands where a detector was saved with a loss object of the user's own."""

    def __init__(self, softmax: bool = False) -> None:  # on which the number of logits depends
        super().__init__()
        self.traits = LossTraits(softmax=softmax)

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
    loss_class = _LossOfTheUser if name == CUSTOM else LOSSES.get(name)
    allowed = _option_names(loss_class)
    for option in options:
        if option not in allowed:
            known = f"it has: {', '.join(allowed) or 'none'}{did_you_mean(option, allowed)}"
            raise ConfigError(f"loss {name!r} has no option {option!r}; {known}")
    try:
        return loss_class(**options)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"loss {name!r}: {error}") from error


def describe_loss(loss: nn.Module) -> tuple[str, dict[str, Any]]:
    """The name and options that :func:`make_loss` would make this loss from.

    Options are the arguments of its constructor that it keeps as attributes and that are plain values; what belongs to
    the running process is none. A loss object that is not registered is called ``"custom"``.
    """
    for name, loss_class in LOSSES.items():
        if type(loss) is loss_class:
            values = {key: getattr(loss, key, ...) for key in _option_names(loss_class)}
            return name, {key: value for key, value in values.items() if isinstance(value, PLAIN)}
    return CUSTOM, {"softmax": True} if traits_of(loss).softmax else {}


def _option_names(loss_class: type) -> list[str]:
    parameters = inspect.signature(loss_class).parameters.values()
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [one.name for one in parameters if one.kind in named and one.name != "process_group"]
