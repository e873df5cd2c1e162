"""``kv_scales``: fp8 caches with one fixed scale per layer, through the engine and through steps by hand."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import quire
from quire import Engine, SamplingParams, UnsupportedAttention
from quire.attn_ops.backends import torch_native
from quire.attn_ops.kv_cache import pages_for
from quire.attn_ops.kv_quant import FIXED_SCALE_KV_DTYPES
from quire.attn_ops.step import Step, running
from quire.passes.backend import quire_backend
from tests.steps import serve
from tests.tiny import GREEDY, PROMPTS, assert_idle, load_model, tokens

pytestmark = pytest.mark.usefixtures("tokens_unchecked", "traces_kept")
#: Of the shipped model's first layers, whose keys and values reach 20.
SCALES = {0: (0.06, 0.02), 1: (0.07, 0.03)}
FIXED = dict(kv_cache_dtype="fp8", kv_scales={0: SCALES[0]})  # for the fixture's model, of one layer
SMALL = dict(num_pages=120, max_num_seqs=8, max_model_len=300, async_stepping=False)
SCHEDULES = {
    "chunks_of_1_pages_of_4": dict(prefill_chunk_size=1, page_size=4, kv_layout="HND", num_pages=400),
    "chunks_of_3": dict(prefill_chunk_size=3, async_stepping=True), "preempted_async": dict(
        page_size=4, num_pages=18, async_stepping=True), "fused": dict(fusions="all"),
    "two_batch": dict(attention="two_batch:torch_native"), "cascade": dict(attention="cascade:torch_native@1"),
}


@pytest.fixture(scope="module")
def whole(model, prompts):
    """Greedy tokens where every prompt is computed in one step."""
    with Engine(model, **SMALL, **FIXED) as engine:
        cache = engine.runner.cache
        assert cache.fixed_scale and (cache.k_scale[0].item(), cache.v_scale[0].item()) == pytest.approx(SCALES[0])
        assert engine.runner.backend.name == "torch_native"  # found by "auto"
        return tokens(engine.generate(prompts, GREEDY))


@pytest.mark.parametrize("schedule", [
    s if s == "preempted_async" else pytest.param(s, marks=pytest.mark.slow) for s in SCHEDULES])
def test_same_tokens(schedule, whole, model, prompts) -> None:
    """However requests are scheduled: a cache read with another scale than it was written with would change them."""
    with Engine(model, **{**SMALL, **FIXED, **SCHEDULES[schedule]}) as engine:
        assert tokens(engine.generate(prompts, GREEDY)) == whole
        assert (engine.scheduler.num_preemptions > 0) == schedule.startswith("preempted")
        assert_idle(engine)


def test_shared_pages_and_forks(whole, model, prompts) -> None:
    """Pages of an earlier request, and copies of a page that two continuations write on, read as they were written."""
    long = prompts[3] * 2
    with Engine(model, **SMALL, **FIXED, enable_prefix_caching=True) as engine:
        alone = tokens(engine.generate([long], GREEDY))
        hits = engine.stats().prefix_hits
        assert tokens(engine.generate([long, *prompts], GREEDY)) == [*alone, *whole]
        assert engine.stats().prefix_hits > hits
        forked = engine.generate([long], SamplingParams(temperature=1e-5, seed=1, max_tokens=20, n=2))[0]
        assert [list(one.token_ids) for one in forked.outputs] == alone * 2


def test_what_does_not_fit_fails_the_request(model, prompts) -> None:
    """And no token of it is returned: the text would be another model's."""
    with Engine(model, **SMALL, kv_cache_dtype="fp8", kv_scales=1e-3) as engine:
        with pytest.raises(RuntimeError, match="request 0 failed: .* keys or values do not fit kv_scales: give larger ones"):
            engine.generate(prompts[:1], GREEDY)
        for failed in engine.generate(prompts, GREEDY):
            assert failed.outputs[0].finish_reason == "error" and not failed.outputs[0].token_ids
        assert_idle(engine)


def test_more_pages_fit_than_with_a_scale_for_each_token(model) -> None:
    pages = {}
    for scales in (None, 0.1):
        with Engine(model, kv_cache_dtype="fp8", kv_scales=scales, max_num_seqs=5000, max_model_len=1000,
                    cudagraph_capture_sizes=[]) as engine:
            pages[scales] = engine.runner.cache.num_pages
    dim = model.config.head_dim
    assert pages[0.1] / pages[None] == pytest.approx((dim + 4) / dim, rel=1e-3)


