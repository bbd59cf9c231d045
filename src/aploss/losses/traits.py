"""What a loss says about itself, so that everything around it only has to read.

A loss class carries its traits as the class attribute ``traits``; the criterion, ``use_loss``, the
training step, reports and comparisons ask for nothing else. A callable without traits is treated as
an ordinary loss of ``(scores, targets)``.

Adding a loss takes one file::

    @register_loss("my-loss")
    class MyLoss(nn.Module):
        traits = LossTraits(label="My loss")

        def forward(self, scores: Tensor, targets: Tensor) -> Tensor: ...
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeVar, cast

from torch import Tensor, nn

from aploss.registry import Registry

LossClass = TypeVar("LossClass", bound=type[nn.Module])
LOSSES: Registry[type[nn.Module]] = Registry("loss")


@dataclass(frozen=True, kw_only=True)
class LossTraits:
    """How a loss is called, which box loss it is combined with, and its style in plots.

    Attributes:
        label: its name on pages and in tables; the registered name if empty.
        colour: of its lines and bars, ``#rrggbb``; one of the palette if empty.
        dashes: line style, as matplotlib takes it, to distinguish it without colour.
        marker: of its points, as matplotlib takes it.
        softmax: it takes logits [B, A, K + 1] with the background in column 0 and targets of
            class numbers [B, A]; otherwise logits [B, A, K] and targets 1, 0 and -1 of that shape.
        positive_targets: what it needs to know about each positive besides its score. ``"iou"``: the
            targets of positives are the IoU of their predicted box, in (0, 1]; its values are
            added up. ``"box_loss"``: a third argument, one box loss per positive [P] in the order
            of ``scores[targets == 1]``; it returns classification and localisation.
        divides_by_positives: it is a sum divided by the number of positives, which it takes as
            keyword ``num_positives`` if positives of other processes count, too.
        ranks_across_processes: it has an attribute ``process_group`` and ranks over that group.
        groups: it takes the keyword ``groups`` and ranks within each group alone.
        box_loss: the box loss it is combined with unless the user names one.
        box_weight: the weight of that box loss; ``"balanced"`` makes the value of the box loss
            that of the classification loss, at every step.
        weight_boxes_by_score: positives count in the box loss by their confidence.
        calibrated: its scores are probabilities, so that a score threshold means something.

    Example:
        >>> LossTraits(label="My loss", positive_targets="iou").box_loss
        'smooth-l1'
    """

    label: str = ""
    colour: str = ""
    dashes: Any = "-"
    marker: str = "o"
    softmax: bool = False
    positive_targets: Literal["", "iou", "box_loss"] = ""
    divides_by_positives: bool = False
    ranks_across_processes: bool = False
    groups: bool = False
    box_loss: Literal["smooth-l1", "giou"] = "smooth-l1"
    box_weight: float | Literal["balanced"] = 1.0
    weight_boxes_by_score: bool = False
    calibrated: bool = False


class LossModule(nn.Module):
    """Base class of the losses as modules: keeps the options of a function, calls it and has its documentation.

    Args:
        options: of the function, by name. Tensors follow the module to its device.
    """

    _function: ClassVar[Callable[..., Any]]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        function = cls.__dict__.get("_function")
        if function is not None:
            about = f"The constructor takes the options of :func:`{function.__name__}`, a call takes its tensors:"
            cls.__doc__ = f"{inspect.getdoc(cls)}\n\n{about}\n\n{inspect.getdoc(function)}"

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self._options: tuple[str, ...] = ()
        self._keep(**options)

    def _keep(self, **options: Any) -> None:
        self._options += tuple(options)
        for name, value in options.items():
            if isinstance(value, Tensor):
                self.register_buffer(name, value, persistent=False)
            else:
                setattr(self, name, value)

    def forward(self, scores: Tensor, targets: Tensor) -> Any:
        """Computes the loss."""
        return self._call(scores, targets)

    def _call(self, *tensors: Tensor, **given: Any) -> Any:
        """The function with these tensors; arguments that are given take precedence over the options."""
        options = {name: getattr(self, name) for name in self._options}
        options.update((name, value) for name, value in given.items() if value is not None)
        return type(self)._function(*tensors, **options)

    def extra_repr(self) -> str:
        """The options that are not the default."""
        values = {name: getattr(self, name) for name in self._options}
        defaults = {name: parameter.default for name, parameter in inspect.signature(type(self)).parameters.items()}
        return ", ".join(f"{name}={value}" for name, value in values.items() if value is not defaults.get(name))


def register_loss(name: str) -> Callable[[LossClass], LossClass]:
    """Makes a loss class known by a name, to ``make_loss``, to recipes and to the command line.

    Its constructor's arguments become the loss options, each kept as an attribute of that name.

    Args:
        name: such as "my-loss", for ``--loss my-loss``.

    Returns:
        a decorator for the class, which it returns unchanged.

    Raises:
        ConfigError: if the name is taken.

    Example:
        >>> from aploss import FocalLoss
        >>> register_loss("focal")(FocalLoss) is FocalLoss  # a class may be registered again under its own name
        True
    """
    return cast("Callable[[LossClass], LossClass]", LOSSES.register(name))


def traits_of(loss: object) -> LossTraits:
    """The traits of a loss object or class, or of the loss registered under a name.

    Args:
        loss: any callable; without declared traits it is treated as an ordinary loss of ``(scores, targets)``.

    Returns:
        its :class:`LossTraits`.

    Example:
        >>> import aploss
        >>> traits_of("focal").label, traits_of(aploss.OHEMCrossEntropy()).softmax
        ('Focal loss', True)
        >>> traits_of("batch size 4") == LossTraits()
        True
    """
    if isinstance(loss, str):
        loss = LOSSES.get(loss) if loss in LOSSES else None
    traits = getattr(loss, "traits", None)
    return traits if isinstance(traits, LossTraits) else LossTraits()
