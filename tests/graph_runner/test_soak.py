"""Seconds of the soak (``tests/graph_runner/soak.py``); ``make soak`` runs it for minutes."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.graph_runner.soak import Soak


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_soak() -> None:
    def enough(counts: Counter[str]) -> bool:
        return bool(counts["compared with their run alone"] and counts["added by hand"]
                    and any(what.startswith("changes") for what in list(counts)))

    counts = Soak(seed=1).run(20, enough)
    assert enough(counts), counts
