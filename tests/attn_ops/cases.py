"""Paged-attention test cases for every backend: make one, run a backend on it, compare with an oracle.

``make_case`` lays the keys of a ragged batch out in a paged cache (shuffled pages, noise in every slot that no
sequence owns), computes the expected output, and returns a Case. ``run_case`` runs a backend's paged op on it,
``check_case`` also compares the output, the slots written (exactly) and all other slots (bit by bit). """

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from quire.attn_ops.attention import AttentionSite
from quire.attn_ops.backend import AttentionBackend
from quire.attn_ops.kv_cache import PagedKVCache
from quire.attn_ops.metadata import CommonAttentionMetadata
from quire.attn_ops.step import Step, StepLimits, running
from tests.attn_ops.oracle import half_step, quantised, read_back


def fast_oracle(q, keys, values, *, scale, window=None, softcap=None, chunk=None, sinks=None, rows=256):
    """``oracle_attention`` without Python loops over queries and heads: float64, ``rows`` queries at a time, any
    device."""
    n, heads, dim = q.shape
    length, kv_heads = keys.shape[:2]
    grouped = q.double().view(n, kv_heads, heads // kv_heads, dim)
    keys, values = keys.double(), values.double()
    key_pos = torch.arange(length, device=q.device)
    out = torch.zeros(n, heads, values.shape[2], dtype=torch.float64, device=q.device)
    for begin in range(0, n, rows):
        block = grouped[begin : begin + rows]
        pos = length - n + begin + torch.arange(block.shape[0], device=q.device)[:, None]
        keep = key_pos <= pos
        if window is not None:
            keep = keep & (pos - key_pos < window)
        if chunk is not None:
            keep = keep & (key_pos // chunk == pos // chunk)
        logits = torch.einsum("nkgd,lkd->kgnl", block, keys) * scale
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        logits = logits.masked_fill(~keep, -math.inf)
        denominator = logits.logsumexp(-1)
        if sinks is not None:
            denominator = torch.logaddexp(denominator, sinks.double().view(kv_heads, -1, 1))
        weights = torch.exp(logits - denominator[..., None])
        out[begin : begin + rows] = torch.einsum("kgnl,lkd->nkgd", weights, values).flatten(1, 2)
    return out


@dataclass
class Case:
    """One batch. ``expected`` (T, H, Dv) is float64, zero for padding tokens; ``bound``: error allowed for each number.

    ``k`` and ``v`` are None where the layer writes nothing; ``new_k`` and ``new_v`` are the step's keys and values.
    With a quantised cache ``expected`` is of the keys and values as they read back; ``plain`` is of what they were before,
    and ``drift`` how far rounding them may carry each number from that.
    """

    q: torch.Tensor
    k: torch.Tensor | None
    v: torch.Tensor | None
    new_k: torch.Tensor
    new_v: torch.Tensor
    cache: PagedKVCache
    metadata: CommonAttentionMetadata
    sinks: torch.Tensor | None
    options: dict[str, Any]
    expected: torch.Tensor
    bound: torch.Tensor
    site: AttentionSite
    plain: torch.Tensor | None = None
    drift: torch.Tensor | None = None

    def arguments(self, prepared: Sequence[torch.Tensor] = ()) -> tuple:
        """Positional arguments of the paged op."""
        m = self.metadata
        return (self.q, self.k, self.v, *self.cache.of_layer(0), m.slot_mapping, m.block_table_tensor,
                m.query_start_loc, m.seq_lens, self.sinks, list(prepared))

    def buffers(self) -> list[torch.Tensor]:
        """The tensors among the op's arguments, which a CUDA graph reads and writes in place."""
        return [tensor for tensor in self.arguments()[:12] if tensor is not None]


def make_case(
    query_lens: Sequence[int], seq_lens: Sequence[int], *, num_heads: int, num_kv_heads: int, head_dim: int,
    head_dim_v: int | None = None, page_size: int, layout: str = "NHD", dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu", seed: int = 0, window: int | None = None, softcap: float | None = None,
    chunk: int | None = None, sinks: bool = False, scale: float | None = None, write: bool = True,
    pad_tokens: int = 0, pad_reqs: int = 0, strided: bool = False, num_pages: int | None = None,
    table_width: int | None = None, poison: float | None = None, expect: bool = True, kv_dtype: torch.dtype | None = None,
) -> Case:
    """Make a batch in which sequence r schedules the last query_lens[r] of its seq_lens[r] tokens.

    Args:
        write: False for a layer that shares another's cache: the step's keys are in it already, k and v are None.
        pad_tokens, pad_reqs: padding tokens (with NaN in q, k and v) and padding rows.
        strided: q, k and v are views into one fused tensor, as a fused projection gives them.
        num_pages, table_width: of the cache and the block table; default as many as needed, and some more.
        poison: what lies in the slots that no sequence owns; noise if None.
        expect: False leaves ``expected`` and ``bound`` zero (for timing).
        kv_dtype: of a quantised cache; None: ``dtype``.
    """
    head_dim_v = head_dim_v or head_dim
    scale = head_dim**-0.5 if scale is None else scale
    generator = torch.Generator(device).manual_seed(seed)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(dtype)

    pages = [-(-n // page_size) for n in seq_lens]
    num_pages = num_pages or sum(pages) + 5
    order = (torch.randperm(num_pages - 1, generator=torch.Generator().manual_seed(seed)) + 1).tolist()
    table = []
    for count in pages:
        table.append(order[:count])
        order = order[count:]
    metadata = CommonAttentionMetadata.build(query_lens, seq_lens, table, page_size=page_size, device=device)
    if table_width is not None:
        wide = metadata.block_table_tensor.new_zeros(len(table), table_width)
        wide[:, : metadata.block_table_tensor.shape[1]] = metadata.block_table_tensor
        object.__setattr__(metadata, "block_table_tensor", wide)
    tokens, real = sum(query_lens) + pad_tokens, sum(query_lens)
    metadata = metadata.padded(tokens, len(query_lens) + pad_reqs)

    cache = PagedKVCache(num_layers=1, num_pages=num_pages, page_size=page_size, num_kv_heads=num_kv_heads,
                         head_dim=head_dim, head_dim_v=head_dim_v, dtype=kv_dtype or dtype, device=device, layout=layout)
    for tensor in (t for t in cache.of_layer(0) if t is not None):
        noise = torch.empty(tensor.shape, device=device)
        noise.normal_(0, 30, generator=generator) if poison is None else noise.fill_(poison)
        tensor.copy_(noise if tensor.is_floating_point() else noise.nan_to_num(nan=127.0).clamp(-127, 127))

    def hold(slots, new, at: int) -> torch.Tensor:
        """Put keys (at 0) or values (at 1) at some slots of the cache; all of ``new`` as it will read back."""
        codes, scale = (new, None) if kv_dtype is None else quantised(new, kv_dtype)
        if scale is not None:
            cache.of_layer(0)[2 + at][slots] = scale[: len(slots[0])]
        bits(cache.of_layer(0)[at])[slots] = bits(codes[: len(slots[0])])
        return new if scale is None else read_back(codes, scale)
    if strided:
        sizes = [num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim_v]
        fused = randn(tokens, sum(sizes))
        fused[real:] = math.nan
        parts = fused.split(sizes, dim=1)
        dims = (head_dim, head_dim, head_dim_v)
        q, new_k, new_v = (part.unflatten(1, (-1, d)) for part, d in zip(parts, dims, strict=True))
    else:
        q, new_k = randn(tokens, num_heads, head_dim), randn(tokens, num_kv_heads, head_dim)
        new_v = randn(tokens, num_kv_heads, head_dim_v)
        for tensor in (q, new_k, new_v):
            tensor[real:] = math.nan
    sink_logits = randn(num_heads) if sinks else None
    options = dict(scale=scale, window=window, softcap=softcap, chunk=chunk)
    expected = torch.zeros(tokens, num_heads, head_dim_v, dtype=torch.float64, device=device)
    magnitude, plain, drift = torch.zeros_like(expected), torch.zeros_like(expected), torch.zeros_like(expected)
    begin = 0
    for query, seq, row in zip(query_lens, seq_lens, table, strict=True):
        pos = torch.arange(seq, device=device)
        page = torch.tensor(row, dtype=torch.long, device=device)[pos // page_size]
        keys, values = randn(seq, num_kv_heads, head_dim), randn(seq, num_kv_heads, head_dim_v)
        own = slice(begin, begin + query)
        keys[seq - query :], values[seq - query :] = new_k[own], new_v[own]
        held = slice(0, seq - query if write else seq)
        slots = page[held], pos[held] % page_size
        stored_keys, stored_values = hold(slots, keys, 0), hold(slots, values, 1)
        if query and expect:
            expected[own] = fast_oracle(q[own], stored_keys, stored_values, sinks=sink_logits, **options)
            magnitude[own] = fast_oracle(q[own], stored_keys, stored_values.abs(), sinks=sink_logits, **options)
            if kv_dtype is not None:
                # A score is off by at most delta (softcap only shrinks that), so a weight w by at most w * (e^2delta - 1),
                # and w * |v| adds w * e^2delta * (half a step of v).
                plain[own] = fast_oracle(q[own], keys, values, sinks=sink_logits, **options)
                steps = half_step(keys, quantised(keys, kv_dtype)[1], kv_dtype)
                grouped = q[own].double().abs().view(query, num_kv_heads, -1, head_dim)
                delta = torch.einsum("nkgd,lkd->nkgl", grouped, steps).amax(-1).flatten(1) * scale
                grown = torch.exp(2 * delta)[..., None]
                steps = half_step(values, quantised(values, kv_dtype)[1], kv_dtype)
                drift[own] = grown * fast_oracle(q[own], keys, steps, sinks=sink_logits, **options)
                drift[own] += (grown - 1) * fast_oracle(q[own], keys, values.abs(), sinks=sink_logits, **options)
        begin += query
    # Kernels round the softmax weights and the output to the dtype: half an eps each, of weights @ |v| and of the
    # output. Twice that, and 1e-5 for what is computed in float32.
    bound = (magnitude + expected.abs()) * torch.finfo(dtype).eps + 1e-5
    site = AttentionSite(layer=0, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim,
                         head_dim_v=head_dim_v, dtype=dtype, sinks=sinks, **options)
    return Case(q, new_k if write else None, new_v if write else None, new_k, new_v, cache, metadata, sink_logits,
                options, expected, bound, site, *((plain, drift) if kv_dtype is not None else ()))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as integers: to compare bit by bit, and to index what torch cannot."""
    return tensor.view({4: torch.int32, 2: torch.int16, 1: torch.int8}[tensor.element_size()])


def run_case(backend: AttentionBackend, case: Case) -> torch.Tensor:
    """Run a backend's paged op on the case, its host and device preparation included: (T, H, Dv)."""
    m = case.metadata
    step = Step(case.cache, m, attention=backend)
    if backend.make_state is not None:
        limits = StepLimits(m.seq_lens.shape[0], m.num_tokens, m.block_table_tensor.shape[1])
        step.states[backend.name] = backend.make_state([case.site], case.cache, limits)
    with running(step):
        if backend.plan is not None:
            backend.plan(m, step)
        prepared: Sequence[torch.Tensor] = ()
        if backend.prepare is not None:
            prepared = backend.prepare(m.slot_mapping, m.block_table_tensor, m.query_start_loc, m.seq_lens, m.page_size)
        return backend.op(*case.arguments(prepared), **case.options)


def check_output(out: torch.Tensor, case: Case) -> None:
    """Every number is within the case's bound, and padding tokens are zero."""
    assert out.shape == case.expected.shape and out.dtype == case.q.dtype
    assert torch.isfinite(out).all(), f"{(~torch.isfinite(out)).sum()} numbers are not finite"
    assert not out[case.metadata.num_actual_tokens :].any(), "padding tokens must be zero"
    excess = ((out.double() - case.expected).abs() / case.bound).flatten()
    worst = int(excess.argmax()) if excess.numel() else 0
    assert not excess.numel() or excess[worst] <= 1, (
        f"{int((excess > 1).sum())} of {excess.numel()} numbers are off; the worst, at "
        f"{torch.unravel_index(torch.tensor(worst), out.shape)}, is {out.flatten()[worst]:.6f} and not "
        f"{case.expected.flatten()[worst]:.6f}: {excess[worst]:.1f} times the bound")


def check_case(backend: AttentionBackend, case: Case) -> torch.Tensor:
    """``run_case``, then compare the output with the oracle and caches and scales with what they must hold, bit by bit."""
    held = case.cache.of_layer(0)
    wanted = [None if tensor is None else bits(tensor).clone() for tensor in held]
    if case.k is not None:
        live = case.metadata.slot_mapping >= 0
        slot = case.metadata.slot_mapping[live]
        slots = slot // case.metadata.page_size, slot % case.metadata.page_size
        for at, new in enumerate((case.new_k, case.new_v)):
            codes, scale = quantised(new[live], case.cache.dtype) if case.cache.quantised else (new[live], None)
            wanted[at][slots] = bits(codes)
            if scale is not None:
                wanted[2 + at][slots] = bits(scale)
    out = run_case(backend, case)
    check_output(out, case)
    for name, tensor, copy in zip(("k", "v", "k_scale", "v_scale"), held, wanted, strict=True):
        assert tensor is None or torch.equal(bits(tensor), copy), f"the {name} cache holds something else than it must"
    return out


def check_drift(out: torch.Tensor, case: Case) -> None:
    """Every number is as near to what it would be without quantisation as the half steps allow, and not equal to it."""
    assert case.plain is not None and case.drift is not None
    off = (out.double() - case.plain).abs()
    assert (off <= case.drift + case.bound).all()
    assert (off > case.bound).any(), "nothing was quantised"


__all__ = ["Case", "bits", "check_case", "check_drift", "check_output", "fast_oracle", "make_case", "run_case"]
