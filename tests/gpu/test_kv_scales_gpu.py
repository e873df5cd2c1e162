"""fp8 caches with one fixed scale per layer on a GPU: what is stored, FlashInfer's kernels on it, and engines.

FlashInfer compiles kernels of float16 queries on codes of e4m3, about a minute for each the first time on a machine: six, and
as many for the slow tests, of e5m2.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import quire
from quire import Engine
from quire.attn_ops.backends.flashinfer import BACKEND
from quire.attn_ops.conformance.report import check_backend
from quire.attn_ops.kv_cache import PagedKVCache, pages_for
from quire.attn_ops.kv_quant import FIXED_SCALE_KV_DTYPES, is_fixed, write_kv
from quire.attn_ops.kv_store import store_kv
from quire.attn_ops.ops.rope import rope_kv_write_cuda
from tests.attn_ops.cases import bits
from tests.gpu.helpers import need
from tests.gpu.test_flashinfer_gpu import Captured
from tests.steps import serve
from tests.tiny import GREEDY, assert_idle, tokens

NAMES = {"fp8": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
KIND = pytest.mark.parametrize("kind", ["fp8", pytest.param("fp8_e5m2", marks=pytest.mark.slow)])
SMALL = dict(num_pages=400, max_num_seqs=8, cudagraph_capture_sizes=[1, 2, 8])


def need_flashinfer(kind: str) -> str:
    """FlashInfer's kernels keep the NaN of e4m3 from compute capability 9.0 on."""
    least = BACKEND.capabilities.min_kv_compute_capability.get(NAMES[kind], (0, 0))
    if torch.cuda.get_device_capability() < least:
        pytest.skip(f"{kind} needs compute capability {least}")
    return need("flashinfer")


# What is stored: Triton's kernels and the GPU's converter.


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kv_dtype", sorted(FIXED_SCALE_KV_DTYPES, key=str), ids=str)
@pytest.mark.parametrize("fused", [False, True])
def test_every_number_is_stored_as_the_definition_stores_it(fused, kv_dtype, dtype, layout) -> None:
    """Bit for bit: a converter that clamped what does not fit, or changed a NaN, would give wrong tokens without a word.
    ``fused``: behind the rotary embedding, by angles of zero."""
    if kv_dtype == torch.float8_e4m3fn and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("Triton has no e4m3 there")
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    every = every[torch.randperm(len(every), generator=torch.Generator().manual_seed(0))]
    k, v = (x.view(64, 8, 64).cuda() for x in every.view(2, -1))
    mine = PagedKVCache(num_layers=1, num_pages=10, page_size=8, num_kv_heads=8, head_dim=64, dtype=kv_dtype, device="cuda",
                        layout=layout, kv_scales={0: (0.37, 0.002)})
    theirs = tuple(t.clone() for t in mine.of_layer(0))
    slots = torch.randperm(64, generator=torch.Generator().manual_seed(2)).cuda() + 8
    slots[5] = -1
    if fused:
        k = k.nan_to_num(nan=3.0, posinf=5.0, neginf=-5.0)  # times a sine of 0 they are NaN, in the partner's place too
        k = torch.where(k.abs() < 1e30, k, 7.0)
        angles = torch.zeros(64, 64, dtype=dtype, device="cuda")
        rope_kv_write_cuda(k, k, v, angles.cos(), angles.sin(), None, None, 0.0, *mine.of_layer(0), slots)
    else:
        store_kv(k, v, *mine.of_layer(0), slots)
    write_kv(k, v, *theirs, slots)
    for one, other in zip(mine.of_layer(0), theirs, strict=True):
        assert torch.equal(bits(one), bits(other))
    assert mine.v[0].float().isnan().any() and mine.k[0].float().isnan().any()


# FlashInfer's kernels.


@KIND
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_kit(dtype, kind) -> None:
    """Decodes, prompts, windows, softcap and sinks, and NaN for what does not fit, in both dtypes."""
    need_flashinfer(kind)
    name = str(NAMES[kind]).removeprefix("torch.")
    (result,) = check_backend(BACKEND, "cuda", dtype, only=f"{name}, fixed scale")
    assert (result.status, result.detail) == ("ok", "")


