"""Spellings of the rotation: those that are matched compute the same when fused, and those nearly like them are not matched."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch

from quire.attn_ops.ops.rope import PLAIN, RopeForm, rope_kv_write
from quire.attn_ops.registry import get_backend
from quire.passes.fusions.base import Fusion
from quire.passes.fusions.rope import fuse_rope
from tests.passes.rotary import (
    DIM,
    KV_HEADS,
    Rotary,
    complex_numbers,
    glm,
    halves,
    interleaved,
    matches,
    partial,
    plain,
    rotate_half,
    runs,
    same,
    uneven,
)

pytestmark = pytest.mark.usefixtures("tokens_unchecked")
HALF = DIM // 2
Tensor = torch.Tensor


def ernie(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    cos, sin = (t[..., :HALF].repeat_interleave(2, dim=-1) for t in (cos, sin))
    turned = torch.stack((-x[..., 1::2], x[..., 0::2]), dim=-1).flatten(-2)
    return (x.float() * cos + turned.float() * sin).to(x.dtype)


def modernbert(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return (x.float() * cos + rotate_half(x.float()) * sin).to(x.dtype)


def other_way(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # nanochat
    return x * cos + torch.cat((x[..., HALF:], -x[..., :HALF]), dim=-1) * sin


def other_way_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x * cos + torch.stack((x[..., 1::2], -x[..., ::2]), dim=-1).flatten(-2) * sin


def neighbours_in_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # GPT-J's, with half tables
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack([a * cos - b * sin, sin * a + cos * b], dim=-1).flatten(-2)


def split_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.split(HALF, -1)
    return torch.cat([cos * a - sin * b, b * cos + a * sin], -1)


FULL, TABLES, PAIRS = RopeForm(), RopeForm(half_tables=True), RopeForm(interleaved=True)
BOTH = RopeForm(interleaved=True, half_tables=True)
SPELLINGS: dict[str, tuple[RopeForm, Rotary]] = {
    "llama": (FULL, Rotary()), "keys used again": (FULL, Rotary(keys_too=True)),
    "some dimensions": (FULL, Rotary(partial, rotary=4)),
    "some dimensions, norms": (FULL, Rotary(partial, rotary=4, norms=(1e-5, 1e-5))),
    "gpt-oss": (TABLES, Rotary(halves, tables="half")),
    "split": (TABLES, Rotary(split_halves, tables="half")),
    "gpt-oss, some dimensions": (TABLES, Rotary(lambda x, cos, sin: torch.cat(
        (halves(x[..., :4], cos, sin), x[..., 4:]), -1), tables="half", rotary=4)),
    "cohere": (PAIRS, Rotary(interleaved, tables="neighbours")),
    "cohere, angles in any order": (PAIRS, Rotary(interleaved)),
    "glm": (BOTH, Rotary(glm, rotary=4)), "glm, all dimensions": (BOTH, Rotary(glm)), "ernie": (BOTH, Rotary(ernie)),
    "neighbours in pairs": (BOTH, Rotary(neighbours_in_pairs, tables="half")),
    "modernbert": (FULL, Rotary(modernbert)),
    "nanochat": (FULL, Rotary(other_way)), "the other way, neighbours": (PAIRS, Rotary(other_way_pairs)),
    "gemma4": (FULL, Rotary(late=True)), "llama4": (BOTH, Rotary(complex_numbers, tables="complex", late=True)),
    "complex": (BOTH, Rotary(complex_numbers, tables="complex")),
    "norms before, transposed late": (FULL, Rotary(late=True, norms=(1e-5, 1e-5))),
    "norms as gemma3": (RopeForm(norm_offset=1.0), Rotary(norms=(1e-5, 1e-5), kind="gemma")),
    "norms as gemma3, late": (RopeForm(norm_offset=1.0), Rotary(norms=(1e-5, 1e-5), kind="gemma", late=True)),
    "norms after": (RopeForm(norm_after=True), Rotary(norms=(1e-5, 1e-5), norm_after=True)),
    "norms without weights after": (BOTH._replace(norm_after=True), Rotary(
        complex_numbers, tables="complex", late=True, norms=(1e-5, 1e-5), kind="none", norm_after=True)),
    "norms without weights before": (FULL, Rotary(norms=(1e-5, 1e-5), kind="none")),
}


#: Variants of others, which test_it_rounds_where_the_model_does has too.
VARIANTS = ("keys used again", "some dimensions", "split", "gpt-oss, some dimensions", "cohere, angles in any order",
            "glm, all dimensions", "ernie", "norms before, transposed late", "norms as gemma3, late")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in VARIANTS)) for n in SPELLINGS])
def test_what_is_matched(name: str) -> None:
    """Once, as the form that it is, with its norms; and the numbers stay."""
    form, model = SPELLINGS[name]
    (node,) = (n for n in same(model).gm.graph.nodes if n.target is rope_kv_write)
    assert RopeForm(**node.kwargs) == form
    assert [w is not None for w in node.args[5:7]] == [len(model.norms) > 0] * 2


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in SPELLINGS if n not in ("llama4", "complex", "norms without weights after")])
def test_it_rounds_where_the_model_does(name: str) -> None:
    """In bfloat16, to the last bit: keys are stored as the model has them. (Products of complex numbers may differ in float32's
    last bit, which can tip a rounding.)"""
    model = SPELLINGS[name][1].bfloat16()
    try:
        (_, wanted, keys), (lowered, got, new_keys) = runs(model, "none", "rope")
    finally:
        model.float()
    assert sum(n.target is rope_kv_write for n in lowered.gm.graph.nodes) == 1
    assert torch.equal(new_keys, keys) and torch.equal(got, wanted)


def pairs(first: Any, second: Any, order: tuple[int, int] = (0, 1), dim: int = -1, step: int = 1) -> Any:
    """A rotation of halves (step 1) or neighbours (step 2) in which something may be amiss."""
    def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        a, b = (x[..., :HALF], x[..., HALF:]) if step == 1 else (x[..., ::2], x[..., 1::2])
        made = [first(a, b, cos, sin), second(a, b, cos, sin)]
        return torch.cat([made[i] for i in order], dim) if step == 1 else torch.stack([made[i] for i in order], dim).flatten(-2)
    return turn


def first(a: Tensor, b: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return a * cos - b * sin


def second(a: Tensor, b: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return b * cos + a * sin


def stacked(parts: Any, dim: int = -1) -> Any:
    return lambda x, cos, sin: x * cos + torch.stack(parts(x[..., ::2], x[..., 1::2]), dim).flatten(-2) * sin


HALF_TABLES = dict(tables="half")
NEAR: dict[str, Rotary] = {
    "pairs: sum for difference": Rotary(pairs(lambda a, b, c, s: a * c + b * s, second), **HALF_TABLES),
    "pairs: difference for sum": Rotary(pairs(first, lambda a, b, c, s: b * c - a * s), **HALF_TABLES),
    "pairs: the other way": Rotary(pairs(lambda a, b, c, s: b * s - a * c, second), **HALF_TABLES),
    "pairs: in the other order": Rotary(pairs(first, second, (1, 0)), **HALF_TABLES),
    "pairs: cos and sin changed": Rotary(pairs(first, lambda a, b, c, s: b * s + a * c), **HALF_TABLES),
    "pairs: one half twice": Rotary(pairs(first, lambda a, b, c, s: b * c + b * s), **HALF_TABLES),
    "pairs: scaled sum": Rotary(pairs(first, lambda a, b, c, s: torch.add(b * c, a * s, alpha=2)), **HALF_TABLES),
    "pairs: of neighbours, joined as halves": Rotary(lambda x, c, s: torch.cat(
        (x[..., ::2] * c - x[..., 1::2] * s, x[..., 1::2] * c + x[..., ::2] * s), -1), **HALF_TABLES),  # DeepSeek
    "pairs: of halves, joined as neighbours": Rotary(lambda x, c, s: torch.stack(
        (x[..., :HALF] * c - x[..., HALF:] * s, x[..., HALF:] * c + x[..., :HALF] * s), -1).flatten(-2), **HALF_TABLES),
    "neighbours: in the other order": Rotary(stacked(lambda a, b: (a, -b)), tables="neighbours"),
    "neighbours: none negative": Rotary(stacked(lambda a, b: (b, a)), tables="neighbours"),
    "neighbours: both negative": Rotary(stacked(lambda a, b: (-b, -a)), tables="neighbours"),
    "neighbours: stacked as halves": Rotary(stacked(lambda a, b: (-b, a), dim=-2), tables="neighbours"),
    "halves: none negative": Rotary(lambda x, c, s: x * c + torch.cat((x[..., HALF:], x[..., :HALF]), -1) * s),
    "halves: of another tensor": Rotary(lambda x, c, s: x * c + rotate_half(x + 1) * s),
    "halves: scaled sum": Rotary(lambda x, c, s: torch.add(x * c, rotate_half(x) * s, alpha=2)),
    "halves: tables repeated as for neighbours": Rotary(lambda x, c, s: plain(x, *(
        t[..., :HALF].repeat_interleave(2, dim=-1) for t in (c, s)))),
    "neighbours: tables from the second half": Rotary(lambda x, c, s: interleaved(x, *(
        t[..., HALF:].repeat_interleave(2, dim=-1) for t in (c, s)))),
    "neighbours: one table repeated": Rotary(lambda x, c, s: interleaved(
        x, c[..., :HALF].repeat_interleave(2, dim=-1), s), tables="neighbours"),
    "some dimensions: a gap": Rotary(lambda x, c, s: torch.cat((plain(x[..., :4], c, s), x[..., 3:7]), -1), rotary=4),
    "some dimensions: the last ones": Rotary(lambda x, c, s: torch.cat((x[..., :4], plain(x[..., 4:], c, s)), -1), rotary=4),
    "complex: the other way": Rotary(lambda x, f, _: complex_numbers(x, f.conj(), f), tables="complex"),
    "complex: squared": Rotary(lambda x, f, _: complex_numbers(x, f * f, f), tables="complex"),
    "another rounding between": Rotary(lambda x, c, s: plain(x, c, s).half().to(x.dtype)),
    "not halves": Rotary(uneven), "tables of their own": Rotary(own_tables=True), "no rotation": Rotary(lambda x, c, s: x),
    "norms of two eps after": Rotary(norms=(1e-6, 1e-2), norm_after=True),
    "LayerNorm after": Rotary(lambda x, c, s: torch.nn.functional.layer_norm(plain(x, c, s), (DIM,))),
}


@pytest.mark.parametrize("name", NEAR)
def test_what_is_not(name: str) -> None:
    assert matches(NEAR[name]) == 0


class Changed(Rotary):
    """The unrotated heads, or a table, are changed in place after the rotation, before attention."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        self.turn = self.turned

    def turned(self, x, cos, sin):
        out = plain(x, cos, sin)
        if x.shape[1] == KV_HEADS:  # the keys, after the queries
            (x if self.what == "heads" else cos).mul_(0.3)
        return out


