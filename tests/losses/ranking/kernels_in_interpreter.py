"""The Triton kernels against the literal losses, in Triton's interpreter on the CPU.

``test_triton.py`` runs this file in a process of its own: the interpreter is chosen when the
kernels are imported. It carries out one program after the other, so it finds no races.
"""

import os
import warnings

import processes
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from ranking_cases import HALF, assert_equals_reference, cases

from aploss.losses import ap_loss, reference, use_backend
from aploss.losses.ranking import triton
from aploss.losses.ranking.engine import rank_problem
from aploss.losses.ranking.rules import AP, AUC
from aploss.losses.ranking.torch_backend import Problem, TorchBackend
from aploss.losses.ranking.triton import TritonBackend, supports, verified_backend

processes.PRELOADED = ["aploss.losses.ranking.triton"]  # all that two processes need here


@pytest.fixture(autouse=True)
def triton_backend():
    assert os.environ.get("TRITON_INTERPRET") == "1", "run by test_triton.py"
    with use_backend("triton"):
        yield


@given(case=cases(dtypes=(torch.float32, *HALF), groups=("none",), max_anchors=30))
@settings(deadline=None, max_examples=60)
def test_values_and_gradients_equal_the_reference(case):
    with use_backend("triton"):
        assert_equals_reference(case)


@pytest.mark.parametrize("delta", [0.0, 0.3])
def test_every_block_size_gives_the_same_bits(make_boxes, delta):
    scores, targets = make_boxes("random", 20, 2000, dtype=torch.float32)
    problem = Problem(scores, targets, AP, delta)
    (first, *others) = (rank_problem(TritonBackend(block), problem) for block in (256, 1024, 4096))
    for values, gradients in others:
        assert torch.equal(values[0], first[0][0])
        assert torch.equal(gradients[0], first[1][0])


def test_many_scores_equal_the_reference(make_boxes):
    scores, targets = make_boxes("random", 20, 20_000, dtype=torch.float32)
    scores.requires_grad_()
    loss = ap_loss(scores, targets)
    loss.backward()
    expected, gradient = reference.ap_loss(scores, targets)
    assert abs(loss.double() - expected) <= 3e-8
    assert (scores.grad - gradient).abs().max() <= 1e-7 * gradient.abs().max()


def test_invalid_input_is_refused_by_place(make_boxes):
    scores, targets = make_boxes(dtype=torch.float32)
    targets[7] = 3
    with pytest.raises(ValueError, match=r"got 3 at flat index 7\b"):
        ap_loss(scores, targets)
    targets[7], scores[7] = 0, torch.inf
    with pytest.raises(ValueError, match=r"got inf at flat index 7$"):
        ap_loss(scores, targets)


def test_what_the_kernels_do_not_support_is_refused(make_boxes):
    scores, targets = make_boxes(dtype=torch.float32)
    assert supports(Problem(scores, targets, AP, 1.0))
    assert not supports(Problem(scores.double(), targets, AP, 1.0))
    assert not supports(Problem(scores, targets.double(), AP, 1.0))
    assert not supports(Problem(scores, targets, AP, 1.0, groups=targets))


class Raising(TritonBackend):
    calls = 0

    def find(self, problem):
        Raising.calls += 1
        raise RuntimeError("no kernel image is available for execution on the device")


class Wrong(TritonBackend):
    calls, factor = 0, 1.01

    def evaluate(self, problem, found, lines):
        type(self).calls += 1
        return super().evaluate(problem, found, lines) * self.factor


class NotANumber(Wrong):
    factor = float("nan")


@pytest.mark.parametrize(
    ("candidate", "reason"), [(Raising, "no kernel image"), (Wrong, "differ by"), (NotANumber, "by nan")]
)
def test_kernels_that_fail_are_replaced_with_one_warning(make_boxes, monkeypatch, candidate, reason):
    monkeypatch.setattr(triton, "_verdicts", {})
    candidate.calls = 0
    scores, targets = make_boxes(dtype=torch.float32)
    problem = Problem(scores, targets, AP, 1.0)
    with pytest.warns(UserWarning, match=f"failed their check on cpu.*{reason}.*report") as caught:
        backend = verified_backend(problem, candidate())
    assert len(caught) == 1
    assert type(backend) is TorchBackend
    expected, gradient = reference.ap_loss(scores, targets)
    values, gradients = rank_problem(backend, problem)
    assert abs(values[0].double() - expected) <= 3e-8
    assert (gradients[0] - gradient).abs().max() <= 1e-7 * gradient.abs().max()
    with warnings.catch_warnings():  # decided once for the device, whatever the rule
        warnings.simplefilter("error")
        for rule in (AP, AUC):
            assert type(verified_backend(Problem(scores, targets, rule, 1.0), candidate())) is TorchBackend
    assert candidate.calls == 1


def test_kernels_that_agree_are_checked_once(make_boxes, monkeypatch):
    monkeypatch.setattr(triton, "_verdicts", {})
    problem = Problem(*make_boxes(dtype=torch.float32), AP, 1.0)
    assert type(verified_backend(problem)) is TritonBackend
    assert type(verified_backend(problem, Raising())) is Raising  # not asked again


def rank_part(rank, parts):
    scores, targets = parts[rank]
    loss = ap_loss(scores.requires_grad_(), targets, process_group=dist.group.WORLD)
    loss.backward()
    return loss.item(), scores.grad


def test_processes_rank_their_parts_as_one_batch(make_boxes):
    scores, targets = make_boxes("random", 20, 200, dtype=torch.float32)
    results = processes.run_group(2, rank_part, [(scores[:100], targets[:100]), (scores[100:], targets[100:])])
    expected, gradient = reference.ap_loss(scores, targets)
    for loss, _ in results:
        assert loss == pytest.approx(expected.item(), abs=6e-8)
    found = torch.cat([part for _, part in results]).double()
    assert (found - 2 * gradient).abs().max() <= 4e-7 * gradient.abs().max()
