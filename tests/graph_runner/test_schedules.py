"""The engine on a CPU: the tokens of transformers' own generate, whatever the schedule."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from quire.graph_runner import model_runner
from quire.graph_runner.engine import Engine
from quire.graph_runner.loading import TINY_MODEL
from tests.tiny import GREEDY, PROMPTS, SAMPLED, assert_idle, greedy_continuations, tokens, unchanged

pytestmark = pytest.mark.usefixtures("traces_kept")

OPTIONS: dict[str, dict[str, Any]] = {
    "defaults": {}, "chunks_of_1_pages_of_4": dict(prefill_chunk_size=1, page_size=4, kv_layout="HND"),
    "chunks_of_3": dict(prefill_chunk_size=3, async_stepping=True),
    "chunks_of_16_no_graphs": dict(prefill_chunk_size=16, kv_layout="HND", cudagraph_capture_sizes=[]),
    "step_of_5_tokens": dict(max_num_batched_tokens=5), "page_of_1": dict(page_size=1, num_pages=500),
    "one_at_a_time": dict(max_num_seqs=1), "two_at_a_time": dict(max_num_seqs=2, async_stepping=True, max_num_batched_tokens=7),
    "page_larger_than_all": dict(page_size=128, num_pages=20, cudagraph_capture_sizes=[1, 4]),
    "mixed_graphs": dict(cudagraph_capture_sizes=[2], cudagraph_token_sizes=[8, 64], async_stepping=True),
    "fused": dict(fusions="all", async_stepping=True),
    "last_tokens_of_chunks": dict(fusions="projections,last_tokens", prefill_chunk_size=16, cudagraph_token_sizes=[8, 64]),
}
# The longest of the prompts needs 60 tokens in the end, all of them 240.
TINY_CACHES: dict[str, dict[str, Any]] = {
    "pages_of_16": dict(page_size=16, num_pages=7),
    "pages_of_1": dict(page_size=1, num_pages=80, prefill_chunk_size=6),
    "async": dict(page_size=4, num_pages=18, async_stepping=True),
    "async_chunked": dict(page_size=2, num_pages=36, async_stepping=True, prefill_chunk_size=3,
                          max_num_batched_tokens=8),
    "async_one_page_a_token": dict(page_size=1, num_pages=70, async_stepping=True, max_num_seqs=3),
}


def check_schedule(model, tokenizer, prompts, expected, sampled, options) -> Engine:
    options = dict(num_pages=120, max_num_seqs=8, max_model_len=300, async_stepping=False) | options
    with Engine(model, tokenizer, **options) as engine:
        assert tokens(engine.generate(prompts, GREEDY)) == expected
        assert_idle(engine)
        assert tokens(engine.generate(prompts[3], GREEDY)) == [expected[3]]
        outputs = engine.generate(prompts, SAMPLED)
        assert tokens(outputs) == sampled
        assert [o.text for o in outputs] == [tokenizer.decode(t, skip_special_tokens=True) for t in sampled]
        assert_idle(engine)
    return engine


#: Variants of schedules that the others have, each with what is rarely wrong alone.
SLOW = ("defaults", "chunks_of_16_no_graphs", "one_at_a_time", "page_larger_than_all", "pages_of_1", "async",
        "async_one_page_a_token", "chunks_of_3", "page_of_1", "step_of_5_tokens", "pages_of_16", "last_tokens_of_chunks")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in OPTIONS])
def test_same_tokens(name, model, tokenizer, prompts, expected, sampled) -> None:
    engine = check_schedule(model, tokenizer, prompts, expected, sampled, OPTIONS[name])
    assert engine.scheduler.num_preemptions == 0
    if name == "mixed_graphs":
        assert not any("prefill" in why for why in engine.runner.graphs.stats.fell_back)


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in TINY_CACHES])
def test_same_tokens_when_preempted(name, model, tokenizer, prompts, expected, sampled) -> None:
    engine = check_schedule(model, tokenizer, prompts, expected, sampled, TINY_CACHES[name])
    assert engine.scheduler.num_preemptions > 0


@pytest.mark.slow
def test_compiled_by_inductor(model, tokenizer, prompts, expected, monkeypatch) -> None:
    inductor = pytest.importorskip("torch._inductor.cpp_builder")
    try:
        inductor.get_cpp_compiler()
    except Exception:
        pytest.skip("no C++ compiler")
    with unchanged(model), Engine(model, tokenizer, num_pages=40, max_num_seqs=8, compiler="inductor", fusions="all",
                                  cudagraph_capture_sizes=[4]) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(model_runner, "draw", None)  # not needed where no row has a filter: the graph draws the tokens
            assert tokens(engine.generate(prompts, GREEDY)) == expected
            drawn = [replace(GREEDY, temperature=0.8 * (i % 2), seed=i) for i in range(len(prompts))]
            found = tokens(engine.generate(prompts, drawn))
        assert found[::2] == expected[::2] and found[1] != expected[1]
        # Beside a row with filters each keeps its own.
        assert tokens(engine.generate([prompts[0], *prompts], [SAMPLED, *drawn]))[1:] == found
    with Engine(model, tokenizer, num_pages=40, max_num_seqs=8) as engine:
        assert tokens(engine.generate(prompts, drawn)) == found  # op by op, by the sampler


@pytest.mark.slow  # the whole model
def test_default_arguments_and_a_path() -> None:
    with Engine(str(TINY_MODEL)) as engine:
        assert tokens(engine.generate(list(PROMPTS), GREEDY)) == greedy_continuations(4)
        assert engine.max_model_len == 1024
        assert engine.runner.backend.name == "torch_native"
        assert engine.runner.cache.num_bytes <= 256 * 2**20
