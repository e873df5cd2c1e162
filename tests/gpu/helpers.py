"""Checks that several GPU tests share."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from quire.attn_ops.registry import get_backend


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
