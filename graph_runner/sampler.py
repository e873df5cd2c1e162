"""Sampling: from logits to token ids, on the device and without reading anything back.

Letters: B rows (sequences), V the vocabulary.

A row is drawn by the Gumbel-max trick (Gumbel 1954; Yellott 1977): for independent exponential e_v, the token that
maximises ``logits_v / temperature - log(e_v)`` is distributed as ``softmax(logits / temperature)``. So nothing is
normalised, sorted or summed, and a row is one pass over its logits that torch.compile fuses into one reduction.
Filters leave that pass as it is: top-k, top-p and min-p each keep the tokens at or above some logit, so what they
compute is one threshold a row.

NOTE [Same seed, same tokens]: the noise e_v is a function of (seed, position, v) alone: no generator has a state that
other rows, the order of scheduling or a preemption could advance. The hash is in 64-bit integers, which agree on every
device. Two runs can still differ where their logits do (another batch size can change the last bits of a matrix
product) or where two scores agree to the last bits (``log`` may differ between devices).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from graph_runner.sampling_params import SamplingParams

INVALID_TOKEN = -1

# SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014; this output function is
# variant 13 of Stafford's mixers, as in java.util.SplittableRandom). Written as signed numbers: torch multiplies and
# adds int64 modulo 2**64.
_GAMMA = 0x9E3779B97F4A7C15 - (1 << 64)
_MULTIPLIERS = (0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64))

# float32 bits as int32, the lower 31 flipped where negative, order as the numbers do. See `_winner`.
_NAN_RANK, _INF_RANK, _MINUS_INF_RANK = 0x7FFF_FFFF, 0x7F80_0000, -0x7F80_0001


@dataclass(frozen=True)
class SamplingTensors:
    """How to sample each row of a batch.

    Args:
        temperature: (B,) float32, device; under 1e-5 for a greedy row, whose filters are ignored.
        top_k: (B,) int32, device; 0 is off.
        top_p: (B,) float32, device; 1 is off.
        min_p: (B,) float32, device; 0 is off.
        seed: (B,) int64, device.
        position: (B,) int64, device: index of the token to sample, counted from anywhere as long as it is the same for
            this token whenever it is sampled (again).
        all_greedy: every row is greedy.
        any_top_k, any_top_p, any_min_p: some row that is not greedy has that filter on.
        banned: None, or (N, 2) int64, device: pairs of a row and a token that the row must not get.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seed: Tensor
    position: Tensor
    all_greedy: bool
    any_top_k: bool
    any_top_p: bool
    any_min_p: bool
    banned: Tensor | None = None

    @property
    def any_filter(self) -> bool:
        """Some row that is not greedy has top_k, top_p or min_p on."""
        return self.any_top_k or self.any_top_p or self.any_min_p

    @classmethod
    def build(
        cls,
        params: Sequence[SamplingParams],
        seeds: Sequence[int],
        positions: Sequence[int],
        device: torch.device | str,
        *,
        banned: Sequence[Sequence[int]] | None = None,
    ) -> SamplingTensors:
        """Make the tensors of a batch: one copy to the device, which the host does not wait for.

        Args:
            params: of each row.
            seeds: of each row, any integers. A request without a seed needs one that stays its own; the ``n`` sequences
                of a request need different ones.
            positions: of each row, see `position`.
            device: where the tensors go.
            banned: for each row the tokens that it must not get, e.g. those that end it before ``min_tokens``. Ids that
                the vocabulary does not have are ignored.

        Raises:
            ValueError: lists of different lengths, or a negative id in `banned`.
        """
        size = len(params)
        if not len(seeds) == len(positions) == size or (banned is not None and len(banned) != size):
            raise ValueError(
                f"params, seeds, positions{' and banned' if banned is not None else ''} describe {size}, {len(seeds)}, "
                f"{len(positions)}{f' and {len(banned)}' if banned is not None else ''} rows; they must be as many"
            )
        draws = [not _is_greedy(p.temperature) for p in params]  # the filters of a greedy row change nothing
        temperature = np.array([p.temperature if d else 0.0 for p, d in zip(params, draws, strict=True)], np.float32)
        top_k = np.array([p.top_k if d else 0 for p, d in zip(params, draws, strict=True)], np.int64)
        top_p = np.array([p.top_p if d else 1.0 for p, d in zip(params, draws, strict=True)], np.float32)
        min_p = np.array([p.min_p if d else 0.0 for p, d in zip(params, draws, strict=True)], np.float32)
        pairs = [(row, token) for row, tokens in enumerate(banned or ()) for token in tokens]
        if any(token < 0 for _, token in pairs):
            raise ValueError(f"banned token ids must not be negative, got {min(token for _, token in pairs)}")

        columns: list[np.ndarray] = [  # the 8-byte ones first, so that all are aligned in one buffer
            np.array([int(seed) % (1 << 64) for seed in seeds], np.uint64).view(np.int64),
            np.asarray(positions, np.int64).reshape(size),
            np.asarray(pairs, np.int64).reshape(-1),
            temperature, top_p, min_p,
            np.clip(top_k, 0, np.iinfo(np.int32).max).astype(np.int32),
        ]
        seed_, position_, banned_, temperature_, top_p_, min_p_, top_k_ = _to_device(columns, torch.device(device))
        return cls(
            temperature=temperature_, top_k=top_k_, top_p=top_p_, min_p=min_p_, seed=seed_, position=position_,
            all_greedy=not any(draws), any_top_k=bool((top_k > 0).any()), any_top_p=bool((top_p < 1).any()),
            any_min_p=bool((min_p > 0).any()), banned=banned_.view(-1, 2) if pairs else None,
        )


