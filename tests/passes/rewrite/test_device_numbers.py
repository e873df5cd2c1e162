"""Steps of models that make a number on the CPU and move it to their device can be captured."""

from __future__ import annotations

import torch
from torch import fx

from quire.passes.rewrite.device_numbers import numbers_on_device
from tests.passes.models import listing


def traced(function) -> fx.GraphModule:
    """The graph as Dynamo gives it to a backend."""
    found: list[fx.GraphModule] = []

    def keep(gm: fx.GraphModule, inputs):
        found.append(gm)
        return gm.forward

    torch.compile(function, backend=keep, fullgraph=True)(torch.ones(3))
    return found[0]


def test_a_number_is_made_where_it_is_used() -> None:
    """Its value and dtype stay, and a result on the CPU is left alone."""
    def forward(x):
        number = torch.tensor(1e-5)
        return x + number.to(x.device), number

    gm = traced(forward)
    before = gm(torch.ones(3))
    numbers_on_device(gm)
    gm.recompile()
    code = listing(gm.graph)
    assert "full((), 1e-05, dtype=torch.float32, device=cpu)" in code
    for got, wanted in zip(gm(torch.ones(3)), before, strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=0)


def test_other_tensors_stay() -> None:
    """Lists, other dtypes and moves that change more than the device."""
    def forward(x):
        return x + torch.tensor([1.0, 2.0, 3.0]).to(x.device) + torch.tensor(2.5).to(x.device, torch.float64)

    gm = traced(forward)
    before = listing(gm.graph)
    numbers_on_device(gm)
    assert listing(gm.graph) == before
