"""One training step: forward passes, gradients, optimizer and EMA; steps with NaN or Inf are skipped.

On a GPU the host only launches work: losses and gradient norms stay on the device until :meth:`Stepper.take_results`.
"""

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object, set_seed
from torch import Tensor, nn, optim

from aploss.data.loader import Batch
from aploss.detectors.checkpoint import TrainingState
from aploss.detectors.detector import Detector
from aploss.errors import ConfigError, RunError
from aploss.losses import NonFiniteScoresError, OtherProcessError, traits_of
from aploss.training.config import OptimizerConfig, TrainConfig
from aploss.training.schedule import Schedule

PARTS = ("classification", "box")
CAUSES = ("score", "loss", "gradient")  # of a skipped step, in the order in which they are reported


class Report(NamedTuple):
    """NaN or Inf in a step, which is skipped."""

    step: int  # from 1
    what: str  # one of CAUSES
    detail: str
    images: list[str]  # names of the files of the batch


class DivergedError(RunError):
    """Too many consecutive steps had NaN or Inf, or a weight did; the last good checkpoint is kept."""


def any_rank(accelerator: Accelerator, *flags: bool) -> list[bool]:
    """Returns for each flag whether it is set on any rank."""
    if accelerator.num_processes == 1:
        return list(flags)
    return accelerator.reduce(torch.tensor(flags, dtype=torch.float32, device=accelerator.device)).bool().tolist()  # type: ignore[no-any-return]


# --- optimizer ---


