"""A layer of attention with rotated q and k, for the tests of the rope fusion: in many spellings, run in a paged step."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from quire.attn_ops.kv_cache import PagedKVCache
from quire.attn_ops.metadata import CommonAttentionMetadata
from quire.attn_ops.step import Step, running
from quire.passes.backend import QuireBackend
from quire.passes.fusions.base import Fusion
from quire.passes.fusions.rope import fuse_rope
from quire.passes.options import QuireOptions

HEADS, KV_HEADS, DIM, HIDDEN = 4, 2, 8, 16


def rotate_half(x: torch.Tensor) -> torch.Tensor:
    return torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), dim=-1)


def plain(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return x * cos + rotate_half(x) * sin


def partial(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    size = cos.shape[-1]
    return torch.cat([plain(x[..., :size], cos, sin), x[..., size:]], dim=-1)


def uneven(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:  # not halves
    return x * cos + torch.cat((-x[..., 2:], x[..., :2]), dim=-1) * sin


def halves(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:  # gpt-oss
    first, second = torch.chunk(x, 2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def interleaved(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:  # GPT-J's order, Cohere's words
    x = x.float()
    turned = torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
    return (x * cos + turned * sin).to(cos.dtype)


def glm(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    cos, sin = (t[..., : t.shape[-1] // 2].repeat_interleave(2, dim=-1) for t in (cos, sin))
    x, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    turned = torch.stack((-x[..., 1::2], x[..., 0::2]), dim=-1).flatten(-2)
    return torch.cat([x * cos + turned * sin, rest], dim=-1)


def complex_numbers(x: torch.Tensor, freqs: torch.Tensor, _: torch.Tensor) -> torch.Tensor:  # Llama 4
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * freqs).flatten(3).type_as(x)


class HeadNorm(nn.Module):
    """RMSNorm of each head; ``kind``: as Llama writes it, or Gemma 3, or without weights."""

    def __init__(self, eps: float = 1e-6, kind: str = "llama") -> None:
        super().__init__()
        self.weight, self.eps, self.kind = nn.Parameter(torch.rand(DIM) + 0.5), eps, kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        if self.kind == "gemma":
            return (wide * (1.0 + self.weight.float())).type_as(x)
        return wide.type_as(x) if self.kind == "none" else self.weight * wide.to(x.dtype)


class Rotary(nn.Module):
    """One layer of attention with rotated q and k.

    Args:
        turn: (x, cos, sin) -> rotated x.
        tables: "full" (B, S, rotary), "half" (B, S, rotary / 2), "neighbours" (full, each angle twice in a row) or "complex".
        rotary: dimensions that turn.
        norms: eps of the norms of q and k, if any; ``kind`` as in HeadNorm.
        norm_after: they are of the rotated heads.
        late: heads and tokens are transposed after the rotation.
    """

    def __init__(self, turn=plain, *, tables: str = "full", rotary: int = DIM, norms: tuple[float, ...] = (),
                 kind: str = "llama", norm_after: bool = False, late: bool = False, own_tables: bool = False,
                 keys_too: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.turn, self.kind_of_tables, self.rotary, self.own_tables = turn, tables, rotary, own_tables
        self.norm_after, self.late, self.keys_too = norm_after, late, keys_too
        self.qkv = nn.Linear(HIDDEN, (HEADS + 2 * KV_HEADS) * DIM, bias=False)
        self.norms = nn.ModuleList(HeadNorm(eps, kind) for eps in norms)

    def tables(self, position_ids: torch.Tensor, base: float) -> tuple[torch.Tensor, torch.Tensor]:
        frequency = base ** -(torch.arange(self.rotary // 2) / self.rotary)
        angles, heads_dim = position_ids[..., None] * frequency, 2 if self.late else 1
        if self.kind_of_tables == "complex":
            freqs = torch.polar(torch.ones_like(angles), angles).unsqueeze(heads_dim)
            return freqs, freqs
        if self.kind_of_tables == "neighbours":
            angles = angles.repeat_interleave(2, dim=-1)
        elif self.kind_of_tables == "full":
            angles = angles.repeat(1, 1, 2)
        dtype = self.qkv.weight.dtype
        return angles.cos().to(dtype).unsqueeze(heads_dim), angles.sin().to(dtype).unsqueeze(heads_dim)

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor, tables: Any = None) -> Any:
        q, k, v = (t.view(1, x.shape[1], -1, DIM) for t in self.qkv(x).split([HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM], -1))
        if len(self.norms) and not self.norm_after:
            q, k = self.norms[0](q), self.norms[1](k)
        if not self.late:
            q, k = q.transpose(1, 2), k.transpose(1, 2)
        tables = tables or self.tables(position_ids, 100.0)
        q, k = self.turn(q, *tables), self.turn(k, *(self.tables(position_ids, 50.0) if self.own_tables else tables))
        if len(self.norms) and self.norm_after:
            q, k = self.norms[0](q), self.norms[1](k)
        if self.late:
            q, k = q.transpose(1, 2), k.transpose(1, 2)
        v = v.transpose(1, 2)
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2).flatten(2)
        return (out, k) if self.keys_too else out


def runs(model: nn.Module, *fusions: str, compiler: str = "eager", attention: str = "torch_native"
         ) -> list[tuple[Any, torch.Tensor, torch.Tensor]]:
    """(lowered graph, result, keys cached) of two ragged rows of 9 and 4 tokens, with each set of fusions on one trace."""
    torch._dynamo.reset()
    backend, x = QuireBackend(QuireOptions(compiler=compiler)), torch.randn(
        1, 13, HIDDEN, generator=torch.Generator().manual_seed(1)).to(next(model.parameters()).dtype)
    meta = CommonAttentionMetadata.build([9, 4], [9, 4], [[1, 2, 3], [4]], page_size=4)
    found = []
    with torch.no_grad():
        torch._dynamo.mark_dynamic(x, 1)
        positions = meta.positions[None]
        torch._dynamo.mark_dynamic(positions, 1)
        compiled = torch.compile(model, backend=backend, fullgraph=True)
        compiled(x, positions)
        (graph,) = backend.graphs
        for names in fusions:
            graph.options = QuireOptions(compiler=compiler, fusions=names)
            graph.compilations.clear()
            cache = PagedKVCache.for_sites(graph.sites, num_pages=6, page_size=4, device="cpu")
            step = Step(cache, meta, attention=attention)
            with running(step):
                out = compiled(x, positions)
            found.append((graph.compiled(step).lowered, out[0] if isinstance(out, tuple) else out, cache.k[0]))
    return found


def matches(model: nn.Module) -> int:
    ((lowered, _, _),) = runs(model, "none")
    return fuse_rope(Fusion(lowered.gm, backend=lowered.target.backend))


def same(model: nn.Module, fusions: str = "rope") -> Any:
    """The fused graph, whose numbers are those of the plain one. float32: two products and a sum of numbers of order 1, then
    attention over 9 of them."""
    (_, wanted, keys), (lowered, got, new_keys) = runs(model, "none", fusions)
    torch.testing.assert_close(got, wanted, atol=1e-5, rtol=0)
    torch.testing.assert_close(new_keys, keys, atol=1e-6, rtol=0)
    assert keys.flatten(2).any(-1).sum() == 13
    return lowered
