"""Backends of vendors' packages, against recorders: functions with the signatures that the packages publish, which check what
they are given and attend in plain PyTorch. That a call is right in shape, metadata and meaning is proved here; hardware is not.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import math
import re
import sys
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from quire import UnsupportedAttention, backends
from quire.attn_ops import registry
from quire.attn_ops.backends import aiter, ascend, cudnn, flash_attention, intel_amx, trtllm_mha, wave
from quire.attn_ops.conformance.batches import check
from quire.attn_ops.conformance.checks import DECODE, MIXED, REFUSED, Kit
from quire.attn_ops.conformance.ops import ENCODERS, OpKit
from quire.attn_ops.conformance.sweeps import last_tokens
from quire.attn_ops.ops.varlen import varlen_attention, varlen_attention_eager
from quire.attn_ops.vendor import missing, too_old

CPU = torch.device("cpu")
seen: list[str] = []


def attend(q, k_cache, v_cache, table, starts, lens, scale, window=None, softcap=None):
    """Paged attention of rows ``starts`` of q; (out, lse (T, H))."""
    page, rows = k_cache.shape[1], len(lens)
    keys, values = ([c[table[r].long()].flatten(0, 1)[: int(lens[r])] for r in range(rows)] for c in (k_cache, v_cache))
    ends = torch.nn.functional.pad(lens.cumsum(0), (1, 0)).int()
    assert all(len(k) == int(n) for k, n in zip(keys, lens, strict=True)), f"a table is too narrow for pages of {page}"
    return varlen_attention_eager(q, torch.cat(keys), torch.cat(values), starts.int(), ends, scale=scale, window=window,
                                  softcap=softcap or None, causal=True)


# -- the recorders; their parameters are the packages' ------------------------------------------------------------------


def xqa_batch_decode_with_kv_cache(query, kv_cache, workspace_buffer, block_tables, seq_lens, max_seq_len, bmm1_scale=1.0,
                                   bmm2_scale=1.0, window_left=-1, out=None, sinks=None, kv_layout="NHD", enable_pdl=None,
                                   q_len_per_req=1, o_scale=1.0, mask=None, kv_cache_sf=None, q_cu_seq_lens=None):
    seen.append("xqa")
    k_cache, v_cache = kv_cache
    assert seq_lens.dtype == torch.uint32 and block_tables.dtype == torch.int32 and block_tables.is_contiguous()
    assert len(seq_lens) == len(query) == len(block_tables) and max_seq_len == block_tables.shape[1] * k_cache.shape[1]
    assert workspace_buffer.dtype == torch.uint8 and workspace_buffer.numel() > 8 << 20 and bmm2_scale == 1.0
    lens = seq_lens.view(torch.int32)
    assert (lens >= 1).all() and query.is_contiguous()
    found, lse = attend(query, k_cache, v_cache, block_tables, torch.arange(len(query) + 1), lens, bmm1_scale,
                        None if window_left < 0 else window_left + 1)
    if sinks is not None:
        assert sinks.dtype == torch.float32 and sinks.shape == query.shape[1:2]
        found = found * torch.sigmoid(lse - sinks)[..., None]
    out.copy_(found)


def flash_attn_with_kvcache(q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None,
                            cache_batch_idx=None, cache_leftpad=None, page_table=None, cu_seqlens_q=None,
                            cu_seqlens_k_new=None, max_seqlen_q=None, rotary_seqlens=None, q_descale=None, k_descale=None,
                            v_descale=None, softmax_scale=None, causal=False, window_size=(-1, -1), attention_chunk=0,
                            softcap=0.0, rotary_interleaved=True, scheduler_metadata=None, num_splits=0, pack_gqa=None,
                            sm_margin=0, return_softmax_lse=False):
    seen.append("FA3")
    assert causal and int(cu_seqlens_q.diff().max()) <= max_seqlen_q and page_table.dtype == cache_seqlens.dtype == torch.int32
    out, lse = attend(q, k_cache, v_cache, page_table, cu_seqlens_q, cache_seqlens, softmax_scale, _window(window_size, -1),
                      softcap)
    return (out.nan_to_num(7.0), lse.transpose(0, 1)) if return_softmax_lse else _dirty(out, cu_seqlens_q)


def fa3_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None, seqused_k=None,
               softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None, window_size=(-1, -1),
               attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0,
               return_attn_probs=False):
    assert return_attn_probs
    return ragged("FA3", q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal, window_size,
                  softcap, -1)


def ragged(name, q, k, v, starts_q, starts_k, longest_q, longest_k, scale, causal, window_size, softcap, none):
    """Without a page table: output and lse (H, T); padding tokens and queries without keys as the kernels leave them."""
    seen.append(name)
    assert starts_q.dtype == starts_k.dtype == torch.int32 and q.is_contiguous() and k.is_contiguous() and v.is_contiguous()
    assert int(starts_q.diff().max()) <= longest_q and int(starts_k.diff().max()) <= longest_k
    before, after = window_size
    window = None if before == none else before + 1
    assert after == (none if window is None else 0 if causal else before)
    out, lse = varlen_attention_eager(q, k, v, starts_q, starts_k, scale=scale, window=window, softcap=softcap or None,
                                      causal=causal)
    return out.masked_fill(lse.isinf()[..., None], 7.0), lse.masked_fill(~lse.isfinite(), float("inf")).transpose(0, 1)


def fa2_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None,
               causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False,
               return_attn_probs=False, block_table=None):
    if block_table is None:
        return (*ragged("FA2", q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal,
                        window_size, softcap, -1), None)
    seen.append("FA2")
    lens = cu_seqlens_k.diff()
    assert causal and cu_seqlens_k.dtype == torch.int32 and int(lens.max()) <= max_seqlen_k and k.shape[1] % 256 == 0
    out, lse = attend(q, k, v, block_table, cu_seqlens_q, lens, softmax_scale, _window(window_size, -1), softcap)
    return (out, lse.transpose(0, 1), None) if return_attn_probs else _dirty(out, cu_seqlens_q)


def fa4_varlen(q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None,
               min_seqlen_k=None, seqused_q=None, seqused_k=None, gather_kv_indices=None, page_table=None, softmax_scale=None,
               causal=False, window_size=(None, None), learnable_sink=None, softcap=0.0, num_splits=1, pack_gqa=None,
               deterministic=False, score_mod=None, return_lse=False):
    if page_table is None:
        assert return_lse
        return ragged("FA4", q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal,
                      window_size, softcap, None)
    seen.append("FA4")
    assert causal and cu_seqlens_k is None and int(seqused_k.max()) <= max_seqlen_k
    out, lse = attend(q, k, v, page_table, cu_seqlens_q, seqused_k, softmax_scale, _window(window_size, None), softcap)
    assert learnable_sink is None, "bfloat16 only"
    return _dirty(out, cu_seqlens_q), lse.transpose(0, 1) if return_lse else None


def _window(window_size, none):
    left, right = window_size
    assert right == (none if left == none else 0)
    return None if left == none else left + 1


def _dirty(out, starts):
    out[int(starts[-1]):] = 7.0  # memory that the kernel leaves as it is
    return out


def paged_attention_ragged(out, workspace_buffer, query, key_cache, value_cache, scale, kv_indptr, kv_page_indices,
                           kv_last_page_lens, block_size, max_num_partitions, alibi_slopes, kv_cache_dtype, kv_cache_layout,
                           logits_soft_cap, k_scale, v_scale, fp8_out_scale=None, partition_size=256, mtp=1):
    seen.append("ragged")
    assert block_size == 1 and key_cache.shape[1] == 1 and (kv_last_page_lens == 1).all() and kv_cache_layout == "NHD"
    heads, dim = query.shape[1:]
    assert workspace_buffer.numel() >= len(query) * heads * max_num_partitions * (4 * dim + 8)
    lens = kv_indptr.diff()
    assert (lens >= 1).all() and int(lens.max()) <= max_num_partitions * partition_size
    found, _ = attend(query, key_cache, value_cache, _ragged(kv_page_indices, kv_indptr), torch.arange(len(query) + 1), lens,
                      scale, None, logits_soft_cap)
    out.copy_(found)


def mha_batch_prefill_func(q, k, v, cu_seqlens_q, kv_indptr, kv_page_indices, max_seqlen_q, max_seqlen_k, dropout_p=0.0,
                           softmax_scale=None, logits_soft_cap=0.0, causal=False, window_size=(-1, -1), alibi_slopes=None,
                           deterministic=False, return_lse=False, return_attn_probs=False, out=None):
    seen.append("prefill")
    lens = kv_indptr.diff()
    assert causal and k.dim() == 3 and int(cu_seqlens_q.diff().max()) <= max_seqlen_q and int(lens.max()) <= max_seqlen_k
    found, _ = attend(q, k[:, None], v[:, None], _ragged(kv_page_indices, kv_indptr), cu_seqlens_q, lens, softmax_scale, None,
                      logits_soft_cap)
    return _dirty(found, cu_seqlens_q)


def _ragged(indices, indptr):
    assert indices.dtype == indptr.dtype == torch.int32 and indptr[0] == 0
    return [indices[a:b] for a, b in zip(indptr.tolist(), indptr[1:].tolist(), strict=False)]


def cudnn_batch_decode_with_kv_cache(q, k_cache, v_cache, scale, workspace_buffer, *, max_sequence_kv, actual_seq_lens_kv=None,
                                     block_tables=None, is_cuda_graph_compatible=False, batch_offsets_q=None,
                                     batch_offsets_o=None, batch_offsets_k=None, batch_offsets_v=None, out=None,
                                     return_lse=False, lse=None, q_len_per_req=1, window_left=-1, sinks=None):
    seen.append("cudnn")
    rows, page = len(q), k_cache.shape[2]  # (pages, Hkv, page_size, D)
    assert actual_seq_lens_kv.shape == (rows, 1, 1, 1) and actual_seq_lens_kv.dtype == block_tables.dtype == torch.int32
    assert block_tables.shape == (rows, max_sequence_kv // page) and block_tables.is_contiguous() and out.is_contiguous()
    assert workspace_buffer.dtype == torch.uint8 and q_len_per_req == 1 and is_cuda_graph_compatible
    lens = actual_seq_lens_kv.flatten()
    assert (lens >= 1).all() and out.shape == (rows, q.shape[1], v_cache.shape[3]) and k_cache.shape[1] * 2 == q.shape[1]
    out.copy_(attend(q, k_cache.transpose(1, 2), v_cache.transpose(1, 2), block_tables, torch.arange(rows + 1), lens, scale,
                     None if window_left < 0 else window_left + 1)[0])


def paged_decode_attention_shape(num_query_heads, num_kv_heads, head_size, head_size_kv, block_size, num_seqs):
    return SimpleNamespace(heads=num_query_heads, kv_heads=num_kv_heads, dims=(head_size, head_size_kv))


def get_paged_decode_attention_kernels(shape, mfma_variant, num_kv_splits, input_dtype=torch.float16,
                                       output_dtype=torch.float16, layer_scaling=None, logit_cap=0.0):
    """wave-lang's two kernels: partial results with the base-2 logarithm of their denominators, and their sum."""
    assert mfma_variant == ("f16", "f16") and input_dtype == output_dtype == torch.float32 and layer_scaling

    def phase_0(q, k, v, request_indices, kv_indices, output, output_max):
        seen.append("wave")
        assert request_indices.dtype == kv_indices.dtype == torch.int32 and output.shape == (num_kv_splits, *output.shape[1:])
        assert k.shape[1:] == (shape.kv_heads, shape.dims[0]) and output.dtype == output_max.dtype == torch.float32
        output.zero_(), output_max.fill_(-1e6)
        for row, slots in enumerate(_ragged(kv_indices, request_indices)):
            assert len(slots)
            for split, part in enumerate(slots.split(-(-len(slots) // num_kv_splits))):
                out, lse = attend(q[row : row + 1], k[:, None], v[:, None], [part], torch.tensor([0, 1]),
                                  torch.tensor([len(part)]), layer_scaling, None, logit_cap)
                output[split, row], output_max[split, row] = out[0], lse[0] / math.log(2)

    def phase_1(logits, logits_max, request_indices, output):
        weights = torch.softmax(logits_max * math.log(2), 0)
        output.copy_((weights[..., None] * logits).sum(0))

    return phase_0, phase_1, {"phase": 0}, {"phase": 1}, ["K2", "N_KV", "S"], ["S"]


class WaveCompileOptions:
    def __init__(self, subs, dynamic_symbols, canonicalize=True, use_buffer_ops=False, waves_per_eu=None,
                 denorm_fp_math_f32=None, wave_runtime=False):
        assert subs["delay"] == 1 and dynamic_symbols == (["S"] if subs["phase"] else ["K2", "N_KV", "S"])


def wave_compile(options, kernel, schedule=None):
    assert isinstance(options, WaveCompileOptions)
    return kernel


def npu_paged_attention(query, key_cache, value_cache, num_kv_heads, num_heads, scale_value, block_table, context_lens, out):
    seen.append("npu decode")
    assert context_lens.dtype == torch.int32 and block_table.dtype == torch.int32 and len(query) == len(block_table)
    assert (num_heads, num_kv_heads) == (query.shape[1], key_cache.shape[2])
    out.copy_(attend(query, key_cache, value_cache, block_table, torch.arange(len(query) + 1), context_lens, scale_value)[0])


def npu_flash_attention_qlens(query, key_cache, value_cache, block_table, mask, seq_len, context_lens, num_kv_heads, num_heads,
                              scale_value, out):
    seen.append("npu prefill")
    assert mask.shape == (128, 128) and mask.dtype == query.dtype and (seq_len > 0).all() and int(seq_len.sum()) == len(query)
    assert mask[3, 3] == 0 and mask[3, 4] == (float("-inf") if query.dtype == torch.float16 else 1) and mask[4, 3] == 0
    starts = torch.nn.functional.pad(seq_len.cumsum(0), (1, 0))
    found, _ = attend(query.view(len(query), num_heads, -1), key_cache, value_cache, block_table, starts, context_lens,
                      scale_value)
    out.copy_(found.flatten(1))


def decode_attention_cpu(query, k_cache, v_cache, output, key, value, loc, attn_logits, req_to_token, req_pool_indices,
                         seq_lens, sm_scale, logit_cap):
    seen.append("amx decode")
    assert attn_logits.shape == (len(query), query.shape[1], 8, v_cache.shape[2] + 1) and attn_logits.dtype == torch.float32
    assert req_to_token.dtype == req_pool_indices.dtype == seq_lens.dtype == loc.dtype == torch.int64 and (loc >= 0).all()
    k_cache[loc], v_cache[loc] = key, value
    output.copy_(attend(query, k_cache[:, None], v_cache[:, None], req_to_token[req_pool_indices], torch.arange(len(query) + 1),
                        seq_lens, sm_scale, None, logit_cap)[0])


def extend_attention_cpu(q_extend, k_extend, v_extend, o_extend, k_buffer, v_buffer, req_to_token, req_pool_indices, seq_lens,
                         extend_seq_lens, extend_start_loc, max_len_extend, sm_scale, logit_cap):
    seen.append("amx extend")
    assert (extend_seq_lens > 0).all() and int(extend_seq_lens.max()) == max_len_extend and len(k_extend) == len(q_extend)
    starts = torch.cat([extend_start_loc, extend_start_loc[-1:] + extend_seq_lens[-1:]])
    for row, (a, b) in enumerate(zip(starts.tolist(), starts[1:].tolist(), strict=False)):
        own = req_to_token[row][int(seq_lens[row]) - (b - a) : int(seq_lens[row])]
        assert torch.equal(k_buffer[own], k_extend[a:b]) and torch.equal(v_buffer[own], v_extend[a:b])
    o_extend.copy_(attend(q_extend, k_buffer[:, None], v_buffer[:, None], req_to_token[req_pool_indices], starts, seq_lens,
                          sm_scale, None, logit_cap)[0])


LIBRARIES: dict[str, SimpleNamespace] = {
    "flashinfer.decode": SimpleNamespace(xqa_batch_decode_with_kv_cache=xqa_batch_decode_with_kv_cache),
    "flash_attn_interface": SimpleNamespace(flash_attn_with_kvcache=flash_attn_with_kvcache, flash_attn_varlen_func=fa3_varlen),
    "flash_attn.cute": SimpleNamespace(flash_attn_varlen_func=fa4_varlen),
    "flash_attn": SimpleNamespace(flash_attn_varlen_func=fa2_varlen),
    "aiter": SimpleNamespace(paged_attention_ragged=paged_attention_ragged, mha_batch_prefill_func=mha_batch_prefill_func),
    "torch_npu": SimpleNamespace(_npu_paged_attention=npu_paged_attention,
                                 _npu_flash_attention_qlens=npu_flash_attention_qlens),
    "sgl_kernel": SimpleNamespace(),
    "flashinfer.cudnn": SimpleNamespace(cudnn_batch_decode_with_kv_cache=cudnn_batch_decode_with_kv_cache),
    wave.TEMPLATE: SimpleNamespace(get_paged_decode_attention_kernels=get_paged_decode_attention_kernels,
                                   paged_decode_attention_shape=paged_decode_attention_shape),
    f"{wave.PACKAGE}.utils.general_utils": SimpleNamespace(get_default_scheduling_params=lambda: {"delay": 1}),
    f"{wave.PACKAGE}.utils.run_utils": SimpleNamespace(set_default_run_config=lambda options: options),
    f"{wave.PACKAGE}.compile": SimpleNamespace(WaveCompileOptions=WaveCompileOptions, wave_compile=wave_compile),
    f"{wave.PACKAGE}.constraints": SimpleNamespace(MMAType=SimpleNamespace(F32_16x16x16_F16="f16")),
}
CASES = [
    (trtllm_mha, None, {"xqa"}), (flash_attention, "FA3", {"FA3"}), (flash_attention, "FA4", {"FA4"}),
    (flash_attention, "FA2", {"FA2"}), (aiter, None, {"ragged", "prefill"}), (ascend, None, {"npu decode", "npu prefill"}),
    (intel_amx, None, {"amx decode", "amx extend"}), (cudnn, None, {"cudnn"}), (wave, None, {"wave"}),
]


@pytest.fixture
def kit(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Kit]:
    """A kit for a module's backend on the CPU, in float32, with recorders in the place of the vendors' packages."""
    real = importlib.import_module
    monkeypatch.setattr(importlib, "import_module", lambda name, *a: LIBRARIES.get(name) or real(name, *a))
    monkeypatch.setattr(torch.ops, "sgl_kernel", SimpleNamespace(decode_attention_cpu=decode_attention_cpu,
                                                                 extend_attention_cpu=extend_attention_cpu), raising=False)
    seen.clear()
    wave.kernels.cache_clear()
    monkeypatch.setattr(cudnn, "WORKSPACE", 64)

    def make(module, which: str | None) -> Kit:
        if which is not None:
            found = next((n, m, p) for n, m, _, p in flash_attention.VARIANTS if n == which)
            monkeypatch.setattr(flash_attention, "_installed", lambda: found)
        caps = dataclasses.replace(module.BACKEND.capabilities, devices=frozenset({"cpu"}), dtypes=frozenset({torch.float32}))
        return Kit(dataclasses.replace(module.BACKEND, capabilities=caps, op=module.paged_attention), CPU, torch.float32)

    return make


def name_of(x: object) -> str:
    """A test's id, equal in every process: a set has no order."""
    return "+".join(sorted(x)) if isinstance(x, set) else getattr(x, "__name__", str(x)).split(".")[-1]


@pytest.mark.parametrize("module, which, calls", CASES, ids=name_of)
def test_calls_are_right(kit, module, which, calls) -> None:
    """Every declared feature, padding, and a cache that another layer has written, on decode and mixed batches."""
    k = kit(module, which)
    single = [{name: value} for name, value in k.features.items()]
    for options in ({}, {"pad": (3, 2)}, {"write": False}, {"strided": True}, k.features, *single):
        k.exact(DECODE, MIXED, **options)
    if k.backend.any_batch:
        last_tokens(k)
    assert set(seen) == calls


@pytest.mark.parametrize("which", ["FA2", "FA3", "FA4"])
def test_encoders_run_on_flash_attention(kit, which, monkeypatch) -> None:
    """The kit for ragged attention without a cache, windows and padding too; what its kernels lack is refused."""
    caps = kit(flash_attention, which).backend.capabilities
    registry.all_backends()  # loads them before one is replaced
    fake = dataclasses.replace(flash_attention.BACKEND, capabilities=caps, available=lambda device: None)
    monkeypatch.setitem(registry.REGISTRY._backends, fake.name, fake)
    monkeypatch.setattr(flash_attention, "BACKEND", fake)
    ops = OpKit(CPU, torch.float32)
    assert ops.providers() == ["flash_attention"]
    ops.varlen("flash_attention")
    assert set(seen) == {which}
    q, k, v, *starts = ops.inputs([3, 0, 6], [5, 2, 4], dims=(16, 16))
    k[6, 0] = k[9] = float("nan")  # what sees a broken key has no result, rather than no keys
    for options in ({}, {"causal": True}, {"window": 2}, {"window": 2, "causal": True}):
        for found, defined in zip(varlen_attention(q, k, v, *starts, scale=1.0, implementation="flash_attention", **options),
                                  varlen_attention_eager(q, k, v, *starts, scale=1.0, **options), strict=True):
            assert defined.isnan().any() and not defined.isnan().all()
            torch.testing.assert_close(found, defined, equal_nan=True)
    q, k, v, *starts = ops.inputs(*ENCODERS[0], dims=(24, 40))
    with pytest.raises(ValueError, match="head dims 24/40; it has"):
        varlen_attention(q, k, v, *starts, scale=1.0, implementation="flash_attention")


@pytest.mark.parametrize("module, which, calls", CASES, ids=name_of)
def test_what_is_not_declared_raises(kit, module, which, calls) -> None:
    k = kit(module, which)
    for name, value in (("window", 5), ("softcap", 4.0), ("chunk", 8), ("sinks", True)):
        if not getattr(k.caps, name):
            with pytest.raises(UnsupportedAttention, match=f"the {module.NAME} backend has"):
                check(k.backend, k.batch(DECODE, **{name: value}))
    assert k.on_codes(torch.int8) == k.on_codes(torch.float8_e4m3fn) == REFUSED


@pytest.mark.parametrize("module", [trtllm_mha, flash_attention, aiter, ascend, intel_amx, cudnn, wave])
def test_why_it_is_not_usable(module) -> None:
    """One reason, with what to do about it; and tables say what has not been run on hardware."""
    devices = {"ascend": "npu", "intel_amx": "cpu"}
    why = module.BACKEND.available(SimpleNamespace(type=devices.get(module.NAME, "cuda")))
    assert why and ("GPU" in why or "install" in why or "AMX" in why)
    if module is flash_attention:
        assert "flash_attention: verified on hardware: FA4 on Hopper; not FA3" in str(backends("cpu"))
    elif module not in (trtllm_mha, cudnn):  # whose kit passed on an H200
        assert not module.BACKEND.verified
        assert module.NAME in str(backends("cpu")).split("not verified on hardware")[1]


def test_missing_and_wrong_packages_are_named_with_their_install_line(monkeypatch) -> None:
    assert missing("no_such_package_here", "pip install it") == "no_such_package_here is not installed: pip install it"
    assert missing("no_such_package_here.part", "do") == "no_such_package_here.part is not installed: do"
    assert missing("torch", "") is None
    q = torch.randn(3, 2, 16)
    starts = torch.tensor([0, 3], dtype=torch.int32)
    with pytest.raises(UnsupportedAttention, match="implementation='flash_attention' is not usable: "):
        varlen_attention(q, q, q, starts, starts, scale=1.0, implementation="flash_attention")
    # A call whose signature has changed would fail in the middle of a step, or mean something else.
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.6.18.post1+cu130")
    assert too_old("flashinfer-python", "0.7.2") == (
        "flashinfer-python 0.6.18.post1+cu130 is installed, its calls are those of "
        "0.7.2 or newer: pip install -U flashinfer-python")
    assert too_old("flashinfer-python", "0.6.18") is too_old("flashinfer-python", "0.6.9") is None
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "4.0.0b9")
    assert too_old("flash-attn-4", "4.0.0b36").endswith("b36 or newer: pip install -U --pre flash-attn-4")
    assert too_old("flash-attn-4", "4.0.0b9") is None
    monkeypatch.undo()
    assert too_old("no-such-distribution", "1.0") is None
    assert too_old("no-such-distribution", "1.0", "pip install it") == (
        "the module that is installed is not that of no-such-distribution: pip install it")


@pytest.mark.parametrize(("module", "version"), [("flash_attn", "1.0.9"), ("flash_attn.cute", "4.0.0b9")])
def test_an_old_flash_attention_is_named_and_not_called(module, version, monkeypatch) -> None:
    monkeypatch.setattr(flash_attention, "missing", lambda name, install: None if name == module else "not installed")
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    flash_attention.variant.cache_clear()
    try:
        assert f"{version} is installed, its calls are those of " in flash_attention.available(torch.device("cuda"))
        monkeypatch.setattr(importlib.metadata, "version", lambda name: "5.0")
        flash_attention.variant.cache_clear()
        assert flash_attention.available(torch.device("cuda")) is None
    finally:
        flash_attention.variant.cache_clear()


def test_other_builds_and_projects_of_the_same_name_are_not_taken(monkeypatch, tmp_path) -> None:
    """sgl-kernel's build for GPUs has the same name, and would fail in the middle of a step."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True, raising=False)
    monkeypatch.setattr(intel_amx, "missing", lambda module, install: None)
    for build, message in ((SimpleNamespace(), "has no kernels for CPUs: build sgl-kernel"),
                           (None, r"sgl_kernel does not load \(ModuleNotFoundError")):
        monkeypatch.setitem(sys.modules, "sgl_kernel", build)
        assert re.search(message, intel_amx.BACKEND.available(CPU))
    # PyPI's aiter would fail in the middle of a step, with an AttributeError.
    (tmp_path / "aiter").mkdir()
    (tmp_path / "aiter" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert "is not AMD's: pip uninstall aiter, then pip install" in aiter.BACKEND.available(torch.device("cuda"))
    (tmp_path / "aiter" / "ops").mkdir()
    assert aiter.BACKEND.available(torch.device("cuda")) is None


def test_flash_attention_chooses_by_gpu_and_package(monkeypatch) -> None:
    installed = {"flash_attn_interface", "flash_attn.cute", "flash_attn"}
    monkeypatch.setattr(flash_attention, "missing", lambda module, install: None if module in installed else "missing")

    def variant(major: int) -> str | None:
        flash_attention.variant.cache_clear()
        found = flash_attention.variant(major)
        flash_attention.variant.cache_clear()
        return found and f"{found[0]}, pages of {found[2]}"

    assert [variant(m) for m in (7, 8, 9, 10)] == [None, "FA3, pages of 1", "FA3, pages of 1", "FA4, pages of 128"]
    installed.discard("flash_attn_interface")
    assert [variant(m) for m in (8, 9)] == ["FA2, pages of 256", "FA4, pages of 1"]
    caps = flash_attention.BACKEND.capabilities
    for found, dims in ((("FA4", "", 1), {128, 192, 256}), (("FA4", "", 128), {128, 256}),
                        (("FA2", "", 256), {72, 128, 192, 256})):
        monkeypatch.setattr(flash_attention, "_installed", lambda found=found: found)
        assert {d for d in (4, 72, 128, 192, 256, 264) if caps.head_dims(d, d)} == dims and not caps.head_dims(128, 64)
