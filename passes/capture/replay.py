"""The fake values of a graph, computed from those of its placeholders.

A model repeats its layers, and computing with symbolic sizes takes up to a millisecond per node. So of nodes that do the same
with inputs alike only the first is computed, and the others get fakes like its result: in memory of their own, or in the memory
of the same input. What an operation makes of fakes follows from their metadata and from what memory they share.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager
from torch.utils._pytree import tree_leaves

from quire.passes.fx import sizes_of, storage_of, value, written_by

_NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool)
_PLAIN = (bool, int, float, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


class _Odd(Exception):
    """A node of which nothing is taken from another."""


@dataclass(frozen=True)
class _At:
    """Stands for an input of a node."""

    index: int


class Replay(fx.Interpreter):
    """Sets the example_value of all nodes. Run it in ``mode``, without gradients, with fakes of that mode."""

    def __init__(self, gm: fx.GraphModule, mode: FakeTensorMode) -> None:
        super().__init__(gm)
        self._mode = mode
        self._made: dict[Any, Callable[[list[Any]], Any]] = {}

    def run_node(self, n: fx.Node) -> Any:
        if n.op == "output":
            return super().run_node(n)
        try:
            inputs = [leaf for x in n.all_input_nodes for leaf in tree_leaves(value(x))]
            key = _key(n, inputs)
        except _Odd:
            key = None
        if key in self._made:
            result = self._made[key](inputs)
        else:
            result = super().run_node(n)
            if key is not None and (again := self._again(result, inputs)) is not None:
                self._made[key] = again
        n.meta["example_value"] = result
        return result

    def _again(self, result: Any, inputs: list[Any]) -> Callable[[list[Any]], Any] | None:
        """Makes a result like this one, given inputs like these; None: only computing it does."""
        if type(result) in (tuple, list):
            each = [self._again(x, inputs) if isinstance(x, torch.Tensor) else None for x in result]
            own = [storage_of(x) for x in result if isinstance(x, torch.Tensor) and not _shares(x, inputs)]
            if None in each or len(own) != len(set(own)):
                return None
            return lambda inputs: type(result)(make(inputs) for make in each if make is not None)
        if not isinstance(result, torch.Tensor):
            return None  # as cheap to compute
        for at, x in enumerate(inputs):
            if x is result:
                return lambda inputs: inputs[at]
        try:
            _described(result, {})
        except _Odd:
            return None
        sizes, strides, offset = result.shape, result.stride(), result.storage_offset()
        symbols = {s for x in inputs for s in _symbols(x)}
        if result.requires_grad or not _symbols(result) <= symbols:  # the last: sizes that depend on data
            return None
        at = next((i for i, x in enumerate(inputs) if isinstance(x, torch.Tensor) and storage_of(x) == storage_of(result)), -1)
        if at < 0 and offset != 0:
            return None
        mode, dtype, device = self._mode, result.dtype, result.device
        count = result.untyped_storage().nbytes() // result.itemsize

        def make(inputs: list[Any]) -> torch.Tensor:
            with in_kernel_invocation_manager(mode):
                memory = inputs[at] if at >= 0 else torch.empty(count, dtype=dtype, device="meta")
                return FakeTensor(mode, memory.as_strided(sizes, strides, offset), device)

        # A view as another dtype is not one of these.
        return make if at < 0 or inputs[at].dtype == dtype and inputs[at].device == device else None


def _key(node: fx.Node, inputs: list[Any]) -> Any:
    """Equal for nodes that give the same, up to memory. Raises _Odd for those that change something, and for inputs other than
    plain fakes and numbers."""
    if node.op not in ("call_function", "call_method") or written_by(node) or not any(
            isinstance(x, torch.Tensor) for x in inputs) or torch._C._functorch.maybe_current_level() is not None:
        raise _Odd
    number: dict[fx.Node, Any] = {x: _At(i) for i, x in enumerate(node.all_input_nodes)}
    # As text: True is not 1, 0.0 is not -0.0.
    spelled = repr(fx.node.map_arg((node.args, node.kwargs), lambda n: number[n]))
    kinds = tuple(type(value(x)) if isinstance(value(x), (list, tuple)) else None for x in node.all_input_nodes)
    counts = tuple(len(tree_leaves(value(x))) for x in node.all_input_nodes) if any(kinds) else ()
    memory: dict[int, int] = {}
    return (node.op, node.target, spelled, kinds, counts, torch.is_grad_enabled(),
            tuple(_described(x, memory) for x in inputs))


def _described(x: Any, memory: dict[int, int]) -> Any:
    """What computing with a value depends on. ``memory``: storages, numbered as they come."""
    if isinstance(x, torch.Tensor):
        if type(x) is not FakeTensor or x.constant is not None or x.layout is not torch.strided or x.is_conj() or x.is_neg():
            raise _Odd
        return (x.dtype, x.device, x.requires_grad, isinstance(x, torch.nn.Parameter), sizes_of(x),
                memory.setdefault(storage_of(x), len(memory)))
    if isinstance(x, _NUMBERS):
        return type(x), x.node.expr
    if type(x) in _PLAIN:
        return type(x), repr(x)
    raise _Odd


def _symbols(x: Any) -> set[Any]:
    numbers = (*x.shape, *x.stride(), x.storage_offset()) if isinstance(x, torch.Tensor) else (x,)
    return {s for n in numbers if isinstance(n, _NUMBERS) for s in n.node.expr.free_symbols}


def _shares(x: torch.Tensor, inputs: list[Any]) -> bool:
    return any(isinstance(other, torch.Tensor) and storage_of(other) == storage_of(x) for other in inputs)


__all__ = ["Replay"]
