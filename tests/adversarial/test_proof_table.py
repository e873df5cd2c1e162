"""The table of cases is true: each test that it names is there, and the page is what its script writes."""

from __future__ import annotations

from tests.adversarial.proof_table import PAGE, collected, node_ids, render


def test_each_test_of_the_table_is_collected() -> None:
    assert [i for i in node_ids() if not collected(i)] == []
    assert not collected("tests/adversarial/test_mixers.py::test_mixing_is_refused[no such case-engine]")
    assert not collected("tests/adversarial/test_mixers.py::test_of_nothing")


def test_the_page_is_as_its_script_writes_it() -> None:
    assert PAGE.read_text() == render()
