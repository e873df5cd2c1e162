"""MLA's expanded keys by FlashInfer's kernels, here stand-ins, in steps of a backend that serves MLA: else long prompts
would attend to wrong keys, or to what another request left behind its own."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from quire.attn_ops import long_prefill, mla_prefill
from quire.attn_ops.attention import AttentionSite, Latent
from quire.attn_ops.backend import AttentionBackend, ExpandedPart, PrefillPart
from quire.attn_ops.backends import hybrid, torch_native
from quire.attn_ops.backends.flashinfer import BACKEND, expanded
from quire.attn_ops.conformance.batches import check, compare, run
from quire.attn_ops.conformance.checks import Kit
from quire.attn_ops.conformance.mla import MlaKit
from quire.attn_ops.registry import get_backend, register_backend
from quire.attn_ops.selection import select_backend
from quire.attn_ops.tuning import attention as store
from quire.attn_ops.tuning import prefill
from quire.attn_ops.tuning.prefill import PrefillRule, PrefillTime
from tests.attn_ops.backends.flashinfer_stand_ins import Ragged, stand_in

ALWAYS = PrefillRule(PrefillTime(0.0, 0.0, 0.0), PrefillTime(1e6, 0.0, 0.0))
ROWS = ((1, 20), (0, 5), (60, 60), (70, 130))
LATENT = Latent(256, 32)
V3 = AttentionSite(layer=0, num_heads=128, num_kv_heads=128, head_dim=192, head_dim_v=128, dtype=torch.bfloat16,
                   scale=192**-0.5, latent=Latent(512, 64))


@pytest.fixture
def runs(monkeypatch) -> list[tuple[list[int], list[int], bool]]:
    """Of each run of a kernel the ends of its queries and keys, and whether it was causal."""
    seen: list[tuple[list[int], list[int], bool]] = []
    whole = Ragged.run

    def noted(self, *args, **options):
        seen.append((*(x.tolist() for x in self.starts), self.causal))
        return whole(self, *args, **options)

    stand_in(monkeypatch)
    monkeypatch.setattr(Ragged, "run", noted)
    return seen


def kernels(rule: PrefillRule | None) -> AttentionBackend:
    """FlashInfer's backend with this rule, for MLA of any dims on any device."""
    part = PrefillPart(lambda *args: None, lambda *args: None, expanded=ExpandedPart(
        lambda site, device: site.latent is not None, rule and rule.prefill, expanded.ExpandedKeys))
    return dataclasses.replace(BACKEND, prefill=part, available=lambda device: None)


FAST, SLOW = PrefillTime(1.0, 1.0, 0.0), PrefillTime(1.0, 2.0, 0.0)
PROMPTS = kernels(PrefillRule(FAST, SLOW))


def made(rule: PrefillRule | None = ALWAYS) -> tuple[AttentionBackend, MlaKit]:
    """PyTorch's backend with the kernels for long prompts, and the kit for its MLA."""
    rest = dataclasses.replace(torch_native.BACKEND, expanded_time=rule and rule.rest)
    backend = long_prefill.make("expanded_for_test", kernels(rule), rest, rule=prefill.rule)
    kit = MlaKit(Kit(backend, torch.device("cpu"), torch.float32))
    return kit.backend, kit


def test_prompts_with_and_without_prefixes(runs) -> None:
    """Sequences that end within a tile of keys run apart; one without a prefix sees no key in the part of the prefixes, and
    decodes are none of its business."""
    backend, kit = made()
    check(backend, kit.batch(ROWS, latent=LATENT, pad=(2, 1)))
    assert runs == [([0, 60], [0, 60], True), ([0, 70], [0, 70], True), ([0, 70], [0, 60], False)]


def test_whole_tiles_run_together_and_chunks_share_a_plan(runs, monkeypatch) -> None:
    monkeypatch.setattr(mla_prefill, "CHUNK_ELEMENTS", 128 * 4 * 88)
    backend, kit = made()
    check(backend, kit.batch(((128, 384), (128, 384), (40, 40)), latent=LATENT))
    assert runs[0] == ([0, 128, 256, 296], [0, 128, 256, 296], True)
    chunks = runs[1:]
    assert len(chunks) > 2 and all(causal is False for *_, causal in chunks)
    backend, kit = made()
    batch = kit.batch(((200, 712),), latent=LATENT)
    plans, plan = [], Ragged.plan
    monkeypatch.setattr(Ragged, "plan", lambda self, *args, **options: (plans.append(1), plan(self, *args, **options))[1])
    compare(run(backend, batch), batch)
    assert len(runs) - len(chunks) - 1 == 5 and len(plans) == 2, "its own keys, and four chunks of one length"


