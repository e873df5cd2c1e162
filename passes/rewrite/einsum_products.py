"""Products of all tokens with all that are written as torch.einsum, as matmul, for ``raise_written`` to read.

Before::

    scores = einsum("bqhd,bkhd->bhqk", q, k)

After::

    scores = matmul(q.permute(0, 2, 1, 3), k.permute(0, 2, 1, 3).transpose(-1, -2))

An equation of two operands is a product of matrices if one letter is summed over, one is a row (of the one operand only), one a
column (of the other only), and each further letter is of the result and of both, or of the one with the row, as queries in
groups have it. Left as it is: any other equation, and a product of which neither a factor nor the result has two dimensions of
tokens.
"""

from __future__ import annotations

import re
import string
from collections.abc import Sequence
from typing import Any

from torch import fx
from torch._C._functorch import is_functorch_wrapped_tensor

from quire.passes.fake_values import compute_value
from quire.passes.fx import erase_dead, is_tensor, same_shape, symbolic, torch_name, value
from quire.passes.rewrite.raise_written import of_pairs

_EQUATION = re.compile(r"([a-zA-Z]+),([a-zA-Z]+)->([a-zA-Z]+)")


def multiply_einsums(graph: fx.Graph) -> int:
    """Replace them in place; returns how many."""
    found = [n for n in graph.nodes if torch_name(n) == "einsum" and any(map(of_pairs, (n, *n.all_input_nodes)))]
    return sum([_multiply(node) for node in found])


def _multiply(node: fx.Node) -> bool:
    operands: Any = node.args[1:]
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = operands[0]
    if node.kwargs or len(operands) != 2 or not all(map(is_tensor, operands)):
        return False
    match = _EQUATION.fullmatch(_spelled_out(str(node.args[0]).replace(" ", ""), [value(x).dim() for x in operands]))
    if match is None:
        return False
    (left, x), (right, y), out = (match[1], operands[0]), (match[2], operands[1]), match[3]
    if len(set(right) - set(left)) > 1:
        left, x, right, y = right, y, left, x
    rows, columns, shared = set(left) - set(right), set(right) - set(left), set(left) & set(right)
    summed = shared - set(out)
    groups = {letter for letter in rows if not symbolic(value(x).shape[left.index(letter)])} if len(rows) > 1 else set[str]()
    rows -= groups
    if not len(rows) == len(columns) == len(summed) == 1 or set(out) != rows | columns | groups | (shared - summed) \
            or any(len(set(letters)) < len(letters) for letters in (left, right, out)):
        return False
    (row,), (column,), (over,) = rows, columns, summed
    if not groups and out.index(column) < out.index(row):
        left, x, right, y, row, column = right, y, left, x, column, row
    if not same_shape([value(x).shape[left.index(over)]], [value(y).shape[right.index(over)]]):  # a size of 1 is expanded
        return False
    if not value(x).dtype == value(y).dtype == value(node).dtype or is_functorch_wrapped_tensor(value(node)):
        return False  # in torch.autocast, or in torch.vmap

    def call(method: str, x: fx.Node, *args: Any) -> fx.Node:
        new = node.graph.call_method(method, (x, *args))
        new.meta = dict(node.meta)  # the place in the user's code
        return compute_value(new)

    def permuted(x: fx.Node, letters: Sequence[str], order: Sequence[str]) -> fx.Node:
        dims = [letters.index(letter) for letter in order]
        return x if dims == sorted(dims) else call("permute", x, *dims)

    batch = [letter for letter in out if letter in shared | groups]
    kept = [letter for letter in batch if letter not in groups]
    with node.graph.inserting_before(node):
        if right[-1] == over:  # keys, transposed as raise_written knows it
            y = permuted(y, right, [*kept, column, over])
        else:
            y = permuted(y, right, [*kept, over, column])
        for place in (i for i, letter in enumerate(batch) if letter in groups):
            y = call("unsqueeze", y, place)
        y = call("transpose", y, -1, -2) if right[-1] == over else y
        product = call("matmul", permuted(x, left, [*batch, row, over]), y)
        result = permuted(product, [*batch, row, column], out)
        if result is not product:  # what reads it may view it
            result = call("contiguous", result)
    node.replace_all_uses_with(result)
    erase_dead(node.graph, [node])
    return True


def _spelled_out(equation: str, ranks: Sequence[int]) -> str:
    """An equation with letters in the place of ``...``, from the right."""
    terms, arrow, out = equation.partition("->")
    free = [letter for letter in string.ascii_uppercase if letter not in equation]
    most, found = 0, list[str]()
    for term, rank in zip(terms.split(","), ranks, strict=False):
        hidden = rank - len(term.replace("...", "")) if "..." in term else 0
        most = max(most, hidden)
        found.append(term.replace("...", "".join(free[len(free) - hidden :])))
    return ",".join(found) + arrow + out.replace("...", "".join(free[len(free) - most :]))
