"""``quire bench``: dry runs with a small model on the CPU, byte counts, comparison with earlier results, shapes."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from quire.graph_runner.bench import host as host_bench
from quire.graph_runner.bench.main import engine_option, percent
from quire.graph_runner.bench.models import Models, ModelSpec, build, config_of, layers_asked, skeleton
from quire.graph_runner.bench.report import COLUMNS, PHASES, compare, complete, first_line
from quire.graph_runner.bench.roofline import copy_bandwidth, kv_bytes, step_bytes, weight_bytes
from quire.graph_runner.bench.shapes import SHAPES
from quire.graph_runner.bench.start import start
from quire.graph_runner.bench.systems import Limits, NotMeasured, System
from quire.graph_runner.bench.workloads import WORKLOADS, Prompts, Sizes
from quire.graph_runner.cli import main

pytestmark = pytest.mark.usefixtures("tokens_unchecked", "traces_kept")

CPU = torch.device("cpu")
DRY = ["--model", "tiny", "--layers", "1", "--dtype", "float32", "--device", "cpu", "--context", "66", "--repeats", "1"]
# Parameters in billions, from the models' cards and config files; each model's name agrees with it.
PARAMETERS = {"llama-8b": 8.03, "llama-1b": 1.236, "llama2-7b": 6.738, "phi-3-mini": 3.821, "qwen2-7b": 7.616,
              "qwen3-0.6b": 0.596, "qwen3-8b": 8.19, "gemma2-9b": 9.24,
              "gpt-oss-20b": 20.91, "qwen3-30b-a3b": 30.53, "mistral-7b": 7.24, "deepseek-v2-lite": 15.71,
              "llama-3b": 3.213, "qwen2.5-0.5b": 0.494, "phi-4": 14.66, "glm4-9b": 9.40, "gemma3-1b": 1.0, "gemma3-4b": 3.88,
              "starcoder2-7b": 7.174, "olmoe-7b": 6.919, "granite-3b-moe": 3.299, "mixtral-8x7b": 46.7}


def spec(name: str, dtype: torch.dtype = torch.bfloat16, layers: int | None = None) -> ModelSpec:
    return ModelSpec(name, dtype, CPU, layers)


# -- shapes and bytes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_have_the_parameters_of_the_public_models(name: str) -> None:
    count = sum(p.numel() for p in skeleton(spec(name)).parameters()) / 1e9
    assert math.isclose(count, PARAMETERS[name], rel_tol=2e-3)


def test_build_initialises_weights_and_buffers() -> None:
    model: Any = build(spec("tiny", layers=1))
    for name, parameter in model.named_parameters():
        assert parameter.dtype is torch.bfloat16 and parameter.isfinite().all(), name
        if "norm" in name:
            assert (parameter == 1).all()
        else:
            assert 0.01 < parameter.float().std() < 0.03, name
    frequencies = model.model.rotary_emb.inv_freq
    assert torch.allclose(frequencies, 10000.0 ** -(torch.arange(0, 64, 2) / 64), rtol=1e-5)
    assert frequencies.dtype is torch.float32


def test_layers_cut_the_config_and_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(spec("gemma2-9b", layers=3))
    assert config.num_hidden_layers == 3
    assert config.layer_types == ["sliding_attention", "full_attention", "sliding_attention"]
    monkeypatch.setenv("LAYERS", "2")
    assert layers_asked(None) == 2 and layers_asked(3) == 3
    with pytest.raises(ValueError, match="at least 1, got 0"):
        layers_asked(0)


def test_bytes_of_a_step() -> None:
    llama = skeleton(spec("llama-8b"))
    total = sum(p.numel() for p in llama.parameters())
    assert weight_bytes(llama, 1) == weight_bytes(llama, 128) == 2 * (total - 128256 * 4096)  # no input embedding
    assert kv_bytes(llama, [1000, 24]) == 1024 * 32 * 2 * 8 * 128 * 2
    assert step_bytes(llama, 2, 512) == weight_bytes(llama, 2) + kv_bytes(llama, [512, 512])
    for dtype in (torch.int8, torch.float8_e4m3fn):  # a float32 scale for each key and each value
        assert kv_bytes(llama, [1000, 24], dtype) == 1024 * 32 * 2 * 8 * (128 + 4)
    assert step_bytes(llama, 2, 512, torch.int8) == weight_bytes(llama, 2) + kv_bytes(llama, [512, 512], torch.int8)
    tied = skeleton(spec("qwen3-0.6b"))
    assert weight_bytes(tied, 1) == 2 * sum(p.numel() for p in tied.parameters())


def test_bytes_of_windows_experts_and_latent_attention() -> None:
    gemma = skeleton(spec("gemma2-9b", layers=2))
    assert kv_bytes(gemma, [10000]) == (4096 + 10000) * 2 * 8 * 256 * 2
    mistral = skeleton(spec("mistral-7b", layers=2))
    assert kv_bytes(mistral, [10000]) == 2 * 4096 * 2 * 8 * 128 * 2
    deepseek = skeleton(spec("deepseek-v2-lite", layers=2))
    assert kv_bytes(deepseek, [10]) == 2 * 10 * (512 + 64) * 2
    moe = skeleton(spec("qwen3-30b-a3b", layers=1))
    experts = 2 * 128 * 3 * 2048 * 768
    assert math.isclose(weight_bytes(moe, 4) - weight_bytes(moe, 1),
                        experts * ((1 - (1 - 8 / 128) ** 4) - 8 / 128), rel_tol=1e-9)


def test_copy_bandwidth_is_plausible() -> None:
    assert 1e8 < copy_bandwidth(CPU) < 1e12


# -- workloads ------------------------------------------------------------------------------------------------------


class Clock:
    """Time that only a system advances, so that a busy machine does not disturb the tests."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("quire.graph_runner.bench.workloads.time", clock)
    return clock


