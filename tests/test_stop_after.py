"""A run that stops in time says so, and still fails for a test that failed before."""

from __future__ import annotations

import pytest

from tests.stop_after import NOT_BEGUN, StopAfter

pytest_plugins = ["pytester"]

THREE = """
import time
def test_first(): assert {ok}
def test_long(): time.sleep(2)
def test_last(): pass
"""


def run(pytester: pytest.Pytester, seconds: float, ok: bool = True) -> pytest.RunResult:
    pytester.makepyfile(THREE.format(ok=ok))
    return pytester.runpytest_inprocess("-p", "no:quire", "-p", "no:cacheprovider", plugins=[StopAfter(seconds)])


def test_all_run_while_there_is_time(pytester: pytest.Pytester) -> None:
    result = run(pytester, 60)
    result.assert_outcomes(passed=3)
    result.stdout.no_fnmatch_line(f"*{NOT_BEGUN}*")


def test_what_was_not_begun_is_counted(pytester: pytest.Pytester) -> None:
    result = run(pytester, 1)
    result.assert_outcomes(passed=2, skipped=1)  # the one that was running ends
    result.stdout.fnmatch_lines(f"1 tests were {NOT_BEGUN}")


def test_a_failure_before_fails_the_run(pytester: pytest.Pytester) -> None:
    result = run(pytester, 1, ok=False)
    result.assert_outcomes(passed=1, failed=1, skipped=1)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
