"""The criterion: against torchvision's own losses, by hand, and the score-shift argument."""

import copy
import math
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import run_group
from torch import Tensor, nn
from torchvision.models.detection._utils import Matcher
from torchvision.models.detection.retinanet import RetinaNetHead
from torchvision.ops import box_iou, generalized_box_iou_loss

from aploss.detectors import LOSS_NAMES
from aploss.detectors.criterion import Criterion, describe_loss, iou_of_pairs, make_loss
from aploss.detectors.labels import IGNORED, NEGATIVE, label_anchors
from aploss.detectors.postprocess import BOX_CODER
from aploss.errors import ConfigError, DataError, RunError

ANCHORS = torch.tensor(
    [[0.0, 0.0, 10.0, 10.0], [0.0, 0.0, 10.0, 22.0], [50.0, 50.0, 60.0, 60.0], [30.0, 0.0, 40.0, 20.0]]
)
K = 2


def make_criterion(loss: str | nn.Module = "ap", **options: Any) -> Criterion:
    loss = make_loss(loss) if isinstance(loss, str) else loss
    return Criterion(loss=loss, num_classes=K, **options)


def one_object(box: list[float], label: int) -> dict[str, Tensor]:
    return {"boxes": torch.tensor([box]), "labels": torch.tensor([label])}


def no_object() -> dict[str, Tensor]:
    return {"boxes": torch.zeros(0, 4), "labels": torch.zeros(0, dtype=torch.int64)}


def test_smooth_l1_box_loss_worked_by_hand() -> None:
    box = [1.0, 0.0, 11.0, 20.0]  # IoU with anchor 0: 90/210, with anchor 1: 180/240
    deltas = torch.zeros(1, 4, 4)
    losses = make_criterion()(torch.zeros(1, 4, K), deltas, ANCHORS, [one_object(box, 0)])
    # Anchor 1 is 10 x 22 with centre (5, 11), the box 10 x 20 with centre (6, 10).
    wanted = [10 * 1 / 10, 10 * -1 / 22, 0.0, 5 * math.log(20 / 22)]
    beta = 1 / 9
    by_hand = sum(0.5 * w * w / beta if abs(w) < beta else abs(w) - beta / 2 for w in wanted)
    assert losses["box"].item() == pytest.approx(by_hand, rel=1e-6)


def test_paper_smooth_l1_is_the_formula_of_the_authors_code() -> None:
    anchors, targets, logits, deltas = random_batch(seed=3)
    deltas = (3 * deltas).requires_grad_()  # on both sides of beta
    criterion = make_criterion(box_loss="paper-smooth-l1", smooth_l1_beta=1 / 9)
    box = criterion(logits, deltas, anchors, targets)["box"]
    (gradient,) = torch.autograd.grad(box, deltas)

    labels = label_anchors(anchors, targets)
    positives, boxes = anchors[labels.anchors], labels.boxes
    sizes, centres = positives[:, 2:] - positives[:, :2], (positives[:, :2] + positives[:, 2:]) / 2
    offsets = ((boxes[:, :2] + boxes[:, 2:]) / 2 - centres) / sizes / 0.1
    scales = ((boxes[:, 2:] - boxes[:, :2]) / sizes).log() / 0.2
    difference = deltas[labels.images, labels.anchors] - torch.cat([offsets, scales], dim=1)
    distance = difference.abs()
    value = torch.where(distance <= 1, 0.5 * difference**2, distance - 0.5).sum() / (4 * len(boxes))
    (wanted,) = torch.autograd.grad(value, deltas)
    assert 0 < (distance <= 1).float().mean() < 1
    torch.testing.assert_close(box, value, rtol=1e-6, atol=0)
    torch.testing.assert_close(gradient, wanted, rtol=0, atol=1e-6)


def test_giou_box_loss_is_torchvisions_on_decoded_boxes() -> None:
    target = one_object([1.0, 0.0, 12.0, 9.0], 0)
    deltas = torch.full((1, 4, 4), 0.2)
    criterion = make_criterion(box_loss="giou", box_weight=2.0)
    losses = criterion(torch.zeros(1, 4, K), deltas, ANCHORS, [target])
    decoded = BOX_CODER.decode_single(deltas[0, :1], ANCHORS[:1])
    expected = 2.0 * generalized_box_iou_loss(decoded, target["boxes"]).mean()
    torch.testing.assert_close(losses["box"], expected)


