"""Merge attention over disjoint sets of keys: ``torch.ops.quire.merge_state`` and ``merge_states``.

Attention over a set of keys is a *state*: the normalized output and the log-sum-exp (natural logarithm) of its scaled logits.
The state over the union of disjoint sets follows from the states alone (Dao et al., "FlashAttention", 2022, section 3.1)::

    m = max(lse_i)     lse = m + log(sum exp(lse_i - m))     out = sum exp(lse_i - lse) out_i

A state with an lse of -inf has no keys; +inf, which some kernels write for it, means the same. Its output is not read: memory
there may hold anything. Where no state has keys, the result is 0 with lse -inf. A NaN in an lse makes the result NaN.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from quire.attn_ops.kernels.host import kernel_module, next_power_of_2, rows_contiguous
from quire.attn_ops.kernels.launch import launch
from quire.attn_ops.library import define_op

#: Pairs of token and head from which a program takes several: these fill any GPU then, and are too many to start one by one.
MANY_ROWS = 1 << 14


def _check(out: Tensor, lse: Tensor, states: bool) -> None:
    want = 4 if states else 3
    shape = "(T, S, H, D) and (T, S, H)" if states else "(T, H, D) and (T, H)"
    torch._check_value(out.dim() == want and out.shape[:-1] == lse.shape and lse.dtype == torch.float32, lambda: (
        f"states are outputs and float32 lse of shapes {shape}; got {tuple(out.shape)} and {tuple(lse.shape)} {lse.dtype}"))


def _check_two(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> None:
    for out, lse in ((out_a, lse_a), (out_b, lse_b)):
        _check(out, lse, states=False)
    torch._check_value(out_a.shape == out_b.shape and out_a.dtype == out_b.dtype, lambda: (
        f"two states of one batch have the same shape and dtype; got {tuple(out_a.shape)} {out_a.dtype} and "
        f"{tuple(out_b.shape)} {out_b.dtype}"))


def log_sum_exp(scores: Tensor) -> Tensor:
    """The lse (..., 1) of a state with these logits (..., N). NaN in place of +inf, which would say that it has no keys: a
    state with such a logit must not be lost when it is merged."""
    total = torch.logsumexp(scores, -1, keepdim=True)
    return total.masked_fill(total == float("inf"), float("nan"))


def merge_states_eager(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    _check(out, lse, states=True)
    lse = lse.masked_fill(lse == float("inf"), float("-inf"))
    total = torch.logsumexp(lse, dim=1) if lse.shape[1] else lse.new_full((lse.shape[0], lse.shape[2]), float("-inf"))
    weights = torch.exp(lse - total.masked_fill(total == float("-inf"), 0.0)[:, None])
    empty = (lse == float("-inf"))[..., None]
    merged = (out.float().masked_fill(empty, 0.0) * weights[..., None]).sum(1)
    return merged.to(out.dtype), total


def merge_state_eager(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    _check_two(out_a, lse_a, out_b, lse_b)
    return merge_states_eager(torch.stack([out_a, out_b], 1), torch.stack([lse_a, lse_b], 1))


def merge_states_triton(out: Tensor, lse: Tensor, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """``merge_states`` as one kernel. ``dtype``: of the merged output; None: as ``out``."""
    _check(out, lse, states=True)
    merged = out.new_empty(out.shape[0], *out.shape[2:], dtype=dtype)
    total = lse.new_empty(lse.shape[0], lse.shape[2])
    out, lse = rows_contiguous(out), rows_contiguous(lse)
    _launch((out, out), (lse, lse), out.shape[1], [out.stride()[:3]] * 2, [lse.stride()[:2]] * 2, merged, total)
    return merged, total


def merge_state_triton(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, merged: Tensor | None = None,
                       binary: bool = False) -> tuple[Tensor, Tensor]:
    """``merge_state`` as one kernel. ``merged``: what the output is written to, contiguous and no part of the states; None:
    fresh memory. ``binary``: all logarithms, the result's too, are to base 2, as FlashInfer's."""
    _check_two(out_a, lse_a, out_b, lse_b)
    if merged is None:
        merged = out_a.new_empty(out_a.shape)
    elif merged.shape != out_a.shape or merged.dtype != out_a.dtype or not merged.is_contiguous():
        raise ValueError(f"the merged output is contiguous and like the states, {tuple(out_a.shape)} {out_a.dtype}; got "
                         f"{tuple(merged.shape)} {merged.dtype} with strides {merged.stride()}")
    total = lse_a.new_empty(lse_a.shape)
    outs, lses = (rows_contiguous(out_a), rows_contiguous(out_b)), (rows_contiguous(lse_a), rows_contiguous(lse_b))
    strides, lse_strides = [(x.stride(0), 0, x.stride(1)) for x in outs], [(x.stride(0), 0) for x in lses]
    _launch(outs, lses, 2, strides, lse_strides, merged, total, binary)
    return merged, total


def _launch(outs: tuple[Tensor, Tensor], lses: tuple[Tensor, Tensor], states: int, strides: list[Any], lse_strides: list[Any],
            merged: Tensor, total: Tensor, binary: bool = False) -> None:
    """State 0 is read from the first tensors, the others from the second ones; strides are (token, state, head)."""
    tokens, heads, dim = merged.shape
    if not total.numel():
        return
    width, count = next_power_of_2(dim), tokens * heads
    step = max(1, min(next_power_of_2(states), 32, 4096 // width))
    rows = max(1, 4096 // (step * width)) if count >= MANY_ROWS else 1
    launch(kernel_module("kernels.merge_state").merge_kernel, (-(-count // rows),), *outs, *lses, merged, total, states, count,
           heads, *strides, *lse_strides, dim, step, rows, binary, num_warps=1 if rows * step * width <= 512 else 4)


def _states_fake(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    _check(out, lse, states=True)
    return out.new_empty(out.shape[0], *out.shape[2:]), lse.new_empty(lse.shape[0], lse.shape[2])


define_op("merge_states(Tensor out, Tensor lse) -> (Tensor, Tensor)", cpu=merge_states_eager, cuda=merge_states_triton,
          fake=_states_fake, launches=True)
define_op("merge_state(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b) -> (Tensor, Tensor)", cpu=merge_state_eager,
          cuda=merge_state_triton,
          fake=lambda out, lse, *_: (out.new_empty(out.shape), lse.new_empty(lse.shape)), launches=True)


def merge_states(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Merge S attention states over disjoint keys: out (T, S, H, D), lse (T, S, H) float32 natural logarithm -> (T, H, D) in
    out's dtype, (T, H) float32. ``torch.ops.quire.merge_states``. A state with lse -inf or +inf has no keys, and its output is
    not read. Without any keys the result is 0 and -inf. Raises ValueError for shapes that do not go together, or an lse that is
    not float32."""
    return torch.ops.quire.merge_states(out, lse)


def merge_state(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """``merge_states`` of two, out (T, H, D) and lse (T, H) float32 each -> (T, H, D), (T, H). ``torch.ops.quire.merge_state``.
    Raises ValueError as ``merge_states``, and for two outputs of different shapes or dtypes."""
    return torch.ops.quire.merge_state(out_a, lse_a, out_b, lse_b)
