"""Figure 1: easy negatives raise accuracy and dominate classification losses, but not AP."""

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from aploss.losses import ap_loss, auc_loss, focal_loss
from aploss.plotting.plots import Series, line_plot
from aploss.reports.page import SvgFigure, Table, Verdict
from aploss.theory.study import Study

EASY = (0, *(10**k for k in range(1, 7)))
POSITIVES, HARD = 30, 60

Loss = Callable[[Tensor, Tensor], Tensor]
LOSSES: dict[str, Loss] = {
    "ce": lambda s, t: F.binary_cross_entropy_with_logits(s, t.to(s), reduction="sum") / t.sum(),
    "focal": focal_loss,
    "auc": auc_loss,
    "ap": ap_loss,
}
NAMES = {"ce": "cross-entropy", "focal": "focal loss", "auc": "AUC-loss", "ap": "AP-loss"}


def imbalance(seed: int = 0) -> Study:
    """Adds easy negatives to a fixed hard problem; looks at the metrics and at the gradients."""
    random = torch.Generator().manual_seed(seed)
    targets = torch.tensor([1] * POSITIVES + [0] * HARD)
    scores = torch.randn(POSITIVES + HARD, dtype=torch.float64, generator=random) + 0.7 * targets - 0.5
    easy = -5 + torch.rand(max(EASY), dtype=torch.float64, generator=random)
    metrics = [metrics_with(scores, targets, easy[:n]) for n in EASY]
    gradients = {name: [gradients_with(loss, scores, targets, easy[:n]) for n in EASY] for name, loss in LOSSES.items()}
    share = {name: [on_easy / (on_easy + on_hard) for on_hard, on_easy in sums] for name, sums in gradients.items()}
    strength = {name: [on_hard / sums[0][0] for on_hard, _ in sums] for name, sums in gradients.items()}
    accuracy, precision = np.array(metrics).T
    x = EASY[1:]  # the axis is logarithmic; the row without easy negatives is in the table
    curves = {"accuracy": accuracy, "average precision": precision}
    shown = [Series(name=name, x=x, y=values[1:], markers=True) for name, values in curves.items()]
    rows = [[n, accuracy[k], precision[k], *(share[name][k] for name in LOSSES)] for k, n in enumerate(EASY)]
    return Study(
        name="imbalance",
        title="What easy negatives do to metrics and losses",
        place="Figure 1 and Section 1",
        text=_TEXT,
        figures=[
            SvgFigure(
                line_plot(shown, x_label="easy negatives added", y_label="metric", log_x=True, y_range=(0, 1.03)),
                "The same mistakes at the top of the ranking: accuracy forgets them, AP does not.",
            ),
            SvgFigure(
                _loss_plot(share, "share of easy negatives"),
                "Easy negatives take over cross-entropy's gradient, and a part of focal loss's; the ranking losses do "
                "not move them at all.",
            ),
            SvgFigure(
                _loss_plot(strength, "gradient on hard boxes", log_y=True),
                "What is left for the boxes that are ranked wrongly. AUC-loss divides by the number of negatives: it "
                "fades. AP-loss does not change.",
            ),
        ],
        tables=[
            Table(
                columns=["easy negatives", "accuracy", "AP", *(NAMES[n] for n in LOSSES)],
                rows=rows,
                caption="Last columns: share of the gradient that easy negatives get.",
            )
        ],
        verdicts=_verdicts(accuracy, precision, share, strength),
        numbers={
            "easy": EASY,
            "accuracy": accuracy.tolist(),
            "average_precision": precision.tolist(),
            "easy_share": share,
            "strength_on_hard": strength,
        },
    )


_TEXT = f"""
A batch with {POSITIVES} positives and {HARD} hard negatives whose scores overlap, as at the top of a detector's
ranking, and below them more and more easy negatives far from every positive, as a detector has by the tens of
thousands. Nothing about the detections changes.

For every loss the gradient on the scores is computed. First: which share of it, in absolute value, goes to the easy
negatives? Second: how strong is what remains on the positives and hard negatives, relative to a batch without easy
ones?
"""


def metrics_with(scores: Tensor, targets: Tensor, easy: Tensor) -> tuple[float, float]:
    """Accuracy at a threshold of 0, and average precision, with the easy negatives added."""
    scores, targets = torch.cat([scores, easy]), F.pad(targets, (0, len(easy)))
    accuracy = ((scores > 0) == (targets == 1)).double().mean()
    return float(accuracy), 1 - float(ap_loss(scores, targets, delta=0, interpolated=False))


def gradients_with(loss: Loss, scores: Tensor, targets: Tensor, easy: Tensor) -> tuple[float, float]:
    """Sums of the absolute gradient of a loss over the hard boxes and over the easy negatives added."""
    leaf = torch.cat([scores, easy]).requires_grad_()
    (gradient,) = torch.autograd.grad(loss(leaf, F.pad(targets, (0, len(easy)))), leaf)
    strength = gradient.abs()
    return float(strength[: len(scores)].sum()), float(strength[len(scores) :].sum())


def _verdicts(
    accuracy: np.ndarray, precision: np.ndarray, share: dict[str, list[float]], strength: dict[str, list[float]]
) -> list[Verdict]:
    return [
        Verdict(bool(accuracy[-1] > 0.999), "Accuracy ends above 0.999."),
        Verdict(bool(np.ptp(precision) == 0), "AP does not change at all."),
        Verdict(share["ce"][-1] > 0.9, "Easy negatives end with over 90 % of cross-entropy's gradient."),
        Verdict(
            share["focal"][-2] < 0.1 < share["focal"][-1],
            "Focal loss delays it: they get under 10 % at 100,000, over 10 % at 1,000,000.",
        ),
        Verdict(max(share["ap"] + share["auc"]) == 0, "Ranking losses give them no gradient."),
        Verdict(strength["auc"][-1] < 1e-3, "AUC-loss on hard boxes fades to under 1/1000."),
        Verdict(
            max(abs(s - 1) for s in strength["ap"]) < 1e-12, "AP-loss keeps its gradient on the hard boxes (1e-12)."
        ),
    ]


def _loss_plot(values: dict[str, list[float]], label: str, *, log_y: bool = False) -> str:
    series = [
        Series(name="cross-entropy" if name == "ce" else name, x=EASY[1:], y=y[1:], markers=True)
        for name, y in values.items()
    ]
    return line_plot(series, x_label="easy negatives added", y_label=label, log_x=True, log_y=log_y)
