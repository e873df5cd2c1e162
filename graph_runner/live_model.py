"""A model in use: its runner, traced again when the model changes."""

from __future__ import annotations

import contextlib
import logging
from dataclasses import replace
from typing import Any

import torch

from quire.attn_ops.backend import UnsupportedAttention
from quire.graph_runner import loading
from quire.graph_runner.adapter_places import AdapterPlaces
from quire.graph_runner.adapters import NOT_CHOSEN
from quire.graph_runner.cast_weights import CastWeights
from quire.graph_runner.config import EngineConfig
from quire.graph_runner.copies import count_merges
from quire.graph_runner.engine_lock import isolated
from quire.graph_runner.model_guard import ModelGuard, buffer_versions
from quire.graph_runner.model_runner import ModelRunner
from quire.graph_runner.paged_forward import own_forward
from quire.graph_runner.scheduler import Scheduler
from quire.graph_runner.window_pages import WindowPages, fit_requests
from quire.passes.capture.evaluating import ChangedWhileTraced
from quire.passes.capture.four_bit import Packing
from quire.passes.capture.lora import (
    active_adapters,
    adapter_layers,
    adapter_names,
    can_choose,
    check_adapters,
    is_merged_and_disabled,
)

logger = logging.getLogger(__name__)
_ATTEMPTS = 8  # to trace a model that other threads change meanwhile


