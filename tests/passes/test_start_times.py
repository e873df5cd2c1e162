"""Seconds by stage: what a stage within another took counts once."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from quire.passes.start_times import described, seconds, since, stage


def test_stages_within_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr("quire.passes.start_times.time", SimpleNamespace(perf_counter=lambda: clock.now))
    before = dict(seconds)
    with stage("outer"):
        clock.now += 1
        with stage("inner"):
            clock.now += 4
        with stage("inner"):
            clock.now += 5
    assert since(before) == pytest.approx({"outer": 1, "inner": 9})
    assert described({"a": 1.0, "b": 2.5}) == "b 2.5 s, a 1.0 s"


def test_a_stage_that_fails_counts() -> None:
    before = dict(seconds)
    with pytest.raises(ValueError), stage("outer"), stage("failing"):
        raise ValueError
    assert set(since(before)) == {"outer", "failing"}
    with stage("after"):
        pass
    assert set(since(before)) == {"outer", "failing", "after"} and since(before)["after"] >= 0