class Fake(System):
    """Counts tokens instead of generating them, one millisecond of the clock each."""

    name = "fake"

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.calls: list[tuple[list[int], list[int], float]] = []

    def generate(self, prompts: Any, new_tokens: Any, temperature: float) -> int:
        self.calls.append(([len(p) for p in prompts], list(new_tokens), temperature))
        self.clock.now += 1e-3 * sum(new_tokens)
        return sum(new_tokens)

    def close(self) -> None:
        pass


def measured(workload: str, sizes: Sizes, clock: Clock) -> tuple[Fake, list[dict[str, Any]]]:
    system = Fake(clock)
    rows = list(WORKLOADS[workload].run(system, Models(spec("tiny", layers=1)), sizes, Prompts(100)))
    assert len(rows) == WORKLOADS[workload].rows(sizes)
    return system, rows


def test_decode_is_the_difference_of_two_runs(clock: Clock) -> None:
    system, rows = measured("decode", Sizes(batches=(2,), context=1024, repeats=2), clock)
    assert [call[1] for call in system.calls] == [[4, 4]] + [[2, 2], [130, 130]] * 2
    assert all(call[0] == [960, 960] and call[2] == 0 for call in system.calls)
    assert WORKLOADS["decode"].limits(Sizes(batches=(2,), context=1024)) == Limits(2, 1091)
    assert rows[0]["batch"] == 2 and rows[0]["repeats_ms"] == pytest.approx([2.0, 2.0])
    assert rows[0]["ms_per_step"] == pytest.approx(2.0) and rows[0]["tokens_per_s"] == pytest.approx(1000)


def test_mixed256_has_the_known_number_of_tokens(clock: Clock) -> None:
    system, rows = measured("mixed256", Sizes(), clock)
    lengths, new_tokens, temperature = system.calls[-1]
    assert len(lengths) == 256 and temperature == 0.6 and rows[0]["output_tokens"] == sum(new_tokens) == 133966
    assert rows[0]["tokens_per_s"] == pytest.approx(1000)
    assert min(lengths + new_tokens) >= 100 and max(lengths + new_tokens) <= 1024


def test_prefill_sizes(clock: Clock) -> None:
    system, rows = measured("prefill", Sizes(repeats=1), clock)
    assert [(row["batch"], row["context"]) for row in rows] == [(128, 960), (1, 960)]
    assert system.calls[0] == ([960] * 128, [2] * 128, 0.0)


def test_prompts_differ_from_call_to_call() -> None:
    prompts = Prompts(50)
    first, second = prompts([20, 3]), prompts([20, 3])
    assert [len(p) for p in first] == [20, 3] and first != second
    assert all(0 <= t < 50 for p in first + second for t in p)


def test_a_system_that_fails_at_one_size_goes_on(clock: Clock) -> None:
    class Small(Fake):
        def generate(self, prompts: Any, new_tokens: Any, temperature: float) -> int:
            self.clock.now += sum(new_tokens) if len(prompts) == 2 else 1 / sum(new_tokens)
            return 0 if len(prompts) == 1 else sum(new_tokens)

    rows = list(WORKLOADS["decode"].run(Small(clock), Models(spec("tiny", layers=1)),
                                        Sizes((1, 2, 3), context=66, repeats=1), Prompts(9)))
    assert rows[0]["error"] == "NotMeasured: fake generated 0 tokens instead of 4"
    assert rows[1]["batch"] == 2 and "error" not in rows[1]
    assert "took no longer than the short ones" in rows[2]["error"]  # rather than a negative time


def test_start_refuses_what_does_not_start() -> None:
    with pytest.raises(NotMeasured, match="hf-eager has no start-up of its own"):
        next(start(spec("tiny"), "hf-eager", "", {}))


