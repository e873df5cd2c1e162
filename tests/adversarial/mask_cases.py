"""A model whose attention mask is an argument, the routes by which quire serves it, and random masks."""

from __future__ import annotations

import copy
import functools
import json
import math
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from hypothesis import strategies as st
from torch import nn

from tests.adversarial import harness
from tests.adversarial.harness import HEADS, WIDTH

VOCAB, REACH = 64, 128
LENGTHS, STEPS = (61, 9, 30), ((30, 4, 1), (31, 5, 29))  # chunks of a prefill, of three sequences at once
Mask = Callable[["Model", torch.Tensor, torch.Tensor], Any]  # (model, input_ids, position_ids) -> attn_mask


class Model(nn.Module):
    """A causal LM of one layer. Its buffers are there for masks to use."""

    def __init__(self, mask: Mask, **buffers: torch.Tensor) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mask = mask
        self.embed, self.place = nn.Embedding(VOCAB, WIDTH), nn.Embedding(REACH, WIDTH)
        self.attention, self.head = harness.Attention(), nn.Linear(WIDTH, VOCAB, bias=False)
        for name, tensor in buffers.items():
            self.register_buffer(name, tensor)

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids) + self.place(position_ids)
        return self.head(x + self.attention(x, self.mask(self, input_ids, position_ids)))


def sequences() -> list[torch.Tensor]:
    return harness.sequences(3, LENGTHS, VOCAB)


def outcome(model: Model, route: str) -> str:
    """As ``harness.outcome``, of copies of a model that has run before."""
    harness.alone(model, sequences()[1:2])
    def make(kind: type) -> nn.Module:
        made = copy.deepcopy(model)
        made.__class__ = kind
        return made

    return harness.outcome(make, route, base=Model, lengths=LENGTHS, steps=STEPS, vocab=VOCAB)


# Random masks: a tree of operators, drawn by hypothesis and run in the model's forward.


@dataclass(frozen=True)
class Tree:
    """A mask as data: the operator, its number, and what it is made of."""

    op: str
    number: int = 0
    inside: tuple[Tree, ...] = ()

    def __str__(self) -> str:
        arguments = [*([str(self.number)] if self.number else []), *map(str, self.inside)]
        return f"{self.op}({', '.join(arguments)})"


def buffers(number: int) -> dict[str, torch.Tensor]:
    """What a random mask may look up."""
    n = torch.arange(REACH)
    ahead = n[None] - n[:, None]
    return {
        "kinds": (torch.arange(VOCAB) * 7 % 11 > 8).long(),  # by token id
        "blocks": n // max(number, 1),  # by position
        "late": (n >= 40).long(),  # by position
        "triangle": (ahead <= 0)[None, None],
        "band": ((ahead <= 0) & (ahead > -max(number, 1)))[None, None],
        "holes": ((ahead <= 0) & (n % 13 != 5))[None, None],
        "size": torch.tensor(number), "size2d": torch.tensor([[number]]),
        "per_head": torch.tensor([number, number, number, number + 2]).view(1, HEADS, 1, 1),
        "same_heads": torch.full((1, HEADS, 1, 1), number),
    }


