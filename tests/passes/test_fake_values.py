"""Fake values computed again: those that Dynamo computed node by node, with the same memory shared. With other sizes, or memory
that is not shared where it was, the checks of a graph would see another model than the one that runs."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils._pytree import tree_leaves

from quire.passes.capture.paged_model import PagedModel
from quire.passes.fake_values import Replay, Symbols, compute_value
from quire.passes.fx import copy_graph, fake_mode, placeholders, storage_of, value
from quire.passes.options import QuireOptions
from tests.zoo.configs import SERVED, build


def described(graph: fx.Graph) -> list[tuple[str, Any]]:
    """Of each node the metadata of its values, and which earlier values are the same or lie in the same memory."""
    found, memory, values = [], dict[int, int](), dict[int, int]()
    for node in graph.nodes:
        if node.op == "output" or "autocast" in node.name:  # enters and leaves it, which gives no value
            continue
        for x in tree_leaves(value(node)):
            if isinstance(x, torch.Tensor):
                found.append((node.name, (
                    type(x), x.dtype, x.device, x.requires_grad, str(x.shape), str(x.stride()), str(x.storage_offset()),
                    memory.setdefault(storage_of(x), len(memory)), values.setdefault(id(x), len(values)),
                    str(x.untyped_storage().nbytes()), x.is_contiguous())))
            else:
                found.append((node.name, (type(x), str(x))))
    return found


def replayed(gm: fx.GraphModule) -> tuple[fx.Graph, int]:
    """A copy with values computed again, and how many nodes were computed one by one."""
    copy, mode = copy_graph(gm), fake_mode(gm.graph)
    assert mode is not None
    inputs = [value(n) for n in placeholders(copy.graph)]
    computed = 0

    class Counting(Replay):
        def call_function(self, *args: Any) -> Any:
            nonlocal computed
            computed += 1
            return super().call_function(*args)

        def call_method(self, *args: Any) -> Any:
            nonlocal computed
            computed += 1
            return super().call_method(*args)

    for node in copy.graph.nodes:
        node.meta.pop("example_value", None)
    with mode, enable_python_dispatcher(), torch.no_grad():
        Counting(copy, mode).run(*inputs)
    return copy.graph, computed


@pytest.mark.parametrize("name", [
    "llama", "deepseek_v3", *(pytest.param(name, marks=pytest.mark.slow) for name in (
        "gpt2", "gemma2", "mistral", "phi3", "falcon", "olmo2", "gpt_neox", "mixtral", "qwen3_moe", "gemma3", "cohere2",
        "gpt_oss"))])
def test_values_and_memory_are_those_of_the_trace(name: str) -> None:
    model = PagedModel(build(SERVED[name]), QuireOptions(compiler="eager"))
    gm = model.graph.gm
    graph, computed = replayed(gm)
    model.close()
    assert described(graph) == described(gm.graph)
    calls = [n for n in gm.graph.nodes if n.op.startswith("call")]
    assert computed < 0.7 * len(calls), "the second layer is like the first"


class Odd(nn.Module):
    """Operations that look alike twice and give other things, and those that change what they get."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        found: list[Any] = []
        for z in (x + 1, y + 1, x + 1.0, y + True):
            parts = z.split(2, dim=-1)
            found += [*parts, z.contiguous(), z.reshape(-1), z.t().contiguous(), z.t().reshape(-1), z.to(z.dtype)]
            found += [z.double().to(torch.float32), torch.add(z, z, alpha=2), z.expand_as(z), z.view_as(z), z[1:], z[1:, :1]]
            found += [*z.unbind(1)[:2]]
            found += [z.view(torch.int32), z.real, torch.stack([z, z]), torch.cat([z, parts[0]], -1), z.max(-1).values]
            z += 1
            w = z.clone()
            w.t_()
            found += [w, w + 1, z.mul_(2), torch.where(z > 0, z, w.t()), z.new_zeros(z.shape[0]), z.sum() + z.shape[0]]
            z[:, 0] = 3
            with torch.enable_grad():
                found.append(z + 0)
        return found


class Autocast(nn.Module):
    """The same products inside autocast and outside."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        found = [x.t() @ x, x.t() @ x]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found += [x.t() @ x, x.t() @ x]
            with torch.autocast("cpu", enabled=False):
                found += [x.t() @ x]
        return [*found, x.t() @ x, y + 1]


@pytest.mark.parametrize("kind", [Odd, Autocast])
def test_nodes_that_look_alike(kind: type[nn.Module]) -> None:
    graphs: list[fx.GraphModule] = []

    def backend(gm: fx.GraphModule, inputs: Any) -> Any:
        graphs.append(gm)
        return gm.forward

    x, y = (torch.zeros(6, 4) for _ in range(2))
    for each in (x, y):
        torch._dynamo.mark_dynamic(each, 0)
    with torch.no_grad():
        torch.compile(kind(), backend=backend, fullgraph=True)(x, y)
    (gm,) = graphs
    graph, computed = replayed(gm)
    assert described(graph) == described(gm.graph) and computed < sum(n.op.startswith("call") for n in gm.graph.nodes)


def test_nothing_outlives_the_trace() -> None:
    """An engine that is closed leaves no fakes behind: they would add up where models are traced again and again."""
    graph, mode = fx.Graph(), FakeTensorMode(shape_env=ShapeEnv())
    x = graph.placeholder("x")
    x.meta["example_value"] = mode.from_tensor(torch.zeros(6, 4), source=ConstantSource("x"), symbolic_context=(
        StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC, DimDynamic.STATIC])))
    for _ in range(2):
        for method, arguments in (("split", (2, 1)), ("t", ()), ("add", (1,))):
            node = compute_value(graph.call_method(method, (x, *arguments)))
    alive = weakref.ref(mode)
    first, second = (n for n in graph.nodes if n.target == "add")
    assert value(first) is not value(second) and storage_of(value(first)) != storage_of(value(second))
    del graph, mode, x, node, first, second
    gc.collect()
    assert alive() is None


def test_a_guard_knows_who_asked() -> None:
    """By that, a guard on a layout is told from a path of the model's own."""
    env = Symbols()
    x = FakeTensorMode(shape_env=env).from_tensor(torch.zeros(6, 4), source=ConstantSource("x"), symbolic_context=(
        StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC, DimDynamic.STATIC])))
    assert bool(x.shape[0] > 5)
    assert env.guards[-1].sloc.framework_loc.filename == __file__  # type: ignore[union-attr]
