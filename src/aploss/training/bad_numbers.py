"""Numbers that are not finite: found, named, and agreed on by all processes."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor, nn

from aploss.losses import NonFiniteScoresError
from aploss.training.distributed import World

__all__ = [
    "ANOTHER_PROCESS",
    "BadNumbers",
    "first_bad_gradient",
    "is_about_scores",
    "raise_together",
]

SHOWN_IMAGES = 8
# What a process hears whose own scores are fine, from the engine of the ranking losses.
ANOTHER_PROCESS = "another process"


@dataclass(frozen=True)
class BadNumbers:
    """A step that was skipped because a number in it was not finite.

    Attributes:
        step: its number, from 1.
        what: ``"score"``, ``"loss"`` or ``"gradient"``.
        detail: which of them.
        images: files of the batch, of the processes in which it was found.
    """

    step: int
    what: str
    detail: str
    images: tuple[str, ...]

    def __str__(self) -> str:
        shown = ", ".join(self.images[:SHOWN_IMAGES])
        more = len(self.images) - SHOWN_IMAGES
        images = f"{shown} and {more} more" if more > 0 else shown
        return f"step {self.step}: {self.what} not finite ({self.detail}); images: {images}"

    def as_row(self) -> dict[str, Any]:
        """Plain values for the file of bad numbers."""
        return {**asdict(self), "images": list(self.images)}


def first_bad_gradient(model: nn.Module) -> str:
    """The name of the first parameter whose gradient has a number that is not finite."""
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and not bool(parameter.grad.isfinite().all()):
            return name
    return "of the norm alone, which overflows"


def is_about_scores(error: ValueError) -> bool:
    """Whether an error of a loss means scores that are not finite, here or in another process."""
    return isinstance(error, NonFiniteScoresError) or ANOTHER_PROCESS in str(error)


def raise_together(loss: nn.Module, world: World) -> None:
    """Lets a loss complain in all processes when it complains in one.

    What comes after the loss may exchange values between the processes: one that has left early
    would keep the others waiting. Ranking losses with a process group agree by themselves.
    """
    compute: Callable[..., Any] = loss.forward

    def forward(*arguments: Tensor) -> Any:
        result, problem = None, None
        try:
            result = compute(*arguments)
        except NonFiniteScoresError as error:
            problem = error
        if world.sum([float(problem is not None)])[0]:
            raise problem or NonFiniteScoresError(f"scores of {ANOTHER_PROCESS} are not finite")
        return result

    loss.forward = forward
