"""Fixtures: a registry of a test's own backends."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from quire.attn_ops import registry


@pytest.fixture
def entries(monkeypatch: pytest.MonkeyPatch):
    """A function that puts a registry with these entry points, name=loader, in the place of the process's."""
    def given(**loaders):
        found = [SimpleNamespace(name=name, load=load) for name, load in loaders.items()]
        monkeypatch.setattr(registry, "REGISTRY", registry.Registry(found))

    return given


@pytest.fixture
def empty(entries) -> None:
    """A registry without backends."""
    entries()
