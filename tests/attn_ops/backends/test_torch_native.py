"""Backend ``torch_native`` against the oracle. The tests of models lean on it, so this file is thorough.

The bound on each number is that of ``cases.make_case``: 1e-5 and two eps of the float32 result. Why 1e-5: queries, keys
and values are N(0, 1), so a score is a float32 sum of D <= 64 products, scaled to N(0, 1): off by at most 64 half eps
(6e-8) of its largest partial sum, 4e-6. The softmax passes that on as the same relative error of the weights.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from quire.attn_ops.backends import torch_native
from quire.attn_ops.backends.torch_native import BACKEND, KEYS, TILE
from quire.attn_ops.metadata import CommonAttentionMetadata
from tests.attn_ops.cases import check_case, check_output, fast_oracle, make_case, run_case
from tests.attn_ops.oracle import oracle_attention

SMALL = dict(num_heads=4, num_kv_heads=2, head_dim=8, page_size=4)
OPTIONS = {"window": 5, "softcap": 2.0, "chunk": 8, "sinks": True}
COMBINATIONS = [dict(c) for n in range(len(OPTIONS) + 1) for c in itertools.combinations(OPTIONS.items(), n)]


def case(query_lens, seq_lens, **options):
    return make_case(query_lens, seq_lens, **{**SMALL, **options})


def test_fast_oracle_is_the_oracle() -> None:
    """``cases.fast_oracle`` is what the tests compare with; it is the one written as plain loops."""
    torch.manual_seed(0)
    q, keys, values = torch.randn(5, 4, 8), torch.randn(13, 2, 8), torch.randn(13, 2, 6)
    for options in COMBINATIONS:
        options = {**options, "sinks": torch.randn(4) if options.get("sinks") else None, "scale": 0.3}
        expected = oracle_attention(q, keys, values, **options)
        torch.testing.assert_close(fast_oracle(q, keys, values, rows=2, **options), expected, rtol=1e-9, atol=1e-9)


# The oracle, over boundary shapes and all features.


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_boundary_lengths(page_size, layout) -> None:
    """Lengths around pages, tiles and chunks of keys; as decode, whole prefill, and prefill over a cached prefix."""
    lens = sorted({n for at in (1, page_size, 2 * page_size, TILE, 2 * TILE) for n in (at - 1, at, at + 1) if n > 0})
    shape = dict(page_size=page_size, layout=layout)
    check_case(BACKEND, case([1] * len(lens), lens, **shape))
    check_case(BACKEND, case(lens, lens, **shape))
    check_case(BACKEND, case(lens, [n + 7 for n in lens], **shape))


@pytest.mark.parametrize("features", [{}, dict(window=KEYS // 2), dict(chunk=100, sinks=True)], ids=str)
@pytest.mark.parametrize("page_size", [1, 16, 48])  # 48: a chunk of keys is no whole number of pages
def test_sequences_longer_than_a_chunk_of_keys(page_size, features) -> None:
    lens = [KEYS - 1, KEYS, KEYS + 1, 2 * KEYS + 3]
    check_case(BACKEND, case([1, 3, 1, 20], lens, page_size=page_size, **features))
    check_case(BACKEND, case([1] * 4, lens, page_size=page_size, **features))


@pytest.mark.parametrize("features", COMBINATIONS, ids=lambda c: "+".join(c) or "none")
def test_features(features) -> None:
    """Every combination, in a batch of decodes, prefills, chunks of prefills and waiting sequences, padded."""
    batch = ([1, 7, 0, 33, 1, 18, 4], [20, 9, 5, 40, 1, 18, 30])
    check_case(BACKEND, case(*batch, pad_tokens=3, pad_reqs=2, **features))
    check_case(BACKEND, case([1] * 6, [20, 9, 5, 40, 1, 18], pad_tokens=2, pad_reqs=2, layout="HND", **features))


@pytest.mark.parametrize("window", [1, 2, 4, 5, 100])
@pytest.mark.parametrize("queries", [[1, 1, 1], [6, 1, 3]])
def test_windows(window, queries) -> None:
    check_case(BACKEND, case(queries, [6, 17, 40], window=window))


@pytest.mark.parametrize("chunk", [1, 3, 4, 16, 100])
@pytest.mark.parametrize("queries", [[1, 1, 1], [6, 1, 18]])
def test_chunks(chunk, queries) -> None:
    check_case(BACKEND, case(queries, [6, 17, 40], chunk=chunk))


@pytest.mark.parametrize("heads, kv_heads", [(1, 1), (3, 3), (4, 1), (8, 2), (8, 1), (16, 2)])
@pytest.mark.parametrize("dims", [(8, None), (24, 16), (5, 3)])
def test_heads_and_dims(heads, kv_heads, dims) -> None:
    shape = dict(num_heads=heads, num_kv_heads=kv_heads, head_dim=dims[0], head_dim_v=dims[1], sinks=True)
    check_case(BACKEND, case([1, 9, 1], [13, 9, 6], **shape))
    check_case(BACKEND, case([1, 1, 1], [13, 9, 6], **shape))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("queries", [[1, 1, 1], [9, 1, 30]])
def test_half_precision(dtype, queries) -> None:
    check_case(BACKEND, case(queries, [9, 17, 40], dtype=dtype, window=20, sinks=True))


@pytest.mark.parametrize("queries", [[1, 1, 1], [9, 1, 3]])
def test_strided_inputs(queries) -> None:
    check_case(BACKEND, case(queries, [9, 17, 12], strided=True, head_dim_v=6))


def test_large_scores_do_not_overflow() -> None:
    """The running softmax subtracts the largest score so far, also when a later chunk has larger ones."""
    made = case([1, 3], [2 * KEYS + 9, 30], scale=100.0)
    out = run_case(BACKEND, made)
    assert out.isfinite().all()
    # Scores of some 1e3 are off by 1e-4, which the weights pass on.
    torch.testing.assert_close(out.double(), made.expected, rtol=0, atol=5e-3)


# Padding, and what must not be touched or read.


@pytest.mark.parametrize("queries, seqs", [([0], [5]), ([0, 0], [0, 3]), ([0, 1], [0, 1]), ([1, 0, 4], [9, 2, 4])])
def test_rows_without_tokens(queries, seqs) -> None:
    check_case(BACKEND, case(queries, seqs))


def test_batch_of_nothing() -> None:
    check_case(BACKEND, case([], [], pad_tokens=3, pad_reqs=2))
    check_case(BACKEND, case([0, 0], [4, 9], pad_tokens=0))


@pytest.mark.parametrize("pad_tokens, pad_reqs", [(0, 3), (1, 0), (5, 0), (40, 1), (2, 20)])
@pytest.mark.parametrize("queries", [[1, 1], [5, 1]])
def test_padding(queries, pad_tokens, pad_reqs) -> None:
    """Padding tokens hold NaN; they must leave zeros, and no trace in the cache."""
    check_case(BACKEND, case(queries, [9, 17], pad_tokens=pad_tokens, pad_reqs=pad_reqs, sinks=True))


def test_stale_metadata_of_padding_rows() -> None:
    """A graph's buffers keep old page numbers and lengths in the rows past the live ones, if a runner leaves them."""
    made = case([1, 5], [9, 17], pad_reqs=3, pad_tokens=2)
    made.metadata.block_table_tensor[2:] = 3
    check_case(BACKEND, made)


