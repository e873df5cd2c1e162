"""Traces that are not kept on disk, and files of traces that cannot be used: the model is traced, and an engine starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from quire.passes.capture import facts, kept_trace
from tests.passes.capture.test_kept_trace import was_traced
from tests.passes.models import Tiny, tiny

pytestmark = pytest.mark.usefixtures("folder")


@torch._dynamo.assume_constant_result
def constant() -> float:
    return 2.0


class Constant(Tiny):
    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor, **extra: torch.Tensor) -> torch.Tensor:
        return super().forward(input_ids, position_ids, **extra) * constant()


def test_a_result_that_dynamo_takes_for_a_constant_is_not_kept() -> None:
    """No guard says what it was."""
    for _ in range(2):
        assert was_traced(lambda: Constant(*tiny().layers).eval())


def test_what_no_fact_can_be_made_of_does_not_stop_the_trace(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine starts whatever its model holds: a trace that cannot be kept is a trace."""
    def odd(*args: Any) -> Any:
        raise ZeroDivisionError

    for place in ("fact", "checks"):
        with monkeypatch.context() as patch:
            patch.setattr(facts if place == "fact" else kept_trace, place, odd)
            assert was_traced(tiny)
        assert not list(folder.glob("traces/*.pickle"))
    with monkeypatch.context() as patch:
        patch.setattr(kept_trace, "_summary", odd)
        assert was_traced(tiny)
    assert not list(folder.glob("traces/*.pickle"))


@pytest.mark.parametrize("content", [
    b"not a pickle", *(pytest.param(content, marks=pytest.mark.slow) for content in (b"", b"\x80\x04N."))])
def test_a_broken_file_is_replaced(folder: Path, content: bytes) -> None:
    assert was_traced(tiny)
    (file,) = (folder / "traces").glob("*.pickle")
    file.write_bytes(content)
    assert was_traced(tiny) and not was_traced(tiny)


def test_a_folder_that_cannot_be_written(folder: Path) -> None:
    (folder / "traces").write_text("a file")
    assert was_traced(tiny) and was_traced(tiny)


@pytest.mark.parametrize("chosen", [pytest.param("0", marks=pytest.mark.slow), ""])
def test_off(folder: Path, monkeypatch: pytest.MonkeyPatch, chosen: str) -> None:
    """On a CPU traces are kept on request only."""
    monkeypatch.setenv("QUIRE_TRACE_CACHE", chosen)
    assert was_traced(tiny) and was_traced(tiny)
    assert not (folder / "traces").exists()


def test_old_files_go(folder: Path) -> None:
    (folder / "traces").mkdir()
    for i in range(70):
        for kind in ("pickle", "proofs", "trials"):
            (folder / "traces" / f"{i}.{kind}").write_bytes(b"")
    assert was_traced(tiny)
    kept = {kind: {file.stem for file in (folder / "traces").glob(f"*.{kind}")} for kind in ("pickle", "proofs", "trials")}
    assert len(kept["pickle"]) == 64 and kept["proofs"] == kept["pickle"] > kept["trials"]
    assert not was_traced(tiny)
