"""Backend ``dual_chunk:CHUNK:LOCAL[:DENSE_BELOW:LAST:SIZES]``: dual chunk attention, for contexts longer than training's. An
approximation.

Dual chunk attention (An et al., 2024, arXiv:2402.17463; Qwen2.5-1M, arXiv:2501.15383) scores no key at a distance that training
has not shown. With chunks of L = CHUNK - LOCAL tokens (``chunk_size`` and ``local_size`` of such a model's config), the query
at position p is scored with a key of chunk b as if it stood at ``min(p, CHUNK + b * L)``. That is p within a chunk (intra), and
for the next chunk while they are near (successive); distances to all others (inter) are at most CHUNK. Below CHUNK tokens it is
plain attention. The factor on scores that Qwen adds for length is not part of it.

Keys lie in the cache as always, rotated by their position. The rotary embedding of position CHUNK + b * L is taken from the
model's own, when a token of that position passes: a sequence has had it before it needs it. So q must come before its rotation:
a layer whose rotary embedding quire does not find is served up to CHUNK tokens, and refused beyond.

With the others, the prefill of a sequence of more than DENSE_BELOW tokens is sparse (``vertical_slash.py``; DENSE_BELOW and
LAST are ``sparse_attention_threshold`` and ``sparse_attention_last_q`` of such a model's config). The LAST last tokens of the
step's part of it choose the keys and the distances that all of the part attend to, so results depend on how a prompt is cut.
SIZES is VERTICAL:SLASH, numbers of keys and distances, or a checkpoint's ``sparse_attention_config.json``.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quire.attn_ops.attention import AttentionSite
from quire.attn_ops.backend import AttentionBackend, AttentionCapabilities, BackendFamily, UnsupportedAttention, define_paged_op
from quire.attn_ops.backends.dual_chunk.divide import Batch, Part, divide, far_chunks, gathered
from quire.attn_ops.backends.dual_chunk.vertical_slash import Sparse, read_sizes, sparse_attention
from quire.attn_ops.composite import op_name
from quire.attn_ops.kernels import host
from quire.attn_ops.kernels.host import Caches, Rope
from quire.attn_ops.kernels.launch import launch
from quire.attn_ops.kv_cache import PagedKVCache
from quire.attn_ops.kv_store import store_kv
from quire.attn_ops.metadata import CommonAttentionMetadata
from quire.attn_ops.ops.merge_state import merge_state, merge_states_triton
from quire.attn_ops.ops.rope import RopeForm, norm_and_rotate, rope_kv_write
from quire.attn_ops.ops.varlen import varlen_attention
from quire.attn_ops.registry import plain_backend
from quire.attn_ops.step import StepLimits, current_step

NAME = "dual_chunk"
LONGEST_SPLIT = 2048  # keys of a program, while there are few programs: a long sequence among short ones is split by it
CAPABILITIES = AttentionCapabilities(
    devices=frozenset({"cpu", "cuda"}), dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16}),
    head_dims=lambda d, dv: max(d, dv) <= 256, head_dims_note="up to 256", softcap=True)
USAGE = (f"{NAME}:CHUNK:LOCAL[:DENSE_BELOW:LAST:SIZES]: an approximation. Scores no key at a distance of more than CHUNK "
         "tokens (chunk_size and local_size of a Qwen 1M model's config); LOCAL is at most half of CHUNK. With the others, "
         "prefills of sequences longer than DENSE_BELOW are sparse: their LAST last queries choose keys and distances; SIZES "
         "is VERTICAL:SLASH or the model's sparse_attention_config.json")


class State:
    """What outlives a step: the rotary embedding of position CHUNK + b * L, by the layer's key cache and b. Raises
    UnsupportedAttention for sizes of a sparse prefill that are of another model."""

    def __init__(self, chunk: int, length: int, sparse: Sparse | None, sites: Sequence[AttentionSite], cache: PagedKVCache,
                 use_kernel: bool) -> None:
        self.chunk, self.length, self.sparse, self.use_kernel = chunk, length, sparse, use_kernel
        self.sizes = {} if sparse is None else {
            cache.of_layer(s.layer)[0].data_ptr(): sparse.of_layer(s.layer, s.num_heads) for s in sites}
        self.tables: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self.joined: dict[int, tuple[Tensor, Tensor]] = {}  # those of a layer, for the kernel
        self.batch: Batch  # of the step that is planned

    def plan(self, metadata: CommonAttentionMetadata) -> None:
        counts = metadata.query_start_loc_cpu.diff().tolist()
        lens = metadata.seq_lens_cpu.tolist()[: len(counts)]
        below = None if self.sparse is None else self.sparse.dense_below
        self.batch = divide(counts, lens, self.chunk, self.length, metadata.seq_lens.device, below,
                            self.use_kernel)

    def learn(self, layer: int, cos: Tensor, sin: Tensor) -> None:
        """Keep the rows of cos and sin (T, R or R/2) of the tokens that stand at such positions."""
        for token, b in self.batch.passing:
            found = cos[token : token + 1].clone(), sin[token : token + 1].clone()
            known = self.tables.setdefault((layer, b), found)
            if not torch.allclose(known[0], found[0], atol=1e-2) or not torch.allclose(known[1], found[1], atol=1e-2):
                raise UnsupportedAttention(
                    f"{NAME}: two sequences have different rotary embeddings at position {self.chunk + b * self.length}. A "
                    "model whose rotary embedding depends on more than the position (longrope, images) cannot use it: choose "
                    "another attention backend")

    def sizes_of(self, k_cache: Tensor) -> list[tuple[int, int]]:
        """Keys and distances of each head of the layer; a copy of its cache (opcheck makes some) does where there is one
        layer."""
        return self.sizes[k_cache.data_ptr()] if len(self.sizes) > 1 else next(iter(self.sizes.values()))

    def table(self, layer: int, b: int) -> tuple[Tensor, Tensor]:
        if (layer, b) not in self.tables:
            raise RuntimeError(f"{NAME}: no token at position {self.chunk + b * self.length} has passed this layer with this "
                               "KV cache: run the sequence from its start through this backend, with one cache")
        return self.tables[layer, b]

    def first_tables(self, layer: int, count: int) -> tuple[Tensor, Tensor]:
        """The tables of b < ``count``, at least, in one tensor."""
        if layer not in self.joined or len(self.joined[layer][0]) < count:
            cos, sin = zip(*(self.table(layer, b) for b in range(count)), strict=True)
            self.joined[layer] = torch.cat(cos), torch.cat(sin)
        return self.joined[layer]


def decode_by_chunk(q: Tensor, turned: Tensor, far: Rope, form: RopeForm, k_cache: Tensor, v_cache: Tensor, block_table: Tensor,
                    query_start_loc: Tensor, seq_lens: Tensor, longest: int, chunk: int, length: int, scale: float,
                    softcap: float | None) -> Tensor:
    """Decoding in one kernel, and one that merges: each key is read once, with the query of its chunk. (T, H, Dv) of tokens
    whose keys are in the cache, zeros of padding tokens.

    Args:
        q, turned: (T, H, D), before the norm and the rotary embedding, and behind them, contiguous.
        far: cos and sin of the positions ``chunk`` + b * ``length``, in row b, as many as the longest sequence has far chunks,
            and the norm.  longest: tokens of that sequence.
    """
    caches = Caches(k_cache, v_cache, None, None)
    host.check_cache_strides("decoding by chunks", caches)
    q = host.rows_contiguous(q)
    tokens, heads, dim = q.shape
    dim_v, kv_heads, half = v_cache.shape[3], k_cache.shape[2], q.dtype.itemsize == 2
    widest = max(dim, dim_v)
    blocks, per_block = host.head_blocks(heads // kv_heads, 32 if widest <= 128 else 16)
    slots = tokens * kv_heads * blocks
    if not slots:
        return q.new_empty(tokens, heads, dim_v)
    # See NOTE [How far keys are split], of the Triton backend: two programs for each multiprocessor, more for long sequences.
    one_wave = max(1, min(64, 2 * host.num_sms(q.device) // slots))
    splits = max(one_wave, min(-(-longest // LONGEST_SPLIT), 1024 // slots))
    block = (128 if widest <= 128 else 32) if half else 16
    out = torch.empty(tokens, splits, heads, dim_v, dtype=torch.float32, device=q.device)
    lse = torch.empty(out.shape[:3], dtype=torch.float32, device=q.device)
    launch(host.kernel_module("kernels.far_decode").far_decode_kernel, (slots, splits), q, turned, far, k_cache, v_cache,
           block_table, query_start_loc, seq_lens, out, lse, len(seq_lens), chunk, length, one_wave, LONGEST_SPLIT, scale,
           softcap, q.stride()[:2], block_table.stride(0), heads, host.cache_layout(caches), blocks, per_block, block,
           3 if half else 1, form.rotated(far.cos), form, num_warps=4)
    return merge_states_triton(out, lse, q.dtype)[0]


def backend(name: str, chunk: int, length: int, sparse: Sparse | None = None, use_kernel: bool | None = None
            ) -> AttentionBackend:
    """``chunk``: the largest distance, in tokens. ``length``: of a chunk of keys (L). ``sparse``: of prefills. ``use_kernel``:
    the Triton kernels, for sparse prefills and for decoding; None: on a GPU."""
    states: weakref.WeakKeyDictionary[PagedKVCache, State] = weakref.WeakKeyDictionary()

    def make_state(sites: Sequence[AttentionSite], cache: PagedKVCache, limits: StepLimits) -> State:
        kernel = cache.k[0].is_cuda if use_kernel is None else use_kernel
        return states.setdefault(cache, State(chunk, length, sparse, sites, cache, kernel))

    def state() -> State:
        step = current_step()
        if step is None or name not in step.states:
            raise RuntimeError(f"{name} needs the lengths on the host: run it inside `with quire.step(...)`")
        return step.states[name]

    def paged_attention(q: Tensor, k: Tensor | None, v: Tensor | None, k_cache: Tensor, v_cache: Tensor, k_scale: Tensor | None,
                        v_scale: Tensor | None, slot_mapping: Tensor, block_table: Tensor, query_start_loc: Tensor,
                        seq_lens: Tensor, sinks: Tensor | None, prepared: list[Tensor], *, scale: float, window: int | None,
                        softcap: float | None, chunk: int | None) -> Tensor:
        """Store k and v, then attend: q (T, H, D) -> (T, H, Dv). q and k are rotated: up to CHUNK tokens."""
        CAPABILITIES.refuse(NAME, k_scale, window=window, chunk=chunk, sinks=sinks)
        batch, limit = state().batch, state().chunk
        if batch.longest > limit:
            raise UnsupportedAttention(
                f"{name} got a sequence of {batch.longest} tokens and cannot rotate q itself: this layer has no rotary "
                "embedding of a form in attn_ops/ops/rope.py, or the model is not compiled. It is served up to "
                f"{limit} tokens: set max_model_len, or choose another attention backend")
        if batch.is_plain(limit):
            return plain_backend(q.device.type).op(
                q, k, v, k_cache, v_cache, None, None, slot_mapping, block_table, query_start_loc, seq_lens, None, [],
                scale=scale, window=None, softcap=softcap, chunk=None)
        store_kv(k, v, k_cache, v_cache, None, None, slot_mapping)
        return attend(q, lambda b, tokens: q[tokens], k_cache, v_cache, block_table, scale, softcap)

    def attend(rotated: Tensor, far_query: Callable[[int, Any], Tensor], k_cache: Tensor,
               v_cache: Tensor, block_table: Tensor, scale: float, softcap: float | None) -> Tensor:
        """(T, H, Dv) of queries (T, H, D) at their positions; ``far_query``: (b, tokens) -> those as from CHUNK + b * L."""
        known = state()
        batch = known.batch

        def seen(query: Tensor, part: Part, causal: bool) -> tuple[Tensor, Tensor]:
            keys, values = (gathered(c, block_table, part.row, part.position) for c in (k_cache, v_cache))
            return varlen_attention(query, keys, values, part.cu_q, part.cu_k, scale=scale, softcap=softcap, causal=causal)

        out = rotated.new_zeros(*rotated.shape[:2], v_cache.shape[3])
        lse = torch.full(rotated.shape[:2], float("-inf"), dtype=torch.float32, device=rotated.device)
        out[batch.near.token], lse[batch.near.token] = seen(rotated[batch.near.token], batch.near, True)
        for b, part in enumerate(batch.far):
            found = merge_state(out[part.token], lse[part.token], *seen(far_query(b, part.token), part, False))
            out[part.token], lse[part.token] = found
        for row in batch.sparse:
            assert sparse is not None
            position = torch.arange(row.total, device=rotated.device)
            keys, values = (gathered(c, block_table, row.row, position) for c in (k_cache, v_cache))
            out[row.begin : row.begin + row.queries] = sparse_attention(
                row, rotated, far_query, keys, values, known.sizes_of(k_cache), sparse.last, scale=scale, softcap=softcap,
                use_kernel=known.use_kernel)
        return out

    def rope_paged_attention(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, q_norm_weight: Tensor | None,
                             k_norm_weight: Tensor | None, eps: float, k_cache: Tensor, v_cache: Tensor, k_scale: Tensor | None,
                             v_scale: Tensor | None, slot_mapping: Tensor, block_table: Tensor, query_start_loc: Tensor,
                             seq_lens: Tensor, sinks: Tensor | None, prepared: list[Tensor], *, scale: float,
                             window: int | None, softcap: float | None, chunk: int | None, **options: Any) -> Tensor:
        """Rotate q and k (``attn_ops/ops/rope.py``), store k and v, then attend: q (T, H, D) -> (T, H, Dv)."""
        CAPABILITIES.refuse(NAME, k_scale, window=window, chunk=chunk, sinks=sinks)
        known, layer, form = state(), k_cache.data_ptr(), RopeForm(**options)
        rotated = rope_kv_write(q, k, v, cos, sin, q_norm_weight, k_norm_weight, eps, k_cache, v_cache, None, None,
                                slot_mapping, **form.options())
        if known.batch.is_plain(known.chunk):
            return paged_attention(rotated, None, None, k_cache, v_cache, None, None, slot_mapping, block_table,
                                   query_start_loc, seq_lens, None, [], scale=scale, window=None, softcap=softcap, chunk=None)
        known.learn(layer, cos, sin)

        if known.batch.decode:
            longest = known.batch.longest
            far = Rope.of(*known.first_tables(layer, far_chunks(longest, known.chunk, known.length)), q_norm_weight, None, eps)
            return decode_by_chunk(q, rotated, far, form, k_cache, v_cache, block_table, query_start_loc, seq_lens, longest,
                                   known.chunk, known.length, scale, softcap)

        def far_query(b: int, tokens: Any) -> Tensor:
            query = q[tokens]
            far_cos, far_sin = (t.expand(len(query), -1) for t in known.table(layer, b))
            return norm_and_rotate(query, q_norm_weight, far_cos, far_sin, eps, form)

        return attend(rotated, far_query, k_cache, v_cache, block_table, scale, softcap)

    return AttentionBackend(
        name=name,
        capabilities=CAPABILITIES, available=lambda device: None, op=define_paged_op(op_name(name), paged_attention),
        rope_op=define_paged_op(op_name(name), rope_paged_attention, rope=True), rope_forms=True, make_state=make_state,
        plan=lambda metadata, step: step.states[name].plan(metadata), packages=("triton",), every_step=True, unrotated=True,
        approximate=f"scores no key at a distance of more than {chunk} tokens" + (f"; {sparse}" if sparse else ""))


def make(name: str, get: Callable[[str], AttentionBackend]) -> AttentionBackend:
    """The backend of such a name. Raises ValueError for another form, sizes that do not go together, or a file that does not
    hold sizes."""
    found = re.fullmatch(r"(\d+):(\d+)(?::(\d+):(\d+):(.+))?", name.partition(":")[2])
    chunk, local, dense_below, last = (int(n or 1) for n in found.groups()[:4]) if found else (0, 0, 0, 0)
    file = found[5] or "" if found else ""
    numbers = [int(n) for n in file.split(":")] if re.fullmatch(r"\d+(:\d+)*", file) else None
    if not chunk or 2 * local > chunk or not last or (numbers is not None and (len(numbers) != 2 or 0 in numbers)):
        raise ValueError(f"attention={name!r}: write {USAGE}")
    if not file:
        return backend(name, chunk, chunk - local)
    lines: Any = tuple(numbers or ())
    if numbers is None:
        if not Path(file).is_file():
            raise ValueError(f"attention={name!r}: there is no file {file}; give the model's sparse_attention_config.json, or "
                             "VERTICAL:SLASH")
        try:
            lines = read_sizes(file)
        except ValueError as error:
            raise ValueError(f"attention={name!r}: {error}") from error
    return backend(name, chunk, chunk - local, Sparse(dense_below, last, lines))


FAMILY = BackendFamily(NAME, USAGE, make=make)
