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

from tests.adversarial import mixers, practice
from tests.adversarial.harness import Model

Tensor = torch.Tensor
Step = Callable[[Model, Tensor, Tensor, int], Tensor]  # (model, x (1, T, 16), positions (1, T), a small number)


def of(*tables: dict[str, Any]) -> dict[str, Step]:
    """Steps of tables, without what changes the model."""
    lasting = {"kept between calls", "counts calls", "written to a buffer"}
    return {name: lambda m, x, p, n, f=f: f(m, x, p) for table in tables for name, f in table.items() if name not in lasting}


#: Token by token.
ROW_WISE: dict[str, Step] = of(mixers.SERVED, practice.SERVED) | {
    "angles": lambda m, x, p, n: x * (p[..., None] * 0.2 + n).cos(),
    "angles of counted tokens": lambda m, x, p, n: x * (torch.arange(x.shape[1])[:, None] * 0.2 + n).cos(),
    "rows of a table, cut": lambda m, x, p, n: x + m.table[: x.shape[1], n : n + 1] * m.table[torch.arange(x.shape[1]) // 2],
    "where": lambda m, x, p, n: torch.where(x > 0.1 * n, x, x.tanh()),
    "a position": lambda m, x, p, n: x.masked_fill((p == n)[..., None], 0.3),
    "turned features": lambda m, x, p, n: torch.cat([x[..., n:], x[..., :n]], -1),
    "attention to a table": lambda m, x, p, n: F.scaled_dot_product_attention(x[:, None], *[m.table[None, None]] * 2)[:, 0],
    "cosines": lambda m, x, p, n: x * F.cosine_similarity(x, m.bias, dim=-1)[..., None],
    "buckets": lambda m, x, p, n: x + torch.bucketize(x, torch.linspace(-2, 2, 4 + n)) * m.scale * 0.1,
    "baddbmm": lambda m, x, p, n: torch.baddbmm(x, x, m.w[None], alpha=0.5),
    "hash": lambda m, x, p, n: x + m.table[(p * 31 + n) % 64] * ((p >> 1 & 1) == 0)[..., None],
    "one expert": lambda m, x, p, n: torch.where(((x @ m.w[:, :4]).argmax(-1) == n)[..., None], x @ m.experts[n], x),
    "complex": lambda m, x, p, n: torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (8, 2))).square()).flatten(2) * 0.2,
}
#: Attention over tokens that is not causal: the cache has a layer for it, of one head.
ATTENDING: dict[str, Step] = {
    "attention": lambda m, x, p, n: F.scaled_dot_product_attention(x, x, x),
    "attention, tokens as heads": lambda m, x, p, n: F.scaled_dot_product_attention(
        x[:, :, None], x[:, None], x[:, None])[:, :, 0],
}
#: Tokens meet.
MIXING: dict[str, Step] = of(mixers.MIXES) | ATTENDING | {
    "rows added": lambda m, x, p, n: x + torch.zeros_like(x).index_add(1, p[0] % x.shape[1], x),
    "viewed": lambda m, x, p, n: x.view(1, 16, -1).softmax(-1).view(x.shape) + x,
    "counted from the end": lambda m, x, p, n: x + m.table[x.shape[1] - 1 - torch.arange(x.shape[1]) + n],
    "a table, cut later": lambda m, x, p, n: x + m.table[n + 1 : x.shape[1] + n + 1],
    "power of the length": lambda m, x, p, n: x * (0.9 ** (x.numel() // 16)),
    "lerp": lambda m, x, p, n: torch.lerp(x, F.pad(x, (0, 0, 1, -1)), 0.3),
    "by residue": lambda m, x, p, n: x + torch.zeros(4, 16).scatter_reduce(
        0, (p[0] % 4)[:, None].expand(-1, 16), x[0], "amax")[p % 4],
    "bag": lambda m, x, p, n: F.embedding_bag(p, m.table)[:, None] + x,
    "vmap": lambda m, x, p, n: torch.vmap(lambda c: c - c.mean(), 1, 1)(x[0])[None],
}
#: A hole in memory: steps that change what they are given, in place.
IN_PLACE: dict[str, Step] = {
    "scaled": lambda m, x, p, n: x.clone().mul_(2).add_(m.bias),
    "filled": lambda m, x, p, n: x.clone().index_fill_(2, torch.tensor([n]), 0.5),
    "copied": lambda m, x, p, n: torch.zeros_like(x).copy_(x),
    "index_copy": lambda m, x, p, n: torch.empty_like(x).index_copy_(2, torch.arange(16).flip(0), x),
    "clamped": lambda m, x, p, n: x.clone().masked_fill_(x > n, 1.0).clamp_(min=-2),
    "index_add": lambda m, x, p, n: x.flip(-1).index_add_(2, torch.tensor([n]), x[..., :1]),
}
TABLES = {"row-wise": ROW_WISE, "in place": IN_PLACE, "mixing": MIXING}


def modules(most: int = 4) -> Any:
    """A list of (kind, name, number): a random module."""
    each = st.sampled_from(["row-wise"] * 6 + ["in place", "mixing"]).flatmap(
        lambda kind: st.tuples(st.just(kind), st.sampled_from(list(TABLES[kind])), st.integers(0, 3)))
    return st.lists(each, min_size=1, max_size=most)


def mixes(steps: list[tuple[str, str, int]]) -> bool:
    return any(kind == "mixing" for kind, _, _ in steps)


def mix_of(steps: list[tuple[str, str, int]]) -> Any:
    """The module as a function for ``harness.Model``."""
    def mix(m: Model, x: Tensor, p: Tensor) -> Tensor:
        for kind, name, number in steps:
            y = TABLES[kind][name](m, x, p, number)
            x = y / (1 + y.abs().amax(-1, keepdim=True) / 8)  # of order 1, token by token
        return x

    return mix
