"""Traces kept on disk, in a folder of the test's own."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("QUIRE_TRACE_CACHE", "1")
    return tmp_path
