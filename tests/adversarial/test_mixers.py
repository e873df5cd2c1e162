"""Small modules in which tokens meet, or look as if they did: each is exact or refused on every route.

What happens is written down for each: "refused" for those that mix tokens, "exact" for the harmless ones, which must be served.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers.integrations.moe  # noqa: F401  (registers the grouped product)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import quire
from quire import UnsupportedAttention, step
from tests.adversarial.generator import ATTENDING, mix_of, mixes, modules
from tests.adversarial.harness import (
    DIM,
    HEADS,
    PAGE,
    ROUTES,
    STEPS,
    WIDTH,
    Model,
    cache,
    check_exact,
    opened,
    outcome,
    sequences,
)
from tests.adversarial.mask_cases import Report
from tests.adversarial.mixers import ALONG, MIXES, SERVED, hidden
from tests.steps import serve
from tests.zoo.configs import SERVED as SERVED_BY_TRANSFORMERS
from tests.zoo.configs import build

Tensor = torch.Tensor

#: Proved by the same operation in tests/passes/verify/test_tokens.py, where a mutant of the rule goes red: slow here.
PROVED = {"linear attention", "attention by hand", "group norm", "average pool", "first row", "longest position", "token shift",
          "depthwise conv", "an op that is named clone", "an op that writes", "experts by other counts",
          "overlapping as_strided"}
#: Each of the others, and an eighth of what is done along the tokens, runs on one route, in turn; all on all in the slow run.
QUICK = {(name, ROUTES[i % 3]) for i, name in enumerate(MIXES) if name not in PROVED and (i >= len(ALONG) or i % 8 == 0)}
#: What is harmless runs four at a time, one after the other in one model, and alone on the other routes in the slow run, as
#: three quarters of the fours.
ROWS = [list(SERVED)[i : i + 4] for i in range(0, len(SERVED), 4)]


@pytest.mark.parametrize("name, route", [pytest.param(name, route, marks=[pytest.mark.slow] * ((name, route) not in QUICK))
                                         for name in MIXES for route in ROUTES])
def test_mixing_is_refused(name: str, route: str) -> None:
    assert outcome(lambda kind: kind(MIXES[name]), route).startswith("refused"), "it came out exact by chance"


@pytest.mark.parametrize("number", [pytest.param(n, marks=[pytest.mark.slow] * (n % 4 > 0)) for n in range(len(ROWS))])
def test_harmless_ones_in_a_row(number: int) -> None:
    def mix(m: Model, x: Tensor, p: Tensor) -> Tensor:
        for name in ROWS[number]:
            y = SERVED[name](m, x, p)
            x = (y / (1 + y.abs().amax(-1, keepdim=True) / 8)).contiguous()  # of order 1, side by side, as each takes it alone
        return x

    assert outcome(lambda kind: kind(mix), ROUTES[number % 3]) == "exact", ROWS[number]


@pytest.mark.slow
@pytest.mark.parametrize("name, route", [(name, ROUTES[i % 3]) for number, names in enumerate(ROWS) for name in names
                                         for i in (number + 1, number + 2)])
def test_harmless_is_served(name: str, route: str) -> None:
    assert outcome(lambda kind: kind(SERVED[name]), route) == "exact"


class Untraced(Model):
    """Dynamo cannot break a graph inside a ``with`` it does not know, and leaves this forward to Python."""

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        with contextlib.ExitStack():
            torch._dynamo.graph_break()
            x = super().forward(input_ids, position_ids)
        return x - x.mean(1, keepdim=True)


def test_parts_of_a_model_are_refused() -> None:
    """What runs between two graphs, in a forward that Dynamo gave up, or in a hook of the model, is in no graph."""
    hooked = Model()
    hooked.register_forward_hook(lambda module, args, out: out - out.mean(1, keepdim=True))
    for model in (Model(lambda m, x, p: hidden(x)), Untraced(), hooked):
        assert "compiled in parts" in outcome(lambda kind, model=model: model, "compile")


class EndsInABreak(Model):
    """No graph begins behind the break, so that only the one before it can tell."""

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        return hidden(super().forward(input_ids, position_ids))


def test_a_break_at_the_end_is_refused() -> None:
    assert "compiled in parts" in outcome(lambda kind: EndsInABreak(), "compile")


class Behind(torch.nn.Module):
    def __init__(self, inner: torch.nn.Module, mix: Any) -> None:
        super().__init__()
        self.inner, self.mix = inner, mix

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(self.inner(x))


def paged(model: Any) -> Callable[[Tensor, Any], Tensor]:
    """Make a transformers model of two layers paged; the call of one step, not compiled."""
    quire.paged(model)
    kv = cache(layers=2, kv_heads=model.config.num_key_value_heads, head_dim=model.config.head_dim)

    def call(part: Tensor, meta: Any) -> Tensor:
        with step(kv, meta):
            return model(part[None], position_ids=meta.positions[None], use_cache=False).logits[0]

    return call


UNCOMPILED = {
    "mean": (lambda x: x - x.mean(1, keepdim=True), "layers.1.mlp mixes the tokens"),
    "rare event": (lambda x: torch.where(x.amax() > 1e9, -x, x), "layers.1.mlp mixes the tokens"),
    "softmax over features": (lambda x: x * x.softmax(-1), None),
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n == "rare event")) for n in UNCOMPILED])
def test_uncompiled(name: str) -> None:
    """A transformers model with a layer of its own, paged and not compiled: traced once, and not run if it mixes."""
    mix, why = UNCOMPILED[name]
    model = build(SERVED_BY_TRANSFORMERS["llama"])
    model.model.layers[1].mlp = Behind(model.model.layers[1].mlp, mix)
    ids = sequences()
    with torch.no_grad():
        want = [model(i[None], use_cache=False).logits[0] for i in ids]
    call = paged(model)
    if why is not None:
        with pytest.raises(UnsupportedAttention, match=why):
            serve(call, ids, STEPS, PAGE)
        return
    check_exact(serve(call, ids, STEPS, PAGE), want)
    model.model.layers[0].mlp = Behind(model.model.layers[0].mlp, UNCOMPILED["mean"][0])
    with pytest.raises(UnsupportedAttention, match="layers.0.mlp mixes the tokens"):  # seen, though it was fine before
        serve(call, ids, STEPS, PAGE)


SWITCH = {"mixes": False}


def switched(x: Tensor) -> Tensor:
    return x - x.mean(1, keepdim=True) if SWITCH["mixes"] else x


@pytest.mark.slow
def test_changes_between_uncompiled_steps_are_seen() -> None:
    """What the forward reads elsewhere, and training modes, may change in what was proved."""
    model = build(SERVED_BY_TRANSFORMERS["llama"])
    drop = torch.nn.Dropout(0.5).eval()
    model.model.layers[1].mlp = torch.nn.Sequential(Behind(model.model.layers[1].mlp, switched), drop)
    call = paged(model)

    def run() -> None:
        serve(call, sequences(lengths=(3,)), [(3,)], PAGE)

    run()
    drop.train()
    with pytest.raises(UnsupportedAttention, match="it draws random numbers"):
        run()
    drop.eval()
    SWITCH["mixes"] = True
    try:
        with pytest.raises(UnsupportedAttention, match="it is taken over the tokens"):
            run()
    finally:
        SWITCH["mixes"] = False
    run()


def test_a_hook_between_steps_by_hand_is_seen() -> None:
    model = Model(lambda m, x, p: m.point(x.mT).mT)
    with opened(model, "compile", cache()) as call:
        serve(call, sequences(lengths=(3,)), [(3,)], PAGE)
        model.point.register_forward_hook(lambda module, args, out: out.flip(2))
        with pytest.raises(Exception, match="it goes along the tokens"):
            serve(call, sequences(lengths=(3,)), [(3,)], PAGE)


#: Some of ``MIXES`` that need no positions, in the place of an MLP: each is refused by another rule.
OF_STATES = ("linear attention", "attention by hand", "bmm over T", "instance norm", "max pool", "first row", "quantile over T",
             "bincount")


@pytest.mark.slow
def test_uncompiled_mixers() -> None:
    """As ``test_uncompiled``, one after another in the second layer of a model that is served without them."""
    model, helper = build(SERVED_BY_TRANSFORMERS["llama"]), Model()
    plain, call = model.model.layers[1].mlp, paged(model)
    serve(call, sequences(), STEPS, PAGE)
    for name in OF_STATES:
        mix = MIXES[name]
        model.model.layers[1].mlp = Behind(
            plain, lambda x, mix=mix: torch.cat([mix(helper, x[..., :WIDTH], None), x[..., WIDTH:]], -1))
        with pytest.raises(UnsupportedAttention, match="mixes the tokens|cannot prove|the length of the row as a plain number"):
            serve(call, sequences(), STEPS, PAGE)


def check_random(steps: Any, route: str) -> str:
    own = sum(name in ATTENDING for kind, name, _ in steps if kind == "mixing")
    return outcome(lambda kind: kind(mix_of(steps)), route, layers=1 + own, kv_heads=[HEADS, *[1] * own],
                   head_dim=[DIM, *[WIDTH] * own])


@given(modules(), st.sampled_from(ROUTES))
@settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_random_modules(steps: Any, route: str) -> None:
    """Exact or refused, never wrong; and what mixes by construction is refused."""
    check_random(steps, route)


@pytest.mark.slow
@pytest.mark.timeout(6 * 3600)
def test_many_random_modules() -> None:
    """``QUIRE_EXAMPLES`` modules, by default few; ``QUIRE_MODULE_REPORT`` names a file for the counts."""
    report = Report("QUIRE_MODULE_REPORT")

    @given(modules(), st.sampled_from(ROUTES))
    @settings(max_examples=int(os.environ.get("QUIRE_EXAMPLES", "100")), deadline=None, database=None,
              suppress_health_check=list(HealthCheck))
    def run(steps: Any, route: str) -> None:
        report.add(not mixes(steps), check_random(steps, route))

    try:
        run()
    finally:
        print(report)
    assert report.share_refused < 0.15
