"""The sampler on CUDA, compiled and as kernel: the tokens of the plain one on a CPU, nothing read back, fit for CUDA graphs.

Compiling is most of the time: each piece for each dtype, for a batch of one and for more, and for a vocabulary that the
64 chunks divide (32000) and one that they do not (1000).
"""

import contextlib
import functools
import math
from collections.abc import Iterator

import pytest
import torch

from quire.attn_ops.ops.sampling import random_bits, sample_tokens, sample_tokens_cuda, sample_tokens_eager
from quire.graph_runner.sampler import SamplingTensors, draw, sample
from quire.graph_runner.sampling_params import SamplingParams
from tests.gpu.helpers import captured
from tests.sampling import GREEDY, MIXED, sampling_tensors
from tests.sampling import random_logits as float_logits

random_logits = functools.partial(float_logits, dtype=torch.bfloat16)


def both(params: list[SamplingParams], position: int = 0) -> tuple[SamplingTensors, SamplingTensors]:
    """The same tensors on the CPU and on the GPU."""
    cpu, gpu = (
        sampling_tensors(params, list(range(len(params))), [position] * len(params), device)
        for device in ("cpu", "cuda")
    )
    return cpu, gpu


@contextlib.contextmanager
def no_sync() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(
    ("vocabulary", "dtype"), [(1000, torch.bfloat16), (32000, torch.bfloat16), (32000, torch.float32)]
)
@pytest.mark.parametrize("params", [[GREEDY], [SamplingParams()], MIXED[6:], MIXED, MIXED * 5, [GREEDY] * 9], ids=len)
def test_same_tokens_as_on_a_cpu(params: list[SamplingParams], vocabulary: int, dtype: torch.dtype) -> None:
    logits = random_logits(len(params), vocabulary, dtype=dtype)
    for position in range(3):
        cpu, gpu = both(params, position)
        expected = sample(logits, cpu).tolist()
        assert draw(logits.cuda(), gpu).tokens.tolist() == expected
        assert sample(logits.cuda(), gpu).tolist() == expected


def test_same_bits_as_on_a_cpu() -> None:
    seed, position = torch.tensor([[0], [-1], [2**62]]), torch.tensor([[0], [5], [2**33]])
    arguments = (seed, position, torch.arange(5000))
    expected = random_bits(*arguments)
    on_gpu = [argument.cuda() for argument in arguments]
    assert torch.equal(random_bits(*on_gpu).cpu(), expected)
    assert torch.equal(torch.compile(random_bits)(*on_gpu).cpu(), expected)


@pytest.mark.parametrize("chosen", [[0, 0], [2000, 100], [127_999, 128_000, 128_001]])
def test_first_of_equals(chosen: list[int]) -> None:
    """Within a chunk, and across the chunks that a row is cut into."""
    logits = random_logits(4, 130_000)
    logits[:, chosen] = 50.0
    _, params = both([GREEDY] * 4)
    assert draw(logits.cuda(), params).tokens.tolist() == [min(chosen)] * 4
    _, params = both([GREEDY, GREEDY, GREEDY, SamplingParams()])
    assert draw(logits.cuda(), params).tokens.tolist()[:3] == [min(chosen)] * 3


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_only_the_invalid_rows_are_reported(value: float) -> None:
    good = random_logits(len(MIXED), 1000)
    cpu, gpu = both(MIXED)
    for bad in range(len(MIXED)):
        logits = good.clone()
        logits[bad, slice(None) if value == -math.inf else 700] = value
        tokens = draw(logits.cuda(), gpu).tokens.tolist()
        assert tokens == sample(logits, cpu).tolist()
        assert tokens[bad] == (700 if value == math.inf and bad == 0 else -1)


