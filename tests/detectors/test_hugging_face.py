"""Our losses in detectors of Hugging Face ``transformers``: tiny, with random weights."""

import copy
import itertools
import pickle
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as processes
import torch.nn.functional as F
from tiny_runs import start_process
from torch import Tensor, nn
from torchvision.ops import box_convert, box_iou, generalized_box_iou

from aploss.data import builtin_dataset
from aploss.detectors import ScoreThresholdWarning, calibrate, make_loss, use_loss
from aploss.detectors.hugging_face import calibration_of, set_calibration
from aploss.errors import ConfigError, DataError, RunError
from aploss.evaluation import Calibration, coco_metrics
from aploss.losses import ALRPLoss, APLoss, FocalLoss, OHEMCrossEntropy, RankSortLoss
from aploss.losses.traits import LOSSES, LossTraits, traits_of

tf = pytest.importorskip("transformers", reason="transformers is not installed (extra `hf`)")

pytestmark = pytest.mark.filterwarnings("ignore:.*does not make them probabilities")

Labels = list[dict[str, Tensor]]
SOFTMAX = ["detr", "yolos"]
GROUPS = {"lw-detr": 3, "rf-detr": 3}
REAL_TIME = {
    "encoder_hidden_dim": 16, "encoder_in_channels": [16, 16, 16], "encoder_ffn_dim": 16,
    "encoder_attention_heads": 2, "d_model": 16, "num_queries": 12, "decoder_in_channels": [16] * 3,
    "decoder_ffn_dim": 16, "decoder_layers": 2, "decoder_attention_heads": 2, "num_denoising": 8,
    "num_labels": 3,
}  # fmt: skip
PLAIN = {
    "encoder_layers": 1, "decoder_layers": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16,
    "encoder_attention_heads": 2, "decoder_attention_heads": 2, "num_queries": 12, "num_labels": 3,
    "auxiliary_loss": True, "dropout": 0.0,
}  # fmt: skip
GROUPED = {
    "d_model": 16, "decoder_ffn_dim": 16, "decoder_layers": 2, "decoder_self_attention_heads": 2,
    "decoder_cross_attention_heads": 2, "num_queries": 12, "group_detr": 3, "num_labels": 3,
    "dropout": 0.0,
}  # fmt: skip
VIT = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 64}


def _real_time_backbone() -> Any:
    return tf.RTDetrResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16, 16, 16], depths=[1] * 4, layer_type="basic",
        out_features=["stage2", "stage3", "stage4"],
    )  # fmt: skip


def _resnet(*stages: str) -> Any:
    return tf.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16, 16, 16], depths=[1] * 4, layer_type="basic",
        out_features=list(stages),
    )  # fmt: skip


def _real_time(model: str, config: str, **more: Any) -> Callable[[], nn.Module]:
    return lambda: getattr(tf, model)(getattr(tf, config)(backbone_config=_real_time_backbone(), **REAL_TIME, **more))


MAKERS: dict[str, Callable[[], Any]] = {
    "rt-detr": _real_time("RTDetrForObjectDetection", "RTDetrConfig"),
    "rt-detr-v2": _real_time("RTDetrV2ForObjectDetection", "RTDetrV2Config"),
    "d-fine": _real_time("DFineForObjectDetection", "DFineConfig", max_num_bins=8),
    "deimv2": _real_time("Deimv2ForObjectDetection", "Deimv2Config", max_num_bins=8),
    "lw-detr": lambda: tf.LwDetrForObjectDetection(tf.LwDetrConfig(
        backbone_config=tf.LwDetrViTConfig(
            **VIT, pretrain_image_size=64, num_windows=4, window_block_indices=[0],
            out_indices=[1, 2],
        ),
        projector_scale_factors=[1.0], **GROUPED,
    )),
    "rf-detr": lambda: tf.RfDetrForObjectDetection(tf.RfDetrConfig(
        backbone_config=tf.RfDetrDinov2Config(
            **VIT, patch_size=16, num_windows=1, out_indices=[1, 2]
        ),
        **GROUPED,
    )),
    "deformable-detr": lambda: tf.DeformableDetrForObjectDetection(tf.DeformableDetrConfig(
        backbone_config=_resnet("stage2", "stage3", "stage4"), d_model=32, num_feature_levels=3,
        **PLAIN,
    )),
    "conditional-detr": lambda: tf.ConditionalDetrForObjectDetection(
        tf.ConditionalDetrConfig(backbone_config=_resnet("stage4"), d_model=16, **PLAIN)
    ),
    "dab-detr": lambda: tf.DabDetrForObjectDetection(
        tf.DabDetrConfig(backbone_config=_resnet("stage4"), hidden_size=16, **PLAIN)
    ),
    "detr": lambda: tf.DetrForObjectDetection(
        tf.DetrConfig(backbone_config=_resnet("stage4"), d_model=16, **PLAIN)
    ),
    "yolos": lambda: tf.YolosForObjectDetection(tf.YolosConfig(
        **{**VIT, "image_size": [64, 64]}, intermediate_size=16, num_detection_tokens=12,
        num_labels=3,
    )),
}  # fmt: skip
FAMILIES = list(MAKERS)


