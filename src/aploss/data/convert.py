"""Converting a dataset with all its splits and images to another format."""

import re
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from aploss.data.annotations import DetectionDataset, concatenate
from aploss.data.check import inspect_images
from aploss.data.folder import Problem
from aploss.data.formats import DataFormat, Parts, find_source, writable_formats
from aploss.data.images import read_image, read_sizes
from aploss.errors import DataError

_UNUSUAL = re.compile(r"[^\w .()+-]")


@dataclass(frozen=True)
class Conversion:
    """The result of a conversion."""

    folder: Path  # the new dataset
    images: int  # number of images, each counted once
    boxes: int  # number of boxes, each counted once
    splits: tuple[str, ...]  # names of the splits
    problems: tuple[Problem, ...]  # everything of the old dataset that was left out
    losses: tuple[str, ...]  # descriptions of everything the new format cannot represent


def convert_dataset(path: str | Path, out: str | Path, *, to: str, format: str = "auto") -> Conversion:
    """Writes all splits of a dataset in another format.

    Boxes, labels, splits and image files stay the same; unusable images and boxes (see
    :func:`aploss.data.load_dataset`) are left out. The folder appears when it is complete.

    Args:
        path: the dataset.
        out: a folder that does not exist or is empty.
        to: "voc", "coco", "yolo", or a registered format that can be written.
        format: format of the old dataset.

    Returns:
        Counts, and what was left out.

    Raises:
        DataError: the target is in use, or the dataset cannot be read.

    Example:
        >>> from aploss.data import builtin_dataset
        >>> done = convert_dataset(builtin_dataset(cache=".", counts=(4, 2, 2)).root, "shapes", to="yolo")
        >>> done.folder.name, done.images, done.losses
        ('shapes', 8, ())
    """
    formats = writable_formats()
    if to not in formats:
        raise DataError(f"cannot write the format '{to}'; choose one of {', '.join(formats)}")
    source = find_source(path, format=format)
    out = Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise DataError(f"{out}: not an empty folder; name another one, nothing is overwritten")
    if out.resolve().is_relative_to(source.folder.root):
        raise DataError(f"{out}: inside the dataset it is made from; name a folder elsewhere")
    class_names = source.load().class_names
    parts = {split: _with_good_headers(source.load(split, class_names=class_names)) for split in source.splits}
    whole = concatenate(list(parts.values()), split="all")
    try:
        losses = _write(out, parts, whole, formats[to])
    except OSError as error:
        raise DataError(f"{out}: cannot be written: {error.strerror or error}") from error
    return Conversion(out, len(whole), whole.num_boxes, tuple(parts), tuple(whole.problems), tuple(losses))


def _with_good_headers(dataset: DetectionDataset) -> DetectionDataset:
    """Drops unreadable images and images of another size than annotated, and adds them to ``problems``."""
    problems = {problem.image: problem for problem in inspect_images(dataset, pixels=False)}
    kept = dataset.subset([index for index, path in enumerate(dataset.image_paths) if path not in problems])
    kept.problems += problems.values()
    return kept


def _write(out: Path, parts: Parts, whole: DetectionDataset, format_class: type[DataFormat]) -> list[str]:
    """Writes into a temporary folder, which is renamed when it is complete."""
    paths = [whole.image_path(index) for index in range(len(whole))]
    # Not every format states the size: without its EXIF rotation, an image is encoded again in its annotated size.
    encoded = {path for index, path in enumerate(paths) if read_sizes(path)[0] != whole.image_size(index)}
    names = unique_names(paths, encoded)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as scratch:
        fresh = Path(scratch) / "dataset"
        (fresh / format_class.image_folder).mkdir(parents=True)
        losses = format_class.write(fresh, parts, names)
        for index, path in enumerate(paths):
            target = fresh / format_class.image_folder / names[path]
            if path in encoded:
                pixels = read_image(path, size=whole.image_size(index))
                Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy()).save(target)
            else:
                shutil.copyfile(path, target)
        if out.exists():
            out.rmdir()
        fresh.replace(out)
    return losses


def unique_names(paths: list[Path], encoded: set[Path]) -> dict[Path, str]:
    """File names that are distinct ignoring extension and case, and valid in every list and file system.

    Images to be ``encoded`` again become PNG files.

    Example:
        >>> list(unique_names([Path("a/1.jpg"), Path("b/1.png"), Path("2.jpg")], set()).values())
        ['1.jpg', 'b_1.png', '2.jpg']
    """
    names: dict[Path, str] = {}
    taken: set[str] = set()
    for path in paths:
        stem, parent = (_UNUSUAL.sub("_", name).strip(" .") or "image" for name in (path.stem, path.parent.name))
        while stem.casefold() in taken:
            stem = f"{parent}_{stem}"
        taken.add(stem.casefold())
        names[path] = stem + (".png" if path in encoded else path.suffix)
    return names
