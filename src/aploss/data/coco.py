"""COCO JSON: one annotation file per split, with the images in one of the usual places.

Entries are parsed by the same code for two purposes: a dataset drops and reports entries that cannot be used, the
ground truth of a metric is rejected at the first wrong entry.
"""

import json
import math
import posixpath
import re
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from msgspec import UNSET, Struct
from numpy.typing import NDArray

from aploss.data.annotations import AnnotationBuilder, DetectionDataset
from aploss.data.formats import SPLITS, DataFormat, Parts, common_split_name, image_size, register_format
from aploss.data.paths import DatasetFolder
from aploss.data.problems import ProblemError
from aploss.errors import DataError

_FILLERS = re.compile(r"(^|[_.-])(annotations?|instances|coco|labels|gt)(?=[_.-]|$)", re.IGNORECASE)
_OTHER_TASKS = ("captions_", "person_keypoints_", "panoptic_", "stuff_", "image_info_")
_SURROGATE = re.compile("[\ud800-\udfff]")  # unpaired: it could not be printed
_SECTIONS = ("images", "annotations", "categories")
_ROWS_AT_ONCE = 10_000  # annotations read together
_SECTION_KEYS = re.compile(rb'"(images|annotations|categories|licenses|info)"\s*:')


# --- the file ---------------------------------------------------------------------------------
# Fields accept any type: values are validated below, with a message that names the entry.


class CocoImage(Struct, gc=False):
    id: Any = UNSET
    file_name: Any = UNSET
    width: Any = UNSET
    height: Any = UNSET


class CocoCategory(Struct, gc=False):
    id: Any = UNSET
    name: Any = UNSET


class CocoObject(Struct, gc=False):
    """An annotation, or a detection with its score. Polygons, three quarters of a file, are skipped by the parser."""

    id: Any = UNSET
    image_id: Any = UNSET
    category_id: Any = UNSET
    bbox: Any = UNSET
    area: Any = UNSET
    score: Any = UNSET
    iscrowd: Any = 0
    difficult: Any = 0


_Scalar = str | int | float | bool | None
_NotAList = dict[str, Any] | _Scalar | msgspec.UnsetType
CocoResults = list[CocoObject | list[Any] | _Scalar]


class CocoDocument(Struct):
    """A ground truth; missing sections are UNSET."""

    images: list[CocoImage | list[Any] | _Scalar] | _NotAList = UNSET
    annotations: CocoResults | _NotAList = UNSET
    categories: list[CocoCategory | list[Any] | _Scalar] | _NotAList = UNSET


def coco_document(source: Any, kind: Any = CocoDocument) -> Any:
    """Parses a ground truth (a :class:`CocoDocument`) or detections (:data:`CocoResults`).

    Args:
        source: the bytes of a file, or plain dicts and lists.
        kind: what it should be.

    Raises:
        msgspec.ValidationError: it is something else.
        ValueError: the bytes are not JSON.
    """
    if not isinstance(source, bytes):
        return msgspec.convert(source, kind)
    content = source.removeprefix(b"\xef\xbb\xbf")
    try:
        try:
            return msgspec.json.decode(content, type=kind)
        except msgspec.DecodeError:
            # Python's json also reads NaN, Infinity, 1e999 and unpaired surrogates, as written by other tools.
            return msgspec.convert(json.loads(content.decode()), kind)
    except RecursionError:
        raise ValueError("too deeply nested") from None


# --- its entries ------------------------------------------------------------------------------

Report = Callable[[str, str], None]  # kind of the problem, message