def make_model(family: str) -> Any:
    """A tiny model of the family with 3 classes and 12 queries for images of 64 pixels."""
    torch.manual_seed(0)
    return MAKERS[family]().train()


def make_batch() -> tuple[Tensor, Labels]:
    """Three images, the second without objects."""
    boxes = torch.tensor([[0.3, 0.3, 0.3, 0.4], [0.7, 0.7, 0.2, 0.3], [0.5, 0.5, 0.5, 0.5]])
    classes = torch.tensor([0, 2, 1])
    rows = [[0, 1], [], [2]]
    labels = [{"class_labels": classes[row], "boxes": boxes[row].reshape(-1, 4)} for row in rows]
    return torch.rand(3, 3, 64, 64, generator=torch.Generator().manual_seed(1)), labels


def step(model: Any, images: Tensor, labels: Labels) -> Any:
    """One forward pass in training mode with the same denoising queries each time."""
    torch.manual_seed(2)
    return model(pixel_values=images, labels=labels)


# The classification terms by hand: the library's matcher on each layer, AP-loss by its definition.


def _matcher(family: str, config: Any) -> Callable[..., list[tuple[Tensor, Tensor]]]:
    from transformers.loss import loss_deformable_detr, loss_for_object_detection, loss_lw_detr, loss_rt_detr

    if hasattr(config, "matcher_class_cost"):
        matcher: Any = loss_rt_detr.RTDetrHungarianMatcher(config)
        return lambda outputs, labels: matcher(outputs, labels)
    kind: Any = loss_deformable_detr.DeformableDetrHungarianMatcher
    if family in SOFTMAX:
        kind = loss_for_object_detection.HungarianMatcher
    if family in GROUPS:
        kind = loss_lw_detr.LwDetrHungarianMatcher
    made = kind(config.class_cost, config.bbox_cost, config.giou_cost)
    groups = {"group_detr": GROUPS[family]} if family in GROUPS else {}
    return lambda outputs, labels: made(outputs, labels, **groups)


def _seen_by_loss_function(model: Any) -> dict[str, Any]:
    """What a model hands to its loss function, by name; filled at the next forward pass."""
    seen: dict[str, Any] = {}
    original = model.loss_function

    def look(logits: Tensor, labels: Any, device: Any, boxes: Tensor, config: Any, *rest: Any, **more: Any) -> Any:
        seen.update(more, logits=logits, boxes=boxes, rest=rest)
        return original(logits, labels, device, boxes, config, *rest, **more)

    model.loss_function = look
    return seen


def _layers(family: str, seen: dict[str, Any]) -> dict[str, tuple[Tensor, Tensor, bool]]:
    """(logits, boxes, whether of denoising queries) of each classification term, by its name."""
    logits, boxes, rest = seen["logits"], seen["boxes"], seen["rest"]
    if "enc_topk_logits" in seen:
        name = "loss_mal" if family == "deimv2" else "loss_vfl"
        first, count = seen["denoising_meta_values"]["dn_num_split"]
        classes, coordinates = rest  # [B, layers, first + count, ...]
        assert classes.shape[2] == first + count
        if family in ("d-fine", "deimv2"):
            boxes, coordinates = boxes.clamp(0, 1), coordinates.clamp(0, 1)
        number = classes.shape[1]
        if seen["predicted_corners"] is not None:  # the library has a term where it has corners
            number = min(number, seen["predicted_corners"].shape[1])
        layers = {name: (logits[:, first:], boxes[:, first:], False)}
        for layer in range(number - 1):
            pair = classes[:, layer, first:], coordinates[:, layer, first:]
            layers[f"{name}_aux_{layer}"] = (*pair, False)
        encoder = seen["enc_topk_logits"], seen["enc_topk_bboxes"].clamp(0, 1)
        layers[f"{name}_aux_{number - 1}"] = (*encoder, False)
        for layer in range(number):
            pair = classes[:, layer, :first], coordinates[:, layer, :first]
            layers[f"{name}_dn_{layer}"] = (*pair, True)
        return layers
    layers = {"loss_ce": (logits, boxes, False)}
    if rest[0] is not None:
        for layer, pair in enumerate(zip(rest[0][:-1], rest[1][:-1], strict=True)):
            layers[f"loss_ce_{layer}"] = (*pair, False)
    if family in GROUPS:
        layers["loss_ce_enc"] = (rest[2], rest[3], False)
    return layers


def _expected_terms(
    family: str, model: Any, seen: dict[str, Any], labels: Labels, of_layer: Callable[..., Any]
) -> dict[str, Any]:
    """``of_layer(scores, positives, boxes, objects)`` of each term; positives are index triples."""
    match = _matcher(family, model.config)
    expected = {}
    for name, (logits, boxes, denoising) in _layers(family, seen).items():
        if denoising:
            meta = seen["denoising_meta_values"]
            matches = [
                (queries, torch.arange(len(label["boxes"])).repeat(meta["dn_num_group"]))
                if len(label["boxes"])
                else (torch.zeros(0).long(), torch.zeros(0).long())
                for queries, label in zip(meta["dn_positive_idx"], labels, strict=True)
            ]
        else:
            matches = match({"logits": logits, "pred_boxes": boxes}, labels)
        positives, objects = [], []
        for image, (queries, places) in enumerate(matches):
            for query, place in sorted(zip(queries.tolist(), places.tolist(), strict=True)):
                positives.append((image, query, int(labels[image]["class_labels"][place])))
                objects.append(labels[image]["boxes"][place])
        expected[name] = of_layer(logits, positives, boxes, objects)
    return expected


