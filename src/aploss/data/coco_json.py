"""The content of one COCO annotation file, in arrays."""

from array import array
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from aploss.data.json_stream import iterate_entries
from aploss.data.paths import DatasetFolder
from aploss.data.problems import ProblemError
from aploss.data.records import Records, number

__all__ = ["CocoBoxes", "CocoContent", "read_content"]

_SECTIONS = ("images", "annotations", "categories")
_NUMBERS = (int, float)
_NAN = float("nan")


class CocoBoxes(NamedTuple):
    """The annotations of a file; m boxes."""

    numbers: NDArray[np.int64]  # [m] annotation ids
    image_ids: NDArray[np.int64]  # [m]
    category_ids: NDArray[np.int64]  # [m]
    corners: NDArray[np.float64]  # [m, 4] xyxy
    areas: NDArray[np.float64]  # [m], NaN where absent
    flags: NDArray[np.int8]  # [m], 1: difficult, 2: crowd


class CocoContent:
    """Collects the entries of an annotation file as they come."""

    def __init__(self, file: str, records: Records) -> None:
        self.file = file
        self.records = records
        self.images: list[tuple[int, str, tuple[int, int] | None]] = []  # id, file name, size
        self.categories: list[tuple[int, str]] = []  # id, name, sorted by id
        self._ids = array("q")  # 3 a box: annotation, image, category
        self._values = array("d")  # 5 a box: corners and area
        self._flags = array("b")
        self._entries = 0

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the categories in the order of their ids."""
        return tuple(name for _, name in self.categories)

    def boxes(self) -> CocoBoxes:
        """The annotations so far."""
        ids = np.frombuffer(self._ids, np.int64).reshape(-1, 3)
        values = np.frombuffer(self._values, np.float64).reshape(-1, 5)
        flags = np.frombuffer(self._flags, np.int8)
        return CocoBoxes(ids[:, 0], ids[:, 1], ids[:, 2], values[:, :4], values[:, 4], flags)

    def add_image(self, entry: Any) -> None:
        """Adds an entry of ``images``."""
        image_id: Any = entry.get("id") if isinstance(entry, dict) else None
        if not _is_id(image_id):
            shown = str(entry)[:80]
            self._report("bad-image-entry", f"image without a whole-number id: {shown}")
            return
        file_name = entry.get("file_name")
        if not isinstance(file_name, str) or not file_name:
            self._report("bad-image-entry", f"image {image_id} has no file_name")
            return
        width, height = entry.get("width"), entry.get("height")
        known = _is_length(width) and _is_length(height)
        self.images.append((image_id, file_name, (int(width), int(height)) if known else None))

    def add_annotation(self, entry: Any) -> None:
        """Adds an entry of ``annotations``."""
        self._entries += 1
        try:
            x, y, width, height = entry["bbox"]
            area = entry.get("area")
            # fromlist adds all or nothing, and nothing that is not a number
            self._values.fromlist(
                [x, y, x + width, y + height, area if type(area) in _NUMBERS else _NAN]
            )
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
            self._add_unusual(entry)
            return
        self._add_ids(entry)

    def _add_unusual(self, entry: Any) -> None:
        """Adds an annotation whose numbers are written as text, or says what is wrong with it."""
        fault = _annotation_fault(entry, self._entries)
        if fault is not None:
            self._report(*fault)
            return
        x, y, width, height = map(number, entry["bbox"])
        self._values.fromlist([x, y, x + width, y + height, _NAN])
        self._add_ids(entry)

    def _add_ids(self, entry: dict[str, Any]) -> None:
        annotation_id = entry.get("id")
        if type(annotation_id) is not int:
            annotation_id = self._entries
        try:
            self._ids.fromlist([annotation_id, entry["image_id"], entry["category_id"]])
        except (KeyError, TypeError, OverflowError):
            del self._values[-5:]
            kind, message = _annotation_fault(entry, self._entries) or (
                "bad-entry",
                f"annotation entry {self._entries} has an id that is too large",
            )
            self._report(kind, message)
            return
        crowd, difficult = entry.get("iscrowd", 0), entry.get("difficult", 0)
        if crowd not in (0, 1) or difficult not in (0, 1):
            message = f"annotation {annotation_id}: iscrowd {crowd!r}, difficult {difficult!r}"
            self._report("bad-flag", message)
        self._flags.append((difficult == 1) + 2 * (crowd == 1))

    def add_category(self, entry: Any) -> None:
        """Adds an entry of ``categories``."""
        name = entry.get("name") if isinstance(entry, dict) else None
        if not isinstance(name, (str, int)) or name == "" or not _is_id(entry.get("id")):
            raise ProblemError(
                "bad-categories", self.file, f"a category needs an id and a name: {str(entry)[:80]}"
            )
        self.categories.append((entry["id"], str(name)))

    def finish(self) -> None:
        """Sorts and checks the categories, and looks for ids used twice."""
        self.categories.sort()
        ids, names = zip(*self.categories, strict=True) if self.categories else ((), ())
        if not names:
            raise ProblemError("no-classes", self.file, "the list of categories is empty")
        if len(set(ids)) < len(ids) or len(set(names)) < len(names):
            twice = [entry for entry in (*ids, *names) if (*ids, *names).count(entry) > 1]
            raise ProblemError("bad-categories", self.file, f"{twice[0]!r} names two categories")
        numbers, counts = np.unique(self.boxes().numbers, return_counts=True)
        for annotation_id in numbers[counts > 1].tolist():
            self._report("duplicate-annotation-id", f"annotation id {annotation_id} is used again")

    def _report(self, kind: str, message: str) -> None:
        self.records.report(kind, self.file, message)


def read_content(folder: DatasetFolder, file: str, records: Records) -> CocoContent:
    """Reads an annotation file, entry by entry.

    Raises:
        ProblemError: It is not JSON, or lacks images, annotations or categories.
    """
    folder.has(file)  # refuses a link that leads outside
    content = CocoContent(file, records)
    adders = (content.add_image, content.add_annotation, content.add_category)
    adder_of = dict(zip(_SECTIONS, adders, strict=True))
    seen = set()
    try:
        for section, entry in iterate_entries(folder.root / file, unneeded="segmentation"):
            seen.add(section)
            if section in adder_of and entry is not None:
                adder_of[section](entry)
    except ProblemError:
        raise
    except ValueError as error:
        raise ProblemError("unreadable-annotations", file, f"not valid JSON: {error}") from None
    except OSError as error:
        message = f"cannot be read: {error.strerror}"
        raise ProblemError("unreadable-annotations", file, message) from None
    for section in _SECTIONS:
        if section not in seen:
            raise ProblemError("missing-section", file, f"no {section!r}")
    content.finish()
    return content


def _is_id(value: Any) -> bool:
    return type(value) is int and -(2**62) < value < 2**62


def _is_length(value: Any) -> bool:
    return type(value) in (int, float) and 1 <= value < 2**31


def _annotation_fault(entry: Any, position: int) -> tuple[str, str] | None:
    """What is wrong with an annotation that could not be taken as it is."""
    if not isinstance(entry, dict):
        return "bad-entry", f"annotation entry {position} is not an object: {str(entry)[:80]}"
    where = f"annotation {entry.get('id', f'entry {position}')} of image {entry.get('image_id')}"
    bbox = entry.get("bbox")
    if bbox is None:
        return "missing-box", f"{where}: no bbox"
    if not isinstance(bbox, list) or len(bbox) != 4:
        return (
            "missing-coordinate",
            f"{where}: bbox must be [x, y, width, height], got {bbox!r:.80}",
        )
    try:
        for value in bbox:
            number(value)
    except ValueError as error:
        return "non-numeric-coordinate", f"{where}: {error}"
    if not _is_id(entry.get("image_id")):
        return "unknown-image", f"{where}: image_id must be a whole number"
    if not _is_id(entry.get("category_id")):
        return "missing-class", f"{where}: category_id must be a whole number"
    return None
