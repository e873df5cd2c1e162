"""The Triton backend on quantized caches, against the oracle: codes and scales must be bit for bit the oracle's."""

from __future__ import annotations

import pytest
import torch

from quire.attn_ops.backends.triton import BACKEND
from quire.attn_ops.kv_quant import QUANTIZED_KV_DTYPES, quantize
from tests.attn_ops.backends.test_triton import DEVICE, INT8, SMALL, DecodeConfig, ExtendConfig
from tests.attn_ops.cases import check_case, make_case, run_case

from quire.attn_ops.backends.triton import decode  # isort: skip  (after test_triton, which sees to Triton)
from quire.attn_ops.backends.triton.plan import overridden  # isort: skip

KINDS = sorted(QUANTIZED_KV_DTYPES, key=str)
def kinds(quick):
    return pytest.mark.parametrize("kv_dtype", [
        pytest.param(kind, marks=[pytest.mark.slow] * (kind not in quick)) for kind in KINDS], ids=str)


QUANT = kinds((INT8, torch.float8_e4m3fn))
INT8_FIRST = kinds((INT8,))  # where the kinds differ in conversions only, which others test


@INT8_FIRST
@pytest.mark.parametrize("features", [
    dict(num_heads=6, num_kv_heads=2, head_dim=24, head_dim_v=40, page_size=1),
    pytest.param(dict(num_heads=16, num_kv_heads=1, head_dim=80), marks=pytest.mark.slow)], ids=str)
def test_quantized_heads_and_dims(features, kv_dtype):
    shape = {**SMALL, **features, "kv_dtype": kv_dtype}
    check_case(BACKEND, make_case([1] * 4, [1, 15, 17, 70], **shape))
    check_case(BACKEND, make_case([5, 1, 0, 30], [70, 40, 3, 40], **shape, pad_tokens=2, pad_reqs=1))


@pytest.mark.parametrize(("dot", "kv_dtype"), [
    (True, torch.float8_e4m3fn),
    *(pytest.param(*variant, marks=pytest.mark.slow) for variant in ((False, INT8), (True, torch.float8_e5m2)))], ids=str)
def test_quantized_splits(dot, kv_dtype):
    with overridden(DecodeConfig, block_n=16, chunk_min=16, wave=7 * 2 * 5, dot=dot):
        check_case(BACKEND, make_case([1] * 3, [1, 17, 150], **SMALL, kv_dtype=kv_dtype, sinks=True))
        check_case(BACKEND, make_case([1, 9, 1], [150, 40, 2], **SMALL, kv_dtype=kv_dtype, pad_tokens=1))
    with overridden(ExtendConfig, block_m=16, block_n=16, chunk_min=16, max_splits=5):
        check_case(BACKEND, make_case([9, 1], [120, 3], **SMALL, kv_dtype=kv_dtype, window=70))


@pytest.mark.parametrize("large", [1e-3, pytest.param(1.0, marks=pytest.mark.slow), 2e4])
@QUANT
def test_quantized_values_of_any_size_in_float16(kv_dtype, large):
    """Neither do weights times a small scale vanish in float16, nor do large values overflow: the bound is relative."""
    for query_lens in ([1, 1], [9, 1]):
        case = make_case(query_lens, [200, 30], **{**SMALL, "dtype": torch.float16}, kv_dtype=kv_dtype)
        case.v.mul_(large)
        case.cache.v_scale[0].mul_(large)
        reference = _reference(case)
        out = run_case(BACKEND, case)
        # A weight and the output are rounded once each, as in ``cases.make_case``, and 1e-5 of the largest for sums.
        assert (out.double() - reference).abs().max() <= 2 * torch.finfo(torch.float16).eps * large * 4


def _reference(case):
    from quire.attn_ops.backends.torch_native import BACKEND as NATIVE

    held = [tensor.clone() for tensor in case.cache.of_layer(0)]
    wide = [tensor.float() for tensor in (case.q, case.k, case.v)]
    m = case.metadata
    return NATIVE.op(*wide, *held, m.slot_mapping, m.block_table_tensor, m.query_start_loc, m.seq_lens, None, [],
                     **case.options).double()


WORDS = dict(num_heads=8, num_kv_heads=2, head_dim=64, page_size=4, dtype=torch.float16, device=DEVICE)


def by_words(monkeypatch) -> list[int]:
    """Codes per word that decoding chose, for each of its launches: see NOTE [Values by words]."""
    chosen, launch = [], decode.launch
    monkeypatch.setattr(decode, "launch", lambda kernel, grid, *args, **options: (
        chosen.extend(a.words for a in args if hasattr(a, "words")), launch(kernel, grid, *args, **options)))
    return chosen


@INT8_FIRST
@pytest.mark.parametrize("features", [
    dict(window=11, softcap=3.0, sinks=True, chunk=32, layout="HND"),
    *(pytest.param(features, marks=pytest.mark.slow) for features in (
        dict(head_dim=57, head_dim_v=64),
        dict(head_dim=128, page_size=1, strided=True), dict(poison=float("nan"), sinks=True, write=False),
        dict(head_dim=96, layout="HND"), dict(num_heads=4), dict(head_dim=80), dict(head_dim=16, head_dim_v=36),
        dict(num_heads=17, num_kv_heads=1, head_dim=256), dict(page_size=12), dict(window=1), dict(chunk=8, write=False),
        dict(num_heads=2))),
], ids=str)
def test_values_by_words(features, kv_dtype, monkeypatch):
    chosen = by_words(monkeypatch)
    shape = {**WORDS, **features, "kv_dtype": kv_dtype}
    check_case(BACKEND, make_case([1] * 4, [1, 15, 17, 70], **shape))
    check_case(BACKEND, make_case([3, 1, 0, 1], [20, 40, 3, 70], **shape, pad_tokens=2, pad_reqs=1))
    check_case(BACKEND, make_case([9, *[0] * 9], [40, *[0] * 9], **shape))  # T <= B, and no decode batch
    with overridden(DecodeConfig, block_n=16, chunk_min=16, wave=7 * 2 * 5):
        check_case(BACKEND, make_case([1] * 3, [1, 17, 150], **shape))
    assert set(chosen) == {4 if shape.get("head_dim_v", shape["head_dim"]) > 64 else 2}


