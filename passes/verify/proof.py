"""Runs operations on fake tensors with a symbolic number of tokens, and applies a rule to each (``tokens.py``)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

import quire.passes.verify.row_index
import quire.passes.verify.row_products
import quire.passes.verify.row_views  # noqa: F401  (they add their rules)
from quire.passes.fake_values import Symbols, fake_input
from quire.passes.fx import storage_of, symbolic
from quire.passes.verify.row_rules import LENGTHS, RULES, Call, elementwise, no_lengths
from quire.passes.verify.rows import CONST, NOTHING, Const, Counts, Group, Known, Mixed, Mixes, Rows, Writes, settled, unsure

_LENGTHS = (10007, 10009, 10037, 10039)  # primes: hints of symbols, larger than any number the rules compare
_SIZES = frozenset({"sym_size", "sym_stride", "sym_numel", "sym_storage_offset", "size", "stride", "numel", "device", "dim",
                    "storage_offset", "is_contiguous", "is_same_size"})


class Proof(TorchDispatchMode):
    """Applies the rules to the operations that run inside."""

    def __init__(self, axes: tuple[Any, ...], lengths: bool) -> None:
        super().__init__()
        self.axes, self.lengths = axes, lengths
        self._known: dict[int, tuple[Known, torch.Tensor]] = {}  # by the tensor's id; keeps it alive
        self._rows = False
        self.given: set[int] = set()  # memory of the inputs
        self.written: list[torch.Tensor] = []

    def learn(self, tensor: torch.Tensor, known: Known) -> None:
        self._rows = self._rows or not isinstance(known, Const)
        self._known[id(tensor)] = known, tensor

    def known(self, tensor: torch.Tensor) -> Known:
        """What is known. A fake that was not seen was made below the mode: it may mix, unless nothing here has tokens."""
        if self.knows(tensor):
            return self._known[id(tensor)][0]
        return Mixed("quire cannot follow it") if self._rows and isinstance(tensor, FakeTensor) else CONST

    def knows(self, tensor: torch.Tensor) -> bool:
        return id(tensor) in self._known

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = _functional(op)
        inputs = [x for x in tree_leaves([args, kwargs]) if isinstance(x, torch.Tensor)]
        if name in _SIZES:
            return op(*args, **kwargs)
        if name not in RULES and not _is_elementwise(op) and not op._schema.is_mutable:
            result = op.decompose(*args, **kwargs) if op._can_decompose() else NotImplemented
            if result is not NotImplemented:
                return result
            of_tokens = any(isinstance(self.known(x), (Rows, Counts, Group)) for x in inputs)
            table = torch._decomp.decomposition_table
            if of_tokens and op in table and op.namespace in ("aten", "prims"):
                with self:
                    return table[op](*args, **kwargs)
        result = op(*args, **kwargs)
        self._prove(op, name, args, kwargs, inputs, result)
        return result

    def _prove(self, op: Any, name: str, args: Any, kwargs: Any, inputs: list[torch.Tensor], result: Any) -> None:
        outputs = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
        schema = op._schema.arguments
        given = {a.name: a.default_value if a.has_default_value() else None for a in schema}
        given |= dict(zip([a.name for a in schema], args, strict=False)) | kwargs
        written: list[Any] = [given[a.name] for a in schema if a.alias_info is not None and a.alias_info.is_write]
        self.written += written
        try:
            each = self._found(op, name, given, inputs, outputs, result)
        except Mixes as why:
            if any(isinstance(w, torch.Tensor) and storage_of(w) in self.given for w in tree_leaves(written)):
                raise Writes(str(why)) from why
            if written or (not outputs and result is not None):
                raise
            each = [Mixed(str(why))] * len(outputs)  # which may be thrown away
        if any(all(w is not t for t in outputs) for w in written if w is not None):
            raise Mixes(f"quire has no rule for what {op} writes")
        for tensor, known in zip(outputs, each, strict=True):
            if any(tensor is w for w in written):
                known = _stored(self.known(tensor), known, tensor, alone=not self._forget(tensor))
            self.learn(tensor, known)

    def _forget(self, written: torch.Tensor) -> bool:
        """No other tensor of the same memory holds what it held. Returns whether there are such. Raises Mixes for counts."""
        memory = storage_of(written)
        others = [(t, k) for k, t in self._known.values() if t is not written and isinstance(t, FakeTensor)
                  and storage_of(t) == memory]
        for tensor, known in others:
            self.learn(tensor, unsure(known))
        return bool(others)

    def _found(self, op: Any, name: str, given: dict[str, Any], inputs: list[torch.Tensor], outputs: list[torch.Tensor],
               result: Any) -> list[Known]:
        """What is known of each result. Raises Mixes."""
        if self.lengths and not all(map(self.knows, inputs)):
            raise Mixes("arithmetic with the length of the row")  # torch.tensor(T)
        mixed = next((k for x in inputs if isinstance(k := self.known(x), Mixed)), None)
        if mixed is not None:
            raise Mixes(mixed.why)
        constant = not any(isinstance(self.known(x), (Rows, Counts, Group)) for x in inputs)
        if not outputs:
            if not constant and result is not None:
                raise Mixes("the forward reads values of the tokens on the host")
            return []
        if torch.Tag.nondeterministic_seeded in op.tags:
            raise Mixes("it draws random numbers (call model.eval())")
        call = Call(op, name, given, result, self.known, self.axes)
        if name in RULES:
            found = RULES[name](call)
        elif _is_elementwise(op):
            found = elementwise(call)
        elif constant:
            found = [CONST] * len(outputs)
        elif torch.Tag.dynamic_output_shape in op.tags:
            raise Mixes(f"how many results {op} has depends on the tokens. If it loops over the tokens of each expert: give "
                        "every expert all tokens and weight them by the router, or use transformers' grouped experts")
        else:
            raise Mixes(f"quire has no rule for {op}")
        if name not in LENGTHS and (name in RULES or not _is_elementwise(op)):
            no_lengths(call)
        each = found if isinstance(found, list) else [found] * len(outputs)
        return [settled(k, t, self.axes) for k, t in zip(each, outputs, strict=True)]


def _functional(op: Any) -> str:
    """The name of the operation, or of the one that it does in place; with the namespace unless it is PyTorch's own."""
    namespace, _, name = op._schema.name.partition("::")
    if namespace not in ("aten", "prim", "prims"):
        return str(op._schema.name)
    return name[:-1] if name.endswith("_") and not name.endswith("__") else name


