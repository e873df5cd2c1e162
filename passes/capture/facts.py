"""What a trace depends on, as facts that another process can compare.

Dynamo guards everything that it built into a graph: ``L['self'].config.x == 3``, a function by its identity. A process that
finds the graph on disk has other objects, so each guard becomes a ``Check``: the Python expression of what was read, and a fact
about it that means the same in every process (a plain value; the code of a function or class; the metadata of a tensor). A
guard without such a fact makes the trace one that is not kept (``NotPortable``).
"""

from __future__ import annotations

import contextlib
import enum
import functools
import hashlib
import inspect
import marshal
import os
import re
import sys
import types
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch._dynamo.source import AttrSource, NNModuleSource

from quire.attn_ops.tuning.store import device_name
from quire.passes.capture.followed import is_known
from quire.passes.fx import text_of

#: Guards on the state of the process, which ``environment`` has, and on sizes, which a kept graph asserts by itself.
_PROCESS = frozenset({"GRAD_MODE", "DETERMINISTIC_ALGORITHMS", "GLOBAL_STATE", "TORCH_FUNCTION_STATE", "DEFAULT_DEVICE",
                      "AUTOGRAD_SAVED_TENSORS_HOOKS", "FSDP_TRAINING_STATE", "SHAPE_ENV"})
#: By what a guard compares: the value itself, its length, or its keys.
_VALUE = frozenset({"CONSTANT_MATCH", "EQUALS_MATCH", "ID_MATCH", "BUILTIN_MATCH", "FUNCTION_MATCH", "CLOSURE_MATCH",
                    "CLASS_MATCH", "MODULE_MATCH", "BOOL_MATCH", "NONE_MATCH", "TENSOR_MATCH", "RANGE_ITERATOR_MATCH"})
_LENGTH = frozenset({"SEQUENCE_LENGTH", "EMPTY_NN_MODULE_HOOKS_DICT"})
_KEYS = frozenset({"DICT_KEYS_MATCH", "MAPPING_KEYS_CHECK"})
#: By the kind of a guard: whether an object has a name.
LOOKUPS = {"HASATTR": hasattr, "NOT_PRESENT_IN_GENERIC_DICT": lambda held, name: name in held.__dict__,
           "DICT_CONTAINS": lambda held, name: name in held, "DICT_NOT_CONTAINS": lambda held, name: name in held,
           "SET_CONTAINS": lambda held, name: name in held, "SET_NOT_CONTAINS": lambda held, name: name in held}
PLAIN = (bool, int, float, complex, str, bytes, type(None), type(...))
TORCH_VALUES = (torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size)
_BUILTIN = (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType, types.MethodWrapperType,
            types.ClassMethodDescriptorType, types.GetSetDescriptorType)
#: Modules and packages whose built-in functions compute from their arguments, or ask for what ``environment`` has.
_COMPUTING = ("builtins", "math", "cmath", "_operator", "itertools", "_functools", "_collections", "torch")
_ENTRIES = (types.FunctionType, classmethod, staticmethod, property, *PLAIN)  # of a class
_IMPORTED = re.compile(r"G\['(__import_\w+)'\]")
_PACKAGES = ("torch", "transformers", "triton", "peft", "torchao", "bitsandbytes", "accelerate")
#: Functions whose results Dynamo takes for constants, and which follow from the version of PyTorch.
_OF_VERSION = frozenset(("transformers.utils.import_utils", name) for name in (
    "is_torch_available", "get_torch_version", "is_torch_greater_or_equal", "is_torch_less_or_equal"))
_OF_SOURCE = frozenset({"__module__", "__doc__", "__firstlineno__"})  # of a class, without effect
#: Of nn.Module: what the first compilation of a process replaces, and what transformers adds when it makes weights.
_OF_DYNAMO = _OF_SOURCE | {"__init__", "__setstate__", "___needs_generation_tag_patch", "smart_apply"}
_CONTAINERS = (dict, list, tuple, set, frozenset, OrderedDict, defaultdict)
_MOST = 1000  # entries of a container
_NO_MATTER = frozenset({"debug_dir_root"})  # of Dynamo's options: by default in the folder in which the process started


class NotPortable(Exception):
    """What a trace read has no meaning in another process; says what."""


class Check(NamedTuple):
    """``fact`` of what the expression ``source`` gives, compared as guards of this ``kind`` do; ``name``: what they look up."""

    source: str
    kind: str
    name: Any
    fact: Any


