"""What a trace read of the model and of the modules of its code: Dynamo's guards say so, which a whole-model trace drops."""

from __future__ import annotations

import collections
import enum
import functools
import os
import re
import types
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch

from quire.passes.capture.facts import LOOKUPS, NotPortable, compiled, looked_up
from quire.passes.fx import text_of

#: A module, and what of it whoever compares modules compares, where ``Reads._to_compare`` finds that it does. All that lies
#: deeper is compared here.
_PART = r"self\._call(\._modules\['[^']*'\])*"
_MODULE = re.compile(_PART)
_OF_CLASS = re.compile(rf"(dict\(type\({_PART}\)\.__dict__\)\['|type\({_PART}\)\.)(?!__)\w+('\])?")
_OF_MODULE = re.compile(rf"{_PART}|{_PART}\.\w+(\['\w+'\])?|{_OF_CLASS.pattern}|type\({_PART}\)|"
                        rf"{_PART}\._(forward|backward|state)\w*hooks\w*")
#: A tensor, container or object that a module holds, after the module.
_HELD = re.compile(rf"({_PART})\.(?!_modules\b|_\w*hooks)(?P<name>\w+)(?P<key>\['\w+'\])?")
_OF_CONFIG = re.compile(rf"(?P<module>{_PART})(?P<configs>(\.\w*config\w*)+)\.(?P<name>\w+)")
_OF_TORCH = re.compile(rf"{_PART}\._(parameters|buffers)(\['\w+'\])?")
#: An imported module, and Python modules that no user patches, whose state changes by itself.
_IMPORT = re.compile(r"G\['__import_(\w+)'\]")
_OURS = re.compile(r"G\['(__import_(quire_dot_|torch_dot__|builtins)|__builtins_dict|(?!__import_|___unnamed_scope))")
_UNNAMED = re.compile(r"G\['___unnamed_scope\w*'\](?=\[)")  # globals of code that is in no module
#: Memory that quire owns, which holds no settings.
_PLACES = re.compile(r"self\.places\b")
_ENVIRONMENT: dict[Any, Any] = getattr(os.environ, "_data", {})
_CONTAINERS = (list, tuple, dict, set, frozenset, collections.deque)
_PLAIN = frozenset((bool, int, float, complex, str, bytes, type(None)))
#: Names, and (expression, kind and name of a _Part, name for users) of each source.
Stored = tuple[list[str], list[tuple[str, str, Any, str]]]
_KEYS = ("DICT_KEYS", "MAPPING_KEYS")  # beginnings of types of guards
#: Guards on an object that a module holds: its class, and names that it has, or lacks so that its class's are read.
_OF_OBJECT = frozenset({"HASATTR", "TYPE_MATCH", "NOT_PRESENT_IN_GENERIC_DICT"})
#: Names that a module lacks, and its class may have, of which whoever compares modules knows.
_KNOWN = frozenset(("forward", "gradient_checkpointing", "_gradient_checkpointing_func"))
_GRADIENT = "requires_grad"

# What whoever compares modules compares is said here for both sides.
MAX_ENTRIES = 1000  # of a container and those inside it; larger ones are data, and slow to compare
#: Methods that an instance may have in place of its class's, without effect on a forward that does not read them.
METHODS = frozenset((*dir(torch.nn.Module), "generate", "save_pretrained"))
#: Fields that choose an implementation; quire sets them to its own name while it traces.
IMPLEMENTATIONS = ("_attn_implementation_internal", "_experts_implementation_internal")
# Fields of a config without effect on a forward that does not read them, some of which saving a model sets.
_UNREAD_FIELDS = frozenset(("architectures", "auto_map", "dtype", "name_or_path", "torch_dtype", "transformers_version",
                            "use_cache"))


def is_config(name: str, value: Any) -> bool:
    """Whether an attribute is a config: the same object is expected, and its fields are compared."""
    return "config" in name and name != "generation_config" and hasattr(value, "__dict__") and not callable(value)


