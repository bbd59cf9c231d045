"""Appendix 3: on inseparable data the mean AP-loss stays below a bound set by the best model."""

import math

import numpy as np
from scipy.optimize import linprog, minimize

from aploss.plotting.plots import Series, line_plot
from aploss.reports.page import SvgFigure, Table, Verdict
from aploss.theory.study import Study

DELTA = 1.0
STEPS = 30_000
POSITIVES, NEGATIVES = 60, 10


def inseparable(seed: int = 0) -> Study:
    """Runs the modified algorithm offline and compares its mean AP-loss with both bounds."""
    random = np.random.default_rng(seed)
    differences, sizes = make_inseparable(random)
    means = mean_losses(differences, sizes)
    steps = np.arange(1, STEPS + 1)
    # Both bounds hold for every u, so the smallest over some u holds too.
    first, second = np.min([bounds_of(u, differences, sizes) for u in _good_weights(differences, sizes)], axis=0)
    shown = np.unique(np.geomspace(1, STEPS, 200).astype(int)) - 1
    curves = {"mean AP-loss": means, "bound 1 (few errors)": first, "bound 2 (many errors)": second}
    series = [Series(name=name, x=steps[shown], y=values[shown]) for name, values in curves.items()]
    rows = [[t, *(float(values[t - 1]) for values in curves.values())] for t in (10, 100, 1000, STEPS)]
    return Study(
        name="inseparable",
        title="AP-loss is bounded on inseparable data",
        place="Section 3.3 and Appendix 3",
        text=_TEXT,
        figures=[
            SvgFigure(
                line_plot(series, x_label="steps T", y_label="mean over the first T steps", log_x=True, log_y=True),
                "The bounds fall with 1/T to the loss that the best linear model leaves; "
                "above 1 a bound says nothing, since the AP-loss is at most 1.",
            )
        ],
        tables=[Table(columns=["T", "mean AP-loss", "bound 1", "bound 2"], rows=rows)],
        verdicts=[
            Verdict(bool((means <= first).all()), "Bound 1 holds for every T."),
            Verdict(bool((means <= second).all()), "Bound 2 holds for every T."),
            Verdict(bool(min(first[-1], second[-1]) < 1), "At the end a bound is below 1, so that it says something."),
            Verdict(not is_separable(differences, sizes), "No linear model ranks this data perfectly."),
        ],
        numbers=dict(zip(("mean_loss", "bound1", "bound2"), rows[-1][1:], strict=True)),
    )


_TEXT = """
The positives and negatives overlap, so no linear model ranks them perfectly. Appendix 3 changes the algorithm a
little: the numerator of L_ij takes the piecewise step function, the denominator keeps the Heaviside step. That makes
every update a gradient step on a convex surrogate, and with the step size delta / R² the accumulated AP-loss is
bounded by what any fixed weight vector u achieves, measured by Z(u), the largest sum over the negatives of Q(x_ij(u))
for a positive i.

Both bounds hold for every u. Here u is found by minimising Z(u), scaled to several lengths, and the best bound for
every T is drawn.
"""


def make_inseparable(random: np.random.Generator) -> tuple[np.ndarray, tuple[int, int]]:
    """Pairwise differences f_j - f_i of two clouds that touch [P + N, P + N, 2], and (P, N).

    Two positives and two negatives lie between the clouds, each negative a little further up than a positive. Along the
    second feature both pairs point opposite ways: no weight vector puts both in order and keeps the clouds apart.
    """
    positive = random.normal((1, 0), 0.05, size=(POSITIVES, 2))
    negative = random.normal((-1, 0), 0.05, size=(NEGATIVES, 2))
    positive[:2] = (0, 0)
    negative[:2] = (0.02, 0.1), (0.02, -0.1)
    features = np.concatenate([positive, negative])
    return features[None, :] - features[:, None], (POSITIVES, NEGATIVES)


