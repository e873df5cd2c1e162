"""The registry of backends, and ``quire.backends()``: one row per backend, in the order of attention="auto"."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from expecttest import assert_expected_inline

from quire.attn_ops.backend import AttentionBackend, AttentionCapabilities, BackendFamily, CudagraphSupport
from quire.attn_ops.registry import BackendTable, all_backends, backends, get_backend, register_backend
from quire.attn_ops.selection import select_backend
from quire.attn_ops.tuning import attention as tuning
from tests.attn_ops.cases import SITE, make_backend

CPU = torch.device("cpu")


def test_third_party_backend(empty) -> None:
    mine = register_backend(make_backend("mine"))
    assert get_backend("mine") is mine and list(all_backends()) == ["mine"]
    assert select_backend("mine", [SITE], device=CPU, page_size=16).backend is mine
    assert register_backend(mine) is mine  # a module that is loaded twice registers the same record
    with pytest.raises(ValueError, match="named 'mine' is registered already; choose another name"):
        register_backend(make_backend("mine"))


def test_third_party_entry_point(entries) -> None:
    mine = make_backend("mine", priority={"cpu": -1})
    entries(mine=lambda: mine, other=lambda: make_backend("other", priority={"cpu": 3}))
    assert all_backends()["mine"] is mine and list(all_backends()) == ["mine", "other"]
    assert select_backend("auto", [SITE], device=CPU, page_size=16).backend is mine
    entries(first=lambda: make_backend("taken"), second=lambda: make_backend("taken"))
    assert "registered already" in reason("second") and list(all_backends()) == ["taken"]


def reason(name: str) -> str:
    """Why ``quire.backends()`` says the backend is not usable."""
    return next(row.reason for row in backends("cpu") if row.name == name)


def test_a_broken_entry_point_is_reported_not_raised(entries) -> None:
    def fail():
        raise ImportError("libmagic.so.1: cannot open shared object file")

    entries(magic=fail, other=lambda: make_backend("other"))
    assert list(all_backends()) == ["other"]
    assert reason("magic") == "failed to load: ImportError: libmagic.so.1: cannot open shared object file"
    with pytest.raises(ValueError, match="unknown attention backend 'magic'.*magic failed to load: ImportError: libm"):
        get_backend("magic")


def test_engines_in_several_threads_have_all_backends(entries) -> None:
    """While one thread loads them, others wait."""
    loading, names = threading.Event(), []

    def slow():
        loading.set()
        time.sleep(0.2)
        return make_backend("slow")

    entries(slow=slow)
    others = [threading.Thread(target=lambda: names.append(get_backend("slow").name)) for _ in range(3)]
    for thread in others:
        thread.start()
    assert loading.wait(10)
    for thread in others:
        thread.join(10)
    assert names == ["slow"] * 3


def test_loading_that_is_interrupted_begins_again(entries) -> None:
    tries = []

    def load():
        tries.append(1)
        if len(tries) == 1:
            raise KeyboardInterrupt
        return make_backend("late")

    entries(late=load)
    with pytest.raises(KeyboardInterrupt):
        get_backend("late")
    assert get_backend("late").name == "late"


def test_a_file_that_has_changed_is_read_again(entries, tmp_path) -> None:
    """``double_sparsity`` and others are made of a file of measurements."""
    path = tmp_path / "channels.json"
    entries(filed=lambda: BackendFamily("filed", "filed:FILE", make=lambda name, get: make_backend(
        f"of_{Path(name.partition(':')[2]).read_text()}")))
    path.write_text("one")
    first = get_backend(f"filed:{path}")
    assert get_backend(f"filed:{path}") is first and first.name == "of_one"
    path.write_text("another")
    assert get_backend(f"filed:{path}").name == "of_another"


def test_unknown_name(empty) -> None:
    register_backend(make_backend("one"))
    register_backend(make_backend("two"))
    with pytest.raises(ValueError, match="unknown attention backend 'three'; there are: auto, one, two$"):
        get_backend("three")
    with pytest.raises(ValueError, match="unknown attention backend 'three'"):
        select_backend("three", [SITE], device=CPU, page_size=16)
    with pytest.raises(ValueError, match=r"backend 'TWO' \(did you mean 'two'\?\)"):
        get_backend("TWO")
    with pytest.raises(ValueError, match=r"backend 'tow' \(did you mean 'two'\?\); there are: auto, one, two$"):
        get_backend("tow")


def test_a_gpu_that_is_too_old_is_a_reason_in_the_table(empty, monkeypatch) -> None:
    """As it is one for selection: a table that says "usable" sends a user into a refusal."""
    backend = make_backend("new")
    caps = dataclasses.replace(backend.capabilities, devices=frozenset({"cuda"}), min_compute_capability=(8, 0))
    register_backend(dataclasses.replace(backend, capabilities=caps))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(tuning, "summary", lambda device: [])
    (row,) = backends("cuda")
    assert not row.usable and row.reason == "needs compute capability 8.0, the GPU has 7.5"


WITHOUT = """
import sys, torch
from quire.attn_ops.registry import all_backends
assert "triton" not in sys.modules, "importing the registry imports kernels"
gpu, sys.modules["triton"], sys.modules["flashinfer"] = torch.device("cuda"), None, None
from quire.attn_ops.backends.triton import BACKEND
assert "pip install triton" in BACKEND.available(gpu)
del sys.modules["triton"]
found = all_backends()["flashinfer"]  # its page table is a Triton kernel
assert "pip install 'quire[flashinfer]'" in found.available(gpu) and found.op.name() == "quire::flashinfer_paged_attention"
assert not torch.cuda.is_initialized()
"""


def test_backends_load_without_their_packages_and_without_a_gpu() -> None:
    """Each says what to install; nothing starts a CUDA context."""
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


# The table.


def fake(name: str, *, reason: str | None = None, priority: dict[str, int] | None = None, **caps) -> AttentionBackend:
    options = {"devices": frozenset({"cpu"}), "dtypes": frozenset({torch.float32})} | caps
    return AttentionBackend(name, AttentionCapabilities(**options), lambda device: reason, None, priority=priority)


FAKES = {b.name: b for b in (
    fake("on_request"),
    fake("second", priority={"cpu": 10, "cuda": 1}, dtypes=frozenset({torch.float16, torch.bfloat16}), window=True,
         sinks=True, kv_dtypes=frozenset({torch.int8, torch.float32}), fixed_scale_kv_dtypes=frozenset({torch.float8_e5m2}),
         head_dims_note="64, 128", page_sizes_note="16", cudagraph_support=CudagraphSupport.ALWAYS),
    fake("missing", priority={"cpu": 5}, reason="package x is not installed: pip install x"),
    fake("gpu_only", priority={"cuda": 0}, devices=frozenset({"cuda", "xpu"}), reason="never asked on a CPU"),
    fake("first", priority={"cpu": 0}),
)}


@pytest.fixture
def fakes(entries) -> None:
    def fail():
        raise ImportError("no module y")

    entries(broken=fail)
    for backend in FAKES.values():
        register_backend(backend)


def test_rows_and_order(fakes) -> None:
    table = backends("cpu")
    assert isinstance(table, BackendTable) and table.device == torch.device("cpu")
    assert [(r.name, r.usable, r.priority) for r in table] == [
        ("first", True, 0), ("missing", False, 5), ("second", True, 10), ("on_request", True, None),
        ("gpu_only", False, None), ("broken", False, None)]
    assert [r.reason for r in table if not r.usable] == [
        "package x is not installed: pip install x", "runs on cuda, xpu", "failed to load: ImportError: no module y"]
    assert [r.name for r in backends(torch.device("cuda"))][:2] == ["gpu_only", "second"]
    assert table[-1].capabilities is None and table[0].capabilities is FAKES["first"].capabilities


def test_text(fakes) -> None:
    assert_expected_inline(str(backends("cpu")), """\
