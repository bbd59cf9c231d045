"""COCO JSON: one annotation file per split, with the images in one of the usual places.

Entries are decoded and validated by msgspec for two purposes: a dataset drops and reports entries that cannot be used,
the ground truth of a metric is rejected at the first wrong entry.
"""

import json
import math
import posixpath
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, NoReturn

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from aploss.data.annotations import AnnotationBuilder, DetectionDataset
from aploss.data.folder import DatasetFolder, ProblemError
from aploss.data.formats import DataFormat, Parts, check_class_names, image_size, is_usual_split, register_format
from aploss.errors import DataError
from aploss.progress import printable

_FILLERS = re.compile(r"(^|[_.-])(annotations?|instances|coco|labels|gt)(?=[_.-]|$)", re.IGNORECASE)
_OTHER_TASKS = ("captions_", "person_keypoints_", "panoptic_", "stuff_", "image_info_")
_SECTION_KEYS = re.compile(rb'"(images|annotations|categories|licenses|info)"\s*:')


# --- the file ---------------------------------------------------------------------------------

_MAX_ID = 2**62
Id = Annotated[int, Meta(ge=-_MAX_ID, le=_MAX_ID)]
Finite = Annotated[float, Meta(ge=-1e300, le=1e300)]
Flag = bool | Annotated[int, Meta(ge=0, le=1)]


class CocoImage(Struct, gc=False):
    id: Id
    file_name: str | UnsetType = UNSET
    width: Any = None
    height: Any = None


class CocoCategory(Struct, gc=False):
    id: Id
    name: str | int | UnsetType = UNSET


class _OfImage(Struct, gc=False):
    image_id: Id
    id: Any = None
    area: Finite | None = None
    iscrowd: Flag = 0
    difficult: Flag = 0


class _OfCategory(_OfImage, kw_only=True, gc=False):
    category_id: Id


class CocoAnnotation(_OfCategory, kw_only=True, gc=False):
    """An annotated object. Polygons, three quarters of a file, are skipped by the parser."""

    bbox: tuple[float, float, float, float]


class CocoResult(CocoAnnotation, kw_only=True, gc=False):
    """A detection."""

    score: Finite


Report = Callable[[str, str], None]  # kind of the problem, message
# Struct → kind of the problem of an entry that cannot be decoded as it, but as the ones before it.
Kinds = dict[type[Any], str]
ANNOTATION_KINDS: Kinds = {_OfImage: "bad-entry", _OfCategory: "unknown-class", CocoAnnotation: "bad-box"}
RESULT_KINDS: Kinds = {**ANNOTATION_KINDS, CocoResult: "bad-entry"}


def parse_json(source: Any) -> Any:
    """JSON to be decoded by :func:`read_entries`: undecoded, or plain Python values.

    ``source`` are the bytes of a file, or dicts and lists, whose values may be numpy's; ValueError if it is not JSON.
    """
    if not isinstance(source, bytes):
        return msgspec.to_builtins(source, enc_hook=lambda value: getattr(value, "tolist", value.__repr__)())
    content = source.removeprefix(b"\xef\xbb\xbf")
    text = content.decode()  # raises for what is not UTF-8, which msgspec does not check in strings that it skips
    try:
        try:
            return msgspec.json.decode(content, type=Raw)
        except msgspec.DecodeError:
            # Python's json also reads NaN, Infinity and unpaired surrogates, as written by other tools.
            return json.loads(text)
    except RecursionError:
        raise ValueError("too deeply nested") from None


def coco_sections(source: Any, names: Sequence[str] = ("images", "annotations", "categories")) -> dict[str, Any]:
    """The lists of a ground truth, for :func:`read_entries`.

    ``source`` is as in :func:`parse_json`; DataError if it is not an object with these lists, ValueError if not JSON.
    """
    sections: Any = parse_json(source)
    if isinstance(sections, Raw):
        with suppress(msgspec.ValidationError):
            sections = _decode(sections, dict[str, Raw])
    for name in names:
        if not isinstance(sections, dict) or not _is_list(sections.get(name)):
            raise DataError(f"no list '{name}'; COCO annotations are an object with lists {', '.join(names)}")
    return dict(sections)


def read_entries(section: Any, kinds: Kinds, where: str, report: Report) -> dict[int, Any]:
    """Decodes the entries of a list; one by one only if some are invalid.

    Args:
        section: a list from :func:`coco_sections` or :func:`parse_json`; DataError if it is not a list.
        kinds: struct → kind of the problem if an entry cannot be decoded as it; the last struct is returned.
        where: name of the list in messages.
        report: called for each invalid entry.

    Returns:
        Position in the list → entry.
    """
    if not _is_list(section):
        raise DataError(f"the {where} are not a list")
    try:
        return dict(enumerate(_decode(section, list[[*kinds][-1]])))  # type: ignore[misc]
    except msgspec.ValidationError:
        entries = _decode(section, list[Raw]) if isinstance(section, Raw) else section
    found = {}
    for row, entry in enumerate(entries):
        for struct, kind in kinds.items():
            try:
                found[row] = _decode(entry, struct)
            except msgspec.ValidationError as error:
                found.pop(row, None)
                report(kind, f"{where}[{row}]: {error}")
                break
    return found


