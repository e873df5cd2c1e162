"""Masks that people write: each is served exactly or refused, on every route. See tests/adversarial/mask_cases.py."""

from __future__ import annotations

import math
import os

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import quire
from tests.adversarial.harness import PAGE, ROUTES, alone, cache, opened
from tests.adversarial.mask_cases import (
    HEADS,
    REACH,
    STEPS,
    VOCAB,
    Model,
    Report,
    Tree,
    conditions,
    is_a_known_kind,
    outcome,
    random_model,
    sequences,
    trees,
)
from tests.steps import serve

MIN = torch.finfo(torch.float32).min
N = torch.arange(REACH)
AHEAD = N[None] - N[:, None]  # key - query


def pair(p):
    return p[..., :, None], p[..., None, :]


def of(condition):
    """A mask from a condition on query and key positions."""
    return lambda m, ids, p: condition(m, *pair(p))[:, None]


def cut(name):
    return lambda m, ids, p: getattr(m, name)[..., : p.shape[1], : p.shape[1]]


def causal(m, i, j):
    return j <= i


def with_ids(condition):
    """Causal, and a condition on the token ids (1, S) of keys."""
    return lambda m, ids, p: (causal(m, *pair(p)) & condition(m, ids)[:, None, :])[:, None]


def also(condition):
    """Causal, and ``condition(m, p, i, j)`` of positions (1, S), and of queries' (1, 1, S, 1) and keys' (1, 1, 1, S)."""
    return lambda m, ids, p: causal(m, *pair(p))[:, None] & condition(m, p, *pair(p[:, None]))


def windows(*widths):
    """A window for each head."""
    return (also(lambda m, p, i, j: i - j < m.w), {"w": torch.tensor(widths).view(1, HEADS, 1, 1)})


def filled(value):
    return lambda m, ids, p: torch.zeros(p.shape[1], p.shape[1]).masked_fill(pair(p[0])[1] > pair(p[0])[0], value)


def overwritten(m, ids, p):
    mask = torch.full((p.shape[1], p.shape[1]), -math.inf)
    mask[causal(m, *pair(p[0]))] = 0.0
    return mask


def counted(m, ids, p):
    m.steps.add_(1)
    return (causal(m, *pair(p)) & (pair(p)[0] - pair(p)[1] < m.steps))[:, None]


def kept(m, ids, p):
    if getattr(m, "kept", None) is None:
        m.kept = torch.ones(REACH, REACH, dtype=torch.bool).tril()
    return m.kept[: p.shape[1], : p.shape[1]]


def uncleared(m, ids, p):
    first = pair(p[0])[0] == 0
    return (causal(m, *pair(p[0])) | first).fill_diagonal_(False) | first


