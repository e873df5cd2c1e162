"""LoRA's adapters of experts: the definition against weights that have them added, as PEFT adds them, and the kernels against
the definition in fp32; in Triton's interpreter where there is no GPU."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quire.attn_ops.ops import experts
from quire.attn_ops.ops.expert_lora import ExpertLora
from quire.attn_ops.step import running

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = experts.Tile(16, 32, 32, 4, 2)
FORMS = ("linear", "swiglu", "clamped")
E, K, INNER = 4, 72, 40


def step(rows: list[int]) -> Any:
    return running(SimpleNamespace(adapters=torch.tensor(rows, device=DEVICE)))  # type: ignore[arg-type]


def made(*shape: int, seed: int, dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(DEVICE, dtype)


def lora_of(weight: torch.Tensor, transposed: bool, ranks: list[int], bits: list[int], dtype: torch.dtype) -> ExpertLora:
    """Adapters whose part is about as large as the product itself."""
    _, n, k = (weight.mT if transposed else weight).shape
    a = [made(E * r, k, seed=7 + i, dtype=dtype, scale=k**-0.5) for i, r in enumerate(ranks)]
    b = [made(n, r * E, seed=70 + i, dtype=dtype, scale=r**-0.5) for i, r in enumerate(ranks)]
    return ExpertLora(a, b, [0.5 + i for i in range(len(ranks))], bits)


def call(form: str, ids: torch.Tensor, ranks: list[int], bits: list[int], dtype: torch.dtype, of: torch.dtype,
         transposed: bool) -> tuple[Any, list[Any]]:
    """(an op's name, its arguments)."""
    def weight(n: int, k: int, seed: int) -> torch.Tensor:
        return made(E, *((k, n) if transposed else (n, k)), seed=seed, dtype=dtype, scale=k**-0.5)

    x = made(len(ids), K, seed=1, dtype=dtype)
    up, down = weight(2 * INNER, K, 2), weight(K, INNER, 3)
    first, second = (lora_of(w, transposed, ranks, bits, of) for w in (up, down))
    if form == "linear":
        return "expert_linear", [x, up, made(E, 2 * INNER, seed=4, dtype=dtype), ids, transposed, *first]
    both = [[*one, *other] for one, other in zip(first, second, strict=True)]
    if form == "swiglu":
        return "expert_swiglu", [x, up, down, ids, transposed, *both, len(ranks)]
    return "expert_clamped_swiglu", [x, up, None, down, made(E, K, seed=5, dtype=dtype), ids, transposed, 1.702, 1.5, *both,
                                     len(ranks)]


def floats(args: Any) -> Any:
    if isinstance(args, torch.Tensor):
        return args.float() if args.is_floating_point() else args
    return [floats(each) for each in args] if isinstance(args, (list, tuple)) else args


IDS = torch.tensor([[0, 1], [2, 1], [3, 0], [1, 2], [0, 2]], device=DEVICE)
TOKENS = [0, 1, 2, 3, 1]


@pytest.mark.parametrize("transposed", [False, True])
def test_definition_is_weights_with_the_adapters_added(transposed: bool) -> None:
    """Of each token its own, as PEFT's delta: ``"o r e, e r i -> e o i"``."""
    _, args = call("linear", IDS, [2, 3], [1, 2], torch.float64, torch.float64, transposed)
    x, weight, bias, _, _, a, b, scaling, _ = args
    with step(TOKENS):
        out = experts.expert_linear(*args).view(5, 2, -1)
    for t, bits in enumerate(TOKENS):
        whole = weight.mT if transposed else weight
        for i in range(2):
            if bits >> i & 1:
                delta = torch.einsum("ore,eri->eoi", b[i].view(len(b[i]), -1, E), a[i].view(E, -1, K))
                whole = whole + delta * scaling[i]
        for j, e in enumerate(IDS[t].tolist()):
            torch.testing.assert_close(out[t, j], whole[e] @ x[t] + bias[e], atol=1e-12, rtol=1e-12)  # eps of fp64, 72 terms


CASES: list[dict[str, Any]] = [
    dict(ranks=[4]), dict(ranks=[40, 3], bits=[1, 2]), dict(ranks=[2, 2, 2], bits=[0, 1, 4]),
    dict(ranks=[5], bits=[2], transposed=True), dict(ranks=[3], ids=[[0, 9], [-1, 2], [4, 3], [1, 1], [0, 2]]),
    dict(ranks=[3, 4], bits=[1, 8], ids=[[2, 2]] * 5), dict(ranks=[2, 3], bits=[1, 2], long=17),
]


def variants() -> Iterator[Any]:
    """Each case, form and path with each other; all are quick once in one of three, in turn, and the others slow."""
    for i, options in enumerate(CASES):
        name = "-".join(f"{k}{v}" for k, v in options.items()).replace(" ", "")
        for j, (form, path) in enumerate(itertools.product(FORMS, ("pairs", "sorted"))):
            yield pytest.param(options, form, path, id=f"{name}-{form}-{path}", marks=[pytest.mark.slow] * ((i + j) % 3 > 0))


@pytest.mark.parametrize("options, form, path", variants())
def test_kernels(options: dict[str, Any], form: str, path: str) -> None:
    """fp16 rounds gate, up, their product and the first products: four times 5e-4 of values up to 8, and sums of 40 of them.
    Adapters in float32 beside it, PEFT's default, do not round more."""
    ids = torch.tensor(options.get("ids", IDS.tolist()) * options.get("long", 1), device=DEVICE)
    for dtype, of, tolerance in ((torch.float16, torch.float16, 2e-2), (torch.float16, torch.float32, 2e-2),
                                 (torch.float32, torch.float32, 2e-5), (torch.float32, torch.float16, 2e-5)):
        name, args = call(form, ids, options["ranks"], options.get("bits", [0] * len(options["ranks"])), dtype, of,
                          options.get("transposed", False))
        with step(TOKENS * options.get("long", 1)):
            wide = getattr(experts, f"{name}_eager")(*floats(args))
            out = getattr(experts, f"{name}_cuda")(*args, path=path, tile=SMALL)
        torch.testing.assert_close(out.float(), wide, atol=tolerance, rtol=tolerance)


def test_a_token_without_adapters_gets_the_plain_product() -> None:
    """Bit for bit, also beside an adapter that overflows: 0 times inf would be NaN."""
    name, args = call("swiglu", IDS, [4], [1], torch.float16, torch.float32, False)
    args[6][0].fill_(float("inf"))
    for path in ("pairs", "sorted"):
        with step([0, 0, 1, 0, 0]):
            out = getattr(experts, f"{name}_cuda")(*args, path=path, tile=SMALL).view(5, 2, -1)
        plain = experts.expert_swiglu_cuda(*args[:5], path=path, tile=SMALL).view(5, 2, -1)
        assert torch.equal(out[[0, 1, 3, 4]], plain[[0, 1, 3, 4]]) and not out[2].isfinite().any()


def test_outside_the_kernels_range_it_is_the_definition() -> None:
    """More adapters than the kernels take, a greater rank, or A that is not contiguous."""
    for ranks, change in (([1] * 17, None), ([129], None), ([2], lambda a: a.T.contiguous().T)):
        name, args = call("linear", IDS, ranks, [0] * len(ranks), torch.float16, torch.float16, False)
        args[5] = [change(a) if change else a for a in args[5]]
        assert torch.equal(getattr(experts, f"{name}_cuda")(*args), getattr(experts, f"{name}_eager")(*args))


@pytest.mark.parametrize("which, shape", [(5, (9, K)), (5, (8, K + 1)), (6, (2 * INNER, 12)), (6, (INNER, 8))])
def test_adapters_of_other_shapes(which: int, shape: tuple[int, ...]) -> None:
    name, args = call("linear", IDS, [2], [0], torch.float16, torch.float16, False)
    args[which] = [torch.zeros(shape, dtype=torch.float16, device=DEVICE)]
    for kind in ("eager", "cuda"):
        with pytest.raises(ValueError, match="an adapter's A .* and B .* do not match weights"):
            getattr(experts, f"{name}_{kind}")(*args)


def test_flat_ids_have_no_tokens() -> None:
    name, args = call("linear", IDS, [2], [1], torch.float16, torch.float16, False)
    args[0], args[3] = args[0].repeat_interleave(2, 0), IDS.flatten()
    with pytest.raises(ValueError, match=r"need expert ids \(tokens, k\)"):
        getattr(experts, f"{name}_eager")(*args)


def test_a_step_without_adapters_is_an_error() -> None:
    name, args = call("linear", IDS, [2], [1], torch.float16, torch.float16, False)
    for kind in ("eager", "cuda"):
        with pytest.raises(RuntimeError, match="does not say which adapters its tokens have"):
            getattr(experts, f"{name}_{kind}")(*args)
