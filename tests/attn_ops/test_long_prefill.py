"""``hybrid:PREFILL+DECODE@long``: PREFILL serves the prompts of a step where it was measured faster, and nothing else."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from quire import AttentionSite, CommonAttentionMetadata
from quire.attn_ops import long_prefill
from quire.attn_ops.backend import AttentionCapabilities, CudagraphSupport, PrefillPart, UnsupportedAttention, define_paged_op
from quire.attn_ops.backends import hybrid, torch_native
from quire.attn_ops.conformance.batches import lay_out, prepared
from quire.attn_ops.conformance.batches import planned as in_step
from quire.attn_ops.registry import get_backend, long_prefill_name, register_backend
from quire.attn_ops.selection import select_backend
from quire.attn_ops.tuning import attention as store
from quire.attn_ops.tuning.prefill import PrefillRule, PrefillTime
from tests.attn_ops.cases import FEW, check_output, make_case, pass_kit

CPU = torch.device("cpu")
NATIVE = torch_native.BACKEND
SITE = AttentionSite(0, 8, 2, 64, 64, torch.float32, 0.125)
LARGE = dataclasses.replace(SITE, num_heads=32, num_kv_heads=8, head_dim=128, head_dim_v=128)
ALWAYS = PrefillRule(PrefillTime(0.0, 0.0, 0.0), PrefillTime(1e6, 0.0, 0.0))
NEVER = PrefillRule(ALWAYS.rest, ALWAYS.prefill)
calls: list[tuple[str, int]] = []
asked: list[float] = []


def counted(name: str):
    def op(q, *args, **options):
        calls.append((name, q.shape[0]))
        out = torch_native.paged_attention(q, *args, **options)
        step = long_prefill.current_step()
        if name == "prompts" and step is not None and step.states.get(name) == "prompts only":
            starts = step.metadata.query_start_loc_cpu
            out[: long_prefill.leading_ones(starts.diff().numpy())] = torch.nan  # as the contract allows
        return out
    return op


def is_ready(sites, device, seconds):
    asked.append(seconds)
    return None


REST = dataclasses.replace(NATIVE, name="rest", op=define_paged_op("rest_for_long", counted("rest")), rope_op=None,
                           priority={"cpu": 1}, same_in_graphs=True)
PROMPTS = dataclasses.replace(
    NATIVE, name="prompts", op=define_paged_op("prompts_for_long", counted("prompts")), rope_op=None, prepare=None,
    priority={"cpu": 2}, make_state=lambda *args: "whole steps", plan=lambda metadata, step: calls.append(("plan", 0)),
    prefill=PrefillPart(is_ready, lambda sites, cache, limits: "prompts only"),
    capabilities=dataclasses.replace(NATIVE.capabilities, chunk=False, mla=False, any_batch=False, kv_dtypes=frozenset(),
                                     cudagraph_support=CudagraphSupport.UNIFORM_SINGLE_TOKEN_DECODE))


@pytest.fixture(autouse=True)
def parts(entries) -> None:
    entries(hybrid=lambda: hybrid.FAMILY)
    for backend in (REST, PROMPTS):
        register_backend(backend)
    calls.clear()
    asked.clear()


def made(rule: PrefillRule | None = ALWAYS, prompts=PROMPTS):
    return long_prefill.make("long_for_test", prompts, REST, rule=lambda *args, **where: rule)


def run(backend, query_lens, seq_lens, **options) -> list[tuple[str, int]]:
    """The calls that a step makes, after a check of its result."""
    calls.clear()
    case = make_case(query_lens, seq_lens, num_heads=8, num_kv_heads=2, head_dim=64, page_size=4,
                     **{k: v for k, v in options.items() if k != "graph_key"})
    with in_step(backend, case, graph_key=options.get("graph_key")):
        check_output(backend.op(*case.arguments(prepared(backend, case)), **case.options), case)
    return list(calls)


@FEW
def test_the_kit_passes(only) -> None:
    pass_kit(made(), only)
    assert {name for name, _ in calls} == {"plan", "prompts", "rest"}


def test_which_steps_it_serves() -> None:
    """A prompt that gains goes to PREFILL; a graph, decodes, a prompt that does not gain, and a site that it lacks do not, and
    for those nothing is planned."""
    backend = made()
    assert run(backend, [5, 9], [5, 20]) == [("plan", 0), ("prompts", 14)]
    assert run(backend, [5, 9], [5, 20], window=8) == [("plan", 0), ("prompts", 14)]
    for options in (dict(graph_key="a graph"), dict(chunk=8)):
        assert run(backend, [5, 9], [5, 20], **options) == [("rest", 14)]
    assert run(backend, [1, 1], [5, 20]) == [("rest", 2)]
    for rule in (NEVER, None):
        assert run(made(rule), [5, 9], [5, 20]) == [("rest", 14)]


def test_decodes_beside_a_prompt_stay_where_they_are_fast() -> None:
    """Else each decoding sequence would cost PREFILL a tile of queries, or kernels of its own that are not compiled."""
    assert run(made(), [1, 1, 9, 1], [7, 5, 20, 3]) == [("plan", 0), ("prompts", 12), ("rest", 2)]
    whole = dataclasses.replace(PROMPTS, prefill=None)
    assert run(made(prompts=whole), [1, 1, 9], [7, 5, 20]) == [("plan", 0), ("prompts", 11)]


def test_the_gain_must_pay_for_planning() -> None:
    """By all layers of a kind: 300 us each pay for planning in a model of two layers, and not in one of one."""
    rule = PrefillRule(PrefillTime(0, 0, 0), PrefillTime(300, 0, 0))
    backend, case = made(rule), make_case([9], [9], num_heads=8, num_kv_heads=2, head_dim=64, page_size=4)
    for layers, gains in ((1, False), (2, True)):
        state = backend.make_state([dataclasses.replace(case.site, layer=i) for i in range(layers)], case.cache, None)
        lens = np.array([9]), np.array([9])
        assert backend.without_graph([case.site], CPU, state, *lens) == ((600.0, 0.0) if gains else (0.0, 0.0))


def test_layers_of_the_rest_may_leave_graphs_too() -> None:
    """REST has faster kernels there itself, for layers that PREFILL lacks, and for all while PREFILL is not compiled."""
    rest = dataclasses.replace(REST, without_graph=lambda sites, *args: (100.0 * len(sites), 10.0 * len(sites)))
    rule = PrefillRule(PrefillTime(0, 0, 0), PrefillTime(600, 0, 0), graph=PrefillTime(700, 0, 0))
    lacking = dataclasses.replace(PROMPTS, prefill=PrefillPart(lambda *args: "no compiler here", PROMPTS.make_state))
    cache = SimpleNamespace(device=CPU, page_size=16, dtype=torch.float32, layout="NHD", fixed_scale=False)
    sites = [SITE, dataclasses.replace(SITE, layer=1, chunk=8)]
    for name, prompts, expected in (("able", PROMPTS, (800.0, 10.0)), ("lacking", lacking, (200.0, 20.0))):
        backend = long_prefill.make(f"long_with_{name}", prompts, rest, rule=lambda *args, **where: rule)
        state = backend.make_state(sites, cache, None)
        assert backend.without_graph(sites, CPU, state, np.array([9]), np.array([9])) == expected


def test_a_layer_on_a_part_of_the_batch_is_served_by_the_rest() -> None:
    """Layers that share earlier ones' keys run on the tokens whose logits are wanted: PREFILL has planned another batch."""
    backend = made()
    assert backend.any_batch
    case = make_case([5, 9], [5, 20], num_heads=8, num_kv_heads=2, head_dim=64, page_size=4)
    with in_step(backend, case):
        q, _, _, *tensors, sinks, _ = case.arguments(prepared(backend, case))
        last = CommonAttentionMetadata.build([1, 1], [5, 20], case.metadata.block_table_tensor.tolist(), page_size=4)
        few = (last.slot_mapping, last.block_table_tensor, last.query_start_loc, last.seq_lens)
        calls.clear()
        whole = backend.op(*case.arguments(prepared(backend, case)), **case.options)
        out = backend.op(q[[4, 13]], None, None, *tensors[:4], *few, sinks, backend.prepare(*few, 4), **case.options)
    assert calls == [("prompts", 14), ("rest", 2)]
    torch.testing.assert_close(out, whole[[4, 13]])