def _is_elementwise(op: Any) -> bool:
    return torch.Tag.pointwise in op.tags and op.namespace in ("aten", "prims")


def _stored(before: Known, new: Known, tensor: torch.Tensor, alone: bool) -> Known:
    """What is known of a tensor that was written to. Raises Mixes if cells change owners, but for those of a new tensor that is
    ``alone``: views of it would be wrong."""
    if isinstance(before, Rows) and isinstance(new, (Rows, Const)):
        if symbolic(tensor.stride(before.dim)) is False and tensor.stride(before.dim) == 0:
            raise Mixes("all tokens write to the same memory")
        if isinstance(new, Const):
            return replace(before, holds=NOTHING)
        if new.dim == before.dim and (new.same_rows(before) or (alone and before.holds.is_blank)):
            return new if alone else unsure(new)
    if isinstance(before, Const) and isinstance(new, Const):
        return CONST
    raise Mixes("tokens are written into what all share, or to the rows of others")


class Sizes:
    """Fake tensors in an environment of its own, so that the proof adds no guard to the trace."""

    def __init__(self) -> None:
        self.env = Symbols()
        self.fake = FakeTensorMode(shape_env=self.env, allow_non_fake_inputs=True)
        self.fake.cache_enabled = False  # equal nodes run once, and it makes each result twice
        self._symbols: dict[Any, Any] = {}
        self.of_axis: dict[Any, Any] = {}

    def symbol(self, expr: Any) -> Any:
        """The size here that a symbol of the trace stands for."""
        if expr not in self._symbols:
            count = len(self._symbols)
            like = torch.empty(_LENGTHS[count % len(_LENGTHS)] + 6 * count, device="meta")
            size: Any = fake_input(self.fake, f"quire_size_{count}", like, (True,), like.device).shape[0]
            self._symbols[expr] = self.of_axis[size.node.expr] = size
        return self._symbols[expr]

    def of(self, number: Any) -> Any:
        """A size of the trace, here."""
        if not isinstance(number, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return number
        expr = number.node.expr
        if expr.is_Symbol:
            return self.symbol(expr)
        return sympy_interp(PythonReferenceAnalysis, {s: self.symbol(s) for s in expr.free_symbols}, expr)

    def tensor(self, like: torch.Tensor, known: Known = CONST) -> torch.Tensor:
        """A fake like one of the trace, with the tokens where they are known to be."""
        with self.fake:
            shape, strides = [self.of(s) for s in like.shape], [self.of(s) for s in like.stride()]
            if isinstance(known, Rows):
                shape[known.dim] = self.of_axis[known.axis] * (known.inner * known.outer)
            return torch.empty_strided(shape, strides, dtype=like.dtype, device=like.device)


def execute(node: fx.Node, env: dict[fx.Node, Any]) -> Any:
    """The result of a node on the values in ``env``. Raises Mixes for what cannot run so."""
    args, kwargs = tree_map(lambda a: a, fx.node.map_arg((node.args, node.kwargs), env.__getitem__))
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    if node.op == "call_function" and not isinstance(node.target, torch._ops.HigherOrderOperator):
        return node.target(*args, **kwargs)  # type: ignore[operator]
    raise Mixes(f"quire does not look into {node.target}")


@contextlib.contextmanager
def balanced() -> Iterator[None]:
    """Leave as many levels of torch.vmap as were entered, also after an error."""
    before = torch._C._functorch.maybe_current_level() or 0
    try:
        yield
    finally:
        while (torch._C._functorch.maybe_current_level() or 0) > before:
            torch._C._functorch._vmap_decrement_nesting()
