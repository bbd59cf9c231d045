"""Every loss as a module: the options of its function, which its constructor checks and its repr shows."""

from inspect import signature

import pytest
import torch
from ranking_cases import random_boxes

import aploss.losses
from aploss.losses.traits import LOSSES

# The function, options that are not the default ones, and one that is out of range.
MODULES = {
    "ap": ("ap_loss", {"delta": 0.5, "interpolated": False}, {"delta": -1}),
    "auc": ("auc_loss", {"delta": 0.5}, {"delta": -1}),
    "rank-sort": ("rank_sort_loss", {"delta": 0.2}, {"delta": -0.5}),
    "alrp": ("alrp_loss", {"delta": 0.2}, {"delta": 1e-9}),
    "iou-ap": ("iou_ap_loss", {"delta": 0.5, "thresholds": 3, "interpolated": True}, {"thresholds": 0}),
    "focal": ("focal_loss", {"alpha": 0.4, "gamma": 1.0}, {"alpha": 1.5}),
    "vfl": ("varifocal_loss", {"alpha": 0.4, "gamma": 3.0}, {"gamma": -1.0}),
    "qfl": ("quality_focal_loss", {"beta": 3.0}, {"beta": -1.0}),
    "mal": ("matchability_aware_loss", {"gamma": 3.0, "alpha": 0.5}, {"gamma": -1.0}),
    "ia-bce": ("iou_aware_bce_loss", {"alpha": 0.4, "gamma": 3.0}, {"gamma": -1.0}),
    "ce-ohem": ("ohem_cross_entropy", {"negative_ratio": 2.0}, {"negative_ratio": -1}),
    "smooth-ap": ("smooth_ap_loss", {"temperature": 0.5, "log_space": True, "eps": 0.1}, {"eps": 0}),
}


@pytest.mark.parametrize("name", MODULES)
def test_module_has_the_options_of_the_function(name):
    function, options, wrong = MODULES[name]
    kind, function = LOSSES.get(name), getattr(aploss.losses, function)
    scores, targets = random_boxes()
    if kind.traits.positive_targets != "iou":
        targets = targets.ceil().long()
    arguments = {"alrp": (scores, targets, torch.ones(30)), "ce-ohem": (scores, targets[:, 0])}
    given = arguments.get(name, (scores, targets))
    module = kind(**options)
    assert module(*given) == function(*given, **options)
    assert repr(module) == f"{kind.__name__}({', '.join(f'{key}={value}' for key, value in options.items())})"
    for parameter in signature(kind).parameters:
        assert hasattr(module, parameter)
    with pytest.raises(ValueError, match=next(iter(wrong))):
        kind(**wrong)
