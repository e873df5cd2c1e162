"""Adapters that a model gets while an engine is open, without a new trace (``max_loras``).

A trace has ``max_loras`` places (``LoraPlaces``), which are inputs of its graphs, and LoRA adapters are copied into them: those
that the model has when it is traced and those that it gets later, as long as they fit. So adapters come and go, and neither
their number nor their names are in a graph. What does not fit a place (DoRA, adapters of experts, a greater rank, more adapters
than places) is built into the trace, as without ``max_loras``.

The copies follow the adapters (``graph_runner/copies.py``). Before each step all layers are looked at: which adapters they
have, which parameters these are, and their scaling. What else a place cannot hold (a hook on ``lora_A``, another dtype) is
looked for in all adapters when the engine gets work after it was idle, and while it is busy in a few per step. The trace reads
nothing of adapters that are in places, so ``ModelGuard`` compares the model without them: what it finds beside an addition is a
change of the model, as ever.
"""

from __future__ import annotations

import functools
import logging
import operator
from itertools import chain, compress
from typing import Any

import torch

from quire.attn_ops.ops.lora_rows import MAX_ADAPTERS, MAX_KERNEL_ADAPTERS, MAX_RANK
from quire.graph_runner.copies import Copies
from quire.graph_runner.model_parts import Apart
from quire.passes.capture.expert_lora import more_than_matrices
from quire.passes.capture.hf_experts import is_wrapper
from quire.passes.capture.lora import LoraPlaces, adapter_layers, adapter_names

logger = logging.getLogger(__name__)
LEAST_RANK = 16  # of places if no rank is asked for; the kernels compute as much for smaller ones
_PARTS = ("lora_A", "lora_B", "lora_dropout")  # of a layer: each has a child for each adapter
# Loops over all parameters of all adapters, before each step, are C's: ``map`` with these.
_MODULES, _PARAMETERS, _SCALING = map(operator.attrgetter, ("_modules", "_parameters", "scaling"))
_A_AND_B, _WEIGHT = operator.itemgetter("lora_A", "lora_B"), operator.itemgetter("weight")
_A_FEW = 4  # adapters of layers that are looked at in a step of a busy engine


#: An adapter in a place: of each layer that it adapts, by number, A, B and the scaling.
_Seen = dict[int, tuple[torch.Tensor, torch.Tensor, float]]


def _same(one: _Seen, other: _Seen | None) -> bool:
    return other is not None and one.keys() == other.keys() and all(
        a is c and b is d and s == t for (a, b, s), (c, d, t) in zip(one.values(), other.values(), strict=True))


