"""MOVED"""

from aploss.training.splits import suggest_image_sizes, suggest_recipe  # noqa: F401
