"""The paged step in progress: the context that a forward cannot take as an argument.

A model's forward has no parameter for a KV cache and batch metadata (some models drop unknown keyword arguments), so they
travel in a context variable: ``with step(cache, metadata): model(...)``. Compiled graphs read the tensors here once, at their
start, and take them as graph inputs; backends that plan on the host find their state here. Two threads can each run a step.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch

from quire.attn_ops.attention import AttentionSite
from quire.attn_ops.backend import AttentionBackend
from quire.attn_ops.context import setting
from quire.attn_ops.kv_cache import PagedKVCache
from quire.attn_ops.metadata import CommonAttentionMetadata


@dataclass(frozen=True)
class StepLimits:
    """Upper bounds for sizing a backend's buffers: rows, tokens, and pages per sequence."""

    max_num_seqs: int
    max_num_tokens: int
    max_pages_per_seq: int


@dataclass
class Step:
    """One paged step.

    Args:
        notes: what backends work out once for all layers of this step.
        window_metadata: as ``metadata``, with the slots and the block table of layers with a window or chunk, where those have
            page numbers of their own (``LoweringTarget.window_tables``).
        states: the backends' own states, by name (``AttentionBackend.make_state``).
        graph_key: names the CUDA graph that is captured or replayed; None in eager steps.  by_hand: of ``quire.step``.
        adapters: (at least T,) int64, the adapters of each token as bits (``attn_ops/ops/lora_rows.py``), or None.
        positions: (T,) int64, of each token, if they are in a tensor already; None: those of the metadata.
        served: layers whose attention has run.  planned: backends that have planned.
        number: which of the steps of one CUDA graph, whose metadata is all made before the first runs
            (``make_draft_metadata``). Planning number 0 begins a new set.
    """

    cache: PagedKVCache
    metadata: CommonAttentionMetadata
    attention: str | AttentionBackend = "auto"
    states: dict[str, Any] = field(default_factory=dict)
    graph_key: Any = None
    capturing: bool = False
    by_hand: bool = False
    adapters: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    served: set[int] = field(default_factory=set)
    planned: set[str] = field(default_factory=set)
    notes: dict[Any, Any] = field(default_factory=dict, init=False)  # not of a copy, which may have other metadata
    window_metadata: CommonAttentionMetadata | None = None
    number: int = 0


_CURRENT: ContextVar[Step | None] = ContextVar("quire_step", default=None)


def current_step() -> Step | None:
    """The step in progress in this context, or None outside any."""
    return _CURRENT.get()


def running(step: Step | None) -> AbstractContextManager[Step | None]:
    """Make ``step`` the current one; None: there is none inside. Unlike ``quire.step`` it checks nothing on leaving."""
    return setting(_CURRENT, step)


def ensure_planned(step: Step, backend: AttentionBackend, sites: list[AttentionSite]) -> None:
    """Make the backend's state and run its plan, once per step."""
    if backend.name in step.planned:
        return
    if backend.make_state is not None and backend.name not in step.states:
        meta = step.metadata
        limits = StepLimits(meta.seq_lens.shape[0], meta.num_tokens, meta.block_table_tensor.shape[1])
        step.states[backend.name] = backend.make_state(sites, step.cache, limits)
    if backend.plan is not None:
        backend.plan(step.metadata, step)
    step.planned.add(backend.name)
