"""Which calls of a paged model's ``generate`` are requests, that join and leave a batch by themselves, though a generation
config has processors in it: their tokens are those of transformers' own ``generate``.

A user of a checkpoint that ships a penalty loses continuous batching if it is not, and gets other tokens if it counts others.
"""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import transformers
from transformers import GenerationConfig, LogitsProcessorList, TextIteratorStreamer, pipeline
from transformers.generation import utils

import quire
from quire.graph_runner import hf_generate
from tests.tiny import PROMPTS, assert_idle, load_model
from tests.zoo.configs import SERVED, build

pytestmark = pytest.mark.usefixtures("tokens_unchecked", "traces_kept")
NEW = 16
PENALTY = dict(repetition_penalty=1.8)


@pytest.fixture(scope="module")
def plain() -> Any:
    return load_model(num_layers=2)


@pytest.fixture(scope="module")
def paged_model() -> Any:
    model = quire.paged(load_model(num_layers=2), num_pages=80, max_num_seqs=6, max_model_len=150, cudagraph_capture_sizes=[6])
    yield model
    model.generate.close()


@pytest.fixture
def steps(paged_model, monkeypatch) -> Counter[str]:
    """Counts the steps of requests, and those in lockstep."""
    runner, found = paged_model.generate.engine.runner, Counter()
    for name, what in (("launch", "requests"), ("logits_of", "lockstep")):
        method = getattr(runner, name)
        monkeypatch.setattr(runner, name, lambda batch, method=method, what=what: (found.update([what]), method(batch))[1])
    return found


@pytest.fixture
def model(paged_model) -> Iterator[Any]:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*not paged.*")
        yield paged_model
    assert_idle(paged_model.generate.engine)


@pytest.fixture(scope="module")
def batch(tokenizer) -> Any:
    return rows_of(tokenizer, PROMPTS[:3])


def rows_of(tokenizer: Any, texts: Sequence[str]) -> Any:
    """Of different lengths, padded on the left; of one token each, if the installed transformers penalizes padding."""
    more = dict(padding=True) if hf_generate.ignores_padding() else dict(truncation=True, max_length=1)
    return tokenizer(list(texts), return_tensors="pt", **more)


def same(plain: Any, model: Any, **options: Any) -> Any:
    """Both generate the same tokens; the result."""
    found = []
    for each in (plain, model):
        torch.manual_seed(3)
        out = each.generate(**{"max_new_tokens": NEW, **copy.deepcopy(options)})
        found.append(out if isinstance(out, torch.Tensor) else out.sequences)
    assert torch.equal(*found)
    return found[1]


def first_tokens(plain: Any, batch: Any, count: int = 2) -> list[int]:
    """What the rows would begin with."""
    return plain.generate(**batch, max_new_tokens=count)[:, -count:].flatten().unique().tolist()


