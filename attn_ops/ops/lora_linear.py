"""A linear layer with LoRA's adapters in one launch, for small batches: ``torch.ops.quire.lora_linear``.

Legend: T tokens, K and N the inputs and outputs of the layer, r the rank of an adapter.

LoRA (Hu et al., 2021) adds ``B A x * scaling`` to ``W x``. The first products, ``A x``, are computed by programs of the
kernel that computes ``W x`` (``small_linear``, which folds in the norm before the layer, SwiGLU and the residual); its others
wait for them and add ``B A x``: see NOTE [First products in the same launch] in attn_ops/kernels/lora.py. The adapters' own
parameters are read, so changes in place are seen.

In half precision on CUDA, for up to small_linear's MAX_TOKENS tokens; elsewhere the op runs its eager definition.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.attn_ops.kernels import host
from quire.attn_ops.library import define_op
from quire.attn_ops.ops.lora_rows import adapters_fit, adapters_for, lora_rows_eager
from quire.attn_ops.ops.small_linear import MAX_TOKENS, norm_apart, small_linear_cuda


def lora_linear_eager(
    x: Tensor, weight: Tensor, bias: Tensor | None, norm_weight: Tensor | None, eps: float, residual: Tensor | None,
    swiglu: bool, a: Sequence[Tensor], b: Sequence[Tensor], starts: Sequence[int], scaling: Sequence[float],
    bits: Sequence[int], counters: Tensor | None = None,
) -> Tensor:
    """The definition: x (1, T, K) -> (1, T, N), or (1, T, N / 2) with ``swiglu``.

    Args:
        weight, bias, norm_weight, eps, residual, swiglu: as of ``small_linear_eager``, without a scale.
        a, b, scaling, bits: of each adapter, as of ``lora_rows_eager``.
        starts: the first row of ``weight`` that the adapter's b (N_i, r_i) adds to.
        counters: (2,) int32, zeros before and after, for kernels that follow each other: ``lora_counters``. None: others.

    Raises:
        RuntimeError: the step does not say which adapters its tokens have, and an adapter is not that of every token.
    """
    if norm_weight is not None:
        wide = x.float()
        x = norm_weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)
    out = F.linear(x, weight, bias)
    for start in sorted(set(starts)):
        mine = [i for i, at in enumerate(starts) if at == start]
        part = out[..., start : start + b[mine[0]].shape[0]]
        part.copy_(lora_rows_eager(part, x, [a[i] for i in mine], [b[i] for i in mine], [scaling[i] for i in mine],
                                   [bits[i] for i in mine]))
    if swiglu:
        gate, up = out.chunk(2, dim=-1)
        out = F.silu(gate) * up
    return out if residual is None else residual + out


def lora_linear_cuda(
    x: Tensor, weight: Tensor, bias: Tensor | None, norm_weight: Tensor | None, eps: float, residual: Tensor | None,
    swiglu: bool, a: Sequence[Tensor], b: Sequence[Tensor], starts: Sequence[int], scaling: Sequence[float],
    bits: Sequence[int], counters: Tensor | None = None, pdl: bool | None = None,
) -> Tensor:
    """The op on CUDA: ``W x`` is rounded to x's dtype before the adapters' part, in float32, is added, as in PEFT. Runs the
    definition outside the kernels' range. ``pdl``: as of ``small_linear_cuda``."""
    alike = all(t is None or t.dtype == x.dtype for t in (weight, bias, norm_weight, residual)) \
        and all(up.dtype in (x.dtype, torch.float32) for up in b)
    if not adapters_fit(x, a, b) or not 0 < x.shape[1] <= MAX_TOKENS or x.dtype not in (torch.bfloat16, torch.float16) \
            or weight.stride(1) != 1 or not alike:
        return lora_linear_eager(x, weight, bias, norm_weight, eps, residual, swiglu, a, b, starts, scaling, bits)
    t = x.shape[1]
    norm_weight = None if norm_weight is None else norm_weight.contiguous()
    x2, norm_weight = norm_apart(host.rows_contiguous(x[0]), norm_weight, eps, host.use_pdl(x.device, t))
    x, counters = x2[None], lora_counters_eager(x) if counters is None else counters
    # For one token a program has whole sums of few ranks; else many ranks and a part of the columns, as long as it takes less
    # time than a program of the weight.
    lora, _ = adapters_for(x, a, b, starts, scaling, bits, 1 if t == 1 else max(1, min(x.shape[2] // 1024, 4)), counters)
    return small_linear_cuda(x, weight, bias, norm_weight, eps, residual, swiglu, pdl=pdl, lora=lora)


def lora_counters_eager(like: Tensor) -> Tensor:
    """(2,) int32 zeros on the device of ``like``: the ``counters`` of all the layers of a forward, made once."""
    return torch.zeros(2, dtype=torch.int32, device=like.device)


def _fake(
    x: Tensor, weight: Tensor, bias: Tensor | None, norm_weight: Tensor | None, eps: float, residual: Tensor | None,
    swiglu: bool, a: Sequence[Tensor], b: Sequence[Tensor], starts: Sequence[int], scaling: Sequence[float],
    bits: Sequence[int], counters: Tensor | None = None,
) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0] // (2 if swiglu else 1))


lora_linear = define_op(
    "lora_linear(Tensor x, Tensor weight, Tensor? bias, Tensor? norm_weight, float eps, Tensor? residual, bool swiglu, "
    "Tensor[] a, Tensor[] b, int[] starts, float[] scaling, int[] bits, Tensor? counters=None) -> Tensor",
    cpu=lora_linear_eager, cuda=lora_linear_cuda, fake=_fake, launches=True)
lora_counters = define_op("lora_counters(Tensor like) -> Tensor", cpu=lora_counters_eager, cuda=lora_counters_eager,
                          fake=lora_counters_eager)

__all__ = ["lora_counters", "lora_counters_eager", "lora_linear", "lora_linear_cuda", "lora_linear_eager"]
