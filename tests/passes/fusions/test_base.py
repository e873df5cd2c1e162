"""The memory of fused parameters: which are fused, what they are while a model is open, and what they get back."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from quire.passes.capture.paged_model import PagedModel
from quire.passes.fusions.base import FusedWeights, owns_memory
from quire.passes.options import QuireOptions
from tests.steps import in_one_step
from tests.tiny import assert_unchanged, load_model, snapshot

pytestmark = pytest.mark.usefixtures("tokens_unchecked", "traces_kept")

IDS = torch.arange(3, 12)


def model_of() -> Any:
    return load_model(num_layers=1)


def opened(model: nn.Module) -> PagedModel:
    torch._dynamo.reset()
    return PagedModel(model, QuireOptions(compiler="eager", fusions="all", page_size=16))


def logits(paged: PagedModel) -> torch.Tensor:
    return in_one_step(paged, [IDS], 16)[0]


def same_as(paged: PagedModel, model: nn.Module) -> None:
    with torch.no_grad():
        want = model(input_ids=IDS[None], use_cache=False).logits[0]
    torch.testing.assert_close(logits(paged), want, atol=1e-4, rtol=1e-4)


def projections(model: Any) -> dict[str, nn.Parameter]:
    """The parameters that are fused in a model whose parameters share nothing."""
    return {n: p for n, p in model.named_parameters() if any(part in n for part in ("q_", "k_", "v_", "gate_", "up_"))}


def v_proj(model: Any) -> torch.Tensor:
    return model.model.layers[0].self_attn.v_proj.weight


def in_flat_buffer(model: Any) -> tuple[Any, torch.Tensor]:
    """All parameters are slices of one buffer, as optimizers and data-parallel training lay them out."""
    parameters = list(model.parameters())
    flat = torch.cat([p.detach().flatten() for p in parameters])
    slices = flat.split([p.numel() for p in parameters])
    for p, part in zip(parameters, slices, strict=True):
        p.data = part.view_as(p)
    return flat, next(part for p, part in zip(parameters, slices, strict=True) if p is v_proj(model))


def in_shared_memory(model: Any) -> tuple[Any, torch.Tensor]:
    return None, v_proj(model.share_memory()).data


def tied_by_data(model: Any) -> tuple[Any, torch.Tensor]:
    """Another module, such as a moving average or a draft model, has the same memory."""
    other = copy.deepcopy(model)
    for mine, its in zip(model.parameters(), other.parameters(), strict=True):
        its.data = mine.data
    return other, v_proj(other)


def tied_within(model: Any) -> tuple[Any, torch.Tensor]:
    """Two parameters of the model, siblings, are one matrix."""
    attention, mlp = model.model.layers[0].self_attn, model.model.layers[0].mlp
    attention.v_proj.weight.data = attention.k_proj.weight.data
    mlp.up_proj.weight.data = mlp.gate_proj.weight.data
    return None, attention.k_proj.weight


def in_a_state_dict(model: Any) -> tuple[Any, torch.Tensor]:
    state = model.state_dict()
    return state, state["model.layers.0.self_attn.v_proj.weight"]


def sliced(model: Any) -> tuple[Any, torch.Tensor]:
    """Each is a slice of a buffer of which nothing else is left."""
    for p in model.parameters():
        p.data = torch.stack([p.detach(), p.detach()])[1]
    return None, v_proj(model)


WAYS = (in_flat_buffer, in_shared_memory, tied_by_data, tied_within, in_a_state_dict, sliced)


@pytest.mark.parametrize("way", [
    pytest.param(way, marks=[pytest.mark.slow] * (way in (in_flat_buffer, in_a_state_dict))) for way in WAYS],
    ids=lambda f: f.__name__)
def test_parameters_that_share_memory_stay_where_they_are(way: Callable[[Any], Any], caplog: pytest.LogCaptureFixture) -> None:
    """They are not fused, and updates through whatever else has the memory reach the open model."""
    model = model_of()
    _held, alias = way(model)
    where = [(p.data_ptr(), p.untyped_storage().data_ptr(), p.is_shared()) for p in model.parameters()]
    with caplog.at_level(logging.WARNING, "quire"):
        paged = opened(model)
    assert caplog.text.count("share memory") == 1
    same_as(paged, model)
    before = logits(paged)
    with torch.no_grad():
        alias.mul_(3.0)
    assert not torch.allclose(logits(paged), before, atol=1e-3)
    same_as(paged, model)
    paged.close()
    assert where == [(p.data_ptr(), p.untyped_storage().data_ptr(), p.is_shared()) for p in model.parameters()]
    assert torch.equal(v_proj(model).flatten(), alias.flatten())


def test_only_siblings_that_share_memory_are_left_out() -> None:
    model = model_of()
    kept = model.model.layers[0].mlp.gate_proj.weight.detach()  # a second look at one of gate and up
    paged = opened(model)
    moved = {n.split(".")[-2] for n, p in projections(model).items() if p.untyped_storage().nbytes() != p.nbytes}
    assert moved == {"q_proj", "k_proj", "v_proj"}
    kept.zero_()
    same_as(paged, model)
    paged.close()
    assert not model.model.layers[0].mlp.gate_proj.weight.any()


def test_what_a_closed_model_gets_back() -> None:
    """Each parameter is the same object, alone in a storage like its old one."""
    model = model_of()
    before = snapshot(model)
    paged = opened(model)
    assert not any(map(owns_memory, projections(model).values()))
    same_as(paged, model)
    paged.close()
    assert_unchanged(model, before)
    assert all(map(owns_memory, model.parameters()))


def test_parameters_made_in_inference_mode() -> None:
    """They stay such, fused and given back, beside others: only as such may they be written, as an update of weights does."""
    with torch.inference_mode():
        a, moved = (nn.Parameter(torch.randn(3, 4), requires_grad=False) for _ in range(2))
    b = nn.Parameter(torch.randn(3, 4))
    moved.data = moved.data.clone()
    weights = FusedWeights()
    assert weights.can_fuse([a, b, moved]) and torch.equal(fused := weights.fuse([a, b, moved]), torch.cat([a, b, moved]))
    assert [p.is_inference() for p in (a, b, moved, fused)] == [True, False, False, False]
    with torch.inference_mode():
        a.mul_(2)
        moved.mul_(3)
    with torch.no_grad():
        b.mul_(4)
    assert b._version == 1 and torch.equal(fused, torch.cat([a, b, moved]))
    values = fused.clone()
    weights.restore()
    assert [p.is_inference() for p in (a, b, moved)] == [True, False, False]
    assert all(map(owns_memory, (a, b, moved))) and torch.equal(torch.cat([a, b, moved]), values)


class Wrapped(nn.Module):
    """As adapters wrap a layer: under another name, with something added."""

    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__()
        self.base_layer = base_layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + 0


def test_modules_that_are_wrapped_while_open() -> None:
    """Parameters get new names then, and are found by what they are."""
    model = model_of()
    parameters = {id(p): p.detach().clone() for p in model.parameters()}
    paged = opened(model)
    attention = model.model.layers[0].self_attn
    attention.q_proj, attention.v_proj = Wrapped(attention.q_proj), Wrapped(attention.v_proj)
    with torch.no_grad():
        attention.q_proj.base_layer.weight.mul_(2)
    parameters[id(attention.q_proj.base_layer.weight)] *= 2
    paged.close()
    assert {id(p) for p in model.parameters()} == parameters.keys()
    assert all(torch.equal(p, parameters[id(p)]) for p in model.parameters())
    assert all(map(owns_memory, model.parameters()))


def test_a_second_model_of_the_same_parameters_leaves_them_to_the_first() -> None:
    model = model_of()
    first = opened(model)
    where = [p.data_ptr() for p in model.parameters()]
    second = opened(model)
    assert [p.data_ptr() for p in model.parameters()] == where
    same_as(second, model)
    first.close()
    same_as(second, model)
    second.close()
    assert all(map(owns_memory, model.parameters()))


def test_memory_that_other_processes_came_to_share_while_open_stays() -> None:
    model = model_of()
    paged = opened(model)
    model.share_memory()
    paged.close()
    assert all(p.is_shared() for p in model.parameters())


def test_a_parameter_that_was_replaced_is_not_fused_again_from_old_numbers() -> None:
    """For another graph of the same model, as torch.compile makes one."""
    a, b = (nn.Parameter(torch.randn(3, 4)) for _ in range(2))
    weights = FusedWeights()
    assert weights.can_fuse([a, b]) and torch.equal(weights.fuse([a, b]), torch.cat([a, b]))
    assert weights.can_fuse([a, b]) and weights.fuse([a, b]) is weights.fuse([a, b])
    a.data = torch.zeros(3, 4)
    assert not weights.can_fuse([a, b])  # b is a view of what the first graph reads
    weights.restore()
    assert weights.can_fuse([a, b]) and torch.equal(weights.fuse([a, b]), torch.cat([a, b]))
