"""``Engine.beam_search``: vLLM's names and its search, over pages that beams share (``lockstep.Rows``).

Each step extends each beam by its 2 * beam_width likeliest tokens. Continuations that end there are done; the best beam_width
of the others go on. The score of a sequence is its log probability / length ** length_penalty, where the length counts the
prompt and not the end token: vLLM's formula. ``generate(num_beams=...)`` of a paged model is transformers' search, whose length
is that of the continuation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from quire.graph_runner.lockstep import Rows, in_parts
from quire.graph_runner.prompts import Prompt, as_prompts, token_ids_of
from quire.graph_runner.request import Logprob

if TYPE_CHECKING:
    from quire.graph_runner.engine import Engine


@dataclass(frozen=True)
class BeamSearchParams:
    """vLLM's. Raises ValueError or TypeError for a value out of range, or of the wrong type.

    Args:
        beam_width: beams of a prompt, and sequences in its result, >= 1.
        max_tokens: that a beam may get, >= 1.
        ignore_eos: go on after the end-of-sequence token.
        temperature: 0 only: beams are the likeliest sequences of the model's own distribution. (vLLM takes other values, and
            extends beams by a sampled token too.)
        length_penalty: exponent of the length by which a log probability is divided; more than 0 favours long sequences.
        include_stop_str_in_output: False only, for there are no stop strings; tokens and text have the end token.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        for name in ("beam_width", "max_tokens"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name} must be an integer, got {value!r}")
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if not isinstance(self.ignore_eos, bool):
            raise TypeError(f"ignore_eos must be True or False, got {self.ignore_eos!r}")
        if isinstance(self.length_penalty, bool) or not isinstance(self.length_penalty, int | float):
            raise TypeError(f"length_penalty must be a number, got {self.length_penalty!r}")
        if not math.isfinite(self.length_penalty):
            raise ValueError(f"length_penalty must be finite, got {self.length_penalty}")
        if self.temperature != 0:
            raise ValueError(f"temperature={self.temperature!r}: beam_search takes the likeliest tokens and has none; leave it "
                             "at 0. Sampled beams: generate(num_beams=..., do_sample=True) of a paged model")
        if self.include_stop_str_in_output is not False:
            raise ValueError(f"include_stop_str_in_output={self.include_stop_str_in_output!r}: beam_search has no stop "
                             "strings; leave it at False")


@dataclass
class BeamSearchSequence:
    """A sequence, with vLLM's names.

    Args:
        tokens: token ids of the prompt and the continuation, the end token included.
        logprobs: for each token of the continuation, the log probabilities of the likeliest tokens at its position by token id.
        cum_logprob: log probability of the continuation.
        text: of all ``tokens``, special ones included; None without a tokenizer.
        finish_reason: "stop" after the end token, else "length". stop_reason: the end token, or None.
    """

    orig_prompt: Prompt
    tokens: list[int]
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    cum_logprob: float = 0.0
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass
class BeamSearchOutput:
    """The ``sequences`` of a prompt, best first: beam_width of them, or fewer where there are no more."""

    sequences: list[BeamSearchSequence]


class _Search:
    """The beams of one prompt."""

    def __init__(self, prompt: Prompt, ids: list[int], params: BeamSearchParams, ends: frozenset[int]) -> None:
        self.params, self.ends = params, ends
        self.beams, self.done = [BeamSearchSequence(prompt, ids)], list[BeamSearchSequence]()

    def score(self, total: float, length: int, last: int) -> float:
        return total / (length - (last in self.ends)) ** self.params.length_penalty

    def step(self, likeliest: Sequence[dict[int, Logprob]]) -> list[int]:
        """Extend the beams; returns the beam that each of the new ones comes from. ``likeliest``: after each beam."""
        found = []
        for i, (beam, tokens) in enumerate(zip(self.beams, likeliest, strict=False)):
            for token, entry in tokens.items():
                total = beam.cum_logprob + entry.logprob
                if token in self.ends and not self.params.ignore_eos:
                    self.done.append(_extended(beam, token, tokens, total, "stop"))
                else:
                    found.append((self.score(total, len(beam.tokens) + 1, token), i, token, total))
        found.sort(key=lambda candidate: candidate[0], reverse=True)
        found = found[: self.params.beam_width]
        self.beams = [_extended(self.beams[i], token, likeliest[i], total) for _, i, token, total in found]
        return [i for _, i, _, _ in found]

    def best(self, tokenizer: Any) -> BeamSearchOutput:
        for beam in self.beams:
            beam.finish_reason = "length"
        ranked = sorted([*self.done, *self.beams], key=lambda s: self.score(s.cum_logprob, len(s.tokens), s.tokens[-1]),
                        reverse=True)[: self.params.beam_width]
        for beam in ranked if tokenizer is not None else ():
            beam.text = tokenizer.decode(beam.tokens)
        return BeamSearchOutput(ranked)


