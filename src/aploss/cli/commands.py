"""Every command with its options and examples as one text, and the parser that it gives.

Nothing here imports torch unless help must list names, so that help and wrong options are answered at once; the modules
that carry commands out import what they need.
"""

import re
from argparse import SUPPRESS, ArgumentParser, ArgumentTypeError, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from aploss.errors import ConfigError, did_you_mean

# A paragraph for each command: the module of aploss.cli whose function ``run_NAME(options)`` carries it out and what it
# does; an argument per line, in order; examples after "$". An option without a value is a flag. TYPES has the types of
# values; other values are text, and {a,b} are choices; "..." stands for several values. A rule may follow in brackets.
TEXT = """
aploss demo (train): train on built-in data in a few minutes, and show the result
  --loss LOSS        classification loss; aploss train --help lists them [default: ap]
  --seed SEED        seed of initial weights and data order [default: 0]
  --out DIR          run folder; by default runs/demo, or the next free number
  $ aploss demo --loss focal --seed 1 --out runs/second-demo

aploss train (train): train a detector on VOC, COCO, YOLO or built-in data
  $ aploss train --data my-photos/ --loss ap --max-minutes 30
  $ aploss train --recipe voc-retinanet-r50 --data VOCdevkit --epochs 20 --lr 1e-3 --out runs/voc
  $ aploss train --resume --out runs/voc
  $ torchrun --nproc-per-node 8 -m aploss train --recipe coco-retinanet-r50 --data coco/

aploss eval (eval): evaluate a run on data, or a detections file against annotations
  run                run folder or checkpoint to evaluate on --data [optional]
  --data PATH        dataset to evaluate a run on: folder, file, or 'builtin'
  --split SPLIT      split of the dataset; by default test, else val
  --format FORMAT    format of the dataset, if it cannot be detected [default: auto]
  --ignore-unknown-classes  leave out objects of classes that the run does not know
  --device DEVICE    cpu, cuda, mps or auto [default: auto]
  --batch-size N     images per forward pass; by default as in validation
  --annotations FILE  ground truth as COCO annotation JSON
  --detections FILE  detections as COCO results JSON
  --metric {coco,voc07,voc12}  COCO, VOC2007 (11 points) or VOC2010 and later (area under the curve) [default: coco]
  --iou X            evaluate AP at this IoU only; by default 0.50:0.95 for coco and 0.5 for voc
  --max-detections N  detections per image and class (coco only); by default 100, or as many as the run returns
  --json             print only one JSON object
  --out DIR          folder for metrics.json and precision-recall curves
  $ aploss eval runs/demo --data VOCdevkit --split 2007_test --metric voc07 --json
  $ aploss eval --annotations instances_val2017.json --detections results.json --iou 0.7 --out scores/

aploss predict (predict): detect objects in images with a trained run
  run                run folder, checkpoint or ONNX file
  images ...         image files, folders or glob patterns
  --out DIR          folder for the results; by default runs/predict-RUN
  --threshold X|lrp  minimum score, 0 to report everything, or 'lrp' for the LRP-optimal threshold of each class; by
                     default the best F1 on validation, or 0 for a submission
  --submission {coco,voc}  write the result files of an evaluation server, and no pictures
  --annotations FILE  COCO file with the image and category ids of --submission coco
  --multi-scale      merge the detections of several image sizes, each also flipped; slower
  --device DEVICE    cpu, cuda, mps or auto [default: auto]
  --batch-size N     images per forward pass [default: 8]
  $ aploss predict runs/demo photos/
  $ aploss predict detector.onnx a.jpg "holiday/**/*.jpg" --out found/ --threshold 0.5
  $ aploss predict runs/coco test2017/ --submission coco --annotations image_info_test-dev2017.json
  $ aploss predict runs/voc VOC2012/JPEGImages/ --submission voc

aploss app (app): show the detections of one or two runs in the browser
  run                run folder, checkpoint or ONNX file
  other              a second one to compare with [optional]
  --port PORT        port on 127.0.0.1; 0 picks a free one [default: 7860]
  --device DEVICE    cpu, cuda, mps or auto [default: auto]
  $ aploss app runs/ap runs/focal --port 0

aploss export (small): export a trained run to ONNX
  run                run folder or checkpoint of a detector
  --out FILE.onnx    ONNX file to write [required]
  --size N           shorter side of images in pixels; by default the detector's test_size
  $ aploss export runs/demo --out detector.onnx --size 320

aploss data check (data): count the images and boxes of a dataset and list every problem
  path               folder, COCO JSON file, YOLO data.yaml, or 'builtin'
  --format FORMAT    auto, coco, voc, yolo, or the format of a plugin [default: auto]
  --classes NAMES    comma-separated class names; other classes are reported as unknown
  --pixels           decode every image, which finds damaged ones; by default only headers are read
  --json             print one JSON object, and write no page
  --out FILE.html    page; by default runs/check-DATA.html
  $ aploss data check mine/data.yaml --pixels --classes RBC,WBC,Platelets --json

aploss data show (data): draw a contact sheet with the boxes
  path               folder, COCO JSON file, YOLO data.yaml, or 'builtin'
  --format FORMAT    auto, coco, voc, yolo, or the format of a plugin [default: auto]
  --split SPLIT      split of the dataset; all by default
  --augment {paper,light,none}  show images as this augmentation preset produces them for training
  --count N          number of images [default: 16]
  --seed SEED        seed of the choice and the augmentation [default: 0]
  --out FILE         picture; by default runs/show-DATA-SPLIT.png
  $ aploss data show VOCdevkit --split 2007_trainval --augment paper --out voc.png

aploss data convert (data): convert a dataset to another format
  path               folder, COCO JSON file, YOLO data.yaml, or 'builtin'
  --format FORMAT    auto, coco, voc, yolo, or the format of a plugin [default: auto]
  --to FORMAT        coco, voc, yolo, or the format of a plugin [required]
  --out DIR          new folder; nothing is overwritten [required]
  $ aploss data convert coco/annotations/instances_val2017.json --to yolo --out coco-val-yolo

aploss compare (compare): train with several losses over several seeds, and compare
  losses ...         losses to compare, with options as in ap:delta=0.5; by default ap focal ce-ohem auc, or with --vary
                     the recipe's; aploss train --help lists them [optional]
  --vary KEY=A,B     setting to vary between rows, in all combinations [repeatable]
  --tune-over [LOSS:]KEY=A,B  setting, or option of one loss, to search together with the learning rate [repeatable]
  --data PATH        dataset; the built-in one by default
  --detector NAME    detector; the recipe's by default, see aploss train --help
  --recipe RECIPE    settings to start from, see aploss train --help; chosen for data and machine by default
  --seeds SEEDS      number of seeds, or a list: 0,1,2 [default: 3]
  --validations N    points of the curve of AP [default: 5]
  --runs DIR ...     compare finished runs without training; runs that differ only in the seed share a row
  $ aploss compare ap focal --data path/to/photos --steps 500
  $ aploss compare ap ap:delta=0.5 focal:gamma=1:alpha=0.5 --seeds-until-decided 10 --workers 4
  $ aploss compare ap focal --tune-over criterion.box_weight=1,3 --tune-over focal:gamma=1,2
  $ aploss compare --vary batches.size=4,8 --vary criterion.box_loss=smooth-l1,giou --no-tune
  $ aploss compare --runs runs/a runs/b

aploss reproduce (compare): reproduce a table or figure of the paper
  name {table1a,table1b,table1c,table2,table3,table4,figure5a,figure5b,figure6,figure7}  table or figure
  --scale {small,paper}  minutes on a CPU, or the paper's own settings [default: small]
  --benchmark {voc,voc12,coco}  dataset of the paper; voc12 is VOC 2012 test, trained on 07++12 [default: voc]
  --data PATH        dataset; built-in by default at small scale
  --recipe RECIPE    settings at small scale; by default demo for built-in data, else bccd-cpu
  --seeds SEEDS      number of seeds, or a list: 0,1,2; by default 3 at small scale, else 1
  --steps N          length of each training at small scale
  --yes              start the paper's scale even on a CPU
  $ aploss reproduce table2 --data path/to/bccd --steps 1000 --seeds 5 --seeds-until-decided 10
  $ aploss reproduce table3 --scale paper --benchmark coco --data coco/ --plan
  $ aploss reproduce table2 --scale paper --data VOCdevkit --workers 4 --gpus-per-run 1

aploss theory (small): verify the paper's theorems in experiments
  name {all,convergence,smoothed-failure,inseparable,consistency,imbalance,method}  which study [default: all]
  --seed SEED        seed of the random problems [default: 0]
  --out DIR          folder for the page [default: runs/theory]
  $ aploss theory smoothed-failure

aploss bench (small): benchmark the losses and the training step
  what {all,losses,training-step}  which benchmark [default: all]
  --quick            a short run with small sizes
  --out DIR          folder for the JSON files [default: runs/bench]
  $ aploss bench training-step --quick
"""
COMPARISON = """
  --plan             print the planned runs with their time, and exit
  --seeds-until-decided MAX  add seeds until every verdict is decided, to at most MAX; widens the intervals
  --workers N        runs at a time on this machine [default: 1]
  --ray ADDRESS      train on a Ray cluster: its address, or auto for the one that this machine belongs to
  --cpus-per-run N   CPUs and threads of a run
  --gpus-per-run X   GPUs of a run; may be a share of one
  --no-tune          use the recipe's learning rate instead of searching one for each row; implied if it is given
  --tune-steps N     steps per search trial
  --out DIR          folder of the report and tables; by default runs/compare-... or runs/NAME-SCALE-DATA
  --cache DIR        folder of the runs; by default 'cache' next to --out
  --device DEVICE    auto, cpu, cuda, cuda:1, mps ... [default: auto]
"""
GENERAL = """
  --threads N        number of CPU threads; all cores by default
  --quiet            print only results, warnings and errors; training prints no results
  --plugin FILE.py   Python file that registers losses, detectors or data formats [repeatable]
  --debug            print the traceback of errors
"""


