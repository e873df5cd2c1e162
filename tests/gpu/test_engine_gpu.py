"""The engine on a GPU: CUDA graphs, asynchronous stepping and fused weights, against transformers' own generate.

In float32 the tokens are compared; in bfloat16 each token must be the likeliest in float32 up to the error that
transformers' own bfloat16 forward has. The shipped model has a head dim of 64, which every backend takes.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM

import quire
from quire import Engine, SamplingParams
from quire.graph_runner import model_runner
from quire.graph_runner.capture_shapes import FAST_GPUS
from quire.graph_runner.step_buffers import BatchShape
from tests.gpu.helpers import check_likely, need
from tests.tiny import GREEDY, PROMPTS, assert_idle, check_padded_bucket, hf_greedy, tokens, unchanged, with_other_weights
from tests.zoo.configs import SERVED, build

SAMPLED = SamplingParams(temperature=0.8, top_p=0.9, top_k=40, seed=11, max_tokens=20)
DRAWN = replace(SAMPLED, top_p=1.0, top_k=0)  # without a filter
SMALL = dict(num_pages=400, max_num_seqs=8, cudagraph_capture_sizes=[1, 2, 8], cudagraph_token_sizes=[16, 64])
QUICK = {**SMALL, "compiler": "eager"}  # captured as it is, for what has nothing to do with Inductor


@pytest.fixture(scope="module", params=["triton", "torch_native"])
def engine(request, model, tokenizer) -> Iterator[Engine]:
    """Float32, as users make it: compiled, with graphs and fusions, stepping asynchronously."""
    with Engine(model, tokenizer, attention=need(request.param), **SMALL) as made:
        yield made


# -- float32: the same tokens


def test_same_tokens(engine, prompts, expected) -> None:
    stats = engine.runner.graphs.stats
    assert engine._depth == 1 and stats.captured >= 5 and stats.capture_seconds > 0
    before, fell_back = stats.replayed, stats.fell_back.total()
    assert tokens(engine.generate(prompts, GREEDY)) == expected
    assert_idle(engine)
    assert stats.replayed - before >= GREEDY.max_tokens - 1
    for prompt, want in zip(prompts, expected, strict=True):
        assert tokens(engine.generate([prompt], GREEDY)) == [want]
    assert stats.fell_back.total() == fell_back, "a step ran without a graph"


def test_sampled_tokens_do_not_depend_on_the_batch(engine, prompts) -> None:
    alone = [tokens(engine.generate([p], SAMPLED))[0] for p in prompts]
    assert tokens(engine.generate(prompts, SAMPLED)) == alone
    assert tokens(engine.generate(prompts, replace(SAMPLED, seed=12))) != alone
    mixed = [GREEDY if i % 2 else SAMPLED for i in range(len(prompts))]
    greedy = tokens(engine.generate(prompts, GREEDY))
    assert tokens(engine.generate(prompts, mixed)) == [greedy[i] if i % 2 else alone[i] for i in range(len(prompts))]


def test_tokens_drawn_in_the_graph(engine, prompts, monkeypatch) -> None:
    """Are those that the sampler draws, which has nothing to do where no row has a filter."""
    runner, params = engine.runner, [GREEDY if i % 3 == 0 else replace(DRAWN, seed=i) for i in range(len(prompts))]
    with monkeypatch.context() as patch:
        patch.setattr(model_runner, "draw", None)
        found = tokens(engine.generate(prompts, params))
    runner.buffers.graph_draws = False
    try:
        assert tokens(engine.generate(prompts, params)) == found
    finally:
        runner.buffers.graph_draws = True


def test_ends(engine, model, prompts) -> None:
    """By the end token, by a stop string and by min_tokens, one step late."""
    whole = hf_greedy(model, prompts[0], 150)
    assert whole[-1] == model.config.eos_token_id
    outputs = engine.generate([prompts[0]] * 3, [
        replace(GREEDY, max_tokens=200), replace(GREEDY, max_tokens=200, stop=" named"),
        replace(GREEDY, max_tokens=len(whole) + 5, min_tokens=len(whole) + 5)])
    assert (outputs[0].token_ids, outputs[0].finish_reason) == (whole, "stop")
    assert (outputs[1].finish_reason, outputs[1].stop_reason) == ("stop", " named")
    assert len(outputs[2].token_ids) == len(whole) + 5 and whole[-1] not in outputs[2].token_ids
    assert_idle(engine)


def test_abandoned_stream(engine, prompts, expected) -> None:
    """Pages that a launched step still writes may go to another request: the device runs steps in order."""
    stream = engine.stream(prompts, replace(GREEDY, max_tokens=200))
    for _ in range(20):
        next(stream)
    stream.close()
    assert_idle(engine)
    assert tokens(engine.generate(prompts, GREEDY)) == expected


def test_small_batch_after_a_large_one(engine, model, prompts) -> None:
    lengths = [20 if i < 2 else 4 for i in range(len(prompts))]
    outputs = engine.generate(prompts, [replace(GREEDY, max_tokens=n, ignore_eos=True) for n in lengths])
    assert tokens(outputs) == [hf_greedy(model, p, n, eos_token_id=None) for p, n in zip(prompts, lengths, strict=True)]


def test_padded_bucket(engine, prompts) -> None:
    # Float32 sums of up to 512 numbers in another order, over 4 layers.
    check_padded_bucket(engine, prompts[:3], BatchShape(8, 8), 1e-5)
    assert_idle(engine)


def test_captured_at_length_1_replayed_at_1000(engine, model, long_prompt) -> None:
    """A graph is captured on an empty batch; nothing of that (grid sizes, splits, bounds) may stay in it."""
    want = hf_greedy(model, long_prompt, 24)
    assert tokens(engine.generate([long_prompt], replace(GREEDY, max_tokens=24))) == [want]
    short = [[5, 6, 7], long_prompt[:500]]
    outputs = engine.generate([long_prompt, *short, long_prompt[3:]], replace(GREEDY, max_tokens=24))
    assert tokens(outputs) == [want, *(hf_greedy(model, p, 24) for p in (*short, long_prompt[3:]))]


def test_nothing_waits_for_the_device(engine, prompts) -> None:
    """Launching a step makes the host wait for nothing, so that steps overlap."""
    several = (GREEDY, DRAWN, SAMPLED, replace(SAMPLED, min_tokens=5), replace(GREEDY, logprobs=3),
               replace(SAMPLED, repetition_penalty=1.2, logit_bias={5: 2.0}, trace_decode_token_ids=[9, 12]))
    for params in several:  # whatever is compiled or made once, is now
        engine.generate(prompts, params)
    launch = engine.runner.launch

    def checked(batch: Any) -> Any:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return launch(batch)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    engine.runner.launch = checked
    try:
        for params in several:
            assert not [o.error for o in engine.generate(prompts, params) if o.error]
    finally:
        del engine.runner.launch


@pytest.mark.parametrize("backend", ["triton", "flashinfer"])
@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
def test_block_table_of_every_step(backend, graphs, half, prompts) -> None:
    """The rows that the step read are the pages of its requests, also where slots change hands and pages come and go."""
    none = {} if graphs else dict(cudagraph_capture_sizes=[], cudagraph_token_sizes=[])
    options = {**QUICK, "attention": need(backend), "page_size": 16, "num_pages": 12, "max_num_seqs": 4,
               "cudagraph_capture_sizes": [1, 4], **none}
    with Engine(half, **options) as engine:
        runner, launch, steps = engine.runner, engine.runner.launch, []

        def checked(batch: Any) -> Any:
            launched = launch(batch)
            torch.cuda.synchronize()
            for i, row in enumerate(batch.rows):
                used = -(-(row.start + row.num_new) // 16)
                assert runner.buffers.table.rows[i, :used].tolist() == row.request.pages[:used]
            steps.append(batch)
            return launched

        runner.launch = checked
        outputs = engine.generate([*prompts, *prompts], replace(GREEDY, max_tokens=40, ignore_eos=True))
        assert not [o.error for o in outputs if o.error]
        assert len(steps) > 40 and engine.scheduler.num_preemptions > 0
        assert bool(runner.graphs.stats.replayed) == graphs


@pytest.mark.parametrize("name", ["tiny_cache", "chunks", "hnd", "no_graphs", "sync"])
def test_same_tokens_otherwise(name, model, tokenizer, prompts, expected) -> None:
    options = {
        "tiny_cache": dict(page_size=4, num_pages=19), "chunks": dict(prefill_chunk_size=3, max_num_batched_tokens=16),
        "hnd": dict(kv_layout="HND", page_size=32), "no_graphs": dict(cudagraph_capture_sizes=[], cudagraph_token_sizes=[]),
        "sync": dict(async_stepping=False, fusions="none"),
    }[name]
    options = {**QUICK, "attention": need("triton"), **options}
    if name == "chunks":
        options["cudagraph_token_sizes"] = [16]
    with Engine(model, tokenizer, **options) as engine:
        assert tokens(engine.generate(prompts, GREEDY)) == expected
        sampled = tokens(engine.generate(prompts, SAMPLED))
        assert [tokens(engine.generate([p], SAMPLED))[0] for p in prompts[:3]] == sampled[:3]
        assert_idle(engine)
        assert (engine.scheduler.num_preemptions > 0) == (name == "tiny_cache")


def test_nan_fails_one_request_only(model, prompts) -> None:
    poisoned = copy.deepcopy(model)
    poisoned.lm_head.weight = torch.nn.Parameter(poisoned.lm_head.weight.detach().clone())  # untied from the embedding
    with torch.no_grad():
        poisoned.model.embed_tokens.weight[1700] = float("nan")
    good = prompts[:2]
    expected = [hf_greedy(model, p, 12) for p in good]
    with Engine(poisoned, attention=need("triton"), **QUICK | dict(num_pages=8)) as engine:
        for _ in range(2):
            params = replace(GREEDY, max_tokens=12)
            first, failed, second = engine.generate([good[0], [1700] * 40, good[1]], params)
            assert "contain NaN" in failed.error
            assert tokens([first, second]) == expected
            assert tokens(engine.generate(good, params)) == expected  # on pages that held NaN


# -- bfloat16


@pytest.mark.parametrize(("backend", "fusions"), [("flashinfer", "all"), ("triton", "all"), ("torch_native", "none")])
def test_bfloat16(backend, fusions, half, tokenizer, prompts, long_prompt) -> None:
    params = replace(GREEDY, ignore_eos=True)
    with unchanged(half), Engine(half, tokenizer, attention=need(backend), fusions=fusions, **SMALL) as engine:
        assert engine.runner.backend.name == backend
        batch = [*prompts, long_prompt]
        outputs = tokens(engine.generate(batch, params))
        again = tokens(engine.generate(batch, params))
        assert_idle(engine)
        assert engine.runner.graphs.stats.replayed > 0
        alone = tokens(engine.generate([prompts[0]], params))[0]
    assert again == outputs  # nothing depends on what ran before
    for prompt, found in zip([*batch, prompts[0]], [*outputs, alone], strict=True):
        check_likely(half, prompt, found)


@pytest.mark.parametrize("config", ["Int8WeightOnlyConfig", "Float8WeightOnlyConfig"])
def test_quantized_weights(config, half, tokenizer, prompts, long_prompt, caplog) -> None:
    """torchao's, in quire's kernels: each token is the likeliest of torchao's own layers, up to the rounding of bfloat16."""
    torchao = pytest.importorskip("torchao.quantization")
    ours = copy.deepcopy(half)
    torchao.quantize_(ours, getattr(torchao, config)(set_inductor_config=False))
    batch = [*prompts, long_prompt]
    with caplog.at_level("INFO"), Engine(ours, tokenizer, attention=need("triton"), **SMALL) as engine:
        found = tokens(engine.generate(batch, replace(GREEDY, ignore_eos=True)))
        assert engine.runner.graphs.stats.replayed > 0
    linears = sum(isinstance(m, torch.nn.Linear) for m in ours.modules())
    assert f"quantized: {linears} matches" in caplog.messages
    for prompt, out in zip(batch, found, strict=True):
        with torch.no_grad():
            logits = ours(torch.tensor([prompt + out], device="cuda"), use_cache=False).logits[0, len(prompt) - 1 : -1].float()
        behind = logits.amax(-1) - logits[torch.arange(len(out)), out]
        assert (behind <= 0.04 * logits.abs().max()).all()


