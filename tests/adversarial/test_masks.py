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
from quire.passes.backend import QuireBackend
from quire.passes.capture.paged_model import PagedModel
from quire.passes.options import QuireOptions
from tests.adversarial.mask_cases import (
    HEADS,
    REACH,
    ROUTES,
    VOCAB,
    Model,
    Report,
    Tree,
    buffers,
    build,
    is_a_known_kind,
    outcome,
    paged,
    plain,
    random_model,
    sequences,
    trees,
)

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


def per_head(windows):
    return torch.tensor(windows).view(1, HEADS, 1, 1)


def filled(value):
    return lambda m, ids, p: torch.zeros(p.shape[1], p.shape[1]).masked_fill(pair(p[0])[1] > pair(p[0])[0], value)


def written(m, ids, p):
    mask = torch.full((p.shape[1], p.shape[1]), -math.inf).triu(1)
    mask[:, 3] = 0.0
    return mask


def overwritten(m, ids, p):
    keep = causal(m, *pair(p[0]))
    mask = torch.full((p.shape[1], p.shape[1]), -math.inf)
    mask[keep] = 0.0
    return mask


def counted(m, ids, p):
    m.steps.add_(1)
    return (causal(m, *pair(p)) & (pair(p)[0] - pair(p)[1] < m.steps))[:, None]


def band(width):
    return (AHEAD <= 0) & (AHEAD > -width)


def slopes(m, i, j):
    return torch.where(j <= i, (j - i)[:, None] * m.slopes, -math.inf)


