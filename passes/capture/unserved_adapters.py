"""PEFT's ways to adapt a model that quire cannot serve, told before a trace, whose own errors speak of other things."""

from __future__ import annotations

from typing import Any

import torch

from quire.attn_ops.backend import UnsupportedAttention
from quire.passes.capture.hf_experts import is_wrapper


def check_adapters_served(model: torch.nn.Module) -> None:
    """Raises UnsupportedAttention for prompt learning, X-LoRA, an active aLoRA, and a head that is adapted as a parameter.
    ``model``: PEFT's wrapper, where there is one: what only its forward does is not seen in the model inside."""
    config, base = getattr(model, "active_peft_config", None), getattr(model, "base_model", None)
    # Disabled, the wrapper's forward is that of the model inside.
    if getattr(config, "is_prompt_learning", False) and model.forward != getattr(base, "forward", None):
        kind = getattr(config, "peft_type", None)
        raise UnsupportedAttention(
            f"{type(model).__name__} has {getattr(kind, 'value', kind)}: prompt tuning, p-tuning and prefix tuning give the "
            "model embeddings or keys, and an engine takes token ids. Use the wrapper's own generate, or give the engine the "
            "model without it (get_base_model())")
    for path, layer in model.named_modules():
        if type(getattr(vars(layer).get("forward"), "__self__", None)).__module__.startswith("peft.tuners.xlora."):
            raise UnsupportedAttention(
                f"{path} is X-LoRA's, whose wrapper runs the model twice and scales the adapters of each token by the first "
                "run's hidden states: use the wrapper's own generate with a model that is not paged")
        if any(_variant(layer, name).startswith("ALora") for name in _applied(layer)):
            raise UnsupportedAttention(
                f"{path} has an active aLoRA (alora_invocation_tokens), which begins in the middle of a row, and an adapter "
                "here is of whole requests: disable or delete it, or use the model's own generate")
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if is_wrapper(head) and _applied(head):
        raise UnsupportedAttention(
            "the head is adapted as a parameter (PEFT's target_parameters), and its rows are not the tokens of a batch: name "
            'the layer (target_modules=["lm_head"]), or merge the adapter with merge_adapter()')


def _applied(layer: Any) -> list[str]:
    """The adapters of a LoRA layer that its forward adds to what the layer gives without them; none of other layers."""
    if not type(layer).__module__.startswith("peft.tuners.lora.") or not hasattr(layer, "lora_A"):
        return []
    return [] if layer.disable_adapters or layer.merged_adapters else [n for n in layer.active_adapters if n in layer.lora_A]


def _variant(layer: Any, name: str) -> str:
    """The kind of LoRA that an adapter is in a layer, by the name of PEFT's class; "" for plain LoRA."""
    found = getattr(layer, "lora_variant", {}).get(name)
    return "" if found is None else getattr(found, "__name__", type(found).__name__)
