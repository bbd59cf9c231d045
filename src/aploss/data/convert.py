"""A dataset written in another format, all its splits and images."""

import posixpath
import re
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from aploss.data.dataset import DetectionDataset, concatenate
from aploss.data.images import EXTENSIONS, read_header, read_image
from aploss.data.load import find_source, load_split
from aploss.data.problems import Problem
from aploss.data.verify import verify_images
from aploss.data.write import Written, write_coco, write_voc, write_yolo
from aploss.errors import DataError

__all__ = ["TARGET_FORMATS", "Conversion", "convert_dataset"]

_WRITERS = {"coco": write_coco, "voc": write_voc, "yolo": write_yolo}
TARGET_FORMATS = tuple(sorted(_WRITERS))


@dataclass(frozen=True)
class Conversion:
    """What was written.

    Attributes:
        folder: The new dataset.
        images: Number of images, each counted once.
        boxes: Number of boxes, each counted once.
        splits: Names of the splits.
        problems: What of the old dataset was left out.
        losses: What the new format cannot hold, in words.
    """

    folder: Path
    images: int
    boxes: int
    splits: tuple[str, ...]
    problems: tuple[Problem, ...]
    losses: tuple[str, ...]


def convert_dataset(
    path: str | Path,
    out: str | Path,
    *,
    to: str,
    format: str = "auto",
    progress: Callable[[int, int], None] | None = None,
) -> Conversion:
    """Writes all splits of a dataset in another format.

    Boxes, labels, splits and image files stay the same; what cannot be used (see
    :func:`aploss.data.load_dataset`) is left out. The folder appears when it is complete.

    Args:
        path: The dataset.
        out: A folder that does not exist or is empty.
        to: "voc", "coco" or "yolo".
        format: Format of the old dataset.
        progress: Called with (images done, images in all).

    Raises:
        DataError: The target is in use, or the dataset cannot be read.
    """
    if to not in _WRITERS:
        raise DataError(f"cannot write '{to}'; choose one of {', '.join(TARGET_FORMATS)}")
    source = find_source(path, format=format)
    out = Path(out)
    _check_target(out, source.folder.root)
    class_names = load_split(source, "all").class_names
    parts = {
        split: verify_images(load_split(source, split, class_names), decode=False)
        for split in source.splits
    }
    whole = concatenate(list(parts.values()), split="all")
    try:
        written = _write(out, parts, whole, to=to, progress=progress)
    except OSError as error:
        raise DataError(f"{out}: cannot be written: {error.strerror or error}") from error
    return Conversion(
        folder=out,
        images=len(whole),
        boxes=whole.num_boxes - written.lost_boxes,
        splits=tuple(parts),
        problems=tuple(whole.problems),
        losses=written.losses,
    )


def _write(
    out: Path,
    parts: dict[str, DetectionDataset],
    whole: DetectionDataset,
    *,
    to: str,
    progress: Callable[[int, int], None] | None,
) -> Written:
    """Writes into a folder of another name, which gets its own when it is complete."""
    shared = len(whole) < sum(map(len, parts.values()))
    places, rewritten = _plan(parts, flat=to == "voc" or shared)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as scratch:
        fresh = Path(scratch) / "dataset"
        written = _WRITERS[to](fresh, parts, places)
        for index in range(len(whole)):
            image = whole.image_path(index)
            target = fresh / written.image_folder / places[image]
            _copy_image(whole, index, target, exact=image not in rewritten)
            if progress is not None:
                progress(index + 1, len(whole))
        if out.exists():
            out.rmdir()
        fresh.replace(out)
    return written


def _plan(parts: dict[str, DetectionDataset], *, flat: bool) -> tuple[dict[Path, str], set[Path]]:
    """Where each image goes (one folder for all, or one a split), and which are written anew."""
    groups = {f"{split}/": [part] for split, part in parts.items()}
    if flat:
        groups = {"": list(parts.values())}
    places: dict[Path, str] = {}
    rewritten = set()
    for prefix, datasets in groups.items():
        images = [part.image_path(i) for part in datasets for i in range(len(part))]
        names = unique_names(list(dict.fromkeys(images)), datasets[0].root)
        places |= {path: prefix + name for path, name in names.items()}
    for part in parts.values():
        for index in range(len(part)):
            path = part.image_path(index)
            if read_header(path).size != part.image_size(index):
                rewritten.add(path)
                places[path] = f"{posixpath.splitext(places[path])[0]}.png"
    return places, rewritten


def unique_names(paths: list[Path], root: Path) -> dict[Path, str]:
    """File names that differ in more than their extension and case: one folder can hold them all.

    Example:
        >>> names = unique_names([Path("d/a/1.jpg"), Path("d/b/1.png"), Path("d/2.jpg")], Path("d"))
        >>> list(names.values())
        ['1.jpg', 'b_1.png', '2.jpg']
    """
    names: dict[Path, str] = {}
    taken: set[str] = set()
    for path in paths:
        long_name = path.relative_to(root).as_posix().replace("/", "_")
        candidates = [_plain(path.name), _plain(long_name)]
        stem, extension = posixpath.splitext(candidates[-1])
        number = 2
        while not candidates or _key(candidates[0]) in taken:
            candidates = candidates[1:] or [f"{stem}_{number}{extension}"]
            number += 1
        names[path] = candidates[0]
        taken.add(_key(candidates[0]))
    return names


def _plain(name: str) -> str:
    """A name that every list format and file system can hold."""
    stem, extension = posixpath.splitext(name)
    if extension.lower() not in EXTENSIONS:
        stem, extension = name, ""
    return (re.sub(r"[^\w .()+-]", "_", stem).strip(" .") or "image") + extension


def _key(name: str) -> str:
    return posixpath.splitext(name)[0].casefold()


def _check_target(out: Path, source: Path) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise DataError(f"{out}: not an empty folder; name another one, nothing is overwritten")
    if out.resolve().is_relative_to(source):
        raise DataError(f"{out}: inside the dataset it is made from; name a folder elsewhere")


def _copy_image(dataset: DetectionDataset, index: int, target: Path, *, exact: bool) -> None:
    """Copies an image byte by byte; or writes it as it was annotated, without the EXIF rotation
    that the annotation ignores, because not every format could say so."""
    target.parent.mkdir(parents=True, exist_ok=True)
    path = dataset.image_path(index)
    if exact:
        shutil.copyfile(path, target)
        return
    pixels = read_image(path, size=dataset.image_size(index))
    Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy()).save(target)
