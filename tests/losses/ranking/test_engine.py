"""Around a ranking: groups, invalid input, backends, forks, and numba's cache."""

import runpy

import numba
import pytest
import torch
from tiny_runs import start_process

from aploss.losses import InvalidTargetError, ap_loss, rank_sort_loss, use_backend
from aploss.losses.ranking.numba_backend import Kernel


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (torch.zeros(3, dtype=torch.int64), "leading dimensions of scores"),
        (torch.zeros(4), "integers, got torch.float32"),
        (2, "dimension of scores, which have 1, got 2"),
        ("image", "integer tensor or a dimension, got str"),
    ],
)
def test_groups_that_do_not_fit_are_refused(groups, message):
    with pytest.raises(ValueError, match=message):
        ap_loss(torch.zeros(4), torch.tensor([1, 0, 0, 0]), groups=groups)


def test_backends_are_chosen_for_a_block_or_for_good(make_boxes):
    with pytest.raises(ValueError, match="backend must be one of cpu, torch, triton or None"):
        use_backend("cuda")
    scores, targets = make_boxes()
    with use_backend("torch"):
        inside = ap_loss(scores, targets)
    assert inside.item() == pytest.approx(ap_loss(scores, targets).item(), abs=1e-12)


def test_the_first_call_may_be_in_a_forked_process(tmp_path):
    code = (
        "import multiprocessing, torch, sys\n"
        "from aploss.losses import ap_loss\n"
        "torch.set_num_threads(2); torch.randn(1000, 1000).exp()\n"
        "scores, targets = torch.randn(300000), (torch.rand(300000) < 1e-3).long()\n"
        "def child(): ap_loss(scores, targets)\n"  # torch's own threads do not survive a fork
        "process = multiprocessing.get_context('fork').Process(target=child)\n"
        "process.start(); process.join(100); sys.exit(process.exitcode)\n"
    )
    process = start_process(code, log=tmp_path / "log")
    process.join()
    assert process.exitcode == 0


def test_probabilities_in_the_place_of_logits_are_remarked_on_once(tmp_path):
    code = (
        "import multiprocessing, warnings, torch\nfrom aploss.losses import ap_loss\n"
        "targets = (torch.arange(2000) < 9).long()\n"
        "def look(first):\n"
        "    with warnings.catch_warnings(record=True) as caught:\n"
        "        warnings.simplefilter('always')\n"
        "        ap_loss(torch.rand(10), targets[:10])\n"  # too few to tell
        "        assert caught == []\n"
        "        ap_loss(first, targets, delta=0)\n"  # which has no scale
        "        assert caught == []\n"
        "        for _ in range(2): ap_loss(first, targets)\n"
        "        assert all(w.filename == '<string>' for w in caught), caught\n"
        "    print(sum('remove the sigmoid' in str(w.message) for w in caught), file=open(log, 'a'))\n"
        "for first in (torch.randn(2000).sigmoid(), torch.randn(2000), torch.zeros(2000)):\n"
        "    process = multiprocessing.get_context('fork').Process(target=look, args=(first,))\n"
        "    process.start(); process.join()\n"
    )
    start_process(code, log=tmp_path / "log").join()  # what has been looked at is remembered in a process
    assert (tmp_path / "log").read_text().split() == ["1", "0", "0"]


def test_a_truncated_cache_is_done_without_and_told_of_once(tmp_path, monkeypatch, caplog):
    (tmp_path / "kernels.py").write_text("def add(a, b):\n    return a + b\n\n\ndef double(a):\n    return 2 * a\n")
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "cache"))
    kernels = runpy.run_path(str(tmp_path / "kernels.py"))

    def call():
        return [Kernel(kernels["add"])(1, 2), Kernel(kernels["double"])(4)]

    assert call() == [3, 8]
    files = list((tmp_path / "cache").rglob("*.nb?"))
    assert len(files) == 4  # an index and a function for each
    for path in files:
        path.write_bytes(path.read_bytes()[:20])
    assert call() == [3, 8]
    assert caplog.text.count("cache of compiled functions cannot be used") == 1


