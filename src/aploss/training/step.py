"""One training step: learning rate, forward passes, gradients, and what to do about NaN and Inf."""

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, cast

import torch
from torch import Tensor, nn, optim
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from aploss.data.loader import Batch
from aploss.detectors.detector import Detector
from aploss.errors import ConfigError, RunError, listed
from aploss.losses import NonFiniteScoresError, OtherProcessError, traits_of
from aploss.training.config import OptimizerConfig, ScheduleConfig, TrainConfig
from aploss.training.distributed import World

PARTS = ("classification", "box")
NORMS = (nn.GroupNorm, nn.LayerNorm, nn.modules.batchnorm._NormBase)
SHOWN_IMAGES = 8
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


class DivergedError(RunError):
    """Too many steps in a row had NaN or Inf, or a weight did; the last good checkpoint stays."""


# --- learning rate ---


@dataclass(frozen=True)
class Schedule:
    """Length of a run in steps and the learning-rate factor of each step.

    The factor is a function of the step alone: a resumed run needs no state for it.
    """

    config: ScheduleConfig
    steps_per_epoch: float

    def steps(self, amount: float, unit: str) -> int:
        """An amount of epochs or steps as a number of steps, at least one."""
        return max(1, round(amount * (self.steps_per_epoch if unit == "epochs" else 1)))

    @property
    def total_steps(self) -> int:
        """Steps of the whole run."""
        return self.steps(self.config.length, self.config.unit)

    def factor(self, step: int) -> float:
        """Share of the learning rate that step number ``step`` (from 0) uses.

        Example:
            >>> paper = ScheduleConfig(length=160, unit="epochs", kind="milestones",
            ...     milestones=(110, 140), warmup_steps=500, warmup_factor=1 / 3)
            >>> schedule = Schedule(paper, steps_per_epoch=1000)
            >>> [round(schedule.factor(s), 4) for s in (0, 250, 500, 109_999, 110_000, 140_000)]
            [0.3333, 0.6667, 1.0, 1.0, 0.1, 0.01]
        """
        config, steps, start = self.config, self.warmup_steps, self.config.warmup_factor
        warmup = 1.0 if step >= steps else start + (1 - start) * step / steps
        if config.kind == "milestones":
            return warmup * float(config.gamma ** sum(step >= self.steps(m, config.unit) for m in config.milestones))
        end, done = config.final_factor, min(step / max(1, self.total_steps - 1), 1.0)
        return warmup * (end + (1 - end) * (1 + math.cos(math.pi * done)) / 2)

    @property
    def warmup_steps(self) -> int:
        """Steps of the warm-up; one that is longer than the training becomes a tenth of it."""
        wanted, total = self.config.warmup_steps, self.total_steps
        return wanted if wanted <= total else max(1, total // 10)


# --- optimizer ---


def make_optimizer(model: nn.Module, config: OptimizerConfig) -> optim.Optimizer:
    """SGD with momentum or AdamW over what is trained; normalisation and biases are decayed only where asked for."""
    norms = {id(p) for module in model.modules() if isinstance(module, NORMS) for p in module.parameters()}
    decayed: list[nn.Parameter] = []
    spared: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            spare = id(parameter) in norms or name.split(".")[-1] == "bias" or parameter.ndim < 2
            (spared if spare else decayed).append(parameter)
    if not decayed and not spared:
        raise ConfigError("model.frozen leaves nothing to train")
    # All tensors in one operation, where the device has it: one after the other costs AdamW a twentieth of a small
    # detector's step on a CPU.
    fused = (decayed + spared)[0].device.type in ("cpu", "cuda")
    if config.decay_norms_and_biases:
        decayed, spared = decayed + spared, []
    groups = [{"params": decayed, "weight_decay": config.weight_decay}]
    if spared:
        groups.append({"params": spared, "weight_decay": 0.0})
    if config.name == "sgd":
        return optim.SGD(groups, lr=config.learning_rate, momentum=config.momentum, fused=fused)
    return optim.AdamW(groups, lr=config.learning_rate, fused=fused)


def freeze(model: nn.Module, patterns: Iterable[str]) -> int:
    """Stops training of the parameters whose names match, or lie below a matching module; counts them.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        >>> freeze(model, ["0"]), [p.requires_grad for p in model.parameters()]
        (2, [False, False, True, True])
    """
    frozen = 0
    for pattern in patterns:
        matching = [
            parameter
            for name, parameter in model.named_parameters()
            if fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")
        ]
        if not matching:
            tops = ", ".join(dict(model.named_children()))
            raise ConfigError(f"model.frozen: {pattern!r} matches no parameter; below {tops}")
        for parameter in matching:
            frozen += parameter.requires_grad
            parameter.requires_grad_(False)
    return frozen


def _make_ema(detector: Detector, decay: float | None) -> AveragedModel | None:
    if decay is None:
        return None

    def average(averages: Any, current: Any, count: Tensor | int) -> None:
        # A young average forgets faster, or the initial weights would stay in it for long.
        ramp = (1 + int(count)) / (10 + int(count))
        get_ema_multi_avg_fn(min(decay, ramp))(averages, current, count)  # type: ignore[no-untyped-call]

    return AveragedModel(detector, multi_avg_fn=average)


# --- NaN and Inf ---


@dataclass(frozen=True)
class BadNumbers:
    """NaN or Inf, for which a step is skipped."""

    what: str  # "score", "loss" or "gradient"
    detail: str
    is_own: bool = True  # False where another rank has found it
    step: int = 0  # from 1
    images: tuple[str, ...] = ()  # files of the batch, of the ranks in which it was found

    def __str__(self) -> str:
        images = listed(self.images, SHOWN_IMAGES)
        return f"step {self.step}: {self.what} is NaN or Inf ({self.detail}); images: {images}"

    def as_row(self) -> dict[str, Any]:
        """Plain values for ``bad_numbers.jsonl``."""
        return {"step": self.step, "what": self.what, "detail": self.detail, "images": list(self.images)}


def _non_finite_gradient(model: nn.Module) -> str:
    """The name of the first parameter with NaN or Inf in its gradient."""
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and not bool(parameter.grad.isfinite().all()):
            return name
    return "only the norm, which overflows"


def non_finite_weight(model: nn.Module) -> str | None:
    """The name of a parameter or buffer with NaN or Inf, or None."""
    for name, value in model.state_dict().items():
        if value.is_floating_point() and not bool(value.isfinite().all()):
            return name
    return None


# --- the step ---


@dataclass(frozen=True)
class StepResult:
    """The outcome of a step."""

    losses: dict[str, float]  # means over ranks and accumulated passes
    gradient_norm: float  # before clipping
    learning_rate: float
    bad: BadNumbers | None = None  # why it was skipped
    counts: bool = True  # the weights were changed: not after NaN or Inf, nor with too high a loss scale of float16


class Stepper:
    """Detector, optimizer and everything else that a step changes.

    The detector is on its device, with its initial weights; ``name_of`` names a training image by its index.
    """

    def __init__(
        self, config: TrainConfig, detector: Detector, schedule: Schedule, world: World, name_of: Callable[[int], str]
    ) -> None:
        self.config, self.detector, self.schedule, self.world = config, detector, schedule, world
        self.device = next(detector.parameters()).device
        freeze(detector, config.model.frozen)
        if config.model.frozen_backbone:
            detector.body().requires_grad_(False)
        self.optimizer = make_optimizer(detector, config.optimizer)
        self.ema = _make_ema(detector, config.model.ema)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=config.precision == "float16")
        self._name_of = name_of
        self._model = self._parallel(detector)
        self._trained = [p for p in detector.parameters() if p.requires_grad]

    @property
    def evaluated(self) -> Detector:
        """The detector to validate and keep: the EMA of the weights where there is one."""
        return self.detector if self.ema is None else cast(Detector, self.ema.module)

    def step(self, number: int, batches: Sequence[Batch]) -> StepResult:
        """Learns from the batches, one for each accumulated forward pass, of a step (from 0).

        Raises:
            RunError: another rank was given targets that its loss cannot take.
        """
        rate = self.config.optimizer.learning_rate * self.schedule.factor(number)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self._train_mode()
        self.optimizer.zero_grad(set_to_none=True)
        sums = dict.fromkeys(PARTS, 0.0)
        for index, batch in enumerate(batches):
            losses, problem = self._forward(batch)
            own = (losses[part].item() if part in losses else 0.0 for part in PARTS)
            found, *values = self.world.sum([problem is not None, *own])
            if found:
                return StepResult(sums, math.nan, rate, self._skip(number, problem, batch.indices), counts=False)
            for part, value in zip(PARTS, values, strict=True):
                sums[part] += value / self.world.size / len(batches)
            self._backward(losses, len(batches), is_last=index == len(batches) - 1)
        self.scaler.unscale_(self.optimizer)
        norm = float(clip_grad_norm_(self._trained, self.config.optimizer.clip_norm or math.inf))
        overflow = not math.isfinite(norm)
        # Otherwise the loss scale of float16 is still finding its level.
        if overflow and not (self.scaler.is_enabled() and self.scaler.get_scale() > 1):
            problem = BadNumbers("gradient", _non_finite_gradient(self.detector))
            bad = self._skip(number, problem, [index for batch in batches for index in batch.indices])
            self.scaler.update()
            return StepResult(sums, norm, rate, bad, counts=False)
        self.scaler.step(self.optimizer)  # does nothing after an overflow
        self.scaler.update()
        if self.ema is not None and not overflow:
            self.ema.update_parameters(self.detector)
        return StepResult(sums, norm, rate, counts=not overflow)

    def _forward(self, batch: Batch) -> tuple[dict[str, Tensor], BadNumbers | None]:
        images = batch.images.to(self.device, non_blocking=True)
        dtype = DTYPES.get(self.config.precision)
        try:
            with torch.autocast(self.device.type, dtype=dtype, enabled=dtype is not None):
                losses = self._model(images, batch.targets)
        except NonFiniteScoresError as error:
            return {}, BadNumbers("score", str(error))
        except OtherProcessError as error:
            if error.cause == "score":
                return {}, BadNumbers("score", str(error), is_own=False)
            raise RunError(f"the step cannot be done: {error}") from error
        for part, value in losses.items():
            if not bool(value.isfinite()):
                return losses, BadNumbers("loss", f"{part} = {value.item()}")
        return losses, None

    def _backward(self, losses: dict[str, Tensor], passes: int, *, is_last: bool) -> None:
        total = sum(losses.values(), torch.zeros((), device=self.device)) / passes
        waits = isinstance(self._model, DistributedDataParallel) and not is_last
        with self._model.no_sync() if waits else nullcontext():  # type: ignore[operator]
            torch.autograd.backward(self.scaler.scale(total))

    def _skip(self, number: int, problem: BadNumbers | None, indices: Sequence[int]) -> BadNumbers:
        """Drops the gradients; what was found, agreed on by all ranks."""
        self.optimizer.zero_grad(set_to_none=True)
        own = problem and replace(problem, step=number + 1, images=tuple(map(self._name_of, indices)))
        reports: list[BadNumbers] = self.world.from_main([found for found in self.world.gather(own) if found])
        # A rank that was only informed adds nothing to what the finder reports.
        finders = [report for report in reports if report.is_own] or reports
        return replace(finders[0], images=tuple(name for report in finders for name in report.images))

    def _train_mode(self) -> None:
        self._model.train()
        if self.config.model.frozen:  # frozen batch norm must not move its statistics either
            for module in self.detector.modules():
                own = list(module.parameters(recurse=False))
                if own and not any(parameter.requires_grad for parameter in own):
                    module.eval()
        if self.config.model.frozen_backbone:
            self.detector.body().eval()

    def _parallel(self, detector: Detector) -> nn.Module:
        if self.world.size == 1:
            return detector
        if self.config.criterion.rank_over_processes:
            criterion, traits = detector.criterion, traits_of(detector.criterion.loss)
            can_be_global = traits.ranks_across_processes or traits.divides_by_positives
            if not can_be_global and criterion.rank_over == "batch":
                raise ConfigError(
                    f"the loss {self.config.loss} cannot rank over processes; leave criterion.rank_over_processes false"
                )
            assert torch.distributed.group.WORLD is not None
            criterion.set_process_group(torch.distributed.group.WORLD)
        return DistributedDataParallel(detector, device_ids=[self.device] if self.device.type == "cuda" else None)

    def state(self) -> dict[str, Any]:
        """What :meth:`load_state` needs to go on."""
        return {
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            # Without an EMA the weights are already in the checkpoint's detector.
            "weights": None if self.ema is None else self.detector.state_dict(),
            "averaged_steps": None if self.ema is None else int(self.ema.n_averaged),
        }

    def load_state(self, state: dict[str, Any], evaluated: dict[str, Tensor]) -> None:
        """Brings everything into a saved :meth:`state`; ``evaluated`` are the weights that were saved beside it."""
        self.optimizer.load_state_dict(state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])
        if self.ema is None:
            self.detector.load_state_dict(evaluated)
        else:
            self.detector.load_state_dict(state["weights"])
            self.ema.module.load_state_dict(evaluated)
            self.ema.n_averaged.fill_(state["averaged_steps"])
