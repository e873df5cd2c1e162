"""The experts function that transformers calls: the same numbers, who is switched over, who is left alone, what is put back.

Tolerances: both sides compute in float32 (eps 1.2e-7) and differ in the order of sums over up to 16 terms of order 1.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
from typing import Any

import pytest
import torch
from torch import nn
from transformers.integrations import moe

from quire.attn_ops.ops.experts import expert_swiglu
from quire.passes.capture import hf_experts
from quire.passes.capture.hf_experts import NAME, experts_active, experts_function, experts_of
from quire.passes.capture.paged_model import PagedModel
from quire.passes.options import QuireOptions
from tests.zoo.configs import SERVED, build

E, H, WIDTH = 4, 16, 12
EAGER = QuireOptions(compiler="eager")


@pytest.fixture(autouse=True)
def on_a_cpu_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: the interface is switched over."""
    monkeypatch.setattr(hf_experts, "wanted", lambda model: True)
    hf_experts._say_once.cache_clear()


class _Config:
    _experts_implementation_internal: str | None = "grouped_mm"

    @property
    def _experts_implementation(self) -> str | None:
        return self._experts_implementation_internal


class _Experts(nn.Module):
    """Laid out as transformers' own; the decorator's options decide which weights there are."""

    def __init__(self, config: Any, *, gate: bool, bias: bool, transposed: bool, norm: bool) -> None:
        super().__init__()
        self.num_experts, self.act_fn = E, nn.SiLU()
        first, up = ("gate_up_proj", 2 * WIDTH) if gate else ("up_proj", WIDTH)
        for name, n, k in ((first, up, H), ("down_proj", H, WIDTH)):
            setattr(self, name, nn.Parameter(torch.randn(E, *((k, n) if transposed else (n, k))) * k**-0.5))
            if bias:
                setattr(self, name + "_bias", nn.Parameter(torch.randn(E, n)))
        if norm:
            self.post_expert_norm = nn.RMSNorm(H)

    def forward(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor,
                scale: float = 1.0) -> torch.Tensor:
        raise NotImplementedError("eager")


def module_of(config: Any = None, *, gate: bool = True, bias: bool = False, transposed: bool = False, norm: bool = False,
              **options: Any) -> Any:
    kind = type("Experts", (_Experts,), {"__init__": _Experts.__init__, "forward": _Experts.forward})
    decorate = moe.use_experts_implementation(has_gate=gate, has_bias=bias, is_transposed=transposed,
                                              has_post_expert_norm=norm, **options)
    return decorate(kind)(config or _Config(), gate=gate, bias=bias, transposed=transposed, norm=norm)  # type: ignore[operator]


def routed(tokens: int = 5, k: int = 2) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.randn(tokens, H), torch.randint(E, (tokens, k)), torch.rand(tokens, k)


# ---- what it computes


