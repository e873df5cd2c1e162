"""Any transformers config, made small by the names of its attributes, so that each class of a registry can be built and run."""

from __future__ import annotations

import copy
from typing import Any

import transformers

HIDDEN, HEADS, HEAD_DIM, VOCAB, WINDOW = 64, 4, 16, 96, 8
PROMPT_IDS = range(3, 64)  # of random prompts; special tokens are above


def _names(text: str, value: int) -> dict[str, int]:
    return dict.fromkeys(text.split(), value)


#: The largest value of an attribute: what is smaller stays.
_SIZES = {
    **_names("hidden_size d_model n_embd word_embed_proj_dim embed_dim embedding_size emb_dim dim projection_dim "
             "out_hidden_size projector_hidden_size attention_hidden_size text_hidden_size encoder_hidden_size "
             "hidden_size_global lru_width vision_hidden_size output_dim decoder_hidden_size image_text_hidden_size "
             "moe_hidden_size embedding_dim input_embedding_size output_embedding_size cross_hidden_size vision_output_dim "
             "projector_input_dim projector_output_dim backbone_hidden_size patch_embed_hidden_size projection_hidden_size "
             "merged_hidden_size image_token_embed_dim multimodal_hidden_size query_pre_attn_scalar ple_embed_dim "
             "dim_model_base", HIDDEN),
    **_names("num_attention_heads n_head num_heads encoder_attention_heads decoder_attention_heads attention_heads n_heads "
             "num_encoder_attention_heads num_decoder_attention_heads swa_num_attention_heads num_sliding_attention_heads "
             "linear_num_heads router_num_heads", HEADS),
    **_names("head_dim global_head_dim swa_head_dim linear_key_head_dim linear_value_head_dim linear_head_dim index_head_dim "
             "d_kv kv_channels dim_head d_head attention_head_size mamba_d_head mamba_head_dim attention_head_dim v_head_dim "
             "qk_nope_head_dim kv_lora_rank resampler_head_dim swa_v_head_dim", HEAD_DIM),
    **_names("intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim d_ff mlp_dim dim_ff dff feed_forward_size "
             "ffn_hidden_size dense_intermediate_size intermediate_size_mlp", 96),
    **_names("moe_intermediate_size shared_expert_intermediate_size shared_experts_intermediate_size expert_ffn_hidden_size "
             "shared_intermediate_size moe_shared_expert_intermediate_size share_expert_dim", 32),
    **_names("linear_num_key_heads linear_num_value_heads swa_num_key_value_heads index_n_heads num_kv_heads", 2),
    **_names("n_routed_experts num_experts num_local_experts moe_num_experts", 4),
    **_names("q_lora_rank o_lora_rank hc_lowrank", 32),
    **_names("qk_rope_head_dim rotary_dim hidden_size_per_layer_input laurel_rank ssm_state_size state_size mamba_d_state "
             "time_step_rank mamba_dt_rank router_hidden_size adapter_rank", 8),
    **_names("num_experts_per_tok moe_topk moe_k zero_expert_num max_window_layers index_topk_blocks", 2),
    **_names("vocab_size vocab_size_per_layer_input decoder_vocab_size ngram_vocab_size_base vocab_offset "
             "encoder_hash_byte_group_vocab pronunciation_vocab_size shape_vocab_size unpadded_vocab_size", VOCAB),
    **_names("max_position_embeddings n_positions n_ctx max_seq_len max_target_positions max_source_positions model_max_length "
             "original_max_position_embeddings rel_extent context_length", 64),
    **_names("sliding_window sliding_window_size attention_chunk_size window_size attention_window_size "
             "local_attn_chunk_length lsh_attn_chunk_length index_topk mamba_chunk_size chunk_size floor_scale "
             "keep_window_size local_attention_window_len index_block_size", WINDOW),
    **_names("num_hidden_layers n_layer num_layers n_layers encoder_layers decoder_layers layers depth num_decoder_layers "
             "num_encoder_layers num_blocks num_layers_per_stack", 2),
    **_names("local_attention", 2 * WINDOW),
    **_names("image_size crop_size resolution", 56),
    **_names("num_position_embeddings", 16),
    **_names("first_k_dense_replace moe_layer_start_index num_kv_shared_layers", 1),
    **_names("n_group topk_group", 1),
}
_TYPES = ("layer_types", "layers_block_type", "attention_layers", "attn_layers")
#: Lists with an entry for each layer, cut with the layers.
_PER_LAYER = ("mlp_layer_types", "no_rope_layers", "indexer_types", "layer_rope_theta", "activation_sparsity_pattern",
              "intermediate_size", "num_attention_heads_per_layer", "kv_source_layers", "rope_scaling_layers", *_TYPES)
