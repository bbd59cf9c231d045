"""``reproduce``: the runs and the page of a table or figure of the paper."""

from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any, Literal

from aploss.errors import ConfigError
from aploss.evaluation import HEADLINE_METRICS
from aploss.experiments.compare import compare
from aploss.experiments.paper import EPOCH_IMAGES, MEASURED_ON, REPRODUCTIONS, TEST_SPLIT, Reproduction, Row
from aploss.experiments.plan import Plan, Search, Variant, changed, comparison_config, describe_plan, more_seeds
from aploss.experiments.results import Results
from aploss.reports.comparison import Comparison
from aploss.training.config import TrainConfig, merge
from aploss.training.distributed import choose_device

CURVE_POINTS = 10  # of AP during training, as in Figure 5a
SEEDS = {"small": (0, 1, 2), "paper": (0,)}  # the paper names none
PAPER_GPUS = 2  # Section 4.1: 2 GPUs with 8 images each, and each ranks its own; here one after the other
# The authors' box loss, as in the paper's recipes, instead of the one of the recipes for a CPU.
PAPER_BOXES = {"criterion": {"box_loss": "paper-smooth-l1", "box_weight": 1.0}}
SMALL_SCALE = (
    "This is the small scale: a detector with few parameters, trained from scratch for minutes on small images. The "
    "paper's numbers come from large pretrained networks on other data, so that levels cannot be compared with them; "
    "the order and the differences can."
)
WHICH_AP50 = (
    "AP50 is COCO's, the precision averaged over 101 recalls; voc_AP50, on VOC, is VOC 2007's, averaged over 11 "
    "recalls. The paper does not say which of them its AP50 is; the authors' code has the one of VOC 2007."
)


@dataclass(frozen=True, kw_only=True)
class Request:
    """The options of ``aploss reproduce``."""

    scale: Literal["small", "paper"] = "small"  # minutes on a CPU, or the paper's own settings
    benchmark: Literal["voc", "voc12", "coco"] = "voc"  # the paper's dataset: its numbers and, at its scale, recipes
    data: str | None = None  # folder of the data; built-in data by default at small scale
    recipe: str | None = None  # settings of the small scale; demo for built-in data, else bccd-cpu
    seeds: tuple[int, ...] | None = None  # by default three at small scale, one at the paper's
    max_seeds: int | None = None  # more of them until every claim is decided
    steps: int | None = None  # length of the runs at small scale
    tune: bool = True  # search for learning rates at small scale, if losses are compared
    tune_steps: int | None = None  # length of a trial of that search
    device: str = "auto"

    def __post_init__(self) -> None:
        for name in ("recipe", "steps", "tune_steps"):
            if getattr(self, name) is not None and not self.is_small:
                option = f"--{name.replace('_', '-')}"
                raise ConfigError(f"{option} needs --scale small: the paper's scale has the paper's settings")

    @property
    def is_small(self) -> bool:
        """Whether this is the scale for a CPU."""
        return self.scale == "small"


def plan_for(name: str, request: Request) -> Plan:
    """The runs of a table or figure; ConfigError if the paper does not have it for this dataset."""
    entry = REPRODUCTIONS[name]
    if request.benchmark not in entry.benchmarks:
        raise ConfigError(f"{name} is in the paper for {', '.join(entry.benchmarks)} only")
    variants = [
        Variant(
            name=row.name,
            config=_config(entry, row, request),
            paper=row.paper.get(_numbers_of(entry, request), {}),
            measure=row.measure,
        )
        for row in [*entry.rows, *(entry.small_rows if request.is_small else ())]
    ]
    first = request.seeds or SEEDS[request.scale]
    seeds = more_seeds(first, request.max_seeds)
    if entry.first_seed_alone:
        seeds = first = first[:1]
    search = None
    if request.is_small and request.tune and entry.trial_steps is not None:
        search = Search(steps=request.tune_steps or min(entry.trial_steps, request.steps or entry.trial_steps))
    return Plan(variants=variants, seeds=seeds, search=search, first=len(first))


