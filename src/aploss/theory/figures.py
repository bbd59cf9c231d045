"""Figures 1, 2 and 4: what easy negatives do, the error-driven update, and the step functions."""

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from aploss.losses import ap_loss, auc_loss, focal_loss, reference
from aploss.plotting.plots import INK, PALETTE, Series, line_plot, new_plot
from aploss.reports.page import SvgFigure, Verdict
from aploss.theory.study import Study, differentiate

EASY = (0, *(10**k for k in range(1, 7)))
POSITIVES, HARD = 30, 60
TOLERANCE = 1e-12
GRID = 5  # anchors along each side of Figure 1
POSITIVE_RANKS = {6: 6, 7: 3, 11: 9}  # anchor → place of its score among all: AP = (1/3 + 2/6 + 3/9) / 3

Loss = Callable[[Tensor, Tensor], Tensor]
LOSSES: dict[str, Loss] = {
    "cross-entropy": lambda s, t: F.binary_cross_entropy_with_logits(s, t.to(s), reduction="sum") / t.sum(),
    "focal": focal_loss,
    "auc": auc_loss,
    "ap": ap_loss,
}


def imbalance(seed: int = 0) -> Study:
    """Adds easy negatives to a fixed hard problem and measures the metrics and the gradients."""
    random = torch.Generator().manual_seed(seed)
    targets = torch.tensor([1] * POSITIVES + [0] * HARD)
    scores = torch.randn(POSITIVES + HARD, dtype=torch.float64, generator=random) + 0.7 * targets - 0.5
    scores = scores.clamp(min=-2.5)  # more than delta = 1 above the easy negatives
    easy = -5 + torch.rand(max(EASY), dtype=torch.float64, generator=random)
    accuracy, precision = np.array([metrics_with(scores, targets, easy[:n]) for n in EASY]).T
    gradients = {name: [gradients_with(loss, scores, targets, easy[:n]) for n in EASY] for name, loss in LOSSES.items()}
    share = {name: [on_easy / (on_easy + on_hard) for on_hard, on_easy in sums] for name, sums in gradients.items()}
    strength = {name: [on_hard / sums[0][0] for on_hard, _ in sums] for name, sums in gradients.items()}
    anchor_scores, anchor_targets = anchors_of_figure_1()
    figure_1 = [round(value, 2) for value in metrics_with(anchor_scores, anchor_targets, anchor_scores[:0])]
    return Study(
        name="imbalance",
        title="What easy negatives do to metrics and losses",
        place="Figure 1 and Section 1",
        text=_TEXT,
        figures=[
            SvgFigure(
                _anchor_figure(),
                f"Figure 1, drawn again. The dashed box is an object, filled anchors are positives, and the numbers "
                f"are the places of the scores. No score exceeds 0.5, so that a classifier finds nothing: accuracy "
                f"{figure_1[0]:.2f}. The ranking shows it: AP {figure_1[1]:.2f}.",
            ),
            SvgFigure(
                _plot({"accuracy": accuracy, "average precision": precision}, "metric", y_range=(0, 1.03)),
                "The same errors at the top of the ranking: accuracy forgets them, AP does not.",
            ),
            SvgFigure(
                _plot(share, "share of easy negatives"),
                "Easy negatives take over the gradient of cross-entropy, and part of focal loss's; the ranking "
                "losses do not move them at all.",
            ),
        ],
        verdicts=[
            Verdict(figure_1 == [0.88, 0.33], "Figure 1: the anchors have an accuracy of 0.88 and an AP of 0.33"),
            Verdict(bool(accuracy[-1] > 0.999), "Accuracy ends above 0.999"),
            Verdict(bool(np.ptp(precision) < TOLERANCE), "AP does not change (1e-12)"),
            Verdict(share["cross-entropy"][-1] > 0.9, "Easy negatives end with over 90 % of cross-entropy's gradient"),
            Verdict(
                share["focal"][-2] < 0.1 < share["focal"][-1],
                "Focal loss delays it: they get under 10 % at 100,000, over 10 % at 1,000,000",
            ),
            Verdict(max(share["ap"] + share["auc"]) == 0, "Ranking losses have no gradient on easy negatives"),
            Verdict(strength["auc"][-1] < 1e-3, "The gradient of AUC-loss on hard boxes fades to under 1/1000"),
            Verdict(
                max(abs(s - 1) for s in strength["ap"]) < TOLERANCE,
                "AP-loss keeps its gradient on the hard boxes (1e-12)",
            ),
        ],
    )


