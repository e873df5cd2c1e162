"""The conformance kit: it passes a right backend, and catches each way to be wrong."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from quire.attn_ops.attention import AttentionSite
from quire.attn_ops.backend import AttentionBackend, AttentionCapabilities, CudagraphSupport, define_paged_op
from quire.attn_ops.backends import torch_native
from quire.attn_ops.conformance import checks
from quire.attn_ops.conformance.batches import reference
from quire.attn_ops.conformance.checks import MIXED, Kit
from quire.attn_ops.conformance.report import check_backend
from quire.attn_ops.kv_quant import dequantize, quantize
from quire.attn_ops.ops.rope import rotate
from quire.attn_ops.registry import get_backend
from quire.attn_ops.step import current_step
from tests.attn_ops.oracle import oracle_attention

#: Without MLA and states, whose checks have tests of their own (tests/attn_ops/test_mla.py, test_states.py).
NATIVE = dataclasses.replace(get_backend("torch_native"), mla_op=None, state_op=None, capabilities=dataclasses.replace(
    get_backend("torch_native").capabilities, mla=False, lse=False))
NAMES = ("q", "k", "v", "k_cache", "v_cache", "k_scale", "v_scale", "slot_mapping", "block_table", "query_start_loc",
         "seq_lens", "sinks", "prepared")


def broken(change: Callable[[dict], object], **capabilities) -> AttentionBackend:
    """torch_native, after ``change`` has spoilt the op's arguments; what it returns, unless None, is the result."""

    def op(*args, **options):
        given = {**dict(zip(NAMES, args, strict=True)), **options}
        result = change(given)
        return result if result is not None else torch_native.paged_attention(**given)

    caps = dataclasses.replace(NATIVE.capabilities, **capabilities)
    return dataclasses.replace(NATIVE, name="broken", op=op, capabilities=caps)


def statuses(backend: AttentionBackend, only: str = "", **options) -> dict[str, str]:
    """Results by check, without that of ``opcheck``, which needs a registered op and takes longer than all others."""
    with mock.patch.object(Kit, "opcheck", lambda kit: "left out"):
        return {r.check: r.status for r in check_backend(backend, only=only, quick=True, **options) if r.check != "opcheck"}


def failures(backend: AttentionBackend, only: str = "") -> set[str]:
    return {name for name, status in statuses(backend, only).items() if status == "FAIL"}


@pytest.mark.parametrize("way, status", [(1, "ok"), (-1, "FAIL"), (0, "FAIL")])
def test_rope_op(way: int, status: str) -> None:
    """Rotating the wrong way, or not at all, is seen."""
    def rope_op(q, k, v, cos, sin, q_norm, k_norm, eps, *args, **options):
        if way:
            q, k = rotate(q, cos, way * sin), rotate(k, cos, way * sin)
        return torch_native.paged_attention(q, k, v, *args, **options)

    assert statuses(dataclasses.replace(NATIVE, rope_op=rope_op), "rotary") == {"rotary embedding (rope_op)": status}


@pytest.mark.parametrize("honoured, declared, status", [
    (("interleaved", "half_tables"), True, "ok"), ((), False, "ok"), (("interleaved",), True, "FAIL"),
    (("half_tables",), True, "FAIL")], ids=str)
def test_rope_forms(honoured: tuple[str, ...], declared: bool, status: str) -> None:
    """A form that is declared and not honoured is seen; what is not declared is not asked for."""
    def rope_op(q, k, v, cos, sin, q_norm, k_norm, eps, *args, interleaved=False, half_tables=False, **options):
        given = dict(interleaved=interleaved, half_tables=half_tables)
        form = {name: flag for name, flag in given.items() if name in honoured}
        if half_tables and "half_tables" not in honoured:
            cos, sin = cos.repeat(1, 2), sin.repeat(1, 2)  # the wrong way, for neighbours
        q, k = rotate(q, cos, sin, **form), rotate(k, cos, sin, **form)
        return torch_native.paged_attention(q, k, v, *args, **options)

    backend = dataclasses.replace(NATIVE, rope_op=rope_op, rope_forms=declared)
    assert statuses(backend, "rotary") == {"rotary embedding (rope_op)": status}


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("features", [dict(), dict(window=3), dict(softcap=2.0), dict(chunk=4),
                                      dict(window=5, softcap=3.0, chunk=8)], ids=str)
