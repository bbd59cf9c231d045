"""Untrusted checkpoints, ONNX files and run folders: nothing in them is run, opened, or loaded as something else."""

import copy
import io
import json
import os
import pickle
import random
import shutil
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from onnx import TensorProto, helper
from PIL import Image
from small_datasets import write_coco

from aploss.cli.main import main
from aploss.detectors import build_detector, load, save_detector
from aploss.detectors.export import OnnxDetector
from aploss.detectors.weights import load_weights
from aploss.errors import RunError
from aploss.reports.run_report import write_run_report

DETECTOR = "retinanet-short"
CLASSES = ["cat", "dog"]
NAN, INF = float("nan"), float("inf")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A valid checkpoint."""
    torch.manual_seed(0)
    detector = build_detector(DETECTOR, class_names=CLASSES, test_size=(64, 64))
    return save_detector(detector, tmp_path_factory.mktemp("whole") / "detector.pt")


@pytest.fixture(scope="module")
def content(whole: Path) -> dict[str, Any]:
    return torch.load(whole, weights_only=True)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "untrusted.pt"


def assert_refused(path: Path, *words: str) -> None:
    """The project's own error, in one line that names the file."""
    with pytest.raises(RunError) as refusal:
        load(path)
    message = str(refusal.value)
    assert str(path) in message
    assert "\n" not in message
    assert [word for word in words if word not in message] == []


# --- files that are something else ------------------------------------------------------------


