"""Plots: well-formed SVG that holds the data it was given, the same each time."""

import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable

import numpy as np
import pytest

from aploss.reporting import run_plots
from aploss.reporting.comparison_plots import (
    comparison_curves,
    difference_plot,
    mean_and_band,
    spread_plot,
)
from aploss.reporting.drawing import Series, numbers, power_text, thin_out
from aploss.reporting.plots import bar_plot, field_plot, line_plot, scatter_plot
from aploss.reporting.style import LOSS_COLOURS

GRID = np.linspace(-1, 1, 15)
TRAIN = [
    {"step": step, "loss": 2.0 / step, "classification": 1.5 / step, "box": 0.5 / step,
     "lr": 1e-3, "gradient_norm": 1.0 + step}
    for step in range(1, 200)
]  # fmt: skip
VALIDATION = [
    {"step": 100 * k, "seconds": 30.0 * k, "AP": 0.1 * k, "AP50": 0.15 * k, "AP75": 0.12 * k}
    for k in range(1, 6)
]
BINS = [
    {"lower": 0.0, "upper": 0.5, "confidence": 0.2, "precision": 0.3, "count": 80},
    {"lower": 0.5, "upper": 1.0, "confidence": None, "precision": None, "count": 0},
]

PLOTS = {
    "line": lambda: line_plot([Series(name="ap", x=[1, 2, 3], y=[0.1, None, 0.3])], title="T"),
    "log": lambda: line_plot(
        [Series(name="a", x=[1, 10, 1e6], y=[1e-6, 1, 3])], log_x=True, log_y=True
    ),
    "scatter": lambda: scatter_plot([Series(name="a", x=[1, 2], y=[3, 4])], diagonal=True),
    "field": lambda: field_plot(
        GRID, GRID, np.outer(GRID, GRID), arrows=(np.outer(GRID, GRID), np.outer(GRID, GRID)),
        paths=[Series(name="p", x=[-1, 0, 1], y=[0, 0.5, 1])],
    ),
    "bars": lambda: bar_plot(["a", "b"], [0.5, None], errors=[0.1, 0.0]),
    "losses": lambda: run_plots.loss_curves(TRAIN),
    "rate": lambda: run_plots.learning_rate_curve(TRAIN),
    "norm": lambda: run_plots.gradient_norm_curve(TRAIN),
    "AP": lambda: run_plots.ap_curves(VALIDATION),
    "AP over time": lambda: run_plots.ap_curves(VALIDATION, against="minutes"),
    "precision": lambda: run_plots.precision_recall_plot({"cat": ([0, 1], [1, 0.5])}, {"cat": 0.8}),
    "reliability": lambda: run_plots.reliability_diagram(BINS, BINS, 0.2, 0.01),
    "scores": lambda: run_plots.score_histogram([0.9, 0.8], [0.1], threshold=0.5),
    "classes": lambda: run_plots.class_bars({"cat": {"AP": 0.5}, "dog": {"AP": None}}),
    "curves": lambda: comparison_curves(
        {"ap": [([1, 2], [0.1, 0.2]), ([1, 2], [0.2, 0.3])]}, title="T", x_label="step"
    ),
    "spread": lambda: spread_plot({"ap": [1.0, 2.0], "focal": [1.5]}, title="T", x_label="AP"),
    "differences": lambda: difference_plot(
        {"a - b": ([1.0, 2.0], 1.5, -1.0, 4.0)}, title="T", x_label="AP"
    ),
}  # fmt: skip


def texts(svg: str) -> list[str]:
    root = ElementTree.fromstring(svg)
    return ["".join(node.itertext()) for node in root.iter() if node.tag.endswith("}text")]


@pytest.mark.parametrize("name", PLOTS)
def test_every_plot_is_one_well_formed_file_without_dates_or_addresses(name: str) -> None:
    svg = PLOTS[name]()
    assert ElementTree.fromstring(svg).tag == "{http://www.w3.org/2000/svg}svg"
    assert not re.search(r"20\d\d-\d\d-\d\d", svg)
    assert "mathdefault" not in svg
    assert "<image" not in svg


@pytest.mark.parametrize("name", ["line", "field", "scores", "curves"])
def test_the_same_data_gives_the_same_text(name: str) -> None:
    assert PLOTS[name]() == PLOTS[name]()