def is_field(name: str) -> bool:
    """Whether a field is compared with its config; another is compared here if it was read."""
    return name[0] != "_" and name not in _UNREAD_FIELDS and not name.endswith("token_id")


_IS = "is"


class _Part(NamedTuple):
    """What of an object was read: the object or its length (""), its keys ("keys"), whether it is what the expression ``name``
    gives ("is"), or whether it has ``name``, as the guards of this ``kind`` ask. Of a tensor "" is its shape, dtype, device and
    strides, and there is "requires_grad"."""

    kind: str = ""
    name: Any = None

    def __str__(self) -> str:
        if self.kind == _IS:
            return f" is {readable(self.name)}"
        return f" has {self.name}" if self.kind in LOOKUPS else f" {self.kind}" * bool(self.kind)


class Reads:
    """What a trace read. ``names``: every attribute name and key in the sources and arguments of its guards. ``gradients``: it
    may have read ``requires_grad`` of any tensor, and not only where guards say so."""

    def __init__(self) -> None:
        self.names, self.gradients = set[str](), False
        # Name for users and code, by (Python expression, what of it).
        self._sources: dict[tuple[str, _Part], tuple[str, types.CodeType]] = {}
        self._scope: dict[str, Any] = {}

    def add(self, guards: Iterable[Any], owner: Any, scope: Mapping[str, Any]) -> None:
        """Note the guards, as ``guard_filter_fn`` gets them, of the trace of a method of ``owner``. ``scope``: its globals."""
        self._scope = {"self": owner, "G": scope}
        for guard in guards:
            self.names |= _arguments(guard) | set(re.findall(r"[A-Za-z_]\w*", guard.name))
            where, part = guard.name, _Part("keys" if guard.guard_type.startswith(_KEYS) else "")
            if guard.guard_type in LOOKUPS:
                try:
                    where, name = looked_up(guard)
                    part = _Part(guard.guard_type, name)
                except NotPortable:  # a key that is an object: all keys
                    part = _Part("keys")
            source = _of_scope(where)
            if not source or _OURS.match(source) or _PLACES.match(source):
                continue
            try:
                code = compiled(source)
            except SyntaxError:  # what Dynamo says of no variable
                continue
            if guard.guard_type == "DUPLICATE_INPUT":
                part, held = _Part(_IS, _of_scope(_other_name(guard))), self._evaluated(code)
                if held is not None and not isinstance(held, types.ModuleType) and held is self._evaluated(compiled(part.name)):
                    self._sources[source, part] = f"{readable(source)}{part}", code
                continue
            for each in self._to_compare(source, code, part, guard.guard_type):
                self._sources[source, each] = f"{readable(source)}{each}", code

    def _to_compare(self, source: str, code: types.CodeType, part: _Part, kind: str) -> list[_Part]:
        """What to compare of what a guard of this ``kind`` is on; nothing of what whoever compares modules does."""
        inside, match, of_class = _OF_MODULE.fullmatch(source), _HELD.fullmatch(source), _OF_CLASS.fullmatch(source)
        held = None if inside and not match and not of_class else self._evaluated(code)
        if isinstance(held, torch.Tensor):
            if part.kind in LOOKUPS:
                return [part]
            asked = kind == "TYPE_MATCH" or (self.gradients and kind == "TENSOR_MATCH")  # Dynamo guards the type of one asked
            own = _OF_TORCH.fullmatch(source) is not None
            return [_Part()] * (not own) + [_Part(_GRADIENT)] * asked
        if isinstance(held, (dict, set, frozenset)) and not held and not part.kind:
            part = _Part("keys")  # whether one is empty is read, and not always guarded
        if not inside:
            return [part] * (part.kind in LOOKUPS or not self._is_in_config(source, held))
        if _MODULE.fullmatch(source):  # what comes may be a tensor or an object
            return [part] * (part.kind in LOOKUPS and part.name not in _KNOWN)
        if of_class:
            return [part] * (part.kind in LOOKUPS or not _is_whole(held))
        if match is None or _OF_TORCH.fullmatch(source) or held is None:
            return []
        name, own_values = match["name"], vars(self._evaluated(compiled(match[1])))
        within = own_values.get(name)
        if match["key"] and (not isinstance(within, dict) or len(within) > MAX_ENTRIES or is_config(name, within)):
            return [part]
        if isinstance(held, _CONTAINERS) and not is_config(name, held):
            return [part] if self._may_have_data(held, match[1], kind) else []
        if part.kind in LOOKUPS:
            return [part]
        if name not in own_values:  # of a slot, or a property
            return [part] * (not callable(held))
        stand_in = callable(held) and name in METHODS - _KNOWN and not match["key"]
        return [part] * (stand_in or not (_is_whole(held) or is_config(name, held)))

    def _is_in_config(self, source: str, held: Any) -> bool:
        """Whether this is a field that whoever compares modules compares, of a config that it finds."""
        match = _OF_CONFIG.fullmatch(source)
        if match is None or not (_is_whole(held) or is_config(match["name"], held)):
            return False
        holder = getattr(self._evaluated(compiled(match["module"])), "__dict__", {})
        for depth, name in enumerate(match["configs"].split(".")[1:]):
            if not is_config(name, holder.get(name)) or (depth and not is_field(name)):
                return False
            holder = vars(holder[name])
        name = match["name"]
        return name in holder and (is_field(name) or name in IMPLEMENTATIONS) and not (callable(held) and name in METHODS)

    def _may_have_data(self, held: Any, owner: str, kind: str) -> bool:
        """Whether a container of a module has tensors, or may get them, which who compares modules does not see."""
        values = held.values() if isinstance(held, dict) else held
        if not any(isinstance(x, torch.Tensor) for x in values) and type(
                self._evaluated(compiled(owner))).__module__.startswith("peft."):  # which have none
            return False
        return not held or not isinstance(held, dict) or kind in LOOKUPS or kind.startswith(_KEYS)

    def _evaluated(self, code: types.CodeType) -> Any:
        """What a source is now; None if it is gone."""
        try:
            return eval(code, dict(self._scope))  # to which it adds __builtins__
        except Exception:
            return None

    def now(self, source: str) -> Any:
        """What an input of the graph is now, by Dynamo's name of it; None if it is gone."""
        try:
            return eval(compiled(source), {"L": {"self": self._scope["self"]}, "G": self._scope["G"]})
        except Exception:
            return None

    def stored(self) -> Stored:
        """What was read, for ``restore`` in another process."""
        return sorted(self.names), [(source, *part, shown) for (source, part), (shown, _) in self._sources.items()]

    def restore(self, stored: Stored, owner: Any, scope: Mapping[str, Any]) -> None:
        """Take over what ``stored`` gave for a trace of the same. Arguments: of ``add``."""
        names, sources = stored
        self.names, self._scope = set(names), {"self": owner, "G": scope}
        self._sources = {(source, _Part(kind, name)): (shown, compiled(source)) for source, kind, name, shown in sources}

    def values(self) -> dict[str, Any]:
        """Current values of what was read outside modules and configs, by the name users know: plain values, functions, classes
        of other objects, lengths and keys of containers, and whether an object has an attribute."""
        found: dict[str, Any] = {}
        names: dict[int, str] = {}  # of tensors: the trace has one input for all names of one
        scope = dict(self._scope)  # eval adds __builtins__
        for (_, part), (name, code) in self._sources.items():
            try:
                held = eval(code, scope)
            except Exception:  # it is gone
                continue
            fact: Any
            if part.kind == _IS:
                fact = held is self._evaluated(compiled(part.name))
            elif part.kind in LOOKUPS:
                try:
                    fact = LOOKUPS[part.kind](held, part.name)
                except Exception:  # it is another object, which cannot be asked
                    fact = type(held)
            elif isinstance(held, torch.Tensor):
                fact = held.requires_grad if part.kind == _GRADIENT else _metadata(held)
                if not part.kind and (first := names.setdefault(id(held), name)) != name:
                    fact += f", the same as {first}"
            elif held is os.getenv or held is _ENVIRONMENT:  # Dynamo has no guard for names that it lacks
                fact = f"variables {hash(frozenset(_ENVIRONMENT.items())):x}"  # changes are logged, and values may be secret
            elif isinstance(held, tuple) and _is_constant(held):
                fact = held
            elif isinstance(held, (list, tuple, collections.deque)):
                name, fact = f"{name} length", len(held)
            elif isinstance(held, (dict, set, frozenset)):
                fact = list(held) if part.kind else None
            elif isinstance(held, types.ModuleType):
                continue
            else:
                fact = held if callable(held) or _is_constant(held) else type(held)
            while name in found:  # two hooks of one module
                name += "'"
            found[name] = fact
        return found


