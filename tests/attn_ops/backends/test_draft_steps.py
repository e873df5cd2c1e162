"""Several decode steps planned before the first of them, as one CUDA graph needs: each runs by its own plan.

Without a GPU the "graph" is the op, called again on the same tensors as the steps that were captured. tests/gpu has real ones.
"""

from __future__ import annotations

import dataclasses
import sys
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from quire.attn_ops.backend import AttentionBackend
from quire.attn_ops.backends import flashinfer_mla, two_batch
from quire.attn_ops.conformance.batches import compare
from quire.attn_ops.conformance.checks import Kit
from quire.attn_ops.conformance.mla import MlaKit
from quire.attn_ops.registry import get_backend
from tests.attn_ops.backends.flashinfer_mla_stand_in import Wrapper
from tests.attn_ops.backends.flashinfer_stand_ins import stand_in
from tests.attn_ops.draft_steps import copy_into, draft_batches, plan_steps, run_steps, values_of

CPU = torch.device("cpu")
STEPS, ROWS = 3, 4
#: Of all tokens, drafts included: sequences that begin a page at the first, at the second and at no step; then longer ones.
CAPTURED, LATER = [19, 5, 28], [45, 62]
SIZE = {"page_size": 4, "num_pages": 40, "table_width": 16}
PLANNING = ["flashinfer", "flashinfer_mla"]


@pytest.fixture
def kit(request, monkeypatch) -> Kit:
    """The kit of a backend by name, on the CPU."""
    name, cpu = request.param, {"devices": frozenset({"cpu"}), "page_sizes": lambda size: size == 4}
    if name == "flashinfer_mla":
        for module, content in {"flashinfer": {}, flashinfer_mla.LIBRARY: {"BatchMLAPagedAttentionWrapper": Wrapper}}.items():
            monkeypatch.setitem(sys.modules, module, SimpleNamespace(**content))
        monkeypatch.setattr(flashinfer_mla, "WORKSPACE", 64)
        caps = dataclasses.replace(flashinfer_mla.BACKEND.capabilities, **cpu)
        backend = dataclasses.replace(flashinfer_mla.BACKEND, capabilities=caps, mla_op=flashinfer_mla.mla_paged_attention)
        return MlaKit(Kit(backend, CPU, torch.bfloat16))
    if name.startswith("triton"):
        made = Kit(get_backend("triton"), CPU, torch.float32)
        return MlaKit(made) if name == "triton, MLA" else made
    backend = stand_in(monkeypatch)
    caps = dataclasses.replace(backend.capabilities, **cpu, dtypes=frozenset({torch.float32}),
                               head_dims=lambda d, dv: d == dv == 16)
    backend = dataclasses.replace(backend, capabilities=caps, available=lambda device: None)
    return Kit(two_batch.make(name, lambda base: backend) if name == "two_batch:flashinfer" else backend, CPU, torch.float32)


def state_of(states: dict[str, Any]) -> Any:
    (state,) = states.values()
    return state


def replay(backend: AttentionBackend, batches: Any, captured: Any, states: dict[str, Any]) -> list[torch.Tensor]:
    """The ops of the captured steps, on their tensors, by what was planned last."""
    for number, step in enumerate(captured):
        state_of(states).plans.held[number].step = weakref.ref(step)
    return run_steps(backend, batches, captured)


@pytest.mark.parametrize("key", [None, "drafts"])
@pytest.mark.parametrize("kit", [*PLANNING, "two_batch:flashinfer", "triton", "triton, MLA"], indirect=True)
def test_each_step_runs_by_its_own_plan(kit, key) -> None:
    batches, states = draft_batches(kit, CAPTURED, STEPS, ROWS, **SIZE), {}
    steps = plan_steps(kit.backend, batches, states, graph_key=key, capturing=key is not None)
    for out, batch in zip(run_steps(kit.backend, batches, steps), batches, strict=True):
        compare(out, batch)


