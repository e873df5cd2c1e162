"""`freeze_gc` and `ServingFreeze` leave the collector as they found it, whatever happens inside."""

import gc
import sys
import time
import weakref
from collections.abc import Iterator

import pytest

from quire.graph_runner.gc_freeze import ServingFreeze, freeze_gc

pytestmark = pytest.mark.usefixtures("tokens_unchecked", "traces_kept")


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    """Each test starts with a collector that is on and has frozen nothing, and cannot break the tests after it."""
    gc.unfreeze()
    gc.enable()
    freeze_count()
    yield
    gc.unfreeze()
    gc.enable()


def freeze_count() -> int:
    if sys.version_info >= (3, 12):  # which puts its immortal objects back among the frozen ones
        gc.collect()
    return gc.get_freeze_count()


def test_freezes_and_disables_inside_only() -> None:
    before = freeze_count()
    with freeze_gc():
        assert not gc.isenabled()
        assert gc.get_freeze_count() > before + 1000
    assert gc.isenabled() and freeze_count() == before
    with pytest.raises(RuntimeError, match="out of memory"), freeze_gc():
        raise RuntimeError("out of memory")
    assert gc.isenabled() and freeze_count() == before
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


def test_a_collector_that_is_off_stays_off() -> None:
    gc.disable()
    with freeze_gc():
        pass
    assert not gc.isenabled()
    gc.disable()
    freeze = serving()
    assert not freeze.frozen and freeze_count() < 1000
    freeze.release()
    assert not gc.isenabled()


def test_keeps_what_the_application_froze() -> None:
    gc.freeze()
    before = freeze_count()
    with freeze_gc():
        assert not gc.isenabled()
    assert gc.isenabled()
    # Frozen objects can die (they still have reference counts), a few do between the two readings; none is unfrozen.
    assert before - 100 < freeze_count() <= before
    gc.freeze()
    before = freeze_count()
    freeze = serving()
    assert not freeze.frozen
    freeze.release()
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


# -- while serving


def serving() -> ServingFreeze:
    """One that has frozen, unless something kept it from it."""
    freeze = ServingFreeze()
    for _ in range(ServingFreeze.TURNS):
        freeze.turn()
    return freeze


def test_without_a_collection_garbage_waits_for_the_end() -> None:
    class Node:
        pass

    node = Node()
    node.me = node  # type: ignore[attr-defined]
    gone = weakref.ref(node)
    del node
    with freeze_gc(collect=False):
        assert not gc.isenabled()
        gc.collect()
        assert gone() is not None
    gc.collect()
    assert gone() is None


def test_serving_freezes_after_some_turns_until_released() -> None:
    before = freeze_count()
    freeze = ServingFreeze()
    for run in range(2):
        for _ in range(ServingFreeze.TURNS - 1):
            freeze.turn()
        assert not freeze.frozen and freeze_count() == before
        if run == 0:
            freeze.release()  # a short run: the turns of the next one do not add to its
    freeze.turn()
    frozen = gc.get_freeze_count()
    assert freeze.frozen and gc.isenabled() and frozen > before + 1000
    for _ in range(100):
        freeze.turn()
    assert gc.get_freeze_count() <= frozen  # not twice: what came since is free
    for _ in range(2):
        freeze.release()
        assert not freeze.frozen and gc.isenabled() and freeze_count() == before


def test_two_engines_freeze_once() -> None:
    first, second = serving(), serving()
    assert first.frozen and not second.frozen
    second.release()
    assert gc.get_freeze_count() > 1000
    first.release()
    assert freeze_count() < 1000


def test_serving_that_stops_stepping_is_unfrozen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Although nothing runs the collector."""
    monkeypatch.setattr(ServingFreeze, "STALE_SECONDS", 0.2)
    freeze = serving()
    for _ in range(5):
        time.sleep(0.1)
        freeze.turn()
        assert freeze.frozen
    deadline = time.monotonic() + 60
    while freeze.frozen and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not freeze.frozen and freeze_count() < 1000
    for _ in range(ServingFreeze.TURNS):  # it continues after all
        freeze.turn()
    assert freeze.frozen
    freeze.release()
    assert freeze_count() < 1000


def test_garbage_among_the_frozen_is_collected_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    class Node:
        pass

    def nodes() -> int:
        return len([obj for obj in gc.get_objects() if type(obj) is Node])

    freeze = ServingFreeze()
    for seconds, left in ((1000.0, 1), (-1.0, 0)):
        node = Node()
        node.me = node
        for _ in range(ServingFreeze.TURNS):
            freeze.turn()
        del node
        gc.collect()
        assert freeze.frozen
        monkeypatch.setattr(ServingFreeze, "COLLECT_SECONDS", seconds)
        freeze.release()
        assert nodes() == left
