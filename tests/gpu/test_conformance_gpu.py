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


@pytest.mark.parametrize("name, dtype", [
    ("torch_native", torch.float32),
    ("torch_native", torch.bfloat16),
    ("triton", torch.float32),
    ("triton", torch.bfloat16),
    ("triton", torch.float16),
    pytest.param("flashinfer", torch.bfloat16, marks=pytest.mark.slow),  # compiles a kernel for each set of features
], ids=str)
def test_conformance(name: str, dtype: torch.dtype) -> None:
    backend = get_backend(name)
    why = backend.available(torch.device("cuda"))
    if why:
        pytest.skip(f"{name}: {why}")
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        results = run(backend, "cuda", dtype)
    finally:
        torch.set_float32_matmul_precision(before)
    failed = [f"{r.check}: {r.detail}" for r in results if r.status == "FAIL"]
    assert not failed, "\n".join(failed)
    skipped = {r.check for r in results if r.status == "skip"}
    assert not skipped - {"CUDA graph of a mixed batch"}
