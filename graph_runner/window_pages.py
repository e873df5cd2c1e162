"""How far back a model's attention reaches: pages that no later token can see are freed while the request runs.

Where every attention site has a window or a chunk, a request holds the pages of its last tokens only, however long it gets, so
the KV cache of a window model is bounded by its window and not by its context. A freed page goes to other requests, whose
numbers the request must not read, not even to multiply them by a weight of zero (0 * NaN is NaN). So its block table then has
the null page there.

Where some layers have a window and others see everything (gemma3, gpt_oss, llama4), those with a window have page numbers, a
block table and slots of their own (``WindowPages``), from which pages are freed; the others keep all of a request's pages. A
backend that plans on the host must plan with both tables (``AttentionBackend.plans_windows``); with one that does not, all
layers of such a model share one table, and all pages are kept. ``PoolSizes`` says how many pages there are of both kinds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from quire.attn_ops.attention import AttentionSite
from quire.attn_ops.kv_cache import bytes_per_page, pages_for
from quire.attn_ops.metadata import NULL_PAGE
from quire.graph_runner.block_allocator import BlockAllocator, KeptPages
from quire.graph_runner.request import Request

GIB = 2**30


@dataclass(frozen=True)
class Reach:
    """The (window, chunk) of a model's sites, of which each has at least one."""

    kinds: frozenset[tuple[int | None, int | None]]

    @classmethod
    def of(cls, sites: Iterable[AttentionSite]) -> Reach | None:
        """None if some site sees all tokens before."""
        kinds = frozenset((site.window, site.chunk) for site in sites)
        return None if not kinds or (None, None) in kinds else cls(kinds)

    def first_needed(self, position: int) -> int:
        """The first token that a query at ``position``, or any after it, can see."""
        return min(max(0 if window is None else position - window + 1, 0 if chunk is None else position // chunk * chunk)
                   for window, chunk in self.kinds)

    @property
    def span(self) -> int:
        """The largest number of tokens before its own that a query sees."""
        return max(min(size for size in kind if size is not None) for kind in self.kinds) - 1

    def pages_held(self, count: int, page_size: int) -> int:
        """Pages that a request needs at most while ``count`` tokens of it are computed, at any length."""
        return pages_for(self.span + count, page_size) + 1

    def useful_pages(self, max_num_seqs: int, max_num_batched_tokens: int, page_size: int) -> int:
        """Pages that full batches can use, the null page included."""
        return max_num_seqs * (self.pages_held(0, page_size) + 1) + pages_for(max_num_batched_tokens, page_size) + 1

    def free_behind(self, request: Request, free: Callable[[list[int]], None], page_size: int) -> None:
        """Give back the pages that the request's next token and those after it cannot see."""
        request.num_behind = self._free_behind(request.pages, request.num_behind, request.num_computed, free, page_size)

    def _free_behind(self, pages: list[int], behind: int, position: int, free: Callable[[list[int]], None], page_size: int
                     ) -> int:
        """Free those of ``pages``, of which the first ``behind`` are given back, that no query from ``position`` on sees.
        Returns how many are given back now."""
        first = min(self.first_needed(position) // page_size, len(pages))
        if first <= behind:
            return behind
        free(pages[behind:first])
        pages[behind:first] = [NULL_PAGE] * (first - behind)
        return first


class WindowPages(KeptPages):
    """Pages of the layers with a window, where others see everything. A request has as many of them as of the others
    (``Request.window_pages``), and the null page in the places of those that were given back.

    With a prefix cache, a kept page of the other layers may have one of these beside it, by the same key. A request that reads
    n kept pages needs of these only the last ones, within reach of its next token (``usable``). Those that no request holds are
    *idle*, and given back, least recently used first, when pages are needed; the pages beside them may stay. ``num_pages``
    counts the null page.
    """

    def __init__(self, reach: Reach, num_pages: int, page_size: int) -> None:
        super().__init__(BlockAllocator(num_pages))
        self.reach, self.page_size = reach, page_size

    @property
    def num_used(self) -> int:
        """Pages that requests hold."""
        return self.allocator.num_total - self.allocator.num_free - self.num_idle

    # -- of requests ------------------------------------------------------------------------------------------------

    def extend(self, request: Request, count: int, running: Iterable[Request]) -> bool:
        """``count`` more pages for the request, if need be those that ``running`` ones or nobody needs; False: there are too
        few, and nothing has changed."""
        if count > self.allocator.num_free:
            for other in running:
                self.free_behind(other)
        self.evict(count - self.allocator.num_free)
        pages = self.allocator.allocate(count)
        request.window_pages += pages or []
        return pages is not None

    def free_behind(self, request: Request) -> None:
        """Give back the pages that the request's next token and those after it cannot see."""
        request.window_behind = self.reach._free_behind(request.window_pages, request.window_behind, request.num_computed,
                                                        self.release, self.page_size)

    def share_with(self, source: Request, target: Request, count: int) -> None:
        """Let ``target``, which has none, read the first ``count`` pages of ``source``, as far as that has them."""
        target.window_pages, target.window_behind = source.window_pages[:count], source.window_behind
        self.allocator.share(target.window_pages[target.window_behind :])

    def give_back(self, request: Request) -> None:
        """The request holds none any more."""
        self.release(request.window_pages[request.window_behind :])
        request.window_pages, request.window_behind = [], 0

    # -- of the prefix cache ----------------------------------------------------------------------------------------

    def usable(self, keys: Sequence[bytes]) -> int:
        """How many of the pages with these keys, from the first on, a request can read: the largest number of which those in
        reach of the next token are here."""
        found = missing = 0  # missing: pages up to and with the last that is not here
        for count in range(1, len(keys) + 1):
            if keys[count - 1] not in self._page_of:
                missing = count
            if missing <= self._first(count):
                found = count
        return found

    def _first(self, count: int) -> int:
        """The first page that the token after ``count`` full pages can see."""
        return self.reach.first_needed(count * self.page_size) // self.page_size

    def page_of(self, key: bytes) -> int | None:
        """The kept page with that key, or None."""
        return self._page_of.get(key)

    def share(self, request: Request, keys: Sequence[bytes]) -> None:
        """Let the request, which has no pages, read those with these keys, as many as are ``usable``."""
        first = self._first(len(keys))
        pages = [self._page_of[key] for key in keys[first:]]
        self.hold(pages)
        request.window_pages, request.window_behind = [NULL_PAGE] * first + pages, first

    def keep(self, key: bytes, request: Request, i: int) -> None:
        """Keep the request's ``i``-th page for others, if there is none with that key."""
        if i >= request.window_behind and key not in self._page_of and (page := request.window_pages[i]) not in self._key_of:
            self._remember(key, page)

    def forget(self, key: bytes) -> None:
        """Nobody reads the page with that key any more, if there is one."""
        if (page := self._page_of.get(key)) is not None:
            self._forget(page)


def fit_requests(reach: Reach | None, num_pages: int, page_size: int, chunk: int | None, budget: int, max_model_len: int
                 ) -> tuple[int, int | None]:
    """The longest request that a cache of ``num_pages`` can serve, and the prefill chunk for it: ``chunk``, or a smaller one
    where the window and a chunk of the step's ``budget`` of tokens would not fit."""
    whole = (num_pages - 1) * page_size
    if reach is None or max_model_len <= whole:
        return min(max_model_len, whole), chunk
    wanted = min(budget, max_model_len if chunk is None else chunk)
    room = (num_pages - 2) * page_size - reach.span
    if wanted <= room:
        return max_model_len, chunk
    return (max_model_len, room) if room >= 1 else (whole, chunk)


@dataclass(frozen=True)
class PoolSizes:
    """The rules for one model and engine: ``max_num_seqs`` and ``max_num_tokens`` of the largest step, ``max_pages_per_seq`` of
    the longest request. ``kv_dtype``: of the cache; None: the model's. ``reach``: of a model whose layers all have a window;
    else None. ``window_reach``: of the layers with a window, where these have pages of their own; else None. ``lasting``:
    whether a prefix cache keeps pages for later requests. ``bytes_beside``: (site, page_size) -> bytes that the attention
    backend keeps of each page of a layer, beside the KV cache. ``fixed_scale``: of a cache with fixed scales."""

    sites: Sequence[AttentionSite]
    page_size: int
    kv_dtype: torch.dtype | None
    max_num_seqs: int
    max_num_tokens: int
    max_pages_per_seq: int
    reach: Reach | None
    window_reach: Reach | None
    lasting: bool
    bytes_beside: Callable[[AttentionSite, int], int] = lambda site, page_size: 0
    fixed_scale: bool = False

    @property
    def useful(self) -> int:
        """Pages that full batches can use, the null page included."""
        pages = self.max_num_seqs * self.max_pages_per_seq + 1
        if self.reach is not None and not self.lasting:  # a lasting cache keeps what requests gave back
            pages = min(pages, self.reach.useful_pages(self.max_num_seqs, self.max_num_tokens, self.page_size))
        return pages

    def window_pages(self, num_pages: int) -> int | None:
        """Pages of layers with a window, where those of the others are ``num_pages``; None: all layers have the same. With a
        lasting prefix cache twice as many as full batches can use, for the ends of what it keeps."""
        if self.window_reach is None:
            return None
        useful = self.window_reach.useful_pages(self.max_num_seqs, self.max_num_tokens, self.page_size)
        return min(num_pages, useful * (2 if self.lasting else 1))

    def pages_in(self, num_bytes: int) -> int:
        """Pages for which ``num_bytes`` suffice. Layers with a window have no more than they can use, and the rest goes to the
        others; where there is not even memory for those, all layers have the same."""
        same = num_bytes // self._page_bytes(self.sites)
        windows = self.window_pages(max(0, num_bytes))  # of any number of other pages
        if windows is None or windows > same:
            return same
        taken = windows * self._page_bytes([s for s in self.sites if s.bounded])
        return (num_bytes - taken) // self._page_bytes([s for s in self.sites if not s.bounded])

    def _page_bytes(self, sites: Sequence[AttentionSite]) -> int:
        """Bytes of one page over these layers, those beside the cache included."""
        return bytes_per_page(sites, self.page_size, self.kv_dtype, self.fixed_scale) + sum(
            self.bytes_beside(site, self.page_size) for site in sites)


@dataclass(frozen=True)
class MemoryPlan:
    """A GPU's memory before the KV cache is made, in bytes: ``total``, ``free`` with the model loaded and nothing else, what
    the largest ``step`` needs beside its inputs, and what capturing all ``graphs`` is estimated to take. ``utilization``: the
    fraction of ``total`` that may be in use."""

    total: int
    free: int
    utilization: float
    step: int
    graphs: int

    @property
    def cache(self) -> int:
        """What is left for the KV cache; may be negative."""
        return int(self.free - self.step - self.graphs - self.total * (1 - self.utilization))

    def __str__(self) -> str:
        return (f"{self.free / GIB:.1f} GiB free of {self.total / GIB:.1f}, the largest step needs {self.step / GIB:.1f} GiB, "
                f"CUDA graphs about {self.graphs / GIB:.1f} GiB, and {self.total * (1 - self.utilization) / GIB:.1f} GiB stay "
                f"unused (gpu_memory_utilization={self.utilization})")