def test_quantized_caches() -> None:
    assert run(made(), [5, 9], [5, 20]) and asked == [0.0]
    assert all(name == "rest" for name, _ in _run_quantized(made()))
    # Where its prompts are served by copies of the keys; times are those of the model's dtype.
    rules: list[object] = []
    part = dataclasses.replace(PROMPTS.prefill, kv_dtypes=frozenset({torch.int8}))
    backend = long_prefill.make("copies_for_test", dataclasses.replace(PROMPTS, prefill=part), REST,
                                rule=lambda *args, **where: rules.append(where["kv_dtype"]) or ALWAYS)
    assert ("prompts", 14) in _run_quantized(backend) and rules == [None]
    # With fixed scales nothing is measured, so REST serves all, whatever the other declares.
    fp8 = frozenset({torch.float8_e4m3fn})
    able = dataclasses.replace(PROMPTS.capabilities, fixed_scale_kv_dtypes=fp8)
    part = dataclasses.replace(part, kv_dtypes=fp8)
    backend = long_prefill.make("fixed_for_test", dataclasses.replace(PROMPTS, prefill=part, capabilities=able), REST,
                                rule=lambda *args, **where: ALWAYS)
    fixed = _run_quantized(backend, kv_dtype=torch.float8_e4m3fn, kv_scales=0.1)
    assert fixed and all(name == "rest" for name, _ in fixed)


