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

from attn_ops.attention import AttentionSite
from attn_ops.backend import AttentionBackend
from attn_ops.kv_cache import PagedKVCache
from attn_ops.metadata import CommonAttentionMetadata
from attn_ops.step import Step, StepLimits, running


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

    def arguments(self, prepared: Sequence[torch.Tensor] = ()) -> tuple:
        """Positional arguments of the paged op."""
        m = self.metadata
        return (self.q, self.k, self.v, self.cache.k[0], self.cache.v[0], m.slot_mapping, m.block_table_tensor,
                m.query_start_loc, m.seq_lens, self.sinks, list(prepared))


def make_case(
    query_lens: Sequence[int], seq_lens: Sequence[int], *, num_heads: int, num_kv_heads: int, head_dim: int,
    head_dim_v: int | None = None, page_size: int, layout: str = "NHD", dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu", seed: int = 0, window: int | None = None, softcap: float | None = None,
    chunk: int | None = None, sinks: bool = False, scale: float | None = None, write: bool = True,
    pad_tokens: int = 0, pad_reqs: int = 0, strided: bool = False, num_pages: int | None = None,
    table_width: int | None = None, poison: float | None = None, expect: bool = True,
) -> Case:
    """Make a batch in which sequence r schedules the last query_lens[r] of its seq_lens[r] tokens.

    Args:
        write: False for a layer that shares another's cache: the step's keys are in it already, k and v are None.
        pad_tokens, pad_reqs: padding tokens (with NaN in q, k and v) and padding rows.
        strided: q, k and v are views into one fused tensor, as a fused projection gives them.
        num_pages, table_width: of the cache and the block table; default as many as needed, and some more.
        poison: what lies in the slots that no sequence owns; noise if None.
        expect: False leaves ``expected`` and ``bound`` zero (for timing).
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
                         head_dim=head_dim, head_dim_v=head_dim_v, dtype=dtype, device=device, layout=layout)
    for tensor in (cache.k[0], cache.v[0]):
        if poison is None:
            tensor.normal_(0, 30, generator=generator)
        else:
            tensor.fill_(poison)
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
    magnitude = torch.zeros_like(expected)
    begin = 0
    for query, seq, row in zip(query_lens, seq_lens, table, strict=True):
        pos = torch.arange(seq, device=device)
        page = torch.tensor(row, dtype=torch.long, device=device)[pos // page_size]
        keys, values = randn(seq, num_kv_heads, head_dim), randn(seq, num_kv_heads, head_dim_v)
        own = slice(begin, begin + query)
        keys[seq - query :], values[seq - query :] = new_k[own], new_v[own]
        held = slice(0, seq - query if write else seq)
        cache.k[0][page[held], pos[held] % page_size] = keys[held]
        cache.v[0][page[held], pos[held] % page_size] = values[held]
        if query and expect:
            expected[own] = fast_oracle(q[own], keys, values, sinks=sink_logits, **options)
            magnitude[own] = fast_oracle(q[own], keys, values.abs(), sinks=sink_logits, **options)
        begin += query
    # Kernels round the softmax weights and the output to the dtype: half an eps each, of weights @ |v| and of the
    # output. Twice that, and 1e-5 for what is computed in float32.
    bound = (magnitude + expected.abs()) * torch.finfo(dtype).eps + 1e-5
    site = AttentionSite(layer=0, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim,
                         head_dim_v=head_dim_v, dtype=dtype, sinks=sinks, **options)
    return Case(q, new_k if write else None, new_v if write else None, new_k, new_v, cache, metadata, sink_logits,
                options, expected, bound, site)


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
    """``run_case``, then compare the output with the oracle and both caches with what they must hold, bit by bit."""
    wanted = []
    for cache, new in ((case.cache.k[0], case.new_k), (case.cache.v[0], case.new_v)):
        copy = cache.clone()
        if case.k is not None:
            live = case.metadata.slot_mapping >= 0
            slot = case.metadata.slot_mapping[live]
            copy[slot // case.metadata.page_size, slot % case.metadata.page_size] = new[live]
        wanted.append(copy)
    out = run_case(backend, case)
    check_output(out, case)
    bits = torch.int32 if out.element_size() == 4 else torch.int16
    for name, cache, copy in zip("kv", (case.cache.k[0], case.cache.v[0]), wanted, strict=True):
        assert torch.equal(cache.view(bits), copy.view(bits)), f"the {name} cache holds something else than it must"
    return out


__all__ = ["Case", "check_case", "check_output", "fast_oracle", "make_case", "run_case"]