def test_a_broken_request_does_not_reach_its_neighbours(runs) -> None:
    backend, kit = made()
    batch = kit.batch(((60, 60), (70, 70), (90, 90)), latent=LATENT)
    batch.new_k[60:130] = math.nan
    out = run(backend, batch)
    assert out[60:130].isnan().all() and len(runs) == 3
    for rows in (slice(60), slice(130, None)):
        torch.testing.assert_close(out[rows].double(), batch.expected[rows], rtol=1e-4, atol=1e-4)


def test_many_short_prompts_stay_with_the_other_backend(runs) -> None:
    backend, kit = made()
    check(backend, kit.batch(((60, 60),) * 5, latent=LATENT))
    assert not runs


def test_a_part_whose_planning_fails_is_the_other_backends(runs, monkeypatch, caplog) -> None:
    plan = Ragged.plan

    def fails(self, qo_indptr, *args, causal, **options):
        if not causal:
            raise RuntimeError("no room in the workspace")
        plan(self, qo_indptr, *args, causal=causal, **options)

    monkeypatch.setattr(Ragged, "plan", fails)
    backend, kit = made()
    check(backend, kit.batch(ROWS, latent=LATENT))
    assert [causal for *_, causal in runs] == [True, True] and caplog.text.count("no room in the workspace") == 1


def test_a_step_that_gains_too_little_stays_with_the_other_backend(runs) -> None:
    for rule in (None, PrefillRule(ALWAYS.rest, ALWAYS.prefill)):
        backend, kit = made(rule)
        check(backend, kit.batch(ROWS, latent=LATENT))
    assert not runs


def test_quantized_caches_and_graphs(runs) -> None:
    """Keys are expanded as they read back from codes; a graph's step stays absorbed."""
    backend, kit = made()
    codes = MlaKit(Kit(kit.backend, kit.device, kit.dtype, torch.int8))
    check(backend, codes.batch(ROWS, latent=LATENT))
    assert len(runs) == 3
    batch = kit.batch(ROWS, latent=LATENT)
    compare(run(backend, batch, graph_key="a graph"), batch)
    assert len(runs) == 3


def test_auto_adds_them_to_the_prompts_of_mla(runs, monkeypatch, entries) -> None:
    site, device = dataclasses.replace(V3, dtype=torch.float32), torch.device("cpu")
    entries(hybrid=lambda: hybrid.FAMILY)
    rest = dataclasses.replace(torch_native.BACKEND, name="rest", priority={"cpu": 1}, expanded_time=SLOW)
    prompts = dataclasses.replace(PROMPTS, name="prompts", priority={"cpu": 2})
    for backend in (rest, prompts):
        register_backend(backend)
    rows = [store.measurement(rest, site, device=device, page_size=16, layout="NHD", decode_us={"1x1024": 8.0}, extend_us={},
                              date="2026-11-30")]
    monkeypatch.setattr(store, "sources", lambda device: [rows])
    chosen = select_backend("auto", [site], device=device, page_size=16)
    assert chosen.backend.name == "hybrid:prompts+rest@long" and "prompts for the long prompts of 1 layers" in chosen.why
    assert chosen.backend.mla_op is not None and not runs


def test_which_layers(runs) -> None:
    """DeepSeek's heads on a Hopper GPU, whatever the cache; their kernels are a module of their own, tried at the start."""
    cuda = torch.device("cuda")
    assert BACKEND.takes_prompts(V3, device=cuda, page_size=64, kv_dtype=torch.int8)
    others = [dataclasses.replace(V3, dtype=torch.float16), dataclasses.replace(V3, latent=Latent(512, 32)), V3.dense,
              dataclasses.replace(V3, head_dim_v=64)]
    assert not any(BACKEND.takes_prompts(site, device=cuda, page_size=64) for site in others)
    assert not BACKEND.takes_prompts(V3, device=torch.device("cpu"), page_size=64)
    rule = prefill.rule(BACKEND, get_backend("triton"), V3, device=cuda, page_size=64)
    assert rule is not None and rule.ever and prefill.rule(BACKEND, torch_native.BACKEND, V3, device=cuda, page_size=64) is None
    work = prefill.work(V3, np.array([8192]), np.array([8192]))
    assert rule.spared(work) > 1000 and rule.spared(prefill.work(V3, np.array([16]), np.array([16]))) < 10
    expanded.ExpandedKeys(torch.device("cpu")).try_short(V3)
    assert runs == [([0, 2], [0, 2], True)]
