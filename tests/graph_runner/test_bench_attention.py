"""``quire bench attention``: a slow backend beside the plain one on the CPU, and what attention="auto" makes of the times."""

from __future__ import annotations

import dataclasses
import json
import logging
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.attn_ops import registry
from quire.attn_ops.attention import AttentionSite
from quire.attn_ops.backend import AttentionBackend, define_paged_op
from quire.attn_ops.backends.torch_native import mla_paged_attention, paged_attention
from quire.attn_ops.registry import get_backend, register_backend
from quire.attn_ops.tuning import attention as tuning
from quire.graph_runner.bench.attention import site_of
from quire.graph_runner.bench.attention_op import Point, decode_point, extend_points, measure, op_batch, work
from quire.graph_runner.cli import main
from quire.graph_runner.engine import Engine
from quire.passes.explain import explain
from tests.tiny import load_model

pytestmark = pytest.mark.usefixtures("tokens_unchecked", "traces_kept")

CPU = torch.device("cpu")
PAUSE = 0.004  # seconds; the plain backend takes a tenth of it at the sizes here
SMALL = ["--device", "cpu", "--batch", "1,2", "--context", "20,33", "--scale", "8"]


def _slow(*args: Any, **options: Any) -> torch.Tensor:
    time.sleep(PAUSE)
    return paged_attention(*args, **options)


