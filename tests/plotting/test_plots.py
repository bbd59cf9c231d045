"""Plots: well-formed SVG that holds the data it was given, the same each time."""

import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pytest

from aploss.plotting.plots import Series, line_plot, line_style, precision_recall_plot, shorten, thin_out


class Curve(NamedTuple):
    """Precision over recall of a class."""

    recall: Sequence[float]
    precision: Sequence[float]


CURVES = {"cat": Curve([0, 1], [1, 0.5]), "dog": Curve([0, 1], [1, 0.2])}
PLOTS = {
    "line": lambda: line_plot([Series(name="ap", x=[1, 2, 3], y=[0.1, None, 0.3])], title="T"),
    "log": lambda: line_plot(
        [Series(name="a", x=[1, 10, 1e6], y=[1e-6, 1, 3])], log_x=True, log_y=True
    ),
    "precision": lambda: precision_recall_plot(CURVES),
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
    assert PLOTS[name]() == svg


def test_names_of_losses_are_written_out_in_their_colours() -> None:
    names = ("ap", "focal", "ce-ohem", "auc", "rank-sort", "alrp", "smooth-ap", "hinge-ap")
    svg = line_plot([Series(name=name, x=[0, 1], y=[0, 1]) for name in names])
    assert {"AP-loss", "Focal loss", "CE + OHEM", "AUC-loss"} <= set(texts(svg))
    assert all(line_style(name).colour in svg for name in names)


@pytest.mark.parametrize(("y", "seen"), [([0.5], 1), ([0.5, None], 1), ([0.5, 0.6], 0)])
def test_a_single_point_is_seen_and_a_line_needs_no_marks(y: list, seen: int) -> None:
    svg = line_plot([Series(name="ap", x=range(len(y)), y=y)])
    line = re.search(r'<g id="line2d_\d+">(?:(?!</g>).)*?stroke: #0072b2.*', svg, flags=re.DOTALL)
    assert line is not None
    assert line.group().split('<g id="patch_')[0].count("<use ") == seen


@pytest.mark.parametrize("name", ["_hidden", "$x_1$", "<script>alert(1)</script>", "50 % & more", "細胞", "a\nb"])
def test_any_name_is_shown_literally(name: str) -> None:
    svg = precision_recall_plot({name: CURVES["cat"], "other": CURVES["dog"]})
    shown = [" ".join(text.replace("\u200b", "").split()) for text in texts(svg)]
    assert shorten(name) + " 75.0 %" in shown
    assert "<script" not in svg


def test_many_classes_name_only_the_best_and_worst() -> None:
    curves = {f"class {k:02d}": Curve([0, 1], [k / 40, k / 40]) for k in range(40)}
    shown = texts(precision_recall_plot(curves, 0.75))
    named = {text for text in shown if text.startswith("class")}
    assert named == {f"class {k:02d} {100 * k / 40:.1f} %" for k in (0, 1, 2, 37, 38, 39)}
    # the mean is (0 + 1 + ... + 39) / 40 / 40 = 0.4875
    assert {"34 other classes", "mean 48.8 %", "Precision and recall at IoU 0.75"} <= set(shown)


def test_thinning_keeps_means_and_ends_gaps() -> None:
    x, y = np.arange(1000.0), np.where(np.arange(1000) < 500, np.nan, 2.0)
    thin_x, thin_y = thin_out(x, y, most=10)
    np.testing.assert_allclose(thin_x, [49.5 + 100 * k for k in range(10)])
    assert np.isnan(thin_y[:5]).all()
    np.testing.assert_array_equal(thin_y[5:], 2.0)


def test_logarithmic_axes_have_plain_numbers() -> None:
    assert {"100", "1e+06"} <= set(texts(PLOTS["log"]()))
