"""Sampling a token per row of logits (B, V), inside a traced graph and outside of one. ``sample_tokens``.

The Gumbel-max trick (Gumbel 1954; Yellott 1977): for independent exponential e_v, the token that maximizes ``logits_v /
temperature - log(e_v)`` is distributed as ``softmax(logits / temperature)``. So nothing is normalized, sorted or summed, and a
row is one pass over its logits, without noise if it is greedy.

On a CPU it is plain PyTorch, ``sample_tokens_eager``, which torch.compile fuses into one reduction. On CUDA it is the op
``torch.ops.quire.sample_tokens``, a Triton kernel (``attn_ops/kernels/sampling.py``), which reads a row's temperature first:
the fused reduction computes the noise of greedy rows too, three 64-bit multiplications and two logarithms per logit.

NOTE [Same seed, same tokens]: the noise e_v is a function of (seed, position, v) alone: no generator has a state that other
rows, the order of scheduling or a preemption could advance. The hash is in 64-bit integers, which agree on every device. Two
runs can still differ where their logits do (another batch size can change the last bits of a matrix product) or where two
scores agree to the last bits (``log`` may differ between devices).
"""

from __future__ import annotations

import importlib.util
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.attn_ops.kernels import host
from quire.attn_ops.kernels.launch import launch
from quire.attn_ops.library import define_op

INVALID_TOKEN = -1

#: dtypes that the kernel supports. Its scores are float32, too coarse for float64.
KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_HAS_TRITON = importlib.util.find_spec("triton") is not None

# SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014; this output function is
# variant 13 of Stafford's mixers, as in java.util.SplittableRandom). Written as signed numbers: torch multiplies and
# adds int64 modulo 2**64.
_GAMMA = 0x9E3779B97F4A7C15 - (1 << 64)
_MULTIPLIERS = (0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64))

# float32 bits as int32, the lower 31 flipped where negative, order as the numbers do. See `winner`.
_NAN_RANK, _INF_RANK, _MINUS_INF_RANK = 0x7FFF_FFFF, 0x7F80_0000, -0x7F80_0001


def sample_tokens(logits: Tensor, temperature: Tensor, seed: Tensor, position: Tensor) -> Tensor:
    """A token per row, sampled at its temperature; for a greedy row the first of the likeliest, like ``torch.argmax``: (B,)
    int64, INVALID_TOKEN (-1) for a row with a NaN, with only -inf, or with +inf unless greedy.

    Args:
        logits: (B, V) of any floating dtype. -inf excludes a token.
        temperature: (B,) float32; under 1e-5 for a greedy row.
        seed, position: (B,) int64; position: index of the token to sample, from any fixed origin.
    """
    if uses_kernel(logits):
        return sample_tokens_op(logits, temperature, seed, position)
    return sample_tokens_eager(logits, temperature, seed, position)


def sample_tokens_eager(logits: Tensor, temperature: Tensor, seed: Tensor, position: Tensor) -> Tensor:
    x, index = chunks(logits)
    sampled = winner(score(x, index, temperature, seed, position), index, temperature)
    if logits.dtype != torch.float64:
        return sampled
    best, token = logits.max(-1)  # the scores are float32: too coarse for a greedy row
    return torch.where(is_greedy(temperature), torch.where(best > -math.inf, token, INVALID_TOKEN), sampled)


def uses_kernel(logits: Tensor) -> bool:
    """Whether the op samples from these logits. Decided while tracing: on a CPU the op would run plain functions unfused."""
    return logits.is_cuda and logits.dtype in KERNEL_DTYPES and _HAS_TRITON


#: Logits that a program reads at once, and the number of programs to aim for: enough loads in flight to hide the memory's
#: latency (an H200 runs about a thousand at a time), and to spread a sampled row among greedy ones.
BLOCK, PROGRAMS = 1024, 2048


def _eager(logits: Tensor, temperature: Tensor, seed: Tensor, position: Tensor) -> Tensor:
    if not logits.numel():
        return torch.full((logits.shape[0],), INVALID_TOKEN, dtype=torch.int64, device=logits.device)
    return sample_tokens_eager(logits, temperature, seed, position)


