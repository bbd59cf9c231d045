"""The errors a user can cause, so that the command line can print them as one line."""

import difflib
from collections.abc import Iterable

__all__ = ["AplossError", "ConfigError", "DataError", "RunError"]


class AplossError(Exception):
    """Something the user can put right: the message says what, where and how.

    Attributes:
        exit_code: what the command line ends with.
    """

    exit_code = 2


class DataError(AplossError, ValueError):
    """A dataset, annotation or image that cannot be used."""


class ConfigError(AplossError, ValueError):
    """A setting that does not exist or has a value it cannot have."""


class RunError(AplossError, RuntimeError):
    """A training run that cannot start, go on or be read."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The end of a message about a name that does not exist; empty where none is like it.

    Example:
        >>> did_you_mean("fokal", ["ap", "focal"])
        "; did you mean 'focal'?"
    """
    close = difflib.get_close_matches(word, [*known], n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
