"""Losses in detectors of Hugging Face ``transformers``: tiny ones with random weights.

One family with sigmoid scores and one with a softmax get every loss, the others AP-loss.
"""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchvision.ops import box_convert, generalized_box_iou

from aploss.detectors import make_loss
from aploss.errors import ConfigError, DataError, RunError
from aploss.evaluation import Calibration, fit_calibration
from aploss.integrations import calibrate, calibration_of, set_calibration, use_loss
from aploss.losses import ALRPLoss, APLoss, FocalLoss, OHEMCrossEntropy, RankSortLoss, ap_loss
from aploss.losses.traits import LOSSES, traits_of

tf = pytest.importorskip("transformers", reason="transformers is not installed (extra `hf`)")

pytestmark = pytest.mark.filterwarnings("ignore:.*not their scale")

Labels = list[dict[str, Tensor]]
SOFTMAX = ["detr", "yolos"]
BOTH = ["rt-detr-v2", "detr"]  # one family of each kind of scores
GROUPS = {"lw-detr": 3, "rf-detr": 3}
NUM_TERMS = {"yolos": 1, "lw-detr": 3, "rf-detr": 3, "rt-detr": 5, "rt-detr-v2": 5, "d-fine": 5, "deimv2": 5}
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


def _resnet(*stages: str, kind: str = "ResNetConfig") -> Any:
    sizes = {"embedding_size": 8, "hidden_sizes": [8, 16, 16, 16], "depths": [1] * 4}
    return getattr(tf, kind)(**sizes, layer_type="basic", out_features=list(stages))


def _real_time(model: str, config: str, **more: Any) -> Callable[[], nn.Module]:
    backbone = _resnet("stage2", "stage3", "stage4", kind="RTDetrResNetConfig")
    return lambda: getattr(tf, model)(getattr(tf, config)(backbone_config=backbone, **REAL_TIME, **more))


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


def _is_class(name: str) -> bool:
    return name.startswith(("loss_ce", "loss_vfl", "loss_mal"))


@pytest.mark.parametrize("family", FAMILIES)
def test_ap_loss_takes_the_place_of_each_classification_term(family: str) -> None:
    """In all layers, the encoder, and the denoising queries, which repeat the objects in up to 4 groups."""
    model = make_model(family)
    images, labels = make_batch()
    own = step(model, images, labels)
    calls: list[tuple[Tensor, Tensor, Tensor]] = []
    loss = APLoss()
    loss.register_forward_hook(lambda _, arguments, value: calls.append((*arguments, value)))
    found = step(use_loss(model, loss), images, labels)
    terms = [name for name in own.loss_dict if _is_class(name)]
    assert len(calls) == len(terms) == NUM_TERMS.get(family, 2)
    assert set(found.loss_dict) == set(own.loss_dict)
    values = [value.item() for *_, value in calls]
    for name, value in found.loss_dict.items():
        if name in terms:
            assert value.item() in values
        else:  # box terms stay
            torch.testing.assert_close(value, own.loss_dict[name], rtol=0, atol=0)
    for scores, targets, value in calls:
        groups = int(targets.sum()) // 3
        assert groups == GROUPS.get(family, 1) or (groups, scores.shape[1]) in ((2, 8), (4, 16))
        assert targets.sum(dim=1).tolist() == [[groups, 0, groups], [0, 0, 0], [0, groups, 0]]
        torch.testing.assert_close(value, ap_loss(scores, targets))
    # the model's own weights stay, too: what its sum has beside the classification terms
    rest = own.loss - sum(own.loss_dict[name] for name in terms)
    total = rest + sum(found.loss_dict[name] for name in terms)
    torch.testing.assert_close(found.loss, total, rtol=1e-5, atol=1e-5)


# Other losses get what they need


