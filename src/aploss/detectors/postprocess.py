"""From logits and box regressions to detections: top-k of each level, class-wise NMS, best 100."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torchvision.models.detection._utils import BoxCoder
from torchvision.ops import batched_nms, clip_boxes_to_image

__all__ = ["class_scores", "postprocess"]


def class_scores(logits: Tensor, *, softmax: bool) -> Tensor:
    """Scores in [0, 1] of the K classes.

    Args:
        logits: [..., K], or [..., K + 1] with the background in column 0 if ``softmax``.
        softmax: whether the classes and the background share one distribution.

    Returns:
        [..., K].
    """
    return logits.softmax(dim=-1)[..., 1:] if softmax else logits.sigmoid()


def postprocess(
    logits: Tensor,
    deltas: Tensor,
    anchors: Sequence[Tensor],
    image_sizes: Sequence[tuple[int, int]],
    *,
    box_coder: BoxCoder,
    softmax: bool,
    score_threshold: float | None,
    topk_per_level: int,
    nms_iou: float,
    detections_per_image: int,
) -> list[dict[str, Tensor]]:
    """Detections of a batch, in pixels of the batch.

    Args:
        logits: [B, A, K], or [B, A, K + 1] if ``softmax``.
        deltas: [B, A, 4].
        anchors: for each level [A_l, 4], together A.
        image_sizes: height and width of each image inside the batch; boxes are clipped to it,
            and boxes that lie outside it (in the padding) are dropped.
        box_coder: turns deltas into boxes.
        softmax: see :func:`class_scores`.
        score_threshold: detections with a lower score are dropped; None keeps all, since ranking
            losses order scores without giving them a scale.
        topk_per_level: how many scores of a level go on.
        nms_iou: of two boxes of a class that overlap more than this, the better stays.
        detections_per_image: how many detections of an image are kept.

    Returns:
        For each image ``boxes`` [n, 4], ``scores`` [n] descending, ``labels`` [n] of 0..K-1.
    """
    level_sizes = [len(level) for level in anchors]
    detections = []
    for image_logits, image_deltas, size in zip(logits, deltas, image_sizes, strict=True):
        levels = zip(
            image_logits.float().split(level_sizes),
            image_deltas.float().split(level_sizes),
            anchors,
            strict=True,
        )
        found = [
            _best_of_level(*level, box_coder=box_coder, softmax=softmax, topk=topk_per_level)
            for level in levels
        ]
        boxes, scores, labels = (torch.cat(parts) for parts in zip(*found, strict=True))
        boxes = clip_boxes_to_image(boxes, size)
        keep = (boxes[:, 2:] > boxes[:, :2]).all(dim=1)
        if score_threshold is not None:
            keep &= scores > score_threshold
        boxes, scores, labels = boxes[keep], scores[keep], labels[keep]
        kept = batched_nms(boxes, scores, labels, nms_iou)[:detections_per_image]
        detections.append({"boxes": boxes[kept], "scores": scores[kept], "labels": labels[kept]})
    return detections


def _best_of_level(
    logits: Tensor,
    deltas: Tensor,
    anchors: Tensor,
    *,
    box_coder: BoxCoder,
    softmax: bool,
    topk: int,
) -> tuple[Tensor, Tensor, Tensor]:
    # The sigmoid is monotone: taken after the top-k, it is computed for the few instead of for all.
    rankable = class_scores(logits, softmax=True) if softmax else logits
    num_classes = rankable.shape[-1]
    values, positions = rankable.flatten().topk(min(topk, rankable.numel()))
    chosen = positions.div(num_classes, rounding_mode="floor")
    boxes = box_coder.decode_single(deltas[chosen], anchors[chosen])
    scores = values if softmax else class_scores(values, softmax=False)
    return boxes, scores, positions % num_classes
