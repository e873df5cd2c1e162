"""Launching Triton kernels; and recording launches, so that other processes can compile the kernels ahead.

Triton compiles kernels one after the other, each at its first launch, some fifty of them when a model starts. Which ones
follows from shapes, dtypes and strides alone. So an op's implementation can be called with fake tensors inside ``recording``:
nothing is launched, and each ``launch`` is recorded in a form that another process can compile
(``attn_ops/kernels/compile_worker.py``). The real launch finds the result in Triton's cache on disk.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch

from quire.attn_ops.context import setting
from quire.attn_ops.kernels.host import on_device

_recorded: ContextVar[set[Launch] | None] = ContextVar("quire_recorded_launches", default=None)
#: Op overload -> its CUDA implementation, for ops that launch kernels with ``launch`` and work on fake tensors too.
implementations: dict[Any, Callable[..., Any]] = {}


@dataclass(frozen=True)
class TensorArgument:
    """What a kernel's code depends on of a tensor. Triton takes it for a tensor."""

    dtype: torch.dtype
    aligned: bool  # its address is a multiple of 16 bytes

    def data_ptr(self) -> int:
        return 0 if self.aligned else 1


@dataclass(frozen=True)
class DescriptorArgument:
    """What a kernel's code depends on of a tensor descriptor."""

    dtype: torch.dtype
    block_shape: tuple[int, ...]


@dataclass(frozen=True)
class Launch:
    """A kernel launch: equal to another iff both run the same code.

    Args:
        module, name: of the ``@triton.jit`` function.
        arguments: tensors as TensorArgument, their descriptors as DescriptorArgument; integers that are not constants as a
            representative of their kind (1, multiple of 16, neither; more than 32 bits); tuples element by element.
        options: (name, value), such as num_warps, and arguments given by name.
    """

    module: str
    name: str
    arguments: tuple[Any, ...]
    options: tuple[tuple[str, Any], ...]

    @classmethod
    def of(cls, kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Launch:
        constant = _constants(kernel.fn)
        found = [_described(a, c) for a, c in zip(args, constant.values(), strict=False)]
        named = [(k, _described(v, constant.get(k, True))) for k, v in sorted(options.items())]
        return cls(kernel.fn.__module__, kernel.fn.__qualname__, tuple(found), tuple(named))


@functools.cache
def _constants(function: Any) -> dict[str, bool]:
    """For each parameter of a kernel, whether it is a constant."""
    return {p.name: "constexpr" in str(p.annotation) for p in inspect.signature(function).parameters.values()}


def _described(value: Any, constant: bool) -> Any:
    if isinstance(value, torch.Tensor):
        return TensorArgument(value.dtype, int(value.storage_offset()) * value.element_size() % 16 == 0)
    if constant or value is None or isinstance(value, (bool, DescriptorArgument)):
        return value
    if isinstance(value, tuple):
        items = [_described(v, False) for v in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, float):
        return 0.5
    if value == 1:
        return 1
    return (0 if -(2**31) <= value < 2**31 else 2**40) + (16 if value % 16 == 0 else 17)


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, pdl: bool | None = None, dependent: bool = True, **options: Any
           ) -> None:
    """``kernel[grid](*args, **options)`` on the device of the first tensor; inside ``recording`` it is recorded instead.
    ``pdl``: for a kernel with a constant PDL: whether to use programmatic dependent launch (attn_ops/kernels/pdl.py).
    ``dependent``: False: only the next kernel may be launched so, not this one; see NOTE [Pairs] there."""
    if pdl is not None:
        options["PDL"] = pdl
        if pdl and dependent:  # the interpreter knows no launch_pdl
            options["launch_pdl"] = True
    recorded = _recorded.get()
    if recorded is None:
        fix_cache_key(kernel)
        with on_device(next(a.device for a in args if isinstance(a, torch.Tensor))):
            kernel[grid](*args, **options)
        if (constants := getattr(kernel, "used_global_vals", None)) is not None:
            constants.clear()  # Triton compares each of them at every launch, and ours never change
    else:
        recorded.add(Launch.of(kernel, args, options))


def descriptor(tensor: torch.Tensor, block_shape: tuple[int, ...]) -> Any:
    """An argument of ``launch``: a tensor descriptor, by which a kernel loads blocks of a contiguous ``tensor``; zeros past its
    end. The last dim's bytes must be a multiple of 16."""
    if is_recording():
        return DescriptorArgument(tensor.dtype, block_shape)
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), list(block_shape))


#: How CUDA graphs are recorded: what is not recorded (allocating memory, loading kernels, asking for events) is done at once,
#: by the thread that records and by others. To all on the same GPU CUDA still refuses ``torch.cuda.synchronize``, and PyTorch
#: its generator of random numbers; and their work on the stream that records would be recorded.
CAPTURE_MODE = "relaxed"
_recorder = threading.RLock()
_side_streams: dict[int, torch.cuda.Stream] = {}


@contextlib.contextmanager
def side_stream(device: torch.device) -> Iterator[torch.cuda.Stream]:
    """The stream on which graphs are captured, one per device: cuBLAS keeps a workspace of 32 MiB for each stream it ran on.
    Inside, no other thread has one, or runs ``synchronize``: the graph of an engine would record, and repeat, what another
    engine does on the stream when it starts. ``device``: a CUDA device; without an index the current one."""
    with _recorder:
        index = torch.cuda.current_device() if device.index is None else device.index
        if index not in _side_streams:
            _side_streams[index] = torch.cuda.Stream(index)
        yield _side_streams[index]


def synchronize(device: torch.device) -> None:
    """``torch.cuda.synchronize`` when no thread has a ``side_stream``: it would end the recording of a graph with an error."""
    with _recorder:
        torch.cuda.synchronize(device)


_fixed: set[int] = set()


def fix_cache_key(kernel: Any) -> None:
    """Make the kernel's key in Triton's cache depend on its source alone.

    Triton 3.6 and 3.7 include the global constants of a called function only if that function has a key already: the key
    would depend on what the process compiled before.
    """
    if id(kernel) in _fixed:
        return
    _fixed.add(id(kernel))
    function = getattr(kernel, "fn", None)
    for name in getattr(getattr(function, "__code__", None), "co_names", ()):
        called = function.__globals__.get(name)  # type: ignore[union-attr]
        if hasattr(called, "used_global_vals"):
            fix_cache_key(called)
    _ = getattr(kernel, "cache_key", None)  # the interpreter's functions have none


def recording() -> contextlib.AbstractContextManager[set[Launch]]:
    """Inside, this thread launches nothing; launches are collected in the set."""
    return setting(_recorded, set())


def is_recording() -> bool:
    """Whether this thread is inside ``recording``."""
    return _recorded.get() is not None
