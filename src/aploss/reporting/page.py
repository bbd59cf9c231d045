"""MOVED"""

from aploss.reports.page import embed_svg, render_page, write_page  # noqa: F401
