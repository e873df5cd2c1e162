"""What the host needs to launch kernels. Imports no Triton: modules of ops load without it."""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
from typing import Any, NamedTuple

import torch

from quire.attn_ops.kv_quant import is_fixed

#: Counters per forward. Kernels that merge partial results take one per slot; see NOTE [Last one merges].
NUM_COUNTERS = 16384
#: Bytes, at most, of the contiguous keys and values of a layer (attn_ops/kernels/gather_kv.py); and of the copy per second,
#: read and written: estimated.
MAX_GATHERED, GATHER_BANDWIDTH = 512 * 2**20, 1.9e12
#: Largest number of tokens in a step whose kernels use programmatic dependent launch (attn_ops/kernels/pdl.py).
PDL_MAX_TOKENS = 1


class Caches(NamedTuple):
    """A layer's KV cache: k (pages, page_size, Hkv, D), v (pages, page_size, Hkv, Dv); of a quantized one the scales too
    (pages, page_size, Hkv), or (1, 1, 1) for a fixed one, else None."""

    k: Any
    v: Any
    k_scale: Any
    v_scale: Any


class Strides(NamedTuple):
    """Strides of a cache or of its scales, in elements."""

    page: int
    token: int
    head: int


class CacheLayout(NamedTuple):
    """Shape and strides of a layer's KV cache, a kernel's constant. ``scale``: 0s if fixed."""

    heads: int
    dim: int
    dim_v: int
    page: int
    k: Strides
    v: Strides
    scale: Strides


class Rope(NamedTuple):
    """Tables and norm weights of a rotary embedding, for a kernel (attn_ops/ops/rope.py). Strides are per token."""

    cos: Any
    sin: Any
    q_norm: Any
    k_norm: Any
    eps: float
    cos_stride: int
    sin_stride: int

    @classmethod
    def of(cls, cos: torch.Tensor, sin: torch.Tensor, q_norm: Any, k_norm: Any, eps: float) -> Rope:
        cos, sin = rows_contiguous(cos), rows_contiguous(sin)
        q_norm, k_norm = (None if norm is None else norm.contiguous() for norm in (q_norm, k_norm))
        return cls(cos, sin, q_norm, k_norm, eps, cos.stride(0), sin.stride(0))


class Adapters(NamedTuple):
    """LoRA's adapters of layers with one input, for the kernels (attn_ops/kernels/lora.py). The tuples have an entry per
    adapter. Nothing is None: Triton 3.6 mixes up the numbers of a tuple with None in it.

    Args:
        rows: T or more int64 numbers, the adapters of each token as bits.  a, b: (r_i, K) and (N_i, r_i).
        shrunk: (adapters, parts, T, R) float32, parts of ``A x`` that add up to it.  rms: (T,) float32, what the norm before
            the layer multiplies each token by.  counter: int32, zero: see NOTE [First products in the same launch].
        starts, sizes: the output columns that an adapter adds to.  ranks: r_i.
        places: the number of its bit in ``rows``; 63: every token has it.  scalings: factors.
    """

    rows: Any
    a: Any
    b: Any
    shrunk: Any
    rms: Any
    counter: Any
    starts: Any
    sizes: Any
    ranks: Any
    places: Any
    scalings: Any


class AdapterTiles(NamedTuple):
    """How programs compute the adapters of a layer in one launch: one constant argument of a kernel.

    Args:
        adapters: how many.  one_loop: ``one_loop``.  every: each token has all of them.
        per: the most that add to the columns of a program.
        parts: of the first products' sums.  reduce: whether the last program of some parts adds them up.
        block_r, block_q: ranks, padded, and those of a second product at a time.  held: adapters whose B is loaded at once;
            early: which tokens have an adapter is read before the loop over the columns of x.
        first_t, ranks, slices, stages: of a program of first products: tokens, ranks, and as of ``first_products``.
    """

    adapters: int
    one_loop: bool
    every: bool
    per: int
    parts: int
    reduce: bool
    block_r: int
    block_q: int
    held: int
    early: bool
    first_t: int
    ranks: int
    slices: int
    stages: int


class ExpertAdapters(NamedTuple):
    """LoRA's adapters of a mixture of experts, for the kernels (attn_ops/kernels/expert_lora.py). Tuples as in ``Adapters``.

    Args:
        rows, ranks, places, scalings: as of ``Adapters``.  top_k: pairs of a token.
        a, b: (E r_i, K); and (N, r_i E), or (E, N, r_i) where that is turned.
        shrunk: (adapters, parts, S, R) float32, parts of ``A x`` of each pair that add up to it.
        delta: (S, N) float32, what all adapters add to each pair, of ``expand_kernel``; else anything.
        counter: int32 zeros, for each tile of pairs: see NOTE [First products of experts]; else anything.
    """

    rows: Any
    a: Any
    b: Any
    shrunk: Any
    delta: Any
    counter: Any
    top_k: int
    ranks: Any
    places: Any
    scalings: Any


class ExpertTiles(NamedTuple):
    """One constant argument of a kernel: how many adapters; whether each token has all; parts of the first products' sums;
    ranks, padded, in all and at a time; programs of first products for each tile of pairs, 0 where ``delta`` has the second
    ones; slices of their columns, for warps; adapters whose B is loaded early."""

    adapters: int
    every: bool
    parts: int
    block_r: int
    ranks: int
    programs: int
    slices: int
    held: int


