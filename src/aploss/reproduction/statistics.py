"""Means, deviations and paired differences over seeds."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["PairedDifference", "Spread", "known_values", "paired_difference", "spread"]

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Spread:
    """A value over seeds: how many, their mean, and the standard deviation of a sample (n - 1).

    ``mean`` is NaN without a value, ``deviation`` with fewer than two.
    """

    count: int
    mean: float
    deviation: float


@dataclass(frozen=True)
class PairedDifference:
    """The difference of two rows over the seeds that both have.

    Attributes:
        values: one difference for each of these seeds.
        mean: of the values.
        low, high: the confidence interval of the mean; NaN for fewer than two values.
        confidence: how often such an interval holds the true mean.
    """

    values: tuple[float, ...]
    mean: float
    low: float
    high: float
    confidence: float = CONFIDENCE

    @property
    def is_clear(self) -> bool:
        """Whether the interval is all on one side of zero."""
        return self.low > 0 or self.high < 0


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
    confidence: float = CONFIDENCE,
) -> PairedDifference:
    """``first - second`` seed by seed, and the interval of its mean by Student's t distribution.

    Runs of one seed share initial weights and data order, so their difference varies less than
    either of them.

    Args:
        first, second: one value for each seed, in the same order; a pair counts where both are
            known.
        confidence: between 0 and 1.

    Raises:
        ValueError: the two have different lengths.

    Example:
        >>> one = paired_difference([0.74, 0.75], [0.72, 0.71])  # 0.03 ± 12.706 * 0.01
        >>> round(one.mean, 4), round(one.low, 4), round(one.high, 4)
        (0.03, -0.0971, 0.1571)
    """
    pairs = [
        (one, other)
        for one, other in zip(first, second, strict=True)
        if len(known_values([one, other])) == 2
    ]
    values = tuple(float(one) - float(other) for one, other in pairs)  # type: ignore[arg-type]
    found = spread(values)
    half = math.nan
    if found.count > 1:
        from scipy.stats import t

        quantile = float(t.ppf((1 + confidence) / 2, found.count - 1))
        half = quantile * found.deviation / math.sqrt(found.count)
    return PairedDifference(values, found.mean, found.mean - half, found.mean + half, confidence)
