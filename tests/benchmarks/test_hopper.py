"""Every Triton kernel compiles for an H200, here, without one: types and layouts that the interpreter forgives are caught."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.timeout(900)  # some 900 kernels, one after the other in each part, where Triton's cache has none of them
@pytest.mark.parametrize("part", ["1/4", "2/4", "3/4", "4/4"])
def test_kernels_compile_for_hopper(part: str) -> None:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if not tool.is_file():
        pytest.skip("this Triton comes without NVIDIA's tools")
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-m", "benchmarks.hopper", "--part", part], capture_output=True, text=True, env=env,
                          cwd=ROOT, check=False)
    lines = done.stdout.splitlines()
    assert done.returncode == 0, "\n".join(line for line in lines if "FAILED" in line) + done.stderr[-3000:]
    assert len(lines) > 150
    # Registers that a product still reads are written by nobody: results would be right or wrong by how long products take.
    assert not [line for line in lines if line.endswith("RACES")]
    # More shared memory than an H100 gives a program, which is seen at the launch only.
    assert not [line for line in lines if (found := re.search(r"([\d.]+) KiB shared", line)) and float(found[1]) > 227]
    # What large models run most must keep its numbers in registers while it loops: a spill there is a slow kernel. (16 bytes
    # are four numbers that wait from before a loop until after it: the assembler does so where one more program fits a
    # multiprocessor.) Prefill attention spills around its loops, and a few numbers in them: with twice the warps it does not,
    # but reads each key from shared memory twice as often. So does attention to 64 latent vectors at a time, which
    # `backend_kernels.py mla --set block_n=32,stages=5` or `--set warps=8` compares with others.
    hot = [line for line in lines if line.startswith((
        "llama-8b", "llama-1b", "qwen3", "small_linear qkv", "small_linear gate_up", "sample", "experts", "quantized linear",
        "mla", "lora", "logprobs", "topk", "sparse", "state", "merge", "contiguous"))]
    spilled = [(line, float(found[2])) for line in hot
               if (found := re.search(r"SPILLED (\d+) bytes \(([\d.]+)%", line)) and int(found[1]) > 16]
    most = {"extend_kernel": 7, "attend_kernel": 1}  # percent of the loop
    slow = [line for line, share in spilled if share > next((n for name, n in most.items() if f" {name} " in line), 0)]
    assert len(hot) > 50 and not slow, slow
