"""The paged KV cache: shapes, memory layout, sizes, and every error."""

from __future__ import annotations

import pytest
import torch

import quire.attn_ops.kv_cache
from quire.attn_ops.attention import AttentionSite
from quire.attn_ops.kv_cache import PagedKVCache, bytes_per_page, pages_for

SIZES = dict(num_layers=2, num_pages=5, page_size=4, num_kv_heads=3, head_dim=8, dtype=torch.float32, device="cpu")


def make(**options) -> PagedKVCache:
    return PagedKVCache(**{**SIZES, **options})


def site(layer: int, **options) -> AttentionSite:
    return AttentionSite(**{**dict(layer=layer, num_heads=6, num_kv_heads=3, head_dim=8, head_dim_v=8, scale=1.0,
                                   dtype=torch.bfloat16), **options})


@pytest.mark.parametrize("layout, stride", [("NHD", (96, 24, 8, 1)), ("HND", (96, 8, 32, 1))])
def test_layout(layout, stride) -> None:
    """One logical shape, (pages, page size, Hkv, D), and two orders in memory."""
    cache = make(layout=layout)
    for tensor in [*cache.k, *cache.v]:
        assert tensor.shape == (5, 4, 3, 8) and tensor.stride() == stride
        assert tensor.dtype == torch.float32 and not tensor.any()
    assert len(cache.k) == len(cache.v) == cache.num_layers == 2


def test_each_tensor_is_an_allocation_of_its_own() -> None:
    cache = make(num_layers=3, layout="HND")
    tensors = [*cache.k, *cache.v]
    assert len({t.untyped_storage().data_ptr() for t in tensors}) == 6
    assert all(t.storage_offset() == 0 and t.untyped_storage().nbytes() == t.numel() * 4 for t in tensors)
    assert make(device="meta", num_pages=10**9).k[0].is_meta


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_quantized(dtype, layout) -> None:
    """Codes, and a scale for each token and head: allocations of their own, the heads outside the tokens."""
    cache = make(dtype=dtype, layout=layout, head_dim_v=6)
    assert cache.quantized and cache.dtype == dtype and cache.k[0].dtype == dtype
    for scale in [*cache.k_scale, *cache.v_scale]:
        assert scale.shape == (5, 4, 3) and scale.stride() == (12, 1, 4) and scale.dtype == torch.float32
        assert not scale.any()
    tensors = [*cache.k, *cache.v, *cache.k_scale, *cache.v_scale]
    assert len({t.untyped_storage().data_ptr() for t in tensors}) == 8
    assert cache.num_bytes == sum(t.untyped_storage().nbytes() for t in tensors) == 2 * 5 * 4 * 3 * (8 + 6 + 2 * 4)
    assert all(a is b for a, b in zip(cache.of_layer(1), (cache.k[1], cache.v[1], cache.k_scale[1], cache.v_scale[1]),
                                      strict=True))


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_fixed_scales(layout) -> None:
    """Two numbers per layer, in no page: they take no memory by token, and copies of pages leave them alone."""
    cache = make(dtype=torch.float8_e4m3fn, layout=layout, layer_ids=[3, 7], kv_scales={3: (0.5, 2), 7: (0.25, 1.0)})
    assert cache.fixed_scale and cache.kv_scales == {3: (0.5, 2.0), 7: (0.25, 1.0)}
    assert [(k.item(), v.item()) for k, v in zip(cache.k_scale, cache.v_scale, strict=True)] == [(0.5, 2.0), (0.25, 1.0)]
    assert {t.shape for t in (*cache.k_scale, *cache.v_scale)} == {(1, 1, 1)}
    assert cache.num_bytes == 2 * (2 * 5 * 4 * 3 * 8 + 2 * 4)
    cache.k[1].view(torch.uint8).copy_(torch.arange(5)[:, None, None, None])
    cache.copy_pages(torch.tensor([1, 2]), torch.tensor([3, 4]))
    assert cache.k[1].view(torch.uint8)[:, 0, 0, 0].tolist() == [0, 1, 2, 1, 2] and cache.k_scale[1] == 0.25
    assert make(dtype=torch.float8_e5m2, kv_scales=0.5).kv_scales == {0: (0.5, 0.5), 1: (0.5, 0.5)}
    assert "float8_e4m3fn and a fixed scale per layer, cpu" in repr(cache)
    assert not make(dtype=torch.float8_e4m3fn).fixed_scale and make(device="meta", kv_scales=1.0, dtype=torch.float8_e5m2).k
    shared = make(dtype=torch.float8_e5m2, kv_sources={1: 0}, kv_scales={0: (0.5, 0.25)})
    assert shared.k_scale[1] is shared.k_scale[0]


def test_unquantized_has_no_scales() -> None:
    cache = make(layer_ids=[3, 7])
    assert not cache.quantized and cache.k_scale == cache.v_scale == [None, None]
    k, v, *scales = cache.of_layer(7)
    assert k is cache.k[1] and v is cache.v[1] and scales == [None, None]


def test_bytes_per_page_is_what_a_page_takes() -> None:
    sites = [site(0), site(1, num_kv_heads=1, head_dim=24, head_dim_v=16)]
    for dtype in (None, torch.float32, torch.int8, torch.float8_e5m2):
        cache = PagedKVCache.for_sites(sites, num_pages=10, page_size=4, device="cpu", dtype=dtype)
        assert bytes_per_page(sites, 4, dtype) * 10 == cache.num_bytes
    fixed = PagedKVCache.for_sites(sites, num_pages=10, page_size=4, device="cpu", dtype=torch.float8_e5m2, kv_scales=0.1)
    assert bytes_per_page(sites, 4, torch.float8_e5m2, fixed_scale=True) * 10 == fixed.num_bytes - 2 * 2 * 4


