"""Decoding in one kernel, and one that merges: each key is read once, with the query of its chunk."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.attn_ops.kernels import host
from quire.attn_ops.kernels.host import Caches, Rope, kernel_module
from quire.attn_ops.kernels.launch import launch
from quire.attn_ops.ops.merge_state import merge_states_triton
from quire.attn_ops.ops.rope import RopeForm

LONGEST_SPLIT = 2048  # keys of a program, while there are few programs: a long sequence among short ones is split by it


def decode_by_chunk(q: Tensor, turned: Tensor, far: Rope, form: RopeForm, k_cache: Tensor, v_cache: Tensor, block_table: Tensor,
                    query_start_loc: Tensor, seq_lens: Tensor, longest: int, chunk: int, length: int, scale: float,
                    softcap: float | None) -> Tensor:
    """(T, H, Dv) of tokens whose keys are in the cache, zeros of padding tokens.

    Args:
        q, turned: (T, H, D), before the norm and the rotary embedding, and behind them, contiguous.
        far: cos and sin of the positions ``chunk`` + b * ``length``, in row b, as many as the longest sequence has far chunks,
            and the norm.  longest: tokens of that sequence.
    """
    caches = Caches(k_cache, v_cache, None, None)
    host.check_cache_strides("decoding by chunks", caches)
    q = host.rows_contiguous(q)
    tokens, heads, dim = q.shape
    dim_v, kv_heads, half = v_cache.shape[3], k_cache.shape[2], q.dtype.itemsize == 2
    widest = max(dim, dim_v)
    blocks, per_block = host.head_blocks(heads // kv_heads, 32 if widest <= 128 else 16)
    slots = tokens * kv_heads * blocks
    if not slots:
        return q.new_empty(tokens, heads, dim_v)
    # See NOTE [How far keys are split], of the Triton backend: two programs for each multiprocessor, more for long sequences.
    one_wave = max(1, min(64, 2 * host.num_sms(q.device) // slots))
    splits = max(one_wave, min(-(-longest // LONGEST_SPLIT), 1024 // slots))
    block = (128 if widest <= 128 else 32) if half else 16
    out = torch.empty(tokens, splits, heads, dim_v, dtype=torch.float32, device=q.device)
    lse = torch.empty(out.shape[:3], dtype=torch.float32, device=q.device)
    launch(kernel_module("kernels.far_decode").far_decode_kernel, (slots, splits), q, turned, far, k_cache, v_cache,
           block_table, query_start_loc, seq_lens, out, lse, len(seq_lens), chunk, length, one_wave, LONGEST_SPLIT, scale,
           softcap, q.stride()[:2], block_table.stride(0), heads, host.cache_layout(caches), blocks, per_block, block,
           3 if half else 1, form.rotated(far.cos), form, num_warps=4)
    return merge_states_triton(out, lse, q.dtype)[0]
