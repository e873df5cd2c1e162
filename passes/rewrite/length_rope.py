"""Rotary frequencies by the length of a sequence (longrope), for each sequence of a batch by its own.

transformers chooses one set of frequencies for the whole call, by the largest position, and leaves it in a buffer::

    long = position_ids.max() + 1 > 4096
    inv_freq.copy_(where(long, long_inv_freq, original_inv_freq))
    freqs = position_ids[..., None] * inv_freq

Here what lies between the choice and the first result with a row per token is computed with either set::

    long = longer_than(position_ids, 4096)                              # (1, T), of each token's sequence
    freqs = where(long[..., None], position_ids[..., None] * long_inv_freq, position_ids[..., None] * original_inv_freq)

``lower_lengths`` computes ``longer_than`` from the step's tables, by ``total_lens`` of the metadata: a sequence's tokens when
its prompt is complete, so that all chunks of a prompt are rotated alike. A sequence that grows past the limit must be computed
again from its first token: the scheduler does so, and ``check_lengths`` refuses other steps by hand.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx

from quire.attn_ops.backend import UnsupportedAttention
from quire.attn_ops.kv_cache import PagedKVCache
from quire.attn_ops.step import Step
from quire.passes.fake_values import compute_value, made_like
from quire.passes.fx import erase_dead, is_function, is_method, is_tensor, replace_node, source_name, value, written_by

LIMITS = "quire_length_limits"  # in the meta of a graph: lengths beyond which sequences have other frequencies


def longer_than(position_ids: torch.Tensor, limit: int) -> torch.Tensor:
    """Stands for: is each token's sequence longer than ``limit``? (1, T) -> (1, T) bool, row by row. See ``lower_lengths``."""
    return position_ids >= limit


def choose_per_sequence(gm: fx.GraphModule, tokens: Any) -> None:
    """Rewrite each choice of frequencies, in place. What has another form stays, and ``check_tokens`` refuses it.
    ``gm.meta[LIMITS]`` has the limits, ascending. ``tokens``: the size of the token dimension."""
    limits: set[int] = set()
    order = {n: i for i, n in enumerate(gm.graph.nodes)}
    for copy in [n for n in gm.graph.nodes if is_method(n, "copy_") and len(n.args) == 2]:
        buffer, choice = copy.args
        chosen = is_function(choice, (torch.where,)) and len(choice.args) == 3
        alike = chosen and all(is_tensor(x) and value(x).shape == value(buffer).shape for x in choice.args[1:])
        found = limit_of(choice.args[0]) if alike else None
        earlier = [u for u in buffer.users if order.get(u, 0) < order[copy]]
        if found is not None and not copy.users and not earlier:
            _split(gm.graph, copy, *found, tokens)
            limits.add(found[0])
    if limits:
        gm.meta[LIMITS] = tuple(sorted(limits))
        gm.graph.lint()
        gm.recompile()


def limit_of(above: Any) -> tuple[int, fx.Node] | None:
    """The limit and the positions of ``position_ids.max() + 1 > limit``; None for any other node."""
    if not is_method(above, "gt") or len(above.args) != 2 or above.kwargs or type(above.args[1]) is not int:
        return None
    plus = above.args[0]
    if not is_method(plus, "add") or plus.args[1:] != (1,) or plus.kwargs:
        return None
    largest = plus.args[0]
    if not is_method(largest, "max") or len(largest.args) != 1 or largest.kwargs:
        return None
    positions = largest.args[0]
    given = is_tensor(positions) and positions.op == "placeholder" and "position" in source_name(positions)
    return (above.args[1], positions) if given else None


def ropes_of(config: Any, depth: int = 3) -> Iterator[tuple[dict[str, Any], int | None]]:
    """Each set of rope parameters in a config, and the length up to which the short frequencies of longrope apply."""
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    short = getattr(config, "original_max_position_embeddings", None)
    if isinstance(rope, dict):
        for each in (rope, *(r for r in rope.values() if isinstance(r, dict))):
            yield each, each.get("original_max_position_embeddings") or short
    for name, inner in vars(config).items() if depth else ():
        if "config" in name and hasattr(inner, "__dict__") and not callable(inner):
            yield from ropes_of(inner, depth - 1)


def use_short_frequencies(gm: fx.GraphModule, config: Any, max_length: int) -> None:
    """Make longrope's ``max(position_ids) + 1 > limit`` False, in place, for limits of at least ``max_length``."""
    shorts = {short for rope, short in ropes_of(config) if "longrope" in (rope.get("rope_type"), rope.get("type"))
              and short is not None and max_length <= short}
    found = [(node, of[1]) for node in gm.graph.nodes if (of := limit_of(node)) is not None and of[0] in shorts]
    for node, positions in found:
        with gm.graph.inserting_before(node):
            never = made_like(gm.graph.call_method("new_zeros", (positions, ()), {"dtype": torch.bool}), node)
        replace_node(node, never)
    if found:
        gm.recompile()