@pytest.mark.parametrize("options, error, message", [
    (dict(kv_scales=SCALES), ValueError, r"scales for layers \[0, 1\]; the layers .* own are \[0\]"),
    (dict(attention="flex_attention"), UnsupportedAttention, r"kv_scales \(has none\)\nCan serve it here: .*torch_native"),
    (dict(attention="hybrid:torch_native+flex_attention"), UnsupportedAttention, "flex_attention: KV cache of float8_e4m3fn"),
], ids=["layers", "backend", "part"])
def test_refused_at_the_start(model, options, error, message) -> None:
    with pytest.raises(error, match=message):
        Engine(model, **{**SMALL, **FIXED, **options})


# Steps by hand.


@pytest.fixture(scope="module")
def text(tokenizer):
    return torch.tensor(tokenizer(" ".join(PROMPTS))["input_ids"])


def logits_of(model, text, size: int, kv_scales=None, dtype=torch.float8_e4m3fn, attention="auto") -> torch.Tensor:
    pages, config = pages_for(len(text), 16), model.config
    cache = quire.PagedKVCache(num_layers=config.num_hidden_layers, num_pages=pages + 1, page_size=16, device="cpu",
                               num_kv_heads=config.num_key_value_heads, head_dim=config.head_dim, dtype=dtype,
                               kv_scales=kv_scales)

    def call(ids: torch.Tensor, meta: quire.CommonAttentionMetadata) -> torch.Tensor:
        with torch.no_grad(), running(Step(cache, meta, attention=attention)):
            return model(input_ids=ids[None], position_ids=meta.positions[None], use_cache=False).logits[0]

    return serve(call, [text], [(min(size, len(text) - done),) for done in range(0, len(text), size)], 16)[0]


def rounding(scales: dict[int, tuple[float, float]], dtype: torch.dtype):
    """A backend on plain caches whose keys and values were rounded before: by PyTorch's own conversion, on numbers that fit."""
    layers = iter(list(scales.values()) * 100)  # the op does not know its layer: steps run them in order

    def attend(q, k, v, *rest, **options):
        k, v = ((x / torch.tensor(s)).to(dtype).float() * torch.tensor(s) for x, s in zip((k, v), next(layers), strict=True))
        return torch_native.paged_attention(q, k, v, *rest, **options)

    return dataclasses.replace(torch_native.BACKEND, name="rounding", op=attend, rope_op=None)


@pytest.mark.parametrize("dtype", sorted(FIXED_SCALE_KV_DTYPES, key=str), ids=str)
def test_logits(dtype, text) -> None:
    """Those of the model on keys and values that are rounded to codes times the scale of their layer."""
    scales = {0: SCALES[0], 1: SCALES[1]}
    model = quire.paged(load_model(num_layers=2))
    plain = logits_of(model, text, 16, dtype=torch.float32)
    expected = logits_of(model, text, 16, dtype=torch.float32, attention=rounding(scales, dtype))
    found = logits_of(model, text, 16, scales, dtype)
    assert (found - expected).abs().max() <= 1e-4 < 1e-2 < (found - plain).abs().max()  # float32's rounding of logits up to 20


@pytest.mark.parametrize("compiler", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_steps(compiler, text) -> None:
    """torch.compile(backend="quire") takes the form from the step's cache, and refuses one that it was not compiled for."""
    scales = {0: SCALES[0]}
    routed = logits_of(quire.paged(load_model(num_layers=1)), text, 16, scales)
    model = load_model(num_layers=1)
    compiled = torch.compile(model, backend=quire_backend, options={"compiler": compiler})
    assert (logits_of(compiled, text, 16, scales) - routed).abs().max() <= 5e-2  # a last bit may select the next code
    by_token = logits_of(compiled, text, 16)
    assert (by_token - routed).abs().max() > 1e-3 and by_token.isfinite().all()
    torch._dynamo.reset()
    other = torch.compile(load_model(num_layers=1), backend=quire_backend, options={"fixed_kv_scale": False})
    with pytest.raises(Exception, match="compiled with fixed_kv_scale=False, and the step's cache has True"):
        logits_of(other, text, 16, scales)
