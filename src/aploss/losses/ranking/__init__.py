"""Ranking losses in O(N log N): the whole idea on one page, and three backends that refine it.

A ranking loss needs, for every positive i, the sum of the step function f(s_j - s_i) over all other
scores j. With f piecewise linear (Section 3.4 of the AP-loss paper) no pair has to be looked at::

    f(x) = (relu(x + delta) - relu(x - delta)) / (2 delta)

and a sum of relu(s_j - c) over j is the sum of the scores above c minus c times their number: sort the scores once,
take cumulative sums, and look up c. That gives the ranks p and n of every positive; a rule turns them into errors (1 -
precision for AP, see :mod:`.rules`); the gradient of a negative j is again a sum of step functions, over the positives
and with weights, and so again two lookups. :func:`explained_ap_loss` is all of it in torch operations, tested against
``reference.py``. The backends compute the same with less work per score, because only the P positives need sorting:

- :mod:`.torch_backend`, every device: the breakpoints s_i - delta and s_i + delta cut the score axis
  into segments (:mod:`.segments`); each negative is counted in its segment, in integers, so that
  results are the same bits in every run and processes exchange O(P) numbers.
- :mod:`.numba_backend`, CPU: the same in compiled loops, with a lookup table in place of a search.
- :mod:`.triton`, GPUs: the passes over all scores as one kernel each, verified on first use.
"""

import torch
from torch import Tensor


def explained_ap_loss(
    scores: Tensor, targets: Tensor, delta: float = 1.0, interpolated: bool = True
) -> tuple[Tensor, Tensor]:
    """AP-loss and its error-driven gradient; delta > 0, at least one positive and one negative."""
    counted = (targets >= 0).nonzero()[:, 0]
    order = counted[scores[counted].double().argsort(descending=True)]  # best score first
    gaps = scores[order].double().diff().clamp(min=-2 * delta)  # wider gaps change no f, so clip them
    s = torch.cat([gaps.new_zeros(1), gaps.cumsum(0)])  # from 0 downwards: ranks are small where s is
    positive = targets[order] == 1
    high, low = s[positive], s[~positive]  # the positives s_i and the negatives s_j

    def sum_of_steps(values: Tensor) -> Tensor:  # of f(values_j - s_i) over j, for each positive i
        sums = torch.cat([values.new_zeros(1), values.cumsum(0)])

        def sum_of_relus(c: Tensor) -> Tensor:  # of relu(values_j - c) over j
            above = torch.searchsorted(-values, -c)
            return sums[above] - above * c

        return (sum_of_relus(high - delta) - sum_of_relus(high + delta)) / (2 * delta)

    p, n = sum_of_steps(high) - 0.5, sum_of_steps(low)  # the ranks: without i itself, f(0) = 1/2
    error = n / (1 + p + n)  # the rule of AP: 1 - precision
    if interpolated:
        error = error.flip(0).cummin(0).values.flip(0)
    weights = error / n.clamp(min=1e-300) / len(high)  # L_ij / f(x_ij), Eq. (7)

    def weighted_relus(c: Tensor) -> Tensor:  # the sum of weights_i relu(c - s_i) over i, from below
        sums = torch.stack([weights, weights * high]).flip(1).cumsum(1)
        padded: Tensor = torch.nn.functional.pad(sums, (1, 0))[:, torch.searchsorted(high.flip(0), c)]
        return c * padded[0] - padded[1]

    gradient = torch.zeros(scores.shape, dtype=torch.float64)
    gradient[order[positive]] = -error / len(high)
    gradient[order[~positive]] = (weighted_relus(low + delta) - weighted_relus(low - delta)) / (2 * delta)
    return error.mean(), gradient
