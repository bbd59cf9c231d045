"""The detector of a run with the weights it starts from, the same for every loss."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from aploss.detectors.build import build_detector
from aploss.detectors.detector import Detector
from aploss.errors import ConfigError
from aploss.training.config import TrainConfig

__all__ = ["make_detector", "silent_weights"]


def make_detector(config: TrainConfig, class_names: tuple[str, ...]) -> Detector:
    """The detector of a config with its initial weights.

    They follow from the seed alone: runs that differ in the loss start from the same weights,
    wherever the shapes are the same (a softmax loss has one column more).
    """
    detector = _build(config, class_names, config.loss)
    if config.loss != TrainConfig.loss:
        with silent_weights():  # what was loaded has been said
            reference = _build(config, class_names, TrainConfig.loss).state_dict()
        own = detector.state_dict()
        shared = {k: v for k, v in reference.items() if k in own and own[k].shape == v.shape}
        detector.load_state_dict({**own, **shared})
    return detector


def _build(config: TrainConfig, class_names: tuple[str, ...], loss: str) -> Detector:
    criterion = config.criterion
    is_own = loss == config.loss
    torch.manual_seed(config.seed)
    try:
        return build_detector(
            config.detector,
            class_names=class_names,
            loss=loss,
            loss_options=criterion.options if is_own else None,
            rank_over=criterion.rank_over,
            box_loss=criterion.box_loss,  # type: ignore[arg-type]
            box_weight=criterion.box_weight if is_own else None,
            weights=config.model.weights,
            **config.model.options,
        )
    except TypeError as error:
        raise ConfigError(f"model.options: {error}") from error


@contextmanager
def silent_weights(silent: bool = True) -> Iterator[None]:
    """Keeps to itself what of the start weights was loaded."""
    logger = logging.getLogger("aploss.detectors.weights")
    before = logger.disabled
    logger.disabled = before or silent
    try:
        yield
    finally:
        logger.disabled = before
