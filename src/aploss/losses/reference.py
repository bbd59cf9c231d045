"""The losses of the AP-loss paper, literally: dense, slow, float64, in the words of the paper.

These functions are the oracle of the tests and the place to read what a loss *is*; the fast versions in the
neighbouring files say why they are equal. Every function takes scores of any shape with targets 1 (positive), 0
(negative) or -1 (ignored) of the same shape, and returns float64 values and float64 gradients of the shape of the
scores. ``weights``, the importance of each positive, are broadcast to the scores; the losses are means over the
positives, weighted if given.

``x_ij = s_j - s_i`` throughout, as in Section 3.1. One positive is handled at a time, so no |P| x |N| matrix is ever
held.
"""

import torch
from torch import Tensor


def piecewise_step(x: Tensor, delta: float) -> Tensor:
    """The piecewise step function f of Section 3.4; the Heaviside step H where ``delta`` is 0.

    Example:
        >>> piecewise_step(torch.tensor([-2.0, -0.5, 0.0, 2.0]), delta=1.0)
        tensor([0.0000, 0.2500, 0.5000, 1.0000])
        >>> piecewise_step(torch.tensor([-2.0, 0.0, 2.0]), delta=0.0)
        tensor([0., 1., 1.])
    """
    if delta == 0:
        return (x >= 0).to(x.dtype)
    return (x / (2 * delta) + 0.5).clamp(0, 1)


def ap_loss(
    scores: Tensor, targets: Tensor, delta: float = 1.0, interpolated: bool = True, weights: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Algorithm 1, line by line.

    Returns:
        The loss, 1 - (interpolated) AP, and the error-driven gradient g.

    Example:
        >>> loss, gradient = ap_loss(torch.tensor([0.0, 0.0]), torch.tensor([1, 0]))
        >>> loss, gradient
        (tensor(0.3333, dtype=torch.float64), tensor([-0.3333,  0.3333], dtype=torch.float64))
    """
    s, t = flat_float64(scores), targets.flatten()
    gradient = torch.zeros_like(s)  # line 1
    highest_precision = s.new_zeros(())  # line 2
    positives, negatives = indices(t == 1), indices(t == 0)  # line 3
    shares, loss = mean_shares(positives, scores, weights), s.new_zeros(())
    for i in positives[s[positives].argsort(stable=True)]:  # lines 4, 5
        negative_steps = piecewise_step(s[negatives] - s[i], delta)  # line 6, f(x_ij), j in N
        others = positives[positives != i]
        positive_steps = piecewise_step(s[others] - s[i], delta)  # f(x_ik), k in P, k != i
        terms = negative_steps / (1 + positive_steps.sum() + negative_steps.sum())  # L_ij, Eq. (3)
        precision = 1 - terms.sum()  # line 7
        if precision >= highest_precision:  # line 8
            highest_precision = precision  # line 9
        elif interpolated:  # line 10
            terms = terms * (1 - highest_precision) / (1 - precision)  # line 11
        terms = terms * shares[i]  # line 16
        gradient[i] = -terms.sum()  # line 13
        gradient[negatives] += terms  # line 14
        loss += terms.sum()
    return loss, gradient.reshape(scores.shape)


def targets_at_threshold(qualities: Tensor, threshold: float) -> Tensor:
    """1 for positives of at least this IoU, -1 for other positives, and 0 and -1 as they are.

    IoU-AP is the mean of :func:`ap_loss` of these targets over the thresholds.
    """
    targets = torch.where(qualities >= threshold, 1, -1)
    return torch.where(qualities > 0, targets, qualities.long())


def auc_loss(
    scores: Tensor, targets: Tensor, delta: float = 1.0, weights: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The AUC activation of Section 3.1, L'_ij = f(x_ij) / |N|, with the same update.

    Returns:
        The loss, 1 - AUC for ``delta=0`` on scores without ties, and the gradient.
    """
    s, t = flat_float64(scores), targets.flatten()
    gradient, loss = torch.zeros_like(s), s.new_zeros(())
    positives, negatives = indices(t == 1), indices(t == 0)
    shares = mean_shares(positives, scores, weights)
    for i in positives:
        terms = shares[i] * piecewise_step(s[negatives] - s[i], delta) / max(1, len(negatives))
        gradient[i] = -terms.sum()
        gradient[negatives] += terms
        loss += terms.sum()
    return loss, gradient.reshape(scores.shape)


def smooth_ap_loss(
    scores: Tensor, targets: Tensor, temperature: float = 1.0, log_space: bool = False, eps: float = 1e-7
) -> tuple[Tensor, Tensor]:
    """Appendix 2's F, with S(x / temperature) in place of the step; the true derivative.

    With ``log_space`` the loss is -log(AP + eps), AP = 1 - F, as in Section 4.2.3.
    """
    s, t = flat_float64(scores).requires_grad_(), targets.flatten()
    positives, negatives = indices(t == 1), indices(t == 0)
    if len(positives) == 0 or len(negatives) == 0:
        return s.new_zeros(()), torch.zeros_like(s).reshape(scores.shape)
    smoothed = s.new_zeros(())
    for i in positives:
        negative_steps = torch.sigmoid((s[negatives] - s[i]) / temperature)
        positive_steps = torch.sigmoid((s[positives[positives != i]] - s[i]) / temperature)
        rank = 1 + positive_steps.sum() + negative_steps.sum()
        smoothed = smoothed + negative_steps.sum() / rank
    smoothed = smoothed / len(positives)
    loss = -torch.log(1 - smoothed + eps) if log_space else smoothed
    return with_gradient(loss, s, scores.shape)


def flat_float64(values: Tensor) -> Tensor:
    """The values, detached and flattened."""
    return values.detach().flatten().double().clone()


def indices(mask: Tensor) -> Tensor:
    """The places at which a mask is True."""
    return mask.nonzero().flatten()


def mean_shares(positives: Tensor, scores: Tensor, weights: Tensor | None) -> Tensor:
    """What each score counts in the mean over the positives, if it is one: 1 / |P|, or its weight over their sum."""
    flat = torch.ones(()) if weights is None else weights
    flat = flat_float64(flat.expand(scores.shape))
    total = flat[positives].sum()
    return flat / (total if total > 0 else 1)


def with_gradient(loss: Tensor, inputs: Tensor, shape: torch.Size) -> tuple[Tensor, Tensor]:
    """The value and its true derivative, zero where the loss does not depend on the inputs."""
    if not loss.requires_grad:
        return loss, torch.zeros_like(inputs).reshape(shape)
    (gradient,) = torch.autograd.grad(loss, inputs)
    return loss.detach(), gradient.reshape(shape)
