"""YOLO text labels, described by a data.yaml."""

import posixpath
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from aploss.data.dataset import DetectionDataset
from aploss.data.paths import DatasetFolder, is_image
from aploss.data.problems import Problem, ProblemError
from aploss.data.records import Records
from aploss.data.source import split_order
from aploss.data.yolo_rows import parse_row

__all__ = ["YoloSource", "find_yolo"]

_SPLITS = ("train", "val", "valid", "validation", "test")
_NO_SPLITS = ("path", "names", "nc", "download", "roboflow", "kpt_shape", "flip_idx")
_MAX_BYTES = 4 << 20


def find_yolo(path: Path) -> "YoloSource | None":
    """The YOLO dataset of a YAML file, or of the one in a folder; None where there is none."""
    if path.is_file():
        files = [path.resolve()] if path.suffix.lower() in (".yaml", ".yml") else []
    else:
        folder = DatasetFolder(path)
        names = [n for n in folder.names("") if n.lower().endswith((".yaml", ".yml"))]
        names.sort(key=lambda name: (name not in ("data.yaml", "data.yml"), name))
        files = [folder.root / name for name in names if folder.is_file(name)]
    for file in files:
        description = _read_yaml(DatasetFolder(file.parent), file.name)
        if description is not None:
            return YoloSource(DatasetFolder(file.parent), file.name, description)
    return None


def _read_yaml(folder: DatasetFolder, name: str) -> dict[str, Any] | None:
    """What a YAML file says of a dataset; None where it is about something else."""
    if (folder.root / name).stat().st_size > _MAX_BYTES:
        return None
    try:
        content = yaml.safe_load(folder.read_text(name))
    except (yaml.YAMLError, RecursionError) as error:
        if name.startswith("data."):
            line = str(error).splitlines()[0]
            raise ProblemError("unreadable-annotations", name, f"not valid YAML: {line}") from None
        return None
    if not isinstance(content, dict):
        return None
    described = any(isinstance(content.get(split), (str, list)) for split in _SPLITS)
    return content if described or "names" in content else None


def _places(value: object) -> list[str]:
    """Folders or lists of a split. Nothing but text: YAML's aliases can make a list of lists that
    is too long to be written out."""
    values = value if isinstance(value, list) else [value]
    return [place for place in values if isinstance(place, str) and place]


