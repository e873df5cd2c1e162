"""Linear layers of a mixture of experts.

``torch.ops.quire.expert_linear``: each row times the weight of its expert. ``torch.ops.quire.expert_swiglu``: an expert's gate
and up product, SwiGLU and down product; ``torch.ops.quire.expert_clamped_swiglu``: the same with the gate of gpt-oss. All
take LoRA's adapters of their weights: see expert_lora.py.

Legend: T tokens with k experts each, S = T * k pairs of a token and an expert, E experts, weights (E, N, K).

Few pairs (a decode batch): one launch per product, bound by the bytes of the weights in use. Each weight is read once, and each
program searches the S ids for its expert's: about a microsecond next to the twenty or so for a few hundred KiB of weight. More
pairs: they are sorted by expert on the device and cut into tiles of one expert; a product is one launch over the tiles. One
token alone: sums of products, without tensor cores.

The host reads nothing, so all of it can be captured in a CUDA graph. Other dtypes than bf16, fp16 and fp32 on CUDA, and other
devices, run the eager definitions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quire.attn_ops.kernels import host
from quire.attn_ops.kernels.host import next_power_of_2, rows_contiguous
from quire.attn_ops.kernels.launch import launch
from quire.attn_ops.library import define_op
from quire.attn_ops.ops.expert_lora import ExpertLora

#: Maximum pairs for one launch per product. Above, every program would search the ids for longer than the two launches that
#: sort them take (`benchmarks/experts.py --tiles` compares the paths).
MAX_PAIRS = 256
#: The same with LoRA's adapters, of whose B programs for many pairs read less (``h200_expert_lora.json``).
MAX_EXPANDED = 64
#: Pairs that are sorted by one launch, in which each program counts all of them.
FEW_TO_SORT = 8192
KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
#: Of adapters; None: there are none.
Tensors = Sequence[Tensor] | None
#: Elements of weights that the definition gathers at a time.
_GATHERED = 1 << 24


def expert_linear_eager(x: Tensor, weight: Tensor, bias: Tensor | None, expert_ids: Tensor, transposed: bool,
                        a: Tensors = None, b: Tensors = None, scaling: Sequence[float] = (),
                        bits: Sequence[int] = ()) -> Tensor:
    """The definition: ``y[s] = x[s // (S / R)] @ weight[e].T + bias[e]`` with ``e = expert_ids.flatten()[s]``, summed in fp32:
    (S, N), in the order of the pairs, in x's dtype.

    Args:
        x: (R, K), a row per pair (R = S) or per token (R = T).
        weight: (E, N, K), or (E, K, N) if ``transposed``, of x's dtype.  bias: (E, N), or None.
        expert_ids: (T, k) or (S,), of an integer dtype; the row of an id outside 0 .. E-1 is zeros.
        a, b, scaling, bits: of LoRA's adapters, as of ``ExpertLora``; they add to the sum.

    Raises:
        ValueError: shapes or dtypes do not match.
        RuntimeError: as of ``lora_rows_eager``.
    """
    lora = ExpertLora(a or (), b or (), scaling, bits)
    _check(x, weight, bias, expert_ids, transposed, lora)
    ids = expert_ids.reshape(-1)
    experts, n = weight.shape[0], weight.shape[1 + transposed]
    out = x.new_empty(len(ids), n)
    if not out.numel():
        return out
    wide = torch.promote_types(x.dtype, torch.float32)
    repeat, known = len(ids) // len(x), (ids >= 0) & (ids < experts)
    safe, of_tokens = ids.where(known, 0).long(), lora.rows(expert_ids)
    size = max(1, _GATHERED // max(1, weight[0].numel()))
    for start in range(0, len(ids), size):
        here = slice(start, start + size)
        pairs = torch.arange(start, min(start + size, len(ids)), device=x.device)
        inputs, weights = x[pairs // repeat].to(wide), weight[safe[here]].to(wide)
        y = torch.bmm(inputs[:, None], weights if transposed else weights.mT)[:, 0]
        if bias is not None:
            y = y + bias[safe[here]].to(wide)
        for more in lora.products(inputs, experts, safe[here], pairs // (len(ids) // len(expert_ids)), of_tokens):
            y = y + more
        out[here] = y.masked_fill(~known[here, None], 0.0).to(x.dtype)
    return out


def expert_swiglu_eager(x: Tensor, gate_up: Tensor, down: Tensor, expert_ids: Tensor, transposed: bool,
                        a: Tensors = None, b: Tensors = None, scaling: Sequence[float] = (),
                        bits: Sequence[int] = (), first: int = 0) -> Tensor:
    """The definition: ``down[e] @ (silu(gate) * up)`` with ``gate, up = (gate_up[e] @ x).chunk(2)``; each product and the
    activation are rounded to x's dtype. (S, N), in the order of the pairs. x, expert_ids: see ``expert_linear_eager``, also for
    what is raised. gate_up: (E, 2 I, K), the gate's outputs first; down: (E, N, I). ``transposed``: (E, K, 2 I) and (E, I, N).
    The ``first`` adapters are those of gate_up, the others those of down."""
    _check_swiglu(x, gate_up, down, transposed)
    lora = ExpertLora(a or (), b or (), scaling, bits).split(first)
    gate, up = expert_linear_eager(x, gate_up, None, expert_ids, transposed, *lora[0]).float().chunk(2, -1)
    return expert_linear_eager((torch.nn.functional.silu(gate) * up).to(x.dtype), down, None, expert_ids, transposed, *lora[1])


def expert_clamped_swiglu_eager(x: Tensor, gate_up: Tensor, gate_up_bias: Tensor | None, down: Tensor,
                                down_bias: Tensor | None, expert_ids: Tensor, transposed: bool, alpha: float, limit: float,
                                a: Tensors = None, b: Tensors = None, scaling: Sequence[float] = (),
                                bits: Sequence[int] = (), first: int = 0) -> Tensor:
    """The definition: ``down[e] @ ((up + 1) * gate * sigmoid(alpha * gate)) + down_bias[e]`` with gate and up by turns in
    ``gate_up[e] @ x + gate_up_bias[e]``, both at most ``limit``, up at least -limit; each product and the activation are
    rounded to x's dtype. The gate of gpt-oss (OpenAI, 2025), there with alpha 1.702 and limit 7. Other arguments, shapes and
    what is raised: as of ``expert_swiglu_eager``; biases: as of ``expert_linear_eager``."""
    _check_swiglu(x, gate_up, down, transposed)
    lora = ExpertLora(a or (), b or (), scaling, bits).split(first)
    both = expert_linear_eager(x, gate_up, gate_up_bias, expert_ids, transposed, *lora[0]).float()
    gate, up = both[:, ::2].clamp(max=limit), both[:, 1::2].clamp(-limit, limit)
    active = (up + 1) * (gate * torch.sigmoid(alpha * gate))
    return expert_linear_eager(active.to(x.dtype), down, down_bias, expert_ids, transposed, *lora[1])


def _check(x: Tensor, weight: Tensor, bias: Tensor | None, expert_ids: Tensor, transposed: bool, lora: ExpertLora) -> None:
    if x.dim() != 2 or weight.dim() != 3 or x.shape[1] != weight.shape[2 - transposed] or x.dtype != weight.dtype:
        raise ValueError(f"expert_linear: x {tuple(x.shape)} {x.dtype} does not match weights {tuple(weight.shape)} "
                         f"{weight.dtype}, transposed={transposed}")
    _check_bias(bias, weight, transposed)
    pairs, rows = expert_ids.numel(), x.shape[0]
    if expert_ids.dtype.is_floating_point or expert_ids.dtype == torch.bool or (pairs % rows if rows else pairs):
        raise ValueError(f"expert_linear: {rows} rows do not match ids {tuple(expert_ids.shape)} {expert_ids.dtype}")
    lora.check(weight, transposed, expert_ids)


def _check_bias(bias: Tensor | None, weight: Tensor, transposed: bool) -> None:
    if bias is not None and (bias.shape != (weight.shape[0], weight.shape[1 + transposed]) or bias.dtype != weight.dtype):
        raise ValueError(f"expert_linear: bias {tuple(bias.shape)} {bias.dtype} does not match weights {tuple(weight.shape)} "
                         f"of {weight.dtype}")


def _check_swiglu(x: Tensor, gate_up: Tensor, down: Tensor, transposed: bool) -> None:
    if (gate_up.dim() != 3 or down.dim() != 3 or len(gate_up) != len(down) or down.dtype != x.dtype
            or gate_up.shape[1 + transposed] != 2 * down.shape[2 - transposed]):
        raise ValueError(f"expert_swiglu: gate_up {tuple(gate_up.shape)} does not match down {tuple(down.shape)} {down.dtype} "
                         f"and x {x.dtype}, transposed={transposed}")


def _fake(x: Tensor, weight: Tensor, bias: Tensor | None, expert_ids: Tensor, transposed: bool, *adapters: object) -> Tensor:
    return x.new_empty(expert_ids.numel(), weight.shape[2 if transposed else 1])


class Gate(NamedTuple):
    """What a product with twice the outputs ends in: the kernels' GATE, and the numbers of "neighbours"."""

    form: str
    alpha: float = 0.0
    limit: float = 0.0


SWIGLU = Gate("halves")


@dataclass(frozen=True)
class Tile:
    """Launch parameters: pairs, outputs and inputs per tile, warps, pipeline stages."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


def decode_tile(pairs: int, experts: int, k: int, dtype: torch.dtype, gate: Gate | None = None) -> Tile:
    """The tile of ``pairs_kernel``, which is bound by bytes.

    An H200 needs about 30 KiB of loads in flight on each of its 132 multiprocessors (4.8 TB/s times 0.8 us). 64 outputs are the
    fewest rows of Hopper's tensor core instructions. block_m is twice the average number of pairs per expert, so that most
    experts' weights are read for one tile of pairs. ``benchmarks/experts.py --tiles`` compares others.
    """
    block_m = min(64, max(16, next_power_of_2(-(-2 * pairs // experts))))
    if dtype == torch.float32:  # without tensor cores: for the numbers, not for speed
        return Tile(block_m, 32, 32, 4, 3)
    if gate == SWIGLU:
        return Tile(block_m, 64, 128 if k % 128 == 0 else 64, 4, 3)
    return Tile(block_m, 64 if gate else 128, 64, 8, 4)


def one_token_tile(k: int, gate: Gate | None, transposed: bool) -> Tile:
    """The tile of ``one_token_kernel``: the best of those of ``benchmarks/experts.py --tiles``, or within 4 % of it
    (``h200_experts_one.json``; transposed, of the layers of gpt-oss-20b alone: ``h200_experts_one_transposed.json``)."""
    if transposed:
        return Tile(1, 32, 128 if gate else 256, 4, 1)
    if gate:
        return Tile(1, 1, 1024, 4, 1)
    return Tile(1, 2, 1024, 4, 1) if k >= 1024 else Tile(1, 4, 256, 4, 1)


def prefill_tile(pairs: int, experts: int, k: int, dtype: torch.dtype, gate: Gate | None = None) -> Tile:
    """The tile of ``sorted_kernel``: large where arithmetic is the bottleneck, but not much larger than the pairs per expert. A
    gated product has half the outputs per tile, as it computes two. ``benchmarks/experts.py --tiles`` compares others."""
    each = pairs / experts
    if dtype == torch.float32:
        tile = Tile(32, 32, 32, 4, 3)
    elif each <= 12:
        tile = Tile(16, 128, 128 if k % 128 == 0 else 64, 8, 3)
    elif each <= 24:
        tile = Tile(32, 128, 64, 4, 4)
    else:
        tile = Tile(64 if each <= 56 else 128, 256, 64, 8, 4)
    return replace(tile, block_n=max(32, tile.block_n // 2)) if gate else tile


def expert_linear_cuda(x: Tensor, weight: Tensor, bias: Tensor | None, expert_ids: Tensor, transposed: bool,
                       a: Tensors = None, b: Tensors = None, scaling: Sequence[float] = (),
                       bits: Sequence[int] = (), *, path: str | None = None, tile: Tile | None = None, pdl: bool | None = None
                       ) -> Tensor:
    """The op on CUDA. Runs the definition for dtypes and adapters that the kernels do not support. ``path``: "one" (of one
    token without adapters, in half precision), "pairs" or "sorted"; path and tile are chosen by sizes by default, ``pdl`` by
    ``host.use_pdl`` (attn_ops/kernels/pdl.py)."""
    lora = ExpertLora(a or (), b or (), scaling, bits)
    _check(x, weight, bias, expert_ids, transposed, lora)
    w = weight.mT if transposed else weight  # (E, N, K)
    if not _supported(x, expert_ids, lora, w):
        return expert_linear_eager(x, weight, bias, expert_ids, transposed, *lora)
    bias = bias.contiguous() if bias is not None else None
    return _Pairs.of(expert_ids, len(w), x.dtype, path, tile, pdl, bool(lora.a)).multiply(x, w, bias, lora)


def expert_swiglu_cuda(x: Tensor, gate_up: Tensor, down: Tensor, expert_ids: Tensor, transposed: bool,
                       a: Tensors = None, b: Tensors = None, scaling: Sequence[float] = (),
                       bits: Sequence[int] = (), first: int = 0, *, path: str | None = None, tile: Tile | None = None,
                       pdl: bool | None = None) -> Tensor:
    """The op on CUDA; arguments as of ``expert_linear_cuda``."""
    lora = ExpertLora(a or (), b or (), scaling, bits)
    of_up, of_down = lora.split(first)
    _check(x, gate_up, None, expert_ids, transposed, of_up)
    _check_swiglu(x, gate_up, down, transposed)
    of_down.check(down, transposed, expert_ids)
    up, w = (gate_up.mT, down.mT) if transposed else (gate_up, down)
    if not _supported(x, expert_ids, lora, up, w):
        return expert_swiglu_eager(x, gate_up, down, expert_ids, transposed, *lora, first)
    pairs = _Pairs.of(expert_ids, len(w), x.dtype, path, tile, pdl, bool(lora.a))
    return pairs.multiply(pairs.multiply(x, up, None, of_up, SWIGLU), w, None, of_down)


def expert_clamped_swiglu_cuda(x: Tensor, gate_up: Tensor, gate_up_bias: Tensor | None, down: Tensor, down_bias: Tensor | None,
                               expert_ids: Tensor, transposed: bool, alpha: float, limit: float, a: Tensors = None,
                               b: Tensors = None, scaling: Sequence[float] = (), bits: Sequence[int] = (),
                               first: int = 0, *, path: str | None = None, tile: Tile | None = None, pdl: bool | None = None
                               ) -> Tensor:
    """The op on CUDA; arguments as of ``expert_linear_cuda``."""
    lora = ExpertLora(a or (), b or (), scaling, bits)
    of_up, of_down = lora.split(first)
    _check(x, gate_up, gate_up_bias, expert_ids, transposed, of_up)
    _check_swiglu(x, gate_up, down, transposed)
    _check_bias(down_bias, down, transposed)
    of_down.check(down, transposed, expert_ids)
    up, w = (gate_up.mT, down.mT) if transposed else (gate_up, down)
    if not _supported(x, expert_ids, lora, up, w):
        return expert_clamped_swiglu_eager(x, gate_up, gate_up_bias, down, down_bias, expert_ids, transposed, alpha, limit,
                                           *lora, first)
    biases = [bias.contiguous() if bias is not None else None for bias in (gate_up_bias, down_bias)]
    pairs = _Pairs.of(expert_ids, len(w), x.dtype, path, tile, pdl, bool(lora.a))
    active = pairs.multiply(x, up, biases[0], of_up, Gate("neighbours", alpha, limit))
    return pairs.multiply(active, w, biases[1], of_down)


def _supported(x: Tensor, expert_ids: Tensor, lora: ExpertLora, *weights: Tensor) -> bool:
    """Whether there is something to compute, and the kernels can."""
    return (x.dtype in KERNEL_DTYPES and expert_ids.numel() > 0 and lora.fits(len(weights[0]))
            and all(w.shape[1] and (w.stride(2) == 1 or w.stride(1) == 1) for w in weights))


@dataclass(frozen=True)
class _Pairs:
    """The pairs of a batch. expert_ids: as of the op. ids: (S,), contiguous. order: (S,) int64, the pairs in the order of
    their experts, and tiles: (tiles, 4) int32, of ``tiles_kernel``; None for few pairs. tile: None: chosen by sizes. one: the
    pairs are those of one token, for ``one_token_kernel``."""

    expert_ids: Tensor
    ids: Tensor
    pdl: bool
    tile: Tile | None
    order: Tensor | None = None
    tiles: Tensor | None = None
    one: bool = False

    @classmethod
    def of(cls, expert_ids: Tensor, experts: int, dtype: torch.dtype, path: str | None, tile: Tile | None,
           pdl: bool | None, adapted: bool = False) -> _Pairs:
        ids = expert_ids.reshape(-1).contiguous()
        pairs = len(ids)
        tokens = len(expert_ids) if expert_ids.dim() == 2 else pairs
        pdl = host.use_pdl(ids.device, tokens) if pdl is None else pdl
        if path is None and tokens == 1 and not adapted and dtype != torch.float32:
            path = "one"
        if path is None:
            path = "pairs" if pairs <= (min(MAX_PAIRS, MAX_EXPANDED) if adapted else MAX_PAIRS) else "sorted"
        if path == "one" and adapted:
            raise ValueError("expert_linear: the kernel for one token has no adapters; path='pairs' has")
        if path in ("one", "pairs"):
            return cls(expert_ids, ids, pdl, tile, one=path == "one")
        block_m = (tile or prefill_tile(pairs, experts, 0, dtype)).block_m
        order, ends = _sort(ids, experts, pdl)
        count = pairs // block_m + min(experts + 1, pairs)  # each expert's last tile may be short
        tiles = ids.new_empty(count, 4, dtype=torch.int32)
        launch(host.kernel_module("kernels.experts").tiles_kernel, (-(-count // 64),), ends, tiles, pairs, experts, count,
               BLOCK_E=next_power_of_2(experts + 1, 16), BLOCK_M=block_m, BLOCK_T=64, pdl=pdl, num_warps=4)
        return cls(expert_ids, ids, pdl, tile, order, tiles)

    def multiply(self, x: Tensor, w: Tensor, bias: Tensor | None, adapters: ExpertLora, gate: Gate | None = None) -> Tensor:
        """Rows times the weights (E, N, K) of their experts, with the adapters' parts: (S, N), or what the gate makes of it,
        (S, N / 2)."""
        kernels = host.kernel_module("kernels.experts")
        x = rows_contiguous(x)
        pairs, (experts, n, k) = len(self.ids), w.shape
        n = n // 2 if gate else n
        transposed = w.stride(2) != 1
        tile = self.tile or (one_token_tile(k, gate, transposed) if self.one else
                             (decode_tile if self.tiles is None else prefill_tile)(pairs, experts, k, x.dtype, gate))
        if adapters.a and tile.block_m == 128:  # else the sums leave no registers
            tile = replace(tile, block_n=tile.block_n // 2)
        out = x.new_empty(pairs, n)
        lora, constants, first = None, None, 0
        if not adapters.a:
            pass
        elif self.tiles is None:
            lora, constants = adapters.expanded(x, self.expert_ids, self.ids, experts, self.pdl)
        else:
            lora, constants = adapters.in_one_launch(self.expert_ids, experts, self.tiles.shape[0],
                                                     max(1, 8 * tile.num_warps // tile.block_m))
            first = constants.programs
        options: dict[str, Any] = {
            "BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k, "TRANSPOSED": transposed, "GATE": gate.form if gate else "",
            "EVEN_N": n % tile.block_n == 0, "EVEN_K": k % tile.block_k == 0,
            "pdl": self.pdl, "num_warps": tile.num_warps, "num_stages": tile.num_stages}
        sizes = (pairs, n, k, experts, pairs // len(x), x.stride(0), *w.stride(), *(gate or Gate(""))[1:])
        blocks = -(-n // tile.block_n)
        if self.one:
            launch(kernels.one_token_kernel, (blocks, pairs), x, w, bias, self.ids, out, *sizes, **options)
            return out
        options |= {"BLOCK_M": tile.block_m, "LORA": constants,  # tf32 would keep 10 bits of fp32; ignored for others
                    "PRECISION": "ieee" if x.dtype == torch.float32 else "tf32"}
        if self.tiles is None:
            by_pair = pairs <= experts  # fewer leaders than experts and one more for ids out of range
            launch(kernels.pairs_kernel, (blocks, pairs if by_pair else experts + 1), x, w, bias, self.ids, out, *sizes, lora,
                   BLOCK_S=max(16, 4096 // tile.block_m), BY_PAIR=by_pair, **options)
        else:
            launch(kernels.sorted_kernel, (self.tiles.shape[0] * (first + blocks),), x, w, bias, self.order, self.tiles, out,
                   *sizes, lora, **options)
        return out


def _sort(ids: Tensor, experts: int, pdl: bool) -> tuple[Tensor, Tensor]:
    """(S,) int64: the pairs in the order of their experts, stable, ids out of range last; (E,) int32: each expert's end."""
    order, ends = ids.new_empty(len(ids), dtype=torch.int64), ids.new_empty(experts, dtype=torch.int32)
    kernels = host.kernel_module("kernels.experts")
    if len(ids) <= FEW_TO_SORT:
        launch(kernels.order_kernel, (experts + 1,), ids, order, ends, len(ids), experts, BLOCK_S=1024, pdl=pdl, num_warps=4)
        return order, ends
    block, bins = max(4096, host.next_power_of_2(len(ids) // 64)), host.next_power_of_2(experts + 2)
    chunks = -(-len(ids) // block)
    counts = ids.new_empty(chunks, experts + 1, dtype=torch.int32)
    launch(kernels.count_kernel, (chunks,), ids, counts, len(ids), experts, BLOCK_S=block, BLOCK_E=bins, pdl=pdl, num_warps=16)
    launch(kernels.place_kernel, (experts + 1, chunks), ids, counts, order, ends, len(ids), experts, chunks, BLOCK_S=block,
           BLOCK_C=host.next_power_of_2(chunks), BLOCK_E=bins, pdl=pdl, num_warps=8)
    return order, ends


_LORA = "Tensor[]? a=None, Tensor[]? b=None, float[] scaling=[], int[] bits=[]"
expert_linear = define_op(
    f"expert_linear(Tensor x, Tensor weight, Tensor? bias, Tensor expert_ids, bool transposed, {_LORA}) -> Tensor",
    cpu=expert_linear_eager, cuda=expert_linear_cuda, fake=_fake, launches=True)
expert_swiglu = define_op(
    f"expert_swiglu(Tensor x, Tensor gate_up, Tensor down, Tensor expert_ids, bool transposed, {_LORA}, int first=0) -> Tensor",
    cpu=expert_swiglu_eager, cuda=expert_swiglu_cuda, fake=lambda x, gate_up, down, *rest: _fake(x, down, None, *rest),
    launches=True)
expert_clamped_swiglu = define_op(
    "expert_clamped_swiglu(Tensor x, Tensor gate_up, Tensor? gate_up_bias, Tensor down, Tensor? down_bias, Tensor expert_ids, "
    f"bool transposed, float alpha, float limit, {_LORA}, int first=0) -> Tensor",
    cpu=expert_clamped_swiglu_eager, cuda=expert_clamped_swiglu_cuda,
    fake=lambda x, gate_up, gate_up_bias, down, down_bias, *rest: _fake(x, down, None, *rest[:2]), launches=True)
