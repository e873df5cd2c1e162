"""Chunked attention as more sequences: each token sees its own chunk, up to itself."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.attn_ops.attention import visible
from quire.attn_ops.metadata import make_local_attention_virtual_batches
from tests.attn_ops.metadata.batches import batches, make_batch


def local(queries, seqs, chunk, page, table=None):
    meta = make_batch(queries, seqs, page)
    if table is not None:
        meta.__dict__["block_table_tensor"] = table
    return make_local_attention_virtual_batches(chunk, meta)


def test_the_worked_example() -> None:
    """vLLM's comment gives prefix sums that end at 24; there are 19 tokens."""
    got = local([4, 10, 5], [6, 17, 9], 4, 2, torch.arange(30).view(3, 10))
    assert got.query_lens_cpu.tolist() == [2, 2, 1, 4, 4, 1, 4, 1]
    assert got.query_start_loc.tolist() == [0, 2, 4, 5, 9, 13, 14, 18, 19]
    assert got.seq_lens.tolist() == [4, 2, 4, 4, 4, 1, 4, 1]
    assert got.num_computed_tokens_cpu.tolist() == [2, 0, 3, 0, 0, 0, 0, 0]
    assert got.block_table_tensor.tolist() == [[0, 1], [2, 3], [12, 13], [14, 15], [16, 17], [18, 19], [22, 23], [24, 25]]
    assert (got.num_reqs, got.num_actual_tokens, got.max_query_len, got.max_seq_len) == (8, 19, 4, 4)


def test_a_table_with_fewer_columns() -> None:
    got = local([4, 10, 5], [6, 17, 9], 4, 2, torch.arange(27).view(3, 9))
    assert got.block_table_tensor.tolist() == [[0, 1], [2, 3], [11, 12], [13, 14], [15, 16], [17, 17], [20, 21], [22, 23]]
    got = local([1000], [1000], 8192, 16)
    assert got.seq_lens.tolist() == [1000] and got.block_table_tensor.shape == (1, 512)


@settings(max_examples=60, deadline=None)
@given(batches(), st.integers(1, 3))
def test_each_token_sees_its_chunk(meta, pages) -> None:
    """The keys of every token, by page and offset, against the dense mask. Rows without tokens vanish."""
    chunk = 4 * pages
    got = make_local_attention_virtual_batches(chunk, meta)
    assert torch.equal(got.slot_mapping, meta.slot_mapping) and got.query_start_loc[-1] == meta.num_actual_tokens

    def keys(batch):
        rows = torch.repeat_interleave(torch.arange(batch.num_reqs), batch.query_lens_cpu).tolist()
        for row, position in zip(rows, batch.positions.tolist(), strict=True):
            yield [(int(batch.block_table_tensor[row, p // 4]) * 4 + p % 4, p, position) for p in range(position + 1)]

    for mine, all_keys in zip(keys(got), keys(meta), strict=True):
        want = [slot for slot, p, position in all_keys
                if visible(torch.tensor(position), torch.tensor(p), window=None, chunk=chunk, causal=True)]
        assert [slot for slot, _, _ in mine] == want


@pytest.mark.parametrize("chunk", [0, 6])
def test_chunks_of_part_of_a_page(chunk) -> None:
    with pytest.raises(ValueError, match=f"a chunk of {chunk} tokens is not a multiple of the page size 4"):
        make_local_attention_virtual_batches(chunk, make_batch([3], [3]))
