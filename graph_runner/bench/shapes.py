"""Dimensions of public models, and the quantizations of torchao, by the names that ``quire bench`` takes.

Data only: the command line lists the names without importing torch.
"""

from __future__ import annotations

from typing import Any


def _rope(theta: float, **scaling: Any) -> dict[str, Any]:
    return {"rope_theta": theta, "rope_type": "default", **scaling}


def _llama3(factor: float, **sizes: Any) -> tuple[str, dict[str, Any]]:
    rope = _rope(500000.0, rope_type="llama3", factor=factor, low_freq_factor=1.0, high_freq_factor=4.0,
                 original_max_position_embeddings=8192)
    shared = dict(vocab_size=128256, num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=131072,
                  rms_norm_eps=1e-5, bos_token_id=128000, eos_token_id=128001, rope_parameters=rope)
    return "LlamaConfig", shared | sizes


def _gemma3(**sizes: Any) -> tuple[str, dict[str, Any]]:
    rope = {"full_attention": _rope(1e6, rope_type="linear", factor=8.0), "sliding_attention": _rope(10000.0)}
    return "Gemma3TextConfig", dict(vocab_size=262208, head_dim=256, query_pre_attn_scalar=256, max_position_embeddings=131072,
                                    rms_norm_eps=1e-6, rope_parameters=rope, **sizes)


