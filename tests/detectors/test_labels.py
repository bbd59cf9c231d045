"""Labels of anchors: by hand, and against a literal version with loops."""

import statistics

import pytest
import torch
from torch import Tensor
from torchvision.ops import box_iou

from aploss.detectors import build_detector
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
    matches = match_anchors(boxes, anchors, positive_iou=0.5, negative_iou=0.4)
    assert matches.tolist() == [1, 0]


def test_two_objects_with_one_best_anchor_both_get_an_anchor() -> None:
    anchors = torch.tensor([[0.0, 0.0, 10.0, 10.0], [0.0, 0.0, 10.0, 40.0]])
    boxes = torch.tensor([[0.0, 0.0, 10.0, 12.0], [0.0, 0.0, 10.0, 10.0]])
    # Both have anchor 0 as best, with IoU 10/12 and 1: the second box takes it.
    matches = match_anchors(boxes, anchors, positive_iou=0.5, negative_iou=0.4)
    assert matches.tolist() == [1, 0]


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


def test_positives_are_in_the_order_of_the_flat_scores() -> None:
    anchors, targets = _random_case(seed=3)
    labels = label_anchors(anchors, targets)
    positions = (labels.ranking_targets(4) == 1).nonzero()  # the order of scores[targets == 1]
    expected = torch.stack([labels.images, labels.anchors, labels.positive_classes], dim=1)
    assert len(positions) > 5
    assert torch.equal(positions, expected)


@pytest.mark.parametrize("seed", range(10))
def test_labels_equal_a_literal_version_with_loops(seed: int) -> None:
    anchors, targets = _random_case(seed)
    labels = label_anchors(anchors, targets)
    for row, target in zip(labels.ranking_targets(4), targets, strict=True):
        assert row.tolist() == _literal_targets(anchors, target, num_classes=4)


def _random_case(seed: int) -> tuple[Tensor, list[dict[str, Tensor]]]:
    """Boxes on whole pixels: equal overlaps are then equal numbers in any arithmetic."""
    generator = torch.Generator().manual_seed(seed)

    def boxes(count: int) -> Tensor:
        corner = torch.randint(0, 30, (count, 2), generator=generator)
        size = torch.randint(3, 14, (count, 2), generator=generator)
        return torch.cat([corner, corner + size], dim=1).float()

    targets = []
    for count in (7, 1, 0, 12):
        flags = torch.rand(2, count, generator=generator) < 0.2
        labels = torch.randint(0, 4, (count,), generator=generator)
        targets.append({"boxes": boxes(count), "labels": labels, "crowd": flags[0], "difficult": flags[1]})
    return boxes(60), targets


def _literal_targets(anchors: Tensor, target: dict[str, Tensor], num_classes: int) -> list[list[int]]:
    boxes, labels = target["boxes"].tolist(), target["labels"].tolist()
    crowd, difficult = target["crowd"].tolist(), target["difficult"].tolist()
    all_anchors = anchors.tolist()
    ordinary = [i for i in range(len(boxes)) if not crowd[i] and not difficult[i]]
    hard = [i for i in range(len(boxes)) if difficult[i] and not crowd[i]]
    owners = _literal_owners([boxes[i] for i in ordinary], all_anchors)
    of_hard = _literal_owners([boxes[i] for i in hard], all_anchors)
    rows = []
    for index, anchor in enumerate(all_anchors):
        row = [0] * num_classes
        area = (anchor[2] - anchor[0]) * (anchor[3] - anchor[1])
        in_crowd = any(_shared(boxes[i], anchor) / area >= 0.5 for i in range(len(boxes)) if crowd[i])
        if isinstance(owners[index], int):
            row[labels[ordinary[owners[index]]]] = 1
        elif owners[index] == "ignored" or of_hard[index] != "negative" or in_crowd:
            row = [-1] * num_classes
        rows.append(row)
    return rows


def _literal_owners(boxes: list[list[float]], anchors: list[list[float]]) -> list:
    """For each anchor the index of its object, "ignored" or "negative"."""
    owners: list = []
    for anchor in anchors:
        overlaps = [_iou(box, anchor) for box in boxes]
        best = max(overlaps, default=0.0)
        if best >= 0.5:
            owners.append(overlaps.index(best))
        else:
            owners.append("ignored" if best >= 0.4 else "negative")
    claimed: dict[int, int] = {}
    for index, box in enumerate(boxes):
        overlaps = [_iou(box, anchor) for anchor in anchors]
        for position, overlap in enumerate(overlaps):
            if overlap == max(overlaps) > 0:
                rival = claimed.get(position)
                if rival is None or _iou(boxes[rival], anchors[position]) < overlap:
                    claimed[position] = index
    for index, box in enumerate(boxes):
        if index not in claimed.values():
            free = [i for i in range(len(anchors)) if i not in claimed]
            best = max(free, key=lambda i: _iou(box, anchors[i]))
            if _iou(box, anchors[best]) > 0:
                claimed[best] = index
    for position, index in claimed.items():
        owners[position] = index
    return owners


