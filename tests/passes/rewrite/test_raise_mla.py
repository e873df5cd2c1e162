"""The pass that raises MLA: it matches what it can prove, and leaves near misses as they are."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from quire.attn_ops.attention import Latent, attention
from quire.attn_ops.mla import mla_attention
from quire.passes.capture.paged_model import PagedModel
from quire.passes.fx import copy_graph
from quire.passes.options import QuireOptions
from quire.passes.rewrite.raise_mla import raise_mla
from quire.passes.verify.sites import site_nodes

HEADS, RANK, ROPE, NOPE, DIM_V = 4, 24, 8, 16, 12
Keys = Callable[..., tuple[torch.Tensor, torch.Tensor]]


class Layer(nn.Module):
    def __init__(self, keys: Keys, bias: bool = False) -> None:
        super().__init__()
        self.keys = keys
        self.q, self.kv_a = nn.Linear(32, HEADS * (NOPE + ROPE)), nn.Linear(32, RANK + ROPE)
        self.norm = nn.LayerNorm(RANK)
        self.kv_b = nn.Linear(RANK, HEADS * (NOPE + DIM_V), bias=bias)
        self.o = nn.Linear(HEADS * DIM_V, 32)
        self.scale = nn.Parameter(torch.full((), 1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.q(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        c, k_rope = self.kv_a(x).split([RANK, ROPE], dim=-1)
        k, v = self.keys(self, self.norm(c), torch.tanh(k_rope)[:, None])
        return x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Model(nn.Module):
    """Layers whose keys and values are made by ``keys(layer, c, k_rope)``."""

    def __init__(self, *keys: Keys, bias: bool = False) -> None:
        super().__init__()
        self.embed, self.place, self.head = nn.Embedding(30, 32), nn.Embedding(64, 32), nn.Linear(32, 30)
        self.layers = nn.ModuleList(Layer(each, bias) for each in keys)

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids) + self.place(position_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def by_head(layer: Layer, c: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return layer.kv_b(c).unflatten(-1, (HEADS, -1)).transpose(1, 2).split([NOPE, DIM_V], dim=-1)


def joined(k_nope: torch.Tensor, k_rope: torch.Tensor) -> torch.Tensor:
    return torch.cat([k_nope, k_rope.expand(*k_nope.shape[:-1], -1)], dim=-1)


def plain(layer: Layer, c: torch.Tensor, k_rope: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    k_nope, v = by_head(layer, c)
    return joined(k_nope, k_rope), v


def by_slices(layer: Layer, c: torch.Tensor, k_rope: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same in another spelling: written into fresh memory, sliced, permuted."""
    kv = layer.kv_b(c).view(1, -1, HEADS, NOPE + DIM_V).permute(0, 2, 1, 3)
    k = kv.new_empty(1, HEADS, kv.shape[2], NOPE + ROPE)
    k[..., :NOPE] = kv[..., :NOPE]
    k[..., NOPE:].copy_(k_rope)
    return k, kv[..., NOPE:].contiguous()


def latents(model: nn.Module) -> list[Latent | None]:
    torch.manual_seed(0)
    paged = PagedModel(model.eval(), QuireOptions(compiler="eager"))
    try:
        found = [site.latent for site in paged.sites]
        gm = copy_graph(paged.graph.raised)
        assert raise_mla(gm) == sum(each is not None for each in found)
        assert raise_mla(gm) == 0
        assert [n.target for n in site_nodes(gm.graph)] == [attention if x is None else mla_attention for x in found]
        inputs = [int(x) if isinstance(x, torch.SymInt) else x for x in paged.graph.inputs]
        with torch.no_grad():
            wanted, got = paged.graph.raised(*inputs)[0], gm(*inputs)[0]
        assert (got - wanted).abs().max() <= 1e-5 * wanted.abs().max()
        return found
    finally:
        paged.close()