class Parser(ArgumentParser):
    """Accepts underscores for dashes in option names, and raises ConfigError instead of exiting."""

    def __init__(self, **options: Any) -> None:
        # Without abbreviations, a misspelt option never becomes another one.
        super().__init__(formatter_class=RawDescriptionHelpFormatter, allow_abbrev=False, **options)
        self.before_help: Callable[[Namespace], None] | None = None  # completes the help for the other options given

    def parse(self, arguments: Sequence[str]) -> Namespace:
        """Parses the arguments of a command; an unknown option raises ConfigError with the closest one."""
        end = list(arguments).index("--") if "--" in arguments else len(arguments)
        words = [self._known_option(word) if word.startswith("--") else word for word in arguments[:end]]
        others = [word for word in words if word not in ("-h", "--help")]
        if len(others) < len(words) and self.before_help is not None:
            self.before_help(self.parse_args(others))
        return self.parse_args([*words, *arguments[end:]])

    def _known_option(self, word: str) -> str:
        name, equals, value = word.partition("=")
        option, known = name.replace("_", "-"), self._option_string_actions
        mapping = option.rpartition(".")[0]
        if option not in known and mapping in known and mapping.endswith(".options"):  # an entry of a mapping
            self.add_argument(option, dest=name.removeprefix("--").replace("-", "_"), default=SUPPRESS)
        elif option not in known:
            suggestion = did_you_mean(option.removeprefix("--"), [one.removeprefix("--") for one in known], prefix="--")
            raise ConfigError(f"unknown option {name[:200]}{suggestion} (see {self.prog} --help)")
        return option + equals + value

    def error(self, message: str) -> NoReturn:
        """Raises the message of argparse as ConfigError."""
        raise ConfigError(f"{' '.join(message.split())} (see {self.prog} --help)")


