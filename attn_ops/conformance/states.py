"""Checks of ``state_op``, attention that returns its log-sum-exp: against varlen attention in float64, and by merging."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from quire.attn_ops.conformance.batches import (
    Batch,
    Failure,
    bits,
    compare,
    compare_numbers,
    prepared,
    reference,
    rounding,
    varlen_reference,
)
from quire.attn_ops.kv_quant import is_fixed
from quire.attn_ops.ops.tree import build_tree_mask, tree_attention

if TYPE_CHECKING:
    from quire.attn_ops.conformance.checks import Kit


def checks(kit: Kit) -> list[tuple[str, Callable[[], str | None]]]:
    if not kit.caps.lse:
        return []
    return [("states: causal, to all", lambda: lse(kit)), ("states: opcheck", lambda: opcheck(kit)),
            ("trees of drafts", lambda: trees(kit))]


def arguments(kit: Kit, batch: Batch) -> tuple[Any, ...]:
    return (batch.q, batch.k, batch.v, *batch.cache.of_layer(0), *batch.tables, prepared(kit.backend, batch))


def lse(kit: Kit) -> None:
    """Decodes, prefills and sequences without keys, causal and not; the keys of a step are stored."""
    attend: Any = kit.backend.state_op
    short, long = ([(1, 20), (1, 1), (1, 33)], [(7, 9), (0, 5), (1, 12), (33, 40)]), [(5, 400), (1, 700)]
    cases: list[tuple[Any, dict[str, Any]]] = [(rows, {}) for rows in (*short, long)]
    cases += [(rows, {"softcap": 4.0}) for rows in short if kit.caps.softcap]
    for rows, options in cases:
        for causal in (True, False):
            batch = kit.batch(rows, write=causal, pad=(2, 1), **options)
            scale, softcap = batch.site.scale, batch.site.softcap
            if not causal:  # every second sequence without keys
                batch.metadata.seq_lens[::2] = batch.metadata.seq_lens_cpu[::2] = 0
            found = attend(*arguments(kit, batch), scale=scale, softcap=softcap, causal=causal)
            live, page = batch.metadata.num_actual_tokens, batch.metadata.page_size
            if causal:
                slots = batch.metadata.slot_mapping[:live]
                for which, wanted in batch.stored_new(live).items():
                    if not torch.equal(bits(batch.held[which])[slots // page, slots % page], bits(wanted)):
                        raise Failure(f"the {which}s of the step are not in the cache")
            check(batch, found, causal)


def check(batch: Batch, found: tuple[torch.Tensor, torch.Tensor], causal: bool) -> None:
    """Output and lse against the definition, on keys and values as they read back."""
    meta = batch.metadata
    lens, live = meta.seq_lens.tolist(), meta.num_actual_tokens
    ends = torch.tensor([0, *lens]).cumsum(0).int().to(batch.q.device)
    held = [torch.cat([row[:n] for row, n in zip(_read(batch, which), lens, strict=True)]) for which in ("key", "value")]
    softcap, dtype = batch.site.softcap, batch.site.dtype
    expected, size, total = varlen_reference(batch.q[:live], *held, meta.query_start_loc, ends, scale=batch.site.scale,
                                             softcap=softcap, causal=causal)
    compare_numbers(found[0][:live], expected, rounding(size, expected, dtype, softcap))
    slack = 1e-3 + total.nan_to_num(0, 0, 0).abs() * max(1e-4, torch.finfo(dtype).eps if softcap else 0)
    compare_numbers(found[1][:live], total, slack, "lse")
    if found[0][live:].count_nonzero() or not (found[1][live:] == -math.inf).all():
        raise Failure("padding tokens must have output 0 and lse -inf")


def _read(batch: Batch, which: str) -> list[torch.Tensor]:
    """Per row of the batch: all its keys or values as the cache has them now."""
    meta, cache = batch.metadata, batch.held[which]
    scale = batch.cache.of_layer(0)[2 if which == "key" else 3]
    rows = []
    for row, total in zip(meta.block_table_tensor.long(), meta.seq_lens.tolist(), strict=True):
        pages = row[: -(-total // meta.page_size)]
        codes = bits(cache)[pages].view(cache.dtype).flatten(0, 1).float()
        if scale is not None:
            codes *= (scale[0] if is_fixed(scale) else scale[pages].flatten(0, 1))[..., None]
        rows.append(codes)
    return rows


def trees(kit: Kit) -> None:
    """Trees of several shapes, with prefixes and without, against attention to the tokens that the mask shows."""
    # Parents, per sequence: a chain, a fan, two roots, a binary tree, no draft, one draft.
    shapes = [[-1, 0, 1, 2], [-1, 0, 0, 0, 0], [-1, -1, 1, 0, 2], [-1, 0, 0, 1, 1, 2, 2], [], [-1]]
    before = [0, 20, 3, 17, 5, 33]
    rows = [(len(shape), len(shape) + n) for shape, n in zip(shapes, before, strict=True)]
    cases: list[dict[str, Any]] = [{}] + [{name: kit.features[name]} for name in ("softcap", "sinks") if name in kit.features]
    for features in cases:
        batch = kit.batch(rows, pad=(2, 1), **features)
        meta = batch.metadata
        parents = torch.tensor([p for shape in shapes for p in shape] + [-1, -1], device=kit.device)
        mask = build_tree_mask(parents, meta.query_start_loc, 8)
        out = tree_attention(kit.backend, batch.q, batch.new_k, batch.new_v, batch.cache, 0, meta, mask,
                             scale=batch.site.scale, softcap=batch.site.softcap, sinks=batch.sinks)
        token, keys, values, size = 0, _read(batch, "key"), _read(batch, "value"), torch.zeros_like(batch.expected)
        for r, (shape, n) in enumerate(zip(shapes, before, strict=True)):
            for own in range(len(shape)):
                path, node = [], own
                while node >= 0:
                    path.append(n + node)
                    node = shape[node]
                shown = [*range(n), *reversed(path)]  # all that a query that is last sees
                seen_keys, seen_values = (x[r][shown].double() for x in (keys, values))
                q = batch.q[token : token + 1]
                batch.expected[token] = reference(batch.site, q, seen_keys, seen_values, batch.sinks)[0]
                size[token] = reference(batch.site, q, seen_keys, seen_values.abs(), batch.sinks)[0]
                token += 1
        batch.bound = rounding(size, batch.expected, kit.dtype, batch.site.softcap)
        compare(out, batch)


def opcheck(kit: Kit) -> None:
    op: Any = kit.backend.state_op
    batch = kit.batch([(7, 9), (1, 12)])
    if batch.cache.dtype.itemsize > 1 or not batch.cache.dtype.is_floating_point:  # torch lacks ops for fp8 that opcheck needs
        torch.library.opcheck(op, arguments(kit, batch), {
            "scale": batch.site.scale, "softcap": None, "causal": True},
            test_utils=["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"])
