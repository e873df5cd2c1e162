"""The Hugging Face attention interface.

transformers' models call ``ALL_ATTENTION_FUNCTIONS[config._attn_implementation]`` with query, key and value after rope, keys
not repeated, and scale, window, softcap and sinks as values. Our function, registered as ``"quire"``, turns the call into the
semantic op, and refuses what that cannot express. No mask function goes with the name, so transformers builds no mask.
"""

from __future__ import annotations

import contextlib
import functools
import re
import sys
import types
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch.nn import functional as F

from quire.attn_ops.attention import attention
from quire.attn_ops.backend import UnsupportedAttention
from quire.attn_ops.context import setting
from quire.attn_ops.step import current_step
from quire.passes.capture.followed import names_of
from quire.passes.capture.reads import is_code_of
from quire.passes.eager import paged_eager

NAME = "quire"
_LOOK_UPS = ("get_interface", "__getitem__")  # methods of the tables of functions
_EAGER = "eager_attention_forward"  # the name, in transformers' files, of what "eager" means there
#: Whether this thread is inside ``interface_active``.
ACTIVE: ContextVar[bool] = ContextVar("quire_interface_active", default=False)

#: Implementations that compute what the semantic op does. None: not chosen yet.
_EQUIVALENT = frozenset({None, NAME, "eager", "sdpa", "flex_attention", "flash_attention_2", "flash_attention_3",
                         "flash_attention_4"})
_FLASH_KERNELS = re.compile(r"kernels-community/(vllm-)?flash-attn\d?(@\w+)?")  # of flash_attention_2, ...
# Keyword arguments that do not change what a call computes: bookkeeping of transformers' caches and kernels. Any other that is
# not None or False is refused.
HARMLESS = frozenset({
    "position_ids", "cache_position", "use_cache", "output_attentions", "output_hidden_states", "return_dict",
    "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "num_items_in_batch", "deterministic",
    "output_router_logits", "position_embeddings", "past_key_values", "is_causal", "logits_to_keep",
})


