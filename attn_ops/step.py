"""The paged step in progress: the one piece of context that a forward cannot be handed as an argument.

A model's forward has no parameter for a KV cache and batch metadata (some models drop unknown keyword arguments), so they
travel beside it: ``with step(cache, metadata): model(...)``. Compiled graphs read the tensors here once, at their start, and
get them as ordinary graph inputs; backends with host-side planning find their plan here. It is a context variable, so two
threads can each run a step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from quire.attn_ops.attention import AttentionSite
from quire.attn_ops.backend import AttentionBackend
from quire.attn_ops.kv_cache import PagedKVCache
from quire.attn_ops.metadata import CommonAttentionMetadata


@dataclass(frozen=True)
class StepLimits:
    """Upper bounds that a backend may size its buffers by: rows, tokens, and pages a sequence."""

    max_num_seqs: int
    max_num_tokens: int
    max_pages_per_seq: int


@dataclass
class Step:
    """One paged step. ``graph_key`` is None in eager steps; while a CUDA graph is captured or replayed it names the graph."""

    cache: PagedKVCache
    metadata: CommonAttentionMetadata
    attention: str | AttentionBackend = "auto"
    states: dict[str, Any] = field(default_factory=dict)
    graph_key: Any = None
    capturing: bool = False
    served: set[int] = field(default_factory=set)
    planned: set[str] = field(default_factory=set)


_CURRENT: ContextVar[Step | None] = ContextVar("quire_step", default=None)


def current_step() -> Step | None:
    """The step in progress in this context, or None outside any."""
    return _CURRENT.get()


@contextlib.contextmanager
def running(step: Step) -> Iterator[Step]:
    """Make ``step`` the current one. The runner's way in: unlike ``step``, it checks nothing on leaving."""
    token = _CURRENT.set(step)
    try:
        yield step
    finally:
        _CURRENT.reset(token)


def ensure_planned(step: Step, backend: AttentionBackend, sites: list[AttentionSite]) -> None:
    """Give the step the backend's state and run its host-side plan, once a step."""
    if backend.name in step.planned:
        return
    if backend.make_state is not None and backend.name not in step.states:
        meta = step.metadata
        limits = StepLimits(meta.seq_lens.shape[0], meta.num_tokens, meta.block_table_tensor.shape[1])
        step.states[backend.name] = backend.make_state(sites, step.cache, limits)
    if backend.plan is not None:
        backend.plan(step.metadata, step)
    step.planned.add(backend.name)


__all__ = ["Step", "StepLimits", "current_step", "ensure_planned", "running"]
