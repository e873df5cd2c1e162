"""The list of mutants keeps up with the code; ``make mutations`` runs them."""

from tests.adversarial.mutants_of_models import MUTANTS
from tests.adversarial.mutations import ROOT, Seen, problem, text_of
from tests.adversarial.proof_table import collected


def test_each_mutant_is_still_in_its_file_once() -> None:
    assert len({(m.file, m.old, m.new) for m in MUTANTS}) == len(MUTANTS) > 200
    for mutant in MUTANTS:
        assert text_of(mutant)
        assert all((ROOT / argument.partition("::")[0]).is_file() for argument in mutant.arguments), mutant.rule


def test_what_is_an_error() -> None:
    red = next(m for m in MUTANTS if not m.second_line)
    second = next(m for m in MUTANTS if m.second_line)
    none, some = Seen("", "", 1.0), Seen("tests/x.py::test", "Failed: DID NOT RAISE", 1.0)
    assert problem(red, some) is problem(second, none) is None
    assert problem(red, none) == "no test goes red" and "second line" in (problem(second, some) or "")
    assert "is broken" in (problem(red, Seen("tests/x.py::test", "NameError: name 'x' is not defined", 1.0)) or "")


def test_the_tests_of_each_mutant_are_there() -> None:
    """Else ``make mutations`` is the first to find a test renamed, or a case that moved to another route."""
    named = {test for mutant in MUTANTS for test in mutant.tests.splitlines() if "::" in test}
    cases = {test if "/adversarial/" in test or "/verify/" in test else test.partition("[")[0] for test in named}
    assert [name for name in sorted(cases) if not collected(name)] == []