@pytest.mark.slow
def test_start_splits_the_time() -> None:
    rows = start(spec("tiny", torch.float32, 1), "quire", "auto", {"num_pages": 64})
    row = next(rows)
    rows.close()
    assert row["variant"] == "cold" and row["attention"] == "torch_native" and row["first_token_s"] > 0
    assert set(row["parts_s"]) == {"import", "load", "trace", "compile", "kernels", "autotune", "prefill kernels",
                                   "graph memory", "capture", "set-up", "other"}
    assert math.isclose(sum(row["parts_s"].values()), row["seconds"])


# -- runs -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_dry_run_of_all_systems(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "results" / "run.json"
    assert main(["bench", "decode", *DRY, "--batch", "1,2", "--systems", "quire,hf-eager,hf-cb", "--vs", "vllm",
                 "--attention", "torch_native,flashinfer", "--engine", "page_size=8", "--out", str(out)]) == 0
    result = json.loads(out.read_text())
    environment, rows = result["environment"], result["rows"]
    assert set(environment) >= {"device", "driver", "cuda", "python", "versions", "commit", "dirty", "date",
                                "host_cores", "copy_tb_per_s"}
    assert set(environment["versions"]) == {"torch", "triton", "transformers", "flashinfer", "vllm", "torchao"}
    good = [r for r in rows if not r["error"]]
    assert [(r["system"], r["batch"]) for r in good] == [
        (name, batch) for name in ("quire", "hf-eager", "hf-cb") for batch in (1, 2)]
    for row in good:
        assert set(COLUMNS) <= set(row)
        assert row["model"] == "tiny/1l" and row["context"] == 66 and row["command"].startswith("quire bench decode ")
        assert row["tokens_per_s"] == pytest.approx(row["batch"] / row["ms_per_step"] * 1e3)
        assert row["floor_ms"] == pytest.approx(row["bytes_per_step"] / environment["copy_tb_per_s"] / 1e9)
        assert row["share_of_floor"] == pytest.approx(row["floor_ms"] / row["ms_per_step"])
    assert good[0]["engine_options"]["page_size"] == 8 and good[0]["attention"] == "torch_native"
    errors = {(r["system"], r["attention"]): r["error"] for r in rows if r["error"]}
    assert "cannot serve this model on cpu" in errors["quire", "flashinfer"]
    assert errors["vllm", ""] in ("vllm is not installed here", "vllm is measured on a GPU only")
    said = capsys.readouterr().out
    assert "ms/step" in said and "not measured: vllm" in said and f"wrote {out}" in said


@pytest.mark.slow
def test_quantized_rows_stand_beside_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torchao")
    rows = []
    for options in ([], ["--quantize", "int8wo"]):
        out = tmp_path / f"{len(options)}.json"
        systems = ["--systems", "quire,hf-eager", "--vs", "vllm"] if options else []
        assert main(["bench", "decode", *DRY, *systems, *options, "--batch", "1", "--out", str(out)]) == 0
        rows += json.loads(out.read_text())["rows"]
    plain, quire, eager, vllm = rows
    assert [r["quantization"] for r in rows] == [None, "int8wo", "int8wo", "int8wo"]
    assert vllm["error"] == "vllm makes its own weights; --quantize is for quire and transformers"
    assert quire["bytes_per_step"] == eager["bytes_per_step"] and not quire["error"] and not eager["error"]
    model: Any = build(spec("tiny", torch.float32, 1))
    linear = [m.weight for m in model.modules() if isinstance(m, torch.nn.Linear)]
    # 1 byte for 4, and for each row a scale (4 bytes) and a zero point (1); the head is no longer tied to the embedding.
    assert plain["bytes_per_step"] - quire["bytes_per_step"] == sum(3 * w.numel() - 5 * w.shape[0] for w in linear)
    assert "weights" in capsys.readouterr().out
    result = json.loads((tmp_path / "0.json").read_text())
    assert compare(result, result["environment"], [quire], 0.05, Console(file=io.StringIO())) == 0  # another row


