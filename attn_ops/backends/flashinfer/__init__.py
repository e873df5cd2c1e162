"""Backend ``flashinfer``: FlashInfer's decode and prefill kernels, on CUDA.

FlashInfer divides a batch's work among the GPU's processors on the host, for all layers of a Group: ``plan`` does that once per
step. Sequences of one token at the head of a batch go to the decode kernel, all others to the prefill kernel: schedule decodes
first. Sinks follow from the log-sum-exp. Quantized caches are served for long prompts only, whose keys are copied as they read
back (``contiguous.py``): a decode reads each key once, and a copy would read and write it twice more.

Only batches of one token per sequence are captured in CUDA graphs. A graph's kernels read persistent buffers, which ``plan``
refills before each replay, allocating nothing. See NOTE [Padding]: rows without tokens give zeros.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from quire.attn_ops.backend import (
    AttentionBackend,
    AttentionCapabilities,
    CudagraphSupport,
    PrefillPart,
    UnsupportedAttention,
    define_paged_op,
)
from quire.attn_ops.backends.flashinfer.modules import begin, ready
from quire.attn_ops.backends.flashinfer.state import FlashInferState, Group
from quire.attn_ops.kv_quant import QUANTIZED_KV_DTYPES
from quire.attn_ops.kv_store import store_kv
from quire.attn_ops.metadata import CommonAttentionMetadata
from quire.attn_ops.step import Step, current_step
from quire.attn_ops.vendor import ONE_SCALE, no_flashinfer

NAME = "flashinfer"


def keys_share(lse: Tensor, sinks: Tensor) -> Tensor:
    """The part of the softmax that sinks (H,) leave to the keys, (T, H), from FlashInfer's lse, a binary logarithm: exp(lse) /
    (exp(lse) + exp(sink)). No keys, no part."""
    return torch.sigmoid(lse * math.log(2) - sinks.float()).nan_to_num(nan=0.0)


def plan(metadata: CommonAttentionMetadata, step: Step) -> None:
    """Raises RuntimeError if the step has no state, or its CUDA graph was not captured, or not for this number of rows, and
    ValueError for a batch larger than the StepLimits of the state."""
    if NAME not in step.states:
        raise RuntimeError("flashinfer: no state; set step.states['flashinfer'] = make_state(sites, cache, limits)")
    step.states[NAME].plan(metadata, step)


def paged_attention(q: Tensor, k: Tensor | None, v: Tensor | None, k_cache: Tensor, v_cache: Tensor, k_scale: Tensor | None,
                    v_scale: Tensor | None, slot_mapping: Tensor, block_table: Tensor, query_start_loc: Tensor,
                    seq_lens: Tensor, sinks: Tensor | None, prepared: list[Tensor], *, scale: float, window: int | None,
                    softcap: float | None, chunk: int | None) -> Tensor:
    if chunk is not None:
        raise UnsupportedAttention("the flashinfer backend has no chunked attention")
    step = current_step()
    state = None if step is None else step.states.get(NAME)
    if k_scale is not None and not (state is not None and state.prompts_only):
        raise UnsupportedAttention(f"the flashinfer backend has no quantized KV cache: {ONE_SCALE}. Use attention='auto' or "
                                   "kv_cache_dtype='auto'; beside another backend (NAME@long of `quire backends`) its kernels "
                                   "serve long prompts of such a cache")
    if step is None or state is None or state.step is None or state.step() is not step:
        raise RuntimeError("flashinfer_paged_attention needs a paged step that was planned: run the model inside `with "
                           "quire.step(cache, metadata)`, or call plan(metadata, step) first")
    num_tokens, heads, dim = q.shape
    if num_tokens != state.num_tokens:
        raise RuntimeError(f"flashinfer: the step was planned for {state.num_tokens} tokens, q has {num_tokens}")
    segments = state.segments(Group(heads, k_cache.shape[2], dim, q.dtype, scale, window, softcap))
    with torch.cuda.device_of(q):
        store_kv(k, v, k_cache, v_cache, k_scale, v_scale, slot_mapping)
        pages = (k_cache, v_cache) if state.layout == "NHD" else (k_cache.transpose(1, 2), v_cache.transpose(1, 2))
        if q.stride(2) != 1 or q.requires_grad:  # FlashInfer takes neither
            q = q.detach().contiguous()
        out, done = q.new_empty(num_tokens, heads, dim), 0
        given: dict[str, Any] = {} if k_scale is None else {"scales": (k_scale, v_scale)}
        for wrapper, begin, done in segments:
            if sinks is None:
                wrapper.run(q[begin:done], pages, out=out[begin:done], **given)
            else:
                lse = torch.empty(done - begin, heads, dtype=torch.float32, device=q.device)
                wrapper.run(q[begin:done], pages, out=out[begin:done], lse=lse, return_lse=True, **given)
                out[begin:done] *= keys_share(lse, sinks)[..., None]
        if done < num_tokens:  # padding tokens
            out[done:].zero_()
    return out


def available(device: torch.device) -> str | None:
    if device.type != "cuda":
        return f"runs on cuda, not {device.type}"
    return no_flashinfer("0.6.18", "pip install 'quire[flashinfer]'")


BACKEND = AttentionBackend(
    name=NAME,
    capabilities=AttentionCapabilities(
        devices=frozenset({"cuda"}), dtypes=frozenset({torch.float16, torch.bfloat16}),
        head_dims=lambda d, dv: d == dv and d in (64, 128, 256), head_dims_note="64, 128 and 256, the same for values",
        kv_dtypes_note=ONE_SCALE, min_compute_capability=(8, 0), window=True, softcap=True, sinks=True,
        cudagraph_support=CudagraphSupport.UNIFORM_SINGLE_TOKEN_DECODE,
    ),
    available=available,
    op=define_paged_op(NAME, paged_attention, devices=("CUDA",)),
    make_state=FlashInferState,
    plan=plan, plans_windows=True,
    prefill=PrefillPart(ready, functools.partial(FlashInferState, prompts_only=True), begin, QUANTIZED_KV_DTYPES),
    priority={"cuda": 20},
    packages=("flashinfer-python", "triton"),
)
