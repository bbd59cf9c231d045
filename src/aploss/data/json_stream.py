"""A large JSON object read piece by piece, so that memory holds one entry at a time."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

__all__ = ["iterate_entries"]

_CHUNK = 1 << 22  # characters
_SPACE = re.compile(r"[ \t\n\r]*")
_DECODER = json.JSONDecoder()


def iterate_entries(path: Path) -> Iterator[tuple[str, Any]]:
    """Yields what a file with one JSON object holds.

    Args:
        path: A UTF-8 file.

    Yields:
        (key, entry) for every entry of a list at the top level, and (key, value) for every other
        value. An empty list yields (key, None), so that its key is seen.

    Raises:
        ValueError: The file is not a JSON object (``json.JSONDecodeError``, or not UTF-8).

    Example:
        >>> import tempfile
        >>> file = Path(tempfile.mkdtemp(), "a.json")
        >>> _ = file.write_text('{"images": [{"id": 1}, {"id": 2}], "year": 2017}')
        >>> list(iterate_entries(file))
        [('images', {'id': 1}), ('images', {'id': 2}), ('year', 2017)]
    """
    with path.open(encoding="utf-8-sig") as file:
        text = _Window(file)
        text.expect("{")
        if text.peek() == "}":
            text.expect("}")
        else:
            yield from _members(text)
        if text.peek():
            raise text.error("Extra data")


def _members(text: "_Window") -> Iterator[tuple[str, Any]]:
    while True:
        key = text.value()
        if not isinstance(key, str):
            raise text.error("Expecting property name enclosed in double quotes")
        text.expect(":")
        if text.peek() == "[":
            yield from ((key, entry) for entry in _elements(text))
        else:
            yield key, text.value()
        if text.expect(",}") == "}":
            return


def _elements(text: "_Window") -> Iterator[Any]:
    text.expect("[")
    if text.peek() == "]":
        text.expect("]")
        yield None
        return
    while True:
        yield text.value()
        if text.expect(",]") == "]":
            return


class _Window:
    """The part of a file around the place where the parser is."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file
        self._text = ""
        self._position = 0
        self._before = 0  # characters that were read and forgotten

    def peek(self) -> str:
        """The next character that is not space; empty at the end of the file."""
        while True:
            match = _SPACE.match(self._text, self._position)
            assert match is not None
            self._position = match.end()
            if self._position < len(self._text):
                return self._text[self._position]
            if not self._more():
                return ""

    def expect(self, characters: str) -> str:
        """Steps over the next character, which must be one of these."""
        found = self.peek()
        if not found or found not in characters:
            raise self.error(f"Expecting {' or '.join(map(repr, characters))}")
        self._position += 1
        return found

    def value(self) -> Any:
        """Reads one value; one that seems broken may only be cut off by the window's end."""
        self.peek()
        while True:
            try:
                value, end = _DECODER.raw_decode(self._text, self._position)
            except json.JSONDecodeError as error:
                if self._more():
                    continue
                self._position = max(error.pos, self._position)
                raise self.error(error.msg) from None
            except RecursionError:
                raise self.error("Too deeply nested") from None
            # A number at the very end of the window may go on behind it.
            if end == len(self._text) and self._more():
                continue
            self._position = end
            return value

    def error(self, message: str) -> ValueError:
        return ValueError(f"{message} at character {self._before + self._position}")

    def _more(self) -> bool:
        """Reads on, forgetting what lies behind; False at the end of the file."""
        chunk = self._file.read(max(_CHUNK, len(self._text) - self._position))
        self._before += self._position
        self._text = self._text[self._position :] + chunk
        self._position = 0
        return bool(chunk)
