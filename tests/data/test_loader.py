"""Batches: the same for any number of workers and processes, from any point on."""

import itertools
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_features import noisy_dataset

from aploss.data.annotations import DetectionDataset
from aploss.data.loader import AugmentedSamples, Batch, TrainingBatches, make_evaluation_loader, make_training_loader
from aploss.errors import ConfigError, DataError

IMAGES = 11


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> DetectionDataset:
    """Eleven noisy images of different size; image k has k % 3 boxes."""
    counts = [k % 3 for k in range(IMAGES)]
    columns = {"difficult": np.arange(sum(counts)) % 4 == 0, "image_ids": [100 + k for k in range(IMAGES)]}
    return noisy_dataset(tmp_path_factory.mktemp("noisy"), counts, **columns)


def loader(dataset: DetectionDataset, **settings: Any) -> TrainingBatches:
    defaults: dict[str, Any] = {"batch_size": 4, "seed": 3, "preset": "paper", "size": 32}
    return make_training_loader(dataset, **{**defaults, **settings})


def assert_same(first: Iterable[Batch], second: Iterable[Batch]) -> None:
    for one, other in zip(first, second, strict=True):
        assert one.indices == other.indices
        torch.testing.assert_close(one.images, other.images, rtol=0, atol=0)
        for target, expected in zip(one.targets, other.targets, strict=True):
            assert target.keys() == expected.keys()
            for name, value in target.items():
                assert torch.equal(torch.as_tensor(value), torch.as_tensor(expected[name]))


@pytest.fixture(scope="module")
def expected(dataset: DetectionDataset) -> list[list[Batch]]:
    """The batches of three epochs, each from a new loader."""
    return [list(loader(dataset).epoch(epoch)) for epoch in range(3)]


def test_batch_has_the_promised_form(expected):
    for images, targets, indices, _ in expected[0]:
        assert images.shape == (4, 3, 32, 32)
        assert images.dtype == torch.float32
        assert 0.4 < images.max() <= 1
        assert images.min() >= 0
        assert [target["image_id"] for target in targets] == [100 + index for index in indices]
        for target in targets:
            assert type(target["boxes"]) is torch.Tensor
            assert target["boxes"].dtype == torch.float32
            assert target["boxes"].shape == (len(target["labels"]), 4)
            assert target["labels"].dtype == torch.int64
            assert target["difficult"].dtype == target["crowd"].dtype == torch.bool


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_change_nothing(dataset, expected, workers):
    batches = loader(dataset, workers=workers)
    for epoch in (0, 2, 1):
        assert_same(batches.epoch(epoch), expected[epoch])
    abandoned = batches.epoch(0)
    next(iter(abandoned))
    assert_same(batches.epoch(1), expected[1])


def test_the_past_and_the_callers_random_state_change_nothing(dataset, expected):
    torch.manual_seed(99)
    before = torch.get_rng_state()
    batches = loader(dataset)
    assert_same(batches.epoch(2), expected[2])
    assert torch.equal(torch.get_rng_state(), before)
    assert_same(batches.epoch(0), expected[0])


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("first_batch", [0, 1, 3])
def test_endless_is_one_epoch_after_the_other(dataset, expected, workers, first_batch):
    all_batches = [batch for epoch in expected for batch in epoch]
    batches = loader(dataset, workers=workers).endless(first_batch)
    wanted = all_batches[first_batch:]
    assert_same(list(itertools.islice(batches, len(wanted))), wanted)


@pytest.mark.parametrize("processes", [2, 4])
def test_processes_share_the_batch_of_one(dataset, expected, processes):
    parts = [list(loader(dataset, rank=rank, world_size=processes).epoch(1)) for rank in range(processes)]
    for whole, *step in zip(expected[1], *parts, strict=True):
        assert [index for part in step for index in part.indices] == whole.indices
        assert torch.equal(torch.cat([part.images for part in step]), whole.images)
        targets = [target["boxes"] for part in step for target in part.targets]
        assert all(map(torch.equal, targets, (target["boxes"] for target in whole.targets)))


def test_epochs_visit_each_image_at_most_once_in_orders_of_their_own(dataset, expected):
    orders = [[index for batch in epoch for index in batch.indices] for epoch in expected]
    for order in orders:
        assert len(order) == len(set(order)) == 8  # 11 images, two whole batches of 4
    assert len({tuple(order) for order in orders}) == 3
    left_out = [set(range(IMAGES)) - set(loader(dataset).samples.order(epoch)[:8]) for epoch in range(20)]
    assert set.union(*left_out) == set(range(IMAGES))  # nobody is left out for good


