"""Backends ``cascade:NAME``: a prefix that all sequences of a batch share is attended to once, by NAME.

Where the sequences of a batch have their first pages in common (a system prompt, by the prefix cache), all queries attend to
these pages as one sequence, which reads them once, each sequence attends to the rest of its pages, and ``merge_state`` makes
one result of both: exact but for rounding. How long the common prefix is, and whether to use it, is worked out on the device,
once per forward. So the steps that NAME allows are captured in CUDA graphs; a replay that finds no prefix worth it runs the
same kernels over no keys.

With a prefix of P tokens and n sequences, (n - 1) P reads of a key and a value are saved per layer; the two further launches
cost 20 to 50 us. A prefix counts from READS saved reads on: with 8 key heads of 128 in bfloat16, on an H200, both take the same
time at about 31,000 reads of 8 sequences, 42,000 of 32 and 75,000 of 128 (lines through ``h200_composite.json``). Batches of
one sequence, of more than 8 tokens per sequence, and layers with a window or a chunk go to NAME as they are. Never chosen by
``attention="auto"``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from quire.attn_ops.attention import AttentionSite
from quire.attn_ops.backend import AttentionBackend, BackendFamily, UnsupportedAttention
from quire.attn_ops.composite import Composite, common_capabilities
from quire.attn_ops.ops.merge_state import merge_state, merge_states

NAME = "cascade"
READS = 65536  # reads of keys saved per layer from which a prefix is shared
MAX_TOKENS = 8  # per sequence, on average: prefills are bound by arithmetic, which a cascade does not save
TABLES = 5  # of ``shared_prefix``


def shared_prefix(block_table: torch.Tensor, query_start_loc: torch.Tensor, seq_lens: torch.Tensor, page_size: int, reads: int
                  ) -> list[torch.Tensor]:
    """A batch cut in two: all queries as one sequence over the common prefix, and the sequences without it. The prefix consists
    of whole pages that all sequences with queries have in the same columns, and that no query's own token lies in. Where fewer
    than ``reads`` reads are saved it has no pages. Returns block_table (1, W), query_start_loc (2,) and seq_lens (1,) of the
    prefix; block_table (B, W) and seq_lens (B,) of the rest; all int32. No value is read on the host."""
    lens = query_start_loc.diff()
    live = lens > 0
    computed = torch.where(live, seq_lens - lens, torch.iinfo(torch.int32).max).amin(0)
    column = torch.arange(block_table.shape[1], device=block_table.device)
    prefix = block_table.index_select(0, live.int().argmax(0, keepdim=True))
    same = ((block_table == prefix) | ~live[:, None]).all(0) & ((column + 1) * page_size <= computed)
    pages = same.long().cumprod(0).sum()
    pages = torch.where((live.sum() - 1) * pages * page_size >= reads, pages, 0)
    rest = block_table.gather(1, (column + pages).clamp_max(column.shape[0] - 1).expand(block_table.shape[0], -1))
    start = torch.stack([torch.zeros_like(query_start_loc[-1]), query_start_loc[-1]])
    length = (pages * page_size).int()
    return [prefix, start, length[None], rest, (seq_lens - length).clamp_min(0)]


def _part(base: AttentionBackend, reads: int) -> AttentionBackend:
    """The backend that serves layers and batches in two parts."""

    def prepare(slot_mapping: torch.Tensor, block_table: torch.Tensor, query_start_loc: torch.Tensor, seq_lens: torch.Tensor,
                page_size: int) -> list[torch.Tensor]:
        tables = shared_prefix(block_table, query_start_loc, seq_lens, page_size, reads)
        return [*tables, *base.prepared(slot_mapping, *tables[:3], page_size),
                *base.prepared(slot_mapping, tables[3], query_start_loc, tables[4], page_size)]

    def op(q: Any, k: Any, v: Any, *rest: Any, scale: float, window: int | None, softcap: float | None, chunk: int | None
           ) -> torch.Tensor:
        *caches, slot_mapping, block_table, query_start_loc, seq_lens, sinks, prepared = rest
        if window is not None or chunk is not None:
            raise UnsupportedAttention(f"attention='{NAME}:{base.name}': a shared prefix has no window and no chunk")
        prefix, start, length, table, lens = prepared[:TABLES] or shared_prefix(
            block_table, query_start_loc, seq_lens, caches[0].shape[1], reads)
        of_base = prepared[TABLES:]
        half, options = len(of_base) // 2, {"scale": scale, "softcap": softcap}
        attend: Any = base.state_op
        own = attend(q, k, v, *caches, slot_mapping, table, query_start_loc, lens, of_base[half:], **options, causal=True)
        shared = attend(q, None, None, *caches, slot_mapping, prefix, start, length, of_base[:half], **options, causal=False)
        if sinks is None:
            return merge_state(*shared, *own)[0]
        sink = torch.zeros_like(own[0]), sinks.float().expand(q.shape[0], -1)  # a key whose value is 0
        return merge_states(*(torch.stack(states, 1) for states in zip(shared, own, sink, strict=True)))[0]

    return replace(base, name=f"{NAME} of {base.name}", op=op, rope_op=None, mla_op=None, state_op=None, prepare=prepare,
                   capabilities=replace(base.capabilities, mla=False, lse=False, batch_invariant=False), make_state=None,
                   plan=None)


def make(name: str, get: Callable[[str], AttentionBackend]) -> AttentionBackend:
    """The backend ``cascade:NAME`` or ``cascade:NAME@READS``. Raises ValueError for a name of another form or an unknown
    backend, UnsupportedAttention for a backend that does not give attention as a state."""
    base_name, at, number = name.partition(":")[2].partition("@")
    if not base_name or (at and not (number.isdecimal() and int(number))):
        raise ValueError(f"attention={name!r}: write {FAMILY.usage}")
    base = get(base_name)
    if base.state_op is None or not base.capabilities.lse or base.plan is not None:
        raise UnsupportedAttention(f"attention={name!r}: {base.name} does not return the log-sum-exp of its attention, which "
                                   "merging a prefix needs; `quire backends` shows those that do by the feature 'lse'")
    part = _part(base, int(number) if at else READS)
    parts = (base, part)

    def choose(tokens: int, rows: int, window: int | None, chunk: int | None) -> AttentionBackend:
        return part if window is None and chunk is None and 1 < rows and tokens <= MAX_TOKENS * rows else base

    def route(site: AttentionSite) -> str:
        whole = site.window is not None or site.chunk is not None
        return base.serves(site) + ("" if whole else ", a shared prefix once")

    composite = Composite(name, parts, choose, lambda *of_step: (), lambda site: (base,))
    return composite.backend(common_capabilities(parts, composite.site_parts, base.capabilities.cudagraph_support), route)


FAMILY = BackendFamily(NAME, "cascade:NAME[@READS]: a prefix that all sequences share is read once, where that saves READS "
                       f"reads of a key per layer ({READS})", make=make)