EXACT = {
    "window, one more": (of(lambda m, i, j: (j <= i) & (i - j <= 8)), {}),
    "window of the config": (of(lambda m, i, j: (j <= i) & (i - j < m.width)), {}),
    **{f"window, {n}-d buffer": (of(lambda m, i, j: (j <= i) & (i - j < m.w)), {"w": torch.full([1] * n, 8)})
       for n in range(4)},
    "window per head, all the same": windows(8, 8, 8, 8),
    "chunk, 1-d table of positions": (also(lambda m, p, i, j: (m.t[p][:, :, None] == m.t[p][:, None])[:, None]), {"t": N // 8}),
    "stored triangle, float": (cut("t"), {"t": torch.zeros(REACH, REACH).masked_fill(AHEAD > 0, -math.inf)}),
    "stored triangle, least number": (cut("t"), {"t": torch.full((REACH, REACH), MIN).triu(1)}),
    "stored triangle per head": (cut("t"), {"t": (AHEAD <= 0).expand(1, HEADS, REACH, REACH).clone()}),
    "rows of a stored triangle": (lambda m, ids, p: m.t[p[0]][:, p[0]], {"t": AHEAD <= 0}),
    "from the first position on": (also(lambda m, p, i, j: (p >= p[:, :1])[:, None, None]), {}),
    "two float masks added": (lambda m, ids, p: filled(MIN)(m, ids, p) + filled(-math.inf)(m, ids, p), {}),
    "overwritten where visible": (overwritten, {}),
    "key row, query position": (lambda m, ids, p: torch.arange(p.shape[1]) <= p[0, :, None], {}),
    "int8 truths": (of(lambda m, i, j: (j <= i).to(torch.int8).bool()), {}),
    "kept from an earlier call": (kept, {}),
}
REFUSED = {
    # Token ids.
    "ids above 40": (with_ids(lambda m, ids: ids <= 40), {}),
    "one id": (with_ids(lambda m, ids: ids != 57), {}),
    "kinds by id": (with_ids(lambda m, ids: m.kinds[ids] == 0), {"kinds": (torch.arange(VOCAB) % 9 == 7).long()}),
    "kinds by id, embedding": (with_ids(lambda m, ids: F.embedding(ids, m.kinds)[..., 0] < 1),
                               {"kinds": (torch.arange(VOCAB) % 9 == 7).float()[:, None]}),
    "hash of ids": (with_ids(lambda m, ids: ids * 2654435761 % 13 != 3), {}),
    "ids cumsum": (with_ids(lambda m, ids: ids.cumsum(-1) < 1000), {}),
    "positions plus ids": (lambda m, ids, p: (pair(p + 0 * ids)[1] <= pair(p)[0])[:, None], {}),
    # Other masks of positions.
    "prefix far out": (of(lambda m, i, j: (j <= i) & ((i < 50) | (i - j < 40))), {}),
    "strictly before": (of(lambda m, i, j: (j < i) | (i == 0)), {}),
    "one ahead": (of(lambda m, i, j: j <= i + 1), {}),
    "window per head": windows(8, 16, 32, 48),
    "one head another window": windows(8, 8, 8, 9),
    "positions hidden by a table": (also(lambda m, p, i, j: m.t[p][:, None, None]), {"t": N != 37}),
    "a table at negative places": (also(lambda m, p, i, j: m.t[p - 1][:, None, None]), {"t": N != REACH - 1}),
    "an arange buffer at negative places": (also(lambda m, p, i, j: m.t[p - 1][:, None, None] <= i), {"t": N}),
    "only early queries": (also(lambda m, p, i, j: (i - p[:, :1, None] < 8) | (i == j)), {}),
    "stored triangle with a hole": (cut("t"), {"t": (AHEAD <= 0) & ~((N[:, None] == 60) & (N[None] == 11))}),
    "stored, one head with a hole": (cut("t"), {"t": torch.stack([AHEAD <= 0] * 3 + [(AHEAD <= 0) & (AHEAD != -40)])[None]}),
    "stored, least number and others": (cut("t"), {
        "t": torch.full((REACH, REACH), MIN).triu(1).masked_fill(AHEAD == 9, -1e30)}),
    "stored float, soft": (cut("t"), {"t": torch.zeros(REACH, REACH).masked_fill(AHEAD > 0, -math.inf).masked_fill(
        AHEAD == -50, -0.5)}),
    "whole batch": (of(lambda m, i, j: j >= 0), {}),
    "diagonal cleared": (uncleared, {}),
    "long sequences only": (also(lambda m, p, i, j: (i - j < 8) | (torch.full((1,), p.shape[1]) < 40)), {}),
    # Biases.
    "bias by bucket": (of(lambda m, i, j: torch.where(j <= i, m.t[(i - j).clamp(0, 31)], -math.inf)), {"t": torch.randn(32)}),
    "scaled by a learned gate": (lambda m, ids, p: filled(-1.0)(m, ids, p) * m.gate, {"gate": torch.tensor(1e5)}),
    "logarithm, soft": (lambda m, ids, p: (torch.ones(p.shape[1], p.shape[1]).tril() + 0.5).log(), {}),
    "made finite, too large": (lambda m, ids, p: torch.ones(p.shape[1], p.shape[1]).tril().log().nan_to_num(neginf=-1e4), {}),
    # Numbers that do not hold positions.
    "uint8 differences": (of(lambda m, i, j: (j <= i) & ((i - j).to(torch.uint8) < 200)), {}),
    "buffer that counts calls": (counted, {"steps": torch.tensor(5)}),
}
#: Of the random masks' conditions, those of each test run; the others are in the slow one.
QUICK = {"window: clamp", "chunk: floordiv", "chunk: shift", "fine: stored_band", "fine: stored_triangle", "finish: min",
         "finish: inf", "spoil: isin", "spoil: document", "spoil: hidden", "spoil: prefix", "spoil: sink", "spoil: length"}


def make(name: str) -> Model:
    mask, tensors = (EXACT | REFUSED)[name]
    model = Model(mask, **tensors).eval()
    model.width = 8
    return model


def cases(table):
    """Every other on one route in turn; all on all routes in the slow run. tests/passes/verify/test_masks.py has the proof."""
    routes = ("compile", "decorator", "engine")
    return [pytest.param(name, route, marks=[pytest.mark.slow] * (i % 2 or routes[i // 2 % len(routes)] != route))
            for i, name in enumerate(table) for route in routes]


@pytest.mark.parametrize("name, route", cases(EXACT))
def test_exact(name: str, route: str) -> None:
    assert outcome(make(name), route) == "exact"


@pytest.mark.parametrize("name, route", cases(REFUSED))
def test_refused(name: str, route: str) -> None:
    found = outcome(make(name), route)
    assert found.startswith("refused: ")
    if route != "engine":  # which refuses what changes the model before it looks at masks
        assert "its mask" in found or "non-causal" in found or "mixes the tokens" in found, found


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK)) for name in conditions()])
def test_each_condition_of_the_random_masks(name: str) -> None:
    """Every spelling of a known kind is served, and no other mask."""
    refused = name.startswith("spoil") or name in ("finish: soft", "finish: minus_10000")
    assert outcome(conditions()[name], ROUTES[len(name) % len(ROUTES)]).partition(":")[0] == ("refused" if refused else "exact")


def test_the_refusal_names_the_node_and_the_module_and_what_would_help() -> None:
    found = outcome(make("ids above 40"), "compile")
    assert "input_ids" in found and "node l_" in found and "made of position_ids and constants can be served" in found


@pytest.mark.parametrize("route", ["compile", "engine"])
def test_a_stored_mask_that_changes_is_noticed(route: str) -> None:
    """In place, between two steps: by value on a CPU."""
    model, calls = Model(cut("t"), t=(AHEAD <= 0).clone()), 0
    with opened(model, route, cache()) as call:
        def run(part, meta):
            nonlocal calls
            if calls == 1:
                model.t.data &= AHEAD > -4
            calls += 1
            return call(part, meta)

        with pytest.raises(quire.UnsupportedAttention, match="that an attention mask is made of has changed"):
            serve(run, sequences(), STEPS, PAGE)
    assert calls == 2


def random_masks(report: Report, examples: int) -> None:
    @settings(max_examples=examples, database=None, suppress_health_check=list(HealthCheck))
    @given(trees(), st.sampled_from(sorted(ROUTES)))
    def run(case, route):
        model = random_model(*case)
        try:
            alone(model, sequences())
        except (RuntimeError, TypeError):  # no model at all, such as a remainder of truths
            return
        report.add(is_a_known_kind(model), outcome(model, route))

    run()


def test_random_masks() -> None:
    report = Report()
    random_masks(report, 16)
    assert report.counts["harmless, exact"] >= 3 and report.counts["other, refused"] >= 3


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_many_random_masks() -> None:
    """``QUIRE_MASKS`` examples; ``QUIRE_MASK_REPORT`` names a file for the counts."""
    report = Report()
    try:
        random_masks(report, int(os.environ.get("QUIRE_MASKS", "200")))
    finally:
        print(report)
    assert report.share_refused < 0.15


def test_the_oracle_of_the_generator() -> None:
    """Known kinds are recognized, and others are not."""
    for op, number, known in (("causal:ids:le", 0, True), ("spoil:ids:ids", 0, False), ("spoil:ids:prefix", 5, False)):
        tree = Tree("and:", 0, (Tree("causal:arange:tril"), Tree(op, number)))
        assert is_a_known_kind(random_model(tree, "bool", 3)) == known
