"""The result of a check as text for a terminal."""

from collections.abc import Sequence
from itertools import groupby

from aploss.data.check import CheckResult, Finding
from aploss.data.problems import KINDS, Effect
from aploss.data.statistics import SplitStatistics

__all__ = ["check_report"]

_BAR_WIDTH = 30


def check_report(result: CheckResult, *, limit: int = 20) -> str:
    """Counts, histograms and problems.

    Args:
        result: What :func:`aploss.data.check_dataset` found.
        limit: How many problems of a kind to write out; 0 for all.
    """
    head = f"{result.path}: {result.format} dataset, {_count(len(result.class_names), 'class')}"
    parts = [head]
    if result.splits:
        parts += [_counts(result), _histograms(result.total)]
    parts += [_problems(result.findings, limit), _verdict(result)]
    return "\n\n".join(parts)


def _counts(result: CheckResult) -> str:
    """A table with one column a split and one row a class."""
    columns = {**result.splits, "total": result.total} if len(result.splits) > 1 else result.splits
    rows = [
        ["", *columns],
        ["images", *(f"{counts.images:,}" for counts in columns.values())],
        ["without boxes", *(f"{counts.empty_images:,}" for counts in columns.values())],
        ["boxes", *(f"{counts.boxes:,}" for counts in columns.values())],
    ]
    for flag in ("difficult", "crowd"):
        if getattr(result.total, flag):
            rows.append([f"  {flag}", *(f"{getattr(c, flag):,}" for c in columns.values())])
    rows += [
        [f"  {name}", *(f"{c.boxes_of_class.get(name, 0):,}" for c in columns.values())]
        for name in result.class_names
    ]
    sizes = [_size_range(counts) for counts in columns.values()]
    return _table([*rows, ["image size", *sizes]])


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


def _histograms(counts: SplitStatistics) -> str:
    return "\n\n".join(
        [
            _histogram("box size (√area in pixels)", counts.box_sizes),
            _histogram("boxes per image", counts.boxes_per_image),
        ]
    )


def _histogram(title: str, counts: dict[str, int]) -> str:
    """Bars from the first range that is not empty to the last one."""
    filled = [i for i, count in enumerate(counts.values()) if count]
    shown = list(counts.items())[filled[0] : filled[-1] + 1] if filled else []
    most = max((count for _, count in shown), default=1)
    rows = [[f"  {name}", f"{count:,}"] for name, count in shown]
    lines = _table(rows).split("\n") if rows else []
    bars = ["█" * -(-count * _BAR_WIDTH // most) for _, count in shown]
    return "\n".join(
        [title, *(f"{line}  {bar}".rstrip() for line, bar in zip(lines, bars, strict=True))]
    )


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
    if result.exit_code == 2:
        return "This dataset cannot be used as it is."
    dropped_images = result.dropped(Effect.IMAGE_DROPPED)
    dropped_boxes = result.dropped(Effect.BOX_DROPPED)
    clipped = result.dropped(Effect.BOX_CLIPPED)
    if result.exit_code == 0:
        return "Everything in this dataset can be used."
    usable = (
        f"Usable: {_count(result.total.images, 'image')} and {_count(result.total.boxes, 'box')}"
    )
    return (
        f"{usable}. Loading drops {_count(dropped_images, 'image')} and "
        f"{_count(dropped_boxes, 'box')}, and clips {_count(clipped, 'box')}."
    )


def _count(number: int, noun: str) -> str:
    plural = f"{noun}es" if noun.endswith(("x", "s")) else f"{noun}s"
    return f"{number:,} {noun if number == 1 else plural}"
