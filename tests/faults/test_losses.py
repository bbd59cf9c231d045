"""Every loss with every edge: the number of the literal reference, or an error that names what is wrong."""

import functools
import math
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import other_losses
import pytest
import torch
from ranking_cases import by_quantiles
from torch import Tensor, nn

import aploss.losses
from aploss.losses import NonFiniteScoresError, error_driven, reference

Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Loss:
    """How a loss is called with flat scores and targets 1, 0 and -1, and what the reference says of them."""

    module: Callable[[], Any]
    reference: Callable[[Tensor, Tensor], Pair]  # value and gradient, summed over the parts of a loss
    arguments: Callable[[Tensor, Tensor], tuple[Tensor, ...]] = lambda scores, targets: (scores, targets)

    def __call__(self, scores: Tensor, targets: Tensor) -> Tensor:
        return total(self.module()(*self.arguments(scores, targets)))


def total(values: Any) -> Tensor:
    """The value of a loss, summed over its parts."""
    return values if isinstance(values, Tensor) else sum(values[1:], values[0])


def two_columns(scores: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """A softmax over background and one class: the scores are the logits of the class."""
    return torch.stack([torch.zeros_like(scores), scores], dim=-1), targets


def of_columns(scores: Tensor, targets: Tensor) -> Pair:
    value, gradient = other_losses.ohem_cross_entropy(*two_columns(scores, targets))
    return value, gradient[..., 1]


def qualities(targets: Tensor) -> Tensor:
    """A number in (0, 1] for every place."""
    return (torch.arange(targets.numel()) % 7 + 1).div(8).view(targets.shape)


def with_ious(scores: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    return scores, torch.where(targets == 1, qualities(targets), targets.float())


def of_ious(scores: Tensor, targets: Tensor) -> Pair:
    ranking, sorting, *gradients = other_losses.rank_sort_loss(*with_ious(scores, targets))
    return ranking + sorting, sum(gradients)


def of_quantiles(scores: Tensor, targets: Tensor) -> Pair:
    return by_quantiles(*with_ious(scores, targets))


# The weight and the target of binary cross-entropy for a sigmoid p and an IoU q, 0 for negatives.
SIGMOIDS: dict[str, Callable[[Tensor, Tensor], Pair]] = {
    "vfl": lambda p, q: (torch.where(q > 0, q, 0.75 * p.detach() ** 2), q),
    "qfl": lambda p, q: ((q - p) ** 2, q),
    "mal": lambda p, q: (torch.where(q > 0, 1, p.detach() ** 1.5), q**1.5),
    "ia-bce": lambda p, q: (
        torch.where(q > 0, 1, p**2), torch.where(q > 0, (p.detach() ** 0.25 * q**0.75).clamp(min=0.01), 0)
    ),
}  # fmt: skip


def of_sigmoids(name: str, scores: Tensor, targets: Tensor) -> Pair:
    s, q = scores.double().requires_grad_(), with_ious(scores, targets)[1].double()
    counted = q >= 0
    weights, soft = SIGMOIDS[name](s[counted].sigmoid(), q[counted])
    losses = weights * nn.functional.binary_cross_entropy_with_logits(s[counted], soft, reduction="none")
    value = (losses / max(1, int((q > 0).sum()))).sum()
    return value.detach(), torch.autograd.grad(value, s)[0]


def with_box_losses(scores: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
    boxes = qualities(targets).to(scores.device)[targets == 1] if targets.shape == scores.shape else torch.ones(1)
    return scores, targets, boxes


def of_box_losses(scores: Tensor, targets: Tensor) -> Pair:
    classification, localisation, gradient, _ = other_losses.alrp_loss(*with_box_losses(scores, targets))
    return classification + localisation, gradient


LOSSES = {
    "ap": Loss(aploss.losses.APLoss, reference.ap_loss),
    "auc": Loss(aploss.losses.AUCLoss, reference.auc_loss),
    "rank-sort": Loss(aploss.losses.RankSortLoss, of_ious, with_ious),
    "alrp": Loss(aploss.losses.ALRPLoss, of_box_losses, with_box_losses),
    "focal": Loss(aploss.losses.FocalLoss, other_losses.focal_loss),
    "ce-ohem": Loss(aploss.losses.OHEMCrossEntropy, of_columns, two_columns),
    "vfl": Loss(aploss.losses.VarifocalLoss, functools.partial(of_sigmoids, "vfl"), with_ious),
    "qfl": Loss(aploss.losses.QualityFocalLoss, functools.partial(of_sigmoids, "qfl"), with_ious),
    "mal": Loss(aploss.losses.MatchabilityAwareLoss, functools.partial(of_sigmoids, "mal"), with_ious),
    "ia-bce": Loss(aploss.losses.IoUAwareBCELoss, functools.partial(of_sigmoids, "ia-bce"), with_ious),
    "iou-ap": Loss(aploss.losses.IoUAPLoss, of_quantiles, with_ious),
    "smooth-ap": Loss(aploss.losses.SmoothAPLoss, reference.smooth_ap_loss),
    "hinge-ap": Loss(aploss.losses.HingeAPLoss, other_losses.hinge_ap_loss),
}
RANKING = ("ap", "auc", "rank-sort", "alrp", "iou-ap")
OF_TORCH = ("focal", "ce-ohem", *SIGMOIDS)  # made of torch's own operations
every_loss = pytest.mark.parametrize("name", LOSSES)


def test_no_loss_is_left_out() -> None:
    public = (getattr(aploss.losses, name) for name in aploss.losses.__all__)
    classes = {one for one in public if isinstance(one, type) and issubclass(one, nn.Module)}
    assert classes == {loss.module for loss in LOSSES.values()}


def value_and_gradient(loss: Callable[[Tensor, Tensor], Tensor], scores: Tensor, targets: Tensor) -> Pair:
    scores = scores.detach().requires_grad_()
    value = loss(scores, targets)
    value.backward()
    assert scores.grad is not None
    return value.detach(), scores.grad


def check(name: str, scores: Tensor, targets: Tensor, *, tolerance: float = 1e-6) -> None:
    """Value and gradient are those of the reference, up to the digits of the dtype."""
    value, gradient = value_and_gradient(LOSSES[name], scores, targets)
    right, right_gradient = LOSSES[name].reference(scores.detach(), targets)
    assert value.dtype == (torch.float64 if scores.dtype == torch.float64 else torch.float32)
    assert gradient.dtype == scores.dtype
    if right.isinf():  # beyond what the reference can add up
        assert value.item() > torch.finfo(torch.float64).max / 10
    else:
        assert value.item() == pytest.approx(right.to(value.dtype).item(), rel=1e-5, abs=tolerance)
    rounding = max(tolerance, torch.finfo(scores.dtype).eps)
    assert torch.allclose(gradient.double(), right_gradient, rtol=rounding, atol=rounding)


# --- numbers ---

# Scores and targets; few, because the reference of the hinge loss tries all rankings.
NUMBERS: dict[str, tuple[list[float], list[int]]] = {
    "no positives": ([0.5, -1.0, 2.0], [0, 0, 0]),
    "no negatives": ([0.5, -1.0, 2.0], [1, 1, 1]),
    "all ignored": ([0.5, -1.0, 2.0], [-1, -1, -1]),
    "one positive alone": ([0.3], [1]),
    "one negative alone": ([0.3], [0]),
    "all equal": ([0.25] * 6, [1, 0, 0, 1, -1, 0]),
    "ties of both kinds": ([1.0, 1.0, 0.0, 0.0, 0.0, 1.0], [1, 0, 1, 0, 0, -1]),
    "ties at the ends of the step": ([0.0, 1.0, -1.0, 2.0, 0.5, -0.5], [1, 0, 0, 1, 0, 0]),
    "perfect": ([9.0, 8.0, -8.0, -9.0, 0.0], [1, 1, 0, 0, -1]),
    "worst": ([-9.0, -8.0, 8.0, 9.0, 0.0], [1, 1, 0, 0, -1]),
    "zero and minus zero": ([0.0, -0.0, 0.0, -0.0], [1, 0, 0, 1]),
    "smallest numbers": ([1e-45, -1e-45, 1e-40, 0.0], [1, 0, 0, 1]),
    "a large offset": ([60000.0, 60032.0, 59968.0, 60000.0], [1, 0, 0, 1]),
}
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@every_loss
@pytest.mark.parametrize("edge", NUMBERS)
def test_an_edge_has_the_number_of_the_reference(name: str, edge: str, record_property: Callable[..., None]) -> None:
    numbers, targets = NUMBERS[edge]
    record_property("faults", len(DTYPES))
    for dtype in DTYPES:
        check(name, torch.tensor(numbers, dtype=dtype), torch.tensor(targets))


@every_loss
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_largest_finite_scores_are_ranked_exactly(
    name: str, dtype: torch.dtype, record_property: Callable[..., None]
) -> None:
    largest = torch.finfo(dtype).max
    cases = (
        ([1, 2, 3, -largest], [1, 0, 0, 1]),
        ([1, 2, 3, largest], [1, 0, 1, 0]),
        ([largest, largest, largest, -largest, 0], [1, 0, 1, 0, 1]),
        ([largest, -largest, 0, largest, -largest, -largest], [1, 0, 0, 0, 1, -1]),
    )
    record_property("faults", len(cases))
    for numbers, targets in cases:
        scores = torch.tensor(numbers, dtype=dtype)
        if name != "hinge-ap":  # which of two rankings its reference takes is decided by what it rounds away
            check(name, scores, torch.tensor(targets))


@every_loss
@pytest.mark.parametrize("kind", ["scores", "targets", "expanded", "sliced"])
def test_tensors_that_are_not_contiguous_are_read_in_order(name: str, kind: str) -> None:
    random = torch.Generator().manual_seed(0)
    scores, targets = torch.randn(2, 3, generator=random), torch.tensor([[1, 0, 0], [0, 1, -1]])
    if kind == "expanded":
        scores = scores[:1].expand(2, 3)
    elif kind == "sliced":
        scores, targets = (torch.stack([one, one.flip(0)], dim=-1)[..., 0] for one in (scores, targets))
    else:
        scores = scores.t().contiguous().t() if kind == "scores" else scores
        targets = targets.t().contiguous().t() if kind == "targets" else targets
    assert not (scores.is_contiguous() and targets.is_contiguous())
    check(name, scores, targets)


@every_loss
@pytest.mark.parametrize("shape", [(0,), (0, 3), (2, 0, 5)])
def test_nothing_to_rank_is_zero_and_connected_to_the_graph(name: str, shape: tuple[int, ...]) -> None:
    value, gradient = value_and_gradient(LOSSES[name], torch.empty(shape), torch.empty(shape, dtype=torch.int64))
    assert value.item() == 0.0
    assert gradient.shape == shape


@every_loss
def test_one_number_without_a_shape_is_ranked(name: str) -> None:
    if name == "ce-ohem":
        with pytest.raises(ValueError, match="logits must be"):
            LOSSES[name](torch.tensor(0.5), torch.tensor(1))
        return
    check(name, torch.tensor(0.5), torch.tensor(1))


@every_loss
def test_200_000_equal_scores_of_float16_are_counted(name: str) -> None:
    """Sums in float16 end at 65,504, and stand still from 2,048 on."""
    scores, targets = torch.full((200_000,), 0.5, dtype=torch.float16), torch.zeros(200_000, dtype=torch.int64)
    targets[[7, 100_000, 199_999]] = 1
    value, gradient = value_and_gradient(LOSSES[name], scores, targets)
    if name != "hinge-ap":
        right, right_gradient = LOSSES[name].reference(scores, targets)
        assert value.item() == pytest.approx(right.item(), rel=1e-5)
        # Sorted: which of equal negatives are the hardest is nobody's business.
        assert torch.allclose(gradient.double().sort()[0], right_gradient.sort()[0], rtol=1e-3, atol=1e-6)
        return
    negatives = 199_997  # all of them above the three positives, at no cost
    assert value.item() == pytest.approx(1 - sum(k / (negatives + k) for k in (1, 2, 3)) / 3, abs=1e-6)
    assert torch.allclose(gradient[targets == 1].double(), torch.tensor(-2 / 3).double(), atol=1e-3)


@every_loss
@pytest.mark.parametrize("kind", [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.float32])
def test_targets_of_every_dtype_mean_the_same(name: str, kind: torch.dtype) -> None:
    scores, targets = torch.tensor([0.5, -1.0, 2.0, 0.0]), torch.tensor([1, 0, 0, 1])
    loss = LOSSES[name]
    if name == "ce-ohem" and kind.is_floating_point:
        with pytest.raises(ValueError, match="targets must be integer"):
            loss(scores, targets.to(kind))
        return
    assert loss(scores, targets.to(kind)).item() == loss(scores, targets).item()


# --- errors ---

BAD_SCORES = {"NaN": math.nan, "infinity": math.inf, "minus infinity": -math.inf}


@every_loss
@pytest.mark.parametrize("number", BAD_SCORES)
@pytest.mark.parametrize("place", ["positive", "negative"])
def test_a_score_that_is_no_number_is_an_error_that_names_it(name: str, number: str, place: str) -> None:
    scores, targets = torch.tensor([0.5, -1.0, 2.0, 0.0]), torch.tensor([1, 0, 0, 1])
    index = 3 if place == "positive" else 2
    scores[index] = BAD_SCORES[number]
    with pytest.raises(NonFiniteScoresError, match=f"must be finite.* {index}\\b"):
        LOSSES[name](scores, targets)


@every_loss
@pytest.mark.parametrize("number", BAD_SCORES)
def test_a_score_that_is_ignored_may_be_anything(name: str, number: str) -> None:
    scores, targets = torch.tensor([0.5, -1.0, 2.0, 0.0]), torch.tensor([1, 0, 0, 1])
    expected, gradient = value_and_gradient(LOSSES[name], scores, targets)
    bad = torch.cat([scores, torch.tensor([BAD_SCORES[number]])])
    value, with_bad = value_and_gradient(LOSSES[name], bad, torch.cat([targets, torch.tensor([-1])]))
    assert value.item() == pytest.approx(expected.item(), abs=1e-7)
    assert torch.allclose(with_bad, torch.cat([gradient, torch.zeros(1)]), atol=1e-7)


WRONG: dict[str, tuple[Callable[[], tuple[Any, Any]], str]] = {
    "integer scores": (lambda: (torch.tensor([1, 2]), torch.tensor([1, 0])), "must be floating point, got torch.int64"),
    "bool scores": (lambda: (torch.tensor([True, False]), torch.tensor([1, 0])), "must be floating point"),
    "complex targets": (lambda: (torch.zeros(2), torch.zeros(2, dtype=torch.complex64)), "targets must be"),
    "another shape": (lambda: (torch.zeros(3), torch.tensor([1, 0])), "shape|same"),
    "another rank of the same size": (lambda: (torch.zeros(2, 1), torch.tensor([1, 0])), "shape|same"),
    "another device": (lambda: (torch.zeros(2), torch.zeros(2, dtype=torch.int64, device="meta")), "meta device"),
    "sparse scores": (lambda: (torch.zeros(2).to_sparse(), torch.tensor([1, 0])), "dense tensor, got"),
    "scores in CSR": (lambda: (torch.eye(2).to_sparse_csr(), torch.eye(2)), "dense tensor, got"),
    "sparse targets": (lambda: (torch.zeros(2), torch.tensor([1, 0]).to_sparse()), "dense tensor, got"),
    "scores of oneDNN": (lambda: (torch.zeros(2).to_mkldnn(), torch.tensor([1, 0])), "dense tensor, got"),
    "nested scores": (lambda: (torch.nested.nested_tensor([torch.ones(2)]), torch.tensor([1, 0])), "got nested"),
    "nested targets": (lambda: (torch.ones(2), torch.nested.nested_tensor([torch.ones(2)])), "got nested"),
    "scores on meta": (lambda: (torch.zeros(2, device="meta"), torch.tensor([1, 0])), "meta device"),
    "quantized scores": (
        lambda: (torch.quantize_per_tensor(torch.zeros(2), 1.0, 0, torch.qint8), torch.tensor([1, 0])), "dense tensor"
    ),
    "quantized targets": (
        lambda: (torch.zeros(2), torch.quantize_per_tensor(torch.zeros(2), 1.0, 0, torch.qint8)), "dense tensor"
    ),
    "float8 scores": (lambda: (torch.zeros(2).to(torch.float8_e5m2), torch.tensor([1, 0])), "must be floating point"),
    "a target of 2": (lambda: (torch.zeros(2), torch.tensor([1, 2])), "targets must be .*got 2"),
    "a target of -2": (lambda: (torch.zeros(2), torch.tensor([1, -2])), "targets must be .*got -2"),
    "a target of 255 in uint8": (
        lambda: (torch.zeros(2), torch.tensor([1, 255], dtype=torch.uint8)), "targets must be .*got 255"
    ),
    "a list": (lambda: ([0.0, 1.0], torch.tensor([1, 0])), "must be a tensor, got list"),
    "a list of targets": (lambda: (torch.zeros(2), [1, 0]), "must be a tensor, got list"),
}  # fmt: skip


@pytest.mark.regression("33a370e")
@every_loss
@pytest.mark.parametrize("mistake", WRONG)
def test_a_mistake_is_an_error_that_says_what_was_given(name: str, mistake: str) -> None:
    make, message = WRONG[mistake]
    scores, targets = make()
    loss = LOSSES[name]
    arguments: tuple[Any, ...]
    columns = name == "ce-ohem" and mistake in ("integer scores", "bool scores", "float8 scores", "complex targets")
    if columns or mistake.startswith("a target of"):
        arguments = loss.arguments(scores, targets)
    else:
        arguments = (scores, targets, torch.ones(1)) if name == "alrp" else (scores, targets)
    with pytest.raises(ValueError, match=message):
        loss.module()(*arguments)


@pytest.mark.parametrize(
    ("boxes", "message"),
    [
        (torch.ones(1), "one value per positive, 2, got 1"),
        (torch.tensor([1.0, math.nan]), "finite and not negative, got nan"),
        (torch.tensor([1.0, -1.0]), "finite and not negative, got -1"),
        (torch.tensor([1, 1]), "must be floating point"),
        (torch.ones(2, 1), r"of shape \[P\]"),
        (torch.ones(2, device="meta"), "one device"),
        ([1.0, 1.0], "must be a tensor"),
    ],
    ids=["too few", "NaN", "negative", "integers", "another shape", "another device", "a list"],
)
def test_box_losses_that_cannot_be_are_refused(boxes: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        aploss.losses.alrp_loss(torch.zeros(3), torch.tensor([1, 0, 1]), boxes)


def test_error_driven_checks_shape_and_dtype_and_passes_values_on() -> None:
    """It ranks nothing and checks no values: NaN stays NaN, which a training step finds."""
    inputs, zeros = torch.zeros(2, requires_grad=True), torch.zeros(2)
    with pytest.raises(ValueError, match="shape of inputs"):
        error_driven(inputs, torch.zeros(3), zeros)
    with pytest.raises(ValueError, match="floating point"):
        error_driven(torch.zeros(2, dtype=torch.int64), zeros, zeros)
    assert error_driven(inputs, torch.tensor([math.nan, 0]), zeros).isnan()
    huge = torch.tensor([torch.finfo(torch.float32).max, 0.0])
    error_driven(inputs, huge, zeros).backward()
    assert torch.equal(inputs.grad, huge)


# --- ways of calling ---


def a_batch(size: int = 6) -> Pair:
    random = torch.Generator().manual_seed(1)
    return torch.randn(size, generator=random), torch.tensor([1, 0, 0, 1, -1, 0]).repeat(size // 6)


@every_loss
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference_mode"])
def test_a_pickled_loss_is_the_same_without_gradients(name: str, mode: Callable[[], Any]) -> None:
    loss, (scores, targets) = LOSSES[name], a_batch()
    expected, module = loss(scores, targets), pickle.loads(pickle.dumps(loss.module()))
    with mode():
        assert torch.equal(total(module(*loss.arguments(scores, targets))), expected)


@every_loss
@pytest.mark.parametrize("upstream", [0.0, -2.0, 65536.0])
def test_the_gradient_is_scaled_by_the_upstream_gradient(name: str, upstream: float) -> None:
    scores, targets = a_batch()
    _, gradient = value_and_gradient(LOSSES[name], scores, targets)
    _, scaled = value_and_gradient(lambda s, t: LOSSES[name](s, t) * upstream, scores, targets)
    assert torch.allclose(scaled, gradient * upstream, rtol=1e-5)


@every_loss
def test_autocast_changes_nothing(name: str) -> None:
    scores, targets = a_batch()
    expected = value_and_gradient(LOSSES[name], scores, targets)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = value_and_gradient(LOSSES[name], scores, targets)
    assert all(torch.allclose(one, other, atol=1e-6) for one, other in zip(found, expected, strict=True))


@every_loss
def test_a_compiled_loss_gives_the_same_and_lets_no_nan_through(name: str) -> None:
    """With the graphs of torch.compile, but without the compiler for this processor, which takes minutes."""
    torch.compiler.reset()
    loss = LOSSES[name]
    compiled = torch.compile(loss.module(), fullgraph=True, dynamic=True, backend="aot_eager")
    for size in (12, 18):
        scores, targets = a_batch(size)
        expected = value_and_gradient(loss, scores, targets)
        found = value_and_gradient(lambda s, t: total(compiled(*loss.arguments(s, t))), scores, targets)
        assert all(torch.allclose(one, other, atol=1e-6) for one, other in zip(found, expected, strict=True))
    scores[1] = math.nan
    bad = loss.arguments(scores.requires_grad_(), targets)
    if name in OF_TORCH:  # as documented: where compiled, NaN shows in the loss
        assert total(compiled(*bad)).isnan()
        return
    with pytest.raises(NonFiniteScoresError, match="must be finite"):
        compiled(*bad)


@pytest.mark.parametrize("name", [name for name in LOSSES if name not in OF_TORCH])
def test_what_an_error_driven_gradient_cannot_give_is_refused(name: str) -> None:
    scores, targets = a_batch()
    with pytest.raises(RuntimeError, match=r"torch\.func"):
        torch.func.grad(lambda s: LOSSES[name](s, targets))(scores)
    scores.requires_grad_()
    (gradient,) = torch.autograd.grad(LOSSES[name](scores, targets), scores, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        gradient.sum().backward()
