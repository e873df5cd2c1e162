"""What a backend's record refuses a site for, and what ``define_paged_op`` registers."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from quire.attn_ops.backend import AttentionCapabilities, CudagraphSupport, define_paged_op
from quire.attn_ops.registry import get_backend
from tests.attn_ops.cases import EVERYTHING, SITE

CPU = torch.device("cpu")
FIXED = dict(fixed_scale_kv_dtypes=frozenset({torch.float8_e5m2}), kv_dtypes_note="one scale")


@pytest.mark.parametrize("site, capabilities, cache, reasons", [
    ({}, {}, {}, []),
    ({}, {}, dict(page_size=7, layout="HND", kv_dtype=torch.float32), []),
    ({}, dict(devices=frozenset({"cuda"})), {}, ["runs on cuda, not cpu"]),
    (dict(dtype=torch.bfloat16), dict(dtypes=frozenset({torch.float16, torch.float32})), {},
     ["dtype bfloat16 (has float16, float32)"]),
    ({}, {}, dict(kv_dtype=torch.float16), ["KV cache dtype float16 (has the model's own dtype only)"]),
    ({}, dict(kv_dtypes_note="codes are beyond it"), dict(kv_dtype=torch.int8),
     ["KV cache dtype int8 (has the model's own dtype only: codes are beyond it)"]),
    ({}, dict(kv_dtypes=frozenset({torch.float8_e4m3fn, torch.int8})), dict(kv_dtype=torch.float16),
     ["KV cache dtype float16 (has the model's own dtype, float8_e4m3fn, int8)"]),
    ({}, dict(kv_dtypes=frozenset({torch.float16})), dict(kv_dtype=torch.float16), []),
    ({}, dict(kv_dtypes=frozenset({torch.float16})), {}, []),
    ({}, FIXED, dict(kv_dtype=torch.float8_e5m2, fixed_scale=True), []),
    ({}, FIXED, dict(kv_dtype=torch.float8_e4m3fn, fixed_scale=True),
     ["KV cache of float8_e4m3fn with one fixed scale per layer, kv_scales (has float8_e5m2)"]),
    ({}, dict(kv_dtypes=frozenset({torch.float8_e5m2})), dict(kv_dtype=torch.float8_e5m2, fixed_scale=True),
     ["KV cache of float8_e5m2 with one fixed scale per layer, kv_scales (has none)"]),
    ({}, FIXED, dict(kv_dtype=torch.float8_e5m2),
     ["KV cache dtype float8_e5m2 (has the model's own dtype only: one scale; it serves one fixed scale per layer: give "
      "kv_scales=, a number or {layer: (of keys, of values)})"]),
    (dict(head_dim_v=32), dict(head_dims=lambda d, dv: d == dv, head_dims_note="equal"), {},
     ["head dims 64/32 (has equal)"]),
    ({}, dict(page_sizes=lambda p: p % 16 == 0, page_sizes_note="multiples of 16"), dict(page_size=8),
     ["page size 8 (has multiples of 16)"]),
    ({}, dict(layouts=frozenset({"NHD"})), dict(layout="HND"), ["KV layout HND (has NHD)"]),
    (dict(window=4), dict(window=False), {}, ["no window"]),
    (dict(softcap=4.0), dict(softcap=False), {}, ["no softcap"]),
    (dict(chunk=4), dict(chunk=False), {}, ["no chunk"]),
    (dict(sinks=True), dict(sinks=False), {}, ["no sinks"]),
    (dict(causal=False), dict(non_causal=False), {}, ["no non-causal attention"]),
    (dict(window=4, sinks=True), dict(window=False, sinks=False, layouts=frozenset()), dict(layout="NHD"),
     ["KV layout NHD (has none)", "no window", "no sinks"]),
])
def test_reasons(site, capabilities, cache, reasons) -> None:
    caps = AttentionCapabilities(**{**EVERYTHING, **capabilities})
    assert caps.reasons_against(dataclasses.replace(SITE, **site), device=CPU, **cache) == reasons


def test_compute_capability(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    caps = AttentionCapabilities(**EVERYTHING, min_compute_capability=(8, 0))
    assert caps.reasons_against(SITE, device=torch.device("cuda")) == ["needs compute capability 8.0, the GPU has 7.5"]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    caps = AttentionCapabilities(**EVERYTHING, kv_dtypes=frozenset({torch.float8_e4m3fn, torch.int8}),
                                 min_kv_compute_capability={torch.float8_e4m3fn: (8, 9)})
    cuda = torch.device("cuda")
    assert caps.reasons_against(SITE, device=cuda, kv_dtype=torch.float8_e4m3fn) == [
        "KV cache dtype float8_e4m3fn needs compute capability 8.9, the GPU has 8.0"]
    assert caps.reasons_against(SITE, device=cuda, kv_dtype=torch.int8) == caps.reasons_against(SITE, device=cuda) == []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    assert caps.reasons_against(SITE, device=cuda, kv_dtype=torch.float8_e4m3fn) == []
    assert isinstance(hash(caps), int)
    triton = get_backend("triton").capabilities
    assert triton.min_kv_compute_capability == {torch.float8_e4m3fn: (8, 9)}


def test_nothing_is_declared_by_default() -> None:
    """A new backend must say what it can do: a feature it forgets is refused."""
    caps = AttentionCapabilities(devices=frozenset({"cpu"}), dtypes=frozenset({torch.float32}))
    declared = [f.name for f in dataclasses.fields(caps) if getattr(caps, f.name) is True]
    assert declared == [] and caps.cudagraph_support is CudagraphSupport.NEVER


def test_define_paged_op() -> None:
    """The schema declares both caches and their scales as mutated; the fake gives (T, H, Dv)."""
    op = define_paged_op("for_test_backend", lambda q, k, v, k_cache, v_cache, *rest, **options: q, devices=("CPU",))
    assert op.name() == "quire::for_test_backend_paged_attention"
    written = [a.name for a in op._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    assert written == ["k_cache", "v_cache", "k_scale", "v_scale"]
    with torch._subclasses.FakeTensorMode():
        q, cache, table = torch.zeros(5, 4, 8), torch.zeros(9, 2, 1, 6), torch.zeros(1, dtype=torch.int32)
        out = op(q, None, None, cache, cache.clone(), None, None, table, table, table, table, None, [], scale=1.0,
                 window=None, softcap=None, chunk=None)
    assert out.shape == (5, 4, 6) and out.dtype == torch.float32


def test_a_record_that_contradicts_itself_is_refused() -> None:
    """At its definition, not when a model first runs through it."""
    base = get_backend("torch_native")
    for change, message in (({"mla_op": None}, "declares mla and has no mla_op"), ({"state_op": None}, "declares lse and has"),
                            ({"page_bytes": lambda site, page_size: 8}, "must see every step")):
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(base, **change)
