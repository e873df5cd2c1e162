"""A linear layer with LoRA's adapters, and with the norm, SwiGLU and residual around it: ``torch.ops.quire.lora_linear``.

Legend: T tokens, K and N the inputs and outputs of the layer, r the rank of an adapter.

LoRA (Hu et al., 2021) adds ``B A x * scaling`` to ``W x``. The first products, ``A x``, are computed by programs of the
kernel that computes ``W x`` (``small_linear``, which folds in the norm before the layer, SwiGLU and the residual); its others
wait for them and add ``B A x``: see NOTE [First products in the same launch] in attn_ops/kernels/lora.py. For one token a
second, small kernel does; it also does where cuBLAS computes ``W x``, which is faster for most layers of more than 64 tokens
(``large_tiles``), and there has the first products, too. The adapters' own parameters are read, so changes in place are seen.

In half precision on CUDA; elsewhere the op runs its eager definition.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.attn_ops.kernels import host
from quire.attn_ops.kernels.launch import launch
from quire.attn_ops.library import define_op
from quire.attn_ops.ops.lora_counters import next_counters
from quire.attn_ops.ops.lora_rows import (
    WARPS_APART,
    RowsTiles,
    adapters_fit,
    adapters_for,
    adapters_per_layer,
    counters_of,
    first_stages,
    launch_first,
    lora_rows_eager,
    rows_tiles,
)
from quire.attn_ops.ops.small_linear import (
    MAX_TOKENS,
    MAX_TOKENS_PER_TILE,
    adapter_tiles,
    goes_apart,
    memory_of,
    norm_apart,
    small_linear_cuda,
)
from quire.attn_ops.tuning.launch_config import Config, by_rule, config_for

#: a, b, starts, scaling and bits of ``lora_linear_eager``.
_OfAdapters = tuple[Sequence[Tensor], Sequence[Tensor], Sequence[int], Sequence[float], Sequence[int]]


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
        counters: what ``lora_counters`` made for this forward; each launch takes numbers of it. None, or any other tensor:
            counters are zeroed in a launch of their own. The schema does not say that they are written: nothing else reads
            them, and a declared write would be copied around each layer.

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
    bits: Sequence[int], counters: Tensor | None = None, pdl: bool | None = None, tiles: RowsTiles | Config | None = None,
) -> Tensor:
    """The op on CUDA: ``W x`` is rounded to x's dtype before the adapters' part, in float32, is added, as in PEFT for adapters
    in float32. Those in x's dtype PEFT rounds more often: see ``lora_rows_cuda``. Runs the definition outside the kernels'
    range. ``pdl``: as of ``small_linear_cuda``. ``tiles``: launch parameters for more than MAX_TOKENS tokens; None:
    ``large_tiles``."""
    alike = all(t is None or t.dtype == x.dtype for t in (weight, bias, norm_weight, residual)) \
        and all(up.dtype in (x.dtype, torch.float32) for up in b)
    if not adapters_fit(x, a, b) or x.shape[1] == 0 or x.dtype not in (torch.bfloat16, torch.float16) \
            or weight.stride(1) != 1 or not alike:
        return lora_linear_eager(x, weight, bias, norm_weight, eps, residual, swiglu, a, b, starts, scaling, bits)
    t, k, rows = x.shape[1], x.shape[2], weight.shape[0]
    n = rows // (2 if swiglu else 1)
    given_pdl, pdl = pdl, host.use_pdl(x.device, t) if pdl is None else pdl
    x2, of_adapters = host.rows_contiguous(x.squeeze(0)), (a, b, starts, scaling, bits)
    norm_weight = None if norm_weight is None else norm_weight.contiguous()
    config = config_for(t, rows, k, swiglu, x.device) or by_rule(t, rows, k, swiglu) if t <= MAX_TOKENS else None
    if config is None:
        x2, norm_weight = norm_apart(x2, norm_weight, eps, pdl)
    x = x2.unsqueeze(0)
    if config is None:
        tiles = tiles or large_tiles(t, k, n, swiglu, a, b, starts)
        if isinstance(tiles, RowsTiles):
            return _finished(F.linear(x2, weight, bias), x2, residual, swiglu, of_adapters, tiles, pdl, counters)
        config = tiles
    if t > 1:
        folded = norm_weight is not None and not goes_apart(config, x.dtype, t, swiglu)
        parts = _parts(a, t, n, k, swiglu, folded, config, x.device)
        lora = adapters_for(x, *of_adapters, parts, next_counters(x, counters, 1))
        return small_linear_cuda(x, weight, bias, norm_weight, eps, residual, swiglu, config=config, pdl=given_pdl, lora=lora)
    lora = adapters_for(x, *of_adapters, 1)
    base = small_linear_cuda(x, weight, bias, norm_weight, eps, None, swiglu, config=config, pdl=pdl, lora=lora)
    return _launch_finish(base.squeeze(0), x2, residual, n, swiglu, lora,
                          adapter_tiles(lora, n, Config(64, 1, 4, 1), 1, swiglu, False), 0, RowsTiles(1, 64, 4, 1, 1, 1), pdl,
                          norm=norm_weight is not None)


def large_tiles(t: int, k: int, n: int, swiglu: bool, a: Sequence[Tensor], b: Sequence[Tensor], starts: Sequence[int]
                ) -> RowsTiles | Config:
    """For t > MAX_TOKENS tokens and n outputs: launch parameters of the adapters' part behind cuBLAS's product; or, where that
    was measured to be faster and the device has the shared memory, of one launch."""
    per = adapters_per_layer(starts, b)
    config = one_launch(t, k, n, swiglu)
    few = per * max(down.shape[0] for down in a) <= 32  # more do not fit the registers beside a layer's sums
    if config is not None and few:
        memory = host.shared_memory(a[0].device) - host.SPARE_MEMORY
        stages = min(config.num_stages, memory // memory_of(config._replace(num_stages=1), t, swiglu))
        if stages >= 3:  # with fewer, loads would not be on their way early enough
            return config._replace(num_stages=stages)
    return rows_tiles(t, k, per, a, swiglu)


def one_launch(t: int, k: int, n: int, swiglu: bool) -> Config | None:
    """For t > MAX_TOKENS tokens, k inputs and n outputs: parameters of ``small_linear``'s kernel where it is faster than cuBLAS
    and a launch for the adapters: to 64 tokens, and with SwiGLU to 128 where its programs fill an H200. Layers of few outputs
    split the columns. Chosen by times of the layers of llama-8b, llama-1b and qwen3-0.6b, with one adapter and with two
    (``h200_lora_one_launch*.json``; ``benchmarks/lora_linear.py --tiles``)."""
    fills = swiglu and n >= 12288
    if t > 64:
        return Config(128, 64, 8, 4) if fills and t <= MAX_TOKENS_PER_TILE else None
    if swiglu or n <= 4096:
        return Config(64, 64, 4, 4 if fills else 6, 2 if n <= k and not swiglu else 1)
    return Config(64, 128, 4, 6)


def _finished(base: Tensor, x: Tensor, residual: Tensor | None, swiglu: bool, of_adapters: _OfAdapters, tiles: RowsTiles,
              pdl: bool, counters: Tensor | None) -> Tensor:
    """The layer's result (1, T, n) from its product ``base`` and its input, (T, N) and (T, K)."""
    t, n = base.shape[0], base.shape[1] // (2 if swiglu else 1)
    count = counters_of(tiles, of_adapters[0], t)
    lora = adapters_for(x.unsqueeze(0), *of_adapters, tiles.parts, next_counters(x, counters, count) if count else None)
    constants = adapter_tiles(lora, n, Config(tiles.block_n, 1, tiles.num_warps, 1), tiles.block_t, swiglu, False)._replace(
        first_t=tiles.first_t, ranks=min(lora.shrunk.shape[3], 32), slices=WARPS_APART if tiles.apart else tiles.num_warps,
        stages=first_stages(tiles, lora, x.element_size()), reduce=tiles.reduces)
    first = launch_first(x, lora, constants, tiles, t)
    return _launch_finish(base, x, residual, n, swiglu, lora, constants, first, tiles, pdl)


