"""The conformance kit for MLA on the latent cache (``attn_ops/mla.py``): the checks of ``mla_op``.

The expected output is that of ``mla_attention_eager`` in float64, sequence by sequence. Bound on the error, with u = eps / 2 of
the dtype: absorbing a query rounds it, which moves a score by at most delta = scale * u * sum |W_UK^T q| |c|, and an output by
2 * delta * sum p |v|; weights and latent outputs are rounded, u each of |W_UV| sum p |c|; and so is the output. A backend that
expands rounds keys and values instead, within the same bound. Sums in float32 get 1e-5 of |W_UV| sum p |c|. Latent vectors that
are read back from codes may be rounded to the dtype before they are expanded: u once more, of scores and of |W_UV| sum p |c|.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from quire.attn_ops.attention import AttentionSite, Latent, attention_eager
from quire.attn_ops.backend import dtype_name
from quire.attn_ops.conformance import sweeps
from quire.attn_ops.conformance.batches import Batch, Failure, bits, planned, prepared, scattered
from quire.attn_ops.conformance.checks import DECODE, MIXED, PREFILL, Kit, Rows, Skip, full_pages
from quire.attn_ops.kv_cache import Layout, PagedKVCache
from quire.attn_ops.kv_quant import QUANTIZED_KV_DTYPES, quantize
from quire.attn_ops.mla import mla_attention_eager, read_latent, split_weight

LATENTS = (Latent(16, 8), Latent(256, 32), Latent(512, 64))
HEADS = (1, 4, 16, 40, 128)
NOPE, DIM_V = 16, 24  # Dn and Dv; kernels see the absorbed dims
#: A sequence long enough that its keys are split, beside a chunk with a cached prefix.
LONG = ((1, 700), (5, 400), (1, 3))


@dataclass
class MlaBatch(Batch):
    """``new_k`` (T, 1, rank + R) is [c, k_rope]; there is no ``new_v``."""

    kv_b: Tensor | None = None

    def arguments(self, prepared: Sequence[Tensor] = ()) -> tuple[Any, ...]:
        assert self.site.latent is not None
        c, k_rope = self.new_k[:, 0].split(self.site.latent, dim=1)
        scales = self.cache.of_layer(0)[2:] if self.cache.quantized else ()
        return (self.q, c, k_rope, self.kv_b, self.cache.k[0], *self.tables, list(prepared), *scales)

    def stored_new(self, count: int) -> dict[str, Tensor]:
        return self.store(self.new_k[:count])[0]

    def store(self, tokens: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """Tokens (N, 1, rank + R) as the cache holds them, by the names of ``held``, and as they read back."""
        assert self.site.latent is not None
        if not self.cache.quantized:
            return {"key": tokens}, tokens
        (c, c_scale), (rope, rope_scale) = (quantize(x, self.cache.dtype) for x in tokens.split(self.site.latent, dim=2))
        codes = torch.cat([bits(c), bits(rope)], dim=2).view(self.cache.dtype)
        held = {"key": codes, "key scale": c_scale, "value scale": rope_scale}
        return held, read_latent(codes, self.site.latent.rank, c_scale, rope_scale)

    @property
    def options(self) -> dict[str, Any]:
        return {"scale": self.site.scale}


def lay_out_mla(site: AttentionSite, query_lens: Sequence[int], seq_lens: Sequence[int], *, page_size: int,
                device: torch.device | str = "cpu", layout: Layout = "NHD", num_pages: int | None = None, table_width: int = 0,
                pad: tuple[int, int] = (0, 0), fill: float | None = None, seed: int = 0, kv_dtype: torch.dtype | None = None
                ) -> MlaBatch:
    """A batch in which sequence r schedules the last query_lens[r] of its seq_lens[r] tokens; arguments as for ``lay_out``."""
    assert site.latent is not None
    (rank, rope), heads, generator = site.latent, site.num_heads, torch.Generator(device).manual_seed(seed)
    dim_v = site.head_dim_v

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).to(site.dtype)

    table, meta, num_pages = scattered(query_lens, seq_lens, page_size=page_size, device=device, num_pages=num_pages,
                                       table_width=table_width, pad=pad, seed=seed)
    cache = PagedKVCache.for_sites([site], num_pages=num_pages, page_size=page_size, device=device, layout=layout,
                                   dtype=kv_dtype)
    q, new = randn(meta.num_tokens, heads, site.head_dim), randn(meta.num_tokens, 1, sum(site.latent))
    for tensor in (q, new):
        tensor[meta.num_actual_tokens :] = math.nan
    kv_b = (randn(heads * (site.head_dim - rope + dim_v), rank).float() / rank**0.5).to(site.dtype)
    expected = torch.zeros(meta.num_tokens, heads, dim_v, dtype=torch.float64, device=device)
    batch = MlaBatch(site, q, new, new, None, cache, meta, True, expected, torch.zeros_like(expected), kv_b=kv_b)
    batch.pour(fill, generator)
    begin = 0
    for count, total, pages in zip(query_lens, seq_lens, table, strict=True):
        own = slice(begin, begin + count)
        begin += count
        tokens = randn(total, sum(site.latent))
        tokens[total - count :] = new[own, 0]
        at = torch.arange(total - count, device=device)
        slots = torch.tensor(pages, dtype=torch.long, device=device)[at // page_size], at % page_size
        held, tokens = batch.store(tokens[:, None])
        for name, part in held.items():
            bits(batch.held[name])[slots] = bits(part[: total - count])
        if count:
            batch.expected[own], batch.bound[own] = _expected(site, q[own].double(), tokens[:, 0].double(), kv_b.double(),
                                                              cache.quantized)
    return batch


def _expected(site: AttentionSite, q: Tensor, tokens: Tensor, kv_b: Tensor, quantized: bool) -> tuple[Tensor, Tensor]:
    """q (n, H, D), tokens (L, rank + R), all float64: output (n, H, Dv) and the error that is allowed."""
    assert site.latent is not None
    c, k_rope = (x[None] for x in tokens.split(site.latent, dim=1))
    out = mla_attention_eager(q.transpose(0, 1)[None], c, k_rope, kv_b, layer=0, scale=site.scale)[0].transpose(0, 1)
    nope = site.head_dim - site.latent.rope
    w_uk, w_uv = split_weight(kv_b, site.num_heads, nope)
    absorbed = torch.einsum("thn,hnr->htr", q[..., :nope], w_uk)
    query, keys = torch.cat([absorbed, q[..., nope:].transpose(0, 1)], dim=-1), tokens[None].expand(site.num_heads, -1, -1)

    def weighed(values: Tensor) -> Tensor:
        return attention_eager(query[None], keys[None], values[None], None, layer=0, scale=site.scale, window=None,
                               softcap=None, chunk=None, causal=True)[0].transpose(0, 1)

    eps = torch.finfo(site.dtype).eps
    delta = site.scale * eps / 2 * (absorbed.abs() @ c[0].abs().T).amax(-1).T[..., None]
    latent = torch.einsum("thr,hvr->thv", weighed(c.abs().expand(site.num_heads, -1, -1)), w_uv.abs())
    values = weighed(torch.einsum("lr,hvr->hlv", c[0], w_uv).abs())
    more = eps / 2 * latent + 2 * delta * values if quantized else 0
    return out, (eps + 1e-5) * latent + eps * out.abs() + 2 * delta * values + more + 1e-5


class MlaKit(Kit):
    """The checks of ``mla_op``, as those of a backend whose op it is."""

    def __init__(self, kit: Kit) -> None:
        super().__init__(replace(kit.backend, op=kit.backend.mla_op), kit.device, kit.dtype, kit.kv_dtype)
        self.features, self.op_name, self.op_options = {}, "mla_op", [{}]
        self.latents = [latent for latent in LATENTS if self.caps.mla_dims(*latent)]

    def checks(self) -> list[tuple[str, Callable[[], str | None]]]:
        found: list[tuple[str, Callable[[], str | None]]] = [
            ("decode, prefill, mixed", lambda: self.exact(DECODE, PREFILL, MIXED)),
            ("boundary lengths", self.boundaries),
            ("split keys, chunk with a prefix", lambda: self.exact(LONG, LONG[:1])),
            ("long prefills", self.prefill),
            ("latent dims", self.latent_dims),
            ("query heads", lambda: self.each("heads", HEADS, DECODE, MIXED)),
            ("page sizes", lambda: self.each("page_size", self.page_sizes, MIXED)),
            ("layouts", lambda: self.each("layout", self.layouts, MIXED)),
            *((f"KV cache {dtype_name(d)}", lambda d=d: self.quantized(d)) for d in sorted(QUANTIZED_KV_DTYPES, key=str)),
            ("padding", self.padding),
            ("stale metadata in padding", self.stale),
            ("garbage in unused slots", self.garbage),
            ("pages in another order", self.permuted),
            ("one set of buffers", self.reused),
            ("sequences in parts", lambda: sweeps.parts(self, list(MIXED))),
            ("steps made ahead", lambda: sweeps.drafts(self)),
            ("weights updated in place", self.updated),
            *self.frame_checks(),
        ]
        if not self.caps.mla:
            return [("MLA", lambda: self.refused(self.mla_site(latent=LATENTS[0])))]
        if self.dtype not in self.caps.dtypes or not self.latents:
            return [("MLA", self.none_to_check)]
        return [(f"MLA: {name}", check) for name, check in found]

    def mla_site(self, heads: int = 4, latent: Latent | None = None) -> AttentionSite:
        latent = latent or self.latents[0]
        return AttentionSite(layer=0, num_heads=heads, num_kv_heads=heads, head_dim=NOPE + latent.rope, head_dim_v=DIM_V,
                             dtype=self.dtype, scale=(NOPE + latent.rope) ** -0.5, latent=latent)

    def batch(self, rows: Rows, *, heads: int = 4, latent: Latent | None = None, page_size: int | None = None,
              layout: str | None = None, **options: Any) -> Batch:
        return lay_out_mla(self.mla_site(heads, latent), [n for n, _ in rows], [t for _, t in rows], device=self.device,
                           page_size=page_size or self.usual_page_size, layout=layout or self.layouts[0],  # type: ignore[arg-type]
                           kv_dtype=self.kv_dtype, **options)

    def quantized(self, kv_dtype: torch.dtype) -> str | None:
        if kv_dtype not in self.caps.latent_kv_dtypes:
            return self.refused(self.mla_site(), kv_dtype=kv_dtype)
        if refusals := self.caps.reasons_against(self.mla_site(), device=self.device, kv_dtype=kv_dtype):
            return f"refused: {'; '.join(refusals)}"
        kit = MlaKit(Kit(self.backend, self.device, self.dtype, kv_dtype))
        kit.exact(DECODE, MIXED, LONG, pad=(2, 1))
        kit.exact(MIXED, latent=self.latents[-1], fill=math.nan)
        kit.prefill()
        return None

    def none_to_check(self) -> None:
        raise Skip(f"it declares {self.caps.mla_dims_note} in {', '.join(map(str, self.caps.dtypes))}, none of which is "
                          f"among {LATENTS} in {self.dtype}")

    def latent_dims(self) -> str:
        for latent in self.latents:
            self.exact(DECODE, MIXED, latent=latent)
        for latent in set(LATENTS) - set(self.latents):
            self.refused(self.mla_site(latent=latent))
        return ", ".join(f"{rank}+{rope}" for rank, rope in self.latents)

    def prefill(self) -> None:
        """Prefills for which it pays to expand keys and values, with and without cached tokens, among decodes."""
        latent = next((x for x in self.latents if x.rank >= 256), self.latents[-1])
        for rows in (((60, 60),), ((1, 20), (0, 5), (60, 60), (70, 130), (1, 9)), ((100, 260), (3, 40))):
            self.exact(rows, latent=latent, pad=(2, 1))

    def each(self, option: str, values: Sequence[Any], *batches: Rows) -> str:
        """The batches with each of these values; of page sizes also one that fills its pages."""
        for value in values:
            self.exact(*batches, *([full_pages(value)] if option == "page_size" else []), **{option: value})
        return ", ".join(map(str, values))

    def updated(self) -> None:
        """Nothing of kv_b may be kept between calls."""
        batch = self.batch(MIXED)
        assert isinstance(batch, MlaBatch) and batch.kv_b is not None
        with planned(self.backend, batch):
            first = self.backend.op(*batch.arguments(prepared(self.backend, batch)), **batch.options)
            batch.kv_b.mul_(2)
            second = self.backend.op(*batch.arguments(prepared(self.backend, batch)), **batch.options)
        live = batch.metadata.num_actual_tokens
        if torch.equal(first[:live], second[:live]):
            raise Failure("the output does not follow an update of kv_b in place")
