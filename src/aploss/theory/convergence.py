"""Appendices 1, 2 and 4: where the error-driven update converges, gradient descent fails, and both are the same."""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from aploss.losses import ap_loss, error_driven, smooth_ap_loss
from aploss.plotting.plots import DOTTED, MUTED, LineStyle, Series, line_plot, line_style
from aploss.reports.page import SvgFigure, Table, Verdict
from aploss.theory.study import PAPER_UPDATE, Study, checked_verdict

PROBLEMS = 10
COMMON = 8.0  # the part that the features of all boxes share: no ranking sees it, a classifier without bias does
NOISE = 0.5  # of the features that do not separate


class SeparableProblem(NamedTuple):
    """Training samples ("images") that theta* = (1, 0, ..., 0) ranks perfectly."""

    features: Tensor  # [samples, M, D]
    labels: Tensor  # [M], of the boxes of every sample

    @property
    def growth(self) -> float:
        """c of Appendix 1, margin / M."""
        first, is_positive = self.features[..., 0], self.labels == 1
        margin = (first[:, is_positive].amin(1) - first[:, ~is_positive].amax(1)).min()
        return float(margin) / len(self.labels)

    @property
    def spread(self) -> float:
        """C of Appendix 1."""
        return len(self.labels) ** 2 * float(torch.cdist(self.features, self.features).max()) ** 2

    @property
    def step_bound(self) -> float:
        """C / c²."""
        return self.spread / self.growth**2


class Trajectory(NamedTuple):
    """The result of an update that starts at theta = 0."""

    steps: int
    converged: bool  # all samples are ranked perfectly at the end


def convergence(seed: int = 0) -> Study:
    """Trains linear models on random separable problems for at most C / c² steps, also with updates that must fail."""
    random = torch.Generator().manual_seed(seed)
    problems = [make_separable(random) for _ in range(PROBLEMS)]
    runs = {name: [descend(problem, update, random) for problem in problems] for name, update in UPDATES.items()}
    converged = {name: sum(run.converged for run in found) for name, found in runs.items()}
    bounds = [problem.step_bound for problem in problems]
    ends = [min(bounds), max(bounds)]
    points = [Series(name="bound", x=ends, y=ends, style=LineStyle(MUTED, DOTTED))]
    for place, (name, found) in enumerate(runs.items()):
        style, steps = line_style(name, place)._replace(dashes=""), [max(run.steps, 1) for run in found]
        points.append(Series(name=name, x=bounds, y=steps, style=style, markers=True))
    plot = line_plot(points, x_label="bound C / c²", y_label="steps", log_x=True, log_y=True)
    rows = [[name, converged[name], max(run.steps for run in found)] for name, found in runs.items()]
    columns = ["update", "problems within C / c² steps", "most steps"]
    caption = f"Of {PROBLEMS} problems, with bounds of {min(bounds):.0f} to {max(bounds):.0f} steps."
    return Study(
        name="convergence",
        title="Error-driven AP-loss converges on separable data",
        place="Proposition 1 and Appendix 1",
        text=_TEXT,
        figures=[
            SvgFigure(
                plot,
                "Steps until every sample is ranked perfectly, against the bound computed from the data. A run that "
                "reaches the diagonal was stopped there: it violates the bound.",
            )
        ],
        tables=[Table(columns=columns, rows=rows, caption=caption)],
        verdicts=[
            checked_verdict(
                f"All {PROBLEMS} problems reach an AP-loss of zero within C / c² steps",
                {name: count == PROBLEMS for name, count in converged.items()},
            )
        ],
    )


_TEXT = """
The model is linear, s = <f, theta>, and some theta* scores every positive above every negative by a margin. In each
step a training sample that still has an error is drawn, and theta moves by the error-driven update, the sum over pairs
of L_ij (f_i - f_j). Appendix 1 proves that this stops after at most C / c² steps with c = margin / (M ||theta*||) and
C = M² max ||f_i - f_j||², where M is the number of boxes in a sample. The problems are small enough for this bound to
be reached: every run may take C / c² steps and no more.

A check that any update passes shows nothing. The same check is therefore made with four other updates, each of which
must fail it: none, the update with its sign reversed, a random direction of the same length, and the gradient of
cross-entropy, which sees the common part of the features that a ranking ignores. The update of AUC-loss is not a
control: the same proof applies to it, and it passes.
"""


