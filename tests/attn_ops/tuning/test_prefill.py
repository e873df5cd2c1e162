"""Which of two backends is faster for a prefill, by a few measured times."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from quire.attn_ops.attention import AttentionSite
from quire.attn_ops.tuning import attention as store
from quire.attn_ops.tuning.prefill import PrefillRule, PrefillTime, Work, fit, of_measurement, pairs, rule, work
from tests.attn_ops.cases import make_backend

SITE = AttentionSite(0, 32, 8, 128, 128, torch.bfloat16, 0.1)
SHIPPED = [row for row in store.load(store.STORE.shipped) if row.device == "NVIDIA H200"]


@pytest.mark.parametrize("window, chunk", [(None, None), (5, None), (100, None), (None, 7), (None, 16)])
def test_pairs_are_those_that_the_masks_leave(window, chunk) -> None:
    query, seq = np.array([1, 9, 30, 4, 0]), np.array([17, 9, 41, 300, 0])
    expected = 0
    for q, s in zip(query.tolist(), seq.tolist(), strict=True):
        for p in range(s - q, s):
            expected += min(p + 1, window or p + 1, p % chunk + 1 if chunk else p + 1)
    assert pairs(query, seq, window, chunk) == expected
    one, two = work(SITE, np.array([4096]), np.array([4096])), work(SITE, np.array([1024] * 8), np.array([5120] * 8))
    assert one == Work(2 * 4096 * 4097 / 2 * 32 * 256 / 1e9, 4096, 4096 * 8 * 256 / 1e6) and two.keys == 5120
    assert two.mb == pytest.approx(10 * one.mb)
    assert work(dataclasses.replace(SITE, num_heads=16), np.array([4096]), np.array([4096])).operations == one.operations / 2
    assert work(dataclasses.replace(SITE, window=512), np.array([4096]), np.array([4096])).keys == 512


def test_a_fit_gives_the_times_that_it_was_made_of() -> None:
    true = PrefillTime(30.0, 2.5, 0.002)
    some = [Work(5, 1000, 2), Work(100, 4000, 8), Work(10, 8000, 16), Work(600, 5000, 80)]
    assert fit([(of, true.us(of)) for of in some]) == pytest.approx(true)
    assert fit([(of, true.us(of)) for of in some[:3]]) is None, "three points fit anything"
    copying, more = true._replace(per_mb=0.5), [*some, Work(3000, 32000, 60), Work(1e4, 32000, 500)]
    assert fit([(of, copying.us(of)) for of in more]) == pytest.approx(copying)
    falling = fit([(of, 100.0 - of.keys / 100) for of in some])
    assert falling is not None and min(falling) >= 0, "no time falls with work"


def test_the_shipped_times_are_described_within_a_tenth() -> None:
    """A user of an H200 gets a choice made of these. Decodes beside a prompt are no prefill."""
    rows = [row for row in SHIPPED if row.extend_us]
    assert rows
    for row in rows:
        points = of_measurement(row)
        found = fit(points)
        assert found is not None and len(points) < len(row.extend_us)
        assert [found.us(of) for of, _ in points] == pytest.approx([us for _, us in points], rel=0.1)


def test_a_host_that_launches_slowly_says_nothing_of_long_prompts() -> None:
    """Short prefills without a graph take what the host takes. As a part of every prefill, that made long ones seem slower."""
    truth = PrefillTime(40.0, 1.8, 0.0, 0.0, 150.0)
    works = [Work(operations, 0.0, 1.0) for operations in (8.0, 9.0, 137.0, 550.0, 1100.0, 2200.0)]
    found = fit([(of, truth.us(of)) for of in works])
    assert found is not None and found.host == pytest.approx(150.0)
    assert [found.us(of) for of in works] == pytest.approx([truth.us(of) for of in works], rel=1e-6)
    assert found.us(Work(300.0, 0.0, 1.0)) == pytest.approx(40.0 + 1.8 * 300.0, rel=1e-6)
    noisy = [(of, PrefillTime(40.0, 1.8, 0.0).us(of) * (1.02 if i % 2 else 0.98)) for i, of in enumerate(works)]
    found = fit(noisy)
    assert found is not None and not found.host, "noise of short times is no host"


def test_the_rule_takes_the_measured_class_or_the_nearest(monkeypatch) -> None:
    one, two = (make_backend(name) for name in ("one", "two"))
    rows = [dataclasses.replace(SHIPPED[0], backend=b.name, torch=torch.__version__.partition("+")[0], packages={},
                                device="here", extend_us=us)
            for b, us in ((one, {"1x4096": 316.0, "8x1024+4096": 1240.0, "1x960": 88.0, "1x64+8128": 118.0, "63x1,448": 1.0}),
                          (two, {"1x4096": 394.0, "8x1024+4096": 1869.0, "1x960": 52.0, "1x64+8128": 71.0}))]
    monkeypatch.setattr("quire.attn_ops.tuning.prefill.sources", lambda device: [rows])
    where = dict(device=torch.device("cpu"), page_size=16)
    found = rule(one, two, SITE, **where)
    assert found is not None and found.ever and str(found) == "562 against 361 TFLOP/s for long prompts"
    assert rule(one, two, dataclasses.replace(SITE, num_heads=16), **where) == found, "two heads per key head are near"
    for far in (dict(num_heads=256), dict(dtype=torch.float16), dict(window=512), dict(sinks=True)):
        assert rule(one, two, dataclasses.replace(SITE, **far), **where) is None
    assert rule(one, two, SITE, device=torch.device("cpu"), page_size=32) is None
    rows[1] = dataclasses.replace(rows[1], extend_us=rows[1].extend_us | {
        f"{name} without a graph": us * 0.8 for name, us in rows[1].extend_us.items()})
    faster = rule(one, two, SITE, **where)
    assert faster is not None and (faster.prefill, faster.graph) == (found.prefill, found.rest)
    assert faster.rest == pytest.approx([0.8 * term for term in found.rest]), "in steps without a graph"
    rows[1] = dataclasses.replace(rows[1], extend_us={k: v for k, v in rows[1].extend_us.items() if "graph" not in k})
    other = rule(two, one, SITE, **where)
    assert other is not None and not other.ever

    def spared(query: int, seq: int) -> float:
        return found.spared(work(SITE, np.array([query]), np.array([seq])))

    assert spared(960, 960) == 0 == spared(64, 8192), "a short prompt, and a short chunk of a long one"
    assert spared(8192, 8192) > 400 and spared(8192, 16384) > 1200
    assert spared(100, 100) == 0
    assert PrefillRule(PrefillTime(0, 1.0, 0), PrefillTime(0, 1.01, 0)).spared(Work(1e6, 0, 0)) == 0, "within the fit's error"