SLOW_OP = define_paged_op("slow_for_test", _slow, devices=("CPU",))


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """A backend that is slow and that attention="auto" would take, an empty cache of measurements, no GPU."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path / "cache"))
    plain = get_backend("torch_native")
    made = dataclasses.replace(plain, name="slow_for_test", op=SLOW_OP, priority={"cpu": -1})
    only(monkeypatch, plain, made)
    return made


def only(monkeypatch: pytest.MonkeyPatch, *backends: AttentionBackend) -> None:
    """A registry of these backends alone."""
    monkeypatch.setattr(registry, "REGISTRY", registry.Registry([]))
    for backend in backends:
        register_backend(backend)


@pytest.mark.slow
def test_measure_save_and_select(slow: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str],
                                 caplog: pytest.LogCaptureFixture) -> None:
    model = load_model(num_layers=1)
    with Engine(model, num_pages=8) as engine:
        assert engine.runner.backend is slow and engine.runner.selection.why == ""
    out = tmp_path / "out.json"
    assert main(["bench", "attention", "--model", "tiny", *SMALL, "--save", "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert 'attention="auto" for 4/2 x 64 float32: torch_native (fastest measured: decode ' in said
    assert f"saved in {tmp_path / 'cache' / 'attention.json'}" in said

    result = json.loads(out.read_text())
    assert set(result) == {"environment", "rows"} and result["environment"]["device"] == tuning.device_name(CPU)
    rows = {(r["attention"], r["kind"], r["point"]): r for r in result["rows"]}
    points = [("decode", n) for n in ("1x20", "2x20", "1x33", "2x33")] + [("extend", p.name) for p in extend_points(8 * 32)]
    assert list(rows) == [(name, *point) for point in points for name in ("torch_native", "slow_for_test")]
    assert not [r for r in rows.values() if r["error"]]
    for (name, _, _), row in rows.items():
        assert row["us"] > PAUSE * 1e6 or name == "torch_native"
        assert row["how"] == "host" and row["workload"] == "attention" and row["model"] == "tiny" and row["page_size"] == 16
    assert rows["torch_native", "decode", "2x33"]["bytes_per_step"] == (2 * 33 * 2 + 2 * 4) * 128 * 4

    with caplog.at_level(logging.INFO), Engine(model, num_pages=8) as engine:
        assert engine.runner.backend.name == "torch_native"
        (why,) = engine.runner.selection.passed_over["slow_for_test"]
    assert why.startswith("measured slower: decode ") and why.endswith(f"us ({tuning.device_name(CPU)}, 4/2 x 64 float32)")
    assert [r for r in caplog.records if r.message.startswith("attention: torch_native (fastest measured")]
    assert main(["backends", "--device", "cpu"]) == 0
    assert "4/2 x 64 float32, page 16: decode torch_native" in capsys.readouterr().out
    said = str(explain(model))
    assert "attention backend: torch_native, fastest measured: decode" in said
    assert "slow_for_test passed over: measured slower: decode" in said


def test_mla_is_measured_on_the_latent_cache(slow: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
                                             capsys: pytest.CaptureFixture[str]) -> None:
    """By the op that serves it, and "auto" goes by those times."""
    def pausing(*args: Any, **options: Any) -> torch.Tensor:
        time.sleep(PAUSE)
        return mla_paged_attention(*args, **options)

    only(monkeypatch, get_backend("torch_native"), dataclasses.replace(slow, mla_op=pausing))
    out = tmp_path / "out.json"
    assert main(["bench", "attention", "--heads", "2x16+8", *SMALL, "--save", "--out", str(out)]) == 0
    assert 'attention="auto" for MLA 2 of 16+8 float32: torch_native (fastest measured: decode ' in capsys.readouterr().out
    rows = {(r["attention"], r["point"]): r for r in json.loads(out.read_text())["rows"]}
    assert not [r for r in rows.values() if r["error"]]
    assert rows["slow_for_test", "2x33"]["us"] > max(PAUSE * 1e6, rows["torch_native", "2x33"]["us"])
    latent, weight, queries = 2 * 33 * 24, 2 * 256 * 16, 2 * 2 * (136 + 128)
    assert rows["torch_native", "2x33"]["bytes_per_step"] == 4 * (latent + weight + queries)
    (row,) = [r for r in tuning.load(tuning.STORE.user_file) if r.backend == "torch_native"]
    assert row.shape.features == ("mla",) and (row.shape.group, row.shape.head_dim, row.shape.head_dim_v) == (2, 24, 16)


def test_a_backend_that_fails_is_on_record_and_not_saved(slow: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def broken(*args: Any, **options: Any) -> None:
        raise RuntimeError("no kernel image\nfor this device")

    only(monkeypatch, get_backend("torch_native"), dataclasses.replace(slow, op=broken))
    out = tmp_path / "out.json"
    shape = ["--heads", "4/4x8,4/2x8"]
    assert main(["bench", "attention", *shape, *SMALL, "--page-size", "4", "--save", "--out", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert {r["error"] for r in rows if r["attention"] == "slow_for_test"} == {
        "RuntimeError: no kernel image\nfor this device"}
    saved = tuning.load(tuning.STORE.user_file)
    assert {(r.backend, r.shape.group, r.num_kv_heads, r.shape.page_size) for r in saved} == {
        ("torch_native", 1, 4, 4), ("torch_native", 2, 2, 4)}


def test_a_backend_asked_for_that_cannot_is_a_row(slow: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    less = dataclasses.replace(slow.capabilities, head_dims=lambda d, dv: False, head_dims_note="none")
    only(monkeypatch, dataclasses.replace(slow, capabilities=less))
    assert main(["bench", "attention", "--heads", "1/1x8", *SMALL, "--attention", "slow_for_test", "--out", str(out)]) == 0
    (row,) = json.loads(out.read_text())["rows"]
    assert row["error"] == "cannot serve it: head dims 8/8 (has none)"
    with pytest.raises(ValueError, match="nothing to save"):
        main(["bench", "attention", "--heads", "1/1x8", *SMALL, "--attention", "slow_for_test", "--save", "--traceback"])


@pytest.mark.slow  # test_bench.py compares with earlier results
def test_against_an_earlier_result(slow: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = tmp_path / "before.json"
    arguments = ["bench", "attention", "--heads", "2/1x8", *SMALL, "--attention", "slow_for_test"]
    assert main([*arguments, "--out", str(before)]) == 0
    result = json.loads(before.read_text())
    for row in result["rows"]:
        row["ms_per_step"] /= 100
    before.write_text(json.dumps(result))
    assert main([*arguments, "--against", str(before)]) == 1
    assert "11 rows compared, 11 slower" in capsys.readouterr().out


def test_each_kind_of_layer_is_measured(slow: Any, tmp_path: Path) -> None:
    """Of gemma-2's two kinds, layers without a window come second: their times were missing, and "auto" knew none of them."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    config = Gemma2Config(vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
                          num_key_value_heads=1, head_dim=16, sliding_window=16, max_position_embeddings=128)
    Gemma2ForCausalLM(config).save_pretrained(tmp_path / "model")
    out = tmp_path / "out.json"
    arguments = ["--model", str(tmp_path / "model"), "--attention", "torch_native", "--batch", "1", "--context", "20"]
    assert main(["bench", "attention", *arguments, "--scale", "8", "--device", "cpu", "--out", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert {row["needs"].partition(", ")[2] for row in rows} == {"window, softcap", "softcap"}
    assert not [row for row in rows if row["error"]]


def test_heads() -> None:
    site = site_of("32/8x128", torch.float16)
    assert (site.num_heads, site.num_kv_heads, site.head_dim, site.head_dim_v, site.latent) == (32, 8, 128, 128, None)
    site = site_of("16x512+64", torch.float16)
    assert site.needs() == "MLA 16x192/128 of 512+64, float16"


def test_points() -> None:
    point = decode_point(3, 100)
    assert (point.kind, point.name, point.query_lens, point.seq_lens) == ("decode", "3x100", (1,) * 3, (100,) * 3)
    assert [p.name for p in extend_points()] == [
        "1x4096", "8x1024+4096", "1x960", "1x64+8128", "1x8192+8192", "4x2048+30720", "63x1,448"]
    assert all(len(p.query_lens) == len(p.seq_lens) for p in extend_points(1000))


@pytest.mark.parametrize(("needs", "keys", "pairs"), [
    ({}, 10, 9 + 10), ({"window": 4}, 5, 4 + 4), ({"window": 100}, 10, 19), ({"chunk": 8}, 2, 1 + 2),
    ({"chunk": 9}, 10, 9 + 1),
])
def test_work(needs: dict[str, Any], keys: int, pairs: int) -> None:
    """Two queries at positions 8 and 9."""
    site = AttentionSite(0, 4, 2, 8, 6, torch.bfloat16, 1.0, **needs)
    point = dataclasses.replace(decode_point(1, 10), query_lens=(2,))
    assert work(site, point) == ((keys * 2 + 2 * 4) * 14 * 2, 2 * pairs * 4 * 14)


@pytest.mark.parametrize("name", ["torch_native", "triton"])
@pytest.mark.parametrize("point", [decode_point(2, 20), dataclasses.replace(decode_point(2, 20), query_lens=(3, 1))])
def test_a_measured_batch_is_a_real_one(name: str, point: Any) -> None:
    """What is timed writes the step's keys where they belong, and runs with every feature."""
    backend = get_backend(name)
    if backend.available(CPU):
        pytest.skip(str(backend.available(CPU)))
    site = AttentionSite(0, 4, 2, 16, 16, torch.float32, 0.25, window=7, softcap=5.0, sinks=True)
    batch = op_batch(site, point, page_size=4, device=CPU, max_len=64)
    assert batch.metadata.block_table_tensor.shape == (2, 16)
    for k_cache, v_cache, *_ in batch.caches:
        _ = k_cache.zero_(), v_cache.zero_()
    timing = measure(backend, batch)
    assert timing.us > 0 and timing.us == timing.host_us and timing.how == "host"
    slots = batch.metadata.slot_mapping
    for k_cache, v_cache, *_ in batch.caches:
        assert torch.equal(k_cache[slots // 4, slots % 4], batch.k) and torch.equal(v_cache[slots // 4, slots % 4], batch.v)


def test_pages_hold_the_keys_of_the_step() -> None:
    """Rivals' kernels read them from there and store none: of zeros their products would be others, and quicker."""
    batch = op_batch(AttentionSite(0, 4, 2, 16, 16, torch.float32, 0.25), Point("prefill", "", (5, 3), (9, 3)), page_size=4,
                     device=CPU)
    slots = batch.metadata.slot_mapping
    for k_cache, v_cache, *_ in batch.caches:
        assert torch.equal(k_cache[slots // 4, slots % 4], batch.k) and torch.equal(v_cache[slots // 4, slots % 4], batch.v)
