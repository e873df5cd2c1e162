"""The assembly that converts codes (NOTE [Converting codes]), instruction by instruction, without a GPU: every code must come
out as PyTorch converts it, to the bit. And NVIDIA's assembler takes it for every GPU that can have such a cache."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton")

from quire.attn_ops.kernels import kv_quant  # noqa: E402
from quire.attn_ops.kv_quant import QUANTIZED_KV_DTYPES  # noqa: E402

Register = torch.Tensor  # int64: the 32 bits of a register, one for each thread
BF16, FP16 = torch.bfloat16, torch.float16
NAMES = {torch.int8: "INT8", torch.float8_e4m3fn: "E4M3", torch.float8_e5m2: "E5M2"}
UNPACK = {(kind, dtype): getattr(kv_quant, f"{NAMES[kind]}_{name}_WORDS").value
          for kind in sorted(QUANTIZED_KV_DTYPES, key=str) for dtype, name in ((BF16, "BF16"), (FP16, "FP16"))}
WIDEN = {(torch.float8_e4m3fn, BF16): kv_quant.E4M3_BF16.value, (torch.float8_e5m2, BF16): kv_quant.E5M2_BF16.value}


def halves(x: Register, dtype: torch.dtype) -> list[torch.Tensor]:
    """The two numbers in a register: of its lower bits, and of its higher ones."""
    return [part.to(torch.uint16).view(dtype) for part in (x & 0xFFFF, x >> 16)]


def prmt(a: Register, b: Register, selector: Register) -> Register:
    """Each byte one of the eight of a and b, or its sign eight times."""
    out = torch.zeros_like(a)
    for i in range(4):
        pick = selector >> 4 * i & 15
        byte = (a | b << 32) >> 8 * (pick & 7) & 255
        out |= torch.where(pick >= 8, (byte >> 7) * 255, byte) << 8 * i
    return out


def lop3(a: Register, b: Register, c: Register, table: Register) -> Register:
    out = torch.zeros_like(a)
    for bit in range(32):
        out |= (table >> ((a >> bit & 1) << 2 | (b >> bit & 1) << 1 | c >> bit & 1) & 1) << bit
    return out


def fma(dtype: torch.dtype) -> Callable[..., Register]:
    def run(*operands: Register) -> Register:
        low, high = (a.double() * b.double() + c.double()  # exact in 64 bits, for numbers of 16
                     for a, b, c in zip(*(halves(x, dtype) for x in operands), strict=True))
        low, high = (x.to(dtype).view(torch.uint16).long() for x in (low, high))
        return low | high << 16
    return run


def sub(dtype: torch.dtype) -> Callable[..., Register]:
    one = {BF16: 0x3F803F80, FP16: 0x3C003C00}[dtype]
    return lambda a, b: fma(dtype)(a, torch.full_like(a, one), b ^ 0x80008000)


INSTRUCTIONS: dict[str, Callable[..., Register]] = {
    "mov.b32": lambda a: a, "and.b32": torch.bitwise_and, "xor.b32": torch.bitwise_xor, "shr.u32": torch.bitwise_right_shift,
    "prmt.b32": prmt, "lop3.b32": lop3, "sub.rn.f16x2": sub(FP16), "fma.rn.f16x2": fma(FP16), "fma.rn.bf16x2": fma(BF16),
}


def run(assembly: str, outputs: int, inputs: list[Register], shared: tuple[int, int] | None = None) -> list[Register]:
    """Registers $0, $1, ... that the assembly leaves. ``shared``: this output is in the same register as that input."""
    names = {f"${shared[0]}": f"${shared[1]}"} if shared else {}
    registers = {f"${outputs + i}": x.clone() for i, x in enumerate(inputs)}
    match = re.fullmatch(r"\{\s*\.reg \.b32 ([a-z, ]+);(.*)\}", assembly, re.DOTALL)
    assert match, assembly
    known = {*match[1].split(", "), *(f"${i}" for i in range(outputs))}
    for line in filter(None, map(str.strip, match[2].split(";"))):
        name, target, *operands = re.split(r",?\s+", line)
        assert target in known, line
        registers[names.get(target, target)] = INSTRUCTIONS[name](*(
            torch.full_like(inputs[0], int(x, 0)) if x[0].isdigit() else registers[names.get(x, x)] for x in operands))
    return [registers[names.get(f"${i}", f"${i}")] for i in range(outputs)]


def every_code(kind: torch.dtype) -> torch.Tensor:
    """Four of them for each thread: each code in each place, beside many others."""
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[codes.view(kind).float().isfinite()]
    generator = torch.Generator().manual_seed(0)
    return torch.stack([codes[torch.randperm(len(codes), generator=generator)] for _ in range(4)], 1)


def words_of(codes: torch.Tensor) -> Register:
    return (codes.long() << torch.arange(0, 32, 8)).sum(1)


def check(found: torch.Tensor, codes: torch.Tensor, kind: torch.dtype, dtype: torch.dtype) -> None:
    assert torch.equal(found.view(torch.int16), codes.view(kind).to(dtype).view(torch.int16))


@pytest.mark.parametrize("shared", [None, *((out, word) for out in range(4) for word in (4, 5))])
@pytest.mark.parametrize(("kind", "dtype"), UNPACK, ids=str)
def test_unpack(kind: torch.dtype, dtype: torch.dtype, shared: tuple[int, int] | None) -> None:
    """Two words: output i has code i of each."""
    first, second = every_code(kind), every_code(kind).flip(0)
    found = run(UNPACK[kind, dtype], 4, [words_of(first), words_of(second)], shared)
    for place, register in enumerate(found):
        for word, half in zip((first, second), halves(register, dtype), strict=True):
            check(half, word[:, place].contiguous(), kind, dtype)


@pytest.mark.parametrize("shared", [None, (0, 2), (1, 2)])
@pytest.mark.parametrize(("kind", "dtype"), WIDEN, ids=str)
def test_widen(kind: torch.dtype, dtype: torch.dtype, shared: tuple[int, int] | None) -> None:
    """One word: the outputs have its codes in turn."""
    codes = every_code(kind)
    found = [half for register in run(WIDEN[kind, dtype], 2, [words_of(codes)], shared) for half in halves(register, dtype)]
    for place, half in enumerate(found):
        check(half, codes[:, place].contiguous(), kind, dtype)


@pytest.mark.parametrize(("kind", "dtype"), [*UNPACK, *WIDEN], ids=str)
def test_assembles_for_older_gpus(kind: torch.dtype, dtype: torch.dtype, tmp_path: Path) -> None:
    """Compute capability 8.0 has bfloat16, and not all of its instructions; 7.5 has float16."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    if not tool.is_file():
        pytest.skip("this Triton comes without NVIDIA's tools")
    for assembly in filter(None, (UNPACK.get((kind, dtype)), WIDEN.get((kind, dtype)))):
        arch, body = "sm_75" if dtype == FP16 else "sm_80", re.sub(r"\$(\d)", r"%r\1", assembly)
        source = f".version 7.0\n.target {arch}\n.address_size 64\n.entry all() {{ .reg .b32 %r<6>; {body} ret; }}\n"
        done = subprocess.run([tool, f"--gpu-name={arch}", "-o", tmp_path / "out", "-"], input=source, capture_output=True,
                              text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