@pytest.mark.parametrize("dtype", [torch.int16, torch.uint8, torch.bool, torch.float8_e4m3fnuz], ids=str)
def test_dtypes_that_hold_no_keys(dtype) -> None:
    name = str(dtype).removeprefix("torch.")
    with pytest.raises(ValueError, match=f"a KV cache of {name} is not possible: give the model's own dtype or one of the "
                                         "quantized ones, float8_e4m3fn, float8_e5m2, int8"):
        make(dtype=dtype)


def test_sizes_by_layer() -> None:
    cache = make(num_kv_heads=[1, 4], head_dim=[8, 16], head_dim_v=[6, 16], layer_ids=[3, 7], dtype=torch.float16)
    assert make(head_dim=24).v[0].shape[-1] == 24  # values are by default as wide as keys
    assert [tuple(t.shape) for t in cache.k] == [(5, 4, 1, 8), (5, 4, 4, 16)]
    assert [tuple(t.shape) for t in cache.v] == [(5, 4, 1, 6), (5, 4, 4, 16)]
    assert cache.index(3) == 0 and cache.index(7) == 1
    assert cache.num_bytes == 2 * 5 * 4 * (1 * (8 + 6) + 4 * (16 + 16))
    with pytest.raises(ValueError, match=r"the KV cache has no layer 0; its layers are \[3, 7\]"):
        cache.index(0)


def test_for_sites() -> None:
    sites = [site(4), site(2, num_kv_heads=1, head_dim=24, head_dim_v=16)]
    cache = PagedKVCache.for_sites(sites, num_pages=7, page_size=2, device="cpu", layout="HND")
    assert cache.layer_ids == [4, 2] and cache.dtype == torch.bfloat16 and cache.layout == "HND"
    assert [tuple(t.shape) for t in [*cache.k, *cache.v]] == [(7, 2, 3, 8), (7, 2, 1, 24), (7, 2, 3, 8), (7, 2, 1, 16)]
    assert PagedKVCache.for_sites(sites, num_pages=7, device="cpu", dtype=torch.float32).dtype == torch.float32
    with pytest.raises(ValueError, match="no attention sites: there is nothing to cache"):
        PagedKVCache.for_sites([], num_pages=4, device="cpu")


@pytest.mark.parametrize("tokens, pages", [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (32, 2)])
def test_pages_for(tokens, pages) -> None:
    assert pages_for(tokens, 16) == pages


def test_repr() -> None:
    assert repr(make(num_pages=64, page_size=16, head_dim=128, num_kv_heads=8)) == (
        "PagedKVCache(2 layers, 64 pages of 16, NHD, float32, cpu, 16.0 MiB)")
    assert repr(make(num_pages=64, page_size=16, head_dim=124, num_kv_heads=8, dtype=torch.int8)) == (
        "PagedKVCache(2 layers, 64 pages of 16, NHD, int8 and scales, cpu, 4.0 MiB)")


@pytest.mark.parametrize("options, message", [
    (dict(num_pages=1), r"at least 2 pages \(page 0 is the null page\), got num_pages=1"),
    (dict(page_size=0), "page_size must be at least 1 token, got 0"),
    (dict(layout="NDH"), "layout must be 'NHD' or 'HND', got 'NDH'"),
    (dict(num_kv_heads=[1]), r"num_kv_heads must be a positive int or 2 of them, got \[1\]"),
    (dict(head_dim=0), "head_dim must be a positive int or 2 of them, got 0"),
    (dict(head_dim_v=[4, -1]), r"head_dim_v must be a positive int or 2 of them, got \[4, -1\]"),
    (dict(layer_ids=[0]), "layer_ids has 1 entries for 2 layers"),
    (dict(kv_scales=0.1), "kv_scales=0.1 are the fixed scales of an fp8 KV cache"),
    (dict(dtype=torch.int8, kv_scales=0.1), "int8 has no NaN"),
    (dict(dtype=torch.float8_e5m2, kv_scales={0: (1.0, 1.0)}), r"has scales for layers \[0\]; the layers .* are \[0, 1\]"),
    (dict(dtype=torch.float8_e5m2, kv_scales=0.0), "kv_scales must be numbers between"),
    (dict(dtype=torch.float8_e5m2, num_kv_heads=1, latent=True, kv_scales=0.1), "latent layers .MLA. have a scale for each"),
])
def test_errors(options, message) -> None:
    with pytest.raises(ValueError, match=message):
        make(**options)


def test_a_cache_of_other_sizes() -> None:
    """What a step by hand writes would fit nowhere, or in the wrong place."""
    cache = PagedKVCache.for_sites([site(0)], num_pages=4, device="cpu")
    cache.check(site(0))
    with pytest.raises(ValueError, match="layer 0 of the KV cache has 3 key heads of 8/8, and the model's needs GQA 6:3x8/16"):
        cache.check(site(0, head_dim_v=16))
    with pytest.raises(ValueError, match="the KV cache has no layer 1"):
        cache.check(site(1))


def test_for_model(monkeypatch) -> None:
    monkeypatch.setattr(quire.attn_ops.kv_cache, "site_finders", [])
    with pytest.raises(RuntimeError, match="use quire.PagedKVCache"):  # without the capture
        PagedKVCache.for_model(torch.nn.Linear(1, 1), num_pages=4)
    monkeypatch.setattr(quire.attn_ops.kv_cache, "site_finders", [lambda model: [site(0)]])
    cache = PagedKVCache.for_model(torch.nn.Linear(1, 1), num_pages=4, page_size=8)
    assert cache.num_layers == 1 and cache.device == torch.device("cpu") and cache.page_size == 8
