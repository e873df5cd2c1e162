"""MLA on the latent cache: the semantic op, the backends by the conformance kit, and what the kit catches."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quire import AttentionBackend, UnsupportedAttention, check_backend
from quire.attn_ops.attention import AttentionSite, Latent, attention_eager
from quire.attn_ops.backends import cutlass_mla, flashinfer_mla, flashmla, torch_native, trtllm_mla
from quire.attn_ops.kv_cache import PagedKVCache, bytes_per_page, token_bytes
from quire.attn_ops.metadata import CommonAttentionMetadata
from quire.attn_ops.mla import absorb_query, expand_output, mla_attention, split_weight
from quire.attn_ops.registry import backends, get_backend
from quire.attn_ops.selection import select_latent_or_dense
from quire.attn_ops.step import Step, StepLimits
from tests.attn_ops.backends.flashinfer_mla_stand_in import Wrapper, attend

V3 = AttentionSite(layer=0, num_heads=128, num_kv_heads=128, head_dim=192, head_dim_v=128, dtype=torch.bfloat16,
                   scale=192**-0.5, latent=Latent(512, 64))
CPU = torch.device("cpu")


def statuses(backend: AttentionBackend, **options: Any) -> dict[str, str]:
    return {r.check: f"{r.status} {r.detail}" for r in check_backend(backend, only=options.pop("only", "MLA"), **options)}


def failed(backend: AttentionBackend, **options: Any) -> list[str]:
    found = statuses(backend, **options)
    assert found
    return [f"{name}: {status}" for name, status in found.items() if status.startswith("FAIL")]


def test_semantic_op() -> None:
    """It is attention with keys and values made from latent vectors, and equals the absorbed form."""
    heads, rank, rope, nope, dim_v, length = 3, 10, 4, 6, 5, 7
    q, c, k_rope, kv_b = (torch.randn(*shape, dtype=torch.float64) for shape in (
        (2, heads, length, nope + rope), (2, length, rank), (2, length, rope), (heads * (nope + dim_v), rank)))
    out = mla_attention(q, c, k_rope, kv_b, layer=0, scale=0.3)
    assert out.shape == (2, heads, length, dim_v)
    w_uk, w_uv = split_weight(kv_b, heads, nope)
    options = {"layer": 0, "scale": 0.3, "window": None, "softcap": None, "chunk": None, "causal": True}
    for b in range(2):
        absorbed = torch.cat([absorb_query(q[b, :, :, :nope].transpose(0, 1), w_uk), q[b, :, :, nope:].transpose(0, 1)], dim=-1)
        keys = torch.cat([c[b], k_rope[b]], dim=-1)[None, None]
        latent = attention_eager(absorbed.transpose(0, 1)[None], keys, c[b][None, None], None, **options)[0]
        torch.testing.assert_close(expand_output(latent.transpose(0, 1), w_uv).transpose(0, 1), out[b])
    torch.library.opcheck(mla_attention, (q, c, k_rope, kv_b), {"layer": 0, "scale": 0.3})
    for wrong in ((q[0], c, k_rope, kv_b), (q, c, k_rope, kv_b[:-1]), (q, c[..., 1:], k_rope, kv_b)):
        with pytest.raises(ValueError, match="quire::mla_attention"):
            mla_attention(*wrong, layer=0, scale=1.0)


def test_cache() -> None:
    """A token of DeepSeek-V3 takes 1,152 bytes per layer in bfloat16, 1/71 of all its keys and values."""
    assert token_bytes(V3) == 1152 and token_bytes(V3.dense) == 81920
    assert bytes_per_page([V3, V3], 16) == 2 * 16 * 1152
    cache = PagedKVCache.for_sites([V3, replace(V3.dense, layer=1)], num_pages=3, page_size=16, device="cpu")
    assert cache.k[0].shape == (3, 16, 1, 576) and cache.of_layer(0)[1:] == (None, None, None)
    assert cache.is_latent(0) and not cache.is_latent(1)
    assert cache.num_bytes == 3 * bytes_per_page([V3, V3.dense], 16)
    quantized = PagedKVCache.for_sites([V3], num_pages=3, page_size=16, device="cpu", dtype=torch.int8)
    assert quantized.num_bytes == 3 * 16 * token_bytes(V3, torch.int8) == 3 * 16 * 584
    with pytest.raises(ValueError, match="a latent layer has one key head"):
        PagedKVCache(num_layers=1, num_pages=3, page_size=16, num_kv_heads=2, head_dim=576, head_dim_v=512, latent=True,
                     dtype=torch.bfloat16, device="cpu")


def test_selection() -> None:
    """The latent cache where a backend has it; else all keys and values, with the reason; else both reasons."""
    chosen = select_latent_or_dense("auto", [V3], device=CPU, page_size=16)
    assert chosen.sites == (V3,) and not chosen.not_latent
    chosen = select_latent_or_dense("auto", [V3], device=CPU, page_size=16, kv_dtype=torch.int8)
    assert chosen.sites == (V3,) and not chosen.not_latent
    coarse = replace(torch_native.BACKEND, name="coarse", capabilities=replace(torch_native.BACKEND.capabilities,
                                                                                latent_kv_dtypes=frozenset()))
    chosen = select_latent_or_dense(coarse, [V3], device=CPU, page_size=16, kv_dtype=torch.int8)
    assert chosen.sites == (V3.dense,) and chosen.not_latent == "coarse: no latent cache of int8"
    without = replace(torch_native.BACKEND, name="without", capabilities=replace(torch_native.BACKEND.capabilities, mla=False))
    chosen = select_latent_or_dense(without, [V3], device=CPU, page_size=16)
    assert chosen.sites == (V3.dense,) and chosen.not_latent == "without: no MLA on the latent cache"
    weak = replace(without, capabilities=replace(without.capabilities, head_dims=lambda d, dv: False, head_dims_note="none"))
    with pytest.raises(UnsupportedAttention, match="(?s)no MLA on the latent cache.*head dims 192/128"):
        select_latent_or_dense(weak, [V3], device=CPU, page_size=16)
    for name in ("flashinfer_mla", "flashmla"):
        with pytest.raises(UnsupportedAttention, match="runs on cuda") as refusal:
            select_latent_or_dense(name, [V3], device=CPU, page_size=64)
        assert str(refusal.value).count("runs on cuda") == 1


@pytest.mark.parametrize("dtype", [torch.float32, *(pytest.param(d, marks=pytest.mark.slow)
                                                    for d in (torch.float16, torch.bfloat16))])
def test_torch_native(dtype: torch.dtype) -> None:
    assert not failed(get_backend("torch_native"), dtype=dtype)
    if dtype == torch.float32:
        assert not failed(get_backend("torch_native"), kv_dtype=torch.int8, only="MLA: ")


@pytest.mark.slow
@pytest.mark.parametrize("check, dtype", [("decode, prefill, mixed", torch.float32), ("KV cache int8", torch.float32),
                                          ("KV cache float8_e4m3fn", torch.float16)])
def test_triton(check: str, dtype: torch.dtype) -> None:
    pytest.importorskip("triton")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    assert not failed(get_backend("triton"), device=device, dtype=dtype, only=f"MLA: {check}")


def broken(change: Callable[[dict[str, Any]], Any]) -> AttentionBackend:
    names = ("q", "c", "k_rope", "kv_b", "cache", "slot_mapping", "block_table", "query_start_loc", "seq_lens", "prepared",
             "c_scale", "rope_scale")

    def op(*args: Any, scale: float) -> torch.Tensor:
        given = {**dict(zip(names, args, strict=False)), "scale": scale}
        change(given)
        scale = given.pop("scale")
        return torch_native.mla_paged_attention(*given.values(), scale=scale)

    return replace(torch_native.BACKEND, name="broken", mla_op=op)


def old_weights(kept: dict[tuple[int, ...], torch.Tensor] = {}) -> Callable[[dict[str, Any]], None]:  # noqa: B006
    def change(given: dict[str, Any]) -> None:
        key = (given["kv_b"].data_ptr(), *given["kv_b"].shape)
        given["kv_b"] = kept.setdefault(key, given["kv_b"].clone())
    return change


@pytest.mark.parametrize("change, check", [
    (lambda g: g.update(slot_mapping=torch.full_like(g["slot_mapping"], -1)), "decode, prefill, mixed"),
    (lambda g: g.update(k_rope=torch.zeros_like(g["k_rope"])), "decode, prefill, mixed"),
    (lambda g: g.update(scale=g["scale"] / 2), "decode, prefill, mixed"),
    (lambda g: g.update(seq_lens=(g["seq_lens"] - 1).clamp_min(0)), "decode, prefill, mixed"),
    (lambda g: g.update({"rope_scale": g["c_scale"]} if "rope_scale" in g else {}), "KV cache int8"),
    (old_weights({}), "weights"),  # absorbed once, they would serve a model that is trained on as it was
], ids=["no write", "no rope", "half the scale", "a key less", "one scale for another", "old weights"])
def test_the_kit_sees(change: Callable[[dict[str, Any]], Any], check: str) -> None:
    assert failed(broken(change), only=f"MLA: {check}")
    assert not failed(broken(lambda given: None), only=f"MLA: {check}")


# The vendors' kernels, each as a stand-in in PyTorch with its published signature.


def flash_mla_with_kvcache(q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, num_splits=None,
                           softmax_scale=None, causal=False, is_fp8_kvcache=None, indices=None, attn_sink=None,
                           extra_k_cache=None, extra_indices_in_kvcache=None, topk_length=None, extra_topk_length=None,
                           enable_batch_invariant=False, use_legacy=False, kv_format=None, descale_q=None, descale_k=None):
    """flash_mla.flash_mla_with_kvcache of sgl-flash-mla 1.0.0, dense."""
    assert use_legacy and head_dim_v == 512 and q.shape[3] == 576 and k_cache.shape[1:] == (64, 1, 576)
    assert block_table.dtype is cache_seqlens.dtype is torch.int32 and len(block_table) == len(cache_seqlens) == len(q)
    out = q.new_zeros(*q.shape[:3], 512)
    for r, length in enumerate(cache_seqlens.tolist()):
        out[r] = attend(q[r], k_cache[block_table[r].long()].flatten(0, 2)[:length], softmax_scale, causal)
    return out, q.new_zeros(len(q), q.shape[2], q.shape[1])


def latent_decode(q: torch.Tensor, cache: torch.Tensor, table: torch.Tensor, lens: torch.Tensor, scale: float) -> torch.Tensor:
    """q (B, H, 576), cache (pages, page_size, 576) -> (B, H, 512)."""
    assert table.dtype is lens.dtype is torch.int32 and len(table) == len(lens) == len(q) and (lens >= 1).all()
    out = q.new_empty(*q.shape[:2], 512)
    for r, length in enumerate(lens.tolist()):
        out[r] = attend(q[r][None], cache[table[r].long()].flatten(0, 1)[:length], scale)[0]
    return out


def trtllm_batch_decode_with_kv_cache_mla(
        query, kv_cache, workspace_buffer, qk_nope_head_dim, kv_lora_rank, qk_rope_head_dim, block_tables, seq_lens,
        max_seq_len, sparse_mla_top_k=0, out=None, bmm1_scale=1.0, bmm2_scale=1.0, sinks=None,
        skip_softmax_threshold_scale_factor=None,
        enable_pdl=None, backend="auto", is_var_seq=True, uses_shared_paged_kv_idx=True, lse=None, return_lse=False,
        cute_dsl_impl="auto", kv_scale_format="auto", cum_seq_lens_q=None, max_q_len=None, multi_ctas_kv_counter_buffer=None,
        sparse_mla_top_k_lens=None, enable_dcp=False, cp_world=1, cp_rank=0, causal_seqlens_kv_global=None,
        use_fp16_softmax=None, return_lse_base=None) -> torch.Tensor:
    """flashinfer.mla.trtllm_batch_decode_with_kv_cache_mla of flashinfer-python 0.7.2.post1, dense."""
    pages, page, dim = kv_cache.shape
    assert query.shape[1:2] == (1,) and query.shape[3] == dim == 576 and (kv_lora_rank, qk_rope_head_dim) == (512, 64)
    assert page in (32, 64) and block_tables.shape[1] % (128 // page) == 0 and max_seq_len == block_tables.shape[1] * page
    assert workspace_buffer.dtype is torch.uint8 and not workspace_buffer.any() and bmm2_scale == 1.0
    assert backend == "trtllm-gen" and query.dtype == kv_cache.dtype == torch.bfloat16 and block_tables.is_contiguous()
    return latent_decode(query[:, 0], kv_cache, block_tables, seq_lens, bmm1_scale)[:, None]


def cutlass_mla_get_workspace_size(max_seq_len, num_batches, sm_count=0, num_kv_splits=1) -> int:
    """sgl_kernel.cutlass_mla_get_workspace_size of sgl-kernel 0.3.21; the number is a stand-in's."""
    assert max_seq_len > 0 and num_batches > 0
    return max_seq_len + num_batches


