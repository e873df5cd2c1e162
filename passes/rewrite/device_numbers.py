"""Numbers that a model makes on the CPU and moves to its device are made there: a CUDA graph cannot copy from the CPU.

Before (Gemma 3n of transformers 5.17)::

    epsilon = torch.tensor(1e-5)
    y = torch.maximum(x, epsilon.to(device("cuda", 0)))

After::

    y = torch.maximum(x, torch.full((), 1e-5, dtype=torch.float32, device=device("cuda", 0)))
"""

from __future__ import annotations

import math

import torch
from torch import fx

from quire.passes.fx import is_function, is_method, replace_node, value, written_between


def numbers_on_device(gm: fx.GraphModule) -> None:
    """Rewrite the graph in place. A move within one device stays: it gives the number itself, which may be changed in place."""
    graph = gm.graph
    for node in list(graph.nodes):
        if not (is_function(node, (torch.tensor,)) and not node.kwargs and len(node.args) == 1
                and isinstance(node.args[0], bool | int | float)):
            continue
        moves = [user for user in node.users if _moves(node, user)]
        copied = len(moves) == len(node.users)  # nothing has the number itself, to change it in place
        for user in moves:
            if not copied and written_between(node, user) is not None:
                continue
            with graph.inserting_before(user):
                where = {"dtype": value(node).dtype, "device": user.args[1]}
                held = torch.tensor(node.args[0], dtype=where["dtype"]).item()
                given = held if math.isinf(held) else node.args[0]  # full refuses a number beyond the dtype's range
                number = graph.call_function(torch.full, ((), given), where)
            replace_node(user, number)


def _moves(node: fx.Node, user: fx.Node) -> bool:
    """Whether the user copies the number to another device, and does no more."""
    return (is_method(user, "to") and len(user.args) == 2 and isinstance(user.args[1], torch.device) and not user.kwargs
            and value(user).device != value(node).device)
