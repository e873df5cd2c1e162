"""A transformers model's forward after ``quire.paged(model)``: inside a paged step its attention is paged."""

from __future__ import annotations

import contextlib
import contextvars
import copy
import copyreg
import functools
import inspect
import types
from collections.abc import Iterator
from typing import Any

import torch

from quire.attn_ops.backend import UnsupportedAttention
from quire.attn_ops.step import current_step
from quire.graph_runner.model_guard import ModelGuard
from quire.passes.capture.hf_experts import experts_active
from quire.passes.capture.hf_interface import interface_active, uses_interface
from quire.passes.capture.paged_model import find_sites
from quire.passes.verify.sites import check_config


class OnInstance:
    """Replaces a method in the ``__dict__`` of one instance, ``model``."""

    model: torch.nn.Module

    def of(self, model: torch.nn.Module) -> OnInstance:
        """The same for another model."""
        made = copy.copy(self)
        made.model = model
        return made


class OwnCopies:
    """Mixin of a paged model's class: a copy that shares the ``__dict__`` (``copy.copy``, replicas of ``nn.DataParallel``) runs
    its own modules, not those of the model that was copied."""

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)  # type: ignore[misc]
        _bind(self)

    def _replicate_for_data_parallel(self) -> Any:
        replica = super()._replicate_for_data_parallel()  # type: ignore[misc]
        _bind(replica)
        return replica

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle by the importable class."""
        made = super().__reduce_ex__(max(int(protocol), 2))
        plain = type(self).__dict__.get("_plain_class")
        if plain is None or not isinstance(made, tuple) or made[0] is not copyreg.__newobj__:  # type: ignore[attr-defined]
            return made
        return (_new, (plain, *made[1][1:]), *made[2:])


def _new(plain: type, *arguments: Any) -> Any:
    made = _with_own_copies(plain)
    return made.__new__(made, *arguments)


def _bind(model: Any) -> None:
    for name, standing in list(vars(model).items()):
        if isinstance(standing, OnInstance) and standing.model is not model:
            object.__setattr__(model, name, standing.of(model))


def _with_own_copies(plain: type) -> type:
    """The class with ``OwnCopies``, made once per class, under the same name, which configs and messages show."""
    subclasses: list[type] = plain.__subclasses__()
    for known in subclasses:
        if known.__dict__.get("_plain_class") is plain:
            return known
    body = {"__module__": plain.__module__, "__qualname__": plain.__qualname__, "__doc__": plain.__doc__, "_plain_class": plain}
    return types.new_class(plain.__name__, (OwnCopies, plain), exec_body=lambda namespace: namespace.update(body))


def set_own_copies(model: torch.nn.Module, own: bool) -> None:
    """Give the model ``OwnCopies``, or the class it had before. A class put on top by others stays."""
    cls = type(model)
    if own and not issubclass(cls, OwnCopies):
        object.__setattr__(model, "__class__", _with_own_copies(cls))
    elif not own and "_plain_class" in cls.__dict__:
        object.__setattr__(model, "__class__", cls.__dict__["_plain_class"])


class PagedForward(OnInstance):
    """Replaces ``model.__dict__["forward"]``; a forward patched on the instance before runs inside it."""

    _proved: ModelGuard | None = None  # of the model, as it was when it was verified


    def __init__(self, model: torch.nn.Module, attention: str) -> None:
        self.model, self.attention = model, attention
        self.original = model.__dict__.get("forward")
        functools.update_wrapper(self, type(model).forward)

    def _prove(self) -> None:
        """Trace the model once, and again when it has changed: its graph shows whether tokens meet outside attention.

        Raises:
            UnsupportedAttention: an uncompiled step would be wrong, or the model cannot be traced.
        """
        if self._proved is not None and self._proved.change() is None:
            return
        with own_forward(self.model), torch._dynamo.config.patch(assume_static_by_default=True):
            contextvars.Context().run(find_sites, self.model, uncompiled=True)  # with no step in progress
        self._proved = ModelGuard(self.model, addresses=False)

    def __getstate__(self) -> dict[str, Any]:
        """For pickling and copying: without the attributes of the wrapped function."""
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
        given = self.__signature__.bind_partial(*args, **kwargs).arguments
        if given.get("attention_mask") is not None:
            raise UnsupportedAttention("an attention_mask in a paged step: the batch is ragged, so pass no mask and no padding")
        if given.get("position_ids") is None and "position_ids" in self.__signature__.parameters:
            raise UnsupportedAttention("no position_ids in a paged step: the model would count the row from 0, and every "
                                       "sequence has positions of its own; pass position_ids=metadata.positions[None]")
        self._prove()
        if step.attention == "auto":
            step.attention = self.attention
        with interface_active(self.model), experts_active(self.model), torch.no_grad():  # attention to a cache has no gradient
            return self._plain(*args, **kwargs)


def restore_attribute(model: torch.nn.Module, name: str, original: Any) -> None:
    """Put back an instance's own attribute; None: it had none."""
    model.__dict__.pop(name, None)
    if original is not None:
        object.__setattr__(model, name, original)


@contextlib.contextmanager
def own_forward(model: torch.nn.Module) -> Iterator[None]:
    """While inside, the model has the forward it had before ``quire.paged``, for tracing."""
    standing = model.__dict__.get("forward")
    if not isinstance(standing, PagedForward):
        yield
        return
    restore_attribute(model, "forward", standing.original)
    try:
        yield
    finally:
        object.__setattr__(model, "forward", standing)


__all__ = ["OnInstance", "PagedForward", "own_forward", "restore_attribute", "set_own_copies"]
