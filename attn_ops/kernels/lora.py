"""Kernels of ``attn_ops/ops/lora.py``, ``lora_rows.py`` and ``lora_linear.py``."""

from __future__ import annotations

import triton
import triton.language as tl

from quire.attn_ops.kernels.pdl import let_next_start, wait_for_previous


@triton.jit
def expand_kernel(base, shrunk, b, residual, out, m, n, base_stride, shrunk_stride, residual_stride, sizes, base_starts,
                  shrunk_starts, scalings, RANK: tl.constexpr, SEGMENTS: tl.constexpr, BLOCK_M: tl.constexpr,
                  BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, PDL: tl.constexpr):
    """Program (tile of columns, tile of rows). The tiles of a segment come after those of the segment before; the last one may
    be partly empty. The tuples have a number for each segment."""
    tile = tl.program_id(0)
    first, row = 0, 0  # tile and row of b where the segment begins
    next_first, next_row = 0, 0
    size, base_at, shrunk_at, scaling = sizes[0], base_starts[0], shrunk_starts[0], scalings[0]
    for i in tl.static_range(1, SEGMENTS):
        next_first += tl.cdiv(sizes[i - 1], BLOCK_N)
        next_row += sizes[i - 1]
        later = tile >= next_first
        first = tl.where(later, next_first, first)
        row = tl.where(later, next_row, row)
        size = tl.where(later, sizes[i], size)
        base_at = tl.where(later, base_starts[i], base_at)
        shrunk_at = tl.where(later, shrunk_starts[i], shrunk_at)
        scaling = tl.where(later, scalings[i], scaling)
    columns = (tile - first) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    ranks = tl.arange(0, BLOCK_R)
    live = (rows < m)[:, None] & (columns < size)[None, :]
    factors = tl.load(b + (row + columns).to(tl.int64)[None, :] * RANK + ranks[:, None],
                      mask=(columns < size)[None, :] & (ranks < RANK)[:, None], other=0.0)
    wait_for_previous(PDL)
    x = tl.load(shrunk + rows.to(tl.int64)[:, None] * shrunk_stride + shrunk_at + ranks[None, :],
                mask=(rows < m)[:, None] & (ranks < RANK)[None, :], other=0.0)
    total = tl.load(base + rows.to(tl.int64)[:, None] * base_stride + base_at + columns[None, :], mask=live, other=0.0)
    total = total.to(tl.float32) + tl.dot(x, factors) * scaling
    if residual is not None:
        at = rows.to(tl.int64)[:, None] * residual_stride + (row + columns)[None, :]
        total += tl.load(residual + at, mask=live, other=0.0).to(tl.float32)
    let_next_start(PDL)
    tl.store(out + rows.to(tl.int64)[:, None] * n + (row + columns)[None, :], total.to(out.dtype.element_ty), mask=live)


@triton.jit
def rows_shrink_kernel(x, norm, rows, a, out, t, k, x_stride, ranks, places, ADAPTERS: tl.constexpr, SPLITS: tl.constexpr,
                       BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, PDL: tl.constexpr):
    """Program (adapter, part of k, tile of tokens): ``A x`` over its part of k, to ``out`` (ADAPTERS, SPLITS, t, BLOCK_R)
    float32. Nothing where no token of the tile has the adapter. The tuples have an entry for each adapter. ``places``: the
    number of its bit in ``rows``; 63: every token has it. ``rows`` is None if that is so of all. ``norm``: factors of the
    columns of x, or None. BLOCK_T is 1 for one token, which needs no tensor cores."""
    split, tokens = tl.program_id(1), tl.program_id(2) * BLOCK_T + tl.arange(0, BLOCK_T)
    wait_for_previous(PDL)
    let_next_start(PDL)
    mine = tl.zeros((BLOCK_T,), tl.int64)
    if rows is not None:
        mine = tl.load(rows + tokens, mask=tokens < t, other=0)
    r = tl.arange(0, BLOCK_R)
    for i in tl.static_range(ADAPTERS):
        if tl.program_id(0) == i:
            on = tl.where(places[i] == 63, 1, (mine >> places[i]) & 1)
            if tl.max(on.to(tl.int32), axis=0) > 0:
                if BLOCK_T == 1:
                    products = tl.zeros((BLOCK_R, BLOCK_K), tl.float32)
                    for start in range(split * BLOCK_K, k, SPLITS * BLOCK_K):
                        at = start + tl.arange(0, BLOCK_K)
                        factors = tl.load(a[i] + r.to(tl.int64)[:, None] * k + at[None, :],
                                          mask=(r < ranks[i])[:, None] & (at < k)[None, :], other=0.0)
                        row = tl.load(x + at, mask=at < k, other=0.0).to(tl.float32)
                        if norm is not None:
                            row *= tl.load(norm + at, mask=at < k, other=0.0).to(tl.float32)
                        products += factors.to(tl.float32) * row[None, :]
                    tl.store(out + (i * SPLITS + split) * BLOCK_R + r, tl.sum(products, 1))
                else:
                    total = tl.zeros((BLOCK_T, BLOCK_R), tl.float32)
                    for start in range(split * BLOCK_K, k, SPLITS * BLOCK_K):
                        at = start + tl.arange(0, BLOCK_K)
                        tile = tl.load(x + tokens.to(tl.int64)[:, None] * x_stride + at[None, :],
                                       mask=(tokens < t)[:, None] & (at < k)[None, :], other=0.0)
                        if norm is not None:
                            scale = tl.load(norm + at, mask=at < k, other=0.0).to(tl.float32)
                            tile = (tile.to(tl.float32) * scale[None, :]).to(tile.dtype)
                        factors = tl.load(a[i] + r.to(tl.int64)[None, :] * k + at[:, None],
                                          mask=(r < ranks[i])[None, :] & (at < k)[:, None], other=0.0)
                        total = dot_float32(tile, factors, total)
                    place = ((i * SPLITS + split) * t + tokens).to(tl.int64)[:, None] * BLOCK_R + r[None, :]
                    tl.store(out + place, total, mask=(tokens < t)[:, None])


