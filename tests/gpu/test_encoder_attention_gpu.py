"""Vision towers of transformers on a GPU, at their real head dims: the numbers of their own attention, from every
implementation that takes them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import quire
from tests.gpu.helpers import need
from tests.passes.capture.test_encoder_attention import clip, images, qwen2, qwen3, ragged, siglip, whole_gemma3, whole_qwen3

#: Of two heads of 80, two of 72, four of 72 and four of 64.
TOWERS = {"qwen2_vl": (qwen2, 160, ragged), "qwen3_vl": (qwen3, 144, ragged), "siglip of gemma3": (siglip, 288, images),
          "clip of llava": (clip, 256, images)}


def tower_of(name: str) -> tuple[Any, Any]:
    build, width, run = TOWERS[name]
    torch.manual_seed(0)
    tower = build(width).eval().cuda()
    with torch.no_grad():
        for p in tower.parameters():  # so that attention counts: as they are initialized, all its weights are nearly equal
            if p.dim() == 2:
                p.normal_(0, 2 * p.shape[1] ** -0.5)
    return tower, run


@pytest.mark.parametrize("name", TOWERS)
def test_in_float32(name: str) -> None:
    tower, run = tower_of(name)
    with torch.no_grad():
        expected = run(tower)
        for implementation in ("auto", "kernel", "sdpa"):
            with quire.encoder_attention(tower, implementation):
                torch.testing.assert_close(run(tower), expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.parametrize("implementation", ["kernel", "sdpa", "flash_attention"])
@pytest.mark.parametrize("name", TOWERS)
def test_in_bfloat16(name: str, implementation: str) -> None:
    """As far from float32 as the tower's own attention in bfloat16, or up to twice as far."""
    if implementation == "flash_attention":
        need(implementation)
    exact, run = tower_of(name)
    tower = copy.deepcopy(exact).bfloat16()
    with torch.no_grad():
        expected, own = run(exact), run(tower)
        with quire.encoder_attention(tower, implementation):
            found = run(tower)
    assert (found - expected).abs().max() <= 2 * (own - expected).abs().max()
    assert (found - expected).abs().mean() <= 1.5 * (own - expected).abs().mean()


@pytest.mark.parametrize("build", [whole_qwen3, whole_gemma3], ids=["qwen3_vl", "gemma3"])
def test_whole_models_with_images(build: Any) -> None:
    torch.manual_seed(0)
    model, name, inputs = build()
    model.eval().cuda()
    inputs = {key: value.cuda() for key, value in inputs.items()}
    with torch.no_grad():
        expected = model(**inputs).logits
        with quire.encoder_attention(getattr(model.model, name)):
            torch.testing.assert_close(model(**inputs).logits, expected, rtol=1e-4, atol=1e-4)
