"""The conformance kit: does an attention backend do what it declares, and refuse the rest?

    python -m quire.attn_ops.conformance --backend NAME [--device cpu|cuda] [--dtype float32|bfloat16|float16] [--kv-dtype int8|...]

It tests quire's own backends and anybody else's. It makes ragged batches of its own, runs the backend's paged op on them
as a model would (state, plan, prepare, op), and compares with an oracle in float64. Every check prints one line; the exit
code is 1 if one fails. What a device cannot show (CUDA graphs on a CPU) is skipped, and the line says why.

A number may be off by 1e-5 (float32 sums) and by two eps of the dtype, of the output and of the weighted sum of \\|v\\|: the
softmax weights and the output are each rounded once. The same holds for quantised caches, with keys and values as they
read back; codes and scales must be those of ``attn_ops/kv_quant.py`` bit for bit, so that backends can share a cache.
Without --kv-dtype the checks run on a cache of the model's dtype, and two of them on each quantised one that is declared.

Not covered: caches of another floating-point dtype than the model's, norms of the heads in ``rope_op``, speed.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from quire.attn_ops.attention import AttentionSite
from quire.attn_ops.backend import AttentionBackend, CudagraphSupport
from quire.attn_ops.kernels.launch import side_stream
from quire.attn_ops.kv_cache import PagedKVCache
from quire.attn_ops.kv_quant import QUANTIZED_KV_DTYPES, dequantize, quantize
from quire.attn_ops.metadata import CommonAttentionMetadata
from quire.attn_ops.ops.rope import PLAIN, RopeForm, rotate
from quire.attn_ops.registry import broken_backends, get_backend
from quire.attn_ops.step import Step, ensure_planned, running

FEATURES: dict[str, Any] = {"window": 5, "softcap": 4.0, "chunk": 8, "sinks": True}
DIMS = ((8, 8), (16, 16), (64, 64), (128, 128), (256, 256), (24, 16), (192, 128))
FORMS = (RopeForm(interleaved=True), RopeForm(half_tables=True), RopeForm(interleaved=True, half_tables=True))
PAGE_SIZES = (1, 4, 16, 32, 64, 128, 256)

# Batches as (tokens scheduled, tokens in the cache after the step) of each sequence.
DECODE = ((1, 20), (1, 1), (1, 33), (1, 16), (1, 17))
PREFILL = ((20, 20), (1, 1), (33, 33))
MIXED = ((1, 20), (7, 9), (0, 5), (33, 40), (1, 1), (18, 18), (4, 30))


class Skip(Exception):
    """A check that cannot be made here; the text says why."""


class Failure(Exception):
    """What a backend did wrong."""


@dataclass(frozen=True)
class Result:
    """One line of the report. ``status``: "ok", "FAIL" or "skip"."""

    check: str
    status: str
    detail: str = ""
    seconds: float = 0.0


@dataclass
class Batch:
    """A ragged batch laid out in a paged cache. ``expected`` and ``bound`` (T, H, Dv) are float64; padding tokens: zero."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    sinks: torch.Tensor | None
    cache: PagedKVCache
    metadata: CommonAttentionMetadata
    site: AttentionSite
    expected: torch.Tensor
    bound: torch.Tensor
    write: bool = True

    @property
    def tables(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        m = self.metadata
        return m.slot_mapping, m.block_table_tensor, m.query_start_loc, m.seq_lens

    @property
    def options(self) -> dict[str, Any]:
        return {name: getattr(self.site, name) for name in ("scale", "window", "softcap", "chunk")}

    def arguments(self, prepared: Sequence[torch.Tensor] = ()) -> tuple[Any, ...]:
        """Positional arguments of the paged op."""
        new = (self.k, self.v) if self.write else (None, None)
        return (self.q, *new, *self.cache.of_layer(0), *self.tables, self.sinks, list(prepared))

    @property
    def held(self) -> dict[str, torch.Tensor]:
        """The cache's tensors, by name."""
        names = ("key", "value", "key scale", "value scale")
        return {n: t for n, t in zip(names, self.cache.of_layer(0), strict=True) if t is not None}

    def stored(self, new: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Keys or values as the cache must hold them, with their scale if it is quantised."""
        return quantize(new, self.cache.dtype) if self.cache.quantised else (new, None)


def oracle(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, sinks: torch.Tensor | None, *, scale: float,
           window: int | None, softcap: float | None, chunk: int | None) -> torch.Tensor:
    """One sequence in float64: q (n, H, D) are the last n of the tokens of keys (L, Hkv, D), values (L, Hkv, Dv)."""
    n, heads, dim = q.shape
    kv_heads, device = keys.shape[1], q.device
    key_pos = torch.arange(keys.shape[0], device=device)
    query_pos = key_pos[keys.shape[0] - n :, None]
    hidden = key_pos > query_pos
    if window is not None:
        hidden = hidden | (query_pos - key_pos >= window)
    if chunk is not None:
        hidden = hidden | (query_pos // chunk != key_pos // chunk)
    grouped = q.double().view(n, kv_heads, heads // kv_heads, dim)
    scores = torch.einsum("nkgd,lkd->nkgl", grouped, keys.double()) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(hidden[:, None, None], -math.inf)
    if sinks is not None:
        column = sinks.double().view(1, kv_heads, -1, 1).expand(n, -1, -1, 1)
        scores = torch.cat([scores, column], dim=-1)
    weights = scores.softmax(-1)[..., : keys.shape[0]]
    return torch.einsum("nkgl,lkd->nkgd", weights, values.double()).flatten(1, 2)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as integers: to compare bit by bit, and to index what torch cannot."""
    return tensor.view({4: torch.int32, 2: torch.int16, 1: torch.int8}[tensor.element_size()])


class Kit:
    """The checks, for one backend on one device in one dtype; ``kv_dtype`` is of a quantised cache, None: ``dtype``."""

    def __init__(self, backend: AttentionBackend, device: torch.device, dtype: torch.dtype,
                 kv_dtype: torch.dtype | None = None) -> None:
        self.backend, self.device, self.dtype, self.kv_dtype = backend, device, dtype, kv_dtype
        self.caps = backend.capabilities
        self.dims = [(d, dv) for d, dv in DIMS if self.caps.head_dims(d, dv)]
        self.page_sizes = [p for p in PAGE_SIZES if self.caps.page_sizes(p)]
        # Not 1 where there is a choice: a decode does not mind the order of its keys, so whole pages must not be keys.
        self.usual_page_size = next((p for p in self.page_sizes if p > 1), 1)
        self.layouts = sorted(self.caps.layouts)
        self.features = {n: v for n, v in FEATURES.items() if getattr(self.caps, n)}

    # -- batches ----------------------------------------------------------------------------------------------------

    def batch(self, rows: Sequence[tuple[int, int]], *, heads: int = 4, kv_heads: int = 2, page_size: int | None = None,
              layout: str | None = None, pad: tuple[int, int] = (0, 0), fill: float | None = None, seed: int = 0,
              write: bool = True, **features: Any) -> Batch:
        """Lay out a batch, its pages shuffled.

        Args:
            pad: padding tokens (of NaN) and padding rows.
            fill: what lies in the slots that no sequence owns; None: noise far larger than any key.
            write: False for a layer that shares another's cache: the step's keys are in it already.
            features: of FEATURES.
        """
        dim, dim_v = self.dims[0]
        page_size = page_size or self.usual_page_size
        generator = torch.Generator(self.device).manual_seed(seed)

        def randn(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, device=self.device).to(self.dtype)

        counts = [-(-total // page_size) for _, total in rows]
        order = (torch.randperm(sum(counts) + 4, generator=torch.Generator().manual_seed(seed)) + 1).tolist()
        table = [[order.pop() for _ in range(count)] for count in counts]
        meta = CommonAttentionMetadata.build([n for n, _ in rows], [t for _, t in rows], table, page_size=page_size,
                                             device=self.device)
        meta = meta.padded(meta.num_tokens + pad[0], meta.num_reqs + pad[1])
        cache: Any = PagedKVCache(num_layers=1, num_pages=sum(counts) + 5, page_size=page_size, num_kv_heads=kv_heads,
                                  head_dim=dim, head_dim_v=dim_v, dtype=self.kv_dtype or self.dtype, device=self.device,
                                  layout=layout or self.layouts[0])  # type: ignore[arg-type]
        tokens, live = meta.num_tokens, meta.num_actual_tokens
        q, k, v = randn(tokens, heads, dim), randn(tokens, kv_heads, dim), randn(tokens, kv_heads, dim_v)
        for tensor in (q, k, v):
            tensor[live:] = math.nan
        site = AttentionSite(layer=0, num_heads=heads, num_kv_heads=kv_heads, head_dim=dim, head_dim_v=dim_v,
                             dtype=self.dtype, scale=dim**-0.5, sinks=bool(features.get("sinks")),
                             **{n: x for n, x in features.items() if n != "sinks"})
        made = Batch(q, k, v, randn(heads) if site.sinks else None, cache, meta, site,
                     torch.zeros(tokens, heads, dim_v, dtype=torch.float64, device=self.device), torch.empty(0), write)
        for tensor in made.held.values():
            noise = torch.empty(tensor.shape, device=self.device)
            noise.normal_(0, 30, generator=generator) if fill is None else noise.fill_(fill)
            tensor.copy_(noise if tensor.is_floating_point() else noise.nan_to_num(nan=127.0).clamp(-127, 127))
        magnitude = torch.zeros_like(made.expected)
        begin = 0
        for (count, total), pages in zip(rows, table, strict=True):
            own = slice(begin, begin + count)
            keys, values = randn(total, kv_heads, dim), randn(total, kv_heads, dim_v)
            keys[total - count :], values[total - count :] = k[own], v[own]
            at = torch.arange(total - count if write else total, device=self.device)
            page = torch.tensor(pages, dtype=torch.long, device=self.device)[at // page_size]
            keys, values = (self._hold(made, which, new, (page, at % page_size))
                            for which, new in (("key", keys), ("value", values)))
            if count:
                made.expected[own] = oracle(q[own], keys, values, made.sinks, **made.options)
                magnitude[own] = oracle(q[own], keys, values.abs(), made.sinks, **made.options)
            begin += count
        made.bound = (magnitude + made.expected.abs()) * torch.finfo(self.dtype).eps + 1e-5
        if site.softcap is not None and self.dtype != torch.float32:
            made.bound += 2 * magnitude * site.softcap * 2**-11  # the hardware's tanh, which half precision may use
        return made

    def _hold(self, batch: Batch, which: str, new: torch.Tensor, slots: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Put the first of ``new`` (L, Hkv, D) at ``slots``; all of it as it will read back."""
        codes, scale = batch.stored(new)
        count = len(slots[0])
        _bits(batch.held[which])[slots] = _bits(codes[:count])
        if scale is None:
            return new
        batch.held[f"{which} scale"][slots] = scale[:count]
        return dequantize(codes, scale)

    def step(self, batch: Batch) -> Step:
        return Step(batch.cache, batch.metadata, attention=self.backend)

    def prepared(self, batch: Batch) -> Sequence[torch.Tensor]:
        if self.backend.prepare is None:
            return ()
        return self.backend.prepare(*batch.tables, batch.metadata.page_size)

    def run(self, batch: Batch, rotary: int = 0, form: RopeForm = PLAIN) -> torch.Tensor:
        """The batch through the backend as in a model's forward: state and plan on the host, then prepare and the op.

        With ``rotary`` through ``rope_op``, on q and k that a rotation of so many dimensions, of this form, turns into the
        batch's: by quarter turns, which are exact.
        """
        step = self.step(batch)
        with running(step), torch.no_grad():
            ensure_planned(step, self.backend, [batch.site])
            arguments = batch.arguments(self.prepared(batch))
            if not rotary:
                return self.backend.op(*arguments, **batch.options)
            turns = torch.randint(4, (len(batch.q), rotary // 2), generator=torch.Generator().manual_seed(3))
            if not form.half_tables:
                turns = turns.repeat_interleave(2, dim=1) if form.interleaved else turns.repeat(1, 2)
            cos, sin = (torch.tensor(v, dtype=self.dtype)[turns].to(self.device) for v in ((1, 0, -1, 0), (0, 1, 0, -1)))
            q, k = (rotate(x, cos, -sin, form.interleaved, form.half_tables) for x in (batch.q, batch.k))
            op: Any = self.backend.rope_op
            return op(q, k, batch.v, cos, sin, None, None, 0.0, *arguments[3:], **batch.options, **form.options())

    def compare(self, out: torch.Tensor, batch: Batch) -> None:
        """Raise Failure unless every live number is within its bound, and padding is zero."""
        live = batch.metadata.num_actual_tokens
        if out.shape != batch.expected.shape or out.dtype != self.dtype:
            raise Failure(f"returned {tuple(out.shape)} {out.dtype}, not {tuple(batch.expected.shape)} {self.dtype}")
        if not torch.isfinite(out[:live]).all():
            raise Failure(f"{int((~torch.isfinite(out[:live])).sum())} outputs are not finite")
        excess = (out[:live].double() - batch.expected[:live]).abs() / batch.bound[:live]
        if excess.numel() and excess.max() > 1:
            token, head, _ = torch.unravel_index(excess.argmax(), excess.shape)
            raise Failure(f"{int((excess > 1).sum())} of {excess.numel()} outputs are wrong; the worst, of token {int(token)} "
                          f"and head {int(head)}, is off by {excess.max():.3g} times the bound")
        if not (out[live:] == 0).all():
            raise Failure("outputs of padding tokens are not zero")

    def exact(self, batch: Batch, rotary: int = 0, form: RopeForm = PLAIN) -> None:
        """Run the batch; outputs within bounds, new keys and values stored exactly, every other slot bit for bit as before."""
        wanted = {name: _bits(tensor).clone() for name, tensor in batch.held.items()}
        if batch.write:
            live, size = batch.metadata.slot_mapping[: batch.metadata.num_actual_tokens], batch.metadata.page_size
            for which, new in (("key", batch.k), ("value", batch.v)):
                for name, part in zip((which, f"{which} scale"), batch.stored(new[: len(live)]), strict=True):
                    if part is not None:
                        wanted[name][live // size, live % size] = _bits(part)
        out = self.run(batch, rotary, form)
        for name, tensor in batch.held.items():
            differs = (_bits(tensor) != wanted[name]).flatten(2).any(-1)
            if differs.any():
                page, offset = differs.nonzero()[0].tolist()
                raise Failure(f"{int(differs.sum())} slots of the {name} cache hold something else than they must; the first "
                              f"is page {page}, offset {offset}{' (the null page)' if page == 0 else ''}")
        self.compare(out, batch)

    # -- checks -----------------------------------------------------------------------------------------------------

    def checks(self) -> list[tuple[str, Callable[[], str | None]]]:
        """(name, function) of each check. A function returns a detail, or raises Failure or Skip."""
        named: list[tuple[str, Callable[[], str | None]]] = [
            ("decode batch", lambda: self.exact(self.batch(DECODE))),
            ("prefill batch", lambda: self.exact(self.batch(PREFILL))),
            ("mixed batch", lambda: self.exact(self.batch(MIXED))),
            ("boundary lengths", self.boundaries),
            *((f"feature {name}", lambda name=name: self.feature(name)) for name in FEATURES),
            ("features together", self.together),
            ("non-causal", self.non_causal),
            ("head dims", self.head_dims),
            ("query heads a key head", self.groups),
            *((f"page size {p}", lambda p=p: self.page_size(p)) for p in PAGE_SIZES),
            *((f"layout {name}", lambda name=name: self.layout(name)) for name in ("NHD", "HND")),
            *((f"KV cache {str(d).removeprefix('torch.')}", lambda d=d: self.quantised(d)) for d in sorted(QUANTIZED_KV_DTYPES, key=str)),
            ("shared cache (no k, v)", self.shared),
            ("rotary embedding (rope_op)", self.rope),
            ("padding", self.padding),
            ("stale metadata in padding", self.stale),
            ("garbage in unused slots", self.garbage),
            ("pages in another order", self.permuted),
            ("strided q, k, v", self.strided),
            ("opcheck", self.opcheck),
            ("no synchronisation", self.no_sync),
            ("CUDA graph of a decode batch", self.graph_decode),
            ("CUDA graph of a mixed batch", self.graph_mixed),
        ]
        return named

    def boundaries(self) -> None:
        page = self.usual_page_size
        lens = sorted({n for n in (1, page - 1, page, page + 1, 2 * page, 2 * page + 1) if n > 0})
        self.exact(self.batch([(1, n) for n in lens]))
        self.exact(self.batch([(n, n) for n in lens]))
        self.exact(self.batch([(n, n + 3) for n in lens]))

    def feature(self, name: str) -> str | None:
        value = FEATURES[name]
        if name not in self.features:
            site = self.batch(DECODE[:1], **{name: value}).site
            if not self.caps.reasons_against(site, device=self.device):
                raise Failure(f"{name} is not declared, and yet not refused")
            return "not declared: refused"
        for rows in (DECODE, PREFILL, MIXED):
            self.exact(self.batch(rows, **{name: value}))
        return None

    def together(self) -> str:
        if len(self.features) < 2:
            raise Skip("fewer than two features are declared")
        for rows in (DECODE, MIXED):
            self.exact(self.batch(rows, pad=(3, 2), **self.features))
        return ", ".join(self.features)

    def non_causal(self) -> str:
        if self.caps.non_causal:
            raise Failure("declared, but a paged op has no argument for it: queries are the last tokens of a sequence")
        site = replace(self.batch(DECODE[:1]).site, causal=False)
        if not self.caps.reasons_against(site, device=self.device):
            raise Failure("not declared, and yet not refused")
        return "not declared: refused"

    def head_dims(self) -> str:
        dims, done = self.dims, []
        try:
            for d, dv in dims:
                self.dims = [(d, dv)]
                for rows in (DECODE, MIXED):
                    self.exact(self.batch(rows, seed=d))
                done.append(f"{d}" if d == dv else f"{d}/{dv}")
        finally:
            self.dims = dims
        return ", ".join(done)

    def groups(self) -> str:
        for heads, kv_heads in ((4, 4), (8, 2), (8, 1), (3, 1)):
            for rows in (DECODE, MIXED):
                self.exact(self.batch(rows, heads=heads, kv_heads=kv_heads))
        return "1, 3, 4, 8"

    def page_size(self, page_size: int) -> str | None:
        if page_size not in self.page_sizes:
            site = self.batch(DECODE[:1]).site
            if not self.caps.reasons_against(site, device=self.device, page_size=page_size):
                raise Failure("not declared, and yet not refused")
            return "not declared: refused"
        for rows in (DECODE, MIXED, [(1, 2 * page_size + 1), (3, page_size)]):
            self.exact(self.batch([(min(n, t), t) for n, t in rows], page_size=page_size))
        return None

    def layout(self, layout: str) -> str | None:
        if layout not in self.caps.layouts:
            if not self.caps.reasons_against(self.batch(DECODE[:1]).site, device=self.device, layout=layout):
                raise Failure("not declared, and yet not refused")
            return "not declared: refused"
        for rows in (DECODE, MIXED):
            self.exact(self.batch(rows, layout=layout))
        return None

    def quantised(self, kv_dtype: torch.dtype) -> str | None:
        """A decode and a mixed batch on a quantised cache, and a NaN. With --kv-dtype all checks run on one."""
        refusals = self.caps.reasons_against(self.batch(DECODE[:1]).site, device=self.device, kv_dtype=kv_dtype)
        if kv_dtype not in self.caps.kv_dtypes:
            if not refusals:
                raise Failure("not declared, and yet not refused")
            return "not declared: refused"
        if refusals:
            return f"refused: {'; '.join(refusals)}"
        kit = Kit(self.backend, self.device, self.dtype, kv_dtype)
        for rows in (DECODE, MIXED):
            for features in ({}, kit.features):
                kit.exact(kit.batch(rows, pad=(2, 1), **features))
        for count in (1, 9):
            batch = kit.batch([(count, 20), (1, 7)])
            batch.k[count - 1, 0, 0] = batch.v[count - 1, -1, 0] = math.nan
            out = kit.run(batch)
            if not out[count - 1].isnan().all() or not out[count].isfinite().all():
                raise Failure("a NaN in a token's key and value must make its own output NaN, and no other sequence's")
        return None

    def shared(self) -> None:
        for rows in (DECODE, MIXED):
            self.exact(self.batch(rows, write=False))

    def rope(self) -> None:
        if self.backend.rope_op is None:
            raise Skip("it has no rope_op; a kernel before it rotates")
        for rows in (DECODE[:1], DECODE, MIXED):
            for features in ({}, self.features):
                batch = self.batch(rows, pad=(2, 1), **features)
                self.exact(batch, rotary=batch.site.head_dim)
                self.exact(self.batch(rows), rotary=batch.site.head_dim // 2)
            for form in FORMS if self.backend.rope_forms else ():
                self.exact(self.batch(rows), rotary=batch.site.head_dim, form=form)
                self.exact(self.batch(rows), rotary=batch.site.head_dim // 2, form=form)

    def padding(self) -> None:
        for rows in (DECODE, MIXED):
            for pad in ((0, 3), (2, 0), (5, 2), (40, 9)):
                self.exact(self.batch(rows, pad=pad))
        self.exact(self.batch([(0, 4), (0, 9)], pad=(3, 1)))

    def stale(self) -> None:
        """Padding rows of a static buffer still hold the page numbers of an earlier batch."""
        for rows in (DECODE, MIXED):
            batch = self.batch(rows, pad=(4, 3))
            table = batch.metadata.block_table_tensor
            table[len(rows) :] = torch.arange(table.shape[1], device=self.device, dtype=table.dtype) % batch.cache.num_pages
            for row, (_, total) in enumerate(rows):  # and so do the entries past a sequence's pages
                table[row, -(-total // batch.metadata.page_size) :] = batch.cache.num_pages - 1
            self.exact(batch)

    def garbage(self) -> None:
        """Pages are reused uncleared: what others left past a sequence's end, and in the null page, must not be seen."""
        for rows in (DECODE, MIXED):
            for features in ({}, self.features):
                self.exact(self.batch(rows, fill=math.nan, page_size=self.page_sizes[-1], pad=(2, 1), **features))

    def permuted(self) -> None:
        """Where the pages lie must not matter: the same sequences, laid out in other pages."""
        for rows in (DECODE, MIXED):
            batch = self.batch(rows)
            first = self.run(batch)
            order = torch.randperm(batch.cache.num_pages - 1, generator=torch.Generator().manual_seed(7)) + 1
            order = torch.cat([torch.zeros(1, dtype=torch.long), order]).to(self.device)
            for cache in map(_bits, batch.held.values()):
                moved = torch.empty_like(cache)
                moved[order] = cache
                cache.copy_(moved)
            table = order[batch.metadata.block_table_tensor.long()].int()
            batch.metadata = CommonAttentionMetadata.build([n for n, _ in rows], [t for _, t in rows], table.cpu(),
                                                           page_size=batch.metadata.page_size, device=self.device)
            second = self.run(batch)
            self.compare(second, batch)
            if not ((first - second).abs().double() <= batch.bound).all():
                raise Failure("the output depends on where the pages are")

    def strided(self) -> None:
        """q, k and v as slices of one fused projection."""
        for rows in (DECODE, MIXED):
            batch = self.batch(rows)
            sizes = [batch.q.flatten(1).shape[1], batch.k.flatten(1).shape[1], batch.v.flatten(1).shape[1]]
            fused = torch.cat([t.flatten(1) for t in (batch.q, batch.k, batch.v)], dim=1)
            batch.q, batch.k, batch.v = (part.unflatten(1, t.shape[1:]) for part, t in zip(
                fused.split(sizes, dim=1), (batch.q, batch.k, batch.v), strict=True))
            self.exact(batch)

    def opcheck(self) -> str:
        """Schema, mutation, fake and dispatch, by torch's own checker; the fake's strides against the real ones."""
        # With fp8 only the fake: to see mutations opcheck compares tensors in ways that torch has not for fp8.
        tests = ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
        for rows in (DECODE, MIXED):
            for options in ({}, {"write": False}, self.features):
                batch = self.batch(rows, **options)
                step = self.step(batch)
                with running(step):
                    ensure_planned(step, self.backend, [batch.site])
                    prepared = self.prepared(batch)
                    torch.library.opcheck(self.backend.op, batch.arguments(prepared), batch.options,
                                          test_utils=tests[1:3] if self._fp8 else tests)
                    out = self.backend.op(*batch.arguments(prepared), **batch.options)
                if not out.is_contiguous():
                    raise Failure(f"the output has strides {out.stride()}, the fake says contiguous")
            if self.backend.prepare is not None:
                torch.library.opcheck(self.backend.prepare, (*batch.tables, batch.metadata.page_size))
        return "op" + (" and prepare" if self.backend.prepare is not None else "")

    @property
    def _fp8(self) -> bool:
        return self.kv_dtype is not None and self.kv_dtype.is_floating_point

    def no_sync(self) -> None:
        """Nothing in the contract reads a device tensor on the host."""
        self._need_cuda()
        for rows in (DECODE, MIXED):
            batch = self.batch(rows)
            self.run(batch)  # compiles kernels, which may synchronise
            step = self.step(batch)
            with running(step), torch.no_grad():
                ensure_planned(step, self.backend, [batch.site])
                torch.cuda.set_sync_debug_mode("error")
                try:
                    self.backend.op(*batch.arguments(self.prepared(batch)), **batch.options)
                except RuntimeError as error:
                    raise Failure(f"the forward waits for the GPU: {error}") from error
                finally:
                    torch.cuda.set_sync_debug_mode("default")

    def graph_decode(self) -> None:
        self._need_graphs(CudagraphSupport.UNIFORM_SINGLE_TOKEN_DECODE)
        self._replay(((1, 90), (1, 70), (1, 80), (1, 60)), ((1, 20), (1, 1), (1, 33)), pad=(1, 1))

    def graph_mixed(self) -> None:
        self._need_graphs(CudagraphSupport.ALWAYS)
        self._replay(((1, 90), (30, 70), (5, 80), (1, 60)), ((9, 9), (1, 33), (20, 24)), pad=(7, 1))

    def _need_cuda(self) -> None:
        if self.device.type != "cuda":
            raise Skip(f"a {self.device.type} has none")

    def _need_graphs(self, level: CudagraphSupport) -> None:
        if self.caps.cudagraph_support < level:
            raise Skip(f"the backend declares {self.caps.cudagraph_support.name}")
        self._need_cuda()

    def _replay(self, captured: Sequence[tuple[int, int]], replayed: Sequence[tuple[int, int]], pad: tuple[int, int]) -> None:
        """Capture a batch; put another, shorter and padded one into the same buffers; replay, and compare."""
        features = dict(self.features)
        buffers, later = self.batch(captured, **features), self.batch(replayed, pad=pad, seed=1, **features)
        wide, narrow = buffers.metadata.block_table_tensor, later.metadata.block_table_tensor
        states: dict[str, Any] = {}

        def launch(metadata: CommonAttentionMetadata, capturing: bool) -> Step:
            step = Step(buffers.cache, metadata, self.backend, states, graph_key="conformance", capturing=capturing)
            with running(step):
                ensure_planned(step, self.backend, [buffers.site])
            return step

        def forward() -> torch.Tensor:
            return self.backend.op(*buffers.arguments(self.prepared(buffers)), **buffers.options)

        step = launch(buffers.metadata, True)
        stream = side_stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        graph = torch.cuda.CUDAGraph()
        with running(step), torch.no_grad():
            with torch.cuda.stream(stream):
                for _ in range(2):
                    forward()
            torch.cuda.current_stream(self.device).wait_stream(stream)
            with torch.cuda.graph(graph, stream=stream):
                out = forward()
        graph.replay()
        self.compare(out, buffers)
        # The later batch moves in: its cache page by page, its tensors into the captured ones, rows and tokens padded.
        for mine, theirs in zip(buffers.held.values(), later.held.values(), strict=True):
            mine.fill_(math.nan if mine.is_floating_point() else 127)
            _bits(mine)[: theirs.shape[0]] = _bits(theirs)
        wide.fill_(0)
        wide[:, : narrow.shape[1]] = narrow
        pairs = ((buffers.q, later.q), (buffers.k, later.k), (buffers.v, later.v),
                 (buffers.metadata.slot_mapping, later.metadata.slot_mapping),
                 (buffers.metadata.query_start_loc, later.metadata.query_start_loc),
                 (buffers.metadata.seq_lens, later.metadata.seq_lens))
        for mine, theirs in pairs:
            mine.copy_(theirs)
        if buffers.sinks is not None and later.sinks is not None:
            buffers.sinks.copy_(later.sinks)
        launch(replace(later.metadata, block_table_tensor=wide, slot_mapping=buffers.metadata.slot_mapping,
                       query_start_loc=buffers.metadata.query_start_loc, seq_lens=buffers.metadata.seq_lens), False)
        graph.replay()
        self.compare(out, later)


def run(backend: AttentionBackend, device: torch.device | str = "cpu", dtype: torch.dtype | None = None,
        only: str = "", on_result: Callable[[Result], None] = lambda result: None,
        kv_dtype: torch.dtype | None = None) -> list[Result]:
    """Check a backend.

    Args:
        backend: the record; it need not be registered.
        device, dtype: where and in what; dtype None: the first of float32, bfloat16, float16 that the backend declares.
        only: run the checks whose names contain this.
        on_result: called after each check.
        kv_dtype: run all of them on a quantised cache of this dtype.

    Returns:
        One Result a check, in order.
    """
    device = torch.device(device)
    caps = backend.capabilities
    dtype = dtype or next((d for d in (torch.float32, torch.bfloat16, torch.float16) if d in caps.dtypes), torch.float32)
    kit = Kit(backend, device, dtype, kv_dtype)
    results: list[Result] = []

    def report(name: str, status: str, detail: str = "", seconds: float = 0.0) -> None:
        results.append(Result(name, status, detail, seconds))
        on_result(results[-1])

    if device.type not in caps.devices or backend.available(device):
        report("usable here", "FAIL", backend.available(device) or f"runs on {', '.join(sorted(caps.devices))}")
        return results
    for reason, missing in ((f"dtype {dtype} is not declared", dtype not in caps.dtypes),
                            (f"KV cache dtype {kv_dtype} is not declared", kv_dtype not in (None, *caps.kv_dtypes)),
                            (f"no head dims among {DIMS} are declared", not kit.dims),
                            (f"no page size among {PAGE_SIZES} is declared", not kit.page_sizes),
                            ("no layout is declared", not kit.layouts)):
        if missing:
            report("declarations", "FAIL", reason)
            return results
    for name, check in kit.checks():
        if only not in name:
            continue
        begin = time.perf_counter()
        try:
            status, detail = "ok", check() or ""
        except Skip as why:
            status, detail = "skip", str(why)
        except Failure as what:
            status, detail = "FAIL", str(what)
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            status, detail = "FAIL", f"{type(error).__name__}: {error} ({last.filename}:{last.lineno})"
        report(name, status, detail, time.perf_counter() - begin)
    return results


def print_table(title: str, results: Sequence[Result]) -> None:
    """The report, by rich where it is installed."""
    try:
        from rich.console import Console
        from rich.markup import escape
        from rich.table import Table
    except ImportError:
        print(title)
        width = max(len(r.check) for r in results)
        for r in results:
            print(f"  {r.check.ljust(width)}  {r.status.ljust(4)}  {r.seconds:6.1f} s  {r.detail}".rstrip())
        return
    table = Table("check", "result", "seconds", "detail", title=escape(title), title_justify="left")
    colours = {"ok": "green", "FAIL": "bold red", "skip": "yellow"}
    for r in results:
        table.add_row(escape(r.check), f"[{colours[r.status]}]{r.status}[/]", f"{r.seconds:.1f}", escape(r.detail))
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Returns 0 if every check passed or was skipped."""
    parser = argparse.ArgumentParser(prog="python -m quire.attn_ops.conformance", description="Check an attention backend.")
    parser.add_argument("--backend", required=True, help="name that it is registered by")
    parser.add_argument("--device", default=None, help="default: the first of cuda and cpu that it runs on here")
    parser.add_argument("--dtype", default=None, choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--kv-dtype", default=None, choices=sorted(str(d).removeprefix("torch.") for d in QUANTIZED_KV_DTYPES),
                        help="run all checks on a quantised KV cache (default: of --dtype)")
    parser.add_argument("--only", default="", help="run the checks whose names contain this")
    given = parser.parse_args(arguments)
    try:
        backend = get_backend(given.backend)
    except ValueError as error:
        print(error, file=sys.stderr)
        for name, why in broken_backends().items():
            print(f"{name} {why}", file=sys.stderr)
        return 1
    device = given.device or ("cuda" if "cuda" in backend.capabilities.devices and torch.cuda.is_available() else "cpu")
    dtype = getattr(torch, given.dtype) if given.dtype else None
    results = run(backend, device, dtype, given.only, kv_dtype=getattr(torch, given.kv_dtype) if given.kv_dtype else None)
    failed, skipped = (sum(r.status == s for r in results) for s in ("FAIL", "skip"))
    print_table(f"attention backend {backend.name} on {device}", results)
    print(f"{len(results) - failed - skipped} passed, {failed} failed, {skipped} skipped")
    return 1 if failed or not results else 0
