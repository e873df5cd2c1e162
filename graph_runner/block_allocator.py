"""Reference counts of the KV cache's pages, and pages that are kept for several requests."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence

from quire.attn_ops.metadata import NULL_PAGE


class BlockAllocator:
    """Allocates page numbers 1 to ``num_pages - 1`` and counts the owners of each. It does not touch the cache.

    Page 0 is the null page that padding points to (`quire.attn_ops.metadata`, NOTE [Padding]); it is never allocated.

    Order: pages freed last are allocated first (LIFO), and a fresh allocator starts with 1, 2, 3, ... So the same calls give
    the same pages, a run touches no more distinct pages than its peak needs (unused ones never become resident on a CPU), and
    the pages of a finished sequence are reused in its order. A prefix cache holds references (`share`) and so evicts in its
    own order. Not thread-safe. Raises ValueError for fewer than two pages.
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 2:
            raise ValueError(f"num_pages must be at least 2, got {num_pages}: page {NULL_PAGE} is the null page")
        self._ref_counts = [0] * num_pages
        self._free = list(range(num_pages - 1, NULL_PAGE, -1))  # a stack: the next page is the last

    @property
    def num_total(self) -> int:
        """Pages that can be allocated, in use or not: one fewer than the cache has."""
        return len(self._ref_counts) - 1

    @property
    def num_free(self) -> int:
        """Pages without an owner."""
        return len(self._free)

    def ref_count(self, page: int) -> int:
        """Owners of a page; 0 when it is free. Raises ValueError for the null page, or a page that the cache does not have."""
        self._check(page)
        return self._ref_counts[page]

    def allocate(self, n: int) -> list[int] | None:
        """Take `n` free pages, each with one owner; None when fewer are free. Raises ValueError if `n` is negative."""
        if n < 0:
            raise ValueError(f"cannot allocate {n} pages; n must be at least 0")
        first = len(self._free) - n
        if first < 0:
            return None
        pages = self._free[first:]
        del self._free[first:]
        pages.reverse()
        for page in pages:
            self._ref_counts[page] = 1
        return pages

    def share(self, pages: Sequence[int]) -> None:
        """Add one owner to each page, once per occurrence. Raises ValueError for the null page, an unknown page, or a free
        page. No count has changed then."""
        for page in pages:
            self._check(page)
            if not self._ref_counts[page]:
                raise ValueError(f"cannot share page {page}: it is free; allocate it")
        for page in pages:
            self._ref_counts[page] += 1

    def free(self, pages: Sequence[int]) -> None:
        """Remove one owner from each page, once per occurrence; a page without owners is free. Raises ValueError for the null
        page, an unknown page, or one freed more often than it has owners ("double free"). No count has changed then."""
        counts, total = self._ref_counts, len(self._ref_counts)
        once = len(pages) < 2 or len(set(pages)) == len(pages)
        if not once or not all(NULL_PAGE < page < total and counts[page] for page in pages):
            for page, times in Counter(pages).items():
                self._check(page)
                if times > counts[page]:
                    raise ValueError(f"double free of page {page}: freed {times} times, and it has {counts[page]} owners")
        # Backwards, so that `allocate` returns the pages in the order of `pages`.
        for page in reversed(pages):
            counts[page] -= 1
            if not counts[page]:
                self._free.append(page)

    def _check(self, page: int) -> None:
        if page == NULL_PAGE:
            raise ValueError(f"page {NULL_PAGE} is the null page, which can be neither shared nor freed")
        if not NULL_PAGE < page < len(self._ref_counts):
            raise ValueError(f"page {page} is unknown: this allocator has the pages 1 to {self.num_total}")


class KeptPages:
    """Pages that several requests may read, each known by a key. Holds a reference to each of its pages; those without another
    owner are *idle*, and given back, least recently used first, when pages are needed."""

    def __init__(self, allocator: BlockAllocator) -> None:
        self.allocator = allocator
        self._page_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    def hold(self, pages: Sequence[int]) -> None:
        """One more owner for each page."""
        self.allocator.share(pages)
        for page in pages:
            self._idle.pop(page, None)

    def release(self, pages: Sequence[int]) -> None:
        """One owner fewer for each page."""
        self.allocator.free(pages)
        for page in reversed(pages):  # the end of a sequence is of less use than its beginning, and goes first
            if page in self._key_of and self.allocator.ref_count(page) == 1:
                self._idle[page] = None

    def evict(self, count: int) -> None:
        """Give back the ``count`` idle pages that were used least recently."""
        for _ in range(min(count, len(self._idle))):
            self._forget(next(iter(self._idle)))

    def _remember(self, key: bytes, page: int) -> None:
        self.allocator.share([page])
        self._page_of[key], self._key_of[page] = page, key

    def _forget(self, page: int) -> None:
        del self._page_of[self._key_of.pop(page)]
        self._idle.pop(page, None)
        self.allocator.free([page])