def test_augmentation_differs_by_seed_epoch_and_image_but_not_by_repetition(dataset):
    def sample(seed: int, epoch: int, index: int) -> torch.Tensor:
        samples = AugmentedSamples(dataset, seed=seed, preset="light", size=32)
        return samples[epoch, index][0]

    first = sample(0, 0, 5)
    assert torch.equal(first, sample(0, 0, 5))
    assert not torch.equal(first, sample(1, 0, 5))
    assert not torch.equal(first, sample(0, 1, 5))


def test_set_smaller_than_a_batch_is_one_batch(dataset):
    batches = loader(dataset.subset([1, 4, 7]), batch_size=8)
    assert batches.batches_per_epoch == 1
    (batch,) = batches.epoch(0)
    assert sorted(batch.indices) == [0, 1, 2]
    with pytest.raises(ConfigError, match="batch of 3 images cannot be split evenly over 2"):
        loader(dataset.subset([1, 4, 7]), batch_size=8, world_size=2)


@pytest.mark.parametrize("workers", [0, 1])
def test_evaluation_gives_every_image_once_as_it_is(dataset, workers):
    seen = []
    for rank in range(2):
        batches = list(make_evaluation_loader(dataset, batch_size=4, workers=workers, rank=rank, world_size=2))
        assert len(batches) == 2
        for images, targets, indices, _ in batches:
            for image, target, index in zip(images, targets, indices, strict=True):
                original, truth = dataset[index]
                torch.testing.assert_close(image, original.float() / 255)
                assert torch.equal(target["boxes"], truth["boxes"])
                assert target["image_id"] == truth["image_id"]
            seen += indices
    assert seen == [*range(0, IMAGES, 2), *range(1, IMAGES, 2)]


@pytest.mark.parametrize("workers", [0, 1])
def test_unreadable_image_is_one_line_that_names_it(dataset, tmp_path, workers):
    broken = dataset.subset([0])
    broken.root = tmp_path
    (tmp_path / "0.png").write_bytes(b"no image")
    for batches in (
        loader(broken, workers=workers).epoch(0),
        loader(broken, workers=workers).endless(),
        make_evaluation_loader(broken, batch_size=1, workers=workers),
    ):
        with pytest.raises(DataError, match=r"0\.png") as caught:
            next(iter(batches))
        assert "\n" not in str(caught.value)


WRONG = [{"batch_size": 0}, {"seed": -5}, {"world_size": 3}, {"preset": "x"}]


@pytest.mark.parametrize("settings", WRONG, ids=str)
def test_impossible_settings_and_empty_datasets_are_refused(dataset, settings):
    with pytest.raises(ConfigError):
        loader(dataset, **settings)
    with pytest.raises(DataError):
        loader(dataset.subset([]))
    with pytest.raises(DataError):
        make_evaluation_loader(dataset.subset([]), batch_size=1)


@pytest.fixture
def damaged(dataset: DetectionDataset, tmp_path: Path) -> DetectionDataset:
    """The same images, but number 4 is no image and number 7 has gone."""
    shutil.copytree(dataset.root, tmp_path / "images")
    (tmp_path / "images" / "4.png").write_bytes(b"nothing")
    (tmp_path / "images" / "7.png").unlink()
    copy = dataset.subset(range(IMAGES))
    copy.root = tmp_path / "images"
    return copy


@pytest.mark.parametrize("workers", [0, 2])
def test_the_next_image_of_the_epoch_stands_in_for_one_that_cannot_be_read(dataset, damaged, workers):
    batches = loader(damaged, batch_size=1, workers=workers, skip_unreadable=True)
    whole = loader(dataset, batch_size=1)
    order = batches.samples.order(2)
    found = list(batches.epoch(2))
    followers = [(*order[place:], *order[:place]) for place in range(IMAGES)]
    expected = [next(i for i in rest if i not in (4, 7)) for rest in followers]
    assert [batch.indices for batch in found] == [[index] for index in expected]
    assert set(batches.unreadable) == {4, 7}
    assert "not an image" in batches.unreadable[4]
    assert "no such image" in batches.unreadable[7]
    # Each sample is what it is in its own place: a function of seed, epoch and index.
    by_index = {batch.indices[0]: batch for batch in whole.epoch(2)}
    assert_same(found, [by_index[index] for index in expected])


def test_evaluation_leaves_out_what_cannot_be_read(damaged):
    found = list(make_evaluation_loader(damaged, batch_size=1, skip_unreadable=True))
    assert [i for batch in found for i in batch.indices] == [0, 1, 2, 3, 5, 6, 8, 9, 10]
    assert all(len(b.images) == len(b.targets) == len(b.indices) for b in found)
    assert {index for batch in found for index in batch.unreadable} == {4, 7}


def test_a_dataset_of_which_nothing_can_be_read_is_an_error(damaged):
    with pytest.raises(DataError, match="and 1 more images"):
        list(loader(damaged.subset([4, 7]), skip_unreadable=True, batch_size=1).epoch(0))
