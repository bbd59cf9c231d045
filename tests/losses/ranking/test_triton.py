"""The Triton backend: its kernels in the interpreter, built ahead of time, and on a GPU."""

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from aploss.losses import ap_loss, reference, use_backend
from aploss.losses.ranking.rules import AP
from aploss.losses.ranking.torch_backend import Problem
from aploss.losses.ranking.triton import supports

pytest.importorskip("triton", reason="Triton is not installed")


def test_the_kernels_pass_their_tests_in_the_interpreter():
    tests = Path(__file__).with_name("kernels_in_interpreter.py")
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(tests)],
        cwd=Path(__file__).parents[3],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout[-5000:] + ended.stderr[-2000:]


@pytest.fixture(scope="module")
def gpu_check():
    return runpy.run_path(str(Path(__file__).parents[3] / "tools/gpu_check.py"))


def test_every_kernel_is_known_to_the_check(gpu_check):
    from aploss.losses.ranking.triton import kernels

    assert {launch.kernel for launch in gpu_check["launches"]()} == set(kernels.__all__)


def links_for_amd():
    """Whether kernels for AMD can be linked; Triton 3.9 does it by itself, 3.4 asks for a linker."""
    from triton.backends.amd.compiler import HIPBackend

    try:
        getattr(HIPBackend, "path_to_rocm_lld", bool)()
    except Exception:
        return False
    return True


@pytest.mark.parametrize("architecture", ["sm_80", "gfx942"])
@pytest.mark.parametrize("kernel", ["check_and_pack", "tally_negatives", "evaluate_gradient"])
def test_kernels_over_all_scores_are_built_without_a_gpu(gpu_check, kernel, architecture):
    if architecture.startswith("gfx") and not links_for_amd():
        pytest.skip("this Triton needs the linker of ROCm, which is not installed")
    launch = next(one for one in gpu_check["launches"]() if one.kernel == kernel)
    assert gpu_check["compile_launch"](launch, architecture) == ""


def test_without_a_gpu_or_the_interpreter_the_kernels_support_nothing():
    assert not supports(Problem(torch.zeros(2), torch.zeros(2), AP, 1.0))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("delta", [0.0, 0.25, 1.0])
@pytest.mark.parametrize("distribution", ["random", "separated", "tied", "all equal", "huge spread", "offset"])
def test_on_a_gpu_loss_and_gradient_equal_algorithm_1(make_boxes, distribution, delta):
    scores, targets = make_boxes(distribution, 40, 100_000, dtype=torch.float32)
    expected, expected_gradient = reference.ap_loss(scores, targets, delta)
    results = []
    with use_backend("triton"):
        for _ in range(3):
            on_gpu = scores.to("cuda").requires_grad_()
            loss = ap_loss(on_gpu, targets.to("cuda"), delta=delta)
            loss.backward()
            results.append((loss.item(), on_gpu.grad.cpu()))
    for loss, gradient in results:
        assert loss == pytest.approx(expected.item(), rel=0, abs=3e-8)
        assert (gradient - expected_gradient).abs().max() <= 1e-7 * expected_gradient.abs().max()
        assert torch.equal(gradient, results[0][1])
