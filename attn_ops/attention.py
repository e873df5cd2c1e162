"""The semantic attention op: what one attention site of a model means, with no KV cache and no batch metadata.

Every route into quire (the Hugging Face attention interface, the pass that raises ``F.scaled_dot_product_attention``) ends
in ``torch.ops.quire.attention``, and every backend is a lowering of it (``passes/rewrite/lower.py``). The op is functional and
has a derivative, so a model that emits it runs, traces and trains without an engine.

Shapes, in all of quire:

=====  ==============================================================================================================
B      sequences in a batch (``num_reqs``)
S, Sk  query tokens and key tokens of a dense sequence; T = tokens of a ragged batch, all sequences end to end
H      query heads; Hkv = key/value heads, H a multiple of Hkv (query head h reads key head h // (H // Hkv))
D, Dv  head dim of queries and keys, and of values (they differ in MLA models such as DeepSeek-V3)
=====  ==============================================================================================================

Meaning. Query i of a dense call has position ``i + Sk - S`` (queries are the last S of the Sk tokens). It sees key j iff

* ``causal``:  j <= i,
* ``window``:  j > i - window (window keys, the query's own included: Hugging Face's convention),
* ``chunk``:   i // chunk == j // chunk (Llama 4's chunked attention),

each where given. Scores are ``scale * q.k``, then ``softcap * tanh(score / softcap)``, *then* masked (masking first would
turn -inf into -softcap). ``sinks`` (H,) are logits that take part in the softmax and have no value (gpt-oss).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quire.attn_ops.library import LIBRARY, define_op

ATTENTION_SCHEMA = (
    "attention(Tensor q, Tensor k, Tensor v, Tensor? sinks, *, int layer, float scale, int? window, float? softcap, "
    "int? chunk, bool causal) -> Tensor"
)


class Latent(NamedTuple):
    """Sizes of an MLA layer's latent vectors and rotary keys (``mla.py``): a token is rank + rope numbers in the cache."""

    rank: int
    rope: int


