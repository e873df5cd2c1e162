"""Sparse causal attention of a prefill: each head attends to some keys and to some distances. An approximation.

In long prompts most of a head's weight lies on a few keys, which every query sees (vertical lines of the attention matrix), and
at a few distances between query and key (slash lines): MInference (Jiang et al., 2024, arXiv:2407.02490). The last queries of a
prefill are computed over all keys; the keys and the distances that have most of their weight are what all its queries attend
to, the first KEEP_FIRST keys and the smallest KEEP_NEAR distances before all others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from quire.attn_ops.kernels import host
from quire.attn_ops.kernels.launch import launch
from quire.attn_ops.ops.merge_state import log_sum_exp

KEEP_FIRST, KEEP_NEAR = 30, 100
QUERIES = 256  # that ``attend_eager`` computes at a time


class Lines(NamedTuple):
    """What each head attends to, of a sequence of N tokens: keys and distances, (H, N) bool each."""

    keys: torch.Tensor
    distances: torch.Tensor


def line_weights(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax weights summed by key and by distance, (H, N) float32 each. ``scores``: (H, n, N) float32, of the last n of N
    tokens with all keys; -inf for later keys."""
    count, total = scores.shape[1:]
    weights = torch.softmax(scores, -1)
    distances = torch.zeros_like(weights[:, 0])
    for i in range(count):
        seen = total - count + i + 1
        distances[:, :seen] += weights[:, i, :seen].flip(-1)
    return weights.sum(1), distances


def choose_lines(keys: torch.Tensor, distances: torch.Tensor, vertical: Sequence[int], slash: Sequence[int]) -> Lines:
    """The lines with the largest weights, of ``line_weights`` (H, N); ``vertical``, ``slash``: how many of each head."""
    def largest(weights: torch.Tensor, sizes: Sequence[int], first: int) -> torch.Tensor:
        weights = weights.clone()
        weights[:, :first] = float("inf")
        order = weights.sort(dim=-1, descending=True, stable=True).indices  # of equal ones the first
        rank = torch.arange(weights.shape[1], device=weights.device)
        chosen = rank < torch.tensor(sizes, device=weights.device)[:, None]
        return torch.zeros_like(weights, dtype=torch.bool).scatter_(1, order, chosen)

    return Lines(largest(keys, vertical, KEEP_FIRST), largest(distances, slash, KEEP_NEAR))


def attend_eager(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, first_query: int, first_key: int, lines: Lines, *,
                 scale: float, softcap: float | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition: query at position p sees key at position j <= p iff its head's lines have key j or distance p - j. q, k,
    v: (n, H, D), (m, Hkv, D), (m, Hkv, Dv), of consecutive positions from ``first_query`` and ``first_key``. Returns (n, H, Dv)
    in q's dtype, (n, H) float32 log-sum-exp, natural logarithm; 0 and -inf for a query that sees no key."""
    group = q.shape[1] // k.shape[1]
    keys, values = (x.transpose(0, 1).float().repeat_interleave(group, 0) for x in (k, v))
    at = torch.arange(first_key, first_key + k.shape[0], device=q.device)
    outs, lses = [], []
    for begin in range(0, q.shape[0], QUERIES):
        query = q[begin : begin + QUERIES].transpose(0, 1).float()
        scores = scale * (query @ keys.transpose(1, 2))
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        distance = torch.arange(query.shape[1], device=q.device)[:, None] + (first_query + begin) - at
        keep = lines.keys[:, None, at] | lines.distances[:, distance.clamp_min(0)]
        scores = scores.masked_fill(~(keep & (distance >= 0)), float("-inf"))
        total = log_sum_exp(scores)
        weights = torch.exp(scores - total.masked_fill(total == float("-inf"), 0.0))
        outs.append((weights @ values).transpose(0, 1).to(q.dtype))
        lses.append(total[..., 0].transpose(0, 1))
    return torch.cat(outs), torch.cat(lses)


class Listed(NamedTuple):
    """``Lines`` for the kernel: chosen keys of each head in order (H, C) int32, behind them N; blocks of ``block`` tokens by
    which key and query are apart where a distance is chosen, in order, (H, S) int32, and how many there are (H,)."""

    keys: torch.Tensor
    apart: torch.Tensor
    num_apart: torch.Tensor
    block: int

    @classmethod
    def of(cls, lines: Lines, block: int) -> Listed:
        heads, total = lines.keys.shape
        at = torch.arange(total, device=lines.keys.device)
        keys = torch.where(lines.keys, at, total).sort(-1).values[:, : int(lines.keys.sum(1).max())]
        until = torch.nn.functional.pad(lines.distances.cumsum(1, dtype=torch.int32), (1, 0))  # chosen distances below
        apart = torch.arange(-(-total // block) + 1, device=keys.device)
        low, high = (apart * block - block + 1).clamp(0, total), (apart * block + block).clamp(0, total)
        some = until[:, high] > until[:, low]
        order = torch.where(some, apart, len(apart)).sort(-1).values
        return cls(keys.int(), order.int(), some.sum(1, dtype=torch.int32), block)


def attend_triton(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, first_query: int, first_key: int, lines: Lines, *,
                  scale: float, softcap: float | None, listed: Listed) -> tuple[torch.Tensor, torch.Tensor]:
    """``attend_eager`` in a kernel that reads the chosen keys, and blocks of keys with a chosen distance."""
    q, k, v = map(host.rows_contiguous, (q, k, v))
    count, heads, dim = q.shape
    out = torch.empty(count, heads, v.shape[2], dtype=q.dtype, device=q.device)
    lse = torch.empty(count, heads, dtype=torch.float32, device=q.device)
    bounds = torch.tensor([[first_key], [first_key + k.shape[0]]], dtype=torch.int32, device=q.device)
    begin, end = (torch.searchsorted(listed.keys, bound.expand(heads, 1).contiguous()).int() for bound in bounds)
    block = listed.block
    launch(host.kernel_module("kernels.vertical_slash").lines_kernel,
           ((first_query + count - 1) // block - first_query // block + 1, heads), q, k, v, out, lse,
           lines.keys.view(torch.int8), lines.distances.view(torch.int8), listed.keys, begin, end, listed.apart,
           listed.num_apart, first_query, count, first_key, k.shape[0], lines.keys.shape[1], listed.keys.shape[1],
           listed.apart.shape[1], scale, softcap, q.stride()[:2], k.stride()[:2], v.stride()[:2],
           heads // k.shape[1], dim, v.shape[2], block, num_warps=4)
    return out, lse


def kernel_block(q: torch.Tensor, dim_v: int) -> int:
    """Queries and keys of a program of the kernel."""
    widest = max(q.shape[-1], dim_v)
    return (64 if widest <= 128 else 32) if q.dtype.itemsize == 2 else 16  # larger tiles do not fit into registers