def _run_quantized(backend, **cache) -> list[tuple[str, int]]:
    calls.clear()
    case = lay_out(SITE, [5, 9], [5, 20], page_size=4, **{"kv_dtype": torch.int8, **cache})
    with in_step(backend, case):
        backend.op(*case.arguments(prepared(backend, case)), **case.options)
    return list(calls)


def test_kernels_that_are_not_compiled(caplog) -> None:
    """A step made by hand never waits for a compiler, and an engine's start only as long as it may; then REST serves all."""
    backend = made()
    run(backend, [5], [5])
    assert asked == [0.0], "a step only looks"
    assert backend.warm_up([SITE], CPU, 30.0) is None and asked[-1] in (0.0, 30.0) and 30.0 in asked

    lacking = dataclasses.replace(PROMPTS, prefill=PrefillPart(lambda *args: "no compiler here", PROMPTS.make_state))
    backend = made(prompts=lacking)
    assert backend.warm_up([SITE], CPU, 30.0) == "no compiler here"
    assert run(backend, [5], [5]) == run(backend, [5], [5]) == [("rest", 5)]
    assert [r.message for r in caplog.records] == ["attention long_for_test: all steps run on rest: no compiler here"]


def test_kernels_that_fail(caplog) -> None:
    """On a short prompt when an engine starts, or when a step is planned: REST serves all, and the log says why."""
    def fail(metadata, step):
        raise RuntimeError("invalid device function")

    backend = made(prompts=dataclasses.replace(PROMPTS, plan=fail))
    assert "prompts failed on a short prompt: RuntimeError: invalid device function" in backend.warm_up([SITE], CPU, 30.0)
    assert run(backend, [5], [5]) == [("rest", 5)] and "invalid device function" in caplog.text
    assert run(made(prompts=dataclasses.replace(PROMPTS, plan=fail)), [5], [5]) == [("rest", 5)]
    assert "planning for prompts failed: RuntimeError: invalid device function" in caplog.text


def test_a_plan_that_fails_costs_one_step(caplog) -> None:
    """A batch that is too large for the kernels' buffers must not take the fast prompts from the engine for its life; kernels
    that always fail are given up."""
    fails: list = [ValueError] * 4 + [RuntimeError] * 2 + [None] + [RuntimeError] * 3 + [None]

    def plan(metadata, step):
        if (error := fails.pop(0)) is not None:
            raise error(f"exceeds the StepLimits by {len(fails)}")

    backend = made(prompts=dataclasses.replace(PROMPTS, plan=plan))
    case = make_case([5], [5], num_heads=8, num_kv_heads=2, head_dim=64, page_size=4)
    states = {backend.name: backend.make_state([case.site], case.cache, None)}
    served = []
    while fails:
        calls.clear()
        with in_step(backend, case, states=states):
            backend.op(*case.arguments(prepared(backend, case)), **case.options)
        served += [name for name, _ in calls]
        if len(served) == 10:
            break
    assert served == [*["rest"] * 6, "prompts", *["rest"] * 3] and fails == [None]
    with in_step(backend, case, states=states):
        pass
    assert fails == [None], "given up: it is not asked again"
    assert caplog.text.count("later ones try again: planning for prompts failed") == 2 and "3 steps in a row" in caplog.text


def test_kernels_to_come_are_said_to_come() -> None:
    """explain must not promise kernels that are not compiled."""
    assert made().route(SITE) == "rest_paged_attention, long prompts prompts_paged_attention"
    later = dataclasses.replace(PROMPTS, prefill=PrefillPart(lambda *args: "not compiled", PROMPTS.make_state))
    backend = made(prompts=later)
    assert backend.serves(SITE).endswith("long prompts prompts_paged_attention once its kernels are compiled")
    broken = made(prompts=dataclasses.replace(PROMPTS, plan=lambda metadata, step: 1 / 0))
    broken.warm_up([SITE], CPU, 1.0)
    assert broken.serves(SITE) == "rest_paged_attention"


