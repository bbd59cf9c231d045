"""YOLO text labels, described by a data.yaml."""

import posixpath
from collections.abc import Iterator, Sequence
from math import isfinite
from pathlib import Path
from typing import Any

import yaml

from aploss.data.annotations import AnnotationBuilder, DetectionDataset, distinct
from aploss.data.folder import DatasetFolder, ProblemError, filled_lines, is_image
from aploss.data.formats import DataFormat, Parts, check_class_names, is_usual_split, lost_areas, register_format
from aploss.files import load_yaml

_MAX_FRACTION = 1.01  # larger numbers are pixels, not rounded fractions
_SNAP_PIXELS = 1e-6  # rounding error of cx - w/2 at the image border


# --- one label file -----------------------------------------------------------------------------


def parse_row(row: str, size: tuple[int, int], *, where: tuple[str, int]) -> tuple[int, tuple[float, ...]]:
    """Parses a row into the class id and the corners in pixels; ``where`` is its file and line.

    A row is ``class cx cy w h``, or a polygon ``class x1 y1 x2 y2 x3 y3 ...``, whose enclosing box is returned, in
    fractions of the image's width and height. ProblemError: it is neither, or its numbers are not fractions.
    """
    file, line = where
    try:
        class_id, *values = map(float, row.split())
        if len(values) != 4 and (len(values) < 6 or len(values) % 2):
            raise ValueError("expected a class and 4 numbers, or 3 or more points")
        if not all(map(isfinite, values)) or max(values) > _MAX_FRACTION:
            raise ValueError("coordinates must be fractions of the image size")
    except ValueError as error:
        raise ProblemError("bad-box", file, f"line {line}: {error!s:.100}: {row:.80}") from None
    if not class_id.is_integer():
        raise ProblemError("unknown-class", file, f"line {line}: the class must be a whole number: {row:.80}")
    if len(values) == 4:
        x, y, w, h = values
        fractions = [x - w / 2, y - h / 2, x + w / 2, y + h / 2]
    else:
        fractions = [end(values[side::2]) for end in (min, max) for side in (0, 1)]
    corners = [fraction * side for fraction, side in zip(fractions, size * 2, strict=True)]
    return int(class_id), tuple(0.0 if abs(corner) < _SNAP_PIXELS else corner for corner in corners)


def yolo_rows(dataset: DetectionDataset, index: int) -> str:
    """The text of an image's label file, the inverse of :func:`parse_row`."""
    target, (width, height) = dataset.target(index), dataset.image_size(index)
    lines = []
    for label, (x1, y1, x2, y2) in zip(target["labels"].tolist(), target["boxes"].tolist(), strict=True):
        centre = (x1 + x2) / 2 / width, (y1 + y2) / 2 / height
        values = (*centre, (x2 - x1) / width, (y2 - y1) / height)
        lines.append(f"{label} {' '.join(map(repr, values))}\n")
    return "".join(lines)


# --- the dataset --------------------------------------------------------------------------------


