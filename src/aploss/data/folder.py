"""A dataset's folder, to which all paths in annotations are confined, and the problems that its files can have."""

import os
import posixpath
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import NoReturn

from aploss.errors import DataError, listed
from aploss.progress import printable

EXTENSIONS = (
    ".jpg", ".jpeg", ".jpe", ".jfif", ".mpo", ".png", ".apng", ".bmp", ".dib", ".tif", ".tiff", ".ppm", ".pgm", ".pbm",
    ".pnm", ".jp2", ".j2k", ".webp", ".gif",
)  # fmt: skip
_ABSOLUTE = re.compile(r"/|[A-Za-z]:")


class Effect(StrEnum):
    """What loading does about a problem, most severe first."""

    REFUSED = "refused"  # nothing of the dataset is loaded
    SPLIT_UNUSABLE = "split unusable"
    IMAGE_DROPPED = "image dropped"
    BOX_DROPPED = "box dropped"
    BOX_CLIPPED = "box clipped"
    KEPT = "kept"  # loaded unchanged


# kind → (effect, description), for readers, checks, tests and documentation
KINDS = {
    "path-outside-dataset": (Effect.REFUSED, "a path that leads outside the dataset's folder"),
    "xml-entities": (Effect.REFUSED, "an XML file with a document type or entities, which are never expanded"),
    "unreadable-annotations": (Effect.SPLIT_UNUSABLE, "an annotation file for a whole split that cannot be read"),
    "bad-categories": (Effect.SPLIT_UNUSABLE, "a class list that is missing or not a list of distinct names"),
    "missing-folder": (Effect.SPLIT_UNUSABLE, "an image folder or list that does not exist"),
    "empty-split": (Effect.SPLIT_UNUSABLE, "a split without a usable image"),
    "no-boxes": (Effect.SPLIT_UNUSABLE, "a dataset without a single usable box"),
    "missing-image": (Effect.IMAGE_DROPPED, "an annotation whose image does not exist"),
    "unreadable-annotation": (Effect.IMAGE_DROPPED, "an annotation file of one image that is missing or unreadable"),
    "bad-image-entry": (Effect.IMAGE_DROPPED, "an image entry without a file name or an integer id"),
    "duplicate-image": (Effect.IMAGE_DROPPED, "an image or image id listed more than once in a split"),
    "unreadable-image": (Effect.IMAGE_DROPPED, "a file that is damaged, too large, or not an image of a known format"),
    "size-mismatch": (Effect.IMAGE_DROPPED, "an image whose size differs from its annotation's"),
    "degenerate-box": (Effect.BOX_DROPPED, "a box without width or height inside its image"),
    "bad-box": (Effect.BOX_DROPPED, "an object without a box of finite numbers, in YOLO of fractions"),
    "fraction-box": (Effect.BOX_DROPPED, "a box inside the first pixel: fractions of the image instead of pixels"),
    "unknown-class": (Effect.BOX_DROPPED, "an object without a class, or of a class that is not in the class list"),
    "bad-entry": (Effect.BOX_DROPPED, "an annotation that is not an object with fields, or of an unlisted image"),
    "out-of-bounds-box": (Effect.BOX_CLIPPED, "a box that exceeds its image"),
    "class-lists-differ": (Effect.KEPT, "splits with different class lists"),
    "image-without-annotation": (Effect.KEPT, "an image without a label file, used as an image without objects"),
    "image-in-two-splits": (Effect.KEPT, "the same image, or a copy of it, in two splits: metrics are optimistic"),
    "copied-image": (Effect.KEPT, "two files of a split with the same content"),
    "repeated-box": (Effect.KEPT, "two objects of an image with the same box"),
    "tiny-box": (Effect.KEPT, "a box with a side below 2 pixels"),
}


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem of a dataset.

    Args:
        kind: a key of :data:`KINDS`.
        file: the file to look at, relative to the dataset's folder.
        message: a description with the value that was found.
        count: number of boxes or images concerned, if one line stands for many.
        image: the image concerned, relative to the dataset's folder.
        box: the box concerned, x1, y1, x2, y2 in the image's pixels.
        splits: the splits concerned, if it is the result of a check; none if it concerns the dataset as a whole.

    Example:
        >>> problem = Problem("degenerate-box", "Annotations/7.xml", "object 2: xmin 5 = xmax 5")
        >>> problem.effect
        <Effect.BOX_DROPPED: 'box dropped'>
        >>> print(problem)
        Annotations/7.xml: object 2: xmin 5 = xmax 5 (degenerate-box, box dropped)
    """

    kind: str
    file: str
    message: str
    count: int = 1
    image: str = ""
    box: tuple[float, ...] | None = None
    splits: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        assert self.kind in KINDS, self.kind
        for text in ("file", "message"):
            object.__setattr__(self, text, printable(getattr(self, text)))

    @property
    def effect(self) -> Effect:
        """What loading does about this problem."""
        return KINDS[self.kind][0]

    def __str__(self) -> str:
        return f"{self.file}: {self.message} ({self.kind}, {self.effect.value})"


class ProblemError(DataError):
    """A problem that prevents reading a split; a check lists it and continues."""

    def __init__(self, kind: str, file: str, message: str) -> None:
        super().__init__(kind, file, message)
        self.problem = Problem(kind, file, message)

    def __str__(self) -> str:
        return f"{self.problem.file}: {self.problem.message}"


def summarise(problems: Iterable[Problem]) -> str:
    """Counts problems by kind in one line, with the first files: ``5 degenerate-box (box dropped): 0.xml, ...``."""
    by_kind: dict[str, Counter[str]] = {}
    for problem in problems:
        by_kind.setdefault(problem.kind, Counter())[problem.file] += problem.count
    return "; ".join(
        f"{counts.total()} {kind} ({KINDS[kind][0].value}): {listed(list(counts))}" for kind, counts in by_kind.items()
    )


def is_image(path: str) -> bool:
    """Whether a path has the extension of an image."""
    return posixpath.splitext(path)[1].lower() in EXTENSIONS


def filled_lines(text: str) -> list[str]:
    """The stripped lines that are not empty."""
    return [line for line in map(str.strip, text.splitlines()) if line]


def stem_of(path: str) -> str:
    """The file name without the extension of an image or annotation (ids may contain dots)."""
    stem, extension = posixpath.splitext(posixpath.basename(path.replace("\\", "/")))
    return stem if is_image(path) or extension.lower() == ".xml" else stem + extension


class DatasetFolder:
    """A dataset's folder; gives access to nothing outside of it.

    All paths are relative to the folder, with forward slashes. A symbolic link is followed only if its target is inside
    the folder, too.

    Args:
        root: the folder, which may itself be a link.

    Example:
        >>> folder = DatasetFolder(".")
        >>> folder.inside("../images/a.jpg", base="labels", named_in="labels/a.txt"), folder.names("images")
        ('images/a.jpg', [])
    """

    def __init__(self, root: str | Path) -> None:
        self.root = Path(os.path.realpath(root))
        self._listings: dict[str, dict[str, bool]] = {}  # folder → name → whether it is a link

    def inside(self, text: str, *, base: str = "", named_in: str) -> str:
        """Converts a path from an annotation to a path below the folder.

        Args:
            text: the path as written; backslashes are separators on every system.
            base: folder below the root that `text` is relative to.
            named_in: the file that contains `text`, for the error message.

        Raises:
            ProblemError: the path is absolute or leads outside the folder.
        """
        slashed = text.replace("\\", "/")
        path = posixpath.normpath(posixpath.join(base, slashed))
        if _ABSOLUTE.match(slashed) or "\0" in text or path == ".." or path.startswith("../"):
            raise _outside(named_in, f"the path {text!r}")
        return path

    def has(self, path: str) -> bool:
        """Whether a file, folder or link of this name exists; `path` is one returned by :meth:`inside`.

        Raises:
            ProblemError: a symbolic link on the path leads outside the folder.
        """
        if path in ("", "."):
            return True
        folder, name = posixpath.split(path)
        is_link = self._listing(folder).get(name)
        if is_link:
            self._check_link(path)
        return is_link is not None

    def is_folder(self, path: str) -> bool:
        """Whether a folder of this name exists."""
        return self.has(path) and (self.root / path).is_dir()

    def is_file(self, path: str) -> bool:
        """Whether a file of this name exists."""
        return self.has(path) and (self.root / path).is_file()

    def names(self, folder: str) -> list[str]:
        """The sorted names in a folder; empty if there is no such folder."""
        return sorted(self._listing(folder))

    def files(self, folder: str = "") -> Iterator[str]:
        """Every file below a folder, sorted; hidden and linked folders are skipped."""

        def fail(error: OSError) -> NoReturn:
            raise _unreadable_folder(folder, error)

        if not self.is_folder(folder):
            return
        for parent, folders, names in os.walk(self.root / folder, onerror=fail):
            folders[:] = sorted(name for name in folders if not name.startswith(".") and name != "__MACOSX")
            inner = Path(parent).relative_to(self.root).as_posix()
            yield from (posixpath.normpath(f"{inner}/{name}") for name in sorted(names) if not name.startswith("."))

    def read_bytes(self, path: str, *, kind: str = "unreadable-annotations") -> bytes:
        """The content of a file.

        Raises:
            ProblemError: of this kind; it is missing, unreadable, or not a regular file: reading a pipe would block.
        """
        if not self.has(path):  # a name with NUL cannot even be opened
            raise ProblemError(kind, path, "cannot be read: no such file")
        full = self.root / path
        try:
            if full.exists() and not full.is_file():
                raise ProblemError(kind, path, "a folder, pipe or device")
            return full.read_bytes()
        except OSError as error:
            raise ProblemError(kind, path, f"cannot be read: {error.strerror}") from None

    def read_text(self, path: str, *, kind: str = "unreadable-annotations") -> str:
        """The content of a UTF-8 file; raises like :meth:`read_bytes`."""
        try:
            return self.read_bytes(path, kind=kind).decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise ProblemError(kind, path, f"not UTF-8 text: {error}") from None

    def _listing(self, folder: str) -> dict[str, bool]:
        folder = "" if folder == "." else folder
        if folder not in self._listings:
            try:
                self._check_link(folder)
                with os.scandir(self.root / folder) as entries:
                    self._listings[folder] = {entry.name: entry.is_symlink() for entry in entries}
            except (FileNotFoundError, NotADirectoryError, UnicodeEncodeError):  # no name has an unpaired surrogate
                self._listings[folder] = {}
            except OSError as error:
                raise _unreadable_folder(folder, error) from None
        return self._listings[folder]

    def _check_link(self, path: str) -> None:
        real = Path(os.path.realpath(self.root / path))
        if not real.is_relative_to(self.root):
            raise _outside(path, f"the symbolic link {path!r}")


def _outside(named_in: str, what: str) -> ProblemError:
    message = f"{what} leads outside the dataset's folder; put the file inside it"
    return ProblemError("path-outside-dataset", named_in, message)


def _unreadable_folder(folder: str, error: OSError) -> ProblemError:
    return ProblemError("missing-folder", folder or ".", f"the folder cannot be read: {error.strerror}")
