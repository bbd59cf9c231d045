"""Scores that mean precision, in a torchvision detector that was trained with a ranking loss.

A ranking loss orders detections and leaves the scores anywhere, so that the score threshold of a model cuts at an
arbitrary place. Here a monotone map from scores to precision is fitted on held-out images. The order of detections, and
with it AP, stays what it was.
"""

from collections.abc import Mapping, Sequence
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
from aploss.evaluation import Calibration, DetectionTable, calibrate_detections

Model = TypeVar("Model", bound=nn.Module)


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
    detections: Sequence[Mapping[str, Any]], targets: Sequence[Mapping[str, Any]], *, iou: float = 0.5
) -> ScoreMap:
    """Fits the map on detections of held-out images, made without a score threshold.

    Args:
        detections: for each image ``boxes`` [n, 4] (corners), ``scores`` [n] in [0, 1] and ``labels`` [n].
        targets: for each image ``boxes`` [m, 4] and ``labels`` [m], counted as the detections' are, and optionally
            ``iscrowd`` [m].
        iou: overlap from which on a detection is correct.

    Raises:
        DataError: if there is no object to find, or not one target per image.
    """
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
    return ScoreMap(calibrate_detections(truth, found, iou=iou)[0])


def calibrate(
    model: Model,
    images: Sequence[Tensor] | None,
    targets: Sequence[Mapping[str, Tensor]] = (),
    *,
    score_thresh: float | None = None,
    iou: float = 0.5,
    batch_size: int = 8,
) -> Model:
    """Makes the scores of a torchvision RetinaNet, FCOS or SSD mean precision.

    From then on a detection with score 0.7 is right in about 7 of 10 cases, and the model's score threshold drops what
    is below that precision. What is found and its order stay as they were. Copies and pickles are calibrated, too;
    ``torch.jit.script`` needs a model without.

    Detectors of Hugging Face ``transformers`` are calibrated, too: see
    :func:`~aploss.detectors.hugging_face.calibrate_in_transformers`.

    Args:
        model: trained with any loss, see :func:`~aploss.detectors.use_loss`.
        images: held-out images [3, h, w], some hundred of them; None takes a calibration away.
        targets: of these images, as the model is trained with.
        score_thresh: the least precision of a detection, by default the model's threshold as it is.
        iou: overlap from which on a detection is correct.
        batch_size: images that go through the model together.

    Returns:
        The same model. Its ``score_thresh`` is now that of the scores before the map; call this again to change it.
        Calling it again fits anew.

    Raises:
        ConfigError: if the model is of another kind.
        DataError: if there is no object in the images, or not one target per image.
    """
    from aploss.detectors.hugging_face import calibrate_in_transformers, is_transformers_model

    if is_transformers_model(model):
        if score_thresh is not None:
            raise ConfigError("models of transformers have no score_thresh; post-processing has")
        return calibrate_in_transformers(model, images, targets, iou=iou)
    if not isinstance(model, RetinaNet | FCOS | SSD):
        raise ConfigError(
            "calibrate takes torchvision's RetinaNet, FCOS or SSD, or a detector of transformers, "
            f"got {type(model).__name__}"
        )
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
