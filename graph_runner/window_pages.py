"""How far back a model's attention reaches: pages that no later token can see are freed while the request runs.

Where every attention site has a window or a chunk, a request holds the pages of its last tokens only, however long it gets, so
the KV cache of a window model is bounded by its window and not by its context. A freed page goes to other requests, whose
numbers the request must not read, not even to multiply them by a weight of zero (0 * NaN is NaN). So its block table then has
the null page there.

A model with one site that sees everything keeps all pages: its layers share one block table. (Layers with windows could have
one of their own, with pages of their own; that is not there yet.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from quire.attn_ops.attention import AttentionSite
from quire.attn_ops.kv_cache import pages_for
from quire.attn_ops.metadata import NULL_PAGE
from quire.graph_runner.request import Request


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
        first = min(self.first_needed(request.num_computed) // page_size, len(request.pages))
        if first > request.num_behind:
            behind = slice(request.num_behind, first)
            free(request.pages[behind])
            request.pages[behind] = [NULL_PAGE] * (first - request.num_behind)
            request.num_behind = first


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


__all__ = ["Reach", "fit_requests"]
