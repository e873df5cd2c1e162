"""Rotary embedding and the KV cache write in one kernel. ``torch.ops.quire.rope_kv_write``.

An RMSNorm over each head of q and k (Qwen3 and others), the rotation of q and k by the token's position, and storing k and v in
the cache are two to five launches per layer, each of which costs more than the bytes it moves. Attention then finds all keys in
the cache: the paged op is called without k and v.

The rotation (Su et al., "RoFormer", 2021, in GPT-NeoX's and Hugging Face's order of dimensions): with R rotated dimensions,
``x[i] * cos[i] - x[i + R/2] * sin[i]`` for i < R/2 and ``x[i] * cos[i] + x[i - R/2] * sin[i]`` for the other half; dimensions
from R on are unchanged. Models differ in four options (``RopeForm``):

* ``interleaved``: neighbours form pairs, as in RoFormer and GPT-J: ``x[2i] * cos[2i] - x[2i + 1] * sin[2i]``, and ``x[2i + 1] *
  cos[2i + 1] + x[2i] * sin[2i + 1]``;
* ``half_tables``: cos and sin have R/2 entries, one per pair;
* ``norm_after``: the norms apply to the rotated heads;
* ``norm_offset``: added to the weights of the norms (Gemma 3: 1), which then multiply in float32, before rounding. None: they
  multiply what was rounded to the dtype of q.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from quire.attn_ops.kernels import host
from quire.attn_ops.kernels.host import Caches, Rope, rows_contiguous
from quire.attn_ops.kernels.launch import launch
from quire.attn_ops.kv_quant import check_scales, write
from quire.attn_ops.library import define_op


class RopeForm(NamedTuple):
    """How q and k are rotated and normalized: keyword options of the ops. The default is that of Llama and Qwen3."""

    interleaved: bool = False
    half_tables: bool = False
    norm_after: bool = False
    norm_offset: float | None = None

    def rotated(self, cos: Tensor) -> int:
        """R, the number of rotated dimensions, for a table (T, R or R/2)."""
        return cos.shape[-1] * (2 if self.half_tables else 1)

    def options(self) -> dict[str, bool | float]:
        """Keyword arguments of the ops: the options that differ from the default."""
        return {name: option for name, option in self._asdict().items() if option is not None and option is not False}


PLAIN = RopeForm()


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, half_tables: bool = False) -> Tensor:
    """x (T, H, D) rotated by cos and sin (T, R or R/2), R <= D, in x's dtype; computed in what x and the tables promote to."""
    if half_tables:
        cos, sin = (t.repeat_interleave(2, dim=-1) if interleaved else t.repeat(1, 2) for t in (cos, sin))
    size = cos.shape[-1]
    x_rot, x_pass = x[..., :size], x[..., size:]
    if interleaved:
        swapped = torch.stack((-x_rot[..., 1::2], x_rot[..., ::2]), dim=-1).flatten(-2)
    else:
        first, second = x_rot.chunk(2, dim=-1)
        swapped = torch.cat((-second, first), dim=-1)
    result = x_rot * cos[:, None] + swapped * sin[:, None]
    return torch.cat((result.to(x.dtype), x_pass), dim=-1)


def _normed(x: Tensor, weight: Tensor | None, eps: float, offset: float | None) -> Tensor:
    if weight is None:
        return x
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype) if offset is None else (wide * (offset + weight.float())).to(x.dtype)


def norm_and_rotate(x: Tensor, weight: Tensor | None, cos: Tensor, sin: Tensor, eps: float, form: RopeForm) -> Tensor:
    """The rotation and the norm in the order of ``form``; each rounds to x's dtype."""
    if form.norm_after:
        return _normed(rotate(x, cos, sin, form.interleaved, form.half_tables), weight, eps, form.norm_offset)
    return rotate(_normed(x, weight, eps, form.norm_offset), cos, sin, form.interleaved, form.half_tables)


