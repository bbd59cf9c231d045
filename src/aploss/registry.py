"""Registries of losses, detectors and data formats, which plugins extend.

A plugin is a Python file that the user names on the command line (``--plugin FILE.py``) and that registers its entries
when it is imported. Since it is code, it is never loaded from a run folder, a checkpoint or a dataset.
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
    """Entries of one kind by name, in order of registration.

    Args:
        kind: name of the kind in error messages, such as "loss".

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
        """Returns a decorator that registers the decorated object and returns it unchanged.

        Raises:
            ConfigError: another entry has that name.
        """

        def add(entry: T) -> T:
            if self._entries.setdefault(name, entry) is not entry:
                raise ConfigError(f"the {self.kind} {name!r} is already registered; choose another name")
            return entry

        return add

    def get(self, name: str) -> T:
        """Returns the entry of a name.

        Raises:
            ConfigError: the name is unknown; the message lists the known ones.
        """
        if name not in self._entries:
            names = f"{', '.join(self)}{did_you_mean(name, self)}"
            raise ConfigError(f"unknown {self.kind} {name!r}; choose one of: {names}")
        return self._entries[name]

    def names(self) -> tuple[str, ...]:
        """All names."""
        return tuple(self._entries)

    def items(self) -> list[tuple[str, T]]:
        """All names with their entries."""
        return list(self._entries.items())

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)


def load_plugins(files: Sequence[str | Path]) -> None:
    """Imports Python files that register losses, detectors or data formats, each file once.

    Args:
        files: their paths.

    Raises:
        ConfigError: a file does not exist, is not Python, or raises an error on import.

    Example:
        >>> _ = Path("plugin.py").write_text("print('registers a loss')")
        >>> load_plugins(["plugin.py", "plugin.py"])
        registers a loss
    """
    for file in files:
        path = Path(file).resolve()
        digest = hashlib.sha256(str(path).encode("utf-8", "surrogateescape")).hexdigest()[:8]
        name = f"aploss_plugin_{path.stem}_{digest}"  # the same in every process
        if name in sys.modules:
            continue
        specification = importlib.util.spec_from_file_location(name, path)
        if specification is None or specification.loader is None or not path.is_file():
            raise ConfigError(f"plugin {file}: not a Python file")
        module = importlib.util.module_from_spec(specification)
        sys.modules[name] = module  # pickle and dataclasses look it up there
        try:
            specification.loader.exec_module(module)
        except Exception as error:
            del sys.modules[name]
            raise ConfigError(f"plugin {file}: {type(error).__name__}: {error}") from error
