"""Linear layers of a mixture of experts. ``torch.ops.quire.expert_linear``: each row times the weight of its expert.

Legend: T tokens with k experts each, S = T * k pairs of a token and an expert, E experts, weights (E, N, K).

Few pairs (a decode batch): one launch. The time is the bytes of the weights in use, so each of them is read once, for all its
pairs, and nothing sorts them first: each program searches the S ids for its expert's, about a microsecond next to the twenty
or so for a few hundred KiB of weight.

More pairs (a large batch, prefill): they are sorted by expert on the device, and a second launch runs over tiles of the sorted
pairs. Where arithmetic is the bottleneck, PyTorch's grouped GEMM is used, in bf16 and on the GPUs that have one.

The host reads nothing, and launches follow from shapes alone, so all of it can be captured in a CUDA graph.

Limits: bf16, fp16 and fp32 on CUDA; on other devices and in other dtypes the op runs its eager definition, which is also the
reference.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from quire.attn_ops.kernels import host
from quire.attn_ops.kernels.host import next_power_of_2, rows_contiguous
from quire.attn_ops.kernels.launch import launch
from quire.attn_ops.library import define_op

#: Maximum pairs, and pairs per expert, for the single launch (estimated, not measured). Above, a program would search the ids
#: for more than a tenth of its time, or read the weight again for a third tile of pairs; and an expert with more than a
#: hundred pairs is bound by arithmetic, not by bytes, on an H200.
MAX_PAIRS, MAX_PAIRS_PER_EXPERT = 1024, 32
#: Minimum pairs per expert for torch's grouped GEMM (estimated, not measured). Below, the weights' bytes take the time, and
#: gathering rows for it and scattering them are launches that our kernel does not need.
MIN_PAIRS_PER_EXPERT_GROUPED = 64
#: Maximum pairs that our kernel sorts: one launch in which each expert's program reads all of them.
MAX_COUNTED = 16384
KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
#: Elements of weights that the definition gathers at a time.
_GATHERED = 1 << 24


def expert_linear_eager(x: Tensor, weight: Tensor, bias: Tensor | None, expert_ids: Tensor, transposed: bool) -> Tensor:
    """The definition: ``y[s] = x[s // (S / R)] @ weight[e].T + bias[e]`` with ``e = expert_ids.flatten()[s]``, summed in fp32.

    Args:
        x: (R, K). R divides S: a row per pair (R = S), or per token (R = T).
        weight: (E, N, K), or (E, K, N) if ``transposed``; of x's dtype.
        bias: (E, N), or None.
        expert_ids: (T, k) or (S,), of an integer dtype. The row of an id outside 0 .. E-1 is zeros.

    Returns:
        (S, N), in the order of the pairs, in x's dtype.

    Raises:
        ValueError: shapes or dtypes that do not match.
    """
    _check(x, weight, bias, expert_ids, transposed)
    ids = expert_ids.reshape(-1)
    experts, n = weight.shape[0], weight.shape[1 + transposed]
    out = x.new_empty(len(ids), n)
    if not out.numel():
        return out
    wide = torch.promote_types(x.dtype, torch.float32)
    repeat, known = len(ids) // len(x), (ids >= 0) & (ids < experts)
    safe = ids.where(known, 0).long()
    size = max(1, _GATHERED // max(1, weight[0].numel()))
    for start in range(0, len(ids), size):
        here = slice(start, start + size)
        rows = torch.arange(start, min(start + size, len(ids)), device=x.device) // repeat
        weights = weight[safe[here]].to(wide)
        y = torch.bmm(x[rows].to(wide)[:, None], weights if transposed else weights.mT)[:, 0]
        if bias is not None:
            y = y + bias[safe[here]].to(wide)
        out[here] = y.masked_fill(~known[here, None], 0.0).to(x.dtype)
    return out


def _check(x: Tensor, weight: Tensor, bias: Tensor | None, expert_ids: Tensor, transposed: bool) -> None:
    if x.dim() != 2 or weight.dim() != 3 or x.shape[1] != weight.shape[2 - transposed] or x.dtype != weight.dtype:
        raise ValueError(f"expert_linear: x {tuple(x.shape)} {x.dtype} does not match weights {tuple(weight.shape)} "
                         f"{weight.dtype}, transposed={transposed}")
    if bias is not None and (bias.shape != (weight.shape[0], weight.shape[1 + transposed]) or bias.dtype != x.dtype):
        raise ValueError(f"expert_linear: bias {tuple(bias.shape)} {bias.dtype} does not match weights {tuple(weight.shape)} "
                         f"of {weight.dtype}")
    pairs, rows = expert_ids.numel(), x.shape[0]
    if expert_ids.dtype.is_floating_point or expert_ids.dtype == torch.bool or (pairs % rows if rows else pairs):
        raise ValueError(f"expert_linear: {rows} rows do not match ids {tuple(expert_ids.shape)} {expert_ids.dtype}")


def _fake(x: Tensor, weight: Tensor, bias: Tensor | None, expert_ids: Tensor, transposed: bool) -> Tensor:
    return x.new_empty(expert_ids.numel(), weight.shape[2 if transposed else 1])


@dataclass(frozen=True)
class Tile:
    """Launch parameters: pairs, outputs and inputs per tile, warps, pipeline stages."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


def decode_tile(pairs: int, experts: int, n: int, k: int, dtype: torch.dtype) -> Tile:
    """The tile of ``pairs_kernel``.

    An H200 needs about 30 KiB of loads in flight on each of its 132 multiprocessors (4.8 TB/s times 0.8 us). 64 outputs are the
    fewest rows of Hopper's tensor core instructions, and make 192 programs for one token of Qwen3-30B-A3B's gate and up (8
    experts of 1536), 180 for GPT-OSS-20B's (4 experts, down 2880): one or two per multiprocessor, each with three or more
    stages of 8 to 16 KiB of weight in flight. 64 divides every N and K of the models in benchmarks/hopper_kernels.py.

    block_k, and so the order in which a row is summed, does not depend on the batch. block_m does: twice the average number of
    pairs per expert, so that most experts' weights are read for one tile of pairs.
    """
    block_m = min(64, max(16, next_power_of_2(-(-2 * pairs // experts))))
    if dtype == torch.float32:  # without tensor cores: for the numbers, not for speed
        return Tile(block_m, 32, 32, 4, 3)
    block_k = 128 if k % 128 == 0 else 64
    return Tile(block_m, 64, block_k, 4, (3 if block_m == 64 else 4) if block_k == 128 else 6)


def prefill_tile(pairs: int, experts: int, dtype: torch.dtype) -> Tile:
    """The tile of ``sorted_kernel``: bound by arithmetic, so large, but not much larger than the pairs per expert."""
    if dtype == torch.float32:
        return Tile(32, 32, 32, 4, 3)
    return Tile(128, 128, 64, 8, 3) if pairs >= 96 * experts else Tile(64, 128, 64, 4, 3)


def expert_linear_cuda(x: Tensor, weight: Tensor, bias: Tensor | None, expert_ids: Tensor, transposed: bool, *,
                       path: str | None = None, tile: Tile | None = None, pdl: bool | None = None) -> Tensor:
    """The op on CUDA. Runs the definition for dtypes that the kernels do not support.

    Args:
        path: "pairs", "sorted" or "grouped"; None: chosen by sizes and GPU. tile: None: chosen by sizes.
        pdl: see attn_ops/kernels/pdl.py; None: ``host.use_pdl``.
    """
    _check(x, weight, bias, expert_ids, transposed)
    w = weight.mT if transposed else weight  # (E, N, K)
    if x.dtype not in KERNEL_DTYPES or not expert_ids.numel() * w.shape[1] or (w.stride(2) != 1 and w.stride(1) != 1):
        return expert_linear_eager(x, weight, bias, expert_ids, transposed)
    ids = expert_ids.reshape(-1).contiguous()
    x = rows_contiguous(x)
    bias = bias.contiguous() if bias is not None else None
    pairs, experts = len(ids), len(w)
    if path is None:
        few = pairs <= MAX_PAIRS and pairs <= MAX_PAIRS_PER_EXPERT * experts
        many = pairs >= MIN_PAIRS_PER_EXPERT_GROUPED * experts and _has_grouped_mm(x, w)
        path = "pairs" if few else "grouped" if many else "sorted"
    pdl = host.use_pdl(x.device, pairs) if pdl is None else pdl
    if path == "grouped":
        return _grouped(x, w, bias, ids, pdl)
    return _launch(x, w, bias, ids, path, tile, pdl)


def _launch(x: Tensor, w: Tensor, bias: Tensor | None, ids: Tensor, path: str, tile: Tile | None, pdl: bool) -> Tensor:
    kernels = host.kernel_module("kernels.experts")
    pairs, (experts, n, k) = len(ids), w.shape
    out = x.new_empty(pairs, n)
    tile = tile or (decode_tile(pairs, experts, n, k, x.dtype) if path == "pairs" else prefill_tile(pairs, experts, x.dtype))
    options: dict[str, Any] = {
        "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k, "TRANSPOSED": w.stride(2) != 1,
        "EVEN_N": n % tile.block_n == 0, "EVEN_K": k % tile.block_k == 0,
        "PRECISION": "ieee" if x.dtype == torch.float32 else "tf32",  # tf32 would keep 10 bits of fp32; ignored for others
        "pdl": pdl, "num_warps": tile.num_warps, "num_stages": tile.num_stages}
    sizes = (pairs, n, k, experts, pairs // len(x), x.stride(0), *w.stride())
    blocks = -(-n // tile.block_n)
    if path == "pairs":
        by_pair = pairs <= experts  # fewer leaders than experts and one more for ids out of range
        launch(
            kernels.pairs_kernel, (blocks, pairs if by_pair else experts + 1),
            x, w, bias, ids, out, *sizes, BLOCK_S=max(16, 4096 // tile.block_m), BY_PAIR=by_pair, **options)
    else:
        order, ends = _sort(ids, experts, pdl)
        tiles = pairs // tile.block_m + min(experts + 1, pairs)  # each expert's last tile may be short
        launch(
            kernels.sorted_kernel, (tiles * blocks,),
            x, w, bias, order, ends, out, *sizes, BLOCK_E=next_power_of_2(experts + 1, 16), **options)
    return out


def _sort(ids: Tensor, experts: int, pdl: bool) -> tuple[Tensor, Tensor]:
    """(S,) int64: the pairs in the order of their experts, stable, ids out of range last; (E,) int32: the end of each
    expert's."""
    if len(ids) <= MAX_COUNTED:
        order, ends = ids.new_empty(len(ids), dtype=torch.int64), ids.new_empty(experts, dtype=torch.int32)
        launch(host.kernel_module("kernels.experts").order_kernel, (experts + 1,), ids, order, ends, len(ids), experts,
               BLOCK_S=1024, pdl=pdl, num_warps=4)
        return order, ends
    ordered, order = _known(ids, experts).sort(stable=True)
    return order, torch.searchsorted(ordered, torch.arange(experts, device=ids.device), right=True, out_int32=True)


def _known(ids: Tensor, experts: int) -> Tensor:
    """int64; E for an id out of range."""
    return ids.long().where((ids >= 0) & (ids < experts), experts)


def _grouped(x: Tensor, w: Tensor, bias: Tensor | None, ids: Tensor, pdl: bool) -> Tensor:
    """By PyTorch's grouped GEMM, which does not write rows past the last expert's; they are filled here."""
    experts = len(w)
    order, ends = _sort(ids, experts, pdl)
    product: Any = getattr(torch.nn.functional, "grouped_mm", None) or torch._grouped_mm
    y = product(x[order // (len(ids) // len(x))], w.mT, offs=ends)
    ordered = _known(ids, experts)[order]
    if bias is not None:
        y = y + bias[ordered.clamp(max=experts - 1)]
    out = torch.empty_like(y)
    out[order] = y.masked_fill((ordered == experts)[:, None], 0.0)
    return out


def _has_grouped_mm(x: Tensor, w: Tensor) -> bool:
    """Whether PyTorch's grouped GEMM is a kernel here: for other dtypes and GPUs it is a loop on the host, which reads the
    offsets. It loads 16 bytes at a time."""
    return (x.dtype == torch.bfloat16 and (hasattr(torch.nn.functional, "grouped_mm") or hasattr(torch, "_grouped_mm"))
            and torch.version.hip is None and torch.cuda.get_device_capability(x.device)[0] in (9, 10)
            and w.shape[1] % 8 == 0 and w.shape[2] % 8 == 0 and w.is_contiguous() | w.mT.is_contiguous()
            and (isinstance(w, FakeTensor) or w.data_ptr() % 16 == 0))  # a fake has no address: attn_ops/kernels/launch.py


expert_linear = define_op(
    "expert_linear(Tensor x, Tensor weight, Tensor? bias, Tensor expert_ids, bool transposed) -> Tensor",
    cpu=expert_linear_eager, cuda=expert_linear_cuda, fake=_fake, launches=True)

__all__ = ["MAX_COUNTED", "MAX_PAIRS", "MAX_PAIRS_PER_EXPERT", "MIN_PAIRS_PER_EXPERT_GROUPED", "Tile", "decode_tile",
           "expert_linear", "expert_linear_cuda", "expert_linear_eager", "prefill_tile"]
