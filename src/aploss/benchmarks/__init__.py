"""What ``aploss bench`` measures, a file per benchmark; and the peak memory of a process, as Linux's /proc tells it.

Not that of ``resource.getrusage``: a child starts with the peak of its parent there.
"""

from pathlib import Path

_CLEAR = Path("/proc/self/clear_refs")


def can_measure_peak() -> bool:
    """Whether this system tells."""
    return _CLEAR.exists()


def restart_peak() -> int:
    """Lets the peak start again from what is held now, in bytes."""
    _CLEAR.write_text("5")
    return _status("VmRSS")


def peak_bytes() -> int:
    """The most that was held since :func:`restart_peak`."""
    return _status("VmHWM")


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1]) * 1024