def is_separable(differences: np.ndarray, sizes: tuple[int, int]) -> bool:
    """Whether some theta has every x_ij <= -1, decided by a linear program."""
    pairs = _negatives_of(differences, sizes).reshape(-1, differences.shape[-1])
    program = linprog(np.zeros(pairs.shape[1]), A_ub=pairs, b_ub=-np.ones(len(pairs)), bounds=(None, None))
    return bool(program.status == 0)


def piecewise_step(x: np.ndarray) -> np.ndarray:
    """The piecewise step function H~ (Section 3.4)."""
    return np.clip(x / (2 * DELTA) + 0.5, 0, 1)


def step_integral(x: np.ndarray) -> np.ndarray:
    """Q(x), the integral of the piecewise step function up to x."""
    return np.where(x > DELTA, x, np.clip(x + DELTA, 0, None) ** 2 / (4 * DELTA))


def _negatives_of(values: np.ndarray, sizes: tuple[int, int]) -> np.ndarray:
    """The pairs of a positive i and a negative j out of all pairs."""
    return values[: sizes[0], sizes[0] :]


def surrogate_step(theta: np.ndarray, differences: np.ndarray, sizes: tuple[int, int]) -> tuple[float, np.ndarray]:
    """AP-loss at theta, and the gradient of the surrogate: sum of L~_ij (f_j - f_i) / |P|."""
    x = differences @ theta  # x_ij = s_j - s_i, all pairs
    rank = (x[: sizes[0]] >= 0).sum(1)  # 1 + sum over k != i of H(x_ik): i itself has H(0) = 1
    pairs = _negatives_of(x, sizes)
    loss = float(((pairs >= 0).sum(1) / rank).mean())
    terms = piecewise_step(pairs) / rank[:, None] / sizes[0]
    return loss, np.einsum("ij,ijd->d", terms, _negatives_of(differences, sizes))


def _spectral_norm(differences: np.ndarray, sizes: tuple[int, int]) -> float:
    """R: the norm of dX/dtheta over the pairs of a positive and a negative."""
    pairs = _negatives_of(differences, sizes).reshape(-1, differences.shape[-1])
    return float(np.linalg.norm(pairs, ord=2))


def mean_losses(differences: np.ndarray, sizes: tuple[int, int]) -> np.ndarray:
    """Mean AP-loss of the first T steps, for T = 1 ... STEPS, from theta^(1) = 0."""
    rate = DELTA / _spectral_norm(differences, sizes) ** 2
    theta = np.zeros(differences.shape[-1])
    losses = np.empty(STEPS)
    for step in range(STEPS):
        losses[step], gradient = surrogate_step(theta, differences, sizes)
        theta -= rate * gradient
    return losses.cumsum() / np.arange(1, STEPS + 1)


def bounds_of(u: np.ndarray, differences: np.ndarray, sizes: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """final_bound1 and final_bound2 for a weight vector, after T = 1 ... STEPS steps."""
    sums = step_integral(_negatives_of(differences @ u, sizes)).sum(1)  # A_i(u)
    scaled = 8 / DELTA * float(sums.max())  # 8/delta Z(u)
    transient = 4 * _spectral_norm(differences, sizes) ** 2 * float(u @ u) / DELTA**2 / np.arange(1, STEPS + 1)
    return (math.log(sizes[0]) + 1) / sizes[0] * scaled + transient, scaled / (1 + scaled) + transient


def _good_weights(differences: np.ndarray, sizes: tuple[int, int]) -> list[np.ndarray]:
    """Weight vectors with a small Z(u), of several lengths."""
    pairs = _negatives_of(differences, sizes)

    def objective(u: np.ndarray, sharpness: float = 20.0) -> float:
        sums = step_integral(pairs @ u).sum(1)
        return float(np.log(np.exp(sharpness * (sums - sums.max())).mean()) / sharpness + sums.max())

    best = minimize(objective, np.zeros(differences.shape[-1]), method="BFGS").x
    return [best * scale for scale in np.geomspace(0.05, 2.0, 20)]
