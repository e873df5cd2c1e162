"""Low-rank products of several adapters, each token with adapters of its own: ``torch.ops.quire.lora_rows``, and of layers with
one input together: ``torch.ops.quire.lora_group``.

Legend: T tokens, K and N a layer's inputs and outputs, r the rank of an adapter.

LoRA (Hu et al., 2021) adds ``B A x * scaling`` to a linear layer's ``W x``. Here the sum is over the adapters of each token,
which the step in progress has (``Step.adapters``): a graph takes the same inputs whatever the requests of a batch ask for. An
adapter may also be that of every token. The adapters' own parameters are read, so changes in place are seen.

On CUDA one launch computes all adapters of a group, or two for one token and for long prompts, up to MAX_KERNEL_ADAPTERS
adapters and rank MAX_RANK, and skips an adapter that no token of a tile has: a decode step reads (K + N) r elements of each
adapter in use. Elsewhere the ops run their eager definitions, in which each adapter costs two products for all tokens.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.attn_ops.kernels import host
from quire.attn_ops.kernels.host import next_power_of_2
from quire.attn_ops.kernels.launch import is_recording, launch
from quire.attn_ops.library import define_op
from quire.attn_ops.ops.lora_counters import next_counters
from quire.attn_ops.step import current_step

#: Bits of the int64 numbers in ``Step.adapters``, the sign left out.
MAX_ADAPTERS = 63
#: Limits of the kernels.
MAX_KERNEL_ADAPTERS, MAX_RANK = 16, 128
#: Warps of a program of first products in a launch of their own, and columns of an iteration that has all adapters.
WARPS_APART, BLOCK_K = 4, 64
#: In the place of a bit's number, to the kernels: every token has the adapter.
EVERY = 63
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def lora_rows_eager(base: Tensor, x: Tensor, a: Sequence[Tensor], b: Sequence[Tensor], scaling: Sequence[float],
                    bits: Sequence[int]) -> Tensor:
    """``base`` plus the products of each token's adapters, in their order: a new tensor (1, T, N) in the dtype of ``base``.

    Args:
        base, x: (1, T, N), the layer's own product, and (1, T, K), its input.
        a, b: (r, K) and (N, r) of each adapter; their dtype is that of its products, as in PEFT.  scaling: of each adapter.
        bits: of each adapter: 2**i for the i-th of the model. A token has those whose bits are set in ``Step.adapters`` (T,)
            int64. 0: every token has it.

    Raises:
        RuntimeError: no step is in progress, or it does not say which adapters its tokens have.
    """
    rows = adapters_of(x, bits)
    result = base.clone()
    for down, up, scale, bit in zip(a, b, scaling, bits, strict=True):
        on = None if rows is None or not bit else ((rows & bit) != 0)[None, :, None]
        if on is not None and not base.is_cuda and not bool(on.any()):
            continue
        more = result + F.linear(F.linear(x.to(down.dtype), down), up) * scale
        result = more if on is None else torch.where(on, more, result)
    return result.to(base.dtype)


def lora_group_eager(bases: Sequence[Tensor], x: Tensor, a: Sequence[Tensor], b: Sequence[Tensor], layers: Sequence[int],
                     scaling: Sequence[float], bits: Sequence[int], counters: Tensor | None = None) -> Tensor:
    """(1, T, sum of N): ``lora_rows`` of each of ``bases``, end to end. Adapter i is that of ``bases[layers[i]]``.
    ``counters``: as of ``lora_linear_eager``."""
    found = []
    for number, base in enumerate(bases):
        mine = [i for i, layer in enumerate(layers) if layer == number]
        found.append(lora_rows_eager(base, x, [a[i] for i in mine], [b[i] for i in mine], [scaling[i] for i in mine],
                                     [bits[i] for i in mine]))
    return torch.cat(found, -1)


def adapters_of(x: Tensor, bits: Sequence[int]) -> Tensor | None:
    """(T,) int64: the adapters of each token as bits; None if every token has all of them."""
    if not any(bits):
        return None
    if is_recording():
        return x.new_empty(x.shape[1], dtype=torch.int64)
    step = current_step()
    if step is None or step.adapters is None:
        raise RuntimeError("lora_rows: the step does not say which adapters its tokens have; set Step.adapters")
    rows = step.adapters[: x.shape[1]]
    if rows.dtype != torch.int64 or rows.shape != (x.shape[1],) or rows.stride(0) != 1:
        raise RuntimeError(f"lora_rows: Step.adapters must be one contiguous int64 number for each of the {x.shape[1]} tokens, "
                           f"not {rows.dtype} of shape {tuple(step.adapters.shape)} and stride {step.adapters.stride()}")
    return rows


def lora_rows_cuda(base: Tensor, x: Tensor, a: Sequence[Tensor], b: Sequence[Tensor], scaling: Sequence[float],
                   bits: Sequence[int]) -> Tensor:
    """The op on CUDA: sums in float32, rounded once to the dtype of ``base``; ``A x`` is rounded to the adapter's dtype. An
    adapter in the dtype of ``base`` has fewer roundings than in the definition, and PEFT: those of its products, of their
    multiples and of each sum. Runs the definition outside the kernels' range."""
    if not _in_range([base], x, a, b):
        return lora_rows_eager(base, x, a, b, scaling, bits)
    return _launch([base], x, a, b, [0] * len(a), scaling, bits)


