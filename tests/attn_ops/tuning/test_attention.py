"""attention="auto" by measurement: the files, the rule, and what a selection says of it."""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import AttentionBackend, AttentionCapabilities, CudagraphSupport, backends, register_backend
from quire.attn_ops.attention import AttentionSite, Latent
from quire.attn_ops.backends import hybrid, torch_native
from quire.attn_ops.selection import select_backend
from quire.attn_ops.tuning import attention as tuning
from quire.attn_ops.tuning.attention import Measurement

CPU, GPU = torch.device("cpu"), torch.device("cuda")
SITE = AttentionSite(layer=0, num_heads=32, num_kv_heads=8, head_dim=128, head_dim_v=128, dtype=torch.bfloat16, scale=0.1)
WINDOWED = dataclasses.replace(SITE, layer=1, window=4096)
DEVICE = "Some Device"
HINT = "run `quire bench attention --save`"


@pytest.fixture(autouse=True)
def setting(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, empty: None) -> None:
    """No backends, no measurements, and every device is called DEVICE."""
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(tuning, "STORE", dataclasses.replace(tuning.STORE, shipped=tmp_path / "attention.json"))
    monkeypatch.setattr(tuning, "device_name", lambda device: DEVICE)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))


def make(name: str, place: int, support: CudagraphSupport = CudagraphSupport.ALWAYS, *, why: str | None = None,
         packages: tuple[str, ...] = (), **caps: Any) -> AttentionBackend:
    record = AttentionCapabilities(devices=frozenset({"cpu", "cuda"}), dtypes=frozenset({torch.bfloat16}),
                                   cudagraph_support=support, **{"window": True, **caps})
    return register_backend(AttentionBackend(name, record, lambda device: why, op=None, packages=packages,
                                             priority={"cpu": place, "cuda": place}))


def row(backend: AttentionBackend, us: float | dict[str, float], site: AttentionSite = SITE, **changes: Any) -> Measurement:
    times = us if isinstance(us, dict) else {"1x1024": us}
    made = tuning.measurement(backend, site, device=CPU, page_size=16, layout="NHD", decode_us=times, extend_us={},
                               date="2026-01-01")
    return dataclasses.replace(made, **changes)


def select(*sites: AttentionSite, device: torch.device = CPU, **options: Any) -> Any:
    return select_backend("auto", sites or [SITE], device=device, **{"page_size": 16, **options})


# The rule.


def test_the_fastest_measured_wins_and_the_others_say_by_how_much() -> None:
    slow, fast = make("slow", 0), make("fast", 1)
    make("absent", 2, why="not installed")
    make("new", 3)
    tuning.save([row(slow, 12.1), row(fast, 8.3)])
    chosen = select()
    assert chosen.backend is fast
    assert chosen.why == "fastest measured: decode 8.3 us (Some Device, 32/8 x 128 bfloat16)"
    assert chosen.passed_over == {
        "absent": ["not installed"],
        "slow": ["measured slower: decode 12.1 us against 8.3 us (Some Device, 32/8 x 128 bfloat16)"],
        "new": [f"not measured on this device: {HINT}"]}


def test_without_measurements_the_first_by_priority_is_taken() -> None:
    first, second = make("first", 0), make("second", 1)
    assert select().backend is first and select().why == "" and select().passed_over == {}
    tuning.save([row(first, 9.0), row(second, 1.0)])
    for other in (dict(page_size=32), dict(layout="HND")):
        chosen = select(**other)
        assert chosen.backend is first
        assert chosen.why == f"first in order of priority; this shape is not measured here: {HINT}"
    for change in (dict(head_dim=32, head_dim_v=16), dict(num_heads=8 * 32), dict(window=9)):
        assert select(dataclasses.replace(SITE, **change)).backend is first
    assert select().backend is second