@pytest.mark.parametrize("features", [dict(head_dim=65), dict(head_dim=67, layout="HND"), dict(head_dim=64, head_dim_v=63),
                                      dict(dtype=torch.float32), dict(head_dim=32), dict(num_heads=66)], ids=str)
def test_values_not_by_words(features, monkeypatch):
    chosen = by_words(monkeypatch)
    check_case(BACKEND, make_case([1, 1], [20, 70], **{**WORDS, **features}, kv_dtype=torch.int8))
    assert chosen == [0]


@pytest.mark.parametrize(("dim", "offset", "row", "page", "codes"), [
    (64, 1, 64, 512, 0), (64, 6, 64, 512, 2), (64, 4, 64, 512, 2), (64, 0, 65, 520, 0), (64, 0, 64, 513, 0),
    (128, 4, 128, 1024, 4), (128, 6, 128, 1024, 2), (128, 0, 130, 1040, 2), (128, 0, 128, 1026, 2), (128, 0, 129, 1032, 0)])
def test_values_by_words_only_where_words_lie(dim, offset, row, page, codes, monkeypatch):
    """A slice of a larger tensor may begin anywhere: a GPU loads a word of n bytes from a multiple of n bytes only."""
    chosen = by_words(monkeypatch)
    case = make_case([1, 1], [20, 70], **{**WORDS, "head_dim": dim}, kv_dtype=torch.int8)
    v = case.cache.v[0]
    case.cache.v[0] = torch.zeros(offset + len(v) * page, dtype=v.dtype, device=DEVICE).as_strided(
        v.shape, (page, 2 * row, row, 1), offset)
    case.cache.v[0].copy_(v)
    check_case(BACKEND, case)
    assert chosen == [codes]


@QUANT
@pytest.mark.parametrize("splits", [1, 7])
def test_quantized_bfloat16_of_any_size(splits, kv_dtype):
    """Decoding multiplies in float16: queries, keys and values that only bfloat16 can hold come out right, rows of all sizes
    beside each other."""
    case = make_case([1] * 3, [150, 40, 70], **{**WORDS, "dtype": torch.bfloat16}, kv_dtype=kv_dtype, write=False)
    cache, tiny = case.cache, torch.finfo(torch.float32).tiny
    torch.manual_seed(0)
    sizes = torch.tensor([1e-30, 1e-10, 1.0, 1e9, 1e25], device=DEVICE)
    case.q.copy_(torch.randn(case.q.shape, device=DEVICE) * sizes[torch.arange(case.q.shape[1]) % 5, None])
    keys = torch.randn(cache.k[0].shape, device=DEVICE) * 1e-25  # scores of the largest queries are of size 1
    of_row = sizes[torch.randint(5, cache.v[0].shape[:3])]
    of_row[case.metadata.block_table_tensor[1].long()] = 1e-10  # a sequence of small values, without larger ones
    values = torch.randn(cache.v[0].shape, device=DEVICE) * of_row[..., None]
    values[..., 3:7] *= tiny  # beside larger ones: codes of zero
    for tensor, codes, scales in ((keys, cache.k[0], cache.k_scale[0]), (values, cache.v[0], cache.v_scale[0])):
        made, scale = quantize(tensor, kv_dtype)
        codes.copy_(made), scales.copy_(scale)
    with overridden(DecodeConfig, block_n=16, chunk_min=16, wave=1000 if splits > 1 else 1):
        out = run_case(BACKEND, case).double()
    read = [codes[0].double() * scales[0].double()[..., None] for codes, scales in (
        (cache.k, cache.k_scale), (cache.v, cache.v_scale))]
    m = case.metadata
    for row, length in enumerate(m.seq_lens.tolist()):
        pages = m.block_table_tensor[row].long()
        k, v = (x[pages].flatten(0, 1)[:length] for x in read)
        for head in range(case.q.shape[1]):
            weights = torch.softmax(k[:, head // 4] @ case.q[row, head].double() * case.options["scale"], 0)
            expected, size = weights @ v[:, head // 4], (weights[:, None] * v[:, head // 4].abs()).amax()
            # weights in float16, the output in bfloat16; a sum of keys may cancel
            assert (out[row, head] - expected).abs().max() <= 2.0**-7 * size + 2.0**-8 * expected.abs().max()


@QUANT
@pytest.mark.parametrize("query_lens", [[1, 1], [5, 12]])
def test_quantized_infinity_reads_back_as_nan(query_lens, kv_dtype):
    """The kit does NaN."""
    for which in ("k", "v"):
        case = make_case(query_lens, [9, 17], **SMALL, kv_dtype=kv_dtype)
        last = query_lens[0] - 1
        (case.k if which == "k" else case.v)[last, 1, 3] = float("inf")
        out = run_case(BACKEND, case)
        assert out[last, 2:].isnan().all() and out[last, :2].isfinite().all() and out[query_lens[0] :].isfinite().all()
        slot = int(case.metadata.slot_mapping[last])
        scale = (case.cache.k_scale if which == "k" else case.cache.v_scale)[0][slot // 4, slot % 4]
        assert scale.isnan().tolist() == [False, True]
