"""One training step: forward passes, gradients, and the rule for numbers that are not finite."""

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from aploss.data.batches import Batch
from aploss.detectors.criterion import Criterion
from aploss.detectors.detector import Detector
from aploss.errors import ConfigError
from aploss.losses import FocalLoss, OHEMCrossEntropy
from aploss.training.bad_numbers import (
    ANOTHER_PROCESS,
    BadNumbers,
    first_bad_gradient,
    is_about_scores,
    raise_together,
)
from aploss.training.config import TrainConfig
from aploss.training.distributed import World
from aploss.training.optimizer import freeze, make_optimizer
from aploss.training.schedule import Schedule

__all__ = ["StepResult", "Stepper"]

PARTS = ("classification", "box")
SUMS = (FocalLoss, OHEMCrossEntropy)  # losses that only need the number of positives of all


@dataclass(frozen=True)
class StepResult:
    """The outcome of a step.

    Attributes:
        losses: ``classification`` and ``box``, means over processes and accumulated passes.
        gradient_norm: before clipping.
        learning_rate: what it was done with.
        bad: why it was skipped, or None.
        counts: whether the weights were changed: not after bad numbers, nor where the loss scale of
            float16 was still too high.
    """

    losses: dict[str, float]
    gradient_norm: float
    learning_rate: float
    bad: BadNumbers | None = None
    counts: bool = True


