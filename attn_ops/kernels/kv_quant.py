"""Storing keys and values in the cache from kernels, as they are or quantized as ``attn_ops/kv_quant.py`` defines it.

NOTE [Rounding to codes]: ``encode`` rounds in float32 to values that are codes, so the GPU's conversion to fp8 is exact
whatever its rounding. For x with 2**e <= |x| < 2**(e+1) codes lie 2**(e - mantissa) apart; adding and subtracting
1.5 * 2**23 times that rounds x to a multiple of it, ties to even. 2**e are the exponent bits of x; ROUNDER is
1.5 * 2**(23 - mantissa), and below 2**min_exponent codes get no closer. The code of NaN is stored as its byte.

NOTE [Values by words]: the product of weights and values needs pairs of keys adjacent, but memory has adjacent codes of one
key. By bytes that takes a load from shared memory per code. So two or four adjacent codes are loaded as one word, words are
split into as many tensors (``unpack``), and their products are interleaved at the end (``joined``). A product needs more
columns than it has rows, 16: with as many or fewer, Triton gives all of its work to every warp.

NOTE [Converting codes]: two at a time, in the halves of a register. To float16, which decoding multiplies in, two fp8 codes
take one instruction of the GPU's converter (compute capability 8.9; E5M2 is float16's upper byte), and int8: 0x6400 with the
code, its sign flipped, is 1024 + 128 plus the code. To bfloat16 there is no such converter. int8: the bits 0x4300 with the
code's lower 7 are 128 plus these; with its sign bit they are 128 or 256; the difference is the code. (Triton does that itself.)
fp8: the code's bits move to where exponent and mantissa end, and a multiplication by a power of two corrects the exponent,
subnormal codes included. (No code is NaN or infinite: kernels that convert so serve no fixed scales.) bfloat16 is multiplied by
fma, with summand -0: compute capability 8 has no other. Inputs are read before an output is written, which may be the same
register.
"""

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl

#: Two registers of numbers, $first and $second, from the four codes of x.
_INT8_FP16 = """
    xor.b32 a, %(x)s, 0x80808080;
    prmt.b32 %(first)s, a, 0x64, 0x4140;
    prmt.b32 %(second)s, a, 0x64, 0x4342;
    mov.b32 b, 0x64806480;
    sub.rn.f16x2 %(first)s, %(first)s, b;
    sub.rn.f16x2 %(second)s, %(second)s, b;
"""
_E4M3_FP16 = """
    mov.b32 {low, high}, %(x)s;
    cvt.rn.f16x2.e4m3x2 %(first)s, low;
    cvt.rn.f16x2.e4m3x2 %(second)s, high;
"""
_E5M2_FP16 = """
    mov.b32 a, %(x)s;
    prmt.b32 %(first)s, a, 0, 0x1404;
    prmt.b32 %(second)s, a, 0, 0x3424;
"""
_FP8_BF16 = """
    prmt.b32 %%(first)s, %%(x)s, 0, 0x1404;
    prmt.b32 %%(second)s, %%(x)s, 0, 0x3424;
    shr.u32 a, %%(first)s, %(shift)d;
    shr.u32 b, %%(second)s, %(shift)d;
    and.b32 %%(first)s, %%(first)s, 0x80008000;
    and.b32 %%(second)s, %%(second)s, 0x80008000;
    lop3.b32 %%(first)s, a, %(mask)s, %%(first)s, 0xea;
    lop3.b32 %%(second)s, b, %(mask)s, %%(second)s, 0xea;
    mov.b32 a, %(power)s;
    mov.b32 c, 0x80008000;
    fma.rn.bf16x2 %%(first)s, %%(first)s, a, c;
    fma.rn.bf16x2 %%(second)s, %%(second)s, a, c;
"""
_REGISTERS = "{\n    .reg .b32 t, u, a, b, c;\n    .reg .b16 low, high;\n"


def _of_codes(two: str) -> tl.constexpr:
    """For ``widen``: a register of codes -> two of numbers."""
    return tl.constexpr(_REGISTERS + "    mov.b32 t, $2;" + two % dict(x="t", first="$0", second="$1") + "}")


def _of_words(two: str) -> tl.constexpr:
    """For ``unpack``: two registers, words of four codes each -> four of numbers. First codes, in the same place of both, are
    made adjacent, and so on."""
    places = (dict(x="t", first="$0", second="$1"), dict(x="u", first="$2", second="$3"))
    return tl.constexpr(_REGISTERS + "    prmt.b32 t, $4, $5, 0x5140;\n    prmt.b32 u, $4, $5, 0x7362;"
                        + "".join(two % place for place in places) + "}")


def _of_pairs(two: str) -> tl.constexpr:
    """For ``unpack``: a register, two words of two codes each -> two of numbers."""
    return tl.constexpr(_REGISTERS + "    prmt.b32 t, $2, 0, 0x3120;" + two % dict(x="t", first="$0", second="$1") + "}")


