"""Vision towers of transformers on quire's ragged attention: the numbers of their own attention, and what is refused."""

from __future__ import annotations

import pytest
import torch
import transformers
from transformers.masking_utils import bidirectional_mask_function
from transformers.models.gemma4.configuration_gemma4 import Gemma4AudioConfig
from transformers.models.gemma4.modeling_gemma4 import Gemma4AudioModel
from transformers.models.moonshine_streaming.configuration_moonshine_streaming import MoonshineStreamingEncoderConfig
from transformers.models.moonshine_streaming.modeling_moonshine_streaming import MoonshineStreamingEncoder
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

import quire
from quire.passes.capture import encoder_attention as module

SIZES = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, image_size=28, patch_size=7)
GRID = torch.tensor([[1, 4, 6], [1, 2, 2], [2, 4, 4]])  # images of 24, 4 and two times 16 patches


QWEN3 = dict(depth=2, hidden_size=32, intermediate_size=32, num_heads=2, patch_size=4, out_hidden_size=32,
             num_position_embeddings=64, deepstack_visual_indexes=[0])


def qwen2(width: int = 32) -> torch.nn.Module:
    return Qwen2VisionTransformerPretrainedModel(Qwen2VLVisionConfig(
        depth=2, embed_dim=width, hidden_size=32, num_heads=2, patch_size=4, mlp_ratio=2))


def qwen3(width: int = 32) -> torch.nn.Module:
    return Qwen3VLVisionModel(Qwen3VLVisionConfig(**{**QWEN3, "hidden_size": width}))


def ragged(tower: torch.nn.Module) -> torch.Tensor:
    torch.manual_seed(1)
    pixels = torch.randn(int(GRID.prod(1).sum()), 3 * 2 * 4 * 4)
    out = tower(pixels.to(next(tower.parameters())), GRID.to(next(tower.parameters()).device))
    return out.last_hidden_state if hasattr(out, "last_hidden_state") else out[0] if isinstance(out, tuple) else out


def siglip(width: int = 32) -> torch.nn.Module:
    return transformers.SiglipVisionModel(transformers.SiglipVisionConfig(**{**SIZES, "hidden_size": width}))


def clip(width: int = 32) -> torch.nn.Module:
    return transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**{**SIZES, "hidden_size": width}))


def images(tower: torch.nn.Module) -> torch.Tensor:
    torch.manual_seed(1)
    return tower(torch.randn(3, 3, 28, 28).to(next(tower.parameters()))).last_hidden_state


@pytest.mark.parametrize("build, run", [(qwen2, ragged), (qwen3, ragged), (siglip, images), (clip, images)],
                         ids=["qwen2_vl", "qwen3_vl", "siglip_of_gemma3", "clip_of_llava"])
def test_vision_towers(build, run, monkeypatch) -> None:
    torch.manual_seed(0)
    tower = build().eval()
    calls: list[int] = []
    original = module.varlen_attention

    def counted(q, k, v, cu_q, cu_k, **options):
        calls.append(len(cu_q) - 1)
        return original(q, k, v, cu_q, cu_k, **options)

    monkeypatch.setattr(module, "varlen_attention", counted)
    before = tower.config._attn_implementation
    with torch.no_grad():
        expected = run(tower)
        for implementation in ("eager", "sdpa"):
            with quire.encoder_attention(tower, implementation):
                torch.testing.assert_close(run(tower), expected, rtol=1e-4, atol=1e-5)
        assert calls == [4 if run is ragged else 3] * 4, "one call a layer, for all images"
        assert tower.config._attn_implementation == before
        torch.testing.assert_close(run(tower), expected, rtol=0, atol=0)


TEXT = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
            vocab_size=64, max_position_embeddings=128)
IMAGE = 60  # the token that stands for a piece of an image
ROPE = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}


def whole_qwen3() -> tuple[torch.nn.Module, str, dict[str, torch.Tensor]]:
    config = transformers.Qwen3VLConfig(
        text_config={**TEXT, "head_dim": 16, "rope_parameters": ROPE}, image_token_id=IMAGE, vision_start_token_id=61,
        vision_end_token_id=62, vision_config=QWEN3)
    # Two images of 24 and 4 patches; 2 x 2 patches are one token.
    return transformers.Qwen3VLForConditionalGeneration(config), "visual", {
        "pixel_values": torch.randn(28, 3 * 2 * 4 * 4), "image_grid_thw": GRID[:2],
        "input_ids": torch.tensor([[1, 61, *[IMAGE] * 6, 62, 2, 61, IMAGE, 62, 3]]),
        "mm_token_type_ids": torch.tensor([[0, 0, *[1] * 6, 0, 0, 0, 1, 0, 0]])}


