"""Modules and attention as they are written for models: each is exact or refused on every route."""

from __future__ import annotations

from typing import Any

import pytest

from tests.adversarial import practice, structures
from tests.adversarial.harness import ROUTES, outcome
from tests.adversarial.structures import Structure

#: One sequence is a single token, which is a step of its own in the end.
LENGTHS, STEPS = (5, 9, 1, 1), ((4, 3, 1, 0), (1, 6, 0, 0), (0, 0, 0, 1))
#: Those that hold a rule of their own, and run in each test run: the others in slow ones, each on one route in turn.
QUICK = {"counter in a closure", "sorted and copied back", "(S, D)", "attention to a memory", "vector quantized",
         "positions changed in place", "branch on twice the length", "weight written through its data", "counted in NumPy",
         "counted by a function of the graph", "checkpoint in a checkpoint", "vmap over heads",
         "repeated, values scaled in place"}


def cases(table: dict[str, Any]) -> list[Any]:
    turns = ("decorator", "compile", "engine")
    return [pytest.param(name, turns[i % 3], marks=[pytest.mark.slow] * (name not in QUICK)) for i, name in enumerate(table)]


@pytest.mark.parametrize("name, route", cases(practice.MIXES))
def test_mixing_is_refused(name: str, route: str) -> None:
    assert outcome(lambda kind: kind(practice.MIXES[name]), route).startswith("refused"), "it came out exact by chance"


@pytest.mark.parametrize("name, route", cases(practice.SERVED))
def test_harmless_is_served(name: str, route: str) -> None:
    assert outcome(lambda kind: kind(practice.SERVED[name]), route) == "exact"


def structure(mix: Any, route: str, layers: int = 1, kv_heads: int = 4, head_dim: int = 4) -> str:
    return outcome(lambda kind: kind(mix), route, base=Structure, lengths=LENGTHS, steps=STEPS, layers=layers,
                   kv_heads=kv_heads, head_dim=head_dim)


@pytest.mark.parametrize("name, route", cases({n: f for n, f in structures.MIXES.items() if not n.startswith("another path")}))
def test_attention_that_mixes_is_refused(name: str, route: str) -> None:
    assert structure(structures.MIXES[name], route).startswith("refused")


@pytest.mark.parametrize("name, route", cases(structures.SERVED))
def test_attention_is_served(name: str, route: str) -> None:
    mix, cache = structures.SERVED[name]
    assert structure(mix, route, *cache) == "exact"


@pytest.mark.parametrize("route", ["decorator", pytest.param("compile", marks=pytest.mark.slow)])
def test_another_path_for_one_token(route: str) -> None:
    """No trace shows a branch on a length of 1; a decode step by hand compares. (An engine does in its trial.)"""
    assert "row of one token" in structure(structures.MIXES["another path for one token"], route)


@pytest.mark.parametrize("route", [pytest.param(r, marks=[pytest.mark.slow] * (r != "compile")) for r in ROUTES])
def test_a_forward_that_counts_its_calls_is_refused_by_name(route: str) -> None:
    found = outcome(lambda kind: kind(practice.MIXES["global counter"]), route)
    assert "changes what outlives the call: tests.adversarial.practice.CALLS." in found, found
