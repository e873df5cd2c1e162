"""Sampling: from logits to token ids, on the device and without reading anything back.

Letters: B rows (sequences), V the vocabulary.

How a row is drawn is in ``attn_ops/ops/sampling.py``, as the model's graph draws by itself where no row has a filter. Filters leave
that as it is: top-k, top-p and min-p each keep the tokens at or above some logit, so what they compute is one threshold
a row. See NOTE [Same seed, same tokens].
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire.attn_ops.ops.sampling import INVALID_TOKEN, chunks, inverse, is_greedy, on_gpu, sample_tokens, score, winner
from quire.graph_runner.sampling_params import SamplingParams
from quire.passes.fx import with_own_code


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
        draws = [not is_greedy(p.temperature) for p in params]  # the filters of a greedy row change nothing
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
    """Sample one token a row. Reads nothing back to the host. See `Sampler` for the compiled form.

    In plain PyTorch, except that on CUDA a batch without filters is drawn by the kernel of `sample_tokens`.

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

    The pieces (one for each filter, and drawing from what filters leave) are compiled when first needed, with dynamic
    batch sizes; a batch needs up to four of them, and one without filters none. A piece is compiled twice for a dtype and a
    vocabulary, as torch.compile treats a batch of one as a shape of its own, and all instances share what is compiled.
    """

    def __init__(self, *, compile: bool = True) -> None:
        """
        Args:
            compile: False for nothing compiled on CUDA either, which is slow with filters.
        """
        self._compile = compile

    def __call__(self, logits: Tensor, params: SamplingTensors) -> Tensor:
        """See `sample`."""
        compile, vocabulary = self._compile and logits.is_cuda, logits.shape[-1]
        return _sample(logits, params, lambda piece: _compiled(piece, vocabulary) if compile else piece)


_Piece = Callable[..., Tensor]


@functools.cache
def _compiled(piece: _Piece, vocabulary: int) -> _Piece:
    """The piece compiled for any number of rows of ``vocabulary`` logits. Not for any vocabulary: Inductor cannot split top_p's
    sums where their length is a symbol and no multiple of the number of chunks (torch 2.11 and 2.13)."""
    compiled = torch.compile(with_own_code(piece), dynamic=True)

    def run(logits: Tensor, *rest: Tensor) -> Tensor:
        torch._dynamo.mark_static(logits, 1)
        return compiled(logits, *rest)

    return run


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
        return sample_tokens(logits, *row_params)  # on CUDA one kernel: there is nothing to compile
    threshold = torch.full((rows,), -math.inf, dtype=torch.float32, device=logits.device)
    if params.any_top_k:
        threshold = get(_top_k_threshold)(logits, params.top_k)
    if params.any_top_p:
        threshold = get(_top_p_threshold)(logits, params.temperature, params.top_p, threshold)
    if params.any_min_p:
        threshold = get(_min_p_threshold)(logits, params.temperature, params.min_p, threshold)
    return get(_draw_filtered)(logits, *row_params, threshold)


# ---- the pieces that are compiled


def _draw_filtered(logits: Tensor, temperature: Tensor, seed: Tensor, position: Tensor, threshold: Tensor) -> Tensor:
    """`sample_tokens` among the tokens with a logit of at least `threshold` (B,), which greedy rows ignore."""
    x, index = chunks(logits)
    scores = score(x, index, temperature, seed, position)
    threshold = torch.where(is_greedy(temperature), -math.inf, threshold)[:, None, None]
    return winner(torch.where(x < threshold, -math.inf, scores), index, temperature)  # a NaN is not less, and stays


def _top_k_threshold(logits: Tensor, top_k: Tensor) -> Tensor:
    """(B,) float32: the k-th largest logit of each row; -inf where `top_k` is 0 or more than there are."""
    x, _ = chunks(logits)

    def count(pivot: Tensor, below: Tensor) -> Tensor:
        return (x >= pivot[:, None, None]).sum(-1, dtype=torch.int32).sum(-1, dtype=torch.int32)

    unbounded = torch.full(top_k.shape, -math.inf, dtype=torch.float32, device=x.device)
    return torch.where(top_k > 0, _largest_pivot(count, top_k, unbounded, logits.dtype), unbounded)


def _top_p_threshold(logits: Tensor, temperature: Tensor, top_p: Tensor, threshold: Tensor) -> Tensor:
    """(B,) float32: the least likely logit that top_p keeps of those at or above `threshold`.

    The largest pivot such that the tokens at or above it have at least `top_p` of the probability: without the least
    likely of them they would have less.
    """
    x, _ = chunks(logits)
    peak = x.amax((1, 2))

    def mass(pivot: Tensor, below: Tensor) -> Tensor:
        # What the search has found so far is never above the peak, so `maximum` changes no number. It makes
        # torch.compile compute the weights anew in each pass, instead of once into (B, V) float32 for all to read.
        weight = torch.exp((x - torch.maximum(peak, below)[:, None, None]) * inverse(temperature))
        return torch.where(x >= pivot[:, None, None], weight, 0.0).sum(-1).sum(-1)

    pivot = _largest_pivot(mass, top_p * mass(threshold, threshold), threshold, logits.dtype)
    return torch.where(top_p < 1, pivot, threshold)


def _min_p_threshold(logits: Tensor, temperature: Tensor, min_p: Tensor, threshold: Tensor) -> Tensor:
    """(B,) float32: `threshold`, or where it is higher the logit of a token `min_p` times as likely as the likeliest.

    The likeliest is never filtered and the ratio does not depend on what was, so min_p need not wait for the others.
    """
    peak = chunks(logits)[0].amax((1, 2))
    return torch.maximum(threshold, torch.where(min_p > 0, peak + temperature * torch.log(min_p), -math.inf))


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
    step = _BITS_A_PASS if on_gpu(floor) else 1  # not compiled, pivots share nothing: measure as few as can be
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


__all__ = ["INVALID_TOKEN", "Sampler", "SamplingTensors", "sample"]
