"""Which device and how many loader processes suit this machine."""

import os

import torch

from aploss.errors import ConfigError

__all__ = ["choose_device", "choose_workers"]


def choose_device(name: str) -> torch.device:
    """The device of a name; ``"auto"`` is the first of cuda, mps and cpu that is there.

    Of several GPUs each process of ``torchrun`` takes its own.

    Raises:
        ConfigError: if there is no such device.

    Example:
        >>> choose_device("cpu")
        device(type='cpu')
    """
    if name == "auto":
        name = "cpu"
        if torch.cuda.is_available():
            name = "cuda"
        elif torch.backends.mps.is_available():
            name = "mps"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device: there is no device {name!r}; try cpu, cuda or mps") from error
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ConfigError("device: this machine has no usable cuda device")
        number = device.index if device.index is not None else int(os.environ.get("LOCAL_RANK", 0))
        if number >= torch.cuda.device_count():
            raise ConfigError(
                f"device: there are {torch.cuda.device_count()} GPUs, not {number + 1}"
            )
        device = torch.device("cuda", number)
        torch.cuda.set_device(device)
    elif device.type == "mps" and not torch.backends.mps.is_available():
        raise ConfigError("device: this machine has no mps device")
    return device


def choose_workers(wanted: int | None, device: torch.device, processes: int) -> int:
    """How many loader processes to use.

    On a CPU the cores are needed for training itself, and reading small images takes little: one
    helper, or none on a single core. A GPU is fed by several.
    """
    if wanted is not None:
        return wanted
    cores = max(1, (os.cpu_count() or 1) // processes)
    if device.type == "cpu":
        return min(1, cores - 1)
    return min(8, cores)