class Values:
    """What expressions of a trace give now; each is evaluated once. ``scope``: of the names in them."""

    def __init__(self, scope: Mapping[str, Any]) -> None:
        self.scope = dict(scope)  # to which eval adds __builtins__
        self._held: dict[str, Any] = {}

    def __getitem__(self, source: str) -> Any:
        """Raises NotPortable if it cannot be evaluated."""
        if source not in self._held:
            try:
                self._held[source] = eval(compiled(source), self.scope)
            except Exception as error:
                raise NotPortable(f"{source} cannot be evaluated ({type(error).__name__}: {error})") from error
        return self._held[source]

    def evaluate(self, sources: Sequence[str], code: bytes) -> None:
        """Evaluate ``sources`` at once, by the ``code`` that ``together`` gave. Where that fails, each waits for its turn."""
        with contextlib.suppress(Exception):
            self._held.update(zip(sources, eval(marshal.loads(code), self.scope), strict=True))


def together(sources: Sequence[str]) -> bytes:
    """Code for ``Values.evaluate`` in this version of Python: expressions take longer to compile than to compare."""
    return marshal.dumps(compile(f"({', '.join(sources)},)", "<guards>", "eval"))


def checks(guards: Iterable[Any], values: Values, more: Iterable[str] = ()) -> list[Check]:
    """The guards of a trace, as ``guard_filter_fn`` gets them, with the facts of now. ``values``: of their expressions, and of
    ``more``, plain ones without a guard. Raises NotPortable if one has no fact that means the same in another process."""
    _class_digest.cache_clear()
    found: dict[tuple[str, str, Any], Check] = {}
    for each in more:
        found[each, "CONSTANT_MATCH", None] = Check(each, "CONSTANT_MATCH", None, _look(each, "CONSTANT_MATCH", None, values))
    for guard in guards:
        kind, name = guard.guard_type, None
        if kind in _PROCESS:
            continue
        for module in _IMPORTED.findall(guard.name):  # Dynamo keeps the first module that it met under a name
            if sys.modules.get((held := values.scope["G"][module]).__name__) is not held:
                raise NotPortable(f"the module {held.__name__}, which was imported again")
        source = guard.name
        if kind == "DUPLICATE_INPUT":
            name = text_of(_argument(guard, "source_b"))
        elif kind in LOOKUPS:
            source, name = looked_up(guard)
        key = (source, kind, name)
        if key not in found:
            found[key] = Check(*key, _look(*key, values))
    return list(found.values())


def module_names(kept: Iterable[Check], values: Values) -> set[str]:
    """The Python modules of what the expressions give, and of their classes."""
    found = set[str]()
    for source in {check.source for check in kept}:
        held = values[source]
        for each in (held, type(held)):
            name = each.__name__ if isinstance(each, types.ModuleType) else getattr(each, "__module__", None)
            found |= {name} if isinstance(name, str) else set()
    return found


def difference(kept: Iterable[Check], values: Values) -> str | None:
    """The first expression of which the fact is not what it was, or None."""
    _class_digest.cache_clear()
    for check in kept:
        try:
            now = _look(check.source, check.kind, check.name, values)
        except Exception as error:  # what was read is gone, or something else
            return f"{check.source}: {error}"
        if now != check.fact:
            return f"{check.source} ({check.kind})"
    return None


def _argument(guard: Any, name: str) -> Any:
    create = guard.orig_guard.create_fn  # a partial
    keywords = getattr(create, "keywords", None) or {}
    if name in keywords:
        return keywords[name]
    if getattr(create, "args", ()):
        return create.args[0]
    raise NotPortable(f"a guard {guard.guard_type} without {name}")


def looked_up(guard: Any) -> tuple[str, Any]:
    """Where a guard of one of LOOKUPS looks, and the name that it looks up. Raises NotPortable if that is no plain value."""
    if guard.guard_type == "HASATTR":
        return _attribute(guard)
    name = _argument(guard, "attr" if guard.guard_type == "NOT_PRESENT_IN_GENERIC_DICT" else "key")
    if type(name) not in PLAIN:
        raise NotPortable(f"a look-up of {name!r} in {guard.name}")
    return guard.name, name


