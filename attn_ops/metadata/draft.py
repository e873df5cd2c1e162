"""Metadata of the decode steps in which a draft model proposes tokens, all made before the first of them.

Step s appends one token to every branch of every sequence, at position ``seq_lens + s`` of the batch. Tensors on the device
follow from the batch's by device work only and do not depend on the tokens that are drawn, so that several steps can be one
CUDA graph, where the backend can be captured. For a backend that plans, each is a ``Step`` with its ``number``; all are planned
before the capture and before each replay, and the backend holds their plans side by side (``attn_ops/plans.py``). README, "What
runs", says which do.

Also shapes of batches in which every sequence has equally many tokens, for kernels that verify drafts, and the programs of a
causal convolution over a ragged batch. quire's engine has no speculation yet, and refuses convolutions.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from quire.attn_ops.metadata.core import PAD_SLOT_ID, CommonAttentionMetadata


def make_draft_metadata(common_attn_metadata: CommonAttentionMetadata, num_steps: int, topk: int = 1,
                        draft_table: torch.Tensor | None = None) -> list[CommonAttentionMetadata]:
    """The metadata of ``num_steps`` decode steps that follow a batch, one row of one token for each branch of each sequence:
    row b * topk + k is branch k of sequence b. Rows without tokens in the batch, as padding rows, have none in the steps.

    Args:
        topk: branches per sequence, each a chain of its own after the sequence's tokens.
        draft_table: (B * topk, pages) int32, pages of each branch's drafts, for topk > 1. With one branch drafts go to the
            pages that follow in ``block_table``, which must be the sequence's own already.

    Raises ValueError for a block table without room for the drafts, for topk > 1 without ``draft_table``, or where a sequence
    ends inside a page: branches would write to one page.
    """
    meta, page = common_attn_metadata, common_attn_metadata.page_size
    if num_steps < 1 or topk < 1:
        raise ValueError(f"drafting needs at least one step and one branch, got num_steps={num_steps}, topk={topk}")
    rows, live_cpu = meta.seq_lens.shape[0], meta.query_lens_cpu.numpy() > 0
    seqs = meta.seq_lens_cpu.numpy()
    table = meta.block_table_tensor
    if topk > 1:
        if draft_table is None or draft_table.shape[0] != rows * topk or draft_table.shape[1] * page < num_steps:
            got = None if draft_table is None else tuple(draft_table.shape)
            raise ValueError(f"{rows} sequences of {topk} branches need a draft_table of ({rows * topk}, "
                             f"{-(-num_steps // page)}) pages of their own, got {got}")
        if (seqs[live_cpu] % page).any():
            raise ValueError(f"a sequence ends inside a page of {page} tokens, to which its {topk} branches would all write; "
                             "use page_size=1, or draft where sequences end with a page")
        table = _branched(table, meta.seq_lens, draft_table, page, topk)
    room = table.shape[1] * page
    longest = int(seqs.max(initial=0, where=live_cpu)) + num_steps
    if longest > room:
        raise ValueError(f"a sequence of {longest - num_steps} tokens and {num_steps} drafts needs {-(-longest // page)} "
                         f"pages, block_table has {table.shape[1]} columns")
    device = meta.seq_lens.device
    live = (meta.query_start_loc.diff() > 0).repeat_interleave(topk)
    start = torch.cat([torch.zeros_like(meta.query_start_loc[:1]), live.cumsum(0).int()])
    place = torch.where(live, start[:-1].long(), rows * topk)
    lens = meta.seq_lens.repeat_interleave(topk)
    start_cpu = torch.from_numpy(np.concatenate([[0], np.cumsum(np.repeat(live_cpu, topk))]).astype(np.int32))
    totals = None if meta.total_lens is None else meta.total_lens.repeat_interleave(topk)
    encoder = None if meta.encoder_seq_lens is None else np.repeat(meta.encoder_seq_lens, topk)
    found = []
    for step in range(num_steps):
        position = (lens + step).long().clamp_max(room - 1)
        slot = table.gather(1, (position // page)[:, None])[:, 0].long() * page + position % page
        slots = torch.full((rows * topk + 1,), PAD_SLOT_ID, dtype=torch.int64, device=device).scatter(0, place, slot)
        after = torch.from_numpy(np.repeat(np.where(live_cpu, seqs + step + 1, seqs), topk).astype(np.int32))
        after_device = torch.where(live, lens + step + 1, lens)
        found.append(replace(
            meta, query_start_loc=start, query_start_loc_cpu=start_cpu, seq_lens=after_device, seq_lens_cpu=after,
            block_table_tensor=table, slot_mapping=slots[:-1].clone(), num_reqs=meta.num_reqs * topk,
            num_actual_tokens=int(start_cpu[-1]), max_query_len=1, max_seq_len=int(after.max()) if rows else 0, max_page=None,
            logits_indices_padded=None, num_logits_indices=0, encoder_seq_lens=encoder,
            total_lens=None if totals is None else torch.maximum(totals, after_device)))
    return found


def _branched(table: torch.Tensor, seq_lens: torch.Tensor, draft_table: torch.Tensor, page: int, topk: int) -> torch.Tensor:
    """(B * topk, W + drafts) the sequence's pages, then the branch's."""
    width = table.shape[1] + draft_table.shape[1]
    column = torch.arange(width, device=table.device)
    ends = (seq_lens // page).long().repeat_interleave(topk)[:, None]
    own = table.repeat_interleave(topk, 0).gather(1, column.clamp_max(table.shape[1] - 1).expand(draft_table.shape[0], -1))
    drafts = draft_table.to(table.dtype).gather(1, (column - ends).clamp(0, draft_table.shape[1] - 1))
    return torch.where(column < ends, own, drafts)


_BLOCK_M = 8
_LEAST_PROGRAMS = 1024


def reshape_query_for_spec_decode(query: torch.Tensor, batch_size: int) -> torch.Tensor:
    """(T, H, D) -> (B, T / B, H, D), a view. Raises ValueError for another rank, or a T that is not a multiple of B."""
    if query.dim() != 3 or batch_size < 1 or query.shape[0] % batch_size:
        raise ValueError(f"queries of shape {tuple(query.shape)} cannot be cut into {batch_size} sequences of equal lengths; "
                         "need (T, H, D) with T a multiple of the batch size")
    return query.view(batch_size, query.shape[0] // batch_size, *query.shape[1:])


def reshape_attn_output_for_spec_decode(attn_output: torch.Tensor) -> torch.Tensor:
    """(B, S, H, D) -> (B * S, H, D), a view where that is possible; (T, H, D) as it is. Raises ValueError for another rank."""
    if attn_output.dim() not in (3, 4):
        raise ValueError(f"an attention output has shape (B, S, H, D) or (T, H, D), got {tuple(attn_output.shape)}")
    return attn_output.flatten(0, 1) if attn_output.dim() == 4 else attn_output


def compute_causal_conv1d_metadata(query_start_loc_cpu: torch.Tensor, device: torch.device | str | None = None
                                   ) -> tuple[dict[int, dict[str, object]], torch.Tensor, torch.Tensor]:
    """The programs of a ragged causal convolution, one for each block of 8 tokens of a sequence.

    Returns ({8: {"nums", "tot", "mlist", "mlist_len", "offsetlist", "batch_ptr", "token_chunk_offset_ptr"}}, batch_ptr,
    token_chunk_offset_ptr). batch_ptr holds the sequence of each program and token_chunk_offset_ptr the number of its block in
    the sequence; both int32, with room for twice as many programs (at least 1024), the rest -1. ``device``: of the results, the
    host by default. Raises ValueError for offsets (B + 1,) on a device, which would have to be waited for.
    """
    if query_start_loc_cpu.device.type != "cpu":
        raise ValueError(f"query_start_loc is on {query_start_loc_cpu.device}; pass query_start_loc_cpu")
    nums = -(-np.diff(query_start_loc_cpu.numpy()).astype(np.int64) // _BLOCK_M)
    total = int(nums.sum())
    sequence = np.repeat(np.arange(len(nums), dtype=np.int32), nums)
    block = (np.arange(total) - np.repeat(np.cumsum(nums) - nums, nums)).astype(np.int32)

    def padded(values: np.ndarray) -> torch.Tensor:
        out = np.full(2 * max(_LEAST_PROGRAMS, total), PAD_SLOT_ID, dtype=np.int32)
        out[:total] = values
        return torch.from_numpy(out).to(device if device is not None else "cpu")

    batch_ptr, offset_ptr = padded(sequence), padded(block)
    found: dict[str, object] = {
        "nums": nums, "tot": total, "mlist": torch.from_numpy(sequence), "mlist_len": total,
        "offsetlist": torch.from_numpy(block), "batch_ptr": batch_ptr, "token_chunk_offset_ptr": offset_ptr}
    return {_BLOCK_M: found}, batch_ptr, offset_ptr