def make_separable(random: torch.Generator) -> SeparableProblem:
    """A random problem: 10-16 samples of 3-4 boxes, of which 1-2 are positives, with 6-10 features.

    The first feature separates with a margin of 1; the positives of the previous sample have the other features of the
    negatives, so that these tell nothing about the class.
    """
    samples, boxes, dimensions = (
        int(torch.randint(low, high, (), generator=random)) for low, high in ((10, 17), (3, 5), (6, 11))
    )
    positives = int(torch.randint(1, boxes // 2 + 1, (), generator=random))
    labels = (torch.arange(boxes) < positives).long()
    noise = NOISE * torch.randn(samples, positives, dimensions, dtype=torch.float64, generator=random)
    negatives = noise.roll(1, 0)[:, torch.arange(boxes - positives) % positives]
    features = torch.cat([noise, negatives], dim=1)
    features[..., 0] = COMMON + labels
    return SeparableProblem(features, labels)


def descend(problem: SeparableProblem, update: "Update", random: torch.Generator) -> Trajectory:
    """Updates theta until every sample is ranked perfectly, for at most C / c² steps."""
    theta = problem.features.new_zeros(problem.features.shape[-1])  # theta^(0) = 0
    is_positive = problem.labels == 1
    for step in range(int(problem.step_bound) + 1):
        scores = problem.features @ theta
        # A tie is an error: H(0) = 1.
        errors = scores[:, ~is_positive].amax(1) >= scores[:, is_positive].amin(1)
        if not errors.any():
            return Trajectory(step, True)
        wrong = errors.nonzero().flatten()
        chosen = int(wrong[torch.randint(len(wrong), (), generator=random)])
        theta = theta + update(theta, problem.features[chosen], problem.labels, random)
    return Trajectory(step, False)


def linear_ap_loss(theta: Tensor, features: Tensor, labels: Tensor) -> tuple[float, Tensor]:
    """AP-loss of the scores <f, theta>, and its error-driven gradient on theta."""
    scores = (features @ theta).requires_grad_()
    loss = ap_loss(scores, labels, delta=0, interpolated=False)
    (gradient,) = torch.autograd.grad(loss, scores)
    return loss.item(), features.T @ gradient  # sum_ij L_ij (f_j - f_i) / |P|


Update = Callable[[Tensor, Tensor, Tensor, torch.Generator], Tensor]


def _error_driven(theta: Tensor, features: Tensor, labels: Tensor, random: torch.Generator) -> Tensor:
    # The loss is divided by |P|, the update of Appendix 1 is not.
    return -linear_ap_loss(theta, features, labels)[1] * int(labels.sum())


def _random_direction(theta: Tensor, features: Tensor, labels: Tensor, random: torch.Generator) -> Tensor:
    direction = torch.randn(len(theta), dtype=theta.dtype, generator=random)
    length = torch.linalg.vector_norm(_error_driven(theta, features, labels, random))
    update: Tensor = direction * length / torch.linalg.vector_norm(direction)
    return update


def _cross_entropy(theta: Tensor, features: Tensor, labels: Tensor, random: torch.Generator) -> Tensor:
    # A learning rate at which gradient descent is stable; the length of the paper's update does not matter.
    rate = 1 / float(features.square().sum(1).max())
    update: Tensor = rate * (labels - torch.sigmoid(features @ theta)) @ features
    return update


UPDATES: dict[str, Update] = {
    PAPER_UPDATE: _error_driven,
    "no update": lambda theta, *_: torch.zeros_like(theta),
    "reversed sign": lambda *arguments: -_error_driven(*arguments),
    "random direction": _random_direction,
    "cross-entropy": _cross_entropy,
}


# Appendix 2: three samples, one negative and two positives, with two features.
FEATURES = torch.tensor([[0.0, 0.0], [1.0, 0.0], [-3.0, 1.0]], dtype=torch.float64)
LABELS = torch.tensor([0, 1, 1])
START = (3.0, 1.0)  # theta_1 large, theta_1 > theta_2 > 0


def smoothed_failure(seed: int = 0) -> Study:
    """Runs both algorithms from the same start; nothing is random, so the seed is not used."""
    runs = {
        "gradient descent on F": _descend_from_start(_smoothed_loss, 10.0, 3000),
        "error-driven update": _descend_from_start(lambda theta: linear_ap_loss(theta, FEATURES, LABELS), 1.0, 1000),
    }
    losses = {name: [loss for _, loss, _ in steps] for name, steps in runs.items()}
    smoothed, errors = losses.values()
    slopes = [slope.tolist() for _, _, slope in runs["gradient descent on F"]]
    curves = [Series(name=name, x=range(1, len(y) + 1), y=y) for name, y in losses.items()]
    curves.append(Series(name="1/6", x=[1, len(smoothed)], y=[1 / 6, 1 / 6], style=LineStyle(MUTED, DOTTED)))
    rows = [[name, len(steps) - 1, *steps[-1][0].tolist(), steps[-1][1]] for name, steps in runs.items()]
    return Study(
        name="smoothed-failure",
        title="Gradient descent fails on the smoothed AP-loss",
        place="Section 3.3 and Appendix 2",
        text=_SMOOTHED_TEXT,
        figures=[
            SvgFigure(
                line_plot(curves, x_label="step", y_label="loss", log_x=True),
                "Gradient descent settles at 1/6; the error-driven update reaches zero.",
            )
        ],
        tables=[Table(columns=["", "steps", "θ₁", "θ₂", "loss at the end"], rows=rows, digits=4)],
        verdicts=[
            Verdict(1 / 6 < smoothed[-1] < 1 / 6 + 1e-3, "Gradient descent approaches F = 1/6, not the minimum 0"),
            Verdict(all(a < b < 0 for a, b in slopes), "At every step ∂F/∂θ₁ < ∂F/∂θ₂ < 0, as Appendix 2 states"),
            Verdict(errors[-1] == 0, "The error-driven update reaches an AP-loss of exactly zero"),
        ],
    )


_SMOOTHED_TEXT = """
Three samples with two features, (0, 0) negative, (1, 0) and (-3, 1) positive, and a linear score s = θ₁ f₁ + θ₂ f₂.
They are separable: any 0 < θ₁ < θ₂/3 ranks both positives first.

Replace the step function by a sigmoid and the AP-loss becomes a smooth function F. From θ₁ > θ₂ > 0 with θ₁ large its
gradient increases both weights forever, θ₁ ahead: the second positive stays below the negative, and F goes to 1/6. The
error-driven update, from the same start and with the true step function, sees the one pair in the wrong order and
corrects it.
"""

LossAndGradient = Callable[[Tensor], tuple[float, Tensor]]


def _descend_from_start(function: LossAndGradient, rate: float, steps: int) -> list[tuple[Tensor, float, Tensor]]:
    """Weights, loss and gradient at every step until the loss is zero."""
    theta = torch.tensor(START, dtype=torch.float64)
    found: list[tuple[Tensor, float, Tensor]] = []
    while not found or (found[-1][1] > 0 and len(found) <= steps):
        found.append((theta, *function(theta)))
        theta = theta - rate * found[-1][2]
    return found


def _smoothed_loss(theta: Tensor) -> tuple[float, Tensor]:
    """F of Appendix 2 at weights theta [2], and its gradient."""
    theta = theta.clone().requires_grad_()
    value = smooth_ap_loss(FEATURES @ theta, LABELS)
    (slope,) = torch.autograd.grad(value, theta)
    return value.item(), slope


TOLERANCE = 1e-12  # of Appendix 4


def consistency(seed: int = 0) -> Study:
    """Compares the error-driven gradients with autograd on random inputs (Appendix 4)."""
    random = torch.Generator().manual_seed(seed)
    inputs = 4 * torch.randn(500, 7, dtype=torch.float64, generator=random)
    classes = torch.randint(7, (500,), generator=random)
    softmax_error = float(torch.sub(*cross_entropy_gradients(inputs, classes)).abs().max())
    margins = 2 * torch.randn(2000, dtype=torch.float64, generator=random)
    sides = torch.randint(2, (2000,), generator=random)
    hinge_error = float(torch.sub(*hinge_gradients(margins, sides)).abs().max())
    return Study(
        name="consistency",
        title="The error-driven update contains cross-entropy and hinge loss",
        place="Observation 1 and Appendix 4",
        text=_CONSISTENCY_TEXT,
        verdicts=[
            Verdict(softmax_error < TOLERANCE, f"Softmax gives the gradient of cross-entropy: to {softmax_error:.1e}"),
            Verdict(hinge_error < TOLERANCE, f"The loss-augmented step gives the hinge loss's: to {hinge_error:.1e}"),
        ],
    )


_CONSISTENCY_TEXT = """
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
