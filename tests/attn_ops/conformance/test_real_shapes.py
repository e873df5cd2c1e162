"""The kit's features at the shapes of real models: what is wrong there alone is seen, and what is declared alone is asked."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from quire.attn_ops.backend import AttentionCapabilities
from quire.attn_ops.conformance import page, real_shapes
from quire.attn_ops.conformance.checks import Kit
from quire.attn_ops.conformance.report import check_backend
from tests.attn_ops.conformance.test_kit import NATIVE, broken, failures

CPU, FP32 = torch.device("cpu"), torch.float32


def longest(given: dict[str, Any]) -> int:
    return int(given["seq_lens"].max())


def one(given: dict[str, Any]) -> bool:
    return len(given["seq_lens"]) == 1


def wrong(feature: str, where: Callable[[dict[str, Any]], bool]) -> Callable[[dict[str, Any]], None]:
    """A window of one token too many, or no such feature, where ``where``."""
    def change(given: dict[str, Any]) -> None:
        if given[feature] is not None and where(given):
            given[feature] = given[feature] + 1 if feature == "window" else None

    return change


#: What is wrong, and where; all other checks of the kit pass.
WRONG: dict[str, tuple[str, Callable[[dict[str, Any]], bool]]] = {
    **{f"{feature}_of_one_sequence": (feature, one) for feature in ("window", "softcap", "chunk", "sinks")},
    **{f"{feature}_past_128": (feature, lambda g: longest(g) > 128) for feature in ("window", "softcap", "chunk", "sinks")},
    "large_window": ("window", lambda g: g["window"] > 64),
    "window_of_large_heads": ("window", lambda g: g["q"].shape[2] >= 128),
    "sinks_of_heads_of_64": ("sinks", lambda g: g["q"].shape[2] >= 64),
    "softcap_of_groups_of_8": ("softcap", lambda g: g["q"].shape[1] == 8 * g["k_cache"].shape[2]),
    "window_of_many_rows": ("window", lambda g: len(g["seq_lens"]) > 16),
    "softcap_of_long_prompts": ("softcap", lambda g: len(g["q"]) >= 500 and one(g)),
    "window_after_a_prefix": ("window", lambda g: one(g) and 188 <= len(g["q"]) < longest(g)),
    "window_on_pages_of_16": ("window", lambda g: g["k_cache"].shape[1] >= 16),
    "sinks_on_pages_of_64": ("sinks", lambda g: g["k_cache"].shape[1] >= 64),
    "window_by_heads": ("window", lambda g: g["k_cache"].stride(1) < g["k_cache"].stride(2)),
}
SOME = ("window_of_one_sequence", "softcap_past_128", "sinks_of_heads_of_64", "window_of_many_rows")


@pytest.mark.parametrize("name", WRONG)
def test_wrong_at_real_shapes(name: str) -> None:
    feature, where = WRONG[name]
    assert failures(broken(wrong(feature, where)), f"real shapes: {feature}") == {f"real shapes: {feature}"}


@pytest.mark.slow
@pytest.mark.parametrize("name", WRONG)
def test_wrong_at_real_shapes_in_bfloat16(name: str) -> None:
    """Its rounding hides none of them: windows, sinks and softcap are of sizes that matter."""
    feature, where = WRONG[name]
    for only in (f"real shapes: {feature}", "real shapes: together"):
        (result,) = check_backend(broken(wrong(feature, where)), CPU, torch.bfloat16, only=only, quick=True)
        assert result.status == "FAIL"


@pytest.mark.slow
@pytest.mark.parametrize("name", SOME)
def test_no_other_check_sees_them(name: str) -> None:
    assert {check.partition(":")[0] for check in failures(broken(wrong(*WRONG[name])))} == {"real shapes"}


# Which cases.


def pairs(cases: list[dict[str, Any]]) -> set[tuple[Any, ...]]:
    return {((a, str(case[a])), (b, str(case[b]))) for case in cases for a, b in itertools.combinations(sorted(case), 2)}


@pytest.mark.parametrize("quick", [True, False])
def test_every_two_values_meet(quick: bool) -> None:
    kit = Kit(NATIVE, CPU, FP32, quick=quick)
    values, found = real_shapes.factors(kit), real_shapes.cases(kit)
    every = [dict(zip(values, each, strict=True)) for each in itertools.product(*values.values())]
    sets = [values["features"]] if quick else [[has] for has in values["features"]]
    for chosen in sets:
        assert pairs([c for c in found if c["features"] in chosen]) == pairs([c for c in every if c["features"] in chosen])
    assert len(found) < (40 if quick else 250) < len(every) / 4
    assert values["dims"] == [(64, 64), (128, 128), (256, 256)] and values["page_size"] == [16, 64]
    assert len(values["features"]) == (6 if quick else 12)
    assert found == real_shapes.cases(kit), "the same in each process"


def test_only_what_is_declared_is_asked_for() -> None:
    """Heads, pages, dims and layouts by their predicates; what a site may not have at once, by ``reasons_against``."""
    class NotBoth(AttentionCapabilities):
        def reasons_against(self, site, **cache):
            both = ["no sinks with a window of heads of 128"] if site.sinks and site.window and site.head_dim == 128 else []
            return super().reasons_against(site, **cache) + both

    fields = {f.name: getattr(NATIVE.capabilities, f.name) for f in dataclasses.fields(AttentionCapabilities)}
    caps = NotBoth(**{
        **fields, "page_sizes": lambda p: p in (32, 128), "head_dims": lambda d, dv: d == dv and d in (16, 64, 128),
        "heads": lambda heads, kv_heads: heads < 8 * kv_heads, "layouts": frozenset({"NHD"}), "softcap": False, "chunk": False})
    kit = Kit(dataclasses.replace(NATIVE, capabilities=caps), CPU, FP32)
    found = real_shapes.cases(kit)
    assert {(c["page_size"], c["heads"], c["layout"], c["rotary"]) for c in found} == {(128, (2, 2), "NHD", False)}
    assert {c["dims"][0] for c in found if c["features"] == ("window", "sinks")} == {64}
    assert {c["dims"][0] for c in found if c["features"] == ("window",)} == {64, 128}
    assert [name for name, _ in real_shapes.checks(kit)] == [
        "real shapes: no feature", "real shapes: window", "real shapes: sinks", "real shapes: window and sinks"]
    small = dataclasses.replace(caps, head_dims=lambda d, dv: d <= 24, sinks=False)
    assert {c["dims"] for c in real_shapes.cases(Kit(dataclasses.replace(NATIVE, capabilities=small), CPU, FP32))} == {(24, 16)}


def test_batches_have_each_boundary() -> None:
    """A window and a chunk, one token less and one more, and the longest context, in which both hide keys; a long prompt, and
    one with a prefix."""
    case = dict(features=("window", "chunk"), size=128, context=2100)
    alone = real_shapes.batches({**case, "batch": ("extend", 1)})
    assert alone == [[(16, 2100)], [(3, 127)], [(129, 129)], [(33, 128)], [(5, 255)], [(40, 257)], [(4, 256)], [(700, 700)],
                     [(572, 700)]]
    (mixed,) = real_shapes.batches({**case, "batch": ("mixed", 17)})
    assert len(mixed) == 18 and mixed[0] == (16, 2100) and mixed[-1] == (0, 5)
    assert {total for _, total in mixed} == {5, 2100, 127, 128, 129, 255, 256, 257}
    assert [count == 1 for count, _ in mixed[:-1]] == [False, True] * 8 + [False]


def test_one_row_of_the_page() -> None:
    names = [name for name, _ in real_shapes.checks(Kit(NATIVE, CPU, FP32, quick=True))]
    results = [{"check": name, "status": "ok", "detail": "6 cases", "error": 2e-7} for name in names]
    run = {"backend": "mine", "dtype": "float32", "kv_dtype": None, "reason": None, "results": results}
    text = page.checked({"environment": {"date": "", "devices": {}, "versions": {}}, "runs": [run]})
    assert "| features at real shapes | ok 6 of 6, 2.0e-07 |" in text
