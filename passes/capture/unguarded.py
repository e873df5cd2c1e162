"""What the code of a trace can find out that Dynamo has no guard for, described for another process.

Dynamo guards the values that it reads. It also answers questions about them by asking Python, with no guard on the answer:
whether two objects are one, what names an object has (``vars(x)``, ``hasattr`` of a function or module), whether a class is
one of an abstract class, in what order a set is. All of that is described here, for the objects that guards are on, and
compared as a whole. Code that Dynamo runs and does not look into may read anything: a trace that may have met such code is not
kept (``NotPortable``).

Code of PyTorch's, transformers' and the like does little of this, and has a version: what is about names is described for
traces with code of the user's only.
"""

from __future__ import annotations

import abc
import builtins
import collections
import contextlib
import enum
import re
import sys
import types
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from quire.passes.capture.facts import PLAIN, NotPortable, Values, fact
from quire.passes.capture.followed import is_known, names_in

_IMPORTED = re.compile(r"G\['__import_(\w+)'\]")
_BUILT_IN = frozenset(vars(builtins))
_ORDERED = (list, tuple, dict, collections.deque)
_CLASS_OF = frozenset({"type", "__class__"})  # by which code gets at the class of an object
#: Methods of values that Dynamo takes for constants which it traces, or which run when these are made.
_TRACED = frozenset({"__str__", "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__contains__", "__len__",
                     "__init__", "__new__"})
_LAZY = ("quire.", "torch._ops")  # modules of classes whose objects get attributes when they are used
_OF_PROCESS = (id, hash)  # which give other numbers in each process, and no guard is on them
_OF_FUNCTION = frozenset({"__hash__", "__annotations__", "__code__"})  # in which no guard looks, either


class Asked(NamedTuple):
    """What traced code may ask for. ``names``: in code of the user's; None: there is none. ``modules``: the user's modules that
    have it. ``built_in``: names of built-in functions, in each module with traced code."""

    names: frozenset[str] | None
    modules: frozenset[str]
    built_in: Mapping[str, Sequence[str]]


def asked_by(codes: Iterable[types.CodeType]) -> Asked:
    """Of the code objects that Dynamo traced. Raises NotPortable if there are none: it has not noted them."""
    files: dict[str, list[str]] = {}
    for name, module in [*sys.modules.items()]:
        if isinstance(path := getattr(module, "__file__", None), str):
            files.setdefault(path, []).append(name)
    users, modules, built_in = list[types.CodeType](), set[str](), dict[str, set[str]]()
    for code in (once := {*codes}):
        found = files.get(code.co_filename, [])
        for name in found:
            built_in.setdefault(name, set()).update(_BUILT_IN.intersection(code.co_names))
        if not (all(map(_is_known, found)) if found else _is_generated(code)):
            users.append(code)
            modules |= {*found}
    if not once:
        raise NotPortable("a trace that does not say what code it is of")
    return Asked(frozenset().union(*map(names_in, users)) if users else None, frozenset(modules),
                 {name: sorted(found) for name, found in sorted(built_in.items())})


def _is_generated(code: types.CodeType) -> bool:
    """Whether code that no module's file has is of Python's own modules, or what ``dataclasses`` writes."""
    return code.co_filename.startswith("<frozen ") or code.co_qualname.startswith("__create_fn__.")


def _is_known(module: str) -> bool:
    return is_known(module) or module.partition(".")[0] in sys.stdlib_module_names


def description(sources: Sequence[str], values: Values, asked: Asked) -> dict[str, Any]:
    """What can be asked of what the expressions ``sources`` give, by what a message calls it. Raises NotPortable."""
    names = asked.names
    held = [values[source] for source in sources]
    inside = [] if names is None else [x for x in _inside(held) if type(x) not in PLAIN]
    held += inside
    once = list({id(x): x for x in held}.values())
    classes = [x for x in once if isinstance(x, type)]
    types_of = list({id(cls): cls for cls in map(type, once)}.values())
    reachable = [*classes, *(types_of if names and names & _CLASS_OF else ())]
    for cls in reachable:
        if not _is_known(type(cls).__module__):
            raise NotPortable(f"a class of the class {type(cls).__qualname__}, whose code Dynamo does not look into")
    for cls in types_of + classes:
        if issubclass(cls, (enum.Enum, tuple)) and not _is_traced(cls):
            raise NotPortable(f"the class {cls.__qualname__}, whose code Dynamo runs and does not look into")
    if names is not None and (names & _OF_FUNCTION or any(x is asked for x in once for asked in _OF_PROCESS)):
        raise NotPortable("a number of this process (id, hash), or what a function says of itself")
    found = {"which objects are one": _identities(held, names is not None),
             "what is an instance of an abstract class": [_members(cls, once, classes, types_of) for cls in reachable
                                                          if isinstance(cls, abc.ABCMeta)],
             "built-in functions": _built_in(asked)}
    if names is not None:
        modules = {each.__name__: each for each in once if isinstance(each, types.ModuleType)}
        modules |= {name: sys.modules[name] for name in asked.modules}
        found["what modules have"] = [(name, _names_of(modules[name], names)) for name in sorted(modules)]
        found["what objects have"] = list(map(_own, once))
        found["what containers and functions hold"] = [
            f"{type(x).__module__}.{type(x).__qualname__}" if isinstance(x, (*_ORDERED, set, frozenset)) else fact(x, True)
            for x in inside]
        found["the order of sets"] = [_order(source, x) for source, x in zip(sources, held, strict=False)
                                      if isinstance(x, (set, frozenset))]
    return found