class ChangedTable(Rotary):
    """A table is changed through a view before anything reads it; the op's form of it is made right behind the table."""

    def forward(self, x: Tensor, position_ids: Tensor, tables: Any = None) -> Any:
        cos, sin = self.tables(position_ids, 100.0)
        sin.view(sin.shape).mul_(0.3)
        return super().forward(x, position_ids, (cos, sin))


@pytest.mark.parametrize("model", [Changed("heads"), Changed("table"), ChangedTable()], ids=["heads", "table", "view"])
def test_what_is_changed_in_place(model: Rotary) -> None:
    assert matches(model) == 0
    same(model)


def test_the_near_ones_are_near() -> None:
    """The helpers that they are made with make what is matched, if nothing is amiss."""
    right = [Rotary(pairs(first, second), **HALF_TABLES), Rotary(pairs(first, second, step=2), **HALF_TABLES),
             Rotary(stacked(lambda a, b: (-b, a)), tables="neighbours"), Rotary(partial, rotary=4)]
    assert [matches(model) for model in right] == [1] * 4


class Two(torch.nn.Module):
    """Two layers with the same tables."""

    def __init__(self, layer: Rotary) -> None:
        super().__init__()
        self.layers, self.qkv = torch.nn.ModuleList([layer, copy.deepcopy(layer)]), layer.qkv

    def forward(self, x: Tensor, position_ids: Tensor) -> Tensor:
        tables = self.layers[0].tables(position_ids, 100.0)
        for layer in self.layers:
            x = layer(x, position_ids, tables)[..., : x.shape[-1]]
        return x


