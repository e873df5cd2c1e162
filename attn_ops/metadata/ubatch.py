"""A batch cut into microbatches at token borders, which may lie inside a sequence.

They run in order, each after the keys and values of the earlier ones are written: a sequence that continues in a later one has
its earlier tokens in the cache there, so attention over the parts is attention over the whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from quire.attn_ops.metadata.core import CommonAttentionMetadata


@dataclass(frozen=True)
class UBatchSlice:
    """Rows and tokens of one microbatch. The first and the last row may be there in part."""

    request_slice: slice
    token_slice: slice

    @property
    def num_tokens(self) -> int:
        return self.token_slice.stop - self.token_slice.start


def create_ubatch_slices(query_start_loc_cpu: torch.Tensor | np.ndarray, split: int | Sequence[int]) -> list[UBatchSlice]:
    """Cut a batch with these offsets (B + 1,). ``split``: the tokens at which microbatches begin, ascending, the first one's 0
    left out; or a number of microbatches, of tokens that differ by at most one. Raises ValueError for a border that leaves a
    microbatch without tokens."""
    start = np.asarray(query_start_loc_cpu, dtype=np.int64)
    total = int(start[-1])
    if isinstance(split, int):
        borders = [total * i // split for i in range(split + 1)] if split > 0 else [0]
    else:
        borders = [0, *map(int, split), total]
    if len(borders) < 2 or min(np.diff(borders)) < 1:
        raise ValueError(f"a batch of {total} tokens cannot be cut at {split!r}: every microbatch needs a token")
    found = []
    for begin, end in zip(borders, borders[1:], strict=False):
        # Empty rows at a border belong to no microbatch: they have no tokens that attend.
        rows = slice(int(np.searchsorted(start, begin, side="right")) - 1, int(np.searchsorted(start, end, side="left")))
        found.append(UBatchSlice(rows, slice(begin, end)))
    return found


def slice_query_start_locs(query_start_loc: torch.Tensor, request_slice: slice) -> torch.Tensor:
    """(rows + 1,) a new tensor: the offsets of these rows, counted from their first token."""
    return query_start_loc[request_slice.start : request_slice.stop + 1] - query_start_loc[request_slice.start]


def split_attn_metadata(ubatch_slices: Sequence[UBatchSlice], common_attn_metadata: CommonAttentionMetadata
                        ) -> list[CommonAttentionMetadata]:
    """The metadata of each microbatch; the batch itself is not changed.

    In a microbatch a row has the tokens that lie in its token slice, and as ``seq_lens`` its length after them. A slice that
    goes past the last row's tokens has padding there. Raises ValueError for a slice without tokens, or whose first or last
    token is not in its first or last row, and for a batch with logits_indices_padded, which no microbatch can keep.
    """
    meta = common_attn_metadata
    if meta.logits_indices_padded is not None:
        raise ValueError("a batch with logits_indices_padded cannot be cut into microbatches; cut it before "
                         "make_kv_sharing_fast_prefill_common_attn_metadata")
    return [_part(meta, one.request_slice, one.token_slice) for one in ubatch_slices]


def _part(meta: CommonAttentionMetadata, rows: slice, tokens: slice) -> CommonAttentionMetadata:
    begin, end = tokens.start, tokens.stop
    bounds = meta.query_start_loc_cpu.numpy()[rows.start : rows.stop + 1].astype(np.int64)
    if end <= begin or rows.stop <= rows.start:
        raise ValueError(f"the microbatch of rows {rows} and tokens {tokens} is empty")
    padded = rows.stop >= meta.num_reqs and end <= meta.num_tokens
    if not bounds[0] <= begin < bounds[1] or not (bounds[-2] < end <= bounds[-1] or padded and bounds[-1] < end):
        raise ValueError(f"tokens {begin} to {end} do not begin in row {rows.start} and end in row {rows.stop - 1}, whose "
                         f"tokens are {bounds[0]} to {bounds[1]} and {bounds[-2]} to {bounds[-1]}")
    cut = np.clip(bounds, begin, end)
    lens = meta.seq_lens_cpu.numpy()[rows] - (bounds[1:] - cut[1:])  # what comes in later microbatches is not there yet
    local = (cut - begin).astype(np.int32)
    device = meta.seq_lens.device
    query_cpu, seq_cpu = torch.from_numpy(local), torch.from_numpy(lens.astype(np.int32))
    return replace(
        meta, query_start_loc=query_cpu.to(device), query_start_loc_cpu=query_cpu, seq_lens=seq_cpu.to(device),
        seq_lens_cpu=seq_cpu, block_table_tensor=meta.block_table_tensor[rows], slot_mapping=meta.slot_mapping[tokens],
        num_reqs=len(lens), num_actual_tokens=int(local[-1]), max_query_len=int(np.diff(local).max()),
        max_seq_len=int(lens.max()), total_lens=meta.seq_lens[rows] if meta.total_lens is None else meta.total_lens[rows],
        encoder_seq_lens=None if meta.encoder_seq_lens is None else meta.encoder_seq_lens[rows])
