"""Attention over ragged sequences without a KV cache, for encoders, vision towers and cross attention:
``torch.ops.quire.varlen_attention``.

Sequence r has queries ``cu_seqlens_q[r]`` to ``cu_seqlens_q[r + 1]`` and keys ``cu_seqlens_k[r]`` to ``cu_seqlens_k[r + 1]``: a
block-diagonal mask over the ragged row. Within a sequence of n queries and m keys, query i has position i + m - n; it sees key
j iff ``causal``: j <= position, and ``window``: \\|j - position\\| < window (together Hugging Face's sliding window), each
where given; else it sees all keys. Scores are scaled, then capped, as in ``attention.py``. The second result is the log-sum-exp
of the scores, which ``merge_state`` takes; a query without keys has output 0 and lse -inf.

Implementations: "eager", the definition; "sdpa", which uses F.scaled_dot_product_attention and gives NaN for the lse; "kernel",
quire's Triton kernel, on a GPU; the name of a backend that has ``varlen``; "auto": eager on a CPU and the kernel on a GPU.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.attn_ops.backend import UnsupportedAttention
from quire.attn_ops.kernels import host
from quire.attn_ops.kernels.launch import launch
from quire.attn_ops.library import define_op
from quire.attn_ops.ops.merge_state import log_sum_exp
from quire.attn_ops.registry import all_backends

MAX_DIM = 256  # of the kernel
IMPLEMENTATIONS = ("auto", "eager", "sdpa", "kernel")


def _check(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
           window: int | None, softcap: float | None, implementation: str) -> None:
    torch._check_value(q.dim() == k.dim() == v.dim() == 3 and q.shape[2] == k.shape[2] and k.shape[:2] == v.shape[:2]
                       and q.shape[1] % k.shape[1] == 0, lambda: (
        "quire::varlen_attention takes q (T, H, D), k (N, Hkv, D), v (N, Hkv, Dv), H a multiple of Hkv; got "
        f"{tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}"))
    torch._check_value(cu_seqlens_q.dim() == 1 and cu_seqlens_q.shape == cu_seqlens_k.shape, lambda: (
        f"quire::varlen_attention takes cu_seqlens_q and cu_seqlens_k (B + 1,), got {tuple(cu_seqlens_q.shape)} and "
        f"{tuple(cu_seqlens_k.shape)}"))
    for name, value in (("window", window), ("softcap", softcap)):
        if value is not None and value <= 0:
            raise ValueError(f"quire::varlen_attention: {name} must be positive or None, got {value}")
    check_implementation(implementation)
    if implementation == "sdpa" and softcap is not None:
        raise ValueError("quire::varlen_attention: F.scaled_dot_product_attention has no softcap; use implementation='kernel' "
                         "or 'eager'")


def check_implementation(implementation: str) -> None:
    """Raises ValueError for a name that is not one of this file's, or of a backend with ``varlen``."""
    if implementation not in IMPLEMENTATIONS:
        known = [*IMPLEMENTATIONS, *(n for n, b in all_backends().items() if b.varlen is not None)]
        if implementation not in known:
            raise ValueError(f"quire::varlen_attention: implementation must be one of {', '.join(known)}; got "
                             f"{implementation!r}")


def _keep(n: int, m: int, device: torch.device, window: int | None, causal: bool) -> Tensor | None:
    """(n, m) mask of one sequence; None if every query sees every key."""
    if not causal and window is None:
        return None
    position, key = torch.arange(n, device=device)[:, None] + (m - n), torch.arange(m, device=device)
    keep = key <= position if causal else torch.ones(n, m, dtype=torch.bool, device=device)
    return keep if window is None else keep & ((key - position).abs() < window)


def varlen_attention_eager(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, *, scale: float,
                           window: int | None = None, softcap: float | None = None, causal: bool = False,
                           implementation: str = "auto") -> tuple[Tensor, Tensor]:
    """The definition of ``varlen_attention``, one sequence at a time: reads the lengths on the host."""
    _check(q, k, v, cu_seqlens_q, cu_seqlens_k, window, softcap, implementation)
    if implementation == "kernel":
        raise ValueError(f"quire::varlen_attention: implementation='kernel' runs on a GPU, and q is on {q.device}; use 'auto'")
    if implementation not in IMPLEMENTATIONS:
        backend = all_backends()[implementation]
        if why := backend.available(q.device):
            raise UnsupportedAttention(f"quire::varlen_attention: implementation={implementation!r} is not usable: {why}")
        own: Any = backend.varlen
        return own(q, k, v, cu_seqlens_q, cu_seqlens_k, scale=scale, window=window, softcap=softcap, causal=causal)
    heads, group = q.shape[1], q.shape[1] // k.shape[1]
    out = q.new_zeros(q.shape[0], heads, v.shape[2])
    lse = torch.full((q.shape[0], heads), float("-inf"), dtype=torch.float32, device=q.device)
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    starts_q, starts_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for a, b, c, d in zip(starts_q, starts_q[1:], starts_k, starts_k[1:], strict=False):
        if a == b or c == d:
            continue
        keep = _keep(b - a, d - c, q.device, window, causal)
        one_q, one_k, one_v = (x.transpose(0, 1) for x in (q[a:b], k[c:d], v[c:d]))
        if implementation == "sdpa":
            found = F.scaled_dot_product_attention(one_q[None], one_k[None], one_v[None], attn_mask=keep, scale=scale,
                                                   enable_gqa=group > 1)[0]
            out[a:b] = (found if keep is None else found.masked_fill(~keep.any(-1)[:, None], 0.0)).transpose(0, 1)
            lse[a:b] = float("nan")
            continue
        scores = scale * (one_q.to(wide) @ one_k.to(wide).repeat_interleave(group, 0).transpose(1, 2))
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if keep is not None:
            scores = scores.masked_fill(~keep, float("-inf"))
        total = log_sum_exp(scores)
        weights = torch.exp(scores - total.masked_fill(total == float("-inf"), 0.0))
        out[a:b] = (weights @ one_v.to(wide).repeat_interleave(group, 0)).transpose(0, 1).to(q.dtype)
        lse[a:b] = total[..., 0].transpose(0, 1)
    return out, lse


