"""From logits to detections: score filtering and non-maximum suppression."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torchvision.models.detection._utils import BoxCoder
from torchvision.ops import batched_nms, clip_boxes_to_image

if TYPE_CHECKING:
    from aploss.detectors.detector import Detector, DetectorConfig

BOX_CODER = BoxCoder((10.0, 10.0, 5.0, 5.0))  # box regressions are offsets divided by .1, .1, .2, .2
Detections = dict[str, Tensor]


def postprocess(
    logits: Tensor,
    deltas: Tensor,
    anchors: Sequence[Tensor],
    image_sizes: Sequence[tuple[int, int]],
    settings: "Detector | DetectorConfig",
    *,
    softmax: bool,
) -> list[Detections]:
    """Turns the outputs of a network into detections, in pixels of the batch.

    The best scores of each level, class-wise NMS over all levels, the best detections of each image.

    Args:
        logits: [B, A, K], or [B, A, K + 1] if ``softmax``.
        deltas: [B, A, 4].
        anchors: for each level [A_l, 4], together A.
        image_sizes: height and width of each image inside the batch. Boxes are clipped to it; boxes in the padding are
            dropped.
        settings: ``score_threshold``, ``topk_per_level``, ``nms_iou`` and ``detections_per_image``.
        softmax: whether classes and background (column 0) share one softmax.

    Returns:
        For each image ``boxes`` [n, 4], ``scores`` [n] descending, ``labels`` [n] of 0..K-1.
    """
    level_sizes = [len(level) for level in anchors]
    detections = []
    for image_logits, image_deltas, size in zip(logits, deltas, image_sizes, strict=True):
        levels = zip(
            image_logits.float().split(level_sizes), image_deltas.float().split(level_sizes), anchors, strict=True
        )
        found = [_best_of_level(*level, softmax=softmax, topk=settings.topk_per_level) for level in levels]
        boxes, scores, labels = (torch.cat(parts) for parts in zip(*found, strict=True))
        boxes = clip_boxes_to_image(boxes, size)
        keep = (boxes[:, 2:] > boxes[:, :2]).all(dim=1)
        if settings.score_threshold is not None:
            keep &= scores > settings.score_threshold
        best = {"boxes": boxes[keep], "scores": scores[keep], "labels": labels[keep]}
        detections.append(merge_detections([best], settings))
    return detections


def _best_of_level(
    logits: Tensor, deltas: Tensor, anchors: Tensor, *, softmax: bool, topk: int
) -> tuple[Tensor, Tensor, Tensor]:
    # The sigmoid is monotone, so it is applied to the top k only.
    rankable = logits.softmax(dim=-1)[..., 1:] if softmax else logits
    num_classes = rankable.shape[-1]
    values, positions = rankable.flatten().topk(min(topk, rankable.numel()))
    chosen = positions // num_classes
    boxes = BOX_CODER.decode_single(deltas[chosen], anchors[chosen])
    return boxes, values if softmax else values.sigmoid(), positions % num_classes


def merge_detections(views: Sequence[Detections], settings: "Detector | DetectorConfig") -> Detections:
    """Class-wise NMS over the detections of several views of one image; the best, in descending order of scores."""
    boxes, scores, labels = (torch.cat([view[key] for view in views]) for key in ("boxes", "scores", "labels"))
    keep = batched_nms(boxes, scores, labels, settings.nms_iou)[: settings.detections_per_image]
    return {"boxes": boxes[keep], "scores": scores[keep], "labels": labels[keep]}
