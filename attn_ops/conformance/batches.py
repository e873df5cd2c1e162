"""Ragged batches in a paged cache: to check a backend, or to time it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from quire.attn_ops.attention import AttentionSite, attention_eager
from quire.attn_ops.backend import AttentionBackend
from quire.attn_ops.context import setting
from quire.attn_ops.kv_cache import Layout, PagedKVCache
from quire.attn_ops.kv_quant import KVScales, dequantize, is_fixed, quantize
from quire.attn_ops.metadata import CommonAttentionMetadata
from quire.attn_ops.ops.rope import PLAIN, RopeForm, rotate
from quire.attn_ops.ops.varlen import varlen_attention_eager
from quire.attn_ops.step import Step, ensure_planned, running

NOISE = 30.0  # standard deviation of what lies in slots without an owner; keys and values have 1


class Failure(AssertionError):
    """A check found an error in a backend."""


@dataclass
class Worst:
    """The largest error of some comparisons: ``error`` as a number, ``of_bound`` in units of what is allowed."""

    error: float | None = None
    of_bound: float | None = None

    def add(self, error: float, of_bound: float) -> None:
        self.error, self.of_bound = max(self.error or 0.0, error), max(self.of_bound or 0.0, of_bound)


_WORST: ContextVar[Worst | None] = ContextVar("quire_worst_error", default=None)


def noting_errors() -> contextlib.AbstractContextManager[Worst]:
    """Inside, every comparison with expected numbers adds its errors to the result."""
    return setting(_WORST, Worst())


def rounding(size: Tensor, expected: Tensor, dtype: torch.dtype, softcap: float | None = None) -> Tensor:
    """The error that attention in ``dtype`` may have: the softmax weights and the output are each rounded, half an eps of
    ``size``, the weighted sum of |v|, and of the output. Twice that, and 1e-5 for sums in float32. ``softcap``: in half
    precision, the error of the hardware's tanh (2**-11 of its value) too."""
    bound = (size + expected.abs()) * torch.finfo(dtype).eps + 1e-5
    return bound + 2 * size * softcap * 2**-11 if softcap is not None and dtype != torch.float32 else bound


