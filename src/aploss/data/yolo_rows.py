"""One row of a YOLO label file."""

from math import isfinite

from aploss.data.problems import ProblemError
from aploss.data.records import number

__all__ = ["parse_row"]

_FRACTION_LIMIT = 1.01  # above it a number is one of pixels, not a rounded fraction
_SNAP_PIXELS = 1e-6  # rounding of cx ± w/2 beside the image's border


def parse_row(
    row: str, size: tuple[int, int], *, where: tuple[str, int]
) -> tuple[int, tuple[float, float, float, float]]:
    """Class id and corners in pixels of a row.

    Args:
        row: ``class cx cy w h``, or ``class x1 y1 x2 y2 x3 y3 ...`` for a polygon, of which the
            enclosing box is taken; all as fractions of the image's width and height.
        size: Width and height of the image.
        where: File and line, for messages.

    Raises:
        ProblemError: It is neither, or the numbers are not fractions.

    Example:
        >>> parse_row("2 0.5 0.5 0.25 0.5", (640, 480), where=("a.txt", 1))
        (2, (240.0, 120.0, 400.0, 360.0))
    """
    file, line = where

    def fault(kind: str, message: str) -> ProblemError:
        return ProblemError(kind, file, f"line {line}: {message}")

    first, *rest = row.split()
    if len(rest) != 4 and (len(rest) < 6 or len(rest) % 2):
        raise fault("bad-row", f"a class and 4 numbers (or 3 or more points) expected: {row:.80}")
    try:
        values = [number(text) for text in rest]
    except ValueError as error:
        raise fault("non-numeric-coordinate", str(error)) from None
    if not all(map(isfinite, values)):
        raise fault("non-finite-coordinate", f"a NaN or infinite coordinate: {row:.80}")
    try:
        class_id = int(first) if first.lstrip("-").isdigit() else _whole(first)
    except ValueError:
        raise fault("bad-row", f"the class must be a whole number, got {first!r}") from None
    if max(values) > _FRACTION_LIMIT:
        raise fault("not-normalised", f"coordinates must be fractions of the image size: {row:.80}")
    return class_id, _corners(values, size)


def _whole(text: str) -> int:
    value = float(text)
    if not value.is_integer():
        raise ValueError
    return int(value)


def _corners(values: list[float], size: tuple[int, int]) -> tuple[float, float, float, float]:
    width, height = size
    if len(values) == 4:
        x, y, w, h = values
        left, top, right, bottom = x - w / 2, y - h / 2, x + w / 2, y + h / 2
    else:
        left, top = min(values[::2]), min(values[1::2])
        right, bottom = max(values[::2]), max(values[1::2])
    return (
        _snap(left * width, width),
        _snap(top * height, height),
        _snap(right * width, width),
        _snap(bottom * height, height),
    )


def _snap(value: float, end: int) -> float:
    for border in (0.0, float(end)):
        if abs(value - border) < _SNAP_PIXELS:
            return border
    return value
