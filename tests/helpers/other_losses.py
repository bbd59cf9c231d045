"""The losses of other papers, literally: oracles of tests, as :mod:`aploss.losses.reference` is for the AP-loss."""

import itertools
import math

import torch
import torch.nn.functional as F
from torch import Tensor

from aploss.losses.reference import flat_float64, indices, mean_shares, piecewise_step, with_gradient


def focal_loss(scores: Tensor, targets: Tensor, alpha: float = 0.25, gamma: float = 2.0) -> tuple[Tensor, Tensor]:
    """Focal loss (Lin et al., ICCV 2017), Eq. (5): -alpha_t (1 - p_t)^gamma log(p_t).

    Returns:
        The sum over what is not ignored, divided by the positives (at least 1); its gradient.
    """
    s, t = flat_float64(scores).requires_grad_(), targets.flatten()
    probability = torch.sigmoid(s)
    positive = -alpha * (1 - probability) ** gamma * F.logsigmoid(s)
    negative = -(1 - alpha) * probability**gamma * F.logsigmoid(-s)
    total = positive[t == 1].sum() + negative[t == 0].sum()
    return with_gradient(total / max(1, int((t == 1).sum())), s, scores.shape)


def ohem_cross_entropy(logits: Tensor, targets: Tensor, negative_ratio: float = 3.0) -> tuple[Tensor, Tensor]:
    """SSD's softmax cross-entropy with hard negatives, one image after the other.

    ``logits`` [A, K + 1] or [B, A, K + 1], column 0 the background; ``targets`` without the last
    axis: 0 background, 1..K class, -1 ignored. Of each image all positives count, and of its
    negatives the ``negative_ratio`` times as many with the largest loss.
    """
    s = logits.detach().double().clone().requires_grad_()
    images = s.flatten(1, -2) if s.ndim > 2 else s[None]  # [B, A, K + 1]
    total = s.new_zeros(())
    for image, image_targets in zip(images, targets.reshape(images.shape[:2]), strict=True):
        log_probabilities = torch.log_softmax(image, dim=1)
        positives, negatives = indices(image_targets > 0), indices(image_targets == 0)
        total = total - sum(log_probabilities[i, image_targets[i]] for i in positives)
        background_losses = -log_probabilities[negatives, 0]
        kept = math.floor(negative_ratio * len(positives))
        total = total + background_losses.sort(descending=True).values[:kept].sum()
    return with_gradient(total / max(1, int((targets > 0).sum())), s, logits.shape)


