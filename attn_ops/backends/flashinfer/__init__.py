"""Backend ``flashinfer``: FlashInfer's decode and prefill kernels, on CUDA.

FlashInfer divides a batch's work among the GPU's processors on the host, for all layers of a Group: ``plan`` does that once per
step. Sequences of one token at the head of a batch go to the decode kernel, all others to the prefill kernel: schedule decodes
first. That reads their keys from pages, from copies, or the step's own from the op's k and v (``routes.py``). Sinks follow from
the log-sum-exp. The kernels read fp8 caches with one fixed scale per layer (``kv_scales``). Those with a scale for each token
are served for long prompts only, whose keys are copied as they read back (``contiguous.py``): a decode reads each key once, and
a copy would read and write it twice more.

NOTE [NaN codes and float16]: A code of NaN must give NaN. With queries in bfloat16 these kernels widen codes by moving bits,
which makes the NaN of e4m3 480. With float16 they use the GPU's converter on compute capability 9.0 and newer, and for e5m2,
whose bits are float16's first, bytes anywhere; both keep NaN. So over fp8 caches queries are in float16, and results too: of
bfloat16 that is exact from 6e-5 to 65504, and below within 3e-8. Codes, and so sums over them by weights of a softmax, are
within float16's range; the scale of values multiplies results as they are stored in the model's dtype.

Only batches of one token per sequence are captured in CUDA graphs. A graph's kernels read persistent buffers, which ``plan``
refills before each replay, allocating nothing. A graph may hold several steps: the plans of all are made before, each with
buffers of its own, and the op takes that of ``Step.number``. See NOTE [Padding]: rows without tokens give zeros.
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
from quire.attn_ops.backends.flashinfer.contiguous import OwnKeys, loadable
from quire.attn_ops.backends.flashinfer.expanded import PART
from quire.attn_ops.backends.flashinfer.modules import begin, ready
from quire.attn_ops.backends.flashinfer.state import FlashInferState
from quire.attn_ops.kv_quant import FIXED_SCALE_KV_DTYPES, QUANTIZED_KV_DTYPES, is_fixed
from quire.attn_ops.kv_store import store_kv
from quire.attn_ops.metadata import CommonAttentionMetadata
from quire.attn_ops.plans import planned_step
from quire.attn_ops.step import Step, current_step
from quire.attn_ops.vendor import ONE_SCALE, no_flashinfer, wrong_device

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
    step, fixed = current_step(), is_fixed(k_scale)
    state = None if step is None else step.states.get(NAME)
    if k_scale is not None and fixed == (state is not None and state.prompts_only):
        raise UnsupportedAttention(f"the flashinfer backend has no quantized KV cache: {ONE_SCALE}. Use attention='auto' or "
                                   "kv_cache_dtype='auto', or kv_scales=, one fixed scale per layer of an fp8 cache, which it "
                                   "serves; beside another backend (NAME@long of `quire backends`) its kernels serve long "
                                   "prompts of a cache with a scale for each token")
    _, state, planned = planned_step(NAME, "flashinfer_paged_attention")
    num_tokens, heads, dim = q.shape
    if num_tokens != planned.num_tokens:
        raise RuntimeError(f"flashinfer: the step was planned for {planned.num_tokens} tokens, q has {num_tokens}")
    group = state.group(heads, k_cache.shape[2], dim, q.dtype, scale, window, softcap)
    segments = state.segments(planned, group, given=k is not None)
    given: dict[str, Any] = (
        {} if k_scale is None else {"k_scale": state.key_scale(k_cache)} if fixed else {"scales": (k_scale, v_scale)})
    with torch.cuda.device_of(q):
        store_kv(k, v, k_cache, v_cache, k_scale, v_scale, slot_mapping)
        pages = (k_cache, v_cache) if state.layout == "NHD" else (k_cache.transpose(1, 2), v_cache.transpose(1, 2))
        out, done = q.new_empty(num_tokens, heads, dim), 0
        q = loadable(q.to(torch.float16) if fixed else q)
        unscaled = q.new_empty(out.shape) if fixed else out
        for wrapper, begin, done in segments:
            mine = given
            if isinstance(wrapper, OwnKeys) and k is not None and v is not None:
                mine = {"own": (loadable(k[begin:done]), loadable(v[begin:done]))}
            lse = None if sinks is None else torch.empty(done - begin, heads, dtype=torch.float32, device=q.device)
            wrapper.run(q[begin:done], pages, out=unscaled[begin:done], lse=lse, return_lse=sinks is not None, **mine)
            if v_scale is not None and fixed:
                torch.mul(unscaled[begin:done], v_scale, out=out[begin:done])
            if lse is not None and sinks is not None:
                out[begin:done] *= keys_share(lse, sinks)[..., None]
        if done < num_tokens:  # padding tokens
            out[done:].zero_()
    return out


def available(device: torch.device) -> str | None:
    return wrong_device(device, "cuda") or no_flashinfer("0.6.18", "pip install 'quire[flashinfer]'")


BACKEND = AttentionBackend(
    name=NAME,
    capabilities=AttentionCapabilities(
        devices=frozenset({"cuda"}), dtypes=frozenset({torch.float16, torch.bfloat16}),
        head_dims=lambda d, dv: d == dv and d in (64, 128, 256), head_dims_note="64, 128 and 256, the same for values",
        kv_dtypes_note=ONE_SCALE, fixed_scale_kv_dtypes=FIXED_SCALE_KV_DTYPES, min_compute_capability=(8, 0),
        min_kv_compute_capability={torch.float8_e4m3fn: (9, 0)}, window=True, softcap=True, sinks=True,
        cudagraph_support=CudagraphSupport.UNIFORM_SINGLE_TOKEN_DECODE,
    ),
    available=available,
    op=define_paged_op(NAME, paged_attention, devices=("CUDA",)),
    make_state=FlashInferState, plan=plan, plans_windows=True,
    prefill=PrefillPart(ready, functools.partial(FlashInferState, prompts_only=True), begin, QUANTIZED_KV_DTYPES,
                        PART),
    priority={"cuda": 20}, packages=("flashinfer-python", "triton"),
)
