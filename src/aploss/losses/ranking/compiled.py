"""Functions compiled by numba, with a cache on disk that may be missing or damaged."""

# mypy: disable-error-code="no-untyped-call"

import logging
import time
from collections.abc import Callable
from functools import cache
from typing import Any

import numba

OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "no_cfunc_wrapper": True}
_log = logging.getLogger("aploss.losses")


class Kernel:
    """A function compiled on its first call and cached on disk.

    A cache that cannot be read or written (full, damaged, of another user) is not used. Most of the time to compile is
    spent on NumPy functions and on functions that call others, so kernels are plain loops over arrays they are given.
    """

    is_announced = False  # whether the notice of the first compilation in this process has been logged

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.is_first_call = function, True
        try:
            self.compiled: Any = numba.njit(cache=True, **OPTIONS)(function)
            self.cached = True
        except RuntimeError as error:  # numba found no writable folder for its cache
            self._disable_cache(error)

    def __call__(self, *arguments: Any) -> Any:
        start = time.perf_counter() if self.is_first_call else 0.0
        try:
            result = self.compiled(*arguments)
        except Exception as error:
            if not self.cached or isinstance(error, numba.core.errors.NumbaError):
                raise
            self._disable_cache(error)
            result = self.compiled(*arguments)
        if self.is_first_call:
            self.is_first_call = False
            if not Kernel.is_announced and (self.compiled.stats.cache_misses or not self.cached):
                Kernel.is_announced = True
                _log.warning(
                    "compiling the ranking losses for this processor, about %.0f seconds; cached for later runs",
                    max(1, 4 * (time.perf_counter() - start)),  # the first kernel takes a fifth of the time of all
                )
        return result

    def _disable_cache(self, error: Exception) -> None:
        self.compiled, self.cached = numba.njit(**OPTIONS)(self.function), False
        _warn_about_cache(f"{type(error).__name__}: {error}")


@cache
def _warn_about_cache(reason: str) -> None:
    _log.warning(
        "numba's cache of compiled functions cannot be used (%s); compiling in every process instead. "
        "Set NUMBA_CACHE_DIR to a writable folder",
        reason,
    )
