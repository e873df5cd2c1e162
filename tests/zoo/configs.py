"""Tiny configs of decoder-only architectures in transformers: those that quire serves, and those that it must refuse.

All have hidden size 64, a vocabulary of 64, and windows and chunks of 8 tokens: shorter than the sequences of the
tests (6 to 21 tokens). A config class that the installed transformers does not have is skipped.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import transformers

SIZES = dict(vocab_size=64, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
             intermediate_size=96, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2)
GPT2 = dict(vocab_size=64, n_embd=64, n_layer=2, n_head=4, n_positions=64)
MHA = dict(SIZES, num_key_value_heads=4)
MLA = dict(MHA, q_lora_rank=32, kv_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16)
MOE = dict(num_experts_per_tok=2, moe_intermediate_size=32)
#: The decoder of an encoder-decoder model, by itself.
DECODER = dict(vocab_size=64, d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
               decoder_attention_heads=4, encoder_ffn_dim=96, decoder_ffn_dim=96, max_position_embeddings=64, is_decoder=True,
               is_encoder_decoder=False)
DEEPSEEK = dict(MLA, **MOE, n_routed_experts=4, n_group=2, topk_group=1, first_k_dense_replace=1)
DEEPSEEK_ONE_GROUP = dict(DEEPSEEK, n_group=1)
GLM_MOE = dict(SIZES, **MOE, head_dim=16, n_routed_experts=4, n_group=1, topk_group=1)
#: Image-text models, given text: their image tokens are beyond those of the prompts.
TEXT = dict(SIZES, vocab_size=72)
CLIP = dict(model_type="clip_vision_model", hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
            image_size=28, patch_size=14)
ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
SSM = dict(mamba_n_heads=8, mamba_d_head=16, mamba_d_state=16)


@dataclass(frozen=True)
class Served:
    """An architecture that must give the same logits as transformers.

    Args:
        config: name of the config class.
        options: arguments for it.
        features: what at least one attention site must need: names of AttentionSite fields and their values.
        route: how the attention must be found.
        slow: left to `make test-slow`, because another entry covers the same attention.
    """

    config: str
    options: dict[str, Any]
    features: dict[str, Any] = field(default_factory=dict)
    route: str = "interface"
    slow: bool = False


@dataclass(frozen=True)
class Refused:
    """An architecture that must be refused, with ``match`` in the message. ``slow``: left to `make test-slow`, because another
    entry, or a small model in tests/passes or tests/adversarial, is refused for the same reason."""

    config: str
    options: dict[str, Any]
    match: str
    slow: bool = False


def served(config: str, base: dict[str, Any] = SIZES, *, features: dict[str, Any] | None = None,
           route: str = "interface", slow: bool = False, **options: Any) -> Served:
    return Served(config, {**base, **options}, features or {}, route, slow)


WINDOW = {"window": 8}
SERVED: dict[str, Served] = {
    # Plain attention: heads, norms, biases and rotary embeddings differ.
    "llama": served("LlamaConfig"),
    "llama_mha": served("LlamaConfig", MHA, slow=True),
    "llama_mqa": served("LlamaConfig", num_key_value_heads=1, slow=True),
    "qwen2": served("Qwen2Config", slow=True),
    "qwen3": served("Qwen3Config", head_dim=16, slow=True),
    "gemma": served("GemmaConfig", head_dim=16, slow=True),
    "gpt2": served("GPT2Config", GPT2),
    "gpt2_per_layer_scale": served("GPT2Config", GPT2, scale_attn_by_inverse_layer_idx=True, features={"scale": 0.125},
                                   slow=True),
    "gpt_bigcode": served("GPTBigCodeConfig", GPT2, slow=True),
    "gpt_neox": served("GPTNeoXConfig", slow=True),
    # Attention that is written out; of gpt_neo with a window in every other layer.
    "gptj": served("GPTJConfig", dict(GPT2, rotary_dim=8), route="raised"),
    "gpt_neo": served("GPTNeoConfig", dict(vocab_size=64, hidden_size=64, num_layers=2, num_heads=4, window_size=8,
                                           attention_types=[[["global", "local"], 1]]), features=WINDOW, route="raised",
                      slow=True),
    "codegen": served("CodeGenConfig", dict(GPT2, rotary_dim=8), route="raised", slow=True),
    "gpt_neox_japanese": served("GPTNeoXJapaneseConfig", route="raised", slow=True),
    "olmo": served("OlmoConfig", slow=True),
    "olmo2": served("Olmo2Config", slow=True),
    "phi": served("PhiConfig", slow=True),
    "persimmon": served("PersimmonConfig", MHA, slow=True),
    "opt": served("OPTConfig", vocab_size=64, ffn_dim=96, word_embed_proj_dim=64, features={"scale": 1.0},
                  slow=True),
    "stablelm": served("StableLmConfig", route="raised", slow=True),
    "nemotron": served("NemotronConfig", slow=True),
    "biogpt": served("BioGptConfig", route="raised", slow=True),
    # Positions that the model counts itself: a learned table with an offset, sinusoids, a rotation by them.
    "bart_decoder": served("BartConfig", DECODER, route="raised", forced_eos_token_id=None),
    "marian_decoder": served("MarianConfig", DECODER, route="raised", pad_token_id=0, slow=True),
    "roformer_decoder": served("RoFormerConfig", MHA, route="raised", is_decoder=True, slow=True),
    "bert_decoder": served("BertConfig", is_decoder=True, slow=True),
    "cohere": served("CohereConfig", logit_scale=1.0, slow=True),
    "granite": served("GraniteConfig", attention_multiplier=0.5, features={"scale": 0.5}, slow=True),
    "glm": served("GlmConfig", head_dim=16, slow=True),
    "glm4": served("Glm4Config", head_dim=16, slow=True),
    "helium": served("HeliumConfig", head_dim=16, slow=True),
    "ernie4_5": served("Ernie4_5Config", head_dim=16, slow=True),
    "smollm3": served("SmolLM3Config", num_hidden_layers=4, slow=True),
    "hunyuan_v1_dense": served("HunYuanDenseV1Config", head_dim=16, slow=True),
    "arcee": served("ArceeConfig", slow=True),
    "apertus": served("ApertusConfig", slow=True),
    "seed_oss": served("SeedOssConfig", head_dim=16, slow=True),
    "bitnet": served("BitNetConfig", slow=True),
    "nanochat": served("NanoChatConfig", slow=True),
    "jais2": served("Jais2Config", head_dim=16, slow=True),
    "hyperclovax": served("HyperCLOVAXConfig", head_dim=16, slow=True),
    "internlm3": served("InternLM3Config", head_dim=16, slow=True),
    "iquestcoder": served("IQuestCoderConfig", head_dim=16, slow=True),
    # Raised from F.scaled_dot_product_attention.
    "falcon": served("FalconConfig", new_decoder_architecture=False, multi_query=True, alibi=False, parallel_attn=True,
                     bias=False, route="raised"),
    "falcon_new": served("FalconConfig", num_kv_heads=2, new_decoder_architecture=True, alibi=False, route="raised", slow=True),
    # Sliding windows, alone or beside full attention; softcap; sinks; chunks.
    "mistral": served("MistralConfig", sliding_window=8, features=WINDOW, slow=True),
    "ministral": served("MinistralConfig", head_dim=16, sliding_window=8, features=WINDOW, slow=True),
    "ministral3": served("Ministral3Config", head_dim=16, sliding_window=8, features=WINDOW, slow=True),
    "phi3": served("Phi3Config", sliding_window=8, features=WINDOW, slow=True),
    "starcoder2": served("Starcoder2Config", sliding_window=8, features=WINDOW, slow=True),
    "qwen2_window": served("Qwen2Config", use_sliding_window=True, sliding_window=8, max_window_layers=1,
                           features=WINDOW, slow=True),
    "gemma2": served("Gemma2Config", head_dim=16, sliding_window=8, attn_logit_softcapping=5.0,
                     features={**WINDOW, "softcap": 5.0}),
    "vaultgemma": served("VaultGemmaConfig", head_dim=16, sliding_window=8, attn_logit_softcapping=5.0,
                         features={**WINDOW, "softcap": 5.0}, slow=True),
    "gemma3": served("Gemma3TextConfig", head_dim=16, sliding_window=8, layer_types=ALTERNATING[:2], features=WINDOW,
                     slow=True),
    "gemma3n": served("Gemma3nTextConfig", num_hidden_layers=4, head_dim=16, sliding_window=8, layer_types=ALTERNATING,
                      num_kv_shared_layers=2, vocab_size_per_layer_input=64, hidden_size_per_layer_input=8,
                      activation_sparsity_pattern=None, laurel_rank=8, altup_num_inputs=2,
                      features={**WINDOW, "scale": 1.0}, slow=True),
    "gemma4": served("Gemma4TextConfig", num_hidden_layers=4, head_dim=16, global_head_dim=32, sliding_window=8,
                     layer_types=ALTERNATING, vocab_size_per_layer_input=64, hidden_size_per_layer_input=8,
                     num_global_key_value_heads=1, num_kv_shared_layers=2, features={**WINDOW, "scale": 1.0}),
    "olmo3": served("Olmo3Config", num_hidden_layers=4, sliding_window=8, features=WINDOW, slow=True),
    "cohere2": served("Cohere2Config", num_hidden_layers=4, sliding_window=8, logit_scale=1.0, features=WINDOW, slow=True),
    "exaone4": served("Exaone4Config", num_hidden_layers=4, sliding_window=8, sliding_window_pattern=4,
                      features=WINDOW, slow=True),
    "beam": served("BeamConfig", head_dim=16, sliding_window=8, features=WINDOW, slow=True),
    "kolibri1": served("Kolibri1Config", head_dim=16, sliding_window=8, features=WINDOW, slow=True),
    "cwm": served("CwmConfig", head_dim=16, sliding_window=8, features=WINDOW, slow=True),
    "modernbert_decoder": served("ModernBertDecoderConfig", local_attention=16, features=WINDOW, slow=True),
    "gpt_oss": served("GptOssConfig", head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=8,
                      features={**WINDOW, "sinks": True}),
    "granite_swa": served("GraniteSWAConfig", sliding_window=8, attention_multiplier=0.25,
                          features={**WINDOW, "sinks": True}, slow=True),
    "granitemoe_swa": served("GraniteMoeSWAConfig", sliding_window=8, attention_multiplier=0.25, num_local_experts=4,
                             num_experts_per_tok=2, features={**WINDOW, "sinks": True}, slow=True),
    "flint": served("FlintConfig", head_dim=16, features={"sinks": True}, slow=True),
    "mimo_v2_flash": served("MiMoV2FlashConfig", **MOE, head_dim=16, v_head_dim=8, n_routed_experts=4, n_group=1,
                            topk_group=1, sliding_window=8, features={**WINDOW, "sinks": True, "head_dim_v": 8}, slow=True),
    "llama4": served("Llama4TextConfig", num_hidden_layers=4, head_dim=16, attention_chunk_size=8, num_local_experts=2,
                     intermediate_size_mlp=96, features={"chunk": 8}),
    # Queries scaled by the position, with numbers that the model makes itself (passes/rewrite/own_positions.py).
    "llama4_temperature": served("Llama4TextConfig", num_hidden_layers=4, head_dim=16, attention_chunk_size=8,
                                 num_local_experts=2, intermediate_size_mlp=96, attn_temperature_tuning=True, floor_scale=4,
                                 attn_scale=0.5, features={"chunk": 8}, slow=True),
    # Mixtures of experts.
    "qwen2_moe": served("Qwen2MoeConfig", **MOE, num_experts=4, shared_expert_intermediate_size=32, slow=True),
    "qwen3_moe": served("Qwen3MoeConfig", **MOE, head_dim=16, num_experts=4, slow=True),
    "mixtral": served("MixtralConfig", num_local_experts=4, num_experts_per_tok=2, slow=True),
    "phimoe": served("PhimoeConfig", num_local_experts=4, num_experts_per_tok=2, sliding_window=None, slow=True),
    "granitemoe": served("GraniteMoeConfig", num_local_experts=4, num_experts_per_tok=2, features={"scale": 1.0}, slow=True),
    "granitemoeshared": served("GraniteMoeSharedConfig", num_local_experts=4, num_experts_per_tok=2, slow=True),
    "olmoe": served("OlmoeConfig", num_experts=4, num_experts_per_tok=2, slow=True),
    "flex_olmo": served("FlexOlmoConfig", num_experts=4, num_experts_per_tok=2, slow=True),
    "minimax_m2": served("MiniMaxM2Config", head_dim=16, num_local_experts=4, num_experts_per_tok=2, slow=True),
    "glm4_moe": served("Glm4MoeConfig", GLM_MOE, slow=True),
    "dots1": served("Dots1Config", GLM_MOE, first_k_dense_replace=1, n_shared_experts=1, slow=True),
    "ernie4_5_moe": served("Ernie4_5_MoeConfig", moe_num_experts=4, moe_k=2, moe_intermediate_size=32, slow=True),
    "hunyuan_v1_moe": served("HunYuanMoEV1Config", head_dim=16, num_experts=4, moe_topk=2, slow=True),
    "exaone_moe": served("ExaoneMoeConfig", **MOE, num_experts=4, n_group=1, topk_group=1, num_hidden_layers=4,
                         sliding_window=8, features=WINDOW, slow=True),
    "cohere2_moe": served("Cohere2MoeConfig", head_dim=16, num_experts=4, num_experts_per_tok=2, num_hidden_layers=4,
                          sliding_window=8, logit_scale=1.0, features=WINDOW, slow=True),
    "afmoe": served("AfmoeConfig", **MOE, head_dim=16, num_experts=4, num_hidden_layers=4, sliding_window=8,
                    features=WINDOW, slow=True),
    "mellum": served("MellumConfig", **MOE, head_dim=16, num_experts=4, slow=True),
    "solar_open": served("SolarOpenConfig", GLM_MOE, slow=True),
    "hy_v3": served("HYV3Config", **MOE, head_dim=16, num_experts=4, slow=True),
    "laguna": served("LagunaConfig", **MOE, head_dim=16, num_experts=4, slow=True),
    "minimax_m3": served("MiniMaxM3VLTextConfig", **MOE, head_dim=16, num_local_experts=4, slow=True),
    "aria_text": served("AriaTextConfig", moe_num_experts=4, moe_topk=2, slow=True),
    "jetmoe": served("JetMoeConfig", num_key_value_heads=2, kv_channels=16, num_local_experts=2, num_experts_per_tok=2,
                     slow=True),
    # Multi-head latent attention: keys and values of different dims.
    "deepseek_v2": served("DeepseekV2Config", DEEPSEEK, head_dim=8, features={"head_dim": 24, "head_dim_v": 16}, slow=True),
    "deepseek_v3": served("DeepseekV3Config", DEEPSEEK, features={"head_dim": 24, "head_dim_v": 16}),
    "minicpm3": served("MiniCPM3Config", MLA, features={"head_dim": 24, "head_dim_v": 16}, slow=True),
    "glm4_moe_lite": served("Glm4MoeLiteConfig", DEEPSEEK_ONE_GROUP, features={"head_dim_v": 16}, slow=True),
    "axk1": served("AXK1Config", DEEPSEEK_ONE_GROUP, head_dim=8, features={"head_dim": 24, "head_dim_v": 16}, slow=True),
    "youtu": served("YoutuConfig", MLA, features={"head_dim_v": 16}, slow=True),
    "mistral4": served("Mistral4Config", DEEPSEEK, features={"head_dim_v": 16}, slow=True),
    # Two layers of attention and one mixture, with experts that return their token, per layer.
    "longcat_flash": served("LongcatFlashConfig", MLA, head_dim=8, num_layers=1, num_hidden_layers=2, ffn_hidden_size=96,
                            n_routed_experts=4, zero_expert_num=2, moe_topk=2, expert_ffn_hidden_size=32,
                            features={"head_dim_v": 16}, slow=True),
    # Image-text models, on text.
    "llava": served("LlavaConfig", {}, text_config=dict(TEXT, model_type="llama"), vision_config=CLIP, image_token_index=70,
                    slow=True),
    "qwen2_5_vl": served("Qwen2_5_VLConfig", {}, image_token_id=70, video_token_id=71, vision_start_token_id=68,
                         vision_end_token_id=69, text_config=dict(TEXT, rope_parameters={
                             "rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}),
                         vision_config=dict(depth=1, hidden_size=32, num_heads=2, intermediate_size=32, out_hidden_size=64),
                         slow=True),
    "kimi_k25": served("Kimi_K25Config", {}, text_config=dict(DEEPSEEK, vocab_size=72, model_type="deepseek_v3"),
                       image_token_id=70, vision_config=dict(
                           hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, patch_size=14),
                       features={"head_dim": 24, "head_dim_v": 16}, slow=True),
    "gemma3_image": served("Gemma3Config", {}, text_config=dict(TEXT, head_dim=16, layer_types=ALTERNATING, sliding_window=8,
                                                                num_hidden_layers=4),
                           vision_config=dict(CLIP, model_type="siglip_vision_model"), image_token_index=70, boi_token_index=68,
                           eoi_token_index=69, mm_tokens_per_image=4, features=WINDOW, slow=True),
}

STATE = "layers of type .*they keep state that is not keys and values"
SPARSE = "each token chooses by their content the keys that it attends to"
UNSEEN = "0 attention sites were found"
REFUSED: dict[str, Refused] = {
    # Recurrent state would leak from one sequence of a packed batch into the next.
    "mamba": Refused("MambaConfig", SIZES, STATE),
    "mamba2": Refused("Mamba2Config", dict(SIZES, num_heads=8, head_dim=16, state_size=16, n_groups=1), STATE),
    "bamba": Refused("BambaConfig", dict(SIZES, attn_layer_indices=[1], **SSM), STATE),
    "jamba": Refused("JambaConfig", dict(SIZES, num_hidden_layers=4, attn_layer_period=2, attn_layer_offset=1,
                                         num_experts=2, mamba_d_state=16), STATE),
    "falcon_h1": Refused("FalconH1Config", dict(SIZES, mamba_d_ssm=128, **SSM), STATE),
    "granitemoehybrid": Refused("GraniteMoeHybridConfig", dict(SIZES, layer_types=["mamba", "attention"]), STATE),
    "lfm2": Refused("Lfm2Config", dict(SIZES, full_attn_idxs=[1]), STATE),
    "minimax": Refused("MiniMaxConfig", dict(SIZES, num_local_experts=2), STATE),
    "qwen3_next": Refused("Qwen3NextConfig", dict(SIZES, num_hidden_layers=4, num_experts=4), STATE),
    "recurrent_gemma": Refused("RecurrentGemmaConfig", SIZES, STATE),
    "zamba2": Refused("Zamba2Config", dict(SIZES, layers_block_type=["mamba", "hybrid"], n_mamba_heads=8,
                                           mamba_d_state=16), STATE),
    "qwen3_5": Refused("Qwen3_5TextConfig", dict(SIZES, num_hidden_layers=4, head_dim=16), STATE),
    "minimax_m3_sparse": Refused("MiniMaxM3VLTextConfig", dict(
        SIZES, **MOE, head_dim=16, num_local_experts=4, layer_types=["full_attention", "minimax_m3_sparse"], index_n_heads=2,
        index_head_dim=16, index_block_size=4), "minimax_m3_sparse"),
    "deepseek_v4": Refused("DeepseekV4Config", SIZES, SPARSE),
    # Attention that is written out, in other ways than what is taken up.
    "bloom": Refused("BloomConfig", dict(vocab_size=64, hidden_size=64, n_layer=2, n_head=4),
                     "its mask is not proven to be one of positions: .*ALiBi"),
    "mpt": Refused("MptConfig", dict(vocab_size=64, d_model=64, n_heads=4, n_layers=2),
                   "its mask is not proven to be one of positions", slow=True),
    "openai_gpt": Refused("OpenAIGPTConfig", dict(vocab_size=64, n_embd=64, n_layer=2, n_head=4), UNSEEN, slow=True),
    # Scores with a bias, sparse attention, two calls a layer, no causal mask.
    "falcon_alibi": Refused("FalconConfig", dict(SIZES, alibi=True), "its mask is not proven to be one of positions: .*ALiBi"),
    "doge": Refused("DogeConfig", SIZES, "was given an attention_mask", slow=True),
    "deepseek_v32": Refused("DeepseekV32Config", dict(DEEPSEEK, index_n_heads=2, index_head_dim=16, index_topk=8),
                            SPARSE),
    "diffllama": Refused("DiffLlamaConfig", SIZES, "attend more than once", slow=True),
    "bert": Refused("BertConfig", SIZES, "no non-causal attention", slow=True),
    "t5": Refused("T5Config", dict(vocab_size=64, d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4),
                  "encoder-decoder"),
    # Positions that begin at padding_idx + 1 where none are given.
    "roberta": Refused("RobertaConfig", dict(SIZES, is_decoder=True), "looked up in a table with an entry for padding",
                       slow=True),
    "camembert": Refused("CamembertConfig", dict(SIZES, is_decoder=True), "looked up in a table with an entry for padding",
                         slow=True),
    "llama_dynamic_rope": Refused("LlamaConfig", dict(
        SIZES, rope_parameters=dict(rope_type="dynamic", rope_theta=10000.0, factor=2.0)), "rope_type 'dynamic'"),
}


def has_config(name: str) -> bool:
    """Does the installed transformers have this config class?"""
    return hasattr(transformers, name)


def build(entry: Served | Refused, *, std: float = 0.2, seed: int = 0, attention: str | None = None) -> torch.nn.Module:
    """The model with random weights, in eval mode. ``attention``: transformers' implementation, None for its default.

    Matrices are N(0, std). At hidden size 64, std 0.2 multiplies a vector's length by 1.6 a layer, so that attention is
    far from uniform (a wrong mask changes the logits by far more than the tests' tolerance) and logits are 1 to 10.
    Biases and sink logits start at zero in many models, where they would hide an error: they are N(0, 0.5) and N(0, 1).
    """
    config = getattr(transformers, entry.config)(**entry.options)
    torch.manual_seed(seed)
    kind = transformers.AutoModelForSeq2SeqLM if config.is_encoder_decoder else transformers.AutoModelForCausalLM
    if hasattr(config, "vision_config"):
        kind = transformers.AutoModelForImageTextToText
    known = type(config) in kind._model_mapping  # else a text model that only image-text models have a name for
    own = kind.from_config if known else getattr(transformers, f"{entry.config.removesuffix('Config')}ForCausalLM")._from_config
    model = own(config, attn_implementation=attention).eval()
    random_weights(model, std)
    return model


def random_weights(model: torch.nn.Module, std: float) -> None:
    """See ``build``; buffers stay."""
    for name, parameter in model.named_parameters():
        if "sink" in name:
            parameter.data.normal_(0, 1)
        elif parameter.dim() > 1:
            parameter.data.normal_(0, std)
        elif name.endswith("bias"):
            parameter.data.normal_(0, 0.5)
