"""A rollout for TRL's trainers that returns log probabilities beside the tokens.

``GRPOTrainer(model=quire.paged(model), rollout_func=rollout_func, ...)``. Without it the trainers' own rollouts are paged too,
through ``model.generate`` or, with ``use_transformers_continuous_batching=True``, ``model.generate_batch``; these return no log
probabilities. TRL itself is not imported here.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch

from quire.graph_runner.sampling_params import SamplingParams
from quire.integrations.engines import engine_of


def rollout_func(prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
    """One completion for each prompt (TRL has repeated the prompts), by the engine of the trainer's model as it is now.

    Args:
        prompts: texts or chats (lists of messages).
        trainer: whose ``args`` have max_completion_length, temperature, top_p, top_k, min_p, repetition_penalty and
            generation_kwargs, which are those of SamplingParams, as with vLLM.

    Returns:
        ``prompt_ids`` and ``completion_ids``, token ids of each prompt and completion (its end token included), and
        ``logprobs``, for each token the log probability in the distribution that it was drawn from (vLLM's
        processed_logprobs; without top_k, top_p and min_p that is log_softmax of logits / temperature, as the trainer has it).
        They are the trainer's own where it computes in the engine's dtype. TRL's default, bf16=True, is autocast: there give
        the model bf16 weights, or bf16=False, or expect differences as large as those of bf16's rounding.

    Raises:
        ValueError, TypeError: the model is not paged, or an option that a rollout does not have; names it.
    """
    model = trainer.accelerator.unwrap_model(trainer.model)
    engine, args = engine_of(model), trainer.args
    if engine is None:
        raise ValueError("the trainer's model is not paged; make the trainer with model=quire.paged(model)")
    if getattr(trainer, "tools", None):
        raise ValueError("rollout_func renders no tools, and returns no completions after their calls; leave it out, and the "
                         "trainer's own rollouts are paged, those after calls too")
    more = args.generation_kwargs or {}
    if own := sorted(more.keys() & {"n", "seed", "logprobs", "logprobs_mode"}):
        raise ValueError(f"rollout_func sets {', '.join(own)} itself; leave it out of generation_kwargs")
    if unknown := sorted(more.keys() - {option.name for option in fields(SamplingParams)}):
        raise TypeError(f"generation_kwargs of rollout_func are options of quire.SamplingParams, which has no "
                        f"{', '.join(unknown)}")
    tokenizer = trainer.processing_class
    if hasattr(tokenizer, "tokenizer"):
        raise ValueError(f"rollout_func gives the model text alone, and the processing_class, a {type(tokenizer).__name__}, is "
                         "for images or sound too; leave rollout_func out")
    if engine.tokenizer is None:
        engine.tokenizer = tokenizer  # for stop strings
    template = getattr(args, "chat_template_kwargs", None) or {}
    ids = [tokenizer(text=prompt)["input_ids"] if isinstance(prompt, str) else tokenizer.apply_chat_template(
        prompt, add_generation_prompt=True, tokenize=True, return_dict=True, **template)["input_ids"] for prompt in prompts]
    options = dict(max_tokens=args.max_completion_length, temperature=args.temperature, top_p=args.top_p, top_k=args.top_k or 0,
                   min_p=args.min_p or 0.0, repetition_penalty=args.repetition_penalty or 1.0, logprobs=0,
                   logprobs_mode="processed_logprobs", detokenize=bool(more.get("stop")),
                   stop_token_ids=[] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]) | more
    params = [SamplingParams(**options, seed=int(torch.randint(2**62, ()).item())) for _ in ids]
    outputs = engine.generate(ids, params, use_tqdm=False, raise_on_error=True)
    return {"prompt_ids": ids, "completion_ids": [o.token_ids for o in outputs],
            "logprobs": [[next(iter(of.values())).logprob for of in o.logprobs or ()] for o in outputs]}
