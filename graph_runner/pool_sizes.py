"""How many pages the KV cache has: of layers that see everything, and of layers with a window, where a model has both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from quire.attn_ops.attention import AttentionSite
from quire.attn_ops.kv_cache import bytes_per_page
from quire.graph_runner.window_pages import Reach

GIB = 2**30


@dataclass(frozen=True)
class PoolSizes:
    """The rules for one model and engine.

    Args:
        kv_dtype: of the cache; None: the model's.
        max_num_seqs, max_num_tokens: of the largest step.  max_pages_per_seq: pages of the longest request.
        reach: of a model whose layers all have a window; else None.
        window_reach: of the layers with a window, where these have pages of their own; else None.
        lasting: whether a prefix cache keeps pages for later requests.
        bytes_beside: (site, page_size) -> bytes that the attention backend keeps of each page of a layer, beside the KV cache.
    """

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
        return bytes_per_page(sites, self.page_size, self.kv_dtype) + sum(
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
