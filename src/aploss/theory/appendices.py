"""Appendices 1 to 4: where the error-driven update converges, the bounds on its loss, and what else it contains."""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import numba
import numpy as np
import torch
import torch.nn.functional as F
from scipy.optimize import linprog
from torch import Tensor

from aploss.losses import ap_loss, error_driven, smooth_ap_loss
from aploss.plotting.plots import DOTTED, MUTED, LineStyle, Series, line_plot, line_style
from aploss.reports.page import SvgFigure, Table, Verdict
from aploss.theory.study import Study, differentiate

PAPER_UPDATE = "error-driven"  # the paper's update; every other one is a control
COMMON = 8.0  # the part that the features of all boxes share: no ranking sees it, a classifier without bias does
NOISE = 0.5  # of the features that do not separate

Update = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]  # the paper's step, weights, features → step [D]


def updates_and_controls(positives: int, random: np.random.Generator) -> dict[str, Update]:
    """The paper's update of linear weights, and the controls; the first boxes of a sample are its positives."""

    def random_direction(step: np.ndarray, theta: np.ndarray, features: np.ndarray) -> np.ndarray:
        direction = random.normal(size=len(step))
        return np.asarray(direction * np.sqrt(step @ step / (direction @ direction)))

    def cross_entropy(step: np.ndarray, theta: np.ndarray, features: np.ndarray) -> np.ndarray:
        errors = 1 / (1 + np.exp(-(features @ theta)))
        errors[:positives] -= 1
        return np.asarray(-errors @ features / np.vdot(features, features))  # a learning rate at which it is stable

    return {
        PAPER_UPDATE: lambda step, *_: step,
        "no update": lambda step, *_: 0 * step,
        "reversed sign": lambda step, *_: -step,
        "random direction": random_direction,
        "cross-entropy": cross_entropy,
    }


def checked_verdict(claim: str, passes: Mapping[str, bool]) -> Verdict:
    """The verdict on a claim, from which updates pass its check: the paper's must, and every control must not."""
    controls = {name: passed for name, passed in passes.items() if name != PAPER_UPDATE}
    failing, passing = (
        ", ".join(f'"{name}"' for name, passed in controls.items() if passed is outcome) for outcome in (False, True)
    )
    if passes[PAPER_UPDATE] and passing:
        return Verdict(None, f"{claim}; {passing} passes the same check", "not informative")
    return Verdict(passes[PAPER_UPDATE], f"{claim}; violated, as it must be, by {failing}" if failing else claim)


PROBLEMS = 10  # a random direction solves a fifth of them by chance, cross-entropy a third


class SeparableProblem(NamedTuple):
    """Training samples ("images") that theta* = (1, 0, ..., 0) ranks perfectly; the positives come first."""

    features: np.ndarray  # [samples, M, D]
    positives: int  # of every sample

    @property
    def step_bound(self) -> float:
        """C / c² of Appendix 1, with c = margin / (M ||theta*||) and C = M² max ||f_i - f_j||²."""
        first, boxes = self.features[..., 0], self.features.shape[1]
        margin = (first[:, : self.positives].min(1) - first[:, self.positives :].max(1)).min()
        distances = self.features[:, :, None] - self.features[:, None]  # [samples, M, M, D]
        return float(boxes**4 * np.square(distances).sum(-1).max() / margin**2)


def convergence(seed: int = 0) -> Study:
    """Trains linear models on random separable problems for at most C / c² steps, also with updates that must fail."""
    random = np.random.default_rng(seed)
    problems = [make_separable(random) for _ in range(PROBLEMS)]
    runs: dict[str, list[int | None]] = {}
    for problem in problems:
        for name, update in updates_and_controls(problem.positives, random).items():
            runs.setdefault(name, []).append(steps_to_converge(problem, update, random))
    bounds = [problem.step_bound for problem in problems]
    ends = [min(bounds), max(bounds)]
    points = [Series(name="bound", x=ends, y=ends, style=LineStyle(MUTED, DOTTED))]
    rows = []
    for place, (name, found) in enumerate(runs.items()):
        steps = [bound if count is None else count for count, bound in zip(found, bounds, strict=True)]
        style = line_style(name, place)._replace(dashes="")
        points.append(Series(name=name, x=bounds, y=np.maximum(steps, 1), style=style, markers=True))
        rows.append([name, PROBLEMS - found.count(None), round(max(steps))])
    plot = line_plot(points, x_label="bound C / c²", y_label="steps", log_x=True, log_y=True)
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
                {name: None not in found for name, found in runs.items()},
            )
        ],
    )


