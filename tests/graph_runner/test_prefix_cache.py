"""Pages that requests share: the same tokens as without, nothing read that is not one's own beginning, nothing outdated."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire import Engine, SamplingParams
from quire.graph_runner.block_allocator import BlockAllocator
from quire.graph_runner.prefix_cache import PrefixCache, weights_version
from quire.graph_runner.request import Request, RequestOutput, ScheduledBatch
from quire.graph_runner.scheduler import Scheduler
from tests.tiny import GREEDY, SAMPLED, assert_idle, hf_greedy, load_model, tokens

pytestmark = pytest.mark.usefixtures("tokens_unchecked", "traces_kept")

# -- the scheduler with a fake model ---------------------------------------------------------------------------------------


@dataclass
class Simulation:
    """A cache that remembers the tokens behind each slot, and the weights and the step that computed it."""

    scheduler: Scheduler
    rng: random.Random
    weights: int = 0
    slots: dict[tuple[int, int], tuple[tuple[int, ...], int, int]] = field(default_factory=dict)
    met: dict[int, tuple[int, int]] = field(default_factory=dict)  # request -> preemptions, weights when it was last admitted
    copied: int = 0

    def turn(self) -> None:
        batch = self.scheduler.schedule()
        if batch is None:
            return
        for r in (row.request for row in batch.rows):
            if self.met.get(r.request_id, (-1,))[0] != r.preemptions:
                self.met[r.request_id] = r.preemptions, self.weights
        if self.rng.random() < 0.1:
            return self.scheduler.take_back(batch)
        self.run(batch)
        for row in batch.rows:
            r = row.request
            if row.samples:
                r.num_pending -= 1
                r.token_ids.append(self.rng.randint(0, 2))
                if len(r.token_ids) == r.max_total_tokens:
                    self.scheduler.finish(r)

    def run(self, batch: ScheduledBatch) -> None:
        s, before = self.scheduler, dict(self.slots)
        for source, target in batch.copies:
            self.copied += 1
            for at in range(s.page_size):
                self.slots.pop((target, at), None)
                if (source, at) in before:
                    self.slots[target, at] = before[source, at]
        written, read = [], set()
        for row in batch.rows:
            r = row.request
            place = [(r.pages[p // s.page_size], p % s.page_size) for p in range(row.start + row.num_new)]
            for p, slot in enumerate(place[: row.start]):  # earlier tokens lie where its pages say
                found, weights, step = self.slots[slot]
                assert found == tuple(r.token_ids[: p + 1])
                assert weights >= self.met[r.request_id][1] or step > r.arrived_at, "computed before the weights changed"
                assert s.prefixes.lasting or step > r.arrived_at, "older than the request"
            read |= set(place[: row.start])
            written += place[row.start :]
            for p in range(row.start, row.start + row.num_new):
                self.slots[place[p]] = tuple(r.token_ids[: p + 1]), self.weights, s.num_steps
        assert len(set(written)) == len(written), "two requests write one slot"
        assert not read & set(written), "a slot that others read is written"

    def check_pages(self) -> None:
        s = self.scheduler
        idle = s.prefixes.num_idle
        held = {page for r in s.running for page in r.pages}
        assert 0 not in held and len(held) + idle + s.allocator.num_free == s.allocator.num_total


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32), num_pages=st.integers(4, 16), page_size=st.integers(1, 5), seqs=st.integers(1, 5),
       budget=st.integers(1, 24), chunk=st.none() | st.integers(1, 6), lasting=st.booleans(), count=st.integers(1, 12))
def test_random_traffic(seed, num_pages, page_size, seqs, budget, chunk, lasting, count) -> None:
    """Prompts over three tokens, so that many begin equally; weights change now and then; steps fail; requests are aborted."""
    rng = random.Random(seed)
    allocator = BlockAllocator(num_pages)
    s = Scheduler(allocator, page_size=page_size, max_num_seqs=seqs, max_num_batched_tokens=budget, prefill_chunk_size=chunk,
                  prefixes=PrefixCache(allocator, page_size, lasting=lasting))
    sim = Simulation(s, rng)
    longest = (num_pages - 1) * page_size
    base = [rng.randint(0, 2) for _ in range(longest)]
    requests = []
    for i in range(count):
        n = rng.randint(1, longest - 1)
        same = rng.choice([n, n, rng.randint(0, n)])
        ids = base[:same] + [rng.randint(0, 2) for _ in range(n - same)]
        requests.append(Request(i, ids, SamplingParams(), RequestOutput(i, None, ids), seed=0, stop_token_ids=frozenset(),
                                max_total_tokens=rng.randint(n + 1, longest), priority=rng.choice([0, 0, 1])))
    arrivals = deque(zip(sorted(rng.randint(0, 25) for _ in requests), requests, strict=True))
    for now in range(3000):
        while arrivals and arrivals[0][0] <= now:
            s.add(arrivals.popleft()[1])
        if rng.random() < 0.05:
            sim.weights += 1
            s.forget_prefixes()
        if rng.random() < 0.03 and (live := [*s.running, *s.waiting]):
            s.finish(rng.choice(live))
        sim.turn()
        sim.check_pages()
        if not arrivals and not s.has_work:
            break
    assert all(r.finished for r in requests), "no progress"
    assert allocator.num_free + s.prefixes.num_idle == allocator.num_total
    if not lasting:
        assert not s.prefixes.num_idle
    s.forget_prefixes()
    assert allocator.num_free == allocator.num_total


# -- the engine ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def groups(prompts) -> list[list[int]]:
    """Prompts that begin equally, and equal ones, of lengths around pages of 4 and 16."""
    long = [*prompts[3], *prompts[2]]
    return [long, long, [*long, 5], long[:17], long[:16], [*long[:20], 7, 8], prompts[0], prompts[0], long]


OPTIONS: dict[str, Any] = dict(num_pages=120, max_num_seqs=9, max_model_len=300, async_stepping=False)
SCHEDULES: dict[str, dict[str, Any]] = {
    "pages_of_16": {}, "pages_of_4_async": dict(page_size=4, async_stepping=True, kv_layout="HND"),
    "chunks_of_3": dict(prefill_chunk_size=3, page_size=8), "two_at_a_time": dict(max_num_seqs=2, async_stepping=True),
    "small_steps": dict(max_num_batched_tokens=7, page_size=2),
    "preempted": dict(page_size=4, num_pages=30, async_stepping=True),
    "int8": dict(kv_cache_dtype="int8", page_size=4), "graphs": dict(cudagraph_token_sizes=[16, 64], async_stepping=True),
}
QUICK = ("pages_of_4_async", "preempted")


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in SCHEDULES])
def test_same_tokens(name, model, groups) -> None:
    short, many = replace(GREEDY, max_tokens=9), replace(SAMPLED, n=3, max_tokens=6)
    with Engine(model, **OPTIONS | SCHEDULES[name] | dict(enable_prefix_caching=False)) as engine:
        expected = tokens(engine.generate(groups, short)), tokens(engine.generate(groups[:3], many))
        assert engine.stats().saved_tokens == 0
    for lasting in (None, True):
        with Engine(model, **OPTIONS | SCHEDULES[name] | dict(enable_prefix_caching=lasting)) as engine:
            launch, copies = engine.runner.launch, []
            engine.runner.launch = lambda batch, launch=launch, copies=copies: copies.extend(batch.copies) or launch(batch)
            for _ in range(2):
                assert (tokens(engine.generate(groups, short)), tokens(engine.generate(groups[:3], many))) == expected
            stats = engine.stats()
            assert stats.saved_tokens > 100 and copies, "nothing was shared"
            assert stats.pages_used == 0 and (stats.pages_idle > 0) == (lasting is True)
            if not lasting:
                assert_idle(engine)
            assert (engine.scheduler.num_preemptions > 0) == (name == "preempted")


def test_a_group_computes_its_prompt_once(model, groups) -> None:
    with Engine(model, **OPTIONS) as engine:
        launch, prompt, computed, shared = engine.runner.launch, len(groups[0]), [], []

        def watched(batch):
            computed.extend(row.num_new for row in batch.rows if row.start < prompt)
            pages = [page for row in batch.rows for page in row.request.pages]
            shared.append(len(pages) - len(set(pages)))
            return launch(batch)

        engine.runner.launch = watched
        engine.generate(groups[0], replace(SAMPLED, n=8))
        assert sum(computed) == prompt + 7, "the first computes all of the prompt, each other one its last token"
        assert max(shared) == 7 * (prompt // 16)
        assert engine.stats().prefix_hits == 7 and engine.stats().saved_tokens == 7 * (prompt - 1)


def change(model, how: str) -> None:
    with torch.no_grad():
        for p in model.model.layers[0].parameters():
            new = p * 0.7 + 0.01
            if how == "in place":
                p.copy_(new)
            elif how == "data":
                p.data.copy_(new)
            else:
                p.data = new


@pytest.mark.parametrize(("how", "lasting"), [
    ("in place", True), ("data", True),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in (("replaced", True), ("data", None)))])
def test_weights_that_change_between_requests(how, lasting, groups) -> None:
    """Written through p.data PyTorch does not count it: only what outlives its requests must be reset by hand."""
    changing = load_model(num_layers=1)
    with Engine(changing, **OPTIONS, enable_prefix_caching=lasting) as engine:
        short = replace(GREEDY, max_tokens=5)
        for step in range(3):
            assert tokens(engine.generate(groups[:4], short)) == [hf_greedy(changing, p, 5) for p in groups[:4]]
            assert engine.stats().saved_tokens > 0
            if step == 1 and lasting:
                reused = engine.stats().prefix_hits
            change(changing, how)
            if how == "data" and lasting:
                engine.reset_prefix_cache()
        assert not lasting or reused < engine.stats().prefix_hits


@pytest.mark.parametrize("lasting", [None, True])
def test_weights_that_change_while_requests_run(lasting, groups) -> None:
    """A request that comes after the change reads nothing from before it, though one that holds such pages still runs."""
    changing = load_model(num_layers=1)
    with Engine(changing, **OPTIONS, enable_prefix_caching=lasting) as engine:
        engine.add_request(groups[0], replace(GREEDY, max_tokens=40, ignore_eos=True))
        for _ in range(3):
            engine.step()
        change(changing, "in place")
        expected = [hf_greedy(changing, p, 5) for p in groups[:2]]
        for _ in range(2):
            assert tokens(engine.generate(groups[:2], replace(GREEDY, max_tokens=5))) == expected
        while engine.has_unfinished:  # its end does not bring back its pages
            engine.step()
        assert tokens(engine.generate(groups[:2], replace(GREEDY, max_tokens=5))) == expected


def test_running_requests_that_are_reset(groups) -> None:
    """After an optimizer's step they read nothing of the old weights: what follows is as if the model had always been so."""
    changing = load_model(num_layers=1)
    with Engine(changing, **OPTIONS) as engine:
        engine.add_request(groups[0], replace(GREEDY, max_tokens=12, ignore_eos=True))
        before = [token for _ in range(4) for event in engine.step() for token in event.token_ids]
        change(changing, "in place")
        engine.reset_prefix_cache(reset_running_requests=True)
        after: list[int] = []
        while engine.has_unfinished:
            after += [token for event in engine.step() for token in event.token_ids]
        assert before and len(before + after) == 12
        late = after[-6:]  # steps that were launched before the change may have given some of the others
        assert late == hf_greedy(changing, [*groups[0], *before, *after[:-6]], 6)


