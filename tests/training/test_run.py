"""Whole runs on a tiny dataset: what they write, and that the options have their effect."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from aploss.detectors import build_detector, load
from aploss.errors import ConfigError, RunError
from aploss.reports.run_files import read_json_lines
from aploss.training.config import TrainConfig, config_to_dict
from aploss.training.run import make_detector, train
from aploss.training.run_folder import Summary

MakeConfig = Callable[..., TrainConfig]


def weights(folder: Path | str, name: str = "last") -> dict[str, torch.Tensor]:
    path = Path(folder) / "checkpoints" / f"{name}.pt"
    return torch.load(path, weights_only=True)["detector"]["state"]


def rows(folder: Path | str, kind: str) -> list[dict[str, Any]]:
    return [row for row in read_json_lines(Path(folder) / "metrics.jsonl") if row["kind"] == kind]


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in first)


def test_a_run_leaves_everything_in_its_folder(make_config: MakeConfig) -> None:
    seen: list[dict[str, Any]] = []
    config = make_config()
    summary = train(config, callbacks=[seen.append])
    folder = Path(str(config.out))
    for name in (
        "config.yaml", "environment.json", "metrics.jsonl", "summary.json",
        "report.html", "checkpoints/last.pt", "checkpoints/best.pt",
        "evaluation/ground_truth.json", "evaluation/detections.json", "evaluation/metrics.json",
        "evaluation/calibration.json", "evaluation/matches.json",
    ):  # fmt: skip
        assert (folder / name).stat().st_size > 0, name
    assert list((folder / "tensorboard").iterdir())
    assert yaml.safe_load((folder / "config.yaml").read_text()) == config_to_dict(config)
    environment = json.loads((folder / "environment.json").read_text())
    assert torch.__version__.startswith(environment["packages"]["torch"])
    written = json.loads((folder / "summary.json").read_text())
    assert {"AP", "AP50", "AP75", "per_class", "loss", "detector", "seed", "minutes"} <= set(written)
    assert (written["split"], written["steps"], written["epochs"]) == ("test", 6, 1.5)
    assert Summary.read(folder / "summary.json") == summary
    assert [row["step"] for row in seen if row["kind"] == "train"] == [1, 2, 3, 4, 5, 6]
    assert [row["step"] for row in seen if row["kind"] == "validation"] == [3, 6]
    assert seen == read_json_lines(folder / "metrics.jsonl")


@pytest.mark.usefixtures("no_page")
class TestRuns:
    def test_calibration_is_stored_and_leaves_ap_as_it_is(self, make_config: MakeConfig) -> None:
        from aploss.evaluation import coco_metrics

        config = make_config(detector="retinanet-tiny", schedule={"length": 10}, validation={"every": 10})
        summary = train(config)
        assert summary.AP > 0.05  # something is found: AP could change
        folder = Path(str(config.out))
        truth = json.loads((folder / "evaluation/ground_truth.json").read_text())
        found = json.loads((folder / "evaluation/detections.json").read_text())
        calibration = json.loads((folder / "evaluation/calibration.json").read_text())
        assert calibration["fitted_on"] == "val"
        assert calibration["measured_on"] == "test"
        assert calibration["held_out"] is True
        assert summary.AP == coco_metrics(truth, found).AP
        scores = calibration["calibrated_scores"]
        calibrated = [{**row, "score": score} for row, score in zip(found, scores, strict=True)]
        assert coco_metrics(truth, calibrated).AP == summary.AP
        detector = load(folder)
        assert detector.calibration is not None
        assert detector.draw_threshold == summary.draw_threshold
        raw = np.array([row["score"] for row in found])
        assert np.allclose(detector.calibration(raw), scores)
        assert all(Path(image["path"]).is_file() for image in truth["images"])

    def test_the_same_config_gives_the_same_bits(self, make_config: MakeConfig, finished_run: TrainConfig) -> None:
        short = {"schedule": {"length": 3}}  # with a validation
        first = Summary.read(Path(str(finished_run.out)) / "summary.json")
        torch.rand(3)  # earlier random numbers do not matter
        before = torch.get_rng_state()
        second = train(make_config("second", **short))
        assert torch.equal(torch.get_rng_state(), before)
        assert same(weights(first.folder), weights(second.folder))
        assert (first.AP, first.AP50) == (second.AP, second.AP50)
        other = train(make_config("other", seed=1, **short))
        assert not same(weights(first.folder), weights(other.folder))

    def test_an_existing_run_is_refused_but_read_with_resume(self, finished_run: TrainConfig) -> None:
        folder = Path(str(finished_run.out))
        with pytest.raises(RunError, match="already holds a run"):
            train(finished_run)
        stamp = (folder / "checkpoints/last.pt").stat().st_mtime_ns
        assert train(finished_run, resume=True) == Summary.read(folder / "summary.json")
        assert (folder / "checkpoints/last.pt").stat().st_mtime_ns == stamp

    def test_a_run_that_fails_before_its_first_checkpoint_can_be_replaced(
        self, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Such as one whose images do not fit into memory."""
        config = make_config(schedule={"length": 1})

        def fail(*arguments: Any) -> None:
            raise MemoryError

        with monkeypatch.context() as patch:
            patch.setattr("aploss.training.step.Stepper.step", fail)
            with pytest.raises(MemoryError):
                train(config)
        assert train(make_config(schedule={"length": 1}, batches={"size": 2})).steps == 1

    def test_best_is_the_best_validation_and_last_the_last(self, make_config: MakeConfig) -> None:
        # A rate so high that the second half spoils what the first has learned.
        config = make_config(
            schedule={"length": 6, "kind": "milestones", "milestones": [4], "gamma": 1000.0},
            optimizer={"name": "sgd", "learning_rate": 0.01},
            validation={"every": 2},
            evaluation={"split": "val"},
        )
        summary = train(config)
        values = {row["step"]: row["AP"] for row in rows(summary.folder, "validation")}
        assert summary.best_step == max(values, key=lambda step: values[step])
        assert summary.best_step < 6
        assert summary.AP == values[summary.best_step] != values[6]  # measured by those weights, not by the last ones
        assert not same(weights(summary.folder, "best"), weights(summary.folder, "last"))

    def test_the_last_weights_are_evaluated_when_asked(self, make_config: MakeConfig) -> None:
        config = make_config(
            schedule={"length": 3}, evaluation={"checkpoint": "last", "split": "val", "voc_year": 2007}
        )
        summary = train(config)
        assert summary.best_step == 3
        # They are in last.pt, with the calibration; nothing else is called the best.
        assert not (Path(summary.folder) / "checkpoints/best.pt").exists()
        detector = load(summary.folder)
        assert same(detector.state_dict(), weights(summary.folder))
        assert detector.draw_threshold == summary.draw_threshold
        assert train(config, resume=True) == summary
        assert rows(summary.folder, "validation")[-1]["AP"] == summary.AP
        assert (summary.split, summary.calibration_split, summary.calibration_held_out) == ("val", "val", False)
        assert summary.voc_AP50 is not None
        assert 0 <= summary.voc_AP50 <= 1

    def test_without_validation_the_last_weights_count(self, make_config: MakeConfig) -> None:
        config = make_config(splits={"validation": "none"}, schedule={"length": 2})
        summary = train(config)
        assert rows(summary.folder, "validation") == []
        assert summary.split == "test"
        assert summary.AP is not None
        assert summary.calibration_error is None
        assert load(summary.folder).calibration is None

    def test_patience_ends_a_run_that_gets_no_better(self, make_config: MakeConfig) -> None:
        config = make_config(
            schedule={"length": 40, "warmup_steps": 0},
            optimizer={"name": "sgd", "learning_rate": 1e-9},  # learns nothing
            validation={"every": 1, "patience": 2},
        )
        summary = train(config)
        assert (summary.stopped_by, summary.steps) == ("patience", 3)

    def test_a_time_limit_ends_a_run_and_a_later_one_resumes_it(self, make_config: MakeConfig) -> None:
        short = {"schedule": {"length": 3}}
        config = make_config(max_minutes=0.0, **short)
        first = train(config)
        assert (first.stopped_by, first.steps) == ("minutes", 1)
        second = train(make_config(max_minutes=None, **short), resume=True)
        assert (second.stopped_by, second.steps) == ("length", 3)

    def test_accumulated_passes_average_their_gradients(self, make_config: MakeConfig) -> None:
        """One step of SGD on two passes = the mean of the two steps from the same start."""
        plain = {
            "optimizer": {"name": "sgd", "learning_rate": 0.01, "momentum": 0.0, "clip_norm": None,
                          "weight_decay": 0.0},
            "schedule": {"length": 1, "kind": "milestones", "warmup_steps": 0},
            "splits": {"validation": "none"},
            "deterministic": True,
        }  # fmt: skip
        both = train(make_config("both", **plain, batches={"accumulate": 2}))
        start = make_detector(make_config(**plain), ("red", "green")).state_dict()
        config = make_config("single", **plain)
        steps = [_single_step(config, number) for number in (0, 1)]
        for name, value in weights(both.folder).items():
            moved = sum(step[name] - start[name] for step in steps) / 2
            assert torch.allclose(value - start[name], moved, atol=1e-6), name
        assert both.epochs == 0.5

    def test_frozen_layers_do_not_move(self, make_config: MakeConfig) -> None:
        config = make_config(model={"frozen": ["backbone.body"]}, schedule={"length": 2})
        summary = train(config)
        start = make_detector(config, ("red", "green")).state_dict()
        for name, value in weights(summary.folder).items():
            frozen = name.startswith("backbone.body")
            assert torch.equal(value, start[name]) == frozen or name.startswith("head"), name
        bias = "head.classification_head.cls_logits.bias"
        assert not torch.equal(weights(summary.folder)[bias], start[bias])

    def test_the_moving_average_is_saved(self, make_config: MakeConfig) -> None:
        """Against the average taken by hand over the weights after each step."""
        constant = {
            "optimizer": {"name": "sgd", "learning_rate": 0.01},
            "splits": {"validation": "none"},
            "schedule": {"length": 3, "kind": "milestones", "warmup_steps": 0},
        }
        config, states = make_config("plain", **constant, checkpoint_steps=1), []

        def remember(row: dict[str, Any]) -> None:
            if row["step"] > 1:  # the checkpoint of the step before is there
                states.append(weights(config.out))

        train(config, callbacks=[remember])
        states.append(weights(config.out))
        assert len(states) == 3
        summary = train(make_config("averaged", **constant, model={"ema": 0.9}))
        for name, value in weights(summary.folder).items():
            average = states[0][name]  # the first is taken as it is
            for count, state in enumerate(states[1:], start=1):
                decay = min(0.9, (1 + count) / (10 + count))
                average = decay * average + (1 - decay) * state[name]
            assert torch.allclose(value, average, atol=1e-6), name
        last = torch.load(Path(summary.folder) / "checkpoints/last.pt", weights_only=True)
        assert same(last["training"]["stepper"]["weights"], states[2])

    def test_losses_start_from_the_same_weights(self, make_config: MakeConfig) -> None:
        names = ("red", "green")
        reference = make_detector(make_config(), names).state_dict()
        for loss in ("focal", "ce-ohem"):
            other = make_detector(make_config(loss=loss), names).state_dict()
            differing = [name for name in other if other[name].shape != reference[name].shape]
            assert all(torch.equal(other[name], reference[name]) for name in other if name not in differing)
            assert all("cls_logits" in name for name in differing)

    def test_initial_weights_are_loaded_and_logged_once(
        self, make_config: MakeConfig, finished_run: TrainConfig, caplog: pytest.LogCaptureFixture
    ) -> None:
        start = {"model": {"weights": f"{finished_run.out}/checkpoints/last.pt"}, "loss": "ce-ohem"}
        with caplog.at_level("INFO", logger="aploss.detectors.weights"):
            detector = make_detector(make_config(**start), ("red", "green"))
        assert len(caplog.records) == 1  # a softmax detector is built twice
        saved = weights(str(finished_run.out))
        assert all(torch.equal(value, saved[key]) for key, value in detector.state_dict().items() if "body" in key)