def _shared(box: list[float], other: list[float]) -> float:
    width = min(box[2], other[2]) - max(box[0], other[0])
    height = min(box[3], other[3]) - max(box[1], other[1])
    return max(0.0, width) * max(0.0, height)


def _iou(box: list[float], other: list[float]) -> float:
    areas = [(one[2] - one[0]) * (one[3] - one[1]) for one in (box, other)]
    shared = _shared(box, other)
    return shared / (sum(areas) - shared)


# --- ATSS ---


def literal_atss(boxes: Tensor, levels: list[Tensor], per_cell: int) -> list[int]:
    """Algorithm 1 of Zhang et al. (CVPR 2020) with loops over objects, levels and anchors."""
    anchors = [anchor for level in levels for anchor in level.tolist()]
    owner, owner_iou = [NEGATIVE] * len(anchors), [0.0] * len(anchors)
    for number, box in enumerate(boxes.tolist()):
        x, y = (box[0] + box[2]) / 2, (box[1] + box[3]) / 2
        candidates, start = [], 0
        for level in levels:
            cells = []
            for cell, anchor in enumerate(level[::per_cell].tolist()):
                across, down = (anchor[0] + anchor[2]) / 2 - x, (anchor[1] + anchor[3]) / 2 - y
                cells.append((across**2 + down**2, cell))
            for _, cell in sorted(cells)[:9]:
                candidates += range(start + cell * per_cell, start + (cell + 1) * per_cell)
            start += len(level)
        ious = [box_iou(torch.tensor([box]), torch.tensor([anchors[one]])).item() for one in candidates]
        threshold = statistics.mean(ious) + statistics.stdev(ious)
        for one, iou in zip(candidates, ious, strict=True):
            left, top, right, bottom = anchors[one]
            is_inside = box[0] < (left + right) / 2 < box[2] and box[1] < (top + bottom) / 2 < box[3]
            if iou >= threshold and is_inside and iou > owner_iou[one]:
                owner[one], owner_iou[one] = number, iou
    return owner


@pytest.mark.parametrize("seed", range(4))
def test_atss_is_its_algorithm_written_with_loops(seed: int) -> None:
    torch.manual_seed(seed)
    levels = build_detector("retinanet-tiny", class_names=["a"]).anchors_for(96, 128)
    corners = torch.rand(5, 2) * torch.tensor([90.0, 60.0])
    boxes = torch.cat([corners, corners + 6 + 30 * torch.rand(5, 2)], dim=1)
    boxes[1] = boxes[0] + torch.tensor([2.0, 1.0, 3.0, 1.0])  # two objects that want the same anchors
    matches = match_anchors_atss(boxes, levels)
    assert matches.tolist() == literal_atss(boxes, levels, per_cell=6)
    assert set(range(5)) <= set(matches.tolist())


def test_atss_by_hand() -> None:
    # One level of three cells, an anchor each; all three are candidates. IoU with the object: 1, 1/3, 0.
    level = torch.tensor([[0.0, 0.0, 8.0, 8.0], [4.0, 0.0, 12.0, 8.0], [40.0, 0.0, 48.0, 8.0]])
    boxes = torch.tensor([[0.0, 0.0, 8.0, 8.0]])
    # Mean 4/9 and standard deviation 0.51: from 0.95 on.
    assert match_anchors_atss(boxes, [level]).tolist() == [0, NEGATIVE, NEGATIVE]
    assert match_anchors_atss(boxes[:0], [level]).tolist() == [NEGATIVE] * 3
    assert match_anchors_atss(boxes, [level[:1]]).tolist() == [0]
    # The best anchor of a narrow object has its centre outside: no positive.
    assert match_anchors_atss(torch.tensor([[0.0, 0.0, 3.0, 8.0]]), [level]).tolist() == [NEGATIVE] * 3


def test_atss_has_difficult_and_crowd_objects_ignored_and_nothing_else() -> None:
    levels = build_detector("retinanet-tiny", class_names=["a"]).anchors_for(64, 64)
    boxes = torch.tensor([[4.0, 4.0, 24.0, 24.0], [30.0, 30.0, 60.0, 60.0]])
    target = {"boxes": boxes, "labels": torch.tensor([0, 0])}
    plain = label_anchors(levels, [target], assigner="atss")
    assert not (plain.classes == IGNORED).any()
    flagged = label_anchors(levels, [{**target, "difficult": torch.tensor([False, True])}], assigner="atss")
    second = (plain.boxes == boxes[1]).all(dim=1)
    assert (flagged.classes[0, plain.anchors[second]] == IGNORED).all()
    assert (flagged.classes == IGNORED).sum() == second.sum() > 0
    assert torch.equal(flagged.anchors, plain.anchors[~second])


def test_a_detector_trains_with_atss_and_keeps_the_option() -> None:
    detector = build_detector("retinanet-tiny", class_names=["a", "b"], assigner="atss")
    target = {"boxes": torch.tensor([[4.0, 4.0, 24.0, 24.0]]), "labels": torch.tensor([1])}
    losses = detector(torch.rand(2, 3, 64, 64), [target, target])
    assert losses["box"] > 0
    assert detector.config["assigner"] == "atss"
    assert build_detector(**detector.config).criterion.assigner == "atss"
