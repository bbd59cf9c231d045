"""Names and types of all settings: for the parser of the command line and for YAML files."""

from collections.abc import Iterator
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from difflib import get_close_matches
from functools import cache
from typing import Any, Literal, get_args, get_origin, get_type_hints

from aploss.errors import ConfigError

__all__ = ["Setting", "check_types", "settings_of"]


@dataclass(frozen=True)
class Setting:
    """One leaf of a config: dotted key, type, default and help line."""

    key: str
    type: Any
    default: Any
    help: str


@cache
def settings_of(config_type: type, prefix: str = "") -> tuple[Setting, ...]:
    """The leaves of a config dataclass in order, groups opened."""
    return tuple(_leaves(config_type, prefix))


def _leaves(config_type: type, prefix: str) -> Iterator[Setting]:
    types = get_type_hints(config_type)
    for entry in fields(config_type):
        kind = types[entry.name]
        if is_dataclass(kind):
            yield from settings_of(kind, f"{prefix}{entry.name}.")  # type: ignore[arg-type]
        else:
            help_text = entry.metadata["help"]
            yield Setting(prefix + entry.name, kind, _default(entry), help_text)


def _default(entry: "Field[Any]") -> Any:
    return entry.default if entry.default_factory is MISSING else entry.default_factory()


def check_types(config_type: type, values: Any) -> Any:
    """An instance of a config dataclass from nested plain values.

    Raises:
        ConfigError: for a key that does not exist or a value of the wrong type, by name.
    """
    flat = dict(_flatten(config_type, values, ""))
    return _build(config_type, flat, "")


def _flatten(config_type: type, values: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    if not isinstance(values, dict):
        where = f"{prefix[:-1]} must be" if prefix else "a config must be"
        raise ConfigError(f"{where} a mapping of keys to values, got {values!r}")
    types = get_type_hints(config_type)
    names = [entry.name for entry in fields(config_type)]
    for name, value in values.items():
        if name not in names:
            raise ConfigError(_unknown(prefix + str(name), [prefix + known for known in names]))
        if is_dataclass(types[name]):
            yield from _flatten(types[name], value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _unknown(key: str, known: list[str]) -> str:
    close = get_close_matches(key, known, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"known are {', '.join(known)}"
    return f"unknown key {key!r}; {hint}"


def _build(config_type: type, flat: dict[str, Any], prefix: str) -> Any:
    types = get_type_hints(config_type)
    arguments: dict[str, Any] = {}
    for entry in fields(config_type):
        key = prefix + entry.name
        if is_dataclass(types[entry.name]):
            arguments[entry.name] = _build(types[entry.name], flat, f"{key}.")
        elif key in flat:
            arguments[entry.name] = _typed(key, types[entry.name], flat[key])
    return config_type(**arguments)


def _typed(key: str, kind: Any, value: Any) -> Any:
    parser = _parser_of(kind)
    try:
        return parser.parse_object({"value": value}).value
    except Exception as error:  # jsonargparse has several error types, depending on its version
        raise ConfigError(f"{key} must be {_type_name(kind)}, got {value!r}") from error


@cache
def _parser_of(kind: Any) -> Any:
    from jsonargparse import ArgumentParser

    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--value", type=kind)
    return parser


def _type_name(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(map(str, get_args(kind)))
    if type(None) in get_args(kind):
        inner = [_type_name(part) for part in get_args(kind) if part is not type(None)]
        return " or ".join([*inner, "null"])
    names = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
    origin = get_origin(kind) or kind
    return names.get(origin, {dict: "a mapping", tuple: "a list"}.get(origin, str(kind)))
