"""MOVED"""

from aploss.plotting.style import class_colour, line_style, loss_label  # noqa: F401