def cutlass_mla_decode(q_nope, q_pe, kv_c_and_k_pe_cache, seq_lens, page_table, workspace, sm_scale, num_kv_splits=1
                       ) -> torch.Tensor:
    """sgl_kernel.cutlass_mla_decode of sgl-kernel 0.3.21."""
    assert q_nope.shape[1] <= 128 and q_nope.shape[2] == 512 and q_pe.shape == (*q_nope.shape[:2], 64)
    assert q_nope.is_contiguous() and q_pe.is_contiguous() and page_table.is_contiguous() and page_table.shape[1] > 0
    assert kv_c_and_k_pe_cache.shape[1:] == (128, 576) and q_nope.dtype == q_pe.dtype == kv_c_and_k_pe_cache.dtype
    assert workspace.dtype is torch.uint8 and workspace.numel() >= page_table.shape[1] * 128 + len(q_nope)
    assert num_kv_splits == 1  # others cannot be captured
    return latent_decode(torch.cat([q_nope, q_pe], -1), kv_c_and_k_pe_cache, page_table, seq_lens, sm_scale)


def on_cpu(backend: AttentionBackend, op: Callable[..., torch.Tensor]) -> AttentionBackend:
    caps = replace(backend.capabilities, devices=frozenset({"cpu"}))
    return replace(backend, capabilities=caps, available=lambda device: None, mla_op=op)


