"""Rotary embedding and the KV cache write in one kernel. ``torch.ops.quire.rope_kv_write``.

Between the q/k/v projection and attention stand, for each token, small pieces of work on few bytes: an RMSNorm over each head
of q and k (Qwen3 and others), the rotation of q and k by the token's position, and storing k and v in the cache. Apart, they
are two to five launches a layer, each of which costs more than the bytes it moves; here they are one. Attention then finds all
keys in the cache: the paged op is called without k and v.

The rotation (Su et al., "RoFormer", 2021, in GPT-NeoX's and Hugging Face's order of dimensions): with R rotated dimensions,
``x[i] * cos[i] - x[i + R/2] * sin[i]`` for i < R/2 and ``x[i] * cos[i] + x[i - R/2] * sin[i]`` for the other half; dimensions
from R on are left as they are. Four options (``RopeForm``) say what a model does otherwise:

* ``interleaved``: neighbours turn together, as in RoFormer and GPT-J: ``x[2i] * cos[2i] - x[2i + 1] * sin[2i]``, and
  ``x[2i + 1] * cos[2i + 1] + x[2i] * sin[2i + 1]``;
* ``half_tables``: cos and sin have R/2 entries, one for each pair;
* ``norm_after``: the norms are of the rotated heads;
* ``norm_offset``: is added to the weights of the norms (Gemma 3: 1), which then multiply in float32, before anything is
  rounded. None: they multiply what was rounded to the dtype of q.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

from quire.attn_ops.attention import LIBRARY
from quire.attn_ops.kernels.launch import implementations, launch
from quire.attn_ops.kv_quant import QUANTISED, check_scales, quantise

LIBRARY.define(
    "rope_kv_write(Tensor q, Tensor k, Tensor v, Tensor cos, Tensor sin, Tensor? q_norm_weight, Tensor? k_norm_weight, "
    "float eps, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor(c!)? k_scale, Tensor(d!)? v_scale, Tensor slot_mapping, *, "
    "bool interleaved=False, bool half_tables=False, bool norm_after=False, float? norm_offset=None) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,))


class RopeForm(NamedTuple):
    """How q and k are rotated and normalised: options that the ops take by keyword."""

    interleaved: bool = False
    half_tables: bool = False
    norm_after: bool = False
    norm_offset: float | None = None

    def rotated(self, cos: torch.Tensor) -> int:
        """R, the number of rotated dimensions, by a table (T, R or R/2)."""
        return cos.shape[-1] * (2 if self.half_tables else 1)

    def options(self) -> dict[str, bool | float]:
        """Keyword arguments of the ops: what is not as in the default."""
        return {name: option for name, option in self._asdict().items() if option is not None and option is not False}


#: Llama's and Qwen3's, in which the ops take no options.
PLAIN = RopeForm()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = False, half_tables: bool = False
           ) -> torch.Tensor:
    """x (T, H, D) rotated by cos and sin (T, R or R/2), R <= D, in x's dtype.

    Products and their sum are made in the dtype that x and the tables promote to: that of x for tables of its dtype, and with
    float32 tables in float32, rounded once.
    """
    if half_tables:
        cos, sin = (t.repeat_interleave(2, dim=-1) if interleaved else t.repeat(1, 2) for t in (cos, sin))
    size = cos.shape[-1]
    x_rot, x_pass = x[..., :size], x[..., size:]
    if interleaved:
        turned = torch.stack((-x_rot[..., 1::2], x_rot[..., ::2]), dim=-1).flatten(-2)
    else:
        first, second = x_rot.chunk(2, dim=-1)
        turned = torch.cat((-second, first), dim=-1)
    result = x_rot * cos[:, None] + turned * sin[:, None]
    return torch.cat((result.to(x.dtype), x_pass), dim=-1)


def _normed(x: torch.Tensor, weight: torch.Tensor | None, eps: float, offset: float | None) -> torch.Tensor:
    if weight is None:
        return x
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype) if offset is None else (wide * (offset + weight.float())).to(x.dtype)


def _turned(x: torch.Tensor, weight: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor, eps: float, form: RopeForm
            ) -> torch.Tensor:
    """The rotation and the norm, in the order that the form says; each rounds to x's dtype."""
    if form.norm_after:
        return _normed(rotate(x, cos, sin, form.interleaved, form.half_tables), weight, eps, form.norm_offset)
    return rotate(_normed(x, weight, eps, form.norm_offset), cos, sin, form.interleaved, form.half_tables)


