"""``quire.paged``: ``model.generate`` gives what transformers gives; paged where it can be, with a warning if not."""

from __future__ import annotations

import contextlib
import copy
import functools
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from transformers import GenerationConfig, LlamaForCausalLM, LogitsProcessorList, TextStreamer
from transformers.models.mistral import MistralConfig, MistralForCausalLM

import quire
from tests.tiny import PROMPTS, assert_idle, generated, load_model, small_llama

pytestmark = pytest.mark.usefixtures("tokens_unchecked", "traces_kept")

NEW = 16
SMALL = dict(num_pages=40, max_num_seqs=2, cudagraph_capture_sizes=[])
OPTIONS = dict(num_pages=80, max_num_seqs=8, max_model_len=300, cudagraph_capture_sizes=[8])


def small() -> nn.Module:
    return small_llama(0.3, eos_token_id=None, pad_token_id=0)


@pytest.fixture(scope="module")
def plain():
    """A model that transformers serves."""
    return load_model(num_layers=2)


@pytest.fixture(scope="module")
def paged_model():
    model = quire.paged(load_model(num_layers=2), **OPTIONS)
    yield model
    model.generate.close()


@pytest.fixture
def model(paged_model):
    paged_model.generate.warned.clear()
    yield paged_model
    assert_idle(paged_model.generate.engine)


@pytest.fixture(scope="module")
def batch(tokenizer):
    """Three prompts of different lengths, padded on the left."""
    return tokenizer(list(PROMPTS[:3]), return_tensors="pt", padding=True)


@pytest.fixture
def no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def same(plain, model, *args, seed: int = 0, **kwargs) -> torch.Tensor:
    """Both generate the same; the result."""
    torch.manual_seed(seed)
    want = plain.generate(*args, **copy.deepcopy(kwargs))
    torch.manual_seed(seed)
    got = model.generate(*args, **kwargs)
    assert got.dtype == want.dtype and got.device == want.device and torch.equal(got, want)
    return got


# -- routed to the engine


def test_padded_batch(no_warnings, plain, model, batch) -> None:
    out = same(plain, model, **batch, max_new_tokens=NEW, do_sample=False)
    assert out.shape == (3, batch.input_ids.shape[1] + NEW)
    assert model.generate.engine.runner.graphs.stats.replayed > 0
    same(plain, model, batch.input_ids.where(batch.attention_mask.bool(), 9), pad_token_id=9, max_new_tokens=NEW)
    same(plain, model, batch.input_ids, max_new_tokens=NEW)  # padding that is the end token counts as tokens


def test_one_prompt_in_many_forms(no_warnings, plain, model, batch) -> None:
    ids = batch.input_ids[2:, :]
    for args, kwargs in (((ids,), {}), ((), {"input_ids": ids}), ((), {"inputs": ids}), ((), {"inputs": ids.int()})):
        same(plain, model, *args, **kwargs, max_new_tokens=4)
    ids = batch.input_ids[2:]
    same(plain, model, ids, GenerationConfig(max_new_tokens=4))
    same(plain, model, ids, None, None, max_new_tokens=4)
    assert same(plain, model, ids, GenerationConfig(max_new_tokens=9), max_new_tokens=2).shape[1] == ids.shape[1] + 2
    processors = LogitsProcessorList([lambda ids, scores: -scores])
    same(plain, model, batch.input_ids[2:], GenerationConfig(max_new_tokens=3), processors)


def test_ends_at_different_places(no_warnings, plain, model, batch) -> None:
    """Rows that end early are filled with the padding token."""
    out = same(plain, model, **batch, max_new_tokens=95)
    assert (out[:, -1] == 0).any() and not (out[:, -1] == 0).all()
    some = [int(out[1, 12]), int(out[0, 20])]
    same(plain, model, **batch, max_new_tokens=NEW, eos_token_id=some)
    same(plain, model, **batch, max_new_tokens=NEW, eos_token_id=some[0], pad_token_id=77)
    same(plain, model, **batch, max_new_tokens=NEW, eos_token_id=some, min_new_tokens=9)


def test_mask(no_warnings, plain, model, batch, tokenizer) -> None:
    """Masked tokens are as if they were not there, wherever they are before the last one."""
    alone = [plain.generate(tokenizer(p, return_tensors="pt").input_ids, max_new_tokens=NEW)[0, -NEW:]
             for p in PROMPTS[:2]]
    ids, mask = torch.full((2, 9), 5), torch.zeros(2, 9, dtype=torch.long)
    for row, at, text in ((0, [0, 2, 3, 8], PROMPTS[0]), (1, [5, 8], PROMPTS[1])):
        ids[row, at] = torch.tensor(tokenizer(text)["input_ids"])
        mask[row, at] = 1
    for m in (mask, mask.bool()):
        out = model.generate(ids, attention_mask=m, max_new_tokens=NEW)
        assert torch.equal(out[:, :9], ids)
        assert torch.equal(out[:, 9:], torch.stack(alone))


