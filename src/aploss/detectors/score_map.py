"""Scores that mean precision, in a torchvision detector that was trained with a ranking loss.

A ranking loss orders detections and leaves the scores anywhere, so that the score threshold of a model cuts at an
arbitrary place. Here a monotone map from scores to precision is fitted on held-out images. The order of detections, and
with it AP, stays what it was.

AP also counts detections of little precision: those with a score of 0.1 are right once in ten times, and each that is
right adds recall at the precision of all detections above it. A threshold that is a precision drops them by its
meaning. So the map knows, too, above which score everything lies that AP needs.
"""

import warnings
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from torchvision.models.detection.fcos import FCOS
from torchvision.models.detection.retinanet import RetinaNet
from torchvision.models.detection.ssd import SSD
from torchvision.ops import box_convert

from aploss.errors import ConfigError, DataError
from aploss.evaluation import Calibration, DetectionTable, GroundTruth, calibrate_detections, coco_metrics

Model = TypeVar("Model", bound=nn.Module)
KEPT_AP = 0.999  # share of AP, on the images of the calibration, that detections above ``least_score`` have


class ScoreThresholdWarning(UserWarning):
    """A model drops detections below a score that means nothing with its loss, or that AP needs."""


class ScoreMap(nn.Module):
    """A strictly increasing map from scores in [0, 1] to precision, on the device of a model.

    Its knots move with the model and are not in its ``state_dict``, whose names stay as they are.

    Example:
        >>> score_map = ScoreMap(Calibration(x=[0, 0.25, 1], y=[0, 0.5, 1]))
        >>> score_map(torch.tensor([0.125, 0.25, 1.0])).tolist()
        [0.25, 0.5, 1.0]
        >>> score_map.inverse(0.25)
        0.125
    """

    x: Tensor
    y: Tensor
    least_score: float = 0.0  # before the map: the detections above have all but a thousandth of AP
    handle: RemovableHandle  # of the hook in the model
    before: float  # the model's score threshold before

    def __init__(self, calibration: Calibration) -> None:
        super().__init__()
        for name, knots in (("x", calibration.x), ("y", calibration.y)):
            self.register_buffer(name, torch.as_tensor(knots), persistent=False)

    def forward(self, scores: Tensor) -> Tensor:
        """The precision of scores in [0, 1], of their shape and dtype."""
        values = scores.to(self.x)
        upper = torch.searchsorted(self.x, values.contiguous()).clamp(1, len(self.x) - 1)
        lower = upper - 1
        share = (values - self.x[lower]) / (self.x[upper] - self.x[lower])
        return torch.lerp(self.y[lower], self.y[upper], share).to(scores)

    def inverse(self, precision: float) -> float:
        """The score from which on detections have a precision; 1 where none has."""
        return float(np.interp(precision, self.y.cpu().numpy(), self.x.cpu().numpy()))


def fit_score_map(
    detections: Sequence[Mapping[str, Any]],
    targets: Sequence[Mapping[str, Any]],
    *,
    iou: float = 0.5,
    keep_ap_at: float | None = None,
) -> ScoreMap:
    """Fits the map on detections of held-out images, made without a score threshold.

    Args:
        detections: for each image ``boxes`` [n, 4] (corners), ``scores`` [n] in [0, 1] and ``labels`` [n].
        targets: for each image ``boxes`` [m, 4] and ``labels`` [m], counted as the detections' are, and optionally
            ``iscrowd`` [m].
        iou: overlap from which on a detection is correct.
        keep_ap_at: a threshold that must not cost AP. Where the detections that AP needs begin below this precision,
            the map is raised so that they begin at it, and scores are above the precision then.

    Raises:
        ConfigError: if ``keep_ap_at`` is no score.
        DataError: if there is no object to find, or not one target per image.
    """
    if keep_ap_at is not None and not 0 < keep_ap_at < 1:
        raise ConfigError(f"keep_ap_at is a score between 0 and 1, got {keep_ap_at}")
    if len(detections) != len(targets):
        raise DataError(f"detections of {len(detections)} images, but {len(targets)} targets")
    if not any(len(target["labels"]) for target in targets):
        raise DataError("scores cannot be calibrated on images without any object")
    found = DetectionTable.from_predictions(range(len(targets)), [dict(one) for one in detections])
    objects = [
        {"image_id": image, "category_id": label + 1, "bbox": box, "iscrowd": int(crowd)}
        for image, one in enumerate(targets)
        for box, label, crowd in zip(
            box_convert(one["boxes"].cpu().double(), "xyxy", "xywh").tolist(),
            one["labels"].tolist(),
            one["iscrowd"].tolist() if "iscrowd" in one else [0] * len(one["labels"]),
            strict=True,
        )
    ]
    labels = sorted({*found.category_ids.tolist(), *(row["category_id"] for row in objects)})
    truth = {
        "images": [{"id": image} for image in range(len(targets))],
        "categories": [{"id": label, "name": str(label)} for label in labels],
        "annotations": objects,
    }
    ground_truth = GroundTruth.from_coco(truth)
    calibration = calibrate_detections(ground_truth, found, iou=iou)[0]
    least_score = _least_score(ground_truth, found)
    if keep_ap_at is not None and (precision := float(calibration([least_score])[0])) < keep_ap_at:
        bent = np.interp(calibration.y, [0.0, precision, 1.0], [0.0, keep_ap_at, 1.0])
        calibration = Calibration(x=calibration.x, y=bent)
    score_map = ScoreMap(calibration)
    score_map.least_score = least_score
    return score_map


