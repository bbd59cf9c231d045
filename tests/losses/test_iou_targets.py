"""Losses with IoU targets against transformers' own, and against their formulas."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch

from aploss.losses import iou_aware_bce_loss, matchability_aware_loss, quality_focal_loss, varifocal_loss

FUNCTIONS = {
    "vfl": varifocal_loss, "qfl": quality_focal_loss, "mal": matchability_aware_loss, "ia-bce": iou_aware_bce_loss,
}  # fmt: skip


def random_outputs(dtype=torch.float32, seed=0):
    """A batch as transformers' losses take it, and the targets of the same anchors as ours take them."""
    box_iou = pytest.importorskip("torchvision.ops").box_iou
    random = torch.Generator().manual_seed(seed)
    batch, queries, classes, objects = 2, 40, 5, 6
    logits = (torch.randn(batch, queries, classes, generator=random)).to(dtype).requires_grad_()
    centres = torch.rand(batch, objects, 2, generator=random)
    boxes = torch.cat([centres, 0.1 + 0.2 * torch.rand(batch, objects, 2, generator=random)], -1)
    predicted = torch.rand(batch, queries, 4, generator=random)
    targets, indices, qualities = [], [], torch.zeros(batch, queries, classes)
    for image in range(batch):
        chosen = torch.randperm(queries, generator=random)[:objects]
        predicted[image, chosen] = boxes[image] + 0.03 * torch.rand(objects, 4, generator=random)
        labels = torch.randint(classes, (objects,), generator=random)
        targets.append({"class_labels": labels, "boxes": boxes[image].to(dtype)})
        indices.append((chosen, torch.arange(objects)))
        corners = [torch.cat([b[:, :2] - b[:, 2:] / 2, b[:, :2] + b[:, 2:] / 2], 1)
                   for b in (predicted[image, chosen], boxes[image])]  # fmt: skip
        qualities[image, chosen, labels] = box_iou(*corners).diagonal()
    outputs = {"logits": logits, "pred_boxes": predicted.to(dtype)}
    return outputs, targets, indices, qualities.to(dtype)


def transformers_loss(name, outputs, targets, indices):
    """The classification term of transformers for a number of boxes that is not the number of positives."""
    module, kind, method, term, options = {
        "vfl": ("loss_rt_detr", "RTDetrLoss", "loss_labels_vfl", "loss_vfl", {"alpha": 0.75, "gamma": 2.0}),
        "mal": ("loss_deimv2", "Deimv2Loss", "loss_labels_mal", "loss_mal", {"mal_alpha": None, "gamma": 1.5}),
        "ia-bce": ("loss_lw_detr", "LwDetrImageLoss", "loss_labels", "loss_ce", {"focal_alpha": 0.25}),
    }[name]
    loss = getattr(pytest.importorskip(f"transformers.loss.{module}"), kind)
    permutation = partial(loss._get_source_permutation_idx, None)
    own = SimpleNamespace(num_classes=5, _get_source_permutation_idx=permutation, **options)
    return getattr(loss, method)(own, outputs, targets, indices, 7)[term]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["vfl", "mal", "ia-bce"])
def test_the_loss_is_the_one_of_transformers(name, dtype):
    outputs, targets, indices, qualities = random_outputs(dtype)
    right = transformers_loss(name, outputs, targets, indices)
    value = FUNCTIONS[name](outputs["logits"], qualities, num_positives=7)
    assert value.item() == pytest.approx(right.item(), rel=1e-6)
    gradient, right_gradient = (torch.autograd.grad(one, outputs["logits"])[0] for one in (value, right))
    assert torch.allclose(gradient, right_gradient, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("beta", [0.0, 1.0, 2.0])
def test_quality_focal_loss_is_its_formula(beta):
    scores, qualities = random_outputs()[0]["logits"], random_outputs()[3]
    p, q = scores.double().sigmoid(), qualities.double()
    right = ((q - p).abs() ** beta * -((1 - q) * (1 - p).log() + q * p.log())).sum() / (q > 0).sum()
    value = quality_focal_loss(scores, qualities, beta=beta)
    assert value.item() == pytest.approx(right.item(), rel=1e-6)
    gradient, right_gradient = (torch.autograd.grad(one, scores)[0] for one in (value, right))
    assert torch.allclose(gradient, right_gradient, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_ignored_anchors_do_nothing_and_extreme_logits_stay_finite(name):
    scores = torch.tensor([1.0, -2.0, 300.0, -300.0, 300.0, -300.0, torch.nan, torch.inf], requires_grad=True)
    qualities = torch.tensor([0.5, 0.0, 0.9, 0.9, 0.0, 0.0, -1.0, -1.0])
    (gradient,) = torch.autograd.grad(FUNCTIONS[name](scores, qualities), scores)
    assert gradient.isfinite().all()
    assert (gradient[6:] == 0).all()
    (alone,) = torch.autograd.grad(FUNCTIONS[name](scores[:6], qualities[:6]), scores)
    assert torch.equal(gradient[:6], alone[:6])
