"""The log probability and the rank of one token per row, from logits (B, V). ``token_logprobs``.

On CUDA two Triton kernels (``attn_ops/kernels/logprobs.py``) read each wanted row once, in parts, with the running maximum and
sum of Milakov and Gimelshein ("Online normalizer calculation for softmax", 2018); nothing of size (B, V) is written.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from quire.attn_ops.kernels import host
from quire.attn_ops.kernels.launch import launch
from quire.attn_ops.ops.sampling import BLOCK, divide, uses_kernel


class TokenLogprobs(NamedTuple):
    """For one token per row: the log probability (B,) float32, the rank (B,) int32, and the row's normalizer (B,) float32, with
    which ``logit / temperature - normalizer`` is the log probability of any token that is not excluded. ``packed`` (3, B)
    float32 holds all, the ranks by their bits, so that one copy brings them to the host."""

    packed: Tensor

    @property
    def logprobs(self) -> Tensor:
        return self.packed[0]

    @property
    def ranks(self) -> Tensor:
        return self.packed[1].view(torch.int32)

    @property
    def normalizers(self) -> Tensor:
        return self.packed[2]


def token_logprobs(logits: Tensor, tokens: Tensor, temperature: Tensor, threshold: Tensor | None = None) -> TokenLogprobs:
    """``log_softmax(logits / temperature)`` at each row's token, in float32, and the token's rank: 1 plus the number of tokens
    with a larger logit, whether excluded or not.

    Args:
        logits: (B, V) of any floating dtype.
        tokens: (B,) int64; a negative one (INVALID_TOKEN) reads token 0.
        temperature: (B,) float32; 1 for the distribution of the model, 0 for a row to skip: it costs nothing, and all are 0.
        threshold: None, or (B,) float32: tokens with a smaller logit are excluded (their log probability is -inf).
    """
    if uses_kernel(logits) and logits.numel():
        return token_logprobs_cuda(logits, tokens, temperature, threshold)
    return token_logprobs_eager(logits, tokens, temperature, threshold)


def launches_beside_sampling(logits: Tensor, temperature: Tensor, seed: Tensor, position: Tensor) -> None:
    """Launch `token_logprobs` as a step does after ``sample_tokens`` of these arguments: to compile the kernels ahead."""
    token_logprobs(logits, position, temperature)


def token_logprobs_eager(logits: Tensor, tokens: Tensor, temperature: Tensor, threshold: Tensor | None = None) -> TokenLogprobs:
    """The definition, in plain PyTorch. On CUDA it computes the skipped rows too, without a synchronization."""
    out = TokenLogprobs(temperature.new_zeros(3, len(tokens), dtype=torch.float32))
    on_host = not logits.is_cuda
    rows = (temperature > 0).nonzero()[:, 0] if on_host else torch.arange(len(tokens), device=logits.device)
    if not rows.numel() or not logits.shape[1]:
        return out
    heat = torch.where(temperature[rows] > 0, temperature[rows], 1.0)
    x = scaled(logits[rows], heat, None if threshold is None else threshold[rows])
    token = tokens[rows].clamp_min(0)[:, None]
    wanted, normalizer = temperature[rows] > 0, x.logsumexp(-1)
    out.logprobs[rows] = torch.where(wanted, x.gather(1, token)[:, 0] - normalizer, 0.0)
    above = (logits[rows] > logits[rows].gather(1, token)).sum(-1, dtype=torch.int32)
    out.ranks[rows] = torch.where(wanted, above + 1, 0)
    out.normalizers[rows] = torch.where(wanted, normalizer, 0.0)
    return out


def scaled(logits: Tensor, temperature: Tensor, threshold: Tensor | None) -> Tensor:
    """(B, n) float32: logits of each row divided by its temperature (B,), -inf where they are under its threshold (B,)."""
    x = logits.float()
    excluded = x == -math.inf if threshold is None else (x < threshold[:, None]) | (x == -math.inf)
    return (x * (1.0 / temperature)[:, None]).masked_fill(excluded, -math.inf)


def token_logprobs_cuda(logits: Tensor, tokens: Tensor, temperature: Tensor, threshold: Tensor | None = None, *,
                        pdl: bool | None = None) -> TokenLogprobs:
    """`token_logprobs` on CUDA: two launches, nothing is read back. ``pdl``: as of ``sample_tokens_cuda``."""
    rows, vocabulary = logits.shape
    kernels = host.kernel_module("kernels.logprobs")
    pdl = host.use_pdl(logits.device, rows) if pdl is None else pdl
    logits = logits if vocabulary == 1 else host.rows_contiguous(logits)
    tokens, temperature = tokens.contiguous(), temperature.contiguous()
    threshold = None if threshold is None else threshold.contiguous()
    parts, part_size = divide(rows, vocabulary)
    partial = torch.empty(rows, parts, 3, dtype=torch.float32, device=logits.device)
    out = TokenLogprobs(torch.empty(3, rows, dtype=torch.float32, device=logits.device))
    filtered, bound = threshold is not None, temperature if threshold is None else threshold
    launch(kernels.part_kernel, (rows, parts), logits, tokens, temperature, bound, partial, vocabulary, logits.stride(0),
           part_size, BLOCK=BLOCK, FILTERED=filtered, pdl=pdl, num_warps=4)
    launch(kernels.merge_kernel, (rows,), logits, tokens, temperature, bound, partial, out.packed, logits.stride(0), parts,
           BLOCK=128, FILTERED=filtered, pdl=pdl, num_warps=1)
    return out
