"""The benchmarks of ``aploss bench``, one per file, and the peak memory of a process, from Linux's /proc.

``resource.getrusage`` would not do: a child starts with the peak of its parent.
"""

from pathlib import Path

_CLEAR = Path("/proc/self/clear_refs")


def can_measure_peak() -> bool:
    """Whether this system reports the peak memory of a process."""
    return _CLEAR.exists()


def restart_peak() -> int:
    """Resets the peak to the current memory, which is returned in bytes."""
    _CLEAR.write_text("5")
    return _status("VmRSS")


def peak_bytes() -> int:
    """The peak memory since :func:`restart_peak`."""
    return _status("VmHWM")


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1]) * 1024
