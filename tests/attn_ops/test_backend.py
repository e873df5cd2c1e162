"""The registry of backends, what a backend is refused for, and how one is chosen."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from quire.attn_ops import registry
from quire.attn_ops.attention import AttentionSite
from quire.attn_ops.backend import (
    AttentionBackend,
    AttentionCapabilities,
    CudagraphSupport,
    UnsupportedAttention,
    define_paged_op,
)
from quire.attn_ops.registry import all_backends, broken_backends, get_backend, register_backend
from quire.attn_ops.selection import select_backend

CPU = torch.device("cpu")
SITE = AttentionSite(layer=3, num_heads=8, num_kv_heads=2, head_dim=64, head_dim_v=64, dtype=torch.float32, scale=0.125,
                     name="model.layers.3.self_attn")
EVERYTHING = dict(devices=frozenset({"cpu", "cuda"}), dtypes=frozenset({torch.float32}), window=True, softcap=True,
                  sinks=True, chunk=True, non_causal=True)


def make(name, *, why=None, priority=None, **capabilities) -> AttentionBackend:
    return AttentionBackend(name, AttentionCapabilities(**{**EVERYTHING, **capabilities}), lambda device: why, op=None,
                            priority=priority)


@pytest.fixture
def entries(monkeypatch):
    """A function that puts a registry with these entry points, name=loader, in the place of the process's."""
    def given(**loaders):
        entries = [SimpleNamespace(name=name, load=load) for name, load in loaders.items()]
        monkeypatch.setattr(registry, "REGISTRY", registry.Registry(entries))

    return given


@pytest.fixture
def empty(entries):
    entries()


# The registry.


def test_our_own_backends_are_there() -> None:
    assert get_backend("torch_native").available(CPU) is None
    assert set(all_backends()) | set(broken_backends()) >= {"torch_native", "triton", "flashinfer"}


def test_third_party_backend(empty) -> None:
    mine = register_backend(make("mine"))
    assert get_backend("mine") is mine and list(all_backends()) == ["mine"]
    assert select_backend("mine", [SITE], device=CPU, page_size=16).backend is mine
    assert register_backend(mine) is mine  # a module that is loaded twice registers the same record
    with pytest.raises(ValueError, match="named 'mine' is registered already; choose another name"):
        register_backend(make("mine"))


def test_third_party_entry_point(entries) -> None:
    mine = make("mine", priority={"cpu": -1})
    entries(mine=lambda: mine, other=lambda: make("other", priority={"cpu": 3}))
    assert all_backends()["mine"] is mine and list(all_backends()) == ["mine", "other"]
    assert select_backend("auto", [SITE], device=CPU, page_size=16).backend is mine


def test_a_broken_entry_point_is_reported_not_raised(entries) -> None:
    def fail():
        raise ImportError("libmagic.so.1: cannot open shared object file")

    entries(magic=fail, other=lambda: make("other"))
    assert list(all_backends()) == ["other"]
    assert broken_backends()["magic"] == "failed to load: ImportError: libmagic.so.1: cannot open shared object file"
    with pytest.raises(ValueError, match="unknown attention backend 'magic'.*magic failed to load: ImportError: libm"):
        get_backend("magic")


def test_an_entry_point_cannot_take_a_name_that_is_taken(entries) -> None:
    entries(first=lambda: make("taken"), second=lambda: make("taken"))
    assert "registered already" in broken_backends()["second"] and list(all_backends()) == ["taken"]


def test_unknown_name(empty) -> None:
    register_backend(make("one"))
    register_backend(make("two"))
    with pytest.raises(ValueError, match="unknown attention backend 'three'; there are: auto, one, two$"):
        get_backend("three")
    with pytest.raises(ValueError, match="unknown attention backend 'three'"):
        select_backend("three", [SITE], device=CPU, page_size=16)


def test_backends_load_lazily_and_without_a_gpu() -> None:
    """Importing the registry imports no kernels; loading every backend starts no CUDA context."""
    code = ("import sys, torch, quire.attn_ops.registry as b; assert 'triton' not in sys.modules; "
            "b.all_backends(); assert not torch.cuda.is_initialized()")
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


# What a site is refused for.


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


def test_compute_capability_of_a_kv_dtype(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
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


# Selection.


def test_auto_walks_by_priority(empty) -> None:
    """Lowest first; without a priority for the device a backend is not tried; the reasons of those before are kept."""
    for b in (make("slow", priority={"cpu": 9}), make("absent", why="not installed (pip install it)",
                                                      priority={"cpu": 1}),
              make("no_sinks", priority={"cpu": 2}, sinks=False), make("unranked"), make("gpu", priority={"cuda": 0})):
        register_backend(b)
    chosen = select_backend("auto", [SITE], device=CPU, page_size=16)
    assert chosen.backend.name == "no_sinks"
    assert chosen.passed_over == {"absent": ["not installed (pip install it)"]}
    chosen = select_backend("auto", [SITE, dataclasses.replace(SITE, sinks=True)], device=CPU, page_size=16)
    assert str(chosen) == ("slow; absent passed over: not installed (pip install it); no_sinks passed over: no sinks")


def test_one_site_out_of_many_decides(empty) -> None:
    register_backend(make("no_window", priority={"cpu": 0}, window=False))
    sites = [SITE, dataclasses.replace(SITE, layer=7, name="model.layers.7.attn", window=128)]
    with pytest.raises(UnsupportedAttention) as error:
        select_backend("auto", sites, device=CPU, page_size=16)
    assert str(error.value) == (
        "attention='auto' cannot serve this model on cpu with page_size=16. attention site 7 (model.layers.7.attn) "
        "needs GQA 8:2x64, float32, window=128. Why not:\n  no_window: no window")


def test_a_forced_backend_that_does_not_fit_says_who_does(empty) -> None:
    register_backend(make("bad", page_sizes=lambda p: False, page_sizes_note="none", layouts=frozenset({"NHD"})))
    register_backend(make("good", priority={"cpu": 0}))
    register_backend(make("also_bad", why="no GPU"))
    with pytest.raises(UnsupportedAttention) as error:
        select_backend("bad", [SITE], device=CPU, page_size=16, layout="HND")
    assert str(error.value) == (
        "attention='bad' cannot serve this model on cpu with page_size=16. attention site 3 (model.layers.3.self_attn) "
        "needs GQA 8:2x64, float32. Why not:\n  bad: page size 16 (has none); KV layout HND (has NHD)"
        "\nCan serve it here: good (or attention='auto').")


def test_a_forced_backend_is_never_replaced(empty) -> None:
    register_backend(make("absent", why="install it"))
    register_backend(make("there", priority={"cpu": 0}, window=False))
    with pytest.raises(UnsupportedAttention, match="absent: install it\nNo other backend here can serve it."):
        select_backend("absent", [dataclasses.replace(SITE, window=4)], device=CPU, page_size=16)


def test_no_candidate_at_all(empty) -> None:
    with pytest.raises(UnsupportedAttention, match="attention='auto' cannot serve this model on cpu"):
        select_backend("auto", [SITE], device=CPU, page_size=16)


# Registering an op.


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
