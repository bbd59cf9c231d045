"""Appendix 1: on linearly separable data the error-driven update stops after finitely many steps."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from aploss.losses import ap_loss
from aploss.plotting.plots import Series, scatter_plot
from aploss.reports.page import SvgFigure, Table
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
        """c of Appendix 1, margin / M: each step adds at least as much to <theta, theta*>."""
        first, is_positive = self.features[..., 0], self.labels == 1
        margin = (first[:, is_positive].amin(1) - first[:, ~is_positive].amax(1)).min()
        return float(margin) / len(self.labels)

    @property
    def spread(self) -> float:
        """C of Appendix 1: each step adds at most as much to ||theta||²."""
        return len(self.labels) ** 2 * float(torch.cdist(self.features, self.features).max()) ** 2

    @property
    def step_bound(self) -> float:
        """C / c²."""
        return self.spread / self.growth**2


class Trajectory(NamedTuple):
    """The result of an update that starts at theta = 0."""

    steps: int
    converged: bool  # all samples are ranked perfectly at the end
    within: bool  # c t <= <theta, theta*> and ||theta||² <= C t before every step t


def convergence(seed: int = 0) -> Study:
    """Trains linear models on random separable problems for at most C / c² steps, also with updates that must fail."""
    random = torch.Generator().manual_seed(seed)
    problems = [make_separable(random) for _ in range(PROBLEMS)]
    runs = {name: [descend(problem, update, random) for problem in problems] for name, update in UPDATES.items()}
    converged = {name: sum(run.converged for run in found) for name, found in runs.items()}
    within = {name: sum(run.within for run in found) for name, found in runs.items()}
    bounds = [problem.step_bound for problem in problems]
    points = [Series(name=name, x=bounds, y=[max(run.steps, 1) for run in found]) for name, found in runs.items()]
    rows = [[name, converged[name], within[name], max(run.steps for run in found)] for name, found in runs.items()]
    return Study(
        name="convergence",
        title="Error-driven AP-loss converges on separable data",
        place="Proposition 1 and Appendix 1",
        text=_TEXT,
        figures=[
            SvgFigure(
                scatter_plot(points, x_label="bound C / c²", y_label="steps", log_x=True, log_y=True, diagonal=True),
                "Steps until every sample is ranked perfectly, against the bound computed from the data. A run that "
                "reaches the diagonal was stopped there: it violates the bound.",
            )
        ],
        tables=[
            Table(
                columns=["update", "problems within C / c² steps", "within both inequalities", "most steps"],
                rows=rows,
                caption=f"Of {PROBLEMS} problems, with bounds of {min(bounds):.0f} to {max(bounds):.0f} steps.",
            )
        ],
        verdicts=[
            checked_verdict(
                f"All {PROBLEMS} problems reach an AP-loss of zero within C / c² steps",
                {name: count == PROBLEMS for name, count in converged.items()},
            ),
            checked_verdict(
                "Before every step t the weights satisfy c t <= <theta, theta*> and ||theta||² <= C t (||theta*|| = 1)",
                {name: count == PROBLEMS for name, count in within.items()},
            ),
        ],
        numbers={
            "bounds": bounds,
            "steps": {name: [run.steps for run in found] for name, found in runs.items()},
            "converged": converged,
            "within": within,
        },
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
    is_positive, least, most = problem.labels == 1, problem.growth, problem.spread
    within, converged = True, False
    for step in range(int(problem.step_bound) + 1):
        within &= float(theta[0]) >= least * step - 1e-9 and float(theta @ theta) <= most * step + 1e-9
        scores = problem.features @ theta
        # A tie is an error: H(0) = 1.
        errors = scores[:, ~is_positive].amax(1) >= scores[:, is_positive].amin(1)
        if converged := not errors.any():
            break
        wrong = errors.nonzero().flatten()
        chosen = int(wrong[torch.randint(len(wrong), (), generator=random)])
        theta = theta + update(theta, problem.features[chosen], problem.labels, random)
    return Trajectory(step, converged, within)


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
