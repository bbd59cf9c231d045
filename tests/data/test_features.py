"""Stored features: those of the network for the views of each image, computed once."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from aploss.data.annotations import DetectionDataset, Sample
from aploss.data.features import FeatureMaps, StoredFeatures, Views, store_features
from aploss.data.loader import AugmentedSamples, make_training_loader
from aploss.errors import ConfigError, DataError

SIZE = (32, 48)
IMAGES = 9


def network(images: torch.Tensor) -> FeatureMaps:
    """Two maps that know left from right."""
    weighted = images * torch.linspace(1, 2, images.shape[-1])
    return FeatureMaps((F.avg_pool2d(weighted, 8), F.avg_pool2d(weighted[:, :1], 16)), SIZE)


def never(images: torch.Tensor) -> NoReturn:
    raise AssertionError("computed a second time")


@pytest.fixture
def dataset(tmp_path: Path) -> DetectionDataset:
    return noisy_dataset(tmp_path)


def noisy_dataset(tmp_path: Path) -> DetectionDataset:
    """Nine noisy images of different size, with two boxes each."""
    random = np.random.default_rng(0)
    (tmp_path / "images").mkdir(exist_ok=True)
    sizes = [(60 + 3 * k, 40 + k) for k in range(IMAGES)]
    for k, (width, height) in enumerate(sizes):
        pixels = random.integers(0, 256, (height, width, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "images" / f"{k}.png")
    corners = random.uniform(0, 20, (2 * IMAGES, 2))
    return DetectionDataset(
        root=tmp_path / "images",
        class_names=("a", "b"),
        image_paths=[f"{k}.png" for k in range(IMAGES)],
        image_sizes=sizes,
        boxes_per_image=[2] * IMAGES,
        boxes=np.concatenate([corners, corners + 15], axis=1),
        labels=np.arange(2 * IMAGES) % 2,
    )


def drawn(dataset: DetectionDataset, count: int = 3, preset: str = "light") -> Views:
    return Views(preset, count, AugmentedSamples(dataset, seed=0, preset=preset, size=SIZE).__getitem__)


def stored(dataset: DetectionDataset, compute=network, views: Views | None = None, **changes) -> StoredFeatures:
    options = {"network_digest": "one", "size": SIZE, "cache": dataset.root.parent / "cache", **changes}
    return store_features(dataset, compute, views or drawn(dataset), **options)


def test_batches_are_the_features_of_the_batches_of_images(dataset: DetectionDataset) -> None:
    options = {"batch_size": 4, "seed": 3, "preset": "none", "size": SIZE}
    of_images = make_training_loader(dataset, **options)
    of_features = make_training_loader(dataset, features=stored(dataset, views=drawn(dataset, 1, "none")), **options)
    for batch, expected in zip(of_features.epoch(1), of_images.epoch(1), strict=True):
        assert batch.indices == expected.indices
        maps = network(expected.images)
        assert batch.images.image_size == maps.image_size
        for one, other in zip(batch.images.to("cpu").maps, maps.maps, strict=True):
            torch.testing.assert_close(one, other, rtol=2**-10, atol=1e-6)
        for target, wanted in zip(batch.targets, expected.targets, strict=True):
            assert target.keys() == wanted.keys()
            for name, value in target.items():
                torch.testing.assert_close(torch.as_tensor(value), torch.as_tensor(wanted[name]))


def test_drawn_views_are_those_of_the_augmentation(dataset: DetectionDataset) -> None:
    views = drawn(dataset)
    features = stored(dataset, views=views)
    loader = make_training_loader(dataset, batch_size=1, seed=3, preset="light", size=SIZE, features=features)
    seen = set()
    for epoch in range(12):
        for batch in loader.epoch(epoch):
            (index,), (target,) = batch.indices, batch.targets
            expected = [views.sample((view, index)) for view in range(3)]
            maps = [network(image[None].float() / 255).maps for image, _ in expected]
            found = batch.images.to("cpu").maps
            (view,) = (v for v in range(3) if torch.allclose(found[0], maps[v][0], rtol=2**-10, atol=1e-6))
            seen.add((index, view))
            for name, value in expected[view][1].items():
                torch.testing.assert_close(torch.as_tensor(target[name]), torch.as_tensor(value))
    assert len(seen) == 3 * IMAGES  # every view has its turn
    again = make_training_loader(dataset, batch_size=1, seed=3, preset="light", size=SIZE, features=features)
    assert torch.equal(next(again.endless()).images.maps[0], next(loader.endless()).images.maps[0])


def test_features_are_computed_once_and_again_for_other_images_sizes_and_networks(dataset: DetectionDataset) -> None:
    first = stored(dataset)
    assert first.bytes == sum(file.stat().st_size for file in first.files)
    assert stored(dataset, never) == first
    for changes in ({"size": (32, 40)}, {"network_digest": "other"}, {"views": drawn(dataset, 4)}):
        assert not set(stored(dataset, **changes).files) & set(first.files)
    counts, none = np.zeros(IMAGES, int), np.zeros(0, int)
    columns = {"boxes": np.zeros((0, 4)), **dict.fromkeys(("labels", "difficult", "crowd", "areas"), none)}
    empty = replace(dataset, boxes_per_image=counts, **columns)
    assert len(first.target(0, 0)["boxes"]) > len(stored(empty).target(0, 0)["boxes"]) == 0
    copied = dataset.root.parent / "elsewhere"
    shutil.copytree(dataset.root, copied)
    dataset.root = copied
    assert stored(dataset, never) == first
    Image.open(copied / "3.png").rotate(180).save(copied / "3.png")
    other = stored(dataset)
    assert [new == old for new, old in zip(other.files, first.files, strict=True)] == [True, False, True]


def contents(features: StoredFeatures) -> list[torch.Tensor]:
    keys = [(index, view) for index in range(IMAGES) for view in range(features.views)]
    return [features.read(*key) for key in keys] + [features.target(*key)["boxes"] for key in keys]


def damage(path: Path, kind: str) -> None:
    content = bytearray(path.read_bytes())
    if kind == "byte":
        content[len(content) // 3] ^= 1
    damaged = {"zeros": bytes(len(content)), "truncated": content[:100], "empty": b"", "byte": content}
    path.write_bytes(damaged[kind])


@pytest.mark.parametrize("kind", ["byte", "zeros", "truncated", "empty", "exchanged", "other boxes"])
@pytest.mark.parametrize("number", range(3))
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


def test_the_next_image_stands_in_for_one_that_cannot_be_read_until_it_can(dataset: DetectionDataset) -> None:
    content = (dataset.root / "2.png").read_bytes()
    failing = {2}
    plain = drawn(dataset)

    def sample(key: tuple[int, int]) -> Sample:
        if key[1] in failing:
            raise DataError("the network drive is away")  # while the file itself is unchanged
        return plain.sample(key)

    views = replace(plain, sample=sample)
    features = stored(dataset, views=views)
    assert list(features.unreadable) == [2]
    torch.testing.assert_close(features.target(3, 1)["boxes"], plain.sample((1, 3))[1]["boxes"])
    options = {"batch_size": IMAGES, "seed": 0, "preset": "light", "size": SIZE, "features": features}
    batches = make_training_loader(dataset, skip_unreadable=True, **options)
    indices = next(batches.endless()).indices
    assert 2 not in indices
    assert len(indices) == IMAGES
    assert batches.unreadable == features.unreadable
    failing.clear()
    again = stored(dataset, views=views)
    assert again.unreadable == {}
    assert torch.equal(again.target(2, 0)["boxes"], plain.sample((0, 2))[1]["boxes"])
    assert stored(dataset, never) == again
    (dataset.root / "2.png").write_bytes(b"not an image")
    assert list(stored(dataset).unreadable) == [2]
    (dataset.root / "2.png").write_bytes(content)
    assert stored(dataset, never) == again


KILLED = """
import os, signal, sys, time
from pathlib import Path
import numpy as np
sys.path.insert(0, sys.argv[1])
from test_features import damage, drawn, network, noisy_dataset, stored
folder, random, done = Path(sys.argv[2]), np.random.default_rng(0), set()
dataset = noisy_dataset(folder)
for _ in range(20):
    child = os.fork()  # one import for all
    if child == 0:
        stored(dataset, lambda images: (time.sleep(0.02), network(images))[1], views=drawn(dataset, 8))
        os._exit(0)
    time.sleep(random.uniform(0.02, 0.3))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    files = sorted((folder / "cache").rglob("*.features"))
    done.add(len(files))
    for file in random.permutation(files)[:2]:
        damage(file, random.choice(["byte", "zeros", "truncated"]))
