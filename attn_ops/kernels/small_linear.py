"""Kernels of ``attn_ops/ops/small_linear.py``, which says what they compute.

NOTE [A slice for each warp]: with codes and few tokens, instructions seem to be a limit as well as bytes: a code costs two to
convert, and its share of all others. Where warps share the rows of a tile, each converts what another has converted too (Triton
gives the tokens' side of a small product warps of its own). So in ``sliced_kernel`` each warp has all rows and tokens of the
tile, and a slice of the columns to itself: a batch of products, added up at the end. ``python -m benchmarks.hopper --loops
"quantized linear 28672"`` counts 153 instructions per iteration for up to 16 tokens, and 183 for 32; a thread takes 32 codes
per iteration. Larger tiles take fewer instructions per code but are slower (``h200_small_linear_codes.json``): fewer fit at
once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quire.attn_ops.kernels.kv_quant import widen
from quire.attn_ops.kernels.lora import (
    adapter_factors,
    add_adapters,
    bits_of,
    count_first_products,
    first_products,
    wait_for_first_products,
)
from quire.attn_ops.kernels.pdl import let_next_start, wait_for_previous
from quire.attn_ops.kernels.wgmma import wait_for_products


@triton.jit
def _load_rows(w, rows, cols, stride, N, K, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr):
    """A (BLOCK_N, BLOCK_K) tile of the weight. Read once, so it should not evict x from the cache."""
    at = w + rows.to(tl.int64)[:, None] * stride + cols[None, :]
    if EVEN_N and EVEN_K:
        return tl.load(at, eviction_policy="evict_first")
    return tl.load(at, mask=(rows < N)[:, None] & (cols < K)[None, :], other=0.0, eviction_policy="evict_first")


@triton.jit
def _load_weights(w, scale, like, rows, cols, stride, N, K, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr):
    """``_load_rows``; codes (with ``scale``) converted to the dtype of ``like``."""
    tile = _load_rows(w, rows, cols, stride, N, K, EVEN_N, EVEN_K)
    if scale is not None:
        tile = widen(tile, like)
    return tile


@triton.jit
def gated(gate, up, GELU: tl.constexpr):
    """SwiGLU in float32; with GELU its tanh form, in which half of 1 + tanh(u) is the sigmoid of 2 u."""
    if GELU:
        return gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)) * up
    else:
        return gate * tl.sigmoid(gate) * up


@triton.jit
def norm_kernel(x, weight, out, K, stride_x, eps, BLOCK_K: tl.constexpr, PDL: tl.constexpr):
    """A token per program: its RMSNorm, rounded as Llama's: before the product with ``weight`` and after it."""
    row = tl.program_id(0).to(tl.int64)
    wait_for_previous(PDL)
    squares = tl.zeros((BLOCK_K,), tl.float32)
    for start in range(0, K, BLOCK_K):
        cols = start + tl.arange(0, BLOCK_K)
        wide = tl.load(x + row * stride_x + cols, mask=cols < K, other=0.0).to(tl.float32)
        squares += wide * wide
    rms = tl.rsqrt(tl.sum(squares, 0) / K + eps)
    let_next_start(PDL)
    for start in range(0, K, BLOCK_K):
        cols = start + tl.arange(0, BLOCK_K)
        wide = tl.load(x + row * stride_x + cols, mask=cols < K, other=0.0).to(tl.float32)
        y = (wide * rms).to(out.dtype.element_ty) * tl.load(weight + cols, mask=cols < K, other=0.0)
        tl.store(out + row * K + cols, y, mask=cols < K)


