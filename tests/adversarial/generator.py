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
]
#: A hole in memory: steps that change what they are given, in place.
IN_PLACE: list[Step] = [
    lambda m, x, p, n: x.clone().mul_(2).add_(m.bias),
    lambda m, x, p, n: x.clone().index_fill_(2, torch.tensor([n]), 0.5),
    lambda m, x, p, n: torch.zeros_like(x).copy_(x),
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
