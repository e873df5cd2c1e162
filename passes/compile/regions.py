"""Compile each distinct layer once: a lowered graph is cut behind every attention op, and equal pieces share one compilation.

So the compiler sees three small graphs instead of one of 32 layers::

    prepared = prepare(...)                           run as it is, before all pieces, with what it is made of
    piece 0: embed, norm, q/k/v, rope, attention      compiled
    piece 1: o, residual, norm, mlp, residual, norm, q/k/v, rope, attention      compiled
    piece 2 to 31: the code of piece 1, given the weights and caches of other layers
    piece 32: o, residual, norm, mlp, residual, norm, LM head      compiled

Nothing is lost at the cuts: an attention op is opaque to the compiler, which fuses nothing across it.

``each_once``: for running every kernel of a step once, as before a CUDA graph is recorded.

Two pieces are equal if they run the same operations with the same constants on inputs of the same dtypes, devices, strides and
(symbolic) sizes: ``_signature``. Compiled whole, with the reason logged: graphs whose pieces all differ, graphs that change in
place what another piece made (a compiler of pieces does not see all users of that memory), graphs with nested graphs.
"""

from __future__ import annotations

import itertools
import logging
import operator
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from quire.attn_ops.context import setting
from quire.passes.compile.size_guards import SYMBOL
from quire.passes.fake_values import At, again, any_sizes, computed, fake_input
from quire.passes.fx import ancestors, evaluate, placeholders, storage_of, value, written_by
from quire.passes.rewrite.lower import Lowered

logger = logging.getLogger(__name__)
Compile = Callable[[fx.GraphModule, list[Any]], Callable[..., Any]]
Look = Callable[[list[fx.Node], dict[fx.Node, Any]], None]
_BEFORE = -1  # the place of what runs uncompiled, before all pieces
_SIZES = itertools.count(1009, 2)  # all different, so that no two symbols are taken for one
_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer, FakeTensor)
_once: ContextVar[bool] = ContextVar("quire_each_region_once", default=False)
_CONSTANTS = (bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format)


def each_once() -> AbstractContextManager[bool]:
    """While inside, in this context, a graph that was cut runs one piece of each kind, whose results stand for those of all
    pieces of that kind: its own results are wrong. What a piece launches does not depend on its weights."""
    return setting(_once, True)


class _Whole(Exception):
    """The graph cannot be cut; the message says why."""


@dataclass(frozen=True)
class _Piece:
    """Some nodes in graph order, what they read from before, and what later nodes read from them."""

    nodes: list[fx.Node]
    inputs: list[fx.Node]
    outputs: list[fx.Node]


def compile_by_regions(lowered: Lowered, compile: Compile, always: bool = False, look: Look | None = None
                       ) -> Callable[..., Any]:
    """Compile ``lowered.gm`` piece by piece with ``compile``: (graph, fake inputs) -> callable. Returns a callable like the
    graph. ``always``: cut it even if no two of its pieces are equal. ``look``: called first, if the graph is cut, with the
    nodes before all pieces, those of one piece of each kind, and the fake values of all nodes."""
    graph = lowered.gm.graph
    try:
        values = _Values(lowered)
        before, members = _members(graph, _places(lowered))
        values.compute(before, _BEFORE)
        pieces: list[tuple[_Piece, Any]] = []
        first: dict[Any, _Piece] = {}
        for at, nodes in enumerate(members):
            piece = _piece(graph, nodes, values.of)
            signature = _signature(piece, values)
            like = first.setdefault(signature, piece)
            if like is piece or not values.copy(piece, like, at):
                values.compute(piece.nodes, at)
            for x in map(values.of.get, piece.outputs):
                if not isinstance(x, (int, torch.SymInt, torch.SymFloat)) and type(x) not in _PLAIN and not _wraps(x):
                    raise _Whole(f"a {type(x).__name__} crosses a cut")
            pieces.append((piece, signature))
        if len(first) == len(pieces) and not always:
            raise _Whole(f"its {len(first)} pieces all differ")
    except _Whole as why:
        logger.info("regions: compiled whole: %s", why)
        return compile(lowered.gm, [value(n) for n in placeholders(graph)])
    if look is not None:
        look([*before, *(n for piece in first.values() for n in piece.nodes)], values.of)
    compiled = {signature: compile(_graph_of(piece, values.of), [values.of[n] for n in piece.inputs])
                for signature, piece in first.items()}
    logger.info("regions: %d pieces, %d different", len(pieces), len(first))
    return _joined(graph, before, [(compiled[signature], piece) for piece, signature in pieces])


