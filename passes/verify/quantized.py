"""Weights as quantization libraries make them (torchao, bitsandbytes): what the passes must know of them.

A parameter of torchao wraps other tensors (integers, scales). Dynamo puts it into the graph as one input of an ordinary
``linear``, so what quire reads off a graph it must find out here by other means: where the weights lie, and whether tokens
meet. A parameter of bitsandbytes in 4 bits is a plain tensor of codes, whatever its dtype, with its scales in an attribute;
both are inputs of the graph, and of operations that only bitsandbytes knows.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from quire.attn_ops.backend import UnsupportedAttention
from quire.passes.fx import LINEAR, module_path, schema_arguments, value

logger = logging.getLogger(__name__)
_ROWS = 32  # of the probe; some integer matrix products need more than 16
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_FOUR_BITS = ("bitsandbytes.gemm_4bit", "bitsandbytes.gemv_4bit")


def parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The plain tensors that hold ``tensor``'s data: itself, and its scales if it has any, or what a wrapper subclass wraps."""
    if type(tensor) in _PLAIN:
        return [tensor]
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor, *_scales(getattr(tensor, "quant_state", None))]
    names, _ = tensor.__tensor_flatten__()
    return [inner for name in names for inner in parts(getattr(tensor, name))]


def _scales(state: Any) -> list[torch.Tensor]:
    """The tensors of bitsandbytes' ``QuantState``, and of the one of its scales."""
    held = getattr(state, "__dict__", {})
    found = [x for x in held.values() if isinstance(x, torch.Tensor)]
    return found + _scales(held["state2"]) if "state2" in held else found


def kind_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What decides how a tensor is multiplied, beside its data: its class, shape and dtype, and of a quantized one how that was
    done. Of equal kinds, one can stand for another."""
    if is_traceable_wrapper_subclass(tensor):
        names, how = tensor.__tensor_flatten__()
        inside = [getattr(tensor, name) for name in names]  # of a DTensor a mesh, too
        return (type(tensor), tuple(tensor.shape), tensor.dtype, repr(how),
                *(kind_of(x) if isinstance(x, torch.Tensor) else repr(x) for x in inside))
    return (type(tensor), tuple(tensor.shape), tensor.dtype, *_state_of(getattr(tensor, "quant_state", None)))


def _state_of(state: Any) -> tuple[Any, ...]:
    """The settings of bitsandbytes' ``QuantState``, and of the one of its scales."""
    held = getattr(state, "__dict__", {})
    own = repr(sorted((k, v) for k, v in held.items() if k != "state2" and not isinstance(v, torch.Tensor))) if held else ""
    return (*([own] if held else []), *(_state_of(held["state2"]) if "state2" in held else ()))


def holds_codes(tensor: torch.Tensor) -> bool:
    """Whether the memory of a parameter is not the values of a checkpoint, in the dtype that it says."""
    return is_traceable_wrapper_subclass(tensor) or getattr(tensor, "quant_state", None) is not None


def addresses(tensor: torch.Tensor) -> tuple[int, ...]:
    """Where the data lie. (``data_ptr()`` of a wrapper subclass is 0, wherever they are.)"""
    return tuple(part.data_ptr() for part in parts(tensor))


def num_bytes(tensor: torch.Tensor) -> int:
    """Bytes that the data take; of a quantized weight: its integers and scales, not what its shape and dtype suggest."""
    return sum(part.numel() * part.element_size() for part in parts(tensor))


