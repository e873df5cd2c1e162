"""FlashInfer's compiled prefill kernels: found, compiled outside the process for a limited time, loaded once."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from quire.attn_ops import long_prefill
from quire.attn_ops.backends.flashinfer import BACKEND, modules
from tests.attn_ops.backends.flashinfer_stand_ins import site

CUDA = torch.device("cuda")


class Spec:
    """FlashInfer's description of a module, of which ``files`` says what is compiled."""

    files: dict[str, bool] = {}  # up to date
    loads: list[str] = []
    is_aot = False

    def __init__(self, module) -> None:
        self.name = modules.described([module])

    def build_and_load(self) -> None:
        assert self.files[self.name], "it would be compiled here and now"
        self.loads.append(self.name)


@pytest.fixture
def specs(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(major=9))
    for name, value in (("files", {}), ("loads", [])):
        monkeypatch.setattr(Spec, name, value)
    monkeypatch.setattr(modules.Module, "spec", lambda self: Spec(self))
    monkeypatch.setattr(modules, "up_to_date", lambda spec: Spec.files.get(spec.name, False))
    for name, value in (("_loaded", set()), ("_builds", {})):
        monkeypatch.setattr(modules, name, value)


def build(monkeypatch, works: bool) -> list[tuple[str, float]]:
    """A stand-in for the process that compiles; the calls."""
    started: list[tuple[str, float]] = []

    class Build:
        def __init__(self, wanted, seconds) -> None:
            self.wanted, self.process = wanted, SimpleNamespace(poll=lambda: None)
            started.append((modules.described(wanted), seconds))

        def finish(self):
            Spec.files.update({modules.described([m]): works for m in self.wanted})
            return None if works else "compiling failed: nvcc fatal"

    monkeypatch.setattr(modules, "Build", Build)
    return started


def test_compiled_kernels_are_loaded_once(specs, monkeypatch) -> None:
    started = build(monkeypatch, works=True)
    Spec.files["bfloat16 x 128"] = True
    for seconds in (0.0, 60.0):
        BACKEND.prefill.begin([site()], CUDA, seconds)
        assert BACKEND.prefill.ready([site(), site(layer=1)], CUDA, seconds) is None
    assert Spec.loads == ["bfloat16 x 128"] and not started


def test_an_engine_compiles_what_is_missing_and_a_step_does_not(specs, monkeypatch) -> None:
    started = build(monkeypatch, works=True)
    sites = [site(), site(layer=1, window=64), site(layer=2, softcap=30.0)]
    assert "bfloat16 x 128; bfloat16 x 128, softcap; bfloat16 x 128, window are not compiled" in BACKEND.prefill.ready(
        sites, CUDA, 0.0)
    assert not started and not Spec.loads
    for _ in range(2):
        BACKEND.prefill.begin(sites, CUDA, 60.0)
    assert [seconds for _, seconds in started] == [60.0], "one process"
    assert "are being compiled by another process" in BACKEND.prefill.ready(sites, CUDA, 0.0), "auto does not wait"
    assert BACKEND.prefill.ready(sites, CUDA, 60.0) is None and len(Spec.loads) == 3 and len(started) == 1


def test_engines_wait_for_kernels_that_were_asked_for(monkeypatch) -> None:
    monkeypatch.delenv("QUIRE_KERNEL_BUILD_SECONDS", raising=False)
    assert long_prefill.wait_seconds(chosen_by_auto=True) == 0 < long_prefill.wait_seconds(chosen_by_auto=False)
    monkeypatch.setenv("QUIRE_KERNEL_BUILD_SECONDS", "20")
    assert long_prefill.wait_seconds(chosen_by_auto=True) == long_prefill.wait_seconds(chosen_by_auto=False) == 20


def test_what_does_not_compile_says_why(specs, monkeypatch) -> None:
    started = build(monkeypatch, works=False)
    assert BACKEND.prefill.ready([site()], CUDA, 60.0) == "compiling failed: nvcc fatal"
    assert len(started) == 1 and not Spec.loads

    def gone(module):
        raise ImportError("cannot import name 'gen_batch_prefill_module'")

    monkeypatch.setattr(modules.Module, "spec", gone)
    BACKEND.prefill.begin([site()], CUDA, 60.0)
    assert "do not load: ImportError: cannot import name" in BACKEND.prefill.ready([site()], CUDA, 60.0)


@pytest.mark.slow
def test_the_process_that_compiles_is_bounded(monkeypatch) -> None:
    """Here it fails at once, as FlashInfer is not installed, or cannot compile; either way within its time, with the reason."""
    monkeypatch.setenv("FLASHINFER_DISABLE_JIT", "1")
    why = modules.Build([modules.Module("fa3", "bfloat16", 128, False, False)], 30.0).finish()
    assert why is not None and why.startswith("compiling FlashInfer's prefill kernels for bfloat16 x 128 failed: ")
