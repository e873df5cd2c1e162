"""Notices that a model is no longer the one that was traced.

A traced graph has constants: the model's modules, hooks, settings and the code of its classes. Weights updated in place reach
it; other changes do not. So the engine compares: the whole model when it gets work after it was idle (``change``), and while it
is busy a few modules per step (``next_change``). After a change it traces the model again.

Compared is what the trace read, by Dynamo's guards: attributes that are plain values, functions, or lists, dicts and sets of
these; fields of the configs that modules hold; attributes of the classes; and what was read elsewhere, in Python modules,
closures, and objects that modules or hooks hold. In addition the hooks, with what they read beside their arguments (closures,
globals, the object of a bound method), which modules there are, tensors' shapes, strides, dtypes, devices and quantization,
whether they need gradients where that was read, addresses where a CUDA graph has captured them, and the versions of buffers
whose values were read. Not compared: the values of tensors that are neither parameters nor buffers, which the graph reads.
"""

from __future__ import annotations

import dis
import enum
import functools
import inspect
import types
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch.nn.modules import module as global_hooks

from quire.graph_runner.glance import CONTAINERS, Glance, Items, is_plain
from quire.graph_runner.model_parts import Apart, children, entries, named_parts
from quire.graph_runner.on_instance import OnInstance, class_of
from quire.passes.capture.evaluating import only_marks
from quire.passes.capture.hf_interface import NAME, functions_of
from quire.passes.capture.own_masks import read_by_masks
from quire.passes.capture.reads import IMPLEMENTATIONS, MAX_ENTRIES, METHODS, is_code_of, is_config, is_field
from quire.passes.tensor_version import version_of as _version
from quire.passes.verify.quantized import addresses as addresses_of
from quire.passes.verify.quantized import kind_of

_OTHER = object()  # stands for what is not compared
_OWN = frozenset(vars(torch.nn.Module()))  # attributes of every module; its hooks and children are compared separately
# Of transformers' modules: read in training mode only, in which nothing is traced.
_CHECKPOINTING = frozenset(("gradient_checkpointing", "_gradient_checkpointing_func"))
# Methods of a class that every call of a module goes through.
_CALLS = frozenset(("forward", "__call__", "__getattr__", "__getattribute__"))


class _Same:
    """Equal to the same object only, which it keeps alive: an ``id`` could be reused. A function's code, in whose place
    IPython's autoreload puts another, must be the same too."""

    __slots__ = ("code", "it")

    def __init__(self, it: Any) -> None:
        function = it.__func__ if isinstance(it, (types.MethodType, staticmethod)) else it
        self.it, self.code = it, function.__code__ if isinstance(function, types.FunctionType) else None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.it is other.it and self.code is other.code

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        named = isinstance(self.it, type) or inspect.isroutine(self.it)  # an object may make any attribute up
        return (getattr(self.it, "__qualname__", None) if named else None) or f"a {type(self.it).__name__}"


class _Typed(NamedTuple):
    """What equals objects of other types, such as True and 1, with its type."""

    kind: type
    value: Any

    def __repr__(self) -> str:
        return repr(self.value)


class _Tensor(NamedTuple):
    """The facts of a parameter or buffer that the trace and captured graphs depend on."""

    kind: tuple[Any, ...]
    dtype: torch.dtype
    device: torch.device
    addresses: Any
    version: int
    strides: tuple[int, ...]

    def __repr__(self) -> str:
        return f"{self.kind[0].__name__} ({self.dtype}, {self.device}, version {self.version})"


