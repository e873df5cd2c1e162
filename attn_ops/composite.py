"""Backends made of backends: one per phase of a batch, or one per kind of layer. The op of a composite chooses a part and calls
that part's op; its other hooks call those of all parts. It declares what every part that may serve a site declares."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from quire.attn_ops.attention import AttentionSite
from quire.attn_ops.backend import (
    AttentionBackend,
    AttentionCapabilities,
    CudagraphSupport,
    UnsupportedAttention,
    define_paged_op,
    define_prepare,
)
from quire.attn_ops.kernels.launch import is_recording
from quire.attn_ops.kv_cache import PagedKVCache
from quire.attn_ops.metadata import CommonAttentionMetadata
from quire.attn_ops.mla import define_mla_op
from quire.attn_ops.ops.rope import rope_kv_write
from quire.attn_ops.step import Step, StepLimits

#: Kinds of attention sites, for ``attention={"full": NAME, "window": NAME}``.
KINDS = ("full", "window", "chunk")


def kind_of(window: int | None, chunk: int | None) -> str:
    return "chunk" if chunk is not None else "window" if window is not None else "full"


def attention_name(attention: Any) -> Any:
    """``attention`` as a name: ``{"full": "a", "window": "b"}`` is "full=a,window=b". Anything else is returned as it is.
    Raises ValueError for a kind that does not exist, or no kind at all."""
    if not isinstance(attention, Mapping):
        return attention
    unknown = [k for k in attention if k not in KINDS]
    if unknown or not attention:
        raise ValueError(f"attention={dict(attention)!r}: give a backend for some of the kinds of layers {', '.join(KINDS)}"
                         + (f"; {', '.join(map(repr, unknown))} is none" if unknown else ""))
    return ",".join(f"{kind}={attention[kind]}" for kind in KINDS if kind in attention)


@dataclass(frozen=True)
class CompositeCapabilities(AttentionCapabilities):
    """serving: the parts that may serve a site, or the reason why there is none."""

    serving: Callable[[AttentionSite], Sequence[AttentionBackend] | str] = lambda site: ()

    def reasons_against(self, site: AttentionSite, **cache: Any) -> list[str]:
        parts = self.serving(site)
        if getattr(site, "latent", None) is not None and not self.mla:
            return ["no MLA on the latent cache, which all its backends must have"]
        if isinstance(parts, str):
            return [parts]
        return [f"{part.name}: {why}" for part in parts for why in part.capabilities.reasons_against(site, **cache)]


def common_capabilities(parts: Sequence[AttentionBackend], serving: Any, support: CudagraphSupport, **features: bool
                        ) -> CompositeCapabilities:
    """What all ``parts`` declare; ``features`` replace some."""
    caps = [part.capabilities for part in parts]
    both: dict[str, Any] = {
        f.name: all(getattr(c, f.name) for c in caps) for f in dataclasses.fields(AttentionCapabilities) if f.type == "bool"}
    for name in ("devices", "dtypes", "kv_dtypes", "fixed_scale_kv_dtypes", "latent_kv_dtypes", "layouts"):
        both[name] = frozenset.intersection(*(getattr(c, name) for c in caps))
    for name in ("head_dims_note", "heads_note", "mla_dims_note", "page_sizes_note", "kv_dtypes_note"):
        both[name] = "; ".join(dict.fromkeys(note for c in caps if (note := getattr(c, name)) not in ("", "any"))) or (
            "" if name == "kv_dtypes_note" else "any")
    both["lse"] = False
    needs = [item for c in caps for item in c.min_kv_compute_capability.items()]
    return CompositeCapabilities(
        **{**both, **features}, min_kv_compute_capability={d: max(n for k, n in needs if k == d) for d, _ in needs},
        head_dims=lambda d, dv: all(c.head_dims(d, dv) for c in caps),
        heads=lambda heads, kv_heads: all(c.heads(heads, kv_heads) for c in caps),
        mla_dims=lambda rank, rope: all(c.mla_dims(rank, rope) for c in caps),
        page_sizes=lambda p: all(c.page_sizes(p) for c in caps),
        min_compute_capability=max(c.min_compute_capability for c in caps), cudagraph_support=support, serving=serving)


@dataclass(frozen=True, eq=False)
class Composite:
    """``parts``: without repetition. ``choose``: (tokens, rows of the batch, window, chunk) -> the part that attends.
    ``planned``: (tokens, rows, whether the step runs as a CUDA graph) -> the parts whose plan a step needs. ``site_parts``:
    those that may serve a site, or why there is none. ``slices``: of what was prepared, by part."""

    name: str
    parts: tuple[AttentionBackend, ...]
    choose: Callable[[int, int, int | None, int | None], AttentionBackend]
    planned: Callable[[int, int, bool], Iterable[AttentionBackend]]
    site_parts: Callable[[AttentionSite], Sequence[AttentionBackend] | str]
    slices: dict[str, slice] = dataclasses.field(default_factory=dict)

    def op(self, q: Any, k: Any, v: Any, *rest: Any, **options: Any) -> torch.Tensor:
        *tensors, prepared = rest  # caches, scales, tables, sinks
        for part in self._attending(q, tensors, options):
            out = part.op(q, k, v, *tensors, self._prepared(part, prepared), **options)
        return out

    def rope_op(self, *args: Any, **form: Any) -> torch.Tensor:
        rope, tensors, prepared = args[:8], args[8:-1], args[-1]
        options = {name: form.pop(name) for name in ("scale", "window", "softcap", "chunk")}
        for part in self._attending(rope[0], tensors, options):
            given = self._prepared(part, prepared)
            if part.rope_op is not None and (part.rope_forms or not form):
                out = part.rope_op(*rope, *tensors, given, **options, **form)
            else:
                q = rope_kv_write(*rope, *tensors[:5], **form)
                out = part.op(q, None, None, *tensors, given, **options)
        return out

    def mla_op(self, q: Any, *args: Any, scale: float) -> torch.Tensor:
        tensors, prepared, scales = args[:8], args[8], args[9:]
        for part in self._attending(q, tensors, {}):
            if part.mla_op is not None:
                out = part.mla_op(q, *tensors, self._prepared(part, prepared), *scales, scale=scale)
        return out

    def _attending(self, q: torch.Tensor, tensors: Sequence[Any], options: dict[str, Any]) -> tuple[AttentionBackend, ...]:
        """The part that attends; all of them while kernels are compiled ahead: those of each may run."""
        if is_recording():
            return self.parts
        return (self.choose(q.shape[0], tensors[7].shape[0], options.get("window"), options.get("chunk")),)  # seq_lens

    def _prepared(self, part: AttentionBackend, prepared: list[torch.Tensor]) -> list[torch.Tensor]:
        return prepared[self.slices[part.name]] if prepared and part.name in self.slices else []

    def prepare(self, *args: Any) -> list[torch.Tensor]:
        """The tensors that the parts prepare, end to end; each part's op gets its own."""
        found: list[torch.Tensor] = []
        for part in self.parts:
            if part.prepare is not None:
                made = part.prepare(*args)
                self.slices[part.name] = slice(len(found), len(found) + len(made))
                found += made
        return found

    def make_state(self, sites: Sequence[AttentionSite], cache: PagedKVCache, limits: StepLimits) -> dict[str, Any]:
        """The parts' states, by name, each for the sites that it may serve."""
        def serves(part: AttentionBackend, site: AttentionSite) -> bool:
            serving = self.site_parts(site)
            return not isinstance(serving, str) and any(part is one for one in serving)

        return {part.name: part.make_state([s for s in sites if serves(part, s)], cache, limits)
                for part in self.parts if part.make_state is not None}

    def page_bytes(self, site: AttentionSite, page_size: int) -> int:
        serving = self.site_parts(site)
        return 0 if isinstance(serving, str) else sum(part.bytes_beside(site, page_size) for part in serving)

    def plan(self, metadata: CommonAttentionMetadata, step: Step) -> None:
        step.states.update(step.states.get(self.name, {}))
        for part in self.planned(metadata.num_tokens, metadata.seq_lens.shape[0], step.graph_key is not None):
            if part.plan is not None:
                part.plan(metadata, step)

    def available(self, device: torch.device) -> str | None:
        why = [f"{part.name}: {reason}" for part in self.parts if (reason := part.available(device))]
        return "; ".join(why) or None

    def backend(self, capabilities: CompositeCapabilities, route: Callable[[AttentionSite], str], mla_only: bool = False
                ) -> AttentionBackend:
        """The composite as a backend, its ops registered; with ``mla_only`` those for MLA alone."""
        name = op_name(self.name)
        launches = "cuda" in capabilities.devices
        states = any(part.make_state is not None for part in self.parts)
        return AttentionBackend(
            name=self.name, capabilities=capabilities, available=self.available,
            op=None if mla_only else define_paged_op(name, self.op, launches=launches),
            rope_op=None if mla_only or all(part.rope_op is None for part in self.parts) else
            define_paged_op(name, self.rope_op, rope=True, launches=launches),
            mla_op=define_mla_op(name, self.mla_op, launches=launches) if capabilities.mla else None,
            rope_forms=True, make_state=self.make_state if states else None,
            plan=self.plan if states or any(part.plan is not None for part in self.parts) else None,
            prepare=None if all(part.prepare is None for part in self.parts) else
            define_prepare(name, self.prepare, self.prepare),
            packages=tuple(dict.fromkeys(p for part in self.parts for p in part.packages)),
            verified=all(part.verified for part in self.parts), route=route,
            approximate="; ".join(f"{part.name} {part.approximate}" for part in self.parts if part.approximate),
            plans_windows=all(part.plan is None or part.plans_windows for part in self.parts),
            every_step=any(part.every_step for part in self.parts),
            page_bytes=self.page_bytes if any(part.page_bytes is not None for part in self.parts) else None,
            unrotated=any(part.unrotated for part in self.parts))


