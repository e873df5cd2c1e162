"""Trace code again for steps: for rows of any length, where Dynamo traced it for one length only; and by transformers'
attention interface, where its attention cannot be raised (eager attention with softcap or sinks, chunks).

Dynamo makes sizes of 0 and 1 constants, so a decode step of one token has a trace of its own, from which no mask can be read
and in which the model may take another path. ``TracedCall`` traces the same code on a longer row, and ``AnyLength`` runs that
graph with the inputs of the call: the placeholders of both have the same sources, and Dynamo's guards of the first come from
the same code and objects. A row of one token is padded to two, the shortest that the graph serves.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import inspect
import re
import types
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import fx

from quire.attn_ops.backend import UnsupportedAttention
from quire.attn_ops.step import Step
from quire.passes.capture.hf_experts import experts_active
from quire.passes.capture.hf_interface import interface_active, uses_interface
from quire.passes.fx import is_module_tensor, is_stored, placeholders, source_name, symbolic, translator, value, with_own_code

_POSITIONS = re.compile(r"position_ids|cache_position")  # in the names of inputs of transformers' models
TRACED_TOKENS = 23  # of a row that stands for any length; not 0 or 1, and no usual size of another dimension
_FEW_TOKENS = 3  # of one for a model that has fewer positions; of 2, much of PyTorch makes a constant

T = TypeVar("T")


class Traced(Exception):
    """Raised by a graph that is called only to be traced."""


def traced_on_many_or_few(trace: Callable[[int], T], forget: Callable[[], None], longest: int | None) -> T:
    """What ``trace`` gives of a row of TRACED_TOKENS; where the model cannot be served so, and no sequence will be longer than
    ``longest``, which is less, of a shorter one: the conditions of that trace on its length say up to what length it holds.
    ``forget``: undoes a trace. Raises UnsupportedAttention as ``trace``."""
    try:
        return trace(TRACED_TOKENS)
    except UnsupportedAttention:
        if longest is None or longest >= TRACED_TOKENS:
            raise
        forget()
        return trace(_FEW_TOKENS)


@dataclass(eq=False)
class _Row:
    """A tensor argument with a token dimension: (1, T) integers, or (1, T, width)."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    def make(self) -> torch.Tensor:
        made = torch.zeros(1, TRACED_TOKENS, *self.shape[2:], dtype=self.dtype, device=self.device)
        torch._dynamo.mark_dynamic(made, 1)
        return made


