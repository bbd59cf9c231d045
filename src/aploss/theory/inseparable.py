"""Appendix 3: on inseparable data the mean AP-loss stays below bounds set by the best linear model."""

import math

import numba
import numpy as np
from scipy.optimize import linprog

from aploss.plotting.plots import Series, line_plot
from aploss.reports.page import SvgFigure, Table, Verdict
from aploss.theory.study import COMMON, NOISE, PAPER_UPDATE, Study, checked_verdict, updates_and_controls

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
    accumulated = {name: online_bound(surrogate, several) for name, (_, surrogate) in online.items()}
    rows = [
        [name, offline[name][0][-1], first[-1], second[-1], online[name][0][-1], accumulated[name][-1]]
        for name in offline
    ]
    columns = ["update", "mean loss, one sample", "bound 1", "bound 2", "mean loss, changing samples", "bound of A3.2"]
    return Study(
        name="inseparable",
        title="AP-loss is bounded on inseparable data",
        place="Section 3.3 and Appendix 3",
        text=_TEXT,
        figures=[
            SvgFigure(
                _plot(offline, {"bound 1": first, "bound 2": second}),
                "One sample (A3.3). The bounds fall with 1/T to the loss that the best linear model leaves.",
            ),
            SvgFigure(
                _plot(online, {"bound of the error-driven update": accumulated[PAPER_UPDATE]}),
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


_TEXT = f"""
No linear model ranks these samples perfectly: one negative lies halfway between two positives. Appendix 3 changes the
algorithm slightly: the numerator of L_ij takes the piecewise step function, the denominator keeps the Heaviside step.
Every update is then a gradient step on a convex surrogate l, and with the step size delta / R² the accumulated AP-loss
is bounded by what any fixed weights u achieve. A3.2 bounds the sum over samples that change from step to step by
8/delta times the sum of l(u), plus 4 R² ||u||² / delta². For a single sample A3.3 replaces l(u) by Z(u), the largest
sum over the negatives of Q(x_ij(u)) for a positive i.

A sample has {POSITIVES} positives and {NEGATIVES} negatives. With all scores equal the AP-loss is
{NEGATIVES / (POSITIVES + NEGATIVES):.2f}, which is above all bounds at the last step, so that the bounds can be
violated, and four other updates must violate them: none, the update with its sign reversed, a random direction of the
same length, and the gradient of cross-entropy, which ranks the boxes the wrong way round, because most of them are
negatives and their features have a part in common that a ranking ignores. The bounds hold for every u; u is along the
feature that separates, and the offline bounds take its best length for every T. The update of AUC-loss is not a
control: it ranks these samples well and stays below the offline bounds, too.
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
    differences: np.ndarray = features[..., None, POSITIVES:, :] - features[..., :POSITIVES, None, :]
    return differences


def pair_sums(features: np.ndarray, length: float) -> np.ndarray:
    """A_i(u), the sum of Q(x_ij(u)) over the negatives j, [..., P], for u of a length along the first feature."""
    sums: np.ndarray = step_integral(length * pair_differences(features)[..., 0]).sum(-1)
    return sums


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


def online_bound(surrogate: np.ndarray, features: np.ndarray) -> np.ndarray:
    """The bound of A3.2, divided by T, after T = 1, 2, ... steps with this mean of l^(t)(u)."""
    return 8 / DELTA * surrogate + _transient(features, 1.0) / np.arange(1, len(surrogate) + 1)


def _transient(features: np.ndarray, length: float) -> float:
    """4 R² ||u - theta^(1)||² / delta², for u of this length."""
    return 4 * spectral_norm(features) ** 2 * length**2 / DELTA**2


def _plot(runs: Runs, bounds: dict[str, np.ndarray]) -> str:
    curves = {**{name: losses for name, (losses, _) in runs.items()}, **bounds}
    shown = np.unique(np.geomspace(1, len(curves[PAPER_UPDATE]), 200).astype(int)) - 1
    series = [Series(name=name, x=shown + 1, y=values[shown]) for name, values in curves.items()]
    return line_plot(series, x_label="steps T", y_label="mean AP-loss", log_x=True, y_range=(0, 1.5))