backend     usable  dtypes             quantized KV  head dims  page sizes  features       CUDA graphs
first       yes     float32            none          any        any         none           NEVER
missing     no      float32            none          any        any         none           NEVER
second      yes     bfloat16, float16  int8          64, 128    16          window, sinks  ALWAYS
on_request  yes     float32            none          any        any         none           NEVER
gpu_only    no      float32            none          any        any         none           NEVER
broken      no
missing: not usable on cpu: package x is not installed: pip install x
gpu_only: not usable on cpu: runs on cuda, xpu
broken: not usable on cpu: failed to load: ImportError: no module y
KV cache of float8_e5m2 with one fixed scale per layer (kv_scales): second
attention="auto" goes by the order above: nothing is measured on this device (run `quire bench attention --save`)""")
    assert repr(backends("cpu")) == str(backends("cpu"))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_backends_here(device) -> None:
    """Every backend has a row that agrees with its own record, whatever this machine has."""
    table = backends(device)
    assert {r.name for r in table} >= {"torch_native", "triton", "flashinfer"}
    text = str(table)
    for row in table:
        if row.capabilities is None:
            continue
        backend = get_backend(row.name)
        assert row.capabilities is backend.capabilities
        serves = device in backend.capabilities.devices
        expected = backend.available(torch.device(device)) if serves else "not declared"
        assert row.usable == (expected is None)
        assert re.search(rf"^{row.name} +{'yes' if row.usable else 'no'} ", text, re.MULTILINE)
        if not row.usable:
            assert f"{row.name}: not usable on {device}: {row.reason}" in text
    assert set(all_backends()) <= {r.name for r in table}


def test_default_device() -> None:
    assert backends().device.type == ("cuda" if torch.cuda.is_available() else "cpu")
