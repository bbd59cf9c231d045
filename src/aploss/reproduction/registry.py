"""The tables and figures of the paper by name."""

from importlib import import_module

from aploss.errors import ConfigError
from aploss.reproduction.request import Reproduction

__all__ = ["REPRODUCTIONS", "reproduction"]

# In the order of the paper; each is a module of this package.
REPRODUCTIONS = (
    "table1a", "table1b", "table1c", "table2", "figure4a", "figure4b", "figure5", "table3",
    "table4",
)  # fmt: skip


def reproduction(name: str) -> Reproduction:
    """The table or figure of a name.

    Raises:
        ConfigError: there is none.

    Example:
        >>> reproduction("table1b").title
        'Table 1b: the width delta of the step function'
    """
    if name not in REPRODUCTIONS:
        raise ConfigError(f"there is no {name!r}; choose one of: {', '.join(REPRODUCTIONS)}")
    found: Reproduction = import_module(f"aploss.reproduction.{name}").REPRODUCTION
    return found