def _log_odds(logits: Tensor) -> Tensor:
    probabilities = logits.double().softmax(dim=-1)[..., :-1]
    return torch.log(probabilities / (1 - probabilities))


def _ap_loss_by_hand(scores: Tensor, positives: list[tuple[int, int, int]]) -> float:
    """1 - interpolated average precision with the step of Section 3.4, delta 1, pair by pair."""
    scores = scores.detach().double()
    is_positive = torch.zeros(scores.shape, dtype=torch.bool)
    for place in positives:
        is_positive[place] = True

    def above(others: Tensor, score: Tensor) -> float:
        return float(((others - score) / 2 + 0.5).clamp(0, 1).sum())

    negatives, chosen = scores[~is_positive], scores[is_positive].sort(descending=False).values
    precisions, best = [], 0.0
    for index, score in enumerate(chosen):  # from the lowest: precision must not fall upwards
        others = torch.cat([chosen[:index], chosen[index + 1 :]])
        ranked = 1 + above(others, score)
        best = max(best, ranked / (ranked + above(negatives, score)))
        precisions.append(best)
    return 1 - sum(precisions) / len(precisions)


@pytest.mark.parametrize("family", FAMILIES)
def test_ap_loss_takes_the_place_of_each_classification_term(family: str) -> None:
    model = make_model(family)
    images, labels = make_batch()
    own = step(model, images, labels)
    seen = _seen_by_loss_function(model)
    use_loss(model, APLoss())
    found = step(model, images, labels)

    def by_hand(logits: Tensor, positives: Any, boxes: Tensor, objects: Any) -> float:
        scores = _log_odds(logits) if family in SOFTMAX else logits
        return _ap_loss_by_hand(scores, positives)

    expected = _expected_terms(family, model, seen, labels, by_hand)
    assert len(expected) == {"yolos": 1, "lw-detr": 3, "rf-detr": 3}.get(family, 2) or ("dn_0" in "".join(expected))
    assert set(found.loss_dict) == set(own.loss_dict)
    for name, value in found.loss_dict.items():
        if name in expected:
            assert value.item() == pytest.approx(expected[name], abs=1e-6), name
        else:  # box terms stay
            torch.testing.assert_close(value, own.loss_dict[name], rtol=0, atol=0)
    assert not [name for name in own.loss_dict if _is_class(name) and name not in expected]
    # the model's own weights stay, too: what its sum has beside the classification terms
    rest = own.loss - sum(own.loss_dict[name] for name in expected)
    total = rest + sum(found.loss_dict[name] for name in expected)
    torch.testing.assert_close(found.loss, total, rtol=1e-5, atol=1e-5)


def _is_class(name: str) -> bool:
    return name.startswith(("loss_ce", "loss_vfl", "loss_mal"))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("loss", [APLoss(), RankSortLoss(), ALRPLoss()], ids=["ap", "rs", "alrp"])
def test_gradients_are_finite_and_reach_what_the_models_own_loss_reaches(family: str, loss: nn.Module) -> None:
    model = make_model(family)
    images, labels = make_batch()
    step(model, images, labels).loss.backward()
    reached = {n for n, p in model.named_parameters() if p.grad is not None}
    moved = {n for n, p in model.named_parameters() if p.grad is not None and p.grad.any()}
    model.zero_grad()
    use_loss(model, loss)
    step(model, images, labels).loss.backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert set(gradients) == reached
    assert all(gradient.isfinite().all() for gradient in gradients.values())
    still = {n for n in moved if not gradients[n].any()}
    # a ranking loss does not change when all scores rise together, as with some of the biases
    assert all(name.endswith(".bias") for name in still), still


# Other losses get what they need


@pytest.mark.parametrize("family", ["rt-detr", "detr"])
def test_rank_and_sort_gets_the_iou_of_the_matched_boxes(family: str) -> None:
    model = make_model(family)
    images, labels = make_batch()
    seen = _seen_by_loss_function(model)
    loss = RankSortLoss()
    use_loss(model, loss)
    found = step(model, images, labels)

    def by_hand(logits: Tensor, positives: Any, boxes: Tensor, objects: Any) -> float:
        scores = _log_odds(logits) if family in SOFTMAX else logits.double()
        targets = torch.zeros(scores.shape, dtype=torch.float64)
        for place, wanted in zip(positives, objects, strict=True):
            pair = box_convert(torch.stack([boxes[place[0], place[1]], wanted]), "cxcywh", "xyxy")
            targets[place] = max(1e-6, box_iou(pair[:1], pair[1:]).item())
        return float(sum(loss(scores.detach(), targets)))

    for name, value in _expected_terms(family, model, seen, labels, by_hand).items():
        assert found.loss_dict[name].item() == pytest.approx(value, abs=1e-5), name


