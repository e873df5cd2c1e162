"""Compile Triton kernels for an H100 or H200 without a GPU: the compiler rejects what the interpreter accepts.

    python -m benchmarks.hopper                  # compile every kernel, print registers, spills and shared memory
    python -m benchmarks.hopper --loops experts  # cases with "experts" in their names; and the size of the longest loop
    python -m benchmarks.hopper --part 1/4       # every fourth case

Inside ``compiling()`` a kernel launch compiles the kernel for compute capability 9.0, down to machine code, and returns without
launching. Requires a process where TRITON_INTERPRET is not set.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch


@dataclass(frozen=True)
class Compiled:
    """A compiled kernel: registers and spilled bytes per thread, bytes of shared memory per program, instructions of the
    longest loop (0: not counted), the share of loads and stores of spilled registers in the loop that runs most, and whether
    a loop may write registers that matrix products still read (attn_ops/kernels/wgmma.py)."""

    name: str
    registers: int
    spilled: int
    shared: int
    warps: int
    loop: int = 0
    reloads: float = 0.0
    races: bool = False


def without_a_gpu() -> contextlib.AbstractContextManager[Any]:
    """Inside, Triton compiles for compute capability 9.0."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    return mock.patch.object(driver, "_active", SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32), get_current_device=lambda: 0,
        get_current_stream=lambda device: 0, get_active_torch_device=lambda: torch.device("cpu"),
        get_device_interface=lambda: torch.cuda))


@contextlib.contextmanager
def compiling(loops: bool = False) -> Iterator[list[Compiled]]:
    from triton.runtime.jit import JITFunction

    found: list[Compiled] = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        if kernel is not None:
            registers, spilled = _resources(kernel.asm["cubin"])
            code = _loops(kernel.asm["cubin"]) if loops or spilled > 16 else []
            found.append(Compiled(self.__name__, registers, spilled, kernel.metadata.shared, kernel.metadata.num_warps,
                                  max(map(len, code), default=0) if loops else 0, _reloads(code), _races(kernel.asm["ptx"])))
        return kernel

    with without_a_gpu(), mock.patch.object(JITFunction, "run", compile_only):
        yield found


def _resources(cubin: bytes) -> tuple[int, int]:
    """(registers, bytes of local memory) of a cubin's kernel."""
    text = _dump(cubin, "--dump-resource-usage")
    registers, stack = re.search(r"REG:(\d+)", text), re.search(r"STACK:(\d+)", text)
    assert registers is not None and stack is not None, text
    return int(registers[1]), int(stack[1])


def _loops(cubin: bytes) -> list[list[str]]:
    """Instructions of each loop: from the target of a backward jump to the jump."""
    found = re.finditer(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)([^;]*);", _dump(cubin, "--dump-sass"))
    code = [(int(m[1], 16), m[2], m[3]) for m in found]
    each = code[1][0] - code[0][0]
    targets = [(i, re.search(r"0x([0-9a-f]+)", rest)) for i, (_, name, rest) in enumerate(code) if name.startswith("BRA")]
    starts = [(i, int(to[1], 16) // each - code[0][0] // each) for i, to in targets if to]
    return [[name for _, name, _ in code[start : i + 1]] for i, start in starts if 0 <= start < i]


def _reloads(loops: list[list[str]]) -> float:
    """Share of local loads and stores in the loop that runs most: the shortest with matrix products (those with a mask, which
    run for a row's last blocks, are longer); without matrix products the worst."""
    shares = {id(loop): sum(name.startswith(("LDL", "STL")) for name in loop) / len(loop) for loop in loops}
    matrix = [loop for loop in loops if any("MMA" in name for name in loop)]
    return shares[id(min(matrix, key=len))] if matrix else max(shares.values(), default=0.0)


def _races(ptx: str) -> bool:
    """Whether a loop has products whose left operand is in registers (a list in braces, and not a descriptor), and nothing that
    waits for all products."""
    labels = {m[1]: m.start() for m in re.finditer(r"^(\$\w+):", ptx, re.MULTILINE)}
    jumps = [(labels.get(m[1], m.start()), m.start()) for m in re.finditer(r"bra(?:\.uni)?\s+(\$\w+);", ptx)]
    loops = [ptx[start:end] for start, end in jumps if start < end]
    return any(re.search(r"wgmma\.mma_async\S+\s+\{[^}]*\},\s*\{", loop)
               and not re.search(r"wgmma\.wait_group\.sync\.aligned 0;", loop) for loop in loops)


def _dump(cubin: bytes, what: str) -> str:
    """Output of cuobjdump, which comes with Triton."""
    import triton.backends.nvidia

    tool = Path(triton.backends.nvidia.__file__).parent / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool, what, file.name], capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    if os.environ.pop("TRITON_INTERPRET", None):
        raise SystemExit(subprocess.call([sys.executable, "-m", "benchmarks.hopper", *sys.argv[1:]]))
    from benchmarks.hopper_kernels import main

    main()
