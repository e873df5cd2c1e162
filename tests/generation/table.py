"""What a paged model's ``generate`` does with each field of GenerationConfig and each argument: the rows of docs/generation.md.

``python -m tests.generation.table`` writes the page. ``test_generation.py`` runs every row that has options.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import CompileConfig, GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation import ContinuousBatchingConfig

PAGE = Path(__file__).resolve().parents[2] / "docs" / "generation.md"
SAME, DIFFERENT, FALLS_BACK = "same", "different", "falls back"
#: The first token of the shipped model's continuation of "Once upon a time", and the one after it.
FIRST, SECOND = 12, 358
ENDS = [FIRST, 335]  # at different steps of beams
SCORES = dict(return_dict_in_generate=True, output_scores=True)
ONE_TOKEN = dict(input_ids=torch.tensor([[523], [283]]), attention_mask=torch.tensor([[1], [1]]))  # of each prompt


class Row(NamedTuple):
    """``acts``: beside the row's other options, its own changes the tokens or scores, so that ignoring it would be seen. False:
    options that must not change them, or that cannot be left out."""

    status: str
    options: dict[str, Any] | None = None
    note: str = ""
    acts: bool = False


class Recorder:
    """A streamer that takes batches."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def put(self, value: torch.Tensor) -> None:
        self.seen.append(value.tolist())

    def end(self) -> None:
        self.seen.append("end")