def _single_step(config: TrainConfig, number: int) -> dict[str, torch.Tensor]:
    """The weights after one plain SGD step on batch ``number``, written out by hand."""
    from aploss.data.formats import load_dataset
    from aploss.data.loader import make_training_loader

    dataset = load_dataset(config.data, "train")
    loader = make_training_loader(dataset, batch_size=4, seed=config.seed, preset="light", size=64)
    batch = list(loader.epoch(0))[number]
    detector = make_detector(config, dataset.class_names).train()
    sum(detector(batch.images, batch.targets).values()).backward()
    with torch.no_grad():
        for parameter in detector.parameters():
            parameter -= 0.01 * parameter.grad
    return detector.state_dict()


@pytest.fixture
def pretrained(tmp_path: Path, short_detector: str) -> str:
    """A file of weights, of another seed than the runs'."""
    torch.manual_seed(9)
    path = tmp_path / "pretrained.pt"
    detector = build_detector(short_detector, class_names=["a"])
    torch.save(detector.backbone.state_dict(prefix="backbone."), path)
    return str(path)


@pytest.mark.usefixtures("no_page")
class TestFrozenBackbone:
    def test_stored_features_give_the_numbers_of_a_frozen_backbone_to_rounding(
        self, make_config: MakeConfig, pretrained: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("APLOSS_CACHE", str(tmp_path / "cache"))
        changes = {
            "model": {"weights": pretrained, "frozen_backbone": True},
            "optimizer": {"name": "sgd", "learning_rate": 0.01},  # AdamW makes steps of small gradients
            "splits": {"validation": "none"},
        }
        plain = make_config("plain", batches={"augmentation": "none"}, **changes)
        cached = make_config("cached", batches={"augmentation": "none", "cache_features": True}, **changes)
        train(plain)
        train(cached)
        losses = [[row["loss"] for row in rows(config.out, "train")] for config in (plain, cached)]
        assert losses[1] == pytest.approx(losses[0], rel=1e-3)
        start, first, second = torch.load(pretrained, weights_only=True), weights(plain.out), weights(cached.out)
        body = [name for name in first if name.startswith("backbone.body.")]
        assert all(torch.equal(start[name], first[name]) and torch.equal(start[name], second[name]) for name in body)
        fpn = "backbone.fpn.inner_blocks.0.0.weight"
        assert not torch.equal(start[fpn], first[fpn])
        for name in first:
            torch.testing.assert_close(first[name], second[name], rtol=0, atol=2e-5)

    def test_a_run_from_cached_features_is_resumed_to_the_same_bits(
        self, make_config: MakeConfig, pretrained: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("APLOSS_CACHE", str(tmp_path / "cache"))
        changes = {
            "model": {"weights": pretrained, "frozen_backbone": True, "ema": 0.9},
            "batches": {"cache_features": True, "cached_views": 2},
            "schedule": {"length": 3},
        }
        whole, parts = make_config("whole", **changes), make_config("parts", **changes)
        train(whole)
        train(replace(parts, max_minutes=0.0))
        shutil.rmtree(tmp_path / "cache")
        train(parts, resume=True)
        assert rows(parts.out, "train")[0]["step"] == 1
        assert same(weights(whole.out), weights(parts.out))
        assert same(weights(whole.out, "best"), weights(parts.out, "best"))

    def test_no_more_views_are_computed_than_the_steps_can_use(
        self, make_config: MakeConfig, pretrained: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("APLOSS_CACHE", str(tmp_path / "cache"))
        changes = {"model": {"weights": pretrained, "frozen_backbone": True}, "schedule": {"length": 1}}
        for views in (None, 1):  # both share a cache: one step sees each image once at most
            batches = {"cache_features": True, "cached_views": views, "augmentation": "light"}
            train(make_config(f"views-{views}", batches=batches, **changes))
        assert len([*(tmp_path / "cache" / "features").glob("[!.]*")]) == 1

    def test_a_backbone_that_cannot_be_frozen_is_refused_in_one_line(
        self, make_config: MakeConfig, pretrained: str
    ) -> None:
        with pytest.raises(ConfigError, match=r"add --model\.weights imagenet"):
            train(make_config(model={"frozen_backbone": True}))
        with pytest.raises(ConfigError, match=r"add --model\.frozen_backbone true"):
            train(make_config(model={"weights": pretrained}, batches={"cache_features": True}))
        with pytest.raises(ConfigError, match=r"cached_views needs cached features"):
            train(make_config(batches={"cached_views": 4}))
        with pytest.raises(ConfigError, match="ssdlite cannot be frozen"):
            build_detector("ssdlite", class_names=["a"]).features(torch.zeros(1, 3, 320, 320))
