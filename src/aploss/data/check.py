"""Counts a dataset and finds what is wrong with it, before training does; and says it in words."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import combinations, groupby, pairwise
from pathlib import Path

import numpy as np

from aploss.data.annotations import DetectionDataset
from aploss.data.formats import Parts, check_class_names, common_split_name, each_image_once
from aploss.data.images import Inspection
from aploss.data.load import Progress, find_source, inspect_images
from aploss.data.problems import KINDS, Effect, Problem, ProblemError

USABLE, SOMETHING_DROPPED, UNUSABLE = 0, 1, 2
# Side of the square of a box's area, in pixels; 32 and 96 are COCO's small and large.
BOX_SIZE_EDGES = (0, 8, 16, 32, 64, 96, 128, 256, 512)
_OBJECT_EDGES = (0, 1, 2, 3, 5, 9, 17, 33, 65, 129)
_BAR_WIDTH = 30


# --- counts ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SplitStatistics:
    """What is usable in a split."""

    images: int  # number of images
    empty_images: int  # how many of them have no box
    boxes: int  # number of boxes
    difficult: int  # how many boxes are marked difficult
    crowd: int  # how many boxes mark a crowd
    boxes_of_class: dict[str, int]  # class name → number of boxes
    box_sizes: dict[str, int]  # range of √area in pixels ("8-16") → number of boxes
    boxes_per_image: dict[str, int]  # range of numbers of boxes ("3-4") → number of images
    image_sizes: dict[str, int]  # smallest and largest width and height


def split_statistics(parts: Sequence[DetectionDataset]) -> SplitStatistics:
    """Counts datasets together.

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
    boxes = np.concatenate([np.zeros((0, 4)), *(part.annotations.boxes for part in parts)])
    sides = np.sqrt(np.prod(boxes[:, 2:] - boxes[:, :2], axis=1))
    per_image = np.concatenate([np.zeros(0, int), *(part.boxes_per_image() for part in parts)])
    sizes = [part.image_size(i) for part in parts for i in range(len(part))] or [(0, 0)]
    return SplitStatistics(
        images=len(per_image),
        empty_images=int((per_image == 0).sum()),
        boxes=len(boxes),
        difficult=sum(int(part.annotations.difficult.sum()) for part in parts),
        crowd=sum(int(part.annotations.crowd.sum()) for part in parts),
        boxes_of_class=dict(of_class),
        box_sizes=_counts_by_range(sides, BOX_SIZE_EDGES, whole=False),
        boxes_per_image=_counts_by_range(per_image, _OBJECT_EDGES, whole=True),
        image_sizes={
            f"{which}_{side}": function(values)
            for which, function in (("smallest", min), ("largest", max))
            for side, values in zip(("width", "height"), zip(*sizes, strict=True), strict=True)
        },
    )


def _counts_by_range(values: np.ndarray, edges: Sequence[int], *, whole: bool) -> dict[str, int]:
    """How many values are in each range: "8-16", and of whole numbers also "1", "3-4"; at last "512+"."""
    counts, _ = np.histogram(values, [*edges, np.inf])
    ranges = ((start, stop - whole) for start, stop in pairwise(edges))
    names = [str(start) if start == last else f"{start}-{last}" for start, last in ranges]
    return dict(zip([*names, f"{edges[-1]}+"], counts.tolist(), strict=True))


# --- the check ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Finding:
    """A problem and the splits it concerns; none where it concerns the dataset as a whole."""

    problem: Problem
    splits: tuple[str, ...]


