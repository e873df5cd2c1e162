"""Piecewise graphs: a step recorded as a sequence of graphs, with attention called between them.

    graph 0: embedding, norm, q/k/v, rope
    attention of layer 0, an ordinary call
    graph 1: output projection, residual, norm, MLP, residual, norm, q/k/v, rope
    ...

Nothing is compiled again and the model's code is not changed: a paged op that runs while a step is recorded ends the graph
and begins the next one in the same pool (``attn_ops/breaks.py``).

NOTE [Memory across a break]: the tensors that attention reads are made by the graph before it, and its result is read by the
graph after it. All lie in the pool, at the addresses of the recording, and nothing keeps them: after the last reader in the
order of the step, later graphs use the memory again, as inside one graph. So a break notes addresses (``alias``) and not
tensors, and the result of the call is copied to the memory that was recorded for it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from quire.attn_ops.breaks import breaking


def record_in_segments(begin: Callable[[], Any], end: Callable[[Any], Callable[[], Any]], run: Callable[[], Any]
                       ) -> tuple[Callable[[], Any], int]:
    """Record ``run`` in pieces, cut at each paged op; returns what replays it, and the number of pieces. Attention is not run
    meanwhile. ``begin`` starts recording and returns the graph, ``end`` stops recording a graph and returns what replays it."""
    steps: list[Callable[[], Any]] = []
    graph: Any = begin()

    def at_break(implementation: Callable[..., Any], fake: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
                 ) -> torch.Tensor:
        nonlocal graph
        out = fake(*args, **kwargs)  # while recording, so that it lies in the pool
        ended, graph = graph, None
        steps.append(end(ended))
        given_args, given_kwargs, result = tree_map_only(torch.Tensor, alias, (args, kwargs, out))
        steps.append(lambda: result.copy_(implementation(*given_args, **given_kwargs)))
        graph = begin()
        return out

    try:
        with breaking(at_break):
            output = run()
    except BaseException:
        if graph is not None:
            with contextlib.suppress(Exception):  # the first error says more
                end(graph)
        raise
    steps.append(end(graph))

    def replay() -> Any:
        for step in steps:
            step()
        return output

    return replay, (len(steps) + 1) // 2


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as a tensor that does not keep it. See NOTE [Memory across a break]."""
    there = tensor.untyped_storage()
    storage = torch._C._construct_storage_from_data_pointer(there.data_ptr(), tensor.device, there.nbytes())
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(
        storage, tensor.storage_offset(), tensor.shape, tensor.stride())
