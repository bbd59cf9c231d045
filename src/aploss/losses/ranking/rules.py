"""The rules of the ranking losses: from the ranks of a positive to its error.

A rule is plain arithmetic on arrays, so NumPy and torch evaluate the same function, and every backend gets a new rule
without knowing its name; ``RankingOperator(rule)`` of :mod:`aploss.losses.autograd` makes a loss of it. The error of
positive i is shared among the negatives above it in proportion to f(x_ij), so that a rule needs no gradient of its own:
the update of the pair (i, j) is error_i * f(x_ij) / n_i, Eq. (7) of the AP-loss paper.

The arguments of a rule, each one value per positive i:

- ``p``: the sum of f(s_k - s_i) over the other positives k;
- ``n``: the sum of f(s_j - s_i) over the negatives j, its false positives;
- ``negatives``: how many negatives are ranked together with i;
- ``f0``: f(0), which is 1/2, or 1 for the Heaviside step (a number);
- ``above``: the sum of f(s_k - s_i) E_k over the other positives k with box losses E_k; 0 without.
"""

# mypy: disable-error-code="no-untyped-def, arg-type"

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

# With fewer false positives than this above it (f is a fraction), no negative can be blamed for the
# box losses above a positive: the quotient would be rounding noise. As in the authors' code of aLRP.
MIN_FALSE_POSITIVES = 1e-5


class Ratio(NamedTuple):
    """The error n / (own + positives * p + negatives * n + total * |N|), which kernels can evaluate.

    Any other function may be a rule; it is evaluated between the compiled calls.
    """

    own: float
    positives: float
    negatives: float
    total: float

    def __call__(self, p, n, negatives, f0, above):
        """See the module's arguments of a rule."""
        denominator = self.own + self.positives * p + self.negatives * n + self.total * negatives
        return n / (denominator + (denominator == 0))


@dataclass(frozen=True)
class Rule:
    """How a ranking loss turns ranks into errors.

    Attributes:
        name: an identifier; the operator is ``torch.ops.aploss.NAME_loss`` in compiled graphs.
        error: the error that the loss averages over the positives.
        correction: the part of the error that the update corrects; the whole error by default.
        monotone: replace each error by the smallest one at this score or below (interpolated AP).
        second: what the second value of the loss is, if it has one. ``"sorting"``: Rank & Sort's
            sorting error; ``"localisation"``: aLRP's average of the box losses.
        soft_targets: the targets of positives are qualities in (0, 1].
    """

    name: str
    error: Callable[..., Any]
    correction: Callable[..., Any] | None = None
    monotone: bool = False
    second: Literal["", "sorting", "localisation"] = ""
    soft_targets: bool = False


# 1 - precision at i: the sum of L_ij over the negatives j, Eq. (3) and (5).
PRECISION_ERROR = Ratio(own=1.0, positives=1.0, negatives=1.0, total=0.0)
# The share of the negatives above i, Section 3.1.
ROC_ERROR = Ratio(own=0.0, positives=0.0, negatives=0.0, total=1.0)


def _ranking_error(p, n, negatives, f0, above):
    """The ranking error of Rank & Sort, in which i itself counts f(0)."""
    return n / (f0 + p + n)


def _lrp_correction(p, n, negatives, f0, above):
    """Current minus desired error of aLRP: the desired one has nothing above i but i."""
    return (n > MIN_FALSE_POSITIVES) * (n + above) / (1 + p + n)


AP = Rule("ap", PRECISION_ERROR, monotone=True)
PLAIN_AP = Rule("plain_ap", PRECISION_ERROR)
IOU_AP = Rule("iou_ap", PRECISION_ERROR, monotone=True, soft_targets=True)
PLAIN_IOU_AP = Rule("plain_iou_ap", PRECISION_ERROR, soft_targets=True)
AUC = Rule("auc", ROC_ERROR)
RANK_SORT = Rule("rank_sort", _ranking_error, second="sorting", soft_targets=True)
ALRP = Rule("alrp", PRECISION_ERROR, _lrp_correction, second="localisation")
