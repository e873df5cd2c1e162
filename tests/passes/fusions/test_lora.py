"""The fusion of LoRA's layers: what becomes one kernel, what must not, and that the numbers and the parameters stay."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from quire.attn_ops.ops.lora import lora_expand
from quire.passes.fusions.lora import fuse_lora
from quire.passes.fusions.projections import fuse_projections
from quire.passes.fx import LINEAR, is_function
from tests.passes.models import after

WIDTH, RANK = 32, 4


class Adapted(nn.Linear):
    """As PEFT's layer computes it."""

    def __init__(self, columns: int, scaling: float, dropout: float = 0.0, bias: bool = False, rank: int = RANK) -> None:
        super().__init__(WIDTH, columns, bias=bias)
        self.a, self.b = nn.Linear(WIDTH, rank, bias=False), nn.Linear(rank, columns, bias=False)
        self.drop, self.scaling = nn.Dropout(dropout) if dropout else nn.Identity(), scaling

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.b(self.a(self.drop(x))) * self.scaling


class Layer(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.bfloat16, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v = Adapted(48, 2.0, **options), Adapted(16, 0.5, **options), Adapted(16, 1.0, **options)
        self.o = Adapted(WIDTH, 0.3, **options)
        self.to(dtype).eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)
        return x + self.o(F.pad(k * v, (0, 16)) + q[..., :32]).to(x.dtype)


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


class Read(Layer):
    """The second half of q's adapter is read elsewhere."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        added = self.q.b(self.q.a(x)) * 2.0
        return nn.Linear.forward(self.q, x) + added + added.sum()


class InPlace(Layer):
    """The product changes before it is added."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        base = nn.Linear.forward(self.q, x)
        added = self.q.b(self.q.a(x)) * 2.0
        base.mul_(2)
        return base + added


class Tied(Layer):
    """One B for two layers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.Linear.forward(self.k, x) + self.k.b(self.k.a(x)) + (nn.Linear.forward(self.v, x) + self.k.b(self.v.a(x)))


@pytest.mark.parametrize("model", [Read(), InPlace(), Tied(), Layer(torch.float32), Layer(rank=129)],
                         ids=["read elsewhere", "written in place", "tied", "float32", "a large rank"])
def test_what_is_left_alone(model) -> None:
    matches, ops, got, want = fused(model)
    assert matches == 0 and not ops["expand"]
    torch.testing.assert_close(got, want, rtol=0, atol=float(want.abs().max()) * 2**-7)
