"""The experts' linear layer: its definition against a loop over pairs, and the kernels against the definition in fp32; in
Triton's interpreter where there is no GPU."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from quire.attn_ops.kernels.launch import recording
from quire.attn_ops.ops import experts
from quire.attn_ops.ops.experts import expert_linear, expert_linear_cuda, expert_linear_eager, expert_swiglu_eager

triton = pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
Case = tuple[torch.Tensor, torch.Tensor, "torch.Tensor | None", torch.Tensor, bool]
SMALL = experts.Tile(16, 32, 32, 4, 2)


def case(tokens: int, k: int = 2, count: int = 4, n: int = 32, width: int = 64, *, each: bool = False, bias: bool = False,
         transposed: bool = False, dtype: torch.dtype = torch.float16, ids: Any = None) -> Case:
    """Arguments of the op. ``each``: a row for each pair, else for each token; ``width``: K."""
    generator = torch.Generator().manual_seed(tokens + 7 * n + width)
    made: dict[str, Any] = dict(generator=generator)
    x = torch.randn(tokens * k if each else tokens, width, **made)
    weight = torch.randn(count, *((width, n) if transposed else (n, width)), **made) * width**-0.5
    added = torch.randn(count, n, **made) if bias else None
    chosen = torch.randint(count, (tokens, k), **made) if ids is None else torch.as_tensor(ids).reshape(tokens, k)
    x, weight, added = (t.to(DEVICE, dtype) if t is not None else None for t in (x, weight, added))  # type: ignore[assignment]
    return x, weight, added, chosen.to(DEVICE), transposed


def close(out: torch.Tensor, args: Case) -> None:
    """Against the definition in fp32, from the same inputs. Results are of order 1 to 6: rounding them to fp16 is 2e-3 of the
    largest; sums in fp32 in another order differ by 1e-6."""
    wide = expert_linear_eager(*(a.float() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args))
    assert out.shape == wide.shape and out.dtype == args[0].dtype
    tolerance = 2e-3 if out.dtype == torch.float16 else 5e-6
    torch.testing.assert_close(out.float(), wide, atol=tolerance, rtol=tolerance)


# ---- the definition


@pytest.mark.parametrize("transposed, bias, each", [(False, False, False), (True, True, False), (False, True, True)])
def test_definition(transposed: bool, bias: bool, each: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pair by pair; however many weights it gathers at a time."""
    args = case(5, 3, 4, n=6, width=10, each=each, bias=bias, transposed=transposed, dtype=torch.float64)
    args[3][1, 2], args[3][4, 0], args[3][0, 0] = 4, 1 << 40, -1  # out of range
    x, weight, added, ids, _ = args
    expected = torch.zeros(15, 6, dtype=torch.float64, device=DEVICE)
    for s, e in enumerate(ids.flatten().tolist()):
        if 0 <= e < 4:
            w = weight[e].T if transposed else weight[e]
            expected[s] = w @ x[s if each else s // 3] + (added[e] if added is not None else 0)
    assert not expected[[0, 5, 12]].any() and expected[1].all()
    for gathered in (1, 4 * 60, 1 << 20):
        monkeypatch.setattr(experts, "_GATHERED", gathered)
        torch.testing.assert_close(expert_linear_eager(*args), expected, atol=1e-14, rtol=1e-14)  # eps of fp64, ten terms


def test_definition_sums_in_fp32() -> None:
    """2048 + 1 is 2048 in fp16; summed in fp32 the small terms count."""
    x = torch.ones(1, 33, dtype=torch.float16)
    weight = torch.ones(1, 1, 33, dtype=torch.float16)
    weight[0, 0, 0] = 2048
    assert expert_linear_eager(x, weight, None, torch.zeros(1, 1, dtype=torch.int64), False).item() == 2080


@pytest.mark.parametrize("change, match", [
    (dict(x=torch.zeros(2, 5)), "does not match weights"), (dict(x=torch.zeros(2, 4, dtype=torch.float16)), "does not match"),
    (dict(transposed=True), "does not match weights"), (dict(bias=torch.zeros(3, 4)), "bias"),
    (dict(ids=torch.zeros(3, 1, dtype=torch.int64)), "2 rows do not match"), (dict(ids=torch.zeros(2, 1)), "do not match ids"),
    (dict(x=torch.zeros(0, 4)), "0 rows"),
], ids=lambda c: next(iter(c)) if isinstance(c, dict) else "")
def test_wrong_arguments(change: dict[str, Any], match: str) -> None:
    args = dict(x=torch.zeros(2, 4), weight=torch.zeros(3, 6, 4), bias=None, ids=torch.zeros(2, 1, dtype=torch.int64),
                transposed=False) | change
    for op in (expert_linear_eager, expert_linear_cuda):
        with pytest.raises(ValueError, match=match):
            op(*args.values())  # type: ignore[operator]


# ---- the kernels


@pytest.mark.parametrize("path", ["pairs", "sorted"])
@pytest.mark.parametrize("options", [
    dict(tokens=1, k=1), dict(tokens=1, k=4), dict(tokens=3, k=1, count=1), dict(tokens=5, each=True),
    dict(tokens=5, bias=True),
    dict(tokens=5, transposed=True), dict(tokens=3, n=40, width=72, bias=True), dict(tokens=3, n=40, width=72, transposed=True),
    dict(tokens=9, k=2, ids=[2] * 18), dict(tokens=16, k=1, ids=[3] * 16), dict(tokens=17, k=3, count=1, each=True),
    dict(tokens=3, count=40), dict(tokens=20, count=40, bias=True), dict(tokens=150, count=9, n=16, width=16),
    dict(tokens=4, ids=[0, 4, -1, 3, 1 << 40, 2, 4, 4], bias=True), dict(tokens=2, ids=[4, 5, 6, 7]),
], ids=lambda o: "-".join(f"{k}{v if isinstance(v, int) else ''}" for k, v in o.items()))
def test_kernel(options: dict[str, Any], path: str) -> None:
    for dtype in (torch.float16, torch.float32):
        args = case(**options, dtype=dtype)
        close(expert_linear_cuda(*args, path=path, tile=SMALL), args)


@pytest.mark.parametrize("path", ["pairs", "sorted"])
def test_the_tiles_that_are_launched(path: str) -> None:
    for dtype in (torch.float16, torch.float32):
        args = case(9, n=72, width=136, dtype=dtype)
        close(expert_linear_cuda(*args, path=path), args)
        args = case(9, n=72, width=128, dtype=dtype, transposed=True)
        close(expert_linear_cuda(*args, path=path), args)


@pytest.mark.parametrize("block_m", [16, 32, 64])
def test_more_pairs_than_a_tile(block_m: int) -> None:
    args = case(75, 1, 3, n=16, width=32, ids=[1] * 70 + [0, 2, 2, 0, 2])
    for path in ("pairs", "sorted"):
        close(expert_linear_cuda(*args, path=path, tile=experts.Tile(block_m, 16, 32, 4, 2)), args)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8, torch.int16])