def test_generation_config(no_warnings, plain, model, batch) -> None:
    """A config given, over the model's own, which fills what it leaves open; arguments over both."""
    ids = batch.input_ids[:1]
    out = same(plain, model, ids, generation_config=GenerationConfig(max_new_tokens=150))
    assert out[0, -1] == 0 and out.shape[1] < 150  # the model's end token
    assert same(plain, model, ids, max_new_tokens=150, eos_token_id=None).shape[1] == ids.shape[1] + 150
    assert same(plain, model, ids, generation_config=GenerationConfig(eos_token_id=12), max_new_tokens=NEW)[0, -1] == 12
    assert model.generation_config.max_new_tokens == 256  # untouched
    wide = {name: nn.functional.pad(x, (1014 - x.shape[1], 0)) for name, x in batch.items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Using the model-agnostic default")
        assert same(plain, model, **wide, max_new_tokens=None).shape[1] == 1024  # 20 more, or the model's positions


def test_sampling_follows_torch_manual_seed(no_warnings, model, batch) -> None:
    def sample(seed: int, **options) -> list:
        torch.manual_seed(seed)
        return model.generate(**batch, max_new_tokens=NEW, do_sample=True, temperature=1.5, **options).tolist()

    assert sample(1) == sample(1) != sample(2)
    assert len(set(map(tuple, sample(1)))) == 3
    torch.manual_seed(1)
    assert sample(1, top_k=1) == model.generate(**batch, max_new_tokens=NEW).tolist()
    # Different prompts of one call draw different numbers, and a greedy call none of the global ones.
    repeated = batch.input_ids[2:].repeat(4, 1)
    same_prompt = model.generate(repeated, max_new_tokens=NEW, do_sample=True, temperature=3.0).tolist()
    assert len(set(map(tuple, same_prompt))) == 4
    torch.manual_seed(3)
    state = torch.get_rng_state()
    model.generate(**batch, max_new_tokens=2)
    assert torch.equal(torch.get_rng_state(), state)


def test_several_sequences(no_warnings, model, batch) -> None:
    out = model.generate(**batch, max_new_tokens=NEW, do_sample=True, temperature=3.0, num_return_sequences=3)
    assert out.shape == (9, batch.input_ids.shape[1] + NEW)
    assert torch.equal(out[:, : batch.input_ids.shape[1]], batch.input_ids.repeat_interleave(3, 0))
    assert len(set(map(tuple, out.tolist()))) == 9


def test_streamer(no_warnings, plain, model, batch, tokenizer, capsys) -> None:
    ids, printed = batch.input_ids[2:], []
    for m in (plain, model):
        m.generate(ids, max_new_tokens=NEW, streamer=TextStreamer(tokenizer, skip_prompt=True))
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1] and len(printed[0]) > 20


def test_a_row_without_a_token_or_ids_goes_to_transformers(plain, model, batch) -> None:
    mask = batch.attention_mask.clone()
    mask[1] = 0
    with pytest.warns(UserWarning, match="because all tokens of a prompt are masked"):
        same(plain, model, batch.input_ids, attention_mask=mask, max_new_tokens=4)
    embeds = plain.get_input_embeddings()(batch.input_ids[2:]).detach()
    with pytest.warns(UserWarning, match="because it was not given input_ids of shape .batch, length."):
        got = model.generate(inputs_embeds=embeds, max_new_tokens=4)
    assert torch.equal(got, plain.generate(inputs_embeds=embeds, max_new_tokens=4))


# -- what goes to transformers


@pytest.mark.parametrize(("more", "options", "message", "error"), [
    ((), dict(input_ids=torch.tensor([[9, 9, 9]])), "both inputs and input_ids", ValueError),
    ((GenerationConfig(),), dict(generation_config=GenerationConfig()), "do not fit the signature of generate", TypeError),
])
def test_arguments_given_twice_are_transformers_own_error(more, options, message, error, plain, model, batch) -> None:
    with pytest.raises(error) as want:
        plain.generate(batch.input_ids, *more, **options)
    with pytest.warns(UserWarning, match=message), pytest.raises(error) as got:
        model.generate(batch.input_ids, *more, **options)
    assert str(got.value) == str(want.value)


