"""Batch metadata: slots, offsets, padding, positions, and every error."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.attn_ops import metadata

build = metadata.CommonAttentionMetadata.build


def test_mixed_batch() -> None:
    """A chunk of a prefill over a cached prefix, a sequence that waits, a decode."""
    meta = build([3, 0, 1], [10, 4, 6], [[5, 2, 9], [4], [1, 8]], page_size=4)
    assert meta.query_start_loc.tolist() == meta.query_start_loc_cpu.tolist() == [0, 3, 3, 4]
    assert meta.seq_lens.tolist() == meta.seq_lens_cpu.tolist() == [10, 4, 6]
    assert meta.block_table_tensor.tolist() == [[5, 2, 9], [4, 0, 0], [1, 8, 0]]  # rows filled up with the null page
    assert meta.slot_mapping.tolist() == [2 * 4 + 3, 9 * 4, 9 * 4 + 1, 8 * 4 + 1]
    assert meta.positions.tolist() == [7, 8, 9, 5]
    assert meta.logits_indices.tolist() == [2, 2, 3]
    assert (meta.num_reqs, meta.num_actual_tokens, meta.num_tokens) == (3, 4, 4)
    assert (meta.max_query_len, meta.max_seq_len, meta.page_size) == (3, 10, 4)
    meta = build([2], [2], [[1]], page_size=4)
    assert {meta.query_start_loc.dtype, meta.seq_lens.dtype, meta.block_table_tensor.dtype} == {torch.int32}
    assert {meta.slot_mapping.dtype, meta.positions.dtype, meta.logits_indices.dtype} == {torch.int64}


def test_slots() -> None:
    meta = build([1, 2], [6, 7], [[3, 8], [3, 9, -1]], page_size=4)
    assert meta.slot_mapping.tolist() == [8 * 4 + 1, 9 * 4 + 1, 9 * 4 + 2]
    table = torch.tensor([[7, 3, 0], [1, 0, 0]])  # entries past a sequence's pages are free to be the null page
    assert build([1, 1], [20, 2], table, page_size=16).slot_mapping.tolist() == [3 * 16 + 3, 16 + 1]
    page = 2**28
    assert build([1], [1], [[page]], page_size=16).slot_mapping.tolist() == [page * 16]


def test_max_page() -> None:
    """Of the pages that hold tokens."""
    meta = build([1, 1], [6, 3], [[3, 8], [5, 99]], page_size=4)
    assert meta.max_page == meta.padded(4, 3).max_page == 8
    assert build([], [], [], page_size=4).max_page == 0


def test_empty_batch() -> None:
    meta = build([], [], [], page_size=4)
    assert meta.query_start_loc.tolist() == [0] and meta.slot_mapping.tolist() == meta.positions.tolist() == []
    assert meta.block_table_tensor.shape == (0, 1) and (meta.num_reqs, meta.max_query_len, meta.max_seq_len) == (0, 0, 0)
    padded = meta.padded(2, 3)
    assert padded.query_start_loc.tolist() == [0, 0, 0, 0] and padded.slot_mapping.tolist() == [-1, -1]
    assert padded.logits_indices.tolist() == [0, 0, 0]  # an index that exists, though nothing is there


# Padding.


def test_padding() -> None:
    meta = build([2, 1], [5, 9], [[3, 4], [1, 2, 6]], page_size=4)
    padded = meta.padded(6, 4)
    assert padded.query_start_loc.tolist() == padded.query_start_loc_cpu.tolist() == [0, 2, 3, 3, 3]
    assert padded.seq_lens.tolist() == padded.seq_lens_cpu.tolist() == [5, 9, 0, 0]
    assert padded.slot_mapping.tolist() == meta.slot_mapping.tolist() + [metadata.PAD_SLOT_ID] * 3
    assert padded.block_table_tensor.tolist() == meta.block_table_tensor.tolist() + [[metadata.NULL_PAGE] * 3] * 2
    assert padded.positions.tolist() == meta.positions.tolist() + [0, 0, 0]
    assert padded.logits_indices.tolist() == [1, 2, 2, 2]
    assert (padded.num_reqs, padded.num_actual_tokens, padded.num_tokens) == (2, 3, 6)  # the first two without padding
    assert padded.query_start_loc.dtype == torch.int32 and padded.slot_mapping.dtype == torch.int64
    # A planner that reads the live part sees the batch as it was built.
    meta = build([2, 1], [5, 9], [[3, 4], [1, 2, 6]], page_size=4)
    for same in (meta.padded(3, 2), meta.padded(6, 4).unpadded()):
        for field in dataclasses.fields(meta):
            before, after = getattr(meta, field.name), getattr(same, field.name)
            assert torch.equal(before, after) if isinstance(before, torch.Tensor) else before == after
    assert meta.padded(6, 4).num_computed_tokens_cpu.tolist() == [3, 8, 0, 0]
    assert meta.padded(6, 4).query_lens_cpu.tolist() == [2, 1, 0, 0]


def test_every_field_of_rows_follows_every_change_of_rows() -> None:
    """Encoder lengths, and the lengths that longrope reads: a row would have another's."""
    meta = dataclasses.replace(build([6, 1], [8, 4], [[1, 2], [3]], page_size=4, total_lens=[20, 4]),
                               encoder_seq_lens=np.array([7, 9]))
    padded = meta.padded(8, 4)
    assert padded.encoder_seq_lens.tolist() == [7, 9, 0, 0] and padded.unpadded().encoder_seq_lens.tolist() == [7, 9]
    cut = metadata.make_local_attention_virtual_batches(4, padded)
    assert (cut.seq_lens.tolist(), cut.total_lens.tolist()) == ([4, 4, 4], [20, 20, 4])
    assert cut.encoder_seq_lens.tolist() == [7, 7, 9]
    whole = metadata.make_local_attention_virtual_batches(4, build([6], [8], [[1, 2]], page_size=4))
    assert whole.total_lens.tolist() == [8, 8]  # of the sequence, not of its chunk
    parts = metadata.split_attn_metadata(metadata.create_ubatch_slices(meta.query_start_loc_cpu, [2]), meta)
    assert [(p.total_lens.tolist(), p.encoder_seq_lens.tolist()) for p in parts] == [([20], [7]), ([20, 4], [7, 9])]
    drafts = metadata.make_draft_metadata(dataclasses.replace(meta, seq_lens=torch.tensor([8, 4], dtype=torch.int32)), 2, 2,
                                 torch.arange(10, 14, dtype=torch.int32)[:, None])
    assert [d.total_lens.tolist() for d in drafts] == [[20, 20, 5, 5], [20, 20, 6, 6]]
    assert drafts[0].encoder_seq_lens.tolist() == [7, 7, 9, 9]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_slots_are_what_the_definition_says(data) -> None:
    """Against a loop over tokens, for random batches."""
    page_size = data.draw(st.integers(1, 5))
    lens = data.draw(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 12)), max_size=5))
    queries, seqs = [q for q, _ in lens], [q + before for q, before in lens]
    pages = iter(data.draw(st.permutations(range(1, 99))))
    table = [[next(pages) for _ in range(-(-n // page_size))] for n in seqs]
    slots, positions = [], []
    for query, seq, row in zip(queries, seqs, table, strict=True):
        for p in range(seq - query, seq):
            slots.append(row[p // page_size] * page_size + p % page_size)
            positions.append(p)
    meta = build(queries, seqs, table, page_size=page_size).padded(len(slots) + 2, len(lens) + 1)
    assert meta.slot_mapping.tolist() == slots + [-1, -1]
    assert meta.positions.tolist() == positions + [0, 0]


# Errors.


@pytest.mark.parametrize("queries, seqs, table, message", [
    ([1, 1], [1], [[1]], "describe 2, 1 and 1 sequences; the numbers must be equal"),
    ([1], [1], [], "describe 1, 1 and 0 sequences"),
    ([3], [2], [[1]], "sequence 0 schedules 3 tokens but has 2 after the step; need 0 <= query_len <= seq_len"),
    ([1, -1], [1, 4], [[1], [2]], "sequence 1 schedules -1 tokens"),
    ([1], [9], [[1, 2]], r"sequence 0 has 9 tokens and needs 3 pages of 4, but its row of block_table has 2: \[1, 2\]"),
    ([1], [5], [[0, 2]], r"sequence 0 uses page 0 in block_table row \[0, 2\]; page 0 is the null page"),
    ([1], [5], [[2, -1]], r"sequence 0 uses page -1 in block_table row \[2, -1\]"),
    ([2, 6], [2, 6], [[1], [1, 2]], "sequences 0 and 1 would both write to page 1 at 0"),
    ([1, 4, 2], [1, 6, 6], [[5], [7, 3], [9, 3]], "sequences 1 and 2 would both write to page 3 at 0"),
    ([5], [8], [[4, 4]], "sequence 0 would write to page 4 at 3"),
])
def test_build_errors(queries, seqs, table, message) -> None:
    with pytest.raises(ValueError, match=message):
        build(queries, seqs, table, page_size=4)


@pytest.mark.parametrize("tokens, reqs", [(2, 2), (3, 1)])
def test_padding_errors(tokens, reqs) -> None:
    meta = build([2, 1], [5, 9], [[3, 4], [1, 2, 6]], page_size=4)
    with pytest.raises(ValueError, match=f"cannot pad a batch of 3 tokens and 2 sequences to {tokens} and {reqs}"):
        meta.padded(tokens, reqs)