def _split(graph: fx.Graph, copy: fx.Node, limit: int, positions: fx.Node, tokens: Any) -> None:
    """Compute what follows from the choice with either set of frequencies, up to where there is a row per token."""
    buffer, choice = copy.args
    either: dict[Any, list[Any]] = {}  # all other readers of the buffer come behind the copy
    sets: list[Any] = list(choice.args[1:])  # type: ignore[union-attr]
    with graph.inserting_before(copy):
        for reader in (choice, buffer):
            dtype = value(reader).dtype
            sets = [x if value(x).dtype == dtype else compute_value(graph.call_method("to", (x, dtype))) for x in sets]
            either[reader] = sets
    graph.erase_node(copy)
    for node in list(graph.nodes):
        if not any(x in either for x in node.all_input_nodes):
            continue
        if node.op == "output" or written_by(node):
            raise UnsupportedAttention(f"the rotary frequencies that the model chooses by the longest sequence (more than "
                                       f"{limit} tokens) are used in a way that quire does not follow: {node.format_node()}")
        with graph.inserting_before(node):
            made = []
            for k in range(2):
                with_set = {x: either[x][k] if x in either else x for x in node.all_input_nodes}
                args, kwargs = fx.node.map_arg((node.args, node.kwargs), with_set.__getitem__)
                made.append(made_like(graph.create_node(node.op, node.target, args, kwargs), node))
            shape = value(made[0]).shape
            dims = [d for d, size in enumerate(shape) if str(size) == str(tokens)]
            if not dims:
                either[node] = made
                continue
            long = made_like(graph.call_function(longer_than, (positions, limit)), node)
            sizes = [-1 if d == dims[0] else 1 for d in range(len(shape))]
            long = made_like(graph.call_method("reshape", (long, sizes)), node)
            joined = made_like(graph.call_function(torch.where, (long, *made)), node)
        node.replace_all_uses_with(joined)
    erase_dead(graph, list(graph.nodes))


def lower_lengths(gm: fx.GraphModule, query_start_loc: fx.Node, total_lens: fx.Node) -> None:
    """Compute each ``longer_than`` from the tables of a step: (B + 1,) int32 and (B,) int32."""
    for node in gm.graph.find_nodes(op="call_function", target=longer_than):
        node.target, node.args = _longer, (query_start_loc, total_lens, *node.args)


def _longer(query_start_loc: torch.Tensor, total_lens: torch.Tensor, position_ids: torch.Tensor, limit: int) -> torch.Tensor:
    place = torch.arange(position_ids.shape[1], dtype=query_start_loc.dtype, device=position_ids.device)
    row = torch.searchsorted(query_start_loc[1:], place, right=True).clamp_max(total_lens.shape[0] - 1)  # padding: the last
    return (total_lens[row] > limit)[None]


_written: weakref.WeakKeyDictionary[PagedKVCache, dict[int, int]] = weakref.WeakKeyDictionary()


def check_lengths(step: Step, limits: Sequence[int]) -> None:
    """For a step by hand: the keys that a sequence has in the cache must be rotated by the frequencies of its present length.
    Raises UnsupportedAttention if they are not; the sequence must be computed again from its first token."""
    meta = step.metadata.unpadded()
    if meta.seq_lens.is_cuda and torch.cuda.is_current_stream_capturing():
        raise UnsupportedAttention("the rotary frequencies of this model depend on the length of each sequence, which a step "
                                   "by hand checks on the host: it cannot be captured. Use quire.Engine")
    totals = (meta.seq_lens if meta.total_lens is None else meta.total_lens).tolist()
    pages_of, size = _written.setdefault(step.cache, {}), meta.page_size
    lengths, new_tokens = meta.seq_lens_cpu.tolist(), meta.query_lens_cpu.tolist()
    rows = zip(totals, lengths, new_tokens, meta.block_table_tensor.tolist(), strict=True)
    written: dict[int, int] = {}
    for i, (total, length, new, pages) in enumerate(rows):
        kind, before = sum(total > limit for limit in limits), length - new
        if any(pages_of.get(page) != kind for page in pages[: -(-before // size)]):
            raise UnsupportedAttention(
                f"sequence {i} has {total} tokens, and keys in the cache that were rotated for another length, or by no step "
                f"of quire: this model's rotary frequencies change beyond {' and '.join(map(str, limits))} tokens. Compute the "
                "sequence again from its first token (query_lens = seq_lens); to compute a prompt in chunks, give "
                "CommonAttentionMetadata.build the lengths of whole prompts as total_lens.")
        written |= dict.fromkeys(pages[before // size : -(-length // size)], kind)
    pages_of |= written
