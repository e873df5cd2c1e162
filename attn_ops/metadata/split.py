"""Decodes and prefills of one batch: where the border is, and how to bring a batch into that order, for backends with a kernel
for each. quire's scheduler puts decodes first already."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from quire.attn_ops.metadata.core import CommonAttentionMetadata


def split_decodes_and_prefills(common_attn_metadata: CommonAttentionMetadata, decode_threshold: int = 1,
                               require_uniform: bool = False) -> tuple[int, int, int, int]:
    """(decodes, prefills, tokens of the decodes, tokens of the prefills) of a batch that has its decodes in front.

    Args:
        decode_threshold: a row of at most this many tokens is a decode (1 + number of speculative tokens).
        require_uniform: decodes must have equal lengths; a row that differs from the first begins the prefills. Empty rows,
            which padding to a CUDA graph's shape leaves, end no run of decodes.

    Everything from the first prefill on counts as prefill, so a batch in another order gives a correct, slower split.
    """
    lens = np.diff(common_attn_metadata.query_start_loc_cpu.numpy()[: common_attn_metadata.num_reqs + 1])
    tokens = common_attn_metadata.num_actual_tokens
    prefill = lens > decode_threshold
    if require_uniform and (live := np.flatnonzero(lens)).size:
        prefill |= (lens != lens[live[0]]) & (lens != 0)
    found = np.flatnonzero(prefill)
    if not found.size:
        return len(lens), 0, tokens, 0
    first = int(found[0])
    decode_tokens = int(common_attn_metadata.query_start_loc_cpu[first])
    return first, len(lens) - first, decode_tokens, tokens - decode_tokens


def split_decodes_prefills_and_extends(common_attn_metadata: CommonAttentionMetadata, decode_threshold: int = 1
                                       ) -> tuple[int, int, int, int, int, int]:
    """(decodes, extends, prefills, and the tokens of each) of a batch in that order. An extend has tokens in the cache before
    this step, a prefill has none. The border between them is the first prefill."""
    decodes, rest, decode_tokens, rest_tokens = split_decodes_and_prefills(common_attn_metadata, decode_threshold)
    computed = common_attn_metadata.num_computed_tokens_cpu.numpy()[decodes : decodes + rest]
    pure = np.flatnonzero(computed == 0)
    extends = int(pure[0]) if pure.size else rest
    end = int(common_attn_metadata.query_start_loc_cpu[decodes + extends])
    extend_tokens = end - decode_tokens if extends < rest else rest_tokens
    return decodes, extends, rest - extends, decode_tokens, extend_tokens, rest_tokens - extend_tokens


def split_prefill_chunks(seq_lens: Sequence[int] | np.ndarray, workspace_size: int, first: int = 0) -> list[tuple[int, int]]:
    """[(begin, end)] of runs of consecutive rows whose ``seq_lens`` sum to at most ``workspace_size`` tokens, each as long as
    possible. ``first`` is added to every bound: the number of decodes in front. Raises ValueError for a sequence that is longer
    than the workspace."""
    lens = np.asarray(seq_lens, dtype=np.int64)
    if lens.size and lens.max() > workspace_size:
        raise ValueError(f"sequence {int(lens.argmax()) + first} has {int(lens.max())} tokens, more than the workspace of "
                         f"{workspace_size}; enlarge it, or cut the prefill into chunks")
    ends, chunks, begin = np.cumsum(lens), [], 0
    while begin < len(lens):
        end = int(np.searchsorted(ends, workspace_size + (ends[begin - 1] if begin else 0), side="right"))
        chunks.append((begin + first, end + first))
        begin = end
    return chunks


def decode_first_order(num_scheduled: Sequence[int] | np.ndarray, num_computed: Sequence[int] | np.ndarray | None = None,
                       num_prompt: Sequence[int] | np.ndarray | None = None, decode_threshold: int = 1) -> np.ndarray:
    """(B,) int64: the row that belongs at each position, for the order decodes, short extends, long extends, prefills.

    A prefill has nothing in the cache; an extend is longer than the threshold, or still inside its prompt where ``num_prompt``
    is known (short: at most the threshold); all others are decodes. Without ``num_computed`` only the length counts: decodes
    change places with prefills, the last with the first. Rows that are in their region already do not move, so that caches of
    per-row state stay valid.
    """
    scheduled = np.asarray(num_scheduled, dtype=np.int64)
    computed = np.ones_like(scheduled) if num_computed is None else np.asarray(num_computed, dtype=np.int64)
    inside = np.zeros(len(scheduled), np.bool_) if num_prompt is None else computed < np.asarray(num_prompt, dtype=np.int64)
    region = np.where(computed == 0, 3, np.where(scheduled > decode_threshold, 2, np.where(inside, 1, 0)))
    target = np.repeat(np.arange(4), np.bincount(region, minlength=4))
    order = np.arange(len(scheduled))
    moved = np.flatnonzero(region != target)
    if num_computed is None and num_prompt is None:  # two regions, so as many move back as forward: vLLM's first version
        order[moved] = moved[::-1]
        return order
    order[moved] = moved[np.argsort(region[moved], kind="stable")]
    return order


class InputBatch(Protocol):
    """What ``reorder_batch_to_split_decodes_and_prefills`` needs of an engine's batch."""

    req_ids: Sequence[str]

    def swap_states(self, i1: int, i2: int) -> None:
        """Swap rows i1 and i2 of everything that the batch holds per row, ``req_ids`` included."""


class SchedulerOutput(Protocol):
    """Likewise: tokens scheduled by request id."""

    num_scheduled_tokens: Mapping[str, int]


def reorder_batch_to_split_decodes_and_prefills(input_batch: InputBatch, scheduler_output: SchedulerOutput,
                                                decode_threshold: int = 1) -> bool:
    """Bring an engine's batch into ``decode_first_order`` by swaps. Returns whether a row moved; a second call moves none. Of
    ``input_batch``, ``num_computed_tokens_cpu`` and ``num_prompt_tokens`` count too, if they are there."""
    scheduled = [scheduler_output.num_scheduled_tokens[request_id] for request_id in input_batch.req_ids]
    rows = len(scheduled)
    computed, prompt = (None if given is None else np.asarray(given)[:rows] for given in (
        getattr(input_batch, name, None) for name in ("num_computed_tokens_cpu", "num_prompt_tokens")))
    order = decode_first_order(scheduled, computed, prompt, decode_threshold)
    at = np.arange(rows)  # where each row is now
    holds = np.arange(rows)  # which row each position holds
    moved = np.flatnonzero(order != at).tolist()
    for place in moved:
        source = int(at[order[place]])
        if source != place:
            input_batch.swap_states(place, source)
            holds[[place, source]] = holds[[source, place]]
            at[holds[[place, source]]] = place, source
    return bool(moved)