def attention_function(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: torch.Tensor | None, *,
    scaling: float | None = None, dropout: float = 0.0, is_causal: bool | None = None,
    sliding_window: int | None = None, softcap: float | None = None, s_aux: torch.Tensor | None = None, **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function transformers calls: (B, H, S, D) query, un-repeated key and value -> ((B, S, H, Dv), None). Raises
    UnsupportedAttention if the call carries something that the semantic op cannot express."""
    where = f"{type(module).__name__} (layer {getattr(module, 'layer_idx', None)})"
    if attention_mask is not None:
        raise UnsupportedAttention(
            f"{where} was given an attention_mask. A paged batch is ragged: pass no mask and no padding, but explicit "
            "position_ids. If the model makes the mask, or a function put into it: those with meaning of their own (image "
            "blocks, ALiBi, dynamic masks) are not supported.")
    if dropout:
        raise UnsupportedAttention(f"{where} has attention dropout {dropout}; call model.eval() first.")
    for name, val in kwargs.items():
        if val is not None and val is not False and name not in HARMLESS:
            raise UnsupportedAttention(f"{where} passes {name!r} to its attention, which quire does not know and will not "
                                       "ignore.")
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int):
        raise UnsupportedAttention(f"{where} has no integer layer_idx; quire cannot tell its KV cache.")
    scale = float(scaling) if scaling is not None else query.shape[-1] ** -0.5
    window = int(sliding_window) if sliding_window is not None else None
    cap = float(softcap) if softcap is not None else None
    args = (query, key, value, s_aux)
    options: dict[str, Any] = {"layer": layer, "scale": scale, "window": window, "softcap": cap, "chunk": _chunk(module, layer),
               "causal": bool(causal)}
    if torch.compiler.is_compiling():
        out = attention(*args, **options)
    elif (step := current_step()) is not None:
        out = paged_eager(step, *args, **options)
    elif ACTIVE.get():
        out = attention(*args, **options)
    else:
        # No mask was built for our name, so a padded batch would come out wrong.
        raise RuntimeError(
            f"{where} runs with attention implementation {NAME!r} outside quire: either another thread is making an engine or "
            "running a paged step of this model (run the model in one thread at that time), or the implementation was set by "
            "hand (set_attn_implementation('sdpa') puts it back; quire sets it by itself).")
    return out.transpose(1, 2).contiguous(), None


def _chunk(module: Any, layer: int) -> int | None:
    """The chunk of Llama 4's chunked layers, from the config: the call shows it only in the mask, which is not built."""
    config = getattr(module, "config", None)
    types = getattr(config, "layer_types", None)
    if types and 0 <= layer < len(types) and types[layer] == "chunked_attention":
        return int(config.attention_chunk_size)  # type: ignore[union-attr]
    return None


def register() -> None:
    """Register the name without a mask function: no mask is built. Raises UnsupportedAttention if the user has taken it."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if NAME not in ALL_ATTENTION_FUNCTIONS:
        ALL_ATTENTION_FUNCTIONS.register(NAME, attention_function)
    if ALL_ATTENTION_FUNCTIONS[NAME] is not attention_function:
        raise UnsupportedAttention(f"the name {NAME!r} in transformers' ALL_ATTENTION_FUNCTIONS is quire's own, and now means "
                                   f"{getattr(ALL_ATTENTION_FUNCTIONS[NAME], '__qualname__', 'something else')}; use another")


def uses_interface(model: torch.nn.Module) -> bool:
    """Whether this transformers model routes its attention through the interface, not straight to F.sdpa."""
    check = getattr(model, "_can_set_attn_implementation", None)
    return bool(check is not None and check() and getattr(model, "_supports_attention_backend", True))


def configs_of(model: torch.nn.Module) -> list[Any]:
    """Every distinct transformers config that a module of the model holds (a composite model has several)."""
    configs = (getattr(module, "config", None) for module in model.modules())
    return list({id(c): c for c in configs if hasattr(c, "_attn_implementation_internal")}.values())


def functions_of(name: str | None, model: torch.nn.Module | None = None) -> dict[str, Any]:
    """The functions of attention and masks behind an implementation, with ``model`` also the eager attention of its files, and
    those that these call by name."""
    from transformers import masking_utils
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    tables = {"attention": ALL_ATTENTION_FUNCTIONS, "mask": ALL_MASK_ATTENTION_FUNCTIONS}
    found = {f"{kind} function {name!r}": table[name] for kind, table in tables.items() if name in table}
    found |= {f"{type(table).__name__}.{method}": found_method for table in tables.values() for method in _LOOK_UPS
              if (found_method := getattr(type(table), method, None)) is not None}
    if name == "sdpa":
        found["torch.nn.functional.scaled_dot_product_attention"] = F.scaled_dot_product_attention
    files = set() if model is None or name == NAME else {type(module).__module__ for module in model.modules()}
    if name == "eager":
        found |= {f"{file}.{_EAGER}": vars(sys.modules[file])[_EAGER] for file in sorted(files)
                  if _EAGER in vars(sys.modules.get(file, object))}
    makers = [f for file in files for f in vars(sys.modules.get(file, object)).values()
              if isinstance(f, types.FunctionType) and f.__globals__ is vars(masking_utils)]
    return found | _called([*found.values(), *makers])


def _called(functions: Iterable[Any]) -> dict[str, Any]:
    """The Python functions of transformers and PyTorch that functions of transformers call by name, one through another."""
    found, left = dict[str, Any](), list(functions)
    while left:
        function = left.pop()
        if not isinstance(function, types.FunctionType) or not is_code_of(function, "transformers"):
            continue
        scope = function.__globals__
        names, of_torch = _names(function.__code__)
        for name in names & scope.keys():
            if isinstance(held := scope[name], types.FunctionType) and (own := f"{scope['__name__']}.{name}") not in found:
                found[own] = held
                left.append(held)
        for where, owner, name in of_torch:
            if isinstance(held := getattr(owner, name, None), types.FunctionType):
                found[f"{where}.{name}"] = held
    return found


@functools.lru_cache(maxsize=1024)
def _names(code: types.CodeType) -> tuple[frozenset[str], list[tuple[str, Any, str]]]:
    """The names that code reads, and those of PyTorch's functions among them, with their owners."""
    names, owners = frozenset(names_of(code)), {"torch": torch, "torch.nn.functional": F, "torch.Tensor": torch.Tensor}
    return names, [(where, owner, name) for where, owner in owners.items() for name in sorted(names) if hasattr(owner, name)]


def check_implementation(name: str | None, model: torch.nn.Module | None = None) -> None:
    """Refuse an attention or mask function that the user registered, or put (for ``model``) in the place of eager attention.
    Raises UnsupportedAttention if ``name`` is not known to mean the semantic op, or its functions are not transformers' own."""
    plain = name.removeprefix("paged|") if name is not None else None
    known = plain in _EQUIVALENT or _FLASH_KERNELS.fullmatch(plain or "") is not None
    functions = {} if name == NAME else functions_of(name, model)
    foreign = [what for what, f in functions.items() if not is_code_of(f, "transformers", "torch")]
    if known and foreign:
        raise UnsupportedAttention(f"the model's attention implementation {name!r} is registered by the user: {foreign[0]} is "
                                   "not transformers' or PyTorch's own, and quire's attention would replace it. Put that back.")
    if not known:
        registered = any(repr(name) in what for what in functions)
        raise UnsupportedAttention(
            f"the model's attention implementation {name!r} is " + ("registered by the user" if registered else "unknown")
            + ", and quire's attention would replace it; set_attn_implementation('sdpa') lets quire serve the model.")


@contextlib.contextmanager
def implementation_set(configs: list[Any], name: str, model: torch.nn.Module | None = None) -> Iterator[None]:
    """While inside, transformers' configs have the attention implementation ``name``. ``model``: see ``check_implementation``.
    Raises UnsupportedAttention if the user chose an implementation of their own."""
    before = [c._attn_implementation_internal for c in configs]
    for found in before:
        check_implementation(found, model)
    for config in configs:
        config._attn_implementation_internal = name
    try:
        yield
    finally:
        for config, found in zip(configs, before, strict=True):
            config._attn_implementation_internal = found


@contextlib.contextmanager
def interface_active(model: torch.nn.Module) -> Iterator[None]:
    """While inside, the model's attention emits the semantic op. Raises as ``implementation_set``."""
    register()
    with implementation_set(configs_of(model), NAME, model), setting(ACTIVE, True):
        yield
