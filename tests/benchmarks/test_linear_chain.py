"""The experiment with the linear layers of one token in one launch computes what the four ops compute."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
from benchmarks import linear_chain
from benchmarks.linear_chain import APART, PHASES, Chain, by_chain, by_ops, off
from quire.attn_ops.ops.small_linear import small_linear_eager

SIZES = {"even": {"qkv": (512, 256), "o": (256, 256), "gate_up": (1024, 256), "down": (256, 512)},
         "odd": {"qkv": (200, 96), "o": (96, 160), "gate_up": (2 * 136, 96), "down": (96, 136)}}


# In the interpreter programs run one after the other, so that none can wait for another: a launch for each phase.
@pytest.mark.skipif(torch.cuda.is_available(), reason="for Triton's interpreter")
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("programs, tile", [(1, 1024), (3, 256), (8, 128)])
def test_each_phase(sizes: str, programs: int, tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(linear_chain.MODELS, "tiny", SIZES[sizes])
    c = Chain.random("tiny", torch.float16, torch.device("cpu"))
    x, res = (torch.randn(1, n, dtype=torch.float16) for n in reversed(c.o.shape))
    counter = torch.zeros(PHASES - 1, dtype=torch.int64)
    got = by_chain(x, res, c, counter, programs, tile, 4, False, APART)
    want = by_ops(small_linear_eager, x.double(), res.double(), Chain(*(w.double() for w in c)))
    assert off(got, want) < 2e-3  # four roundings to float16, each at most 2^-11 of a number