@dataclass
class CheckResult:
    """What a check found."""

    path: str  # the dataset
    format: str  # its name, such as "coco"
    class_names: tuple[str, ...]  # the classes of all splits
    splits: dict[str, SplitStatistics]  # counts of what is usable in each split that can be used
    total: SplitStatistics  # the same for all splits together, every image once
    findings: list[Finding] = field(default_factory=list)  # every problem

    @property
    def exit_code(self) -> int:
        """0 when nothing would be dropped or clipped, 1 when something would, 2 when the dataset cannot be used, or its
        training split."""
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
        """How many images or boxes a kind of effect concerns."""
        return sum(f.problem.count for f in self.findings if f.problem.effect is effect)

    def to_dict(self) -> dict[str, object]:
        """Everything, ready for JSON."""
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
        class_names: the classes there should be; others are reported as unknown.
        decode: whether to decode every image, or to read the headers alone (fast, but does not find damaged or equal
            images).
        progress: called with (images done, images in all).

    Raises:
        DataError: there is no dataset to check.
    """
    source = find_source(path, format=format)
    names = None if class_names is None else check_class_names(class_names)
    findings = _Findings()
    parts: Parts = {}
    for split in source.splits:
        try:
            parts[split] = source.read(split, names)
            findings.add(parts[split].problems, split)
        except ProblemError as error:
            findings.add([error.problem], split)
    inspections = _inspect(parts, decode=decode, progress=progress)
    parts = _usable_parts(parts, inspections, findings)
    findings.add(source.leftovers())
    findings.add(_across_splits(parts, inspections, source.name))
    all_names = dict.fromkeys(name for part in parts.values() for name in part.class_names)
    return CheckResult(
        path=str(path),
        format=source.format,
        class_names=tuple(all_names),
        splits={split: split_statistics([part]) for split, part in parts.items()},
        total=split_statistics(_each_image_once(parts)),
        findings=findings.sorted(),
    )


class _Findings:
    """Collects problems; one that several splits share is one finding."""

    def __init__(self) -> None:
        self._splits_of: dict[Problem, list[str]] = {}

    def add(self, problems: Iterable[Problem], split: str | None = None) -> None:
        for problem in problems:
            splits = self._splits_of.setdefault(problem, [])
            if split is not None and split not in splits:
                splits.append(split)

    def sorted(self) -> list[Finding]:
        """The worst first, then by kind and file."""
        order = list(Effect)
        problems = sorted(self._splits_of, key=lambda p: (order.index(p.effect), p.kind, p.file))
        return [Finding(problem, tuple(self._splits_of[problem])) for problem in problems]


def _usable_parts(parts: Parts, inspections: dict[str, Inspection], findings: _Findings) -> Parts:
    """The splits without unusable images, without those that become empty by that."""
    usable = {}
    for split, part in parts.items():
        inspected = [inspections[part.relative_path(i)] for i in range(len(part))]
        findings.add((p for inspection in inspected for p in inspection.problems), split)
        rest = part.subset([i for i, one in enumerate(inspected) if one.usable])
        if len(rest):
            usable[split] = rest
        else:
            findings.add([Problem("empty-split", split, "no usable image in this split")], split)
    return usable


def _inspect(parts: Parts, *, decode: bool, progress: Progress | None) -> dict[str, Inspection]:
    """Inspects every image once, however many splits it is in."""
    fresh = _each_image_once(parts)
    total = sum(map(len, fresh))
    inspections: dict[str, Inspection] = {}
    for part in fresh:
        before = len(inspections)

        def report(done: int, _: int, before: int = before) -> None:
            if progress is not None:
                progress(before + done, total)

        results = inspect_images(part, decode=decode, progress=report)
        inspections |= {part.relative_path(index): result for index, result in enumerate(results)}
    return inspections


def _each_image_once(parts: Parts) -> list[DetectionDataset]:
    """The parts without the images that an earlier part has."""
    once = list(each_image_once(parts))
    return [part.subset([index for its, index in once if its is part]) for part in parts.values()]


def _across_splits(parts: Parts, inspections: dict[str, Inspection], name: str) -> Iterator[Problem]:
    """What shows only when all splits are seen together."""
    if not parts:
        return
    paths = {split: {p.relative_path(i) for i in range(len(p))} for split, p in parts.items()}
    yield from _leaks(paths)
    yield from _same_contents(paths, inspections)
    lists = {part.class_names for part in parts.values()}
    if len(lists) > 1:
        shown = " / ".join(sorted(", ".join(names) for names in lists))
        yield Problem("class-lists-differ", name, f"classes of the splits: {shown:.500}")
    yield from _classes(parts, name)


def _leaks(paths: dict[str, set[str]]) -> Iterator[Problem]:
    """Images in two splits, but for the splits that are meant to contain others (trainval)."""
    for first, second in combinations(paths, 2):
        small, large = sorted((first, second), key=lambda split: len(paths[split]))
        both = paths[first] & paths[second]
        contained = len(both) == len(paths[small])
        if contained and common_split_name(large) not in ("train", "val", "test"):
            continue
        for path in sorted(both):
            yield Problem("image-in-two-splits", path, f"in {first} and {second}")


def _same_contents(paths: dict[str, set[str]], inspections: dict[str, Inspection]) -> Iterator[Problem]:
    """Different files with the same bytes: the same image under two names."""
    first_of: dict[str, str] = {}
    for path in sorted(set().union(*paths.values())):
        digest = inspections[path].digest
        if digest and (first := first_of.setdefault(digest, path)) != path:
            where = "; ".join(", ".join(split for split in paths if one in paths[split]) for one in (path, first))
            yield Problem("same-content", path, f"the same bytes as {first} (splits: {where})")


def _classes(parts: Parts, name: str) -> Iterator[Problem]:
    """Classes that are never used, or are probably one class spelt in two ways."""
    example: dict[str, str] = {}
    images: Counter[str] = Counter()
    for part in parts.values():
        for index in range(len(part)):
            used = [part.class_names[label] for label in set(part.labels(index).tolist())]
            images.update(used)
            for class_name in used:
                example.setdefault(class_name, part.relative_path(index))
    if not example:
        yield Problem("no-boxes", name, "no usable box in any split")
        return
    names = list(dict.fromkeys(n for part in parts.values() for n in part.class_names))
    by_plain_name: dict[str, list[str]] = {}
    for class_name in names:
        if class_name not in example:
            yield Problem("class-without-boxes", name, f"no box of class {class_name!r}")
        plain = re.sub(r"[\W_]+", "", class_name.casefold()) or class_name
        by_plain_name.setdefault(plain, []).append(class_name)
    for alike in by_plain_name.values():
        for first, second in combinations(alike, 2):
            rare = min(first, second, key=lambda class_name: images[class_name])
            message = f"{first!r} ({images[first]} images) and {second!r} ({images[second]} images)"
            yield Problem("similar-class-names", example.get(rare, name), message)


# --- in words -------------------------------------------------------------------------------------


def check_report(result: CheckResult, *, limit: int = 20) -> str:
    """Counts, histograms and problems in words, ``limit`` of each kind; 0 for all."""
    parts = [f"{result.path}: {result.format} dataset, {_count(len(result.class_names), 'class')}"]
    if result.splits:
        parts += [
            _count_table(result),
            _histogram("box size (√area in pixels)", result.total.box_sizes),
            _histogram("boxes per image", result.total.boxes_per_image),
        ]
    return "\n\n".join([*parts, _problems(result.findings, limit), _verdict(result)])


def _count_table(result: CheckResult) -> str:
    """A table with one column a split and one row a class."""
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
    sizes = counts.image_sizes
    small = f"{sizes['smallest_width']}x{sizes['smallest_height']}"
    large = f"{sizes['largest_width']}x{sizes['largest_height']}"
    return small if small == large else f"{small}-{large}"


def _table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *rest in rows:
        cells = [cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *cells]).rstrip())
    return "\n".join(lines)


def _histogram(title: str, counts: dict[str, int]) -> str:
    """Bars from the first range that is not empty to the last one."""
    filled = [i for i, count in enumerate(counts.values()) if count]
    shown = list(counts.items())[filled[0] : filled[-1] + 1] if filled else []
    most = max((count for _, count in shown), default=1)
    rows = [[f"  {name}", f"{count:,}"] for name, count in shown]
    lines = _table(rows).split("\n") if rows else []
    bars = ["█" * -(-count * _BAR_WIDTH // most) for _, count in shown]
    return "\n".join([title, *(f"{line}  {bar}".rstrip() for line, bar in zip(lines, bars, strict=True))])


def _problems(findings: Sequence[Finding], limit: int) -> str:
    if not findings:
        return "no problems found"
    blocks = []
    for kind, group in groupby(findings, key=lambda finding: finding.problem.kind):
        same = list(group)
        effect, description = KINDS[kind]
        lines = [f"{kind} ({effect.value}): {description}: {len(same):,}"]
        shown = same[:limit] if limit else same
        for finding in shown:
            splits = f" [{', '.join(finding.splits)}]" if finding.splits else ""
            lines.append(f"  {finding.problem.file}: {finding.problem.message}{splits}")
        if len(shown) < len(same):
            lines.append(f"  and {len(same) - len(shown):,} more (--limit 0 shows all)")
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


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
