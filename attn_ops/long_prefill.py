"""Two backends in one: PREFILL for the prompts of steps in which it was measured faster, REST for everything else.

The kernels that are best for long prompts may be slow at decoding, need planning on the host, and allow no CUDA graph. So
PREFILL serves a step only where the step is no CUDA graph's and

* by the times measured on this device (``attn_ops/tuning/prefill.py``) it spares all layers of a kind together at least
PLAN_US;
* it supports the site and the cache (its capabilities), and its kernels are compiled (``PrefillPart.ready``): an engine has
  them compiled while it starts, in other processes and for a limited time; nothing is compiled in a step.

Sequences of one token at the head of such a step (decodes) stay with REST where it takes a part of a batch. Without times, or
without PREFILL's package, all steps are REST's. Of MLA layers REST serves every step, and PREFILL may attend to the keys and
values that REST expands (``ExpandedPart``).
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from quire.attn_ops.attention import AttentionSite
from quire.attn_ops.backend import AttentionBackend, UnsupportedAttention
from quire.attn_ops.composite import Composite, CompositeCapabilities, check_every_step, declared, states_of
from quire.attn_ops.kernels.launch import is_recording
from quire.attn_ops.kv_cache import PagedKVCache
from quire.attn_ops.metadata import CommonAttentionMetadata
from quire.attn_ops.mla_prefill import FASTER
from quire.attn_ops.ops.rope import rope_kv_write
from quire.attn_ops.step import Step, StepLimits, current_step, running
from quire.attn_ops.tuning import prefill as tuning
from quire.attn_ops.tuning.prefill import PrefillRule, work

Kind = tuple[Any, ...]
logger = logging.getLogger(__name__)
BUILD_SECONDS = 180.0  # a module of FlashInfer took 75 s on 16 cores (benchmarks/measure.sh long)
#: Microseconds that a step must gain: planning on the host can take that long, and is not always hidden.
PLAN_US = 500.0
FAILURES = 3  # steps in a row whose planning fails, after which no further one is tried: others may be served


def kind_of(site: AttentionSite) -> Kind:
    """What the op sees of a site."""
    return (site.num_heads, site.num_kv_heads, site.head_dim, site.head_dim_v, site.dtype, site.scale, site.window,
            site.softcap, site.chunk, site.sinks, site.latent)


@dataclass
class State:
    """Of one engine or step.

    Args:
        parts: the parts' states, by name.  given: what PREFILL's will be made of; None: it is made.
        rules: of the layers that PREFILL may serve, by kind: one of the sites, their number, the rule.
        split: whether decodes at the head of a batch stay with REST.  decodes: sequences that PREFILL leaves out.
        serving: kinds that PREFILL serves in the step that is planned.
        starts: address of the batch's query_start_loc: a layer may run on a part of the batch.
        failures: steps in a row whose planning failed, but for those that were too large.
        prepared: what REST prepared for the decodes, by the address of their block table.
        expanded: PREFILL's, for MLA layers that it may serve.
    """

    parts: dict[str, Any]
    rules: dict[Kind, tuple[AttentionSite, int, PrefillRule]]
    split: bool
    given: tuple[Any, PagedKVCache, StepLimits] | None
    serving: frozenset[Kind] = frozenset()
    decodes: int = 0
    starts: int = 0
    failures: int = 0
    prepared: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    step: weakref.ref[Step] | None = None
    expanded: Any = None

    def prompts(self, query_lens: np.ndarray, seq_lens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The part of a batch that PREFILL would serve."""
        first = leading_ones(query_lens) if self.split else 0
        return query_lens[first:], seq_lens[first:]

    def won(self, query_lens: np.ndarray, seq_lens: np.ndarray) -> frozenset[Kind]:
        """The kinds for which PREFILL takes less time on a batch."""
        batch = self.prompts(query_lens, seq_lens)
        if not batch[0].size or batch[0].max() <= 1:
            return frozenset()
        return frozenset(kind for kind, (site, layers, rule) in self.rules.items()
                         if layers * rule.spared(work(site, *batch)) >= PLAN_US)


def build_seconds() -> float:
    """Seconds that compiling PREFILL's kernels may take, once per machine: QUIRE_KERNEL_BUILD_SECONDS; 0: it never begins."""
    return float(os.environ.get("QUIRE_KERNEL_BUILD_SECONDS") or BUILD_SECONDS)


def wait_seconds(chosen_by_auto: bool) -> float:
    """Seconds that an engine's start waits for that: not at all where nobody asked for PREFILL, by its name or the variable."""
    return 0.0 if chosen_by_auto and not os.environ.get("QUIRE_KERNEL_BUILD_SECONDS") else build_seconds()


