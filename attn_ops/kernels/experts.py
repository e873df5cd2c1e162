"""Kernels of ``attn_ops/ops/experts.py``, which says what they compute, and why their tiles have these sizes.

Legend: S pairs of a row and an expert, E experts, N outputs, K inputs. Ids outside 0 .. E-1 count as expert E, which has no
weight: its rows are zeros. ``lora``: host.ExpertAdapters, or None.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quire.attn_ops.kernels.expert_lora import add_expanded, add_expert_adapters, count_shrunk, early_factors, shrink
from quire.attn_ops.kernels.expert_pairs import count_of_leader, load_ids, pairs_of_expert, pairs_of_tile
from quire.attn_ops.kernels.pdl import let_next_start, wait_for_previous


@triton.jit
def _load_weight(w, outputs, cols, stride_n, stride_k, N, K, TRANSPOSED: tl.constexpr, EVEN_N: tl.constexpr,
                 EVEN_K: tl.constexpr):
    """A (BLOCK_N, BLOCK_K) tile of an expert's weight."""
    tile = _load_tile(w, outputs, cols, stride_n, stride_k, N, K, TRANSPOSED, EVEN_N, EVEN_K)
    if TRANSPOSED:
        tile = tl.trans(tile)
    return tile


@triton.jit
def _load_tile(w, outputs, cols, stride_n, stride_k, N, K, TRANSPOSED: tl.constexpr, EVEN_N: tl.constexpr,
               EVEN_K: tl.constexpr):
    """The same as it lies, along the contiguous dim; TRANSPOSED: (BLOCK_K, BLOCK_N). Read once, so it should not evict the rows
    from the cache."""
    if TRANSPOSED:
        at = w + cols.to(tl.int64)[:, None] * stride_k + outputs[None, :]
        inside = (cols < K)[:, None] & (outputs < N)[None, :]
    else:
        at = w + outputs.to(tl.int64)[:, None] * stride_n + cols[None, :]
        inside = (outputs < N)[:, None] & (cols < K)[None, :]
    if EVEN_N and EVEN_K:
        return tl.load(at, eviction_policy="evict_first")
    else:
        return tl.load(at, mask=inside, other=0.0, eviction_policy="evict_first")


@triton.jit
def _halves(gate, up, out):
    """silu(gate) * up of two products, each rounded to the dtype of ``out`` as it would be by itself."""
    gate = gate.to(out.dtype.element_ty).to(tl.float32)
    return gate / (1 + tl.exp(-gate)) * up.to(out.dtype.element_ty).to(tl.float32)


@triton.jit
def _neighbours(gate, up, alpha, limit):
    """(up + 1) * gate * sigmoid(alpha * gate) of rounded products, both cut off at ``limit``, up at -limit too."""
    gate, up = gate.to(tl.float32), up.to(tl.float32)
    gate = tl.where(gate > limit, limit, gate)  # NaN stays, as in torch.clamp
    up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    return (up + 1) * (gate / (1 + tl.exp(-alpha * gate)))


