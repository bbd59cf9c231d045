"""Figures 2 and 4: from scores to the error-driven update, and the step functions."""

import torch

from aploss.losses import ap_loss, reference
from aploss.plotting.plots import Series, line_plot, new_plot
from aploss.plotting.style import INK, PALETTE
from aploss.reports.page import SvgFigure, Verdict
from aploss.theory.study import Study

SCORES = torch.tensor([0.6, -0.4, 0.9, 0.1, -1.0], dtype=torch.float64)
TARGETS = torch.tensor([1, 1, 0, 0, 0])
DELTAS = (0.25, 0.5, 1.0, 2.0)  # of Table 1b


def method(seed: int = 0) -> Study:
    """Works an example through the transformations of Section 3; nothing is random, so the seed is not used."""
    terms = pairwise_terms()
    gradient = terms.sum(0) - terms.sum(1)  # Eq. (12): g_i = sum_j L_ji y_ji - sum_j L_ij y_ij
    scores = SCORES.clone().requires_grad_()
    loss = ap_loss(scores, TARGETS, delta=0, interpolated=False)
    (ours,) = torch.autograd.grad(loss, scores)
    positives = int(TARGETS.sum())
    x = torch.linspace(-2.5, 2.5, 501, dtype=torch.float64)
    heaviside = (x >= 0).double()
    steps = {delta: reference.piecewise_step(x, delta) for delta in DELTAS}
    outside = all(torch.equal(steps[d][x.abs() > d], heaviside[x.abs() > d]) for d in DELTAS)
    series = [Series(name="Heaviside", x=x.numpy(), y=heaviside.numpy())]
    series += [Series(name=f"delta {delta:g}", x=x.numpy(), y=y.numpy()) for delta, y in steps.items()]
    return Study(
        name="method",
        title="From scores to the error-driven update",
        place="Figures 2 and 4, Sections 3.1, 3.2 and 3.4",
        text=_TEXT,
        figures=[
            SvgFigure(_overview(loss.item()), "Figure 2, drawn again: forward on the left, backward on the right."),
            SvgFigure(
                line_plot(series, x_label="x", y_label="f(x)"),
                "Figure 4, drawn again: the Heaviside step and the piecewise step functions of Table 1b.",
            ),
        ],
        verdicts=[
            Verdict(abs(loss.item() - float(terms.sum()) / positives) < 1e-12, "The AP-loss is <L, y> / |P| (1e-12)"),
            Verdict(
                bool((ours - gradient / positives).abs().max() < 1e-12),
                "Backpropagation of the library gives g_i / |P| of the pairwise update (1e-12)",
            ),
            Verdict(outside, "Beyond delta the piecewise step function is the Heaviside step"),
        ],
        numbers={"loss": loss.item(), "gradient": ours.tolist()},
    )


_TEXT = """
A detector scores every box. The difference transformation turns the scores into x_ij = s_j - s_i, the activation
function turns these into the primary terms L_ij of AP, and the label transformation into y_ij, which is 1 for a
positive i and a negative j. Their product, summed and divided by the number of positives, is the AP-loss. The step
inside L_ij has no useful derivative. The update is therefore driven by the error: the desired output is 0 where y_ij is
1, so x_ij should move by -L_ij y_ij, and backpropagation carries that to the scores and the weights.
"""


def pairwise_terms() -> torch.Tensor:
    """L_ij y_ij of the example, [5, 5], by Eqs. (1) to (3) literally."""
    differences = SCORES[None, :] - SCORES[:, None]
    steps = (differences >= 0).double()
    labels = ((TARGETS[:, None] == 1) & (TARGETS[None, :] == 0)).double()
    # 1 + sum over k != i: a box is not above itself, but H(0) = 1 stands for the 1.
    return steps / steps.sum(1, keepdim=True) * labels


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
        for column, (texts, colour) in enumerate([(forward, PALETTE[0]), (backward, PALETTE[1])]):
            for row, text in enumerate(texts):
                box = {"boxstyle": "round", "facecolor": "none", "edgecolor": colour}
                plot.axes.text(column, -row, text, ha="center", va="center", fontsize=7, bbox=box)
                if row:  # the forward pass goes down, the backward pass up
                    ends = ((column, -row + 0.27), (column, -row + 0.73))
                    plot.axes.annotate("", *(ends if column == 0 else ends[::-1]), arrowprops=arrow)
        plot.axes.set(xlim=(-0.55, 1.6), ylim=(-4.5, 0.5))
        plot.axes.set_axis_off()
    return plot.svg