def _decode(source: Any, kind: Any) -> Any:
    return msgspec.json.decode(source, type=kind) if isinstance(source, Raw) else msgspec.convert(source, kind)


def _is_list(value: Any) -> bool:
    return bytes(memoryview(value)[:1]) == b"[" if isinstance(value, Raw) else isinstance(value, list)


def coco_names(source: Any) -> tuple[dict[int, str], dict[int, str]]:
    """Image id → file name, and category id → name; raises like :func:`coco_sections`, but skips invalid entries."""
    sections = coco_sections(source, ("images", "categories"))
    images, categories = (
        read_entries(sections[name], {struct: ""}, name, lambda kind, text: None).values()
        for name, struct in (("images", CocoImage), ("categories", CocoCategory))
    )
    return {one.id: one.file_name for one in images if one.file_name}, {one.id: str(one.name) for one in categories}


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
        try:
            sections = coco_sections(self.folder.read_bytes(file))
        except ValueError as error:
            raise ProblemError("unreadable-annotations", file, f"not valid COCO JSON: {error}") from None
        categories = _categories(sections["categories"], file)
        names = tuple(categories.values()) if class_names is None else class_names
        builder = AnnotationBuilder(self.folder, names, unit="annotation")

        def report(kind: str, message: str) -> None:
            builder.report(kind, file, message)

        index_of = self._add_images(sections["images"], split, file, builder, report)
        for row, one in read_entries(sections["annotations"], ANNOTATION_KINDS, "annotations", report).items():
            number = one.id if type(one.id) is int and abs(one.id) < _MAX_ID else row + 1
            if one.image_id not in index_of:
                report("bad-entry", f"annotation {number}: no image has id {one.image_id}")
                continue
            x, y, width, height = one.bbox
            builder.add_box(
                index_of[one.image_id],
                (x, y, x + width, y + height),
                categories.get(one.category_id, one.category_id),
                number=number,
                difficult=one.difficult,
                crowd=one.iscrowd,
                area=math.nan if one.area is None else one.area,
            )
        shift = max(0, 1 - min(builder.image_ids, default=1))
        builder.image_ids = [image_id + shift for image_id in builder.image_ids]
        return builder.dataset(name=self.name, split=split)

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

    def _add_images(
        self, section: Any, split: str, file: str, builder: AnnotationBuilder, report: Report
    ) -> dict[int, int]:
        """Adds the images; returns id → index, or -1 for an image that cannot be used."""
        entries = read_entries(section, {CocoImage: "bad-image-entry"}, "images", report)
        base = self._image_folder([one.file_name for one in list(entries.values())[:50] if one.file_name], split, file)
        index_of: dict[int, int] = {}
        for row, entry in entries.items():
            if entry.id in index_of:
                report("duplicate-image", f"images[{row}]: id {entry.id} is used again")
                continue
            index_of[entry.id] = -1
            if entry.file_name:
                size = image_size(entry.width, entry.height)
                index_of[entry.id] = builder.add_image(entry.file_name, size, file=file, base=base, image_id=entry.id)
            else:
                report("bad-image-entry", f"images[{row}]: image {entry.id} has no file_name")
        return index_of

    def _image_folder(self, names: Sequence[str], split: str, file: str) -> str:
        """The folder that contains most of these images."""
        parent = posixpath.dirname(file)
        places = (split, f"images/{split}", f"{split}/images", parent, posixpath.join(parent, "images"), "images", "")

        def exists(name: str, base: str) -> bool:
            try:
                return self.folder.has(self.folder.inside(name, base=base, named_in=""))
            except ProblemError:
                return True  # the place is right; the problem is reported when the image is added

        return max(places, key=lambda base: sum(exists(name, base) for name in names))


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
    in_place = posixpath.basename(folder) == "annotations" and is_usual_split(_split_name(file))
    return in_place or name.startswith("instances_") or name.lower() == "_annotations.coco.json"


def _split_name(file: str) -> str:
    """The distinctive part of an annotation file's name, or the name of its folder."""
    stem = posixpath.basename(file)[: -len(".json")]
    if stem.startswith("instances_"):
        return stem.removeprefix("instances_")
    names = (stem, posixpath.basename(posixpath.dirname(file)))
    return next(filter(None, (_FILLERS.sub("", name).strip("_.-") for name in names)), "all")


def _categories(section: Any, file: str) -> dict[int, str]:
    """Id → name, ascending by id."""

    def fail(kind: str, message: str) -> NoReturn:
        raise ProblemError(kind, file, message)

    entries = read_entries(section, {CocoCategory: "bad-categories"}, "categories", fail).values()
    names = {one.id: "" if one.name is UNSET else printable(str(one.name)) for one in entries}
    if len(names) < len(entries):
        fail("bad-categories", "two categories have the same id")
    check_class_names(list(names.values()), file=file)
    return dict(sorted(names.items()))
