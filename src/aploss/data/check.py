"""Checks a dataset before training does: statistics, every problem by file, and a report as text."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations, groupby, pairwise
from pathlib import Path

import numpy as np

from aploss.data.annotations import DetectionDataset
from aploss.data.formats import Parts, check_class_names, common_split_name, each_image_once
from aploss.data.images import Inspection
from aploss.data.load import Progress, find_source, inspect_images
from aploss.data.problems import KINDS, Effect, Problem, ProblemError

USABLE, SOMETHING_DROPPED, UNUSABLE = 0, 1, 2
# √area of a box in pixels; 32 and 96 separate COCO's small, medium and large objects.
BOX_SIZE_EDGES = (0, 8, 16, 32, 64, 96, 128, 256, 512)
_SIZE_LIMITS = ("smallest_width", "smallest_height", "largest_width", "largest_height")
_BAR_WIDTH = 30


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
    image_sizes: dict[str, int]  # smallest and largest width and height


def split_statistics(parts: Sequence[DetectionDataset]) -> SplitStatistics:
    """Counts of several datasets together.

    Example:
        >>> dataset = DetectionDataset(
        ...     root=".", class_names=("disc",), image_paths=("a.png", "b.png"),
        ...     image_sizes=[(64, 48), (64, 48)], boxes_per_image=[0, 1],
        ...     boxes=[(0, 0, 9, 16)], labels=[0])
        >>> counts = split_statistics([dataset])
        >>> counts.images, counts.empty_images, counts.boxes_of_class, counts.box_sizes["8-16"]
        (2, 1, {'disc': 1}, 1)
    """
    of_class: Counter[str] = Counter()
    for part in parts:
        counts = np.bincount(part.labels, minlength=part.num_classes)
        of_class.update(dict(zip(part.class_names, counts.tolist(), strict=True)))
    sides = np.concatenate([np.zeros((0, 2)), *(part.annotations.xywh[:, 2:] for part in parts)])
    sizes = np.concatenate([part.image_sizes for part in parts if len(part)] or [np.zeros((1, 2), int)])
    limits = [*sizes.min(axis=0).tolist(), *sizes.max(axis=0).tolist()]
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
        image_sizes=dict(zip(_SIZE_LIMITS, limits, strict=True)),
    )


@dataclass(frozen=True)
class Finding:
    """A problem and the splits it affects; none if it affects the dataset as a whole."""

    problem: Problem
    splits: tuple[str, ...]


@dataclass
class CheckResult:
    """The result of a check."""

    path: str
    format: str  # name of the format, such as "coco"
    class_names: tuple[str, ...]  # the classes of all splits
    splits: dict[str, SplitStatistics]  # the usable splits
    total: SplitStatistics  # all splits together, every image counted once
    findings: list[Finding]

    @property
    def exit_code(self) -> int:
        """0 if nothing is dropped or clipped, 1 if something is, 2 if the dataset or its training split is
        unusable."""
        effects = {finding.problem.effect for finding in self.findings}
        if Effect.REFUSED in effects or not self.total.boxes:
            return UNUSABLE
        unusable = {
            common_split_name(split)
            for finding in self.findings
            if finding.problem.effect is Effect.SPLIT_UNUSABLE
            for split in finding.splits
        }
        usable = set(map(common_split_name, self.splits))
        if any(name.endswith(("train", "trainval")) for name in unusable - usable):
            return UNUSABLE
        return SOMETHING_DROPPED if effects - {Effect.KEPT} else USABLE

    def affected(self, effect: Effect) -> int:
        """The number of images or boxes that an effect concerns."""
        return sum(f.problem.count for f in self.findings if f.problem.effect is effect)

    def to_dict(self) -> dict[str, object]:
        """The whole result, ready for JSON."""
        problems = [
            {**asdict(finding.problem), "effect": finding.problem.effect.value, "splits": list(finding.splits)}
            for finding in self.findings
        ]
        content = {
            **asdict(self),
            "exit_code": self.exit_code,
            "images_dropped": self.affected(Effect.IMAGE_DROPPED),
            "boxes_dropped": self.affected(Effect.BOX_DROPPED),
            "boxes_clipped": self.affected(Effect.BOX_CLIPPED),
            "problems": problems,
        }
        del content["findings"]
        return content


def check_dataset(
    path: str | Path,
    *,
    format: str = "auto",
    class_names: Sequence[str] | None = None,
    decode: bool = True,
    progress: Progress | None = None,
) -> CheckResult:
    """Reads all splits of a dataset and all its images.

    Args:
        path: see :func:`aploss.data.load_dataset`.
        format: see :func:`aploss.data.load_dataset`.
        class_names: the expected classes; others are reported as unknown.
        decode: whether to decode every image, or only read its header, which is fast but finds neither damaged images
            nor copies.
        progress: called with (images done, total).

    Raises:
        DataError: no dataset is found.
    """
    source = find_source(path, format=format)
    names = None if class_names is None else check_class_names(class_names)
    splits_of: dict[Problem, dict[str, None]] = {}  # one finding for a problem that several splits share
    parts: Parts = {}
    for split in source.splits:
        try:
            parts[split] = source.read(split, names)
            problems = parts[split].problems
        except ProblemError as error:
            problems = [error.problem]
        for problem in problems:
            splits_of.setdefault(problem, {})[split] = None
    inspections = _inspect(parts, decode=decode, progress=progress)
    usable = {}
    for split, part in parts.items():
        found = [inspections[path].problem for path in part.image_paths]
        rest = part.subset([index for index, problem in enumerate(found) if problem is None])
        if len(rest):
            usable[split] = rest
        else:
            found.append(Problem("empty-split", split, "no usable image in this split"))
        for problem in filter(None, found):
            splits_of.setdefault(problem, {})[split] = None
    for problem in _problems_across_splits(usable, inspections, source.name):
        splits_of.setdefault(problem, {})
    kinds = list(KINDS)  # most severe first
    return CheckResult(
        path=str(path),
        format=source.format,
        class_names=tuple(dict.fromkeys(name for part in usable.values() for name in part.class_names)),
        splits={split: split_statistics([part]) for split, part in usable.items()},
        total=split_statistics(_distinct(usable)),
        findings=[
            Finding(problem, tuple(splits_of[problem]))
            for problem in sorted(splits_of, key=lambda problem: (kinds.index(problem.kind), problem.file))
        ],
    )


def _distinct(parts: Parts) -> list[DetectionDataset]:
    """The parts without the images of earlier parts."""
    once = list(each_image_once(parts))
    return [part.subset([index for its, index in once if its is part]) for part in parts.values()]


def _inspect(parts: Parts, *, decode: bool, progress: Progress | None) -> dict[str, Inspection]:
    """Image path → inspection; every image is inspected once, however many splits contain it."""
    distinct = _distinct(parts)
    total = sum(map(len, distinct))
    inspections: dict[str, Inspection] = {}
    for part in distinct:
        for path, inspection in zip(part.image_paths, inspect_images(part, decode=decode), strict=True):
            inspections[path] = inspection
            if progress is not None:
                progress(len(inspections), total)
    return inspections


def _problems_across_splits(parts: Parts, inspections: dict[str, Inspection], name: str) -> Iterator[Problem]:
    """Images in several splits, different class lists, no boxes at all."""
    # Copies of an image have the same digest; without decoding, only the same file is found.
    paths = {split: {inspections[p].digest or p: p for p in part.image_paths} for split, part in parts.items()}
    for first, second in combinations(paths, 2):
        small, large = sorted((first, second), key=lambda split: len(paths[split]))
        both = paths[first].keys() & paths[second].keys()
        # Some splits, such as trainval, are meant to contain others.
        if len(both) < len(paths[small]) or common_split_name(large) in ("train", "val", "test"):
            for key in both:
                message = f"in {second}, and in {first} as {paths[first][key]}"
                yield Problem("image-in-two-splits", paths[second][key], message)
    lists = {part.class_names for part in parts.values()}
    if len(lists) > 1:
        shown = " / ".join(sorted(", ".join(names) for names in lists))
        yield Problem("class-lists-differ", name, f"classes of the splits: {shown:.500}")
    if parts and not any(part.num_boxes for part in parts.values()):
        yield Problem("no-boxes", name, "no usable box in any split")


# --- the report as text ---------------------------------------------------------------------------


def check_report(result: CheckResult, *, limit: int = 20) -> str:
    """Statistics, histograms and problems as text, at most ``limit`` problems of each kind; 0 for all."""
    parts = [f"{result.path}: {result.format} dataset, classes: {len(result.class_names)}"]
    if result.splits:
        parts += [_statistics_table(result), _histogram("box size (√area in pixels)", result.total.box_sizes)]
    return "\n\n".join([*parts, _problem_list(result.findings, limit), _verdict(result)])


def _statistics_table(result: CheckResult) -> str:
    """A table with one column per split and one row per class."""
    columns = {**result.splits, "total": result.total} if len(result.splits) > 1 else result.splits
    fields = {"images": "images", "without boxes": "empty_images", "boxes": "boxes"}
    fields |= {"  difficult": "difficult", "  crowd": "crowd"}
    rows = [["", *columns]]
    rows += [[name, *(f"{getattr(c, field):,}" for c in columns.values())] for name, field in fields.items()]
    rows += [
        [f"  {name}", *(f"{c.boxes_of_class.get(name, 0):,}" for c in columns.values())] for name in result.class_names
    ]
    size_range = "{smallest_width}x{smallest_height}-{largest_width}x{largest_height}"
    rows.append(["image size", *(size_range.format(**c.image_sizes) for c in columns.values())])
    return "\n".join(_aligned(rows))


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table, the first column flush left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join([first.ljust(widths[0]), *map(str.rjust, rest, widths[1:])]).rstrip() for first, *rest in rows]


def _histogram(title: str, counts: dict[str, int]) -> str:
    """Bars of the ranges that are not empty."""
    shown = {name: count for name, count in counts.items() if count}
    lines = _aligned([[f"  {name}", f"{count:,}"] for name, count in shown.items()]) if shown else []
    bars = ["█" * -(-count * _BAR_WIDTH // max(shown.values())) for count in shown.values()]
    return "\n".join([title, *(f"{line}  {bar}" for line, bar in zip(lines, bars, strict=True))])


def _problem_list(findings: Sequence[Finding], limit: int) -> str:
    blocks = []
    for kind, group in groupby(findings, key=lambda finding: finding.problem.kind):
        same = list(group)
        effect, description = KINDS[kind]
        lines = [f"{kind} ({effect.value}): {description}: {len(same):,}"]
        for finding in same[: limit or None]:
            splits = f" [{', '.join(finding.splits)}]" if finding.splits else ""
            lines.append(f"  {finding.problem.file}: {finding.problem.message}{splits}")
        if 0 < limit < len(same):
            lines.append(f"  and {len(same) - limit:,} more (--limit 0 shows all)")
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks) or "no problems found"


def _verdict(result: CheckResult) -> str:
    if result.exit_code == UNUSABLE:
        return "This dataset cannot be used as it is."
    if result.exit_code == USABLE:
        return "Everything in this dataset can be used."
    dropped = f"{result.affected(Effect.IMAGE_DROPPED):,} images and {result.affected(Effect.BOX_DROPPED):,} boxes"
    clipped = f"{result.affected(Effect.BOX_CLIPPED):,} boxes"
    return (
        f"Usable: {result.total.images:,} images, {result.total.boxes:,} boxes. Dropped: {dropped}. Clipped: {clipped}."
    )
