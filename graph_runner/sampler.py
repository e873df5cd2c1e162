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

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from graph_runner.sampling_params import SamplingParams

INVALID_TOKEN = -1

# vLLM's bound, below which a temperature counts as 0. Dividing by much less than this would overflow.
_GREEDY_BELOW = 1e-5

# SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014; this output function is
# variant 13 of Stafford's mixers, as in java.util.SplittableRandom). Written as signed numbers: torch multiplies and
# adds int64 modulo 2**64.
_GAMMA = 0x9E3779B97F4A7C15 - (1 << 64)
_MULTIPLIERS = (0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64))


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
        draws = [p.temperature >= _GREEDY_BELOW for p in params]  # the filters of a greedy row change nothing
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
    """`sample`, compiled on CUDA and plain on a CPU.

    The pieces are compiled with dynamic shapes when first needed: greedy, drawing, and one for each filter. A batch
    needs up to four of them; none waits for the device. Every piece is compiled twice at most for a dtype of logits
    (torch.compile treats a batch of one as a shape of its own), which keeps it under Dynamo's recompile limit.
    """

    def __init__(self, *, compile: bool = True) -> None:
        """
        Args:
            compile: False for plain PyTorch on CUDA too.
        """
        self._compile = compile
        self._compiled: dict[Callable[..., Tensor], Callable[..., Tensor]] = {}

    def __call__(self, logits: Tensor, params: SamplingTensors) -> Tensor:
        """See `sample`."""
        compiles = self._compile and logits.is_cuda
        return _sample(logits, params, self._get if compiles else lambda function: function)

    def _get(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        if function not in self._compiled:
            self._compiled[function] = torch.compile(function, dynamic=True, fullgraph=True)
        return self._compiled[function]


@torch.no_grad()
def _sample(
    logits: Tensor, params: SamplingTensors, get: Callable[[Callable[..., Tensor]], Callable[..., Tensor]]
) -> Tensor:
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
        return get(_greedy)(logits)
    if logits.dtype == torch.float64:
        logits = logits.float()
    temperature = _own(params.temperature)
    threshold = torch.full_like(temperature, -math.inf)
    if params.any_top_k:
        threshold = get(_top_k_threshold)(logits, _own(params.top_k))
    if params.any_top_p:
        threshold = get(_top_p_threshold)(logits, temperature, _own(params.top_p), threshold)
    if params.any_min_p:
        threshold = get(_min_p_threshold)(logits, temperature, _own(params.min_p), threshold)
    return get(_draw)(logits, temperature, _own(params.seed), _own(params.position), threshold)


def _own(tensor: Tensor) -> Tensor:
    """The tensor at the start of a storage of its own.

    Dynamo makes a symbol of every offset into a storage. Where the offset of a column of a shared buffer happens to
    equal the batch size, it takes the two for one number, and compiles again for the next batch, where they differ.
    """
    return tensor.clone() if tensor.storage_offset() else tensor


# ---- the pieces that are compiled


def _greedy(logits: Tensor) -> Tensor:
    """(B,) int64: the first of the largest logits of each row."""
    token, best = _argmax(_chunks(logits))
    return torch.where(best > -math.inf, token, INVALID_TOKEN)  # NaN is not greater


def _draw(logits: Tensor, temperature: Tensor, seed: Tensor, position: Tensor, threshold: Tensor) -> Tensor:
    """(B,) int64: a token of each row with a logit of at least `threshold` (B,); of a greedy row the likeliest."""
    x = _chunks(logits).float()
    greedy = temperature < _GREEDY_BELOW
    index = torch.arange(x.shape[1] * x.shape[2], device=x.device).view(x.shape[1:])
    noise = gumbel_noise(seed[:, None, None], position[:, None, None], index)
    score = x * _inverse(temperature) + torch.where(greedy[:, None, None], 0.0, noise)
    threshold = torch.where(greedy, -math.inf, threshold)
    # Written so that a NaN stays: nothing is less than it, and it is the maximum.
    token, best = _argmax(torch.where(x < threshold[:, None, None], -math.inf, score))
    return torch.where((best > -math.inf) & (greedy | (best < math.inf)), token, INVALID_TOKEN)


def _top_k_threshold(logits: Tensor, top_k: Tensor) -> Tensor:
    """(B,) float32: the k-th largest logit of each row; -inf where `top_k` is 0 or more than there are."""
    x = _chunks(logits).float()

    def count(pivot: Tensor) -> Tensor:
        return (x >= pivot[:, None, None]).sum(-1, dtype=torch.int32).sum(-1, dtype=torch.int32)

    unbounded = torch.full(top_k.shape, -math.inf, device=x.device)
    return torch.where(top_k > 0, _largest_pivot(count, top_k, unbounded, logits.dtype), unbounded)


def _top_p_threshold(logits: Tensor, temperature: Tensor, top_p: Tensor, threshold: Tensor) -> Tensor:
    """(B,) float32: the least likely logit that top_p keeps of those at or above `threshold`.

    The largest pivot such that the tokens at or above it have at least `top_p` of the probability: without the least
    likely of them they would have less.
    """
    x = _chunks(logits).float()
    weight = torch.exp((x - x.amax((1, 2), keepdim=True)) * _inverse(temperature))

    def mass(pivot: Tensor) -> Tensor:
        return torch.where(x >= pivot[:, None, None], weight, 0.0).sum(-1).sum(-1)

    pivot = _largest_pivot(mass, top_p * mass(threshold), threshold, logits.dtype)
    return torch.where(top_p < 1, pivot, threshold)


def _min_p_threshold(logits: Tensor, temperature: Tensor, min_p: Tensor, threshold: Tensor) -> Tensor:
    """(B,) float32: `threshold`, or where it is higher the logit of a token `min_p` times as likely as the likeliest.

    The likeliest is never filtered and the ratio does not depend on what was, so min_p need not wait for the others.
    """
    peak = _chunks(logits).float().amax((1, 2))
    return torch.maximum(threshold, torch.where(min_p > 0, peak + temperature * torch.log(min_p), -math.inf))


# ---- noise


def gumbel_noise(seed: Tensor, position: Tensor, index: Tensor) -> Tensor:
    """Standard Gumbel noise, float32, a function of the three int64 arguments alone, which broadcast together."""
    return _gumbel(random_bits(seed, position, index))


def _gumbel(bits: Tensor) -> Tensor:
    """Standard Gumbel variates, float32, from 64 random bits each: ``-log(exponential)``."""
    # 53 bits, never all zero, and below 1 as float32 too. The uniform is dense towards 0, where the smallest
    # exponentials come from, which are the winners; 24 bits would give several tokens of a large vocabulary the same,
    # smallest one.
    uniform = (_shift(bits, 11) | 1).float() * 2.0**-53
    return -torch.log(-torch.log1p(-uniform.clamp(max=1 - 2.0**-24)))


def random_bits(seed: Tensor, position: Tensor, index: Tensor) -> Tensor:
    """64 random bits, as int64, for every (seed, position, index); arguments int64, broadcast together.

    SplitMix64 read at random access, three deep: the first number from `seed` seeds a sequence of which the number at
    `position` seeds the sequence whose number at `index` is the result. Mixing the seed first keeps seeds that users
    choose, 0, 1, 2, from starting related sequences.
    """
    return _split_mix(_split_mix(_split_mix(seed, torch.zeros_like(seed)), position), index)


def _split_mix(state: Tensor, i: Tensor) -> Tensor:
    """Output number `i` (from 0) of the SplitMix64 generator with this state."""
    z = state + (i + 1) * _GAMMA
    z = (z ^ _shift(z, 30)) * _MULTIPLIERS[0]
    z = (z ^ _shift(z, 27)) * _MULTIPLIERS[1]
    return z ^ _shift(z, 31)


def _shift(z: Tensor, bits: int) -> Tensor:
    """Logical shift to the right; int64's own copies the sign bit."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


# ---- searching a threshold


def _largest_pivot(measure: Callable[[Tensor], Tensor], target: Tensor, floor: Tensor, dtype: torch.dtype) -> Tensor:
    """(B,) float32: the largest value of `dtype`, at least `floor`, with ``measure(value) >= target``; else `floor`.

    A radix search: the bits of the answer are found from the highest down. Floats of one sign compare as their bits do
    as integers, so each float has a rank (`_rank`), and 16 or 32 bits of rank are all there is to find: exactly,
    without sorting, in the same number of passes whatever the logits are.

    Args:
        measure: of a pivot (B,) float32, something (B,) of the tokens at or above it: their number or their
            probability. Must not grow with the pivot.
        target: (B,), compared with the measure.
        floor: (B,) float32, each a value of `dtype`; the search does not go below.
        dtype: of the logits: float32 or a 16-bit one.
    """
    bits = dtype.itemsize * 8
    # Four bits a pass on CUDA: fifteen pivots share one read of the logits, and the passes are bound by reading. On a
    # CPU in plain PyTorch nothing is shared, and one bit a pass measures the fewest pivots.
    step = 4 if _on_gpu(floor) else 1
    lowest = _rank(floor, dtype)
    found = torch.zeros_like(lowest)
    for shift in range(bits - step, -1, -step):
        digit = torch.zeros_like(found)
        for candidate in range(1, 1 << step):
            pivot = _unrank(torch.maximum(found + (candidate << shift), lowest), dtype)
            digit = digit + (measure(pivot) >= target)
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


def _chunks(logits: Tensor) -> Tensor:
    """(B, chunks, tokens a chunk) of (B, V), padded with -inf.

    A GPU reduces the chunks of a row side by side: one row of 150 000 logits is too much for one of its processors, and
    torch.compile does not split the search for a maximum on its own.
    """
    count = 64 if _on_gpu(logits) else 1
    missing = -logits.shape[1] % count
    if missing:
        logits = F.pad(logits, (0, missing), value=-math.inf)
    return logits.view(logits.shape[0], count, -1)


def _on_gpu(tensor: Tensor) -> bool:
    return tensor.is_cuda


def _argmax(score: Tensor) -> tuple[Tensor, Tensor]:
    """((B,) int64, (B,)): index of the first maximum of each row of (B, chunks, tokens a chunk), and the maximum."""
    values, index = score.max(-1)
    best, chunk = values.max(-1)
    return chunk * score.shape[2] + index.gather(1, chunk[:, None])[:, 0], best


def _inverse(temperature: Tensor) -> Tensor:
    """(B, 1, 1): 1 / temperature, and 1 for greedy rows."""
    return torch.where(temperature < _GREEDY_BELOW, 1.0, 1.0 / temperature)[:, None, None]


def _without(logits: Tensor, banned: Tensor) -> Tensor:
    """A copy of the logits, -inf at the (row, token) pairs of `banned`. Ids past the vocabulary hit a spare column."""
    rows, vocabulary = logits.shape
    mask = torch.zeros((rows, vocabulary + 1), dtype=torch.bool, device=logits.device)
    mask[banned[:, 0], banned[:, 1].clamp(max=vocabulary)] = True
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