def _is_traced(cls: type) -> bool:
    """Whether Dynamo traces what the members of an enum, or named tuples, do by themselves."""
    return all(_is_known(entry.__module__) or name in _TRACED or not (name.startswith("__") or name == "_missing_")
               for base in cls.__mro__ for name, held in vars(base).items()
               if isinstance(entry := getattr(held, "__func__", held), types.FunctionType))


def _inside(held: Sequence[Any]) -> Iterator[Any]:
    """What containers hold, and closures of functions and of methods. Dynamo compares functions and classes among these as they
    are, and guards none that it does not call; it does guard plain values."""
    seen = set[int]()
    for x in held:
        if isinstance(x, _ORDERED):
            yield from x
            yield from x.values() if isinstance(x, dict) else ()
        elif isinstance(x, (types.FunctionType, types.MethodType)):
            yield from _closure(x)
        for cls in (*type(x).__mro__, *(x.__mro__ if isinstance(x, type) else ())):
            if id(cls) not in seen and not _is_known(cls.__module__):
                for entry in vars(cls).values():
                    yield from _closure(entry)
            seen.add(id(cls))


def _closure(held: Any) -> Iterator[Any]:
    """Of a function or method, or an entry of a class."""
    if isinstance(held, property):
        for function in (held.fget, held.fset, held.fdel):
            yield from _closure(function)
    held = held.__func__ if isinstance(held, (types.MethodType, classmethod, staticmethod)) else held
    for cell in (held.__closure__ or ()) if isinstance(held, types.FunctionType) else ():
        with contextlib.suppress(ValueError):  # not assigned yet
            yield cell.cell_contents


def _identities(held: Sequence[Any], plain: bool) -> list[int]:
    """Equal numbers for what is one object, or one class of objects, in the order in which they come. ``plain``: also of plain
    values, which only the user's code compares so."""
    numbers: dict[Any, int] = {}
    found = list[int]()

    def note(key: Any) -> bool:
        new = key not in numbers
        found.append(numbers.setdefault(key, len(numbers)))
        return new

    for x in held:
        if type(x) in PLAIN and not plain:
            continue
        if isinstance(x, (types.MethodType, types.BuiltinMethodType)):  # made anew whenever it is read
            note((id(x.__self__), id(getattr(x, "__func__", None)), x.__name__))
        else:
            note(id(x))
        for cls in (type(x), x) if isinstance(x, type) else (type(x),):
            if note(("class", id(cls))):
                for base in cls.__mro__:
                    note(id(base))
    return found


def _members(cls: Any, once: Sequence[Any], classes: Sequence[type], types_of: Sequence[type]) -> Any:
    """Which objects and classes are of an abstract class: any may be registered with it, or have what a protocol asks for."""
    asks = [(issubclass, each) for each in (*classes, *types_of)]
    if getattr(cls, "_is_protocol", False):  # what an instance has counts
        asks += [(isinstance, each) for each in once]
    found = list[Any]()
    for ask, each in asks:
        try:
            found.append(ask(each, cls))
        except TypeError:  # of a protocol that is not for this
            found.append(None)
    return found


def _built_in(asked: Asked) -> Any:
    """Which built-in names modules of traced code have of their own, and what the others are."""
    own = [(module, name) for module, names in asked.built_in.items() for name in names if name in vars(sys.modules[module])]
    used = {name for names in asked.built_in.values() for name in names} | {
        name for name in asked.names or () if name in vars(builtins)}
    return own, [(name, fact(vars(builtins)[name], True)) for name in sorted(used)]


def _names_of(module: types.ModuleType, names: frozenset[str]) -> list[str]:
    """Those of ``names`` that a module has, or gets when it is asked; of a known one those that it says."""
    if "__getattr__" in vars(module) and not _is_known(module.__name__):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return sorted(name for name in names if hasattr(module, name))
    return sorted(names.intersection(dir(module)))


def _own(held: Any) -> Any:
    """What an object has by itself, and what a tensor tells of gradients."""
    if isinstance(held, torch.Tensor):
        return held.is_leaf, bool(held._backward_hooks)
    if isinstance(held, (type, types.ModuleType)) or type(held).__module__.startswith(_LAZY):
        return None
    held = held.__func__ if isinstance(held, types.MethodType) else held
    try:
        return tuple(object.__getattribute__(held, "__dict__"))
    except AttributeError:
        return None


def _order(source: str, held: Any) -> Any:
    """Of the plain entries of a set. Strings are in another order in each process, so that a trace which reads a set of them is
    of use to none but those with the same PYTHONHASHSEED."""
    module = _IMPORTED.match(source)
    if module is not None and is_known(module[1].replace("_dot_", ".")):
        return None
    return [(type(x).__name__, repr(x)) for x in held if type(x) in PLAIN]
