"""A step: parameter groups, frozen layers, and NaN or Inf in scores, losses or gradients."""

import copy
import itertools
import math
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from accelerate import Accelerator
from simulated_device import SimulatedGPU, move
from torch import Tensor, nn

from aploss.data.formats import load_dataset
from aploss.data.loader import Batch, make_training_loader
from aploss.detectors import build_detector
from aploss.detectors.criterion import Criterion
from aploss.detectors.detector import Detector
from aploss.errors import ConfigError, RunError
from aploss.losses import OtherProcessError
from aploss.reports.run_files import read_json_lines
from aploss.training import run
from aploss.training.config import OptimizerConfig, TrainConfig
from aploss.training.distributed import start_accelerator
from aploss.training.run import make_detector, train
from aploss.training.schedule import Schedule
from aploss.training.step import DivergedError, Stepper, freeze, make_optimizer

MakeConfig = Callable[..., TrainConfig]


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.BatchNorm2d(4))
        self.scale = nn.Parameter(torch.ones(()))
        self.head = nn.Conv2d(4, 2, 1)


def test_norms_biases_and_scalars_are_not_decayed() -> None:
    model = Small()
    optimizer = make_optimizer(model, OptimizerConfig(weight_decay=0.1))
    assert isinstance(optimizer, torch.optim.AdamW)
    decay = {id(p): g["weight_decay"] for g in optimizer.param_groups for p in g["params"]}
    by_name = {name: decay[id(parameter)] for name, parameter in model.named_parameters()}
    assert {name for name, value in by_name.items() if value} == {"body.0.weight", "head.weight"}


def test_the_papers_sgd_decays_everything_with_momentum() -> None:
    config = OptimizerConfig(name="sgd", learning_rate=0.001, weight_decay=1e-4, decay_norms_and_biases=True)
    optimizer = make_optimizer(Small(), config)
    assert isinstance(optimizer, torch.optim.SGD)
    assert [(g["weight_decay"], g["momentum"]) for g in optimizer.param_groups] == [(1e-4, 0.9)]


def test_patterns_that_match_nothing_or_everything_are_errors() -> None:
    model = Small()
    with pytest.raises(ConfigError, match=r"'backbon\.\*' matches no parameter"):
        freeze(model, ["backbon.*"])
    freeze(model, ["*"])
    with pytest.raises(ConfigError):
        make_optimizer(model, OptimizerConfig())


