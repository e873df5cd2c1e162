"""Stand-ins for FlashInfer: they have its signatures, follow its documented rules about buffers, and attend with the oracle."""

from __future__ import annotations

import dataclasses
import math
import sys
from types import SimpleNamespace

import torch
from triton.runtime.interpreter import InterpretedFunction

from quire.attn_ops.attention import AttentionSite
from quire.attn_ops.backend import AttentionBackend
from quire.attn_ops.backends import flashinfer
from quire.attn_ops.backends.flashinfer import pages, state
from quire.attn_ops.conformance.batches import bits
from quire.attn_ops.kv_quant import FIXED_SCALE_KV_DTYPES as FP8
from quire.attn_ops.ops.varlen import varlen_attention_eager
from tests.attn_ops.oracle import oracle_attention


def site(**changes) -> AttentionSite:
    facts = dict(layer=0, num_heads=8, num_kv_heads=2, head_dim=128, head_dim_v=128, dtype=torch.bfloat16, scale=0.1)
    return AttentionSite(**(facts | changes))


def loads(x) -> bool:
    """Whether FlashInfer's kernels can load this memory: rows of 16 bytes, which do not overlap."""
    steps = [step * x.element_size() for step in x.stride()[:2]]
    return x.stride(2) == 1 and not any(n % 16 or n <= 0 for n in (*steps, x.data_ptr()))


class _Wrapper:
    """What both of FlashInfer's wrappers do: keep the plan; at run, read the page table from the *device* buffers."""

    def _keep(self, indptr, indices, last_page_len, heads, kv_heads, dim, page_size, window_left, logits_soft_cap,
              sm_scale, q_data_type, kv_data_type):
        for tensor in (indptr, last_page_len):
            assert tensor.dtype == torch.int32 and tensor.device.type == "cpu" and tensor.is_contiguous()
        assert indices.dtype == torch.int32 and len(indptr) == len(last_page_len) + 1
        pages = indptr.diff()
        assert (pages >= 1).all(), "the decode planner miscounts rows without pages"
        assert (last_page_len <= page_size).all() and (last_page_len >= 0).all()
        fp8 = kv_data_type in FP8  # with queries in bfloat16 the library's kernels read the NaN of e4m3 as 480
        assert kv_data_type == q_data_type or fp8 and q_data_type == torch.float16
        self.dtypes = q_data_type, kv_data_type
        self.planned = indptr.tolist(), last_page_len.tolist()
        self.shape = heads, kv_heads, dim, page_size
        self.mask = dict(scale=sm_scale, window=None if window_left < 0 else window_left + 1,
                         softcap=logits_soft_cap or None)
        self.plans = getattr(self, "plans", 0) + 1

    def _attend(self, q, caches, out, query_start, lse, return_lse, k_scale, causal=True):
        assert (lse is not None) == return_lse
        assert (q.dtype, caches[0].dtype) == (out.dtype, caches[1].dtype) == self.dtypes
        assert (type(k_scale) is float) == (caches[0].dtype in FP8), "a number: a tensor would be read on the host"
        mask = {**self.mask, "scale": self.mask["scale"] * (k_scale or 1.0)}
        heads, kv_heads, dim, page_size = self.shape
        k_cache, v_cache = caches
        assert k_cache.is_contiguous() and v_cache.is_contiguous() and out.is_contiguous() and loads(q)
        if self.layout == "HND":
            k_cache, v_cache = k_cache.transpose(1, 2), v_cache.transpose(1, 2)
        assert k_cache.shape[1:] == (page_size, kv_heads, dim) and q.shape[1:] == (heads, dim) and out.shape == q.shape
        indptr, last = self.indptr.tolist(), self.last_page_len.tolist()
        assert (indptr, last) == self.planned, "the device buffers and the plan disagree"
        assert query_start[-1] == q.shape[0]
        for row in range(len(last)):
            pages = self.indices[indptr[row] : indptr[row + 1]].long()
            length = (len(pages) - 1) * page_size + last[row]
            own = slice(query_start[row], query_start[row + 1])
            if length == 0:
                out[own] = 0
                if return_lse:
                    lse[own] = -math.inf
                continue
            keys, values = (bits(c)[pages].view(c.dtype).flatten(0, 1)[:length].to(q.dtype) for c in (k_cache, v_cache))
            starts = [torch.tensor([0, n], dtype=torch.int32) for n in (len(q[own]), length)]
            found, own_lse = varlen_attention_eager(q[own], keys, values, *starts, causal=causal, **mask)
            out[own] = oracle_attention(q[own], keys, values, **mask).to(out.dtype) if causal else found
            if return_lse:
                lse[own] = own_lse / math.log(2)  # to base 2, as FlashInfer's kernels


