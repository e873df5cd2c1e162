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
    return "LlamaConfig", dict(vocab_size=128256, num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=131072,
                               rms_norm_eps=1e-5, bos_token_id=128000, eos_token_id=128001, rope_parameters=rope, **sizes)


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
}
NAMES = (*SHAPES, "tiny")
#: of ``quire bench matrix``, in the order of its tables
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
