"""Every command with its options and examples, declared with argparse.

Nothing here imports torch unless help must list names, so that help and wrong options are answered at once; the modules
that carry commands out import what they need.
"""

from argparse import SUPPRESS, ArgumentParser, ArgumentTypeError, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from aploss.errors import ConfigError, did_you_mean


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
            raise ConfigError(f"unknown option {name[:200]}{did_you_mean(option, known)} (see {self.prog} --help)")
        return option + equals + value

    def error(self, message: str) -> NoReturn:
        """Raises the message of argparse as ConfigError."""
        raise ConfigError(f"{' '.join(message.split())} (see {self.prog} --help)")


# --- types of values ---


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


COUNT: dict[str, Any] = {"type": positive_int, "metavar": "N"}
DIR: dict[str, Any] = {"type": Path, "metavar": "DIR"}
FILE: dict[str, Any] = {"type": Path, "metavar": "FILE"}
FLAG: dict[str, Any] = {"action": "store_true"}
MANY: dict[str, Any] = {"action": "append", "default": []}


# --- the options of each command; its docstring has a line for the help and examples ---

Add = Callable[..., Any]  # ArgumentParser.add_argument


def _demo(add: Add) -> None:
    """Train on built-in data in a few minutes, and show the result.

    aploss demo --loss focal --seed 1 --out runs/second-demo
    """
    add("--loss", default="ap", help="classification loss; aploss train --help lists them")
    add("--seed", type=int, default=0, help="seed of initial weights and data order")
    add("--out", **DIR, help="run folder; by default runs/demo, or the next free number")


def _train(add: Add) -> None:
    """Train a detector on VOC, COCO, YOLO or built-in data.

    aploss train --data my-photos/ --loss ap --max-minutes 30
    aploss train --recipe voc-retinanet-r50 --data VOCdevkit --epochs 20 --lr 1e-3 --out runs/voc
    aploss train --resume --out runs/voc
    torchrun --nproc-per-node 8 -m aploss train --recipe coco-retinanet-r50 --data coco/
    """


def _eval(add: Add) -> None:
    """Evaluate a run on data, or a detections file against annotations.

    aploss eval runs/demo --data VOCdevkit --split 2007_test --metric voc07 --json
    aploss eval --annotations instances_val2017.json --detections results.json --iou 0.7 --out scores/
    """
    add("run", nargs="?", help="run folder or checkpoint to evaluate on --data")
    add("--data", metavar="PATH", help="dataset to evaluate a run on: folder, file, or 'builtin'")
    add("--split", help="split of the dataset; by default test, else val")
    add("--format", default="auto", help="format of the dataset, if it cannot be detected")
    add("--ignore-unknown-classes", **FLAG, help="leave out objects of classes that the run does not know")
    add("--device", default="auto", help="cpu, cuda, mps or auto")
    add("--batch-size", **COUNT, help="images per forward pass; by default as in validation")
    add("--annotations", **FILE, help="ground truth as COCO annotation JSON")
    add("--detections", **FILE, help="detections as COCO results JSON")
    metric = "COCO, VOC2007 (11 points) or VOC2010 and later (area under the curve)"
    add("--metric", choices=["coco", "voc07", "voc12"], default="coco", help=metric)
    add("--iou", type=float, metavar="X", help="only AP at this IoU; by default 0.50:0.95 for coco, 0.5 for voc")
    add("--max-detections", **COUNT, help="per image and class, coco only; by default 100, or as many as a run returns")
    add("--json", **FLAG, help="print only one JSON object")
    add("--out", **DIR, help="folder for metrics.json and precision-recall curves")


def _predict(add: Add) -> None:
    """Detect objects in images with a trained run.

    aploss predict runs/demo photos/
    aploss predict detector.onnx a.jpg "holiday/**/*.jpg" --out found/ --threshold 0.5
    aploss predict runs/coco test2017/ --submission coco --annotations image_info_test-dev2017.json
    aploss predict runs/voc VOC2012/JPEGImages/ --submission voc
    """
    add("run", help="run folder, checkpoint or ONNX file")
    add("images", nargs="+", help="image files, folders or glob patterns")
    add("--out", **DIR, help="folder for the results; by default runs/predict-RUN")
    threshold = "minimum score (0: all), or 'lrp' for the LRP-optimal one per class; by default best F1, or 0 to submit"
    add("--threshold", type=_threshold, metavar="X|lrp", help=threshold)
    add("--submission", choices=["coco", "voc"], help="write the result files of an evaluation server, and no pictures")
    add("--annotations", **FILE, help="COCO file with the image and category ids of --submission coco")
    add("--multi-scale", **FLAG, help="merge the detections of several image sizes, each also flipped; slower")
    add("--device", default="auto", help="cpu, cuda, mps or auto")
    add("--batch-size", **COUNT, default=8, help="images per forward pass")


