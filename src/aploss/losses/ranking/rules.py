"""The rules of the ranking losses: from what is ranked above a positive to its error.

Plain arithmetic, written once: torch evaluates the functions on tensors, numba and Triton compile
them. So they keep to ``+ - * /`` and comparisons, which count as 0 or 1.

Names: for a positive i, p is the sum of f(s_k - s_i) over the other positives k and n that over the
negatives j (its false positives); ``f0`` is f(0), 1/2 or 1 for the Heaviside step. An *error* is
what a loss averages over the positives, a *weight* the factor of f(s_j - s_i) in the update of the
pair (i, j).
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

# With fewer false positives than this above it (the step function is a fraction), a positive has
# no negative to blame for the box losses above it: the quotient would be rounding noise.
NO_FALSE_POSITIVES = 1e-5


def ap_error(p, n):
    """sum_j L_ij = 1 - precision at i: AP-loss, Eq. (5)."""
    return n / (1 + p + n)


def ap_weight(kept, n):
    """L_ij / f(x_ij), after line 11 of Algorithm 1 has scaled the row to the error ``kept``."""
    return kept / (n + (n == 0))


def auc_error(n, negatives):
    """Share of the negatives above i: Section 3.1 of the AP-loss paper."""
    return n / (negatives + (negatives == 0))


def auc_weight(negatives):
    """L'_ij / f(x_ij) = 1 / |N|."""
    return 1 / (negatives + (negatives == 0))


def rank_sort_error(p, n, f0):
    """Ranking error of Rank & Sort; its target is 0, so this is all to correct."""
    return n / (f0 + p + n)


def rank_sort_weight(p, n, f0):
    """Ranking error of i over its false positives."""
    return 1 / (f0 + p + n)


def sorting_error(deficits, count, deficits_in_order, count_in_order):
    """Current minus target sorting error of Rank & Sort.

    Sums over the positives k, i included, of f(x_ik) (1 - y_k) and of f(x_ik): over all of them,
    and over those that belong above i, y_k >= y_i.
    """
    return deficits / count - deficits_in_order / count_in_order


def alrp_rank(p, n):
    """rank(i) of aLRP."""
    return 1 + p + n


def alrp_error(n, losses_above, over_rank):
    """Current minus desired error: the desired one has nothing above i but i."""
    return (n > 1e-5) * (n + losses_above) * over_rank


def alrp_weight(error, n):
    """The error of i, shared by its false positives."""
    return error / (n + (n <= 1e-5))
