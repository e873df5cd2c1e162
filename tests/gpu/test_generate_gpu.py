"""``generate`` in lockstep and continuous batching by transformers' names, on captured graphs."""

import pytest
import torch
from transformers import GenerationConfig

import quire
from tests.tiny import PROMPTS, assert_idle, load_model, load_tokenizer


@pytest.fixture(scope="module")
def pair():
    model = quire.paged(load_model("cuda"), num_pages=200, max_num_seqs=8, max_model_len=300)
    yield load_model("cuda"), model
    assert_idle(model.generate.engine)
    model.generate.close()


@pytest.mark.parametrize("options", [
    dict(no_repeat_ngram_size=2), dict(num_beams=2, num_return_sequences=2, return_dict_in_generate=True, output_scores=True),
    dict(return_dict_in_generate=True, output_scores=True, do_sample=True, top_k=5)], ids=str)
def test_lockstep(options, pair) -> None:
    """The logits of a step are read before the next replay writes over them."""
    batch = load_tokenizer()(list(PROMPTS[:3]), return_tensors="pt", padding=True).to("cuda")
    outs = []
    for model in pair:
        torch.manual_seed(0)
        outs.append(model.generate(**batch, max_new_tokens=24, **options))
    if isinstance(outs[0], torch.Tensor):
        assert torch.equal(*outs)
    else:
        assert torch.equal(outs[0].sequences, outs[1].sequences)
        for a, b in zip(outs[0].scores, outs[1].scores, strict=True):
            torch.testing.assert_close(a, b, atol=1e-2, rtol=1e-3)
    assert pair[1].generate.engine.runner.graphs.stats.replayed > 0


@pytest.mark.parametrize("options", [
    dict(repetition_penalty=1.5), dict(repetition_penalty=1.05, suppress_tokens=[12, 358], bad_words_ids=[[20]]),
    dict(suppress_tokens=[12, 358], min_new_tokens=20)], ids=str)
def test_requests_with_edits(options, pair, monkeypatch) -> None:
    """Their counts are in kernels of their own, after the step's graph. (Without padding, which older releases of transformers
    penalize.)"""
    monkeypatch.setattr(pair[1].generate.engine.runner, "logits_of", None)  # of calls in lockstep
    for prompt in PROMPTS[:3]:
        batch = load_tokenizer()([prompt], return_tensors="pt").to("cuda")
        want, got = (model.generate(**batch, max_new_tokens=24, **options) for model in pair)
        assert torch.equal(got, want)


def test_generate_batch(pair) -> None:
    tokenizer = load_tokenizer()
    ids = [tokenizer(p)["input_ids"] for p in PROMPTS]
    found = pair[1].generate_batch(ids, generation_config=GenerationConfig(max_new_tokens=16, eos_token_id=-1))
    for prompt, output in zip(ids, found.values(), strict=True):
        row = torch.tensor([prompt], device="cuda")
        want = pair[0].generate(row, attention_mask=torch.ones_like(row), max_new_tokens=16, do_sample=False, eos_token_id=None)
        assert output.generated_tokens == want[0, len(prompt):].tolist()