#: What the rules do not give, by config class.
_MOE = dict(n_routed_experts=4, n_group=1, topk_group=1, num_experts_per_tok=2, moe_intermediate_size=32,
            first_k_dense_replace=1, n_shared_experts=1)
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_SPECIAL: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("BambaConfig", "GraniteMoeHybridConfig"), dict(mamba_n_heads=8, mamba_d_head=16)),
    "Mamba2Config": dict(num_heads=8, head_dim=16, n_groups=1),
    **dict.fromkeys(("HunYuanDenseV1Config", "HunYuanMoEV1Config", "MinistralConfig"), dict(head_dim=16)),
    "HunYuanVLTextConfig": dict(head_dim=16, rope_parameters={**_ROPE, "mrope_section": [2, 2, 2, 2]}),
    "NemotronConfig": dict(head_dim=16, num_key_value_heads=2),
    "Dots3NoteVisionConfig": dict(pyramid_num_routed=[-1, 4], adapter_in_dim=HIDDEN, adapter_out_dim=HIDDEN),
    "Dots3NoteAudioConfig": dict(adapter_input_size=HIDDEN, adapter_out_dim=HIDDEN),
    "ZambaConfig": dict(num_hidden_layers=4, layers_block_type=["mamba", "hybrid", "mamba", "hybrid"]),
    "CohereCompassTextConfig": dict(rope_parameters={"full_attention": {**_ROPE, "mrope_section": [4, 2, 2]},
                                                     "sliding_attention": {**_ROPE, "mrope_section": [4, 2, 2]}}),
    "DbrxConfig": dict(attn_config=dict(kv_n_heads=2, rope_theta=10000.0, clip_qkv=8.0),
                       ffn_config=dict(ffn_hidden_size=96, moe_num_experts=4, moe_top_k=2)),
    "Dots1Config": _MOE,
    "DeepseekV2Config": _MOE,
    "KimiLinearConfig": dict(num_experts_per_token=2),
    "BailingHybridConfig": dict(n_group=1, topk_group=1, num_experts_per_tok=2),
    "Gemma3nTextConfig": dict(
        num_hidden_layers=4, num_kv_shared_layers=2, activation_sparsity_pattern=None, altup_num_inputs=2, intermediate_size=96,
        layer_types=["sliding_attention", "full_attention", "sliding_attention", "full_attention"]),
    "Lfm2MoeConfig": dict(layer_types=["conv", "full_attention"], num_hidden_layers=2),
    "ReformerConfig": dict(axial_pos_embds_dim=(16, 48), axial_pos_shape=(8, 8)),
    "Mistral4Config": dict(qk_nope_head_dim=24, head_dim=32),
    **dict.fromkeys(("Glm4vTextConfig", "GlmOcrTextConfig", "PaddleOCRTextConfig", "Qwen2_5OmniTextConfig",
                     "Qwen2_5_VLTextConfig", "Qwen2VLTextConfig"), dict(rope_parameters={**_ROPE, "mrope_section": [4, 2, 2]})),
    "Glm4vMoeTextConfig": dict(rope_parameters={**_ROPE, "mrope_section": [2, 1, 1]}),
    "Step3p7TextConfig": dict(sliding_window=WINDOW),
    "MuseSparkAudioConfig": dict(num_hidden_layers=4),
    "NemotronH_Omni_Reasoning_V3_Config": dict(vision_config=dict(model_type="radio", video_temporal_patch_size=2)),
    **dict.fromkeys(("ChameleonConfig", "Emu3Config"), dict(vocabulary_map={"<image>": VOCAB - 1})),
    "DeepseekOcr2TextConfig": dict(num_experts_per_tok=2, n_group=1, topk_group=1, mlp_layer_types=["dense", "sparse"]),
    "DiffusionGemmaTextConfig": dict(num_experts=4, top_k_experts=2, moe_intermediate_size=32),
    "Glm5NextTextConfig": dict(index_topk=16),
    "Granite4VisionConfig": dict(deepstack_layer_map=[], downsample_rate="4/8"),
    "Molmo2AdapterConfig": dict(vision_feature_layer=[1, 0]),
    "Ernie4_5_VLMoeTextConfig": dict(rope_parameters={**_ROPE, "mrope_section": [3, 3, 2]}, moe_intermediate_size=[32, 16]),
    "Qwen4ExpTextConfig": dict(indexer_n_heads=2, indexer_kv_heads=1, indexer_head_dim=16, indexer_budget=8,
                               indexer_compress_ratio=2),
}


