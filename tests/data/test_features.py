"""Stored features: those of the network for the views of each image, computed once."""

import shutil
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


def stored(dataset: DetectionDataset, compute=network, **changes) -> StoredFeatures:
    options = {"network_digest": "one", "size": SIZE, "cache": dataset.root.parent / "cache", **changes}
    return store_features(dataset, compute, **options)


@pytest.mark.parametrize("preset", ["flip", "none"])
def test_batches_are_the_features_of_the_batches_of_images(dataset: DetectionDataset, preset: str) -> None:
    options = {"batch_size": 4, "seed": 3, "preset": preset, "size": SIZE}
    of_images = make_training_loader(dataset, **options)
    of_features = make_training_loader(dataset, features=stored(dataset), **options)
    for epoch in range(3):
        for batch, expected in zip(of_features.epoch(epoch), of_images.epoch(epoch), strict=True):
            assert batch.indices == expected.indices
            maps = network(expected.images)
            assert batch.images.image_size == maps.image_size
            for one, other in zip(batch.images.to("cpu").maps, maps.maps, strict=True):
                torch.testing.assert_close(one, other, rtol=2**-10, atol=1e-6)
            for target, wanted in zip(batch.targets, expected.targets, strict=True):
                assert target.keys() == wanted.keys()
                for name, value in target.items():
                    torch.testing.assert_close(torch.as_tensor(value), torch.as_tensor(wanted[name]))


def drawn(dataset: DetectionDataset, count: int = 3) -> Views:
    return Views("light", count, AugmentedSamples(dataset, seed=0, preset="light", size=SIZE).__getitem__)


def test_drawn_views_are_those_of_the_augmentation(dataset: DetectionDataset) -> None:
    views = drawn(dataset)
    features = stored(dataset, drawn=views)
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


def test_drawn_views_are_computed_anew_for_other_objects_and_counts(dataset: DetectionDataset) -> None:
    first = stored(dataset, drawn=drawn(dataset))
    assert (first.views, first.file.stat().st_size) == (3, first.bytes)
    assert stored(dataset, never, drawn=drawn(dataset)) == first
    assert len({first.file, stored(dataset).file, stored(dataset, drawn=drawn(dataset, 4)).file}) == 3
    other = DetectionDataset(
        root=dataset.root,
        class_names=dataset.class_names,
        image_paths=[f"{k}.png" for k in range(IMAGES)],
        image_sizes=[dataset.image_size(k) for k in range(IMAGES)],
        boxes_per_image=[0] * IMAGES,
        boxes=np.zeros((0, 4)),
        labels=np.zeros(0, dtype=int),
    )
    targets = first.file.with_name("targets.npz")
    targets.write_bytes(b"no archive")
    with pytest.raises(DataError, match=r"stored objects .* cannot be read: remove"):
        stored(dataset, never, drawn=drawn(dataset)).target(0, 0)
    targets.unlink()
    assert len(stored(dataset, drawn=drawn(dataset)).target(0, 0)["boxes"]) > 0
    empty = stored(other, drawn=drawn(other))
    assert empty.file != first.file
    assert len(empty.target(0, 0)["boxes"]) == 0


def test_features_are_computed_once_and_anew_for_other_images_sizes_and_networks(dataset: DetectionDataset) -> None:
    first = stored(dataset)
    assert first.file.stat().st_size == first.bytes
    assert stored(dataset, never) == first
    assert stored(dataset.subset(range(5))).file != first.file
    assert stored(dataset, size=(32, 40)).file != first.file
    assert stored(dataset, network_digest="other").file != first.file
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
    again = stored(dataset)
    assert again == first
    assert again.read(5, 0).isfinite().all()


def test_the_next_image_stands_in_for_one_that_cannot_be_read(dataset: DetectionDataset) -> None:
    (dataset.root / "2.png").write_bytes(b"no image")
    features = stored(dataset)
    assert list(features.unreadable) == [2]
    of_views = stored(dataset, drawn=drawn(dataset))
    assert list(of_views.unreadable) == [2]
    torch.testing.assert_close(of_views.target(3, 1)["boxes"], drawn(dataset).sample((1, 3))[1]["boxes"])
    options = {"batch_size": IMAGES, "seed": 0, "preset": "flip", "size": SIZE, "features": features}
    batches = make_training_loader(dataset, skip_unreadable=True, **options)
    indices = next(batches.endless()).indices
    assert 2 not in indices
    assert len(indices) == IMAGES
    assert batches.unreadable == features.unreadable


def test_what_cannot_be_stored_is_said_in_one_line(dataset: DetectionDataset) -> None:
    with pytest.raises(ConfigError, match="for augmentation 'flip', not 'light'"):
        make_training_loader(dataset, batch_size=4, seed=0, preset="light", size=SIZE, features=stored(dataset))
    with pytest.raises(DataError, match="float16"):
        stored(dataset, lambda images: FeatureMaps((1e6 * images,), SIZE), network_digest="large")
    (dataset.root.parent / "file").touch()
    with pytest.raises(DataError, match="APLOSS_CACHE"):
        stored(dataset, cache=dataset.root.parent / "file" / "below")
    for index in range(IMAGES):
        dataset.image_path(index).unlink()
    with pytest.raises(DataError, match=r"no image of split 'all' can be read"):
        stored(dataset)
