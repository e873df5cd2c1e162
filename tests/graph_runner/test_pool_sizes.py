"""Pages are sized with what an attention backend keeps of them beside the KV cache: else a full engine runs out of memory."""

from __future__ import annotations

import json

import pytest
import torch

import quire
from quire.attn_ops.attention import AttentionSite
from quire.attn_ops.kv_cache import PagedKVCache, bytes_per_page
from quire.attn_ops.registry import get_backend
from quire.graph_runner.loading import TINY_MODEL
from quire.graph_runner.window_pages import PoolSizes, Reach

FULL = AttentionSite(layer=0, num_heads=8, num_kv_heads=2, head_dim=16, head_dim_v=16, dtype=torch.bfloat16, scale=0.25)
WINDOW = AttentionSite(layer=1, num_heads=8, num_kv_heads=2, head_dim=16, head_dim_v=16, dtype=torch.bfloat16, scale=0.25,
                       window=32)


def sizes(sites, bytes_beside=None) -> PoolSizes:
    windows = Reach.of(s for s in sites if s.bounded) if len(sites) > 1 else None
    more = {} if bytes_beside is None else {"bytes_beside": bytes_beside}
    return PoolSizes(sites, 16, None, 4, 64, 1 << 20, None, windows, False, **more)


@pytest.mark.parametrize("sites", [[FULL], [FULL, WINDOW]])
def test_pages_and_what_is_kept_of_them_fit(sites) -> None:
    """In the memory there is, with no room for another page; layers with pages of their own too."""
    budget = 10_000_000

    def used(pages: int, beside: int) -> int:
        windows = sizes(sites).window_pages(pages)
        return sum((bytes_per_page([s], 16) + beside * s.layer + beside) * (windows if s.bounded else pages) for s in sites)

    def kept(site: AttentionSite, page_size: int) -> int:
        return 100 * page_size * (site.layer + 1)

    for hook, beside in ((None, 0), (kept, 1600)):
        pages = sizes(sites, hook).pages_in(budget)
        assert used(pages, beside) <= budget < used(pages + 1, beside)


def test_composites_count_what_their_parts_keep(tmp_path) -> None:
    file = tmp_path / "channels.json"
    file.write_text(json.dumps({"channels": {"0": [list(range(16))] * 2}}))
    labels = get_backend(f"double_sparsity:8:8:4:{file}")
    both = get_backend({"full": labels.name, "window": "torch_native"})
    assert labels.bytes_beside(FULL, 16) == both.bytes_beside(FULL, 16) == 16 * 2 * 4 * 2  # bfloat16
    assert both.bytes_beside(WINDOW, 16) == get_backend("torch_native").bytes_beside(FULL, 16) == 0
    assert get_backend("double_sparsity:8:8:all").bytes_beside(FULL, 16) == 0  # the keys are the labels
    cache = PagedKVCache.for_sites([FULL], num_pages=9, page_size=16, device="cpu")
    labels.make_state([FULL], cache, None)
    assert cache.beside_bytes == 9 * labels.bytes_beside(FULL, 16)


@pytest.mark.slow
def test_stats_show_it(tmp_path) -> None:
    """And a large share of it leaves room for fewer pages."""
    file = tmp_path / "channels.json"
    file.write_text(json.dumps({"channels": {str(i): [list(range(64))] * 2 for i in range(4)}}))
    with quire.Engine(TINY_MODEL, attention=f"double_sparsity:8:8:64:{file}", compiler="eager") as engine:
        stats = engine.stats()
        assert stats.backend_bytes * 2 == stats.kv_cache_bytes > 0  # whole keys again
        assert f"attention's data of it {stats.backend_bytes / 2**20:,.0f} MiB" in str(stats)