@pytest.mark.parametrize("family", ["d-fine", "deformable-detr", "lw-detr"])
def test_alrp_gets_the_giou_losses_of_the_matched_boxes_and_replaces_that_term(family: str) -> None:
    model = make_model(family)
    images, labels = make_batch()
    own = step(model, images, labels).loss_dict
    seen = _seen_by_loss_function(model)
    loss = ALRPLoss()
    use_loss(model, loss)
    found = step(model, images, labels).loss_dict

    def by_hand(logits: Tensor, positives: Any, boxes: Tensor, objects: Any) -> tuple[float, float]:
        targets = torch.zeros(logits.shape)
        losses = []
        for place, wanted in zip(positives, objects, strict=True):
            targets[place] = 1
            pair = box_convert(torch.stack([boxes[place[0], place[1]], wanted]), "cxcywh", "xyxy")
            losses.append(1 - generalized_box_iou(pair[:1], pair[1:]).item())
        classification, localisation = loss(logits, targets, torch.tensor(losses))
        return classification.item(), localisation.item()

    weight = model.config.weight_loss_giou if family == "d-fine" else 1.0  # LW-DETR weighs later
    assert set(found) == set(own)
    for name, parts in _expected_terms(family, model, seen, labels, by_hand).items():
        head, _, layer = name.removeprefix("loss_").partition("_")
        giou = f"loss_giou_{layer}" if layer else "loss_giou"
        assert head in ("ce", "vfl")
        assert found[name].item() == pytest.approx(parts[0], abs=1e-5)
        assert found[giou].item() == pytest.approx(weight * parts[1], abs=1e-5)
        bbox = giou.replace("giou", "bbox")
        torch.testing.assert_close(found[bbox], own[bbox])


@pytest.mark.parametrize("family", ["deformable-detr", "conditional-detr", "dab-detr"])
def test_focal_loss_swapped_in_is_the_models_own(family: str) -> None:
    model = make_model(family)
    images, labels = make_batch()
    expected = step(model, images, labels)
    found = step(use_loss(model, FocalLoss()), images, labels)
    torch.testing.assert_close(found.loss, expected.loss)
    for name, value in expected.loss_dict.items():
        torch.testing.assert_close(found.loss_dict[name], value)


def test_a_softmax_loss_gets_the_background_in_column_0_and_class_numbers_from_1() -> None:
    model = make_model("yolos")
    images, labels = make_batch()
    given: dict[str, Any] = {}
    loss = OHEMCrossEntropy()
    loss.register_forward_pre_hook(lambda _, arguments: given.update(all=arguments))
    use_loss(model, loss)
    found = step(model, images, labels)
    found.loss.backward()
    logits, classes = given["all"]
    torch.testing.assert_close(logits[..., 0], found.logits[..., 3])
    torch.testing.assert_close(logits[..., 1:], found.logits[..., :3])
    assert sorted(classes[0].tolist()) == [0] * 10 + [1, 3]
    assert sorted(classes[1].tolist()) == [0] * 12
    assert sorted(classes[2].tolist()) == [0] * 11 + [2]


@pytest.mark.parametrize("name", sorted(LOSSES))
@pytest.mark.parametrize("family", ["rt-detr-v2", "detr"])
def test_every_loss_trains(family: str, name: str) -> None:
    model = make_model(family)
    images, labels = make_batch()
    if traits_of(name).softmax and family not in SOFTMAX:
        with pytest.raises(ConfigError, match="needs a background column"):
            use_loss(model, make_loss(name))
        return
    use_loss(model, make_loss(name))
    loss = step(model, images, labels).loss
    loss.backward()
    assert loss.isfinite()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


class IoUWeighted(nn.Module):
    """A user's loss that says by its traits alone what it wants."""

    traits = LossTraits(positive_targets="iou", divides_by_positives=True)

    def forward(self, scores: Tensor, targets: Tensor, num_positives: float) -> Tensor:
        self.seen = targets, num_positives
        return F.binary_cross_entropy_with_logits(scores, targets, reduction="sum") / num_positives


def test_a_users_loss_is_called_by_its_traits_and_not_by_its_name() -> None:
    model = make_model("lw-detr")
    images, labels = make_batch()
    loss = IoUWeighted()
    use_loss(model, loss)
    step(model, images, labels).loss.backward()
    targets, num_positives = loss.seen
    assert num_positives == 9  # 3 objects in each of 3 groups of queries
    assert (targets > 0).sum() == 9
    assert (targets > 0).any(dim=2).view(3, 3, 12).sum(dim=2).tolist() == [[2] * 3, [0] * 3, [1] * 3]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_without_any_object_trains(family: str) -> None:
    images, labels = make_batch()
    empty = [labels[1]] * 3
    model = use_loss(make_model(family), APLoss())
    output = step(model, images, empty)
    assert output.loss.isfinite()
    assert all(v.item() == 0 for name, v in output.loss_dict.items() if _is_class(name))
    output.loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


# Only the loss of this model changes


