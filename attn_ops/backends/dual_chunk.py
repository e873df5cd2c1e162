"""Backend ``dual_chunk:CHUNK:LOCAL``: dual chunk attention, for contexts longer than training's. An approximation.

Dual chunk attention (An et al., 2024, arXiv:2402.17463; Qwen2.5-1M, arXiv:2501.15383) scores no key at a distance that training
has not shown. With chunks of L = CHUNK - LOCAL tokens (``chunk_size`` and ``local_size`` of such a model's config), the query
at position p is scored with a key of chunk b as if it stood at ``min(p, CHUNK + b * L)``. That is p within a chunk (intra), and
for the next chunk while they are near (successive); distances to all others (inter) are at most CHUNK. Below CHUNK tokens it is
plain attention. The factor on scores that Qwen adds for length, and its sparse prefill, are not part of it.

Keys lie in the cache as always, rotated by their position. The rotary embedding of position CHUNK + b * L is taken from the
model's own, when a token of that position passes: a sequence has had it before it needs it. So q must come before its rotation:
a layer whose rotary embedding quire does not find is served up to CHUNK tokens, and refused beyond.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from quire.attn_ops.attention import AttentionSite
from quire.attn_ops.backend import (
    AttentionBackend,
    AttentionCapabilities,
    BackendFamily,
    UnsupportedAttention,
    define_paged_op,
)
from quire.attn_ops.composite import op_name
from quire.attn_ops.kv_cache import PagedKVCache
from quire.attn_ops.metadata import CommonAttentionMetadata
from quire.attn_ops.ops.merge_state import merge_state
from quire.attn_ops.ops.rope import RopeForm, norm_and_rotate, rope_kv_write
from quire.attn_ops.ops.varlen import varlen_attention
from quire.attn_ops.registry import plain_backend
from quire.attn_ops.step import Step, StepLimits, current_step

NAME = "dual_chunk"
USAGE = (f"{NAME}:CHUNK:LOCAL: an approximation. Scores no key at a distance of more than CHUNK tokens (chunk_size and "
         "local_size of a Qwen 1M model's config); LOCAL is at most half of CHUNK")


class Part(NamedTuple):
    """Queries and the keys that they see: token of each query (n,), sequence and position of each key (N,), and where sequences
    begin in both, int32."""

    token: torch.Tensor
    row: torch.Tensor
    position: torch.Tensor
    cu_q: torch.Tensor
    cu_k: torch.Tensor


class Batch(NamedTuple):
    """near: keys that a query sees at the true distance. far[b]: those of chunk b, seen from CHUNK + b * L. passing: (token, b)
    of tokens that stand there. longest: tokens of the longest sequence with queries; up to CHUNK the rest is empty."""

    near: Part
    far: list[Part]
    passing: list[tuple[int, int]]
    longest: int


def divide(query_lens: Sequence[int], seq_lens: Sequence[int], chunk: int, length: int, device: torch.device) -> Batch:
    """Divide a batch, whose sequence r schedules the last query_lens[r] of its seq_lens[r] tokens, on the host."""
    longest = max((total for count, total in zip(query_lens, seq_lens, strict=True) if count), default=0)
    if longest <= chunk:  # plain attention
        return Batch(_part([], device), [], [], longest)
    near: list[tuple[int, int, int, int, int]] = []  # row, tokens from, to, keys from, to
    far: list[list[tuple[int, int, int, int, int]]] = []
    passing, begin = [], 0
    for row, (count, total) in enumerate(zip(query_lens, seq_lens, strict=True)):
        first, at = total - count, 0
        while at < count:  # queries with as many far chunks
            many = max(0, (first + at - chunk) // length + 1)
            end = min(count, chunk + many * length - first)
            near.append((row, begin + at, begin + end, many * length, first + end))
            at = end
        for b in range(max(0, (total - 1 - chunk) // length + 1) if count else 0):
            position = chunk + b * length
            far += [[]] * (b == len(far))
            far[b] = [*far[b], (row, begin + max(0, position - first), begin + count, b * length, (b + 1) * length)]
            if position >= first:
                passing.append((begin + position - first, b))
        begin += count
    return Batch(_part(near, device), [_part(some, device) for some in far], passing, longest)


def _part(pieces: Sequence[tuple[int, int, int, int, int]], device: torch.device) -> Part:
    def joined(ranges: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat([*ranges, torch.zeros(0, dtype=torch.int64)]).to(device)

    def starts(sizes: Sequence[int]) -> torch.Tensor:
        return torch.tensor([0, *sizes]).cumsum(0).to(device, torch.int32)

    return Part(
        joined([torch.arange(a, b) for _, a, b, _, _ in pieces]), joined([torch.full((d - c,), r) for r, _, _, c, d in pieces]),
        joined([torch.arange(c, d) for _, _, _, c, d in pieces]), starts([b - a for _, a, b, _, _ in pieces]),
        starts([d - c for _, _, _, c, d in pieces]))


class State:
    """What outlives a step: the rotary embedding of position CHUNK + b * L, by the layer's key cache and b."""

    def __init__(self, chunk: int, length: int) -> None:
        self.chunk, self.length = chunk, length
        self.tables: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self.batch: Batch | None = None

    def plan(self, metadata: CommonAttentionMetadata) -> None:
        counts = metadata.query_start_loc_cpu.diff().tolist()
        lens = metadata.seq_lens_cpu.tolist()[: len(counts)]
        self.batch = divide(counts, lens, self.chunk, self.length, metadata.seq_lens.device)

    def learn(self, layer: int, cos: torch.Tensor, sin: torch.Tensor) -> None:
        """Keep the rows of cos and sin (T, R or R/2) of the tokens that stand at such positions."""
        assert self.batch is not None
        for token, b in self.batch.passing:
            if (layer, b) not in self.tables:
                self.tables[layer, b] = cos[token : token + 1].clone(), sin[token : token + 1].clone()

    def table(self, layer: int, b: int) -> tuple[torch.Tensor, torch.Tensor]:
        if (layer, b) not in self.tables:
            raise RuntimeError(f"{NAME}: no token at position {self.chunk + b * self.length} has passed this layer with this "
                               "KV cache: run the sequence from its start through this backend, with one cache")
        return self.tables[layer, b]


