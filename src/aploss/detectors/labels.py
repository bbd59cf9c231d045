"""From anchors and ground truth to the labels of the ranking task (Section 3.1.1, Figure 3)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.weak import WeakIdKeyDictionary
from torchvision.ops import box_area, box_iou
from torchvision.ops.boxes import _box_inter_union

NEGATIVE = -1
IGNORED = -2
CROWD_COVERAGE = 0.5  # an anchor with at least this fraction of its area inside a crowd box is ignored
MAX_PAIRS = 2**22  # objects x anchors compared at once, in about 150 MB
ATSS_CELLS = 9  # cells per level whose anchors are candidates of an object (ATSS's k)
ATSS_MARGIN = 0.01  # minimum distance in pixels from the centre of a positive to the border of its object
Assigner = Literal["iou", "atss"]
HardBoxes = Literal["ignore", "drop"]
Match = Callable[[Tensor], Tensor]
_PER_CELL: WeakIdKeyDictionary = WeakIdKeyDictionary()  # anchors per cell of a level, which is read from it once


@dataclass(frozen=True)
class AnchorLabels:
    """The object that each anchor of a batch is matched to.

    Positives are sorted by image, then by anchor, which is the order of ``scores[targets == 1]``.
    """

    classes: Tensor  # int64 [B, A]: class of the matched object (0..K-1), ``NEGATIVE`` or ``IGNORED``
    images: Tensor  # int64 [P], image index of each positive anchor
    anchors: Tensor  # int64 [P], anchor index of each positive
    boxes: Tensor  # float [P, 4], the ground truth box of each positive

    def ranking_targets(self, num_classes: int) -> Tensor:
        """Labels t_ik of the anchors replicated K times: int8 [B, A, K] of 1, 0 and -1.

        int8, since this is the largest tensor of a training step after the scores.
        """
        ignored = (self.classes == IGNORED).to(torch.int8).neg()
        targets = ignored[..., None].repeat(1, 1, num_classes)
        targets[self.images, self.anchors, self.positive_classes] = 1
        return targets

    def softmax_targets(self) -> Tensor:
        """Traditional labels t_i: int64 [B, A], 0 for the background, 1..K for classes, -1 if ignored."""
        return self.classes + 1

    @property
    def positive_classes(self) -> Tensor:
        """Class of each positive anchor, int64 [P]."""
        return self.classes[self.images, self.anchors]


def label_anchors(
    anchors: Tensor | Sequence[Tensor],
    targets: Sequence[Mapping[str, Tensor]],
    *,
    positive_iou: float = 0.5,
    negative_iou: float = 0.4,
    assigner: Assigner = "iou",
    hard_boxes: HardBoxes = "ignore",
) -> AnchorLabels:
    """Labels the anchors of a batch by their overlap with the ground truth.

    * An anchor is positive for the object it overlaps most, if the overlap is at least ``positive_iou``.
    * Every object gets its best anchor, however small the overlap (see :func:`match_anchors`).
    * Other anchors with an overlap of at least ``negative_iou`` are ignored, in all K classes.
    * ``difficult`` objects are matched in the same way, but their anchors are ignored instead of positive.
    * An anchor with at least half of its area inside one ``crowd`` box is ignored, like a detection in COCO's
      evaluation.
    * Positive for an ordinary object takes precedence over ignored, ignored over negative.

    With ``assigner="atss"`` :func:`match_anchors_atss` replaces the first three rules.

    Args:
        anchors: float [A, 4], shared by all images of the batch, or [A_l, 4] for each level, which ATSS requires.
        targets: for each image ``boxes`` [n, 4] and ``labels`` [n] in 0..K-1, and optionally ``crowd`` and
            ``difficult``, bool [n]. If they are on the CPU, the host waits for the device only once, for the number of
            positives.
        positive_iou: minimum overlap of a positive anchor.
        negative_iou: minimum overlap of an ignored anchor; none is ignored if it equals ``positive_iou``.
        assigner: ``"iou"`` or ``"atss"``.
        hard_boxes: ``"drop"`` treats ``difficult`` and ``crowd`` boxes as if they did not exist, as in the code that
            the paper's authors released.

    Returns:
        The labels of all B·A anchors.

    Example:
        >>> anchors = torch.tensor([[0.0, 0.0, 8.0, 8.0], [0.0, 0.0, 8.0, 18.0], [8.0, 8.0, 16.0, 16.0]])
        >>> target = {"boxes": anchors[:1], "labels": torch.tensor([1])}
        >>> label_anchors(anchors, [target]).ranking_targets(2)  # positive for class 1, ignored (IoU 0.44), negative
        tensor([[[ 0,  1],
                 [-1, -1],
                 [ 0,  0]]], dtype=torch.int8)
    """
    levels = [anchors] if isinstance(anchors, Tensor) else list(anchors)
    anchors = torch.cat(levels)
    match: Match = partial(match_anchors, anchors=anchors, positive_iou=positive_iou, negative_iou=negative_iou)
    if assigner == "atss":
        match = partial(match_anchors_atss, levels=levels)
    # Padding is 0: empty boxes, which overlap no anchor.
    boxes, labels, difficult, crowd = (
        pad_sequence(parts, batch_first=True).to(anchors.device, non_blocking=True)
        for parts in _by_kind(targets, anchors.dtype)
    )
    classes = matches = _in_groups(match, boxes, anchors)
    if labels.shape[1]:
        classes = labels.gather(1, matches.clamp(min=0)).where(matches >= 0, matches)
    if difficult.shape[1] and hard_boxes == "ignore":
        ignored = _in_groups(match, difficult, anchors) != NEGATIVE
        classes = classes.masked_fill((classes == NEGATIVE) & ignored, IGNORED)
    if crowd.shape[1] and hard_boxes == "ignore":
        ignored = _in_groups(partial(_coverage, anchors=anchors), crowd, anchors) >= CROWD_COVERAGE
        classes = classes.masked_fill((classes == NEGATIVE) & ignored, IGNORED)
    images, positions = (classes >= 0).nonzero(as_tuple=True)
    return AnchorLabels(
        classes=classes, images=images, anchors=positions, boxes=boxes[images, matches[images, positions]]
    )


def _by_kind(targets: Sequence[Mapping[str, Tensor]], dtype: torch.dtype) -> tuple[list[Tensor], ...]:
    """Of each image the ordinary boxes and their labels, the difficult boxes and the crowd boxes."""
    kinds: tuple[list[Tensor], ...] = ([], [], [], [])
    for target in targets:
        boxes = target["boxes"].as_subclass(Tensor).to(dtype)
        none = torch.zeros(len(boxes), dtype=torch.bool, device=boxes.device)
        crowd, difficult = (target.get(key, none).to(boxes.device, torch.bool) for key in ("crowd", "difficult"))
        ordinary = ~(crowd | difficult)
        labels = target["labels"].as_subclass(Tensor).to(boxes.device)
        parts = (boxes[ordinary], labels[ordinary], boxes[difficult & ~crowd], boxes[crowd])
        for kind, part in zip(kinds, parts, strict=True):
            kind.append(part)
    return kinds


def _in_groups(match: Match, boxes: Tensor, anchors: Tensor) -> Tensor:
    """Matches boxes [B, n, 4] a few images at a time, which bounds the memory."""
    if boxes.shape[1] == 0 or len(anchors) == 0:
        return torch.full((len(boxes), len(anchors)), NEGATIVE, device=anchors.device)
    images = max(1, MAX_PAIRS // (boxes.shape[1] * len(anchors)))
    return torch.cat([match(boxes[start : start + images]) for start in range(0, len(boxes), images)])


def match_anchors(boxes: Tensor, anchors: Tensor, *, positive_iou: float, negative_iou: float) -> Tensor:
    """Matches each anchor [A, 4] of each image with one of its n boxes [B, n, 4].

    Like torchvision's ``Matcher`` with low-quality matches, except that the best anchor of an object (all of them, if
    several overlap it equally well) always goes to that object, even if it overlaps another one more. If two objects
    have the same best anchor, the one with the larger overlap gets it and the other gets the best remaining one. An
    object that overlaps no anchor gets none.

    Returns:
        int64 [B, A]: index of the object, ``NEGATIVE`` or ``IGNORED``.
    """
    overlaps: Tensor = box_iou(boxes.flatten(0, 1), anchors).view(*boxes.shape[:2], -1)  # [B, n, A]
    best_overlap, matches = overlaps.max(dim=1)
    matches = matches.masked_fill(best_overlap < positive_iou, IGNORED).masked_fill(
        best_overlap < negative_iou, NEGATIVE
    )
    claims = _claims(overlaps)
    return claims.where(claims < boxes.shape[1], matches)


def match_anchors_atss(boxes: Tensor, levels: Sequence[Tensor]) -> Tensor:
    """Matches anchors by adaptive training sample selection (Zhang et al., CVPR 2020, Algorithm 1).

    The candidates of an object are the anchors of the 9 cells of each level whose centres are nearest to its own.
    Candidates are positive if their centre is inside the object and their overlap is at least the mean plus the
    standard deviation of all candidates' overlaps. An anchor that is positive for several objects goes to the one that
    it overlaps most. All others are negative; an object may get no anchor.
    The anchors of a cell have the same centre and are adjacent in their level [A_l, 4].

    Returns:
        int64 [B, A] for boxes [B, n, 4]: index of the object, or ``NEGATIVE``.
    """
    anchors = torch.cat(list(levels))
    overlaps: Tensor = box_iou(boxes.flatten(0, 1), anchors).view(*boxes.shape[:2], -1)  # [B, n, A]
    candidates = _atss_candidates(boxes, levels)  # [B, n, C]
    found = overlaps.gather(2, candidates)
    deviation = found.std(dim=2) if found.shape[2] > 1 else torch.zeros_like(found[..., 0])
    centres = _centres(anchors)[candidates]  # [B, n, C, 2]
    margins = torch.cat([centres - boxes[:, :, None, :2], boxes[:, :, None, 2:] - centres], dim=3)
    positive = (found >= (found.mean(dim=2) + deviation)[..., None]) & (margins.amin(dim=3) > ATSS_MARGIN)
    of_positives = torch.full_like(overlaps, -1.0).scatter(2, candidates, found.where(positive, -1.0))
    best_overlap, matches = of_positives.max(dim=1)
    return matches.where(best_overlap >= 0, NEGATIVE)


def _atss_candidates(boxes: Tensor, levels: Sequence[Tensor]) -> Tensor:
    """The anchors of the nearest cells of each level, int64 [B, n, C]."""
    candidates, start = [], 0
    for level in levels:
        centres = _centres(level)
        if level not in _PER_CELL:
            _PER_CELL[level] = int(torch.isclose(centres, centres[0]).all(dim=1).sum())
        per_cell = _PER_CELL[level]
        distances = torch.cdist(_centres(boxes), centres[::per_cell].expand(len(boxes), -1, -1))  # [B, n, cells]
        nearest = distances.argsort(dim=2, stable=True)[:, :, :ATSS_CELLS]  # ties go to the first on every device
        inside = torch.arange(per_cell, device=level.device)
        candidates.append((start + nearest[..., None] * per_cell + inside).flatten(2))
        start += len(level)
    return torch.cat(candidates, dim=2)


def _centres(boxes: Tensor) -> Tensor:
    return (boxes[..., :2] + boxes[..., 2:]) / 2


def _claims(overlaps: Tensor) -> Tensor:
    """The object that claims each anchor as its best, int64 [B, A] for overlaps [B, n, A]; n if none does."""
    images, count, _ = overlaps.shape
    best = overlaps.amax(dim=2, keepdim=True)
    is_best = (overlaps == best) & (best > 0)
    strength, first = overlaps.where(is_best, 0.0).max(dim=1)  # the first object, if several overlap equally
    claims = first.where(strength > 0, count)
    has_claim = torch.zeros(images, count + 1, dtype=torch.bool, device=overlaps.device).scatter(1, claims, True)
    losers = (best[..., 0] > 0) & ~has_claim[:, :count]
    # Where reading their number would stall the device, there is a turn for each object that could lose.
    turns = int(losers.sum(dim=1).max()) if overlaps.device.type == "cpu" else count - 1
    order, rows = losers.cumsum(dim=1), torch.arange(images, device=overlaps.device)
    for turn in range(1, turns + 1):
        is_next = losers & (order == turn)
        loser = is_next.to(torch.uint8).argmax(dim=1)  # [B], 0 in images without one
        overlap, position = overlaps[rows, loser].where(claims == count, 0.0).max(dim=1)
        takes = is_next.any(dim=1) & (overlap > 0)
        claims[rows, position] = loser.where(takes, claims[rows, position])
    return claims


def _coverage(regions: Tensor, anchors: Tensor) -> Tensor:
    """The largest fraction of each anchor's area inside one of the regions [B, n, 4], float [B, A]."""
    intersections, _ = _box_inter_union(regions.flatten(0, 1), anchors)  # [B x n, A]
    coverage: Tensor = intersections.view(*regions.shape[:2], -1).amax(dim=1) / box_area(anchors)
    return coverage
