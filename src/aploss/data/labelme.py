"""LabelMe: a JSON file for each image, as the annotation tool of that name writes them."""

import posixpath
import re
from collections.abc import Sequence
from math import dist
from pathlib import Path
from typing import Any

from msgspec import UNSET, Struct

from aploss.data.annotations import AnnotationBuilder, DetectionDataset
from aploss.data.coco import decode_json, shown
from aploss.data.formats import (
    SPLITS,
    DataFormat,
    common_split_name,
    filled_lines,
    image_size,
    is_text,
    json_begins_with,
    number,
    register_format,
)
from aploss.data.paths import DatasetFolder, FilesByStem, is_image
from aploss.data.problems import Problem, ProblemError

_KEYS = re.compile(rb'"(shapes|imagePath|imageData)"\s*:')
_OUTLINES = ("rectangle", "polygon", "mask")  # whose points, two or more, enclose the object


class LabelMeDocument(Struct):
    """What is read of a file; the image that may be inside it is skipped."""

    shapes: Any = UNSET
    imagePath: Any = UNSET  # noqa: N815 - as LabelMe writes it
    imageWidth: Any = UNSET  # noqa: N815
    imageHeight: Any = UNSET  # noqa: N815


def shape_corners(shape: dict[str, Any]) -> tuple[float, float, float, float]:
    """The box that encloses a shape: x1, y1, x2, y2; ValueError where it has none, or its points are not numbers.

    Example:
        >>> shape_corners({"shape_type": "polygon", "points": [[4, 9], [8, 2], [6, 5]]})
        (4.0, 2.0, 8.0, 9.0)
        >>> shape_corners({"shape_type": "circle", "points": [[10, 10], [13, 14]]})  # centre, and a point on it
        (5.0, 5.0, 15.0, 15.0)
    """
    kind, points = shape.get("shape_type") or "polygon", shape.get("points")
    if not isinstance(points, list) or any(not isinstance(point, list) or len(point) != 2 for point in points):
        raise ValueError(f"'points' is {shown(points)}, expected a list of [x, y]")
    corners = [(number(x), number(y)) for x, y in points]
    if kind == "circle" and len(corners) == 2:
        (x, y), radius = corners[0], dist(*corners)
        return x - radius, y - radius, x + radius, y + radius
    if kind not in _OUTLINES or len(corners) < 2:
        raise ValueError(f"a {kind} of {len(corners)} points has no box; drawn as rectangle or polygon it has")
    columns = list(zip(*corners, strict=True))
    return min(columns[0]), min(columns[1]), max(columns[0]), max(columns[1])