def _app(add: Add) -> None:
    """Show the detections of one or two runs in the browser.

    aploss app runs/ap runs/focal --port 0
    """
    add("run", help="run folder, checkpoint or ONNX file")
    add("other", nargs="?", help="a second one to compare with")
    add("--port", type=int, default=7860, help="port on 127.0.0.1; 0 picks a free one")
    add("--device", default="auto", help="cpu, cuda, mps or auto")


def _export(add: Add) -> None:
    """Export a trained run to ONNX.

    aploss export runs/demo --out detector.onnx --size 320
    """
    add("run", help="run folder or checkpoint of a detector")
    add("--out", type=Path, required=True, metavar="FILE.onnx", help="ONNX file to write")
    add("--size", **COUNT, help="shorter side of images in pixels; by default the detector's test_size")


def _add_source(add: Add) -> None:
    add("path", help="folder, COCO JSON file, YOLO data.yaml, or 'builtin'")
    add("--format", default="auto", help="auto, coco, voc, yolo, or the format of a plugin")


def _data_check(add: Add) -> None:
    """Count the images and boxes of a dataset and list every problem.

    aploss data check mine/data.yaml --pixels --classes RBC,WBC,Platelets --json
    """
    _add_source(add)
    add("--classes", metavar="NAMES", help="comma-separated class names; other classes are reported as unknown")
    add("--pixels", **FLAG, help="decode every image, which finds damaged ones; by default only headers are read")
    add("--json", **FLAG, help="print one JSON object, and write no page")
    add("--out", type=Path, metavar="FILE.html", help="page; by default runs/check-DATA.html")


def _data_show(add: Add) -> None:
    """Draw a contact sheet with the boxes.

    aploss data show VOCdevkit --split 2007_trainval --augment paper --out voc.png
    """
    _add_source(add)
    add("--split", help="split of the dataset; all by default")
    add("--augment", choices=["paper", "light", "none"], help="show images as augmented for training")
    add("--count", **COUNT, default=16, help="number of images")
    add("--seed", type=int, default=0, help="seed of the choice and the augmentation")
    add("--out", **FILE, help="picture; by default runs/show-DATA-SPLIT.png")


def _data_convert(add: Add) -> None:
    """Convert a dataset to another format.

    aploss data convert coco/annotations/instances_val2017.json --to yolo --out coco-val-yolo
    """
    _add_source(add)
    add("--to", required=True, metavar="FORMAT", help="coco, voc, yolo, or the format of a plugin")
    add("--out", **DIR, required=True, help="new folder; nothing is overwritten")


def _compare(add: Add) -> None:
    """Train with several losses over several seeds, and compare.

    aploss compare ap focal --data path/to/photos --steps 500
    aploss compare ap ap:delta=0.5 focal:gamma=1:alpha=0.5 --seeds-until-decided 10 --workers 4
    aploss compare ap focal --tune-over criterion.box_weight=1,3 --tune-over focal:gamma=1,2
    aploss compare --vary batches.size=4,8 --vary criterion.box_loss=smooth-l1,giou --no-tune
    aploss compare --runs runs/a runs/b
    """
    add("losses", nargs="*", help="names, with options as in ap:delta=0.5; with --vary by default the recipe's")
    add("--vary", **MANY, metavar="KEY=A,B", help="setting to vary between rows, in all combinations")
    add("--tune-over", **MANY, metavar="[LOSS:]KEY=A,B", help="setting or loss option to search with the learning rate")
    add("--data", metavar="PATH", help="dataset; the built-in one by default")
    add("--detector", metavar="NAME", help="detector; the recipe's by default, see aploss train --help")
    add("--recipe", help="settings to start from, see aploss train --help; chosen for data and machine by default")
    add("--seeds", default="3", help="number of seeds, or a list: 0,1,2")
    add("--validations", **COUNT, default=5, help="points of the curve of AP")
    add("--runs", nargs="+", metavar="DIR", help="compare finished runs; runs that differ only in the seed share a row")
    _add_comparison(add)


