"""Devices and random states."""

import random

import numpy as np
import pytest
import torch

from aploss.errors import ConfigError
from aploss.training.distributed import choose_device, choose_workers, seeded


def draws() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))  # noqa: NPY002


def test_a_seeded_block_leaves_generators_and_switches_as_they_were() -> None:
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    torch.manual_seed(1)
    expected = draws()
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    torch.manual_seed(1)
    with seeded(5, deterministic=True):
        first = draws()
        assert torch.are_deterministic_algorithms_enabled()
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert draws() == expected
    with seeded(5, deterministic=False):
        assert draws() == first


@pytest.mark.parametrize("name", ["abacus", "meta", "cpu:x", "cuda:99"])
def test_a_device_that_cannot_compute_is_refused_in_one_line(name: str) -> None:
    with pytest.raises(ConfigError, match="device") as error:
        choose_device(name)
    assert "\n" not in str(error.value)


def test_workers_are_as_many_as_asked_for_and_few_on_a_cpu() -> None:
    cpu = torch.device("cpu")
    assert choose_workers(5, cpu, 1) == 5
    assert choose_workers(None, cpu, 1000) == 0
    assert choose_workers(None, cpu, 1) <= 1
