"""Models to measure: the dimensions of public models, with random weights made on the device.

No weights are downloaded and none are needed: the time of a step does not depend on their values, apart from which
experts a mixture-of-experts router picks (random weights spread the tokens almost evenly over the experts).
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from quire.graph_runner.loading import TINY_MODEL


def _rope(theta: float, **scaling: Any) -> dict[str, Any]:
    return {"rope_theta": theta, "rope_type": "default", **scaling}


#: name -> (transformers config class, its arguments): the published config.json of each model.
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-8b": ("LlamaConfig", dict(  # Llama 3.1 8B, 8.03 B parameters
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=131072, rms_norm_eps=1e-5,
        tie_word_embeddings=False, bos_token_id=128000, eos_token_id=128001,
        rope_parameters=_rope(500000.0, rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                              original_max_position_embeddings=8192))),
    "llama-1b": ("LlamaConfig", dict(  # Llama 3.2 1B, 1.24 B parameters, tied embeddings
        vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
        num_key_value_heads=8, head_dim=64, max_position_embeddings=131072, rms_norm_eps=1e-5,
        tie_word_embeddings=True, bos_token_id=128000, eos_token_id=128001,
        rope_parameters=_rope(500000.0, rope_type="llama3", factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0,
                              original_max_position_embeddings=8192))),
    "llama2-7b": ("LlamaConfig", dict(  # 6.74 B parameters, a key head for each query head
        vocab_size=32000, hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=32, head_dim=128, max_position_embeddings=4096, rms_norm_eps=1e-5,
        tie_word_embeddings=False, rope_parameters=_rope(10000.0))),
    "phi-3-mini": ("Phi3Config", dict(  # 4k, 3.82 B parameters, a key head of 96 for each query head
        vocab_size=32064, hidden_size=3072, intermediate_size=8192, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=32, max_position_embeddings=4096, original_max_position_embeddings=4096, rms_norm_eps=1e-5,
        tie_word_embeddings=False, sliding_window=2047, pad_token_id=32000, rope_parameters=_rope(10000.0))),
    "qwen2-7b": ("Qwen2Config", dict(  # 7.62 B parameters, seven query heads a key head, biases
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
    "gemma2-9b": ("Gemma2Config", dict(  # 9.24 B parameters, tied embeddings; window 4096 on every other layer, softcap
        vocab_size=256000, hidden_size=3584, intermediate_size=14336, num_hidden_layers=42, num_attention_heads=16,
        num_key_value_heads=8, head_dim=256, query_pre_attn_scalar=256, sliding_window=4096,
        attn_logit_softcapping=50.0, final_logit_softcapping=30.0, max_position_embeddings=8192)),
    "gpt-oss-20b": ("GptOssConfig", dict(  # 20.9 B parameters, 32 experts, 4 a token; window 128, sinks
        vocab_size=201088, hidden_size=2880, intermediate_size=2880, num_hidden_layers=24, num_attention_heads=64,
        num_key_value_heads=8, head_dim=64, sliding_window=128, num_local_experts=32, num_experts_per_tok=4,
        max_position_embeddings=131072, tie_word_embeddings=False, eos_token_id=200002, pad_token_id=199999)),
    "qwen3-30b-a3b": ("Qwen3MoeConfig", dict(  # 30.5 B parameters, 128 experts, 8 a token
        vocab_size=151936, hidden_size=2048, intermediate_size=6144, num_hidden_layers=48, num_attention_heads=32,
        num_key_value_heads=4, head_dim=128, moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8,
        norm_topk_prob=True, max_position_embeddings=40960, rms_norm_eps=1e-6, tie_word_embeddings=False,
        rope_parameters=_rope(1e6))),
    "mistral-7b": ("MistralConfig", dict(  # v0.1, 7.24 B parameters; window 4096 on every layer
        vocab_size=32000, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, sliding_window=4096, max_position_embeddings=32768, rms_norm_eps=1e-5,
        tie_word_embeddings=False, rope_parameters=_rope(10000.0))),
    "deepseek-v2-lite": ("DeepseekV2Config", dict(  # 15.7 B parameters, latent attention, 64 experts, 6 a token
        vocab_size=102400, hidden_size=2048, intermediate_size=10944, num_hidden_layers=27, num_attention_heads=16,
        num_key_value_heads=16, q_lora_rank=None, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64,
        v_head_dim=128, moe_intermediate_size=1408, n_routed_experts=64, n_shared_experts=2, num_experts_per_tok=6,
        first_k_dense_replace=1, n_group=1, topk_group=1, topk_method="greedy", norm_topk_prob=False,
        routed_scaling_factor=1.0, max_position_embeddings=163840, rms_norm_eps=1e-6, tie_word_embeddings=False,
        rope_parameters=_rope(10000.0, rope_type="yarn", factor=40, beta_fast=32, beta_slow=1, mscale=0.707,
                              mscale_all_dim=0.707, original_max_position_embeddings=4096))),
}
NAMES = (*SHAPES, "tiny")

#: name -> (torchao's config class, its arguments). Weights only, or (dq) the activations as well, with a scale a token.
QUANTIZATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "int8wo": ("Int8WeightOnlyConfig", {}),
    "fp8wo": ("Float8WeightOnlyConfig", {}),
    "int4wo": ("Int4WeightOnlyConfig", {"group_size": 128, "int4_packing_format": "tile_packed_to_4d"}),
    "int8dq": ("Int8DynamicActivationInt8WeightConfig", {}),
    "fp8dq": ("Float8DynamicActivationFloat8WeightConfig", {"granularity": "PerRow"}),
}


@dataclass(frozen=True)
class ModelSpec:
    """Which model to measure. ``name`` is a name of SHAPES, "tiny" (the shipped model's shape) or the path of a saved
    model; ``layers``: keep only so many layers (for a dry run), None: all; ``quantization``: of QUANTIZATIONS, or None."""

    name: str
    dtype: torch.dtype
    device: torch.device
    layers: int | None = None
    quantization: str | None = None

    @property
    def label(self) -> str:
        """The name for tables and files; a path's last part."""
        name = self.name if self.name in NAMES else Path(self.name).name
        return name if self.layers is None else f"{name}/{self.layers}l"

    @property
    def is_path(self) -> bool:
        return self.name not in NAMES


def layers_asked(given: int | None) -> int | None:
    """``--layers``, else the environment variable LAYERS, else None. Raises ValueError for less than 1."""
    text = os.environ.get("LAYERS", "")
    layers = given if given is not None else int(text) if text else None
    if layers is not None and layers < 1:
        raise ValueError(f"--layers must be at least 1, got {layers}")
    return layers


def config_of(spec: ModelSpec) -> Any:
    """The transformers config of the model, cut to ``spec.layers``.

    Raises:
        ValueError: a name that is neither a shape nor a folder with config.json.
    """
    import transformers

    if spec.name in SHAPES:
        kind, options = SHAPES[spec.name]
        config = getattr(transformers, kind)(**options)
    else:
        path = TINY_MODEL if spec.name == "tiny" else Path(spec.name)
        if not (path / "config.json").is_file():
            raise ValueError(f"{spec.name!r} is neither a shape ({', '.join(NAMES)}) nor a folder with a config.json")
        config = transformers.AutoConfig.from_pretrained(str(path))
    return cut(config, spec.layers)


def cut(config: Any, layers: int | None) -> Any:
    """``config`` with only the first ``layers`` layers, in place; None: all of them."""
    if layers is not None:
        text = config.get_text_config(decoder=True)
        if layers > text.num_hidden_layers:
            raise ValueError(f"--layers {layers}, but the model has {text.num_hidden_layers}")
        text.num_hidden_layers = layers
        if getattr(text, "layer_types", None):
            text.layer_types = text.layer_types[:layers]
        if getattr(text, "mlp_layer_types", None):
            text.mlp_layer_types = text.mlp_layer_types[:layers]
    return config


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def build(spec: ModelSpec, *, seed: int = 0, positions: int = 0) -> torch.nn.Module:
    """The model in eval mode, on the device, in the dtype, quantised if ``spec`` says so: saved weights for a path, else
    random ones, and then with at least ``positions`` positions.

    Random weights are made where they will be (an 8 B model in seconds on a GPU) with the model's own initialisation:
    normal with a small deviation, norms 1. Buffers such as rotary frequencies are computed as in the real model.
    """
    check_quantization(spec.quantization)
    model = _build(spec, seed, positions)
    if spec.quantization is not None:
        quantize(model, spec.quantization)
    return model


def check_quantization(name: str | None) -> None:
    """Raises ValueError for a name that QUANTIZATIONS does not have, ModuleNotFoundError where torchao is not installed."""
    if name is not None and name not in QUANTIZATIONS:
        raise ValueError(f"unknown quantization {name!r}; there are: {', '.join(QUANTIZATIONS)}")
    if name is not None and importlib.util.find_spec("torchao") is None:
        raise ModuleNotFoundError("quantising needs torchao, which is not installed: pip install 'quire[torchao]'")


def quantize(model: torch.nn.Module, name: str) -> None:
    """Quantise the linear layers of ``model`` in place, with torchao."""
    import torchao.quantization as torchao

    kind, options = QUANTIZATIONS[name]
    options = {k: getattr(torchao, v)() if k == "granularity" else v for k, v in options.items()}
    with torch.no_grad():  # False: it would change Inductor's settings for whatever is compiled later, too
        torchao.quantize_(model, getattr(torchao, kind)(**options, set_inductor_config=False))


def _build(spec: ModelSpec, seed: int, positions: int) -> torch.nn.Module:
    import transformers

    if spec.is_path:
        config_of(spec)  # a clear message if there is none
        if spec.layers is not None:
            raise ValueError("--layers goes with a shape's random weights, not with a saved model")
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(spec.name, dtype=spec.dtype)
        return loaded.to(spec.device).eval()
    config = config_of(spec)
    text = config.get_text_config(decoder=True)
    text.max_position_embeddings = max(positions, text.max_position_embeddings)
    torch.manual_seed(seed)
    with torch.device(spec.device), _default_dtype(spec.dtype), torch.no_grad(), _no_default_init():
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=spec.dtype)
    if spec.device.type == "cuda":
        torch.cuda.synchronize(spec.device)
    return model.eval()


@contextlib.contextmanager
def _no_default_init() -> Iterator[None]:
    """Without nn.Linear's and nn.Embedding's own initialisation; transformers initialises all weights after it."""
    kinds: tuple[Any, ...] = (torch.nn.Linear, torch.nn.Embedding)
    before = [kind.reset_parameters for kind in kinds]
    for kind in kinds:
        kind.reset_parameters = lambda self: None
    try:
        yield
    finally:
        for kind, method in zip(kinds, before, strict=True):
            kind.reset_parameters = method


def skeleton(spec: ModelSpec) -> torch.nn.Module:
    """The model without storage (on the meta device): its parameters can be counted, and its config read."""
    import transformers

    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config_of(spec), dtype=spec.dtype)


__all__ = ["ModelSpec", "NAMES", "QUANTIZATIONS", "SHAPES", "build", "check_quantization", "config_of", "cut", "layers_asked",
           "quantize", "skeleton"]