#: What a class cannot be made without, though it has defaults.
_REQUIRED: dict[str, dict[str, Any]] = {
    "Gemma4AssistantConfig": dict(text_config=dict(model_type="gemma4_text", hidden_size_per_layer_input=0,
                                                   vocab_size_per_layer_input=0, num_kv_shared_layers=0)),
    "Gemma4UnifiedAssistantConfig": dict(text_config=dict(num_kv_shared_layers=0)),
}


def shrunk(kind: type, **changes: Any) -> Any:
    """A small config of class ``kind``: hidden size 64, a layer of each type that the class has by default (two at least)."""
    required = copy.deepcopy(_REQUIRED.get(kind.__name__, {}))
    default = kind(**required)
    if getattr(default, "is_encoder_decoder", False) is False and hasattr(default, "is_decoder"):
        changes["is_decoder"] = True  # as a causal LM, and not as the encoder that the class is by default
    given = _shrink(default)
    for name, inner in required.items():
        given[name] |= inner
    return kind(**given, **changes)


def _shrink(default: Any) -> dict[str, Any]:
    """What to give to the class of ``default``, as values by name."""
    given: dict[str, Any] = {}
    layers = _layers(default)
    special = iter(range(VOCAB - 1, PROMPT_IDS.stop, -1))
    for name, value in vars(default).items():
        if isinstance(value, transformers.PretrainedConfig):
            inner = _shrink(value)
            given[name] = {**inner, "model_type": value.model_type}
        elif name == "rope_parameters" and isinstance(value, dict) and "mrope_section" in str(value):
            given[name] = _with_sections(value)
        elif name == "num_key_value_heads" and type(value) is int:
            heads = vars(default).get("num_attention_heads", 0)  # of Dots 3 layers differ, and their config has no attribute
            given[name] = 1 if value == 1 else HEADS if value == heads else 2
        elif name in _PER_LAYER and isinstance(value, (list, tuple)) and layers and len(value) > max(layers):
            given[name] = [value[i] if name != "intermediate_size" else 96 for i in layers]
        elif name in ("num_hidden_layers", "n_layer", "num_layers") and layers:
            given[name] = len(layers)
        elif name.endswith(("_token_id", "_token_index", "_patch_id")) and type(value) is int and value >= PROMPT_IDS.start:
            given[name] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}.get(name) or (
                0 if name == "pad_token_id" else next(special))
        elif name == "eos_token_id" and isinstance(value, (list, tuple)):
            given[name] = 2
        elif name == "head_dim" and type(value) is int and hasattr(default, "qk_rope_head_dim"):
            given[name] = _SIZES["qk_rope_head_dim"]  # that of the rotation
        elif name in _SIZES and type(value) is int and value > _SIZES[name]:
            given[name] = _SIZES[name]
    return given | copy.deepcopy(_SPECIAL.get(type(default).__name__, {}))


def _layers(default: Any) -> list[int]:
    """Of the layers of a config, the first of each type, in order; [] if all are of one type."""
    found: list[int] = []
    for name in _TYPES:
        types = getattr(default, name, None)
        if isinstance(types, (list, tuple)) and len(types) > 2:
            found = [list(types).index(t) for t in dict.fromkeys(types)]
            break
    else:
        return []
    return sorted({*found, *([found[-1] + 1 if found[-1] + 1 < len(types) else 0] if len(found) == 1 else [])})


def _with_sections(rope: dict[str, Any]) -> dict[str, Any]:
    """The frequencies of a head of 16 dims, shared out over time, height and width."""
    return {k: _with_sections(v) if isinstance(v, dict) else [4, 2, 2] if k == "mrope_section" else v for k, v in rope.items()}