@pytest.mark.parametrize("draw", [run_plots.loss_curves, run_plots.ap_curves])
def test_a_run_without_rows_gives_empty_axes(draw: Callable[[list], str]) -> None:
    assert ElementTree.fromstring(draw([])) is not None


def test_names_of_losses_are_written_out_in_their_colours() -> None:
    names = list(LOSS_COLOURS)
    svg = line_plot([Series(name=name, x=[0, 1], y=[0, 1]) for name in names])
    assert {"AP-loss", "Focal loss", "CE + OHEM", "AUC-loss"} <= set(texts(svg))
    assert all(colour in svg for colour in LOSS_COLOURS.values())


@pytest.mark.parametrize(
    "name", ["_hidden", "$x_1$", "<script>alert(1)</script>", "50 % & more", "細胞", "a\nb"]
)
def test_any_name_is_shown_literally(name: str) -> None:
    svg = run_plots.precision_recall_plot({name: ([0, 1], [1, 0.5]), "other": ([0, 1], [1, 1])})
    shown = [text.replace("\u200b", "") for text in texts(svg)]
    assert " ".join(name.split()) in [" ".join(text.split()) for text in shown]
    assert "<script" not in svg


def test_many_classes_name_only_the_best_and_worst() -> None:
    names = [f"class {k:02d}" for k in range(40)]
    curves = {name: ([0, 1], [1, k / 40]) for k, name in enumerate(names)}
    svg = run_plots.precision_recall_plot(curves, {name: k / 40 for k, name in enumerate(names)})
    shown = [text for text in texts(svg) if text.startswith("class")]
    assert sorted(shown) == sorted(
        ["class 39 0.975", "class 38 0.950", "class 37 0.925",
         "class 02 0.050", "class 01 0.025", "class 00 0.000"]
    )  # fmt: skip
    assert "34 other classes" in texts(svg)


def test_bars_of_many_classes_stay_on_a_page() -> None:
    svg = run_plots.class_bars({f"class {k:02d}": {"AP": k / 80} for k in range(80)})
    shown = [text for text in texts(svg) if text.startswith("class")]
    assert len(shown) == 24
    assert shown[0] == "class 79"
    assert shown[-1] == "class 00"


def test_a_long_run_gives_a_small_file() -> None:
    rows = [{"step": step, "loss": float(np.sin(step))} for step in range(50_000)]
    assert len(run_plots.loss_curves(rows)) < 80_000


def test_thinning_keeps_means_and_ends_gaps() -> None:
    x, y = np.arange(1000.0), np.where(np.arange(1000) < 500, np.nan, 2.0)
    thin_x, thin_y = thin_out(x, y, most=10)
    np.testing.assert_allclose(thin_x, [49.5 + 100 * k for k in range(10)])
    assert np.isnan(thin_y[:5]).all()
    np.testing.assert_array_equal(thin_y[5:], 2.0)


def test_the_running_mean_of_a_constant_is_that_constant() -> None:
    np.testing.assert_allclose(run_plots._running_mean(np.full(300, 2.5)), 2.5)


def test_numbers_turn_nothing_and_infinity_into_gaps() -> None:
    np.testing.assert_array_equal(numbers([None, 1, float("-inf")]), [np.nan, 1.0, np.nan])


@pytest.mark.parametrize(
    ("value", "text"), [(0.0, "0"), (0.001, "0.001"), (1e-7, "10⁻⁷"), (20.0, "20"), (1e5, "10⁵")]
)
def test_numbers_beside_logarithmic_axes(value: float, text: str) -> None:
    assert power_text(value) == text


def test_bands_are_means_and_deviations_where_all_seeds_are_known() -> None:
    x, mean, deviation = mean_and_band(
        [([0, 2, 4], [0.0, 2.0, 4.0]), ([1, 3, 5], [3.0, 5.0, 7.0]), ([], [])]
    )
    np.testing.assert_array_equal(x, [1, 2, 3, 4])
    np.testing.assert_allclose(mean, [2, 3, 4, 5])  # of x and x + 2
    np.testing.assert_allclose(deviation, np.std([0, 2], ddof=1))


def test_one_seed_has_no_band() -> None:
    _, mean, deviation = mean_and_band([([1, 2], [0.5, None])])
    np.testing.assert_array_equal(mean, [0.5])
    np.testing.assert_array_equal(deviation, [0.0])
