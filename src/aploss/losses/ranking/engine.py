"""Backend dispatch, input validation and cross-process ranking.

A ranking goes through the stages of :class:`.torch_backend.TorchBackend`; the engine raises what is wrong with
the input after the first stage and applies the rule of the loss after the last.

Data-parallel processes rank their scores together as one process would. The positives travel, and one count and one sum
per segment: O(P) numbers in three messages; the N scores never do. Every process takes part in every exchange, also one
without positives and one with invalid input: then all of them raise, and none is left waiting.
"""

import copyreg
import os
import sys
import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..checks import (
    InvalidTargetError,
    NonFiniteScoresError,
    OtherProcessError,
    broadcast_groups,
    check_box_losses,
    check_ranking_options,
    check_scores_and_targets,
    check_weights,
    comparable_targets,
    loss_dtype,
    raise_invalid_box_loss,
    raise_invalid_target,
    raise_non_finite_score,
)
from .rules import Rule
from .torch_backend import Found, Positives, Problem, Reduce, Status, TorchBackend, add_thresholds

BACKENDS = ("cpu", "torch", "triton")
BACKEND_VARIABLE = "APLOSS_BACKEND"
MIN_SCORES_FOR_WARNING = 1000  # to tell probabilities from logits
_chosen: str | None = None
_is_inspected = False  # whether this process has had enough scores to check that they are logits


class use_backend:  # noqa: N801 - reads as a function, and as a context
    """Chooses the backend of the ranking losses, for good or within a ``with`` block.

    The environment variable ``APLOSS_BACKEND`` does the same for a whole process.

    Args:
        name: ``"cpu"`` (compiled by numba, CPU tensors only), ``"torch"`` (torch operations, every
            device), ``"triton"`` (GPUs), or None for the best one for the device of the scores.

    Raises:
        ValueError: if there is no such backend.

    Example:
        >>> import torch
        >>> from aploss import ap_loss
        >>> with use_backend("torch"):
        ...     ap_loss(torch.tensor([2.0, 1.0]), torch.tensor([0, 1]), delta=0)
        tensor(0.5000)
    """

    def __init__(self, name: str | None) -> None:
        global _chosen
        _check_backend_name(name)
        self._before, _chosen = _chosen, name

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        global _chosen
        _chosen = self._before


def _check_backend_name(name: str | None) -> None:
    if name is not None and name not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)} or None, got {name!r}")


class Options(NamedTuple):
    """How to rank: the options of :func:`aploss.losses.ap_loss`, and the rule of the loss."""

    rule: Rule
    delta: float
    groups: Tensor | int | None = None
    weights: Tensor | None = None
    process_group: Any = None
    non_finite: Literal["raise", "nan"] = "raise"
    thresholds: Sequence[float] | int | None = None


Tensors = tuple[Tensor, ...]


def rank_scores(
    scores: Tensor, targets: Tensor, options: Options, box_losses: Tensor | None = None, *, needs_gradient: bool = True
) -> tuple[Tensors, Tensors]:
    """Ranks scores, together with those of the other processes of a group.

    Returns:
        The values of the loss, scalars; and, if needed, the gradient of each: of the scores, and of
        the box losses for the second value of aLRP.

    Raises:
        ValueError: if the input is invalid; :class:`NonFiniteScoresError` for a score, and
            :class:`OtherProcessError` if another process was given the invalid input.
    """
    if options.process_group is None:
        problem = _make_problem(scores, targets, options, box_losses)
        values, gradients = rank_problem(_select_backend(problem), problem, options.non_finite, needs_gradient)
    else:
        problem, values, gradients = _rank_together(scores, targets, options, box_losses, needs_gradient)
    if scores.ndim == 1 and len(scores) and not scores.is_mps:
        return values, gradients
    likes = (scores, scores if box_losses is None else box_losses)
    return tuple(value.to(scores.device) for value in values), tuple(
        gradient[: like.numel()].view(like.shape).to(like.device)
        for gradient, like in zip(gradients, likes, strict=False)
    )


def rank_problem(
    backend: TorchBackend, problem: Problem, non_finite: str = "raise", needs_gradient: bool = True
) -> tuple[Tensors, Tensors]:
    """Ranks the scores of this process alone: the values of the loss and their flat gradients."""
    direct = backend.rank_directly(problem, needs_gradient)
    if direct is not None:
        return direct
    found = backend.find(problem)
    status = found.status
    _raise_invalid(problem, status, non_finite)
    if status.positives == 0 or status.bad_scores:
        return _constant(problem, torch.nan if status.bad_scores else 0.0)
    positives = backend.sort(_local_positives(backend, problem, found))
    return _apply_rule(backend, problem, found, positives, None, needs_gradient)