def test_nothing_waits_for_the_device() -> None:
    params = [MIXED, [GREEDY] * 7, [SamplingParams()] * 7]
    logits = torch.zeros(7, 1000, device="cuda", dtype=torch.bfloat16)
    tensors = [sampling_tensors(rows, list(range(7)), [0] * 7, "cuda", banned=banned)
               for banned in ((), [[1, 2]] * 7) for rows in params]
    for mode in (contextlib.nullcontext(), no_sync()):  # what is compiled first may wait
        with mode:
            for given in tensors:
                draw(logits, given)
                sample(logits, given)


def test_captured_in_a_cuda_graph() -> None:
    logits = random_logits(len(MIXED), 1000).cuda()
    cpu, static = both(MIXED)
    graph, tokens = captured(lambda: draw(logits, static).tokens)
    for position in (0, 1, 2):
        static.position.fill_(position)
        logits.copy_(random_logits(len(MIXED), 1000) * (position + 1) / 2)
        graph.replay()
        assert tokens.tolist() == sample(logits.cpu(), both(MIXED, position)[0]).tolist()


# ---- the op that draws rows without filters


def rows_of(count: int, temperatures: tuple[float, ...], position: int = 0) -> tuple[torch.Tensor, ...]:
    """Temperature (in turn), seed and position of each row."""
    index = torch.arange(count)
    return torch.tensor(temperatures)[index % len(temperatures)], index * (2**62 + 7), index + position


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("rows, vocabulary", [(1, 128256), (1, 50257), (7, 1000), (33, 128256), (128, 32000), (2500, 1025)])
def test_op_draws_the_tokens_of_the_definition(rows: int, vocabulary: int, dtype: torch.dtype) -> None:
    """All but one drawn row in 1000: where two scores agree to the last bits, the logarithms of two devices may differ."""
    logits = random_logits(rows, vocabulary, dtype=dtype)
    for temperatures in ((0.0,), (1.0,), (0.7, 0.0, 1.8)):
        how = rows_of(rows, temperatures, position=rows)
        expected = sample_tokens_eager(logits, *how)
        tokens = sample_tokens(logits.cuda(), *(tensor.cuda() for tensor in how)).cpu()
        wrong = tokens != expected
        assert not wrong[how[0] == 0].any() and int(wrong.sum()) <= rows // 1000


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_op_and_rows_that_are_not_numbers(dtype: torch.dtype) -> None:
    """Greedy and drawn in turn, in two lanes of one thread and far apart; a NaN stays, whatever comes after it."""
    for size in (1000, 40_000):
        logits = random_logits(10, size, dtype=dtype)
        logits[0:2, 1], logits[0:2, 600], logits[0:2, size - 1] = math.nan, math.nan, 100.0
        logits[2:4, 700] = math.inf
        logits[4:8] = -math.inf
        logits[6:8, size - 1] = -3.0
        logits[8:10, size - 2], logits[8:10, 5] = math.nan, math.inf
        how = rows_of(10, (0.0, 0.9))
        expected = [-1, -1, 700, -1, -1, -1, size - 1, size - 1, -1, -1]
        assert sample_tokens_eager(logits, *how).tolist() == expected
        assert sample_tokens(logits.cuda(), *(tensor.cuda() for tensor in how)).tolist() == expected


def test_op_in_a_cuda_graph() -> None:
    """Alone, and with kernels that are set up before the one before them ends; greedy rows become drawn ones in a replay."""
    logits = [random_logits(9, 32000), random_logits(9, 32000).flip(1)]
    for pdl in (False, True) if torch.cuda.get_device_capability() >= (9, 0) else (False,):
        static, how = logits[0].cuda(), [tensor.cuda() for tensor in rows_of(9, (0.0,))]
        graph, tokens = captured(lambda x=static, how=how, pdl=pdl: sample_tokens_cuda(x * 2, *how, pdl=pdl))
        for each, temperatures in zip(logits * 2, ((0.0,), (0.0, 1.0), (0.5,), (0.0,)), strict=True):
            new = rows_of(9, temperatures)
            for tensor, value in zip((static, *how), (each, *new), strict=True):
                tensor.copy_(value)
            graph.replay()
            assert tokens.tolist() == sample_tokens_eager(each * 2, *new).tolist()
