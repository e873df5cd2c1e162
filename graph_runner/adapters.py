"""Adapters per request: which of PEFT's LoRA adapters each request of a batch has.

With ``enable_lora=True``, or from the first request with ``adapter=`` or the first change of the model's active or merged
adapters on, which makes the engine trace its model again, each token has adapters of its own (``passes/capture/lora.py``):
requests with different adapters, and with none, share steps, and changes of the active ones need no trace. A request keeps the
adapters that it came with: those without ``adapter=`` the model's active ones, or what was active when they drew their first
token.

Adapters that are merged (``merge_adapter``) are in the weights, and tokens have no bits then. A merge needs no trace either,
but what is cached is of other weights and computed again. Requests without ``adapter=`` go on if their adapters are just those
that were merged, and also when these are unmerged later; a choice of adapters is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from quire.graph_runner.adapter_places import AdapterPlaces
from quire.graph_runner.request import Request, ScheduledBatch
from quire.passes.capture.lora import active_adapters, adapter_names, add_up, check_adapters, merged_adapters

#: PEFT's name for the model without adapters.
BASE = "__base__"
#: Why a model that was traced with the adapters of each token is traced with its own active ones: see ``active_adapters``.
NOT_CHOSEN = "its active adapters are such as no request can have"


def choose(made: Sequence[Request], adapter: str | None, model: torch.nn.Module, traced: TokenAdapters | None) -> str | None:
    """Give new requests their adapters. Returns why the model must be traced again before they run, or None. ``traced``: None
    while the active adapters are those of all requests. Raises ValueError for an unknown name, or a model whose adapters cannot
    be chosen, or are merged."""
    if adapter is None and traced is None:
        return None
    if adapter is None:
        if (names := active_adapters(model)) is None:
            return NOT_CHOSEN
    else:
        check_adapters(model)
        known = adapter_names(model)
        if adapter == BASE in known:
            raise ValueError(f"the model has an adapter named {BASE!r}, which means none here: give it another name")
        if adapter != BASE and adapter not in known:
            raise ValueError(f"the model has no adapter {adapter!r}; it has {', '.join(map(repr, known))}, and {BASE!r} for "
                             "none")
        if merged := merged_adapters(model):
            raise ValueError(f"adapter={adapter!r} asks for a choice, and the model has merged {', '.join(map(repr, merged))} "
                             "into its weights. unmerge_adapter() takes it out; without adapter= a request gets the model as "
                             "it is")
        names = () if adapter == BASE else (adapter,)
        for request in made:
            request.chose_adapters = True
    _assign(made, names)
    if traced is not None and set(names).issubset(traced.names):
        return None
    return "a request came with an adapter of its own"


def _assign(requests: Iterable[Request], names: tuple[str, ...] | None) -> None:
    """Keys and values depend on the adapters: the requests have computed none, or they are forgotten."""
    for request in requests:
        request.adapters, request.root = names, repr(names).encode() if names else b""
        request.page_keys, request.num_keyed = [], 0


class TokenAdapters:
    """The adapters of each token as bits: bit i is that of names[i], None where a place is free. ``names``: those that the
    trace reads from the model; those in ``places`` come after them. ``merged``: the weights have the adapters of every request,
    and no token has bits."""

    def __init__(self, model: torch.nn.Module, names: Sequence[str], places: AdapterPlaces | None = None) -> None:
        self._built_in, self._places, self._model = list(names), places, model
        self.follow()

    @property
    def names(self) -> list[str | None]:
        return [*self._built_in, *(() if self._places is None else self._places.names)]

    def follow(self) -> None:
        """See whether adapters are merged now."""
        self.merged = bool(merged_adapters(self._model))

    def _bits(self, names: Sequence[str] | None) -> int:
        known = self.names
        return 0 if self.merged else sum(1 << known.index(name) for name in names or ())

    def active(self, num_tokens: int, device: torch.device) -> torch.Tensor:
        """(num_tokens,) int64: the model's active adapters for each token."""
        return torch.full((num_tokens,), self._bits(active_adapters(self._model)), dtype=torch.int64, device=device)

    def of(self, batch: ScheduledBatch) -> np.ndarray:
        """(T,) int64: those of each token of the batch."""
        own = [active_adapters(self._model) if r.request.adapters is None else r.request.adapters for r in batch.rows]
        return np.repeat(np.array(list(map(self._bits, own)), np.int64), [row.num_new for row in batch.rows])


def after_change(requests: Iterable[Request], model: torch.nn.Module, traced: TokenAdapters | None,
                 before: tuple[str, ...] | None) -> list[tuple[Request, str]]:
    """Requests that the model, traced again or with adapters merged or unmerged, cannot serve any more, and why. ``traced``:
    None if adapters cannot be chosen now; requests that have the active ones then follow the model. Else they keep theirs;
    ``before``: the adapters that were active when the model was traced."""
    requests, merged, active = list(requests), merged_adapters(model), active_adapters(model)
    own = [request for request in requests if request.adapters is not None]
    if traced is None:
        _assign([r for r in own if r.adapters == active and not (merged and r.chose_adapters)], None)
        return [(r, "the model has changed, and adapters cannot be chosen for each request any more") for r in own
                if r.adapters is not None]
    if before is None or not set(before).issubset(traced.names):
        before = active
    found = []
    for request in requests:
        if request.adapters is None:  # those that have drawn tokens keep the ones that they drew them with
            _assign([request], before if len(request.token_ids) > len(request.output.prompt_token_ids) else active)
        names = request.adapters or ()
        if not set(names).issubset(traced.names):
            found.append((request, f"its adapter {', '.join(names)} was deleted"))
        elif merged and (names != merged or request.chose_adapters):
            found.append((request, f"it has {'the adapter ' + ', '.join(names) if names else 'no adapter'}, and the model has "
                                   f"merged {', '.join(merged)} into its weights; unmerge_adapter takes it out"))
        elif not merged and not add_up(model, names):
            found.append((request, f"its adapters {', '.join(names)} are no longer merged, and of several together some are "
                                   "DoRA, whose result depends on the order"))
    return found
