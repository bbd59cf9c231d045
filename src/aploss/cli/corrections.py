"""A command as it was perhaps meant, for the line that answers a wrong one.

Knows what other tools call an option, writes ``data=x`` and ``-d x`` as ``--data x``, and fills in what is missing.
"""

import re
import shlex
from argparse import Action
from collections.abc import Mapping, Sequence
from pathlib import Path

from aploss.cli.command import close_to, data_of, newest_run

# Option of other tools → ours: the first that the command has; with its value where theirs has none or another kind of
# value; a word without dashes is a place, as RUN; "" is to be left out.
OTHER_NAMES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("--model", "-m"), ("run", "--detector")),
    **dict.fromkeys(("--weights", "--checkpoint", "--ckpt", "--ckpt-path", "--load-from"), ("run", "--model.weights")),
    **dict.fromkeys(("--arch", "--network"), ("--detector",)),
    **dict.fromkeys(("--source", "--input", "--image", "-i"), ("images", "--image-size")),
    **dict.fromkeys(("--dataset-path", "--data-dir", "--data-root", "--train-data-dir"), ("--data", "path")),
    **dict.fromkeys(("--path", "--dataset", "--data-path"), ("--data", "path")),
    **dict.fromkeys(("--max-epochs", "--num-train-epochs", "--trainer.max-epochs"), ("--epochs",)),
    **dict.fromkeys(("--max-steps", "--iters", "--max-iters", "--iterations", "--max-iter"), ("--steps",)),
    **dict.fromkeys(("--bs", "--train-batch-size", "--per-device-train-batch-size"), ("--batch-size",)),
    **dict.fromkeys(("--img", "--imgsz", "--img-size", "--resolution"), ("--image-size", "--size", "")),
    **dict.fromkeys(("--work-dir", "--output-dir", "--name", "--project", "--save-dir"), ("--out",)),
    **dict.fromkeys(("--num-workers", "-j"), ("--batches.workers",)),
    **dict.fromkeys(("--amp", "--bf16"), ("--precision bfloat16",)),
    **dict.fromkeys(("--fp16", "--half"), ("--precision float16",)),
    **dict.fromkeys(("--gpu", "--gpus", "--num-gpus", "--cuda"), ("--device cuda",)),
    **dict.fromkeys(("--conf", "--confidence", "--conf-thres", "--score-thr", "--score-threshold"), ("--threshold",)),
    **dict.fromkeys(("--logger", "--report-to"), ("--tracker",)),
    **{f"--{name}": (f"--tracker {name}",) for name in ("wandb", "tensorboard", "mlflow")},
    **{f"--{name}": (f"--criterion.options.{name}",) for name in ("delta", "gamma", "alpha")},
    **dict.fromkeys(("--scheduler", "--lr-scheduler", "--lr-scheduler-type"), ("--schedule.kind",)),
    **dict.fromkeys(("--verbose", "-v", "--save", "--show", "--exist-ok", "--iou", "--opts", "--cfg-options"), ("",)),
    "--wd": ("--optimizer.weight-decay",),
    "--optim": ("--optimizer.name",),
    "--pretrained": ("--model.weights coco",),
    "--freeze": ("--model.frozen-backbone true",),
    "--aug": ("--batches.augmentation", "--augment"),
    "--resume-from": ("--resume --out",),
    "--save-txt": ("--labels yolo",),
    "--format": ("--to", "--out"),  # of files that are written, where nothing is read in several
}
# Value of another tool for an option of ours.
OTHER_VALUES = {
    "--out": {"onnx": "model.onnx", "openvino": "model.xml", "torchscript": "model.ts"},
    "--optimizer.name": {"SGD": "sgd", "AdamW": "adamw", "Adam": "adamw", "adam": "adamw"},
}


