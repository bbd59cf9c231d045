"""COCO JSON: one annotation file per split, with the images in one of the usual places.

The entries of a file are read in one way for two uses: a dataset leaves out what cannot be used and lists it, the
ground truth of a metric is refused at the first entry that is wrong.
"""

import json
import math
import posixpath
import re
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from msgspec import UNSET, Struct
from numpy.typing import NDArray

from aploss.data.annotations import AnnotationBuilder, DetectionDataset, TextIds, is_text_id, number_text
from aploss.data.formats import (
    SPLITS,
    DataFormat,
    Parts,
    Written,
    common_split_name,
    image_size,
    is_text,
    json_begins_with,
    number,
    register_format,
)
from aploss.data.paths import DatasetFolder, is_image
from aploss.data.problems import Problem, ProblemError

_FILLERS = re.compile(r"(^|[_.-])(annotations?|instances|coco|labels|gt)(?=[_.-]|$)", re.IGNORECASE)
_OTHER_TASKS = ("captions_", "person_keypoints_", "panoptic_", "stuff_", "image_info_")
_SECTIONS = ("images", "annotations", "categories")
_SECTION_KEYS = re.compile(rb'"(images|annotations|categories|licenses|info)"\s*:')
_NAN = float("nan")


# --- the file ---------------------------------------------------------------------------------
# Fields of any type: what an entry may hold is checked below, with a message that says where.


class CocoImage(Struct, gc=False):
    id: Any = UNSET
    file_name: Any = UNSET
    width: Any = UNSET
    height: Any = UNSET


class CocoCategory(Struct, gc=False):
    id: Any = UNSET
    name: Any = UNSET


class CocoObject(Struct, gc=False):
    """An annotation, or a detection with its score. Outlines, three quarters of a file, are skipped without being
    built."""

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
_AnyObject = CocoObject | list[Any] | _Scalar


class CocoDocument(Struct):
    """A ground truth; sections that are missing are UNSET."""

    images: list[CocoImage | list[Any] | _Scalar] | _NotAList = UNSET
    annotations: list[_AnyObject] | _NotAList = UNSET
    categories: list[CocoCategory | list[Any] | _Scalar] | _NotAList = UNSET


class _RawDocument(CocoDocument):
    """The same with annotations still in the file's own bytes, which takes a third less memory."""

    annotations: list[msgspec.Raw] | _NotAList = UNSET  # type: ignore[assignment]


_decode_object = msgspec.json.Decoder(_AnyObject).decode


def _decode_large(entry: msgspec.Raw) -> Any:
    """An entry with a number that msgspec has no place for, such as 1e999; its text where Python has none either."""
    text = bytes(entry)
    try:
        return msgspec.convert(json.loads(text), _AnyObject)
    except (ValueError, msgspec.MsgspecError):
        return text[:80].decode("utf-8", "replace")


def coco_document(source: Any) -> Any:
    """A ground truth of a file's bytes or of a dict, as :class:`CocoDocument`.

    A ``msgspec.ValidationError`` where it is not an object with keys, a ValueError where the bytes are not JSON.
    """
    if isinstance(source, bytes):
        return decode_json(source, _RawDocument, CocoDocument)
    return msgspec.convert(source, CocoDocument)


def coco_results(source: Any) -> Any:
    """Detections of a file's bytes or of a list of dicts. Raises like :func:`coco_document`."""
    if isinstance(source, bytes):
        return decode_json(source, list[msgspec.Raw], list[_AnyObject])
    return msgspec.convert(source, list[_AnyObject])


# What Python's json writes and JSON does not know; it is read all the same.
_PYTHONS_OWN = re.compile(rb"NaN|Infinity|\\u[dD][89a-fA-F]")


def decode_json(content: bytes, kind: Any = Any, kind_of_python: Any = Any) -> Any:
    """The value of a JSON file in UTF-8; ValueError where it is not JSON, or not of the type ``kind``.

    What a type has no place for is skipped; ``kind_of_python`` is for files that hold what only Python's json reads.
    """
    text = memoryview(content)[3:] if content.startswith(b"\xef\xbb\xbf") else content
    try:
        try:
            return msgspec.json.decode(text, type=kind)
        except msgspec.ValidationError:
            raise
        except msgspec.DecodeError:
            if not _PYTHONS_OWN.search(content):
                raise
            return msgspec.convert(json.loads(content.decode("utf-8-sig")), type=kind_of_python)
    except RecursionError:
        raise ValueError("too deeply nested") from None


