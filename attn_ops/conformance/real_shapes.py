"""Checks of the features at the shapes of real models: kernels take other paths for one sequence, for long ones, for large
heads and for large groups of them, and a feature may be missing in one of these alone.

A case is one value of each factor: the features of a layer, head dims, query heads per key head, page size, layout, batch,
window, longest context, and whether ``rope_op`` rotates. ``covering`` chooses few cases: with --quick so that every two values
of two factors meet in one of them, without it so that they do for each set of features. What a backend does not declare is left
out, of values and of combinations.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from quire.attn_ops.conformance.batches import check

if TYPE_CHECKING:
    from quire.attn_ops.conformance.checks import Kit

Case = dict[str, Any]
#: Of a window in tokens; of a chunk too, where there is no window. Of both, the chunk is twice the window: a shorter one would
#: hide it.
SIZES = (128, 512)
#: Tokens of the longest sequence. The last query is 51 or more tokens into a chunk, less than a window in the second.
CONTEXTS = (700, 2100)
#: What a batch is, and its sequences: every other one of a mixed batch schedules one token.
BATCHES = (("decode", 1), ("decode", 17), ("extend", 1), ("extend", 17), ("mixed", 17))
COUNTS = (16, 3, None, 33, 5, 40)  # tokens that the first sequences schedule in an extend, None: all of them; others few
PAGES = (16, 64)
#: Small, as scores are about 1: outputs without it differ by more than what bfloat16 may, at the longest context too.
SOFTCAP = 1.0


def covering(cases: Sequence[Case], names: Sequence[str]) -> list[Case]:
    """Few of ``cases`` in which every two values of two factors (``names``) meet that meet in any: each time the case with most
    new pairs, the first one of several."""
    bits: dict[Any, int] = {}
    pairs = [sum(1 << bits.setdefault((a, b, str(case[a]), str(case[b])), len(bits))
                 for a, b in itertools.combinations(names, 2)) for case in cases]
    left, chosen = (1 << len(bits)) - 1, []
    while left:
        best = max(range(len(cases)), key=lambda i: (pairs[i] & left).bit_count())
        chosen.append(cases[best])
        left &= ~pairs[best]
    return chosen


def feature_sets(kit: Kit) -> list[tuple[str, ...]]:
    """None, each that is declared, and all of them; without --quick every two too."""
    declared, counts = tuple(kit.features), [0, 1, len(kit.features)] if kit.quick else [0, 1, 2, len(kit.features)]
    return [each for n in sorted({n for n in counts if n <= len(declared)}) for each in itertools.combinations(declared, n)]


def factors(kit: Kit) -> dict[str, list[Any]]:
    """The values of each factor that the backend declares, cheap ones first: cases are chosen from the front."""
    dims = [(d, dv) for d, dv in kit.dims if d == dv and d >= 64] or kit.dims[-1:]
    tried = ((1, (2, 1, 4, 8)), (8, (1, 2, 4, 8) if kit.quick else (2, 1, 4, 8)))  # a group, and numbers of key heads
    heads = [next((pair for n in numbers if kit.caps.heads(*(pair := (group * n, n)))), None) for group, numbers in tried]
    return {
        "features": feature_sets(kit), "dims": dims, "heads": [pair for pair in heads if pair is not None],
        "page_size": [p for p in PAGES if p in kit.page_sizes] or kit.page_sizes[-1:], "layout": kit.layouts,
        "batch": list(BATCHES), "size": list(SIZES[:1] if kit.quick else SIZES), "context": list(CONTEXTS),
        "rotary": [False, True] if kit.backend.rope_op is not None else [False],
    }


def bounds(case: Case) -> dict[str, Any]:
    """The features of a case with their values."""
    size, has = case["size"], case["features"]
    values = {"window": size, "softcap": SOFTCAP, "chunk": 2 * size if "window" in has else size, "sinks": True}
    return {name: values[name] for name in has}


def cases(kit: Kit) -> list[Case]:
    """The covering cases that the backend declares."""
    values = factors(kit)
    of_site = ("features", "dims", "heads", "page_size", "layout", "size")

    def declared(case: Case) -> bool:
        heads, kv_heads = case["heads"]
        site = kit.site(heads, kv_heads, case["dims"], **bounds(case))
        return not kit.caps.reasons_against(site, device=kit.device, page_size=case["page_size"], layout=case["layout"],
                                            kv_dtype=kit.kv_dtype)

    def product(names: Sequence[str]) -> Iterator[Case]:
        return (dict(zip(names, each, strict=True)) for each in itertools.product(*(values[name] for name in names)))

    others = list(product([name for name in values if name not in of_site]))
    every = [site | other for site in product(of_site) if declared(site) for other in others]
    if kit.quick:
        return covering(every, list(values))
    names = [name for name in values if name != "features"]
    return [case for has in values["features"] for case in covering([c for c in every if c["features"] == has], names)]


def batches(case: Case) -> list[list[tuple[int, int]]]:
    """Rows of each batch of a case: the longest sequence, those that a window or chunk just holds, and just does not. One
    sequence after another, or 17 of them and one that waits. Of single ones that extend also a long prompt, and one with a
    cached prefix of a window or chunk: some backends read a step's own keys and those before them in ways of their own."""
    kind, count = case["batch"]
    sizes = [value for name, value in bounds(case).items() if name in ("window", "chunk")] or [case["size"]]
    lens = [case["context"], *(size + n for size in sizes for n in (-1, 1, 0))]
    if count > 1:
        lens = [lens[0], *itertools.islice(itertools.cycle(lens[1:]), count - 1)]
    rows = []
    for i, total in enumerate(lens):
        tokens = COUNTS[i] if i < len(COUNTS) else 2 + i % 4
        rows.append((1 if kind == "decode" or (kind == "mixed" and i % 2) else tokens or total, total))
    if (kind, count) == ("extend", 1):
        rows += [(CONTEXTS[0], CONTEXTS[0]), (CONTEXTS[0] - case["size"], CONTEXTS[0])]
    return [[row] for row in rows] if count == 1 else [[*rows, (0, 5)]]


def run(kit: Kit, chosen: Sequence[Case]) -> str:
    for number, case in enumerate(chosen):
        features = bounds(case)
        seen = min([value for name, value in features.items() if name in ("window", "chunk")] or [case["context"]])
        options = {name: case[name] for name in ("dims", "page_size", "layout")}
        for rows in batches(case):
            heads, kv_heads = case["heads"]
            # Sinks that weigh as much as the keys that a query sees: others would be lost in the rounding of bfloat16.
            batch = kit.batch(rows, heads=heads, kv_heads=kv_heads, sink=math.log(seen), seed=number, **options, **features)
            check(kit.backend, batch, case["dims"][0] if case["rotary"] else 0)
    return f"{len(chosen)} cases"


def title(has: Sequence[str], features: Mapping[str, Any]) -> str:
    return "together" if len(has) == len(features) > 2 else " and ".join(has) or "no feature"


def checks(kit: Kit) -> list[tuple[str, Callable[[], str | None]]]:
    """One check for each set of features; the cases are chosen when the first is made."""
    found: list[Case] = []

    def make(has: tuple[str, ...]) -> str:
        found.extend(() if found else cases(kit))
        return run(kit, [case for case in found if case["features"] == has])

    return [(f"real shapes: {title(has, kit.features)}", functools.partial(make, has)) for has in feature_sets(kit)]