def check_rows(graph: fx.Graph, real: Mapping[fx.Node, Any]) -> None:
    """Refuse a quantized linear layer in which the tokens of a batch meet, such as one that scales all activations by the
    largest of them (per-tensor dynamic quantization). Each kind of weight is tried on random rows, twice, with one row changed
    in between: the others must not change. Raises UnsupportedAttention. ``real``: the tensors behind the placeholders."""
    tried: set[Any] = set()
    for node in graph.nodes:
        if str(node.target).startswith(_FOUR_BITS):
            kind, product = _four_bits(node, real)
        else:
            weight = real.get(node.args[1]) if node.target in LINEAR and len(node.args) > 1 else None
            if not isinstance(weight, torch.Tensor) or not is_traceable_wrapper_subclass(weight):
                continue
            kind = kind_of(weight)
            product = (type(weight).__name__, weight.shape[1], weight.dtype, weight.device,
                       lambda rows, weight=weight: torch.nn.functional.linear(rows, weight))
        if kind not in tried:
            tried.add(kind)
            _check_rows(module_path(node) or node.name, *product)
    if tried:
        logger.info("quantized weights: %d kinds, rows do not meet in any", len(tried))


def check_layers(model: torch.nn.Module) -> None:
    """Refuse bitsandbytes' 8-bit layers (LLM.int8) before they are traced: with a threshold they compute a column in 16 bits if
    any token of the batch has a large value there. Raises UnsupportedAttention, which names the layer."""
    for name, module in model.named_modules():
        if type(module).__name__ == "Linear8bitLt":
            why = ("which looks for large values in the activations of all tokens of the batch, so sequences of a packed batch "
                   "would change each other" if getattr(getattr(module, "state", None), "threshold", 0) > 0 else
                   "whose kernels quire has no proof of")
            raise UnsupportedAttention(
                f"{name} is an 8-bit layer of bitsandbytes (LLM.int8), {why}. Load the model in 4 bits "
                "(BitsAndBytesConfig(load_in_4bit=True)), or quantize it with torchao, a scale for each row")


def _four_bits(node: fx.Node, real: Mapping[fx.Node, Any]) -> tuple[Any, tuple[Any, ...]]:
    """What tells a product of bitsandbytes from others, and the arguments of ``_check_rows`` for it. The token pass has proved
    that only its rows ``A`` have tokens, so that all other arguments can be computed here."""
    target: Any = node.target
    arguments = schema_arguments(node)
    rows: Any = value(arguments.pop("A"))
    given = fx.node.map_arg(arguments, lambda x: _constant(x, real))
    spelled = [(tuple(x.shape), x.dtype) if isinstance(x, torch.Tensor) else repr(x) for x in tree_leaves(given)]
    product = (str(target), rows.shape[-1], rows.dtype, given["B"].device, lambda x: target(A=x[None], **given)[0])
    return (str(target), rows.dtype, repr(spelled)), product


def _constant(node: fx.Node, real: Mapping[fx.Node, Any]) -> Any:
    """The value of a node that is made of weights."""
    if node not in real:
        args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), lambda x: _constant(x, real))
        target: Any = node.target
        with torch.no_grad():
            return getattr(args[0], target)(*args[1:], **kwargs) if node.op == "call_method" else target(*args, **kwargs)
    return real[node]


def _check_rows(where: str, kind: str, width: int, dtype: torch.dtype, device: torch.device,
                product: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Try out a product of rows, ``width`` wide, with a quantized weight of this ``kind``."""
    generator = torch.Generator().manual_seed(0)
    rows = (torch.randn(_ROWS, width, generator=generator) * 1e-3).to(device, dtype)
    changed = rows.clone()
    changed[-1] *= 1e6  # scaled by it, the other rows would be nothing
    try:
        with torch.no_grad():
            alone = product(rows)[:-1].float()
            beside = product(changed)[:-1].float()
    except Exception as error:
        raise UnsupportedAttention(f"{where}: its quantized weight ({kind}) cannot be multiplied on {device}: "
                                   f"{type(error).__name__}: {error}") from error
    # The same kernel on the same numbers: equal, unless rows meet. Some libraries' kernels add up in any order.
    if not (alone - beside).abs().max() <= 0.01 * alone.abs().max():  # NaN is not equal
        raise UnsupportedAttention(
            f"{where} mixes the tokens of the batch outside attention: its weight ({kind}) quantizes the activations "
            "of all tokens by one scale, so sequences of a packed batch would change each other. Quantize with a scale for "
            "each token (torchao: granularity=PerRow()) or the weights only.")