def fallbacks(plain, tokenizer, ids) -> dict:
    return {
        "beams": (dict(num_beams=9), "its 9 sequences advance together, and the engine runs 8 at once"),
        "in a config": (dict(generation_config=GenerationConfig(num_beams=9)), "its 9 sequences advance together"),
        "attentions": (dict(output_attentions=True, return_dict_in_generate=True), "quire does not have output_attentions"),
        "position_ids": (dict(position_ids=torch.arange(ids.shape[1])[None] + 1), "its position_ids are not those of the"),
        "embeddings": (dict(inputs_embeds=plain.get_input_embeddings()(ids).detach()), "the arguments .*inputs_embeds"),
        "assistant": (dict(assistant_model=plain), r"quire does not have the arguments \['assistant_model'\]"),
        "too long": (dict(max_new_tokens=400), "sequence of 406 tokens, and the engine holds 300"),
        "too long in lockstep": (dict(max_new_tokens=400, no_repeat_ngram_size=2), "sequence of 406 tokens, and the engine"),
    }


@pytest.mark.parametrize("name", fallbacks(load_model(num_layers=2), None, torch.zeros(1, 1, dtype=torch.long)))
def test_falls_back_with_one_warning(name, plain, model, batch, tokenizer) -> None:
    ids = batch.input_ids[2:]
    options, reason = fallbacks(plain, tokenizer, ids)[name]
    options = {"max_new_tokens": 6} | options
    torch.manual_seed(0)
    want = plain.generate(ids, **options)
    start = "generate.. runs on transformers' own code, not paged, because .*"
    with pytest.warns(UserWarning, match=start + reason) as seen:
        torch.manual_seed(0)
        got = model.generate(ids, **options)
    ours = [w for w in seen if "not paged" in str(w.message)]
    assert len(ours) == 1 and ours[0].filename == __file__
    with warnings.catch_warnings(record=True) as again:
        warnings.simplefilter("always")
        torch.manual_seed(0)
        model.generate(ids, **options)
    assert not [w for w in again if "not paged" in str(w.message)]  # once for each reason
    assert type(got) is type(want)
    for a, b in ((got, want),) if isinstance(want, torch.Tensor) else ((got.sequences, want.sequences),):
        assert torch.equal(a, b)


class OwnMethod(LlamaForCausalLM):
    def _get_logits_processor(self, *args, **kwargs):
        return LogitsProcessorList([*super()._get_logits_processor(*args, **kwargs), lambda ids, scores: -scores])


class OwnWrapper(OwnMethod):
    _get_logits_processor = functools.wraps(LlamaForCausalLM._get_logits_processor)(OwnMethod._get_logits_processor)


class OwnGenerate(LlamaForCausalLM):
    def generate(self, *args, **kwargs):
        return super().generate(*args, **kwargs).flip(1)


def on_instance(model: nn.Module) -> nn.Module:
    own = model.prepare_inputs_for_generation
    model.prepare_inputs_for_generation = lambda ids, **kwargs: own(ids.clamp_min(7), **kwargs)
    return model


@pytest.mark.parametrize("build, method", [
    (lambda: OwnMethod(small().config).eval(), "_get_logits_processor"),
    (lambda: OwnGenerate(small().config).eval(), "generate"), (lambda: on_instance(small()), "prepare_inputs_for_generation"),
    (lambda: OwnWrapper(small().config).eval(), "_get_logits_processor"),
], ids=["method", "generate", "instance", "wraps"])
def test_methods_of_the_models_own_count(build, method) -> None:
    model, want = build(), small().state_dict()
    model.load_state_dict(want)
    want = generated(model)
    with pytest.warns(UserWarning, match=f"because {method} is the model's own, and not transformers'"):
        assert generated(quire.paged(model, **SMALL)) == want
    model.generate.close()


@pytest.mark.parametrize("options", [
    dict(eos_token_id=torch.tensor(12)), dict(max_new_tokens=torch.tensor(5)), dict(do_sample=True, top_p=1e-46)], ids=str)
def test_numbers_as_transformers_reads_them(no_warnings, options, plain, model, batch) -> None:
    same(plain, model, **batch, **{"max_new_tokens": 5, **options})


def test_an_end_token_behind_a_prompt_is_no_padding(no_warnings, plain, model, batch) -> None:
    """A turn of a chat ends so; the answer would be to the chat without it."""
    ids = torch.cat([batch.input_ids[2:], torch.tensor([[0]])], 1)  # which pads, too
    for options in (dict(max_new_tokens=5, eos_token_id=torch.tensor([0])), dict(max_new_tokens=np.int64(5))):
        same(plain, model, ids, **options)