def _fact(value: Any, room: int = MAX_ENTRIES) -> Any:
    """A copy of what to compare of a value, or _OTHER."""
    if is_plain(value):
        if type(value) is not str and isinstance(value, (int, float, complex, str, enum.Enum)):
            return _Typed(type(value), value if value == value else repr(value))  # nan
        return value
    kind = next((kind for kind in CONTAINERS if isinstance(value, kind)), None)
    if kind is not None:
        if len(value) > room:
            return _OTHER
        room //= len(value) + 1
        if kind is dict:
            found: Any = {k: f for k, v in value.items() if is_plain(k) and (f := _fact(v, room)) is not _OTHER}
        elif kind is list or kind is tuple:
            found = kind(f for v in value if (f := _fact(v, room)) is not _OTHER)
        else:
            found = {v for v in value if is_plain(v)}
        return found if type(value) is kind else _Typed(type(value), found)
    return _Same(value) if callable(value) else _OTHER


def _setting(name: str, value: Any) -> Any:
    if is_config(name, value):
        return _Same(value)
    return _OTHER if name in METHODS and callable(value) else _fact(value)


@functools.lru_cache(maxsize=256)
def _globals_read(code: types.CodeType) -> tuple[str, ...]:
    return tuple(dict.fromkeys(i.argval for i in dis.get_instructions(code) if i.opname == "LOAD_GLOBAL"))


def _reached(call: Any) -> list[Any]:
    """What a hook, or a forward set on an instance, reads beside its arguments: this is compared."""
    if isinstance(call, functools.partial):
        return [*_reached(call.func), _fact(call.args), _fact(call.keywords)]
    if isinstance(call, types.MethodType):
        return [*_of_object(call.__self__), *_reached(call.__func__)]
    if not isinstance(call, types.FunctionType):
        return _of_object(call)
    closure = [] if call.__closure__ is None else [_cell(cell) for cell in call.__closure__]
    names = [call.__globals__.get(name) for name in _globals_read(call.__code__)]
    values = (*closure, *names, call.__defaults__, call.__kwdefaults__)
    return [f for value in values if (f := _fact(value)) is not _OTHER]


def _of_object(it: Any) -> list[Any]:
    own = {} if isinstance(it, torch.nn.Module) else getattr(it, "__dict__", {})  # modules are compared separately
    return [(k, f) for k, v in own.items() if (f := _fact(v)) is not _OTHER]


