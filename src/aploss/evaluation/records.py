"""Columns out of lists of JSON records, with an error that names the entry that is wrong."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from aploss.errors import DataError

__all__ = ["box_column", "flag_column", "identifier_column", "number_column", "only_known"]


def identifier_column(records: Sequence[Any], key: str, where: str) -> np.ndarray:
    """The integers under ``key``, int64 [n].

    Args:
        records: dicts of a JSON file.
        key: the key every record must have.
        where: name of the list in messages, such as ``"annotations"``.

    Raises:
        DataError: a record has no such key, or a value that is no integer.

    Example:
        >>> identifier_column([{"id": 3}, {"id": 5.0}], "id", "images")
        array([3, 5])
    """
    values = _values(records, key, where)
    column = _as_array(values)
    if column.ndim == 1 and column.dtype == np.int64:
        return column
    _check_each(values, key, where, _is_integer, "an integer")
    return np.array([int(value) for value in values], dtype=np.int64)  # some tools write 3.0 for 3


def number_column(records: Sequence[Any], key: str, where: str) -> np.ndarray:
    """The finite numbers under ``key``, float64 [n]. Raises like :func:`identifier_column`."""
    values = _values(records, key, where)
    column = _as_array(values)
    if column.ndim == 1 and column.dtype.kind in "iuf" and np.all(np.isfinite(column)):
        return column.astype(np.float64)
    _check_each(values, key, where, _is_number, "a finite number")
    return np.array([float(value) for value in values])


def flag_column(records: Sequence[Any], key: str, where: str) -> np.ndarray:
    """The 0/1 flags under ``key``, absent means 0, bool [n]. Raises ``DataError`` for others."""
    values = [record.get(key, 0) or 0 for record in records]
    _check_each(values, key, where, lambda value: value in (0, 1), "0 or 1")
    return np.array(values, dtype=bool)


def box_column(records: Sequence[Any], where: str) -> np.ndarray:
    """The ``bbox`` entries ``[x, y, width, height]``, float64 [n, 4].

    Raises:
        DataError: a record without ``bbox``, or one that is not four finite numbers, or whose
            width or height is negative (corners written where sizes belong).
    """
    values = _values(records, "bbox", where)
    boxes = _as_array(values) if values else np.zeros((0, 4))
    if boxes.ndim != 2 or boxes.shape[1] != 4 or boxes.dtype.kind not in "iuf":
        _check_each(values, "bbox", where, _is_box, "[x, y, width, height]")
        boxes = np.array([[float(number) for number in box] for box in values])
    boxes = boxes.astype(np.float64)
    if not np.all(np.isfinite(boxes)):
        _check_each(values, "bbox", where, _is_box, "four finite numbers")
    negative = np.flatnonzero((boxes[:, 2:] < 0).any(axis=1))
    if negative.size:
        raise DataError(
            f"{where}[{negative[0]}]: 'bbox' has a negative width or height: "
            f"{_shown(values[negative[0]])}; it must be [x, y, width, height]"
        )
    return boxes


def only_known(column: np.ndarray, known: np.ndarray, what: str, where: str) -> None:
    """Raises ``DataError`` for the first value of ``column`` that is not in ``known``."""
    unknown = np.flatnonzero(~np.isin(column, known))
    if unknown.size:
        first = unknown[0]
        more = f" (and {unknown.size - 1} more entries)" if unknown.size > 1 else ""
        raise DataError(
            f"{where}[{first}]: {what} {column[first]} is not in the annotations' list{more}"
        )


def _values(records: Sequence[Any], key: str, where: str) -> list[Any]:
    try:
        return [record[key] for record in records]
    except (KeyError, TypeError, IndexError):
        pass
    for index, record in enumerate(records):
        if not isinstance(record, dict):
            raise DataError(f"{where}[{index}] is {_shown(record)}, expected an object with keys")
        if key not in record:
            raise DataError(f"{where}[{index}] has no '{key}'")
    raise AssertionError("a record that cannot be indexed was not found again")


def _as_array(values: list[Any]) -> np.ndarray:
    try:
        return np.asarray(values)
    except ValueError:  # lists of different lengths
        return np.zeros((), dtype=object)


def _check_each(
    values: list[Any], key: str, where: str, good: Callable[[Any], bool], expected: str
) -> None:
    for index, value in enumerate(values):
        if not good(value):
            raise DataError(f"{where}[{index}]: '{key}' is {_shown(value)}, expected {expected}")


def _is_number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float, np.number)):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer of more than 308 digits
        return False


def _is_integer(value: Any) -> bool:
    return _is_number(value) and value == round(value) and abs(value) < 2**63


def _is_box(value: Any) -> bool:
    is_list = isinstance(value, (list, tuple, np.ndarray))
    return is_list and len(value) == 4 and all(_is_number(number) for number in value)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
