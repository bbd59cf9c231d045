"""Anything that a ranking loss may be given, its result, and the result of the literal reference."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import other_losses
import torch
from hypothesis import strategies as st
from torch import Tensor

from aploss.losses import alrp_loss, ap_loss, auc_loss, iou_ap_loss, rank_sort_loss, reference

LOSSES = ("ap", "plain ap", "auc", "rank-sort", "alrp", "iou-ap", "plain iou-ap")
THRESHOLDS = (0.0, 0.5, 0.7, 0.99)
HALF = (torch.float16, torch.bfloat16)
DELTAS = (0.0, 1e-6, 0.25, 1.0, 50.0)

# In every kind of distribution that has tripped a ranking loss: noise, is it a positive -> scores.
DISTRIBUTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "random": lambda noise, positive: noise,
    "separated": lambda noise, positive: noise + 4.0 * positive,
    "tied": lambda noise, positive: (noise * 3).round(),
    "all equal": lambda noise, positive: torch.full_like(noise, 0.3),
    "tiny spread": lambda noise, positive: noise * 1e-3,
    "huge spread": lambda noise, positive: noise * 1e3,
    "offset": lambda noise, positive: noise + 1e4,
    "one outlier": lambda noise, positive: noise + 1e6 * (torch.arange(len(noise)) == 0),
    "offset 1e6": lambda noise, positive: noise + 1e6,
    "all below": lambda noise, positive: noise.clamp(-3, 3) - 100.0 * ~positive,
    "all above": lambda noise, positive: noise + 100.0 * ~positive,
    "as initialised": lambda noise, positive: noise * 0.3 - 4.6,
    "wide": lambda noise, positive: noise * 20,
    "in bfloat16": lambda noise, positive: (noise + 2.0 * positive).bfloat16().double(),
    "astronomic": lambda noise, positive: (noise * 3).round() * 1e17,
    "largest": lambda noise, positive: noise.round().clamp(-1, 1) * 3.4e38,
}
OVERFLOWING = {torch.float16: ("one outlier", "offset 1e6", "astronomic", "largest"), torch.bfloat16: ("largest",)}
# Probabilities of positives, negatives and ignored scores.
MIXES = ((0.1, 0.8, 0.1), (0.02, 0.98, 0), (0.5, 0.5, 0), (0, 1, 0), (1, 0, 0), (0, 0, 1), (0, 0.5, 0.5), (0.6, 0, 0.4))
GROUPS: dict[str, Callable[[Sequence[int]], Any]] = {
    "none": lambda shape: None,
    "images": lambda shape: 0,
    "classes": lambda shape: -1,
    "[B]": lambda shape: torch.arange(shape[0]) * 1_000_003 - 7,
    "[B, 1]": lambda shape: torch.zeros(shape[0], 1, dtype=torch.int32),
    "[B, 1, K]": lambda shape: (torch.arange(shape[0] * shape[2]) % 4).view(shape[0], 1, shape[2]),
    "every score": lambda shape: torch.arange(shape[0] * shape[1] * shape[2]).view(shape) % 5,
}
WEIGHTS: dict[str, Callable[[Sequence[int]], Tensor | None]] = {
    "none": lambda shape: None,
    "classes": lambda shape: torch.arange(1.0, shape[2] + 1),
    "images": lambda shape: torch.arange(shape[0]).view(-1, 1, 1),  # 0 for the first
    "every score": lambda shape: torch.rand(tuple(shape), generator=torch.Generator().manual_seed(5)),
}


def random_boxes(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Scores and IoU targets [3, 100]."""
    count, positives, generator = 300, 30, torch.Generator().manual_seed(0)
    scores = torch.randn(count, generator=generator, dtype=torch.float64).to(dtype)
    targets = torch.zeros(count)
    targets[:positives] = torch.rand(positives, generator=generator).clamp(min=0.01)
    targets[-20:] = -1
    order = torch.randperm(count, generator=generator)
    return scores[order].reshape(3, -1), targets[order].reshape(3, -1)


