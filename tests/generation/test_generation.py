"""docs/generation.md is true: each row marked "same" gives what transformers gives, paged; each fall-back warns."""

from __future__ import annotations

import copy
import inspect
import warnings
from typing import Any

import pytest
import torch
from transformers import Gemma3Config, Gemma3ForConditionalGeneration, GenerationConfig, GenerationMixin

import quire
from tests.generation.table import ARGUMENTS, DIFFERENT, FALLS_BACK, FIELDS, PAGE, SAME, Recorder, Row, page
from tests.tiny import PROMPTS, assert_idle, load_model, load_tokenizer

pytestmark = pytest.mark.usefixtures("tokens_unchecked", "traces_kept")

ROWS = {name: row for name, row in (FIELDS | ARGUMENTS).items() if row.options is not None}


@pytest.fixture(scope="module")
def tokenizer():
    tokenizer = load_tokenizer()
    tokenizer.bos_token = tokenizer.eos_token  # token_healing needs one
    return tokenizer


@pytest.fixture(scope="module")
def models():
    both = load_model(), quire.paged(load_model(), num_pages=80, max_num_seqs=8, max_model_len=120, cudagraph_capture_sizes=[])
    for model in both:
        model.generation_config.max_new_tokens = None
    yield both
    assert_idle(both[1].generate.engine)
    both[1].generate.close()


def run(model: Any, tokenizer: Any, row: Row, without: str = "") -> tuple[Any, Any, list[str]]:
    """The result, what the streamer saw, and quire's warnings. ``without``: an option to leave out."""
    options = {k: v for k, v in (row.options or {}).items() if v is not ... and k != without}
    options = {"max_new_tokens": 8, **copy.deepcopy({k: v for k, v in options.items() if not callable(v)}),
               **{k: v for k, v in options.items() if callable(v)}}
    given = [k for k, v in (row.options or {}).items() if v is ... and k != without]
    recorder = Recorder()
    more = {"tokenizer": tokenizer, "streamer": recorder, "assistant_model": model}
    options |= {k: more[k] for k in given}
    rows = 1 if {"assistant_model", "prompt_lookup_num_tokens", "assistant_early_exit"} & (row.options or {}).keys() else 2
    batch = tokenizer(list(PROMPTS[:rows]), return_tensors="pt", padding=True)
    torch.manual_seed(1)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        out = model.generate(**{**batch, **options})
    return out, recorder.seen, [str(w.message) for w in seen if str(w.message).startswith("quire:")]


@pytest.mark.parametrize("name", ROWS)
def test_row(name, models, tokenizer, monkeypatch) -> None:
    row, (plain, model) = ROWS[name], models
    model.generate.warned.clear()
    want, want_seen, _ = run(plain, tokenizer, row)
    runner, steps = model.generate.engine.runner, []
    forward = runner.forward
    monkeypatch.setattr(runner, "forward", lambda staged: (steps.append(staged), forward(staged))[1])
    got, got_seen, said = run(model, tokenizer, row)
    assert bool(steps) == (row.status != FALLS_BACK)
    assert [text for text in said if "not paged" in text] == said
    assert bool(said) == (row.status == FALLS_BACK), said
    assert type(got) is type(want)
    if isinstance(want, torch.Tensor):
        assert torch.equal(got, want)
    else:
        assert torch.equal(got.sequences, want.sequences)
        if "sequences_scores" in want:
            torch.testing.assert_close(got.sequences_scores, want.sequences_scores, atol=1e-4, rtol=1e-4)
            assert torch.equal(got.beam_indices, want.beam_indices)
        for mine, theirs in ((got.scores, want.scores), (got.logits, want.logits)):
            assert (mine is None) == (theirs is None)
            for a, b in zip(mine or (), theirs or (), strict=True):
                torch.testing.assert_close(a, b, atol=1e-3, rtol=1e-4)
    assert got_seen == want_seen
    if row.acts:
        assert not equal(want, run(plain, tokenizer, row, without=name)[0]), "the option changes nothing here"


