"""PEFT's LoRA layers, traced so that each token has adapters of its own (``attn_ops/ops/lora_rows.py``).

    before  base_layer(x) + B(A(x)) * scaling of each active adapter
    after   quire.lora_rows(base_layer(x), x, [A ...], [B ...], [scaling ...], bits) with every adapter of the layer

And DoRA (Liu et al., 2024), which gives each row of ``W + B A * scaling`` a trained length, its magnitude: PEFT's code for it
looks for quantized weights in a way that Dynamo cannot trace, so plain weights get the same formula here. Where requests have
adapters of their own, each DoRA adapter is computed for all tokens, and kept for those that have it.

What is merged is in the weight of ``base_layer``: tokens of such a model have no bits set (``graph_runner/adapters.py``).
Adapters of experts: expert_lora.py.

The forwards are replaced only while the model is traced. What a layer may do otherwise is refused: ``check_adapters``.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from quire.attn_ops.ops.lora_rows import MAX_ADAPTERS, lora_rows
from quire.passes.capture.expert_lora import adapted_forward, has_own_forward, more_than_matrices, unfit
from quire.passes.capture.hf_experts import is_wrapper

# PEFT's modules whose layers, when disabled, unmerge in their forward.
_UNMERGE_DISABLED = frozenset(("peft.tuners.lora.layer", "peft.tuners.lora.bnb"))


def adapter_layers(model: torch.nn.Module) -> dict[str, Any]:
    """The modules that PEFT has put into the model to adapt it, by path; of those inside each other the outer ones, unless each
    adapts a parameter of its own."""
    found: dict[str, Any] = {}
    for path, module in model.named_modules():
        kinds = {kind.__name__ for kind in type(module).__mro__ if kind.__module__.startswith("peft.")}
        if kinds & {"BaseTunerLayer", "AuxiliaryTrainingWrapper"} and not any(
                path.startswith(f"{p}.") and not (is_wrapper(outer) and is_wrapper(module)) for p, outer in found.items()):
            found[path] = module
    return found


def adapter_names(model: torch.nn.Module) -> list[str]:
    """The names of the LoRA adapters in the model, sorted."""
    return sorted({name for layer in adapter_layers(model).values() for name in getattr(layer, "lora_A", ())})


def active_adapters(model: torch.nn.Module) -> tuple[str, ...] | None:
    """The adapters that the model's own forward applies, or has merged; None if no request could: ``_check_active``."""
    layers = adapter_layers(model).values()
    try:
        _check_active(layers)
    except ValueError:
        return None
    return _all_merged(layers) or next((_applied(layer) for layer in layers), ())


def merged_adapters(model: torch.nn.Module) -> tuple[str, ...]:
    """The adapters, sorted, that are merged into weights; not those of disabled layers, whose forward takes them out."""
    return _all_merged(adapter_layers(model).values())


def _all_merged(layers: Collection[Any]) -> tuple[str, ...]:
    return tuple(sorted({name for layer in layers for name in _merged(layer)}))


def _merged(layer: Any) -> Sequence[str]:
    return () if layer.disable_adapters else getattr(layer, "merged_adapters", ())


def _applied(layer: Any) -> tuple[str, ...]:
    """The adapters, sorted, that the forward of a layer in which none is merged applies, if the layer has them."""
    return () if layer.disable_adapters else tuple(sorted(layer.active_adapters))


def is_merged_and_disabled(layer: Any) -> bool:
    """Whether the forward of a layer first takes what is merged out of its weight: PEFT's LoRA layers do, when disabled."""
    return bool(layer.disable_adapters and layer.merged_adapters) and type(layer).__module__ in _UNMERGE_DISABLED


def add_up(model: torch.nn.Module, names: Collection[str]) -> bool:
    """Whether adapters together give a token the sum of what each gives: not if one of several is DoRA."""
    return len(names) < 2 or not any(name in _dora_layers(layer) for layer in adapter_layers(model).values() for name in names)


def can_choose(model: torch.nn.Module) -> bool:
    try:
        check_adapters(model)
    except ValueError:
        return False
    return True


def check_adapters(model: torch.nn.Module) -> None:
    """Raises ValueError for adapters that cannot be applied token by token; says which and why."""
    layers = adapter_layers(model)
    if not layers:
        raise ValueError("the model has no adapters of PEFT; add one (peft.get_peft_model, add_adapter), or leave adapter= and "
                         "enable_lora out")
    if len(adapter_names(model)) > MAX_ADAPTERS:
        raise ValueError(f"the model has {len(adapter_names(model))} adapters, and requests can choose among {MAX_ADAPTERS} at "
                         "most; delete some")
    head = getattr(model, "get_output_embeddings", lambda: None)()
    for path, layer in layers.items():
        why = _unknown(layer) or ("is the head, whose rows are not the tokens of a batch" if layer is head else None)
        if why is not None:
            raise ValueError(
                f"adapters cannot be chosen for each request: {path} {why}. set_adapter chooses one for all requests")
    _check_active(layers.values())


