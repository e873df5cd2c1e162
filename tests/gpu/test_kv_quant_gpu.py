"""On a GPU: codes are converted by assembly of our own there; every code must come out as PyTorch converts it, to the bit."""

from __future__ import annotations

import pytest
import torch

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

from quire.attn_ops.kernels.kv_quant import joined, unpack, widen  # noqa: E402
from quire.attn_ops.kv_quant import QUANTIZED_KV_DTYPES  # noqa: E402

ROWS, COLUMNS = 64, 128


@triton.jit
def convert_kernel(codes, out, ROWS: tl.constexpr, COLUMNS: tl.constexpr, CODES: tl.constexpr):
    rows = tl.arange(0, ROWS)[:, None]
    at = rows * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    like = tl.load(out)
    if CODES > 0:
        words = tl.load(codes.to(tl.pointer_type(tl.int32 if CODES == 4 else tl.int16), bitcast=True)
                        + rows * (COLUMNS // CODES) + tl.arange(0, COLUMNS // CODES)[None, :])
        tl.store(out + at, joined(unpack(words, codes.dtype.element_ty), ROWS, COLUMNS))
    else:
        tl.store(out + at, widen(tl.load(codes + at), like))


@pytest.mark.parametrize(("dtype", "words"), [(torch.bfloat16, 0), (torch.float16, 0), (torch.float16, 2), (torch.float16, 4)])
@pytest.mark.parametrize("kind", sorted(QUANTIZED_KV_DTYPES, key=str), ids=str)
def test_every_code(kind: torch.dtype, dtype: torch.dtype, words: int) -> None:
    every = torch.arange(256, dtype=torch.uint8).view(kind)
    every = every[every.float().isfinite()]
    picked = torch.randint(len(every), (ROWS * COLUMNS,), generator=torch.Generator().manual_seed(0))
    picked[: len(every)] = torch.arange(len(every))
    codes = every[picked].cuda()
    out = torch.zeros(ROWS * COLUMNS, dtype=dtype, device="cuda")
    convert_kernel[(1,)](codes, out, ROWS, COLUMNS, words)
    assert torch.equal(out.view(torch.int16), codes.to(dtype).view(torch.int16))
