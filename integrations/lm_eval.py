"""lm-eval on an engine: ``lm_eval.simple_evaluate(model=QuireLM(model, tokenizer), tasks=...)``.

Texts become tokens as in lm-eval's ``HFLM``, so scores are the same; so are continuations, but for a model whose generation
config has ``max_new_tokens``: in ``HFLM`` that wins over a task's ``max_gen_toks``, and not here. Log-likelihoods are
``Engine.score``: the LM head runs on the continuations' tokens, and what contexts have in common is computed once.
Continuations run with continuous batching.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers import GenerationConfig

from quire.graph_runner.engine import Engine
from quire.graph_runner.hf_generation_config import for_requests
from quire.graph_runner.sampling_params import SamplingParams
from quire.integrations.engines import engine_of

try:
    from lm_eval.models.huggingface import HFLM
    from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
except ImportError as error:
    raise ImportError(f"quire.integrations.lm_eval needs lm-eval: pip install 'quire[integrations]' ({error})") from error


#: Options of a task that a request takes over. With others HFLM generates, and refuses what it refuses.
_OF_A_TASK = frozenset({"do_sample", "temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff",
                        "repetition_penalty", "no_repeat_ngram_size", "min_new_tokens", "min_length"})


class QuireLM(HFLM):
    """An lm-eval model of a transformers causal LM, evaluated by an engine in this process.

    Args:
        model: paged by ``quire.paged``, whose engine is used; or a model, for which one is made with ``engine_options``.
        tokenizer: of transformers.
        max_length: tokens of a context and its continuation; None: what model and engine hold. Longer contexts lose their
            beginning.
        add_bos_token, prefix_token_id, think_end_token, enable_thinking, chat_template_args: as of ``HFLM``.
        engine_options: of ``quire.Engine``.

    Raises:
        ValueError: options for the engine of a model that has one.
    """

    def __init__(self, model: Any, tokenizer: Any, *, max_length: int | None = None, add_bos_token: bool | None = None,
                 prefix_token_id: int | None = None, think_end_token: str | int | None = None,
                 enable_thinking: bool | None = None, chat_template_args: dict[str, Any] | None = None,
                 **engine_options: Any) -> None:
        found = engine_of(model)
        if found is not None and engine_options:
            raise ValueError(f"the model is paged, and its engine has its options already; give {', '.join(engine_options)} to "
                             "quire.paged")
        self._own = None if found is not None else Engine(model, tokenizer, **engine_options)
        self.engine: Engine = found or self._own  # type: ignore[assignment]
        if self.engine.tokenizer is None:
            self.engine.tokenizer = tokenizer  # for stop strings
        super().__init__(pretrained=model, tokenizer=tokenizer, backend="causal", max_length=max_length,
                         batch_size=self.engine.config.max_num_seqs, add_bos_token=add_bos_token,
                         prefix_token_id=prefix_token_id, think_end_token=think_end_token, enable_thinking=enable_thinking,
                         chat_template_args=chat_template_args)

    def close(self) -> None:
        """Close the engine if it was made here."""
        if self._own is not None:
            self._own.close()

    @property
    def max_length(self) -> int:
        return min(super().max_length, self.engine.max_model_len)

    def _loglikelihood_tokens(self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False,
                              override_bs: int | None = None) -> list[tuple[float, bool]]:
        contexts, continuations = [], []
        for _, context, continuation in requests:
            if not 0 < len(continuation) <= self.max_length:
                raise ValueError(f"a continuation has {len(continuation)} tokens; from 1 to {self.max_length} can be scored")
            contexts.append((context + continuation)[-(self.max_length + 1):][: -len(continuation)])
            continuations.append(continuation)
        found = []
        for (key, _, _), score in zip(requests, self.engine.score(contexts, continuations, use_tqdm=not disable_tqdm),
                                      strict=True):
            found.append((score.total, score.is_greedy))
            if key is not None:
                self.cache_hook.add_partial("loglikelihood", key, found[-1])
        return found

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        eos = self.tok_decode(self.eot_token_id, skip_special_tokens=False)
        prompts, params, stops = [], [], []
        for context, given in (request.args for request in requests):
            options = dict(normalize_gen_kwargs(given, self.max_gen_toks))
            until = handle_stop_sequences(options.pop("until", None), eos=eos)
            count = options.pop("max_gen_toks")
            if count >= self.max_length:
                raise ValueError(f"{count} tokens are to be generated, and the model holds {self.max_length}")
            ids, _ = self.tok_batch_encode([context], left_truncate_len=self.max_length - count, truncation=self.truncation)
            asked = self._params(options, count, ids.shape[1])
            # An empty text ends HFLM's at the first token.
            if asked is None or self.think_end_token is not None or not all(until):  # by the model's generate, paged or not
                return super().generate_until(requests, disable_tqdm=disable_tqdm)
            prompts.append(ids[0].tolist())
            stop = [asked.stop] if isinstance(asked.stop, str) else asked.stop or []
            seed = None if asked.greedy else int(torch.randint(2**62, ()).item())  # by lm-eval's torch_random_seed
            # HFLM looks for them in texts with special tokens, and returns texts without.
            params.append(replace(asked, stop=[text for text in (*until, *stop) if text], skip_special_tokens=False, seed=seed))
            stops.append(until)
        outputs = self.engine.generate(prompts, params, use_tqdm=not disable_tqdm, raise_on_error=True)
        texts = []
        for request, output, until, asked in zip(requests, outputs, stops, params, strict=True):
            tokens = self._cut(output.token_ids, until) if asked.min_tokens else output.token_ids
            text = postprocess_generated_text(self.tok_decode(tokens), stop=until, think_end_token=None)
            texts.append(text)
            self.cache_hook.add_partial("generate_until", request.args, text)
        return texts

    def _cut(self, tokens: list[int], until: list[str]) -> list[int]:
        """Up to where HFLM's criteria end a text: also before ``min_tokens``, where an engine looks for no stop strings."""
        spans = [(text, len(self.tokenizer.encode(text, add_special_tokens=False)) + 2) for text in until if text]
        for end in range(1, len(tokens)):
            if any(text in self.tok_decode(tokens[max(end - span, 0) : end], skip_special_tokens=False)
                   for text, span in spans):
                return tokens[:end]
        return tokens

    def _params(self, options: dict[str, Any], count: int, prompt_length: int) -> SamplingParams | None:
        """A task's ``options`` for ``count`` new tokens, with the model's generation config where they say nothing, as in its
        ``generate``; None for what a request of an engine does not have."""
        config = copy.deepcopy(getattr(self.model, "generation_config", None)) or GenerationConfig()
        if not options.keys() <= _OF_A_TASK or (options.get("do_sample") and "temperature" not in options):
            return None
        for name, value in options.items():
            setattr(config, name, value)
        config.max_new_tokens, config.max_length, config.do_sample = count, None, options.get("do_sample", False)
        params, others = for_requests(config, prompt_length)
        return None if others else params