def rank_sort_loss(
    scores: Tensor, targets: Tensor, delta: float = 0.5, weights: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rank & Sort (Oksuz et al., ICCV 2021), Eq. (6)-(10); positives have targets in (0, 1].

    As in that paper, rank(i) and rank+(i) are sums of the step over *all* j, i itself included,
    so i counts f(0): 1 for the Heaviside step and 1/2 for the piecewise one.

    Returns:
        Ranking loss, sorting loss, gradient of the ranking loss, gradient of the sorting loss.
    """
    s, y = flat_float64(scores), flat_float64(targets)
    ranking, sorting = s.new_zeros(()), s.new_zeros(())
    ranking_gradient, sorting_gradient = torch.zeros_like(s), torch.zeros_like(s)
    positives, negatives = indices(y > 0), indices(y == 0)
    shares = mean_shares(positives, scores, weights)
    for i in positives:
        positive_steps = piecewise_step(s[positives] - s[i], delta)  # j in P, j = i included
        negative_steps = piecewise_step(s[negatives] - s[i], delta)
        false_positives = negative_steps.sum()  # N_FP(i)
        ranking_error = shares[i] * false_positives / (positive_steps.sum() + false_positives)  # target 0
        if false_positives > 0:
            ranking_gradient[i] -= ranking_error
            ranking_gradient[negatives] += ranking_error * negative_steps / false_positives
        ranking += ranking_error

        sorting_error = (positive_steps * (1 - y[positives])).sum() / positive_steps.sum()
        in_order = positive_steps * (y[positives] >= y[i])  # what may stay above i
        target_error = (in_order * (1 - y[positives])).sum() / in_order.sum()
        violating = positive_steps * (y[positives] < y[i])
        correction = shares[i] * (sorting_error - target_error)
        if violating.sum() > 0:
            sorting_gradient[i] -= correction
            sorting_gradient[positives] += correction * violating / violating.sum()
        sorting += correction
    return ranking, sorting, ranking_gradient.reshape(scores.shape), sorting_gradient.reshape(scores.shape)


def alrp_loss(
    scores: Tensor, targets: Tensor, box_losses: Tensor, delta: float = 1.0, weights: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Average LRP (Oksuz et al., NeurIPS 2020), Eq. (8)-(12).

    ``box_losses`` holds E_loc, one per positive in the order of ``scores[targets == 1]``. The
    error of positive i is (N_FP(i) + E_loc(i) + sum_k f(x_ik) E_loc(k)) / rank(i), k != i in P;
    its desired value is the one with nothing above i but i: E_loc(i) / rank(i). Where no false
    positive is above i (less than 1e-5 of one, as its authors have it) no pair can be blamed.

    Returns:
        Classification part, localisation part, gradient of the classification part on the
        scores, gradient of the localisation part on the box losses.
    """
    s, t, e = flat_float64(scores), targets.flatten(), flat_float64(box_losses)
    classification, localisation = s.new_zeros(()), s.new_zeros(())
    gradient, box_gradient = torch.zeros_like(s), torch.zeros_like(e)
    positives, negatives = indices(t == 1), indices(t == 0)
    shares = mean_shares(positives, scores, weights)
    for position, i in enumerate(positives):
        positive_steps = piecewise_step(s[positives] - s[i], delta)
        positive_steps[position] = 0  # k != i
        negative_steps = piecewise_step(s[negatives] - s[i], delta)
        false_positives = negative_steps.sum()
        rank = (1 + positive_steps.sum() + false_positives) / shares[i]  # infinite for a weight of 0
        error = (false_positives + e[position] + (positive_steps * e).sum()) / rank
        desired = e[position] / rank
        if false_positives > 1e-5:
            gradient[i] -= error - desired
            gradient[negatives] += (error - desired) * negative_steps / false_positives
        classification += false_positives / rank
        localisation += (e[position] + (positive_steps * e).sum()) / rank
        box_gradient += positive_steps / rank
        box_gradient[position] += 1 / rank
    return classification, localisation, gradient.reshape(scores.shape), box_gradient.reshape(box_losses.shape)


def hinge_ap_loss(scores: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The structured hinge bound of Yue et al. (SIGIR 2007), by trying *all* rankings R.

    max_R [1 - AP(R) + F(R) - F(R*)] with F(R) = 1 / (|P| |N|) sum_ij R_ij (s_i - s_j), where R_ij is 1 if i in P is
    ranked above j in N and -1 if not, and R* is a perfect ranking. Factorial time: for a handful of scores.

    Returns:
        The loss, and the gradient of F(R) - F(R*) at the maximising R.
    """
    s, t = flat_float64(scores).requires_grad_(), targets.flatten()
    positives, negatives = indices(t == 1).tolist(), indices(t == 0).tolist()
    if not positives or not negatives:
        return s.new_zeros(()), torch.zeros_like(s).reshape(scores.shape)
    best = s.new_zeros(())
    for ranking in itertools.permutations(positives + negatives):
        place = {item: index for index, item in enumerate(ranking)}
        precisions = [sum(place[k] <= place[i] for k in positives) / (place[i] + 1) for i in positives]
        augmented = 1 - s.new_tensor(precisions).mean()
        for i, j in itertools.product(positives, negatives):
            relation = 1 if place[i] < place[j] else -1  # R_ij; it is 1 for all pairs of R*
            augmented = augmented + (relation - 1) * (s[i] - s[j]) / len(positives) / len(negatives)
        best = augmented if augmented > best else best
    return with_gradient(best, s, scores.shape)
