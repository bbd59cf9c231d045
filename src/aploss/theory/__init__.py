"""The paper's theorems and claims, each put to the test: Appendices 1-4 and Figures 1, 2 and 4."""

from collections.abc import Callable

from aploss.theory import consistency, convergence, imbalance, inseparable, method, smoothed_failure
from aploss.theory.study import Study, write_index, write_study

__all__ = ["STUDIES", "Study", "write_index", "write_study"]

STUDIES: dict[str, Callable[[int], Study]] = {
    "convergence": convergence.convergence,
    "smoothed-failure": smoothed_failure.smoothed_failure,
    "inseparable": inseparable.inseparable,
    "consistency": consistency.consistency,
    "imbalance": imbalance.imbalance,
    "method": method.method,
}