def numbers(kind: str, model: Model, ids: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions of queries (..., S, 1) and keys (..., 1, S), in some spelling."""
    row = {"ids": lambda: positions[0], "arange": lambda: torch.arange(ids.shape[1]), "float": lambda: positions[0].float(),
           "cumsum": lambda: torch.ones_like(ids[0]).cumsum(-1) - 1, "int32": lambda: positions[0].int(),
           "shifted": lambda: positions[0] + 3}[kind]()
    return row[:, None], row[None, :]


SPELLINGS = ("ids", "arange", "cumsum", "float", "int32", "shifted")
CAUSAL = {
    "le": lambda i, j: j <= i, "not_gt": lambda i, j: ~(j > i), "difference": lambda i, j: i - j >= 0,
    "clamped": lambda i, j: (j - i).clamp(min=0) == 0, "tril": lambda i, j: torch.ones_like(i - j, dtype=torch.bool).tril(),
    "triu": lambda i, j: torch.ones_like(i - j).triu(1) == 0, "maximum": lambda i, j: torch.maximum(i, j) == i,
    "sign": lambda i, j: torch.sign(i - j) >= 0, "relu": lambda i, j: F.relu(j - i) == 0,
    "packed": lambda i, j: (j <= i) & ((i == 0).cumsum(-2) == (j == 0).cumsum(-1)),
    "grid": lambda i, j: torch.ge(*torch.meshgrid(i[:, 0], j[0], indexing="ij")),
    "grid_xy": lambda i, j: torch.le(*torch.meshgrid(j[0], i[:, 0], indexing="xy")),
}
WINDOW = {
    "gt": lambda i, j, w: j > i - w, "difference": lambda i, j, w: i - j < w, "le": lambda i, j, w: i - j <= w - 1,
    "clamp": lambda i, j, w: j >= (i - w + 1).clamp(min=0), "triu": lambda i, j, w: torch.ones_like(i - j).triu(1 - w) > 0,
    "abs": lambda i, j, w: (i - j).abs() < w, "not": lambda i, j, w: torch.logical_not(j + w <= i),
    "clamped": lambda i, j, w: (i - j).clamp(max=w - 1) == i - j, "half": lambda i, j, w: i - j < w - 0.5,
    "relu": lambda i, j, w: F.relu(i - j - (w - 1)) == 0,
}
CHUNK = {
    "floordiv": lambda i, j, c: i // c == j // c, "floor": lambda i, j, c: j >= (i // c) * c,
    "mod": lambda i, j, c: i - i % c == j - j % c, "div": lambda i, j, c: (
        torch.div(i, c, rounding_mode="floor") - torch.div(j, c, rounding_mode="floor")) == 0,
    "trunc": lambda i, j, c: torch.div(i, c, rounding_mode="trunc") == torch.div(j, c, rounding_mode="trunc"),
    "and": lambda i, j, c: (i.long() & -8) == (j.long() & -8), "or": lambda i, j, c: (i.long() | 7) == (j.long() | 7),
    "bits": lambda i, j, c: i.long() - (i.long() & 7) == j.long() - (j.long() & 7),
    "shift": lambda i, j, c: (i.long() >> 2) << 2 <= j, "eighth": lambda i, j, c: (i / 8).floor() == (j / 8).floor(),
    "ceil": lambda i, j, c: ((i + 1) / 4).ceil() == ((j + 1) / 4).ceil(),
}


def spoilers(name: str, tree: Tree, m: Model, ids: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
    """Conditions that are none of causal, window and chunk."""
    n, row = tree.number, ids[0]
    return {
        "prefix": lambda: j < n, "ids": lambda: (row > 40)[None], "isin": lambda: torch.isin(row, m.blocks[:4])[None],
        "kinds": lambda: m.kinds[row][None] == 0,
        "document": lambda: (row == 5).cumsum(-1)[:, None] == (row == 5).cumsum(-1)[None],
        "hash": lambda: (row * 2654435761 % 16 != 3)[None], "length": lambda: i - j < ids.shape[1] // 2,
        "dilated": lambda: (i - j) % 2 == 0, "table": lambda: m.late[:ids.shape[1]][None] == 0, "late": lambda: i < 40,
        "per_head": lambda: i - j < m.per_head, "holes": lambda: m.holes[0, 0, :ids.shape[1], :ids.shape[1]],
        "sink": lambda: (i - j < max(n, 2)) | (j < 2), "first": lambda: j != 0,
        "hidden": lambda: m.embed(ids)[0, :, 0][None] < 1,
        "buckets": lambda: torch.bucketize((i - j).clamp(min=0), m.blocks[::8]) < 3,
        "sparse": lambda: (i // 8 == j // 8) | (j % 8 == 7), "bits": lambda: ((i - j).long() & 3) == 0,
        "growing": lambda: i - j < n + i // 4, "seen": lambda: (row == 5).cumsum(-1)[None] < 2,
        "shifted_chunk": lambda: (i + 1) // 8 == (j + 1) // 8, "two_chunks": lambda: i // 8 - j // 8 <= 1,
        "some_heads": lambda: torch.stack([i - j < n, i - j < n, i - j < n + 1, i - j < n]),
        "later_rows": lambda: (i >= 40).cumsum(-2) < 3, "decay": lambda: torch.exp((j - i).float()) > 1e-3,
    }[name]()


SPOILERS = ("prefix", "ids", "isin", "kinds", "document", "hash", "length", "dilated", "table", "late", "per_head", "holes",
            "sink", "first", "hidden", "buckets", "sparse", "bits", "growing", "seen", "shifted_chunk", "two_chunks",
            "some_heads", "later_rows", "decay")
HARMLESS = ("true", "past", "nonnegative", "stored_triangle", "stored_band", "same_heads", "size", "size2d", "blocks", "all",
            "any", "product", "least", "subtracted", "summed", "every_head", "joined_heads", "repeated", "narrowed")


def harmless(name: str, tree: Tree, m: Model, ids: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
    """Conditions that are true of all pairs, or of a known kind, in less usual ways."""
    s = ids.shape[1]
    return {
        "true": lambda: torch.ones(s, s, dtype=torch.bool), "past": lambda: (i >= j) | (i < j), "nonnegative": lambda: j >= 0,
        "stored_triangle": lambda: m.triangle[:, :, :s, :s], "stored_band": lambda: m.band[:, :, :s, :s],
        "same_heads": lambda: i - j < m.same_heads, "size": lambda: i - j < m.size, "size2d": lambda: i - j < m.size2d,
        "blocks": lambda: m.blocks[:s][:, None] == m.blocks[:s][None],
        "all": lambda: torch.stack([j <= i, i - j < m.size]).all(0),
        "any": lambda: torch.stack([j <= i, i - j < m.size], -1).any(-1),
        "product": lambda: torch.stack([j <= i, i - j < m.size]).int().prod(0).bool(),
        "least": lambda: torch.stack([j <= i, i - j < m.size], -1).float().amin(-1) > 0,
        "subtracted": lambda: (torch.ones(s, s).tril() - torch.ones(s, s).tril(-8)).bool(),
        "summed": lambda: (j <= i).int() + (i - j < m.size).int() == 2,
        "every_head": lambda: torch.stack([i - j < m.size] * HEADS),
        "joined_heads": lambda: torch.cat([(j <= i)[None]] * HEADS)[None],
        "repeated": lambda: (j <= i).expand(1, 1, s, s).repeat_interleave(HEADS, 1),
        "narrowed": lambda: m.triangle[0, 0].narrow(0, 0, s).narrow(1, 0, s),
    }[name]()


def build(tree: Tree, m: Model, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """The boolean mask of a tree."""
    kind, _, name = tree.op.partition(":")
    if kind in ("and", "or"):
        a, b = (build(t, m, ids, positions) for t in tree.inside)
        return {"and": torch.logical_and, "or": torch.logical_or}[kind](a, b) if name else a & b if kind == "and" else a | b
    if kind == "not_not":
        return ~(~build(tree.inside[0], m, ids, positions))
    spelling, _, name = name.partition(":")
    i, j = numbers(spelling, m, ids, positions)
    if kind in ("causal", "window", "chunk"):
        shape = {"causal": CAUSAL, "window": WINDOW, "chunk": CHUNK}[kind][name]
        return shape(i, j) if kind == "causal" else shape(i, j, tree.number)
    return (spoilers if kind == "spoil" else harmless)(name, tree, m, ids, i, j)


FINISHES = ("bool", "inf", "min", "masked_fill", "product", "minus_10000", "in_place", "soft", "log", "twice", "finite")


def finish(how: str, keep: torch.Tensor) -> torch.Tensor:
    low = torch.finfo(torch.float32).min
    keep = keep if keep.dim() == 4 else keep[(None,) * (4 - keep.dim())]
    if how == "in_place":
        return torch.zeros_like(keep, dtype=torch.float32).masked_fill_(~keep, low)
    return {
        "bool": lambda: keep, "inf": lambda: torch.where(keep, 0.0, -math.inf), "min": lambda: torch.where(keep, 0.0, low),
        "masked_fill": lambda: torch.zeros_like(keep, dtype=torch.float32).masked_fill(~keep, -math.inf),
        "product": lambda: (1.0 - keep.float()) * torch.finfo(torch.float32).min, "log": lambda: keep.float().log(),
        "twice": lambda: keep.float().masked_fill(keep == 0, -math.inf).masked_fill(keep == 1, 0.0),
        "finite": lambda: torch.where(keep, 0.0, -math.inf).nan_to_num(neginf=low),
        "minus_10000": lambda: (1.0 - keep.float()) * -10000.0, "soft": lambda: torch.where(keep, 0.0, -3.0),
    }[how]()


_size = st.integers(1, 24)
_spelling = st.sampled_from(SPELLINGS)


def _leaf(kind: str, names: Any) -> st.SearchStrategy[Tree]:
    return st.builds(lambda s, n, k: Tree(f"{kind}:{s}:{n}", k), _spelling, st.sampled_from(sorted(names)), _size)


_causal, _shape = _leaf("causal", CAUSAL), st.one_of(_leaf("window", WINDOW), _leaf("chunk", CHUNK))
_any = st.one_of(_causal, _shape, _leaf("spoil", SPOILERS), _leaf("fine", HARMLESS))


@st.composite
def trees(draw: st.DrawFn) -> tuple[Tree, str, int]:
    """A causal mask and up to two more conditions; how it is handed to attention; the number of the buffers."""
    tree = draw(_causal)
    for _ in range(draw(st.integers(0, 2))):
        other = draw(st.one_of(_shape, _leaf("fine", HARMLESS), _any))
        op = draw(st.sampled_from(("and:", "and:f", "and:", "and:f", "or:")))
        tree = Tree(op, 0, draw(st.permutations((tree, other)).map(tuple)))
        if draw(st.integers(0, 4)) == 0:
            tree = Tree("not_not", 0, (tree,))
    return tree, draw(st.sampled_from(FINISHES[:3] + FINISHES)), draw(_size)


def random_model(tree: Tree, how: str, number: int) -> Model:
    return Model(lambda m, ids, positions: finish(how, build(tree, m, ids, positions)), **buffers(number))


@functools.cache
def conditions() -> dict[str, Model]:
    """Each condition, number and way to hand over a mask once, on a causal mask."""
    tables = {"causal": CAUSAL, "window": WINDOW, "chunk": CHUNK, "fine": HARMLESS, "spoil": SPOILERS}
    plain = Tree("causal:ids:le")
    trees = {f"{kind}: {name}": Tree("and:", 0, (plain, Tree(f"{kind}:ids:{name}", 8)))
             for kind, table in tables.items() for name in table}
    trees |= {f"numbers: {name}": Tree(f"causal:{name}:le") for name in SPELLINGS}
    return {name: random_model(tree, "bool", 8) for name, tree in trees.items()} | {
        f"finish: {how}": random_model(plain, how, 8) for how in FINISHES}


def is_a_known_kind(model: Model) -> bool:
    """Whether the mask is causal, a window or a chunk for a few lengths and token ids: it would be harmless to serve."""
    seen: set[tuple[str, int]] | None = None
    for length in (7, 31, 64, 101):
        ids = torch.randint(VOCAB, (1, length), generator=torch.Generator().manual_seed(length))
        at = torch.arange(length)
        mask = model.mask(model, ids, at[None]).expand(1, HEADS, length, length)
        keep = mask if mask.dtype == torch.bool else mask == 0
        if mask.dtype != torch.bool and not bool((keep | (mask < -1e30)).all()):
            return False
        ahead, causal = at[:, None] - at[None], at[None] <= at[:, None]
        kinds = {("causal", 0): causal} | {("window", w): causal & (ahead < w) for w in range(1, 40)} | {
            ("chunk", c): causal & (at[:, None] // c == at[None] // c) for c in range(1, 40)}
        now = {kind for kind, is_kind in kinds.items() if bool((keep == is_kind).all())}
        seen = now if seen is None else seen & now
    return bool(seen)


class Report:
    """Counts outcomes; the environment variable ``to`` names a JSON file that always has the latest counts."""

    def __init__(self, to: str = "QUIRE_MASK_REPORT") -> None:
        self.to = to
        self.counts: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()

    def add(self, harmless: bool, found: str) -> None:
        self.counts[f"{'harmless' if harmless else 'other'}, {found.partition(':')[0]}"] += 1
        if harmless and found != "exact":
            self.refused[found.partition("positions: ")[2].partition(" (node")[0] or found[:150]] += 1
        if path := os.environ.get(self.to):
            Path(path).write_text(str(self))

    @property
    def share_refused(self) -> float:
        """Of what is harmless, the share that was refused."""
        refused, served = self.counts["harmless, refused"], self.counts["harmless, exact"]
        return refused / max(refused + served, 1)

    def __str__(self) -> str:
        versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        share = {"share of harmless refused": round(self.share_refused, 4)}
        found = {**versions, **self.counts, **share, "why": dict(self.refused)}
        return json.dumps(found, indent=1)
