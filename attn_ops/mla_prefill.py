"""MLA prefill on expanded keys and values (``attn_ops/mla.py`` has the two forms).

Absorbed attention does 2 rank + R products per query and key, expanded attention D + Dv, but each key is expanded first, which
takes rank (Dn + Dv) products per head. So sequences with many query tokens are expanded: from 171 on with a long prefix, at
DeepSeek's sizes. That rule counts products; it is not measured.

The step's own keys are expanded and attended to causally, then the tokens before it, in chunks of bounded size, to all; the
parts are merged by their log-sum-exp. The sizes of prefixes are the host's, so steps that run as a CUDA graph stay absorbed.

A step may bring another backend's attention to expanded keys (FASTER in its notes; ``attn_ops/long_prefill.py``).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch.nn import functional as F

from quire.attn_ops.kernels.launch import is_recording
from quire.attn_ops.kv_store import store_latent
from quire.attn_ops.metadata.prefix_chunks import PrefixChunks
from quire.attn_ops.mla import read_latent
from quire.attn_ops.ops.merge_state import merge_state
from quire.attn_ops.ops.varlen import MAX_DIM
from quire.attn_ops.step import Step, current_step

Expanded = Callable[..., tuple[torch.Tensor, torch.Tensor]]
#: Of B sequences: the slots of a chunk's tokens, (B + 1,) where those of each begin, and (B,) how many, on the host.
Chunk = tuple[torch.Tensor, torch.Tensor, np.ndarray]
#: Most elements of the keys and values of a chunk of prefixes.
CHUNK_ELEMENTS = 1 << 26
#: The note of a step with another backend's attention to expanded keys: a ``Faster``.
FASTER = "expanded attention"
#: (query_lens, key_lens, H, D, Dv, dtype=, scale=, causal=) of B sequences, on the host -> what attends as ``ragged`` does, or
#: None: it does not take them.
Faster = Callable[..., Expanded | None]


def expanding_pays(query_lens: np.ndarray, seq_lens: np.ndarray, rank: int, rope: int, nope: int, dim_v: int) -> np.ndarray:
    """(B,) bool: whether expanded keys take fewer products, for ``seq_lens`` tokens with ``query_lens`` scheduled."""
    query, seq = query_lens.astype(np.int64), seq_lens.astype(np.int64)
    pairs = query * (seq - query) + query * (query + 1) // 2
    return pairs * ((2 * rank + rope) - (nope + rope + dim_v)) > seq * (rank * (nope + dim_v))


def _first_expanded(q: torch.Tensor, c: torch.Tensor, k_rope: torch.Tensor, kv_b: torch.Tensor, seq_lens: torch.Tensor
                    ) -> tuple[int, Step] | None:
    """The first row that is expanded, and all after it are, with the step; None: no row."""
    step = current_step()
    if step is None or step.graph_key is not None or (q.is_cuda and torch.cuda.is_current_stream_capturing()):
        return None
    if q.shape[2] > MAX_DIM:
        return None
    meta = step.metadata
    if meta.num_tokens != q.shape[0] or meta.seq_lens.shape[0] != seq_lens.shape[0]:
        return None  # the op was given another batch than the step's
    rope = k_rope.shape[1]
    nope, dims = q.shape[2] - rope, kv_b.shape[0] // q.shape[1]
    rows = np.flatnonzero(expanding_pays(meta.query_lens_cpu.numpy(), meta.seq_lens_cpu.numpy(), c.shape[1], rope, nope,
                                         dims - nope))
    return (int(rows[0]), step) if rows.size else None


def attend(absorbed: Callable[..., torch.Tensor], expanded: Expanded, q: torch.Tensor, c: torch.Tensor, k_rope: torch.Tensor,
           kv_b: torch.Tensor, cache: torch.Tensor, slot_mapping: torch.Tensor, block_table: torch.Tensor,
           query_start_loc: torch.Tensor, seq_lens: torch.Tensor, prepared: list[torch.Tensor],
           c_scale: torch.Tensor | None = None, rope_scale: torch.Tensor | None = None, *, scale: float) -> torch.Tensor:
    """The paged op of MLA: the rows before the first that pays to expand by ``absorbed``, a paged op too, the others by
    ``expanded``, a function as ``ragged``. Schedule decodes first."""
    scales = () if c_scale is None or rope_scale is None else (c_scale, rope_scale)
    if is_recording() and q.shape[0] > seq_lens.shape[0] and q.shape[2] <= MAX_DIM:  # compiled ahead: kernels of both forms
        own = _state(expanded, q, c, k_rope, kv_b, query_start_loc, query_start_loc, scale, causal=True)
        merge_state(*_state(expanded, q, c, k_rope, kv_b, query_start_loc, query_start_loc, scale, causal=False), *own)
    found = _first_expanded(q, c, k_rope, kv_b, seq_lens)
    if found is None:
        return absorbed(q, c, k_rope, kv_b, cache, slot_mapping, block_table, query_start_loc, seq_lens, prepared, *scales,
                        scale=scale)
    (row, step), meta = found, found[1].metadata
    token, end = int(meta.query_start_loc_cpu[row]), meta.num_actual_tokens
    # All of the step's tokens first: a sequence may read pages that another one fills in this very step.
    store_latent(c, k_rope, cache, slot_mapping, *scales)
    page, rank = cache.shape[1], c.shape[1]

    def read(slots: torch.Tensor) -> torch.Tensor:
        at = slots // page, slots % page, 0
        if not scales:
            return cache[at]
        return read_latent(cache.view(torch.int8)[at].view(cache.dtype), rank, *(s[at] for s in scales)).to(c.dtype)

    if scales:  # every query attends to keys as they read back, its own included
        c, k_rope = read(slot_mapping.clamp_min(0)).split([rank, k_rope.shape[1]], dim=1)
    new = slice(token, end)
    capacity = max(meta.num_reqs - row, CHUNK_ELEMENTS // (kv_b.shape[0] + q.shape[1] * q.shape[2]))
    starts, chunks = _prefixes(step, row, capacity, page, query_start_loc, seq_lens, block_table)
    faster: Faster = step.notes.get(FASTER, lambda *sizes, **options: None)
    lens, nope = meta.query_lens_cpu.numpy()[row : meta.num_reqs], q.shape[2] - k_rope.shape[1]

    def attention(key_lens: np.ndarray, causal: bool) -> Expanded:
        dim_v = kv_b.shape[0] // q.shape[1] - nope
        return faster(lens, key_lens, q.shape[1], q.shape[2], dim_v, dtype=q.dtype, scale=scale, causal=causal) or expanded

    state = _state(attention(lens, True), q[new], c[new], k_rope[new], kv_b, starts, starts, scale, causal=True)
    for slots, starts_k, key_lens in chunks:
        latent = read(slots)
        part = _state(attention(key_lens, False), q[new], latent[:, :rank], latent[:, rank:], kv_b, starts, starts_k, scale,
                      causal=False)
        state = merge_state(*part, *state)
    if end - token == len(q):
        return state[0]
    out = q.new_zeros(len(q), *state[0].shape[1:])
    out[new] = state[0]
    if token:
        out[:token] = absorbed(q[:token], c[:token], k_rope[:token], kv_b, cache, slot_mapping[:token], block_table[:row],
                               query_start_loc[: row + 1], seq_lens[:row], [], *scales, scale=scale)
    return out


def _prefixes(step: Step, row: int, capacity: int, page: int, query_start_loc: torch.Tensor, seq_lens: torch.Tensor,
              block_table: torch.Tensor) -> tuple[torch.Tensor, list[Chunk]]:
    """Of the B sequences from ``row`` on: (B + 1,) where the queries of each begin, and the chunks of their prefixes. Worked
    out once per step."""
    key = ("expanded prefixes", row, capacity, page, block_table.data_ptr())
    if key not in step.notes:
        rows = slice(row, step.metadata.num_reqs)
        starts = query_start_loc[row : rows.stop + 1] - query_start_loc[row]
        computed, found = step.metadata.num_computed_tokens_cpu.numpy()[rows], []
        if computed.any():
            chunks = PrefixChunks.build(computed, block_table.device, capacity, seq_lens[rows] - starts.diff())
            found = [(chunks.slots(i, block_table[rows], page), chunks.cu_seq_lens[i], chunks.lens[i])
                     for i in range(chunks.num_chunks)]
        step.notes[key] = starts, found
    made: tuple[torch.Tensor, list[Chunk]] = step.notes[key]
    return made


def _state(expanded: Expanded, q: torch.Tensor, c: torch.Tensor, k_rope: torch.Tensor, kv_b: torch.Tensor,
           starts_q: torch.Tensor, starts_k: torch.Tensor, scale: float, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of q (T, H, D) to keys and values made of c (N, rank) and k_rope (N, R): output (T, H, Dv) and lse (T, H)."""
    return expanded(q, F.linear(c, kv_b), k_rope, starts_q, starts_k, scale=scale, causal=causal)


def ragged(q: torch.Tensor, kv: torch.Tensor, k_rope: torch.Tensor, starts_q: torch.Tensor, starts_k: torch.Tensor, *,
           scale: float, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention with keys and values expanded: q (T, H, Dn + R), kv (N, H * (Dn + Dv)), head by head the key's first Dn numbers
    and the value, and k_rope (N, R): output (T, H, Dv) and lse (T, H), float32. Sequences and ``causal`` are those of
    ``varlen_attention``."""
    heads, nope = q.shape[1], q.shape[2] - k_rope.shape[1]
    kv = kv.unflatten(1, (heads, -1))
    k = torch.cat([kv[..., :nope], k_rope[:, None].expand(-1, heads, -1)], dim=-1)
    return torch.ops.quire.varlen_attention(q, k, kv[..., nope:], starts_q, starts_k, scale=scale, causal=causal)
