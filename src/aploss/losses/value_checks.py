"""Checks of the values of scores and targets, for the losses that do not run on the engine."""

import torch
from torch import Tensor

from .input_checks import refuse_score, refuse_target

__all__ = ["check_values"]


def check_values(scores: Tensor, targets: Tensor) -> None:
    """Raises ValueError unless every target is 1, 0 or -1 and every score that counts is finite.

    Reads both once and makes no copy, unless it finds something to complain about.
    """
    if scores.numel() == 0:
        return
    if not _all_allowed(targets):
        bad = (targets != 1) & (targets != 0) & (targets != -1)
        refuse_target(targets, int(bad.flatten().nonzero()[0]), soft=False)
    # NaN and infinity survive a sum; a sum that overflows is looked at more closely.
    if not bool(scores.detach().sum(dtype=torch.float32).isfinite()):
        bad = ~scores.isfinite() & (targets != -1)
        if bool(bad.any()):
            refuse_score(scores, int(bad.flatten().nonzero()[0]))


def _all_allowed(targets: Tensor) -> bool:
    if targets.dtype == torch.bool:
        return True
    if targets.is_floating_point():
        return bool(((targets == 0) | (targets.abs() == 1)).all())
    lowest, highest = torch.stack(targets.aminmax()).tolist()
    return bool(lowest >= -1 and highest <= 1)