def _places(lowered: Lowered) -> dict[fx.Node, int]:
    """The number of each node's piece. A part of a tuple goes where the tuple is made, so that only tensors cross."""
    place: dict[fx.Node, int] = {}
    prepare, at = lowered.target.backend.prepare, 0
    before = {n for p in lowered.gm.graph.nodes if prepare is not None and p.target is prepare for n in ancestors(p)}
    for node in lowered.gm.graph.nodes:
        if node.op in ("get_attr", "call_module"):
            raise _Whole(f"it holds a constant or a nested graph ({node.op} {node.target})")
        if node.op in ("placeholder", "output") or _is_size(node):
            continue
        source = node.args[0] if node.target is operator.getitem else None
        if node in before:
            place[node] = _BEFORE
        elif isinstance(source, fx.Node) and source in place and not isinstance(value(source), torch.Tensor):
            place[node] = place[source]
        else:
            place[node] = at
        at += node.target in lowered.target.backend.ops
    return place


def _is_size(node: fx.Node) -> bool:
    """Whether this is a number computed from sizes alone. Dynamo computes each once, where it is first needed; here every piece
    that needs one does, or the first of equal pieces would differ from the others."""
    return (node.op == "call_function" and isinstance(value(node), (int, torch.SymInt)) and bool(node.all_input_nodes)
            and all(n.op == "placeholder" and isinstance(value(n), torch.SymInt) or _is_size(n) for n in node.all_input_nodes))


def _members(graph: fx.Graph, place: dict[fx.Node, int]) -> tuple[list[fx.Node], list[list[fx.Node]]]:
    """The nodes that run before all pieces, and those of each piece, preceded by the sizes that they need."""
    if any(map(_is_size, graph.output_node().all_input_nodes)):
        raise _Whole("it returns a size")
    nodes: dict[int, list[fx.Node]] = {}
    for node, at in place.items():
        nodes.setdefault(at, []).append(node)
    before, members = nodes.pop(_BEFORE, []), []
    for _, own in sorted(nodes.items()):
        sizes = {s for n in own for i in n.all_input_nodes if _is_size(i) for s in ancestors(i) if _is_size(s)}
        members.append(([n for n in graph.nodes if n in sizes] if sizes else []) + own)
    return before, members


def _piece(graph: fx.Graph, nodes: list[fx.Node], values: dict[fx.Node, Any]) -> _Piece:
    """``values``: of what the nodes read from before."""
    own = set(nodes)
    read = dict.fromkeys(i for n in nodes for i in n.all_input_nodes if i not in own)
    # A size that the tensors have only inside an expression must reach the piece as a number of its own.
    sized = {str(s) for n in read for s in _symbols(values[n])}
    symbols = [n for n in placeholders(graph) if isinstance(values[n], torch.SymInt) and str(values[n]) in sized]
    return _Piece(nodes, list(dict.fromkeys([*symbols, *read])),
                  [n for n in nodes if not _is_size(n) and any(u not in own for u in n.users)])


def _symbols(x: Any) -> set[Any]:
    """Free symbols of a tensor's sizes and strides."""
    numbers = (*x.shape, *x.stride()) if isinstance(x, torch.Tensor) else ()
    return {s for n in numbers if isinstance(n, torch.SymInt) for s in n.node.expr.free_symbols}


