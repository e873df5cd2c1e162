"""Architectures of the zoo on a GPU, by every backend: the oracle of ``tests/zoo``, or a loud refusal.

In float32 with TF32 off the tolerance is the zoo's. In bfloat16 the yardstick is transformers itself: both run on the
same rounded weights, and quire may be twice as far from the float32 logits as transformers' own bfloat16 forward.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch

from quire.attn_ops.backend import UnsupportedAttention
from quire.passes.capture.paged_model import PagedModel
from quire.passes.options import QuireOptions
from tests.gpu.helpers import need
from tests.zoo.configs import SERVED, SIZES, Served, build, has_config, served
from tests.zoo.harness import TOLERANCE, Batch, error, reference, serve

EXACT = ("llama", "llama_mqa", "qwen3", "mistral", "gemma2", "gemma3", "gpt_oss", "deepseek_v3", "llama4", "falcon",
         "mixtral")
# Head dim 128 and these two sets of features: FlashInfer compiles kernels for each, and its own tests use these.
BFLOAT16 = {
    "llama": served("LlamaConfig", head_dim=128),
    "llama_mqa": served("LlamaConfig", head_dim=128, num_key_value_heads=1),
    "gemma2": Served("Gemma2Config", dict(SIZES, head_dim=128, sliding_window=8, attn_logit_softcapping=5.0,
                                          layer_types=["sliding_attention"] * 2)),
}
# What FlashInfer has no kernel for, and a word of the reason.
REFUSED_BY_FLASHINFER = {"llama4": "no chunk", "deepseek_v3": "no MLA on the latent cache"}


def entry_of(entries: dict[str, Served], name: str) -> Served:
    if not has_config(entries[name].config):
        pytest.skip(f"the installed transformers has no {entries[name].config}")
    return entries[name]


@pytest.fixture(scope="module", params=EXACT)
def exact(request: pytest.FixtureRequest) -> Iterator[tuple[PagedModel, Batch]]:
    entry = entry_of(SERVED, request.param)
    batch = reference(build(entry, attention="eager").cuda())
    paged = PagedModel(build(entry).cuda(), QuireOptions(compiler="eager"))
    yield paged, batch
    paged.close()


@pytest.mark.parametrize("page_size, pad", [(1, (0, 0)), (4, (3, 2)), (16, (0, 0))])
@pytest.mark.parametrize("backend", ["torch_native", "triton"])
def test_float32(exact: tuple[PagedModel, Batch], backend: str, page_size: int, pad: tuple[int, int]) -> None:
    need(backend)
    model, batch = exact
    got = serve(model, batch, page_size=page_size, attention=backend, pad=pad)
    assert error(got, batch) <= TOLERANCE


@pytest.mark.parametrize("backend", ["torch_native", "triton", "flashinfer"])
@pytest.mark.parametrize("name", BFLOAT16)
def test_bfloat16(name: str, backend: str) -> None:
    need(backend)
    # "eager": transformers 5.17 takes "sdpa" for Gemma 2 and drops its softcap.
    low = build(entry_of(BFLOAT16, name), attention="eager").cuda().bfloat16()
    truth = reference(copy.deepcopy(low).float())
    with torch.no_grad():
        plain = [low(input_ids=i[None], use_cache=False).logits[0] for i in truth.ids]
    allowed = 2 * error(plain, truth)
    assert allowed < 0.1, "a wrong mask must stand out from rounding"
    model = PagedModel(low, QuireOptions(compiler="eager"))
    try:
        assert error(serve(model, truth, page_size=16, attention=backend, pad=(3, 2)), truth) <= allowed
    finally:
        model.close()


@pytest.mark.parametrize("name", REFUSED_BY_FLASHINFER)
def test_flashinfer_refuses(name: str) -> None:
    need("flashinfer")
    entry = entry_of(SERVED, name)
    model = PagedModel(build(entry).cuda().bfloat16(), QuireOptions(compiler="eager"))
    batch = Batch(tuple(torch.zeros(n, dtype=torch.int64, device="cuda") for n in (11, 6, 21)), ())
    with pytest.raises(UnsupportedAttention, match=f"flashinfer: .*{REFUSED_BY_FLASHINFER[name]}"):
        serve(model, batch, page_size=16, attention="flashinfer")
    model.close()


def test_flashinfer_refuses_float32() -> None:
    need("flashinfer")
    model = PagedModel(build(SERVED["llama"]).cuda(), QuireOptions(compiler="eager"))
    with pytest.raises(UnsupportedAttention, match=r"dtype float32 \(has bfloat16, float16\)"):
        serve(model, reference(model.model), page_size=16, attention="flashinfer")
    model.close()
