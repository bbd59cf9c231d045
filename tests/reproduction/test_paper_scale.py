"""The paper's scale has the paper's settings: Section 4.1, 4.2, 4.3 and Appendix 5.1."""

import pytest

from aploss.errors import ConfigError
from aploss.reproduction.registry import REPRODUCTIONS, reproduction
from aploss.reproduction.reproduce import check_time, describe_plan, plan_for
from aploss.reproduction.request import Request
from aploss.training.config import TrainConfig

PAPER = Request(scale="paper")
DELTA_1 = {"delta": 1.0, "interpolated": True}


def configs(name: str, **request: object) -> dict[str, TrainConfig]:
    asked = Request(scale="paper", **request)  # type: ignore[arg-type]
    return {variant.name: variant.config for variant in reproduction(name).plan(asked).variants}


@pytest.mark.parametrize("name", REPRODUCTIONS)
def test_settings_of_section_4_1(name: str) -> None:
    for benchmark in reproduction(name).benchmarks:
        for row, config in configs(name, benchmark=benchmark).items():
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
    for config in configs(name).values():
        assert config.splits.train == "2007_trainval+2012_trainval"


@pytest.mark.parametrize("name", ["table1a", "table1b", "table1c", "table2", "figure4a", "figure5"])
def test_ablations_are_on_resnet_50_at_600_pixels(name: str) -> None:
    for config in configs(name).values():
        assert config.detector == "retinanet-r50"
        assert config.model.options["test_size"] == [600, 1000]
        assert config.model.options["norm"] == "frozen-bn"
        assert config.model.options["anchors_per_cell"] == 2 * 3


def test_table_1a_varies_the_batch_of_a_gpu() -> None:
    found = configs("table1a")
    batches = [(one.batches.size, one.batches.accumulate) for one in found.values()]
    assert batches == [(1, 2), (2, 2), (4, 2), (8, 2)]
    two = configs("table1a", processes=2)
    batches = [(one.batches.size, one.batches.accumulate) for one in two.values()]
    assert batches == [(2, 1), (4, 1), (8, 1), (16, 1)]
    assert all(one.criterion.options == DELTA_1 for one in found.values())
    assert not any(one.criterion.rank_over_processes for one in two.values())


def test_table_1b_varies_delta() -> None:
    options = [one.criterion.options for one in configs("table1b").values()]
    assert [one["delta"] for one in options] == [0.25, 0.5, 1.0, 2.0]
    assert all(one["interpolated"] for one in options)


def test_table_1c_varies_the_interpolation() -> None:
    options = [one.criterion.options for one in configs("table1c").values()]
    assert options == [{"delta": 1.0, "interpolated": False}, DELTA_1]


@pytest.mark.parametrize("benchmark", ["voc", "coco"])
def test_table_2_has_the_losses_with_their_own_settings(benchmark: str) -> None:
    found = {name: one.criterion.options for name, one in configs("table2").items()}
    assert found == {
        "ce-ohem": {"negative_ratio": 3.0},
        "focal": {"alpha": 0.25, "gamma": 2.0},
        "auc": {"delta": 1.0},
        "ap": DELTA_1,
    }


def test_figure_4b_has_no_box_regression_and_trains_on_voc_2007() -> None:
    found = configs("figure4b")
    assert list(found) == ["ap", "smooth-ap", "hinge-ap"]
    assert found["smooth-ap"].criterion.options == {"log_space": True}
    for config in found.values():
        assert config.criterion.box_weight == 0
        assert config.splits.train == "2007_trainval"


@pytest.mark.parametrize("benchmark", ["voc", "coco"])
def test_table_3_is_resnet_101_at_500_pixels(benchmark: str) -> None:
    for config in configs("table3", benchmark=benchmark).values():
        assert config.detector == "retinanet-r101"
        assert config.model.options["test_size"] == [500, 833]
        assert config.criterion.options == DELTA_1


def test_table_4_is_ssd512_with_focal_gamma_1() -> None:
    found = configs("table4")
    for config in found.values():
        assert config.detector == "ssd512"
        assert config.model.options["test_size"] == [512, 512]
    assert found["focal"].criterion.options == {"alpha": 0.25, "gamma": 1.0}


def test_no_learning_rate_is_searched_at_the_papers_scale() -> None:
    for name in REPRODUCTIONS:
        plan = reproduction(name).plan(PAPER)
        assert plan.tuning is None
        assert plan.seeds == (0,)


def test_settings_of_the_paper_cannot_be_changed() -> None:
    for wrong in ({"steps": 10}, {"recipe": "demo"}):
        with pytest.raises(ConfigError, match="goes with --scale small"):
            Request(scale="paper", **wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="1 or 2 processes"):
        Request(scale="paper", processes=4)
    with pytest.raises(ConfigError, match="table1a is in the paper for voc only"):
        plan_for("table1a", Request(scale="paper", benchmark="coco"))


class TestTime:
    @pytest.fixture(autouse=True)
    def fast_clock(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("aploss.reproduction.estimate.seconds_per_image", lambda config: 5.0)

    def test_on_a_cpu_it_is_refused_with_an_estimate(self) -> None:
        request = Request(scale="paper", data="VOCdevkit", device="cpu")
        with pytest.raises(ConfigError) as caught:
            check_time("table2", request, print, start_anyway=False)
        # 4 losses x 160 epochs x 16551 images x 5 s = 52,963,200 s = 613 days
        assert str(caught.value) == (
            "table2 at the paper's scale: 4 trainings of retinanet-r50, about 613 days on this "
            "cpu; use a GPU, --scale small, or --yes to start anyway"
        )

    def test_who_insists_may_start_with_data(self) -> None:
        said: list[str] = []
        request = Request(scale="paper", device="cpu")
        with pytest.raises(ConfigError, match="needs --data with the folder of VOCdevkit"):
            check_time("table2", request, said.append, start_anyway=True)
        request = Request(scale="paper", device="cpu", data="VOCdevkit")
        check_time("table2", request, said.append, start_anyway=True)
        assert "613 days" in said[0]

    def test_the_small_scale_is_never_refused(self) -> None:
        check_time("table2", Request(device="cpu"), print, start_anyway=False)

    def test_runs_that_rows_share_are_counted_once(self) -> None:
        text = describe_plan("table3", Request(scale="paper", device="cpu"))
        assert "1 trainings of retinanet-r101" in text

    def test_the_plan_shows_settings_and_differences(self) -> None:
        text = describe_plan("table1b", Request(scale="paper", device="cpu"))
        assert "delta 2: criterion.options = {'delta': 2.0, 'interpolated': True}" in text
        assert "learning_rate: 0.001" in text
        assert "seeds: 0\n" in text
