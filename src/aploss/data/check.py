"""Checks a dataset before training does: every problem by file, statistics, a report as text, and fingerprints."""

import hashlib
import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import combinations, groupby, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from aploss.data.annotations import DetectionDataset, distinct, list_boxes
from aploss.data.folder import KINDS, Effect, Problem, ProblemError
from aploss.data.formats import Parts, check_class_names, common_split_name, find_source
from aploss.data.images import Progress, inspect_images, map_in_threads

USABLE, SOMETHING_DROPPED, UNUSABLE = 0, 1, 2
# √area of a box in pixels; 32 and 96 separate COCO's small, medium and large objects.
BOX_SIZE_EDGES = (0, 8, 16, 32, 64, 96, 128, 256, 512)
TINY_PIXELS = 2  # a side below this is reported
SAMPLED_FILES = 2000  # image files whose bytes enter a fingerprint; of the others only the size does
SAMPLED_BYTES = 1 << 14  # of such a file, see :func:`sample_file`
_MAX_CLASSES = 10  # in the text
_EXAMPLES = 12  # problems in the text, of all kinds together


@dataclass(frozen=True)
class SplitStatistics:
    """Counts of the usable images and boxes of a split."""

    images: int
    empty_images: int  # images without a box
    boxes: int
    difficult: int  # boxes marked difficult
    crowd: int  # boxes marked crowd
    boxes_of_class: dict[str, int]  # class name → number of boxes
    box_sizes: dict[str, int]  # range of √area in pixels ("8-16") → number of boxes
    image_sizes: str  # smallest to largest width x height


def _statistics(parts: Sequence[DetectionDataset]) -> SplitStatistics:
    """Counts of several datasets together."""
    of_class: Counter[str] = Counter()
    for part in parts:
        counts = np.bincount(part.labels, minlength=part.num_classes)
        of_class.update(dict(zip(part.class_names, counts.tolist(), strict=True)))
    sides = np.concatenate([np.zeros((0, 2)), *(part.annotations.xywh[:, 2:] for part in parts)])
    sizes = np.concatenate([part.image_sizes for part in parts if len(part)] or [np.zeros((1, 2), int)])
    limits = ("x".join(map(str, limit.tolist())) for limit in (sizes.min(axis=0), sizes.max(axis=0)))
    counts, _ = np.histogram(np.sqrt(sides.prod(axis=1)), [*BOX_SIZE_EDGES, np.inf])
    ranges = [*(f"{start}-{stop}" for start, stop in pairwise(BOX_SIZE_EDGES)), f"{BOX_SIZE_EDGES[-1]}+"]
    return SplitStatistics(
        images=sum(map(len, parts)),
        empty_images=sum(int((part.boxes_per_image == 0).sum()) for part in parts),
        boxes=len(sides),
        difficult=sum(int(part.difficult.sum()) for part in parts),
        crowd=sum(int(part.crowd.sum()) for part in parts),
        boxes_of_class=dict(of_class),
        box_sizes=dict(zip(ranges, counts.tolist(), strict=True)),
        image_sizes=" to ".join(dict.fromkeys(limits)),
    )


@dataclass
class CheckResult:
    """The result of a check."""

    path: str  # as given by the user
    root: str  # the folder that image paths are relative to
    format: str  # name of the format, such as "coco"
    class_names: tuple[str, ...]  # the classes of all splits
    splits: dict[str, SplitStatistics]  # the usable splits
    total: SplitStatistics  # all splits together, every image counted once
    problems: list[Problem]  # most severe first, then by file
    copies: list[tuple[str, ...]]  # groups of image files with the same content
    pixels: bool  # whether images were decoded

    @property
    def exit_code(self) -> int:
        """0 if nothing is dropped or clipped, 1 if something is, 2 if the dataset or the training split is unusable."""
        effects = {problem.effect for problem in self.problems}
        if Effect.REFUSED in effects or not self.total.boxes:
            return UNUSABLE
        unusable = {split for one in self.problems if one.effect is Effect.SPLIT_UNUSABLE for split in one.splits}
        names = {*map(common_split_name, unusable)} - {*map(common_split_name, self.splits)}
        if any(name.endswith(("train", "trainval")) for name in names):
            return UNUSABLE
        return SOMETHING_DROPPED if effects - {Effect.KEPT} else USABLE

    def affected(self, effect: Effect) -> int:
        """The number of images or boxes that an effect concerns."""
        return sum(problem.count for problem in self.problems if problem.effect is effect)

    def to_dict(self) -> dict[str, object]:
        """The whole result, ready for JSON."""
        return {
            **asdict(self),
            "exit_code": self.exit_code,
            "images_dropped": self.affected(Effect.IMAGE_DROPPED),
            "boxes_dropped": self.affected(Effect.BOX_DROPPED),
            "boxes_clipped": self.affected(Effect.BOX_CLIPPED),
            "problems": [{**asdict(problem), "effect": problem.effect.value} for problem in self.problems],
        }


