"""Settings for all tests: few threads a process, and where optional things are found."""

import gc
import os
from pathlib import Path

import pytest

# Tests run in several processes: more torch threads than cores would slow all of them down. torch reads it when it is
# imported (not here: the process that only hands out tests does without), and so do the processes that are started
# from here, those of `pytest -n` among them. glibc is to keep the memory of large tensors: a training step frees
# all of it, and the kernel would clear every page of it again for the next.
os.environ |= {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**64 - 1)}
# The package and its tests are compiled to bytecode once, not by each of the many processes that import them.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Files that take longest, first, so that no process has one of them left when the others are done. The first two go to
# different processes: one compiles the losses for this processor, while the other, which does not, leaves it to that.
LONGEST = (
    "test_engine", "test_triton", "test_plugins", "test_transformers_models", "test_examples", "test_losses",
    "test_distributed", "test_signals", "test_backbones", "test_export", "test_ap_loss", "test_run", "test_loop",
    "test_resume", "test_notebooks", "test_architecture", "test_docs", "test_feature_cache", "test_torchvision_models",
    "test_processes", "test_run_report", "test_browser",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Orders whole files; tests of a file stay as they are."""
    items.sort(key=lambda item: LONGEST.index(item.path.stem) if item.path.stem in LONGEST else len(LONGEST))


def pytest_collection_finish() -> None:
    """What was imported stays: looking for garbage among it takes a tenth of the time of an export."""
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)


def pytest_unconfigure() -> None:
    gc.unfreeze()  # extension modules complain of what is left at the end


@pytest.fixture(scope="session")
def bccd() -> Path:
    """The BCCD blood-cell set, from APLOSS_BCCD or beside the repository; skips where absent."""
    beside = Path(__file__).resolve().parents[2] / "shared" / "data" / "bccd"
    folder = Path(os.environ.get("APLOSS_BCCD", beside))
    if not (folder / "Annotations").is_dir():
        pytest.skip(f"BCCD is not at {folder}; name its folder in APLOSS_BCCD")
    return folder