def _detect(model: Any, images: Tensor) -> tuple[Tensor, Tensor]:
    with torch.inference_mode():
        output = model.eval()(pixel_values=images)
    model.train()
    return output.logits, output.pred_boxes


@pytest.mark.parametrize("family", FAMILIES)
def test_inference_is_bit_identical_and_another_model_keeps_its_loss(family: str) -> None:
    model, other = make_model(family), make_model(family)
    images, labels = make_batch()
    before, keys = _detect(model, images), list(model.state_dict())
    expected = step(other, images, labels)
    assert use_loss(model, APLoss()) is model
    after = _detect(model, images)
    assert all(torch.equal(one, two) for one, two in zip(before, after, strict=True))
    assert list(model.state_dict()) == keys
    step(model, images, labels)
    again = step(other, images, labels)
    assert again.loss_dict.keys() == expected.loss_dict.keys()
    assert all(torch.equal(again.loss_dict[name], value) for name, value in expected.loss_dict.items())
    assert other.loss_function is type(other)(other.config).loss_function


@pytest.mark.parametrize("family", FAMILIES)
def test_none_gives_the_models_own_loss_back(family: str) -> None:
    model = make_model(family)
    images, labels = make_batch()
    expected = step(model, images, labels).loss
    own = model.loss_function
    use_loss(use_loss(model, APLoss()), RankSortLoss())  # the second in place of the first
    assert not torch.equal(step(model, images, labels).loss, expected)
    use_loss(model, None)
    assert model.loss_function is own
    assert "_loss_function" not in vars(model)
    assert torch.equal(step(model, images, labels).loss, expected)


def test_a_loss_function_of_the_users_is_kept_and_given_back() -> None:
    model = make_model("detr")
    images, labels = make_batch()
    own = model.loss_function
    once = step(use_loss(model, APLoss()), images, labels).loss
    use_loss(model, None).loss_function = _TwiceTheLoss(own)
    twice = step(use_loss(model, APLoss()), images, labels).loss
    torch.testing.assert_close(twice, 2 * once)
    assert isinstance(use_loss(model, None).loss_function, _TwiceTheLoss)


class _TwiceTheLoss:
    def __init__(self, own: Any) -> None:
        self.own = own

    def __call__(self, logits: Tensor, labels: Labels, device: Any, pred_boxes: Tensor, config: Any, *rest: Any) -> Any:
        total, terms, auxiliary = self.own(logits, labels, device, pred_boxes, config, *rest)
        return 2 * total, terms, auxiliary


@pytest.mark.parametrize("family", FAMILIES)
def test_copies_and_pickles_have_the_loss_and_files_do_not(family: str, tmp_path: Path) -> None:
    model = use_loss(make_model(family), APLoss(delta=0.7))
    twins = [copy.deepcopy(model)]
    if family not in GROUPS:  # whose backbones have hooks of the library that no pickle takes
        twins.append(pickle.loads(pickle.dumps(model)))
    images, labels = make_batch()
    expected = step(model, images, labels)
    for twin in twins:
        found = step(twin, images, labels)
        assert torch.equal(found.loss, expected.loss)
        use_loss(twin, None)
    assert torch.equal(step(model, images, labels).loss, expected.loss)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path).train()
    own = step(use_loss(model, None), images, labels)
    torch.testing.assert_close(step(loaded, images, labels).loss, own.loss)
    torch.testing.assert_close(step(use_loss(loaded, APLoss(delta=0.7)), images, labels).loss, expected.loss)


def test_what_is_no_loss_or_no_detector_is_refused_at_once() -> None:
    model = make_model("rt-detr")
    own = model.loss_function
    for wrong, shown in ((APLoss, "the class APLoss"), ("ap", "'ap'"), (3, "3")):
        with pytest.raises(ConfigError, match=f"such as APLoss.*got {shown}"):
            use_loss(model, wrong)
    with pytest.raises(ConfigError, match="needs a background column, which RTDetrFor"):
        use_loss(model, OHEMCrossEntropy())
    assert model.loss_function is own
    tiny = tf.BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8, vocab_size=9)
    with pytest.raises(ConfigError, match=r"RT-DETR, .* got BertForMaskedLM"):
        use_loss(tf.BertForMaskedLM(tiny), APLoss())


def test_training_stops_where_the_term_cannot_be_replaced() -> None:
    model = make_model("detr")
    images, labels = make_batch()
    model.loss_function = lambda *_, **__: (torch.zeros(()), {}, None)
    use_loss(model, APLoss())
    with pytest.raises(RunError, match="in a way that use_loss does not know"):
        step(model, images, labels)


def test_nothing_of_the_library_is_imported_for_other_models(tmp_path: Path) -> None:
    program = (
        "import sys; from torchvision.models.detection import ssdlite320_mobilenet_v3_large as a;"
        "from aploss.detectors import use_loss; from aploss import APLoss;"
        "use_loss(a(weights=None, weights_backbone=None), APLoss());"
        "sys.exit('transformers' in sys.modules)"
    )
    process = start_process(program, log=tmp_path / "log")
    process.join()
    assert process.exitcode == 0


