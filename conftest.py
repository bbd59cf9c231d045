"""Which modules of ``src`` pytest imports for their doctests: the Triton kernels only where Triton is installed."""

from importlib.util import find_spec

collect_ignore = [] if find_spec("triton") else ["src/aploss/losses/ranking/triton"]
