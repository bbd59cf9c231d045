"""The entries of the paper: its settings at its own scale (Sections 4.1 to 4.3, Appendix 5.1),
and rows that differ in one thing at the small one.
"""

import pytest

from aploss.errors import ConfigError
from aploss.experiments.paper import EACH_CLASS, REPRODUCTIONS, reproduction
from aploss.experiments.plan import runs_of
from aploss.experiments.reproduce import Request, plan_for
from aploss.training import TrainConfig, load_config
from aploss.training.config import differing_keys

PAPER = Request(scale="paper")
DELTA_1 = {"delta": 1.0, "interpolated": True}


def paper_configs(name: str, **request: object) -> dict[str, TrainConfig]:
    asked = Request(scale="paper", **request)  # type: ignore[arg-type]
    return {variant.name: variant.config for variant in plan_for(name, asked).variants}


@pytest.mark.parametrize("name", REPRODUCTIONS)
def test_settings_of_section_4_1(name: str) -> None:
    for benchmark in reproduction(name).benchmarks:
        for row, config in paper_configs(name, benchmark=benchmark).items():
            voc = benchmark == "voc"
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
            assert config.evaluation.split == ("2007_test" if voc else "val"), row
            assert config.criterion.rank_over == "batch"


@pytest.mark.parametrize("name", [name for name in REPRODUCTIONS if name != "figure4b"])
def test_training_splits_are_those_of_the_paper(name: str) -> None:
    for config in paper_configs(name).values():
        assert config.splits.train == "2007_trainval+2012_trainval"


@pytest.mark.parametrize("name", ["table1a", "table1b", "table1c", "table2", "figure4a", "figure5"])
def test_ablations_are_on_resnet_50_at_600_pixels(name: str) -> None:
    for config in paper_configs(name).values():
        assert config.detector == "retinanet-r50"
        assert config.model.options["test_size"] == [600, 1000]
        assert config.model.options["norm"] == "frozen-bn"
        assert config.model.options["anchors_per_cell"] == 2 * 3


def test_table_1a_varies_the_batch_of_a_gpu() -> None:
    found = paper_configs("table1a")
    batches = [(one.batches.size, one.batches.accumulate) for one in found.values()]
    assert batches == [(1, 2), (2, 2), (4, 2), (8, 2)]
    two = paper_configs("table1a", processes=2)
    batches = [(one.batches.size, one.batches.accumulate) for one in two.values()]
    assert batches == [(2, 1), (4, 1), (8, 1), (16, 1)]
    assert all(one.criterion.options == DELTA_1 for one in found.values())
    assert not any(one.criterion.rank_over_processes for one in two.values())


def test_table_1b_varies_delta() -> None:
    options = [one.criterion.options for one in paper_configs("table1b").values()]
    assert [one["delta"] for one in options] == [0.25, 0.5, 1.0, 2.0]
    assert all(one["interpolated"] for one in options)


def test_table_1c_varies_the_interpolation() -> None:
    options = [one.criterion.options for one in paper_configs("table1c").values()]
    assert options == [{"delta": 1.0, "interpolated": False}, DELTA_1]


@pytest.mark.parametrize("benchmark", ["voc", "coco"])
def test_table_2_has_the_losses_with_their_own_settings(benchmark: str) -> None:
    found = {name: one.criterion.options for name, one in paper_configs("table2").items()}
    assert found == {
        "ce-ohem": {"negative_ratio": 3.0},
        "focal": {"alpha": 0.25, "gamma": 2.0},
        "auc": {"delta": 1.0},
        "ap": DELTA_1,
    }


def test_figure_4b_has_no_box_regression_and_trains_on_voc_2007() -> None:
    found = paper_configs("figure4b")
    assert list(found) == ["ap", "smooth-ap", "hinge-ap"]
    assert found["smooth-ap"].criterion.options == {"log_space": True}
    for config in found.values():
        assert config.criterion.box_weight == 0
        assert config.splits.train == "2007_trainval"


@pytest.mark.parametrize("benchmark", ["voc", "coco"])
def test_table_3_is_resnet_101_at_500_pixels(benchmark: str) -> None:
    for config in paper_configs("table3", benchmark=benchmark).values():
        assert config.detector == "retinanet-r101"
        assert config.model.options["test_size"] == [500, 833]
        assert config.criterion.options == DELTA_1


