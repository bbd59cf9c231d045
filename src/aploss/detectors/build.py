"""Detectors by name."""

import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torchvision.models.detection._utils import BoxCoder

import aploss.detectors.retinanet
import aploss.detectors.ssd  # noqa: F401  # each registers its detectors
from aploss.detectors.criterion import BoxLoss, Criterion, HardBoxes, check_options, make_loss
from aploss.detectors.detector import DETECTORS as DETECTORS  # complete once this module is imported
from aploss.detectors.detector import SETTINGS, Detector, DetectorConfig
from aploss.detectors.labels import Assigner
from aploss.errors import ConfigError
from aploss.losses.traits import traits_of

BOX_CODER_WEIGHTS = (10.0, 10.0, 5.0, 5.0)  # regression targets are divided by .1, .1, .2, .2
DETECTOR_NAMES: tuple[str, ...]  # plugins may add names later, so __getattr__ looks them up


def __getattr__(name: str) -> Any:
    if name == "DETECTOR_NAMES":
        return DETECTORS.names()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def build_detector(
    name: str,
    *,
    class_names: Sequence[str],
    loss: str | nn.Module = "ap",
    loss_options: dict[str, Any] | None = None,
    rank_over: Literal["batch", "image", "class"] = "batch",
    box_loss: BoxLoss | None = None,
    box_weight: float | Literal["balanced"] | None = None,
    assigner: Assigner = "iou",
    hard_boxes: HardBoxes = "ignore",
    weights: str | Path | None = None,
    **options: Any,
) -> Detector:
    """Builds a detector by name, with any classification loss.

    Args:
        name: one of ``DETECTOR_NAMES``.
        class_names: names of the K classes; label k is the k-th.
        loss: one of ``LOSS_NAMES``, or a loss object.
        loss_options: keyword arguments of a loss given by name.
        rank_over, box_loss, box_weight, assigner, hard_boxes: see :class:`~aploss.detectors.criterion.Criterion`.
        weights: initial weights, see :func:`~aploss.detectors.weights.load_weights`. They change the defaults of
            ``options`` to the architecture that the weights were trained with; ResNets get frozen batch norm and two
            frozen stages as in the paper.
        options: options of the architecture, see ``detector_options(name)``, and of detection, see
            :class:`~aploss.detectors.detector.DetectorConfig`.

    Returns:
        The detector in training mode.

    Raises:
        ConfigError: if the detector, the loss or an option does not exist.

    Example:
        >>> detector = build_detector("retinanet-tiny", class_names=["cat", "dog"])
        >>> round(sum(weight.numel() for weight in detector.parameters()) / 1e6, 1)
        1.6
    """
    config_class = DETECTORS.get(name)
    listed = isinstance(class_names, Sequence) and not isinstance(class_names, str)
    if not listed or not class_names or not all(isinstance(one, str) for one in class_names):
        raise ConfigError(f"class_names must be a list of at least one name, got {class_names!r}")
    weights = None if weights == "none" else weights
    if weights is not None:
        options = {**_options_for_weights(config_class, str(weights)), **options}
    check_options(name, options, config_class.option_names())
    config = config_class(**options)
    if isinstance(loss, str):
        with torch.random.fork_rng(devices=[]):  # the initial weights must not depend on the loss
            loss = make_loss(loss, **(loss_options or {}))
    elif loss_options:
        raise ConfigError("loss_options are for a loss given by name; pass them to the loss object instead")
    softmax = traits_of(loss).softmax
    network = config.network(columns=len(class_names) + softmax, softmax=softmax)
    criterion = Criterion(
        loss=loss,
        num_classes=len(class_names),
        box_coder=BoxCoder(BOX_CODER_WEIGHTS),
        rank_over=rank_over,
        box_loss=box_loss,
        box_weight=box_weight,
        assigner=assigner,
        hard_boxes=hard_boxes,
        **network.matching,
    )
    detector = Detector(name=name, class_names=class_names, config=config, network=network, criterion=criterion)
    if weights is not None:
        from aploss.detectors.weights import load_weights

        load_weights(detector, weights)
    return detector


def detector_options(name: str) -> tuple[str, ...]:
    """The names of a detector's options, besides classes, loss and weights."""
    return DETECTORS.get(name).option_names()


def _options_for_weights(config_class: type[DetectorConfig], weights: str) -> dict[str, Any]:
    """Default options for weights: the options of a checkpoint of aploss, otherwise the architecture's."""
    if Path(weights).exists():
        from aploss.detectors.checkpoint import Checkpoint, checkpoint_file, read_torch_file, wrap_untrusted

        file = checkpoint_file(Path(weights))
        # Checkpoints are ZIP files; load_weights reads the other kinds of files, or explains what is wrong with them.
        checkpoint = Checkpoint.from_content(read_torch_file(file), file) if zipfile.is_zipfile(file) else None
        if checkpoint is not None:
            with wrap_untrusted(file):
                own = set(config_class.option_names()) - set(SETTINGS)
                return {option: value for option, value in checkpoint.config.items() if option in own}
    return config_class.options_for_weights(weights)
