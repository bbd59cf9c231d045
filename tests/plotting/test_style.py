"""Colours and line styles: measured, not just chosen."""

import itertools

import matplotlib
import numpy as np
import pytest
import torch

from aploss.losses import LossTraits, register_loss
from aploss.plotting.plots import PALETTE, PAPER, VARIANT_STYLES, line_style, loss_label, new_plot

LOSSES = ("ap", "focal", "ce-ohem", "auc", "rank-sort", "alrp", "smooth-ap", "hinge-ap")
STYLES = {name: line_style(name) for name in LOSSES}

# Machado, Oliveira and Fernandes (2009), severity 1, applied to linear RGB.
SIGHT = {
    "common": np.eye(3),
    "protanopia": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216],
         [-0.003882, -0.048116, 1.051998]]
    ),
    "deuteranopia": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413],
         [-0.011820, 0.042940, 0.968881]]
    ),
    "tritanopia": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602],
         [0.004733, 0.691367, 0.303900]]
    ),
}  # fmt: skip
TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
WHITE = np.array([0.9505, 1.0, 1.089])


def linear(colour: str) -> np.ndarray:
    values = np.array([int(colour[k : k + 2], 16) for k in (1, 3, 5)]) / 255
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def lab(colour: str, sight: np.ndarray) -> np.ndarray:
    xyz = TO_XYZ @ np.clip(sight @ linear(colour), 0, 1) / WHITE
    root = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * root[1] - 16, 500 * (root[0] - root[1]), 200 * (root[1] - root[2])])


def contrast(colour: str, background: str) -> float:
    light = sorted(float(TO_XYZ[1] @ linear(one)) + 0.05 for one in (colour, background))
    return light[1] / light[0]


@pytest.mark.parametrize("sight", SIGHT)
def test_colours_of_losses_and_of_variants_differ_for_every_kind_of_sight(sight: str) -> None:
    for styles, least in ((STYLES.values(), 15), (VARIANT_STYLES, 9)):  # 2.3 is just noticeable
        for one, other in itertools.combinations([lab(style.colour, SIGHT[sight]) for style in styles], 2):
            assert np.linalg.norm(one - other) > least


def test_every_colour_is_seen_on_its_background() -> None:
    for colour in (*PALETTE, *(style.colour for style in VARIANT_STYLES)):
        assert contrast(colour, PAPER) > 2.1, colour


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


def test_a_registered_loss_without_a_colour_has_always_the_same_style() -> None:
    class Plain(torch.nn.Module):
        traits = LossTraits(label="Plain loss")

    class Coloured(torch.nn.Module):
        traits = LossTraits(colour="#12AB34", marker="*")

    register_loss("style-test-plain")(Plain)
    register_loss("style-test-coloured")(Coloured)
    styles = {line_style("style-test-plain", index) for index in range(6)}
    assert len(styles) == 1
    assert styles < set(VARIANT_STYLES)
    assert loss_label("style-test-plain") == "Plain loss"
    assert line_style("style-test-coloured", 3) == ("#12ab34", "-", "*")
    assert loss_label("style-test-coloured") == "style-test-coloured"


def test_the_style_leaves_global_settings_alone() -> None:
    before = dict(matplotlib.rcParams)
    with matplotlib.rc_context({"font.size": 40.0}), new_plot():
        assert matplotlib.rcParams["svg.fonttype"] == "none"
        assert matplotlib.rcParams["font.size"] == 9.5
    assert dict(matplotlib.rcParams) == before
