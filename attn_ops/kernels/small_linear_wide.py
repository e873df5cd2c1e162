"""Products with quantized weights for up to some hundred tokens: kernels of ``attn_ops/ops/small_linear.py``.

A program has BLOCK_N weight rows and BLOCK_M tokens; codes are read once per BLOCK_M tokens, converted in registers and
multiplied on the tensor cores, the rows as the left operand. Rows past the end, and in large tiles tokens, are read as copies
of the last one and not stored, so that loads need no mask.

NOTE [Columns in another order]: of 16 columns of the left operand a thread holds two pairs, 2c, 2c+1, 2c+8 and 2c+9, with c its
place among four. In memory pairs of codes are two bytes, and a load from shared memory per pair costs more than converting it.
A sum does not depend on the order of its terms. So a thread takes 16 adjacent bytes of a row, and the rows of x are loaded in
the order in which the codes then stand: column (j, h, c, e) of a block of 64 is column (c, j, h, e) in memory, each with four,
two, four and two values. Gathering them takes registers, an address per pair and token, and so fits few tokens (TURNED = 1);
for more, ``turn_kernel`` writes x in the new order first (2). TURNED = 0 keeps the order of memory.
``python -m benchmarks.hopper --loops "quantized linear"`` counts the instructions.

NOTE [int4 tiles]: PyTorch's packed int4 weight (``aten._convert_weight_to_int4pack`` with 8 inner tiles) is int32 (N / 8,
K / 128, 32, 4). As bytes, 64 adjacent ones belong to a row and 128 columns. Byte (c, w, f, b) of them, with four, four, two and
two values, has the codes of columns 32 w + 16 b + 2 c + f (low half) and 8 more (high half), which is the order of fragments:
turned to (w, b, c, f), low halves are columns 0..7, 16..23, ... in order, high halves the others. Its scales and zeros are bf16
(K / group, N, 2), and a weight is (code - 8) * scale + zero, rounded to x's dtype. Of layers that are fused (WIDTHS: their N),
rows are end to end, and scales and zeros of one layer come after all of the one before.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quire.attn_ops.kernels.kv_quant import NO_ASSEMBLY, widen
from quire.attn_ops.kernels.pdl import let_next_start, wait_for_previous
from quire.attn_ops.kernels.wgmma import wait_for_products

#: Four bytes -> the low halves less 8 and the high halves less 8, as bfloat16: 0x4300 with a code is 128 plus the code.
_NIBBLES = tl.constexpr("""{
    .reg .b32 t, u, one, less;
    and.b32 t, $4, 0x0f0f0f0f;
    shr.u32 u, $4, 4;
    and.b32 u, u, 0x0f0f0f0f;
    prmt.b32 $0, t, 0x43, 0x4140;
    prmt.b32 $1, t, 0x43, 0x4342;
    prmt.b32 $2, u, 0x43, 0x4140;
    prmt.b32 $3, u, 0x43, 0x4342;
    mov.b32 one, 0x3f803f80;
    mov.b32 less, 0xc308c308;
    fma.rn.bf16x2 $0, $0, one, less;
    fma.rn.bf16x2 $1, $1, one, less;
    fma.rn.bf16x2 $2, $2, one, less;
    fma.rn.bf16x2 $3, $3, one, less;
}""")


@triton.jit
def _halves(codes, like):
    """Bytes -> their low and their high four bits, less 8, in the dtype of ``like``."""
    if NO_ASSEMBLY or like.dtype != tl.bfloat16:
        return ((codes & 15).to(tl.float32) - 8.0).to(like.dtype), ((codes >> 4).to(tl.float32) - 8.0).to(like.dtype)
    else:
        return tl.inline_asm_elementwise(_NIBBLES, "=&r,=&r,=&r,=&r,r", [codes], (tl.bfloat16, tl.bfloat16), True, 4)


@triton.jit
def _scaled(codes, scale, zero):
    """codes * scale + zero, rounded once to the dtype of codes. scale, zero: bf16, one per row."""
    if NO_ASSEMBLY or codes.dtype != tl.bfloat16:
        return (codes.to(tl.float32) * scale.to(tl.float32)[:, None] + zero.to(tl.float32)[:, None]).to(codes.dtype)
    else:
        scale, zero = tl.broadcast_to(scale[:, None], codes.shape), tl.broadcast_to(zero[:, None], codes.shape)
        return tl.inline_asm_elementwise("fma.rn.bf16x2 $0, $1, $2, $3;", "=r,r,r,r", [codes, scale, zero], tl.bfloat16, True,
                                         2)


@triton.jit
def _turned(place):
    """Columns in the order of NOTE [Columns in another order]."""
    return place // 64 * 64 + place // 2 % 4 * 16 + place // 16 % 4 * 4 + place // 8 % 2 * 2 + place % 2


@triton.jit
def turn_kernel(x, out, K, stride_x, BLOCK_K: tl.constexpr, PDL: tl.constexpr):
    """A row of x (M, K) with its columns ``_turned``; a program has BLOCK_K of them."""
    place = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    row = tl.program_id(0).to(tl.int64)
    wait_for_previous(PDL)
    xs = tl.load(x + row * stride_x + _turned(place), mask=place < K)
    let_next_start(PDL)
    tl.store(out + row * K + place, xs, mask=place < K)


@triton.jit
def _load_x(x, tokens, M, BLOCK_M: tl.constexpr):
    """A tile of x; a mask costs instructions, reading one row again and again by all programs at once costs more."""
    if BLOCK_M <= 32:
        return tl.load(x, mask=(tokens < M)[None, :], other=0.0)
    else:
        return tl.load(x)


@triton.jit
def _share(K, BLOCK_K: tl.constexpr, PARTS: tl.constexpr):
    """First column of this program's share, and the column after its last. No share is empty; the compiler must know that the
    loop runs, or it waits for each product before the next."""
    first, last = 0, K
    if PARTS:
        blocks = K // BLOCK_K
        first = blocks * tl.program_id(2) // tl.num_programs(2) * BLOCK_K
        last = blocks * (tl.program_id(2) + 1) // tl.num_programs(2) * BLOCK_K
    tl.assume(first < last)
    return first, last


@triton.jit
def _store(acc, rows, tokens, scale, bias, res, out, M, N, stride_r, PARTS: tl.constexpr):
    """Sums (BLOCK_N, BLOCK_M), with scales, bias and residual; with PARTS as they are, for ``add_up_kernel``."""
    inside = (rows < N)[:, None] & (tokens < M)[None, :]
    if PARTS:
        tl.store(out + (tl.program_id(2) * M + tokens)[None, :] * N + rows[:, None], acc, mask=inside)
    else:
        if scale is not None:
            acc *= tl.load(scale + rows, mask=rows < N, other=0.0)[:, None]
        if bias is not None:
            acc += tl.load(bias + rows, mask=rows < N, other=0.0).to(tl.float32)[:, None]
        if res is not None:
            acc += tl.load(res + tokens[None, :] * stride_r + rows[:, None], mask=inside, other=0.0).to(tl.float32)
        tl.store(out + tokens[None, :] * N + rows[:, None], acc.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["M"])
def wide_kernel(x, w, scale, bias, res, out, M, N, K, stride_w, stride_x, stride_r, BLOCK_M: tl.constexpr,
                BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TURNED: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr):
    """w (N, K) int8 or fp8, scale (N,). K a multiple of BLOCK_K, that of 64. With PARTS the third dim of the grid shares the
    columns, and out is (shares, M, N) float32. Programs of the same rows are next to each other, and share what they read."""
    rows = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    tokens = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    place = tl.arange(0, BLOCK_K)
    cols = _turned(place) if TURNED == 1 else place  # see NOTE [Columns in another order]
    first, last = _share(K, BLOCK_K, PARTS)
    wait_for_previous(PDL)
    w += tl.minimum(rows, N - 1).to(tl.int64)[:, None] * stride_w + place[None, :]
    x += tl.minimum(tokens, M - 1)[None, :] * stride_x + cols[:, None]
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for start in range(first, last, BLOCK_K):
        xs = _load_x(x + start, tokens, M, BLOCK_M)
        codes = tl.load(w + start, eviction_policy="evict_first")
        if TURNED > 0:
            codes = codes.reshape(BLOCK_N, BLOCK_K // 64, 4, 4, 2, 2).permute(0, 1, 3, 4, 2, 5).reshape(BLOCK_N, BLOCK_K)
        acc = tl.dot(widen(codes, xs), xs, acc)
        wait_for_products()
    let_next_start(PDL)
    _store(acc, rows, tokens, scale, bias, res, out, M, N, stride_r, PARTS)


@triton.jit
def _int4_scales(scale, rows, N, groups, WIDTHS: tl.constexpr):
    """For each row a pointer to its first scale and zero, and the distance to those of its next group."""
    at, width = rows, tl.zeros_like(rows) + N
    before = 0
    for i in tl.static_range(len(WIDTHS)):
        inside = (rows >= before) & (rows < before + WIDTHS[i])
        at = tl.where(inside, groups * before + rows - before, at)
        width = tl.where(inside, WIDTHS[i], width)
        before += WIDTHS[i]
    return scale + at, width


@triton.jit
def _int4_weights(w, scale, width, start, like, GROUP: tl.constexpr, BLOCK_N: tl.constexpr):
    """Weights (BLOCK_N, 128) in the dtype of ``like``, columns from ``start``; w, a pointer per byte, stands at column 0, and
    scale and width are of ``_int4_scales``. See NOTE [int4 tiles]."""
    codes = tl.load(w + start * 4, eviction_policy="evict_first")
    codes = codes.reshape(BLOCK_N, 4, 4, 2, 2).permute(0, 2, 4, 1, 3).reshape(BLOCK_N, 64)
    pair = tl.load(scale + start // GROUP * width)
    low, high = _halves(codes, like)
    s = (pair << 16).to(tl.float32, bitcast=True).to(tl.bfloat16)
    z = (pair & -65536).to(tl.float32, bitcast=True).to(tl.bfloat16)
    both = tl.join(_scaled(low, s, z), _scaled(high, s, z))
    return both.reshape(BLOCK_N, 8, 8, 2).permute(0, 1, 3, 2).reshape(BLOCK_N, 128)


@triton.jit
def _int4_bytes(w, rows, stride_w):
    """A pointer to each of the 64 bytes that rows have in the first 128 columns."""
    return w + (rows // 8).to(tl.int64)[:, None] * stride_w + (rows % 8 * 64)[:, None] + tl.arange(0, 64)[None, :]


@triton.jit(do_not_specialize=["M"])
def int4_kernel(x, w, scale, bias, res, out, M, N, K, stride_w, stride_x, stride_r, groups, GROUP: tl.constexpr,
                WIDTHS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr):
    """w: bytes (N / 8, K / 128, 512), scale: (groups, N, 2) bf16 as int32, one word for both. K a multiple of 128, GROUP
    (columns per group) too. stride_w: of w's first dim."""
    rows = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    tokens = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    first, last = _share(K, 128, PARTS)
    wait_for_previous(PDL)
    row = tl.minimum(rows, N - 1)
    w = _int4_bytes(w, row, stride_w)
    scale, width = _int4_scales(scale, row, N, groups, WIDTHS)
    x += tl.minimum(tokens, M - 1)[None, :] * stride_x + tl.arange(0, 128)[:, None]
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for start in range(first, last, 128):
        xs = _load_x(x + start, tokens, M, BLOCK_M)
        acc = tl.dot(_int4_weights(w, scale, width, start, xs, GROUP, BLOCK_N), xs, acc)
        wait_for_products()
    let_next_start(PDL)
    _store(acc, rows, tokens, None, bias, res, out, M, N, stride_r, PARTS)


@triton.jit
def unpack_kernel(w, scale, out, N, K, stride_w, groups, GROUP: tl.constexpr, WIDTHS: tl.constexpr, BLOCK_N: tl.constexpr):
    """int4 weights as numbers: out (N, K); a program has BLOCK_N rows and 128 columns."""
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row, start = tl.minimum(rows, N - 1), tl.program_id(1) * 128
    like = tl.zeros((1,), out.dtype.element_ty)
    scale, width = _int4_scales(scale, row, N, groups, WIDTHS)
    found = _int4_weights(_int4_bytes(w, row, stride_w), scale, width, start, like, GROUP, BLOCK_N)
    at = out + rows.to(tl.int64)[:, None] * K + start + tl.arange(0, 128)[None, :]
    tl.store(at, found, mask=(rows < N)[:, None])


__all__ = ["int4_kernel", "turn_kernel", "unpack_kernel", "wide_kernel"]
