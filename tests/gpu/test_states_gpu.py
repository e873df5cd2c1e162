"""On a GPU: halves of FlashInfer's batches by the kit (test_conformance_gpu.py has cascades, other halves, states and trees of
drafts), long prefills of MLA without a wait, and several decode steps in one CUDA graph."""

from __future__ import annotations

import pytest
import torch

from quire import check_backend
from quire.attn_ops.attention import Latent
from quire.attn_ops.conformance.batches import planned, prepared, run
from quire.attn_ops.conformance.checks import Kit
from quire.attn_ops.conformance.mla import MlaKit
from quire.attn_ops.registry import get_backend
from tests.gpu.helpers import check_draft_graph, need

CUDA = torch.device("cuda", 0)


def test_halves_of_flashinfer() -> None:
    """Those of other backends are among the kit's (test_conformance_gpu.py)."""
    results = check_backend(get_backend(need("two_batch:flashinfer")), CUDA, torch.bfloat16, only="batch")
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


@pytest.mark.parametrize("name, latent", [
    ("triton", None), ("flashinfer", None), ("triton", Latent(512, 64)), ("flashinfer_mla", Latent(512, 64))],
    ids=["triton", "flashinfer", "triton-latent", "flashinfer_mla-latent"])
def test_several_decode_steps_in_one_graph(name: str, latent: Latent | None) -> None:
    """Their metadata is made, and they are planned, before the first of them, so that nothing comes between them."""
    kit = Kit(get_backend(need(name)), CUDA, torch.bfloat16)
    if latent is None:
        check_draft_graph(kit, [20, 4, 35], [390, 70])
    else:
        check_draft_graph(MlaKit(kit), [20, 4, 35], [390, 70], latent=latent)
