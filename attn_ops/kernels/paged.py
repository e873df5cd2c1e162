"""Parts of kernels on ragged batches and paged caches: finding a token's sequence, loading the keys of a sequence."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def find_row(query_start_loc, num_reqs, token):
    """Largest r with query_start_loc[r] <= token: the token's sequence, or num_reqs for a padding token."""
    low = num_reqs * 0
    high = num_reqs
    while low < high:
        middle = (low + high + 1) // 2
        if tl.load(query_start_loc + middle) <= token:
            low = middle
        else:
            high = middle - 1
    return low


@triton.jit
def find_block(query_start_loc, num_reqs, block, BLOCK_Q: tl.constexpr):
    """(sequence, its first token, the first token of the block) where sequence r has its blocks of BLOCK_Q tokens from number
    query_start_loc[r] // BLOCK_Q + r on; num_reqs for the padding tokens. The block may lie past the end of its sequence."""
    low = num_reqs * 0
    high = num_reqs
    while low < high:
        middle = (low + high + 1) // 2
        if tl.load(query_start_loc + middle) // BLOCK_Q + middle <= block:
            low = middle
        else:
            high = middle - 1
    start = tl.load(query_start_loc + low)
    return low, start, start + (block - start // BLOCK_Q - low) * BLOCK_Q


@triton.constexpr_function
def in_words(strides, codes):
    """Strides of a cache of codes, by words of so many codes."""
    return type(strides)(*(n // codes for n in strides))


@triton.jit
def in_page(offsets, PAGE: tl.constexpr, ROW: tl.constexpr):
    """Where in its page the token at each position lies, in elements. 64-bit only for pages that need it: the loop over keys
    has no instructions to spare."""
    if PAGE * ROW.token < 2147483648:
        return offsets % PAGE * ROW.token
    else:
        return (offsets % PAGE).to(tl.int64) * ROW.token


@triton.jit
def key_rows(cache, block_table_row, kv_head, offsets, live, PAGE: tl.constexpr, ROW: tl.constexpr, MASKED: tl.constexpr):
    """Pointers to the keys (or values) of one head at positions ``offsets``. ROW: Strides of the cache. 64-bit: caches exceed
    2**31 elements."""
    if MASKED:
        page = tl.load(block_table_row + offsets // PAGE, mask=live, other=0)
    else:
        page = tl.load(block_table_row + offsets // PAGE)
    return cache + page.to(tl.int64) * ROW.page + in_page(offsets, PAGE, ROW) + kv_head.to(tl.int64) * ROW.head


@triton.jit
def load_keys(cache, block_table_row, kv_head, offsets, live, PAGE: tl.constexpr, ROW: tl.constexpr, DIM: tl.constexpr,
              DIM_P2: tl.constexpr, MASKED: tl.constexpr):
    """Keys (or values) of one head at positions ``offsets``: (N, DIM_P2), padded with zeros. Rows that are not live are zeros
    too: memory there may hold NaN, and 0 * NaN is NaN."""
    return load_rows(key_rows(cache, block_table_row, kv_head, offsets, live, PAGE, ROW, MASKED), live, DIM, DIM_P2, MASKED)


@triton.jit
def load_rows(start, live, DIM: tl.constexpr, DIM_P2: tl.constexpr, MASKED: tl.constexpr):
    """The DIM numbers from each of the N pointers ``start`` on: (N, DIM_P2), as of ``load_keys``."""
    columns = tl.arange(0, DIM_P2)
    pointers = start[:, None] + columns[None, :]
    if MASKED:
        if DIM == DIM_P2:
            return tl.load(pointers, mask=live[:, None], other=0.0)
        else:
            return tl.load(pointers, mask=live[:, None] & (columns < DIM)[None, :], other=0.0)
    else:
        if DIM == DIM_P2:
            return tl.load(pointers)
        else:
            return tl.load(pointers, mask=(columns < DIM)[None, :], other=0.0)


@triton.jit
def load_scales(scale, block_table_row, kv_head, offsets, live, PAGE: tl.constexpr, ROW: tl.constexpr, MASKED: tl.constexpr):
    """Scales of the codes of one head at positions ``offsets``; 0 where not live."""
    at = key_rows(scale, block_table_row, kv_head, offsets, live, PAGE, ROW, MASKED)
    if MASKED:
        return tl.load(at, mask=live, other=0.0)
    else:
        return tl.load(at)