def test_a_step_by_hand_asks_and_reserves_only_if_it_gains() -> None:
    """Each such step makes its states: a loop of short ones would ask ninja, and allocate workspaces, at every step."""
    states: list[int] = []
    prompts = dataclasses.replace(PROMPTS, prefill=PrefillPart(is_ready, lambda *args: states.append(0)))
    run(made(NEVER, prompts), [5], [5])
    run(made(ALWAYS, prompts), [1, 1], [5, 7])
    assert not states and not asked
    run(made(ALWAYS, prompts), [5], [5])
    assert len(states) == len(asked) == 1
    case = make_case([5], [5], num_heads=8, num_kv_heads=2, head_dim=64, page_size=4)
    made(ALWAYS, prompts).make_state([case.site], case.cache, None)
    assert len(states) == 2, "an engine sizes its KV cache beside the workspaces"


def test_it_declares_what_the_rest_does() -> None:
    backend = get_backend("hybrid:prompts+rest@long")
    assert backend is get_backend("hybrid:prompts+rest@long") and long_prefill_name("prompts", "rest") == backend.name
    for field in dataclasses.fields(AttentionCapabilities):
        if field.name != "mla":
            assert getattr(backend.capabilities, field.name) == getattr(REST.capabilities, field.name), field.name
    assert backend.same_in_graphs and not backend.plans_graphs and backend.state_op is REST.state_op
    assert backend.serves(SITE) == "rest_paged_attention, long prompts prompts_paged_attention"
    assert backend.serves(dataclasses.replace(SITE, chunk=8)) == "rest_paged_attention"
    assert select_backend(backend, [dataclasses.replace(SITE, chunk=8)], device=CPU, page_size=4).backend is backend


@pytest.mark.parametrize("name, error, message", [
    ("hybrid:rest+rest@long", UnsupportedAttention, "two different backends"),
    ("hybrid:prompts+rest@short", ValueError, "write hybrid:PREFILL"),
    ("hybrid:prompts@long", ValueError, "write hybrid:PREFILL"),
])
def test_names_that_are_refused(name, error, message) -> None:
    with pytest.raises(error, match=message):
        get_backend(name)


# attention="auto".

US = {"rest": {"1x4096": 394.0, "8x1024+4096": 1869.0, "1x960": 52.0, "1x64+8128": 71.0},
      "prompts": {"1x4096": 316.0, "8x1024+4096": 1240.0, "1x960": 88.0, "1x64+8128": 118.0}}


def measured(monkeypatch, **extend_us) -> None:
    rows = [store.measurement(b, LARGE, device=CPU, page_size=16, layout="NHD", decode_us={"1x1024": us},
                              extend_us=extend_us.get(b.name, US[b.name]), date="2026-11-23")
            for b, us in ((REST, 8.0), (PROMPTS, 12.0))]
    monkeypatch.setattr(store, "sources", lambda device: [rows])
    monkeypatch.setattr("quire.attn_ops.tuning.prefill.sources", lambda device: [rows])


def auto(*sites: AttentionSite):
    return select_backend("auto", sites or [SITE], device=CPU, page_size=16)


def test_auto_adds_the_faster_prompts(monkeypatch) -> None:
    assert auto().backend is REST, "nothing is measured"
    measured(monkeypatch)
    chosen = auto()
    assert chosen.backend.name == "hybrid:prompts+rest@long"
    assert "prompts for the long prompts of 1 layers, where it spares time: measured 562 against 361 TFLOP/s" in chosen.why
    chunked = dataclasses.replace(SITE, layer=1, chunk=8)
    assert auto(SITE, chunked).backend is REST, "no times for such layers: the decode kernels are not chosen by measurement"
    measured(monkeypatch, prompts=US["rest"])
    assert auto().backend is REST, "not faster"
    measured(monkeypatch, prompts={"1x4096": 1.0})
    assert auto().backend is REST, "too few times"


def test_auto_without_the_package(monkeypatch, entries) -> None:
    measured(monkeypatch)
    entries(hybrid=lambda: hybrid.FAMILY)
    for backend in (REST, dataclasses.replace(PROMPTS, available=lambda device: "prompts is not installed: pip install it")):
        register_backend(backend)
    chosen = auto()
    assert chosen.backend is REST and "prompts" not in chosen.why


def test_auto_gives_it_the_measured_rule(monkeypatch) -> None:
    """Of an 8 B model with an H200's times: large chunks, and neither a short prompt nor a short chunk of a long one."""
    measured(monkeypatch)
    sites = [dataclasses.replace(LARGE, layer=i) for i in range(32)]
    cache = SimpleNamespace(device=CPU, page_size=16, dtype=torch.float32, layout="NHD", fixed_scale=False)
    state = auto(*sites).backend.make_state(sites, cache, None)
    for query, seq, wins in ((8192, 8192, True), (8192, 16384, True), (1024, 1024, False), (64, 16384, False)):
        assert bool(state.won(np.array([query]), np.array([seq]))) == wins, (query, seq)
