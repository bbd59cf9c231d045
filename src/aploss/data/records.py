"""From what a reader finds to a checked dataset: the rules for boxes that all formats share."""

from array import array
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from aploss.data.dataset import DetectionDataset
from aploss.data.images import ImageError, read_header
from aploss.data.paths import DatasetFolder
from aploss.data.problems import Problem, ProblemError

__all__ = ["Records", "number"]

# Boxes that reach beyond the image by less are rounding: clipped without a word.
ROUNDING_PIXELS = 0.5


def number(text: object) -> float:
    """A coordinate as float.

    Raises:
        ValueError: It is not a number (NaN and infinity are).
    """
    if isinstance(text, bool) or not isinstance(text, (int, float, str)):
        raise ValueError(f"{text!r} is not a number")
    try:
        return float(text)
    except (ValueError, OverflowError):
        raise ValueError(f"{text!r} is not a number") from None


class Records:
    """Collects the images and boxes of one split, then drops what cannot be trained on.

    Args:
        folder: Where the images are.
        origin: The number of the first pixel: 0, or 1 for VOC. Shown in messages, and a box as
            thin as its format's `origin` is one whose corners coincide as written.
    """

    def __init__(self, folder: DatasetFolder, *, origin: int = 0) -> None:
        self.folder = folder
        self.origin = origin
        self.problems: list[Problem] = []
        self.paths: list[str] = []
        self.sizes: list[tuple[int, int]] = []
        self.image_ids: list[int] = []
        self._image_of_box = array("q")
        self._corners = array("d")
        self._labels = array("q")
        self._numbers = array("q")
        self._flags = array("b")  # 1: difficult, 2: crowd
        self._areas = array("d")

    def report(self, kind: str, file: str, message: str, *, count: int = 1) -> None:
        """Notes a problem."""
        self.problems.append(Problem(kind, file, message, count))

    def add_image(
        self, path: str, size: tuple[int, int] | None, image_id: int | None = None
    ) -> int:
        """Adds an image and returns its index, or -1 where its size is needed and unreadable."""
        if size is None:
            try:
                size = read_header(self.folder.root / path).size
            except ImageError as error:
                self.report(error.kind, path, error.detail)
                return -1
        self.paths.append(path)
        self.sizes.append(size)
        self.image_ids.append(len(self.paths) if image_id is None else image_id)
        return len(self.paths) - 1

    def find_image(self, path: str, *, named_in: str) -> bool:
        """Whether the image file exists inside the folder; reports it where it does not."""
        try:
            if self.folder.has(path, named_in=named_in):
                return True
            self.report("missing-image", path, f"no such image; {named_in} needs it")
        except ProblemError as error:
            self.problems.append(error.problem)
        return False

    def add_box(
        self,
        image: int,
        corners: Sequence[float],
        label: int,
        *,
        number: int,
        difficult: bool = False,
        crowd: bool = False,
        area: float = float("nan"),
    ) -> None:
        """Adds a box of the image of that index.

        Args:
            image: What :meth:`add_image` returned.
            corners: x1, y1, x2, y2 with the first pixel at 0.
            label: From 0.
            number: Which object, line or annotation it is, for messages.
            difficult: See :class:`DetectionDataset`.
            crowd: See :class:`DetectionDataset`.
            area: See :class:`DetectionDataset`; NaN stands for the box's own.
        """
        self._image_of_box.append(image)
        self._corners.extend(corners)
        self._labels.append(label)
        self._numbers.append(number)
        self._flags.append(difficult + 2 * crowd)
        self._areas.append(area)

    def add_boxes(
        self,
        images: NDArray[np.int64],
        corners: NDArray[np.float64],
        labels: NDArray[np.int64],
        *,
        numbers: NDArray[np.int64],
        flags: NDArray[np.int8],
        areas: NDArray[np.float64],
    ) -> None:
        """Adds many boxes at once; `flags` is 1 for difficult, 2 for crowd, 3 for both."""
        self._image_of_box.frombytes(np.ascontiguousarray(images, np.int64).tobytes())
        self._corners.frombytes(np.ascontiguousarray(corners, np.float64).tobytes())
        self._labels.frombytes(np.ascontiguousarray(labels, np.int64).tobytes())
        self._numbers.frombytes(np.ascontiguousarray(numbers, np.int64).tobytes())
        self._flags.frombytes(np.ascontiguousarray(flags, np.int8).tobytes())
        self._areas.frombytes(np.ascontiguousarray(areas, np.float64).tobytes())

    def dataset(
        self,
        *,
        class_names: Sequence[str],
        name: str,
        split: str,
        describe: Callable[[int, int], tuple[str, str]],
    ) -> DetectionDataset:
        """Checks the boxes and packs everything.

        Args:
            class_names: See :class:`DetectionDataset`.
            name: See :class:`DetectionDataset`.
            split: See :class:`DetectionDataset`.
            describe: (image index, number of a box) → (file to blame, words for the box).
        """
        image_of_box = np.frombuffer(self._image_of_box, np.int64)
        corners = np.frombuffer(self._corners, np.float64).reshape(-1, 4)
        sizes = np.array(self.sizes, np.int64).reshape(-1, 2)
        boxes, kept, faults = check_boxes(corners, sizes[image_of_box], origin=self.origin)
        labels = np.frombuffer(self._labels, np.int64)
        again = kept.copy()
        again[kept] = repeated_rows(np.column_stack([image_of_box, labels, boxes])[kept])
        for kind, rows in {**faults, "duplicate-box": np.flatnonzero(again)}.items():
            for row in rows.tolist():
                file, where = describe(int(image_of_box[row]), self._numbers[row])
                shown = corners[row] + [self.origin, self.origin, 0, 0]
                width, height = self.sizes[image_of_box[row]]
                self.report(kind, file, _box_message(kind, where, shown, width, height))
        rows = np.flatnonzero(kept)
        rows = rows[np.argsort(image_of_box[rows], kind="stable")]
        flags = np.frombuffer(self._flags, np.int8)[rows]
        areas = np.frombuffer(self._areas, np.float64)[rows]
        box_areas = np.prod(boxes[rows, 2:] - boxes[rows, :2], axis=1)
        return DetectionDataset(
            root=self.folder.root,
            class_names=class_names,
            image_paths=self.paths,
            image_sizes=sizes,
            boxes_per_image=np.bincount(image_of_box[rows], minlength=len(sizes)),
            boxes=boxes[rows],
            labels=labels[rows],
            difficult=flags % 2 == 1,
            crowd=flags >= 2,
            areas=np.where(np.isfinite(areas) & (areas > 0), areas, box_areas),
            image_ids=self.image_ids,
            problems=self.problems,
            name=name,
            split=split,
        )


