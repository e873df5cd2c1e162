"""An ``arange`` over the row that a model computes with becomes positions, as do the first rows of a table; one that picks rows
stays. Whole models are in tests/adversarial/test_counting.py."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import fx, nn

from quire.attn_ops.backend import UnsupportedAttention
from quire.attn_ops.metadata import CommonAttentionMetadata
from quire.attn_ops.step import Step
from quire.passes.fx import copy_graph, placeholders, value
from quire.passes.rewrite.own_positions import POSITIONS, adds_positions, check_uncompiled, positions_of, use_given_positions
from tests.passes.models import capture, changes, listing

WIDTH = 4


class Model(nn.Module):
    def __init__(self, compute: Callable[[torch.Tensor], torch.Tensor], reads: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.compute, self.reads = compute, reads
        self.embed, self.place = nn.Embedding(31, WIDTH), nn.Embedding(64, WIDTH)

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        return self.compute(x + self.place(position_ids) if self.reads else x)


def scaled(x: torch.Tensor) -> torch.Tensor:
    positions = torch.arange(x.shape[1], device=x.device) + 0
    return x * torch.log1p(torch.floor((positions.float() + 1.0) / 3)).view(1, -1, 1).expand(1, -1, 1)


def picks(x: torch.Tensor) -> torch.Tensor:
    flat = x.flatten(0, 1)
    return flat[torch.arange(flat.shape[0]), flat.argmax(-1)][None, :, None] + x


def sorts(x: torch.Tensor) -> torch.Tensor:
    """Rows sorted, and put back by the inverse permutation: how experts with one choice a token are routed."""
    flat = x.flatten(0, 1)
    order = flat[:, 0].sort().indices
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.shape[0])
    return (flat[order] * 2)[inverse][None]


def both(x: torch.Tensor) -> torch.Tensor:
    rows = torch.arange(x.shape[1])
    return x[:, rows] * rows[None, :, None]


def offsets(x: torch.Tensor) -> torch.Tensor:
    """Rows of a flattened tensor, by a number computed from the row's."""
    flat = x.repeat_interleave(2, dim=1).flatten(0, 1)
    return x + flat[torch.arange(x.shape[1]) * 2 + 1]


def traced(model: nn.Module) -> tuple[fx.GraphModule, Any, list[Any]]:
    gm, inputs = capture(model, torch.arange(9)[None] % 31, torch.arange(9)[None], dynamic=True)
    tokens = next(value(n).shape[1] for n in placeholders(gm.graph) if "input_ids" in n.name)
    return gm, tokens, inputs


def aranges(gm: fx.GraphModule) -> int:
    return sum(n.target is torch.arange for n in gm.graph.nodes)


@pytest.mark.parametrize("compute", [
    scaled, lambda x: x * torch.arange(0, x.shape[1], dtype=torch.float32)[None, :, None].cos(),
    lambda x: x + torch.arange(x.shape[1], dtype=torch.int32).unsqueeze(-1).to(x.dtype).sin(),
    lambda x: x * torch.linspace(1, 2, 64)[torch.arange(x.shape[1]).clamp(max=63)][None, :, None],
], ids=["scaled", "floats", "integers", "table"])
def test_numbers_become_positions(compute: Any) -> None:
    model = Model(compute).eval()
    gm, tokens, inputs = traced(model)
    assert use_given_positions(gm, tokens, True) == 1 and not aranges(gm)
    # Two sequences in one row, the second one from its fourth token on: each as in a forward of its own.
    ids = torch.arange(9) % 31
    first, second = ids[:5], ids[2:9]
    row, positions = torch.cat([first, second[3:]])[None], torch.cat([torch.arange(5), torch.arange(3, 7)])[None]
    args = []
    for node, x in zip(placeholders(gm.graph), inputs, strict=True):
        args.append(row if "input_ids" in node.name else positions if "position_ids" in node.name else x)
    with torch.no_grad():
        got = gm(*args)[0][0]
        want = [model(s[None], torch.arange(len(s))[None])[0] for s in (first, second)]
    assert torch.equal(got, torch.cat([want[0], want[1][3:]]))


@pytest.mark.parametrize("compute", [picks, sorts])
@pytest.mark.parametrize("reads", [True, False])
def test_what_picks_rows_stays(compute: Any, reads: bool) -> None:
    gm, tokens, _ = traced(Model(compute, reads).eval())
    assert use_given_positions(gm, tokens, True) == 0 and aranges(gm) == 1 and not adds_positions(gm)


def cut(x: torch.Tensor) -> torch.Tensor:
    return x * torch.linspace(1, 2, 64 * WIDTH).view(1, 64, WIDTH)[:, : x.shape[1]]