def _apply_rule(
    backend: TorchBackend,
    problem: Problem,
    found: Found,
    positives: Positives,
    reduce: Reduce | None,
    needs_gradient: bool,
) -> tuple[Tensors, Tensors]:
    """The values of the loss and their flat gradients, from the sorted positives."""
    rule, f0 = problem.rule, 0.5 if problem.delta else 1.0
    dtype, device = problem.dtype, problem.scores.device
    if problem.thresholds is not None:
        positives = add_thresholds(backend, problem, positives)
    ranks, members = backend.rank(problem, found, positives, reduce), positives.members
    arguments = (ranks.p if members is None else ranks.above, ranks.n, ranks.negatives, f0, ranks.above)
    error = rule.error(*arguments)
    if members is not None:
        error = members * error + (1 - members)  # the largest error, which lowers no running minimum
    if rule.monotone:
        error = backend.running_minimum(found, error)
    own = error * ranks.weights if members is None else (error * positives.shares).sum(0)
    values: Tensors = (backend.tensor(own.sum(), dtype, device),)
    gradients: Tensors = ()
    if needs_gradient:
        own = own if rule.correction is None else rule.correction(*arguments) * ranks.weights
        gradients = (backend.gradient(problem, found, positives, ranks, own),)
    if rule.second == "sorting":
        sorting, on_positives = backend.sort_pairs(problem, found, positives, ranks.weights)
        values += (backend.tensor(sorting, dtype, device),)
        gradients += (_scatter(backend, problem, positives, on_positives, problem.scores),)
    elif rule.second == "localisation":
        over_rank = ranks.weights / (1 + ranks.p + ranks.n)
        localisation = ((positives.box_losses + ranks.above) * over_rank).sum()
        values += (backend.tensor(localisation, dtype, device),)
        # Box loss k counts 1 / rank(k), and f(x_ik) / rank(i) for every other i.
        on_boxes = backend.line_at_positives(problem, found, positives, over_rank) + (1 - f0) * over_rank
        gradients += (_scatter(backend, problem, positives, on_boxes, problem.box_losses),)
    return values, gradients if needs_gradient else ()


def _scatter(backend: TorchBackend, problem: Problem, positives: Positives, values: Any, like: Tensor | None) -> Tensor:
    """A gradient on this process's positives, at their scores or in the order of their box losses."""
    assert like is not None
    device, dtype = problem.scores.device, loss_dtype(like.dtype)
    index = backend.tensor(positives.index, torch.int64, device)
    own = backend.tensor(values, dtype, device) * problem.num_processes
    if like is problem.box_losses:  # -1 for positives of other processes: they come first
        return own[index.argsort(stable=True)][len(index) - len(like) :]
    gradient = torch.zeros_like(like, dtype=dtype)
    return gradient.index_add_(0, index.clamp(min=0), torch.where(index < 0, 0.0, own))


def _constant(problem: Problem, constant: float) -> tuple[Tensors, Tensors]:
    """Values and gradients if there is nothing to rank (0), or a score is not finite (NaN)."""
    likes = [problem.scores]
    if problem.rule.second:
        likes.append(problem.scores if problem.box_losses is None else problem.box_losses)
    values = tuple(problem.scores.new_full((), constant, dtype=problem.dtype) for _ in likes)
    return values, tuple(torch.full_like(like, constant, dtype=loss_dtype(like.dtype)) for like in likes)


# ---- Input ---------------------------------------------------------------------------------------


def _make_problem(scores: Tensor, targets: Tensor, options: Options, box_losses: Tensor | None) -> Problem:
    """Validates the arguments and flattens them."""
    check_scores_and_targets(scores, targets)
    check_ranking_options(options.delta, options.non_finite)
    groups = None if options.groups is None else broadcast_groups(options.groups, scores)
    weights = None if options.weights is None else check_weights(options.weights, scores)
    if box_losses is not None:
        check_box_losses(box_losses, scores.device)
        box_losses = box_losses.detach().resolve_neg()
    shape = scores.shape
    scores, targets = _flatten(scores), _flatten(targets)
    size = scores.numel()
    if size >= MIN_SCORES_FOR_WARNING and not _is_inspected and options.delta > 0 and scores.is_cpu:
        _warn_about_probabilities(scores)
    if size == 0:  # backends rank one score at least: an ignored one
        scores, targets = scores.new_zeros(1), scores.new_full((1,), -1.0)
        groups = None if groups is None else groups.new_zeros(1)
    given = (options.rule, float(options.delta), groups, weights, box_losses, options.thresholds, shape)
    problem = Problem(scores, comparable_targets(targets), *given)
    return _on_cpu(problem) if scores.is_mps else problem