E4M3_BF16 = _of_codes(_FP8_BF16 % dict(shift=4, mask="0x07f007f0", power="0x7b807b80"))  # 2**120
E5M2_BF16 = _of_codes(_FP8_BF16 % dict(shift=3, mask="0x0fe00fe0", power="0x77807780"))  # 2**112
INT8_FP16, E4M3_FP16, E5M2_FP16 = (_of_codes(two) for two in (_INT8_FP16, _E4M3_FP16, _E5M2_FP16))
INT8_FP16_WORDS, E4M3_FP16_WORDS, E5M2_FP16_WORDS = (_of_words(two) for two in (_INT8_FP16, _E4M3_FP16, _E5M2_FP16))
INT8_FP16_PAIRS, E4M3_FP16_PAIRS, E5M2_FP16_PAIRS = (_of_pairs(two) for two in (_INT8_FP16, _E4M3_FP16, _E5M2_FP16))

#: Neither the interpreter nor an AMD GPU runs this assembly.
NO_ASSEMBLY = tl.constexpr(os.environ.get("TRITON_INTERPRET", "0") == "1" or torch.version.hip is not None)
SMALLEST = tl.constexpr(2.0**-126)  # the smallest normal float32
NAN_CODE = tl.constexpr(0x7F)  # of either fp8 dtype, as PyTorch makes it


@triton.constexpr_function
def code_format(dtype):
    """(qmax, 2**min_exponent, ROUNDER, unit) of a code's dtype as a float format (int8 too: its values lie below 2**7). unit:
    the largest power of two <= qmax, so that unit * scale is about a vector's largest element. qmax is that of
    ``kv_quant.QMAX``, spelled out because Triton's cache key covers the source of this function and no dict."""
    qmax, mantissa, min_exponent, unit = {
        "int8": (127.0, 7, 7, 64.0), "fp8e4nv": (448.0, 3, -6, 256.0), "fp8e5": (57344.0, 2, -14, 32768.0)}[dtype.name]
    return qmax, 2.0**min_exponent, 1.5 * 2.0 ** (23 - mantissa), unit


@triton.jit
def encode(x, CODE: tl.constexpr):
    """``kv_quant.quantize`` of x (N, D) or (D,): codes, still float32, and scales. CODE: their dtype. See NOTE [Rounding to
    codes]."""
    FORMAT: tl.constexpr = code_format(CODE)
    AXIS: tl.constexpr = len(x.shape) - 1
    x = x.to(tl.float32)
    size = tl.abs(x)
    broken = tl.max((~(size < float("inf"))).to(tl.int32), AXIS) > 0
    scale = tl.maximum(tl.div_rn(tl.max(size, AXIS), FORMAT[0]), SMALLEST)
    scale = tl.where(broken, float("nan"), scale)
    if AXIS == 1:
        scaled = tl.div_rn(x, tl.where(broken, 1.0, scale)[:, None])
        scaled = tl.where(broken[:, None], 0.0, scaled)
    else:
        scaled = tl.where(broken, 0.0, tl.div_rn(x, tl.where(broken, 1.0, scale)))
    scaled = tl.minimum(tl.maximum(scaled, -FORMAT[0]), FORMAT[0])
    return _rounded(scaled, FORMAT), scale


@triton.jit
def encode_fixed(x, scale, CODE: tl.constexpr):
    """``kv_quant.quantize`` of x, of any shape, with the fixed ``scale``, a number: codes of the dtype CODE, fp8."""
    FORMAT: tl.constexpr = code_format(CODE)
    scaled = tl.div_rn(x.to(tl.float32), scale)
    fits = tl.abs(scaled) <= FORMAT[0]
    codes = _rounded(tl.where(fits, scaled, 0.0), FORMAT).to(CODE).to(tl.uint8, bitcast=True)
    return tl.where(fits, codes, NAN_CODE).to(tl.uint8).to(CODE, bitcast=True)


@triton.jit
def _rounded(scaled, FORMAT: tl.constexpr):
    power = tl.maximum(tl.abs(scaled), FORMAT[1]).to(tl.int32, bitcast=True) & 0x7F800000
    shift = power.to(tl.float32, bitcast=True) * FORMAT[2]
    return (scaled + shift) - shift


@triton.jit
def widen(codes, like):
    """Codes in the dtype of ``like``, which holds each of them exactly. See NOTE [Converting codes]."""
    if NO_ASSEMBLY or (like.dtype != tl.bfloat16 and like.dtype != tl.float16):
        return codes.to(like.dtype)
    elif like.dtype == tl.float16:
        TO_FP16: tl.constexpr = INT8_FP16 if codes.dtype == tl.int8 else (
            E4M3_FP16 if codes.dtype == tl.float8e4nv else E5M2_FP16)
        return tl.inline_asm_elementwise(TO_FP16, "=r,=r,r", [codes], tl.float16, True, 4)
    elif codes.dtype == tl.int8:
        return codes.to(like.dtype)
    else:
        TO_BF16: tl.constexpr = E4M3_BF16 if codes.dtype == tl.float8e4nv else E5M2_BF16
        return tl.inline_asm_elementwise(TO_BF16, "=r,=r,r", [codes], tl.bfloat16, True, 4)


