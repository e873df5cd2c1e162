"""Positions of a ragged batch's tokens from lengths on the device. quire's engine packs them on the host
(``graph_runner/step_buffers.py``)."""

from __future__ import annotations

import torch

from quire.attn_ops.kernels import host
from quire.attn_ops.kernels.launch import launch
from quire.attn_ops.library import define_op

_BLOCK = 512


def compute_position_torch(extend_prefix_lens: torch.Tensor, extend_seq_lens: torch.Tensor, extend_seq_lens_sum: int
                           ) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition: (T,) int64 positions prefix_i, prefix_i + 1, ... of each sequence's tokens, end to end, and (B,) int32
    index of each sequence's first token. ``extend_prefix_lens``, ``extend_seq_lens``: (B,) tokens before this step, and of it;
    their sum T is given on the host: there is no device-to-host read."""
    lens = extend_seq_lens.long()
    ends = lens.cumsum(0)
    start = ends - lens
    shift = torch.repeat_interleave(extend_prefix_lens.long() - start, lens, output_size=extend_seq_lens_sum)
    return torch.arange(extend_seq_lens_sum, device=lens.device) + shift, start.int()


def compute_position_triton(extend_prefix_lens: torch.Tensor, extend_seq_lens: torch.Tensor, extend_seq_lens_sum: int
                            ) -> tuple[torch.Tensor, torch.Tensor]:
    rows = extend_seq_lens.shape[0]
    positions = torch.empty(extend_seq_lens_sum, dtype=torch.int64, device=extend_seq_lens.device)
    start = torch.empty(rows, dtype=torch.int32, device=extend_seq_lens.device)
    if rows:
        launch(host.kernel_module("kernels.positions").positions_kernel, (rows,), positions, start,
               extend_prefix_lens.contiguous(), extend_seq_lens.contiguous(), rows, _BLOCK)
    return positions, start


def _fake(extend_prefix_lens: torch.Tensor, extend_seq_lens: torch.Tensor, extend_seq_lens_sum: int
          ) -> tuple[torch.Tensor, torch.Tensor]:
    return (extend_seq_lens.new_empty(extend_seq_lens_sum, dtype=torch.int64),
            extend_seq_lens.new_empty(extend_seq_lens.shape[0], dtype=torch.int32))


#: (extend_prefix_lens, extend_seq_lens, extend_seq_lens_sum) -> (positions, extend_start_loc)
compute_position = define_op(
    "compute_position(Tensor extend_prefix_lens, Tensor extend_seq_lens, SymInt extend_seq_lens_sum) -> (Tensor, Tensor)",
    cpu=compute_position_torch, cuda=compute_position_triton, fake=_fake, launches=True)


def clamp_position(seq_lens: torch.Tensor) -> torch.Tensor:
    """(B,) int64 positions of a decode: max(seq_len - 1, 0)."""
    return (seq_lens - 1).clamp_min(0).long()
