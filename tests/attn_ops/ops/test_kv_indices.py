"""Index ops against loops: a wrong index reads another sequence's keys."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.attn_ops.attention import visible
from quire.attn_ops.ops import kv_indices as kv

WIDTH = 40


def tokens_table(rows: int = 7) -> torch.Tensor:
    return torch.randperm(rows * WIDTH, generator=torch.Generator().manual_seed(rows)).view(rows, WIDTH).int()


def ints(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


ROWS = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 20), st.integers(0, 20)), min_size=1, max_size=6)  # row, start, len


@settings(max_examples=60, deadline=None)
@given(ROWS, st.booleans(), st.integers(0, 9))
def test_flat_indices(rows, starts, spare) -> None:
    """Everything past the live entries keeps what it held: buffers are larger than a step needs."""
    table, lens = tokens_table(), [n for _, _, n in rows]
    indptr = ints([0, *torch.tensor(lens).cumsum(0).tolist()])
    out = torch.full((sum(lens) + spare,), -7, dtype=torch.int32)
    kv.create_flashinfer_kv_indices(table, ints([r for r, _, _ in rows]), ints(lens), indptr,
                                 ints([s for _, s, _ in rows]) if starts else None, out)
    want = [int(table[r, (s if starts else 0) + t]) for r, s, n in rows for t in range(n)]
    assert out.tolist() == want + [-7] * spare


def test_flat_indices_with_gaps() -> None:
    """Regions may be larger than their rows."""
    out = torch.full((9,), -7, dtype=torch.int32)
    kv.create_flashinfer_kv_indices(ints([[5, 6, 7]]).expand(2, 3), ints([0, 1]), ints([2, 1]), ints([1, 5, 9]), None, out)
    assert out.tolist() == [-7, 5, 6, -7, -7, 5, -7, -7, -7]


@settings(max_examples=60, deadline=None)
@given(ROWS, st.sampled_from([1, 2, 3, 4, 8]), st.booleans())
def test_page_tables(rows, page, starts) -> None:
    """For every page size: SGLang 0.5.2 under-fills long rows for pages below 64."""
    pages = torch.randperm(400, generator=torch.Generator().manual_seed(page))[: 7 * -(-WIDTH // page)].view(7, -1)
    table = (pages.repeat_interleave(page, 1) * page + torch.arange(page).repeat(pages.shape[1])).int()
    begin = [s // page * page if starts else 0 for _, s, _ in rows]
    lens = [n for _, _, n in rows]
    out = torch.full((len(rows), 23), -1, dtype=torch.int32)
    kv.create_flashmla_kv_indices(table, ints([r for r, _, _ in rows]), ints(lens), ints(begin) if starts else None, out, page)
    for i, (r, _, _) in enumerate(rows):
        count = -(-lens[i] // page)
        assert out[i].tolist() == pages[r, begin[i] // page :][:count].tolist() + [-1] * (23 - count)


def test_long_rows_of_small_pages_are_filled() -> None:
    table = torch.arange(8192).int()[None]
    out = torch.full((1, 256), -1, dtype=torch.int32)
    kv.create_flashmla_kv_indices(table, ints([0]), ints([8192]), None, out, 32)
    assert out[0].tolist() == list(range(256))


def splits_by_hand(lens, g, heads, kv_heads, most, cores):
    live = [n for n in lens if n] or [1]
    longest, shortest = max(live), min(live)
    if 8 * longest < 10 * shortest:
        shortest = longest
    first = min(math.ceil(longest / shortest), most)
    group = heads // kv_heads
    programs = len(lens) * g * (heads if group == 1 else math.ceil(heads / min(16, group)))
    second = min(math.ceil(cores * max(math.log2(longest / 64), 1) / programs), most)
    each = [max(math.ceil(n / math.ceil(longest / first)), math.ceil(n / math.ceil(longest / second)), 1) for n in lens]
    return [n for n in each for _ in range(g)]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 9000), min_size=1, max_size=8), st.integers(1, 3), st.sampled_from([(8, 8), (32, 8), (64, 2)]),
       st.integers(1, 16), st.integers(1, 200))
def test_splits(lens, g, heads, most, cores) -> None:
    out = torch.zeros(len(lens) * g, dtype=torch.int32)
    kv.get_num_kv_splits(out, ints(lens), *heads, most, cores)
    assert out.tolist() == splits_by_hand(lens, g, *heads, most, cores)
    assert 1 <= out.min() and out.max() <= most


def test_fixed_splits() -> None:
    out = torch.zeros(4, dtype=torch.int32)
    kv.get_num_kv_splits(out, ints([5, 9]), 8, 8, 16, 0)
    assert out.tolist() == [16] * 4
    kv.get_num_kv_splits(out, ints([5, 9]), 8, 8, 8, 132, static=True)
    assert out.tolist() == [8] * 4
    with pytest.raises(ValueError, match="4 rows, not a multiple of the 3 sequences"):
        kv.get_num_kv_splits(out, ints([5, 9, 1]), 8, 8, 8, 132)


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 8), st.integers(0, 25)), min_size=1, max_size=5),
       st.integers(1, 12), st.booleans(), st.booleans())
def test_window_keys(rows, window, prefix_only, mapped) -> None:
    """The keys that some query of a sequence sees by Hugging Face's rule: a decode has ``window`` of them, its own included
    (SGLang's triton backend attends to one fewer)."""
    table = tokens_table()
    slot_map = torch.randperm(7 * WIDTH, generator=torch.Generator().manual_seed(5)) if mapped else None
    query, seq = [q for _, q, _ in rows], [q + c for _, q, c in rows]
    indptr, lens, start = torch.zeros(len(rows) + 1, dtype=torch.int32), *torch.zeros(2, len(rows), dtype=torch.int32)
    out = torch.full((sum(seq) + 2,), -7, dtype=torch.int32)
    kv.update_sliding_window_buffer(table, ints([r for r, _, _ in rows]), ints(seq), ints(query), window, kv_indptr=indptr,
                                 kv_lens=lens, kv_start=start, out=out, prefix_only=prefix_only, slot_map=slot_map)
    want = []
    for (r, q, _), n in zip(rows, seq, strict=True):
        if q:
            positions = torch.arange(n)
            seen = visible(positions[n - q :, None], positions[None], window=window, chunk=None, causal=True).any(0)
            if prefix_only:
                seen[n - q :] = False
            want.append([int(table[r, t]) for t in positions[seen].tolist()])
        else:
            want.append(None)  # no query: any keys will do
    for i, keys in enumerate(want):
        got = out[indptr[i] : indptr[i + 1]].tolist()
        assert len(got) == lens[i]
        if keys is not None:
            assert got == ([int(slot_map[s]) for s in keys] if mapped else keys)
    assert out[indptr[-1] :].eq(-7).all()


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=4), st.integers(1, 3), st.data())
def test_verification_tables(prefix, draft, data) -> None:
    own = [data.draw(st.integers(0, 4)) for _ in range(len(prefix) * draft)]
    a = torch.arange(len(prefix) * 9).view(-1, 9).int()
    b = 1000 + torch.arange(len(own) * 4).view(-1, 4).int()
    out = torch.full((len(own), 15), -7, dtype=torch.int32)
    kv.prepare_swa_spec_page_table(out, a, b, ints(prefix), ints(own), draft)
    for r, n in enumerate(own):
        want = a[r // draft, : prefix[r // draft]].tolist() + b[r, :n].tolist()
        assert out[r].tolist() == want + [-7] * (15 - len(want))


def test_verification_tables_of_other_sizes() -> None:
    with pytest.raises(ValueError, match="2 sequences of 3 draft tokens need 6 rows; out has 4"):
        kv.prepare_swa_spec_page_table(torch.zeros(4, 5), torch.zeros(2, 5), torch.zeros(4, 3), ints([1, 1]), ints([1] * 4), 3)


@pytest.mark.parametrize("page", [1, 2, 16, 128])
@pytest.mark.parametrize("delta", [0, 2, 5])
def test_decode_metadata(page, delta) -> None:
    seq = [1, page, 3 * page + 1]
    width = 4 * page + 8
    pages = 1 + torch.randperm(60)[: 3 * -(-width // page)].view(3, -1)
    table = (pages.repeat_interleave(page, 1) * page + torch.arange(page).repeat(pages.shape[1])).int()
    slot_map = torch.arange(int(table.max()) + page).flip(0) // page * page  # another page for each page
    lens, cu = torch.zeros(3, dtype=torch.int32), torch.full((4,), 9, dtype=torch.int32)
    out, out_window = torch.full((2, 3, 14), -7, dtype=torch.int32)
    kv.normal_decode_set_metadata(lens, cu, out, table, ints([2, 0, 1]), ints(seq), delta, page, slot_map, out_window)
    assert lens.tolist() == [n + delta for n in seq] and cu.tolist() == [0, *lens.cumsum(0).tolist()]
    for i, row in enumerate([2, 0, 1]):
        count = -(-int(lens[i]) // page)
        assert out[i].tolist() == (pages[row].tolist()[:count] + [-7] * 14)[:14]
        want = [int(slot_map[p * page]) // page for p in pages[row].tolist()[:count]]
        assert out_window[i].tolist() == (want + [-7] * 14)[:14]


def test_the_ops_are_sound() -> None:
    """Schema, fake and mutations, as torch.compile and CUDA graphs rely on them."""
    table, rows, lens = tokens_table(), ints([1, 3]), ints([4, 7])
    ops = torch.ops.quire
    flat = torch.zeros(16, dtype=torch.int32)
    cases = [
        (ops.create_flashinfer_kv_indices, (table, rows, lens, ints([0, 4, 11]), None, flat)),
        (ops.create_flashmla_kv_indices, (table, rows, lens, None, flat.view(2, 8), 2)),
        (ops.get_num_kv_splits, (torch.zeros(2, dtype=torch.int32), lens, 8, 2, 4, 100, False)),
        (ops.prepare_swa_spec_page_table, (flat.view(2, 8), table[:2], table[:2, :3], lens, ints([1, 2]), 1)),
        (ops.normal_decode_set_metadata, (ints([0, 0]), ints([0, 0, 0]), flat.view(2, 8), table, rows, lens, 0, 2, None, None)),
    ]
    for op, args in cases:
        torch.library.opcheck(op.default, tuple(a.clone() if isinstance(a, torch.Tensor) else a for a in args))
    torch.library.opcheck(ops.update_sliding_window_buffer.default, (table, rows, lens, ints([1, 2]), 3), dict(
        kv_indptr=ints([0, 0, 0]), kv_lens=ints([0, 0]), kv_start=ints([0, 0]), out=flat.clone()))
