"""Paths from annotation files, confined to the dataset's folder."""

import os
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import NamedTuple

from aploss.data.images import EXTENSIONS
from aploss.data.problems import ProblemError

_PLAIN = re.compile(r"[\w-][\w .-]*(/[\w-][\w .-]*)*")


def is_image(path: str) -> bool:
    """Whether a path has the extension of an image."""
    return posixpath.splitext(path)[1].lower() in EXTENSIONS


def stem_of(path: str) -> str:
    """The file name without the extension of an image or annotation (ids may contain dots)."""
    stem, extension = posixpath.splitext(posixpath.basename(path.replace("\\", "/")))
    return stem if is_image(path) or extension.lower() == ".xml" else stem + extension


class _Listing(NamedTuple):
    """The names in a folder."""

    names: frozenset[str]
    links: frozenset[str]
    folders: frozenset[str]


class DatasetFolder:
    """A dataset's folder; gives access to nothing outside of it.

    All paths are relative to the folder, with forward slashes. A symbolic link is followed only if its target is inside
    the folder, too.

    Args:
        root: the folder, which may itself be a link.
    """

    def __init__(self, root: str | Path) -> None:
        self.root = Path(os.path.realpath(root))
        self._listings: dict[str, _Listing] = {}

    def inside(self, text: str, *, base: str = "", named_in: str) -> str:
        """Converts a path from an annotation to a path below the folder.

        Args:
            text: the path as written; backslashes are separators on every system.
            base: folder below the root that `text` is relative to.
            named_in: the file that contains `text`, for the error message.

        Raises:
            ProblemError: the path is absolute or leads outside the folder.

        Example:
            >>> DatasetFolder(".").inside("../images/a.jpg", base="labels", named_in="x.txt")
            'images/a.jpg'
        """
        if _PLAIN.fullmatch(text) and ".." not in text:  # the common case, fast for 120,000 images
            return posixpath.join("" if base == "." else base, text)
        slashed = text.replace("\\", "/")
        windows = PureWindowsPath(text)
        absolute = PurePosixPath(slashed).is_absolute() or bool(windows.drive or windows.root)
        path = posixpath.normpath(posixpath.join(base, slashed))
        if absolute or "\0" in text or path == ".." or path.startswith("../"):
            raise _outside(named_in, f"the path {text!r}")
        return path

    def has(self, path: str, *, named_in: str | None = None) -> bool:
        """Whether a file, folder or unbroken link of this name exists.

        Args:
            path: a path returned by :meth:`inside`.
            named_in: the file to blame; defaults to the path itself.

        Raises:
            ProblemError: a symbolic link on the path leads outside the folder.
        """
        if path in ("", "."):
            return True
        folder, name = posixpath.split(path)
        try:
            listing = self._listing(folder)
            if name in listing.links:
                self._check_link(path)
                return (self.root / path).exists()
        except ProblemError as error:
            if error.problem.kind != "path-outside-dataset":
                raise
            raise _outside(named_in or path, f"the symbolic link on the path {path!r}") from None
        return name in listing.names

    def is_link(self, path: str) -> bool:
        """Whether a symbolic link of this name exists, even a broken one."""
        folder, name = posixpath.split(path)
        return name in self._listing(folder).links

    def is_folder(self, path: str) -> bool:
        """Whether a folder of this name exists."""
        return self.has(path) and (self.root / path).is_dir()

    def is_file(self, path: str) -> bool:
        """Whether a file of this name exists."""
        return self.has(path) and (self.root / path).is_file()

    def names(self, folder: str) -> list[str]:
        """The sorted names in a folder; empty if there is no such folder."""
        return sorted(self._listing(folder).names)

    def files(self, folder: str = "") -> Iterator[str]:
        """Every file below a folder, sorted; hidden and linked folders are skipped."""
        pending = [folder]
        while pending:
            current = pending.pop()
            listing = self._listing(current)
            names = sorted(name for name in listing.names if not name.startswith(".") and name != "__MACOSX")
            yield from (posixpath.join(current, name) for name in names if name not in listing.folders)
            own = listing.folders - listing.links
            pending += [posixpath.join(current, name) for name in reversed(names) if name in own]

    def read_bytes(self, path: str) -> bytes:
        """The content of a file.

        Raises:
            ProblemError: it is missing, unreadable, or not a regular file: reading a pipe would block.
        """
        self.has(path)
        full = self.root / path
        try:
            if full.exists() and not full.is_file():
                raise ProblemError("unreadable-annotations", path, "a folder, pipe or device")
            return full.read_bytes()
        except OSError as error:
            raise ProblemError("unreadable-annotations", path, f"cannot be read: {error.strerror}") from None

    def read_text(self, path: str) -> str:
        """The content of a UTF-8 file.

        Raises:
            ProblemError: the file is missing or not text.
        """
        try:
            return self.read_bytes(path).decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise ProblemError("unreadable-annotations", path, f"not UTF-8 text: {error}") from None

    def _listing(self, folder: str) -> _Listing:
        folder = "" if folder == "." else folder
        if folder not in self._listings:
            try:
                if folder:
                    self._check_link(folder)
                entries = list(os.scandir(self.root / folder))
            except (FileNotFoundError, NotADirectoryError, UnicodeEncodeError):  # no name has an unpaired surrogate
                entries = []
            except OSError as error:
                message = f"the folder cannot be read: {error.strerror}"
                raise ProblemError("missing-folder", folder or ".", message) from None
            self._listings[folder] = _Listing(
                frozenset(entry.name for entry in entries),
                frozenset(entry.name for entry in entries if entry.is_symlink()),
                frozenset(entry.name for entry in entries if _is_folder(entry)),
            )
        return self._listings[folder]

    def _check_link(self, path: str) -> None:
        real = os.path.realpath(self.root / path)
        if real != str(self.root) and not Path(real).is_relative_to(self.root):
            raise _outside(path, "a symbolic link")


def _is_folder(entry: "os.DirEntry[str]") -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def _outside(named_in: str, what: str) -> ProblemError:
    message = f"{what} leads outside the dataset's folder; put the file inside it"
    return ProblemError("path-outside-dataset", named_in, message)
