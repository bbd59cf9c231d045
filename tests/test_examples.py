"""Every example runs as it stands, in seconds, and prints what it promises."""

import re
import runpy
import sys
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_runs import PREAMBLE, start_process, start_two

from aploss import IoUAPLoss, iou_ap_loss

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[[str], str]:
    """Runs an example as ``python examples/NAME`` does, in this process, which has torch already; gives its output."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)

    def run_one(name: str) -> str:
        monkeypatch.setattr(sys, "argv", [name])
        with warnings.catch_warnings():  # of other packages
            warnings.simplefilter("ignore")
            runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return run_one


def test_ap_loss_ranks_rare_positives_better_than_cross_entropy(run: Callable[[str], str]) -> None:
    shown = run("ap_loss_in_your_loop.py")
    precisions = [float(value) for value in re.findall(r"average precision ([\d.]+)", shown)]
    assert len(precisions) == 2
    cross_entropy, ap_loss = precisions
    assert ap_loss > cross_entropy


def test_the_loss_of_a_torchvision_model_is_swapped(run: Callable[[str], str]) -> None:
    shown = run("swap_loss_in_torchvision.py")
    assert shown.count("bbox_regression") == 4
    classification = [float(value) for value in re.findall(r"classification ([\d.]+)", shown)]
    assert len(classification) == 4
    assert all(0 < value <= 1 for value in classification)  # AP-loss is 1 - AP
    assert "detections" in shown


def test_predictions_are_made_from_python(run: Callable[[str], str]) -> None:
    shown = run("predict_with_python.py")
    assert len(re.findall(r": \d+ objects", shown)) == 2
    assert re.search(r"  \w+ 0\.\d\d at \[\d+, \d+, \d+, \d+\]", shown)


@pytest.mark.parametrize("name", ["own_head.py", "yolo_head.py"])
def test_heads_learn_a_batch_by_heart(run: Callable[[str], str], name: str) -> None:
    losses = [float(value) for value in re.findall(r"loss ([\d.]+)", run(name))]
    assert losses[0] > 0.8
    assert losses[-1] < 0.2


@pytest.mark.parametrize("end_to_end", [False, True])
def test_the_recipe_for_ultralytics_models_works_on_a_stub_with_their_attribute_names(end_to_end: bool) -> None:
    page = (EXAMPLES.parent / "docs/yolo-heads.md").read_text()
    names: dict[str, Any] = {}
    exec(
        next(block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "def rank_scores" in block),
        names,
    )

    class Criterion:
        def __init__(self) -> None:
            self.bce = torch.nn.BCEWithLogitsLoss(reduction="none")

        def __call__(self, scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            values = self.bce(scores, targets)
            values *= torch.ones(3)  # class weights of newer versions
            return values.sum() / max(targets.sum(), 1)

    class Both:
        def __init__(self) -> None:
            self.one2many, self.one2one = Criterion(), Criterion()

        def __call__(self, *arguments: torch.Tensor) -> torch.Tensor:
            return (self.one2many(*arguments) + self.one2one(*arguments)) / 2

    model = SimpleNamespace(criterion=None, init_criterion=Both if end_to_end else Criterion)
    scores = torch.randn(2, 50, 3, generator=torch.Generator().manual_seed(0), requires_grad=True)
    targets = (scores.detach() * 0.1 + 0.5).clamp(0, 1) * (torch.arange(300).reshape(2, 50, 3) % 17 == 0)
    found = names["rank_scores"](model, IoUAPLoss()).criterion(scores, targets)
    expected = iou_ap_loss(scores, targets)
    torch.testing.assert_close(found, expected)
    gradients = [torch.autograd.grad(value, scores)[0] for value in (found, expected)]
    torch.testing.assert_close(*gradients)
    model.criterion = SimpleNamespace()
    with pytest.raises(RuntimeError):
        names["rank_scores"](model, IoUAPLoss())


UNDER_TORCHRUN = """
import runpy
os.environ |= {**values["environment"], "XDG_CACHE_HOME": values["cache"]}
runpy.run_path(values["file"], run_name="__main__")
"""


def test_the_usual_torchvision_loop_ranks_over_two_processes(tmp_path: Path) -> None:
    pytest.importorskip("torchvision", reason="torchvision is not installed (extra `detect`)")
    example = {"file": str(EXAMPLES / "torchvision_reference_loop.py"), "cache": str(tmp_path)}
    processes = start_two(start_process, PREAMBLE + UNDER_TORCHRUN, tmp_path, **example)
    for process in processes:
        process.join(timeout=300)
    shown = "".join((tmp_path / f"{rank}.log").read_text() for rank in (0, 1))
    assert [process.exitcode for process in processes] == [0, 0], shown
    values: dict[str, set[str]] = {}
    for batch, value in re.findall(r"batch (\d+): classification ([\d.]+)", shown):
        values.setdefault(batch, set()).add(value)
    assert len(values) == 2
    assert all(len(of_processes) == 1 for of_processes in values.values())  # one ranking for both
    assert shown.count("classification") == 4


def test_rare_positives_are_ranked_by_losses_tuned_alike(run: Callable[[str], str]) -> None:
    shown = run("imbalanced_classification.py")
    areas = [float(value) for value in re.findall(r"area ([\d.]+)", shown)]
    assert len(areas) == 2 * shown.count("batch   64")
    assert all(0.05 < area < 1 for area in areas)  # a random order has an area of 0.01
    if find_spec("libauc") is None:
        pytest.skip("without LibAUC's loss, which is not installed")
    assert shown.count("LibAUC") == 2


def test_each_label_is_ranked_alone_in_multi_label_classification(run: Callable[[str], str]) -> None:
    shown = run("multi_label_classification.py")
    means = [float(value) for value in re.findall(r"mean average precision ([\d.]+)", shown)]
    assert len(means) == 2
    assert all(mean > 0.5 for mean in means)


def test_embeddings_retrieve_better_than_pixels(run: Callable[[str], str]) -> None:
    shown = run("retrieval.py")
    pixels, embedding = (float(value) for value in re.findall(r"mean average precision ([\d.]+)", shown))
    assert embedding > pixels + 0.1


def test_levels_of_an_mmdetection_head_are_ranked_together() -> None:
    for package in ("mmdet", "mmcv.ops"):  # mmcv comes with or without its compiled operators
        pytest.importorskip(package, reason="mmdet or the operators of mmcv are not installed", exc_type=ImportError)
    from mmengine.structures import InstanceData

    example = runpy.run_path(str(EXAMPLES / "mmdetection_head.py"))
    torch.manual_seed(0)
    head = example["RankingRetinaHead"](
        3, 8, stacked_convs=1, feat_channels=8,
        anchor_generator={"type": "AnchorGenerator", "octave_base_scale": 4, "scales_per_octave": 1, "ratios": [1.0],
                          "strides": [8, 16]},
        train_cfg={"assigner": {"type": "MaxIoUAssigner", "pos_iou_thr": 0.5, "neg_iou_thr": 0.4},
                   "sampler": {"type": "PseudoSampler"}, "allowed_border": -1, "pos_weight": -1},
    )  # fmt: skip
    seen: list[torch.Tensor] = []
    example["RankLevels"].ranking_loss.register_forward_pre_hook(lambda _, given: seen.extend(given))
    scores, boxes = head([torch.randn(2, 8, 8, 8), torch.randn(2, 8, 4, 4)])
    corners = torch.tensor([[4.0, 4.0, 36.0, 36.0], [0.0, 0.0, 64.0, 64.0]])
    objects = [InstanceData(bboxes=corners[k : k + 1], labels=torch.tensor([k])) for k in range(2)]
    losses = head.loss_by_feat(scores, boxes, objects, [{"img_shape": (64, 64), "pad_shape": (64, 64)}] * 2)
    joined = torch.cat([level.permute(0, 2, 3, 1).reshape(-1, 3) for level in scores])
    assert torch.equal(seen[0], joined)  # both levels of both images
    assert [int((seen[1] == 1).sum(dim=0)[k]) > 0 for k in range(3)] == [True, True, False]
    assert 0 < losses["loss_cls"] <= 1
    assert len(losses["loss_bbox"]) == 2


def test_a_hugging_face_detector_is_trained_by_the_librarys_trainer(run: Callable[[str], str]) -> None:
    for package in ("transformers", "accelerate"):
        pytest.importorskip(package, reason=f"{package} is not installed (extra `hf`)")
    shown = run("hugging_face_trainer.py")
    assert shown.count("'loss'") == 3
    assert "30 detections" in shown


def test_a_lightning_module_trains_with_ap_loss(run: Callable[[str], str]) -> None:
    pytest.importorskip("lightning", reason="lightning is not installed")
    shown = run("lightning_module.py")
    found = re.search(r"average precision ([\d.]+)", shown)
    assert found
    assert float(found[1]) > 0.7


def test_no_example_is_left_out() -> None:
    # "labelme_plugin.py" is tested in tests/data/test_labelme_plugin.py
    tested = set(re.findall(r'"(\w+\.py)"', Path(__file__).read_text()))
    present = [path.name for path in EXAMPLES.glob("*.py")]
    if not present:
        pytest.skip("examples are not part of this installation")
    assert sorted(tested) == sorted(present)