def test_a_cache_that_has_no_folder_is_done_without(caplog):
    names = {}
    exec("def add(a, b): return a + b", names)  # numba looks for a folder beside the file of the code
    assert Kernel(names["add"])(1, 2) == 3
    assert caplog.text.count("cache of compiled functions cannot be used") == 1


@pytest.mark.parametrize(
    ("target", "hint"), [(255, "-1"), (-100, "-1"), (3, "one_hot"), (0.5, "soft targets"), (float("nan"), "got nan")]
)
def test_an_invalid_target_is_named_with_its_likely_cause(backend, target, hint):
    targets = torch.tensor([1, 0, target])
    with pytest.raises(InvalidTargetError, match=hint) as caught:
        ap_loss(torch.randn(3), targets)
    assert caught.value.index == 2
    assert caught.value.value == pytest.approx(target, nan_ok=True)


def test_arguments_in_the_wrong_order_are_recognised():
    scores, targets = torch.randn(4), torch.tensor([1, 0, 0, 1])
    for wrong in (targets, targets.float()):
        with pytest.raises(ValueError, match="swapped"):
            ap_loss(wrong, scores)
    with pytest.raises(ValueError, match="one_hot"):
        ap_loss(torch.randn(4, 3), targets)


def test_lazy_negations_are_read_as_their_values_and_tensors_without_data_refused(backend):
    scores, targets = torch.tensor([2.0, 1.0, 0.0]), torch.tensor([0, 1, 0])
    assert ap_loss(torch._neg_view(-scores), targets) == ap_loss(scores, targets)
    assert ap_loss(scores, torch._neg_view(-targets.float())) == ap_loss(scores, targets)
    with pytest.raises(ValueError, match="must hold data"):
        ap_loss(torch._efficientzerotensor(3), targets)


@pytest.mark.parametrize("delta", [1e-30, 9e-7, -1.0, float("nan"), float("inf")])
def test_a_delta_that_float32_cannot_resolve_is_refused(backend, delta):
    with pytest.raises(ValueError, match="delta must be 0"):
        ap_loss(torch.zeros(2), torch.tensor([1, 0]), delta=delta)


@pytest.mark.parametrize("loss", [ap_loss, rank_sort_loss])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("options", [{}, {"delta": 0}, {"groups": 0}, {"weights": torch.rand(3)}])
def test_a_score_that_is_not_finite_gives_nan_on_request(backend, loss, bad, options):
    scores, targets = torch.randn(4, 5, 3), torch.zeros(4, 5, 3)
    targets[:, 0] = 1
    scores[2, 3, 1] = bad
    scores.requires_grad_()
    value = loss(scores, targets, non_finite="nan", **options)
    value = value if loss is ap_loss else sum(value)
    value.backward()
    assert value.isnan()
    assert scores.grad.isnan().all()
    with pytest.raises(ValueError, match=r"got -?(nan|inf) at flat index 40"):
        loss(scores, targets, **options)


def test_a_gradient_scaler_skips_a_step_whose_loss_is_nan():
    weight = torch.nn.Parameter(torch.ones(()))
    optimizer, scaler = torch.optim.SGD([weight], lr=1.0), torch.amp.GradScaler("cpu")
    scores = weight * torch.tensor([1.0, float("nan"), 0.0])
    scaler.scale(ap_loss(scores, torch.tensor([1, 0, 0]), non_finite="nan")).backward()
    scaler.step(optimizer)
    assert weight.item() == 1.0


@pytest.mark.parametrize("weights", [torch.ones(4), torch.tensor([-1.0, 1.0]), torch.tensor([float("nan"), 1.0]), [1]])
def test_weights_that_do_not_fit_are_refused(backend, weights):
    with pytest.raises(ValueError, match="weights"):
        ap_loss(torch.zeros(3, 2), torch.eye(3)[:, :2], weights=weights)