def rope_kv_write_eager(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, q_norm_weight: Tensor | None,
                        k_norm_weight: Tensor | None, eps: float, k_cache: Tensor, v_cache: Tensor, k_scale: Tensor | None,
                        v_scale: Tensor | None, slot_mapping: Tensor, *, interleaved: bool = False, half_tables: bool = False,
                        norm_after: bool = False, norm_offset: float | None = None) -> Tensor:
    """The definition. Returns q, normalized and rotated, (T, H, D) contiguous; writes k, likewise, and v to the caches.

    Args:
        q, k, v: (T, H, D), (T, Hkv, D), (T, Hkv, Dv).
        cos, sin: (T, R) of each token's position, R even and at most D; with half_tables (T, R/2).
        q_norm_weight, k_norm_weight: (D,) of an RMSNorm over each head; None: no norm.  eps: of the norms.
        k_cache, ..., v_scale: of PagedKVCache.of_layer.  slot_mapping: (T,) int64; a token with slot -1 is not written.
    """
    form = RopeForm(interleaved, half_tables, norm_after, norm_offset)
    check_scales(k_cache, k_scale, v_scale, fixed=True)
    write(k_cache, k_scale, norm_and_rotate(k, k_norm_weight, cos, sin, eps, form), slot_mapping)
    write(v_cache, v_scale, v, slot_mapping)
    return norm_and_rotate(q, q_norm_weight, cos, sin, eps, form).contiguous()


def tile(num_tokens: int, dim: int) -> tuple[int, int]:
    """Heads and warps per program. Few tokens: many small programs fill the GPU. Many tokens: a warp for about 1024 numbers
    (``benchmarks/rope.py``)."""
    if num_tokens <= 256:
        return (1, 1) if num_tokens <= 8 else (4, 4)
    return max(8, min(32, 1024 // host.next_power_of_2(dim))), 1


def rope_kv_write_cuda(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, q_norm_weight: Tensor | None,
                       k_norm_weight: Tensor | None, eps: float, k_cache: Tensor, v_cache: Tensor, k_scale: Tensor | None,
                       v_scale: Tensor | None, slot_mapping: Tensor, *, interleaved: bool = False, half_tables: bool = False,
                       norm_after: bool = False, norm_offset: float | None = None) -> Tensor:
    """The op as one Triton kernel, computed in float32. Strided q, k, v are read in place."""
    form = RopeForm(interleaved, half_tables, norm_after, norm_offset)
    caches = Caches(k_cache, v_cache, k_scale, v_scale)
    num_tokens, heads, _ = q.shape
    kv_heads = k.shape[1]
    out = q.new_empty(q.shape)
    if not num_tokens:
        return out
    check_scales(k_cache, k_scale, v_scale, fixed=True)
    host.check_cache_strides("rope_kv_write", caches)
    q, k, v = rows_contiguous(q), rows_contiguous(k), rows_contiguous(v)
    block, warps = tile(num_tokens, max(q.shape[2], v.shape[2]))
    q_blocks, kv_blocks = -(-heads // block), -(-kv_heads // block)
    launch(
        host.kernel_module("kernels.rope").rope_kv_write_kernel, (num_tokens, q_blocks + 2 * kv_blocks),
        q, k, v, out, caches, Rope.of(cos, sin, q_norm_weight, k_norm_weight, eps), slot_mapping, q.stride()[:2],
        k.stride()[:2], v.stride()[:2], heads, host.cache_layout(caches), form.rotated(cos), form, block,
        pdl=host.use_pdl(q.device, num_tokens), num_warps=warps)
    return out


rope_kv_write = define_op(
    "rope_kv_write(Tensor q, Tensor k, Tensor v, Tensor cos, Tensor sin, Tensor? q_norm_weight, Tensor? k_norm_weight, "
    "float eps, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor(c!)? k_scale, Tensor(d!)? v_scale, Tensor slot_mapping, *, "
    "bool interleaved=False, bool half_tables=False, bool norm_after=False, float? norm_offset=None) -> Tensor",
    cpu=rope_kv_write_eager, cuda=rope_kv_write_cuda, fake=lambda q, *_, **__: q.new_empty(q.shape), launches=True)
