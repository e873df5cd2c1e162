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
