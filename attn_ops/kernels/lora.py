"""Kernels of ``attn_ops/ops/lora_rows.py`` and ``lora_linear.py``.

NOTE [First products in the same launch]: in a layer of one launch (``small_linear``'s ``tile_kernel``) the first programs
compute ``A x``, and count when it is stored; the others compute ``W x``, wait for the count, and add ``B (A x)``. That ends
because GPUs start the programs of a launch in the order of their numbers: those that are waited for run or have ended, and wait
for nobody. CUDA does not promise that order; stream-K products and scans by look-back rely on it, too. First products take a
fraction of the others' time, so that hardly anyone waits. Each launch has a counter of its own, which its forward has zeroed
(``lora_counters``). One token has too short programs for that: a second launch adds its ``B (A x)``. ``rows_kernel`` and
``finish_kernel`` do the same for several tokens beside products of other libraries. Of long prompts, where a launch costs
little, first products have one of their own.
With LORA.reduce the last program that has a part of a sum, which a counter for each sum says, adds up all parts in their order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quire.attn_ops.kernels.counters import wait_for_count
from quire.attn_ops.kernels.pdl import let_next_start, wait_for_previous
from quire.attn_ops.kernels.wgmma import wait_for_products


@triton.jit
def rows_shrink_kernel(x, lora, t, k, x_stride, LORA: tl.constexpr, PDL: tl.constexpr):
    """A program of ``first_products``. ``lora``: host.Adapters."""
    wait_for_previous(PDL)
    let_next_start(PDL)
    first_products(tl.program_id(0), x, None, lora, t, k, x_stride, LORA)
    if LORA.reduce:
        count_first_products(tl.program_id(0), lora, t, LORA)


@triton.jit(do_not_specialize=["t"])  # else prompts of other lengths would be other kernels
def rows_shrink_all_kernel(x, lora, t, k, x_stride, LORA: tl.constexpr, RANKS: tl.constexpr, BLOCK_K: tl.constexpr,
                           PDL: tl.constexpr):
    """Program (part of k, tile of tokens): as ``first_products``, for all adapters, whose ranks are side by side (RANKS: how
    many, padded), so that x is read once. For adapters of one dtype and many tokens."""
    ADAPTERS: tl.constexpr = LORA.adapters
    BLOCK_T: tl.constexpr = LORA.first_t
    wait_for_previous(PDL)
    let_next_start(PDL)
    part, tokens = tl.program_id(0), tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    ranks = tl.arange(0, RANKS)
    i, r = ranks // LORA.block_r, ranks % LORA.block_r
    mine, place = bits_of(tokens, t, lora, LORA.every), _pick(lora.places, i, ADAPTERS)
    on = (place == 63)[:, None] | (((mine[None, :] >> place[:, None]) & 1) == 1)
    live = (i < ADAPTERS) & (r < _pick(lora.ranks, i, ADAPTERS)) & (tl.max(on.to(tl.int32), axis=1) > 0)
    a = _pick(lora.a, i, ADAPTERS) + r.to(tl.int64) * k
    total = tl.zeros((RANKS, BLOCK_T), tl.float32)
    for start in tl.range(part * BLOCK_K, k, LORA.parts * BLOCK_K, num_stages=LORA.stages):
        at = start + tl.arange(0, BLOCK_K)
        tile = tl.load(x + tokens.to(tl.int64)[None, :] * x_stride + at[:, None],
                       mask=(tokens < t)[None, :] & (at < k)[:, None], other=0.0)
        factors = tl.load(a[:, None] + at[None, :], mask=live[:, None] & (at < k)[None, :], other=0.0)
        if tile.dtype == tl.bfloat16 and factors.dtype == tl.float32:  # as in dot_float32
            high, middle, low = _in_three(factors)
            total = tl.dot(low, tile, tl.dot(middle, tile, tl.dot(high, tile, total)))
        else:
            total = tl.dot(factors, tile.to(factors.dtype), total, input_precision="tf32x3")
        wait_for_products()
    at_token = ((i * LORA.parts + part)[:, None] * t + tokens[None, :]).to(tl.int64) * LORA.block_r + r[:, None]
    mask = (i < ADAPTERS)[:, None] & (tokens < t)[None, :]
    tl.store(lora.shrunk + at_token, total, mask=mask)
    if LORA.reduce:
        tl.debug_barrier()
        if tl.atomic_add(lora.counter + 1 + tl.program_id(1), 1, sem="acq_rel", scope="gpu") == LORA.parts - 1:
            _add_parts(lora.shrunk + (at_token - part * t * LORA.block_r), t * LORA.block_r, mask, LORA)


@triton.jit
def first_products(program, x, norm, lora, t, k, x_stride, LORA: tl.constexpr):
    """``A (x * norm)`` of LORA.ranks ranks of one adapter, over one of LORA.parts parts of k, for LORA.first_t tokens, to
    ``lora.shrunk`` (adapters, parts, t, block_r); nothing where no token has the adapter. ``program``: the number of the ranks,
    those of an adapter after those of the one before; then that of the part; then that of the tokens. ``norm``: factors of the
    columns of x, or None. LORA: host.AdapterTiles."""
    ADAPTERS: tl.constexpr = LORA.adapters
    PARTS: tl.constexpr = LORA.parts
    BLOCK_T: tl.constexpr = LORA.first_t
    BLOCK_R: tl.constexpr = LORA.block_r
    RANKS: tl.constexpr = LORA.ranks
    SLICES: tl.constexpr = LORA.slices
    STAGES: tl.constexpr = LORA.stages
    PER: tl.constexpr = BLOCK_R // RANKS
    rest = program // (ADAPTERS * PER)
    part, tokens = rest % PARTS, rest // PARTS * BLOCK_T + tl.arange(0, BLOCK_T)
    mine = bits_of(tokens, t, lora, LORA.every)
    r = program % PER * RANKS + tl.arange(0, RANKS)
    i = program // PER % ADAPTERS
    if LORA.one_loop:
        _shrink(i, _pick(lora.a, i, ADAPTERS), _pick(lora.ranks, i, ADAPTERS), _pick(lora.places, i, ADAPTERS), mine, r, part,
                tokens, x, norm, lora, t, k, x_stride, PARTS, BLOCK_T, BLOCK_R, RANKS, SLICES, STAGES)
    else:
        for n in tl.static_range(ADAPTERS):
            if i == n:
                _shrink(n, lora.a[n], lora.ranks[n], lora.places[n], mine, r, part, tokens, x, norm, lora, t, k, x_stride,
                        PARTS, BLOCK_T, BLOCK_R, RANKS, SLICES, STAGES)


@triton.jit
def _shrink(i, a, rank, place, mine, r, part, tokens, x, norm, lora, t, k, x_stride, PARTS: tl.constexpr,
            BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr, RANKS: tl.constexpr, SLICES: tl.constexpr, STAGES: tl.constexpr):
    """``first_products`` of adapter ``i`` and the ranks ``r``. BLOCK_T is 1 for one token, which needs no tensor cores. For
    several, each of SLICES warps has 32 columns per iteration; STAGES iterations are loaded ahead, since memory is busy with
    the weight."""
    on = (place == 63) | (((mine >> place) & 1) == 1)
    if tl.max(on.to(tl.int32), axis=0) > 0:
        if BLOCK_T == 1:
            WIDE: tl.constexpr = 1024 if RANKS <= 8 else 8192 // RANKS
            products = tl.zeros((RANKS, WIDE), tl.float32)
            for start in range(part * WIDE, k, PARTS * WIDE):
                at = start + tl.arange(0, WIDE)
                factors = tl.load(a + r.to(tl.int64)[:, None] * k + at[None, :], mask=(r < rank)[:, None] & (at < k)[None, :],
                                  other=0.0)
                row = tl.load(x + at, mask=at < k, other=0.0).to(tl.float32)
                if norm is not None:
                    row *= tl.load(norm + at, mask=at < k, other=0.0).to(tl.float32)
                products += factors.to(tl.float32) * row[None, :]
            tl.store(lora.shrunk + (i * PARTS + part) * BLOCK_R + r, tl.sum(products, 1))
        else:
            total = tl.zeros((SLICES, BLOCK_T, RANKS), tl.float32)
            live = (tokens < t)[None, :, None]
            for start in tl.range(part * SLICES * 32, k, PARTS * SLICES * 32, num_stages=STAGES):
                at = start + tl.arange(0, SLICES)[:, None] * 32 + tl.arange(0, 32)[None, :]
                tile = tl.load(x + tokens.to(tl.int64)[None, :, None] * x_stride + at[:, None, :],
                               mask=live & (at < k)[:, None, :], other=0.0)
                if norm is not None:
                    scale = tl.load(norm + at, mask=at < k, other=0.0).to(tl.float32)
                    tile = (tile.to(tl.float32) * scale[:, None, :]).to(tile.dtype)
                factors = tl.load(a + r.to(tl.int64)[None, None, :] * k + at[:, :, None],
                                  mask=(r < rank)[None, None, :] & (at < k)[:, :, None], other=0.0)
                total = dot_float32(tile, factors, total)
            at_token = ((i * PARTS + part) * t + tokens).to(tl.int64)[:, None] * BLOCK_R + r[None, :]
            tl.store(lora.shrunk + at_token, tl.sum(total, 0), mask=(tokens < t)[:, None])


@triton.jit
def rows_kernel(x, bases, lora, out, t, k, n, first, tiles, x_stride, sizes, strides, LAYERS: tl.constexpr, LORA: tl.constexpr,
                BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, FIRST: tl.constexpr, PDL: tl.constexpr):
    """With FIRST the ``first`` programs have ``first_products``: see NOTE [First products in the same launch]. The others:
    ``_rows_expand``, ``tiles`` tiles of columns for each tile of BLOCK_T tokens."""
    program = tl.program_id(0)
    if FIRST:
        if program < first:
            wait_for_previous(PDL)
            let_next_start(PDL)
            first_products(program, x, None, lora, t, k, x_stride, LORA)
            count_first_products(program, lora, t, LORA)
        else:
            _rows_expand((program - first) % tiles, (program - first) // tiles, first, bases, lora, out, t, n, sizes, strides,
                         LAYERS, LORA, BLOCK_T, BLOCK_N, PDL)
    else:
        _rows_expand(program % tiles, program // tiles, 0, bases, lora, out, t, n, sizes, strides, LAYERS, LORA, BLOCK_T,
                     BLOCK_N, PDL)


@triton.jit
def _rows_expand(tile, token_tile, wait_for, bases, lora, out, t, n, sizes, strides, LAYERS: tl.constexpr, LORA: tl.constexpr,
                 BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr):
    """base + B (A x) * scaling of each token's adapters, to its layer's columns of ``out`` (t, n). The tiles of a layer come
    after those of the layer before; its last one may be partly empty. ``bases``, ``sizes`` and ``strides`` have an entry for
    each layer; the adapters' ``starts`` are columns of ``out``. ``wait_for``: the number of first products' programs."""
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
    start, tokens = (tile - first) * BLOCK_N, token_tile * BLOCK_T + tl.arange(0, BLOCK_T)
    columns = start + tl.arange(0, BLOCK_N)
    live = (columns < size)[:, None] & (tokens < t)[None, :]
    mine = bits_of(tokens, t, lora, LORA.every)
    held = factors_of(mine, column + start, column + size, lora, 0, 0, LORA.held, LORA, BLOCK_N)
    wait_for_previous(PDL)
    total = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
    for i in tl.static_range(LAYERS):
        if layer == i:
            total = tl.load(bases[i] + tokens.to(tl.int64)[None, :] * strides[i] + columns[:, None], mask=live,
                            other=0.0).to(tl.float32)
    ones = tl.full((BLOCK_T,), 1.0, tl.float32)
    if wait_for > 0:
        wait_for_first_products(lora, wait_for, LORA)
    lows = lows_of(mine, ones, column + start, tokens, t, lora, 0, 0, LORA.held, LORA, BLOCK_T, BLOCK_N)
    total = expand(total, mine, ones, held, lows, column + start, column + size, tokens, t, lora, LORA, BLOCK_T, BLOCK_N)
    let_next_start(PDL)
    tl.store(out + tokens.to(tl.int64)[None, :] * n + (column + columns)[:, None], total.to(out.dtype.element_ty), mask=live)


@triton.jit
def bits_of(tokens, t, lora, EVERY: tl.constexpr):
    """The adapters of each of the tokens, as bits. Loaded once, and well before they are needed if that is possible: masks of
    other loads wait for them. EVERY: each token has all of them, and nothing is loaded."""
    if EVERY:
        return tl.full(tokens.shape, -1, tl.int64)
    else:
        return tl.load(lora.rows + tokens, mask=tokens < t, other=0)


@triton.jit
def adapter_factors(mine, start, n, lora, SWIGLU: tl.constexpr, LORA: tl.constexpr, BLOCK_N: tl.constexpr):
    """``factors_of`` the first adapters, for the columns of a layer from ``start``, and with SWIGLU for those n further on."""
    held = factors_of(mine, start, n, lora, 0, 0, LORA.held, LORA, BLOCK_N)
    held_up = held
    if SWIGLU:
        held_up = factors_of(mine, n + start, 2 * n, lora, 0, 0, LORA.held, LORA, BLOCK_N)
    return held, held_up


@triton.jit
def add_adapters(y, up, mine, factor, held, held_up, start, n, tokens, t, lora, SWIGLU: tl.constexpr, LORA: tl.constexpr,
                 BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr):
    """``y`` (BLOCK_N, BLOCK_T) float32 of the columns from ``start``, and with SWIGLU ``up`` of those n further on, plus the
    adapters' parts. ``factor``: of each token, which ``lora.shrunk`` lacks. ``held``, ``held_up``: ``adapter_factors``."""
    lows = lows_of(mine, factor, start, tokens, t, lora, 0, 0, LORA.held, LORA, BLOCK_T, BLOCK_N)
    if SWIGLU:
        lows_up = lows_of(mine, factor, n + start, tokens, t, lora, 0, 0, LORA.held, LORA, BLOCK_T, BLOCK_N)
    y = expand(y, mine, factor, held, lows, start, n, tokens, t, lora, LORA, BLOCK_T, BLOCK_N)
    if SWIGLU:
        up = expand(up, mine, factor, held_up, lows_up, n + start, 2 * n, tokens, t, lora, LORA, BLOCK_T, BLOCK_N)
    return y, up


