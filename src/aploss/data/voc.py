"""Pascal VOC: the devkit, a single folder of it, and any folders of images and XML files."""

import posixpath
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from aploss.data.dataset import DetectionDataset
from aploss.data.paths import DatasetFolder
from aploss.data.problems import Problem, ProblemError
from aploss.data.records import Records
from aploss.data.source import split_order
from aploss.data.voc_layout import Entry, VocPart, stem_of
from aploss.data.voc_xml import VocAnnotation, parse_annotation

__all__ = ["VocSource", "find_voc"]

_CLASS_FILES = ("labels.txt", "classes.txt")
_YEAR = re.compile(r"VOC(\d{4})$")


def find_voc(path: Path) -> "VocSource | None":
    """The VOC dataset in a folder, or None where there is none.

    Looked for, in this order: ``VOCdevkit/VOC2007`` or ``VOC2007`` (splits ``2007_trainval``);
    ``Annotations`` with ``ImageSets/Main`` (splits by list); XML files anywhere, split by list
    files or by folders called ``train``, ``val``, ``test``; otherwise one split ``all``.
    """
    if not path.is_dir():
        return None
    folder = DatasetFolder(path)
    for base in ("VOCdevkit", ""):
        parts = [
            VocPart(folder, posixpath.join(base, name), prefix=f"{year[1]}_")
            for name in folder.names(base)
            if (year := _YEAR.match(name))
            and folder.is_folder(f"{base}/{name}/Annotations".strip("/"))
        ]
        if parts:
            return VocSource(folder, parts)
    part = VocPart(folder, "")
    return VocSource(folder, [part]) if part.annotations else None


class _Place(NamedTuple):
    """Where a split is: in which part, by which list file (or folder name)."""

    part: VocPart
    split: str


