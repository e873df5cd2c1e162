"""The mask proof, rule by rule: what a mask means, or why it is not known. ``tests/adversarial/test_masks.py`` serves such
masks on all routes; here only the graph of the mask is traced."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from quire.passes.fx import placeholders, value
from quire.passes.verify.mask_proof import MaskKind, MaskProver, Refusal
from tests.passes.models import capture

Tensor = torch.Tensor
N = torch.arange(64)
WIDTHS = torch.tensor([8, 8, 9, 8]).view(4, 1, 1)
SLOPES = torch.rand(4, 1, 1)


def kind_of(mask: Callable[[Tensor, Tensor], Tensor]) -> MaskKind:
    """What the proof reads from a function of input_ids and position_ids, both (1, T)."""
    torch._dynamo.reset()

    def forward(input_ids: Tensor, position_ids: Tensor) -> Any:
        torch._check(input_ids.shape[1] == position_ids.shape[1])
        return mask(input_ids, position_ids)

    ids, positions = torch.arange(23)[None] * 7 % 31, torch.arange(23)[None]
    for tensor in (ids, positions):
        torch._dynamo.mark_dynamic(tensor, 1)
    gm, inputs = capture(forward, ids, positions)
    nodes = placeholders(gm.graph)
    sizes = [s for n in nodes if isinstance(value(n), Tensor) for s in value(n).shape if isinstance(s, torch.SymInt)]
    output = gm.graph.output_node()
    real = {n.name: x for n, x in zip(nodes, inputs, strict=True)}
    return MaskProver(gm.graph, sizes[0], real).prove(output.args[0][0], output)  # type: ignore[index]


def of(condition: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """A mask from a condition on query positions (T, 1) and key positions (1, T), and causal."""
    return lambda ids, p: (p[0][None] <= p[0][:, None]) & condition(p[0][:, None], p[0][None])


def hidden(number: float) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda ids, p: torch.zeros(p.shape[1], p.shape[1]).masked_fill(p[0][None] > p[0][:, None], number)


torch.library.define("quire_tests::show_all", "(Tensor(a!) mask) -> ()")
torch.library.impl("quire_tests::show_all", ("CompositeExplicitAutograd", "Meta"), lambda mask: [None, mask.fill_(True)][0])


def written_by_a_library(ids: Tensor, p: Tensor) -> Tensor:
    mask = p[0][None] <= p[0][:, None]
    torch.ops.quire_tests.show_all(mask)
    return mask


def written_in_vmap(ids: Tensor, p: Tensor) -> Tensor:
    mask = p[0][None] <= p[0][:, None]
    torch.vmap(lambda row: row.logical_or_(p[0] == 2))(mask)
    return mask


KINDS = {
    "causal": (of(lambda i, j: j >= 0), MaskKind()), "window": (of(lambda i, j: i - j < 8), MaskKind(window=8)),
    "window by whole steps": (of(lambda i, j: ((i - j) / 8).int() <= 0), MaskKind(window=8)),
    "chunk": (of(lambda i, j: i // 8 == j // 8), MaskKind(chunk=8)),
    "no bits": (of(lambda i, j: i - (j | 0) >= (i & 0)), MaskKind()),
    "all": (lambda ids, p: p[0][None] + p[0][:, None] >= 0, MaskKind(causal=False)),
    "transposed": (lambda ids, p: (p[0][None] >= p[0][:, None]).mT, MaskKind()), "-inf": (hidden(-math.inf), MaskKind()),
    "in place, by position": (lambda ids, p: F.relu(p[0][None] - p[0][:, None], True) == 0, MaskKind()),
    "itself": (lambda ids, p: F.relu(p[0][None] - p[0][:, None] + 1, True) == 1, MaskKind(window=1)),
}
REFUSED = {
    "the bits of a float": (of(lambda i, j: (i - j).float().view(torch.int32) < 8), "it reads the bytes of"),
    "indexed by a truth": (of(lambda i, j: j[True][0] < 9), "it is indexed with a truth"),
    "written by an operation of a library": (written_by_a_library, "which is not known to keep to positions"),
    "written in vmap": (written_in_vmap, "a tensor that it is made of is changed in place"),
    "bits of positions": (of(lambda i, j: (i ^ j) < 2), "it combines the bits of positions"),
    "some bits": (of(lambda i, j: (j & 5) < 6), "it combines the bits of positions"),
    "roots": (of(lambda i, j: i.double().sqrt() - j.double().sqrt() < 8), "it takes sqrt of positions"),
    "joined": (lambda ids, p: torch.cat([p[:, :1], p], 1)[0, 1:][None] <= p[0][:, None], "it joins rows of positions"),
    "repeated": (lambda ids, p: p[0].repeat_interleave(2)[: p.shape[1]][None] <= p[0][:, None], "it repeats positions"),
    "the sum of all": (lambda ids, p: (p[0][None] <= p[0][:, None]) & (p.sum() - 99 <= p[0][None]), "taken over all positions"),
    "the largest along": (lambda ids, p: (p[0][None] <= p[0][:, None]) & (p.amax(1) - 20 <= p[0][None]), "over positions"),
    "inverted bits": (of(lambda i, j: ~j > -40), "it inverts the bits of positions"),
    "from the end": (lambda ids, p: (p[0][None] <= p[0][:, None]) & (p[:, -3:][:, :1] <= p[0][None]), "it is cut from the end"),
    "the last position": (lambda ids, p: (p[0][None] <= p[0][:, None]) & (p[0][-1] - 20 <= p[0][None]), "the last position"),
    "every other position": (lambda ids, p: (p[0][None] <= p[0][:, None]) & (p[:, ::2][:, :1] <= p[0][None]), "or with a step"),
    "the largest position": (lambda ids, p: (p[0][None] <= p[0][:, None]) & (p.max() - 20 <= p[0][None]), "a maximum over"),
    "a column overwritten": (lambda ids, p: hidden(-math.inf)(ids, p).index_fill_(1, torch.tensor([3]), 0.0), "index_fill_"),
    "sums": (of(lambda i, j: (i - j > 2).cumsum(-1) < 40), "it sums over positions"),
    "sums of windows": (of(lambda i, j: (j > 300).cumsum(-1) < 40), "it sums over positions"),
    "parts": (of(lambda i, j: i / 3 - j / 3 < 4), "it divides positions with rounding"),
    "both infinities": (lambda ids, p: hidden(-math.inf)(ids, p) + hidden(math.inf)(ids, p), "infinities of both signs"),
    "slopes": (lambda ids, p: hidden(-math.inf)(ids, p) + SLOPES * (p[0][None] - p[0][:, None]), "it multiplies positions"),
    "in halves": (lambda ids, p: p[0].half()[None] <= p[0].half()[:, None], "is not exact for long sequences"),
    "in int8": (lambda ids, p: p[0].to(torch.int8)[None] <= p[0].to(torch.int8)[:, None], "is not exact for long sequences"),
    "one key": (of(lambda i, j: j != 37), "none of causal, sliding window, chunk"),
    "later half": (of(lambda i, j: i - 2 * j <= 20), "how far into the sequence they are"),
    "every second": (of(lambda i, j: (i - j) % 2 == 0), "it takes remainders of positions"),
    "chunk and window": (of(lambda i, j: (i // 16 == j // 16) & (i - j < 8)), "none of causal, sliding window, chunk"),
    "a key of a table": (lambda ids, p: of(lambda i, j: i >= j)(ids, p) & (N != 37)[p[0]][None], "none of causal"),
    "window per head": (lambda ids, p: of(lambda i, j: i >= j)(ids, p) & (p[0][:, None] - p[0][None] < WIDTHS), "differs"),
    "soft": (hidden(-2.0), "it adds a bias to the scores"), "-1e4": (hidden(-1e4), "it adds a bias to the scores"),
    "ids as positions": (lambda ids, p: ids[0][None] <= ids[0][:, None], "it depends on L.*input_ids.*, token ids"),
    "unknown operator": (lambda ids, p: of(lambda i, j: i >= j)(ids, p) & ~torch.isin(ids, N[50:])[0][None], "it uses isin"),
    "random": (lambda ids, p: of(lambda i, j: i >= j)(ids, p) & (torch.rand(4) < 0.9)[0], "it uses rand"),
    "the length": (lambda ids, p: of(lambda i, j: i >= j)(ids, p) & (p[0][None] >= p.shape[1] - 9), "the number of tokens"),
}


@pytest.mark.parametrize("name", KINDS)
def test_kind(name: str) -> None:
    mask, kind = KINDS[name]
    assert kind_of(mask) == kind


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    mask, why = REFUSED[name]
    with pytest.raises(Refusal, match=why):
        kind_of(mask)