def _extended(beam: BeamSearchSequence, token: int, likeliest: dict[int, Logprob], total: float, reason: str | None = None
              ) -> BeamSearchSequence:
    return BeamSearchSequence(beam.orig_prompt, [*beam.tokens, token], [*beam.logprobs, likeliest], total,
                              finish_reason=reason, stop_reason=None if reason is None else token)


def beam_search(engine: Engine, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams, *,
                concurrency_limit: int | None = None, done: Callable[[], Any] = lambda: None) -> list[BeamSearchOutput]:
    """See ``Engine.beam_search``. ``done`` is called once for each prompt."""
    if not isinstance(params, BeamSearchParams):
        raise TypeError(f"params must be BeamSearchParams, got {str(params)[:60]!r}; write BeamSearchParams(beam_width=4, "
                        "max_tokens=32)")
    if concurrency_limit is not None and (type(concurrency_limit) is not int or concurrency_limit < 1):
        raise ValueError(f"concurrency_limit must be at least 1, or None for no limit, got {concurrency_limit!r}")
    limits, tokenizer = engine.limits, engine.tokenizer
    width, most = params.beam_width, engine.config.max_num_seqs
    if width > most:
        raise ValueError(f"beam_width={width}, and the engine runs {most} sequences at once; make it with max_num_seqs={width}")
    searches = [_Search(p, token_ids_of(p, tokenizer, limits.vocab_size, limits.max_model_len), params, engine._eos)
                for p in as_prompts(prompts)]
    for part, rows in in_parts(searches, min(most // width, concurrency_limit or most), lambda some: Rows(
            engine, [s.beams[0].tokens for s in some for _ in range(width)], params.max_tokens)):
        _run(part, rows, params, tokenizer)
        for _ in part:
            done()
    return [search.best(tokenizer) for search in searches]


def _run(searches: Sequence[_Search], rows: Rows, params: BeamSearchParams, tokenizer: Any) -> None:
    """Search for ``searches``, with ``beam_width`` of the rows for each. Rows beyond a prompt's beams repeat the first one."""
    width = params.beam_width
    with rows:
        for count in range(params.max_tokens):
            logits = rows.logits()
            values, ids = logits.log_softmax(dim=-1).topk(min(2 * width, logits.shape[-1]), dim=-1)
            each = ids.tolist()
            likeliest = [_entries(row_ids, row_values, tokenizer)
                         for row_ids, row_values in zip(each, values.tolist(), strict=True)]
            sources: list[int] = []
            tokens: list[int] = []
            for i, search in enumerate(searches):
                first = i * width
                chosen = search.step(likeliest[first : first + width])
                idle = width - len(chosen)
                sources += [first + c for c in [*chosen, *[chosen[0] if chosen else 0] * idle]]
                newest = [beam.tokens[-1] for beam in search.beams]
                tokens += [*newest, *[newest[0] if newest else each[first][0]] * idle]
            if count + 1 == params.max_tokens or not any(search.beams for search in searches):
                return
            rows.reorder(sources)
            rows.append(tokens)


def _entries(ids: Sequence[int], values: Sequence[float], tokenizer: Any) -> dict[int, Logprob]:
    """The likeliest tokens at a position. Raises RuntimeError where the model gives no distribution."""
    if not math.isfinite(values[0]):
        raise RuntimeError("the logits of a beam contain NaN, or are all -inf; the model overflowed")
    return {token: Logprob(logprob, rank, None if tokenizer is None else tokenizer.decode([token]))
            for rank, (token, logprob) in enumerate(zip(ids, values, strict=True), 1) if logprob > -math.inf}
