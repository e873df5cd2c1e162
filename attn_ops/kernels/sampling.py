"""Kernels of ``attn_ops/ops/sampling.py``, which says what they compute, and has NOTE [Same seed, same tokens].

The integers of the noise equal the definition's bit for bit. Its logarithms, and a product and sum that the compiler may
contract, can differ in the last bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quire.attn_ops.kernels.pdl import let_next_start, wait_for_previous

# SplitMix64, as in attn_ops/ops/sampling.py; unsigned, so that right shifts are logical.
GAMMA = tl.constexpr(0x9E3779B97F4A7C15)
MULTIPLIER_0 = tl.constexpr(0xBF58476D1CE4E5B9)
MULTIPLIER_1 = tl.constexpr(0x94D049BB133111EB)

# Ranks of float32 numbers: see `winner` in attn_ops/ops/sampling.py.
NAN_RANK = tl.constexpr(0x7FFFFFFF)
INF_RANK = tl.constexpr(0x7F800000)
MINUS_INF_RANK = tl.constexpr(-0x7F800001)
LOW = tl.constexpr(0xFFFFFFFF)


@triton.jit
def split_mix(n):
    """Output number ``n`` (uint64) of SplitMix64."""
    z = (n + 1) * GAMMA
    z = (z ^ (z >> 30)) * MULTIPLIER_0
    z = (z ^ (z >> 27)) * MULTIPLIER_1
    return z ^ (z >> 31)


@triton.jit
def stream(seed, position):
    """Start of a row's random bits, uint64: those of token v are ``split_mix(stream + v)``."""
    return split_mix(split_mix(seed.to(tl.uint64)) + position.to(tl.uint64))


@triton.jit
def log1p_minus(u):
    """log(1 - u) in float32, for u from 0 to 1 - 2**-24.

    With w = 1 - u rounded, log(w) * u / (1 - w) (Kahan; Goldberg, "What every computer scientist should know about
    floating-point arithmetic", 1991, theorem 4): 1 - w is exact (w is 1/2 to 1, or 1 - u was exact), and log(w) / (1 - w)
    changes so slowly with w that w's rounding, 2**-25, moves it by less than that. The roundings of logarithm, product and
    quotient are left: a few units in the last place, however small u is. Where w is 1, u is at most 2**-25 and log(1 - u) is -u
    within that.
    """
    w = 1.0 - u
    missing = tl.where(w == 1.0, 1.0, 1.0 - w)
    return tl.where(w == 1.0, -u, tl.log(w) * (u / missing))


@triton.jit
def gumbel(bits):
    """Standard Gumbel variates, float32, from 64 random bits each. The steps of ``_gumbel`` in attn_ops/ops/sampling.py."""
    # 53 bits fit a signed int64; the conversion rounds to nearest, as there.
    uniform = ((bits >> 11) | 1).to(tl.int64).to(tl.float32) * (2.0**-53)
    return -tl.log(-log1p_minus(tl.minimum(uniform, 1.0 - 2.0**-24)))


@triton.jit
def load_block(row, columns, V):
    """The logits at ``columns`` in float32, -inf past the end."""
    return tl.load(row + columns, mask=columns < V, other=float("-inf")).to(tl.float32)


@triton.jit
def keep(best, start_of_best, scores, start):
    """The best of each lane so far, and the start of its block. The first of equals stays; so does a NaN."""
    start_of_best = tl.where(scores > best, start, start_of_best)
    return tl.maximum(best, scores, propagate_nan=tl.PropagateNan.ALL), start_of_best


@triton.jit
def best_key(scores, tokens):
    """The largest key of (score, token), int64: the score's rank above, the token below, complemented. See `winner`."""
    bits = tl.where(scores == 0.0, 0.0, scores).to(tl.int32, bitcast=True)  # zeros of either sign are equals
    rank = tl.where(scores != scores, NAN_RANK, bits ^ ((bits >> 31) & 0x7FFFFFFF))
    return tl.max((rank.to(tl.int64) << 32) | (tokens.to(tl.int64) ^ LOW), 0)


@triton.jit
def token_of(key, greedy):
    """The token of a row's best key, or -1 for a NaN, only -inf, or +inf unless greedy."""
    rank = key >> 32
    valid = (rank > MINUS_INF_RANK) & (rank < tl.where(greedy, NAN_RANK, INF_RANK))
    return tl.where(valid, (key & LOW) ^ LOW, -1)


@triton.jit
def sample_kernel(logits, temperature, seed, position, out, V, stride, part_size, BLOCK: tl.constexpr, WHOLE: tl.constexpr,
                PDL: tl.constexpr):
    """Program (row, part). Writes the row's token to ``out`` (B,) if the part is the WHOLE row, else the part's best key to
    ``out`` (B, parts)."""
    let_next_start(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    first = part * part_size
    last = tl.minimum(first + part_size, V)
    logits_row = logits + row * stride
    lanes = tl.arange(0, BLOCK)
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    start_of_best = tl.full((BLOCK,), 0, tl.int32) + first
    heat = tl.load(temperature + row)
    greedy = heat < 1e-5
    if greedy:
        for start in tl.range(first, last, BLOCK, loop_unroll_factor=4):  # several loads in flight
            best, start_of_best = keep(best, start_of_best, load_block(logits_row, start + lanes, V), start)
    else:
        inverse = 1.0 / heat
        base = stream(tl.load(seed + row), tl.load(position + row))
        for start in range(first, last, BLOCK):
            columns = start + lanes
            noise = gumbel(split_mix(base + columns.to(tl.uint64)))
            scores = load_block(logits_row, columns, V) * inverse + noise
            scores = tl.where(columns < V, scores, float("-inf"))  # at a temperature of infinity -inf * inverse is NaN
            best, start_of_best = keep(best, start_of_best, scores, start)
    key = best_key(best, start_of_best + lanes)
    if WHOLE:
        tl.store(out + row, token_of(key, greedy))
    else:
        tl.store(out + row * tl.num_programs(1) + part, key)


@triton.jit(do_not_specialize=["parts"])  # else batch sizes would be separate kernels
def pick_kernel(keys, temperature, tokens, parts, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Program (row,): its token, from the best keys (B, parts) of its parts."""
    let_next_start(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    lowest: tl.constexpr = -(2**63)
    best = tl.full((BLOCK,), lowest, tl.int64)
    for start in range(0, parts, BLOCK):
        at = start + lanes
        best = tl.maximum(best, tl.load(keys + row * parts + at, mask=at < parts, other=lowest))
    tl.store(tokens + row, token_of(tl.max(best, 0), tl.load(temperature + row) < 1e-5))
