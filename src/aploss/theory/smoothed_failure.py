"""Appendix 2: gradient descent fails on a smoothed AP-loss, the error-driven update does not."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from aploss.losses import smooth_ap_loss
from aploss.plotting.plots import Series, line_plot
from aploss.reports.page import SvgFigure, Table, Verdict
from aploss.theory.convergence import linear_ap_loss
from aploss.theory.study import Study

# The three samples of Appendix 2: one negative, two positives, two features.
FEATURES = torch.tensor([[0.0, 0.0], [1.0, 0.0], [-3.0, 1.0]], dtype=torch.float64)
LABELS = torch.tensor([0, 1, 1])
START = (3.0, 1.0)  # theta_1 large, theta_1 > theta_2 > 0


def smoothed_failure(seed: int = 0) -> Study:
    """Runs both algorithms from the same start; nothing is random, so the seed is not used."""
    path, values, slopes = descend(smoothed_loss, 10.0, 3000)
    error_path, errors, _ = descend(lambda theta: linear_ap_loss(theta, FEATURES, LABELS), 1.0, 1000)
    always = bool(((slopes[:, 0] < slopes[:, 1]) & (slopes[:, 1] < 0)).all())
    losses = {"F by gradient descent": values, "AP-loss by error-driven update": errors}
    curves = [Series(name=name, x=range(1, len(y) + 1), y=y) for name, y in losses.items()]
    rows = [
        ["gradient descent on F", len(values) - 1, *path[-1].tolist(), values[-1]],
        ["error-driven update", len(errors) - 1, *error_path[-1].tolist(), errors[-1]],
    ]
    return Study(
        name="smoothed-failure",
        title="Gradient descent fails on the smoothed AP-loss",
        place="Section 3.3 and Appendix 2",
        text=_TEXT,
        figures=[
            SvgFigure(
                line_plot(curves, x_label="step", y_label="loss", log_x=True, level=("1/6", 1 / 6)),
                "Gradient descent settles at 1/6; the error-driven update reaches zero.",
            )
        ],
        tables=[Table(columns=["", "steps", "θ₁", "θ₂", "loss at the end"], rows=rows, digits=4)],
        verdicts=[
            Verdict(
                bool(abs(values[-1] - 1 / 6) < 1e-3 and values[-1] > 1 / 6),
                "Gradient descent approaches F = 1/6 from above, not the minimum 0",
            ),
            Verdict(always, "At every step ∂F/∂θ₁ < ∂F/∂θ₂ < 0, as Appendix 2 states"),
            Verdict(errors[-1] == 0, "The error-driven update reaches an AP-loss of exactly zero"),
        ],
        numbers={
            "descent": {"theta": path[-1].tolist(), "loss": values[-1], "steps": len(values) - 1},
            "error_driven": {"theta": error_path[-1].tolist(), "loss": errors[-1], "steps": len(errors) - 1},
        },
    )


_TEXT = """
Three samples with two features, (0, 0) negative, (1, 0) and (-3, 1) positive, and a linear score s = θ₁ f₁ + θ₂ f₂.
They are separable: any 0 < θ₁ < θ₂/3 ranks both positives first.

Replace the step function by a sigmoid and the AP-loss becomes a smooth function F. From θ₁ > θ₂ > 0 with θ₁ large its
gradient increases both weights forever, θ₁ ahead: the second positive stays below the negative, and F goes to 1/6. The
error-driven update, from the same start and with the true step function, sees the one pair in the wrong order and
corrects it.
"""


def descend(function: Callable[[Tensor], tuple[float, Tensor]], rate: float, steps: int) -> tuple[Any, ...]:
    """Descends until the loss is zero: weights [T + 1, 2], losses [T + 1], gradients [T + 1, 2]."""
    theta = torch.tensor(START, dtype=torch.float64)
    rows: list[tuple[list[float], float, list[float]]] = []
    while not rows or (rows[-1][1] > 0 and len(rows) <= steps):
        loss, slope = function(theta)
        rows.append((theta.tolist(), loss, slope.tolist()))
        theta = theta - rate * slope
    path, losses, slopes = zip(*rows, strict=True)
    return np.array(path), losses, np.array(slopes)


def smoothed_loss(theta: Tensor) -> tuple[float, Tensor]:
    """F of Appendix 2 at weights theta [2], and its gradient."""
    theta = theta.clone().requires_grad_()
    value = smooth_ap_loss(FEATURES @ theta, LABELS)
    (slope,) = torch.autograd.grad(value, theta)
    return value.item(), slope