@triton.jit
def rows_expand_kernel(bases, rows, b, shrunk, out, t, n, sizes, strides, layers, ranks, places, scalings,
                       LAYERS: tl.constexpr, ADAPTERS: tl.constexpr, SPLITS: tl.constexpr, BLOCK_T: tl.constexpr,
                       BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_Q: tl.constexpr, STEP: tl.constexpr,
                       PDL: tl.constexpr):
    """Program (tile of columns, tile of tokens): base + B (A x) * scaling of each token's adapters, to its layer's columns of
    ``out`` (t, n). The tiles of a layer come after those of the layer before; its last one may be partly empty. ``bases``,
    ``sizes`` and ``strides`` have an entry for each layer, the other tuples for each adapter, whose layer is in ``layers``.
    ``shrunk``, ``rows``, ``places``: as of ``rows_shrink_kernel``, with the same tiles of tokens. BLOCK_Q ranks and STEP parts
    at a time: all of them do not fit the registers."""
    tile = tl.program_id(0)
    layer, first, column = 0, 0, 0  # the tile's layer, and that layer's first tile and column
    next_first, next_column = 0, 0
    size = sizes[0]
    for i in tl.static_range(1, LAYERS):
        next_first += tl.cdiv(sizes[i - 1], BLOCK_N)
        next_column += sizes[i - 1]
        later = tile >= next_first
        layer = tl.where(later, i, layer)
        first = tl.where(later, next_first, first)
        column = tl.where(later, next_column, column)
        size = tl.where(later, sizes[i], size)
    columns, tokens = (tile - first) * BLOCK_N + tl.arange(0, BLOCK_N), tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    live = (tokens < t)[:, None] & (columns < size)[None, :]
    wait_for_previous(PDL)
    mine = tl.zeros((BLOCK_T,), tl.int64)
    if rows is not None:
        mine = tl.load(rows + tokens, mask=tokens < t, other=0)
    total = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
    for i in tl.static_range(LAYERS):
        if layer == i:
            total = tl.load(bases[i] + tokens.to(tl.int64)[:, None] * strides[i] + columns[None, :], mask=live,
                            other=0.0).to(tl.float32)
    for i in tl.static_range(ADAPTERS):
        on = tl.where(places[i] == 63, 1, (mine >> places[i]) & 1)
        if layers[i] == layer:
            if tl.max(on.to(tl.int32), axis=0) > 0:
                more = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
                for part in range(0, BLOCK_R, BLOCK_Q):
                    r = part + tl.arange(0, BLOCK_Q)
                    low = tl.zeros((BLOCK_T, BLOCK_Q), tl.float32)
                    for split in range(0, SPLITS, STEP):
                        parts = split + tl.arange(0, STEP)
                        place = ((i * SPLITS + parts[:, None]) * t + tokens[None, :]).to(tl.int64)[:, :, None] * BLOCK_R
                        there = (parts < SPLITS)[:, None] & (tokens < t)[None, :]
                        low += tl.sum(tl.load(shrunk + place + r[None, None, :], mask=there[:, :, None], other=0.0), 0)
                    factors = tl.load(b[i] + columns.to(tl.int64)[None, :] * ranks[i] + r[:, None],
                                      mask=(columns < size)[None, :] & (r < ranks[i])[:, None], other=0.0)
                    more = tl.dot(low.to(factors.dtype), factors, more, input_precision="tf32x3")
                more *= scalings[i]
                total = tl.where((on != 0)[:, None], total + more, total)
    let_next_start(PDL)
    tl.store(out + tokens.to(tl.int64)[:, None] * n + (column + columns)[None, :], total.to(out.dtype.element_ty), mask=live)


