"""Which way FlashInfer's prompts go: what is possible, and which of that takes the least time."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from quire.attn_ops.backends.flashinfer import routes
from quire.attn_ops.backends.flashinfer.routes import Way


def chosen(query, keys, heads=32, kv_heads=8, dim=128, *, hopper=True, own=True, copies=True) -> Way:
    query, keys = np.array(query), np.array(keys)
    runs = routes.runs(query, whole_tiles=hopper) if own else []
    return routes.choose(query, keys, heads, kv_heads, dim, hopper=hopper, own_runs=len(runs), copies=copies)


@pytest.mark.parametrize("new, before, heads, copies, without", [
    (1024, 0, 32, Way.OWN, Way.OWN), (8192, 0, 16, Way.OWN, Way.OWN), (512, 16384, 32, Way.PAGES, Way.PAGES),
    (2048, 14336, 32, Way.COPIES, Way.PAGES), (2048, 14336, 16, Way.PAGES, Way.PAGES), (8192, 24576, 32, Way.COPIES, Way.OWN),
    (8192, 24576, 16, Way.COPIES, Way.PAGES), (16384, 8192, 16, Way.COPIES, Way.OWN), (16384, 131072, 32, Way.OWN, Way.OWN)])
def test_one_prompt(new: int, before: int, heads: int, copies: Way, without: Way) -> None:
    """Where keys may be copied (the last ones do not fit), and where not."""
    assert chosen([new], [new + before], heads) == copies
    assert chosen([new], [new + before], heads, copies=False) == without


def test_prompts_without_a_prefix() -> None:
    """Nothing is copied for them, on any GPU and for any head dim, but for many that end within a tile."""
    for hopper, dim in itertools.product((True, False), (64, 128, 256)):
        assert chosen([4096], [4096], dim=dim, hopper=hopper) == Way.OWN
        assert chosen([1024] * 64, [1024] * 64, dim=dim, hopper=hopper) == Way.OWN
    assert chosen([3000, 0, 2000], [3000, 0, 2000]) == Way.OWN and chosen([300, 200], [300, 200]) == Way.PAGES
    assert chosen([300, 200], [300, 200], hopper=False) == Way.OWN
    many = [3001] * (routes.MOST_RUNS + 1)
    assert chosen(many[1:], many[1:]) == Way.OWN and chosen(many, many) == Way.COPIES
    assert chosen(many, many, copies=False) == Way.PAGES


@pytest.mark.parametrize("query, keys, group, wins", [
    ([8192], [16384], 4, True), ([16384], [16384], 1, True), ([8192], [8192], 1, False), ([512], [16384], 16, True),
    ([512], [16384], 4, False), ([1024] * 64, [1024] * 64, 4, False), ([64], [65536], 8, False), ([1], [1], 8, False),
    ([0], [0], 1, False)])
def test_copies_where_many_queries_read_each_key(query: list[int], keys: list[int], group: int, wins: bool) -> None:
    """Of layers without keys of their own, or a quantized cache's."""
    assert chosen(query, keys, 8 * group, own=False) == (Way.COPIES if wins else Way.PAGES)


def test_keys_that_stay_in_pages() -> None:
    """512 MiB: 131,072 tokens of 8 heads of 128 in half precision."""
    for keys, way in ((131072, Way.COPIES), (131073, Way.PAGES)):
        assert chosen([65536], [keys], own=False) == way
    for dim in (64, 128, 256):
        assert chosen([8192], [16384], dim=dim) == (Way.PAGES if dim == 256 else Way.COPIES)
    assert chosen([8192], [16384], own=False, copies=False) == chosen([8192], [16384], hopper=False, copies=False) == Way.PAGES


def test_the_terms() -> None:
    """Seconds by hand, of 100 tokens after 300: 4 * H * D operations a pair, 4 * Hkv * D bytes a key, in whole tiles."""
    found = routes.seconds(np.array([100]), np.array([400]), 32, 8, 128, hopper=True, own_runs=1, copies=True)
    pairs = 100 * 300 + 100 * 101 / 2
    assert found[Way.PAGES] == pytest.approx(4 * 32 * 128 * pairs * 0.3e-15)
    assert found[Way.COPIES] == pytest.approx(2 * 512 * 8 * 128 * 4 / 1.9e12 + 15e-6)
    assert found[Way.OWN] == pytest.approx(4 * 32 * 128 * 100 * 300 * 0.3e-15 + 100 * 32 * (8 * 128 + 16) / 1.9e12 + 15e-6)


@pytest.mark.parametrize("lens, parts", [
    ([], [(0, 0)]), ([0, 0], [(0, 2)]), ([5], [(0, 1)]), ([128, 256, 5], [(0, 3)]), ([5, 0, 0], [(0, 3)]),
    ([5, 128], [(0, 1), (1, 2)]), ([128, 5, 0, 128, 7, 1], [(0, 3), (3, 5), (5, 6)]), ([127, 129], [(0, 1), (1, 2)])])
def test_runs(lens: list[int], parts: list[tuple[int, int]]) -> None:
    """A user beside whose prompt another one has a NaN: no tile of a sequence's values reaches into the next one's."""
    assert routes.runs(np.array(lens, dtype=np.int64), whole_tiles=True) == parts
    assert routes.runs(np.array(lens, dtype=np.int64), whole_tiles=False) == [(0, len(lens))]


def test_own_keys_only_where_they_were_seen_right_on_a_gpu() -> None:
    """What nobody has run there goes by the ways that were."""
    half = torch.bfloat16
    for layer in ((half, 128, None), (half, 128, 30.0), (torch.float16, 128, None), (half, 64, None)):
        assert routes.seen_right(*layer)
    for layer in ((torch.float16, 128, 30.0), (half, 64, 30.0), (torch.float16, 64, None), (half, 256, None),
                  (torch.float32, 128, None)):
        assert not routes.seen_right(*layer)
