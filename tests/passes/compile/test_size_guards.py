"""What a compiler assumes about sizes is checked for every batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

import quire.passes.compile.inductor
from quire.attn_ops.backend import UnsupportedAttention
from quire.passes.fake_values import fake_input
from quire.passes.fx import placeholders, value
from tests.passes.models import served, tiny, trace

pytestmark = pytest.mark.usefixtures("tokens_unchecked")


def assuming(*conditions: Any) -> Any:
    """A compiler that decides something by the number of tokens while it compiles."""

    def compile(gm: fx.GraphModule, inputs: list[Any]) -> Any:
        tokens = next(value(n) for n in placeholders(gm.graph) if isinstance(value(n), torch.SymInt))
        for condition in conditions:
            assert condition(tokens)  # evaluating it makes the guard
        return gm.forward

    return compile


def test_an_assumption_that_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = assuming(lambda t: t * 4096 <= 2**31 - 1, lambda t: t < 10**6)
    monkeypatch.setattr(quire.passes.compile.inductor, "inductor", compiler)
    model = tiny()
    assert served(trace(model, compiler="inductor"), model) <= 1e-5


@pytest.mark.parametrize("condition, text", [
    (lambda t: t * 100 <= 2900, "100*"),  # traced with 23 tokens, served with 30
    (lambda t: t % 23 == 0, "23"),
])
def test_a_batch_that_breaks_one(condition: Any, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quire.passes.compile.inductor, "inductor", assuming(condition))
    model = tiny()
    with pytest.raises(RuntimeError, match="the compiled graph assumes .*30.*max_num_batched_tokens") as error:
        served(trace(model, compiler="inductor"), model)
    assert text in str(error.value)


def test_a_size_that_becomes_a_constant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quire.passes.compile.inductor, "inductor", assuming(lambda t: t == 23))
    model = tiny()
    with pytest.raises(UnsupportedAttention, match="settled a size that changes from batch to batch"):
        served(trace(model, compiler="inductor"), model)


@pytest.mark.parametrize("page_size", [4, 8])
def test_every_compilation_of_a_graph_is_checked(page_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was assumed once is not noted again, and holds for the graphs compiled after it as well."""
    monkeypatch.setattr(quire.passes.compile.inductor, "inductor", assuming(lambda t: t * 100 <= 2900))
    model = tiny()
    graph = trace(model, compiler="inductor")
    for size in (4, page_size):  # with 8: a second compilation
        with pytest.raises(RuntimeError, match=r"assumes 100\*tokens <= 2900, and this batch has tokens = 30"):
            served(graph, model, page_size=size)


def test_a_size_that_no_input_has(monkeypatch: pytest.MonkeyPatch) -> None:
    def compile(gm: fx.GraphModule, inputs: list[Any]) -> Any:
        fake = next(i for i in inputs if isinstance(i, torch.Tensor)).fake_mode
        unknown = fake_input(fake, "unknown", torch.empty(77, device="meta"), (True,), torch.device("cpu"))
        assert unknown.shape[0] != 3
        return gm.forward

    monkeypatch.setattr(quire.passes.compile.inductor, "inductor", compile)
    model = tiny()
    with pytest.raises(UnsupportedAttention, match="no input of the graph has the size"):
        served(trace(model, compiler="inductor"), model)
