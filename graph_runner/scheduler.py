"""Which requests run in the next step: continuous batching with chunked prefill, and preemption by recomputation.

Every step has a token budget. Running requests come first, in order of arrival: each decodes one token or continues its
prompt. The rest of the budget admits waiting requests, by priority and in order. A prompt longer than the budget (or than
``prefill_chunk_size``) is computed in chunks over several steps. A request whose beginning another one is computing waits for
that one's pages, and others pass it.

When a running request needs a page and none is free, the request of the lowest priority that arrived last returns its pages
and waits to be recomputed from the start, with its tokens so far as its prompt. Sampling is a function of seed and position,
so preemption does not change the tokens.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque

from quire.attn_ops.kv_cache import pages_for
from quire.graph_runner.block_allocator import BlockAllocator
from quire.graph_runner.prefix_cache import PrefixCache
from quire.graph_runner.request import Request, ScheduledBatch, ScheduledRow
from quire.graph_runner.window_pages import Reach, WindowPages


class Scheduler:
    """Continuous batching over one block allocator.

    Args:
        max_num_seqs: maximum number of running requests; each has a slot in 0..max_num_seqs-1.
        max_num_batched_tokens: token budget of a step.
        max_scored: prompt tokens whose log probabilities one step may compute.

    Attributes:
        reach: of the model's attention; pages behind it are freed. None: all of a request's pages are needed.
        length_limits: numbers of tokens beyond which all keys of a sequence are others (longrope): a request that grows past
            one is preempted, and computed again.
        windows: pages of layers with a window, where others see everything and ``reach`` is None; else None.
    """

    def __init__(self, allocator: BlockAllocator, *, page_size: int, max_num_seqs: int, max_num_batched_tokens: int,
                 prefill_chunk_size: int | None = None, max_scored: int = 256, prefixes: PrefixCache | None = None) -> None:
        self.allocator, self.page_size, self.prefixes = allocator, page_size, prefixes
        self._free = allocator.free if prefixes is None else prefixes.release
        self.reach: Reach | None = None
        self.length_limits: tuple[int, ...] = ()
        self.windows: WindowPages | None = None
        self.max_num_batched_tokens, self.prefill_chunk_size = max_num_batched_tokens, prefill_chunk_size
        self.max_scored = self._scores_left = max_scored
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.free_slots = list(range(max_num_seqs - 1, -1, -1))
        self.reserved = 0  # slots that rows wait for which begin together: no request begins with one of them
        self.num_preemptions = self.num_steps = 0
        self._computed: list[Request] = []  # requests with prompt tokens in the step launched last
        self._copies: dict[int, tuple[int, int]] = {}  # pages to copy before the step, by request
        self._window_copies: dict[int, tuple[int, int]] = {}

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        """Queue a request."""
        request.arrived_at = self.num_steps
        self._queue(request, behind=True)

    def _queue(self, request: Request, behind: bool) -> None:
        """Queue a request behind or before those of its priority; the queue is sorted by it."""
        find = bisect_right if behind else bisect_left
        self.waiting.insert(find(self.waiting, request.priority, key=lambda waiting: waiting.priority), request)

    def schedule(self) -> ScheduledBatch | None:
        """Rows of the next step, with pages allocated and ``num_computed`` advanced; None if nothing can run now. Raises
        NeedsDrain if a request must be preempted whose newest token is still on the device; call again after the results of the
        launched step have been collected."""
        self._note_computed()
        budget, before = self.max_num_batched_tokens, self.num_preemptions
        self._scores_left = self.max_scored
        decodes: list[ScheduledRow] = []
        prefills: list[ScheduledRow] = []
        for request in list(self.running):
            if budget == 0:
                break
            # Skip requests preempted earlier in this loop, and those that reach their maximum length with pending tokens.
            start, total = request.num_computed, len(request.token_ids) + request.num_pending
            if request.slot < 0 or request.finished or total >= request.max_total_tokens:
                continue
            if request.num_pending and request.edits is not None and request.edits.reads_tokens:
                continue  # until its newest token is known
            if self.length_limits and self.length_kind(total) != request.length_kind:
                if request.num_pending:
                    raise NeedsDrain
                self._preempt(request)
                continue
            if total - start == 1:  # a decode: the fast path of the loop
                if start < len(request.pages) * self.page_size or self._make_room(request, 1):
                    budget -= 1
                    decodes.append(ScheduledRow(request, start, 1, True))
                continue
            count = self._chunk(request, budget)
            if count and self._make_room(request, count):
                budget -= count
                prefills.append(self._row(request, count))
        if self.num_preemptions == before:  # a victim would take its pages right back
            self._admit(prefills, budget)
        else:  # drop rows planned for a victim: its pages are gone
            decodes, prefills = ([r for r in rows if r.request.slot >= 0] for rows in (decodes, prefills))
        rows = decodes + prefills
        if not rows:
            return None
        for request, _, count, samples, _ in rows:
            request.num_computed += count
            request.num_pending += samples
        for row in prefills:
            row.request.num_scored += row.num_scored
        scored = sum(row.num_scored for row in prefills)
        self.num_steps += 1
        self._computed = [row.request for row in prefills]
        if self.prefixes is not None:  # the last token of a prompt, alone in its step, is a decode
            self._computed += [r.request for r in decodes if r.start < len(r.request.prompt_token_ids)
                               or r.request.num_keyed < r.request.num_coming]
        copies, windows = tuple(self._copies.values()), tuple(self._window_copies.values())
        self._copies, self._window_copies = {}, {}
        return ScheduledBatch(rows, sum(row.num_new for row in prefills) + len(decodes), len(decodes), scored, copies, windows)

    def _admit(self, prefills: list[ScheduledRow], budget: int) -> None:
        """Start waiting requests with what is left of the budget."""
        passed: list[Request] = []
        if self.waiting and budget and self.free_slots and self.prefixes is not None:
            self.prefixes.follow_weights()
        while self.waiting and budget and len(self.free_slots) > self.reserved:
            request = self.waiting[0]
            self.set_length_kind(request)
            match = self.prefixes.match(request) if self.prefixes is not None else None
            if match is not None and match.coming:
                passed.append(self.waiting.popleft())
                continue
            shared = [] if match is None else match.pages
            if self.prefixes is not None:
                self.prefixes.hold(shared)
                if self.windows is not None:
                    self.windows.share(request, request.page_keys[: len(shared)])
            request.num_computed = len(shared) * self.page_size + (0 if match is None else match.copied)
            request.pages = list(shared)
            if self.reach is not None:  # a request that waits for pages must not hold some that it does not read
                self.reach.free_behind(request, self._free, self.page_size)
            count = self._chunk(request, budget)
            missing = pages_for(request.num_computed + count, self.page_size) - len(shared)
            if not count or not self.extend(request, missing):
                self.give_back(request)
                break
            self.waiting.popleft()
            request.slot = self.free_slots.pop()
            if self.prefixes is not None and match is not None:
                self.prefixes.admit(request, match, self.num_steps + 1)
                if match.copied:
                    self._copies[request.request_id] = match.copy_from, request.pages[len(shared)]
                    if self.windows is not None:
                        self._window_copies[request.request_id] = match.window_from, request.window_pages[len(shared)]
            self.running.append(request)
            budget -= count
            prefills.append(self._row(request, count))
        self.waiting.extendleft(reversed(passed))

    def length_kind(self, num_tokens: int) -> int:
        """How many of the limits a sequence of ``num_tokens`` tokens exceeds."""
        return sum(num_tokens > limit for limit in self.length_limits)

    def set_length_kind(self, request: Request) -> bool:
        """Note the kind that a request without keys has now. Returns whether it is another one."""
        kind = self.length_kind(request.num_tokens)
        if kind == request.length_kind:
            return False
        request.length_kind = kind
        request.page_keys.clear()
        return True

    def take_back(self, batch: ScheduledBatch) -> None:
        """Undo the last ``schedule``: its batch did not run."""
        self._computed = []
        for row in batch.rows:
            row.request.num_computed -= row.num_new
            row.request.num_pending -= row.samples
            row.request.num_scored -= row.num_scored
        targets = {page for _, page in batch.copies}
        for request in [r for r in self.running if not targets.isdisjoint(r.pages)][::-1]:  # their copies were not made
            self._preempt(request)

    def preempt_all(self) -> None:
        """Make every running request wait to be recomputed from the tokens that the host has. The caller drops all launched
        steps, and the model may have changed: no page is shared any more."""
        for request in (*self.running, *self.waiting):  # one that waits may have left scores in a launched step
            if request.output.prompt_logprobs is not None:
                request.num_scored = len(request.output.prompt_logprobs)
        while self.running:
            self.running[-1].num_pending = 0
            self._preempt(self.running[-1])
        self.forget_prefixes()

    def forget_prefixes(self) -> None:
        """No later request reads what was computed before."""
        self._computed = []
        if self.prefixes is not None:
            self.prefixes.clear()

    def _note_computed(self) -> None:
        """The step launched last has computed pages that others may read."""
        for request in self._computed:
            if self.prefixes is not None and request.slot >= 0:
                self.prefixes.computed(request)
        self._computed = []

    def _chunk(self, request: Request, budget: int) -> int:
        left = request.num_uncomputed
        if left > 1 and self.prefill_chunk_size is not None:
            left = min(left, self.prefill_chunk_size)
        count, first = min(left, budget), self._first_score(request)
        if first < len(request.prompt_token_ids):  # not more tokens than predict ``_scores_left`` others
            count = min(count, first - 1 - request.num_computed + self._scores_left)
        return count

    def _first_score(self, request: Request) -> int:
        """The first prompt token that the request's next tokens predict and whose log probability is to be computed."""
        return max(request.num_scored, request.num_computed + 1)

    def _row(self, request: Request, count: int) -> ScheduledRow:
        end = request.num_computed + count
        scored = max(0, min(end + 1, len(request.prompt_token_ids)) - self._first_score(request))
        self._scores_left -= scored
        return ScheduledRow(request, request.num_computed, count, end == request.num_tokens, scored)

    def allocate(self, count: int) -> list[int] | None:
        """Free pages, pages that running requests no longer need, or idle pages of the prefix cache; None if there are too
        few."""
        if count > self.allocator.num_free and self.reach is not None:
            for request in self.running:
                self.reach.free_behind(request, self._free, self.page_size)
        missing = count - self.allocator.num_free
        if missing > 0 and self.prefixes is not None and self.prefixes.num_idle >= missing:
            self.prefixes.evict(missing)
        return self.allocator.allocate(count)

    def extend(self, request: Request, count: int) -> bool:
        """``count`` more pages for the request; False: there are too few, and it has what it had."""
        pages = self.allocate(count)
        if pages is None:
            return False
        if self.windows is not None and not self.windows.extend(request, count, self.running):
            self._free(pages)
            return False
        request.pages += pages
        return True

    def share(self, source: Request, target: Request) -> None:
        """Let ``target``, which has no pages, read the full ones of ``source``."""
        target.pages = source.pages[: source.num_computed // self.page_size]
        self.allocator.share(target.pages)
        if self.windows is not None:
            self.windows.share_with(source, target, len(target.pages))

    def give_back(self, request: Request) -> None:
        """Free the pages of a request that is not scheduled after all, here or in ``lockstep.py``."""
        self._free(request.pages[request.num_behind :])
        if self.windows is not None:
            self.windows.give_back(request)
        request.num_computed, request.num_behind, request.pages = 0, 0, []

    def _make_room(self, request: Request, count: int) -> bool:
        """Allocate pages for ``count`` more tokens, preempting others if needed. False if ``request`` was preempted."""
        missing = pages_for(request.num_computed + count, self.page_size) - len(request.pages)
        if self.reach is not None:
            self.reach.free_behind(request, self._free, self.page_size)
        if self.windows is not None:
            self.windows.free_behind(request)
        while missing > 0:
            if self.extend(request, missing):
                return True
            victim = max(reversed(self.running), key=lambda r: r.priority)  # the last of the lowest priority
            if victim.num_pending:
                raise NeedsDrain
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _preempt(self, request: Request) -> None:
        self._release(request)
        request.num_computed = 0
        request.preemptions += 1
        self.num_preemptions += 1
        self._queue(request, behind=False)

    def _release(self, request: Request) -> None:
        self._note_computed()
        self.running.remove(request)
        if self.prefixes is None:
            self._free(request.pages[request.num_behind :])
        else:
            if self.prefixes.lasting:
                self.prefixes.computed(request)
            self.prefixes.left(request)
        if self.windows is not None:
            self.windows.give_back(request)
        self.free_slots.append(request.slot)
        request.pages, request.slot, request.num_behind = [], -1, 0

    def finish(self, request: Request) -> None:
        """Remove a request, running or waiting, and free what it holds."""
        if request.slot >= 0:
            self._release(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        request.finished = True
        if not self.has_work and self.prefixes is not None and not self.prefixes.lasting:
            self.prefixes.clear()


class NeedsDrain(Exception):
    """The next decision depends on results that are still on the device."""