def one_loop(dtypes: tuple[torch.dtype, ...], t: int) -> bool:
    """Whether the programs of first products of adapters of these dtypes choose their adapter as they run. Each adapter has a
    loop of its own otherwise, which is faster with few adapters (of one token qkv by 2.4 us:
    ``h200_lora_linear_one_loop.json``); with many the code is long to compile. Needs adapters of one dtype."""
    return len(dtypes) > (4 if t > 1 else 12) and len(set(dtypes)) == 1


def first_tiles(t: int, block_r: int, num_warps: int, memory: int) -> tuple[int, int, int, int]:
    """Of a program of first products (attn_ops/kernels/lora.py) of several tokens in half precision: tokens; ranks; slices, the
    warps that share the columns of x; and stages, the iterations that are loaded ahead: what a part loads is on its way at
    once, as far as ``memory`` bytes of shared memory go."""
    tokens, ranks = 16 if t <= 16 else 32, min(block_r, 32)
    stage = (2 * tokens + 4 * ranks) * 32 * num_warps  # bytes
    return tokens, ranks, num_warps, max(2, min(8, memory // stage))


def cache_layout(caches: Caches) -> CacheLayout:
    k, v, scale, _ = caches
    scale_strides = (0, 0, 0) if scale is None or is_fixed(scale) else scale.stride()
    return _cache_layout(k.shape, k.stride(), v.shape, v.stride(), scale_strides)


@functools.lru_cache(maxsize=1024)
def _cache_layout(k_shape: torch.Size, k_strides: tuple[int, ...], v_shape: torch.Size, v_strides: tuple[int, ...],
                  scale_strides: tuple[int, ...]) -> CacheLayout:
    return CacheLayout(k_shape[2], k_shape[3], v_shape[3], k_shape[1], Strides(*k_strides[:3]), Strides(*v_strides[:3]),
                       Strides(*scale_strides))


def check_cache_strides(name: str, caches: Caches) -> None:
    """Raises ValueError for strides that the kernels of ``name`` do not support."""
    k, v, k_scale, v_scale = caches
    if k.stride(3) != 1 or v.stride(3) != 1:
        raise ValueError(f"{name} needs KV caches whose last dim is contiguous, got strides {k.stride()} and {v.stride()}")
    if k_scale is not None and v_scale is not None and k_scale.stride() != v_scale.stride():
        raise ValueError(f"{name} needs k_scale and v_scale of the same strides, got {k_scale.stride()} and "
                         f"{v_scale.stride()}")


def rows_contiguous(x: torch.Tensor) -> torch.Tensor:
    """``x``, copied if its last dim is not contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()


@functools.cache
def kernel_module(name: str) -> Any:
    """The module ``quire.attn_ops.<name>``, imported at the first call: it needs Triton."""
    return importlib.import_module(f"quire.attn_ops.{name}")


def on_device(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """A context in which Triton launches on ``device``: it launches on the current one."""
    current = device.type != "cuda" or device.index == torch.cuda.current_device()
    return contextlib.nullcontext() if current else torch.cuda.device(device)


@functools.cache
def num_sms(device: torch.device) -> int:
    """Multiprocessors of the GPU; for the interpreter 8, few enough that tests split keys too."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 8


#: Bytes of a multiprocessor's shared memory that launch parameters leave: CUDA takes 1 KB, and results are transposed there.
SPARE_MEMORY = 16 * 1024


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory per multiprocessor; for the interpreter those of an H100."""
    return torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor if device.type == "cuda" else 233472


def next_power_of_2(n: int, minimum: int = 1) -> int:
    """The smallest power of two >= n and >= ``minimum``, itself a power of two."""
    return max(minimum, 1 << (n - 1).bit_length())


def head_blocks(group: int, rows: int) -> tuple[int, int]:
    """Split the query heads of one key head into blocks of at most ``rows``: (blocks, heads per block)."""
    blocks = -(-group // rows)
    return blocks, -(-group // blocks)


def new_counters(device: torch.device) -> torch.Tensor:
    return torch.zeros(NUM_COUNTERS, dtype=torch.int32, device=device)


def use_pdl(device: torch.device, tokens: int) -> bool:
    """Whether to use PDL for a step of ``tokens`` tokens. QUIRE_PDL=1: always, QUIRE_PDL=0: never."""
    setting = _pdl_setting()
    return (tokens <= PDL_MAX_TOKENS if setting is None else setting) and _has_pdl(device)


def pdl_in_pairs(device: torch.device) -> bool:
    """Whether the second of two kernels of one op is launched with PDL, for any number of tokens, unless QUIRE_PDL=0: NOTE
    [Pairs] in pdl.py."""
    return _pdl_setting() is not False and _has_pdl(device)


@functools.cache
def _pdl_setting() -> bool | None:
    return {"0": False, "1": True}.get(os.environ.get("QUIRE_PDL", ""))


@functools.cache
def is_hopper(device: torch.device) -> bool:
    """Whether it is a GPU of an H200's architecture: launch parameters measured there run there as well."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device)[0] == 9


@functools.cache
def _has_pdl(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
