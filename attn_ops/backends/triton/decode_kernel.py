"""The kernel of ``decode.py``.

Offsets into caches, q, k, v, out and the workspace (see NOTE [Partial results]) are 64-bit.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quire.attn_ops.backends.triton.common import arrived_last, first_key, merge_partials, scheduled_part
from quire.attn_ops.backends.triton.shares import part_of
from quire.attn_ops.kernels.constants import next_power_of_2
from quire.attn_ops.kernels.kv_quant import code_format, encode, in_half, joined, store_rows, unpack, widen
from quire.attn_ops.kernels.paged import find_row, in_words, load_keys, load_scales
from quire.attn_ops.kernels.pdl import let_next_start, wait_for_previous
from quire.attn_ops.kernels.rope import rotated
from quire.attn_ops.kernels.softmax import LOG2E, logits, softmax_step

#: bounds of log2 of a value's scale by which weights are divided: see NOTE [Quantized caches]
LOWEST = tl.constexpr(-36.0)
HIGHEST = tl.constexpr(90.0)


@triton.jit
def one_key(highest, total, acc, query, key, value, scale, softcap):
    """One step of the running softmax with a single key (D_P2,) and value (DV_P2,), in float32."""
    score = logits(tl.sum(query.to(tl.float32) * key.to(tl.float32)[None, :], 1), scale, softcap,
                   key.dtype == tl.float32)
    new_highest = tl.maximum(highest, score)
    shrink = tl.exp2(highest - new_highest)
    weight = tl.exp2(score - new_highest)
    return new_highest, total * shrink + weight, acc * shrink[:, None] + weight[:, None] * value.to(tl.float32)[None, :]


@triton.jit
def new_key(k_head, stride, token, rope, D: tl.constexpr, D_P2: tl.constexpr, ROTARY: tl.constexpr, FORM: tl.constexpr):
    """The key (D_P2,) of one of the step's tokens (64-bit), rotated if ROTARY, in k's dtype."""
    if ROTARY == 0:
        columns = tl.arange(0, D_P2)
        return tl.load(k_head + token * stride + columns, mask=columns < D, other=0.0)
    else:
        one = tl.arange(0, 1)
        key = rotated(k_head + token * stride + one, one == 0, token, rope, rope.k_norm, D, D_P2, ROTARY, FORM)
        return tl.sum(key, 0).to(k_head.dtype.element_ty)


@triton.jit(do_not_specialize=["num_reqs", "items", "parts", "least", "places", "stride_table"])
def decode_kernel(
    q, k, v, rope, caches, batch, sinks, out, partial, counters, schedule, num_reqs, items, parts, least, places, scale,
    softcap, strides, stride_table, SITE: tl.constexpr, LAYOUT: tl.constexpr, TILE: tl.constexpr, ROTARY: tl.constexpr,
    FORM: tl.constexpr, MERGED: tl.constexpr, PDL: tl.constexpr,
):
    """TILE.heads query heads (TILE.rows with padding) of one of ``items``, over one range of its keys.

    parts, least: ``shares.py``; rope: Rope, caches: Caches, batch: Batch; schedule: ``schedule.py``; MERGED: whether a kernel
    that is launched with PDL merges the parts; strides: of tokens and heads of q, k and v. SITE: Site,
    LAYOUT: CacheLayout, TILE: DecodeTile; ROTARY, FORM: number of rotated dimensions, RopeForm. None stands for an absent k, v,
    rope (then ROTARY is 0: Triton 3.6 fails to compare a tuple that holds None), k_scale, v_scale, sinks, softcap, partial,
    counters or schedule. See NOTE [Quantized caches]."""
    wait_for_previous(PDL)
    D: tl.constexpr = LAYOUT.dim
    DV: tl.constexpr = LAYOUT.dim_v
    D_P2: tl.constexpr = next_power_of_2(D, 16)
    DV_P2: tl.constexpr = next_power_of_2(DV, 16)
    PAGE: tl.constexpr = LAYOUT.page
    K: tl.constexpr = LAYOUT.k
    V: tl.constexpr = LAYOUT.v
    S: tl.constexpr = LAYOUT.scale
    HEADS: tl.constexpr = TILE.heads
    ROWS: tl.constexpr = TILE.rows  # a local constant: Triton takes no plain integer in a shape
    BLOCK_N: tl.constexpr = TILE.block_n
    GROUP: tl.constexpr = SITE.heads // LAYOUT.heads
    CODE: tl.constexpr = caches.k.dtype.element_ty
    CODE_V: tl.constexpr = caches.v.dtype.element_ty
    UNIT: tl.constexpr = 1.0 if caches.k_scale is None else code_format(CODE)[3]
    CODES: tl.constexpr = TILE.words  # per word; 0: no words
    HALF: tl.constexpr = TILE.half
    MASKED: tl.constexpr = TILE.masked
    PRECISION: tl.constexpr = "ieee" if q.dtype.element_ty == tl.float32 else "tf32"
    program = tl.program_id(0)
    HEAD_BLOCKS: tl.constexpr = LAYOUT.heads * TILE.blocks
    head_block = program % HEAD_BLOCKS
    item = program // HEAD_BLOCKS
    split = 0
    before = 0
    if schedule is not None:
        item, split, before, chunk = scheduled_part(schedule, num_reqs, items, item, HEAD_BLOCKS, places)
        if item < 0:
            return
    elif TILE.split:
        item, split, active, before = part_of(item, batch, num_reqs, items, parts, least, TILE.by_row, SITE.window, SITE.chunk)
        if item >= items:
            return
    slot = item * HEAD_BLOCKS + head_block
    kv_head = head_block // TILE.blocks
    first_head = kv_head * GROUP + head_block % TILE.blocks * HEADS
    rows = tl.arange(0, ROWS)
    row_live = (rows < HEADS) & (head_block % TILE.blocks * HEADS + rows < GROUP)
    columns = tl.arange(0, D_P2)
    columns_v = tl.arange(0, DV_P2)

    row = item
    start = tl.load(batch.query_start_loc + row)
    end = tl.load(batch.query_start_loc + row + 1)
    seq_len = tl.load(batch.seq_lens + row)
    if TILE.by_row:
        token = start
        if end - start != 1:
            return
    else:
        token = item
        if (start != token) | (end != token + 1):  # not a pure decode batch
            row = find_row(batch.query_start_loc, num_reqs, token)
            if row < num_reqs:
                start = tl.load(batch.query_start_loc + row)
                end = tl.load(batch.query_start_loc + row + 1)
                seq_len = tl.load(batch.seq_lens + row)
    out_offsets = (token.to(tl.int64) * (SITE.heads * DV) + (first_head + rows) * DV)[:, None] + columns_v[None, :]
    out_live = row_live[:, None] & (columns_v < DV)[None, :]
    if not TILE.by_row:
        if row >= num_reqs:  # a padding token
            if split == 0:
                tl.store(out + out_offsets, tl.zeros([ROWS, DV_P2], tl.float32), mask=out_live)
            return

    pos = seq_len - (end - token)
    first = first_key(pos, SITE.window, SITE.chunk)
    if k is None:
        last = pos + 1
    else:
        last = seq_len - (end - start)
    num_keys = tl.maximum(last - first, 0)
    begin = first
    stop = last
    if TILE.split:
        if schedule is not None:
            active = tl.maximum(tl.cdiv(num_keys, chunk), 1)
        chunk = tl.cdiv(tl.cdiv(num_keys, active), BLOCK_N) * BLOCK_N  # of equal lengths: the longest decides
        chunk = tl.maximum(chunk, BLOCK_N)
        if schedule is not None:
            active = tl.maximum(tl.cdiv(num_keys, chunk), 1)
            if split >= active:
                return
        begin = first + split * chunk  # past the last key: a part without keys, of those that a kernel merges
        stop = tl.minimum(begin + chunk, last)

    which = (first_head + rows).to(tl.int64)  # of queries that lie head by head the stride is T * D
    if ROTARY == 0:
        query = tl.load(q + token.to(tl.int64) * strides.q_token + (which * strides.q_head)[:, None]
                        + columns[None, :], mask=row_live[:, None] & (columns < D)[None, :], other=0.0)
    else:
        query = rotated(q + token.to(tl.int64) * strides.q_token + which * strides.q_head, row_live,
                        token.to(tl.int64), rope, rope.q_norm, D, D_P2, ROTARY, FORM).to(q.dtype.element_ty)
    if HALF:
        query, factor = in_half(query)
        factor = factor * scale
        own_scale = factor[:, None]
    else:
        factor = scale
        own_scale = scale
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if CODES > 0:
        V_WORDS: tl.constexpr = in_words(V, CODES)
        v_words = caches.v.to(tl.pointer_type(tl.int32 if CODES == 4 else tl.int16), bitcast=True)
        acc_0 = tl.zeros([ROWS, DV_P2 // CODES], tl.float32)
        acc_1 = acc_0
        acc_2 = acc_0
        acc_3 = acc_0
    else:
        acc = tl.zeros([ROWS, DV_P2], tl.float32)
    table_row = batch.block_table + row.to(tl.int64) * stride_table
    for block in tl.range(begin, stop, BLOCK_N, num_stages=TILE.stages):
        offsets = block + tl.arange(0, BLOCK_N)
        live = offsets < stop
        if not MASKED:
            offsets = tl.minimum(offsets, stop - 1)  # the last key again
        keys = load_keys(caches.k, table_row, kv_head, offsets, live, PAGE, K, D, D_P2, MASKED)
        if TILE.dot:
            if caches.k_scale is not None:
                keys = widen(keys, query)
            scores = tl.dot(query, tl.trans(keys), input_precision=PRECISION)
        else:
            scores = tl.sum(query.to(tl.float32)[:, None, :] * keys.to(tl.float32)[None, :, :], 2)
        if caches.k_scale is not None:
            scores *= load_scales(caches.k_scale, table_row, kv_head, offsets, live, PAGE, S, MASKED)[None, :]
        scores = tl.where(live[None, :], logits(scores, own_scale, softcap, query.dtype == tl.float32), float("-inf"))
        if caches.v_scale is None:
            highest, total, weights, shrink = softmax_step(highest, total, scores, None, False, False)
        else:  # see NOTE [Quantized caches]
            value_scale = load_scales(caches.v_scale, table_row, kv_head, offsets, live, PAGE, S, MASKED) * UNIT
            # log2, up to 0.09 less: linear between powers of two, as the bits are
            level = value_scale.to(tl.int32, bitcast=True).to(tl.float32) * 2.0**-23 - 127.0
            level = tl.minimum(tl.maximum(level, LOWEST), HIGHEST)[None, :]
            highest, total, weights, shrink = softmax_step(highest, total, scores, None, False, False, level)
            weights *= value_scale[None, :]
        if CODES > 0:
            words = load_keys(v_words, table_row, kv_head, offsets, live, PAGE, V_WORDS, DV // CODES, DV_P2 // CODES, MASKED)
            values = unpack(words, CODE_V)
            weights = weights.to(query.dtype)
            acc_0 = tl.dot(weights, values[0], acc_0 * shrink[:, None])
            acc_1 = tl.dot(weights, values[1], acc_1 * shrink[:, None])
            if CODES == 4:
                acc_2 = tl.dot(weights, values[2], acc_2 * shrink[:, None])
                acc_3 = tl.dot(weights, values[3], acc_3 * shrink[:, None])
        else:
            acc = acc * shrink[:, None]
            values = load_keys(caches.v, table_row, kv_head, offsets, live, PAGE, V, DV, DV_P2, MASKED)
            if TILE.dot:
                if caches.v_scale is not None:
                    values = widen(values, query)
                acc = tl.dot(weights.to(values.dtype), values, acc, input_precision=PRECISION)
            else:
                acc += tl.sum(weights[:, :, None] * values.to(tl.float32)[None, :, :], 1)

    if CODES == 4:
        acc = joined((acc_0, acc_1, acc_2, acc_3), ROWS, DV_P2)
    elif CODES == 2:
        acc = joined((acc_0, acc_1), ROWS, DV_P2)
    let_next_start(PDL or MERGED)
    if split == 0:
        if k is not None:
            k_head = k + kv_head.to(tl.int64) * strides.k_head
            v_head = v + kv_head.to(tl.int64) * strides.v_head + columns_v
            # The step's earlier tokens of the sequence: none in a pure decode batch.
            for other in range(start + tl.maximum(first - last, 0), token):
                source = token.to(tl.int64) - (token - other)
                key = new_key(k_head, strides.k_token, source, rope, D, D_P2, ROTARY, FORM)
                value = tl.load(v_head + source * strides.v_token, mask=columns_v < DV, other=0.0)
                if caches.k_scale is not None:
                    codes, key_scale = encode(key, CODE)
                    codes_v, value_scale = encode(value, CODE)
                    key = codes * key_scale
                    value = codes_v * (value_scale * UNIT)
                highest, total, acc = one_key(highest, total, acc, query, key, value, factor, softcap)
            key = new_key(k_head, strides.k_token, token.to(tl.int64), rope, D, D_P2, ROTARY, FORM)
            value = tl.load(v_head + token.to(tl.int64) * strides.v_token, mask=columns_v < DV, other=0.0)
            if caches.k_scale is not None:
                codes, key_scale = encode(key, CODE)
                codes_v, value_scale = encode(value, CODE)
            if head_block % TILE.blocks == 0:
                place = tl.load(batch.slot_mapping + token).to(tl.int64)
                if caches.k_scale is not None:
                    store_rows(codes, key_scale, kv_head, place >= 0, place, caches.k, caches.k_scale, PAGE, K, S, D)
                    store_rows(codes_v, value_scale, kv_head, place >= 0, place, caches.v, caches.v_scale, PAGE, V, S, DV)
                else:
                    store_rows(key, None, kv_head, place >= 0, place, caches.k, None, PAGE, K, S, D)
                    store_rows(value, None, kv_head, place >= 0, place, caches.v, None, PAGE, V, S, DV)
            if caches.k_scale is not None:
                key = codes * key_scale
                value = codes_v * (value_scale * UNIT)
            highest, total, acc = one_key(highest, total, acc, query, key, value, factor, softcap)
        if sinks is not None:
            sink = tl.load(sinks + first_head + rows, mask=row_live, other=0.0).to(tl.float32) * LOG2E
            new_highest = tl.maximum(highest, sink)
            shrink = tl.exp2(highest - new_highest)
            total = total * shrink + tl.exp2(sink - new_highest)
            acc = acc * shrink[:, None]
            highest = new_highest

    if caches.v_scale is not None:
        acc *= 1.0 / UNIT
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    if TILE.split:
        if active > 1:
            lse = partial + tl.num_programs(0).to(tl.int64) * (HEADS * DV)
            if schedule is not None:
                before += item
            part = tl.cast(before, tl.int64) * HEAD_BLOCKS + head_block
            index = (part + split * HEAD_BLOCKS) * HEADS + rows
            tl.store(partial + index[:, None] * DV + columns_v[None, :], acc,
                     mask=(rows < HEADS)[:, None] & (columns_v < DV)[None, :])
            tl.store(lse + index, highest + tl.log2(total), mask=rows < HEADS)
            if schedule is not None:
                if arrived_last(counters + slot, active):
                    merged = merge_partials(partial, lse, part, HEAD_BLOCKS, active, HEADS, TILE.merge_rows, DV, DV_P2,
                                            TILE.merge_step)
                    merged_rows = tl.arange(0, TILE.merge_rows)
                    live = (merged_rows < HEADS) & (head_block % TILE.blocks * HEADS + merged_rows < GROUP)
                    tl.store(out + token.to(tl.int64) * (SITE.heads * DV) + ((first_head + merged_rows) * DV)[:, None]
                             + columns_v[None, :], merged, mask=live[:, None] & (columns_v < DV)[None, :])
        else:
            tl.store(out + out_offsets, acc, mask=out_live)
    else:
        tl.store(out + out_offsets, acc, mask=out_live)
