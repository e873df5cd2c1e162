"""int4 weights in PyTorch's packed layout, made code by code as it is defined (aten/src/ATen/native/cuda/int4mm.cu)."""

from __future__ import annotations

import torch


def packed(codes: torch.Tensor) -> torch.Tensor:
    """codes (N, K), 0 to 15 -> int32 (N / 8, K / 128, 32, 4), what ``aten._convert_weight_to_int4pack`` makes with 8 inner
    tiles. Thread t of 32 holds of row t / 4, in two tiles of 16 columns per word, columns 2 (t % 4) + {0, 1, 8, 9}; a word's
    bits from the lowest are the first, third, fifth, seventh, second, ... of these eight."""
    n, k = codes.shape
    tiles = codes.view(n // 8, 8, k // 128, 128).long()
    out = torch.zeros(n // 8, k // 128, 32, 4, dtype=torch.long)
    for thread in range(32):
        for word in range(4):
            for place, held in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
                column = 32 * word + 16 * (held // 4) + 2 * (thread % 4) + (0, 1, 8, 9)[held % 4]
                out[:, :, thread, word] |= tiles[:, thread // 4, :, column] << (4 * place)
    return torch.where(out >= 2**31, out - 2**32, out).to(torch.int32)


def weights(codes: torch.Tensor, scale_and_zero: torch.Tensor) -> torch.Tensor:
    """(code - 8) * scale + zero in float32, with scale_and_zero (K / group, N, 2)."""
    group = codes.shape[1] // scale_and_zero.shape[0]
    scale, zero = (scale_and_zero[..., i].float().t().repeat_interleave(group, 1) for i in (0, 1))
    return (codes - 8).float() * scale + zero


def random_int4(n: int, k: int, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes, scale_and_zero) of weights of about unit size."""
    scales = torch.stack([torch.rand(k // group, n) * 0.2 + 0.05, torch.randn(k // group, n) * 0.5], -1)
    return torch.randint(0, 16, (n, k), dtype=torch.int32), scales.to(torch.bfloat16)
