"""``Engine.beam_search``: vLLM's search. A user loses the likeliest sequences, or code written for vLLM, if this fails."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import quire
from quire import BeamSearchParams, SamplingParams
from tests.tiny import assert_idle, small_llama

pytestmark = pytest.mark.usefixtures("tokens_unchecked", "traces_kept")
PROMPTS = [[5, 6, 7, 8, 9], [20, 21], [5, 6, 7, 8, 9]]
ENDS = frozenset((12, 41))


@pytest.fixture(scope="module")
def engine():
    model = small_llama(0.3, eos_token_id=list(ENDS), pad_token_id=0)
    with quire.Engine(model, page_size=4, num_pages=64, max_num_seqs=9, max_model_len=60, cudagraph_capture_sizes=[]) as made:
        yield made


def searched(model: Any, prompt: list[int], params: BeamSearchParams) -> list[tuple[list[int], float]]:
    """The search by hand: whole forwards of one sequence at a time; (tokens, log probability) of the results."""
    beams: list[tuple[list[int], float]] = [(prompt, 0.0)]
    done: list[tuple[list[int], float]] = []

    def score(of: tuple[list[int], float]) -> float:
        return of[1] / (len(of[0]) - (of[0][-1] in ENDS)) ** params.length_penalty

    for _ in range(params.max_tokens):
        new = []
        for ids, total in beams:
            with torch.no_grad():
                after = model(torch.tensor([ids])).logits[0, -1].float().log_softmax(-1)
            for value, token in zip(*(x.tolist() for x in after.topk(2 * params.beam_width)), strict=True):
                ended = token in ENDS and not params.ignore_eos
                (done if ended else new).append(([*ids, token], total + value))
        beams = sorted(new, key=score, reverse=True)[: params.beam_width]
    return sorted(done + beams, key=score, reverse=True)[: params.beam_width]


@pytest.mark.parametrize("options", [
    dict(), dict(ignore_eos=True, beam_width=4), dict(length_penalty=-2.0), dict(beam_width=1)], ids=str)
def test_the_search_of_vllm(options, engine) -> None:
    params = BeamSearchParams(**{"beam_width": 3, "max_tokens": 7, **options})
    found = engine.beam_search(PROMPTS, params, concurrency_limit=3 if options else None)
    for prompt, output in zip(PROMPTS, found, strict=True):
        want = searched(engine.model, prompt, params)
        assert [s.tokens for s in output.sequences] == [ids for ids, _ in want]
        for sequence, (ids, total) in zip(output.sequences, want, strict=True):
            assert sequence.cum_logprob == pytest.approx(total, abs=1e-4)
            ended = ids[-1] in ENDS and not params.ignore_eos
            assert (sequence.finish_reason, sequence.stop_reason) == (("stop", ids[-1]) if ended else ("length", None))
            chosen = [entry[token].logprob for token, entry in zip(ids[len(prompt):], sequence.logprobs, strict=True)]
            assert sum(chosen) == pytest.approx(total, abs=1e-4) and sequence.orig_prompt == prompt
    if not options:
        assert any(s.finish_reason == "stop" for o in found for s in o.sequences)
    assert_idle(engine)


def test_what_is_refused(engine) -> None:
    for bad, message in ((dict(beam_width=0), "beam_width must be at least 1"), (dict(temperature=0.7), "leave it at 0"),
                         (dict(include_stop_str_in_output=True), "has no stop strings"),
                         (dict(length_penalty=float("nan")), "finite")):
        with pytest.raises(ValueError, match=message):
            BeamSearchParams(**{"beam_width": 2, "max_tokens": 3, **bad})
    with pytest.raises(TypeError, match="write BeamSearchParams"):
        engine.beam_search(PROMPTS, SamplingParams())
    with pytest.raises(ValueError, match="make it with max_num_seqs=10"):
        engine.beam_search(PROMPTS, BeamSearchParams(10, 3))
    with pytest.raises(ValueError, match="may make a sequence of 62 tokens"):
        engine.beam_search(PROMPTS[1], BeamSearchParams(2, 60))
    with pytest.raises(TypeError, match=r"lora_request must be None.*set_adapter\(name\) of the model"):
        engine.beam_search(PROMPTS, BeamSearchParams(2, 3), lora_request="poet")
    assert len(engine.beam_search(PROMPTS[:1], BeamSearchParams(2, 3), lora_request=None)) == 1
    assert_idle(engine)


@pytest.mark.parametrize("of", [SamplingParams, BeamSearchParams])
def test_the_page_lists_each_field(of) -> None:
    """docs/vllm.md: a field that is missing there is one that a user cannot look up; refused ones are."""
    text = (Path(__file__).parents[2] / "docs/vllm.md").read_text().split(f"## {of.__name__}")[1].split("\n## ")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \| (\w+) \|", text, re.M))
    assert set(rows) == {field.name for field in dataclasses.fields(of)}
    required = {f.name: 2 for f in dataclasses.fields(of) if f.default is dataclasses.MISSING}
    for name, verdict in rows.items():
        if verdict == "refused":
            with pytest.raises(ValueError, match=name):
                of(**{**required, name: not getattr(of, name)})
