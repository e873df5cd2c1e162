"""A linear layer in float32 of half-precision numbers, for few tokens: ``torch.ops.quire.float_linear``.

Routers of experts are often written ``F.linear(x.float(), weight.float())``: which experts are best shall not depend on rounded
logits. That converts the weight in every step, writes it at twice its size and reads it again. Products of two bf16 or fp16
numbers are exact in float32, so the kernels of ``small_linear`` give the same sums up to their order, and store float32.

Limits: up to MAX_TOKENS tokens on CUDA; elsewhere the op runs its eager definition, which is also the reference.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from quire.attn_ops.library import define_op
from quire.attn_ops.ops.small_linear import MAX_TOKENS, small_linear_cuda
from quire.attn_ops.tuning.launch_config import Config

HALVES = (torch.bfloat16, torch.float16)


def float_linear_eager(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The definition: x (..., K), weight (N, K), both of one half-precision dtype -> (..., N) float32."""
    return F.linear(x.float(), weight.float())


def config(num_tokens: int, k: int) -> Config:
    """Launch parameters, by bytes in flight and not by measurement: a router's weight has few rows, so that tiles are low (16
    rows, the fewest of a tensor core's) and wide."""
    return Config(1, 1024 if k % 1024 == 0 else 512, 4, 2) if num_tokens == 1 else Config(16, 256, 4, 3)


def float_linear_cuda(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The op on CUDA. Runs the definition for more than MAX_TOKENS tokens and other dtypes."""
    k = x.shape[-1]
    m = x.numel() // max(1, k)
    if not 0 < m <= MAX_TOKENS or x.dtype not in HALVES or weight.dtype != x.dtype or weight.stride(1) != 1:
        return float_linear_eager(x, weight)
    return small_linear_cuda(x, weight, None, None, 0.0, None, False, config=config(m, k), dtype=torch.float32)


def _fake(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0], dtype=torch.float32)


float_linear = define_op("float_linear(Tensor x, Tensor weight) -> Tensor", cpu=float_linear_eager, cuda=float_linear_cuda,
                         fake=_fake, launches=True)
