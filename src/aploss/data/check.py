"""Checks a dataset before training does: statistics, every problem by file, and a report as text."""

import re
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
_OBJECT_EDGES = (0, 1, 2, 3, 5, 9, 17, 33, 65, 129)
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
    boxes_per_image: dict[str, int]  # range of numbers of boxes ("3-4") → number of images
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
        counts = np.bincount(part.annotations.category_ids - 1, minlength=part.num_classes)
        of_class.update(dict(zip(part.class_names, counts.tolist(), strict=True)))
    sides = np.concatenate([np.zeros((0, 2)), *(part.annotations.xywh[:, 2:] for part in parts)])
    per_image = np.concatenate([np.zeros(0, int), *(part.boxes_per_image() for part in parts)])
    sizes = [part.image_size(i) for part in parts for i in range(len(part))] or [(0, 0)]
    return SplitStatistics(
        images=len(per_image),
        empty_images=int((per_image == 0).sum()),
        boxes=len(sides),
        difficult=sum(int(part.annotations.difficult.sum()) for part in parts),
        crowd=sum(int(part.annotations.crowd.sum()) for part in parts),
        boxes_of_class=dict(of_class),
        box_sizes=_histogram_counts(np.sqrt(sides.prod(axis=1)), BOX_SIZE_EDGES, integers=False),
        boxes_per_image=_histogram_counts(per_image, _OBJECT_EDGES, integers=True),
        image_sizes={
            f"{which}_{side}": function(values)
            for which, function in (("smallest", min), ("largest", max))
            for side, values in zip(("width", "height"), zip(*sizes, strict=True), strict=True)
        },
    )


