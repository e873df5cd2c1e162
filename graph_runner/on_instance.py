"""Methods replaced on one instance of a model, and what that means for copies of the instance."""

from __future__ import annotations

import contextvars
import copy
import copyreg
import types
from collections.abc import Callable
from typing import Any

import torch

#: What runs the decoding loop of the ``generate`` in progress, of the model given; None: transformers.
SAMPLING: contextvars.ContextVar[tuple[Any, Callable[..., Any]] | None] = contextvars.ContextVar("sampling", default=None)


class OnInstance:
    """Replaces a method in the ``__dict__`` of one instance, ``model``."""

    model: torch.nn.Module
    original: Any  # what was in the ``__dict__`` before; None: nothing
    # Of what stands for ``generate``: see ``OwnCopies``; and the logits of a call of the forward, or None.
    init_continuous_batching: Callable[..., Any]
    forward_logits: Callable[[dict[str, Any], Any], torch.Tensor | None]


def _decoding_loop(name: str) -> Callable[..., Any]:
    """A method: the class's own of that name, or what ``SAMPLING`` says for the model."""

    def decode(model: Any, /, *args: Any, **kwargs: Any) -> Any:
        plain, standing = getattr(super(OwnCopies, model), name), SAMPLING.get()
        return standing[1](plain, *args, **kwargs) if standing is not None and standing[0] is model else plain(*args, **kwargs)

    decode.__name__ = name
    return decode


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

    # Transformers' ``generate`` calls one of these by its name when it has prepared everything; the last with assistants, which
    # do not change the distribution: the engine samples each token.
    _sample, _beam_search, _assisted_decoding = map(_decoding_loop, ("_sample", "_beam_search", "_assisted_decoding"))

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        """The manager behind transformers' ``generate_batch``: on the engine of ``quire.paged``."""
        generate = vars(self).get("generate")
        if isinstance(generate, OnInstance):
            return generate.init_continuous_batching(*args, **kwargs)
        return super().init_continuous_batching(*args, **kwargs)  # type: ignore[misc]

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
            own = copy.copy(standing)
            own.model = model
            object.__setattr__(model, name, own)


def _with_own_copies(plain: type) -> type:
    """The class with ``OwnCopies``, made once per class, under the same name, which configs and messages show."""
    subclasses: list[type] = plain.__subclasses__()
    for known in subclasses:
        if known.__dict__.get("_plain_class") is plain:
            return known
    body = {"__module__": plain.__module__, "__qualname__": plain.__qualname__, "__doc__": plain.__doc__, "_plain_class": plain}
    return types.new_class(plain.__name__, (OwnCopies, plain), exec_body=lambda namespace: namespace.update(body))


def class_of(model: torch.nn.Module) -> type:
    """The model's class, or that in whose place ``quire.paged`` has put a subclass."""
    return type(model).__dict__.get("_plain_class", type(model))


def set_own_copies(model: torch.nn.Module, own: bool) -> None:
    """Give the model ``OwnCopies``, or the class it had before. A class put on top by others stays."""
    cls = type(model)
    if own and not issubclass(cls, OwnCopies):
        object.__setattr__(model, "__class__", _with_own_copies(cls))
    elif not own and "_plain_class" in cls.__dict__:
        object.__setattr__(model, "__class__", cls.__dict__["_plain_class"])


def restore_attribute(model: torch.nn.Module, name: str, original: Any) -> None:
    """Put back an instance's own attribute; None: it had none."""
    model.__dict__.pop(name, None)
    if original is not None:
        object.__setattr__(model, name, original)