@pytest.mark.parametrize("gate, bias, transposed, norm", list(itertools.product((True, False), repeat=4)))
@torch.no_grad()
def test_what_transformers_computes(gate: bool, bias: bool, transposed: bool, norm: bool) -> None:
    module, inputs = module_of(gate=gate, bias=bias, transposed=transposed, norm=norm), routed()
    expected = moe.batched_mm_experts_forward(module, *inputs)
    with experts_active(module):
        assert module.config._experts_implementation == NAME
        torch.testing.assert_close(module(*inputs), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(module(*inputs), expected, atol=1e-5, rtol=1e-5)  # grouped_mm


@torch.no_grad()
def test_a_gate_of_its_own() -> None:
    module, inputs = module_of(), routed()
    type(module)._apply_gate = lambda self, x: x[..., ::2] * 2 + x[..., 1::2]
    torch.testing.assert_close(experts_function(module, *inputs), moe.batched_mm_experts_forward(module, *inputs), atol=1e-5,
                               rtol=1e-5)


@torch.no_grad()
def test_experts_of_other_devices() -> None:
    """With expert parallelism ids past the last expert have a weight of zero here, and belong to another rank."""
    module, (x, ids, weights) = module_of(bias=True, norm=True), routed()
    module._is_expert_parallel = True
    ids[0], ids[3, 1] = E, E
    weights = weights.masked_fill(ids == E, 0.0)
    out = experts_function(module, x, ids, weights)
    torch.testing.assert_close(out, moe.batched_mm_experts_forward(module, x, ids, weights), atol=1e-5, rtol=1e-5)
    assert not out[0].any() and out[3].any()


@torch.no_grad()
def test_sums_in_fp32() -> None:
    """In bf16 no further from fp64 than transformers' own; weights of a wider router stay wide."""
    module, (x, ids, weights) = module_of(), routed(64, 4)
    low = module.bfloat16()
    inputs = (x.bfloat16(), ids, weights)
    ours, theirs = (f(low, *inputs) for f in (experts_function, moe.batched_mm_experts_forward))
    assert ours.dtype == torch.bfloat16
    truth = moe.batched_mm_experts_forward(low.double(), inputs[0].double(), ids, weights.double())
    assert (ours - truth).norm() <= 1.05 * (theirs - truth).norm() < 0.05 * truth.norm()


# ---- who is switched over


@pytest.mark.parametrize("before", [None, "eager", "batched_mm", "grouped_mm"])
def test_the_old_implementation_comes_back(before: str | None) -> None:
    model = build(SERVED["qwen3_moe"])
    model.config._experts_implementation_internal = before
    config = model.config.to_dict()
    with experts_active(model):
        assert model.config._experts_implementation == NAME
        with experts_active(model):  # a paged step while an engine is made
            assert model.config._experts_implementation == NAME
        assert model.config._experts_implementation == NAME
    with pytest.raises(KeyError), experts_active(model):
        raise KeyError("stop")
    assert model.config._experts_implementation == before and not hf_experts._BEFORE
    assert model.config.to_dict() == config


def test_every_config_of_a_composite_model() -> None:
    parts = nn.Module()
    parts.a, parts.b, parts.dense = module_of(), build(SERVED["mixtral"]), build(SERVED["llama"])
    dense = parts.dense.config._experts_implementation
    with experts_active(parts):
        assert [m.config._experts_implementation for m in experts_of(parts)] == [NAME] * 3
        assert parts.dense.config._experts_implementation == dense != NAME
    assert [m.config._experts_implementation for m in experts_of(parts)] == ["grouped_mm"] * 3


class Wrapped(nn.Parameter):
    pass


@pytest.mark.parametrize("change, why", [
    (lambda m, patch: setattr(m.config, "_experts_implementation_internal", "sonicmoe"), "was chosen: sonicmoe"),
    (lambda m, patch: setattr(m, "down_proj", Wrapped(m.down_proj.data)), "not plain tensors"),
    (lambda m, patch: setattr(m, "down_proj", nn.Parameter(m.down_proj.to(torch.float8_e4m3fn), requires_grad=False)),
     "not plain tensors"),
    (lambda m, patch: setattr(m, "down_proj", nn.Parameter(m.down_proj.half())), "of one dtype"),
    (lambda m, patch: setattr(m, "gate_up_proj", nn.Parameter(m.gate_up_proj.flatten(0, 1))), "not one tensor"),
    (lambda m, patch: delattr(m, "is_transposed"), "does not say is_transposed"),
    (lambda m, patch: patch.setattr(hf_experts, "_options", lambda: hf_experts._KNOWN_OPTIONS | {"has_scale"}), "'has_scale'"),
], ids=["chosen", "subclass", "narrow", "mixed", "several", "silent", "newer"])
def test_left_alone(change: Any, why: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """One module that is not known: the config that it shares stays, with one line of the log; others are switched."""
    parts, config, other = nn.Module(), _Config(), _Config()
    parts.known, parts.unknown, parts.other = module_of(config), module_of(config), module_of(other)
    change(parts.unknown, monkeypatch)
    before = config._experts_implementation
    with caplog.at_level(logging.INFO, "quire.passes.capture.hf_experts"):
        for _ in range(3):
            with experts_active(parts):
                assert config._experts_implementation == before
                assert other._experts_implementation == ("grouped_mm" if why == "'has_scale'" else NAME)
    assert len(caplog.messages) == 1 and why in caplog.messages[0]


def test_an_interface_of_its_own_is_left_alone() -> None:
    module = module_of(experts_interface=moe.ExpertsInterface())
    with experts_active(module):
        assert module.config._experts_implementation == "grouped_mm"


def test_a_users_function_under_a_known_name_is_left_alone() -> None:
    """It computes something else than transformers' function of that name."""
    own = moe.ALL_EXPERTS_FUNCTIONS["grouped_mm"]
    moe.ALL_EXPERTS_FUNCTIONS["grouped_mm"] = lambda *args, **kwargs: own(*args, **kwargs) * 2
    try:
        module = module_of()
        with experts_active(module):
            assert module.config._experts_implementation == "grouped_mm"
    finally:
        del moe.ALL_EXPERTS_FUNCTIONS["grouped_mm"]


@torch.no_grad()
@pytest.mark.parametrize("what", ["a hook", "a forward", "a gate"])
def test_parts_that_the_user_changed_are_called(what: str) -> None:
    module, inputs = module_of(), routed()
    if what == "a hook":
        module.act_fn.register_forward_hook(lambda part, given, out: out * 2)
    elif what == "a forward":
        module.act_fn.forward = lambda x: torch.nn.functional.silu(x) * 2
    else:
        module._apply_gate = lambda x: type(module)._apply_gate(module, x) * 2
    wanted = module(*inputs)
    with experts_active(module):
        for run in (module, torch.compile(lambda *a: module(*a), backend="eager", fullgraph=True)):
            torch.testing.assert_close(run(*inputs), wanted)


def test_options_of_this_transformers_are_known() -> None:
    assert hf_experts._options() <= hf_experts._KNOWN_OPTIONS, "read what the new ones mean"


@torch.no_grad()
def test_called_in_another_way(caplog: pytest.LogCaptureFixture) -> None:
    """More arguments than transformers' functions have go to what the module had; traced, too."""
    module = module_of()
    seen: list[float] = []

    def scaled(self: Any, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        seen.append(scale)
        return x * scale

    inputs = routed()
    try:
        with caplog.at_level(logging.INFO, "quire.passes.capture.hf_experts"), experts_active(module):
            moe.ALL_EXPERTS_FUNCTIONS["grouped_mm"] = scaled  # in this interface object only, not for the class's others
            for run in (module, torch.compile(lambda *a, **k: module(*a, **k), backend="eager", fullgraph=True)):
                assert torch.equal(run(*inputs, scale=3.0), inputs[0] * 3.0)
                assert torch.equal(run(*inputs, 2.0), inputs[0] * 2.0)
                assert not torch.equal(run(*inputs), inputs[0])
    finally:
        del moe.ALL_EXPERTS_FUNCTIONS["grouped_mm"]
    assert seen[:2] == [3.0, 2.0] and {m.partition(" (")[0] for m in caplog.messages} == {
        "experts: Experts is called in a way that quire does not know"}
    eager = module_of(_Config())
    eager.config._experts_implementation_internal = "eager"
    with experts_active(eager), pytest.raises(NotImplementedError, match="eager"):
        eager(*inputs, scale=3.0)


# ---- in a traced model


def targets(model: nn.Module) -> list[str]:
    paged = PagedModel(model, EAGER)
    try:
        return [str(n.target) for n in paged.graph.gm.graph.nodes if n.op == "call_function"]
    finally:
        paged.close()


def test_traced_and_on_a_cpu_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """One op a layer, nothing sorted, and the check for tokens that meet finds none (a refusal would raise)."""
    entry = dataclasses.replace(SERVED["qwen3_moe"], options=SERVED["qwen3_moe"].options | {"num_hidden_layers": 1})
    found = targets(build(entry))
    assert found.count(str(expert_swiglu)) == 1
    assert not any(word in name for name in found for word in ("sort", "histc", "cumsum", "grouped_mm"))
    # transformers' loop over the experts in use could not be traced.
    model = build(entry)
    model.set_experts_implementation("eager")
    assert targets(model).count(str(expert_swiglu)) == 1
    assert model.config._experts_implementation == "eager"
    monkeypatch.undo()
    found = targets(build(entry))
    assert str(expert_swiglu) not in found and any("grouped_mm" in name for name in found)


def test_models_without_experts() -> None:
    for model in (build(SERVED["llama"]), nn.Linear(1, 1), nn.Module()):
        assert not experts_of(model)
        with experts_active(model):
            assert getattr(getattr(model, "config", None), "_experts_implementation", None) != NAME
