"""The conformance kit on a GPU, CUDA graph replay and the search for synchronisation included."""

from __future__ import annotations

import pytest
import torch

from quire.attn_ops.conformance.checks import Kit
from quire.attn_ops.conformance.report import check_backend
from quire.attn_ops.registry import get_backend
from tests.gpu.helpers import need

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


#: The checks, each a test of its own: they wait for compilers, and many can be run at a time.
CHECKS = [name for name, _ in Kit(get_backend("torch_native"), torch.device("cpu"), torch.float32).checks()]
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
]


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("name, dtype, kv_dtype", COMBINATIONS, ids=str)
def test_conformance(name: str, dtype: torch.dtype, kv_dtype: torch.dtype | None, check: str) -> None:
    backend = get_backend(need(name))
    if torch.cuda.get_device_capability() < backend.capabilities.min_kv_compute_capability.get(kv_dtype, (0, 0)):
        pytest.skip(f"{name}: {kv_dtype} needs a newer GPU")
    (result,) = (r for r in check_backend(backend, "cuda", dtype, only=check, kv_dtype=kv_dtype) if r.check == check)
    assert result.status != "FAIL", result.detail
    assert result.status == "ok" or check in ("CUDA graph of a mixed batch", "rotary embedding (rope_op)"), result.detail