def equal(a: Any, b: Any) -> bool:
    """Whether two results have equal tokens and scores."""
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return type(a) is type(b) and torch.equal(a, b)
    return a.keys() == b.keys() and torch.equal(a.sequences, b.sequences) and (
        a.scores is None or all(map(torch.equal, a.scores, b.scores)))


def test_every_field_and_argument_has_a_row() -> None:
    """When this fails, transformers has a new one: give it a row, and write the page again."""
    assert FIELDS.keys() == {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    assert {*inspect.signature(GenerationMixin.generate).parameters} - {"self", "kwargs"} <= ARGUMENTS.keys()
    assert PAGE.read_text() == page(), "run python -m tests.generation.table"
    statuses = [row.status for row in FIELDS.values()]
    assert set(statuses) <= {SAME, DIFFERENT, FALLS_BACK} and statuses.count(SAME) >= 0.8 * len(statuses)


@pytest.mark.parametrize("options", [dict(bad_words_ids=[]), dict(sequence_bias=[]), dict(do_sample=True, top_k=-1)], ids=str)
def test_what_transformers_refuses_is_refused(options, models) -> None:
    """A typing error must not mean "no filter" here and an error there."""
    for model in models:
        with pytest.raises(ValueError, match=next(name for name in options if name != "do_sample")):
            model.generate(torch.tensor([[5, 6]]), max_new_tokens=2, **options)


def test_the_pipeline_with_a_chat(models, tokenizer) -> None:
    """transformers' pipeline calls generate with arguments of its own."""
    from transformers import pipeline

    chatty = copy.copy(tokenizer)
    chatty.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    chat = [{"role": "user", "content": "Once upon a time"}]
    texts = []
    for model in models:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*not paged.*")
            pipe = pipeline("text-generation", model=model, tokenizer=chatty)
            texts.append([pipe(chat, max_new_tokens=8, do_sample=False),
                          pipe(list(PROMPTS[:2]), max_new_tokens=8, do_sample=False, return_full_text=False)])
    assert texts[0] == texts[1] and texts[0][0][0]["generated_text"][-1]["role"] == "assistant"


def test_what_a_processor_of_images_gives_beside_text() -> None:
    """A chat without an image with Gemma 3, by the lines of its model card."""
    text = dict(vocab_size=90, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, head_dim=8,
                num_key_value_heads=2, sliding_window=8, initializer_range=0.5, max_position_embeddings=64)
    vision = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=28,
                  patch_size=14)
    torch.manual_seed(0)
    plain = Gemma3ForConditionalGeneration(Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=9)).eval()
    model = quire.paged(copy.deepcopy(plain), num_pages=40, max_num_seqs=4, cudagraph_capture_sizes=[])
    ids, mask = torch.arange(20, 40).reshape(2, 10), torch.ones(2, 10, dtype=torch.long)
    mask[0, :3] = 0
    given = dict(input_ids=ids, attention_mask=mask, token_type_ids=torch.zeros_like(ids), max_new_tokens=8)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*not paged.*")
        for more in ({}, dict(repetition_penalty=1.3), dict(no_repeat_ngram_size=2)):
            assert torch.equal(model.generate(**given, **more), plain.generate(**given, **more))
    image = torch.zeros_like(ids)
    image[:, 4:8] = 1
    with pytest.warns(UserWarning, match=r"quire does not have the arguments \['token_type_ids'\]"):
        got = model.generate(**given | dict(token_type_ids=image))
    assert torch.equal(got, plain.generate(**given | dict(token_type_ids=image)))
    for of in (plain, model):  # which has no images
        with pytest.raises(ValueError, match="mm_token_type_ids"):
            of.generate(ids, mm_token_type_ids=torch.zeros_like(ids))
    model.generate.close()