def gathered(cache: torch.Tensor, block_table: torch.Tensor, part: Part) -> torch.Tensor:
    """Keys or values (N, Hkv, D) of a part."""
    size = cache.shape[1]
    return cache[block_table[part.row, part.position // size].long(), part.position % size]


def backend(name: str, chunk: int, length: int) -> AttentionBackend:
    """Args:
        chunk: the largest distance, in tokens.  length: of a chunk of keys (L).
    """
    states: weakref.WeakKeyDictionary[PagedKVCache, State] = weakref.WeakKeyDictionary()

    def make_state(sites: Sequence[AttentionSite], cache: PagedKVCache, limits: StepLimits) -> State:
        return states.setdefault(cache, State(chunk, length))

    def state() -> State:
        step = current_step()
        if step is None or name not in step.states:
            raise RuntimeError(f"{name} needs the lengths on the host: run it inside `with quire.step(...)`")
        return step.states[name]

    def plan(metadata: CommonAttentionMetadata, step: Step) -> None:
        step.states[name].plan(metadata)

    def check(window: Any, chunks: Any, sinks: Any, k_scale: Any) -> None:
        if window is not None or chunks is not None or sinks is not None or k_scale is not None:
            raise UnsupportedAttention(f"the {NAME} backend has no windows, chunks of the model's own, sinks or quantized KV "
                                       "cache")

    def paged_attention(
        q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None, k_cache: torch.Tensor, v_cache: torch.Tensor,
        k_scale: torch.Tensor | None, v_scale: torch.Tensor | None, slot_mapping: torch.Tensor, block_table: torch.Tensor,
        query_start_loc: torch.Tensor, seq_lens: torch.Tensor, sinks: torch.Tensor | None, prepared: list[torch.Tensor], *,
        scale: float, window: int | None, softcap: float | None, chunk: int | None,
    ) -> torch.Tensor:
        """Store k and v, then attend: q (T, H, D) -> (T, H, Dv). q and k are rotated: up to CHUNK tokens."""
        check(window, chunk, sinks, k_scale)
        batch, limit = state().batch, state().chunk
        assert batch is not None
        if batch.longest > limit:
            raise UnsupportedAttention(
                f"{name} got a sequence of {batch.longest} tokens and cannot rotate q itself: this layer has no rotary "
                "embedding of a form in attn_ops/ops/rope.py, or the model is not compiled. It is served up to "
                f"{limit} tokens: set max_model_len, or choose another attention backend")
        return plain_backend(q.device.type).op(
            q, k, v, k_cache, v_cache, None, None, slot_mapping, block_table, query_start_loc, seq_lens, None, [], scale=scale,
            window=None, softcap=softcap, chunk=None)

    def rope_paged_attention(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor,
        q_norm_weight: torch.Tensor | None, k_norm_weight: torch.Tensor | None, eps: float, k_cache: torch.Tensor,
        v_cache: torch.Tensor, k_scale: torch.Tensor | None, v_scale: torch.Tensor | None, slot_mapping: torch.Tensor,
        block_table: torch.Tensor, query_start_loc: torch.Tensor, seq_lens: torch.Tensor, sinks: torch.Tensor | None,
        prepared: list[torch.Tensor], *, scale: float, window: int | None, softcap: float | None, chunk: int | None,
        **options: Any,
    ) -> torch.Tensor:
        """Rotate q and k (``attn_ops/ops/rope.py``), store k and v, then attend: q (T, H, D) -> (T, H, Dv)."""
        check(window, chunk, sinks, k_scale)
        known, layer, form = state(), k_cache.data_ptr(), RopeForm(**options)
        batch = known.batch
        assert batch is not None
        rotated = rope_kv_write(q, k, v, cos, sin, q_norm_weight, k_norm_weight, eps, k_cache, v_cache, None, None,
                                slot_mapping, **form.options())
        if not batch.far:
            return paged_attention(rotated, None, None, k_cache, v_cache, None, None, slot_mapping, block_table,
                                   query_start_loc, seq_lens, None, [], scale=scale, window=None, softcap=softcap, chunk=None)
        known.learn(layer, cos, sin)

        def attend(query: torch.Tensor, part: Part, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
            keys, values = (gathered(c, block_table, part) for c in (k_cache, v_cache))
            return varlen_attention(query, keys, values, part.cu_q, part.cu_k, scale=scale, softcap=softcap, causal=causal)

        out = q.new_zeros(q.shape[0], q.shape[1], v_cache.shape[3])
        lse = torch.full(q.shape[:2], float("-inf"), dtype=torch.float32, device=q.device)
        out[batch.near.token], lse[batch.near.token] = attend(rotated[batch.near.token], batch.near, True)
        for b, part in enumerate(batch.far):
            query = q[part.token]
            far_cos, far_sin = (t.expand(len(query), -1) for t in known.table(layer, b))
            query = norm_and_rotate(query, q_norm_weight, far_cos, far_sin, eps, form)
            found = merge_state(out[part.token], lse[part.token], *attend(query, part, False))
            out[part.token], lse[part.token] = found
        return out

    return AttentionBackend(
        name=name,
        capabilities=AttentionCapabilities(
            devices=frozenset({"cpu", "cuda"}), dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16}),
            head_dims=lambda d, dv: max(d, dv) <= 256, head_dims_note="up to 256", softcap=True),
        available=lambda device: None, op=define_paged_op(op_name(name), paged_attention),
        rope_op=define_paged_op(op_name(name), rope_paged_attention, rope=True), rope_forms=True, make_state=make_state,
        plan=plan, packages=("triton",), every_step=True, unrotated=True,
        approximate=f"scores no key at a distance of more than {chunk} tokens")


def make(name: str, get: Callable[[str], AttentionBackend]) -> AttentionBackend:
    """The backend of such a name. Raises ValueError for another form, or sizes that do not go together."""
    sizes = name.split(":")[1:]
    if len(sizes) != 2 or not all(size.isdigit() for size in sizes):
        raise ValueError(f"attention={name!r}: write {USAGE}")
    chunk, local = map(int, sizes)
    if not chunk or 2 * local > chunk:
        raise ValueError(f"attention={name!r}: write {USAGE}")
    return backend(name, chunk, chunk - local)


FAMILY = BackendFamily(NAME, USAGE, lambda name: name == NAME or name.startswith(f"{NAME}:"), make)
