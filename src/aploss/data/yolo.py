"""YOLO text labels, described by a data.yaml or by the folders they are in."""

import posixpath
from collections.abc import Callable, Iterator, Sequence
from math import isfinite
from pathlib import Path
from typing import Any

import yaml

from aploss.data.annotations import AnnotationBuilder, DetectionDataset
from aploss.data.formats import (
    DataFormat,
    Parts,
    Written,
    common_split_name,
    each_image_once,
    filled_lines,
    is_text,
    number,
    outline_losses,
    register_format,
)
from aploss.data.paths import DatasetFolder, is_image
from aploss.data.problems import Problem, ProblemError

_SPLITS = ("train", "val", "valid", "validation", "test")
_NO_SPLITS = ("path", "names", "nc", "download", "roboflow", "kpt_shape", "flip_idx")
_LISTS = ("classes.txt", "train.txt", "val.txt", "test.txt")
_MAX_BYTES = 4 << 20
_CLASS_DIGITS = 4  # of classes without names; more is a damaged file
_FRACTION_LIMIT = 1.01  # above it a number is one of pixels, not a rounded fraction
_SNAP_PIXELS = 1e-6  # rounding of cx ± w/2 beside the image's border


# --- one label file -----------------------------------------------------------------------------


def parse_row(
    row: str, size: tuple[int, int], *, where: tuple[str, int]
) -> tuple[int, tuple[float, float, float, float]]:
    """Class id and corners in pixels of a row of the file and line ``where``.

    It is ``class cx cy w h``, or ``class x1 y1 x2 y2 x3 y3 ...`` for a polygon, of which the enclosing box is taken, as
    fractions of the image's width and height. ProblemError where it is neither, or the numbers are not fractions.

    Example:
        >>> parse_row("2 0.5 0.5 0.25 0.5", (640, 480), where=("a.txt", 1))
        (2, (240.0, 120.0, 400.0, 360.0))
    """
    file, line = where

    def fault(kind: str, message: str) -> ProblemError:
        return ProblemError(kind, file, f"line {line}: {message}")

    first, *rest = row.split()
    if len(rest) != 4 and (len(rest) < 6 or len(rest) % 2):
        raise fault("bad-row", f"a class and 4 numbers (or 3 or more points) expected: {row:.80}")
    try:
        values = [number(text) for text in rest]
    except ValueError as error:
        raise fault("non-numeric-coordinate", str(error)) from None
    if not all(map(isfinite, values)):
        raise fault("non-finite-coordinate", f"a NaN or infinite coordinate: {row:.80}")
    try:
        value = number(first)
        class_id = int(value)
    except (ValueError, OverflowError):
        value, class_id = 0.0, -1
    if value != class_id:
        raise fault("bad-row", f"the class must be a whole number, got {first!r:.80}")
    if max(values) > _FRACTION_LIMIT:
        raise fault("not-normalised", f"coordinates must be fractions of the image size: {row:.80}")
    return class_id, _corners(values, size)


def _corners(values: list[float], size: tuple[int, int]) -> tuple[float, float, float, float]:
    if len(values) == 4:
        x, y, w, h = values
        corners = [x - w / 2, y - h / 2, x + w / 2, y + h / 2]
    else:
        corners = [end(values[side::2]) for end in (min, max) for side in (0, 1)]
    left, top, right, bottom = (_snap(corner * side, side) for corner, side in zip(corners, size * 2, strict=True))
    return left, top, right, bottom


def _snap(value: float, end: int) -> float:
    return next((border for border in (0.0, float(end)) if abs(value - border) < _SNAP_PIXELS), value)


