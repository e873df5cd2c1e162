"""A cascade finds exactly the pages that all sequences have in common, reads them once, and is otherwise the backend it is made
of: else sequences read each other's tokens, or the same keys twice."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch

from quire import CommonAttentionMetadata, UnsupportedAttention, define_state_op
from quire.attn_ops.backends import cascade, torch_native
from quire.attn_ops.conformance.batches import Failure, lay_out, prepared, run
from quire.attn_ops.conformance.checks import Kit
from quire.attn_ops.kernels.launch import recording
from quire.attn_ops.registry import get_backend, register_backend
from tests.attn_ops.cases import FEW, make_backend, pass_kit, run_check
from tests.attn_ops.cases import SITE as SITE_3

SITE = dataclasses.replace(SITE_3, layer=0)
prefixes: list[int] = []


def seen(q, k, v, *rest, causal, **options):
    if not causal:
        prefixes.append(int(rest[7]))  # its seq_lens
    return torch_native.attention_state(q, k, v, *rest, causal=causal, **options)


SEEN = dataclasses.replace(torch_native.BACKEND, name="seen", state_op=define_state_op("seen_in_cascade_test", seen))


@pytest.fixture(autouse=True)
def parts(entries) -> None:
    entries(cascade=lambda: cascade.FAMILY)
    register_backend(SEEN)
    prefixes.clear()


@FEW
def test_it_passes_the_kit(only: str) -> None:
    pass_kit(get_backend("cascade:seen@1"), only)
    assert 8 in prefixes or only


@pytest.mark.parametrize("change", [1, -1])
def test_the_kit_sees_a_wrong_prefix(change: int, monkeypatch: pytest.MonkeyPatch) -> None:
    exact = cascade.shared_prefix

    def wrong(*args):
        prefix, start, length, *rest = exact(*args)
        return [prefix, start, (length + change).clamp_min(0), *rest]

    monkeypatch.setattr(cascade, "shared_prefix", wrong)
    with pytest.raises(Failure, match="wrong"):
        run_check(Kit(get_backend("cascade:seen@1"), torch.device("cpu"), torch.float32), "shared prefix")


def test_shared_prefix_is_what_all_tables_begin_with() -> None:
    rng = random.Random(0)
    found = set()
    for _ in range(300):
        rows, page = rng.randint(1, 5), rng.choice((1, 2, 4))
        common, width = rng.randint(0, 4), 6
        table = [[(c + 1 if c < common or rng.random() < 0.3 else 10 + r * width + c) for c in range(width)]
                 for r in range(rows)]
        lens = [rng.choice((0, 1, 1, 1, 3)) for _ in range(rows)]
        seqs = [rng.randint(max(n, 1), width * page) for n in lens]
        start, reads = torch.tensor([0, *lens]).cumsum(0).int(), rng.choice((1, 8))
        prefix, tokens, length, rest, left = cascade.shared_prefix(
            torch.tensor(table).int(), start, torch.tensor(seqs).int(), page, reads)
        live = [r for r in range(rows) if lens[r]]
        pages = 0
        while live and all(table[r][pages] == table[live[0]][pages] and (pages + 1) * page <= seqs[r] - lens[r] for r in live):
            pages += 1
        pages = pages if (len(live) - 1) * pages * page >= reads else 0
        found.add(pages)
        assert length.tolist() == [pages * page] and tokens.tolist() == [0, sum(lens)]
        assert left.tolist() == [max(0, n - pages * page) for n in seqs]
        assert not live or prefix.tolist() == [table[live[0]]]
        for r in live:
            assert rest[r].tolist()[: width - pages] == table[r][pages:]
        assert all(x.dtype == torch.int32 for x in (prefix, tokens, length, rest, left))
    assert found > {0, 1, 2}


def test_a_prefix_counts_only_where_it_saves_reads() -> None:
    """And layers with a window, prefills and single sequences are the backend's own."""
    page, rows = 4, [(1, 13)] * 3
    for reads, expected in ((16, [8]), (17, [0])):
        backend = get_backend(f"cascade:seen@{reads}")
        run(backend, lay_out(SITE, [1] * 3, [13] * 3, page_size=page, shared=8))
        assert prefixes == expected
        prefixes.clear()
    for site, queries in ((dataclasses.replace(SITE, window=5), rows), (dataclasses.replace(SITE, chunk=8), rows),
                          (SITE, [(1, 13)]), (SITE, [(9, 13), (9, 13)])):
        run(backend, lay_out(site, [n for n, _ in queries], [t for _, t in queries], page_size=page))
    assert not prefixes
    assert backend.serves(SITE) == "seen_paged_attention, a shared prefix once"
    assert backend.serves(dataclasses.replace(SITE, window=5)) == "seen_paged_attention"


def test_nothing_is_read_on_the_host() -> None:
    """Else no step could be captured: all sizes follow from the batch's shape."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    meta = CommonAttentionMetadata.build([1, 1], [9, 9], [[1, 2, 3], [1, 2, 4]], page_size=4)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        tables = [mode.from_tensor(t) for t in (meta.block_table_tensor, meta.query_start_loc, meta.seq_lens)]
        found = cascade.shared_prefix(*tables, 4, 1)
    assert [tuple(t.shape) for t in found] == [(1, 3), (2,), (1,), (2, 3), (2,)]


def test_kernels_of_both_ways_are_compiled_ahead() -> None:
    batch, backend = lay_out(SITE, [1, 1], [9, 9], page_size=4), get_backend("cascade:seen")
    with recording():
        backend.op(*batch.arguments(prepared(backend, batch)), **batch.options)
    assert prefixes == [0]


@pytest.mark.parametrize("name, message", [
    ("cascade", "write cascade:NAME"), ("cascade:", "write cascade:NAME"), ("cascade:seen@", "write cascade:NAME"),
    ("cascade:seen@0", "write cascade:NAME"), ("cascade:seen@few", "write cascade:NAME"),
    ("cascade:nobody", "unknown attention backend 'nobody'"), ("cascade:without", "without does not return the log-sum-exp"),
])
def test_bad_names(name: str, message: str) -> None:
    register_backend(make_backend("without"))
    with pytest.raises(ValueError, match=message) as raised:
        get_backend(name)
    assert ("log-sum-exp" in message) == isinstance(raised.value, UnsupportedAttention)