def _reproduce(add: Add) -> None:
    """Reproduce a table or figure of the paper.

    aploss reproduce table2 --data path/to/bccd --steps 1000 --seeds 5 --seeds-until-decided 10
    aploss reproduce table3 --scale paper --benchmark coco --data coco/ --plan
    aploss reproduce table2 --scale paper --data VOCdevkit --workers 4 --gpus-per-run 1
    """
    tables = ["table1a", "table1b", "table1c", "table2", "table3", "table4"]
    add("name", choices=[*tables, "figure5a", "figure5b", "figure6", "figure7"], help="table or figure")
    add("--scale", choices=["small", "paper"], default="small", help="minutes on a CPU, or the paper's own settings")
    add("--benchmark", choices=["voc", "voc12", "coco"], default="voc", help="voc12: VOC 2012 test, trained on 07++12")
    add("--data", metavar="PATH", help="dataset; built-in by default at small scale")
    add("--recipe", help="settings at small scale; by default demo for built-in data, else bccd-cpu")
    add("--seeds", help="number of seeds, or a list: 0,1,2; by default 3 at small scale, else 1")
    add("--steps", **COUNT, help="length of each training at small scale")
    add("--yes", **FLAG, help="start the paper's scale even on a CPU")
    _add_comparison(add)


def _add_comparison(add: Add) -> None:
    add("--plan", **FLAG, help="print the planned runs with their time, and exit")
    until = "add seeds until every verdict is decided, to at most N; widens the intervals"
    add("--seeds-until-decided", **COUNT, help=until)
    add("--workers", **COUNT, default=1, help="runs at a time on this machine")
    add("--ray", metavar="ADDRESS", help="train on a Ray cluster: its address, or auto for that of this machine")
    add("--cpus-per-run", **COUNT, help="CPUs and threads of a run")
    add("--gpus-per-run", type=float, metavar="X", help="GPUs of a run; may be a share of one")
    add("--no-tune", **FLAG, help="do not search a learning rate for each row: take the recipe's, or --lr")
    add("--tune-steps", **COUNT, help="steps per search trial")
    out = "folder of the report and tables; by default runs/compare-... or runs/NAME-SCALE-DATA"
    add("--out", dest="folder", **DIR, help=out)  # "out" is a setting of each run
    add("--cache", **DIR, help="folder of the runs; by default 'cache' next to --out")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1, mps ...")


def _theory(add: Add) -> None:
    """Verify the paper's theorems in experiments.

    aploss theory smoothed-failure
    """
    studies = ["all", "convergence", "smoothed-failure", "inseparable", "consistency", "imbalance", "method"]
    add("name", nargs="?", choices=studies, default="all", help="which study")
    add("--seed", type=int, default=0, help="seed of the random problems")
    add("--out", **DIR, default=Path("runs/theory"), help="folder for the page")


def _bench(add: Add) -> None:
    """Benchmark the losses and the training step.

    aploss bench training-step --quick
    """
    add("what", nargs="?", choices=["all", "losses", "training-step"], default="all", help="which benchmark")
    add("--quick", **FLAG, help="a short run with small sizes")
    add("--out", **DIR, default=Path("runs/bench"), help="folder for the JSON files")


def add_general_options(add: Add) -> None:
    """Adds the options of all commands."""
    add("--threads", **COUNT, help="number of CPU threads; all cores by default")
    add("--quiet", **FLAG, help="print only results, warnings and errors; training prints no results")
    add("--plugin", **MANY, metavar="FILE.py", help="Python file that registers losses, detectors or data formats")
    add("--debug", **FLAG, help="print the traceback of errors")


COMMANDS = {  # words → module of aploss.cli whose function run_NAME carries the command out, and its options
    ("demo",): ("train", _demo),
    ("train",): ("train", _train),
    ("eval",): ("eval", _eval),
    ("predict",): ("predict", _predict),
    ("app",): ("app", _app),
    ("export",): ("eval", _export),
    ("data", "check"): ("data", _data_check),
    ("data", "show"): ("data", _data_show),
    ("data", "convert"): ("data", _data_convert),
    ("compare",): ("compare", _compare),
    ("reproduce",): ("compare", _reproduce),
    ("theory",): ("compare", _theory),
    ("bench",): ("compare", _bench),
}


def describe(words: tuple[str, ...]) -> tuple[str, str]:
    """A line about a command, and its examples, one per line."""
    summary, _, examples = str(COMMANDS[words][1].__doc__).rstrip().partition("\n\n")
    return summary, examples


def make_parser(words: tuple[str, ...]) -> Parser:
    """Builds the parser of the command with these words, such as ``("data", "check")``."""
    summary, examples = describe(words)
    parser = Parser(prog=f"aploss {' '.join(words)}", description=summary, epilog=f"examples:\n{examples}")
    COMMANDS[words][1](parser.add_argument)
    if words in (("train",), ("compare",)):
        from aploss.cli import train

        train.add_train_options(parser) if words == ("train",) else train.add_compare_options(parser)
    add_general_options(parser.add_argument_group("general").add_argument)
    for action in parser._actions:
        if action.default == []:
            action.help = f"{action.help}; may be repeated"
        elif action.default not in (None, SUPPRESS) and action.default is not False:
            action.help = f"{action.help} [default: %(default)s]"
    return parser
