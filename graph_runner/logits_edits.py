"""Edits that a request makes to its logits before a token is sampled, read from its SamplingParams."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from quire.graph_runner.sampling_params import GenerateParams, SamplingParams


@dataclass(frozen=True, eq=False)
class LogitsEdits:
    """Edits of one request's logits; see SamplingParams.

    Args:
        added: what is added to logits, by token; -inf for tokens that are never sampled.
        allowed: all others are excluded; empty: none is.
        words: sequences whose last token must not follow the others.
        processors: functions of the prompt's tokens, the continuation's, and the row's logits (V,).
        penalties: repetition, frequency, presence; None: all off.
        trace: tokens to give out instead of sampled ones.
    """

    added: dict[int, float] = field(default_factory=dict)
    allowed: tuple[int, ...] = ()
    words: tuple[tuple[int, ...], ...] = ()
    processors: tuple[Callable[..., Any], ...] = ()
    penalties: tuple[float, float, float] | None = None
    trace: tuple[int, ...] = ()

    @classmethod
    def of(cls, params: SamplingParams, tokenizer: Any, num_logits: int) -> LogitsEdits | None:
        """The edits that ``params`` ask for, or None. Raises ValueError for token ids without logits, or bad words without a
        tokenizer; TypeError for a processor of another form."""
        for name in ("allowed_token_ids", "trace_decode_token_ids", "logit_bias"):
            outside = [token for token in getattr(params, name) or () if token >= num_logits]
            if outside:
                raise ValueError(f"{name} {outside[:5]} have no logits; the model has {num_logits}")
        penalties = params.repetition_penalty, params.frequency_penalty, params.presence_penalty
        words = [word for text in params.bad_words or () for word in _tokens_of(text, tokenizer) if max(word) < num_logits]
        never = [word[0] for word in words if len(word) == 1]
        if isinstance(params, GenerateParams):
            never += [token for token in params.excluded if token < num_logits]
        made = cls(dict(params.logit_bias or {}) | dict.fromkeys(never, -math.inf),
                   tuple(params.allowed_token_ids or ()), tuple(word for word in words if len(word) > 1),
                   tuple(map(_row_function, params.logits_processors or ())), None if penalties == (1, 0, 0) else penalties,
                   tuple(params.trace_decode_token_ids or ()))
        return made if made.biased or made.reads_tokens or made.penalties or made.trace else None

    @property
    def biased(self) -> bool:
        return bool(self.added or self.allowed)

    @property
    def reads_tokens(self) -> bool:
        """Whether the host must know every token before the next one is drawn."""
        return bool(self.words or self.processors)

    def banned(self, output: Sequence[int]) -> list[int]:
        """Tokens that would complete a bad word after ``output``."""
        return [word[-1] for word in self.words if tuple(output[len(output) - len(word) + 1 :]) == word[:-1]]


def _tokens_of(word: str, tokenizer: Any) -> list[tuple[int, ...]]:
    """The tokens of a bad word at the beginning of a text, and after a space. vLLM has the second only where it is as many
    tokens as the first, and so lets words through that a tokenizer has as one token after a space and as several elsewhere."""
    if tokenizer is None:
        raise ValueError("bad_words need text, and the engine has no tokenizer; pass one, or give a logit_bias")
    word = word.lstrip()
    plain, spaced = (tuple(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in (word, f" {word}"))
    if not plain:
        raise ValueError(f"the tokenizer makes no token of {word!r}, one of the bad_words")
    return list(dict.fromkeys((plain, spaced)))


def _row_function(processor: Any) -> Callable[[Sequence[int], Sequence[int], Tensor], Any]:
    """``processor`` as a function of the prompt's tokens, the continuation's, and the logits (V,)."""
    kinds = [c.__name__ for c in type(processor).__mro__ if c.__module__.startswith("transformers.")]
    if "LogitsProcessor" in kinds or "LogitsProcessorList" in kinds:
        def of_transformers(prompt: Sequence[int], output: Sequence[int], logits: Tensor) -> Any:
            ids = torch.tensor([[*prompt, *output]])
            ids = (ids.pin_memory() if logits.is_cuda else ids).to(logits.device, non_blocking=True)
            scores = processor(ids, logits[None])
            return scores[0] if isinstance(scores, Tensor) and scores.dim() == 2 and len(scores) == 1 else scores

        return of_transformers
    try:
        parameters = list(inspect.signature(processor).parameters.values())
    except ValueError:  # a builtin
        return lambda prompt, output, logits: processor(output, logits)
    needed = sum(p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)
    if needed == 3:
        return processor
    if needed == 2 or any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return lambda prompt, output, logits: processor(output, logits)
    raise TypeError(f"logits_processors are called with (output_token_ids, logits) or (prompt_token_ids, output_token_ids, "
                    f"logits), and {processor!r} takes {needed} arguments")
