"""A simulated GPU: what code would read back from and upload to a GPU, on a machine without one.

Tensors on this device report ``cuda:0`` and hold their numbers on the CPU. Two modes of torch see every operation on
them, and log, with file and line of the package:

- host reads: ``item``, ``tolist``, ``bool``, ``nonzero``, masks as index, copies to the CPU. Each waits until the GPU
  has finished all queued work;
- uploads: tensors created from Python numbers or copied from the CPU.

Autograd works as usual::

    with SimulatedGPU() as gpu:
        scores = gpu.tensor(scores).requires_grad_()
        ap_loss(scores, gpu.tensor(targets)).backward()
    assert len(gpu.host_reads) <= 1

It cannot show how long kernels take on a real GPU, or whether they race.
"""

import traceback
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import aploss

DEVICE = torch.device("cuda", 0)
# In torch's C++ code the tensors are on "meta", the one device that autograd knows on every machine but that has no
# kernels; Python code sees DEVICE.
_INSIDE = torch.device("meta")
_PACKAGE = str(Path(aploss.__file__).parent)

# Operations whose result, or its size, the host must read from the GPU.
_WAITING = {
    "_local_scalar_dense", "_unique2", "bincount", "equal", "is_nonzero", "masked_select",
    "nonzero", "repeat_interleave", "unique_consecutive", "unique_dim",
}  # fmt: skip


class Transfer(NamedTuple):
    """A copy between host and device, and the ``file:line`` of the package where it happens."""

    name: str
    where: str


class Counts(NamedTuple):
    """Transfers of one pass."""

    host_reads: list[Transfer]
    uploads: list[Transfer]