def nan_score(outputs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    logits, deltas = outputs
    logits = logits.clone()
    logits.view(-1)[5] = math.nan
    return logits, deltas


def infinite_box_loss(losses: dict[str, Tensor]) -> dict[str, Tensor]:
    return {**losses, "box": losses["box"] * math.inf}


def bad_gradient(losses: dict[str, Tensor]) -> dict[str, Tensor]:
    losses["box"].register_hook(lambda gradient: gradient * math.nan)
    return losses


def spoil(monkeypatch: pytest.MonkeyPatch, where: type, method: str, calls: set[int], what: Any) -> None:
    """Spoils what a method returns at some of its calls, counted from 1."""
    original, numbers = getattr(where, method), itertools.count(1)

    def spoiled(*arguments: Any) -> Any:
        result = original(*arguments)
        return what(result) if next(numbers) in calls else result

    monkeypatch.setattr(where, method, spoiled)


@pytest.mark.parametrize(
    ("where", "method", "what", "kind", "detail"),
    [
        (Detector, "heads", nan_score, "score", "scores must be finite, got nan at flat index 5"),
        (Criterion, "forward", infinite_box_loss, "loss", "box = inf"),
        (Criterion, "forward", bad_gradient, "gradient", "norm"),
    ],
)
@pytest.mark.usefixtures("no_page")
def test_a_bad_step_is_reported_skipped_and_survived(
    make_config: MakeConfig,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    where: type,
    method: str,
    what: Any,
    kind: str,
    detail: str,
) -> None:
    settings: dict[str, Any] = {"schedule": {"length": 4}, "splits": {"validation": "none"}}
    with monkeypatch.context() as patch:
        spoil(patch, where, method, {2, 3}, what)
        summary = train(make_config(**settings))
    assert (summary.steps, summary.bad_steps) == (4, 2)
    folder = Path(summary.folder)
    written = read_json_lines(folder / "bad_numbers.jsonl")
    assert [(row["step"], row["what"]) for row in written] == [(2, kind), (3, kind)]
    assert all(detail in row["detail"] for row in written)
    assert all(len(row["images"]) == 4 for row in written)
    assert all(name.startswith("train-") for row in written for name in row["images"])
    assert [row["step"] for row in read_json_lines(folder / "metrics.jsonl")] == [1, 4]
    assert f"step 2: {kind} is NaN or Inf" in capsys.readouterr().err
    state = torch.load(folder / "checkpoints/last.pt", weights_only=True)["detector"]["state"]
    assert all(bool(value.isfinite().all()) for value in state.values())


@pytest.mark.usefixtures("no_page")
def test_too_many_in_a_row_end_the_run_and_keep_the_last_good_checkpoint(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(schedule={"length": 9}, checkpoint_steps=1, bad_steps=3, splits={"validation": "none"})
    spoil(monkeypatch, Detector, "heads", {2, 3, 5, 6, 7}, nan_score)
    with pytest.raises(DivergedError, match=r"3 consecutive steps .*step 7: score") as error:
        train(config)
    assert "\n" not in str(error.value)
    last = Path(str(config.out)) / "checkpoints" / "last.pt"
    training = torch.load(last, weights_only=True)["training"]
    assert (training["step"], training["bad_in_a_row"]) == (6, 2)


def test_weights_that_are_not_finite_are_never_saved(make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A finite gradient can still throw the weights out: the checkpoint before stays."""
    config = make_config(schedule={"length": 6}, checkpoint_steps=1, validation={"every": 100})

    def spoil_weights(row: dict[str, Any]) -> None:
        if row["step"] == 3:
            torch.nn.Module.apply(detectors[0], _set_infinite)

    detectors: list[Detector] = []

    def remember(*arguments: Any) -> Detector:
        detectors.append(make_detector(*arguments))
        return detectors[0]

    monkeypatch.setattr(run, "make_detector", remember)
    with pytest.raises(DivergedError, match=r"step 3: the weight .* is NaN or Inf"):
        train(config, callbacks=[spoil_weights])
    last = torch.load(Path(str(config.out)) / "checkpoints/last.pt", weights_only=True)
    assert last["training"]["step"] == 2
    assert all(bool(value.isfinite().all()) for value in last["detector"]["state"].values())


def _set_infinite(module: torch.nn.Module) -> None:
    if isinstance(module, torch.nn.GroupNorm):
        torch.nn.init.constant_(module.weight, math.inf)


@pytest.mark.usefixtures("no_page")
def test_a_float16_overflow_only_lowers_the_loss_scale(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss scale starts at 65536; a step that overflows only halves it."""
    spoil(monkeypatch, Criterion, "forward", {2}, bad_gradient)
    config = make_config(precision="float16", schedule={"length": 3}, splits={"validation": "none"})
    summary = train(config)
    assert summary.bad_steps == 0
    folder = Path(summary.folder)
    assert [row["step"] for row in read_json_lines(folder / "metrics.jsonl")] == [1, 3]
    last = torch.load(folder / "checkpoints/last.pt", weights_only=True)
    assert last["training"]["stepper"]["scaler"]["scale"] == 65536 / 2


class SimulatedAccelerator:
    """An accelerator for one simulated GPU."""

    device, num_processes, process_index = torch.device("cuda", 0), 1, 0

    def prepare_model(self, model: Any) -> Any:
        return model


def random_batch(images: int, objects: int) -> Batch:
    """Images in uint8, as the loader sends them to a GPU, with objects that overlap; some difficult, some crowds."""
    targets = []
    for _ in range(images):
        corner, flags = torch.rand(objects, 2) * 40, torch.rand(2, objects) < 0.1
        boxes = torch.cat([corner, corner + 5 + 20 * torch.rand(objects, 2)], dim=1)
        labels = torch.randint(0, 3, (objects,))
        targets.append({"boxes": boxes, "labels": labels, "crowd": flags[0], "difficult": flags[1]})
    pixels = torch.randint(0, 256, (images, 3, 64, 64), dtype=torch.uint8)
    return Batch(pixels, targets, list(range(images)), {})


@pytest.mark.parametrize(("images", "objects"), [(1, 0), (2, 3), (4, 40)])
def test_a_step_reads_the_device_twice_whatever_the_images_and_objects(
    make_config: MakeConfig, images: int, objects: int
) -> None:
    """The number of positives and the errors of the loss; results once for all steps. Same numbers as on the CPU."""
    sgd = {"name": "sgd", "learning_rate": 0.01, "momentum": 0.9}
    config = make_config(optimizer=sgd, model={"ema": 0.9})
    torch.manual_seed(0)
    detector = build_detector("retinanet-tiny", class_names=["a", "b", "c"])
    batches = [random_batch(images, objects) for _ in range(2)]
    with start_accelerator(torch.device("cpu")) as accelerator:
        stepper = Stepper(config, copy.deepcopy(detector), Schedule(config.schedule, 4), accelerator, str)
        for number, batch in enumerate(batches):
            stepper.step(number, [batch])
        expected = stepper.take_results()
    with SimulatedGPU() as gpu:
        move(detector, gpu)
        simulated = cast(Accelerator, SimulatedAccelerator())
        stepper = Stepper(config, detector, Schedule(config.schedule, 4), simulated, str)
        for number, batch in enumerate(batches):
            gpu.forget()
            stepper.step(number, [batch])
            assert len(gpu.host_reads) <= 2, gpu.host_reads
        gpu.forget()
        found = stepper.take_results()
        assert len(gpu.host_reads) == 1
    for mine, theirs in zip(found, expected, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-3)


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_the_device_skips_a_step_with_nan_before_the_host_knows(make_config: MakeConfig, name: str) -> None:
    """Weights, optimizer and EMA stay as they were, also in the first step; the step after is a normal one."""
    config = make_config(optimizer={"name": name, "learning_rate": 0.01}, model={"ema": 0.9})
    torch.manual_seed(0)
    detector = build_detector("retinanet-tiny", class_names=["a", "b", "c"])
    batch = random_batch(2, 3)
    states = []
    with start_accelerator(torch.device("cpu")) as accelerator:
        for outcomes in ([False, True, False, True], [True, True]):
            stepper = Stepper(config, copy.deepcopy(detector), Schedule(config.schedule, 4), accelerator, str)
            for is_good in outcomes:
                factor = 1.0 if is_good else math.nan
                hook = stepper.detector.criterion.loss.register_forward_hook(lambda *v, by=factor: v[-1] * by)
                stepper.step(0, [batch])
                hook.remove()
            assert [isinstance(result, dict) for result in stepper.take_results()] == outcomes
            assert stepper.state()["averaged_steps"] == 2
            states.append({"trained": stepper.detector.state_dict(), "averaged": stepper.evaluated.state_dict()})
    for kind in ("trained", "averaged"):
        assert all(torch.equal(states[0][kind][key], value) for key, value in states[1][kind].items()), kind


@pytest.mark.filterwarnings("ignore:'pin_memory' argument:UserWarning")  # without a GPU, nothing is pinned
def test_batches_for_a_gpu_stay_in_uint8(make_config: MakeConfig) -> None:
    dataset = load_dataset(make_config().data, "train")
    options: dict[str, Any] = {"batch_size": 4, "seed": 0, "preset": "none", "size": 64}
    plain, pinned = (
        next(make_training_loader(dataset, **options, pinned=pinned).endless()).images for pinned in (False, True)
    )
    assert pinned.dtype == torch.uint8
    assert torch.equal(pinned.float() / 255, plain)  # what a step makes of it


def test_random_numbers_are_a_function_of_the_step(make_config: MakeConfig) -> None:
    """Such as those of dropout, which a resumed run has to repeat."""
    config, detector = make_config(), build_detector("retinanet-tiny", class_names=["a", "b", "c"])
    drawn: list[float] = []
    detector.register_forward_pre_hook(lambda *arguments: drawn.append(float(torch.rand(()))))
    with start_accelerator(torch.device("cpu")) as accelerator:
        stepper = Stepper(config, detector, Schedule(config.schedule, 4), accelerator, str)
        for number in (3, 4, 3):
            stepper.step(number, [random_batch(2, 3)])
    assert drawn[0] == drawn[2] != drawn[1]


@pytest.mark.parametrize("cause", ["score", "target", "arguments"])
def test_an_error_of_another_rank_skips_the_step_or_ends_the_run(make_config: MakeConfig, cause: Any) -> None:
    """Only scores can be better in the next step."""
    config, detector = make_config(), build_detector("retinanet-tiny", class_names=["a", "b", "c"])

    def refuse(*arguments: Any) -> None:
        raise OtherProcessError(cause)

    detector.criterion.loss.register_forward_pre_hook(refuse)
    ends = nullcontext() if cause == "score" else pytest.raises(RunError, match="another")
    with start_accelerator(torch.device("cpu")) as accelerator:
        stepper = Stepper(config, detector, Schedule(config.schedule, 4), accelerator, str)
        with ends:
            stepper.step(0, [random_batch(2, 3)])
        results = stepper.take_results()
    assert [one.what for one in results] == ["score"] * (cause == "score")
