"""The pages of layers with a window: how many, how large a pool, given back behind the window, and never read again.

A user loses exactness if a freed page is read, and memory if it is not freed. Every page is filled with NaN when it is given
back, so that a number read from it would show.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import MistralConfig, MistralForCausalLM

import quire
from quire.attn_ops.attention import AttentionSite, visible
from quire.attn_ops.kv_cache import PagedKVCache, bytes_per_page
from quire.attn_ops.metadata import NULL_PAGE
from quire.attn_ops.registry import get_backend
from quire.graph_runner.block_allocator import BlockAllocator
from quire.graph_runner.loading import TINY_MODEL
from quire.graph_runner.prefix_cache import PrefixCache
from quire.graph_runner.request import Request, RequestOutput
from quire.graph_runner.scheduler import Scheduler
from quire.graph_runner.window_pages import PoolSizes, Reach, WindowPages, fit_requests
from quire.passes.compile.regions import compile_by_regions
from tests.tiny import assert_idle, hf_greedy, tokens
from tests.zoo.configs import SERVED, build

pytestmark = pytest.mark.usefixtures("tokens_unchecked", "traces_kept")
WINDOW, PAGE = 10, 4
PROMPTS = [[3 + i % 60 for i in range(59)], [3, 1, 4, 1, 5], [60 - i % 57 for i in range(110)]]
LONG = quire.SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)


def poison(engine: quire.Engine) -> None:
    """Fill pages with NaN when they are freed, in the layers whose pages they are."""
    cache, windows = engine.runner.cache, engine.scheduler.windows

    def watch(allocator: BlockAllocator, layers: set[int]) -> None:
        free, tensors = allocator.free, [t for layer in layers for t in cache.of_layer(layer)[:2]]

        def freed(pages: Any) -> None:
            assert NULL_PAGE not in pages
            free(pages)
            for t in tensors:
                t[[p for p in pages if not allocator.ref_count(p)]] = float("nan")

        allocator.free = freed  # type: ignore[method-assign]

    bounded = {s.layer for s in engine.runner.sites if s.bounded and windows is not None}
    watch(engine.scheduler.allocator, set(cache.layer_ids) - bounded)
    if windows is not None:
        watch(windows.allocator, bounded)


def assert_all_free(engine: quire.Engine) -> None:
    assert_idle(engine)
    windows = engine.scheduler.windows
    assert windows is None or windows.allocator.num_free == windows.allocator.num_total and windows.num_idle == 0


# -- models whose layers all have a window


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


@pytest.mark.parametrize(("asynchronous", "num_pages"), [
    (True, 14), *(pytest.param(asynchronous, 28, marks=pytest.mark.slow) for asynchronous in (True, False))])
def test_long_requests_in_a_small_cache(model, asynchronous, num_pages) -> None:
    """Three requests of up to 150 tokens in 27 pages of 4, two of them with prompts longer than the cache has left: tokens of
    ``generate``, with NaN in every page that was given back, and all pages back at the end. In fewer pages, one is preempted
    and starts again from its first token."""
    prompts = [list(range(1, 60)), [3, 1, 4, 1, 5], list(range(60, 0, -1)) * 2]
    with quire.Engine(model, page_size=PAGE, num_pages=num_pages, max_num_seqs=3, max_model_len=200, max_num_batched_tokens=24,
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
        assert (engine.scheduler.num_preemptions > 0) == (num_pages == 14)
    assert outs == [hf_greedy(model, p, 80) for p in prompts]


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


# -- models in which some layers have a window and others see everything


def made(name: str, **options: Any) -> torch.nn.Module:
    """The zoo's model, for longer sequences."""
    entry = SERVED[name]
    return build(dataclasses.replace(entry, options={**entry.options, "max_position_embeddings": 256, **options}))


@pytest.fixture(scope="module")
def gemma() -> torch.nn.Module:
    return made("gemma2")


@pytest.fixture(scope="module")
def expected(gemma) -> list[list[int]]:
    return [hf_greedy(gemma, p, 40, eos_token_id=None) for p in PROMPTS]


@pytest.mark.parametrize("name", ["gemma2", *(pytest.param(n, marks=pytest.mark.slow) for n in (
    "gpt_oss", "llama4", "gemma3", "gemma3n", "qwen2_window", "cohere2", "mimo_v2_flash"))])
