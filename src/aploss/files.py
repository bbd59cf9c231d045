"""Atomic file writes, safe against kills and power cuts, and guarded readers of YAML and archives."""

import hashlib
import json
import os
import re
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import yaml

from aploss.errors import RunError

UNFINISHED = ".unfinished"
MAX_YAML_CHARACTERS = 4 << 20
MAX_YAML_DEPTH = 100
YAML_OPENING = (
    yaml.FlowSequenceStartToken, yaml.FlowMappingStartToken, yaml.BlockSequenceStartToken, yaml.BlockMappingStartToken,
)  # fmt: skip
YAML_CLOSING = (yaml.FlowSequenceEndToken, yaml.FlowMappingEndToken, yaml.BlockEndToken)
MAX_YAML_ALIASES = 10  # nested, they repeat their content at most 3^(10/3) = 39 times; one more level, and it explodes


def as_file_name(text: str, longest: int = 100) -> str:
    """Converts text to (part of) a file name; text that is too long is cut and ends in its hash.

    Example:
        >>> as_file_name("ap:delta=0.5, [64,96]"), as_file_name("a longer one", longest=8)
        ('ap-delta0.5-64-96', 'a-longer-675fdf0c')
    """
    name = re.sub(r"[^\w.+]+", "-", text.replace("=", "")).strip("-")
    if len(name) <= longest:
        return name
    return f"{name[:longest].rstrip('-')}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def write_whole(path: Path, write: Callable[[IO[bytes]], Any]) -> None:
    """Writes a file under a temporary name, flushes it to disk, and renames it over the previous one.

    Args:
        path: the file; missing parent folders are created.
        write: called with the open binary file.

    Raises:
        RunError: if the file cannot be written.
    """
    name = hashlib.sha256(os.fsencode(path.name)).hexdigest()[:16]  # the longest allowed name leaves no room for more
    unfinished = path.with_name(f".{name}.{os.getpid()}{UNFINISHED}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with unfinished.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
        with suppress(OSError):  # systems that cannot open folders need no flush to make a rename survive a power cut
            folder = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
    except (OSError, RuntimeError) as error:
        # torch.save closes its archive after an error, which raises a second one: report the first.
        reason = error if isinstance(error, OSError) else error.__context__
        if not isinstance(reason, OSError):
            raise
        before = "; the previous one is kept" if path.is_file() else ""
        raise RunError(f"{path} cannot be written: {reason.strerror or reason}{before}") from error
    finally:
        with suppress(OSError):  # the parent is a file or read-only: nothing was written
            unfinished.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Writes a UTF-8 text file atomically.

    Characters without an encoding, such as those of file names that are not UTF-8, are written as escapes.
    """
    write_whole(path, lambda file: file.write(text.encode("utf-8", "backslashreplace")))


def write_json(path: Path, value: Any, *, indent: int | None = 2) -> None:
    """Writes a JSON file atomically."""
    write_text(path, json.dumps(value, indent=indent) + "\n")


def load_yaml(text: str) -> Any:
    """Parses YAML from a file of unknown origin; every file is read by this function.

    Raises:
        ValueError: it is not valid YAML, too long, nested too deeply, or has more aliases than a person writes.

    Example:
        >>> load_yaml("names: [cat, dog]")
        {'names': ['cat', 'dog']}
    """
    if len(text) > MAX_YAML_CHARACTERS:
        raise ValueError(f"over {MAX_YAML_CHARACTERS >> 20} MB")
    try:
        aliases = depth = 0
        for token in yaml.scan(text):
            aliases += isinstance(token, yaml.AliasToken)
            depth += isinstance(token, YAML_OPENING) - isinstance(token, YAML_CLOSING)
            if aliases > MAX_YAML_ALIASES:
                raise ValueError(f"more than {MAX_YAML_ALIASES} aliases (*name); write their content in full")
            if depth > MAX_YAML_DEPTH:  # the time to parse grows with its square
                raise ValueError("nested too deeply")
        loader = yaml.SafeLoader(text)
        loader.deep_construct = True  # refuses an alias inside the content that it stands for
        return loader.get_single_data()
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None


def remove_unfinished(folder: Path) -> None:
    """Removes the temporary files of killed processes below a folder."""
    for path in folder.rglob(f".*{UNFINISHED}"):
        path.unlink(missing_ok=True)


def check_archive(path: Path) -> None:
    """Verifies the checksums of a zip archive as torch writes it, without compression.

    torch itself does not: a checkpoint with a changed byte loads with a wrong weight, and a compressed one of a few
    megabytes takes gigabytes of memory.

    Raises:
        RunError: if the file is damaged, compressed, or not an archive.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            if sum(part.file_size for part in archive.infolist()) > path.stat().st_size:
                raise ValueError("its parts are larger than the file; torch does not compress them")
            damaged = archive.testzip()
    except Exception as error:  # damaged headers raise many kinds of errors
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise RunError(f"{path} cannot be read, it is damaged: {reason}") from error
    if damaged is not None:
        raise RunError(f"{path} cannot be read, it is damaged: wrong checksum of {damaged}")
