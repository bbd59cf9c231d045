"""Pascal VOC: the devkit, a single folder of it, and any folders of images and XML files."""

import posixpath
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple
from xml.etree.ElementTree import Element, ParseError, SubElement, indent, tostring

import numpy as np
from defusedxml.common import DefusedXmlException
from defusedxml.ElementTree import fromstring

from aploss.data.annotations import AnnotationBuilder, DetectionDataset
from aploss.data.formats import (
    SPLITS,
    DataFormat,
    Parts,
    Written,
    common_split_name,
    each_image_once,
    filled_lines,
    image_size,
    number,
    outline_losses,
    register_format,
    split_order,
)
from aploss.data.paths import DatasetFolder, FilesByStem, is_image, nearest, stem_of
from aploss.data.problems import Problem, ProblemError

_MAX_BYTES = 64 << 20  # far more than any image's objects need
_CORNERS = ("xmin", "ymin", "xmax", "ymax")
_LIST_FOLDERS = ("", "ImageSets", "splits", "lists")
_YEAR = re.compile(r"VOC(\d{4})$")
_NOT_XML = re.compile("[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_ALL = "all"


# --- one annotation file ----------------------------------------------------------------------


class VocObject(NamedTuple):
    """An object with a class and four numbers, from pixel 0 on."""

    name: str
    number: int  # 1 for the first object of the file
    corners: tuple[float, float, float, float]
    difficult: bool
    crowd: bool


@dataclass(slots=True)
class VocAnnotation:
    """What a file says, and what is wrong with it apart from the values of its boxes."""

    path: str
    file_name: str = ""
    size: tuple[int, int] | None = None
    objects: list[VocObject] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    zero_based: bool = False


def parse_annotation(path: str, content: bytes) -> VocAnnotation:
    """Parses what is in a VOC annotation file; ``path`` is for messages.

    Coordinates in the file count pixels from 1 and include the last one, so that xmin is one more than the left edge
    and xmax is the right edge itself: a whole 640 x 480 image is written (1, 1, 640, 480) and read (0, 0, 640, 480).
    ProblemError for what is no VOC annotation, or contains a document type or entities.
    """
    root = _parse_safely(path, content)
    annotation = VocAnnotation(path, file_name=_text(root, "filename"), size=_image_size(root))
    if annotation.size is None:
        annotation.problems.append(Problem("missing-size", path, "no possible image size; taken from the image"))
    for position, element in enumerate(root.iterfind("object"), start=1):
        try:
            annotation.objects.append(_read_object(annotation, element, position))
        except ProblemError as error:
            annotation.problems.append(error.problem)
    return annotation


def _parse_safely(path: str, content: bytes) -> Element:
    if len(content) > _MAX_BYTES:
        raise ProblemError("unreadable-annotation", path, f"larger than {_MAX_BYTES >> 20} MB")
    try:
        root: Element = fromstring(content, forbid_dtd=True)
    except DefusedXmlException:
        message = "an XML document type or entity, which is not expanded; remove it from the file"
        raise ProblemError("xml-entities", path, message) from None
    except (ParseError, ValueError, LookupError, RecursionError) as error:
        raise ProblemError("unreadable-annotation", path, f"not valid XML: {error}") from None
    if root.tag != "annotation":
        raise ProblemError("unreadable-annotation", path, f"a VOC file holds <annotation>, this one <{root.tag}>")
    return root


def _read_object(annotation: VocAnnotation, element: Element, position: int) -> VocObject:
    name = _text(element, "name")
    where = f"object {position} ({name})" if name else f"object {position}"

    def fault(kind: str, message: str) -> ProblemError:
        return ProblemError(kind, annotation.path, f"{where}: {message}")

    if not name:
        raise fault("missing-class", "no class name")
    box = element.find("bndbox")
    if box is None:
        raise fault("missing-box", "no <bndbox>")
    texts = {corner: _text(box, corner) for corner in _CORNERS}
    if absent := [corner for corner, text in texts.items() if not text]:
        raise fault("missing-coordinate", f"no {', '.join(absent)}")
    try:
        xmin, ymin, xmax, ymax = map(number, texts.values())
    except ValueError as error:
        raise fault("non-numeric-coordinate", str(error)) from None
    annotation.zero_based |= 0 <= xmin < 1 or 0 <= ymin < 1
    flags = {tag: _text(element, tag) or "0" for tag in ("difficult", "crowd")}
    for tag, flag in flags.items():
        if flag not in ("0", "1"):
            annotation.problems.append(fault("bad-flag", f"{tag} is {flag!r}, neither 0 nor 1").problem)
    # Pixel 1 is where 0 begins; a file that counts from 0 must not give a box outside.
    left, top = (0.0 if 0 <= first < 1 else first - 1 for first in (xmin, ymin))
    return VocObject(name, position, (left, top, xmax, ymax), flags["difficult"] == "1", flags["crowd"] == "1")


def _image_size(root: Element) -> tuple[int, int] | None:
    try:
        return image_size(*(number(_text(root, f"size/{side}")) for side in ("width", "height")))
    except ValueError:
        return None


def _text(element: Element, path: str) -> str:
    return (element.findtext(path) or "").strip()


def voc_annotation(
    file_name: str,
    size: tuple[int, int],
    names: Sequence[str],
    boxes: Sequence[Sequence[float]],
    *,
    difficult: Sequence[bool] | None = None,
    crowd: Sequence[bool] | None = None,
    scores: Sequence[float] | None = None,
    digits: int | None = None,
) -> str:
    """The text of an annotation file, for :func:`parse_annotation` to read back.

    Args:
        file_name: of the image.
        size: its width and height.
        names: class of each of the n objects.
        boxes: [n, 4] xyxy with the first pixel at 0.
        difficult: flags of the objects; none where not given.
        crowd: flags of the objects, not in VOC, but no reader minds them.
        scores: of detections.
        digits: of the coordinates behind the point; as many as they have where not given.

    Example:
        >>> text = voc_annotation("a.jpg", (64, 48), ["cat"], [[0, 0, 64, 48]])
        >>> parse_annotation("a.xml", text.encode()).objects[0].corners
        (0.0, 0.0, 64.0, 48.0)
    """
    root = Element("annotation")
    _add(root, "filename", file_name)
    sides = SubElement(root, "size")
    for side, pixels in zip(("width", "height", "depth"), (*size, 3), strict=True):
        _add(sides, side, str(pixels))
    for row, (name, (x1, y1, x2, y2)) in enumerate(zip(names, boxes, strict=True)):
        item = SubElement(root, "object")
        _add(item, "name", name)
        _add(item, "difficult", "1" if difficult and difficult[row] else "0")
        if crowd and crowd[row]:
            _add(item, "crowd", "1")
        if scores is not None:
            _add(item, "score", f"{scores[row]:.4f}")
        corners = SubElement(item, "bndbox")
        for tag, value in zip(_CORNERS, (x1 + 1.0, y1 + 1.0, float(x2), float(y2)), strict=True):  # from 1, as in VOC
            whole = str(int(value)) if value.is_integer() else repr(value)
            _add(corners, tag, whole if digits is None else f"{value:.{digits}f}")
    indent(root)
    return tostring(root, encoding="unicode") + "\n"


def _add(parent: Element, tag: str, text: str) -> None:
    SubElement(parent, tag).text = _NOT_XML.sub("\ufffd", text)


# --- where annotations, images and lists are -----------------------------------------------------


class ListedImage(NamedTuple):
    """An image that a split lists."""

    key: str  # as written in the list
    annotation: str
    image: str  # empty where no image has the annotation's name
    listed_in: str


class VocPart:
    """One folder with its own annotations and splits, such as ``VOC2007``.

    Its folder is ``base`` below the dataset's, its splits' names begin with ``prefix`` (``2007_``). ``class_lists`` are
    the classes for which there are lists such as ``dog_train.txt``.
    """

    def __init__(self, folder: DatasetFolder, base: str, *, prefix: str = "") -> None:
        self.folder = folder
        self.base = base
        self.prefix = prefix
        files = folder.files(self._root("Annotations"))
        self.annotations = FilesByStem(path for path in files if path.lower().endswith(".xml"))
        self.class_lists: set[str] = set()
        if not self.annotations:
            return
        self.images = FilesByStem(filter(is_image, folder.files(self._root("JPEGImages"))))
        self._lists = self._find_lists()
        self._folders = {} if self._lists else self._find_folders()
        self.splits = tuple(self._lists or self._folders or (_ALL,))

    def entries(self, split: str) -> Iterator[ListedImage | Problem]:
        """What a split, or a list file (below the dataset's folder or anywhere), lists; or what is wrong with it."""
        if split in self._folders:
            yield from (self._entry(path, path, split) for path in self._folders[split])
        elif split == _ALL and _ALL not in self._lists:
            yield from (self._entry(path, path, self.base) for path in self.annotations)
        else:
            name, text = self._read_list(split)
            yield from (self._listed(line, name) for line in filled_lines(text))

    def image_of(self, annotation: str) -> str:
        """The image that an annotation file belongs to by its name; empty where there is none."""
        return self.images.nearest(annotation)

    def image_named(self, file_name: str, annotation: str) -> str:
        """The image that an annotation names inside; empty where there is none."""
        name = posixpath.basename(file_name.replace("\\", "/"))
        candidates = self.images.alike(name)
        return nearest(annotation, [p for p in candidates if posixpath.basename(p) == name])

    def rivals_of(self, image: str) -> list[str]:
        """Other images of the same name but extension in the same folder."""
        same_folder = (path for path in self.images.alike(image) if posixpath.dirname(path) == posixpath.dirname(image))
        return [path for path in same_folder if path != image]

    def _root(self, name: str) -> str:
        standard = posixpath.join(self.base, name)
        return standard if self.folder.is_folder(standard) else self.base

    def _find_lists(self) -> dict[str, str]:
        main = posixpath.join(self.base, "ImageSets", "Main")
        if self.folder.is_folder(main):
            return self._main_lists(main)
        parents = [posixpath.join(self.base, folder).rstrip("/") for folder in _LIST_FOLDERS]
        return {
            name.removesuffix(".txt"): path
            for parent in parents
            for name in self.folder.names(parent)
            if name.endswith(".txt") and self._is_list(path := posixpath.join(parent, name))
        }

    def _main_lists(self, main: str) -> dict[str, str]:
        """The lists of ImageSets/Main, but for those of one class: ``dog_train.txt`` with ±1."""
        stems = [name.removesuffix(".txt") for name in self.folder.names(main) if name.endswith(".txt")]
        lists = {}
        for stem in stems:
            class_name, _, split = stem.rpartition("_")
            path = posixpath.join(main, f"{stem}.txt")
            if class_name and split in stems:
                first = self.folder.read_text(path).split("\n", 1)[0]
                if first.split()[1:] in (["1"], ["0"], ["-1"]):
                    self.class_lists.add(class_name)
                    continue
            lists[stem] = path
        return lists

    def _is_list(self, path: str) -> bool:
        """Whether a text file lists images of ours, judged by its first lines."""
        if common_split_name(posixpath.basename(path)[: -len(".txt")]) in SPLITS:
            return True
        try:
            lines = self.folder.read_text(path).split("\n", 20)[:20]
        except ProblemError:
            return False
        listed = [self._listed(line.strip(), path) for line in lines if line.strip()]
        found = sum(isinstance(entry, ListedImage) for entry in listed)
        refused = any(isinstance(e, Problem) and e.kind == "path-outside-dataset" for e in listed)
        return refused or (found > 0 and found >= len(listed) / 2)

    def _find_folders(self) -> dict[str, list[str]]:
        """Annotations by the folder on their path that is called train, val, valid, test, ..."""
        folders: dict[str, list[str]] = {}
        for path in self.annotations:
            parts = posixpath.relpath(path, self.base or ".").split("/")[:-1]
            names = [part for part in parts if common_split_name(part) in SPLITS]
            if not names:
                return {}
            folders.setdefault(names[0], []).append(path)
        return folders

    def _read_list(self, split: str) -> tuple[str, str]:
        path = self._lists.get(split, split)
        if split not in self._lists:
            if Path(split).is_file():
                # A list that the user names may lie anywhere; what it lists may not.
                return split, Path(split).read_text(encoding="utf-8-sig", errors="replace")
            if not self.folder.is_file(self.folder.inside(path, named_in=path)):
                known = ", ".join(f"{self.prefix}{name}" for name in self.splits)
                raise ProblemError("missing-folder", path, f"no such split or list; there are: {known}")
        return path, self.folder.read_text(path)

    def _listed(self, line: str, listed_in: str) -> ListedImage | Problem:
        """One line: an id, an image, an annotation, or an image and its annotation."""
        try:
            path = self.folder.inside(line, named_in=listed_in)
            annotation = self.annotations.nearest(path)
            words = line.split()
            if not annotation and len(words) > 1:
                pair = [self.folder.inside(word, named_in=listed_in) for word in words]
                path = pair[0]
                annotation = self.annotations.nearest(pair[1 if pair[1].endswith(".xml") else 0])
        except ProblemError as error:
            return error.problem
        if annotation:
            return self._entry(annotation, path, listed_in)
        if image := self.images.nearest(path):
            return Problem("missing-annotation", image, f"listed in {listed_in}, but there is no {stem_of(path)}.xml")
        return Problem("missing-annotation", listed_in, f"{path}: neither annotation nor image")

    def _entry(self, annotation: str, listed: str, listed_in: str) -> ListedImage:
        named = self.images.nearest(listed) if is_image(listed) else ""
        return ListedImage(listed, annotation, named or self.image_of(annotation), listed_in)


# --- the dataset --------------------------------------------------------------------------------


@register_format("voc")
class VocFormat(DataFormat):
    """A dataset of VOC annotation files.

    Looked for, in this order: ``VOCdevkit/VOC2007`` or ``VOC2007`` (splits ``2007_trainval``); ``Annotations`` with
    ``ImageSets/Main`` (splits by list); XML files anywhere, split by list files or by folders called ``train``,
    ``val``, ``test``; otherwise one split ``all``.
    """

    looked_for = "VOC (VOCdevkit/VOC2007, Annotations/*.xml, or *.xml in any folder)"
    one_image_folder = True

    def __init__(self, folder: DatasetFolder, parts: Sequence[VocPart]) -> None:
        self.parts = tuple(parts)
        self._places = {f"{part.prefix}{split}": (part, split) for part in parts for split in part.splits}
        super().__init__(folder, list(self._places))
        places = sorted(self._places.items(), key=lambda item: (item[1][0].prefix, *split_order(item[1][1])))
        self.splits = tuple(name for name, _ in places)
        self._parsed: dict[str, VocAnnotation | Problem] = {}
        self._used: set[str] = set()  # annotations and images of the splits that were read

    @classmethod
    def find(cls, path: Path) -> "VocFormat | None":
        """The VOC dataset in a folder, or None where there is none."""
        if not path.is_dir():
            return None
        folder = DatasetFolder(path)
        for base in ("VOCdevkit", ""):
            parts = [
                VocPart(folder, posixpath.join(base, name), prefix=f"{year[1]}_")
                for name in folder.names(base)
                if (year := _YEAR.match(name)) and folder.is_folder(f"{base}/{name}/Annotations".strip("/"))
            ]
            if parts := [part for part in parts if part.annotations]:
                return cls(folder, parts)
        part = VocPart(folder, "")
        return cls(folder, [part]) if part.annotations else None

    def read(self, split: str, class_names: Sequence[str] | None) -> DetectionDataset:
        """See :meth:`DataFormat.read`."""
        names = self.class_names() if class_names is None else tuple(class_names)
        labels = {name: label for label, name in enumerate(names)}
        builder = AnnotationBuilder(self.folder, origin=1)
        annotations: list[VocAnnotation] = []
        if split not in self._places and len(self.parts) > 1:
            raise self.no_such_split(split)
        part, listed = self._places.get(split, (self.parts[0], split))
        for entry in self._entries(part, listed, builder):
            self._used.add(entry.annotation)
            annotation = self._parse(entry.annotation)
            if isinstance(annotation, Problem):
                builder.problems.append(annotation)
                continue
            path = self._image(part, entry, annotation, builder)
            self._used.add(path)
            image = builder.add_image(path, annotation.size) if path else -1
            if image >= 0:
                annotations.append(annotation)
                _add_objects(builder, annotation, image, labels)
        if zero_based := [annotation.path for annotation in annotations if annotation.zero_based]:
            message = f"a corner at 0 in this and {len(zero_based) - 1} other files, VOC counts from 1"
            builder.report("zero-based-box", zero_based[0], message)
        return builder.dataset(
            class_names=names,
            name=self.name,
            split=split,
            describe=lambda image, number: (annotations[image].path, f"object {number}"),
        )

    def class_names(self) -> tuple[str, ...]:
        """Those of ``labels.txt`` or ``classes.txt``, of the devkit's lists for single classes, or of all annotations;
        the last two sorted."""
        for file in ("labels.txt", "classes.txt"):
            if self.folder.is_file(file) and (lines := filled_lines(self.folder.read_text(file))):
                return tuple(dict.fromkeys(lines))
        found = {name for part in self.parts for name in part.class_lists}
        if not found:
            parsed = (self._parse(path) for part in self.parts for path in part.annotations)
            found = {o.name for a in parsed if isinstance(a, VocAnnotation) for o in a.objects}
        if not found:
            message = "no object with a class name in any annotation; give the class names"
            raise ProblemError("no-classes", self.name, message)
        return tuple(sorted(found))

    def leftovers(self) -> list[Problem]:
        """See :meth:`DataFormat.leftovers`; of the splits that were read."""
        problems = []
        for part in self.parts:
            paired = {part.image_of(path) for path in part.annotations}
            for path in part.annotations:
                if path not in self._used:
                    kind = "unlisted-annotation" if part.image_of(path) else "annotation-without-image"
                    problems.append(Problem(kind, path, "not in any split"))
            problems += [
                Problem("image-without-annotation", path, "no XML file of this name")
                for path in part.images
                if path not in self._used and path not in paired
            ]
        return problems

    @classmethod
    def write(cls, folder: Path, parts: Parts, places: dict[Path, str]) -> Written:
        """Writes ``Annotations/NAME.xml``, ``ImageSets/Main/SPLIT.txt`` and ``labels.txt``, for images in
        ``JPEGImages``; see :meth:`DataFormat.write`."""
        for name in ("Annotations", "ImageSets/Main"):
            (folder / name).mkdir(parents=True)
        for split, part in parts.items():
            listed = [stem_of(places[part.image_path(i)]) + "\n" for i in range(len(part))]
            (folder / "ImageSets" / "Main" / f"{split}.txt").write_text("".join(listed), "utf-8")
        lost = 0
        for part, index in each_image_once(parts):
            name, boxes = places[part.image_path(index)], part.boxes(index)
            kept = (boxes[:, 2:] - boxes[:, :2]).min(axis=1, initial=np.inf) > 1
            lost += int((~kept).sum())
            text = voc_annotation(
                name,
                part.image_size(index),
                [part.class_names[label] for label in part.labels(index)[kept].tolist()],
                boxes[kept].tolist(),
                difficult=part.difficult(index)[kept].tolist(),
                crowd=part.crowd(index)[kept].tolist(),
            )
            (folder / "Annotations" / f"{stem_of(name)}.xml").write_text(text, "utf-8")
        class_names = next(iter(parts.values())).class_names
        (folder / "labels.txt").write_text("".join(f"{name}\n" for name in class_names), "utf-8")
        losses = [f"{lost} boxes of one pixel's width or height or less"] if lost else []
        return Written("JPEGImages", lost, (*losses, *outline_losses(parts)))

    def _entries(self, part: VocPart, split: str, builder: AnnotationBuilder) -> Iterator[ListedImage]:
        """The distinct images that a split lists."""
        seen = set()
        for entry in part.entries(split):
            if isinstance(entry, Problem):
                builder.problems.append(entry)
            elif entry.annotation in seen:
                builder.report("duplicate-image", entry.listed_in, f"{entry.key} is listed twice")
            else:
                seen.add(entry.annotation)
                yield entry

    def _image(self, part: VocPart, entry: ListedImage, annotation: VocAnnotation, builder: AnnotationBuilder) -> str:
        """The image of an annotation: of the same name, otherwise the one named inside."""
        image = entry.image or part.image_named(annotation.file_name, annotation.path)
        if not image:
            wanted = annotation.file_name or f"{stem_of(annotation.path)} with any extension"
            builder.report("missing-image", annotation.path, f"no image {wanted}")
            return ""
        if not builder.find_image(image, named_in=annotation.path):
            return ""
        if annotation.file_name and stem_of(annotation.file_name) != stem_of(image):
            message = f"names the image {annotation.file_name!r}, taken is {image}"
            builder.report("file-name-mismatch", annotation.path, message)
        if rivals := part.rivals_of(image):
            builder.report("ambiguous-image", image, f"there is also {', '.join(rivals)}")
        return image

    def _parse(self, path: str) -> VocAnnotation | Problem:
        if path not in self._parsed:
            try:
                annotation = parse_annotation(path, self.folder.read_bytes(path))
                if annotation.file_name:
                    self.folder.locate(annotation.file_name, base=posixpath.dirname(path), named_in=path)
                self._parsed[path] = annotation
            except ProblemError as error:
                self._parsed[path] = error.of_one_image()
        return self._parsed[path]


def _add_objects(builder: AnnotationBuilder, annotation: VocAnnotation, image: int, labels: dict[str, int]) -> None:
    builder.problems += annotation.problems
    for item in annotation.objects:
        if item.name not in labels:
            message = f"object {item.number}: class {item.name!r} is not in the class list"
            builder.report("unknown-class", annotation.path, message)
            continue
        flags = {"difficult": item.difficult, "crowd": item.crowd}
        builder.add_box(image, item.corners, labels[item.name], number=item.number, **flags)