def check_dataset(
    path: str | Path,
    *,
    format: str = "auto",
    class_names: Sequence[str] | None = None,
    pixels: bool = False,
    progress: Progress | None = None,
) -> CheckResult:
    """Returns statistics and problems: reads all splits, the headers of images, and looks for odd boxes and copies.

    Args:
        path, format: see :func:`aploss.data.load_dataset`.
        class_names: the expected classes; others are reported as unknown.
        pixels: whether to decode every image, too, which finds damaged images.
        progress: called with (images done, total).

    Raises:
        DataError: no dataset is found.

    Example:
        >>> from aploss.data import builtin_dataset
        >>> result = check_dataset(builtin_dataset(cache=".", counts=(4, 2, 2)).root)
        >>> result.exit_code, result.total.images, result.problems
        (0, 8, [])
    """
    source = find_source(path, format=format)
    names = None if class_names is None else check_class_names(class_names)
    splits_of: dict[Problem, dict[str, None]] = {}  # a problem that several splits share is listed once

    def report(problems: Iterable[Problem], split: str | None = None) -> None:
        for problem in problems:
            splits_of.setdefault(problem, {}).update({} if split is None else {split: None})

    parts: Parts = {}
    for split in source.splits:
        try:
            parts[split] = source.read(split, names)
            report(parts[split].problems, split)
        except ProblemError as error:
            report([error.problem], split)
    # An image is inspected once, however many splits contain it.
    bad_images = {one.image: one for part in distinct(parts.values()) for one in inspect_images(part, pixels, progress)}
    usable = {}
    for split, part in parts.items():
        report((bad_images[name] for name in part.image_paths if name in bad_images), split)
        rest = part.subset([index for index, name in enumerate(part.image_paths) if name not in bad_images])
        report(_suspicious_boxes(rest), split)
        if len(rest):
            usable[split] = rest
        else:
            report([Problem("empty-split", split, "no usable image in this split")], split)
    copies = _find_copies(usable)
    report(_problems_across_splits(usable, copies, source.name))
    kinds = list(KINDS)  # most severe first
    return CheckResult(
        path=str(path),
        root=str(source.folder.root),
        format=source.format,
        class_names=tuple(dict.fromkeys(name for part in usable.values() for name in part.class_names)),
        splits={split: _statistics([part]) for split, part in usable.items()},
        total=_statistics(distinct(usable.values())),
        problems=[
            replace(problem, splits=tuple(splits_of[problem]))
            for problem in sorted(splits_of, key=lambda problem: (kinds.index(problem.kind), problem.file))
        ],
        copies=copies,
        pixels=pixels,
    )


def _suspicious_boxes(part: DetectionDataset) -> Iterator[Problem]:
    """Boxes that can be used but are probably wrong: very small ones, and the same box twice in an image."""
    images = np.repeat(np.arange(len(part)), part.boxes_per_image)
    rows = np.column_stack([images, part.boxes])
    order = np.lexsort(rows.T)
    repeated = np.zeros(len(rows), bool)
    repeated[order[1:]] = (rows[order[1:]] == rows[order[:-1]]).all(axis=1)
    tiny = (part.boxes[:, 2:] - part.boxes[:, :2] < TINY_PIXELS).any(axis=1)
    for kind, mask in (("repeated-box", repeated), ("tiny-box", tiny)):

        def describe(row: int, kind: str = kind) -> Problem:
            path, box = part.image_paths[images[row]], tuple(part.boxes[row].tolist())
            shown = ", ".join(f"{value:.6g}" for value in box)
            return Problem(kind, path, f"{part.class_names[part.labels[row]]} ({shown})", image=path, box=box)

        yield from list_boxes(mask, describe, rest_in=part.split)


def _find_copies(parts: Parts) -> list[tuple[str, ...]]:
    """Groups of image files with the same content. Only files of equal size are read, and a sample of them first."""
    groups = [[f"{part.root}/{name}" for part in distinct(parts.values()) for name in part.image_paths]]
    for length in (0, SAMPLED_BYTES, sys.maxsize):
        alike: dict[tuple[int, bytes], list[str]] = {}
        paths = [(number, path) for number, group in enumerate(groups) for path in group]
        keys = map_in_threads(partial(sample_file, length=length), [path for _, path in paths])
        for (number, path), found in zip(paths, keys, strict=True):
            alike.setdefault((number, found), []).append(path)
        groups = [group for group in alike.values() if len(group) > 1]
    root = len(str(next(iter(parts.values())).root)) + 1 if parts else 0
    return [tuple(path[root:] for path in group) for group in groups]


