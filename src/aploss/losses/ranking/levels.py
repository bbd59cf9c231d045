"""IoU thresholds of a ranking loss: which positives count at each level, and how much.

At each level the positives whose IoU is below the threshold are ignored. The negatives are the same
at every level, so one pass over the scores serves all of them; only the sums over positives differ.
"""

from dataclasses import replace

import torch
from torch import Tensor

from .problem import Positives, Problem
from .torch_backend import TorchBackend


def add_levels(backend: TorchBackend, problem: Problem, positives: Positives) -> Positives:
    """Adds ``members`` and ``shares`` [T, P] to the sorted positives of all processes."""
    device = problem.scores.device
    columns = {
        name: backend.tensor(values, torch.int64 if name in ("index", "groups") else torch.float64, device)
        for name, values in positives.columns().items()
    }
    qualities, thresholds = columns["qualities"], problem.thresholds
    if isinstance(thresholds, int):  # half of the measure at threshold 0, where every positive counts
        members = _above_quantiles(qualities, columns["classes"], columns.get("groups"), thresholds)
        members = torch.cat([torch.ones_like(members[:1]), members])
        measure = qualities.new_full((thresholds + 1, 1), 0.5 / thresholds)
        measure[0] = 0.5
    else:
        assert thresholds is not None
        dtype = problem.targets.dtype  # as a comparison with the targets would round the thresholds
        levels = torch.tensor(thresholds, dtype=dtype if dtype.is_floating_point else None, device=device)[:, None]
        members = qualities >= levels.double()
        measure = qualities.new_full(levels.shape, 1 / len(thresholds))
    members = members.double()
    shares = measure * _share_of_means(members, columns.get("weights"), columns.get("groups"))
    added = backend.from_tensors({**columns, "members": members, "shares": shares})
    return replace(positives, members=added.members, shares=added.shares)


def _above_quantiles(qualities: Tensor, classes: Tensor, groups: Tensor | None, count: int) -> Tensor:
    """Which positives reach the k-th of ``count`` quantiles within their class and group, bool [count, P].

    The k-th quantile leaves at least the fraction 1 - k / (count + 1) of the positives of each class.
    """
    order = qualities.argsort(stable=True)
    order = order[classes[order].argsort(stable=True)]
    if groups is not None:
        order = order[groups[order].argsort(stable=True)]
    sorted_qualities, sorted_classes = qualities[order], classes[order]
    places = torch.arange(len(order), device=order.device)
    is_new = torch.ones_like(sorted_classes, dtype=torch.bool)
    is_new[1:] = sorted_classes[1:] != sorted_classes[:-1]
    if groups is not None:
        is_new[1:] |= groups[order][1:] != groups[order][:-1]
    first = torch.where(is_new, places, 0).cummax(0).values  # of the class of each
    is_last = is_new.roll(-1)
    last = torch.where(is_last, places, len(order)).flip(0).cummin(0).values.flip(0)
    levels = torch.arange(1, count + 1, device=order.device)[:, None]
    at_level = first + levels * (last - first + 1) // (count + 1)
    members = torch.empty_like(at_level, dtype=torch.bool)
    members[:, order] = sorted_qualities >= sorted_qualities[at_level]
    return members


def _share_of_means(members: Tensor, weights: Tensor | None, groups: Tensor | None) -> Tensor:
    """The factor of each positive in the weighted mean over the members of its group, averaged over groups [T, P].

    Groups without members at a level do not count there.
    """
    values = members if weights is None else members * weights
    if groups is None:
        totals, num_groups = values.sum(1, keepdim=True), torch.ones_like(members[:, :1])
    else:
        first = torch.searchsorted(groups, groups)
        behind = torch.searchsorted(groups, groups, right=True)

        def sums(of_positives: Tensor) -> Tensor:
            cumulative = torch.nn.functional.pad(of_positives.cumsum(1), (1, 0))
            return cumulative[:, behind] - cumulative[:, first]

        totals = sums(values)
        is_first = first == torch.arange(len(first), device=first.device)
        num_groups = ((sums(members) > 0) & is_first).sum(1, keepdim=True).clamp(min=1)
    return values / (totals + (totals == 0)) / num_groups
