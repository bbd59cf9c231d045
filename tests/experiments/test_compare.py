"""Comparisons: their rows, and runs that are trained once, resume after an interruption and get learning rates."""

import json
from pathlib import Path

import pytest
import yaml

from aploss.errors import ConfigError, RunError
from aploss.experiments.compare import compare, compare_runs, comparison_plan
from aploss.experiments.plan import RATE, Measure, Plan, Search, settings_hash
from aploss.training import TrainConfig, TrainingInterruptedError
from aploss.training.config import config_to_dict, differing_keys
from aploss.training.run_folder import RunFolder


def test_rows_differ_only_in_the_loss_and_its_section_of_the_recipe() -> None:
    first, *others = comparison_plan(["ap", "focal", "ce-ohem"], recipe="demo", seeds=[0]).variants
    assert all(differing_keys(first.config, other.config) == ["loss"] for other in others)
    plan = comparison_plan(["ap", "focal", "focal:gamma=2.0"], recipe="voc-ssd512", seeds=[0])
    assert plan.variants[2].name == "focal:gamma=2.0"
    options = [variant.config.criterion.options for variant in plan.variants]
    assert options[1:] == [{"alpha": 0.25, "gamma": 1.0}, {"alpha": 0.25, "gamma": 2.0}]  # alpha is the recipe's


def test_varied_settings_are_crossed_with_losses() -> None:
    vary = {"optimizer.learning_rate": [0.001, 0.003], "batches.image_size": [64, [64, 96]]}
    plan = comparison_plan(["ap", "focal"], recipe="demo", seeds=[0], vary=vary)
    assert len(plan.variants) == 8
    last = plan.variants[-1]
    assert last.name == "focal optimizer.learning_rate=0.003 batches.image_size=[64,96]"
    assert (last.config.loss, last.config.optimizer.learning_rate) == ("focal", 0.003)
    assert last.config.batches.image_size == (64, 96)
    alone = comparison_plan([], recipe="demo", seeds=[0], vary={"criterion.box_loss": ["smooth-l1", "giou"]})
    assert [variant.name for variant in alone.variants] == ["criterion.box_loss=smooth-l1", "criterion.box_loss=giou"]
    assert {variant.config.loss for variant in alone.variants} == {"ap"}  # the recipe's


