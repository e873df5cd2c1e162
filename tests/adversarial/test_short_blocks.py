"""Models with fewer positions than the row has tokens on which others are traced."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import quire
from quire import UnsupportedAttention
from quire.passes.capture.paged_model import PagedModel
from quire.passes.options import QuireOptions
from tests.adversarial.counting import GPT, numbers

SHORT = 8  # positions of a model


def asserts(model: Any, ids: torch.Tensor) -> torch.Tensor:
    assert ids.shape[1] <= SHORT, f"Cannot forward sequence of length {ids.shape[1]}"
    return model.wpe(numbers(ids))


def fails(model: Any, ids: torch.Tensor) -> torch.Tensor:
    raise ValueError(f"{ids.shape[1]} tokens")


PLACES = {"asserts": asserts, "cut": lambda m, ids: m.pe[:, :SHORT][:, : ids.shape[1]],
          "branches": lambda m, ids: m.wpe(numbers(ids)) * (1 if ids.shape[1] <= SHORT else 2)}


@pytest.mark.parametrize("name", PLACES)
def test_served_up_to_its_positions(name: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """If max_model_len says so, by a trace from the disk too."""
    monkeypatch.setenv("QUIRE_TRACE_CACHE", "1")
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path))
    model, options = GPT(PLACES[name]), dict(page_size=4, num_pages=20, max_num_seqs=4, compiler="eager")
    for _ in range(2):
        with quire.Engine(model, max_model_len=SHORT, **options) as engine:
            outs = engine.generate([[5, 3, 9, 1, 7, 2], [1]], quire.SamplingParams(
                max_tokens=2, temperature=0, ignore_eos=True, logprobs=0))
        for out in outs:
            for n, token in enumerate(out.token_ids):
                with torch.no_grad():
                    want = model(torch.tensor([[*out.prompt_token_ids, *out.token_ids[:n]]]))[0][0, -1].log_softmax(-1)
                assert want.argmax() == token and abs(want[token].item() - out.logprobs[n][token].logprob) < 1e-4
    with pytest.raises(UnsupportedAttention, match=f"for some numbers of tokens .*(<= {SHORT}|> {SHORT})"):
        quire.Engine(model, max_model_len=SHORT + 1, **options)


def test_what_is_wrong_at_any_length_is_told_as_before() -> None:
    for longest in (None, 64, SHORT):
        with pytest.raises(UnsupportedAttention, match=r"GPT's forward raises ValueError .* alone: \d+ tokens"):
            PagedModel(GPT(fails), QuireOptions(compiler="eager", max_model_len=longest))