class AdapterPlaces:
    """The places of one trace of ``model``, and what is in them.

    Args:
        count: places.  rank: of each; None: LEAST_RANK, or the greatest of the model's adapters.
        dtype: that the engine casts weights to: adapters are rounded to it. None: they are not.

    Attributes:
        built_in: the names, sorted, of the adapters that the trace reads from the model itself.
        names: of the adapter in each place, or None.
        apart: the parts of the model that the trace does not read.
        copies: of the adapters, in the places.
        placed: how often adapters were given places.
        version: another one whenever what is in places has changed, but for adapters that are new.

    Raises ValueError if there are more places and adapters than MAX_ADAPTERS.
    """

    def __init__(self, model: torch.nn.Module, count: int, rank: int | None, dtype: torch.dtype | None) -> None:
        found = adapter_layers(model)
        self._paths, self._layers, self._cast = list(found), list(found.values()), dtype
        self.names: list[str | None] = [None] * count
        self.version, self.placed, self._stale, self._next = 0, 0, False, 0
        names = adapter_names(model)
        if rank is None:
            rank = max([LEAST_RANK, *(len(layer.lora_A[name].weight) for layer in self._layers if not is_wrapper(layer)
                                      for name in layer.lora_A if name not in layer.lora_variant)])
        # Float32, PEFT's default, also for adapters in half precision, whose product with a scaling would be rounded.
        own = [{layer.lora_A[name].weight.dtype for name in layer.lora_A} for layer in self._layers]
        dtypes = [functools.reduce(torch.promote_types, sorted(each, key=str), torch.float32) for each in own]
        self.lora = LoraPlaces(self._layers, count, rank, dtypes)
        fit = [name for name in names if self._misfit(name) is None][:count]
        self.built_in = sorted(set(names) - set(fit))
        if self.built_in:
            logger.info("adapters without a place of max_loras=%d, which are built into the trace: %s", count, "; ".join(
                f"{name} ({self._misfit(name) or 'all places are taken'})" for name in self.built_in))
        if len(self.built_in) + count > MAX_ADAPTERS:
            raise ValueError(f"max_loras={count} and {len(self.built_in)} adapters that have no place are more than the "
                             f"{MAX_ADAPTERS} that requests can choose among; lower max_loras")
        kept = frozenset(self.built_in)
        self.apart: Apart = {id(layer._modules[part]): kept for layer in self._layers for part in _PARTS}
        self._place(fit, {})
        self._log_limits(len(self.built_in) + count, rank)

    def _log_limits(self, count: int, rank: int) -> None:
        place = next(self.lora.parameters(), None)  # None: no layer has any, for all adapters are of experts
        if place is None or not place.is_cuda:
            return
        if count > MAX_KERNEL_ADAPTERS or rank > MAX_RANK:
            logger.warning(
                "%d adapters of a layer, of rank %d, are more than the kernels take (%d of rank %d): each costs two products "
                "for all tokens of a step, whoever has it. Lower max_loras or max_lora_rank",
                count, rank, MAX_KERNEL_ADAPTERS, MAX_RANK)
        elif 3 * count > MAX_KERNEL_ADAPTERS:
            logger.info("%d adapters of q, k and v are more than one launch of the kernels takes (%d): they have launches of "
                        "their own", 3 * count, MAX_KERNEL_ADAPTERS)

    @property
    def num_bytes(self) -> int:
        """Memory of the places."""
        return sum(p.numel() * p.element_size() for p in self.lora.parameters())

    # -- what the model has -----------------------------------------------------------------------------------------

    def _of(self, name: str) -> _Seen:
        return {i: (layer.lora_A[name].weight, layer.lora_B[name].weight, layer.scaling[name])
                for i, layer in enumerate(self._layers)
                if all(name in each for each in (layer.lora_A, layer.lora_B, layer.scaling))}

    def _misfit(self, name: str) -> str | None:
        """Why the adapter cannot be in a place, or None."""
        return next((f"{path}: {why}" for i, (path, layer) in enumerate(zip(self._paths, self._layers, strict=True))
                     if (why := self._misfit_of(i, layer, name)) is not None), None)

    def _misfit_of(self, number: int, layer: Any, name: str) -> str | None:
        has = [name in each for each in (layer.lora_A, layer.lora_B, layer.scaling)]
        if not any(has):
            return None
        if is_wrapper(layer):
            return "it adapts the parameters of experts"
        if not all(has) or name in layer.lora_variant or name in layer.lora_magnitude_vector:
            return "it is more than LoRA of a linear layer (DoRA, for one)"
        if (why := more_than_matrices(layer, name)) is not None:
            return f"it is one {why}"
        if type(layer.scaling[name]) not in (int, float):
            return "its scaling is not a number"
        if any("forward" in vars(each[name]) for each in (layer.lora_A, layer.lora_B)):
            return "A or B has a forward of its own"
        a, b = layer.lora_A[name].weight, layer.lora_B[name].weight
        place_a, place_b = self.lora.pair(number, 0)
        if any(type(t) is not torch.nn.Parameter or t.layout != torch.strided or t.device != place_a.device for t in (a, b)):
            return "A or B is not a plain parameter on the layer's device"
        if any(not t.is_floating_point() or t.dtype.itemsize < 2 or torch.promote_types(t.dtype, place_a.dtype) != place_a.dtype
               for t in (a, b)):
            return f"it is in {a.dtype} and {b.dtype}, and places are in {place_a.dtype}"
        if (rank := len(a)) > self.lora.rank:
            return f"its rank is {rank}, and places have {self.lora.rank} (max_lora_rank)"
        if a.shape[1:] != place_a.shape[1:] or b.shape != (len(place_b), rank):
            return f"its shapes are {tuple(a.shape)} and {tuple(b.shape)}"
        return None

    def _walk(self) -> tuple[list[str], list[int], list[torch.nn.Module], list[dict[str, float]]]:
        """Now: the names of the adapters in each A and B, how many these are, their modules, and the scaling of each layer."""
        parts = list(map(_MODULES, chain.from_iterable(map(_A_AND_B, map(_MODULES, self._layers)))))
        return (list(chain.from_iterable(parts)), list(map(len, parts)), list(chain.from_iterable(map(dict.values, parts))),
                list(map(_SCALING, self._layers)))

    def _as_seen(self) -> bool:
        """Whether the layers have the same adapters as before, with the same parameters and scaling. All is walked again, from
        the layers to the parameters, so that no change can go around what was seen before. Modules are compared by ``==``,
        which may be their own; but what they hold as weight must be the same object. What is written into it, ``Copies`` sees.
        """
        try:
            if (now := self._walk()) != self._known:
                return False
            parameters = list(map(_PARAMETERS, compress(now[2], self._in_places)))
            return all(map(operator.is_, list(map(_WEIGHT, parameters)), self._weights))
        except KeyError:  # the parameter has another name now, or the layer no A and B
            return False

    def _place(self, names: list[str], before: dict[str, _Seen]) -> None:
        """Give the adapters ``names`` places, those that have one theirs. ``before``: what is in places now."""
        self.placed += 1
        found, sizes, modules, scaling = self._walk()  # first: what changes meanwhile is seen at the next step
        known, in_places = (found, sizes, modules, list(map(dict, scaling))), [name in names for name in found]
        weights = [module._parameters.get("weight") for module in compress(modules, in_places)]
        seen = {name: self._of(name) for name in names}
        for place, name in enumerate(self.names):
            if name is not None and not (name in seen and _same(seen[name], before.get(name))):
                self._clear(place)
                if name not in seen:
                    self.names[place] = None
        for name in names:
            if name not in self.names:
                self.names[self.names.index(None)] = name
        originals, copies, factors = list[torch.Tensor](), list[torch.Tensor](), list[float]()
        for name in names:
            for i, (a, b, factor) in seen[name].items():
                place_a, place_b = self.lora.pair(i, self.names.index(name))
                originals += a, b
                copies += place_a[: len(a)], place_b[:, : len(a)]
                factors += 1.0, float(factor)
        self.copies = Copies(originals, copies, factors, self._cast)
        # Last: if anything before has failed, the next call does it again.
        self._seen, self._known, self._in_places, self._weights = seen, known, in_places, weights
        self._pairs = [(name, i) for name in names for i in seen[name]]

    def _clear(self, place: int) -> None:
        with torch.inference_mode(False), torch.no_grad():
            torch._foreach_zero_([t for i, layer in enumerate(self._layers)
                                 if not is_wrapper(layer) for t in self.lora.pair(i, place)])

    # -- following --------------------------------------------------------------------------------------------------

    def change(self, everything: bool) -> str | None:
        """Let the places follow the model. Describes what the trace cannot take, or None. ``everything``: look at all of each
        adapter; else at a few."""
        behind = self.copies.is_behind()
        if not everything and not behind and self._as_seen():
            return self._next_misfit()
        found = sorted({name for layer in self._layers for part in (layer.lora_A, layer.lora_B) for name in part})
        names = [name for name in found if name not in self.built_in]
        for name in names:
            if (why := self._misfit(name)) is not None:
                return f"adapter {name!r} does not fit the places of max_loras={len(self.names)}: {why}"
        if len(names) > len(self.names):
            return (f"{len(names)} adapters, {', '.join(map(repr, names))}, are more than the places of "
                    f"max_loras={len(self.names)}")
        self.version += behind
        if not self._as_seen():
            before = self._seen
            new = [name for name in names if name not in before]
            self._place(names, before)
            if any(not _same(seen, self._seen.get(name)) for name, seen in before.items()):
                self._stale = True
                self.version += 1
            if new:
                logger.info("new adapters in places of the trace: %s", ", ".join(new))
        elif behind:
            self.copies.refresh(everything=True)
        return None

    def _next_misfit(self) -> str | None:
        for _ in range(min(_A_FEW, len(self._pairs))):
            self._next = (self._next + 1) % len(self._pairs)
            name, i = self._pairs[self._next]
            if (why := self._misfit_of(i, self._layers[i], name)) is not None:
                return f"adapter {name!r} does not fit its place any more: {self._paths[i]}: {why}"
        return None

    def take_stale(self) -> bool:
        """Whether, since the last call, an adapter was deleted, or is another one under its name: results computed with it are
        of no use any more."""
        stale, self._stale = self._stale, False
        return stale
