"""Rotary embedding with the cache write, against a float64 oracle; in Triton's interpreter where there is no GPU."""

from __future__ import annotations

import math

import pytest
import torch

from quire.attn_ops.kv_cache import PagedKVCache
from quire.attn_ops.kv_quant import is_fixed
from quire.attn_ops.ops.rope import PLAIN, RopeForm, rope_kv_write, rope_kv_write_cuda, rope_kv_write_eager
from tests.attn_ops.cases import bits

triton = pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PAGES, PAGE = 7, 4


def case(tokens=5, heads=4, kv_heads=2, dim=16, dim_v=None, rotary=None, norm=False, dtype=torch.float32, layout="NHD",
         kv_dtype=None, half_tables=False, kv_scales=None, seed=0):
    """Arguments whose q, k and v are parts of one projection, as the projection fusion leaves them; slot 1 is padding. All
    angles of a token are different: a full table need not hold one twice."""
    torch.manual_seed(seed)
    dim_v, rotary, made = dim_v or dim, rotary or dim, dict(dtype=dtype, device=DEVICE)
    sizes = [heads * dim, kv_heads * dim, kv_heads * dim_v]
    q, k, v = (x.unflatten(1, (-1, d)) for x, d in zip(
        torch.randn(tokens, sum(sizes), **made).split(sizes, dim=1), (dim, dim, dim_v), strict=True))
    angles = torch.rand(tokens, rotary // 2 if half_tables else rotary, device=DEVICE).mul(6.3)
    weights = [torch.rand(dim, **made) + 0.5 if norm else None for _ in range(2)]
    cache = PagedKVCache(num_layers=1, num_pages=PAGES, page_size=PAGE, num_kv_heads=kv_heads, head_dim=dim, head_dim_v=dim_v,
                         dtype=kv_dtype or dtype, device=DEVICE, layout=layout, kv_scales=kv_scales)
    for tensor in (t for t in cache.of_layer(0) if t is not None and not is_fixed(t)):
        tensor.copy_(torch.randn(tensor.shape) * 9)
    slots = torch.randperm(PAGES * PAGE - PAGE, device=DEVICE)[:tokens] + PAGE
    if tokens > 1:
        slots[1] = -1
    return [q, k, v, angles.cos().to(dtype), angles.sin().to(dtype), *weights, 1e-6, *cache.of_layer(0), slots]


def read(cache, scale):
    return cache.double() if scale is None else cache.double() * scale.double()[..., None]


def oracle(q, k, v, cos, sin, q_weight, k_weight, eps, k_cache, v_cache, k_scale, v_scale, slots, form=PLAIN):
    """(rotated q, k cache, v cache) in float64, as they read: a loop over tokens and heads."""
    def normed(x, weight):
        return x if weight is None else x / (x.square().mean() + eps).sqrt() * (weight.double() + (form.norm_offset or 0))

    def turned(x, weight, t):
        x = x.double() if form.norm_after else normed(x.double(), weight)
        pairs = cos.shape[1] if form.half_tables else cos.shape[1] // 2
        out = x.clone()
        for i in range(pairs):
            first, second = (2 * i, 2 * i + 1) if form.interleaved else (i, i + pairs)
            a, b = x[first], x[second]
            at, too = (i, i) if form.half_tables else (first, second)
            out[first] = a * cos[t, at].double() - b * sin[t, at].double()
            out[second] = b * cos[t, too].double() + a * sin[t, too].double()
        return normed(out, weight) if form.norm_after else out

    k_cache, v_cache = read(k_cache, k_scale), read(v_cache, v_scale)
    out = torch.stack([torch.stack([turned(head, q_weight, t) for head in token]) for t, token in enumerate(q)])
    for t, slot in enumerate(slots.tolist()):
        if slot >= 0:
            k_cache[slot // PAGE, slot % PAGE] = torch.stack([turned(head, k_weight, t) for head in k[t]])
            v_cache[slot // PAGE, slot % PAGE] = v[t].double()
    return out, k_cache, v_cache


def check(run, args, form=PLAIN) -> None:
    """float32: sums of two products, and a norm, of numbers of order 1. float16: those rounded once (2**-11 of up to 8)."""
    atol = 1e-5 if args[0].dtype == torch.float32 else 8e-3
    expected = oracle(*args, form)
    got = run(*args, **form.options()), read(args[8], args[10]), read(args[9], args[11])
    # A code is off by half a step: of int8 1/254 of the largest number, of e4m3 2**-4 and of e5m2 2**-3 of the number.
    coarse = {torch.int8: dict(atol=12 / 254, rtol=0), torch.float8_e4m3fn: dict(atol=1e-2, rtol=2**-4 + 1e-3),
              torch.float8_e5m2: dict(atol=1e-2, rtol=2**-3 + 1e-3)}
    for i, (g, e) in enumerate(zip(got, expected, strict=True)):
        torch.testing.assert_close(g.double(), e, **(coarse.get(args[8].dtype) if i else None) or dict(atol=atol, rtol=0))


RUNS = [pytest.param(rope_kv_write_eager, id="eager"), pytest.param(rope_kv_write_cuda, id="kernel")]


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("options", [
    {}, dict(tokens=1), dict(tokens=13), dict(norm=True), dict(rotary=8), dict(rotary=6, norm=True), dict(dim_v=8),
    dict(heads=6, kv_heads=1), dict(heads=3, kv_heads=3), dict(dim=24, dim_v=20), dict(dim=80, heads=2, kv_heads=1),
    dict(layout="HND"), dict(dtype=torch.float16, norm=True),
], ids=str)
def test_against_the_oracle(run, options) -> None:
    check(run, case(**options))


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("form, options", [
    (RopeForm(interleaved=True), {}), (RopeForm(interleaved=True), dict(rotary=8, norm=True)), (RopeForm(half_tables=True), {}),
    (RopeForm(half_tables=True), dict(rotary=6, norm=True, dim=24, tokens=13)), (RopeForm(True, True), dict(layout="HND")),
    (RopeForm(True, True), dict(rotary=6, dtype=torch.float16, kv_heads=1)), (RopeForm(norm_after=True), dict(norm=True)),
    (RopeForm(True, True, True), dict(norm=True, rotary=8, dim=24, kv_dtype=torch.int8)),
    (RopeForm(norm_offset=1.0), dict(norm=True)), (RopeForm(norm_offset=0.0), dict(norm=True, dtype=torch.float16)),
    (RopeForm(False, True, True, 1.0), dict(norm=True, dim=80, rotary=40)),
], ids=str)
def test_forms(run, form, options) -> None:
    check(run, case(half_tables=form.half_tables, **options), form)


@pytest.mark.parametrize("offset", [None, 1.0])
def test_where_the_definition_rounds(offset) -> None:
    """Where transformers' models do, to the last bit: their own words in bfloat16."""
    args = case(norm=True, dtype=torch.bfloat16, half_tables=True)
    q, cos, sin, weight = args[0], args[3][:, None], args[4][:, None], args[5]
    wide = q.float() * torch.rsqrt(q.float().pow(2).mean(-1, keepdim=True) + 1e-6)
    normed = weight * wide.to(q.dtype) if offset is None else (wide * (1.0 + weight.float())).type_as(q)
    first, second = torch.chunk(normed, 2, dim=-1)
    expected = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)  # gpt-oss
    form = RopeForm(half_tables=True, norm_offset=offset)
    assert torch.equal(rope_kv_write_eager(*args, **form.options()), expected)
    wide_cos, wide_sin = (t.float().repeat_interleave(2, dim=-1) for t in (cos, sin))
    turned = torch.stack([-normed[..., 1::2], normed[..., ::2]], dim=-1).flatten(-2).float()
    expected = (normed.float() * wide_cos + turned * wide_sin).to(q.dtype)  # Cohere, Ernie
    args[3], args[4] = args[3].float(), args[4].float()
    assert torch.equal(rope_kv_write_eager(*args, **form._replace(interleaved=True).options()), expected)


def test_many_tokens_and_none() -> None:
    """Programs of several heads, a last block that is not full."""
    check(rope_kv_write_cuda, case(tokens=12, heads=5, kv_heads=3))
    many = case(tokens=20, heads=5, kv_heads=3)
    twice = [torch.cat([x] * 13) if i in (0, 1, 2, 3, 4) else x for i, x in enumerate(many)]  # 260 tokens
    twice[12] = torch.cat([many[12], torch.full((240,), -1, device=DEVICE)])
    check(rope_kv_write_cuda, twice)
    assert rope_kv_write_cuda(*case(tokens=0)).shape == (0, 4, 16)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("kv_dtype", [torch.int8, torch.float8_e4m3fn, torch.float8_e5m2])
def test_quantized_caches(run, kv_dtype) -> None:
    if DEVICE == "cpu" and run is rope_kv_write_cuda and kv_dtype is not torch.int8:
        pytest.skip("Triton's interpreter converts to fp8 in its own way")
    check(run, case(tokens=7, norm=True, kv_dtype=kv_dtype, layout="HND"))


@pytest.mark.parametrize("kv_dtype, kv_scales", [
    (torch.int8, None), (torch.float8_e4m3fn, {0: (0.004, 0.03)}), (torch.float8_e5m2, {0: (3e-5, 2e-4)})], ids=str)
def test_codes_are_those_of_the_definition(kv_dtype, kv_scales) -> None:
    """Both forms store the same bits where they rotate to the same float32 numbers: with angles of zero. With a fixed scale
    some keys do not fit: a fused kernel that clamped them would give other tokens than one that does not."""
    stored = []
    for run in (rope_kv_write_eager, rope_kv_write_cuda):
        args = case(tokens=7, kv_dtype=kv_dtype, kv_scales=kv_scales)
        args[3], args[4] = torch.ones_like(args[3]), torch.zeros_like(args[4])
        args[2][0, 0, :3] = torch.tensor([math.nan, math.inf, -100.0])  # a value
        run(*args)
        stored.append(args[8:12])
    for a, b in zip(*stored, strict=True):  # NaN scales have other bits on a GPU
        assert torch.equal(bits(a), bits(b)) if a.itemsize == 1 else torch.equal(a.nan_to_num(-1.0), b.nan_to_num(-1.0))
    assert kv_scales is None or all(stored[0][i].float().isnan().any() for i in (0, 1))


def test_a_cache_that_cannot_be_written() -> None:
    args = case()
    args[8] = args[8].transpose(2, 3)
    with pytest.raises(ValueError, match="last dim is contiguous"):
        rope_kv_write_cuda(*args)


def test_opcheck() -> None:
    torch.library.opcheck(rope_kv_write, case(norm=True))
    torch.library.opcheck(rope_kv_write, case(rotary=8))
    torch.library.opcheck(rope_kv_write, case(kv_dtype=torch.int8))
    torch.library.opcheck(rope_kv_write, case(norm=True, half_tables=True), RopeForm(True, True, True, 1.0).options())
