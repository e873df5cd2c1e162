"""What is noted of a kept trace: a graph that is proved is not proved again, and any other is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from quire import UnsupportedAttention
from quire.passes import pipeline
from quire.passes.capture.kept_trace import proving_once
from quire.passes.capture.kept_verdicts import KeptVerdicts
from quire.passes.fake_values import Replay
from tests.passes.capture.test_kept_trace import llama, traced, was_traced

LIBRARY = torch.library.Library("quire_tests_verdicts", "DEF")
LIBRARY.define("scale(Tensor x) -> Tensor")
LIBRARY.impl("scale", lambda x: x * 2, "CompositeImplicitAutograd")


def graph_of(forward: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> fx.Graph:
    """The graph of a function, with fakes like its inputs, which share memory as these do."""
    gm, mode = fx.symbolic_trace(forward), FakeTensorMode()
    fakes = [mode.from_tensor(x) for x in inputs]
    with mode:
        Replay(gm, mode).run(*fakes)
    return gm.graph


def runs(file: Path, graph: fx.Graph) -> bool:
    seen: list[int] = []
    proving_once(file)(graph, lambda: seen.append(1))
    return bool(seen)


def test_an_engines_graph_is_proved_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, check = list[int](), pipeline.check_tokens

    def counted(*args: object) -> object:
        seen.append(1)
        return check(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(pipeline, "check_tokens", counted)
    assert was_traced(llama) and len(seen) == 1
    assert not was_traced(llama) and len(seen) == 1
    (file,) = (folder / "traces").glob("*.proofs")
    file.write_bytes(b"\xff")
    assert not was_traced(llama) and len(seen) == 2


def test_a_graph_that_is_refused_is_refused_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise UnsupportedAttention("tokens meet")

    assert was_traced(llama)
    (file,) = (folder / "traces").glob("*.proofs")
    file.unlink()
    monkeypatch.setattr(pipeline, "check_tokens", refuse)
    for _ in range(2):
        with pytest.raises(UnsupportedAttention, match="tokens meet"):
            traced(llama)
    assert not file.exists()


@pytest.mark.parametrize("other", [
    lambda: graph_of(lambda x, y: x + y, torch.zeros(3, 5), torch.zeros(3, 5)),
    lambda: graph_of(lambda x, y: (x + y).add_(y), torch.zeros(3, 4), torch.zeros(3, 4)),
    lambda: graph_of(lambda x, y: y + x, torch.zeros(3, 4), torch.zeros(3, 4)),
    lambda: graph_of(lambda x, y: x + y, torch.zeros(3, 4), torch.zeros(3, 4, dtype=torch.float64)),
    lambda: graph_of(lambda x, y: x + y, torch.zeros(3, 4), torch.zeros(4, 3).t()),
    lambda: graph_of(lambda x, y: x + y, torch.zeros(3, 4), torch.nn.Parameter(torch.zeros(3, 4))),
    lambda: graph_of(lambda x, y: x + y, *torch.zeros(2, 3, 4).unbind()),
], ids=["shape", "operation", "order", "dtype", "strides", "parameter", "memory"])
def test_any_difference_is_proved(tmp_path: Path, other: Callable[[], fx.Graph]) -> None:
    """``memory``: what is written into one is in the other."""
    file = tmp_path / "a.pickle"
    graph = graph_of(lambda x, y: x + y, torch.zeros(3, 4), torch.zeros(3, 4))
    assert runs(file, graph) and not runs(file, graph)
    assert runs(file, other()) and not runs(file, graph)


@pytest.mark.parametrize("form", ["overload", "packet"])
def test_an_operation_of_another_library_is_proved_each_time(tmp_path: Path, form: str) -> None:
    """What it does is in its code, of which the trace knows nothing."""
    operation = torch.ops.quire_tests_verdicts.scale
    graph = graph_of(lambda x: (operation.default if form == "overload" else operation)(x), torch.zeros(3))
    assert runs(tmp_path / "a.pickle", graph) and runs(tmp_path / "a.pickle", graph)


def test_what_cannot_be_described_is_proved_each_time(tmp_path: Path) -> None:
    graph = graph_of(lambda x: x + 1, torch.zeros(3))
    (node,) = graph.find_nodes(op="call_function", target=__import__("operator").add)
    node.args = (node.args[0], object())  # type: ignore[assignment]
    assert runs(tmp_path / "a.pickle", graph) and runs(tmp_path / "a.pickle", graph)


def test_the_last_verdicts_are_kept(tmp_path: Path) -> None:
    verdicts = KeptVerdicts(tmp_path / "a.pickle", "trials")
    for i in range(20):
        verdicts.add(f"{i}")
    assert not verdicts.has("3") and verdicts.has("4") and verdicts.has("19")
    assert verdicts.file.name == "a.trials"