class SimulatedTensor(Tensor):
    """Reports that it is on the GPU; its numbers are in ``held``, on the CPU."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> "SimulatedTensor":
        made = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, held.size(), strides=held.stride(), storage_offset=held.storage_offset(), dtype=held.dtype,
            device=_INSIDE,
        )  # fmt: skip
        made.held = held
        return made

    device = property(lambda self: DEVICE)  # type: ignore[assignment]
    is_cuda = property(lambda self: True)  # type: ignore[assignment]
    is_meta = property(lambda self: False)  # type: ignore[assignment]

    def __repr__(self, **_: Any) -> str:
        return f"SimulatedTensor({self.held})"

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} outside of its SimulatedGPU")


class SimulatedGPU:
    """A context in which the device exists, and its log."""

    def __init__(self) -> None:
        self.forget()
        self._stack = ExitStack()

    def __enter__(self) -> "SimulatedGPU":
        self._stack.enter_context(_DeviceArguments(self))
        self._stack.enter_context(_Operations(self))
        return self

    def __exit__(self, *exception: Any) -> None:
        self._stack.close()

    @staticmethod
    def tensor(values: Tensor) -> SimulatedTensor:
        """A copy of a CPU tensor on the device, which is not logged."""
        return SimulatedTensor(values.detach().clone())

    def counts(self) -> Counts:
        return Counts(self.host_reads, self.uploads)

    def forget(self) -> None:
        """Clears the log."""
        self.host_reads: list[Transfer] = []
        self.uploads: list[Transfer] = []


class _DeviceArguments(TorchFunctionMode):
    """Accepts the simulated GPU as ``device=``, and logs tensors created from Python numbers."""

    def __init__(self, gpu: SimulatedGPU) -> None:
        super().__init__()
        self.gpu = gpu

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        args = tuple(_inside(a) if isinstance(a, torch.device) else a for a in args)
        kwargs = dict(kwargs or {})
        if "device" in kwargs and kwargs["device"] is not None:
            kwargs["device"] = _inside(torch.device(kwargs["device"]))
        if name in ("to", "cuda") and len(args) > 1 and isinstance(args[1], str):
            args = (args[0], _inside(torch.device(args[1])), *args[2:])
        if name in ("tensor", "as_tensor") and kwargs.get("device") == _INSIDE:
            made = func(*args, **{**kwargs, "device": "cpu"})
            self.gpu.uploads.append(Transfer(name, _where()))
            return SimulatedTensor(made)
        if name in ("tolist", "numpy") and isinstance(args[0], SimulatedTensor):
            if name == "numpy":
                raise TypeError("can't convert a tensor on the GPU to numpy")
            self.gpu.host_reads.append(Transfer(name, _where()))
            return args[0].held.tolist()
        return func(*args, **kwargs)


class _Operations(TorchDispatchMode):
    """Performs every operation on the held tensors, and logs it."""

    def __init__(self, gpu: SimulatedGPU) -> None:
        super().__init__()
        self.gpu = gpu

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = func._schema.name.split("::")[-1]
        leaves = pytree.tree_leaves((args, kwargs))
        simulated = [leaf for leaf in leaves if isinstance(leaf, SimulatedTensor)]
        held_args, held_kwargs = pytree.tree_map_only(SimulatedTensor, lambda tensor: tensor.held, (args, kwargs))
        asked_for = held_kwargs.get("device")
        on_gpu = asked_for == _INSIDE if asked_for is not None else bool(simulated)
        if asked_for == _INSIDE:
            held_kwargs["device"] = torch.device("cpu")
        if not simulated and not on_gpu:
            return func(*args, **kwargs)
        if func.namespace not in ("aten", "prims", "prim"):
            raise NotImplementedError(f"{func}: its transfers are unknown")

        self._log_transfers(name, leaves, simulated, on_gpu)
        result = func(*held_args, **held_kwargs)
        if result is None:
            return None
        if name.endswith("_") and isinstance(leaves[0], Tensor):
            return leaves[0]
        if "out" in kwargs:
            return kwargs["out"]
        return pytree.tree_map_only(Tensor, SimulatedTensor, result) if on_gpu else result

    def _log_transfers(self, name: str, leaves: list[Any], simulated: list[SimulatedTensor], on_gpu: bool) -> None:
        """Logs copies between host and device."""
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        on_host = [t for t in tensors if not isinstance(t, SimulatedTensor)]
        if (name == "_to_copy" and not (simulated and on_gpu)) or (name == "copy_" and on_host):
            is_read = simulated if name == "_to_copy" else tensors[0] is on_host[0]
            (self.gpu.host_reads if is_read else self.gpu.uploads).append(Transfer("copy", _where()))
            return
        masks = name in ("index", "index_put", "index_put_") and any(
            t.dtype in (torch.bool, torch.uint8) for t in tensors[1:2]
        )
        if name in _WAITING or masks:
            self.gpu.host_reads.append(Transfer(name, _where()))
        if any(t.dim() for t in on_host):  # a scalar of the CPU travels with the launch
            if name not in ("index", "index_put", "index_put_"):
                raise RuntimeError(f"{name}: tensors on the CPU and the GPU at {_where()}")
            self.gpu.uploads.append(Transfer(name, _where()))


def move(module: nn.Module, gpu: SimulatedGPU) -> None:
    """Moves the parameters and buffers of a module to the device."""
    for part in module.modules():
        for name, parameter in list(part.named_parameters(recurse=False)):
            part._parameters[name] = nn.Parameter(gpu.tensor(parameter), parameter.requires_grad)
        for name, buffer in list(part.named_buffers(recurse=False)):
            part._buffers[name] = gpu.tensor(buffer)


def measure(compute: Callable[..., Tensor], *tensors: Tensor) -> tuple[Counts, Counts]:
    """The counts of the forward and the backward pass of a loss; the first tensor is the scores."""
    with SimulatedGPU() as gpu:
        scores, *others = map(gpu.tensor, tensors)
        loss = compute(scores.requires_grad_(), *others)
        forward = gpu.counts()
        gpu.forget()
        (gradient,) = torch.autograd.grad(loss, scores)
        assert gradient.shape == scores.shape
        return forward, gpu.counts()


def _inside(device: torch.device) -> torch.device:
    return _INSIDE if device.type == DEVICE.type else device


def _where() -> str:
    frames = [frame for frame in traceback.extract_stack(limit=80) if frame.filename.startswith(_PACKAGE)]
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "?"
