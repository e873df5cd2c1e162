"""Drawing tokens: the kernel against its definition, in Triton's interpreter where there is no GPU, and greedy rows.

Drawn tokens are compared exactly: logarithms and roundings may differ in the last bits of a score (4e-6 at 36, the largest
noise there is), and two best scores are as near as that in one row of 1e5. Seeds are fixed.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from quire.attn_ops.ops import sampling as draw
from quire.attn_ops.ops.sampling import BLOCK, PROGRAMS, divide, sample_tokens, sample_tokens_cuda, sample_tokens_eager

triton = pytest.importorskip("triton")
tl = triton.language

from quire.attn_ops.kernels import sampling as kernels  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TEMPERATURES = (0.0, 0.7, 1.0, 1e-6, 1.8)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
Rows = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def case(rows: int, vocabulary: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows * vocabulary)
    return (torch.randn(rows, vocabulary, generator=generator) * 3).to(dtype)


def how(rows: int, temperatures: tuple[float, ...] = TEMPERATURES) -> Rows:
    """Temperature, seed and position of each row; temperatures in turn, seeds that take all 64 bits."""
    index = torch.arange(rows)
    return torch.tensor(temperatures)[index % len(temperatures)], index * (2**62 + 7) - 5, index * 2**33 + 3


def on_device(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [tensor.to(DEVICE) for tensor in tensors]


def check(logits: torch.Tensor, rows: Rows) -> list[int]:
    """The tokens of the kernel, which are those of the definition."""
    tokens = sample_tokens_cuda(*on_device(logits, *rows))
    assert tokens.dtype == torch.int64 and tokens.shape == logits.shape[:1]
    assert tokens.tolist() == sample_tokens_eager(logits, *rows).tolist()
    return tokens.tolist()


# ---- the kernel against the definition


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows, vocabulary", [
    (0, 5), (1, 1), (3, 1), (1, 7), (3, BLOCK - 1), (3, BLOCK), (3, BLOCK + 1), (1, 4 * BLOCK), (3, 5 * BLOCK + 333),
])
def test_kernel(rows: int, vocabulary: int, dtype: torch.dtype) -> None:
    check(case(rows, vocabulary, dtype), how(rows))
    check(case(rows, vocabulary, dtype), how(rows, TEMPERATURES[1:]))


@pytest.mark.parametrize("programs", [1, 5, 8, 13])
def test_parts_of_several_blocks(programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However rows are divided: in whole, in a last part that is not full, in parts of one block. 13 blocks."""
    monkeypatch.setattr(draw, "PROGRAMS", programs)
    logits = case(2, 12 * BLOCK + 1, torch.float16)
    logits[0, [3 * BLOCK, 7 * BLOCK + 1, 12 * BLOCK]] = 50.0
    logits[1, 12 * BLOCK] = 50.0
    assert check(logits, how(2, (0.0,))) == [3 * BLOCK, 12 * BLOCK]
    check(case(2, 12 * BLOCK + 1), how(2, TEMPERATURES[1:]))


def test_more_parts_than_one_program_looks_at_in_a_turn() -> None:
    logits = case(1, 130 * BLOCK + 5, torch.float16)
    assert divide(*logits.shape)[0] == 131  # and 128 in a turn
    logits[0, [129 * BLOCK, 130 * BLOCK + 4]] = 50.0
    assert check(logits, how(1)) == [129 * BLOCK]


