"""Launching Triton kernels; and noting down what would be launched, so that it can be compiled ahead, by other processes.

Triton compiles a kernel when it is first launched, one after the other, and a model's start launches some fifty for the first
time. Which ones follows from shapes, dtypes and strides alone. So an op's implementation can be called with fake tensors
inside ``noting``: it launches nothing, and each ``launch`` is noted down, in a form that another process can compile it from
(``attn_ops/kernels/compile_worker.py``). What that leaves in Triton's cache on disk is found at the real launch.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch

_noted: ContextVar[set[Launch] | None] = ContextVar("quire_noted_launches", default=None)
#: Op overload -> its implementation, for ops that launch kernels with ``launch`` and work on fake tensors too.
implementations: dict[Any, Callable[..., Any]] = {}


@dataclass(frozen=True)
class TensorArgument:
    """What a kernel's code depends on of a tensor: looks to Triton like one."""

    dtype: torch.dtype
    aligned: bool  # its address is a multiple of 16 bytes

    def data_ptr(self) -> int:
        return 0 if self.aligned else 1


@dataclass(frozen=True)
class Launch:
    """A launch of a kernel, up to what makes no difference for its code.

    Args:
        module, name: of the ``@triton.jit`` function.
        arguments: tensors as TensorArgument; integers that are no constants as others of their kind (1, a multiple of 16,
            neither; more than 32 bits).
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
    """Of each parameter of a kernel, whether it is a constant."""
    return {p.name: "constexpr" in str(p.annotation) for p in inspect.signature(function).parameters.values()}


def _described(value: Any, constant: bool) -> Any:
    if isinstance(value, torch.Tensor):
        return TensorArgument(value.dtype, int(value.storage_offset()) * value.element_size() % 16 == 0)
    if constant or isinstance(value, bool) or value is None:
        return value
    if isinstance(value, float):
        return 0.5
    if value == 1:
        return 1
    return (0 if -(2**31) <= value < 2**31 else 2**40) + (16 if value % 16 == 0 else 17)


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """``kernel[grid](*args, **options)``, or inside ``noting`` a note of it."""
    noted = _noted.get()
    if noted is None:
        settle(kernel)
        kernel[grid](*args, **options)
    else:
        noted.add(Launch.of(kernel, args, options))


def side_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream on which graphs are captured, one for all: cuBLAS keeps a workspace of 32 MiB for every stream that it ran on,
    and each new stream would be another.

    Args:
        device: a CUDA device; without an index the current one.
    """
    return _side_stream(torch.cuda.current_device() if device.index is None else device.index)


@functools.cache
def _side_stream(index: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(index)


_settled: set[int] = set()


def settle(kernel: Any) -> None:
    """Make the kernel's name in Triton's cache depend on its source alone.

    Triton 3.6 and 3.7 put the global constants of a function that the kernel calls into the name if that function has a name of
    its own already, and leave them out else: the name would depend on what else was compiled before, in each process.
    """
    if id(kernel) in _settled:
        return
    _settled.add(id(kernel))
    function = getattr(kernel, "fn", None)
    for name in getattr(getattr(function, "__code__", None), "co_names", ()):
        called = function.__globals__.get(name)  # type: ignore[union-attr]
        if hasattr(called, "used_global_vals"):
            settle(called)
    _ = getattr(kernel, "cache_key", None)  # the interpreter's functions have none


@contextlib.contextmanager
def noting() -> Iterator[set[Launch]]:
    """Inside, this thread launches nothing: what it would is collected."""
    found: set[Launch] = set()
    token = _noted.set(found)
    try:
        yield found
    finally:
        _noted.reset(token)


__all__ = ["Launch", "TensorArgument", "implementations", "launch", "noting", "settle", "side_stream"]