class VocSource:
    """A dataset of VOC annotation files; see :func:`find_voc`."""

    format = "voc"

    def __init__(self, folder: DatasetFolder, parts: Sequence[VocPart]) -> None:
        self.folder = folder
        self.name = folder.root.name
        self.parts = tuple(parts)
        self._places = {
            f"{part.prefix}{split}": _Place(part, split) for part in parts for split in part.splits
        }
        self.splits = tuple(sorted(self._places, key=self._order))
        self._parsed: dict[str, VocAnnotation | Problem] = {}
        self._used: set[str] = set()  # annotations and images of the splits that were read

    def _order(self, split: str) -> tuple[str, int, str]:
        part, name = self._places[split]
        return (part.prefix, *split_order(name))

    def read(self, split: str, class_names: Sequence[str] | None) -> DetectionDataset:
        """See :meth:`Source.read`."""
        names = self.class_names() if class_names is None else tuple(class_names)
        records = Records(self.folder, origin=1)
        annotations: list[VocAnnotation] = []
        zero_based = []
        part, listed = self._place(split)
        for entry in self._entries(part, listed, records):
            self._used.add(entry.annotation)
            annotation = self._parse(entry.annotation)
            if isinstance(annotation, Problem):
                records.problems.append(annotation)
                continue
            path = self._image(part, entry, annotation, records)
            self._used.add(path)
            image = records.add_image(path, annotation.size) if path else -1
            if image < 0:
                continue
            records.problems += annotation.problems
            annotations.append(annotation)
            if annotation.zero_based:
                zero_based.append(annotation.path)
            self._add_objects(records, annotation, image, names)
        if zero_based:
            records.report(
                "zero-based-box",
                zero_based[0],
                f"a corner at 0 in this and {len(zero_based) - 1} other files, VOC counts from 1",
            )
        return records.dataset(
            class_names=names,
            name=self.name,
            split=split,
            describe=lambda image, number: (annotations[image].path, f"object {number}"),
        )

    def class_names(self) -> tuple[str, ...]:
        """The classes: of ``labels.txt`` or ``classes.txt``, of the devkit's lists for single
        classes, otherwise of all annotations; the last two sorted."""
        for file in _CLASS_FILES:
            if self.folder.is_file(file):
                lines = map(str.strip, self.folder.read_text(file).splitlines())
                names = tuple(dict.fromkeys(line for line in lines if line))
                if names:
                    return names
        listed = {name for part in self.parts for name in part.class_lists}
        if listed:
            return tuple(sorted(listed))
        parsed = (self._parse(path) for part in self.parts for path in part.annotations)
        found = {o.name for a in parsed if isinstance(a, VocAnnotation) for o in a.objects}
        if not found:
            raise ProblemError(
                "no-classes",
                self.name,
                "no object with a class name in any annotation; give the class names",
            )
        return tuple(sorted(found))

    def leftovers(self) -> list[Problem]:
        """See :meth:`Source.leftovers`; of the splits that were read."""
        problems = []
        for part in self.parts:
            paired = {part.image_of(path) for path in part.annotations}
            for path in part.annotations:
                if path not in self._used:
                    there = bool(part.image_of(path))
                    kind = "unlisted-annotation" if there else "annotation-without-image"
                    problems.append(Problem(kind, path, "not in any split"))
            problems += [
                Problem("image-without-annotation", path, "no XML file of this name")
                for path in part.images
                if path not in self._used and path not in paired
            ]
        return problems

    def _place(self, split: str) -> _Place:
        if split not in self._places and len(self.parts) > 1:
            known = ", ".join(self.splits)
            raise ProblemError("missing-folder", split, f"no such split; there are: {known}")
        return self._places.get(split) or _Place(self.parts[0], split)

    def _entries(self, part: VocPart, split: str, records: Records) -> Iterator[Entry]:
        """The distinct images that a split lists."""
        seen = set()
        for entry in part.entries(split):
            if isinstance(entry, Problem):
                records.problems.append(entry)
            elif entry.annotation in seen:
                records.report("duplicate-image", entry.listed_in, f"{entry.key} is listed twice")
            else:
                seen.add(entry.annotation)
                yield entry

    def _image(
        self, part: VocPart, entry: Entry, annotation: VocAnnotation, records: Records
    ) -> str:
        """The image of an annotation: of the same name, otherwise the one named inside."""
        image = entry.image or part.image_named(annotation.file_name, annotation.path)
        if not image:
            wanted = annotation.file_name or f"{stem_of(annotation.path)} with any extension"
            records.report("missing-image", annotation.path, f"no image {wanted}")
            return ""
        if not records.find_image(image, named_in=annotation.path):
            return ""
        if annotation.file_name and stem_of(annotation.file_name) != stem_of(image):
            message = f"names the image {annotation.file_name!r}, taken is {image}"
            records.report("file-name-mismatch", annotation.path, message)
        rivals = part.rivals_of(image)
        if rivals:
            records.report("ambiguous-image", image, f"there is also {', '.join(rivals)}")
        return image

    def _parse(self, path: str) -> "VocAnnotation | Problem":
        if path not in self._parsed:
            try:
                annotation = parse_annotation(path, self.folder.read_bytes(path))
                if annotation.file_name:
                    base = posixpath.dirname(path)
                    self.folder.locate(annotation.file_name, base=base, named_in=path)
                self._parsed[path] = annotation
            except ProblemError as error:
                self._parsed[path] = error.problem
            except OSError as error:
                message = f"cannot be read: {error.strerror}"
                self._parsed[path] = Problem("unreadable-annotation", path, message)
        return self._parsed[path]

    def _add_objects(
        self, records: Records, annotation: VocAnnotation, image: int, names: tuple[str, ...]
    ) -> None:
        labels = {name: label for label, name in enumerate(names)}
        for item in annotation.objects:
            if item.name not in labels:
                records.report(
                    "unknown-class",
                    annotation.path,
                    f"object {item.number}: class {item.name!r} is not in the class list",
                )
                continue
            records.add_box(
                image,
                item.corners,
                labels[item.name],
                number=item.number,
                difficult=item.difficult,
                crowd=item.crowd,
            )
