"""LoRA's adapters of a mixture of experts, for the kernels of experts.py: see attn_ops/ops/expert_lora.py.

Legend: as in experts.py; r the rank of an adapter. ``lora``: host.ExpertAdapters; LORA: host.ExpertTiles. A is (E r, K), an
expert's ranks one after the other, and B (N, r E), a rank's experts one after the other, as PEFT has them.

Few pairs: ``pair_shrink_kernel`` has the first products, and ``expand_kernel`` the second ones, for all experts along B's rows,
where an expert's numbers lie E apart; the experts' kernels add them. Many pairs: B is turned, so that an expert's numbers lie
together, and the experts' kernels compute both products.

NOTE [First products of experts]: there, of the programs that have a tile of pairs, the first compute their ``A x``, and count
when it is stored; the others multiply by the weight, wait for the count, and add ``B (A x)``. That ends for the reason of NOTE
[First products in the same launch] in lora.py: GPUs start programs in the order of their numbers, and those that are waited for
have the smaller ones. It leaves few registers, which decode steps, bound by memory, need more.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quire.attn_ops.kernels.counters import wait_for_count
from quire.attn_ops.kernels.expert_pairs import load_ids
from quire.attn_ops.kernels.lora import dot_float32
from quire.attn_ops.kernels.pdl import let_next_start, wait_for_previous


@triton.jit(do_not_specialize=["S"])  # else batch sizes would be separate kernels
def pair_shrink_kernel(x, ids, lora, S, K, E, repeat, stride_x, BLOCK_K: tl.constexpr, LORA: tl.constexpr, PDL: tl.constexpr):
    """First products of few pairs. Program (c, s): the part of K, then ranks, then the adapter by c; and pair s, which is too
    little for tensor cores."""
    ADAPTERS: tl.constexpr = LORA.adapters
    PARTS: tl.constexpr = LORA.parts
    RANKS: tl.constexpr = LORA.ranks
    PER: tl.constexpr = LORA.block_r // RANKS
    let_next_start(PDL)
    wait_for_previous(PDL)
    program, pair = tl.program_id(0), tl.program_id(1)
    part, r = program % PARTS, program // PARTS % PER * RANKS + tl.arange(0, RANKS)
    expert = load_ids(ids, pair, S, E)
    bits = tl.full((), 0, tl.int64) if LORA.every else tl.load(lora.rows + pair // lora.top_k)
    for i in tl.static_range(ADAPTERS):
        if (program // (PARTS * PER) == i) & _has(bits, expert < E, lora.places[i]):
            rank = lora.ranks[i]
            a = lora.a[i] + (expert.to(tl.int64) * rank + r)[:, None] * K
            row = x + (pair // repeat).to(tl.int64) * stride_x
            products = tl.zeros((RANKS, BLOCK_K), tl.float32)
            for start in range(part * BLOCK_K, K, PARTS * BLOCK_K):
                at = start + tl.arange(0, BLOCK_K)
                factors = tl.load(a + at[None, :], mask=(r < rank)[:, None] & (at < K)[None, :], other=0.0)
                products += factors.to(tl.float32) * tl.load(row + at, mask=at < K, other=0.0).to(tl.float32)[None, :]
            place = ((i * PARTS + part) * S + pair).to(tl.int64) * LORA.block_r
            tl.store(lora.shrunk + place + r, tl.sum(products, 1))


@triton.jit(do_not_specialize=["S"])
def expand_kernel(ids, lora, S, N, E, BLOCK_S: tl.constexpr, BLOCK_N: tl.constexpr, LORA: tl.constexpr, PDL: tl.constexpr):
    """Second products of few pairs, of all adapters: ``lora.delta`` (S, N). Program (n, s): some outputs and some pairs."""
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
def add_expanded(acc, up, pairs, inside, expert, first, N, E, lora, BLOCK_N: tl.constexpr, HALVES: tl.constexpr,
                 LORA: tl.constexpr):
    """``acc`` (BLOCK_N, BLOCK_M) float32, the outputs from ``first`` on of N, and with HALVES ``up``, those N further on, plus
    what ``expand_kernel`` has stored."""
    inside = inside & (expert < E)
    n = first + tl.arange(0, BLOCK_N)
    mask = (n < N)[:, None] & _has_one(_bits_of(pairs, inside, lora, LORA), inside, lora, LORA)[None, :]
    delta = lora.delta + pairs.to(tl.int64)[None, :] * (2 * N if HALVES else N) + n[:, None]
    acc += tl.load(delta, mask=mask, other=0.0)
    if HALVES:
        up += tl.load(delta + N, mask=mask, other=0.0)
    return acc, up


@triton.jit(do_not_specialize=["T"])
def turn_kernel(b, turned, bits, T, place, rows, E, BLOCK: tl.constexpr, EVERY: tl.constexpr, PDL: tl.constexpr):
    """B as (rows, E) to (E, rows), if one of T tokens, whose adapters ``bits`` are, has it."""
    let_next_start(PDL)
    wait_for_previous(PDL)
    if not EVERY:
        found = tl.zeros((1024,), tl.int64)
        for start in range(0, T, 1024):
            at = start + tl.arange(0, 1024)
            found |= tl.load(bits + at, mask=at < T, other=0)
        if (place != 63) & (tl.max((found >> place) & 1, 0) == 0):
            return
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    expert = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    tile = tl.load(b + row[:, None] * E + expert[None, :], mask=(row < rows)[:, None] & (expert < E)[None, :], other=0.0)
    tl.store(turned + expert.to(tl.int64)[:, None] * rows + row[None, :], tl.trans(tile),
             mask=(expert < E)[:, None] & (row < rows)[None, :])


@triton.jit
def shrink(program, x, lora, pairs, inside, expert, S, K, E, repeat, stride_x, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
           LORA: tl.constexpr):
    """``A[expert] x`` of the pairs (BLOCK_M,) that have an adapter, to ``lora.shrunk`` (adapters, parts, S, block_r).
    ``program``: the part of K; then ranks; then the adapter. Few pairs give few warps work: each of LORA.slices of them has
    columns of its own."""
    ADAPTERS: tl.constexpr = LORA.adapters
    PARTS: tl.constexpr = LORA.parts
    RANKS: tl.constexpr = LORA.ranks
    SLICES: tl.constexpr = LORA.slices
    PER: tl.constexpr = LORA.block_r // RANKS
    part = program % PARTS
    r = program // PARTS % PER * RANKS + tl.arange(0, RANKS)
    inside = inside & (expert < E)
    bits = _bits_of(pairs, inside, lora, LORA)
    rows = x + (pairs // repeat).to(tl.int64) * stride_x
    for i in tl.static_range(ADAPTERS):
        if program // (PARTS * PER) == i:
            if tl.max(_has(bits, inside, lora.places[i]).to(tl.int32), 0) > 0:
                rank = lora.ranks[i]
                factors = lora.a[i] + (expert.to(tl.int64) * rank + r) * K
                if SLICES == 1:
                    total = tl.zeros((BLOCK_M, RANKS), tl.float32)
                    for start in tl.range(part * BLOCK_K, K, PARTS * BLOCK_K):
                        at = start + tl.arange(0, BLOCK_K)
                        tile = tl.load(rows[:, None] + at[None, :], mask=(at < K)[None, :], other=0.0)
                        a = tl.load(factors[None, :] + at[:, None], mask=(r < rank)[None, :] & (at < K)[:, None], other=0.0)
                        total = dot_float32(tile, a.to(tl.float32) if tile.dtype == tl.float32 else a, total)
                else:
                    sums = tl.zeros((SLICES, BLOCK_M, RANKS), tl.float32)
                    for start in tl.range(part * SLICES * 32, K, PARTS * SLICES * 32):
                        at = start + tl.arange(0, SLICES)[:, None] * 32 + tl.arange(0, 32)[None, :]
                        tile = tl.load(rows[None, :, None] + at[:, None, :], mask=(at < K)[:, None, :], other=0.0)
                        a = tl.load(factors[None, None, :] + at[:, :, None],
                                    mask=(r < rank)[None, None, :] & (at < K)[:, :, None], other=0.0)
                        sums = dot_float32(tile, a.to(tl.float32) if tile.dtype == tl.float32 else a, sums)
                    total = tl.sum(sums, 0)
                place = ((i * PARTS + part) * S + pairs).to(tl.int64) * LORA.block_r
                tl.store(lora.shrunk + place[:, None] + r[None, :], total, mask=inside[:, None])


@triton.jit
def count_shrunk(counter):
    """A program of first products has stored them."""
    tl.debug_barrier()
    tl.atomic_add(counter, 1, sem="release", scope="gpu")


@triton.jit
def early_factors(pairs, inside, expert, first, N, E, lora, BLOCK_N: tl.constexpr, HALVES: tl.constexpr, LORA: tl.constexpr):
    """B's first ranks, of the first LORA.held adapters, for the outputs from ``first`` on of N, and with HALVES for those N
    further on: what is waited for later."""
    HELD: tl.constexpr = LORA.held
    inside = inside & (expert < E)
    bits = _bits_of(pairs, inside, lora, LORA)
    held = ()
    for i in tl.static_range(HELD):
        needed = tl.max(_has(bits, inside, lora.places[i]).to(tl.int32), 0) > 0
        r = tl.arange(0, LORA.ranks)
        tile = _factors(i, r, needed, expert, first, 0, N, E, lora, BLOCK_N, HALVES, LORA)
        held = held + (tile,)  # type: ignore[assignment]  # Triton's tuples grow
        if HALVES:
            tile = _factors(i, r, needed, expert, first, N, N, E, lora, BLOCK_N, HALVES, LORA)
            held = held + (tile,)  # type: ignore[assignment]
    return held


@triton.jit
def _factors(i: tl.constexpr, r, needed, expert, first, later, N, E, lora, BLOCK_N: tl.constexpr, HALVES: tl.constexpr,
             LORA: tl.constexpr):
    ROWS: tl.constexpr = 2 if HALVES else 1  # of N, in all
    n, rank = first + tl.arange(0, BLOCK_N), lora.ranks[i]
    row = (later + n).to(tl.int64)[:, None]
    at = (expert.to(tl.int64) * (ROWS * N) + row) * rank + r[None, :]
    return tl.load(lora.b[i] + at, mask=(n < N)[:, None] & (r < rank)[None, :] & needed, other=0.0)


@triton.jit
def add_expert_adapters(acc, up, held, counter, pairs, inside, expert, first, out, S, N, E, lora, BLOCK_M: tl.constexpr,
                        BLOCK_N: tl.constexpr, HALVES: tl.constexpr, LORA: tl.constexpr):
    """``acc`` (BLOCK_N, BLOCK_M) float32, the outputs from ``first`` on of N, and with HALVES ``up``, those N further on, plus
    ``B[expert] (A[expert] x) * scaling`` of each pair's adapters. ``held``: of ``early_factors``; ``counter``: of those who
    store the pairs' first products."""
    ADAPTERS: tl.constexpr = LORA.adapters
    PARTS: tl.constexpr = LORA.parts
    BLOCK_R: tl.constexpr = LORA.block_r
    RANKS: tl.constexpr = LORA.ranks
    HELD: tl.constexpr = LORA.held
    EACH: tl.constexpr = 2 if HALVES else 1
    inside = inside & (expert < E)
    bits = _bits_of(pairs, inside, lora, LORA)
    for i in tl.static_range(ADAPTERS):
        has = _has(bits, inside, lora.places[i])
        if tl.max(has.to(tl.int32), 0) > 0:
            wait_for_count(counter, LORA.programs)
            for ranks_from in tl.static_range(0, BLOCK_R, RANKS):
                r = ranks_from + tl.arange(0, RANKS)
                low = tl.zeros((RANKS, BLOCK_M), tl.float32)
                for part in tl.static_range(PARTS):
                    place = ((i * PARTS + part) * S + pairs).to(tl.int64) * BLOCK_R
                    low += tl.load(lora.shrunk + place[None, :] + r[:, None], mask=has[None, :], other=0.0,
                                   cache_modifier=".cg")
                if i < HELD and ranks_from == 0:
                    b = held[i * EACH]
                else:
                    b = _factors(i, r, True, expert, first, 0, N, E, lora, BLOCK_N, HALVES, LORA)
                acc = _expanded(acc, b, low, has, lora.scalings[i], out, LORA.every)
                if HALVES:
                    if i < HELD and ranks_from == 0:
                        b = held[i * EACH + 1]
                    else:
                        b = _factors(i, r, True, expert, first, N, N, E, lora, BLOCK_N, HALVES, LORA)
                    up = _expanded(up, b, low, has, lora.scalings[i], out, LORA.every)
    return acc, up


@triton.jit
def _expanded(total, factors, low, has, scaling, out, EVERY: tl.constexpr):
    """``total`` plus the part of some ranks, where a pair has the adapter: elsewhere it is 0, which times inf is not 0."""
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