def test_focal_loss_is_that_of_torchvisions_retinanet() -> None:
    anchors, targets, logits, deltas = random_batch(seed=1)
    head = RetinaNetHead(8, 1, K)
    matcher = Matcher(0.5, 0.4, allow_low_quality_matches=True)
    outputs = {"cls_logits": logits[:1], "bbox_regression": deltas[:1]}
    matches = [matcher(box_iou(targets[0]["boxes"], anchors))]
    expected = head.compute_loss(targets[:1], outputs, [anchors], matches)

    found = make_criterion("focal")(logits[:1], deltas[:1], anchors, targets[:1])
    torch.testing.assert_close(found["classification"], expected["classification"])


def test_score_shift_between_images_is_seen_by_the_batch_and_not_by_each_image() -> None:
    """Section 3.4: each image perfectly ranked, the lowest score of one above all of the other."""
    targets = [one_object([0.0, 0.0, 10.0, 10.0], 0), one_object([0.0, 0.0, 10.0, 10.0], 0)]
    scores = torch.full((1, 4, K), -3.0)
    scores[0, 0, 0] = 3.0  # the only positive, 6 above everything else
    shifted = torch.cat([scores, scores + 100.0])
    deltas = torch.zeros(2, 4, 4)

    per_image = make_criterion(rank_over="image")(shifted, deltas, ANCHORS, targets)
    per_batch = make_criterion(rank_over="batch")(shifted, deltas, ANCHORS, targets)
    assert per_image["classification"].item() == 0.0
    # The positive of the first image ranks below the 5 negatives of the second that are not
    # ignored (3 anchors x 2 classes - 1 of the positive's own anchor), and second among positives:
    # precision 2 / 7. The interpolation leaves it; the loss is the mean of 5 / 7 and 0.
    assert per_batch["classification"].item() == pytest.approx(5 / 7 / 2)
    # Without the shift the batch is perfectly ranked, too.
    unshifted = make_criterion()(torch.cat([scores, scores]), deltas, ANCHORS, targets)
    assert unshifted["classification"].item() == 0.0


@pytest.mark.parametrize("name", ["ap", "auc", "rank-sort", "alrp"])
def test_ranking_each_image_is_the_mean_of_the_images_alone(name: str) -> None:
    anchors, targets, logits, deltas = random_batch(seed=5)
    criterion = make_criterion(name, rank_over="image", box_weight=1.0)
    together = criterion(logits, deltas, anchors, targets)["classification"]
    alone = [criterion(logits[i : i + 1], deltas[i : i + 1], anchors, targets[i : i + 1]) for i in range(len(targets))]
    expected = torch.stack([one["classification"] for one in alone]).mean()
    torch.testing.assert_close(together, expected)


@pytest.mark.parametrize("name", ["ap", "auc"])
def test_ranking_each_class_is_the_mean_of_the_classes_that_have_objects(name: str) -> None:
    anchors, targets, logits, deltas = random_batch(seed=7, columns=K)
    criterion = make_criterion(name, rank_over="class", box_weight=1.0)
    logits.requires_grad_()
    together = criterion(logits, deltas, anchors, targets)["classification"]
    together.backward()
    labels = label_anchors(anchors, targets)
    ranked = labels.ranking_targets(K)
    copy = logits.detach().clone().requires_grad_()
    alone = [criterion.loss(copy[..., k], ranked[..., k]) for k in range(K) if (ranked[..., k] == 1).any()]
    expected = torch.stack(alone).mean()
    expected.backward()
    torch.testing.assert_close(together, expected)
    torch.testing.assert_close(logits.grad, copy.grad)


@pytest.mark.parametrize("name", ["rank-sort", "alrp"])
def test_balanced_box_loss_has_the_value_its_table_says(name: str) -> None:
    anchors, targets, logits, deltas = random_batch(seed=7)
    losses = make_criterion(name)(logits, deltas, anchors, targets)
    plain = make_criterion(name, box_weight=1.0)(logits, deltas, anchors, targets)
    whole = plain["classification"] + (plain["box"] if name == "alrp" else 0.0)
    torch.testing.assert_close(losses["box"], whole)
    assert make_criterion(name).box_loss == "giou"


def test_rank_and_sort_gets_the_ious_of_the_predicted_boxes() -> None:
    seen = {}
    loss = make_loss("rank-sort")
    loss.register_forward_pre_hook(lambda _, arguments: seen.update(targets=arguments[1]))
    target = one_object([0.0, 0.0, 10.0, 10.0], 1)
    deltas = torch.zeros(1, 4, 4)
    deltas[0, 0, 0] = 5.0  # half a width to the right: IoU 50 / 150
    make_criterion(loss)(torch.zeros(1, 4, K), deltas, ANCHORS, [target])
    assert seen["targets"][0, 0].tolist() == pytest.approx([0.0, 1 / 3])
    assert seen["targets"][0, 1].tolist() == [-1.0, -1.0]


