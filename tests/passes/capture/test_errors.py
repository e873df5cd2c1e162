"""What the user reads of a forward that cannot be traced: the cause in their own code, and not the tracer's words for it."""

from __future__ import annotations

import logging
import random

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.bias import causal_lower_right

from quire import UnsupportedAttention
from quire.passes.capture.paged_model import PagedModel
from quire.passes.options import QuireOptions
from tests.passes.models import Attention, Tiny

pytestmark = pytest.mark.usefixtures("tokens_unchecked")


class Changed(Tiny):
    """``change(hidden, position_ids)`` between the embedding and the layer."""

    def __init__(self, change) -> None:
        super().__init__(Attention(4, 2, is_causal=True))
        self.change = change
        self.eval()

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor):
        x = self.change(self.embed(input_ids) + self.place(position_ids), position_ids)
        return self.head(x + self.layers[0](x, position_ids, {}))


class Keeps(Tiny):
    """As code before transformers 4.50 has it."""

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor, logits_to_keep: int = 0):  # type: ignore[override]
        x = super().forward(input_ids, position_ids)
        return x[:, -logits_to_keep:] if logits_to_keep else x


class Experts(Changed):
    def __init__(self, change) -> None:
        super().__init__(change)
        self.experts = nn.ModuleList()


class FailsByItself(Keeps):
    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor, logits_to_keep: int | torch.Tensor = 0):
        indices = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        return (Tiny.forward(self, input_ids, position_ids),).last_hidden_state[:, indices]  # type: ignore[attr-defined]


def refusal(model: nn.Module) -> str:
    with pytest.raises(UnsupportedAttention) as refused:
        PagedModel(model, QuireOptions(compiler="eager"))
    return str(refused.value)


def test_a_number_of_logits_to_keep() -> None:
    said = refusal(Keeps(Attention(4, 2, is_causal=True)).eval())
    assert said.startswith("Keeps's forward takes logits_to_keep for a number, and quire gives a tensor")
    assert "expert" not in said
    assert f'test_errors.py", line {Keeps.forward.__code__.co_firstlineno + 2})' in said
    said = refusal(FailsByItself(Attention(4, 2, is_causal=True)).eval())  # whatever it does with the parameter
    assert "own forward fails on token ids and positions: AttributeError" in said


@pytest.mark.parametrize("change", [
    lambda x, positions: x * (1 + random.random()), lambda x, positions: x * random.uniform(0, 1),
    lambda x, positions: x * random.Random(3).random(), lambda x, positions: x * (1 + numpy.random.rand()),
    lambda x, positions: x if random.uniform(0, 1) > 0.5 else 2 * x], ids=["random", "uniform", "generator", "numpy", "branch"])
def test_random_numbers_of_python(change) -> None:
    assert refusal(Changed(change)).startswith("the model's forward draws random numbers in Python (random, numpy.random)")


def branch(x, positions):
    return x * 2 if positions.max() > 20 else x


def test_experts_are_named_where_there_are_some() -> None:
    said = refusal(Changed(branch))
    assert "as a branch on data does" in said and said.endswith("Compute all paths by tensor operations.")
    assert "expert" not in said
    said = refusal(Experts(branch))
    assert "as a Python loop over the experts in use or a branch on data does" in said and "experts interface" in said


def test_masks_of_torch() -> None:
    def attend(x, positions):
        return F.scaled_dot_product_attention(x, x, x, attn_mask=causal_lower_right(x.shape[1], x.shape[1]))

    said = refusal(Changed(attend))
    assert "a mask by torch.nn.attention.bias (causal_lower_right" in said and "Pass is_causal=True to F.scaled_dot" in said
    assert 'test_errors.py", line' in said


def _cannot_be_json() -> str:
    raise TypeError("Object of type _lru_cache_wrapper is not JSON serializable")


@pytest.mark.parametrize("fails, logged", [(_cannot_be_json, 0), (lambda: 1 // 0, 1)], ids=["settings", "others"])
def test_metrics_that_pytorch_cannot_write(fails, logged, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch 2.11 logs an error with a traceback, at each start, where its settings have functions; others are shown."""
    monkeypatch.setattr(torch._dynamo.utils, "_get_dynamo_config_for_logging", fails)
    log, seen = logging.getLogger("torch._dynamo.metrics_context"), list[logging.LogRecord]()
    handler = logging.Handler()
    handler.emit = seen.append  # type: ignore[method-assign]
    log.addHandler(handler)
    try:
        PagedModel(Changed(lambda x, positions: x), QuireOptions(attention="torch_native", compiler="eager"))
    finally:
        log.removeHandler(handler)
    assert len(seen) == logged


def test_what_the_user_lets_dynamo_leave_out() -> None:
    """A forward that logs is served where the user's own setting says that Dynamo may leave that out."""
    log = logging.getLogger("tests.of.quire")

    def logs(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        log.warning("a layer runs")
        return x

    with torch._dynamo.config.patch(ignore_logger_methods={logging.Logger.warning}):
        PagedModel(Changed(logs), QuireOptions(attention="torch_native", compiler="eager"))
    with pytest.raises(UnsupportedAttention, match="it writes to a log"):
        PagedModel(Changed(logs), QuireOptions(attention="torch_native", compiler="eager"))
