"""A large JSON object read piece by piece, so that memory holds one entry at a time."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

__all__ = ["iterate_entries"]

_CHUNK = 1 << 22  # characters
_SPACE = re.compile(r"[ \t\n\r]*")
_IN_NUMBERS = ("", *"eE.+-0123456789")
_DECODER = json.JSONDecoder()


def iterate_entries(path: Path, *, unneeded: str | None = None) -> Iterator[tuple[str, Any]]:
    """Yields what a file with one JSON object holds.

    Args:
        path: A UTF-8 file.
        unneeded: A key whose lists of numbers may be left out of the entries. Three quarters of
            COCO's annotation files are outlines: not to parse them takes a third of the time.

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
        text = _Window(file, unneeded)
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
        yield from text.run()
        yield text.value()
        if text.expect(",]") == "]":
            return


class _Window:
    """The part of a file around the place where the parser is."""

    def __init__(self, file: IO[str], unneeded: str | None) -> None:
        self._file = file
        # No quotes or braces between the brackets: then they hold numbers and lists alone.
        key = None if unneeded is None else rf'"{re.escape(unneeded)}"\s*:\s*\[[^"{{}}]*\]'
        self._unneeded = None if key is None else (re.compile(key), f'"{unneeded}":0')
        self._text = ""
        self._position = 0
        self._before = 0  # characters that were read and forgotten
        self._ended = False
        self._tried = False  # whether run() had its turn with this window

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
            # A number at the window's end may go on behind it: 1e of 1e300 reads as 1.
            if self._text[end : end + 1] in _IN_NUMBERS and self._more():
                continue
            self._position = end
            return value

    def run(self) -> list[Any]:
        """Many elements of a list at once, each an object with a comma behind it.

        The text up to a ``},{`` near the window's end is taken for a list of its own. Where that
        is valid JSON, it is what the list goes on with; otherwise the cut was inside an object or
        behind the list's end, nothing is taken, and the elements are read one by one.
        """
        if len(self._text) - self._position < _CHUNK // 4:
            self._more()
        if self._tried:
            return []
        self._tried = True
        start = self._position
        end = self._text.rfind("},", start)
        while end > start and self._text[end + 2 : end + 40].lstrip()[:1] != "{":
            end = self._text.rfind("},", start, end)
        if end <= start:
            return []
        piece = self._text[start : end + 1]
        if self._unneeded is not None:
            pattern, replacement = self._unneeded
            piece = pattern.sub(replacement, piece)
        try:
            values: list[Any] = json.loads(f"[{piece}]")
        except (ValueError, RecursionError):
            return []
        self._position = end + 2
        return values

    def error(self, message: str) -> ValueError:
        return ValueError(f"{message} at character {self._before + self._position}")

    def _more(self) -> bool:
        """Reads on, forgetting what lies behind; False at the end of the file."""
        if self._ended:
            return False
        chunk = self._file.read(max(_CHUNK, len(self._text) - self._position))
        self._before += self._position
        self._text = self._text[self._position :] + chunk
        self._position = 0
        self._tried = self._tried and not chunk
        self._ended = not chunk
        return bool(chunk)
