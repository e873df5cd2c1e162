"""Decodes of few slots share one wave of programs: right for any lengths, and no part much longer than the others."""

from __future__ import annotations

import random

import pytest
import torch

from quire.attn_ops.backends.triton import BACKEND
from tests.attn_ops.backends.test_triton import DEVICE, SMALL
from tests.attn_ops.cases import check_case, make_case

import triton  # isort: skip  (after test_triton, which sees to the interpreter)
import triton.language as tl  # isort: skip
from quire.attn_ops.backends.triton import decode, shares  # isort: skip
from quire.attn_ops.backends.triton.plan import Batch, overridden  # isort: skip
from quire.attn_ops.kernels import host  # isort: skip


@triton.jit
def list_parts(out, of_items, batch, num_reqs, items, parts, least, BY_ROW: tl.constexpr, WINDOW: tl.constexpr,
               CHUNK: tl.constexpr):
    """Program n: what part it serves, (item, part, parts, before), and the parts and those before of item n."""
    number = tl.program_id(0)
    item, part, count, before = shares.part_of(number, batch, num_reqs, items, parts, least, BY_ROW, WINDOW, CHUNK)
    tl.store(out + number * 4, item)
    tl.store(out + number * 4 + 1, part)
    tl.store(out + number * 4 + 2, count)
    tl.store(out + number * 4 + 3, before)
    if number < items:
        count, before = shares.parts_of(number, batch, num_reqs, items, parts, least, BY_ROW, WINDOW, CHUNK)
        tl.store(of_items + number * 2, count)
        tl.store(of_items + number * 2 + 1, before)


def listed(query_lens: list[int], lens: list[int], parts: int, least: int = 1, by_row: bool = False, window: int = 0,
           chunk: int = 0, padding: int = 0) -> list[int]:
    """Number of parts of each item; checks that programs and items agree on them. ``padding``: tokens and rows at the end."""
    starts = torch.tensor([0, *query_lens] + [0] * padding).cumsum(0).int().to(DEVICE)
    rows = len(lens) + padding
    batch = Batch(starts, starts, starts, torch.tensor(lens + [0] * padding, dtype=torch.int32, device=DEVICE))
    items = rows if by_row else sum(query_lens) + padding
    out, of_items = (torch.full(size, -7, dtype=torch.int32, device=DEVICE) for size in ((parts, 4), (items, 2)))
    list_parts[(parts,)](out, of_items, batch, rows, items, parts, least, by_row, window, chunk)
    counts = of_items[:, 0].tolist()
    expected = [[item, part, count, sum(counts[:item])] for item, count in enumerate(counts) for part in range(count)]
    assert min(counts) >= 1 and sum(counts) <= parts
    assert out.tolist()[: len(expected)] == expected and all(row[0] >= items for row in out.tolist()[len(expected) :])
    assert of_items[:, 1].tolist() == [sum(counts[:i]) for i in range(items)]
    return counts


@pytest.mark.parametrize("seed", range(12))
def test_every_part_has_one_program(seed):
    """A part without a program, or with two, would be a wrong output."""
    draw = random.Random(seed)
    count = draw.choice([1, 2, 3, 8, 31, 33, 70])
    by_row = seed % 3 == 2
    query_lens = [draw.choice([0, 1, 1, 5]) if by_row else 1 for _ in range(count)]
    lens = [n and n + draw.choice([0, 3, 100, 5000, 90000]) for n in query_lens]
    padding = draw.choice([0, 1, 3])
    parts = (count + padding) * draw.choice([1, 2, 3]) + draw.choice([0, 1, 17])
    counts = listed(query_lens, lens, parts, draw.choice([1, 64]), by_row, draw.choice([0, 0, 512]), draw.choice([0, 0, 8192]),
                    padding)
    assert all(n == 1 for n, q in zip(counts, query_lens, strict=False) if q != 1)  # nothing to split
    assert counts[count:] == [1] * padding