EXACT = {
    "causal": (of(causal), {}),
    "window": (of(lambda m, i, j: (j <= i) & (i - j < 8)), {}),
    "window, one more": (of(lambda m, i, j: (j <= i) & (i - j <= 8)), {}),
    "window of the config": (of(lambda m, i, j: (j <= i) & (i - j < m.width)), {}),
    "window by clamp": (of(lambda m, i, j: (j <= i) & (j >= (i - 7).clamp(min=0))), {}),
    "window, 0-d buffer": (of(lambda m, i, j: (j <= i) & (i - j < m.w)), {"w": torch.tensor(8)}),
    "window, 1-d buffer": (of(lambda m, i, j: (j <= i) & (i - j < m.w)), {"w": torch.tensor([8])}),
    "window, 2-d buffer": (of(lambda m, i, j: (j <= i) & (i - j < m.w)), {"w": torch.tensor([[8]])}),
    "window, 3-d buffer": (of(lambda m, i, j: (j <= i) & (i - j < m.w)), {"w": torch.tensor([[[8]]])}),
    "window per head, all the same": (lambda m, ids, p: (pair(p)[1] <= pair(p)[0])[:, None] & (
        (pair(p)[0] - pair(p)[1])[:, None] < m.w), {"w": per_head([8] * HEADS)}),
    "chunk": (of(lambda m, i, j: (j <= i) & (i // 8 == j // 8)), {}),
    "chunk by start": (of(lambda m, i, j: (j <= i) & (j >= i // 8 * 8)), {}),
    "chunk by shift": (of(lambda m, i, j: (j <= i) & (i >> 3 == j >> 3)), {}),
    "chunk, 1-d table of positions": (lambda m, ids, p: (causal(m, *pair(p)) & (
        m.t[p][:, :, None] == m.t[p][:, None]))[:, None], {"t": N // 8}),
    "stored triangle": (cut("t"), {"t": (AHEAD <= 0)[None, None]}),
    "stored triangle, float": (cut("t"), {"t": torch.zeros(REACH, REACH).masked_fill(AHEAD > 0, -math.inf)}),
    "stored triangle per head": (cut("t"), {"t": (AHEAD <= 0).expand(1, HEADS, REACH, REACH).clone()}),
    "stored window": (cut("t"), {"t": band(8)}),
    "rows of a stored triangle": (lambda m, ids, p: m.t[p[0]][:, p[0]], {"t": AHEAD <= 0}),
    "from the first position on": (lambda m, ids, p: (causal(m, *pair(p)) & (p >= p[:, :1])[:, None])[:, None], {}),
    "-inf": (filled(-math.inf), {}),
    "dtype min": (filled(MIN), {}),
    "two float masks added": (lambda m, ids, p: filled(MIN)(m, ids, p) + filled(-math.inf)(m, ids, p), {}),
    "overwritten where visible": (overwritten, {}),
    "positions from arange": (lambda m, ids, p: torch.arange(p.shape[1])[None] <= torch.arange(p.shape[1])[:, None], {}),
    "ones.tril": (lambda m, ids, p: torch.ones(p.shape[1], p.shape[1], dtype=torch.bool).tril(), {}),
    "key row, query position": (lambda m, ids, p: torch.arange(p.shape[1]) <= p[0, :, None], {}),
    "int8 truths": (of(lambda m, i, j: (j <= i).to(torch.int8).bool()), {}),
}
REFUSED = {
    # Token ids.
    "ids above 40": (with_ids(lambda m, ids: ids <= 40), {}),
    "one id": (with_ids(lambda m, ids: ids != 57), {}),
    "kinds by id": (with_ids(lambda m, ids: m.kinds[ids] == 0), {"kinds": (torch.arange(VOCAB) % 9 == 7).long()}),
    "kinds by id, embedding": (with_ids(lambda m, ids: F.embedding(ids, m.kinds)[..., 0] < 1),
                               {"kinds": (torch.arange(VOCAB) % 9 == 7).float()[:, None]}),
    "isin": (with_ids(lambda m, ids: ~torch.isin(ids, m.bad)), {"bad": torch.tensor([50, 51, 52])}),
    "hash of ids": (with_ids(lambda m, ids: ids * 2654435761 % 13 != 3), {}),
    "documents": (lambda m, ids, p: (causal(m, *pair(p)) & (pair((ids == 5).cumsum(-1))[0] == pair(
        (ids == 5).cumsum(-1))[1]))[:, None], {}),
    "ids cumsum": (with_ids(lambda m, ids: ids.cumsum(-1) < 1000), {}),
    "hidden states": (with_ids(lambda m, ids: m.embed(ids)[..., 0] < 1.0), {}),
    "positions plus ids": (lambda m, ids, p: (pair(p + 0 * ids)[1] <= pair(p)[0])[:, None], {}),
    # Other masks of positions.
    "prefix": (of(lambda m, i, j: (j <= i) | (j < 5)), {}),
    "prefix far out": (of(lambda m, i, j: (j <= i) & ((i < 50) | (i - j < 40))), {}),
    "first token always": (of(lambda m, i, j: (j <= i) & ((i - j < 8) | (j == 0))), {}),
    "strictly before": (of(lambda m, i, j: (j < i) | (i == 0)), {}),
    "chunk from 1": (of(lambda m, i, j: (j <= i) & ((i + 1) // 8 == (j + 1) // 8)), {}),
    "this chunk and the last": (of(lambda m, i, j: (j <= i) & (i // 8 - j // 8 <= 1)), {}),
    "window per head": (lambda m, ids, p: (pair(p)[1] <= pair(p)[0])[:, None] & ((pair(p)[0] - pair(p)[1])[:, None] < m.w),
                        {"w": per_head([8, 16, 32, 48])}),
    "one head another window": (lambda m, ids, p: (pair(p)[1] <= pair(p)[0])[:, None] & (
        (pair(p)[0] - pair(p)[1])[:, None] < m.w), {"w": per_head([8, 8, 8, 9])}),
    "positions hidden by a table": (lambda m, ids, p: (causal(m, *pair(p)) & m.t[p][:, None, :])[:, None], {"t": N != 37}),
    "a table at negative places": (lambda m, ids, p: (causal(m, *pair(p)) & m.t[p - 1][:, None, :])[:, None], {
        "t": N != REACH - 1}),
    "an arange buffer at negative places": (lambda m, ids, p: (causal(m, *pair(p)) & (m.t[p - 1][:, None] <= pair(p)[0]))[
        :, None], {"t": N}),
    "only early queries": (lambda m, ids, p: ((pair(p)[1] <= pair(p)[0]) & ((pair(p)[0] - p[:, :1, None] < 8) | (
        pair(p)[0] == pair(p)[1])))[:, None], {}),
    "stored triangle with a hole": (cut("t"), {"t": (AHEAD <= 0) & ~((N[:, None] == 60) & (N[None] == 11))}),
    "stored, one head with a hole": (cut("t"), {"t": torch.stack([AHEAD <= 0] * 3 + [(AHEAD <= 0) & (AHEAD != -40)])[None]}),
    "stored float, soft": (cut("t"), {"t": torch.zeros(REACH, REACH).masked_fill(AHEAD > 0, -math.inf).masked_fill(
        AHEAD == -50, -0.5)}),
    "bucketed": (of(lambda m, i, j: (j <= i) & (torch.log2((i - j).clamp(min=1).float()).floor() < 5)), {}),
    "whole batch": (of(lambda m, i, j: j >= 0), {}),
    # Lengths.
    "half of the length": (lambda m, ids, p: (causal(m, *pair(p)) & (pair(p)[0] - pair(p)[1] < p.shape[1] // 2 + 1))[:, None],
                           {}),
    "from the end": (lambda m, ids, p: (causal(m, *pair(p)) & (p.shape[1] - pair(p)[1] < 40))[:, None], {}),
    "long sequences only": (lambda m, ids, p: (causal(m, *pair(p)) & ((pair(p)[0] - pair(p)[1] < 8) | (torch.full(
        (1,), p.shape[1]) < 40)))[:, None], {}),
    # Biases.
    "alibi": (lambda m, ids, p: slopes(m, *pair(p)), {"slopes": torch.rand(HEADS, 1, 1)}),
    "relative bias": (of(lambda m, i, j: torch.where(j <= i, (j - i) * 0.1, -math.inf)), {}),
    "bias by bucket": (of(lambda m, i, j: torch.where(j <= i, m.t[(i - j).clamp(0, 31)], -math.inf)), {"t": torch.randn(32)}),
    "scaled by a learned gate": (lambda m, ids, p: filled(-1.0)(m, ids, p) * m.gate, {"gate": torch.tensor(1e5)}),
    # Numbers that do not hold positions.
    "bfloat16 positions": (lambda m, ids, p: (pair(p.bfloat16())[1] <= pair(p.bfloat16())[0])[:, None], {}),
    "uint8 differences": (of(lambda m, i, j: (j <= i) & ((i - j).to(torch.uint8) < 200)), {}),
    # Written in place, or by the forward.
    "a column overwritten": (written, {}),
    "buffer that counts calls": (counted, {"steps": torch.tensor(5)}),
    "random": (lambda m, ids, p: causal(m, *pair(p))[:, None] & (torch.rand(1, 1, 1, p.shape[1]) < 0.9), {}),
}


def square(p, fill=1.0):
    return torch.full((p.shape[1], p.shape[1]), fill)


def stacked(*widths):
    """A window for each head."""
    return lambda m, ids, p: torch.stack([causal(m, *pair(p[0])) & (pair(p[0])[0] - pair(p[0])[1] < w) for w in widths])[None]


def packed(m, ids, p):
    document = (p == 0).cumsum(-1)
    return (causal(m, *pair(p)) & (pair(document)[0] == pair(document)[1]))[:, None]


def kept(m, ids, p):
    if getattr(m, "kept", None) is None:
        m.kept = torch.ones(REACH, REACH, dtype=torch.bool).tril()
    return m.kept[: p.shape[1], : p.shape[1]]


def toggled(m, ids, p):
    m.even = not getattr(m, "even", False)
    return (causal(m, *pair(p)) & (pair(p)[0] - pair(p)[1] < (8 if m.even else 16)))[:, None]


#: Other spellings: of known kinds.
MORE_EXACT = {
    "logarithm": (lambda m, ids, p: square(p).tril().log(), {}),
    "logarithm of a product": (lambda m, ids, p: (square(p).tril() * square(p).triu(-7)).log(), {}),
    "filled twice": (lambda m, ids, p: (k := square(p).tril()).masked_fill(k == 0, -math.inf).masked_fill(k == 1, 0.0), {}),
    "made finite": (lambda m, ids, p: square(p).tril().log().nan_to_num(neginf=MIN), {}),
    "all of several": (lambda m, ids, p: torch.stack([square(p).tril(), square(p).triu(-7)]).bool().all(0), {}),
    "least of several": (lambda m, ids, p: torch.stack([square(p).tril(), square(p).triu(-7)], -1).amin(-1) > 0, {}),
    "product of several": (lambda m, ids, p: torch.stack([square(p).tril(), square(p).triu(-7)]).int().prod(0).bool(), {}),
    "triangles subtracted": (lambda m, ids, p: (square(p).tril() - square(p).tril(-8)).bool(), {}),
    "windows stacked, all the same": (stacked(8, 8, 8, 8), {}),
    "joined heads": (lambda m, ids, p: torch.cat([square(p).tril().bool()[None]] * HEADS)[None], {}),
    "repeated heads": (lambda m, ids, p: square(p).tril().bool()[None, None].repeat_interleave(HEADS, 1), {}),
    "lower bits": (of(lambda m, i, j: (j <= i) & ((i & ~7) == (j & ~7))), {}),
    "bits set": (of(lambda m, i, j: (j <= i) & ((i | 7) == (j | 7))), {}),
    "remainder by bits": (of(lambda m, i, j: (j <= i) & (i - (i & 7) == j - (j & 7))), {}),
    "shifted there and back": (of(lambda m, i, j: (j <= i) & ((i >> 3) << 3 <= j)), {}),
    "rounded up": (of(lambda m, i, j: (j <= i) & (((i + 1) / 8).ceil() == ((j + 1) / 8).ceil())), {}),
    "sign": (of(lambda m, i, j: (torch.sign(i - j) >= 0) & (torch.sign(i - j - 8) < 0)), {}),
    "grid": (lambda m, ids, p: torch.ge(*torch.meshgrid(p[0], p[0], indexing="ij")), {}),
    "grid, x first": (lambda m, ids, p: torch.le(*torch.meshgrid(p[0], p[0], indexing="xy")), {}),
    "packed sequences, of which there is one": (packed, {}),
    "narrowed": (lambda m, ids, p: m.t.narrow(0, 0, p.shape[1]).narrow(1, 0, p.shape[1]), {"t": AHEAD <= 0}),
    "stored, least number": (cut("t"), {"t": torch.full((REACH, REACH), MIN).triu(1)}),
    "kept from an earlier call": (kept, {}),
}
MORE_REFUSED = {
    "windows stacked": (stacked(4, 8, 16, 32), {}),
    "half of the heads": (lambda m, ids, p: torch.cat([square(p).tril().bool()[None].expand(2, -1, -1), square(p).tril().triu(
        -7).bool()[None].expand(2, -1, -1)])[None], {}),
    "any of several": (lambda m, ids, p: torch.stack([square(p).tril(), square(p).triu(3)]).bool().any(0), {}),
    "lower bits of the distance": (of(lambda m, i, j: (j <= i) & (((i - j) & 3) == 0)), {}),
    "counted ids": (with_ids(lambda m, ids: (ids == 5).cumsum(-1) < 2), {}),
    "exponential of the distance": (of(lambda m, i, j: (j <= i) & (torch.exp((j - i).float()) > 1e-3)), {}),
    "logarithm, soft": (lambda m, ids, p: (square(p).tril() + 0.5).log(), {}),
    "made finite, too large": (lambda m, ids, p: square(p).tril().log().nan_to_num(neginf=-1e4), {}),
    "diagonal cleared": (lambda m, ids, p: (square(p).tril().bool() | (pair(p[0])[0] == 0)).fill_diagonal_(False) | (
        pair(p[0])[0] == 0), {}),
    "stored, least number and others": (cut("t"), {
        "t": torch.full((REACH, REACH), MIN).triu(1).masked_fill(AHEAD == 9, -1e30)}),
    "block sparse": (of(lambda m, i, j: (j <= i) & ((i // 8 == j // 8) | (j % 8 == 7))), {}),
    "growing window": (of(lambda m, i, j: (j <= i) & (i - j < 8 + i // 4)), {}),
    "one ahead": (of(lambda m, i, j: j <= i + 1), {}),
    "window in turn": (toggled, {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name, expected", [*((n, "exact") for n in MORE_EXACT), *((n, "refused") for n in MORE_REFUSED)])
def test_other_spellings(name: str, expected: str) -> None:
    routes = sorted(ROUTES)
    route = "compile" if name == "window in turn" else routes[len(name) % len(routes)]
    assert outcome(make(name), route).partition(":")[0] == expected


def make(name: str) -> Model:
    mask, tensors = (EXACT | REFUSED | MORE_EXACT | MORE_REFUSED)[name]
    model = Model(mask, **tensors).eval()
    model.width = 8
    return model


def cases(table):
    """Each on one route in turn; on all routes in the slow run."""
    routes = list(ROUTES)
    return [pytest.param(name, route, marks=[pytest.mark.slow] * (routes[i % len(routes)] != route))
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


def test_the_refusal_names_the_node_and_the_module_and_what_would_help() -> None:
    found = outcome(make("ids above 40"), "compile")
    assert "input_ids" in found and "node l_" in found and "made of position_ids and constants can be served" in found


def test_causal_flag_and_mask() -> None:
    model = Model(lambda m, ids, p: None, is_causal=True)
    assert outcome(model, "compile") == "exact"


@pytest.mark.parametrize("route", ["compile", "engine"])
def test_a_stored_mask_that_changes_is_noticed(route: str) -> None:
    """In place, between two steps: by value on a CPU."""
    model, calls = Model(cut("t"), t=(AHEAD <= 0).clone()), 0
    torch._dynamo.reset()
    options = QuireOptions(compiler="eager", page_size=4)
    if route == "engine":
        served = PagedModel(model, options)
    else:
        compiled = torch.compile(model, backend=QuireBackend(options), fullgraph=True)

    def run(cache, meta, ids, positions):
        nonlocal calls
        if calls == 1:
            model.t.data &= AHEAD > -4
        calls += 1
        with quire.step(cache, meta) as step:
            if route == "engine":
                return served(step, ids, positions, torch.arange(len(ids)))
            return compiled(input_ids=ids[None], position_ids=positions[None])[0]

    with pytest.raises(quire.UnsupportedAttention, match="that an attention mask is made of has changed"):
        paged(run)
    assert calls == 2


def check(report: Report, case: tuple[Tree, str, int], route: str) -> None:
    model = random_model(*case)
    try:
        plain(model)
    except (RuntimeError, TypeError):  # no model at all, such as a remainder of truths
        return
    report.add(is_a_known_kind(model), outcome(model, route))


def test_random_masks() -> None:
    report = Report()

    @settings(max_examples=20, database=None, suppress_health_check=list(HealthCheck))
    @given(trees(), st.sampled_from(sorted(ROUTES)))
    def run(case, route):
        check(report, case, route)

    run()
    assert report.counts["harmless, exact"] >= 3 and report.counts["other, refused"] >= 3


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_many_random_masks() -> None:
    """``QUIRE_MASKS`` examples; ``QUIRE_MASK_REPORT`` names a file for the counts."""
    report = Report()

    @settings(max_examples=int(os.environ.get("QUIRE_MASKS", "200")), database=None, suppress_health_check=list(HealthCheck))
    @given(trees(), st.sampled_from(sorted(ROUTES)))
    def run(case, route):
        check(report, case, route)

    try:
        run()
    finally:
        print(report)
    assert report.share_refused < 0.15


def test_the_oracle_of_the_generator() -> None:
    """Known kinds are recognized, and others are not."""
    for op, number, known in (("causal:ids:le", 0, True), ("spoil:ids:ids", 0, False), ("spoil:ids:prefix", 5, False)):
        tree = Tree("and:", 0, (Tree("causal:arange:tril"), Tree(op, number)))
        assert is_a_known_kind(random_model(tree, "bool", 3)) == known
    assert buffers(3)["band"].shape == (1, 1, REACH, REACH) and build(
        Tree("causal:ids:le"), Model(None), torch.zeros(1, 3, dtype=torch.long), torch.arange(3)[None]).shape == (3, 3)


class Repeated(torch.nn.Module):
    """Keys and values of two heads, repeated to four and scaled head by head in place."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.place = torch.nn.Embedding(VOCAB, 16), torch.nn.Embedding(REACH, 16)
        self.kv, self.head = torch.nn.Linear(16, 16), torch.nn.Linear(16, VOCAB)
        self.register_buffer("gain", torch.tensor([1.0, 2.0, 3.0, 4.0]).view(1, HEADS, 1, 1))

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids) + self.place(position_ids)
        q = x.view(1, -1, HEADS, 4).transpose(1, 2)
        k, v = (t.view(1, -1, 2, 4).transpose(1, 2).repeat_interleave(2, dim=1) for t in self.kv(x).chunk(2, dim=-1))
        v.mul_(self.gain)
        return self.head(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


def test_a_repeat_that_is_changed_in_place_stays() -> None:
    """What is written into the repeated values is in the result: they are not taken back to those before it."""
    model = Repeated().eval()
    torch._dynamo.reset()
    served = PagedModel(model, QuireOptions(compiler="eager", page_size=4))

    def run(cache, meta, ids, positions):
        with quire.step(cache, meta) as step:
            return served(step, ids, positions, torch.arange(len(ids)))

    with torch.no_grad():
        want = [model(s[None], torch.arange(len(s))[None])[0] for s in sequences()]
    assert max((g - w).abs().max().item() for g, w in zip(paged(run), want, strict=True)) <= 1e-5
