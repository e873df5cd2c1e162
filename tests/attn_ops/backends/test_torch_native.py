"""Backend ``torch_native``: what the conformance kit (tests/attn_ops/conformance) does not check of it."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from quire.attn_ops.backends import torch_native
from quire.attn_ops.backends.torch_native import BACKEND, KEYS, TILE
from quire.attn_ops.conformance.batches import prepared
from tests.attn_ops.cases import check_case, make_case, run_case

SMALL = dict(num_heads=4, num_kv_heads=2, head_dim=8, page_size=4)


def case(query_lens, seq_lens, **options):
    return make_case(query_lens, seq_lens, **{**SMALL, **options})


@pytest.mark.parametrize("features", [{}, dict(window=KEYS // 2), dict(chunk=100, sinks=True)], ids=str)
@pytest.mark.parametrize("page_size", [1, 16, 48])  # 48: a chunk of keys is not a whole number of pages
def test_lengths_around_a_tile_and_a_chunk_of_keys(page_size, features) -> None:
    lens = [TILE - 1, TILE, TILE + 1, 2 * TILE + 1, KEYS - 1, KEYS, KEYS + 1, 2 * KEYS + 3]
    check_case(BACKEND, case([1, TILE, TILE + 1, 2 * TILE, 1, 3, 1, 20], lens, page_size=page_size, **features))
    check_case(BACKEND, case([1] * 8, lens, page_size=page_size, **features))


def test_large_scores_do_not_overflow() -> None:
    """The running softmax subtracts the largest score so far, also when a later chunk has larger ones."""
    made = case([1, 3], [2 * KEYS + 9, 30], scale=100.0)
    out = run_case(BACKEND, made)
    assert out.isfinite().all()
    # Scores of some 1e3 are off by 1e-4, which the weights pass on.
    torch.testing.assert_close(out.double(), made.expected, rtol=0, atol=5e-3)


@pytest.mark.parametrize("features", [{}, dict(window=5, sinks=True)], ids=["plain", "features"])
def test_a_sequence_does_not_depend_on_its_neighbours(features) -> None:
    """Alone or in a batch of the same kind (decodes, or with a prefill), a sequence's output is the same."""
    alone = case([7], [30], seed=3, **features)
    out = run_case(BACKEND, alone)
    batch = case([7, 20, 1], [30, 21, 9], seed=3, **features)
    batch.q[:7], batch.new_k[:7], batch.new_v[:7] = alone.q, alone.new_k, alone.new_v
    batch.sinks = alone.sinks
    for mine, theirs in ((alone.cache.k, batch.cache.k), (alone.cache.v, batch.cache.v)):
        theirs[0][batch.metadata.block_table_tensor[0, :8].long()] = mine[0][alone.metadata.block_table_tensor[0].long()]
    assert torch.equal(run_case(BACKEND, batch)[:7], out)


def test_prepared_is_what_the_op_makes_itself() -> None:
    made = case([5, 1, 0, 17], [9, 17, 3, 17])
    given = prepared(BACKEND, made)
    with_it = BACKEND.op(*made.arguments(given), **made.options)
    assert given and torch.equal(BACKEND.op(*made.arguments(), **made.options), with_it)
    # An output that aliases an input or a larger buffer breaks functionalization.
    out = run_case(BACKEND, case([5, 1], [9, 17]))
    assert out.is_contiguous() and out.untyped_storage().nbytes() == out.numel() * 4


# Cost.


class Work(TorchDispatchMode):
    """Counts the elements that all ops produce, views excluded."""

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
    # The counter above counts.
    assert work([1, 1], [900, 900]) > 5 * work([1, 1], [90, 90])