@triton.jit
def expand_one(rows, lora, BLOCK_N: tl.constexpr, ADAPTERS: tl.constexpr, PARTS: tl.constexpr, BLOCK_R: tl.constexpr):
    """(BLOCK_N,) float32: ``B (A x) * scaling`` of one token, for the weight's ``rows``. ``lora``: host.Adapters, whose
    ``shrunk`` has PARTS parts of BLOCK_R ranks.

    A sum over threads is expensive in a small program: so there is one, and parts are not added up before they are multiplied.
    Loads do not wait for each other: an adapter that the token does not have is read too, and left out."""
    LANES: tl.constexpr = 128
    acc = tl.zeros((BLOCK_N, LANES), tl.float32)
    mine = tl.load(lora.rows)
    for i in tl.static_range(ADAPTERS):
        on = tl.where(lora.places[i] == 63, 1, (mine >> lora.places[i]) & 1)
        at = rows - lora.starts[i]
        inside = (at >= 0) & (at < lora.sizes[i])
        for start in tl.static_range(0, PARTS * BLOCK_R, LANES):
            place = start + tl.arange(0, LANES)
            r = place % BLOCK_R
            live = inside[:, None] & ((place < PARTS * BLOCK_R) & (r < lora.ranks[i]))[None, :]
            low = tl.load(lora.shrunk + i * PARTS * BLOCK_R + place[None, :], mask=live, other=0.0) * lora.scalings[i]
            factors = tl.load(lora.b[i] + at.to(tl.int64)[:, None] * lora.ranks[i] + r[None, :], mask=live, other=0.0)
            acc = tl.where(on != 0, acc + factors.to(tl.float32) * low, acc)
    return tl.sum(acc, 1)


@triton.jit
def dot_float32(x, y, acc):
    """``acc + x @ y``, as exact as products in float32 are: a float32 factor of one in bf16 is a sum of three in bf16; else
    each factor is a sum of two in TF32."""
    if x.dtype == tl.bfloat16 and y.dtype == tl.float32:
        high = y.to(tl.bfloat16)
        rest = y - high.to(tl.float32)
        middle = rest.to(tl.bfloat16)
        acc = tl.dot(x, high, acc)
        acc = tl.dot(x, middle, acc)
        return tl.dot(x, (rest - middle.to(tl.float32)).to(tl.bfloat16), acc)
    return tl.dot(x.to(y.dtype), y, acc, input_precision="tf32x3")


@triton.jit
def expand_tile(acc, rows, first, tokens, t, lora, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr, ADAPTERS: tl.constexpr,
                PARTS: tl.constexpr, BLOCK_R: tl.constexpr):
    """``acc`` (BLOCK_N, BLOCK_T) float32 with what ``expand_one`` computes added, of the ``tokens`` below ``t``; ``first``: of
    the rows. Adapters that none of the tokens has are not read."""
    mine = tl.load(lora.rows + tokens, mask=tokens < t, other=0)
    for i in tl.static_range(ADAPTERS):
        on = tl.where(lora.places[i] == 63, 1, (mine >> lora.places[i]) & 1)
        if (first < lora.starts[i] + lora.sizes[i]) & (first + BLOCK_N > lora.starts[i]):
            if tl.max(on.to(tl.int32), axis=0) > 0:
                at = rows - lora.starts[i]
                inside = (at >= 0) & (at < lora.sizes[i])
                more = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
                for start in range(0, BLOCK_R, 16):  # all ranks at once do not fit the registers
                    r = start + tl.arange(0, 16)
                    low = tl.zeros((16, BLOCK_T), tl.float32)
                    for part in tl.static_range(PARTS):
                        place = ((i * PARTS + part) * t + tokens).to(tl.int64)[None, :] * BLOCK_R + r[:, None]
                        low += tl.load(lora.shrunk + place, mask=(tokens < t)[None, :], other=0.0)
                    factors = tl.load(lora.b[i] + at.to(tl.int64)[:, None] * lora.ranks[i] + r[None, :],
                                      mask=inside[:, None] & (r < lora.ranks[i])[None, :], other=0.0)
                    more = tl.dot(factors, low.to(factors.dtype), more, input_precision="tf32x3")
                acc = tl.where(inside[:, None] & (on != 0)[None, :], acc + more * lora.scalings[i], acc)
    return acc
