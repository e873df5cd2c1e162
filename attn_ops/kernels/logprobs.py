"""Kernels of ``attn_ops/ops/logprobs.py``, which says what they compute."""

from __future__ import annotations

import triton
import triton.language as tl

from quire.attn_ops.kernels.pdl import let_next_start, wait_for_previous


@triton.jit
def part_kernel(logits, tokens, temperature, threshold, partial, V, stride, part_size, BLOCK: tl.constexpr,
                FILTERED: tl.constexpr, PDL: tl.constexpr):
    """Program (row, part): writes to ``partial`` (B, parts, 3) float32 the part's largest scaled logit, the sum of the
    exponentials relative to it, and the number of logits above the token's. Rows with temperature 0 are left out."""
    let_next_start(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    heat = tl.load(temperature + row)
    if heat > 0:
        first = part * part_size
        last = tl.minimum(first + part_size, V)
        logits_row = logits + row * stride
        lanes = tl.arange(0, BLOCK)
        token = tl.maximum(tl.load(tokens + row), 0)
        own = tl.load(logits_row + token).to(tl.float32)
        inverse = 1.0 / heat
        lowest = float("-inf")
        peak = tl.full((BLOCK,), float("-inf"), tl.float32)
        total = tl.zeros((BLOCK,), tl.float32)
        above = tl.zeros((BLOCK,), tl.int32)
        if FILTERED:
            lowest = tl.load(threshold + row)
        for start in range(first, last, BLOCK):
            columns = start + lanes
            x = tl.load(logits_row + columns, mask=columns < V, other=float("-inf")).to(tl.float32)
            above += (x > own).to(tl.int32)
            if FILTERED:
                x = tl.where(x < lowest, float("-inf"), x)
            x = tl.where(x == float("-inf"), x, x * inverse)  # at a temperature of infinity their product is NaN
            higher = tl.maximum(peak, x)
            finite = tl.where(tl.abs(higher) == float("inf"), 0.0, higher)
            total = total * tl.exp(peak - finite) + tl.exp(x - finite)
            peak = higher
        best = tl.max(peak, 0)
        shift = tl.where(tl.abs(best) == float("inf"), 0.0, best)
        out = partial + (row * tl.num_programs(1) + part) * 3
        tl.store(out, best)
        tl.store(out + 1, tl.sum(total * tl.exp(peak - shift), 0))
        tl.store(out + 2, tl.sum(above, 0).to(tl.float32))


@triton.jit(do_not_specialize=["parts"])  # else batch sizes would be separate kernels
def merge_kernel(logits, tokens, temperature, threshold, partial, out, stride, parts, BLOCK: tl.constexpr,
                 FILTERED: tl.constexpr, PDL: tl.constexpr):
    """Program (row,): the token's log probability and rank, and the row's normalizer, from the results of its parts. ``out``:
    ``TokenLogprobs.packed``."""
    let_next_start(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    rows = tl.num_programs(0)
    heat = tl.load(temperature + row)
    if heat > 0:
        lanes = tl.arange(0, BLOCK)
        peak = tl.full((BLOCK,), float("-inf"), tl.float32)
        total = tl.zeros((BLOCK,), tl.float32)
        above = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, parts, BLOCK):
            at = start + lanes
            one = partial + (row * parts + at) * 3
            x = tl.load(one, mask=at < parts, other=float("-inf"))
            higher = tl.maximum(peak, x)
            finite = tl.where(tl.abs(higher) == float("inf"), 0.0, higher)
            total = total * tl.exp(peak - finite) + tl.load(one + 1, mask=at < parts, other=0.0) * tl.exp(x - finite)
            above += tl.load(one + 2, mask=at < parts, other=0.0)
            peak = higher
        best = tl.max(peak, 0)
        shift = tl.where(tl.abs(best) == float("inf"), 0.0, best)
        denominator = shift + tl.log(tl.sum(total * tl.exp(peak - shift), 0))
        own = tl.load(logits + row * stride + tl.maximum(tl.load(tokens + row), 0)).to(tl.float32)
        scaled = own * (1.0 / heat)
        if FILTERED:
            scaled = tl.where(own < tl.load(threshold + row), float("-inf"), scaled)
        tl.store(out + row, scaled - denominator)
        tl.store(out + rows + row, (tl.sum(above, 0).to(tl.int32) + 1).to(tl.float32, bitcast=True))
        tl.store(out + 2 * rows + row, denominator)
    else:
        for i in tl.static_range(3):
            tl.store(out + i * rows + row, 0.0)