OPTIONS: dict[str, dict[str, Any]] = {
    "penalty": PENALTY, "reward": dict(repetition_penalty=0.7),
    "in a config": dict(generation_config=GenerationConfig(**PENALTY)),
    "with a minimum": dict(repetition_penalty=1.5, min_new_tokens=9, eos_token_id=[12, 358, 20]),
    "as a dict": dict(return_dict_in_generate=True, **PENALTY), "renormalized": dict(renormalize_logits=True, **PENALTY),
    "penalty before top_k": dict(do_sample=True, top_k=1, temperature=9.0, repetition_penalty=1.8),
    "penalty before top_p": dict(do_sample=True, top_k=0, top_p=1e-6, temperature=3.0, repetition_penalty=1.8),
    "penalty before min_p": dict(do_sample=True, top_k=0, min_p=1.0, temperature=3.0, repetition_penalty=1.8),
    "suppressed": dict(suppress_tokens=...), "suppressed, some no tokens": dict(suppress_tokens=(-7, 10**6, ...)),
    "bad words": dict(bad_words_ids=[...]), "all": dict(suppress_tokens=[12], bad_words_ids=[...], **PENALTY),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_served_as_requests(name, plain, model, batch, steps) -> None:
    options, some = dict(OPTIONS[name]), first_tokens(plain, batch)
    if "suppress_tokens" in options and "bad_words_ids" not in options:
        given = options["suppress_tokens"]
        options["suppress_tokens"] = some if given is ... else (*given[:-1], *some)
    if "bad_words_ids" in options:
        options["bad_words_ids"] = [[token] for token in some]
    out = same(plain, model, **batch, **options)
    assert steps["requests"] and not steps["lockstep"]
    kept = {k: v for k, v in options.items() if k not in (*hf_generate.EDITS, "generation_config")}
    assert not torch.equal(out, same(plain, plain, **batch, **kept)), "the option changes nothing here"


def test_a_model_that_counts_padding(monkeypatch) -> None:
    """BART's decoder takes no positions, so that to it a padded prompt is another one than in an engine, which pads none."""
    plain, model = (build(SERVED["bart_decoder"]) for _ in range(2))
    quire.paged(model, page_size=4, num_pages=60, max_num_seqs=4, max_model_len=40, compiler="eager")
    ids = torch.randint(3, 64, (3, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*not paged.*")
        same(plain, model, input_ids=ids, attention_mask=mask, eos_token_id=[])
    mask[0, :4] = 0
    with pytest.warns(UserWarning, match="counts padding as tokens"):
        padded = same(plain, model, input_ids=ids, attention_mask=mask, eos_token_id=[])
    alone = plain.generate(ids[:1, 4:], max_new_tokens=NEW, eos_token_id=[])
    assert not torch.equal(padded[0, 9:], alone[0, 5:]), "padding does not show here"
    model.generate.close()


def test_an_end_token_is_no_bad_word(plain, model, batch, steps) -> None:
    """transformers leaves it out of the bad words, and not out of the suppressed tokens."""
    ends = first_tokens(plain, batch, 3)
    for options in (dict(bad_words_ids=[[token] for token in ends]), dict(suppress_tokens=ends)):
        same(plain, model, **batch, **options, eos_token_id=ends)
    assert not steps["lockstep"]


def test_more_rows_than_run_at_once(plain, model, tokenizer, steps) -> None:
    """Rows wait and join, and one that ends makes room; in lockstep such a batch did not fit."""
    many = rows_of(tokenizer, [*PROMPTS, *(f"{text} and" for text in PROMPTS)])
    assert len(many.input_ids) > model.generate.engine.config.max_num_seqs
    ends = first_tokens(plain, many, 5)[:4]
    same(plain, model, **many, **PENALTY, eos_token_id=ends)
    assert steps["requests"] and not steps["lockstep"]


@pytest.mark.parametrize("how", ["another class", "another method"])
def test_a_processor_of_the_callers_own(how, plain, model, batch, steps, monkeypatch) -> None:
    own = utils.RepetitionPenaltyLogitsProcessor
    before = own.__init__

    class OnlyNew(own):
        def __init__(self, penalty, prompt_ignore_length=None) -> None:
            before(self, penalty, prompt_ignore_length=1)

    if how == "another class":
        monkeypatch.setattr(utils, "RepetitionPenaltyLogitsProcessor", OnlyNew)
    else:
        monkeypatch.setattr(own, "__init__", lambda self, penalty, prompt_ignore_length=None: before(self, penalty, 1))
    same(plain, model, **batch, repetition_penalty=9.0)
    assert steps["lockstep"] and not steps["requests"]


def test_all_tokens_excluded(plain, model, batch, steps) -> None:
    """transformers takes token 0 then, and a request has nothing to sample from."""
    same(plain, model, **batch, suppress_tokens=list(range(plain.config.vocab_size)))
    assert steps["lockstep"] and not steps["requests"]


def test_a_release_that_cannot_be_asked_is_taken_to_count_padding(monkeypatch) -> None:
    """The question is one of a private method, which a later release may not have."""
    monkeypatch.delattr("transformers.GenerationMixin._get_logits_processor")
    assert not hf_generate.ignores_padding.__wrapped__()


@pytest.mark.skipif(not hf_generate.ignores_padding(), reason="the installed transformers penalizes padding")
@pytest.mark.parametrize("pad", ["the first", "another", "none"])
def test_padding_does_not_count(pad, plain, model, batch, steps) -> None:
    """A row of a padded batch has the tokens of the row alone, also where the padding is what it goes on with."""
    ids, mask = batch.input_ids.clone(), batch.attention_mask
    token = {"the first": int(plain.generate(**batch, **PENALTY, max_new_tokens=1)[1, -1]), "another": 9, "none": 0}[pad]
    ids[mask == 0] = token
    given = dict(input_ids=ids, pad_token_id=token) if pad == "another" else dict(input_ids=ids, attention_mask=mask)
    out = same(plain, model, **given, **PENALTY)
    for row, keep, got in zip(ids, mask.bool(), out, strict=True):
        assert torch.equal(plain.generate(row[keep][None], max_new_tokens=NEW, **PENALTY)[0, -NEW:], got[-NEW:])
    assert steps["requests"] and not steps["lockstep"]


def test_masked_tokens_that_count(plain, model, tokenizer, steps, monkeypatch) -> None:
    """Those between the tokens of a prompt do, with transformers; with older releases also those of the padding."""
    batch = tokenizer(list(PROMPTS[:3]), return_tensors="pt", padding=True)
    ids, mask = batch.input_ids[2:].clone(), batch.attention_mask[2:].clone()
    mask[0, 2] = 0
    ids[0, 2] = ids[0, 1]  # the prompt has it anyway
    same(plain, model, input_ids=ids, attention_mask=mask, **PENALTY)
    assert steps["requests"] and not steps["lockstep"]
    ids[0, 2] = int(plain.generate(ids, attention_mask=mask, max_new_tokens=1)[0, -1])
    steps.clear()
    same(plain, model, input_ids=ids, attention_mask=mask, **PENALTY)
    assert steps["lockstep"] and not steps["requests"]
    monkeypatch.setattr(hf_generate, "ignores_padding", lambda: False)
    ids, mask = batch.input_ids[:1], batch.attention_mask[:1]
    for padding, way in ((77, "lockstep"), (int(ids[0, -1]), "requests")):
        steps.clear()
        same(plain, model, input_ids=ids.where(mask > 0, padding), attention_mask=mask, **PENALTY)
        assert set(steps) == {way}


@pytest.mark.parametrize("options", [
    dict(return_dict_in_generate=True, output_scores=True), dict(logits_processor=LogitsProcessorList([lambda ids, x: -x])),
    dict(stop_strings=["e"], tokenizer=...), dict(no_repeat_ngram_size=2), dict(num_beams=2), dict(bad_words_ids=[[12, 358]]),
    dict(repetition_penalty=1e-39, do_sample=False), dict(suppress_tokens=[12.0])], ids=lambda options: " ".join(options))
def test_what_else_looks_at_each_token_advances_in_lockstep(options, plain, model, batch, steps, tokenizer) -> None:
    given = {k: tokenizer if v is ... else v for k, v in options.items()}
    same(plain, model, **batch, **{**PENALTY, "do_sample": True, "top_k": 5, **given})  # by transformers' own random numbers
    assert steps["lockstep"] and not steps["requests"]


@pytest.mark.parametrize("training", [False, True])
def test_inputs_may_be_none_beside_input_ids(training, model) -> None:
    """Of prompts with padding on the right, in training mode too."""
    ids = torch.tensor([[7, 8, 9, 10, 0], [5, 6, 7, 8, 9]])
    options = dict(attention_mask=(ids > 0).long(), max_new_tokens=4, no_repeat_ngram_size=2)
    model.train(training)
    try:
        assert torch.equal(model.generate(None, input_ids=ids, **options), model.generate(ids, **options))
    finally:
        model.eval()


def test_ids_of_other_integers_are_for_transformers(plain, model) -> None:
    ids = torch.tensor([[7, 8, 9]], dtype=torch.uint8)
    found = []
    for each in (plain, model):
        with pytest.raises(RuntimeError) as error, warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            each.generate(ids, max_new_tokens=2)
        found.append(str(error.value))
    assert found[0] == found[1]


@pytest.mark.parametrize("options", [
    dict(repetition_penalty=2), dict(repetition_penalty=-1.0), dict(bad_words_ids=[[10**6]]), dict(bad_words_ids=[[-1]]),
    dict(bad_words_ids=[])], ids=str)
def test_values_that_transformers_refuses(options, plain, model, batch) -> None:
    with pytest.raises(ValueError) as want:
        plain.generate(**batch, max_new_tokens=2, **options)
    with pytest.raises(ValueError) as got:
        model.generate(**batch, max_new_tokens=2, **options)
    assert str(got.value) == str(want.value)


def test_a_processor_that_the_caller_changed_runs(plain, model, batch, steps, monkeypatch) -> None:
    monkeypatch.setattr(transformers.RepetitionPenaltyLogitsProcessor, "__call__", lambda self, ids, scores: -scores)
    same(plain, model, **batch, **PENALTY)
    assert steps["lockstep"] and not steps["requests"]


def test_sampled_sequences_are_those_of_the_engine(model, tokenizer, steps) -> None:
    """torch.manual_seed decides, and each sequence counts its own tokens."""
    ids = tokenizer(PROMPTS[2], return_tensors="pt").input_ids
    options = dict(do_sample=True, temperature=0.8, top_k=40, num_return_sequences=3, max_new_tokens=NEW, eos_token_id=None)
    torch.manual_seed(7)
    got = model.generate(ids, **options, repetition_penalty=1.2)
    torch.manual_seed(7)
    seed = int(torch.randint(0, 2**62, ()))
    params = quire.SamplingParams(n=3, temperature=0.8, top_k=40, max_tokens=NEW, seed=seed, ignore_eos=True,
                                  repetition_penalty=1.2)
    (want,) = model.generate.engine.generate([ids[0].tolist()], params)
    assert got[:, ids.shape[1]:].tolist() == [each.token_ids for each in want.outputs]
    torch.manual_seed(7)
    assert not torch.equal(got, model.generate(ids, **options))
    assert not steps["lockstep"]


def test_the_checkpoints_own_config(plain, model, batch, steps, monkeypatch, tokenizer) -> None:
    """As of Qwen2.5-Instruct: through a streamer and transformers' pipeline too."""
    for each in (plain, model):
        monkeypatch.setattr(each, "generation_config", GenerationConfig(
            do_sample=True, top_k=1, top_p=0.8, temperature=0.7, repetition_penalty=1.4, pad_token_id=0, eos_token_id=0))
    same(plain, model, **batch)
    texts = []
    for each in (plain, model):
        streamer = TextIteratorStreamer(tokenizer)
        each.generate(batch.input_ids[2:], max_new_tokens=8, streamer=streamer)
        pipe = pipeline("text-generation", model=each, tokenizer=tokenizer)
        texts.append([*streamer, pipe(list(PROMPTS[:2]), max_new_tokens=8)])
    assert texts[0] == texts[1]
    assert steps["requests"] and not steps["lockstep"]


def test_a_config_for_continuous_batching(plain, model, steps, tokenizer, batch) -> None:
    """transformers' manager drops what it does not support; this one has it."""
    some = first_tokens(plain, batch)
    options = dict(max_new_tokens=8, eos_token_id=-1, do_sample=False, suppress_tokens=some[:3],
                   bad_words_ids=[[token] for token in some[3:]])
    prompts = [tokenizer(text).input_ids for text in PROMPTS[:3]]
    found = model.generate_batch(prompts, GenerationConfig(**options, **PENALTY))
    for prompt, output in zip(prompts, found.values(), strict=True):
        want = plain.generate(torch.tensor([prompt]), **options | dict(eos_token_id=None), **PENALTY)
        assert output.generated_tokens == want[0, len(prompt):].tolist()