def test_auto_takes_a_gpu_backend(half, tokenizer, prompts) -> None:
    with Engine(half, tokenizer, **QUICK) as engine:
        assert engine.runner.backend.name != "torch_native"
        for prompt, output in zip(prompts, engine.generate(prompts, GREEDY), strict=True):
            check_likely(half, prompt, output.token_ids)


# -- the model


def test_weight_updates_reach_the_graphs(model, prompts, expected) -> None:
    ours, donor = copy.deepcopy(model), with_other_weights(model)
    changed = [hf_greedy(donor, p, GREEDY.max_tokens) for p in prompts]
    assert changed != expected
    with Engine(ours, attention=need("triton"), **QUICK) as engine:
        assert tokens(engine.generate(prompts, GREEDY)) == expected
        ours.load_state_dict(donor.state_dict())
        assert tokens(engine.generate(prompts, GREEDY)) == changed
        runner, runner_pages = engine.runner, engine.runner.cache.num_pages
        for p, new in zip(ours.parameters(), model.parameters(), strict=True):  # elsewhere in memory: captured again
            p.data = new.detach().clone()
        assert tokens(engine.generate(prompts, GREEDY)) == expected
        assert engine.runner is not runner and engine.runner.cache.num_pages == runner_pages


# -- the other ways in


