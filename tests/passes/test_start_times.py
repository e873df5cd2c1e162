"""Seconds by stage: what a stage within another took counts once."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from quire.passes.start_times import format_seconds, seconds, since, timed


def test_stages_within_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr("quire.passes.start_times.time", SimpleNamespace(perf_counter=lambda: clock.now))
    before = dict(seconds)
    with timed("outer"):
        clock.now += 1
        with timed("inner"):
            clock.now += 4
        with timed("inner"):
            clock.now += 5
    assert since(before) == pytest.approx({"outer": 1, "inner": 9})
    assert format_seconds({"a": 1.0, "b": 2.5}) == "b 2.5 s, a 1.0 s"


def test_a_stage_that_fails_counts() -> None:
    before = dict(seconds)
    with pytest.raises(ValueError), timed("outer"), timed("failing"):
        raise ValueError
    assert set(since(before)) == {"outer", "failing"}
    with timed("after"):
        pass
    assert set(since(before)) == {"outer", "failing", "after"} and since(before)["after"] >= 0
