"""Small GPTs that are given token ids alone, and count them; see ``test_counting.py``.

``SERVED`` must be exact. ``REFUSED`` have what the message must say. Each is a function (model, ids (1, T)) -> (1, T, WIDTH) or
(T, WIDTH), which is added to the embeddings, or a whole model.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.adversarial.harness import HEADS, VOCAB, WIDTH, Attention

BLOCK = 64  # the length of tables
Tensor = torch.Tensor
Place = Callable[[Any, Tensor], Tensor]


class GPT(nn.Module):
    """In nanoGPT's style: of two layers, forward(idx, targets=None) -> (logits, loss), the last token's without targets if
    ``last``."""

    def __init__(self, place: Place | None = None, last: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.place, self.last = place, last
        self.wte, self.wpe = nn.Embedding(VOCAB, WIDTH), nn.Embedding(BLOCK, WIDTH)
        self.h, self.norm = nn.ModuleList([Attention(), Attention()]), nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.wte.weight = self.lm_head.weight
        self.register_buffer("pe", torch.randn(1, BLOCK, WIDTH))
        self.register_buffer("numbers", torch.arange(BLOCK)[None])
        self.register_buffer("heads", torch.randn(HEADS, BLOCK, WIDTH // HEADS))
        self.register_buffer("angles", torch.outer(torch.arange(BLOCK), 0.7 ** torch.arange(WIDTH // 2)))
        self.register_buffer("complex", torch.polar(torch.ones(BLOCK, WIDTH // 2), self.angles))
        self.odd = nn.Parameter(torch.randn(23, WIDTH))  # as long as the row that is traced
        nn.init.normal_(self.lm_head.weight, std=0.5)
        self.eval()

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        x = self.wte(idx) + (self.wpe(torch.arange(0, idx.shape[1], device=idx.device)) if self.place is None
                             else self.place(self, idx))
        for layer in self.h:
            x = x + layer(x)
        x = self.norm(x)
        if targets is not None:
            logits = self.lm_head(x)
            return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return self.lm_head(x[:, [-1], :] if self.last else x), None


def numbers(ids: Tensor, **options: Any) -> Tensor:
    return torch.arange(ids.shape[1], device=ids.device, **options)


def sinusoids(positions: Tensor) -> Tensor:
    angles = positions.float()[:, None] * torch.exp(torch.arange(0, WIDTH, 2) * (-math.log(10000.0) / WIDTH))
    return torch.stack([angles.sin(), angles.cos()], -1).flatten(1)


def of_heads(m: GPT, ids: Tensor) -> Tensor:
    """Numbers heads, and there are as many as tokens in the trace."""
    each = torch.arange(23, device=ids.device)[:, None] * 0.1 + torch.ones(WIDTH)
    return m.wpe(numbers(ids)) * each.cos().mean(0)


def two(m: GPT, ids: Tensor) -> Tensor:
    """One of them is for a mask of its own, which hides nothing more than what is in it anyway."""
    rows = numbers(ids)
    keep = torch.where(rows < 10**6, 1.0, 0.0)
    return m.wpe(torch.arange(0, ids.shape[1])) * keep[:, None]


def shared(m: GPT, ids: Tensor) -> Tensor:
    """The same rows of one table, twice, and the table by numbers."""
    return m.pe[:, : ids.shape[1]] + m.pe[0, : ids.shape[1]] * 0.5 + m.pe[0][numbers(ids)]


def written_table(m: GPT, ids: Tensor) -> Tensor:
    rows = m.pe[0, : ids.shape[1]]
    rows.mul_(1.0)
    return rows


def written_numbers(m: GPT, ids: Tensor) -> Tensor:
    rows = numbers(ids)
    rows += 1
    return m.wpe(rows)


def picks_too(m: GPT, ids: Tensor) -> Tensor:
    rows = numbers(ids)
    return m.wte(ids)[:, rows] * 0.1 + m.wpe(rows)


# fmt: off
SERVED: dict[str, Place] = {
    "arange": lambda m, ids: m.wpe(numbers(ids)),
    "arange with a row": lambda m, ids: m.wpe(torch.arange(0, ids.size(-1), dtype=torch.long, device=ids.device).unsqueeze(0)),
    "int32": lambda m, ids: m.wpe(numbers(ids, dtype=torch.int32)),
    "float64": lambda m, ids: (numbers(ids, dtype=torch.float64)[:, None] * 0.1).sin().float() * m.wpe.weight[0],
    "scaled": lambda m, ids: (numbers(ids, dtype=torch.float32) / 7)[:, None].cos() * m.wpe.weight[0],
    "with an offset": lambda m, ids: m.wpe(numbers(ids) + 2),
    "clamped": lambda m, ids: m.wpe(numbers(ids).clamp(max=7)),
    "in blocks": lambda m, ids: m.wpe(numbers(ids) // 4) + m.wpe(numbers(ids) % 4),
    "sinusoids": lambda m, ids: sinusoids(numbers(ids)),
    "a cut table": lambda m, ids: m.pe[:, : ids.shape[1]],
    "a cut table from 0": lambda m, ids: m.pe[:, 0 : ids.shape[1], :],
    "a cut weight": lambda m, ids: m.wpe.weight[: ids.shape[1]],
    "narrow": lambda m, ids: m.pe.narrow(1, 0, ids.shape[1]),
    "a row and a cut": lambda m, ids: m.pe[0, : ids.shape[1], None].squeeze(1),
    "a cut behind dots": lambda m, ids: m.pe[..., : ids.shape[1], :],
    "a cut in the middle": lambda m, ids: m.heads[:, : ids.shape[1]].transpose(0, 1).flatten(1),
    "half of a cut": lambda m, ids: m.pe[0, : ids.shape[1], : WIDTH // 2].repeat(1, 2),
    "angles": lambda m, ids: torch.cat([m.angles[: ids.shape[1]].cos(), m.angles[: ids.shape[1]].sin()], -1),
    "complex": lambda m, ids: torch.view_as_real(
        torch.view_as_complex(m.wte(ids).unflatten(-1, (-1, 2))) * m.complex[: ids.shape[1]]).flatten(2),
    "by numbers and a cut": shared,
    "numbers in a buffer": lambda m, ids: m.wpe(m.numbers[:, : ids.shape[1]]),
    "rows behind dots": lambda m, ids: m.pe[..., numbers(ids), :],
    "rows behind a new dimension": lambda m, ids: m.wpe.weight[None, numbers(ids)],
    "by the names of arguments": lambda m, ids: torch.gather(
        input=m.pe[0], dim=0, index=numbers(ids)[:, None].expand(-1, WIDTH)) + torch.narrow(
        input=m.pe[0], dim=0, start=0, length=ids.shape[1]),
    "by another table": lambda m, ids: m.wpe(m.numbers[0].flip(0)[numbers(ids)]),
    "heads as many as traced tokens": of_heads,
    "a table as long as the trace": lambda m, ids: m.odd[numbers(ids)],
    "a table as long as the trace, cut": lambda m, ids: m.odd[: ids.shape[1]],
    "two of them": two,
    "none": lambda m, ids: m.wpe.weight[0],
}

OF_ITS_OWN, PLACES = "makes positions of its own", "mixes the tokens of the batch|numbers the tokens of the row"
REFUSED: dict[str, tuple[Place, str]] = {
    "linspace": (lambda m, ids: torch.linspace(0, 1, ids.shape[1])[:, None] * m.wpe.weight[0], "plain number"),
    "flipped": (lambda m, ids: m.wpe(numbers(ids).flip(0)), PLACES),
    "from the end": (lambda m, ids: m.wpe(ids.shape[1] - 1 - numbers(ids)), PLACES),
    "by the length": (lambda m, ids: m.wpe((numbers(ids) + ids.shape[1]) % BLOCK), PLACES),
    "over the length": (lambda m, ids: (numbers(ids) / ids.shape[1])[:, None] * m.wpe.weight[0], PLACES),
    "from 1": (lambda m, ids: m.wpe(torch.arange(1, ids.shape[1] + 1)), "other than 0, 1, 2"),
    "in steps of 2": (lambda m, ids: m.wpe(torch.arange(0, 2 * ids.shape[1], 2)), "other than 0, 1, 2"),
    "one more, and cut": (lambda m, ids: m.wpe(torch.arange(ids.shape[1] + 1)[:-1]), OF_ITS_OWN),
    "one more, and the first left out": (lambda m, ids: m.wpe(torch.arange(ids.shape[1] + 1)[1:]), OF_ITS_OWN),
    "cut": (lambda m, ids: F.pad(m.wpe(numbers(ids)[1:]), (0, 0, 1, 0)), PLACES),
    "bfloat16": (lambda m, ids: numbers(ids, dtype=torch.bfloat16)[:, None].float() * m.wpe.weight[0], "does not hold each"),
    "int8": (lambda m, ids: m.wpe(numbers(ids, dtype=torch.int8).long()), "does not hold each"),
    "changed in place": (written_numbers, "changed in place"),
    "picks rows too": (picks_too, "both to compute and to pick rows"),
    "a table changed in place": (written_table, "changed in place"),
    "a table from row 1": (lambda m, ids: m.pe[0, 1 : ids.shape[1] + 1], OF_ITS_OWN),
    "the end of a table": (lambda m, ids: m.pe[0, -ids.shape[1] :], OF_ITS_OWN),
    "every second row": (lambda m, ids: m.pe[0, : 2 * ids.shape[1] : 2], OF_ITS_OWN),
    "one row more, and cut": (lambda m, ids: m.pe[0, : ids.shape[1] + 1][:-1], OF_ITS_OWN),
    "a table by two dimensions": (lambda m, ids: m.pe[0, : ids.shape[1]] @ m.pe[0, : ids.shape[1]].mT @ m.wte(ids)[0], PLACES),
    "sums of the rows before": (lambda m, ids: m.wpe(numbers(ids)).cumsum(0), PLACES),
    "the mean of the rows": (lambda m, ids: m.pe[:, : ids.shape[1]].mean(1, keepdim=True) + m.wte(ids) * 0, PLACES),
}
# fmt: on
