"""Decode steps whose metadata is all made before the first of them, as batches of the conformance kit."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from quire import CommonAttentionMetadata, make_draft_metadata
from quire.attn_ops.backend import AttentionBackend
from quire.attn_ops.conformance.batches import Batch, prepared
from quire.attn_ops.conformance.checks import Kit
from quire.attn_ops.step import Step, ensure_planned, running


def draft_batches(kit: Kit, lens: Sequence[int], steps: int, rows: int, **options: Any) -> list[Batch]:
    """Per step a batch of ``rows`` rows, padding included: the next of the last ``steps`` tokens of sequences of ``lens``."""
    whole = kit.batch([(steps, n) for n in lens], **options)
    table = whole.metadata.block_table_tensor.cpu()
    before = CommonAttentionMetadata.build([1] * len(lens), [n - steps for n in lens], table,
                                           page_size=whole.metadata.page_size, device=kit.device).padded(rows, rows)
    found = []
    for number, meta in enumerate(make_draft_metadata(before, steps)):
        own = torch.arange(number, steps * len(lens), steps, device=kit.device)
        tensors = {}
        for name in ("q", "new_k", "new_v", "expected", "bound"):
            given = getattr(whole, name)
            fill = float("nan") if name in ("q", "new_k", "new_v") else 0.0
            tensors[name] = torch.cat([given[own], given.new_full((rows - len(lens), *given.shape[1:]), fill)])
        found.append(dataclasses.replace(whole, metadata=meta, **tensors))
    return found


def plan_steps(backend: AttentionBackend, batches: Sequence[Batch], states: dict[str, Any], **options: Any) -> list[Step]:
    """The steps, all planned. Keep them: plans refer to them weakly. ``options``: of ``Step``."""
    steps = [Step(batch.cache, batch.metadata, attention=backend, states=states, number=number, **options)
             for number, batch in enumerate(batches)]
    for step, batch in zip(steps, batches, strict=True):
        ensure_planned(step, backend, [batch.site])
    return steps


def run_steps(backend: AttentionBackend, batches: Sequence[Batch], steps: Sequence[Step]) -> list[torch.Tensor]:
    found = []
    for step, batch in zip(steps, batches, strict=True):
        with running(step), torch.no_grad():
            found.append(backend.op(*batch.arguments(prepared(backend, batch)), **batch.options))
    return found


def copy_into(static: Sequence[Batch], batches: Sequence[Batch], values: Sequence[Sequence[torch.Tensor]]) -> None:
    """Give the buffers of ``static``, which a graph reads and writes, the ``values`` of ``batches``."""
    for mine, theirs, tensors in zip(static, batches, values, strict=True):
        for buffer, value in zip(mine.buffers(), tensors, strict=True):
            buffer.copy_(value)
        theirs.cache = mine.cache


def values_of(batches: Sequence[Batch]) -> list[list[torch.Tensor]]:
    return [[tensor.clone() for tensor in batch.buffers()] for batch in batches]
