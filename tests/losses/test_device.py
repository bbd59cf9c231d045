"""What the losses cost on a GPU, counted on a simulated one: host reads, uploads, launches, bytes.

The Triton kernels are counted in ``ranking/kernels_in_interpreter.py``.
"""

from functools import partial

import pytest
import torch
from simulated_device import gradients, measure
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from aploss.losses import alrp_loss, ap_loss, auc_loss, focal_loss, rank_sort_loss, use_backend

POSITIVES = 50
SIZES = (20_000, 60_000)
LOSSES = {
    "ap": ap_loss,
    "auc": auc_loss,
    "rank-sort": lambda *tensors, **options: torch.add(*rank_sort_loss(*tensors, **options)),
    "alrp": lambda *tensors, **options: torch.add(*alrp_loss(*tensors, **options)),
    "focal": focal_loss,
}
RANKING = [name for name in LOSSES if name != "focal"]


@pytest.fixture(autouse=True)
def torch_backend():
    with use_backend("torch"):
        yield
        # A call that looks at what an earlier one has put off.
        measure(ap_loss, *arguments("ap", 200))


def arguments(name: str, size: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    targets = torch.zeros(size)
    targets[torch.randperm(size, generator=generator)[:POSITIVES]] = 1
    targets[torch.randperm(size, generator=generator)[:100]] = -1
    boxes = [torch.rand(int((targets == 1).sum()), generator=generator)] if name == "alrp" else []
    return [torch.randn(size, generator=generator), targets, *boxes]


def without_reading(name: str) -> dict[str, object]:
    """The option by which a loss reads nothing at all."""
    return {"check_later": True} if name == "focal" else {"max_positives": 64}


@pytest.mark.parametrize("name", LOSSES)
def test_a_forward_pass_reads_once_and_a_backward_pass_never(name):
    logs = [measure(LOSSES[name], *arguments(name, size)) for size in SIZES]
    for forward, backward in logs:
        assert len(forward.host_reads) <= 1, forward.host_reads
        assert forward.uploads == backward.host_reads == backward.uploads == []
    assert logs[0][0].launches == logs[1][0].launches
    assert logs[0][1].launches == logs[1][1].launches


@pytest.mark.parametrize("name", LOSSES)
def test_with_max_positives_nothing_is_read(name):
    loss = partial(LOSSES[name], **without_reading(name))
    for counts in measure(loss, *arguments(name, SIZES[0])):
        assert counts.host_reads == counts.uploads == []


@pytest.mark.parametrize("name", RANKING)
def test_launches_and_bytes_stay_within_their_budget(name):
    small, large = (measure(LOSSES[name], *arguments(name, size)) for size in SIZES)
    assert small[0].launches <= 130
    assert small[1].launches <= 35
    moved = sum(counts.bytes for counts in large) - sum(counts.bytes for counts in small)
    assert moved / (SIZES[1] - SIZES[0]) <= 165


@pytest.mark.skipif(
    torch.__version__.startswith("2.8.") and not torch.cuda.is_available(),
    reason="torch 2.8 ends the process at any autograd.Function of fake GPU tensors where there is no GPU",
)
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("delta", [0.0, 1.0])
def test_nothing_is_read_from_tensors_without_data(name, delta):
    """Fake tensors on a GPU raise where the host needs a number."""
    options = without_reading(name)
    if name != "focal":
        options["delta"] = delta
    shapes = [tensor.shape for tensor in arguments(name, 1000)]
    with FakeTensorMode() as mode:
        scores, *others = (torch.empty(shape, device="cuda") for shape in shapes)
        loss = LOSSES[name](scores.requires_grad_(), *others, **options)
        (gradient,) = gradients(loss, scores)
        assert mode is gradient.fake_mode
    assert gradient.device.type == "cuda"
    assert gradient.shape == scores.shape


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("name", RANKING)
def test_a_real_gpu_never_waits(name, backend):
    scores, *others = (tensor.to("cuda") for tensor in arguments(name, SIZES[0]))
    scores.requires_grad_()
    before = torch.cuda.get_sync_debug_mode()
    with use_backend(backend):
        LOSSES[name](scores, *others, max_positives=64).backward()  # compiles
        expected, scores.grad = scores.grad, None
        torch.cuda.set_sync_debug_mode("error")
        try:
            loss = LOSSES[name](scores, *others, max_positives=64)
            loss.backward()
        finally:
            torch.cuda.set_sync_debug_mode(before)
    assert torch.equal(scores.grad, expected)
    with use_backend(None):
        on_cpu = LOSSES[name](scores.detach().cpu(), *(other.cpu() for other in others))
    assert loss.item() == pytest.approx(on_cpu.item(), abs=1e-6)