# --- its entries ------------------------------------------------------------------------------

Report = Callable[[str, str], None]  # kind of the problem, message


class CocoEntryError(ValueError):
    """An entry that cannot be used, with the kind of problem."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class CocoObjects(NamedTuple):
    """Annotations or detections, m of them."""

    image_ids: NDArray[np.int64]  # [m]
    category_ids: NDArray[np.int64]  # [m]
    ids: NDArray[np.int64]  # [m] of the annotations; their number in the list where they have none
    flags: NDArray[np.int64]  # [m], 1: difficult, 2: crowd
    xywh: NDArray[np.float64]  # [m, 4]
    values: NDArray[np.float64]  # [m] area, NaN where there is none; or score


def read_objects(
    entries: Sequence[Any], where: str, report: Report, texts: TextIds, *, scored: bool = False, lenient: bool = False
) -> CocoObjects:
    """The entries that can be read.

    Args:
        entries: of the file's list.
        where: what the list is called in messages.
        report: called for each entry that is left out or wrong.
        texts: numbers of the ids that are text; new ones are added.
        scored: whether they are detections, which need a score.
        lenient: whether a coordinate may be written as text, and an area be anything.
    """
    integers, numbers = array("q"), array("d")
    for row, entry in enumerate(entries):
        if type(entry) is msgspec.Raw:
            try:
                entry = _decode_object(entry)
            except msgspec.ValidationError:
                entry = _decode_large(entry)
        try:
            x, y, width, height = entry.bbox
            value = entry.score if scored else entry.area
            if not scored and (value is UNSET or value is None):
                value = _NAN
            elif type(value) not in (int, float) or not -math.inf < value < math.inf:
                raise TypeError
            image, category = entry.image_id, entry.category_id
            if type(image) is str:
                image = number_text(texts.images, image)
            if type(category) is str:
                category = number_text(texts.categories, category)
            # fromlist adds all or nothing, and nothing that is not a number
            integers.fromlist([image, category])
            numbers.fromlist([x, y, width, height, value])
        except (TypeError, ValueError, AttributeError, OverflowError):
            del integers[4 * (len(numbers) // 5) :]
            try:
                ids, floats = _read_unusual(entry, f"{where}[{row}]", texts, scored, lenient)
            except CocoEntryError as error:
                report(error.kind, str(error))
                continue
            integers.fromlist(ids)
            numbers.fromlist(floats)
        own = type(entry.id) is int and abs(entry.id) < 2**62
        flagged = entry.iscrowd or entry.difficult
        integers.append(entry.id if own else row + 1)
        integers.append(_flags(entry, f"{where}[{row}]", report) if flagged else 0)
    image_ids, category_ids, own_ids, flags = np.frombuffer(integers, np.int64).reshape(-1, 4).T
    table = np.frombuffer(numbers, np.float64).reshape(-1, 5)
    return CocoObjects(image_ids, category_ids, own_ids, flags, table[:, :4], table[:, 4])


def _read_unusual(entry: Any, where: str, texts: TextIds, scored: bool, lenient: bool) -> tuple[list[int], list[float]]:
    """Ids and numbers of an entry that could not be taken as it is (3.0 for an id, say)."""
    if not isinstance(entry, CocoObject):
        raise CocoEntryError("bad-entry", f"{where} is {shown(entry)}, expected an object with keys")
    ids = [
        id_of(entry, key, where, kind, known)
        for key, kind, known in (
            ("image_id", "unknown-image", texts.images),
            ("category_id", "missing-class", texts.categories),
        )
    ]
    if entry.bbox is UNSET or (lenient and entry.bbox is None):
        raise CocoEntryError("missing-box", f"{where} has no 'bbox'")
    wrong = f"{where}: 'bbox' is {shown(entry.bbox)}, expected [x, y, width, height]"
    if not isinstance(entry.bbox, (list, tuple, np.ndarray)) or len(entry.bbox) != 4:
        raise CocoEntryError("missing-coordinate", wrong)
    try:
        numbers = [_number(value, texts=lenient) for value in entry.bbox]
    except ValueError as error:
        raise CocoEntryError("non-numeric-coordinate", f"{wrong}: {error}") from None
    key = "score" if scored else "area"
    value = getattr(entry, key)
    if scored and value is UNSET:
        raise CocoEntryError("bad-entry", f"{where} has no 'score'")
    try:
        absent = not scored and (value is UNSET or value is None)
        measure = _NAN if absent else _number(value, texts=False)
    except ValueError:
        measure, absent = _NAN, False
    if not (absent or lenient or math.isfinite(measure)):
        raise CocoEntryError("bad-entry", f"{where}: '{key}' is {shown(value)}, expected a finite number")
    return ids, [*numbers, measure]


def _number(value: Any, *, texts: bool) -> float:
    if isinstance(value, np.number):
        return float(value)
    if isinstance(value, str) and not texts:
        raise ValueError(f"{value!r} is text")
    return number(value)


def id_of(entry: Any, key: str, where: str, kind: str, texts: dict[str, int]) -> int:
    """An id, or the number that stands for it where it is text."""
    value = getattr(entry, key)
    if isinstance(value, str):
        return number_text(texts, value)
    if value is UNSET:
        raise CocoEntryError(kind, f"{where} has no '{key}'")
    whole = isinstance(value, (int, float, np.number)) and not isinstance(value, bool)
    if not (whole and -(2**62) < value < 2**62 and value == round(value)):
        raise CocoEntryError(kind, f"{where}: '{key}' is {shown(value)}, expected an integer or text")
    return int(value)


def number_texts(document: Any) -> TextIds:
    """Numbers the ids of images and categories that are text, in the order of the texts, as pycocotools has them."""
    texts = TextIds({}, {})
    for kind in texts._fields:
        ids = (getattr(entry, "id", None) for entry in getattr(document, kind))
        for text in sorted({one for one in ids if isinstance(one, str)}):
            number_text(getattr(texts, kind), text)
    return texts


def _flags(entry: CocoObject, where: str, report: Report) -> int:
    flags = 0
    for key, flag in (("difficult", 1), ("iscrowd", 2)):
        value = getattr(entry, key) or 0
        if value not in (0, 1):
            report("bad-flag", f"{where}: '{key}' is {shown(value)}, expected 0 or 1")
        flags += flag * int(value == 1)
    return flags


def shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


# --- the dataset --------------------------------------------------------------------------------


@register_format("coco")
class CocoFormat(DataFormat):
    """A dataset of COCO annotation files.

    They are looked for in the folder, in its ``annotations`` and in the folders of its splits:
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
        self._listed: set[str] = set()
        self._image_folders: set[str] = set()

    @classmethod
    def find(cls, path: Path) -> "CocoFormat | None":
        """The COCO dataset in a folder or JSON file, or None where there is none."""
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
        begun = {file for file in candidates if json_begins_with(folder, file, _SECTION_KEYS)}
        # A file in the place of annotations is one even if it cannot be read: never left alone.
        files = [f for f in candidates if f in begun or _is_named_as_coco(f, certainly=not begun)]
        instances = [f for f in files if not posixpath.basename(f).startswith(_OTHER_TASKS)]
        return cls(folder, instances or files) if files else None

    def read(self, split: str, class_names: Sequence[str] | None) -> DetectionDataset:
        """See :meth:`DataFormat.read`."""
        if split not in self._files:
            raise self.no_such_split(split)
        file = self._files[split]
        builder = AnnotationBuilder(self.folder)

        def report(kind: str, message: str, count: int = 1) -> None:
            builder.report(kind, file, message, count=count)

        document = self._document(file)
        texts = number_texts(document)
        categories = _categories(document.categories, file, texts)
        objects = read_objects(document.annotations, "annotations", report, texts, lenient=True)
        document.annotations = UNSET  # the file's bytes go with them
        index_of = self._add_images(document.images, split, file, builder, texts)
        _add_boxes(builder, objects, categories, class_names, index_of, report, texts)
        if any(map(is_text_id, builder.image_ids)):
            place_of = {image_id: place for place, image_id in enumerate(sorted(index_of), start=1)}
            builder.image_ids = [place_of[image_id] for image_id in builder.image_ids]
            written = {number: text for text, number in texts.images.items()}
            builder.own_ids = {place: written.get(image_id, image_id) for image_id, place in place_of.items()}
        elif builder.image_ids and min(builder.image_ids) < 1:
            shift = 1 - min(builder.image_ids)
            builder.image_ids = [image_id + shift for image_id in builder.image_ids]
        return builder.dataset(
            class_names=[name for _, name in categories] if class_names is None else class_names,
            name=self.name,
            split=split,
            describe=lambda image, number: (file, f"annotation {number} of {builder.paths[image]}"),
        )

    def leftovers(self) -> list[Problem]:
        """See :meth:`DataFormat.leftovers`; of the splits that were read."""
        unlisted = {
            path: None
            for folder in sorted(self._image_folders)
            for path in self.folder.files(folder)
            if is_image(path) and path not in self._listed
        }
        return [Problem("image-without-annotation", path, "in no annotation file") for path in unlisted]

    @classmethod
    def write(cls, folder: Path, parts: Parts, places: dict[Path, str]) -> Written:
        """Writes ``annotations/instances_SPLIT.json``, for images in ``images`` or ``images/SPLIT``; see
        :meth:`DataFormat.write`."""
        (folder / "annotations").mkdir(parents=True)
        for split, part in parts.items():
            content, own_ids = part.to_coco(), part.own_ids
            for index, image in enumerate(content["images"]):
                image["file_name"] = posixpath.basename(places[part.image_path(index)])
                image["id"] = own_ids.get(image["id"], image["id"])
            for annotation in content["annotations"] if own_ids else ():
                annotation["image_id"] = own_ids[annotation["image_id"]]
            file = folder / "annotations" / f"instances_{split}.json"
            file.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
        return Written("images")

    def _document(self, file: str) -> Any:
        try:
            document = coco_document(self.folder.read_bytes(file))
        except msgspec.ValidationError:
            message = "a COCO file is a JSON object with images, annotations and categories"
            raise ProblemError("unreadable-annotations", file, message) from None
        except ProblemError:
            raise
        except ValueError as error:
            raise ProblemError("unreadable-annotations", file, f"not valid JSON: {error}") from None
        for section in _SECTIONS:
            if not isinstance(getattr(document, section), list):
                raise ProblemError("missing-section", file, f"no list {section!r}")
        return document

    def _add_images(
        self, entries: Sequence[Any], split: str, file: str, builder: AnnotationBuilder, texts: TextIds
    ) -> dict[int, int]:
        """Adds the images that are there; returns id → index, -1 for those that are not."""
        named = [entry for entry in entries if isinstance(entry, CocoImage)]
        base = self._image_folder([entry.file_name for entry in named[:50]], split, file)
        self._image_folders.add(base)
        index_of: dict[int, int] = {}
        seen = set()
        for row, entry in enumerate(entries):
            try:
                image_id, file_name = _image(entry, f"images[{row}]", texts)
            except CocoEntryError as error:
                builder.report(error.kind, file, str(error))
                continue
            if image_id in index_of:
                builder.report("duplicate-image-id", file, f"image id {entry.id!r} is used again, for {file_name}")
                continue
            index_of[image_id] = -1
            try:
                path = self.folder.locate(file_name, base=base, named_in=file)
            except ProblemError as error:
                builder.problems.append(error.problem)
                continue
            if path in seen:
                builder.report("duplicate-image", file, f"{path} is listed again, with id {entry.id!r}")
                continue
            seen.add(path)
            if builder.find_image(path, named_in=file):
                size = image_size(entry.width, entry.height)
                if size is None:
                    builder.report("missing-size", file, f"{path} has no width and height; taken from the image")
                index_of[image_id] = builder.add_image(path, size, image_id)
        self._listed |= seen
        return index_of

    def _image_folder(self, names: Sequence[Any], split: str, file: str) -> str:
        """The folder that most of these images are in."""
        parent = posixpath.dirname(file)
        places = (split, f"images/{split}", f"{split}/images", parent, posixpath.join(parent, "images"), "images", "")

        def is_there(name: str, base: str) -> bool:
            try:
                return self.folder.has(self.folder.inside(name, base=base, named_in=""))
            except ProblemError:
                return True  # the place is right, and reading it will say what is wrong

        texts = [name for name in names if isinstance(name, str) and name]
        return max(places, key=lambda base: sum(is_there(name, base) for name in texts))


