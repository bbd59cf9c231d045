"""One training step: forward passes, gradients, optimizer and EMA; steps with NaN or Inf are skipped.

On a GPU the host only launches work: losses and gradient norms stay on the device until :meth:`Stepper.take_results`.
"""

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, nn, optim

from aploss.data.loader import Batch
from aploss.detectors.checkpoint import TrainingState
from aploss.detectors.detector import Detector
from aploss.errors import ConfigError, RunError, listed
from aploss.losses import NonFiniteScoresError, OtherProcessError, traits_of
from aploss.training.config import OptimizerConfig, TrainConfig
from aploss.training.distributed import sum_over_processes
from aploss.training.schedule import Schedule

PARTS = ("classification", "box")
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
        sgd = optim.SGD(groups, lr=config.learning_rate, momentum=config.momentum, fused=fused)
        if config.momentum:  # or a skipped first step would leave the buffers of a fused SGD uninitialised
            for parameter in decayed + undecayed:
                sgd.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        return sgd
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


class _Average:
    """A copy of a detector whose weights are the exponential moving average (EMA) of the original's."""

    def __init__(self, detector: Detector, decay: float) -> None:
        self.detector, self.decay = copy.deepcopy(detector), decay
        # On the device, since the host does not know yet which steps were skipped.
        self.steps = torch.zeros((), device=detector.image_mean.device)

    @torch.no_grad()
    def update(self, detector: Detector, counts: Tensor) -> None:
        """Averages the weights after a step, unless ``counts``, a bool on the device, is False."""
        # A lower decay at first, or the initial weights would dominate the average for long.
        decay = ((1 + self.steps) / (10 + self.steps)).clamp(max=self.decay).where(self.steps > 0, 0.0)
        averages = [parameter.detach() for parameter in self.detector.parameters()]
        changes = torch._foreach_sub(list(detector.parameters()), averages)
        torch._foreach_mul_(changes, (1 - decay) * counts)
        torch._foreach_add_(averages, changes)
        for own, other in zip(self.detector.buffers(), detector.buffers(), strict=True):
            own.copy_(other.where(counts, own))
        self.steps += counts


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
    bad: BadNumbers | None = None  # if the step was skipped
    counts: bool = True  # whether the weights changed: not after NaN or Inf, nor if the float16 loss scale was too high


