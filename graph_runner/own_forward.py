"""What a model's own forward may do and an engine does not: read a mask or a cache, and compute otherwise in training mode."""

from __future__ import annotations

import functools
import types
from typing import Any

import torch
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd

from quire.passes.capture.followed import CACHE, reads_of
from quire.passes.capture.four_bit import only_packs
from quire.passes.capture.wrapped_parts import reader_around_parts

NOT_GIVEN = CACHE | {"attention_mask"}
# Packages whose forwards are known.
_READ = ("quire", "torch", "transformers", "contextlib")
# Attributes and config fields that act in training mode only, where they are positive: dropout rates (also of whole layers),
# the noise of routers, and the clipping of Gemma 3n.
_ACTS = ("drop", "jitter", "noise", "altup_coef_clip")
# Fields of configs for heads that a causal LM does not have.
_OTHER_HEADS = ("classifier", "summary", "cls_")
# What code reads beside ``self.training`` where the reading is known: one of the above; or a choice between two ways of
# computing the same (checkpointing recomputes activations; kernels that keep no state).
_KNOWN = ("gradient_checkpointing", "cache_params", "is_activation_checkpointing")


def reads_inputs(model: torch.nn.Module, own_forward: Any) -> str | None:
    """Says that the model's forward, or what users put around its parts, reads an attention mask or a cache, if it is not
    transformers' own and does more with them than to pass them on; or None. ``own_forward``: one that the instance had before
    it was paged, or None."""
    for forward in (own_forward, *(vars(cls).get("forward") for cls in type(model).__mro__)):
        found = forward
        while found is not None and (plain := getattr(found, "__func__", found)) is not None:
            found = getattr(plain, "__wrapped__", None)
            if isinstance(plain, types.FunctionType) and str(plain.__globals__.get("__name__")).partition(".")[0] not in _READ:
                if read := reads_of(plain, NOT_GIVEN, model):
                    return f"{plain.__qualname__} reads {read[0]}, which an engine does not give it"
    around = reader_around_parts(model, NOT_GIVEN)
    return None if around is None else f"{around}, which an engine does not give it"


def training_difference(model: torch.nn.Module) -> str | None:
    """Why the model in training mode is random, or otherwise differs from evaluation mode; None: it does not.

    Read from the modules in training mode: their rates, and the code of their classes where it asks for ``self.training``.
    """
    for name, module in model.named_modules():
        if not module.training:
            continue
        where = f"{name}." if name else ""
        if isinstance(module, _DropoutNd):
            if module.p > 0:
                return f"{where}p is {module.p}"
        elif isinstance(module, (_NormBase, torch.nn.RReLU)):
            return f"{name} is a {type(module).__name__}, which differs in training mode"
        elif isinstance(module, torch.nn.MultiheadAttention):
            if module.dropout > 0:
                return f"{where}dropout is {module.dropout}"
        elif not type(module).__module__.startswith("torch.nn."):
            if (found := _active(module)) is not None:
                return f"{where}{found}"
            if (found := _active(getattr(module, "config", None))) is not None:
                return f"{where}config.{found}"
            cls: type[torch.nn.Module] = type(module)
            if (method := _asks(cls)) is not None:  # type: ignore[arg-type]
                return f"{method} asks whether it is in training mode"
    return None


def _active(holder: Any) -> str | None:
    for name, value in vars(holder).items() if hasattr(holder, "__dict__") else ():
        if not any(part in name for part in _ACTS) or name.startswith(_OTHER_HEADS):
            continue
        if isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0:
            return f"{name} is {value}"
    return None


@functools.lru_cache(maxsize=1024)
def _asks(cls: type) -> str | None:
    """A method that reads ``training`` and nothing that says what for, as "Class.method"; None: there is none."""
    for base in cls.__mro__:
        if base.__module__.split(".")[0] in ("torch", "builtins", "quire") or base.__module__ == "transformers.modeling_utils":
            continue
        for name, method in vars(base).items():
            code = getattr(getattr(method, "__wrapped__", method), "__code__", None)
            if name in ("train", "eval", "__init__") or not isinstance(code, types.CodeType):
                continue
            names = _names(code)
            if "training" in names and not any(part in n for n in names for part in (*_ACTS, *_KNOWN)) \
                    and not (isinstance(method, types.FunctionType) and only_packs(method)):
                return f"{base.__qualname__}.{name}"
    return None


def _names(code: types.CodeType) -> set[str]:
    """Global and attribute names that the code reads, those of nested functions included."""
    names = {*code.co_names, *code.co_varnames}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _names(constant)
        elif isinstance(constant, tuple):  # names of keyword arguments
            names |= {c for c in constant if isinstance(c, str)}
    return names
