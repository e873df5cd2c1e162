"""Low-rank products of several adapters, each token with adapters of its own: ``torch.ops.quire.lora_rows``.

Legend: T tokens, K and N the layer's inputs and outputs, r the rank of an adapter.

LoRA (Hu et al., 2021) adds ``B A x * scaling`` to a linear layer's ``W x``. Here the sum is over the adapters of each token,
which the step in progress has (``Step.adapters``): a graph takes the same inputs whatever the requests of a batch ask for. The
adapters' own parameters are read, so changes in place are seen.

On CUDA two kernels compute all adapters, up to MAX_TOKENS tokens, MAX_KERNEL_ADAPTERS adapters and rank MAX_RANK, and skip an
adapter that no token of a tile has. A decode step reads (K + N) r elements of each adapter that is used. Elsewhere the op runs
its eager definition, in which each adapter costs two products for all tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.attn_ops.kernels import host
from quire.attn_ops.kernels.host import next_power_of_2
from quire.attn_ops.kernels.launch import launch
from quire.attn_ops.library import define_op
from quire.attn_ops.step import current_step

#: Bits of the int64 numbers in ``Step.adapters``, the sign left out.
MAX_ADAPTERS = 63
#: Limits of the kernels.
MAX_TOKENS, MAX_KERNEL_ADAPTERS, MAX_RANK = 256, 16, 128
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def lora_rows_eager(base: Tensor, x: Tensor, a: Sequence[Tensor], b: Sequence[Tensor], scaling: Sequence[float],
                    bits: Sequence[int]) -> Tensor:
    """``base`` plus the products of each token's adapters, in their order. A new tensor.

    Args:
        base: (1, T, N), the layer's own product.
        x: (1, T, K), its input.
        a, b: (r, K) and (N, r) of each adapter; their dtype is that of its products, as in PEFT.
        scaling: of each adapter.
        bits: of each adapter: 2**i for the i-th of the model. A token has those whose bits are set in ``Step.adapters`` (T,)
            int64.

    Returns:
        (1, T, N) in the dtype of ``base``.

    Raises:
        RuntimeError: no step is in progress, or it does not say which adapters its tokens have.
    """
    rows = _rows(x)
    result = base.clone()
    for down, up, scale, bit in zip(a, b, scaling, bits, strict=True):
        on = ((rows & bit) != 0)[None, :, None]
        if not base.is_cuda and not bool(on.any()):
            continue
        result = torch.where(on, result + F.linear(F.linear(x.to(down.dtype), down), up) * scale, result)
    return result.to(base.dtype)


def _rows(x: Tensor) -> Tensor:
    """(T,) int64: the adapters of each token as bits."""
    step = current_step()
    if step is None or step.adapters is None:
        raise RuntimeError("lora_rows: the step does not say which adapters its tokens have; set Step.adapters")
    return step.adapters[: x.shape[1]]


def lora_rows_cuda(base: Tensor, x: Tensor, a: Sequence[Tensor], b: Sequence[Tensor], scaling: Sequence[float],
                   bits: Sequence[int]) -> Tensor:
    """The op on CUDA: sums in float32, rounded once to the dtype of ``base``; ``A x`` is rounded to the adapter's dtype. Runs
    the definition outside the kernels' range."""
    rows, t, k, n = _rows(x), x.shape[1], x.shape[2], base.shape[2]
    if not (0 < t <= MAX_TOKENS and len(x) == 1 and 0 < len(a) <= MAX_KERNEL_ADAPTERS) or any(
            down.shape[0] > MAX_RANK or not (down.is_contiguous() and up.is_contiguous()) or down.dtype != up.dtype
            for down, up in zip(a, b, strict=True)) or any(y.dtype not in _DTYPES for y in (base, x, *a)):
        return lora_rows_eager(base, x, a, b, scaling, bits)
    base2, x2 = host.rows_contiguous(base[0]), host.rows_contiguous(x[0])
    ranks, places = tuple(down.shape[0] for down in a), tuple(bit.bit_length() - 1 for bit in bits)
    block_t, block_k, block_n = (16 if t <= 16 else 32), 64, 64
    block_r, splits = next_power_of_2(max(ranks), 16), max(1, min(8, k // 256))  # one program would read A too slowly
    shrunk = torch.empty(len(a), splits, t, block_r, dtype=torch.float32, device=base.device)
    out = base.new_empty(1, t, n)
    kernels, tiles = host.kernel_module("kernels.lora"), -(-t // block_t)
    launch(kernels.rows_shrink_kernel, (len(a), splits, tiles), x2, rows, tuple(a), shrunk, t, k, x2.stride(0), ranks, places,
           ADAPTERS=len(a), SPLITS=splits, BLOCK_T=block_t, BLOCK_K=block_k, BLOCK_R=block_r, num_warps=4)
    launch(kernels.rows_expand_kernel, (-(-n // block_n), tiles), base2, rows, tuple(b), shrunk, out, t, n, base2.stride(0),
           ranks, places, tuple(map(float, scaling)), ADAPTERS=len(a), SPLITS=splits, BLOCK_T=block_t, BLOCK_N=block_n,
           BLOCK_R=block_r, num_warps=4)
    return out


def _fake(base: Tensor, x: Tensor, a: Sequence[Tensor], b: Sequence[Tensor], scaling: Sequence[float], bits: Sequence[int]
          ) -> Tensor:
    return torch.empty_like(base)


lora_rows = define_op("lora_rows(Tensor base, Tensor x, Tensor[] a, Tensor[] b, float[] scaling, int[] bits) -> Tensor",
                      cpu=lora_rows_eager, cuda=lora_rows_cuda, fake=_fake)

__all__ = ["MAX_ADAPTERS", "MAX_KERNEL_ADAPTERS", "MAX_RANK", "MAX_TOKENS", "lora_rows", "lora_rows_cuda", "lora_rows_eager"]