@dataclass(frozen=True)
class _Pending:
    """A step whose numbers are still on the device."""

    number: int  # from 0
    indices: tuple[int, ...]  # of the training images
    values: Tensor | None = None  # PARTS, gradient norm, and which gradient is the first with NaN or Inf (or -1)
    problem: BadNumbers | None = None  # if its scores were NaN or Inf
    lowers_scale: bool = False  # an overflow only means that float16 needs a lower loss scale


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
        self.ema = None if config.model.ema is None else _Average(detector, config.model.ema)
        self.optimizer = make_optimizer(detector, config.optimizer)
        # Not Accelerate's mixed precision: it is one for all runs of a process, and for validation, too.
        self.scaler = torch.amp.GradScaler(accelerator.device.type, enabled=config.precision == "float16")
        self._name_of = name_of
        self._model = self._parallel(detector)
        self._trained = [p for p in detector.parameters() if p.requires_grad]
        self._pending: list[_Pending] = []

    @property
    def evaluated(self) -> Detector:
        """The detector to validate and save: the EMA if there is one."""
        return self.detector if self.ema is None else self.ema.detector

    def step(self, number: int, batches: Sequence[Batch]) -> None:
        """Performs step ``number`` (from 0) with one batch for each accumulated forward pass.

        The device itself skips a step with NaN or Inf; :meth:`take_results` reads what happened.

        Raises:
            RunError: if another rank has targets that its loss rejects.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate(number)
        self._train_mode()
        self.optimizer.zero_grad()
        indices = tuple(index for batch in batches for index in batch.indices)
        sums = torch.zeros(len(PARTS), device=self.accelerator.device)
        for index, batch in enumerate(batches):
            losses, problem = self._forward(batch)
            if any(sum_over_processes(self.accelerator, [problem is not None])):
                self.optimizer.zero_grad()
                self._pending.append(_Pending(number, indices, problem=self._agree(number, problem, batch.indices)))
                return
            sums += torch.stack([losses[part].detach().float() for part in PARTS]) / len(batches)
            total = losses["classification"] + losses["box"]
            # A loss that is not finite makes the gradients NaN on all ranks, so that they all skip the step.
            factor = torch.where(total.detach().isfinite(), 1.0, math.nan)
            is_last = index == len(batches) - 1
            with nullcontext() if is_last else self.accelerator.no_sync(self._model):
                self.scaler.scale(total * factor / len(batches)).backward()  # type: ignore[no-untyped-call]
        norm, first_bad = self._clip()
        lowers_scale = self.scaler.is_enabled() and self.scaler.get_scale() > 1
        self._update(norm)
        values = torch.cat([sums, torch.stack([norm, first_bad.to(norm)])])
        self._pending.append(_Pending(number, indices, values, lowers_scale=lowers_scale))

    def take_results(self) -> list[StepResult]:
        """Reads the results of the steps since the last call from the device, all at once."""
        pending, self._pending = self._pending, []
        values = [one.values for one in pending if one.values is not None]
        rows: Iterator[list[float]] = iter([])
        if values:
            stacked = torch.stack(values)
            if self.accelerator.num_processes > 1:
                stacked = torch.cat([stacked, self.accelerator.reduce(stacked, "mean")], dim=1)
            rows = iter(stacked.tolist())
        return [self._result(one, [] if one.values is None else next(rows)) for one in pending]

    def _result(self, step: _Pending, row: list[float]) -> StepResult:
        if not row:
            return StepResult(dict.fromkeys(PARTS, 0.0), math.nan, step.problem, counts=False)
        *own, norm, first_bad = row[: len(PARTS) + 2]
        losses = dict(zip(PARTS, row[-len(PARTS) - 2 :], strict=False))
        if math.isfinite(norm):
            return StepResult(losses, norm)
        if step.lowers_scale:
            return StepResult(losses, norm, counts=False)
        bad_losses = [f"{part} = {value}" for part, value in zip(PARTS, own, strict=True) if not math.isfinite(value)]
        names = [name for name, one in self.detector.named_parameters() if one.requires_grad and one.grad is not None]
        detail = names[int(first_bad)] if 0 <= first_bad < len(names) else "only the norm overflows"
        problem = BadNumbers("gradient", detail, is_own=len(row) == len(PARTS) + 2)
        if bad_losses:
            problem = BadNumbers("loss", bad_losses[0])
        return StepResult(losses, norm, self._agree(step.number, problem, step.indices), counts=False)

    def learning_rate(self, number: int) -> float:
        """The learning rate of step ``number`` (from 0)."""
        return self.config.optimizer.learning_rate * self.schedule.factor(number)

    def _forward(self, batch: Batch) -> tuple[dict[str, Tensor], BadNumbers | None]:
        images = batch.images.to(self.accelerator.device, non_blocking=True)
        if isinstance(images, Tensor) and images.dtype == torch.uint8:
            images = images.float() / 255
        try:
            dtype = getattr(torch, self.config.precision)
            with torch.autocast(self.accelerator.device.type, dtype, enabled=dtype != torch.float32):
                return self._model(images, batch.targets), None
        except NonFiniteScoresError as error:
            return {}, BadNumbers("score", str(error))
        except OtherProcessError as error:
            if error.cause == "score":
                return {}, BadNumbers("score", str(error), is_own=False)
            raise RunError(f"step failed on another rank: {error}") from error

    def _clip(self) -> tuple[Tensor, Tensor]:
        """Clips the gradients; returns their norm before, and which is the first that is not finite, or -1."""
        self.scaler.unscale_(self.optimizer)
        gradients = [one.grad for one in self._trained if one.grad is not None]
        norms = torch.stack(torch._foreach_norm(gradients))
        norm = torch.linalg.vector_norm(norms)
        if self.config.optimizer.clip_norm is not None:
            nn.utils.clip_grads_with_norm_(self._trained, self.config.optimizer.clip_norm, norm)
        bad = ~norms.isfinite()
        return norm, torch.where(bad.any(), bad.to(torch.uint8).argmax(), -1)

    def _update(self, norm: Tensor) -> None:
        """Changes the weights and their average, unless the norm of the gradients is not finite."""
        is_finite = norm.isfinite()
        if self.scaler.is_enabled():
            self.scaler.step(self.optimizer)  # after an overflow it skips the step and lowers its scale
            self.scaler.update()
        elif self.optimizer.defaults["fused"]:
            # A fused optimizer skips the step if this is 1, without the host having to know.
            self.optimizer.found_inf = (~is_finite).float()  # type: ignore[attr-defined]
            self.optimizer.step()
        elif bool(is_finite):
            self.optimizer.step()
        if self.ema is not None:
            self.ema.update(self.detector, is_finite)

    def _agree(self, number: int, problem: BadNumbers | None, indices: Sequence[int]) -> BadNumbers:
        """Returns the reason for skipping a step, the same on all ranks."""
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
            "averaged_steps": None if self.ema is None else int(self.ema.steps),
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
            self.ema.detector.load_state_dict(evaluated or {})
            self.ema.steps.fill_(state.averaged_steps or 0)