def states_of(part: AttentionBackend, sites: Sequence[AttentionSite], cache: PagedKVCache, limits: StepLimits
              ) -> dict[str, Any]:
    """The state of a part by its name, if it has one."""
    return {} if part.make_state is None else {part.name: part.make_state(sites, cache, limits)}


def planned_child(part: AttentionBackend, metadata: CommonAttentionMetadata, states: dict[str, Any], step: Step) -> Step:
    """A step of another batch within ``step``, which ``part`` has planned."""
    child = Step(step.cache, metadata, part, states, step.graph_key, step.capturing, number=step.number)
    if part.plan is not None:
        part.plan(metadata, child)
    return child


def declared(part: AttentionBackend, **features: Any) -> dict[str, Any]:
    """What a part declares, with some ``features`` replaced, to make capabilities of another class of."""
    return {f.name: getattr(part.capabilities, f.name) for f in dataclasses.fields(AttentionCapabilities)} | features


def op_name(name: str) -> str:
    """``name`` as a part of an op's name that is not taken."""
    base = op = re.sub(r"\W+", "_", name)
    number = 1
    while any(hasattr(torch.ops.quire, f"{op}{kind}_paged_attention") for kind in ("", "_mla")):
        number += 1
        op = f"{base}_{number}"
    return op


