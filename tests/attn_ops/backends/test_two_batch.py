"""A batch in two halves gives what the whole gives: the kit's outputs and cache, with both halves at work."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest

from quire import CudagraphSupport, current_step, define_paged_op
from quire.attn_ops.backends import torch_native, two_batch
from quire.attn_ops.conformance.batches import compare, lay_out, run
from quire.attn_ops.registry import get_backend, register_backend
from tests.attn_ops.cases import FEW, pass_kit
from tests.attn_ops.cases import SITE as SITE_3

SITE = dataclasses.replace(SITE_3, layer=0)
calls: list[tuple[int, int]] = []


def seen(*args, **options):
    """A backend that plans: it needs the plan of just this batch."""
    step = current_step()
    assert step is not None and step.metadata.num_tokens == len(args[0]) and step.states["seen"].plan is step.metadata
    assert args[1] is None and step.metadata.seq_lens.tolist() == args[10].tolist()
    calls.append((len(args[0]), len(args[10])))
    return torch_native.paged_attention(*args, **options)


def plan(metadata, step) -> None:
    step.states["seen"].plan = metadata


SEEN = dataclasses.replace(
    torch_native.BACKEND, name="seen", op=define_paged_op("seen_in_two_batch_test", seen), state_op=None, mla_op=None,
    plan=plan, make_state=lambda sites, cache, limits: SimpleNamespace(plan=None),
    capabilities=dataclasses.replace(torch_native.BACKEND.capabilities, mla=False, lse=False))


@pytest.fixture(autouse=True)
def parts(entries) -> None:
    entries(two_batch=lambda: two_batch.FAMILY)
    register_backend(SEEN)
    calls.clear()


@FEW
def test_it_passes_the_kit(only: str) -> None:
    pass_kit(get_backend("two_batch:seen"), only)


@pytest.mark.parametrize("queries, key, halves", [
    ([1, 1, 1, 1], None, [(2, 2), (2, 2)]), ([1, 1, 1], None, [(1, 1), (2, 2)]), ([5, 1, 0, 6], None, [(6, 3), (6, 1)]),
    ([9], None, [(9, 1)]), ([0, 4], None, [(4, 2)]), ([1, 1, 1, 1], "a graph", [(2, 2), (2, 2)]), ([1], "a graph", [(1, 1)]),
])
def test_cut(queries: list[int], key: str | None, halves: list[tuple[int, int]]) -> None:
    run(get_backend("two_batch:seen"), lay_out(SITE, queries, [9] * len(queries), page_size=4), graph_key=key)
    assert [tokens for tokens, _ in calls] == [tokens for tokens, _ in halves]
    assert sum(rows for _, rows in calls) == len(queries)


def test_a_graph_of_mostly_padding() -> None:
    """A replay of one sequence in a graph of four: the second half is padding, and both write where the capture did."""
    batch = lay_out(SITE, [1], [9], page_size=4, pad=(3, 3))
    compare(run(get_backend("two_batch:seen"), batch, graph_key="a graph"), batch)
    assert calls == [(2, 2), (2, 2)]


def test_capabilities_and_names() -> None:
    backend = get_backend("two_batch:seen")
    assert backend.capabilities.cudagraph_support is CudagraphSupport.UNIFORM_SINGLE_TOKEN_DECODE
    assert backend.serves(SITE) == "seen_paged_attention of two halves" and backend.priority is None
    assert two_batch.find_cut(np.array([0, 1, 2]), False) == 1 and two_batch.find_cut(np.array([0]), False) is None
    for name, message in (("two_batch", "write two_batch:NAME"), ("two_batch:nobody", "unknown attention backend 'nobody'")):
        with pytest.raises(ValueError, match=message):
            get_backend(name)
