"""Converting a dataset with all its splits and images to another format."""

import posixpath
import re
import shutil
import tempfile
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path

from PIL import Image

from aploss.data.annotations import DetectionDataset, concatenate
from aploss.data.formats import FORMATS, DataFormat, Parts, Written, each_image_once, writable_formats
from aploss.data.images import EXTENSIONS, read_image, read_sizes
from aploss.data.load import Progress, find_source, without_unusable_images
from aploss.data.problems import Problem
from aploss.errors import DataError


@dataclass(frozen=True)
class Conversion:
    """The result of a conversion."""

    folder: Path  # the new dataset
    images: int  # number of images, each counted once
    boxes: int  # number of boxes, each counted once
    splits: tuple[str, ...]  # names of the splits
    problems: tuple[Problem, ...]  # everything of the old dataset that was left out
    losses: tuple[str, ...]  # descriptions of everything the new format cannot represent


def convert_dataset(
    path: str | Path, out: str | Path, *, to: str, format: str = "auto", progress: Progress | None = None
) -> Conversion:
    """Writes all splits of a dataset in another format.

    Boxes, labels, splits and image files stay the same; unusable images and boxes (see
    :func:`aploss.data.load_dataset`) are left out. The folder appears when it is complete.

    Args:
        path: the dataset.
        out: a folder that does not exist or is empty.
        to: "voc", "coco", "yolo", or a registered format that can be written.
        format: format of the old dataset.
        progress: called with (images done, total).

    Raises:
        DataError: the target is in use, or the dataset cannot be read.
    """
    if to not in writable_formats():
        wrong = f"the format '{to}' can be read, but not written" if to in FORMATS else f"cannot write '{to}'"
        raise DataError(f"{wrong}; choose one of {', '.join(writable_formats())}")
    source = find_source(path, format=format)
    out = Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise DataError(f"{out}: not an empty folder; name another one, nothing is overwritten")
    if out.resolve().is_relative_to(source.folder.root):
        raise DataError(f"{out}: inside the dataset it is made from; name a folder elsewhere")
    class_names = source.load().class_names
    parts = {
        split: without_unusable_images(source.load(split, class_names=class_names), decode=False)
        for split in source.splits
    }
    whole = concatenate(list(parts.values()), split="all")
    try:
        written = _write(out, parts, whole, FORMATS.get(to), progress)
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
    out: Path, parts: Parts, whole: DetectionDataset, format_class: type[DataFormat], progress: Progress | None
) -> Written:
    """Writes into a temporary folder, which is renamed when it is complete."""
    shared = len(whole) < sum(map(len, parts.values()))
    places, rewritten = _plan(parts, flat=format_class.one_image_folder or shared)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as scratch:
        fresh = Path(scratch) / "dataset"
        written = format_class.write(fresh, parts, places)
        for index in range(len(whole)):
            image = whole.image_path(index)
            target = fresh / written.image_folder / places[image]
            _copy_image(image, target, whole.image_size(index) if image in rewritten else None)
            if progress is not None:
                progress(index + 1, len(whole))
        if out.exists():
            out.rmdir()
        fresh.replace(out)
    return written


def _plan(parts: Parts, *, flat: bool) -> tuple[dict[Path, str], set[Path]]:
    """The new path of each image (in one folder for all, or one per split), and the images to be re-encoded."""
    groups = {"": list(parts.values())} if flat else {f"{split}/": [part] for split, part in parts.items()}
    places: dict[Path, str] = {}
    rewritten = set()
    for prefix, datasets in groups.items():
        images = [part.image_path(i) for part in datasets for i in range(len(part))]
        names = unique_names(list(dict.fromkeys(images)), datasets[0].root)
        places |= {path: prefix + name for path, name in names.items()}
    for part, index in each_image_once(parts):
        path = part.image_path(index)
        if read_sizes(path)[0] != part.image_size(index):
            rewritten.add(path)
            places[path] = f"{posixpath.splitext(places[path])[0]}.png"
    return places, rewritten


def unique_names(paths: list[Path], root: Path) -> dict[Path, str]:
    """Distinct file names, ignoring extension and case, so that one folder can hold all images.

    Example:
        >>> names = unique_names([Path("d/a/1.jpg"), Path("d/b/1.png"), Path("d/2.jpg")], Path("d"))
        >>> list(names.values())
        ['1.jpg', 'b_1.png', '2.jpg']
    """
    names: dict[Path, str] = {}
    taken: set[str] = set()
    for path in paths:
        short, long = (_plain(name) for name in (path.name, path.relative_to(root).as_posix().replace("/", "_")))
        stem, extension = posixpath.splitext(long)
        numbered = (f"{stem}_{number}{extension}" for number in count(3))
        names[path] = next(name for name in chain([short, long], numbered) if _key(name) not in taken)
        taken.add(_key(names[path]))
    return names


def _plain(name: str) -> str:
    """A name that is valid in every list format and file system."""
    stem, extension = posixpath.splitext(name)
    if extension.lower() not in EXTENSIONS:
        stem, extension = name, ""
    return (re.sub(r"[^\w .()+-]", "_", stem).strip(" .") or "image") + extension


def _key(name: str) -> str:
    return posixpath.splitext(name)[0].casefold()


def _copy_image(path: Path, target: Path, size: tuple[int, int] | None) -> None:
    """Copies an image, or re-encodes it in its annotated ``size``, without the EXIF rotation that the annotation
    ignores, since not every format states the size."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if size is None:
        shutil.copyfile(path, target)
    else:
        pixels = read_image(path, size=size)
        Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy()).save(target)
