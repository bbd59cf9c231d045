"""A GPU that is none: what a loss would launch, read back and upload there, without a GPU.

Tensors on this device say ``cuda:0`` and hold their numbers on the CPU. Two modes of torch see
every operation on them and write down, with file and line of the package:

- kernels: how many an operation launches on a real GPU, and the bytes they read and write;
- host reads: ``item``, ``tolist``, ``bool``, ``nonzero``, masks as index, copies to the CPU. Each
  one waits until the GPU has done all it was asked to;
- uploads: tensors made from Python numbers or copied from the CPU.

The graph of autograd is recorded as always; ``gradients`` runs it without torch's engine, which
would start threads and streams of a real GPU::

    with SimulatedGPU() as gpu:
        scores = gpu.tensor(scores).requires_grad_()
        loss = ap_loss(scores, gpu.tensor(targets))
        (gradient,) = gradients(loss, scores)
    assert len(gpu.host_reads) <= 1

What real kernels cost in time, and whether they race, this cannot tell.
"""

import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import aploss

__all__ = ["Counts", "Kernel", "SimulatedGPU", "SimulatedTensor", "Transfer", "gradients", "measure"]

DEVICE = torch.device("cuda", 0)
# To torch's C++ code the tensors are on "meta", the one device without any kernels that autograd
# knows on every machine; Python code sees DEVICE.
_INSIDE = torch.device("meta")
_PACKAGE = str(Path(aploss.__file__).parent)

# Kernels an operation launches on CUDA, from its source, where that is not one.
_LAUNCHES = {
    "_local_scalar_dense": 0,
    "bincount": 4,  # minimum, maximum, zeros, the histogram
    "nonzero": 3,
    "nonzero_static": 4,
    "sort": 3,
    "argsort": 3,
    "topk": 3,
    "unique_consecutive": 6,
    "_unique2": 8,
    "masked_select": 4,
}
_NO_KERNEL = {
    "_reshape_alias", "_unsafe_view", "alias", "detach", "empty", "empty_like", "empty_strided",
    "is_same_size", "lift_fresh", "new_empty", "new_empty_strided", "resize_", "set_",
}  # fmt: skip
# Operations whose result has a size, or a place, that the host must ask the GPU for.
_WAITING = {
    "_local_scalar_dense", "_unique2", "bincount", "equal", "is_nonzero", "masked_select",
    "nonzero", "repeat_interleave", "unique_consecutive", "unique_dim",
}  # fmt: skip


@dataclass(frozen=True)
class Kernel:
    """An operation on the device.

    Attributes:
        launches: kernels it starts on a real GPU.
        bytes: read and written.
        size: elements of its largest tensor.
        float64: whether a tensor of that size is float64.
        where: ``file:line`` of the package.
    """

    name: str
    launches: int
    bytes: int
    size: int
    float64: bool
    where: str


@dataclass(frozen=True)
class Transfer:
    """Something that crosses between host and device; ``where`` as in :class:`Kernel`."""

    name: str
    bytes: int
    where: str