def _config(entry: Reproduction, row: Row, request: Request) -> TrainConfig:
    """The config of a row."""
    data = request.data or ("builtin" if request.is_small else "")
    own = {"device": request.device, "data": data}
    if request.is_small:
        recipe = request.recipe or ("demo" if data == "builtin" else "bccd-cpu")
        is_standard = request.recipe is None and data == "builtin"
        steps, layers = request.steps or (entry.steps if is_standard else None), [entry.small, row.small]
    else:
        recipe, steps = f"{request.benchmark}-{entry.recipe}", None
        layers = [entry.full, {"batches": {"size": row.batch, "accumulate": PAPER_GPUS}}]
    settings = reduce(merge, [PAPER_BOXES, entry.settings, row.settings, *layers, own])
    config = comparison_config(recipe, settings, steps=steps, validations=CURVE_POINTS)
    if entry.curves_on_test and not request.is_small:
        config = changed(config, {"splits": {"validation": TEST_SPLIT[request.benchmark]}})
    if entry.curve_points:
        run_steps = _run_images(entry, config, request) // (config.batches.size * config.batches.accumulate)
        config = changed(config, {"checkpoint_steps": max(1, run_steps // entry.curve_points)})
    return config


def _run_images(entry: Reproduction, config: TrainConfig, request: Request) -> int:
    """The images of a run."""
    unit = config.batches.size * config.batches.accumulate
    if config.schedule.unit == "epochs":
        unit = entry.epoch_images or EPOCH_IMAGES[request.benchmark]
    return config.schedule.length * unit


def _numbers_of(entry: Reproduction, request: Request) -> str:
    """The dataset whose numbers are shown beside the measured ones."""
    return (request.is_small and entry.small_benchmark) or request.benchmark


def page_for(name: str, request: Request, results: Results) -> Comparison:
    """The page of a table or figure."""
    entry = REPRODUCTIONS[name]
    numbers_of = _numbers_of(entry, request)
    more, scale = (entry.small_summary, SMALL_SCALE) if request.is_small else (entry.paper_summary, "")
    split = "test" if entry.curves_on_test and not request.is_small else "validation"
    metrics = entry.metrics.get(numbers_of, HEADLINE_METRICS)
    notes = [entry.notes, scale]
    if metrics == HEADLINE_METRICS and numbers_of == "voc":
        notes.insert(0, WHICH_AP50)
        if any(variant.config.evaluation.voc_year for variant in results.plan.variants):
            metrics = ("AP", "AP50", "voc_AP50", "AP75")
    names = {variant.name for variant in results.plan.variants}
    claims = [
        results.verdict(first, second, by=by, metric=metrics[0])
        for first, second, by in entry.claims
        if second in names
    ]
    return results.comparison(
        title=entry.title,
        summary=" ".join(filter(None, [entry.summary, more])),
        metrics=metrics,
        reference=entry.reference,
        verdicts=[*claims, *entry.verdicts(results)],
        notes="\n\n".join(filter(None, notes)),
        paper=entry.measured_on.get(numbers_of, MEASURED_ON[numbers_of]),
        sections=entry.sections(results),
        row_name=entry.row_name,
        curve_label=entry.curve_label or f"AP on {split}",
    )


def reproduce(name: str, request: Request, out: str | Path, **options: Any) -> Results:
    """Trains what a table or figure needs and writes its page, as :func:`~aploss.experiments.compare.compare` does."""
    return compare(plan_for(name, request), out, lambda results: page_for(name, request, results), **options)


def default_out(name: str, request: Request) -> Path:
    """The default folder of a page."""
    data = request.data or ("builtin" if request.is_small else request.benchmark)
    return Path("runs") / f"{name}-{request.scale}-{Path(data).resolve().stem}"


def check_start(request: Request, *, start_anyway: bool) -> None:
    """Raises a ConfigError for the paper's scale without data, or on a CPU unless ``start_anyway``."""
    if request.is_small:
        return
    if choose_device(request.device).type == "cpu" and not start_anyway:
        raise ConfigError("the paper's scale takes months on a CPU: use a GPU, --scale small, or --yes to start anyway")
    if not request.data:
        raise ConfigError("the paper's scale needs --data: VOCdevkit with VOC2007 and VOC2012, or the folder of COCO")


def describe_reproduction(name: str, request: Request, *, workers: int = 1) -> str:
    """The runs of a reproduction with their commands, time and settings, without training any."""
    plan = plan_for(name, request)
    images = _run_images(REPRODUCTIONS[name], plan.variants[0].config, request)
    lines = [REPRODUCTIONS[name].title]
    if not request.is_small:
        command = f"aploss reproduce {name} --scale paper --benchmark {request.benchmark} --data {request.data}"
        lines += [f"1 GPU: {command}", f"8 GPUs, a run on each: {command} --workers 8 --gpus-per-run 1"]
    return "\n".join([*lines, describe_plan(plan, images=images, workers=workers)])
