"""Evaluation mode while a model is traced, whatever other threads set meanwhile; and no hooks for gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from quire.passes.capture.four_bit import keeps_mode


class ChangedWhileTraced(RuntimeError):
    """Another thread changed the model while it was traced, so that the trace may be of neither state. Trace again."""


class _Train:
    """Stands for the ``train`` of a module for a while, and notes the modes asked for (``eval`` calls it). Copies work too."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module
        self.modes: list[bool] = []

    def __call__(self, mode: bool = True) -> torch.nn.Module:
        self.modes.append(mode)
        return type(self.module).train(self.module, mode)


@contextlib.contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """While inside, no module of the model is in training mode, but those that must keep it (``keeps_mode``). The modes come
    back, except where another thread has called ``train`` or ``eval`` meanwhile. Raises ChangedWhileTraced on leaving, if
    another thread put a module into training mode."""
    modules = dict(model.named_modules())
    noted = {name: _Train(m) for name, m in modules.items() if "train" not in vars(m)}
    for name, stand_in in noted.items():
        object.__setattr__(modules[name], "train", stand_in)
    kept = {name for name, m in modules.items() if keeps_mode(m)}
    training = [name for name, m in modules.items() if m.training and name not in kept]
    for name in training:
        modules[name].training = False

    def leave() -> ChangedWhileTraced | None:
        seen = [name for name, m in model.named_modules() if m.training and name not in kept]
        for name in noted:
            modules[name].__dict__.pop("train", None)
        for name in training:
            if name not in noted or not noted[name].modes:
                modules[name].training = True
        seen += [name for name, stand_in in noted.items() if True in stand_in.modes]
        if not seen:
            return None
        return ChangedWhileTraced(f"{seen[0] or type(model).__name__}.training: False -> True, by another thread while the "
                                  "model was traced; try again")

    try:
        yield
    except BaseException as error:
        if (changed := leave()) is not None and isinstance(error, Exception):
            raise changed from error
        raise
    if (changed := leave()) is not None:
        raise changed


def _marks(module: Any, input: Any, output: Any) -> None:
    output.requires_grad_(True)


def only_marks(hook: Any) -> bool:
    """Whether a forward hook only marks the output for autograd, by its code: transformers' ``enable_input_require_grads`` and
    PEFT leave such hooks, which have no effect without gradients. Dynamo of torch 2.11 cannot trace them."""
    code, known = getattr(hook, "__code__", None), _marks.__code__
    return code is not None and all(getattr(code, part) == getattr(known, part) for part in (
        "co_code", "co_names", "co_consts", "co_argcount", "co_kwonlyargcount", "co_freevars", "co_nlocals"))


@contextlib.contextmanager
def without_backward(model: torch.nn.Module) -> Iterator[None]:
    """While inside, the model has no backward hooks, which torch.compile does not trace, and no forward hooks that only mark
    outputs: without gradients they have no effect. Hooks that another thread registers meanwhile stay."""
    def kept(name: str, hooks: Mapping[int, Any]) -> dict[int, Any]:
        return {} if name != "_forward_hooks" else {key: hook for key, hook in hooks.items() if not only_marks(hook)}

    held = [(own, name, own[name], rest) for m in model.modules() for own in [m.__dict__]
            for name in ("_backward_hooks", "_backward_pre_hooks", "_forward_hooks")
            if (hooks := own.get(name)) and len(rest := kept(name, hooks)) < len(hooks)]
    for own, name, hooks, rest in held:
        own[name] = type(hooks)(rest)
    try:
        yield
    finally:
        for own, name, hooks, _ in held:
            hooks.update(own[name])
            own[name] = hooks
