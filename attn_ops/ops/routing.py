"""Routers of experts. ``torch.ops.quire.topk_rows``: the largest numbers of short rows. ``torch.ops.quire.route_rows``: a
token's experts and their weights from the router's logits.

``torch.topk`` on CUDA takes two kernels: 9 us for a token and 67 us for 8192 tokens of 128 experts on an H200
(benchmarks/results/h200_profile_qwen3-30b-a3b.json). Scores, groups and normalization around it are one to eight kernels more.
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
MAX_GROUPS = 16
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


def route_rows_eager(logits: Tensor, bias: Tensor | None, k: int, sigmoid: bool, normalize: bool, eps: float, groups: int,
                     top_groups: int, group_best: int) -> tuple[Tensor, Tensor]:
    """The definition: the experts of each row of logits (..., E) and their weights: (..., k) float32, (..., k) int64.

    A logit's score is its part of the softmax, in float32, or its sigmoid. The k experts are those with the largest choice, in
    descending order: the logit, which softmax keeps in order, or sigmoid + bias. So for softmax no rounding of an exponential
    decides; of equal choices the lower index is first, and NaN is the largest. Weights are the scores.

    Args:
        bias: (E,), added for the choice only; with ``sigmoid``.  normalize: divide by the sum of the k weights and ``eps``.
        groups: experts in equal groups, of which only the ``top_groups`` with the largest sums of their ``group_best`` largest
            choices are chosen from; 1: no groups.

    Raises ValueError for k larger than the groups chosen from, E no multiple of groups, and a bias for softmax.
    """
    experts = logits.shape[-1]
    _check_route(experts, bias, k, sigmoid, groups, top_groups, group_best)
    x = logits.float()
    scores = x.sigmoid() if sigmoid else x.softmax(-1)
    choice = x if not sigmoid else scores if bias is None else scores + bias.float()
    order = choice.sort(dim=-1, descending=True, stable=True).indices
    if groups > 1:
        best = topk_rows_eager(choice.unflatten(-1, (groups, -1)), group_best)[0].sum(-1)
        chosen = topk_rows_eager(best, top_groups)[1]
        allowed = torch.zeros_like(best, dtype=torch.bool).scatter(-1, chosen, True).repeat_interleave(experts // groups, -1)
        order = order.gather(-1, allowed.gather(-1, order).int().sort(dim=-1, descending=True, stable=True).indices)
    ids = order[..., :k].contiguous()
    weights = scores.gather(-1, ids)
    return weights / (weights.sum(-1, keepdim=True) + eps) if normalize else weights, ids


def _check_route(experts: int, bias: Tensor | None, k: int, sigmoid: bool, groups: int, top_groups: int, group_best: int
                 ) -> None:
    torch._check_value(groups >= 1 and experts % groups == 0 and 0 < top_groups <= groups
                       and 0 < group_best <= experts // groups and 0 < k <= top_groups * (experts // groups), lambda: (
        f"route_rows: k={k} of {top_groups} of {groups} groups of {experts} experts, by the {group_best} best of each"))
    torch._check_value(bias is None or (sigmoid and bias.shape == (experts,)), lambda: (
        f"route_rows takes a bias ({experts},) with sigmoid only"))


def route_rows_cuda(logits: Tensor, bias: Tensor | None, k: int, sigmoid: bool, normalize: bool, eps: float, groups: int,
                    top_groups: int, group_best: int) -> tuple[Tensor, Tensor]:
    """The op on CUDA, as one kernel; exponentials may differ in the last bits. Runs the definition outside its range."""
    experts = logits.shape[-1]
    _check_route(experts, bias, k, sigmoid, groups, top_groups, group_best)
    if logits.dtype not in KERNEL_DTYPES or k > MAX_K or experts > MAX_ROW or groups > MAX_GROUPS or not logits.numel():
        return route_rows_eager(logits, bias, k, sigmoid, normalize, eps, groups, top_groups, group_best)
    rows = host.rows_contiguous(logits.reshape(-1, experts))
    weights, ids = _route_fake(logits, bias, k)
    launch(host.kernel_module("kernels.routing").route_kernel, (len(rows),), rows, None if bias is None else bias.contiguous(),
           weights, ids, rows.stride(0), eps, experts, k, sigmoid, normalize, groups, top_groups, group_best,
           BLOCK_E=next_power_of_2(experts, 32), pdl=host.use_pdl(logits.device, len(rows)), num_warps=1)
    return weights, ids


def _route_fake(logits: Tensor, bias: Tensor | None, k: int, *rest: object) -> tuple[Tensor, Tensor]:
    shape = (*logits.shape[:-1], k)
    return logits.new_empty(shape, dtype=torch.float32), logits.new_empty(shape, dtype=torch.int64)


route_rows = define_op(
    "route_rows(Tensor logits, Tensor? bias, int k, bool sigmoid, bool normalize, float eps, int groups, int top_groups, "
    "int group_best) -> (Tensor, Tensor)", cpu=route_rows_eager, cuda=route_rows_cuda, fake=_route_fake, launches=True)