def yolo_rows(
    labels: Sequence[int], boxes: Sequence[Sequence[float]], size: tuple[int, int], *, digits: int | None = None
) -> str:
    """The text of a label file, for :func:`parse_row` to read back, of labels [n] from 0 and boxes [n, 4] in pixels.

    ``size`` is width and height of the image; numbers have as many digits as it takes to read the same pixels, or
    ``digits`` behind the point.

    Example:
        >>> yolo_rows([1], [[10, 10, 30, 20]], (100, 50), digits=6)
        '1 0.200000 0.300000 0.200000 0.200000\\n'
    """
    width, height = size
    lines = []
    for label, (x1, y1, x2, y2) in zip(labels, boxes, strict=True):
        centre = (x1 + x2) / 2 / width, (y1 + y2) / 2 / height
        values = (*centre, (x2 - x1) / width, (y2 - y1) / height)
        texts = [repr(value) if digits is None else f"{value:.{digits}f}" for value in values]
        lines.append(f"{label} {' '.join(texts)}\n")
    return "".join(lines)


# --- the dataset --------------------------------------------------------------------------------


@register_format("yolo")
class YoloFormat(DataFormat):
    """A dataset of YOLO label files, described by the content of a YAML file in its folder: ``names``, ``train``,
    ``val``, ``test``, ``path``, ``nc``."""

    looked_for = "YOLO (data.yaml with names and train, val or test; or images/ and labels/*.txt)"

    def __init__(self, folder: DatasetFolder, file: str, description: dict[str, Any]) -> None:
        self.folder = folder
        self.file = file
        self._description = description
        found = [str(key) for key, value in description.items() if self._is_split(key, value)]
        super().__init__(folder, found)
        self._listed: set[str] = set()
        self._label_folders: set[str] = set()

    @classmethod
    def find(cls, path: Path) -> "YoloFormat | None":
        """The dataset of a YAML file, of the one in a folder, or of ``images`` and ``labels``."""
        if path.is_file():
            folder, names = DatasetFolder(path.resolve().parent), [path.resolve().name]
        else:
            folder = DatasetFolder(path)
            names = sorted(folder.names(""), key=lambda name: (not _is_data_yaml(name), name))
        for name in names:
            if _is_yaml(name):
                description = _read_yaml(folder, name)
                if description is not None:
                    return cls(folder, name, description)
        file, description = _describe_folders(folder) if path.is_dir() else ("", {})
        return cls(folder, file, description) if description else None

    def class_names(self) -> tuple[str, ...] | None:
        """The names of data.yaml, a list or a dict from 0 on, without gaps and repetitions; None where it has none."""
        names = self._description.get("names")
        if names is None:
            return None
        if isinstance(names, dict):
            if sorted(names, key=str) != sorted(range(len(names)), key=str):
                raise self._error("bad-categories", "the keys of names must be 0, 1, 2, ...")
            names = [names[label] for label in range(len(names))]
        if not isinstance(names, list) or not names:
            raise self._error("bad-categories", "names must be a list, or a dict from 0 on")
        if not all(isinstance(name, (str, int, float)) and name != "" and is_text(str(name)) for name in names):
            raise self._error("bad-categories", "every class must have a name")
        if len(set(map(str, names))) < len(names):
            raise self._error("bad-categories", "a class name is there twice")
        return tuple(map(str, names))

    def read(self, split: str, class_names: Sequence[str] | None) -> DetectionDataset:
        """See :meth:`DataFormat.read`."""
        if split not in self.splits:
            raise self.no_such_split(split)
        builder = AnnotationBuilder(self.folder)
        own_names = self.class_names() or class_names or self._numbered_classes(builder)
        names = tuple(own_names if class_names is None else class_names)
        label_of = {name: label for label, name in enumerate(names)}
        labels = [label_of.get(name, -1) for name in own_names]
        stated = self._description.get("nc")
        if isinstance(stated, int) and stated != len(own_names):
            message = f"nc is {stated}, but there are {len(own_names)} names"
            builder.report("class-count-mismatch", self.file, message)
        label_files: list[str] = []
        used: set[int] = set()
        for path in self._images(split, builder):
            file = self._label_file(path)
            text = self._read_labels(builder, path, file)
            image = builder.add_image(path, None) if text is not None else -1
            if text is not None and image >= 0:
                label_files.append(file)
                used |= self._add_rows(builder, image, file, text, labels, own_names)
        if len(own_names) in used and 0 not in used:
            message = f"class ids go up to {len(own_names)} and never are 0: YOLO counts from 0"
            builder.report("class-ids-off-by-one", self.file, message)
        return builder.dataset(
            class_names=names,
            name=self.name,
            split=split,
            describe=lambda image, number: (label_files[image], f"line {number}"),
        )

    def leftovers(self) -> list[Problem]:
        """See :meth:`DataFormat.leftovers`; of the splits that were read."""
        return [
            Problem("annotation-without-image", path, "no image of this name in any split")
            for folder in sorted(self._label_folders)
            for path in self.folder.files(folder)
            if path.endswith(".txt") and path not in self._listed and posixpath.basename(path) not in _LISTS
        ]

    @classmethod
    def write(cls, folder: Path, parts: Parts, places: dict[Path, str]) -> Written:
        """Writes ``data.yaml`` and one label file per image; see :meth:`DataFormat.write`.

        Images are in ``images/SPLIT``; where splits share images, in ``images``, with a list of its images for each
        split.
        """
        folder.mkdir(parents=True)
        everything = list(each_image_once(parts))
        shared = len(everything) < sum(map(len, parts.values()))
        for part, index in everything:
            stem = posixpath.splitext(places[part.image_path(index)])[0]
            label_file = folder / "labels" / f"{stem}.txt"
            label_file.parent.mkdir(parents=True, exist_ok=True)
            labels, boxes = part.labels(index).tolist(), part.boxes(index).tolist()
            label_file.write_text(yolo_rows(labels, boxes, part.image_size(index)), "utf-8")
        description: dict[str, object] = {}
        for split, part in parts.items():
            description[split] = f"{split}.txt" if shared else f"images/{split}"
            if shared:
                lines = [f"./images/{places[part.image_path(i)]}\n" for i in range(len(part))]
                (folder / f"{split}.txt").write_text("".join(lines), "utf-8")
        description["names"] = dict(enumerate(next(iter(parts.values())).class_names))
        text = yaml.safe_dump(description, sort_keys=False, allow_unicode=True)
        (folder / "data.yaml").write_text(text, "utf-8")
        losses = []
        for flag in ("difficult", "crowd"):
            count = sum(int(getattr(part, flag)(index).sum()) for part, index in everything)
            losses += [f"{count} '{flag}' marks"] if count else []
        return Written("images", losses=(*losses, *outline_losses(parts)))

    def _numbered_classes(self, builder: AnnotationBuilder) -> tuple[str, ...]:
        """``class_0``, ``class_1``, ... up to the last one that a label file of any split uses."""
        if _is_yaml(self.file):
            raise self._error("no-classes", "no names; add them or give the class names")
        used = {0}
        for split in self.splits:
            for image in filter(is_image, self.folder.files(self._description[split])):
                file = self._label_file(image)
                try:
                    rows = self.folder.read_text(file).splitlines() if self.folder.has(file) else []
                except ProblemError:  # told when its image is read
                    continue
                first = (row.split(maxsplit=1)[0] for row in rows if row.strip())
                used |= {int(word) for word in first if word.isdecimal() and len(word) <= _CLASS_DIGITS}
        names = tuple(f"class_{label}" for label in range(max(used) + 1))
        builder.report("numbered-classes", self.file, f"no classes.txt or obj.names: {names[0]} to {names[-1]}")
        return names

    def _error(self, kind: str, message: str) -> ProblemError:
        return ProblemError(kind, self.file, message)

    def _is_split(self, key: object, value: object) -> bool:
        """Whether a key of data.yaml names images: the usual keys, and others if they are there.

        One of the usual keys is a split whatever it holds; but ``test:`` is often left empty.
        """
        if key in _SPLITS:
            return not (key == "test" and value is None)
        if key in _NO_SPLITS or not isinstance(value, str):
            return False
        try:
            self._find(value, base="", named_in=self.file)
        except ProblemError:
            return False
        return True

    def _images(self, split: str, builder: AnnotationBuilder) -> Iterator[str]:
        """The distinct images of a split."""
        value = self._description[split]
        # Nothing but text: YAML's aliases can make a list of lists too long to be written out.
        places = value if isinstance(value, list) else [value]
        places = [place for place in places if isinstance(place, str) and place]
        if not places:
            kind = "null" if value is None else type(value).__name__
            message = f"'{split}' must name a folder or list of images, or several; it is {kind}"
            raise self._error("missing-folder", message)
        seen = set()
        for place in places:
            for path in self._listed_images(place, builder):
                if path in seen:
                    builder.report("duplicate-image", path, f"listed twice in split {split}")
                    continue
                seen.add(path)
                if builder.find_image(path, named_in=self.file):
                    yield path

    def _listed_images(self, place: str, builder: AnnotationBuilder) -> Iterator[str]:
        base = self._description.get("path")
        found = self._find(place, base=base if isinstance(base, str) else "", named_in=self.file)
        if self.folder.is_folder(found):
            yield from filter(is_image, self.folder.files(found))
            return
        for line in filled_lines(self.folder.read_text(found)):
            try:
                yield self._find(line, base=posixpath.dirname(found), named_in=found)
            except ProblemError as error:
                missing = error.problem.kind == "missing-folder"
                problem = Problem("missing-image", found, f"no image {line}") if missing else error.problem
                builder.problems.append(problem)

    def _find(self, place: str, *, base: str, named_in: str) -> str:
        """A folder, list or image as written, inside the dataset's folder.

        Exported datasets often contain paths of the computer or folder they were made in
        (``/content/set/train/images``, ``../train/images``): then the longest ending of the path that is here is taken.
        Nothing outside the folder is ever looked at.
        """
        refused: ProblemError | None = None
        for parent in (base, ""):
            try:
                # A base from data.yaml is as little to be trusted as what is joined to it.
                inner = self.folder.inside(parent or ".", named_in=named_in)
                path = self.folder.inside(place, base=inner, named_in=named_in)
            except ProblemError as error:
                refused = error
                continue
            if self.folder.has(path, named_in=named_in):
                return "" if path == "." else path
        parts = [part for part in place.replace("\\", "/").split("/") if part not in ("", ".", "..")]
        for start in range(len(parts)):
            ending = "/".join(parts[start:])
            if self.folder.has(ending, named_in=named_in):
                return ending
        if refused is not None:
            raise refused
        raise ProblemError("missing-folder", named_in, f"{place!r} does not exist in this folder")

    def _label_file(self, image: str) -> str:
        """``labels`` in the place of the last ``images`` on the path, or beside the image."""
        stem = posixpath.splitext(image)[0]
        parts = stem.split("/")
        places = [place for place, name in enumerate(parts[:-1]) if name == "images"]
        if places:
            parts[places[-1]] = "labels"
            labels = "/".join(parts[:-1])
            if self.folder.has(labels) or self.folder.is_link(labels):
                stem = "/".join(parts)
        return f"{stem}.txt"

    def _read_labels(self, builder: AnnotationBuilder, image: str, file: str) -> str | None:
        """The text of an image's label file, or None where it cannot be read: its objects are not known, so that the
        image must not be trained on as one without any."""
        self._listed.add(file)
        self._label_folders.add(posixpath.dirname(file))
        try:
            if self.folder.has(file) or self.folder.is_link(file):
                return self.folder.read_text(file)
            labels = posixpath.dirname(file)
            if not self.folder.is_folder(labels):  # as found by _label_file, and yet none
                raise ProblemError("unreadable-annotations", labels, f"not a folder; {image} has its labels there")
        except ProblemError as error:
            builder.problems.append(error.of_one_image())
            return None
        builder.report("image-without-annotation", image, "no label file; taken as an image without objects")
        return ""

    def _add_rows(
        self, builder: AnnotationBuilder, image: int, file: str, text: str, labels: Sequence[int], names: Sequence[str]
    ) -> set[int]:
        """Adds the boxes of a label file and returns the class ids it uses."""
        used: set[int] = set()
        for line, row in enumerate(text.splitlines(), start=1):
            if not row.strip():
                continue
            try:
                class_id, corners = parse_row(row, builder.sizes[image], where=(file, line))
            except ProblemError as error:
                builder.problems.append(error.problem)
                continue
            used.add(class_id)
            if not 0 <= class_id < len(labels):
                builder.report("unknown-class", file, f"line {line}: class {class_id} is not in 0..{len(labels) - 1}")
            elif labels[class_id] < 0:
                message = f"line {line}: class {names[class_id]!r} is not in the class list"
                builder.report("unknown-class", file, message)
            else:
                builder.add_box(image, corners, labels[class_id], number=line)
        return used