def test_matches() -> None:
    """However it is spelled; the rewritten graph computes the same."""
    assert latents(Model(plain, by_slices, plain)) == [Latent(RANK, ROPE)] * 3


def of(change: Callable[..., tuple[torch.Tensor, torch.Tensor]]) -> Keys:
    """Keys and values by ``change(layer, k_nope, v, k_rope)``."""
    return lambda layer, c, k_rope: change(layer, *by_head(layer, c), k_rope)


def by_columns(layer: Layer, c: torch.Tensor, k_rope: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """All keys before all values, instead of head by head."""
    k_nope, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in layer.kv_b(c).split([HEADS * NOPE, HEADS * DIM_V], -1))
    return joined(k_nope, k_rope), v


def values_first(layer: Layer, c: torch.Tensor, k_rope: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    v, k_nope = layer.kv_b(c).unflatten(-1, (HEADS, -1)).transpose(1, 2).split([DIM_V, NOPE], dim=-1)
    return joined(k_nope, k_rope), v


def half_written(layer: Layer, c: torch.Tensor, k_rope: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The key is changed once more after it was filled."""
    k, v = by_slices(layer, c, k_rope)
    k[..., :2].mul_(2.0)
    return k, v


def adapted(layer: Layer, c: torch.Tensor, k_rope: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """An adapter beside kv_b."""
    kv = layer.kv_b(c) + 0.5 * F.linear(c, layer.kv_b.weight)
    k_nope, v = kv.unflatten(-1, (HEADS, -1)).transpose(1, 2).split([NOPE, DIM_V], dim=-1)
    return joined(k_nope, k_rope), v


def changed(layer: Layer, c: torch.Tensor, k_rope: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The latent vectors are changed in place after their product was taken."""
    k, v = plain(layer, c, k_rope)
    c.add_(1.0)
    return k, v


def changed_memory(layer: Layer, c: torch.Tensor, k_rope: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same through the memory that the latent vectors are a view of."""
    memory = torch.zeros_like(c)
    memory.copy_(c)
    k, v = plain(layer, memory[..., :], k_rope)
    memory.add_(1.0)
    return k, v


MISSES = (
    of(lambda layer, k, v, rope: (joined(k * layer.scale, rope), v)),
    of(lambda layer, k, v, rope: (joined(k, rope), v * layer.scale)),
    of(lambda layer, k, v, rope: (joined(torch.cat([-k.chunk(2, -1)[1], k.chunk(2, -1)[0]], -1), rope), v)),  # rotated
    of(lambda layer, k, v, rope: (torch.cat([rope.expand(*k.shape[:-1], -1), k], -1), v)),  # the rotary part first
    of(lambda layer, k, v, rope: (joined(k, rope), torch.cat([v[:, 1:], v[:, :1]], 1))),  # each head has another's value
    of(lambda layer, k, v, rope: (torch.cat([k, rope * torch.arange(1.0, HEADS + 1)[:, None, None]], -1), v)),  # by head
    by_columns, values_first, half_written, adapted, changed, changed_memory)


def test_near_misses_stay_dense() -> None:
    """Beside layers that do match: a wrong match would serve wrong tokens."""
    assert latents(Model(plain, *MISSES, plain)) == [Latent(RANK, ROPE), *[None] * len(MISSES), Latent(RANK, ROPE)]
    assert latents(Model(plain, bias=True)) == [None]


def test_latents_that_are_larger_stay_dense() -> None:
    """Where a latent vector takes more room than all keys and values, there is nothing to gain."""
    def wide(layer: Layer, c: torch.Tensor, k_rope: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return plain(layer, c.repeat(1, 1, 6), k_rope)

    model = Model(wide)
    model.layers[0].kv_b = nn.Linear(6 * RANK, HEADS * (NOPE + DIM_V), bias=False)
    assert 6 * RANK + ROPE >= HEADS * (NOPE + ROPE + DIM_V)
    assert latents(model) == [None]