def varlen_reference(q: Tensor, k: Tensor, v: Tensor, *starts: Tensor, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    """``varlen_attention_eager`` in float64: the output, the weighted sum of |v|, and the log-sum-exp."""
    q, k, v = q.double(), k.double(), v.double()
    expected, lse = varlen_attention_eager(q, k, v, *starts, **options)
    return expected, varlen_attention_eager(q, k, v.abs(), *starts, **options)[0], lse.double()


def compare_numbers(out: Tensor, expected: Tensor, bound: Tensor, what: str = "outputs") -> None:
    """Raises Failure unless every number of ``out`` is within its bound of ``expected``; equal infinities are."""
    if not out.numel():
        return
    if torch.isnan(out).any():
        raise Failure(f"{int(torch.isnan(out).sum())} {what} are not a number")
    same = out.double() == expected
    error = (out.double() - expected).abs().masked_fill(same, 0.0)
    excess = error / bound
    if (worst := _WORST.get()) is not None:
        worst.add(float(error.max()), float(excess.max()))
    if not excess.max() <= 1:
        place = ", ".join(str(int(i)) for i in torch.unravel_index(excess.argmax(), excess.shape)[:2])
        raise Failure(f"{int((~(excess <= 1)).sum())} of {excess.numel()} {what} are wrong; the worst, at ({place}), is off by "
                      f"{excess.max():.3g} times the bound")


@dataclass
class Batch:
    """A batch of one attention layer. T counts padding tokens.

    Args:
        q, new_k, new_v: (T, H, D), (T, Hkv, D), (T, Hkv, Dv), the tokens of this step; NaN in padding tokens.
        write: False for a layer that shares another's cache: the new keys are in it already, ``k`` and ``v`` are None.
        expected: (T, H, Dv) float64, zero for padding tokens; for a quantized cache, of keys and values as they read back.
        bound: the error allowed for each number of ``expected``.
        keys, values: per sequence (L, Hkv, D or Dv), all its tokens as they were before quantization.
    """

    site: AttentionSite
    q: Tensor
    new_k: Tensor
    new_v: Tensor
    sinks: Tensor | None
    cache: PagedKVCache
    metadata: CommonAttentionMetadata
    write: bool
    expected: Tensor
    bound: Tensor
    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)

    @property
    def k(self) -> Tensor | None:
        return self.new_k if self.write else None

    @property
    def v(self) -> Tensor | None:
        return self.new_v if self.write else None

    @property
    def tables(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        m = self.metadata
        return m.slot_mapping, m.block_table_tensor, m.query_start_loc, m.seq_lens

    @property
    def options(self) -> dict[str, Any]:
        return {name: getattr(self.site, name) for name in ("scale", "window", "softcap", "chunk")}

    def arguments(self, prepared: Sequence[Tensor] = ()) -> tuple[Any, ...]:
        return (self.q, self.k, self.v, *self.cache.of_layer(0), *self.tables, self.sinks, list(prepared))

    def buffers(self) -> list[Tensor]:
        """The tensors among the op's arguments, which a CUDA graph reads and writes in place."""
        return [argument for argument in self.arguments() if isinstance(argument, Tensor)]

    def inputs(self) -> dict[str, Tensor]:
        names = ("q", "k", "v", "slot_mapping", "block_table", "query_start_loc", "seq_lens", "sinks", "k_scale", "v_scale")
        fixed = (scale if is_fixed(scale) else None for scale in self.cache.of_layer(0)[2:])
        tensors = (self.q, self.k, self.v, *self.tables, self.sinks, *fixed)
        return {name: tensor for name, tensor in zip(names, tensors, strict=True) if tensor is not None}

    @property
    def held(self) -> dict[str, Tensor]:
        """What steps write, by name."""
        names = ("key", "value", "key scale", "value scale")
        return {n: t for n, t in zip(names, self.cache.of_layer(0), strict=True) if t is not None and not is_fixed(t)}

    def stored_new(self, count: int) -> dict[str, Tensor]:
        """The first ``count`` tokens of the step as the cache must hold them, by the names of ``held``."""
        found: dict[str, Tensor] = {}
        for which, new in (("key", self.new_k), ("value", self.new_v)):
            codes, scale = self.stored(which, new[:count])
            found |= {which: codes} | ({} if scale is None or self.cache.fixed_scale else {f"{which} scale": scale})
        return found

    def stored(self, which: str, new: Tensor) -> tuple[Tensor, Tensor | None]:
        """Keys or values ("key", "value") as the cache must hold them, and their scales if it is quantized."""
        scales = self.cache.of_layer(0)[2 if which == "key" else 3]
        return quantize(new, self.cache.dtype, scales) if self.cache.quantized else (new, None)

    def pour(self, fill: float | None, generator: torch.Generator) -> None:
        for tensor in self.held.values():
            noise = (torch.tensor(fill, device=tensor.device) if fill is not None else
                     torch.empty(tensor.shape, device=tensor.device).normal_(0, NOISE, generator=generator))
            tensor.copy_(noise if tensor.is_floating_point() else noise.nan_to_num(nan=127.0).clamp(-127, 127))

    def put(self, which: str, new: Tensor, page: Tensor, offset: Tensor) -> Tensor:
        """Store the first of ``new`` (L, Hkv, D) at these slots of the "key" or "value" cache; returns all as it reads back."""
        codes, scale = self.stored(which, new)
        bits(self.held[which])[page, offset] = bits(codes[: len(page)])
        if scale is None:
            return new
        if not self.cache.fixed_scale:
            self.held[f"{which} scale"][page, offset] = scale[: len(page)]
        return dequantize(codes, scale)


def scattered(query_lens: Sequence[int], seq_lens: Sequence[int], *, page_size: int, device: torch.device | str,
              num_pages: int | None = None, table_width: int = 0, pad: tuple[int, int] = (0, 0), seed: int = 0,
              common: int = 0, sharing: Sequence[bool] = ()) -> tuple[list[list[int]], CommonAttentionMetadata, int]:
    """Pages of each sequence, in random order, the metadata with padding, and the number of pages; arguments of ``lay_out``.
    ``common``: pages at the start of all sequences that are ``sharing``."""
    counts = [-(-total // page_size) for total in seq_lens]
    num_pages = num_pages or sum(counts) + 5
    order = (torch.randperm(num_pages - 1, generator=torch.Generator().manual_seed(seed)) + 1).tolist()
    shared = [order.pop() for _ in range(common)]
    table = [shared * mine + [order.pop() for _ in range(count - common * mine)]
             for count, mine in zip(counts, sharing or [False] * len(counts), strict=True)]
    meta = CommonAttentionMetadata.build(query_lens, seq_lens, [row + [0] * (table_width - len(row)) for row in table],
                                         page_size=page_size, device=device)
    return table, meta.padded(meta.num_tokens + pad[0], meta.num_reqs + pad[1]), num_pages


def lay_out(site: AttentionSite, query_lens: Sequence[int], seq_lens: Sequence[int], *, page_size: int,
            device: torch.device | str = "cpu", layout: Layout = "NHD", kv_dtype: torch.dtype | None = None, sink: float = 0.0,
            num_pages: int | None = None, table_width: int = 0, pad: tuple[int, int] = (0, 0), write: bool = True,
            strided: bool = False, fill: float | None = None, expect: bool = True, fast_tanh: bool = False, seed: int = 0,
            shared: int = 0, kv_scales: KVScales | None = None) -> Batch:
    """A batch in which sequence r schedules the last query_lens[r] of its seq_lens[r] tokens, with its pages shuffled.

    Args:
        kv_dtype: of the cache; None: the site's.  kv_scales: fixed scales of it.
        num_pages, table_width: of the cache and the block table, at least what the batch needs.
        pad: padding tokens and padding rows.  fill: what lies in slots without an owner; None: noise.
        strided: q, k and v are views into one tensor, as a fused projection gives them.  sink: mean of the sinks' logits.
        expect: False leaves ``expected``, ``bound``, ``keys`` and ``values`` empty.
        fast_tanh: allow the error of the hardware's tanh, see ``rounding``.
        shared: whole pages of tokens at the start of the sequences that are one and the same, for those sequences that do not
            schedule one of them.
    """
    heads, kv_heads, dim, dim_v = site.num_heads, site.num_kv_heads, site.head_dim, site.head_dim_v
    generator = torch.Generator(device).manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).to(site.dtype)

    sharing = [shared > 0 and total - count >= shared for count, total in zip(query_lens, seq_lens, strict=True)]
    table, meta, num_pages = scattered(query_lens, seq_lens, page_size=page_size, device=device, num_pages=num_pages,
                                       table_width=table_width, pad=pad, seed=seed, common=shared // page_size, sharing=sharing)
    prefix: tuple[Tensor, Tensor] | None = None
    cache = PagedKVCache.for_sites([site], num_pages=num_pages, page_size=page_size, device=device, layout=layout,
                                   dtype=kv_dtype, kv_scales=kv_scales)
    shapes = ((heads, dim), (kv_heads, dim), (kv_heads, dim_v))
    if strided:
        parts = randn(meta.num_tokens, sum(h * d for h, d in shapes)).split([h * d for h, d in shapes], dim=1)
        q, k, v = (part.unflatten(1, shape) for part, shape in zip(parts, shapes, strict=True))
    else:
        q, k, v = (randn(meta.num_tokens, *shape) for shape in shapes)
    for tensor in (q, k, v):
        tensor[meta.num_actual_tokens :] = math.nan
    zeros = torch.zeros(meta.num_tokens if expect else 0, heads, dim_v, dtype=torch.float64, device=device)
    sinks = randn(heads) + sink if site.sinks else None
    batch = Batch(site, q, k, v, sinks, cache, meta, write, zeros, torch.zeros_like(zeros))
    batch.pour(fill, generator)
    magnitude, begin = torch.zeros_like(zeros), 0
    for count, total, pages, mine in zip(query_lens, seq_lens, table, sharing, strict=True):
        own = slice(begin, begin + count)
        begin += count
        keys, values = randn(total, kv_heads, dim), randn(total, kv_heads, dim_v)
        keys[total - count :], values[total - count :] = k[own], v[own]
        if mine:
            prefix = prefix or (keys[:shared].clone(), values[:shared].clone())
            keys[:shared], values[:shared] = prefix
        at = torch.arange(total - count if write else total, device=device)
        slots = torch.tensor(pages, dtype=torch.long, device=device)[at // page_size], at % page_size
        read = [batch.put(which, new, *slots) for which, new in (("key", keys), ("value", values))]
        if expect:
            batch.keys.append(keys)
            batch.values.append(values)
            both = reference(site, q[own], read[0], torch.cat([read[1], read[1].abs()], dim=-1), batch.sinks)
            batch.expected[own], magnitude[own] = both.split(dim_v, dim=-1)
    if expect:
        batch.bound = rounding(magnitude, batch.expected, site.dtype, site.softcap if fast_tanh else None)
    return batch


def reference(site: AttentionSite, q: Tensor, keys: Tensor, values: Tensor, sinks: Tensor | None, rows: int = 256) -> Tensor:
    """``attention_eager`` in float64 on one sequence: q (n, H, D) are the last n of the tokens of keys (L, Hkv, D) and
    values (L, Hkv, Dv); (n, H, Dv). ``rows``: queries at a time, which bounds the memory."""
    before = len(keys) - len(q)
    wide_q, wide_k, wide_v = (x.double().transpose(0, 1)[None] for x in (q, keys, values))
    out = q.new_zeros(len(q), q.shape[1], values.shape[2], dtype=torch.float64)
    for begin in range(0, len(q), rows):
        end = min(begin + rows, len(q))
        out[begin:end] = attention_eager(
            wide_q[:, :, begin:end], wide_k[:, :, : before + end], wide_v[:, :, : before + end], sinks, layer=site.layer,
            scale=site.scale, window=site.window, softcap=site.softcap, chunk=site.chunk, causal=True)[0].transpose(0, 1)
    return out


def bits(tensor: Tensor) -> Tensor:
    """The same memory as integers: to compare bit by bit, and to index dtypes that torch cannot index."""
    return tensor.view({8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}[tensor.element_size()])


@contextlib.contextmanager
def planned(backend: AttentionBackend, batch: Batch, **step_options: Any) -> Iterator[None]:
    """Inside, the batch's step is in progress and the backend has planned it."""
    step = Step(batch.cache, batch.metadata, attention=backend, **step_options)
    with running(step), torch.no_grad():
        ensure_planned(step, backend, [batch.site])
        yield


def prepared(backend: AttentionBackend, batch: Batch) -> list[Tensor]:
    return backend.prepared(*batch.tables, batch.metadata.page_size)


def run(backend: AttentionBackend, batch: Batch, rotary: int = 0, form: RopeForm = PLAIN, **step_options: Any) -> Tensor:
    """The batch through the backend as in a model's forward: state and plan on the host, then ``prepare`` and the op.
    ``step_options``: of ``Step``. With ``rotary`` through ``rope_op``, on q and k that a rotation of ``rotary`` dimensions
    turns into the batch's: by quarter turns, which are exact."""
    with planned(backend, batch, **step_options):
        arguments = batch.arguments(prepared(backend, batch))
        if not rotary:
            return backend.op(*arguments, **batch.options)
        turns = torch.randint(4, (len(batch.q), rotary // 2), generator=torch.Generator().manual_seed(3))
        if not form.half_tables:
            turns = turns.repeat_interleave(2, dim=1) if form.interleaved else turns.repeat(1, 2)
        cos, sin = (torch.tensor(quarters, dtype=batch.q.dtype)[turns].to(batch.q.device)
                    for quarters in ((1, 0, -1, 0), (0, 1, 0, -1)))
        q, k = (rotate(x, cos, -sin, form.interleaved, form.half_tables) for x in (batch.q, batch.new_k))
        op: Any = backend.rope_op
        return op(q, k, batch.new_v, cos, sin, None, None, 0.0, *arguments[3:], **batch.options, **form.options())


def check(backend: AttentionBackend, batch: Batch, rotary: int = 0, form: RopeForm = PLAIN) -> Tensor:
    """Run the batch. Raises Failure unless outputs are within bounds, new keys and values are stored exactly, and inputs and
    every other slot are bit for bit as before."""
    wanted = {name: bits(tensor).clone() for name, tensor in batch.held.items()}
    if batch.write:
        live, size = batch.metadata.slot_mapping[: batch.metadata.num_actual_tokens], batch.metadata.page_size
        for name, part in batch.stored_new(len(live)).items():
            wanted[name][live // size, live % size] = bits(part)
    given = {name: (tensor, tensor.clone()) for name, tensor in batch.inputs().items()}
    out = run(backend, batch, rotary, form)
    declared = backend.bytes_beside(batch.site, batch.metadata.page_size) * batch.cache.num_pages
    if (kept := batch.cache.beside_bytes) != declared:
        raise Failure(f"the backend keeps {kept} bytes beside the cache and declares {declared} (page_bytes)")
    for name, (tensor, before) in given.items():
        if not torch.equal(bits(tensor), bits(before)):
            raise Failure(f"the backend changed its input {name}")
    for name, tensor in batch.held.items():
        differs = (bits(tensor) != wanted[name]).flatten(2).any(-1)
        if differs.any():
            page, offset = differs.nonzero()[0].tolist()
            raise Failure(f"{int(differs.sum())} slots of the {name} cache are wrong after the step; the first is page {page}, "
                          f"offset {offset}{' (the null page)' if page == 0 else ''}")
    compare(out, batch)
    return out


def compare(out: Tensor, batch: Batch) -> None:
    """Raises Failure unless every live number is within its bound and padding is zero."""
    live = batch.metadata.num_actual_tokens
    if out.shape != batch.expected.shape or out.dtype != batch.site.dtype:
        raise Failure(f"returned {tuple(out.shape)} {out.dtype}, not {tuple(batch.expected.shape)} {batch.site.dtype}")
    if not torch.isfinite(out[:live]).all():
        raise Failure(f"{int((~torch.isfinite(out[:live])).sum())} outputs are not finite")
    compare_numbers(out[:live], batch.expected[:live], batch.bound[:live])
    if not (out[live:] == 0).all():
        raise Failure("outputs of padding tokens are not zero")
