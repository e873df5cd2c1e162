"""The kit's families of batches, its kit for ops, the page and the command: what is right passes, what is wrong is seen."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from quire import AttentionBackend, current_step
from quire.attn_ops import registry
from quire.attn_ops.backends import torch_native
from quire.attn_ops.conformance import ops, page
from quire.attn_ops.conformance.command import main
from quire.attn_ops.conformance.lanes import Worker, work_off
from quire.attn_ops.conformance.report import check_backend, run_checks
from quire.attn_ops.conformance.sweeps import SHAPES
from quire.attn_ops.registry import get_backend, register_backend
from tests.attn_ops.conformance.test_kit import NAMES, broken, failures, spoil

NATIVE = get_backend("torch_native")


def test_the_shapes_are_all_there() -> None:
    results = {r.check: r for r in check_backend(NATIVE, only="shape ", quick=True)}
    assert len(SHAPES) == 13 and {r.status for r in results.values()} == {"ok"}
    assert set(SHAPES) - {name.removeprefix("shape ") for name in results} == {"large_prefill", "medium_encoder_prefill"}
    assert all(0 < r.error < 1e-5 and r.of_bound < 1 for r in results.values())


def test_an_op_that_ignores_what_it_does_not_declare() -> None:
    def deaf(given):
        given.update(window=None, softcap=None, chunk=None, sinks=None)

    none = dict.fromkeys(("window", "softcap", "chunk", "sinks"), False)
    assert failures(broken(deaf, **none), "feature ") == {f"feature {name}" for name in none}
    results = [r for r in check_backend(broken(deaf, **none), only="feature window")]
    assert "the op ignores it" in results[0].detail


def test_inputs_must_stay_as_they_are() -> None:
    """SGLang's caches divided the caller's keys by the scale in place."""
    def change(given):
        out = torch_native.paged_attention(**given)
        if given["k"] is not None:
            given["k"].mul_(2)
        return out

    (result,) = check_backend(broken(change), only="decode batch")[:1]
    assert result.status == "FAIL" and result.detail == "the backend changed its input k"


def test_a_last_bit_that_depends_on_the_pages() -> None:
    def change(given):
        out = torch_native.paged_attention(**given)
        return out * (1 + 1e-6 * given["block_table"][0, 0])

    assert failures(broken(change), "pages in another order") == {"pages in another order"}


def alone(given) -> torch.Tensor:
    """Each sequence by itself."""
    q, k, v = (given.pop(name) for name in ("q", "k", "v"))
    starts, lens = given.pop("query_start_loc").tolist(), given.pop("seq_lens")
    slots, table = given.pop("slot_mapping"), given.pop("block_table")
    given.pop("prepared")
    out = q.new_zeros(*q.shape[:2], given["v_cache"].shape[3])
    for row, (a, b) in enumerate(zip(starts, starts[1:], strict=False)):
        if a < b:
            new = [None if x is None else x[a:b] for x in (k, v)]
            out[a:b] = torch_native.paged_attention(
                q=q[a:b], k=new[0], v=new[1], slot_mapping=slots[a:b], block_table=table[row : row + 1, : -(-lens[row] // 4)],
                query_start_loc=torch.tensor([0, b - a], dtype=torch.int32), seq_lens=lens[row : row + 1], prepared=[], **given)
    return out


def test_batch_invariance_is_checked_where_it_is_declared() -> None:
    def check(backend: AttentionBackend) -> tuple[str, str]:
        (result,) = check_backend(backend, only="a batch in parts")
        return result.status, result.detail

    def others(given):
        return torch_native.paged_attention(**given) * (1 + 1e-7 * len(given["seq_lens"]))

    assert check(NATIVE) == ("ok", "within the bounds") == check(broken(others))
    assert check(broken(alone, batch_invariant=True)) == ("ok", "bitwise by sequences")
    status, detail = check(broken(others, batch_invariant=True))
    assert status == "FAIL" and detail.startswith("declared batch_invariant, and sequence 0")


def test_any_batch_is_checked_where_it_is_declared() -> None:
    """A backend that reads the lengths of the step and not of its tables."""
    def op(given):
        step = current_step()
        longest = 1 if step is None or step.metadata.num_tokens == len(given["q"]) else step.metadata.max_query_len
        return torch_native.paged_attention(**{**given, "scale": given["scale"] * longest})

    def check(backend: AttentionBackend) -> list[str]:
        return [result.status for result in check_backend(backend, only="the last tokens of a step")]

    assert check(NATIVE) == ["ok"]
    assert check(broken(op, any_batch=True)) == ["FAIL"]


def test_buffers_used_again() -> None:
    """A backend that keeps the lengths of its first step."""
    kept: list[torch.Tensor] = []

    def op(*args, **options):
        given = {**dict(zip(NAMES, args, strict=True)), **options, "prepared": []}
        kept.append(given["seq_lens"].clone())
        first = next(x for x in kept if x.shape == kept[-1].shape)
        return torch_native.paged_attention(**{**given, "seq_lens": torch.where(given["seq_lens"] > 0, first, 0)})

    (result,) = check_backend(dataclasses.replace(NATIVE, op=op, prepare=None), only="buffers used again")
    assert result.status == "FAIL"


# Ops without a cache.


@pytest.mark.slow  # tests/attn_ops/ops has each
def test_the_ops_pass() -> None:
    checks = [c for c in ops.op_checks(torch.device("cpu")) if c[0] != "varlen medium_encoder_prefill"]
    found = {r.check: r.status for r in run_checks(checks)}
    assert {n for n, s in found.items() if s == "skip"} - {"cross attention triton"} == {
        "merge past 2**31 elements", "varlen kernel"}
    assert found["cross attention torch_native"] == "ok"
    assert "FAIL" not in found.values()


def spoilt(op: Callable, change: Callable) -> Callable:
    return lambda *args, **options: change(op, *args, **options)


@pytest.mark.parametrize("name, change, caught_by", [
    ("merge_states", lambda op, o, lse: (op(o, lse)[0], op(o, lse)[1] / 2), "merge of several states"),
    ("merge_states", lambda op, o, lse: op(o, lse.nan_to_num(posinf=1e30)), "merge of empty states"),
    ("merge_states", lambda op, o, lse: (o.new_full((len(o), *o.shape[2:]), 0.5), lse[:, 0]), "merge of empty states"),
    ("varlen_attention", lambda op, *a, **o: op(*a, **{**o, "window": None}), "varlen eager"),
    ("varlen_attention", lambda op, *a, **o: op(*a, **{**o, "causal": True}), "varlen small_encoder_prefill"),
    ("varlen_attention", lambda op, *a, **o: (op(*a, **o)[0], op(*a, **o)[1] * 1.4427), "varlen lse merges"),
    ("varlen_attention", lambda op, *a, **o: (op(*a, **o)[0] + 1e-3, op(*a, **o)[1]), "varlen padding"),
], ids=["lse", "inf", "empty", "window", "causal", "base_2", "padding"])
def test_a_wrong_op_fails(monkeypatch, name, change, caught_by) -> None:
    monkeypatch.setattr(ops, name, spoilt(getattr(ops, name), change))
    (result,) = run_checks(ops.op_checks(torch.device("cpu")), caught_by)
    assert result.status == "FAIL", result


# The record and its page.


def test_json_and_page(tmp_path, capsys) -> None:
    file = tmp_path / "run.json"
    assert main(["--backend", "all", "--device", "cpu", "--only", "layout", "--json", str(file)]) == 0
    record = json.loads(file.read_text())
    runs = {run["backend"]: run for run in record["runs"]}
    assert runs["torch_native"]["dtype"] == "float32" and record["environment"]["versions"]["torch"] == torch.__version__
    assert {r["check"]: r["status"] for r in runs["torch_native"]["results"]} == {
        "layout NHD": "ok", "layout HND": "ok", "MLA: layouts": "ok"}
    assert runs["flashinfer"]["reason"] == "runs on cuda" and "flashinfer: not checked: runs on cuda" in capsys.readouterr().out
    text = page.page([record])
    assert "| `torch_native` | cpu, cuda |" in text and "| layouts | " in text and "ok 2 of 2, " in text
    assert "- `flashinfer` was not run: runs on cuda" in text
    runs["torch_native"]["results"][0].update(status="FAIL", detail="wrong | numbers")
    assert "**FAIL**: wrong / numbers" in page.page([record])
    quick = {**record, "runs": [{**runs["torch_native"], "backend": "another", "quick": True}]}
    elsewhere = {**quick, "environment": {**record["environment"], "devices": {"cuda": "a GPU"}}}
    text = page.page([record, quick], page.page([record, elsewhere]))  # one table for the CPU; the GPU's stays
    assert text.count("### ") == 2 and text.count("`another` float32, quick |") == 2 and "### cuda: a GPU" in text
    assert len(record["runs"]) == len(runs)


# The command line.


def test_main(capsys, monkeypatch) -> None:
    assert main(["--backend", "torch_native", "--device", "cpu", "--only", "batch"]) == 0
    out = capsys.readouterr().out
    assert "attention backend torch_native on cpu" in out and "mixed batch" in out
    assert "4 passed, 0 failed, 4 skipped" in out  # CUDA graphs, those of MLA too
    assert main(["--backend", "torch_native", "--device", "cpu", "--dtype", "float16", "--only", "decode batch"]) == 0
    assert re.search(r"decode batch .* ok .* \d\.\d", capsys.readouterr().out)
    both = "full=torch_native,window=flex_attention"
    assert main(["--backend", f"torch_native,{both}", "--device", "cpu", "--only", "decode batch"]) == 0
    assert f"attention backend {both} on cpu" in capsys.readouterr().out
    monkeypatch.setattr(registry, "REGISTRY", registry.Registry())
    register_backend(broken(spoil(window=lambda g: None)))
    assert main(["--backend", "broken", "--only", "feature window"]) == 1
    assert "1 failed" in capsys.readouterr().out
    assert main(["--backend", "nobody"]) == 1
    assert "unknown attention backend 'nobody'" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--backend", "broken", "--dtype", "int4"])
    assert main(["--backend", "broken", "--only", "layout", "--kv-dtype", "float8_e5m2"]) == 0


def test_a_run_that_ends_early_goes_on(tmp_path, capsys) -> None:
    """A run out of time says what is left; the next makes those checks, and a failure again, and no other."""
    first, second, arguments = tmp_path / "1.json", tmp_path / "2.json", ["--backend", "torch_native", "--only", "layout"]
    assert main([*arguments, "--deadline", "0", "--json", str(first)]) == 1  # nothing was checked
    assert main([*arguments, "--json", str(first)]) == 0
    record = json.loads(first.read_text())
    (run,) = record["runs"]
    run["left"] = [run["results"].pop()["check"]]
    run["results"][0]["status"] = "FAIL"
    kept = run["results"][1] = {**run["results"][1], "detail": "of the first run"}
    made = page.page([record])
    assert "not run" in made
    assert "No quantized cache with `trtllm_mha`: its kernels take one scale for a whole cache" in made
    assert "No quantized cache but with a fixed scale with `flashinfer`: its kernels take one scale for a whole" in made
    assert "`flashinfer` | cuda | bfloat16, float16 | float8_e4m3fn (fixed scale), float8_e5m2 (fixed scale), model's |" in made
    first.write_text(json.dumps(record))
    assert main([*arguments, "--resume", str(first), "--json", str(second)]) == 0
    (run,) = json.loads(second.read_text())["runs"]
    assert not run["left"] and len(run["results"]) == 3 and run["results"][1] == kept
    assert "3 passed, 0 failed" in capsys.readouterr().out


def test_a_process_that_ends_fails_its_own_check_only() -> None:
    """Two processes, one of which ends at the second task: the rest is answered."""
    found: dict[str, Any] = {}
    work_off(["1", "x", "3"], int, found.__setitem__, lambda task, why: why, jobs=2, until=None, each=60,
             group=str, poisoned=lambda answer: False)
    assert found == {"1": 1, "3": 3, "x": "the process ended with exit code 1"}
    work_off([60.0, 60.0], time.sleep, found.__setitem__, lambda task, why: why, jobs=2, until=time.time() + 0.3, each=60,
             group=str, poisoned=lambda answer: False)
    assert 60.0 not in found
    hangs = [50.0, 51.0, 52.0, 53.0, 54.0]
    work_off([*hangs, 0.0], time.sleep, found.__setitem__, lambda task, why: why, jobs=2, until=None, each=0.4, group=bool,
             poisoned=lambda answer: False)
    assert found[50.0] == "took more than 0 s" and found[0.0] is None, "a hang fails alone"
    assert found[54.0] == "left out: 3 others of True took more than 0 s"


def test_processes_share_the_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of several GPUs is the first one of as many processes, so that none is out of memory beside an idle one."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    workers = [Worker(os.getenv, number) for number in range(3)]
    assert [worker.call("CUDA_VISIBLE_DEVICES", None, 60) for worker in workers] == ["4,5", "5,4", "4,5"]
    for worker in workers:
        worker.end()