def _attribute(guard: Any) -> tuple[str, str]:
    """Whose attribute a guard HASATTR is about, and its name. In torch 2.11 the guard is on the attribute itself."""
    source = guard.orig_guard.originating_source
    if getattr(guard.orig_guard.create_fn, "keywords", None):
        return guard.name, _argument(guard, "attr")
    if isinstance(source, NNModuleSource):
        source = source.base
    if not isinstance(source, AttrSource):
        raise NotPortable(f"a guard HASATTR on {guard.name}")
    return text_of(source.base), source.member


def _look(source: str, kind: str, name: Any, values: Values) -> Any:
    held = values[source]
    if kind == "DUPLICATE_INPUT":
        return held is values[name]
    if kind == "ID_MATCH" and isinstance(held, types.FunctionType) and not is_known(held.__module__):
        raise NotPortable(f"{held.__qualname__}, which Dynamo does not look into")  # substitute_in_graph
    if kind == "TYPE_MATCH":  # whether a container is empty is read, and not always guarded
        return fact(type(held)), len(held) if type(held) in _CONTAINERS else None
    if kind in _VALUE:
        return fact(held)
    if kind in _LENGTH:
        return len(held)
    if kind in _KEYS:
        return type(held).__name__, [fact(key) for key in held]
    if kind in LOOKUPS:
        return LOOKUPS[kind](held, name)
    raise NotPortable(f"a guard {kind} on {source}")


@functools.lru_cache(maxsize=16384)
def compiled(source: str) -> types.CodeType:
    return compile(source, "<guard>", "eval")