class _Values:
    """The fake value of every node, ``of``, computed again: those that passes left behind may have other strides. Of equal
    pieces the first is computed, and of the others what later pieces read is copied: that saves seconds."""

    def __init__(self, lowered: Lowered) -> None:
        self._lowered = lowered
        self._fake: Any = lowered.example_inputs[0].fake_mode  # type: ignore[attr-defined]
        self.of: dict[fx.Node, Any] = {n: value(n) for n in placeholders(lowered.gm.graph)}
        self.caches = {storage_of(t) for t in lowered.example_inputs}  # which a piece may change without having made them
        self._made_in: dict[int, int] = {}  # storage -> the piece that made it

    def compute(self, nodes: Sequence[fx.Node], at: int) -> None:
        """Values of the nodes of piece ``at``, in order; those of their inputs are known."""
        interpreter = fx.Interpreter(self._lowered.gm)
        interpreter.env = self.of
        with self._fake, enable_python_dispatcher(), torch.no_grad(), any_sizes(self._fake):
            for n in nodes:
                for written in written_by(n):
                    memory = storage_of(self.of[written])
                    if memory not in self.caches and self._made_in.get(memory) != at:
                        raise _Whole(f"{n.name} changes in place what it did not make")
                result = computed(n, self.of.__getitem__, self._fake, interpreter.run_node)
                if n.target is self._lowered.target.backend.prepare:
                    result = [_of_any_size(t, f"quire_{n.name}_{i}", self._fake) for i, t in enumerate(result)]
                self._set(n, result, at)

    def copy(self, piece: _Piece, like: _Piece, at: int) -> bool:
        """Give the outputs of piece ``at`` values like those of an equal piece; False, and nothing done, if they may differ."""
        read = [(self.of[n], self.of[m]) for n, m in zip(piece.inputs, like.inputs, strict=True)]
        with self._fake, torch.no_grad():
            found = copies([self.of[n] for n in like.outputs], read)
        for node, t in zip(piece.outputs, found or (), strict=found is not None):
            self._set(node, t, at)
        return found is not None

    def _set(self, node: fx.Node, result: Any, at: int) -> None:
        self.of[node] = result
        for t in tree_leaves(result):
            if isinstance(t, torch.Tensor):
                self._made_in.setdefault(storage_of(t), at)


def copies(outputs: Sequence[Any], read: Sequence[tuple[Any, Any]]) -> list[torch.Tensor] | None:
    """Fakes for the outputs of a piece, like the ``outputs`` of an equal one. None where fresh tensors might be wrong: outputs
    that share memory, are not plain fakes, or have sizes for which the inputs of this piece have other symbols. ``read``:
    (input of the piece, input of the equal piece)."""
    if any(type(t) is not FakeTensor for t in outputs) or not {storage_of(t) for t in outputs}.isdisjoint(
            s for _, there in read for s in _storages(there)):
        return None
    numbers = ([(*x.shape, *x.stride()) if isinstance(x, torch.Tensor) else (x,) for x in pair] for pair in read)
    same = [a for here, there in numbers for a, b in zip(here, there, strict=True)
            if isinstance(a, torch.SymInt) and str(a) == str(b)]
    sized = {s for size in same for s in size.node.expr.free_symbols}
    memory = (t.untyped_storage().nbytes() for t in outputs)
    if any(isinstance(size, torch.SymInt) and not size.node.expr.free_symbols <= sized for size in memory):
        return None
    mode: Any = next((t.fake_mode for t in outputs), None)
    make = again(list(outputs), same)
    return None if make is None else make(same, mode)


def _of_any_size(tensor: torch.Tensor, name: str, fake: Any) -> torch.Tensor:
    """A fake like ``tensor``, a result of prepare, whose sizes may depend on data: a piece takes it as an input."""
    dynamic = tuple(isinstance(s, torch.SymInt) for s in tensor.shape)
    shape = [next(_SIZES) if d else s for s, d in zip(tensor.shape, dynamic, strict=True)]
    return fake_input(fake, name, torch.empty(shape, dtype=tensor.dtype, device="meta"), dynamic, tensor.device)


