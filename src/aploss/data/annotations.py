"""Annotation tables, the dataset type, and the rules by which boxes are clipped or dropped.

Metrics are computed on :class:`Annotations`, training reads a :class:`DetectionDataset`. The readers of all formats
fill an :class:`AnnotationBuilder`, so that the same rules apply to every format.
"""

import math
import os
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from aploss.data.folder import DatasetFolder, Problem, ProblemError
from aploss.data.images import ImageError, read_image, read_sizes
from aploss.errors import DataError, listed

Target = dict[str, Any]
Sample = tuple[Tensor, Target]

# Boxes that exceed the image by less are rounding errors: clipped without a problem.
ROUNDING_PIXELS = 0.5
MAX_LISTED = 1000  # problems of one kind that are listed one by one
OBJECT_FIELDS = ("labels", "difficult", "crowd")  # of a target, one entry per object, beside its box
_PER_IMAGE = ("image_sizes", "boxes_per_image", "image_ids")
_PER_OBJECT = ("boxes", "labels", "difficult", "crowd", "areas")


@dataclass(frozen=True, kw_only=True, eq=False)
class Annotations:
    """The annotated objects of a set of images as flat arrays, g objects.

    Attributes:
        image_ids: the image of each object, int64 [g].
        category_ids: the category of each object, int64 [g].
        xywh: boxes as in COCO (left, top, width, height), float64 [g, 4].
        areas: areas, which decide between small, medium and large, float64 [g].
        crowd: annotations that cover a group of objects, bool [g].
        difficult: objects that may be missed without penalty, bool [g].
        images: the ids of all images, including images without objects, ascending, int64 [i].
        categories: category id → name, ascending by id.

    Example:
        >>> from aploss.data import builtin_dataset
        >>> builtin_dataset(cache=".", counts=(4, 2, 2)).annotations.boxes.shape
        (7, 4)
    """

    image_ids: np.ndarray
    category_ids: np.ndarray
    xywh: np.ndarray
    areas: np.ndarray
    crowd: np.ndarray
    difficult: np.ndarray
    images: np.ndarray
    categories: dict[int, str]

    def __len__(self) -> int:
        return len(self.image_ids)

    @property
    def boxes(self) -> np.ndarray:
        """Boxes as xyxy, float64 [g, 4]."""
        return np.concatenate([self.xywh[:, :2], self.xywh[:, :2] + self.xywh[:, 2:]], axis=1)

    @property
    def counted(self) -> np.ndarray:
        """Whether missing the object costs recall: neither crowd nor difficult, bool [g]."""
        return np.asarray(~(self.crowd | self.difficult))


def as_rows(**columns: np.ndarray) -> list[dict[str, Any]]:
    """The rows of a table as dicts of plain Python values, ready for JSON."""
    rows = zip(*(column.tolist() for column in columns.values()), strict=True)
    return [dict(zip(columns, row, strict=True)) for row in rows]