@pytest.mark.parametrize("features", [{}, OPTIONS, dict(window=3)], ids=["plain", "all", "window"])
@pytest.mark.parametrize("queries", [[1, 1, 1], [5, 1, 30]])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_garbage_in_slots_of_nobody(layout, queries, features) -> None:
    """NaN in the null page, in pages of nobody and past the end of every sequence: no output may be NaN.

    Pages are reused without being cleared, so what one request left there (of a model that overflows, say) must not
    reach the next.
    """
    shape = dict(layout=layout, pad_tokens=2, pad_reqs=1)
    check_case(BACKEND, case(queries, [9, 17, 41], poison=math.nan, **shape, **features))


@pytest.mark.parametrize("queries", [[1, 1], [5, 12]])
def test_garbage_in_pages_of_others(queries) -> None:
    """Two sequences, and the first one's pages full of NaN: the second must not see it."""
    made = case(queries, [9, 17])
    first = made.metadata.block_table[0, :3].long()
    made.cache.k[0][first] = made.cache.v[0][first] = math.nan
    out = run_case(BACKEND, made)
    start = queries[0]
    assert out[:start].isnan().all()
    made.expected, made.bound = made.expected[start:], made.bound[start:]
    assert ((out[start:].double() - made.expected).abs() <= made.bound).all()


@pytest.mark.parametrize("queries", [[1, 1], [5, 1]])
def test_layer_that_shares_a_cache(queries) -> None:
    """k and v None: nothing is written, the cache is read as it is."""
    check_case(BACKEND, case(queries, [9, 17], write=False))


