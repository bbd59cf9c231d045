"""The feature cache with damaged files, killed processes and passing read errors: never trained on, always repaired."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from processes import start_process
from small_features import IMAGES, SIZE, augmented, contents, network, never, noisy_dataset, stored

from aploss.data.annotations import DetectionDataset, Sample
from aploss.data.features import FeatureMaps
from aploss.data.loader import AugmentedSamples, make_training_loader
from aploss.errors import DataError


@pytest.fixture
def dataset(tmp_path: Path) -> DetectionDataset:
    return noisy_dataset(tmp_path)


# Where one bit is flipped: in the length at the beginning, in the maps, or in the objects at the end.
BITS: dict[str, Callable[[int], int]] = {
    "length": lambda size: 1,
    "maps": lambda size: size // 3,
    "objects": lambda size: size - 9,
}


def damage(path: Path, kind: str) -> None:
    content = bytearray(path.read_bytes())
    if kind in BITS:
        content[BITS[kind](len(content))] ^= 1
    path.write_bytes({"zeros": bytes(len(content)), "truncated": content[:100], "empty": b""}.get(kind, content))


@pytest.mark.parametrize("kind", [*BITS, "zeros", "truncated", "empty", "exchanged", "other boxes"])
@pytest.mark.parametrize("number", range(3))
@pytest.mark.regression("33a370e")
def test_a_damaged_file_is_computed_again_with_one_line(dataset: DetectionDataset, kind: str, number: int) -> None:
    first = stored(dataset)
    expected = contents(first)
    if kind == "exchanged":
        first.files[number].write_bytes(first.files[number - 1].read_bytes())
    elif kind == "other boxes":
        boxes = first.target(3 * number, 0)["boxes"].numpy().tobytes()
        first.files[number].write_bytes(first.files[number].read_bytes().replace(boxes, bytes(len(boxes))))
    else:
        damage(first.files[number], kind)
    lines: list[str] = []
    again = stored(dataset, note=lines.append)
    assert sum("1 damaged files" in line for line in lines) == 1
    assert again == first
    for found, value in zip(contents(again), expected, strict=True):
        assert torch.equal(found, value)
    assert stored(dataset, never) == first


@pytest.mark.regression("33a370e")
def test_a_stopped_computation_resumes_with_the_files_that_are_done(dataset: DetectionDataset) -> None:
    calls: list[int] = []

    def stop_at_the_third(images: torch.Tensor) -> FeatureMaps:
        calls.append(len(images))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return network(images)

    lines: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        stored(dataset, stop_at_the_third, note=lines.append)
    assert "9 of 9 images" in lines[0]
    assert "MB" in lines[0]
    progress: list[tuple[int, int]] = []
    again = stored(dataset, stop_at_the_third, on_progress=lambda *done: progress.append(done))
    assert calls == [9, 9, 9, 9]  # three images with three views each; the first two are not computed again
    assert progress == [(9, 9)]
    assert all(row.isfinite().all() for row in contents(again))


@pytest.mark.regression("33a370e")
def test_the_next_image_stands_in_for_one_that_cannot_be_read_until_it_can(dataset: DetectionDataset) -> None:
    content = (dataset.root / "2.png").read_bytes()
    failing = {2}
    plain = augmented(dataset)

    class Failing(AugmentedSamples):
        def __getitem__(self, key: tuple[int, int]) -> Sample:
            if key[1] in failing:
                raise DataError("the network drive is away")  # while the file itself is unchanged
            return plain[key]

    samples = Failing(dataset, seed=0, preset="light", size=SIZE)
    features = stored(dataset, samples=samples)
    assert list(features.unreadable) == [2]
    torch.testing.assert_close(features.target(3, 1)["boxes"], plain[1, 3][1]["boxes"])
    options = {"batch_size": IMAGES, "seed": 0, "preset": "light", "size": SIZE, "features": features}
    batches = make_training_loader(dataset, skip_unreadable=True, **options)
    indices = next(batches.endless()).indices
    assert 2 not in indices
    assert len(indices) == IMAGES
    assert batches.unreadable == features.unreadable
    failing.clear()
    again = stored(dataset, samples=samples)
    assert again.unreadable == {}
    assert torch.equal(again.target(2, 0)["boxes"], plain[0, 2][1]["boxes"])
    assert stored(dataset, never) == again
    (dataset.root / "2.png").write_bytes(b"not an image")
    assert list(stored(dataset).unreadable) == [2]
    (dataset.root / "2.png").write_bytes(content)
    assert stored(dataset, never) == again


KILLED = """
import json, os, runpy, signal, time
from pathlib import Path
import numpy as np
from small_features import network, noisy_dataset, stored
test = runpy.run_path(values["file"])
folder, random, done = Path(values["folder"]), np.random.default_rng(0), set()
dataset = noisy_dataset(folder)

def start(cache):
    child = os.fork()
    if child == 0:
        stored(dataset, lambda images: (time.sleep(0.02), network(images))[1], views=4, cache=cache)
        os._exit(0)
    return child

begun = time.monotonic()
os.waitpid(start(folder / "whole"), 0)
longest = time.monotonic() - begun
kills = 0
while kills < 20:
    child = start(folder / "cache")
    time.sleep(random.uniform(0, longest))
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    kills += os.WIFSIGNALED(status)  # not if it had finished
    files = sorted((folder / "cache").rglob("*.features"))
    done.add(len(files))
    for file in random.permutation(files)[:4]:
        test["damage"](file, random.choice([*test["BITS"], "zeros", "truncated"]))
Path(log).write_text(json.dumps(sorted(done)))
"""


@pytest.mark.regression("33a370e")
def test_a_computation_killed_20_times_leaves_no_wrong_file(
    tmp_path: Path, dataset: DetectionDataset, record_property: Callable[[str, object], None]
) -> None:
    record_property("faults", 20)
    process = start_process(KILLED, log=tmp_path / "log", file=__file__, folder=str(tmp_path))
    process.join()
    assert process.exitcode == 0
    assert len(json.loads((tmp_path / "log").read_text())) > 1  # stopped at different moments
    features = stored(dataset, views=4)
    expected = stored(dataset, views=4, cache=tmp_path / "undisturbed")
    for found, value in zip(contents(features), contents(expected), strict=True):
        assert torch.equal(found, value)
    assert not list((tmp_path / "cache").rglob("*unfinished"))