def _check_active(layers: Collection[Any]) -> None:
    """A request has a set of adapters, in all layers the same. Raises ValueError if what the model applies is not that: the
    active ones, or those merged, beside which a layer applies no other."""
    if merged := _all_merged(layers):
        for layer in layers:
            own = set(getattr(layer, "lora_A", ()))
            if set(_merged(layer)) != own.intersection(merged) or not _merged(layer) and own.intersection(_applied(layer)):
                raise ValueError(f"adapters cannot be chosen for each request: {', '.join(merged)} merged into the weights of "
                                 "some layers, and others apply other adapters. unmerge_adapter makes them equal")
        return
    states = {(layer.disable_adapters, tuple(sorted(layer.active_adapters))) for layer in layers}
    if any(len(layer.active_adapters) > 1 and any(name in _dora_layers(layer) for name in layer.active_adapters)
           for layer in layers):
        raise ValueError("adapters cannot be chosen for each request while several are active together, of which some are "
                         "DoRA: their result depends on the order. set_adapter makes one active")
    if len(states) > 1:
        raise ValueError("adapters cannot be chosen for each request: its layers have different active adapters, which "
                         "set_adapter makes equal")


def _unknown(layer: Any) -> str | None:
    if has_own_forward(layer):
        return "has a forward of its own"
    if is_wrapper(layer):
        return unfit(layer)
    from peft.tuners.lora.layer import Linear

    # Of a base in 4 bits: the same products, and the sum is rounded after each adapter.
    in_four_bits = (type(layer).__module__, type(layer).__name__) == ("peft.tuners.lora.bnb", "Linear4bit")
    if type(layer) is not Linear and not in_four_bits:
        return (f"is a {type(layer).__module__}.{type(layer).__name__}, and of those in one batch quire knows LoRA, rsLoRA and "
                "DoRA of linear layers, and LoRA of experts")
    if other := {name: v for name, v in layer.lora_variant.items() if name not in _dora_layers(layer)}:
        kinds = sorted({type(v).__name__.removesuffix("LinearVariant") for v in other.values()})
        return f"has {' and '.join(kinds).replace('Dora', 'DoRA of quantized weights')}, and not LoRA or DoRA alone"
    for name in layer.lora_A:
        if (why := more_than_matrices(layer, name)) is not None:
            return f"has an adapter {name!r} {why}"
        if not isinstance(layer.scaling[name], (int, float)):
            return f"has an adapter {name!r} whose scaling is a tensor (prepare_model_for_compiled_hotswap makes it one)"
    return None


