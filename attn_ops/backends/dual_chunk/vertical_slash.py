"""Sparse causal attention of a prefill: each head attends to some keys and to some distances. An approximation.

In long prompts most of a head's weight lies on a few keys, which every query sees (vertical lines of the attention matrix), and
at a few distances between query and key (slash lines): MInference (Jiang et al., 2024, arXiv:2407.02490). The last queries of a
prefill are computed over all keys; the keys and the distances that have most of their weight are what all its queries attend
to, the first KEEP_FIRST keys and the smallest KEEP_NEAR distances before all others.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from quire.attn_ops.backend import UnsupportedAttention
from quire.attn_ops.backends.dual_chunk.divide import Piece, SparseRow
from quire.attn_ops.kernels import host
from quire.attn_ops.kernels.launch import launch
from quire.attn_ops.ops.merge_state import log_sum_exp, merge_state

PATTERN = "vertical_and_slash"
KEEP_FIRST, KEEP_NEAR = 30, 100
QUERIES = 256  # that ``attend_eager`` computes at a time
SCORE_BYTES = 256 << 20  # of the scores that choose keys and distances, held at a time


@dataclass(frozen=True)
class Sparse:
    """Prefills of sequences longer than ``dense_below`` are sparse; their ``last`` queries choose. ``sizes``: numbers of keys
    and of distances, of all heads, or by layer of each query head."""

    dense_below: int
    last: int
    sizes: tuple[int, int] | Mapping[int, Sequence[tuple[int, int]]]

    def of_layer(self, layer: int, heads: int) -> list[tuple[int, int]]:
        """Numbers of keys and distances of each query head. Raises UnsupportedAttention if the file is of another model."""
        if isinstance(self.sizes, tuple):
            return [self.sizes] * heads
        rows = self.sizes.get(layer)
        if rows is None or len(rows) != heads:
            have = "no such layer" if rows is None else f"{len(rows)} heads"
            raise UnsupportedAttention(f"sparse prefill: layer {layer} has {heads} query heads, the file has {have}: it is of "
                                       "another model. Give this one's sparse_attention_config.json, or VERTICAL:SLASH")
        return list(rows)

    def __str__(self) -> str:
        what = (f"{self.sizes[0]} keys and {self.sizes[1]} distances of each head" if isinstance(self.sizes, tuple)
                else "the keys and distances of its file")
        return f"prefills sequences longer than {self.dense_below} tokens over {what}"


def read_sizes(file: str) -> dict[int, list[tuple[int, int]]]:
    """Layer -> numbers of keys and distances of each query head, of a checkpoint's ``sparse_attention_config.json``: for each
    layer, in a list or by number, an object head -> [pattern, keys, distances, score]. The score is that of the search that
    found the numbers, and has no meaning afterwards. Raises ValueError for another form, heads with gaps, another pattern than
    "vertical_and_slash", a number below 1."""
    try:
        found = json.loads(Path(file).read_text())
        layers = dict(enumerate(found)) if isinstance(found, list) else {int(layer): heads for layer, heads in found.items()}
        made = {}
        for layer, heads in layers.items():
            rows = {int(head): entry for head, entry in heads.items()}
            if sorted(rows) != list(range(len(rows))):
                raise ValueError(f"layer {layer} has heads {sorted(rows)}")
            made[layer] = [_numbers(layer, head, rows[head]) for head in range(len(rows))]
        return made
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{file} is not a sparse_attention_config.json of vertical and slash lines: {error}") from error


def _numbers(layer: int, head: int, entry: Sequence[object]) -> tuple[int, int]:
    if not isinstance(entry, list) or len(entry) not in (3, 4):
        raise ValueError(f"layer {layer}, head {head} has {entry!r}, not [pattern, keys, distances, score]")
    pattern, keys, distances = entry[:3]
    if pattern != PATTERN:
        raise ValueError(f"layer {layer}, head {head} has the pattern {pattern!r}; only {PATTERN!r} is possible")
    if not (isinstance(keys, int) and isinstance(distances, int) and keys > 0 and distances > 0):
        raise ValueError(f"layer {layer}, head {head} has {keys!r} keys and {distances!r} distances; give positive integers")
    return keys, distances


class Lines(NamedTuple):
    """What each head attends to, of a sequence of N tokens: keys and distances, (H, N) bool each."""

    keys: Tensor
    distances: Tensor


def line_weights(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax weights summed by key and by distance, (H, N) float32 each. ``scores``: (H, n, N) float32, of the last n of N
    tokens with all keys; -inf for later keys."""
    count, total = scores.shape[1:]
    weights = torch.softmax(scores, -1)
    distances = torch.zeros_like(weights[:, 0])
    for i in range(count):
        seen = total - count + i + 1
        distances[:, :seen] += weights[:, i, :seen].flip(-1)
    return weights.sum(1), distances