@pytest.mark.parametrize("replaced", ["parameter", "data"])
def test_weights_that_are_replaced_twice(replaced) -> None:
    """The second new tensor often has the memory of the first one, and no more changes in place."""
    model = torch.nn.Linear(64, 64)
    cache, alike = PrefixCache(BlockAllocator(4), 4, model, lasting=True), 0
    for _ in range(20):
        address, epoch = model.weight.data_ptr(), cache.epoch
        for _ in range(2):
            new = model.weight.detach() * 2
            if replaced == "data":
                model.weight.data = new
            else:
                model.weight = torch.nn.Parameter(new)
            del new
        cache.follow_weights()
        assert cache.epoch > epoch
        alike += address == model.weight.data_ptr()
    assert alike, "no memory was used again, so nothing was tried"


def test_tensors_beside_parameters_and_buffers(groups) -> None:
    """A steering vector: a tensor that a hook holds, or another attribute of a module. Pages kept with the old one are not
    read."""
    changing, held = load_model(num_layers=1), {"vector": torch.randn(256)}
    first = changing.model.layers[0]
    first.shift = torch.zeros(256)
    first.register_forward_hook(lambda module, inputs, output: output + held["vector"] + module.shift)

    def check() -> None:
        expected = [hf_greedy(changing, p, 5) for p in groups[:2]]
        assert tokens(engine.generate(groups[:2], replace(GREEDY, max_tokens=5))) == expected

    with Engine(changing, **OPTIONS, enable_prefix_caching=True) as engine:
        check()
        before, runner = engine.stats().prefix_hits, engine.runner
        check()
        assert engine.stats().prefix_hits > before
        held["vector"] = torch.randn(256)
        check()
        held["vector"].mul_(-2)
        check()
        first.shift = torch.randn(256)
        check()
        assert engine.runner is runner