def lora_group_cuda(bases: Sequence[Tensor], x: Tensor, a: Sequence[Tensor], b: Sequence[Tensor], layers: Sequence[int],
                    scaling: Sequence[float], bits: Sequence[int], counters: Tensor | None = None) -> Tensor:
    """The op on CUDA, as ``lora_rows_cuda``."""
    if not _in_range(bases, x, a, b):
        return lora_group_eager(bases, x, a, b, layers, scaling, bits)
    return _launch(bases, x, a, b, layers, scaling, bits, counters)


def _in_range(bases: Sequence[Tensor], x: Tensor, a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    return x.shape[1] > 0 and adapters_fit(x, a, b) and all(y.dtype in DTYPES for y in (*bases, x))


def adapters_fit(x: Tensor, a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    """Whether the kernels take these adapters, for an input x (1, T, K)."""
    return x.dim() == 3 and x.shape[0] == 1 and 0 < len(a) <= MAX_KERNEL_ADAPTERS and all(
        down.shape[0] <= MAX_RANK and down.is_contiguous() and up.is_contiguous() and down.dtype == up.dtype
        and down.dtype in DTYPES for down, up in zip(a, b, strict=True))


class RowsTiles(NamedTuple):
    """How launches for several tokens are split up.

    Args:
        block_t, block_n, num_warps: tokens, columns and warps of a program of second products.
        first_t, parts, stages: tokens of a program of first products, parts of their sums, iterations that are loaded ahead.
        apart: whether the first products have a launch of their own.
        reduce: whether the last program of some parts adds them up, so that those of second products read sums.
    """

    block_t: int
    block_n: int
    num_warps: int
    first_t: int
    parts: int
    stages: int
    apart: bool = False
    reduce: bool = False

    @property
    def reduces(self) -> bool:
        return self.reduce and self.parts > 1


def rows_tiles(t: int, k: int, per: int, a: Sequence[Tensor], swiglu: bool = False) -> RowsTiles:
    """Launch parameters for t > 1 tokens, chosen as those of ``lora_linear.one_launch``. ``per``: ``adapters_per_layer``. All
    parts of first products are read by each program of second ones, so there are few of them: no more than fill the GPU
    twice, and fewer with SwiGLU, whose programs read them for two layers, or with several adapters. With more tokens, and so
    more of these programs, parts are added up first (``h200_lora_sums.json``)."""
    block_r = next_power_of_2(max(down.shape[0] for down in a), 16)
    ranks, together = per * block_r, side_by_side(block_r, tuple(down.dtype for down in a))
    apart, reduce = t > 512, t > 128 or (t > 64 and per > 1 and (len(a) > per or k > 8192))
    at_once = (3 if reduce else 2) * host.num_sms(a[0].device)
    block_n = 64 if ranks <= 128 else 32 if ranks <= 256 else 16  # registers
    if reduce and not apart and ranks <= 32 and (t > 256 or per == 1 or not swiglu):
        block_n = 128
    block_t = 16 if t <= 16 else 64 if t > 32 and ranks <= 64 and per == 1 and not (swiglu or reduce) else 32
    if apart:
        first_t, most = 128 if t > 2048 else 64, min(8, k // 512, max(2, 8192 // t))
    else:
        first_t = 16 if t <= 16 else 32
        most = min(8 if reduce and per == 1 else 4, k // 512) if swiglu else min(16 if k > 8192 and per == 1 else 8, k // 256)
    of_tokens = 1 if apart and together else len(a) * (block_r // min(block_r, 32))  # programs of a part
    if not (apart or swiglu) and per == 1 and k >= 4096 and -(-t // 16) * of_tokens * most <= at_once:
        first_t = 16
    parts = next_power_of_2(max(1, min(most, at_once // (-(-t // first_t) * of_tokens))))
    return RowsTiles(block_t, block_n, 4, first_t, parts, 3 if apart else 4, apart, reduce)


def side_by_side(block_r: int, dtypes: tuple[torch.dtype, ...]) -> int:
    """The ranks, padded, of a program of first products in a launch of their own that has those of all adapters; 0: it has one
    adapter's."""
    ranks = next_power_of_2(len(dtypes) * block_r, 64)
    return ranks if ranks <= MAX_RANK and len(set(dtypes)) == 1 else 0


def _launch(bases: Sequence[Tensor], x: Tensor, a: Sequence[Tensor], b: Sequence[Tensor], layers: Sequence[int],
            scaling: Sequence[float], bits: Sequence[int], counters: Tensor | None = None) -> Tensor:
    t, k, x2 = x.shape[1], x.shape[2], host.rows_contiguous(x.squeeze(0))
    flat = [host.rows_contiguous(base.squeeze(0)) for base in bases]
    sizes = tuple(base.shape[2] for base in bases)
    starts = [sum(sizes[:layer]) for layer in layers]
    per = adapters_per_layer(starts, b)  # a tile ends where its layer does
    tiles = rows_tiles(t, k, per, a)
    if t == 1:
        tiles = RowsTiles(1, tiles.block_n, 4, 1, next_power_of_2(max(1, min(k // 512, 16))), 1, True)
    count = counters_of(tiles, a, t)
    lora = adapters_for(x, a, b, starts, scaling, bits, tiles.parts, next_counters(x, counters, count) if count else None)
    constants = _constants(lora, tiles, per, x2.element_size())
    first = launch_first(x2, lora, constants, tiles, t)
    columns = sum(-(-n // tiles.block_n) for n in sizes)
    out = bases[0].new_empty(1, t, sum(sizes))
    launch(host.kernel_module("kernels.lora").rows_kernel, (first + columns * -(-t // tiles.block_t),), x2, tuple(flat), lora,
           out, t, k, sum(sizes), first, columns, x2.stride(0), sizes, tuple(base.stride(0) for base in flat),
           LAYERS=len(bases), LORA=constants, BLOCK_T=tiles.block_t, BLOCK_N=tiles.block_n, FIRST=first > 0,
           pdl=host.use_pdl(x.device, t), num_warps=tiles.num_warps)
    return out


def counters_of(tiles: RowsTiles, a: Sequence[Tensor], t: int) -> int:
    """How many counters launches with these tiles need: one of programs, and one for each sum of parts."""
    block_r = next_power_of_2(max(down.shape[0] for down in a), 16)
    together = tiles.apart and side_by_side(block_r, tuple(down.dtype for down in a))
    sums = -(-t // tiles.first_t) * (1 if together else len(a) * (block_r // min(block_r, 32)))
    return 1 + sums if tiles.reduces else 0 if tiles.apart else 1


def first_stages(tiles: RowsTiles, lora: host.Adapters, item: int) -> int:
    """``tiles.stages``, or fewer, for which the device has the shared memory. ``item``: bytes of a number of x."""
    block_r, tokens = lora.shrunk.shape[3], tiles.first_t
    if tiles.apart and (ranks := side_by_side(block_r, tuple(down.dtype for down in lora.a))):
        stage = (item * tokens + 4 * ranks) * BLOCK_K
    else:
        stage = (item * tokens + 4 * min(block_r, 32)) * 32 * (WARPS_APART if tiles.apart else tiles.num_warps)
    return max(1, min(tiles.stages, (host.shared_memory(lora.shrunk.device) - host.SPARE_MEMORY) // stage))


def _constants(lora: host.Adapters, tiles: RowsTiles, per: int, item: int) -> host.AdapterTiles:
    adapters, parts, t, block_r = lora.shrunk.shape
    block_q = min(block_r, 32 if per <= 2 else 16)
    warps = tiles.num_warps if not tiles.apart else 1 if t == 1 else WARPS_APART
    every = all(place == EVERY for place in lora.places)
    return host.AdapterTiles(adapters, host.one_loop(tuple(up.dtype for up in lora.b), t), every, per, parts,
                             tiles.reduces, block_r, block_q, per, True, tiles.first_t,
                             block_r if t == 1 else min(block_r, 32), warps, 1 if t == 1 else first_stages(tiles, lora, item))


def launch_first(x: Tensor, lora: host.Adapters, constants: host.AdapterTiles, tiles: RowsTiles, t: int) -> int:
    """The number of programs of first products for x (t, K); 0 if they are in a launch of their own, which this starts."""
    kernels, blocks, k = host.kernel_module("kernels.lora"), -(-t // tiles.first_t), x.shape[1]
    programs = constants.adapters * (constants.block_r // constants.ranks) * constants.parts * blocks
    if not tiles.apart:
        return programs
    options: dict[str, Any] = {"LORA": constants, "num_warps": WARPS_APART, "pdl": host.use_pdl(x.device, t)}
    if t > 1 and (ranks := side_by_side(constants.block_r, tuple(down.dtype for down in lora.a))):
        launch(kernels.rows_shrink_all_kernel, (constants.parts, blocks), x, lora, t, k, x.stride(0), RANKS=ranks,
               BLOCK_K=BLOCK_K, **options)
    else:
        launch(kernels.rows_shrink_kernel, (programs,), x, lora, t, k, x.stride(0), **options)
    return 0


def adapters_per_layer(starts: Sequence[int], b: Sequence[Tensor]) -> int:
    """The most adapters that add to the same columns; all of them where layers overlap or B has several dtypes."""
    return most_per_layer(tuple(starts), tuple(up.shape[0] for up in b), tuple(up.dtype for up in b))


@functools.lru_cache(maxsize=1024)
def most_per_layer(starts: tuple[int, ...], sizes: tuple[int, ...], dtypes: tuple[torch.dtype, ...]) -> int:
    """``adapters_per_layer`` for B of these sizes and dtypes."""
    ranges = sorted(set(zip(starts, sizes, strict=True)))
    apart = all(start + size <= after for (start, size), (after, _) in itertools.pairwise(ranges))
    return max(map(starts.count, starts)) if apart and len(set(dtypes)) == 1 else len(sizes)


class _Order(NamedTuple):
    """Numbers of adapters by their columns; and what host.Adapters has of them, in that order."""

    numbers: tuple[int, ...]
    starts: tuple[int, ...]
    sizes: tuple[int, ...]
    ranks: tuple[int, ...]
    places: tuple[int, ...]
    scalings: tuple[float, ...]


@functools.lru_cache(maxsize=1024)
def _order(starts: tuple[int, ...], sizes: tuple[int, ...], ranks: tuple[int, ...], bits: tuple[int, ...],
           scaling: tuple[float, ...]) -> _Order:
    numbers = tuple(sorted(range(len(starts)), key=starts.__getitem__))
    places = tuple(bit.bit_length() - 1 if bit else EVERY for bit in bits)
    starts, sizes, ranks, places = (tuple(of[i] for i in numbers) for of in (starts, sizes, ranks, places))
    return _Order(numbers, starts, sizes, ranks, places, tuple(float(scaling[i]) for i in numbers))


def adapters_for(x: Tensor, a: Sequence[Tensor], b: Sequence[Tensor], starts: Sequence[int], scaling: Sequence[float],
                 bits: Sequence[int], parts: int, counter: Tensor | None = None) -> host.Adapters:
    """The kernels' argument, with memory for first products in ``parts`` parts. Arguments as of ``lora_linear_eager``;
    ``counter``: None where no kernel counts."""
    rows, t = adapters_of(x, bits), x.shape[1]
    numbers, *order = _order(tuple(starts), tuple(up.shape[0] for up in b), tuple(down.shape[0] for down in a), tuple(bits),
                             tuple(scaling))
    ranks = [down.shape[0] for down in a]
    shrunk = torch.empty(len(a), parts, t, next_power_of_2(max(ranks), 16), dtype=torch.float32, device=x.device)
    if rows is None:
        rows = shrunk.view(torch.int64)  # no bit is looked at
    rms = torch.empty(t, dtype=torch.float32, device=x.device) if t == 1 else shrunk  # of one token alone
    return host.Adapters(rows, tuple(a[i] for i in numbers), tuple(b[i] for i in numbers), shrunk, rms,
                         shrunk if counter is None else counter, *order)


def _fake(base: Tensor, x: Tensor, a: Sequence[Tensor], b: Sequence[Tensor], scaling: Sequence[float], bits: Sequence[int]
          ) -> Tensor:
    return torch.empty_like(base)


def _group_fake(bases: Sequence[Tensor], x: Tensor, a: Sequence[Tensor], b: Sequence[Tensor], layers: Sequence[int],
                scaling: Sequence[float], bits: Sequence[int], counters: Tensor | None = None) -> Tensor:
    return bases[0].new_empty(*bases[0].shape[:-1], sum(base.shape[-1] for base in bases))


lora_rows = define_op("lora_rows(Tensor base, Tensor x, Tensor[] a, Tensor[] b, float[] scaling, int[] bits) -> Tensor",
                      cpu=lora_rows_eager, cuda=lora_rows_cuda, fake=_fake, launches=True)
lora_group = define_op(
    "lora_group(Tensor[] bases, Tensor x, Tensor[] a, Tensor[] b, int[] layers, float[] scaling, int[] bits, "
    "Tensor? counters=None) -> Tensor",
    cpu=lora_group_eager, cuda=lora_group_cuda, fake=_group_fake, launches=True)
