"""Window models: their KV cache is bounded by the window, and what is freed is never read again."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import MistralConfig, MistralForCausalLM

import quire
from quire.attn_ops.attention import visible
from quire.attn_ops.metadata import NULL_PAGE
from quire.graph_runner.block_allocator import BlockAllocator
from quire.graph_runner.request import Request, RequestOutput
from quire.graph_runner.scheduler import Scheduler
from quire.graph_runner.window_pages import Reach, fit_requests
from tests.tiny import assert_idle, hf_greedy, tokens

WINDOW, PAGE = 10, 4
KINDS = st.sets(st.tuples(st.none() | st.integers(1, 30), st.none() | st.integers(1, 30)), min_size=1, max_size=3)


def reach_of(kinds) -> Reach | None:
    return Reach.of([SimpleNamespace(window=window, chunk=chunk) for window, chunk in kinds])


@settings(max_examples=60, deadline=None)
@given(KINDS, st.integers(0, 60))
def test_reach_against_the_mask(kinds, position) -> None:
    """No later query sees a token before ``first_needed``, and some query sees that one."""
    reach = reach_of(kinds)
    if any(kind == (None, None) for kind in kinds):
        assert reach is None
        return
    first = reach.first_needed(position)
    queries, keys = torch.arange(position, position + 70)[:, None], torch.arange(position + 70)[None]
    seen = torch.stack([visible(queries, keys, window=w, chunk=c, causal=True).any(0) for w, c in kinds]).any(0)
    assert not seen[:first].any() and seen[first] and position - first <= reach.span


@settings(max_examples=60, deadline=None)
@given(KINDS.filter(lambda kinds: (None, None) not in kinds), st.integers(1, 5), st.lists(st.integers(1, 20), max_size=12))
def test_pages_held(kinds, page, chunks) -> None:
    """In steps of any sizes: never more pages than promised, and those of the tokens in reach are there."""
    reach, allocator = reach_of(kinds), BlockAllocator(400)
    request = Request(0, [1], quire.SamplingParams(), RequestOutput(0, None, [1]), 0, frozenset(), 1000)
    for count in chunks:
        reach.free_behind(request, allocator.free, page)
        missing = -(-(request.num_computed + count) // page) - len(request.pages)
        request.pages += allocator.allocate(max(0, missing))
        held = [p for p in request.pages if p != NULL_PAGE]
        assert held == request.pages[request.num_behind :] and len(held) <= reach.pages_held(count, page)
        assert len(held) == allocator.num_total - allocator.num_free
        needed = range(reach.first_needed(request.num_computed) // page, len(request.pages))
        assert all(request.pages[i] != NULL_PAGE for i in needed)
        request.num_computed += count


def test_what_fits() -> None:
    reach = reach_of([(10, None)])
    assert fit_requests(None, 9, 4, None, 512, 100) == (32, None)
    assert fit_requests(reach, 9, 4, None, 512, 30) == (30, None)  # all of it fits: nothing changes
    assert fit_requests(reach, 9, 4, None, 512, 100) == (100, 19)  # 7 pages of 4, less the 9 tokens before
    assert fit_requests(reach, 9, 4, 8, 512, 100) == (100, 8)
    assert fit_requests(reach, 4, 4, None, 512, 100) == (12, None)  # the window itself does not fit
    assert reach.pages_held(19, 4) == 8


@pytest.fixture(scope="module")
def model() -> MistralForCausalLM:
    torch.manual_seed(0)
    config = MistralConfig(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
                           num_key_value_heads=2, head_dim=8, sliding_window=WINDOW, max_position_embeddings=512,
                           bos_token_id=None, eos_token_id=None, initializer_range=0.3)
    return MistralForCausalLM(config).eval()


def poison(engine: quire.Engine) -> None:
    """Fill pages with NaN when they are freed, as those of a request whose numbers overflowed."""
    allocator, cache = engine.scheduler.allocator, engine.runner.cache
    free = allocator.free

    def freed(pages: Sequence[int]) -> None:
        assert NULL_PAGE not in pages
        free(pages)
        for t in (*cache.k, *cache.v):
            t[[p for p in pages if not allocator.ref_count(p)]] = float("nan")

    allocator.free = freed  # type: ignore[method-assign]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_long_requests_in_a_small_cache(model, asynchronous) -> None:
    """Three requests of up to 150 tokens in 27 pages of 4, two of them with prompts longer than the cache has left: tokens of
    ``generate``, with NaN in every page that was given back, and all pages back at the end."""
    prompts = [list(range(1, 60)), [3, 1, 4, 1, 5], list(range(60, 0, -1)) * 2]
    with quire.Engine(model, page_size=PAGE, num_pages=28, max_num_seqs=3, max_model_len=200, max_num_batched_tokens=24,
                      cudagraph_capture_sizes=[3], async_stepping=asynchronous) as engine:
        assert engine.max_model_len == 200
        poison(engine)
        held = []
        schedule = engine.scheduler.schedule

        def watched():
            found = schedule()
            pages = engine.scheduler.allocator
            held.append(pages.num_total - pages.num_free - engine.scheduler.prefixes.num_idle)
            return found

        engine.scheduler.schedule = watched  # type: ignore[method-assign]
        outs = tokens(engine.generate(prompts, quire.SamplingParams(temperature=0, max_tokens=80, ignore_eos=True)))
        assert_idle(engine)
        assert max(held[-40:]) <= 3 * (engine.runner.reach.pages_held(1, PAGE) + 1)
    assert outs == [hf_greedy(model, p, 80) for p in prompts]


def test_preemption_starts_again_from_the_first_token(model) -> None:
    prompts = [list(range(1, 30)), list(range(30, 1, -1)), [7] * 25]
    with quire.Engine(model, page_size=PAGE, num_pages=9, max_num_seqs=3, max_model_len=120,
                      max_num_batched_tokens=16) as engine:
        poison(engine)
        outs = tokens(engine.generate(prompts, quire.SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)))
        assert engine.scheduler.num_preemptions > 0
        assert_idle(engine)
    assert outs == [hf_greedy(model, p, 30) for p in prompts]


@pytest.mark.parametrize("caching", [None, True])
def test_shared_beginnings(model, caching) -> None:
    """A prefix cache beside pages that are given back: prompts that share a beginning longer than the window, twice, in a cache
    that holds few of them. Nobody reads a page that is another's by then, and none is lost."""
    head = list(range(1, 50))
    prompts = [head + [3, 1, 4], head + [3, 1, 5, 9, 2], head[:30] + [7] * 9, head]
    with quire.Engine(model, page_size=PAGE, num_pages=30, max_num_seqs=3, max_model_len=200, max_num_batched_tokens=24,
                      enable_prefix_caching=caching) as engine:
        params = quire.SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
        for _ in range(2):
            assert tokens(engine.generate(prompts, params)) == [hf_greedy(model, p, 40) for p in prompts]
        engine.reset_prefix_cache()
        assert_idle(engine)


def test_a_layer_that_sees_everything_keeps_all_pages() -> None:
    config = MistralConfig(vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
                           num_key_value_heads=1, sliding_window=None, max_position_embeddings=512)
    with quire.Engine(MistralForCausalLM(config).eval(), page_size=PAGE, num_pages=9, max_num_seqs=1) as engine:
        assert engine.runner.reach is None and engine.max_model_len == 32


def test_the_default_cache_holds_what_windows_can_use(model) -> None:
    """Not a whole context per request: here 2 * (5 + 1) + 32 + 1 pages instead of 2 * 128 + 1."""
    with quire.Engine(model, page_size=PAGE, max_num_seqs=2, max_num_batched_tokens=128) as engine:
        assert engine.runner.cache.num_pages == engine.runner.reach.useful_pages(2, 128, PAGE) == 43
        assert engine.max_model_len == 512
    assert Scheduler(BlockAllocator(4), page_size=4, max_num_seqs=1, max_num_batched_tokens=8).reach is None