def _problems_across_splits(parts: Parts, copies: Sequence[tuple[str, ...]], name: str) -> Iterator[Problem]:
    """Copies of images, images in several splits, different class lists, no boxes at all."""
    original = {path: group[0] for group in copies for path in group}
    paths = {split: {original.get(p, p): p for p in reversed(part.image_paths)} for split, part in parts.items()}
    for split, part in parts.items():
        for path in part.image_paths:
            if (first := paths[split][original.get(path, path)]) != path:
                yield Problem("copied-image", path, f"the same file as {first}", image=path)
    for first, second in combinations(paths, 2):
        small, large = sorted((first, second), key=lambda split: len(paths[split]))
        both = paths[first].keys() & paths[second].keys()
        # Some splits, such as trainval, are meant to contain others.
        if len(both) < len(paths[small]) or common_split_name(large) in ("train", "val", "test"):
            for key in both:
                message = f"in {second}, and in {first} as {paths[first][key]}"
                yield Problem("image-in-two-splits", paths[second][key], message, image=paths[second][key])
    lists = {part.class_names for part in parts.values()}
    if len(lists) > 1:
        shown = " / ".join(sorted(", ".join(names) for names in lists))
        yield Problem("class-lists-differ", name, f"classes of the splits: {shown:.500}")
    if parts and not any(part.num_boxes for part in parts.values()):
        yield Problem("no-boxes", name, "no usable box in any split")


# --- fingerprints -----------------------------------------------------------------------------------


def fingerprint(dataset: DetectionDataset) -> dict[str, Any]:
    """Identifies the content of a split, cheaply enough for COCO (118,000 images in seconds).

    Equal for equal content in equal order, wherever the dataset is and whatever its format; file names and image ids
    do not matter. Of the images, the size of every file and a sample of the bytes of up to :data:`SAMPLED_FILES`
    files are used, so that an exchanged image is found without reading all of them. Ready for JSON.
    """
    annotations, files = (hashlib.blake2b(digest_size=16) for _ in range(2))
    for column in ("image_sizes", "boxes_per_image", "boxes", "labels", "difficult", "crowd", "areas"):
        annotations.update(getattr(dataset, column).tobytes())
    paths = [f"{dataset.root}/{path}" for path in dataset.image_paths]
    sampled = set(np.linspace(0, len(paths) - 1, min(len(paths), SAMPLED_FILES)).astype(int).tolist())
    lengths = [SAMPLED_BYTES if index in sampled else 0 for index in range(len(paths))]
    for content in map_in_threads(lambda index: sample_file(paths[index], lengths[index]), range(len(paths))):
        files.update(content)
    return {
        "class_names": list(dataset.class_names),
        "images": len(dataset),
        "boxes": dataset.num_boxes,
        "annotations": annotations.hexdigest(),
        "files": files.hexdigest(),
    }


def sample_file(path: str, length: int) -> bytes:
    """The size of a file and a digest of ``length`` bytes at its beginning, in its middle and at its end."""
    try:
        size = os.stat(path).st_size  # noqa: PTH116 - called for every image, Path is slower
        if length == 0:
            return b"%d\n" % size
        with open(path, "rb") as file:  # noqa: PTH123
            digest, length = hashlib.blake2b(digest_size=16), min(length, size)
            for start in sorted({0, size // 2, max(0, size - length)}):
                file.seek(start)
                digest.update(file.read(length))
        return b"%d " % size + digest.digest()
    except OSError:
        return b"unreadable\n"


# --- the report as text ---------------------------------------------------------------------------


def check_report(result: CheckResult) -> str:
    """The result of :func:`check_dataset` on one screen; its page and JSON have every detail."""
    lines = [f"{result.path}: {result.format} dataset, classes: {len(result.class_names)}"]
    for split, counts in result.splits.items():
        images = f"{counts.images:,} images of {counts.image_sizes} pixels ({counts.empty_images:,} without boxes)"
        lines.append(f"  {split}: {images}, {counts.boxes:,} boxes")
    of_class = Counter(result.total.boxes_of_class).most_common()
    shown = ", ".join(f"{name} {count:,}" for name, count in of_class[:_MAX_CLASSES])
    lines.append(f"  boxes of the classes: {shown}{', ...' if len(of_class) > _MAX_CLASSES else ''}")
    return "\n\n".join(["\n".join(lines), _problem_list(result.problems), _verdict(result)])


def _problem_list(problems: Sequence[Problem]) -> str:
    kinds = [(kind, list(group)) for kind, group in groupby(problems, key=lambda problem: problem.kind)]
    examples = _EXAMPLES // max(1, len(kinds))
    lines = []
    for kind, group in kinds:
        effect, description = KINDS[kind]
        count = sum(problem.count for problem in group)
        lines.append(f"{kind} ({effect.value}): {description}: {count:,}")
        for problem in group[:examples]:
            splits = f" [{', '.join(problem.splits)}]" if problem.splits else ""
            lines.append(f"  {problem.file}: {problem.message}{splits}")
        if 0 < examples < len(group):
            lines.append(f"  and {len(group) - examples:,} more (--json lists all)")
    return "\n".join(lines) or "no problems found"


def _verdict(result: CheckResult) -> str:
    if result.exit_code == UNUSABLE:
        return "This dataset cannot be used as it is."
    if result.exit_code == USABLE:
        return "Everything in this dataset can be used."
    dropped = f"{result.affected(Effect.IMAGE_DROPPED):,} images and {result.affected(Effect.BOX_DROPPED):,} boxes"
    usable = f"{result.total.images:,} images, {result.total.boxes:,} boxes"
    return f"Usable: {usable}. Dropped: {dropped}. Clipped: {result.affected(Effect.BOX_CLIPPED):,} boxes."
