"""Which pages of the KV cache are in use, and by how many owners."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from quire.attn_ops.metadata import NULL_PAGE


class BlockAllocator:
    """Hands out page numbers 1 to ``num_pages - 1`` and counts the owners of each. It never touches the cache itself.

    Page 0 is the null page that padding points to (`quire.attn_ops.metadata`, NOTE [Padding]); it is never handed out.

    Order: pages freed last are handed out first (LIFO), and a fresh allocator hands out 1, 2, 3, ... So the same calls
    give the same pages, a run touches no more distinct pages than its peak needs (what was never used never becomes
    resident on a CPU), and the pages of a finished sequence come back in its order, which keeps neighbours together. A
    first-in-first-out order would keep freed contents alive the longest, which only matters to a prefix cache without
    references of its own; one that holds a reference to every page it remembers (`share`) evicts in its own order.

    All operations cost O(1) a page. Not thread-safe.
    """

    def __init__(self, num_pages: int) -> None:
        """An allocator with all pages free.

        Args:
            num_pages: pages of the cache, the null page included.

        Raises:
            ValueError: no page is left beside the null page.
        """
        if num_pages < 2:
            raise ValueError(f"num_pages must be at least 2, got {num_pages}: page {NULL_PAGE} is the null page and is "
                             "never handed out")
        self._ref_counts = [0] * num_pages
        self._free = list(range(num_pages - 1, NULL_PAGE, -1))  # a stack: the next page to hand out is the last

    @property
    def num_total(self) -> int:
        """Pages that can be handed out, in use or not: one fewer than the cache has."""
        return len(self._ref_counts) - 1

    @property
    def num_free(self) -> int:
        """Pages that nobody owns."""
        return len(self._free)

    def ref_count(self, page: int) -> int:
        """Owners of a page; 0 when it is free.

        Raises:
            ValueError: the null page, or a page that the cache does not have.
        """
        self._check(page)
        return self._ref_counts[page]

    def allocate(self, n: int) -> list[int] | None:
        """Take `n` free pages, each with one owner from now on; None, and nothing taken, when fewer are free.

        Raises:
            ValueError: `n` is negative.
        """
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
        """Add one owner to each page. A page may occur more than once and gets as many owners.

        Raises:
            ValueError: the null page, a page that the cache does not have, or a free page (its contents may be another
                sequence's tomorrow). No count has changed then.
        """
        for page in pages:
            self._check(page)
            if not self._ref_counts[page]:
                raise ValueError(f"cannot share page {page}: it is free, so its contents are nobody's; allocate it")
        for page in pages:
            self._ref_counts[page] += 1

    def free(self, pages: Sequence[int]) -> None:
        """Take one owner off each page; a page without owners is free. A page may occur as often as it has owners.

        Raises:
            ValueError: the null page, a page that the cache does not have, or one with fewer owners than it is freed
                times ("double free"). No count has changed then.
        """
        for page, times in Counter(pages).items():
            self._check(page)
            if times > self._ref_counts[page]:
                raise ValueError(f"double free of page {page}: freed {times} times by this call, and it has "
                                 f"{self._ref_counts[page]} owners")
        # Backwards, so that `allocate` hands the pages out again in the order of `pages`.
        for page in reversed(pages):
            self._ref_counts[page] -= 1
            if not self._ref_counts[page]:
                self._free.append(page)

    def _check(self, page: int) -> None:
        if page == NULL_PAGE:
            raise ValueError(f"page {NULL_PAGE} is the null page: nobody owns it, so it is neither shared nor freed")
        if not NULL_PAGE < page < len(self._ref_counts):
            raise ValueError(f"page {page} is unknown: this allocator has the pages 1 to {self.num_total}")


__all__ = ["BlockAllocator"]