def _metadata(held: torch.Tensor) -> str:
    strides = f", strides {held.stride()}" if held.layout is torch.strided and not held.is_contiguous() else ""
    return f"{type(held).__name__} {tuple(held.shape)}, {held.dtype}, {held.device}{strides}"


def _is_constant(held: Any) -> bool:
    """Whether Dynamo compares it as a whole, and reads nothing inside."""
    if isinstance(held, tuple):
        return all(map(_is_constant, held))
    return type(held) in _PLAIN or isinstance(held, (enum.Enum, torch.dtype, torch.device, torch.layout, torch.memory_format))


def _of_scope(source: str) -> str:
    """Dynamo's name of an object, for the scope of ``Reads``."""
    source = re.sub(r"L\['self'\]", "self", source)
    return source.replace(".__dict__['_modules']", "._modules")  # through a ``__getattr__`` of PEFT's


def _other_name(guard: Any) -> str:
    """Of a guard that two names are one object: the other name."""
    create = guard.orig_guard.create_fn  # a partial
    return text_of(create.keywords["source_b"] if create.keywords else create.args[0])


def _is_whole(held: Any) -> bool:
    """Whether the same or an equal object is all that a guard on it asks, and whoever compares modules compares that."""
    return callable(held) or (_is_constant(held) and not (isinstance(held, tuple) and len(held) > MAX_ENTRIES))


