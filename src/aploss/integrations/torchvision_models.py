"""``use_loss`` and ``calibrate`` for torchvision's RetinaNet, FCOS, SSD, and Faster, Mask and Keypoint R-CNN.

RetinaNet and FCOS compute their losses in ``compute_loss`` of their head, SSD in its own, R-CNNs in ``compute_loss`` of
their RPN and ``forward`` of their RoI heads. An attribute of that one object shadows the method of its class. Removing
the attribute restores the model.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torchvision.models.detection.faster_rcnn import FasterRCNN
from torchvision.models.detection.fcos import FCOS, FCOSHead
from torchvision.models.detection.retinanet import RetinaNet
from torchvision.models.detection.ssd import SSD

from aploss.detectors.criterion import LossParts, classification_loss
from aploss.detectors.labels import IGNORED, AnchorLabels
from aploss.detectors.predict import evaluation_mode
from aploss.integrations import shared
from aploss.losses.traits import traits_of

Targets = Sequence[Mapping[str, Tensor]]
SUPPORTED = (RetinaNet, FCOS, SSD, FasterRCNN)  # Mask and Keypoint R-CNN are subclasses of Faster R-CNN
LOSS, OWN_THRESHOLD, JIT_IGNORED = "classification_loss", "own_score_thresh", "__jit_ignored_attributes__"


def _methods(model: Any) -> list[tuple[Any, str, Callable[..., Any]]]:
    """The methods to shadow, as the module, its method's name and the replacement, called with the module first."""
    if isinstance(model, FasterRCNN):
        return [(model.rpn, "compute_loss", _objectness_loss), (model.roi_heads, "forward", _box_head_forward)]
    return [(model if isinstance(model, SSD) else model.head, "compute_loss", _dense_losses)]


def _thresholded(model: Any) -> list[Any]:
    """The modules with a ``score_thresh`` that applies to the scores of each method; the last is for detections."""
    return [model.rpn, model.roi_heads] if isinstance(model, FasterRCNN) else [model]


def swap_loss(model: Any, loss: nn.Module | None, score_thresh: float | None) -> None:
    """See :func:`aploss.integrations.use_loss`."""
    if loss is not None:
        shared.check_loss(loss, model, has_background=isinstance(model, SSD | FasterRCNN))
    calibrate(model, None)  # a calibration belongs to the previous loss
    thresholded = _thresholded(model)
    for (holder, method, compute), limited in zip(_methods(model), thresholded, strict=True):
        own_threshold = getattr(holder, OWN_THRESHOLD, limited.score_thresh)
        if hasattr(holder, OWN_THRESHOLD):
            for name in (method, LOSS, OWN_THRESHOLD, JIT_IGNORED):
                delattr(holder, name)
        if loss is None:
            limited.score_thresh = own_threshold
            continue
        ignored = [*getattr(holder, JIT_IGNORED, ()), method, LOSS]  # torch.jit.script compiles torchvision's method
        setattr(holder, method, partial(compute, holder))
        setattr(holder, LOSS, loss)  # a submodule: moved with the model, and saved if it has parameters
        setattr(holder, OWN_THRESHOLD, own_threshold)
        setattr(holder, JIT_IGNORED, ignored)
    if loss is None:
        return
    if score_thresh is not None:
        for limited in thresholded:  # proposals that this threshold drops cannot become detections
            limited.score_thresh = min(limited.score_thresh, score_thresh)
        thresholded[-1].score_thresh = score_thresh
    highest = max(limited.score_thresh for limited in thresholded)
    if highest > 0 and not traits_of(loss).calibrated:
        dropped = f"detections with a score below {highest:g}"
        shared.warn_uncalibrated(loss, model, dropped, "keep all with use_loss(..., score_thresh=0)")


def _dense_losses(
    holder: Any, targets: Targets, head_outputs: dict[str, Tensor], anchors: list[Tensor], matched_idxs: list[Tensor]
) -> dict[str, Tensor]:
    """Replaces ``compute_loss`` of the heads of RetinaNet and FCOS, and of SSD."""
    loss, logits, has_background = holder.classification_loss, head_outputs["cls_logits"], isinstance(holder, SSD)
    classes, boxes = [one["labels"] - int(has_background) for one in targets], [one["boxes"] for one in targets]
    labels = shared.labels_from_matches(torch.stack(matched_idxs), classes, boxes)
    coder = holder.box_coder if has_background or isinstance(holder, FCOSHead) else holder.regression_head.box_coder
    decode = coder.decode if isinstance(holder, FCOSHead) else coder.decode_single
    positives = (labels.images, labels.anchors)
    parts = classification_loss(
        loss,
        shared.softmax_log_odds(logits) if has_background and not traits_of(loss).softmax else logits,
        labels,
        boxes=lambda: decode(head_outputs["bbox_regression"][positives].float(), torch.stack(anchors)[positives]),
    )
    outputs = {**head_outputs, "cls_logits": logits.detach()}  # torchvision's classification loss is discarded
    losses = type(holder).compute_loss(holder, targets, outputs, anchors, matched_idxs)
    if parts.localisation is not None:
        losses["bbox_regression"] = parts.localisation
    return {**losses, "classification": parts.classification}