def _is_yaml(name: str) -> bool:
    return name.lower().endswith((".yaml", ".yml"))


def _is_data_yaml(name: str) -> bool:
    return name.lower() in ("data.yaml", "data.yml")


def _read_yaml(folder: DatasetFolder, name: str) -> dict[str, Any] | None:
    """What a YAML file says of a dataset; None where it is about something else."""
    try:
        text = folder.read_text(name)
        if len(text) > _MAX_BYTES:
            raise ProblemError("unreadable-annotations", name, f"over {_MAX_BYTES >> 20} MB")
        content = yaml.safe_load(text)
        if not isinstance(content, dict):
            message = f"names no splits: it holds {type(content).__name__}, not keys"
            raise ProblemError("unreadable-annotations", name, message)
    except ProblemError as error:
        if error.problem.kind == "path-outside-dataset" or _is_data_yaml(name):
            raise
        return None
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        if _is_data_yaml(name):
            message = f"not valid YAML: {str(error).splitlines()[0]}"
            raise ProblemError("unreadable-annotations", name, message) from None
        return None
    found = [content[split] for split in _SPLITS if split in content]
    # A file of another name may hold the settings of a program.
    described = bool(found) if _is_data_yaml(name) else any(isinstance(value, (str, list)) for value in found)
    return content if described or "names" in content else None


