"""Losses behave like any torch loss (compile, autocast, threads, forks, one derivative); the error-driven update."""

import multiprocessing
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F

from aploss.losses import ap_loss, auc_loss, error_driven, reference

LOSSES = [ap_loss, auc_loss]


@pytest.fixture
def boxes(make_boxes):
    return make_boxes("random", 50, 5000, dtype=torch.float32)


def gradient_of(loss, scores, targets):
    scores = scores.clone().requires_grad_()
    loss(scores, targets).backward()
    return scores.grad


@pytest.mark.parametrize("options", [{}, {"groups": 1}, {"weights": torch.rand(3), "non_finite": "nan"}])
def test_torch_compile_takes_every_option_in_one_graph(options, boxes):
    scores, targets = (tensor[:4800].view(40, 40, 3) for tensor in boxes)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def compiled(scores, targets):
        return ap_loss(scores * 2, targets, **options) + scores.mean()

    expected = gradient_of(lambda s, t: ap_loss(s * 2, t, **options) + s.mean(), scores, targets)
    assert torch.allclose(gradient_of(compiled, scores, targets), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("loss", LOSSES)
def test_operator_passes_the_checks_of_torch(loss, make_boxes):
    scores, targets = make_boxes(positives=3, negatives=20, dtype=torch.float32)
    scores.requires_grad_()
    operator = {ap_loss: torch.ops.aploss.ap_loss, auc_loss: torch.ops.aploss.auc_loss}[loss]
    arguments = (scores, targets, None, 1.0, None, None, None, "", "raise", None, None)
    # Its gradient is no derivative, so all of opcheck but the comparison with one.
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    results = torch.library.opcheck(operator, arguments, test_utils=checks)
    assert set(results.values()) == {"SUCCESS"}


def test_autocast_leaves_the_ranking_in_float32(boxes):
    scores, targets = boxes
    weight = torch.eye(8)
    leaf = scores[:4000].view(-1, 8).clone().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = leaf @ weight
        loss = ap_loss(logits, targets[:4000].view(-1, 8))
    assert logits.dtype == torch.bfloat16
    assert loss.dtype == torch.float32
    loss.backward()
    expected = gradient_of(ap_loss, logits.detach().float(), targets[:4000].view(-1, 8))
    assert torch.allclose(leaf.grad, expected.bfloat16().float(), atol=0)


def test_backward_twice_on_a_retained_graph_adds_up(boxes):
    scores, targets = boxes
    scores.requires_grad_()
    loss = ap_loss(scores, targets)
    loss.backward(retain_graph=True)
    once = scores.grad.clone()
    loss.backward()
    assert torch.equal(scores.grad, 2 * once)


@pytest.mark.parametrize("weights", [None, torch.tensor(2.0)])  # the compiled call, and the stages
def test_results_are_the_same_bits_in_every_run_and_with_any_number_of_threads(make_boxes, weights):
    scores, targets = make_boxes("random", 300, 300_000, dtype=torch.float32)
    results = []
    for threads in (1, 2, 3, 2):
        torch.set_num_threads(threads)
        results.append(gradient_of(lambda s, t: ap_loss(s, t, weights=weights), scores, targets))
    torch.set_num_threads(1)
    assert all(torch.equal(result, results[0]) for result in results)


def test_several_python_threads_may_rank_at_once(make_boxes):
    scores, targets = make_boxes("random", 100, 200_000, dtype=torch.float32)
    expected = gradient_of(ap_loss, scores, targets)
    torch.set_num_threads(2)
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: gradient_of(ap_loss, scores, targets), range(8)))
    torch.set_num_threads(1)
    assert all(torch.equal(result, expected) for result in results)


def _rank_in_child(queue, scores, targets):
    torch.set_num_threads(2)
    queue.put(float(ap_loss(scores, targets)))


def test_a_forked_process_may_rank_after_its_parent_did(make_boxes):
    scores, targets = make_boxes("random", 100, 200_000, dtype=torch.float32)
    torch.set_num_threads(2)
    expected = float(ap_loss(scores, targets))
    torch.set_num_threads(1)
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_rank_in_child, args=(queue, scores, targets))
    child.start()
    assert queue.get(timeout=60) == expected
    child.join(timeout=60)
    assert child.exitcode == 0


# ---- The general update of Section 3.2, and what it becomes for known activations (Appendix 4) ----


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
