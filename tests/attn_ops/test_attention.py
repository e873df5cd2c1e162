"""The semantic attention op: its values against the oracle, its gradients, its fake, and its errors."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend

from quire.attn_ops.attention import AttentionSite, attention
from tests.attn_ops.oracle import oracle_attention

FEATURES = {
    "plain": {}, "window": {"window": 3}, "window_of_one": {"window": 1}, "softcap": {"softcap": 2.0}, "chunk": {"chunk": 4},
    "sinks": {"sinks": True}, "all": {"window": 5, "softcap": 1.5, "chunk": 4, "sinks": True},
}
PLAIN = dict(layer=0, scale=0.35, window=None, softcap=None, chunk=None, causal=True)

# float32 against float64 sums of up to 13 products of numbers of order 1: 13 roundings of half an eps (6e-8), twice
# (scores and values), are 2e-6; the softmax multiplies an error of the scores by the size of the values, about 3.
TOLERANCE = 1e-5


def tensors(s, sk, *, heads=4, kv_heads=2, dim=8, dim_v=6, batch=2, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(shape, generator=generator).to(dtype)

    return randn(batch, heads, s, dim), randn(batch, kv_heads, sk, dim), randn(batch, kv_heads, sk, dim_v), randn(heads)


def options_of(features, sinks):
    """(sinks or None, keyword arguments) for the op, from an entry of FEATURES."""
    own = {k: v for k, v in features.items() if k != "sinks"}
    return (sinks if features.get("sinks") else None), {**PLAIN, **own}


@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES.keys())
@pytest.mark.parametrize("s, sk", [(1, 1), (4, 4), (5, 5), (13, 13), (1, 9), (3, 9)])
def test_values(s, sk, features) -> None:
    """Also with fewer queries than keys: they are the last ones."""
    q, k, v, sinks = tensors(s, sk)
    sinks, options = options_of(features, sinks)
    out = attention(q, k, v, sinks, **options)
    assert out.shape == (2, 4, s, 6) and out.dtype == q.dtype and out.is_contiguous()
    del options["layer"], options["causal"]
    for b in range(2):
        rows = (t[b].transpose(0, 1) for t in (q, k, v))
        expected = oracle_attention(*rows, sinks=sinks, **options).transpose(0, 1)
        torch.testing.assert_close(out[b].double(), expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("heads, kv_heads, sk, causal", [
    (1, 1, 7, True), (4, 4, 7, True), (4, 1, 7, True), (8, 2, 7, True), (6, 3, 7, True), (4, 2, 11, False)])
def test_grouped_heads(heads, kv_heads, sk, causal) -> None:
    """Query head h reads key head h // (H // Hkv), causal or not."""
    q, k, v, _ = tensors(7, sk, heads=heads, kv_heads=kv_heads)
    k_all, v_all = (t.repeat_interleave(heads // kv_heads, dim=1) for t in (k, v))
    expected = F.scaled_dot_product_attention(q, k_all, v_all, is_causal=causal, scale=0.35)
    got = attention(q, k, v, None, **{**PLAIN, "causal": causal})
    torch.testing.assert_close(got, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_computes_in_float32(dtype) -> None:
    q, k, v, sinks = tensors(9, 9, dtype=dtype)
    out = attention(q, k, v, sinks, **PLAIN)
    exact = attention(q.float(), k.float(), v.float(), sinks.float(), **PLAIN)
    assert out.dtype == dtype
    assert torch.equal(out, exact.to(dtype))  # one rounding, at the end


# Gradients.


def plain_composition(q, k, v, sinks, *, layer, scale, window, softcap, chunk, causal):
    """The op from matmul, tanh, where and softmax in the inputs' dtype, for autograd to differentiate."""
    groups, (s, sk) = q.shape[1] // k.shape[1], (q.shape[2], k.shape[2])
    scores = scale * torch.einsum("bhsd,bhkd->bhsk", q, k.repeat_interleave(groups, dim=1))
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    mask = torch.zeros(s, sk, dtype=torch.bool)
    for i, j in itertools.product(range(s), range(sk)):
        p = i + sk - s
        mask[i, j] = ((not causal or j <= p) and (window is None or j > p - window)
                      and (chunk is None or j // chunk == p // chunk))
    scores = torch.where(mask, scores, -math.inf)
    if sinks is not None:
        column = sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        weights = torch.cat([scores, column], dim=-1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return weights @ v.repeat_interleave(groups, dim=1)


@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES.keys())
@pytest.mark.parametrize("s, sk, heads, kv_heads", [(6, 6, 4, 2), (6, 6, 4, 4), (3, 7, 8, 1)])
def test_gradients(s, sk, heads, kv_heads, features) -> None:
    *qkv, sinks = tensors(s, sk, heads=heads, kv_heads=kv_heads)
    sinks, options = options_of(features, sinks)
    inputs = [t for t in (*qkv, sinks) if t is not None]
    grad = torch.randn(2, heads, s, 6, generator=torch.Generator().manual_seed(1))

    def gradients(function, dtype):
        leaves = [t.to(dtype).requires_grad_() for t in inputs]
        q, k, v, *rest = leaves
        function(q, k, v, rest[0] if rest else None, **options).backward(grad.to(dtype))
        return [leaf.grad for leaf in leaves]

    expected = gradients(plain_composition, torch.float64)
    for got, want in zip(gradients(attention, torch.float32), expected, strict=True):
        torch.testing.assert_close(got.double(), want, rtol=0, atol=TOLERANCE * max(1, want.abs().max().item()))


def test_gradients_not_causal_and_in_half_precision() -> None:
    *qkv, _ = tensors(4, 4)
    options = {**PLAIN, "causal": False}
    ours = [t.clone().requires_grad_() for t in qkv]
    theirs = [t.double().requires_grad_() for t in qkv]
    attention(*ours, None, **options).square().sum().backward()
    plain_composition(*theirs, None, **options).square().sum().backward()
    for got, want in zip(ours, theirs, strict=True):
        torch.testing.assert_close(got.grad.double(), want.grad, rtol=0, atol=TOLERANCE * 10)
    leaves = [t.requires_grad_() for t in tensors(4, 4, dtype=torch.bfloat16)]
    attention(*leaves, **PLAIN).sum().backward()
    assert [leaf.grad.dtype for leaf in leaves] == [torch.bfloat16] * 4


# Registration, tracing.


@pytest.mark.parametrize(("features", "grad"), [
    ("plain", False), ("all", False), *(pytest.param(name, True, marks=pytest.mark.slow) for name in ("all", "plain"))])
def test_opcheck(features, grad) -> None:
    q, k, v, sinks = (t.requires_grad_(grad) for t in tensors(5, 7))
    sinks, options = options_of(FEATURES[features], sinks)
    torch.library.opcheck(attention, (q, k, v, sinks), options)


def test_compiles_once_for_all_lengths() -> None:
    def doubled(q, k, v, sinks):
        return attention(q, k, v, sinks, layer=0, scale=0.35, window=None, softcap=None, chunk=None, causal=True) * 2

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(doubled, backend=counter, fullgraph=True, dynamic=True)
    for s, sk in [(3, 10), (5, 5), (17, 40), (2, 11)]:
        inputs = tensors(s, sk, batch=7)  # sizes that are equal at first would be taken to be one
        assert torch.equal(compiled(*inputs), doubled(*inputs))
    assert counter.frame_count == 1


# Errors: the eager and the fake implementation raise the same ones.


ERRORS = {
    "three_dims": (dict(q=(2, 4, 8)), {}, r"takes q \(B, H, S, D\).*got \(2, 4, 8\)"),
    "heads": (dict(q=(1, 3, 5, 8)), {}, r"query heads \(3\) to be a multiple of key heads \(2\)"),
    "value_heads": (dict(v=(1, 1, 5, 6)), {}, r"as many value heads \(1\) as key heads"),
    "head_dim": (dict(k=(1, 2, 5, 16)), {}, "one head dim for q and k, got 8 and 16"),
    "sinks": (dict(sinks=(2,)), {}, r"sinks of shape \(H,\) = \(4,\), got \(2,\)"),
    "window": ({}, dict(window=0), "window must be positive or None, got 0"),
    "softcap": ({}, dict(softcap=-1.0), "softcap must be positive or None, got -1.0"),
    "chunk": ({}, dict(chunk=-3), "chunk must be positive or None, got -3"),
}


@pytest.mark.parametrize("shapes, options, message", ERRORS.values(), ids=ERRORS.keys())
@pytest.mark.parametrize("fake", [False, True])
def test_errors(shapes, options, message, fake) -> None:
    sizes = {"q": (1, 4, 5, 8), "k": (1, 2, 5, 8), "v": (1, 2, 5, 6), "sinks": (4,)} | shapes
    mode = torch._subclasses.FakeTensorMode() if fake else torch.no_grad()
    with mode, pytest.raises(ValueError, match=message):
        attention(*(torch.zeros(size) for size in sizes.values()), **{**PLAIN, **options})


# AttentionSite.


@pytest.mark.parametrize("options, words", [
    (dict(num_heads=8, num_kv_heads=8), "MHA 8:8x64, float16"),
    (dict(num_heads=8, num_kv_heads=1), "MQA 8:1x64, float16"),
    (dict(head_dim_v=32, window=9, softcap=30.0, chunk=4, sinks=True, causal=False),
     "GQA 8:2x64/32, float16, window=9, softcap=30, chunk=4, sinks, non-causal"),
])
def test_site_needs(options, words) -> None:
    site = AttentionSite(**{**dict(layer=3, num_heads=8, num_kv_heads=2, head_dim=64, head_dim_v=64, scale=0.1,
                                   dtype=torch.float16), **options})
    assert site.needs() == words
