"""`freeze_gc` leaves the collector as it found it, whatever happens inside."""

import gc
from collections.abc import Iterator

import pytest

from graph_runner.gc_freeze import freeze_gc


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    """Each test starts with a collector that is on and has frozen nothing, and cannot break the tests after it."""
    gc.unfreeze()
    gc.enable()
    gc.collect()  # Python 3.12 puts its immortal objects back among the frozen ones
    yield
    gc.unfreeze()
    gc.enable()


def freeze_count() -> int:
    gc.collect()  # as above
    return gc.get_freeze_count()


def test_freezes_and_disables_inside_only() -> None:
    before = freeze_count()
    with freeze_gc():
        assert not gc.isenabled()
        assert gc.get_freeze_count() > before + 1000
    assert gc.isenabled()
    assert freeze_count() == before


def test_restores_after_failure() -> None:
    before = freeze_count()
    with pytest.raises(RuntimeError, match="out of memory"), freeze_gc():
        raise RuntimeError("out of memory")
    assert gc.isenabled()
    assert freeze_count() == before


@pytest.mark.parametrize("failing", ["collect", "freeze"])
def test_restores_when_entering_fails(failing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise KeyboardInterrupt

    before = freeze_count()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(gc, failing, fail)
        with freeze_gc():
            raise AssertionError("not reached")
    assert gc.isenabled()
    assert freeze_count() == before


def test_stays_disabled_where_it_was() -> None:
    gc.disable()
    with freeze_gc():
        pass
    assert not gc.isenabled()


def test_nested() -> None:
    before = freeze_count()
    with freeze_gc():
        frozen = gc.get_freeze_count()
        with freeze_gc():
            assert gc.get_freeze_count() > frozen - 100  # a few frozen objects die in between
        with pytest.raises(ValueError, match="inner"), freeze_gc():
            raise ValueError("inner")
        assert not gc.isenabled()
        assert gc.get_freeze_count() > frozen - 100  # an inner block did not unfreeze the outer one's
    assert gc.isenabled()
    assert freeze_count() == before


def test_keeps_what_the_application_froze() -> None:
    gc.freeze()
    before = freeze_count()
    with freeze_gc():
        assert not gc.isenabled()
    assert gc.isenabled()
    # Frozen objects can die (they still have reference counts), a few do between the two readings; none is unfrozen.
    assert before - 100 < freeze_count() <= before


def test_collects_once_on_entry() -> None:
    class Node:
        """Part of a cycle, so that only the collector can free it."""

    node = Node()
    node.me = node
    gc.collect()
    collected: list[str] = []
    gc.callbacks.append(lambda phase, info: collected.append(phase))
    try:
        del node
        with freeze_gc():
            assert not [obj for obj in gc.get_objects() if isinstance(obj, Node)]
        assert collected == ["start", "stop"]
    finally:
        gc.callbacks.pop()