class CocoEntryError(DataError):
    """An unusable entry, with the kind of problem."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class CocoObjects(NamedTuple):
    """Annotations or detections as columns, m of them."""

    image_ids: NDArray[np.int64]  # [m]
    category_ids: NDArray[np.int64]  # [m]
    ids: NDArray[np.int64]  # [m] annotation ids; position in the list, from 1, if an entry has none
    flags: NDArray[np.int64]  # [m], 1: difficult, 2: crowd
    xywh: NDArray[np.float64]  # [m, 4]
    values: NDArray[np.float64]  # [m] score, or area (NaN if missing)


def read_objects(entries: Sequence[Any], where: str, report: Report, *, scored: bool = False) -> CocoObjects:
    """Reads the usable entries of a list.

    Args:
        entries: the list.
        where: name of the list in messages.
        report: called for each entry that is dropped or wrong.
        scored: whether the entries are detections, which need a score.
    """
    integers, numbers = [np.zeros((0, 4), np.int64)], [np.zeros((0, 5))]
    for start in range(0, len(entries), _ROWS_AT_ONCE):
        chunk = entries[start : start + _ROWS_AT_ONCE]
        columns = _clean_columns(chunk, start, scored) or _checked_columns(chunk, start, where, report, scored)
        integers.append(columns[0])
        numbers.append(columns[1])
    image_ids, category_ids, own_ids, flag_column = np.concatenate(integers).T
    table = np.concatenate(numbers)
    return CocoObjects(image_ids, category_ids, own_ids, flag_column, table[:, :4], table[:, 4])


_Columns = tuple[NDArray[np.int64], NDArray[np.float64]]  # image, category, id, flags [m, 4]; box and value [m, 5]


def _clean_columns(entries: Sequence[Any], start: int, scored: bool) -> _Columns | None:
    """The columns of entries without anything unusual, ten times faster than one by one; None otherwise."""
    if set(map(type, entries)) != {CocoObject}:
        return None
    own_ids = [row if one.id is UNSET else one.id for row, one in enumerate(entries, start + 1)]
    ids = [*(one.image_id for one in entries), *(one.category_id for one in entries), *own_ids]
    boxes = [one.bbox for one in entries]
    values = [one.score for one in entries] if scored else [0 if one.area is UNSET else one.area for one in entries]
    if set(map(type, ids)) != {int} or set(map(type, boxes)) != {list} or set(map(len, boxes)) != {4}:
        return None
    if not set(map(type, chain(values, *boxes))) <= {int, float}:
        return None
    try:
        numbers = np.column_stack([np.array(boxes, float), np.array(values, float)])
        flags = np.array([(one.difficult, one.iscrowd) for one in entries])
    except (OverflowError, ValueError):  # integers beyond float64, flags of different types
        return None
    usual_flags = flags.dtype.kind in "bi" and bool(((flags == 0) | (flags == 1)).all())
    if not usual_flags or max(map(abs, ids)) >= 2**62 or not (np.abs(numbers) < 2**62).all():
        return None
    if not scored:
        numbers[[one.area is UNSET for one in entries], 4] = math.nan
    return np.column_stack([np.array(ids).reshape(3, -1).T, flags @ [1, 2]]), numbers


def _checked_columns(entries: Sequence[Any], start: int, where: str, report: Report, scored: bool) -> _Columns:
    """The columns of the usable entries; the others are reported."""
    integers, numbers = array("q"), array("d")
    for row, entry in enumerate(entries, start):
        try:
            columns = _columns(entry, scored)
        except CocoEntryError as error:
            report(error.kind, f"{where}[{row}]{error}")
            continue
        own_id = entry.id if type(entry.id) is int and abs(entry.id) < 2**62 else row + 1
        integers.extend((*columns[:2], own_id, (entry.difficult == 1) + 2 * (entry.iscrowd == 1)))
        numbers.extend(columns[2:])
    return np.frombuffer(integers, np.int64).reshape(-1, 4), np.frombuffer(numbers, np.float64).reshape(-1, 5)


def _columns(entry: Any, scored: bool) -> tuple[Any, ...]:
    """Image, category, box, and score or area of an entry; the error's message follows the name of the entry."""
    if not isinstance(entry, CocoObject):
        raise CocoEntryError("bad-entry", f" is {shown(entry)}, expected an object with keys")
    image = id_of(entry, "image_id", "", "bad-entry")
    category = id_of(entry, "category_id", "", "unknown-class")
    if entry.bbox is UNSET:
        raise CocoEntryError("bad-box", " has no 'bbox'")
    if not isinstance(entry.bbox, (list, tuple, np.ndarray)) or len(entry.bbox) != 4:
        raise CocoEntryError("bad-box", f": 'bbox' is {shown(entry.bbox)}, expected [x, y, width, height]")
    if not all(map(_is_number, entry.bbox)):
        raise CocoEntryError("bad-box", f": 'bbox' is {shown(entry.bbox)}, expected four numbers")
    if entry.iscrowd not in (0, 1):
        raise CocoEntryError("bad-entry", f": 'iscrowd' is {shown(entry.iscrowd)}, expected 0 or 1")
    key = "score" if scored else "area"
    value = getattr(entry, key)
    if not scored and (value is UNSET or value is None):
        value = math.nan
    elif not _is_number(value) or not math.isfinite(value):
        wrong = f" has no '{key}'" if value is UNSET else f": '{key}' is {shown(value)}"
        raise CocoEntryError("bad-entry", f"{wrong}, expected a finite number")
    return (image, category, *entry.bbox, value)