def test_no_top_k_if_that_is_asked_for(no_warnings, model, batch) -> None:
    options = dict(max_new_tokens=1, do_sample=True, temperature=100.0)
    rows = batch.input_ids[2:].repeat(200, 1)
    assert len(model.generate(rows, **options)[:, -1].unique()) <= 50
    assert len(model.generate(rows, **options, top_k=None)[:, -1].unique()) > 100


def test_other_options_beside_such_numbers(plain, model, batch) -> None:
    """They count as ever."""
    options = dict(max_new_tokens=3, eos_token_id=torch.tensor([12]), output_hidden_states=True, return_dict_in_generate=True)
    want = plain.generate(**batch, **options)
    with pytest.warns(UserWarning, match="because quire does not have output_hidden_states"):
        got = model.generate(**batch, **options)
    assert torch.equal(got.sequences, want.sequences)
    torch.testing.assert_close(got.hidden_states, want.hidden_states)


def test_masks_with_holes_and_windows() -> None:
    """transformers counts masked tokens in a window."""
    ids, mask = torch.tensor([[5, 6, 7, 8, 9, 3]]), torch.tensor([[1, 0, 0, 1, 1, 1]])
    config = MistralConfig(**{**small().config.to_dict(), "sliding_window": 4, "model_type": "mistral"})
    torch.manual_seed(0)
    model = MistralForCausalLM(config).eval()
    want = model.generate(ids, attention_mask=mask, max_new_tokens=8)
    quire.paged(model, **SMALL)
    with pytest.warns(UserWarning, match="the attention_mask has holes"):
        assert torch.equal(model.generate(ids, attention_mask=mask, max_new_tokens=8), want)
    model.generate.close()


def test_an_empty_batch_is_transformers_own_affair(plain, model) -> None:
    def outcome(of) -> object:
        try:
            return of.generate(input_ids=torch.zeros(0, 3, dtype=torch.long), max_new_tokens=4).shape
        except Exception as error:
            return type(error)

    with pytest.warns(UserWarning, match="because it was given an empty batch"):
        got = outcome(model)
    assert got == outcome(plain)


@pytest.mark.parametrize(("options", "message"), [
    (dict(num_return_sequences=2), "because Greedy methods .* do not support `num_return_sequences`"),
    (dict(max_length=3, max_new_tokens=None), "max_length=3 counts the prompt's tokens too"),
    (dict(not_an_argument=3), r"quire does not have the arguments \['not_an_argument'\]"),
    (dict(output_score=True), r"quire does not have the arguments \['output_score'\]"),
    (dict(do_sample=True, temperature=0.0), "do_sample=True with temperature=0.0; for the likeliest tokens set"),
])
def test_what_transformers_refuses_it_still_refuses(options, message, plain, model, batch, monkeypatch) -> None:
    for m in (plain, model):
        monkeypatch.setattr(m, "generation_config", GenerationConfig(pad_token_id=0, eos_token_id=0))
    with pytest.raises(ValueError) as want:
        plain.generate(batch.input_ids, **options)
    with pytest.warns(UserWarning, match=message), pytest.raises(ValueError) as got:
        model.generate(batch.input_ids, **options)
    assert str(got.value) == str(want.value)


def test_streamer_of_a_batch_is_transformers_own_error(model, batch, tokenizer) -> None:
    with pytest.raises(ValueError, match="TextStreamer only supports batch size 1"):
        model.generate(**batch, max_new_tokens=4, streamer=TextStreamer(tokenizer))


@pytest.mark.parametrize("options", [
    {}, dict(repetition_penalty=1.3), dict(bad_words_ids=True), dict(bad_words_ids=True, num_beams=2),
    dict(no_repeat_ngram_size=2, eos_token_id=None), dict(guidance_scale=1.5)], ids=str)
def test_padding_on_the_right(options, plain, model, batch) -> None:
    """The prompt goes on where it ends, and a warning says so: transformers goes on from the padding. Processors see a token
    behind the prompt's last one."""
    ids, mask = (torch.stack([row.roll(-int((1 - m).sum())) for row, m in zip(of, batch.attention_mask, strict=True)])
                 for of in (batch.input_ids, batch.attention_mask))
    if "bad_words_ids" in options:  # what would come first
        bad = plain.generate(**batch, max_new_tokens=1, **{**options, "bad_words_ids": None})[:, -2:].tolist()
        options = {**options, "bad_words_ids": bad}
    with pytest.warns(UserWarning, match="quire: the last token of a prompt is masked: the prompt ends before it"):
        got = model.generate(ids, attention_mask=mask, max_new_tokens=4, **options)
    assert torch.equal(got[:, :-4], ids)
    rows = [plain.generate(row[m.bool()][None], max_new_tokens=4, **options)[0, -4:] for row, m in zip(ids, mask, strict=True)]
    assert torch.equal(got[:, -4:], torch.stack(rows))