def test_parts_are_of_one_size():
    """The longest part decides how long a step takes: one long sequence among short ones was cut as far as they were."""
    assert listed([1] * 8, [8192] * 8, 33) == [4] * 8
    assert listed([1] * 11, [8192] * 11, 33) == [3] * 11
    assert listed([1], [32768], 33) == [33]
    assert listed([1], [100], 33, least=64) == [2]
    assert listed([1] * 8, [32768] + [1024] * 7, 33)[0] >= 20
    assert listed([1] * 4, [30000, 20000, 10000, 0], 16)[:3] == [6, 4, 2]
    assert listed([1] * 4, [30000, 20000, 10000, 500], 16, window=500) == [4] * 4
    for lens in ([1000 * n for n in range(1, 17)], [10] * 15 + [100000], [7, 9000] * 8):
        for parts in (16, 33, 49, 132):
            counts = listed([1] * 16, lens, parts)
            longest = max(-(-n // c) for n, c in zip(lens, counts, strict=True))
            assert parts == 16 or longest <= -(-sum(lens) // (parts - 16))


def test_tokens_that_are_not_one_of_each_sequence():
    """As many tokens as sequences, but not one each: their lengths are not known by number, so all have as many parts."""
    assert listed([3, 0, 0, 1], [50, 0, 0, 9000], 12) == [3] * 4
    assert listed([0, 1], [0, 9000], 12) == [12]
    assert listed([2, 0, 0], [40, 0, 0], 12, padding=1) == [4, 4, 1]


SITES = (dict(window=40, sinks=True), dict(chunk=32), dict(num_heads=6, head_dim=24, head_dim_v=40, softcap=4.0))


@pytest.mark.parametrize("features", [
    {}, SITES[0],
    *(pytest.param(features, marks=pytest.mark.slow) for features in (
        *SITES[1:], dict(write=False), dict(dtype=torch.float16, head_dim=64, kv_dtype=torch.int8),
        dict(dtype=torch.float16, num_heads=8, head_dim=128), dict(dtype=torch.float16, num_heads=2, head_dim=256)))], ids=str)
def test_decodes(features):
    """One long sequence among short ones, padding, prompts beside, one item, and more of them than a warp has lanes."""
    shape = SMALL | features
    for wave in (1000, 30):
        with overridden(decode.DecodeConfig, block_n=16, chunk_min=16, wave=wave):
            check_case(BACKEND, make_case([1] * 5, [1, 17, 150, 33, 2], **shape, pad_tokens=2, pad_reqs=2))
            check_case(BACKEND, make_case([1, 9, 1, 0, 1], [70, 40, 49, 0, 100], **shape, pad_tokens=1, pad_reqs=1))
            check_case(BACKEND, make_case([3, 1, 0, 0], [90, 40, 0, 0], **shape))
            check_case(BACKEND, make_case([1], [150], **shape, pad_reqs=2))
    with overridden(decode.DecodeConfig, block_n=16, chunk_min=16, wave=300):
        check_case(BACKEND, make_case([1] * 40, [*range(1, 39), 90, 140], **shape))


def test_programs_of_few_slots_fill_the_gpu_once(monkeypatch):
    """However many keys the block table has room for: 8 sequences of 1024 took a fifth longer where it had room for 8192."""
    monkeypatch.setattr(host, "num_sms", lambda device: 132)
    for slots, blocks in ((8, 8), (64, 8), (96, 8), (4, 4), (120, 4), (1, 1), (128, 1)):
        for dim in (64, 128, 256):
            params = decode.config(dim, dim, 2, 4, slots, torch.device("cpu"))
            parts = [decode.num_parts(slots // blocks, blocks, room, params) for room in (64, 8192, 1 << 17)]
            assert parts[0] == slots // blocks and parts[1] <= parts[2]
            assert params.wave in (132, 2 * 132, 3 * 132)
            assert params.wave - blocks < parts[2] * blocks <= params.wave
    assert decode.num_parts(200, 1, 1 << 17, params) == 200