@pytest.mark.parametrize("family", BOTH)
def test_terms_of_the_last_layer_equal_a_computation_by_hand(family: str) -> None:
    """With the library's matcher; aLRP gets the GIoU losses of the matched boxes and replaces that term."""
    from transformers.loss import loss_for_object_detection, loss_rt_detr

    model = make_model(family)
    images, labels = make_batch()
    with_ap = step(use_loss(model, APLoss()), images, labels)
    with_alrp = step(use_loss(model, ALRPLoss()), images, labels).loss_dict
    logits, boxes = with_ap.logits[:, -12:].detach(), with_ap.pred_boxes[:, -12:].detach()
    config, is_softmax = model.config, family in SOFTMAX
    costs = {name: getattr(config, name) for name in ("class_cost", "bbox_cost", "giou_cost") if is_softmax}
    matcher: Any = (
        loss_for_object_detection.HungarianMatcher(**costs)
        if is_softmax
        else loss_rt_detr.RTDetrHungarianMatcher(config)
    )
    targets, box_losses = torch.zeros(3, 12, 3), torch.zeros(3, 12)
    for image, pairs in enumerate(matcher({"logits": logits, "pred_boxes": boxes}, labels)):
        for query, place in zip(*pairs, strict=True):
            targets[image, query, labels[image]["class_labels"][place]] = 1
            two = box_convert(torch.stack([boxes[image, query], labels[image]["boxes"][place]]), "cxcywh", "xyxy")
            box_losses[image, query] = 1 - generalized_box_iou(two[:1], two[1:]).item()
    probabilities = logits.double().softmax(dim=-1)[..., :-1]
    scores = torch.log(probabilities / (1 - probabilities)).float() if is_softmax else logits
    name, weight = ("loss_ce", 1.0) if is_softmax else ("loss_vfl", config.weight_loss_giou)
    assert with_ap.loss_dict[name].item() == pytest.approx(ap_loss(scores, targets).item(), abs=1e-6)
    parts = ALRPLoss()(scores, targets, box_losses[targets.any(dim=2)])
    assert with_alrp[name].item() == pytest.approx(parts[0].item(), abs=1e-5)
    assert with_alrp["loss_giou"].item() == pytest.approx(weight * parts[1].item(), abs=1e-5)
    torch.testing.assert_close(with_alrp["loss_bbox"], with_ap.loss_dict["loss_bbox"])