@pytest.mark.parametrize("name, makes", [
    ("cohere", "to"), ("complex", "contiguous"),
    *(pytest.param(*variant, marks=pytest.mark.slow) for variant in (("nanochat", "neg"), ("glm", "narrow")))])
def test_tables_are_made_once(name: str, makes: str) -> None:
    """What is made of a table (a cast, the other sign, one part of complex numbers) is made once for all layers."""
    model = Two(SPELLINGS[name][1]).bfloat16()
    try:
        (lowered, got, _), (_, wanted, _) = runs(model, "rope", "none")
    finally:
        model.float()
    nodes = [n for n in lowered.gm.graph.nodes if n.target is rope_kv_write]
    tables = [[n.args[i].args[0] for n in nodes] for i in (3, 4)]
    assert len(nodes) == 2 and all(a is b for a, b in tables)
    assert tables[1][0].target == makes
    assert torch.equal(got, wanted) or name == "complex"


@pytest.mark.parametrize("name, form", [("gpt-oss", TABLES), ("norms as gemma3", RopeForm(norm_offset=1.0)), ("gemma4", PLAIN)])
def test_a_backend_that_rotates_one_form(name: str, form: RopeForm) -> None:
    """A rope_op that does not declare the options is never called with one: the kernel before attention rotates."""
    triton = get_backend("triton")
    model = SPELLINGS[name][1]
    for declared, (lowered, _, _) in zip((True, False), runs(model, "none", "none", attention="triton"), strict=True):
        backend = dataclasses.replace(triton, rope_forms=declared)
        lowered = dataclasses.replace(lowered, target=dataclasses.replace(lowered.target, backend=backend))
        assert fuse_rope(Fusion(lowered.gm, backend=backend)) == 1
        (node,) = (n for n in lowered.gm.graph.nodes if n.target in (rope_kv_write, triton.rope_op))
        assert node.target is (triton.rope_op if declared or form == PLAIN else rope_kv_write)
        assert {k: v for k, v in node.kwargs.items() if k in RopeForm._fields} == form.options()


@pytest.mark.parametrize("name", [
    "gpt-oss", "norms without weights after", *(pytest.param(n, marks=pytest.mark.slow) for n in ("glm", "norms as gemma3"))])
def test_a_backend_that_rotates_all(name: str) -> None:
    model = SPELLINGS[name][1]
    ((_, wanted, keys),), ((_, got, new_keys),) = runs(model, "none"), runs(model, "rope", attention="triton")
    torch.testing.assert_close(got, wanted, atol=1e-5, rtol=0)
    torch.testing.assert_close(new_keys, keys, atol=1e-5, rtol=0)
