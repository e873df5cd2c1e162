"""LoRA's adapters of the experts in a mixture, as PEFT has them for parameters of three dims (``target_parameters``).

Legend: as in experts.py; r the rank of an adapter. PEFT keeps A of all experts as one matrix (E r, K), an expert's ranks
one after the other, and B as one (N, r E), a rank's experts one after the other: the product of a pair of expert e gets
``B[:, e::E] A[e r : e r + r] x * scaling``. PEFT itself adds ``B A * scaling`` to all weights in each forward, rounded to their
dtype; here the small products are added, in float32, before the pair's sum is rounded.

On CUDA of few pairs two more launches compute both products, and the experts' kernels add them; of many these kernels compute
them: attn_ops/kernels/expert_lora.py. The adapters' own parameters are read, so changes in place are seen.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from quire.attn_ops.kernels import host
from quire.attn_ops.kernels.host import next_power_of_2
from quire.attn_ops.kernels.launch import launch
from quire.attn_ops.ops.lora_rows import DTYPES, EVERY, MAX_KERNEL_ADAPTERS, MAX_RANK, adapters_of

logger = logging.getLogger(__name__)


@functools.cache
def _warn() -> None:
    logger.warning("adapters of experts are beyond the kernels (%d for both products, rank %d, contiguous, A and B of one "
                   "dtype of %s): plain operations compute these experts, which takes many times as long", MAX_KERNEL_ADAPTERS,
                   MAX_RANK, ", ".join(map(str, DTYPES)))


class ExpertLora(NamedTuple):
    """Adapters of one product, or of several one after the other. ``a``, ``b``: of each adapter, (E r, K) and (N, r E).
    ``scaling``, ``bits``: as of ``lora_rows_eager``, where a token is a row of the expert ids (T, k)."""

    a: Sequence[Tensor] = ()
    b: Sequence[Tensor] = ()
    scaling: Sequence[float] = ()
    bits: Sequence[int] = ()

    def joined(self, other: ExpertLora) -> ExpertLora:
        """These and those of a second product."""
        return ExpertLora([*self.a, *other.a], [*self.b, *other.b], [*self.scaling, *other.scaling],
                          [*self.bits, *other.bits])

    def split(self, first: int) -> tuple[ExpertLora, ExpertLora]:
        """Those of the first product, and those of the second."""
        return (ExpertLora(self.a[:first], self.b[:first], self.scaling[:first], self.bits[:first]),
                ExpertLora(self.a[first:], self.b[first:], self.scaling[first:], self.bits[first:]))

    def check(self, weight: Tensor, transposed: bool, expert_ids: Tensor) -> None:
        """Raises ValueError for shapes that are not those of adapters of ``weight``."""
        experts, n, k = (weight.mT if transposed else weight).shape
        for a, b in zip(self.a, self.b, strict=True):
            if a.dim() != 2 or a.shape[1] != k or a.shape[0] % experts or b.shape != (n, a.shape[0]):
                raise ValueError(f"expert_linear: an adapter's A {tuple(a.shape)} and B {tuple(b.shape)} do not match weights "
                                 f"{tuple(weight.shape)}, transposed={transposed}")
        if any(self.bits) and expert_ids.dim() != 2:
            raise ValueError("expert_linear: adapters of tokens need expert ids (tokens, k)")

    def products(self, x: Tensor, experts: int, ids: Tensor, tokens: Tensor, rows: Tensor | None) -> list[Tensor]:
        """What each adapter adds to n pairs, of inputs x (n, K), with expert ids and tokens (n,), in the dtype of x. ``rows``:
        the adapters of all tokens as bits."""
        found = []
        for a, b, scale, bit in zip(*self, strict=True):
            rank = len(a) // experts
            low = torch.bmm(a.view(experts, rank, -1)[ids].to(x.dtype), x[:, :, None])
            more = torch.bmm(b.reshape(len(b), rank, experts).permute(2, 0, 1)[ids].to(x.dtype), low)[:, :, 0] * scale
            on = None if rows is None or not bit else (rows[tokens] & bit) != 0
            found.append(more if on is None else torch.where(on[:, None], more, 0.0))
        return found

    def rows(self, expert_ids: Tensor) -> Tensor | None:
        """(T,) int64: the adapters of each token as bits; None if every token has all of them, or there are none."""
        return adapters_of(expert_ids[None], self.bits)

    def fits(self, experts: int) -> bool:
        """Whether the kernels take these adapters; logs once if not."""
        fit = len(self.a) <= MAX_KERNEL_ADAPTERS and all(
            len(a) <= MAX_RANK * experts and a.is_contiguous() and b.is_contiguous() and a.dtype == b.dtype
            and a.dtype in DTYPES for a, b in zip(self.a, self.b, strict=True))
        if not fit:
            _warn()
        return fit

    def expanded(self, x: Tensor, expert_ids: Tensor, ids: Tensor, experts: int, pdl: bool) -> tuple[host.ExpertAdapters,
                                                                                                   host.ExpertTiles]:
        """The kernels' arguments for few pairs, whose both products two launches compute. ``ids``: (S,)."""
        kernels, pairs, k, n = host.kernel_module("kernels.expert_lora"), len(ids), x.shape[1], len(self.b[0])
        ranks, block_r = self._ranks(experts)
        block_k = 8192 // min(block_r, 32)
        parts = max(1, min(4, -(-k // block_k)))
        delta = torch.empty(pairs, n, dtype=torch.float32, device=x.device)
        lora, tiles = self._for_kernels(expert_ids, ranks, block_r, parts, tuple(self.b), delta, delta)
        launch(kernels.pair_shrink_kernel, (len(ranks) * parts * (block_r // tiles.ranks), pairs), x, ids, lora, pairs, k,
               experts, pairs // len(x), x.stride(0), BLOCK_K=block_k, LORA=tiles, pdl=pdl, num_warps=4)
        block_s = min(128, next_power_of_2(pairs, 32))
        block_n = 256 // block_s  # a number for each thread of eight warps: much is on its way at once
        launch(kernels.expand_kernel, (-(-n // block_n), -(-pairs // block_s)), ids, lora, pairs, n, experts, BLOCK_S=block_s,
               BLOCK_N=block_n, LORA=tiles, pdl=pdl, num_warps=8)
        return lora, tiles

    def in_one_launch(self, expert_ids: Tensor, experts: int, tiles: int, slices: int) -> tuple[host.ExpertAdapters,
                                                                                              host.ExpertTiles]:
        """The kernels' arguments for many pairs in so many ``tiles``: the experts' kernel computes both products."""
        kernels, (ranks, block_r), parts = host.kernel_module("kernels.expert_lora"), self._ranks(experts), 2
        counter = torch.zeros(tiles, dtype=torch.int32, device=expert_ids.device)
        turned = tuple(b.new_empty(experts, len(b), b.shape[1] // experts) for b in self.b)
        lora, constants = self._for_kernels(expert_ids, ranks, block_r, parts, turned, counter, counter)
        for b, to, place in zip(self.b, turned, lora.places, strict=True):
            rows = b.numel() // experts
            launch(kernels.turn_kernel, (-(-rows // 64), -(-experts // 64)), b, to, lora.rows, len(expert_ids), place, rows,
                   experts, BLOCK=64, EVERY=constants.every, pdl=False, num_warps=4)
        return lora, constants._replace(programs=len(ranks) * parts * (block_r // constants.ranks), slices=slices,
                                        held=min(len(ranks), 2))

    def _ranks(self, experts: int) -> tuple[tuple[int, ...], int]:
        """Of each adapter, and padded."""
        ranks = tuple(len(a) // experts for a in self.a)
        return ranks, next_power_of_2(max(ranks), 16)

    def _for_kernels(self, expert_ids: Tensor, ranks: tuple[int, ...], block_r: int, parts: int, b: tuple[Tensor, ...],
                     delta: Tensor, counter: Tensor) -> tuple[host.ExpertAdapters, host.ExpertTiles]:
        rows, pairs = self.rows(expert_ids), expert_ids.numel()
        shrunk = torch.empty(len(ranks), parts, pairs, block_r, dtype=torch.float32, device=expert_ids.device)
        lora = host.ExpertAdapters(
            shrunk.view(torch.int64) if rows is None else rows, tuple(self.a), b, shrunk, delta, counter,
            pairs // len(expert_ids), ranks, tuple(bit.bit_length() - 1 if bit else EVERY for bit in self.bits),
            tuple(map(float, self.scaling)))
        return lora, host.ExpertTiles(len(ranks), rows is None, parts, block_r, min(block_r, 32), 0, 1, 0)
