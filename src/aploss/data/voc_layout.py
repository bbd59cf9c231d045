"""Where the annotations, images and split lists of a VOC-like folder are."""

import posixpath
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from aploss.data.paths import DatasetFolder, is_image
from aploss.data.problems import Problem, ProblemError
from aploss.data.source import common_split_name

__all__ = ["Entry", "VocPart", "stem_of"]

_LIST_FOLDERS = ("", "ImageSets", "splits", "lists")
_FOLDER_SPLITS = ("train", "trainval", "val", "test")
ALL = "all"


class Entry(NamedTuple):
    """An image that a split lists."""

    key: str  # as written in the list
    annotation: str
    image: str  # empty where no image has the annotation's name
    listed_in: str


class VocPart:
    """One folder with its own annotations and splits, such as ``VOC2007``.

    Args:
        folder: The dataset's folder.
        base: The part's folder below it.
        prefix: What its splits' names begin with, such as ``2007_``.

    Attributes:
        annotations: All XML files, sorted.
        images: All image files, sorted.
        splits: Names of its splits.
        class_lists: Class names for which there are lists such as ``dog_train.txt``.
    """

    def __init__(self, folder: DatasetFolder, base: str, *, prefix: str = "") -> None:
        self.folder = folder
        self.base = base
        self.prefix = prefix
        self.annotations = [
            path
            for path in folder.files(self._root("Annotations"))
            if path.lower().endswith(".xml")
        ]
        self._annotations_by_stem = _by_stem(self.annotations)
        self.class_lists: set[str] = set()
        if not self.annotations:
            return
        self.images = [path for path in folder.files(self._root("JPEGImages")) if is_image(path)]
        self._images_by_stem = _by_stem(self.images)
        self._lists = self._find_lists()
        self._folders = {} if self._lists else self._find_folders()
        self.splits = tuple(self._lists or self._folders or (ALL,))

    def entries(self, split: str) -> Iterator[Entry | Problem]:
        """What a split lists: images, or what is wrong with the list.

        Args:
            split: One of :attr:`splits`, or a list file (below the dataset's folder or anywhere).
        """
        if split in self._folders:
            yield from (self._entry(path, path, split) for path in self._folders[split])
        elif split == ALL and ALL not in self._lists:
            yield from (self._entry(path, path, self.base) for path in self.annotations)
        else:
            name, text = self._read_list(split)
            yield from (
                self._listed(line.strip(), name) for line in text.splitlines() if line.strip()
            )

    def image_of(self, annotation: str) -> str:
        """The image that an annotation file belongs to by its name; empty where there is none."""
        return _nearest(annotation, self._images_by_stem.get(stem_of(annotation), []))

    def image_named(self, file_name: str, annotation: str) -> str:
        """The image that an annotation names inside; empty where there is none."""
        name = posixpath.basename(file_name.replace("\\", "/"))
        candidates = self._images_by_stem.get(stem_of(name), [])
        return _nearest(annotation, [p for p in candidates if posixpath.basename(p) == name])

    def rivals_of(self, image: str) -> list[str]:
        """Other images of the same name but extension in the same folder."""
        beside = self._images_by_stem.get(stem_of(image), [])
        folder = posixpath.dirname(image)
        return [path for path in beside if path != image and posixpath.dirname(path) == folder]

    def _root(self, name: str) -> str:
        standard = posixpath.join(self.base, name)
        return standard if self.folder.is_folder(standard) else self.base

    def _find_lists(self) -> dict[str, str]:
        main = posixpath.join(self.base, "ImageSets", "Main")
        if self.folder.is_folder(main):
            return self._main_lists(main)
        lists = {}
        for folder in _LIST_FOLDERS:
            parent = posixpath.join(self.base, folder).rstrip("/")
            for name in self.folder.names(parent):
                path = posixpath.join(parent, name)
                if name.endswith(".txt") and self._is_list(path):
                    lists[name.removesuffix(".txt")] = path
        return lists

    def _main_lists(self, main: str) -> dict[str, str]:
        """The lists of ImageSets/Main, but for those of one class: ``dog_train.txt`` with ±1."""
        names = self.folder.names(main)
        stems = [name.removesuffix(".txt") for name in names if name.endswith(".txt")]
        lists = {}
        for stem in stems:
            class_name, _, split = stem.rpartition("_")
            path = posixpath.join(main, f"{stem}.txt")
            if class_name and split in stems and self._has_two_columns(path):
                self.class_lists.add(class_name)
            else:
                lists[stem] = path
        return lists

    def _has_two_columns(self, path: str) -> bool:
        first = next(iter(self.folder.read_text(path).split("\n", 1)))
        return first.split()[1:] in (["1"], ["0"], ["-1"])

    def _is_list(self, path: str) -> bool:
        """Whether a text file lists images of ours, judged by its first lines."""
        try:
            lines = self.folder.read_text(path).split("\n", 20)[:20]
        except ProblemError:
            return False
        listed = [self._listed(line.strip(), path) for line in lines if line.strip()]
        found = sum(isinstance(entry, Entry) for entry in listed)
        refused = any(isinstance(e, Problem) and e.kind == "path-outside-dataset" for e in listed)
        known = common_split_name(stem_of(path)) in _FOLDER_SPLITS
        return known or refused or (found > 0 and found >= len(listed) / 2)

    def _find_folders(self) -> dict[str, list[str]]:
        """Annotations by the folder on their path that is called train, val, valid, test, ..."""
        folders: dict[str, list[str]] = {}
        for path in self.annotations:
            parts = posixpath.relpath(path, self.base or ".").split("/")[:-1]
            names = [part for part in parts if common_split_name(part) in _FOLDER_SPLITS]
            if not names:
                return {}
            folders.setdefault(names[0], []).append(path)
        return folders

    def _read_list(self, split: str) -> tuple[str, str]:
        path = self._lists.get(split, split)
        if split not in self._lists and Path(split).is_file():
            # A list that the user names may lie anywhere; what it lists may not.
            return split, Path(split).read_text(encoding="utf-8-sig", errors="replace")
        if not self.folder.is_file(self.folder.inside(path, named_in=path)):
            known = ", ".join(f"{self.prefix}{name}" for name in self.splits)
            raise ProblemError("missing-folder", path, f"no such split or list; there are: {known}")
        return path, self.folder.read_text(path)

    def _listed(self, line: str, listed_in: str) -> Entry | Problem:
        """One line: an id, an image, an annotation, or an image and its annotation."""
        try:
            path = self.folder.inside(line, named_in=listed_in)
            annotation = self._find_annotation(path)
            words = line.split()
            if not annotation and len(words) > 1:
                pair = [self.folder.inside(word, named_in=listed_in) for word in words]
                path = pair[0]
                annotation = self._find_annotation(pair[1 if pair[1].endswith(".xml") else 0])
        except ProblemError as error:
            return error.problem
        if annotation:
            return self._entry(annotation, path, listed_in)
        image = _nearest(path, self._images_by_stem.get(stem_of(path), []))
        if image:
            message = f"listed in {listed_in}, but there is no {stem_of(path)}.xml"
            return Problem("missing-annotation", image, message)
        return Problem("missing-annotation", listed_in, f"{path}: neither annotation nor image")

    def _find_annotation(self, path: str) -> str:
        return _nearest(path, self._annotations_by_stem.get(stem_of(path), []))

    def _entry(self, annotation: str, listed: str, listed_in: str) -> Entry:
        image = self.image_of(annotation)
        if is_image(listed):
            image = _nearest(listed, self._images_by_stem.get(stem_of(listed), [])) or image
        return Entry(listed, annotation, image, listed_in)


def stem_of(path: str) -> str:
    """The file's name without an image's or annotation's extension (ids may contain dots)."""
    stem, extension = posixpath.splitext(posixpath.basename(path.replace("\\", "/")))
    return stem if is_image(path) or extension.lower() == ".xml" else stem + extension


def _by_stem(paths: list[str]) -> dict[str, list[str]]:
    table: dict[str, list[str]] = {}
    for path in paths:
        table.setdefault(stem_of(path), []).append(path)
    return table


def _nearest(path: str, candidates: list[str]) -> str:
    """The candidate whose folders agree best with the path's, counted from both ends."""
    if len(candidates) < 2:
        return candidates[0] if candidates else ""
    if path in candidates:
        return path
    parts = posixpath.dirname(path).split("/")

    def agreement(candidate: str) -> int:
        other = posixpath.dirname(candidate).split("/")
        if other == parts:
            return len(parts) * 2 + 1
        return _common(parts, other) + _common(parts[::-1], other[::-1])

    return max(candidates, key=agreement)


def _common(first: list[str], second: list[str]) -> int:
    count = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        count += 1
    return count
