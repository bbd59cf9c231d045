"""Training of detectors: configs, the loop, run folders.

Names are imported on first use, so that ``import aploss.training`` stays light.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aploss.training.callbacks import Callback
    from aploss.training.config import TrainConfig, load_config, recipe_names
    from aploss.training.distributed import TrainingInterruptedError
    from aploss.training.run import train
    from aploss.training.run_folder import RunFolder, Summary

__all__ = [
    "Callback", "RunFolder", "Summary", "TrainConfig", "TrainingInterruptedError", "load_config", "recipe_names",
    "train",
]  # fmt: skip

_MODULES = {
    "Callback": "callbacks",
    "RunFolder": "run_folder",
    "Summary": "run_folder",
    "TrainConfig": "config",
    "TrainingInterruptedError": "distributed",
    "load_config": "config",
    "recipe_names": "config",
    "train": "run",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