def zipped(compression: int = zipfile.ZIP_STORED, **parts: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as archive:
        for name, part in parts.items():
            archive.writestr(name.replace("__", "/"), part)
    return file.getvalue()


def saved(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


NOT_TORCH = {
    "empty": b"", "text": b"hello\n", "one dot": b".", "zeros": bytes(300), "gif": b"GIF89a" + bytes(40),
    "json": b'{"detector": 1}', "elf": b"\x7fELF" + bytes(range(256)), "noise": random.Random(0).randbytes(500),
    "pickled dict": pickle.dumps({"detector": {}}), "marks only": b"\x80\x02" + b"(" * 100_000,
    "deep lists": b"\x80\x02" + b"]" * 50_000 + b"a" * 49_999 + b".",
    "empty zip": zipped(), "zip without data": zipped(x__data__pkl=b"."),
    "pickle that stops": zipped(**{"x/data.pkl": pickle.dumps({"a": [1, 2]}, 2)[:-5], "x/version": b"3"}),
    "saved list": saved([1, 2]), "saved tensor": saved(torch.ones(2)), "other dict": saved({"model": 1}),
    "detector is a number": saved({"detector": 5}), "detector is nothing": saved({"detector": None}),
}  # fmt: skip


@pytest.mark.parametrize("kind", NOT_TORCH)
def test_a_file_that_is_something_else_is_refused(file: Path, kind: str):
    file.write_bytes(NOT_TORCH[kind])
    assert_refused(file)


# --- pickles that would run code --------------------------------------------------------------


class Runs:
    """Unpickled by anyone who trusts it, calls a function."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.call


TRAPS: dict[str, Callable[[Path], Any]] = {  # each would make a file, by another way
    "os.system": lambda canary: Runs(os.system, f"touch {canary}"),
    "torch.save": lambda canary: Runs(torch.save, {}, canary),
    "path": lambda canary: Runs(Path.touch, canary),
}


@pytest.mark.parametrize("container", ["torch file", "inside a detector", "bare pickle"])
@pytest.mark.parametrize("trap", TRAPS)
def test_no_pickle_runs_code(file: Path, content: dict[str, Any], trap: str, container: str):
    canary = file.parent / "canary"
    value = TRAPS[trap](canary)
    if container == "bare pickle":
        file.write_bytes(pickle.dumps(value))
    else:
        record = {**content["detector"], "draw_threshold": value} if container == "inside a detector" else value
        torch.save({"detector": record}, file)
    assert_refused(file)
    assert not canary.exists()


# --- damage -----------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [k / 10 for k in range(10)])
def test_a_truncated_checkpoint_is_refused(file: Path, whole: Path, share: float):
    data = whole.read_bytes()
    file.write_bytes(data[: int(share * len(data))])
    assert_refused(file)


@pytest.mark.parametrize("seed", range(24))
def test_changed_bytes_are_refused_or_change_nothing(file: Path, whole: Path, content: dict[str, Any], seed: int):
    """A third in the weights, a third in the record of names at the end, a third in the pickle at the beginning."""
    data, chance = bytearray(whole.read_bytes()), random.Random(seed)
    ranges = [(0, len(data)), (len(data) - 20_000, len(data)), (0, 30_000)]
    place = chance.randrange(*ranges[seed % 3])
    data[place] ^= 1 << chance.randrange(8)
    file.write_bytes(data)
    try:
        detector = load(file)
    except RunError:
        return
    assert detector.config == content["detector"]["config"]
    state = detector.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in content["detector"]["state"].items())


# --- fields -----------------------------------------------------------------------------------

STRANGE = {"nothing": None, "number": -7, "huge": 10**30, "text": "x", "list": [1, "a"], "dict": {"a": 1}, "NaN": NAN}
MAY_BE = {  # field of the record → strange values that it may have
    **dict.fromkeys(["config", "state", "config.name", "config.loss", "config.class_names"], ()),
    **dict.fromkeys([f"config.{name}" for name in ("test_size", "topk_per_level", "detections_per_image")], ()),
    **dict.fromkeys([f"config.{name}" for name in ("nms_iou", "channels_last", "rank_over", "anchors_per_cell")], ()),
    **dict.fromkeys(["calibration", "draw_threshold"], ("nothing",)),
    **dict.fromkeys([f"config.{name}" for name in ("score_threshold", "loss_options", "box_loss")], ("nothing",)),
    "config.box_weight": ("nothing", "huge"),
}
FIELD_FAULTS = [
    *((field, STRANGE[value]) for field, allowed in MAY_BE.items() for value in STRANGE if value not in allowed),
    # weights of another architecture
    ("config.name", "ssdlite"),
    ("config.class_names", ["cat"]),
    ("config.loss", "ohem"),  # a column more, for the background
    ("config.anchors_per_cell", 9),
    *((field, ...) for field in ("config", "state", "calibration", "draw_threshold")),  # missing
    *((field, ...) for field in ("config.name", "config.loss", "config.class_names")),
]


def changed(content: dict[str, Any], field: str, value: Any = ...) -> dict[str, Any]:
    """The content with a field of the detector replaced, or taken away."""
    record = {**content["detector"], "config": copy.deepcopy(content["detector"]["config"])}
    target = record
    *folders, name = field.split(".")
    for folder in folders:
        target = target[folder]
    if value is ...:
        del target[name]
    else:
        target[name] = value
    return {"detector": record}


@pytest.mark.parametrize(("field", "value"), FIELD_FAULTS)
def test_a_field_of_another_kind_or_a_missing_one_is_refused(
    file: Path, content: dict[str, Any], field: str, value: Any
):
    torch.save(changed(content, field, value), file)
    assert_refused(file, *([field.rpartition(".")[2]] if value is ... else []))


# --- weights ----------------------------------------------------------------------------------

LAYER = "head.classification_head.cls_logits.weight"
WEIGHT_FAULTS: dict[str, Callable[[torch.Tensor], Any]] = {
    "NaN": lambda weight: weight.index_fill(0, torch.tensor([0]), NAN),
    "infinite": lambda weight: weight.index_fill(0, torch.tensor([0]), INF),
    "integers": lambda weight: weight.to(torch.int8),
    "text": lambda weight: "weights",
    "sparse": lambda weight: weight.to_sparse(),
    "without memory": lambda weight: weight.to("meta"),
    "fewer rows": lambda weight: weight[:-1],
}


@pytest.mark.parametrize("fault", WEIGHT_FAULTS)
def test_invalid_weights_are_refused_by_name_and_not_trained_on(file: Path, content: dict[str, Any], fault: str):
    state = {**content["detector"]["state"]}
    state[LAYER] = WEIGHT_FAULTS[fault](state[LAYER])
    torch.save(changed(content, "state", state), file)
    assert_refused(file, LAYER)
    if fault not in ("integers", "fewer rows"):  # which may come from another task
        torch.save(state, file)
        with pytest.raises(RunError, match=r"untrusted\.pt"):
            load_weights(build_detector(DETECTOR, class_names=CLASSES), file)


def test_predict_refuses_weights_so_large_that_scores_are_nan(call_cli, file: Path, content: dict, tmp_path: Path):
    state = {name: tensor * 1e30 for name, tensor in content["detector"]["state"].items()}
    torch.save(changed(content, "state", state), file)
    Image.effect_noise((64, 64), 50).save(tmp_path / "a.png")
    call_cli("predict", file, tmp_path / "a.png", "--out", tmp_path / "out").assert_refused("NaN")


def peak_memory() -> int:
    """The largest resident memory of this process since it was reset, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


@pytest.mark.parametrize("place", ["weight", "unknown weight", "other content", "initial weights", "compressed"])
@pytest.mark.regression("33a370e")
def test_a_small_file_with_a_huge_tensor_costs_no_memory(file: Path, content: dict[str, Any], place: str):
    """A tensor of stride 0 has one number in the file and a gigabyte in use; zeros are compressed to a thousandth."""
    huge, state = torch.zeros(1).expand(2**14, 2**14), content["detector"]["state"]
    whole = {
        "weight": changed(content, "state", {**state, LAYER: huge}),
        "unknown weight": changed(content, "state", {**state, "x": huge}),
        "other content": {**content, "metrics": huge},
        "initial weights": {**state, LAYER: huge},
        "compressed": {**content, "metrics": torch.zeros(2**26)},
    }
    torch.save(whole[place], file)
    if place == "compressed":
        with zipfile.ZipFile(file) as archive:
            parts = {part: archive.read(part) for part in archive.namelist()}
        file.write_bytes(zipped(zipfile.ZIP_DEFLATED, **parts))
        del parts
    assert file.stat().st_size < 2e7
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = peak_memory()
    with pytest.raises(RunError, match=r"untrusted\.pt"):
        load_weights(build_detector(DETECTOR, class_names=CLASSES), file) if place == "initial weights" else load(file)
    assert peak_memory() - before < 2e8


def test_a_small_file_that_describes_a_huge_network_costs_no_memory(file: Path):
    content = torch.load(save_detector(build_detector("ssdlite", class_names=CLASSES, width=0.25), file))
    torch.save(changed(content, "config.width", 30.0), file)
    Path("/proc/self/clear_refs").write_text("5")
    before = peak_memory()
    assert_refused(file, "size mismatch")
    assert peak_memory() - before < 2e8


@pytest.mark.parametrize("key", ["metrics", "format", "training"])
def test_lists_that_stand_for_astronomic_ones_are_refused_at_once(file: Path, content: dict[str, Any], key: str):
    """The list of a YAML bomb, as a pickle."""
    nested = [0]
    for _ in range(64):
        nested = [nested, nested]
    torch.save({**content, key: nested}, file)
    assert_refused(file, "1,000,000")


# --- what else is opened ----------------------------------------------------------------------


class Watch:
    """Which files were opened, and whether anything was sought in the network."""

    def __init__(self) -> None:
        self.on = False
        self.seen: list[str] = []
        sys.addaudithook(self)

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.on and event in ("open", "socket.connect", "socket.getaddrinfo", "urllib.Request"):
            self.seen.append(f"{event} {arguments[0]!s}" if event == "open" else event)

    @contextmanager
    def watching(self) -> Iterator[list[str]]:
        self.seen, self.on = [], True
        try:
            yield self.seen
        finally:
            self.on = False


@pytest.fixture(scope="session")
def watch() -> Watch:
    return Watch()


@pytest.mark.parametrize("named", ["other.pt", "imagenet", "https://example.com/weights.pt"])
@pytest.mark.parametrize("container", ["checkpoint", "ONNX"])
def test_weights_that_a_file_names_are_neither_opened_nor_fetched(watch, content, tmp_path, container, named):
    """Both keep working: what they were once started from is in them already."""
    (tmp_path / "other.pt").touch()
    naming = changed(content, "config.weights", str(tmp_path / named) if named == "other.pt" else named)
    path = tmp_path / ("untrusted.onnx" if container == "ONNX" else "untrusted.pt")
    if container == "ONNX":
        path.write_bytes(onnx_file(settings=naming["detector"]["config"]))
    else:
        torch.save(naming, path)
    with watch.watching() as seen:
        detector = OnnxDetector(path) if container == "ONNX" else load(path)
    assert detector.class_names == tuple(CLASSES)
    assert [one for one in seen if "other.pt" in one or not one.startswith("open")] == []


# --- ONNX -------------------------------------------------------------------------------------

METADATA = {"aploss_format": "1", "calibration": "null", "draw_threshold": "null"}
CONFIG = {"name": DETECTOR, "class_names": CLASSES, "test_size": [64, 64], "loss": "ap", "loss_options": {}}


def onnx_file(
    *,
    settings: dict[str, Any] | None = None,
    tensors: tuple[Any, ...] = (),
    outputs: tuple[str, ...] = ("logits", "deltas"),
    **metadata: Any,
) -> bytes:
    """A model that gives its image back twice, with the metadata of a detector."""
    images = helper.make_tensor_value_info("images", TensorProto.FLOAT, [None, 3, None, None])
    results = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs]
    nodes = [helper.make_node("Identity", ["images"], [name]) for name in outputs]
    graph = helper.make_graph(nodes, "graph", [images], results, initializer=list(tensors))
    model = helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 17)])
    texts = {**METADATA, "config": json.dumps(CONFIG if settings is None else settings), **metadata}
    for key, value in texts.items():
        if value is not ...:
            model.metadata_props.add(key=key, value=value)
    return model.SerializeToString()


