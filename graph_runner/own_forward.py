"""What a model's own forward may do and an engine does not: read a mask or a cache, and compute otherwise in training mode."""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.nn.modules import module as torch_module
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd

from quire.graph_runner.own_cache import around_forward, functions_held
from quire.passes.capture.followed import CACHE, functions_of, is_known, names_in, reached, reads_of
from quire.passes.capture.four_bit import only_packs
from quire.passes.capture.wrapped_parts import names_without_loss, outermost, reader_around_parts

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
    called = outermost(model)
    for forward in (own_forward, *(vars(cls).get("forward") for cls in type(model).__mro__)):
        found = forward
        while found is not None and (plain := getattr(found, "__func__", found)) is not None:
            found = getattr(plain, "__wrapped__", None)
            if isinstance(plain, types.FunctionType) and str(plain.__globals__.get("__name__")).partition(".")[0] not in _READ:
                if read := reads_of(plain, NOT_GIVEN, model, called=plain is called):
                    return f"{plain.__qualname__} reads {read[0]}, which an engine does not give it"
    around = reader_around_parts(model, NOT_GIVEN)
    return None if around is None else f"{around}, which an engine does not give it"


def training_difference(model: torch.nn.Module) -> str | None:
    """Why the model in training mode is random, or otherwise differs from evaluation mode; None: it does not.

    Read from the modules in training mode: their rates, and the code of their classes, hooks and own forwards where it asks for
    ``training``.
    """
    if not any(module.training for module in model.modules()):
        return None
    called = outermost(model)
    everywhere = (*torch_module._global_forward_pre_hooks.values(), *torch_module._global_forward_hooks.values())
    for name, module in model.named_modules():
        for around in (*around_forward(module), *functions_held(module), *everywhere):
            for function, owner in functions_of(around):  # which may ask for another module's mode
                if (asking := _asking(function, owner, called)) is not None and not _excused(asking, module):
                    return f"{asking.where} asks whether it is in training mode"
        if not module.training:
            continue
        where = f"{name}." if name else ""
        if isinstance(module, _DropoutNd):
            if module.p > 0:
                return f"{where}p is {module.p}"
        elif isinstance(module, (_NormBase, torch.nn.RReLU)):
            return f"{name} is a {type(module).__name__}, which differs in training mode"
        else:
            if (found := _active(module)) is not None:
                return f"{where}{found}"
            if type(module).__module__.startswith("torch.nn.modules."):
                continue
            if (found := _active(getattr(module, "config", None))) is not None:
                return f"{where}config.{found}"
            cls: type[torch.nn.Module] = type(module)
            for asking in _asks(cls, called if module is model else None):  # type: ignore[arg-type]
                if not _excused(asking, module):
                    return f"{asking.where} asks whether it is in training mode"
    return None


def _active(holder: Any) -> str | None:
    for name, value in vars(holder).items() if hasattr(holder, "__dict__") else ():
        for rate in _numbers(value) if _may_act(name) else ():
            if rate > 0:
                return f"{name} is {rate}"
    return None


@functools.lru_cache(maxsize=4096)
def _may_act(name: str) -> bool:
    return any(part in name for part in _ACTS) and not name.startswith(_OTHER_HEADS)


def _numbers(value: Any) -> list[float]:
    """The numbers in a rate, or in a dict or list of them (PEFT's, by adapter); none where it holds anything else."""
    if isinstance(value, (dict, torch.nn.ModuleDict)):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        each = [_numbers(x) for x in value]
        return sum(each, []) if all(each) else []
    if value is None or isinstance(value, torch.nn.Identity):
        return [0]
    rate = value.p if isinstance(value, _DropoutNd) else value
    return [rate] if isinstance(rate, (int, float)) and not isinstance(rate, bool) else []


class _Asking(NamedTuple):
    """Code that asks for ``training``, and what it reads: ``names`` of any kind, ``attributes`` of objects alone."""

    where: str
    names: frozenset[str]
    attributes: frozenset[str]


def _excused(asking: _Asking, module: torch.nn.Module) -> bool:
    """Whether it is known what the code asks for: it reads a rate, which is 0 (else ``_active`` finds it), or what computes the
    same both ways."""
    if any(part in name for name in asking.names if name.isidentifier() for part in _KNOWN):
        return True
    holders = (module, getattr(module, "config", None))
    rates = [_numbers(getattr(holder, name)) for name in asking.attributes if any(part in name for part in _ACTS)
             for holder in holders if hasattr(holder, name)]
    return any(rates) and not any(rate > 0 for each in rates for rate in each)  # of a class or a property, too


@functools.lru_cache(maxsize=1024)
def _asks(cls: type, called: types.FunctionType | None) -> tuple[_Asking, ...]:
    """The methods that ask for ``training``, as "Class.method". ``called``: see ``_asking``."""
    found = list[_Asking]()
    for base in cls.__mro__:
        package = base.__module__.partition(".")[0]
        if (package in ("torch", "builtins", "quire") and not base.__module__.startswith("torch.nn.utils.")) \
                or base.__module__ == "transformers.modeling_utils":
            continue
        for name, method in vars(base).items():
            if name in ("train", "eval", "__init__"):
                continue
            for plain in _functions_in(method):
                asking = _asking(plain, None, called)
                if asking is not None and not (isinstance(method, types.FunctionType) and only_packs(method)):
                    found.append(asking._replace(where=f"{base.__qualname__}.{name}"))
    return tuple(found)


def _functions_in(method: Any) -> Iterator[types.FunctionType]:
    """The functions of a class's attribute: of a method, a property, and the user's that wrap one."""
    if isinstance(method, property):
        for part in (method.fget, method.fset):
            yield from _functions_in(part)
        return
    held = getattr(method, "func", getattr(method, "__func__", method))  # of a cached_property, a staticmethod
    seen = set[int]()
    while held is not None and id(held) not in seen:
        seen.add(id(held))
        wrapped = getattr(held, "__wrapped__", None)
        if isinstance(held, types.FunctionType) and (wrapped is None or not is_known(held.__globals__.get("__name__"))):
            yield held
        held = wrapped


def _asking(function: types.FunctionType, owner: Any, called: types.FunctionType | None = None) -> _Asking | None:
    """What a function reads, and the user's that it calls, if it asks for ``training``. ``called``: of ``outermost``."""
    for each, _ in reached(function, owner):
        names = names_in(each.__code__)
        if "training" in names and not (each is called and "training" not in names_without_loss(each)):
            return _Asking(each.__qualname__, frozenset(names), frozenset(_attributes(each.__code__)))
    return None


def asks_for_mode(function: types.FunctionType, owner: Any, model: torch.nn.Module) -> str | None:
    """The name of a function that asks for ``training`` for what is no rate that it may have been given, in a call of the
    ``model``."""
    asking = _asking(function, owner, outermost(model))
    if asking is None or any(part in name for name in asking.names for part in (*_KNOWN, *_ACTS)):
        return None
    return asking.where


def _attributes(code: types.CodeType) -> Iterator[str]:
    """Attributes of variables that the code reads, and strings, which may name some; not those of modules: ``F.dropout``."""
    of_module = False
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            if not of_module:
                yield instruction.argval
        else:
            of_module = instruction.opname == "LOAD_GLOBAL"
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _attributes(constant)
        elif isinstance(constant, str):
            yield constant
