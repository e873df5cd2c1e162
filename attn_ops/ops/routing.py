"""The largest numbers of short rows, as a router of experts picks them: ``torch.ops.quire.topk_rows``.

``torch.topk`` on CUDA takes two kernels for it: 9 us for a token and 67 us for 8192 tokens of 128 experts on an H200
(benchmarks/results/h200_profile_qwen3-30b-a3b.json).
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.attn_ops.kernels import host
from quire.attn_ops.kernels.host import next_power_of_2
from quire.attn_ops.kernels.launch import launch
from quire.attn_ops.library import define_op

#: Maximum numbers per row and results per row of the kernel: a row's keys stay in one warp's registers, and each result reads
#: them all.
MAX_ROW, MAX_K = 512, 16
KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def topk_rows_eager(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The definition: the k largest of each row of x (..., E), in descending order; of equal numbers that with the lower index
    first. NaN is the largest. Values (..., k) in x's dtype; indices (..., k) int64."""
    values, indices = x.sort(dim=-1, descending=True, stable=True)
    return values[..., :k].contiguous(), indices[..., :k].contiguous()


def topk_rows_cuda(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The op on CUDA. Runs the definition outside the kernel's range."""
    columns = x.shape[-1]
    if x.dtype not in KERNEL_DTYPES or not 0 < k <= min(columns, MAX_K) or columns > MAX_ROW or not x.numel():
        return topk_rows_eager(x, k)
    rows = host.rows_contiguous(x.reshape(-1, columns))
    values, indices = _fake(x, k)
    block = next_power_of_2(columns, 32)
    launch(host.kernel_module("kernels.routing").topk_kernel, (len(rows),), rows, values, indices, columns, rows.stride(0), k,
           BLOCK_E=block, pdl=host.use_pdl(x.device, len(rows)), num_warps=1)
    return values, indices


def _fake(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    shape = (*x.shape[:-1], k)
    return x.new_empty(shape), x.new_empty(shape, dtype=torch.int64)


topk_rows = define_op("topk_rows(Tensor x, int k) -> (Tensor, Tensor)", cpu=topk_rows_eager, cuda=topk_rows_cuda, fake=_fake,
                      launches=True)
