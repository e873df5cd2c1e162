"""Verification of a tree of draft tokens: every draft sees its sequence's tokens before the step, and its ancestors.

A batch's drafts are ordinary tokens of a step: sequence r has ``query_lens[r]`` of them, in the cache at the slots that follow
its ``num_computed`` tokens. What differs is the mask among them, (T, W) bool: token t sees the j-th draft of its own sequence
iff ``mask[t, j]``; and the positions for the rotary embedding, which count a draft's ancestors (``tree_positions``). W is at
least the longest query; columns past a sequence's own drafts are not read. SGLang's and vLLM's trees are the same; there a mask
covers the prefix too.

The tokens before the step are attended to by a backend's ``state_op``, the drafts among themselves by
``quire::tree_attention_state`` in float32, and ``merge_state`` makes one result of both. All of it can be captured.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from quire.attn_ops.backend import AttentionBackend, UnsupportedAttention
from quire.attn_ops.kernels import host
from quire.attn_ops.kernels.launch import launch
from quire.attn_ops.kv_cache import PagedKVCache
from quire.attn_ops.kv_quant import dequantize, quantize
from quire.attn_ops.library import define_op
from quire.attn_ops.metadata import CommonAttentionMetadata
from quire.attn_ops.ops.merge_state import log_sum_exp, merge_state, merge_states


def _rows(query_start_loc: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """(T,) sequence of each token, and its number there; padding tokens count on from the last sequence."""
    token = torch.arange(tokens, device=query_start_loc.device)
    row = torch.searchsorted(query_start_loc[1:].long(), token, right=True).clamp_max(query_start_loc.shape[0] - 2)
    return row, token - query_start_loc[row]


def build_tree_mask(parents: Tensor, query_start_loc: Tensor, width: int) -> Tensor:
    """(T, W) bool, the mask of trees: a token sees itself and its ancestors, padding tokens nothing. No value is read on the
    host.

    Args:
        parents: (T,) integers, the number of each token's parent among its sequence's drafts; -1 for a root, of which a
            sequence may have several. Parents may come after their children. A chain is ``[-1, 0, 1, ...]``.
        query_start_loc: (B + 1,) int32.  width: W, at least the longest query.
    """
    tokens, rows = parents.shape[0], query_start_loc.shape[0] - 1
    row, number = _rows(query_start_loc, tokens)
    live = (torch.arange(tokens, device=parents.device) < query_start_loc[-1]) & (number < width)
    # (B, W + 1, W + 1): one step up from each token; the last row and column take what is not a token.
    reach = torch.eye(width + 1, dtype=torch.float32, device=parents.device).repeat(rows, 1, 1)
    up = torch.where(live & (parents >= 0), parents.long().clamp(0, width - 1), width)
    reach[row, torch.where(live, number, width).clamp_max(width), up] = 1.0
    for _ in range(max(1, (width - 1).bit_length())):  # each squaring doubles the steps
        reach = (reach @ reach).clamp_max(1.0)
    return (reach[row, number.clamp_max(width), :width] > 0) & live[:, None]


def tree_positions(mask: Tensor, query_start_loc: Tensor, seq_lens: Tensor) -> Tensor:
    """(T,) int64 positions of draft tokens: the sequence's tokens before the step, and the token's ancestors; 0 for padding.
    ``mask``: (T, W) of ``build_tree_mask``. ``seq_lens``: (B,) with the drafts, as in CommonAttentionMetadata."""
    row, _ = _rows(query_start_loc, mask.shape[0])
    computed, ancestors = (seq_lens - query_start_loc.diff()).long()[row], mask.sum(1)
    return torch.where(ancestors > 0, computed + ancestors - 1, 0)


def _check(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> None:
    torch._check_value(q.dim() == k.dim() == v.dim() == 3 and k.shape[:2] == v.shape[:2] and q.shape[0] == k.shape[0]
                       and q.shape[2] == k.shape[2] and q.shape[1] % k.shape[1] == 0, lambda: (
        "quire::tree_attention_state takes q (T, H, D), k (T, Hkv, D), v (T, Hkv, Dv), H a multiple of Hkv; got "
        f"{tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}"))
    torch._check_value(mask.dim() == 2 and mask.shape[0] == q.shape[0] and mask.dtype == torch.bool, lambda: (
        f"quire::tree_attention_state takes a bool mask (T, W), T = {q.shape[0]}; got {tuple(mask.shape)} {mask.dtype}"))


def tree_attention_state_eager(q: Tensor, k: Tensor, v: Tensor, query_start_loc: Tensor, mask: Tensor, *, scale: float,
                               softcap: float | None) -> tuple[Tensor, Tensor]:
    """The definition: q (T, H, D), k (T, Hkv, D), v (T, Hkv, Dv), mask (T, W) -> (T, H, Dv) in q's dtype, lse (T, H) float32.
    Raises ValueError for shapes that do not go together, or a mask that is not bool."""
    _check(q, k, v, mask)
    tokens, width, group = q.shape[0], mask.shape[1], q.shape[1] // k.shape[1]
    if not tokens:
        return q.new_empty(0, q.shape[1], v.shape[2]), q.new_empty(0, q.shape[1], dtype=torch.float32)
    row, _ = _rows(query_start_loc, tokens)
    column = torch.arange(width, device=q.device)
    other = query_start_loc.long()[row][:, None] + column  # (T, W): the drafts of the token's sequence
    there = (other < query_start_loc[1:].long()[row][:, None]) & mask
    there &= (torch.arange(tokens, device=q.device) < query_start_loc[-1])[:, None]
    other = other.clamp_max(tokens - 1)
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    keys, values = (x.to(wide)[other].masked_fill(~there[..., None, None], 0.0) for x in (k, v))  # 0 * NaN is NaN
    scores = scale * torch.einsum("tkgd,twkd->tkgw", q.to(wide).unflatten(1, (-1, group)), keys)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~there[:, None, None], float("-inf"))
    lse = log_sum_exp(scores)[..., 0]
    weights = torch.exp(scores - lse.masked_fill(lse == float("-inf"), 0.0)[..., None])
    out = torch.einsum("tkgw,twkd->tkgd", weights, values).masked_fill((lse == float("-inf"))[..., None], 0.0)
    return out.flatten(1, 2).to(q.dtype), lse.flatten(1).float()


def tree_attention_state_triton(q: Tensor, k: Tensor, v: Tensor, query_start_loc: Tensor, mask: Tensor, *, scale: float,
                                softcap: float | None) -> tuple[Tensor, Tensor]:
    """``tree_attention_state_eager`` as one kernel, which reads the lengths on the device."""
    _check(q, k, v, mask)
    heads, kv_heads, (dim, dim_v) = q.shape[1], k.shape[1], (q.shape[2], v.shape[2])
    out, lse = q.new_zeros(q.shape[0], heads, dim_v), q.new_full(q.shape[:2], float("-inf"), dtype=torch.float32)
    rows, width, group = query_start_loc.shape[0] - 1, mask.shape[1], heads // kv_heads
    if not q.shape[0] or not rows:
        return out, lse
    q, k, v, mask = map(host.rows_contiguous, (q, k, v, mask))
    wide = q.dtype == torch.float32 or max(dim, dim_v) > 128  # larger tiles do not fit into registers
    block_m = min(16 if wide else 64, host.next_power_of_2(width * group, 16))
    launch(host.kernel_module("kernels.tree").tree_kernel, (rows, kv_heads, -(-width * group // block_m)), q, k, v, out, lse,
           query_start_loc, mask.view(torch.int8), scale, softcap, q.stride()[:2], k.stride()[:2], v.stride()[:2],
           mask.stride(0), width, heads, group, dim, dim_v, block_m, 32 if max(dim, dim_v) <= 128 else 16, num_warps=4)
    return out, lse


def _fake(q: Tensor, k: Tensor, v: Tensor, query_start_loc: Tensor, mask: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
    _check(q, k, v, mask)
    return q.new_empty(q.shape[0], q.shape[1], v.shape[2]), q.new_empty(q.shape[:2], dtype=torch.float32)


tree_attention_state = define_op(
    "tree_attention_state(Tensor q, Tensor k, Tensor v, Tensor query_start_loc, Tensor mask, *, float scale, float? softcap) "
    "-> (Tensor, Tensor)", cpu=tree_attention_state_eager, cuda=tree_attention_state_triton, fake=_fake, launches=True)


def tree_attention(backend: AttentionBackend, q: Tensor, k: Tensor, v: Tensor, cache: PagedKVCache, layer: int,
                   metadata: CommonAttentionMetadata, mask: Tensor, *, scale: float, softcap: float | None = None,
                   sinks: Tensor | None = None) -> Tensor:
    """Store the drafts' keys and values, then attend each draft to its sequence's tokens before the step and, among the drafts,
    to those that ``mask`` shows it: (T, H, Dv), 0 for padding tokens.

    Args:
        backend: one that declares ``lse``.  cache, layer: where keys and values lie.  metadata: of the batch of drafts.
        q, k, v: (T, H, D), (T, Hkv, D), (T, Hkv, Dv).  sinks: (H,) or None.
        mask: (T, W) bool, as of ``build_tree_mask``; W is at least the longest query.

    Raises UnsupportedAttention if the backend does not return attention as a state, and for a latent cache; ValueError for a
    mask that is narrower than the longest query, or of another shape.
    """
    if backend.state_op is None or not backend.capabilities.lse:
        raise UnsupportedAttention(f"a tree of drafts: backend {backend.name} does not return the log-sum-exp of its "
                                   "attention; `quire backends` shows those that do by the feature 'lse'")
    k_cache, v_cache, k_scale, v_scale = cache.of_layer(layer)
    if v_cache is None:
        raise UnsupportedAttention(f"a tree of drafts: layer {layer} of the cache is a latent one; use a dense cache")
    if mask.shape[1] < metadata.max_query_len:
        raise ValueError(f"a tree mask of {mask.shape[1]} columns for sequences of up to {metadata.max_query_len} drafts; make "
                         "it with build_tree_mask(..., width=metadata.max_query_len)")
    start = metadata.query_start_loc
    tables = (metadata.slot_mapping, metadata.block_table_tensor, start, metadata.seq_lens - start.diff())
    prepared = backend.prepared(*tables, cache.page_size)
    attend: Any = backend.state_op
    prefix = attend(q, k, v, k_cache, v_cache, k_scale, v_scale, *tables, prepared, scale=scale, softcap=softcap, causal=False)
    if cache.quantized:  # drafts too are attended to as they read back
        k, v = (dequantize(*quantize(x, cache.dtype, s)) for x, s in ((k, k_scale), (v, v_scale)))
    own = tree_attention_state(q, k, v, start, mask, scale=scale, softcap=softcap)
    if sinks is None:
        return merge_state(*prefix, *own)[0]
    sink = torch.zeros_like(own[0]), sinks.float().expand(q.shape[0], -1)  # a key whose value is 0
    live = (own[1] > float("-inf"))[..., None]  # a token that sees nothing, as padding, gives 0
    return merge_states(*(torch.stack(states, 1) for states in zip(prefix, own, sink, strict=True)))[0] * live
