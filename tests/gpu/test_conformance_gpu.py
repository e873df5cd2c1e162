"""The conformance kit on a GPU, CUDA graph replay and the search for synchronisation included."""

from __future__ import annotations

import pytest
import torch

from quire.attn_ops.backend import CudagraphSupport
from quire.attn_ops.conformance.checks import Kit
from quire.attn_ops.conformance.mla import MlaKit
from quire.attn_ops.conformance.ops import op_checks
from quire.attn_ops.conformance.report import check_backend, run_checks
from quire.attn_ops.registry import get_backend
from tests.gpu.helpers import need

#: The checks, each a test of its own: they wait for compilers, and many can be run at a time.
KIT = Kit(get_backend("torch_native"), torch.device("cpu"), torch.float32)
CHECKS = [name for name, _ in KIT.checks()]
MLA_CHECKS = [name for name, _ in MlaKit(KIT).checks()]
COMBINATIONS = [
    ("torch_native", torch.float32, None),
    ("torch_native", torch.bfloat16, None),
    ("torch_native", torch.bfloat16, torch.float8_e4m3fn),
    ("torch_native", torch.float32, torch.int8),
    ("triton", torch.float32, None),
    ("triton", torch.bfloat16, None),
    ("triton", torch.float16, None),
    ("triton", torch.float32, torch.int8),
    ("triton", torch.bfloat16, torch.int8),
    ("triton", torch.bfloat16, torch.float8_e4m3fn),
    ("triton", torch.float16, torch.float8_e4m3fn),
    ("triton", torch.bfloat16, torch.float8_e5m2),
    ("triton", torch.float16, torch.float8_e5m2),
    pytest.param("flashinfer", torch.bfloat16, None, marks=pytest.mark.slow),  # compiles a kernel for each set of features
    pytest.param("trtllm_mha", torch.bfloat16, None, marks=pytest.mark.slow),  # likewise
    pytest.param("flex_attention", torch.bfloat16, None, marks=pytest.mark.slow),  # likewise
    pytest.param("hybrid:flashinfer+triton", torch.bfloat16, None, marks=pytest.mark.slow),
    ("hybrid:torch_native+triton", torch.bfloat16, None),
    ("full=torch_native,window=triton", torch.float32, None),
    ("double_sparsity:1048576:0:all", torch.bfloat16, None),  # with room for all keys these are exact
    ("dual_chunk:1048576:4", torch.bfloat16, None),
]


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("name, dtype, kv_dtype", COMBINATIONS, ids=str)
def test_conformance(name: str, dtype: torch.dtype, kv_dtype: torch.dtype | None, check: str) -> None:
    backend = get_backend(need(name))
    if torch.cuda.get_device_capability() < backend.capabilities.min_kv_compute_capability.get(kv_dtype, (0, 0)):
        pytest.skip(f"{name}: {kv_dtype} needs a newer GPU")
    if check not in [declared for declared, _ in Kit(backend, torch.device("cuda"), dtype, kv_dtype).checks()]:
        pytest.skip(f"{name} does not declare what this checks")
    (result,) = (r for r in check_backend(backend, "cuda", dtype, only=check, kv_dtype=kv_dtype) if r.check == check)
    assert result.status != "FAIL", result.detail
    may_skip = {"CUDA graph of a mixed batch", "rotary embedding (rope_op)"}
    if backend.capabilities.cudagraph_support is CudagraphSupport.NEVER:
        may_skip.add("CUDA graph of a decode batch")
    if len(Kit(backend, torch.device("cuda"), dtype, kv_dtype).features) < 2:
        may_skip.add("features together")
    assert result.status == "ok" or check in may_skip, result.detail


@pytest.mark.parametrize("check", MLA_CHECKS)
@pytest.mark.parametrize("name, dtype", [
    ("torch_native", torch.float32), ("torch_native", torch.bfloat16), ("triton", torch.float32), ("triton", torch.bfloat16),
    ("triton", torch.float16), pytest.param("flashinfer_mla", torch.bfloat16, marks=pytest.mark.slow),
    ("flashmla", torch.bfloat16)], ids=str)
def test_mla_conformance(name: str, dtype: torch.dtype, check: str) -> None:
    backend = get_backend(name)
    why = backend.available(torch.device("cuda"))
    if why:
        pytest.skip(f"{name}: {why}")
    (result,) = (r for r in check_backend(backend, "cuda", dtype, only=check) if r.check == check)
    assert result.status == "ok" or result.status == "skip" and check == "MLA: CUDA graph of a mixed batch", result.detail


@pytest.mark.parametrize("check", [name for name, _ in op_checks(torch.device("cpu"))])
def test_ops_without_a_cache(check: str) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        (result,) = (r for r in run_checks(op_checks(torch.device("cuda"), dtype), check) if r.check == check)
        assert result.status in ("ok", "skip"), result.detail