def _is_number(value: Any) -> bool:
    return type(value) is float or (type(value) is int and abs(value) < 2**62) or isinstance(value, np.number)


def id_of(entry: Any, key: str, where: str, kind: str) -> int:
    """The integer id of an entry; CocoEntryError of this kind for anything else."""
    value = getattr(entry, key)
    if type(value) is int and abs(value) < 2**62:
        return value
    if value is UNSET:
        raise CocoEntryError(kind, f"{where} has no '{key}'")
    if not isinstance(value, (float, np.number)) or not abs(float(value)) < 2**62 or value != int(value):
        raise CocoEntryError(kind, f"{where}: '{key}' is {shown(value)}, expected an integer")
    return int(value)


def shown(value: Any) -> str:
    """A value for a message, shortened."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


# --- the dataset --------------------------------------------------------------------------------


@register_format("coco")
class CocoFormat(DataFormat):
    """A dataset of COCO annotation files in the folder, in its ``annotations`` or in the folders of its splits.

    ``annotations/instances_train2017.json`` is split ``train2017``, ``train/_annotations.coco.json`` is split
    ``train``.
    """

    looked_for = "COCO (annotations/*.json, *.json or train/*.json with images and annotations)"

    def __init__(self, folder: DatasetFolder, files: Sequence[str]) -> None:
        names = [_split_name(file) for file in files]
        self._files = {
            name if names.count(name) == 1 else file[: -len(".json")]: file
            for name, file in zip(names, files, strict=True)
        }
        super().__init__(folder, list(self._files))

    @property
    def annotation_files(self) -> list[Path]:
        """The annotation files of all splits."""
        return [self.folder.root / file for file in self._files.values()]

    @classmethod
    def find(cls, path: Path) -> "CocoFormat | None":
        """See :meth:`DataFormat.find`."""
        if path.is_file():
            if path.suffix.lower() != ".json":
                return None
            real = path.resolve()
            root = real.parent.parent if real.parent.name.lower() == "annotations" else real.parent
            return cls(DatasetFolder(root), [real.relative_to(root).as_posix()])
        folder = DatasetFolder(path)
        folders = ["", *(name for name in folder.names("") if folder.is_folder(name))]
        candidates = [
            posixpath.join(parent, name)
            for parent in folders
            for name in folder.names(parent)
            if name.lower().endswith(".json") and not name.startswith(".")
        ]
        files = [file for file in candidates if _is_named_as_coco(file) or _begins_like_coco(folder, file)]
        instances = [file for file in files if not posixpath.basename(file).startswith(_OTHER_TASKS)]
        return cls(folder, instances or files) if files else None

    def read(self, split: str, class_names: Sequence[str] | None) -> DetectionDataset:
        """See :meth:`DataFormat.read`."""
        file = self._files[split]
        builder = AnnotationBuilder(self.folder)
        document = self._document(file)
        categories = _categories(document.categories, file)
        objects = read_objects(document.annotations, "annotations", lambda kind, text: builder.report(kind, file, text))
        document.annotations = UNSET  # frees most of the memory
        index_of = self._add_images(document.images, split, file, builder)
        names = list(categories.values()) if class_names is None else class_names
        _add_boxes(builder, objects, categories, names, index_of, file)
        if builder.image_ids and min(builder.image_ids) < 1:
            shift = 1 - min(builder.image_ids)
            builder.image_ids = [image_id + shift for image_id in builder.image_ids]
        return builder.dataset(
            class_names=names,
            name=self.name,
            split=split,
            describe=lambda image, number: (file, f"annotation {number} of {builder.paths[image]}"),
        )

    @classmethod
    def write(cls, folder: Path, parts: Parts, names: dict[Path, str]) -> list[str]:
        """Writes ``annotations/instances_SPLIT.json``; see :meth:`DataFormat.write`."""
        (folder / "annotations").mkdir()
        for split, part in parts.items():
            content = part.to_coco()
            for index, image in enumerate(content["images"]):
                image["file_name"] = names[part.image_path(index)]
            file = folder / "annotations" / f"instances_{split}.json"
            file.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
        return []

    def _document(self, file: str) -> Any:
        content = self.folder.read_bytes(file)
        try:
            document = coco_document(content)
        except msgspec.ValidationError:
            message = "a COCO file is a JSON object with images, annotations and categories"
            raise ProblemError("unreadable-annotations", file, message) from None
        except ValueError as error:
            raise ProblemError("unreadable-annotations", file, f"not valid JSON: {error}") from None
        for section in _SECTIONS:
            if not isinstance(getattr(document, section), list):
                raise ProblemError("unreadable-annotations", file, f"no list {section!r}")
        return document

    def _add_images(self, entries: Sequence[Any], split: str, file: str, builder: AnnotationBuilder) -> dict[int, int]:
        """Adds the existing images; returns id → index, or -1 for an image that is not there."""
        base = self._image_folder(
            [entry.file_name for entry in entries[:50] if isinstance(entry, CocoImage)], split, file
        )
        index_of: dict[int, int] = {}
        seen = set()
        for row, entry in enumerate(entries):
            try:
                image_id, file_name = _image(entry, f"images[{row}]")
                if image_id in index_of:
                    raise CocoEntryError("duplicate-image", f"image id {image_id} is used again, for {file_name}")
                index_of[image_id] = -1
                path = self.folder.inside(file_name, base=base, named_in=file)
                if path in seen:
                    raise CocoEntryError("duplicate-image", f"{path} is listed again, with id {image_id}")
            except CocoEntryError as error:
                builder.report(error.kind, file, str(error))
                continue
            except ProblemError as error:
                builder.problems.append(error.problem)
                continue
            seen.add(path)
            if builder.find_image(path, named_in=file):
                index_of[image_id] = builder.add_image(path, image_size(entry.width, entry.height), image_id)
        return index_of

    def _image_folder(self, names: Sequence[Any], split: str, file: str) -> str:
        """The folder that contains most of these images."""
        parent = posixpath.dirname(file)
        places = (split, f"images/{split}", f"{split}/images", parent, posixpath.join(parent, "images"), "images", "")

        def exists(name: str, base: str) -> bool:
            try:
                return self.folder.has(self.folder.inside(name, base=base, named_in=""))
            except ProblemError:
                return True  # the place is right; the problem is reported when the image is added

        texts = [name for name in names if isinstance(name, str) and name]
        return max(places, key=lambda base: sum(exists(name, base) for name in texts))


def _add_boxes(
    builder: AnnotationBuilder,
    objects: CocoObjects,
    categories: dict[int, str],
    names: Sequence[str],
    index_of: dict[int, int],
    file: str,
) -> None:
    """Adds the boxes of known images and classes; reports the others, each unknown class once."""
    label_of_name = {name: label for label, name in enumerate(names)}
    label_of = {category: label_of_name[name] for category, name in categories.items() if name in label_of_name}
    images = np.array([index_of.get(image_id, -2) for image_id in objects.image_ids.tolist()], np.int64)
    labels = np.array([label_of.get(category, -1) for category in objects.category_ids.tolist()], np.int64)
    for row in np.flatnonzero(images == -2).tolist():
        message = f"annotation {objects.ids[row]}: no image has id {objects.image_ids[row]}"
        builder.report("bad-entry", file, message)
    kept = (images >= 0) & (labels >= 0)
    corners = np.concatenate([objects.xywh[:, :2], objects.xywh[:, :2] + objects.xywh[:, 2:]], axis=1)
    integers = np.column_stack([images, labels, objects.ids, objects.flags])
    builder.add_boxes(integers[kept], np.column_stack([corners, objects.values])[kept])
    unknown = Counter(objects.category_ids[labels < 0].tolist())
    for category, count in unknown.items():
        name = f"class {categories[category]!r}" if category in categories else f"category_id {category}"
        builder.report("unknown-class", file, f"{name} is not in the class list: {count} boxes", count=count)


def _begins_like_coco(folder: DatasetFolder, file: str) -> bool:
    """Whether a JSON file has a key of COCO near its beginning."""
    try:
        with (folder.root / file).open("rb") as opened:
            start = opened.read(1 << 16) if folder.is_file(file) else b""
    except OSError:
        return False
    return start.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"{") and _SECTION_KEYS.search(start) is not None


def _is_named_as_coco(file: str) -> bool:
    """Whether a file must hold COCO annotations by its name: if it is unreadable, it is reported, not ignored."""
    folder, name = posixpath.split(file)
    in_place = posixpath.basename(folder) == "annotations" and common_split_name(_split_name(file)) in SPLITS
    return in_place or name.startswith("instances_") or name.lower() == "_annotations.coco.json"


def _split_name(file: str) -> str:
    """The distinctive part of an annotation file's name, or the name of its folder."""
    stem = posixpath.basename(file)[: -len(".json")]
    if stem.startswith("instances_"):
        return stem.removeprefix("instances_")
    names = (stem, posixpath.basename(posixpath.dirname(file)))
    return next(filter(None, (_FILLERS.sub("", name).strip("_.-") for name in names)), "all")