def assert_onnx_refused(path: Path, *words: str) -> None:
    with pytest.raises(RunError) as refusal:
        OnnxDetector(path)
    assert str(path) in str(refusal.value)
    assert [word for word in words if word not in str(refusal.value)] == []


@pytest.mark.parametrize("field", ["config", "calibration", "draw_threshold", "aploss_format"])
@pytest.mark.parametrize("text", [..., "", "{", "5", '"x"', "[1]", '{"a": 1}', "NaN", "[" * 100_000])
def test_onnx_metadata_of_other_kinds_are_refused(tmp_path: Path, field: str, text: Any):
    path = tmp_path / "untrusted.onnx"
    path.write_bytes(onnx_file(**{field: text}))
    assert_onnx_refused(path)


@pytest.mark.parametrize("value", STRANGE)
@pytest.mark.parametrize("field", ["name", "class_names", "test_size", "nms_iou", "loss"])
def test_onnx_configs_of_other_kinds_are_refused(tmp_path: Path, field: str, value: str):
    path = tmp_path / "untrusted.onnx"
    path.write_bytes(onnx_file(settings={**CONFIG, field: STRANGE[value]}))
    assert_onnx_refused(path)


@pytest.mark.parametrize("location", ["secret.bin", "../secret.bin", "/etc/hostname", "C:\\secret.bin", ""])
def test_onnx_tensors_in_other_files_are_not_opened(watch: Watch, tmp_path: Path, monkeypatch, location: str):
    np.ones(4, dtype=np.float32).tofile(tmp_path / "secret.bin")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    tensor = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[4], data_location=TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value=location)
    path = tmp_path / "untrusted.onnx"
    path.write_bytes(onnx_file(tensors=(tensor,)))
    with watch.watching() as seen:
        assert_onnx_refused(path, "another file")
    assert [one for one in seen if "secret" in one or "hostname" in one] == []


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_onnx_weights_that_are_not_finite_are_refused_by_name(tmp_path: Path, value: float):
    path = tmp_path / "untrusted.onnx"
    path.write_bytes(onnx_file(tensors=(helper.make_tensor("layer.weight", TensorProto.FLOAT, [2], [1.0, value]),)))
    assert_onnx_refused(path, "layer.weight")


