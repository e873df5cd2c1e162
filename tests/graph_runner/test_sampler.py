"""The sampler: greedy, distributions, streams, filters against Hugging Face's, and rows without a distribution."""

import functools
import math
import re
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from quire.attn_ops.ops import sampling as draw
from quire.attn_ops.ops.sampling import gumbel_noise, random_bits
from quire.graph_runner import sampler
from quire.graph_runner.engine import Engine
from quire.graph_runner.sampler import sample
from quire.graph_runner.sampling_params import GenerateParams, SamplingParams
from tests.sampling import GREEDY, MIXED, random_logits, sampling_tensors
from tests.tiny import load_model, prompt_ids

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def build(params: list[SamplingParams], seeds: list[int] | int = 0, positions: list[int] | int = 0, **kwargs: object):
    seeds = [seeds] * len(params) if isinstance(seeds, int) else seeds
    positions = [positions] * len(params) if isinstance(positions, int) else positions
    return sampling_tensors(params, seeds, positions, **kwargs)


def warped(row: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """(V,) scores after Hugging Face's warpers, in the order of `GenerationMixin._get_logits_processor` or in vLLM's."""
    scores = TemperatureLogitsWarper(params.temperature)(None, row[None].float())
    if params.min_p and not params.as_generate:
        scores = MinPLogitsWarper(params.min_p)(None, scores)
    if params.top_k:
        scores = TopKLogitsWarper(params.top_k)(None, scores)
    if params.top_p < 1:
        scores = TopPLogitsWarper(params.top_p)(None, scores)
    if params.min_p and params.as_generate:
        scores = MinPLogitsWarper(params.min_p)(None, scores)
    return scores[0]


# ---- greedy


@pytest.mark.parametrize("dtype", DTYPES)
def test_greedy_is_argmax(dtype: torch.dtype) -> None:
    logits = random_logits(16, 1000, dtype=dtype)
    logits[0, [7, 500, 999]] = 100.0  # equals: the first wins, as in HF's greedy search
    logits[1, 10] = math.inf
    logits[2, :-1] = -math.inf
    expected = logits.float().argmax(-1)
    assert expected[0] == 7
    params = build([GREEDY] * 16)
    assert params.all_greedy and not params.any_filter
    assert sample(logits, params).tolist() == expected.tolist()
    # The same rows beside one that is drawn take the other path.
    mixed = build([GREEDY] * 16 + [SamplingParams(top_k=3)])
    assert sample(torch.cat([logits, logits[:1]]), mixed)[:16].tolist() == expected.tolist()


def test_filters_of_a_greedy_row_are_off() -> None:
    params = build([SamplingParams(temperature=0, top_k=5, top_p=0.5, min_p=0.5), SamplingParams(temperature=1e-6)])
    assert params.all_greedy and not params.any_filter  # 1e-6: under vLLM's bound
    assert (params.top_k.tolist(), params.top_p.tolist(), params.min_p.tolist()) == ([0, 0], [1, 1], [0, 0])


def test_a_tiny_temperature_is_greedy() -> None:
    """Also when the tensors were made by someone else, with filters left on."""
    logits = random_logits(2, 100)
    params = build([SamplingParams(temperature=0.5, top_k=3, top_p=0.5)] * 2)
    params.temperature[0] = 1e-38
    assert sample(logits, params)[0] == logits[0].argmax()
    params.top_p[0] = 0.0
    assert sample(logits, params)[0] == logits[0].argmax()


def test_the_smallest_top_p_keeps_the_likeliest() -> None:
    """Below float32's numbers it would be 0 there, of which every token has as much."""
    with Engine(load_model(num_layers=1), num_pages=20, max_num_seqs=4, max_model_len=60) as engine:
        prompt, options = prompt_ids()[0][:20], dict(max_tokens=6, ignore_eos=True)
        (greedy,) = engine.generate(prompt, SamplingParams(temperature=0, **options))
        for top_p in (1e-30, 1e-45, 1e-46, 5e-324):
            (out,) = engine.generate(prompt, SamplingParams(temperature=2.0, top_p=top_p, seed=1, **options))
            assert out.token_ids == greedy.token_ids


# ---- distributions


def assert_distributed(tokens: torch.Tensor, probabilities: torch.Tensor) -> None:
    """Pearson's chi-square test of token counts, at four standard deviations of the statistic (2 * df is its variance).

    The noise is a fixed function of fixed seeds, so a test passes always or never.
    """
    counts = torch.bincount(tokens, minlength=len(probabilities)).double()
    support = probabilities > 0
    assert not counts[~support].any()
    expected = probabilities[support].double() * len(tokens)
    degrees = int(support.sum()) - 1
    statistic = float(((counts[support] - expected) ** 2 / expected).sum())
    assert statistic < degrees + 4 * math.sqrt(2 * degrees), statistic


@pytest.mark.parametrize("stream", ["positions", "seeds"])
@pytest.mark.parametrize("params", [
    SamplingParams(), SamplingParams(temperature=0.5), SamplingParams(temperature=2.0), SamplingParams(top_k=3),
    SamplingParams(top_p=0.7), SamplingParams(min_p=0.2), SamplingParams(temperature=1.5, top_k=6, top_p=0.8, min_p=0.15),
], ids=lambda p: f"temperature={p.temperature},top_k={p.top_k},top_p={p.top_p},min_p={p.min_p}")
def test_distribution(params: SamplingParams, stream: str) -> None:
    count = 20_000
    row = torch.tensor([0.5, 2.0, -1.0, 1.5, 0.0, 1.0, -math.inf, 0.25, -0.5])
    kwargs = {"positions": list(range(count))} if stream == "positions" else {"seeds": list(range(count))}
    tokens = sample(row.expand(count, -1), build([params] * count, **kwargs))
    assert_distributed(tokens, warped(row, params).softmax(-1))


@pytest.mark.parametrize("lag", ["position", "seed", "token"])
def test_neighbours_are_independent(lag: str) -> None:
    """Consecutive positions, seeds and vocabulary entries share nothing: their pairs are uniform over 64 cells."""
    count = 20_000
    seed, position, token = (torch.full((count,), start) for start in (5, 7, 11))
    ahead = position + torch.arange(count) * 3
    first = random_bits(seed, ahead, token)
    second = random_bits(seed + (lag == "seed"), ahead + (lag == "position"), token + (lag == "token"))
    for shift in (0, 61):  # the low and the high bits
        cells = (first >> shift & 7) * 8 + (second >> shift & 7)
        assert_distributed(cells, torch.full((64,), 1 / 64))


# ---- streams


def split_mix(n: int) -> int:
    z = (n + 1) * 0x9E3779B97F4A7C15 % 2**64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
    return z ^ z >> 31


@settings(max_examples=50, deadline=None)
@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**40), st.integers(0, 2**20))
def test_random_bits_are_three_splitmixes(seed: int, position: int, index: int) -> None:
    expected = split_mix(split_mix(split_mix(seed) + position) + index)
    assert int(random_bits(*map(torch.tensor, (seed, position, index)))) % 2**64 == expected
    assert [split_mix(i) for i in range(3)] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]  # of state 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_its_batch(dtype: torch.dtype) -> None:
    count = len(MIXED)
    logits = random_logits(count, 517, dtype=dtype)  # no multiple of a vector's length
    seeds, positions = list(range(100, 100 + count)), list(range(count))
    together = sample(logits, build(MIXED, seeds, positions)).tolist()
    for order in (list(range(count))[::-1], [3, 1], [2], [6, 6, 0]):
        chosen = [[values[i] for i in order] for values in (MIXED, seeds, positions)]
        assert sample(logits[order], build(*chosen)).tolist() == [together[i] for i in order]