def test_paged_generate(model, tokenizer) -> None:
    ours = quire.paged(copy.deepcopy(model), attention=need("triton"), **SMALL)
    batch = tokenizer(list(PROMPTS[:3]), return_tensors="pt", padding=True).to("cuda")
    want = model.generate(**batch, max_new_tokens=20)
    got = ours.generate(**batch, max_new_tokens=20)
    assert got.device == want.device and torch.equal(got, want)
    ours.generate.close()


@pytest.mark.parametrize("backend", ["triton", "torch_native"])
@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_step_by_hand(backend, compiler, model, prompts) -> None:
    from quire.passes.backend import quire_backend

    torch._dynamo.reset()  # so that each case has its own trace; no engine of this file is used any more
    compiled = torch.compile(copy.deepcopy(model), backend=quire_backend, options={"compiler": compiler})
    cache = quire.PagedKVCache.for_model(model, num_pages=16, page_size=16)
    a, b = torch.tensor(prompts[3], device="cuda"), torch.tensor(prompts[2], device="cuda")
    with torch.no_grad():
        want = [model(t[None], use_cache=False).logits[0] for t in (a, b)]
        cut = len(a) - 1
        first = quire.CommonAttentionMetadata.build([cut], [cut], [[3, 1]], page_size=16, device="cuda")
        with quire.step(cache, first, attention=need(backend)):
            compiled(input_ids=a[None, :cut], position_ids=first.positions[None], use_cache=False)
        meta = quire.CommonAttentionMetadata.build([len(b), 1], [len(b), len(a)], [[2], [3, 1]], page_size=16,
                                                   device="cuda")
        row = torch.cat([b, a[cut:]])
        with quire.step(cache, meta, attention=backend):
            got = compiled(input_ids=row[None], position_ids=meta.positions[None], use_cache=False).logits[0]
    want = torch.cat([want[1], want[0][-1:]])
    assert (got - want).abs().max() <= 2e-5 * want.abs().max()