@pytest.mark.parametrize("family", ["rt-detr", "d-fine", "deimv2", "lw-detr", "detr"])
def test_weights_of_the_terms_can_be_given(family: str) -> None:
    model = use_loss(make_model(family), APLoss())
    images, labels = make_batch()
    before = step(model, images, labels)
    use_loss(model, APLoss(), weights={"class": 3, "bbox": 0.0, "giou": 0.5})
    after = step(model, images, labels)
    in_terms = hasattr(model.config, "weight_loss_bbox")  # RT-DETR and its kin list weighted terms
    plain = {
        name: value / ({"bbox": 5.0, "giou": 2.0}.get(name.split("_")[1], 1.0) if in_terms else 1)
        for name, value in before.loss_dict.items()
        if name.startswith("loss_")
    }
    weight = {"ce": 3.0, "vfl": 3.0, "mal": 3.0, "bbox": 0.0, "giou": 0.5}
    expected = sum(weight.get(name.split("_")[1], 1.0) * value for name, value in plain.items())
    torch.testing.assert_close(after.loss, expected)
    assert model.config.to_dict() == make_model(family).config.to_dict()


def test_wrong_weights_are_refused() -> None:
    model = make_model("d-fine")
    with pytest.raises(ConfigError, match=r"no weight for 'box'; .*class, bbox, giou, fgl, ddf"):
        use_loss(model, APLoss(), weights={"box": 1.0})
    with pytest.raises(ConfigError, match="'giou' must be a number >= 0, got -1"):
        use_loss(model, APLoss(), weights={"giou": -1})
    with pytest.raises(ConfigError, match="weights go with a loss"):
        use_loss(model, None, weights={"giou": 1})
    use_loss(model, APLoss(), weights={"fgl": 0.3})


@pytest.mark.filterwarnings("default")
def test_the_user_is_told_about_thresholds_of_scores_that_are_no_probabilities() -> None:
    with pytest.warns(ScoreThresholdWarning, match="APLoss .* RTDetrFor.*threshold=0.*calibrate"):
        use_loss(make_model("rt-detr"), APLoss())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        use_loss(make_model("rt-detr"), FocalLoss())
        use_loss(make_model("rt-detr"), None)


# Ways of training


def test_gradient_checkpointing_gives_the_same_gradients() -> None:
    images, labels = make_batch()
    gradients = []
    for checkpointing in (False, True):
        model = use_loss(make_model("deformable-detr"), APLoss())
        if checkpointing:
            model.gradient_checkpointing_enable()
        step(model, images, labels).loss.backward()
        gradients.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient)


@pytest.mark.parametrize("family", ["rt-detr", "detr"])
def test_autocast_trains(family: str) -> None:
    model = use_loss(make_model(family), RankSortLoss())
    images, labels = make_batch()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = step(model, images, labels).loss
    loss.backward()
    assert loss.isfinite()


def test_a_compiled_model_trains_with_the_loss() -> None:
    images, labels = make_batch()
    model = use_loss(make_model("yolos"), APLoss())
    expected = step(model, images, labels).loss
    compiled = torch.compile(model, backend="eager")
    torch.testing.assert_close(step(compiled, images, labels).loss, expected)
    torch._dynamo.reset()


class _Inference(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        output = self.model(pixel_values=images)
        return output.logits, output.pred_boxes


def test_a_swapped_model_is_exported_traced_and_compiled_as_the_plain_one() -> None:
    onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed (extra `export`)")
    images = make_batch()[0]
    swapped = _Inference(use_loss(make_model("yolos"), APLoss())).eval()
    with torch.inference_mode():
        expected = _Inference(make_model("yolos")).eval()(images)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporter and of tracing, which is out of date
        program = torch.onnx.export(swapped, (images,), dynamo=True, verbose=False)
        traced = torch.jit.trace(swapped, (images,), check_trace=False)(images)
        compiled = torch.compile(swapped, backend="eager")(images)
    torch._dynamo.reset()
    session = onnxruntime.InferenceSession(program.model_proto.SerializeToString())
    exported = session.run(None, {session.get_inputs()[0].name: images.numpy()})
    for found in (map(torch.from_numpy, exported), traced, compiled):
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_the_librarys_trainer_trains_with_the_loss(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="transformers' Trainer needs accelerate")
    images, labels = make_batch()
    rows = [{"pixel_values": image, "labels": label} for image, label in zip(images, labels)] * 2  # noqa: B905

    def collate(batch: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "pixel_values": torch.stack([row["pixel_values"] for row in batch]),
            "labels": [row["labels"] for row in batch],
        }

    calls: list[int] = []
    loss = APLoss()
    loss.register_forward_hook(lambda *_: calls.append(1))
    model = use_loss(make_model("rt-detr"), loss)
    settings = tf.TrainingArguments(
        output_dir=str(tmp_path), max_steps=2, per_device_train_batch_size=3, report_to=[],
        use_cpu=True, save_strategy="steps", save_steps=2, disable_tqdm=True,
        remove_unused_columns=False,
    )  # fmt: skip
    trainer = tf.Trainer(model=model, args=settings, data_collator=collate, train_dataset=rows)
    trainer.train()
    assert len(calls) >= 2 * 3
    assert (tmp_path / "checkpoint-2" / "model.safetensors").is_file()


def _class_term_of_one_process(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=120))
    images, labels = make_batch()
    mine = slice(0, 2) if rank == 0 else slice(2, 3)
    model = use_loss(make_model("yolos"), APLoss(process_group=dist.group.WORLD))
    copy.deepcopy(model)  # process groups cannot be copied, models with one can
    parallel = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    output = step(parallel, images[mine], labels[mine])
    output.loss.backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if n.startswith("class_labels")}
    torch.save((output.loss_dict["loss_ce"].detach(), gradients), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def test_processes_rank_together_where_the_loss_has_a_group(tmp_path: Path) -> None:
    processes.start_processes(_class_term_of_one_process, (str(tmp_path),), nprocs=2, start_method="fork")
    images, labels = make_batch()
    model = use_loss(make_model("yolos"), APLoss())
    whole = step(model, images, labels)
    whole.loss.backward()
    for rank in range(2):
        value, gradients = torch.load(tmp_path / f"{rank}.pt")
        assert value.item() == pytest.approx(whole.loss_dict["loss_ce"].item(), abs=1e-6)
        for name, gradient in gradients.items():  # the head's, which box terms do not reach
            expected = dict(model.named_parameters())[name].grad
            torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-7)


