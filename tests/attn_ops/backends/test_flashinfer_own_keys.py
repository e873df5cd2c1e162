"""FlashInfer's prompts by the step's own keys, on stand-ins for the library; the merge runs in Triton's interpreter."""

from __future__ import annotations

import dataclasses

import pytest
import torch

pytest.importorskip("triton")

from quire.attn_ops.backends import flashinfer
from quire.attn_ops.backends.flashinfer import BACKEND, routes
from quire.attn_ops.backends.flashinfer.contiguous import OwnKeys, loadable
from quire.attn_ops.backends.flashinfer.routes import Way
from quire.attn_ops.kernels import gather_kv
from quire.attn_ops.step import Step, StepLimits, running
from tests.attn_ops.backends.flashinfer_stand_ins import Decode, Prefill, Ragged, stand_in
from tests.attn_ops.cases import check_case, make_case
from tests.attn_ops.oracle import oracle_attention

SMALL = dict(num_heads=4, num_kv_heads=2, head_dim=16, page_size=4)
#: Tokens of the step, and with those before them.
BATCHES = {
    "no prefix": ([5, 13, 6], [5, 13, 6]), "prefix of one token": ([6, 2], [7, 3]),
    "prefix of whole pages": ([4, 9, 3], [8, 13, 7]), "one prefix of many": ([5, 11, 8], [5, 30, 8]),
    "decodes at the head": ([1, 1, 7, 0, 1, 10], [9, 33, 7, 6, 50, 27]), "single tokens": ([3, 1, 1], [3, 1, 19]),
    "idle": ([0, 3, 0, 2], [40, 3, 9, 30]),
}
FEATURES = {"plain": {}, "softcap": {"softcap": 2.0}, "sinks": {"sinks": True}, "both": {"softcap": 2.0, "sinks": True}}


@pytest.fixture(autouse=True)
def any_layer(monkeypatch):
    monkeypatch.setattr(routes, "seen_right", lambda *of_layer: True)


@pytest.fixture
def on_cpu(monkeypatch):
    return stand_in(monkeypatch)


@pytest.fixture
def forced(monkeypatch):
    """The way of all prompts; own keys where it is possible."""
    monkeypatch.setattr(routes, "MOST_RUNS", 9)
    monkeypatch.setattr(routes, "choose", lambda *sizes, own_runs, **possible: Way.OWN if own_runs else Way.PAGES)


def state_of(case, *more):
    return BACKEND.make_state([case.site, *more], case.cache, StepLimits(8, 128, 64))


def planned(case, *more) -> tuple:
    state = state_of(case, *more)
    step = Step(case.cache, case.metadata, states={"flashinfer": state})
    BACKEND.plan(case.metadata, step)
    return state, step


@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("batch", BATCHES)
def test_against_the_oracle(on_cpu, forced, batch: str, features: str) -> None:
    """NaN in all slots without an owner: neither the step's slots in the cache nor pages past a prefix may be read in vain."""
    case = make_case(*BATCHES[batch], **SMALL, **FEATURES[features], scale=0.7, poison=float("nan"), pad_tokens=3, pad_reqs=1)
    out, begin = check_case(on_cpu, case), 0
    mask = dict(scale=0.7, softcap=case.options["softcap"], sinks=case.sinks)
    for queries, keys, values in zip(BATCHES[batch][0], case.keys, case.values, strict=True):
        wanted = oracle_attention(case.q[begin : begin + queries], keys, values, **mask)
        torch.testing.assert_close(out[begin : begin + queries].double(), wanted, atol=1e-5, rtol=1e-5)
        begin += queries


@pytest.mark.parametrize("options", [
    dict(num_heads=6, num_kv_heads=1), dict(num_heads=3, num_kv_heads=3), dict(layout="HND"), dict(strided=True),
    dict(dtype=torch.float16, sinks=True), dict(page_size=1), dict(page_size=3, softcap=2.0)], ids=str)
def test_heads_layouts_and_strides(on_cpu, forced, options) -> None:
    for batch in ("one prefix of many", "decodes at the head", "no prefix"):
        check_case(on_cpu, make_case(*BATCHES[batch], **(SMALL | options)))


def test_a_run_of_whole_tiles(on_cpu, forced) -> None:
    case = make_case([128, 2, 3], [128, 6, 3], **SMALL)
    check_case(on_cpu, case)
    state, _ = planned(case)
    assert [w.starts[0].tolist() for w in state.wrappers.values() if isinstance(w, Ragged)] == [[0, 128, 130], [0, 3]]