class SimulatedTensor(Tensor):
    """Says that it is on the GPU; its numbers are in ``held``, on the CPU."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> "SimulatedTensor":
        made = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=_INSIDE,
        )
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
    """Context in which the device exists, and its log: see the module."""

    current: "SimulatedGPU | None" = None

    def __init__(self) -> None:
        self.kernels: list[Kernel] = []
        self.host_reads: list[Transfer] = []
        self.uploads: list[Transfer] = []
        self._stack = ExitStack()

    def __enter__(self) -> "SimulatedGPU":
        self._stack.enter_context(_DeviceArguments(self))
        self._stack.enter_context(_Operations(self))
        SimulatedGPU.current = self
        return self

    def __exit__(self, *exception: Any) -> None:
        self._stack.close()
        SimulatedGPU.current = None

    @staticmethod
    def tensor(values: Tensor) -> SimulatedTensor:
        """A copy of a CPU tensor on the device; not logged."""
        return SimulatedTensor(values.detach().clone())

    def counts(self) -> "Counts":
        return Counts(
            host_reads=[f"{read.name} at {read.where}" for read in self.host_reads],
            uploads=[f"{upload.name} at {upload.where}" for upload in self.uploads],
            launches=sum(kernel.launches for kernel in self.kernels),
            bytes=sum(kernel.bytes for kernel in self.kernels),
        )

    def forget(self) -> None:
        """Starts the log again."""
        for log in (self.kernels, self.host_reads, self.uploads):
            log.clear()

    @staticmethod
    def launch_triton(backend: Any, kernel: Any, programs: int, *args: Any, **options: Any) -> None:
        """Takes the place of ``TritonBackend.launch``; for Triton's interpreter.

        Every argument counts as moved once, but no more than 4096 elements of it by one program.
        """
        gpu, name = SimulatedGPU.current, kernel.__name__
        assert gpu is not None
        held = [arg.held if isinstance(arg, SimulatedTensor) else arg for arg in args]
        tensors = [arg for arg in held if isinstance(arg, Tensor)]
        if len(tensors) > sum(isinstance(arg, SimulatedTensor) for arg in args):
            raise RuntimeError(f"a tensor on the CPU was handed to the kernel {name}")
        moved = (min(t.numel(), programs * 4096) * t.element_size() for t in tensors)
        gpu.log(name, 1, sum(moved), tensors)
        kernel[(programs,)](*held, **options)

    def log(self, name: str, launches: int, moved: int, tensors: list[Tensor]) -> None:
        size = max((tensor.numel() for tensor in tensors), default=0)
        wide = any(t.dtype == torch.float64 and t.numel() == size for t in tensors)
        self.kernels.append(Kernel(name, launches, moved, size, wide, _where()))


class _DeviceArguments(TorchFunctionMode):
    """Lets ``device=`` name the simulated GPU, and sees tensors made from Python numbers."""

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
            self.gpu.uploads.append(Transfer(name, _bytes(made), _where()))
            return SimulatedTensor(made)
        if name in ("tolist", "numpy") and isinstance(args[0], SimulatedTensor):
            if name == "numpy":
                raise TypeError("can't convert a tensor on the GPU to numpy")
            self.gpu.host_reads.append(Transfer(name, _bytes(args[0]), _where()))
            return args[0].held.tolist()
        return func(*args, **kwargs)


class _Operations(TorchDispatchMode):
    """Carries out every operation on the held tensors, and logs it."""

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
            raise NotImplementedError(f"{func} would hide what it launches")

        copied = self._log_transfers(name, leaves, simulated, on_gpu)
        result = func(*held_args, **held_kwargs)
        inputs = [x for x in pytree.tree_leaves((held_args, held_kwargs)) if isinstance(x, Tensor)]
        outputs = [x for x in pytree.tree_leaves(result) if isinstance(x, Tensor)]
        if not (copied or func.is_view or name in _NO_KERNEL):
            moved = _bytes_moved(name, inputs, outputs)
            self.gpu.log(name, _LAUNCHES.get(name, 1), moved, inputs + outputs)
        if name.endswith("_") and isinstance(leaves[0], Tensor):
            return leaves[0]
        if "out" in kwargs:
            return kwargs["out"]
        return pytree.tree_map_only(Tensor, SimulatedTensor, result) if on_gpu else result

    def _log_transfers(self, name: str, leaves: list[Any], simulated: list[SimulatedTensor], on_gpu: bool) -> bool:
        """Logs what crosses between host and device; whether that is all that happens."""
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        on_host = [t for t in tensors if not isinstance(t, SimulatedTensor)]
        if name == "_to_copy" and not (simulated and on_gpu):
            log = self.gpu.host_reads if simulated else self.gpu.uploads
            log.append(Transfer("copy", _bytes(tensors[0]), _where()))
            return True
        if name == "copy_" and on_host:
            log = self.gpu.host_reads if tensors[0] is on_host[0] else self.gpu.uploads
            log.append(Transfer("copy", _bytes(tensors[0]), _where()))
            return True
        masks = name in ("index", "index_put", "index_put_") and any(
            t.dtype in (torch.bool, torch.uint8) for t in tensors[1:2]
        )
        if name in _WAITING or masks:
            self.gpu.host_reads.append(Transfer(name, 8, _where()))
        if any(t.dim() for t in on_host):  # a scalar of the CPU travels with the launch
            if name not in ("index", "index_put", "index_put_"):
                raise RuntimeError(f"{name}: tensors on the CPU and the GPU at {_where()}")
            self.gpu.uploads.append(Transfer(name, sum(map(_bytes, on_host)), _where()))
        return name == "_local_scalar_dense"


@dataclass(frozen=True)
class Counts:
    """The log of one pass: transfers, launches and bytes moved."""

    host_reads: list[str]
    uploads: list[str]
    launches: int
    bytes: int


def measure(compute: Callable[..., Tensor], *tensors: Tensor) -> tuple[Counts, Counts]:
    """What the forward and the backward pass of a loss cost; the first tensor are the scores."""
    with SimulatedGPU() as gpu:
        scores, *others = map(gpu.tensor, tensors)
        loss = compute(scores.requires_grad_(), *others)
        forward = gpu.counts()
        gpu.forget()
        (gradient,) = gradients(loss, scores)
        assert gradient is not None
        assert gradient.shape == scores.shape
        return forward, gpu.counts()


def gradients(output: Tensor, *leaves: Tensor) -> list[Tensor | None]:
    """What ``torch.autograd.grad`` returns, on devices that are not there; of fake tensors, too."""
    root = output.grad_fn
    waiting = Counter(below for node in _graph(root) for below, _ in node.next_functions if below)
    incoming: dict[Any, dict[int, Tensor]] = {root: {output.output_nr: torch.ones_like(output)}}
    found: dict[int, Tensor] = {}
    ready = [root]
    while ready:
        node = ready.pop()
        given = incoming.pop(node, {})
        if hasattr(node, "variable"):  # a leaf
            found[id(node.variable)] = given[0]
            continue
        outputs = range(max(given, default=-1) + 1)
        with torch.no_grad():
            run = getattr(node, "apply", node)
            returned = run(*(given.get(place) for place in outputs))
        edges = node.next_functions
        returned = returned if isinstance(returned, tuple) else (returned,)
        if hasattr(node, "needs_input_grad"):  # of Python: gradients of all arguments
            wanted = zip(returned, node.needs_input_grad, strict=True)
            returned = [gradient for gradient, needed in wanted if needed]
            edges = [edge for edge in edges if edge[0]]
        for (below, place), gradient in zip(edges, returned, strict=True):
            if below is None:
                continue
            if gradient is not None:
                so_far = incoming.setdefault(below, {})
                so_far[place] = so_far[place] + gradient if place in so_far else gradient
            waiting[below] -= 1
            if not waiting[below]:
                ready.append(below)
    return [found.get(id(leaf)) for leaf in leaves]


def _graph(root: Any) -> set[Any]:
    seen, open_nodes = {root}, [root]
    while open_nodes:
        below = {node for node, _ in open_nodes.pop().next_functions if node} - seen
        seen |= below
        open_nodes += below
    return seen


def _inside(device: torch.device) -> torch.device:
    return _INSIDE if device.type == DEVICE.type else device


def _bytes(tensor: Tensor) -> int:
    """What reading a tensor once moves: an expanded one holds less than its size."""
    sizes = (size for size, step in zip(tensor.shape, tensor.stride(), strict=True) if step)
    elements = 1
    for size in sizes:
        elements *= size
    return elements * tensor.element_size() if tensor.numel() else 0


def _bytes_moved(name: str, inputs: list[Tensor], outputs: list[Tensor]) -> int:
    read, written = [_bytes(t) for t in inputs], [_bytes(t) for t in outputs]
    if name in ("zero_", "fill_"):
        return sum(written)
    # What an index names is read or changed there; of a small tensor, once, and then in the cache.
    if name in ("index", "index_select", "gather"):
        return sum(read[1:]) + sum(written) + min(read[0], sum(written))
    if name in ("index_put_", "index_add_", "index_copy_", "scatter_", "scatter_add_"):
        return sum(read[1:]) + 2 * min(read[0], read[-1])
    if name in ("bincount", "nonzero"):  # passes of their own for the size of the result
        return (3 if name == "bincount" else 2) * read[0] + sum(read[1:]) + sum(written)
    return sum(read) + sum(written)


def _where() -> str:
    for frame in _package_frames():
        return f"{Path(frame.filename).name}:{frame.lineno}"
    return "?"


def _package_frames() -> Iterator[traceback.FrameSummary]:
    stack = traceback.extract_stack(limit=80)
    return (frame for frame in reversed(stack) if frame.filename.startswith(_PACKAGE))
