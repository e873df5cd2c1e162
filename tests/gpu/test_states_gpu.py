"""On a GPU: cascades and halves by the kit (test_conformance_gpu.py has states and trees of drafts), long prefills of MLA
without a wait, and several decode steps in one CUDA graph."""

from __future__ import annotations

import math

import pytest
import torch

from quire import check_backend
from quire.attn_ops.attention import Latent
from quire.attn_ops.conformance.batches import compare, planned, prepared, run
from quire.attn_ops.conformance.checks import Kit
from quire.attn_ops.conformance.mla import MlaKit
from quire.attn_ops.registry import get_backend
from tests.attn_ops.draft_steps import copy_into, draft_batches, plan_steps, run_steps, values_of
from tests.gpu.helpers import captured, need

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


@pytest.mark.parametrize("name, latent", [
    ("triton", None), ("flashinfer", None), ("triton", Latent(512, 64)), ("flashinfer_mla", Latent(512, 64))],
    ids=["triton", "flashinfer", "triton-latent", "flashinfer_mla-latent"])
def test_several_decode_steps_in_one_graph(name: str, latent: Latent | None) -> None:
    """Their metadata is made, and they are planned, before the first of them, so that nothing comes between them. The graph is
    replayed with longer sequences, fewer of them, on other pages; then with the first ones again."""
    kit = Kit(get_backend(need(name)), CUDA, torch.bfloat16)
    options = {"num_pages": 160, "table_width": 100, "page_size": 4}
    if latent is not None:
        kit, options = MlaKit(kit), {**options, "latent": latent}
    backend, states = kit.backend, {}
    static, later = (draft_batches(kit, lens, 3, 4, seed=n, **options) for n, lens in enumerate(([20, 4, 35], [390, 70])))
    kept = values_of(static)
    steps = plan_steps(backend, static, states, graph_key="drafts", capturing=True)
    with torch.no_grad():
        graph, found = captured(lambda: run_steps(backend, static, steps))
    for batches, values in ((static, kept), (later, values_of(later)), (static, kept)):
        copy_into(static, batches, values)
        for out in found:
            out.fill_(math.nan)
        plan_steps(backend, batches, states, graph_key="drafts")
        graph.replay()
        for out, batch in zip(found, batches, strict=True):
            compare(out, batch)
