"""From anchors and ground truth to the labels of the ranking task (Section 3.1.1, Figure 3)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor
from torchvision.ops import box_area, box_iou

NEGATIVE = -1
IGNORED = -2
CROWD_COVERAGE = 0.5  # an anchor with at least this fraction of its area inside a crowd box is ignored
ATSS_CELLS = 9  # cells per level whose anchors are candidates of an object (ATSS's k)
ATSS_MARGIN = 0.01  # minimum distance in pixels from the centre of a positive to the border of its object
Assigner = Literal["iou", "atss"]


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
        targets = torch.zeros((*self.classes.shape, num_classes), dtype=torch.int8, device=self.classes.device)
        targets[self.classes == IGNORED] = -1
        targets[self.images, self.anchors, self.positive_classes] = 1
        return targets

    def softmax_targets(self) -> Tensor:
        """Traditional labels t_i: int64 [B, A], 0 for the background, 1..K for classes, -1 if ignored."""
        return self.classes + 1

    @property
    def positive_classes(self) -> Tensor:
        """Class of each positive anchor, int64 [P]."""
        return self.classes[self.images, self.anchors]

    def of_image(self, index: int) -> "AnchorLabels":
        """The labels of one image, as a batch of one."""
        mine = self.images == index
        return AnchorLabels(
            classes=self.classes[index : index + 1],
            images=torch.zeros_like(self.images[mine]),
            anchors=self.anchors[mine],
            boxes=self.boxes[mine],
        )


def label_anchors(
    anchors: Tensor | Sequence[Tensor],
    targets: Sequence[Mapping[str, Tensor]],
    *,
    positive_iou: float = 0.5,
    negative_iou: float = 0.4,
    assigner: Assigner = "iou",
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
            ``difficult``, bool [n].
        positive_iou: minimum overlap of a positive anchor.
        negative_iou: minimum overlap of an ignored anchor; none is ignored if it equals ``positive_iou``.
        assigner: ``"iou"`` or ``"atss"``.

    Returns:
        The labels of all B·A anchors.
    """
    levels = [anchors] if isinstance(anchors, Tensor) else list(anchors)
    anchors = torch.cat(levels)
    match = partial(match_anchors, anchors=anchors, positive_iou=positive_iou, negative_iou=negative_iou)
    if assigner == "atss":
        match = partial(match_anchors_atss, levels=levels)
    classes = torch.full((len(targets), len(anchors)), NEGATIVE, device=anchors.device)
    matched_boxes = []
    for row, target in zip(classes, targets, strict=True):
        boxes = target["boxes"].as_subclass(Tensor).to(anchors)
        labels = target["labels"].to(anchors.device)
        crowd, difficult = (_flags(target, key, boxes) for key in ("crowd", "difficult"))
        if bool(difficult.any()):
            matches = match(boxes[difficult & ~crowd])
            row[matches != NEGATIVE] = IGNORED
        if bool(crowd.any()):
            row[_coverage(boxes[crowd], anchors) >= CROWD_COVERAGE] = IGNORED
        ordinary = ~(crowd | difficult)
        matches = match(boxes[ordinary])
        row[matches == IGNORED] = IGNORED
        positive = (matches >= 0).nonzero().squeeze(1)
        row[positive] = labels[ordinary][matches[positive]]
        matched_boxes.append(boxes[ordinary][matches[positive]])
    images, positions = (classes >= 0).nonzero(as_tuple=True)
    boxes = torch.cat(matched_boxes) if matched_boxes else anchors.new_zeros(0, 4)
    return AnchorLabels(classes=classes, images=images, anchors=positions, boxes=boxes)


def match_anchors(boxes: Tensor, anchors: Tensor, *, positive_iou: float, negative_iou: float) -> Tensor:
    """Matches each anchor [A, 4] of one image with one of n boxes [n, 4].

    Like torchvision's ``Matcher`` with low-quality matches, except that the best anchor of an object (all of them, if
    several overlap it equally well) always goes to that object, even if it overlaps another one more. If two objects
    have the same best anchor, the one with the larger overlap gets it and the other gets the best remaining one. An
    object that overlaps no anchor gets none.

    Returns:
        int64 [A]: index of the object, ``NEGATIVE`` or ``IGNORED``.
    """
    if len(boxes) == 0 or len(anchors) == 0:
        return torch.full((len(anchors),), NEGATIVE, device=anchors.device)
    overlaps = box_iou(boxes, anchors)  # [n, A]
    best_overlap, matches = overlaps.max(dim=0)
    matches[best_overlap < positive_iou] = IGNORED
    matches[best_overlap < negative_iou] = NEGATIVE
    claims = _claims(overlaps)
    return torch.where(claims < len(boxes), claims, matches)


