"""Which keys each query of a batch sees at the true distance, and which from CHUNK + b * L, worked out on the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

Piece = tuple[int, int, int, int]  # queries from, to; positions of keys from, to


class Part(NamedTuple):
    """Queries and the keys that they see: token of each query (n,), sequence and position of each key (N,), and where sequences
    begin in both, int32."""

    token: torch.Tensor
    row: torch.Tensor
    position: torch.Tensor
    cu_q: torch.Tensor
    cu_k: torch.Tensor


class SparseRow(NamedTuple):
    """A sequence of ``total`` tokens whose last ``queries``, from token ``begin`` of the batch on, are a sparse prefill. near,
    far: as in ``pieces_of``."""

    row: int
    begin: int
    queries: int
    total: int
    near: list[Piece]
    far: list[Piece]


class Batch(NamedTuple):
    """near: keys that a query sees at the true distance. far[b]: those of chunk b, seen from CHUNK + b * L; both without sparse
    rows. passing: (token, b) of tokens that stand there. longest: tokens of the longest sequence with queries. decode: a kernel
    decodes, no sequence has two queries, and there is no near and no far."""

    near: Part
    far: list[Part]
    passing: list[tuple[int, int]]
    longest: int
    sparse: list[SparseRow]
    decode: bool = False

    def is_plain(self, chunk: int) -> bool:
        """Whether plain attention of the whole batch is the same."""
        return self.longest <= chunk and not self.sparse


def pieces_of(count: int, total: int, chunk: int, length: int) -> tuple[list[Piece], list[Piece]]:
    """The last ``count`` tokens of a sequence of ``total``: near keys of queries with as many far chunks, and the queries of
    each far chunk b, perhaps none."""
    near, first, at = [], total - count, 0
    while at < count:
        many = max(0, (first + at - chunk) // length + 1)
        end = min(count, chunk + many * length - first)
        near.append((at, end, many * length, first + end))
        at = end
    chunks = far_chunks(total, chunk, length) if count else 0
    return near, [(max(0, chunk + b * length - first), count, b * length, (b + 1) * length) for b in range(chunks)]


def far_chunks(total: int, chunk: int, length: int) -> int:
    """How many chunks the last token of a sequence of ``total`` sees from CHUNK + b * L."""
    return max(0, (total - 1 - chunk) // length + 1)


def divide(query_lens: Sequence[int], seq_lens: Sequence[int], chunk: int, length: int, device: torch.device,
           dense_below: int | None = None, use_kernel: bool = False) -> Batch:
    """Divide a batch, whose sequence r schedules the last query_lens[r] of its seq_lens[r] tokens, on the host. Prefills of
    sequences longer than ``dense_below`` are sparse. ``use_kernel``: batches without a prefill are for the kernel."""
    longest = max((total for count, total in zip(query_lens, seq_lens, strict=True) if count), default=0)
    if longest <= (chunk if dense_below is None else min(chunk, dense_below)):  # plain attention
        return Batch(_part([], device), [], [], longest, [])
    near: list[tuple[int, int, int, int, int]] = []  # row, tokens from, to, keys from, to
    far: list[list[tuple[int, int, int, int, int]]] = []
    passing: list[tuple[int, int]] = []
    sparse: list[SparseRow] = []
    begin, decode = 0, use_kernel and max(query_lens) == 1
    for row, (count, total) in enumerate(zip(query_lens, seq_lens, strict=True)):
        here, there = pieces_of(count, total, chunk, length)
        if dense_below is not None and count > 1 and total > dense_below:
            sparse.append(SparseRow(row, begin, count, total, here, there))
        elif not decode:
            near += [(row, begin + a, begin + z, c, d) for a, z, c, d in here]
            far += [[] for _ in range(len(there) - len(far))]
            for b, (a, z, c, d) in enumerate(there):
                far[b].append((row, begin + a, begin + z, c, d))
        passing += [(begin + position, b) for b in range(len(there)) if (position := chunk + b * length - total + count) >= 0]
        begin += count
    return Batch(_part(near, device), [_part(some, device) for some in far], passing, longest, sparse, decode)


def _part(pieces: Sequence[tuple[int, int, int, int, int]], device: torch.device) -> Part:
    def joined(ranges: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat([*ranges, torch.zeros(0, dtype=torch.int64)]).to(device)

    def starts(sizes: Sequence[int]) -> torch.Tensor:
        return torch.tensor([0, *sizes]).cumsum(0).to(device, torch.int32)

    return Part(
        joined([torch.arange(a, b) for _, a, b, _, _ in pieces]), joined([torch.full((d - c,), r) for r, _, _, c, d in pieces]),
        joined([torch.arange(c, d) for _, _, _, c, d in pieces]), starts([b - a for _, a, b, _, _ in pieces]),
        starts([d - c for _, _, _, c, d in pieces]))


def gathered(cache: torch.Tensor, block_table: torch.Tensor, row: torch.Tensor | int, position: torch.Tensor) -> torch.Tensor:
    """Keys or values (N, Hkv, D) at positions (N,) of sequences (N,), or of one."""
    return cache[block_table[row, position // cache.shape[1]].long(), position % cache.shape[1]]
