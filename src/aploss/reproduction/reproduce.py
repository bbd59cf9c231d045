"""``reproduce``: a table or figure of the paper, from its runs to its page."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from aploss.errors import ConfigError
from aploss.reproduction.compare import carry_out
from aploss.reproduction.estimate import describe_days, estimated_days
from aploss.reproduction.execute import runs_of
from aploss.reproduction.plan import Plan
from aploss.reproduction.registry import reproduction
from aploss.reproduction.request import Reproduction, Request
from aploss.reproduction.results import Results
from aploss.training.config import TrainConfig, config_to_dict, differing_keys
from aploss.training.hardware import choose_device

__all__ = [
    "check_time",
    "default_out",
    "describe_plan",
    "describe_work",
    "plan_for",
    "reproduce",
]


def plan_for(name: str, request: Request) -> tuple[Reproduction, Plan]:
    """A reproduction and the runs it needs.

    Raises:
        ConfigError: there is no such one, or the paper has it not for this data set.
    """
    chosen = reproduction(name)
    if request.benchmark not in chosen.benchmarks:
        raise ConfigError(f"{name} is in the paper for {', '.join(chosen.benchmarks)} only")
    return chosen, chosen.plan(request)


def reproduce(
    name: str,
    request: Request,
    out: str | Path | None = None,
    *,
    cache: str | Path | None = None,
    max_minutes: float | None = None,
    quiet: bool = True,
    command: str | None = None,
) -> Results:
    """Trains what a table or figure needs and writes its page.

    Args:
        name: one of :data:`~aploss.reproduction.registry.REPRODUCTIONS`.
        request: scale, data, seeds.
        out: folder of the page; by default of :func:`default_out`.
        cache: see :func:`~aploss.reproduction.compare.compare`, as the others.

    Returns:
        The runs and what follows from them.
    """
    chosen, plan = plan_for(name, request)
    return carry_out(
        plan,
        Path(out) if out is not None else default_out(name, request),
        lambda results: chosen.text(request, results),
        cache=cache,
        max_minutes=max_minutes,
        quiet=quiet,
        command=command,
    )


def default_out(name: str, request: Request) -> Path:
    """Where a page goes that was given no folder.

    Example:
        >>> str(default_out("table2", Request(data="data/bccd")))
        'runs/table2-small-bccd'
    """
    data = request.data or ("builtin" if request.is_small else request.benchmark)
    words = data if data == "builtin" else Path(data).resolve().stem
    return Path("runs") / f"{name}-{request.scale}-{words}"


def check_time(
    name: str, request: Request, say: Callable[[str], Any], *, start_anyway: bool
) -> None:
    """Says how long the paper's scale takes here, and refuses it on a CPU.

    Raises:
        ConfigError: no GPU, and the user did not insist; or no data.
    """
    if request.is_small:
        return
    work = describe_work(name, request)
    if choose_device(request.device).type == "cpu" and not start_anyway:
        raise ConfigError(f"{work}; use a GPU, --scale small, or --yes to start anyway")
    if not request.data:
        where = {"voc": "VOCdevkit (VOC2007 and VOC2012)", "coco": "COCO"}[request.benchmark]
        raise ConfigError(f"the paper's scale needs --data with the folder of {where}")
    say(work)


def describe_work(name: str, request: Request) -> str:
    """How many trainings a reproduction is, and how long they take on this machine."""
    chosen, plan = plan_for(name, request)
    days = estimated_days(plan, chosen.epoch_images[request.benchmark]) / request.processes
    scale = "small scale" if request.is_small else "the paper's scale"
    return (
        f"{name} at {scale}: {runs_of(plan)} trainings of {plan.variants[0].config.detector}, "
        f"about {describe_days(days)} on this {choose_device(request.device).type}"
    )


def describe_plan(name: str, request: Request) -> str:
    """The runs of a reproduction with all their settings, without training any."""
    chosen, plan = plan_for(name, request)
    first = plan.variants[0].config
    lines = [chosen.title, f"shows: {chosen.shows}", describe_work(name, request)]
    lines.append(f"seeds: {', '.join(map(str, plan.seeds))}")
    if plan.tuning is not None:
        factors = ", ".join(f"{factor:.3g}" for factor in plan.tuning.factors)
        lines.append(f"learning rates tried for each row: {factors} times the row's own")
    lines.append("rows, and what they have in place of the first one's settings:")
    for variant in plan.variants:
        differing = [
            f"{key} = {_setting(variant.config, key)}"
            for key in differing_keys(first, variant.config)
        ]
        lines.append(f"  {variant.name}: {'; '.join(differing) or 'the settings below'}")
    settings = yaml.safe_dump(config_to_dict(first), sort_keys=False)
    return "\n".join([*lines, "", settings.rstrip()])


def _setting(config: TrainConfig, key: str) -> Any:
    value: Any = config
    for name in key.split("."):
        value = getattr(value, name)
    return value