@triton.jit
def vector_kernel(x, w, scale, bias, norm, res, out, N, K, stride_w, eps, lora, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
                  SWIGLU: tl.constexpr, GELU: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, PDL: tl.constexpr,
                  LORA: tl.constexpr = None):
    """One token: BLOCK_N outputs per program, each the sum of K products. With LORA (host.AdapterTiles) the first programs have
    the first products of ``lora`` (host.Adapters), and SwiGLU's operands are stored apart."""
    wait_for_previous(PDL)
    if LORA is not None:
        first = LORA.adapters * (LORA.block_r // LORA.ranks)
        if tl.program_id(0) < first:
            first_products(tl.program_id(0), x, norm, lora, 1, K, K, LORA)
            let_next_start(PDL)
        else:
            _vector(tl.program_id(0) - first, x, w, scale, bias, norm, res, out, N, K, stride_w, eps, lora.rms, BLOCK_N,
                    BLOCK_K, SWIGLU, GELU, EVEN_N, EVEN_K, PDL, SWIGLU)
    else:
        _vector(tl.program_id(0), x, w, scale, bias, norm, res, out, N, K, stride_w, eps, None, BLOCK_N, BLOCK_K, SWIGLU,
                GELU, EVEN_N, EVEN_K, PDL)


@triton.jit
def _vector(program, x, w, scale, bias, norm, res, out, N, K, stride_w, eps, rms_out, BLOCK_N: tl.constexpr,
            BLOCK_K: tl.constexpr, SWIGLU: tl.constexpr, GELU: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr,
            PDL: tl.constexpr, APART: tl.constexpr = False):
    """A program of ``vector_kernel``; the first stores the norm's factor in ``rms_out`` (if not None). APART: SwiGLU's operands
    are stored one after the other instead of its result."""
    rows = program * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    acc_up = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    squares = tl.zeros((BLOCK_K,), tl.float32)
    for start in range(0, K, BLOCK_K):
        cols = start + tl.arange(0, BLOCK_K)
        if EVEN_K:
            given = tl.load(x + cols)
        else:
            given = tl.load(x + cols, mask=cols < K, other=0.0)
        xs = given.to(tl.float32)
        if norm is not None:
            squares += xs * xs
            if EVEN_K:
                xs *= tl.load(norm + cols).to(tl.float32)
            else:
                xs *= tl.load(norm + cols, mask=cols < K, other=0.0).to(tl.float32)
        acc += _load_weights(w, scale, given, rows, cols, stride_w, N, K, EVEN_N, EVEN_K).to(tl.float32) * xs[None, :]
        if SWIGLU:
            acc_up += _load_weights(w + N.to(tl.int64) * stride_w, scale, given, rows, cols, stride_w, N, K, EVEN_N,
                                    EVEN_K).to(tl.float32) * xs[None, :]
    let_next_start(PDL)
    y = tl.sum(acc, 1)
    up = tl.sum(acc_up, 1)
    if norm is not None:
        rms = tl.rsqrt(tl.sum(squares, 0) / K + eps)
        if rms_out is not None:
            tl.store(rms_out, rms, mask=program == 0)
        y *= rms
        up *= rms
    inside = rows < N
    if scale is not None:
        y *= tl.load(scale + rows, mask=inside, other=0.0)
        if SWIGLU:
            up *= tl.load(scale + N + rows, mask=inside, other=0.0)
    if bias is not None:
        y += tl.load(bias + rows, mask=inside, other=0.0).to(tl.float32)
        if SWIGLU:
            up += tl.load(bias + N + rows, mask=inside, other=0.0).to(tl.float32)
    if APART:
        tl.store(out + N + rows, up.to(out.dtype.element_ty), mask=inside)
    elif SWIGLU:
        y = gated(y, up, GELU)
    if res is not None:
        y += tl.load(res + rows, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + rows, y.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["M", "each"])  # else 16 and 32 tokens would be separate kernels
def tile_kernel(x, w, scale, bias, norm, res, out, M, N, K, stride_w, stride_x, stride_r, eps, lora, each,
                BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SWIGLU: tl.constexpr, GELU: tl.constexpr,
                EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, SPLITS: tl.constexpr, PDL: tl.constexpr, LORA: tl.constexpr = None):
    """BLOCK_M tokens and BLOCK_N weight rows per program, the latter as the left operand of the tensor cores (the long side).
    ``each``: rows per program, a multiple of 4; fewer than BLOCK_N, without EVEN_N, where that fills the GPU evenly (see
    ``Config.rows``).

    With SPLITS > 1 a program has a part of the columns, out is (SPLITS, M, N) float32, and ``add_up_kernel`` does the rest.
    LORA: with adapters ``lora`` (host.Adapters) of one tile of tokens, whose first products the first programs compute
    (host.AdapterTiles); with SPLITS > 1 ``add_up_kernel`` adds the second ones."""
    wait_for_previous(PDL)
    if LORA is not None:
        program = tl.program_id(0)
        first = LORA.adapters * (LORA.block_r // LORA.ranks) * LORA.parts * (BLOCK_M // LORA.first_t)
        if program < first:
            if SPLITS == 1:
                first_products(program, x, norm, lora, M, K, stride_x, LORA)
                let_next_start(PDL)
                count_first_products(program, lora, M, LORA)
            else:
                if tl.program_id(2) == 0:
                    first_products(program, x, norm, lora, M, K, stride_x, LORA)
                let_next_start(PDL)
        else:
            _tile(program - first, first, x, w, scale, bias, norm, res, out, M, N, K, stride_w, stride_x, stride_r, eps, lora,
                  BLOCK_N, BLOCK_M, BLOCK_N, BLOCK_K, SWIGLU, GELU, EVEN_N, EVEN_K, SPLITS, PDL, LORA)
    else:
        _tile(tl.program_id(0), 0, x, w, scale, bias, norm, res, out, M, N, K, stride_w, stride_x, stride_r, eps, None, each,
              BLOCK_M, BLOCK_N, BLOCK_K, SWIGLU, GELU, EVEN_N, EVEN_K, SPLITS, PDL, None)


@triton.jit
def _tile(program, first_programs, x, w, scale, bias, norm, res, out, M, N, K, stride_w, stride_x, stride_r, eps, lora, each,
          BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SWIGLU: tl.constexpr, GELU: tl.constexpr,
          EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, SPLITS: tl.constexpr, PDL: tl.constexpr, LORA: tl.constexpr):
    """A program of ``tile_kernel``, behind the ``first_programs``."""
    if EVEN_N:
        rows = program * BLOCK_N + tl.arange(0, BLOCK_N)
        end = N
    else:
        rows = tl.multiple_of(program * each, 4) + tl.arange(0, BLOCK_N)
        end = tl.minimum(N, (program + 1) * each)
    tokens = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    acc_up = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    # Per eight columns, which a thread has: sums over all would be exchanged among threads in every iteration.
    squares = tl.zeros((BLOCK_K // 8, BLOCK_M), tl.float32)
    mine = None
    if LORA is not None and LORA.early:
        mine = bits_of(tokens, M, lora, LORA.every)
    if SPLITS == 1:
        first, last = 0, K
    else:
        span = tl.cdiv(K, SPLITS * BLOCK_K) * BLOCK_K
        first = tl.program_id(2) * span
        last = tl.minimum(first + span, K)
    for start in range(first, last, BLOCK_K):
        cols = start + tl.arange(0, BLOCK_K)
        mask = (tokens < M)[None, :] & (cols < K)[:, None]
        xs = tl.load(x + tokens[None, :] * stride_x + cols[:, None], mask=mask, other=0.0)
        if norm is not None:
            wide = xs.to(tl.float32)
            squares += tl.sum(tl.reshape(wide * wide, (BLOCK_K // 8, 8, BLOCK_M)), 1)
            xs = (wide * tl.load(norm + cols, mask=cols < K, other=0.0).to(tl.float32)[:, None]).to(xs.dtype)
        acc = tl.dot(_load_weights(w, scale, xs, rows, cols, stride_w, end, K, EVEN_N, EVEN_K), xs, acc)
        if SWIGLU:
            up = _load_weights(w + N.to(tl.int64) * stride_w, scale, xs, rows, cols, stride_w, end, K, EVEN_N, EVEN_K)
            acc_up = tl.dot(up, xs, acc_up)
        if scale is not None:
            wait_for_products()
    let_next_start(PDL)
    if SPLITS == 1:
        _finish(acc, acc_up, tl.sum(squares, 0), rows, end, tokens, scale, bias, norm, res, out, M, N, K, stride_r, eps, SWIGLU,
                GELU, mine, program * BLOCK_N, first_programs, lora, LORA, BLOCK_M, BLOCK_N)
    else:
        tl.store(out + (tl.program_id(2) * M + tokens)[None, :] * N + rows[:, None], acc,
                 mask=(rows < end)[:, None] & (tokens < M)[None, :])


@triton.jit(do_not_specialize=["M"])
def add_up_kernel(parts, scale, bias, res, out, M, N, stride_r, lora, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                  SPLITS: tl.constexpr, PDL: tl.constexpr, LORA: tl.constexpr = None):
    """Add up ``tile_kernel``'s parts (SPLITS, M, N), always in the same order, and ``_finish``."""
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    tokens = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = (rows < N)[:, None] & (tokens < M)[None, :]
    mine = None
    if LORA is not None:
        mine = bits_of(tokens, M, lora, LORA.every)
    wait_for_previous(PDL)
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for split in tl.static_range(SPLITS):
        acc += tl.load(parts + (split * M + tokens)[None, :] * N + rows[:, None], mask=inside, other=0.0)
    let_next_start(PDL)
    _finish(acc, acc, None, rows, N, tokens, scale, bias, None, res, out, M, N, 0, stride_r, 0.0, False, False, mine,
            tl.program_id(0) * BLOCK_N, 0, lora, LORA, BLOCK_M, BLOCK_N)


@triton.jit(do_not_specialize=["M"])
def sliced_kernel(x, w, scale, bias, norm, res, out, M, N, K, stride_w, stride_x, stride_r, eps, BLOCK_M: tl.constexpr,
                  BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SLICES: tl.constexpr, SWIGLU: tl.constexpr, GELU: tl.constexpr,
                  EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, PDL: tl.constexpr):
    """Like ``tile_kernel``, with SLICES times BLOCK_K columns per iteration, one slice per warp. See NOTE [A slice for each
    warp]."""
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    wait_for_previous(PDL)
    tokens = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    acc = tl.zeros((SLICES, BLOCK_N, BLOCK_M), tl.float32)
    acc_up = tl.zeros((SLICES, BLOCK_N, BLOCK_M), tl.float32)
    squares = tl.zeros((SLICES, BLOCK_M), tl.float32)
    for start in range(0, K, SLICES * BLOCK_K):
        cols = start + tl.arange(0, SLICES)[:, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
        live = (tokens < M)[None, None, :]
        if not EVEN_K:
            live = live & (cols < K)[:, :, None]
        xs = tl.load(x + tokens[None, None, :] * stride_x + cols[:, :, None], mask=live, other=0.0)
        if norm is not None:
            wide = xs.to(tl.float32)
            squares += tl.sum(wide * wide, 1)
            xs = (wide * tl.load(norm + cols, mask=cols < K, other=0.0).to(tl.float32)[:, :, None]).to(xs.dtype)
        acc = tl.dot(_load_slices(w, xs, rows, cols, stride_w, N, K, EVEN_N, EVEN_K), xs, acc)
        if SWIGLU:
            up = _load_slices(w + N.to(tl.int64) * stride_w, xs, rows, cols, stride_w, N, K, EVEN_N, EVEN_K)
            acc_up = tl.dot(up, xs, acc_up)
    let_next_start(PDL)
    _finish(tl.sum(acc, 0), tl.sum(acc_up, 0), tl.sum(squares, 0), rows, N, tokens, scale, bias, norm, res, out, M, N, K,
            stride_r, eps, SWIGLU, GELU)


@triton.jit
def _load_slices(w, like, rows, cols, stride, N, K, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr):
    """Columns cols (SLICES, BLOCK_K) of codes, in the dtype of ``like``: (SLICES, BLOCK_N, BLOCK_K)."""
    at = w + rows.to(tl.int64)[None, :, None] * stride + cols[:, None, :]
    if EVEN_N and EVEN_K:
        codes = tl.load(at, eviction_policy="evict_first")
    else:
        codes = tl.load(at, mask=(rows < N)[None, :, None] & (cols < K)[:, None, :], other=0.0, eviction_policy="evict_first")
    return widen(codes, like)


@triton.jit
def _finish(acc, acc_up, squares, rows, end, tokens, scale, bias, norm, res, out, M, N, K, stride_r, eps, SWIGLU: tl.constexpr,
            GELU: tl.constexpr, mine=None, start=0, first_programs=0, lora=None, LORA: tl.constexpr = None,
            BLOCK_M: tl.constexpr = 0, BLOCK_N: tl.constexpr = 0):
    """Norm, scales, bias, adapters, SwiGLU and residual for the sums (BLOCK_N, BLOCK_M) of ``rows``, which begin at ``start``
    and of which those before ``end`` count; store the results."""
    rms = tl.zeros_like(tokens).to(tl.float32) + 1.0
    if norm is not None:
        rms = tl.rsqrt(squares / K + eps)
        acc *= rms[None, :]
        acc_up *= rms[None, :]
    if scale is not None:
        acc *= tl.load(scale + rows, mask=rows < end, other=0.0)[:, None]
        if SWIGLU:
            acc_up *= tl.load(scale + N + rows, mask=rows < end, other=0.0)[:, None]
    inside = (rows < end)[:, None] & (tokens < M)[None, :]
    if bias is not None:
        acc += tl.load(bias + rows, mask=rows < end, other=0.0).to(tl.float32)[:, None]
        if SWIGLU:
            acc_up += tl.load(bias + N + rows, mask=rows < end, other=0.0).to(tl.float32)[:, None]
    if LORA is not None:
        y = acc.to(out.dtype.element_ty).to(tl.float32)  # rounded as the layer's own result is
        up = acc_up.to(out.dtype.element_ty).to(tl.float32)
        if mine is None:
            mine = bits_of(tokens, M, lora, LORA.every)
        held, held_up = adapter_factors(mine, start, N, lora, SWIGLU, LORA, BLOCK_N)
        if first_programs > 0:
            wait_for_first_products(lora, first_programs, LORA)
        acc, acc_up = add_adapters(y, up, mine, rms, held, held_up, start, N, tokens, M, lora, SWIGLU, LORA, BLOCK_M,
                               BLOCK_N)
    if SWIGLU:
        acc = gated(acc, acc_up, GELU)
    if res is not None:
        acc += tl.load(res + tokens[None, :] * stride_r + rows[:, None], mask=inside, other=0.0).to(tl.float32)
    tl.store(out + tokens[None, :] * N + rows[:, None], acc.to(out.dtype.element_ty), mask=inside)
