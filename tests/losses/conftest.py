"""Boxes to rank, in every kind of distribution that has tripped a ranking loss."""

from collections.abc import Callable, Iterator

import pytest
import torch
from ranking_cases import DISTRIBUTIONS
from torch import Tensor

from aploss.losses import use_backend

MakeBoxes = Callable[..., tuple[Tensor, Tensor]]


@pytest.fixture(params=["cpu", "torch"])
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every backend that runs here, one after the other."""
    with use_backend(request.param):
        yield request.param


@pytest.fixture(scope="session")
def make_boxes() -> MakeBoxes:
    """make_boxes(distribution, positives, negatives, ...) -> scores, targets with some ignored."""

    def make(
        distribution: str = "random",
        positives: int = 20,
        negatives: int = 500,
        *,
        ignored: int = 30,
        dtype: torch.dtype = torch.float64,
        seed: int = 0,
    ) -> tuple[Tensor, Tensor]:
        random = torch.Generator().manual_seed(seed)
        counts = torch.tensor([positives, negatives, ignored])
        targets = torch.repeat_interleave(torch.tensor([1, 0, -1]), counts)
        targets = targets[torch.randperm(len(targets), generator=random)]
        noise = torch.randn(len(targets), dtype=torch.float64, generator=random)
        return DISTRIBUTIONS[distribution](noise, targets == 1).to(dtype), targets

    return make
