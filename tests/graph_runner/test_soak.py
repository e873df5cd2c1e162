"""Seconds of the soak (``tests/graph_runner/soak.py``); ``make soak`` runs it for minutes."""

from __future__ import annotations

import pytest

from tests.graph_runner.soak import Soak


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_soak() -> None:
    counts = Soak(seed=1).run(20)
    assert counts["compared with their run alone"] and counts["added by hand"], counts
    assert sum(n for what, n in counts.items() if what.startswith("changes")), counts