#: name -> (transformers config class, arguments from the published config.json).
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-8b": _llama3(  # Llama 3.1 8B, 8.03 B parameters
        8.0, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, head_dim=128, tie_word_embeddings=False),
    "llama-1b": _llama3(  # Llama 3.2 1B, 1.24 B parameters, tied embeddings
        32.0, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, head_dim=64, tie_word_embeddings=True),
    "llama2-7b": ("LlamaConfig", dict(  # 6.74 B parameters, as many KV heads as query heads
        vocab_size=32000, hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=32, head_dim=128, max_position_embeddings=4096, rms_norm_eps=1e-5,
        tie_word_embeddings=False, rope_parameters=_rope(10000.0))),
    "phi-3-mini": ("Phi3Config", dict(  # 4k context, 3.82 B parameters, head dim 96, as many KV heads as query heads
        vocab_size=32064, hidden_size=3072, intermediate_size=8192, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=32, max_position_embeddings=4096, original_max_position_embeddings=4096, rms_norm_eps=1e-5,
        tie_word_embeddings=False, sliding_window=2047, pad_token_id=32000, rope_parameters=_rope(10000.0))),
    "qwen2-7b": ("Qwen2Config", dict(  # 7.62 B parameters, seven query heads per KV head, biases
        vocab_size=152064, hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28,
        num_key_value_heads=4, max_position_embeddings=32768, rms_norm_eps=1e-6, tie_word_embeddings=False,
        rope_parameters=_rope(1e6))),
    "qwen3-0.6b": ("Qwen3Config", dict(  # 0.60 B parameters, tied embeddings
        vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=40960, rms_norm_eps=1e-6,
        tie_word_embeddings=True, max_window_layers=28, rope_parameters=_rope(1e6))),
    "qwen3-8b": ("Qwen3Config", dict(  # 8.19 B parameters
        vocab_size=151936, hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=40960, rms_norm_eps=1e-6,
        tie_word_embeddings=False, max_window_layers=36, rope_parameters=_rope(1e6))),
    "gemma2-9b": ("Gemma2Config", dict(  # 9.24 B parameters, tied embeddings, softcap; window 4096 on every other layer
        vocab_size=256000, hidden_size=3584, intermediate_size=14336, num_hidden_layers=42, num_attention_heads=16,
        num_key_value_heads=8, head_dim=256, query_pre_attn_scalar=256, sliding_window=4096,
        attn_logit_softcapping=50.0, final_logit_softcapping=30.0, max_position_embeddings=8192)),
    "gpt-oss-20b": ("GptOssConfig", dict(  # 20.9 B parameters, 32 experts, 4 per token; window 128, sinks
        vocab_size=201088, hidden_size=2880, intermediate_size=2880, num_hidden_layers=24, num_attention_heads=64,
        num_key_value_heads=8, head_dim=64, sliding_window=128, num_local_experts=32, num_experts_per_tok=4,
        max_position_embeddings=131072, tie_word_embeddings=False, eos_token_id=200002, pad_token_id=199999)),
    "qwen3-30b-a3b": ("Qwen3MoeConfig", dict(  # 30.5 B parameters, 128 experts, 8 per token
        vocab_size=151936, hidden_size=2048, intermediate_size=6144, num_hidden_layers=48, num_attention_heads=32,
        num_key_value_heads=4, head_dim=128, moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8,
        norm_topk_prob=True, max_position_embeddings=40960, rms_norm_eps=1e-6, tie_word_embeddings=False,
        rope_parameters=_rope(1e6))),
    "mistral-7b": ("MistralConfig", dict(  # v0.1, 7.24 B parameters; window 4096 on every layer
        vocab_size=32000, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, sliding_window=4096, max_position_embeddings=32768, rms_norm_eps=1e-5,
        tie_word_embeddings=False, rope_parameters=_rope(10000.0))),
    "deepseek-v2-lite": ("DeepseekV2Config", dict(  # 15.7 B parameters, latent attention, 64 experts, 6 per token
        vocab_size=102400, hidden_size=2048, intermediate_size=10944, num_hidden_layers=27, num_attention_heads=16,
        num_key_value_heads=16, q_lora_rank=None, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64,
        v_head_dim=128, moe_intermediate_size=1408, n_routed_experts=64, n_shared_experts=2, num_experts_per_tok=6,
        first_k_dense_replace=1, n_group=1, topk_group=1, topk_method="greedy", norm_topk_prob=False,
        routed_scaling_factor=1.0, max_position_embeddings=163840, rms_norm_eps=1e-6, tie_word_embeddings=False,
        rope_parameters=_rope(10000.0, rope_type="yarn", factor=40, beta_fast=32, beta_slow=1, mscale=0.707,
                              mscale_all_dim=0.707, original_max_position_embeddings=4096))),
    # Shapes that no kernel parameter was fitted on.
    "llama-3b": _llama3(  # Llama 3.2 3B, 3.21 B parameters, tied embeddings, three query heads per KV head
        32.0, hidden_size=3072, intermediate_size=8192, num_hidden_layers=28, head_dim=128, num_attention_heads=24,
        tie_word_embeddings=True),
    "qwen2.5-0.5b": ("Qwen2Config", dict(  # 0.49 B parameters, tied embeddings, seven query heads per KV head, biases
        vocab_size=151936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
        num_key_value_heads=2, max_position_embeddings=32768, rms_norm_eps=1e-6, tie_word_embeddings=True,
        rope_parameters=_rope(1e6))),
    "phi-4": ("Phi3Config", dict(  # 14.7 B parameters
        vocab_size=100352, hidden_size=5120, intermediate_size=17920, num_hidden_layers=40, num_attention_heads=40,
        num_key_value_heads=10, max_position_embeddings=16384, original_max_position_embeddings=16384, rms_norm_eps=1e-5,
        tie_word_embeddings=False, bos_token_id=100257, eos_token_id=100265, pad_token_id=100349,
        rope_parameters=_rope(250000.0))),
    "glm4-9b": ("Glm4Config", dict(  # 0414, 9.40 B parameters, 16 query heads per KV head, half of each head rotated
        vocab_size=151552, hidden_size=4096, intermediate_size=13696, num_hidden_layers=40, num_attention_heads=32,
        num_key_value_heads=2, head_dim=128, attention_bias=True, max_position_embeddings=32768, rms_norm_eps=1e-5,
        tie_word_embeddings=False, eos_token_id=151336, pad_token_id=151329,
        rope_parameters=_rope(10000.0, partial_rotary_factor=0.5))),
    "gemma3-1b": _gemma3(  # 1.00 B parameters, tied embeddings, one KV head; window 512 on five of six layers
        hidden_size=1152, intermediate_size=6912, num_hidden_layers=26, num_attention_heads=4, num_key_value_heads=1,
        sliding_window=512),
    "gemma3-4b": _gemma3(  # 3.88 B parameters, tied embeddings; window 1024 on five of six layers
        hidden_size=2560, intermediate_size=10240, num_hidden_layers=34, num_attention_heads=8, num_key_value_heads=4,
        sliding_window=1024),
    "starcoder2-7b": ("Starcoder2Config", dict(  # 7.17 B parameters, nine query heads per KV head, LayerNorm, biases
        vocab_size=49152, hidden_size=4608, intermediate_size=18432, num_hidden_layers=32, num_attention_heads=36,
        num_key_value_heads=4, hidden_act="gelu_pytorch_tanh", norm_epsilon=1e-5, use_bias=True, sliding_window=4096,
        max_position_embeddings=16384, bos_token_id=0, eos_token_id=0, rope_parameters=_rope(1e6))),
    "olmoe-7b": ("OlmoeConfig", dict(  # 6.92 B parameters, 64 experts, 8 per token; as many KV heads as query heads
        vocab_size=50304, hidden_size=2048, intermediate_size=1024, num_hidden_layers=16, num_attention_heads=16,
        num_key_value_heads=16, num_experts=64, num_experts_per_tok=8, norm_topk_prob=False, max_position_embeddings=4096,
        rms_norm_eps=1e-5, tie_word_embeddings=False, eos_token_id=50279, pad_token_id=1, rope_parameters=_rope(10000.0))),
    "granite-3b-moe": ("GraniteMoeConfig", dict(  # 3.1 3B a800m, 3.30 B parameters, 40 experts, 8 per token
        vocab_size=49155, hidden_size=1536, intermediate_size=512, num_hidden_layers=32, num_attention_heads=24,
        num_key_value_heads=8, num_local_experts=40, num_experts_per_tok=8, embedding_multiplier=12.0,
        attention_multiplier=0.015625, residual_multiplier=0.22, logits_scaling=6.0, max_position_embeddings=131072,
        rms_norm_eps=1e-6, tie_word_embeddings=True, bos_token_id=0, eos_token_id=0, rope_parameters=_rope(1e7))),
    "mixtral-8x7b": ("MixtralConfig", dict(  # 46.7 B parameters, 8 experts, 2 per token
        vocab_size=32000, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, num_local_experts=8, num_experts_per_tok=2, max_position_embeddings=32768, rms_norm_eps=1e-5,
        tie_word_embeddings=False, rope_parameters=_rope(1e6))),
}
NAMES = (*SHAPES, "tiny")
#: of ``quire bench matrix`` unless it is told others, in the order of its tables
MATRIX = ("llama-8b", "llama-1b", "qwen3-0.6b", "qwen3-8b", "gemma2-9b", "llama2-7b", "phi-3-mini", "qwen2-7b", "mistral-7b",
          "gpt-oss-20b", "qwen3-30b-a3b", "deepseek-v2-lite")

#: name -> (torchao config class, arguments): weights only (wo), or activations too, with one scale per token (dq).
QUANTIZATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "int8wo": ("Int8WeightOnlyConfig", {}),
    "fp8wo": ("Float8WeightOnlyConfig", {}),
    "int4wo": ("Int4WeightOnlyConfig", {"group_size": 128, "int4_packing_format": "tile_packed_to_4d"}),
    "int8dq": ("Int8DynamicActivationInt8WeightConfig", {}),
    "fp8dq": ("Float8DynamicActivationFloat8WeightConfig", {"granularity": "PerRow"}),
}