def test_rows_are_divided_so_that_programs_are_many_and_alike() -> None:
    for rows in (1, 2, 16, 17, 100, 128, 700, 1500, PROGRAMS, 10**6):
        for vocabulary in (1, BLOCK, BLOCK + 1, 50257, 128256, 262144):
            parts, size = divide(rows, vocabulary)
            assert size % BLOCK == 0 and (parts - 1) * size < vocabulary <= parts * size  # all of it, no part empty
            assert parts == 1 or (rows * parts <= PROGRAMS and size <= 2 * vocabulary / parts + BLOCK)
    assert divide(1, 128256) == (126, BLOCK) and divide(PROGRAMS // 2 + 1, 128256)[0] == 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_that_are_not_numbers(dtype: torch.dtype) -> None:
    """Each in a greedy row and in a drawn one, in the first part or the last."""
    size = 2 * BLOCK + 3
    for at in (0, BLOCK - 1, size - 1):
        logits = case(10, size, dtype)
        logits[0:2, at] = math.nan
        logits[2:4, at] = math.inf
        logits[4:6] = -math.inf
        logits[6:8] = -math.inf
        logits[6:8, at] = -3.0
        logits[8:10, at], logits[8:10, 5] = math.nan, math.inf
        assert check(logits, how(10, (0.0, 0.9))) == [-1, -1, at, -1, -1, -1, at, at, -1, -1]


@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")  # numpy's, in the interpreter
def test_temperatures_that_are_not_numbers_and_scores_that_overflow() -> None:
    logits = case(6, 40)
    logits[4:] = 3e38
    assert check(logits, how(6, (math.nan, math.inf, -1.0, 0.0, 0.5, 1e-5)))[4:] == [-1, -1]


def test_first_of_equals() -> None:
    logits = torch.full((4, 3 * BLOCK), -1.0)
    logits[0, [BLOCK + 9, 2 * BLOCK + 4]] = 2.0  # in two parts, the later in an earlier lane
    logits[1, [2 * BLOCK + 9, 2 * BLOCK + 700]] = 2.0
    logits[2, 7], logits[2, 90] = -0.0, 0.0  # equals
    logits[3, 90], logits[3, BLOCK + 7] = 0.0, -0.0
    for programs in (4, 12):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(draw, "PROGRAMS", programs)
            assert check(logits, how(4, (0.0,))) == [BLOCK + 9, 2 * BLOCK + 9, 7, 90]


def test_views() -> None:
    """Rows far apart, columns far apart, and one row that is all of them."""
    wide = case(6, 200)
    check(wide[::2, 30:131], how(3))
    check(wide.t(), how(200, (0.0,) * 199 + (1.0,)))
    check(wide[:1].expand(4, 200), how(4))
    temperature, seed, position = how(3)
    check(wide[:3], (temperature.repeat_interleave(2)[::2], seed[:1].expand(3), position.repeat_interleave(2)[::2]))


def test_rows_past_two_gigabytes() -> None:
    """Offsets are 64-bit: the third row starts at element 2**31."""
    far = torch.empty(2**31 + 100, dtype=torch.float16, device=DEVICE).as_strided((3, 100), (2**30, 1))
    far.copy_(case(3, 100, torch.float16))
    rows = on_device(*how(3))
    assert sample_tokens_cuda(far, *rows).tolist() == sample_tokens_eager(case(3, 100, torch.float16), *how(3)).tolist()


# ---- noise


@triton.jit
def noise_kernel(seed, position, bits, noise, first, N: tl.constexpr):
    index = first + tl.arange(0, N)
    made = kernels.split_mix(kernels.stream(tl.load(seed), tl.load(position)) + index.to(tl.uint64))
    tl.store(bits + tl.arange(0, N), made.to(tl.int64))
    tl.store(noise + tl.arange(0, N), kernels.gumbel(made))


@triton.jit
def from_bits_kernel(bits, noise, N: tl.constexpr):
    tl.store(noise + tl.arange(0, N), kernels.gumbel(tl.load(bits + tl.arange(0, N)).to(tl.uint64)))


@triton.jit
def log1p_minus_kernel(u, out, N: tl.constexpr):
    tl.store(out + tl.arange(0, N), kernels.log1p_minus(tl.load(u + tl.arange(0, N))))


def kernel_noise(seed: int, position: int, first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    bits, noise = torch.empty(count, dtype=torch.int64, device=DEVICE), torch.empty(count, device=DEVICE)
    noise_kernel[(1,)](*on_device(torch.tensor([seed]), torch.tensor([position])), bits, noise, first, count)
    return bits.cpu(), noise.cpu()


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, -(2**63), 0x61C8864680B583EB])
@pytest.mark.parametrize("position, first", [(0, 0), (7, 128256 - 2048), (2**40, 2**31 - 4096)])
def test_the_bits_of_the_definition(seed: int, position: int, first: int) -> None:
    bits, noise = kernel_noise(seed, position, first, 2048)
    arguments = torch.tensor(seed), torch.tensor(position), torch.arange(first, first + 2048)
    assert torch.equal(bits, draw.random_bits(*arguments))
    # Two logarithms of a few units in the last place each: the first is an error of the second's argument, so absolute.
    torch.testing.assert_close(noise, draw.gumbel_noise(*arguments), rtol=4e-7, atol=1e-6)


def test_noise_of_the_extreme_bits() -> None:
    bits = torch.tensor([0, -1, 1 << 11, 3 << 11, -(1 << 63), (1 << 63) - 1, 1 << 39, -1 << 38])
    noise = torch.empty(8, device=DEVICE)
    from_bits_kernel[(1,)](bits.to(DEVICE), noise, 8)
    torch.testing.assert_close(noise.cpu(), draw._gumbel(bits), rtol=4e-7, atol=1e-6)
    assert noise[0] == noise.max() and noise[1] == noise.min()