CHECKS = ["decode, prefill", "boundary", "page sizes", "padding", "stale", "garbage"]


@pytest.mark.parametrize(("module", "check"), [
    *((flashinfer_mla, c) for c in CHECKS), *((flashmla, c) for c in CHECKS if c not in ("boundary", "page sizes")),
    *((m, c) for m in (trtllm_mla, cutlass_mla) for c in CHECKS if c != "boundary")], ids=lambda x: getattr(x, "NAME", x))
def test_vendors(monkeypatch: pytest.MonkeyPatch, module: Any, check: str) -> None:
    for name, functions in {
        "flashinfer": {}, "flashinfer.mla": dict(BatchMLAPagedAttentionWrapper=Wrapper, trtllm_batch_decode_with_kv_cache_mla=(
            trtllm_batch_decode_with_kv_cache_mla)),
        "flash_mla": dict(flash_mla_with_kvcache=flash_mla_with_kvcache, get_mla_metadata=lambda: (object(), None)),
        "sgl_kernel": {f.__name__: f for f in (cutlass_mla_decode, cutlass_mla_get_workspace_size)},
    }.items():
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(**functions))
    monkeypatch.setattr(trtllm_mla, "WORKSPACE", 64)
    assert not failed(on_cpu(module.BACKEND, module.mla_paged_attention), dtype=torch.bfloat16, only=check)