def our_name(name: str, known: Sequence[str], places: Sequence[str] = ()) -> str | None:
    """The option or place that was perhaps meant, with its value where that is part of it; None for no idea.

    One that others call so, one whose last part it is, one that begins with it, or one that is spelt alike.

    Example:
        >>> our_name("--batch", ["--batch-size", "--data"]), our_name("--rate", ["--optimizer.rate"])
        ('--batch-size', '--optimizer.rate')
        >>> our_name("-d", ["--data", "--debug"]), our_name("--weights", ["--out"], ["run"])
        ('--data', 'run')
    """
    name = name.replace("_", "-")
    if name in known:
        return name
    groups = [one for one in known if one.endswith(".options")]  # their names below are those of Python
    for ours in OTHER_NAMES.get(name, ()):
        option = ours.partition(" ")[0]
        if not ours or option in (*known, *places) or option.startswith(tuple(f"{one}." for one in groups)):
            return ours
    if name.removeprefix("--") in places:
        return name.removeprefix("--")
    if not name.startswith("--"):  # -d
        return next((one for one in known if one.startswith(f"-{name}")), None) if len(name) == 2 else None
    by_ending = [one for one in known if one.endswith(f".{name.removeprefix('--')}")]
    by_start = [one for one in known if one.startswith(f"{name}-")]
    return next(iter([*by_ending, *by_start, *close_to(name, known)]), None)


def as_option(word: str) -> str:
    """``data=x`` as ``--data=x``, and everything else as it is; losses as ``ap:delta=1`` and files are else."""
    return f"--{word}" if re.match(r"[A-Za-z][\w.]*=", word) and not Path(word).exists() else word


def is_option(word: str) -> bool:
    """Whether a word is an option, short ones among them, and no negative number."""
    return re.match(r"--?[A-Za-z]", word) is not None


def corrected(actions: Sequence[Action], words: Sequence[str], examples: Mapping[str, str]) -> str | None:
    """The words of a command with our names and with all that it needs; None where that cannot be told.

    Args:
        actions: of the command's parser.
        words: as they were given.
        examples: what to fill in where nothing is given, by option or place.
    """
    known = {name: action for action in actions for name in action.option_strings}
    places = [action for action in actions if not action.option_strings]
    dests = [place.dest for place in places]
    left, bare, options = list(words), list[str](), list[str]()
    placed: dict[str, list[str]] = {}
    while left:
        word = left.pop(0)
        name, equals, value = as_option(word).partition("=")
        ours = our_name(name, [*known], dests) if is_option(name) else None
        if ours is None and is_option(word):
            return None
        if ours is None:
            bare.append(word)
            continue
        *fixed, last = ours.split() or [""]
        if (fixed or not last) and left and re.fullmatch(r"[\d.,]+", left[0]):
            left.pop(0)  # how many GPUs, which layers, the IoU of what is left out
        takes = last in dests or (last.startswith("--") and (last not in known or known[last].nargs != 0))
        given = [value] if equals else left[: int(takes)]
        left = left[0 if equals else len(given) :]
        given = [OTHER_VALUES.get(last, {}).get(one, one) for one in given]
        if last in dests:
            placed.setdefault(last, []).extend(given)
        elif last:
            options += [*fixed, last, *given]
    return _completed(places, bare, placed, options, known, examples)


def _completed(
    places: Sequence[Action],
    bare: list[str],
    placed: Mapping[str, list[str]],
    options: list[str],
    known: Mapping[str, Action],
    examples: Mapping[str, str],
) -> str | None:
    """Puts places first, gives words that are too many to the options of ``examples``, and adds these where missing."""
    if {"--annotations", "--detections"} & {*options}:
        examples = {}  # aploss eval scores a file, without a run
    result: list[str] = []
    for place in places:
        own = placed.get(place.dest, [])
        if not own:
            own = bare if place.nargs == "*" else bare[:1]
            bare = bare[len(own) :]
        if not own and (place.nargs is None or place.dest in examples):
            own = [examples.get(place.dest, place.dest.upper())]
        result += shlex.split(newest_run()) if own == ["RUN"] else own
    for option, example in examples.items():
        if option in known and option not in options:
            own_data = data_of(result[0]) if option == "--data" else None
            options = [*options, option, bare.pop(0) if bare else own_data or example]
    return None if bare else shlex.join([*result, *options])
