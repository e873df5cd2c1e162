"""What a trace read of the model and of the modules of its code: Dynamo's guards say so, which a whole-model trace drops."""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Iterable
from typing import Any

#: A guard on what an imported module holds: the module, and the attributes from there on.
_GLOBAL = re.compile(r"G\['__import_(\w+)'\]((?:\.\w+|\['\w+'\])+)")
_STEP = re.compile(r"\.?(\w+)|\['(\w+)'\]")
_PLAIN = frozenset((bool, int, float, str))
#: Modules that no user patches, and whose state changes by itself.
_OURS = ("quire_dot_", "torch_dot__", "builtins")


def is_code_of(function: Any, *packages: str) -> bool:
    """Whether the code of a function, and of those that it wraps, is in these packages. ``__module__`` does not tell:
    ``functools.wraps`` copies it."""
    while function is not None:
        function = getattr(function, "__func__", function)
        scope = getattr(function, "__globals__", None)
        module = str(getattr(function, "__module__", "") if scope is None else scope.get("__name__", ""))
        if module.partition(".")[0] not in (*packages, "contextlib"):
            return False
        function = getattr(function, "__wrapped__", None)
    return True


def names_read(guards: Iterable[Any]) -> set[str]:
    """Every attribute name and key in the guards' sources and arguments. ``guards``: as ``guard_filter_fn`` gets them."""
    found: set[str] = set()
    for guard in guards:
        found.update(re.findall(r"[A-Za-z_]\w*", guard.name))
        create = getattr(getattr(guard, "orig_guard", None), "create_fn", None)  # a partial: names that were looked up in vain
        arguments = (*getattr(create, "args", ()), *(getattr(create, "keywords", None) or {}).values())
        found.update(value for value in arguments if isinstance(value, str))
    return found


def globals_read(guards: Iterable[Any]) -> set[tuple[str, str]]:
    """What the traced code read of modules: (name of the module, path in it), as ("torch.nn.modules.sparse", "F.silu")."""
    found: set[tuple[str, str]] = set()
    for guard in guards:
        match = _GLOBAL.fullmatch(guard.name)
        if match is not None and not match[1].startswith(_OURS):
            found.add((match[1].replace("_dot_", "."), match[2][1:]))
    return found


def values_of(reads: Iterable[tuple[str, str]]) -> dict[str, Any]:
    """What these names mean now, by "module.name", where that is a function, a class or a plain value."""
    found: dict[str, Any] = {}
    for module, path in reads:
        held: Any = sys.modules.get(module)
        for attribute, key in _STEP.findall(path):
            held = getattr(held, attribute, None) if attribute else held.get(key) if isinstance(held, dict) else None
        if (callable(held) or type(held) in _PLAIN) and not isinstance(held, types.ModuleType):
            found[f"{module}.{path}"] = held
    return found


__all__ = ["globals_read", "is_code_of", "names_read", "values_of"]
