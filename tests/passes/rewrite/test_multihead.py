"""nn.MultiheadAttention and nn.TransformerEncoderLayer in a causal LM: with the logits of the plain forward, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.adversarial.harness import HEADS, WIDTH, outcome
from tests.adversarial.structures import Structure, start
from tests.passes.models import trace

Forward = Callable[..., torch.Tensor]


def ahead(p: torch.Tensor) -> torch.Tensor:
    return p[0][:, None] < p[0]


def outside(p: torch.Tensor) -> torch.Tensor:
    """Of a window of 3."""
    return ahead(p) | (p[0][:, None] - p[0] >= 3)


def square(p: torch.Tensor) -> torch.Tensor:
    return nn.Transformer.generate_square_subsequent_mask(p.shape[1])


def heads(call: Callable[..., Any], **options: Any) -> Forward:
    """``call(module, x, positions, ids)`` -> what is added to x."""
    torch.manual_seed(1)
    module = nn.MultiheadAttention(WIDTH, HEADS, **{"batch_first": True, **options}).eval().requires_grad_(False)
    return lambda m, ids, p: m.head((x := start(m, ids, p)) + call(module, x, p, ids))


def layer(call: Callable[..., Any], depth: int = 0, **options: Any) -> Forward:
    """``call(module, x, positions, ids)`` -> hidden states. ``depth``: in nn.TransformerEncoder."""
    torch.manual_seed(1)
    module: nn.Module = nn.TransformerEncoderLayer(WIDTH, options.pop("nhead", HEADS), 32, **{"batch_first": True, **options})
    if depth:
        module = nn.TransformerEncoder(module, depth, enable_nested_tensor=False)
    for p in module.eval().parameters():
        p.requires_grad_(False).add_(0.1 * torch.randn_like(p))
    return lambda m, ids, p: m.head(call(module, start(m, ids, p), p, ids))


def by_function(a: nn.MultiheadAttention, x: torch.Tensor, p: torch.Tensor, training: bool) -> torch.Tensor:
    x = x.transpose(0, 1)
    return F.multi_head_attention_forward(
        x, x, x, WIDTH, HEADS, a.in_proj_weight, a.in_proj_bias, None, None, False, 0.5, a.out_proj.weight, a.out_proj.bias,
        training, attn_mask=ahead(p))[0].transpose(0, 1)


def late(p: torch.Tensor) -> torch.Tensor:
    """Of five keys, which from the third token on are not all seen."""
    return (p[0][:, None] >= 3) & (torch.arange(5) < 3)


def with_memory(call: Callable[..., torch.Tensor]) -> Forward:
    """Attention to the tokens, and ``call(module, x, memory, positions)`` to stored keys (5, 1, WIDTH)."""
    return heads(lambda a, x, p, i: a(x, x, x, attn_mask=ahead(p))[0] + call(a, x, a.out_proj.weight[:5, None], p))


def by_position(a: nn.MultiheadAttention, x: torch.Tensor, memory: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """All arguments, in PyTorch's order."""
    return F.multi_head_attention_forward(
        x.transpose(0, 1), memory, memory, WIDTH, HEADS, a.in_proj_weight, a.in_proj_bias, None, None, False, 0.0,
        a.out_proj.weight, a.out_proj.bias, False, None, False, late(p))[0].transpose(0, 1)