def test_loss_object_of_the_user_is_handed_scores_and_targets() -> None:
    class MeanOfPositives(nn.Module):
        def forward(self, scores: Tensor, targets: Tensor) -> Tensor:
            assert targets.dtype == scores.dtype
            return -scores[targets == 1].mean()

    anchors, targets, logits, deltas = random_batch(seed=9)
    found = make_criterion(MeanOfPositives())(logits, deltas, anchors, targets)
    labels = label_anchors(anchors, targets)
    chosen = logits[labels.images, labels.anchors, labels.positive_classes]
    torch.testing.assert_close(found["classification"], -chosen.mean())
    assert describe_loss(MeanOfPositives()) == ("custom", {})
    with pytest.raises(RunError, match="criterion"):
        make_loss("custom")(logits, logits)


@pytest.mark.parametrize("name", LOSS_NAMES)
def test_losses_are_described_by_name_and_options(name: str) -> None:
    described, options = describe_loss(make_loss(name))
    assert described == name
    assert "process_group" not in options
    assert describe_loss(make_loss(name, **options)) == (name, options)


def test_wrong_options_are_refused() -> None:
    with pytest.raises(ConfigError, match="'focal' has no option 'delta'; it has: alpha, gamma"):
        make_loss("focal", delta=1.0)
    with pytest.raises(ConfigError):
        make_loss("apx")
    with pytest.raises(ConfigError):
        make_criterion("focal", rank_over="class")  # it has no groups
    with pytest.raises(ConfigError):
        make_criterion(make_loss("ap", groups=0), rank_over="image")
    for wrong in ({"rank_over": "epoch"}, {"box_weight": -1.0}, {"positive_iou": 0.3}, {"assigner": "best"}):
        with pytest.raises(ConfigError):
            make_criterion(**wrong)


def test_wrong_labels_and_numbers_of_targets_are_refused() -> None:
    anchors, targets, logits, deltas = random_batch(seed=13)
    one_too_high = [targets[0], {**targets[1], "labels": torch.tensor([K])}]
    with pytest.raises(DataError, match=r"image 1 .*2\.\.2"):
        make_criterion()(logits, deltas, anchors, one_too_high)
    with pytest.raises(DataError):
        make_criterion()(logits, deltas, anchors, targets[:1])


def test_iou_of_pairs_is_the_diagonal_of_all_ious() -> None:
    boxes = random_batch(seed=10)[0]
    torch.testing.assert_close(iou_of_pairs(boxes[:20], boxes[20:40]), box_iou(boxes[:20], boxes[20:40]).diag())


def test_two_processes_give_the_gradient_of_one_with_the_whole_batch() -> None:
    results = run_group(2, _gradients_of_one_process)
    for name, empty in CASES_OF_PROCESSES:
        anchors, targets, logits, deltas = _batch_of_processes(name, empty)
        wanted = _gradients(make_criterion(name), anchors, targets, logits, deltas)
        halves = [result[name, empty] for result in results]
        for kind, whole in enumerate(wanted):
            found = torch.cat([half[kind] for half in halves]) / 2  # DDP averages over processes
            torch.testing.assert_close(found, whole, rtol=1e-5, atol=1e-7)


def test_what_one_process_refuses_all_processes_refuse_by_type() -> None:
    """And none is left waiting: a later exchange of theirs succeeds."""
    of_other, of_finder = run_group(2, _refuse_in_one_process)
    for case, (finder, cause) in CASES_OF_REFUSALS.items():
        assert of_finder[case] == finder, case
        assert of_other[case] == f"OtherProcessError {cause}", case


class _Refusing(nn.Module):
    """A loss without traits, which refuses what it is given in one process."""

    def forward(self, scores: Tensor, targets: Tensor) -> Tensor:
        if dist.get_rank() == 1:
            raise ValueError("not like this")
        return scores.sum()


CASES_OF_REFUSALS = {  # what the process that finds it raises, and what the other hears
    "ap-score": ("NonFiniteScoresError", "score"),
    "image-score": ("NonFiniteScoresError", "score"),
    "focal-target": ("DataError", "target"),
    "own-arguments": ("ValueError", "arguments"),
}


