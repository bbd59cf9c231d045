"""Labels of anchors: by hand, and against an implementation for one image at a time."""

from typing import Literal

import pytest
import torch
from simulated_device import SimulatedGPU
from torch import Tensor
from torchvision.ops import box_iou

from aploss.detectors import build_detector
from aploss.detectors import labels as module
from aploss.detectors.labels import IGNORED, NEGATIVE, label_anchors, match_anchors, match_anchors_atss


def test_three_anchors_two_classes_two_images_drawn_by_hand() -> None:
    anchors = torch.tensor([[0.0, 0.0, 10.0, 10.0], [0.0, 0.0, 10.0, 22.0], [50.0, 50.0, 60.0, 60.0]])
    first = {"boxes": torch.tensor([[0.0, 0.0, 10.0, 10.0]]), "labels": torch.tensor([1])}
    # IoU of the first image: 100/100 = 1 positive; 100/220 = 0.45 ignored; 0 negative.
    second = {"boxes": torch.tensor([[50.0, 50.0, 60.0, 90.0]]), "labels": torch.tensor([0])}
    # IoU of the second: 0; 0; 100/400 = 0.25, below 0.4 but the best anchor of its object.

    labels = label_anchors(anchors, [first, second])

    assert labels.ranking_targets(2).tolist() == [[[0, 1], [-1, -1], [0, 0]], [[0, 0], [0, 0], [1, 0]]]
    assert labels.ranking_targets(2).dtype == torch.int8
    assert labels.softmax_targets().tolist() == [[2, -1, 0], [0, 0, 1]]
    assert labels.images.tolist() == [0, 1]
    assert labels.anchors.tolist() == [0, 2]
    assert labels.boxes.tolist() == [[0.0, 0.0, 10.0, 10.0], [50.0, 50.0, 60.0, 90.0]]


def test_best_anchor_goes_to_its_object_even_if_it_overlaps_another_more() -> None:
    anchors = torch.tensor([[0.0, 0.0, 10.0, 10.0], [0.0, 0.0, 10.0, 8.0]])
    boxes = torch.tensor([[0.0, 0.0, 10.0, 8.0], [0.0, 0.0, 10.0, 30.0]])
    # IoU of the boxes with anchor 0: 80/100 and 100/300; with anchor 1: 1 and 80/300.
    matches = match_anchors(boxes[None], anchors, positive_iou=0.5, negative_iou=0.4)
    assert matches.tolist() == [[1, 0]]


def test_two_objects_with_one_best_anchor_both_get_an_anchor() -> None:
    anchors = torch.tensor([[0.0, 0.0, 10.0, 10.0], [0.0, 0.0, 10.0, 40.0]])
    boxes = torch.tensor([[0.0, 0.0, 10.0, 12.0], [0.0, 0.0, 10.0, 10.0]])
    # Both have anchor 0 as best, with IoU 10/12 and 1: the second box takes it.
    matches = match_anchors(boxes[None], anchors, positive_iou=0.5, negative_iou=0.4)
    assert matches.tolist() == [[1, 0]]


def test_crowd_and_difficult_boxes_make_anchors_ignored() -> None:
    anchors = torch.tensor(
        [
            [0.0, 0.0, 10.0, 10.0],  # inside the crowd box
            [45.0, 0.0, 55.0, 10.0],  # half inside
            [46.0, 0.0, 56.0, 10.0],  # 4/10 inside
            [100.0, 100.0, 110.0, 110.0],  # equal to the difficult box
            [102.0, 102.0, 104.0, 104.0],  # inside it, IoU 4/100: as for any object, negative
            [0.0, 0.0, 12.0, 10.0],  # inside the crowd box, but of an ordinary object
        ]
    )
    target = {
        "boxes": torch.tensor([[0.0, 0.0, 50.0, 50.0], [100.0, 100.0, 110.0, 110.0], [0.0, 0.0, 12.0, 10.0]]),
        "labels": torch.tensor([0, 1, 0]),
        "crowd": torch.tensor([True, False, False]),
        "difficult": torch.tensor([False, True, False]),
    }
    labels = label_anchors(anchors, [target])
    # Anchor 0 has IoU 100/120 with the ordinary object: positive goes before ignored.
    assert labels.classes.tolist() == [[0, IGNORED, NEGATIVE, IGNORED, NEGATIVE, 0]]
    assert labels.ranking_targets(2)[0, 3].tolist() == [-1, -1]


