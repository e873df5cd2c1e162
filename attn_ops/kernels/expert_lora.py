"""LoRA's adapters of a mixture of experts, for the kernels of experts.py: see attn_ops/ops/expert_lora.py.

Legend: as in experts.py; r the rank of an adapter. ``lora``: host.ExpertAdapters; LORA: host.ExpertTiles. A is (E r, K), an
expert's ranks one after the other, and B (N, r E), a rank's experts one after the other, as PEFT has them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quire.attn_ops.kernels.expert_pairs import count_of_leader, load_ids, pairs_of_expert, pairs_of_tile
from quire.attn_ops.kernels.lora import dot_float32
from quire.attn_ops.kernels.pdl import let_next_start, wait_for_previous


@triton.jit(do_not_specialize=["S"])  # else batch sizes would be separate kernels
def pairs_shrink_kernel(x, ids, lora, S, K, E, repeat, stride_x, BLOCK_S: tl.constexpr, BLOCK_M: tl.constexpr,
                        BLOCK_K: tl.constexpr, BY_PAIR: tl.constexpr, LORA: tl.constexpr, PDL: tl.constexpr):
    """First products of few pairs. Program (c, l): ranks, adapter and part of K by c, and the pairs of leader l."""
    let_next_start(PDL)
    wait_for_previous(PDL)
    expert, count = count_of_leader(ids, tl.program_id(1), S, E, BLOCK_S, BY_PAIR)
    for first in range(0, tl.where(expert < E, count, 0), BLOCK_M):
        pairs = pairs_of_expert(ids, expert, first, S, E, BLOCK_S, BLOCK_M)
        inside = first + tl.arange(0, BLOCK_M) < count
        _shrink(tl.program_id(0), x, lora, pairs, inside, expert, S, K, repeat, stride_x, BLOCK_M, BLOCK_K, LORA)


@triton.jit(do_not_specialize=["S"])
def sorted_shrink_kernel(x, order, tiles, lora, S, K, E, repeat, stride_x, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
                         LORA: tl.constexpr, PDL: tl.constexpr):
    """First products of pairs sorted by expert. Program (c, i): as in ``pairs_shrink_kernel``, and the i-th tile of pairs."""
    let_next_start(PDL)
    wait_for_previous(PDL)
    expert, pairs, inside = pairs_of_tile(order, tiles, tl.program_id(1), E, BLOCK_M)
    if expert < E:
        _shrink(tl.program_id(0), x, lora, pairs, inside, expert, S, K, repeat, stride_x, BLOCK_M, BLOCK_K, LORA)


@triton.jit
def _shrink(program, x, lora, pairs, inside, expert, S, K, repeat, stride_x, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
            LORA: tl.constexpr):
    """``A[expert] x`` of the pairs that have an adapter, over a part of K, to ``lora.shrunk`` (adapters, parts, S, block_r)."""
    ADAPTERS: tl.constexpr = LORA.adapters
    PARTS: tl.constexpr = LORA.parts
    RANKS: tl.constexpr = LORA.ranks
    PER: tl.constexpr = LORA.block_r // RANKS
    part = program % PARTS
    r = program // PARTS % PER * RANKS + tl.arange(0, RANKS)
    bits = _bits_of(pairs, inside, lora, LORA)
    rows = x + (pairs // repeat).to(tl.int64) * stride_x
    for i in tl.static_range(ADAPTERS):
        if program // (PARTS * PER) == i:
            if tl.max(_has(bits, inside, lora.places[i]).to(tl.int32), 0) > 0:
                rank = lora.ranks[i]
                factors = lora.a[i] + (expert.to(tl.int64) * rank + r)[None, :] * K
                total = tl.zeros((BLOCK_M, RANKS), tl.float32)
                for start in range(part * BLOCK_K, K, PARTS * BLOCK_K):
                    at = start + tl.arange(0, BLOCK_K)
                    tile = tl.load(rows[:, None] + at[None, :], mask=(at < K)[None, :], other=0.0)
                    a = tl.load(factors + at[:, None], mask=(r < rank)[None, :] & (at < K)[:, None], other=0.0)
                    total = dot_float32(tile, a.to(tl.float32) if tile.dtype == tl.float32 else a, total)
                place = ((i * PARTS + part) * S + pairs).to(tl.int64) * LORA.block_r
                tl.store(lora.shrunk + place[:, None] + r[None, :], total, mask=inside[:, None])


@triton.jit(do_not_specialize=["S"])
def expand_kernel(ids, lora, S, N, E, BLOCK_S: tl.constexpr, BLOCK_N: tl.constexpr, LORA: tl.constexpr, PDL: tl.constexpr):
    """Second products of few pairs, of all adapters: ``lora.delta`` (S, N). Program (n, s): some outputs and some pairs, so
    that B, in which the experts lie side by side, is read along its rows."""
    ADAPTERS: tl.constexpr = LORA.adapters
    PARTS: tl.constexpr = LORA.parts
    BLOCK_R: tl.constexpr = LORA.block_r
    let_next_start(PDL)
    wait_for_previous(PDL)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    pairs = tl.program_id(1) * BLOCK_S + tl.arange(0, BLOCK_S)
    expert = load_ids(ids, pairs, S, E)
    inside = (expert >= 0) & (expert < E)
    bits = _bits_of(pairs, inside, lora, LORA)
    total = tl.zeros((BLOCK_N, BLOCK_S), tl.float32)
    for i in tl.static_range(ADAPTERS):
        has, rank = _has(bits, inside, lora.places[i]), lora.ranks[i]
        if tl.max(has.to(tl.int32), 0) > 0:
            b = lora.b[i] + (n.to(tl.int64) * rank * E)[:, None] + expert[None, :]
            low = lora.shrunk + (i * PARTS * S + pairs).to(tl.int64) * BLOCK_R
            for first in range(0, rank, 8):
                for j in tl.static_range(8):
                    r = first + j
                    factor = tl.zeros((BLOCK_S,), tl.float32)
                    for part in tl.static_range(PARTS):
                        factor += tl.load(low + part * S * BLOCK_R + r, mask=has & (r < rank), other=0.0)
                    more = tl.load(b + r * E, mask=(n < N)[:, None] & (has & (r < rank))[None, :], other=0.0)
                    total += more.to(tl.float32) * (factor * lora.scalings[i])[None, :]
    tl.store(lora.delta + pairs.to(tl.int64)[None, :] * N + n[:, None], total,
             mask=(n < N)[:, None] & _has_one(bits, inside, lora, LORA)[None, :])


@triton.jit
def turn_kernel(b, turned, rows, E, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """B as (rows, E) to (E, rows)."""
    let_next_start(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    expert = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    tile = tl.load(b + row[:, None] * E + expert[None, :], mask=(row < rows)[:, None] & (expert < E)[None, :], other=0.0)
    tl.store(turned + expert.to(tl.int64)[:, None] * rows + row[None, :], tl.trans(tile),
             mask=(expert < E)[:, None] & (row < rows)[None, :])


@triton.jit
def add_expert_adapters(acc, up, pairs, inside, expert, first, out, S, N, E, lora, BLOCK_M: tl.constexpr,
                        BLOCK_N: tl.constexpr, HALVES: tl.constexpr, LORA: tl.constexpr):
    """``acc`` (BLOCK_N, BLOCK_M) float32, the outputs from ``first`` on of N, and with HALVES ``up``, those N further on, plus
    ``B[expert] (A[expert] x) * scaling`` of each pair's adapters: what ``expand_kernel`` has stored, or by products with B of
    ``turn_kernel``."""
    ADAPTERS: tl.constexpr = LORA.adapters
    PARTS: tl.constexpr = LORA.parts
    BLOCK_R: tl.constexpr = LORA.block_r
    RANKS: tl.constexpr = LORA.ranks
    ROWS: tl.constexpr = 2 if HALVES else 1  # of N, in all
    inside = inside & (expert < E)
    bits = _bits_of(pairs, inside, lora, LORA)
    n = first + tl.arange(0, BLOCK_N)
    if LORA.expanded:
        mask = (n < N)[:, None] & _has_one(bits, inside, lora, LORA)[None, :]
        delta = lora.delta + pairs.to(tl.int64)[None, :] * (ROWS * N) + n[:, None]
        acc += tl.load(delta, mask=mask, other=0.0)
        if HALVES:
            up += tl.load(delta + N, mask=mask, other=0.0)
    else:
        for i in tl.static_range(ADAPTERS):
            has, rank = _has(bits, inside, lora.places[i]), lora.ranks[i]
            b = lora.b[i] + expert.to(tl.int64) * (ROWS * N) * rank
            if tl.max(has.to(tl.int32), 0) > 0:
                for ranks_from in tl.static_range(0, BLOCK_R, RANKS):
                    r = ranks_from + tl.arange(0, RANKS)
                    low = tl.zeros((RANKS, BLOCK_M), tl.float32)
                    for part in tl.static_range(PARTS):
                        place = ((i * PARTS + part) * S + pairs).to(tl.int64) * BLOCK_R
                        low += tl.load(lora.shrunk + place[None, :] + r[:, None], mask=has[None, :], other=0.0)
                    scaling = lora.scalings[i]
                    acc = _expanded(acc, b, n, N, r, rank, low, has, scaling, out, LORA.every)
                    if HALVES:
                        up = _expanded(up, b + N.to(tl.int64) * rank, n, N, r, rank, low, has, scaling, out, LORA.every)
    return acc, up


@triton.jit
def _expanded(total, b, n, N, r, rank, low, has, scaling, out, EVERY: tl.constexpr):
    """``total`` plus the part of these ranks, where a pair has the adapter: elsewhere it is 0, which times inf is not 0."""
    factors = tl.load(b + n[:, None] * rank + r[None, :], mask=(n < N)[:, None] & (r < rank)[None, :], other=0.0)
    if out.dtype.element_ty == tl.float32:
        factors = factors.to(tl.float32)
    if EVERY and factors.dtype != tl.float16:  # the same, in fewer registers
        return tl.dot(factors, (low * scaling).to(factors.dtype), total, input_precision="tf32x3")
    else:
        more = tl.dot(factors, low.to(factors.dtype), input_precision="tf32x3")
        return tl.where(has[None, :], total + more * scaling, total)


@triton.jit
def _bits_of(pairs, inside, lora, LORA: tl.constexpr):
    """The adapters of the pairs' tokens as bits; not loaded where each token has all of them."""
    if LORA.every:
        return tl.zeros(pairs.shape, tl.int64)
    else:
        return tl.load(lora.rows + pairs // lora.top_k, mask=inside, other=0)


@triton.jit
def _has(bits, inside, place):
    return inside & ((place == 63) | (((bits >> place) & 1) == 1))


@triton.jit
def _has_one(bits, inside, lora, LORA: tl.constexpr):
    """Which pairs have an adapter at all."""
    ADAPTERS: tl.constexpr = LORA.adapters
    found = inside & False
    for i in tl.static_range(ADAPTERS):
        found |= _has(bits, inside, lora.places[i])
    return found
