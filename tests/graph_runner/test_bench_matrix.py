"""``quire bench matrix``: a dry run with the shipped model on the CPU, going on with it, and what its reports say."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.graph_runner.bench import workers
from quire.graph_runner.bench.matrix_cells import BLOCKS, WARM, Cell, Job, Worker, cells
from quire.graph_runner.bench.matrix_report import BEGIN, END, heat_map, markdown, merged, pairs, splice
from quire.graph_runner.bench.models import Models, ModelSpec
from quire.graph_runner.bench.roofline import prefill_flops
from quire.graph_runner.bench.systems import NotMeasured, SteppedSystem, spread_tokens
from quire.graph_runner.cli import main

pytestmark = pytest.mark.usefixtures("tokens_unchecked", "traces_kept")

DRY = ["bench", "matrix", "--device", "cpu", "--layers", "1", "--scale", "64"]


def test_the_cells_of_the_matrix() -> None:
    names = [cell.name for cell in cells()]
    assert len(names) == len(set(names)) == 18
    assert {"decode/1x1024", "decode/128x32768", "prefill/4x32704", "prefill/64x1024", "mixed256", "online"} < set(names)


def test_a_dry_run_and_going_on_with_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "matrix.json"
    asked = "decode/1x16,decode/8x16,decode/1x128,decode/8x128,prefill/1x16,mixed256,online"
    assert main([*DRY, "--cells", asked, "--out", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert not [row["error"] for row in rows if row["error"]]
    found = {(row["workload"], row["batch"], row["context"], row.get("variant")): row for row in rows}
    assert set(found) == {
        ("decode", 1, 16, None), ("decode", 8, 16, None), ("decode", 1, 128, None), ("decode", 8, 128, None),
        ("prefill", 1, 16, None), ("mixed256", None, None, None), ("online", None, None, "first token"),
        ("online", None, None, "between tokens")}
    for row in rows:
        assert row["model"] == "tiny/1l" and row["attention"] == "torch_native" and 0 < row["share_of_floor"] < 1, row
    assert found["decode", 8, 16, None]["mean_context"] in (16, 17) and found["decode", 8, 128, None]["mean_context"] <= 128
    assert found["online", None, None, "first token"]["p99_ms"] >= found["online", None, None, "first token"]["ms_per_step"]

    assert main([*DRY, "--cells", "prefill/1x16", "--out", str(out)]) == 2
    assert "continue it with --resume" in capsys.readouterr().err
    assert main([*DRY, "--cells", asked + ",prefill/64x16", "--out", str(out), "--resume", "--deadline", "1e-9"]) == 0
    assert "cells left (run again with --resume): tiny quire: 1" in capsys.readouterr().out
    assert len(json.loads(out.read_text())["rows"]) == len(rows)
    before = tmp_path / "before.json"
    slower = json.loads(out.read_text())
    for row in slower["rows"]:
        row["ms_per_step"] = row["ms_per_step"] and row["ms_per_step"] / 1e3
        row["seconds"] = row["seconds"] and row["seconds"] / 1e3
    before.write_text(json.dumps(slower))
    assert main([*DRY, "--cells", asked, "--out", str(out), "--resume", "--against", str(before)]) == 1
    assert "8 rows compared, 8 slower" in capsys.readouterr().out


class Stepped(SteppedSystem):
    """Emits a token per request and step; ``most`` requests at once. Time is the number of steps."""

    name = "stepped"
    options: dict[str, Any] = {}

    def __init__(self, most: int = 10**6) -> None:
        self.most, self.left, self.steps, self.running = most, {}, 0, []  # type: ignore[var-annotated]

    def close(self) -> None:
        pass

    def submit(self, prompt: list[int], new_tokens: int, temperature: float = 0.0, *, stream: bool = False) -> int:
        request = len(self.left) + 1 + 10**6 * self.steps
        self.left[request] = new_tokens
        return request

    def step(self) -> list[int]:
        self.steps += 1
        now = list(self.left)[: self.most]
        self.running.append(len(now))
        for request in now:
            self.left[request] -= 1
            if not self.left[request]:
                del self.left[request]
        return now

    def abort(self, requests: Any = None) -> None:
        for request in list(self.left) if requests is None else requests:
            self.left.pop(request, None)

    @property
    def busy(self) -> bool:
        return bool(self.left)


@pytest.fixture
def worker() -> Worker:
    return Worker(Job("llama2-7b", "bfloat16", "cpu", "quire", []))


def test_batches_of_a_context_share_a_prefill(worker: Worker) -> None:
    """The timed steps of each batch run exactly that batch."""
    system = Stepped()
    group = [Cell("decode", b, 2048) for b in (32, 8, 1)]
    rows = dict(worker.measure(system, group))
    steps = WARM + BLOCKS * worker.steps(group[0])
    assert system.running == [32] * (1 + steps) + [8] * steps + [1] * steps and not system.busy
    sizes = [row["bytes_per_step"] for row in rows.values()]
    assert sizes == sorted(sizes, reverse=True)
    assert all(0.9 * 2048 < row["mean_context"] <= 2048 for row in rows.values())


def test_a_batch_that_does_not_fit_in_the_cache_is_no_measurement(worker: Worker) -> None:
    system = Stepped(most=4)
    ((_, row),) = worker.measure(system, [Cell("decode", 8, 1024)])
    assert "does not fit in the KV cache" in row["error"] and not system.busy


def test_cells_that_no_system_can_serve_say_why(worker: Worker) -> None:
    assert worker.why_not(Cell("decode", 1, 8192)) == "the model has 4096 positions"
    assert worker.why_not(Cell("prefill", 1, 4096)) is not None and worker.why_not(Cell("online")) is None


def test_operations_of_a_prefill() -> None:
    llama = Models(ModelSpec("llama-8b", torch.bfloat16, torch.device("cpu"))).skeleton
    layers = 32 * (4096 * 6144 + 4096 * 4096 + 3 * 4096 * 14336)
    expected = 2 * layers * 1000 + 2 * 128256 * 4096 + 32 * 2 * 32 * 256 * 1000 * 1001 // 2
    assert prefill_flops(llama, [1000]) == expected
    mistral = Models(ModelSpec("mistral-7b", torch.bfloat16, torch.device("cpu"), layers=1)).skeleton
    more = prefill_flops(mistral, [4098]) - prefill_flops(mistral, [4097])
    assert more == 2 * (4096 * 6144 + 4096 * 4096 + 3 * 4096 * 14336) + 2 * 32 * 256 * 4096  # the window's keys, no more


def result(system: str, ms: float, date: str, **row: Any) -> dict[str, Any]:
    cell = {"workload": "decode", "batch": 8, "context": 1024, "model": "m", "dtype": "bfloat16", "kv_cache_dtype": "bfloat16",
            "variant": None, "error": None, "seconds": None, "share_of_floor": 0.5, "ms_per_step": ms, "system": system, **row}
    return {"environment": {"device": "H", "date": date, "versions": {"torch": "2.11"}, "commit": "abc"}, "rows": [cell]}


def test_results_of_several_machines_become_one_table(tmp_path: Path) -> None:
    paths = []
    for i, content in enumerate((
            result("quire", 9.0, "2025-12-31"), result("quire", 6.0, "2026-01-02"), result("vllm", 5.0, "2026-01-01"),
            result("quire", None, "2026-01-01", batch=32, error="NotMeasured: no room"))):  # type: ignore[arg-type]
        paths.append(tmp_path / f"{i}.json")
        paths[-1].write_text(json.dumps(content))
    one = merged(paths)
    assert list(one["environments"]) == ["2026-01-02", "2026-01-01"], "nothing of the first run is left"
    first, second = pairs(one["rows"])
    assert first.ratio == 1.2 and first.share == 0.5 and (second.ratio, second.why) == (None, "NotMeasured: no room")
    text = markdown(one)
    assert "| m | 1024 | **6.00** / 5.00 (50 %) |  |" in text and "- m, decode/32x1024: no room" in text
    assert "- decode and online: at most 0.95 of vllm's time in 0 of 1 cells, more than vllm's in 1\n" in text
    assert "prefill: at most" not in text, "none was measured"
    assert "| m, decode/8x1024 | 1.200 | 50 % | 60 % | 63 % |" in text, "what the aim would be of the roofline"
    docs = tmp_path / "docs.md"
    docs.write_text(f"above\n{BEGIN}\nold\n{END}\nbelow\n")
    splice(docs, text)
    said = docs.read_text()
    assert said.startswith("above\n") and said.endswith("below\n") and "\nold" not in said and "**6.00**" in said
    pytest.importorskip("matplotlib")
    heat_map(one, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_a_step_that_read_less_than_the_model_gives_no_ratio(tmp_path: Path) -> None:
    """With dummy weights a router may send all tokens to the same experts: the time is shown, and not compared."""
    vllm = result("vllm", 3.0, "2026-01-01", share_of_floor=1.3)
    for name, content in (("a", result("quire", 6.0, "2026-01-01")), ("b", vllm)):
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    one = merged([tmp_path / "a.json", tmp_path / "b.json"])
    assert pairs(one["rows"])[0].ratio is None
    assert "| m | 1024 | 6.00 / 3.00† (50 %) |" in markdown(one) and "\n† Not the same work: a step of vllm" in markdown(one)


def test_dummy_weights_send_tokens_to_all_experts() -> None:
    """With scores that are equal after rounding every token has the same experts, and a step reads a tenth of the weights; the
    same where biases outweigh what differs between tokens."""
    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.shared_expert_gate = torch.nn.Linear(64, 32, bias=False), torch.nn.Linear(64, 1, bias=False)
            self.o_proj = torch.nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.gate(x + 8 * self.o_proj(x))  # type: ignore[no-any-return]

    model = torch.nn.ModuleDict({"mlp": Block()}).bfloat16()
    for p in model.parameters():
        torch.nn.init.uniform_(p, -1e-3, 1e-3)
    other = model["mlp"].shared_expert_gate.weight.clone()  # type: ignore[union-attr]
    hidden = 1e-3 * torch.randn(256, 64, generator=torch.Generator().manual_seed(0)).bfloat16()

    def experts() -> int:
        return len(torch.softmax(model["mlp"](hidden), -1).topk(2).indices.unique())

    before = experts()
    spread_tokens(model)
    assert before < 4 and experts() > 24
    assert torch.equal(model["mlp"].shared_expert_gate.weight, other)  # type: ignore[union-attr]
    with pytest.raises(NotMeasured, match="no router was found"):
        spread_tokens(torch.nn.Linear(2, 2))


@pytest.mark.slow
def test_a_worker_that_dies_keeps_its_rows_and_says_why(tmp_path: Path) -> None:
    program = ("from quire.graph_runner.bench import workers; import sys; job = workers.job(); print('x', flush=True); "
               "workers.emit(job); sys.exit('no room left')")
    found = workers.rows(["-c", program], {"a": 1}, {}, log=tmp_path / "log")
    assert next(found) == {"a": 1}
    with pytest.raises(workers.Ended, match="exit code 1: no room left"):
        next(found)
    assert (tmp_path / "log").read_text() == "x\nno room left\n"


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no bounds on this system")
def test_gpus_do_not_share_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that start on one GPU of a host would slow the steps that are timed on another."""
    program = ("import os; from quire.graph_runner.bench.workers import emit; emit({'on': sorted(os.sched_getaffinity(0))}); "
               "emit({})")
    mine = sorted(os.sched_getaffinity(0))
    assert list(workers.rows(["-c", program], None, {}, cores=mine[-1:])) == [{"on": mine[-1:]}]
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 4, 5, 6, 7, 8, 9})
    shares = [workers.cores_of(gpu, 3) for gpu in range(3)]
    assert shares == [[3, 4], [5, 6], [7, 8]] and workers.cores_of(0, 1) is None and workers.cores_of(0, 7) is None


@pytest.mark.slow
def test_a_worker_ends_with_its_last_row_or_at_the_deadline() -> None:
    """Not when it, or a process it started, would end by itself."""
    program = ("import time; from quire.graph_runner.bench.workers import emit; emit({'a': 1}); emit({}); time.sleep(60)")
    began = time.time()
    assert list(workers.rows(["-c", program], None, {})) == [{"a": 1}]
    assert list(workers.rows(["-c", "import time; time.sleep(60)"], None, {}, deadline=time.time() + 0.5)) == []
    assert time.time() - began < 30
