"""Counts a dataset and finds what is wrong with it, before training does."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from operator import attrgetter
from pathlib import Path

from aploss.data.dataset import DetectionDataset
from aploss.data.load import find_source
from aploss.data.problems import Effect, Problem, ProblemError
from aploss.data.source import check_class_names, common_split_name
from aploss.data.statistics import SplitStatistics, split_statistics
from aploss.data.verify import Inspection, Progress, inspect_images

__all__ = ["CheckResult", "Finding", "check_dataset"]

USABLE, SOMETHING_DROPPED, UNUSABLE = 0, 1, 2


@dataclass(frozen=True)
class Finding:
    """A problem and the splits it concerns; none where it concerns the dataset as a whole."""

    problem: Problem
    splits: tuple[str, ...]


@dataclass
class CheckResult:
    """What a check found.

    Attributes:
        path: The dataset.
        format: "voc", "coco" or "yolo".
        class_names: The classes of all splits.
        splits: Counts of what is usable in each split that can be used.
        total: The same for all splits together, every image once.
        findings: Every problem.
        exit_code: 0 when nothing would be dropped or clipped, 1 when something would, 2 when the
            dataset, or its training split, cannot be used.
    """

    path: str
    format: str
    class_names: tuple[str, ...]
    splits: dict[str, SplitStatistics]
    total: SplitStatistics
    findings: list[Finding] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        """See the class."""
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
            "splits": {name: counts.to_dict() for name, counts in self.splits.items()},
            "total": self.total.to_dict(),
            "images_dropped": self.dropped(Effect.IMAGE_DROPPED),
            "boxes_dropped": self.dropped(Effect.BOX_DROPPED),
            "boxes_clipped": self.dropped(Effect.BOX_CLIPPED),
            "problems": [
                {
                    "kind": finding.problem.kind,
                    "effect": finding.problem.effect.value,
                    "file": finding.problem.file,
                    "message": finding.problem.message,
                    "count": finding.problem.count,
                    "splits": list(finding.splits),
                }
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
        path: See :func:`aploss.data.load_dataset`.
        format: See :func:`aploss.data.load_dataset`.
        class_names: The classes there should be; others are reported as unknown.
        decode: Whether to decode every image, or to read the headers alone (fast, but does not
            find damaged or equal images).
        progress: Called with (images done, images in all).

    Raises:
        DataError: There is no dataset to check.
    """
    source = find_source(path, format=format)
    names = None if class_names is None else check_class_names(class_names)
    findings = _Findings()
    parts: dict[str, DetectionDataset] = {}
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
        findings = [Finding(problem, tuple(splits)) for problem, splits in self._splits_of.items()]
        key = attrgetter("kind", "file")
        return sorted(findings, key=lambda f: (order.index(f.problem.effect), *key(f.problem)))


def _usable_parts(
    parts: dict[str, DetectionDataset],
    inspections: dict[str, Inspection],
    findings: _Findings,
) -> dict[str, DetectionDataset]:
    """The splits without unusable images, without those that become empty by that."""
    usable = {}
    for split, part in parts.items():
        inspected = [inspections[part.relative_path(i)] for i in range(len(part))]
        findings.add((p for inspection in inspected for p in inspection.problems), split)
        rest = part.subset([i for i, one in enumerate(inspected) if one.usable])
        if len(rest):
            usable[split] = rest
        else:
            message = "no usable image in this split"
            findings.add([Problem("empty-split", split, message)], split)
    return usable


def _inspect(
    parts: dict[str, DetectionDataset], *, decode: bool, progress: Progress | None
) -> dict[str, Inspection]:
    """Inspects every image once, however many splits it is in."""
    fresh = _each_image_once(parts)
    total = sum(map(len, fresh))
    inspections: dict[str, Inspection] = {}
    for part in fresh:
        before = len(inspections)

        def report(done: int, _: int, before: int = before) -> None:
            if progress is not None:
                progress(before + done, total)

        for index, result in enumerate(inspect_images(part, decode=decode, progress=report)):
            inspections[part.relative_path(index)] = result
    return inspections


def _each_image_once(parts: dict[str, DetectionDataset]) -> list[DetectionDataset]:
    """The parts without the images that an earlier part has."""
    seen: set[str] = set()
    fresh = []
    for part in parts.values():
        new = [i for i in range(len(part)) if part.relative_path(i) not in seen]
        seen.update(part.relative_path(i) for i in new)
        fresh.append(part.subset(new))
    return fresh


def _across_splits(
    parts: dict[str, DetectionDataset], inspections: dict[str, Inspection], name: str
) -> Iterator[Problem]:
    """What shows only when all splits are seen together."""
    if not parts:
        return
    paths = {split: {p.relative_path(i) for i in range(len(p))} for split, p in parts.items()}
    yield from _leaks(paths)
    yield from _same_contents(paths, inspections)
    lists = {part.class_names for part in parts.values()}
    if len(lists) > 1:
        shown = " / ".join(sorted(", ".join(names) for names in lists))
        yield Problem("class-lists-differ", name, f"classes of the splits: {shown}")
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


def _same_contents(
    paths: dict[str, set[str]], inspections: dict[str, Inspection]
) -> Iterator[Problem]:
    """Different files with the same bytes: the same image under two names."""
    by_digest: dict[str, list[str]] = {}
    for path in sorted(set().union(*paths.values())):
        if digest := inspections[path].digest:
            by_digest.setdefault(digest, []).append(path)
    for same in by_digest.values():
        splits = {path: [s for s in paths if path in paths[s]] for path in same}
        for path in same[1:]:
            where = f"{', '.join(splits[path])}; {', '.join(splits[same[0]])}"
            yield Problem("same-content", path, f"the same bytes as {same[0]} (splits: {where})")


def _classes(parts: dict[str, DetectionDataset], name: str) -> Iterator[Problem]:
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
    for unused in (class_name for class_name in names if class_name not in example):
        yield Problem("class-without-boxes", name, f"no box of class {unused!r}")
    for first, second in combinations(names, 2):
        if _plain(first) == _plain(second):
            rare = min(first, second, key=lambda class_name: images[class_name])
            message = f"{first!r} ({images[first]} images) and {second!r} ({images[second]} images)"
            yield Problem("similar-class-names", example.get(rare, name), message)


def _plain(name: str) -> str:
    return re.sub(r"[\W_]+", "", name.casefold()) or name
