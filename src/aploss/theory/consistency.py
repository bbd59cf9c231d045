"""Appendix 4: the error-driven update contains the gradients of cross-entropy and hinge loss."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from aploss.losses import error_driven
from aploss.reports.page import Table, Verdict
from aploss.theory.study import Study

TOLERANCE = 1e-12


def consistency(seed: int = 0) -> Study:
    """Compares the error-driven gradients with autograd on random inputs."""
    random = torch.Generator().manual_seed(seed)
    inputs = 4 * torch.randn(500, 7, dtype=torch.float64, generator=random)
    classes = torch.randint(7, (500,), generator=random)
    softmax_error = float(torch.sub(*cross_entropy_gradients(inputs, classes)).abs().max())
    margins = 2 * torch.randn(2000, dtype=torch.float64, generator=random)
    sides = torch.randint(2, (2000,), generator=random)
    hinge_error = float(torch.sub(*hinge_gradients(margins, sides)).abs().max())
    rows = [
        ["softmax", "cross-entropy", len(inputs), f"{softmax_error:.1e}"],
        ["loss-augmented step", "hinge", len(margins), f"{hinge_error:.1e}"],
    ]
    return Study(
        name="consistency",
        title="The error-driven update contains cross-entropy and hinge loss",
        place="Observation 1 and Appendix 4",
        text=_TEXT,
        tables=[Table(columns=["activation", "loss", "cases", "largest difference"], rows=rows)],
        verdicts=[
            Verdict(softmax_error < TOLERANCE, "Softmax gives the gradient of cross-entropy (1e-12)"),
            Verdict(hinge_error < TOLERANCE, "The loss-augmented step gives the gradient of the hinge loss (1e-12)"),
        ],
        numbers={"softmax_error": softmax_error, "hinge_error": hinge_error},
    )


_TEXT = """
The update of Section 3.2 sets the gradient of an input to its error: current output minus desired output of the
activation. With softmax as activation and the one-hot label as desired output this is the gradient of cross-entropy;
with the loss-augmented step, and 1 desired for the right class, it is the gradient of the hinge loss. For these two
the field of errors is conservative, the gradient of some loss; for the activation of AP-loss it is not, which is why
AP-loss needs the update itself.
"""


def cross_entropy_gradients(inputs: Tensor, classes: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients on inputs [n, K]: of the error-driven update, and of cross-entropy."""
    desired = F.one_hot(classes, inputs.shape[-1]).to(inputs)
    ours = _gradient(lambda x: error_driven(x, x.softmax(-1), desired), inputs)
    return ours, _gradient(lambda x: F.cross_entropy(x, classes, reduction="sum"), inputs)


def hinge_gradients(inputs: Tensor, classes: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients on the pair (x_1, x_2) = (-x, x) [n, 2]: error-driven, and of the hinge loss."""
    pair = torch.stack([-inputs, inputs], -1)
    right = F.one_hot(classes, 2).to(pair)
    outputs = (pair >= 1).to(pair)  # H(x_i - 1)
    # The wrong class does not contribute: its own output is the desired one.
    desired = torch.where(right == 1, 1.0, outputs)
    ours = _gradient(lambda x: error_driven(x, outputs, desired), pair)
    return ours, _gradient(lambda x: (right * (1 - x).clamp(min=0)).sum(), pair)


def _gradient(function: Callable[[Tensor], Tensor], inputs: Tensor) -> Tensor:
    leaf = inputs.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(function(leaf), leaf)
    return gradient
