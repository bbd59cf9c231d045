"""The page of ``aploss data check``: problems with their pictures, then classes and sizes."""

from collections import Counter
from itertools import groupby, islice
from pathlib import Path

import numpy as np
from PIL import Image

from aploss.data.check import SOMETHING_DROPPED, USABLE, CheckResult
from aploss.data.folder import KINDS, Problem
from aploss.data.images import ImageError, read_image
from aploss.plotting.pictures import crop_around, data_uri, outline_boxes, resize
from aploss.plotting.plots import BLUE, VERMILLION, new_plot
from aploss.reports import page

MAX_ROWS, MAX_PICTURES = 50, 6  # of each kind of problem
TILE = 240  # pixels of a picture's longer side


def write_data_page(result: CheckResult, path: str | Path) -> Path:
    """Writes the result of :func:`aploss.data.check.check_dataset` as a page and returns its path."""
    sections = [page.Section("Result", _result(result)), page.Section("Problems", _problems(result))]
    if result.splits:
        sections.append(page.Section("Classes and sizes", [_sizes(result), _classes(result)]))
    read = "all images decoded" if result.pixels else "only the headers of images read"
    subtitle = f"{result.path}: {result.format} dataset, {read}"
    return page.write_page(path, Path(result.path).resolve().name, sections, subtitle=subtitle)


def _result(result: CheckResult) -> list[page.Block]:
    total = result.total
    counts: Counter[str] = Counter()
    for problem in result.problems:
        counts[problem.kind] += problem.count
    problems = ", ".join(f"{count:,} `{kind}` ({KINDS[kind][0].value})" for kind, count in counts.items())
    usable = result.exit_code in (USABLE, SOMETHING_DROPPED)
    label = f"usable{' with problems' if problems else ''}" if usable else "cannot be used as it is"
    facts = [
        ("Images", f"{total.images:,}", f"{total.empty_images:,} without boxes"),
        ("Boxes", f"{total.boxes:,}", f"{total.boxes / max(1, total.images):.1f} per image"),
        ("Classes", str(len(result.class_names)), ""),
    ]
    names = ("images", "empty_images", "boxes", "difficult", "crowd", "image_sizes")
    keys = [name for name in names if any(getattr(one, name) for one in result.splits.values())]
    rows = [[name, *(getattr(one, key) for key in keys)] for name, one in result.splits.items()]
    table = page.Table(columns=["split", *(key.replace("_", " ") for key in keys)], rows=rows)
    verdict = page.Verdict(False if not usable else None if problems else True, problems or "no problem found", label)
    return [verdict, page.Facts(facts), table]


def _classes(result: CheckResult) -> page.Table:
    counts = result.total.boxes_of_class
    rows = [
        [name, counts.get(name, 0), *(one.boxes_of_class.get(name, 0) for one in result.splits.values())]
        for name in sorted(result.class_names, key=lambda name: -counts.get(name, 0))
    ]
    return page.Table(columns=["class", "boxes", *result.splits], rows=rows, stack=False)


def _sizes(result: CheckResult) -> page.Figures:
    sizes = result.total.box_sizes
    with new_plot("Sizes of boxes", x_label="√area in pixels", y_label="boxes") as plot:
        plot.axes.bar(list(sizes), list(sizes.values()), color=BLUE)
        plot.axes.tick_params(axis="x", labelrotation=45)
    note = "COCO calls objects below 32 small and from 96 large."
    return page.Figures([page.SvgFigure(plot.svg, note, "Number of boxes by size")])


def _problems(result: CheckResult) -> list[page.Block]:
    blocks: list[page.Block] = []
    for kind, group in groupby(result.problems, key=lambda problem: problem.kind):
        problems, (effect, description) = list(group), KINDS[kind]
        count = sum(problem.count for problem in problems)
        blocks.append(page.Text(f"`{kind}`, {count:,} ({effect.value}): {description}."))
        if pictures := list(islice(filter(None, (_picture(result, problem) for problem in problems)), MAX_PICTURES)):
            blocks.append(page.Figures(pictures, 150))
        rows = [[one.file, one.message, ", ".join(one.splits)] for one in problems[:MAX_ROWS]]
        more = f"{len(problems) - MAX_ROWS:,} more are not listed." if len(problems) > MAX_ROWS else ""
        table = page.Table(columns=["file", "problem", "splits"], rows=rows, caption=more)
        blocks.append(page.Section(f"Files ({len(problems):,})", [table]))
    return blocks or [page.Text("None.")]


def _picture(result: CheckResult, problem: Problem) -> page.Picture | None:
    """The surroundings of the box of a problem, or its image; None if it has none, or one that cannot be read."""
    try:
        image = Image.fromarray(read_image(Path(result.root) / problem.image).permute(1, 2, 0).numpy())
    except (ImageError, OSError):
        return None
    picture, corner = (image, (0, 0)) if problem.box is None else crop_around(image, problem.box)
    factor = min(TILE / max(picture.size), 8.0)
    picture = resize(picture, factor)
    if problem.box is not None:
        boxes = (np.array(problem.box) - np.tile(corner, 2)) * factor
        picture = outline_boxes(picture, [boxes], captions=[""], colours=[VERMILLION], dashed=[False])
    caption = Path(problem.image).name if problem.box is not None else f"{problem.image}: {problem.message}"
    return page.Picture(data_uri(picture), caption)