def rope_kv_write_eager(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor,
    q_norm_weight: torch.Tensor | None, k_norm_weight: torch.Tensor | None, eps: float, k_cache: torch.Tensor,
    v_cache: torch.Tensor, k_scale: torch.Tensor | None, v_scale: torch.Tensor | None, slot_mapping: torch.Tensor, *,
    interleaved: bool = False, half_tables: bool = False, norm_after: bool = False, norm_offset: float | None = None,
) -> torch.Tensor:
    """The definition. Returns q, normalised and rotated, (T, H, D) contiguous; writes k, likewise, and v to the caches.

    Args:
        q, k, v: (T, H, D), (T, Hkv, D), (T, Hkv, Dv).
        cos, sin: (T, R) of each token's position, R even and at most D; with half_tables (T, R/2).
        q_norm_weight, k_norm_weight: (D,) of an RMSNorm over each head, before the rotation or after it; None: no norm.
        eps: of the norms.
        k_cache, v_cache: of the layer, (num_pages, page_size, Hkv, D or Dv); see PagedKVCache.
        k_scale, v_scale: (num_pages, page_size, Hkv) of a quantised cache, else None.
        slot_mapping: (T,) int64; a token with slot -1 is not written.
        interleaved, half_tables, norm_after, norm_offset: see above.
    """
    form = RopeForm(interleaved, half_tables, norm_after, norm_offset)
    check_scales(k_cache, k_scale, v_scale)
    keys = _turned(k, k_norm_weight, cos, sin, eps, form)
    page, offset = slot_mapping.clamp_min(0) // k_cache.shape[1], slot_mapping.clamp_min(0) % k_cache.shape[1]
    live = (slot_mapping >= 0)[:, None, None]
    for cache, scale, new in ((k_cache, k_scale, keys), (v_cache, v_scale, v)):
        codes = new.to(cache.dtype) if scale is None else new
        if scale is not None:
            codes, made = quantise(new, cache.dtype)
            scale[page, offset] = torch.where(live[..., 0], made, scale[page, offset])
        # Slot -1 writes back what slot 0 of the null page holds: a no-op. (Bytes: torch.where knows no fp8.)
        bits = cache.view(torch.uint8) if cache.dtype in QUANTISED else cache
        codes = codes.view(torch.uint8) if cache.dtype in QUANTISED else codes
        bits[page, offset] = torch.where(live, codes, bits[page, offset])
    return _turned(q, q_norm_weight, cos, sin, eps, form).contiguous()


def _fake(q: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
    return q.new_empty(q.shape)


def rope_kv_write_cuda(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor,
    q_norm_weight: torch.Tensor | None, k_norm_weight: torch.Tensor | None, eps: float, k_cache: torch.Tensor,
    v_cache: torch.Tensor, k_scale: torch.Tensor | None, v_scale: torch.Tensor | None, slot_mapping: torch.Tensor, *,
    interleaved: bool = False, half_tables: bool = False, norm_after: bool = False, norm_offset: float | None = None,
) -> torch.Tensor:
    """The op as one Triton kernel, computed in float32. Strided q, k, v are read as they lie."""
    form = RopeForm(interleaved, half_tables, norm_after, norm_offset)
    num_tokens, heads, dim = q.shape
    kv_heads, dim_v, size = k.shape[1], v.shape[2], form.rotated(cos)
    out = q.new_empty(q.shape)
    if not num_tokens:
        return out
    if k_cache.stride(3) != 1 or v_cache.stride(3) != 1:
        raise ValueError(f"rope_kv_write needs KV caches whose last dim is contiguous, got strides {k_cache.stride()} and "
                         f"{v_cache.stride()}")
    check_scales(k_cache, k_scale, v_scale)
    if k_scale is not None and v_scale is not None and k_scale.stride() != v_scale.stride():
        raise ValueError(f"rope_kv_write needs scales of the same strides, got {k_scale.stride()} and {v_scale.stride()}")
    q, k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (q, k, v))
    cos, sin = (x if x.stride(1) == 1 else x.contiguous() for x in (cos, sin))
    # Few tokens: many small programs fill the GPU. Many tokens: larger programs, as launching them has a price, too.
    block = 1 if num_tokens <= 8 else 4 if num_tokens <= 256 else 8
    q_blocks, kv_blocks = -(-heads // block), -(-kv_heads // block)
    kernels, use_pdl, launch_options, rounding, scale_strides = _kernels()
    pdl = use_pdl(q.device, q.shape[0])
    launch(
        kernels.rope_kv_write_kernel, (num_tokens, q_blocks + 2 * kv_blocks),
        q, k, v, cos, sin, q_norm_weight, k_norm_weight, out, k_cache, v_cache, k_scale, v_scale,
        slot_mapping, eps, *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], cos.stride(0), sin.stride(0),
        heads, kv_heads, dim, dim_v, size, *form, k_cache.shape[1], *k_cache.stride()[:3], *v_cache.stride()[:3],
        *scale_strides(k_scale), *rounding(k_cache.dtype), block,
        1 << (dim - 1).bit_length(), 1 << (dim_v - 1).bit_length(), pdl, num_warps=1 if block == 1 else 4,
        **launch_options(pdl))
    return out


@functools.cache
def _kernels() -> Any:
    from quire.attn_ops.kernels import kv_quant, pdl, rope

    return rope, pdl.use_pdl, pdl.launch_options, kv_quant.rounding, kv_quant.scale_strides


LIBRARY.impl("rope_kv_write", rope_kv_write_eager, "CPU")
LIBRARY.impl("rope_kv_write", rope_kv_write_cuda, "CUDA")
torch.library.register_fake("quire::rope_kv_write", _fake, lib=LIBRARY)
rope_kv_write = torch.ops.quire.rope_kv_write.default
implementations[rope_kv_write] = rope_kv_write_cuda

__all__ = ["PLAIN", "RopeForm", "rope_kv_write", "rope_kv_write_cuda", "rope_kv_write_eager", "rotate"]
