"""Kernels for decoding over some of the keys: labels of new keys, scores of all labels, and attention over a list of positions.
``select.py`` makes the list of the scores."""

from __future__ import annotations

import triton
import triton.language as tl

from quire.attn_ops.kernels.constants import next_power_of_2
from quire.attn_ops.kernels.paged import in_page, load_keys
from quire.attn_ops.kernels.select import order_key
from quire.attn_ops.kernels.softmax import LN2, logits, softmax_step


@triton.jit
def store_labels_kernel(k_cache, labels, channels, slot_mapping, CHANNELS: tl.constexpr, PAGE: tl.constexpr, K: tl.constexpr,
                        ROW: tl.constexpr):
    """Program (token, key head): copy the head's ``channels`` (Hkv, CHANNELS) of the key at the token's slot to its label. K,
    ROW: Strides of keys and of labels. Slot -1 stores nothing."""
    slot = tl.load(slot_mapping + tl.program_id(0)).to(tl.int64)
    if slot < 0:
        return
    head = tl.program_id(1)
    columns = tl.arange(0, next_power_of_2(CHANNELS))
    used = columns < CHANNELS
    chosen = tl.load(channels + head * CHANNELS + columns, mask=used, other=0)
    page = slot // PAGE
    key = tl.load(k_cache + page * K.page + slot % PAGE * K.token + head.to(tl.int64) * K.head + chosen, mask=used, other=0.0)
    tl.store(labels + page * ROW.page + slot % PAGE * ROW.token + head.to(tl.int64) * ROW.head + columns, key, mask=used)


