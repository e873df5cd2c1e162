"""Calls from inside a step: a request's logits processor that uses the engine in whose step it runs.

The other requests of the step would go on with the inputs of the call's own step, or with pages that it gave back: they lose
the right tokens without an error, or the engine goes on for ever.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import quire
from quire import Engine, SamplingParams
from quire.graph_runner.beam_search import BeamSearchParams
from tests.tiny import GREEDY, assert_idle, small_llama, tokens

pytestmark = pytest.mark.usefixtures("tokens_unchecked", "traces_kept")
SAMPLED = SamplingParams(max_tokens=12, temperature=3.0, top_k=5, seed=3, ignore_eos=True)


def beams(engine: Engine) -> None:
    engine.beam_search([[9], [8]], BeamSearchParams(beam_width=1, max_tokens=3))


def same_weights(engine: Engine) -> None:
    name, parameter = next(iter(engine.model.named_parameters()))
    engine.update_weights_from_tensors({name: parameter.detach().clone()})


CALLS: dict[str, Callable[[Engine], Any]] = {
    "generate": lambda engine: engine.generate([[9, 8]], GREEDY),
    "beam_search": beams, "update_weights": same_weights,
    "reset_prefix_cache": lambda engine: engine.reset_prefix_cache(reset_running_requests=True),
}


@pytest.mark.parametrize("name", CALLS)
def test_it_is_refused_and_others_get_their_tokens(name: str, engine: Engine, prompts: Any) -> None:
    others = [GREEDY, SAMPLED, replace(GREEDY, allowed_token_ids=[50, 51, 52], ignore_eos=True)]
    want = [engine.generate([prompts[1]], one)[0].token_ids for one in others]
    seen: list[str] = []

    def calls(output: list[int], logits: torch.Tensor) -> torch.Tensor:
        if 2 <= len(output) <= 4:
            try:
                CALLS[name](engine)
            except (RuntimeError, ValueError) as error:
                seen.append(str(error))
        return logits

    caller, *found = engine.generate([prompts[0], *[prompts[1]] * 3], [
        replace(GREEDY, max_tokens=12, logits_processors=[calls], ignore_eos=True), *others])
    assert tokens(found) == want and caller.error is None
    assert len(seen) == 3 and all("logits processor" in text for text in seen)
    assert_idle(engine)


OPTIONS: dict[str, Any] = dict(num_pages=40, max_num_seqs=4, max_model_len=100)
NEW = dict(max_new_tokens=6, do_sample=False, pad_token_id=0, eos_token_id=None)


def test_generate_in_a_processor_runs_transformers_own_code() -> None:
    """Of a request's, of ``generate`` in lockstep, and of one that runs transformers' code itself."""
    plain, ids = small_llama(0.3), torch.randint(1, 60, (6, 9))
    paged = quire.paged(small_llama(0.3), **OPTIONS)
    elsewhere = torch.arange(9)[None] * 7
    inner = [dict(no_repeat_ngram_size=2), dict(num_beams=2), dict(position_ids=elsewhere), dict(max_new_tokens=3)]
    want = [plain.generate(ids[:1], **{**NEW, **options}) for options in inner]
    got: list[torch.Tensor] = []

    def asks(given: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if not got:
            got.extend(paged.generate(ids[:1], **{**NEW, **options}) for options in inner[:3])
        return scores

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        for outer in (dict(), dict(max_new_tokens=6.0)):  # odd numbers: the rows that do not fit are seen late
            for rows in (ids[:2], ids):
                got.clear()
                paged.generate(rows, logits_processor=[asks], **{**NEW, **outer})
                assert all(map(torch.equal, got, want[:3])) and len(got) == 3

        def requests_own(output: list[int], logits: torch.Tensor) -> torch.Tensor:
            if len(output) == 2:
                got.append(paged.generate(ids[:1], **{**NEW, **inner[0]}))
            return logits

        got.clear()
        engine = paged.generate.engine
        engine.generate(ids[0].tolist(), replace(GREEDY, max_tokens=5, logits_processors=[requests_own]))
        assert all(map(torch.equal, got, want)) and len(got) == 1
    assert_idle(engine)
    paged.generate.close()
