"""Means, deviations and paired differences over seeds."""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from aploss.reports.comparison import Difference


@dataclass(frozen=True)
class Spread:
    """A value over seeds: how many, their mean, and the standard deviation of a sample (n - 1)."""

    count: int
    mean: float  # NaN without a value
    deviation: float  # NaN with fewer than two


def known_values(values: Sequence[float | None]) -> list[float]:
    """The values without None and NaN.

    Example:
        >>> known_values([0.5, None, float("nan")])
        [0.5]
    """
    return [float(value) for value in values if value is not None and not math.isnan(value)]


def spread(values: Sequence[float | None]) -> Spread:
    """Mean and sample standard deviation of what is known.

    Example:
        >>> spread([0.25, 0.5, 0.75, None])  # deviation: sqrt((0.25² + 0 + 0.25²) / 2)
        Spread(count=3, mean=0.5, deviation=0.25)
    """
    known = known_values(values)
    mean = float(np.mean(known)) if known else math.nan
    deviation = float(np.std(known, ddof=1)) if len(known) > 1 else math.nan
    return Spread(len(known), mean, deviation)


def paired_difference(
    first: Sequence[float | None],
    second: Sequence[float | None],
    *,
    name: str = "first",
    baseline: str = "second",
    metric: str = "AP",
    confidence: float = 0.95,
) -> Difference:
    """``first - second`` seed by seed, and the interval of its mean by Student's t distribution.

    Runs of one seed share initial weights and data order, so their difference varies less than either of them.

    Args:
        first, second: one value for each seed, in the same order; a pair counts where both are known.
        name, baseline, metric: what the two and their values are called.
        confidence: between 0 and 1.

    Returns:
        The difference; its interval is NaN for fewer than two pairs.

    Raises:
        ValueError: the two have different lengths.

    Example:
        >>> one = paired_difference([0.74, 0.75], [0.72, 0.71])  # 0.03 ± 12.706 * 0.01
        >>> round(one.mean, 4), round(one.low, 4), round(one.high, 4)
        (0.03, -0.0971, 0.1571)
    """
    pairs = [known for pair in zip(first, second, strict=True) if len(known := known_values(pair)) == 2]
    values = tuple(one - other for one, other in pairs)
    low = high = math.nan
    if len(values) > 1:
        from scipy.stats import ttest_1samp

        with warnings.catch_warnings():  # equal differences have an interval without any width
            warnings.simplefilter("ignore", RuntimeWarning)
            low, high = map(float, ttest_1samp(values, 0.0).confidence_interval(confidence))
    mean = spread(values).mean
    names = {"name": name, "baseline": baseline, "metric": metric}
    return Difference(**names, values=values, mean=mean, low=low, high=high, confidence=confidence)