# Calibrated scores

STEEP = Calibration(x=[0, 0.3, 0.5, 0.6, 1], y=[0, 0.02, 0.021, 0.9, 0.95])


@pytest.mark.parametrize("family", ["rt-detr", "deformable-detr", "lw-detr"])
def test_the_sigmoid_of_calibrated_logits_is_the_calibrated_score(family: str) -> None:
    model, images = make_model(family), make_batch()[0]
    (raw, boxes), other = _detect(model, images), copy.deepcopy(model)
    set_calibration(model, STEEP)
    logits, same_boxes = _detect(model, images)
    expected = torch.from_numpy(STEEP(raw.double().sigmoid().numpy()))
    torch.testing.assert_close(logits.sigmoid(), expected, rtol=1e-9, atol=1e-12)
    assert torch.equal(raw.flatten().argsort(), logits.flatten().argsort())
    assert torch.equal(boxes, same_boxes)
    assert torch.equal(_detect(other, images)[0], raw)
    assert torch.equal(_detect(copy.deepcopy(model), images)[0], logits)
    assert calibration_of(model).to_dict() == STEEP.to_dict()
    calibrate(model, None)
    assert torch.equal(_detect(model, images)[0], raw)
    assert calibration_of(model) is None


@pytest.mark.parametrize("family", SOFTMAX)
def test_the_best_class_of_a_calibrated_softmax_has_the_calibrated_score(family: str) -> None:
    model, images = make_model(family), make_batch()[0]
    with torch.no_grad():
        head = model.class_labels_classifier
        getattr(head, "layers", [head])[-1].weight.mul_(40)  # scores from near 0 to near 1
    raw = _detect(model, images)[0].double().softmax(dim=-1)[..., :-1]
    set_calibration(model, STEEP)
    found = _detect(model, images)[0].softmax(dim=-1)
    scores, classes = raw.max(dim=-1)
    calibrated, same_classes = found[..., :-1].max(dim=-1)
    assert torch.equal(classes, same_classes)
    assert found.isfinite().all()
    torch.testing.assert_close(calibrated, torch.from_numpy(STEEP(scores.numpy())))
    assert torch.equal(scores.flatten().argsort(), calibrated.flatten().argsort())


def test_training_and_the_loss_do_not_see_the_calibration() -> None:
    model = make_model("rt-detr")
    images, labels = make_batch()
    trained, judged = step(model, images, labels), step(model.eval(), images, labels)
    set_calibration(model, STEEP)
    assert torch.equal(step(model, images, labels).loss, judged.loss)
    in_tuple = step_as_tuple(model, images, labels)
    torch.testing.assert_close(
        in_tuple.sigmoid(), torch.from_numpy(STEEP(judged.logits.double().sigmoid().detach().numpy()))
    )
    again = step(model.train(), images, labels)
    assert torch.equal(again.logits, trained.logits)


def step_as_tuple(model: Any, images: Tensor, labels: Labels) -> Tensor:
    with torch.no_grad():
        return model(pixel_values=images, labels=labels, return_dict=False)[2]


def test_calibration_without_objects_or_with_too_few_targets_is_refused() -> None:
    model = make_model("rt-detr")
    images, labels = make_batch()
    with pytest.raises(DataError, match="3 images, but 2 targets"):
        calibrate(model, images, labels[:2])
    with pytest.raises(DataError, match="without any object"):
        calibrate(model, images, [labels[1]] * 3)
    with pytest.raises(ConfigError, match="no score_thresh"):
        calibrate(model, images, labels, score_thresh=0.5)
    with pytest.raises(ConfigError, match="no score_thresh"):
        use_loss(model, APLoss(), score_thresh=0.5)