def _describe_folders(folder: DatasetFolder) -> tuple[str, dict[str, Any]]:
    """What a data.yaml would say of folders that have none, and the file its names are from.

    Looked for are ``images/train`` with ``labels/train``, ``train/images`` with ``train/labels``, and ``images`` with
    ``labels``, where there are no annotations of another format beside them.
    """
    top = folder.names("")
    if any(name.lower() == "annotations" or name.endswith((".json", ".xml")) for name in top):
        return "", {}
    places = {split: (f"images/{split}", f"labels/{split}") for split in folder.names("images")}
    places |= {split: (f"{split}/images", f"{split}/labels") for split in top}
    found = {
        split: images
        for split, (images, labels) in places.items()
        if common_split_name(split) in _SPLITS and _is_labelled(folder, images, labels)
    }
    if not found and _is_labelled(folder, "images", "labels"):
        found = {"all": "images"}
    beside = [posixpath.join(places[split][1], "classes.txt") for split in found if split in places]
    for file in ("classes.txt", "obj.names", "data/obj.names", "labels/classes.txt", *beside):
        if found and folder.is_file(file):
            return file, {**found, "names": filled_lines(folder.read_text(file))}
    return "labels", dict(found)


def _is_labelled(folder: DatasetFolder, images: str, labels: str) -> bool:
    def has(place: str, is_wanted: Callable[[str], bool]) -> bool:
        return folder.is_folder(place) and any(map(is_wanted, folder.names(place)))

    return has(images, is_image) and has(labels, lambda name: name.endswith(".txt"))
