"""Ranks the boxes of several data-parallel processes together.

The positives travel (O(P)), and per segment one count and one sum (O(P)); the N scores never do.
Every process takes part in every exchange, also one without positives or negatives, and one that
has found a mistake in its input: then all of them raise, and none is left waiting.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["gather_values", "group_name", "resolve", "sum_over"]


def group_name(process_group: Any) -> str:
    """The name by which an operator finds the group again; "" for no group.

    Raises:
        ValueError: torch.distributed is not initialised.
    """
    if process_group is None:
        return ""
    if not (dist.is_available() and dist.is_initialized()):
        raise ValueError(
            "process_group was given, but torch.distributed is not initialised: "
            "call torch.distributed.init_process_group() first"
        )
    return str(process_group.group_name)


def resolve(name: str) -> Any:
    """The group of that name; None for ""."""
    # The way torch's own functional collectives go from a name back to its group.
    return getattr(dist.distributed_c10d, "_resolve_process_group")(name) if name else None  # noqa: B009


def gather_values(values: Tensor, group: Any) -> tuple[Tensor, int]:
    """Gathers the values [n_r] of all processes r, in the order of their ranks.

    Returns:
        all values [sum of n_r], and where this process's own start among them.
    """
    rank = dist.get_rank(group)
    sizes = torch.zeros(dist.get_world_size(group), dtype=torch.int64, device=values.device)
    sizes[rank] = len(values)
    dist.all_reduce(sizes, group=group)
    lengths = sizes.tolist()
    padded = values.new_zeros(max(lengths))
    padded[: len(values)] = values
    parts = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(parts, padded, group=group)
    gathered = [part[:length] for part, length in zip(parts, lengths, strict=True)]
    return torch.cat(gathered), sum(lengths[:rank])


def sum_over(values: Tensor, group: Any) -> Tensor:
    """The sum of a tensor over all processes (in place)."""
    dist.all_reduce(values, group=group)
    return values