def sample(logits: Tensor, params: SamplingTensors) -> Tensor:
    """Sample one token a row, in plain PyTorch. Reads nothing back to the host. See `Sampler` for the compiled form.

    Greedy rows get the first of the largest logits, as from ``torch.argmax``. Other rows are drawn from
    ``softmax(logits / temperature)`` after top_k, then top_p, then min_p, which is the order of vLLM and of Hugging
    Face's ``generate``. Equal logits share their fate: where the last token kept by top_k or top_p has equals, they are
    kept as well (``generate`` does so in top_k, and in top_p keeps some of them, as its sort happens to put them).

    Args:
        logits: (B, V) of any floating dtype. -inf excludes a token. Not modified.
        params: of the B rows, on the same device.

    Returns:
        (B,) int64 token ids; INVALID_TOKEN (-1) for a row with a NaN, with nothing but -inf, or to be drawn from +inf.

    Raises:
        ValueError: logits that are not (B, V) or not floating point.
    """
    return _sample(logits, params, lambda function: function)


class Sampler:
    """`sample`, with its pieces compiled on CUDA and plain on a CPU.

    The pieces (drawing, with and without filters, and one for each filter) are compiled when first needed, with dynamic
    shapes; a batch needs up to four of them, and a greedy one none. A piece is compiled twice for a dtype of logits, as
    torch.compile treats a batch of one as a shape of its own, and all instances share what is compiled.
    """

    def __init__(self, *, compile: bool = True) -> None:
        """
        Args:
            compile: False for plain PyTorch on CUDA too, which is slow with filters.
        """
        self._compile = compile

    def __call__(self, logits: Tensor, params: SamplingTensors) -> Tensor:
        """See `sample`."""
        return _sample(logits, params, _compiled if self._compile and logits.is_cuda else lambda piece: piece)


_Piece = Callable[..., Tensor]


@functools.cache
def _compiled(piece: _Piece) -> _Piece:
    return torch.compile(piece, dynamic=True)


@torch.no_grad()
def _sample(logits: Tensor, params: SamplingTensors, get: Callable[[_Piece], _Piece]) -> Tensor:
    """`sample`, with each piece run as ``get(piece)``."""
    rows = params.temperature.shape[0]
    if logits.dim() != 2 or logits.shape[0] != rows or not logits.is_floating_point():
        raise ValueError(f"logits must be floating point of shape ({rows}, V), a row for each of params, got "
                         f"{logits.dtype} of shape {tuple(logits.shape)}")
    if not logits.numel():
        return torch.full((rows,), INVALID_TOKEN, dtype=torch.int64, device=logits.device)
    if params.banned is not None:
        logits = _without(logits, params.banned)
    if params.all_greedy:
        best, token = logits.max(-1)  # the first of equals; a NaN is the maximum, and not greater than -inf
        return torch.where(best > -math.inf, token, INVALID_TOKEN)
    if logits.dtype == torch.float64:
        logits = logits.float()
    row_params = (params.temperature, params.seed, params.position)
    if not params.any_filter:
        return get(_draw)(logits, *row_params)
    threshold = torch.full((rows,), -math.inf, device=logits.device)
    if params.any_top_k:
        threshold = get(_top_k_threshold)(logits, params.top_k)
    if params.any_top_p:
        threshold = get(_top_p_threshold)(logits, params.temperature, params.top_p, threshold)
    if params.any_min_p:
        threshold = get(_min_p_threshold)(logits, params.temperature, params.min_p, threshold)
    return get(_draw_filtered)(logits, *row_params, threshold)


