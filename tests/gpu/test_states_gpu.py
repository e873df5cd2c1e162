"""On a GPU: attention as a state, cascades, trees of drafts and long prefills of MLA, by the kit and without a wait."""

from __future__ import annotations

import pytest
import torch

from quire.attn_ops.attention import Latent
from quire.attn_ops.conformance.batches import planned, prepared, run
from quire.attn_ops.conformance.checks import Kit
from quire.attn_ops.conformance.mla import MlaKit
from quire.attn_ops.conformance.report import check_backend
from quire.attn_ops.registry import get_backend

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
CUDA = torch.device("cuda", 0)


@pytest.mark.parametrize("name, only", [
    *(("triton", only) for only in ("states", "trees", "shared prefix", "ahead", "MLA: long prefills")),
    ("cascade:triton@1", ""), ("two_batch:triton", ""), ("two_batch:flashinfer", "batch")])
def test_conformance(name: str, only: str) -> None:
    backend = get_backend(name)
    if why := backend.available(CUDA):
        pytest.skip(why)
    results = check_backend(backend, CUDA, torch.bfloat16, only=only)
    assert results and not [r for r in results if r.status == "FAIL"], [r for r in results if r.status == "FAIL"]


def test_long_prefills_do_not_wait_for_the_gpu() -> None:
    kit = MlaKit(Kit(get_backend("triton"), CUDA, torch.bfloat16))
    batch = kit.batch(((1, 20), (60, 60), (70, 130)), latent=Latent(512, 64))
    run(kit.backend, batch)  # compiles kernels, which may synchronize
    with planned(kit.backend, batch):
        given = prepared(kit.backend, batch)
        torch.cuda.set_sync_debug_mode("error")
        try:
            kit.backend.op(*batch.arguments(given), **batch.options)
        finally:
            torch.cuda.set_sync_debug_mode("default")
