"""Copying keys and values from the paged cache to contiguous memory.

Kernels for contiguous keys load them faster than those that follow a block table, so a long prompt may gain more than the copy
takes. Sequence r is copied to tokens ``kv_starts[r]`` to ``kv_starts[r + 1]``, its first ones where that is fewer than it has,
and zeros behind its last; sequences that are not wanted have none. Quantized caches are copied as they read back, in the dtype
of the queries.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.attn_ops.kernels import host
from quire.attn_ops.kernels.constants import next_power_of_2
from quire.attn_ops.kernels.host import Caches
from quire.attn_ops.kernels.kv_quant import widen
from quire.attn_ops.kernels.launch import launch
from quire.attn_ops.kernels.paged import find_block, load_keys, load_scales


@triton.jit
def _copy(cache, scales, out, table_row, head, position, index, live, held, LAYOUT: tl.constexpr, ROW: tl.constexpr,
          DIM: tl.constexpr, WIDTH: tl.constexpr):
    S: tl.constexpr = LAYOUT.scale
    PAGE: tl.constexpr = LAYOUT.page
    DIM_P2: tl.constexpr = next_power_of_2(DIM, 16)
    rows = load_keys(cache, table_row, head, position, held, PAGE, ROW, DIM, DIM_P2, True)
    if scales is not None:
        like = tl.zeros([1], out.dtype.element_ty)
        scale = load_scales(scales, table_row, head, position, held, PAGE, S, True)
        rows = widen(rows, like).to(tl.float32) * scale[:, None]
    columns = tl.arange(0, DIM_P2)
    keep = live[:, None]
    if WIDTH != DIM_P2:
        keep = keep & (columns < WIDTH)[None, :]
    tl.store(out + (index * LAYOUT.heads + head)[:, None] * WIDTH + columns[None, :], rows.to(out.dtype.element_ty), mask=keep)


@triton.jit(do_not_specialize=["num_tokens", "num_reqs", "stride_table"])
def gather_kernel(caches, block_table, kv_starts, seq_lens, keys, values, num_tokens, num_reqs, stride_table,
                  LAYOUT: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, WIDTH_V: tl.constexpr):
    """Program: BLOCK tokens of one sequence and head. caches: Caches; seq_lens: None where no sequence is shorter than its
    copy; LAYOUT: CacheLayout; WIDTH*: columns of keys, values."""
    K: tl.constexpr = LAYOUT.k
    V: tl.constexpr = LAYOUT.v
    program = tl.program_id(0)
    head = program % LAYOUT.heads
    row, start, first = find_block(kv_starts, num_reqs, program // LAYOUT.heads, BLOCK)
    end = tl.minimum(tl.load(kv_starts + tl.minimum(row + 1, num_reqs)), num_tokens)
    if first >= end:
        return
    token = first + tl.arange(0, BLOCK)
    live = token < end
    held = live
    if seq_lens is not None:
        held = live & (token - start < tl.load(seq_lens + row))
    table_row = block_table + row.to(tl.int64) * stride_table
    index = token.to(tl.int64)
    _copy(caches.k, caches.k_scale, keys, table_row, head, token - start, index, live, held, LAYOUT, K, LAYOUT.dim, WIDTH)
    _copy(caches.v, caches.v_scale, values, table_row, head, token - start, index, live, held, LAYOUT, V, LAYOUT.dim_v, WIDTH_V)


def kv_starts(query_start_loc: torch.Tensor, seq_lens: torch.Tensor, min_queries: int = 1, multiple_of: int = 1
              ) -> torch.Tensor:
    """(B + 1,) int32, device: where ``gather_kv`` puts the keys of each sequence with at least ``min_queries`` query tokens,
    one after another, each on a ``multiple_of`` tokens; the others have none. Reads nothing on the host."""
    lens = torch.where(query_start_loc.diff() >= min_queries, seq_lens, 0)
    if multiple_of > 1:
        lens = (lens + (multiple_of - 1)) // multiple_of * multiple_of
    starts = torch.zeros_like(query_start_loc)
    torch.cumsum(lens, 0, dtype=starts.dtype, out=starts[1:])
    return starts


def gather_kv(caches: Caches, block_table: torch.Tensor, kv_starts: torch.Tensor, num_tokens: int, dtype: torch.dtype,
              padded: bool = True, seq_lens: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys (N, Hkv, D) and values (N, Hkv, Dv) of the cached sequences, one after another, in fresh memory. Raises ValueError
    for an unquantized cache of another dtype than ``dtype``.

    Args:
        caches: of a layer; the head dims contiguous.  block_table: (B, W) int32.
        kv_starts: (B + 1,) int32, device: exclusive prefix sums of the tokens to copy per sequence (``kv_starts`` above).
        num_tokens: N, their sum, known to the host. Tokens past the last start are left as they are.
        dtype: of the result: of unquantized caches theirs, of quantized ones the queries'.
        padded: D and Dv padded to powers of two, at least 16, with zeros.
        seq_lens: (B,) int32, device, tokens that each sequence has, where starts leave more room (``multiple_of``).
    """
    if caches.k_scale is None and caches.k.dtype != dtype:
        raise ValueError(f"gather_kv copies a cache of {caches.k.dtype} as it is, not as {dtype}; only quantized caches are "
                         "converted")
    layout, device = host.cache_layout(caches), caches.k.device
    block_dims = host.next_power_of_2(layout.dim, 16), host.next_power_of_2(layout.dim_v, 16)
    width, width_v = block_dims if padded else (layout.dim, layout.dim_v)
    keys = torch.empty(num_tokens, layout.heads, width, dtype=dtype, device=device)
    values = torch.empty(num_tokens, layout.heads, width_v, dtype=dtype, device=device)
    num_reqs, block = block_table.shape[0], max(16, 8192 // max(block_dims))
    if num_tokens:
        grid = ((num_tokens // block + num_reqs + 1) * layout.heads,)
        launch(gather_kernel, grid, caches, block_table, kv_starts, seq_lens, keys, values, num_tokens, num_reqs,
               block_table.stride(0), layout, block, width, width_v, num_warps=4)
    return keys, values