def make_optimizer(model: nn.Module, config: OptimizerConfig) -> optim.Optimizer:
    """Creates SGD or AdamW for the trainable parameters; norms and biases are only decayed if configured."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trained:
        raise ConfigError("model.frozen freezes every parameter")
    decayed = [parameter for parameter in trained if parameter.ndim > 1]
    undecayed = [parameter for parameter in trained if parameter.ndim <= 1]  # norms, biases and scalars
    # A fused AdamW saves a twentieth of a small detector's step on a CPU.
    fused = trained[0].device.type in ("cpu", "cuda")
    if config.decay_norms_and_biases:
        decayed, undecayed = decayed + undecayed, []
    groups = [{"params": decayed, "weight_decay": config.weight_decay}]
    if undecayed:
        groups.append({"params": undecayed, "weight_decay": 0.0})
    if config.name == "sgd":
        sgd = optim.SGD(groups, lr=config.learning_rate, momentum=config.momentum, fused=fused)
        if config.momentum:  # or a skipped first step would leave the buffers of a fused SGD uninitialised
            for parameter in trained:
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


def _is_frozen(module: nn.Module) -> bool:
    parameters = list(module.parameters())
    return bool(parameters) and not any(parameter.requires_grad for parameter in parameters)


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


# --- the step ---


class _Pending(NamedTuple):
    """A step whose numbers are still on the device."""

    number: int  # from 0
    indices: Sequence[int]  # of the training images
    values: Tensor  # PARTS, gradient norm
    report: Report | None = None  # if its scores were NaN or Inf
    lowers_scale: bool = False  # an overflow only means that float16 needs a lower loss scale


class Stepper:
    """Detector, optimizer and everything else that a step changes.

    Args:
        config: settings of the run.
        detector: on its device, with its initial weights.
        schedule: the learning-rate schedule.
        accelerator: the device and processes of the run.
        name_of: returns the name of a training image by index.

    Attributes:
        evaluated: the detector to validate and save: the EMA if there is one.
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
        self._name_of = name_of
        freeze(detector, config.model.frozen)
        if config.model.frozen_backbone:
            detector.body().requires_grad_(False)
        self.ema = None if config.model.ema is None else _Average(detector, config.model.ema)
        self.evaluated = detector if self.ema is None else self.ema.detector
        self.optimizer = make_optimizer(detector, config.optimizer)
        # Not Accelerate's mixed precision: it is one for all runs of a process, and for validation, too.
        self.scaler = torch.amp.GradScaler(accelerator.device.type, enabled=config.precision == "float16")
        if accelerator.num_processes > 1 and config.criterion.rank_over_processes:
            self._rank_over_processes()
        self._model: nn.Module = accelerator.prepare_model(detector)
        self._trained = [p for p in detector.parameters() if p.requires_grad]
        # Frozen batch norm must not update its statistics either.
        self._frozen = [module for module in detector.modules() if _is_frozen(module)]
        self._pending: list[_Pending] = []

    def _rank_over_processes(self) -> None:
        criterion, traits = self.detector.criterion, traits_of(self.detector.criterion.loss)
        can_be_global = traits.ranks_across_processes or traits.divides_by_positives
        if not can_be_global and criterion.rank_over == "batch":
            raise ConfigError(
                f"the loss {self.config.loss} cannot rank over processes; leave criterion.rank_over_processes false"
            )
        assert torch.distributed.group.WORLD is not None
        criterion.set_process_group(torch.distributed.group.WORLD)

    def step(self, number: int, batches: Sequence[Batch]) -> None:
        """Performs step ``number`` (from 0) with one batch for each accumulated forward pass.

        The device itself skips a step with NaN or Inf; :meth:`take_results` reads what happened. Random numbers, such
        as those of dropout, are a function of seed, step and rank, so that a resumed run needs no state for them.

        Raises:
            RunError: if another rank has targets that its loss rejects.
        """
        seeds = np.random.SeedSequence((self.config.seed, number, self.accelerator.process_index))
        set_seed(int(seeds.generate_state(1)[0]))
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.optimizer.learning_rate * self.schedule.factor(number)
        self._model.train()
        for module in self._frozen:
            module.eval()
        self.optimizer.zero_grad()
        sums = torch.zeros(len(PARTS), device=self.accelerator.device)
        for index, batch in enumerate(batches):
            losses, report = self._forward(number, batch)
            if any_rank(self.accelerator, report is not None)[0]:
                self.optimizer.zero_grad()
                self._pending.append(_Pending(number, (), torch.full((len(PARTS) + 1,), math.nan).to(sums), report))
                return
            sums += torch.stack([losses[part].detach().float() for part in PARTS]) / len(batches)
            total = losses["classification"] + losses["box"]
            # A loss that is not finite makes the gradients NaN on all ranks, so that they all skip the step.
            factor = torch.where(total.detach().isfinite(), 1.0, math.nan)
            is_last = index == len(batches) - 1
            with nullcontext() if is_last else self.accelerator.no_sync(self._model):
                self.scaler.scale(total * factor / len(batches)).backward()  # type: ignore[no-untyped-call]
        lowers_scale = self.scaler.is_enabled() and self.scaler.get_scale() > 1
        norm = self._update()
        indices = [index for batch in batches for index in batch.indices]
        self._pending.append(_Pending(number, indices, torch.cat([sums, norm[None]]), lowers_scale=lowers_scale))

    def _forward(self, number: int, batch: Batch) -> tuple[dict[str, Tensor], Report | None]:
        images = batch.images.to(self.accelerator.device, non_blocking=True)
        if isinstance(images, Tensor) and images.dtype == torch.uint8:
            images = images.float() / 255
        try:
            dtype = getattr(torch, self.config.precision)
            with torch.autocast(self.accelerator.device.type, dtype, enabled=dtype != torch.float32):
                return self._model(images, batch.targets), None
        except NonFiniteScoresError as error:
            return {}, Report(number + 1, "score", str(error), list(map(self._name_of, batch.indices)))
        except OtherProcessError as error:
            if error.cause == "score":
                return {}, Report(number + 1, "score", str(error), [])
            raise RunError(f"step failed on another rank: {error}") from error

    def _update(self) -> Tensor:
        """Clips the gradients and changes weights and EMA, unless their norm is not finite; returns it."""
        self.scaler.unscale_(self.optimizer)
        norm = nn.utils.clip_grad_norm_(self._trained, self.config.optimizer.clip_norm or math.inf)
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
        return norm

    def take_results(self) -> list[dict[str, float] | Report | None]:
        """Reads the results of the steps since the last call from the device, all at once.

        Returns:
            For each step the means of PARTS and the gradient norm before clipping; if it was skipped, its report, or
            None if only the float16 loss scale was too high.
        """
        pending, self._pending = self._pending, []
        if not pending:
            return []
        own = means = torch.stack([step.values for step in pending])
        if self.accelerator.num_processes > 1:
            means = self.accelerator.reduce(own, "mean")
        results: list[dict[str, float] | Report | None] = []
        for step, values, mean in zip(pending, *torch.stack([own, means]).tolist(), strict=True):
            if math.isfinite(values[-1]):
                results.append(dict(zip((*PARTS, "gradient_norm"), mean, strict=True)))
            else:
                results.append(None if step.lowers_scale else self._report(step, values))
        return results

    def _report(self, step: _Pending, values: list[float]) -> Report:
        """Returns the cause of a skipped step, the same on all ranks."""
        own = step.report
        if own is None:
            bad = [f"{part} = {value}" for part, value in zip(PARTS, values, strict=False) if not math.isfinite(value)]
            what, detail = ("loss", bad[0]) if bad else ("gradient", "norm")
            own = Report(step.number + 1, what, detail, list(map(self._name_of, step.indices)))
        reports = gather_object([own])
        # Ranks that were only notified have no images.
        first: Report = min(reports, key=lambda one: (CAUSES.index(one.what), not one.images))
        return first._replace(images=[name for one in reports if one.what == first.what for name in one.images])

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
        self.evaluated.load_state_dict(evaluated or {})
        if self.ema is not None:
            self.detector.load_state_dict(state.weights or {})
            self.ema.steps.fill_(state.averaged_steps or 0)
