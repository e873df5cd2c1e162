"""Which operations of a traced graph may be run on some rows of their operands, to give these rows of their result.

A value has tokens if its shape is (1, ..., 1, T, ...): T, the symbol of the number of tokens, in one dimension and in no other
size. That an operation is row-wise is proved by the rules of the token pass (``tokens.py``); the tables here name those that
keep their arguments when they run on fewer rows. Others are not proved.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from quire.passes.fx import is_function, is_one, symbolic, value
from quire.passes.verify.rows import CONST, Known, Rows
from quire.passes.verify.tokens import TokenPass


class Operations:
    """Operations by name: methods of a tensor, and the functions called so in these modules (others are not meant)."""

    def __init__(self, names: str) -> None:
        self.names = frozenset(names.split())
        modules = (operator, torch, F, torch._C._nn)
        self.functions = {f for n in self.names for m in modules if callable(f := getattr(m, n, None))}

    def __contains__(self, node: fx.Node) -> bool:
        return (node.op == "call_method" and node.target in self.names) or is_function(node, self.functions)


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
_OTHER = Operations("mean sum amax amin softmax log_softmax logsumexp topk chunk split cat concat layer_norm rms_norm dropout")


def expression(size: Any) -> Any:
    """The sympy expression of a symbolic size; None for a number."""
    return size.node.expr if symbolic(size) else None


def picked(node: fx.Node) -> tuple[int | None, Any]:
    """(dimension, index) of ``x[:, index, :]``, which takes all of every other dimension; (None, None) for any other node."""
    if not is_function(node, (operator.getitem,)):
        return None, None
    parts: Any = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
    cuts = [(dim, part) for dim, part in enumerate(parts) if part != slice(None)]
    return cuts[0] if len(cuts) == 1 else (None, None)


class RowWise:
    """The proofs for one symbol. The values of nodes are their fake ones; a weight's size, a number, is never taken for T.
    ``tokens``: the symbol T, as a sympy expression."""

    def __init__(self, tokens: Any) -> None:
        self.tokens = tokens
        self._proof = TokenPass(tokens)

    def dim(self, x: Any) -> int | None:
        """The dimension of the tokens in a tensor, or in that of a node, that has tokens; None for all else, and for quantized
        tensors."""
        val = value(x)
        if not isinstance(val, torch.Tensor) or is_traceable_wrapper_subclass(val):
            return None
        found = self._mentions(val)
        if len(found) != 1 or expression(val.shape[found[0]]) != self.tokens or not all(map(is_one, val.shape[: found[0]])):
            return None
        return found[0]

    def proves(self, node: fx.Node) -> bool:
        """Whether the operation is row-wise, and its result has tokens (each tensor of it, if it is a tuple)."""
        val = value(node)
        parts = val if isinstance(val, (tuple, list)) and not isinstance(val, torch.Size) else [val]
        if not parts or any(self.dim(p) is None for p in parts):
            return False
        view = node in VIEWS
        if not (view or node in _ELEMENTWISE or node in PRODUCTS or node in _OTHER or node.target in IN_PLACE
                or is_function(node, (operator.getitem,))):
            return False
        if is_function(node, (operator.getitem,)) and len(node.all_input_nodes) > 1:
            return False  # by an index that is computed
        if view and (self.dim(node.args[0]) is None or value(node.args[0]).dtype != val.dtype):
            return False
        for x in node.all_input_nodes:
            known = self._known(x, view)
            if known is None:
                return False
            self._proof.known[x] = known
        found = self._proof.proved(node)
        return found is not None and all(isinstance(k, Rows) for k in (found if isinstance(found, list) else [found]))

    def _known(self, x: fx.Node, view: bool) -> Known | list[Known] | None:
        """Of an operand, by its shape; None if nothing is. Sizes in the arguments of views are written anew on fewer rows."""
        val = value(x)
        if isinstance(val, (tuple, list)):
            each = [self._of_tensor(t) for t in val]
            return [k for k in each if k is not None] if None not in each else None
        if isinstance(val, torch.SymInt) and not view and self.tokens in val.node.expr.free_symbols:
            return None
        return self._of_tensor(val)

    def _of_tensor(self, val: Any) -> Known | None:
        if not isinstance(val, torch.Tensor):
            return CONST
        dim = self.dim(val)
        if dim is None:
            return CONST if not is_traceable_wrapper_subclass(val) and not self._mentions(val) else None
        return Rows(dim, self._proof.axes[0])

    def _mentions(self, val: torch.Tensor) -> list[int]:
        """The dimensions in whose sizes T occurs."""
        return [d for d, s in enumerate(val.shape) if symbolic(s) and self.tokens in expression(s).free_symbols]
