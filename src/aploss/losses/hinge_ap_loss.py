"""The structured hinge loss of average precision, with the exact loss-augmented ranking."""

import torch
from torch import Tensor

from .autograd import Operator, Values
from .checks import check_scores_and_targets, check_values, loss_dtype
from .traits import LossModule, LossTraits, register_loss


def hinge_ap_loss(scores: Tensor, targets: Tensor) -> Tensor:
    """The structured hinge upper bound of 1 - AP.

    From "A Support Vector Method for Optimizing Average Precision" (Yue et al., SIGIR 2007), as
    compared with in the AP-loss paper, Section 4.2.3 (Mohapatra et al., CVPR 2018)::

        max over rankings R of  1 - AP(R) + F(R) - F(R*),
        F(R) = 1 / (|P| |N|) * sum over i in P, j in N of R_ij (s_i - s_j),

    where R_ij is 1 if R puts i above j and -1 if not, and R* is a perfect ranking. The maximum is found exactly. Within
    it both the positives and the negatives are sorted by score, each negative finds its place among the positives on
    its own, and a lower-scored negative never passes more positives than a higher-scored one (Yue et al., Section 4):
    so the places are found by halving, in O(N log N + P log N) for P positives among N scores, most of it sorting.

    Args:
        scores: logits, any shape, any floating dtype.
        targets: same shape; 1 positive, 0 negative, -1 ignored. Integer, bool or float.

    Returns:
        scalar, float32 (float64 for float64 scores). 0 where there are no positives or no
        negatives. The gradient is a subgradient: that of F(R) - F(R*) at the maximising R.

    Raises:
        ValueError: shapes differ, a target is not allowed, a score is NaN or infinite.

    Example:
        >>> import torch
        >>> scores = torch.tensor([1.0, 0.0], requires_grad=True)
        >>> hinge_ap_loss(scores, torch.tensor([0, 1])).item()  # 1 - 1/2 - 2 * (0 - 1)
        2.5
    """
    check_scores_and_targets(scores, targets)
    return _OPERATOR(scores, targets)[0]


@register_loss("hinge-ap")
class HingeAPLoss(LossModule):
    """The structured hinge upper bound of 1 - AP.

    Example:
        >>> import torch
        >>> HingeAPLoss()(torch.tensor([1.0, 0.0]), torch.tensor([0, 1]))
        tensor(2.5000)
    """

    traits = LossTraits(label="Hinge-AP", colour="#444c56", dashes=(0, (1, 2)), marker="p")
    _function = staticmethod(hinge_ap_loss)

    def __init__(self) -> None:
        super().__init__()


def _value_and_gradient(scores: Tensor, targets: Tensor, _: bool) -> tuple[Values, Values]:
    check_values(scores, targets)
    dtype = loss_dtype(scores.dtype)
    flat = scores.detach().flatten()
    gradient = torch.zeros_like(flat, dtype=dtype)
    positive_index = (targets.flatten() == 1).nonzero().flatten()
    negative_index = (targets.flatten() == 0).nonzero().flatten()
    num_positives, num_negatives = len(positive_index), len(negative_index)
    if num_positives == 0 or num_negatives == 0:
        return (gradient.new_zeros(()),), (gradient.view(scores.shape),)
    positives, positive_order = flat[positive_index].double().sort()  # ascending
    negatives, negative_order = flat[negative_index].sort(descending=True)

    passes = _passed_positives(positives, negatives)  # [N], descending
    levels = torch.arange(1, num_positives + 1, device=flat.device)
    above = num_negatives - torch.searchsorted(passes.flip(0), levels)  # [P] negatives that R puts above each positive
    moved = int(above[0])  # these pass at least the lowest positive
    origin = positives[0]  # keeps the digits of scores with a large offset
    sums = torch.cat([positives.new_zeros(1), (negatives[:moved].double() - origin).cumsum(0)])
    moved_sums = sums[above]  # of the negatives above each positive
    rank_among_positives = levels.flip(0)
    precision = (rank_among_positives / (rank_among_positives + above).double()).mean()
    per_pair = 2 / (num_positives * num_negatives)  # R_ij turns from 1 to -1
    loss = 1 - precision - per_pair * (above * (positives - origin) - moved_sums).sum()

    gradient[positive_index[positive_order]] = (-per_pair * above.double()).to(dtype)
    gradient[negative_index[negative_order[:moved]]] = (per_pair * passes[:moved].double()).to(dtype)
    return (loss.to(dtype),), (gradient.view(scores.shape),)


_OPERATOR = Operator("hinge_ap_loss", "Tensor scores, Tensor targets", _value_and_gradient)


def _passed_positives(positives: Tensor, negatives: Tensor) -> Tensor:
    """How many positives each negative passes in the loss-augmented ranking, int64 [N], descending.

    The middle negative is placed first. Those before it then pass at least as many positives, those after it at most
    as many, which bounds the middle ones of both halves, and so on: all negatives of a round look at no more than P
    places together, and there are log2(N) rounds.

    Args:
        positives: ascending, float64 [P].
        negatives: descending [N].
    """
    stride = 1 << len(negatives).bit_length()
    passed = torch.zeros(stride + 1, dtype=torch.int64, device=positives.device)
    passed[0] = len(positives)  # bounds the first negative, which is number 1; 0 bounds the last one
    while stride := stride // 2:
        which = torch.arange(stride, len(negatives) + 1, 2 * stride, device=positives.device)
        passed[which] = _best_places(which, passed[which + stride], passed[which - stride], positives, negatives)
    return passed[1 : len(negatives) + 1]


def _best_places(which: Tensor, fewest: Tensor, most: Tensor, positives: Tensor, negatives: Tensor) -> Tensor:
    """How many positives each of these negatives, counted from 1, passes in the maximum, within its bounds.

    The negative j (the j-th highest) gains by passing the i-th highest positive
    i / (i + j - 1) - i / (i + j) in AP and loses 2 (s_i - s_j) / N in F, both over P; the best
    place has the largest sum of these on the way up to it.
    """
    steps = most - fewest
    run = torch.arange(len(which), device=which.device).repeat_interleave(steps)  # the negative of each step
    start = steps.cumsum(0) - steps  # where each negative's steps begin
    position = torch.arange(len(run), device=run.device) - start[run]
    passing = fewest[run] + position  # the positive that this step passes, from the lowest
    i = (len(positives) - passing).double()
    j = which[run].double()
    gain = i / ((i + j - 1) * (i + j))
    gain -= 2 / len(negatives) * (positives[passing] - negatives[which - 1].double()[run])
    before = torch.cat([gain.new_zeros(1), gain.cumsum(0)])
    height = before[1:] - before[start][run]  # sum of gains from the lower bound
    highest = gain.new_zeros(len(which)).scatter_reduce_(0, run, height, "amax")
    # The fewest steps that reach it; none where no step gains.
    reached = torch.where(height == highest[run], position + 1, len(positives) + 1)
    best = torch.full_like(which, len(positives) + 1).scatter_reduce_(0, run, reached, "amin")
    return fewest + torch.where(highest > 0, best, 0)
