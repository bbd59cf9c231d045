"""Plans of comparisons: their rows, and a comparison in two processes."""

import json
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
from tiny_runs import start_two

from aploss.errors import ConfigError
from aploss.experiments.compare import comparison_plan, default_out
from aploss.training.config import differing_keys

PROGRAM = """
os.environ |= values["environment"]
from aploss.experiments.compare import compare, comparison_plan

tiny = {
    "data": values["data"], "device": "cpu", "splits": {"train": "train", "validation": "val"},
    "batches": {"size": 4, "image_size": 64, "workers": 0},
    "model": {"options": {"test_size": [64, 64]}}, "evaluation": {"split": "test"},
}
plan = comparison_plan(["ap", "focal"], recipe="scratch-cpu", seeds=[0], changes=tiny, steps=2,
                       validations=1)
results = compare(plan, values["out"])
assert results.complete
assert all(run.summary.processes == 2 for run in results.runs.values())
"""


def test_rows_differ_only_in_the_loss_and_its_section_of_the_recipe() -> None:
    first, *others = comparison_plan(["ap", "focal", "ce-ohem"], recipe="demo", seeds=[0]).variants
    assert all(differing_keys(first.config, other.config) == ["loss"] for other in others)
    plan = comparison_plan(["ap", "focal"], recipe="voc-ssd512", seeds=[0])
    assert plan.variants[1].config.criterion.options == {"alpha": 0.25, "gamma": 1.0}


def test_a_loss_with_options_has_its_own_row() -> None:
    plan = comparison_plan(["ap", "ap:delta=0.50", "focal:gamma=2"], recipe="voc-ssd512", seeds=[0])
    assert [variant.name for variant in plan.variants] == ["ap", "ap:delta=0.5", "focal:gamma=2"]
    options = [variant.config.criterion.options for variant in plan.variants]
    # interpolated and alpha are the recipe's
    assert [one.get("delta") for one in options] == [1.0, 0.5, None]
    assert options[1:] == [{"delta": 0.5, "interpolated": True}, {"alpha": 0.25, "gamma": 2}]


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
        (["ap", "ap:delta=1"], {}, "ap:delta=1"),
        (["ap"], {"learning_rate": [1]}, "optimizer.learning_rate"),
        (["ap"], {"batches.size": [4, 0]}, "batches.size"),
        (["ap"], {"detector": ["retinanet-tiny", "retinanet-tini"]}, "retinanet-tiny"),
        (["ap"], {"model.options.normm": ["x"]}, "normm"),
        (["ap"], {"loss": ["focal"]}, "--losses"),
        (["ap"], {"data": ["a", "b"]}, "data"),
        (["ap"], {"validation.every": [1, 2]}, "validation.every"),
    ],
)
def test_a_wrong_row_is_rejected_before_anything_is_trained(losses: list[str], vary: dict, part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        comparison_plan(losses, recipe="demo", seeds=[0], vary=vary)
    assert part in str(caught.value)


def test_the_folder_of_a_comparison_has_a_valid_and_unique_name() -> None:
    vary = {"optimizer.learning_rate": [0.001 * step for step in range(1, 9)]}
    first = default_out(comparison_plan(["ap", "focal"], recipe="demo", seeds=[0], vary=vary)).name
    vary["optimizer.learning_rate"][-1] = 0.5
    second = default_out(comparison_plan(["ap", "focal"], recipe="demo", seeds=[0], vary=vary)).name
    assert first != second
    assert len(first) < 200
    assert first.startswith("compare-builtin-retinanet-tiny-ap-optimizer.learning_rate0.001-")


def test_a_comparison_in_two_processes_finishes(
    spawn: Callable[..., BaseProcess], pictures: Path, tmp_path: Path
) -> None:
    processes = start_two(spawn, PROGRAM, tmp_path, data=str(pictures), out=str(tmp_path / "page"))
    for process in processes:
        process.join(timeout=300)
    assert [process.exitcode for process in processes] == [0, 0], (tmp_path / "0.log").read_text()
    found = json.loads((tmp_path / "page" / "results.json").read_text())
    assert found["complete"]
    assert [row["values"]["AP"][0] is not None for row in found["rows"]] == [True, True]