def varlen_attention_cuda(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, *, scale: float,
                          window: int | None = None, softcap: float | None = None, causal: bool = False,
                          implementation: str = "auto") -> tuple[Tensor, Tensor]:
    """``varlen_attention_eager`` as one Triton kernel, which reads the lengths on the device."""
    if implementation not in ("auto", "kernel"):
        return varlen_attention_eager(q, k, v, cu_seqlens_q, cu_seqlens_k, scale=scale, window=window, softcap=softcap,
                                      causal=causal, implementation=implementation)
    _check(q, k, v, cu_seqlens_q, cu_seqlens_k, window, softcap, implementation)
    tokens, heads, dim = q.shape
    if max(dim, v.shape[2]) > MAX_DIM:
        raise ValueError(f"quire::varlen_attention: head dims {dim}/{v.shape[2]}: the Triton kernel has up to {MAX_DIM}; use "
                         "implementation='sdpa'")
    out = q.new_empty(tokens, heads, v.shape[2])
    lse = torch.empty(tokens, heads, dtype=torch.float32, device=q.device)
    if not tokens:
        return out, lse
    q, k, v = map(host.rows_contiguous, (q, k, v))
    reqs, widest = cu_seqlens_q.shape[0] - 1, max(host.next_power_of_2(n, 16) for n in (dim, v.shape[2]))
    if q.dtype.itemsize == 4:
        (block_m, block_n), stages = ((32, 32) if widest <= 128 else (16, 16)), 3
    elif widest <= 128:
        block_m, block_n, stages = 128, 64, 3
    else:  # one program fits a multiprocessor; compiled for an H200, 160 of its 227 KiB
        block_m, block_n, stages = 128, 64 if v.shape[2] <= 128 else 32, 2
    # Blocks of queries are cut at sequence boundaries: sequence r has those from cu_seqlens_q[r] // block_m + r on.
    launch(host.kernel_module("kernels.varlen").varlen_kernel, (tokens // block_m + reqs + 1, heads), q, k, v, out, lse,
           cu_seqlens_q, cu_seqlens_k, tokens, reqs, scale, softcap, q.stride()[:2], k.stride()[:2], v.stride()[:2],
           heads // k.shape[1], dim, v.shape[2], window or 0, causal, block_m, block_n,
           num_warps=8 if block_m == 128 else 4, num_stages=stages)
    return out, lse


def _fake(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, *, window: int | None = None,
          softcap: float | None = None, implementation: str = "auto", **_: Any) -> tuple[Tensor, Tensor]:
    _check(q, k, v, cu_seqlens_q, cu_seqlens_k, window, softcap, implementation)
    return q.new_empty(q.shape[0], q.shape[1], v.shape[2]), q.new_empty(q.shape[0], q.shape[1], dtype=torch.float32)


define_op(
    "varlen_attention(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, *, float scale, "
    "int? window=None, float? softcap=None, bool causal=False, str implementation='auto') -> (Tensor, Tensor)",
    cpu=varlen_attention_eager, cuda=varlen_attention_cuda, fake=_fake, launches=True)


def varlen_attention(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
                     *, scale: float, window: int | None = None, softcap: float | None = None, causal: bool = False,
                     implementation: str = "auto") -> tuple[Tensor, Tensor]:
    """Attention over ragged sequences without a KV cache, by default not causal: encoders, vision towers, cross attention.
    ``torch.ops.quire.varlen_attention``.

    Args:
        q, k, v: (T, H, D), (N, Hkv, D), (N, Hkv, Dv); tokens after the last sequence are padding and give 0.
        cu_seqlens_q, cu_seqlens_k: (B + 1,) int32, exclusive prefix sums of the sequences' lengths.
        scale, softcap: as in ``attention.py``.  window, causal, implementation: see ``attn_ops/ops/varlen.py``.

    Returns (T, H, Dv) in q's dtype, and (T, H) float32 log-sum-exp, natural logarithm. Raises ValueError for shapes that do not
    go together, a window or softcap that is not positive, an implementation that is unknown or not usable on this device.
    """
    return torch.ops.quire.varlen_attention(q, k, v, cu_seqlens_q, cu_seqlens_k, scale=scale, window=window, softcap=softcap,
                                            causal=causal, implementation=implementation)
