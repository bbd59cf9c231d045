"""Seeds and generator states: set for a run, saved in its checkpoints, and given back after it."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

__all__ = ["capture_random_state", "restore_random_state", "seeded"]


@contextmanager
def seeded(seed: int, *, deterministic: bool) -> Iterator[None]:
    """Runs a block from a seed and leaves every generator and switch as it was before.

    Args:
        seed: for Python, NumPy and torch.
        deterministic: choose algorithms that give the same bits in every run.
    """
    before = capture_random_state()
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    was_warning = torch.is_deterministic_algorithms_warn_only_enabled()
    was_filling = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    was_benchmarking = torch.backends.cudnn.benchmark
    try:
        random.seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002 - other people's code draws from it
        torch.manual_seed(seed)
        if deterministic:
            # Only a warning where a device has no such algorithm: it is better to train than not.
            torch.use_deterministic_algorithms(True, warn_only=True)
            torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        torch.backends.cudnn.benchmark = not deterministic
        yield
    finally:
        torch.use_deterministic_algorithms(was_deterministic, warn_only=was_warning)
        torch.utils.deterministic.fill_uninitialized_memory = was_filling  # type: ignore[attr-defined]
        torch.backends.cudnn.benchmark = was_benchmarking
        restore_random_state(before)


def capture_random_state() -> dict[str, Any]:
    """The state of all generators as tensors and plain values, which any checkpoint can hold."""
    legacy: Any = np.random.get_state()  # noqa: NPY002
    kind, keys, position, has_gauss, gauss = legacy
    version, internal, next_gauss = random.getstate()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": [kind, torch.from_numpy(keys.astype(np.int64)), position, has_gauss, gauss],
        "python": [version, list(internal), next_gauss],
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def restore_random_state(state: dict[str, Any]) -> None:
    """Brings all generators into a captured state."""
    torch.set_rng_state(state["torch"])
    kind, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, gauss))  # noqa: NPY002
    version, internal, next_gauss = state["python"]
    random.setstate((version, tuple(internal), next_gauss))
    if "cuda" in state and torch.cuda.device_count() == len(state["cuda"]):
        torch.cuda.set_rng_state_all(state["cuda"])
