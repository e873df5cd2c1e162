"""A transformers model's forward after ``quire.paged(model)``: inside a paged step its attention is paged."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Iterator
from typing import Any

import torch

from attn_ops.backend import UnsupportedAttention
from attn_ops.step import current_step
from passes.hf_experts import experts_active
from passes.hf_interface import interface_active, uses_interface
from passes.sites import check_config


class PagedForward:
    """Stands in ``model.__dict__["forward"]``; what stood there before (a forward patched on the instance) runs inside it."""

    def __init__(self, model: torch.nn.Module, attention: str) -> None:
        self.model, self.attention = model, attention
        self.original = model.__dict__.get("forward")
        functools.update_wrapper(self, type(model).forward)

    def __getstate__(self) -> dict[str, Any]:
        """For pickling and copying: without the wrapped function's looks."""
        return {name: self.__dict__[name] for name in ("model", "attention", "original")}

    def _plain(self, *args: Any, **kwargs: Any) -> Any:
        if self.original is not None:
            return self.original(*args, **kwargs)
        return type(self.model).forward(self.model, *args, **kwargs)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.original or functools.partial(type(self.model).forward, self.model))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        step = None if torch.compiler.is_compiling() else current_step()
        if step is None or not uses_interface(self.model):
            return self._plain(*args, **kwargs)
        check_config(self.model.config)
        if self.__signature__.bind_partial(*args, **kwargs).arguments.get("attention_mask") is not None:
            raise UnsupportedAttention("an attention_mask in a paged step: the batch is ragged, so pass no mask and no padding")
        if step.attention == "auto":
            step.attention = self.attention
        with interface_active(self.model), experts_active(self.model):
            return self._plain(*args, **kwargs)


def restore_attribute(model: torch.nn.Module, name: str, original: Any) -> None:
    """Put back what an instance had of its own under ``name``; None: nothing, the class's shows again."""
    model.__dict__.pop(name, None)
    if original is not None:
        object.__setattr__(model, name, original)


@contextlib.contextmanager
def own_forward(model: torch.nn.Module) -> Iterator[None]:
    """While inside, the model has the forward it had before ``quire.paged``; for tracing it, hooks and all."""
    standing = model.__dict__.get("forward")
    if not isinstance(standing, PagedForward):
        yield
        return
    restore_attribute(model, "forward", standing.original)
    try:
        yield
    finally:
        object.__setattr__(model, "forward", standing)


__all__ = ["PagedForward", "own_forward", "restore_attribute"]
