"""Linear layers with adapters in one op: the formula, with all that folds into the layer."""

from __future__ import annotations

import contextlib
import functools

import pytest
import torch

from quire.attn_ops.kernels import host
from quire.attn_ops.kernels.host import AdapterTiles
from quire.attn_ops.ops import small_linear
from quire.attn_ops.ops.lora_counters import lora_counters
from quire.attn_ops.ops.lora_linear import large_tiles, lora_linear, lora_linear_cuda, lora_linear_eager
from quire.attn_ops.ops.lora_rows import MAX_KERNEL_ADAPTERS, RowsTiles, first_stages, lora_group_cuda, rows_tiles
from quire.attn_ops.ops.small_linear import MAX_TOKENS
from quire.attn_ops.step import running
from quire.attn_ops.tuning.launch_config import Config
from tests.attn_ops.ops.test_lora_rows import step

K, SIZES, SETS = 80, (48, 16, 32), (0, 1, 5, 2**62)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALVES = [torch.float16, *([torch.bfloat16] if DEVICE == "cuda" else [])]  # the interpreter's dot is wrong for bfloat16


class Case:
    """A layer of three parts: the first has two adapters, the second none, the third two, one of them of every token. One more
    is of nobody."""

    def __init__(self, tokens: int, own: torch.dtype, dtype: torch.dtype = torch.float16, every: bool = False,
                 width: int = K, ranks: tuple[int, ...] = (4, 16, 1, 40), sizes: tuple[int, ...] = SIZES) -> None:
        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int, of: torch.dtype = dtype, fan: int = 1) -> torch.Tensor:
            return (torch.randn(*shape, generator=generator) / fan**0.5).to(DEVICE, of)

        places = (0, 2, 0, 2)
        n = sum(sizes)
        self.x, self.weight, self.bias = normal(1, tokens, width), normal(n, width, fan=width), normal(n)
        self.norm, self.residual = 1 + normal(width) / 4, normal(1, tokens, n)
        self.a = [normal(r, width, of=own, fan=width) for r in ranks]
        self.b = [normal(sizes[i], r, of=own, fan=r) for i, r in zip(places, ranks, strict=True)]
        self.starts = [sum(sizes[:i]) for i in places]
        self.scaling, self.bits = [0.5, 2.0, -1.0, 1.0], [0] * 4 if every else [1, 0, 4, 2**62]
        if not every:  # one that nobody has must not be read into a result
            self.a.append(torch.full_like(self.a[0], float("nan")))
            self.b.append(torch.full_like(self.b[0], float("nan")))
            self.starts, self.scaling, self.bits = [*self.starts, 0], [*self.scaling, 1.0], [*self.bits, 2]
        rows = torch.tensor(SETS)[torch.randint(4, (tokens,), generator=generator)]
        self.step = contextlib.nullcontext() if every else running(step(torch.cat([rows, torch.tensor([-1])]).to(DEVICE)))
        self.rows = rows

    def run(self, op, swiglu: bool = False, dtype: torch.dtype | None = None, fold: bool = True,
            counters: torch.Tensor | None = None) -> torch.Tensor:
        def of(x: torch.Tensor) -> torch.Tensor:
            return x if dtype is None else x.to(dtype)

        half = self.residual[..., : self.residual.shape[-1] // 2].contiguous() if swiglu else self.residual
        return op(of(self.x), of(self.weight), of(self.bias) if fold else None, of(self.norm) if fold else None, 1e-5,
                  of(half) if fold else None, swiglu, [of(y) for y in self.a], [of(y) for y in self.b], self.starts,
                  self.scaling, self.bits, counters)


def test_the_formula() -> None:
    """Token by token and adapter by adapter."""
    case = Case(5, torch.float32, torch.float32)
    with case.step:
        got = case.run(lora_linear_eager, dtype=torch.float64, fold=False)
    for t, mine in enumerate(case.rows.tolist()):
        want = case.weight.double() @ case.x[0, t].double()
        for a, b, start, s, bit in zip(case.a, case.b, case.starts, case.scaling, case.bits, strict=True):
            if not bit or mine & bit:
                want[start : start + len(b)] += b.double() @ (a.double() @ case.x[0, t].double()) * s
        torch.testing.assert_close(got[0, t], want)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize(("tokens", "swiglu", "fold", "every", "width", "own"), [
    (1, True, True, False, K, torch.float32),
    *(pytest.param(*variant, marks=pytest.mark.slow) for variant in (
        (1, False, True, False, K, None), (1, False, False, True, 1100, None))),
    (3, True, True, False, K, None), (17, False, True, False, 4100, torch.float32), (MAX_TOKENS, True, False, True, K, None),
    (MAX_TOKENS, True, False, True, K, torch.float32), (MAX_TOKENS + 1, False, True, False, K, None)], ids=str)
def test_kernels(tokens, swiglu, fold, every, width, dtype, own) -> None:
    """Against the definition in float64: with norm, bias, SwiGLU and residual, for parts whose rows end inside a tile, and more
    columns than a program takes at once. An adapter of NaN that no token has leaves no trace, nor do rows past the tokens."""
    pytest.importorskip("triton")
    case = Case(tokens, own or dtype, dtype, every=every, width=width)
    with case.step:
        got = case.run(lora_linear_cuda, swiglu, fold=fold)
        want = case.run(lora_linear_eager, swiglu, torch.float64, fold)
    # Roundings of x times the norm, of A x and of the result, of values below 32: SwiGLU multiplies two sums.
    atol = (4 if swiglu else 3) * 32 * (2**-11 if dtype == torch.float16 else 2**-8) / 4
    torch.testing.assert_close(got.double(), want, atol=atol, rtol=2**-9 if dtype == torch.float16 else 2**-6)
    assert got.dtype == dtype and not got.isnan().any()


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize(("tokens", "swiglu", "every", "own", "tiles"), [
    (70, True, False, torch.float32, RowsTiles(32, 64, 4, 32, 4, 2)),
    (70, True, False, torch.float32, RowsTiles(64, 64, 4, 32, 4, 2, reduce=True)),
    (70, False, False, None, RowsTiles(64, 32, 4, 64, 2, 2, True, reduce=True)),
    (70, False, True, None, RowsTiles(64, 32, 4, 64, 2, 2, True)), (40, True, False, None, Config(64, 64, 4, 2)),
    (130, True, False, torch.float32, RowsTiles(64, 64, 4, 64, 1, 2, True)),
    (70, True, False, torch.float32, Config(64, 64, 4, 2)),
    (70, False, False, torch.float32, Config(64, 64, 4, 2, 3))], ids=str)
def test_large_batches(tokens, swiglu, every, own, tiles, dtype) -> None:
    """As ``test_kernels``: the adapters' part behind another library's product, in a launch or in two; the layer in one launch
    of larger tiles, whose sums take most registers, and with its columns in parts."""
    pytest.importorskip("triton")
    case = Case(tokens, own or dtype, dtype, every=every, width=300, ranks=(4, 16, 1, 16))
    with case.step:
        got = case.run(functools.partial(lora_linear_cuda, tiles=tiles), swiglu)
        want = case.run(lora_linear_eager, swiglu, torch.float64)
    atol = (4 if swiglu else 3) * 32 * (2**-11 if dtype == torch.float16 else 2**-8) / 4  # as above
    torch.testing.assert_close(got.double(), want, atol=atol, rtol=2**-9 if dtype == torch.float16 else 2**-6)
    assert got.dtype == dtype and not got.isnan().any()


@pytest.mark.parametrize("reduce", [False, True], ids=["parts", "sums"])
@pytest.mark.parametrize("ranks", [(4, 16, 1, 40), (4, 16, 1, 16)], ids=["large", "of two dtypes"])
def test_first_products_apart_that_do_not_fit_side_by_side(ranks, reduce) -> None:
    """Of long prompts, adapters of more ranks than a program takes, and of several dtypes."""
    pytest.importorskip("triton")
    case = Case(70, torch.float32, width=300, ranks=ranks)
    if max(ranks) < 40:
        case.a, case.b = ([t.half() if i % 2 else t for i, t in enumerate(of)] for of in (case.a, case.b))
    with case.step:
        got = case.run(functools.partial(lora_linear_cuda, tiles=RowsTiles(32, 32, 4, 64, 2, 3, True, reduce)))
        want = case.run(lora_linear_eager, dtype=torch.float64)
    torch.testing.assert_close(got.double(), want, atol=3 * 32 * 2**-11 / 4, rtol=2**-9)


def test_many_adapters_have_few_parts() -> None:
    """Each program of second products reads all parts of its adapters."""
    a = [torch.empty(16, 4096)] * 16
    parts = {(t, count): rows_tiles(t, 4096, count, a[:count]).parts for t in (64, 512, 4096) for count in (1, 16)}
    assert all(parts[t, 16] <= parts[t, 1] for t, _ in parts) and parts[512, 16] == 1 < parts[64, 1]


def test_launches_follow_from_shapes() -> None:
    """For more than 64 tokens cuBLAS does better, unless SwiGLU would follow it. Of few outputs there are not enough tiles for
    a GPU: their columns are shared, if they are many."""
    a, b = [torch.empty(16, 4096)], [torch.empty(64, 16)]
    found = {(t, n, swiglu): large_tiles(t, 4096, n, swiglu, a, b, [0])
             for t in (33, 64, 65, 128, 129) for n in (1024, 4096, 14336) for swiglu in (False, True)}
    assert all(isinstance(tiles, Config) == (t <= 64 or t <= 128 and n == 14336 and swiglu)
               for (t, n, swiglu), tiles in found.items())
    assert isinstance(large_tiles(64, 4096, 14336, True, a * 8, b * 8, [0] * 8), RowsTiles)  # of many adapters too
    assert found[64, 4096, False].splits > 1 == found[64, 14336, False].splits == found[64, 4096, True].splits
    assert large_tiles(64, 1024, 4096, False, a, b, [0]).splits == 1


@pytest.mark.parametrize(("memory", "whole"), [(233472, 5), (167936, 5), (102400, 3), (65536, 1)])
def test_launches_fit_smaller_gpus(memory, whole, monkeypatch) -> None:
    """Shared memory of an H100, an A100, an L4 and a T4: a launch that asks for more fails. Which layers have one launch, of 64
    tokens and of 128, with SwiGLU and without."""
    monkeypatch.setattr(host, "shared_memory", lambda device: memory)
    a, b = [torch.empty(16, 4096)], [torch.empty(64, 16)]
    found = [(t, swiglu, tiles) for t in (64, 128) for swiglu in (False, True) for n in (4096, 14336)
             if isinstance(tiles := large_tiles(t, 4096, n, swiglu, a, b, [0]), Config)]
    assert len(found) == whole
    for t, swiglu, tiles in found:
        assert small_linear.memory_of(tiles, t, swiglu) < memory - 1024
    for tiles in (RowsTiles(64, 64, 4, 128, 2, 3, True), RowsTiles(64, 64, 4, 32, 8, 4)):
        shrunk = torch.empty(2, tiles.parts, 128, 64)
        stages = first_stages(tiles, host.Adapters(None, a * 2, None, shrunk, *[None] * 7), 2)
        stage = 64 * (2 * tiles.first_t + 4 * 128) if tiles.apart else 128 * (64 + 128)
        assert 1 <= stages <= tiles.stages and (stages == 1 or stages * stage < memory - 1024)


def test_each_launch_has_a_counter(monkeypatch) -> None:
    """Else programs would read first products that are not there yet. What is no launch's stays zero; after as many launches as
    there are counters, and for a tensor that ``lora_counters`` did not make, others are made."""
    pytest.importorskip("triton")
    monkeypatch.setattr("quire.attn_ops.ops.lora_counters.COUNTERS", 16)
    cases = [Case(6, torch.float32, every=True, width=width, ranks=ranks) for width, ranks in (
        (K, (4, 16, 1, 33)), (2048, (16, 4, 4, 4)))]
    alone, programs = [], []
    for case in cases:
        counters = lora_counters(case.x)
        alone.append(case.run(lora_linear_cuda, counters=counters))
        programs.append(int(counters[0]))
        assert programs[-1] > 0 and not counters[1:].any()
    counters, copy = lora_counters(cases[0].x), torch.zeros(16, dtype=torch.int32, device=DEVICE)
    for _ in range(50 if DEVICE == "cuda" else 3):
        for case, want in zip(cases, alone, strict=True):
            assert torch.equal(case.run(lora_linear_cuda, counters=counters), want)
    assert torch.equal(case.run(lora_linear_cuda, counters=copy), want)
    assert counters.view(4, -1)[:, 0].tolist() == programs * 2 and not counters.view(4, -1)[:, 1:].any()
    assert not copy.any()


def test_adapters_of_several_dtypes() -> None:
    """The kernel's tuples of adapters hold pointers to several dtypes."""
    pytest.importorskip("triton")
    case = Case(6, torch.float32)
    case.a, case.b = ([t.half() if i % 2 else t for i, t in enumerate(of)] for of in (case.a, case.b))
    with case.step:
        got, want = case.run(lora_linear_cuda), case.run(lora_linear_eager, dtype=torch.float64)
    torch.testing.assert_close(got.double(), want, atol=3 * 8 * 2**-11, rtol=2**-9)


@pytest.mark.parametrize(("tokens", "swiglu", "own", "config", "one_layer"), [
    (6, False, torch.float32, Config(32, 64, 4, 2, rows=12), True), (6, True, torch.float32, Config(16, 64, 2, 3), True),
    (17, True, torch.float16, Config(128, 128, 8, 3), False)], ids=str)
def test_tiles_as_on_a_gpu(tokens, swiglu, own, config, one_layer, monkeypatch) -> None:
    """Tiles with the columns of one layer look at its adapters alone."""
    pytest.importorskip("triton")
    monkeypatch.setattr("quire.attn_ops.ops.lora_linear.config_for", lambda *_: config)
    seen = list[AdapterTiles]()
    made = small_linear.adapter_tiles
    monkeypatch.setattr(small_linear, "adapter_tiles", lambda *args: seen.append(made(*args)) or seen[-1])
    case = Case(tokens, own, sizes=(64, 32, 32))
    with case.step:
        got, want = case.run(lora_linear_cuda, swiglu), case.run(lora_linear_eager, swiglu, torch.float64)
    assert (seen[0].per < seen[0].adapters) == one_layer
    torch.testing.assert_close(got.double(), want, atol=4 * 8 * 2**-11, rtol=2**-9)


@pytest.mark.parametrize("tokens", [1, 6, 40])
def test_an_adapter_that_overflows_is_its_own_tokens_alone(tokens) -> None:
    """One request's broken adapter must not reach another request of the batch."""
    pytest.importorskip("triton")
    case = Case(tokens, torch.float32)
    case.a, case.b, case.starts, case.scaling, case.bits = (
        each[:1] for each in (case.a, case.b, case.starts, case.scaling, case.bits))
    case.b[0].fill_(float("inf"))
    with case.step:
        got = case.run(lora_linear_cuda)
    bad = got[0].isfinite().logical_not().any(-1).cpu()
    assert torch.equal(bad, (case.rows & 1) == 1)


@pytest.mark.parametrize("tokens", [1, 6, 40])
@pytest.mark.parametrize("sizes", [(48, 16), (64, 64)], ids=["in one tile", "in two"])
def test_an_adapter_that_overflows_stays_in_its_layer(sizes, tokens) -> None:
    """k's adapter must not reach q, whose columns may be in the same tile."""
    pytest.importorskip("triton")
    x, weight = torch.ones(1, tokens, 64, device=DEVICE).half(), torch.zeros(sum(sizes), 64, device=DEVICE).half()
    a, b = torch.full((4, 64), float("inf"), device=DEVICE), torch.ones(sizes[1], 4, device=DEVICE)
    got = lora_linear_cuda(x, weight, None, None, 0.0, None, False, [a], [b], [sizes[0]], [1.0], [0])
    bases = [base.contiguous() for base in torch.zeros_like(got).split(sizes, -1)]
    group = lora_group_cuda(bases, x, [a], [b], [1], [1.0], [0])
    for out in (got, group):
        assert out[..., : sizes[0]].eq(0).all() and out[..., sizes[0] :].isinf().all()


@pytest.mark.parametrize("tokens", [pytest.param(1, marks=pytest.mark.slow), 6])
def test_large_activations_in_float16(tokens) -> None:
    """``x * norm`` is above float16's largest number before the norm's factor, 69.5 after it."""
    pytest.importorskip("triton")
    case = Case(tokens, torch.float32)
    case.x[..., 0], case.norm[0] = 20000, 7.8
    with case.step:
        got, want = case.run(lora_linear_cuda), case.run(lora_linear_eager, dtype=torch.float64)
    torch.testing.assert_close(got.double(), want, atol=0.3, rtol=2**-8)


@pytest.mark.parametrize("tokens", [1, 6])
def test_adapters_of_rows_that_overlap(tokens) -> None:
    """One of all rows and one of the last: each is added once."""
    pytest.importorskip("triton")
    x, weight = torch.ones(1, tokens, 64, device=DEVICE).half() / 64, torch.zeros(128, 64, device=DEVICE).half()
    a, b = [torch.ones(4, 64, device=DEVICE)] * 2, [torch.ones(128, 4, device=DEVICE), torch.ones(64, 4, device=DEVICE)]
    got = lora_linear_cuda(x, weight, None, None, 0.0, None, False, a, b, [0, 64], [1.0, 2.0], [0, 0])
    assert got[..., :64].eq(4).all() and got[..., 64:].eq(12).all()


def test_the_step_says_it_token_by_token() -> None:
    """The kernels read ``Step.adapters`` by its address."""
    case = Case(4, torch.float32)
    for rows in (torch.ones(3), torch.ones(4, dtype=torch.int32), torch.ones(4, 2, dtype=torch.int64, device=DEVICE)[:, 0]):
        with running(step(rows.to(DEVICE))), pytest.raises(RuntimeError, match="one contiguous int64 number for each"):
            case.run(lora_linear_cuda)


@pytest.mark.parametrize("tokens", [pytest.param(1, marks=pytest.mark.slow), 6])
def test_a_scaling_that_first_products_in_float16_could_not_take(tokens) -> None:
    """``(A x) * scaling`` is above float16's largest number, ``B (A x) * scaling`` is not."""
    pytest.importorskip("triton")
    case = Case(tokens, torch.float16)
    case.b, case.scaling = [b / 2**14 for b in case.b], [s * 2.0**15 for s in case.scaling]
    with case.step:
        got, want = case.run(lora_linear_cuda), case.run(lora_linear_eager, dtype=torch.float64)
    # b / 2**14 is a denormal in float16, with 2**-24 for its last bit: as large as 2**-9 of it, in sums of some 40 numbers.
    torch.testing.assert_close(got.double(), want, atol=0.5, rtol=2**-6)


def test_outside_the_kernels_range() -> None:
    """More adapters than the kernels take, and no step."""
    case = Case(2, torch.float32, every=True)
    many = MAX_KERNEL_ADAPTERS // 4 + 1
    case.a, case.b = case.a * many, case.b * many
    case.starts, case.scaling, case.bits = case.starts * many, case.scaling * many, case.bits * many
    torch.testing.assert_close(case.run(lora_linear_cuda).double(), case.run(lora_linear_eager, dtype=torch.float64), atol=0.2,
                               rtol=0.01)
    case.bits[0] = 1
    with pytest.raises(RuntimeError, match="does not say which adapters"):
        case.run(lora_linear_cuda)


@pytest.mark.parametrize("swiglu", [False, True])
def test_is_an_op(swiglu) -> None:
    case = Case(3, torch.float32, torch.float32)
    with case.step:
        args = case.run(lambda *args: args, swiglu, counters=lora_counters(case.x))
        torch.library.opcheck(lora_linear, args, test_utils=("test_schema", "test_faketensor"))
    torch.library.opcheck(lora_counters, (case.x,), test_utils=("test_schema", "test_faketensor"))
