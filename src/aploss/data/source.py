"""MOVED"""

from aploss.data.formats import common_split_name  # noqa: F401