def _refuse_in_one_process(rank: int) -> dict[str, str]:
    messages = {}
    anchors, targets, logits, deltas = random_batch(seed=14)
    for case in CASES_OF_REFUSALS:
        kind, what = case.split("-")
        loss = {"own": _Refusing()}.get(kind) or make_loss("focal" if kind == "focal" else "ap")
        criterion = make_criterion(loss, rank_over="image" if kind == "image" else "batch")
        criterion.set_process_group(dist.group.WORLD)
        scores, truth = logits.clone(), targets
        if rank == 1 and what == "score":
            scores[0, 0, 0] = math.nan
        if rank == 1 and what == "target":
            truth = [{**target, "labels": target["labels"] + 1} for target in targets]
        try:
            criterion(scores, deltas, anchors, truth)
        except ValueError as error:
            messages[case] = f"{type(error).__name__} {getattr(error, 'cause', '')}".strip()
        dist.barrier()
    return messages


def test_copy_of_a_criterion_belongs_to_the_same_processes(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        criterion = make_criterion("ap")
        criterion.set_process_group(dist.group.WORLD)
        twin, sent = copy.deepcopy(criterion), pickle.loads(pickle.dumps(criterion))
        assert twin.process_group is criterion.process_group is twin.loss.process_group
        assert sent.process_group is criterion.process_group
        assert twin.loss is not criterion.loss
        anchors, targets, logits, deltas = random_batch(seed=12)
        wanted = make_criterion("ap")(logits, deltas, anchors, targets)
        torch.testing.assert_close(twin(logits, deltas, anchors, targets), wanted)
    finally:
        dist.destroy_process_group()


CASES_OF_PROCESSES = [  # loss, and which image has no object
    *((name, None) for name in ("ap", "focal", "ce-ohem", "rank-sort", "alrp")),
    *((name, "second") for name in ("ap", "focal", "rank-sort")),
    ("focal", "both"),
]


def _batch_of_processes(name: str, empty: str | None) -> tuple[Tensor, list[dict[str, Tensor]], Tensor, Tensor]:
    anchors, targets, logits, deltas = random_batch(seed=11, columns=K + (name == "ce-ohem"))
    if empty:
        targets = [targets[0] if empty == "second" else no_object(), no_object()]
    return anchors, targets, logits, deltas


def _gradients_of_one_process(rank: int) -> dict[tuple[str, str | None], list[Tensor]]:
    found = {}
    for name, empty in CASES_OF_PROCESSES:
        anchors, targets, logits, deltas = _batch_of_processes(name, empty)
        criterion = make_criterion(name)
        criterion.set_process_group(dist.group.WORLD)
        mine = slice(rank, rank + 1)
        found[name, empty] = _gradients(criterion, anchors, targets[mine], logits[mine], deltas[mine])
    return found


def _gradients(criterion: Criterion, anchors: Tensor, targets: list, logits: Tensor, deltas: Tensor) -> list[Tensor]:
    logits, deltas = logits.clone().requires_grad_(), deltas.clone().requires_grad_()
    losses = criterion(logits, deltas, anchors, targets)
    return list(torch.autograd.grad(sum(losses.values()), [logits, deltas]))


def random_batch(seed: int, columns: int = K) -> tuple[Tensor, list[dict[str, Tensor]], Tensor, Tensor]:
    """Two images: one with four objects, one with one; objects far apart, so none competes."""
    generator = torch.Generator().manual_seed(seed)
    corner = torch.rand(80, 2, generator=generator) * 90
    anchors = torch.cat([corner, corner + 5 + torch.rand(80, 2, generator=generator) * 25], dim=1)
    boxes = torch.tensor(
        [[5.0, 5.0, 25.0, 20.0], [60.0, 5.0, 80.0, 30.0], [5.0, 60.0, 22.0, 80.0], [70.0, 70.0, 90.0, 95.0]]
    )
    targets = [
        {"boxes": boxes, "labels": torch.tensor([0, 1, 1, 0])},
        {"boxes": boxes[1:2], "labels": torch.tensor([1])},
    ]
    logits = torch.randn(2, len(anchors), columns, generator=generator)
    deltas = torch.randn(2, len(anchors), 4, generator=generator) * 0.5
    return anchors, targets, logits, deltas


@pytest.mark.parametrize("flag", ["crowd", "difficult"])
def test_dropped_hard_boxes_make_their_anchors_background(flag: str) -> None:
    target = {"boxes": ANCHORS[:1].clone(), "labels": torch.tensor([0]), flag: torch.tensor([True])}
    ignoring, dropping = (make_criterion(hard_boxes=hard).label(ANCHORS, [target]) for hard in ("ignore", "drop"))
    assert ignoring.classes[0, 0] == IGNORED
    assert (dropping.classes == NEGATIVE).all()