@triton.jit
def _multiply_rows(x, w, bias, out, pairs, inside, expert, first, N, K, E, repeat, stride_x, stride_e, stride_n, stride_k,
                   alpha, limit, S, lora, counter, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
                   TRANSPOSED: tl.constexpr, GATE: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr,
                   PRECISION: tl.constexpr, LORA: tl.constexpr):
    """Write the BLOCK_N outputs from ``first`` of ``pairs`` (BLOCK_M,) of one ``expert``. The weight is the left operand of the
    tensor cores (the long side). The order of a row's sum does not depend on the other rows.

    pairs: any valid pair where not ``inside``; its product is not stored. With a GATE the weight has 2 N outputs: for "halves"
    those of the gate, then those of up; for "neighbours" both by turns."""
    PER: tl.constexpr = 2 if GATE == "neighbours" else 1  # the weight's outputs in one tile of it, for each of out
    rows = x + (pairs // repeat).to(tl.int64) * stride_x
    weight = w + expert.to(tl.int64) * stride_e
    outputs = first + tl.arange(0, BLOCK_N)
    own = first * PER + tl.arange(0, PER * BLOCK_N)
    FIRST: tl.constexpr = LORA.programs > 0 if lora is not None else False
    held = ()
    if FIRST:
        held = early_factors(pairs, inside, expert, first * PER, PER * N, E, lora, PER * BLOCK_N, GATE == "halves", LORA)
    acc = tl.zeros((PER * BLOCK_N, BLOCK_M), tl.float32)
    up = acc
    for start in range(0, tl.where(expert < E, K, 0), BLOCK_K):
        cols = start + tl.arange(0, BLOCK_K)
        if EVEN_K:
            xs = tl.load(rows[None, :] + cols[:, None])
        else:
            xs = tl.load(rows[None, :] + cols[:, None], mask=(cols < K)[:, None], other=0.0)
        ws = _load_weight(weight, own, cols, stride_n, stride_k, PER * N, K, TRANSPOSED, EVEN_N, EVEN_K)
        acc = tl.dot(ws, xs, acc, input_precision=PRECISION)
        if GATE == "halves":
            ws = _load_weight(weight + N.to(tl.int64) * stride_n, outputs, cols, stride_n, stride_k, N, K, TRANSPOSED, EVEN_N,
                              EVEN_K)
            up = tl.dot(ws, xs, up, input_precision=PRECISION)
    if bias is not None:
        add = tl.load(bias + expert.to(tl.int64) * (PER * N) + own, mask=(own < PER * N) & (expert < E), other=0.0)
        acc += add.to(tl.float32)[:, None]
    if FIRST:
        acc, up = add_expert_adapters(acc, up, held, counter, pairs, inside, expert, first * PER, out, S, PER * N, E, lora,
                                      BLOCK_M, PER * BLOCK_N, GATE == "halves", LORA)
    elif lora is not None:
        acc, up = add_expanded(acc, up, pairs, inside, expert, first * PER, PER * N, E, lora, PER * BLOCK_N, GATE == "halves",
                               LORA)
    if GATE == "halves":
        acc = _halves(acc, up, out)
    if GATE == "neighbours":
        both = tl.permute(tl.reshape(acc.to(out.dtype.element_ty), (BLOCK_N, 2, BLOCK_M)), (0, 2, 1))
        gate, up = tl.split(both)
        acc = _neighbours(gate, up, alpha, limit)
    tl.store(out + pairs.to(tl.int64)[None, :] * N + outputs[:, None], acc.to(out.dtype.element_ty),
             mask=(outputs < N)[:, None] & inside[None, :])


@triton.jit
def one_token_kernel(x, w, bias, ids, out, S, N, K, E, repeat, stride_x, stride_e, stride_n, stride_k, alpha, limit,
                     BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TRANSPOSED: tl.constexpr, GATE: tl.constexpr,
                     EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, PDL: tl.constexpr):
    """The pairs of one token. Program (n, s): block n of the outputs of pair s, as sums of products: a tile of the tensor cores
    would be empty but for one token, and small programs share a few experts' weights evenly among the multiprocessors."""
    PER: tl.constexpr = 2 if GATE == "neighbours" else 1
    wait_for_previous(PDL)
    pair = tl.program_id(1)
    expert = load_ids(ids, pair, S, E)
    row = x + (pair // repeat).to(tl.int64) * stride_x
    weight = w + expert.to(tl.int64) * stride_e
    first = tl.program_id(0) * BLOCK_N
    outputs = first + tl.arange(0, BLOCK_N)
    own = first * PER + tl.arange(0, PER * BLOCK_N)
    # Sums lie as the weight does.
    ALONG: tl.constexpr = 0 if TRANSPOSED else 1
    if TRANSPOSED:
        sums = tl.zeros((BLOCK_K, PER * BLOCK_N), tl.float32)
    else:
        sums = tl.zeros((PER * BLOCK_N, BLOCK_K), tl.float32)
    sums_up = sums
    for start in range(0, tl.where(expert < E, K, 0), BLOCK_K):
        cols = start + tl.arange(0, BLOCK_K)
        if EVEN_K:
            xs = tl.load(row + cols)
        else:
            xs = tl.load(row + cols, mask=cols < K, other=0.0)
        xs = tl.expand_dims(xs.to(tl.float32), 1 - ALONG)
        ws = _load_tile(weight, own, cols, stride_n, stride_k, PER * N, K, TRANSPOSED, EVEN_N, EVEN_K)
        sums += ws.to(tl.float32) * xs
        if GATE == "halves":
            ws = _load_tile(weight + N.to(tl.int64) * stride_n, outputs, cols, stride_n, stride_k, N, K, TRANSPOSED, EVEN_N,
                            EVEN_K)
            sums_up += ws.to(tl.float32) * xs
    let_next_start(PDL)
    y = tl.sum(sums, ALONG)
    if bias is not None:
        add = tl.load(bias + expert.to(tl.int64) * (PER * N) + own, mask=(own < PER * N) & (expert < E), other=0.0)
        y += add.to(tl.float32)
    if GATE == "halves":
        y = _halves(y, tl.sum(sums_up, ALONG), out)
    if GATE == "neighbours":
        gate, up = tl.split(tl.reshape(y.to(out.dtype.element_ty), (BLOCK_N, 2)))
        y = _neighbours(gate, up, alpha, limit)
    tl.store(out + pair.to(tl.int64) * N + outputs, y.to(out.dtype.element_ty), mask=outputs < N)


@triton.jit(do_not_specialize=["S"])  # else batch sizes would be separate kernels
def pairs_kernel(x, w, bias, ids, out, S, N, K, E, repeat, stride_x, stride_e, stride_n, stride_k, alpha, limit, lora,
                 BLOCK_S: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
                 BY_PAIR: tl.constexpr, TRANSPOSED: tl.constexpr, GATE: tl.constexpr, EVEN_N: tl.constexpr,
                 EVEN_K: tl.constexpr, PRECISION: tl.constexpr, LORA: tl.constexpr, PDL: tl.constexpr):
    """Few pairs, in any order. Program (n, l): block n of the outputs, for all pairs with the expert of leader l."""
    let_next_start(PDL)
    wait_for_previous(PDL)
    expert, count = count_of_leader(ids, tl.program_id(1), S, E, BLOCK_S, BY_PAIR)
    for first in range(0, count, BLOCK_M):
        pairs = pairs_of_expert(ids, expert, first, S, E, BLOCK_S, BLOCK_M)
        inside = first + tl.arange(0, BLOCK_M) < count
        _multiply_rows(x, w, bias, out, pairs, inside, expert, tl.program_id(0) * BLOCK_N, N, K, E, repeat, stride_x, stride_e,
                       stride_n, stride_k, alpha, limit, S, lora, None, BLOCK_M, BLOCK_N, BLOCK_K, TRANSPOSED, GATE, EVEN_N,
                       EVEN_K, PRECISION, LORA)


@triton.jit(do_not_specialize=["S"])
def order_kernel(ids, order, ends, S, E, BLOCK_S: tl.constexpr, PDL: tl.constexpr):
    """Sort the pairs by expert. Program e (0 .. E) writes the pairs of expert e to ``order`` (S,), after those of lower
    experts, and their end to ``ends`` (E,). Each program reads all ids twice: to count, and to write."""
    let_next_start(PDL)
    wait_for_previous(PDL)
    expert = tl.program_id(0)
    lanes = tl.arange(0, BLOCK_S)
    fewer = tl.zeros((BLOCK_S,), tl.int32)
    equal = tl.zeros((BLOCK_S,), tl.int32)
    for start in range(0, S, BLOCK_S):
        found = load_ids(ids, start + lanes, S, E)
        fewer += ((found >= 0) & (found < expert)).to(tl.int32)
        equal += (found == expert).to(tl.int32)
    place = tl.sum(fewer, 0)
    end = place + tl.sum(equal, 0)
    if expert < E:
        tl.store(ends + expert, end)
    if place < end:
        for start in range(0, S, BLOCK_S):
            at = start + lanes
            mine = (load_ids(ids, at, S, E) == expert).to(tl.int32)
            tl.store(order + place + tl.cumsum(mine, 0) - 1, at.to(order.dtype.element_ty), mask=mine > 0)
            place += tl.sum(mine, 0)


@triton.jit(do_not_specialize=["S"])
def count_kernel(ids, counts, S, E, BLOCK_S: tl.constexpr, BLOCK_E: tl.constexpr, PDL: tl.constexpr):
    """Count pairs: program c those of each expert, and at E of none, among BLOCK_S pairs. counts: (programs, E + 1)."""
    let_next_start(PDL)
    wait_for_previous(PDL)
    chunk = tl.program_id(0)
    found = load_ids(ids, chunk * BLOCK_S + tl.arange(0, BLOCK_S), S, E)
    bins = tl.arange(0, BLOCK_E)
    number = tl.histogram(tl.where(found < 0, BLOCK_E - 1, found), BLOCK_E)  # BLOCK_E > E + 1: past the end in the last one
    tl.store(counts + chunk * (E + 1) + bins, number, mask=bins <= E)


@triton.jit(do_not_specialize=["S", "chunks"])
def place_kernel(ids, counts, order, ends, S, E, chunks, BLOCK_S: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_E: tl.constexpr,
                 PDL: tl.constexpr):
    """``order_kernel`` with the ``counts`` of ``count_kernel``: program (e, c) writes those of expert e in chunk c."""
    let_next_start(PDL)
    wait_for_previous(PDL)
    expert = tl.program_id(0)
    chunk = tl.program_id(1)
    rows = tl.arange(0, BLOCK_C)[:, None]
    bins = tl.arange(0, BLOCK_E)[None, :]
    number = tl.load(counts + rows * (E + 1) + bins, mask=(rows < chunks) & (bins <= expert), other=0)
    before = (bins < expert) | (rows < chunk)
    place = tl.sum(tl.sum(tl.where(before, number, 0), 1), 0)
    if chunk == 0 and expert < E:
        tl.store(ends + expert, tl.sum(tl.sum(number, 1), 0))
    at = chunk * BLOCK_S + tl.arange(0, BLOCK_S)
    mine = (load_ids(ids, at, S, E) == expert).to(tl.int32)
    tl.store(order + place + tl.cumsum(mine, 0) - 1, at.to(order.dtype.element_ty), mask=mine > 0)


@triton.jit(do_not_specialize=["S", "count"])
def tiles_kernel(ends, tiles, S, E, count, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_T: tl.constexpr,
                 PDL: tl.constexpr):
    """Cut the sorted pairs into tiles of one expert each: ``tiles`` (count, 4) gets each tile's expert, its first pair and the
    end of the expert's pairs; expert E + 1 for a tile past the last."""
    let_next_start(PDL)
    wait_for_previous(PDL)
    at = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    experts = tl.arange(0, BLOCK_E)  # the last one that has pairs is E, of the ids out of range
    end = tl.where(experts < E, tl.load(ends + experts, mask=experts < E, other=0).to(tl.int32), S)
    begin = tl.load(ends + experts - 1, mask=(experts > 0) & (experts <= E), other=0).to(tl.int32)
    begin = tl.where(experts <= E, begin, S)
    own = (end - begin + BLOCK_M - 1) // BLOCK_M
    up_to = tl.cumsum(own, 0)
    mine = (up_to[None, :] > at[:, None]) & (up_to[None, :] - own[None, :] <= at[:, None])
    found = tl.max(mine.to(tl.int32), 1) > 0
    expert = tl.sum(tl.where(mine, experts[None, :], 0), 1)
    first = tl.sum(tl.where(mine, (begin + (own - up_to) * BLOCK_M)[None, :], 0), 1) + at * BLOCK_M
    last = tl.sum(tl.where(mine, end[None, :], 0), 1)
    tl.store(tiles + at * 4, tl.where(found, expert, E + 1), mask=at < count)
    tl.store(tiles + at * 4 + 1, first, mask=at < count)
    tl.store(tiles + at * 4 + 2, last, mask=at < count)


@triton.jit(do_not_specialize=["S"])
def sorted_kernel(x, w, bias, order, tiles, out, S, N, K, E, repeat, stride_x, stride_e, stride_n, stride_k, alpha, limit, lora,
                  BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
                  TRANSPOSED: tl.constexpr, GATE: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr,
                  PRECISION: tl.constexpr, LORA: tl.constexpr, PDL: tl.constexpr):
    """Many pairs, sorted by expert. One program per tile of sorted pairs and block of outputs, blocks first, and with ``lora``
    before them those for first products (NOTE [First products of experts]); the grid has as many tiles as any distribution of
    the pairs among the experts can need, and surplus programs return.

    order: (S,) the pairs sorted by expert; tiles: of ``tiles_kernel``."""
    let_next_start(PDL)
    wait_for_previous(PDL)
    SHRINKING: tl.constexpr = LORA.programs if lora is not None else 0
    blocks = tl.cdiv(N, BLOCK_N) + SHRINKING
    tile = (tl.program_id(0) // blocks).to(tl.int32)
    block = tl.program_id(0) % blocks
    expert, pairs, inside = pairs_of_tile(order, tiles, tile, E, BLOCK_M)
    counter = lora.counter + tile if lora is not None else None
    if expert <= E:
        if SHRINKING and block < SHRINKING:
            shrink(block, x, lora, pairs, inside, expert, S, K, E, repeat, stride_x, BLOCK_M, BLOCK_K, LORA)
            count_shrunk(counter)
        else:
            _multiply_rows(x, w, bias, out, pairs, inside, expert, (block - SHRINKING) * BLOCK_N, N, K, E, repeat, stride_x,
                           stride_e, stride_n, stride_k, alpha, limit, S, lora, counter, BLOCK_M, BLOCK_N, BLOCK_K, TRANSPOSED,
                           GATE, EVEN_N, EVEN_K, PRECISION, LORA)