def test_seed_and_position_change_the_stream() -> None:
    logits = torch.zeros(64, 1000)
    params = [SamplingParams()] * 64
    streams = {
        tuple(sample(logits, build(params, seed, list(range(start, start + 64)))).tolist())
        for seed, start in [(0, 0), (1, 0), (-1, 0), (2**63, 0), (2**64 + 5, 0), (0, 64)]
    }
    assert len(streams) == 6
    a = sample(logits, build(params, 3, list(range(64)))).tolist()
    assert a == sample(logits, build(params, 3 + 2**64, list(range(64)))).tolist()  # seeds are taken modulo 2**64
    assert len(set(a)) > 50  # 64 draws of 1000: 62 different ones expected
    # Position is the token's index, so a stream can be taken up in the middle.
    assert sample(logits[:9], build(params[:9], 3, list(range(20, 29)))).tolist() == a[20:29]


# ---- filters


def keep_set(logits: torch.Tensor, params: list[SamplingParams]) -> torch.Tensor:
    """(B, V) bool: what the thresholds keep."""
    threshold = sampler.draw(logits, build(params)).threshold
    assert threshold is not None
    return (logits.float() >= threshold[:, None]) & (logits > -math.inf)


def test_min_p_beside_top_p() -> None:
    """vLLM has min_p first, which leaves 5 : 3 to top_p; transformers' generate has it last."""
    logits = torch.tensor([[0.5, 0.3, 0.1, 0.1]]).log().expand(2, 4)
    options = dict(min_p=0.5, top_p=0.6)
    assert keep_set(logits, [SamplingParams(**options), GenerateParams(**options)]).tolist() == [
        [True, False, False, False], [True, True, False, False]]


