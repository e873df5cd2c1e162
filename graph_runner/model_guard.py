"""Notices that a model is no longer the one that was traced.

A traced graph has the model's modules, hooks and settings built in. Weights updated in place reach it; a hook added later, a
layer exchanged or a setting changed would be ignored without a word. So the engine compares: all of the model when it
gets work after it was idle, before anybody sees a result (``check_if_due``), and while it is busy a few modules each step, in
turn (``check_some``).

Settings are the plain values among a module's attributes, lists, dicts and sets of them, and functions, which must stay the
same ones; the values of the configs that modules hold; and of what a hook reads beside its arguments, its closure, the globals
that it names and the object it is a method of. Not compared is what other objects have inside, nor tensors that are neither
parameters nor buffers.
"""

from __future__ import annotations

import dis
import functools
import types
from collections import defaultdict
from typing import Any

import torch
from torch.nn.modules import module as global_hooks

from quire.passes.verify.quantized import addresses as addresses_of

_PLAIN = frozenset((bool, int, float, str, type(None), torch.dtype, torch.device))
_MOST_ENTRIES = 1000  # of a container, those inside it counted too; larger ones are data, and looking at them takes time
_OTHER = object()  # stands for what is not compared
_OWN = frozenset(vars(torch.nn.Module()))  # what every module has: its hooks and children are compared by themselves
# Methods that a model may be given in place of its class's: none is a part of its forward. ``forward`` is compared by itself.
_METHODS = frozenset((*dir(torch.nn.Module), "generate", "save_pretrained"))
# Fields of a config that say nothing of the forward: saving a model sets some of them, users others.
_UNREAD_FIELDS = frozenset(("architectures", "auto_map", "dtype", "name_or_path", "torch_dtype", "transformers_version",
                            "use_cache"))


class _Same:
    """Equal to the same object only, which it keeps alive: an ``id`` could come again."""

    __slots__ = ("it",)

    def __init__(self, it: Any) -> None:
        self.it = it

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.it is other.it

    __hash__ = None  # type: ignore[assignment]


def _fact(value: Any, room: int = _MOST_ENTRIES) -> Any:
    """What to compare of the value of an attribute, and never the value itself if it can change; or _OTHER."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind in (list, tuple, dict, set, frozenset):
        if len(value) > room:
            return _OTHER
        room //= len(value) + 1
        if kind is dict:
            return kind, [(k, f) for k, v in value.items() if type(k) in _PLAIN and (f := _fact(v, room)) is not _OTHER]
        if kind is list or kind is tuple:
            return kind, [f for v in value if (f := _fact(v, room)) is not _OTHER]
        return kind, {v for v in value if type(v) in _PLAIN}
    return _Same(value) if callable(value) else _OTHER


def _is_config(name: str, value: Any) -> bool:
    return "config" in name and name != "generation_config" and hasattr(value, "__dict__") and not callable(value)


def _setting(name: str, value: Any) -> Any:
    if type(value) in _PLAIN:
        return value
    if _is_config(name, value):
        return _Same(value)
    return _OTHER if name in _METHODS and callable(value) else _fact(value)


@functools.lru_cache(maxsize=256)
def _globals_read(code: types.CodeType) -> tuple[str, ...]:
    return tuple(dict.fromkeys(i.argval for i in dis.get_instructions(code) if i.opname == "LOAD_GLOBAL"))


def _reached(call: Any) -> list[Any]:
    """What to compare of a hook, or of a forward in place of the class's: what it reads that nobody hands to it."""
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
    own = {} if isinstance(it, torch.nn.Module) else getattr(it, "__dict__", {})  # a module's are compared by themselves
    return [(k, f) for k, v in own.items() if (f := _fact(v)) is not _OTHER]


