"""Kernels for decoding over some of the keys: approximate scores of all keys, and attention over a list of positions."""

from __future__ import annotations

import triton
import triton.language as tl

from quire.attn_ops.kernels.constants import next_power_of_2
from quire.attn_ops.kernels.softmax import LN2, logits


@triton.jit
def slot_offsets(table_row, positions, live, PAGE: tl.constexpr, ROW: tl.constexpr):
    """Offsets (N,) int64 of the keys at ``positions`` from head 0 of the cache. ROW: Strides."""
    page = tl.load(table_row + positions // PAGE, mask=live, other=0)
    return page.to(tl.int64) * ROW.page + (positions % PAGE) * ROW.token


@triton.jit(do_not_specialize=["width", "limit"])
def label_scores_kernel(q, labels, channels, table, lens, scores, q_strides, table_stride, width, limit, GROUP: tl.constexpr,
                        CHANNELS: tl.constexpr, PAGE: tl.constexpr, ROW: tl.constexpr, BLOCK: tl.constexpr):
    """Program (token, key head, block): scores (T, H, width) float32 of BLOCK keys for the GROUP queries of the head: products
    over its ``channels`` (Hkv, CHANNELS); -inf past the length. Of a token with at most ``limit`` keys nothing is written."""
    token = tl.program_id(0)
    kv_head = tl.program_id(1)
    positions = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    length = tl.load(lens + token)
    if length <= limit:
        return
    columns = tl.arange(0, next_power_of_2(CHANNELS))
    used = columns < CHANNELS
    live = positions < length
    chosen = tl.load(channels + kv_head * CHANNELS + columns, mask=used, other=0)
    at = slot_offsets(table + token.to(tl.int64) * table_stride, positions, live, PAGE, ROW) + kv_head.to(tl.int64) * ROW.head
    label = tl.load(labels + at[:, None] + columns[None, :], mask=live[:, None] & used[None, :], other=0.0).to(tl.float32)
    heads = tl.num_programs(1) * GROUP
    for member in tl.static_range(GROUP):
        head = kv_head * GROUP + member
        query = tl.load(q + token.to(tl.int64) * q_strides[0] + head * q_strides[1] + chosen, mask=used, other=0.0)
        score = tl.sum(label * query.to(tl.float32)[None, :], 1)
        out = scores + (token.to(tl.int64) * heads + head) * width + positions
        tl.store(out, tl.where(live, score, float("-inf")), mask=positions < width)


@triton.jit(do_not_specialize=["picked", "limit", "span"])
def attend_listed_kernel(q, k_cache, v_cache, table, lens, listed, out, lse, q_strides, table_stride, picked, limit, span,
                         scale, softcap, GROUP: tl.constexpr, LAYOUT: tl.constexpr, BLOCK: tl.constexpr):
    """Program (token, head, split): exact attention over ``span`` of the token's keys, out (T, splits, H, Dv) and lse (T,
    splits, H) float32, natural logarithm; -inf without keys. The keys are ``listed`` (T, H, picked) int64, or all of a token
    that has at most ``limit``. LAYOUT: CacheLayout."""
    D: tl.constexpr = LAYOUT.dim
    DV: tl.constexpr = LAYOUT.dim_v
    PAGE: tl.constexpr = LAYOUT.page
    K: tl.constexpr = LAYOUT.k
    V: tl.constexpr = LAYOUT.v
    token = tl.program_id(0)
    head = tl.program_id(1)
    split = tl.program_id(2)
    heads = tl.num_programs(1)
    kv_head = (head // GROUP).to(tl.int64)
    columns = tl.arange(0, next_power_of_2(D))
    columns_v = tl.arange(0, next_power_of_2(DV))
    length = tl.load(lens + token)
    dense = length <= limit
    count = tl.where(dense, length, tl.minimum(picked, length))
    table_row = table + token.to(tl.int64) * table_stride
    list_row = listed + (token.to(tl.int64) * heads + head) * picked
    query = tl.load(q + token.to(tl.int64) * q_strides[0] + head * q_strides[1] + columns, mask=columns < D, other=0.0)
    query = query.to(tl.float32)
    highest = tl.full([], float("-inf"), tl.float32)
    total = tl.full([], 0.0, tl.float32)
    acc = tl.zeros([next_power_of_2(DV)], tl.float32)
    begin = split * span
    for block in range(begin, tl.minimum(begin + span, count), BLOCK):
        order = block + tl.arange(0, BLOCK)
        live = order < tl.minimum(begin + span, count)
        positions = tl.load(list_row + order, mask=live & (length > limit), other=0).to(tl.int32)
        positions = tl.where(dense, order, positions)
        at = slot_offsets(table_row, positions, live, PAGE, K) + kv_head * K.head
        key = tl.load(k_cache + at[:, None] + columns[None, :], mask=live[:, None] & (columns < D)[None, :], other=0.0)
        score = logits(tl.sum(key.to(tl.float32) * query[None, :], 1), scale, softcap)
        score = tl.where(live, score, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(score, 0))
        shrink = tl.exp2(highest - new_highest)
        weights = tl.exp2(score - new_highest)
        at = slot_offsets(table_row, positions, live, PAGE, V) + kv_head * V.head
        value = tl.load(v_cache + at[:, None] + columns_v[None, :], mask=live[:, None] & (columns_v < DV)[None, :], other=0.0)
        acc = acc * shrink + tl.sum(value.to(tl.float32) * weights[:, None], 0)
        total = total * shrink + tl.sum(weights, 0)
        highest = new_highest
    row = (token.to(tl.int64) * tl.num_programs(2) + split) * heads + head
    if total > 0:
        acc = acc / total
        tl.store(lse + row, (highest + tl.log2(total)) * LN2)
    else:
        tl.store(lse + row, float("-inf"))
    tl.store(out + row * DV + columns_v, acc, mask=columns_v < DV)
