"""Multi-head latent attention (MLA): what it means, and the paged op on the latent cache.

A layer of DeepSeek-V2 (arXiv:2405.04434, section 2.1) makes the keys and values of all heads from one *latent* vector per
token, ``c`` (rank,), by the matrix ``kv_b``, and adds to every head's key the same rotary part ``k_rope`` (R,)::

    k_h = [W_UK_h c, k_rope]      v_h = W_UV_h c      where kv_b, as (H, Dn + Dv, rank), is [W_UK_h; W_UV_h] head by head

So a cache of ``[c, k_rope]``, rank + R numbers per token in place of H * (D + Dv), holds all there is. Scores need no keys::

    q_h . k_h  =  [W_UK_h^T q_nope_h, q_rope_h] . [c, k_rope]            ``absorb_query``
    sum_j p_j v_hj  =  W_UV_h sum_j p_j c_j                              ``expand_output``

In these *absorbed* terms all H heads attend to one key head of dim rank + R whose value is its first rank numbers. A prefill of
many tokens takes fewer products with keys and values expanded (``mla_prefill.py``). ``kv_b`` is always the model's own
parameter, read in every step: weights that are updated in place reach the next step.

=======  ==========================================================================================================
Dn, R    numbers of a query and a key without and with rotary embedding; D = Dn + R, the rotary part comes last
rank     size of the latent vector (``kv_lora_rank``)
=======  ==========================================================================================================
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from quire.attn_ops.attention import attention_eager
from quire.attn_ops.breaks import breakable
from quire.attn_ops.kv_quant import dequantize, write
from quire.attn_ops.library import define_op

MLA_SCHEMA = "mla_attention(Tensor q, Tensor c, Tensor k_rope, Tensor kv_b, *, int layer, float scale) -> Tensor"
#: q (T, H, D), c (T, rank), k_rope (T, R), kv_b (H * (Dn + Dv), rank), cache (pages, page_size, 1, rank + R); metadata and
#: ``prepared`` as for the paged op (``backend.py``). Stores [c, k_rope], attends causally, returns (T, H, Dv). A quantized
#: cache holds codes of both, and c_scale and rope_scale (pages, page_size, 1) float32 their scales (``kv_quant.py``).
MLA_PAGED_SCHEMA = (
    "(Tensor q, Tensor c, Tensor k_rope, Tensor kv_b, Tensor(a!) cache, Tensor slot_mapping, Tensor block_table, "
    "Tensor query_start_loc, Tensor seq_lens, Tensor[] prepared, Tensor(b!)? c_scale=None, Tensor(c!)? rope_scale=None, *, "
    "float scale) -> Tensor"
)


def mla_attention_eager(q: Tensor, c: Tensor, k_rope: Tensor, kv_b: Tensor, *, layer: int, scale: float) -> Tensor:
    """The semantic op: q (B, H, S, D), c (B, Sk, rank), k_rope (B, Sk, R), kv_b (H * (Dn + Dv), rank) -> (B, H, S, Dv).
    Expanded to keys and values, in float32 or better: the specification. Queries are the last S of Sk tokens."""
    _check(q, c, k_rope, kv_b)
    heads, nope = q.shape[1], q.shape[3] - k_rope.shape[2]
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    kv = F.linear(c.to(wide), kv_b.to(wide)).unflatten(2, (heads, -1)).transpose(1, 2)
    k = torch.cat([kv[..., :nope], k_rope.to(wide)[:, None].expand(-1, heads, -1, -1)], dim=-1)
    out = attention_eager(q.to(wide), k, kv[..., nope:], None, layer=layer, scale=scale, window=None, softcap=None, chunk=None,
                          causal=True)
    return out.to(q.dtype)


def _check(q: Tensor, c: Tensor, k_rope: Tensor, kv_b: Tensor) -> None:
    torch._check_value(q.dim() == 4 and c.dim() == k_rope.dim() == 3 and kv_b.dim() == 2, lambda: (
        f"quire::mla_attention takes q (B, H, S, D), c (B, Sk, rank), k_rope (B, Sk, R), kv_b (H * (Dn + Dv), rank); got "
        f"{tuple(q.shape)}, {tuple(c.shape)}, {tuple(k_rope.shape)}, {tuple(kv_b.shape)}"))
    nope = q.shape[3] - k_rope.shape[2]
    torch._check_value(nope > 0 and kv_b.shape[0] % q.shape[1] == 0 and kv_b.shape[0] // q.shape[1] > nope, lambda: (
        f"quire::mla_attention needs kv_b of H * (Dn + Dv) rows; got {kv_b.shape[0]} for H = {q.shape[1]} and Dn = {nope}"))
    torch._check_value(kv_b.shape[1] == c.shape[2], lambda: (
        f"quire::mla_attention needs kv_b of rank columns, got {kv_b.shape[1]} for latent vectors of {c.shape[2]}"))


def _fake(q: Tensor, c: Tensor, k_rope: Tensor, kv_b: Tensor, *, layer: int, scale: float) -> Tensor:
    _check(q, c, k_rope, kv_b)
    heads, nope = q.shape[1], q.shape[3] - k_rope.shape[2]
    return q.new_empty(q.shape[0], heads, q.shape[2], kv_b.shape[0] // heads - nope)


mla_attention = define_op(MLA_SCHEMA, cpu=mla_attention_eager, cuda=mla_attention_eager, fake=_fake)


def split_weight(kv_b: Tensor, heads: int, nope: int) -> tuple[Tensor, Tensor]:
    """kv_b -> W_UK (H, Dn, rank) and W_UV (H, Dv, rank), views of it."""
    weight = kv_b.view(heads, -1, kv_b.shape[1])
    return weight[:, :nope], weight[:, nope:]


def absorb_query(q_nope: Tensor, w_uk: Tensor) -> Tensor:
    """(T, H, Dn), (H, Dn, rank) -> (T, H, rank), strided."""
    return torch.bmm(q_nope.transpose(0, 1), w_uk).transpose(0, 1)


def expand_output(latent: Tensor, w_uv: Tensor) -> Tensor:
    """(T, H, rank), (H, Dv, rank) -> (T, H, Dv), contiguous."""
    out = latent.new_empty(latent.shape[0], latent.shape[1], w_uv.shape[1])
    torch.bmm(latent.transpose(0, 1), w_uv.transpose(1, 2), out=out.transpose(0, 1))
    return out


def write_latent(c: Tensor, k_rope: Tensor, cache: Tensor, slot_mapping: Tensor,
                 c_scale: Tensor | None = None, rope_scale: Tensor | None = None) -> None:
    """Store c (T, rank) and k_rope (T, R) at their slots of the latent cache, each as codes where there are scales."""
    if c_scale is None:
        write(cache, None, torch.cat([c, k_rope], dim=-1)[:, None], slot_mapping)
    else:
        write(cache[..., : c.shape[1]], c_scale, c[:, None], slot_mapping)
        write(cache[..., c.shape[1] :], rope_scale, k_rope[:, None], slot_mapping)


def read_latent(rows: Tensor, rank: int, c_scale: Tensor, rope_scale: Tensor) -> Tensor:
    """Codes (..., rank + R) and their scales (...) -> (..., rank + R) float32."""
    return torch.cat([dequantize(rows[..., :rank], c_scale), dequantize(rows[..., rank:], rope_scale)], dim=-1)


def define_mla_op(name: str, impl: Callable[..., Tensor], devices: Iterable[str] = ("CPU", "CUDA"),
                  launches: bool = False) -> Any:
    """Register ``impl`` as ``quire::<name>_mla_paged_attention`` with MLA_PAGED_SCHEMA and its fake, for "CPU", "CUDA" or both;
    return the op overload. ``impl`` stores the step's latent vectors at their slots of ``cache``, mutates nothing else, and
    gives zeros for padding tokens (NOTE [Padding]); it gets scales only where the backend declares ``latent_kv_dtypes``.
    ``launches``: see ``define_op``."""
    keys, impl = set(devices), breakable(impl, _paged_fake)
    return define_op(f"{name}_mla_paged_attention{MLA_PAGED_SCHEMA}", cpu=impl if "CPU" in keys else None,
                     cuda=impl if "CUDA" in keys else None, fake=_paged_fake, launches=launches)


def _paged_fake(q: Tensor, c: Tensor, k_rope: Tensor, kv_b: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    heads, nope = q.shape[1], q.shape[2] - k_rope.shape[1]
    return q.new_empty(q.shape[0], heads, kv_b.shape[0] // heads - nope)
