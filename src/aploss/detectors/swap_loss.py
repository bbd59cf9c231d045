"""Our losses in a torchvision detector that somebody already has.

torchvision's models call ``compute_loss`` of their head (RetinaNet, FCOS) or of themselves (SSD) with the matches they
made. That is where the loss goes in: an attribute of this one object stands before the method of its class. Classes,
weights and their names, and everything at inference stay torchvision's; taken away again, the model is what it was.
"""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torchvision.models.detection.fcos import FCOS
from torchvision.models.detection.retinanet import RetinaNet
from torchvision.models.detection.ssd import SSD
from torchvision.ops import generalized_box_iou_loss

from aploss.detectors.criterion import classification_loss, iou_of_pairs
from aploss.detectors.labels import AnchorLabels
from aploss.detectors.score_map import ScoreThresholdWarning, calibrate
from aploss.errors import ConfigError
from aploss.losses.traits import traits_of

Model = TypeVar("Model", bound=nn.Module)
Targets = Sequence[Mapping[str, Tensor]]
LEAST_LOG_ODDS_GAP = 1e-6  # 1 - p of the surest score, so that log-odds stay finite
METHOD, LOSS, HIDDEN = "compute_loss", "classification_loss", "__jit_ignored_attributes__"


def use_loss(
    model: Model,
    loss: nn.Module | None,
    *,
    score_thresh: float | None = None,
    weights: Mapping[str, float] | None = None,
) -> Model:
    """Trains a torchvision RetinaNet, FCOS or SSD with another classification loss from now on.

    Or a detector of Hugging Face ``transformers``, for which see
    :func:`~aploss.detectors.hugging_face.use_loss_in_transformers`; what follows is torchvision's.

    Only the loss in training mode changes, on all images of the batch together: weights, matching,
    box loss, names of the losses and everything at inference stay as they are. Labels are torchvision's: the index of a
    logit's column, where SSD's column 0 is the background.

    RetinaNet and FCOS have one sigmoid score per column, which is what is ranked. SSD's classes and background share a
    softmax; ranked are the log-odds of each class against all else, since they order as the softmax scores at inference
    do. ``OHEMCrossEntropy`` is for SSD alone; ``ALRPLoss`` brings its own box loss, which then replaces the model's.

    Copies, pickles and compiled models have the loss, too. ``torch.jit.script`` gives a model for inference: its
    training mode is torchvision's own.

    Args:
        model: from ``torchvision.models.detection``, with any weights.
        loss: one of our loss objects, or any module of ``(scores, targets)`` with targets 1, 0, -1. None gives the
            model its own loss, scores and score threshold back.
        score_thresh: the model's score threshold from now on; 0 keeps every detection. Ranking losses order scores
            without giving them a scale.
        weights: of the loss terms, for models of ``transformers``.

    Returns:
        The same model. Calling it again sets another loss.

    Raises:
        ConfigError: if the model is of another kind, or the loss needs another kind or is none.

    Warns:
        ScoreThresholdWarning: if the model has a score threshold and the scores of the loss are not calibrated.

    Example:
        >>> from torchvision.models.detection import ssdlite320_mobilenet_v3_large
        >>> from aploss.losses import APLoss
        >>> model = ssdlite320_mobilenet_v3_large(weights=None, weights_backbone=None)
        >>> model = use_loss(model, APLoss(), score_thresh=0)
    """
    from aploss.detectors.hugging_face import is_transformers_model, use_loss_in_transformers

    if is_transformers_model(model):
        if score_thresh is not None:
            raise ConfigError("models of transformers have no score_thresh; post-processing has")
        return use_loss_in_transformers(model, loss, weights=weights)
    if not isinstance(model, RetinaNet | FCOS | SSD):
        raise ConfigError(
            "use_loss takes torchvision's RetinaNet, FCOS or SSD, or a detector of transformers, "
            f"got {type(model).__name__}"
        )
    if weights is not None:
        raise ConfigError(f"weights are for models of transformers, got {type(model).__name__}")
    if loss is not None:
        check_loss(loss, model, has_background=isinstance(model, SSD))
    calibrate(model, None)  # which belongs to the loss before
    holder = model if isinstance(model, SSD) else model.head
    swapped = vars(holder).get(METHOD)
    threshold = model.score_thresh  # of the model's own
    if isinstance(swapped, _SwappedLoss):
        threshold = swapped.score_thresh
        for name in (METHOD, LOSS, HIDDEN):
            delattr(holder, name)
    if loss is None:
        model.score_thresh = threshold
        return model
    kind = next(swapped for known, swapped in _KINDS.items() if isinstance(model, known))
    hidden = [*getattr(holder, HIDDEN, ()), METHOD, LOSS]
    setattr(holder, METHOD, kind(holder, threshold))
    setattr(holder, LOSS, loss)  # a module of the model: moved with it, and saved if it has weights
    setattr(holder, HIDDEN, hidden)  # torch.jit.script compiles torchvision's own method
    if score_thresh is not None:
        model.score_thresh = score_thresh
    if model.score_thresh > 0 and not traits_of(loss).calibrated:
        warnings.warn(
            f"{type(model).__name__} drops detections with a score below {model.score_thresh:g}, but the scores of "
            f"{traits_of(loss).label or type(loss).__name__} have an order and no scale: use_loss(..., score_thresh=0) "
            "keeps all, and calibrate(model, images, targets) fits a scale after training",
            ScoreThresholdWarning,
            stacklevel=2,
        )
    return model