def match_anchors_atss(boxes: Tensor, levels: Sequence[Tensor]) -> Tensor:
    """Matches anchors by adaptive training sample selection (Zhang et al., CVPR 2020, Algorithm 1).

    The candidates of an object are the anchors of the 9 cells of each level whose centres are nearest to its own.
    Candidates are positive if their centre is inside the object and their overlap is at least the mean plus the
    standard deviation of all candidates' overlaps. An anchor that is positive for several objects goes to the one that
    it overlaps most. All others are negative; an object may get no anchor.
    The anchors of a cell have the same centre and are adjacent in their level [A_l, 4].

    Returns:
        int64 [A]: index of the object, or ``NEGATIVE``.
    """
    anchors = torch.cat(list(levels))
    if len(boxes) == 0 or len(anchors) == 0:
        return torch.full((len(anchors),), NEGATIVE, device=anchors.device)
    overlaps = box_iou(boxes, anchors)  # [n, A]
    candidates = _atss_candidates(boxes, levels)  # [n, C]
    found = overlaps.gather(1, candidates)
    deviation = found.std(dim=1) if found.shape[1] > 1 else torch.zeros_like(found[:, 0])
    centres = _centres(anchors)[candidates]  # [n, C, 2]
    margins = torch.cat([centres - boxes[:, None, :2], boxes[:, None, 2:] - centres], dim=2)
    positive = (found >= (found.mean(dim=1) + deviation)[:, None]) & (margins.amin(dim=2) > ATSS_MARGIN)
    of_positives = torch.full_like(overlaps, -1.0).scatter(1, candidates, found.where(positive, -1.0))
    best_overlap, matches = of_positives.max(dim=0)
    return matches.where(best_overlap >= 0, NEGATIVE)


def _atss_candidates(boxes: Tensor, levels: Sequence[Tensor]) -> Tensor:
    """The anchors of the nearest cells of each level, int64 [n, C]."""
    candidates, start = [], 0
    for level in levels:
        centres = _centres(level)
        per_cell = int(torch.isclose(centres, centres[0]).all(dim=1).sum())
        distances = torch.cdist(_centres(boxes), centres[::per_cell])  # [n, cells]
        nearest = distances.argsort(dim=1, stable=True)[:, :ATSS_CELLS]  # ties go to the first on every device
        inside = torch.arange(per_cell, device=level.device)
        candidates.append((start + nearest[:, :, None] * per_cell + inside).flatten(1))
        start += len(level)
    return torch.cat(candidates, dim=1)


def _centres(boxes: Tensor) -> Tensor:
    return (boxes[:, :2] + boxes[:, 2:]) / 2


def _claims(overlaps: Tensor) -> Tensor:
    """The object that claims each anchor as its best, int64 [A]; n if none does."""
    count, num_anchors = overlaps.shape
    best = overlaps.amax(dim=1)  # [n]
    found = best > 0
    objects, positions = (overlaps == best.where(found, -1.0)[:, None]).nonzero(as_tuple=True)
    strength = best[objects]
    strongest = strength.new_zeros(num_anchors).scatter_reduce(0, positions, strength, "amax")
    won = strength == strongest[positions]
    first = strength.new_full((num_anchors,), count)  # float, since MPS cannot reduce int64
    first = first.scatter_reduce(0, positions[won], objects[won].to(first), "amin")
    claims = first.long()
    has_claim = torch.zeros(count + 1, dtype=torch.bool, device=overlaps.device)
    has_claim[claims] = True
    for loser in (found & ~has_claim[:count]).nonzero().squeeze(1).tolist():
        left = overlaps[loser].where(claims == count, 0.0)
        overlap, position = left.max(dim=0)
        if bool(overlap > 0):
            claims[position] = loser
    return claims


def _coverage(regions: Tensor, anchors: Tensor) -> Tensor:
    """The largest fraction of each anchor's area inside one of the regions, float [A]."""
    top_left = torch.maximum(regions[:, None, :2], anchors[None, :, :2])
    bottom_right = torch.minimum(regions[:, None, 2:], anchors[None, :, 2:])
    inside = (bottom_right - top_left).clamp(min=0).prod(dim=2)  # [regions, A]
    coverage: Tensor = inside.amax(dim=0) / box_area(anchors)
    return coverage


def _flags(target: Mapping[str, Tensor], key: str, boxes: Tensor) -> Tensor:
    if key not in target:
        return torch.zeros(len(boxes), dtype=torch.bool, device=boxes.device)
    return target[key].to(device=boxes.device, dtype=torch.bool)
