"""Our losses in a torchvision detector that somebody already has."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torchvision.models.detection.fcos import FCOS, FCOSHead
from torchvision.models.detection.retinanet import RetinaNet, RetinaNetHead
from torchvision.models.detection.ssd import SSD
from torchvision.ops import generalized_box_iou_loss

from aploss.detectors.criterion import classification_loss, iou_of_pairs
from aploss.detectors.losses_by_name import takes_background_column
from aploss.detectors.ranking_labels import AnchorLabels
from aploss.errors import ConfigError

__all__ = ["ScoreThresholdWarning", "softmax_log_odds", "use_loss"]

Model = TypeVar("Model", bound=nn.Module)
Targets = Sequence[Mapping[str, Tensor]]
LEAST_LOG_ODDS_GAP = 1e-6  # 1 - p of the surest score, so that log-odds stay finite


class ScoreThresholdWarning(UserWarning):
    """A model drops detections below a score that means nothing with its loss."""


def use_loss(
    model: Model, loss: nn.Module | None, *, weights: Mapping[str, float] | None = None
) -> Model:
    """Trains a torchvision RetinaNet, FCOS or SSD with another classification loss from now on.

    Only the loss in training mode changes, on all images of the batch together: weights, matching,
    box loss, names of the losses and everything at inference stay as they are. Labels are
    torchvision's: the index of a logit's column, where SSD's column 0 is the background.

    RetinaNet and FCOS have one sigmoid score per column, which is what is ranked. SSD's classes
    and background share a softmax; ranked are the log-odds of each class against all else, since
    they order as the softmax scores at inference do. ``OHEMCrossEntropy`` is for SSD alone;
    ``ALRPLoss`` brings its own box loss, which then replaces the model's.

    Args:
        model: from ``torchvision.models.detection``, with any weights.
        loss: one of our loss objects, or any module of ``(scores, targets)`` with targets 1, 0, -1.
        weights: of the loss terms, for models of ``transformers`` alone; see
            :func:`~aploss.detectors.hugging_face.use_loss_in_transformers`.

    Returns:
        The same model. Calling it again sets another loss.

    Raises:
        ConfigError: if the model is of another kind, or the loss needs another kind.

    Example:
        >>> from torchvision.models.detection import ssdlite320_mobilenet_v3_large
        >>> from aploss.losses import APLoss
        >>> model = ssdlite320_mobilenet_v3_large(weights=None, weights_backbone=None)
        >>> model = use_loss(model, APLoss())
    """
    from aploss.detectors.hugging_face import is_transformers_model, use_loss_in_transformers

    if is_transformers_model(model):
        return use_loss_in_transformers(model, loss, weights=weights)
    if weights is not None:
        raise ConfigError(f"{type(model).__name__} has no weights of loss terms to be given")
    if loss is None:
        raise ConfigError("None gives the loss of a transformers model back, not of torchvision's")
    holder: Any  # of the method that computes the losses
    mixin: type[_SwappedLoss]
    if isinstance(model, RetinaNet):
        holder, mixin = model.head, _SwappedInRetinaNet
    elif isinstance(model, FCOS):
        holder, mixin = model.head, _SwappedInFCOS
    elif isinstance(model, SSD):
        holder, mixin = model, _SwappedInSSD
    else:
        raise ConfigError(
            f"use_loss takes torchvision's RetinaNet, FCOS or SSD, got {type(model).__name__}"
        )
    if takes_background_column(loss) and not isinstance(model, SSD):
        raise ConfigError(
            f"{type(loss).__name__} needs a background column, which {type(model).__name__} lacks"
        )
    if not isinstance(holder, mixin):
        # Another class rather than a method tied to this object: copies of the model stay whole.
        holder.__class__ = _subclass(type(holder), mixin)
    holder.classification_loss = loss
    return model


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

    classification_loss: nn.Module
    first_class = 0  # label of the first column that is a class

    def compute_loss(
        self,
        targets: Targets,
        head_outputs: dict[str, Tensor],
        anchors: list[Tensor],
        matched_idxs: list[Tensor],
    ) -> dict[str, Tensor]:
        """What torchvision asks of its heads, from the matches it made."""
        labels = _labels_from_matches(targets, matched_idxs, self.first_class)

        def predicted_boxes() -> Tensor:
            deltas = head_outputs["bbox_regression"][labels.images, labels.anchors]
            return self.decode(deltas.float(), _of_positives(anchors, labels))

        parts = classification_loss(
            self.classification_loss,
            self.scores(head_outputs["cls_logits"]),
            labels,
            box_losses=lambda: generalized_box_iou_loss(predicted_boxes(), labels.boxes),
            ious=lambda: iou_of_pairs(predicted_boxes().detach(), labels.boxes),
        )
        losses = self.other_losses(labels, targets, head_outputs, anchors, matched_idxs)
        if parts.localisation is not None:
            losses["bbox_regression"] = parts.localisation
        return {**losses, "classification": parts.classification}

    def other_losses(
        self,
        labels: AnchorLabels,
        targets: Targets,
        head_outputs: dict[str, Tensor],
        anchors: list[Tensor],
        matched_idxs: list[Tensor],
    ) -> dict[str, Tensor]:
        """The model's own losses, which are means over the positives of the batch.

        They are asked for as of a batch of one image that has the positives of all and nothing
        else, so that the classification loss of torchvision, not wanted, costs next to nothing.
        """
        gathered = {"boxes": labels.boxes, "labels": labels.positive_classes + self.first_class}
        losses: dict[str, Tensor] = super().compute_loss(  # type: ignore[misc]
            [gathered],
            {
                key: value[labels.images, labels.anchors][None]
                for key, value in head_outputs.items()
            },
            [_of_positives(anchors, labels)],
            [torch.arange(len(labels.boxes), device=labels.boxes.device)],
        )
        return losses

    def scores(self, logits: Tensor) -> Tensor:
        """What the loss is handed, from all logits of the batch."""
        return logits

    def decode(self, deltas: Tensor, anchors: Tensor) -> Tensor:
        """Boxes [P, 4] from box regressions [P, 4]."""
        raise NotImplementedError


class _SwappedInRetinaNet(_SwappedLoss):
    """Goes into the head. Its box loss is a mean over images, of means over positives."""

    regression_head: nn.Module

    def other_losses(
        self,
        labels: AnchorLabels,
        targets: Targets,
        head_outputs: dict[str, Tensor],
        anchors: list[Tensor],
        matched_idxs: list[Tensor],
    ) -> dict[str, Tensor]:
        regression: Any = self.regression_head
        box_loss = regression.compute_loss(targets, head_outputs, anchors, matched_idxs)
        return {"bbox_regression": box_loss}

    def decode(self, deltas: Tensor, anchors: Tensor) -> Tensor:
        regression: Any = self.regression_head
        boxes: Tensor = regression.box_coder.decode_single(deltas, anchors)
        return boxes


class _SwappedInFCOS(_SwappedLoss):
    """Goes into the head; centreness and box loss stay."""

    box_coder: Any

    def decode(self, deltas: Tensor, anchors: Tensor) -> Tensor:
        boxes: Tensor = self.box_coder.decode(deltas, anchors)
        return boxes


class _SwappedInSSD(_SwappedLoss):
    """Goes into the model itself."""

    box_coder: Any
    first_class = 1

    def scores(self, logits: Tensor) -> Tensor:
        needs_columns = takes_background_column(self.classification_loss)
        return logits if needs_columns else softmax_log_odds(logits)

    def decode(self, deltas: Tensor, anchors: Tensor) -> Tensor:
        boxes: Tensor = self.box_coder.decode_single(deltas, anchors)
        return boxes


class _RetinaNetHead(_SwappedInRetinaNet, RetinaNetHead):  # type: ignore[misc]
    pass


class _FCOSHead(_SwappedInFCOS, FCOSHead):  # type: ignore[misc]
    pass


class _SSD(_SwappedInSSD, SSD):  # type: ignore[misc]
    pass


def _subclass(kind: type, mixin: type) -> type:
    """A class of this kind with the loss swapped.

    Those of torchvision's own classes have a place in this module, so that models can be pickled.
    """
    for known in (_RetinaNetHead, _FCOSHead, _SSD):
        if known.__bases__ == (mixin, kind):
            return known
    return type(kind.__name__, (mixin, kind), {})


def _labels_from_matches(
    targets: Targets, matched_idxs: list[Tensor], first_class: int
) -> AnchorLabels:
    classes = torch.stack(matched_idxs)  # [B, A]: index of an object, NEGATIVE or IGNORED
    images, anchors = (classes >= 0).nonzero(as_tuple=True)
    boxes, found = [], []
    for target, row in zip(targets, classes, strict=True):
        matches = row[row >= 0]
        boxes.append(target["boxes"][matches])
        found.append(target["labels"][matches] - first_class)
    classes[images, anchors] = torch.cat(found)
    return AnchorLabels(classes=classes, images=images, anchors=anchors, boxes=torch.cat(boxes))


def _of_positives(anchors: list[Tensor], labels: AnchorLabels) -> Tensor:
    return torch.stack(anchors)[labels.images, labels.anchors]