def by_quantiles(scores: Tensor, qualities: Tensor, count: int = 9) -> tuple[Tensor, Tensor]:
    """IoU-AP, not interpolated, with quantiles within each class, the last dimension if there are several."""
    hard = reference.targets_at_threshold(qualities, 0)
    losses = [reference.ap_loss(scores, hard, interpolated=False)] * count
    of_classes = qualities.view(-1, qualities.shape[-1] if qualities.ndim > 1 else 1)
    for k in range(1, count + 1):
        thresholds = torch.zeros_like(of_classes[0])
        for number, column in enumerate(of_classes.unbind(1)):
            values = column[column > 0].sort().values
            if len(values):
                thresholds[number] = values[k * len(values) // (count + 1)]
        targets = torch.where((of_classes > 0) & (of_classes < thresholds), -1, hard.view(of_classes.shape))
        losses.append(reference.ap_loss(scores, targets.view(scores.shape), interpolated=False))
    value, gradient = (torch.stack(results).mean(0) for results in zip(*losses, strict=True))
    return value, gradient


@dataclass(frozen=True, eq=False)
class Case:
    """The arguments of a ranking loss, for scores [B, A, K]."""

    loss: str
    scores: Tensor
    targets: Tensor
    boxes: Tensor
    delta: float
    groups: Any = None
    weights: Tensor | None = None


@st.composite
def cases(
    draw: Any,
    dtypes: Sequence[torch.dtype] = (torch.float32, torch.float64, *HALF),
    groups: Sequence[str] = tuple(GROUPS),
    max_anchors: int = 60,
) -> Case:
    """Draws every combination of loss, distribution, dtype, delta, targets, groups and weights."""
    loss, dtype, delta = draw(st.sampled_from(LOSSES)), draw(st.sampled_from(dtypes)), draw(st.sampled_from(DELTAS))
    fitting = [name for name in DISTRIBUTIONS if name not in OVERFLOWING.get(dtype, ())]
    distribution, mix = draw(st.sampled_from(fitting)), draw(st.sampled_from(MIXES))
    shape = (draw(st.integers(1, 3)), draw(st.integers(1, max_anchors)), draw(st.integers(1, 3)))
    random = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    size = shape[0] * shape[1] * shape[2]
    kinds = torch.tensor([1.0, 0.0, -1.0])
    targets = kinds[torch.multinomial(torch.tensor(mix, dtype=torch.float32), size, True, generator=random)]
    noise = torch.randn(size, dtype=torch.float64, generator=random)
    scores = DISTRIBUTIONS[distribution](noise, targets == 1).to(dtype).view(shape)
    qualities = torch.rand(size, generator=random).mul(8).ceil().div(8)  # some are equal
    boxes = qualities[targets == 1]
    if loss in ("rank-sort", "iou-ap", "plain iou-ap"):
        targets = torch.where(targets == 1, qualities, targets)
    return Case(
        loss,
        scores,
        targets.view(shape),
        boxes,
        delta,
        GROUPS[draw(st.sampled_from(groups))](shape),
        WEIGHTS[draw(st.sampled_from(list(WEIGHTS)))](shape),
    )


def computed(case: Case, **options: Any) -> tuple[list[Tensor], list[Tensor]]:
    """The values of the loss, and the gradient of each on what it moves."""
    scores, boxes = case.scores.clone().requires_grad_(), case.boxes.clone().requires_grad_()
    options = {"delta": case.delta, "groups": case.groups, "weights": case.weights, **options}
    if case.loss == "alrp":
        values, leaves = alrp_loss(scores, case.targets, boxes, **options), [scores, boxes]
    elif case.loss == "rank-sort":
        values, leaves = rank_sort_loss(scores, case.targets, **options), [scores, scores]
    elif case.loss == "auc":
        values, leaves = (auc_loss(scores, case.targets, **options),), [scores]
    elif "iou" in case.loss:
        options = {"thresholds": THRESHOLDS, "interpolated": case.loss == "iou-ap", **options}
        values, leaves = (iou_ap_loss(scores, case.targets, **options),), [scores]
    else:
        values = (ap_loss(scores, case.targets, interpolated=case.loss == "ap", **options),)
        leaves = [scores]
    gradients = [
        torch.autograd.grad(value, leaf, retain_graph=True)[0] for value, leaf in zip(values, leaves, strict=True)
    ]
    return [value.detach() for value in values], gradients


def expected(case: Case) -> tuple[list[Tensor], list[Tensor]]:
    """The same of the reference, which is called for each group alone."""
    if "iou" in case.loss:
        return _mean_over_thresholds(case)
    scores, targets = case.scores.flatten(), case.targets.flatten()
    weights = None if case.weights is None else case.weights.expand(case.scores.shape).flatten()
    numbers = _group_of_each_score(case)
    positive = targets > 0
    gradients = [torch.zeros_like(scores, dtype=torch.float64) for _ in range(2)]
    if case.loss == "alrp":
        gradients[1] = torch.zeros_like(case.boxes, dtype=torch.float64)
    totals = [0.0, 0.0]
    present = numbers[positive].unique()
    for number in present:
        own = numbers == number
        places = [own, own[positive] if case.loss == "alrp" else own]
        own_weights = None if weights is None else weights[own]
        values, on_inputs = _reference(case, scores[own], targets[own], case.boxes[own[positive]], own_weights)
        for k, value in enumerate(values):
            totals[k] += value.item() / len(present)
            gradients[k][places[k]] = on_inputs[k] / len(present)
    count = 2 if case.loss in ("rank-sort", "alrp") else 1
    shapes = [case.scores.shape, case.boxes.shape if case.loss == "alrp" else case.scores.shape]
    return [torch.tensor(total, dtype=torch.float64) for total in totals[:count]], [
        gradient.view(shape) for gradient, shape in zip(gradients[:count], shapes, strict=False)
    ]


def _mean_over_thresholds(case: Case) -> tuple[list[Tensor], list[Tensor]]:
    name = "ap" if case.loss == "iou-ap" else "plain ap"
    levels = [reference.targets_at_threshold(case.targets, threshold) for threshold in THRESHOLDS]
    results = [expected(replace(case, loss=name, targets=level, boxes=level[level == 1])) for level in levels]
    return [torch.stack([values[0] for values, _ in results]).mean()], [
        torch.stack([gradients[0] for _, gradients in results]).mean(0)
    ]


def _reference(case: Case, scores: Tensor, targets: Tensor, boxes: Tensor, weights: Tensor | None) -> tuple[Any, Any]:
    if case.loss == "alrp":
        results = other_losses.alrp_loss(scores, targets, boxes, case.delta, weights)
    elif case.loss == "rank-sort":
        results = other_losses.rank_sort_loss(scores, targets, case.delta, weights)
    elif case.loss == "auc":
        results = reference.auc_loss(scores, targets, case.delta, weights)
    else:
        results = reference.ap_loss(scores, targets, case.delta, case.loss == "ap", weights)
    return results[: len(results) // 2], results[len(results) // 2 :]


def _group_of_each_score(case: Case) -> Tensor:
    shape, groups = case.scores.shape, case.groups
    if groups is None:
        return torch.zeros(case.scores.numel(), dtype=torch.int64)
    if isinstance(groups, int):
        index = torch.arange(shape[groups])
        return (index.view(-1, 1, 1) if groups == 0 else index).expand(shape).flatten()
    return groups.long().view(*groups.shape, *[1] * (3 - groups.ndim)).expand(shape).flatten()


def assert_equals_reference(case: Case) -> None:
    """Values to 1.2e-7 and gradients to 2e-7 of the largest in float32, to 1e-12 in float64.

    Few scores show every rounding of a distance to a breakpoint; over many they average out, and
    ``test_ap_loss.py`` asks for 3e-8 and 1e-7.
    """
    double = case.scores.dtype == torch.float64
    values, gradients = computed(case)
    right_values, right_gradients = expected(case)
    for value, right in zip(values, right_values, strict=True):
        assert value.dtype == (torch.float64 if double else torch.float32)
        assert abs(value.double() - right) <= (1e-12 if double else 1.2e-7)
    for gradient, right in zip(gradients, right_gradients, strict=True):
        if right.numel() == 0:
            continue
        tolerance = 1e-12 if gradient.dtype == torch.float64 else 2e-7
        rounding = torch.finfo(gradient.dtype).eps / 2 * right.abs() if gradient.dtype in HALF else 0.0
        smallest = torch.finfo(gradient.dtype).smallest_normal if gradient.dtype in HALF else 1e-15
        bound = tolerance * right.abs().max() + rounding + smallest
        assert ((gradient.double() - right).abs() <= bound).all()