def test_flashinfer_plans_a_graph_of_padding_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines capture such a batch, and replay it with fewer sequences than it has rows. A prompt does not fit into it."""
    for name, functions in {"flashinfer": {}, flashinfer_mla.LIBRARY: dict(BatchMLAPagedAttentionWrapper=Wrapper)}.items():
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(**functions))
    cache = PagedKVCache.for_sites([V3], num_pages=8, page_size=16, device=CPU)
    state = flashinfer_mla.State([V3], cache, StepLimits(4, 4, 2))

    def planned(meta: CommonAttentionMetadata, capturing: bool = False) -> tuple[Any, ...]:
        flashinfer_mla.plan(meta, Step(cache, meta, states={flashinfer_mla.NAME: state}, graph_key=4, capturing=capturing))
        (wrapper,) = state.wrappers.values()
        return wrapper.given

    def batch(query_lens: list[int]) -> CommonAttentionMetadata:
        rows = [[1 + r, 5 + r] for r in range(len(query_lens))]
        return CommonAttentionMetadata.build(query_lens, [20] * len(rows), rows, page_size=16).padded(4, 4)

    four = batch([1] * 4)
    idle = replace(four, query_start_loc_cpu=torch.zeros(5, dtype=torch.int32), seq_lens_cpu=torch.zeros(4, dtype=torch.int32))
    assert planned(idle, capturing=True)[0] == [0, 1, 2, 3, 4]
    starts, pages, indices, lens, *_ = planned(batch([1, 1]))
    assert (starts, pages, lens) == ([0, 1, 2, 3, 4], [0, 2, 4, 5, 6], [20, 20, 1, 1]) and indices[:4].tolist() == [1, 5, 2, 6]
    for mixed in (batch([2, 1]), batch([1, 1]).padded(8, 4)):
        with pytest.raises(RuntimeError, match="one token per sequence"):
            planned(mixed)
    with pytest.raises(RuntimeError, match="one token per sequence"):  # more tokens than rows: no graph of decodes
        planned(replace(idle.padded(8, 4), query_start_loc_cpu=idle.query_start_loc_cpu), capturing=True)


def test_blackwell_is_said_to_be_needed() -> None:
    """What cannot run is not offered, and tables say that it has not been run on hardware."""
    for module in (trtllm_mla, cutlass_mla):
        assert not module.BACKEND.verified and module.BACKEND.priority is None
        assert module.NAME in str(backends("cpu")).split("not verified on hardware")[1]
    assert "page size 16 (has 32 and 64)" in trtllm_mla.BACKEND.capabilities.reasons_against(V3, device=CPU, page_size=16)
    many = replace(V3, num_heads=256, num_kv_heads=256)
    assert "256 query heads and 256 key heads (has up to 128 query heads)" in cutlass_mla.BACKEND.capabilities.reasons_against(
        many, device=CPU)
    assert "page size 64 (has 128)" in cutlass_mla.BACKEND.capabilities.reasons_against(V3, device=CPU, page_size=64)


def test_refused_elsewhere() -> None:
    """On this machine each says what is missing, and how to get it."""
    for backend in (flashinfer_mla.BACKEND, flashmla.BACKEND, trtllm_mla.BACKEND, cutlass_mla.BACKEND):
        assert backend.available(CPU) == "runs on cuda, not cpu"
        why = backend.capabilities.reasons_against(V3.dense, device=torch.device("meta"), page_size=64)
        assert "head dims 192/128 (has MLA only)" in why
    assert "page size 16 (has 64)" in flashmla.BACKEND.capabilities.reasons_against(V3, device=CPU, page_size=16)