def _launch_finish(base: Tensor, x: Tensor, residual: Tensor | None, n: int, swiglu: bool, lora: host.Adapters,
                   constants: host.AdapterTiles, first: int, tiles: RowsTiles, pdl: bool, norm: bool = False) -> Tensor:
    t, columns = x.shape[0], -(-n // tiles.block_n)
    res = None if residual is None else host.rows_contiguous(residual.squeeze(0))
    out = x.new_empty(1, t, n)
    launch(host.kernel_module("kernels.lora").finish_kernel, (first + columns * -(-t // tiles.block_t),), x, base, lora, res,
           out, t, x.shape[1], n, first, columns, x.stride(0), base.stride(0), 0 if res is None else res.stride(0),
           LORA=constants, BLOCK_T=tiles.block_t, BLOCK_N=tiles.block_n, SWIGLU=swiglu, NORM=norm, FIRST=first > 0, pdl=pdl,
           num_warps=tiles.num_warps)
    return out


def _parts(a: Sequence[Tensor], t: int, n: int, k: int, swiglu: bool, norm: bool, config: Config, device: torch.device) -> int:
    """Parts of the first products' sums, a power of two: no more than there are programs for beside those of the weight. With
    SwiGLU or a norm no more than that a program of them has half as many iterations as one of the weight: gate and up of 32
    tokens took 3 us longer with 16 programs of first products on 132 multiprocessors, of which those of the weight fill 112,
    than with four (``h200_lora_linear.json``, ``h200_lora_linear_parts.json``). Else eight, or 16 for all adapters
    (``h200_lora_tiles.json``)."""
    block_r = host.next_power_of_2(max(down.shape[0] for down in a), 16)
    programs = len(a) * (block_r // min(block_r, 32))
    at_once = host.num_sms(device) * max(1, host.shared_memory(device) // memory_of(config, t, swiglu))
    free = at_once - -(-n // config.block_n) * (1 if swiglu or norm else config.splits)
    most = min(k // 1024, -(-2 * config.block_k // (32 * config.num_warps))) if swiglu or norm else min(
        k // 256, 8, 16 // programs)
    return 1 << max(1, min(most, free // programs if free > 0 else 4)).bit_length() - 1


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

__all__ = ["lora_linear", "lora_linear_cuda", "lora_linear_eager"]