def check_loss(loss: object, model: nn.Module, *, has_background: bool) -> None:
    """Refuses what is no loss object, and losses that need a background column where the model has none."""
    if not isinstance(loss, nn.Module):
        shown = f"the class {loss.__name__}" if isinstance(loss, type) else repr(loss)
        raise ConfigError(f"use_loss takes a loss object such as APLoss(), or None; got {shown}")
    if traits_of(loss).softmax and not has_background:
        raise ConfigError(f"{type(loss).__name__} needs a background column, which {type(model).__name__} lacks")


def softmax_log_odds(logits: Tensor) -> Tensor:
    """log(p_k / (1 - p_k)) of the K softmax scores of [..., K + 1] logits, background first.

    Example:
        >>> softmax_log_odds(torch.tensor([0.0, 0.0])).item()  # two equal columns
        0.0
    """
    log_scores = logits.float().log_softmax(dim=-1)[..., 1:].clamp(max=-LEAST_LOG_ODDS_GAP)
    return log_scores - torch.log(-torch.expm1(log_scores))


class _SwappedLoss:
    """Computes torchvision's dict of losses, with the classification loss that was handed in."""

    first_class = 0  # label of the first column that is a class

    def __init__(self, holder: Any, score_thresh: float) -> None:
        self.holder = holder  # the head or model whose `compute_loss` this stands for
        self.score_thresh = score_thresh  # what the model had before

    def __call__(
        self, targets: Targets, head_outputs: dict[str, Tensor], anchors: list[Tensor], matched_idxs: list[Tensor]
    ) -> dict[str, Tensor]:
        labels = self.labels(targets, matched_idxs)
        positives = (labels.images, labels.anchors)
        matched = torch.stack(anchors)[positives]

        def predicted_boxes() -> Any:
            return self.decode(head_outputs["bbox_regression"][positives].float(), matched)

        parts = classification_loss(
            self.holder.classification_loss,
            self.scores(head_outputs["cls_logits"]),
            labels,
            box_losses=lambda: generalized_box_iou_loss(predicted_boxes(), labels.boxes),
            ious=lambda: iou_of_pairs(predicted_boxes().detach(), labels.boxes),
        )
        losses = self.other_losses(labels, matched, targets, head_outputs, anchors, matched_idxs)
        if parts.localisation is not None:
            losses["bbox_regression"] = parts.localisation
        return {**losses, "classification": parts.classification}

    def labels(self, targets: Targets, matched_idxs: list[Tensor]) -> AnchorLabels:
        """The matches, with the class of an object in place of its index."""
        classes = torch.stack(matched_idxs)  # [B, A]: index of an object, NEGATIVE or IGNORED
        images, anchors = (classes >= 0).nonzero(as_tuple=True)
        matches = [row[row >= 0] for row in classes]
        boxes, found = (
            torch.cat([target[key][of_image] for target, of_image in zip(targets, matches, strict=True)])
            for key in ("boxes", "labels")
        )
        classes[images, anchors] = found - self.first_class
        return AnchorLabels(classes=classes, images=images, anchors=anchors, boxes=boxes)

    def other_losses(self, labels: AnchorLabels, matched: Tensor, *batch: Any) -> dict[str, Tensor]:
        """The model's own losses, which are means over the positives of the batch.

        They are asked for as of a batch of one image that has the positives of all and nothing else, so that the
        classification loss of torchvision, not wanted, costs next to nothing.
        """
        gathered = {"boxes": labels.boxes, "labels": labels.positive_classes + self.first_class}
        outputs = {key: value[labels.images, labels.anchors][None] for key, value in batch[1].items()}
        matches = torch.arange(len(labels.boxes), device=labels.boxes.device)
        return dict(type(self.holder).compute_loss(self.holder, [gathered], outputs, [matched], [matches]))

    def scores(self, logits: Tensor) -> Tensor:
        """What the loss is handed, from all logits of the batch."""
        return logits

    def decode(self, deltas: Tensor, anchors: Tensor) -> Any:
        """Boxes [P, 4] from box regressions [P, 4]."""
        return self.holder.box_coder.decode_single(deltas, anchors)


class _SwappedInRetinaNet(_SwappedLoss):
    """Goes into the head. Its box loss is a mean over images, of means over positives."""

    def other_losses(self, labels: AnchorLabels, matched: Tensor, *batch: Any) -> dict[str, Tensor]:
        return {"bbox_regression": self.holder.regression_head.compute_loss(*batch)}

    def decode(self, deltas: Tensor, anchors: Tensor) -> Any:
        return self.holder.regression_head.box_coder.decode_single(deltas, anchors)


class _SwappedInFCOS(_SwappedLoss):
    """Goes into the head; centreness and box loss stay."""

    def decode(self, deltas: Tensor, anchors: Tensor) -> Any:
        return self.holder.box_coder.decode(deltas, anchors)


class _SwappedInSSD(_SwappedLoss):
    """Goes into the model itself."""

    first_class = 1

    def scores(self, logits: Tensor) -> Tensor:
        softmax = traits_of(self.holder.classification_loss).softmax
        return logits if softmax else softmax_log_odds(logits)


_KINDS: dict[type, type[_SwappedLoss]] = {RetinaNet: _SwappedInRetinaNet, FCOS: _SwappedInFCOS, SSD: _SwappedInSSD}