# -- quantized caches


@pytest.mark.parametrize("kind", ["int8", "fp8", "fp8_e5m2"])
def test_quantized_cache(kind, model, prompts, expected) -> None:
    """In float32: compiled, captured, preempted and cut in pieces, on both backends, one text. int8 and e4m3 leave that of
    transformers as it is (tests/graph_runner/test_kv_quantized.py has the same on a CPU)."""
    wanted = None
    for attention, options in (("torch_native", QUICK), ("triton", SMALL), ("triton", {**QUICK, "num_pages": 7}),
                               ("triton", {**QUICK, "prefill_chunk_size": 3, "kv_layout": "HND", "page_size": 4})):
        with Engine(model, attention=need(attention), kv_cache_dtype=kind, **options) as engine:
            assert engine.runner.cache.quantized
            got = tokens(engine.generate(prompts, GREEDY))
            assert_idle(engine)
        wanted = wanted or (got if kind == "fp8_e5m2" else expected)
        assert got == wanted, (attention, options)


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_quantized_cache_in_bfloat16(kind, half, prompts) -> None:
    """Compiled and captured, the texts start as those of the unquantized cache: sensible, if not the same to the end."""
    found = []
    for name in ("auto", kind):
        with Engine(half, attention=need("triton"), kv_cache_dtype=name, **SMALL) as engine:
            found.append(tokens(engine.generate(prompts, GREEDY)))
    assert sum(a[:3] == b[:3] for a, b in zip(*found, strict=True)) >= len(prompts) - 2