@KIND
@pytest.mark.parametrize("heads", [(32, 32), (32, 8)], ids=str)  # by CUDA cores, by tensor cores
def test_a_graph_replays_any_lengths(heads, kind) -> None:
    need_flashinfer(kind)
    captured = Captured(heads, kv_dtype=NAMES[kind], kv_scales={0: (0.0625, 0.03)})
    for seed, lens in enumerate(([8192, 1, 17, 500, 4096, 16, 3000, 1025], [20, 8000, 1], [5] * 8), 1):
        case = captured.batch(lens, seed)
        captured.check_replay(case)


# Engines.


@KIND
@pytest.mark.parametrize("options", [
    dict(compiler="eager"), pytest.param(dict(compiler="inductor", fusions="all"), marks=pytest.mark.slow),
    pytest.param(dict(compiler="eager", cudagraph_piecewise=True, cudagraph_token_sizes=[16, 64]), marks=pytest.mark.slow),
], ids=["eager", "inductor", "piecewise"])
def test_engine(options, kind, half, prompts) -> None:
    """With CUDA graphs and a prefix cache, the texts start as those of the definition's backend on the same form of cache."""
    found = {}
    for name in ("torch_native", need_flashinfer(kind)):
        with Engine(half, attention=name, kv_cache_dtype=kind, kv_scales=0.05, enable_prefix_caching=True, **SMALL,
                    **options) as engine:
            assert engine.runner.backend.name == name and engine.runner.cache.k_scale[0].shape == (1, 1, 1)
            found[name] = tokens(engine.generate(prompts, GREEDY))
            again = tokens(engine.generate(prompts, GREEDY))
            assert engine.stats().prefix_hits > 0 and engine.runner.graphs.stats.replayed > 0
            assert all("a prefill in the batch" in why for why in engine.runner.graphs.stats.fell_back)
            assert sum(a[:3] == b[:3] for a, b in zip(again, found[name], strict=True)) >= len(prompts) - 2
            engine.reset_prefix_cache()
            assert_idle(engine)
    assert sum(a[:3] == b[:3] for a, b in zip(*found.values(), strict=True)) >= len(prompts) - 2


@KIND
def test_logits(kind, half, long_prompt) -> None:
    """Steps by hand, prompts and decodes: FlashInfer's logits are those of the definition's backend up to the rounding of
    bfloat16, for which the model's own error is the measure (four times it: twice on each side)."""
    need_flashinfer(kind)
    text = torch.tensor(long_prompt[:200], device="cuda")
    exact = copy.deepcopy(half).float()
    with torch.no_grad():
        allowed = 4 * (exact(text[None]).logits - half(text[None]).logits.float()).abs().max()
    model, config = quire.paged(copy.deepcopy(half)), half.config

    def logits(attention: str) -> torch.Tensor:
        cache = PagedKVCache(num_layers=config.num_hidden_layers, num_pages=pages_for(len(text), 16) + 1, page_size=16,
                             device="cuda", num_kv_heads=config.num_key_value_heads, head_dim=config.head_dim,
                             dtype=NAMES[kind], kv_scales=0.05)
        assert all(map(is_fixed, cache.k_scale))

        def call(ids: torch.Tensor, meta: Any) -> torch.Tensor:
            with torch.no_grad(), quire.step(cache, meta, attention=attention):
                return model(input_ids=ids[None], position_ids=meta.positions[None], use_cache=False).logits[0]

        return serve(call, [text], [(150,), (30,), *[(1,)] * 20], 16, "cuda")[0].float()

    native, found = logits("torch_native"), logits("flashinfer")
    assert (found - native).abs().max() <= allowed
    assert native.isfinite().all() and found.isfinite().all()


@KIND
def test_what_does_not_fit_fails_the_request(kind, half, prompts) -> None:
    """And no token of it is returned, though FlashInfer's kernels have no NaN of their own in bfloat16."""
    small = dict(kv_cache_dtype=kind, kv_scales=1e-5, compiler="eager", **SMALL)
    with Engine(half, attention=need_flashinfer(kind), **small) as engine:
        for failed in engine.generate(prompts, GREEDY):
            assert failed.outputs[0].finish_reason == "error" and not failed.outputs[0].token_ids
            assert "do not fit kv_scales" in failed.outputs[0].error
