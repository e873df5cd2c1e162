"""Which programs of a decode serve which keys, where slots are fewer than the GPU runs programs: each works it out by itself.

A launch has ``parts`` programs per block of query heads, as many as fill the GPU once, and its items share them: an item's keys
are cut into parts of at most ``size`` keys, each item has one at least, and ``size`` is as small as the number of programs
allows. So no program is without keys because the block table has room for more, and of sequences of different lengths all parts
take about the same time. Two sizes never need more than ``parts`` in all, and the smaller is taken: of n items with K keys in
all, ceil(K / (parts - n)), for an item has less than keys / size + 1 parts; and ceil(most / (parts // n)), where no item has
more than ``most`` keys. The second is best for sequences of one length, the first where few are long.

Items are tokens where T <= B, else sequences, of which those with one token are served. Part p of an item has partial result
number p + (parts of the items before it): NOTE [Partial results].
"""

from __future__ import annotations

import triton
import triton.language as tl

from quire.attn_ops.backends.triton.common import merge_partials
from quire.attn_ops.kernels.constants import next_power_of_2
from quire.attn_ops.kernels.pdl import let_next_start, wait_for_previous

#: Most items of a launch.
ITEMS = tl.constexpr(128)


@triton.jit
def item_parts(batch, num_reqs, items, parts, least, BY_ROW: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr,
               N: tl.constexpr):
    """Number of parts of each of ``items`` <= N: (N,), 0 past the last one. ``parts`` >= items; least: fewest keys per part."""
    item = tl.arange(0, N)
    live = item < items
    end = tl.load(batch.query_start_loc + item + 1, mask=live, other=0)
    keys = tl.load(batch.seq_lens + item, mask=live, other=0)
    if BY_ROW:
        start = tl.load(batch.query_start_loc + item, mask=live, other=0)
        keys = tl.where(end - start == 1, keys, 0)
    else:
        served = live & (item < tl.load(batch.query_start_loc + num_reqs))  # others are padding
        keys = tl.where(served, keys, 0)
        uneven = tl.max((served & (end != item + 1)).to(tl.int32), 0)  # not one token each: lengths are of other items
    if WINDOW > 0:
        keys = tl.minimum(keys, WINDOW)
    if CHUNK > 0:
        keys = tl.minimum(keys, CHUNK)
    size = tl.minimum(tl.cdiv(tl.sum(keys, 0), tl.maximum(parts - items, 1)), tl.cdiv(tl.max(keys, 0), parts // items))
    found = tl.maximum(tl.cdiv(keys, tl.maximum(size, least)), 1)
    if not BY_ROW:
        found = tl.where(served & (uneven > 0), parts // items, found)
    return tl.where(live, found, 0)


@triton.jit
def _part(number, batch, num_reqs, items, parts, least, BY_ROW: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr,
          N: tl.constexpr):
    each = item_parts(batch, num_reqs, items, parts, least, BY_ROW, WINDOW, CHUNK, N)
    ends = tl.cumsum(each, 0)
    item = tl.sum((ends <= number).to(tl.int32), 0)
    before = tl.max(tl.where(ends <= number, ends, 0), 0)
    of_item = tl.sum(tl.where(tl.arange(0, N) == item, each, 0), 0)
    return item, of_item, before


@triton.jit
def part_of(number, batch, num_reqs, items, parts, least, BY_ROW: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr):
    """(item, part, parts of the item, those of the items before it) of program ``number`` of a block of heads; an item past the
    last one has no part. Up to a warp of items, warps need not wait for each other."""
    if items == 1:
        item, of_item, before = _part(number, batch, num_reqs, items, parts, least, BY_ROW, WINDOW, CHUNK, 1)
    elif items <= 32:
        item, of_item, before = _part(number, batch, num_reqs, items, parts, least, BY_ROW, WINDOW, CHUNK, 32)
    else:
        item, of_item, before = _part(number, batch, num_reqs, items, parts, least, BY_ROW, WINDOW, CHUNK, ITEMS)
    return item, number - before, of_item, before


@triton.jit
def parts_of(item, batch, num_reqs, items, parts, least, BY_ROW: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr):
    """(parts of an item, those of the items before it)."""
    each = item_parts(batch, num_reqs, items, parts, least, BY_ROW, WINDOW, CHUNK, ITEMS)
    number = tl.arange(0, ITEMS)
    return tl.sum(tl.where(number == item, each, 0), 0), tl.sum(tl.where(number < item, each, 0), 0)


@triton.jit(do_not_specialize=["num_reqs", "items", "parts", "least"])
def merge_kernel(batch, out, partial, num_reqs, items, parts, least, SITE: tl.constexpr, LAYOUT: tl.constexpr,
                 TILE: tl.constexpr, STEP: tl.constexpr, PDL: tl.constexpr):
    """Program (item, query head): merge the parts of an item that has several, STEP at a time. The arguments are those of
    ``decode_kernel``, which runs before."""
    DV: tl.constexpr = LAYOUT.dim_v
    DV_P2: tl.constexpr = next_power_of_2(DV, 16)
    GROUP: tl.constexpr = SITE.heads // LAYOUT.heads
    HEAD_BLOCKS: tl.constexpr = LAYOUT.heads * TILE.blocks
    item = tl.program_id(0)
    head = tl.program_id(1)
    # See NOTE [Reads before the wait].
    of_item, before = parts_of(item, batch, num_reqs, items, parts, least, TILE.by_row, SITE.window, SITE.chunk)
    token = item
    if TILE.by_row:
        token = tl.load(batch.query_start_loc + item)
    wait_for_previous(PDL)
    let_next_start(PDL)
    if of_item > 1:
        head_block = head // GROUP * TILE.blocks + head % GROUP // TILE.heads
        lse = partial + parts.to(tl.int64) * (HEAD_BLOCKS * TILE.heads * DV)
        first = (before.to(tl.int64) * HEAD_BLOCKS + head_block) * TILE.heads + head % GROUP % TILE.heads
        merged = merge_partials(partial, lse, first, HEAD_BLOCKS * TILE.heads, of_item, 1, 1, DV, DV_P2, STEP)
        columns = tl.arange(0, DV_P2)
        row = token.to(tl.int64) * SITE.heads + head
        tl.store(out + row * DV + columns[None, :], merged, mask=(columns < DV)[None, :])