def test_a_shape_that_nobody_measured_goes_by_the_nearest() -> None:
    """Else a new model would run on the first backend by priority, however much faster another one is on such shapes."""
    first, second = make("first", 0), make("second", 1)
    small = dataclasses.replace(SITE, num_heads=8, head_dim=64, head_dim_v=64)
    tuning.save([row(first, 9.0), row(second, 1.0), row(first, 1.0, small), row(second, 9.0, small)])
    near = dataclasses.replace(SITE, num_heads=64, head_dim=96, head_dim_v=96)
    chosen = select(near)
    assert chosen.backend is second and chosen.why == (
        "fastest measured: decode 1.0 us (Some Device, 64/8 x 96 bfloat16, by the nearest shape measured, 32/8 x 128 bfloat16)")
    assert select(dataclasses.replace(small, head_dim=80, head_dim_v=80)).backend is first


def test_a_window_goes_by_one_of_about_its_length() -> None:
    """Kernels read whole tiles of keys: what is fastest for 4096 keys says nothing of 128."""
    first, second = make("first", 0), make("second", 1)
    long = dataclasses.replace(WINDOWED, window=4096)
    tuning.save([row(first, 9.0, long), row(second, 1.0, long)])
    for window, expected in ((4096, second), (2048, second), (8192, second), (2000, first), (512, first), (8200, first)):
        assert select(dataclasses.replace(long, window=window)).backend is expected, window


def test_a_backend_asked_for_by_name_is_not_replaced() -> None:
    slow, fast = make("slow", 0), make("fast", 1)
    tuning.save([row(slow, 12.0), row(fast, 8.0)])
    assert select_backend("slow", [SITE], device=CPU, page_size=16).backend is slow
    assert select_backend(slow, [SITE], device=CPU, page_size=16).backend is slow


def test_a_fast_backend_that_cannot_serve_every_site_is_out() -> None:
    slow, fast = make("slow", 0), make("fast", 1, window=False)
    tuning.save([row(slow, 12.0), row(fast, 8.0), row(slow, 12.0, WINDOWED)])
    chosen = select(SITE, WINDOWED)
    assert chosen.backend is slow and chosen.passed_over["fast"] == ["no window"]


def test_every_point_of_the_grid_counts_the_same() -> None:
    """a is 3 times faster at a small point, b 2 times at a large one: a sum of times would take b."""
    a, b = make("a", 1), make("b", 0)
    tuning.save([row(a, {"1x1024": 5.0, "128x8192": 2000.0}), row(b, {"1x1024": 15.0, "128x8192": 1000.0, "9x9": 0.1})])
    chosen = select()
    assert chosen.backend is a  # and 9x9, which only b has, does not count
    assert "decode 122.5 us against 100.0 us" in chosen.passed_over["b"][0]
    tuning.save([row(a, {"1x8": 9.0}), row(b, {"1x16": 1.0})])
    assert select().backend is b, "no common point decides nothing"


def test_layers_of_several_kinds_count_by_their_number() -> None:
    a, b = make("a", 0), make("b", 1)
    tuning.save([row(a, 10.0), row(b, 20.0), row(a, 30.0, WINDOWED), row(b, 12.0, WINDOWED)])
    assert select(SITE, WINDOWED).backend is b  # 10 * 30 > 20 * 12
    assert select(SITE, SITE, SITE, WINDOWED).backend is a
    assert "32/8 x 128 bfloat16 and 1 more)" in select(SITE, WINDOWED).why
    tuning.save([row(a, 10.0, dataclasses.replace(WINDOWED, window=7))])
    assert select(SITE, WINDOWED).backend is b  # the window that the site has is preferred


def test_fewer_cuda_graphs_must_be_worth_it() -> None:
    whole = make("whole", 0)
    decode = make("decode", 1, CudagraphSupport.UNIFORM_SINGLE_TOKEN_DECODE)
    tuning.save([row(whole, 10.0), row(decode, 6.0)])
    chosen = select(device=GPU)
    assert chosen.backend is whole and chosen.passed_over["decode"] == [
        "measured decode 6.0 us against 10.0 us (Some Device, 32/8 x 128 bfloat16), but its CUDA graphs "
        "(UNIFORM_SINGLE_TOKEN_DECODE, not ALWAYS) leave out batches, and it is not 2 times as fast"]
    assert select(device=CPU).backend is decode  # no CUDA graphs there
    tuning.save([row(decode, 4.9)])
    assert select(device=GPU).backend is decode
    tuning.save([row(whole, 4.0)])
    assert "measured slower: decode 4.9 us against 4.0 us" in select(device=GPU).passed_over["decode"][0]


