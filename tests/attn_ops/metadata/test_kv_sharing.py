"""Fast prefill of layers with shared keys: the tokens with logits get what the full prefill gives them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.attn_ops import metadata
from quire.attn_ops.kv_cache import PagedKVCache
from quire.attn_ops.registry import get_backend
from quire.attn_ops.step import Step
from tests.attn_ops.metadata.batches import batches, make_batch

fast = metadata.make_kv_sharing_fast_prefill_common_attn_metadata


def wanted(meta, indices):
    return replace(meta, logits_indices_padded=torch.tensor([*indices, 0]), num_logits_indices=len(indices))


def test_the_worked_example() -> None:
    """vLLM's has indices 14, 18, 19, 27."""
    meta = wanted(make_batch([15, 5, 8], [41, 31, 40]), [14, 18, 19, 27])
    got = fast(meta)
    assert got.query_start_loc.tolist() == [0, 1, 3, 4] and (got.num_actual_tokens, got.max_query_len) == (4, 2)
    assert got.seq_lens is meta.seq_lens and got.slot_mapping is meta.slot_mapping
    assert isinstance(got, metadata.KVSharingFastPrefillMetadata)
    assert all(hasattr(got, name) for name, _, _ in metadata.KV_SHARING_FAST_PREFILL_METADATA_FIELDS)
    plain, decode = make_batch([3], [3]), wanted(make_batch([1, 1], [4, 5]), [0, 1])
    assert fast(plain) is plain and fast(decode) is decode


@settings(max_examples=40, deadline=None)
@given(batches(), st.data())
def test_rows_of_the_full_prefill(meta, data) -> None:
    """With a real kernel: the op on the last tokens alone, without keys, after the full op has written the cache."""
    if meta.max_query_len < 2:
        return
    counts = [data.draw(st.integers(0, n)) for n in meta.query_lens_cpu.tolist()]
    ends = meta.query_start_loc_cpu[1:].tolist()
    indices = [t for end, n in zip(ends, counts, strict=True) for t in range(end - n, end)]
    backend = metadata.create_fast_prefill_custom_backend("FastPrefill", get_backend("torch_native"))
    cache = PagedKVCache(num_layers=1, num_pages=60, page_size=4, num_kv_heads=1, head_dim=8, dtype=torch.float32, device="cpu")
    q, k, v = torch.randn(3, meta.num_actual_tokens, 1, 8, generator=torch.Generator().manual_seed(2))

    def run(m, q, k, v):
        return backend.op(q, k, v, *cache.of_layer(0), m.slot_mapping[: len(q)], m.block_table_tensor, m.query_start_loc,
                          m.seq_lens, None, [], scale=0.3, window=None, softcap=None, chunk=None)

    full = run(meta, q, k, v)
    short = run(fast(wanted(meta, indices)), q[indices], None, None)
    torch.testing.assert_close(short, full[indices], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("indices", [[3], [0, 4], [4, 3], [5]])
def test_tokens_that_are_not_the_last(indices) -> None:
    """Their positions are counted from the end of the sequence, so their attention would be another's."""
    with pytest.raises(ValueError, match="are not the last tokens of their sequences"):
        fast(wanted(make_batch([5], [5]), indices))


def test_indices_on_a_device_are_not_waited_for() -> None:
    meta = replace(wanted(make_batch([5], [5]), [4]), logits_indices_padded=torch.empty(1, dtype=torch.int64, device="meta"))
    with pytest.raises(ValueError, match="put logits_indices_cpu"):
        fast(meta)
    assert fast(replace(meta, logits_indices_cpu=torch.tensor([4]))).num_actual_tokens == 1


def test_the_wrapper_plans_for_the_tokens_with_logits() -> None:
    planned = []
    own = replace(get_backend("torch_native"), name="mine", plan=lambda metadata, step: planned.append(metadata))
    backend = metadata.create_fast_prefill_custom_backend("FastPrefill", own)
    meta = wanted(make_batch([5, 2], [5, 2]), [4, 6])
    cache = PagedKVCache(num_layers=1, num_pages=4, page_size=4, num_kv_heads=1, head_dim=8, dtype=torch.float32, device="cpu")
    assert backend.name == "FastPrefillmine" and backend.op is own.op
    assert backend.priority is None  # "auto" must not choose it
    backend.plan(meta, Step(cache, meta))
    backend.plan(meta, Step(cache, meta, capturing=True))
    assert planned[0].query_start_loc.tolist() == [0, 1, 2] and planned[1] is meta


@pytest.mark.parametrize("frozen", [False, True])
def test_the_wrapper_of_an_engines_backend_class(frozen) -> None:
    """Its builder sees the tokens with logits; a capture sees the full batch."""
    @dataclass(frozen=frozen)
    class Metadata:
        starts: list[int]
        doubled: int = field(init=False)

        def __post_init__(self) -> None:
            object.__setattr__(self, "doubled", 2 * len(self.starts))

    class Builder(metadata.AttentionMetadataBuilder):
        def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
            return Metadata(common_attn_metadata.query_start_loc.tolist())

    class Backend:
        @staticmethod
        def get_builder_cls():
            return Builder

    made = metadata.create_fast_prefill_custom_backend("FastPrefill", Backend)
    builder, meta = made.get_builder_cls()([], [], None, torch.device("cpu")), wanted(make_batch([5, 2], [5, 2]), [4, 6])
    got, captured = builder.build(0, meta), builder.build_for_cudagraph_capture(meta)
    assert made.__name__ == "FastPrefillBackend" and issubclass(made, Backend)
    assert (got.starts, captured.starts, got.doubled) == ([0, 1, 2], [0, 5, 7], 6)
    for one in (got, captured):
        assert isinstance(one, Metadata) and isinstance(one, metadata.KVSharingFastPrefillMetadata)
        assert one.logits_indices_padded is meta.logits_indices_padded and one.num_logits_indices == 2
    assert builder.build(0, make_batch([3], [3])).starts == [0, 3]  # no logits asked for: the whole batch