# ---- the pieces that are compiled


def _draw(logits: Tensor, temperature: Tensor, seed: Tensor, position: Tensor) -> Tensor:
    """(B,) int64: a token of each row; of a greedy row the likeliest."""
    x, index = _chunks(logits)
    return _winner(_score(x, index, temperature, seed, position), index, temperature)


def _draw_filtered(logits: Tensor, temperature: Tensor, seed: Tensor, position: Tensor, threshold: Tensor) -> Tensor:
    """`_draw` among the tokens with a logit of at least `threshold` (B,), which greedy rows ignore."""
    x, index = _chunks(logits)
    score = _score(x, index, temperature, seed, position)
    threshold = torch.where(_is_greedy(temperature), -math.inf, threshold)[:, None, None]
    return _winner(torch.where(x < threshold, -math.inf, score), index, temperature)  # a NaN is not less, and stays


def _top_k_threshold(logits: Tensor, top_k: Tensor) -> Tensor:
    """(B,) float32: the k-th largest logit of each row; -inf where `top_k` is 0 or more than there are."""
    x, _ = _chunks(logits)

    def count(pivot: Tensor, below: Tensor) -> Tensor:
        return (x >= pivot[:, None, None]).sum(-1, dtype=torch.int32).sum(-1, dtype=torch.int32)

    unbounded = torch.full(top_k.shape, -math.inf, device=x.device)
    return torch.where(top_k > 0, _largest_pivot(count, top_k, unbounded, logits.dtype), unbounded)


def _top_p_threshold(logits: Tensor, temperature: Tensor, top_p: Tensor, threshold: Tensor) -> Tensor:
    """(B,) float32: the least likely logit that top_p keeps of those at or above `threshold`.

    The largest pivot such that the tokens at or above it have at least `top_p` of the probability: without the least
    likely of them they would have less.
    """
    x, _ = _chunks(logits)
    peak = x.amax((1, 2))

    def mass(pivot: Tensor, below: Tensor) -> Tensor:
        # What the search has found so far is never above the peak, so `maximum` changes no number. It makes
        # torch.compile compute the weights anew in each pass, instead of once into (B, V) float32 for all to read.
        weight = torch.exp((x - torch.maximum(peak, below)[:, None, None]) * _inverse(temperature))
        return torch.where(x >= pivot[:, None, None], weight, 0.0).sum(-1).sum(-1)

    pivot = _largest_pivot(mass, top_p * mass(threshold, threshold), threshold, logits.dtype)
    return torch.where(top_p < 1, pivot, threshold)


def _min_p_threshold(logits: Tensor, temperature: Tensor, min_p: Tensor, threshold: Tensor) -> Tensor:
    """(B,) float32: `threshold`, or where it is higher the logit of a token `min_p` times as likely as the likeliest.

    The likeliest is never filtered and the ratio does not depend on what was, so min_p need not wait for the others.
    """
    peak = _chunks(logits)[0].amax((1, 2))
    return torch.maximum(threshold, torch.where(min_p > 0, peak + temperature * torch.log(min_p), -math.inf))


# ---- noise


def gumbel_noise(seed: Tensor, position: Tensor, index: Tensor) -> Tensor:
    """Standard Gumbel noise, float32, a function of the three int64 arguments alone, which broadcast together."""
    return _gumbel(random_bits(seed, position, index))


