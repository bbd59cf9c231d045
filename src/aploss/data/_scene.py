"""MOVED"""

from aploss.data.scenes import CLASS_NAMES, draw_scene  # noqa: F401
