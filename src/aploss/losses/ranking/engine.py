"""Drives a ranking: which backend, what is read from the device, what is refused, who takes part.

The backend makes the passes over the scores (see :mod:`.problem`); between its stages the engine
reads the status, once, and raises what is wrong. With ``max_positives`` it reads nothing: the loss
is NaN then, and the status is looked at in the next call that reads anyway.

Several data-parallel processes rank together as one would. The positives travel, and per segment
one count and one sum: O(P) numbers in three messages; the N scores never do. Every process takes
part in every exchange, also one without positives or negatives, and one that was given something
wrong: then all of them raise, and none is left waiting.
"""

import warnings
from dataclasses import replace
from functools import cache
from importlib import import_module
from types import TracebackType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from ..checks import (
    OtherProcessError,
    check_box_losses,
    check_delta,
    check_max_positives,
    check_scores_and_targets,
    comparable_targets,
    groups_of_scores,
    refuse_box_loss,
    refuse_earlier_call,
    refuse_score,
    refuse_target,
)
from .problem import Backend, Positives, Problem, Ranked
from .torch_backend import TorchBackend, sort_positives

BACKENDS = ("cpu", "torch", "triton")
ENOUGH_SCORES = 1000  # to tell probabilities from logits
_chosen: str | None = None
_directly: Any = None  # the module ``cpu``, once it is imported
_looked = False  # whether scores of this process were looked at: are they logits?
# Status of a call with max_positives that nobody has looked at, and what was allowed.
_pending: tuple[Tensor | None, int] = (None, 0)


class use_backend:  # noqa: N801 - reads as a function, and as a context
    """Chooses who makes the passes of the ranking losses, for good or within a ``with`` block.

    Args:
        name: ``"cpu"`` (compiled by numba, CPU tensors alone), ``"torch"`` (torch operations, every
            device), ``"triton"`` (GPUs), or None for the best one for the device of the scores.

    Raises:
        ValueError: no such backend.

    Example:
        >>> import torch
        >>> from aploss import ap_loss
        >>> with use_backend("torch"):
        ...     ap_loss(torch.tensor([2.0, 1.0]), torch.tensor([0, 1]), delta=0)
        tensor(0.5000)
    """

    def __init__(self, name: str | None) -> None:
        global _chosen
        if name is not None and name not in BACKENDS:
            raise ValueError(f"backend must be one of {', '.join(BACKENDS)} or None, got {name!r}")
        self._before, _chosen = _chosen, name

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        global _chosen
        _chosen = self._before


class Options(NamedTuple):
    """How to rank: the options of :func:`aploss.losses.ap_loss`, and which loss."""

    rule: str
    delta: float
    interpolated: bool = True
    groups: Tensor | int | None = None
    max_positives: int | None = None
    process_group: Any = None


def rank_scores(
    scores: Tensor, targets: Tensor, options: Options, box_losses: Tensor | None = None
) -> tuple[Backend, Ranked]:
    """Ranks scores, together with those of the other processes of a group.

    Returns:
        the backend that computes the gradient, and what it needs for it.

    Raises:
        ValueError: something is not allowed; :class:`NonFiniteScoresError` for a score, and
            :class:`OtherProcessError` if it was another process that was given it.
    """
    group = options.process_group
    if group is None:
        problem = _make_problem(scores, targets, options, box_losses)
        backend = _backend_for(problem)
        return backend, _rank_alone(backend, problem)
    mistake = None
    try:
        problem = _make_problem(scores, targets, options, box_losses)
    except ValueError as error:
        mistake, problem = error, _nothing_to_rank(options, box_losses)
    problem.num_processes = dist.get_world_size(group)
    backend = _backend_for(problem)
    return backend, _rank_together(backend, problem, group, mistake)


def rank_directly(scores: Tensor, targets: Tensor, rule: str, delta: float, interpolated: bool) -> Any:
    """See :func:`.cpu.rank_directly`; None for what goes through :func:`rank_scores`."""
    if _directly is None or _pending[0] is not None or _chosen not in (None, "cpu"):
        return None
    if type(scores) is not Tensor and type(scores) is not Parameter:
        return None
    if not (isinstance(targets, Tensor) and scores.is_cpu and targets.is_cpu):
        return None
    if not _looked:
        _look_for_probabilities(scores)
    wanted = scores.requires_grad and torch.is_grad_enabled()
    return _directly.rank_directly(scores, targets, rule, (delta, interpolated), wanted)


def _look_for_probabilities(scores: Tensor) -> None:
    """Warns if the first scores of a process, on the CPU and enough of them, seem to be no logits."""
    global _looked
    if scores.numel() < ENOUGH_SCORES or scores.device.type != "cpu" or not scores.is_contiguous():
        return
    _looked = True
    # So few that torch uses one thread: in a forked process its others are missing.
    lowest, highest = (value.item() for value in torch.aminmax(scores.detach().view(-1)[:ENOUGH_SCORES]))
    if 0 <= lowest < highest <= 1:
        warnings.warn(
            f"the first {ENOUGH_SCORES} scores lie between {lowest:.2g} and {highest:.2g}, as probabilities do; the "
            "ranking losses take logits, for which delta is meant: leave out the sigmoid",
            stacklevel=6,
        )


