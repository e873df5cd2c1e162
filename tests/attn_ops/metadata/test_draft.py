"""Decode steps of a draft model, made ahead: every draft goes to a slot of its own branch, and no token outside a batch's live
rows is written."""

from __future__ import annotations

import pytest
import torch

from quire.attn_ops.metadata import CommonAttentionMetadata, make_draft_metadata

TABLE = [[1, 2, 3], [4, 5, 6], [7, 8, 9]]


def batch(queries: list[int], seqs: list[int], page_size: int = 4, pad: int = 0) -> CommonAttentionMetadata:
    meta = CommonAttentionMetadata.build(queries, seqs, TABLE[: len(seqs)], page_size=page_size)
    return meta.padded(meta.num_tokens, meta.num_reqs + pad)


def test_a_chain() -> None:
    """Each step is the batch that would be built once the tokens before it are there."""
    first = batch([2, 1, 1], [5, 8, 1])
    for step, meta in enumerate(make_draft_metadata(first, 3)):
        wanted = batch([1, 1, 1], [6 + step, 9 + step, 2 + step])
        for name in ("query_start_loc", "seq_lens", "slot_mapping", "query_start_loc_cpu", "seq_lens_cpu",
                     "block_table_tensor"):
            found, expected = getattr(meta, name), getattr(wanted, name)
            assert torch.equal(found, expected) and found.dtype == expected.dtype, name
        assert (meta.max_query_len, meta.max_seq_len, meta.num_reqs, meta.num_actual_tokens) == (1, 9 + step, 3, 3)


def test_rows_without_tokens_stay_without() -> None:
    """A request that waits, and padding rows of a CUDA graph's shape: their pages, and the null page, are not written to."""
    for meta in make_draft_metadata(batch([1, 0, 3], [5, 7, 3], pad=2), 2):
        assert meta.query_start_loc.tolist() == meta.query_start_loc_cpu.tolist() == [0, 1, 1, 2, 2, 2]
        assert meta.seq_lens.tolist() == meta.seq_lens_cpu.tolist()
        assert meta.seq_lens[1] == 7 and meta.seq_lens[3:].tolist() == [0, 0]
        assert meta.slot_mapping[2:].tolist() == [-1, -1, -1] and meta.num_actual_tokens == 2
    assert meta.slot_mapping[:2].tolist() == [2 * 4 + 2, 8 * 4]


def test_branches() -> None:
    """Branches of a sequence have its pages in common, then each its own."""
    drafts = torch.tensor([[20, 21], [22, 23], [24, 25], [26, 27]], dtype=torch.int32)
    steps = make_draft_metadata(batch([1, 4], [8, 4]), 5, topk=2, draft_table=drafts)
    assert steps[0].block_table_tensor[:, :4].tolist() == [[1, 2, 20, 21], [1, 2, 22, 23], [4, 24, 25, 25], [4, 26, 27, 27]]
    assert steps[4].slot_mapping.tolist() == [84, 92, 100, 108]
    assert steps[4].seq_lens.tolist() == [13, 13, 9, 9] and steps[4].num_reqs == 4
    slots = torch.cat([meta.slot_mapping for meta in steps])
    assert len(slots.unique()) == 20


def test_bad_input() -> None:
    for options, message in (({"num_steps": 0}, "at least one step"), ({"num_steps": 5}, "needs 4 pages, block_table has 3"),
                             ({"num_steps": 1, "topk": 2}, r"need a draft_table of \(2, 1\)"),
                             ({"num_steps": 1, "topk": 2, "draft_table": torch.zeros(2, 1).int()}, "ends inside a page of 4")):
        with pytest.raises(ValueError, match=message):
            make_draft_metadata(batch([1], [9]), **options)