def _least_score(truth: GroundTruth, found: DetectionTable) -> float:
    """The highest score such that the detections above it still have ``KEPT_AP`` of the AP of all."""

    def ap_above(score: float) -> float:
        keep = found.scores > score
        columns = {name: getattr(found, name)[keep] for name in ("image_ids", "category_ids", "xywh", "scores")}
        return coco_metrics(truth, replace(found, **columns)).AP

    wanted = KEPT_AP * ap_above(-1.0)
    scores = np.unique(found.scores)
    too_high = bisect_left(range(len(scores)), True, key=lambda place: not ap_above(float(scores[place])) >= wanted)
    return float(scores[too_high - 1]) if too_high else 0.0


def calibrate(
    model: Model,
    images: Sequence[Tensor] | None,
    targets: Sequence[Mapping[str, Tensor]] = (),
    *,
    score_thresh: float | None = None,
    keep_ap_at: float | None = None,
    iou: float = 0.5,
    batch_size: int = 8,
) -> Model:
    """Makes the scores of a torchvision RetinaNet, FCOS or SSD mean precision.

    From then on a detection with score 0.7 is right in about 7 of 10 cases. What is found and its order stay as they
    were. The model's own score threshold becomes one of precision, too, as far as AP allows: where it would drop
    detections that AP needs, it is lowered, and a warning tells so. Copies and pickles are calibrated, too;
    ``torch.jit.script`` needs a model without.

    Detectors of Hugging Face ``transformers`` are calibrated, too: see
    :func:`~aploss.detectors.hugging_face.calibrate_in_transformers`.

    Args:
        model: trained with any loss, see :func:`~aploss.detectors.use_loss`.
        images: held-out images [3, h, w], some hundred of them; None takes a calibration away.
        targets: of these images, as the model is trained with.
        score_thresh: the least precision of a detection, whatever that costs in AP; by default the model's own
            threshold, or less where AP needs it.
        keep_ap_at: for models of ``transformers``, whose threshold is the caller's.
        iou: overlap from which on a detection is correct.
        batch_size: images that go through the model together.

    Returns:
        The same model. Its ``score_thresh`` is now that of the scores before the map; call this again to change it.
        Calling it again fits anew.

    Raises:
        ConfigError: if the model is of another kind.
        DataError: if there is no object in the images, or not one target per image.

    Warns:
        ScoreThresholdWarning: if the model's threshold was lowered.
    """
    from aploss.detectors.hugging_face import calibrate_in_transformers, is_transformers_model

    if is_transformers_model(model):
        if score_thresh is not None:
            raise ConfigError("models of transformers have no score_thresh; post-processing has")
        return calibrate_in_transformers(model, images, targets, iou=iou, keep_ap_at=keep_ap_at)
    if not isinstance(model, RetinaNet | FCOS | SSD):
        raise ConfigError(
            "calibrate takes torchvision's RetinaNet, FCOS or SSD, or a detector of transformers, "
            f"got {type(model).__name__}"
        )
    if keep_ap_at is not None:
        raise ConfigError(f"keep_ap_at is for models of transformers; {type(model).__name__} has a score_thresh")
    if isinstance(earlier := getattr(model, "score_map", None), ScoreMap):
        earlier.handle.remove()
        model.score_thresh = earlier.before
        del model.score_map
    if images is None:
        return model
    precision = model.score_thresh if score_thresh is None else score_thresh
    score_map = fit_score_map(_detect_all(model, images, batch_size), targets, iou=iou)
    score_map.before = model.score_thresh
    score_map.handle = model.register_forward_hook(_map_scores)
    model.score_map = score_map.to(next(model.parameters()).device)
    model.score_thresh = score_map.inverse(precision)
    if score_thresh is None and score_map.least_score < model.score_thresh:
        model.score_thresh = score_map.least_score
        lowered = score_map(torch.tensor(score_map.least_score)).item()
        warnings.warn(
            f"{type(model).__name__} would drop detections with a precision below {precision:g}, which AP needs: its "
            f"threshold is lowered to {lowered:.2g}; calibrate(..., score_thresh={precision:g}) does not lower it",
            ScoreThresholdWarning,
            stacklevel=2,
        )
    return model


def _map_scores(model: Any, _: Any, output: Any) -> None:
    """A forward hook: in training mode the output is a dict of losses."""
    if not model.training:
        for found in output:
            found["scores"] = model.score_map(found["scores"])


def _detect_all(model: Any, images: Sequence[Tensor], batch_size: int) -> list[dict[str, Tensor]]:
    """All detections, whatever their score."""
    threshold, was_training = model.score_thresh, model.training
    device = next(model.parameters()).device
    model.score_thresh = 0.0
    model.eval()
    try:
        with torch.inference_mode():
            return [
                found
                for start in range(0, len(images), batch_size)
                for found in model([one.to(device) for one in images[start : start + batch_size]])
            ]
    finally:
        model.score_thresh = threshold
        model.train(was_training)
