"""Mixtures of experts in transformers, computed by ``quire::expert_linear`` on a GPU.

Experts modules (classes under transformers' ``use_experts_implementation``) call
``ALL_EXPERTS_FUNCTIONS[config._experts_implementation]``. While a model is traced or runs a paged step, that is our function,
registered as ``"quire"``. It computes what transformers' ``batched_mm_experts_forward`` does.

    before  sort, count, gather rows -> grouped_mm -> gate -> grouped_mm -> weigh, gather back, sum     (or a loop on the host)
    after   expert_linear -> gate -> expert_linear -> weigh and sum

A model keeps its own implementation on a CPU, where torch's grouped GEMM is faster, unless PEFT adapts its experts
(expert_lora.py); if the user chose a kernel (deepgemm, sonicmoe, ...); and with anything unknown here, such as weights that are
not plain tensors. "eager", transformers' loop over the experts in use, is replaced: it cannot be traced into one graph.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from quire.attn_ops.backend import UnsupportedAttention
from quire.attn_ops.ops.expert_lora import ExpertLora
from quire.attn_ops.ops.experts import KERNEL_DTYPES, expert_linear, expert_swiglu
from quire.passes.capture.looped_experts import is_plain, looped_experts_active
from quire.passes.capture.reads import is_code_of

logger = logging.getLogger(__name__)
NAME = "quire"
#: Implementations that compute the same and choose no kernel. None: an experts module without a model.
_REPLACED = (None, "eager", "batched_mm", "grouped_mm")
#: Parameters of transformers' decorator; an unknown one may change the computation.
_KNOWN_OPTIONS = frozenset({"experts_class", "experts_interface", "is_concatenated", "is_transposed", "has_bias", "has_gate",
                            "has_post_expert_norm"})
_BEFORE: dict[int, str | None] = {}  # the implementation of a config that is switched over, by its id


def experts_function(module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor,
                     *args: Any, quire_adapters: Mapping[str, ExpertLora] | None = None, **kwargs: Any) -> torch.Tensor:
    """What transformers calls: (T, H) rows, (T, k) expert ids and (T, k) weights -> (T, H). Ids past the last expert (of other
    devices, with expert parallelism) add nothing. A call with other arguments goes to the implementation that the model had.
    ``quire_adapters``: of the parameters, by name."""
    lora = quire_adapters or {}
    unknown = [name for name, given in kwargs.items() if given is not None]
    if args or unknown or hidden_states.dim() != 2 or top_k_index.dim() != 2:
        if lora:
            raise UnsupportedAttention(f"{type(module).__name__}, whose parameters an adapter adapts, is called in a way that "
                                       "quire does not know: merge the adapter with merge_adapter()")
        before = _BEFORE.get(id(module.config))
        _say(f"experts: {type(module).__name__} is called in a way that quire does not know ({len(args)} more arguments, "
             f"{unknown}, {hidden_states.dim()}-dimensional rows); it keeps its own implementation, {before}")
        own = _find_class(type(module)).forward.__wrapped__
        return _interface().get_interface(before, own)(module, hidden_states, top_k_index, top_k_weights, *args, **kwargs)

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        weight = getattr(module, name)
        bias = getattr(module, name + "_bias") if module.has_bias else None
        return expert_linear(x.to(weight.dtype), weight, bias, top_k_index, module.is_transposed, *lora.get(name, ()))

    # (T * k, ...), in the order of the pairs
    if _is_swiglu(module):
        rows = hidden_states.to(module.down_proj.dtype)
        first, second = (lora.get(name, ExpertLora()) for name in ("gate_up_proj", "down_proj"))
        adapters = (*first.joined(second), len(first.a)) if lora else ()
        out = expert_swiglu(rows, module.gate_up_proj, module.down_proj, top_k_index, module.is_transposed, *adapters)
    else:
        out = linear(hidden_states, "gate_up_proj" if module.has_gate else "up_proj")
        out = linear(module._apply_gate(out) if module.has_gate else module.act_fn(out), "down_proj")
    if getattr(module, "has_post_expert_norm", False):
        out = module.post_expert_norm(out)
    weighted = out.float().view(*top_k_index.shape, -1) * top_k_weights.float().reshape(top_k_index.shape).unsqueeze(-1)
    return weighted.sum(dim=1).to(hidden_states.dtype)


def _is_swiglu(module: Any) -> bool:
    """Whether the experts are SwiGLU without biases: transformers' own gate around SiLU, for weights ``[gate; up]``."""
    from transformers.activations import SiLUActivation
    from transformers.integrations.moe import _default_apply_gate

    return (module.has_gate and not module.has_bias and getattr(module, "is_concatenated", False) is True
            and type(module)._apply_gate is _default_apply_gate and "_apply_gate" not in vars(module)
            and is_plain(module.act_fn, torch.nn.SiLU, SiLUActivation))


@functools.cache
def _say_once(text: str) -> None:
    logger.info(text)


@torch.compiler.assume_constant_result
def _say(text: str) -> None:
    """Log once, also while Dynamo traces."""
    _say_once(text)


