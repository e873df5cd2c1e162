"""Microbatches: attention over the parts, in order, is attention over the whole."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.attn_ops.kv_cache import PagedKVCache
from quire.attn_ops.metadata import UBatchSlice, create_ubatch_slices, slice_query_start_locs, split_attn_metadata
from quire.attn_ops.registry import get_backend
from tests.attn_ops.metadata.batches import batches, make_batch


def cut(query_lens, seq_lens, *at):
    meta = make_batch(query_lens, seq_lens, 16)
    return split_attn_metadata(create_ubatch_slices(meta.query_start_loc_cpu, list(at)), meta)


def lists(parts):
    return [(p.query_start_loc.tolist(), p.seq_lens.tolist()) for p in parts]


@pytest.mark.parametrize(("rows", "want"), [
    ((1, 3), [0, 7, 15]), ((0, 2), [0, 5, 12]), ((3, 5), [0, 15, 30]), ((2, 3), [0, 8]), ((4, 5), [0, 15]),
])
def test_slices_of_offsets(rows, want) -> None:
    offsets = torch.tensor([0, 5, 12, 20, 35, 50])
    assert slice_query_start_locs(offsets, slice(*rows)).tolist() == want


@pytest.mark.parametrize(("seqs", "queries", "at", "want"), [
    ([32, 40], [8, 8], (12,), [([0, 8, 12], [32, 36]), ([0, 4], [40])]),
    ([32, 40], [8, 8], (4,), [([0, 4], [28]), ([0, 4, 12], [32, 40])]),
    ([32, 40, 48, 56], [1, 1, 5, 5], (6,), [([0, 1, 2, 6], [32, 40, 47]), ([0, 1, 6], [48, 56])]),
    ([20], [10], (5,), [([0, 5], [15]), ([0, 5], [20])]),
    ([30], [12], (4, 8), [([0, 4], [22]), ([0, 4], [26]), ([0, 4], [30])]),
    # Three microbatches, the second of which ends inside a sequence: vLLM's page trims it by the wrong count.
    ([20, 30, 40], [4, 10, 4], (6, 12), [([0, 4, 6], [20, 22]), ([0, 6], [28]), ([0, 2, 6], [30, 40])]),
])
def test_examples(seqs, queries, at, want) -> None:
    assert lists(cut(queries, seqs, *at)) == want


def test_a_continued_sequence_counts_its_earlier_part_as_computed() -> None:
    """vLLM's page leaves num_computed_tokens where it was."""
    assert [p.num_computed_tokens_cpu.tolist() for p in cut([10], [20], 5)] == [[10], [15]]


@settings(max_examples=60, deadline=None)
@given(batches(), st.data())
def test_against_a_loop_over_tokens(meta, data) -> None:
    total = meta.num_actual_tokens
    if total < 1:
        return
    at = sorted(data.draw(st.sets(st.integers(1, max(1, total - 1)), max_size=min(4, total - 1)))) if total > 1 else []
    before = {name: value.clone() for name, value in vars(meta).items() if isinstance(value, torch.Tensor)}
    parts = split_attn_metadata(create_ubatch_slices(meta.query_start_loc_cpu, at), meta)
    rows = torch.repeat_interleave(torch.arange(meta.num_reqs), meta.query_lens_cpu)
    assert torch.cat([p.slot_mapping for p in parts]).tolist() == meta.slot_mapping.tolist()
    assert torch.cat([p.positions for p in parts]).tolist() == meta.positions.tolist()
    begin = 0
    for part in parts:
        own = torch.repeat_interleave(torch.arange(part.num_reqs), part.query_lens_cpu)
        end = begin + part.num_actual_tokens
        assert torch.equal(part.block_table_tensor[own], meta.block_table_tensor[rows[begin:end]])
        assert part.max_query_len == part.query_lens_cpu.max() and part.max_seq_len == part.seq_lens.max()
        begin = end
    assert all(torch.equal(value, getattr(meta, name)) for name, value in before.items())


def test_attention_over_the_parts_is_attention_over_the_whole() -> None:
    """Bits, on a real kernel: a sequence cut in three, decodes beside it, empty rows, any borders."""
    meta = make_batch([1, 7, 0, 4, 1], [9, 12, 5, 4, 1])
    backend = get_backend("torch_native")
    q, k, v = torch.randn(3, meta.num_actual_tokens, 2, 8, generator=torch.Generator().manual_seed(0))

    def run(parts):
        cache = PagedKVCache(num_layers=1, num_pages=40, page_size=4, num_kv_heads=2, head_dim=8, dtype=torch.float32,
                             device="cpu")
        for t in (cache.k[0], cache.v[0]):
            t.normal_(generator=torch.Generator().manual_seed(1))
        outs, begin = [], 0
        for p in parts:
            own = slice(begin, begin := begin + p.num_actual_tokens)
            outs.append(backend.op(q[own], k[own], v[own], *cache.of_layer(0), p.slot_mapping, p.block_table_tensor,
                                   p.query_start_loc, p.seq_lens, None, [], scale=0.3, window=5, softcap=None, chunk=None))
        return torch.cat(outs)

    whole = run([meta])
    for split in ([2, 5, 9], 2, 4, [1, 8], list(range(1, 13))):
        parts = split_attn_metadata(create_ubatch_slices(meta.query_start_loc_cpu, split), meta)
        torch.testing.assert_close(run(parts), whole, rtol=1e-5, atol=1e-5)  # another tiling: other orders of sums


def test_padding_goes_to_the_last() -> None:
    meta = make_batch([2, 2], [4, 4]).padded(8, 3)
    parts = split_attn_metadata([UBatchSlice(slice(0, 1), slice(0, 2)), UBatchSlice(slice(1, 3), slice(2, 8))], meta)
    assert lists(parts) == [([0, 2], [4]), ([0, 2, 2], [4, 0])] and parts[1].slot_mapping.tolist()[2:] == [-1] * 4


@pytest.mark.parametrize(("rows", "tokens"), [((0, 1), (0, 5)), ((0, 2), (4, 8)), ((1, 1), (0, 2)), ((0, 1), (2, 2)),
                                              ((0, 2), (0, 4))])
def test_slices_that_do_not_fit(rows, tokens) -> None:
    meta = make_batch([4, 4, 1], [4, 4, 1])
    with pytest.raises(ValueError, match="do not begin in row|is empty"):
        split_attn_metadata([UBatchSlice(slice(*rows), slice(*tokens))], meta)


@pytest.mark.parametrize("split", [0, 4, [0], [3], [2, 1]])
def test_a_microbatch_without_tokens(split) -> None:
    with pytest.raises(ValueError, match="every microbatch needs a token"):
        create_ubatch_slices(torch.tensor([0, 1, 3]), split)
