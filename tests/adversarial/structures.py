"""Small models with attention as it is written for models: functions (model, ids (1, T), positions (1, T)) -> logits (1, T, V).

See ``test_practice.py``. ``MIXES`` must be refused. ``SERVED`` must be exact; with the layers, KV heads and head dimension of
its cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.adversarial.harness import DIM, HEADS, VOCAB, WIDTH, Model

Tensor = torch.Tensor
sdpa = F.scaled_dot_product_attention


def start(m: Model, ids: Tensor, p: Tensor) -> Tensor:
    return m.embed(ids) + m.place(p)


def heads(x: Tensor, number: int = HEADS) -> Tensor:
    return x.view(*x.shape[:2], number, -1).transpose(1, 2)


def qkv(m: Model, x: Tensor) -> list[Tensor]:
    return [heads(t) for t in m.attention.qkv(x).chunk(3, dim=-1)]


def merge(out: Tensor) -> Tensor:
    return out.transpose(1, 2).flatten(2)


def one(change: Callable[..., Any] = lambda m, x, p, q, k, v: (q, k, v), **options: Any) -> Callable[..., Tensor]:
    """A layer of causal attention with ``change(model, x, positions, q, k, v)`` before it."""
    def forward(m: Model, ids: Tensor, p: Tensor) -> Tensor:
        x = start(m, ids, p)
        q, k, v = change(m, x, p, *qkv(m, x))
        return m.head(x + merge(sdpa(q, k, v, **{"is_causal": True, **options}))[..., :WIDTH])

    return forward


def twice(second: Callable[..., Any]) -> Callable[..., Tensor]:
    """Two layers; ``second(model, x, first x, q, k, v of the first)`` gives queries, keys and values of the second."""
    def forward(m: Model, ids: Tensor, p: Tensor) -> Tensor:
        first = start(m, ids, p)
        given = qkv(m, first)
        x = first + merge(sdpa(*given, is_causal=True))
        return m.head(x + merge(sdpa(*second(m, x, first, *given), is_causal=True)))

    return forward


def few(m: Model, x: Tensor, number: int = 2) -> list[Tensor]:
    """Keys and values of ``number`` heads."""
    return [heads(t[..., : number * DIM], number) for t in m.attention.qkv(x).chunk(3, dim=-1)[1:]]


def rotated(t: Tensor, angles: Tensor) -> Tensor:
    c, s = angles.cos(), angles.sin()
    return torch.cat([t[..., :2] * c - t[..., 2:] * s, t[..., 2:] * c + t[..., :2] * s], -1)


def rope(angles: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    return one(lambda m, x, p, q, k, v: (rotated(q, angles(x, p)), rotated(k, angles(x, p)), v))


FREQUENCIES = torch.tensor([1.0, 0.1])


def folded(dims: int) -> Callable[..., Tensor]:
    """Attention of (H, S, D) or (S, D)."""
    def forward(m: Model, ids: Tensor, p: Tensor) -> Tensor:
        x = start(m, ids, p)
        if dims == 2:
            return m.head(x + sdpa(*(t[0] for t in m.attention.qkv(x).chunk(3, -1)), is_causal=True)[None])
        mask = p[0][:, None] >= p[0]
        return m.head(x + merge(sdpa(*(t[0] for t in qkv(m, x)), attn_mask=mask)[None]))

    return forward


def over_heads_too(m: Model, ids: Tensor, p: Tensor) -> Tensor:
    x = start(m, ids, p)
    h = x.unflatten(-1, (HEADS, DIM))
    x = x + sdpa(h, h, h).flatten(2)
    return m.head(x + merge(sdpa(*qkv(m, x), is_causal=True)))


def differential(m: Model, ids: Tensor, p: Tensor) -> Tensor:
    x = start(m, ids, p)
    q, k, v = qkv(m, x)
    return m.head(x + merge(sdpa(q, k, v, is_causal=True) - m.scale[0] * sdpa(k, q, v, is_causal=True)))


def multihead() -> Callable[..., Tensor]:
    torch.manual_seed(1)
    module = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True).eval().requires_grad_(False)

    def forward(m: Model, ids: Tensor, p: Tensor) -> Tensor:
        x = start(m, ids, p)
        return m.head(x + module(x, x, x, need_weights=False)[0])

    return forward


def by_hand(m: Model, ids: Tensor, p: Tensor) -> Tensor:
    x = start(m, ids, p)
    q, k, v = qkv(m, x)
    scores = 5 * (q @ k.mT / 10).tanh()
    return m.head(x + merge(scores.masked_fill(p[0][:, None] < p[0], -math.inf).softmax(-1) @ v))


def before(change: Callable[[Model, Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    """``change(model, ids, x)`` before a layer."""
    def forward(m: Model, ids: Tensor, p: Tensor) -> Tensor:
        x = change(m, ids, start(m, ids, p))
        return m.head(x + merge(sdpa(*qkv(m, x), is_causal=True)))

    return forward


def behind(change: Callable[[Model, Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    """``change(model, ids, logits)`` behind a layer."""
    def forward(m: Model, ids: Tensor, p: Tensor) -> Tensor:
        x = start(m, ids, p)
        return change(m, ids, m.head(x + merge(sdpa(*qkv(m, x), is_causal=True))))

    return forward


def moved_in_place(m: Model, ids: Tensor, p: Tensor) -> Tensor:
    """As models do that keep an offset in their position embedding."""
    p += 2
    return m.head(start(m, ids, p) + merge(sdpa(*qkv(m, start(m, ids, p)), is_causal=True)))


def keys_changed(m: Model, ids: Tensor, p: Tensor) -> Tensor:
    """The second call reads other keys, of the same name."""
    x = start(m, ids, p)
    q, k, v = qkv(m, x)
    first = sdpa(q, k, v, is_causal=True)
    k.mul_(2)
    return m.head(x + merge(first + sdpa(q, k, v, is_causal=True)))


def scaled_in_place(m: Model, x: Tensor, p: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """What is written into the repeated values is in the result: they are not taken back to those before it."""
    k, v = (t.repeat_interleave(2, 1) for t in few(m, x))
    v.mul_(m.scale[:4].view(1, 4, 1, 1))
    return q, k, v


# fmt: off
MIXES = {
    "another path for one token": before(lambda m, ids, x: x * 3 if x.shape[1] == 1 else x),
    "scale by the length": lambda m, ids, p: one(scale=1 / math.sqrt(p.shape[1]))(m, ids, p),
    "queries by the length": one(lambda m, x, p, q, k, v: (q * math.log(x.shape[1] + 1), k, v)), "dropout": one(dropout_p=0.5),
    "not causal": one(is_causal=False), "causal when long": lambda m, ids, p: one(is_causal=p.shape[1] > 6)(m, ids, p),
    "keys by convolution": one(lambda m, x, p, q, k, v: (q, heads(F.conv1d(F.pad(x.mT, (2, 0)), m.conv.weight).mT), v)),
    "keys shifted": one(lambda m, x, p, q, k, v: (q, torch.cat([k[:, :, :1], k[:, :, :-1]], 2), v)),
    "every second key": one(lambda m, x, p, q, k, v: (q, k[:, :, ::2], v[:, :, ::2]), is_causal=False),
    "the first key": one(lambda m, x, p, q, k, v: (q, k[:, :, :1], v[:, :, :1]), is_causal=False),
    "keys of other tokens": one(lambda m, x, p, q, k, v: (q, k.index_select(2, p[0] // 2), v)),
    "tokens as heads": one(lambda m, x, p, q, k, v: [t.transpose(1, 2) for t in (q, k, v)], is_causal=True),
    "rotation by row numbers from the end": rope(lambda x, p: torch.arange(x.shape[1]).flip(0)[:, None] * FREQUENCIES),
    "rotation by the longest": rope(lambda x, p: p[:, None, :, None] * FREQUENCIES / (p.max() / 4.0).clamp(min=1.0)),
    "MultiheadAttention, not causal": multihead(),
    "bigram": before(lambda m, ids, x: x + m.table[(ids * 7 + F.pad(ids, (1, 0))[:, :-1]) % 64]),
    "documents by ids": before(lambda m, ids, x: x + m.table[(ids == 3).cumsum(1)]),
    "any id": before(lambda m, ids, x: x * torch.where((ids == 31).any(), 2.0, 1.0)),
    "counted ids": before(lambda m, ids, x: x + (F.one_hot(ids, VOCAB).sum(1) @ m.table[:VOCAB])[:, None] * 0.1),
    "repetition penalty": behind(lambda m, ids, y: y - torch.zeros(1, VOCAB).scatter(1, ids, 1.0)[:, None] * 0.5),
    "logits centered": behind(lambda m, ids, y: y - y.mean(1, keepdim=True)),
    "logits by the largest": behind(lambda m, ids, y: y / y.abs().amax()),
}
SERVED = {
    "the same layer twice": (twice(lambda m, x, first, q, k, v: qkv(m, x)), (2, 4, 4)),
    "keys and values shared": (twice(lambda m, x, first, q, k, v: (qkv(m, x)[0], k, v)), (2, 4, 4)),
    "keys of the embeddings": (twice(lambda m, x, first, q, k, v: (qkv(m, x)[0], *qkv(m, first)[1:])), (2, 4, 4)),
    "keys changed in place": (keys_changed, (2, 4, 4)),
    "positions changed in place": (moved_in_place, (1, 4, 4)),
    "value residual": (twice(lambda m, x, first, q, k, v: (*qkv(m, x)[:2], 0.5 * v + 0.5 * qkv(m, x)[2])), (2, 4, 4)),
    "differential": (differential, (2, 4, 4)),
    "attention over heads before": (over_heads_too, (1, 4, 4)),
    "(H, S, D)": (folded(3), (1, 4, 4)),
    "(S, D)": (folded(2), (1, 1, 16)),
    "expanded keys": (one(lambda m, x, p, q, k, v: (q, *(t[:, :, None].expand(-1, -1, 2, -1, -1).reshape(1, 4, -1, DIM)
                                                         for t in few(m, x)))), (1, 2, 4)),
    "enable_gqa": (one(lambda m, x, p, q, k, v: (q, *few(m, x)), enable_gqa=True), (1, 2, 4)),
    "tiled keys": (one(lambda m, x, p, q, k, v: (q, *(t.repeat(1, 2, 1, 1) for t in few(m, x)))), (1, 4, 4)),
    "one key head": (one(lambda m, x, p, q, k, v: (q, *few(m, x, 1))), (1, 1, 4)),
    "repeated and scaled": (one(lambda m, x, p, q, k, v: (q, *(
        t.repeat_interleave(2, 1) * m.scale[:4].view(1, 4, 1, 1) for t in few(m, x)))), (1, 4, 4)),
    "repeated, values scaled in place": (one(scaled_in_place), (1, 4, 4)),
    "scale": (one(scale=0.3), (1, 4, 4)),
    "scale learned, in the queries": (one(lambda m, x, p, q, k, v: (q * m.scale[0], k, v)), (1, 4, 4)),
    "queries by position": (one(lambda m, x, p, q, k, v: (q * (p + 2).float().log()[:, None, :, None], k, v)), (1, 4, 4)),
    "normalized": (one(lambda m, x, p, q, k, v: (F.rms_norm(q, (DIM,)), F.normalize(k, dim=-1), v)), (1, 4, 4)),
    "keys as values": (one(lambda m, x, p, q, k, v: (q, k, k)), (1, 4, 4)),
    "rotation": (rope(lambda x, p: p[:, None, :, None] * FREQUENCIES), (1, 4, 4)),
    "hash of ids": (before(lambda m, ids, x: x + m.table[(ids * 31 + 7) % 64] + m.table[ids ^ 5]), (1, 4, 4)),
    "a row for one id": (before(lambda m, ids, x: torch.where((ids == 3)[..., None], m.table[0], x)), (1, 4, 4)),
    "with softcap by hand": (by_hand, (1, 4, 4)),
    "softcap of logits": (behind(lambda m, ids, y: 5 * (y / 5).tanh()), (1, 4, 4)),
    "rotation by row numbers": (rope(lambda x, p: torch.arange(x.shape[1])[:, None] * FREQUENCIES), (1, 4, 4)),
}
# fmt: on


class Structure(Model):
    """A model whose forward is ``mix``."""

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        assert self.mix is not None
        return self.mix(self, input_ids, position_ids)
