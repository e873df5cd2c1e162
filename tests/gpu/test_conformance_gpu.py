"""The conformance kit on a GPU, CUDA graph replay and the search for synchronisation included."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from quire.attn_ops.backend import CudagraphSupport
from quire.attn_ops.conformance.checks import Kit
from quire.attn_ops.conformance.command import Case, Run, check_all
from quire.attn_ops.conformance.report import Result
from quire.attn_ops.registry import get_backend

FP32, BF16, FP16, INT8 = torch.float32, torch.bfloat16, torch.float16, torch.int8
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
#: Backends, dtypes, and dtypes of the KV cache (None: the model's).
COMBINATIONS = [
    *(("torch_native", dtype, kv) for dtype, kv in ((BF16, None), (FP32, None), (BF16, E4M3), (FP32, INT8))),
    *(("triton", dtype, kv) for dtype, kv in (
        (BF16, None), (FP32, None), (FP16, None), (FP32, INT8), (BF16, INT8), (BF16, E4M3), (FP16, E4M3), (BF16, E5M2),
        (FP16, E5M2))),
    *((name, BF16, None) for name in (
        "flashinfer", "flashinfer_mla", "trtllm_mha", "flash_attention", "flashmla", "flex_attention",
        "hybrid:flashinfer+triton", "hybrid:torch_native+triton", "hybrid:triton+flashinfer_mla",
        "cascade:triton@1", "two_batch:triton", "local:flashinfer", "local:triton",
        "double_sparsity:1048576:0:all", "dual_chunk:1048576:4")),  # exact with room for all keys
    ("full=torch_native,window=triton", FP32, None), ("ops", BF16, None), ("ops", FP32, None),
]


@pytest.mark.alone  # in many processes, each of which waits for compilers
@pytest.mark.timeout(3600)
def test_conformance(tmp_path: Path) -> None:
    """Every backend that runs here does what it declares, and every op what its definition does. $QUIRE_KITS_JSON: a file for
    the results, which takes those that an earlier call left there; $QUIRE_KITS_SECONDS: start nothing after that."""
    file = Path(os.environ.get("QUIRE_KITS_JSON") or tmp_path / "kits.json")
    cases = [case for name, dtype, kv in COMBINATIONS if runs_here(case := Case(name, "cuda", dtype, kv, quick=False))]
    runs = [Run.of(case) for case in cases]
    seconds = os.environ.get("QUIRE_KITS_SECONDS")
    check_all(runs, jobs=max(1, len(os.sched_getaffinity(0)) - 2), json=file, resume=[file],
              deadline=float(seconds) if seconds else None, limit=600)  # FlashInfer compiles a kernel for each head dim
    wrong = [(*run.case.key.values(), r.check, r.status, r.detail) for run in runs for r in run.done if not passed(run.case, r)]
    assert not wrong
    assert not (left := sum(len(run.left) for run in runs)), f"{left} checks are left: run this again"


def runs_here(case: Case) -> bool:
    if case.backend == "ops":
        return True
    backend = get_backend(case.backend)
    if why := backend.available(torch.device("cuda")):
        print(f"{case.backend}: not checked: {why}")
        return False
    return torch.cuda.get_device_capability() >= backend.capabilities.min_kv_compute_capability.get(case.kv_dtype, (0, 0))


def passed(case: Case, result: Result) -> bool:
    """Whether a check did not fail, nor was left out where it can be made."""
    if result.status != "skip" or case.backend == "ops":
        return result.status != "FAIL"
    backend = get_backend(case.backend)
    may_skip = {"CUDA graph of a mixed batch", "MLA: CUDA graph of a mixed batch", "rotary embedding (rope_op)"}
    if backend.capabilities.cudagraph_support is CudagraphSupport.NEVER:
        may_skip.add("CUDA graph of a decode batch")
    if backend.op is not None and len(Kit(backend, torch.device("cuda"), case.dtype, case.kv_dtype).features) < 2:
        may_skip.add("features together")
    return result.check in may_skip
