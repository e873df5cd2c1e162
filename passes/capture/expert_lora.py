"""PEFT's LoRA of the experts in a mixture (``target_parameters``, which ``target_modules="all-linear"`` includes), traced.

PEFT registers the change of each parameter anew in each forward, and adds ``B A * scaling`` to the weights of all experts.
Dynamo cannot trace that, and a decode step would take many times as long. While a model is traced, PEFT's wrappers hand their
adapters to the experts, which ``hf_experts.py`` computes with ops that take them (``attn_ops/ops/expert_lora.py``).

    before  experts(x, ids, weights) with gate_up_proj + B A * scaling in the place of gate_up_proj
    after   experts(x, ids, weights, quire_adapters={"gate_up_proj": [A ...], [B ...], [scaling ...], bits})

A matrix that is adapted in this way, such as a router's: ``passes/rewrite/adapted_matrices.py``.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.func import functional_call

from quire.attn_ops.ops.expert_lora import ExpertLora
from quire.attn_ops.ops.experts import KERNEL_DTYPES
from quire.passes.capture.hf_experts import can_adapt, is_of_experts
from quire.passes.rewrite.adapted_matrices import adapted_matrix


def unfit(wrapper: Any) -> str | None:
    """Why the adapters of a parameter cannot be applied while a model is traced; None if they can."""
    if has_own_forward(wrapper):
        return "has a forward of its own"
    owner, name, shape = wrapper.get_base_layer(), wrapper.parameter_name, tuple(wrapper.get_param().shape)
    if is_of_experts(wrapper):
        if not can_adapt(owner):
            return f"adapts a parameter of {type(owner).__name__}, which are no experts that quire computes"
        if name not in ("gate_up_proj" if owner.has_gate else "up_proj", "down_proj"):
            return f"adapts {name}, which is none of the experts' weights"
        count, n, k = (shape[0], shape[2], shape[1]) if owner.is_transposed else shape
        swapped = getattr(wrapper, "_did_swap_in_out_features", None)  # a PEFT without it may mean another layout
        if swapped is None or swapped == owner.is_transposed or wrapper.num_experts != count:
            return f"adapts {name} as if its weights {shape} lay otherwise"
    else:
        if wrapper.base_layer is not owner or len(shape) != 2 or type(wrapper.get_param()) is not torch.nn.Parameter:
            return f"adapts {name} of {type(owner).__name__}, which is no matrix, or beside another parameter"
        if wrapper.get_param().dtype not in KERNEL_DTYPES:
            return f"adapts {name} in {wrapper.get_param().dtype}"
        count, (n, k) = 1, shape
    if wrapper.lora_variant:
        return "has more than LoRA"
    for adapter in wrapper.lora_A:
        if (why := more_than_matrices(wrapper, adapter)) is not None:
            return f"has an adapter {adapter!r} {why}"
        a, b = wrapper.lora_A[adapter].weight, wrapper.lora_B[adapter].weight
        if a.dim() != 2 or len(a) % count or a.shape[1] != k or b.shape != (n, len(a)):
            return f"has an adapter {adapter!r} with weights {tuple(a.shape)} and {tuple(b.shape)} of {shape}"
        if not isinstance(wrapper.scaling[adapter], (int, float)):
            return f"has an adapter {adapter!r} whose scaling is a tensor"
    return None


def has_own_forward(layer: Any) -> bool:
    """Whether somebody put a forward into this module of PEFT's; quire does while it traces."""
    forward = vars(layer).get("forward")
    while isinstance(forward, functools.partial):
        forward = forward.func
    return forward is not None and not str(getattr(forward, "__module__", "")).startswith("quire.")


def more_than_matrices(layer: Any, name: str) -> str | None:
    """What an adapter does beside products with the weights of A and B."""
    a, b = layer.lora_A[name], layer.lora_B[name]
    if type(a) is not torch.nn.Linear or type(b) is not torch.nn.Linear or a.bias is not None or b.bias is not None:
        return "that is more than two matrices"
    dropout = layer.lora_dropout[name] if name in getattr(layer, "lora_dropout", ()) else torch.nn.Identity()
    if type(dropout) not in (torch.nn.Identity, torch.nn.Dropout):
        return "with a dropout of its own"
    if any(module._forward_hooks or module._forward_pre_hooks for module in (a, b, dropout)):
        return "with hooks"
    if any("forward" in vars(module) for module in (a, b, dropout)):
        return "with a forward of its own"
    return None


def adapted_forward(wrapper: Any, names: Sequence[str] | None, x: torch.Tensor, *args: Any,
                    quire_adapters: Mapping[str, ExpertLora] | None = None, **kwargs: Any) -> Any:
    """The forward of a wrapper while it is traced. ``names``: as of ``adapters_per_token``. ``quire_adapters``: of the wrappers
    around this one."""
    if not torch.compiler.is_compiling():  # the model's own forward, which says why it cannot be traced
        return type(wrapper).forward(wrapper, x, *args, **kwargs)
    if names is None:
        on = [] if wrapper.disable_adapters or wrapper.merged_adapters else wrapper.active_adapters
        found = [(name, 0) for name in on if name in wrapper.lora_A]
    else:
        found = [(name, 1 << i) for i, name in enumerate(names) if name in wrapper.lora_A]
    adapters = [(wrapper.lora_A[name].weight, wrapper.lora_B[name].weight, float(wrapper.scaling[name]), bit)
                for name, bit in found]
    lists = [[*each] for each in zip(*adapters, strict=True)]
    module, name, given = wrapper.base_layer, wrapper.parameter_name, dict(quire_adapters or {})
    if adapters and is_of_experts(wrapper):
        given[name] = ExpertLora(*lists)
    if given:
        kwargs = {**kwargs, "quire_adapters": given}
    if adapters and not is_of_experts(wrapper):
        return functional_call(module, {name: adapted_matrix(getattr(module, name), *lists)}, (x, *args), kwargs)
    return module(x, *args, **kwargs)