def choose_lines(keys: Tensor, distances: Tensor, vertical: Sequence[int], slash: Sequence[int]) -> Lines:
    """The lines with the largest weights, of ``line_weights`` (H, N); ``vertical``, ``slash``: how many of each head."""
    def largest(weights: Tensor, sizes: Sequence[int], first: int) -> Tensor:
        weights = weights.clone()
        weights[:, :first] = float("inf")
        order = weights.sort(dim=-1, descending=True, stable=True).indices  # of equal ones the first
        rank = torch.arange(weights.shape[1], device=weights.device)
        chosen = rank < torch.tensor(sizes, device=weights.device)[:, None]
        return torch.zeros_like(weights, dtype=torch.bool).scatter_(1, order, chosen)

    return Lines(largest(keys, vertical, KEEP_FIRST), largest(distances, slash, KEEP_NEAR))


def attend_eager(q: Tensor, k: Tensor, v: Tensor, first_query: int, first_key: int, lines: Lines, *,
                 scale: float, softcap: float | None) -> tuple[Tensor, Tensor]:
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

    keys: Tensor
    apart: Tensor
    num_apart: Tensor
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


def attend_triton(q: Tensor, k: Tensor, v: Tensor, first_query: int, first_key: int, lines: Lines, *,
                  scale: float, softcap: float | None, listed: Listed) -> tuple[Tensor, Tensor]:
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


def kernel_block(q: Tensor, dim_v: int) -> int:
    """Queries and keys of a program of the kernel."""
    widest = max(q.shape[-1], dim_v)
    return (64 if widest <= 128 else 32) if q.dtype.itemsize == 2 else 16  # larger tiles do not fit into registers


def sparse_attention(row: SparseRow, rotated: Tensor, far_query: Callable[[int, slice], Tensor], keys: Tensor, values: Tensor,
                     sizes: Sequence[tuple[int, int]], last: int, *, scale: float, softcap: float | None, use_kernel: bool
                     ) -> Tensor:
    """The prefill of one sequence, ``row``: (queries, H, Dv). ``rotated``: (T, H, D), queries of the batch at their positions;
    ``far_query``: (b, some of the batch's tokens) -> those as from CHUNK + b * L. Keys and values: (total, Hkv, D or Dv).
    ``sizes``: numbers of keys and distances of each head. ``last``: queries that choose."""
    def far(b: int, begin: int, end: int) -> Tensor:
        return far_query(b, slice(row.begin + begin, row.begin + end))

    rotated = rotated[row.begin : row.begin + row.queries]
    lines = _lines(row, rotated, far, keys, sizes, last, scale, softcap)
    attend = attend_eager
    if use_kernel:
        listed = Listed.of(lines, kernel_block(rotated, values.shape[2]))
        attend = functools.partial(attend_triton, listed=listed)
    first = row.total - row.queries

    def state(query: Tensor, piece: Piece) -> tuple[Tensor, Tensor]:
        begin, _, key, end = piece
        return attend(query, keys[key:end], values[key:end], first + begin, key, lines, scale=scale, softcap=softcap)

    out = rotated.new_empty(row.queries, rotated.shape[1], values.shape[2])
    lse = torch.empty(rotated.shape[:2], dtype=torch.float32, device=rotated.device)
    for piece in row.near:
        part = slice(*piece[:2])
        out[part], lse[part] = state(rotated[part], piece)
    for b, piece in enumerate(row.far):
        part = slice(*piece[:2])
        out[part], lse[part] = merge_state(out[part], lse[part], *state(far(b, *piece[:2]), piece))
    return out


def _lines(row: SparseRow, rotated: Tensor, far_query: Callable[[int, int, int], Tensor], keys: Tensor,
           sizes: Sequence[tuple[int, int]], last: int, scale: float, softcap: float | None) -> Lines:
    """What the last queries choose, a few heads at a time."""
    count, heads, total = min(last, row.queries), rotated.shape[1], row.total
    group, start = heads // keys.shape[1], row.queries - count
    near = rotated[start:]
    far = [(max(0, begin - start), key, end, far_query(b, max(begin, start), row.queries))
           for b, (begin, _, key, end) in enumerate(row.far)]
    later = torch.arange(total, device=keys.device) > torch.arange(total - count, total, device=keys.device)[:, None]
    found = []
    at_once = max(1, SCORE_BYTES // (count * total * 4))
    for low in range(0, heads, at_once):
        some = slice(low, min(low + at_once, heads))
        key = keys[:, torch.arange(some.start, some.stop, device=keys.device) // group].transpose(0, 1).float()  # (h, N, D)
        scores = near[:, some].transpose(0, 1).float() @ key.transpose(1, 2)
        for begin, a, z, query in far:
            scores[:, begin:, a:z] = query[:, some].transpose(0, 1).float() @ key[:, a:z].transpose(1, 2)
        scores *= scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        found.append(line_weights(scores.masked_fill_(later, float("-inf"))))
    by_key, by_distance = (torch.cat(parts) for parts in zip(*found, strict=True))
    return choose_lines(by_key, by_distance, [n for n, _ in sizes], [n for _, n in sizes])