@triton.jit
def in_half(x):
    """Rows of bfloat16 numbers, x (M, N), in float16 times a power of two, and its inverse (M,) in float32. The largest of a
    row is brought to 2**13 or above, so that the smallest that float16 has are 2**-38 of it: products with codes are as those
    of x itself to the precision of their sums in float32. float16 rows are left as they are."""
    if x.dtype == tl.float16:
        return x, tl.full([x.shape[0]], 1.0, tl.float32)
    else:
        size = tl.max(tl.abs(x.to(tl.float32)), 1).to(tl.int32, bitcast=True)
        exponent = tl.minimum(tl.maximum(size >> 23, 27), 254)  # of the largest, as its bits have it; NaN stays NaN
        power = ((267 - exponent) << 23).to(tl.float32, bitcast=True)
        return (x.to(tl.float32) * power[:, None]).to(tl.float16), ((exponent - 13) << 23).to(tl.float32, bitcast=True)


@triton.jit
def unpack(words, kind: tl.constexpr):
    """Words (N, C) of four codes each, int32, or of two, int16 -> as many tensors (N, C) in float16: the first code of each
    word, the second, and so on. ``kind``: dtype of the codes. See NOTE [Converting codes]."""
    if words.dtype == tl.int32:
        if NO_ASSEMBLY:
            return (_byte(words, 0, kind), _byte(words, 1, kind), _byte(words, 2, kind), _byte(words, 3, kind))
        else:
            WORDS: tl.constexpr = INT8_FP16_WORDS if kind == tl.int8 else (
                E4M3_FP16_WORDS if kind == tl.float8e4nv else E5M2_FP16_WORDS)
            return tl.inline_asm_elementwise(WORDS, "=r,=r,=r,=r,r,r", [words],
                                             (tl.float16, tl.float16, tl.float16, tl.float16), True, 2)
    else:
        if NO_ASSEMBLY:
            return _byte(words, 0, kind), _byte(words, 1, kind)
        else:
            PAIRS: tl.constexpr = INT8_FP16_PAIRS if kind == tl.int8 else (
                E4M3_FP16_PAIRS if kind == tl.float8e4nv else E5M2_FP16_PAIRS)
            return tl.inline_asm_elementwise(PAIRS, "=r,=r,r", [words], (tl.float16, tl.float16), True, 2)


@triton.jit
def _byte(words, PLACE: tl.constexpr, kind: tl.constexpr):
    return ((words >> (8 * PLACE)) & 255).to(tl.uint8).to(kind, bitcast=True).to(tl.float16)


@triton.jit
def joined(parts, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """(ROWS, COLUMNS): columns of two or four tensors in turn."""
    if len(parts) == 4:
        return tl.reshape(tl.join(tl.join(parts[0], parts[2]), tl.join(parts[1], parts[3])), [ROWS, COLUMNS])
    else:
        return tl.reshape(tl.join(parts[0], parts[1]), [ROWS, COLUMNS])


@triton.jit
def store_rows(x, scale, head, live, slot, cache, scales, PAGE: tl.constexpr, ROW: tl.constexpr, SCALE: tl.constexpr,
               DIM: tl.constexpr):
    """Store the keys (or values) of one token, x (heads, DIM padded) or (DIM padded,) for a single head, at its ``slot``
    (64-bit): those of ``live`` heads, with their ``scale`` if there are ``scales``. ROW, SCALE: Strides of both."""
    page = slot // PAGE
    offset = slot % PAGE
    if len(x.shape) == 2:
        head = head.to(tl.int64)
    if scales is not None:
        tl.store(scales + page * SCALE.page + offset * SCALE.token + head * SCALE.head, scale, mask=live)
    start = cache + page * ROW.page + offset * ROW.token
    x = x.to(cache.dtype.element_ty)
    if len(x.shape) == 2:
        columns = tl.arange(0, x.shape[1])
        tl.store(start + (head * ROW.head)[:, None] + columns[None, :], x, mask=live[:, None] & (columns < DIM)[None, :])
    else:
        columns = tl.arange(0, x.shape[0])
        tl.store(start + head * ROW.head + columns, x, mask=(columns < DIM) & live)


@triton.jit
def encode_and_store(x, head, live, slot, cache, scales, PAGE: tl.constexpr, ROW: tl.constexpr, SCALE: tl.constexpr,
                     DIM: tl.constexpr):
    """``store_rows`` of x as it is, or as codes if there are ``scales``. Strides of 0: one fixed scale."""
    if scales is not None and SCALE.page == 0 and SCALE.token == 0 and SCALE.head == 0:
        codes = encode_fixed(x, tl.load(scales), cache.dtype.element_ty)
        store_rows(codes, None, head, live, slot, cache, None, PAGE, ROW, SCALE, DIM)
    elif scales is not None:
        codes, scale = encode(x, cache.dtype.element_ty)
        store_rows(codes, scale, head, live, slot, cache, scales, PAGE, ROW, SCALE, DIM)
    else:
        store_rows(x, None, head, live, slot, cache, None, PAGE, ROW, SCALE, DIM)