def test_another_loss_takes_the_calibration_away() -> None:
    model = make_model("rt-detr")
    set_calibration(model, STEEP)
    use_loss(model, APLoss())
    assert calibration_of(model) is None
    set_calibration(model, STEEP)
    use_loss(model, None)
    assert calibration_of(model) is None


# Learning

LEARNER = {
    "backbone_config": {
        "model_type": "rt_detr_resnet", "embedding_size": 16, "hidden_sizes": [16, 32, 64, 64],
        "depths": [1] * 4, "layer_type": "basic", "out_features": ["stage2", "stage3", "stage4"],
    },
    "encoder_hidden_dim": 32, "encoder_in_channels": [32, 64, 64], "encoder_ffn_dim": 64,
    "encoder_attention_heads": 2, "d_model": 32, "num_queries": 20, "decoder_in_channels": [32] * 3,
    "decoder_ffn_dim": 64, "decoder_layers": 1, "decoder_attention_heads": 2, "num_denoising": 20,
    "freeze_backbone_batch_norms": False,
}  # fmt: skip
Samples = tuple[Tensor, Labels, dict[str, Any]]


def _learner(classes: int, loss: nn.Module) -> Any:
    torch.manual_seed(0)
    return use_loss(tf.RTDetrForObjectDetection(tf.RTDetrConfig(**LEARNER, num_labels=classes)).train(), loss)


def _samples(folder: Path, split: str, counts: tuple[int, int, int], *, one_class: bool = False) -> Samples:
    """Images of 64 pixels, labels as the library takes them, and the ground truth as a COCO dict."""
    size = 64
    dataset = builtin_dataset(split, cache=folder, counts=counts, image_size=size)
    samples = [dataset[index] for index in range(len(dataset))]
    images = torch.stack([image.as_subclass(Tensor).float() / 255 for image, _ in samples])
    labels, truth = [], dataset.to_coco()
    for _, target in samples:
        boxes = box_convert(target["boxes"].as_subclass(Tensor).float(), "xyxy", "cxcywh")
        labels.append({"class_labels": target["labels"] * (not one_class), "boxes": boxes / size})
    for annotation in truth["annotations"] if one_class else ():
        annotation["category_id"] = 1
    return images, labels, truth


def _train(model: Any, images: Tensor, labels: Labels, rate: float) -> Iterator[int]:
    """Trains step by step, for as long as whoever takes the numbers of the steps goes on."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    for number in itertools.count(1):
        optimizer.param_groups[0]["lr"] = rate * min(1.0, number / 20)
        batch = torch.randperm(len(images))[:8]
        optimizer.zero_grad()
        model(pixel_values=images[batch], labels=[labels[index] for index in batch]).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()
        yield number


def _metrics(model: Any, samples: Samples, threshold: float) -> Any:
    """What the library's own post-processing gives, measured."""
    images, _, truth = samples
    training = model.training
    with torch.inference_mode():
        output = model.eval()(pixel_values=images)
    model.train(training)
    found = tf.RTDetrImageProcessor().post_process_object_detection(
        output, threshold=threshold, target_sizes=[tuple(images.shape[-2:])] * len(images)
    )
    detections = []
    for image, one in zip(truth["images"], found, strict=True):
        boxes = box_convert(one["boxes"], "xyxy", "xywh").tolist()
        for label, score, box in zip(one["labels"], one["scores"], boxes, strict=True):
            row = {"image_id": image["id"], "category_id": int(label) + 1}
            detections.append({**row, "score": float(score), "bbox": box})
    return coco_metrics(truth, detections)


def _lower_all_scores(model: Any, by: float) -> None:
    """What a ranking loss cannot tell from before: here is the trap of a fixed threshold."""
    with torch.no_grad():
        for head in model.model.decoder.class_embed:
            head.bias.sub_(by)


@pytest.mark.parametrize("loss", ["ap", "rank-sort"])
def test_eight_images_are_learnt_by_heart(loss: str, tmp_path: Path) -> None:
    samples = _samples(tmp_path, "train", (8, 1, 1))
    model = _learner(5, make_loss(loss))
    for step in _train(model, *samples[:2], rate=8e-3):
        if step % 10 == 0 and _metrics(model, samples, threshold=0.0).AP50 > 0.9:
            break
        assert step < 250


def test_calibrated_thresholds_mean_precision_or_keep_the_ap_on_images_never_seen(tmp_path: Path) -> None:
    counts = (100, 40, 40)
    train, held_out, others = (_samples(tmp_path, one, counts, one_class=True) for one in ("train", "val", "test"))
    model = _learner(1, APLoss())
    for step in _train(model, *train[:2], rate=4e-3):
        if step == 80:
            break
    _lower_all_scores(model, by=6.0)

    def ap(threshold: float) -> float:
        return float(_metrics(model, others, threshold).AP)

    without = ap(0.0)
    assert without > 0.05
    assert ap(0.5) < without - 0.02
    calibrate(model, *held_out[:2])
    assert ap(0.0) == pytest.approx(without, abs=1e-3)
    calibrate(model, *held_out[:2], keep_ap_at=0.5)
    assert ap(0.5) == pytest.approx(without, abs=0.01)
    assert ap(0.95) < without - 0.02
