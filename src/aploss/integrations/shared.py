"""What the integrations of both libraries share: checks, labels, log-odds and calibration.

A ranking loss determines the order of detections, not the scale of their scores, so a fixed score threshold cuts at an
arbitrary place. A monotone map, fitted on held-out images, turns scores into precision. Since AP also counts detections
of low precision, which a threshold on precision drops, the score above which AP needs every detection is found, too.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torchvision.ops import box_convert

from aploss.data.annotations import Annotations
from aploss.detectors.labels import AnchorLabels
from aploss.errors import ConfigError, DataError
from aploss.evaluation import (
    Calibration,
    DetectionTable,
    calibrate_detections,
    coco_metrics,
    match_detections,
    read_ground_truth,
)
from aploss.losses.traits import traits_of

KEPT_AP = 0.999  # fraction of AP that the detections above the least score retain
MIN_LOG_COMPLEMENT = 1e-6  # bounds the log-odds of scores that round to 1


class ScoreThresholdWarning(UserWarning):
    """A score threshold is arbitrary for the scores of this loss, or would drop detections that AP needs.

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
    detections: Sequence[Mapping[str, Any]],
    targets: Sequence[Mapping[str, Any]],
    *,
    iou: float = 0.5,
    keep_ap_at: float | None = None,
) -> tuple[Calibration, float]:
    """Fits a calibration to detections of held-out images, made without a score threshold.

    Targets have ``boxes`` (corners) and ``labels`` like the detections, and optionally ``iscrowd``. If the detections
    that AP needs start below the precision ``keep_ap_at``, the calibration is raised so that they start at it.

    Returns:
        The calibration, and the uncalibrated score above which AP needs every detection.
    """
    if keep_ap_at is not None and not 0 < keep_ap_at < 1:
        raise ConfigError(f"keep_ap_at must be a score between 0 and 1, got {keep_ap_at}")
    if len(detections) != len(targets):
        raise DataError(f"got detections of {len(detections)} images, but {len(targets)} targets")
    if not any(len(target["labels"]) for target in targets):
        raise DataError("cannot calibrate scores on images without objects")
    found = DetectionTable.from_predictions(range(len(targets)), [dict(one) for one in detections])
    truth = _ground_truth(targets, found.category_ids.tolist())
    calibration = calibrate_detections(truth, found, matches=match_detections(truth, found, iou))[0]
    least_score = _least_score(truth, found)
    if keep_ap_at is not None and (precision := float(calibration([least_score])[0])) < keep_ap_at:
        knots = np.union1d(calibration.x, least_score)
        raised = np.interp(calibration(knots), [0.0, precision, 1.0], [0.0, keep_ap_at, 1.0])
        calibration = Calibration(x=knots, y=raised)
    return calibration, least_score


def _ground_truth(targets: Sequence[Mapping[str, Any]], category_ids: Sequence[int]) -> Annotations:
    annotations = [
        {"image_id": image, "category_id": label + 1, "bbox": box, "iscrowd": int(crowd)}
        for image, target in enumerate(targets)
        for box, label, crowd in zip(
            box_convert(target["boxes"].cpu().double(), "xyxy", "xywh").tolist(),
            target["labels"].tolist(),
            target["iscrowd"].tolist() if "iscrowd" in target else [0] * len(target["labels"]),
            strict=True,
        )
    ]
    labels = sorted({*category_ids, *(row["category_id"] for row in annotations)})
    return read_ground_truth(
        {
            "images": [{"id": image} for image in range(len(targets))],
            "categories": [{"id": label, "name": str(label)} for label in labels],
            "annotations": annotations,
        }
    )


def _least_score(truth: Annotations, found: DetectionTable) -> float:
    """The highest score such that the detections above it retain ``KEPT_AP`` of the AP of all."""

    def ap_above(score: float) -> float:
        keep = found.scores > score
        columns = {name: getattr(found, name)[keep] for name in ("image_ids", "category_ids", "xywh", "scores")}
        return coco_metrics(truth, replace(found, **columns)).AP

    wanted = KEPT_AP * ap_above(-1.0)
    scores = np.unique(found.scores)
    too_high = bisect_left(range(len(scores)), True, key=lambda place: not ap_above(float(scores[place])) >= wanted)
    return float(scores[too_high - 1]) if too_high else 0.0
