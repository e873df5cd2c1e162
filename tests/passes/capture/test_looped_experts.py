"""Experts in a Python loop: LongCat-Flash runs with its own numbers, and comes back as it was; other loops stay refused."""

from __future__ import annotations

import functools

import pytest
import torch
from transformers.models.longcat_flash import modeling_longcat_flash

from quire.passes.capture import looped_experts
from quire.passes.capture.hf_experts import experts_active
from tests.zoo.configs import SERVED, build

Experts = modeling_longcat_flash.LongcatFlashExperts


def experts_of(model: torch.nn.Module) -> Experts:
    return next(m for m in model.modules() if isinstance(m, Experts))


@pytest.mark.parametrize("dtype, error", [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
def test_the_same_numbers(dtype: torch.dtype, error: float) -> None:
    """Tokens on experts, on zero experts, on both, and no token at all."""
    model = build(SERVED["longcat_flash"]).to(dtype).requires_grad_(False)
    experts, own = experts_of(model), Experts.forward
    ids = torch.tensor([[0, 3], [4, 5], [1, 4], [5, 0], [2, 2]])
    rows, weights = torch.randn(5, 64).to(dtype), torch.rand(5, 2)
    wanted, state = experts(rows, ids, weights), sorted(vars(experts))
    with experts_active(model), experts_active(model):
        assert Experts.forward is not own
        torch.testing.assert_close(experts(rows, ids, weights), wanted, atol=error * float(wanted.abs().max()), rtol=0)
        assert experts(rows[:0], ids[:0], weights[:0]).shape == (0, 64)
    assert Experts.forward is own and sorted(vars(experts)) == state


def test_another_computation_keeps_its_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """A version of transformers that weighs its experts otherwise, or an instance with a forward of its own, is left alone."""
    def doubled(self, hidden_states, top_k_index, top_k_weights):
        return 2 * looped_experts.experts_forward(self, hidden_states, top_k_index, top_k_weights)

    model = build(SERVED["longcat_flash"])
    with monkeypatch.context() as patch:
        patch.setattr(Experts, "forward", doubled)
        with experts_active(model):
            assert Experts.forward is doubled
    wrapped = functools.wraps(Experts.forward)(lambda self, *given: doubled(self, *given))
    with monkeypatch.context() as patch:
        patch.setattr(Experts, "forward", wrapped)
        with experts_active(model):
            assert Experts.forward is wrapped
    model, own = build(SERVED["longcat_flash"]), Experts.forward
    experts_of(model).forward = lambda *given: given[0]
    with experts_active(model):
        assert Experts.forward is own


@pytest.mark.parametrize("change", [
    lambda m: setattr(m, "act_fn", torch.nn.GELU()), lambda m: m.act_fn.register_forward_hook(lambda *args: None),
    lambda m: setattr(m.identity_expert, "forward", torch.zeros_like),
    lambda m: setattr(m, "identity_expert", torch.nn.Dropout()), lambda m: setattr(m.down_proj, "__class__", Scaled)],
    ids=["activation", "hook", "identity", "other module", "weights"])
def test_what_the_loop_calls_counts(change) -> None:
    """Also where a few tokens would give the same numbers."""
    model, own = build(SERVED["longcat_flash"]), Experts.forward
    change(experts_of(model))
    with experts_active(model):
        assert Experts.forward is own


class Scaled(torch.nn.Parameter):
    """Weights that a library has put there."""
