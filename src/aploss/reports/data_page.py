"""The page of ``aploss data check``: classes, sizes, suspicious boxes with their pictures, copies of images."""

from itertools import groupby, islice
from pathlib import Path

import numpy as np
from PIL import Image

from aploss.data.check import SOMETHING_DROPPED, USABLE, CheckResult, Finding
from aploss.data.folder import KINDS
from aploss.data.images import ImageError, read_image
from aploss.plotting.pictures import crop_around, data_uri, outline_boxes, resize
from aploss.plotting.plots import BLUE, VERMILLION, new_plot
from aploss.reports import page

MAX_ROWS, MAX_PICTURES = 50, 12  # of each kind of problem
MAX_COPIES = 6  # groups of copies with pictures
TILE = 240  # pixels of a picture's longer side


def write_data_page(result: CheckResult, path: str | Path) -> Path:
    """Writes the result of :func:`aploss.data.check.check_dataset` as a page and returns its path."""
    sections = [page.Section("Result", _result(result))]
    if result.splits:
        sections += [page.Section("Classes", _classes(result)), page.Section("Sizes", _sizes(result))]
    sections.append(page.Section("Problems", _problems(result)))
    if result.copies:
        sections.append(page.Section("Copies", _copies(result)))
    subtitle = f"{result.format} dataset, {'images decoded' if result.pixels else 'headers of images read'}"
    return page.write_page(path, result.path, sections, subtitle=subtitle)


def _result(result: CheckResult) -> list[page.Block]:
    total = result.total
    texts = {USABLE: "Everything can be used.", SOMETHING_DROPPED: "Usable; something is dropped or clipped."}
    facts = [
        ("Images", f"{total.images:,}", f"{total.empty_images:,} without boxes"),
        ("Boxes", f"{total.boxes:,}", f"{total.boxes / max(1, total.images):.1f} per image"),
        ("Classes", str(len(result.class_names)), ""),
        ("Problems", f"{sum(finding.problem.count for finding in result.findings):,}", ""),
        ("Copies", f"{sum(len(group) - 1 for group in result.copies):,}", "images"),
    ]
    rows = [
        [name, one.images, one.empty_images, one.boxes, one.difficult, one.crowd, one.image_sizes]
        for name, one in result.splits.items()
    ]
    columns = ["split", "images", "without boxes", "boxes", "difficult", "crowd", "image sizes"]
    verdict = texts.get(result.exit_code, "This dataset cannot be used as it is.")
    return [page.Text(verdict), page.Facts(facts), page.Table(columns=columns, rows=rows)]


def _classes(result: CheckResult) -> list[page.Block]:
    counts = result.total.boxes_of_class
    rows = [
        [name, counts.get(name, 0), *(one.boxes_of_class.get(name, 0) for one in result.splits.values())]
        for name in sorted(result.class_names, key=lambda name: -counts.get(name, 0))
    ]
    return [page.Table(columns=["class", "boxes", *result.splits], rows=rows)]


def _sizes(result: CheckResult) -> list[page.Block]:
    sizes = result.total.box_sizes
    with new_plot("Sizes of boxes", x_label="√area in pixels", y_label="boxes") as plot:
        plot.axes.bar(list(sizes), list(sizes.values()), color=BLUE)
        plot.axes.tick_params(axis="x", labelrotation=45)
    note = "COCO calls objects below 32 small and from 96 large."
    return [page.Figures([page.SvgFigure(plot.svg, note, "Number of boxes by size")])]


def _problems(result: CheckResult) -> list[page.Block]:
    blocks: list[page.Block] = []
    for kind, group in groupby(result.findings, key=lambda finding: finding.problem.kind):
        findings, (effect, description) = list(group), KINDS[kind]
        count = sum(finding.problem.count for finding in findings)
        blocks.append(page.Text(f"`{kind}`: {description}. {count:,}, {effect.value}."))
        if pictures := list(islice(filter(None, (_crop(result, finding) for finding in findings)), MAX_PICTURES)):
            blocks.append(page.Figures(pictures, 150))
        rows = [[one.problem.file, one.problem.message, ", ".join(one.splits)] for one in findings[:MAX_ROWS]]
        more = f"{len(findings) - MAX_ROWS:,} more are not listed." if len(findings) > MAX_ROWS else ""
        table = page.Table(columns=["file", "problem", "splits"], rows=rows, caption=more)
        blocks.append(page.Section(f"Files ({len(findings):,})", [table]))
    return blocks or [page.Text("None.")]


def _crop(result: CheckResult, finding: Finding) -> page.Picture | None:
    """The surroundings of the box of a problem; None if it has none, or the image cannot be read."""
    problem = finding.problem
    image = _open(result, problem.image) if problem.box is not None else None
    if image is None or problem.box is None:
        return None
    picture, corner = crop_around(image, problem.box)
    factor = min(TILE / max(picture.size), 8.0)
    boxes = (np.array(problem.box) - np.tile(corner, 2)) * factor
    picture = outline_boxes(resize(picture, factor), [boxes], captions=[""], colours=[VERMILLION], dashed=[False])
    return page.Picture(data_uri(picture), Path(problem.image).name)


def _copies(result: CheckResult) -> list[page.Block]:
    pictures = []
    for group in result.copies[:MAX_COPIES]:
        if (image := _open(result, group[0])) is not None:
            pictures.append(page.Picture(data_uri(resize(image, TILE / max(image.size))), " = ".join(group)))
    rows = [[first, ", ".join(others)] for first, *others in result.copies[:MAX_ROWS]]
    return [page.Figures(pictures, 150), page.Table(columns=["image", "copies"], rows=rows)]


def _open(result: CheckResult, name: str) -> Image.Image | None:
    try:
        return Image.fromarray(read_image(Path(result.root) / name).permute(1, 2, 0).numpy())
    except (ImageError, OSError):
        return None