def check_boxes(
    corners: NDArray[np.float64], sizes: NDArray[np.int64], *, origin: int = 0
) -> tuple[NDArray[np.float32], NDArray[np.bool_], dict[str, NDArray[np.int64]]]:
    """Clips boxes to their images and finds those that cannot be used.

    Args:
        corners: x1, y1, x2, y2, float64 [m, 4].
        sizes: Width and height of each box's image, [m, 2].
        origin: See :class:`Records`.

    Returns:
        The clipped boxes, float32 [m, 4]; which of them are usable, bool [m]; and for each kind of
        problem the numbers of the boxes that have it.
    """
    finite = np.asarray(np.isfinite(corners).all(axis=1))
    corners = np.where(finite[:, None], corners, 0.0)
    upper = np.tile(sizes, 2).astype(np.float64)
    degenerate = finite & (corners[:, 2:] - corners[:, :2] <= origin).any(axis=1)
    clipped = np.clip(corners, 0.0, upper)
    boxes = clipped.astype(np.float32)
    empty = (boxes[:, 2:] <= boxes[:, :2]).any(axis=1)
    beyond = np.abs(clipped - corners).max(axis=1, initial=0.0) > ROUNDING_PIXELS
    usable = finite & ~degenerate & ~empty
    # A box thinner than float32 can tell apart is as good as one without width.
    degenerate |= finite & empty & ~beyond
    faults = {
        "non-finite-coordinate": ~finite,
        "degenerate-box": degenerate,
        "outside-box": finite & ~degenerate & empty,
        "out-of-bounds-box": usable & beyond,
    }
    return boxes, usable, {kind: np.flatnonzero(mask) for kind, mask in faults.items()}


def repeated_rows(table: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Which rows [m, c] equal an earlier one, by sorting a hash of them: 860,000 take 0.2 s."""
    key = np.zeros(len(table), np.uint64)
    for column in np.ascontiguousarray(table.T + 0.0).view(np.uint64):  # -0.0 + 0.0 is 0.0
        key = key * np.uint64(0x9E3779B97F4A7C15) + column
        key ^= key >> np.uint64(29)
    order = np.argsort(key, kind="stable")
    same = (key[order[1:]] == key[order[:-1]]) & (table[order[1:]] == table[order[:-1]]).all(axis=1)
    repeated = np.zeros(len(table), bool)
    repeated[order[1:]] = same
    return repeated


def _box_message(
    kind: str, where: str, corners: NDArray[np.float64], width: int, height: int
) -> str:
    box = ", ".join(f"{value:.10g}" for value in corners.tolist())
    ending = {
        "non-finite-coordinate": "has a NaN or infinite coordinate",
        "degenerate-box": "has no width or no height",
        "outside-box": f"lies outside the {width}x{height} image",
        "out-of-bounds-box": f"reaches beyond the {width}x{height} image and is clipped",
        "duplicate-box": "is there twice",
    }[kind]
    return f"{where}: box ({box}) {ending}"
