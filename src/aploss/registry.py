"""Named things that users add to: losses, detectors and data formats, by one mechanism.

A plugin is a Python file that the user names on the command line (``--plugin FILE.py``) and that
registers what it brings when it is imported. It is code, so it is never taken from a run folder, a
checkpoint or a dataset.
"""

import hashlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from aploss.errors import ConfigError, did_you_mean

__all__ = ["Registry", "load_plugins"]

T = TypeVar("T")


class Registry(Generic[T]):
    """Things of one kind by name, in the order in which they were registered.

    Args:
        kind: what they are called in messages, such as "loss".

    Example:
        >>> shapes: Registry[int] = Registry("shape")
        >>> shapes.register("square")(4)
        4
        >>> shapes.get("square"), shapes.names()
        (4, ('square',))
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries: dict[str, T] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """A decorator that registers what it decorates, and returns it.

        Raises:
            ConfigError: if the name is taken by something else.
        """

        def add(entry: T) -> T:
            if self._entries.setdefault(name, entry) is not entry:
                raise ConfigError(f"there is a {self.kind} {name!r} already; choose another name")
            return entry

        return add

    def get(self, name: str) -> T:
        """What is registered under a name.

        Raises:
            ConfigError: if nothing is; the message lists the names.
        """
        if name not in self._entries:
            known = f"choose one of: {', '.join(self)}{did_you_mean(name, self)}"
            raise ConfigError(f"there is no {self.kind} {name!r}; {known}")
        return self._entries[name]

    def names(self) -> tuple[str, ...]:
        """All names."""
        return tuple(self._entries)

    def items(self) -> list[tuple[str, T]]:
        """All names with what they stand for."""
        return list(self._entries.items())

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


def load_plugins(files: Sequence[str | Path]) -> None:
    """Imports Python files that register losses, detectors or data formats; each file once.

    Raises:
        ConfigError: a file is not there, is not Python, or fails while it is imported.
    """
    for file in files:
        path = Path(file).resolve()
        digest = hashlib.sha256(str(path).encode("utf-8", "surrogateescape")).hexdigest()[:8]
        name = f"aploss_plugin_{path.stem}_{digest}"  # the same in every process
        if name in sys.modules:
            continue
        specification = importlib.util.spec_from_file_location(name, path)
        if specification is None or specification.loader is None or not path.is_file():
            raise ConfigError(f"plugin {file}: no such Python file")
        module = importlib.util.module_from_spec(specification)
        sys.modules[name] = module  # found there by pickle, and by dataclasses while it is imported
        try:
            specification.loader.exec_module(module)
        except ConfigError:
            del sys.modules[name]
            raise
        except Exception as error:
            del sys.modules[name]
            raise ConfigError(f"plugin {file}: {type(error).__name__}: {error}") from error
