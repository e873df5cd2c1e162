"""The fusion of LoRA's layers: what becomes one kernel, what must not, and that the numbers and the parameters stay."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

from quire.attn_ops.ops.lora import lora_expand
from quire.passes.fusions.lora import fuse_lora
from quire.passes.fusions.projections import fuse_projections
from quire.passes.fx import LINEAR, is_function
from tests.passes.fusions import test_lora_group as lora_group
from tests.passes.fusions.test_lora_group import RANK, WIDTH
from tests.passes.models import after


class Adapted(nn.Linear):
    """As PEFT's layer computes it."""

    def __init__(self, columns: int, scaling: float, dropout: float = 0.0, bias: bool = False, rank: int = RANK) -> None:
        super().__init__(WIDTH, columns, bias=bias)
        self.a, self.b = nn.Linear(WIDTH, rank, bias=False), nn.Linear(rank, columns, bias=False)
        self.drop, self.scaling = nn.Dropout(dropout) if dropout else nn.Identity(), scaling

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.b(self.a(self.drop(x))) * self.scaling


class Layer(lora_group.Layer):
    def __init__(self, dtype: torch.dtype = torch.bfloat16, **options: Any) -> None:
        super().__init__(Adapted, **options)
        self.to(dtype)


def fused(model: nn.Module) -> tuple[int, Counter, torch.Tensor, torch.Tensor]:
    """Matches, how many linear layers and expansions the graph has, its result, and the model's."""
    x = torch.randn(1, 3, WIDTH).to(next(model.parameters()).dtype)
    with torch.no_grad():
        want = model(x)
    (_, matches), gm, out = after(model, x, fuse_projections, fuse_lora)
    kinds = {"linear": LINEAR, "expand": (lora_expand,)}
    return matches, Counter(kind for n in gm.graph.nodes for kind, ops in kinds.items() if is_function(n, ops)), out, want


@pytest.mark.parametrize("options", [{}, dict(dropout=0.1), dict(bias=True)], ids=str)
def test_layers_with_adapters(options) -> None:
    """q, k and v, then o with the residual stream: two products each. The numbers are those of the layers one by one."""
    model = Layer(**options)
    before = {name: (id(p), p.detach().clone()) for name, p in model.named_parameters()}
    matches, ops, got, want = fused(model)
    assert matches == 4
    # With a bias, the layers and their A are a product each.
    assert ops == ({"linear": 4, "expand": 2} if "bias" in options else {"linear": 2, "expand": 2})
    torch.testing.assert_close(got, want, rtol=0, atol=float(want.abs().max()) * 2**-8)  # a product of another shape
    for name, p in model.named_parameters():
        assert id(p) == before[name][0] and torch.equal(p, before[name][1])


def read(m: Layer, x: torch.Tensor) -> torch.Tensor:
    """The second half of q's adapter is read elsewhere."""
    added = m.q.b(m.q.a(x)) * 2.0
    return nn.Linear.forward(m.q, x) + added + added.sum()


def in_place(m: Layer, x: torch.Tensor) -> torch.Tensor:
    """The product changes before it is added."""
    base = nn.Linear.forward(m.q, x)
    added = m.q.b(m.q.a(x)) * 2.0
    base.mul_(2)
    return base + added


def tied(m: Layer, x: torch.Tensor) -> torch.Tensor:
    """One B for two layers."""
    return nn.Linear.forward(m.k, x) + m.k.b(m.k.a(x)) + (nn.Linear.forward(m.v, x) + m.k.b(m.v.a(x)))


@pytest.mark.parametrize("model", [*(lora_group.layer(forward, Layer) for forward in (read, in_place, tied)),
                                   Layer(torch.float32), Layer(rank=129)],
                         ids=["read elsewhere", "written in place", "tied", "float32", "a large rank"])
def test_what_is_left_alone(model) -> None:
    matches, ops, got, want = fused(model)
    assert matches == 0 and not ops["expand"]
    torch.testing.assert_close(got, want, rtol=0, atol=float(want.abs().max()) * 2**-7)
