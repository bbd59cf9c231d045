"""Detectors by name."""

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

from torch import nn
from torchvision.models.detection._utils import BoxCoder

from aploss.detectors.criterion import Criterion
from aploss.detectors.detector import SETTINGS, Detector
from aploss.detectors.losses_by_name import make_loss, takes_background_column
from aploss.detectors.retinanet import retinanet, retinanet_tiny
from aploss.detectors.ssd import ssd300, ssd512
from aploss.detectors.ssdlite import ssdlite
from aploss.errors import ConfigError

__all__ = ["DETECTOR_NAMES", "build_detector", "detector_options"]

BOX_CODER_WEIGHTS = (10.0, 10.0, 5.0, 5.0)  # regression targets are divided by .1, .1, .2, .2
_BUILDERS: dict[str, Callable[..., Detector]] = {
    "retinanet-tiny": retinanet_tiny,
    "retinanet-r18": partial(retinanet, depth=18),
    "retinanet-r34": partial(retinanet, depth=34),
    "retinanet-r50": partial(retinanet, depth=50),
    "retinanet-r101": partial(retinanet, depth=101),
    "ssd300": ssd300,
    "ssd512": ssd512,
    "ssdlite": ssdlite,
}
DETECTOR_NAMES: tuple[str, ...] = tuple(_BUILDERS)
_SET_BY_US = ("depth", "class_names", "make_criterion", "columns", "options")


def build_detector(
    name: str,
    *,
    class_names: Sequence[str],
    loss: str | nn.Module = "ap",
    loss_options: dict[str, Any] | None = None,
    rank_over: Literal["batch", "image"] = "batch",
    box_loss: Literal["smooth-l1", "giou"] | None = None,
    box_weight: float | Literal["balanced"] | None = None,
    weights: str | Path | None = None,
    **options: Any,
) -> Detector:
    """A detector by name, with any classification loss.

    Args:
        name: one of ``DETECTOR_NAMES``.
        class_names: names of the K classes; label k is the k-th.
        loss: one of ``LOSS_NAMES``, or a loss object.
        loss_options: keyword arguments of a loss given by name.
        rank_over: rank the scores of the whole batch together, or of each image alone.
        box_loss: see :class:`~aploss.detectors.criterion.Criterion`.
        box_weight: see :class:`~aploss.detectors.criterion.Criterion`.
        weights: see :func:`~aploss.detectors.weights.load_weights`; none by default. Where options
            are left open, the architecture is then the one that the weights were trained with, and
            ResNets have frozen batch norm as in the paper and two frozen first stages.
        options: of the architecture, see ``detector_options(name)``; and how detections are made:
            ``test_size``, ``score_threshold``, ``topk_per_level``, ``nms_iou``,
            ``detections_per_image``, ``channels_last``.

    Returns:
        The detector, in training mode.

    Raises:
        ConfigError: if there is no such detector, loss or option.

    Example:
        >>> detector = build_detector("retinanet-tiny", class_names=["cat", "dog"])
        >>> round(sum(weight.numel() for weight in detector.parameters()) / 1e6, 1)
        1.6
    """
    _check(name, class_names, options)
    weights = None if weights == "none" else weights
    if isinstance(loss, str):
        loss = make_loss(loss, **(loss_options or {}))
    elif loss_options:
        raise ConfigError("loss_options go with a loss by name; set the options of a loss object")
    if weights is not None:
        options = {**_defaults_for_weights(name, str(weights)), **options}
    detector = _BUILDERS[name](
        class_names=class_names,
        columns=len(class_names) + takes_background_column(loss),
        make_criterion=partial(
            Criterion,
            loss=loss,
            num_classes=len(class_names),
            box_coder=BoxCoder(BOX_CODER_WEIGHTS),
            rank_over=rank_over,
            box_loss=box_loss,
            box_weight=box_weight,
        ),
        config={"name": name, **options},
        **options,
    )
    if weights is not None:
        from aploss.detectors.weights import load_weights

        load_weights(detector, weights)
    return detector


def detector_options(name: str) -> tuple[str, ...]:
    """Names of the options that a detector takes besides classes, losses and weights."""
    parameters = inspect.signature(_BUILDERS[name]).parameters
    own = [parameter for parameter in parameters if parameter not in _SET_BY_US]
    return tuple(dict.fromkeys([*own, *SETTINGS]))


def _check(name: str, class_names: Sequence[str], options: dict[str, Any]) -> None:
    if name not in _BUILDERS:
        raise ConfigError(f"there is no detector {name!r}; choose one of: {', '.join(_BUILDERS)}")
    if not class_names:
        raise ConfigError("class_names is empty: a detector needs at least one class")
    for option in options:
        if option not in detector_options(name):
            raise ConfigError(
                f"{name} has no option {option!r}; it has: {', '.join(detector_options(name))}"
            )


def _defaults_for_weights(name: str, weights: str) -> dict[str, Any]:
    """Options under which weights fit: those they were trained with, the paper's for ResNets."""
    if Path(weights).exists():
        from aploss.detectors.checkpoint_io import checkpoint_file, read_checkpoint

        content = read_checkpoint(checkpoint_file(Path(weights)))
        if isinstance(content, dict) and "detector" in content:
            own = set(detector_options(name)) - set(SETTINGS)
            config = content["detector"]["config"]
            return {option: config[option] for option in config if option in own}
    if name == "ssdlite":
        backbone_alone = weights.startswith(("imagenet", "MobileNet_"))
        return {"norm": "batch", "reduced_tail": not backbone_alone}
    if name.startswith("retinanet-r"):
        frozen = {"norm": "frozen-bn", "trainable_stages": 3}
        of_heads = {"anchors_per_cell": 9, "anchor_grid": "torchvision"}
        return {**frozen, **of_heads} if weights.startswith(("coco", "RetinaNet_")) else frozen
    return {}
