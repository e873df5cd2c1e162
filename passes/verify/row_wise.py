"""Which operations of a traced graph treat each token for itself, proved from their arguments and the shapes of their operands.

A value has tokens if its shape is (1, ..., 1, T, ...): T, the symbol of the number of tokens, in one dimension and in no other
size. An operation is row-wise if row i of its result, for every i, needs row i of its operands only, and things that have no
tokens. Then running it on some rows gives these rows of its result. Whatever is not in the table here is not row-wise.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from quire.passes.fx import is_function, symbolic, value


class Operations:
    """Operations by name: methods of a tensor, and the functions called so in these modules (others are not meant)."""

    def __init__(self, names: str) -> None:
        self.names = frozenset(names.split())
        modules = (operator, torch, F, torch._C._nn)
        self.functions = {f: n for n in self.names for m in modules if callable(f := getattr(m, n, None))}

    def name(self, node: fx.Node) -> str | None:
        if node.op == "call_method":
            return str(node.target) if node.target in self.names else None
        return self.functions.get(node.target) if node.op == "call_function" else None

    def __contains__(self, node: fx.Node) -> bool:
        return self.name(node) is not None


ARITHMETIC = Operations("add sub mul truediv div multiply")  # makes a new tensor, in any case
PRODUCTS = Operations("linear matmul mm addmm")
VIEWS = Operations("view reshape flatten unflatten unsqueeze squeeze")
#: ``x += y`` and the like, and what computes the same without changing x.
IN_PLACE: dict[Any, Callable[..., Any]] = {
    operator.iadd: operator.add, operator.isub: operator.sub, operator.imul: operator.mul, operator.itruediv: operator.truediv}
_ELEMENTWISE = Operations(
    "add sub rsub mul multiply truediv div divide true_divide neg pow square sqrt rsqrt reciprocal exp exp2 expm1 log log1p "
    "abs sign erf sin cos tanh sigmoid relu relu6 silu gelu mish softplus elu leaky_relu hardtanh clamp clamp_min clamp_max "
    "maximum minimum where masked_fill eq ne lt le gt ge logical_not logical_and logical_or invert bitwise_not to type type_as "
    "float half bfloat16 double contiguous clone detach")
_ALONG = Operations("mean sum amax amin softmax log_softmax logsumexp topk chunk split cat concat")  # some dimensions
_NORMS = Operations("layer_norm rms_norm")
_DROPOUT = Operations("dropout")


def expression(size: Any) -> Any:
    """What a symbolic size is called; None for a number."""
    return size.node.expr if symbolic(size) else None


def is_whole(part: Any) -> bool:
    """Is this part of an index ``:``?"""
    return isinstance(part, slice) and (part.start, part.stop, part.step) == (None, None, None)


def _is_one(size: Any) -> bool:
    return isinstance(size, int) and size == 1  # asking a symbol would make a guard


class RowWise:
    """The proofs for one symbol. The values of nodes are their fake ones; a weight's size, a number, is never taken for T.

    Args:
        tokens: the symbol T, as a sympy expression.
    """

    def __init__(self, tokens: Any) -> None:
        self.tokens = tokens

    def dim_of(self, val: Any) -> int | None:
        """The dimension of the tokens in a tensor that has tokens; None for all else, and for quantised tensors."""
        if not isinstance(val, torch.Tensor) or is_traceable_wrapper_subclass(val):
            return None
        found = self._mentions(val)
        if len(found) != 1 or expression(val.shape[found[0]]) != self.tokens or not all(map(_is_one, val.shape[: found[0]])):
            return None
        return found[0]

    def dim(self, x: Any) -> int | None:
        """``dim_of`` the value of a node."""
        return self.dim_of(value(x))

    def proves(self, node: fx.Node) -> bool:
        """Is the operation row-wise, and does its result have tokens (each tensor of it, if it is a tuple)?"""
        val = value(node)
        parts = val if isinstance(val, (tuple, list)) and not isinstance(val, torch.Size) else [val]
        if not parts or any(self.dim_of(p) is None for p in parts):
            return False
        if is_function(node, (operator.getitem,)):
            return self._part(node)
        if node in _ELEMENTWISE or node.target in IN_PLACE:
            return self._element_wise(node)
        if node in _DROPOUT:
            training = node.kwargs.get("training", node.args[2] if len(node.args) > 2 else True)
            return training is False and self._element_wise(node)
        if node in PRODUCTS:
            at = 1 if PRODUCTS.name(node) == "addmm" else 0
            matrices = [a for a in node.args[at + 1 : at + 2] if value(a).dim() == 2]
            return len(matrices) == 1 and self._reads_last(node, at, 1) and all(value(b).dim() == 1 for b in node.args[:at])
        if node in _NORMS:
            shape = node.args[1] if len(node.args) > 1 else node.kwargs.get("normalized_shape")
            return isinstance(shape, (tuple, list, torch.Size)) and self._reads_last(node, 0, len(shape))
        if node in _ALONG:
            return self._along(node)
        return node in VIEWS and self._view(node)

    def _mentions(self, val: torch.Tensor) -> list[int]:
        """The dimensions in whose sizes T occurs."""
        return [d for d, s in enumerate(val.shape) if symbolic(s) and self.tokens in expression(s).free_symbols]

    def _constant(self, x: fx.Node) -> bool:
        """Is it a tensor that is the same for all tokens?"""
        val = value(x)
        return isinstance(val, torch.Tensor) and not is_traceable_wrapper_subclass(val) and not self._mentions(val)

    def _element_wise(self, node: fx.Node) -> bool:
        """Operands are broadcast from the right: each has the tokens where the result has them, or is the same for all."""
        behind = len(value(node).shape[self.dim(node) :])  # dimensions from T to the last
        for x in node.all_input_nodes:
            val, dim = value(x), self.dim(x)
            if isinstance(val, torch.Tensor):
                same_for_all = self._constant(x) and (val.dim() < behind or _is_one(val.shape[-behind]))
                if not same_for_all and (dim is None or val.dim() - dim != behind):
                    return False
            elif not isinstance(val, (int, float, torch.SymInt, torch.SymFloat)):
                return False
        return True

    def _reads_last(self, node: fx.Node, at: int, count: int) -> bool:
        """Argument ``at`` is the only one with tokens, and they are not in its last ``count`` dimensions."""
        x = node.args[at] if len(node.args) > at else None
        dim = self.dim(x)
        others = [*node.args[:at], *node.args[at + 1 :], *node.kwargs.values()]
        if dim is None or dim >= value(x).dim() - count:
            return False
        return all(self._constant(o) for o in others if isinstance(o, fx.Node))

    def _along(self, node: fx.Node) -> bool:
        """A reduction, split or concatenation along dimensions behind that of the tokens."""
        name, operands = _ALONG.name(node), node.all_input_nodes
        place = 2 if name in ("topk", "chunk", "split") else 1
        dims = node.kwargs.get("dim", node.args[place] if len(node.args) > place else -1 if name == "topk" else None)
        dims = list(dims) if isinstance(dims, (tuple, list)) else [dims]
        at: set[Any] = {(self.dim(x), value(x).dim() if isinstance(value(x), torch.Tensor) else None) for x in operands}
        if len(at) != 1:
            return False
        token_dim, count = at.pop()
        return token_dim is not None and bool(dims) and all(type(d) is int and token_dim < d % count for d in dims)

    def _view(self, node: fx.Node) -> bool:
        """(1, ..., T, *r) becomes (1, ..., T, *s): with only ones before T, each row is given the shape s."""
        x = node.args[0]
        before, after = value(x), value(node)
        if self.dim(x) is None or before.dtype != after.dtype:
            return False
        r, s = before.shape[self.dim(x) + 1 :], after.shape[self.dim(node) + 1 :]  # type: ignore[operator]
        return all(isinstance(n, int) and n > 0 for n in (*r, *s)) and prod(r) == prod(s)

    def _part(self, node: fx.Node) -> bool:
        """An element of a tuple, x[0] of (1, ..., T, ...), or a cut behind the tokens."""
        x, at = node.args
        if isinstance(value(x), (tuple, list)):
            return type(at) is int
        dim = self.dim(x)
        if dim is None or type(at) is int:
            return dim is not None and dim > 0 and bool(at == 0)
        cuts: list[Any] = list(at) if isinstance(at, tuple) else [at]
        if Ellipsis in cuts:
            i = cuts.index(Ellipsis)
            cuts[i : i + 1] = [slice(None)] * (value(x).dim() - len(cuts) + 1)
        return all(isinstance(c, slice) and not any(isinstance(e, fx.Node) for e in (c.start, c.stop, c.step)) for c in cuts) \
            and all(map(is_whole, cuts[: dim + 1]))


__all__ = ["ARITHMETIC", "IN_PLACE", "Operations", "PRODUCTS", "RowWise", "VIEWS", "expression", "is_whole"]