@triton.jit
def count_first_products(program, lora, t, LORA: tl.constexpr):
    """``program`` of first products has stored them. See NOTE [First products in the same launch]."""
    tl.debug_barrier()
    if LORA.reduce:
        RANKS: tl.constexpr = LORA.ranks
        BLOCK_T: tl.constexpr = LORA.first_t
        ACROSS: tl.constexpr = LORA.adapters * (LORA.block_r // RANKS)
        across, tile = program % ACROSS, program // (ACROSS * LORA.parts)
        if tl.atomic_add(lora.counter + 1 + tile * ACROSS + across, 1, sem="acq_rel", scope="gpu") == LORA.parts - 1:
            tokens = tile * BLOCK_T + tl.arange(0, BLOCK_T)
            per = LORA.block_r // RANKS  # programs of an adapter
            at = (across // per * LORA.parts * t + tokens).to(tl.int64)[:, None] * LORA.block_r
            at += across % per * RANKS + tl.arange(0, RANKS)[None, :]
            _add_parts(lora.shrunk + at, t * LORA.block_r, (tokens < t)[:, None], LORA)
            tl.debug_barrier()
            tl.atomic_add(lora.counter, 1, sem="release", scope="gpu")
    else:
        tl.atomic_add(lora.counter, 1, sem="release", scope="gpu")


@triton.jit
def _add_parts(first, apart, mask, LORA: tl.constexpr):
    """Put the sum of the parts, ``apart`` numbers from each other, in the place of the ``first``."""
    total = tl.load(first, mask=mask, other=0.0, cache_modifier=".cg")
    for part in range(1, LORA.parts):
        total += tl.load(first + part * apart, mask=mask, other=0.0, cache_modifier=".cg")
    tl.store(first, total, mask=mask)


@triton.jit
def wait_for_first_products(lora, programs, LORA: tl.constexpr):
    """Until all ``programs`` have stored theirs, and added up."""
    wait_for_count(lora.counter, programs // LORA.parts if LORA.reduce else programs)


@triton.jit(do_not_specialize=["t", "first"])
def finish_kernel(x, base, lora, res, out, t, k, n, first, tiles, x_stride, base_stride, res_stride, LORA: tl.constexpr,
                  BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, SWIGLU: tl.constexpr, NORM: tl.constexpr, FIRST: tl.constexpr,
                  PDL: tl.constexpr):
    """A layer's product with its adapters, as ``rows_kernel`` for one layer; then SwiGLU and the residual ``res``, to ``out``
    (t, n). ``base``: (t, n), or (t, 2 n) with SWIGLU. NORM: ``A x`` lacks the norm's factor, ``lora.rms``."""
    program = tl.program_id(0)
    if FIRST:
        if program < first:
            wait_for_previous(PDL)
            let_next_start(PDL)
            first_products(program, x, None, lora, t, k, x_stride, LORA)
            count_first_products(program, lora, t, LORA)
        else:
            _finish((program - first) % tiles, (program - first) // tiles, first, base, lora, res, out, t, n, base_stride,
                    res_stride, LORA, BLOCK_T, BLOCK_N, SWIGLU, NORM, PDL)
    else:
        _finish(program % tiles, program // tiles, 0, base, lora, res, out, t, n, base_stride, res_stride, LORA, BLOCK_T,
                BLOCK_N, SWIGLU, NORM, PDL)


@triton.jit
def _finish(tile, token_tile, wait_for, base, lora, res, out, t, n, base_stride, res_stride, LORA: tl.constexpr,
            BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, SWIGLU: tl.constexpr, NORM: tl.constexpr, PDL: tl.constexpr):
    start, tokens = tile * BLOCK_N, token_tile * BLOCK_T + tl.arange(0, BLOCK_T)
    columns = start + tl.arange(0, BLOCK_N)
    live, rows = (columns < n)[:, None] & (tokens < t)[None, :], tokens.to(tl.int64)[None, :]
    mine = bits_of(tokens, t, lora, LORA.every)
    held, held_up = adapter_factors(mine, start, n, lora, SWIGLU, LORA, BLOCK_N)
    wait_for_previous(PDL)
    y = tl.load(base + rows * base_stride + columns[:, None], mask=live, other=0.0).to(tl.float32)
    up = y
    if SWIGLU:
        up = tl.load(base + rows * base_stride + n + columns[:, None], mask=live, other=0.0).to(tl.float32)
    factor = tl.load(lora.rms + tokens) if NORM else tl.full((BLOCK_T,), 1.0, tl.float32)
    if wait_for > 0:
        wait_for_first_products(lora, wait_for, LORA)
    y, up = add_adapters(y, up, mine, factor, held, held_up, start, n, tokens, t, lora, SWIGLU, LORA, BLOCK_T, BLOCK_N)
    if SWIGLU:
        y = y * tl.sigmoid(y) * up
    let_next_start(PDL)
    if res is not None:
        y += tl.load(res + rows * res_stride + columns[:, None], mask=live, other=0.0).to(tl.float32)
    tl.store(out + rows * n + columns[:, None], y.to(out.dtype.element_ty), mask=live)


@triton.jit
def _pick(values, i, N: tl.constexpr):
    found = values[0]
    for n in tl.static_range(1, N):
        found = tl.where(i == n, values[n], found)
    return found


@triton.jit
def _adapter(j: tl.constexpr, start, mine, lora, LORA: tl.constexpr, BLOCK_N: tl.constexpr):
    """The j-th of at most LORA.per adapters that add to the columns from ``start`` on: its number, b, first column, columns,
    rank and scaling; which of the tokens, whose bits ``mine`` are, have it; and whether one of them does."""
    ADAPTERS: tl.constexpr = LORA.adapters
    if LORA.per == ADAPTERS:
        i, there = j, True
        b, first, size, rank, scaling = lora.b[j], lora.starts[j], lora.sizes[j], lora.ranks[j], lora.scalings[j]
        place = lora.places[j]
    else:  # what the others have costs no instructions
        before = 0
        for n in tl.static_range(ADAPTERS):
            before += (lora.starts[n] + lora.sizes[n] <= start).to(tl.int32)
        i, there = tl.minimum(before + j, ADAPTERS - 1), before + j < ADAPTERS
        b, first, size = _pick(lora.b, i, ADAPTERS), _pick(lora.starts, i, ADAPTERS), _pick(lora.sizes, i, ADAPTERS)
        rank, scaling = _pick(lora.ranks, i, ADAPTERS), _pick(lora.scalings, i, ADAPTERS)
        place = _pick(lora.places, i, ADAPTERS)
    has = (place == 63) | (((mine >> place) & 1) == 1)
    needed = there & (start < first + size) & (start + BLOCK_N > first) & (tl.max(has.to(tl.int32), axis=0) > 0)
    return i, b, first, size, rank, scaling, has, needed


@triton.jit
def factors_of(mine, start, end, lora, ranks_from, FROM: tl.constexpr, TO: tl.constexpr, LORA: tl.constexpr,
               BLOCK_N: tl.constexpr):
    """Of the adapters FROM to TO (of LORA.per: ``_adapter``) the ranks ranks_from .. ranks_from + LORA.block_q of B for the
    columns from ``start`` to ``end``, (BLOCK_N, block_q); zeros where no token needs them. May be called before
    ``wait_for_previous``: see NOTE [Reads before the wait] in attn_ops/kernels/pdl.py."""
    BLOCK_Q: tl.constexpr = LORA.block_q
    columns, r = start + tl.arange(0, BLOCK_N), ranks_from + tl.arange(0, BLOCK_Q)
    held = ()
    for j in tl.static_range(FROM, TO):
        _, b, first, size, rank, _, _, needed = _adapter(j, start, mine, lora, LORA, BLOCK_N)
        at = columns - first
        inside = (at >= 0) & (at < size) & (columns < end) & needed
        tile = tl.load(b + at.to(tl.int64)[:, None] * rank + r[None, :], mask=inside[:, None] & (r < rank)[None, :], other=0.0)
        held = held + (tile,)  # type: ignore[assignment]  # Triton's tuples grow
    return held


@triton.jit
def lows_of(mine, factor, start, tokens, t, lora, ranks_from, FROM: tl.constexpr, TO: tl.constexpr, LORA: tl.constexpr,
            BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr):
    """``A x * scaling * factor`` of the adapters FROM to TO (of LORA.per: ``_adapter``) for the columns from ``start``, as far
    as they are needed there: of the ranks ranks_from .. ranks_from + LORA.block_q, (block_q, BLOCK_T) float32 of each. Without
    the scaling for adapters in float16, which might not hold it. ``factor``: of each token."""
    READ: tl.constexpr = 1 if LORA.reduce else LORA.parts
    BLOCK_Q: tl.constexpr = LORA.block_q
    lows = ()
    for j in tl.static_range(FROM, TO):
        i, b, _, _, _, scaling, has, needed = _adapter(j, start, mine, lora, LORA, BLOCK_N)
        low = tl.zeros((BLOCK_Q, BLOCK_T), tl.float32)
        mask = (tokens < t) & has & needed
        if LORA.per <= 2:
            for part in tl.static_range(READ):
                low += _low_of(i * LORA.parts + part, mask, tokens, t, lora, ranks_from, LORA.block_r, BLOCK_Q)
        else:  # code for each part of many adapters takes long to compile
            for part in range(READ):
                low += _low_of(i * LORA.parts + part, mask, tokens, t, lora, ranks_from, LORA.block_r, BLOCK_Q)
        if b.dtype.element_ty != tl.float16:
            low *= scaling
        lows = lows + (low * factor[None, :],)  # type: ignore[assignment]
    return lows


@triton.jit
def _low_of(part, mask, tokens, t, lora, ranks_from, BLOCK_R: tl.constexpr, BLOCK_Q: tl.constexpr):
    """A part, counted over all adapters, of first products as they are stored: (BLOCK_Q, tokens)."""
    place = (part * t + tokens).to(tl.int64)[None, :] * BLOCK_R + ranks_from
    return tl.load(lora.shrunk + place + tl.arange(0, BLOCK_Q)[:, None], mask=mask[None, :], other=0.0, cache_modifier=".cg")


@triton.jit
def expand(total, mine, factor, held, lows, start, end, tokens, t, lora, LORA: tl.constexpr, BLOCK_T: tl.constexpr,
           BLOCK_N: tl.constexpr):
    """``total`` (BLOCK_N, BLOCK_T) float32 plus ``B (A x) * scaling * factor`` of each token's adapters, for the columns from
    ``start`` to ``end``. ``held``, ``lows``: ``factors_of`` and ``lows_of`` of the first block_q ranks of the first LORA.held
    adapters: all loads come before the products, which would make later ones wait. BLOCK_T is 1 for one token, which needs no
    tensor cores."""
    HELD: tl.constexpr = LORA.held
    PER: tl.constexpr = LORA.per
    total = _add_products(total, held, lows, start, mine, lora, 0, HELD, LORA, BLOCK_T, BLOCK_N)
    # The others one after the other: all at once do not fit the registers.
    for j in tl.static_range(HELD, PER):
        more = factors_of(mine, start, end, lora, 0, j, j + 1, LORA, BLOCK_N)
        low = lows_of(mine, factor, start, tokens, t, lora, 0, j, j + 1, LORA, BLOCK_T, BLOCK_N)
        total = _add_products(total, more, low, start, mine, lora, j, j + 1, LORA, BLOCK_T, BLOCK_N)
    for ranks_from in range(LORA.block_q, LORA.block_r, LORA.block_q):
        for j in tl.static_range(PER):
            more = factors_of(mine, start, end, lora, ranks_from, j, j + 1, LORA, BLOCK_N)
            low = lows_of(mine, factor, start, tokens, t, lora, ranks_from, j, j + 1, LORA, BLOCK_T, BLOCK_N)
            total = _add_products(total, more, low, start, mine, lora, j, j + 1, LORA, BLOCK_T, BLOCK_N)
    return total


@triton.jit
def _add_products(total, held, lows, start, mine, lora, FROM: tl.constexpr, TO: tl.constexpr, LORA: tl.constexpr,
                  BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr):
    """``expand`` for the adapters FROM to TO and block_q ranks."""
    for j in tl.static_range(FROM, TO):
        _, _, column, size, _, scaling, has, needed = _adapter(j, start, mine, lora, LORA, BLOCK_N)
        at, factors = start + tl.arange(0, BLOCK_N) - column, held[j - FROM]
        mixed = ((at >= 0) & (at < size))[:, None] & has[None, :]  # elsewhere it is 0, which times inf is not 0
        if BLOCK_T == 1:
            more = tl.sum(factors.to(tl.float32) * tl.sum(lows[j - FROM], 1)[None, :], 1)[:, None]
            more = more * scaling if factors.dtype == tl.float16 else more
            total = tl.where(mixed, total + more, total)
        elif needed:
            more = tl.dot(factors, lows[j - FROM].to(factors.dtype), tl.zeros_like(total), input_precision="tf32x3")
            more = more * scaling if factors.dtype == tl.float16 else more
            total = tl.where(mixed, total + more, total)
    return total


@triton.jit
def dot_float32(x, y, acc):
    """``acc + x @ y``, as exact as products in float32 are: a float32 factor of one in bf16 is a sum of three in bf16; else
    each factor is a sum of two in TF32."""
    if x.dtype == tl.bfloat16 and y.dtype == tl.float32:
        high, middle, low = _in_three(y)
        return tl.dot(x, low, tl.dot(x, middle, tl.dot(x, high, acc)))
    return tl.dot(x.to(y.dtype), y, acc, input_precision="tf32x3")


@triton.jit
def _in_three(x):
    """float32 as a sum of three in bf16."""
    high = x.to(tl.bfloat16)
    rest = x - high.to(tl.float32)
    middle = rest.to(tl.bfloat16)
    return high, middle, (rest - middle.to(tl.float32)).to(tl.bfloat16)
