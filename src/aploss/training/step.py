"""One training step: forward passes, gradients, optimizer and EMA; steps with NaN or Inf are skipped."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, cast

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, nn, optim
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from aploss.data.loader import Batch
from aploss.detectors.checkpoint import TrainingState
from aploss.detectors.detector import Detector
from aploss.errors import ConfigError, RunError, listed
from aploss.losses import NonFiniteScoresError, OtherProcessError, traits_of
from aploss.training.config import OptimizerConfig, TrainConfig
from aploss.training.distributed import sum_over_processes
from aploss.training.schedule import Schedule

PARTS = ("classification", "box")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
NORMS = (nn.GroupNorm, nn.LayerNorm, nn.modules.batchnorm._NormBase)
SHOWN_IMAGES = 8


class DivergedError(RunError):
    """Too many consecutive steps had NaN or Inf, or a weight did; the last good checkpoint is kept."""


# --- optimizer ---


def make_optimizer(model: nn.Module, config: OptimizerConfig) -> optim.Optimizer:
    """Creates SGD or AdamW for the trainable parameters; norms and biases are only decayed if configured."""
    norms = {id(p) for module in model.modules() if isinstance(module, NORMS) for p in module.parameters()}
    decayed: list[nn.Parameter] = []
    undecayed: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            skip = id(parameter) in norms or name.split(".")[-1] == "bias" or parameter.ndim < 2
            (undecayed if skip else decayed).append(parameter)
    if not decayed and not undecayed:
        raise ConfigError("model.frozen freezes every parameter")
    # A fused AdamW saves a twentieth of a small detector's step on a CPU.
    fused = (decayed + undecayed)[0].device.type in ("cpu", "cuda")
    if config.decay_norms_and_biases:
        decayed, undecayed = decayed + undecayed, []
    groups = [{"params": decayed, "weight_decay": config.weight_decay}]
    if undecayed:
        groups.append({"params": undecayed, "weight_decay": 0.0})
    if config.name == "sgd":
        return optim.SGD(groups, lr=config.learning_rate, momentum=config.momentum, fused=fused)
    return optim.AdamW(groups, lr=config.learning_rate, fused=fused)


def freeze(model: nn.Module, patterns: Iterable[str]) -> None:
    """Freezes the parameters whose name, or whose module's name, matches a pattern.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        >>> freeze(model, ["0"])
        >>> [p.requires_grad for p in model.parameters()]
        [False, False, True, True]
    """
    for pattern in patterns:
        matching = [
            parameter
            for name, parameter in model.named_parameters()
            if fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")
        ]
        if not matching:
            tops = ", ".join(dict(model.named_children()))
            raise ConfigError(f"model.frozen: {pattern!r} matches no parameter; modules: {tops}")
        for parameter in matching:
            parameter.requires_grad_(False)


def _make_ema(detector: Detector, decay: float | None) -> AveragedModel | None:
    if decay is None:
        return None

    def average(averages: Any, current: Any, count: Tensor | int) -> None:
        # A lower decay at first, or the initial weights would dominate the average for long.
        ramp = (1 + int(count)) / (10 + int(count))
        get_ema_multi_avg_fn(min(decay, ramp))(averages, current, count)  # type: ignore[no-untyped-call]

    return AveragedModel(detector, multi_avg_fn=average)


# --- NaN and Inf ---


@dataclass(frozen=True)
class BadNumbers:
    """The reason why a step was skipped: NaN or Inf."""

    what: str  # "score", "loss" or "gradient"
    detail: str
    is_own: bool = True  # False if another rank found it
    step: int = 0  # from 1
    images: tuple[str, ...] = ()  # files of the batch on the ranks that found it

    def __str__(self) -> str:
        images = listed(self.images, SHOWN_IMAGES)
        return f"step {self.step}: {self.what} is NaN or Inf ({self.detail}); images: {images}"

    def as_row(self) -> dict[str, Any]:
        """Plain values for ``bad_numbers.jsonl``."""
        return {"step": self.step, "what": self.what, "detail": self.detail, "images": list(self.images)}


def _non_finite_gradient(model: nn.Module) -> str:
    """Returns the name of the first parameter with NaN or Inf in its gradient."""
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and not bool(parameter.grad.isfinite().all()):
            return name
    return "only the norm overflows"


def non_finite_weight(model: nn.Module) -> str | None:
    """Returns the name of a parameter or buffer with NaN or Inf, or None."""
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
    bad: BadNumbers | None = None  # if the step was skipped
    counts: bool = True  # whether the weights changed: not after NaN or Inf, nor if the float16 loss scale was too high


class Stepper:
    """Detector, optimizer and everything else that a step changes.

    Args:
        config: settings of the run.
        detector: on its device, with its initial weights.
        schedule: the learning-rate schedule.
        accelerator: the device, precision and processes of the run.
        name_of: returns the name of a training image by index.
    """

    def __init__(
        self,
        config: TrainConfig,
        detector: Detector,
        schedule: Schedule,
        accelerator: Accelerator,
        name_of: Callable[[int], str],
    ) -> None:
        self.config, self.detector, self.schedule, self.accelerator = config, detector, schedule, accelerator
        freeze(detector, config.model.frozen)
        if config.model.frozen_backbone:
            detector.body().requires_grad_(False)
        self.ema = _make_ema(detector, config.model.ema)
        self.optimizer = make_optimizer(detector, config.optimizer)
        # Not Accelerate's mixed precision: it is one for all runs of a process, and for validation, too.
        self.scaler = torch.amp.GradScaler(accelerator.device.type, enabled=config.precision == "float16")
        self._name_of = name_of
        self._model = self._parallel(detector)
        self._trained = [p for p in detector.parameters() if p.requires_grad]

    @property
    def evaluated(self) -> Detector:
        """The detector to validate and save: the EMA if there is one."""
        return self.detector if self.ema is None else cast(Detector, self.ema.module)

    def step(self, number: int, batches: Sequence[Batch]) -> StepResult:
        """Performs step ``number`` (from 0) with one batch for each accumulated forward pass.

        Raises:
            RunError: if another rank has targets that its loss rejects.
        """
        rate = self.config.optimizer.learning_rate * self.schedule.factor(number)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self._train_mode()
        self.optimizer.zero_grad()
        sums = dict.fromkeys(PARTS, 0.0)
        for index, batch in enumerate(batches):
            losses, problem = self._forward(batch)
            own = (losses[part].item() if part in losses else 0.0 for part in PARTS)
            found, *values = sum_over_processes(self.accelerator, [problem is not None, *own])
            if found:
                return StepResult(sums, math.nan, rate, self._skip(number, problem, batch.indices), counts=False)
            for part, value in zip(PARTS, values, strict=True):
                sums[part] += value / self.accelerator.num_processes / len(batches)
            is_last = index == len(batches) - 1
            with nullcontext() if is_last else self.accelerator.no_sync(self._model):
                loss = sum(losses.values(), torch.zeros((), device=self.accelerator.device))
                self.scaler.scale(loss / len(batches)).backward()  # type: ignore[no-untyped-call]
        self.scaler.unscale_(self.optimizer)
        norm = float(nn.utils.clip_grad_norm_(self._trained, self.config.optimizer.clip_norm or math.inf))
        bad, overflow = None, not math.isfinite(norm)
        # An overflow at a loss scale above 1 only means that float16 needs a lower scale; get_scale() is 1 without one.
        if overflow and self.scaler.get_scale() <= 1:
            problem = BadNumbers("gradient", _non_finite_gradient(self.detector))
            bad = self._skip(number, problem, [index for batch in batches for index in batch.indices])
        if self.scaler.is_enabled() or not overflow:
            self.scaler.step(self.optimizer)  # skipped after an overflow
            self.scaler.update()
        if self.ema is not None and not overflow:
            self.ema.update_parameters(self.detector)
        return StepResult(sums, norm, rate, bad, counts=not overflow)

    def _forward(self, batch: Batch) -> tuple[dict[str, Tensor], BadNumbers | None]:
        images = batch.images.to(self.accelerator.device, non_blocking=True)
        try:
            dtype = DTYPES[self.config.precision]
            with torch.autocast(self.accelerator.device.type, dtype, enabled=dtype != torch.float32):
                losses = self._model(images, batch.targets)
        except NonFiniteScoresError as error:
            return {}, BadNumbers("score", str(error))
        except OtherProcessError as error:
            if error.cause == "score":
                return {}, BadNumbers("score", str(error), is_own=False)
            raise RunError(f"step failed on another rank: {error}") from error
        for part, value in losses.items():
            if not bool(value.isfinite()):
                return losses, BadNumbers("loss", f"{part} = {value.item()}")
        return losses, None

    def _skip(self, number: int, problem: BadNumbers | None, indices: Sequence[int]) -> BadNumbers:
        """Discards the gradients; returns the reason, agreed on by all ranks."""
        self.optimizer.zero_grad()
        own = problem and replace(problem, step=number + 1, images=tuple(map(self._name_of, indices)))
        reports: list[BadNumbers] = gather_object([] if own is None else [own])
        # Ranks that were only notified have nothing to add.
        finders = [report for report in reports if report.is_own] or reports
        return replace(finders[0], images=tuple(name for report in finders for name in report.images))

    def _train_mode(self) -> None:
        self._model.train()
        if self.config.model.frozen:  # frozen batch norm must not update its statistics either
            for module in self.detector.modules():
                own = list(module.parameters(recurse=False))
                if own and not any(parameter.requires_grad for parameter in own):
                    module.eval()
        if self.config.model.frozen_backbone:
            self.detector.body().eval()

    def _parallel(self, detector: Detector) -> nn.Module:
        if self.accelerator.num_processes > 1 and self.config.criterion.rank_over_processes:
            criterion, traits = detector.criterion, traits_of(detector.criterion.loss)
            can_be_global = traits.ranks_across_processes or traits.divides_by_positives
            if not can_be_global and criterion.rank_over == "batch":
                raise ConfigError(
                    f"the loss {self.config.loss} cannot rank over processes; leave criterion.rank_over_processes false"
                )
            assert torch.distributed.group.WORLD is not None
            criterion.set_process_group(torch.distributed.group.WORLD)
        model: nn.Module = self.accelerator.prepare_model(detector)
        return model

    def state(self) -> dict[str, Any]:
        """Returns the fields of :class:`~aploss.detectors.checkpoint.TrainingState` that a step changes."""
        return {
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            # Without an EMA these weights are already in the checkpoint.
            "weights": None if self.ema is None else self.detector.state_dict(),
            "averaged_steps": None if self.ema is None else int(self.ema.n_averaged),
        }

    def load_state(self, state: TrainingState, evaluated: Mapping[str, Tensor] | None) -> None:
        """Restores :meth:`state`; ``evaluated`` are the weights of the checkpoint's detector."""
        self.optimizer.load_state_dict(state.optimizer)
        if self.scaler.is_enabled():
            self.scaler.load_state_dict(state.scaler)
        if self.ema is None:
            self.detector.load_state_dict(evaluated or {})
        else:
            self.detector.load_state_dict(state.weights or {})
            self.ema.module.load_state_dict(evaluated or {})
            self.ema.n_averaged.fill_(state.averaged_steps or 0)