def _cell(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return None


def _hooks(hooks: dict[int, Any]) -> list[Any]:
    return [(number, _reached(hook)) for number, hook in hooks.items()]


def _facts(module: torch.nn.Module, addresses: bool) -> tuple[Any, ...]:
    own = vars(module)
    return (
        type(module), id(module), _hooks(module._forward_hooks), _hooks(module._forward_pre_hooks),
        (_Same(forward), _reached(forward)) if (forward := own.get("forward")) is not None else None,
        [(k, f) for k, v in own.items() if k not in _OWN and (f := _setting(k, v)) is not _OTHER],
        tuple((n, type(p), p.dtype, p.device, addresses_of(p) if addresses else 0)
              for n, p in module._parameters.items() if p is not None),
        tuple((n, b.dtype, b.device, addresses_of(b)) for n, b in module._buffers.items() if b is not None and addresses),
    )


def _children(module: torch.nn.Module) -> list[tuple[str, int]]:
    return [(name, id(child)) for name, child in module._modules.items()]


_WHAT = ("its class", "the module itself", "its forward hooks", "its forward pre-hooks", "its forward", "its settings",
         "its parameters", "its buffers")


def _config_facts(config: Any) -> dict[str, Any]:
    return {k: f for k, v in vars(config).items()
            if k[0] != "_" and k not in _UNREAD_FIELDS and not k.endswith("token_id") and (f := _setting(k, v)) is not _OTHER}


def _find_configs(where: str, holder: Any, found: dict[int, tuple[str, Any]]) -> None:
    """Put the configs among the attributes of ``holder``, and theirs, into ``found``, with their names."""
    for name, value in vars(holder).items():
        if _is_config(name, value) and id(value) not in found:
            found[id(value)] = f"{where}.{name}", value
            _find_configs(f"{where}.{name}", value, found)


def _global_hooks() -> tuple[list[Any], ...]:
    return _hooks(global_hooks._global_forward_hooks), _hooks(global_hooks._global_forward_pre_hooks)


class ModelGuard:
    """The facts of a model that a trace has built in.

    Args:
        model: as it was traced.
        addresses: parameters and buffers must stay where they are in memory (a captured CUDA graph reads addresses).
    """

    def __init__(self, model: torch.nn.Module, *, addresses: bool) -> None:
        self._model, self._addresses = model, addresses
        self._then = self._look()
        self._modules = [(name, module, _children(module)) for name, module in model.named_modules()]
        self._next = 0
        self.due = False
        self._global_hooks = _global_hooks()
        configs: dict[int, tuple[str, Any]] = {}
        for name, module, _ in self._modules:
            _find_configs(name or type(model).__name__, module, configs)
        self._configs = [(where, config, _config_facts(config)) for where, config in configs.values()]
        uses: dict[int, list[tuple[str, torch.nn.Module, str]]] = defaultdict(list)
        for name, module, _ in self._modules:
            for own_name, p in module._parameters.items():
                if p is not None:
                    uses[id(p)].append((f"{name}.{own_name}", module, own_name))
        # A graph has one input for all the names of a parameter, and reads it by the first.
        self._tied = [group for group in uses.values() if len(group) > 1]

    def _look(self) -> dict[str, tuple[Any, ...]]:
        return {name: _facts(module, self._addresses) for name, module in self._model.named_modules()}

    def _elsewhere(self) -> str | None:
        """What has changed that no one module has, in words; None if nothing."""
        for where, config, then in self._configs:
            now = _config_facts(config)
            if now != then:
                changed = [k for k in {**then, **now} if then.get(k, _OTHER) != now.get(k, _OTHER)]
                return f"{where}: {', '.join(changed)} changed"
        for group in self._tied:
            first, *others = group
            for name, module, own_name in others:
                if module._parameters.get(own_name) is not first[1]._parameters.get(first[2]):
                    return f"{first[0]} and {name} are no longer one parameter"
        return None if _global_hooks() == self._global_hooks else "torch's hooks for all modules changed"

    @staticmethod
    def check(change: str | None) -> None:
        """Raises RuntimeError if something has changed."""
        if change is not None:
            raise RuntimeError(f"the model was changed after the engine traced it ({change}), and the engine runs it as it "
                               "was; undo the change, or close the engine and make a new one")

    def check_if_due(self) -> None:
        """Look at the whole model if ``due``, and then it is not. Raises RuntimeError as ``check`` does, and stays due."""
        if self.due:
            self.check(self.change())
            self.due = False

    def check_some(self, count: int = 4) -> str | None:
        """What has changed in the next ``count`` modules, in words; None if nothing. After the last module comes what no one
        module has. A change anywhere is seen within as many calls as the model has modules, and one more, over ``count``."""
        for _ in range(min(count, len(self._modules) + 1)):
            if self._next == len(self._modules):
                if (change := self._elsewhere()) is not None:
                    return change
                self._next = 0
                continue
            name, module, children = self._modules[self._next]
            if _children(module) != children or _facts(module, self._addresses) != self._then[name]:
                return self.change() or f"{name or type(self._model).__name__}: changed"
            self._next += 1
        return None

    def change(self) -> str | None:
        """What has changed since, in words; None if nothing."""
        now = self._look()
        if now == self._then:
            return self._elsewhere()
        for name in {**self._then, **now}:
            before, after = self._then.get(name), now.get(name)
            where = name or type(self._model).__name__
            if before is None or after is None:
                return f"module {where} was {'added' if before is None else 'removed'}"
            for what, a, b in zip(_WHAT, before, after, strict=True):
                if a != b:
                    return f"{where}: {what} changed"
        return "its modules changed"


__all__ = ["ModelGuard"]