class Stepper:
    """Detector, optimizer and everything else that a step changes.

    Args:
        config: of the run.
        detector: on its device, with its initial weights.
        schedule: the learning rate.
        world: the processes.
        image_name: file name of an image of the training set by index, for reports.
    """

    def __init__(
        self,
        config: TrainConfig,
        detector: Detector,
        schedule: Schedule,
        world: World,
        image_name: Callable[[int], str],
    ) -> None:
        self.config, self.schedule, self.world = config, schedule, world
        self.detector = detector
        self.device = next(detector.parameters()).device
        freeze(detector, config.model.frozen)
        self.optimizer = make_optimizer(detector, config.optimizer)
        self.averaged = _averaged(detector, config.model.ema)
        half = config.precision == "float16"
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=half)
        self._image_name = image_name
        self._model = self._parallel(detector)
        self._trained = [p for p in detector.parameters() if p.requires_grad]

    @property
    def evaluated(self) -> Detector:
        """The detector to validate and keep: the moving average of the weights where there is."""
        return self.detector if self.averaged is None else cast(Detector, self.averaged.module)

    def step(self, number: int, batches: Sequence[Batch]) -> StepResult:
        """Learns from the batches of one step.

        Args:
            number: of the step, from 0.
            batches: one for each accumulated forward pass.
        """
        rate = self.config.optimizer.learning_rate * self.schedule.factor(number)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self._train_mode()
        self.optimizer.zero_grad(set_to_none=True)
        sums = dict.fromkeys(PARTS, 0.0)
        for index, batch in enumerate(batches):
            losses, problem = self._forward(batch)
            found, *values = self.world.sum([float(problem is not None), *_values(losses)])
            if found:
                return self._skip(number, problem, batch, sums, rate)
            for part, value in zip(PARTS, values, strict=True):
                sums[part] += value / self.world.size / len(batches)
            self._backward(losses, len(batches), is_last=index == len(batches) - 1)
        norm = self._clipped_norm()
        overflow = not math.isfinite(norm)
        if overflow and not self._scale_is_too_high():
            problem = ("gradient", first_bad_gradient(self.detector))
            return self._skip(number, problem, _joined(batches), sums, rate)
        self.scaler.step(self.optimizer)  # does nothing after an overflow
        self.scaler.update()
        if self.averaged is not None and not overflow:
            self.averaged.update_parameters(self.detector)
        return StepResult(sums, norm, rate, counts=not overflow)

    def _forward(self, batch: Batch) -> tuple[dict[str, Tensor], tuple[str, str] | None]:
        images = batch.images.to(self.device, non_blocking=True)
        dtype = {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(self.config.precision)
        try:
            with torch.autocast(self.device.type, dtype=dtype, enabled=dtype is not None):
                losses = self._model(images, batch.targets)
        except ValueError as error:
            if not is_about_scores(error):
                raise
            return {}, ("score", str(error))
        for part, value in losses.items():
            if not bool(value.isfinite()):
                return losses, ("loss", f"{part} = {value.item()}")
        return losses, None

    def _backward(self, losses: dict[str, Tensor], passes: int, *, is_last: bool) -> None:
        total = sum(losses.values(), torch.zeros((), device=self.device)) / passes
        waits = isinstance(self._model, DistributedDataParallel) and not is_last
        with self._model.no_sync() if waits else nullcontext():  # type: ignore[operator]
            torch.autograd.backward(self.scaler.scale(total))

    def _clipped_norm(self) -> float:
        self.scaler.unscale_(self.optimizer)
        longest = self.config.optimizer.clip_norm or math.inf
        return float(clip_grad_norm_(self._trained, longest))

    def _scale_is_too_high(self) -> bool:
        """Whether an overflow is the loss scale of float16 finding its level, not a bad number."""
        return self.scaler.is_enabled() and self.scaler.get_scale() > 1

    def _skip(
        self,
        number: int,
        problem: tuple[str, str] | None,
        batch: Batch,
        sums: dict[str, float],
        rate: float,
    ) -> StepResult:
        self.optimizer.zero_grad(set_to_none=True)
        if problem is not None and problem[0] == "gradient":
            self.scaler.update()
        own = None
        if problem is not None:
            own = (*problem, [self._image_name(index) for index in batch.indices])
        told = self.world.from_main([found for found in self.world.gather(own) if found])
        # Who only heard of it has nothing to say beside who found it.
        finders = [found for found in told if ANOTHER_PROCESS not in found[1]] or told
        names = tuple(name for found in finders for name in found[2])
        what, detail, _ = finders[0]
        bad = BadNumbers(number + 1, what, detail, names)
        return StepResult(sums, math.nan, rate, bad=bad, counts=False)

    def _train_mode(self) -> None:
        self._model.train()
        if self.config.model.frozen:  # frozen batch norm must not move its statistics either
            for module in self.detector.modules():
                own = list(module.parameters(recurse=False))
                if own and not any(parameter.requires_grad for parameter in own):
                    module.eval()

    def _parallel(self, detector: Detector) -> nn.Module:
        if self.world.size == 1:
            return detector
        if self.config.criterion.rank_over_processes:
            self._rank_over_processes(detector.criterion)
        devices = [self.device] if self.device.type == "cuda" else None
        return DistributedDataParallel(detector, device_ids=devices)

    def _rank_over_processes(self, criterion: Criterion) -> None:
        loss, everyone = criterion.loss, torch.distributed.group.WORLD
        ranks = hasattr(loss, "process_group")
        if not (ranks or isinstance(loss, SUMS) or criterion.rank_over == "image"):
            raise ConfigError(
                f"the loss {self.config.loss} cannot rank over processes; leave "
                "criterion.rank_over_processes false"
            )
        assert everyone is not None
        criterion.rank_across(everyone)
        if getattr(loss, "process_group", None) is None:
            raise_together(loss, self.world)

    def state(self) -> dict[str, Any]:
        """What :meth:`load_state` needs to go on."""
        averaged = self.averaged
        return {
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            # Without a moving average the weights are already in the checkpoint's detector.
            "weights": None if averaged is None else self.detector.state_dict(),
            "averaged_steps": None if averaged is None else int(averaged.n_averaged),
        }

    def load_state(self, state: dict[str, Any], evaluated: dict[str, Tensor]) -> None:
        """Brings everything into a saved state.

        Args:
            state: of :meth:`state`.
            evaluated: weights of the detector that was saved beside it.
        """
        self.optimizer.load_state_dict(state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])
        if self.averaged is None:
            self.detector.load_state_dict(evaluated)
        else:
            self.detector.load_state_dict(state["weights"])
            self.averaged.module.load_state_dict(evaluated)
            self.averaged.n_averaged.fill_(state["averaged_steps"])


def _averaged(detector: Detector, decay: float | None) -> AveragedModel | None:
    if decay is None:
        return None

    def average(averages: Any, current: Any, count: Tensor | int) -> None:
        # A young average forgets faster, or the initial weights would stay in it for long.
        ramp = (1 + int(count)) / (10 + int(count))
        get_ema_multi_avg_fn(min(decay, ramp))(averages, current, count)  # type: ignore[no-untyped-call]

    return AveragedModel(detector, multi_avg_fn=average)


def _values(losses: dict[str, Tensor]) -> list[float]:
    return [losses[part].item() if part in losses else 0.0 for part in PARTS]


def _joined(batches: Sequence[Batch]) -> Batch:
    indices = [index for batch in batches for index in batch.indices]
    return Batch(images=None, targets=[], indices=indices)
