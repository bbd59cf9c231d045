"""Recipes: YAML files of settings, in the package or the user's own.

A recipe has the keys of :class:`~aploss.training.config.TrainConfig`, and may have a section
``losses`` with the settings that apply only when that loss is trained::

    optimizer: {name: sgd, learning_rate: 0.001}
    losses:
      focal: {criterion: {options: {gamma: 2.0}}}

What is more particular wins: defaults, then recipe, then its section of the loss, then overrides.
"""

from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from aploss.errors import ConfigError
from aploss.training.config import TrainConfig, config_from_dict

__all__ = ["load_config", "merge", "read_recipe", "read_yaml", "recipe_names"]


def recipe_names() -> tuple[str, ...]:
    """The recipes of the package.

    Example:
        >>> "demo" in recipe_names()
        True
    """
    found = (Path(entry.name) for entry in files("aploss.recipes").iterdir())
    return tuple(sorted(path.stem for path in found if path.suffix == ".yaml"))


def load_config(recipe: str | None = None, overrides: dict[str, Any] | None = None) -> TrainConfig:
    """The full config of a recipe and what overrides it.

    Args:
        recipe: name of a packaged recipe or path of a YAML file; None for the defaults alone.
        overrides: nested values that win over the recipe; ``loss`` among them selects the
            recipe's section for it.

    Raises:
        ConfigError: for a recipe that does not exist, an unknown key or a wrong value.

    Example:
        >>> load_config("voc-ssd512", {"loss": "focal"}).criterion.options
        {'alpha': 0.25, 'gamma': 1.0}
    """
    overrides = overrides or {}
    if recipe is None:
        return config_from_dict(overrides)
    values = read_recipe(recipe)
    sections = values.pop("losses", None) or {}
    if not isinstance(sections, dict):
        raise ConfigError(f"recipe {recipe}: losses must be a mapping, got {sections!r}")
    loss = overrides.get("loss", values.get("loss", TrainConfig.loss))
    values = merge(values, sections.get(loss) or {})
    # On its own first, so that a mistake in the recipe is reported as the recipe's.
    config_from_dict(values, source=f"recipe {recipe}")
    return config_from_dict(merge(values, overrides))


def read_recipe(name: str) -> dict[str, Any]:
    """The values of a packaged recipe, or of a YAML file where the name is a path."""
    if name in recipe_names():
        return read_yaml(Path(str(files("aploss.recipes") / f"{name}.yaml")))
    path = Path(name)
    if path.suffix in (".yaml", ".yml") or path.is_file():
        return read_yaml(path)
    raise ConfigError(
        f"no recipe {name!r}; there are {', '.join(recipe_names())}, or name a .yaml file"
    )


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping a YAML file holds.

    Raises:
        ConfigError: if there is no such file, or it is not YAML or not a mapping.
    """
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"config file {path} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"config file {path} is not valid YAML: {reason}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"config file {path} must hold keys and values, got {values!r}")
    return values


def merge(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """``base`` with ``changes`` laid over it, groups merged key by key; neither is changed.

    Example:
        >>> merge({"a": 1, "group": {"b": 2, "c": 3}}, {"group": {"c": 4}})
        {'a': 1, 'group': {'b': 2, 'c': 4}}
    """
    merged = dict(base)
    for key, value in changes.items():
        if isinstance(value, dict) and isinstance(merged.get(key), dict):
            merged[key] = merge(merged[key], value)
        else:
            merged[key] = value
    return merged