def test_ids_of_any_integer_dtype(dtype: torch.dtype) -> None:
    x, weight, _, ids, _ = case(5)
    args = (x, weight, None, ids.to(dtype), False)
    for path in ("pairs", "sorted"):
        close(expert_linear_cuda(*args, path=path, tile=SMALL), args)


def test_views() -> None:
    """Rows far apart, ids of another layout, flat ids; weights turned in memory (a transposed one that lies as the other)."""
    x, weight, _, ids, _ = case(6, 2, 4)
    wide = torch.cat([x, x], 1)[:, 64:]
    turned = weight.mT.contiguous().mT
    others = ids.t().contiguous().t()
    for path in ("pairs", "sorted"):
        plain = expert_linear_cuda(x, weight, None, ids, False, path=path, tile=SMALL)
        for args in ((wide, weight, None, others, False), (x.t().contiguous().t(), turned, None, ids.flatten(), False),
                     (x, weight.mT, None, ids, True)):
            assert torch.equal(expert_linear_cuda(*args, path=path, tile=SMALL), plain)


def test_weights_past_two_gigabytes() -> None:
    """Offsets are 64-bit: the third expert starts at element 2**31."""
    weight = torch.empty(2**31 + 4096, dtype=torch.float16, device=DEVICE).as_strided((3, 16, 32), (2**30, 32, 1))
    x, small, _, ids, _ = case(2, 2, 3, n=16, width=32, ids=[0, 2, 2, 1])
    weight.copy_(small)
    for path in ("pairs", "sorted"):
        assert torch.equal(expert_linear_cuda(x, weight, None, ids, False, path=path, tile=SMALL),
                           expert_linear_cuda(x, small, None, ids, False, path=path, tile=SMALL))