@pytest.mark.parametrize("compiler", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_mixed_steps_in_pieces(compiler, half, prompts) -> None:
    """FlashInfer's steps with prompts: everything but attention is replayed, and every token is still the likeliest."""
    options = {**QUICK, "attention": need("flashinfer"), "compiler": compiler, "max_num_batched_tokens": 64}
    with Engine(half, **options, cudagraph_piecewise=True) as engine:
        stats = engine.runner.graphs.stats
        assert stats.pieces > stats.captured
        outs = tokens(engine.generate(prompts, replace(GREEDY, ignore_eos=True)))
        assert not stats.fell_back and {b.num_tokens for b in stats.replays} & {16, 64}
    for prompt, found in zip(prompts, outs, strict=True):
        check_likely(half, prompt, found)


def test_whole_chunks_of_prompts_in_graphs(half, prompts) -> None:
    """By default a small model's steps are captured up to max_num_batched_tokens: full ones, padded ones, beside decodes."""
    if torch.cuda.get_device_capability()[0] not in FAST_GPUS:
        pytest.skip("steps of more than 1024 tokens are captured on Hopper and Blackwell GPUs")
    long = [[3 + (7 * i + n) % 90 for i in range(n)] for n in (450, 300, 440, 380, 410, 300)]
    with Engine(half, attention=need("triton"), compiler="eager", num_pages=400, max_num_seqs=8, max_num_batched_tokens=2048,
                cudagraph_lazy=True, cudagraph_debug=True) as engine:
        assert max(engine.runner.graphs.buckets).num_tokens == 2048
        outs = tokens(engine.generate(long, replace(GREEDY, max_tokens=8, ignore_eos=True)))
        stats = engine.runner.graphs.stats
        assert not stats.fell_back and BatchShape(2048, 8) in stats.replays and stats.padding_tokens
    for prompt, found in zip(long, outs, strict=True):
        check_likely(half, prompt, found)


def test_long_mla_prefills_run_without_graphs() -> None:
    """They are expanded, which reads lengths on the host; in graphs they would do several times the products."""
    model = build(SERVED["deepseek_v3"]).to("cuda", torch.bfloat16)
    with Engine(model, attention=need("triton"), compiler="eager", num_pages=200, max_num_seqs=64, max_num_batched_tokens=2048,
                cudagraph_lazy=True) as engine:
        assert any(site.latent for site in engine.runner.sites)
        assert max(engine.runner.graphs.buckets).num_tokens == 1024


@pytest.mark.alone
def test_memory_for_large_graphs_is_set_aside(half, prompts) -> None:
    """Graphs of whole chunks of prompts are captured into memory that the KV cache was not given."""
    sizes = dict(cudagraph_capture_sizes=[8], cudagraph_token_sizes=[1024, 4096, 8192], gpu_memory_utilization=0.5)
    with Engine(half, attention=need("triton"), compiler="eager", max_num_seqs=64, **sizes) as engine:
        stats = engine.runner.graphs.stats
        assert stats.captured == 7 and stats.estimated_bytes >= 0.5 * stats.capture_bytes
        check_likely(half, prompts[0], tokens(engine.generate([prompts[0]], GREEDY))[0])


@pytest.mark.parametrize("compiler", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_layers_without_keys_of_their_own(compiler) -> None:
    """Gemma 3n: the last layers run on the rows whose logits are wanted, in captured steps too."""
    model = build(SERVED["gemma3n"]).cuda()
    mixed = [[3, 1, 4, 1, 5], [7 + i for i in range(23)], [9, 9, 2], [60 - i for i in range(31)]]
    options = dict(attention=need("triton"), compiler=compiler, page_size=4, num_pages=81, max_num_seqs=4, max_model_len=60,
                   max_num_batched_tokens=12, cudagraph_capture_sizes=[4], cudagraph_token_sizes=[12])
    want = [hf_greedy(model, p, 10, eos_token_id=None) for p in mixed]
    with Engine(model, **options, kv_sharing_fast_prefill=True, cudagraph_debug=True) as engine:
        assert tokens(engine.generate(mixed, replace(GREEDY, max_tokens=10, ignore_eos=True))) == want
        assert {b.num_tokens for b in engine.runner.graphs.stats.replays} == {4, 12}


@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_windows_beside_full_layers(compiler) -> None:
    """Gemma 2: pages behind the window go back while requests run, in captured steps; in float32 the tokens of ``generate``."""
    torch.manual_seed(0)
    config = Gemma2Config(vocab_size=128, hidden_size=64, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
                          num_key_value_heads=2, head_dim=64, sliding_window=40, max_position_embeddings=1024,
                          bos_token_id=None, eos_token_id=None, initializer_range=0.2)
    model = Gemma2ForCausalLM(config).eval().cuda()
    long = [[3 + i % 97 for i in range(n)] for n in (300, 5, 420)]
    options = dict(attention=need("triton"), compiler=compiler, page_size=16, num_pages=70, max_num_seqs=3, max_model_len=600,
                   max_num_batched_tokens=64, cudagraph_capture_sizes=[1, 3], cudagraph_token_sizes=[64])
    with Engine(model, **options) as engine:
        windows = engine.scheduler.windows
        assert windows.allocator.num_total < 69
        outs = tokens(engine.generate(long, replace(GREEDY, max_tokens=60, ignore_eos=True)))
        assert engine.runner.graphs.stats.replayed and windows.allocator.num_free == windows.allocator.num_total
    assert outs == [hf_greedy(model, p, 60, eos_token_id=None) for p in long]
