"""``use_loss`` and ``calibrate`` for torchvision's RetinaNet, FCOS and SSD.

These models call ``compute_loss`` of their head (RetinaNet, FCOS) or of themselves (SSD) with the matches they made.
An attribute of that one object shadows the method of its class. Removing the attribute restores the model.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torchvision.models.detection.fcos import FCOS
from torchvision.models.detection.retinanet import RetinaNet
from torchvision.models.detection.ssd import SSD

from aploss.detectors.criterion import classification_loss
from aploss.detectors.predict import evaluation_mode
from aploss.integrations import shared
from aploss.losses.traits import traits_of

Targets = Sequence[Mapping[str, Tensor]]
SUPPORTED = (RetinaNet, FCOS, SSD)
METHOD, LOSS, JIT_IGNORED = "compute_loss", "classification_loss", "__jit_ignored_attributes__"


def swap_loss(model: Any, loss: nn.Module | None, score_thresh: float | None) -> None:
    """See :func:`aploss.integrations.use_loss`."""
    if loss is not None:
        shared.check_loss(loss, model, has_background=isinstance(model, SSD))
    calibrate(model, None)  # a calibration belongs to the previous loss
    holder = model if isinstance(model, SSD) else model.head
    original_threshold = model.score_thresh
    if isinstance(swapped := vars(holder).get(METHOD), _SwappedLoss):
        original_threshold = swapped.score_thresh
        for name in (METHOD, LOSS, JIT_IGNORED):
            delattr(holder, name)
    if loss is None:
        model.score_thresh = original_threshold
        return
    ignored = [*getattr(holder, JIT_IGNORED, ()), METHOD, LOSS]  # torch.jit.script compiles torchvision's own method
    kind = next(kind for kind in SUPPORTED if isinstance(model, kind))
    setattr(holder, METHOD, _SwappedLoss(kind, holder, original_threshold))
    setattr(holder, LOSS, loss)  # a submodule: moved with the model, and saved if it has parameters
    setattr(holder, JIT_IGNORED, ignored)
    if score_thresh is not None:
        model.score_thresh = score_thresh
    if model.score_thresh > 0 and not traits_of(loss).calibrated:
        warnings.warn(
            f"{type(model).__name__} drops detections with a score below {model.score_thresh:g}, but "
            f"{traits_of(loss).label or type(loss).__name__} determines the order of scores, not their scale: keep all "
            "with use_loss(..., score_thresh=0), and fit a scale after training with calibrate(model, images, targets)",
            shared.ScoreThresholdWarning,
            stacklevel=3,
        )


@dataclass(eq=False)
class _SwappedLoss:
    """Computes torchvision's dict of losses with another classification loss."""

    kind: type  # one of SUPPORTED
    holder: Any  # the head or model whose ``compute_loss`` this replaces
    score_thresh: float  # the model's original threshold

    def __call__(
        self, targets: Targets, head_outputs: dict[str, Tensor], anchors: list[Tensor], matched_idxs: list[Tensor]
    ) -> dict[str, Tensor]:
        first_class = 1 if self.kind is SSD else 0  # label of the first class column
        classes, boxes = [one["labels"] - first_class for one in targets], [one["boxes"] for one in targets]
        labels = shared.labels_from_matches(torch.stack(matched_idxs), classes, boxes)
        positives = (labels.images, labels.anchors)
        matched = torch.stack(anchors)[positives]
        loss, logits = self.holder.classification_loss, head_outputs["cls_logits"]
        parts = classification_loss(
            loss,
            shared.softmax_log_odds(logits) if self.kind is SSD and not traits_of(loss).softmax else logits,
            labels,
            boxes=lambda: self._decode(head_outputs["bbox_regression"][positives].float(), matched),
        )
        if self.kind is RetinaNet:  # a mean over images of means over positives
            box_loss = self.holder.regression_head.compute_loss(targets, head_outputs, anchors, matched_idxs)
            losses = {"bbox_regression": box_loss}
        else:
            # Other losses are means over the positives of the batch. They are passed as one image without negatives,
            # so that torchvision's classification loss, which is discarded, costs almost nothing.
            gathered = {"boxes": labels.boxes, "labels": labels.positive_classes + first_class}
            outputs = {key: value[positives][None] for key, value in head_outputs.items()}
            matches = torch.arange(len(labels.boxes), device=labels.boxes.device)
            losses = type(self.holder).compute_loss(self.holder, [gathered], outputs, [matched], [matches])
        if parts.localisation is not None:
            losses["bbox_regression"] = parts.localisation
        return {**losses, "classification": parts.classification}

    def _decode(self, deltas: Tensor, anchors: Tensor) -> Any:
        """Boxes [P, 4] from box regressions [P, 4]."""
        if self.kind is FCOS:
            return self.holder.box_coder.decode(deltas, anchors)
        coder = self.holder.regression_head.box_coder if self.kind is RetinaNet else self.holder.box_coder
        return coder.decode_single(deltas, anchors)


@dataclass(eq=False)
class _CalibratedScores(shared.CalibrationHook):
    original_threshold: float

    def __call__(self, model: nn.Module, _inputs: Any, output: Any) -> None:
        if not model.training:  # the output is a dict of losses in training mode
            for found in output:
                found["scores"] = self.calibrated(found["scores"])


def calibrate(
    model: Any,
    images: Sequence[Tensor] | None,
    targets: Targets = (),
    *,
    score_thresh: float | None = None,
    iou: float = 0.5,
    batch_size: int = 8,
) -> None:
    """See :func:`aploss.integrations.calibrate`."""
    if (earlier := shared.find_hook(model, remove=True)) is not None:
        model.score_thresh = earlier.original_threshold
    if images is None:
        return
    precision = model.score_thresh if score_thresh is None else score_thresh
    calibration, least_score = shared.fit_precision(_detect_all(model, images, batch_size), targets, iou=iou)
    model.register_forward_hook(_CalibratedScores(calibration, model.score_thresh))
    model.score_thresh = float(np.interp(precision, calibration.y, calibration.x))
    if score_thresh is None and least_score < model.score_thresh:
        model.score_thresh = least_score
        warnings.warn(
            f"{type(model).__name__} would drop detections with a precision below {precision:g} that AP needs: its "
            f"threshold was lowered to {float(calibration([least_score])[0]):.2g}; calibrate(..., "
            f"score_thresh={precision:g}) enforces it",
            shared.ScoreThresholdWarning,
            stacklevel=3,
        )


def _detect_all(model: Any, images: Sequence[Tensor], batch_size: int) -> list[dict[str, Tensor]]:
    """Detections without a score threshold."""
    threshold, device = model.score_thresh, next(model.parameters()).device
    model.score_thresh = 0.0
    try:
        with evaluation_mode(model):
            batches = (images[start : start + batch_size] for start in range(0, len(images), batch_size))
            return [found for batch in batches for found in model([image.to(device) for image in batch])]
    finally:
        model.score_thresh = threshold