def test_the_reference_is_the_oracle(features, sinks) -> None:
    """The kit compares with the eager op; the oracle, plain loops, is written apart from it."""
    torch.manual_seed(0)
    q, keys, values, column = torch.randn(5, 4, 8), torch.randn(13, 2, 8), torch.randn(13, 2, 6), torch.randn(4)
    site = AttentionSite(0, 4, 2, 8, 6, torch.float32, 0.3, sinks=sinks, **features)
    expected = oracle_attention(q, keys, values, scale=0.3, sinks=column if sinks else None, **features)
    got = reference(site, q, keys, values, column if sinks else None, rows=2)
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)


# A right backend.


@pytest.mark.parametrize(("dtype", "quick"), [
    (torch.float32, True), *(pytest.param(*each, marks=pytest.mark.slow) for each in (
        (torch.float32, False), (torch.bfloat16, True), (torch.float16, True)))])
def test_torch_native_passes(dtype, quick) -> None:
    only = "" if dtype == torch.float32 else "ch"  # those with batch, chunk, ...
    results = check_backend(NATIVE, "cpu", dtype, only=only, quick=quick)
    assert not [r for r in results if r.status == "FAIL"]
    skipped = {r.check: r.detail for r in results if r.status == "skip"}
    if dtype == torch.float32:
        assert skipped == {"rotary embedding (rope_op)": "it has no rope_op; a kernel before it rotates", **dict.fromkeys(
            ["no synchronization", "CUDA graph of a decode batch", "CUDA graph of a mixed batch"], "a cpu has none")}


# Wrong ones.


def spoil(**changes):
    def change(given):
        for name, function in changes.items():
            given[name] = function(given)

    return change


def write_padding_to_slot_0(given):
    """Slot -1 read as slot 0: a kernel that clamps."""
    if given["k"] is not None:
        for name in ("k", "v"):
            cache, live = given[f"{name}_cache"], given["slot_mapping"] < 0
            if live.any():
                cache[0, 0] = given[name][live][0]


