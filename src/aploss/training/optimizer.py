"""Parameter groups, frozen layers, and the optimizers of the paper and of training from scratch."""

from collections.abc import Iterable
from fnmatch import fnmatchcase

from torch import nn, optim

from aploss.errors import ConfigError
from aploss.training.config import OptimizerConfig

__all__ = ["freeze", "make_optimizer"]

NORMS = (nn.GroupNorm, nn.LayerNorm, nn.modules.batchnorm._NormBase)


def make_optimizer(model: nn.Module, config: OptimizerConfig) -> optim.Optimizer:
    """SGD with momentum or AdamW over the parameters that are trained.

    Normalisation weights and biases are not decayed unless the config says so.

    Raises:
        ConfigError: if nothing is left to train.
    """
    decayed, spared = _decayed_and_spared(model)
    if config.decay_norms_and_biases:
        decayed, spared = decayed + spared, []
    groups = [{"params": decayed, "weight_decay": config.weight_decay}]
    if spared:
        groups.append({"params": spared, "weight_decay": 0.0})
    if not decayed and not spared:
        raise ConfigError("model.frozen leaves nothing to train")
    # All tensors in one operation, where the device has it: one after the other costs AdamW a
    # twentieth of a small detector's step on a CPU.
    fused = (decayed + spared)[0].device.type in ("cpu", "cuda")
    rate = config.learning_rate
    if config.name == "sgd":
        return optim.SGD(groups, lr=rate, momentum=config.momentum, fused=fused)
    return optim.AdamW(groups, lr=rate, fused=fused)


def _decayed_and_spared(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    norms = {id(p) for module in model.modules() if isinstance(module, NORMS)
             for p in module.parameters()}  # fmt: skip
    decayed: list[nn.Parameter] = []
    spared: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        spare = id(parameter) in norms or name.split(".")[-1] == "bias" or parameter.ndim < 2
        (spared if spare else decayed).append(parameter)
    return decayed, spared


def freeze(model: nn.Module, patterns: Iterable[str]) -> int:
    """Stops training of the parameters whose names match, or lie below a matching module.

    Returns:
        How many parameter tensors are frozen by it.

    Raises:
        ConfigError: for a pattern that matches nothing.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        >>> freeze(model, ["0"]), [p.requires_grad for p in model.parameters()]
        (2, [False, False, True, True])
    """
    frozen = 0
    for pattern in patterns:
        matching = [
            parameter
            for name, parameter in model.named_parameters()
            if fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")
        ]
        if not matching:
            tops = ", ".join(dict(model.named_children()))
            raise ConfigError(f"model.frozen: {pattern!r} matches no parameter; below {tops}")
        for parameter in matching:
            frozen += parameter.requires_grad
            parameter.requires_grad_(False)
    return frozen