def test_table_4_is_ssd512_with_focal_gamma_1() -> None:
    found = paper_configs("table4")
    for config in found.values():
        assert config.detector == "ssd512"
        assert config.model.options["test_size"] == [512, 512]
    assert found["focal"].criterion.options == {"alpha": 0.25, "gamma": 1.0}


def test_no_learning_rate_is_searched_at_the_papers_scale() -> None:
    for name in REPRODUCTIONS:
        plan = plan_for(name, PAPER)
        assert plan.tuning is None
        assert plan.seeds == (0,)


@pytest.mark.parametrize("name", REPRODUCTIONS)
def test_every_reproduction_is_small_by_default(name: str) -> None:
    plan = plan_for(name, Request())
    for variant in plan.variants:
        config = variant.config
        assert config.data == "builtin"
        assert config.detector == ("ssdlite" if name == "table4" else "retinanet-tiny")
        assert config.schedule.length <= 1200
        assert config.batches.size * config.batches.accumulate == 8
        assert config.evaluation.checkpoint == "last"


def test_rows_of_an_ablation_differ_in_one_setting() -> None:
    for name, keys in (
        ("table1a", ["batches.size", "batches.accumulate", "criterion.rank_over"]),
        ("table1b", ["criterion.options"]),
        ("table1c", ["criterion.options"]),
        ("table2", ["loss"]),
        ("figure4b", ["loss", "criterion.options"]),
    ):
        first, *others = [variant.config for variant in plan_for(name, Request()).variants]
        for other in others:
            assert set(differing_keys(first, other)) <= set(keys), name


def test_tables_and_figures_share_their_runs() -> None:
    def configs(name: str) -> list:
        return [variant.config for variant in plan_for(name, Request()).variants]

    table2 = configs("table2")
    assert configs("figure4a") == table2
    assert all(config in table2 for config in configs("figure5"))
    assert all(config in table2 for config in configs("table3"))
    # Table 1 has one row in common: 8 images, delta 1, interpolated.
    assert configs("table1a")[3] == configs("table1b")[2] == configs("table1c")[1]


def test_table_2_fits_in_an_hour() -> None:
    """On 2 slow cores: 42 images/s, 30 s of validations and 15 s of measuring for a run."""
    plan = plan_for("table2", Request())
    assert plan.tuning is not None
    assert runs_of(plan) == 28  # 4 losses x (3 seeds + 4 short trials)
    seconds = 12 * (plan.variants[0].config.schedule.length * 8 / 42 + 45)
    seconds += 16 * (plan.tuning.steps * 8 / 42 + 15)
    assert seconds / 60 < 60


def test_other_data_takes_the_recipe_for_photographs() -> None:
    config = plan_for("table2", Request(data="data/bccd")).variants[0].config
    assert config.batches.image_size == (240, 320)
    assert config.schedule.length == load_config("bccd-cpu").schedule.length
    assert config.evaluation.split == "test"
    other = Request(data="data/mine", recipe="any-cpu", steps=50, seeds=(4,), tune=False)
    plan = plan_for("table2", other)
    assert plan.variants[0].config.batches.image_size == 320
    assert (plan.variants[0].config.schedule.length, plan.seeds) == (50, (4,))
    assert plan.tuning is None


def test_focal_loss_on_ssd_has_the_papers_gamma() -> None:
    plan = plan_for("table4", Request())
    options = {variant.name: variant.config.criterion.options for variant in plan.variants}
    assert options["focal"] == {"alpha": 0.25, "gamma": 1.0}


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="no 'table5'; choose one of: table1a, table1b"):
        reproduction("table5")


def test_ranking_each_class_alone_differs_in_the_ranking_alone() -> None:
    rows = {one.name: one.config for one in plan_for("table1a", Request()).variants}
    assert rows[EACH_CLASS].criterion.rank_over == "class"
    assert differing_keys(rows["8 images"], rows[EACH_CLASS]) == ["criterion.rank_over"]
    assert EACH_CLASS not in paper_configs("table1a")
