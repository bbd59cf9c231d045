"""Boxes to rank, in every kind of distribution that has tripped a ranking loss."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from aploss.losses import use_backend

MakeBoxes = Callable[..., tuple[Tensor, Tensor]]

DISTRIBUTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "random": lambda noise, positive: noise,
    "separated": lambda noise, positive: noise + 4.0 * positive,
    "tied": lambda noise, positive: (noise * 3).round(),
    "all equal": lambda noise, positive: torch.full_like(noise, 0.3),
    "tiny spread": lambda noise, positive: noise * 1e-3,
    "huge spread": lambda noise, positive: noise * 1e3,
    "offset": lambda noise, positive: noise + 1e4,
    "one outlier": lambda noise, positive: noise + 1e6 * (torch.arange(len(noise)) == 0),
    "offset 1e6": lambda noise, positive: noise + 1e6,
    "all below": lambda noise, positive: noise.clamp(-3, 3) - 100.0 * ~positive,
    "all above": lambda noise, positive: noise + 100.0 * ~positive,
    "as initialised": lambda noise, positive: noise * 0.3 - 4.6,
    "wide": lambda noise, positive: noise * 20,
    "in bfloat16": lambda noise, positive: (noise + 2.0 * positive).bfloat16().double(),
    "astronomic": lambda noise, positive: (noise * 3).round() * 1e17,
}


@pytest.fixture(params=["cpu", "torch"])
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every backend that runs here, one after the other."""
    with use_backend(request.param):
        yield request.param


UNUSUAL: dict[str, Callable[[Tensor], Tensor]] = {
    "tied": lambda scores: scores.round(),
    "equal": lambda scores: 0 * scores,
    "tiny": lambda scores: 1e-3 * scores,
    "huge": lambda scores: 1e3 * scores,
    "offset": lambda scores: scores + 1e4,
}


@pytest.fixture(params=UNUSUAL)
def make_unusual(request: pytest.FixtureRequest) -> Callable[[Tensor], Tensor]:
    """What makes unusual scores of usual ones."""
    return UNUSUAL[request.param]


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