def test_pages_in_any_order() -> None:
    """Where a sequence's pages lie makes no difference at all."""
    outs = []
    for seed_of_pages in (0, 1, 2):
        made = case([1, 7, 3], [19, 30, 3], num_pages=30)
        order = torch.cat([torch.zeros(1, dtype=torch.long), 1 + torch.randperm(
            29, generator=torch.Generator().manual_seed(seed_of_pages))])
        for tensors in (made.cache.k, made.cache.v):
            moved = torch.empty_like(tensors[0])
            moved[order] = tensors[0]
            tensors[0].copy_(moved)
        table = order[made.metadata.block_table.long()].int()
        meta = CommonAttentionMetadata.build([1, 7, 3], [19, 30, 3], table, page_size=4)
        made.metadata = meta
        outs.append(run_case(BACKEND, made))
        check_output(outs[-1], made)
    assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2])


@pytest.mark.parametrize("features", [{}, dict(window=5, sinks=True)], ids=["plain", "features"])
def test_a_sequence_does_not_depend_on_its_neighbours(features) -> None:
    """Alone or in a batch of the same kind (decodes, or with a prefill), a sequence's output is the same."""
    alone = case([7], [30], seed=3, **features)
    out = run_case(BACKEND, alone)
    batch = case([7, 20, 1], [30, 21, 9], seed=3, **features)
    batch.q[:7], batch.new_k[:7], batch.new_v[:7] = alone.q, alone.new_k, alone.new_v
    batch.sinks = alone.sinks
    for mine, theirs in ((alone.cache.k, batch.cache.k), (alone.cache.v, batch.cache.v)):
        theirs[0][batch.metadata.block_table[0, :8].long()] = mine[0][alone.metadata.block_table[0].long()]
    assert torch.equal(run_case(BACKEND, batch)[:7], out)


# Registration.


def arguments(made, prepare: bool):
    m = made.metadata
    tables = (m.slot_mapping, m.block_table_tensor, m.query_start_loc, m.seq_lens)
    return made.arguments(BACKEND.prepare(*tables, m.page_size) if prepare else ())


@pytest.mark.parametrize("options", [{}, OPTIONS, dict(write=False), dict(head_dim_v=6, layout="HND")],
                         ids=["plain", "features", "shared", "hnd"])
@pytest.mark.parametrize("queries", [[1, 1], [5, 1]])
@pytest.mark.parametrize("prepare", [False, True])
def test_opcheck(queries, options, prepare) -> None:
    made = case(queries, [9, 17], pad_tokens=2, pad_reqs=1, **options)
    for tensor in (made.q, made.k, made.v):
        if tensor is not None:
            tensor.nan_to_num_()  # opcheck compares inputs before and after with ==
    torch.library.opcheck(BACKEND.op, arguments(made, prepare), made.options)


@pytest.mark.parametrize("queries", [[1, 1], [5, 1]])
def test_opcheck_prepare(queries) -> None:
    m = case(queries, [9, 17]).metadata
    args = (m.slot_mapping, m.block_table_tensor, m.query_start_loc, m.seq_lens, m.page_size)
    torch.library.opcheck(BACKEND.prepare, args)


def test_prepared_is_what_the_op_makes_itself() -> None:
    made = case([5, 1, 0, 17], [9, 17, 3, 17])
    with_it = BACKEND.op(*arguments(made, True), **made.options)
    assert torch.equal(BACKEND.op(*arguments(made, False), **made.options), with_it)


def test_output_is_not_a_view() -> None:
    """An output that aliases an input or a larger buffer breaks functionalisation."""
    out = run_case(BACKEND, case([5, 1], [9, 17]))
    assert out.is_contiguous() and out.untyped_storage().nbytes() == out.numel() * 4


# Cost.


class Work(TorchDispatchMode):
    """Counts the numbers that all ops together produce, views apart."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if not func.is_view and isinstance(out, torch.Tensor) and not func._schema.is_mutable:
            self.numbers += out.numel()
        return out


def work(queries, seqs, **options) -> int:
    made = case(queries, seqs, expect=False, **options)
    with Work() as counted:
        torch_native.paged_attention(*made.arguments(), **made.options)
    return counted.numbers


@pytest.mark.parametrize("queries", [[1, 1], [5, 1]])
def test_cost_does_not_grow_with_the_cache(queries) -> None:
    small = work(queries, [9, 17], num_pages=20)
    assert small > 0
    assert work(queries, [9, 17], num_pages=20_000) == small
    assert work(queries, [9, 17], table_width=5_000) == small


def test_cost_of_a_window_does_not_grow_with_the_sequence() -> None:
    short = work([1, 1], [900, 900], window=64)
    assert work([1, 1], [9000, 9000], window=64) <= 1.1 * short


def test_cost_grows_with_the_tokens_attended() -> None:
    """The counter above counts."""
    assert work([1, 1], [900, 900]) > 5 * work([1, 1], [90, 90])
