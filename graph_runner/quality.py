"""What approximate attention needs and costs: ``quire calibrate`` measures which channels of the keys matter, ``quire quality``
how far a backend's next tokens are from another's on the same text."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from quire.attn_ops.backend import dtype_name
from quire.attn_ops.calibration import ChannelMoments, recorder
from quire.attn_ops.registry import plain_backend, register_backend
from quire.graph_runner.engine import Engine
from quire.graph_runner.loading import model_length
from quire.graph_runner.sampling_params import SamplingParams

STARTS = ("Once upon a time,", "The owl", "To make soup, you need", "Dear Anna,")  # of texts that a model writes itself
STRETCH = 512  # positions of a text that are compared; each is a step


def token_texts(model: Any, tokenizer: Any, text: str | None, length: int, seed: int = 0) -> list[list[int]]:
    """Token ids, cut to ``length``: of ``text``, in parts; None: of what the model itself writes with ``seed``. Raises
    ValueError for a text without a whole part of two tokens, and a length that the model has no positions for."""
    most = model_length(model, None)
    if not 2 <= length <= most:
        raise ValueError(f"texts of {length} tokens: the model takes 2 to {most}")
    if text is not None:
        ids = tokenizer(text)["input_ids"]
        parts = [ids[i : i + length] for i in range(0, len(ids), length)]
        parts = [part for part in parts if len(part) == length] or parts[:1]
    else:
        with Engine(model, tokenizer) as engine:
            prompts = [tokenizer(start)["input_ids"] for start in STARTS]
            params = [SamplingParams(max_tokens=length - len(ids), temperature=1.0, seed=seed + i, ignore_eos=True)
                      for i, ids in enumerate(prompts)]
            outputs = engine.generate([{"prompt_token_ids": ids} for ids in prompts], params)
        parts = [list(o.prompt_token_ids) + list(o.token_ids) for o in outputs]
    if not parts or len(parts[0]) < 2:
        raise ValueError("the text has fewer than two tokens")
    return parts


def calibrate(model: Any, tokenizer: Any, texts: Sequence[Sequence[int]], out: str | Path) -> dict[str, Any]:
    """Run the texts and write the channels of every layer's key heads, most important first, to ``out`` as JSON; returns it."""
    device = next(model.parameters()).device
    moments = ChannelMoments()
    measuring = register_backend(recorder(plain_backend(device.type), moments))
    with Engine(model, tokenizer, attention=measuring.name, enable_prefix_caching=False) as engine:
        moments.reset()  # set-up runs steps of its own
        prompts = [{"prompt_token_ids": list(ids)[: engine.max_model_len - 1]} for ids in texts]
        engine.generate(prompts, SamplingParams(max_tokens=1, temperature=0.0), raise_on_error=True)
    found = {"model": type(model).__name__, "dtype": dtype_name(next(model.parameters()).dtype), "tokens": moments.tokens,
             "channels": moments.ranked()}
    Path(out).write_text(json.dumps(found) + "\n")
    return found


@dataclass(frozen=True)
class Quality:
    """One backend on the texts: perplexity of the compared positions, and the share of them at which its likeliest token is
    that of the first backend; ``drift``: mean distance of the log probability of the text's token from the first backend's.
    ``prefilled``: the positions are of prefills, else decoding steps."""

    attention: str
    perplexity: float
    agreement: float
    drift: float
    positions: int
    prefilled: bool = False

    def __str__(self) -> str:
        what = "prefilled positions" if self.prefilled else "decoding steps"
        return (f"{self.attention}: perplexity {self.perplexity:.4f}, likeliest token as the first in "
                f"{100 * self.agreement:.2f}% of {self.positions} {what}, "
                f"mean drift of a log probability {self.drift:.2e}")


def compare(model: Any, tokenizer: Any, texts: Sequence[Sequence[int]], backends: Sequence[str], prefill: bool = False,
            **options: Any) -> list[Quality]:
    """Run the same texts through each backend, and compare with the first.

    Every position of the last STRETCH of a text is a decoding step: pages of one token and the prefix cache leave one token of
    the prompt to compute. With ``prefill`` each text is one prefill, and all its positions are compared.
    """
    run = _prefill if prefill else _decode
    runs = [run(model, tokenizer, texts, name, options) for name in backends]
    first = runs[0]
    return [Quality(name, math.exp(-logprobs.mean()), (likeliest == first[1]).float().mean().item(),
                    (logprobs - first[0]).abs().mean().item(), len(logprobs), prefill)
            for name, (logprobs, likeliest) in zip(backends, runs, strict=True)]


def _decode(model: Any, tokenizer: Any, texts: Sequence[Sequence[int]], attention: str, options: dict[str, Any]
            ) -> tuple[torch.Tensor, torch.Tensor]:
    """Log probability of each next token of the texts, float64, and the likeliest token, (positions,) each."""
    logprobs, likeliest = [], []
    longest = max(map(len, texts))
    with Engine(model, tokenizer, attention=attention, page_size=1, enable_prefix_caching=True,
                num_pages=(longest + 2) * len(texts) + 1, max_num_seqs=len(texts), **options) as engine:
        for position in range(max(1, longest - STRETCH), longest):
            here = [ids for ids in texts if len(ids) > position]
            params = [SamplingParams(max_tokens=1, temperature=0.0, logprob_token_ids=[ids[position]], ignore_eos=True)
                      for ids in here]
            outputs = engine.generate([{"prompt_token_ids": list(ids[:position])} for ids in here], params)
            for ids, output in zip(here, outputs, strict=True):
                assert output.logprobs is not None  # asked for
                logprobs.append(output.logprobs[0][ids[position]].logprob)
                likeliest.append(output.token_ids[0])
    return torch.tensor(logprobs, dtype=torch.float64), torch.tensor(likeliest)


def _prefill(model: Any, tokenizer: Any, texts: Sequence[Sequence[int]], attention: str, options: dict[str, Any]
             ) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``_decode``, for all positions but the first."""
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1, ignore_eos=True)
    longest = max(map(len, texts))
    with Engine(model, tokenizer, attention=attention, enable_prefix_caching=False, max_num_seqs=1,
                max_num_batched_tokens=longest, max_model_len=min(longest + 1, model_length(model, None)), **options) as engine:
        prompts = [{"prompt_token_ids": list(ids)[: engine.max_model_len - 1]} for ids in texts]  # and one token more
        outputs = engine.generate(prompts, params, raise_on_error=True)
    found = [(ids[i], entry) for ids, output in zip(texts, outputs, strict=True)
             for i, entry in enumerate(output.prompt_logprobs or ()) if entry is not None]
    likeliest = [next(token for token, one in entry.items() if one.rank == 1) for _, entry in found]
    return torch.tensor([entry[token].logprob for token, entry in found], dtype=torch.float64), torch.tensor(likeliest)