def test_what_is_slow_but_measured_does_not_replace_an_unmeasured_favourite() -> None:
    """After an update of the favourite's package only the reference's time may be left."""
    favourite = make("favourite", 0)
    tuning.save([row(make("reference", 1), 900.0)])
    assert select().backend is favourite and HINT in select().why


def test_times_of_other_versions_and_devices_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = make("a", 0), make("b", 1, packages=("pytest",))
    tuning.save([row(a, 10.0), row(b, 5.0, packages={"pytest": "0.1"})])
    chosen = select()
    assert chosen.backend is a and chosen.why.startswith("the only one measured: decode 10.0 us")
    (why,) = chosen.passed_over["b"]
    assert why.startswith(f"measured with torch {tuning.versions(b)[0]}, pytest 0.1, and here is torch ") and HINT in why
    tuning.save([row(b, 5.0)])
    assert select().backend is b
    monkeypatch.setattr(tuning, "device_name", lambda device: "Another Device")
    assert select().backend is a and select().why == ""


def test_times_are_compared_only_if_measured_alike() -> None:
    """b's time is of a model with fewer heads: no better than a's."""
    a, b = make("a", 0), make("b", 1)
    half = dataclasses.replace(SITE, num_heads=16, num_kv_heads=4)
    tuning.save([row(a, 10.0), row(b, 6.0, half)])
    assert select(SITE).backend is a and select(SITE).passed_over["b"] == [f"not measured on this device: {HINT}"]
    tuning.save([row(a, 7.0, half)])
    assert select(half).backend is b
    quarter = dataclasses.replace(SITE, num_heads=8, num_kv_heads=2)  # measured by neither: the largest comparable group
    assert select(quarter).backend is b


# Files.


def test_the_users_file_comes_before_the_shipped_one() -> None:
    a, b = make("a", 0), make("b", 1)
    tuning.save([row(a, 5.0), row(b, 9.0)], tuning.STORE.shipped)
    assert select().backend is a
    tuning.save([row(a, 9.0), row(b, 5.0)])
    assert select().backend is b
    tuning.STORE.user_file.unlink()
    assert select().backend is a


def test_kinds_of_layers_that_were_measured_in_two_files() -> None:
    """Gemma's layers with a window ship; a user who measures the others has times of all."""
    a, b = make("a", 0), make("b", 1)
    tuning.save([row(a, 30.0, WINDOWED), row(b, 12.0, WINDOWED)], tuning.STORE.shipped)
    assert select(SITE, WINDOWED).backend is a, "one kind alone decides nothing"
    tuning.save([row(a, 10.0), row(b, 20.0)])
    assert select(SITE, WINDOWED).backend is b


def test_save_merges(tmp_path: Path) -> None:
    a, b = make("a", 0), make("b", 1)
    path = tmp_path / "deep" / "times.json"
    tuning.save([row(a, 5.0), row(b, 9.0)], path)
    tuning.save([row(a, 4.0, date="2027-01-01"), row(a, 3.0, WINDOWED)], path)
    found = tuning.load(path)
    assert [(r.backend, r.decode_us["1x1024"], r.window) for r in found] == [
        ("a", 4.0, None), ("b", 9.0, None), ("a", 3.0, 4096)]
    assert found[0] == row(a, 4.0, date="2027-01-01") and json.loads(path.read_text())["format"] == 1
    assert [p.name for p in path.parent.iterdir()] == ["times.json"]


