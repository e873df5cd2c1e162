"""Adapters per request: which of PEFT's LoRA adapters each request of a batch has.

With ``enable_lora=True``, or from the first request with ``adapter=`` or the first change of the model's active adapters on,
which makes the engine trace its model again, each token has adapters of its own (``passes/capture/lora.py``): requests with
different adapters, and with none, share steps, and changes of the active ones need no trace. A request keeps the adapters that
it came with: those without ``adapter=`` the model's active ones, or what was active when they drew their first token.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from quire.graph_runner.request import Request, ScheduledBatch
from quire.passes.capture.lora import active_adapters, adapter_names, check_adapters

#: PEFT's name for the model without adapters.
BASE = "__base__"
#: Why a model that was traced with the adapters of each token is traced with its own active ones: see ``active_adapters``.
NOT_CHOSEN = "its active adapters are such as no request can have"


def choose(made: Sequence[Request], adapter: str | None, model: torch.nn.Module, traced: TokenAdapters | None) -> str | None:
    """Give new requests their adapters. Returns why the model must be traced again before they run, or None. ``traced``: None
    while the active adapters are those of all requests. Raises ValueError for an unknown name, or a model whose adapters cannot
    be chosen."""
    if adapter is None and traced is None:
        return None
    if adapter is None:
        if (names := active_adapters(model)) is None:
            return NOT_CHOSEN
    else:
        check_adapters(model)
        if adapter != BASE and adapter not in (known := adapter_names(model)):
            raise ValueError(f"the model has no adapter {adapter!r}; it has {', '.join(map(repr, known))}, and {BASE!r} for "
                             "none")
        names = () if adapter == BASE else (adapter,)
    _assign(made, names)
    if traced is not None and set(names).issubset(traced.names):
        return None
    return "a request came with an adapter of its own"


def keep(requests: Iterable[Request], before: tuple[str, ...] | None, model: torch.nn.Module, traced: TokenAdapters) -> None:
    """Give requests without adapters of their own the active ones; those that have drawn tokens get the ones that they drew
    them with, ``before``, if the model still has them. What they have computed is forgotten."""
    active = active_adapters(model)
    if before is None or not set(before).issubset(traced.names):
        before = active
    for request in requests:
        if request.adapters is None:
            _assign([request], before if len(request.token_ids) > len(request.output.prompt_token_ids) else active)


def _assign(requests: Iterable[Request], names: tuple[str, ...] | None) -> None:
    """Keys and values depend on the adapters: the requests have computed none, or they are forgotten."""
    for request in requests:
        request.adapters, request.root = names, b"" if names is None else "\0".join(("", *names)).encode()
        request.page_keys, request.num_keyed = [], 0


class TokenAdapters:
    """The adapters of each token as bits: bit i is names[i] of the model's adapters."""

    def __init__(self, model: torch.nn.Module, names: Sequence[str]) -> None:
        self.names, self._model = list(names), model

    def _bits(self, names: Sequence[str] | None) -> int:
        return sum(1 << self.names.index(name) for name in names or ())

    def active(self, num_tokens: int, device: torch.device) -> torch.Tensor:
        """(num_tokens,) int64: the model's active adapters for each token."""
        return torch.full((num_tokens,), self._bits(active_adapters(self._model)), dtype=torch.int64, device=device)

    def of(self, batch: ScheduledBatch) -> np.ndarray:
        """(T,) int64: those of each token of the batch."""
        own = [active_adapters(self._model) if r.request.adapters is None else r.request.adapters for r in batch.rows]
        return np.repeat(np.array(list(map(self._bits, own)), np.int64), [row.num_new for row in batch.rows])


def after_trace(requests: Iterable[Request], model: torch.nn.Module, traced: TokenAdapters | None,
                before: tuple[str, ...] | None) -> list[tuple[Request, str]]:
    """Requests that the model, traced again, cannot serve any more, and why. ``traced``: None if adapters cannot be chosen now;
    requests that have the active ones then follow the model. Else ``keep``; ``before``: the adapters that were active."""
    requests = list(requests)
    own = [request for request in requests if request.adapters is not None]
    if traced is not None:
        keep(requests, before, model, traced)
        return [(r, f"its adapter {', '.join(r.adapters)} was deleted") for r in own
                if r.adapters is not None and not set(r.adapters).issubset(traced.names)]
    _assign([r for r in own if r.adapters == active_adapters(model)], None)
    return [(r, "the model has changed, and adapters cannot be chosen for each request any more") for r in own
            if r.adapters is not None]
