"""What PEFT's layers apply, by their active, disabled and merged adapters. Read wrongly, a request gets an adapter twice, or
the one of another."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("peft", reason="pip install 'quire[integrations]'")

from peft import LoraConfig, get_peft_model

from quire.attn_ops.backend import UnsupportedAttention
from quire.passes.capture.lora import active_adapters, adapter_layers, check_adapters, merged_adapters
from quire.passes.capture.paged_model import PagedModel
from quire.passes.options import QuireOptions
from tests.tiny import small_llama


def adapted(second: str | list[str] = "all-linear") -> Any:
    peft = get_peft_model(small_llama(), LoraConfig(r=2, target_modules="all-linear"), adapter_name="one")
    peft.add_adapter("two", LoraConfig(r=2, target_modules=second))
    return peft


def one_layer(peft: Any) -> Any:
    return next(iter(adapter_layers(peft.base_model.model).values()))


def merge_differently(peft: Any) -> None:
    peft.merge_adapter(["two"])
    one_layer(peft).unmerge()
    one_layer(peft).merge(adapter_names=["one"])


#: What a user does, and what then is active and merged; None: different in different layers.
STATES: dict[str, tuple[Callable[[Any], object], tuple[str, ...] | None, tuple[str, ...]]] = {
    "as it was": (lambda peft: None, ("one",), ()),
    "switched": (lambda peft: peft.set_adapter("two"), ("two",), ()),
    "disabled": (lambda peft: peft.base_model.disable_adapter_layers(), (), ()),
    "merged": (lambda peft: peft.merge_adapter(), ("one",), ("one",)),
    "another one merged": (lambda peft: peft.merge_adapter(["two"]), ("two",), ("two",)),
    "both merged": (lambda peft: peft.merge_adapter(["two", "one"]), ("one", "two"), ("one", "two")),
    "merged and disabled": (lambda peft: (peft.merge_adapter(), peft.base_model.disable_adapter_layers()), (), ()),
    "one layer merged": (lambda peft: one_layer(peft).merge(adapter_names=["two"]), None, ("two",)),
    "different ones merged": (merge_differently, None, ("one", "two")),
    "one layer switched": (lambda peft: one_layer(peft).set_adapter("two"), None, ()),
}


@pytest.mark.parametrize("which", STATES)
def test_what_the_model_applies(which: str) -> None:
    change, active, merged = STATES[which]
    peft = adapted()
    change(peft)
    model = peft.base_model.model
    assert (active_adapters(model), merged_adapters(model)) == (active, merged)


def test_an_adapter_of_some_layers_is_merged() -> None:
    """The others apply the active one."""
    peft = adapted(["q_proj"])
    peft.merge_adapter(["two"])
    assert active_adapters(peft.base_model.model) is None


def test_why_a_model_with_adapters_by_request_cannot_be_traced() -> None:
    """The message names the fault in the model, not what quire puts in the place of PEFT's layers."""
    peft = adapted()
    act = peft.base_model.model.model.layers[0].mlp.act_fn
    act.register_forward_pre_hook(lambda module, args: torch._dynamo.graph_break("by the hook"))
    with pytest.raises(UnsupportedAttention, match="could not be traced into one graph.*\n?.*by the hook"):
        PagedModel(peft, adapters=["one", "two"])


@pytest.mark.parametrize("what", ["the layer", "A", "dropout"])
def test_forwards_of_the_users_own(what: str) -> None:
    """They would be lost, as the layer's products are computed here; and what was put there stays."""
    peft = adapted()
    layer = one_layer(peft)
    part = {"the layer": layer, "A": layer.lora_A["one"], "dropout": layer.lora_dropout["one"]}[what]
    own = part.forward = functools.partial(part.forward)
    with pytest.raises(ValueError, match="a forward of its own"):
        check_adapters(peft.base_model.model)
    with pytest.raises(ValueError, match="a forward of its own"):
        PagedModel(peft.base_model.model, QuireOptions(compiler="eager"), adapters=["one", "two"])
    assert vars(part)["forward"] is own
