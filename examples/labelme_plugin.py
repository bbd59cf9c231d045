"""A data format as a plugin: LabelMe, a JSON file with shapes beside each image.

    aploss data check photos/ --plugin examples/labelme_plugin.py
    aploss train --data photos/ --plugin examples/labelme_plugin.py

Boxes enclose the points of rectangles, polygons and masks; a circle is its centre and a point on it. Classes are all
labels, sorted. Folders called train, val or test are splits, otherwise there is one split, ``all``.
"""

import json
import posixpath
from collections.abc import Sequence
from math import dist
from pathlib import Path
from typing import Any

from aploss.data import AnnotationBuilder, DataFormat, DatasetFolder, DetectionDataset, register_format
from aploss.errors import DataError

SPLITS = ("train", "val", "valid", "test")


@register_format("labelme")
class LabelMeFormat(DataFormat):
    """A folder of images with a LabelMe file of the same name for each annotated one."""

    looked_for = "LabelMe (a JSON file with shapes and imagePath beside each image)"

    def __init__(self, folder: DatasetFolder, documents: dict[str, dict[str, Any]]) -> None:
        self._documents = documents  # file → content
        self._split_of = {
            file: next((name for name in file.split("/")[:-1] if name in SPLITS), "all") for file in documents
        }
        super().__init__(folder, sorted(set(self._split_of.values())))

    @classmethod
    def find(cls, path: Path) -> "LabelMeFormat | None":
        """The LabelMe files below a folder, or None."""
        if not path.is_dir():
            return None
        folder = DatasetFolder(path)
        documents = {}
        for file in folder.files():
            if file.lower().endswith(".json"):
                try:
                    content = json.loads(folder.read_bytes(file))
                except (DataError, ValueError):  # another tool's file, or a damaged one
                    continue
                if isinstance(content, dict) and isinstance(content.get("shapes"), list):
                    documents[file] = content
        return cls(folder, documents) if documents else None

    def read(self, split: str, class_names: Sequence[str] | None) -> DetectionDataset:
        """Reads one split."""
        found = {str(shape.get("label")) for document in self._documents.values() for shape in document["shapes"]}
        names = tuple(class_names or sorted(found))
        builder = AnnotationBuilder(self.folder, names, unit="shape")
        for file, document in self._documents.items():
            if self._split_of[file] != split:
                continue
            # Files often name the path on another computer: the image lies beside its file.
            name = posixpath.basename(str(document.get("imagePath")).replace("\\", "/"))
            image = builder.add_image(name, None, file=file, base=posixpath.dirname(file))
            for number, shape in enumerate(document["shapes"], start=1):
                try:
                    corners = enclosing_box(shape.get("shape_type") or "polygon", shape["points"])
                except (KeyError, TypeError, ValueError) as error:
                    builder.report("bad-box", file, f"shape {number} has no box: {error}")
                else:
                    builder.add_box(image, corners, str(shape.get("label")), number=number)
        return builder.dataset(name=self.name, split=split)


def enclosing_box(kind: str, points: Sequence[Sequence[float]]) -> tuple[float, float, float, float]:
    """The box x1, y1, x2, y2 of a shape; ValueError if it has none."""
    if kind == "circle":
        (x, y), radius = points[0], dist(*points)
        return x - radius, y - radius, x + radius, y + radius
    if kind not in ("rectangle", "polygon", "mask") or len(points) < 2:
        raise ValueError(f"a {kind} of {len(points)} points")
    xs, ys = zip(*points, strict=True)
    return float(min(xs)), float(min(ys)), float(max(xs)), float(max(ys))
