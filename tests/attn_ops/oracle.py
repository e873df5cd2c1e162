"""A plain fp32 oracle for paged attention, written apart from the library: one loop a sequence, a query, a head."""

from __future__ import annotations

import math

import torch


def oracle_attention(q, keys, values, *, scale, window=None, softcap=None, chunk=None, sinks=None):
    """One sequence. q (n, H, D) are the last n of the len(keys) tokens; keys (L, Hkv, D); values (L, Hkv, Dv)."""
    n, heads, _ = q.shape
    length, kv_heads = keys.shape[:2]
    out = torch.zeros(n, heads, values.shape[2], dtype=torch.float64)
    for i in range(n):
        pos = length - n + i
        first = 0
        if window is not None:
            first = max(first, pos - window + 1)
        if chunk is not None:
            first = max(first, pos // chunk * chunk)
        for h in range(heads):
            g = h // (heads // kv_heads)
            logits = (keys[first : pos + 1, g].double() @ q[i, h].double()) * scale
            if softcap is not None:
                logits = softcap * torch.tanh(logits / softcap)
            top = logits.max().item()
            if sinks is not None:
                top = max(top, sinks[h].item())
            e = torch.exp(logits - top)
            denominator = e.sum() + (math.exp(sinks[h].item() - top) if sinks is not None else 0.0)
            out[i, h] = (e[:, None] * values[first : pos + 1, g].double()).sum(0) / denominator
    return out


def quantized(x, dtype):
    """x (..., D) as a quantized cache must hold it: (codes in ``dtype``, scale (...) float32). By looking through all codes."""
    numbers = torch.arange(256, dtype=torch.uint8, device=x.device).view(dtype).float()
    even = torch.arange(256, device=x.device) % 2 == 0  # the last bit of a code is that of its mantissa
    fit = numbers.isfinite() & (numbers >= -numbers[numbers.isfinite()].max())  # int8: not -128
    fit &= (numbers != 0) | (torch.arange(256, device=x.device) == 0)  # one zero
    table, order = numbers[fit].sort()
    even, bits = even[fit][order], torch.arange(256, dtype=torch.uint8, device=x.device)[fit][order]
    x = x.float()
    scale = (x.abs().amax(-1).double() / table[-1].double()).float()  # one rounding more than float32's: none that shows
    scale = scale.clamp_min(2.0**-126)
    scale = torch.where(x.isfinite().all(-1), scale, math.nan)
    ratio = (x.double() / scale.double()[..., None]).float().clamp(-table[-1].item(), table[-1].item())
    above = torch.searchsorted(table, ratio.nan_to_num(nan=0.0).contiguous()).clamp_(1, len(table) - 1)
    low, high = table[above - 1].double(), table[above].double()
    up = ratio.double() - low - (high - ratio.double())  # > 0: nearer to the upper one
    at = torch.where((up > 0) | ((up == 0) & even[above]), above, above - 1)
    at = torch.where(scale.isnan()[..., None], torch.searchsorted(table, table.new_zeros(1)), at)
    return bits[at].view(dtype), scale