def _make_problem(scores: Tensor, targets: Tensor, options: Options, box_losses: Tensor | None) -> Problem:
    """Checks the arguments, and flattens them."""
    check_scores_and_targets(scores, targets)
    if not _looked:
        _look_for_probabilities(scores)
    check_delta(options.delta)
    if options.max_positives is not None:
        check_max_positives(options.max_positives)
    flat_scores, flat_targets = scores.detach(), targets
    if scores.ndim != 1 or not scores.is_contiguous():
        flat_scores = flat_scores.reshape(-1).contiguous()  # a reshaped one may still have gaps
    if targets.ndim != 1 or targets.requires_grad or not targets.is_contiguous():
        flat_targets = targets.detach().reshape(-1).contiguous()
    flat_targets, groups = comparable_targets(flat_targets), None
    if options.groups is not None:
        groups = groups_of_scores(options.groups, scores)
    if box_losses is not None:
        check_box_losses(box_losses, scores.device)
        box_losses = box_losses.detach()
    if scores.numel() == 0:  # backends rank one score at least: an ignored one
        flat_scores, flat_targets = flat_scores.new_zeros(1), flat_scores.new_full((1,), -1.0)
        groups = None if groups is None else groups.new_zeros(1)
    rule, delta, interpolated, _, max_positives, _ = options
    problem = Problem(flat_scores, flat_targets, rule, float(delta), interpolated, groups, box_losses, max_positives)
    return _on_cpu(problem) if scores.device.type == "mps" else problem


def _on_cpu(problem: Problem) -> Problem:
    """The problem on the CPU, for devices without float64."""
    groups, box_losses = problem.groups, problem.box_losses
    return replace(
        problem,
        scores=problem.scores.cpu(),
        targets=problem.targets.cpu(),
        groups=None if groups is None else groups.cpu(),
        box_losses=None if box_losses is None else box_losses.cpu(),
    )


def _nothing_to_rank(options: Options, box_losses: Tensor | None) -> Problem:
    """What a process brings along that was given something it cannot rank."""
    cuda = dist.get_backend(options.process_group) == "nccl"
    scores = torch.zeros(1, device="cuda" if cuda else "cpu")
    return Problem(
        scores,
        torch.full_like(scores, -1),
        options.rule,
        options.delta,
        groups=None if options.groups is None else scores.long(),
        box_losses=None if box_losses is None else scores[:0],
        max_positives=options.max_positives,
    )


def resolve_group(name: str) -> Any:
    """The process group of a name, for operators in compiled graphs; None for ""."""
    # The way torch's own functional collectives go from a name back to its group.
    return getattr(dist.distributed_c10d, "_resolve_process_group")(name) if name else None  # noqa: B009


def _rank_alone(backend: Backend, problem: Problem) -> Ranked:
    if backend.at_once and problem.groups is None and problem.max_positives is None:
        return backend.rank(problem, _accept)
    found = backend.find(problem)
    capacity = problem.max_positives
    if capacity is None:
        (status,) = _read_status(found.status[None])
        _refuse(problem, status)
        capacity, found.all_real = max(status[0], 1), status[0] > 0
    else:
        _look_later(found.status, capacity)
    positives = backend.positives(problem, found, capacity)
    tallies = backend.tally(problem, found, positives)
    return backend.finish(problem, found, positives, tallies)


def _rank_together(backend: Backend, problem: Problem, group: Any, mistake: ValueError | None) -> Ranked:
    found = backend.find(problem)
    if mistake is not None:
        found.status[2] = 1  # so that the loss is NaN where nobody reads
    flag = found.status.new_full((1,), mistake is not None)
    statuses = _gather(torch.cat([found.status, flag]), group)
    if problem.max_positives is None:
        read = _read_status(statuses)
        if mistake is not None:
            raise mistake
        _refuse(problem, read[dist.get_rank(group)])
        _refuse_others(read)
        counts = [status[0] for status in read]
    else:
        _look_later(found.status, problem.max_positives)
        counts = [problem.max_positives] * len(statuses)
    own = backend.positives(problem, found, max(*counts, 1))
    found.status = statuses[:, :-1].sum(0)
    positives = _gather_positives(own, counts, group)
    tallies = backend.tally(problem, found, positives)
    dist.all_reduce(tallies, group=group)
    if mistake is not None:
        raise mistake
    return backend.finish(problem, found, positives, tallies)


