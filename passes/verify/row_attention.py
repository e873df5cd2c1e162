"""The row-wise proof of an F.scaled_dot_product_attention in which tokens do not meet: each attends over its own heads, or to a
memory that all share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from quire.passes.fx import sdpa_arguments, value
from quire.passes.verify.row_rules import as_data, same
from quire.passes.verify.rows import CONST, Known, Mixes, Rows


def attends_within(node: fx.Node, known: Callable[[Any], Known]) -> Known:
    """What is known of the result of the call, by what is ``known`` of its arguments. Raises Mixes if tokens may meet."""
    arg = sdpa_arguments(node)
    if arg.get("dropout_p") or arg.get("enable_gqa"):
        raise Mixes("it drops scores at random, or repeats heads")

    def rows(name: str, counted: int) -> Rows | None:
        """Of an argument, its dimension counted from the right; those from ``counted`` on are not the batch's."""
        if not isinstance(arg.get(name), fx.Node):
            return None
        found = as_data(known(arg[name]))
        if found is None:
            return None
        dim = found.dim - value(arg[name]).dim()
        if dim >= counted:
            raise Mixes("it attends over tokens")
        return found.at(dim)

    queries = rows("query", -2 if arg.get("is_causal") else -1)  # a causal mask goes by the place of the query
    joined = same([queries, rows("key", -2), rows("value", -2), rows("attn_mask", -1)])
    result = value(node)
    assert isinstance(result, torch.Tensor)
    return joined.at(joined.dim + result.dim()) if joined is not None else CONST