def test_exact_and_bounded(name) -> None:
    """Chunked prompts, decodes in padded buckets whose padding is poisoned, and preemption: tokens of ``generate``. Layers with
    a window hold what reaches back from the next token, however long the request."""
    model = made(name)
    with quire.Engine(model, page_size=PAGE, num_pages=61, max_num_seqs=4, max_model_len=200, max_num_batched_tokens=24,
                      cudagraph_capture_sizes=[4], cudagraph_debug=True, async_stepping=True) as engine:
        runner, scheduler = engine.runner, engine.scheduler
        pages = dict(zip(runner.cache.layer_ids, runner.cache.layer_pages, strict=True))
        few = scheduler.windows.allocator.num_total + 1
        assert few < 61 and {pages[s.layer] for s in runner.sites if s.bounded} == {few}
        assert {pages[s.layer] for s in runner.sites if not s.bounded} == {61} and engine.max_model_len == 200
        poison(engine)
        held, schedule = [], scheduler.schedule

        def watched() -> Any:
            found = schedule()
            held.extend(sum(p != NULL_PAGE for p in r.window_pages) for r in scheduler.running)
            return found

        scheduler.schedule = watched  # type: ignore[method-assign]
        outs = tokens(engine.generate(PROMPTS, LONG))
        assert_all_free(engine)
        assert scheduler.num_preemptions > 0  # 99, 45 and 150 tokens do not fit into 60 pages
        assert runner.graphs.stats.replayed > 0
        assert max(held) <= runner.window_reach.pages_held(24, PAGE) < -(-150 // PAGE)
    assert outs == [hf_greedy(model, p, 40, eos_token_id=None) for p in PROMPTS]


@pytest.mark.parametrize("caching", [pytest.param(None, marks=pytest.mark.slow), True])
@pytest.mark.parametrize(("name", "num_pages"), [("model", 30), pytest.param("gemma", 70, marks=pytest.mark.slow)])
def test_shared_beginnings(name, num_pages, caching, request) -> None:
    """Prompts with a beginning in common that is longer than the window, twice, in a cache that holds few of them: nobody reads
    a page that is another's by then, and none is lost. A second request reads kept pages of layers without a window, and only
    the last ones of the others."""
    model, head = request.getfixturevalue(name), [3 + i % 50 for i in range(50)]
    prompts = [[*head, 3, 1, 4], [*head, 3, 1, 5, 9, 2], [*head[:30], *[7] * 9], head]
    want = [hf_greedy(model, p, 40, eos_token_id=None) for p in prompts]
    with quire.Engine(model, page_size=PAGE, num_pages=num_pages, max_num_seqs=3, max_model_len=200, max_num_batched_tokens=24,
                      enable_prefix_caching=caching) as engine:
        poison(engine)
        for _ in range(2):
            assert tokens(engine.generate(prompts, LONG)) == want
        assert name == "model" or engine.stats().saved_tokens > (100 if caching else 40)
        engine.reset_prefix_cache()
        assert_all_free(engine)


@pytest.mark.slow
def test_traced_again_while_requests_run(gemma, expected) -> None:
    with quire.Engine(gemma, page_size=PAGE, num_pages=61, max_num_seqs=3, max_model_len=200) as engine:
        ids = [engine.add_request(p, LONG)[0] for p in PROMPTS]
        done: dict[int, list[int]] = {}
        for i in range(400):
            if i == 20:
                torch._dynamo.reset()
            for event in engine.step():
                if event.finished:
                    done[event.index] = event.output.token_ids
            if not engine.has_unfinished:
                break
        assert [done[i] for i in ids] == expected
        assert_all_free(engine)


@pytest.mark.slow
def test_cut_into_pieces_as_for_a_gpu(gemma, expected) -> None:
    """The compiler gets the graph in pieces (passes/compile/regions.py): each reads the tables of its own layer."""
    with quire.Engine(gemma, page_size=PAGE, num_pages=61, max_num_seqs=3, max_model_len=200, fusions="all") as engine:
        compiled, pieces = engine.runner.paged.graph.compiled(), list[int]()

        def op_by_op(gm: Any, fakes: list[Any]) -> Any:
            pieces.append(len(fakes))
            return gm.forward

        compiled.run = compiled.run._replace(call=compile_by_regions(compiled.lowered, op_by_op, always=True))
        compiled.small = None
        poison(engine)
        assert tokens(engine.generate(PROMPTS, LONG)) == expected and len(pieces) == 3


@pytest.mark.slow
@pytest.mark.parametrize("both", [False, True])
def test_backends_that_plan(gemma, expected, both) -> None:
    """A plan on the host is made of one block table, unless the backend says that it takes both: with one table all layers
    share it, and keep all pages."""
    planned: list[Any] = []
    native = get_backend("torch_native")
    quire.register_backend(dataclasses.replace(native, name=f"planned {both}", priority=None, plans_windows=both,
                                               plan=lambda meta, step: planned.append(step.window_metadata)))
    with quire.Engine(gemma, attention=f"planned {both}", page_size=PAGE, num_pages=100, max_num_seqs=3, max_model_len=200
                      ) as engine:
        assert (engine.scheduler.windows is None) == (not both) and set(engine.runner.cache.layer_pages) == {100}
        assert tokens(engine.generate(PROMPTS, LONG)) == expected
        assert planned and (planned[-1] is None) == (not both)
        assert_idle(engine)


def test_memory_is_given_where_it_is_used(gemma) -> None:
    """Sized by itself, the cache of the window's layers is what full batches can use, and the other layers get the rest."""
    with quire.Engine(gemma, page_size=PAGE, max_num_seqs=2, max_num_batched_tokens=32) as engine:
        windows, full = engine.scheduler.windows, engine.runner.cache.num_pages
        assert windows.allocator.num_total + 1 == engine.runner.window_reach.useful_pages(2, 32, PAGE)
        assert full == 2 * 256 // PAGE + 1 > 2 * windows.allocator.num_total
        stats = engine.stats()
        assert (stats.window_pages, stats.window_pages_used) == (windows.allocator.num_total, 0)
        assert stats.kv_cache_bytes == engine.runner.cache.num_bytes


REACHES = st.sampled_from([(8, None), (5, None), (1, None), (None, 8), (None, 6), (10, 12)])


@settings(max_examples=80, deadline=None)
@given(REACHES, st.lists(st.booleans(), max_size=12))
def test_usable(kind, here) -> None:
    """Against its definition: all pages in reach of the next token are here, and no larger number has that."""
    windows = WindowPages(Reach.of([SimpleNamespace(window=kind[0], chunk=kind[1])]), 40, PAGE)
    owner = request_of(0, [1] * 100)
    owner.window_pages = windows.allocator.allocate(len(here))
    keys = [bytes([i]) for i in range(len(here))]
    for i, (key, kept) in enumerate(zip(keys, here, strict=True)):
        if kept:
            windows.keep(key, owner, i)
    fits = [n for n in range(len(keys) + 1)
            if all(here[i] for i in range(windows.reach.first_needed(n * PAGE) // PAGE, n))]
    assert windows.usable(keys) == max(fits)


def request_of(number: int, ids: list[int], new: int = 8) -> Request:
    return Request(number, ids, quire.SamplingParams(temperature=0), RequestOutput(number, None, ids), 0, frozenset(),
                   len(ids) + new)


@settings(max_examples=120, deadline=None)
@given(REACHES, st.booleans(), st.booleans(), st.integers(30, 60), st.integers(8, 30),
       st.lists(st.tuples(st.integers(0, 2), st.integers(1, 40), st.integers(0, 3)), min_size=1, max_size=8))
def test_every_token_in_reach_is_in_its_page(kind, lasting, own, num_pages, num_windows, asks) -> None:
    """The scheduler alone, with a log of what each slot holds instead of a model: each row of each step finds the keys of all
    tokens that it sees, in both kinds of layers, under sharing, copies, eviction and preemption; all pages come back. Without
    pages of their ``own``, all layers have a window."""
    reach = Reach.of([SimpleNamespace(window=kind[0], chunk=kind[1])])
    allocator = BlockAllocator(num_pages if own else num_windows)
    prefixes = PrefixCache(allocator, PAGE, lasting=lasting)
    scheduler = Scheduler(allocator, page_size=PAGE, max_num_seqs=3, max_num_batched_tokens=16, prefixes=prefixes)
    if own:
        scheduler.windows = prefixes.windows = WindowPages(reach, num_windows, PAGE)
    else:
        scheduler.reach = reach
    scheduler.prefill_chunk_size = (num_windows - 2) * PAGE - reach.span
    if scheduler.prefill_chunk_size < 1:
        return
    held: dict[str, dict[tuple[int, int], tuple[int, ...]]] = {"full": {}, "window": {}}  # (page, offset) -> tokens up to it
    heads = [[1] * 60, [1] * 21 + [2] * 39, [3] * 60]
    waiting = [(late, request_of(i, heads[head][:length])) for i, (head, length, late) in enumerate(asks)]
    for step in range(400):
        for late, request in waiting:
            if late * 3 == step:
                scheduler.add(request)
        batch = scheduler.schedule()
        if batch is None:
            if step > 9 and not scheduler.has_work:
                break
            continue
        for name, copies in (("full", batch.copies), ("window", batch.window_copies)):
            read = {(to, i): held[name].get((page, i)) for page, to in copies for i in range(PAGE)}
            held[name].update({k: v for k, v in read.items() if v is not None})
        written: Counter[Any] = Counter()
        for request, start, count, *_ in batch.rows:
            ids = tuple(request.token_ids)
            near = reach.first_needed(start)
            both = ("full", request.pages, 0), ("window", request.window_pages, near)
            for name, pages, first in both if own else [("full", request.pages, near)]:
                for p in range(start, start + count):
                    page = pages[p // PAGE]
                    assert page != NULL_PAGE
                    held[name][page, p % PAGE] = ids[: p + 1]
                    written[name, page, p % PAGE] += 1
                for p in range(first, start + count):
                    assert held[name][pages[p // PAGE], p % PAGE] == ids[: p + 1], (name, p)
        assert max(written.values()) == 1
        for request, _, _, samples, _ in batch.rows:
            if samples:
                request.num_pending -= 1
                if request.append(5)[1]:
                    scheduler.finish(request)
    else:
        raise AssertionError("it never ends")
    prefixes.clear()
    assert allocator.num_free == allocator.num_total
    if own:
        assert scheduler.windows.allocator.num_free == scheduler.windows.allocator.num_total


def test_a_beginning_that_nearly_fills_the_cache_does_not_block_who_shares_it() -> None:
    """Held whole, the pages behind the window would leave none for the request's own tokens: it would wait for ever."""
    allocator = BlockAllocator(13)
    scheduler = Scheduler(allocator, page_size=PAGE, max_num_seqs=2, max_num_batched_tokens=8,
                          prefixes=PrefixCache(allocator, PAGE, lasting=True))
    scheduler.reach = Reach(frozenset({(8, None)}))
    beginning = list(range(44))  # 11 of the 12 pages
    for request in request_of(0, beginning, 1), request_of(1, beginning + list(range(8)), 1):
        scheduler.add(request)
        while (batch := scheduler.schedule()) is not None and not batch.rows[0].samples:
            pass
        assert batch is not None
        assert request.num_computed == len(request.token_ids)
        scheduler.finish(request)
    assert batch.rows[0].start == 44 and allocator.num_free + scheduler.prefixes.num_idle == allocator.num_total


# -- how large the pool is: with what an attention backend keeps of its pages, or a full engine runs out of memory


FULL = AttentionSite(layer=0, num_heads=8, num_kv_heads=2, head_dim=16, head_dim_v=16, dtype=torch.bfloat16, scale=0.25)
BOUNDED = dataclasses.replace(FULL, layer=1, window=32)


def sizes(sites, bytes_beside=None) -> PoolSizes:
    windows = Reach.of(s for s in sites if s.bounded) if len(sites) > 1 else None
    more = {} if bytes_beside is None else {"bytes_beside": bytes_beside}
    return PoolSizes(sites, 16, None, 4, 64, 1 << 20, None, windows, False, **more)


@pytest.mark.parametrize("sites", [[FULL], [FULL, BOUNDED]])
def test_pages_and_what_is_kept_of_them_fit(sites) -> None:
    """In the memory there is, with no room for another page; layers with pages of their own too."""
    budget = 10_000_000

    def used(pages: int, beside: int) -> int:
        windows = sizes(sites).window_pages(pages)
        return sum((bytes_per_page([s], 16) + beside * s.layer + beside) * (windows if s.bounded else pages) for s in sites)

    def kept(site: AttentionSite, page_size: int) -> int:
        return 100 * page_size * (site.layer + 1)

    for hook, beside in ((None, 0), (kept, 1600)):
        pages = sizes(sites, hook).pages_in(budget)
        assert used(pages, beside) <= budget < used(pages + 1, beside)


def test_composites_count_what_their_parts_keep(tmp_path) -> None:
    file = tmp_path / "channels.json"
    file.write_text(json.dumps({"channels": {"0": [list(range(16))] * 2}}))
    labels = get_backend(f"double_sparsity:8:8:4:{file}")
    both = get_backend({"full": labels.name, "window": "torch_native"})
    assert labels.bytes_beside(FULL, 16) == both.bytes_beside(FULL, 16) == 16 * 2 * 4 * 2  # bfloat16
    assert both.bytes_beside(BOUNDED, 16) == get_backend("torch_native").bytes_beside(FULL, 16) == 0
    assert get_backend("double_sparsity:8:8:all").bytes_beside(FULL, 16) == 0  # the keys are the labels
    cache = PagedKVCache.for_sites([FULL], num_pages=9, page_size=16, device="cpu")
    labels.make_state([FULL], cache, None)
    assert cache.beside_bytes == 9 * labels.bytes_beside(FULL, 16)


@pytest.mark.slow
def test_stats_show_it(tmp_path) -> None:
    """And a large share of it leaves room for fewer pages."""
    file = tmp_path / "channels.json"
    file.write_text(json.dumps({"channels": {str(i): [list(range(64))] * 2 for i in range(4)}}))
    with quire.Engine(TINY_MODEL, attention=f"double_sparsity:8:8:64:{file}", compiler="eager") as engine:
        stats = engine.stats()
        assert stats.backend_bytes * 2 == stats.kv_cache_bytes > 0  # whole keys again
        assert f"attention's data of it {stats.backend_bytes / 2**20:,.0f} MiB" in str(stats)