def _add_boxes(
    builder: AnnotationBuilder,
    objects: CocoObjects,
    categories: Sequence[tuple[int, str]],
    class_names: Sequence[str] | None,
    index_of: dict[int, int],
    report: Callable[..., None],
    texts: TextIds,
) -> None:
    ids, counts = np.unique(objects.ids, return_counts=True)
    for annotation_id in ids[counts > 1].tolist():
        report("duplicate-annotation-id", f"annotation id {annotation_id} is used again")
    images = np.array([index_of.get(image_id, -2) for image_id in objects.image_ids.tolist()], np.int64)
    unknown = images == -2
    absent = texts.shown("images", objects.image_ids[unknown].tolist())
    for annotation_id, image_id in zip(objects.ids[unknown].tolist(), absent, strict=True):
        report("unknown-image", f"annotation {annotation_id}: no image has id {image_id}")
    names = [name for _, name in categories] if class_names is None else class_names
    label_of_name = {name: label for label, name in reversed(list(enumerate(names)))}  # the first of equal names
    label_of = {category: label_of_name[name] for category, name in categories if name in label_of_name}
    labels = np.array([label_of.get(category, -1) for category in objects.category_ids.tolist()], np.int64)
    _report_classes(categories, objects.category_ids, labels < 0, report, texts)
    kept = (images >= 0) & (labels >= 0)
    corners = objects.xywh[kept]
    corners[:, 2:] += corners[:, :2]
    rest: dict[str, Any] = {"numbers": objects.ids[kept], "flags": objects.flags[kept], "areas": objects.values[kept]}
    builder.add_boxes(images[kept], corners, labels[kept], **rest)


