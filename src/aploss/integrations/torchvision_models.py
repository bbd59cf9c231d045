"""``use_loss`` and ``calibrate`` for torchvision's RetinaNet, FCOS, SSD, and Faster, Mask and Keypoint R-CNN.

RetinaNet and FCOS compute their losses in ``compute_loss`` of their head, SSD in its own, R-CNNs in ``compute_loss`` of
their RPN and ``forward`` of their RoI heads. An attribute of that one object shadows the method of its class. Removing
the attribute restores the model.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torchvision.models.detection.faster_rcnn import FasterRCNN
from torchvision.models.detection.fcos import FCOS
from torchvision.models.detection.retinanet import RetinaNet
from torchvision.models.detection.ssd import SSD

from aploss.detectors.criterion import LossParts, classification_loss
from aploss.detectors.labels import IGNORED, AnchorLabels
from aploss.detectors.predict import evaluation_mode
from aploss.integrations import shared
from aploss.losses.traits import traits_of

Targets = Sequence[Mapping[str, Tensor]]
SUPPORTED = (RetinaNet, FCOS, SSD, FasterRCNN)  # Mask and Keypoint R-CNN are subclasses of Faster R-CNN
LOSS, JIT_IGNORED = "classification_loss", "__jit_ignored_attributes__"


class _Place(NamedTuple):
    """A method that computes losses, and the module whose ``score_thresh`` applies to the scores that it trains."""

    thresholded: Any
    holder: Any
    method: str
    replacement: "type[_SwappedLoss]"


def _places(model: Any) -> list[_Place]:
    """The methods to shadow. The last one trains the scores of the detections."""
    if isinstance(model, FasterRCNN):
        rpn, heads = model.rpn, model.roi_heads
        return [_Place(rpn, rpn, "compute_loss", _ObjectnessLoss), _Place(heads, heads, "forward", _BoxHeadLoss)]
    replacement = next(one for kind, one in DENSE.items() if isinstance(model, kind))
    return [_Place(model, model if isinstance(model, SSD) else model.head, "compute_loss", replacement)]


def swap_loss(model: Any, loss: nn.Module | None, score_thresh: float | None) -> None:
    """See :func:`aploss.integrations.use_loss`."""
    places = _places(model)
    if loss is not None:
        shared.check_loss(loss, model, has_background=isinstance(model, SSD | FasterRCNN))
    calibrate(model, None)  # a calibration belongs to the previous loss
    for place in places:
        _swap(place, loss)
    if loss is None:
        return
    if score_thresh is not None:
        for place in places[:-1]:  # proposals that this threshold drops cannot become detections
            place.thresholded.score_thresh = min(place.thresholded.score_thresh, score_thresh)
        places[-1].thresholded.score_thresh = score_thresh
    highest = max(place.thresholded.score_thresh for place in places)
    if highest > 0 and not traits_of(loss).calibrated:
        warnings.warn(
            f"{type(model).__name__} drops detections with a score below {highest:g}, but "
            f"{traits_of(loss).label or type(loss).__name__} determines the order of scores, not their scale: keep all "
            "with use_loss(..., score_thresh=0), and fit a scale after training with calibrate(model, images, targets)",
            shared.ScoreThresholdWarning,
            stacklevel=3,
        )


def _swap(place: _Place, loss: nn.Module | None) -> None:
    thresholded, holder, method, replacement = place
    original_threshold = thresholded.score_thresh
    if isinstance(swapped := vars(holder).get(method), _SwappedLoss):
        original_threshold = swapped.score_thresh
        for name in (method, LOSS, JIT_IGNORED):
            delattr(holder, name)
    if loss is None:
        thresholded.score_thresh = original_threshold
        return
    ignored = [*getattr(holder, JIT_IGNORED, ()), method, LOSS]  # torch.jit.script compiles torchvision's own method
    setattr(holder, method, replacement(holder, original_threshold))
    setattr(holder, LOSS, loss)  # a submodule: moved with the model, and saved if it has parameters
    setattr(holder, JIT_IGNORED, ignored)


@dataclass(eq=False)
class _SwappedLoss:
    """Computes what torchvision's method computes, with another classification loss."""

    holder: Any  # the module whose method this replaces
    score_thresh: float  # its original threshold


