"""Numbers that are not finite: reported with step, images and kind; skipped; and when it ends."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from aploss.detectors.criterion import Criterion
from aploss.detectors.detector import Detector
from aploss.errors import RunError
from aploss.training.config import TrainConfig
from aploss.training.metrics_log import read_rows
from aploss.training.run import train

MakeConfig = Callable[..., TrainConfig]
pytestmark = pytest.mark.usefixtures("no_page")


class Spoil:
    """Spoils what a method returns at some of its calls, counted from 1."""

    def __init__(self, calls: set[int], spoil: Callable[[Any], Any]) -> None:
        self.calls, self.spoil, self.count = calls, spoil, 0

    def wrap(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def spoiled(*arguments: Any) -> Any:
            self.count += 1
            result = method(*arguments)
            return self.spoil(result) if self.count in self.calls else result

        return spoiled


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


def spoil(
    monkeypatch: pytest.MonkeyPatch, where: type, method: str, calls: set[int], what: Any
) -> None:
    monkeypatch.setattr(where, method, Spoil(calls, what).wrap(getattr(where, method)))


@pytest.mark.parametrize(
    ("where", "method", "what", "kind", "detail"),
    [
        (Detector, "heads", nan_score, "score", "scores must be finite, got nan at flat index 5"),
        (Criterion, "forward", infinite_box_loss, "loss", "box = inf"),
        (Criterion, "forward", bad_gradient, "gradient", "backbone"),
    ],
)
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
    written = read_rows(folder / "bad_numbers.jsonl")
    assert [(row["step"], row["what"]) for row in written] == [(2, kind), (3, kind)]
    assert all(detail in row["detail"] for row in written)
    assert all(len(row["images"]) == 4 for row in written)
    assert all(name.startswith("train-") for row in written for name in row["images"])
    assert [row["step"] for row in read_rows(folder / "metrics.jsonl")] == [1, 4]
    message = capsys.readouterr().err
    assert f"step 2: {kind} not finite" in message
    assert written[0]["images"][0] in message
    state = torch.load(folder / "checkpoints/last.pt", weights_only=True)["detector"]["state"]
    assert all(bool(value.isfinite().all()) for value in state.values())


def test_too_many_in_a_row_end_the_run_and_keep_the_last_good_checkpoint(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(
        schedule={"length": 9}, checkpoint_steps=1, bad_steps=3, splits={"validation": "none"}
    )
    spoil(monkeypatch, Detector, "heads", {2, 3, 5, 6, 7}, nan_score)
    with pytest.raises(RunError, match=r"3 steps in a row .*step 7: score.*last\.pt") as error:
        train(config)
    assert "\n" not in str(error.value)
    last = Path(str(config.out)) / "checkpoints" / "last.pt"
    training = torch.load(last, weights_only=True)["training"]
    assert (training["step"], training["bad_in_a_row"]) == (6, 2)


def test_weights_that_are_not_finite_are_never_saved(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A finite gradient can still throw the weights out: the checkpoint before stays."""
    config = make_config(schedule={"length": 6}, checkpoint_steps=1, validation={"every": 100})
    seen: list[int] = []

    def spoil_weights(row: dict[str, Any]) -> None:
        seen.append(row["step"])
        if row["step"] == 3:
            torch.nn.Module.apply(detectors[0], _set_infinite)

    detectors: list[Detector] = []
    build = train.__globals__["make_detector"]

    def remember(*arguments: Any) -> Detector:
        detectors.append(build(*arguments))
        return detectors[0]

    monkeypatch.setitem(train.__globals__, "make_detector", remember)
    with pytest.raises(
        RunError, match=r"step 3: the weight .* no longer finite; .*last\.pt is kept"
    ):
        train(config, on_progress=spoil_weights)
    last = torch.load(Path(str(config.out)) / "checkpoints/last.pt", weights_only=True)
    assert last["training"]["step"] == 2
    assert all(bool(value.isfinite().all()) for value in last["detector"]["state"].values())


def _set_infinite(module: torch.nn.Module) -> None:
    if isinstance(module, torch.nn.GroupNorm):
        torch.nn.init.constant_(module.weight, math.inf)


def test_overflow_of_float16_is_the_scale_finding_its_level(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss scale starts at 65536; a step that overflows only halves it."""
    spoil(monkeypatch, Criterion, "forward", {2}, bad_gradient)
    config = make_config(precision="float16", schedule={"length": 3}, splits={"validation": "none"})
    summary = train(config)
    assert summary.bad_steps == 0
    folder = Path(summary.folder)
    assert [row["step"] for row in read_rows(folder / "metrics.jsonl")] == [1, 3]
    last = torch.load(folder / "checkpoints/last.pt", weights_only=True)
    assert last["training"]["stepper"]["scaler"]["scale"] == 65536 / 2
