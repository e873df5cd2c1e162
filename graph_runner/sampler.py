"""Sampling: from logits to token ids, on the device and without a synchronization.

B is the number of rows (sequences), V the vocabulary size.

``attn_ops/ops/sampling.py`` draws the token of a row; the model's graph calls it too, and no sampler is needed where no row has
a filter. Top-k, top-p and min-p each keep the tokens at or above some logit, so all they compute is one threshold per row.
See NOTE [Same seed, same tokens].
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.attn_ops.ops.sampling import INVALID_TOKEN, chunks, inverse, is_greedy, on_gpu, sample_tokens, score, winner
from quire.passes.fx import with_own_code


@dataclass(frozen=True)
class SamplingTensors:
    """How to sample each row of a batch.

    Args:
        temperature: (B,) float32; under 1e-5 for a greedy row, whose filters are ignored.
        top_k, top_p, min_p: (B,) int32, float32 and float32; off are 0, 1 and 0. A negative min_p is applied after top_p.
        seed: (B,) int64.
        position: (B,) int64: index of the token to sample, the same whenever this token is sampled again.
        any_top_k, any_top_p, any_min_p, any_late_min_p: whether a row that is not greedy has that filter; late: after top_p.
        banned: None, or (N, 2) int64: (row, token) pairs to exclude.
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
    any_late_min_p: bool = False
    banned: Tensor | None = None

    @property
    def any_filter(self) -> bool:
        """Whether a row that is not greedy has top_k, top_p or min_p."""
        return self.any_top_k or self.any_top_p or self.any_min_p or self.any_late_min_p


def sample(logits: Tensor, params: SamplingTensors) -> Tensor:
    """Sample one token per row, without a synchronization: (B,) int64 token ids; INVALID_TOKEN (-1) for a row with a NaN, with
    nothing but -inf, or to be drawn from +inf. See `draw` for the compiled form; this one is plain PyTorch, except that on CUDA
    a batch without filters is drawn by the kernel of `sample_tokens`.

    Greedy rows get the first of the largest logits, as from ``torch.argmax``. Other rows are drawn from ``softmax(logits /
    temperature)`` after min_p and top_k, then top_p, as in vLLM, or with a negative min_p after top_k, then top_p, then min_p,
    the order of Hugging Face's ``generate``. Tokens with logits equal to the last one kept by top_k or top_p are kept too
    (``generate`` does so in top_k; in top_p it keeps those that its sort puts first).

    Args:
        logits: (B, V) of any floating dtype, or ValueError is raised. -inf excludes a token. Not modified.
        params: of the B rows, on the same device.
    """
    return draw(logits, params, lambda piece, logits: piece).tokens


@dataclass(frozen=True)
class Sampled:
    """Tokens (B,) and what they were drawn from: ``logits`` (B, V), -inf for banned tokens, of which those under ``threshold``
    (B,) float32 are excluded; None: no row has a filter."""

    tokens: Tensor
    logits: Tensor
    threshold: Tensor | None


_Piece = Callable[..., Tensor]


def compiled_on_cuda(piece: _Piece, logits: Tensor) -> _Piece:
    """The piece, compiled for any number of rows if the logits (B, V), its first argument, are on CUDA."""
    return _compiled(piece, logits.shape[-1]) if logits.is_cuda else piece


@functools.cache
def _compiled(piece: _Piece, vocabulary: int) -> _Piece:
    """The piece compiled for any number of rows of ``vocabulary`` logits. The vocabulary size is static: Inductor cannot split
    top_p's sums of symbolic length unless it is a multiple of the number of chunks (torch 2.11 and 2.13)."""
    compiled = torch.compile(with_own_code(piece), dynamic=True)

    def run(logits: Tensor, *rest: Tensor) -> Tensor:
        for tensor in (logits, *rest):
            if tensor.dim() > 1:
                torch._dynamo.mark_static(tensor, 1)
        return compiled(logits, *rest)

    return run