_TEXT = f"""
A batch with {POSITIVES} positives and {HARD} hard negatives whose scores overlap, as at the top of a detector's
ranking, and below them more and more easy negatives far from every positive, as a detector has by the tens of
thousands. The detections do not change.

For every loss the gradient on the scores is computed: the share of it, in absolute value, on the easy negatives, and
the rest, on the positives and hard negatives, relative to a batch without easy negatives.
"""


def metrics_with(scores: Tensor, targets: Tensor, easy: Tensor) -> tuple[float, float]:
    """Accuracy at a threshold of 0, and average precision, with the easy negatives added."""
    scores, targets = torch.cat([scores, easy]), F.pad(targets, (0, len(easy)))
    accuracy = ((scores > 0) == (targets == 1)).double().mean()
    return float(accuracy), 1 - float(ap_loss(scores, targets, delta=0, interpolated=False))


def gradients_with(loss: Loss, scores: Tensor, targets: Tensor, easy: Tensor) -> tuple[float, float]:
    """Sums of the absolute gradient of a loss over the hard boxes and over the easy negatives added."""
    _, gradient = differentiate(lambda s: loss(s, F.pad(targets, (0, len(easy)))), torch.cat([scores, easy]))
    strength = gradient.abs()
    return float(strength[: len(scores)].sum()), float(strength[len(scores) :].sum())


def anchors_of_figure_1() -> tuple[Tensor, Tensor]:
    """Scores below 0 (a probability below 0.5) and targets of the anchors of Figure 1."""
    places = torch.zeros(GRID**2, dtype=torch.int64)
    places[list(POSITIVE_RANKS)] = torch.tensor(list(POSITIVE_RANKS.values()))
    targets = (places > 0).long()
    places[targets == 0] = torch.tensor([k for k in range(1, GRID**2 + 1) if k not in POSITIVE_RANKS.values()])
    return -places.double(), targets


def _anchor_figure() -> str:
    from matplotlib.patches import Rectangle

    scores, targets = anchors_of_figure_1()
    with new_plot(height=3.6) as plot:
        axes = plot.axes
        for anchor, (score, target) in enumerate(zip(scores.tolist(), targets.tolist(), strict=True)):
            (row, column), colour = divmod(anchor, GRID), PALETTE[1] if target else "none"
            axes.add_patch(Rectangle((column - 0.42, row - 0.42), 0.84, 0.84, facecolor=colour, edgecolor=INK))
            axes.text(column, row, f"{-score:.0f}", ha="center", va="center")
        axes.add_patch(Rectangle((0.45, 0.4), 2.1, 2.15, fill=False, edgecolor="red", linestyle="--", linewidth=2))
        axes.set(xlim=(-0.6, GRID - 0.4), ylim=(GRID - 0.4, -0.6), aspect="equal")
        axes.set_axis_off()
    return plot.svg


def _plot(curves: dict[str, list[float]] | dict[str, np.ndarray], label: str, **frame: object) -> str:
    # The axis is logarithmic: the values without easy negatives are left out.
    series = [Series(name=name, x=EASY[1:], y=y[1:], markers=True) for name, y in curves.items()]
    return line_plot(series, x_label="easy negatives added", y_label=label, log_x=True, **frame)  # type: ignore[arg-type]


# Figures 2 and 4: an example of two positives and three negatives.
SCORES = torch.tensor([0.6, -0.4, 0.9, 0.1, -1.0], dtype=torch.float64)
TARGETS = torch.tensor([1, 1, 0, 0, 0])
DELTAS = (0.25, 0.5, 1.0, 2.0)  # of Table 1b


