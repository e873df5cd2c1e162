"""The engine on the latent cache of MLA models: transformers' tokens in less memory, and weights updated meanwhile."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import quire
from quire import Engine, SamplingParams, register_backend
from quire.attn_ops import registry
from quire.attn_ops.backends.torch_native import BACKEND as NATIVE
from quire.attn_ops.kv_cache import token_bytes
from tests.tiny import hf_greedy, tokens
from tests.zoo.configs import SERVED, build

pytestmark = pytest.mark.usefixtures("traces_kept")

LENGTHS = (3, 17, 1, 30)
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 64, (n,), generator=generator).tolist() for n in LENGTHS]


def expected(model: torch.nn.Module) -> list[list[int]]:
    return [hf_greedy(model, p, GREEDY.max_tokens, eos_token_id=None) for p in prompts()]


@pytest.mark.parametrize("name, compiler", [
    ("deepseek_v3", "eager"), pytest.param("deepseek_v3", "inductor", marks=pytest.mark.slow),
    *(pytest.param(name, "eager", marks=pytest.mark.slow) for name in (
        "deepseek_v2", "minicpm3", "glm4_moe_lite", "axk1", "youtu", "mistral4", "longcat_flash"))])
def test_tokens(name: str, compiler: str) -> None:
    """Chunked prefill beside decodes. Then kv_b is updated in place, as a trainer does, and the next tokens follow it."""
    model, plain = build(SERVED[name]), build(SERVED[name])
    with Engine(model, num_pages=40, page_size=4, max_num_seqs=3, max_model_len=64, max_num_batched_tokens=8,
                compiler=compiler) as engine:
        sites = engine.runner.sites
        assert [s.latent for s in sites] == [(16, 8)] * len(sites)
        assert engine.runner.cache.num_bytes == 40 * 4 * sum(map(token_bytes, sites)) == 40 * 4 * len(sites) * 24 * 4
        assert tokens(engine.generate(prompts(), GREEDY)) == expected(plain)
        with torch.no_grad():
            for each in (model, plain):
                for path, parameter in each.named_parameters():
                    if path.endswith("kv_b_proj.weight"):
                        parameter.copy_(parameter.flip(0))
        changed = expected(plain)
        assert tokens(engine.generate(prompts(), GREEDY)) == changed
    assert expected(model) == changed


@pytest.mark.parametrize("name", ["latent_only", "hybrid:torch_native+latent_only"])
def test_a_backend_of_the_latent_cache_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashMLA and FlashInfer's MLA have no op for dense layers. As on a GPU, with all fusions: those of rope look for it."""
    monkeypatch.setattr(registry, "REGISTRY", registry.Registry())
    register_backend(dataclasses.replace(NATIVE, name="latent_only", op=None, rope_op=None, capabilities=dataclasses.replace(
        NATIVE.capabilities, head_dims=lambda dim, dim_v: False)))
    model = build(SERVED["deepseek_v3"])
    with Engine(model, num_pages=40, page_size=4, max_num_seqs=3, max_model_len=64, compiler="eager", attention=name,
                fusions="all") as engine:
        assert engine.runner.backend.name == name
        assert tokens(engine.generate(prompts(), GREEDY)) == expected(model)


@pytest.mark.parametrize("kv_cache_dtype", ["int8", pytest.param("fp8", marks=pytest.mark.slow)])
def test_quantized(kv_cache_dtype: str) -> None:
    """A third of a float32 cache, with a scale for the latent vector and one for the rotary part; the first tokens, whose
    logits the start has compared with the model's own, are transformers'."""
    model = build(SERVED["deepseek_v3"])
    with Engine(model, num_pages=40, page_size=4, max_num_seqs=3, max_model_len=64, max_num_batched_tokens=8, compiler="eager",
                kv_cache_dtype=kv_cache_dtype) as engine:
        assert engine.runner.cache.num_bytes == 40 * 4 * len(engine.runner.sites) * (24 + 8)
        found = tokens(engine.generate(prompts(), GREEDY))
    assert sum(a == b for ours, theirs in zip(found, expected(model), strict=True)
               for a, b in zip(ours, theirs, strict=True)) >= 24  # of 32: a wrong scale leaves one in 64


@pytest.mark.slow
def test_dense_without_mla(caplog: pytest.LogCaptureFixture) -> None:
    """A backend without MLA: all keys and values are cached, ``explain`` gives reasons and sizes, and a warning that it takes
    more memory than the latent cache."""
    model = build(SERVED["deepseek_v3"])
    shown = str(quire.explain(model))
    assert "MLA 4x24/16 of 16+8" in shown and "latent cache of 96 bytes per token" in shown
    assert "torch_native_mla_paged_attention, latent" in str(quire.explain(model, attention={"full": "torch_native"}))
    with Engine(model, num_pages=40, page_size=4, max_num_seqs=3, max_model_len=64, compiler="eager",
                attention="two_batch:torch_native", kv_cache_dtype="int8") as engine:
        assert "no MLA on the latent cache" in engine.runner.selection.not_latent
        assert {s.latent for s in engine.runner.sites} == {None}
        (warned,) = [r.message for r in caplog.records if "keys and values of all heads" in r.message]
        assert "192 bytes per token and layer" in warned and "latent cache of float32, 96" in warned
        assert all(o.error is None for o in engine.generate(prompts(), GREEDY))
