"""The conformance kit on a GPU, CUDA graph replay and the search for synchronisation included."""

from __future__ import annotations

import pytest
import torch

from attn_ops.backend import get_backend
from attn_ops.conformance import run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


@pytest.mark.parametrize("name, dtype, kv_dtype", [
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
], ids=str)
def test_conformance(name: str, dtype: torch.dtype, kv_dtype: torch.dtype | None) -> None:
    backend = get_backend(name)
    why = backend.available(torch.device("cuda"))
    if why:
        pytest.skip(f"{name}: {why}")
    if torch.cuda.get_device_capability() < backend.capabilities.min_kv_compute_capability.get(kv_dtype, (0, 0)):
        pytest.skip(f"{name}: {kv_dtype} needs a newer GPU")
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        results = run(backend, "cuda", dtype, kv_dtype=kv_dtype)
    finally:
        torch.set_float32_matmul_precision(before)
    failed = [f"{r.check}: {r.detail}" for r in results if r.status == "FAIL"]
    assert not failed, "\n".join(failed)
    skipped = {r.check for r in results if r.status == "skip"}
    assert not skipped - {"CUDA graph of a mixed batch", "rotary embedding (rope_op)"}
