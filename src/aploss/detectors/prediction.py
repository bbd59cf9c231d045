"""MOVED"""

from aploss.detectors.predict import ImageLike, Prediction, image_tensor, predict  # noqa: F401
