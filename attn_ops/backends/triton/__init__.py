"""Backend ``triton``: paged attention in Triton kernels, with every feature of the semantic op.

Kernels: ``decode`` (split-KV, one query token per program), ``extend`` (tiles of several query tokens) and ``kv_write`` (the KV
cache). MLA on the latent cache has its own (``mla.py``). Which of them a graph has, and on what grid, follows from tensor
shapes alone; lengths are read on the device. So every launch can be captured in a CUDA graph, at any length, and replayed at
any other.

=======  ==========================================================================================================
T <= B   ``decode`` by token, which writes the cache too, and for few tokens rotates q and k before: one launch
T > B    ``kv_write``, then ``extend``, then ``decode`` by row for the sequences with one query token, unless there are none:
         B is 1, or the step is no graph's and has none. For long prompts in a step that is no graph's, the keys are copied
         to contiguous memory and ``extend_contiguous`` takes the place of ``extend``
=======  ==========================================================================================================
"""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import torch
from torch import Tensor

from quire.attn_ops import mla_prefill
from quire.attn_ops.backend import (
    AttentionBackend,
    AttentionCapabilities,
    CudagraphSupport,
    define_paged_op,
    define_prepare,
    define_state_op,
)
from quire.attn_ops.backends.triton.extend_route import (
    EXPANDED_TIME,
    Route,
    find_route,
    metadata_of,
    possible,
    scratch_bytes,
    serves_expanded,
    without_graph,
)
from quire.attn_ops.backends.triton.plan import Batch, schedule_size
from quire.attn_ops.kernels import host
from quire.attn_ops.kernels.host import Caches, kernel_module, rows_contiguous
from quire.attn_ops.kernels.launch import is_recording
from quire.attn_ops.kv_quant import QUANTIZED_KV_DTYPES, check_scales
from quire.attn_ops.mla import absorb_query, define_mla_op, expand_output, split_weight
from quire.attn_ops.ops.rope import PLAIN, RopeForm, rope_kv_write
from quire.attn_ops.ops.varlen import varlen_attention_cuda


def available(device: torch.device) -> str | None:
    """None if the backend runs on ``device`` in this process, else why not and what to do about it."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed (pip install triton)"
    if device.type == "cpu":
        if os.environ.get("TRITON_INTERPRET", "0") != "1":
            return ("on a CPU Triton kernels run only in Triton's interpreter, which is slow and meant for tests (set "
                    "TRITON_INTERPRET=1 before the process starts)")
        if not kernel_module("backends.triton.common").INTERPRETED:
            return "TRITON_INTERPRET was set after the kernels were loaded (set it before the process starts)"
        return None
    if device.type != "cuda":
        return f"the kernels run on CUDA devices, not on {device.type}"
    return None if torch.cuda.is_available() else "no CUDA device is visible to PyTorch"


def paged_attention(q: Tensor, k: Tensor | None, v: Tensor | None, k_cache: Tensor, v_cache: Tensor, k_scale: Tensor | None,
                    v_scale: Tensor | None, slot_mapping: Tensor, block_table: Tensor, query_start_loc: Tensor,
                    seq_lens: Tensor, sinks: Tensor | None, prepared: list[Tensor], *, scale: float, window: int | None,
                    softcap: float | None, chunk: int | None, rope: tuple[Any, ...] | None = None, form: RopeForm = PLAIN
                    ) -> Tensor:
    """Write k, v into the cache, then attend: q (T, H, D) -> (T, H, Dv). See ``define_paged_op`` for the arguments. ``rope``:
    cos, sin, the norms' weights and eps, for q and k not yet rotated, of ``form``; for decode batches (T <= B) only. Raises
    ValueError for caches whose head dim is not contiguous, and scales that do not match the caches or differ in strides."""
    caches = _caches(k_cache, v_cache, k_scale, v_scale)
    num_tokens, num_reqs = q.shape[0], seq_lens.shape[0]
    out = q.new_empty((num_tokens, q.shape[1], v_cache.shape[3]))
    if not num_tokens:
        return out
    decode = kernel_module("backends.triton.decode").decode
    batch = Batch(slot_mapping, block_table, query_start_loc, seq_lens)
    q = rows_contiguous(q)
    k, v = (None, None) if k is None or v is None else (rows_contiguous(k), rows_contiguous(v))
    sinks = None if sinks is None else sinks.contiguous()  # one for all heads, say, expanded
    rest = (caches, batch, sinks, prepared, out, scale, window, softcap, chunk)
    if num_tokens <= num_reqs:
        decode(q, k, v, *rest, by_row=False, rope=rope, form=form)
        return out
    if k is not None and v is not None:
        kernel_module("kernels.kv_write").write(k, v, caches, slot_mapping)
    _extend(q, *rest, skip_single=num_reqs > 1)
    found = metadata_of(q, query_start_loc)  # what the host knows: of the step in progress, unless that is a graph's
    if num_reqs > 1 and (found is None or found[1].max_query_len <= 1 or found[1].has_single_queries):
        decode(q, None, None, *rest, by_row=True)
    return out


def _caches(*given: Any) -> Caches:
    caches = Caches(*given)
    check_scales(caches.k, caches.k_scale, caches.v_scale)
    host.check_cache_strides("the triton backend", caches)
    return caches


def _extend(q: Tensor, caches: Caches, batch: Batch, sinks: Tensor | None, prepared: list[Tensor], out: Tensor, scale: float,
            window: int | None, softcap: float | None, chunk: int | None, skip_single: bool, lse: Tensor | None = None,
            causal: bool = True) -> None:
    """``extend``, by the way of contiguous keys if that is the step's (``extend_route.py``)."""
    route, recorded = None, is_recording()
    if causal and not recorded:
        route = find_route(q, caches, batch, window, chunk, skip_single)
    elif causal and possible((caches.k.shape[3], caches.v.shape[3]), q.dtype, window, chunk, q.device):
        route = Route(batch.query_start_loc, q.shape[0], skip_single)  # kernels are compiled ahead: those of both ways
    if route is not None:
        contiguous = kernel_module("backends.triton.extend_contiguous")
        try:
            contiguous.extend_contiguous(q, caches, batch, route, sinks, out, scale, softcap, lse)
            if not recorded:
                return
        except torch.OutOfMemoryError:  # of a caller that fills the GPU: engines leave room (``scratch_bytes``)
            pass
    kernel_module("backends.triton.extend").extend(q, caches, batch, sinks, prepared, out, scale, window, softcap, chunk,
                                                   skip_single, lse, causal)


