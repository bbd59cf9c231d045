"""To be imported by the server of :mod:`processes`: what numba does before the first kernel, a quarter of a second."""

from numba.core.registry import cpu_target

cpu_target.target_context.refresh()
