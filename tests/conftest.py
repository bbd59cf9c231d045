"""Settings for all tests: few threads a process, and where optional things are found."""

import os
from pathlib import Path

import pytest
import torch

# Tests run in several processes: more torch threads than cores would slow all of them down.
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def bccd() -> Path:
    """The BCCD blood-cell set, from APLOSS_BCCD or beside the repository; skips where absent."""
    beside = Path(__file__).resolve().parents[2] / "shared" / "data" / "bccd"
    folder = Path(os.environ.get("APLOSS_BCCD", beside))
    if not (folder / "Annotations").is_dir():
        pytest.skip(f"BCCD is not at {folder}; name its folder in APLOSS_BCCD")
    return folder
