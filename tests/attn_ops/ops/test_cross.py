"""Cross attention: the kit has its numbers (tests/attn_ops/conformance/test_sweeps.py). Here what it refuses, and that a step
in progress does not reach it."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import quire
from quire.attn_ops.attention import AttentionSite
from quire.attn_ops.kv_cache import PagedKVCache
from quire.attn_ops.registry import get_backend
from quire.attn_ops.step import Step, running

NATIVE = get_backend("torch_native")
SITE = AttentionSite(0, 4, 2, 16, 16, torch.float32, 0.25)


def call(backend=NATIVE, **options) -> torch.Tensor:
    torch.manual_seed(0)
    cache = PagedKVCache.for_sites([SITE], num_pages=4, page_size=4, device="cpu")
    cache.k[0].normal_()
    cache.v[0].normal_()
    table = torch.tensor([[3, 1]], dtype=torch.int32)
    return quire.cross_attention(backend, torch.randn(2, 4, 16), cache, 0, table, torch.tensor([0, 2], dtype=torch.int32),
                                 torch.tensor([7], dtype=torch.int32), scale=0.25, **options)


@pytest.mark.parametrize("name", ["torch_native", "flex_attention"])
def test_inside_a_paged_step(name: str) -> None:
    """A step of short sequences must not cut the encoder's keys short."""
    expected = call()
    cache = PagedKVCache.for_sites([SITE], num_pages=4, page_size=4, device="cpu")
    meta = quire.CommonAttentionMetadata.build([1], [1], [[1]], page_size=4)
    with running(Step(cache, meta)):
        torch.testing.assert_close(call(get_backend(name)), expected)


def test_what_is_refused() -> None:
    with pytest.raises(quire.UnsupportedAttention, match="torch_native plans on the host"):
        call(dataclasses.replace(NATIVE, plan=lambda metadata, step: None))
    with pytest.raises(quire.UnsupportedAttention, match="double_sparsity:4:0:all keeps data about the keys of self-attention"):
        call(get_backend("double_sparsity:4:0:all"))
    narrow = dataclasses.replace(NATIVE.capabilities, head_dims=lambda d, dv: d == 64, head_dims_note="64")
    with pytest.raises(quire.UnsupportedAttention, match=r"head dims 16/16 \(has 64\)"):
        call(dataclasses.replace(NATIVE, capabilities=narrow))
    with pytest.raises(ValueError, match="go together"):
        call(k=torch.randn(7, 2, 16))
