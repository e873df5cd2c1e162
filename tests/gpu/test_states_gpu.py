"""On a GPU: cascades and halves by the kit (test_conformance_gpu.py has states and trees of drafts), and long prefills of MLA
without a wait."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from quire import CommonAttentionMetadata, check_backend, make_draft_metadata
from quire.attn_ops.attention import Latent
from quire.attn_ops.conformance.batches import compare, planned, prepared, run
from quire.attn_ops.conformance.checks import Kit
from quire.attn_ops.conformance.mla import MlaKit
from quire.attn_ops.registry import get_backend
from tests.gpu.helpers import captured

CUDA = torch.device("cuda", 0)


@pytest.mark.parametrize("name, only", [
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


def test_several_decode_steps_in_one_graph() -> None:
    """Their metadata is made before the first of them, so that nothing comes between them."""
    backend = get_backend("triton")
    whole = Kit(backend, CUDA, torch.bfloat16).batch([(3, 20), (3, 4), (3, 17)])
    table = whole.metadata.block_table_tensor.cpu()
    before = CommonAttentionMetadata.build([1, 1, 1], [17, 1, 14], table, page_size=whole.metadata.page_size, device=CUDA)
    batches = []
    for number, meta in enumerate(make_draft_metadata(before, 3)):
        own = torch.arange(number, 9, 3, device=CUDA)
        tensors = {name: getattr(whole, name)[own] for name in ("q", "new_k", "new_v", "expected", "bound")}
        batches.append(dataclasses.replace(whole, metadata=meta, **tensors))

    def steps() -> list[torch.Tensor]:
        return [backend.op(*batch.arguments(prepared(backend, batch)), **batch.options) for batch in batches]

    with torch.no_grad():
        graph, found = captured(steps)
        graph.replay()
    for out, batch in zip(found, batches, strict=True):
        compare(out, batch)