class YoloSource:
    """A dataset of YOLO label files.

    Args:
        folder: The folder of the YAML file.
        file: The YAML file.
        description: What it says: ``names``, ``train``, ``val``, ``test``, ``path``, ``nc``.
    """

    format = "yolo"

    def __init__(self, folder: DatasetFolder, file: str, description: dict[str, Any]) -> None:
        self.folder = folder
        self.file = file
        self.name = folder.root.name
        self._description = description
        found = [str(key) for key, value in description.items() if self._is_split(key, value)]
        self.splits = tuple(sorted(found, key=split_order))
        self._listed: set[str] = set()
        self._label_folders: set[str] = set()

    def class_names(self) -> tuple[str, ...] | None:
        """The names of data.yaml, a list or a dict from 0 on; None where it has none.

        Raises:
            ProblemError: There are gaps, repetitions or no names in the list.
        """
        names = self._description.get("names")
        if names is None:
            return None
        if isinstance(names, dict):
            if sorted(names, key=str) != sorted(range(len(names)), key=str):
                raise self._error("bad-categories", "the keys of names must be 0, 1, 2, ...")
            names = [names[label] for label in range(len(names))]
        if not isinstance(names, list) or not names:
            raise self._error("bad-categories", "names must be a list, or a dict from 0 on")
        if not all(isinstance(name, (str, int, float)) and name != "" for name in names):
            raise self._error("bad-categories", "every class must have a name")
        names = [str(name) for name in names]
        if len(set(names)) < len(names):
            raise self._error("bad-categories", "a class name is there twice")
        return tuple(names)

    def read(self, split: str, class_names: Sequence[str] | None) -> DetectionDataset:
        """See :meth:`Source.read`."""
        if split not in self.splits:
            known = ", ".join(self.splits)
            raise ProblemError("missing-folder", split, f"no such split; there are: {known}")
        own_names = self.class_names() or class_names
        if own_names is None:
            raise self._error("no-classes", "no names; add them or give the class names")
        names = tuple(own_names if class_names is None else class_names)
        labels = [names.index(name) if name in names else -1 for name in own_names]
        records = Records(self.folder)
        self._check_count(own_names, records)
        label_files: list[str] = []
        used: set[int] = set()
        for path in self._images(split, records):
            image = records.add_image(path, None)
            if image < 0:
                continue
            label_files.append(self._label_file(path))
            used |= self._add_rows(records, image, label_files[-1], labels, own_names)
        if len(own_names) in used and 0 not in used:
            records.report(
                "class-ids-off-by-one",
                self.file,
                f"class ids go up to {len(own_names)} and never are 0: YOLO counts from 0",
            )
        return records.dataset(
            class_names=names,
            name=self.name,
            split=split,
            describe=lambda image, number: (label_files[image], f"line {number}"),
        )

    def leftovers(self) -> list[Problem]:
        """See :meth:`Source.leftovers`; of the splits that were read."""
        return [
            Problem("annotation-without-image", path, "no image of this name in any split")
            for folder in sorted(self._label_folders)
            for path in self.folder.files(folder)
            if path.endswith(".txt")
            and path not in self._listed
            and posixpath.basename(path) not in ("classes.txt", "train.txt", "val.txt", "test.txt")
        ]

    def _error(self, kind: str, message: str) -> ProblemError:
        return ProblemError(kind, self.file, message)

    def _is_split(self, key: object, value: object) -> bool:
        """Whether a key of data.yaml names images: the usual keys, and others if they are there."""
        if key in _SPLITS:
            return bool(_places(value))
        if key in _NO_SPLITS or not isinstance(value, str):
            return False
        try:
            self._find(value, base="", named_in=self.file)
        except ProblemError:
            return False
        return True

    def _check_count(self, names: Sequence[str], records: Records) -> None:
        stated = self._description.get("nc")
        if isinstance(stated, int) and stated != len(names):
            message = f"nc is {stated}, but there are {len(names)} names"
            records.report("class-count-mismatch", self.file, message)

    def _images(self, split: str, records: Records) -> Iterator[str]:
        """The distinct images of a split."""
        seen = set()
        for place in _places(self._description[split]):
            for path in self._listed_images(place, records):
                if path in seen:
                    records.report("duplicate-image", path, f"listed twice in split {split}")
                    continue
                seen.add(path)
                if records.find_image(path, named_in=self.file):
                    yield path

    def _listed_images(self, place: str, records: Records) -> Iterator[str]:
        base = self._description.get("path")
        base = base if isinstance(base, str) else ""
        found = self._find(place, base=base, named_in=self.file)
        if self.folder.is_folder(found):
            yield from (path for path in self.folder.files(found) if is_image(path))
            return
        for line in self.folder.read_text(found).splitlines():
            if not line.strip():
                continue
            try:
                yield self._find(line.strip(), base=posixpath.dirname(found), named_in=found)
            except ProblemError as error:
                kind = error.problem.kind
                if kind == "missing-folder":
                    records.report("missing-image", found, f"no image {line.strip()}")
                else:
                    records.problems.append(error.problem)

    def _find(self, place: str, *, base: str, named_in: str) -> str:
        """A folder, list or image as written, inside the dataset's folder.

        Exported datasets often contain paths of the computer or folder they were made in
        (``/content/set/train/images``, ``../train/images``): then the longest ending of the path
        that is here is taken. Nothing outside the folder is ever looked at.
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
        parts = [
            part for part in place.replace("\\", "/").split("/") if part not in ("", ".", "..")
        ]
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
        for place in range(len(parts) - 2, -1, -1):
            if parts[place] == "images":
                swapped = "/".join([*parts[:place], "labels", *parts[place + 1 :]])
                if self.folder.is_folder(posixpath.dirname(swapped)):
                    return f"{swapped}.txt"
                break
        return f"{stem}.txt"

    def _add_rows(
        self,
        records: Records,
        image: int,
        file: str,
        labels: Sequence[int],
        names: Sequence[str],
    ) -> set[int]:
        """Adds the boxes of a label file and returns the class ids it uses."""
        self._listed.add(file)
        self._label_folders.add(posixpath.dirname(file))
        used: set[int] = set()
        try:
            if not self.folder.has(file):
                message = "no label file; taken as an image without objects"
                records.report("image-without-annotation", records.paths[image], message)
                return used
            text = self.folder.read_text(file)
        except ProblemError as error:
            refused = error.problem.kind == "path-outside-dataset"
            kind = error.problem.kind if refused else "unreadable-annotation"
            records.report(kind, file, error.problem.message)
            return used
        for line, row in enumerate(text.splitlines(), start=1):
            if not row.strip():
                continue
            try:
                class_id, corners = parse_row(row, records.sizes[image], where=(file, line))
            except ProblemError as error:
                records.problems.append(error.problem)
                continue
            used.add(class_id)
            if not 0 <= class_id < len(labels):
                message = f"line {line}: class {class_id} is not in 0..{len(labels) - 1}"
                records.report("unknown-class", file, message)
            elif labels[class_id] < 0:
                message = f"line {line}: class {names[class_id]!r} is not in the class list"
                records.report("unknown-class", file, message)
            else:
                records.add_box(image, corners, labels[class_id], number=line)
        return used
