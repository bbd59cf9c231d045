"""Ranking losses and calibrated scores in detectors of torchvision and Hugging Face ``transformers``."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from torch import Tensor, nn

from aploss.errors import ConfigError
from aploss.integrations import torchvision_models, transformers_models
from aploss.integrations.shared import ScoreThresholdWarning
from aploss.integrations.transformers_models import calibration_of, set_calibration

__all__ = ["ScoreThresholdWarning", "calibrate", "calibration_of", "set_calibration", "use_loss"]

Model = TypeVar("Model", bound=nn.Module)


def use_loss(
    model: Model,
    loss: nn.Module | None,
    *,
    score_thresh: float | None = None,
    weights: Mapping[str, float] | None = None,
) -> Model:
    """Replaces the classification loss of a detector of torchvision or ``transformers``, in place.

    Only the loss in training mode changes. Matching, the other losses, weights, inference and saved files stay the
    model's own; copies, pickles and compiled models keep the loss. It ranks the scores [B, A, K] of the whole batch
    together, unless its options say otherwise: ``APLoss(groups=0)`` ranks each image separately.

    In ``transformers`` models (the DETR family, see ``docs/hugging-face.md``) the loss replaces the classification term
    of the last layer, auxiliary layers, encoder output and denoising queries; matched queries are the positives.
    In R-CNNs it replaces the objectness loss of the RPN, where it ranks all anchors without sampling, and the
    classification loss of the box head, where it ranks the sampled proposals. (``torch.jit.script`` needs an R-CNN with
    its own loss: ``use_loss(model, None)``.)
    Models whose classes share a softmax with the background (SSD, R-CNN, DETR) are ranked by the log-odds of each class
    against everything else, which sort like the scores at inference. ``OHEMCrossEntropy`` needs such a model. The
    localisation part of ``ALRPLoss`` replaces the model's box loss (``transformers``: its GIoU loss).

    Args:
        model: a RetinaNet, FCOS, SSD, Faster, Mask or Keypoint R-CNN of torchvision, or a detector of ``transformers``;
            also of a subclass.
        loss: a loss object of this package, or any module called as ``loss(scores, targets)`` with float targets 1, 0
            and -1 (ignored). None restores the model's own loss, scores and score threshold.
        score_thresh: new score threshold of a torchvision model; 0 keeps every detection. In an R-CNN, the RPN's
            threshold for proposals is lowered to it, too. Ranking losses determine the order of scores, not a scale.
        weights: weights of the loss terms of a ``transformers`` model by name: ``class``, ``bbox``, ``giou``, and
            others that its configuration has (``fgl``, ``ddf``). Terms not named keep the model's weights.

    Returns:
        The same model. A second call replaces the loss again.

    Raises:
        ConfigError: if the model is not supported, or the loss or a weight is not valid for it.

    Warns:
        ScoreThresholdWarning: if scores will be compared with a threshold although the loss does not calibrate them.

    Example:
        >>> from torchvision.models.detection import ssdlite320_mobilenet_v3_large
        >>> from aploss.losses import APLoss
        >>> model = ssdlite320_mobilenet_v3_large(weights=None, weights_backbone=None)
        >>> model = use_loss(model, APLoss(), score_thresh=0)
    """
    if _is_transformers(model, score_thresh=score_thresh, weights=weights):
        transformers_models.swap_loss(model, loss, weights or {})
    else:
        torchvision_models.swap_loss(model, loss, score_thresh)
    return model


def calibrate(
    model: Model,
    images: Sequence[Tensor] | None,
    targets: Sequence[Mapping[str, Tensor]] = (),
    *,
    score_thresh: float | None = None,
    iou: float = 0.5,
    batch_size: int = 8,
) -> Model:
    """Maps the scores of a trained detector to precision, in evaluation mode.

    Afterwards about 7 of 10 detections with score 0.7 are correct. The map is strictly increasing: detections, their
    order and AP stay the same, and so do weights and training. Copies and pickles are calibrated, too.

    A torchvision model returns all its detections afterwards, since AP also counts those of low precision, unless
    ``score_thresh`` is given. ``outputs.logits`` of a ``transformers`` model are float64; save its calibration beside
    the model's files (:func:`calibration_of`, :func:`set_calibration`).

    Args:
        model: a detector that :func:`use_loss` supports, trained with any loss.
        images: a few hundred held-out images [3, h, w] as the model takes them; None removes a calibration.
        targets: their targets in the format of training.
        score_thresh: minimum precision of a detection of a torchvision model; by default 0.
        iou: minimum overlap of a correct detection.
        batch_size: images per forward pass of a torchvision model.

    Returns:
        The same model. A second call fits the calibration again.

    Raises:
        ConfigError: if the model or an option is not supported.
        DataError: if the images have no objects, or not one target each.

    Example:
        >>> import torch
        >>> from torchvision.models.detection import fasterrcnn_mobilenet_v3_large_320_fpn
        >>> model = fasterrcnn_mobilenet_v3_large_320_fpn(weights=None, weights_backbone=None, num_classes=3)
        >>> target = {"boxes": torch.tensor([[4.0, 4.0, 40.0, 40.0]]), "labels": torch.tensor([1])}
        >>> model = calibrate(model, [torch.rand(3, 64, 64)], [target], score_thresh=0.0)
        >>> calibration_of(model)([0.0, 1.0]).round(1).tolist()
        [0.0, 0.0]
    """
    if _is_transformers(model, score_thresh=score_thresh):
        transformers_models.calibrate(model, images, targets, iou=iou)
    else:
        threshold = score_thresh or 0.0
        torchvision_models.calibrate(model, images, targets, score_thresh=threshold, iou=iou, batch_size=batch_size)
    return model


def _is_transformers(model: Any, *, score_thresh: float | None, weights: object = None) -> bool:
    """Selects the library, after checking that it supports the model and the options that were given."""
    if getattr(model, "loss_type", None) in transformers_models.FAMILIES:
        if score_thresh is not None:
            raise ConfigError("score_thresh is for torchvision models; pass a threshold to post-processing instead")
        return True
    if not isinstance(model, torchvision_models.SUPPORTED):
        raise ConfigError(
            f"{type(model).__name__} is not supported: expected torchvision's RetinaNet, FCOS, SSD or an R-CNN, or of "
            f"transformers {', '.join(transformers_models.FAMILIES.values())}"
        )
    if weights is not None:
        raise ConfigError(f"weights are for transformers models, got them with {type(model).__name__}")
    return False
