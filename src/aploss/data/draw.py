"""MOVED"""

from aploss.plotting.pictures import as_picture, contact_sheet, draw_boxes  # noqa: F401