class LiveModel:
    """The runner of a model, and the guard of what its trace read. ``config``: the options, with the lengths and the number of
    pages that were chosen. ``runner``: of the latest trace. ``cast``: the weights in the dtype that was asked for; None: the
    model's own are used. ``places``: of the trace for adapters; None without ``max_loras``. ``num_pages``: pages of the KV
    cache, the same for every trace. ``adapters``: whether each request has adapters of its own. ``names``, ``active``: of the
    model's adapters, and of those active, when it was traced. ``version``: another one after each trace, each merge of adapters
    and each that was replaced: what was computed before is of another model."""

    def __init__(self, model: torch.nn.Module, config: EngineConfig) -> None:
        self.model, self.config = model, loading.limited(config, model)
        if config.enable_lora:
            check_adapters(model)
        self.adapters = config.enable_lora
        self._stale: str | None = None  # a change after which the model could not be traced
        self.version = 0
        self._merged: list[list[str]] | None = None
        self._to_take: list[list[str]] | None = None  # of ``change``
        self._trace()
        self.num_pages = self.runner.cache.num_pages
        self.config = replace(self.config, num_pages=self.num_pages)
        self._longest = self.limits()[0]

    def _trace(self) -> None:
        """Make the runner, again where another thread changed the model while it was traced. Raises UnsupportedAttention if it
        cannot be served, RuntimeError if it changed each time."""
        loading.check_model(self.model)
        changed: str | None = None
        self.cast: CastWeights | None
        self.places: AdapterPlaces | None
        for _ in range(_ATTEMPTS):
            tuners = list(adapter_layers(self.model).values())
            self._layers = [layer for layer in tuners if hasattr(layer, "merged_adapters")]
            self._note_switches(tuners)
            count_merges(self._layers)
            self._unmerge_disabled(self.model)
            if any(layer.disable_adapters and layer.merged_adapters for layer in self._layers):
                raise UnsupportedAttention("adapters are merged and disabled, and PEFT's forward may unmerge layers of this "
                                           "kind while it runs: call unmerge_adapter()")
            self._merged, self._to_take = [list(layer.merged_adapters) for layer in self._layers], None
            self._scalings = self._scalings_now()
            before, versions, dtype = ModelGuard(self.model, addresses=False), buffer_versions(self.model), self.config.dtype
            cast_to = dtype if isinstance(dtype, torch.dtype) else None
            self.cast = self.places = None  # the old copies are freed before new ones are made
            self.adapters, count = self.adapters and can_choose(self.model), self.config.max_loras
            if self.adapters and count is not None:
                self.places = AdapterPlaces(self.model, count, self.config.max_lora_rank, cast_to)
            apart = None if self.places is None else self.places.apart
            self.cast = None if cast_to is None else CastWeights(self.model, cast_to)
            self.names, self.active = adapter_names(self.model), active_adapters(self.model)
            try:
                with own_forward(self.model), self.cast.in_place() if self.cast is not None else contextlib.nullcontext():
                    self.runner = ModelRunner(self.model, self.config, self.adapters, self.places)
            except ChangedWhileTraced as error:
                changed = str(error)
                continue
            except Exception:
                seen = before.changed_meanwhile(())
                if seen is None or seen == changed:  # the same twice: it is the forward that does it
                    raise
                changed = seen
                continue
            paged, self._embedding = self.runner.paged, loading.input_embedding(self.model)
            if (changed := before.changed_meanwhile(paged.reads.names)) is None:
                self._packing = Packing(self.model)
                if self.cast is not None:
                    if apart is not None:  # read by its own forward only, with which the trace was compared
                        self.cast.leave_out(self.model, apart)
                    paged.stand_ins = self.cast.stand_ins
                self._guard = ModelGuard(
                    self.model, addresses=self.runner.device.type == "cuda", reads=paged.reads.names or None,
                    elsewhere=paged.reads.values, versions=versions, apart=apart,
                    buffer_values=any(site.route != "interface" for site in self.runner.sites))
                return
            self.runner.close()
        raise RuntimeError(f"other threads changed the model each of the {_ATTEMPTS} times it was traced ({changed}). Change "
                           "it before the engine is made, or between its steps: with engine.lock.hold(): ...")

    def change(self, everything: bool = True) -> str | None:
        """Describes a change of the model since it was traced, or None. ``everything``: compare the whole model, else the next
        few modules."""
        if self._stale is not None or not self.runner.paged.traced:
            return self._stale or "torch._dynamo.reset() dropped its trace"
        if self.cast is not None and (replaced := self.cast.replaced()) is not None:
            return replaced
        if (packing := self._packing.change()) is not None:
            return packing
        if self._embedding is not None:  # resize_token_embeddings: at once, for rows that are gone must not be read
            everything |= self._embedding.weight.shape[0] != self.runner.vocab_size
        everything |= (merges := self._merges()) is not None
        everything |= self.switched(everything=False)
        if (scalings := self._scalings_now()) != self._scalings:  # set_scale, say, which also those that come next must have
            self._scalings, everything = scalings, True
        if self.places is not None:
            placed = self.places.placed
            if (unfit := self.places.change(everything)) is not None:
                return unfit
            everything |= self.places.placed != placed  # and nothing else has changed, or it is traced again
        if everything and self.runner.adapters is not None and active_adapters(self.model) is None:
            return NOT_CHOSEN
        found = self._guard.change() if everything else self._guard.next_change()
        if everything and found is None:
            self._note_switches([layer for layer, _ in self._switches])
        if self.runner.adapters is None and merges is not None:
            return found or "its adapters were merged or unmerged"
        self._to_take = merges
        return found

    def take_adapters(self) -> bool:
        """Whether ``change``, which gave None, has met adapters that were merged into the weights or taken out, or one in a
        place that was deleted or replaced. The trace serves that; what was computed before is of other weights."""
        if self.runner.adapters is None:
            return False
        stale = self.places is not None and self.places.take_stale()
        if self._to_take is None and not stale:
            return False
        if self._to_take is not None:
            self._merged, self._to_take = self._to_take, None
        self.runner.adapters.follow()
        self.refresh(everything=True)  # PEFT writes through ``weight.data``, which PyTorch does not count
        self.version += 1
        return True

    def _note_switches(self, tuners: list[Any]) -> None:
        self._switches = [(layer, _switch_of(layer)) for layer in tuners]
        kinds = {kind: [each for each in self._switches if type(each[0]) is kind] for kind in map(type, tuners)}
        self._ends = [end for of_kind in kinds.values() for end in (of_kind[0], of_kind[-1])]

    def switched(self, everything: bool = True) -> bool:
        """Whether other adapters are active than those of the trace, which all requests have, or they were turned off or on:
        ``peft.disable_adapter()``, for the reference policy, must hold for a request that begins in it. ``everything``: of all
        layers; else of the first and the last of each kind, since PEFT switches all."""
        return self.runner.adapters is None and any(
            _switch_of(layer) != then for layer, then in (self._switches if everything else self._ends))

    def _scalings_now(self) -> list[dict[str, Any]]:
        return [dict(layer.scaling) for layer in self._layers if isinstance(getattr(layer, "scaling", None), dict)]

    def _merges(self) -> list[list[str]] | None:
        """What each layer has merged, if that is not what the latest trace or ``take_adapters`` saw."""
        now = [layer.merged_adapters for layer in self._layers]
        if any(now) and any(map(is_merged_and_disabled, self._layers)):
            self._unmerge_disabled(self.model)
        return None if now == self._merged else list(map(list, now))

    @isolated
    def _unmerge_disabled(self, model: torch.nn.Module) -> None:
        """Unmerge layers that are disabled, as PEFT's own forward does first."""
        for layer in filter(is_merged_and_disabled, self._layers):
            layer.unmerge()
            self._merged = None  # maybe as before, with other numbers, elsewhere in memory

    def refresh(self, everything: bool) -> None:
        """Let copies of the weights follow the model. ``everything``: also what PyTorch does not count."""
        if self.cast is not None:
            self.cast.copies.refresh(everything)
        if self.places is not None and everything:  # else ``change`` has done it
            self.places.copies.refresh(everything=True)

    def close(self) -> None:
        """Free graphs, cache and copies of weights, and restore the model."""
        self.runner.close()
        self.cast = self.places = None

    def limits(self) -> tuple[int, int | None]:
        """The maximum length of a request, and the maximum chunk of a prefill."""
        config, runner, windows = self.config, self.runner, self.runner.sizes.window_pages(self.num_pages)
        length, chunk = fit_requests(runner.reach, self.num_pages, config.page_size, config.prefill_chunk_size,
                                     config.max_num_batched_tokens, runner.max_model_len)
        if windows is not None:
            length, chunk = fit_requests(runner.window_reach, windows, config.page_size, chunk,
                                         config.max_num_batched_tokens, length)
        return length, chunk

    def fit(self, scheduler: Scheduler) -> int:
        """Give a scheduler of which no request runs the limits of the latest trace; returns the maximum length of a request."""
        runner, pages = self.runner, self.runner.sizes.window_pages(self.num_pages)
        length, scheduler.prefill_chunk_size = self.limits()
        scheduler.reach, scheduler.windows, scheduler.length_limits = runner.reach, None, runner.length_limits
        if runner.window_reach is not None and pages is not None:
            scheduler.windows = WindowPages(runner.window_reach, pages, self.config.page_size)
        if scheduler.prefixes is not None:
            scheduler.prefixes.windows, scheduler.prefixes.others = scheduler.windows, runner.paged.other_tensors
            scheduler.prefixes.places = self.places
        return length

    def trace_again(self, change: str, own_adapters: bool = False) -> None:
        """Replace the runner by one for the model as it is now; no step may be in flight. ``own_adapters``: from now on each
        request has adapters of its own, as long as the model allows it; so too if what changed are the active adapters, or
        those merged. Raises RuntimeError if the model cannot be served any more. ``change`` then returns the same change; call
        this again."""
        logger.warning("%s changed (%s): tracing it again", type(self.model).__name__, change)
        self._stale, before = change, self.adapters
        # Who has switched adapters once, or merged them, will do so again: from now on that is data, not another graph.
        switched = adapter_names(self.model) == self.names and (active_adapters(self.model) != self.active or (
            self._merges() is not None))
        self.adapters |= own_adapters or switched and can_choose(self.model)
        self.runner.close()
        try:
            self._trace()
            if self.limits()[0] < self._longest:
                raise ValueError("its attention reaches further back than before, so that requests may need more KV cache than "
                                 "there is")
            if self._guard.change() == change:  # it would be traced again and again
                raise ValueError("the same change is seen right after the new trace")
        except Exception as error:
            self.adapters = before  # if they are the reason, the next step can go on without
            why = str(error).rstrip(".") or type(error).__name__
            raise RuntimeError(f"the model was changed after the engine traced it ({change}), and cannot be served as it is "
                               f"now: {why}. Undo the change, or close the engine") from error
        self._stale = None
        self.version += 1


def _switch_of(layer: Any) -> tuple[bool, list[str]]:
    """Of a layer of PEFT's: whether its adapters are off, and which are active."""
    return layer.disable_adapters, list(layer.active_adapters)
