"""Random batches for tests of the metadata functions."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from quire.attn_ops.metadata import CommonAttentionMetadata


def make_batch(query_lens: list[int], seq_lens: list[int], page_size: int = 4, width: int | None = None
               ) -> CommonAttentionMetadata:
    """A batch with pages of its own, 1, 2, 3, ... in order of the sequences; rows of ``width`` pages."""
    pages = iter(range(1, 10**6))
    table = [[next(pages) for _ in range(max(-(-n // page_size), width or 0))] for n in seq_lens]
    return CommonAttentionMetadata.build(query_lens, seq_lens, table, page_size=page_size)


@st.composite
def batches(draw: Any, least: int = 0, page_size: int = 4) -> CommonAttentionMetadata:
    rows = draw(st.lists(st.tuples(st.integers(least, 9), st.integers(0, 17)), min_size=1, max_size=6))
    return make_batch([q for q, _ in rows], [q + c for q, c in rows], page_size)