_TEXT = """
The model is linear, s = <f, theta>, and some theta* scores every positive above every negative by a margin. In each
step a training sample that still has an error is drawn, and theta moves by the error-driven update, the sum over pairs
of L_ij (f_i - f_j). Appendix 1 proves that this stops after at most C / c² steps with c = margin / (M ||theta*||) and
C = M² max ||f_i - f_j||², where M is the number of boxes in a sample. The problems are small enough for this bound to
be reached: every run may take C / c² steps and no more.

A check that any update passes shows nothing, so that four controls must fail it: no update, the update with its sign
reversed, a random direction of the same length, and the gradient of cross-entropy, which sees the common part of the
features that a ranking ignores. The update of AUC-loss is not a control: the same proof applies to it, and it passes.
"""


def make_separable(random: np.random.Generator) -> SeparableProblem:
    """A random problem: 10-16 samples of 3-4 boxes, of which 1-2 are positives, with 6-10 features.

    The first feature separates with a margin of 1; the positives of the previous sample have the other features of the
    negatives, so that these tell nothing about the class.
    """
    samples, boxes, dimensions = random.integers((10, 3, 6), (17, 5, 11))
    positives = int(random.integers(1, boxes // 2 + 1))
    noise = random.normal(0, NOISE, size=(samples, positives, dimensions))
    negatives = np.roll(noise, 1, axis=0)[:, np.arange(boxes - positives) % positives]
    features = np.concatenate([noise, negatives], axis=1)
    features[..., 0] = COMMON + (np.arange(boxes) < positives)
    return SeparableProblem(features, positives)


def steps_to_converge(problem: SeparableProblem, update: Update, random: np.random.Generator) -> int | None:
    """Updates theta = 0 until every sample is ranked perfectly; None if C / c² steps are not enough."""
    features, positives = problem
    theta, labels = np.zeros(features.shape[-1]), (torch.arange(features.shape[1]) < positives).long()
    for step in range(int(problem.step_bound) + 1):
        scores = features @ theta
        # A tie is an error: H(0) = 1.
        errors = scores[:, positives:].max(1) >= scores[:, :positives].min(1)
        if not errors.any():
            return step
        sample = features[random.choice(errors.nonzero()[0])]
        # The loss is divided by |P|, the update of Appendix 1 is not.
        theta = theta + update(-positives * linear_ap_loss(theta, sample, labels)[1], theta, sample)
    return None


def linear_ap_loss(theta: np.ndarray, features: np.ndarray, labels: Tensor) -> tuple[float, np.ndarray]:
    """AP-loss of the scores <f, theta>, and its error-driven gradient on theta."""
    scores = torch.from_numpy(features @ theta)
    loss, gradient = differentiate(lambda s: ap_loss(s, labels, delta=0, interpolated=False), scores)
    return loss, gradient.numpy() @ features  # sum_ij L_ij (f_j - f_i) / |P|


# Appendix 2: three samples, one negative and two positives, with two features.
FEATURES = np.array([[0.0, 0.0], [1.0, 0.0], [-3.0, 1.0]])
LABELS = torch.tensor([0, 1, 1])
START = (3.0, 1.0)  # theta_1 large, theta_1 > theta_2 > 0


def smoothed_failure(seed: int = 0) -> Study:
    """Runs both algorithms and two controls from the same start; nothing is random, so the seed is not used."""
    ap_loss_of = partial(linear_ap_loss, features=FEATURES, labels=LABELS)
    descent = _descend(_smoothed_loss, 10.0, 3000)
    runs = {
        "gradient descent on F": descent,
        PAPER_UPDATE: _descend(ap_loss_of, 1.0, 1000),
        "no update": _descend(ap_loss_of, 0.0, 1000),
        "reversed sign": _descend(ap_loss_of, -1.0, 1000),
    }
    ends = {name: ap_loss_of(steps[-1][0])[0] for name, steps in runs.items()}
    curves = [
        Series(name=name, x=range(1, len(steps) + 1), y=[loss for _, loss, _ in steps])
        for name, steps in list(runs.items())[:2]
    ]
    curves.append(Series(name="1/6", x=[1, len(descent)], y=[1 / 6, 1 / 6], style=LineStyle(MUTED, DOTTED)))
    rows = [[name, len(steps) - 1, *steps[-1][0], steps[-1][1], ends[name]] for name, steps in runs.items()]
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
        tables=[Table(columns=["", "steps", "θ₁", "θ₂", "its loss at the end", "AP-loss"], rows=rows, digits=4)],
        verdicts=[
            Verdict(1 / 6 < descent[-1][1] < 1 / 6 + 1e-3, "Gradient descent approaches F = 1/6, not the minimum 0"),
            Verdict(
                all(slope[0] < slope[1] < 0 for _, _, slope in descent),
                "At every step ∂F/∂θ₁ < ∂F/∂θ₂ < 0, as Appendix 2 states",
            ),
            checked_verdict(
                "The error-driven update reaches an AP-loss of exactly zero",
                {name: loss == 0 for name, loss in ends.items()},
            ),
        ],
    )


_SMOOTHED_TEXT = """
Three samples with two features, (0, 0) negative, (1, 0) and (-3, 1) positive, and a linear score s = θ₁ f₁ + θ₂ f₂.
They are separable: any 0 < θ₁ < θ₂/3 ranks both positives first.

Replace the step function by a sigmoid and the AP-loss becomes a smooth function F. From θ₁ > θ₂ > 0 with θ₁ large its
gradient increases both weights forever, θ₁ ahead: the second positive stays below the negative, and F goes to 1/6. The
error-driven update, from the same start and with the true step function, sees the one pair in the wrong order and
corrects it. A random direction is not a control here: in a plane a random walk ends in the right cone by chance.
"""

Descent = list[tuple[np.ndarray, float, np.ndarray]]  # weights, loss and gradient at every step


def _descend(function: Callable[[np.ndarray], tuple[float, np.ndarray]], rate: float, steps: int) -> Descent:
    """Follows a gradient from the start until the loss is zero."""
    theta, found = np.array(START), Descent()
    while not found or (found[-1][1] > 0 and len(found) <= steps):
        found.append((theta, *function(theta)))
        theta = theta - rate * found[-1][2]
    return found


def _smoothed_loss(theta: np.ndarray) -> tuple[float, np.ndarray]:
    """F of Appendix 2 at weights theta [2], and its gradient."""
    features = torch.from_numpy(FEATURES)
    value, slope = differentiate(lambda weights: smooth_ap_loss(features @ weights, LABELS), torch.from_numpy(theta))
    return value, slope.numpy()


# Appendix 3: one negative lies halfway between two positives of a sample.
DELTA = 1.0
POSITIVES, NEGATIVES, DIMENSIONS = 16, 96, 16
OFFLINE_STEPS = 100_000
ONLINE_STEPS, ONLINE_SAMPLES = 50_000, 8
Runs = dict[str, tuple[np.ndarray, np.ndarray]]  # update → its mean AP-loss and mean l^(t)(u) of the first T steps, [T]


def inseparable(seed: int = 0) -> Study:
    """Runs the modified algorithm on one sample and on changing samples, also with updates that must fail."""
    random = np.random.default_rng(seed)
    one, several = make_inseparable(random, 1), make_inseparable(random, ONLINE_SAMPLES)
    offline = run_updates(one, np.zeros(OFFLINE_STEPS, np.int64), random)
    online = run_updates(several, random.integers(ONLINE_SAMPLES, size=ONLINE_STEPS), random)
    first, second = offline_bounds(one, OFFLINE_STEPS)
    transient = _transient(several, 1.0) / np.arange(1, ONLINE_STEPS + 1)
    accumulated = {name: 8 / DELTA * surrogate + transient for name, (_, surrogate) in online.items()}  # A3.2, over T
    rows = [
        [name, offline[name][0][-1], first[-1], second[-1], online[name][0][-1], accumulated[name][-1]]
        for name in offline
    ]
    columns = ["update", "mean loss, one sample", "bound 1", "bound 2", "mean loss, changing samples", "bound of A3.2"]
    return Study(
        name="inseparable",
        title="AP-loss is bounded on inseparable data",
        place="Section 3.3 and Appendix 3",
        text=_INSEPARABLE_TEXT,
        figures=[
            SvgFigure(
                _plot_bounds(offline, {"bound 1": first, "bound 2": second}),
                "One sample (A3.3). The bounds fall with 1/T to the loss that the best linear model leaves.",
            ),
            SvgFigure(
                _plot_bounds(online, {"bound of the error-driven update": accumulated[PAPER_UPDATE]}),
                "A sample drawn in every step (A3.2).",
            ),
        ],
        tables=[Table(columns=columns, rows=rows, caption="At the last step.")],
        verdicts=[
            *(
                checked_verdict(
                    f"The mean AP-loss on one sample stays below bound {number} of A3.3 for every T",
                    {name: bool((losses <= bound).all()) for name, (losses, _) in offline.items()},
                )
                for number, bound in ((1, first), (2, second))
            ),
            checked_verdict(
                "The accumulated AP-loss over changing samples stays below the bound of A3.2 for every T",
                {name: bool((losses <= accumulated[name]).all()) for name, (losses, _) in online.items()},
            ),
            Verdict(not any(map(is_separable, [*one, *several])), "No linear model ranks any of the samples perfectly"),
        ],
    )


_INSEPARABLE_TEXT = f"""
No linear model ranks these samples perfectly: one negative lies halfway between two positives. Appendix 3 changes the
algorithm slightly: the numerator of L_ij takes the piecewise step function, the denominator keeps the Heaviside step.
Every update is then a gradient step on a convex surrogate l, and with the step size delta / R² the accumulated AP-loss
is bounded by what any fixed weights u achieve. A3.2 bounds the sum over samples that change from step to step by
8/delta times the sum of l(u), plus 4 R² ||u||² / delta². For a single sample A3.3 replaces l(u) by Z(u), the largest
sum over the negatives of Q(x_ij(u)) for a positive i.

A sample has {POSITIVES} positives and {NEGATIVES} negatives. With all scores equal the AP-loss is
{NEGATIVES / (POSITIVES + NEGATIVES):.2f}, which is above all bounds at the last step, so that the bounds can be
violated, and the four controls of Appendix 1 must violate them; cross-entropy ranks the boxes the wrong way round,
because most of them are negatives. The bounds hold for every u; u is along the feature that separates, and the offline
bounds take its best length for every T. The update of AUC-loss is not a control: it ranks these samples well and stays
below the offline bounds, too.
"""


def make_inseparable(random: np.random.Generator, samples: int) -> np.ndarray:
    """Features [samples, P + N, D], positives first, that no linear model ranks perfectly.

    The first feature separates positives from negatives by 1. Every positive shares its other features with N / P
    negatives, so that these tell nothing about the class. One negative is moved to the midpoint of two positives: a
    linear score cannot be below both of them.
    """
    features = random.normal(0, NOISE, size=(samples, POSITIVES, DIMENSIONS))
    features = np.concatenate([features, features.repeat(NEGATIVES // POSITIVES, axis=1)], axis=1)
    features[..., 0] = random.normal(COMMON, 0.01, size=features.shape[:2])
    features[:, :POSITIVES, 0] += 1
    features[:, POSITIVES] = features[:, :2].mean(axis=1)
    return features


def run_updates(features: np.ndarray, order: np.ndarray, random: np.random.Generator) -> Runs:
    """Runs the paper's update and each control over the samples in the given order [T], from theta = 0."""
    sums, rate, runs = pair_sums(features, 1.0), DELTA / spectral_norm(features) ** 2, {}
    for name, update in updates_and_controls(POSITIVES, random).items():
        theta, values = np.zeros(features.shape[-1]), []
        for sample in order:
            loss, comparator, gradient = surrogate_step(theta, features[sample], sums[sample])
            values.append((loss, comparator))
            theta = theta + update(-rate * gradient, theta, features[sample])
        losses, comparators = np.cumsum(values, axis=0).T / np.arange(1, len(order) + 1)
        runs[name] = losses, comparators
    return runs


@numba.njit(cache=True)
def surrogate_step(theta, features, sums):  # type: ignore[no-untyped-def]
    """AP-loss at theta, the surrogate loss l(u) for A_i(u) = ``sums``, and the surrogate's gradient on theta.

    Compiled: interpreted, it takes ten times as long.
    """
    scores = features @ theta
    loss, comparator, errors = 0.0, 0.0, np.zeros(len(scores))
    for i in range(POSITIVES):
        above = (scores[POSITIVES:] >= scores[i]).sum()
        rank = above + (scores[:POSITIVES] >= scores[i]).sum()  # 1 + sum over k != i of H(x_ik)
        weight = 1 / (rank * POSITIVES)
        loss += above * weight
        comparator += sums[i] * weight
        for j in range(POSITIVES, len(scores)):
            term = weight * min(max((scores[j] - scores[i]) / (2 * DELTA) + 0.5, 0.0), 1.0)  # L~_ij / |P|
            errors[i] -= term
            errors[j] += term
    return loss, comparator, errors @ features


def step_integral(x: np.ndarray) -> np.ndarray:
    """Q(x), the integral of the piecewise step function up to x."""
    return np.asarray(np.where(x > DELTA, x, np.clip(x + DELTA, 0, None) ** 2 / (4 * DELTA)))


def pair_differences(features: np.ndarray) -> np.ndarray:
    """f_j - f_i for every positive i and negative j, [..., P, N, D]."""
    return np.asarray(features[..., None, POSITIVES:, :] - features[..., :POSITIVES, None, :])


def pair_sums(features: np.ndarray, length: float) -> np.ndarray:
    """A_i(u), the sum of Q(x_ij(u)) over the negatives j, [..., P], for u of a length along the first feature."""
    return np.asarray(step_integral(length * pair_differences(features)[..., 0]).sum(-1))


def spectral_norm(features: np.ndarray) -> float:
    """R: the largest norm of dX/dtheta over the samples, for the pairs of a positive and a negative."""
    pairs = pair_differences(features).reshape(len(features), -1, features.shape[-1])
    return float(np.linalg.norm(pairs, ord=2, axis=(1, 2)).max())


def is_separable(features: np.ndarray) -> bool:
    """Whether some theta has x_ij <= -1 for every pair, decided by a linear program."""
    pairs = pair_differences(features).reshape(-1, features.shape[-1])
    program = linprog(np.zeros(pairs.shape[1]), A_ub=pairs, b_ub=-np.ones(len(pairs)), bounds=(None, None))
    return bool(program.status == 0)


def offline_bounds(features: np.ndarray, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """The two bounds of A3.3 on the mean AP-loss after T = 1 ... ``steps`` steps, for the best length of u."""
    bounds = []
    for length in np.linspace(0.5, 1.2, 15):
        scaled = 8 / DELTA * float(pair_sums(features, length).max())  # 8/delta Z(u)
        levels = np.array([(math.log(POSITIVES) + 1) / POSITIVES * scaled, scaled / (1 + scaled)])
        bounds.append(levels[:, None] + _transient(features, length) / np.arange(1, steps + 1))
    first, second = np.min(bounds, axis=0)
    return first, second


def _transient(features: np.ndarray, length: float) -> float:
    """4 R² ||u - theta^(1)||² / delta², for u of this length."""
    return 4 * spectral_norm(features) ** 2 * length**2 / DELTA**2


def _plot_bounds(runs: Runs, bounds: dict[str, np.ndarray]) -> str:
    curves = {**{name: losses for name, (losses, _) in runs.items()}, **bounds}
    shown = np.unique(np.geomspace(1, len(curves[PAPER_UPDATE]), 200).astype(int)) - 1
    series = [Series(name=name, x=shown + 1, y=values[shown]) for name, values in curves.items()]
    return line_plot(series, x_label="steps T", y_label="mean AP-loss", log_x=True, y_range=(0, 1.5))


TOLERANCE = 1e-12  # of Appendix 4


def consistency(seed: int = 0) -> Study:
    """Compares the error-driven gradients with autograd on random inputs (Appendix 4)."""
    random = torch.Generator().manual_seed(seed)
    inputs = 4 * torch.randn(500, 7, dtype=torch.float64, generator=random)
    classes = torch.randint(7, (500,), generator=random)
    one_hot = F.one_hot(classes, 7).to(inputs)
    _, update = differentiate(lambda x: error_driven(x, x.softmax(-1), one_hot), inputs)
    _, gradient = differentiate(lambda x: F.cross_entropy(x, classes, reduction="sum"), inputs)
    softmax_error = float((update - gradient).abs().max())

    margins = 2 * torch.randn(2000, dtype=torch.float64, generator=random)
    pair = torch.stack([-margins, margins], -1)  # (x_1, x_2) = (-x, x), [n, 2]
    right = F.one_hot(torch.randint(2, (2000,), generator=random), 2).to(pair)
    outputs = (pair >= 1).to(pair)  # H(x_i - 1)
    # The wrong class does not contribute: its own output is the desired one.
    desired = torch.where(right == 1, 1.0, outputs)
    _, update = differentiate(lambda x: error_driven(x, outputs, desired), pair)
    _, gradient = differentiate(lambda x: (right * (1 - x).clamp(min=0)).sum(), pair)
    hinge_error = float((update - gradient).abs().max())
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