def _gumbel(bits: Tensor) -> Tensor:
    """Standard Gumbel variates, float32, from 64 random bits each: ``-log(exponential)``."""
    # 53 bits, never all zero, of which float32 keeps the leading 24 (and rounds the largest to 1, hence the clamp). So
    # the uniform is dense towards 0, where the smallest exponentials come from, which are the winners; with 24 bits in
    # all, several tokens of a large vocabulary would share the smallest one.
    uniform = (_shift(bits, 11) | 1).float() * 2.0**-53
    return -torch.log(-torch.log1p(-uniform.clamp(max=1 - 2.0**-24)))


def random_bits(seed: Tensor, position: Tensor, index: Tensor) -> Tensor:
    """64 random bits, as int64, for every (seed, position, index); arguments int64, broadcast together.

    SplitMix64 at random access, three deep: the output at place `seed` is where the outputs of the positions start, and
    each of those is where the outputs of its indices start. Starts are random among 2**64 places, so sequences of a few
    hundred thousand practically never overlap, and the seeds that users choose, 0, 1, 2, start unrelated ones.
    """
    return _split_mix(_split_mix(_split_mix(seed) + position) + index)


def _split_mix(n: Tensor) -> Tensor:
    """Output number `n`, from 0, of the SplitMix64 generator whose first state is 0.

    (A generator with state s is the same sequence from place s / gamma on, as gamma is odd. Adding before multiplying
    also keeps torch.compile from computing on what it knows to be an index in 32 bits: it would do so with
    ``arange(...) * gamma``.)
    """
    z = (n + 1) * _GAMMA
    z = (z ^ _shift(z, 30)) * _MULTIPLIERS[0]
    z = (z ^ _shift(z, 27)) * _MULTIPLIERS[1]
    return z ^ _shift(z, 31)


