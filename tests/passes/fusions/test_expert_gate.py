"""Experts with gpt-oss's gate as one op: transformers' own gate matches, with the same numbers; what differs is left alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor
from transformers import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from quire.attn_ops.ops.experts import expert_clamped_swiglu, expert_linear
from quire.passes.fusions.expert_gate import fuse_expert_gate
from quire.passes.fx import value
from tests.passes.models import after_one, listing

_MADE = torch.Generator().manual_seed(0)
ROWS, IDS = torch.randn(5, 12, generator=_MADE), torch.randint(4, (5, 2), generator=_MADE)
GATE_UP, GATE_UP_BIAS = torch.randn(4, 12, 16, generator=_MADE), torch.randn(4, 16, generator=_MADE)
DOWN, DOWN_BIAS = torch.randn(4, 8, 12, generator=_MADE), torch.randn(4, 12, generator=_MADE)
Gate = Callable[[Tensor], Tensor]


def experts(gate: Gate, ids: Tensor = IDS, biases: bool = True, twice: bool = False) -> Callable[[Tensor], Any]:
    def run(x: Tensor) -> Any:
        both = expert_linear(x, GATE_UP, GATE_UP_BIAS if biases else None, IDS, True)
        active = gate(both)
        out = expert_linear(active.to(torch.float32), DOWN, DOWN_BIAS if biases else None, ids, True)
        return (out, active) if twice else out * 2

    return run


TRANSFORMERS = GptOssExperts(GptOssConfig(hidden_size=12, intermediate_size=8, num_local_experts=4, swiglu_limit=3.0))


def of_transformers(both: Tensor) -> Tensor:
    return TRANSFORMERS._apply_gate(both)


def written_otherwise(both: Tensor) -> Tensor:
    gate, up = torch.clamp(both[..., 0::2], max=3), both[..., 1::2].clip(-3, 3)
    return torch.sigmoid(1.702 * gate) * gate * (1 + up)


@pytest.mark.parametrize("biases", [True, False])
@pytest.mark.parametrize("gate", [of_transformers, written_otherwise])
def test_matches(gate: Gate, biases: bool) -> None:
    """The same numbers, up to the order of a product of three."""
    run = experts(gate, biases=biases)
    count, gm, inputs = after_one(fuse_expert_gate, run, ROWS)
    assert count == 1 and [n.target for n in gm.graph.nodes if n.target in (expert_linear, expert_clamped_swiglu)] == [
        expert_clamped_swiglu]
    assert all(value(n) is not None for n in gm.graph.nodes if n.op == "call_function")
    torch.testing.assert_close(gm(*inputs)[0], run(ROWS), rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("which", [(True, True), (True, False), (False, True)])
def test_adapters_go_along(which: tuple[bool, bool]) -> None:
    """LoRA of one product, or both (attn_ops/ops/expert_lora.py)."""
    def lora(n: int, k: int, seed: int) -> list[Any]:
        made = torch.Generator().manual_seed(seed)
        return [[torch.randn(4 * 2, k, generator=made)], [torch.randn(n, 2 * 4, generator=made)], [0.5], [0]]

    first, second = (lora(*sizes) if has else [] for sizes, has in zip(((16, 12, 1), (12, 8, 2)), which, strict=True))

    def run(x: Tensor) -> Tensor:
        active = of_transformers(expert_linear(x, GATE_UP, GATE_UP_BIAS, IDS, True, *first))
        return expert_linear(active, DOWN, DOWN_BIAS, IDS, True, *second) * 2

    count, gm, inputs = after_one(fuse_expert_gate, run, ROWS)
    assert count == 1 and [n.target for n in gm.graph.nodes if n.target in (expert_linear, expert_clamped_swiglu)] == [
        expert_clamped_swiglu]
    torch.testing.assert_close(gm(*inputs)[0], run(ROWS), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(run(ROWS), experts(of_transformers)(ROWS), rtol=1e-2)


def test_graph() -> None:
    gm = after_one(fuse_expert_gate, experts(of_transformers), ROWS)[1]
    assert_expected_inline(listing(gm.graph), """\
l_x_: [5, 12]
g_gate_up_: [4, 12, 16]
g_gate_up_bias_: [4, 16]
g_ids_: [5, 2]
g_down_: [4, 8, 12]
g_down_bias_: [4, 12]
expert_clamped_swiglu_default = expert_clamped_swiglu.default(l_x_, g_gate_up_, g_gate_up_bias_, g_down_,
    g_down_bias_, g_ids_, True, 1.702, 3.0)