def test_a_model_that_reads_no_positions_gets_an_input_for_them() -> None:
    """Both ways to count, before and after."""
    model = Model(lambda x: scaled(x) + cut(x), reads=False).eval()
    gm, tokens, inputs = traced(model)
    before = copy_graph(gm)
    assert use_given_positions(gm, tokens, True) == 2 and adds_positions(gm) and not aranges(gm)
    assert_expected_inline(changes(listing(before.graph), listing(gm.graph)), """\
+quire_positions: [1, s0]
-arange = arange(s0, device=cpu)
-positions = add(arange, 0)
+reshape = reshape(quire_positions, -1)
+positions = add(reshape, 0)
-getitem_6 = getitem(view_1, (slice(None, None, None), slice(None, s0, None)))
-mul_1 = mul(x, getitem_6)
+reshape_1 = reshape(quire_positions, -1)
+index_select = index_select(view_1, 1, reshape_1)
+mul_1 = mul(x, index_select)""")
    ids = torch.arange(9) % 31
    row, positions = torch.cat([ids[:5], ids[2:9][3:]])[None], torch.cat([torch.arange(5), torch.arange(3, 7)])[None]
    args = [row if "input_ids" in n.name else x for n, x in zip(placeholders(gm.graph), inputs, strict=False)]
    with torch.no_grad():
        got = gm(*args, positions)[0][0]
        want = [model(s[None], torch.zeros(1, len(s), dtype=torch.int64))[0] for s in (ids[:5], ids[2:9])]
    assert torch.equal(got, torch.cat([want[0], want[1][3:]])) and placeholders(gm.graph)[-1].name == POSITIONS


@pytest.mark.parametrize("given", [False, True])
def test_positions_of_a_step(given: bool) -> None:
    """Those that the step has, or else by its lengths; padding has 0. A row without tokens in between counts for nothing."""
    meta = CommonAttentionMetadata.build([2, 0, 3, 1], [5, 4, 3, 9], [[1, 2], [3], [4], [5, 6, 7]], page_size=4).padded(9, 6)
    step = Step(None, meta, positions=meta.positions + 1 if given else None)  # type: ignore[arg-type]
    assert positions_of(step).tolist() == [[n + given for n in (3, 4, 0, 1, 2, 8, 0, 0, 0)]]


def changed(x: torch.Tensor) -> torch.Tensor:
    positions = torch.arange(x.shape[1])
    positions.view(-1).add_(1)
    return x * positions[None, :, None]


def test_given_positions_that_are_changed_are_not_those_of_others() -> None:
    """As one memory, a change of either would be one of both."""
    class Shifted(Model):
        def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
            own = torch.arange(input_ids.shape[1])
            position_ids.add_(1)
            return super().forward(input_ids, position_ids) * own[None, :, None]

    gm, tokens, _ = traced(Shifted(lambda x: x).eval())
    with pytest.raises(UnsupportedAttention, match="are changed in place"):
        use_given_positions(gm, tokens, True)


@pytest.mark.parametrize("moved", [True, False], ids=["and moved", "and computed with there"])
def test_numbers_on_another_device(moved: bool) -> None:
    """Positions are where the model is: numbers that are made elsewhere may be moved there, and nothing else."""
    def compute(x: torch.Tensor) -> torch.Tensor:
        numbers = torch.arange(x.shape[1], device="meta")
        return x * (numbers if moved else numbers + 1).to(x.device)[None, :, None]

    gm, tokens, _ = traced(Model(compute).eval())
    with contextlib.nullcontext() if moved else pytest.raises(UnsupportedAttention, match="on another device"):
        assert use_given_positions(gm, tokens, True) == 1 and not aranges(gm)


@pytest.mark.parametrize(("compute", "why"), [
    (lambda x: x * torch.arange(x.shape[1], dtype=torch.bfloat16)[None, :, None], "does not hold each of them"),
    (changed, "are changed in place"), (both, "both to compute and to pick rows"),
    (offsets, "both to compute and to pick rows"),
    (lambda x: x * torch.arange(1, x.shape[1] + 1)[None, :, None], "other than 0, 1, 2")])
def test_refused(compute: Any, why: str) -> None:
    gm, tokens, _ = traced(Model(compute).eval())
    with pytest.raises(UnsupportedAttention, match=why):
        use_given_positions(gm, tokens, True)


def test_uncompiled() -> None:
    gm, tokens, _ = traced(Model(scaled).eval())
    check_uncompiled(gm)
    use_given_positions(gm, tokens, True)
    with pytest.raises(UnsupportedAttention, match="numbers the tokens of the row itself"):
        check_uncompiled(gm)