def rope_paged_attention(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, q_norm_weight: Tensor | None,
                         k_norm_weight: Tensor | None, eps: float, k_cache: Tensor, v_cache: Tensor, k_scale: Tensor | None,
                         v_scale: Tensor | None, slot_mapping: Tensor, block_table: Tensor, query_start_loc: Tensor,
                         seq_lens: Tensor, sinks: Tensor | None, prepared: list[Tensor], *, scale: float, window: int | None,
                         softcap: float | None, chunk: int | None, **form: Any) -> Tensor:
    """Rotate q and k (``attn_ops/ops/rope.py``, which has ``form``), then ``paged_attention``. Small decode batches take one
    launch for all of it; with a program or more per multiprocessor the registers for rotating would cost more than a launch."""
    caches, rope = (k_cache, v_cache, k_scale, v_scale), (cos, sin, q_norm_weight, k_norm_weight, eps)
    rest = (*caches, slot_mapping, block_table, query_start_loc, seq_lens, sinks, prepared)
    options: dict[str, Any] = {"scale": scale, "window": window, "softcap": softcap, "chunk": chunk}
    if q.shape[0] > seq_lens.shape[0] or q.shape[0] * k.shape[1] >= host.num_sms(q.device):
        return paged_attention(rope_kv_write(q, k, v, *rope, *caches, slot_mapping, **form), None, None, *rest, **options)
    return paged_attention(q, k, v, *rest, **options, rope=rope, form=RopeForm(**form))


def attention_state(q: Tensor, k: Tensor | None, v: Tensor | None, k_cache: Tensor, v_cache: Tensor, k_scale: Tensor | None,
                    v_scale: Tensor | None, slot_mapping: Tensor, block_table: Tensor, query_start_loc: Tensor,
                    seq_lens: Tensor, prepared: list[Tensor], *, scale: float, softcap: float | None, causal: bool
                    ) -> tuple[Tensor, Tensor]:
    """Write k, v into the cache, then attend with ``extend``: (T, H, Dv), and the log-sum-exp (T, H). See STATE_SCHEMA. Raises
    ValueError as ``paged_attention``."""
    caches = _caches(k_cache, v_cache, k_scale, v_scale)
    batch = Batch(slot_mapping, block_table, query_start_loc, seq_lens)
    out, lse = q.new_empty(*q.shape[:2], caches.v.shape[3]), q.new_empty(q.shape[:2], dtype=torch.float32)
    if q.shape[0]:
        if k is not None and v is not None:
            kernel_module("kernels.kv_write").write(rows_contiguous(k), rows_contiguous(v), caches, batch.slot_mapping)
        _extend(rows_contiguous(q), caches, batch, None, prepared, out, scale, None, softcap, None, skip_single=False, lse=lse,
                causal=causal)
    return out, lse