@pytest.mark.parametrize("outputs", [("logits", "deltas"), ("logits",), ("other", "names")])
def test_an_onnx_model_that_gives_something_else_is_refused(call_cli, tmp_path: Path, outputs: tuple[str, ...]):
    """Its outputs are images, fewer, or have other names."""
    path = tmp_path / "untrusted.onnx"
    path.write_bytes(onnx_file(outputs=outputs))
    Image.new("RGB", (64, 64)).save(tmp_path / "a.png")
    call_cli("predict", path, tmp_path / "a.png", "--out", tmp_path / "out").assert_refused(path)


@pytest.mark.parametrize("kind", [kind for kind in NOT_TORCH if not kind.startswith("saved")])
def test_a_file_other_than_onnx_is_refused(tmp_path: Path, kind: str):
    path = tmp_path / "untrusted.onnx"
    path.write_bytes(NOT_TORCH[kind])
    assert_onnx_refused(path)


# --- run folders ------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path, whole: Path) -> Path:
    """The folder of a run, from an untrusted source."""
    folder = tmp_path / "run"
    for part in ("checkpoints", "evaluation"):
        (folder / part).mkdir(parents=True)
    shutil.copy(whole, folder / "checkpoints/best.pt")
    picture = tmp_path / "private" / "a.png"
    picture.parent.mkdir()
    Image.effect_noise((64, 64), 50).convert("RGB").save(picture)
    truth = {
        "images": [{"id": 1, "file_name": "a.png", "width": 64, "height": 64}],
        "categories": [{"id": 1, "name": "cat"}],
        "annotations": [{"id": 1, "image_id": 1, "category_id": 1, "bbox": [1, 1, 20, 20], "area": 400, "iscrowd": 0}],
    }
    (folder / "evaluation/ground_truth.json").write_text(json.dumps(truth))
    (folder / "evaluation/detections.json").write_text("[]")
    (folder / "config.yaml").write_text("data: builtin\n")
    return folder