@pytest.mark.parametrize("path", ["pairs", "sorted"])
def test_a_row_does_not_depend_on_the_others(path: str) -> None:
    """Bit for bit: alone, in a batch, in another order, beside other rows, in another tile of its expert's pairs."""
    x, weight, bias, ids, _ = case(40, 2, 4, bias=True)

    def rows(which: list[int], x: torch.Tensor = x) -> torch.Tensor:
        at = torch.tensor(which, device=DEVICE)
        out = expert_linear_cuda(x[at], weight, bias, ids[at], False, path=path, tile=SMALL)
        return out.view(len(which), 2, -1)

    together = rows(list(range(40)))
    for token in (0, 17, 39):
        assert torch.equal(rows([token])[0], together[token])
    order = torch.randperm(40, generator=torch.Generator().manual_seed(1)).tolist()
    assert torch.equal(rows(order), together[order])
    changed = x.clone()
    changed[1:] *= -3
    beside_others = rows(list(range(40)), changed)
    assert torch.equal(beside_others[0], together[0]) and not torch.equal(beside_others[1], together[1])


def test_summed_the_same_in_every_batch() -> None:
    """The order of a row's sum is that of its tile's inputs, which the size of the batch does not choose."""
    for dtype in (torch.bfloat16, torch.float32):
        for k in (2048, 2880):
            for gate in (None, experts.SWIGLU, experts.Gate("neighbours", 1.702, 7.0)):
                tiles = [experts.decode_tile(pairs, 8, k, dtype, gate) for pairs in (1, 32, 100, experts.MAX_PAIRS)]
                assert len({t.block_k for t in tiles}) == 1 and len({t.block_m for t in tiles}) == 3


