"""Backends made of backends: each step, or each layer, goes to the part that it is meant for, and what the parts cannot is
refused with the part's name."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch

import quire
from quire import CudagraphSupport, UnsupportedAttention, check_backend, define_paged_op
from quire.attn_ops.attention import Latent
from quire.attn_ops.backends import hybrid, per_kind, torch_native
from quire.attn_ops.composite import attention_name
from quire.attn_ops.conformance.batches import lay_out, prepared
from quire.attn_ops.conformance.batches import planned as in_step
from quire.attn_ops.kernels.launch import recording
from quire.attn_ops.ops.rope import rotate
from quire.attn_ops.registry import get_backend, register_backend
from quire.attn_ops.selection import select_backend
from tests.attn_ops.cases import SITE as SITE_3
from tests.attn_ops.cases import make_backend, pass_kit

SITE = dataclasses.replace(SITE_3, layer=0)
CPU = torch.device("cpu")
NATIVE = torch_native.BACKEND
calls: list[str] = []


def counted(name: str):
    def op(*args, **options):
        calls.append(name)
        assert isinstance(args[12], list) and len(args[12]) == (0 if name == "plain_part" else 3)
        return torch_native.paged_attention(*args, **options)
    return op


def rope_op(q, k, v, cos, sin, q_norm, k_norm, eps, *args, **options):
    calls.append("rope")
    return torch_native.paged_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, *args, **options)


planned: list[list] = []
FAST = dataclasses.replace(NATIVE, name="fast_part", op=define_paged_op("fast_part_for_test", counted("fast_part")),
                           rope_op=define_paged_op("fast_part_for_test", rope_op, rope=True))
PLAIN = dataclasses.replace(
    NATIVE, name="plain_part", op=define_paged_op("plain_part_for_test", counted("plain_part")), prepare=None, priority=None,
    make_state=lambda sites, cache, limits: SimpleNamespace(sites=sites),
    plan=lambda metadata, step: planned.append(step.states["plain_part"].sites),
    capabilities=dataclasses.replace(NATIVE.capabilities, cudagraph_support=CudagraphSupport.UNIFORM_SINGLE_TOKEN_DECODE))


@pytest.fixture(autouse=True)
def parts(entries) -> None:
    entries(**{m.FAMILY.name: lambda m=m: m.FAMILY for m in (hybrid, per_kind)})
    for backend in (FAST, PLAIN, NATIVE):
        register_backend(backend)
    calls.clear()
    planned.clear()


@pytest.mark.parametrize("only", ["feature", *(pytest.param(only, marks=pytest.mark.slow) for only in ("", "opcheck"))])
@pytest.mark.parametrize("name", ["hybrid:plain_part+fast_part", "full=plain_part,window=fast_part"])
def test_a_composite_passes_the_kit(name: str, only: str) -> None:
    pass_kit(get_backend(name), only)
    assert {"plain_part", "fast_part"} <= set(calls) and planned and ("rope" in calls or only)


def test_prefill_and_decode() -> None:
    backend = get_backend("hybrid:plain_part+fast_part")
    assert get_backend("hybrid:plain_part+fast_part") is backend
    check_backend(backend, only="decode batch")
    assert set(calls) == {"fast_part"} and not planned
    calls.clear()
    check_backend(backend, only="prefill batch")
    assert set(calls) == {"plain_part"} and planned
    assert backend.capabilities.cudagraph_support is CudagraphSupport.ALWAYS  # of the part that decodes
    assert get_backend("hybrid:plain_part+plain_part").capabilities.cudagraph_support < CudagraphSupport.ALWAYS
    assert backend.serves(SITE) == "plain_part_paged_attention / fast_part_paged_attention"


def test_latent_layers_go_to_the_part_that_is_meant_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """MLA on the latent cache, where both parts have it; else it is refused, and with it the smaller cache."""
    def counted_mla(name):
        def op(*args, scale):
            calls.append(name)
            return torch_native.mla_paged_attention(*args, scale=scale)
        return op

    one, two = (dataclasses.replace(NATIVE, name=f"latent_{name}", prepare=prepare, mla_op=counted_mla(name),
                                    capabilities=dataclasses.replace(NATIVE.capabilities, latent_kv_dtypes=kv))
                for name, prepare, kv in (("one", None, frozenset()), ("two", NATIVE.prepare, frozenset({torch.int8}))))
    for backend in (one, two, dataclasses.replace(NATIVE, name="dense", mla_op=None, capabilities=dataclasses.replace(
            NATIVE.capabilities, mla=False)),
            dataclasses.replace(two, name="latent_only", op=None, rope_op=None, capabilities=dataclasses.replace(
                two.capabilities, head_dims=lambda dim, dim_v: False))):
        register_backend(backend)
    backend = get_backend("hybrid:latent_one+latent_two")
    for check, part in (("MLA: steps made ahead", "two"), ("MLA: long prefills", "one")):
        calls.clear()
        (result,) = check_backend(backend, only=check)
        assert result.status == "ok" and set(calls) == {part}, result
    (result,) = check_backend(get_backend("full=latent_two"), only="MLA: KV cache int8")
    assert result.status == "ok" and not result.detail
    latent = dataclasses.replace(SITE, num_kv_heads=SITE.num_heads, latent=Latent(16, 8))
    assert "refused" in check_backend(backend, only="MLA: KV cache int8")[0].detail
    assert get_backend("hybrid:dense+latent_two").capabilities.reasons_against(latent, device=CPU) == [
        "no MLA on the latent cache, which all its backends must have"]
    for name in ("hybrid:latent_one+latent_only", "full=latent_only"):  # the kit asks for MLA, and for nothing else
        results = check_backend(get_backend(name), quick=True)
        assert len(results) > 5 and all(r.check.startswith("MLA: ") and r.status != "FAIL" for r in results), results
        assert get_backend(name).capabilities.reasons_against(SITE, device=CPU)


@pytest.mark.parametrize("name, lens, parts_of", [
    ("plain_part+fast_part", [3, 1], {"a graph": "fast_part", None: "plain_part"}),
    ("fast_part+plain_part", [3, 1], {"a graph": "fast_part", None: "fast_part"}),
    ("fast_part+plain_part", [1, 1], {"a graph": "plain_part", None: "plain_part"})], ids=str)
def test_a_step_with_a_graph_goes_to_the_part_that_decodes(name, lens, parts_of) -> None:
    """Else a mixed batch would be captured with kernels whose plan cannot be replayed. The other part does not even plan.
    Graphs that the decoding part lacks are those of the other, so that mixed steps are captured too."""
    backend = get_backend(f"hybrid:{name}")
    assert backend.capabilities.cudagraph_support is CudagraphSupport.ALWAYS
    batch = lay_out(SITE, lens, [5, 4], page_size=4)
    for key, part in parts_of.items():
        calls.clear()
        planned.clear()
        with in_step(backend, batch, graph_key=key):
            backend.op(*batch.arguments(prepared(backend, batch)), **batch.options)
        assert calls == [part] and bool(planned) == (part == "plain_part")


def test_kernels_of_all_parts_are_compiled_ahead() -> None:
    backend = get_backend("hybrid:plain_part+fast_part")
    batch = lay_out(SITE, [1, 1], [5, 4], page_size=4)
    with recording():
        backend.op(*batch.arguments(prepared(backend, batch)), **batch.options)
    assert set(calls) == {"plain_part", "fast_part"}


def test_by_kind_of_layer() -> None:
    backend = get_backend({"window": "fast_part", "full": "plain_part"})
    assert backend.name == "full=plain_part,window=fast_part"
    windowed = dataclasses.replace(SITE, window=8)
    assert [backend.serves(s) for s in (SITE, windowed)] == ["plain_part_paged_attention", "fast_part_paged_attention"]
    with pytest.raises(UnsupportedAttention, match="no backend is named for layers of kind 'chunk'"):
        select_backend(backend, [dataclasses.replace(SITE, chunk=4)], device=CPU, page_size=4)
    nested = get_backend("full=hybrid:plain_part+fast_part,window=torch_native")
    assert nested.serves(SITE) == "plain_part_paged_attention / fast_part_paged_attention"


def test_refusals_name_the_part() -> None:
    register_backend(make_backend("no_sinks", sinks=False))
    register_backend(make_backend("absent", why="not installed (pip install it)"))
    for name in ("hybrid:fast_part+no_sinks", "full=no_sinks,window=fast_part"):
        with pytest.raises(UnsupportedAttention, match="no_sinks: no sinks"):
            select_backend(name, [dataclasses.replace(SITE, sinks=True)], device=CPU, page_size=4)
    with pytest.raises(UnsupportedAttention, match=r"absent: not installed \(pip install it\)"):
        select_backend("hybrid:absent+fast_part", [SITE], device=CPU, page_size=4)


@pytest.mark.parametrize("name", ["full=plain_part,window=hybrid:plain_part+fast_part",
                                  "hybrid:plain_part+full=plain_part", "full=hybrid:fast_part+plain_part,window=plain_part"])
def test_a_state_that_two_parts_would_have(name: str) -> None:
    with pytest.raises(UnsupportedAttention, match="plain_part keeps a state for each step, and two of the parts have it"):
        get_backend(name)


@pytest.mark.parametrize("name, message", [
    ("hybrid:fast_part", "write hybrid:PREFILL"), ("hybrid", "write hybrid:PREFILL"), ("hybrid:a+b+c", "write hybrid:PREFILL"),
    ("hybrid:fast_part+nobody", "unknown attention backend 'nobody'; there are: auto, fast_part"),
    ("full=fast_part,full=plain_part", "at most once"), ("half=fast_part", "write full=NAME"), ("full=", "write full=NAME"),
    ("full=auto,window=fast_part", "name a backend for each kind"),
    ({"half": "fast_part"}, "'half' is none"), ({}, "give a backend for some"), ("nobody", "hybrid:PREFILL"),
])
def test_bad_names(name, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        get_backend(name)


def test_auto_takes_one_for_each_kind_where_none_serves_all() -> None:
    register_backend(make_backend("windows", priority={"cpu": -2}, non_causal=False))
    register_backend(make_backend("fulls", priority={"cpu": -1}, window=False))
    hidden = dataclasses.replace(NATIVE.capabilities, dtypes=frozenset({torch.bfloat16}))
    for name in ("torch_native", "fast_part"):
        quire.attn_ops.registry.REGISTRY._backends[name] = dataclasses.replace(NATIVE, name=name, capabilities=hidden)
    sites = [dataclasses.replace(SITE, causal=False), dataclasses.replace(SITE, layer=1, window=4)]
    chosen = select_backend("auto", sites, device=CPU, page_size=4)
    assert chosen.backend.name == "full=fulls,window=windows"
    assert chosen.why == "no backend serves all layers: the first one for each kind of layer"
    assert chosen.passed_over["fulls"] == ["no window"]


def test_names() -> None:
    assert attention_name({"window": "b", "full": "a"}) == "full=a,window=b" and attention_name("auto") == "auto"
    assert "hybrid:PREFILL+DECODE" in str(quire.backends("cpu"))
