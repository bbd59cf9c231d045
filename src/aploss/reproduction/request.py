"""What a user asks of a reproduction, and the settings that follow from it at either scale."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from aploss.errors import ConfigError
from aploss.reproduction.page import PageText
from aploss.reproduction.plan import Plan, Tuning, comparison_config
from aploss.reproduction.results import Results
from aploss.training.config import TrainConfig

__all__ = ["Reproduction", "Request", "small_note"]

SMALL_SEEDS = (0, 1, 2)
PAPER_SEEDS = (0,)  # the paper names none
PAPER_BATCH = 8  # Section 4.1: 2 GPUs with 8 images each, and each ranks its own
PAPER_GPUS = 2
EPOCH_IMAGES = {"voc": 16_551, "coco": 118_287}  # VOC 2007 + 2012 trainval; COCO trainval35k


@dataclass(frozen=True, kw_only=True)
class Request:
    """The options of ``aploss reproduce``.

    Attributes:
        scale: ``"small"`` for minutes on a CPU, ``"paper"`` for the paper's own settings.
        benchmark: which of the paper's data sets: its numbers and, at the paper's scale, recipes.
        data: folder of the data; built-in data by default at small scale.
        recipe: settings of the small scale; by default ``demo`` for built-in data, else
            ``bccd-cpu``.
        seeds: by default three at small scale, one at the paper's.
        steps: length of the runs at small scale.
        tune: search for learning rates at small scale, where losses are compared.
        tune_steps: length of a trial of that search.
        device: as of a run.
        processes: how many train together, as ``torchrun`` started them.
    """

    scale: Literal["small", "paper"] = "small"
    benchmark: Literal["voc", "coco"] = "voc"
    data: str | None = None
    recipe: str | None = None
    seeds: tuple[int, ...] | None = None
    steps: int | None = None
    tune: bool = True
    tune_steps: int | None = None
    device: str = "auto"
    processes: int = 1

    def __post_init__(self) -> None:
        if self.is_small:
            return
        for option, value in (("--recipe", self.recipe), ("--steps", self.steps)):
            if value is not None:
                raise ConfigError(
                    f"{option} goes with --scale small: the paper's scale has the paper's settings"
                )
        if self.processes > PAPER_GPUS:
            raise ConfigError(
                f"the paper's scale is for 1 or {PAPER_GPUS} processes of {PAPER_BATCH} images "
                f"each, got {self.processes}"
            )

    @property
    def is_small(self) -> bool:
        """Whether this is the scale for a CPU."""
        return self.scale == "small"

    @property
    def all_seeds(self) -> tuple[int, ...]:
        """The seeds to train."""
        return self.seeds or (SMALL_SEEDS if self.is_small else PAPER_SEEDS)

    @property
    def is_standard(self) -> bool:
        """Whether this is the small scale on the built-in data with its own recipe."""
        return self.is_small and self.recipe is None and self.data in (None, "builtin")

    def tuning(self, steps: int) -> Tuning | None:
        """The search for learning rates where losses are compared, with trials of that length."""
        if not (self.is_small and self.tune):
            return None
        return Tuning(steps=self.tune_steps or min(steps, self.steps or steps))

    def config(
        self,
        paper_recipe: str,
        changes: dict[str, Any],
        *,
        steps: int | None = None,
        batch: int = PAPER_BATCH,
    ) -> TrainConfig:
        """The config of a run.

        Args:
            paper_recipe: recipe of the paper's scale, without its data set: ``retinanet-r50``.
            changes: nested values that win over the recipe.
            steps: length at small scale on built-in data; the recipe's by default, and elsewhere.
            batch: images that are ranked together at the paper's scale.
        """
        changes = {**changes, "device": self.device}
        if not self.is_small:
            together = {"size": batch * self.processes, "accumulate": PAPER_GPUS // self.processes}
            changes = {**changes, "data": self.data or "", "batches": together}
            return comparison_config(f"{self.benchmark}-{paper_recipe}", changes)
        data = self.data or "builtin"
        recipe = self.recipe or ("demo" if data == "builtin" else "bccd-cpu")
        length = self.steps or (steps if self.is_standard else None)
        return comparison_config(recipe, {**changes, "data": data}, steps=length)


@dataclass(frozen=True, kw_only=True)
class Reproduction:
    """A table or figure of the paper.

    Attributes:
        name: as on the command line.
        title: of its page.
        shows: what there is to see, in a line.
        plan: the runs that a request needs.
        text: what its page says about results.
        benchmarks: the paper's data sets it has.
        epoch_images: data set → images of an epoch at the paper's scale.
    """

    name: str
    title: str
    shows: str
    plan: Callable[[Request], Plan]
    text: Callable[[Request, Results], PageText]
    benchmarks: tuple[str, ...] = ("voc",)
    epoch_images: Mapping[str, int] = field(default_factory=EPOCH_IMAGES.copy)


def small_note(request: Request) -> str:
    """Why numbers of the small scale are not the paper's; empty at the paper's scale."""
    if not request.is_small:
        return ""
    return (
        "This is the small scale: a detector of few parameters, trained from scratch for minutes "
        "on small images. The paper's numbers come from large pretrained networks on other data, "
        "so levels cannot be compared with them; the order and the differences can."
    )