def _gather_positives(own: Positives, counts: list[int], group: Any) -> Positives:
    """The positives of all processes, in the order of a ranking."""
    places = torch.arange(len(own.scores), device=own.scores.device)
    columns = [(places < own.count).long(), own.scores.double().view(torch.int64)]
    if own.extras is not None:
        columns.append(own.extras.view(torch.int64))
    if own.groups is not None:
        columns.append(own.groups)
    gathered = _gather(torch.stack(columns), group)  # [processes, columns, places]
    rank = dist.get_rank(group)
    index = torch.full_like(gathered[:, 0], -1)
    index[rank] = own.index
    together = [part[:, :count] for part, count in zip(gathered, counts, strict=True)]
    columns = list(torch.cat(together, dim=1))
    own_index = torch.cat([part[:count] for part, count in zip(index, counts, strict=True)])
    if len(own_index) == 0:  # a ranking has one place at least
        return replace(own, scores=own.scores[:1], index=own.index[:1])
    groups = columns.pop() if own.groups is not None else None
    extras = columns.pop().view(torch.float64) if own.extras is not None else None
    scores = columns[1].view(torch.float64).to(own.scores.dtype)
    padding = columns[0] == 0
    return sort_positives(scores, own_index, (~padding).sum(), padding, extras, groups)


def _gather(values: Tensor, group: Any) -> Tensor:
    """The tensors of all processes, stacked in the order of their ranks."""
    parts = [torch.empty_like(values) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, values.contiguous(), group=group)
    return torch.stack(parts)


def _read_status(statuses: Tensor) -> list[list[int]]:
    """Reads the status [..., S], and that of an earlier call that nobody has looked at."""
    global _pending
    (pending, capacity), _pending = _pending, (None, 0)
    if pending is None or type(pending) is not type(statuses) or pending.device != statuses.device:
        rows: list[list[int]] = statuses.tolist()
        return rows
    padded = torch.nn.functional.pad(pending, (0, statuses.shape[1] - len(pending)))
    *rows, late = torch.cat([statuses, padded[None]]).tolist()
    refuse_earlier_call([late[0] - capacity, *late[2:5]])
    return rows


def check_status(status: Tensor, scores: Tensor, targets: Tensor, *, later: bool) -> None:
    """Raises what is wrong with the input of a loss that does not rank, now or later.

    Args:
        status: positives, negatives, number of bad targets and of bad scores, on the device.
    """
    padded = torch.nn.functional.pad(status, (0, 1))
    if later:
        _look_later(padded, targets.numel())
        return
    ((_, _, bad_targets, bad_scores, _),) = _read_status(padded[None])
    if bad_targets:
        refuse_target(targets, soft=False)
    if bad_scores:
        refuse_score(scores, targets)


def _accept(problem: Problem, status: list[int]) -> None:
    """Raises what is wrong with a status that is on the host already."""
    if _pending[0] is not None:
        _read_status(torch.tensor([status]))
    _refuse(problem, status)


def _look_later(status: Tensor, capacity: int) -> None:
    global _pending
    if type(status) is Tensor:  # not one without data
        _pending = (status, capacity)


def _refuse(problem: Problem, status: list[int]) -> None:
    """Raises what is wrong with this process's input; finds out where it is."""
    positives, _, bad_targets, bad_scores, bad_boxes = status[:5]
    if bad_targets:
        refuse_target(problem.targets, soft=problem.soft)
    if bad_scores:
        refuse_score(problem.scores, problem.targets)
    boxes = problem.box_losses
    if boxes is not None and len(boxes) != positives:
        raise ValueError(f"box_losses must have one value per positive, {positives}, got {len(boxes)}")
    if boxes is not None and bad_boxes:
        refuse_box_loss(boxes)


def _refuse_others(statuses: list[list[int]]) -> None:
    for _, _, bad_targets, bad_scores, bad_boxes, bad_arguments in statuses:
        if bad_arguments or bad_boxes:
            raise OtherProcessError("arguments")
        if bad_targets:
            raise OtherProcessError("target")
        if bad_scores:
            raise OtherProcessError("score")


def _backend_for(problem: Problem) -> Backend:
    """The chosen backend, or the best one for the device of the scores."""
    kind = problem.scores.device.type
    if kind == "cpu" and _chosen in (None, "cpu"):
        return _cpu_backend()
    if _chosen == "torch":
        return TorchBackend()
    if _chosen == "triton" or (_chosen is None and kind == "cuda"):
        triton = _triton_backend(problem)
        if triton is not None:
            return triton
    if _chosen in (None, "torch"):
        return TorchBackend()
    raise ValueError(f"backend {_chosen!r} cannot rank these scores, {problem.scores.dtype} on {kind}")


@cache
def _cpu_backend() -> Backend:
    global _directly
    try:
        from . import cpu  # imports numba, which takes its time
    except ImportError as error:
        warnings.warn(
            f"the ranking losses are several times slower without numba ({error}); install it with: pip install numba",
            stacklevel=2,
        )
        return TorchBackend()
    _directly = cpu
    return cpu.CPUBackend()


def _triton_backend(problem: Problem) -> Backend | None:
    try:
        triton = import_module("aploss.losses.ranking.triton")
    except ImportError:
        return None
    backend: Backend | None = triton.TritonBackend() if triton.supports(problem) else None
    return backend
