"""A model in float32, whatever its dtype, without a copy of it: each operation casts what it reads.

Under the mode ``InFloat32``, bfloat16 and float16 tensors, and these dtypes among arguments (``x.to(torch.bfloat16)``), become
float32 where an operation computes with them. So a model, or a graph of it, runs as with float32 weights, autocast regions
included. The cast copy of a weight lives as long as the operation that reads it.

* Views of weights stay views, and rows taken from a table (``embedding``, an index) are cast, not the table.
* A quantized weight (a tensor subclass) takes itself apart first; its own operations compute in float32 where they take it.
* Writes to the model's own tensors of half precision are as they were.
* An operation that takes no float32 (a kernel for half precision) runs on halves, and its result is cast; ``kept`` names it.
* Tokens are 0, not sampled: nothing reads them, and a start would wait for the sampling kernel of float32 to be compiled.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from quire.attn_ops.attention import attention, attention_eager
from quire.attn_ops.ops.sampling import sample_tokens_op

HALVES = (torch.bfloat16, torch.float16)
EXACT = ("none", "ieee")  # settings of float32 products that round nothing
#: Operations that move rows and compute nothing.
_MOVES = (torch.ops.aten.embedding.default, torch.ops.aten.index.Tensor, torch.ops.aten.index_select.default)
_PRODUCTS = {  # the place of the left factor; the right one is behind it
    torch.ops.aten.mm.default: 0, torch.ops.aten.bmm.default: 0,
    torch.ops.aten.addmm.default: 1, torch.ops.aten.baddbmm.default: 1,
}


class InFloat32(TorchDispatchMode):
    """See the module's docstring. ``half``: the model's dtype, for operations that take no float32; ``kept`` has their names.
    ``lengths``: of the sequences in the row of tokens, which ``quire::attention`` keeps apart; None: it is one. ``reordered``:
    each matrix product in two sums, to see what the order of summation does to a result."""

    def __init__(self, half: torch.dtype, lengths: Sequence[int] | None = None, reordered: bool = False) -> None:
        super().__init__()
        self.half, self.lengths, self.reordered, self.kept = half, lengths, reordered, set[str]()
        self._calls = _Calls()

    def __enter__(self) -> InFloat32:
        self._calls.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._calls.__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(t not in (torch.Tensor, torch.nn.Parameter) for t in types):
            return NotImplemented  # it takes itself apart, and its parts come here
        if func is sample_tokens_op:
            return args[0].new_zeros(len(args[0]), dtype=torch.int64)
        if _is_view(func) or func in _MOVES or any(_is_half(t) for t in written(func, args, kwargs)):
            out = func(*args, **kwargs)
            return out if _is_view(func) else _map(_widened, out)
        wide_args, wide_kwargs = _map(_widened, (args, kwargs))
        if func is attention and self.lengths is not None:
            return _attend(self.lengths, *wide_args, **wide_kwargs)
        run = functools.partial(_in_two_sums, func) if self.reordered and func in _PRODUCTS else func
        try:
            return _map(_widened, run(*wide_args, **wide_kwargs))
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, TypeError, ValueError):  # NotImplementedError is a RuntimeError
            with contextlib.suppress(RuntimeError, TypeError, ValueError):
                half_args, half_kwargs = _map(self._narrowed, (args, kwargs))
                out = _map(_widened, func(*half_args, **half_kwargs))
                self.kept.add(str(func))
                return out
            raise

    def _narrowed(self, x: Any) -> Any:
        return x.to(self.half) if isinstance(x, torch.Tensor) and x.dtype == torch.float32 else x


class _Calls(TorchFunctionMode):
    """For functions that compare dtypes before they call an operation (``F.conv1d``): again, with all inputs cast."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        try:
            return func(*args, **kwargs)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:
            if not any(map(_is_half, tree_leaves((args, kwargs)))):
                raise
        return func(*_map(_widened, args), **_map(_widened, kwargs))


def _map(change: Callable[[Any], Any], x: Any) -> Any:
    """``tree_map``, in a fraction of its time for what operations take and give: a trial has thousands."""
    kind = type(x)
    if kind is tuple or kind is list:
        return kind([_map(change, y) for y in x])
    if kind is dict:
        return {key: _map(change, y) for key, y in x.items()}
    return tree_map(change, x) if isinstance(x, (tuple, list, dict)) else change(x)


def _is_half(x: Any) -> bool:
    return type(x) in (torch.Tensor, torch.nn.Parameter) and x.dtype in HALVES


def _widened(x: Any) -> Any:
    if isinstance(x, torch.dtype):
        return torch.float32 if x in HALVES else x
    return x.float() if _is_half(x) else x


@functools.cache
def _is_view(func: Any) -> bool:
    returns = getattr(getattr(func, "_schema", None), "returns", ())
    return any(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[Any]:
    for at, name in _writes(func):
        given = args[at] if at < len(args) else kwargs.get(name)
        yield from given if isinstance(given, (list, tuple)) else (given,)


@functools.cache
def _writes(func: Any) -> tuple[tuple[int, str], ...]:
    """Place and name of each argument that the operation writes."""
    arguments = getattr(getattr(func, "_schema", None), "arguments", ())
    return tuple((at, a.name) for at, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write)


def _attend(lengths: Sequence[int], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any, **options: Any
            ) -> torch.Tensor:
    parts = zip(*(t.split(list(lengths), 2) for t in (q, k, v)), strict=True)
    return torch.cat([attention_eager(*part, *rest, **options) for part in parts], 2)


def _in_two_sums(func: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    at = _PRODUCTS[func]
    left, right = args[at : at + 2]
    middle = left.shape[-1] // 2
    if not middle or not left.is_floating_point():
        return func(*args, **kwargs)
    whole = func(*args[:at], left[..., :middle], right[..., :middle, :], **kwargs)
    if not at:
        return whole + func(left[..., middle:], right[..., middle:, :], **kwargs)
    return func(whole, left[..., middle:], right[..., middle:, :], alpha=kwargs.get("alpha", 1))


@contextlib.contextmanager
def exact_products() -> Iterator[None]:
    """While inside, float32 products are not rounded to TF32 or bfloat16."""
    backends = [getattr(torch.backends, name).matmul for name in ("cuda", "mkldnn")]
    before, whole = [b.fp32_precision for b in backends], None
    if not all(precision in EXACT for precision in before):
        with contextlib.suppress(RuntimeError):  # it raises one where backends were set one by one
            whole = torch.get_float32_matmul_precision()
        _set_products(backends, "highest" if whole else None, ["ieee", "ieee"])
    try:
        yield
    finally:
        _set_products(backends, whole, before)


def _set_products(backends: Sequence[Any], whole: str | None, each: Sequence[str]) -> None:
    if whole:  # the older setting too, or PyTorch complains that they differ
        torch.set_float32_matmul_precision(whole)
    for backend, precision in zip(backends, each, strict=True):
        if backend.fp32_precision != precision:
            backend.fp32_precision = precision