def by_name(a: nn.MultiheadAttention, x: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    x = x.transpose(0, 1)
    return F.multi_head_attention_forward(
        query=x, key=x, value=x, embed_dim_to_check=WIDTH, num_heads=HEADS, in_proj_weight=a.in_proj_weight,
        in_proj_bias=a.in_proj_bias, bias_k=None, bias_v=None, add_zero_attn=False, dropout_p=0.0,
        out_proj_weight=a.out_proj.weight, out_proj_bias=a.out_proj.bias, training=False, attn_mask=ahead(p))[0].transpose(0, 1)


def shown(ids: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(ids, dtype=torch.bool)


def quick(name: str, *values: Any) -> Any:
    return pytest.param(*values, id=name)


def slow(name: str, *values: Any) -> Any:
    return pytest.param(*values, id=name, marks=pytest.mark.slow)


def result(forward: Forward, layers: int = 1, route: str = "engine") -> str:
    return outcome(lambda kind: kind(forward), route, base=Structure, layers=layers)


@pytest.mark.parametrize("forward", [
    quick("weights that nobody reads", heads(lambda a, x, p, i: a(x, x, x, attn_mask=ahead(p))[0])),
    quick("no weights", heads(lambda a, x, p, i: a(x, x, x, attn_mask=square(p), need_weights=False)[0])),
    quick("causal", heads(lambda a, x, p, i: a(x, x, x, attn_mask=square(p), need_weights=False, is_causal=True)[0])),
    quick("window", heads(lambda a, x, p, i: a(x, x, x, attn_mask=outside(p))[0])),
    slow("tokens first", heads(
        lambda a, x, p, i: a(*[x.transpose(0, 1)] * 3, attn_mask=ahead(p))[0].transpose(0, 1), batch_first=False)),
    quick("no batch", heads(lambda a, x, p, i: a(x[0], x[0], x[0], attn_mask=ahead(p))[0][None])),
    slow("no bias", heads(lambda a, x, p, i: a(x, x, x, attn_mask=ahead(p))[0], bias=False)),
    quick("other keys", heads(lambda a, x, p, i: a(x, 2 * x, x + 1, attn_mask=ahead(p))[0])),
    quick("keys of another size",
          heads(lambda a, x, p, i: a(x, x[..., :8], x[..., 4:], attn_mask=ahead(p))[0], kdim=8, vdim=12)),
    quick("a mask for each head", heads(lambda a, x, p, i: a(x, x, x, attn_mask=ahead(p).expand(HEADS, -1, -1))[0])),
    quick("nothing is padding", heads(lambda a, x, p, i: a(x, x, x, attn_mask=ahead(p), key_padding_mask=shown(i))[0])),
    quick("by the function", heads(lambda a, x, p, i: by_function(a, x, p, training=False))),
    quick("by names", heads(lambda a, x, p, i: by_name(a, x, p))), quick("by places", with_memory(by_position)),
])
def test_attention_is_served(forward: Forward) -> None:
    assert result(forward) == "exact"


@pytest.mark.parametrize("forward, layers", [
    quick("layer", layer(lambda a, x, p, i: a(x, src_mask=square(p))), 1),
    quick("norms first", layer(lambda a, x, p, i: a(x, src_mask=square(p), is_causal=True), norm_first=True), 1),
    quick("gelu", layer(lambda a, x, p, i: a(x, src_mask=ahead(p)), activation="gelu"), 1),
    slow("silu", layer(lambda a, x, p, i: a(x, src_mask=ahead(p)), activation=F.silu), 1),
    slow("tokens first",
          layer(lambda a, x, p, i: a(x.transpose(0, 1), src_mask=ahead(p)).transpose(0, 1), batch_first=False), 1),
    quick("numbers for truths", layer(lambda a, x, p, i: a(x, src_mask=0.5 * outside(p))), 1),
    quick("nothing is padding", layer(lambda a, x, p, i: a(x, src_mask=ahead(p), src_key_padding_mask=shown(i))), 1),
    quick("encoder", layer(lambda a, x, p, i: a(x, mask=square(p), is_causal=True), 2), 2),
    slow("encoder, nothing said", layer(lambda a, x, p, i: a(x, mask=square(p)), 2, norm_first=True), 2),
])
def test_layers_are_served(forward: Forward, layers: int) -> None:
    assert result(forward, layers) == "exact"


@pytest.mark.parametrize("route", [pytest.param(r, marks=pytest.mark.slow) for r in ("decorator", "compile")])
def test_by_hand(route: str) -> None:
    assert result(layer(lambda a, x, p, i: a(x, mask=square(p), is_causal=True), 2), 2, route) == "exact"


def test_queries_keys_and_values_are_one_product() -> None:
    """Three would read the packed weights in parts, which no fusion joins."""
    graph = trace(Structure(heads(lambda a, x, p, i: a(x, x, x, attn_mask=ahead(p))[0])))
    assert sum(n.target is F.linear for n in graph.raised.graph.nodes) == 3  # with that of the result, and the head


@pytest.mark.parametrize("forward, why", [
    quick("not causal", heads(lambda a, x, p, i: a(x, x, x)[0]), "non-causal"),
    quick("the next one too", heads(lambda a, x, p, i: a(x, x, x, attn_mask=ahead(p - 1) & (p[0][:, None] + 1 < p[0]))[0]),
          "none of causal"),
    quick("said to be causal",
          heads(lambda a, x, p, i: a(x, x, x, attn_mask=outside(p), need_weights=False, is_causal=True)[0]),
          "is_causal says"),
    quick("a memory said to be causal",
          with_memory(lambda a, x, memory, p: a(x, *[memory.transpose(0, 1)] * 2, attn_mask=late(p), need_weights=False,
                                                is_causal=True)[0]),
          "mixes the tokens"),
    quick("weights that are read",
          heads(lambda a, x, p, i: (o := a(x, x, x, attn_mask=ahead(p)))[0] + o[1].amax(-1)[..., None]),
          "reads its weights"),
    quick("a key of the module's",
          heads(lambda a, x, p, i: a(x, x, x, attn_mask=ahead(p))[0], add_bias_kv=True), "adds no keys"),
    quick("a key of zeros", heads(lambda a, x, p, i: a(x, x, x, attn_mask=ahead(p))[0], add_zero_attn=True), "adds no keys"),
    quick("padding by ids", heads(lambda a, x, p, i: a(x, x, x, attn_mask=ahead(p), key_padding_mask=i == 3)[0]), "token ids"),
    quick("masks that differ", heads(lambda a, x, p, i: a(x, x, x, attn_mask=torch.stack([ahead(p)] * 3 + [outside(p)]))[0]),
          "between heads"),
    quick("dropout", heads(lambda a, x, p, i: by_function(a, x, p, training=True)), "dropout 0.5"),
    quick("layer, padding by ids", layer(lambda a, x, p, i: a(x, src_mask=ahead(p), src_key_padding_mask=i == 3)), "token ids"),
    quick("layer, padding alone", layer(lambda a, x, p, i: a(x, src_key_padding_mask=shown(i))), "non-causal"),
    quick("layer, no mask", layer(lambda a, x, p, i: a(x, is_causal=True)), "non-causal"),
])
def test_refused(forward: Forward, why: str) -> None:
    found = result(forward)
    assert found.startswith("refused") and why in found, found
