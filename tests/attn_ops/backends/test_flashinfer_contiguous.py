"""FlashInfer's prompts by contiguous keys, with a stand-in for the library; the copy runs in Triton's interpreter."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from quire.attn_ops.backends import torch_native
from quire.attn_ops.backends.flashinfer import contiguous
from quire.attn_ops.kernels import gather_kv
from quire.attn_ops.kernels.host import Caches
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
    wrapper = Ragged(None)

    def plan(*args, **options) -> Ragged:
        wrapper.plan(*args, **options)
        return wrapper

    planned = contiguous.plan(plan, meta, first, rows, 4, 2, 64, layout == "HND", window_left=-1, sm_scale=64**-0.5,
                              logits_soft_cap=20.0, q_data_type=torch.float16, kv_data_type=torch.float16)
    q = case.q[begin : int(meta.query_start_loc_cpu[rows])]
    out, lse = torch.empty_like(q), torch.empty(len(q), 4)
    pages = (k.transpose(1, 2), v.transpose(1, 2)) if layout == "HND" else (k, v)
    planned.run(q, pages, out=out, lse=lse, return_lse=True)
    torch.testing.assert_close(out, want[begin : begin + len(q)], atol=2e-3, rtol=2e-3)  # both round to float16
    assert lse.isfinite().all()


def test_what_lies_behind_a_sequence_is_zero() -> None:
    """A user beside whom another one has a NaN, or whose pages hold one past the end: kernels multiply by what is there."""
    case = make_case([1, 5, 7], [3, 131, 40], **SMALL, poison=float("nan"))
    run_case(torch_native.BACKEND, case)
    meta, caches = case.metadata, Caches(*case.cache.of_layer(0))
    starts = gather_kv.kv_starts(meta.query_start_loc, meta.seq_lens, multiple_of=128)
    assert starts.tolist() == [0, 128, 384, 512]
    both = gather_kv.gather_kv(caches, meta.block_table_tensor, starts, 512, torch.float16, padded=False,
                               seq_lens=meta.seq_lens)
    for copied, held in zip(both, (case.keys, case.values), strict=True):
        for begin, end, wanted in zip(starts.tolist(), starts.tolist()[1:], held, strict=False):
            assert torch.equal(copied[begin : begin + len(wanted)], wanted)
            assert not copied[begin + len(wanted) : end].any()


def test_copies_of_a_quantized_cache_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many prompts do not take more memory than the copies may, and one that would is refused before anything runs."""
    monkeypatch.setattr(contiguous.host, "MAX_GATHERED", 4 * 2 * 64 * 384)
    keys = np.array([20, 130, 0, 384])  # of 1, 2, 0 and 3 tiles
    assert contiguous.parts(keys, 2, 64, first=1) == [(1, 4), (4, 5)] and not contiguous.parts(keys[:0], 2, 64)
    with pytest.raises(ValueError, match="a sequence of 385 tokens in a quantized cache"):
        contiguous.parts(np.array([385]), 2, 64)