def test_what_is_read_from_where(on_cpu, forced, monkeypatch) -> None:
    """One plan a step for all layers of a group; the prefixes alone from pages; nothing is copied."""
    monkeypatch.setattr(gather_kv, "gather_kv", None)
    case = make_case(*BATCHES["decodes at the head"], **SMALL)
    state, step = planned(case, dataclasses.replace(case.site, layer=1))
    (decode, *_), (own, begin, end) = state.plans.held[0].segments[next(iter(state.groups)), True]
    assert isinstance(decode, Decode) and isinstance(own, OwnKeys) and (begin, end) == (2, 20)
    assert not own.prefix.causal and own.prefix.planned[1] == [0, 0, 1, 1]
    assert own.prefix.indptr.diff().tolist() == [1, 1, 13, 5]
    assert [(type(w), a, b) for w, a, b in own.runs] == [(Ragged, 0, 7), (Ragged, 7, 8), (Ragged, 8, 18)]
    with running(step):
        for _ in range(3):
            flashinfer.paged_attention(*case.arguments(), **case.options)
    assert [w.plans for w in state.wrappers.values()] == [1] * 5
    BACKEND.plan(case.metadata, step)
    assert [w.plans for w in state.wrappers.values()] == [2] * 5
    without = make_case(*BATCHES["no prefix"], **SMALL)
    state, _ = planned(without)
    ((own, *_),) = state.plans.held[0].segments[next(iter(state.groups)), True]
    assert own.prefix is None and [type(w) for w in state.wrappers.values()] == [Ragged] * 3


def test_a_neighbours_nan_stays_where_it_is(on_cpu, forced, monkeypatch) -> None:
    """A user beside whose prompt another one overflows: kernels for Hopper GPUs multiply what lies behind a sequence by 0. So
    does what pages hold past its end."""
    for way in (Way.OWN, Way.COPIES):
        monkeypatch.setattr(routes, "choose", lambda *sizes, way=way, **possible: way)
        case = make_case([5, 4, 3], [5, 9, 3], **SMALL, poison=float("nan"))
        case.v[5] = float("nan")  # of the second sequence
        with running(planned(case)[1]):
            out = flashinfer.paged_attention(*case.arguments(), **case.options)
        assert out[5:9].isnan().all()
        for own in (slice(0, 5), slice(9, 12)):
            torch.testing.assert_close(out[own].double(), case.expected[own], atol=1e-5, rtol=1e-5)


def test_layers_without_keys_of_their_own(on_cpu, forced) -> None:
    """A user of gemma3n: later layers attend to an earlier layer's keys, and their op gets no k and v. One decode plan serves
    both, and the prompts of these go by pages, whether the engine said so before or the op shows it."""
    case = make_case(*BATCHES["decodes at the head"], **SMALL)
    later = dataclasses.replace(case.site, layer=1, kv_source=0)
    for more in ((), (later,)):
        state, step = planned(case, *more)
        with running(step):
            arguments = case.arguments()
            for given in (arguments, (arguments[0], None, None, *arguments[3:])):
                out = flashinfer.paged_attention(*given, **case.options)
                torch.testing.assert_close(out[:20].double(), case.expected[:20], atol=1e-5, rtol=1e-5)
        kinds = [type(w) for w in state.wrappers.values()]
        assert kinds.count(Decode) == 1 and kinds.count(Prefill) == 2 and kinds.count(Ragged) == 3
        segments = state.plans.held[0].segments
        assert len(segments) == 2 and {type(of[-1][0]) for of in segments.values()} == {OwnKeys, Prefill}


@pytest.mark.parametrize("options", [
    dict(window=7), dict(window=100), dict(kv_dtype=torch.float8_e5m2, kv_scales=0.06, dtype=torch.float16)], ids=str)
def test_prompts_that_go_by_pages(on_cpu, forced, options) -> None:
    """With a window queries see different parts of a prefix; new tokens of an fp8 cache count as they read back."""
    case = make_case(*BATCHES["one prefix of many"], **(SMALL | options))
    state, step = planned(case)
    assert [type(w) for w in state.wrappers.values()] == [Prefill]
    check_case(on_cpu, case)


def test_what_the_kernels_can_load() -> None:
    """A user of a fused projection, of keys repeated by ``expand``, or of a model in training."""
    held = torch.randn(5, 10, 16, dtype=torch.float16)
    for x in (held, held[:, 2:4], held[1:, ::2], held[..., :8], held.view(-1)[8:72].view(2, 2, 16)):
        assert loadable(x) is x
    for x in (held.transpose(0, 2), held[:, :1].expand(5, 4, 16), held.view(-1)[1 : 1 + 64].view(1, 4, 16)):
        assert torch.equal(loadable(x), x) and loadable(x).is_contiguous() and loadable(x).data_ptr() % 16 == 0
    trained = held.requires_grad_()
    assert not loadable(trained).requires_grad and loadable(trained).data_ptr() == held.data_ptr()
