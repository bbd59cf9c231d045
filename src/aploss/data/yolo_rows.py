"""MOVED"""

from aploss.data.yolo import parse_row  # noqa: F401