def _is_named_as_coco(file: str, *, certainly: bool) -> bool:
    """Whether a file's name and place are those of COCO annotations, and of nothing else."""
    folder, name = posixpath.split(file)
    stem = name[: -len(".json")]
    if stem.startswith("instances_") or stem.lower() == "_annotations.coco":
        return True
    plain = common_split_name(_unfilled(stem))
    return plain in SPLITS and (not certainly or posixpath.basename(folder) == "annotations")


def _split_name(file: str) -> str:
    """What is left of an annotation file's name; otherwise the name of its folder."""
    stem = posixpath.basename(file)[: -len(".json")]
    if stem.startswith("instances_"):
        return stem.removeprefix("instances_")
    return _unfilled(stem) or _unfilled(posixpath.basename(posixpath.dirname(file))) or "all"


def _unfilled(name: str) -> str:
    return _FILLERS.sub("", name).strip("_.-")


def _image(entry: Any, where: str, texts: TextIds) -> tuple[int, str]:
    """Id and file name of an entry of ``images``."""
    if not isinstance(entry, CocoImage):
        raise CocoEntryError("bad-image-entry", f"{where} is {shown(entry)}, expected an object")
    image_id = id_of(entry, "id", where, "bad-image-entry", texts.images)
    if not isinstance(entry.file_name, str) or not entry.file_name:
        raise CocoEntryError("bad-image-entry", f"{where}: image {entry.id!r} has no file_name")
    return image_id, entry.file_name


