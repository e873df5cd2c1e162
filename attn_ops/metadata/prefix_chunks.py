"""A batch's cached prefixes cut into chunks of bounded size, for ``attn_ops/mla_prefill.py``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

MAX_CHUNK_CAPACITY = 128 * 1024
TILE = 128  # kernels that read keys in tiles of so many attend to chunks that end with one faster, and together


@dataclass(frozen=True)
class PrefixChunks:
    """All chunks of a batch's prefixes; n chunks, B sequences.

    Args:
        chunk_len: tokens per sequence and chunk.
        lens: (n, B) int32, on the host: ``seq_lens``.
        starts, seq_lens: (n, B) int32, device: first token of each sequence's part, and its length, perhaps 0.
        cu_seq_lens: (n, B + 1) int32, device: prefix sums of seq_lens.
    """

    chunk_len: int
    starts: torch.Tensor
    seq_lens: torch.Tensor
    cu_seq_lens: torch.Tensor
    lens: np.ndarray

    @property
    def num_chunks(self) -> int:
        return len(self.lens)

    @classmethod
    def build(cls, prefix_lens: Sequence[int] | np.ndarray, device: torch.device | str = "cpu",
              capacity: int = MAX_CHUNK_CAPACITY, on_device: torch.Tensor | None = None) -> PrefixChunks:
        """Chunks of at most ``capacity`` tokens of all sequences together. No chunks where no sequence has a prefix.
        ``on_device``: ``prefix_lens`` as a tensor there, so that nothing is copied from the host, for which it would wait.
        Raises ValueError for more sequences than ``capacity``."""
        prefix = np.asarray(prefix_lens, dtype=np.int32)
        rows = len(prefix)
        if rows > capacity:
            raise ValueError(f"{rows} sequences do not fit into chunks of {capacity} tokens; raise the capacity")
        chunk_len = capacity // max(rows, 1)
        chunk_len -= chunk_len % TILE if chunk_len > TILE else 0
        _, lens = get_prefix_chunk_seq_lens(prefix, -(-int(prefix.max(initial=0)) // chunk_len), chunk_len)
        total = torch.from_numpy(prefix).to(device) if on_device is None else on_device.int()
        begin = torch.arange(len(lens), dtype=torch.int32, device=device)[:, None] * chunk_len
        part = (total - begin).clamp(0, chunk_len)
        sums = F.pad(part.cumsum(1, dtype=torch.int32), (1, 0))
        return cls(chunk_len, begin.expand(-1, rows), part, sums, lens)

    def slots(self, chunk: int, block_table: torch.Tensor, page_size: int) -> torch.Tensor:
        """(tokens of the chunk,) int64: the slots of its tokens, sequence after sequence, without a wait for the device."""
        total, lens = int(self.lens[chunk].sum()), self.seq_lens[chunk].long()
        row = torch.repeat_interleave(torch.arange(len(lens), device=lens.device), lens, output_size=total)
        position = torch.arange(total, device=lens.device) + (self.starts[chunk] - self.cu_seq_lens[chunk][:-1]).long()[row]
        return block_table[row, position // page_size].long() * page_size + position % page_size


def get_prefix_chunk_seq_lens(prefix_lens: np.ndarray, num_prefix_chunks: int, prefix_chunk_len: int
                              ) -> tuple[np.ndarray, np.ndarray]:
    """(starts, lens), each (chunks, B) int32: where chunk i of a sequence begins, and how much of its prefix is in it."""
    starts = np.broadcast_to(np.arange(num_prefix_chunks, dtype=np.int32)[:, None] * prefix_chunk_len,
                             (num_prefix_chunks, len(prefix_lens))).copy()
    return starts, np.clip(prefix_lens - starts, 0, prefix_chunk_len).astype(np.int32)