@pytest.mark.parametrize("key", ["path", "file_name"])
@pytest.mark.parametrize("named", ["absolute", "climbing", "link", "device", "pipe"])
def test_a_page_opens_no_image_elsewhere(watch: Watch, run: Path, key: str, named: str):
    private = run.parent / "private" / "a.png"
    os.mkfifo(run.parent / "private" / "pipe.png")
    (run / "link.png").symlink_to(private)
    path = {
        "absolute": str(private),
        "climbing": "../private/a.png",
        "link": "link.png",
        "device": "/dev/zero",
        "pipe": str(private.with_name("pipe.png")),
    }[named]
    truth = json.loads((run / "evaluation/ground_truth.json").read_text())
    truth["images"][0][key] = path
    (run / "evaluation/ground_truth.json").write_text(json.dumps(truth))
    with watch.watching() as seen:
        page = write_run_report(run)
    assert [one for one in seen if "private" in one or "zero" in one or "link.png" in one] == []
    assert '<figure class="picture">' not in page.read_text()


RUN_FILES = ["summary.json", "environment.json", "config.yaml", "metrics.jsonl", "evaluation/ground_truth.json",
             "evaluation/detections.json", "evaluation/metrics.json", "evaluation/matches.json",
             "evaluation/calibration.json"]  # fmt: skip
BAD_CONTENT = {"not UTF-8": b"\xff\xfe{}", "deep": b"[" * 50_000, "numbers": b'{"images": 5}'}


@pytest.mark.parametrize("kind", BAD_CONTENT)
@pytest.mark.parametrize("name", RUN_FILES)
def test_a_page_is_made_whatever_a_file_of_the_run_holds(run: Path, name: str, kind: str):
    (run / name).write_bytes(BAD_CONTENT[kind])
    assert write_run_report(run).is_file()