@pytest.mark.parametrize("spoil", [
    lambda text: text[:-20], lambda text: "[]", lambda text: "", lambda text: text.replace('"format": 1', '"format": 2'),
    lambda text: text.replace("5.0", "-5.0"), lambda text: text.replace("5.0", '"5"'), lambda text: text.replace("5.0", "NaN"),
    lambda text: text.replace('"group"', '"groups"'), lambda text: text.replace('"head_dim": 128', '"head_dim": "128"'),
    lambda text: text.replace('"date"', '"when"'), lambda text: text.replace('"window": null', '"window": "no"'),
    lambda text: text.replace('"backend": "b"', '"backend": null'),
])
def test_a_file_that_no_command_wrote_is_ignored_with_one_warning(spoil: Any, caplog: pytest.LogCaptureFixture) -> None:
    a, b = make("a", 0), make("b", 1)
    path = tuning.save([row(a, 9.0), row(b, 5.0)])
    assert select().backend is b
    text = path.read_text()
    path.write_text(spoil(text))
    assert path.read_text() != text
    with caplog.at_level(logging.WARNING):
        assert select().backend is a and select().backend is a
    (record,) = caplog.records
    assert "are ignored" in record.message and str(path) in record.message and HINT in record.message
    tuning.save([row(a, 9.0), row(b, 5.0)])
    assert select().backend is b


