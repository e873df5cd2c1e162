"""Fast prefill of layers that read an earlier layer's keys and values (gemma3n's later layers, YOCO).

Such layers write no cache, so their prefill can run on the tokens whose logits are wanted alone: the keys and values of all
tokens are in the cache, written by the layer that owns them. User: an engine that runs a model's shared layers on those rows.
quire's own, with ``kv_sharing_fast_prefill``, marks its steps by the same fields; its graph makes the tables on the device,
where each sequence has one such token (``passes/rewrite/last_rows.py``).
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, Protocol, overload, runtime_checkable

import numpy as np
import torch

from quire.attn_ops.backend import AttentionBackend
from quire.attn_ops.metadata.builder import subclass_attention_backend, subclass_attention_metadata
from quire.attn_ops.metadata.core import CommonAttentionMetadata

#: (name, type, default) of the fields that metadata of a fast prefill have.
KV_SHARING_FAST_PREFILL_METADATA_FIELDS: list[tuple[str, Any, Any]] = [
    ("logits_indices_padded", torch.Tensor | None, None),
    ("num_logits_indices", int, 0),
]


@runtime_checkable
class KVSharingFastPrefillMetadata(Protocol):
    """Metadata that say which tokens have logits: indices into the ragged row, ascending, and how many are not padding."""

    logits_indices_padded: torch.Tensor | None
    num_logits_indices: int


def make_kv_sharing_fast_prefill_common_attn_metadata(common_attn_metadata: CommonAttentionMetadata) -> CommonAttentionMetadata:
    """The batch of the tokens with logits: queries are theirs, keys and slots those of the whole batch.

    Returns the same object where there is nothing to leave out: no logits indices, or decodes only. The model's positions are
    ``positions[logits_indices]`` of the whole batch. The batch's ``logits_indices_cpu`` is needed where the indices are on a
    device, because nothing here waits for one.
    Raises ValueError for indices on a device without their copy, or that are not the last tokens of their sequences (their
    positions are counted from the end, so others would attend wrongly).
    """
    meta = common_attn_metadata
    if meta.logits_indices_padded is None or meta.max_query_len <= 1:
        return meta
    on_host = meta.logits_indices_padded if meta.logits_indices_cpu is None else meta.logits_indices_cpu
    if on_host.device.type != "cpu":
        raise ValueError(f"logits_indices_padded is on {on_host.device}; put logits_indices_cpu, its copy on the host, into "
                         "the batch, so that the step need not wait for the device")
    indices = np.asarray(on_host, dtype=np.int64)[: meta.num_logits_indices]
    start = meta.query_start_loc_cpu.numpy()
    counts = np.bincount(np.searchsorted(start, indices, side="right") - 1, minlength=len(start) - 1)[: len(start) - 1]
    local = np.zeros(len(start), dtype=np.int32)
    np.cumsum(counts, out=local[1:])
    last = np.repeat(start[1:] - local[1:], counts) + np.arange(local[-1])
    if not np.array_equal(indices, last):
        raise ValueError(f"logits indices {indices.tolist()[:16]} are not the last tokens of their sequences, in order, which "
                         f"begin at {start.tolist()[:16]}: a layer that runs on them alone would attend from wrong positions")
    start_cpu = torch.from_numpy(local)
    return replace(meta, query_start_loc=start_cpu.to(meta.query_start_loc.device), query_start_loc_cpu=start_cpu,
                   num_actual_tokens=int(local[-1]), max_query_len=int(counts.max(initial=0)), causal=True)


@overload
def create_fast_prefill_custom_backend(prefix: str, backend: AttentionBackend) -> AttentionBackend: ...
@overload
def create_fast_prefill_custom_backend(prefix: str, backend: type) -> type: ...
def create_fast_prefill_custom_backend(prefix: str, backend: AttentionBackend | type) -> AttentionBackend | type:
    """``backend`` for shared layers, named ``prefix`` + its name: it plans for the tokens with logits.

    Of a record the op is the same. The caller gives it q of these tokens, k and v None, and the tensors of
    ``make_kv_sharing_fast_prefill_common_attn_metadata(metadata)``. Of an engine's backend class, whose ``get_builder_cls()``
    is an ``AttentionMetadataBuilder``, the result is a subclass: its builder's metadata are those of these tokens, and have the
    fields of ``KVSharingFastPrefillMetadata`` too; ``build`` raises TypeError if they are no dataclass. Captured graphs have
    the full batch's shapes.
    """
    if isinstance(backend, type):
        builder = backend.get_builder_cls()  # type: ignore[attr-defined]
        return subclass_attention_backend(prefix, backend, _fast_prefill_builder(prefix, builder))
    plan: Any = backend.plan

    def plan_logits(metadata: CommonAttentionMetadata, step: Any) -> None:
        plan(metadata if step.capturing else make_kv_sharing_fast_prefill_common_attn_metadata(metadata), step)

    return replace(backend, name=prefix + backend.name, plan=None if plan is None else plan_logits, priority=None)


def _fast_prefill_builder(prefix: str, builder: Any) -> type:
    def with_logits(made: Any, meta: CommonAttentionMetadata) -> Any:
        kind = subclass_attention_metadata(prefix, type(made), KV_SHARING_FAST_PREFILL_METADATA_FIELDS)
        found: Any = object.__new__(kind)
        values = {field.name: getattr(made, field.name) for field in fields(made)}
        for name, value in {**values, "logits_indices_padded": meta.logits_indices_padded,
                            "num_logits_indices": meta.num_logits_indices}.items():
            object.__setattr__(found, name, value)  # the dataclass may be frozen
        return found

    class FastPrefillBuilder(builder):
        def build(self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False) -> Any:
            meta = common_attn_metadata
            short = make_kv_sharing_fast_prefill_common_attn_metadata(meta)
            return with_logits(super().build(common_prefix_len, short, fast_build), meta)

        def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> Any:
            whole = super().build_for_cudagraph_capture(replace(common_attn_metadata, logits_indices_padded=None))
            return with_logits(whole, common_attn_metadata)

    return FastPrefillBuilder
