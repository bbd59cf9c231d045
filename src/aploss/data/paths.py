"""Paths from annotation files, confined to the dataset's folder."""

import os
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from aploss.data.images import EXTENSIONS
from aploss.data.problems import ProblemError

_ABSOLUTE = re.compile(r"/|[A-Za-z]:")


def is_image(path: str) -> bool:
    """Whether a path has the extension of an image."""
    return posixpath.splitext(path)[1].lower() in EXTENSIONS


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

        Example:
            >>> DatasetFolder(".").inside("../images/a.jpg", base="labels", named_in="x.txt")
            'images/a.jpg'
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
