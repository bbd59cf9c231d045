"""COCO JSON: one annotation file a split, with the images in one of the usual places."""

import posixpath
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from aploss.data.coco_json import CocoContent, read_content
from aploss.data.dataset import DetectionDataset
from aploss.data.paths import DatasetFolder, is_image
from aploss.data.problems import Problem, ProblemError
from aploss.data.records import Records
from aploss.data.source import split_order

__all__ = ["CocoSource", "find_coco"]

_FILLERS = re.compile(r"(^|[_.-])(annotations?|instances|coco|labels|gt)(?=[_.-]|$)", re.IGNORECASE)
_OTHER_TASKS = ("captions_", "person_keypoints_", "panoptic_", "stuff_", "image_info_")
_SECTIONS = re.compile(rb'"(images|annotations|categories|licenses|info)"\s*:')


def find_coco(path: Path) -> "CocoSource | None":
    """The COCO dataset in a folder or JSON file, or None where there is none.

    Annotation files are looked for in the folder, in its ``annotations`` and in the folders of
    its splits: ``annotations/instances_train2017.json`` is split ``train2017``,
    ``train/_annotations.coco.json`` is split ``train``.
    """
    if path.is_file():
        if path.suffix.lower() != ".json":
            return None
        real = path.resolve()
        root = real.parent.parent if real.parent.name.lower() == "annotations" else real.parent
        return CocoSource(DatasetFolder(root), [real.relative_to(root).as_posix()])
    folder = DatasetFolder(path)
    folders = ["", *(name for name in folder.names("") if folder.is_folder(name))]
    files = [
        posixpath.join(parent, name)
        for parent in folders
        for name in folder.names(parent)
        if name.lower().endswith(".json") and not name.startswith(".")
    ]
    files = [file for file in files if _is_coco(folder, file)]
    instances = [f for f in files if not posixpath.basename(f).startswith(_OTHER_TASKS)]
    return CocoSource(folder, instances or files) if files else None


def _is_coco(folder: DatasetFolder, file: str) -> bool:
    """Whether a JSON file begins as a COCO annotation file does."""
    if not folder.is_file(file):
        return False
    with (folder.root / file).open("rb") as opened:
        start = opened.read(1 << 16).lstrip(b"\xef\xbb\xbf \t\r\n")
    return start.startswith(b"{") and _SECTIONS.search(start) is not None


def _split_name(file: str) -> str:
    """What is left of an annotation file's name; otherwise the name of its folder."""
    stem = posixpath.basename(file)[: -len(".json")]
    if stem.startswith("instances_"):
        return stem.removeprefix("instances_")
    name = _FILLERS.sub("", stem).strip("_.-")
    parent = _FILLERS.sub("", posixpath.basename(posixpath.dirname(file))).strip("_.-")
    return name or parent or "all"