def test_padding_on_the_right_of_prompts_that_are_healed(model, batch, tokenizer) -> None:
    """Healing changes the last token of a prompt, and the prompts of the result would not be those that went on."""
    ids, mask = batch.input_ids.roll(-1, 1), batch.attention_mask.clone()
    mask[:, -1] = 0
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.add_special_tokens({"bos_token": tokenizer.convert_ids_to_tokens(1)})  # which healing asks for
    with pytest.warns(UserWarning, match="token_healing changes the last token of a prompt, and here padding follows it"), \
            contextlib.suppress(RuntimeError):  # of transformers' own, for some masks
        model.generate(ids, attention_mask=mask, max_new_tokens=2, token_healing=True, tokenizer=tokenizer)


def test_training_mode(no_warnings, plain, model, batch) -> None:
    """A trainer generates in training mode, which changes nothing in a model without dropout; and the mode stays."""
    engine = model.generate.engine
    model.train()
    try:
        got = model.generate(batch.input_ids[2:], max_new_tokens=4)
        assert model.training and all(m.training for m in model.modules())
    finally:
        model.eval()
    assert torch.equal(got, plain.generate(batch.input_ids[2:], max_new_tokens=4))
    assert model.generate.engine is engine


class Noisy(LlamaForCausalLM):
    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        return out if not self.training else type(out)(logits=-out.logits)


def dropping(model: nn.Module) -> nn.Module:
    model.model.layers[0].self_attn.attention_dropout = 0.5
    return model


def with_dropout(model: nn.Module) -> nn.Module:
    model.model.layers[0].mlp.act_fn = nn.Sequential(model.model.layers[0].mlp.act_fn, nn.Dropout(0.5))
    return model


@pytest.mark.parametrize("build, message", [
    pytest.param(lambda: dropping(small()), "model.layers.0.self_attn.attention_dropout is 0.5", marks=pytest.mark.slow),
    (lambda: with_dropout(small()), "model.layers.0.mlp.act_fn.1.p is 0.5"),
    (lambda: Noisy(small().config), "Noisy.forward asks whether it is in training mode"),
], ids=["attribute", "module", "code"])
def test_training_mode_that_changes_something(build, message) -> None:
    """A rollout without the dropout that the trainer's model has would be another policy's."""
    model = quire.paged(build().train(), **SMALL)
    torch.manual_seed(0)
    with pytest.warns(UserWarning, match=f"because the model is in training mode, and {message}"):
        got = generated(model)
    model.generate.close()
    torch.manual_seed(0)
    assert got == generated(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        generated(quire.paged(model.eval(), **SMALL))
    model.generate.close()


def test_autocast(plain, model, batch) -> None:
    """Transformers' generate computes in autocast's dtype, and an engine does not."""
    with torch.autocast("cpu", torch.bfloat16), pytest.warns(UserWarning, match="because torch.autocast is on"):
        got = model.generate(**batch, max_new_tokens=NEW)
        assert torch.equal(got, plain.generate(**batch, max_new_tokens=NEW))


def test_the_rest_of_the_model_is_as_ever(plain, model, batch) -> None:
    with torch.no_grad():
        for kwargs in (dict(batch), dict(input_ids=batch.input_ids[2:], labels=batch.input_ids[2:])):
            want, got = plain(**kwargs), model(**kwargs)
            assert torch.equal(want.logits, got.logits) and (want.loss is None or torch.equal(want.loss, got.loss))
    assert model.state_dict().keys() == plain.state_dict().keys()
    assert model.config.to_dict() == plain.config.to_dict()
    assert model.generate.__doc__ == plain.generate.__doc__
    assert isinstance(model, type(plain)) and "Llama" in repr(model)


def test_a_copy_of_a_paged_model_is_a_model_of_its_own(model, batch, plain) -> None:
    want = plain.generate(**batch, max_new_tokens=NEW)
    assert torch.equal(model.generate(**batch, max_new_tokens=NEW), want)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for layer in copied.model.layers:
            layer.mlp.down_proj.weight.mul_(0.1)
    changed = copied.generate(**batch, max_new_tokens=NEW)
    assert not torch.equal(changed, want)
    assert copied.generate.engine is not model.generate.engine
    copied.generate.close()
    assert torch.equal(copied.generate(**batch, max_new_tokens=NEW), changed)
    assert torch.equal(model.generate(**batch, max_new_tokens=NEW), want)
