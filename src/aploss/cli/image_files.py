"""The image files that the arguments of a command mean: files, folders and patterns."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from glob import glob, has_magic
from pathlib import Path

from aploss.data.images import EXTENSIONS

__all__ = ["ImageFile", "find_images"]


@dataclass(frozen=True)
class ImageFile:
    """An image to look at.

    Attributes:
        path: the file.
        name: what results are called: its path below the folder that was given, without suffix;
            different for all images.
    """

    path: Path
    name: str


def find_images(
    arguments: Sequence[str], *, exclude: Path | None = None
) -> tuple[list[ImageFile], list[str]]:
    """Image files from files, folders (with the folders in them) and patterns such as ``*.jpg``.

    Args:
        arguments: as given on the command line; the shell may have left patterns in them.
        exclude: a folder that is not looked into, such as the one that results go to.

    Returns:
        The files in the order of the arguments, each once; and a line for each argument that is
        no image.
    """
    found: dict[Path, str] = {}
    problems: list[str] = []
    for argument in arguments:
        candidates = dict(_candidates(argument))
        if not candidates:
            problems.append(f"{argument}: {_why_nothing(argument)}")
        for path, name in candidates.items():
            if exclude is None or not path.resolve().is_relative_to(exclude.resolve()):
                found.setdefault(path, name)
    return _with_different_names(found), problems


def _candidates(argument: str) -> Iterator[tuple[Path, str]]:
    """Files and their names; folders are searched for names that images end in."""
    path = Path(argument)
    if path.is_dir():
        for file in sorted(path.rglob("*")):
            if file.suffix.lower() in EXTENSIONS and file.is_file():
                yield file, file.relative_to(path).with_suffix("").as_posix()
    elif path.is_file():
        yield path, path.stem
    elif has_magic(argument):
        for match in sorted(glob(argument, recursive=True)):  # noqa: PTH207 - absolute ones too
            yield from _candidates(match)


def _why_nothing(argument: str) -> str:
    if Path(argument).is_dir():
        return "no images in this folder"
    return "no image matches" if has_magic(argument) else "no such image file or folder"


def _with_different_names(found: dict[Path, str]) -> list[ImageFile]:
    taken: set[str] = set()
    images = []
    for path, wanted in found.items():
        name, number = wanted, 1
        while name.casefold() in taken:  # some file systems take A and a for the same
            number += 1
            name = f"{wanted}-{number}"
        taken.add(name.casefold())
        images.append(ImageFile(path, name))
    return images