@functools.lru_cache(maxsize=4096)
def readable(source: str) -> str:
    """Dynamo's name of an object for users: ``L['self']._call._modules['layers']`` is ``model.layers``."""
    where, hook, rest = source.partition("._forward_")
    where = re.sub(r"^(dict\(type\()?(L\['self'\]|self)(\._call\b)?", "model", where)
    where = re.sub(r"\)(?:\.__mro__\[\d+\])?\.__dict__\)\['(\w+)'\]", r".\1", where)
    where = re.sub(r"\._(?:modules|parameters|buffers)\['(\w+)'\]", r".\1", where)
    where = _UNNAMED.sub("G", where)
    where = _IMPORT.sub(lambda match: match[1].replace("_dot_", "."), where)
    if not hook:
        return re.sub(r"^G\['(\w+)'\]", r"\1", where)
    attribute = re.findall(r"(?:\.(?!__)|\[')(\w+)", rest)
    last = f" ({attribute[-1]})" if attribute and attribute[-1] not in ("keys", "_", "cell_contents") else ""
    return f"what a hook of {where} holds{last}"


def is_code_of(function: Any, *packages: str) -> bool:
    """Whether a function, and what it wraps, is code of these packages; ``__module__``, which wraps copies, does not tell."""
    while function is not None:
        function = getattr(function, "__func__", function)
        scope = getattr(function, "__globals__", None)
        module = str(getattr(function, "__module__", "") if scope is None else scope.get("__name__", ""))
        if module.partition(".")[0] not in (*packages, "contextlib"):
            return False
        function = getattr(function, "__wrapped__", None)
    return True


def _arguments(guard: Any) -> set[str]:
    """The names in the arguments of a guard, such as those that were looked up in vain."""
    create = getattr(getattr(guard, "orig_guard", None), "create_fn", None)  # a partial
    arguments = (*getattr(create, "args", ()), *(getattr(create, "keywords", None) or {}).values())
    return {value for value in arguments if isinstance(value, str)}
