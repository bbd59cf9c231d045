"""Stored features: those of the network for the views of each image, computed once."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from aploss.data.annotations import DetectionDataset
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
    """Nine noisy images of different size, with two boxes each."""
    random = np.random.default_rng(0)
    (tmp_path / "images").mkdir()
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


def test_features_are_computed_once_and_anew_for_other_images_sizes_and_networks(dataset: DetectionDataset) -> None:
    first = stored(dataset)
    assert first.file.stat().st_size == first.bytes
    assert stored(dataset, never) == first
    assert stored(dataset.subset(range(5))).file != first.file
    assert stored(dataset, size=(32, 40)).file != first.file
    assert stored(dataset, network_digest="other").file != first.file
    assert stored(dataset, views=drawn(dataset, 4)).file != first.file
    counts, none = np.zeros(IMAGES, int), np.zeros(0, int)
    columns = {"boxes": np.zeros((0, 4)), **dict.fromkeys(("labels", "difficult", "crowd", "areas"), none)}
    empty = replace(dataset, boxes_per_image=counts, **columns)
    assert len(first.target(0, 0)["boxes"]) > len(stored(empty).target(0, 0)["boxes"]) == 0
    copied = dataset.root.parent / "elsewhere"
    shutil.copytree(dataset.root, copied)
    dataset.root = copied
    assert stored(dataset, never) == first
    Image.open(copied / "3.png").rotate(180).save(copied / "3.png")
    assert stored(dataset).file != first.file


def test_a_damaged_file_is_computed_again(dataset: DetectionDataset) -> None:
    first = stored(dataset)
    with first.file.open("r+b") as file:
        file.truncate(100)
    with pytest.raises(DataError, match="truncated"):
        first.read(5, 0)
    first.file.with_name("features.pt").write_bytes(b"no archive")
    again = stored(dataset)
    assert again == first
    assert again.read(5, 0).isfinite().all()


def test_the_next_image_stands_in_for_one_that_cannot_be_read(dataset: DetectionDataset) -> None:
    (dataset.root / "2.png").write_bytes(b"no image")
    features = stored(dataset)
    assert list(features.unreadable) == [2]
    torch.testing.assert_close(features.target(3, 1)["boxes"], drawn(dataset).sample((1, 3))[1]["boxes"])
    options = {"batch_size": IMAGES, "seed": 0, "preset": "light", "size": SIZE, "features": features}
    batches = make_training_loader(dataset, skip_unreadable=True, **options)
    indices = next(batches.endless()).indices
    assert 2 not in indices
    assert len(indices) == IMAGES
    assert batches.unreadable == features.unreadable


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