def mla_paged_attention(*args: Any, scale: float) -> Tensor:
    """MLA on the latent cache: long prefills expanded (``attn_ops/mla_prefill.py``), all others by ``mla.py``."""
    return mla_prefill.attend(_absorbed, _expanded, *args, scale=scale)


def _expanded(q: Tensor, kv: Tensor, k_rope: Tensor, *starts: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    nope = q.shape[2] - k_rope.shape[1]
    by_descriptors = serves_expanded(nope, k_rope.shape[1], kv.shape[1] // q.shape[1] - nope, q.dtype, q.device)
    attend = kernel_module("backends.triton.extend_contiguous").attend_to_expanded if by_descriptors else mla_prefill.ragged
    return attend(q, kv, k_rope, *starts, scale=scale, causal=causal)


def _absorbed(q: Tensor, c: Tensor, k_rope: Tensor, kv_b: Tensor, cache: Tensor, slot_mapping: Tensor, block_table: Tensor,
              query_start_loc: Tensor, seq_lens: Tensor, prepared: list[Tensor], c_scale: Tensor | None = None,
              rope_scale: Tensor | None = None, *, scale: float) -> Tensor:
    """MLA in absorbed terms: q (T, H, D) -> (T, H, Dv). ``attn_ops/mla.py`` has the arguments. Raises ValueError for a cache
    whose last dim is not contiguous."""
    if cache.stride(3) != 1:
        raise ValueError(f"the triton backend needs a latent cache whose last dim is contiguous, got strides {cache.stride()}")
    nope = q.shape[2] - k_rope.shape[1]
    w_uk, w_uv = split_weight(kv_b, q.shape[1], nope)
    if not q.shape[0]:
        return q.new_empty(0, q.shape[1], w_uv.shape[1])
    mla = kernel_module("backends.triton.mla").mla
    q, batch = rows_contiguous(q), Batch(slot_mapping, block_table, query_start_loc, seq_lens)
    absorbed = rows_contiguous(absorb_query(q[..., :nope], w_uk))
    out = mla(absorbed, q[..., nope:], rows_contiguous(c), rows_contiguous(k_rope), cache, batch, prepared, scale,
              c_scale, rope_scale)
    return expand_output(out, w_uv)


def _prepare(*args: Any) -> list[Tensor]:
    return kernel_module("backends.triton.schedule").prepare(*args)


def _fake_prepare(slot_mapping: Tensor, block_table: Tensor, query_start_loc: Tensor,
                  seq_lens: Tensor, page_size: int) -> list[Tensor]:
    return [seq_lens.new_empty(n, dtype=torch.int32) for n in (host.NUM_COUNTERS, schedule_size(seq_lens.shape[0]))]


BACKEND = AttentionBackend(
    name="triton",
    capabilities=AttentionCapabilities(
        devices=frozenset({"cpu", "cuda"}), dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16}),
        kv_dtypes=QUANTIZED_KV_DTYPES, latent_kv_dtypes=QUANTIZED_KV_DTYPES,
        min_kv_compute_capability={torch.float8_e4m3fn: (8, 9)},  # older ones lack the conversions
        head_dims=lambda d, dv: max(d, dv) <= 256, head_dims_note="up to 256",
        mla_dims=lambda rank, rope: rank <= 512 and rope <= 64, mla_dims_note="up to 512+64",
        window=True, softcap=True, sinks=True, chunk=True, mla=True, lse=True,
        any_batch=True, cudagraph_support=CudagraphSupport.ALWAYS,
    ),
    available=available,
    op=define_paged_op("triton", paged_attention, launches=True),
    rope_op=define_paged_op("triton", rope_paged_attention, rope=True, launches=True),
    mla_op=define_mla_op("triton", mla_paged_attention, launches=True),
    state_op=define_state_op("triton", attention_state, launches=True),
    varlen=varlen_attention_cuda, rope_forms=True, same_in_graphs=True, without_graph=without_graph,
    scratch_bytes=scratch_bytes, expanded_time=EXPANDED_TIME,
    prepare=define_prepare("triton", _prepare, _fake_prepare, launches=True),
    priority={"cuda": 10}, packages=("triton",),
)
