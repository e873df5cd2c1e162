"""Chunks of cached prefixes: every token of every prefix in one chunk, none beyond the capacity."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.attn_ops.metadata.prefix_chunks import PrefixChunks
from tests.attn_ops.metadata.batches import make_batch


@pytest.mark.parametrize(("prefix", "capacity", "chunk_len", "chunks"), [
    ([64, 64, 64], 48, 16, 4), ([16, 32, 48, 64], 64, 16, 4), ([1, 64], 31, 15, 5), ([0, 0], 8, 4, 0), ([], 8, 8, 0),
])
def test_examples(prefix, capacity, chunk_len, chunks) -> None:
    got = PrefixChunks.build(prefix, capacity=capacity)
    assert (got.chunk_len, got.num_chunks) == (chunk_len, chunks)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 30), min_size=1, max_size=5), st.integers(5, 40))
def test_every_token_once(prefix, capacity) -> None:
    got, meta = PrefixChunks.build(prefix, capacity=capacity), make_batch([1] * len(prefix), [n + 1 for n in prefix], 4)
    found: list[list[int]] = [[] for _ in prefix]
    for i in range(got.num_chunks):
        slots = got.slots(i, meta.block_table_tensor, 4).tolist()
        assert len(slots) == got.lens[i].sum() == int(got.seq_lens[i].sum()) <= capacity
        for r in range(len(prefix)):
            found[r] += slots[got.cu_seq_lens[i, r] : got.cu_seq_lens[i, r + 1]]
    table = meta.block_table_tensor
    assert found == [[int(table[r, t // 4]) * 4 + t % 4 for t in range(n)] for r, n in enumerate(prefix)]


def test_too_many_sequences() -> None:
    with pytest.raises(ValueError, match="9 sequences do not fit into chunks of 8 tokens"):
        PrefixChunks.build([1] * 9, capacity=8)
