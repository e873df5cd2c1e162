"""Steps of models that make a number on the CPU and move it to their device can be captured."""

from __future__ import annotations

import torch
from torch import fx

from quire.passes.rewrite.device_numbers import numbers_on_device
from tests.passes.models import capture, listing


def test_a_number_is_made_where_it_is_used() -> None:
    """Its value and dtype stay; the one on the CPU stays for those that read it there."""
    graph = fx.Graph()
    for number in (1e-5, 3, True, -1e39):
        made = graph.call_function(torch.tensor, (number,))
        moved = graph.call_method("to", (made, torch.device("meta")))
        made.meta["example_value"], moved.meta["example_value"] = torch.tensor(number), torch.tensor(number, device="meta")
        graph.call_method("double", (moved,))
    graph.output((made, moved))
    gm = fx.GraphModule(torch.nn.Module(), graph)
    numbers_on_device(gm)
    full = list(gm.graph.find_nodes(op="call_function", target=torch.full))
    assert [(n.args, n.kwargs["dtype"]) for n in full] == [
        (((), 1e-5), torch.float32), (((), 3), torch.int64), (((), True), torch.bool), (((), -torch.inf), torch.float32)]
    assert all(n.kwargs["device"] == torch.device("meta") for n in full)
    assert [n.args for n in gm.graph.find_nodes(op="call_function", target=torch.tensor)] == [(-1e39,)]
    for node in full:  # what the kernel computes, on a device that has values
        assert torch.equal(torch.full(*node.args, dtype=node.kwargs["dtype"]), torch.tensor(node.args[1]))
    # One that is changed before it is moved.
    graph = fx.Graph()
    made = graph.call_function(torch.tensor, (2.0,))
    graph.call_method("mul_", (made, 2))
    moved = graph.call_method("to", (made, torch.device("meta")))
    made.meta["example_value"], moved.meta["example_value"] = torch.tensor(2.0), torch.tensor(2.0, device="meta")
    graph.output(moved)
    numbers_on_device(gm := fx.GraphModule(torch.nn.Module(), graph))
    assert not gm.graph.find_nodes(op="call_function", target=torch.full)
    # One that is only moved stays as it is, whatever is changed in place between (Gemma 3n adds to what it predicted); one that
    # is read elsewhere may be changed there.
    for alias in (False, True):
        graph = fx.Graph()
        x, made = graph.placeholder("x"), graph.call_function(torch.tensor, (2.0,))
        x.meta["example_value"] = torch.tensor(1.0)
        view = graph.call_method("view_as", (made, x)) if alias else x
        graph.call_method("mul_", (view, 2))
        moved = graph.call_method("to", (made, torch.device("meta")))
        made.meta["example_value"], moved.meta["example_value"] = torch.tensor(2.0), torch.tensor(2.0, device="meta")
        graph.output(moved)
        numbers_on_device(gm := fx.GraphModule(torch.nn.Module(), graph))
        assert bool(gm.graph.find_nodes(op="call_function", target=torch.full)) is not alias
    # Lists, moves that change more than the device, and those within one, whose result may be changed in place.
    def forward(x):
        number = torch.tensor(1.5)
        same = number.to(x.device)
        same += 1
        return x + torch.tensor([1.0, 2.0, 3.0]).to(x.device) + torch.tensor(2.5).to(x.device, torch.float64) + number

    gm, _ = capture(forward, torch.ones(3))
    before = listing(gm.graph)
    numbers_on_device(gm)
    assert listing(gm.graph) == before