class LoraPlaces(torch.nn.Module):
    """Memory for adapters that a model may get: ``count`` for each of its adapted linear layers, zeros at first. ``a{i}_{j}``
    (rank, K) and ``b{i}_{j}`` (N, rank): of the i-th layer of ``adapter_layers`` and the j-th place, in ``dtypes[i]``. A trace
    with them takes each adapter of up to ``rank`` that is copied into one, its scaling multiplied into B."""

    def __init__(self, layers: Sequence[Any], count: int, rank: int, dtypes: Sequence[torch.dtype]) -> None:
        super().__init__()
        self.count, self.rank = count, rank
        for i, (layer, dtype) in enumerate(zip(layers, dtypes, strict=True)):
            if is_wrapper(layer):
                continue
            device = layer.get_base_layer().weight.device
            for j in range(count):
                for name, shape in ((f"a{i}_{j}", (rank, layer.in_features)), (f"b{i}_{j}", (layer.out_features, rank))):
                    with torch.inference_mode(False):
                        zeros = torch.zeros(shape, dtype=dtype, device=device)
                    self.register_parameter(name, torch.nn.Parameter(zeros, requires_grad=False))

    def pair(self, layer: int, place: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A and B of a place of a linear layer, to be written."""
        return getattr(self, f"a{layer}_{place}").data, getattr(self, f"b{layer}_{place}").data


@contextlib.contextmanager
def adapters_per_token(model: torch.nn.Module, names: Sequence[str] | None, places: LoraPlaces | None = None
                       ) -> Iterator[list[Any]]:
    """While inside, the LoRA layers of ``model`` apply each token's adapters, ``names[i]`` where bit i is set; None: the active
    ones. The bits after those of ``names`` are of ``places``. DoRA layers and experts with adapters can be traced. Gives what
    must be kept as long as the trace, which Dynamo drops when an object dies that it read. Raises ValueError as
    ``check_adapters``."""
    layers = list(adapter_layers(model).values())
    forwards = [(dora, functools.partial(_dora, dora)) for layer in layers for dora in _dora_layers(layer).values()]
    own = None if names is None else list(names)
    forwards += [(layer, functools.partial(adapted_forward, layer, own)) for layer in layers
                 if is_wrapper(layer) and unfit(layer) is None]
    if own is not None:
        check_adapters(model)
        forwards += [(layer, functools.partial(_forward, layer, own, sorted(_dora_layers(layer)), places, i))
                     for i, layer in enumerate(layers) if not is_wrapper(layer)]
    try:
        for module, forward in forwards:
            object.__setattr__(module, "forward", forward)
        yield forwards
    finally:
        for module, _ in forwards:
            module.__dict__.pop("forward", None)


def _dora_layers(layer: Any) -> dict[str, Any]:
    """The DoRA layers, by adapter, of a linear layer whose weight is not quantized."""
    found = {name: dora for name, dora in getattr(layer, "lora_magnitude_vector", {}).items() if type(dora).__name__ ==
             "DoraLinearLayer" and "forward" not in vars(dora) and more_than_matrices(layer, name) is None}
    return found if found and type(getattr(layer.get_base_layer(), "weight", None)) is torch.nn.Parameter else {}


def _dora(dora: Any, x: torch.Tensor, *, lora_A: Any, lora_B: Any, scaling: float, base_layer: Any,
          base_result: torch.Tensor | None = None, adapter_name: str = "") -> torch.Tensor:
    """What PEFT's ``DoraLinearLayer`` adds to the base layer's result."""
    weight = base_layer.weight.to(x.dtype)
    weight = weight.T if dora.fan_in_fan_out else weight
    norm = torch.linalg.norm(weight + scaling * (lora_B.weight @ lora_A.weight).to(x.dtype), dim=1)
    scale = dora.weight / norm.to(x.dtype)
    if base_result is None:
        base_result = F.linear(x, weight)
    elif base_layer.bias is not None:
        base_result = base_result - base_layer.bias
    return (scale - 1) * base_result + scale * lora_B(lora_A(x)) * scaling


def _forward(layer: Any, names: list[str], doras: list[str], places: LoraPlaces | None, number: int, x: torch.Tensor,
             *args: Any, **kwargs: Any) -> torch.Tensor:
    if not torch.compiler.is_compiling():  # the model's own forward, which says why it cannot be traced
        return type(layer).forward(layer, x, *args, **kwargs)
    if x.dim() != 3:  # without the batch's dimension, as in opt's MLP, or with one more, as DeepSeek-V3's latents
        rows = _forward(layer, names, doras, places, number, x.flatten(0, -2)[None], *args, **kwargs)[0]
        return rows.view(*x.shape[:-1], rows.shape[-1])
    base = layer.base_layer(x, *args, **kwargs)
    adapters = [(layer.lora_A[name].weight, layer.lora_B[name].weight, float(layer.scaling[name]), 1 << i)
                for i, name in enumerate(names) if name in layer.lora_A and name not in doras]
    adapters += [(getattr(places, f"a{number}_{place}"), getattr(places, f"b{number}_{place}"), 1.0, 1 << len(names) + place)
                 for place in range(0 if places is None else places.count)]
    result = lora_rows(base, x, *[[*each] for each in zip(*adapters, strict=True)]) if adapters else base
    for i, name in enumerate(names):
        if name in doras:
            own = layer.lora_A[name].weight.dtype
            added = layer.lora_magnitude_vector[name](
                x.to(own), lora_A=layer.lora_A[name], lora_B=layer.lora_B[name], scaling=layer.scaling[name],
                base_layer=layer.get_base_layer(), base_result=result)
            result = torch.where(_has(x, 1 << i), (result + added).to(base.dtype), result)
    return result


def _has(x: torch.Tensor, bit: int) -> torch.Tensor:
    """(1, T, 1) bool: the tokens that have an adapter, for ``lora_rows`` adds one to their zeros."""
    one = (x[..., :1].abs() >= 0).to(torch.float32)  # a number of each token: rows of the batch, to the proof
    unit = torch.ones(1, 1, dtype=torch.float32, device=x.device)
    return lora_rows(one - one, one, [unit], [unit], [1.0], [bit]) != 0
