"""The builder's defaults, parameters per layer, layouts, and shapes of speculative batches."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, dataclass, fields
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.attn_ops import metadata
from quire.attn_ops.kv_cache import PagedKVCache
from quire.graph_runner.config import EngineConfig
from tests.attn_ops.cases import SITE
from tests.attn_ops.metadata.batches import make_batch


class Builder(metadata.AttentionMetadataBuilder):
    def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
        return common_prefix_len, common_attn_metadata, fast_build


def builder(speculative=None) -> Builder:
    config = SimpleNamespace(speculative_config=speculative and SimpleNamespace(num_speculative_tokens=speculative))
    return Builder([SITE], ["a"], config, torch.device("cpu"))


def test_builder() -> None:
    made, meta = builder(), make_batch([1], [3])
    assert made.build_for_cudagraph_capture(meta) == (0, meta, False)
    assert made.build_for_drafting(meta, 2) == (0, meta, True)
    assert made.use_cascade_attention(512, np.ones(4), 8, 2, False, False, False, 132) is False
    assert (made.kv_cache_spec, made.layer_names, made.device) == ([SITE], ["a"], torch.device("cpu"))
    assert Builder.cudagraph_support is metadata.AttentionCGSupport.NEVER
    assert made.reorder_batch(None, None) is False  # without a threshold it takes any order, and does not touch the batch
    with pytest.raises(TypeError, match="abstract"):
        metadata.AttentionMetadataBuilder([], [], None, torch.device("cpu"))
    levels = ["NEVER", "UNIFORM_SINGLE_TOKEN_DECODE", "UNIFORM_BATCH", "ALWAYS"]
    assert [metadata.AttentionCGSupport(n).name for n in range(4)] == levels


@pytest.mark.parametrize(("threshold", "as_decode", "speculative", "want"), [
    (1, False, 3, 1), (1, True, 3, 4), (1, True, None, 1), (None, True, 3, None), (8, True, 3, 8),
])
def test_reorder_threshold(threshold, as_decode, speculative, want) -> None:
    made = builder(speculative)
    made._init_reorder_batch_threshold(threshold, as_decode)
    assert made.reorder_batch_threshold == want


# Parameters per layer.


def test_layers_that_differ_are_grouped_not_assumed_equal() -> None:
    """vLLM's page raises for windows that differ and asserts on scales; its later versions go on with the first layer's."""
    from dataclasses import replace

    sites = [replace(SITE, layer=i, window=None if i % 3 == 2 else 128, softcap=50.0) for i in range(6)]
    params = metadata.get_per_layer_parameters(sites)
    assert params[0] == metadata.PerLayerParameters(127, 50.0, 0.125) and params[2].window_left == -1
    assert metadata.group_layers(params) == {params[0]: [0, 1, 3, 4], params[2]: [2, 5]}
    first = metadata.infer_global_hyperparameters(params)
    assert first == params[0] and (first.has_same_window_lefts, first.has_same_all_params) == (False, False)
    alike = metadata.infer_global_hyperparameters({"a": params[0], "b": params[1]})
    assert (alike.has_same_window_lefts, alike.has_same_all_params) == (True, True)
    scaled = metadata.infer_global_hyperparameters({"a": params[0], "b": replace(params[0], sm_scale=1.0)})
    assert (scaled.has_same_window_lefts, scaled.has_same_all_params) == (True, False)
    with pytest.raises(ValueError, match="no layers"):
        metadata.infer_global_hyperparameters({})


# Layout.


def test_layout_affects_the_next_cache(monkeypatch) -> None:
    """vLLM's page keeps the first answer for ever, so that a later set_kv_cache_layout does nothing."""
    def cache(**options):
        return PagedKVCache(num_layers=1, num_pages=2, page_size=4, num_kv_heads=3, head_dim=8, dtype=torch.float32,
                            device="cpu", **options)

    monkeypatch.delenv("QUIRE_KV_CACHE_LAYOUT", raising=False)
    assert (metadata.get_kv_cache_layout(), cache().layout, EngineConfig().kv_layout) == ("NHD",) * 3
    monkeypatch.setenv("QUIRE_KV_CACHE_LAYOUT", "HND")
    assert (metadata.get_kv_cache_layout(), cache().layout, EngineConfig().kv_layout) == ("HND",) * 3
    assert cache().k[0].stride() == (96, 8, 32, 1)  # heads outside the tokens
    assert (cache(layout="NHD").layout, EngineConfig(kv_layout="NHD").kv_layout) == ("NHD", "NHD")
    try:
        metadata.set_kv_cache_layout("NHD")
        assert (metadata.get_kv_cache_layout(), cache().layout) == ("NHD", "NHD")
        metadata.set_kv_cache_layout("HND")
        assert cache().layout == "HND"
    finally:
        metadata.set_kv_cache_layout(None)
    monkeypatch.setenv("QUIRE_KV_CACHE_LAYOUT", "nhd")
    with pytest.raises(ValueError, match="QUIRE_KV_CACHE_LAYOUT='nhd' is not a KV cache layout"):
        cache()
    with pytest.raises(ValueError, match="'NHD' or 'HND', got 'LBHNC'"):
        metadata.set_kv_cache_layout("LBHNC")
    assert [metadata.is_valid_kv_cache_layout(x) for x in ("NHD", "HND", "nhd", None)] == [True, True, False, False]