def _histogram_counts(values: np.ndarray, edges: Sequence[int], *, integers: bool) -> dict[str, int]:
    """The number of values in each range: "8-16", for integers also "1" and "3-4", and "512+"."""
    counts, _ = np.histogram(values, [*edges, np.inf])
    ranges = ((start, stop - integers) for start, stop in pairwise(edges))
    names = [str(start) if start == last else f"{start}-{last}" for start, last in ranges]
    return dict(zip([*names, f"{edges[-1]}+"], counts.tolist(), strict=True))


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

    def dropped(self, effect: Effect) -> int:
        """The number of images or boxes that an effect concerns."""
        return sum(f.problem.count for f in self.findings if f.problem.effect is effect)

    def to_dict(self) -> dict[str, object]:
        """The whole result, ready for JSON."""
        return {
            "path": self.path,
            "format": self.format,
            "exit_code": self.exit_code,
            "class_names": list(self.class_names),
            "splits": {name: asdict(counts) for name, counts in self.splits.items()},
            "total": asdict(self.total),
            "images_dropped": self.dropped(Effect.IMAGE_DROPPED),
            "boxes_dropped": self.dropped(Effect.BOX_DROPPED),
            "boxes_clipped": self.dropped(Effect.BOX_CLIPPED),
            "problems": [
                {**asdict(finding.problem), "effect": finding.problem.effect.value, "splits": list(finding.splits)}
                for finding in self.findings
            ],
        }


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
        decode: whether to decode every image, or only read its header, which is fast but finds neither damaged nor
            duplicate images.
        progress: called with (images done, total).

    Raises:
        DataError: no dataset is found.
    """
    source = find_source(path, format=format)
    names = None if class_names is None else check_class_names(class_names)
    splits_of: dict[Problem, list[str]] = {}  # one finding for a problem that several splits share
    parts: Parts = {}
    for split in source.splits:
        try:
            parts[split] = source.read(split, names)
            problems = parts[split].problems
        except ProblemError as error:
            problems = [error.problem]
        for problem in dict.fromkeys(problems):
            splits_of.setdefault(problem, []).append(split)
    inspections = _inspect(parts, decode=decode, progress=progress)
    usable = {}
    for split, part in parts.items():
        inspected = [inspections[part.relative_path(i)] for i in range(len(part))]
        rest = part.subset([i for i, one in enumerate(inspected) if one.usable])
        found = dict.fromkeys(problem for one in inspected for problem in one.problems)
        if len(rest):
            usable[split] = rest
        else:
            found[Problem("empty-split", split, "no usable image in this split")] = None
        for problem in found:
            splits_of.setdefault(problem, []).append(split)
    for problem in [*source.leftovers(), *_problems_across_splits(usable, inspections, source.name)]:
        splits_of.setdefault(problem, [])
    order = list(Effect)
    problems = sorted(splits_of, key=lambda p: (order.index(p.effect), p.kind, p.file))
    return CheckResult(
        path=str(path),
        format=source.format,
        class_names=tuple(dict.fromkeys(name for part in usable.values() for name in part.class_names)),
        splits={split: split_statistics([part]) for split, part in usable.items()},
        total=split_statistics(_each_image_once(usable)),
        findings=[Finding(problem, tuple(splits_of[problem])) for problem in problems],
    )


def _inspect(parts: Parts, *, decode: bool, progress: Progress | None) -> dict[str, Inspection]:
    """Inspects every image once, however many splits contain it."""
    distinct = _each_image_once(parts)
    total = sum(map(len, distinct))
    inspections: dict[str, Inspection] = {}
    for part in distinct:
        for index, result in enumerate(inspect_images(part, decode=decode)):
            inspections[part.relative_path(index)] = result
            if progress is not None:
                progress(len(inspections), total)
    return inspections


def _each_image_once(parts: Parts) -> list[DetectionDataset]:
    """The parts without the images of earlier parts."""
    once = list(each_image_once(parts))
    return [part.subset([index for its, index in once if its is part]) for part in parts.values()]


def _problems_across_splits(parts: Parts, inspections: dict[str, Inspection], name: str) -> Iterator[Problem]:
    """Problems of all splits together: leaks, duplicate files, class lists."""
    if not parts:
        return
    paths = {split: {p.relative_path(i) for i in range(len(p))} for split, p in parts.items()}
    for first, second in combinations(paths, 2):
        small, large = sorted((first, second), key=lambda split: len(paths[split]))
        both = paths[first] & paths[second]
        # Some splits, such as trainval, are meant to contain others.
        if len(both) < len(paths[small]) or common_split_name(large) in ("train", "val", "test"):
            yield from (Problem("image-in-two-splits", path, f"in {first} and {second}") for path in sorted(both))
    first_of: dict[str, str] = {}
    for path in sorted(set().union(*paths.values())):
        digest = inspections[path].digest
        if digest and (original := first_of.setdefault(digest, path)) != path:
            where = "; ".join(", ".join(split for split in paths if one in paths[split]) for one in (path, original))
            yield Problem("same-content", path, f"the same bytes as {original} (splits: {where})")
    lists = {part.class_names for part in parts.values()}
    if len(lists) > 1:
        shown = " / ".join(sorted(", ".join(names) for names in lists))
        yield Problem("class-lists-differ", name, f"classes of the splits: {shown:.500}")
    yield from _class_problems(parts, name)


def _class_problems(parts: Parts, name: str) -> Iterator[Problem]:
    """Unused classes, and classes that are probably one spelt in two ways."""
    boxes = split_statistics(list(parts.values())).boxes_of_class
    if not sum(boxes.values()):
        yield Problem("no-boxes", name, "no usable box in any split")
        return
    by_plain_name: dict[str, list[str]] = {}
    for class_name, count in boxes.items():
        if not count:
            yield Problem("class-without-boxes", name, f"no box of class {class_name!r}")
        plain = re.sub(r"[\W_]+", "", class_name.casefold()) or class_name
        by_plain_name.setdefault(plain, []).append(class_name)
    for similar in by_plain_name.values():
        for first, second in combinations(similar, 2):
            message = f"{first!r} ({boxes[first]} boxes) and {second!r} ({boxes[second]} boxes)"
            yield Problem("similar-class-names", name, message)


# --- the report as text ---------------------------------------------------------------------------


def check_report(result: CheckResult, *, limit: int = 20) -> str:
    """Statistics, histograms and problems as text, at most ``limit`` problems of each kind; 0 for all."""
    parts = [f"{result.path}: {result.format} dataset, {_count(len(result.class_names), 'class')}"]
    if result.splits:
        parts += [
            _statistics_table(result),
            _histogram("box size (√area in pixels)", result.total.box_sizes),
            _histogram("boxes per image", result.total.boxes_per_image),
        ]
    return "\n\n".join([*parts, _problem_list(result.findings, limit), _verdict(result)])


def _statistics_table(result: CheckResult) -> str:
    """A table with one column per split and one row per class."""
    columns = {**result.splits, "total": result.total} if len(result.splits) > 1 else result.splits
    fields = {"images": "images", "without boxes": "empty_images", "boxes": "boxes"}
    fields |= {f"  {flag}": flag for flag in ("difficult", "crowd") if getattr(result.total, flag)}
    rows = [["", *columns]]
    rows += [[name, *(f"{getattr(c, field):,}" for c in columns.values())] for name, field in fields.items()]
    rows += [
        [f"  {name}", *(f"{c.boxes_of_class.get(name, 0):,}" for c in columns.values())] for name in result.class_names
    ]
    return _table([*rows, ["image size", *map(_size_range, columns.values())]])


def _size_range(counts: SplitStatistics) -> str:
    small, large = (
        f"{counts.image_sizes[f'{which}_width']}x{counts.image_sizes[f'{which}_height']}"
        for which in ("smallest", "largest")
    )
    return small if small == large else f"{small}-{large}"


def _table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *rest in rows:
        cells = [cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *cells]).rstrip())
    return "\n".join(lines)


def _histogram(title: str, counts: dict[str, int]) -> str:
    """Bars from the first to the last range that is not empty."""
    filled = [i for i, count in enumerate(counts.values()) if count]
    shown = list(counts.items())[filled[0] : filled[-1] + 1] if filled else []
    most = max((count for _, count in shown), default=1)
    lines = _table([[f"  {name}", f"{count:,}"] for name, count in shown]).split("\n") if shown else []
    bars = ["█" * -(-count * _BAR_WIDTH // most) for _, count in shown]
    return "\n".join([title, *(f"{line}  {bar}".rstrip() for line, bar in zip(lines, bars, strict=True))])


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
    images, boxes = _count(result.total.images, "image"), _count(result.total.boxes, "box")
    dropped_images = _count(result.dropped(Effect.IMAGE_DROPPED), "image")
    dropped_boxes = _count(result.dropped(Effect.BOX_DROPPED), "box")
    clipped = _count(result.dropped(Effect.BOX_CLIPPED), "box")
    return f"Usable: {images} and {boxes}. Loading drops {dropped_images} and {dropped_boxes}, and clips {clipped}."


def _count(number: int, noun: str) -> str:
    plural = f"{noun}es" if noun.endswith(("x", "s")) else f"{noun}s"
    return f"{number:,} {noun if number == 1 else plural}"
