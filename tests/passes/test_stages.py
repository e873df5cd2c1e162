"""Seconds by stage: what a stage within another took counts once."""

from __future__ import annotations

import time

import pytest

from passes.stages import described, seconds, since, stage


def test_stages_within_stages() -> None:
    before = dict(seconds)
    with stage("outer"):
        time.sleep(0.02)
        with stage("inner"):
            time.sleep(0.05)
        with stage("inner"):
            time.sleep(0.05)
    spent = since(before)
    assert set(spent) == {"outer", "inner"}
    assert 0.1 <= spent["inner"] < 1 and 0.02 <= spent["outer"] < spent["inner"]
    assert described({"a": 1.0, "b": 2.5}) == "b 2.5 s, a 1.0 s"


def test_a_stage_that_fails_counts() -> None:
    before = dict(seconds)
    with pytest.raises(ValueError), stage("outer"), stage("failing"):
        raise ValueError
    assert set(since(before)) == {"outer", "failing"}
    with stage("after"):
        pass
    assert since(before)["after"] < 1