def check_every_step(name: str, parts: Iterable[AttentionBackend]) -> None:
    """Raises UnsupportedAttention if one of the parts must see every step."""
    for part in parts:
        if part.every_step:
            raise UnsupportedAttention(f"attention={name!r}: every step must run whole through {part.name}, which keeps data "
                                       f"about the cached keys; use attention={part.name!r}")


def _keeps_state(word: str, get: Callable[[str], AttentionBackend]) -> bool:
    try:
        found = get(word)
    except ValueError:  # a number, or the name of a family
        return False
    return found.make_state is not None or found.plan is not None


def check_parts(name: str, parts: Sequence[AttentionBackend], get: Callable[[str], AttentionBackend]) -> None:
    """Raises UnsupportedAttention if no device or dtype is common to all, or two of the parts have one that keeps a state:
    states of what a pair, or kinds of layers, are made of go by their names. ``get``: the backend of a name."""
    words = ({*re.split("[:+@=,]", part.name)} if part.name.startswith("hybrid:") or "=" in part.name else {part.name}
             for part in parts)
    for word, count in Counter(word for each in words for word in each).items():
        if count > 1 and _keeps_state(word, get):
            raise UnsupportedAttention(f"attention={name!r}: {word} keeps a state for each step, and two of the parts have it; "
                                       "name it once")
    for what in ("devices", "dtypes", "layouts"):
        if not frozenset.intersection(*(getattr(part.capabilities, what) for part in parts)):
            raise UnsupportedAttention(f"attention={name!r}: its backends have no {what} in common")