@triton.jit(do_not_specialize=["width", "limit"])
def label_scores_kernel(q, labels, channels, table, lens, scores, q_strides, table_stride, width, limit, GROUP: tl.constexpr,
                        CHANNELS: tl.constexpr, PAGE: tl.constexpr, ROW: tl.constexpr, COLUMNS: tl.constexpr,
                        BLOCK: tl.constexpr):
    """Program (token, key head, block): scores (T, H, width) int32 of BLOCK keys for the GROUP queries of the head: products
    over its ``channels`` (Hkv, CHANNELS), COLUMNS of them at a time, as ``order_key``. Nothing is written past the length, nor
    of a token with at most ``limit`` keys. ROW: Strides of the labels."""
    token = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    begin = tl.program_id(2) * BLOCK
    length = tl.load(lens + token)
    if (length <= limit) | (begin >= length):
        return
    MEMBERS: tl.constexpr = next_power_of_2(GROUP, 8)
    PRECISION: tl.constexpr = "ieee" if q.dtype.element_ty == tl.float32 else "tf32"
    member = tl.arange(0, MEMBERS)
    head = kv_head * GROUP + member
    positions = begin + tl.arange(0, BLOCK)
    live = positions < length
    page = tl.load(table + token * table_stride + positions // PAGE, mask=live, other=0)
    label_rows = labels + page.to(tl.int64) * ROW.page + in_page(positions, PAGE, ROW) + kv_head.to(tl.int64) * ROW.head
    score = tl.zeros([BLOCK, MEMBERS], tl.float32)
    for first in tl.static_range(0, CHANNELS, COLUMNS):
        columns = first + tl.arange(0, COLUMNS)
        used = columns < CHANNELS
        chosen = tl.load(channels + kv_head * CHANNELS + columns, mask=used, other=0)
        query = tl.load(q + token * q_strides[0] + (head.to(tl.int64) * q_strides[1])[:, None] + chosen[None, :],
                        mask=(member < GROUP)[:, None] & used[None, :], other=0.0)
        label = tl.load(label_rows[:, None] + columns[None, :], mask=live[:, None] & used[None, :], other=0.0)
        score = tl.dot(label, tl.trans(query), score, input_precision=PRECISION)
    out = scores + (token * (tl.num_programs(1) * GROUP) + head)[None, :] * width + positions[:, None]
    tl.store(out, order_key(score), mask=(member < GROUP)[None, :] & live[:, None])


@triton.jit(do_not_specialize=["picked", "limit", "heads"])
def attend_listed_kernel(q, k_cache, v_cache, table, lens, listed, out, lse, q_strides, table_stride, picked, limit, heads,
                         scale, softcap, GROUP: tl.constexpr, LAYOUT: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    """Program (token and head, split): exact attention over one of the splits of the token's keys, out (T, splits, H, Dv), and
    lse (T, splits, H) float32, natural logarithm, or None; 0 and -inf without keys. The keys are ``listed`` (T, H, picked)
    int32, or all of a token that has at most ``limit``. LAYOUT: CacheLayout.

    The matrix products have 16 rows for one query: tensor cores take them in less time than sums of products."""
    D: tl.constexpr = LAYOUT.dim
    DV: tl.constexpr = LAYOUT.dim_v
    D_P2: tl.constexpr = next_power_of_2(D, 16)
    DV_P2: tl.constexpr = next_power_of_2(DV, 16)
    PAGE: tl.constexpr = LAYOUT.page
    K: tl.constexpr = LAYOUT.k
    V: tl.constexpr = LAYOUT.v
    PRECISION: tl.constexpr = "ieee" if q.dtype.element_ty == tl.float32 else "tf32"
    token = (tl.program_id(0) // heads).to(tl.int64)
    head = tl.program_id(0) % heads
    split = tl.program_id(1)
    splits = tl.num_programs(1)
    kv_head = head // GROUP
    length = tl.load(lens + token)
    dense = length <= limit
    count = tl.where(dense, length, picked)
    span = tl.cdiv(tl.cdiv(count, splits), BLOCK) * BLOCK
    begin = split * span
    end = tl.minimum(begin + span, count)
    table_row = table + token * table_stride
    list_row = listed + (token * heads + head) * picked
    rows = tl.arange(0, 16)
    columns = tl.arange(0, D_P2)
    columns_v = tl.arange(0, DV_P2)
    query = tl.load(q + token * q_strides[0] + head.to(tl.int64) * q_strides[1] + columns[None, :] + rows[:, None] * 0,
                    mask=(rows == 0)[:, None] & (columns < D)[None, :], other=0.0)
    highest = tl.full([16], float("-inf"), tl.float32)
    total = tl.zeros([16], tl.float32)
    acc = tl.zeros([16, DV_P2], tl.float32)
    for block in tl.range(begin, end, BLOCK, num_stages=STAGES):
        order = block + tl.arange(0, BLOCK)
        live = order < end
        positions = tl.where(dense, order, tl.load(list_row + order, mask=live & (length > limit), other=0))
        key = load_keys(k_cache, table_row, kv_head, positions, live, PAGE, K, D, D_P2, True)
        scores = logits(tl.dot(query, tl.trans(key), input_precision=PRECISION), scale, softcap,
                        PRECISION == "ieee")
        scores = tl.where(live[None, :], scores, float("-inf"))
        highest, total, weights, shrink = softmax_step(highest, total, scores, None, False, False)
        value = load_keys(v_cache, table_row, kv_head, positions, live, PAGE, V, DV, DV_P2, True)
        acc = tl.dot(weights.to(value.dtype), value, acc * shrink[:, None], input_precision=PRECISION)
    row = (token * splits + split) * heads + head
    some = tl.where(total != 0, total, 1.0)  # NaN stays, see varlen.py
    tl.store(out + row * DV + columns_v[None, :] + rows[:, None] * 0, acc / some[:, None],
             mask=(rows == 0)[:, None] & (columns_v < DV)[None, :])
    if lse is not None:
        found = tl.where(total != 0, (highest + tl.log2(some)) * LN2, float("-inf"))
        tl.store(lse + row + rows * 0, found, mask=rows == 0)
