"""Checks of the kit over families of batches: lengths at every boundary, a batch cut in parts, and the shapes of vLLM's tests
of attention backends, by their names."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch

from quire.attn_ops.conformance.batches import Batch, Failure, check, compare, planned, prepared, run
from quire.attn_ops.metadata import CommonAttentionMetadata, make_draft_metadata

if TYPE_CHECKING:
    from quire.attn_ops.conformance.checks import Kit

#: Lengths of the sequences, and of their queries.
SHAPES: dict[str, tuple[list[int], list[int]]] = {
    "small_decode": ([32, 40], [1, 1]),
    "small_prefill": ([32, 40], [8, 8]),
    "mixed_small": ([32, 40, 48, 56], [1, 1, 5, 5]),
    "medium_decode": ([128, 256, 512, 1024] * 2, [1] * 8),
    "medium_prefill": ([256, 512, 1024, 2048], [16] * 4),
    "mixed_medium": ([512, 1024, 2048] * 2, [1, 1, 1, 7, 7, 7]),
    "large_decode": ([2048] * 32, [1] * 32),
    "large_prefill": ([4096] * 8, [32] * 8),
    "mixed_large": ([1024, 2048, 4096] * 2, [1, 1, 1, 32, 32, 32]),
    "single_decode": ([1024], [1]),
    "single_prefill": ([1024], [64]),
    "small_encoder_prefill": ([32, 64, 128, 256],) * 2,
    "medium_encoder_prefill": ([256, 512, 1024, 2048],) * 2,
}
QUICK_PAIRS = 2**19  # of queries and keys, in the largest shape of the quick kit


def shapes(quick: bool) -> list[str]:
    return [n for n, (lens, queries) in SHAPES.items()
            if not quick or sum(a * b for a, b in zip(lens, queries, strict=True)) <= QUICK_PAIRS]


def shape(kit: Kit, name: str) -> None:
    lens, queries = SHAPES[name]
    kit.exact(list(zip(queries, lens, strict=True)), heads=8, kv_heads=2)


def edges(kit: Kit, feature: str) -> str:
    """Windows or chunks at the boundaries of a page, with sequences that are just shorter and just longer than each: one token,
    several, and all of them scheduled."""
    if feature not in kit.features:
        options: dict[str, Any] = {feature: 3}
        return kit.refused(kit.site(**options))
    page = kit.usual_page_size
    around = (page - 1, page, page + 1) if feature == "chunk" else (1, page - 1, page, page + 1, 2 * page)
    sizes = {n: on for n in sorted(around) if n > 0 and (on := kit.page_for(**{feature: n})) is not None}
    for size, on in sizes.items():
        lens = [n for n in (size - 1, size, size + 1, size + 2, 2 * size, 2 * size + 1) if n > 0]
        rows = [(1, n) for n in lens], [(min(3, n), n) for n in lens] + [(n, n) for n in lens]
        kit.exact(*rows, page_size=on, **{feature: size})
    return ", ".join(map(str, sizes))


def ignored(kit: Kit, what: str, **features: Any) -> None:
    """The op itself, called with a feature or a cache (``what``) that the backend does not declare, raises; an op that ignores
    it is wrong without a word whenever it is reached past the declarations."""
    batch = kit.batch([(1, 40), (5, 40)], **features)
    try:
        out = run(kit.backend, batch)
    except (ValueError, NotImplementedError):
        return
    try:
        compare(out, batch)
    except Failure as error:
        raise Failure(f"{what} is not declared, and the op ignores it: {error}") from None


def parts(kit: Kit, rows: list[tuple[int, int]]) -> str:
    """A batch gives what its sequences give one by one, and what its tokens give in two steps. Bit for bit by sequences for a
    backend that declares ``batch_invariant``, else within the bounds."""
    whole = kit.batch(rows)
    together = check(kit.backend, whole)
    begin = 0
    for row, (count, total) in enumerate(rows):
        own = slice(begin, begin + count)
        begin += count
        if not count:
            continue
        alone = run(kit.backend, _tokens(whole, row, own, total))
        if kit.caps.batch_invariant and not torch.equal(alone, together[own]):
            raise Failure(f"declared batch_invariant, and sequence {row} of {count} tokens has another output alone than in a "
                          "batch")
        compare(alone, _expecting(whole, own))
        for first, last in ((0, count // 2), (count // 2, count)):
            if first < last:
                piece = slice(own.start + first, own.start + last)
                compare(run(kit.backend, _tokens(whole, row, piece, total - count + last)), _expecting(whole, piece))
    return "bitwise by sequences" if kit.caps.batch_invariant else "within the bounds"


def _expecting(batch: Batch, own: slice) -> Batch:
    meta = dataclasses.replace(batch.metadata, num_actual_tokens=own.stop - own.start)
    return dataclasses.replace(batch, metadata=meta, expected=batch.expected[own], bound=batch.bound[own])


def _tokens(batch: Batch, row: int, own: slice, total: int) -> Batch:
    """These tokens of one sequence, as a batch of their own that ends at ``total`` tokens."""
    meta = batch.metadata
    table = meta.block_table_tensor[row : row + 1, : -(-total // meta.page_size)].cpu()
    alone = CommonAttentionMetadata.build([own.stop - own.start], [total], table, page_size=meta.page_size,
                                          device=batch.q.device)
    return dataclasses.replace(batch, q=batch.q[own], new_k=batch.new_k[own], new_v=batch.new_v[own], metadata=alone)


def drafts(kit: Kit) -> None:
    """Tokens fed one by one, with the metadata of all steps made before the first, give what they give in one step."""
    steps = 3
    whole = kit.batch([(steps, 20), (steps, 4), (steps, 17)])
    table, lens = whole.metadata.block_table_tensor.cpu(), [20 - steps, 4 - steps, 17 - steps]
    before = CommonAttentionMetadata.build([1, 1, 1], lens, table, page_size=whole.metadata.page_size, device=kit.device)
    for step, meta in enumerate(make_draft_metadata(before, steps)):
        own = torch.arange(step, 3 * steps, steps, device=kit.device)
        tensors = {name: getattr(whole, name)[own] for name in ("q", "new_k", "new_v", "expected", "bound")}
        batch = dataclasses.replace(whole, metadata=meta, **tensors)
        compare(run(kit.backend, batch), batch)


def last_tokens(kit: Kit) -> None:
    """A backend that declares ``any_batch`` serves the last token of each sequence inside the step of all tokens."""
    rows = [(30, 70), (1, 90), (5, 80)]
    for features in ({}, kit.features):
        last = kit.batch([(1, total) for _, total in rows], write=False, pad=(2, 2), **features)
        with planned(kit.backend, kit.batch(rows)):
            compare(kit.backend.op(*last.arguments(prepared(kit.backend, last)), **last.options), last)


def reused(kit: Kit, rows: list[tuple[int, int]], later: list[tuple[int, int]]) -> None:
    """The same buffers step after step, as an engine keeps them: a batch, a shorter one padded to its shape that leaves the
    first one's pages in its padding rows, the first one again."""
    width = -(-max(total for _, total in rows + later) // kit.usual_page_size)
    size: dict[str, Any] = {"num_pages": len(rows) * width + 1, "table_width": width}
    first = kit.batch(rows, **size)
    pad = (sum(n for n, _ in rows) - sum(n for n, _ in later), len(rows) - len(later))
    second = kit.batch(later, pad=pad, seed=1, **size)
    table = second.metadata.block_table_tensor
    table[len(later):] = first.metadata.block_table_tensor[len(later):]
    states: dict[str, Any] = {}
    kept = [tensor.clone() for tensor in first.buffers()]
    for batch, values in ((first, kept), (second, [t.clone() for t in second.buffers()]), (first, kept)):
        for mine, theirs in zip(first.buffers(), values, strict=True):
            mine.copy_(theirs)
        shown = dataclasses.replace(batch, **{name: getattr(first, name) for name in ("q", "new_k", "new_v", "sinks", "cache")})
        m = first.metadata
        shown.metadata = dataclasses.replace(
            batch.metadata, query_start_loc=m.query_start_loc, seq_lens=m.seq_lens, block_table_tensor=m.block_table_tensor,
            slot_mapping=m.slot_mapping)
        compare(run(kit.backend, shown, states=states), shown)
