"""Linear layers with quantized weights by ``attn_ops/kernels/small_linear_wide.py``, for ``small_linear``.

``launch_wide`` runs int8, fp8 and int4 weights for up to some hundred tokens. int4 weights are those of torchao's
``Int4TilePackedTo4dTensor``, read as they are: PyTorch's packed layout (``aten._convert_weight_to_int4pack``, 8 inner tiles),
int32 (N / 8, K / 128, 32, 4), with groups of columns that have a scale and a zero each, bf16 (K / group, N, 2). A weight is
(code - 8) * scale + zero, rounded to x's dtype. K and N may be padded with zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from quire.attn_ops.kernels import host
from quire.attn_ops.kernels.launch import launch
from quire.attn_ops.tuning.launch_config import Config

#: A column block of the packed layout: K and the groups are multiples of it.
INT4_COLUMNS = 128


def is_int4(weight: Tensor) -> bool:
    return weight.dtype == torch.int32


def rows_of(weight: Tensor) -> int:
    """N of a weight, packed or not."""
    return weight.shape[0] * (8 if is_int4(weight) else 1)


def launch_wide(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, res: Tensor | None, config: Config, pdl: bool,
                pairs: bool, widths: Sequence[int] = ()) -> Tensor:
    """x (M, K), weight (N, K) of codes with scale (N,), or packed int4 with its scales and zeros -> (M, N).

    Args:
        config: with ``block_m`` > 0, that ``fits_wide``.
        pairs: whether what follows another launch of this call is launched with PDL; ``pdl``: whether the first is.
        widths: of int4 layers that are fused, the N of each; see ``unpacked``.
    """
    (m, k), n = x.shape, rows_of(weight)
    kernels = host.kernel_module("kernels.small_linear_wide")
    stride_r = res.stride(0) if res is not None else 0
    out = x.new_empty(m, n)
    splits = min(config.splits, k // config.block_k)
    parts, turns = splits > 1, config.turned == 2 and not is_int4(weight)
    target = x.new_empty(splits, m, n, dtype=torch.float32) if parts else out
    grid = (-(-m // config.block_m), -(-n // config.block_n), splits)
    options: dict[str, Any] = {"BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "PARTS": parts,
                               "pdl": pairs if parts or turns else pdl, "dependent": pdl or turns,
                               "num_warps": config.num_warps, "num_stages": config.num_stages}
    if is_int4(weight):
        given, groups = _int4_arguments(weight, scale, widths)
        launch(kernels.int4_kernel, grid, x, *given, bias, res, target, m, n, k, weight.stride(0) * 4, x.stride(0), stride_r,
               **groups, **options)
    else:
        x = turn_columns(x, pdl, pairs) if turns else x
        launch(kernels.wide_kernel, grid, x, weight, scale, bias, res, target, m, n, k, weight.stride(0), x.stride(0), stride_r,
               BLOCK_K=config.block_k, TURNED=config.turned, **options)
    if parts:
        launch(host.kernel_module("kernels.small_linear").add_up_kernel, (-(-n // 256), -(-m // 4)), target,
               None if is_int4(weight) else scale, bias, res, out, m, n, stride_r, None, BLOCK_M=4, BLOCK_N=256, SPLITS=splits,
               pdl=pairs)
    return out


def _int4_arguments(weight: Tensor, scale: Tensor, widths: Sequence[int]) -> tuple[tuple[Tensor, Tensor], dict[str, Any]]:
    """(bytes, words of a scale and a zero), and the kernels' arguments on groups."""
    groups = scale.numel() // (2 * rows_of(weight))
    return ((weight.view(torch.uint8), scale.view(torch.int32)),
            {"groups": groups, "GROUP": weight.shape[1] * INT4_COLUMNS // groups, "WIDTHS": tuple(widths)})


def turn_columns(x: Tensor, pdl: bool, pairs: bool) -> Tensor:
    """x in the kernel's order of columns, see its NOTE [Columns in another order]."""
    m, k = x.shape
    out = x.new_empty(m, k)
    launch(host.kernel_module("kernels.small_linear_wide").turn_kernel, (m, -(-k // 1024)), x, out, k, x.stride(0),
           BLOCK_K=1024, pdl=pairs, dependent=pdl, num_warps=4)
    return out


def fits_wide(k: int, config: Config) -> bool:
    """Whether the kernel can run with these parameters: it has no masks for columns."""
    return config.block_m > 0 and k % config.block_k == 0 and config.block_k % 64 == 0


def unpacked(weight: Tensor, scale: Tensor, dtype: torch.dtype, widths: Sequence[int] = ()) -> Tensor:
    """A packed int4 weight as (N, K) of ``dtype``, with padding. See NOTE [int4 tiles] in the kernels' file.

    Args:
        scale: scales and zeros, (groups, N, 2). With ``widths``, the N of each of several layers whose weights are end to end
            along dim 0: theirs, each as (groups, N, 2), one after the other, as (groups * N, 2).
    """
    blocks_n, blocks_k = weight.shape[:2]
    bits = torch.arange(0, 32, 4, dtype=torch.int32, device=weight.device)
    codes = (weight.unsqueeze(-1) >> bits) & 15
    codes = codes.view(blocks_n, blocks_k, 8, 4, 4, 2, 2, 2)  # row, c, word w, f, b, half: the bits of a word from the lowest
    codes = codes.permute(0, 2, 1, 4, 6, 7, 3, 5).reshape(blocks_n * 8, blocks_k * INT4_COLUMNS)
    rows, columns = codes.shape
    groups = scale.numel() // (2 * rows)
    pairs = scale.reshape(-1, 2).float().split([groups * width for width in widths or (rows,)])
    of_rows = torch.cat([p.view(groups, -1, 2) for p in pairs], 1).permute(2, 1, 0).repeat_interleave(columns // groups, 2)
    return ((codes - 8).float() * of_rows[0] + of_rows[1]).to(dtype)


def launch_unpack(weight: Tensor, scale: Tensor, k: int, dtype: torch.dtype, widths: Sequence[int] = ()) -> Tensor:
    """``unpacked`` by a kernel, the first k columns."""
    n = rows_of(weight)
    out = weight.new_empty(n, k, dtype=dtype)
    given, groups = _int4_arguments(weight, scale, widths)
    launch(host.kernel_module("kernels.small_linear_wide").unpack_kernel, (-(-n // 64), k // INT4_COLUMNS), *given, out, n, k,
           weight.stride(0) * 4, **groups, BLOCK_N=64, num_warps=4)
    return out