def divide(rows: int, vocabulary: int) -> tuple[int, int]:
    """How to split rows among about PROGRAMS programs, by shape: (parts per row, logits per part, a multiple of BLOCK)."""
    blocks = -(-vocabulary // BLOCK)
    blocks_per_part = -(-blocks // max(1, min(blocks, PROGRAMS // rows)))
    return -(-blocks // blocks_per_part), blocks_per_part * BLOCK


def sample_tokens_cuda(logits: Tensor, temperature: Tensor, seed: Tensor, position: Tensor, *, pdl: bool | None = None
                       ) -> Tensor:
    """The op on CUDA: one launch, or two where rows are split, the second of which picks among the parts of each row. (The last
    program of a row could do that, see NOTE [Last one merges], with counters that would be shared among streams, or zeroed by a
    launch of their own.) ``pdl``: see attn_ops/kernels/pdl.py; None: ``host.use_pdl``."""
    if not logits.numel() or logits.dtype not in KERNEL_DTYPES:
        return _eager(logits, temperature, seed, position)
    rows, vocabulary = logits.shape
    kernels = host.kernel_module("kernels.sampling")
    pdl = host.use_pdl(logits.device, rows) if pdl is None else pdl
    logits = logits if vocabulary == 1 else host.rows_contiguous(logits)
    temperature, seed, position = temperature.contiguous(), seed.contiguous(), position.contiguous()
    parts, part_size = divide(rows, vocabulary)
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    keys = tokens if parts == 1 else torch.empty(rows, parts, dtype=torch.int64, device=logits.device)
    launch(
        kernels.sample_kernel, (rows, parts),
        logits, temperature, seed, position, keys, vocabulary, logits.stride(0), part_size, BLOCK=BLOCK, WHOLE=parts == 1,
        pdl=pdl, num_warps=4)
    if parts > 1:
        launch(kernels.pick_kernel, (rows,), keys, temperature, tokens, parts, BLOCK=128, pdl=pdl, num_warps=1)
    return tokens


sample_tokens_op = define_op(
    "sample_tokens(Tensor logits, Tensor temperature, Tensor seed, Tensor position) -> Tensor", cpu=_eager,
    cuda=sample_tokens_cuda, fake=lambda logits, *_: logits.new_empty(logits.shape[0], dtype=torch.int64), launches=True)


def chunks(logits: Tensor) -> tuple[Tensor, Tensor]:
    """(B, V) as (B, chunks, tokens per chunk), float32, padded with -inf; token ids without B. GPUs reduce them in parallel."""
    count = 64 if on_gpu(logits) else 1
    missing = -logits.shape[1] % count
    if missing:
        logits = F.pad(logits, (0, missing), value=-math.inf)
    x = logits.view(logits.shape[0], count, logits.shape[1] // count).float()  # no -1: there may be no rows
    return x, torch.arange(logits.shape[1], device=logits.device).view(x.shape[1:])


def on_gpu(tensor: Tensor) -> bool:
    return tensor.is_cuda


def is_greedy(temperature: Any) -> Any:
    """Whether a temperature (a number or a tensor) counts as 0."""
    # vLLM's bound; dividing by much less would overflow. A literal: torch.compile turns a global float into an input.
    return temperature < 1e-5


def inverse(temperature: Tensor) -> Tensor:
    """(B, 1, 1): 1 / temperature, and 1 for greedy rows."""
    return torch.where(is_greedy(temperature), 1.0, 1.0 / temperature)[:, None, None]


def score(x: Tensor, index: Tensor, temperature: Tensor, seed: Tensor, position: Tensor) -> Tensor:
    """logits / temperature plus Gumbel noise, float32, of x's shape; for greedy rows the logits."""
    noise = gumbel_noise(seed[:, None, None], position[:, None, None], index)
    return x * inverse(temperature) + torch.where(is_greedy(temperature)[:, None, None], 0.0, noise)


def winner(score: Tensor, index: Tensor, temperature: Tensor) -> Tensor:
    """(B,) int64: the token with the highest score in each row, the first of equals, or INVALID_TOKEN. One reduction finds
    score and token: the maximum of 64-bit keys with the score's rank above and the token below, complemented so that of equal
    scores the lower token is the larger key. A NaN outranks all."""
    pattern = score.view(torch.int32)
    rank = torch.where(score.isnan(), _NAN_RANK, pattern ^ ((pattern >> 31) & 0x7FFF_FFFF))
    # Xor, not minus: torch.compile would do the subtraction from an index in 32 bits.
    best = ((rank.long() << 32) | (index ^ 0xFFFF_FFFF)).amax(-1).amax(-1)
    rank, token = best >> 32, (best & 0xFFFF_FFFF) ^ 0xFFFF_FFFF
    below = torch.where(is_greedy(temperature), _NAN_RANK, _INF_RANK)
    return torch.where((rank > _MINUS_INF_RANK) & (rank < below), token, INVALID_TOKEN)


def gumbel_noise(seed: Tensor, position: Tensor, index: Tensor) -> Tensor:
    """Standard Gumbel noise, float32, a function of the three int64 arguments alone, which broadcast together."""
    return _gumbel(random_bits(seed, position, index))


def _gumbel(bits: Tensor) -> Tensor:
    """Standard Gumbel variates, float32, from 64 random bits each: ``-log(exponential)``."""
    # 53 bits, never all zero, of which float32 keeps the leading 24 (and rounds the largest to 1, hence the clamp). So
    # the uniform is dense near 0, which gives the smallest exponentials, the winners; with only 24 bits, several tokens
    # of a large vocabulary would share the smallest one.
    uniform = (_shift(bits, 11) | 1).float() * 2.0**-53
    return -torch.log(-torch.log1p(-uniform.clamp(max=1 - 2.0**-24)))


def random_bits(seed: Tensor, position: Tensor, index: Tensor) -> Tensor:
    """64 random bits, as int64, for every (seed, position, index); arguments int64, broadcast together. SplitMix64 at random
    access, three levels deep: output number `seed` is where the outputs of the positions start, and each of those is where the
    outputs of its indices start. Starts are random among 2**64, so sequences practically never overlap."""
    return _split_mix(_split_mix(_split_mix(seed) + position) + index)


def _split_mix(n: Tensor) -> Tensor:
    """Output number `n`, from 0, of the SplitMix64 generator whose first state is 0. (A generator with state s is the same
    sequence from number s / gamma on, as gamma is odd. Adding before multiplying also keeps torch.compile from computing
    indices in 32 bits, as it would for ``arange(...) * gamma``.)"""
    z = (n + 1) * _GAMMA
    z = (z ^ _shift(z, 30)) * _MULTIPLIERS[0]
    z = (z ^ _shift(z, 27)) * _MULTIPLIERS[1]
    return z ^ _shift(z, 31)


def _shift(z: Tensor, bits: int) -> Tensor:
    """Logical shift to the right; int64's own copies the sign bit."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)
