"""LoRA's adapters of the experts in a mixture, as PEFT has them for parameters of three dims (``target_parameters``).

Legend: as in experts.py; r the rank of an adapter. PEFT keeps A of all experts as one matrix (E r, K), an expert's ranks
one after the other, and B as one (N, r E), a rank's experts one after the other: the product of a pair of expert e gets
``B[:, e::E] A[e r : e r + r] x * scaling``. PEFT itself adds ``B A * scaling`` to all weights in each forward, rounded to their
dtype; here the small products are added, in float32, before the pair's sum is rounded.

On CUDA one launch computes the first products, ``A x``, of all pairs. In B an expert's numbers lie E apart from each other, so
that a program of one expert would read many times as much: of few pairs another launch computes the second products, along B's
rows for all experts, and the experts' kernels add them; of many B is turned, and these kernels multiply by it at their end. The
adapters' own parameters are read, so changes in place are seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from quire.attn_ops.kernels import host
from quire.attn_ops.kernels.host import next_power_of_2
from quire.attn_ops.ops.lora_rows import DTYPES, EVERY, MAX_KERNEL_ADAPTERS, MAX_RANK, adapters_of


class ExpertLora(NamedTuple):
    """Adapters of one product, or of several one after the other. ``a``, ``b``: of each adapter, (E r, K) and (N, r E).
    ``scaling``, ``bits``: as of ``lora_rows_eager``, where a token is a row of the expert ids (T, k)."""

    a: Sequence[Tensor] = ()
    b: Sequence[Tensor] = ()
    scaling: Sequence[float] = ()
    bits: Sequence[int] = ()

    def joined(self, other: ExpertLora) -> ExpertLora:
        """These and those of a second product."""
        return ExpertLora(*([*one, *more] for one, more in zip(self, other, strict=True)))

    def split(self, first: int) -> tuple[ExpertLora, ExpertLora]:
        """Those of the first product, and those of the second."""
        return (ExpertLora(*(each[:first] for each in self)), ExpertLora(*(each[first:] for each in self)))

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
        """Whether the kernels take these adapters."""
        return len(self.a) <= MAX_KERNEL_ADAPTERS and all(
            len(a) <= MAX_RANK * experts and a.is_contiguous() and b.is_contiguous() and a.dtype == b.dtype
            and a.dtype in DTYPES for a, b in zip(self.a, self.b, strict=True))

    def for_kernels(self, expert_ids: Tensor, experts: int, parts: int, expand: bool) -> tuple[host.ExpertAdapters,
                                                                                               host.ExpertTiles]:
        """The kernels' arguments, with memory for first products in ``parts`` parts and, to ``expand``, for second ones."""
        ranks, rows, pairs = tuple(len(a) // experts for a in self.a), self.rows(expert_ids), expert_ids.numel()
        block_r = next_power_of_2(max(ranks), 16)

        def empty(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.float32, device=expert_ids.device)

        shrunk = empty(len(ranks), parts, pairs, block_r)
        lora = host.ExpertAdapters(
            shrunk.view(torch.int64) if rows is None else rows, tuple(self.a), tuple(self.b), shrunk,
            empty(pairs, len(self.b[0])) if expand else shrunk, pairs // len(expert_ids), ranks,
            tuple(bit.bit_length() - 1 if bit else EVERY for bit in self.bits), tuple(map(float, self.scaling)))
        return lora, host.ExpertTiles(len(ranks), rows is None, parts, block_r, min(block_r, 32), expand)