def whole_gemma3() -> tuple[torch.nn.Module, str, dict[str, torch.Tensor]]:
    config = transformers.Gemma3Config(
        text_config={**TEXT, "head_dim": 16, "sliding_window": 64}, vision_config=SIZES, mm_tokens_per_image=4,
        image_token_index=IMAGE)
    ids = torch.tensor([[1, *[IMAGE] * 4, 2, *[IMAGE] * 4, 3]])
    model = transformers.Gemma3ForConditionalGeneration(config)
    torch.nn.init.normal_(model.model.multi_modal_projector.mm_input_projection_weight)  # it starts at zero
    return model, "vision_tower", {
        "pixel_values": torch.randn(2, 3, 28, 28), "input_ids": ids, "token_type_ids": (ids == IMAGE).long()}


@pytest.mark.parametrize("build", [whole_qwen3, whole_gemma3], ids=["qwen3_vl", "gemma3"])
def test_whole_models_with_images(build, monkeypatch) -> None:
    """The tower where it is in its model: only its attention is replaced, and the model's logits stay."""
    torch.manual_seed(0)
    model, name, inputs = build()
    model.eval()
    calls: list[bool] = []
    original = module.varlen_attention
    monkeypatch.setattr(module, "varlen_attention", lambda *args, **options: calls.append(True) or original(*args, **options))
    with torch.no_grad():
        expected = model(**inputs).logits
        assert not calls
        with quire.encoder_attention(getattr(model.model, name)):
            found = model(**inputs).logits
    assert len(calls) == 2, "one call for each layer of the tower, and none of the language model's"
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    other = model(**{**inputs, "pixel_values": inputs["pixel_values"] + 1}).logits
    assert not torch.allclose(other, expected, atol=1e-4), "the images do not count"


def test_what_is_refused() -> None:
    tower = siglip().eval()
    attention = next(m for name, m in tower.named_modules() if name.endswith("self_attn"))
    x = torch.randn(1, 4, 5, 8)
    with pytest.raises(RuntimeError, match="outside quire.encoder_attention"):
        module.attention_function(attention, x, x, x, None)
    with pytest.raises(ValueError, match="implementation must be one of auto, eager, sdpa, kernel, .*; got 'fast'"), \
            quire.encoder_attention(tower, "fast"):
        pass
    with pytest.raises(ValueError, match="Linear has no config of transformers"), \
            quire.encoder_attention(torch.nn.Linear(1, 1)):
        pass
    with quire.encoder_attention(tower):
        for options, what in ((dict(attention_mask=torch.ones(1)), "a mask"), (dict(dropout=0.1), "dropout"),
                              (dict(is_causal=True), "causal"), (dict(sliding_window=4), "sliding_window")):
            with pytest.raises(quire.UnsupportedAttention, match=what):
                module.attention_function(attention, x, x, x, **{"attention_mask": None, **options})
        with pytest.raises(quire.UnsupportedAttention, match="2 rows"):
            cu = torch.tensor([0, 5], dtype=torch.int32)
            module.attention_function(attention, *[x.repeat(2, 1, 1, 1)] * 3, None, cu_seq_lens_q=cu, cu_seq_lens_k=cu)
        with pytest.raises(quire.UnsupportedAttention, match="no padding mask"):
            module._no_mask(attention_mask=torch.tensor([[1, 0]]), mask_function=bidirectional_mask_function)


def moonshine() -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    """A window that only its mask has."""
    config = MoonshineStreamingEncoderConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
                                             intermediate_size=32, sliding_windows=((4, 1), (4, 0)))
    return MoonshineStreamingEncoder(config), (torch.randn(1, 80 * 30), torch.ones(1, 80 * 30, dtype=torch.int64))


def gemma4_audio() -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    """Its attention does not call the interface, and takes its window from the mask."""
    config = Gemma4AudioConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, output_proj_dims=16,
                               attention_context_left=5, attention_context_right=0, attention_chunk_size=4)
    return Gemma4AudioModel(config), (torch.randn(1, 60, 128), torch.ones(1, 60, dtype=torch.bool))


def bloom() -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    config = transformers.BloomConfig(vocab_size=60, hidden_size=32, n_layer=1, n_head=2)
    return transformers.BloomModel(config), (torch.arange(1, 20)[None],)


@pytest.mark.parametrize("build", [moonshine, gemma4_audio, bloom])
def test_masks_with_a_meaning(build) -> None:
    """A tower whose masks are left out gives other numbers, and nothing else shows it."""
    model, inputs = build()
    with quire.encoder_attention(model.eval()), torch.no_grad(), \
            pytest.raises(quire.UnsupportedAttention, match="another mask"):
        model(*inputs)


def test_layers_that_do_not_say_whether_they_are_causal() -> None:
    """Transformers' sdpa takes them for causal."""
    x = torch.randn(1, 4, 5, 8)
    with quire.encoder_attention(siglip().eval()), pytest.raises(quire.UnsupportedAttention, match="causal"):
        module.attention_function(torch.nn.Identity(), x, x, x, None)
