"""What the token pass (``passes/verify/tokens.py``) knows of a tensor: which cells belong to which token.

A batch is one ragged row of T tokens of several sequences. A tensor is one of

- ``CONST``: computed from weights and constants alone, the same in every batch;
- ``Rows``: each cell belongs to one token and depends on that token alone (its id, its position, and what attention gave it);
- ``Counts``: how many tokens are routed to each expert, or the running sum of that; of use to grouped products only;
- ``Mixed``: anything else, with the reason. Computing it is harmless; returning it, attending to it or storing it is refused.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from quire.passes.fx import symbolic

#: dtypes that hold any number of rows; and those that also hold any number of tokens routed to an expert, or an expert's id.
WHOLE = (torch.int32, torch.int64)
EXACT = (*WHOLE, torch.float32, torch.float64)


class Mixes(Exception):
    """The operation is not row-wise; the text says why."""


class Writes(Mixes):
    """It writes tokens into a tensor that was there before."""


class Ids:
    """The results of one ``topk``, as ids of experts. Equal only to itself."""


@dataclass(eq=False)
class Order:
    """A permutation of rows, the indices of one ``sort``. Equal only to itself. ``routes``: it sorts expert ids in ascending
    order, which are not negative. ``ids``: those that it sorts, if known."""

    routes: bool = False
    ids: Ids | None = None


@dataclass(frozen=True)
class Holds:
    """What is known of the values of ``Rows`` that are numbers of rows, or made of one constant, by ``what`` ("": nothing):

    "number": each cell holds the number of the row it belongs to, counted in rows of ``inner`` a token. "inverse": the place of
    its row in ``order``. "picks": numbers of rows that the caller asks for. "index": places in a dimension that is not the
    tokens'; never negative; with ``ids``, all of these, once each. "sorted": expert ids, sorted by ``order``. "one hot": 1 for
    each expert of a token (of ``ids``), else 0. "blank": nothing was written yet. "zeros": blank, and all 0.
    """

    what: str
    inner: int = 1
    order: Order | None = None
    ids: Ids | None = None

    @property
    def depends_on_place(self) -> bool:
        """Whether the values tell where in the batch a token is: no data for a computation."""
        return self.what in ("number", "inverse", "picks")

    @property
    def is_blank(self) -> bool:
        return self.what in ("blank", "zeros")


NOTHING = Holds("")


@dataclass(frozen=True)
class Rows:
    """Each cell belongs to one token, and depends on that token alone."""

    dim: int  # with the tokens, of size ``outer * N * inner``; cell i of it belongs to token ``i // inner % N``
    axis: Any  # the symbol N: of the tokens, or of the rows that the caller asks for
    inner: int = 1
    outer: int = 1
    order: Order | None = None  # the permutation in which the rows are (``outer`` is 1 then); None: that of the batch
    holds: Holds = NOTHING

    def at(self, dim: int) -> Rows:
        return replace(self, dim=dim)

    @property
    def data(self) -> Rows:
        """As data of a computation. Raises Mixes for numbers of rows."""
        if self.holds.depends_on_place:
            raise Mixes("it computes with the places of the tokens in the batch; positions must come from position_ids")
        return replace(self, holds=NOTHING)

    @property
    def part(self) -> Rows:
        """Of some of its cells, or of repeated ones: no longer all ids of a token, once each."""
        if self.holds.what not in ("index", "one hot"):
            return self
        return replace(self, holds=Holds("index") if self.holds.what == "index" else NOTHING)

    def same_rows(self, other: Rows) -> bool:
        """Whether the same rows are in the same order, wherever their dimension is."""
        return (self.axis, self.inner, self.outer, self.order) == (other.axis, other.inner, other.outer, other.order)


@dataclass(frozen=True)
class Const:
    """See the module."""


@dataclass(frozen=True)
class Counts:
    """How many pairs are routed to each expert: of what ``order`` sorts, or of ``ids``. ``summed``: up to and including each
    expert. ``at``: of one expert, as a number; None: of all, as a tensor."""

    order: Order | None = None
    ids: Ids | None = None
    summed: bool = False
    at: int | None = None


@dataclass(frozen=True)
class Group:
    """The rows of expert ``at`` of as many as ``experts``, of ``rows`` sorted by expert."""

    rows: Rows
    at: int
    experts: int


@dataclass(frozen=True)
class Mixed:
    """``why``, and the ``module`` and ``node`` of the first operation that mixed tokens."""

    why: str
    module: str = ""
    node: str = ""


CONST = Const()
Known = Const | Rows | Counts | Group | Mixed


def unsure(known: Known) -> Known:
    """What is known of a tensor whose memory another one writes to, row by row. Raises Mixes for what counts tokens."""
    if isinstance(known, (Counts, Group)):
        raise Mixes("it changes a tensor that counts tokens")
    return replace(known, holds=NOTHING) if isinstance(known, Rows) else known


def times(size: Any, axis: Any) -> int:
    """How often ``size`` is the symbol ``axis``: 0 if it does not depend on it. Raises Mixes if it depends on it otherwise."""
    if not symbolic(size):
        return 0
    expr = size.node.expr
    if expr is axis:
        return 1
    if axis not in expr.free_symbols:
        return 0
    share = expr / axis
    if not share.is_Integer or share < 1:
        raise Mixes(f"a dimension of {expr} for {axis} tokens: the row is cut, lengthened or folded")
    return int(share)


def token_dims(shape: Any, axes: Any) -> list[tuple[int, Any, int]]:
    """(dimension, symbol, how often) of each dimension with tokens."""
    return [(d, axis, n) for d, size in enumerate(shape) if symbolic(size) for axis in axes if (n := times(size, axis))]


def settled(known: Known, tensor: torch.Tensor, axes: Any) -> Known:
    """``known`` if the shape agrees: the tokens are in the one dimension that it names; and of the values as far as the dtype
    can hold them: numbers of rows in int8 are others from 128 on. Raises Mixes."""
    found = token_dims(tensor.shape, axes)
    if len(found) > 1:
        raise Mixes(f"a tensor of shape {tuple(tensor.shape)}, in which tokens meet tokens")
    if isinstance(known, (Mixed, Counts, Group)):
        if isinstance(known, Counts) and tensor.dtype not in EXACT:
            raise Mixes(f"it counts the tokens in {tensor.dtype}")
        return known
    if isinstance(known, Const):
        if found:
            raise Mixes(f"it makes {tuple(tensor.shape)} of something that has no tokens")
        return known
    if found != [(known.dim, known.axis, known.inner * known.outer)]:
        raise Mixes(f"its result of shape {tuple(tensor.shape)} has no row for each token")
    what = known.holds.what
    if not what or known.holds.is_blank or what == "one hot":
        return known
    return known if tensor.dtype in (EXACT if what == "sorted" else WHOLE) else known.data  # histc needs floats on a CPU


def of_shape(tensor: torch.Tensor, axes: Any, holds: Holds = NOTHING) -> Known:
    """Of an input, or of a tensor filled with one constant: rows if it has tokens. Raises Mixes."""
    found = token_dims(tensor.shape, axes)
    if not found:
        return CONST
    if len(found) > 1:
        raise Mixes(f"a tensor of shape {tuple(tensor.shape)}, in which tokens meet tokens")
    dim, axis, n = found[0]
    return Rows(dim, axis, inner=n, holds=holds)
