"""Which requests run in the next step: continuous batching with chunked prefill, and preemption by recomputation.

Every step has a token budget. Running requests come first, in order of arrival: each decodes one token or continues its
prompt. The rest of the budget admits waiting requests, in order. A prompt longer than the budget (or than
``prefill_chunk_size``) is computed in chunks over several steps.

When a running request needs a page and none is free, the request that arrived last returns its pages and waits to be
recomputed from the start, with its tokens so far as its prompt. Sampling is a function of seed and position, so preemption
does not change the tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from quire.attn_ops.kv_cache import pages_for
from quire.graph_runner.block_allocator import BlockAllocator
from quire.graph_runner.request import Request, ScheduledBatch, ScheduledRow
from quire.graph_runner.window_pages import Reach


class Scheduler:
    """Continuous batching over one block allocator.

    Args:
        allocator: of the cache's pages.
        page_size: tokens per page.
        max_num_seqs: maximum number of running requests; each has a slot in 0..max_num_seqs-1.
        max_num_batched_tokens: token budget of a step.
        prefill_chunk_size: maximum number of prompt tokens of one request per step, or None.

    Attributes:
        reach: of the model's attention; pages behind it are freed. None: all of a request's pages are needed.
    """

    def __init__(self, allocator: BlockAllocator, *, page_size: int, max_num_seqs: int, max_num_batched_tokens: int,
                 prefill_chunk_size: int | None = None) -> None:
        self.allocator, self.page_size = allocator, page_size
        self.reach: Reach | None = None
        self.max_num_batched_tokens, self.prefill_chunk_size = max_num_batched_tokens, prefill_chunk_size
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.free_slots = list(range(max_num_seqs - 1, -1, -1))
        self.num_preemptions = 0

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def schedule(self) -> ScheduledBatch | None:
        """Rows of the next step, with pages allocated and ``num_computed`` advanced; None if nothing can run now.

        Raises:
            NeedsDrain: a request must be preempted whose newest token is still on the device; call again after the results
                of the launched step have been collected.
        """
        budget, before = self.max_num_batched_tokens, self.num_preemptions
        decodes: list[ScheduledRow] = []
        prefills: list[ScheduledRow] = []
        for request in list(self.running):
            if budget == 0:
                break
            # Skip requests preempted earlier in this loop, and those that reach their maximum length with pending tokens.
            start, total = request.num_computed, len(request.token_ids) + request.num_pending
            if request.slot < 0 or request.finished or total >= request.max_total_tokens:
                continue
            if total - start == 1:  # a decode: the fast path of the loop
                if start < len(request.pages) * self.page_size or self._make_room(request, 1):
                    budget -= 1
                    decodes.append(ScheduledRow(request, start, 1, True))
                continue
            count = self._chunk(request, budget)
            if self._make_room(request, count):
                budget -= count
                prefills.append(self._row(request, count))
        # Not in a step that preempted: the victim would take its pages right back.
        preempted = self.num_preemptions != before
        while self.waiting and budget and self.free_slots and not preempted:
            request = self.waiting[0]
            count = self._chunk(request, budget)
            pages = self._allocate(pages_for(count, self.page_size))
            if pages is None:
                break
            self.waiting.popleft()
            request.pages, request.slot = pages, self.free_slots.pop()
            self.running.append(request)
            budget -= count
            prefills.append(self._row(request, count))
        if preempted:  # drop rows planned for a victim: its pages are gone
            decodes, prefills = ([r for r in rows if r.request.slot >= 0] for rows in (decodes, prefills))
            budget = self.max_num_batched_tokens - sum(r.num_new for r in decodes + prefills)
        rows = decodes + prefills
        if not rows:
            return None
        for request, _, count, samples in rows:
            request.num_computed += count
            request.num_pending += samples
        return ScheduledBatch(rows, self.max_num_batched_tokens - budget, len(decodes))

    def take_back(self, batch: ScheduledBatch) -> None:
        """Undo the last ``schedule``: its batch did not run."""
        for row in batch.rows:
            row.request.num_computed -= row.num_new
            row.request.num_pending -= row.samples

    def preempt_all(self) -> None:
        """Make every running request wait to be recomputed from the tokens that the host has. The caller drops all launched
        steps."""
        while self.running:
            self.running[-1].num_pending = 0
            self._preempt(self.running[-1])

    def _chunk(self, request: Request, budget: int) -> int:
        left = request.num_uncomputed
        if left > 1 and self.prefill_chunk_size is not None:
            left = min(left, self.prefill_chunk_size)
        return min(left, budget)

    def _row(self, request: Request, count: int) -> ScheduledRow:
        return ScheduledRow(request, request.num_computed, count, request.num_computed + count == request.num_tokens)

    def _make_room(self, request: Request, count: int) -> bool:
        """Allocate pages for ``count`` more tokens, preempting later arrivals if needed. False if ``request`` was preempted."""
        missing = pages_for(request.num_computed + count, self.page_size) - len(request.pages)
        if self.reach is not None:
            self.reach.free_behind(request, self._give_back, self.page_size)
        while missing > 0:
            pages = self._allocate(missing)
            if pages is not None:
                request.pages += pages
                return True
            victim = self.running[-1]
            if victim.num_pending:
                raise NeedsDrain
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _allocate(self, count: int) -> list[int] | None:
        pages = self.allocator.allocate(count)
        if pages is None and self.reach is not None:  # others may hold pages that they need no more
            for request in self.running:
                self.reach.free_behind(request, self._give_back, self.page_size)
            pages = self.allocator.allocate(count)
        return pages

    def _give_back(self, pages: Sequence[int]) -> None:
        self.allocator.free(pages)

    def _preempt(self, request: Request) -> None:
        self._release(request)
        request.num_computed = 0
        request.preemptions += 1
        self.num_preemptions += 1
        self.waiting.appendleft(request)

    def _release(self, request: Request) -> None:
        self.running.remove(request)
        self._give_back(request.pages[request.num_behind :])
        self.free_slots.append(request.slot)
        request.pages, request.slot, request.num_behind = [], -1, 0

    def finish(self, request: Request) -> None:
        """Remove a request, running or waiting, and free what it holds."""
        if request.slot >= 0:
            self._release(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        request.finished = True


class NeedsDrain(Exception):
    """The next decision depends on results that are still on the device."""


__all__ = ["NeedsDrain", "Scheduler"]
