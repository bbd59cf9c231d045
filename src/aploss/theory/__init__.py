"""The paper's theorems and claims, each put to the test: Appendices 1-4 and Figures 1, 2 and 4."""

from collections.abc import Callable

from aploss.theory import convergence, figures, inseparable
from aploss.theory.study import Study, write_studies

__all__ = ["STUDIES", "Study", "write_studies"]

STUDIES: dict[str, Callable[[int], Study]] = {
    "convergence": convergence.convergence,
    "smoothed-failure": convergence.smoothed_failure,
    "inseparable": inseparable.inseparable,
    "consistency": convergence.consistency,
    "imbalance": figures.imbalance,
    "method": figures.method,
}
