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
KINDS = sorted(QUANTIZED_KV_DTYPES, key=str)
UNPACK = {(kind, codes): getattr(kv_quant, f"{NAMES[kind]}_FP16_{name}").value
          for kind in KINDS for codes, name in ((4, "WORDS"), (2, "PAIRS"))}
WIDEN = {(torch.float8_e4m3fn, BF16): kv_quant.E4M3_BF16.value, (torch.float8_e5m2, BF16): kv_quant.E5M2_BF16.value,
         **{(kind, FP16): getattr(kv_quant, f"{NAMES[kind]}_FP16").value for kind in KINDS}}


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


def of_e4m3(x: Register) -> Register:
    """The converter: two codes in the lower half of a register -> two float16."""
    low, high = ((x >> 8 * i & 255).to(torch.uint8).view(torch.float8_e4m3fn).to(FP16).view(torch.uint16).long()
                 for i in range(2))
    return low | high << 16


INSTRUCTIONS: dict[str, Callable[..., Register]] = {
    "mov.b32": lambda a: a, "and.b32": torch.bitwise_and, "xor.b32": torch.bitwise_xor, "shr.u32": torch.bitwise_right_shift,
    "prmt.b32": prmt, "lop3.b32": lop3, "sub.rn.f16x2": sub(FP16), "fma.rn.bf16x2": fma(BF16),
    "cvt.rn.f16x2.e4m3x2": of_e4m3,
}


def run(assembly: str, outputs: int, inputs: list[Register], shared: tuple[int, int] | None = None) -> list[Register]:
    """Registers $0, $1, ... that the assembly leaves. ``shared``: this output is in the same register as that input."""
    names = {f"${shared[0]}": f"${shared[1]}"} if shared else {}
    registers = {f"${outputs + i}": x.clone() for i, x in enumerate(inputs)}
    match = re.fullmatch(r"\{\s*\.reg \.b32 ([a-z, ]+);\s*\.reg \.b16 ([a-z, ]+);(.*)\}", assembly, re.DOTALL)
    assert match, assembly
    known = {*f"{match[1]}, {match[2]}".split(", "), *(f"${i}" for i in range(outputs))}
    for line in filter(None, map(str.strip, match[3].split(";"))):
        if split := re.fullmatch(r"mov\.b32 \{(\w+), (\w+)\}, (\S+)", line):
            whole = registers[names.get(split[3], split[3])]
            registers |= {split[1]: whole & 0xFFFF, split[2]: whole >> 16}
            continue
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
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_unpack_words_of_four(kind: torch.dtype, shared: tuple[int, int] | None) -> None:
    """Two words: output i has code i of each."""
    first, second = every_code(kind), every_code(kind).flip(0)
    found = run(UNPACK[kind, 4], 4, [words_of(first), words_of(second)], shared)
    for place, register in enumerate(found):
        for word, half in zip((first, second), halves(register, FP16), strict=True):
            check(half, word[:, place].contiguous(), kind, FP16)


@pytest.mark.parametrize("shared", [None, (0, 2), (1, 2)])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_unpack_words_of_two(kind: torch.dtype, shared: tuple[int, int] | None) -> None:
    """Two words in a register: output i has code i of each."""
    codes = every_code(kind)
    found = run(UNPACK[kind, 2], 2, [words_of(codes)], shared)
    for place, register in enumerate(found):
        for word, half in enumerate(halves(register, FP16)):
            check(half, codes[:, 2 * word + place].contiguous(), kind, FP16)


@pytest.mark.parametrize("shared", [None, (0, 2), (1, 2)])
@pytest.mark.parametrize(("kind", "dtype"), WIDEN, ids=str)
def test_widen(kind: torch.dtype, dtype: torch.dtype, shared: tuple[int, int] | None) -> None:
    """One word: the outputs have its codes in turn."""
    codes = every_code(kind)
    found = [half for register in run(WIDEN[kind, dtype], 2, [words_of(codes)], shared) for half in halves(register, dtype)]
    for place, half in enumerate(found):
        check(half, codes[:, place].contiguous(), kind, dtype)


@pytest.mark.parametrize(("kind", "dtype"), WIDEN, ids=str)
def test_assembles_for_older_gpus(kind: torch.dtype, dtype: torch.dtype, tmp_path: Path) -> None:
    """Compute capability 8.0 has bfloat16, and not all of its instructions; 7.5 has float16. E4M3 needs 8.9, as the backend
    says (min_kv_compute_capability)."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    if not tool.is_file():
        pytest.skip("this Triton comes without NVIDIA's tools")
    for assembly in (WIDEN[kind, dtype], *((UNPACK[kind, 4], UNPACK[kind, 2]) if dtype == FP16 else ())):
        arch = "sm_89" if kind == torch.float8_e4m3fn else "sm_75" if dtype == FP16 else "sm_80"
        body = re.sub(r"\$(\d)", r"%r\1", assembly)
        source = f".version 8.1\n.target {arch}\n.address_size 64\n.entry all() {{ .reg .b32 %r<6>; {body} ret; }}\n"
        done = subprocess.run([tool, f"--gpu-name={arch}", "-o", tmp_path / "out", "-"], input=source, capture_output=True,
                              text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