@dataclass(frozen=True)
class AttentionSite:
    """What one attention site needs. Static facts only: this is what backends are checked against.

    Args:
        layer: the layer's number in the model; unique.  name: the module path, for messages.
        num_heads, num_kv_heads, head_dim, head_dim_v: H, Hkv, D, Dv.  dtype: of q, k and v.
        scale: factor on q.k; window (keys), softcap, chunk (tokens): None where the site has none; sinks: has sink logits.
        route: how the site was found: ``interface`` (HF attention interface), ``raised`` (from F.sdpa), ``op`` (emitted by
            the model itself).
        latent: of an MLA layer that is served from latent vectors; None: from the keys and values of all heads.
        kv_source: the earlier layer whose keys and values these are, so that they are cached once (gemma3n's later layers).
    """

    layer: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    head_dim_v: int
    dtype: torch.dtype
    scale: float
    window: int | None = None
    softcap: float | None = None
    chunk: int | None = None
    sinks: bool = False
    causal: bool = True
    name: str = ""
    route: str = "op"
    latent: Latent | None = None
    kv_source: int | None = None

    @property
    def bounded(self) -> bool:
        """Whether a query sees only the last tokens before it: a window or a chunk."""
        return self.window is not None or self.chunk is not None

    @property
    def dense(self) -> AttentionSite:
        """The site served from the keys and values of all heads."""
        return self if self.latent is None else replace(self, latent=None)

    def needs(self) -> str:
        """The features as text, for ``explain`` and error messages."""
        kind = "MHA" if self.num_heads == self.num_kv_heads else "MQA" if self.num_kv_heads == 1 else "GQA"
        dims = f"{self.head_dim}" if self.head_dim == self.head_dim_v else f"{self.head_dim}/{self.head_dim_v}"
        words = [f"{kind} {self.num_heads}:{self.num_kv_heads}x{dims}", dtype_name(self.dtype)]
        if self.latent is not None:
            words[0] = f"MLA {self.num_heads}x{dims} of {self.latent.rank}+{self.latent.rope}"
        words += [f"{n}={getattr(self, n):g}" for n in ("window", "softcap", "chunk") if getattr(self, n) is not None]
        words += ["sinks"] * self.sinks + ["non-causal"] * (not self.causal)
        words += [f"KV of layer {self.kv_source}"] * (self.kv_source is not None)
        return ", ".join(words)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def visible(query_pos: Tensor, key_pos: Tensor, *, window: int | None, chunk: int | None, causal: bool) -> Tensor:
    """The mask: whether the query at ``query_pos`` (..., 1) sees the key at ``key_pos`` (..., Sk). Broadcasts."""
    keep = key_pos <= query_pos if causal else torch.ones_like(query_pos + key_pos, dtype=torch.bool)
    if window is not None:
        keep = keep & (key_pos > query_pos - window)
    if chunk is not None:
        keep = keep & (key_pos // chunk == query_pos // chunk)
    return keep


def _weights(q: Tensor, k: Tensor, sinks: Tensor | None, *, scale: float, window: int | None, softcap: float | None,
             chunk: int | None, causal: bool, **_: Any) -> tuple[Tensor, Tensor, Tensor | None]:
    """Softmax weights (B, Hkv, G, S, Sk), scores (capped if there is a softcap) and the sinks' weights, in fp32 or better."""
    batch, heads, length, dim = q.shape
    kv_heads, keys = k.shape[1], k.shape[2]
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    grouped = q.to(wide).reshape(batch, kv_heads, heads // kv_heads, length, dim)
    capped = scale * (grouped @ k.to(wide).unsqueeze(2).transpose(-1, -2))
    if softcap is not None:
        capped = softcap * torch.tanh(capped / softcap)
    query_pos = torch.arange(length, device=q.device)[:, None] + (keys - length)
    key_pos = torch.arange(keys, device=q.device)[None, :]
    keep = visible(query_pos, key_pos, window=window, chunk=chunk, causal=causal)
    scores = capped.masked_fill(~keep, float("-inf"))
    if sinks is None:
        return torch.softmax(scores, dim=-1), capped, None
    column = sinks.to(wide).reshape(1, kv_heads, heads // kv_heads, 1, 1).expand(*scores.shape[:-1], 1)
    weights = torch.softmax(torch.cat([scores, column], dim=-1), dim=-1)
    return weights[..., :-1], capped, weights[..., -1:]


def attention_eager(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *, layer: int, scale: float, window: int | None,
                    softcap: float | None, chunk: int | None, causal: bool) -> Tensor:
    """The op in plain PyTorch, in fp32 or better: q (B, H, S, D), k (B, Hkv, Sk, D), v (B, Hkv, Sk, Dv) -> (B, H, S, Dv).
    Dense, O(S * Sk) memory: the specification, and what a model runs without an engine."""
    _check(q, k, v, sinks, window=window, softcap=softcap, chunk=chunk)
    if causal and q.shape[2] > k.shape[2]:
        raise ValueError(f"quire::attention is causal with {q.shape[2]} queries but {k.shape[2]} keys: queries are the last "
                         "tokens of the keys, so the first ones would see no key")
    weights, _, _ = _weights(q, k, sinks, scale=scale, window=window, softcap=softcap, chunk=chunk, causal=causal)
    out = weights @ v.to(weights.dtype).unsqueeze(2)
    return out.reshape(*q.shape[:3], v.shape[3]).to(q.dtype)


def _check(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *, window: int | None, softcap: float | None,
           chunk: int | None, **_: Any) -> None:
    """Shape and range rules, shared by the eager and the fake implementation: tracing raises the same errors."""
    torch._check_value(q.dim() == k.dim() == v.dim() == 4, lambda: (
        f"quire::attention takes q (B, H, S, D), k (B, Hkv, Sk, D), v (B, Hkv, Sk, Dv); got {tuple(q.shape)}, "
        f"{tuple(k.shape)}, {tuple(v.shape)}"))
    torch._check_value(q.shape[1] % k.shape[1] == 0 and k.shape[1] == v.shape[1], lambda: (
        f"quire::attention needs query heads ({q.shape[1]}) to be a multiple of key heads ({k.shape[1]}), and as many "
        f"value heads ({v.shape[1]}) as key heads"))
    torch._check_value(q.shape[3] == k.shape[3], lambda: (
        f"quire::attention needs one head dim for q and k, got {q.shape[3]} and {k.shape[3]}"))
    torch._check_value(sinks is None or tuple(sinks.shape) == (q.shape[1],), lambda: (
        f"quire::attention takes sinks of shape (H,) = ({q.shape[1]},), got {tuple(sinks.shape)}"))  # type: ignore[union-attr]
    for name, value in (("window", window), ("softcap", softcap), ("chunk", chunk)):
        if value is not None and value <= 0:
            raise ValueError(f"quire::attention: {name} must be positive or None, got {value}")


def attention_fake(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, **options: Any) -> Tensor:
    _check(q, k, v, sinks, **options)
    return q.new_empty(*q.shape[:3], v.shape[3])


def _setup_context(ctx: Any, inputs: tuple, keyword_only_inputs: dict, output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:4])
    ctx.options = keyword_only_inputs


def _backward(ctx: Any, grad: Tensor) -> tuple:
    """Softmax attention's derivative, weights recomputed (FlashAttention paper, section 3.1, without the tiling)."""
    q, k, v, sinks = ctx.saved_tensors
    opts = ctx.options
    weights, capped, sink_weights = _weights(q, k, sinks, **opts)
    wide = weights.dtype
    grouped = q.to(wide).reshape(*weights.shape[:4], q.shape[3])
    grad_out = grad.to(wide).reshape(*weights.shape[:4], v.shape[3])
    grad_weights = grad_out @ v.to(wide).unsqueeze(2).transpose(-1, -2)
    row = (weights * grad_weights).sum(-1, keepdim=True)
    grad_scores = weights * (grad_weights - row)
    if opts["softcap"] is not None:
        grad_scores = grad_scores * (1 - (capped / opts["softcap"]) ** 2)
    grad_q = opts["scale"] * (grad_scores @ k.to(wide).unsqueeze(2))
    grad_k = opts["scale"] * (grad_scores.transpose(-1, -2) @ grouped).sum(2)
    grad_v = (weights.transpose(-1, -2) @ grad_out).sum(2)
    grad_sinks = None
    if sink_weights is not None:
        grad_sinks = -(sink_weights * row).sum(dim=(0, 3, 4)).reshape(sinks.shape).to(sinks.dtype)
    return grad_q.reshape(q.shape).to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype), grad_sinks


attention = define_op(ATTENTION_SCHEMA, cpu=attention_eager, cuda=attention_eager, fake=attention_fake)
torch.library.register_autograd("quire::attention", _backward, setup_context=_setup_context, lib=LIBRARY)
