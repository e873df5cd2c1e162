"""FlashInfer's prompts by contiguous keys, with a stand-in for the library; the copy runs in Triton's interpreter."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from quire.attn_ops.backends import torch_native
from quire.attn_ops.backends.flashinfer import contiguous
from tests.attn_ops.backends.flashinfer_stand_ins import Ragged
from tests.attn_ops.cases import make_case, run_case

SMALL = dict(num_heads=4, num_kv_heads=2, head_dim=64, page_size=4, dtype=torch.float16)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("first", [0, 2])
def test_the_copy_follows_the_plan(layout: str, first: int) -> None:
    """Decodes at the head, a sequence without queries, padding rows: each other sequence attends to its own keys."""
    case = make_case([1, 1, 21, 0, 5], [9, 30, 40, 7, 5], **SMALL, layout=layout, softcap=20.0, pad_reqs=2)
    want = run_case(torch_native.BACKEND, case)  # stores the new keys
    meta, (k, v, *_) = case.metadata, case.cache.of_layer(0)
    begin, rows = int(meta.query_start_loc_cpu[first]), meta.num_reqs
    planned = contiguous.plan(Ragged(None), meta, first, rows, 4, 2, 64, layout == "HND", window_left=-1, sm_scale=64**-0.5,
                              logits_soft_cap=20.0, q_data_type=torch.float16, kv_data_type=torch.float16)
    q = case.q[begin : int(meta.query_start_loc_cpu[rows])]
    out, lse = torch.empty_like(q), torch.empty(len(q), 4)
    pages = (k.transpose(1, 2), v.transpose(1, 2)) if layout == "HND" else (k, v)
    planned.run(q, pages, out=out, lse=lse, return_lse=True)
    torch.testing.assert_close(out, want[begin : begin + len(q)], atol=2e-3, rtol=2e-3)  # both round to float16
    assert lse.isfinite().all()


@pytest.mark.parametrize("query, keys, group, wins", [
    ([8192], [16384], 4, True), ([16384], [16384], 1, True), ([8192], [8192], 1, False), ([512], [16384], 16, True),
    ([512], [16384], 4, False), ([1024] * 64, [1024] * 64, 4, False), ([64], [65536], 8, False), ([1], [1], 8, False),
    ([0], [0], 1, False)])
def test_where_many_queries_read_each_key(query: list[int], keys: list[int], group: int, wins: bool) -> None:
    assert contiguous.spares(np.array(query), np.array(keys), 8 * group, 8, 128) == wins


def test_keys_that_stay_in_pages() -> None:
    """512 MiB: 131,072 tokens of 8 heads of 128 in half precision."""
    for keys, wins in ((131072, True), (131073, False)):
        assert contiguous.spares(np.array([65536]), np.array([keys]), 32, 8, 128) == wins
    for dim in (64, 128, 256):
        assert contiguous.spares(np.array([8192]), np.array([16384]), 32, 8, dim) == (dim == 128)


def test_copies_of_a_quantized_cache_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many prompts do not take more memory than the copies may, and one that would is refused before anything runs."""
    monkeypatch.setattr(contiguous.host, "MAX_GATHERED", 4 * 2 * 64 * 50)
    query, keys = np.array([5, 9, 0, 40]), np.array([20, 30, 0, 50])
    assert contiguous.parts(query, keys, 2, 64) == [(0, 3), (3, 4)]
    assert contiguous.parts(query[:0], keys[:0], 2, 64) == [(0, 0)]
    with pytest.raises(ValueError, match="a sequence of 51 tokens in a quantized cache"):
        contiguous.parts(np.array([1]), np.array([51]), 2, 64)
