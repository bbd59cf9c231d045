"""The names that other tools have for the settings people change first: ``--epochs``, ``--steps``, ``--lr`` ..."""

from typing import Any

from jsonargparse import ArgumentParser, Namespace

from aploss.errors import ConfigError
from aploss.training.config import TrainConfig

# Option → what it is short for.
LONG_FORMS = {
    "epochs": ("schedule.length", "schedule.unit"),
    "steps": ("schedule.length", "schedule.unit"),
    "lr": ("optimizer.learning_rate",),
    "batch_size": ("batches.size",),
    "image_size": ("batches.image_size",),
}


def add_familiar(parser: ArgumentParser, *, steps: str = "length of the training in steps") -> None:
    """Adds the options; ``steps`` is the help line of ``--steps``."""
    parser.add_argument("--epochs", type=int, metavar="N", help="length of the training in passes over its images")
    parser.add_argument("--steps", type=int, metavar="N", help=steps)
    parser.add_argument("--lr", type=float, help="highest learning rate; short for --optimizer.learning-rate")
    parser.add_argument("--batch-size", type=int, metavar="N", help="images per step; short for --batches.size")
    parser.add_argument(
        "--image-size", metavar="SIZE", help="of training images, as 320 or 240x320 (height x width); testing follows"
    )


def familiar_changes(options: Namespace, config: TrainConfig) -> dict[str, Any]:
    """What the options change in a config, as nested values.

    Milestones keep their share of the length, and images are tested as much larger or smaller as they are trained.

    Raises:
        ConfigError: an option is given together with the setting that it is short for.
    """
    given = {name: options[name] for name in LONG_FORMS if options[name] is not None}
    if {"epochs", "steps"} <= given.keys():
        raise ConfigError("give --epochs or --steps, not both")
    for name in given:
        _refuse_both(options, name)
    changes: dict[str, Any] = {}
    for unit in given.keys() & {"epochs", "steps"}:
        schedule, length = config.schedule, given[unit]
        milestones = [length / schedule.length * one for one in schedule.milestones]
        if unit == "steps":
            milestones = [float(round(one)) for one in milestones]
        changes["schedule"] = {"length": length, "unit": unit, "milestones": milestones}
    if "lr" in given:
        changes["optimizer"] = {"learning_rate": given["lr"]}
    if "batch_size" in given:
        changes["batches"] = {"size": given["batch_size"]}
    if "image_size" in given:
        size = _size(given["image_size"])
        changes.setdefault("batches", {})["image_size"] = size
        if "test_size" not in _given(options, "model.options"):
            changes["model"] = {"options": {"test_size": _test_size(size, config)}}
    return changes


def _refuse_both(options: Namespace, name: str) -> None:
    for key in LONG_FORMS[name]:
        if options.get(key) is not None:
            short, long = (f"--{one.replace('_', '-')}" for one in (name, key))
            raise ConfigError(f"{short} and {long} are the same setting: give one of them")


def _given(options: Namespace, key: str) -> Any:
    return options.get(key) or {}


def _size(text: str) -> int | list[int]:
    sides = text.strip("[]() ").lower().replace(",", "x").split("x")
    if len(sides) > 2 or not all(side.strip().isdecimal() for side in sides):
        raise ConfigError(f"--image-size {text}: write 320, or 240x320 for height x width")
    return int(sides[0]) if len(sides) == 1 else [int(side) for side in sides]


def _test_size(size: int | list[int], config: TrainConfig) -> list[int]:
    from aploss.detectors.build import DETECTORS

    before = config.batches.image_size
    factor = min(_sides(size)) / min(_sides(before))
    shorter, longest = config.model.options.get("test_size", DETECTORS.get(config.detector).test_size)
    shape = max(_sides(size)) / min(_sides(size))  # of the training images, which the limit must let through
    return [round(factor * shorter), max(round(factor * longest), round(factor * shorter * shape))]


def _sides(size: int | list[int] | tuple[int, int]) -> list[int]:
    return [size] if isinstance(size, int) else [*size]