@torch.no_grad()
def draw(logits: Tensor, params: SamplingTensors, get: Callable[[_Piece, Tensor], _Piece] = compiled_on_cuda) -> Sampled:
    """`sample`, and what the tokens were drawn from; its pieces are run as ``get(piece, logits)``, by default compiled on CUDA.

    The pieces (one per filter, and the draw among the tokens that filters leave) are compiled when first needed, for any
    number of rows; a batch uses at most four of them, one without filters none. Each is compiled twice per dtype and
    vocabulary size, since torch.compile specializes batches of one.
    """
    rows = params.temperature.shape[0]
    if logits.dim() != 2 or logits.shape[0] != rows or not logits.is_floating_point():
        raise ValueError(f"logits must be floating point of shape ({rows}, V), one row per entry of params, got "
                         f"{logits.dtype} of shape {tuple(logits.shape)}")
    if not logits.numel():
        return Sampled(torch.full((rows,), INVALID_TOKEN, dtype=torch.int64, device=logits.device), logits, None)
    if params.banned is not None:
        logits = without(logits, params.banned)
    if params.all_greedy:
        best, token = logits.max(-1)  # the first of equals; a NaN is the maximum, and not greater than -inf
        return Sampled(torch.where(best > -math.inf, token, INVALID_TOKEN), logits, None)
    if logits.dtype == torch.float64:
        logits = logits.float()
    row_params = (params.temperature, params.seed, params.position)
    if not params.any_filter:
        return Sampled(sample_tokens(logits, *row_params), logits, None)  # on CUDA one kernel: nothing to compile
    threshold = torch.full((rows,), -math.inf, dtype=torch.float32, device=logits.device)
    if params.any_top_k:
        threshold = get(_top_k_threshold, logits)(logits, params.top_k)
    if params.any_min_p:
        threshold = get(_min_p_threshold, logits)(logits, params.temperature, params.min_p, threshold)
    if params.any_top_p:
        threshold = get(_top_p_threshold, logits)(logits, params.temperature, params.top_p, threshold)
    if params.any_late_min_p:
        threshold = get(_min_p_threshold, logits)(logits, params.temperature, -params.min_p, threshold)
    return Sampled(get(_draw_filtered, logits)(logits, *row_params, threshold), logits, threshold)


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
    """(B,) float32: the least likely logit that top_p keeps of those at or above `threshold`: the largest pivot such that the
    tokens at or above it have at least `top_p` of the probability."""
    x, _ = chunks(logits)
    peak = x.amax((1, 2))

    def mass(pivot: Tensor, below: Tensor) -> Tensor:
        # `below` never exceeds the peak, so `maximum` has no effect on the values. It makes torch.compile recompute the weights
        # in each pass instead of storing them as (B, V) float32.
        weight = torch.exp((x - torch.maximum(peak, below)[:, None, None]) * inverse(temperature))
        return torch.where(x >= pivot[:, None, None], weight, 0.0).sum(-1).sum(-1)

    pivot = _largest_pivot(mass, top_p * mass(threshold, threshold), threshold, logits.dtype)
    return torch.where(top_p < 1, torch.maximum(pivot, threshold), threshold)  # min_p's is no value of the dtype


def _min_p_threshold(logits: Tensor, temperature: Tensor, min_p: Tensor, threshold: Tensor) -> Tensor:
    """(B,) float32: the larger of `threshold` and the logit of a token `min_p` times as likely as the likeliest."""
    peak = chunks(logits)[0].amax((1, 2))
    return torch.maximum(threshold, torch.where(min_p > 0, peak + temperature * torch.log(min_p), -math.inf))


# ---- searching a threshold

# On CUDA. More bits per pass mean fewer passes over the logits, and 2**bits - 1 pivots to compare with in each.
_BITS_PER_PASS = 2


def _largest_pivot(measure: Callable[[Tensor, Tensor], Tensor], target: Tensor, floor: Tensor, dtype: torch.dtype) -> Tensor:
    """(B,) float32: the largest value of `dtype`, at least `floor`, that measures at least `target`; else `floor`.

    A radix search from the highest bit down. Floats of one sign compare as their bits do as integers, so each float has a rank
    (`_rank`) of 16 or 32 bits, found exactly, without sorting, in a fixed number of passes.

    Args:
        measure: (pivot (B,) float32, lower bound of the answer (B,) float32) -> (B,): the number or the probability of the
            tokens at or above the pivot; must not grow with the pivot.
        floor: (B,) float32, rounded to `dtype`, which is that of the logits: float32 or a 16-bit one.
    """
    bits = dtype.itemsize * 8
    step = _BITS_PER_PASS if on_gpu(floor) else 1  # uncompiled, each pivot costs a pass: measure as few as possible
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
    """int64 in [0, 2**bits), ordered as the floats are. `value` is float32 and holds values of `dtype`."""
    pattern = value.to(dtype).view(_integer(dtype)).long()
    return torch.where(pattern >= 0, pattern + (1 << (dtype.itemsize * 8 - 1)), -1 - pattern)


def _unrank(rank: Tensor, dtype: torch.dtype) -> Tensor:
    """The float32 of that rank. Ranks past +inf give NaN, which compares false with every logit."""
    half = 1 << (dtype.itemsize * 8 - 1)
    pattern = torch.where(rank >= half, rank - half, -1 - rank)
    return pattern.to(_integer(dtype)).view(dtype).float()


def _integer(dtype: torch.dtype) -> torch.dtype:
    return torch.int16 if dtype.itemsize == 2 else torch.int32


def without(logits: Tensor, banned: Tensor) -> Tensor:
    """A copy of the logits, -inf at the (row, token) pairs of `banned`. Ids past the vocabulary hit a spare column."""
    rows, vocabulary = logits.shape
    mask = torch.zeros((rows, vocabulary + 1), dtype=torch.bool, device=logits.device)
    yes = torch.ones((), dtype=torch.bool, device=logits.device)  # `mask[...] = True` copies from the host, and waits
    mask.index_put_((banned[:, 0], banned[:, 1].clamp(max=vocabulary)), yes)
    return logits.masked_fill(mask[:, :vocabulary], -math.inf)