# --- runs to resume ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps that was started from weights in a file, and its data."""
    folder = tmp_path_factory.mktemp("trained")
    data = write_coco(folder / "data")
    weights = save_detector(build_detector(DETECTOR, class_names=CLASSES), folder / "start.pt")
    options = {
        "data": data, "out": folder / "run", "detector": DETECTOR, "batches.size": 3, "batches.image_size": 64,
        "batches.workers": 0, "schedule.length": 2, "schedule.unit": "steps", "schedule.warmup_steps": 1,
        "model.options.test_size": "[64, 64]", "model.weights": weights,
    }  # fmt: skip
    assert main(["train", *(f"--{name}={value}" for name, value in options.items()), "--quiet"]) == 0
    (folder / "run/summary.json").unlink()  # killed while it was measured
    return folder / "run"


@pytest.fixture
def resumed(trained: Path, tmp_path: Path, call_cli) -> Callable[..., Any]:
    """Resumes a copy of the run after changing its last checkpoint."""

    def resume(change: Callable[[dict[str, Any]], object] = lambda content: None, **files: bytes) -> Any:
        run = tmp_path / "run"
        shutil.copytree(trained, run)
        last = run / "checkpoints/last.pt"
        content = torch.load(last, weights_only=True)
        change(content)
        torch.save(content, last)
        for name, data in files.items():
            (run / name.replace("__", ".")).write_bytes(data)
        return call_cli("train", "--resume", "--out", run, "--quiet")

    return resume


@pytest.mark.slow_fault
@pytest.mark.parametrize("name", ["step", "images", "stepper", "threads", "stopped_by", "seconds", "best_step"])
def test_a_run_is_not_resumed_without_a_field(resumed, name: str):
    resumed(lambda content: content["training"].pop(name)).assert_refused("last.pt", name)


@pytest.mark.slow_fault
@pytest.mark.parametrize("value", ["number", "text", "list", "dict"])
@pytest.mark.parametrize("name", ["step", "stepper", "images"])
def test_a_run_is_not_resumed_with_a_field_of_another_kind(resumed, name: str, value: str):
    resumed(lambda content: content["training"].update({name: STRANGE[value]})).assert_refused()


RESUME_FAULTS: dict[str, Callable[[dict[str, Any]], object]] = {
    "NaN": lambda content: content["detector"]["state"][LAYER].fill_(NAN),
    "no weights": lambda content: content["detector"].pop("state"),
    "another shape": lambda content: content["detector"]["state"].update({LAYER: torch.ones(3)}),
    "another detector": lambda content: content["detector"].update(
        state=build_detector("ssdlite", class_names=CLASSES, width=0.25).state_dict()
    ),
    "other images": lambda content: next(iter(content["training"]["data"].values())).update(files="0"),
    "no detector": lambda content: content.pop("detector"),
    "no training": lambda content: content.pop("training"),
    "another version": lambda content: content.update(format=99),
}


@pytest.mark.slow_fault
@pytest.mark.parametrize("fault", RESUME_FAULTS)
def test_a_run_is_not_resumed_from_a_checkpoint_that_does_not_fit(resumed, fault: str):
    resumed(RESUME_FAULTS[fault]).assert_refused("last.pt")


@pytest.mark.slow_fault
@pytest.mark.parametrize("content", [b"[]", b"\0", b"\xff", b"[" * 5000, b"data: [1]\n", b"dta: 1\n", b"&a [*a]\n"])
def test_a_run_is_not_resumed_with_an_invalid_config(resumed, content: bytes):
    resumed(config__yaml=content).assert_refused("config.yaml")


@pytest.mark.slow_fault
def test_a_run_is_resumed_without_its_initial_weights(resumed, trained: Path, watch: Watch):
    (trained.parent / "start.pt").rename(trained.parent / "gone.pt")
    try:
        done = resumed(metrics__jsonl=b'{"kind": "train", "step": 1}\n\xff\xfe\n')  # and with a damaged log
    finally:
        (trained.parent / "gone.pt").rename(trained.parent / "start.pt")
    assert done.code == 0, done.stderr
    done.assert_no_traceback()