def _shift(z: Tensor, bits: int) -> Tensor:
    """Logical shift to the right; int64's own copies the sign bit."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


# ---- searching a threshold

# On CUDA. More bits a pass mean fewer passes over the logits, and 2**bits - 1 pivots to compare each of them with.
_BITS_A_PASS = 2


def _largest_pivot(
    measure: Callable[[Tensor, Tensor], Tensor], target: Tensor, floor: Tensor, dtype: torch.dtype
) -> Tensor:
    """(B,) float32: the largest value of `dtype`, at least `floor`, that measures at least `target`; else `floor`.

    A radix search: the bits of the answer are found from the highest down. Floats of one sign compare as their bits do
    as integers, so each float has a rank (`_rank`), and 16 or 32 bits of rank are all there is to find: exactly,
    without sorting, in the same number of passes whatever the logits are.

    Args:
        measure: of a pivot (B,) float32, something (B,) of the tokens at or above it: their number or their
            probability. Must not grow with the pivot. Its second argument is (B,) float32, what the search has found so
            far: at most the answer.
        target: (B,), compared with the measure.
        floor: (B,) float32, each a value of `dtype`; the search does not go below.
        dtype: of the logits: float32 or a 16-bit one.
    """
    bits = dtype.itemsize * 8
    step = _BITS_A_PASS if _on_gpu(floor) else 1  # not compiled, pivots share nothing: measure as few as can be
    lowest = _rank(floor, dtype)
    found = torch.zeros_like(lowest)
    for shift in range(bits - step, -1, -step):
        below = _unrank(torch.maximum(found, lowest), dtype)
        digit = torch.zeros_like(found)
        for candidate in range(1, 1 << step):
            pivot = _unrank(torch.maximum(found + (candidate << shift), lowest), dtype)
            digit = digit + (measure(pivot, below) >= target)
        found = found + (digit << shift)
    return _unrank(torch.maximum(found, lowest), dtype)


def _rank(value: Tensor, dtype: torch.dtype) -> Tensor:
    """int64 in [0, 2**bits) that orders as the floats do. `value` is float32 and holds numbers of `dtype`."""
    pattern = value.to(dtype).view(_integer(dtype)).long()
    return torch.where(pattern >= 0, pattern + (1 << (dtype.itemsize * 8 - 1)), -1 - pattern)


def _unrank(rank: Tensor, dtype: torch.dtype) -> Tensor:
    """The float32 with that rank. Ranks past +inf give NaN, which no logit is at or above."""
    half = 1 << (dtype.itemsize * 8 - 1)
    pattern = torch.where(rank >= half, rank - half, -1 - rank)
    return pattern.to(_integer(dtype)).view(dtype).float()


def _integer(dtype: torch.dtype) -> torch.dtype:
    return torch.int16 if dtype.itemsize == 2 else torch.int32


# ---- rows


def _chunks(logits: Tensor) -> tuple[Tensor, Tensor]:
    """(B, V) cut into (B, chunks, tokens a chunk), float32, padded with -inf; and the token ids, without B.

    A GPU reduces the chunks of a row side by side: one row of 150 000 logits is too much for one of its processors.
    """
    count = 64 if _on_gpu(logits) else 1
    missing = -logits.shape[1] % count
    if missing:
        logits = F.pad(logits, (0, missing), value=-math.inf)
    x = logits.view(logits.shape[0], count, -1).float()
    return x, torch.arange(logits.shape[1], device=logits.device).view(x.shape[1:])


def _on_gpu(tensor: Tensor) -> bool:
    return tensor.is_cuda


def _is_greedy(temperature: Any) -> Any:
    """Does a temperature, or each of a tensor of them, count as 0?"""
    # vLLM's bound; dividing by much less would overflow. A literal, as torch.compile makes an input of a global float.
    return temperature < 1e-5


def _inverse(temperature: Tensor) -> Tensor:
    """(B, 1, 1): 1 / temperature, and 1 for greedy rows."""
    return torch.where(_is_greedy(temperature), 1.0, 1.0 / temperature)[:, None, None]


def _score(x: Tensor, index: Tensor, temperature: Tensor, seed: Tensor, position: Tensor) -> Tensor:
    """The shape of `x`, float32: logits / temperature with Gumbel noise, and the logits of greedy rows."""
    noise = gumbel_noise(seed[:, None, None], position[:, None, None], index)
    return x * _inverse(temperature) + torch.where(_is_greedy(temperature)[:, None, None], 0.0, noise)


def _winner(score: Tensor, index: Tensor, temperature: Tensor) -> Tensor:
    """(B,) int64: the token with the highest score in each row, the first of equals, or INVALID_TOKEN.

    One reduction finds score and token: the maximum of 64-bit keys with the score's rank above and the token below,
    complemented so that of equal scores the lower token is the larger key. A NaN outranks all.
    """
    pattern = score.view(torch.int32)
    rank = torch.where(score.isnan(), _NAN_RANK, pattern ^ ((pattern >> 31) & 0x7FFF_FFFF))
    # Xor, not minus: torch.compile would do the subtraction from an index in 32 bits.
    best = ((rank.long() << 32) | (index ^ 0xFFFF_FFFF)).amax(-1).amax(-1)
    rank, token = best >> 32, (best & 0xFFFF_FFFF) ^ 0xFFFF_FFFF
    below = torch.where(_is_greedy(temperature), _NAN_RANK, _INF_RANK)
    return torch.where((rank > _MINUS_INF_RANK) & (rank < below), token, INVALID_TOKEN)


def _without(logits: Tensor, banned: Tensor) -> Tensor:
    """A copy of the logits, -inf at the (row, token) pairs of `banned`. Ids past the vocabulary hit a spare column."""
    rows, vocabulary = logits.shape
    mask = torch.zeros((rows, vocabulary + 1), dtype=torch.bool, device=logits.device)
    yes = torch.ones((), dtype=torch.bool, device=logits.device)  # `mask[...] = True` copies from the host, and waits
    mask.index_put_((banned[:, 0], banned[:, 1].clamp(max=vocabulary)), yes)
    return logits.masked_fill(mask[:, :vocabulary], -math.inf)


def _to_device(columns: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """The columns as tensors that share one buffer, so that one copy moves them all."""
    columns = list(columns)
    ends = np.cumsum([column.nbytes for column in columns]).tolist()
    pinned = device.type == "cuda"  # else the host would wait for the copy
    host = torch.empty(ends[-1], dtype=torch.uint8, pin_memory=pinned)
    host.numpy()[:] = np.concatenate([column.view(np.uint8) for column in columns])
    buffer = host.to(device, non_blocking=True)
    return [
        buffer[end - column.nbytes : end].view(getattr(torch, column.dtype.name))
        for column, end in zip(columns, ends, strict=True)
    ]


__all__ = ["INVALID_TOKEN", "Sampler", "SamplingTensors", "gumbel_noise", "random_bits", "sample"]