# Shapes.


def test_spec_decode_shapes() -> None:
    q = torch.randn(6, 2, 4)
    four = metadata.reshape_query_for_spec_decode(q, 3)
    assert four.shape == (3, 2, 2, 4) and four.data_ptr() == q.data_ptr()
    back = metadata.reshape_attn_output_for_spec_decode(four)
    assert torch.equal(back, q) and back.data_ptr() == q.data_ptr()
    assert metadata.reshape_attn_output_for_spec_decode(q) is q
    for batch in (4, 0):
        with pytest.raises(ValueError, match=f"cannot be cut into {batch} sequences"):
            metadata.reshape_query_for_spec_decode(q, batch)
    with pytest.raises(ValueError, match=r"\(B, S, H, D\) or \(T, H, D\), got \(6, 8\)"):
        metadata.reshape_attn_output_for_spec_decode(q.flatten(1))


def test_conv1d_example() -> None:
    found, batch, offset = metadata.compute_causal_conv1d_metadata(torch.tensor([0, 3, 11, 27]))
    assert list(found) == [8] and found[8]["nums"].tolist() == [1, 1, 2] and found[8]["tot"] == 4
    assert batch[:5].tolist() == [0, 1, 2, 2, -1] and offset[:5].tolist() == [0, 0, 0, 1, metadata.PAD_SLOT_ID]
    assert batch.shape == offset.shape == (2048,) and batch.dtype == torch.int32
    with pytest.raises(ValueError, match="pass query_start_loc_cpu"):
        metadata.compute_causal_conv1d_metadata(torch.empty(3, device="meta"))


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 4000), max_size=6))
def test_conv1d_against_a_loop(lens) -> None:
    want = [(i, block) for i, n in enumerate(lens) for block in range(-(-n // 8))]
    _, batch, offset = metadata.compute_causal_conv1d_metadata(torch.tensor([0, *np.cumsum(lens)]))
    assert list(zip(batch.tolist(), offset.tolist(), strict=True))[: len(want)] == want
    assert len(batch) == 2 * max(1024, len(want)) and set(batch[len(want) :].tolist()) == {-1}


# Subclasses.


def test_subclass_of_a_backend() -> None:
    class Backend:
        @staticmethod
        def get_builder_cls():
            return None

    made = metadata.subclass_attention_backend("Fast", Backend, Builder)
    assert made.__name__ == "FastBackend" and issubclass(made, Backend)
    assert made.get_builder_cls() is Builder and made().get_builder_cls() is Builder and Backend.get_builder_cls() is None


@pytest.mark.parametrize("frozen", [False, True])
def test_subclass_of_metadata(frozen) -> None:
    @dataclass(frozen=frozen)
    class Metadata:
        a: int

    made = metadata.subclass_attention_metadata("Fast", Metadata, [("b", int, 7)])
    one = made(1)
    assert made.__name__ == "FastMetadata" and isinstance(one, Metadata) and (one.a, one.b) == (1, 7)
    assert [f.name for f in fields(made)] == ["a", "b"]
    if frozen:
        with pytest.raises(FrozenInstanceError):
            one.a = 2
    with pytest.raises(TypeError, match="Builder is not a dataclass"):
        metadata.subclass_attention_metadata("Fast", Builder, [])
