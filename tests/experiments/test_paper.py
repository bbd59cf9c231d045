"""The entries of the paper: its settings at its own scale (Sections 4.1 to 4.3, Appendix 5.1), its claims on its own
numbers, and rows that differ in one thing at the small scale.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from aploss.experiments.paper import EACH_CLASS, RANKING_AP, REPRODUCTIONS
from aploss.experiments.plan import Measure, Plan, Run
from aploss.experiments.reproduce import Request, page_for, plan_for
from aploss.experiments.results import Results
from aploss.reports.comparison import TrainingCurve
from aploss.training import TrainConfig
from aploss.training.config import differing_keys

PAPER = Request(scale="paper")
DELTA_1 = {"delta": 1.0, "interpolated": True}


def paper_configs(name: str, **request: object) -> dict[str, TrainConfig]:
    asked = Request(scale="paper", **request)  # type: ignore[arg-type]
    return {variant.name: variant.config for variant in plan_for(name, asked).variants}


@pytest.mark.parametrize("name", REPRODUCTIONS)
def test_settings_of_section_4_1(name: str) -> None:
    plan = plan_for(name, PAPER)
    assert (plan.search, plan.seeds) == (None, (0,))
    for benchmark in REPRODUCTIONS[name].benchmarks:
        for row, config in paper_configs(name, benchmark=benchmark).items():
            voc = benchmark != "coco"
            # "minibatch training on 2 GPUs with 8 images per GPU", here on one
            if name != "table1a":
                assert (config.batches.size, config.batches.accumulate) == (8, 2)
            # "the input image is fixed to 512x512", "the same data augmentation as [SSD]"
            assert config.batches.image_size == 512
            assert config.batches.augmentation == "paper"
            # "pre-trained on the ImageNet-1k classification dataset"
            assert config.model.weights == "imagenet"
            # "initial learning rate of 0.001", "weight decay of 0.0001 and momentum of 0.9"
            optimizer = config.optimizer
            assert (optimizer.name, optimizer.learning_rate) == ("sgd", 0.001)
            assert (optimizer.weight_decay, optimizer.momentum) == (0.0001, 0.9)
            assert optimizer.clip_norm is None
            # "160 epochs ... divided by 10 at 110 epochs and again at 140"; COCO 100, 60, 80
            schedule = config.schedule
            assert (schedule.kind, schedule.unit, schedule.gamma) == ("milestones", "epochs", 0.1)
            assert schedule.length == (160 if voc else 100)
            assert schedule.milestones == ((110, 140) if voc else (60, 80))
            # "non-maximum suppression with IoU of 0.5 for each class"
            assert config.model.options["nms_iou"] == 0.5
            # the weights at the end are measured, on VOC2007 test or COCO minival
            assert config.evaluation.checkpoint == "last"
            assert config.evaluation.split == {"voc": "2007_test", "voc12": "none", "coco": "val"}[benchmark], row
            assert config.criterion.rank_over == "batch"


LOSS_OPTIONS = {
    "ce-ohem": {"negative_ratio": 3.0},
    "focal": {"alpha": 0.25, "gamma": 2.0},
    "auc": {"delta": 1.0},
    "ap": DELTA_1,
}
SSD_OPTIONS = {**LOSS_OPTIONS, "focal": {"alpha": 0.25, "gamma": 1.0}}  # Appendix 5.1
OPTIONS = {
    "table1a": dict.fromkeys(["1 image", "2 images", "4 images", "8 images"], DELTA_1),
    "table1b": {f"delta {delta:g}": {**DELTA_1, "delta": delta} for delta in (0.25, 0.5, 1.0, 2.0)},
    "table1c": {"not interpolated": {**DELTA_1, "interpolated": False}, "interpolated": DELTA_1},
    "table2": LOSS_OPTIONS,
    "figure5a": LOSS_OPTIONS,
    "figure5b": {"ap": DELTA_1, "smooth-ap": {"log_space": True}, "hinge-ap": {}},
    "figure6": {name: LOSS_OPTIONS[name] for name in ("focal", "ap")},
    "table3": {"one scale": DELTA_1, "several scales": DELTA_1},
    "table4": SSD_OPTIONS,
    "figure7": SSD_OPTIONS,
}
TRAINED_ON = {"voc": "2007_trainval+2012_trainval", "voc12": "2007_trainval+2007_test+2012_trainval", "coco": "train"}
TEST_SIZES = {"retinanet-r50": [600, 1000], "retinanet-r101": [500, 833], "ssd512": [512, 512]}


@pytest.mark.parametrize("name", REPRODUCTIONS)
def test_detectors_and_losses_are_those_of_the_paper(name: str) -> None:
    for benchmark in REPRODUCTIONS[name].benchmarks:
        found = paper_configs(name, benchmark=benchmark)
        assert {row: config.criterion.options for row, config in found.items()} == OPTIONS[name]
        detector = {"table3": "retinanet-r101", "table4": "ssd512", "figure7": "ssd512"}.get(name, "retinanet-r50")
        for config in found.values():
            assert (config.detector, config.model.options["test_size"]) == (detector, TEST_SIZES[detector])
            # Section 4.2.3: box regression is turned off, on VOC 2007
            assert (config.criterion.box_weight == 0) == (name == "figure5b")
            splits = TRAINED_ON[benchmark] if name != "figure5b" else "2007_trainval"
            assert config.splits.train == splits
            if detector == "retinanet-r50":
                assert (config.model.options["norm"], config.model.options["anchors_per_cell"]) == ("frozen-bn", 2 * 3)


def test_table_1a_varies_the_batch_of_a_gpu() -> None:
    found = paper_configs("table1a").values()
    assert [(one.batches.size, one.batches.accumulate) for one in found] == [(1, 2), (2, 2), (4, 2), (8, 2)]
    assert not any(one.criterion.rank_over_processes for one in found)


@pytest.mark.parametrize("name", REPRODUCTIONS)
def test_every_reproduction_is_small_by_default(name: str) -> None:
    plan = plan_for(name, Request())
    for variant in plan.variants:
        config = variant.config
        assert config.data == "builtin"
        assert config.detector == ("ssdlite" if name in ("table4", "figure7") else "retinanet-tiny")
        assert config.schedule.length <= 1200
        assert config.batches.size * config.batches.accumulate == 8
        assert config.evaluation.checkpoint == "last"
        assert config.criterion.box_loss == "paper-smooth-l1"
        assert config.criterion.box_weight == (0 if name == "figure5b" else 1)


def test_rows_of_an_ablation_differ_in_one_setting() -> None:
    for name, keys in (
        ("table1a", ["batches.size", "batches.accumulate", "criterion.rank_over"]),
        ("table1b", ["criterion.options"]),
        ("table1c", ["criterion.options"]),
        ("table2", ["loss"]),
        ("figure5b", ["loss", "criterion.options"]),
    ):
        first, *others = [variant.config for variant in plan_for(name, Request()).variants]
        for other in others:
            assert set(differing_keys(first, other)) <= set(keys), name
    rows = {one.name: one.config for one in plan_for("table1a", Request()).variants}
    assert differing_keys(rows["8 images"], rows[EACH_CLASS]) == ["criterion.rank_over"]
    assert EACH_CLASS not in paper_configs("table1a")


def test_tables_and_figures_share_their_runs() -> None:
    def configs(name: str) -> list:
        return [variant.config for variant in plan_for(name, Request()).variants]

    table2 = configs("table2")
    assert configs("figure5a") == table2
    assert configs("figure7") == configs("table4")
    assert all(config in table2 for config in configs("figure6"))
    assert all(config in table2 for config in configs("table3"))
    # Table 1 has one row in common: 8 images, delta 1, interpolated.
    assert configs("table1a")[3] == configs("table1b")[2] == configs("table1c")[1]


class PaperMeasure(Measure):
    """Stands in for the measure of a row."""

    def __init__(self, numbers: Mapping[str, Any]) -> None:
        self.numbers = numbers

    def values(self, run: Run) -> Mapping[str, float | None]:
        seed = run.config.seed
        return {name: one[seed] if isinstance(one, list) else one for name, one in self.numbers.items()}

    def curve(self, run: Run) -> TrainingCurve:
        level = self.values(run).get("AP") or 0.0
        return TrainingCurve(steps=[1, 2, 3, 4], values=[level * part for part in (0.5, 0.8, 0.9, 1.0)])


def results_of(name: str, numbers: Mapping[str, Mapping[str, Any]], **request: Any) -> tuple[Request, Results]:
    """Finished results of two seeds with the given numbers of each row, the same for both seeds or a list."""
    asked = Request(scale="paper", seeds=(0, 1), **request)
    plan, summary = plan_for(name, asked), SimpleNamespace(minutes=1.0, commit="c", split="test")
    variants = [replace(variant, measure=PaperMeasure(numbers[variant.name])) for variant in plan.variants]
    runs = {
        (one.name, seed): Run(config=replace(one.config, seed=seed), folder=Path("run"), summary=summary)  # type: ignore[arg-type]
        for one in variants
        for seed in (0, 1)
    }
    return asked, Results(Plan(variants=variants, seeds=(0, 1)), runs=runs)


# The paper prints no numbers for Figure 5b but the 0.8; the others are as its text describes them.
FIGURE_5B = {"ap": {RANKING_AP: 0.6}, "smooth-ap": {RANKING_AP: 0.02}, "hinge-ap": {RANKING_AP: 0.2}}
PAPER_CLAIMS = {"table1a": 3, "table1b": 3, "table1c": 1, "table2": 3, "figure5a": 1, "figure5b": 4, "figure6": 0,
                "table3": 1, "table4": 3, "figure7": 1}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "benchmark"), [(name, one) for name, entry in REPRODUCTIONS.items() for one in entry.benchmarks]
)
def test_every_claim_holds_on_the_papers_own_numbers(name: str, benchmark: str) -> None:
    numbers: Any = {row.name: row.paper.get(benchmark, {}) for row in REPRODUCTIONS[name].rows}
    if name == "figure5b":
        numbers = FIGURE_5B
    if name != "figure6":  # it shows pictures and claims nothing
        asked, results = results_of(name, numbers, benchmark=benchmark)
        verdicts = page_for(name, asked, results).verdicts
        assert [one.holds for one in verdicts] == [True] * PAPER_CLAIMS[name], verdicts


def test_figure_5b_reports_which_statements_are_reproduced() -> None:
    # The order of the paper, but the approximate gradient converges and the hinge loss ends far from 0.8.
    numbers = {"ap": {RANKING_AP: 0.9}, "smooth-ap": {RANKING_AP: 0.45}, "hinge-ap": {RANKING_AP: 0.5}}
    asked, results = results_of("figure5b", numbers)
    assert [one.holds for one in page_for("figure5b", asked, results).verdicts] == [True, True, False, False]
    # An AP near 0 whose interval reaches below 0 has not converged.
    asked, results = results_of("figure5b", {**FIGURE_5B, "smooth-ap": {RANKING_AP: [0.001, 0.003]}})
    assert page_for("figure5b", asked, results).verdicts[2].holds is True


@pytest.mark.parametrize(
    ("ap", "holds"),
    [
        ([0.5, 0.5], True),
        ([0.45, 0.45], False),  # below focal loss
        ([0.48, 0.483], None),  # at the end: 0.0115 ± 12.7 * 0.0015 = ± 0.019
        # At the end -0.0185 ± 12.7 * 0.0005 = ± 0.0064, below zero by itself. Corrected for 2 snapshots and 3 losses
        # (99.2 % instead of 95 %) it is ± 76.4 * 0.0005 = ± 0.038.
        ([0.451, 0.452], None),
    ],
)
def test_the_verdict_over_snapshots_is_corrected_for_their_number(ap: list[float], holds: bool | None) -> None:
    numbers = {"ap": {"AP": ap}, "focal": {"AP": 0.47}, "ce-ohem": {"AP": 0.4}, "auc": {"AP": 0.3}}
    asked, results = results_of("figure5a", numbers)
    assert [one.holds for one in page_for("figure5a", asked, results).verdicts] == [holds]


def test_tables_on_voc_have_both_kinds_of_ap50() -> None:
    for name in ("table1a", "table1b", "table1c", "table2", "table4"):
        numbers = {row.name: row.paper["voc"] for row in REPRODUCTIONS[name].rows}
        asked, results = results_of(name, numbers)
        assert page_for(name, asked, results).metrics == ("AP", "AP50", "voc_AP50", "AP75")