def _image(entry: Any, where: str) -> tuple[int, str]:
    """Id and file name of an entry of ``images``."""
    if not isinstance(entry, CocoImage):
        raise CocoEntryError("bad-image-entry", f"{where} is {shown(entry)}, expected an object")
    image_id = id_of(entry, "id", where, "bad-image-entry")
    if not isinstance(entry.file_name, str) or not entry.file_name:
        raise CocoEntryError("bad-image-entry", f"{where}: image {image_id} has no file_name")
    return image_id, entry.file_name


def _categories(entries: Sequence[Any], file: str) -> dict[int, str]:
    """Id → name, ascending by id."""
    categories = []
    for row, entry in enumerate(entries):
        name = entry.name if isinstance(entry, CocoCategory) else None
        try:
            if not isinstance(name, (str, int)) or name == "" or _SURROGATE.search(str(name)):
                raise CocoEntryError("bad-categories", f"categories[{row}] has no valid name: {shown(entry)}")
            categories.append((id_of(entry, "id", f"categories[{row}]", "bad-categories"), str(name)))
        except CocoEntryError as error:
            raise ProblemError(error.kind, file, str(error)) from None
    if not categories:
        raise ProblemError("bad-categories", file, "the list of categories is empty")
    for column in zip(*categories, strict=True):
        value, uses = Counter(column).most_common(1)[0]
        if uses > 1:
            raise ProblemError("bad-categories", file, f"two categories share {value!r}")
    return dict(sorted(categories))
