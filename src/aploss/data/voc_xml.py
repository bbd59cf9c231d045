"""MOVED"""

from aploss.data.voc import parse_annotation  # noqa: F401
