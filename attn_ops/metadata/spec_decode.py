"""Shapes of batches in which every sequence has equally many tokens, for kernels that verify drafts, and the programs of a
causal convolution over a ragged batch. quire's engine has no speculation yet, and refuses convolutions."""

from __future__ import annotations

import numpy as np
import torch

from quire.attn_ops.metadata.core import PAD_SLOT_ID

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
