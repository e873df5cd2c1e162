"""Notices that a model is no longer the one that was traced.

A traced graph has the model's modules, hooks and settings built in. Weights updated in place reach it; a hook added later, a
layer exchanged or a setting changed would be ignored without a word. So the engine compares: all of the model when it
gets work after it was idle, before anybody sees a result (``check_if_due``), and while it is busy a few modules each step, in
turn (``glance``).
"""

from __future__ import annotations

from typing import Any

import torch

from passes.quantized import addresses as addresses_of

_PLAIN = (bool, int, float, str, type(None))


def _facts(module: torch.nn.Module, addresses: bool) -> tuple[Any, ...]:
    own = vars(module)
    return (
        type(module), id(module), tuple(module._forward_hooks), tuple(module._forward_pre_hooks), id(own.get("forward")),
        tuple((k, v) for k, v in own.items() if type(v) in _PLAIN and k != "training"),
        tuple((n, type(p), p.dtype, p.device, addresses_of(p) if addresses else 0)
              for n, p in module._parameters.items() if p is not None),
        tuple((n, b.dtype, b.device, addresses_of(b)) for n, b in module._buffers.items() if b is not None and addresses),
    )


def _children(module: torch.nn.Module) -> list[tuple[str, int]]:
    return [(name, id(child)) for name, child in module._modules.items()]


_WHAT = ("its class", "the module itself", "its forward hooks", "its forward pre-hooks", "its forward", "its settings",
         "its parameters", "its buffers")


class ModelWatch:
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

    def _look(self) -> dict[str, tuple[Any, ...]]:
        return {name: _facts(module, self._addresses) for name, module in self._model.named_modules()}

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

    def glance(self, count: int = 4) -> str | None:
        """What has changed in the next ``count`` modules, in words; None if nothing. A change anywhere is seen within as many
        calls as the model has modules, over ``count``."""
        for _ in range(min(count, len(self._modules))):
            name, module, children = self._modules[self._next]
            if _children(module) != children or _facts(module, self._addresses) != self._then[name]:
                return self.change() or f"{name or type(self._model).__name__}: changed"
            self._next = (self._next + 1) % len(self._modules)
        return None

    def change(self) -> str | None:
        """What has changed since, in words; None if nothing."""
        now = self._look()
        if now == self._then:
            return None
        for name in {**self._then, **now}:
            before, after = self._then.get(name), now.get(name)
            where = name or type(self._model).__name__
            if before is None or after is None:
                return f"module {where} was {'added' if before is None else 'removed'}"
            for what, a, b in zip(_WHAT, before, after, strict=True):
                if a != b:
                    return f"{where}: {what} changed"
        return "its modules changed"


__all__ = ["ModelWatch"]