@register_format("labelme")
class LabelMeFormat(DataFormat):
    """A folder of images with a JSON file of the same name for each that is annotated.

    Splits are the folders called ``train``, ``val`` or ``test``, otherwise ``all``. Classes are the lines of
    ``labels.txt`` without those that begin with an underscore, otherwise all labels, sorted.
    """

    looked_for = "LabelMe (a JSON file with shapes and imagePath beside each image)"

    def __init__(self, folder: DatasetFolder, files: Sequence[str], images: FilesByStem) -> None:
        named = {  # the folder on the way to a file that is called as a split is
            file: next((name for name in file.split("/")[:-1] if common_split_name(name) in SPLITS), "")
            for file in files
        }
        elsewhere = "unsplit" if any(named.values()) else "all"
        self._files: dict[str, list[str]] = {}
        for file, split in named.items():
            self._files.setdefault(split or elsewhere, []).append(file)
        super().__init__(folder, list(self._files))
        self._images = images
        self._documents: dict[str, LabelMeDocument] = {}
        self._used: set[str] = set()

    @classmethod
    def find(cls, path: Path) -> "LabelMeFormat | None":
        """The LabelMe files of a folder, or None where there are none."""
        if not path.is_dir():
            return None
        folder = DatasetFolder(path)
        everything = list(folder.files())
        files = [file for file in everything if file.lower().endswith(".json")]
        ours = {file for file in files if json_begins_with(folder, file, _KEYS)}
        if not ours:
            return None
        images = FilesByStem(filter(is_image, everything))
        # A file with the name of an image is its annotation even if it cannot be read: never left alone.
        return cls(folder, [file for file in files if file in ours or _beside(file, images)], images)

    def read(self, split: str, class_names: Sequence[str] | None) -> DetectionDataset:
        """See :meth:`DataFormat.read`."""
        if split not in self._files:
            raise self.no_such_split(split)
        names = tuple(self.class_names() if class_names is None else class_names)
        labels = {name: label for label, name in enumerate(names)}
        builder, files, seen = AnnotationBuilder(self.folder), list[str](), set[str]()
        for file in self._files[split]:
            try:
                document = self._document(file)
                path = self._image(file, document, builder)
            except ProblemError as error:
                builder.problems.append(error.of_one_image())
                continue
            if path in seen:
                builder.report("duplicate-image", file, f"{path} is annotated by another file, too")
                continue
            size = image_size(document.imageWidth, document.imageHeight)
            image = builder.add_image(path, size) if path else -1
            seen |= {path} if path else set()
            if image >= 0:
                files.append(file)
                self._add_shapes(builder, image, file, document.shapes, labels)
        return builder.dataset(
            class_names=names, name=self.name, split=split, describe=lambda image, row: (files[image], f"shape {row}")
        )

    def class_names(self) -> tuple[str, ...]:
        """Those of ``labels.txt``, otherwise of all shapes, sorted."""
        if self.folder.is_file("labels.txt"):
            lines = filled_lines(self.folder.read_text("labels.txt"))
            if names := [line for line in lines if not line.startswith("_")]:  # __ignore__, _background_
                return tuple(dict.fromkeys(names))
        found = set()
        for file in (file for files in self._files.values() for file in files):
            try:
                shapes = self._document(file).shapes
            except ProblemError:  # told when its split is read
                continue
            found |= {label for shape in shapes if (label := _label(shape))}
        if not found:
            raise ProblemError("no-classes", self.name, "no shape with a label in any file; give the class names")
        return tuple(sorted(found))

    def leftovers(self) -> list[Problem]:
        """See :meth:`DataFormat.leftovers`; of the folders that annotations are in."""
        folders = {posixpath.dirname(file) for files in self._files.values() for file in files}
        return [
            Problem("image-without-annotation", path, "no JSON file of this name; not loaded")
            for path in self._images
            if posixpath.dirname(path) in folders and path not in self._used
        ]

    def _document(self, file: str) -> LabelMeDocument:
        if file not in self._documents:
            try:
                found: LabelMeDocument = decode_json(self.folder.read_bytes(file), LabelMeDocument, LabelMeDocument)
            except ProblemError:
                raise
            except ValueError as error:
                raise ProblemError("unreadable-annotations", file, f"not valid JSON: {error}") from None
            if not isinstance(found.shapes, list):
                raise ProblemError("unreadable-annotations", file, "no list 'shapes'")
            self._documents[file] = found
        return self._documents[file]

    def _image(self, file: str, document: LabelMeDocument, builder: AnnotationBuilder) -> str:
        """The image of a file: the one it names, otherwise the one of that name or its own beside it; "" for none.

        Files often name paths of the computer they were made on: nothing outside the folder is ever looked at.
        """
        named, refused = document.imagePath, None
        if isinstance(named, str) and named:
            base = posixpath.dirname(file)
            for place in (named, posixpath.basename(named.replace("\\", "/"))):
                try:
                    path = self.folder.locate(place, base=base, named_in=file)
                    if self.folder.is_file(path):
                        return path
                except ProblemError as error:
                    refused = refused or error
        beside = _beside(file, self._images)
        if not beside and refused is not None:
            raise refused
        if beside:
            builder.report("file-name-mismatch", file, f"names the image {shown(named)}; {beside[0]} is taken")
            return beside[0]
        message = f"no image {shown(named)}, and none of this name; an image inside the file is not read"
        builder.report("missing-image", file, message)
        return ""

    @staticmethod
    def _add_shapes(
        builder: AnnotationBuilder, image: int, file: str, shapes: Sequence[Any], labels: dict[str, int]
    ) -> None:
        for row, shape in enumerate(shapes, start=1):
            if not isinstance(shape, dict):
                builder.report("bad-entry", file, f"shape {row} is {shown(shape)}, expected an object with keys")
            elif not (label := _label(shape)):
                builder.report("missing-class", file, f"shape {row} has no label")
            elif label not in labels:
                builder.report("unknown-class", file, f"shape {row}: class {label!r} is not in the class list")
            else:
                try:
                    corners = shape_corners(shape)
                except ValueError as error:
                    builder.report("missing-box", file, f"shape {row}: {error}")
                    continue
                given = shape.get("flags")
                flags = {key: isinstance(given, dict) and given.get(key) is True for key in ("difficult", "crowd")}
                builder.add_box(image, corners, labels[label], number=row, **flags)


def _label(shape: Any) -> str:
    label = shape.get("label") if isinstance(shape, dict) else None
    return label if isinstance(label, str) and is_text(label) else ""


def _beside(file: str, images: FilesByStem) -> list[str]:
    """The images in the folder of a JSON file that have its name."""
    name = file[: -len(".json")]
    return [path for path in images.alike(name) if posixpath.dirname(path) == posixpath.dirname(name)]