@pytest.mark.parametrize("of", [SamplingParams, GenerateParams])
@pytest.mark.parametrize("scale", [0.1, 1.0, 4.0])
def test_filters_keep_what_hugging_face_keeps(scale: float, of: type[SamplingParams]) -> None:
    """Random rows and settings; continuous logits, so that no two are equal."""
    generator = torch.Generator().manual_seed(1)

    def pick(*values: float) -> float:
        return values[int(torch.randint(len(values), (), generator=generator))]

    params = [of(temperature=pick(0.3, 0.7, 1.0, 1.5), top_k=int(pick(0, 1, 2, 17, 299, 300, 5000)),
                 top_p=pick(0.01, 0.3, 0.55, 0.9, 0.999, 1.0), min_p=pick(0.0, 0.01, 0.2, 1.0)) for _ in range(150)]
    logits = torch.randn(len(params), 300, generator=generator) * scale
    logits[::5, 100:] = -math.inf
    kept = keep_set(logits, params)
    for row, settings_, ours in zip(logits, params, kept, strict=True):
        assert torch.equal(ours, warped(row, settings_) > -math.inf), settings_
    # End to end: the winner of the race among those that Hugging Face keeps.
    seeds = torch.arange(len(params))
    noise = gumbel_noise(seeds[:, None], torch.tensor(4), torch.arange(300))
    expected = torch.stack([warped(row, p) for row, p in zip(logits, params, strict=True)]) + noise
    tokens = sample(logits, build(params, seeds.tolist(), 4))
    assert tokens.tolist() == expected.argmax(-1).tolist()


@pytest.mark.parametrize("dtype", DTYPES[:3])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_top_k_keeps_equals(dtype: torch.dtype, data: st.DataObject) -> None:
    """The k-th largest and all its equals, whatever the values: signed zeros, subnormals and infinities too."""
    info = torch.finfo(dtype)
    values = st.sampled_from([0.0, -0.0, 1.0, -1.0, 1.5, -info.max, info.max, info.smallest_normal, -math.inf, 3.0])
    row = torch.tensor(data.draw(st.lists(values, min_size=1, max_size=12)), dtype=dtype)
    k = data.draw(st.integers(1, 15))
    threshold = sampler._top_k_threshold(row[None], torch.tensor([k], dtype=torch.int32))
    kth = row.sort(descending=True).values[min(k, len(row)) - 1].float()
    assert torch.equal(row.float() >= threshold, row.float() >= kth)


def test_top_p_keeps_equals() -> None:
    logits = torch.tensor([[0.0, 1.0, 1.0, 1.0, -5.0]])
    assert keep_set(logits, [SamplingParams(top_p=0.4)]).tolist() == [[False, True, True, True, False]]
    uniform = torch.zeros(1, 50)
    assert keep_set(uniform, [SamplingParams(top_p=0.01)]).all()


# ---- rows without a distribution


@pytest.mark.parametrize("dtype", DTYPES)
def test_only_the_invalid_rows_are_reported(dtype: torch.dtype) -> None:
    good = random_logits(len(MIXED), 40, dtype=dtype)
    expected = sample(good, build(MIXED)).tolist()
    assert all(0 <= token < 40 for token in expected)
    for value, column in [(math.nan, 0), (math.nan, 39), (math.inf, 5), (-math.inf, slice(None))]:
        for bad in range(len(MIXED)):
            logits = good.clone()
            logits[bad, column] = value
            tokens = sample(logits, build(MIXED)).tolist()
            wanted = 5 if value == math.inf and MIXED[bad].greedy else -1  # argmax of a row with one +inf is that
            assert tokens == [*expected[:bad], wanted, *expected[bad + 1 :]], (value, MIXED[bad])
            if MIXED[bad].greedy:
                assert sample(logits[bad:][:1], build([GREEDY])).tolist() == [wanted]