print(sorted(done))
"""


def test_a_computation_killed_20_times_leaves_no_wrong_file(tmp_path: Path, dataset: DetectionDataset) -> None:
    command = [sys.executable, "-c", KILLED, str(Path(__file__).parent), str(tmp_path)]
    killed = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert killed.returncode == 0, killed.stderr
    assert len(json.loads(killed.stdout)) > 1  # stopped at different moments
    features = stored(dataset, views=drawn(dataset, 8))
    expected = stored(dataset, views=drawn(dataset, 8), cache=tmp_path / "undisturbed")
    for found, value in zip(contents(features), contents(expected), strict=True):
        assert torch.equal(found, value)
    assert not list((tmp_path / "cache").rglob("*unfinished"))


def test_what_cannot_be_stored_is_said_in_one_line(dataset: DetectionDataset) -> None:
    with pytest.raises(ConfigError, match="'light'"):
        make_training_loader(dataset, batch_size=4, seed=0, preset="paper", size=SIZE, features=stored(dataset))
    with pytest.raises(DataError, match="float16"):
        stored(dataset, lambda images: FeatureMaps((1e6 * images,), SIZE), network_digest="large")
    (dataset.root.parent / "file").touch()
    with pytest.raises(DataError, match="APLOSS_CACHE"):
        stored(dataset, cache=dataset.root.parent / "file" / "below")
    for index in range(IMAGES):
        dataset.image_path(index).unlink()
    with pytest.raises(DataError, match=r"no image of split 'all' can be read"):
        stored(dataset)
