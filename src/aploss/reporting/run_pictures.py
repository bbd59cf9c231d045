"""The pictures of a run's page: a fair sample, the misses, and the false alarms."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from PIL import Image

from aploss.reporting.blocks import Picture, Pictures
from aploss.reporting.pictures import crop_around, data_uri
from aploss.reporting.run_files import RunFiles
from aploss.reporting.run_images import PictureSource, overlaps, xyxy
from aploss.reporting.style import loss_label

__all__ = ["false_alarms", "gallery", "misses", "side_by_side"]

MOST_PER_IMAGE = 2
TOUCHES, MATCHES = 0.1, 0.5  # IoU from which a box is near another, and from which it finds it


def gallery(source: PictureSource, count: int = 12) -> list[Picture]:
    """Images evenly spaced through the split, not chosen by how well they came out."""
    pictures = []
    for image_id in _evenly(source, count):
        image = source.open(image_id)
        if image is None:
            continue
        rows = source.shown(image_id)
        objects = len(source.objects_of.get(image_id, []))
        caption = f"{source.file_name(image_id)}: {_counted(objects, 'object')}, "
        caption += _counted(len(rows), "detection")
        if source.outcomes is not None:
            caption += f", {sum(source.outcomes[row] == 0 for row in rows)} wrong"
        pictures.append(_picture(source.draw(image, image_id, rows=rows), caption))
    return pictures


def side_by_side(runs: Mapping[str, RunFiles], count: int = 6) -> Pictures:
    """The same images as detected by several runs, a row for each image, as in Figure 5.

    Args:
        runs: name → run of the same split; the name of a loss is written out.
        count: images, evenly spaced through the split.

    Returns:
        Pictures in as many columns as there are runs.
    """
    sources = {name: PictureSource(run) for name, run in runs.items()}
    pictures = []
    for image_id in _evenly(next(iter(sources.values())), count):
        images = [source.open(image_id) for source in sources.values()]
        for (name, source), image in zip(sources.items(), images, strict=True):
            if all(images) and image is not None:  # a row has a picture of every run, or is none
                drawn = source.draw(image, image_id, rows=source.shown(image_id))
                caption = f"{loss_label(name)}: {source.file_name(image_id)}"
                pictures.append(_picture(drawn, caption))
    return Pictures(pictures, columns=len(sources))


def misses(source: PictureSource, count: int = 12) -> list[Picture]:
    """Objects no drawn detection found: first those without any detection, the largest first."""
    found_by = source.run.matches.get("ground_truth", {})
    threshold = source.run.threshold
    missed: list[tuple[float, float, int]] = []
    for place, entry in enumerate(source.objects):
        if entry.get("iscrowd") or entry.get("difficult"):
            continue
        row = found_by.get(str(entry["id"]))
        score = -1.0 if row is None else float(source.scores[row])
        if score < threshold:
            missed.append((score, -float(entry["bbox"][2]) * float(entry["bbox"][3]), place))
    pictures = []
    for score, _, place in _spread(sorted(missed), source.objects):
        entry = source.objects[place]
        note = "no detection at all" if score < 0 else f"found only with score {score:.3f}"
        caption = f"{source.class_name(entry)}, {note}: {source.file_name(entry['image_id'])}"
        shown = source.shown(entry["image_id"])
        shares = overlaps(entry, [source.run.detections[row] for row in shown])
        near = [shown[k] for k in np.flatnonzero(shares >= TOUCHES)]
        texts = {place: f"missed: {source.class_name(entry)}"}
        picture = _crop(source, entry, caption, rows=near[-3:], named=texts)
        pictures.extend([picture] if picture else [])
        if len(pictures) == count:
            break
    return pictures


def false_alarms(source: PictureSource, count: int = 12) -> list[Picture]:
    """The wrong detections with the highest scores."""
    if source.outcomes is None:
        return []
    wrong = np.flatnonzero(source.outcomes == 0)
    order = wrong[np.argsort(-source.scores[wrong], kind="stable")]
    ranked = [(0.0, 0.0, int(row)) for row in order[: 20 * count]]
    pictures = []
    for _, _, row in _spread(ranked, source.run.detections):
        entry = source.run.detections[row]
        caption = f"{source.caption(row)}, {_reason(source, entry)}: "
        caption += source.file_name(entry["image_id"])
        picture = _crop(source, entry, caption, rows=[row])
        pictures.extend([picture] if picture else [])
        if len(pictures) == count:
            break
    return pictures


def _reason(source: PictureSource, entry: Mapping[str, Any]) -> str:
    """Why a detection is wrong, from the object it overlaps most."""
    objects = [source.objects[place] for place in source.objects_of.get(entry["image_id"], [])]
    shares = overlaps(entry, objects)
    if not (shares >= TOUCHES).any():
        return "on no object"
    same = np.array([one["category_id"] == entry["category_id"] for one in objects])
    if (same & (shares >= MATCHES)).any():
        return "found twice"
    nearest = objects[int(shares.argmax())]
    if nearest["category_id"] == entry["category_id"]:
        return "badly placed"
    return f"annotated as {source.class_name(nearest)}"


def _crop(
    source: PictureSource,
    entry: Mapping[str, Any],
    caption: str,
    *,
    rows: Sequence[int],
    named: Mapping[int, str] | None = None,
) -> Picture | None:
    image = source.open(entry["image_id"])
    if image is None:
        return None
    part, corner = crop_around(image, xyxy(entry["bbox"]), context=0.8)
    drawn = source.draw(part, entry["image_id"], rows=rows, named=named, corner=corner, longest=240)
    return _picture(drawn, caption)


def _evenly(source: PictureSource, count: int) -> list[int]:
    """Ids of images with objects, evenly spaced; of any images where none has objects."""
    usable = [number for number in source.images if source.objects_of.get(number)]
    usable = usable or list(source.images)
    places = np.linspace(0, len(usable) - 1, min(count, len(usable))).round().astype(int)
    return [usable[place] for place in np.unique(places)]


def _spread(
    ranked: Sequence[tuple[float, float, int]], entries: Sequence[Mapping[str, Any]]
) -> list[tuple[float, float, int]]:
    """The same order, but at most two of one image, so that no image fills the page."""
    seen: Counter[int] = Counter()
    chosen = []
    for item in ranked:
        image_id = entries[item[2]]["image_id"]
        seen[image_id] += 1
        if seen[image_id] <= MOST_PER_IMAGE:
            chosen.append(item)
    return chosen


def _picture(image: Image.Image, caption: str) -> Picture:
    return Picture(data_uri(image), caption)


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
