"""Linear layers with quantized weights by ``attn_ops/kernels/small_linear_wide.py``, for ``small_linear``.

``launch_wide`` runs int8, fp8 and int4 weights for up to some hundred tokens. int4 weights are those of torchao's
``Int4TilePackedTo4dTensor``, read as they are: PyTorch's packed layout (``aten._convert_weight_to_int4pack``, 8 inner tiles),
int32 (N / 8, K / 128, 32, 4), with groups of columns that have a scale and a zero each, bf16 (K / group, N, 2). A weight is
(code - 8) * scale + zero, rounded to x's dtype. K and N may be padded with zeros.
"""

from __future__ import annotations

from typing import Any

import torch

from quire.attn_ops.kernels import host
from quire.attn_ops.kernels.launch import launch
from quire.attn_ops.tuning.launch_config import Config

#: A column block of the packed layout: K and the groups are multiples of it.
INT4_COLUMNS = 128


def launch_wide(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, n: int, bias: torch.Tensor | None,
                res: torch.Tensor | None, config: Config, pdl: bool) -> torch.Tensor:
    """x (M, K), weight (N, K) of codes with scale (N,), or packed int4 with its scales and zeros -> (M, N).

    Args:
        config: with ``block_m`` > 0. K must be a multiple of ``block_k``, that of 64 (``fits_wide``).
    """
    m, k = x.shape
    kernels = host.kernel_module("kernels.small_linear_wide")
    stride_r = res.stride(0) if res is not None else 0
    out = x.new_empty(m, n)
    splits = min(config.splits, k // config.block_k)
    parts = splits > 1
    target = x.new_empty(splits, m, n, dtype=torch.float32) if parts else out
    grid = (-(-n // config.block_n), -(-m // config.block_m), splits)
    options: dict[str, Any] = {"BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "PARTS": parts, "pdl": pdl,
                               "num_warps": config.num_warps, "num_stages": config.num_stages}
    if weight.dtype == torch.int32:
        scales = scale.view(torch.int32)  # a scale and a zero per word
        launch(kernels.int4_kernel, grid, x, weight.view(torch.uint8), scales, bias, res, target, m, n, k, weight.stride(0) * 4,
               x.stride(0), stride_r, GROUP=k_of(weight) // scale.shape[0], **options)
        scale = None  # type: ignore[assignment]
    else:
        x = _turned(x, pdl) if config.turned == 2 else x
        launch(kernels.wide_kernel, grid, x, weight, scale, bias, res, target, m, n, k, weight.stride(0), x.stride(0), stride_r,
               BLOCK_K=config.block_k, TURNED=config.turned, **options)
    if parts:
        launch(host.kernel_module("kernels.small_linear").add_up_kernel, (-(-n // 256), -(-m // 4)), target, scale, bias, res,
               out, m, n, stride_r, BLOCK_M=4, BLOCK_N=256, SPLITS=splits, pdl=pdl)
    return out


def _turned(x: torch.Tensor, pdl: bool) -> torch.Tensor:
    """x in the kernel's order of columns, see its NOTE [Columns in another order]."""
    m, k = x.shape
    out = x.new_empty(m, k)
    launch(host.kernel_module("kernels.small_linear_wide").turn_kernel, (m, -(-k // 1024)), x, out, k, x.stride(0),
           BLOCK_K=1024, pdl=pdl, num_warps=4)
    return out


def fits_wide(k: int, config: Config) -> bool:
    """Whether the kernel can run with these parameters: it has no masks for columns."""
    return config.block_m > 0 and k % config.block_k == 0 and config.block_k % 64 == 0


def k_of(weight: torch.Tensor) -> int:
    """Columns of a packed int4 weight, with padding."""
    return int(weight.shape[1]) * INT4_COLUMNS


def unpacked(weight: torch.Tensor, scale_and_zero: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A packed int4 weight as (N, K) of ``dtype``, with padding. See NOTE [int4 tiles] in the kernels' file."""
    blocks_n, blocks_k = weight.shape[:2]
    each = torch.arange(0, 32, 4, dtype=torch.int32, device=weight.device)
    codes = (weight.unsqueeze(-1) >> each) & 15  # (N/8, K/128, 32, 4, 8), the last: first bit, half of 16 columns, pair of 8
    codes = codes.view(blocks_n, blocks_k, 8, 4, 4, 2, 2, 2)  # row, c, word w, f, b, high half
    codes = codes.permute(0, 2, 1, 4, 6, 7, 3, 5).reshape(blocks_n * 8, blocks_k * INT4_COLUMNS)
    groups = scale_and_zero.float().unbind(-1)
    scale, zero = (g.t().repeat_interleave(codes.shape[1] // g.shape[0], 1) for g in groups)
    return ((codes - 8).float() * scale + zero).to(dtype)


def launch_unpack(weight: torch.Tensor, scale_and_zero: torch.Tensor, k: int, dtype: torch.dtype) -> torch.Tensor:
    """``unpacked`` by a kernel, the first k columns."""
    n = scale_and_zero.shape[1]
    out = weight.new_empty(n, k, dtype=dtype)
    launch(host.kernel_module("kernels.small_linear_wide").unpack_kernel, (-(-n // 64), k // INT4_COLUMNS),
           weight.view(torch.uint8), scale_and_zero.view(torch.int32), out, n, k, weight.stride(0) * 4,
           GROUP=k_of(weight) // scale_and_zero.shape[0], BLOCK_N=64, num_warps=4)
    return out


__all__ = ["INT4_COLUMNS", "fits_wide", "k_of", "launch_unpack", "launch_wide", "unpacked"]
