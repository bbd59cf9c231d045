"""Stored features: those of the network for the views of each image, computed once."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from small_features import IMAGES, SIZE, augmented, network, never, noisy_dataset, stored

from aploss.data.annotations import DetectionDataset
from aploss.data.features import FeatureMaps
from aploss.data.loader import make_training_loader
from aploss.errors import ConfigError, DataError


@pytest.fixture
def dataset(tmp_path: Path) -> DetectionDataset:
    return noisy_dataset(tmp_path)


def test_batches_are_the_features_of_the_batches_of_images(dataset: DetectionDataset) -> None:
    options = {"batch_size": 4, "seed": 3, "preset": "none", "size": SIZE}
    of_images = make_training_loader(dataset, **options)
    of_features = make_training_loader(
        dataset, features=stored(dataset, samples=augmented(dataset, "none"), views=1), **options
    )
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
    samples, features = augmented(dataset), stored(dataset)
    loader = make_training_loader(dataset, batch_size=1, seed=3, preset="light", size=SIZE, features=features)
    seen = set()
    for epoch in range(12):
        for batch in loader.epoch(epoch):
            (index,), (target,) = batch.indices, batch.targets
            expected = [samples[view, index] for view in range(3)]
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
    for changes in ({"samples": augmented(dataset, size=(32, 40))}, {"network_digest": "other"}, {"views": 4}):
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