def _categories(entries: Sequence[Any], file: str, texts: TextIds) -> list[tuple[int, str]]:
    """Ids and names, ascending by id."""
    categories = []
    for row, entry in enumerate(entries):
        name = entry.name if isinstance(entry, CocoCategory) else None
        try:
            if not isinstance(name, (str, int)) or name == "":
                raise CocoEntryError("bad-categories", f"categories[{row}] has no name: {entry}")
            if not is_text(str(name)):
                what = f"categories[{row}] has a name that is no text (half a surrogate pair): {name!r}"
                raise CocoEntryError("bad-categories", what)
            category = id_of(entry, "id", f"categories[{row}]", "bad-categories", texts.categories)
        except CocoEntryError as error:
            raise ProblemError(error.kind, file, str(error)[:160]) from None
        categories.append((category, str(name)))
    if not categories:
        raise ProblemError("no-classes", file, "the list of categories is empty")
    ids, names = zip(*categories, strict=True)
    for column in (texts.shown("categories", ids), map(repr, names)):
        value, uses = Counter(column).most_common(1)[0]
        if uses > 1:
            raise ProblemError("bad-categories", file, f"{value} names two categories")
    return sorted(categories)


def _report_classes(
    categories: Sequence[tuple[int, str]],
    used: NDArray[np.int64],
    unknown: NDArray[np.bool_],
    report: Callable[..., None],
    texts: TextIds,
) -> None:
    known = dict(categories)
    ids, counts = np.unique(used[unknown], return_counts=True)
    written = texts.shown("categories", ids.tolist())
    for category, text, count in zip(ids.tolist(), written, counts.tolist(), strict=True):
        words = f"category_id {text} is not among the categories"
        if category in known:
            words = f"class {known[category]!r} is not in the class list"
        report("unknown-class", f"{words}: {count} boxes", count=count)
    seen = set(np.unique(used).tolist())
    low, high = categories[0][0], categories[-1][0]
    shifted = (low - 1 in seen and high not in seen) or (high + 1 in seen and low not in seen)
    if shifted and not texts.categories:
        found = f"categories have ids {low}..{high}, annotations use {min(seen)}..{max(seen)}"
        report("class-ids-off-by-one", f"{found}: are they counted from another number?")