class Decode(_Wrapper):
    def __init__(self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False, use_tensor_cores=False,
                 paged_kv_indptr_buffer=None, paged_kv_indices_buffer=None, paged_kv_last_page_len_buffer=None,
                 backend="auto"):
        self.workspace, self.layout, self.graph, self.tensor_cores = (
            float_workspace_buffer, kv_layout, use_cuda_graph, use_tensor_cores)
        if use_cuda_graph:
            assert len(paged_kv_indptr_buffer) == len(paged_kv_last_page_len_buffer) + 1
            self.indptr, self.indices, self.last_page_len = (
                paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer)
        self.fast_plans = 0

    def reset_workspace_buffer(self, float_workspace_buffer, int_workspace_buffer):
        self.workspace, self.int_workspace = float_workspace_buffer, int_workspace_buffer

    def plan(self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, *, window_left=-1,
             logits_soft_cap=None, q_data_type="float16", kv_data_type=None, sm_scale=None):
        if self.graph:
            assert len(last_page_len) == len(self.last_page_len), "the batch size is fixed"
            self.indptr.copy_(indptr)
            self.last_page_len.copy_(last_page_len)
            self.indices[: len(indices)].copy_(indices)
        else:
            self.indptr, self.indices, self.last_page_len = indptr.clone(), indices, last_page_len.clone()
        self._keep(indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, window_left,
                   logits_soft_cap, sm_scale, q_data_type, kv_data_type)

    def run(self, q, paged_kv_cache, *, k_scale=None, out=None, lse=None, return_lse=False):
        assert q.shape[0] == len(self.last_page_len)
        self._attend(q, paged_kv_cache, out, range(q.shape[0] + 1), lse, return_lse, k_scale)


class Prefill(_Wrapper):
    broken: tuple[str, ...] = ()

    def __init__(self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False, backend="auto"):
        self.layout, self.backend = kv_layout, backend

    def plan(self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, num_kv_heads,
             head_dim_qk, page_size, *, causal=False, sm_scale=None, window_left=-1, logits_soft_cap=None,
             q_data_type="float16", kv_data_type=None, max_token_per_sequence=None):
        assert self.backend == "fa2" or kv_data_type == q_data_type, "fa3 takes fp8 keys with fp8 queries only"
        if self.backend in self.broken:
            raise RuntimeError("no such kernel")
        assert qo_indptr[0] == 0 and qo_indptr.dtype == torch.int32
        assert len(qo_indptr) == len(paged_kv_indptr) and (causal or window_left == -1)
        self.causal = causal
        self.query_start = qo_indptr.tolist()
        self.indptr, self.indices, self.last_page_len = (
            paged_kv_indptr.clone(), paged_kv_indices, paged_kv_last_page_len.clone())
        self._keep(paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, num_kv_heads, head_dim_qk,
                   page_size, window_left, logits_soft_cap, sm_scale, q_data_type, kv_data_type)

    def run(self, q, paged_kv_cache, *, k_scale=None, out=None, lse=None, return_lse=False):
        self._attend(q, paged_kv_cache, out, self.query_start, lse, return_lse, k_scale, self.causal)


