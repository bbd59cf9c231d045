"""Colours and line styles of losses and variants."""

import matplotlib
import pytest
import torch

from aploss.losses import LossTraits, register_loss
from aploss.plotting.plots import line_style, loss_label, new_plot
from aploss.registry import Registry

LOSSES = ("ap", "focal", "ce-ohem", "auc", "rank-sort", "alrp", "smooth-ap", "hinge-ap")
STYLES = {name: line_style(name) for name in LOSSES}


def test_losses_can_be_told_apart_without_colour() -> None:
    assert len({str(style.dashes) for style in STYLES.values()}) == len(STYLES)
    assert len({style.marker for style in STYLES.values()}) == len(STYLES)


def test_variants_take_no_colour_of_a_loss() -> None:
    used = {line_style(f"delta {index}", index).colour for index in range(12)}
    assert used.isdisjoint(style.colour for style in STYLES.values())
    assert line_style("focal", 5) == STYLES["focal"]


def test_more_rows_than_colours_differ_in_dashes() -> None:
    styles = [line_style(f"ap batches.size={index}", index) for index in range(30)]
    assert len({(one.colour, str(one.dashes)) for one in styles}) == 30


def test_a_registered_loss_has_the_style_it_declares(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aploss.losses.traits.LOSSES", Registry("loss"))  # forgotten after the test

    class Coloured(torch.nn.Module):
        traits = LossTraits(colour="#12AB34", marker="*")

    register_loss("style-test")(Coloured)
    assert line_style("style-test", 3) == ("#12ab34", "-", "*")
    assert loss_label("style-test") == "style-test"


def test_the_style_leaves_global_settings_alone() -> None:
    before = dict(matplotlib.rcParams)
    with matplotlib.rc_context({"font.size": 40.0}), new_plot():
        assert matplotlib.rcParams["svg.fonttype"] == "none"
        assert matplotlib.rcParams["font.size"] == 9.5
    assert dict(matplotlib.rcParams) == before
