"""Refuses masks of the user's: under quire's attention, transformers' mask functions build none, whatever they are given."""

from __future__ import annotations

import re
import types
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from quire.attn_ops.backend import UnsupportedAttention
from quire.passes.capture.reads import is_code_of

_MAKES_MASKS = re.compile(r".*\.create_\w*masks?\w*")
#: Arguments of these functions that change which tokens see each other.
_CHANGES_MASKS = frozenset(("and_mask_function", "or_mask_function", "block_sequence_ids"))
_KNOWN = ("quire", "torch", "transformers")


def check_masks(model: torch.nn.Module, read: Mapping[str, Any]) -> None:
    """Refuse a model whose masks are not transformers' own.

    Args:
        read: values that the trace read outside modules (``Reads.values``): the functions that the code of the model calls.

    Raises:
        UnsupportedAttention: names the function, or the code that passes one to it.
    """
    functions = {name: f for name, f in read.items() if isinstance(f, types.FunctionType) and not is_code_of(f, *_KNOWN)}
    for name, function in functions.items():
        if _MAKES_MASKS.fullmatch(name):
            raise UnsupportedAttention(f"{name} was replaced by {function.__qualname__}, which is not transformers' own. "
                                       "quire's attention builds no masks, so its mask would be lost; put transformers' back")
    for where, code in (*((name, f.__code__) for name, f in functions.items()), *_own_methods(model)):
        if given := sorted(_CHANGES_MASKS & _constants(code)):
            raise UnsupportedAttention(f"{where} passes {given[0]} to transformers' mask functions. quire's attention builds "
                                       "no masks, so it would be lost; masks with meaning of their own cannot be served")


def _own_methods(model: torch.nn.Module) -> Iterator[tuple[str, types.CodeType]]:
    for cls in {cls: None for module in model.modules() for cls in type(module).__mro__}:
        if cls.__module__.partition(".")[0] in (*_KNOWN, "builtins"):
            continue
        for method in vars(cls).values():
            while hasattr(method, "__wrapped__"):
                method = method.__wrapped__
            if isinstance(method, types.FunctionType):
                yield method.__qualname__, method.__code__


def _constants(code: types.CodeType) -> set[Any]:
    """Strings among the constants of the code, names of keyword arguments and those of nested functions included."""
    found: set[Any] = set()
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found |= _constants(constant)
        elif isinstance(constant, (str, tuple)):
            found.update(x for x in ([constant] if isinstance(constant, str) else constant) if isinstance(x, str))
    return found


__all__ = ["check_masks"]