def fast_decode_plan(self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, *,
                     window_left=-1, logits_soft_cap=None, q_data_type=None, kv_data_type=None, sm_scale=None,
                     global_override_indptr_cpu=None):
    assert self.graph and self.plans and len(last_page_len) == len(self.last_page_len)
    self._keep(global_override_indptr_cpu, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size,
               window_left, logits_soft_cap, sm_scale, q_data_type, kv_data_type)
    self.fast_plans += 1


class Ragged:
    """FlashInfer's wrapper for contiguous keys. Its layout is always (tokens, heads, D). Kernels for Hopper GPUs load values in
    tiles of 128 tokens, of which those past the end of the tensor are zeros, and multiply all of them by weights, which are 0
    past a sequence's end."""

    def __init__(self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False, backend="auto"):
        assert kv_layout == "NHD" and not use_cuda_graph
        self.workspace, self.backend = float_workspace_buffer, backend

    def plan(self, qo_indptr, kv_indptr, num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo=None, *, causal=False,
             window_left=-1, logits_soft_cap=None, sm_scale=None, q_data_type="float16", kv_data_type=None):
        if self.backend in Prefill.broken:  # one compiled module has both kernels
            raise RuntimeError("no such kernel")
        for tensor in (qo_indptr, kv_indptr):
            assert tensor.dtype == torch.int32 and tensor.device.type == "cpu" and tensor[0] == 0
        assert window_left == -1 and kv_data_type == q_data_type and len(qo_indptr) == len(kv_indptr)
        self.starts, self.causal = (qo_indptr, kv_indptr), causal
        self.shape = num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo or head_dim_qk
        self.options = dict(scale=sm_scale, window=None, softcap=logits_soft_cap or None)
        self.plans = getattr(self, "plans", 0) + 1

    def run(self, q, k, v, *, out=None, lse=None, return_lse=False):
        heads, kv_heads, dim, dim_v = self.shape
        (tokens, keys), group = (x[-1] for x in self.starts), heads // kv_heads
        assert q.shape == (tokens, heads, dim) and out.shape == (tokens, heads, dim_v) and out.is_contiguous()
        assert k.shape == (keys, kv_heads, dim) and v.shape == (keys, kv_heads, dim_v) and all(map(loads, (q, k, v)))
        assert not any(x.requires_grad for x in (q, k, v)) and (lse is not None) == return_lse
        found, own_lse = varlen_attention_eager(q, k, v, *self.starts, causal=self.causal, **self.options)
        out.copy_(found)
        queries, keys = (x.tolist() for x in self.starts)
        for begin, end, first, last in zip(queries, queries[1:], keys, keys[1:], strict=False):
            if end > begin and self.backend == "fa3":
                behind = v[last : last + (first - last) % 128]
                out[begin:end] += (0 * behind).sum(0).repeat_interleave(group, 0)
        if return_lse:
            lse.copy_(own_lse / math.log(2))


def stand_in(monkeypatch) -> AttentionBackend:
    """The backend on a CPU: ``Decode`` and ``Prefill`` for FlashInfer, the interpreter for its Triton kernels."""
    library = SimpleNamespace(BatchDecodeWithPagedKVCacheWrapper=Decode, BatchPrefillWithPagedKVCacheWrapper=Prefill,
                              BatchPrefillWithRaggedKVCacheWrapper=Ragged, fast_decode_plan=fast_decode_plan)
    monkeypatch.setitem(sys.modules, "flashinfer", library)
    monkeypatch.setattr(pages, "gather_pages", InterpretedFunction(pages.gather_pages.fn))
    event = SimpleNamespace(synchronize=lambda: None, record=lambda stream: None)
    gpu = SimpleNamespace(multi_processor_count=8, major=9)
    for name, value in (("Event", lambda: event), ("get_device_properties", lambda device: gpu),
                        ("current_stream", lambda device: None), ("is_current_stream_capturing", lambda: False)):
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(state, "MIN_WORKSPACE", 16)
    monkeypatch.setattr(Prefill, "broken", ())
    return dataclasses.replace(flashinfer.BACKEND, op=flashinfer.paged_attention)
