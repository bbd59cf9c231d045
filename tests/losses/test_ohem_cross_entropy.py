"""SSD's loss against the literal version and against the mining of torchvision's SSD."""

import other_losses
import pytest
import torch
import torch.nn.functional as F

from aploss.losses.ohem_cross_entropy import OHEMCrossEntropy, ohem_cross_entropy

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}


def random_boxes(dtype=torch.float64, shape=(3, 50), classes=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(*shape, classes + 1, generator=generator, dtype=torch.float64)
    chance = torch.rand(shape, generator=generator)
    targets = torch.randint(1, classes + 1, shape, generator=generator)
    targets[chance > 0.1], targets[chance > 0.9] = 0, -1
    return logits.to(dtype), targets


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(60,), (3, 50), (2, 5, 6, 3)])
@pytest.mark.parametrize("ratio", [0.0, 1.5, 3.0, 1000.0])
def test_value_and_gradient_equal_the_literal_version(dtype, shape, ratio):
    logits, targets = random_boxes(dtype, shape)
    logits.requires_grad_()
    loss = ohem_cross_entropy(logits, targets, negative_ratio=ratio)
    loss.backward()
    expected, gradient = other_losses.ohem_cross_entropy(logits, targets, ratio)
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12 if dtype == torch.float64 else 1e-6)
    assert logits.grad.dtype == dtype
    assert (logits.grad - gradient).abs().max() <= TOLERANCE[dtype] * gradient.abs().max()


def test_it_mines_as_torchvisions_ssd_does():
    logits, targets = random_boxes()
    targets = targets.clamp(min=0)
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    losses = losses.view_as(targets)
    positive = targets > 0
    candidates = losses.masked_fill(positive, -torch.inf)
    wanted = 3 * positive.sum(1, keepdim=True)
    kept = candidates.sort(1, descending=True).indices.sort(1).indices < wanted
    expected = (losses[positive].sum() + losses[kept].sum()) / positive.sum()
    assert ohem_cross_entropy(logits, targets).item() == pytest.approx(expected.item(), rel=1e-12)


def test_an_image_without_positives_adds_nothing():
    logits, targets = random_boxes(shape=(2, 30))
    targets[1] = 0
    logits.requires_grad_()
    loss = ohem_cross_entropy(logits, targets)
    loss.backward()
    assert loss.item() == pytest.approx(ohem_cross_entropy(logits[0], targets[0]).item())
    assert (logits.grad[1] == 0).all()


def test_equally_hard_negatives_are_not_all_taken():
    logits = torch.zeros(10, 2, requires_grad=True)
    ohem_cross_entropy(logits, torch.tensor([1] + [0] * 9)).backward()
    assert int((logits.grad.abs().sum(1) > 0).sum()) == 4


def test_mistakes_are_refused_with_the_value_and_its_place():
    logits = torch.zeros(2, 3, 4)
    targets = torch.zeros(2, 3, dtype=torch.long)
    with pytest.raises(ValueError, match=r"\(2, 3, 4\) and \(3, 2\)"):
        ohem_cross_entropy(logits, targets.T)
    with pytest.raises(ValueError, match="2 axes"):
        ohem_cross_entropy(torch.zeros(4), torch.tensor(1))
    with pytest.raises(ValueError, match="integer class numbers"):
        ohem_cross_entropy(logits, targets.float())
    with pytest.raises(ValueError, match=r"1\.\.3 \(class\).* got 4 at flat index 5"):
        ohem_cross_entropy(logits, torch.tensor([[0, 1, 2], [3, 0, 4]]))
    with pytest.raises(ValueError, match="got -2 at flat index 0"):
        ohem_cross_entropy(logits, torch.tensor([[-2, 1, 2], [3, 0, 0]]))
    logits[1, 1, 2] = torch.nan
    with pytest.raises(ValueError, match=r"box 4 \(flat\)"):
        ohem_cross_entropy(logits, targets)
    with pytest.raises(ValueError, match="negative_ratio must be"):
        OHEMCrossEntropy(negative_ratio=-1)