def _cell(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return None


def _hooks(hooks: dict[int, Any]) -> list[Any]:
    return [(number, _Same(hook), _reached(hook)) for number, hook in hooks.items() if not harmless(hook)]


def harmless(hook: Any) -> bool:
    """Whether a hook does nothing without gradients, and where no hidden states are asked for: transformers records outputs by
    one (output_hidden_states=True installs it for good)."""
    return only_marks(hook) or (getattr(hook, "__name__", "") == "output_capturing_hook" and is_code_of(hook, "transformers"))


def _global_hooks() -> dict[str, Any]:
    return {"forward hooks of all modules": _hooks(global_hooks._global_forward_hooks),
            "forward pre-hooks of all modules": _hooks(global_hooks._global_forward_pre_hooks),
            "nn.Module.__call__": _Same(torch.nn.Module.__call__)}


def _difference(where: str, before: dict[str, Any], after: dict[str, Any]) -> str | None:
    """The first entry that differs, with its values, or None."""
    for name in {**before, **after}:
        a, b = before.get(name, _OTHER), after.get(name, _OTHER)
        if a != b:
            if isinstance(a, _Tensor) and isinstance(b, _Tensor) and repr(a) == repr(b):
                how = "of another shape, or quantized otherwise" if a.kind != b.kind else "of other strides" if (
                    a.strides != b.strides) else "another tensor, or moved in memory"
                return f"{where}.{name}: {how}"
            return f"{where}.{name}: {_text(a)} -> {_text(b)}".removeprefix(".")
    return None


def _text(fact: Any) -> str:
    if fact is _OTHER:
        return "absent"
    if isinstance(fact, list) and fact and isinstance(fact[0], tuple) and len(fact[0]) == 3:  # hooks
        return repr([hook for _, hook, _ in fact])
    text = repr(fact[0] if isinstance(fact, tuple) and fact and isinstance(fact[0], _Same) else fact)  # of a forward
    return text if len(text) <= 80 else text[:77] + "..."


class ModelGuard:
    """The facts of a model that a trace has built in.

    Args:
        model: as it was traced.
        addresses: parameters and buffers must stay at their addresses (a captured CUDA graph reads them).
        reads: names of the attributes that the trace read; None: all count.
        elsewhere: gives what was read outside the modules, as it is now (``Reads.values``).
        buffer_values: the values of all buffers were read, not only those of integer and bool buffers.
        versions: ``buffer_versions`` from before the model ran. Buffers that its forward updates are not compared.
        apart: parts of the model that the trace did not read, and that are not compared.
    """

    def __init__(self, model: torch.nn.Module, *, addresses: bool, reads: Collection[str] | None = None,
                 elsewhere: Callable[[], Mapping[str, Any]] = dict, buffer_values: bool = False,
                 versions: Mapping[int, int] | None = None, apart: Apart | None = None) -> None:
        self._model, self._addresses, self._buffer_values, self._apart = model, addresses, buffer_values, apart
        now = buffer_versions(model)
        self._updated = {key for key, version in (versions or {}).items() if now.get(key, version) != version}
        self._reads, self._elsewhere_read = None if reads is None else frozenset(reads), elsewhere
        self._read_by_masks = read_by_masks() if hasattr(model, "config") else frozenset[str]()
        self._modules = [(name, module, self._children(module)) for name, module in named_parts(model, apart)]
        self._then = {name: self._facts(module) for name, module, _ in self._modules}
        self._glances = {name: self._glance(module) for name, module, _ in self._modules}
        self._next = 0
        self._classes = {cls for _, module, _ in self._modules for cls in class_of(module).__mro__
                         if cls not in torch.nn.Module.__mro__}
        found: dict[int, tuple[str, Any]] = {}
        for name, module, _ in self._modules:
            _find_configs(name or type(model).__name__, module, found)
        self._configs = list(found.values())
        self._implementations = {vars(config).get(IMPLEMENTATIONS[0]) for _, config in self._configs} - {None, NAME}
        self._elsewhere_then = self._elsewhere()
        uses: dict[int, list[tuple[str, torch.nn.Module, str]]] = defaultdict(list)
        for name, module, _ in self._modules:
            for own_name, p in module._parameters.items():
                if p is not None:
                    uses[id(p)].append((f"{name}.{own_name}", module, own_name))
        # A graph has one input for all the names of a parameter, and reads it by the first.
        self._tied = [group for group in uses.values() if len(group) > 1]

    def _children(self, module: torch.nn.Module) -> list[tuple[str, int]]:
        return [(name, id(child)) for name, child in children(module, self._apart)]

    def _read(self, name: str) -> bool:
        return self._reads is None or name in self._reads

    def _facts(self, module: torch.nn.Module) -> dict[str, Any]:
        own = vars(module)
        forward = own.get("forward")
        if isinstance(forward, OnInstance):
            forward = forward.original
        return {
            "class": _Same(class_of(module)), "forward hooks": _hooks(module._forward_hooks),
            "forward pre-hooks": _hooks(module._forward_pre_hooks),
            "forward": None if forward is None else (_Same(forward), _reached(forward)),
            **{k: f for k, v in own.items() if k not in _OWN and k != "forward" and self._read(k)
               and not _is_class_default(module, k, v) and not _checkpoints(module, k)
               and (f := _setting(k, entries(module, k, v, self._apart))) is not _OTHER},
            **{n: _Tensor(kind_of(p), p.dtype, p.device, addresses_of(p) if self._addresses else (), 0, _strides(p))
               for n, p in module._parameters.items() if p is not None},
            **{n: self._buffer(b) for n, b in module._buffers.items() if b is not None},
        }

    def _buffer(self, b: torch.Tensor) -> Any:
        read = (self._buffer_values or not b.dtype.is_floating_point) and id(b) not in self._updated
        place = addresses_of(b) if self._addresses else _Same(b) if read else ()
        return _Tensor(kind_of(b), b.dtype, b.device, place, _version(b) if read else 0, _strides(b))

    def _glance(self, module: torch.nn.Module) -> Glance | None:
        """None for a module whose facts are more than objects."""
        own, same, kinds, held = vars(module), dict[str, Any](), dict[str, type](), dict[str, Items]()
        if "forward" in own or module._forward_hooks or module._forward_pre_hooks:
            return None
        for name, value in own.items():
            if name in _OWN or not self._read(name):
                continue
            kind = type(value)
            if isinstance(value, CONTAINERS) and not is_plain(value) and not (
                    kind is tuple and all(is_plain(item) for item in value)):
                if _setting(name, value) is _OTHER or (items := Items.of(value)) is None:
                    return None
                held[name] = items
                continue
            if kind is tuple or _setting(name, value) is not _OTHER:
                same[name] = value
            else:
                kinds[name] = kind
        tensors = self._tensors(module)
        return None if tensors is None else Glance(frozenset(own), same, kinds, held, tensors)

    def _tensors(self, module: torch.nn.Module) -> tuple[Any, ...] | None:
        """Facts of the parameters and buffers; None where some are tensor subclasses, whose parts are compared."""
        found: list[Any] = [type(module)]
        for name, p in module._parameters.items():
            if p is not None:
                if type(p) is not torch.nn.Parameter:
                    return None
                found += name, p.dtype, p.shape, _strides(p), p.device, p.data_ptr() if self._addresses else 0
        for name, b in module._buffers.items():
            if b is not None:
                if type(b) is not torch.Tensor:
                    return None
                found.append((name, self._buffer(b)))
        return tuple(found)

    def _as_before(self, name: str, module: torch.nn.Module) -> bool:
        glance = self._glances[name]
        if (glance is not None and not module._forward_hooks and not module._forward_pre_hooks
                and glance.holds(vars(module)) and self._tensors(module) == glance.tensors):
            return True
        return self._facts(module) == self._then[name]

    def _elsewhere(self) -> list[tuple[str, dict[str, Any]]]:
        """Facts outside single modules, by owner: configs, classes, hooks of all modules."""
        return [
            *((where, {k: f for k, v in vars(config).items() if self._is_field(k, v) and (f := _setting(k, v)) is not _OTHER})
              for where, config in self._configs),
            *((cls.__name__, {k: f for k, v in vars(cls).items() if (k in _CALLS or k[:2] != "__" and self._read(k))
                              and (f := _fact(v)) is not _OTHER}) for cls in self._classes),
            ("torch", _global_hooks()),
            ("transformers", self._attention_functions()),
            ("", {name: _fact(v) for name, v in self._elsewhere_read().items()})]

    def _attention_functions(self) -> dict[str, Any]:
        """Those that the implementations of the configs meant at the trace, which quire's attention stands for."""
        return {what.removeprefix("transformers."): (_Same(f), _reached(f)) for name in self._implementations
                for what, f in functions_of(name, self._model).items()}

    def _is_field(self, name: str, value: Any) -> bool:
        if name in IMPLEMENTATIONS:
            return self._read(name)
        # A trace makes no masks, so it does not read what transformers makes them of.
        return is_field(name) and (self._read(name) or name in self._read_by_masks)

    def _elsewhere_changed(self) -> str | None:
        """Describes a change outside any single module, or None."""
        for (where, before), (_, after) in zip(self._elsewhere_then, self._elsewhere(), strict=True):
            for name in IMPLEMENTATIONS:
                if NAME in (before.get(name), after.get(name)):  # another engine is tracing the model right now
                    before, after = ({k: v for k, v in facts.items() if k != name} for facts in (before, after))
            if before != after:
                return _difference(where, before, after)
        for (name, module, own_name), *others in self._tied:
            for other, holder, other_name in others:
                if holder._parameters.get(other_name) is not module._parameters.get(own_name):
                    return f"{name} and {other} are no longer one parameter"
        return None

    def next_change(self, count: int = 4) -> str | None:
        """Describes a change in the next ``count`` modules, or None. After the last module comes what is outside any module.
        So a change is seen within (number of modules + 1) / ``count`` calls."""
        for _ in range(min(count, len(self._modules) + 1)):
            if self._next == len(self._modules):
                if (change := self._elsewhere_changed()) is not None:
                    return change
                self._next = 0
                continue
            name, module, before = self._modules[self._next]
            if self._children(module) != before or not self._as_before(name, module):
                return self.change() or f"{name or type(self._model).__name__}: changed"
            self._next += 1
        return None

    def changed_meanwhile(self, reads: Collection[str]) -> str | None:
        """For a guard made before a trace that read ``reads`` (empty: unknown): the hook, setting or class that another thread
        changed during the trace, or None. What was absent before does not count: a first forward may set it."""

        def kept(before: dict[str, Any]) -> dict[str, Any]:
            return {k: f for k, f in before.items() if not isinstance(f, _Tensor) and k not in IMPLEMENTATIONS
                    and (not reads or k in reads or " " in k or k in ("class", "forward"))}

        found = [(name or type(self._model).__name__, kept(self._then[name]), now)
                 for name, module, _ in self._modules for now in [self._facts(module)]]
        found += [(where, kept(before), after) for (where, before), (_, after) in
                  zip(self._elsewhere_then, self._elsewhere(), strict=True)]
        for where, before, after in found:
            if (text := _difference(where, before, {k: after[k] for k in before if k in after})) is not None:
                return text
        return next((f"{name or type(self._model).__name__}: its modules changed" for name, module, before in self._modules
                     if self._children(module) != before), None)

    def change(self) -> str | None:
        """Describes a change since the trace, as "module.attribute: before -> after", or None."""
        others = [name for name, module, before in self._modules
                  if (module._modules or before) and self._children(module) != before]
        if others:
            now = dict(named_parts(self._model, self._apart))
            known = {name: module for name, module, _ in self._modules}
            for name in {**known, **now}:
                if (before := known.get(name)) is not (after := now.get(name)):
                    change = "added" if before is None else "removed" if after is None else "replaced"
                    return f"module {name or type(self._model).__name__} was {change}"
        for name, module, _ in self._modules:
            if not self._as_before(name, module):
                return _difference(name or type(self._model).__name__, self._then[name], self._facts(module))
        if others:
            return f"{others[0] or type(self._model).__name__}: the order of its modules changed"
        return self._elsewhere_changed()


def _is_class_default(module: torch.nn.Module, name: str, value: Any) -> bool:
    default = getattr(type(module), name, _OTHER)
    return is_plain(value) and type(default) is type(value) and default == value


def _checkpoints(module: torch.nn.Module, name: str) -> bool:
    return name in _CHECKPOINTING and any(cls.__module__.startswith("transformers.") for cls in type(module).__mro__)


def _strides(tensor: torch.Tensor) -> tuple[int, ...]:
    return tensor.stride() if tensor.layout is torch.strided else ()


def buffer_versions(model: torch.nn.Module) -> dict[int, int]:
    """The version of each buffer, by its id; in-place updates increase it."""
    return {id(b): _version(b) for b in model.buffers()}


def _find_configs(where: str, holder: Any, found: dict[int, tuple[str, Any]]) -> None:
    """Add the configs among the attributes of ``holder``, and theirs, to ``found``, with their names."""
    for name, value in vars(holder).items():
        if is_config(name, value) and id(value) not in found:
            found[id(value)] = f"{where}.{name}", value
            _find_configs(f"{where}.{name}", value, found)