class TracedCall:
    """A call of the function that Dynamo is tracing. Holds modules and tensors weakly; see NOTE [Not kept alive]. ``tokens``:
    length of its rows; None if no argument is one."""

    def __init__(self, code: types.CodeType, scope: dict[str, Any], names: dict[str, Any]) -> None:
        self.code, self._scope = code, scope
        self.tokens: int | None = None
        self._rows: dict[int, _Row] = {}
        self._names = {name: self._weak(x) for name, x in names.items()}

    @classmethod
    def current(cls) -> TracedCall | None:
        """The call being traced; None outside a trace, or where this torch does not show it."""
        tx: Any = getattr(getattr(translator(), "output", None), "root_tx", None)
        if not isinstance(getattr(tx, "f_locals", None), dict):
            return None
        return cls(tx.f_code, tx.f_globals, dict(tx.f_locals))

    def _weak(self, x: Any) -> Callable[[], Any]:
        """How to get ``x``, or its like, again; a ``weakref.ref`` where possible."""
        if type(x) in (list, tuple):
            items, kind = [self._weak(each) for each in x], type(x)
            return lambda: kind(each() for each in items)
        if type(x) is dict:
            entries = {k: self._weak(v) for k, v in x.items()}
            return lambda: {k: get() for k, get in entries.items()}
        if isinstance(x, torch.Tensor) and x.shape[:1] == (1,) and x.dim() == (3 if x.is_floating_point() else 2):
            if self.tokens is None or not x.is_floating_point():
                self.tokens = x.shape[1]
            row = self._rows.setdefault(id(x), _Row(x.shape, x.dtype, x.device))
            return lambda: row
        try:
            reference = weakref.ref(x)
        except TypeError:
            return lambda: x

        def get() -> Any:
            found = reference()
            if found is None:
                raise UnsupportedAttention("an argument of the compiled call is gone; run it again after torch._dynamo.reset()")
            return found

        return get

    @property
    def model(self) -> torch.nn.Module | None:
        """The transformers model whose forward is called, if its attention goes through transformers' interface."""
        get = self._names.get("self")
        model = get() if get is not None else None
        found = isinstance(model, torch.nn.Module) and getattr(model, "config", None) is not None and uses_interface(model)
        return model if found else None

    def trace(self, backend: Callable[[fx.GraphModule, Sequence[Any]], None], model: torch.nn.Module | None = None) -> None:
        """Trace the call on a longer row, and hand the graph and its inputs to ``backend``. ``model``: with the attention and
        experts of this transformers model by quire's functions. Raises UnsupportedAttention if the user chose its attention."""
        made: dict[_Row, Any] = {}

        def real(x: Any) -> Any:
            if isinstance(x, _Row):
                if x.shape[1] != self.tokens:
                    return torch.zeros(x.shape, dtype=x.dtype, device=x.device)
                return made.setdefault(x, x.make())
            if type(x) in (list, tuple):
                return type(x)(map(real, x))
            return {k: real(v) for k, v in x.items()} if type(x) is dict else x

        names = {name: real(get()) for name, get in self._names.items()}
        code, at, of = self.code, self.code.co_argcount, inspect.getargs(self.code)
        cells = tuple(types.CellType(names[name]) for name in code.co_freevars)
        function = with_own_code(types.FunctionType(code, self._scope, code.co_name, None, cells))
        arguments = [*(names[n] for n in of.args[:at]), *(names[of.varargs] if of.varargs else ())]
        options = {n: names[n] for n in of.args[at:]} | (names[of.varkw] if of.varkw else {})

        def first(gm: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Callable[..., Any]:
            if translator().output.root_tx.f_code is function.__code__:
                backend(gm, inputs)

            def stop(*args: Any) -> Any:
                raise Traced

            return stop

        sizes = torch._dynamo.config.patch(assume_static_by_default=False, specialize_int=True, specialize_float=True)
        route = contextlib.ExitStack()
        if model is not None:
            route.enter_context(interface_active(model))
            route.enter_context(experts_active(model))
        with contextlib.suppress(Traced), route, sizes, torch.no_grad():
            torch.compile(function, backend=first)(*arguments, **options)


class AnyLength:
    """Runs ``gm``, a graph traced for any length (whose symbol is ``tokens``), with the inputs and outputs of ``static``,
    another graph of the same call for rows of ``length``; None: it is for any length too. Raises UnsupportedAttention if the
    two do not compute the same things."""

    def __init__(self, static: fx.GraphModule, gm: fx.GraphModule, tokens: Any, length: int | None) -> None:
        self.tokens, self.length = tokens, length
        at = {source_name(node): i for i, node in enumerate(placeholders(static.graph))}
        self._read: list[Callable[[Sequence[Any]], Any]] = []
        sizes: dict[str, tuple[int, int]] = {}  # by symbol: a tensor input that has it, and the dimension
        for node in placeholders(gm.graph):
            name, x = source_name(node), value(node)
            if name in at:
                self._read.append(self._reader(at[name], x))
                for dim, size in enumerate(x.shape if isinstance(x, torch.Tensor) else ()):
                    sizes.setdefault(str(size), (len(self._read) - 1, dim))
            elif isinstance(x, torch.SymInt):
                self._read.append(functools.partial(self._size, sizes, str(x)))
            else:
                raise self._different(f"it also reads {name}")
        known = {source_name(node): value(node) for node in placeholders(gm.graph)}
        for node in placeholders(static.graph):
            name, x = source_name(node), value(node)
            if isinstance(x, torch.Tensor):
                like = known.get(name, x)
                if any(symbolic(size) and not symbolic(other) for size, other in zip(x.shape, like.shape, strict=True)):
                    raise self._different(f"the size of {name} is a constant there")
                if name not in known and node.users and not is_module_tensor(node):
                    raise self._different(f"it does not read {name}; give no masks inside a step")
            elif name not in known and not re.search(r"\.(size|stride|storage_offset)\(\)", name):
                raise self._different(f"it does not read {name}")
        self._row = sizes[str(tokens)]
        of_row = next(name for name, x in known.items() if isinstance(x, torch.Tensor) and str(tokens) in map(str, x.shape))
        like = next(value(n) for n in placeholders(static.graph) if source_name(n) == of_row)
        self._theirs = str(like.shape[self._row[1]]) if length is None else str(length)
        self._outputs = self._match(static, gm)

    def num_tokens(self, args: Sequence[Any]) -> int:
        """Length of the row in a call of the static graph."""
        return self.length if self.length is not None else self._read[self._row[0]](args).shape[self._row[1]]

    def _different(self, why: str) -> UnsupportedAttention:
        if self.length is None:
            return UnsupportedAttention(f"the model computes something else with transformers' attention interface ({why})")
        return UnsupportedAttention(f"the model computes something else for a row of {self.length} tokens than for longer ones "
                                    f"({why}); pad the step: metadata.padded(2, num_reqs), and a token more")

    def _reader(self, index: int, x: Any) -> Callable[[Sequence[Any]], Any]:
        dims = [d for d, size in enumerate(x.shape) if str(size) == str(self.tokens)] if isinstance(x, torch.Tensor) else []

        def read(args: Sequence[Any]) -> Any:
            found = args[index]
            for dim in dims if self.length == 1 else ():
                found = torch.cat([found, torch.zeros_like(found)], dim)
            return found

        return read

    def _size(self, sizes: dict[str, tuple[int, int]], symbol: str, args: Sequence[Any]) -> int:
        index, dim = sizes[symbol]
        return self._read[index](args).shape[dim]

    def _match(self, static: fx.GraphModule, gm: fx.GraphModule) -> list[list[int]]:
        """For each output, its dimensions over tokens. Raises UnsupportedAttention."""
        ours, theirs = (g.graph.output_node().args[0] for g in (gm, static))
        if len(ours) != len(theirs):  # type: ignore[arg-type]
            raise self._different(f"{len(theirs)} outputs, not {len(ours)}")  # type: ignore[arg-type]
        found = []
        for mine, other in zip(ours, theirs, strict=True):  # type: ignore[arg-type]
            x, y = value(mine), value(other)
            shape = list(x.shape) if isinstance(x, torch.Tensor) else [x]
            dims = [d for d, size in enumerate(shape) if str(size) == str(self.tokens)]
            mapped = [self._theirs if d in dims else str(size) for d, size in enumerate(shape)]
            if isinstance(x, torch.Tensor) != isinstance(y, torch.Tensor) \
                    or mapped != list(map(str, y.shape if isinstance(y, torch.Tensor) else [y])) \
                    or getattr(x, "dtype", None) != getattr(y, "dtype", None):
                raise self._different(f"an output is {y}, not {x}")
            found.append(dims)
        return found

    def step(self, step: Step) -> Step:
        """``step`` for the padded row; the same for all calls in it."""
        if self.length != 1:
            return step
        if "padded" not in step.states:
            metadata = step.metadata.padded(2, step.metadata.num_reqs)
            step.states["padded"] = replace(step, metadata=metadata, states={}, planned=set())
        return step.states["padded"]

    def inputs(self, args: Sequence[Any]) -> list[Any]:
        """The inputs of the graph for any length, from those of the static one."""
        return [read(args) for read in self._read]

    def compare(self, static: fx.GraphModule, gm: fx.GraphModule, args: Sequence[Any]) -> None:
        """Run both graphs, unpaged, on the inputs of a call of ``static``. A model may branch on the length of its row, and
        Dynamo takes lengths other than 1 for granted in a graph for any; or it may use attention weights, which transformers'
        eager attention returns and quire's does not. Raises UnsupportedAttention if the numbers differ."""
        args = self._one_sequence(static, args)
        with torch.no_grad():
            own, other = (contextvars.Context().run(g.forward, *_copies(g, given))  # with no step in progress
                          for g, given in ((static, args), (gm, self.inputs(args))))
        for x, y in zip(own, other, strict=True):
            if not isinstance(x, torch.Tensor) or not x.is_floating_point() or x.numel() == 0:
                continue
            rounding = max(1e-4, 8 * torch.finfo(x.dtype).eps) * x.nan_to_num(0.0, 0.0, 0.0).abs().max()
            same = (x == y) | (x.isnan() & y.isnan()) | ((x - y).abs() <= rounding)
            if not bool(same.all()):
                if self._theirs != "1":
                    raise UnsupportedAttention(
                        "the trace for steps gives a sequence other outputs than the model does. Does a layer use the "
                        "attention weights, which quire does not return, or branch on the length of its input?")
                raise UnsupportedAttention(
                    "the model computes something else for a row of one token than for longer ones: its forward branches on "
                    "the length of its input. A packed row has the tokens of several sequences, so that its length means "
                    "nothing to them; let the forward branch on position_ids, or not at all.")

    def _one_sequence(self, static: fx.GraphModule, args: Sequence[Any]) -> list[Any]:
        """The tokens of a call as one sequence, which both graphs attend to alike: a packed row is none. Of a graph that takes
        any number no more than a comparison needs."""
        tokens, found = self.num_tokens(args), []
        if not self._theirs.isdigit():
            tokens = min(tokens, TRACED_TOKENS)
        for node, given in zip(placeholders(static.graph), args, strict=True):
            if isinstance(given, torch.Tensor) and not is_module_tensor(node):
                for dim, size in enumerate(value(node).shape):
                    given = given.narrow(dim, 0, tokens) if str(size) == self._theirs else given
                if tokens > 1 and _POSITIONS.search(source_name(node)):
                    given = torch.arange(tokens, dtype=given.dtype, device=given.device).expand(given.shape)
            found.append(tokens if str(value(node)) == self._theirs else given)
        return found

    def outputs(self, out: Sequence[Any]) -> tuple[Any, ...]:
        """The outputs that the static graph would have."""
        if self.length is None:
            return tuple(out)
        found = []
        for x, dims in zip(out, self._outputs, strict=True):
            for dim in dims:
                x = x.narrow(dim, 0, self.length) if isinstance(x, torch.Tensor) else self.length
            found.append(x)
        return tuple(found)


def _copies(gm: fx.GraphModule, args: Sequence[Any]) -> list[Any]:
    """The arguments of a call, which a forward may change in place; the model's own tensors as they are."""
    return [x.clone() if isinstance(x, torch.Tensor) and not is_module_tensor(n) else x
            for n, x in zip(placeholders(gm.graph), args, strict=True)]


def is_static(gm: fx.GraphModule) -> bool:
    """Whether the graph was traced for rows of one length: no argument has a symbolic second dimension."""
    tensors = [value(n) for n in placeholders(gm.graph) if not is_stored(n)]
    return not any(isinstance(x, torch.Tensor) and x.dim() > 1 and symbolic(x.shape[1]) for x in tensors)
