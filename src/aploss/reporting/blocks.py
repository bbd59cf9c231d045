"""MOVED"""

from aploss.reports.page import (  # noqa: F401
    DASH,
    Block,
    Cell,
    Code,
    Details,
    Fact,
    Facts,
    Figures,
    Legend,
    Missing,
    Picture,
    Pictures,
    Section,
    Table,
    Text,
    Verdict,
    show,
)
from aploss.reports.page import SvgFigure as Figure  # noqa: F401
