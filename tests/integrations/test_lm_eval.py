"""lm-eval on an engine: the scores of lm-eval's own HFLM, and HFLM itself over a paged model."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

pytest.importorskip("lm_eval", reason="pip install 'quire[integrations]'")

import lm_eval
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

import quire
from quire.graph_runner.model_runner import ModelRunner
from quire.integrations.lm_eval import QuireLM
from tests.tiny import PROMPTS, assert_idle, load_model, load_tokenizer

OPTIONS = dict(num_pages=80, max_num_seqs=8, max_model_len=128, cudagraph_capture_sizes=[])
TEXTS = [" ".join(PROMPTS), PROMPTS[3] * 6, "A"]


def tasks(folder: Any) -> list[dict[str, Any]]:
    """A multiple choice, a perplexity and a generation, of local files."""
    def task(name: str, documents: list[dict[str, Any]], **config: Any) -> dict[str, Any]:
        path = folder / f"{name}.json"
        path.write_text("\n".join(map(json.dumps, documents)))
        return {"task": name, "dataset_path": "json", "dataset_kwargs": {
            "data_files": {"test": str(path)}, "cache_dir": str(folder / "cache")}, "test_split": "test", **config}

    choices = [{"q": q, "options": [" a mouse", " soup and bread", "er"], "gold": i % 3} for i, q in enumerate(PROMPTS)]
    return [
        task("choice", choices, output_type="multiple_choice", doc_to_text="{{q}}", doc_to_choice="{{options}}",
             doc_to_target="{{gold}}", metric_list=[{"metric": m, "aggregation": "mean"} for m in ("acc", "acc_norm")]),
        task("perplexity", [{"text": text} for text in TEXTS], output_type="loglikelihood_rolling", doc_to_text="",
             doc_to_target="{{text}}", metric_list=[{"metric": m} for m in ("word_perplexity", "bits_per_byte")]),
        task("continue", [{"q": q, "a": "x"} for q in PROMPTS[:4]], output_type="generate_until", doc_to_text="{{q}}",
             doc_to_target="{{a}}", generation_kwargs={"until": [".", "\n"], "max_gen_toks": 12, "do_sample": False},
             metric_list=[{"metric": "exact_match", "aggregation": "mean"}]),
    ]


def evaluate(lm: Any, folder: Any) -> dict[str, Any]:
    """Of each task: its metrics, and what each document got."""
    folder.mkdir()
    out = lm_eval.simple_evaluate(model=lm, tasks=tasks(folder), bootstrap_iters=0, verbosity="ERROR")
    return {name: ({k: v for k, v in out["results"][name].items() if isinstance(v, float)},
                   [sample["filtered_resps"] for sample in out["samples"][name]]) for name in out["results"]}


@pytest.fixture
def steps(monkeypatch) -> list[int]:
    """For each step that ran for logits, how many tokens had theirs computed."""
    found: list[int] = []
    own = ModelRunner.logits_of

    def counted(self: ModelRunner, batch: Any) -> Any:
        found.append(len(batch.rows) + batch.num_scored)
        return own(self, batch)

    monkeypatch.setattr(ModelRunner, "logits_of", counted)
    return found


@pytest.mark.slow
def test_the_scores_of_hflm(tmp_path, steps) -> None:
    """An evaluation in the same process must say the same as the one that everybody runs."""
    tokenizer = load_tokenizer()
    want = evaluate(HFLM(model_of(2), tokenizer=tokenizer, backend="causal", max_length=128, batch_size=2), tmp_path / "plain")
    lm = QuireLM(model_of(2), tokenizer, **OPTIONS)
    assert lm.max_length == 128
    got = evaluate(lm, tmp_path / "quire")
    assert lm.engine.stats().prompt_tokens > 0
    assert not lm.engine.has_unfinished and not lm.engine.requests
    lm.close()
    model = quire.paged(model_of(2), **OPTIONS)
    assert not steps
    paged = evaluate(HFLM(model, tokenizer=tokenizer, backend="causal", max_length=128, batch_size=2), tmp_path / "paged")
    assert sum(steps) > 100 and not model.generate.warned
    for other in (got, paged):
        assert other["continue"][1] == want["continue"][1]
        for name in ("choice", "perplexity", "continue"):
            assert other[name][0] == pytest.approx(want[name][0], rel=1e-4), name
        for mine, theirs in zip(other["choice"][1], want["choice"][1], strict=True):
            assert [greedy for _, greedy in mine] == [greedy for _, greedy in theirs]
            assert [score for score, _ in mine] == pytest.approx([score for score, _ in theirs], abs=1e-4)


def model_of(layers: int) -> Any:
    model = load_model(num_layers=layers)
    model.generation_config.max_new_tokens = None  # HFLM asks by max_length, over which transformers prefers it
    return model


def test_hflm_over_a_paged_model_is_paged(steps) -> None:
    """Its generate has stopping criteria of its own, its log-likelihoods read the logits of every token."""
    lm = HFLM(quire.paged(model_of(1), **OPTIONS), tokenizer=load_tokenizer(), backend="causal", batch_size=2)
    requests = [Instance("generate_until", {}, (PROMPTS[i], {"until": ["."], "max_gen_toks": 5}), 0) for i in (0, 1)]
    texts = lm.generate_until(requests, disable_tqdm=True)
    assert steps and len(texts) == 2
    steps.clear()
    asked = [((), [5, 6, 7], [8, 9]), ((), [5], [6, 7, 8]), ((), [9], [5] * 60)]
    found = lm._loglikelihood_tokens(asked, disable_tqdm=True)
    assert sum(steps) == 60 + 60 + 3  # two and one, the longest first; lm-eval pads rows, and reads no logits there
    plain = HFLM(model_of(1), tokenizer=load_tokenizer(), backend="causal", batch_size=2)
    want = plain._loglikelihood_tokens(asked, disable_tqdm=True)
    assert [score for score, _ in found] == pytest.approx([score for score, _ in want], abs=1e-4)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in want]
    assert_idle(lm.model.generate.engine)
    own = QuireLM(lm.model, load_tokenizer())
    assert own.engine is lm.model.generate.engine and own.generate_until(requests, disable_tqdm=True) == texts
    with pytest.raises(ValueError, match="its engine has its options already; give page_size to quire.paged"):
        QuireLM(lm.model, load_tokenizer(), page_size=8)
    with pytest.raises(ValueError, match="a continuation has 200 tokens; from 1 to 128 can be scored"):
        own._loglikelihood_tokens([(None, [1], [5] * 200)], disable_tqdm=True)


@pytest.mark.parametrize(("special", "until", "options"), [
    ("eos_token", ["zzz"], {}), ("extra_special_tokens", ["<|im_end|>"], {}),
    ("eos_token", ["zzz"], {"min_new_tokens": 20}),  # which holds back the model's end token, and no stops
    ("extra_special_tokens", ["ow<|im_end|>", "t. It", "\n\nYour"], {}),
    ("extra_special_tokens", [" round eyes quiet", "zzz"], {}),  # it has an <|im_end|> within, which does not count in the end
    ("extra_special_tokens", [" library with his", "<|im_end|>", "bird of"], {"min_new_tokens": 12})], ids=str)
def test_stops_that_are_special_tokens(special, until, options) -> None:
    """They end a text as in HFLM, which does not return them, and other stops are found beside them. Chat models end their
    turns so; each answer would have what the model says after its turn, and scores would be wrong without an error."""
    def texts(make: Any) -> list[str]:
        model, tokenizer = model_of(4), load_tokenizer()
        tokenizer.add_special_tokens({special: "<|im_end|>" if special == "eos_token" else ["<|im_end|>"]})
        model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
        head, end = model.get_output_embeddings().weight, tokenizer.convert_tokens_to_ids("<|im_end|>")
        with torch.no_grad():  # <|im_end|> is said where the model would say " and"
            head[end] = 1.05 * head[tokenizer(" and", add_special_tokens=False).input_ids[-1]]
        return make(model, tokenizer).generate_until(requests, disable_tqdm=True)

    requests = [Instance("generate_until", {}, (text, {"until": list(until), "max_gen_toks": 40, **options}), 0)
                for text in ("The owl is", "Tom and Lucy went to the", "Dear Anna,")]
    want = texts(lambda model, tokenizer: HFLM(model, tokenizer=tokenizer, backend="causal", batch_size=1, max_length=128))
    assert texts(lambda model, tokenizer: QuireLM(model, tokenizer, **OPTIONS)) == want
    if until == ["zzz"] or until == ["<|im_end|>"]:
        assert [text.rpartition(" ")[2] for text in want[:2]] == ["eyes", "clown"]


@pytest.mark.parametrize("config, changes", [
    (dict(repetition_penalty=1.8), True), (dict(no_repeat_ngram_size=2), True), *(
        pytest.param(*rest, marks=pytest.mark.slow) for rest in (
            (dict(suppress_tokens=[10, 11, 12]), True), (dict(min_new_tokens=12), False),
            (dict(top_k=1, temperature=2.0), False)))], ids=str)
def test_the_models_generation_config(config, changes) -> None:
    """HFLM's generations follow what a checkpoint says beside the task: a penalty, tokens that may not come, the likeliest
    token only (here where the task asks for sampling)."""
    def texts(make: Any, **config: Any) -> list[str]:
        model = load_model()
        model.generation_config.max_new_tokens = None  # HFLM would take it, and not the task's
        model.generation_config.update(**config)
        return make(model).generate_until(requests, disable_tqdm=True)

    def hflm(model: Any) -> Any:
        return HFLM(model, tokenizer=load_tokenizer(), batch_size=1)

    asked = {"until": ["zzz"], "max_gen_toks": 30} | ({"do_sample": True, "temperature": 0.7} if "top_k" in config else {})
    requests = [Instance("generate_until", {}, (text, asked), 0) for text in PROMPTS[:3]]
    expected = texts(hflm, **config)
    if changes:
        assert expected != texts(hflm)
    assert texts(lambda model: QuireLM(model, load_tokenizer(), **OPTIONS), **config) == expected


@pytest.mark.parametrize("options", [{"until": [""]}, {"until": ["."], "do_sample": True}, {"until": ["."], "use_cache": True},
                                     {"until": ["."], "stop_strings": ["a"]}], ids=str)
def test_options_beside_what_a_request_takes_over(options) -> None:
    """HFLM's text for what it has, and its refusal of what it refuses."""
    def text(lm: Any) -> Any:
        try:
            return lm.generate_until([Instance("generate_until", {}, (PROMPTS[0], {**options, "max_gen_toks": 8}), 0)],
                                     disable_tqdm=True)
        except Exception as error:
            return type(error), str(error)

    hflm = HFLM(model_of(1), tokenizer=load_tokenizer(), backend="causal", batch_size=1)
    lm = QuireLM(model_of(1), load_tokenizer(), **OPTIONS)
    assert text(lm) == text(hflm)
    lm.close()


def test_a_task_that_samples() -> None:
    """Its texts follow lm-eval's torch_random_seed, on an engine that has served others before; and a max_length counts."""
    def texts(lm: Any, seed: int = 0, **options: Any) -> list[str]:
        torch.manual_seed(seed)
        asked = {"until": ["zzz"], "max_gen_toks": 12, **options}
        return lm.generate_until([Instance("generate_until", {}, (PROMPTS[0], asked), i) for i in range(2)], disable_tqdm=True)

    lm, sampled = QuireLM(model_of(1), load_tokenizer(), **OPTIONS), dict(do_sample=True, temperature=1.5)
    first = texts(lm, **sampled)
    assert first == texts(lm, **sampled) != texts(lm, 1, **sampled) and first[0] != first[1]
    hflm = HFLM(model_of(1), tokenizer=load_tokenizer(), backend="causal", batch_size=1)
    assert texts(lm, max_length=9) == texts(hflm, max_length=9) != texts(hflm)
    lm.close()