class _DenseLoss(_SwappedLoss):
    """The dict of losses of RetinaNet, FCOS and SSD."""

    first_class = 0  # label of the first class column

    def __call__(
        self, targets: Targets, head_outputs: dict[str, Tensor], anchors: list[Tensor], matched_idxs: list[Tensor]
    ) -> dict[str, Tensor]:
        classes, boxes = [one["labels"] - self.first_class for one in targets], [one["boxes"] for one in targets]
        labels = shared.labels_from_matches(torch.stack(matched_idxs), classes, boxes)
        positives = (labels.images, labels.anchors)
        matched = torch.stack(anchors)[positives]
        loss, logits = self.holder.classification_loss, head_outputs["cls_logits"]
        parts = classification_loss(
            loss,
            shared.softmax_log_odds(logits) if self.first_class and not traits_of(loss).softmax else logits,
            labels,
            boxes=lambda: self.decode(head_outputs["bbox_regression"][positives].float(), matched),
        )
        outputs = {**head_outputs, "cls_logits": logits.detach()}  # torchvision's classification loss is discarded
        losses = type(self.holder).compute_loss(self.holder, targets, outputs, anchors, matched_idxs)
        if parts.localisation is not None:
            losses["bbox_regression"] = parts.localisation
        return {**losses, "classification": parts.classification}

    def decode(self, deltas: Tensor, anchors: Tensor) -> Any:
        """Boxes [P, 4] from box regressions [P, 4]."""
        return self.holder.box_coder.decode_single(deltas, anchors)


class _SSDLoss(_DenseLoss):
    first_class = 1  # after the background


class _FCOSLoss(_DenseLoss):
    def decode(self, deltas: Tensor, anchors: Tensor) -> Any:
        return self.holder.box_coder.decode(deltas, anchors)


class _RetinaNetLoss(_DenseLoss):
    def decode(self, deltas: Tensor, anchors: Tensor) -> Any:
        return self.holder.regression_head.box_coder.decode_single(deltas, anchors)


DENSE: dict[type, type[_DenseLoss]] = {RetinaNet: _RetinaNetLoss, FCOS: _FCOSLoss, SSD: _SSDLoss}


class _RCNNLoss(_SwappedLoss):
    """A loss of an R-CNN, whose regression targets are encoded relative to anchors that it does not get."""

    def parts(self, scores: Tensor, classes: Tensor, deltas: Tensor, encoded: Tensor) -> LossParts:
        """The losses of scores [B, A, K] or [B, A, K + 1], given the regressions of the positives [P, 4].

        ``classes`` [B, A] are those of :class:`AnchorLabels`, ``encoded`` [P, 4] the boxes of the positives' objects.
        """
        # IoU and GIoU of two boxes do not change if both are moved and their axes scaled: any anchor will do
        anchors = torch.tensor([0.0, 0.0, 1.0, 1.0], device=deltas.device).expand(len(deltas), 4)
        decode = self.holder.box_coder.decode_single
        images, places = (classes >= 0).nonzero(as_tuple=True)
        labels = AnchorLabels(classes, images, places, decode(encoded.float(), anchors))
        loss = self.holder.classification_loss
        return classification_loss(loss, scores, labels, boxes=lambda: decode(deltas.float(), anchors))


class _ObjectnessLoss(_RCNNLoss):
    """Replaces ``RegionProposalNetwork.compute_loss``: ranks all anchors, of which torchvision samples 256."""

    def __call__(
        self, objectness: Tensor, pred_bbox_deltas: Tensor, labels: list[Tensor], regression_targets: list[Tensor]
    ) -> tuple[Tensor, Tensor]:
        box_loss = type(self.holder).compute_loss(
            self.holder, objectness, pred_bbox_deltas, labels, regression_targets
        )[1]
        scores = objectness.reshape(len(labels), -1, 1)
        if traits_of(self.holder.classification_loss).softmax:
            scores = F.pad(scores, (1, 0))  # with a background logit of 0, softmax is the sigmoid
        classes = torch.stack(labels).long() - 1  # from 1, 0 and -1 (ignored)
        positive = (classes >= 0).flatten()
        parts = self.parts(scores, classes, pred_bbox_deltas[positive], torch.cat(regression_targets)[positive])
        return parts.classification, box_loss if parts.localisation is None else parts.localisation