def test_which_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the sizes alone."""
    asked: list[str] = []
    of = experts._Pairs.of
    monkeypatch.setattr(experts._Pairs, "of", lambda *args: asked.append(of(*args).order is None) or of(*args))
    with recording():
        for tokens in (experts.MAX_PAIRS // 8, experts.MAX_PAIRS // 8 + 1):
            expert_linear_cuda(*case(tokens, 8, 128, n=8, width=8))
    assert asked == [True, False]
    rows = [experts.prefill_tile(pairs, 8, 64, torch.float16).block_m for pairs in (50, 150, 400, 10000)]
    assert rows == [16, 32, 64, 128]


@pytest.mark.parametrize("pairs", [1, 1023, 1024, 1025, 8192, 8193, 20000])
def test_sort(pairs: int) -> None:
    """Stable; ids out of range last."""
    ids = torch.randint(-2, 40, (pairs,), generator=torch.Generator().manual_seed(pairs)).to(DEVICE)
    order, ends = experts._sort(ids, 37, False)
    known = [e if 0 <= e < 37 else 37 for e in ids.tolist()]
    assert order.tolist() == sorted(range(pairs), key=known.__getitem__)
    assert ends.tolist() == [sum(k <= e for k in known) for e in range(37)]


# ---- SwiGLU


def swiglu_case(tokens: int, k: int = 2, count: int = 4, width: int = 64, inner: int = 32, *, transposed: bool = False,
                dtype: torch.dtype = torch.float16, ids: Any = None) -> tuple[Any, ...]:
    x, up, _, chosen, _ = case(tokens, k, count, 2 * inner, width, transposed=transposed, dtype=dtype, ids=ids)
    down = case(tokens, k, count, width, inner, transposed=transposed, dtype=dtype)[1]
    return x, up, down, chosen, transposed


def test_swiglu_is_gate_and_up() -> None:
    x, up, down, ids, _ = swiglu_case(5, dtype=torch.float64, ids=[0, 4, -1, 3, 1, 1, 2, 0, 3, 2])
    out = expert_swiglu_eager(x, up, down, ids, False)
    for s, e in enumerate(ids.flatten().tolist()):
        gate, rise = (up[e] @ x[s // 2]).chunk(2) if 0 <= e < 4 else torch.zeros(2, 32, dtype=x.dtype, device=DEVICE)
        expected = down[min(e, 3)] @ (gate * gate.sigmoid() * rise)
        torch.testing.assert_close(out[s], expected, atol=1e-5, rtol=1e-5)  # SiLU is computed in fp32


@pytest.mark.parametrize("path", ["pairs", "sorted"])
@pytest.mark.parametrize("options", [
    dict(tokens=1, k=1), dict(tokens=5), dict(tokens=3, inner=40, width=72, transposed=True),
    dict(tokens=40, k=2, ids=[2] * 80), dict(tokens=4, ids=[0, 4, -1, 3, 1 << 40, 2, 4, 4]),
    *(pytest.param(variant, marks=pytest.mark.slow) for variant in (
        dict(tokens=5, transposed=True), dict(tokens=3, inner=40, width=72), dict(tokens=10, count=20))),
], ids=lambda o: "-".join(f"{k}{v if isinstance(v, int) else ''}" for k, v in o.items()))
def test_swiglu(options: dict[str, Any], path: str) -> None:
    """Against the definition in fp32 with rounded parts; fp16 rounds gate, up and their product: three times 5e-4 of values
    of order 1, and sums of 32 of them."""
    for dtype, tolerance, tiles in ((torch.float16, 4e-3, (SMALL, None)), (torch.float32, 1e-5, (SMALL,))):
        args = swiglu_case(**options, dtype=dtype)
        wide = expert_swiglu_eager(*(a.float() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args))
        for tile in tiles:
            out = experts.expert_swiglu_cuda(*args, path=path, tile=tile)
            assert out.dtype == dtype
            torch.testing.assert_close(out.float(), wide, atol=tolerance, rtol=tolerance)


def clamped_case(biases: bool = True, limit: float = 1.5, **options: Any) -> tuple[Any, ...]:
    x, up, down, chosen, transposed = swiglu_case(**options)
    generator = torch.Generator().manual_seed(3)
    both = [torch.randn(w.shape[0], w.shape[1 + transposed], generator=generator).to(x) for w in (up, down)]
    return x, up, both[0] if biases else None, down, both[1] if biases else None, chosen, transposed, 1.702, limit


def test_clamped_swiglu_is_the_gate_of_gpt_oss() -> None:
    """By transformers' own gate; some values lie beyond the limit on each side."""
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    x, up, up_bias, down, down_bias, ids, _, alpha, limit = clamped_case(tokens=5, dtype=torch.float64,
                                                                        ids=[0, 4, -1, 3, 1, 1, 2, 0, 3, 2])
    module = mock.Mock(alpha=alpha, limit=limit)
    out = experts.expert_clamped_swiglu_eager(x, up, up_bias, down, down_bias, ids, False, alpha, limit)
    beyond = set()
    for s, e in enumerate(ids.flatten().tolist()):
        if not 0 <= e < 4:
            assert not out[s].any()
            continue
        both = up[e] @ x[s // 2] + up_bias[e]
        beyond |= {(side, bool(v > limit), bool(v < -limit)) for side in (0, 1) for v in both[side::2]}
        expected = down[e] @ GptOssExperts._apply_gate(module, both) + down_bias[e]
        torch.testing.assert_close(out[s], expected, atol=1e-5, rtol=1e-5)  # the gate is computed in fp32
    assert len(beyond) == 6


@pytest.mark.parametrize("path", ["pairs", "sorted"])
@pytest.mark.parametrize("options", [
    dict(tokens=1, k=1, transposed=True), dict(tokens=5, transposed=True), dict(tokens=3, inner=40, width=72, transposed=True),
    dict(tokens=40, k=2, ids=[2] * 80), dict(tokens=4, ids=[0, 4, -1, 3, 1 << 40, 2, 4, 4], transposed=True),
    *(pytest.param(variant, marks=pytest.mark.slow) for variant in (
        dict(tokens=5, biases=False), dict(tokens=3, inner=40, width=72), dict(tokens=10, count=20, transposed=True))),
], ids=lambda o: "-".join(f"{k}{v if isinstance(v, int) else ''}" for k, v in o.items()))
def test_clamped_swiglu(options: dict[str, Any], path: str) -> None:
    """As ``test_swiglu``, with its tolerances."""
    for dtype, tolerance, tiles in ((torch.float16, 4e-3, (SMALL, None)), (torch.float32, 1e-5, (SMALL,))):
        args = clamped_case(**options, dtype=dtype)
        wide = experts.expert_clamped_swiglu_eager(
            *(a.float() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args))
        for tile in tiles:
            out = experts.expert_clamped_swiglu_cuda(*args, path=path, tile=tile)
            assert out.dtype == dtype
            torch.testing.assert_close(out.float(), wide, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("width, inner", [(64, 32), (72, 40), (1024, 48)])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("ids", [[1, 3, 0], [2, 2, 2], [0, 4, -1], [1 << 40, 3, 1]], ids=lambda ids: "-".join(map(str, ids)))
def test_one_token_alone(ids: list[int], transposed: bool, width: int, inner: int) -> None:
    """Its own kernel, with the tolerances of the others; the same expert twice, and ids of none."""
    sizes: dict[str, Any] = dict(tokens=1, k=3, width=width, inner=inner, transposed=transposed, ids=ids)
    for made, op, definition in (
            (case(1, 3, n=inner, width=width, bias=True, transposed=transposed, ids=ids), expert_linear_cuda,
             expert_linear_eager),
            (swiglu_case(**sizes), experts.expert_swiglu_cuda, expert_swiglu_eager),
            (clamped_case(**sizes), experts.expert_clamped_swiglu_cuda, experts.expert_clamped_swiglu_eager)):
        with recording() as noted:
            op(*made)
        assert {launch.name for launch in noted} == {"one_token_kernel"}
        wide = definition(*(a.float() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in made))
        torch.testing.assert_close(op(*made).float(), wide, atol=4e-3, rtol=4e-3)


def test_nan_passes_the_clamp() -> None:
    """A request whose activations overflowed must not get plausible tokens."""
    x, *rest = clamped_case(tokens=1, dtype=torch.float16)
    assert experts.expert_clamped_swiglu_cuda(x * float("nan"), *rest).isnan().all()
    x, *rest = clamped_case(tokens=3, dtype=torch.float32)
    x[1] = float("nan")
    for path in ("pairs", "sorted"):
        out = experts.expert_clamped_swiglu_cuda(x, *rest, path=path, tile=SMALL)
        assert out.isnan().all(-1).tolist() == [False, False, True, True, False, False]


def test_swiglu_of_wrong_shapes() -> None:
    x, up, down, ids, _ = swiglu_case(3)
    for wrong in ((up[:, 2:], down), (up, down[:3]), (up, down.float()), (up[:, :, 1:], down)):
        for op in (expert_swiglu_eager, experts.expert_swiglu_cuda):
            with pytest.raises(ValueError, match="does not match|do not match"):
                op(x, *wrong, ids, False)
        for clamped in (experts.expert_clamped_swiglu_eager, experts.expert_clamped_swiglu_cuda):
            with pytest.raises(ValueError, match="does not match|do not match"):
                clamped(x, wrong[0], None, wrong[1], None, ids, False, 1.702, 7.0)
    for bias in (torch.zeros(4, 3).to(x), torch.zeros(4, 64).to(x).double()):
        for clamped in (experts.expert_clamped_swiglu_eager, experts.expert_clamped_swiglu_cuda):
            for biases in ((None, bias), (bias, None)):
                with pytest.raises(ValueError, match="bias .* does not match weights"):
                    clamped(x, up, biases[0], down, biases[1], ids, False, 1.702, 7.0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_outside_its_range_it_is_the_definition(dtype: torch.dtype) -> None:
    args = case(3, dtype=dtype)
    if dtype != torch.float64:  # a weight with no side that lies together
        args = (args[0], torch.stack([args[1], args[1]], -1)[..., 0], *args[2:])
        assert 1 not in args[1].stride()
    assert torch.equal(expert_linear_cuda(*args), expert_linear_eager(*args))


def test_no_pairs() -> None:
    for op in (expert_linear_cuda, expert_linear):
        assert op(*case(0)).shape == (0, 32)
        assert op(*case(3, 2, n=0)).shape == (6, 0)


# ---- the op


def test_opcheck() -> None:
    for options in (dict(bias=True), dict(transposed=True, each=True), {}):
        torch.library.opcheck(expert_linear, case(3, dtype=torch.float32, **options))  # type: ignore[arg-type]
    torch.library.opcheck(experts.expert_swiglu, swiglu_case(3, dtype=torch.float32))
    torch.library.opcheck(experts.expert_clamped_swiglu, clamped_case(tokens=3, dtype=torch.float32, transposed=True))
    with FakeTensorMode():
        weight = torch.empty(8, 32, 64, device="cuda")
        out = expert_linear(torch.empty(5, 64, device="cuda"), weight, None, torch.empty(5, 2, dtype=torch.int64), False)
        assert out.shape == (10, 32) and out.device.type == "cuda"
        assert expert_linear(torch.empty(5, 32), weight, None, torch.empty(5, dtype=torch.int64), True).shape == (5, 64)
