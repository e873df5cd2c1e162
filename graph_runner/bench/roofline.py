"""Rooflines: the bytes that a decode step must read, over the bandwidth of a copy; the operations of a prefill, over the rate
of a large matrix product."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from quire.attn_ops.kv_cache import vector_bytes
from quire.graph_runner.bench.attention_op import timed
from quire.passes.verify.quantized import num_bytes


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second of a large copy on ``device``, read and written bytes counted: the median of several copies."""
    size = 128 * 2**20
    if device.type == "cuda":
        size = min(4 * 2**30, int(torch.cuda.mem_get_info(device)[0] * 0.4) // 4096 * 4096)
    source = torch.empty(size // 4, dtype=torch.int32, device=device).random_()
    target = torch.empty_like(source)
    return 2 * source.numel() * 4 / timed(lambda _: target.copy_(source), device).us * 1e6


def matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Floating-point operations per second of a large square matrix product of random numbers: the median of several."""
    size = 8192 if device.type == "cuda" else 512
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(left)
    return 2 * size**3 / timed(lambda _: torch.mm(left, right, out=out), device).us * 1e6


def prefill_flops(model: torch.nn.Module, lengths: Sequence[int]) -> float:
    """Floating-point operations of prefilling prompts of these lengths, each up to its first new token.

    Two per weight and token (of E experts, the k that a token is routed to), the output projection for the last token of each
    prompt only; in attention 2 * (D + Dv) per query head and visible key.
    """
    config, (embedding, head) = _config(model), _embeddings(model)
    tokens, share = sum(lengths), _expert_share(config, 1)
    flops = 2.0 * len(lengths) * (head if head is not None else embedding).numel()
    for name, parameter in model.named_parameters():
        if parameter is not embedding and parameter is not head and parameter.ndim > 1:
            flops += 2.0 * tokens * parameter.numel() * (share if ".experts." in name else 1.0)
    heads, dim = _heads(config)
    dims = 2 * dim
    if getattr(config, "kv_lora_rank", None):
        dims = config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim
    pairs = 0
    for window, count in _windows(config).items():
        for n in lengths:
            full = n * (n + 1) // 2
            pairs += count * (full if window is None or n <= window else full - (n - window) * (n - window + 1) // 2)
    return flops + 2.0 * heads * dims * pairs


def weight_bytes(model: torch.nn.Module, batch: int) -> float:
    """Bytes of weights that a step of ``batch`` tokens reads, each once; a quantized weight counts as stored.

    Two exceptions. The input embedding is a look-up of ``batch`` rows and not counted, unless it is tied to the output
    projection. Of E experts, k per token, the expected share that some token is routed to counts: 1 - (1 - k/E)^batch, with
    tokens spread evenly.
    """
    embedding, head = _embeddings(model)
    share = _expert_share(_config(model), batch)
    return sum(num_bytes(parameter) * (share if ".experts." in name else 1.0)
               for name, parameter in model.named_parameters() if parameter is head or parameter is not embedding)


def _embeddings(model: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The weights of the input embedding and of the output projection."""
    return model.get_input_embeddings().weight, getattr(model.get_output_embeddings(), "weight", None)


def _config(model: Any) -> Any:
    return model.config.get_text_config(decoder=True)


def _heads(config: Any) -> tuple[int, int]:
    """Query heads, and their dimension."""
    heads = int(config.num_attention_heads)
    return heads, int(getattr(config, "head_dim", None) or config.hidden_size // heads)


def _expert_share(config: Any, batch: int) -> float:
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    experts = next((n for name in names if (n := getattr(config, name, 0))), 0)
    active = getattr(config, "num_experts_per_tok", None) or 0
    return 1 - (1 - active / experts) ** batch if experts and active else 1.0


def has_experts(model: torch.nn.Module) -> bool:
    """Whether a token uses a part of the weights only."""
    return _expert_share(_config(model), 1) < 1


def kv_bytes(model: torch.nn.Module, contexts: list[int], dtype: torch.dtype | None = None) -> float:
    """Bytes of keys and values that a decode step of sequences of these lengths reads.

    Per sequence and layer: min(length, window) tokens of Hkv * (D + Dv) elements; with multi-head latent attention, the
    compressed rank and the rotary part, whatever the system caches. A quantized ``dtype`` adds a float32 scale per key and
    per value vector.
    """
    config = _config(model)
    heads, dim = _heads(config)
    dtype = dtype or next(model.parameters()).dtype
    if getattr(config, "kv_lora_rank", None):
        size = vector_bytes(config.kv_lora_rank, config.qk_rope_head_dim, dtype)
    else:
        size = (getattr(config, "num_key_value_heads", None) or heads) * vector_bytes(dim, dim, dtype)
    tokens = sum(count * min(n, window or n) for window, count in _windows(config).items() for n in contexts)
    return float(tokens) * size


def _windows(config: Any) -> Counter[int | None]:
    """The number of layers by sliding window (None: without)."""
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    types = getattr(config, "layer_types", None) or [
        "sliding_attention" if window else "full_attention"] * int(config.num_hidden_layers)
    return Counter(window if window and kind == "sliding_attention" else None for kind in types)


def step_bytes(model: torch.nn.Module, batch: int, context: int, kv_dtype: torch.dtype | None = None) -> float:
    """Bytes of one decode step of ``batch`` sequences of ``context`` tokens: weight_bytes + kv_bytes."""
    return weight_bytes(model, batch) + kv_bytes(model, [context] * batch, kv_dtype)