@dataclass(kw_only=True, eq=False, repr=False)
class DetectionDataset(Dataset[Sample]):
    """Images with labelled boxes, stored as flat arrays: COCO's 860,000 boxes take 30 MB.

    Item i is ``(image, target)``: the image a uint8 tensor [3, H, W], the target a dict of tensors ``boxes`` (xyxy,
    float32 [n, 4]), ``labels`` (int64 [n], from 0), ``difficult`` and ``crowd`` (bool [n]), and ``image_id`` (int).
    :meth:`target` gives the target alone, :attr:`annotations` the objects of all images as metrics expect them. The
    arguments are attributes, too, with the arrays of all images.

    Args:
        root: the folder that the image paths are relative to.
        class_names: names of the K classes; label k is ``class_names[k]``.
        image_paths: one path below `root` for each of the n images.
        image_sizes: (width, height) of each image, int [n, 2].
        boxes_per_image: number of boxes of each image, int [n].
        boxes: xyxy in pixels, float [m, 4], image after image.
        labels: int [m], from 0 to K - 1.
        difficult: bool [m]; defaults to False.
        crowd: bool [m]; defaults to False.
        areas: areas as COCO defines them, float [m]; defaults to the boxes' areas.
        image_ids: distinct ids of at least 1, int [n]; defaults to 1..n.
        problems: everything the reader dropped or noticed.
        name: display name; defaults to the folder's name.
        split: name of the split.

    Example:
        >>> dataset = DetectionDataset(
        ...     root="shapes", class_names=("disc", "star"), image_paths=("a.png", "b.png"),
        ...     image_sizes=[(64, 48), (64, 48)], boxes_per_image=[0, 1],
        ...     boxes=[(3, 4, 20, 30)], labels=[1], split="train")
        >>> len(dataset), dataset.image_ids, dataset.target(1)["boxes"], dataset.annotations.category_ids
        (2, array([1, 2]), tensor([[ 3.,  4., 20., 30.]]), array([2]))
    """

    root: Path
    class_names: tuple[str, ...]
    image_paths: list[str]
    image_sizes: Any
    boxes_per_image: Any
    boxes: Any
    labels: Any
    difficult: Any = None
    crowd: Any = None
    areas: Any = None
    image_ids: Any = None
    problems: list[Problem] = field(default_factory=list)
    name: str = ""
    split: str = "all"

    def __post_init__(self) -> None:
        self.root, self.class_names = Path(self.root), tuple(self.class_names)
        self.image_paths, self.problems = list(self.image_paths), list(self.problems)
        self.name = self.name or self.root.resolve().name
        images, count = len(self.image_paths), np.size(np.asarray(self.labels))
        self.image_sizes = _array(self.image_sizes, np.int32, (images, 2))
        self.boxes_per_image = _array(self.boxes_per_image, np.int64, (images,))
        self.boxes = _array(self.boxes, np.float32, (count, 4))
        self.labels = _array(self.labels, np.int64, (count,))
        self.difficult = _array(self.difficult, bool, (count,), default=np.zeros(count))
        self.crowd = _array(self.crowd, bool, (count,), default=np.zeros(count))
        self.areas = _array(self.areas, np.float32, (count,), default=np.prod(self.boxes[:, 2:] - self.boxes[:, :2], 1))
        self.image_ids = _array(self.image_ids, np.int64, (images,), default=np.arange(1, images + 1))
        self._starts = np.concatenate([[0], np.cumsum(self.boxes_per_image)])
        if self._starts[-1] != count:
            raise DataError(f"boxes_per_image counts {self._starts[-1]} boxes, but there are {count}")
        if len(set(self.class_names)) != self.num_classes:
            raise DataError(f"class names must be distinct, got {', '.join(self.class_names)}")
        if count and not 0 <= self.labels.min() <= self.labels.max() < self.num_classes:
            raise DataError(f"labels must be in 0..{self.num_classes - 1}")
        if images and (self.image_ids.min() < 1 or len(np.unique(self.image_ids)) < images):
            raise DataError("image ids must be distinct and at least 1")

    def __len__(self) -> int:
        return len(self.image_paths)

    def __getitem__(self, index: int) -> Sample:
        return read_image(self.image_path(index), size=self.image_size(index)), self.target(index)

    def target(self, index: int) -> Target:
        """The target of item ``index``, without reading the image."""
        index = range(len(self))[index]
        rows = slice(int(self._starts[index]), int(self._starts[index + 1]))
        columns = {name: torch.tensor(getattr(self, name)[rows]) for name in ("boxes", *OBJECT_FIELDS)}
        return {**columns, "image_id": int(self.image_ids[index])}

    def __repr__(self) -> str:
        counts = f"{len(self):,} images, {self.num_boxes:,} boxes, {self.num_classes} classes"
        return f"DetectionDataset({self.name!r}, split={self.split!r}, {counts})"

    @property
    def num_classes(self) -> int:
        """K, the number of classes."""
        return len(self.class_names)

    @property
    def num_boxes(self) -> int:
        """The number of boxes in all images."""
        return len(self.boxes)

    @cached_property
    def annotations(self) -> Annotations:
        """The objects of all images, image after image, as metrics expect them; category ids are labels + 1."""
        corners = self.boxes.astype(np.float64)  # exact: x + w gives x2 back
        return Annotations(
            image_ids=np.repeat(self.image_ids, self.boxes_per_image),
            category_ids=self.labels + 1,
            xywh=np.concatenate([corners[:, :2], corners[:, 2:] - corners[:, :2]], axis=1),
            areas=self.areas.astype(np.float64),
            crowd=self.crowd,
            difficult=self.difficult,
            images=np.sort(self.image_ids),
            categories=dict(enumerate(self.class_names, start=1)),
        )

    def image_path(self, index: int) -> Path:
        """The path of the image file."""
        return self.root / self.image_paths[index]

    def image_size(self, index: int) -> tuple[int, int]:
        """(width, height) as annotated, or read from the file if the annotation has none."""
        width, height = self.image_sizes[index].tolist()
        return width, height

    def to_coco(self) -> dict[str, Any]:
        """The annotations as a COCO ground-truth dict.

        Returns:
            ``images`` (with ``id``, ``file_name`` below :attr:`root`, ``width``, ``height``), ``annotations`` (ids from
            1; ``category_id`` is the label + 1; ``bbox`` is xywh; ``area``, ``iscrowd``, ``difficult``) and
            ``categories`` (ids 1..K).
        """
        table = self.annotations
        names, (widths, heights) = np.array(self.image_paths, object), self.image_sizes.T
        return {
            "images": as_rows(id=self.image_ids, file_name=names, width=widths, height=heights),
            "annotations": as_rows(
                id=np.arange(1, len(table) + 1),
                image_id=table.image_ids,
                category_id=table.category_ids,
                bbox=table.xywh,
                area=table.areas,
                iscrowd=table.crowd.astype(int),
                difficult=table.difficult.astype(int),
            ),
            "categories": [{"id": k, "name": name} for k, name in table.categories.items()],
        }

    def subset(self, indices: Sequence[int], *, split: str | None = None) -> "DetectionDataset":
        """Some of the images, in the given order, with their ids.

        Args:
            indices: distinct numbers from 0 to ``len(self) - 1``.
            split: a new name for the part; defaults to the current one.
        """
        chosen = np.asarray(indices, dtype=np.int64).reshape(-1)
        if len(chosen) and not 0 <= chosen.min() <= chosen.max() < len(self):
            raise DataError(f"a subset's indices must be in 0..{len(self) - 1}")
        counts = self.boxes_per_image[chosen]
        starts = np.cumsum(counts) - counts  # where each image's boxes begin in the subset
        rows = np.arange(counts.sum()) + np.repeat(self._starts[chosen] - starts, counts)
        return replace(
            self,
            image_paths=[self.image_paths[i] for i in chosen.tolist()],
            split=self.split if split is None else split,
            **{column: getattr(self, column)[chosen] for column in _PER_IMAGE},
            **{column: getattr(self, column)[rows] for column in _PER_OBJECT},
        )