def _objectness_loss(
    rpn: Any, objectness: Tensor, pred_bbox_deltas: Tensor, labels: list[Tensor], regression_targets: list[Tensor]
) -> tuple[Tensor, Tensor]:
    """Replaces ``RegionProposalNetwork.compute_loss``: ranks all anchors, of which torchvision samples 256."""
    _, box_loss = type(rpn).compute_loss(rpn, objectness, pred_bbox_deltas, labels, regression_targets)
    scores = objectness.reshape(len(labels), -1, 1)
    if traits_of(rpn.classification_loss).softmax:
        scores = F.pad(scores, (1, 0))  # with a background logit of 0, softmax is the sigmoid
    classes = torch.stack(labels).long() - 1  # from 1, 0 and -1 (ignored)
    positive = (classes >= 0).flatten()
    parts = _rcnn_loss(rpn, scores, classes, pred_bbox_deltas[positive], torch.cat(regression_targets)[positive])
    return parts.classification, box_loss if parts.localisation is None else parts.localisation


@torch.compiler.disable  # type: ignore[untyped-decorator]  # the hook would be a constant of the compiled code
def _box_head_forward(heads: Any, features: Any, proposals: Any, image_shapes: Any, targets: Any = None) -> Any:
    """Wraps ``RoIHeads.forward`` and replaces the losses of the box head, for the proposals that it samples."""
    forward = partial(type(heads).forward, heads, features, proposals, image_shapes, targets)
    if not heads.training:
        return forward()
    _, _, labels, regression_targets = samples = heads.select_training_samples(proposals, targets)
    heads.select_training_samples = lambda *_: samples
    outputs: list[Any] = []
    hook = heads.box_predictor.register_forward_hook(lambda _module, _inputs, output: outputs.append(output))
    try:
        detections, losses = forward()
    finally:
        hook.remove()
        del heads.select_training_samples
    class_logits, box_regression = outputs[0]
    # images may have different numbers of proposals
    scores = pad_sequence([*torch.split(class_logits, [len(one) for one in labels])], batch_first=True)
    classes = pad_sequence([one - 1 for one in labels], batch_first=True, padding_value=IGNORED)
    all_labels = torch.cat(labels)
    positive = (all_labels > 0).nonzero().squeeze(1)
    deltas = box_regression.reshape(len(box_regression), -1, 4)[positive, all_labels[positive]]
    if not traits_of(heads.classification_loss).softmax:
        scores = shared.softmax_log_odds(scores)
    parts = _rcnn_loss(heads, scores, classes, deltas, torch.cat(regression_targets)[positive])
    if parts.localisation is not None:
        losses["loss_box_reg"] = parts.localisation
    return detections, {**losses, "loss_classifier": parts.classification}


def _rcnn_loss(holder: Any, scores: Tensor, classes: Tensor, deltas: Tensor, encoded: Tensor) -> LossParts:
    """The losses of scores [B, A, K] or [B, A, K + 1], given the regressions of the positives [P, 4].

    ``classes`` [B, A] are those of :class:`AnchorLabels`. ``encoded`` [P, 4] are the boxes of the positives' objects
    relative to anchors that are not known here. IoU and GIoU of two boxes do not change if both are moved and their
    axes scaled, so that any anchor will do.
    """
    anchors = torch.tensor([0.0, 0.0, 1.0, 1.0], device=deltas.device).expand(len(deltas), 4)
    decode = holder.box_coder.decode_single
    images, places = (classes >= 0).nonzero(as_tuple=True)
    labels = AnchorLabels(classes, images, places, decode(encoded.float(), anchors))
    loss = holder.classification_loss
    return classification_loss(loss, scores, labels, boxes=lambda: decode(deltas.float(), anchors))


@dataclass(eq=False)
class _CalibratedScores(shared.CalibrationHook):
    score_thresh: float  # the model's own threshold

    def __call__(self, model: nn.Module, _inputs: Any, output: Any) -> None:
        if not model.training:  # the output is a dict of losses in training mode
            for found in output:
                found["scores"] = self.calibrated(found["scores"])


def calibrate(
    model: Any,
    images: Sequence[Tensor] | None,
    targets: Targets = (),
    *,
    score_thresh: float = 0.0,
    iou: float = 0.5,
    batch_size: int = 8,
) -> None:
    """See :func:`aploss.integrations.calibrate`."""
    limited = _thresholded(model)[-1]
    if (earlier := shared.find_hook(model, remove=True)) is not None:
        limited.score_thresh = earlier.score_thresh
    if images is None:
        return
    own_threshold, limited.score_thresh = limited.score_thresh, 0.0
    detections, device = [], next(model.parameters()).device
    try:
        with evaluation_mode(model):
            for start in range(0, len(images), batch_size):
                found = model([image.to(device) for image in images[start : start + batch_size]])
                detections += [{key: one[key] for key in ("boxes", "labels", "scores")} for one in found]  # no masks
    finally:
        limited.score_thresh = own_threshold
    calibration = shared.fit_precision(detections, targets, iou=iou)
    model.register_forward_hook(_CalibratedScores(calibration, own_threshold))
    limited.score_thresh = float(np.interp(score_thresh, calibration.y, calibration.x)) if score_thresh > 0 else 0.0
