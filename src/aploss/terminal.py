"""Output that is safe on any terminal: no control sequences of a dataset's names, and no encoding errors."""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

# Control characters except tab and line feed, Unicode's overrides of the writing direction, and unpaired surrogates,
# from JSON or a file name that is not UTF-8, which cannot be written.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    r"""The text with control characters and unpaired surrogates as visible escapes.

    Example:
        >>> print(printable("\x1b[31mred\n"), end="")
        \x1b[31mred
    """
    return _UNPRINTABLE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


class PrintableStream:
    """A text stream that writes printable text; ``terminal`` is the stream it writes to."""

    def __init__(self, terminal: TextIO) -> None:
        self.terminal = terminal

    def write(self, text: str) -> int:
        """Writes the text with control characters as escapes."""
        return self.terminal.write(printable(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.terminal, name)


@contextmanager
def printable_output() -> Iterator[None]:
    """Makes everything that is printed safe: class and file names, error messages, warnings, tracebacks.

    Characters that the encoding of the output lacks are written as escapes.
    """
    streams = sys.stdout, sys.stderr
    for stream in streams:
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    sys.stdout, sys.stderr = map(PrintableStream, streams)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = streams


def terminal(stream: TextIO) -> TextIO:
    """The stream for a progress bar, which needs control sequences."""
    return getattr(stream, "terminal", stream)
