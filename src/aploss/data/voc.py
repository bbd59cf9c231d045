"""Pascal VOC: the devkit, XML files beside their images, and a folder of XML files parallel to a folder of images."""

import posixpath
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element, ParseError, SubElement, indent, tostring

from defusedxml.common import DefusedXmlException
from defusedxml.ElementTree import fromstring

from aploss.data.annotations import AnnotationBuilder, DetectionDataset, distinct
from aploss.data.folder import DatasetFolder, Problem, ProblemError, filled_lines, is_image, stem_of
from aploss.data.formats import DataFormat, Parts, image_size, is_usual_split, lost_areas, register_format, split_order

_CORNERS = ("xmin", "ymin", "xmax", "ymax")
_YEAR = re.compile(r"VOC(\d{4})$")
_NOT_XML = re.compile("[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


# --- one annotation file ----------------------------------------------------------------------


@dataclass(slots=True)
class VocAnnotation:
    """The content of a file, and every problem with it except for the values of its boxes."""

    path: str
    file_name: str = ""
    size: tuple[int, int] | None = None
    objects: list[dict[str, Any]] = field(default_factory=list)  # arguments of :meth:`AnnotationBuilder.add_box`
    problems: list[Problem] = field(default_factory=list)


def parse_annotation(path: str, content: bytes) -> VocAnnotation:
    """Parses a VOC annotation file; ``path`` is used in messages.

    Coordinates in the file count pixels from 1 and include the last one, so xmin is the left edge plus one and xmax is
    the right edge itself: a whole 640 x 480 image is written (1, 1, 640, 480) and read (0, 0, 640, 480).

    Raises:
        ProblemError: the file is not a VOC annotation, or contains a document type or entities.
    """
    try:
        root: Element = fromstring(content, forbid_dtd=True)
    except DefusedXmlException:
        message = "contains an XML document type or entity, which is not expanded; remove it from the file"
        raise ProblemError("xml-entities", path, message) from None
    except (ParseError, ValueError, LookupError, RecursionError) as error:
        raise ProblemError("unreadable-annotation", path, f"not valid XML: {error}") from None
    if root.tag != "annotation":
        raise ProblemError("unreadable-annotation", path, f"expected <annotation>, got <{root.tag}>")
    annotation = VocAnnotation(path, file_name=_text(root, "filename"))
    with suppress(ValueError):
        annotation.size = image_size(*(float(_text(root, f"size/{side}")) for side in ("width", "height")))
    for position, element in enumerate(root.iterfind("object"), start=1):
        try:
            annotation.objects.append(_read_object(path, element, position))
        except ProblemError as error:
            annotation.problems.append(error.problem)
    return annotation


def _read_object(path: str, element: Element, position: int) -> dict[str, Any]:
    name = _text(element, "name")
    if not name:
        raise ProblemError("unknown-class", path, f"object {position}: no class name")
    try:
        xmin, ymin, xmax, ymax = (float(_text(element, f"bndbox/{corner}")) for corner in _CORNERS)
    except ValueError as error:
        message = f"object {position} ({name}): <bndbox> needs {', '.join(_CORNERS)}: {error!s:.100}"
        raise ProblemError("bad-box", path, message) from None
    # In a file that counts from 0, the first pixel must not end up outside the image.
    left, top = (0.0 if 0 <= first < 1 else first - 1 for first in (xmin, ymin))
    flags = {flag: _text(element, flag) == "1" for flag in ("difficult", "crowd")}
    return {"corners": (left, top, xmax, ymax), "class_name": name, "number": position, **flags}


def _text(element: Element, path: str) -> str:
    return (element.findtext(path) or "").strip()


def voc_annotation(dataset: DetectionDataset, index: int, file_name: str) -> str:
    """The text of an image's annotation file, the inverse of :func:`parse_annotation`.

    Coordinates have as many decimals as needed to read the same numbers back. The flag ``crowd`` is an extension of VOC
    that other readers ignore.
    """
    target = dataset.target(index)
    root = Element("annotation")
    _add(root, "filename", file_name)
    sides = SubElement(root, "size")
    for side, pixels in zip(("width", "height", "depth"), (*dataset.image_size(index), 3), strict=True):
        _add(sides, side, str(pixels))
    for row, (x1, y1, x2, y2) in enumerate(target["boxes"].tolist()):
        item = SubElement(root, "object")
        _add(item, "name", dataset.class_names[target["labels"][row]])
        _add(item, "difficult", str(int(target["difficult"][row])))
        if target["crowd"][row]:
            _add(item, "crowd", "1")
        corners = SubElement(item, "bndbox")
        for tag, value in zip(_CORNERS, (x1 + 1.0, y1 + 1.0, x2, y2), strict=True):
            _add(corners, tag, str(int(value)) if value.is_integer() else repr(value))
    indent(root)
    return tostring(root, encoding="unicode") + "\n"


def _add(parent: Element, tag: str, text: str) -> None:
    SubElement(parent, tag).text = _NOT_XML.sub("\ufffd", text)


# --- the dataset --------------------------------------------------------------------------------


@register_format("voc")
class VocFormat(DataFormat):
    """A dataset of VOC annotation files, in one of three layouts.

    The devkit: ``VOCdevkit/VOC2007`` or ``VOC2007`` (splits ``2007_trainval``, ...), or such a folder itself, with
    ``Annotations``, ``JPEGImages`` and ``ImageSets/Main``. XML files beside their images, or a folder of XML files
    parallel to a folder of images: split by folders called ``train``, ``val``, ``test``, otherwise ``all``.

    Args:
        folder: the dataset.
        years: prefix of the names of splits → folder with ``Annotations`` and images.
    """

    looked_for = "VOC (VOCdevkit/VOC2007, or *.xml beside the images or in a parallel folder)"
    image_folder = "JPEGImages"

    def __init__(self, folder: DatasetFolder, years: dict[str, str]) -> None:
        super().__init__(folder, [])
        self.annotations: list[str] = []
        self._images_of: dict[str, list[str]] = {}  # name without extension → paths
        self._entries: dict[str, str | list[str]] = {}  # split → list file, or annotations
        self._parsed: dict[str, VocAnnotation | Problem] = {}
        for prefix, base in years.items():
            own = [path for path in self._files(base, "Annotations") if path.lower().endswith(".xml")]
            for path in filter(is_image, self._files(base, "JPEGImages") if own else ()):
                self._images_of.setdefault(stem_of(path), []).append(path)
            splits: dict[str, Any] = self._lists(base) or _by_folder(base, own) or {"all": own}
            if own:
                self._entries |= {f"{prefix}{split}": splits[split] for split in sorted(splits, key=split_order)}
            self.annotations += own
        self.splits = tuple(self._entries)

    @classmethod
    def find(cls, path: Path) -> "VocFormat | None":
        """See :meth:`DataFormat.find`."""
        if not path.is_dir():
            return None
        folder = DatasetFolder(path)
        for parent in ("VOCdevkit", ""):
            years = [year for name in folder.names(parent) if (year := _YEAR.match(name))]
            source = cls(folder, {f"{year[1]}_": posixpath.join(parent, year[0]) for year in years})
            if source.annotations:
                return source
        source = cls(folder, {"": ""})
        return source if source.annotations else None

    def read(self, split: str, class_names: Sequence[str] | None) -> DetectionDataset:
        """See :meth:`DataFormat.read`."""
        builder = AnnotationBuilder(self.folder, class_names or self.class_names(), origin=1)
        for annotation in self._annotations(split, builder):
            path = self._image_of(annotation)
            if not path:
                wanted = annotation.file_name or stem_of(annotation.path)
                message = f"no image {wanted} beside the annotation or in a parallel folder"
                builder.report("missing-image", annotation.path, message)
                continue
            image = builder.add_image(path, annotation.size, file=annotation.path, base=None)
            builder.problems += annotation.problems if image >= 0 else []
            for one in annotation.objects:
                builder.add_box(image, **one)
        return builder.dataset(name=self.name, split=split)

    def class_names(self) -> tuple[str, ...]:
        """The lines of ``labels.txt``, otherwise the classes of all annotations, sorted."""
        if self.folder.is_file("labels.txt") and (lines := filled_lines(self.folder.read_text("labels.txt"))):
            return tuple(dict.fromkeys(lines))
        parsed = map(self._parse, self.annotations)
        found = {item["class_name"] for one in parsed if isinstance(one, VocAnnotation) for item in one.objects}
        if not found:
            raise ProblemError("bad-categories", self.name, "no object with a class name; give the class names")
        return tuple(sorted(found))

    @classmethod
    def write(cls, folder: Path, parts: Parts, names: dict[Path, str]) -> list[str]:
        """See :meth:`DataFormat.write`; ``Annotations``, ``ImageSets/Main`` with the splits, and ``labels.txt``."""
        lists, annotations = folder / "ImageSets" / "Main", folder / "Annotations"
        lists.mkdir(parents=True)
        annotations.mkdir()
        for split, part in parts.items():
            listed = [stem_of(names[part.image_path(i)]) + "\n" for i in range(len(part))]
            (lists / f"{split}.txt").write_text("".join(listed), "utf-8")
        thin = 0
        for part in distinct(parts.values()):
            thin += int((part.boxes[:, 2:] - part.boxes[:, :2] <= 1).any(axis=1).sum())
            for index in range(len(part)):
                name = names[part.image_path(index)]
                (annotations / f"{stem_of(name)}.xml").write_text(voc_annotation(part, index, name), "utf-8")
        class_names = next(iter(parts.values())).class_names
        (folder / "labels.txt").write_text("".join(f"{name}\n" for name in class_names), "utf-8")
        losses = [f"{thin} boxes of at most one pixel's width or height, which are dropped on reading"] if thin else []
        return [*losses, *lost_areas(parts)]

    def _files(self, base: str, name: str) -> Iterator[str]:
        standard = posixpath.join(base, name)
        return self.folder.files(standard if self.folder.is_folder(standard) else base)

    def _lists(self, base: str) -> dict[str, str]:
        """Split → list file in ``ImageSets/Main``, without the lists of single classes: ``dog_train.txt`` with ±1."""
        main = posixpath.join(base, "ImageSets", "Main")
        lists = {}
        for name in self.folder.names(main):
            stem, extension = posixpath.splitext(name)
            file = posixpath.join(main, name)
            first_line = self.folder.read_text(file).split("\n", 1)[0] if "_" in stem and extension == ".txt" else ""
            if extension == ".txt" and first_line.split()[1:] not in (["1"], ["0"], ["-1"]):
                lists[stem] = file
        return lists

    def _annotations(self, split: str, builder: AnnotationBuilder) -> Iterator[VocAnnotation]:
        """The readable annotations of a split.

        The images of a test split without a single annotation, as benchmarks publish it, have no objects.
        """
        entries = self._entries[split]
        paths = list(self._listed(entries)) if isinstance(entries, str) else entries
        if paths and split.endswith("test") and not any(map(self.folder.has, paths)):
            message = "no image has an annotation; used as images without objects"
            builder.report("image-without-annotation", split, message, count=len(paths))
            yield from map(VocAnnotation, paths)
            return
        for parsed in map(self._parse, paths):
            if isinstance(parsed, Problem):
                builder.problems.append(parsed)
            else:
                yield parsed

    def _listed(self, file: str) -> Iterator[str]:
        """The annotations of the images in a list, whether they exist or not."""
        folder = posixpath.normpath(posixpath.join(posixpath.dirname(file), "..", "..", "Annotations"))
        for line in filled_lines(self.folder.read_text(file)):
            whole, first = (posixpath.join(folder, f"{stem_of(name)}.xml") for name in (line, line.split()[0]))
            yield whole if self.folder.has(whole) else first

    def _image_of(self, annotation: VocAnnotation) -> str:
        """The image of an annotation, by its own name or the file name it contains; empty if there is none.

        It lies beside the annotation or in a parallel folder, one whose path differs in one name:
        ``JPEGImages/a.jpg`` for ``Annotations/a.xml``, ``train/images/a.jpg`` for ``train/xml/a.xml``.
        """
        own = annotation.path.split("/")[:-1]

        def differing(image: str) -> int:
            other = image.split("/")[:-1]
            return sum(a != b for a, b in zip(own, other, strict=True)) if len(own) == len(other) else len(own) + 1

        for name in (annotation.path, annotation.file_name):
            nearest = min(self._images_of.get(stem_of(name), []), key=differing, default="")
            if nearest and differing(nearest) <= 1:
                return nearest
        return ""

    def _parse(self, path: str) -> VocAnnotation | Problem:
        if path not in self._parsed:
            try:
                content = self.folder.read_bytes(path, kind="unreadable-annotation")
                self._parsed[path] = parse_annotation(path, content)
            except ProblemError as error:
                self._parsed[path] = error.problem
        return self._parsed[path]


def _by_folder(base: str, annotations: Sequence[str]) -> dict[str, list[str]]:
    """Annotations by the folder on their path that is called train, val, valid, test, ..."""
    folders: dict[str, list[str]] = {}
    for path in annotations:
        parts = posixpath.relpath(path, base or ".").split("/")[:-1]
        names = list(filter(is_usual_split, parts))
        if not names:
            return {}
        folders.setdefault(names[0], []).append(path)
    return folders