def _stop_at_8(ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
    return torch.full((len(ids),), ids.shape[1] >= 8, device=ids.device)


def same(note: str = "", acts: bool = False, **options: Any) -> Row:
    return Row(SAME, options, note, acts)


def back(note: str, **options: Any) -> Row:
    return Row(FALLS_BACK, options or None, note)


_GONE = "not a decoding mode of transformers itself any more"
_SPEED = "speed or memory of transformers' own caches; no effect on tokens"
_ASSISTED = "speed only: with the same tokens, each step of the engine samples one"

FIELDS: dict[str, Row] = {
    "max_length": same("counts the prompt, as in transformers", True, max_length=14, max_new_tokens=None),
    "max_new_tokens": same("", True, max_new_tokens=3),
    "min_length": same("", True, min_length=16, eos_token_id=FIRST),
    "min_new_tokens": same("", True, min_new_tokens=4, eos_token_id=FIRST),
    "early_stopping": same("acts with num_beams only", True, early_stopping=True, num_beams=3, eos_token_id=ENDS, **SCORES),
    "max_time": same("checked once a step", True, max_time=1e-9),
    "stop_strings": same("needs tokenizer=", True, stop_strings=["e"], tokenizer=...),
    "do_sample": Row(DIFFERENT, dict(do_sample=True, top_k=1), (
        "the same distribution, and torch.manual_seed decides, but other random numbers: each request draws its own, whatever "
        "else is in the batch. Calls in lockstep, such as those with a processor, a criterion or scores asked for, have "
        "transformers' own numbers, token for token")),
    "num_beams": same("transformers' own search over the engine's pages, which beams share; sampled beams too", True,
                      num_beams=3, **SCORES),
    "use_mtp": same(_ASSISTED, use_mtp=False),
    "use_cache": same("the engine caches in any case", use_cache=False),
    "cache_implementation": same(f"{_SPEED}, but for \"quantized\", which falls back; \"paged\" goes to generate_batch, "
                                 "which runs on the engine",
                                 cache_implementation="dynamic"),
    "cache_config": same("acts with the \"quantized\" cache only, which falls back", cache_config={"backend": "quanto"}),
    "max_cache_len": same(_SPEED, max_cache_len=64),
    "temperature": same("", True, do_sample=True, temperature=3.0, **SCORES),
    "top_k": same("50 by default, all for None as an argument, as in transformers", True,
                  do_sample=True, top_k=3, temperature=3.0, **SCORES),
    "top_p": same("", True, do_sample=True, top_p=0.5, temperature=3.0, **SCORES),
    "min_p": same("", True, do_sample=True, min_p=0.2, temperature=3.0, **SCORES),
    "top_h": same("", True, do_sample=True, top_h=0.4, temperature=2.0),
    "typical_p": same("", True, do_sample=True, typical_p=0.3, temperature=4.0),
    "epsilon_cutoff": same("", True, do_sample=True, epsilon_cutoff=0.1, temperature=4.0),
    "eta_cutoff": same("", True, do_sample=True, eta_cutoff=0.2, temperature=4.0),
    "repetition_penalty": same("in requests; masked tokens that transformers counts too, or values that float32 does not hold: "
                               "in lockstep", True, repetition_penalty=3.0),
    "encoder_repetition_penalty": same("", True, encoder_repetition_penalty=0.01),
    "length_penalty": same("acts with num_beams only", True, length_penalty=-9.0, num_beams=3, eos_token_id=ENDS),
    "no_repeat_ngram_size": same("", True, no_repeat_ngram_size=1),
    "bad_words_ids": same("in requests if each is one token", True, bad_words_ids=[[FIRST]]),
    "renormalize_logits": same("", True, renormalize_logits=True, do_sample=True, temperature=2.0, **SCORES),
    "forced_bos_token_id": same("acts on prompts of one token", True, forced_bos_token_id=5, **ONE_TOKEN),
    "forced_eos_token_id": same("", True, forced_eos_token_id=7),
    "remove_invalid_values": same("", True, remove_invalid_values=True, sequence_bias=[[[7], float("inf")]], **SCORES),
    "exponential_decay_length_penalty": same("", True, exponential_decay_length_penalty=(1, 50.0)),
    "suppress_tokens": same("in requests", True, suppress_tokens=[FIRST, SECOND]),
    "begin_suppress_tokens": same("", True, begin_suppress_tokens=[FIRST]),
    "sequence_bias": same("", True, sequence_bias=[[[FIRST], -50.0]]),
    "token_healing": same("needs tokenizer=, and a bos and a pad token", token_healing=True, tokenizer=...),
    "guidance_scale": same("the processor's own forward of the model is not paged", True, guidance_scale=8.0),
    "watermarking_config": same("", True, watermarking_config={"bias": 30.0}),
    "num_return_sequences": same("", True, num_return_sequences=2, do_sample=True, temperature=3.0, **SCORES),
    "output_attentions": back("the engine's kernels make no attention matrices", output_attentions=True,
                              return_dict_in_generate=True),
    "output_hidden_states": back("the engine's graphs keep no hidden states", output_hidden_states=True,
                                 return_dict_in_generate=True),
    "output_scores": same("", True, **SCORES),
    "output_logits": same("", True, return_dict_in_generate=True, output_logits=True),
    "return_dict_in_generate": Row(DIFFERENT, dict(return_dict_in_generate=True), (
        "past_key_values is None: keys and values are in the engine's pages")),
    "pad_token_id": same("", True, pad_token_id=9, eos_token_id=FIRST),
    "bos_token_id": same("used without a prompt, which falls back", bos_token_id=4),
    "eos_token_id": same("one, several, None or a tensor", True, eos_token_id=[FIRST, 9]),
    "encoder_no_repeat_ngram_size": same("", True, encoder_no_repeat_ngram_size=1),
    "decoder_start_token_id": same("of encoder-decoders, which quire does not serve", decoder_start_token_id=3),
    "is_assistant": back("stops early, at an uncertain token"),
    "num_assistant_tokens": same(_ASSISTED, num_assistant_tokens=5),
    "num_assistant_tokens_schedule": same(_ASSISTED, num_assistant_tokens_schedule="constant"),
    "assistant_confidence_threshold": same(_ASSISTED, assistant_confidence_threshold=0.4),
    "prompt_lookup_num_tokens": same(f"{_ASSISTED}; with do_sample by other random numbers. Batches and num_return_sequences "
                                     "too. Beside guidance_scale the tokens are those without it: transformers' "
                                     "processor keeps a state of its own",
                                     prompt_lookup_num_tokens=2, repetition_penalty=3.0, **SCORES),
    "max_matching_ngram_size": same(_ASSISTED, max_matching_ngram_size=2),
    "assistant_early_exit": same(_ASSISTED, assistant_early_exit=1),
    "assistant_lookbehind": same(_ASSISTED, assistant_lookbehind=10),
    "target_lookbehind": same(_ASSISTED, target_lookbehind=10),
    "assistant_ensemble_weight": back("speculation that changes the distribution"),
    "speculation_type": same(_ASSISTED, speculation_type="mtp"),
    "compile_config": same(_SPEED, compile_config=CompileConfig()),
    "disable_compile": same(_SPEED, disable_compile=True),
    "continuous_batching_config": same("read by generate_batch", continuous_batching_config=ContinuousBatchingConfig()),
    "low_memory": same(f"{_SPEED}; with beams transformers' error", low_memory=True),
    "penalty_alpha": back(f"contrastive search: {_GONE}"),
    "dola_layers": back(_GONE),
    "diversity_penalty": back(f"with groups of beams: {_GONE}"),
    "num_beam_groups": back(_GONE),
    "constraints": back(_GONE),
    "force_words_ids": back(_GONE),
    "prefill_chunk_size": same(f"{_SPEED}; the engine's own option has the same name", prefill_chunk_size=4),
    "transformers_version": same("no effect", transformers_version="5.0"),
}

ARGUMENTS: dict[str, Row] = {
    "inputs": same("(batch, length) token ids"),
    "input_ids": same("the same; both is transformers' error"),
    "attention_mask": Row(DIFFERENT, None, (
        "padding on the left, holes, and 3 forms of dtype: same (where rope depends on the length, as if without padding). "
        "Padding on the right: the row goes on where its prompt ends, with a warning; transformers goes on from the padding. "
        "Holes in models with windows, values beside 0 and 1, and such padding with token_healing fall back")),
    "position_ids": same("those of the mask; others fall back", position_ids=torch.tensor([[0], [0]]), **ONE_TOKEN),
    "generation_config": same("", True, generation_config=GenerationConfig(repetition_penalty=3.0)),
    "logits_processor": same("gets the whole batch, once a step; an error in it is the caller's, other requests go on", True,
                             logits_processor=LogitsProcessorList([lambda ids, scores: -scores])),
    "stopping_criteria": same("gets the whole batch and the scores, once a step", True,
                              stopping_criteria=StoppingCriteriaList([_stop_at_8])),
    "prefix_allowed_tokens_fn": same("", True, prefix_allowed_tokens_fn=lambda row, ids: [5 + row, 8, 9]),
    "synced_gpus": same("False; True falls back", synced_gpus=False),
    "assistant_model": back("transformers' own assisted decoding runs", assistant_model=...),
    "streamer": same("batches too; with beams transformers' error", streamer=...),
    "negative_prompt_ids": same("with guidance_scale", True, negative_prompt_ids=torch.tensor([[5, 6], [7, 8]]),
                                guidance_scale=8.0),
    "negative_prompt_attention_mask": same("with guidance_scale", negative_prompt_attention_mask=torch.tensor([[1, 1], [1, 1]]),
                                           negative_prompt_ids=torch.tensor([[5, 6], [7, 8]]), guidance_scale=8.0),
    "custom_generate": back("the caller's own loop runs", custom_generate=lambda model, input_ids, **kwargs: input_ids),
    "tokenizer": same("for stop_strings and token_healing"),
    "inputs_embeds": back("a prompt is token ids"),
    "mm_token_type_ids": same("all 0, for text, as processors of images give them; so `token_type_ids` of Gemma 3. Others "
                              "fall back"),
    "past_key_values": back("the engine's keys and values are in its pages"),
}


def page() -> str:
    """The text of docs/generation.md."""
    rows = list(FIELDS.values())
    share = sum(row.status == SAME for row in rows) / len(rows)
    lines = [
        "# generate, argument by argument", "",
        "What `model.generate` does after `quire.paged(model)`, for each field of transformers' `GenerationConfig` and each",
        "argument. *same*: the result is that of transformers' own `generate` (tested, where a plain call can show it).",
        "*different*: paged, and the note says how it differs. *falls back*: transformers' own code runs, with one warning",
        "that gives the reason. This page is generated: `python -m tests.generation.table`.", "",
        "Calls whose tokens follow from greedy decoding, temperature, top_k, top_p, min_p, repetition_penalty,",
        "suppress_tokens, bad_words_ids of one token, lengths and end tokens are requests and run with continuous batching.",
        "Calls with anything else marked *same* advance in lockstep, one step for all rows, with the logits processors and",
        "stopping criteria that transformers makes. The whole batch must then fit in the engine at once. Rows with equal",
        "prompts share the prompt's pages; beams share all pages that they have in common, and only a partial last page is",
        "copied.", "",
        "These calls always fall back: a model in training mode with dropout or code of yours that computes otherwise then,",
        "`torch.autocast`, a model class with generation methods of its own or a forward that reads the mask or the cache,",
        "hooks and forwards around its parts that do, or that an engine refuses as they record, read values on the host or",
        "treat rows differently,",
        "padded prompts of a model that takes no `position_ids` and counts padding as tokens (BART's decoder),",
        "embeddings as input, sequences longer than the engine's `max_model_len`, and those that grow past longrope's",
        "`original_max_position_embeddings`, but for classes that compute them again there, as Phi-3's does. They run in the",
        "model's own dtype, also where the engine has another one (`quire.paged(model, dtype=...)`).", "",
        "With gradient checkpointing in training mode transformers' own `generate` drops its cache, and a step sees its last",
        "token alone; paged, such a model gives the tokens that it gives after `model.eval()`.", "",
        f"Of {len(rows)} fields {share:.0%} are *same*. Of these, {sum(row.acts for row in rows)} change the result of a call",
        "by themselves, and are tested with values that do; the others concern speed, memory, or other fields.", ""]
    for title, table in (("Fields of GenerationConfig", FIELDS), ("Arguments of generate", ARGUMENTS)):
        lines += [f"## {title}", "", "| | | |", "|---|---|---|"]
        lines += [f"| `{name}` | {row.status} | {row.note} |" for name, row in table.items()] + [""]
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page())
