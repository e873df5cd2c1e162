"""Low-rank products of several adapters, each token with adapters of its own: ``torch.ops.quire.lora_rows``.

Legend: T tokens, K and N the layer's inputs and outputs, r the rank of an adapter.

LoRA (Hu et al., 2021) adds ``B A x * scaling`` to a linear layer's ``W x``. Here the sum is over the adapters of each token,
which the step in progress has (``Step.adapters``): a graph takes the same inputs whatever the requests of a batch ask for. The
adapters' own parameters are read, so changes in place are seen. On a GPU each adapter costs two products for all tokens,
whoever uses it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.attn_ops.library import define_op
from quire.attn_ops.step import current_step

#: Bits of the int64 numbers in ``Step.adapters``, the sign left out.
MAX_ADAPTERS = 63


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
    step = current_step()
    if step is None or step.adapters is None:
        raise RuntimeError("lora_rows: the step does not say which adapters its tokens have; set Step.adapters")
    rows = step.adapters[: x.shape[1]]
    result = base.clone()
    for down, up, scale, bit in zip(a, b, scaling, bits, strict=True):
        on = ((rows & bit) != 0)[None, :, None]
        if not base.is_cuda and not bool(on.any()):
            continue
        x = x.to(down.dtype)
        result = torch.where(on, result + F.linear(F.linear(x, down), up) * scale, result)
    return result.to(base.dtype)


def _fake(base: Tensor, x: Tensor, a: Sequence[Tensor], b: Sequence[Tensor], scaling: Sequence[float], bits: Sequence[int]
          ) -> Tensor:
    return torch.empty_like(base)


lora_rows = define_op("lora_rows(Tensor base, Tensor x, Tensor[] a, Tensor[] b, float[] scaling, int[] bits) -> Tensor",
                      cpu=lora_rows_eager, cuda=lora_rows_eager, fake=_fake)

__all__ = ["MAX_ADAPTERS", "lora_rows", "lora_rows_eager"]