def leading_ones(query_lens: np.ndarray) -> int:
    """The number of sequences at the head of a batch with one token."""
    others = np.flatnonzero(query_lens != 1)
    return int(others[0]) if others.size else len(query_lens)


@dataclass(frozen=True, eq=False)
class LongPrefill(Composite):
    """Of REST and PREFILL. ``rule``: (PREFILL, REST, site, device=, page_size=, kv_dtype=, layout=) -> the rule for a site,
    None without times. ``logged``: reasons that are in the log. ``failed``: why PREFILL failed, by device."""

    rule: Callable[..., PrefillRule | None] = tuning.rule
    logged: set[str] = field(default_factory=set)
    failed: dict[torch.device, str] = field(default_factory=dict)
    known: dict[Any, PrefillRule | None] = field(default_factory=dict)

    @property
    def rest(self) -> AttentionBackend:
        return self.parts[0]

    @property
    def prefill(self) -> AttentionBackend:
        return self.parts[1]

    def ready(self, sites: Sequence[AttentionSite], device: torch.device, seconds: float = 0.0) -> str | None:
        """``PrefillPart.ready`` of PREFILL, for those of the sites that it supports."""
        part, able = self.prefill.prefill, self._able(sites, device)
        return self.failed.get(device) or (part.ready(able, device, seconds) if part and able else None)

    def _able(self, sites: Sequence[AttentionSite], device: torch.device, **cache: Any) -> list[AttentionSite]:
        if cache.pop("fixed_scale", False):  # not measured
            return []
        if self._copies(cache.get("kv_dtype")):
            sites, cache = [s for s in sites if s.window is None], {**cache, "kv_dtype": None}
        return [s for s in sites if self.prefill.takes_prompts(s, device=device, **cache)]

    def _copies(self, kv_dtype: torch.dtype | None) -> bool:
        """Whether PREFILL reads such a cache by copies in the dtype of the queries."""
        return self.prefill.prefill is not None and kv_dtype in self.prefill.prefill.kv_dtypes

    def begin_warm_up(self, sites: Sequence[AttentionSite], device: torch.device, seconds: float) -> None:
        part, able = self.prefill.prefill, self._able(sites, device)
        if part is not None and part.begin is not None and able:
            part.begin(able, device, seconds)

    def warm_up(self, sites: Sequence[AttentionSite], device: torch.device, seconds: float) -> str | None:
        """``AttentionBackend.warm_up``: have PREFILL's kernels compiled, and run a short prompt through each of them."""
        why = self.ready(sites, device, seconds)
        kinds = {} if why else {kind_of(s): s for s in self._able(sites, device, page_size=16)}
        for site in kinds.values():
            try:
                self._try(replace(site, layer=0, kv_source=None), device)
            except Exception as error:  # an engine without these kernels is better than none
                why = self.failed[device] = f"{self.prefill.name} failed on a short prompt: {type(error).__name__}: {error}"
                break
        return why

    def _try(self, site: AttentionSite, device: torch.device) -> None:
        if site.latent is not None:
            with torch.no_grad():
                self._make_expanded(device).try_short(site)
            return
        cache = PagedKVCache.for_sites([site], num_pages=2, page_size=16, device=device)
        metadata = CommonAttentionMetadata.build([2], [2], [[1]], page_size=16, device=device)
        step = Step(cache, metadata, attention=self.prefill)
        self._make_prefill(step.states, [site], cache, StepLimits(1, 2, 1))
        if self.prefill.plan is not None:
            self.prefill.plan(metadata, step)
        q = torch.zeros(2, site.num_heads, site.head_dim, dtype=site.dtype, device=device)
        sinks = torch.zeros(site.num_heads, dtype=site.dtype, device=device) if site.sinks else None
        with running(step), torch.no_grad():
            self.prefill.op(q, None, None, *cache.of_layer(0), metadata.slot_mapping, metadata.block_table_tensor,
                            metadata.query_start_loc, metadata.seq_lens, sinks, [], scale=site.scale, window=site.window,
                            softcap=site.softcap, chunk=site.chunk)

    def make_state(self, sites: Sequence[AttentionSite], cache: PagedKVCache, limits: StepLimits) -> Any:
        """The state. An engine's has PREFILL's workspaces at once, that of a step by hand only if PREFILL serves the step."""
        of_cache: dict[str, Any] = {"page_size": cache.page_size, "kv_dtype": cache.dtype, "layout": cache.layout}
        alike: dict[Kind, list[AttentionSite]] = {}
        for site in self._able(sites, cache.device, **of_cache, fixed_scale=cache.fixed_scale):
            alike.setdefault(kind_of(site), []).append(site)
        rules = {kind: (some[0], len(some), found) for kind, some in alike.items()
                 if (found := self._rule(some[0], cache.device, of_cache)) is not None and found.ever}
        state = State(states_of(self.rest, sites, cache, limits), rules,
                      self.prefill.prefill is not None and self.rest.any_batch, (sites, cache, limits))
        if current_step() is None:
            self._complete(state)
        return state

    def _rule(self, site: AttentionSite, device: torch.device, of_cache: dict[str, Any]) -> PrefillRule | None:
        if self._copies(of_cache["kv_dtype"]):  # only caches of the model's dtype are measured, and REST is no faster on these
            of_cache = {**of_cache, "kv_dtype": None}
        key = (kind_of(site), device, *of_cache.values())
        if key not in self.known:
            self.known[key] = self.rule(self.prefill, self.rest, site, device=device, **of_cache)
        return self.known[key]

    def _complete(self, state: State) -> bool:
        """Make PREFILL's state, once. False: its kernels are not ready, and it has no layers any more."""
        if state.given is None or not state.rules:
            return bool(state.rules)
        (sites, cache, limits), state.given = state.given, None
        if why := self.ready(sites, cache.device):
            self._give_up(state, why)
            return False
        served = [s for s in sites if kind_of(s) in state.rules]
        if dense := [s for s in served if s.latent is None]:
            self._make_prefill(state.parts, dense, cache, limits)
        if len(dense) < len(served):
            state.expanded = self._make_expanded(cache.device)
        return True

    def _make_expanded(self, device: torch.device) -> Any:
        part = self.prefill.prefill
        assert part is not None and part.expanded is not None
        return part.expanded.make(device)

    def _make_prefill(self, states: dict[str, Any], sites: Sequence[AttentionSite], cache: PagedKVCache, limits: StepLimits
                      ) -> None:
        part = self.prefill.prefill
        make = part.make_state if part is not None else self.prefill.make_state
        if make is not None:
            states[self.prefill.name] = make(sites, cache, limits)

    def _give_up(self, state: State, why: str) -> None:
        state.rules.clear()
        if current_step() is None or why not in self.logged:  # each engine says it, of steps by hand the first
            self.logged.add(why)
            logger.warning("attention %s: all steps run on %s: %s", self.name, self.rest.name, why)

    def _failed_plan(self, state: State, error: Exception) -> None:
        """A batch that is too large (ValueError) says nothing of the next one; kernels that cannot run fail on every one."""
        kind, why = type(error).__name__, f"planning for {self.prefill.name} failed: {type(error).__name__}: {error}"
        state.failures += not isinstance(error, ValueError)
        if state.failures == FAILURES:
            self._give_up(state, f"{FAILURES} steps in a row, the last one: {why}")
        elif kind not in self.logged:  # the text may have the sizes of the batch
            self.logged.add(kind)
            logger.warning("attention %s: a step runs on %s, later ones try again: %s", self.name, self.rest.name, why)

    def plan(self, metadata: CommonAttentionMetadata, step: Step) -> None:
        state: State = step.states[self.name]
        step.states.update(state.parts)
        state.step, state.serving, state.prepared = None, frozenset(), {}
        if self.rest.plan is not None:
            self.rest.plan(metadata, step)
        if step.graph_key is not None or not metadata.causal or not state.rules:
            return
        query_lens = metadata.query_lens_cpu.numpy()
        serving = state.won(query_lens, metadata.seq_lens_cpu.numpy())
        if not serving or not self._complete(state):
            return
        step.states.update(state.parts)
        dense = any(state.rules[kind][0].latent is None for kind in serving)
        if self.prefill.plan is not None and dense:
            try:
                self.prefill.plan(metadata, step)
            except Exception as error:  # nothing has run yet: REST can serve the step
                self._failed_plan(state, error)
                return
        state.failures = 0
        if any(state.rules[kind][0].latent is not None for kind in serving):
            step.notes[FASTER] = state.expanded.begin()
        state.serving, state.decodes = serving, leading_ones(query_lens) if state.split else 0
        state.starts, state.step = metadata.query_start_loc.data_ptr(), weakref.ref(step)

    def _state(self, q: torch.Tensor, tensors: Sequence[Any], options: dict[str, Any]) -> State | None:
        """The state of the step, if PREFILL serves the site in it."""
        step = current_step()
        state = None if step is None or is_recording() else step.states.get(self.name)
        if state is None or state.step is None or state.step() is not step or tensors[6].data_ptr() != state.starts:
            return None
        k_cache, v_cache, sinks = tensors[0], tensors[1], tensors[8]
        kind = (q.shape[1], k_cache.shape[2], q.shape[2], v_cache.shape[3], q.dtype, options["scale"], options["window"],
                options["softcap"], options["chunk"], sinks is not None, None)
        return state if kind in state.serving else None

    def op(self, q: Any, k: Any, v: Any, *rest: Any, **options: Any) -> torch.Tensor:
        *tensors, prepared = rest
        state = self._state(q, tensors, options)
        if state is None:
            return super().op(q, k, v, *rest, **options)
        out: torch.Tensor = self.prefill.op(q, k, v, *tensors, self._prepared(self.prefill, prepared), **options)
        if n := state.decodes:  # their keys are stored now
            caches, (slots, table, starts, lens, sinks) = tensors[:4], tensors[4:]
            few = slots[:n], table[:n], starts[: n + 1], lens[:n]
            if (key := table.data_ptr()) not in state.prepared:  # once per step; layers with a window may have another table
                state.prepared[key] = self.rest.prepared(*few, caches[0].shape[1])
            out[:n] = self.rest.op(q[:n], None, None, *caches, *few, sinks, state.prepared[key], **options)
        return out

    def rope_op(self, *args: Any, **form: Any) -> torch.Tensor:
        rope, tensors, prepared = args[:8], args[8:-1], args[-1]
        options = {name: form.pop(name) for name in ("scale", "window", "softcap", "chunk")}
        if self._state(rope[0], tensors, options) is None:
            return super().rope_op(*args, **options, **form)
        return self.op(rope_kv_write(*rope, *tensors[:5], **form), None, None, *tensors, prepared, **options)

    def long_backend(self) -> AttentionBackend:
        """The composite as a backend, its ops registered. It declares what REST does, which serves MLA alone."""
        rest = self.rest
        capabilities = CompositeCapabilities(**declared(rest, lse=False), serving=lambda site: (rest,))
        return replace(
            self.backend(capabilities, self.route), capabilities=replace(capabilities, lse=rest.capabilities.lse),
            state_op=rest.state_op, make_state=self.make_state, plan=self.plan,
            same_in_graphs=rest.same_in_graphs, plans_graphs=rest.plan is not None and rest.plans_graphs,
            plans_windows=self.prefill.plan is None or self.prefill.plans_windows, warm_up=self.warm_up,
            begin_warm_up=self.begin_warm_up,
            takes_other_batches=rest.plan is None and rest.make_state is None,
            without_graph=self.without_graph, scratch_bytes=rest.scratch_bytes)

    def without_graph(self, sites: Sequence[AttentionSite], device: torch.device, state: State, query_lens: np.ndarray,
                      seq_lens: np.ndarray) -> tuple[float, float]:
        """``AttentionBackend.without_graph``: REST may have a way of its own for what PREFILL does not serve."""
        won, with_graph, without = state.won(query_lens, seq_lens), 0.0, 0.0
        # MLA's graphs hold the absorbed form, which is REST's to judge.
        rules = {kind: rule for kind, rule in state.rules.items() if rule[0].latent is None} if won else {}
        for kind, (site, layers, rule) in rules.items():
            of = work(site, *state.prompts(query_lens, seq_lens))
            with_graph += layers * (rule.graph or rule.rest).us(of)
            without += layers * (rule.prefill if kind in won else rule.rest).us(of)
        others = [site for site in sites if kind_of(site) not in rules]
        if self.rest.without_graph is not None and others:
            more = self.rest.without_graph(others, device, state.parts.get(self.rest.name), query_lens, seq_lens)
            with_graph, without = with_graph + more[0], without + more[1]
        return with_graph, without

    def route(self, site: AttentionSite) -> str:
        device = torch.device(min(self.prefill.capabilities.devices))
        if not self._able([site], device) or device in self.failed:
            return self.rest.serves(site)
        later = self.prefill.available(device) is None and self.ready([site], device) is not None
        prompts = self.prefill.serves(site) if site.latent is None else f"expanded for {self.prefill.name}"
        return (f"{self.rest.serves(site)}, long prompts {prompts}"
                + " once its kernels are compiled" * later)


def make(name: str, prefill: AttentionBackend, rest: AttentionBackend, rule: Callable[..., PrefillRule | None] = tuning.rule
         ) -> AttentionBackend:
    """The backend ``name``; ``rule``: see LongPrefill. Raises UnsupportedAttention for two backends of one name, one that must
    see every step, or one that is an approximation."""
    if prefill is rest:
        raise UnsupportedAttention(f"attention={name!r}: two different backends are needed")
    check_every_step(name, (prefill, rest))
    if rest.op is None or prefill.op is None:
        raise UnsupportedAttention(f"attention={name!r}: both backends must serve keys and values of all heads")
    parts = (rest, prefill)
    return LongPrefill(name, parts, lambda *of_step: rest, lambda *of_step: (), lambda site: (rest,), rule=rule).long_backend()