class CocoSource:
    """A dataset of COCO annotation files; see :func:`find_coco`."""

    format = "coco"

    def __init__(self, folder: DatasetFolder, files: Sequence[str]) -> None:
        self.folder = folder
        self.name = folder.root.name
        uses = Counter(map(_split_name, files))
        self._files = {}
        for file in files:
            name = _split_name(file)
            self._files[name if uses[name] == 1 else file[: -len(".json")]] = file
        self.splits = tuple(sorted(self._files, key=split_order))
        self._listed: set[str] = set()
        self._image_folders: set[str] = set()

    def read(self, split: str, class_names: Sequence[str] | None) -> DetectionDataset:
        """See :meth:`Source.read`."""
        if split not in self._files:
            known = ", ".join(self.splits)
            raise ProblemError("missing-folder", split, f"no such split; there are: {known}")
        file = self._files[split]
        records = Records(self.folder)
        content = read_content(self.folder, file, records)
        names = content.class_names if class_names is None else tuple(class_names)
        index_of = self._add_images(content, split, file, records)
        self._add_boxes(content, index_of, names, file, records)
        if records.image_ids and min(records.image_ids) < 1:
            shift = 1 - min(records.image_ids)
            records.image_ids = [image_id + shift for image_id in records.image_ids]

        def describe(image: int, number: int) -> tuple[str, str]:
            return file, f"annotation {number} of {records.paths[image]}"

        return records.dataset(class_names=names, name=self.name, split=split, describe=describe)

    def leftovers(self) -> list[Problem]:
        """See :meth:`Source.leftovers`; of the splits that were read."""
        folders = sorted(self._image_folders)
        unlisted = {
            path: None
            for folder in folders
            for path in self.folder.files(folder)
            if is_image(path) and path not in self._listed
        }
        message = "in no annotation file"
        return [Problem("image-without-annotation", path, message) for path in unlisted]

    def _add_images(
        self, content: CocoContent, split: str, file: str, records: Records
    ) -> dict[int, int]:
        """Adds the images that are there; returns id → index, -1 for those that are not."""
        base = self._image_folder(content, split, file)
        self._image_folders.add(base)
        index_of: dict[int, int] = {}
        seen = set()
        for image_id, file_name, size in content.images:
            if image_id in index_of:
                message = f"image id {image_id} is used again, for {file_name}"
                records.report("duplicate-image-id", file, message)
                continue
            index_of[image_id] = -1
            try:
                path = self.folder.locate(file_name, base=base, named_in=file)
            except ProblemError as error:
                records.problems.append(error.problem)
                continue
            if path in seen:
                message = f"{path} is listed again, with id {image_id}"
                records.report("duplicate-image", file, message)
                continue
            seen.add(path)
            if not records.find_image(path, named_in=file):
                continue
            if size is None:
                message = f"{path} has no width and height; taken from the image"
                records.report("missing-size", file, message)
            index_of[image_id] = records.add_image(path, size, image_id)
        self._listed |= seen
        return index_of

    def _image_folder(self, content: CocoContent, split: str, file: str) -> str:
        """The folder that most of the first images are in."""
        parent = posixpath.dirname(file)
        candidates = (
            split,
            f"images/{split}",
            f"{split}/images",
            parent,
            posixpath.join(parent, "images"),
            "images",
            "",
        )
        some = [file_name for _, file_name, _ in content.images[:50]]

        def hits(base: str) -> int:
            return sum(self._is_there(file_name, base) for file_name in some)

        return max(candidates, key=hits)

    def _is_there(self, file_name: str, base: str) -> bool:
        try:
            return self.folder.has(self.folder.inside(file_name, base=base, named_in=""))
        except ProblemError:
            return True  # the place is right, and reading it will say what is wrong

    def _add_boxes(
        self,
        content: CocoContent,
        index_of: dict[int, int],
        names: tuple[str, ...],
        file: str,
        records: Records,
    ) -> None:
        boxes = content.boxes()
        image_ids = np.array(sorted(index_of), np.int64)
        indices = np.array([index_of[i] for i in image_ids.tolist()], np.int64)
        images = _look_up(boxes.image_ids, image_ids, indices, absent=-2)
        for row in np.flatnonzero(images == -2).tolist():
            message = f"annotation {boxes.numbers[row]}: no image has id {boxes.image_ids[row]}"
            records.report("unknown-image", file, message)
        label_of_name = {name: label for label, name in enumerate(names)}
        category_ids = np.array([i for i, _ in content.categories], np.int64)
        labels_of_ids = np.array(
            [label_of_name.get(n, -1) for _, n in content.categories], np.int64
        )
        labels = _look_up(boxes.category_ids, category_ids, labels_of_ids, absent=-2)
        self._report_classes(content, boxes.category_ids[labels < 0], file, records)
        kept = (images >= 0) & (labels >= 0)
        records.add_boxes(
            images[kept],
            boxes.corners[kept],
            labels[kept],
            numbers=boxes.numbers[kept],
            flags=boxes.flags[kept],
            areas=boxes.areas[kept],
        )

    def _report_classes(
        self, content: CocoContent, unknown: NDArray[np.int64], file: str, records: Records
    ) -> None:
        known = dict(content.categories)
        for category_id, count in zip(*np.unique(unknown, return_counts=True), strict=True):
            name = known.get(int(category_id))
            words = (
                f"class {name!r} is not in the class list"
                if name is not None
                else f"category_id {category_id} is not among the categories"
            )
            records.report("unknown-class", file, f"{words}: {count} boxes", count=int(count))
        used = set(np.unique(content.boxes().category_ids).tolist())
        low, high = min(known), max(known)
        if (low - 1 in used and high not in used) or (high + 1 in used and low not in used):
            records.report(
                "class-ids-off-by-one",
                file,
                f"categories have ids {low}..{high}, annotations use {min(used)}..{max(used)}: "
                "are they counted from another number?",
            )


def _look_up(
    keys: NDArray[np.int64],
    table_keys: NDArray[np.int64],
    values: NDArray[np.int64],
    *,
    absent: int,
) -> NDArray[np.int64]:
    """The value of each key in a table sorted by key."""
    if not len(table_keys):
        return np.full(len(keys), absent, np.int64)
    places = np.searchsorted(table_keys, keys).clip(max=len(table_keys) - 1)
    return np.where(table_keys[places] == keys, values[places], absent)