def positive_int(text: str) -> int:
    """The argparse type of counts and sizes."""
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"expected a positive integer, got {text!r}")
    return int(text)


def _threshold(text: str) -> float | str:
    try:
        return text if text == "lrp" else float(text)
    except ValueError:
        raise ArgumentTypeError(f"expected a number or 'lrp', got {text!r}") from None


TYPES: dict[str, Callable[[str], Any]] = {
    "N": positive_int, "MAX": positive_int, "SEED": int, "PORT": int, "X": float, "X|lrp": _threshold, "DIR": Path,
    "FILE": Path, "FILE.html": Path, "FILE.onnx": Path,
}  # fmt: skip
ARGUMENT = re.compile(
    r"(\S+)(?: (?!\.\.\.)(\S+))?( \.\.\.)? {2,}(.+?)(?: \[(default: (.+)|optional|repeatable|required)\])?"
)


def add_arguments(group: Any, text: str) -> None:
    """Adds the arguments that a text like :data:`TEXT` describes to a parser or a group of options."""
    for line in re.sub(r"\n {10,}", " ", text).strip().splitlines():
        name, value, several, about, rule, default = ARGUMENT.fullmatch(line.strip()).groups()  # type: ignore[union-attr]
        if value is None and name.startswith("--"):
            group.add_argument(name, action="store_true", help=about)
            continue
        kind = TYPES.get(value or "", str)
        options: dict[str, Any] = {"type": kind, "help": f"{about} [{rule}]" if default else about, "metavar": value}
        if value is not None and value.startswith("{"):
            options |= {"choices": value.strip("{}").split(","), "metavar": None}
        if default is not None:
            options["default"] = kind(default)
        if rule == "repeatable":
            options |= {"action": "append", "default": [], "help": f"{about}; may be repeated"}
        elif rule == "required":
            options["required"] = True
        elif several or (rule and not name.startswith("--")):
            options["nargs"] = "?" if not several else "*" if rule else "+"
        group.add_argument(name, **options)