def _flatten(values: Tensor) -> Tensor:
    """The values [N], contiguous and detached; every operation of torch that is left out counts for few scores."""
    if values.requires_grad:
        values = values.detach()
    if values.is_neg():
        values = values.resolve_neg()
    return values if values.ndim == 1 and values.is_contiguous() else values.reshape(-1).contiguous()


def _on_cpu(problem: Problem) -> Problem:
    """The problem on the CPU, for devices without float64."""
    names = ("scores", "targets", "groups", "weights", "box_losses")
    moved = {name: getattr(problem, name).cpu() for name in names if getattr(problem, name) is not None}
    return replace(problem, **moved)


def _warn_about_probabilities(scores: Tensor) -> None:
    """Warns once per process if its first scores, on the CPU and enough of them, look like probabilities."""
    global _is_inspected
    _is_inspected = True
    # So few that torch uses one thread: a forked process has lost the others.
    lowest, highest = (value.item() for value in torch.aminmax(scores[:MIN_SCORES_FOR_WARNING]))
    if 0 <= lowest < highest <= 1:
        warnings.warn(
            f"the first {MIN_SCORES_FOR_WARNING} scores are between {lowest:.2g} and {highest:.2g}, like "
            "probabilities; the ranking losses expect logits, on whose scale delta is defined: remove the sigmoid",
            stacklevel=_caller_stacklevel(),
        )


def _caller_stacklevel() -> int:
    """The ``stacklevel`` of the first frame outside of this package and torch, for the function that calls this one."""
    inside = tuple(str(Path(module.__file__ or "").parent) for module in (sys.modules["aploss"], torch))
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(inside):
        frame, level = frame.f_back, level + 1
    return level


def _raise_invalid(problem: Problem, status: Status, non_finite: str) -> None:
    """Raises the error for this process's input, after finding out where it is."""
    if status.bad_targets:
        raise_invalid_target(problem.targets, problem.scores, soft=problem.rule.soft_targets)
    if status.bad_scores and non_finite == "raise":
        raise_non_finite_score(problem.scores, problem.targets)
    boxes = problem.box_losses
    if boxes is not None and len(boxes) != status.positives:
        raise ValueError(f"box_losses must have one value per positive, {status.positives}, got {len(boxes)}")
    if boxes is not None and status.bad_boxes:
        raise_invalid_box_loss(boxes)
    if status.bad_weights:
        raise ValueError("weights must be finite and not negative")


def _local_positives(backend: TorchBackend, problem: Problem, found: Found) -> Positives:
    """The positives of this process with all of their properties."""
    groups, weights = problem.groups, problem.weights
    if found.status.positives == 0:
        return backend.positives(problem, found)
    given: dict[str, Tensor] = {}
    index = torch.as_tensor(found.index)
    if groups is not None:
        given["groups"] = groups[index]
    if weights is not None:
        given["weights"] = weights.expand(problem.shape)[torch.unravel_index(index, problem.shape)].double()
    if problem.rule.soft_targets:
        given["qualities"] = problem.targets[index].double()
    if isinstance(problem.thresholds, int):
        given["classes"] = (index % problem.shape[-1] if len(problem.shape) > 1 else index * 0).double()
    if problem.box_losses is not None:
        given["box_losses"] = problem.box_losses.double()
    return backend.positives(problem, found, **given)


# ---- Several processes ---------------------------------------------------------------------------


def _rank_together(
    scores: Tensor, targets: Tensor, options: Options, box_losses: Tensor | None, needs_gradient: bool
) -> tuple[Problem, Tensors, Tensors]:
    """Ranks the scores of all processes; every process raises if one has invalid input."""
    group, mistake, own, cause = options.process_group, None, (0, 0), ""
    try:
        problem = _make_problem(scores, targets, options, box_losses)
        backend = _select_backend(problem)
        found = backend.find(problem)
        _raise_invalid(problem, found.status, options.non_finite)
        own = (found.status.positives, found.status.bad_scores)
    except ValueError as error:
        kinds: dict[type, str] = {NonFiniteScoresError: "score", InvalidTargetError: "target"}
        mistake, cause = error, kinds.get(type(error), "arguments")
    message = torch.tensor([*own, _CAUSES.index(cause)], device=_device_of(group))
    counts, bad_scores, causes = _all_gather(message, group).T.tolist()
    if mistake is not None:
        raise mistake
    if any(causes):
        raise OtherProcessError(_CAUSES[max(causes)])
    problem.num_processes = len(counts)
    if sum(counts) == 0 or any(bad_scores):
        return problem, *_constant(problem, torch.nan if any(bad_scores) else 0.0)
    positives = backend.sort(_gather_positives(backend, problem, found, counts, group))

    def reduce(tallies: Tensor) -> None:
        dist.all_reduce(tallies, group=group)

    return problem, *_apply_rule(backend, problem, found, positives, reduce, needs_gradient)


