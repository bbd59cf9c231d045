"""Recipes: YAML files of settings, packaged or written by the user.

A recipe has the keys of :class:`~aploss.training.config.TrainConfig`. It may extend another one (``extends``: the name
of a packaged recipe, or a file next to it), and may have a section ``losses`` with settings that apply only when that
loss is trained::

    extends: voc-retinanet-r50
    optimizer: {learning_rate: 0.002}
    losses:
      focal: {criterion: {options: {gamma: 1.5}}}

Later layers win: defaults, the extended recipe, the recipe itself, its section for the loss, overrides.
"""

import os
from functools import reduce
from importlib.resources import files
from pathlib import Path
from typing import Any

from aploss.errors import ConfigError
from aploss.files import load_yaml
from aploss.training.config import TrainConfig, config_from_dict


def recipe_names() -> tuple[str, ...]:
    """Returns the names of the packaged recipes; files that only serve as a base start with an underscore.

    Example:
        >>> "demo" in recipe_names()
        True
    """
    found = (Path(entry.name) for entry in files("aploss.recipes").iterdir())
    return tuple(sorted(path.stem for path in found if path.suffix == ".yaml" and not path.stem.startswith("_")))


def load_config(recipe: str | None = None, overrides: dict[str, Any] | None = None) -> TrainConfig:
    """Builds the config of a recipe with overrides.

    Args:
        recipe: name of a packaged recipe or path of a YAML file; None for the defaults alone.
        overrides: nested values that win over the recipe; ``loss`` selects the recipe's section for that loss.

    Raises:
        ConfigError: for an unknown recipe or key, or an invalid value.

    Example:
        >>> load_config("voc-ssd512", {"loss": "focal"}).criterion.options
        {'alpha': 0.25, 'gamma': 1.0}
    """
    overrides = overrides or {}
    if "warmup_steps" in (overrides.get("schedule") or {}):  # the user's own is not shortened
        overrides = merge({"schedule": {"exact_warmup": True}}, overrides)
    if recipe is None:
        return config_from_dict(overrides)
    values = read_recipe(recipe)
    sections = values.pop("losses", None) or {}
    if not isinstance(sections, dict):
        raise ConfigError(f"recipe {recipe}: losses must be a mapping, got {sections!r}")
    loss = overrides.get("loss", values.get("loss", TrainConfig.loss))
    section = sections.get(loss) or {}
    if not isinstance(section, dict):
        raise ConfigError(f"recipe {recipe}: losses.{loss} must be a mapping, got {section!r}")
    values = merge(values, section)
    # Validated on its own first, so that a mistake in the recipe is reported as such.
    config_from_dict(values, source=f"recipe {recipe}")
    return config_from_dict(merge(values, overrides))


def read_recipe(name: str) -> dict[str, Any]:
    """Reads a recipe by name or path and merges it over the recipes it extends."""
    chain: list[Path] = []
    layers: list[dict[str, Any]] = []
    base: Any = name
    while base is not None:
        if not isinstance(base, str):
            raise ConfigError(f"{chain[-1]}: extends must name one recipe or file, got {base!r}")
        path = _recipe_path(base, beside=chain[-1] if chain else None)
        if path in chain:
            circle = " extends ".join(entry.name for entry in [*chain[chain.index(path) :], path])
            raise ConfigError(f"recipe {name} extends itself: {circle}")
        chain.append(path)
        layers.append(read_yaml(path))
        base = layers[-1].pop("extends", None)
    return reduce(merge, reversed(layers))


def _recipe_path(name: str, *, beside: Path | None) -> Path:
    """Finds the file of a recipe; ``beside`` is the file that extends it, if any."""
    packaged = Path(str(files("aploss.recipes"))).resolve()
    own = beside is not None and beside.parent == packaged  # underscored bases are private to the package
    if name in recipe_names() or (own and (packaged / f"{name}.yaml").is_file()):
        return packaged / f"{name}.yaml"
    path = (Path() if beside is None else beside.parent) / name
    if path.suffix in (".yaml", ".yml") or path.is_file():
        if beside is not None and not path.is_file():
            raise ConfigError(f"{beside} extends {name!r}, but {path} does not exist")
        return Path(os.path.realpath(path))  # resolve() raises for a link to itself
    where = f"{beside} extends {name!r}: " if beside is not None else ""
    raise ConfigError(f"{where}no recipe {name!r}; choose from {', '.join(recipe_names())}, or a .yaml file")


def read_yaml(path: Path) -> dict[str, Any]:
    """Reads a mapping from a YAML file; raises ConfigError for anything else."""
    try:
        if path.exists() and not path.is_file():  # reading a pipe or device may never end
            raise ConfigError(f"config file {path} is a folder, pipe or device, not a file")
        values = load_yaml(path.read_text(encoding="utf-8"))
    except ConfigError:
        raise
    except OSError as error:
        raise ConfigError(f"config file {path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"config file {path} is not valid YAML: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"config file {path} must be a mapping of keys to values, got {values!r}")
    return values


def merge(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Merges ``changes`` over ``base``, nested mappings key by key; returns a new mapping.

    Example:
        >>> merge({"a": 1, "group": {"b": 2, "c": 3}}, {"group": {"c": 4}})
        {'a': 1, 'group': {'b': 2, 'c': 4}}
    """
    merged = dict(base)
    for key, value in changes.items():
        both = isinstance(value, dict) and isinstance(base.get(key), dict)
        merged[key] = merge(base[key], value) if both else value
    return merged
