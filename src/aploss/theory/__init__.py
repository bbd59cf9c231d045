"""The paper's theorems and claims, each put to the test: Appendices 1 to 4 and Figures 1, 2 and 4."""

from collections.abc import Callable

from aploss.theory import appendices, figures
from aploss.theory.study import Study, write_studies

__all__ = ["STUDIES", "Study", "write_studies"]

STUDIES: dict[str, Callable[[int], Study]] = {
    "convergence": appendices.convergence,
    "smoothed-failure": appendices.smoothed_failure,
    "inseparable": appendices.inseparable,
    "consistency": appendices.consistency,
    "imbalance": figures.imbalance,
    "method": figures.method,
}