def test_log1p_is_accurate_however_small_its_argument() -> None:
    """Logarithm 1 unit in the last place (2**-23), w's rounding 2**-25, quotient 2 units (on a GPU), product half a unit:
    7.5 * 2**-24, so 2**-21 of the result."""
    powers = 2.0 ** torch.linspace(-53, 0, 4096 - 8, dtype=torch.float64)
    edges = torch.tensor([2.0**-53, 2.0**-25, 2.0**-24, 3 * 2.0**-26, 0.5, 0.5 + 2.0**-24, 0.75, 1 - 2.0**-24])
    u = torch.cat([powers.float().clamp(max=1 - 2.0**-24), edges])
    out = torch.empty(4096, device=DEVICE)
    log1p_minus_kernel[(1,)](u.to(DEVICE), out, 4096)
    torch.testing.assert_close(out.cpu().double(), torch.log1p(-u.double()), rtol=2.0**-21, atol=0)


@pytest.mark.skipif(DEVICE == "cuda", reason="counts in the interpreter")
def test_greedy_rows_cost_no_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise is made once for each block of a drawn row, and for no other."""
    made, gumbel = [], kernels.gumbel
    monkeypatch.setattr(kernels, "gumbel", lambda bits: made.append(1) or gumbel(bits))
    logits = case(4, 2 * BLOCK + 1)
    for temperatures, drawn in [((0.0,), 0), ((0.0, 1e-6, 0.0, 1.0), 1), ((0.5, 0.0), 2), ((1.0,), 4)]:
        made.clear()
        sample_tokens_cuda(logits, *how(4, temperatures))
        assert len(made) == 3 * drawn


# ---- the op, and the definition


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
def test_opcheck(dtype: torch.dtype) -> None:
    for rows in (3, 1):
        torch.library.opcheck(torch.ops.quire.sample_tokens, on_device(case(rows, 70, dtype), *how(rows)))


def test_the_op_where_there_is_nothing_to_draw_from() -> None:
    assert torch.ops.quire.sample_tokens(*on_device(case(0, 5), *how(0))).shape == (0,)
    assert torch.ops.quire.sample_tokens(*on_device(case(2, 0), *how(2))).tolist() == [-1, -1]


def test_what_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA the op; on a CPU, and for float64, the plain functions, which Inductor fuses."""
    with FakeTensorMode():
        for dtype in DTYPES:
            assert draw.uses_kernel(torch.empty(3, 70, dtype=dtype, device="cuda"))
            assert not draw.uses_kernel(torch.empty(3, 70, dtype=dtype))
        assert not draw.uses_kernel(torch.empty(3, 70, dtype=torch.float64, device="cuda"))

    def ops() -> list[str]:
        graph = make_fx(sample_tokens)(case(3, 70), *how(3)).graph
        return [str(node.target) for node in graph.nodes if node.op == "call_function"]

    assert len(ops()) > 20 and not any("quire" in op for op in ops())
    monkeypatch.setattr(draw, "uses_kernel", lambda logits: True)
    assert ops() == ["quire.sample_tokens.default"]


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
@pytest.mark.parametrize("as_on_gpu", [False, True], ids=["", "in_64_chunks"])
def test_greedy_rows_are_argmax(dtype: torch.dtype, as_on_gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever lies beside them: the first of equals (zeros of either sign are), infinities, and -1 where there is NaN."""
    monkeypatch.setattr(draw, "on_gpu", lambda tensor: as_on_gpu)
    logits = case(40, 300, dtype)
    logits[0, [7, 200, 299]] = 100.0
    logits[1] = -1.0
    logits[1, 50], logits[1, 90], logits[1, 8] = -0.0, 0.0, -0.5
    logits[2, 10] = math.inf
    logits[3, :-1] = -math.inf
    logits[4, 77], logits[4, 5] = math.nan, 100.0
    if dtype == torch.float64:
        logits[5, 3], logits[5, 200] = 50.0, 50.0 + 1e-13  # equal as float32
    temperature, seed, position = how(40, (0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.9))
    expected = logits.argmax(-1)
    expected[4] = -1
    greedy = temperature == 0
    assert torch.equal(sample_tokens_eager(logits, temperature, seed, position)[greedy], expected[greedy])
    tokens = sample_tokens_cuda(*on_device(logits, temperature, seed, position)).cpu()
    assert torch.equal(tokens[greedy], expected[greedy])
