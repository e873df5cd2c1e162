"""pytest plugin: the fixture ``quire_snapshot`` pins a model's attention sites in a test.

    def test_attention(quire_snapshot):
        quire_snapshot(MyModel(), \"\"\"
            layer  module                    route      needs                scale
            0      model.layers.0.self_attn  interface  GQA 4:2x64, float32  0.125
        \"\"\")

Indentation and surrounding blank lines are ignored. ``pytest --quire-accept`` (or EXPECTTEST_ACCEPT=1, as for expecttest)
writes the current table into the test file instead of failing. Until the fixture is used, only pytest is imported.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import pytest

_ACCEPT = "EXPECTTEST_ACCEPT"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("quire").addoption("--quire-accept", action="store_true", help=(
        "write the current tables of attention sites into the test files that call quire_snapshot (needs expecttest)"))


@pytest.fixture
def quire_snapshot(request: pytest.FixtureRequest) -> Callable[[Any, str], None]:
    """``quire_snapshot(model, expected)``: quire.assert_attention_sites, which --quire-accept updates in place."""
    accept = bool(request.config.getoption("--quire-accept") or os.environ.get(_ACCEPT))
    return functools.partial(check_snapshot, accept=accept)


def check_snapshot(model: Any, expected: str, *, accept: bool) -> None:
    """The fixture's function. ``accept``: replace the ``expected`` literal in the caller's file with the current table."""
    from quire.passes.explain import assert_attention_sites, attention_sites

    if not accept:
        try:
            assert_attention_sites(model, expected)
        except AssertionError as error:
            raise AssertionError(f"{error}\n\nIf the change is intended, run pytest --quire-accept.") from None
        return
    actual = attention_sites(model)
    if _lines(actual) != _lines(expected):
        _rewrite(actual + "\n", expected)


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.strip().splitlines()]


def _rewrite(actual: str, expected: str) -> None:
    """Replace the triple-quoted string in the caller of check_snapshot, two frames up."""
    try:
        from expecttest import assert_expected_inline
    except ModuleNotFoundError:
        pytest.fail("--quire-accept (or EXPECTTEST_ACCEPT) needs the package expecttest: pip install expecttest", pytrace=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(_ACCEPT, "1")
        assert_expected_inline(actual, expected, skip=2)