def distinct(parts: Iterable[DetectionDataset]) -> list[DetectionDataset]:
    """The splits of a dataset, each without the images of earlier ones."""
    seen: set[str] = set()
    rest = []
    for part in parts:
        rest.append(part.subset([index for index, path in enumerate(part.image_paths) if path not in seen]))
        seen.update(part.image_paths)
    return rest


def concatenate(parts: Sequence[DetectionDataset], *, split: str) -> DetectionDataset:
    """Joins splits of a dataset that have the same classes; an image in several of them is kept once.

    Image ids are kept if they remain distinct, otherwise they become 1..n.
    """
    assert len({(part.root, part.class_names) for part in parts}) == 1
    fresh = distinct(parts)
    paths = [path for part in fresh for path in part.image_paths]
    columns: dict[str, Any] = {
        name: np.concatenate([getattr(part, name) for part in fresh]) for name in (*_PER_IMAGE, *_PER_OBJECT)
    }
    if len(np.unique(columns["image_ids"])) < len(paths):
        columns["image_ids"] = np.arange(1, len(paths) + 1)
    problems = list(dict.fromkeys(problem for part in parts for problem in part.problems))
    return replace(parts[0], image_paths=paths, problems=problems, split=split, **columns)


def _array(values: Any, dtype: Any, shape: tuple[int, ...], *, default: Any = None) -> NDArray[Any]:
    array = np.ascontiguousarray(default if values is None else values, dtype=dtype)
    if array.size == 0 and 0 in shape:
        return array.reshape(shape)
    if array.shape != shape:
        raise DataError(f"expected an array of shape {shape}, got {array.shape}")
    return array


