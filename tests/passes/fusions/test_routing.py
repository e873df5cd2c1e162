"""The router's top-k as one kernel: which calls match, and the numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor

from quire.attn_ops.ops.routing import topk_rows
from quire.passes.fusions import routing
from quire.passes.fx import value
from tests.passes.models import after_one, listing

ROWS = torch.randn(5, 12)


@pytest.fixture(autouse=True)
def on_a_cpu_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "DEVICES", ("cpu",))


def fused(f: Callable[[Tensor], Any], x: Tensor = ROWS) -> Any:
    return after_one(routing.fuse_topk, f, x)[:2]


@pytest.mark.parametrize("f", [
    lambda x: torch.topk(x, 3, dim=-1), lambda x: x.topk(3), lambda x: x.softmax(-1).topk(k=3, dim=1),
    lambda x: torch.topk(input=x, k=3, largest=True),
])
def test_matches(f: Callable[[Tensor], Any]) -> None:
    """The experts and their weights are the same, and so is what follows."""
    def weighed(x: Tensor) -> tuple[Tensor, Tensor]:
        values, indices = f(x)
        return values / values.sum(-1, keepdim=True), indices

    count, gm = fused(weighed)
    assert count == 1 and any(n.target == topk_rows for n in gm.graph.nodes)
    assert all(value(n) is not None for n in gm.graph.nodes if n.op == "call_function")
    for ours, theirs in zip(gm(ROWS), weighed(ROWS), strict=True):
        assert torch.equal(ours, theirs)


def test_graph() -> None:
    _, gm = fused(lambda x: torch.topk(x, 2, dim=-1)[1])
    assert_expected_inline(listing(gm.graph), """\
l_x_: [5, 12]
topk_rows_default = topk_rows.default(l_x_, 2)
getitem_1 = getitem(topk_rows_default, 1)
return (getitem_1,)""")
    count, gm = fused(lambda x: x.topk(3, sorted=False)[1])
    assert count == 1 and torch.equal(gm(ROWS)[0], ROWS.topk(3)[1]), "unsorted may be sorted"


@pytest.mark.parametrize("f, x", [
    (lambda x: x.topk(3, dim=0), ROWS), (lambda x: x.topk(3, largest=False), ROWS), (lambda x: x.topk(17), torch.randn(2, 40)),
    (lambda x: x.topk(2), torch.randn(2, 513)), (lambda x: x.topk(2), ROWS.double()), (lambda x: x.sort(-1), ROWS),
    (lambda x: x.topk(2), ROWS.long()),
], ids=["dim", "smallest", "many", "long rows", "float64", "sort", "integers"])
def test_left_alone(f: Callable[[Tensor], Any], x: Tensor) -> None:
    assert fused(f, x)[0] == 0


def test_other_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU torch's own top-k is faster."""
    monkeypatch.undo()
    assert fused(lambda x: x.topk(3))[0] == 0
