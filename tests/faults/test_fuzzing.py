"""Fuzzing of file readers: for any mutation of a valid file, only the project's own errors are raised.

Mutations flip, cut, repeat and splice bytes and insert tokens that break parsers, without coverage feedback.
``make faults`` fuzzes every reader for 45 seconds, ``make test`` for a moment.
"""

import json
import random
import shutil
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from onnx import TensorProto, helper
from small_datasets import write_coco, write_voc, write_yolo

from aploss.data import check_dataset
from aploss.detectors import build_detector, load, save_detector
from aploss.detectors.export import OnnxDetector
from aploss.errors import AplossError
from aploss.evaluation import coco_metrics
from aploss.evaluation.tables import read_detections, read_ground_truth
from aploss.reports.run_files import read_run
from aploss.training.run_folder import RunFolder, Summary

SECONDS, MOMENT = 45.0, 0.2
TOKENS = [
    b"null", b"true", b"-1", b"0", b"1e999", b"-1e308", b"NaN", b"Infinity", b"99999999999999999999", b"[]", b"{}",
    b'""', b"[[[[", b"}}", b"<", b"</a>", b"&x;", b"]]>", b"<!DOCTYPE a>", b"\0", b"\xff", b"\xed\xa0\x80", b"\\ud800",
    b"\n\n", b"- ", b": ", b"&a *a", b"!!python/name:os.system", b"..", b"/etc/hostname", b"1.5", b'"x"', b"1" * 400,
    b"\xef\xbb\xbf",
]  # fmt: skip


def mutated(data: bytes, chance: random.Random) -> bytes:
    """The data with one to four mutations."""
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        start = chance.randrange(len(data) + 1)
        end = min(len(data), start + chance.choice((0, 1, 1, 2, 4, 8, 30, 200)))
        kind = chance.randrange(7)
        if kind == 0:
            middle = bytes(byte ^ 1 << chance.randrange(8) for byte in data[start:end])
        elif kind == 1:
            middle = b""
        elif kind == 2:
            middle = data[start:end] * chance.choice((2, 3, 50))
        elif kind == 3:
            other = chance.randrange(len(data) + 1)
            middle = data[other : other + 60]
        elif kind == 4 and chance.random() < 0.1:
            return data[:start]
        elif kind == 5:
            middle = chance.randbytes(end - start)
        else:
            middle = chance.choice(TOKENS)
            numbers = [place for place in range(start, min(len(data), start + 80)) if data[place : place + 1].isdigit()]
            if numbers:  # replace a digit by the token
                start, end = numbers[0], numbers[0] + 1
        data = data[:start] + middle + data[end:]
    return data


@pytest.fixture
def fuzz(request: pytest.FixtureRequest, record_property) -> Callable[..., None]:
    """Mutates and reads files until the time is up."""
    seconds = SECONDS if request.config.getoption("--faults", default=False) else MOMENT

    def run(files: list[Path], read: Callable[[], object], *, damage=mutated) -> None:
        whole, inputs, begun = {file: file.read_bytes() for file in files}, 0, time.monotonic()
        read()  # the unmodified files are valid
        while time.monotonic() - begun < seconds:
            chance = random.Random(inputs)
            file = chance.choice(files)
            file.write_bytes(damage(whole[file], chance))
            try:
                read()
            except AplossError:
                pass
            except Exception as error:
                kept = file.with_name(f"kept-{file.name}")
                shutil.copy(file, kept)
                raise AssertionError(f"input {inputs} of {file.name}, kept at {kept}") from error
            file.write_bytes(whole[file])
            inputs += 1
        record_property("faults", inputs)
        record_property("seconds", time.monotonic() - begun)

    return run


@pytest.mark.parametrize("format", ["voc", "coco", "yolo"])
def test_readers_of_annotations(fuzz, tmp_path: Path, format: str):
    write = {"voc": write_voc, "coco": write_coco, "yolo": write_yolo}[format]
    folder = write(tmp_path / "data")
    files = [file for file in sorted(folder.rglob("*")) if file.suffix in (".xml", ".json", ".txt", ".yaml")]
    fuzz(files, lambda: check_dataset(folder, format=format).to_dict())