class AnnotationBuilder:
    """Collects the images and boxes of one split, reports what cannot be used and leaves it out.

    Args:
        folder: where the images are.
        class_names: names of the classes, in the order of their labels.
        unit: what :meth:`add_box` calls the `number` of a box in messages, such as "line".
        origin: coordinate of the first pixel in the annotation files: 0, or 1 for VOC. Used in messages; a box whose
            extent is at most `origin` has coinciding corners in its file.

    Example:
        >>> from PIL import Image
        >>> Image.new("RGB", (64, 48)).save("a.png")
        >>> builder = AnnotationBuilder(DatasetFolder("."), ["disc"], unit="row")
        >>> image = builder.add_image("a.png", None, file="boxes.csv")
        >>> builder.add_box(image, (3, 4, 20, 60), "disc", number=1)
        >>> dataset = builder.dataset(name="discs", split="train")
        >>> dataset.boxes.tolist(), dataset.problems[0].kind  # the box reached below the image
        ([[3.0, 4.0, 20.0, 48.0]], 'out-of-bounds-box')
    """

    def __init__(
        self, folder: DatasetFolder, class_names: Sequence[str], *, unit: str = "object", origin: int = 0
    ) -> None:
        self.folder, self.class_names, self.unit, self.origin = folder, tuple(class_names), unit, origin
        self.problems: list[Problem] = []
        self.paths: list[str] = []
        self.sizes: list[tuple[int, int]] = []
        self.image_ids: list[int] = []
        self._files: list[str] = []  # the annotation file of each image
        self._boxes = array("d")  # 10 per box: image, label, number, difficult, crowd, area, corners
        self._listed: set[str] = set()  # all paths, including those of unusable images
        self._label_of: dict[str | int, int] = {name: label for label, name in enumerate(self.class_names)}
        self._unknown: dict[tuple[str, str | int], list[int]] = {}  # file, class → numbers of the boxes

    def report(self, kind: str, file: str, message: str, *, count: int = 1) -> None:
        """Records a :class:`~aploss.data.Problem` with these arguments."""
        self.problems.append(Problem(kind, file, message, count))

    def add_image(
        self, path: str, size: tuple[int, int] | None, *, file: str, base: str | None = "", image_id: int | None = None
    ) -> int:
        """Adds an image.

        Args:
            path: as written in the annotation file.
            size: width and height; None to read them from the image.
            file: the annotation file, for messages.
            base: folder that `path` is relative to, itself relative to the dataset's folder; None for a path that
                :class:`DatasetFolder` returned.
            image_id: defaults to 1, 2, 3, ...

        Returns:
            Its index; -1 if it cannot be used, which is reported.
        """
        try:
            if base is not None:
                path = self.folder.inside(path, base=base, named_in=file)
            if path in self._listed:
                raise ProblemError("duplicate-image", file, f"the image {path} is listed more than once")
            self._listed.add(path)
            if not (self.folder.has(path) and os.path.exists(f"{self.folder.root}/{path}")):  # noqa: PTH110 - faster
                raise ProblemError("missing-image", path, f"no such image; {file} needs it")
            self.sizes.append(size or read_sizes(self.folder.root / path)[0])
        except ProblemError as error:
            self.problems.append(replace(error.problem, file=path) if isinstance(error, ImageError) else error.problem)
            return -1
        self.paths.append(path)
        self._files.append(file)
        self.image_ids.append(len(self.paths) if image_id is None else image_id)
        return len(self.paths) - 1

    def add_box(
        self,
        image: int,
        corners: Sequence[float],
        class_name: str | int,
        *,
        number: int,
        difficult: bool = False,
        crowd: bool = False,
        area: float = math.nan,
    ) -> None:
        """Adds a box, unless its image is unusable.

        Args:
            image: the index returned by :meth:`add_image`.
            corners: x1, y1, x2, y2 with the first pixel at 0.
            class_name: of the object; a class without a name is given by its number, and reported as unknown.
            number: number of the object, line or annotation in its file, for messages.
            difficult: see :class:`DetectionDataset`.
            crowd: see :class:`DetectionDataset`.
            area: as COCO defines it; NaN for the area of the box.
        """
        if image < 0:
            return
        label = self._label_of.get(class_name)
        if label is None:
            self._unknown.setdefault((self._files[image], class_name), []).append(number)
        else:
            self._boxes.extend((image, label, number, difficult, crowd, area, *corners))

    def dataset(self, *, name: str, split: str) -> DetectionDataset:
        """Validates the boxes and builds the dataset; see :class:`DetectionDataset` for the arguments."""
        for (file, unknown), uses in self._unknown.items():
            known = f"not in the class list ({listed(self.class_names)})"
            message = f"{self.unit} {uses[0]}: class {unknown!r} is {known}, boxes: {len(uses)}"
            self.report("unknown-class", file, message, count=len(uses))
        table = np.frombuffer(self._boxes, np.float64).reshape(-1, 10)
        image_of_box, labels, numbers = table[:, :3].astype(np.int64).T
        corners = table[:, 6:]
        sizes = np.array(self.sizes, np.int64).reshape(-1, 2)
        boxes, kept, faults = _clip_boxes(corners, sizes[image_of_box], origin=self.origin)
        for (kind, message), mask in faults.items():

            def problem(row: int, kind: str = kind, message: str = message) -> Problem:
                image = int(image_of_box[row])
                path, (width, height) = self.paths[image], self.sizes[image]
                shown = ", ".join(f"{value:.10g}" for value in corners[row] + [self.origin, self.origin, 0, 0])
                text = f"{self.unit} {numbers[row]}: box ({shown}) {message} ({path} has {width}x{height} pixels)"
                box = tuple(corners[row].tolist()) if np.isfinite(corners[row]).all() else None  # NaN is not JSON
                return Problem(kind, self._files[image], text, image=path, box=box)

            self.problems += list_boxes(mask, problem, rest_in=name)
        rows = np.flatnonzero(kept)
        rows = rows[np.argsort(image_of_box[rows], kind="stable")]
        areas, box_areas = table[rows, 5], np.prod(boxes[rows, 2:] - boxes[rows, :2], axis=1)
        return DetectionDataset(
            root=self.folder.root,
            class_names=self.class_names,
            image_paths=self.paths,
            image_sizes=sizes,
            boxes_per_image=np.bincount(image_of_box[rows], minlength=len(sizes)),
            boxes=boxes[rows],
            labels=labels[rows],
            difficult=table[rows, 3],
            crowd=table[rows, 4],
            areas=np.where(np.isfinite(areas) & (areas > 0), areas, box_areas),
            image_ids=self.image_ids,
            problems=self.problems,
            name=name,
            split=split,
        )