def _interface() -> Any:
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    return ALL_EXPERTS_FUNCTIONS


def _find_class(kind: Any) -> Any:
    """The class, ``kind`` or a base, whose forward calls transformers' interface; None if there is none."""
    for each in kind.__mro__:
        forward = each.__dict__.get("forward")
        if inspect.isfunction(forward) and "experts_interface" in forward.__code__.co_freevars:
            return each
    return None


_find_class_once: Any = functools.cache(_find_class)  # not traced: Dynamo ignores caches with a warning


def _unknown(module: torch.nn.Module) -> str | None:
    """Why ``experts_function`` must not compute this module; None if it may."""
    config: Any = getattr(module, "config", None)
    if new := _options() - _KNOWN_OPTIONS:
        return f"transformers' use_experts_implementation has {sorted(new)}, which quire does not know"
    if not hasattr(config, "_experts_implementation_internal"):
        return "its config names no implementation"
    if (name := config._experts_implementation_internal) not in _REPLACED:
        return f"its implementation was chosen: {name}"
    kind = _find_class_once(type(module))
    own = _interface()[name] if name in _interface() else kind.forward.__wrapped__
    if not is_code_of(own, "transformers"):
        return f"its implementation {name} is {own.__qualname__}, which is not transformers' own"
    if inspect.getclosurevars(kind.forward).nonlocals["experts_interface"] is not _interface():
        return "it has an interface of its own"
    missing = [n for n in ("has_gate", "has_bias", "is_transposed") if not isinstance(getattr(module, n, None), bool)]
    if missing:
        return f"it does not say {', '.join(missing)}"
    names = ["gate_up_proj" if module.has_gate else "up_proj", "down_proj"]
    tensors = [getattr(module, n, None) for n in names]
    biases = [getattr(module, n + "_bias", None) for n in names] if module.has_bias else []
    for tensor in (*tensors, *biases):
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.dtype not in KERNEL_DTYPES:  # type: ignore[union-attr]
            return "its weights are not plain tensors of a dtype that the kernels know"
    if any(w.dim() != 3 for w in tensors) or len({t.dtype for t in (*tensors, *biases)}) > 1:  # type: ignore[union-attr]
        return "its weights are not one tensor (experts, rows, columns) each, of one dtype"
    return None


def experts_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The experts modules of ``model`` that call transformers' interface."""
    return [m for m in model.modules() if _find_class_once(type(m)) is not None]


def is_wrapper(layer: Any) -> bool:
    """Whether it is PEFT's module around one whose parameter an adapter adapts; such modules are nested for several."""
    return (type(layer).__module__, type(layer).__name__) == ("peft.tuners.lora.layer", "ParamWrapper")


def is_of_experts(wrapper: Any) -> bool:
    """Whether the parameter is a weight of experts, and not a matrix, such as a router's."""
    return wrapper.get_param().dim() == 3


def can_adapt(module: torch.nn.Module) -> bool:
    """Whether ``experts_function`` computes this module, while a model is traced, and so may compute it with adapters."""
    switched = getattr(getattr(module, "config", None), "_experts_implementation_internal", None) == NAME
    return _find_class_once(type(module)) is not None and (switched or _unknown(module) is None)


def _configs(model: torch.nn.Module) -> list[Any]:
    """The configs to switch over: those all of whose modules may be. Logs which are left alone, and why."""
    found: dict[int, Any] = {}
    left: dict[int, tuple[torch.nn.Module, str]] = {}
    for module in experts_of(model):
        config: Any = getattr(module, "config", None)
        if getattr(config, "_experts_implementation_internal", None) == NAME:
            continue  # switched over already, further out
        if (why := _unknown(module)) is not None:
            left.setdefault(id(config), (module, why))
        found[id(config)] = config
    for module, why in left.values():
        _say_once(f"experts: {type(module).__name__} keeps its own implementation: {why}")
    return [config for key, config in found.items() if key not in left]


@functools.cache
def _options() -> frozenset[str]:
    from transformers.integrations import moe

    return frozenset(inspect.signature(moe.use_experts_implementation).parameters)


def wanted(model: torch.nn.Module) -> bool:
    """Whether the model is on a GPU, where the op has kernels, or has experts with adapters, which no other function takes."""
    first = next(model.parameters(), None)
    return first is not None and first.is_cuda or any(is_wrapper(m) and is_of_experts(m) for m in model.modules())


@contextlib.contextmanager
def experts_active(model: torch.nn.Module) -> Iterator[None]:
    """While inside, the experts of a model on a GPU, or with adapters, run by the op, and those in a loop
    (``looped_experts.py``) anywhere."""
    configs = _configs(model) if wanted(model) else []
    if configs and NAME not in _interface():
        _interface().register(NAME, experts_function)
    before = [c._experts_implementation_internal for c in configs]
    for config, name in zip(configs, before, strict=True):
        _BEFORE[id(config)] = name
        config._experts_implementation_internal = NAME
    try:
        with looped_experts_active(model):
            yield
    finally:
        for config, name in zip(configs, before, strict=True):
            config._experts_implementation_internal = name
            _BEFORE.pop(id(config), None)
