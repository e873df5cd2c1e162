"""docs/models.md: it has the shape that its script writes, and what it says of a sample of classes is so."""

from __future__ import annotations

import functools
import re

import pytest
import transformers

from tests.zoo.all_models import PAGE, check, entries, page, read

TABLE = read(PAGE.read_text())
VERSIONS = re.search(r"^torch .*, transformers (.*)\.$", PAGE.read_text(), re.MULTILINE)
EXACT = [r for r in TABLE if r.outcome == "exact"]
#: Of each 24 exact classes one, and of each 40 refused ones.
SAMPLE = EXACT[5::24] + [r for r in TABLE if r.outcome == "refused"][11::40]


@functools.cache
def classes() -> dict[tuple[str, str], type]:
    """The config classes by what the page calls them. transformers imports every model for it, which takes seconds."""
    return {(registry, config.__name__): config for registry, config, _ in entries()}


def test_the_page_is_as_its_script_writes_it() -> None:
    assert VERSIONS is not None and page(TABLE, VERSIONS[0]) == PAGE.read_text()
    assert len({(r.registry, r.config) for r in TABLE}) == len(TABLE)
    assert all(r.reason for r in TABLE if r.outcome != "exact")
    assert not [r for r in TABLE if r.outcome in ("wrong", "error")]
    assert sum(r.registry == "causal LM" for r in EXACT) >= 102 and sum(r.registry == "image-text" for r in EXACT) >= 62


@pytest.mark.slow
def test_every_class_is_on_the_page() -> None:
    if VERSIONS is None or VERSIONS[1] != transformers.__version__:
        pytest.skip(f"the page is of another version than {transformers.__version__}")
    assert {(r.registry, r.config) for r in TABLE} == set(classes()), "make models"


@pytest.mark.slow
@pytest.mark.parametrize("row", SAMPLE, ids=lambda row: row.model)
def test_what_the_page_says_of_a_class_is_so(row) -> None:
    kind = classes().get((row.registry, row.config))
    if kind is None:
        pytest.skip(f"the installed transformers has no {row.config}")
    outcome, reason = check(row.registry, kind)
    assert outcome == row.outcome, reason
