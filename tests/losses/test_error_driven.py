"""The general update of Section 3.2, and what it becomes for known activations (Appendix 4)."""

import pytest
import torch
import torch.nn.functional as F

from aploss.losses import error_driven, reference


def test_softmax_gives_the_gradient_of_cross_entropy():
    torch.manual_seed(0)
    logits = torch.randn(50, 7, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, 7, (50,))
    error_driven(logits, logits.softmax(1), F.one_hot(labels, 7).double()).backward()
    (expected,) = torch.autograd.grad(F.cross_entropy(logits, labels, reduction="sum"), logits)
    assert torch.allclose(logits.grad, expected, rtol=0, atol=1e-12)


def test_loss_augmented_step_gives_the_gradient_of_the_hinge_loss():
    torch.manual_seed(0)
    x = (2 * torch.randn(200, dtype=torch.float64)).requires_grad_()
    labels = torch.randint(0, 2, (200,))
    pair = torch.stack([-x, x], dim=1)  # (x_1, x_2) of Appendix 4
    outputs = (pair >= 1).double()  # H(x_i - 1)
    desired = torch.where(F.one_hot(labels, 2) == 1, 1.0, outputs)  # the other one does not matter
    loss = error_driven(pair, outputs, desired)
    loss.backward(retain_graph=True)
    hinge = (1 - pair[torch.arange(200), labels]).clamp(min=0).sum()
    (expected,) = torch.autograd.grad(hinge, x)
    assert torch.allclose(x.grad, expected, rtol=0, atol=1e-12)
    assert loss.item() == (expected != 0).sum()  # every violated margin is an error of 1


def test_primary_terms_of_eq_3_give_the_ap_loss():
    torch.manual_seed(0)
    scores = torch.randn(30, dtype=torch.float64, requires_grad=True)
    targets = (torch.arange(30) < 6).long()
    x = scores[None, :] - scores[:, None]  # x_ij
    steps = reference.piecewise_step(x.detach(), 1.0)
    steps.fill_diagonal_(0)
    terms = steps / (1 + steps.sum(1, keepdim=True))  # L_ij
    pairs = (targets[:, None] == 1) & (targets[None, :] == 0)  # y_ij
    loss = error_driven(x, terms * pairs, torch.zeros_like(terms)) / 6
    loss.backward()
    expected, gradient = reference.ap_loss(scores, targets, interpolated=False)
    assert loss.item() == pytest.approx(expected.item(), abs=1e-12)
    assert torch.allclose(scores.grad, gradient, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_gradient_is_the_error_times_what_comes_from_above_in_the_inputs_dtype(dtype):
    inputs = torch.zeros(2, 2, dtype=dtype, requires_grad=True)
    outputs, desired = torch.tensor([[1.0, 0.5], [0.0, 0.25]]), torch.tensor([[0.0, 0.5], [1, 1]])
    loss = error_driven(inputs, outputs, desired)
    (3 * loss).backward()
    assert loss.item() == 1 + 0 + 1 + 0.75
    assert inputs.grad.dtype == dtype
    assert inputs.grad.tolist() == [[3, 0], [-3, -2.25]]


def test_outputs_and_desired_get_no_gradient():
    inputs = torch.zeros(3, requires_grad=True)
    outputs = torch.ones(3, requires_grad=True)
    desired = torch.zeros(3, requires_grad=True)
    error_driven(inputs, outputs, desired).backward()
    assert outputs.grad is None
    assert desired.grad is None


def test_second_derivative_is_refused():
    inputs = torch.zeros(3, requires_grad=True)
    loss = error_driven(inputs, torch.ones(3), torch.zeros(3))
    (gradient,) = torch.autograd.grad(loss, inputs, create_graph=True)
    with pytest.raises(RuntimeError, match="second derivative"):
        gradient.sum().backward()


def test_wrong_shape_or_integer_inputs_are_refused():
    with pytest.raises(ValueError, match=r"desired must have the shape of inputs, \(3,\)"):
        error_driven(torch.zeros(3), torch.zeros(3), torch.zeros(2))
    with pytest.raises(ValueError, match="outputs must have"):
        error_driven(torch.zeros(3), torch.zeros(1), torch.zeros(3))
    with pytest.raises(ValueError, match="floating point"):
        error_driven(torch.zeros(3, dtype=torch.long), torch.zeros(3), torch.zeros(3))


def test_it_compiles_as_one_graph():
    @torch.compile(fullgraph=True, backend="aot_eager")
    def loss(logits, one_hot):
        return error_driven(logits * 2, (logits * 2).softmax(0), one_hot)

    logits = torch.randn(5, requires_grad=True)
    one_hot = torch.eye(5)[2]
    loss(logits, one_hot).backward()
    (expected,) = torch.autograd.grad(F.cross_entropy(2 * logits, torch.tensor(2)), logits)
    assert torch.allclose(logits.grad, expected, atol=1e-6)
