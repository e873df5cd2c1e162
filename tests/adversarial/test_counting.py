"""Models that are given token ids alone, and number the tokens themselves: exact on every route, or refused."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters
from torch.fx.experimental.symbolic_shapes import statically_known_true

import quire
from quire import UnsupportedAttention
from quire.passes.capture.paged_model import PagedModel, prove_uncompiled
from quire.passes.fx import value
from quire.passes.options import QuireOptions
from quire.passes.verify.sites import site_nodes
from tests.adversarial.counting import BLOCK, GPT, REFUSED, SERVED, numbers
from tests.adversarial.gpts import GPTS
from tests.adversarial.harness import (
    HEADS,
    PAGE,
    ROUTES,
    STEPS,
    VOCAB,
    WIDTH,
    cache,
    check_exact,
    decorated,
    opened,
    refusal,
    sequences,
)
from tests.steps import serve

EAGER = QuireOptions(compiler="eager")


def alone(model: nn.Module, ids: list[torch.Tensor]) -> list[torch.Tensor]:
    """Logits of each sequence by itself; of each beginning, if the model gives those of the last token alone."""
    with torch.no_grad():
        return [torch.cat([model(i[None, :n])[0][0, -1:] for n in range(1, len(i) + 1)]) for i in ids]


def outcome(make: Callable[[type[Any]], nn.Module], route: str) -> str:
    """"exact", or why it is refused. Raises AssertionError if it is served wrongly."""
    torch._dynamo.reset()
    ids, plain = sequences(), make(GPT)
    try:
        if route == "engine":
            with opened(plain, route, cache(layers=2)) as call:
                got = serve(call, ids, STEPS, PAGE)
        else:
            kind = make(decorated(GPT)) if route == "decorator" else plain
            compiled = kind if route == "decorator" else torch.compile(kind, backend="quire", options={"compiler": "eager"})
            kv = cache(layers=2)

            def one(part: torch.Tensor, meta: Any) -> torch.Tensor:
                with quire.step(kv, meta), torch.no_grad():
                    return compiled(part[None])[0][0]

            got = serve(one, ids, STEPS, PAGE)
    except Exception as error:
        why = refusal(error)
        if why is None:
            raise
        return why
    check_exact(got, alone(plain, ids))
    return "exact"


@pytest.mark.parametrize("name, route", [
    pytest.param(name, route, marks=[pytest.mark.slow] * (k != 0 and k != 1 + i % 8))
    for i, name in enumerate(SERVED) for k, route in enumerate(ROUTES)])
def test_served(name: str, route: str) -> None:
    """Each sequence of a ragged batch, in pieces and token by token, gets what it gets alone."""
    assert outcome(lambda kind: kind(SERVED[name]), route) == "exact"


@pytest.mark.parametrize("name, route", [
    pytest.param(name, route, marks=[pytest.mark.slow] * (k != i % 3))
    for i, name in enumerate(REFUSED) for k, route in enumerate(ROUTES)])
def test_refused(name: str, route: str) -> None:
    """What means the place in the row, or its length, is not the same in a ragged row."""
    place, why = REFUSED[name]
    found = outcome(lambda kind: kind(place), route)
    assert found != "exact", "it came out exact by chance"
    assert re.search(why, found), found


TABLE = torch.randn(BLOCK, 16)


@pytest.mark.parametrize("route", ROUTES)
def test_a_table_that_no_module_holds(route: str) -> None:
    """By hand it is an input, as long as it may be in another call."""
    found = outcome(lambda kind: kind(lambda m, ids: TABLE[: ids.shape[1]]), route)
    assert found == "exact" if route == "engine" else "table[:T] of a parameter or buffer" in found


@torch.library.custom_op("quire_tests::arange", mutates_args=())
def not_torchs(end: int) -> torch.Tensor:
    return torch.arange(end) + 1


@not_torchs.register_fake
def _(end: int) -> torch.Tensor:
    return torch.empty(end, dtype=torch.int64)


def test_an_operator_that_is_called_arange() -> None:
    """What it counts is not known."""
    assert "makes positions of its own" in outcome(
        lambda kind: kind(lambda m, ids: m.wpe(torch.ops.quire_tests.arange(ids.shape[1]))), "engine")


def test_a_table_inside_a_vmap_is_refused_in_words() -> None:
    found = outcome(lambda kind: kind(lambda m, ids: torch.vmap(lambda row: row[: ids.shape[1]] * 2)(m.pe)[0]), "engine")
    assert "torch.arange(T), T the number of tokens" in found


class Paragraphs(GPT):
    """Is given numbers of tokens of another kind, under a name like that of positions."""

    def forward(self, idx: torch.Tensor, position_ids: torch.Tensor, block_position_ids: torch.Tensor | None = None) -> Any:
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1])) + self.pe[0][position_ids]
        x = x if block_position_ids is None else x + self.pe[0][block_position_ids]
        for layer in self.h:
            x = x + layer(x)
        return self.lm_head(self.norm(x))


@pytest.mark.parametrize("given", [
    {"position_ids": lambda places: places % 3}, {"position_ids": lambda places: places + 2},
    {"block_position_ids": lambda places: places % 3, "position_ids": lambda places: places},
], ids=["of paragraphs", "from 2", "of both kinds"])
def test_the_place_in_a_sequence_is_the_steps(given: Any) -> None:
    """And not what a caller passes for another purpose."""
    torch._dynamo.reset()
    model, ids, kv = Paragraphs(), sequences(), cache(layers=2)
    compiled = torch.compile(model, backend="quire", options={"compiler": "eager"})

    def one(part: torch.Tensor, meta: Any) -> torch.Tensor:
        with quire.step(kv, meta), torch.no_grad():
            return compiled(part[None], **{name: of(meta.positions)[None] for name, of in given.items()})[0]

    with torch.no_grad():
        want = [model(i[None], **{name: of(torch.arange(len(i)))[None] for name, of in given.items()})[0] for i in ids]
    check_exact(serve(one, ids, STEPS, PAGE), want)


class Shares(GPT):
    """Its second layer attends to the first one's keys, of which a part was changed through a view."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.register = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, idx: torch.Tensor) -> torch.Tensor:
        x = self.wte(idx)
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        k = k * self.heads[0, : idx.shape[1]]
        part = k[..., :2]
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        part.mul_(3.0)
        q = self.register(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        return self.lm_head(x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


def test_what_is_computed_of_a_table_keeps_its_memory() -> None:
    """Keys that are changed in between are not those of the first layer."""
    torch._dynamo.reset()
    model, ids = Shares(), sequences()
    kv = quire.PagedKVCache.for_model(model, num_pages=40, page_size=PAGE)
    compiled = torch.compile(model, backend="quire", options={"compiler": "eager"})

    def one(part: torch.Tensor, meta: Any) -> torch.Tensor:
        with quire.step(kv, meta), torch.no_grad():
            return compiled(part[None])[0]

    with torch.no_grad():
        check_exact(serve(one, ids, STEPS, PAGE), [model(i[None])[0] for i in ids])


class Masks(GPT):
    """Its numbers are for positions and for the mask, the same or others."""

    def __init__(self, shared: bool) -> None:
        super().__init__()
        self.shared = shared

    def forward(self, idx: torch.Tensor, targets: torch.Tensor | None = None) -> Any:
        rows = numbers(idx)
        of_mask = rows if self.shared else torch.arange(idx.shape[1])
        x, mask = self.wte(idx) + self.wpe(rows), of_mask[:, None] >= of_mask
        for layer in self.h:
            x = x + layer(x, mask)
        return self.lm_head(x), None


@pytest.mark.parametrize("shared", [True, False])
def test_numbers_for_a_mask_too(shared: bool) -> None:
    assert outcome(lambda kind: Masks(shared), "engine") == "exact"


# What an engine does with them.


def engine(model: nn.Module, **options: Any) -> quire.Engine:
    return quire.Engine(model, **dict(dict(page_size=PAGE, num_pages=80, max_num_seqs=4, max_num_batched_tokens=12,
                                           max_model_len=BLOCK, compiler="eager"), **options))


@pytest.mark.parametrize("last", [False, True], ids=["all logits", "the last token's"])
def test_an_engine_gives_what_the_model_gives_alone(last: bool) -> None:
    """Prompts in pieces beside decoding, their log probabilities too."""
    model = GPT(last=last)
    with engine(model) as served:
        outs = served.generate([i.tolist() for i in sequences(lengths=(3, 30, 11, 17))], quire.SamplingParams(
            max_tokens=6, temperature=0, ignore_eos=True, logprobs=0, prompt_logprobs=0))
    for out in outs:
        ids = torch.tensor([*out.prompt_token_ids, *out.token_ids])
        want = alone(model, [ids])[0].log_softmax(-1)
        given = [*out.prompt_logprobs[1:], *out.logprobs]
        for row, token, found in zip(want, ids[1:].tolist(), given, strict=False):
            assert abs(found[token].logprob - row[token].item()) < 1e-4
        assert out.token_ids == want[len(out.prompt_token_ids) - 1 : -1].argmax(-1).tolist()


@pytest.mark.parametrize("name", GPTS)
def test_published_ones(name: str) -> None:
    torch.manual_seed(0)
    model = GPTS[name]().eval()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.4)
    with engine(model) as served:
        outs = served.generate([i.tolist() for i in sequences(lengths=(3, 30, 11, 17))], quire.SamplingParams(
            max_tokens=6, temperature=0, ignore_eos=True, logprobs=0))
    for out in outs:
        for n, token in enumerate(out.token_ids):
            with torch.no_grad():
                given = model(torch.tensor([[*out.prompt_token_ids, *out.token_ids[:n]]]))
            want = (given[0] if isinstance(given, tuple) else given)[0, -1].log_softmax(-1)
            assert want.argmax() == token and abs(want[token].item() - out.logprobs[n][token].logprob) < 1e-4


#: Other spellings of one row of numbers, of which one would rarely fail alone.
SPELLINGS = {
    "expand_as": lambda m, ids: m.wpe(numbers(ids).expand_as(ids)), "expand to a shape": lambda m, ids: m.wpe(
        numbers(ids).expand(ids.shape)), "view": lambda m, ids: m.wpe(numbers(ids).view(1, ids.shape[1])),
    "stack": lambda m, ids: m.wpe(torch.stack([numbers(ids)])), "repeat": lambda m, ids: m.wpe(
        numbers(ids).repeat(ids.shape[0], 1).type_as(ids)), "zeros": lambda m, ids: m.wpe(torch.zeros_like(ids) + numbers(ids)),
    "expand": lambda m, ids: m.wpe(numbers(ids).unsqueeze(0).expand(ids.shape[0], -1)),
}


@pytest.mark.parametrize("place, rows", [
    (SERVED["arange"], BLOCK), (SERVED["with an offset"], BLOCK - 2), (SERVED["a cut table"], BLOCK),
    (SERVED["clamped"], None), (SERVED["in blocks"], 4 * BLOCK), (lambda m, ids: m.odd[numbers(ids)], 23),
    (lambda m, ids: m.wpe(numbers(ids) * 3), 22), (lambda m, ids: m.pe[0].index_select(0, numbers(ids)), BLOCK),
    (lambda m, ids: m.pe[0].gather(0, numbers(ids)[:, None].expand(-1, 16)), BLOCK), (SERVED["sinusoids"], None),
    (lambda m, ids: m.wpe(numbers(ids) * (ids >= 0)), BLOCK),
    (lambda m, ids: m.wpe(2 * BLOCK - 1 - (numbers(ids) + BLOCK)), BLOCK),
    (lambda m, ids: m.wpe.weight[-1 - numbers(ids)], BLOCK),
    (lambda m, ids: torch.nn.functional.one_hot(numbers(ids), BLOCK).float() @ m.wpe.weight, BLOCK),
    *(pytest.param(place, BLOCK, marks=pytest.mark.slow) for place in SPELLINGS.values()),
], ids=["arange", "offset", "cut", "clamped", "blocks", "short", "times 3", "index_select", "gather", "no table", "hidden",
        "from the end", "negative", "one_hot", *SPELLINGS])
def test_a_sequence_is_no_longer_than_the_table(place: Any, rows: int | None) -> None:
    """Beyond it the model has no row: on a GPU, another memory's would be read."""
    longest = 300 if rows is None else rows
    with engine(GPT(place), max_model_len=longest, num_pages=120, max_num_batched_tokens=longest) as served:
        prompt = [(7 * i) % VOCAB for i in range(min(longest, 80) - 1)]
        (out,) = served.generate([prompt], quire.SamplingParams(max_tokens=4, temperature=0, ignore_eos=True))
        assert len(out.token_ids) == (1 if longest <= 80 else 4)
    if rows is not None:
        with pytest.raises(UnsupportedAttention, match=f"(has {rows} rows|<= {rows}).*set max_model_len={rows}"):
            engine(GPT(place), max_model_len=rows + 1)


@pytest.mark.parametrize("place, rows", [
    (lambda m, at: m.wpe(at), BLOCK), (lambda m, at: m.wpe(at + 2), BLOCK - 2), (lambda m, at: m.pe[0][at], BLOCK),
    (lambda m, at: m.wpe(at.clamp(max=BLOCK - 1)), None),
], ids=["given", "offset", "indexed", "clamped"])
def test_positions_that_are_given_end_with_the_table_too(place: Any, rows: int | None) -> None:
    """Positions are the engine's; a request beyond the table must not take the others of its batch with it."""
    class Given(GPT):
        def forward(self, ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            x = self.wte(ids) + place(self, position_ids)
            for layer in self.h:
                x = x + layer(x)
            return self.lm_head(self.norm(x))

    with engine(Given(), max_model_len=rows or 2 * BLOCK) as served:
        assert len(served.generate([[1, 2, 3]], quire.SamplingParams(max_tokens=2, ignore_eos=True))[0].token_ids) == 2
    if rows is not None:
        with pytest.raises(UnsupportedAttention, match=f"has {rows} rows.*set max_model_len={rows}"):
            engine(Given(), max_model_len=rows + 1)


def test_a_step_by_hand_is_no_longer_than_the_table() -> None:
    model = GPT()
    call, kv = torch.compile(model, backend="quire", options={"compiler": "eager"}), cache(layers=2)
    for length in (BLOCK, BLOCK + 1):
        meta = quire.CommonAttentionMetadata.build([length], [length], [list(range(1, 20))], page_size=PAGE)
        refused = pytest.raises(UnsupportedAttention, match=f"at most {BLOCK} tokens")
        with refused if length > BLOCK else contextlib.nullcontext():
            with quire.step(kv, meta), torch.no_grad():
                call(torch.zeros(1, length, dtype=torch.int64))


def test_the_block_size_of_a_config_is_the_longest_sequence() -> None:
    """And its vocabulary is that of the ids, though the table of positions has more rows: as nanoGPT's for characters."""
    model = GPT()
    model.config = type("GPTConfig", (), {"block_size": BLOCK, "vocab_size": VOCAB})()
    with engine(model, max_model_len=None) as served:
        assert served.max_model_len == BLOCK and served.limits.vocab_size == VOCAB < BLOCK
        with pytest.raises(ValueError, match=str(VOCAB)):
            served.generate([[VOCAB]], quire.SamplingParams(max_tokens=1))


class Assumes(GPT):
    """nanoGPT's own assertion."""

    def forward(self, idx: torch.Tensor, targets: torch.Tensor | None = None) -> Any:
        assert idx.shape[1] <= BLOCK, f"Cannot forward sequence of length {idx.shape[1]}"
        return super().forward(idx, targets)


def test_more_tokens_in_a_step_than_a_sequence_may_have() -> None:
    """The row of a step is not the sequence that the model's assertion is about."""
    model = Assumes(last=True)
    with engine(model, max_num_batched_tokens=4 * BLOCK) as served:
        outs = served.generate([i.tolist() for i in sequences(lengths=(60, 50, 40, 61))], quire.SamplingParams(
            max_tokens=2, temperature=0, ignore_eos=True))
    for out in outs:
        ids = torch.tensor([*out.prompt_token_ids, *out.token_ids[:-1]])
        assert alone(model, [ids])[0][-2:].argmax(-1).tolist() == out.token_ids


def test_a_bound_of_sequences_is_none_of_steps() -> None:
    """Else a compiler takes a step's tokens to be few enough for 32-bit offsets, say, without a condition that is checked."""
    with contextlib.closing(PagedModel(Assumes(), QuireOptions(compiler="eager", max_model_len=BLOCK))) as paged:
        tokens = value(site_nodes(paged.graph.raised.graph)[0].args[0]).shape[2]
        assert not statically_known_true(tokens <= 2 * BLOCK)


# Logits of the last token alone.


class Ends(GPT):
    """What it gives of its tokens is chosen by ``end(model, x)``."""

    def __init__(self, end: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.end = end

    def forward(self, idx: torch.Tensor, targets: torch.Tensor | None = None) -> Any:
        x = self.wte(idx) + self.wpe(numbers(idx))
        for layer in self.h:
            x = x + layer(x)
        return self.end(self, x), None


ENDS = {
    "a list": lambda m, x: m.lm_head(x[:, [-1], :]), "a slice": lambda m, x: m.lm_head(x[:, -1:]),
    "dots": lambda m, x: m.lm_head(x[..., [-1], :]), "before a norm": lambda m, x: m.lm_head(m.norm(x[:, [-1]])) * 2,
    "two of them": lambda m, x: m.lm_head(m.norm(x)[:, [-1]] + x[:, -1:]),
    "squeezed": lambda m, x: m.lm_head(x[:, [-1]].squeeze(1).reshape(1, -1, 16)),
    "of the logits": lambda m, x: m.lm_head(x)[:, [-1]],
}
BAD_ENDS = {
    "the first": (lambda m, x: m.lm_head(x[:, :1]), "not the last one, or is taken in a way"),
    "the mean": (lambda m, x: m.lm_head(x.mean(1, keepdim=True)), "not the last one, or is taken in a way"),
    "one before the last": (lambda m, x: m.lm_head(x[:, [-2]]), "not the last one, or is taken in a way"),
    "with the mean": (lambda m, x: m.lm_head(x[:, [-1]] + x.mean(1, keepdim=True)), "mixes the tokens"),
    "with the first": (lambda m, x: m.lm_head(x[:, [-1]] + x[:, :1]), "mixes the tokens"),
    "in a shape of one row": (lambda m, x: m.lm_head(x[:, [-1]].reshape(1, 1, 16)), "does not run on the last tokens"),
    "summed": (lambda m, x: m.lm_head(x[:, [-1]]).sum(1, keepdim=True), "depends on their number"),
    "softmax over rows": (lambda m, x: m.lm_head(x[:, [-1]].softmax(1)), "mixes the tokens"),
    "no dimension left": (lambda m, x: m.lm_head(x[:, -1]), r"no language-model head.*hidden\[:, \[-1\], :\]"),
}


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
def test_logits_of_the_last_token_are_those_of_each_wanted_one(end: Any) -> None:
    torch._dynamo.reset()
    assert outcome(lambda kind: Ends(end), "engine") == "exact"


@pytest.mark.parametrize("end, why", BAD_ENDS.values(), ids=BAD_ENDS)
def test_other_single_logits_are_refused(end: Any, why: str) -> None:
    with pytest.raises(UnsupportedAttention, match=why):
        PagedModel(Ends(end), EAGER)


def test_the_last_logits_by_hand_are_refused() -> None:
    """A caller would get those of the last sequence, for all of them."""
    assert "in a ragged row is that of the last sequence. quire.Engine" in outcome(lambda kind: kind(last=True), "compile")


@pytest.mark.parametrize("model, why", [(GPT(SERVED["scaled"]), "numbers the tokens of the row itself"), (
    GPT(lambda m, ids: m.wpe.weight[0], last=True), "logits of its last token alone")], ids=["numbers", "last"])
def test_an_uncompiled_step_would_be_wrong(model: nn.Module, why: str) -> None:
    with pytest.raises(UnsupportedAttention, match=f"{why}.*quire.Engine"):
        prove_uncompiled(model)


@pytest.mark.parametrize("last", [False, True], ids=["all logits", "the last token's"])
def test_a_trace_from_the_disk(last: bool, tmp_path: Any, monkeypatch: Any) -> None:
    """Positions are no input of the trace, and so not of the one that is kept."""
    monkeypatch.setenv("QUIRE_TRACE_CACHE", "1")
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path))
    traces = []
    for _ in range(2):
        before = counters["stats"]["unique_graphs"]
        assert outcome(lambda kind: kind(last=last), "engine") == "exact"
        traces.append(counters["stats"]["unique_graphs"] - before)
    assert traces == [1, 0]
