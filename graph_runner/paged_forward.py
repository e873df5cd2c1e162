"""A transformers model's forward after ``quire.paged(model)``: inside a paged step its attention is paged."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import inspect
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from quire.attn_ops.backend import UnsupportedAttention
from quire.attn_ops.composite import attention_name
from quire.attn_ops.step import current_step
from quire.graph_runner.model_guard import ModelGuard
from quire.graph_runner.on_instance import OnInstance, restore_attribute
from quire.graph_runner.whole_logits import reads_logits_alone
from quire.passes.capture.hf_experts import experts_active
from quire.passes.capture.hf_interface import interface_active, uses_interface
from quire.passes.capture.paged_model import prove_uncompiled
from quire.passes.verify.sites import check_config

#: Arguments of an uncompiled step with which it computes what is proved, and returns more or fewer of its values; and those of
#: which that is true when they are False.
_ALLOWED = frozenset(("input_ids", "position_ids", "past_key_values", "use_cache", "return_dict", "output_hidden_states",
                      "logits_to_keep", "num_logits_to_keep"))
_SWITCHES = frozenset(("output_attentions", "output_router_logits"))


class PagedForward(OnInstance):
    """Replaces ``model.__dict__["forward"]``; a forward patched on the instance before runs inside it."""

    _proved: ModelGuard | None = None  # of the model, as it was when it was verified
    _modes: list[bool] | None = None  # ``training`` of its modules then

    def __init__(self, model: torch.nn.Module, attention: str | Mapping[str, str]) -> None:
        self.model, self.attention = model, attention_name(attention)
        self.original = model.__dict__.get("forward")
        functools.update_wrapper(self, type(model).forward)

    def _prove(self) -> None:
        """Trace the model once, and again when it has changed: its graph shows whether tokens meet outside attention. Raises
        UnsupportedAttention if an uncompiled step would be wrong, or the model cannot be traced."""
        modes = [m.training for m in self.model.modules()]
        if self._proved is not None and self._modes == modes and self._proved.change() is None:
            return
        with own_forward(self.model), torch._dynamo.config.patch(assume_static_by_default=True):
            reads = contextvars.Context().run(prove_uncompiled, self.model)  # with no step in progress
        self._proved, self._modes = ModelGuard(self.model, addresses=False, elsewhere=reads.values), modes

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

    def _given(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments of a call by name, without those that are None. Raises TypeError if they do not fit."""
        given = self.__signature__.bind_partial(*args, **kwargs).arguments
        more = given.pop("kwargs", {})
        return {name: x for name, x in (given | more).items() if x is not None}

    def _logits(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
        generate = vars(self.model).get("generate")
        if not isinstance(generate, OnInstance):
            return None
        try:
            given = self._given(args, kwargs)
        except TypeError:  # which the forward raises
            return None
        return generate.forward_logits(given, self.original)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self._plain(*args, **kwargs)
        step = current_step()
        if step is None and reads_logits_alone(sys._getframe(1)) and (logits := self._logits(args, kwargs)) is not None:
            from transformers.modeling_outputs import CausalLMOutputWithPast

            return CausalLMOutputWithPast(logits=logits)
        if step is None or not uses_interface(self.model):
            return self._plain(*args, **kwargs)
        check_config(self.model.config)
        given = self._given(args, kwargs)
        masks = [name for name in given if ("mask" in name or name.endswith("token_type_ids"))]
        if masks:  # by token_type_ids, image tokens see each other
            raise UnsupportedAttention(f"{masks[0]} in a paged step: the batch is ragged, so pass no masks, nothing that masks "
                                       "are made of, and no padding")
        others = [name for name, x in given.items() if name not in _ALLOWED and not (name in _SWITCHES and x is False)]
        if others:
            raise UnsupportedAttention(f"{others[0]} in a paged step: quire has proved the model for token ids and positions "
                                       "alone; with other arguments the sequences of a batch may meet. Leave it out, and "
                                       "compute what it is for, such as a loss, from the logits")
        if (cache := given.get("past_key_values")) is not None and not _is_empty(cache):
            raise UnsupportedAttention(f"past_key_values ({type(cache).__name__}) in a paged step: keys and values are in the "
                                       "paged cache. Pass none, or a new DynamicCache")
        if given.get("position_ids") is None and "position_ids" in self.__signature__.parameters:
            raise UnsupportedAttention("no position_ids in a paged step: the model would count the row from 0, and every "
                                       "sequence has positions of its own; pass position_ids=metadata.positions[None]")
        self._prove()
        if step.attention == "auto":
            step.attention = self.attention
        with interface_active(self.model), experts_active(self.model), torch.no_grad():  # attention to a cache has no gradient
            return self._plain(*args, **kwargs)


def _is_empty(cache: Any) -> bool:
    """Whether attention gets the keys and values of this forward alone from it."""
    from transformers import DynamicCache

    return type(cache) is DynamicCache and cache.get_seq_length() == 0


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