mul_3 = mul(expert_clamped_swiglu_default, 2)
return (mul_3,)""")


def gate_with(**changes: Any) -> Gate:
    """The gate with another number or operation in one place."""
    at = dict(gate=(0, 2), up=(1, 2), low=-3.0, high=3.0, top=3.0, one=1, alpha=1.702, activation=torch.sigmoid, least=None)
    at |= changes

    def run(both: Tensor) -> Tensor:
        gate, up = both[..., at["gate"][0]::at["gate"][1]], both[..., at["up"][0]::at["up"][1]]
        gate, up = gate.clamp(min=at["least"], max=at["top"]), up.clamp(min=at["low"], max=at["high"])
        return (up + at["one"]) * (gate * at["activation"](gate * at["alpha"]))

    return run


@pytest.mark.parametrize("changes", [
    dict(gate=(1, 2), up=(0, 2)), dict(gate=(0, 2), up=(0, 2)), dict(low=-2.0), dict(high=2.0), dict(top=2.0), dict(one=2),
    dict(activation=torch.tanh), dict(least=-3.0), dict(low=None), dict(top=-3.0, high=-3.0, low=3.0),
], ids=lambda changes: "-".join(f"{name}: {getattr(to, '__name__', to)}" for name, to in changes.items()))
def test_another_gate_is_left_alone(changes: dict[str, Any]) -> None:
    assert after_one(fuse_expert_gate, experts(gate_with()), ROWS)[0] == 1
    assert after_one(fuse_expert_gate, experts(gate_with(**changes)), ROWS)[0] == 0


def halves(both: Tensor) -> Tensor:
    gate, up = both.chunk(2, -1)
    gate, up = gate.clamp(max=3.0), up.clamp(-3.0, 3.0)
    return (up + 1) * (gate * torch.sigmoid(gate * 1.702))


def in_place(both: Tensor) -> Tensor:
    gate, up = both[..., ::2].clamp(max=3.0), both[..., 1::2].clamp(-3.0, 3.0)
    gate.mul_(2)
    return (up + 1) * (gate * torch.sigmoid(gate * 1.702))


def other_gate(both: Tensor) -> Tensor:
    gate, up = both[..., ::2].clamp(max=3.0), both[..., 1::2].clamp(-3.0, 3.0)
    return (up + 1) * (gate * torch.sigmoid(up * 1.702))


def writes(x: Tensor) -> Tensor:
    """What the first product reads changes before the second: an op in its place would read the new values."""
    both = expert_linear(x, GATE_UP, GATE_UP_BIAS, IDS, True)
    x.add_(1)
    return expert_linear(of_transformers(both), DOWN, DOWN_BIAS, IDS, True)


def in_float64(x: Tensor) -> Tensor:
    both = expert_linear(x.double(), GATE_UP.double(), None, IDS, True)
    return expert_linear(of_transformers(both), DOWN.double(), None, IDS, True)


def more_experts(x: Tensor) -> Tensor:
    return expert_linear(of_transformers(expert_linear(x, GATE_UP[:3], None, IDS % 3, True)), DOWN, None, IDS % 3, True)


def one_up_for_all(x: Tensor) -> Tensor:
    """Two gates and one up, which are broadcast."""
    return expert_linear(of_transformers(expert_linear(x, GATE_UP[..., :3], None, IDS, True)), DOWN[:, :2], None, IDS, True)


def turned(x: Tensor) -> Tensor:
    both = expert_linear(x, GATE_UP, None, IDS, True)
    return expert_linear(of_transformers(both), DOWN.mT.contiguous(), None, IDS, False)


def test_a_chain() -> None:
    """The second product of the first pair is the first of another: one op, and the rest as it was."""
    third = torch.randn(4, 6, 12, generator=torch.Generator().manual_seed(1))

    def run(x: Tensor) -> Tensor:
        first = expert_linear(x, GATE_UP, None, IDS, True)
        second = expert_linear(of_transformers(first), DOWN, None, IDS, True)
        return expert_linear(of_transformers(second), third, None, IDS, True)

    count, gm, inputs = after_one(fuse_expert_gate, run, ROWS)
    assert count == 1
    torch.testing.assert_close(gm(*inputs)[0], run(ROWS), rtol=1e-5, atol=1e-4)


NEAR_MISSES = {
    "writes": writes, "float64": in_float64, "more experts": more_experts, "broadcast": one_up_for_all, "turned": turned,
    "halves": experts(halves), "in place": experts(in_place), "sigmoid of up": experts(other_gate),
    "other ids": experts(of_transformers, ids=IDS.flip(0)), "the activation is read": experts(of_transformers, twice=True),
}


@pytest.mark.parametrize("run", NEAR_MISSES.values(), ids=NEAR_MISSES)
def test_near_misses(run: Callable[[Tensor], Any]) -> None:
    assert after_one(fuse_expert_gate, run, ROWS.clone())[0] == 0