def write_one_slot_too_many(given):
    slots = given["slot_mapping"]
    if len(slots) and given["k"] is not None and slots.max() >= 0:
        size, last = given["k_cache"].shape[1], int(slots.max()) + 1
        if last // size < given["k_cache"].shape[0]:
            given["k_cache"][last // size, last % size] = 0.0


def no_zeros_for_padding(given):
    out = torch_native.paged_attention(**given)
    live = int(given["query_start_loc"][-1])
    out[live:] = 1.0
    return out


def leak_garbage(given):
    """0 * NaN: the values past a sequence's end take part with weight zero."""
    out = torch_native.paged_attention(**given)
    pages = given["block_table"].long().flatten()
    return out + 0 * given["v_cache"][pages].sum()


def leak_from_others(given):
    """0 * NaN from the first sequence's values, in the output of every other one."""
    out = torch_native.paged_attention(**given)
    values = given["v_cache"][given["block_table"][0].long()].flatten(0, 1)[: int(given["seq_lens"][0])]
    return out + 0 * values.sum()


def other_heads(given):
    """Query head h reads key head h % Hkv."""
    kv_heads = given["k_cache"].shape[2]
    if kv_heads > 1:
        given["q"] = given["q"][:, torch.arange(given["q"].shape[1]).view(kv_heads, -1).T.flatten()]


def edge_in_extend_only(feature):
    """Wrong only where a window or chunk is a page and one, and only for several tokens at once."""
    def change(given):
        if given[feature] == given["k_cache"].shape[1] + 1 and len(given["q"]) > len(given["seq_lens"]):
            given[feature] += 1

    return change


def write_though_shared(given):
    for name in ("k", "v"):
        if given[name] is None:
            given[name] = torch.zeros_like(given["q"][:, : given["k_cache"].shape[2]])


WRONG = {
    "window_off_by_one": (spoil(window=lambda g: g["window"] and g["window"] + 1), {"feature window", "features together"}),
    "no_softcap": (spoil(softcap=lambda g: None), {"feature softcap", "features together"}),
    "no_chunk": (spoil(chunk=lambda g: None), {"feature chunk", "features together"}),
    "no_sinks": (spoil(sinks=lambda g: None), {"feature sinks", "features together"}),
    "scale": (spoil(scale=lambda g: 1.0), {"decode batch", "mixed batch"}),
    "functional": (spoil(k_cache=lambda g: g["k_cache"].clone(), v_cache=lambda g: g["v_cache"].clone()),
                   {"decode batch", "mixed batch", "prefill batch"}),
    "slot_minus_one": (write_padding_to_slot_0, {"padding"}),
    "one_slot_more": (write_one_slot_too_many, {"decode batch", "mixed batch"}),
    "one_key_more": (spoil(seq_lens=lambda g: torch.where(g["seq_lens"] > 0, g["seq_lens"] + 1, 0), prepared=lambda g: []),
                     {"decode batch", "mixed batch"}),
    "padding_not_zero": (no_zeros_for_padding, {"padding", "stale metadata in padding"}),
    "nan": (leak_garbage, {"garbage in unused slots"}), "nan_of_others": (leak_from_others, {"garbage in unused slots"}),
    "window_of_one": (spoil(window=lambda g: g["window"] if g["window"] != 1 else 2), {"feature window"}),
    "long_chunk": (spoil(chunk=lambda g: g["chunk"] if g["chunk"] != 29 else None), {"feature chunk"}),
    "window_edge": (edge_in_extend_only("window"), {"windows at page boundaries"}),
    "chunk_edge": (edge_in_extend_only("chunk"), {"chunks at page boundaries"}),
    "page_order": (spoil(block_table=lambda g: g["block_table"].sort(dim=1, descending=True).values),
                   {"decode batch", "mixed batch"}),
    "writes_when_shared": (write_though_shared, {"shared cache (no k, v)"}),
    "grouped_heads": (other_heads, {"decode batch", "query heads per key head"}),
    "dtype": (lambda g: torch_native.paged_attention(**g).double(), {"decode batch"}),
    "shape": (lambda g: torch_native.paged_attention(**g)[:-1], {"decode batch", "padding"}),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_broken_backend_fails(name) -> None:
    change, caught_by = WRONG[name]
    assert caught_by <= set().union(*(failures(broken(change), check) for check in caught_by))


BY_TOKEN = {"KV cache int8", "KV cache float8_e4m3fn", "KV cache float8_e5m2"}
FIXED = {"KV cache float8_e4m3fn, fixed scale", "KV cache float8_e5m2, fixed scale"}


def scale_of_one(given):
    """Codes without their scales: what an fp8 cache without calibration does."""
    if given["k_scale"] is not None and given["k"] is not None:
        torch_native.paged_attention(**given)
        given["k_scale"][given["k_scale"] != 0] = 1.0
        given["k"] = given["v"] = None


def newest_as_it_was(given):
    """The step's own keys and values are attended to before they are rounded, and rounded in the cache."""
    if given["k_scale"] is not None and given["k"] is not None:
        exact = {**given, "k_scale": None, "v_scale": None}
        for name in ("k", "v"):
            exact[f"{name}_cache"] = dequantize(given[f"{name}_cache"], given[f"{name}_scale"])
        torch_native.paged_attention(**given)
        return torch_native.paged_attention(**exact)


def hide_nan(given):
    for name in ("k", "v"):
        if given["k_scale"] is not None and given[name] is not None:
            given[name] = given[name].nan_to_num(nan=0.0)


def truncate(given):
    """Codes rounded towards zero."""
    if given["k_scale"] is not None and given["k"] is not None:
        codes, scale = quantize(given["k"], given["k_cache"].dtype)
        exact = given["k"].float() / scale[..., None]
        given["k"] = (exact.trunc() * scale[..., None]).to(given["k"].dtype)


@pytest.mark.parametrize("change", [scale_of_one, newest_as_it_was, hide_nan, truncate], ids=lambda f: f.__name__)
def test_a_backend_that_quantizes_in_its_own_way_fails(change) -> None:
    assert failures(broken(change), "KV cache") == BY_TOKEN | FIXED


QUANTIZED = pytest.mark.parametrize("kv_dtype", [torch.int8, pytest.param(torch.float8_e4m3fn, marks=pytest.mark.slow)])


@pytest.mark.slow
@QUANTIZED
def test_all_checks_on_a_quantized_cache(kv_dtype) -> None:
    results = check_backend(NATIVE, "cpu", kv_dtype=kv_dtype, quick=True)
    assert {r.status for r in results} == {"ok", "skip"} and len(results) > 30


@QUANTIZED
def test_a_spoilt_backend_fails_on_a_quantized_cache(kv_dtype) -> None:
    (result,) = check_backend(NATIVE, "cpu", only="feature window", kv_dtype=kv_dtype)
    assert result.status == "ok"
    only = check_backend(broken(spoil(window=lambda g: None)), "cpu", only="feature window", kv_dtype=kv_dtype)
    assert [r.status for r in only] == ["FAIL"]
    (result,) = check_backend(broken(lambda given: None, kv_dtypes=frozenset()), "cpu", kv_dtype=kv_dtype)
    assert result.status == "FAIL" and result.detail == f"KV cache dtype {kv_dtype} is not declared"


def test_only_the_spoilt_feature_fails() -> None:
    assert failures(broken(spoil(window=lambda g: None))) == {
        "feature window", "windows at page boundaries", "real shapes: window", "real shapes: together",
        "features together", "garbage in unused slots", "the last tokens of a step",  # all features
        *BY_TOKEN, *FIXED}


def test_wrong_with_one_layout_only() -> None:
    def change(given):
        if given["k_cache"].stride(1) < given["k_cache"].stride(2):
            given["v_cache"] = given["v_cache"].flip(1)

    assert "layout HND" in failures(broken(change), "layout") and "layout NHD" not in failures(broken(change), "layout")


def test_an_exception_is_a_failure_with_its_place() -> None:
    def change(given):
        raise ZeroDivisionError("kernel")

    (result,) = check_backend(broken(change), only="decode batch")[:1]
    assert result.status == "FAIL" and result.detail.startswith("ZeroDivisionError: kernel (")
    assert "test_kit.py:" in result.detail


def test_undeclared_features_must_be_refused() -> None:
    plain = broken(lambda given: None, window=False, sinks=False, kv_dtypes=frozenset({torch.float8_e5m2}),
                   fixed_scale_kv_dtypes=frozenset({torch.float8_e5m2}),
                   layouts=frozenset({"NHD"}),
                   page_sizes=lambda p: p == 16, page_sizes_note="16")
    results = {r.check: r for r in check_backend(plain, quick=True)}
    assert not [r for r in results.values() if r.status == "FAIL" and r.check != "opcheck"]
    assert results["KV cache float8_e5m2"].detail == ""
    for name in ("feature window", "feature sinks", "layout HND", "page size 4", "KV cache int8",
                 "KV cache float8_e4m3fn, fixed scale"):
        assert results[name].detail == "not declared: refused"

    class Careless(AttentionCapabilities):
        def reasons_against(self, site, **options):
            return []

    fields = {f.name: getattr(plain.capabilities, f.name) for f in dataclasses.fields(AttentionCapabilities)}
    careless = dataclasses.replace(plain, capabilities=Careless(**fields))
    assert {"feature window", "feature sinks", "layout HND", "page size 4", "non-causal",
            "KV cache int8", "KV cache float8_e4m3fn, fixed scale"} <= failures(careless)
    assert "non-causal" in failures(broken(lambda given: None, non_causal=True), "non-causal")


def test_opcheck_catches_an_undeclared_mutation() -> None:
    """An op that changes its queries: numbers and cache are right, the schema is a lie."""
    def op(q, *rest, **options):
        out = torch_native.paged_attention(q, *rest, **options)
        q.add_(1)
        return out

    liar = dataclasses.replace(NATIVE, name="liar", op=define_paged_op("liar_for_test", op, devices=("CPU",)))
    (result,) = check_backend(liar, only="opcheck")
    assert result.status == "FAIL" and "q is not defined as mutable but was mutated" in result.detail


# State, plan, and CUDA graphs.


def test_a_backend_that_plans() -> None:
    """Its state is made for the batch's limits, its plan runs once per step, and the op finds both in the step."""
    plans = []

    def make_state(sites, cache, limits):
        assert isinstance(sites[0], AttentionSite) and cache.num_layers == 1
        return {"limits": limits}

    def plan(metadata, step):
        assert current_step() is step and step.states["planner"]["limits"].max_num_tokens == metadata.num_tokens
        plans.append(metadata)
        step.states["planner"]["planned"] = metadata

    def op(*args, **options):
        step = current_step()
        assert step.states["planner"]["planned"] is step.metadata
        return torch_native.paged_attention(*args, **options)

    planner = dataclasses.replace(NATIVE, name="planner", op=op, make_state=make_state, plan=plan)
    assert {r.status for r in check_backend(planner, only="batch")} == {"ok", "skip"}
    assert plans


def test_graphs_are_skipped_with_the_reason() -> None:
    never = broken(lambda given: None, cudagraph_support=CudagraphSupport.NEVER)
    assert [r.detail for r in check_backend(never, only="CUDA graph")] == ["the backend declares NEVER"] * 2
    decode = broken(lambda given: None, cudagraph_support=CudagraphSupport.UNIFORM_SINGLE_TOKEN_DECODE)
    assert [r.detail for r in check_backend(decode, only="CUDA graph")] == [
        "a cpu has none", "the backend declares UNIFORM_SINGLE_TOKEN_DECODE"]


class Graph:
    """A CUDA graph on a CPU: a replay runs ``forward`` again, on the arguments of the capture."""

    forward: Callable[[], torch.Tensor]
    out: torch.Tensor

    def replay(self) -> None:
        self.out.copy_(Graph.forward())


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = SimpleNamespace(wait_stream=lambda other: None)
    for name, value in (("CUDAGraph", Graph), ("current_stream", lambda device: stream), ("stream", nullcontext),
                        ("graph", lambda graph, stream: nullcontext())):
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(checks, "side_stream", lambda device: nullcontext(stream))
    monkeypatch.setattr(Kit, "need_cuda", lambda self: None)


@pytest.mark.parametrize("kv_dtype", [None, torch.int8])
@pytest.mark.parametrize("kept", [(), ("seq_lens",), ("slot_mapping",), ("block_table",), ("query_start_loc", "q")], ids=str)
def test_graphs_that_keep_what_they_were_captured_with_fail(graphs, kept, kv_dtype) -> None:
    def op(*args, **options):
        given = {**dict(zip(NAMES, args, strict=True)), **options}
        given |= {name: given[name].clone() for name in kept}
        Graph.forward = lambda: torch_native.paged_attention(**given)
        Graph.out = Graph.forward()
        return Graph.out

    backend = dataclasses.replace(NATIVE, op=op, prepare=None)
    found = {r.check: r.status for r in check_backend(backend, only="CUDA graph", kv_dtype=kv_dtype)}
    assert list(found.values()) == ["FAIL" if kept else "ok"] * 2, found


@pytest.mark.parametrize("change, dtype, detail", [
    (dict(available=lambda device: "needs a left-handed GPU"), None, "needs a left-handed GPU"),
    (dict(capabilities=dataclasses.replace(NATIVE.capabilities, devices=frozenset({"cuda"}))), None, "runs on cuda"),
    (dict(), torch.float64, "dtype torch.float64 is not declared"),
    (dict(capabilities=dataclasses.replace(NATIVE.capabilities, head_dims=lambda d, dv: d == 7)), None, "no head dims"),
    (dict(capabilities=dataclasses.replace(NATIVE.capabilities, page_sizes=lambda p: p == 7)), None, "no page size among"),
    (dict(capabilities=dataclasses.replace(NATIVE.capabilities, layouts=frozenset())), None, "no layout is declared"),
])
def test_a_backend_that_cannot_be_checked_fails(change, dtype, detail) -> None:
    (result,) = check_backend(dataclasses.replace(NATIVE, **change), "cpu", dtype)
    assert result.status == "FAIL" and detail in result.detail


def test_codes_read_as_numbers_are_seen() -> None:
    """An op that takes a quantized cache it does not declare, and ignores the scales, is caught where it is called."""
    def no_scales(given):
        k_cache, v_cache = (given[n].float() for n in ("k_cache", "v_cache"))
        return torch_native.paged_attention(**{**given, "k": None, "v": None, "k_cache": k_cache, "v_cache": v_cache,
                                               "k_scale": None, "v_scale": None})

    (result,) = check_backend(broken(no_scales, kv_dtypes=frozenset()), only="KV cache int8")
    assert result.status == "FAIL" and "a cache of int8 is not declared, and the op ignores it" in result.detail


def test_batches_are_reproducible() -> None:
    kit = Kit(NATIVE, torch.device("cpu"), torch.float32)
    first, second = (kit.batch(MIXED, pad=(2, 1)) for _ in range(2))
    assert torch.equal(first.cache.k[0], second.cache.k[0]) and torch.equal(first.expected, second.expected)