@register_format("yolo")
class YoloFormat(DataFormat):
    """A dataset of YOLO label files.

    ``description`` is the content of ``file``, a YAML file in the dataset's folder: ``names``, ``path``, and
    ``train``, ``val``, ``test``, each a folder of images, a text file that lists images, or several. As in Ultralytics,
    they are relative to ``path``. ``../train/images``, as exported by Roboflow, stands for ``train/images``.
    """

    looked_for = "YOLO (data.yaml with names and train, val or test)"

    def __init__(self, folder: DatasetFolder, file: str, description: dict[str, Any]) -> None:
        self.folder, self.file, self._description = folder, file, description
        base = description.get("path")
        # A path that is not inside was written on another computer: the dataset is in the folder of its data.yaml.
        self._base = base if isinstance(base, str) and self._exists(base, base=".") else "."
        super().__init__(folder, [str(key) for key, value in description.items() if self._is_split(key, value)])

    @classmethod
    def find(cls, path: Path) -> "YoloFormat | None":
        """See :meth:`DataFormat.find`."""
        if path.is_file() and path.suffix.lower() in (".yaml", ".yml"):
            folder, files = DatasetFolder(path.resolve().parent), [path.name]
        else:
            folder = DatasetFolder(path)
            files = [name for name in folder.names("") if name in ("data.yaml", "data.yml")]
        return cls(folder, files[0], _read_yaml(folder, files[0])) if files else None

    def class_names(self) -> tuple[str, ...]:
        """The names in the YAML file; empty if there are none."""
        names = self._description.get("names")
        if isinstance(names, dict):  # {0: cat, 1: dog}
            if set(names) != set(range(len(names))):
                message = f"the keys of names must be 0, 1, 2, ..., got {names!r:.200}"
                raise ProblemError("bad-categories", self.file, message)
            names = [names[key] for key in range(len(names))]
        if isinstance(names, list):
            names = [str(name) if isinstance(name, int) else name for name in names]
        return check_class_names(names, file=self.file) if names else ()

    def read(self, split: str, class_names: Sequence[str] | None) -> DetectionDataset:
        """See :meth:`DataFormat.read`."""
        own_names = self.class_names() or class_names
        if not own_names:
            raise ProblemError("bad-categories", self.file, "no class names; list them as names: [...]")
        builder = AnnotationBuilder(self.folder, own_names if class_names is None else class_names, unit="line")
        for path in self._images(split, builder):
            file = _label_file(path)
            try:
                text = self._read_labels(path, file)
            except ProblemError as error:  # not an image without objects, since it may have some
                builder.problems.append(error.problem)
                continue
            image = builder.add_image(path, None, file=file, base=None)
            if image >= 0:
                if text is None:
                    builder.report("image-without-annotation", path, "no label file; used as an image without objects")
                _add_rows(builder, image, file, text or "", own_names)
        return builder.dataset(name=self.name, split=split)

    @classmethod
    def write(cls, folder: Path, parts: Parts, names: dict[Path, str]) -> list[str]:
        """See :meth:`DataFormat.write`; ``data.yaml``, a list of images for each split, one label file per image."""
        (folder / "labels").mkdir()
        fresh = distinct(parts.values())
        for part in fresh:
            for index in range(len(part)):
                file = Path(names[part.image_path(index)]).with_suffix(".txt")
                (folder / "labels" / file).write_text(yolo_rows(part, index), "utf-8")
        for split, part in parts.items():
            lines = [f"./images/{names[part.image_path(i)]}\n" for i in range(len(part))]
            (folder / f"{split}.txt").write_text("".join(lines), "utf-8")
        description: dict[str, object] = {split: f"{split}.txt" for split in parts}
        description["names"] = dict(enumerate(next(iter(parts.values())).class_names))
        text = yaml.safe_dump(description, sort_keys=False, allow_unicode=True)
        (folder / "data.yaml").write_text(text, "utf-8")
        flags = {flag: sum(int(getattr(part, flag).sum()) for part in fresh) for flag in ("difficult", "crowd")}
        return [*(f"{count} '{flag}' marks" for flag, count in flags.items() if count), *lost_areas(parts)]

    def _is_split(self, key: object, value: object) -> bool:
        """Whether a key of the YAML file is a split: a usual name, or any name of an existing folder or list."""
        if is_usual_split(str(key)):
            return not (key == "test" and value is None)  # ``test:`` is often left empty
        return key != "path" and isinstance(value, str) and self._exists(value, base=self._base)

    def _exists(self, place: str, *, base: str) -> bool:
        try:
            return self.folder.has(self._find(place, base=base, named_in=self.file))
        except ProblemError:
            return False

    def _images(self, split: str, builder: AnnotationBuilder) -> Iterator[str]:
        """The images of a split, as listed."""
        value = self._description[split]
        # Accepts text only: nested YAML aliases could expand to any length.
        listed = value if isinstance(value, list) else [value]
        places = [place for place in listed if place and isinstance(place, str)]
        if not places:
            message = f"'{split}' must be a folder or list of images, or several, got {type(value).__name__}"
            raise ProblemError("missing-folder", self.file, message)
        for place in places:
            found = self._find(place, base=self._base, named_in=self.file)
            if not self.folder.has(found):
                message = f"'{split}' is {place!r}, which does not exist; write a path inside the folder of {self.file}"
                raise ProblemError("missing-folder", self.file, message)
            if self.folder.is_folder(found):
                yield from filter(is_image, self.folder.files(found))
                continue
            for line in filled_lines(self.folder.read_text(found)):
                # As in Ultralytics, ./ is the folder of the list; other lines are relative to the dataset.
                base = posixpath.dirname(found) if line.startswith("./") else self._base
                try:
                    yield self._find(line, base=base, named_in=found)
                except ProblemError as error:
                    builder.problems.append(error.problem)

    def _find(self, place: str, *, base: str, named_in: str) -> str:
        """A path of the YAML file or a list, relative to the dataset's folder; ProblemError if it leads outside."""
        inner = self.folder.inside(base, named_in=named_in)
        if place.startswith("../") and inner in ("", "."):
            place = place.removeprefix("../")
        return self.folder.inside(place, base=inner, named_in=named_in)

    def _read_labels(self, image: str, file: str) -> str | None:
        """The text of an image's label file, or None if there is none; ProblemError if it is unreadable."""
        if self.folder.has(file):
            return self.folder.read_text(file, kind="unreadable-annotation")
        labels = posixpath.dirname(file)
        if not self.folder.is_folder(labels):
            raise ProblemError("unreadable-annotation", labels, f"not a folder; expected the labels of {image}")
        return None


def _add_rows(builder: AnnotationBuilder, image: int, file: str, text: str, names: Sequence[str]) -> None:
    """Adds the boxes of a label file."""
    for line, row in enumerate(text.splitlines(), start=1):
        if row.strip():
            try:
                class_id, corners = parse_row(row, builder.sizes[image], where=(file, line))
            except ProblemError as error:
                builder.problems.append(error.problem)
            else:
                known = 0 <= class_id < len(names)
                builder.add_box(image, corners, names[class_id] if known else class_id, number=line)


def _label_file(image: str) -> str:
    """As in Ultralytics, ``labels`` instead of the last ``images`` on the path; otherwise beside the image."""
    before, images, after = f"/{posixpath.splitext(image)[0]}.txt".rpartition("/images/")
    return (f"{before}/labels/{after}" if images else after).lstrip("/")


def _read_yaml(folder: DatasetFolder, name: str) -> dict[str, Any]:
    """The content of a YAML file; ProblemError if it is not a mapping."""
    try:
        content = load_yaml(folder.read_text(name))
    except ValueError as error:
        raise ProblemError("unreadable-annotations", name, f"not valid YAML: {error}") from None
    if not isinstance(content, dict):
        raise ProblemError("unreadable-annotations", name, f"expected keys, got {type(content).__name__}")
    return content