def test_minus_infinity_is_never_drawn() -> None:
    logits = torch.full((len(MIXED) * 50, 30), -math.inf)
    logits[:, [3, 17]] = 0.5
    tokens = sample(logits, build(MIXED * 50, positions=list(range(len(MIXED) * 50))))
    assert set(tokens.tolist()) == {3, 17}


# ---- banned tokens, arguments, compilation


def test_banned_tokens() -> None:
    logits = random_logits(3, 20)
    logits[:, 4] = 50.0
    logits[:, 9] = 40.0
    before = logits.clone()
    banned = [[4, 9, 10_000], [], [4]]
    for params in ([GREEDY] * 3, [GREEDY, SamplingParams(), SamplingParams(top_k=1)]):
        tokens = sample(logits, build(params, banned=banned))
        assert tokens[1:].tolist() == [4, 9]
        assert tokens[0] == logits[0].topk(3).indices[2]
    assert torch.equal(logits, before)


@pytest.mark.parametrize("logits", [torch.zeros(3, 4), torch.zeros(4), torch.zeros(2, 4, dtype=torch.int64)])
def test_refuses_logits_of_another_shape(logits: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=re.escape("logits must be floating point of shape (2, V)")):
        sample(logits, build([GREEDY] * 2))


def test_logits_may_be_a_view() -> None:
    wide = random_logits(14, 60)
    view = wide[::2, 5:40]
    assert sample(view, build(MIXED)).tolist() == sample(view.contiguous(), build(MIXED)).tolist()
    assert sample(torch.zeros(0, 5), build([])).shape == (0,)


def test_nothing_is_compiled_on_a_cpu() -> None:
    logits = random_logits(len(MIXED), 33)
    assert sampler.draw(logits, build(MIXED)).tokens.tolist() == sample(logits, build(MIXED)).tolist()
    assert not sampler._compiled.cache_info().currsize


@pytest.mark.slow
def test_pieces_compile_once_for_all_batch_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one graph each, with dynamic shapes, and as on CUDA: cut into chunks and searched by four bits."""
    torch._dynamo.reset()
    compiled: dict[Callable[..., torch.Tensor], Callable[..., torch.Tensor]] = {}

    def get(piece: Callable[..., torch.Tensor], logits: torch.Tensor) -> Callable[..., torch.Tensor]:
        if piece not in compiled:
            compiled[piece] = torch.compile(piece, dynamic=True, fullgraph=True, backend="eager")
        return compiled[piece]

    for size in (2, 5, 7):
        logits, params = random_logits(size, 200, dtype=torch.bfloat16), build(MIXED[:size], list(range(size)))
        expected = sample(logits, params).tolist()
        with monkeypatch.context() as patch, torch._dynamo.config.patch(error_on_recompile=size > 2):
            for module in (sampler, draw):
                patch.setattr(module, "on_gpu", lambda tensor: True)
            assert sampler.draw(logits, params, get).tokens.tolist() == expected
            plain = build([SamplingParams()] * size, 3)
            assert sampler.draw(logits, plain, get).tokens.tolist() == sample(logits, plain).tolist()
    assert len(compiled) == 4  # all of them
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.parametrize("vocabulary", [1848])
def test_pieces_compile_for_cuda(vocabulary: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor's code for an H200 is generated, whether or not the chunks divide the vocabulary."""
    from benchmarks.launches import collecting, generate, launches

    monkeypatch.setattr(sampler, "_compiled", functools.cache(sampler._compiled.__wrapped__))
    compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda piece, **options: compile(piece, **options, backend=generate))
    for module in (sampler, draw):
        monkeypatch.setattr(module, "on_gpu", lambda tensor: True)
    logits = random_logits(3, vocabulary)
    filters = [SamplingParams(top_k=5), SamplingParams(top_p=0.5), SamplingParams(min_p=0.1)]
    with collecting() as programs:
        got = sampler.draw(logits, build(filters), lambda piece, logits: sampler._compiled(piece, vocabulary)).tokens
    assert got.tolist() == sample(logits, build(filters)).tolist()
    assert len(programs) == 4 and all("reduction" in launches(program) for program in programs)