class Command(NamedTuple):
    """A command of :data:`TEXT`."""

    module: str
    summary: str
    arguments: str
    examples: str


def _read_commands(text: str) -> dict[tuple[str, ...], Command]:
    commands = {}
    for paragraph in text.strip().split("\n\n"):
        head, *lines = paragraph.splitlines()
        words, module, summary = re.fullmatch(r"aploss (.+) \((\w+)\): (.+)", head).groups()  # type: ignore[union-attr]
        examples = [line.replace("$ ", "", 1) for line in lines if line.startswith("  $ ")]
        arguments = [line for line in lines if not line.startswith("  $ ")]
        commands[tuple(words.split())] = Command(module, summary, "\n".join(arguments), "\n".join(examples))
    return commands


COMMANDS = _read_commands(TEXT)


def make_parser(words: tuple[str, ...]) -> Parser:
    """Builds the parser of the command with these words, such as ``("data", "check")``."""
    command = COMMANDS[words]
    description = f"{command.summary[0].upper()}{command.summary[1:]}."
    parser = Parser(prog=f"aploss {' '.join(words)}", description=description, epilog=f"examples:\n{command.examples}")
    add_arguments(parser, command.arguments)
    if command.module == "compare":
        add_arguments(parser, COMPARISON)
    if words in (("train",), ("compare",)):
        from aploss.cli import train

        train.add_train_options(parser) if words == ("train",) else train.add_compare_options(parser)
    add_arguments(parser.add_argument_group("general"), GENERAL)
    return parser
