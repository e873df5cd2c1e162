"""The scheduler on its own: a fake model and a fake cache, random arrivals, lengths, limits and aborts."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from quire.attn_ops.kv_cache import pages_for
from quire.graph_runner.block_allocator import BlockAllocator
from quire.graph_runner.prefix_cache import PrefixCache
from quire.graph_runner.request import Request, RequestOutput, ScheduledBatch
from quire.graph_runner.sampling_params import SamplingParams
from quire.graph_runner.scheduler import NeedsDrain, Scheduler

END = -1  # the token that ends a request early


def request(number: int, prompt: int, most: int) -> Request:
    ids = [number * 1000 + i for i in range(prompt)]
    return Request(number, ids, SamplingParams(), RequestOutput(number, None, ids), seed=0,
                   stop_token_ids=frozenset([END]), max_total_tokens=prompt + most)


def scheduler(num_pages: int = 8, page_size: int = 4, seqs: int = 4, budget: int = 16,
              chunk: int | None = None) -> Scheduler:
    return Scheduler(BlockAllocator(num_pages), page_size=page_size, max_num_seqs=seqs, max_num_batched_tokens=budget,
                     prefill_chunk_size=chunk)


@dataclass
class Simulation:
    """What the engine does, without a model: tokens are made up, and the cache remembers whose token lies where.

    ``depth``: steps whose results are still out when the next one is scheduled.
    """

    scheduler: Scheduler
    depth: int
    ends: dict[int, int] = field(default_factory=dict)  # request -> the token, counted from 1, that ends it early
    cache: dict[tuple[int, int], tuple[int, int, int]] = field(default_factory=dict)
    in_flight: deque[ScheduledBatch] = field(default_factory=deque)
    admitted: list[int] = field(default_factory=list)
    drains: int = 0
    fails: Callable[[], bool] = lambda: False  # does the next step fail before it runs?

    def turn(self) -> ScheduledBatch | None:
        try:
            batch = self.scheduler.schedule()
        except NeedsDrain:
            assert self.in_flight, "there is nothing to wait for"
            self.drains += 1
            self.collect(0)
            batch = self.scheduler.schedule()
        if batch is not None:
            self.check(batch)
            if self.fails():
                self.scheduler.take_back(batch)
                self.check_pages()
                return None
            self.write(batch)
            self.in_flight.append(batch)
        self.collect(self.depth if batch is not None else 0)
        self.check_pages()
        return batch

    def collect(self, leave: int) -> None:
        while len(self.in_flight) > leave:
            for row in self.in_flight.popleft().rows:
                r = row.request
                if row.samples:
                    r.num_pending -= 1
                if not row.samples or r.finished:
                    continue
                count = len(r.token_ids) - len(r.prompt_token_ids) + 1
                last = self.ends.get(r.request_id) == count
                r.token_ids.append(END if last else r.request_id * 1000 + len(r.token_ids))
                if last or len(r.token_ids) == r.max_total_tokens:
                    self.scheduler.finish(r)

    def check(self, batch: ScheduledBatch) -> None:
        s, rows = self.scheduler, batch.rows
        assert 0 < batch.num_tokens == sum(r.num_new for r in rows) <= s.max_num_batched_tokens
        assert len({r.request.request_id for r in rows}) == len(rows)
        assert batch.num_decode_rows <= len(rows) and batch.is_decode == (batch.num_decode_rows == len(rows))
        for i, row in enumerate(rows):
            r = row.request
            assert not r.finished and r.slot >= 0 and row.num_new > 0
            assert row.start + row.num_new <= len(r.token_ids) + r.num_pending
            assert row.start + row.num_new == r.num_computed < r.max_total_tokens  # nothing reads the last token
            assert len(r.pages) * s.page_size >= r.num_computed
            assert row.samples == (r.num_computed == len(r.token_ids) + r.num_pending - row.samples)
            if i < batch.num_decode_rows:
                assert row.num_new == 1 and row.samples
            elif s.prefill_chunk_size is not None:
                assert row.num_new <= s.prefill_chunk_size or row.samples and row.num_new == 1
            if r.request_id not in self.admitted:
                self.admitted.append(r.request_id)

    def write(self, batch: ScheduledBatch) -> None:
        """Every earlier token of a row must lie where its pages say, whatever others did in the meantime."""
        size = self.scheduler.page_size
        for row in batch.rows:
            r = row.request
            for p in range(row.start + row.num_new):
                slot = r.pages[p // size], p % size
                if p >= row.start:
                    self.cache[slot] = r.request_id, p, r.preemptions
                assert self.cache[slot] == (r.request_id, p, r.preemptions)

    def check_pages(self) -> None:
        s = self.scheduler
        held = [page for r in s.running for page in r.pages]
        assert len(set(held)) == len(held) and 0 not in held
        assert len(held) + s.allocator.num_free == s.allocator.num_total
        slots = [r.slot for r in s.running]
        assert sorted(slots + s.free_slots) == list(range(len(slots) + len(s.free_slots)))
        assert all(r.slot == -1 and not r.pages and not r.num_computed for r in s.waiting)
        order = [r.request_id for r in [*s.running, *s.waiting]]
        assert order == sorted(order), "requests are served in the order in which they arrived"


def simulate(seed: int, *, num_pages: int, page_size: int, seqs: int, budget: int, chunk: int | None, depth: int,
             count: int, aborts: bool, failures: bool = False) -> Simulation:
    """Requests arrive at random times; all must end, within a bound on the steps."""
    rng = random.Random(seed)
    sim = Simulation(scheduler(num_pages, page_size, seqs, budget, chunk), depth)
    if failures:
        sim.fails = lambda: rng.random() < 0.2
    longest = (num_pages - 1) * page_size
    requests = []
    for i in range(count):
        prompt = rng.randint(1, longest - 1)
        requests.append(request(i, prompt, rng.randint(1, longest - prompt)))
        if rng.random() < 0.3:
            sim.ends[i] = rng.randint(1, longest - prompt)
    arrivals = deque(zip(sorted(rng.randint(0, 40) for _ in requests), requests, strict=True))
    # Each request alone would take at most this many steps; recomputation after a preemption comes on top of it.
    alone = sum(r.max_total_tokens for r in requests)
    for now in range(40 + 4 * alone + 40):
        while arrivals and arrivals[0][0] <= now:
            sim.scheduler.add(arrivals.popleft()[1])
        if aborts and rng.random() < 0.05:
            live = [*sim.scheduler.running, *sim.scheduler.waiting]
            if live:
                sim.scheduler.finish(rng.choice(live))
                sim.check_pages()
        sim.turn()
        if not arrivals and not sim.scheduler.has_work:
            break
    assert all(r.finished for r in requests), "no progress"
    sim.collect(0)
    s = sim.scheduler
    assert s.allocator.num_free == s.allocator.num_total and not s.has_work
    assert sim.admitted == sorted(sim.admitted)
    for r in requests:
        assert r.num_pending == 0
        if not aborts:
            ended = sim.ends.get(r.request_id, 10**9)
            assert len(r.token_ids) == min(r.max_total_tokens, len(r.prompt_token_ids) + ended)
            assert r.token_ids[:-1] == [r.request_id * 1000 + i for i in range(len(r.token_ids) - 1)]
    return sim


@settings(max_examples=500, deadline=None)
@given(seed=st.integers(0, 2**32), num_pages=st.integers(2, 14), page_size=st.integers(1, 5), seqs=st.integers(1, 5),
       budget=st.integers(1, 20), chunk=st.none() | st.integers(1, 6), depth=st.integers(0, 1), count=st.integers(1, 9),
       aborts=st.booleans(), failures=st.booleans())
@example(seed=0, num_pages=3, page_size=1, seqs=5, budget=1, chunk=None, depth=1, count=4, aborts=False, failures=False)
def test_random_traffic(**options) -> None:
    if (options["num_pages"] - 1) * options["page_size"] < 2:
        options["page_size"] = 2
    simulate(**options)


@pytest.mark.parametrize("depth", [0, 1])
def test_heavy_preemption(depth) -> None:
    preemptions = drains = 0
    for seed in range(30):
        sim = simulate(seed, num_pages=10, page_size=2, seqs=6, budget=12, chunk=4, depth=depth, count=8, aborts=False)
        preemptions += sim.scheduler.num_preemptions
        drains += sim.drains
    assert preemptions > 50
    assert (drains > 20) == bool(depth)


def rows(batch: ScheduledBatch | None) -> list[tuple[int, int, int, bool]]:
    assert batch is not None
    return [(r.request.request_id, r.start, r.num_new, r.samples) for r in batch.rows]


def take(batch: ScheduledBatch, token: int = 7) -> None:
    """The results of a step: each row that samples gets a token."""
    for row in batch.rows:
        if row.samples:
            row.request.num_pending -= 1
            row.request.token_ids.append(token)


def test_continuous_batching() -> None:
    """Decodes come first, then prompts that go on, then new ones, until the budget is used up."""
    s = scheduler(num_pages=50, budget=10)
    a, b, c = request(0, 3, 9), request(1, 12, 9), request(2, 8, 9)
    s.add(a)
    s.add(b)
    batch = s.schedule()
    assert rows(batch) == [(0, 0, 3, True), (1, 0, 7, False)]
    assert not batch.is_decode
    take(batch)
    s.add(c)
    batch = s.schedule()
    assert rows(batch) == [(0, 3, 1, True), (1, 7, 5, True), (2, 0, 4, False)]
    assert batch.num_decode_rows == 1
    take(batch)
    batch = s.schedule()
    assert rows(batch) == [(0, 4, 1, True), (1, 12, 1, True), (2, 4, 4, True)]
    take(batch)
    batch = s.schedule()
    assert batch.is_decode and [len(r.pages) for r in (a, b, c)] == [2, 4, 3]


def test_the_last_to_arrive_is_preempted_and_recomputed() -> None:
    s = scheduler(num_pages=4, page_size=2, seqs=3)
    a, b = request(0, 2, 4), request(1, 2, 4)
    s.add(a)
    s.add(b)
    take(s.schedule())
    take(s.schedule())  # a takes the third page; there is none for b
    assert (s.num_preemptions, b.preemptions, b.slot, b.pages) == (1, 1, -1, [])
    assert [r.request_id for r in s.waiting] == [1] and s.allocator.num_free == 1
    s.add(request(2, 1, 1))
    batch = s.schedule()
    assert rows(batch) == [(0, 3, 1, True)]  # b goes before request 2, and needs two pages
    take(batch)
    s.finish(a)
    assert rows(s.schedule()) == [(1, 0, 3, True), (2, 0, 1, True)]  # its tokens so far are its prompt now


def test_a_victim_does_not_take_its_pages_right_back() -> None:
    s = scheduler(num_pages=4, page_size=2, chunk=2)
    a, b = request(0, 2, 4), request(1, 3, 3)
    s.add(a)
    s.add(b)
    for _ in range(2):
        batch = s.schedule()
        take(batch)
    # a needed a second page in that step, and b left one more than that: enough for b's first chunk.
    assert rows(batch) == [(0, 2, 1, True)] and (b.slot, s.allocator.num_free) == (-1, 1)


def test_a_victim_with_a_token_on_the_device_must_wait() -> None:
    s = scheduler(num_pages=4, page_size=2, seqs=3)
    a, b = request(0, 2, 4), request(1, 2, 4)
    s.add(a)
    s.add(b)
    first = s.schedule()
    with pytest.raises(NeedsDrain):  # b's token is not known, so it cannot become part of its prompt
        s.schedule()
    assert (b.num_computed, b.slot >= 0, s.num_preemptions) == (2, True, 0)
    take(first)
    assert rows(s.schedule()) == [(0, 2, 1, True)]
    assert s.num_preemptions == 1


def test_finish_wherever_it_is() -> None:
    s = scheduler(num_pages=50, seqs=1)
    a, b = request(0, 3, 2), request(1, 3, 2)
    s.add(a)
    s.add(b)
    s.schedule()
    s.finish(b)
    s.finish(a)
    s.finish(a)  # once more does nothing
    assert not s.has_work and s.allocator.num_free == s.allocator.num_total
    assert pages_for(0, 4) == 0 and s.schedule() is None


def test_scores_in_flight_that_are_dropped_are_computed_again() -> None:
    """Of a request that was preempted meanwhile, too; without them its ``prompt_logprobs`` would lack entries."""
    s = scheduler(num_pages=4, page_size=2, seqs=3, chunk=2)
    a, b = request(0, 2, 4), request(1, 6, 1)
    b.output.prompt_logprobs, b.num_scored = [None], 1
    s.add(a)
    s.add(b)
    while b not in s.waiting or not b.preemptions:
        take(s.schedule())
    assert b.num_scored == 3  # the scores of tokens 1 and 2 are on the device
    s.preempt_all()
    assert b.num_scored == 1


@pytest.mark.parametrize("chunk", [None, 7])
def test_who_shares_a_prompt_begins_when_it_is_computed(chunk) -> None:
    """Also if its last token, alone in its step, completes a page; else the other would wait until the first has ended."""
    allocator = BlockAllocator(50)
    s = Scheduler(allocator, page_size=4, max_num_seqs=4, max_num_batched_tokens=16, prefill_chunk_size=chunk,
                  prefixes=PrefixCache(allocator, 4))
    a, b = request(0, 8, 20), request(0, 8, 20)
    s.add(a)
    s.add(b)
    while not a.num_pending:
        batch = s.schedule()
    take(batch)
    assert rows(s.schedule()) == [(0, 8, 1, True), (0, 7, 1, True)]