def test_focal_loss_swapped_in_is_the_models_own() -> None:
    model = make_model("deformable-detr")
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
@pytest.mark.parametrize("family", BOTH)
def test_every_loss_trains_all_that_the_models_own_loss_trains(family: str, name: str) -> None:
    model = make_model(family)
    images, labels = make_batch()
    if traits_of(name).softmax and family not in SOFTMAX:
        with pytest.raises(ConfigError):
            use_loss(model, make_loss(name))
        return
    step(model, images, labels).loss.backward()
    reached = {n for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    step(use_loss(model, make_loss(name)), images, labels).loss.backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert set(gradients) == reached
    assert all(gradient.isfinite().all() for gradient in gradients.values())
    assert any(gradient.any() for n, gradient in gradients.items() if "class" in n)


def _detect(model: Any, images: Tensor) -> tuple[Tensor, Tensor]:
    with torch.inference_mode():
        output = model.eval()(pixel_values=images)
    model.train()
    return output.logits, output.pred_boxes


@pytest.mark.parametrize("family", BOTH)
def test_only_the_loss_of_this_model_changes_and_none_restores_it(family: str) -> None:
    model, other = make_model(family), make_model(family)
    images, labels = make_batch()
    before, keys, own = _detect(model, images), list(model.state_dict()), model.loss_function
    expected = step(other, images, labels)
    assert use_loss(use_loss(model, RankSortLoss()), APLoss()) is model  # the second replaces the first
    assert all(torch.equal(one, two) for one, two in zip(before, _detect(model, images), strict=True))
    assert list(model.state_dict()) == keys
    assert not torch.equal(step(model, images, labels).loss, expected.loss)
    assert torch.equal(step(other, images, labels).loss, expected.loss)
    assert use_loss(model, None).loss_function is own
    assert torch.equal(step(model, images, labels).loss, expected.loss)


def test_copies_share_the_process_group_of_a_loss(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        model = use_loss(make_model("yolos"), APLoss(process_group=dist.group.WORLD))
        twin = copy.deepcopy(model)
        assert twin.loss_function.loss is not model.loss_function.loss
        assert twin.loss_function.loss.process_group is model.loss_function.loss.process_group
    finally:
        dist.destroy_process_group()


def test_copies_and_pickles_have_the_loss_and_files_do_not(tmp_path: Path) -> None:
    model = use_loss(make_model("detr"), APLoss(delta=0.7))
    twins = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
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


def test_training_stops_where_the_term_cannot_be_replaced() -> None:
    model = make_model("detr")
    images, labels = make_batch()
    model.loss_function = lambda *_, **__: (torch.zeros(()), {}, None)
    use_loss(model, APLoss())
    with pytest.raises(RunError):
        step(model, images, labels)


@pytest.mark.parametrize("family", BOTH)
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
    with pytest.raises(ConfigError, match="'box'"):
        use_loss(model, APLoss(), weights={"box": 1.0})
    with pytest.raises(ConfigError):
        use_loss(model, APLoss(), weights={"giou": -1})
    with pytest.raises(ConfigError):
        use_loss(model, None, weights={"giou": 1})
    use_loss(model, APLoss(), weights={"fgl": 0.3})


def test_a_compiled_model_trains_with_the_loss() -> None:
    images, labels = make_batch()
    model = use_loss(make_model("yolos"), APLoss())
    expected = step(model, images, labels).loss
    compiled = torch.compile(model, backend="eager")
    torch.testing.assert_close(step(compiled, images, labels).loss, expected)
    torch._dynamo.reset()


STEEP = Calibration(x=[0, 0.3, 0.5, 0.6, 1], y=[0, 0.02, 0.021, 0.9, 0.95])


def test_the_sigmoid_of_calibrated_logits_is_the_calibrated_score() -> None:
    model, images = make_model("rt-detr"), make_batch()[0]
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


def test_the_best_class_of_a_calibrated_softmax_has_the_calibrated_score() -> None:
    model, images = make_model("detr"), make_batch()[0]
    with torch.no_grad():
        model.class_labels_classifier.weight.mul_(40)  # scores from near 0 to near 1
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
    with torch.no_grad():
        in_tuple = model(pixel_values=images, labels=labels, return_dict=False)[2]
    expected = torch.from_numpy(STEEP(judged.logits.double().sigmoid().detach().numpy()))
    torch.testing.assert_close(in_tuple.sigmoid(), expected)
    assert torch.equal(step(model.train(), images, labels).logits, trained.logits)


def test_calibration_without_objects_or_with_too_few_targets_is_refused() -> None:
    model = make_model("rt-detr")
    images, labels = make_batch()
    for wrong in (labels[:2], [labels[1]] * 3):
        with pytest.raises(DataError):
            calibrate(model, images, wrong)
    with pytest.raises(ConfigError):
        calibrate(model, images, labels, score_thresh=0.5)
    with pytest.raises(ConfigError):
        use_loss(model, APLoss(), score_thresh=0.5)
    set_calibration(model, STEEP)
    use_loss(model, APLoss())  # a calibration belongs to its loss
    assert calibration_of(model) is None


@pytest.mark.parametrize("family", BOTH)
def test_calibrated_scores_are_the_precision_on_held_out_images(family: str) -> None:
    """The one object of each image is where the model has its best detection: 8 of 8 * 12 detections are correct."""
    model, images = make_model(family), torch.rand(8, 3, 64, 64, generator=torch.Generator().manual_seed(3))

    def scores() -> Tensor:
        """Of all 12 detections of each image: of the best class of each query, or of the best pairs."""
        logits = _detect(model, images)[0].double()
        if family in SOFTMAX:
            return logits.softmax(dim=-1)[..., :-1].amax(dim=-1)
        return logits.sigmoid().flatten(1).topk(12).values

    logits, boxes = _detect(model, images)
    pairs = (logits.softmax(dim=-1)[..., :-1] if family in SOFTMAX else logits).flatten(1).argmax(dim=1)
    labels = [
        {"class_labels": pair[None] % 3, "boxes": of_image[pair[None] // 3]}
        for pair, of_image in zip(pairs, boxes, strict=True)
    ]
    raw = scores()
    calibrate(model, images, labels)
    found = scores()
    assert torch.equal(found.flatten().argsort(), raw.flatten().argsort())
    expected = fit_calibration(raw.flatten().numpy(), (raw == raw.amax(dim=1, keepdim=True)).flatten().numpy())
    torch.testing.assert_close(found, torch.from_numpy(expected(raw.numpy())), rtol=1e-3, atol=1e-4)