def fact(held: Any, inside: bool = False) -> Any:
    """What is equal for ``held`` in every process; of objects ``inside`` a closure or class the name. Raises NotPortable."""
    if type(held) in PLAIN:
        return type(held).__name__, repr(held)
    if isinstance(held, TORCH_VALUES):
        return type(held).__name__, str(held)
    if isinstance(held, enum.Enum):
        return _name(type(held)), held.name, repr(held.value), _class_digest(type(held))
    if isinstance(held, type):
        return ("class", _name(held)) if inside else ("class", _name(held), _class_digest(held))
    if held is os.getenv:
        raise NotPortable("an environment variable, of which Dynamo says nothing")
    if isinstance(held, types.FunctionType):
        if getattr(held, "_dynamo_marked_constant", False) and (held.__module__, held.__name__) not in _OF_VERSION:
            raise NotPortable(f"{held.__qualname__}, whose result Dynamo takes for a constant")
        return _function(held)
    if isinstance(held, types.CodeType):
        return "code", _code_digest(held)
    if isinstance(held, (classmethod, staticmethod)):
        return type(held).__name__, fact(held.__func__, inside)
    if isinstance(held, property):
        return "property", [None if f is None else fact(f, inside) for f in (held.fget, held.fset, held.fdel)]
    if isinstance(held, types.MethodType):
        return "method", fact(held.__func__, inside), _name(type(held.__self__))
    if isinstance(held, _BUILTIN):
        module = getattr(held, "__module__", None) if isinstance(held, types.BuiltinFunctionType) else None
        if not inside and module is not None and module.partition(".")[0] not in _COMPUTING:
            raise NotPortable(f"{module}.{held.__qualname__}, whose result may follow from more than its arguments")
        return "builtin", str(getattr(held, "__module__", None)), held.__qualname__
    if isinstance(held, types.ModuleType):
        return "module", held.__name__
    if isinstance(held, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return "op", str(held)
    if isinstance(held, functools.partial):
        return "partial", fact(held.func, inside), fact(held.args, inside), fact(held.keywords, inside)
    if isinstance(held, torch.Tensor):
        return ("tensor", _name(type(held)), str(held.dtype), str(held.device), tuple(held.shape), tuple(held.stride()),
                held.requires_grad)
    if isinstance(held, (list, tuple, dict, set, frozenset, range)) and len(held) <= _MOST:
        entries = held.items() if isinstance(held, dict) else held
        made = [fact(entry, inside) for entry in entries]
        return _name(type(held)), sorted(made, key=repr) if isinstance(held, (set, frozenset)) else made
    for name in ("__wrapped__", "func"):  # of functools: cache, cached_property, partialmethod
        if isinstance(getattr(held, name, None), types.FunctionType):
            return _name(type(held)), fact(getattr(held, name), inside)
    if inside:
        return "object", _name(type(held))
    raise NotPortable(f"an object of {_name(type(held))}")


def _name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _function(function: types.FunctionType) -> Any:
    cells = [_cell(cell) for cell in function.__closure__ or ()]
    return ("function", function.__module__, function.__qualname__, _code_digest(function.__code__),
            [fact(value, True) for value in function.__defaults__ or ()],
            [(name, fact(value, True)) for name, value in (function.__kwdefaults__ or {}).items()], cells,
            () if is_known(function.__module__) else tuple(function.__dict__))


def _cell(cell: types.CellType) -> Any:
    try:
        held = cell.cell_contents
    except ValueError:
        return "empty"
    if isinstance(held, types.FunctionType):  # that a decorator wraps. Its code, not more: functions may hold each other
        return "function", _code_digest(held.__code__)
    if isinstance(held, type):
        return "class", _name(held)
    return fact(held) if type(held) in PLAIN else _name(type(held))


@functools.lru_cache(maxsize=16384)
def _code_digest(code: types.CodeType) -> str:
    """Of the instructions and constants of a function, whatever its file and lines."""
    digest = hashlib.blake2b(code.co_code, digest_size=12)
    constants = [_code_digest(c) if isinstance(c, types.CodeType) else sorted(map(repr, c)) if isinstance(c, frozenset) else
                 (type(c).__name__, repr(c)) for c in code.co_consts]
    digest.update(repr((code.co_flags, code.co_argcount, code.co_kwonlyargcount, code.co_posonlyargcount, code.co_names,
                        code.co_varnames, code.co_freevars, code.co_cellvars, constants)).encode())
    return digest.hexdigest()


@functools.cache  # for one comparison: methods can be replaced
def _class_digest(cls: type) -> str:
    """Of the methods and plain attributes of a class and its bases, the members of an enum, and of a class of the user's for
    classes; of the user's classes also the names of other attributes."""
    digest = hashlib.blake2b(digest_size=12)
    for base in (*cls.__mro__, *inspect.getmro(type(cls))):
        if base.__module__ in ("builtins", "abc", "enum"):
            continue
        digest.update(_name(base).encode())
        for name, entry in sorted(vars(base).items()):
            if name in (_OF_DYNAMO if base is torch.nn.Module else _OF_SOURCE):
                continue
            if isinstance(entry, enum.Enum):
                digest.update(repr((name, entry.name, entry.value)).encode())
            elif isinstance(entry, _ENTRIES) or type(entry).__module__ == "functools":
                digest.update(repr((name, fact(entry, True))).encode())
            elif not (is_known(base.__module__) or name.startswith("__")):  # it has the name; Python adds __annotations__ late
                digest.update(repr((name, _name(type(entry)))).encode())
    return digest.hexdigest()


def _named(option: Any) -> str:
    """One of a set of options: a function, which Dynamo leaves out or moves, by its name, which all processes have."""
    name = getattr(option, "__qualname__", None)
    return repr(option) if name is None else f"{option.__module__}.{name}"


def environment(device: torch.device) -> str | None:
    """The state of this process and thread that Dynamo guards, the versions of what traces, and what a forward on ``device``
    may ask about the machine. None while a mode of PyTorch or a hook of all modules is active: Dynamo has no guard for them."""
    from torch.overrides import _len_torch_function_stack
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    if _len_torch_function_stack() or _get_current_dispatch_mode_stack() or any(
            held for name, held in vars(torch.nn.modules.module).items() if name.startswith("_global_") and "hooks" in name):
        return None
    casts = [(kind, torch.is_autocast_enabled(kind), str(torch.get_autocast_dtype(kind))) for kind in ("cpu", "cuda")]
    packages = {name: getattr(sys.modules.get(name), "__version__", None) for name in _PACKAGES}
    options = sorted((name, sorted(map(_named, value)) if isinstance(value, (set, frozenset)) else repr(value))
                     for name, value in torch._dynamo.config.save_config_portable().items()
                     if name not in _NO_MATTER and isinstance(value, (*PLAIN, set, frozenset, list, tuple)))
    group = torch.distributed
    world = (group.get_rank(), group.get_world_size()) if group.is_available() and group.is_initialized() else None
    machine = (world, device_name(device), torch.cuda.get_device_capability(device) if device.type == "cuda" else
               torch.backends.cpu.get_cpu_capability(), torch.cuda.device_count(), sys.platform)
    flags = (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled(),
             torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32, torch.is_autocast_cache_enabled())
    return repr((sys.version, torch.version.git_version, packages, machine, options, flags, casts, torch.get_default_dtype(),
                 str(torch.get_default_device()), str(torch._dynamo.eval_frame._stance.stance)))