def _storages(x: Any) -> set[int]:
    if _wraps(x):
        return {s for name in x.__tensor_flatten__()[0] for s in _storages(getattr(x, name))}
    return {storage_of(t) for t in tree_leaves(x) if isinstance(t, torch.Tensor)}


def _wraps(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and is_traceable_wrapper_subclass(x)


def _graph_of(piece: _Piece, values: dict[fx.Node, Any]) -> fx.GraphModule:
    """The piece as a graph of its own, which returns the tuple of its outputs."""
    graph, new = fx.Graph(), {}
    for i, node in enumerate(piece.inputs):
        holder = new[node] = graph.placeholder(f"in_{i}")
        holder.meta["example_value"] = values[node]
        holder._dynamo_source = getattr(node, "_dynamo_source", None) or ConstantSource(f"quire_{node.name}")
    for node in piece.nodes:
        new[node] = graph.node_copy(node, lambda n: new[n])
        new[node].meta["example_value"] = values[node]  # AOTAutograd caches no graph in which one is missing
    graph.output(tuple(new[n] for n in piece.outputs))
    return fx.GraphModule({}, graph)


def _signature(piece: _Piece, values: _Values) -> Any:
    """Equal for two pieces only if the compiled code of one is right for the other; made of what the piece reads and does."""
    names: dict[str, str] = {}
    storages: dict[int, int] = {}
    number = {n: i for i, n in enumerate([*piece.inputs, *piece.nodes])}

    def sizes(numbers: Iterable[Any]) -> str:  # the names of symbols do not matter, but which of them are the same
        return SYMBOL.sub(lambda m: names.setdefault(m[0], f"size{len(names)}"), ", ".join(map(str, numbers)))

    def described(x: Any) -> tuple[Any, ...]:
        if _wraps(x):  # code is compiled for what it wraps
            parts, context = x.__tensor_flatten__()
            inner = tuple((name, described(getattr(x, name))) for name in parts)
            return type(x), x.dtype, sizes([*x.shape, *x.stride()]), x.requires_grad, repr(context), inner
        if type(x) in _PLAIN:
            alias = storages.setdefault(storage_of(x), len(storages))
            where = sizes([*x.shape, *x.stride(), x.storage_offset()])
            return type(x), x.dtype, x.device, x.requires_grad, alias, where, storage_of(x) in values.caches
        return type(x), sizes([x])

    def argument(a: Any) -> Any:
        if isinstance(a, fx.Node):
            return At(number[a])
        if a is None or a is Ellipsis or isinstance(a, _CONSTANTS):
            return a
        raise _Whole(f"an operation has an argument of type {type(a).__name__}")

    inputs = tuple(described(values.of[n]) for n in piece.inputs)
    # As text: True is not 1, 0.0 is not -0.0.
    nodes = tuple((n.op, n.target, repr(fx.node.map_aggregate((n.args, n.kwargs), argument))) for n in piece.nodes)
    return inputs, nodes, tuple(number[n] for n in piece.outputs)


def _joined(graph: fx.Graph, before: list[fx.Node], pieces: list[tuple[Callable[..., Any], _Piece]]) -> Callable[..., Any]:
    """The pieces as one callable. Values are dropped after their last reader."""
    given, result = placeholders(graph), graph.output_node().args[0]
    kept = {*graph.output_node().all_input_nodes, *given}
    last = {n: i for i, (_, piece) in enumerate(pieces) for n in piece.inputs}
    steps = [(run, piece.inputs, piece.outputs, [n for n in piece.inputs if last[n] == i and n not in kept])
             for i, (run, piece) in enumerate(pieces)]

    def joined(*args: Any) -> Any:
        values = dict(zip(given, args, strict=True))
        evaluate(before, values)
        once, made = _once.get(), dict[Callable[..., Any], Any]()
        for run, inputs, outputs, dead in steps:
            results = made.get(run) if once else None
            if results is None:
                results = run(*[values[n] for n in inputs])
                if once:
                    made[run] = results
            values.update(zip(outputs, results, strict=True))
            for n in dead:
                del values[n]
        return fx.node.map_arg(result, values.__getitem__)

    return joined