class _BoxHeadLoss(_RCNNLoss):
    """Wraps ``RoIHeads.forward`` and replaces the losses of the box head that it returns."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # the hook would be a constant of the compiled code
    def __call__(self, *arguments: Any, **options: Any) -> Any:
        heads, select = self.holder, self.holder.select_training_samples
        forward = type(heads).forward
        if not heads.training:
            return forward(heads, *arguments, **options)
        seen: dict[str, Any] = {}

        def select_training_samples(*inputs: Any) -> Any:
            samples = select(*inputs)
            seen.update(labels=samples[2], regression_targets=samples[3])
            return samples

        heads.select_training_samples = select_training_samples
        hook = heads.box_predictor.register_forward_hook(lambda _module, _inputs, output: seen.update(outputs=output))
        try:
            detections, losses = forward(heads, *arguments, **options)
        finally:
            hook.remove()
            del heads.select_training_samples
        logits, regression = seen["outputs"]
        classification, localisation = self.losses(logits, regression, seen["labels"], seen["regression_targets"])
        if localisation is not None:
            losses["loss_box_reg"] = localisation
        return detections, {**losses, "loss_classifier": classification}

    def losses(
        self, class_logits: Tensor, box_regression: Tensor, labels: list[Tensor], regression_targets: list[Tensor]
    ) -> tuple[Tensor, Tensor | None]:
        """Ranks the proposals that torchvision samples for training."""
        # images may have different numbers of proposals
        logits = pad_sequence([*torch.split(class_logits, [len(one) for one in labels])], batch_first=True)
        classes = pad_sequence([one - 1 for one in labels], batch_first=True, padding_value=IGNORED)
        all_labels = torch.cat(labels)
        positive = (all_labels > 0).nonzero().squeeze(1)
        deltas = box_regression.reshape(len(box_regression), -1, 4)[positive, all_labels[positive]]
        needs_softmax = traits_of(self.holder.classification_loss).softmax
        scores = logits if needs_softmax else shared.softmax_log_odds(logits)
        parts = self.parts(scores, classes, deltas, torch.cat(regression_targets)[positive])
        return parts.classification, parts.localisation


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
    holder = _places(model)[-1].thresholded
    if (earlier := shared.find_hook(model, remove=True)) is not None:
        holder.score_thresh = earlier.original_threshold
    if images is None:
        return
    precision = holder.score_thresh if score_thresh is None else score_thresh
    calibration, least_score = shared.fit_precision(_detect_all(model, images, batch_size), targets, iou=iou)
    model.register_forward_hook(_CalibratedScores(calibration, holder.score_thresh))
    holder.score_thresh = float(np.interp(precision, calibration.y, calibration.x))
    if score_thresh is None and least_score < holder.score_thresh:
        holder.score_thresh = least_score
        warnings.warn(
            f"{type(model).__name__} would drop detections with a precision below {precision:g} that AP needs: its "
            f"threshold was lowered to {float(calibration([least_score])[0]):.2g}; calibrate(..., "
            f"score_thresh={precision:g}) enforces it",
            shared.ScoreThresholdWarning,
            stacklevel=3,
        )


def _detect_all(model: Any, images: Sequence[Tensor], batch_size: int) -> list[dict[str, Tensor]]:
    """Detections without a score threshold, without masks and keypoints."""
    holder, device = _places(model)[-1].thresholded, next(model.parameters()).device
    threshold, holder.score_thresh = holder.score_thresh, 0.0
    try:
        with evaluation_mode(model):
            batches = (images[start : start + batch_size] for start in range(0, len(images), batch_size))
            found = (one for batch in batches for one in model([image.to(device) for image in batch]))
            return [{key: one[key] for key in ("boxes", "labels", "scores")} for one in found]
    finally:
        holder.score_thresh = threshold
