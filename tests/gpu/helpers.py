"""Checks that several GPU tests share."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from quire.attn_ops.conformance.batches import compare
from quire.attn_ops.conformance.checks import Kit
from quire.attn_ops.registry import get_backend
from tests.attn_ops.draft_steps import copy_into, draft_batches, plan_steps, run_steps, values_of


def need(backend: str) -> str:
    why = get_backend(backend).available(torch.device("cuda"))
    if why:
        pytest.skip(f"{backend}: {why}")
    return backend


def captured(run: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A CUDA graph of ``run``, and its result there."""
    run()  # compiles the kernels
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    return graph, out


def check_draft_graph(kit: Kit, first: Sequence[int], later: Sequence[int], **options: Any) -> None:
    """Three decode steps of sequences of the lengths ``first`` in one CUDA graph, which is replayed with those of ``later`` on
    other pages, then with the first ones again. ``options``: of the kit's batches."""
    backend, states = kit.backend, {}
    static, others = (draft_batches(kit, lens, 3, 4, seed=n, num_pages=160, table_width=100, page_size=4, **options)
                      for n, lens in enumerate((first, later)))
    kept = values_of(static)
    steps = plan_steps(backend, static, states, graph_key="drafts", capturing=True)
    with torch.no_grad():
        graph, found = captured(lambda: run_steps(backend, static, steps))
    for batches, values in ((static, kept), (others, values_of(others)), (static, kept)):
        copy_into(static, batches, values)
        for out in found:
            out.fill_(math.nan)
        planned = plan_steps(backend, batches, states, graph_key="drafts")
        graph.replay()
        for out, batch in zip(found, batches, strict=True):
            compare(out, batch)
        del planned


def check_likely(model: Any, prompt: list[int], found: list[int]) -> None:
    """Each token is the likeliest in float32, up to twice the error of transformers' bfloat16 forward on each side."""
    ids = torch.tensor([prompt + found], device="cuda")
    exact = copy.deepcopy(model).float()
    with torch.no_grad():
        want = exact(ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
        own = model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    allowed = 4 * (own - want).abs().max()
    behind = want.amax(-1) - want[torch.arange(len(found)), found]
    assert (behind <= allowed).all(), f"{(behind / allowed).max():.2f} times the error allowed"
