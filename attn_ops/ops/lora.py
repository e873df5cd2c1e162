"""The second half of LoRA's layers (Hu et al., 2021) and the sums, in one kernel: ``torch.ops.quire.lora_expand``.

A layer with an adapter is ``W x + s * B (A x)``. The first products of sibling layers are one product
(``passes/fusions/projections.py``); what is left of each is small, and of q, k and v it would take nine launches. The kernel is
for bf16 and fp16 on CUDA, up to MAX_TOKENS tokens, MAX_SEGMENTS layers and rank MAX_RANK; else the op runs its eager
definition, which is also the reference.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from quire.attn_ops.kernels import host
from quire.attn_ops.kernels.host import next_power_of_2
from quire.attn_ops.kernels.launch import launch
from quire.attn_ops.library import define_op

MAX_TOKENS, MAX_SEGMENTS, MAX_RANK = 32, 3, 128


def lora_expand_eager(
    base: torch.Tensor, shrunk: torch.Tensor, b: torch.Tensor, sizes: Sequence[int], base_starts: Sequence[int],
    shrunk_starts: Sequence[int], scalings: Sequence[float], residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """The definition: (..., N), the results of the layers end to end, of N_i columns each.

    Args:
        base: (..., C), with ``W_i x`` of layer i in the columns from base_starts[i] on.
        shrunk: (..., D), with ``A_i x`` in the columns from shrunk_starts[i] on; maybe the same tensor.
        b: (N, R), the B of the layers end to end.
        sizes: N_i, which add up to N. scalings: s_i.
        residual: (..., N), added last.
    """
    rank = b.shape[1]
    parts = [base[..., at : at + size] + F.linear(shrunk[..., low : low + rank], rows) * scaling
             for rows, size, at, low, scaling in zip(b.split(list(sizes)), sizes, base_starts, shrunk_starts, scalings,
                                                     strict=True)]
    out = torch.cat(parts, dim=-1)
    return out if residual is None else residual + out


def lora_expand_cuda(
    base: torch.Tensor, shrunk: torch.Tensor, b: torch.Tensor, sizes: Sequence[int], base_starts: Sequence[int],
    shrunk_starts: Sequence[int], scalings: Sequence[float], residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """The op on CUDA. Runs the definition outside the kernel's range."""
    n, rank = b.shape
    m = base.numel() // max(1, base.shape[-1])
    if not (0 < m <= MAX_TOKENS and 0 < len(sizes) <= MAX_SEGMENTS and 0 < rank <= MAX_RANK and b.is_contiguous()) \
            or base.dtype not in (torch.bfloat16, torch.float16) \
            or any(t is not None and t.dtype != base.dtype for t in (shrunk, b, residual)):
        return lora_expand_eager(base, shrunk, b, sizes, base_starts, shrunk_starts, scalings, residual)
    base2, shrunk2 = (host.rows_contiguous(t.reshape(m, t.shape[-1])) for t in (base, shrunk))
    res = None if residual is None else host.rows_contiguous(residual.reshape(m, n))
    out = base.new_empty(*base.shape[:-1], n)
    block_m, block_n = (16 if m <= 16 else 32), 64
    launch(host.kernel_module("kernels.lora").expand_kernel,
           (sum(-(-size // block_n) for size in sizes), -(-m // block_m)), base2, shrunk2, b, res, out, m, n, base2.stride(0),
           shrunk2.stride(0), 0 if res is None else res.stride(0), tuple(sizes), tuple(base_starts), tuple(shrunk_starts),
           tuple(map(float, scalings)), RANK=rank, SEGMENTS=len(sizes), BLOCK_M=block_m, BLOCK_N=block_n,
           BLOCK_R=next_power_of_2(rank, 16), pdl=host.use_pdl(base.device, m), num_warps=4)
    return out


def _fake(base: torch.Tensor, shrunk: torch.Tensor, b: torch.Tensor, sizes: Sequence[int], base_starts: Sequence[int],
          shrunk_starts: Sequence[int], scalings: Sequence[float], residual: torch.Tensor | None = None) -> torch.Tensor:
    return base.new_empty(*base.shape[:-1], b.shape[0])


lora_expand = define_op(
    "lora_expand(Tensor base, Tensor shrunk, Tensor b, int[] sizes, int[] base_starts, int[] shrunk_starts, float[] scalings, "
    "Tensor? residual=None) -> Tensor", cpu=lora_expand_eager, cuda=lora_expand_cuda, fake=_fake, launches=True)
