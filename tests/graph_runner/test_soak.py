"""Seconds of the soak (``tests/graph_runner/soak.py``); ``make soak`` runs it for minutes."""

from __future__ import annotations

import pytest

from tests.graph_runner.soak import Soak


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_soak() -> None:
    counts = Soak(seed=1).run(15)
    for what in ("compared with their run alone", "dropped streams", "added by hand", "engines", "changes: weights"):
        assert counts[what], f"no {what}: {counts}"