def method(seed: int = 0) -> Study:
    """Works an example through the transformations of Section 3; nothing is random, so the seed is not used."""
    differences = SCORES[None, :] - SCORES[:, None]  # Eq. (1)
    steps = (differences >= 0).double()  # Eq. (4)
    labels = ((TARGETS[:, None] == 1) & (TARGETS[None, :] == 0)).double()  # Eq. (2)
    # L_ij y_ij of Eq. (3). 1 + sum over k != i: a box is not above itself, but H(0) = 1 stands for the 1.
    terms = steps / steps.sum(1, keepdim=True) * labels
    gradient = terms.sum(0) - terms.sum(1)  # Eq. (13): g_i = sum_j L_ji y_ji - sum_j L_ij y_ij
    loss, ours = differentiate(lambda scores: ap_loss(scores, TARGETS, delta=0, interpolated=False), SCORES)
    positives = int(TARGETS.sum())
    x = torch.linspace(-2.5, 2.5, 501, dtype=torch.float64)
    curves = {delta: reference.piecewise_step(x, delta) for delta in (0.0, *DELTAS)}  # 0 is the Heaviside step
    outside = all(torch.equal(y[x.abs() > delta], (x[x.abs() > delta] >= 0).double()) for delta, y in curves.items())
    names = ["Heaviside", *(f"delta {delta:g}" for delta in DELTAS)]
    series = [Series(name=name, x=x.numpy(), y=y.numpy()) for name, y in zip(names, curves.values(), strict=True)]
    return Study(
        name="method",
        title="From scores to the error-driven update",
        place="Figures 2 and 4, Sections 3.1, 3.2 and 3.4",
        text=_METHOD_TEXT,
        figures=[
            SvgFigure(_overview(loss), "Figure 2, drawn again: forward on the left, backward on the right."),
            SvgFigure(
                line_plot(series, x_label="x", y_label="f(x)"),
                "Figure 4, drawn again: the Heaviside step and the piecewise step functions of Table 1b.",
            ),
        ],
        verdicts=[
            Verdict(abs(loss - float(terms.sum()) / positives) < TOLERANCE, "The AP-loss is <L, y> / |P| (1e-12)"),
            Verdict(
                bool((ours - gradient / positives).abs().max() < TOLERANCE),
                "Backpropagation of the library gives g_i / |P| of the pairwise update (1e-12)",
            ),
            Verdict(outside, "Beyond delta the piecewise step function is the Heaviside step"),
        ],
    )


_METHOD_TEXT = """
A detector scores every box. The difference transformation turns the scores into x_ij = s_j - s_i, the activation
function turns these into the primary terms L_ij of AP, and the label transformation into y_ij, which is 1 for a
positive i and a negative j. Their product, summed and divided by the number of positives, is the AP-loss. The step
inside L_ij has no useful derivative. The update is therefore driven by the error: the desired output is 0 where y_ij is
1, so x_ij should move by -L_ij y_ij, and backpropagation carries that to the scores and the weights.
"""


def _overview(loss: float) -> str:
    forward = [
        "image, detector",
        "scores sᵢ",
        "differences xᵢⱼ = sⱼ - sᵢ",
        "activation Lᵢⱼ",
        f"AP-loss ⟨L, y⟩ / |P| = {loss:.2f}",
    ]
    backward = [
        "weights, by backpropagation",
        "gradient gᵢ = Σⱼ Lⱼᵢyⱼᵢ - Σⱼ Lᵢⱼyᵢⱼ",
        "update Δxᵢⱼ = -Lᵢⱼ yᵢⱼ",
        "desired output 0 where yᵢⱼ = 1",
        "labels yᵢⱼ: i positive, j negative",
    ]
    arrow = {"arrowstyle": "->", "color": INK}
    with new_plot(height=3.4) as plot:
        for column, texts in enumerate([forward, backward]):
            box = {"boxstyle": "round", "facecolor": "none", "edgecolor": PALETTE[column]}
            for row, text in enumerate(texts):
                plot.axes.text(column, -row, text, ha="center", va="center", fontsize=7, bbox=box)
                if row:  # the forward pass goes down, the backward pass up
                    ends = ((column, -row + 0.27), (column, -row + 0.73))
                    plot.axes.annotate("", *(ends if column == 0 else ends[::-1]), arrowprops=arrow)
        plot.axes.set(xlim=(-0.55, 1.6), ylim=(-4.5, 0.5))
        plot.axes.set_axis_off()
    return plot.svg
