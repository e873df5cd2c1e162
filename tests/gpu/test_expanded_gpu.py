"""MLA's expanded keys by FlashInfer's kernels on a Hopper GPU, for DeepSeek's heads: a module that takes two minutes to compile
the first time on a machine."""

from __future__ import annotations

import dataclasses
import importlib.util
import math

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from quire.attn_ops import long_prefill
from quire.attn_ops.attention import AttentionSite, Latent
from quire.attn_ops.backends.flashinfer import BACKEND
from quire.attn_ops.conformance.batches import compare, run
from quire.attn_ops.conformance.mla import lay_out_mla
from quire.attn_ops.ops.varlen import varlen_attention_eager
from quire.attn_ops.registry import get_backend
from quire.attn_ops.tuning.prefill import PrefillRule, PrefillTime

CUDA = torch.device("cuda")
SITE = AttentionSite(0, 16, 16, 192, 128, torch.bfloat16, 192**-0.5, latent=Latent(512, 64))
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(
    importlib.util.find_spec("flashinfer") is None or not torch.cuda.is_available()
    or torch.cuda.get_device_capability()[0] != 9, reason="needs flashinfer and a Hopper GPU")]


@pytest.mark.parametrize("causal, query_lens, key_lens", [
    (True, [300], [300]), (True, [128, 256, 77], [128, 256, 77]), (True, [60, 2000], [60, 2000]), (False, [300], [1000]),
    (False, [5, 70, 9], [0, 130, 256])], ids=str)
def test_against_float32(causal, query_lens, key_lens) -> None:
    """With numbers behind each sequence that are none: they must not be read, or count for nothing."""
    generator = torch.Generator("cuda").manual_seed(0)
    made = {"dtype": torch.bfloat16, "device": CUDA, "generator": generator}
    q = torch.randn(sum(query_lens), 16, 192, **made)
    kv, k_rope = (torch.randn(sum(key_lens), n, **made) for n in (16 * 256, 64))
    starts = [torch.tensor([0, *lens], device=CUDA).cumsum(0).int() for lens in (query_lens, key_lens)]
    attend = BACKEND.prefill.expanded.make(CUDA).begin()(np.array(query_lens), np.array(key_lens), 16, 192, 128,
                                                         dtype=torch.bfloat16, scale=SITE.scale, causal=causal)
    out, lse = attend(q, kv, k_rope, *starts, scale=SITE.scale, causal=causal)
    parts = kv.float().unflatten(1, (16, 256))
    k = torch.cat([parts[..., :128], k_rope.float()[:, None].expand(-1, 16, -1)], dim=2)
    expected, total = varlen_attention_eager(q.float(), k, parts[..., 128:], *starts, scale=SITE.scale, causal=causal)
    # Weights and outputs are rounded to bfloat16, 2**-9 each.
    torch.testing.assert_close(out.float(), expected, rtol=2**-7, atol=2**-7)
    torch.testing.assert_close(lse, total.float(), rtol=1e-3, atol=1e-3)
    if len(key_lens) > 2 and causal:  # sequences of whole tiles beside each other: the second one's are NaN
        kv[128:384] = math.nan
        broken, _ = attend(q, kv, k_rope, *starts, scale=SITE.scale, causal=causal)
        assert broken[128:384].isnan().any()
        for rows in (slice(128), slice(384, None)):
            torch.testing.assert_close(broken[rows], out[rows], rtol=0, atol=0)


def test_prompts_of_a_step() -> None:
    always = PrefillRule(PrefillTime(0.0, 0.0, 0.0), PrefillTime(1e6, 0.0, 0.0))
    backend = long_prefill.make("expanded_on_the_gpu", BACKEND, get_backend("triton"), rule=lambda *args, **where: always)
    assert backend.warm_up([SITE], CUDA, 300.0) is None
    backend = dataclasses.replace(backend, op=backend.mla_op)
    for rows in (((1, 700), (400, 400), (700, 2000)), ((2048, 3000),), ((500, 500),) * 3):
        batch = lay_out_mla(SITE, [n for n, _ in rows], [n for _, n in rows], page_size=16, device=CUDA, pad=(2, 1))
        compare(run(backend, batch), batch)