@pytest.mark.parametrize("kit", PLANNING, indirect=True)
def test_a_replay_reads_the_new_plans(kit) -> None:
    """Longer sequences, fewer of them, on other pages; then the first ones again. Nothing is made anew."""
    static, later = (draft_batches(kit, lens, STEPS, ROWS, seed=seed, **SIZE)
                     for seed, lens in enumerate((CAPTURED, LATER)))
    kept, states = values_of(static), {}
    captured = plan_steps(kit.backend, static, states, graph_key="drafts", capturing=True)
    run_steps(kit.backend, static, captured)
    state = state_of(states)
    wrappers = dict(state.wrappers)
    assert len(wrappers) == STEPS
    for batches, values in ((later, values_of(later)), (static, kept)):
        copy_into(static, batches, values)
        steps = plan_steps(kit.backend, batches, states, graph_key="drafts")
        assert all(state.plans.of(step) is not None for step in steps)
        for out, batch in zip(replay(kit.backend, static, captured, states), batches, strict=True):
            compare(out, batch)
    assert state.wrappers == wrappers and sorted(state.plans.held) == list(range(STEPS))


@pytest.mark.parametrize("kit", PLANNING, indirect=True)
def test_steps_without_a_plan(kit) -> None:
    batches, states = draft_batches(kit, CAPTURED, 2, ROWS, **SIZE), {}
    first = plan_steps(kit.backend, batches, states, graph_key="drafts", capturing=True)
    again = plan_steps(kit.backend, batches[:1], states, graph_key="drafts")
    run_steps(kit.backend, batches[:1], again)
    with pytest.raises(RuntimeError, match=r"was planned.*\(this is step number 1 of a CUDA graph, and planned are 0; "):
        run_steps(kit.backend, batches[1:], first[1:])
    second = plan_steps(kit.backend, batches, states, graph_key="drafts")
    with pytest.raises(RuntimeError, match=r"was planned.*\(this is step number 0 of a CUDA graph, and planned are 0, 1;"):
        run_steps(kit.backend, batches[:1], first[:1])
    run_steps(kit.backend, batches, second)
    third = draft_batches(kit, CAPTURED, 3, ROWS, **SIZE)
    with pytest.raises(RuntimeError, match=r"graph 'drafts' \(step number 2\) was .*captured"):
        plan_steps(kit.backend, third, states, graph_key="drafts")


@pytest.mark.parametrize("kit", PLANNING, indirect=True)
def test_one_step_makes_one_plan(kit) -> None:
    """And no state is in a circle of references, which would keep its memory until Python looks for such."""
    batches, states = draft_batches(kit, CAPTURED, 1, ROWS, **SIZE), {}
    plan_steps(kit.backend, batches, states)
    state = state_of(states)
    assert list(state.plans.held) == [0] and len(state.wrappers) == 1
    gone = weakref.ref(state)
    states.clear()
    del state
    assert gone() is None


@pytest.mark.parametrize("kit", ["flashinfer"], indirect=True)
def test_what_steps_share(kit, monkeypatch) -> None:
    """The workspace for partial results. Each waits for its own copies only: those of the step before it in the set may be
    behind a forward."""
    seen: list[tuple[str, int]] = []

    class Event:
        made = 0

        def __init__(self) -> None:
            self.number, Event.made = Event.made, Event.made + 1

        def synchronize(self) -> None:
            seen.append(("wait", self.number))

        def record(self, stream: Any) -> None:
            seen.append(("record", self.number))

    monkeypatch.setattr(torch.cuda, "Event", Event)
    batches, states = draft_batches(kit, CAPTURED, 2, ROWS, **SIZE), {}
    for capturing in (True, False):
        seen.clear()
        plan_steps(kit.backend, batches, states, graph_key="drafts", capturing=capturing)
        assert seen == [("wait", 0), ("record", 0), ("wait", 1), ("record", 1)]
    first, second = state_of(states).wrappers.values()
    assert first.workspace is second.workspace
    for name in ("int_workspace", "indptr", "indices", "last_page_len"):
        assert getattr(first, name).data_ptr() != getattr(second, name).data_ptr(), name
