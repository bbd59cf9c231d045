"""Appendix 1: on linearly separable data the error-driven update ends after finitely many steps."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from aploss.losses import ap_loss
from aploss.plotting.plots import Series, line_plot, scatter_plot
from aploss.reports.page import SvgFigure, Table, Verdict
from aploss.theory.study import Study

PROBLEMS = 120
MAX_STEPS = 20_000


@dataclass(frozen=True)
class SeparableProblem:
    """Training samples ("images"), each with features [M, D] and labels [M] of its boxes.

    ``direction`` (theta*) puts every positive above every negative by at least ``margin``.
    """

    features: list[Tensor]
    labels: list[Tensor]
    direction: Tensor
    margin: float


def convergence(seed: int = 0) -> Study:
    """Trains linear models on random separable problems and compares the steps with C / c²."""
    random = torch.Generator().manual_seed(seed)
    problems = [make_separable(random) for _ in range(PROBLEMS)]
    curves = [run_to_zero(problem, random) for problem in problems]
    steps = np.array([len(curve) - 1 for curve in curves])
    bounds = np.array([step_bound(problem) for problem in problems])
    ended = all(curve[-1] == 0 for curve in curves)
    points = [Series(name="a random problem", x=bounds, y=np.maximum(steps, 1))]
    longest = [
        Series(name=f"problem {n}", x=range(len(curve)), y=curve)
        for n, curve in enumerate(sorted(curves, key=len)[-3:], start=1)
    ]
    row = [PROBLEMS, float(np.median(steps)), int(steps.max()), float((bounds / np.maximum(steps, 1)).min())]
    scatter = scatter_plot(
        points, x_label="bound C / c²", y_label="steps to zero loss", log_x=True, log_y=True, diagonal=True
    )
    return Study(
        name="convergence",
        title="Error-driven AP-loss converges on separable data",
        place="Proposition 1 and Appendix 1",
        text=_TEXT,
        figures=[
            SvgFigure(
                scatter,
                "Steps that were needed against the bound computed from the data. Every point lies "
                "below the diagonal, most by orders of magnitude: the proof counts worst cases.",
            ),
            SvgFigure(
                line_plot(longest, x_label="step", y_label="AP-loss, mean of all samples"),
                "The three problems that took longest. The loss may rise on the way, as it does "
                "for the perceptron; it still ends at zero.",
            ),
        ],
        tables=[
            Table(columns=["problems", "median steps", "most steps", "smallest bound / steps"], rows=[row], digits=0)
        ],
        verdicts=[
            Verdict(ended, f"All {PROBLEMS} problems end with an AP-loss of exactly zero."),
            Verdict(bool((steps <= bounds).all()), "No problem needs more steps than C / c²."),
        ],
        numbers={"steps": steps.tolist(), "bounds": bounds.tolist()},
    )


_TEXT = """
The model is linear, s = <f, theta>, and some theta* puts every positive above every negative by a margin. In each step
a training sample that still makes an error is drawn, and theta moves by the error-driven update, the sum over pairs of
L_ij (f_i - f_j), without any learning rate. Appendix 1 proves that this stops after at most C / c² steps with c =
margin / (M ||theta*||) and C = M² max ||f_i - f_j||², where M is the largest number of boxes in a sample.

AP-loss is neither convex nor quasiconvex even here, so that no such statement holds for gradient descent on a smoothed
version: see the study `smoothed-failure`.
"""


def make_separable(random: torch.Generator) -> SeparableProblem:
    """A random problem: 1-6 samples of 5-40 boxes with 2-12 features."""
    limits = (1, 7), (5, 41), (2, 13)
    samples, boxes, dimensions = (int(torch.randint(*limit, (), generator=random)) for limit in limits)
    direction = torch.randn(dimensions, dtype=torch.float64, generator=random)
    direction /= direction.norm()
    features, labels = [], []
    for _ in range(samples):
        f = torch.randn(boxes, dimensions, dtype=torch.float64, generator=random)
        positives = int(torch.randint(1, boxes, (), generator=random))
        label = torch.zeros(boxes, dtype=torch.int64)
        label[(f @ direction).topk(positives).indices] = 1
        features.append(f + 0.05 * label[:, None] * direction)  # a margin that is not tiny
        labels.append(label)
    margin = min(
        float((f @ direction)[t == 1].min() - (f @ direction)[t == 0].max())
        for f, t in zip(features, labels, strict=True)
    )
    return SeparableProblem(features, labels, direction, margin)


def step_bound(problem: SeparableProblem) -> float:
    """C / c² of Appendix 1."""
    most_boxes = max(len(f) for f in problem.features)  # M
    c = problem.margin / (most_boxes * float(problem.direction.norm()))
    farthest = max(float(torch.cdist(f, f).max()) for f in problem.features)
    return most_boxes**2 * farthest**2 / c**2


def run_to_zero(problem: SeparableProblem, random: torch.Generator, max_steps: int = MAX_STEPS) -> list[float]:
    """The mean AP-loss before every step; ends with 0, or after ``max_steps``."""
    theta = torch.zeros_like(problem.direction)  # theta^(0) = 0
    curve = []
    for _ in range(max_steps):
        samples = zip(problem.features, problem.labels, strict=True)
        losses, gradients = zip(*(linear_ap_loss(theta, f, t) for f, t in samples), strict=True)
        curve.append(sum(losses) / len(losses))
        erring = [n for n, loss in enumerate(losses) if loss > 0]
        if not erring:
            break
        chosen = erring[int(torch.randint(len(erring), (), generator=random))]
        # The loss is divided by |P|, the update of Appendix 1 is not.
        theta = theta - gradients[chosen] * int(problem.labels[chosen].sum())
    return curve


def linear_ap_loss(theta: Tensor, features: Tensor, labels: Tensor) -> tuple[float, Tensor]:
    """AP-loss of the scores <f, theta>, and its error-driven gradient on theta."""
    scores = (features @ theta).requires_grad_()
    loss = ap_loss(scores, labels, delta=0, interpolated=False)
    (gradient,) = torch.autograd.grad(loss, scores)
    return loss.item(), features.T @ gradient  # sum_ij L_ij (f_j - f_i) / |P|