def test_a_module_that_only_a_hook_has(groups) -> None:
    """A probe or an autoencoder that is no part of the model, and a tensor in an attribute whose name is like PyTorch's: pages
    kept with the old weights are not read."""
    changing, own = load_model(num_layers=1), torch.nn.Linear(256, 256).requires_grad_(False)
    first = changing.model.embed_tokens
    first.my_buffers_now = torch.ones(256)
    first.register_forward_hook(lambda module, inputs, output: own(output) * module.my_buffers_now)
    with Engine(changing, **OPTIONS, enable_prefix_caching=True) as engine:
        for change in (lambda: None, lambda: own.weight.mul_(-2), lambda: setattr(own, "bias", torch.nn.Parameter(
                torch.randn(256))), lambda: first.my_buffers_now.mul_(torch.randn(256))):
            change()
            expected = [hf_greedy(changing, p, 5) for p in groups[:2]]
            assert tokens(engine.generate(groups[:2], replace(GREEDY, max_tokens=5))) == expected


def test_an_array_of_numpy_that_a_hook_reads(groups) -> None:
    """Nobody counts its changes, so that no pages are kept."""
    changing, held = load_model(num_layers=1), {"factor": np.ones(256, np.float32)}
    changing.model.layers[0].register_forward_hook(lambda module, inputs, output: output * torch.from_numpy(held["factor"]))
    with Engine(changing, **OPTIONS, enable_prefix_caching=True) as engine:
        for factor in (1, -2, 3):
            held["factor"] *= factor
            expected = [hf_greedy(changing, p, 5) for p in groups[:2]]
            assert tokens(engine.generate(groups[:2], replace(GREEDY, max_tokens=5))) == expected


def test_what_is_not_found_is_never_taken_for_the_same() -> None:
    model, held = torch.nn.Linear(2, 2), torch.zeros(2)
    assert weights_version(model, [held]) == weights_version(model, [held])
    assert weights_version(model, [held, None]) != weights_version(model, [held, None])
