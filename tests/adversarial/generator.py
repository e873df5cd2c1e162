"""Random small modules: rows of operators that keep tokens apart or mix them, around one attention.

Each module is a list of steps, so that hypothesis can shrink it. ``mixes`` is what we know of it by construction, to count what
is refused though harmless; what is checked does not depend on it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st

from tests.adversarial.harness import Model

Tensor = torch.Tensor
Step = Callable[[Model, Tensor, Tensor, int], Tensor]  # (model, x (1, T, 16), positions (1, T), a small number)


def _reduce(dim: int) -> list[Step]:
    """Statistics along one dimension, broadcast back."""
    return [
        lambda m, x, p, n: x - x.mean(dim, keepdim=True),
        lambda m, x, p, n: x * x.softmax(dim),
        lambda m, x, p, n: x + 0.1 * x.cumsum(dim),
        lambda m, x, p, n: x / (1 + x.std(dim, keepdim=True)),
        lambda m, x, p, n: x - x.amax(dim, keepdim=True),
        lambda m, x, p, n: x + x.roll(1 + n, dim),
        lambda m, x, p, n: x + x.flip(dim),
        lambda m, x, p, n: x + x.sort(dim)[0],
        lambda m, x, p, n: x + x.argsort(dim) * 0.1,
        lambda m, x, p, n: F.normalize(x, dim=dim) * 2,
        lambda m, x, p, n: x - x.logsumexp(dim, keepdim=True),
        lambda m, x, p, n: x + x.topk(2, dim)[0].sum(dim, keepdim=True),
        lambda m, x, p, n: x + x.median(dim, keepdim=True)[0],
        lambda m, x, p, n: x * (1.0 + (x > 1).any(dim, keepdim=True)),
        lambda m, x, p, n: x + x.select(dim, n % 2).unsqueeze(dim),
        lambda m, x, p, n: x + x.narrow(dim, 0, 1),
        lambda m, x, p, n: x + x.index_select(dim, torch.tensor([1])),
        lambda m, x, p, n: x + x.argmax(dim, keepdim=True) * 0.1,
        lambda m, x, p, n: x + torch.fft.fft(x, dim=dim).real * 0.1,
        lambda m, x, p, n: x * x.abs().sum(dim, keepdim=True).rsqrt(),
        lambda m, x, p, n: x - x.quantile(0.3, dim=dim, keepdim=True),
        lambda m, x, p, n: x + F.pad(x.diff(dim=dim), (0, 0, 1, 0) if dim == 1 else (1, 0)),
        lambda m, x, p, n: x + x.cummax(dim)[0] * 0.5,
        lambda m, x, p, n: x + x.movedim(dim, 0).unfold(0, 2, 1).sum((0, -1)).unsqueeze(dim) * 0.1,
        lambda m, x, p, n: x + x.logcumsumexp(dim) * 0.1,
        lambda m, x, p, n: x * x.sigmoid().cumprod(dim),
        lambda m, x, p, n: x - x.kthvalue(1, dim, keepdim=True)[0],
        lambda m, x, p, n: x / (1 + torch.linalg.vector_norm(x, 1 + n, dim, keepdim=True)),
        lambda m, x, p, n: x + x.log_softmax(dim) * 0.1,
        lambda m, x, p, n: x + x.tanh().prod(dim, keepdim=True),
        lambda m, x, p, n: x - x.aminmax(dim=dim, keepdim=True)[0],
        lambda m, x, p, n: x * (1 + torch.count_nonzero(x > 0, dim=dim).unsqueeze(dim) * 0.1),
        lambda m, x, p, n: x + x.gather(dim, x.argsort(dim)),
        lambda m, x, p, n: x + torch.zeros_like(x).scatter(dim, x.topk(1, dim)[1], 1.0),
        lambda m, x, p, n: x + x.swapaxes(dim, -1).cumsum(-1).swapaxes(dim, -1) * 0.1,
        lambda m, x, p, n: x - torch.trapezoid(x, dim=dim).unsqueeze(dim) * 0.1,
        lambda m, x, p, n: x + torch.cat([x.narrow(dim, 0, 1), x.narrow(dim, 0, 1)], dim).mean(dim, keepdim=True),
    ]


#: Token by token.
ROW_WISE: list[Step] = [
    *_reduce(-1),
    lambda m, x, p, n: x @ m.w,
    lambda m, x, p, n: F.linear(x, m.w, m.bias),
    lambda m, x, p, n: F.layer_norm(x, (16,), m.scale),
    lambda m, x, p, n: F.rms_norm(x, (16,)),
    lambda m, x, p, n: F.gelu(x) + F.silu(x) * 0.5,
    lambda m, x, p, n: x + m.table[p],
    lambda m, x, p, n: x * (p[..., None] * 0.2 + n).cos(),
    lambda m, x, p, n: torch.where(x > 0.1 * n, x, x.tanh()),
    lambda m, x, p, n: x.view(1, -1, 4, 4).transpose(1, 2).tanh().transpose(1, 2).reshape(x.shape),
    lambda m, x, p, n: m.point(x.mT).mT,
    lambda m, x, p, n: x.unflatten(-1, (4, 4)).softmax(2).flatten(2) + x,
    lambda m, x, p, n: torch.cat([x[..., n:], x[..., :n]], -1),
    lambda m, x, p, n: sum(x.split(8, -1)).repeat(1, 1, 2),
    lambda m, x, p, n: torch.einsum("bthd,hde->bthe", x.unflatten(-1, (4, 4)), m.experts[:, :4, :4]).flatten(2) + x,
    lambda m, x, p, n: (x.unflatten(-1, (4, 4)) @ x.unflatten(-1, (4, 4)).mT).flatten(2) * 0.1,
    lambda m, x, p, n: torch.einsum("bte,btd,edf->btf", (x @ m.w[:, :4]).softmax(-1), x, m.experts),
    lambda m, x, p, n: torch.bmm(x[0][:, None], m.experts[(x[0] @ m.w[:, :4]).argmax(-1)])[:, 0][None],
    lambda m, x, p, n: x.masked_fill((p == n)[..., None], 0.3),
    lambda m, x, p, n: x.flatten(0, 1)[None],
    lambda m, x, p, n: (x[0].T * 2).T[None],
    lambda m, x, p, n: x[:, :, None].expand(-1, -1, 3, -1).flatten(1, 2).sin().view(1, -1, 3, 16).sum(2),
    lambda m, x, p, n: x + F.one_hot(x.argmax(-1), 16),
    lambda m, x, p, n: x * m.w.softmax(0).amax(0) + m.bias.cumsum(0) * 0.1,
    lambda m, x, p, n: m.w[torch.cdist(x, m.w[None]).argmin(-1)] + x,
    lambda m, x, p, n: F.scaled_dot_product_attention(*[x.unflatten(-1, (4, 4))] * 3, is_causal=n > 1).flatten(2),
    lambda m, x, p, n: F.scaled_dot_product_attention(x[:, None], *[m.table[None, None]] * 2)[:, 0],
    lambda m, x, p, n: (x / x.abs().amax(-1, keepdim=True) * 127).round() * x.abs().amax(-1, keepdim=True) / 127,
    lambda m, x, p, n: x * F.cosine_similarity(x, m.bias, dim=-1)[..., None],
    lambda m, x, p, n: torch.addcmul(x, torch.bucketize(x, torch.linspace(-2, 2, 4 + n)).float(), m.scale, value=0.1),
    lambda m, x, p, n: torch.baddbmm(x, x, m.w[None], alpha=0.5),
    lambda m, x, p, n: x + m.table[(p * 31 + n) % 64] * ((p >> 1 & 1) == 0)[..., None],
    lambda m, x, p, n: torch.where(((x @ m.w[:, :4]).argmax(-1) == n)[..., None], x @ m.experts[n], x),
    lambda m, x, p, n: torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (8, 2))).square()).flatten(2) * 0.2,
    lambda m, x, p, n: F.max_pool2d(x[None], (1, 3), 1, (0, 1))[0] + F.local_response_norm(x.mT, 3).mT,
    lambda m, x, p, n: (x.diag_embed() @ m.w).sum(-2),
]
#: Tokens meet.
MIXING: list[Step] = [
    *_reduce(1),
    lambda m, x, p, n: x * x.mean().sigmoid(),
    lambda m, x, p, n: x + torch.zeros_like(x).index_add(1, p[0] % x.shape[1], x),
    lambda m, x, p, n: x @ (x.mT @ x) * 0.05,
    lambda m, x, p, n: (x @ x.mT).softmax(-1) @ x,
    lambda m, x, p, n: m.conv(x.mT).mT,
    lambda m, x, p, n: m.group(x.mT).mT,
    lambda m, x, p, n: x / x.shape[1],
    lambda m, x, p, n: x + m.table[torch.arange(x.shape[1])],
    lambda m, x, p, n: x * (1 + p.max()),
    lambda m, x, p, n: x + x[:, :1],
    lambda m, x, p, n: x + x.mT.reshape(x.shape),
    lambda m, x, p, n: x.view(1, 16, -1).softmax(-1).view(x.shape) + x,
    lambda m, x, p, n: torch.lerp(x, F.pad(x, (0, 0, 1, -1)), 0.3),
    lambda m, x, p, n: x + m.table[(p == 0).cumsum(1)],
    lambda m, x, p, n: x + m.table[p - p[:, :1]],
    lambda m, x, p, n: torch.where((p == p.max())[..., None], -x, x),
    lambda m, x, p, n: x * (1 + x.stride(0) * 0.01),
    lambda m, x, p, n: x * (0.9 ** (x.numel() // 16)),
    lambda m, x, p, n: x[:, p[0].argsort()],
    lambda m, x, p, n: x + torch.zeros(4, 16).scatter_reduce(0, (p[0] % 4)[:, None].expand(-1, 16), x[0], "amax")[p % 4],
    lambda m, x, p, n: (0.5 ** (p[0][:, None] - p[0]).abs()).tril() @ x,
    lambda m, x, p, n: x @ torch.cov(x[0].T) * 0.1 if n > 3 else x @ (x[0].T @ x[0]) * 0.1,
    lambda m, x, p, n: F.scaled_dot_product_attention(x, x, x),
    lambda m, x, p, n: F.scaled_dot_product_attention(x[:, :, None], x[:, None], x[:, None])[:, :, 0],
    lambda m, x, p, n: F.avg_pool2d(x[None], (3, 1), 1, (1, 0))[0],
    lambda m, x, p, n: F.local_response_norm(x, 3),
    lambda m, x, p, n: F.embedding_bag(p, m.table)[:, None] + x,
    lambda m, x, p, n: x + torch.cdist(x, x).mean(-1, keepdim=True),
    lambda m, x, p, n: torch.vmap(lambda c: c - c.mean(), 1, 1)(x[0])[None],
]
#: A hole in memory: steps that change what they are given, in place.
IN_PLACE: list[Step] = [
    lambda m, x, p, n: x.clone().mul_(2).add_(m.bias),
    lambda m, x, p, n: x.clone().index_fill_(2, torch.tensor([n]), 0.5),
    lambda m, x, p, n: torch.zeros_like(x).copy_(x),
    lambda m, x, p, n: torch.empty_like(x).index_copy_(2, torch.arange(16).flip(0), x),
    lambda m, x, p, n: x.clone().masked_fill_(x > n, 1.0).clamp_(min=-2),
    lambda m, x, p, n: x.flip(-1).index_add_(2, torch.tensor([n]), x[..., :1]),
]


def modules(most: int = 4) -> Any:
    """A list of (kind, which, number): a random module."""
    tables = {"row-wise": ROW_WISE, "in place": IN_PLACE, "mixing": MIXING}
    each = st.sampled_from(["row-wise"] * 6 + ["in place", "mixing"]).flatmap(
        lambda kind: st.tuples(st.just(kind), st.integers(0, len(tables[kind]) - 1), st.integers(0, 3)))
    return st.lists(each, min_size=1, max_size=most)


def mixes(steps: list[tuple[str, int, int]]) -> bool:
    return any(kind == "mixing" for kind, _, _ in steps)


def mix_of(steps: list[tuple[str, int, int]]) -> Any:
    """The module as a function for ``harness.Model``."""
    tables = {"row-wise": ROW_WISE, "in place": IN_PLACE, "mixing": MIXING}

    def mix(m: Model, x: Tensor, p: Tensor) -> Tensor:
        for kind, which, number in steps:
            y = tables[kind][which](m, x, p, number)
            x = y / (1 + y.abs().amax(-1, keepdim=True) / 8)  # of order 1, token by token
        return x

    return mix