def random_targets(seed: int, size: tuple[int, int]) -> list[dict[str, Tensor]]:
    """Up to 8 images with up to 30 objects that overlap; every other seed on whole pixels, where overlaps are equal."""
    generator = torch.Generator().manual_seed(seed)
    targets = []
    for _ in range(int(torch.randint(1, 9, (), generator=generator))):
        count = int(torch.randint(0, 31, (), generator=generator))
        corner = torch.rand(count, 2, generator=generator) * torch.tensor([size[1], size[0]])
        boxes = torch.cat([corner, corner + 2 + 60 * torch.rand(count, 2, generator=generator)], dim=1)
        flags = torch.rand(2, count, generator=generator) < 0.15
        labels = torch.randint(0, 4, (count,), generator=generator)
        boxes = boxes.round() if seed % 2 else boxes
        targets.append({"boxes": boxes, "labels": labels, "crowd": flags[0], "difficult": flags[1]})
    return targets


@pytest.fixture(scope="module")
def levels() -> list[Tensor]:
    return build_detector("retinanet-tiny", class_names=["a"]).anchors_for(96, 128)


@pytest.mark.parametrize("assigner", ["iou", "atss"])
def test_labels_are_bit_identical_to_labelling_one_image_at_a_time(
    assigner: Literal["iou", "atss"], levels: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in range(30):
        targets = random_targets(seed, (96, 128))
        if seed == 20:
            monkeypatch.setattr(module, "MAX_PAIRS", 1)  # one image per group
        found = label_anchors(levels, targets, assigner=assigner)
        classes, boxes = label_one_by_one(levels, targets, assigner)
        assert torch.equal(found.classes, classes)
        assert torch.equal(found.boxes, boxes)
        assert torch.equal(torch.stack([found.images, found.anchors], dim=1), (classes >= 0).nonzero())


@pytest.mark.parametrize("assigner", ["iou", "atss"])
def test_labels_are_the_same_on_a_gpu_and_take_one_host_read(
    assigner: Literal["iou", "atss"], levels: list[Tensor]
) -> None:
    """There every object gets a turn to claim the best remaining anchor, on the CPU only the ones that need it."""
    with SimulatedGPU() as gpu:
        on_gpu = [gpu.tensor(level) for level in levels]
        label_anchors(on_gpu, random_targets(0, (96, 128)), assigner=assigner)  # reads the anchors per cell
        for seed in range(4):
            targets = random_targets(seed, (96, 128))
            gpu.forget()
            found = label_anchors(on_gpu, targets, assigner=assigner)
            assert [read.name for read in gpu.host_reads] == ["nonzero"]
            expected, _ = label_one_by_one(levels, targets, assigner)
            assert torch.equal(found.classes.held, expected)


# The implementation up to version 0.9, for one image.


def label_one_by_one(levels, targets, assigner):
    anchors = torch.cat(levels)

    def match(boxes):
        return one_image_atss(boxes, levels) if assigner == "atss" else one_image_iou(boxes, anchors)

    classes = torch.full((len(targets), len(anchors)), NEGATIVE)
    matched_boxes = []
    for row, target in zip(classes, targets, strict=True):
        boxes, labels, crowd, difficult = (target[key] for key in ("boxes", "labels", "crowd", "difficult"))
        if bool(difficult.any()):
            row[match(boxes[difficult & ~crowd]) != NEGATIVE] = IGNORED
        if bool(crowd.any()):
            row[coverage(boxes[crowd], anchors) >= 0.5] = IGNORED
        ordinary = ~(crowd | difficult)
        matches = match(boxes[ordinary])
        row[matches == IGNORED] = IGNORED
        positive = (matches >= 0).nonzero().squeeze(1)
        row[positive] = labels[ordinary][matches[positive]]
        matched_boxes.append(boxes[ordinary][matches[positive]])
    return classes, torch.cat(matched_boxes)


def one_image_iou(boxes, anchors):
    if len(boxes) == 0:
        return torch.full((len(anchors),), NEGATIVE)
    overlaps = box_iou(boxes, anchors)  # [n, A]
    best_overlap, matches = overlaps.max(dim=0)
    matches[best_overlap < 0.5] = IGNORED
    matches[best_overlap < 0.4] = NEGATIVE
    claims = one_image_claims(overlaps)
    return torch.where(claims < len(boxes), claims, matches)


def one_image_claims(overlaps):
    count, num_anchors = overlaps.shape
    best = overlaps.amax(dim=1)  # [n]
    found = best > 0
    objects, positions = (overlaps == best.where(found, -1.0)[:, None]).nonzero(as_tuple=True)
    strength = best[objects]
    strongest = strength.new_zeros(num_anchors).scatter_reduce(0, positions, strength, "amax")
    won = strength == strongest[positions]
    first = strength.new_full((num_anchors,), count)
    claims = first.scatter_reduce(0, positions[won], objects[won].to(first), "amin").long()
    has_claim = torch.zeros(count + 1, dtype=torch.bool)
    has_claim[claims] = True
    for loser in (found & ~has_claim[:count]).nonzero().squeeze(1).tolist():
        overlap, position = overlaps[loser].where(claims == count, 0.0).max(dim=0)
        if bool(overlap > 0):
            claims[position] = loser
    return claims


def coverage(regions, anchors):
    top_left = torch.maximum(regions[:, None, :2], anchors[None, :, :2])
    bottom_right = torch.minimum(regions[:, None, 2:], anchors[None, :, 2:])
    inside = (bottom_right - top_left).clamp(min=0).prod(dim=2)
    return inside.amax(dim=0) / (anchors[:, 2:] - anchors[:, :2]).prod(dim=1)


def one_image_atss(boxes, levels, cells=9, margin=0.01):
    anchors = torch.cat(levels)
    if len(boxes) == 0:
        return torch.full((len(anchors),), NEGATIVE)
    candidates, start = [], 0
    for level in levels:
        centres = (level[:, :2] + level[:, 2:]) / 2
        per_cell = int(torch.isclose(centres, centres[0]).all(dim=1).sum())
        distances = torch.cdist((boxes[:, :2] + boxes[:, 2:]) / 2, centres[::per_cell])
        nearest = distances.argsort(dim=1, stable=True)[:, :cells]
        candidates.append((start + nearest[:, :, None] * per_cell + torch.arange(per_cell)).flatten(1))
        start += len(level)
    candidates = torch.cat(candidates, dim=1)
    overlaps = box_iou(boxes, anchors)
    found = overlaps.gather(1, candidates)
    centres = ((anchors[:, :2] + anchors[:, 2:]) / 2)[candidates]
    margins = torch.cat([centres - boxes[:, None, :2], boxes[:, None, 2:] - centres], dim=2)
    positive = (found >= (found.mean(dim=1) + found.std(dim=1))[:, None]) & (margins.amin(dim=2) > margin)
    of_positives = torch.full_like(overlaps, -1.0).scatter(1, candidates, found.where(positive, -1.0))
    best_overlap, matches = of_positives.max(dim=0)
    return matches.where(best_overlap >= 0, NEGATIVE)


# --- ATSS ---


def test_atss_by_hand() -> None:
    # One level of three cells, an anchor each; all three are candidates. IoU with the object: 1, 1/3, 0.
    level = torch.tensor([[0.0, 0.0, 8.0, 8.0], [4.0, 0.0, 12.0, 8.0], [40.0, 0.0, 48.0, 8.0]])
    boxes = torch.tensor([[[0.0, 0.0, 8.0, 8.0]]])
    # Mean 4/9 and standard deviation 0.51: from 0.95 on.
    assert match_anchors_atss(boxes, [level]).tolist() == [[0, NEGATIVE, NEGATIVE]]
    assert match_anchors_atss(boxes, [level[:1]]).tolist() == [[0]]
    # The best anchor of a narrow object has its centre outside: no positive.
    assert match_anchors_atss(torch.tensor([[[0.0, 0.0, 3.0, 8.0]]]), [level]).tolist() == [[NEGATIVE] * 3]
