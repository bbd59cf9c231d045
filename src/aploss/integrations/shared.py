"""What the integrations of both libraries share: checks, labels, log-odds and calibration.

A ranking loss determines the order of detections, not the scale of their scores, so a fixed score threshold cuts at an
arbitrary place. A monotone map, fitted on held-out images, turns scores into precision.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from aploss.detectors.labels import AnchorLabels
from aploss.errors import ConfigError, DataError
from aploss.evaluation import Calibration, DetectionTable, calibrate_detections, match_detections, read_ground_truth
from aploss.losses.traits import traits_of

MIN_LOG_COMPLEMENT = 1e-6  # bounds the log-odds of scores that round to 1


class ScoreThresholdWarning(UserWarning):
    """A score threshold is arbitrary for the scores of this loss.

    Example:
        >>> import warnings
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("ignore", ScoreThresholdWarning)
    """


def check_loss(loss: object, model: nn.Module, *, has_background: bool) -> None:
    """Raises ConfigError unless ``loss`` is a loss object that suits the columns of the model's logits."""
    if not isinstance(loss, nn.Module):
        raise ConfigError(f"use_loss takes a loss object such as APLoss() or None, got {loss!r}")
    if traits_of(loss).softmax and not has_background:
        raise ConfigError(f"{type(loss).__name__} needs a background column, which {type(model).__name__} lacks")


def warn_uncalibrated(loss: nn.Module, model: nn.Module, dropped: str, keep: str) -> None:
    """Warns, for the caller of ``use_loss``, of a threshold: says which detections are dropped and what keeps them."""
    label = traits_of(loss).label or type(loss).__name__
    warnings.warn(
        f"{type(model).__name__} drops {dropped}, but {label} determines the order of scores, not their scale: {keep}, "
        "and fit a scale after training with calibrate(model, images, targets)",
        ScoreThresholdWarning,
        stacklevel=4,
    )


def labels_from_matches(matches: Tensor, classes: Sequence[Tensor], boxes: Sequence[Tensor]) -> AnchorLabels:
    """Labels from matches [B, A]: the index of an object of the image, ``NEGATIVE`` or ``IGNORED``.

    ``classes`` [n], counted from 0, and ``boxes`` [n, 4] describe the n objects of each image.
    """
    images, anchors = (matches >= 0).nonzero(as_tuple=True)
    chosen = [row[row >= 0] for row in matches]
    labels = matches.clone()
    labels[images, anchors] = torch.cat([one[index] for one, index in zip(classes, chosen, strict=True)])
    matched_boxes = torch.cat([one[index] for one, index in zip(boxes, chosen, strict=True)])
    return AnchorLabels(classes=labels, images=images, anchors=anchors, boxes=matched_boxes)


def softmax_log_odds(logits: Tensor) -> Tensor:
    """log(p_k / (1 - p_k)) of the K softmax scores of [..., K + 1] logits with the background first.

    Example:
        >>> softmax_log_odds(torch.tensor([0.0, 0.0])).item()  # two equal columns
        0.0
    """
    log_scores = logits.float().log_softmax(dim=-1)[..., 1:].clamp(max=-MIN_LOG_COMPLEMENT)
    return log_scores - torch.log(-torch.expm1(log_scores))


@dataclass(eq=False)
class CalibrationHook:
    """A forward hook that calibrates the scores of a model in evaluation mode."""

    calibration: Calibration

    def calibrated(self, scores: Tensor) -> Tensor:
        """Precision of scores in [0, 1], in their dtype and on their device."""
        return torch.from_numpy(self.calibration(scores.detach().cpu().double().numpy())).to(scores)


def find_hook(model: nn.Module, *, remove: bool = False) -> Any:
    """The calibration hook of a model or None; a copy of a model has a copy of the hook."""
    for key, hook in model._forward_hooks.items():
        if isinstance(hook, CalibrationHook):
            if remove:
                del model._forward_hooks[key]
            return hook
    return None


def fit_precision(
    detections: Sequence[Mapping[str, Any]], targets: Sequence[Mapping[str, Any]], *, iou: float = 0.5
) -> Calibration:
    """Fits a calibration to detections of held-out images, made without a score threshold.

    Targets have ``boxes`` (corners) and ``labels`` like the detections, and optionally ``iscrowd``.
    """
    if len(detections) != len(targets):
        raise DataError(f"got detections of {len(detections)} images, but {len(targets)} targets")
    if not any(len(target["labels"]) for target in targets):
        raise DataError("cannot calibrate scores on images without objects")
    found = DetectionTable.from_predictions(range(len(targets)), [dict(one) for one in detections])
    with_scores = [{**target, "scores": torch.ones(len(target["labels"]))} for target in targets]
    annotations = DetectionTable.from_predictions(range(len(targets)), with_scores).to_results()
    crowd = torch.cat([target.get("iscrowd", torch.zeros_like(target["labels"])).int().cpu() for target in targets])
    for annotation, is_crowd in zip(annotations, crowd.tolist(), strict=True):
        annotation["iscrowd"] = is_crowd
    images = [{"id": image} for image in range(len(targets))]
    labels = {*found.category_ids.tolist(), *(one["category_id"] for one in annotations)}
    categories = [{"id": label, "name": str(label)} for label in sorted(labels)]
    truth = read_ground_truth({"images": images, "categories": categories, "annotations": annotations})
    return calibrate_detections(truth, found, matches=match_detections(truth, found, iou))[0]