_CAUSES: tuple[Any, ...] = ("", "score", "target", "arguments")  # what the other processes learn of a mistake


def _device_of(group: Any) -> torch.device:
    """Where the messages of a process group are, whatever the scores turned out to be."""
    if dist.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _gather_positives(
    backend: TorchBackend, problem: Problem, found: Found, counts: list[int], group: Any
) -> Positives:
    """The positives of all processes, rank by rank; ``counts`` has the number of each."""
    own, device = _local_positives(backend, problem, found), _device_of(group)
    names = ["scores"]  # the same in every process, also in one without positives
    names += ["groups"] * (problem.groups is not None) + ["weights"] * (problem.weights is not None)
    names += ["qualities"] * problem.rule.soft_targets + ["classes"] * isinstance(problem.thresholds, int)
    names += ["box_losses"] * (problem.box_losses is not None)
    message = torch.zeros(len(names), max(counts), dtype=torch.int64, device=device)
    for row, name in zip(message, names, strict=True):
        dtype = torch.int64 if name == "groups" else torch.float64
        values = getattr(own, name)
        if values is not None:
            row[: len(values)] = backend.tensor(values, dtype, device).view(torch.int64)  # the bits of a float64
    parts = _all_gather(message, group)
    gathered = torch.cat([part[:, :count] for part, count in zip(parts, counts, strict=True)], dim=1)
    columns = {
        name: row if name == "groups" else row.contiguous().view(torch.float64)
        for name, row in zip(names, gathered.to(problem.scores.device), strict=True)
    }
    rank = dist.get_rank(group)
    before = sum(counts[:rank])
    index = torch.full_like(columns["scores"], -1, dtype=torch.int64)
    index[before : before + counts[rank]] = torch.as_tensor(own.index)
    return backend.from_tensors({**columns, "index": index})


def _all_gather(values: Tensor, group: Any) -> Tensor:
    """The tensors of all processes, stacked in the order of their ranks."""
    parts = [torch.empty_like(values) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, values.contiguous(), group=group)
    return torch.stack(parts)


def resolve_group(name: str) -> Any:
    """The process group of a name, for operators in compiled graphs; None for ""."""
    # The way torch's own functional collectives get from a name back to its group.
    return getattr(dist.distributed_c10d, "_resolve_process_group")(name) if name else None  # noqa: B009


if dist.is_available():  # a module that holds a group can be copied, as by an EMA, and pickled
    copyreg.pickle(dist.ProcessGroup, lambda group: (resolve_group, (group.group_name,)))


# ---- Backends ------------------------------------------------------------------------------------


def _select_backend(problem: Problem) -> TorchBackend:
    """The backend chosen by hand, or the best one for the device of the scores."""
    chosen = _chosen or _chosen_by_environment()
    if problem.scores.is_cpu and chosen in (None, "cpu"):
        return _cpu_backend()
    if chosen == "triton" or (chosen is None and problem.scores.is_cuda):
        from . import triton

        if chosen is None:
            return triton.verified_backend(problem)
        if triton.supports(problem):
            return triton.TritonBackend()
    if chosen in (None, "torch"):
        return TorchBackend()
    raise ValueError(f"backend {chosen!r} cannot rank these scores, {problem.scores.dtype} on {problem.scores.device}")


@cache
def _chosen_by_environment() -> str | None:
    name = os.environ.get(BACKEND_VARIABLE) or None
    _check_backend_name(name)
    return name


@cache
def _cpu_backend() -> TorchBackend:
    """The CPU backend, or the torch backend without numba."""
    try:
        from .numba_backend import NumbaBackend  # numba takes a while to import
    except ImportError as error:
        warnings.warn(
            f"the ranking losses are several times slower without numba ({error}); install it with: pip install numba",
            stacklevel=_caller_stacklevel(),
        )
        return TorchBackend()
    return NumbaBackend()