def test_detections(fuzz, tmp_path: Path):
    truth, found = tmp_path / "truth.json", tmp_path / "found.json"
    folder = write_coco(tmp_path / "data")
    shutil.copy(folder / "annotations/instances_train2017.json", truth)
    rows = [
        {"image_id": 10 * k, "category_id": 3, "bbox": [1.5, 2, 30, 20.25], "score": 0.1 * k, "extra": None}
        for k in (1, 2, 3)
    ]
    found.write_text(json.dumps(rows))

    def read() -> None:
        objects = read_ground_truth(str(truth))
        coco_metrics(objects, read_detections(str(found)))

    fuzz([truth, found], read)


def test_checkpoints(fuzz, tmp_path: Path):
    """Mutates the pickle inside and fixes the checksum, as an attacker would."""
    torch.manual_seed(0)
    path = save_detector(build_detector("retinanet-tiny", class_names=["cat"]), tmp_path / "d.pt")

    def damage(data: bytes, chance: random.Random) -> bytes:
        if chance.random() < 0.2:
            return mutated(data, chance)
        path.write_bytes(data)
        with zipfile.ZipFile(path) as archive:
            parts = {name: archive.read(name) for name in archive.namelist()}
        with zipfile.ZipFile(tmp_path / "new.pt", "w") as archive:
            for name, part in parts.items():
                archive.writestr(name, mutated(part, chance) if name.endswith("data.pkl") else part)
        return (tmp_path / "new.pt").read_bytes()

    fuzz([path], lambda: load(path), damage=damage)


def test_onnx_metadata(fuzz, tmp_path: Path):
    images = helper.make_tensor_value_info("images", TensorProto.FLOAT, [None, 3, None, None])
    result = helper.make_tensor_value_info("logits", TensorProto.FLOAT, None)
    graph = helper.make_graph([helper.make_node("Identity", ["images"], ["logits"])], "graph", [images], [result])
    config = {"name": "retinanet-tiny", "class_names": ["cat"], "test_size": [64, 64], "loss": "ap", "loss_options": {}}
    texts = {
        "config": json.dumps({**config, "nms_iou": 0.5, "anchors_per_cell": 6}).encode(),
        "calibration": b'{"x": [0, 0.5, 1], "y": [0, 0.25, 1]}',
        "draw_threshold": b"0.5",
    }
    path = tmp_path / "d.onnx"

    def write(texts: dict[str, bytes]) -> bytes:
        model = helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 17)])
        for key, value in {"aploss_format": b"1", **texts}.items():
            model.metadata_props.add(key=key, value=value.decode("utf-8", "replace"))
        return model.SerializeToString()

    def damage(data: bytes, chance: random.Random) -> bytes:
        if chance.random() < 0.2:
            return mutated(data, chance)
        key = chance.choice(list(texts))
        return write({**texts, key: mutated(texts[key], chance)})

    path.write_bytes(write(texts))
    fuzz([path], lambda: OnnxDetector(path), damage=damage)


def test_run_folders(fuzz, tmp_path: Path):
    """All files but the checkpoints, which have their own case."""
    run = tmp_path / "run"
    config = {"data": "builtin", "batches": {"size": 4, "image_size": [64, 64]}, "model": {"options": {"a": 1}}}
    summary = {"loss": "ap", "AP": 0.5, "per_class": {"cat": {"AP": 0.5}}, "steps": 10, "unreadable_images": {}}
    contents = {
        "config.yaml": json.dumps(config, indent=1).replace('"', ""),
        "summary.json": json.dumps(summary),
        "environment.json": json.dumps({"python": "3.11", "hardware": {"cores": 2}}),
        "metrics.jsonl": "".join(json.dumps({"kind": "train", "step": k, "loss": 0.5}) + "\n" for k in range(3)),
        "evaluation/metrics.json": json.dumps({"AP": 0.5, "per_class": {"cat": {"AP": 0.5}}}),
        "evaluation/detections.json": json.dumps([{"image_id": 1, "category_id": 1, "bbox": [1, 2, 3, 4], "score": 1}]),
        "evaluation/calibration.json": json.dumps({"draw_threshold": 0.5, "calibrated_scores": [0.5]}),
    }
    for name, text in contents.items():
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text(text)

    def read() -> None:
        read_run(run)
        for one in (RunFolder(run).read_config, lambda: Summary.read(run / "summary.json")):
            try:
                one()
            except AplossError as refusal:
                refused.append(str(refusal))

    refused: list[str] = []
    fuzz([run / name for name in contents], read)
    assert all("\n" not in line.strip() for line in refused)
