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
def test_kernels_compile_for_hopper() -> None:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if not tool.is_file():
        pytest.skip("this Triton comes without NVIDIA's tools")
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-m", "benchmarks.hopper"], capture_output=True, text=True, env=env, cwd=ROOT,
                          check=False)
    lines = done.stdout.splitlines()
    assert done.returncode == 0, "\n".join(line for line in lines if "FAILED" in line) + done.stderr[-3000:]
    assert len(lines) > 100
    # What large models run most must keep its numbers in registers: a spill is a slow kernel. (16 bytes are four numbers that
    # wait from before a loop until after it: the assembler does so where one more program fits a multiprocessor.)
    hot = [line for line in lines if line.startswith(("llama-8b", "qwen3", "small_linear qkv", "small_linear gate_up", "draw",
                                                          "experts", "quantised linear"))]
    spilled = [line for line in hot if int((re.search(r"SPILLED (\d+)", line) or [0, 0])[1]) > 16]
    assert len(hot) > 50 and not spilled