@pytest.mark.slow
def test_the_dtype_of_the_cache(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It reaches quire only, the rows, and the bytes that a step must read."""

    def rows(*arguments: str) -> list[dict[str, Any]]:
        out = tmp_path / "run.json"
        assert main(["bench", "decode", *DRY, "--batch", "1", "--systems", "quire,hf-eager", "--out", str(out),
                     *arguments]) == 0
        return json.loads(out.read_text())["rows"]

    plain, rival = rows()
    assert plain["kv_cache_dtype"] == rival["kv_cache_dtype"] == plain["dtype"] == "float32"
    for arguments in (["--kv-cache-dtype", "fp8"], ["--engine", "kv_cache_dtype=float8_e4m3fn"]):
        quantized, rival = rows(*arguments)
        assert not quantized["error"] and quantized["kv_cache_dtype"] == "float8_e4m3fn"
        assert rival["kv_cache_dtype"] == "float32" and rival["bytes_per_step"] == plain["bytes_per_step"]
        assert quantized["bytes_per_step"] < plain["bytes_per_step"]
        assert quantized["engine_options"]["kv_cache_dtype"] == arguments[-1].removeprefix("kv_cache_dtype=")
        assert "float8_e4m3fn KV" in capsys.readouterr().out
    before = tmp_path / "before.json"
    before.write_text(json.dumps({"environment": {}, "rows": [{**plain, "ms_per_step": 1e6}]}))
    rows("--kv-cache-dtype", "int8", "--against", str(before))
    assert "nothing was compared" in capsys.readouterr().out.replace("\n", " ")  # another dtype: another row
    old = {k: v for k, v in plain.items() if k != "kv_cache_dtype"}  # an old result, without the column
    before.write_text(json.dumps({"environment": {}, "rows": [{**old, "ms_per_step": 1e6}]}))
    rows("--against", str(before))
    assert "1 rows compared" in capsys.readouterr().out


def test_plots_and_comparison(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One run, drawn, beside an earlier result that was a thousand times as fast: slower. test_compare has the others."""
    pytest.importorskip("matplotlib")
    before = tmp_path / "before.json"
    earlier = {"workload": "decode", "system": "quire", "attention": "torch_native", "model": "tiny/1l", "dtype": "float32",
               "batch": 1, "context": 66, "ms_per_step": 1e-3}
    before.write_text(json.dumps({"environment": {}, "rows": [earlier]}))
    assert main(["bench", "decode", *DRY, "--batch", "1", "--plots", str(tmp_path / "plots"), "--against", str(before),
                 "--tolerance", "10%"]) == 1
    assert sorted(p.name for p in (tmp_path / "plots").iterdir()) == [
        "decode-step.png", "decode-step.svg", "decode-throughput.png", "decode-throughput.svg"]
    assert "1 rows compared, 1 slower by more than 10.0%" in capsys.readouterr().out


@pytest.mark.slow
def test_host(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every phase of the engine's step is timed."""
    monkeypatch.setattr(host_bench, "STEPS", 4)
    monkeypatch.setattr(host_bench, "WARMUPS", 2)
    monkeypatch.setattr(host_bench, "CALLS", 1)
    monkeypatch.setattr(host_bench, "PROMPT_BATCHES", (2,))
    out = tmp_path / "host.json"
    assert main(["bench", "host", "--batch", "1,3", "--repeats", "2", "--systems", "quire,hf-eager", "--out", str(out)]) == 0
    *rows, refused = json.loads(out.read_text())["rows"]
    assert [(r["variant"], r["batch"], r["max_model_len"]) for r in rows] == [
        (variant, batch, length) for length in (2048, 131072)
        for variant, batch in (("decode", 1), ("decode", 3), ("text", 3), ("prefill", 32), ("prompts", 2))]
    for row in rows:
        assert row["error"] is None and set(COLUMNS) <= set(row) and len(row["repeats_ms"]) == 2
        assert set(row["phases_ms"]) == set(PHASES) and min(row["phases_ms"].values()) > 0
        assert row["slowest_ms"] >= max(row["ms_per_step"], *row["phases_ms"].values())
    assert "only quire's own host part" in refused["error"]
    said = capsys.readouterr().out
    assert "max_model_len" in said and "upload" in said


@pytest.mark.parametrize(("old", "new", "code"), [(100.0, 104.0, 0), (100.0, 106.0, 1), (100.0, None, 1),
                                                  (None, 5.0, 0)])
def test_compare(old: float | None, new: float | None, code: int) -> None:
    def row(ms: float | None) -> dict[str, Any]:
        base = {"workload": "decode", "system": "quire", "attention": "triton", "model": "m", "dtype": "bfloat16"}
        return complete({**base, "batch": 1, "context": 9, "ms_per_step": ms, "error": None if ms else "failed"}, None)

    result = {"environment": {"device": "a"}, "rows": [row(old)]}
    console = Console(record=True, width=150)
    assert compare(result, {"device": "b"}, [row(new)], 0.05, console) == code
    said = console.export_text()
    assert "from another device" in said
    assert ("nothing was compared" in said) == (old is None)


def test_arguments() -> None:
    assert percent("5%") == 0.05 and percent("0.1") == 0.1
    assert engine_option("page_size=32") == ("page_size", 32) and engine_option("compiler=x") == ("compiler", "x")
    assert engine_option("cudagraph_capture_sizes=[1, 2]") == ("cudagraph_capture_sizes", [1, 2])
    assert first_line("\nError:\n  because\nmore") == "Error: because"