def list_boxes(mask: NDArray[np.bool_], describe: Callable[[int], Problem], *, rest_in: str) -> Iterator[Problem]:
    """The problems of the boxes in a mask: :data:`MAX_LISTED` of them one by one, the others together."""
    rows = np.flatnonzero(mask).tolist()
    problems = [describe(row) for row in rows[:MAX_LISTED]]
    yield from problems
    if rest := len(rows) - len(problems):
        yield Problem(problems[0].kind, rest_in, f"{rest:,} more boxes like this", count=rest)


def _clip_boxes(
    corners: NDArray[np.float64], sizes: NDArray[np.int64], *, origin: int
) -> tuple[NDArray[np.float32], NDArray[np.bool_], dict[tuple[str, str], NDArray[np.bool_]]]:
    """Clips boxes [m, 4] to the sizes [m, 2] of their images.

    Returns:
        The clipped boxes, which of them are usable, and kind and description of a problem → affected boxes.
    """
    finite = np.asarray(np.isfinite(corners).all(axis=1))
    corners = np.where(finite[:, None], corners, 0.0)
    clipped = np.clip(corners, 0.0, np.tile(sizes, 2).astype(np.float64))
    boxes = clipped.astype(np.float32)  # a box thinner than the resolution of float32 has no width
    degenerate = (corners[:, 2:] - corners[:, :2] <= origin).any(axis=1) | (boxes[:, 2:] <= boxes[:, :2]).any(axis=1)
    # Fractions of the image, as in YOLO, or [x1, y1, x2, y2] of them where [x, y, width, height] belongs.
    fractions = finite & (corners[:, :2] >= 0).all(axis=1) & (sizes > 8).all(axis=1)
    fractions &= (corners[:, :2] <= 1).all(axis=1) & (corners[:, 2:] - corners[:, :2] <= 1.01).all(axis=1)
    fractions &= (corners[:, 2:] > corners[:, :2]).all(axis=1)
    degenerate &= ~fractions
    usable = finite & ~degenerate & ~fractions
    exceeding = usable & (np.abs(clipped - corners).max(axis=1, initial=0.0) > ROUNDING_PIXELS)
    faults = {
        ("bad-box", "has a NaN or infinite coordinate"): ~finite,
        ("fraction-box", "looks like fractions of the image; write pixels"): fractions,
        ("degenerate-box", "has no width or no height inside the image"): finite & degenerate,
        ("out-of-bounds-box", "exceeds the image and is clipped"): exceeding,
    }
    return boxes, usable, faults