def test_where_the_file_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("QUIRE_CACHE_DIR", "/somewhere")
    assert tuning.STORE.user_file == Path("/somewhere/attention.json")
    monkeypatch.delenv("QUIRE_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert tuning.STORE.user_file == Path("/xdg/quire/attention.json")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert tuning.STORE.user_file == tmp_path / ".cache" / "quire" / "attention.json"


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a container that does not know the user: an engine starts, and trusts no folder of others."""
    for name in ("QUIRE_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)

    def unknown() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", unknown)
    folder = tuning.STORE.user_file.parent
    assert folder.stat().st_mode & 0o077 == 0 and tuning.STORE.user_file.parent == folder


def test_the_shipped_file_can_be_read(caplog: pytest.LogCaptureFixture) -> None:
    shipped = Path(tuning.__file__).parent / "attention.json"
    with caplog.at_level(logging.WARNING):
        rows = tuning.load(shipped)
    assert not caplog.records and rows
    assert len({r.identity for r in rows}) == len(rows)


# MLA on the latent cache.


def mla(heads: int, **changes: Any) -> AttentionSite:
    return AttentionSite(0, heads, heads, 192, 128, torch.bfloat16, 0.07, latent=Latent(512, 64), **changes)


def latent_backends(entries: Any, support: CudagraphSupport = CudagraphSupport.UNIFORM_SINGLE_TOKEN_DECODE
                    ) -> tuple[AttentionBackend, AttentionBackend]:
    """The first in order of priority, which captures any batch, and one that captures ``support``; pairs of both."""
    found = []
    for name, place, captures in (("whole", 0, CudagraphSupport.ALWAYS), ("decodes", 1, support)):
        caps = AttentionCapabilities(devices=frozenset({"cpu", "cuda"}), dtypes=frozenset({torch.bfloat16}), mla=True,
                                     cudagraph_support=captures)
        found.append(AttentionBackend(name, caps, lambda device: None, op=None, mla_op=torch_native.BACKEND.mla_op,
                                      priority={"cpu": place, "cuda": place}))
    entries(**{b.name: lambda b=b: b for b in found}, hybrid=lambda: hybrid.FAMILY)
    return found[0], found[1]


def test_latent_layers_go_by_their_own_times(entries: Any) -> None:
    """Not by those of dense layers with as many heads, nor by those of other latent vectors."""
    whole, decodes = latent_backends(entries)
    tuning.save([row(whole, 20.0, mla(16)), row(decodes, 10.0, mla(16)), row(whole, 1.0), row(decodes, 9.0)])
    chosen = select(mla(16))
    assert chosen.backend is decodes
    assert chosen.why == "fastest measured: decode 10.0 us (Some Device, MLA 16 of 512+64 bfloat16)"
    for other in (dataclasses.replace(mla(16), latent=Latent(64, 16)), mla(128)):
        assert select(other).backend is whole and "this shape is not measured here" in select(other).why
    assert select(mla(32), page_size=64).why == (
        "fastest measured: decode 10.0 us (Some Device, MLA 32 of 512+64 bfloat16, by the nearest shape measured, MLA 16 of "
        "512+64 bfloat16)")
    assert "this shape is not measured here" in select(mla(32), page_size=128).why, "three doublings of a page are one too many"


def test_a_pair_decodes_by_the_faster_backend_and_keeps_all_graphs(entries: Any) -> None:
    """Alone it would have to be twice as fast, for the steps that it leaves out of CUDA graphs."""
    whole, decodes = latent_backends(entries)
    tuning.save([row(whole, 19.0, mla(128)), row(decodes, 10.0, mla(128))])
    chosen = select(mla(128), device=GPU)
    assert chosen.backend.name == "hybrid:whole+decodes"
    assert chosen.backend.capabilities.cudagraph_support is CudagraphSupport.ALWAYS
    assert chosen.why == "fastest measured: decode 10.0 us (Some Device, MLA 128 of 512+64 bfloat16)"
    assert chosen.passed_over["whole"][0].startswith("measured slower: decode 19.0 us against 10.0 us")
    assert select(mla(128), device=CPU).backend is decodes  # no graphs to keep
    tuning.save([row(decodes, 18.0, mla(128))])
    chosen = select(mla(128), device=GPU)
    assert chosen.backend is whole and chosen.passed_over["decodes"] == [
        "measured decode 18.0 us against 19.0 us (Some Device, MLA 128 of 512+64 bfloat16), but as hybrid:whole+decodes it "
        "plans each step on the host, and it is not 1.2 times as fast"]


def test_no_pair_where_decodes_are_not_captured_either(entries: Any) -> None:
    whole, decodes = latent_backends(entries, CudagraphSupport.NEVER)
    tuning.save([row(whole, 19.0, mla(128)), row(decodes, 10.0, mla(128))])
    assert select(mla(128), device=GPU).backend is whole


@pytest.mark.parametrize("heads, name", [(16, "triton"), (32, "triton"), (64, "hybrid:triton+flashinfer_mla"),
                                         (128, "hybrid:triton+flashinfer_mla")])
@pytest.mark.parametrize("page_size", [16, 64])
def test_what_ships_decides_mla_on_an_h200(monkeypatch: pytest.MonkeyPatch, entries: Any, heads: int, name: str, page_size: int
                                           ) -> None:
    """Over the grid Triton is faster at 16 heads, FlashInfer at 128."""
    from quire.attn_ops.backends import flashinfer_mla, triton

    shipped = Path(tuning.__file__).parent / "attention.json"
    monkeypatch.setattr(tuning, "STORE", dataclasses.replace(tuning.STORE, shipped=shipped))
    monkeypatch.setattr(tuning, "device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(tuning, "versions", lambda backend: next(
        (r.torch, r.packages) for r in tuning.load(shipped) if r.backend == backend.name))
    entries(**{b.name: lambda b=b: dataclasses.replace(b, available=lambda device: None)
               for b in (triton.BACKEND, flashinfer_mla.BACKEND)}, hybrid=lambda: hybrid.FAMILY)
    assert select(mla(heads), device=GPU, page_size=page_size).backend.name == name
    assert select(mla(heads), device=GPU, page_size=page_size, kv_dtype=torch.int8).backend.name == "triton"
    assert "flashinfer_mla" not in select(device=GPU, page_size=page_size).passed_over, "it is not meant for dense layers"


# What is shown.


def test_the_table_of_backends_shows_the_measurements() -> None:
    a, b = make("a", 0), make("b", 1)
    assert str(backends("cpu")).endswith(f"nothing is measured on this device ({HINT})")
    tuning.save([row(a, {"1x8": 4.0, "2x8": 9.0}), row(b, 5.0), row(a, 3.0, WINDOWED)])
    torch_version = tuning.versions(a)[0]
    assert str(backends("cpu")).splitlines()[-2:] == [
        f"measured with torch {torch_version}: 32/8 x 128 bfloat16, page 16: decode b 5.0 us, a 6.0 us",
        f"measured with torch {torch_version}: 32/8 x 128 bfloat16, page 16, window: decode a 3.0 us"]


def test_a_gpu_that_is_only_asked_about_has_no_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert tuning.sources(GPU) == []