@pytest.mark.parametrize(
    ("losses", "vary", "part"),
    [
        ([], {}, ""),
        (["ap", "fokal"], {}, "focal"),
        (["ap:detla=1"], {}, "delta"),
        (["focal:gamma=1", "alpha=0.5"], {}, "focal:gamma=1:alpha=0.25"),
        (["ap:delta=-1"], {}, "delta"),
        (["ap"], {"learning_rate": [1]}, "learning_rate"),
        (["ap"], {"batches.size": [4, 0]}, "batches.size"),
        (["ap"], {"detector": ["retinanet-tiny", "retinanet-tini"]}, "retinanet-tiny"),
        (["ap"], {"model.options.normm": ["x"]}, "normm"),
        (["ap"], {"loss": ["focal"]}, "losses"),
    ],
)
def test_a_wrong_row_is_rejected_before_anything_is_trained(losses: list[str], vary: dict, part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        comparison_plan(losses, recipe="demo", seeds=[0], vary=vary)
    assert part in str(caught.value)


def plan_of(*losses: str, seeds: int = 2, search: Search | None = None) -> Plan:
    return comparison_plan(losses, recipe="demo", seeds=range(seeds), search=search)


def results_in(folder: Path) -> dict:
    return json.loads((folder / "results.json").read_text())


@pytest.mark.usefixtures("no_page")
class TestCache:
    def test_a_run_is_trained_once_and_another_loss_or_seed_costs_only_itself(
        self, fake_training, tmp_path: Path
    ) -> None:
        for _ in range(2):
            results = compare(plan_of("ap", "focal"), tmp_path / "page")
        assert len(fake_training.configs) == 4
        assert results.values("ap", "AP") == pytest.approx([0.74, 0.752])
        compare(plan_of("ap", "focal", "auc"), tmp_path / "two")
        compare(plan_of("ap", "focal", seeds=3), tmp_path / "three")
        trained = [(one.loss, one.seed) for one in fake_training.configs[4:]]
        assert trained == [("auc", 0), ("auc", 1), ("ap", 2), ("focal", 2)]

    def test_only_what_changes_a_run_changes_its_hash(self) -> None:
        base = settings_hash(TrainConfig(data="data"))
        same = [
            TrainConfig(data="./data"),
            TrainConfig(data=str(Path("data").resolve()), out="runs/x", max_minutes=3.0),
            TrainConfig(data="data", checkpoint_minutes=1.0, checkpoint_steps=5),
        ]
        other = [
            TrainConfig(data="data2"),
            TrainConfig(data="data", seed=1),
            TrainConfig(data="data", device="cuda"),
            TrainConfig(data="data", loss="focal"),
        ]
        assert {settings_hash(config) for config in same} == {base}
        assert len({base, *map(settings_hash, other)}) == 5

    def test_variants_have_folders_of_their_own_and_are_found_again(self, fake_training, tmp_path: Path) -> None:
        first = comparison_plan(["ap", "ap:delta=0.5"], recipe="demo", seeds=[0], vary={"batches.size": [4, 8]})
        compare(first, tmp_path / "one")
        folders = [Path(config.out).name for config in fake_training.configs]
        expected = ["size4", "size8", "delta0.5-size4", "delta0.5-size8"]
        assert [name.rpartition("-")[0] for name in folders] == [
            f"builtin-retinanet-tiny-ap-{words}-seed0" for words in expected
        ]
        # Another comparison, which calls the same runs something else.
        compare(comparison_plan(["ap:delta=0.5"], recipe="demo", seeds=[0]), tmp_path / "two")
        rows = [results_in(tmp_path / name)["rows"] for name in ("one", "two")]
        assert len(fake_training.configs) == 4  # a batch of 8 images is the recipe's
        assert rows[0][3]["runs"][0]["folder"] == rows[1][0]["runs"][0]["folder"]
        assert rows[0][3]["settings"] == {"criterion.options.delta": 0.5, "batches.size": 8}

    def test_a_cache_that_cannot_be_written_is_an_error_of_one_line(self, fake_training, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(RunError) as caught:
            compare(plan_of("ap"), tmp_path / "page", cache=tmp_path / "file")
        assert "\n" not in str(caught.value)


class TestResuming:
    def test_an_interrupted_comparison_resumes(self, fake_training, tmp_path: Path) -> None:
        fake_training.errors[3] = TrainingInterruptedError("stopped at step 3 of 10")
        with pytest.raises(TrainingInterruptedError):
            compare(plan_of("ap", "focal"), tmp_path / "page")
        found = results_in(tmp_path / "page")
        assert not found["complete"]
        assert [row["values"]["AP"][1] for row in found["rows"]] == [None, None]
        assert "2 of 4 runs are done" in (tmp_path / "page/report.html").read_text()
        assert compare(plan_of("ap", "focal"), tmp_path / "page").complete
        # Seeds are the outer loop: the first pair was whole when it was interrupted.
        order = [(config.loss, config.seed) for config in fake_training.configs]
        assert order == [("ap", 0), ("focal", 0), ("ap", 1), ("ap", 1), ("focal", 1)]

    def test_a_diverged_run_is_shown_and_the_others_are_trained(self, fake_training, tmp_path: Path) -> None:
        fake_training.diverges_from = 0.001
        results = compare(plan_of("ap", "focal"), tmp_path / "page")
        assert results.complete
        assert results.values("ap", "AP") == [None, None]
        assert "diverged: seed 0, 1" in (tmp_path / "page/table.md").read_text()
        text = (tmp_path / "page/results.json").read_text()
        found = json.loads(text, parse_constant=pytest.fail)  # JSON does not have NaN
        assert "not finite" in found["rows"][0]["runs"][0]["failure"]


class TestLearningRates:
    def test_each_loss_gets_its_best_on_validation_inside_its_grid(self, fake_training, tmp_path: Path) -> None:
        plan = plan_of("ap", "focal", "ce-ohem", search=Search())
        results = compare(plan, tmp_path / "page")
        rates = {v.name: v.config.optimizer.learning_rate for v in results.plan.variants}
        assert rates == {"ap": 0.003, "focal": 0.009, "ce-ohem": 0.001}
        tried = {name: {one.settings[RATE] for one in results.trials if one.row == name} for name in rates}
        # Three rates, and one more where the best was at an end.
        assert tried["ap"] == {0.001, 0.003, 0.009}
        assert tried["focal"] == {0.001, 0.003, 0.009, 0.027}
        assert tried["ce-ohem"] == {0.000333, 0.001, 0.003, 0.009}
        assert len(fake_training.configs) == 11 + 3  # the best of each is the real run of seed 0; then seed 1 of each
        assert results.at_end == []
        assert "AP-loss 0.003, Focal loss 0.009, CE + OHEM 0.001" in (tmp_path / "page/report.html").read_text()

    def test_other_settings_are_searched_together_with_the_rate(self, fake_training, tmp_path: Path) -> None:
        search = Search(over={"criterion.box_weight": [1.0, 3.0], "focal:criterion.options.gamma": [1, 2]})
        results = compare(plan_of("ap", "focal", seeds=1, search=search), tmp_path / "page")
        ap, focal = results.plan.variants
        assert (ap.config.optimizer.learning_rate, ap.config.criterion.box_weight) == (0.009, 3.0)
        # A grid of 3 x 2, and the neighbours of the best: a rate of 0.027, a weight of 9.
        assert sum(trial.row == "ap" for trial in results.trials) == 6 + 2
        assert ap.tuned == {RATE: 0.009, "criterion.box_weight": 3.0}
        assert set(focal.tuned) == {RATE, "criterion.box_weight", "criterion.options.gamma"}
        assert results_in(tmp_path / "page")["rows"][0]["tuned"] == ap.tuned
        page = (tmp_path / "page/report.html").read_text()
        assert '<td data-label="box weight" class="number">3.0</td>' in page
        assert page.index(">0.001</td>") < page.index(">0.003</td>") < page.index(">0.009</td>")

    def test_given_rates_take_the_place_of_factors(self, fake_training, tmp_path: Path) -> None:
        results = compare(plan_of("ap", seeds=1, search=Search(over={RATE: [0.002, 0.003]})), tmp_path / "page")
        assert [trial.settings[RATE] for trial in results.trials] == [0.002, 0.003, 0.0045]
        assert results.plan.variants[0].config.optimizer.learning_rate == 0.003

    def test_rates_that_diverge_are_not_chosen_and_lower_ones_are_tried(self, fake_training, tmp_path: Path) -> None:
        fake_training.diverges_from = 0.0005
        results = compare(plan_of("focal", seeds=1, search=Search()), tmp_path / "page")
        assert [trial.score is None for trial in results.trials] == [True, True, True, False, False]
        assert results.plan.variants[0].config.optimizer.learning_rate in (0.000333, 0.000111)

    def test_a_search_without_end_stops_and_says_so(
        self, fake_training, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(Measure, "score", lambda self, run: run.config.optimizer.learning_rate / 10)
        results = compare(plan_of("ap", seeds=1, search=Search()), tmp_path / "page")
        assert len(results.trials) == 3 + 4
        assert results.at_end == ["ap"]

    def test_without_validation_there_is_nothing_to_choose_by(
        self, fake_training, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(Measure, "score", lambda self, run: None)
        with pytest.raises(ConfigError):
            compare(plan_of("ap", search=Search()), tmp_path / "page")


class TestSeedsUntilDecided:
    def test_seeds_are_added_until_every_verdict_is_decided(self, fake_training, tmp_path: Path) -> None:
        plan = comparison_plan(["ap", "focal"], recipe="demo", seeds=range(9), first=2)
        assert plan.looks == (2, 3, 5, 8, 9)
        assert plan.confidence == pytest.approx(1 - 0.05 / 5)
        results = compare(plan, tmp_path / "page")
        assert len(results.seeds) == 2  # equal differences have an interval of width zero
        assert results_in(tmp_path / "page")["confidence"] == pytest.approx(0.99)

    def test_undecided_verdicts_take_all_seeds(
        self, fake_training, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        values = {"ap": [0.5, 0.9], "focal": [0.9, 0.5]}  # no difference, wide
        monkeypatch.setattr(Measure, "values", lambda self, run: {"AP": values[run.config.loss][run.config.seed % 2]})
        plan = comparison_plan(["ap", "focal"], recipe="demo", seeds=range(4), first=2)
        results = compare(plan, tmp_path / "page")
        assert results.complete
        assert len(results.seeds) == 4
        assert results.pair_verdict("ap", "focal").word == "too few seeds"


def test_finished_runs_are_compared_without_training(fake_training, tmp_path: Path) -> None:
    first = compare(plan_of("ap", "focal"), tmp_path / "page")
    folders = [run.folder for run in first.runs.values()]
    for run in first.runs.values():
        RunFolder(run.folder).config_file.write_text(yaml.safe_dump(config_to_dict(run.config)))
    trained = len(fake_training.configs)
    results = compare_runs(folders, tmp_path / "other")
    assert len(fake_training.configs) == trained
    assert [variant.name for variant in results.plan.variants] == ["ap", "focal"]
    assert results.values("ap", "AP") == first.values("ap", "AP")
    assert results.pair_verdict("ap", "focal").word == "ahead"
    lines = (tmp_path / "other/results.csv").read_text().splitlines()
    assert lines[0].startswith("row,loss,seed,learning_rate,AP,AP50,AP75")
    assert len(lines) == 5
    assert r"\midrule" in (tmp_path / "other/table.tex").read_text()
    with pytest.raises(ConfigError):
        compare_runs([*folders, folders[0]], tmp_path / "twice")
