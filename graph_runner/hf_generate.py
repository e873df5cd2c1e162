"""Reads a call of transformers' ``generate``: can an engine serve it, and how?"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch

from quire.graph_runner.engine import Engine
from quire.graph_runner.hf_generation_config import EDITS, IN_LOCKSTEP, from_generation_config, options_beyond, with_edits
from quire.graph_runner.lockstep import DoesNotFit, Rows
from quire.graph_runner.on_instance import OwnCopies
from quire.graph_runner.own_forward import reads_inputs, training_difference
from quire.graph_runner.sampling_params import SamplingParams
from quire.passes.capture.followed import names_of
from quire.passes.capture.reads import is_code_of

# Arguments of ``generate`` beside the generation config: those that ``understand`` reads, those that transformers makes
# processors and criteria of, and those without effect on the result. ``output_...``: read with the config, or for training.
_READ = frozenset(("input_ids", "inputs", "attention_mask", "position_ids", "generation_config", "streamer", "synced_gpus"))
_MAKE_PROCESSORS = frozenset(("logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn"))
_NO_EFFECT = frozenset(("tokenizer", "negative_prompt_ids", "negative_prompt_attention_mask",  # beside their option
                        "output_attentions", "output_hidden_states", "output_router_logits"))
# transformers' classes that the engine's sampling stands for.
_STOOD_FOR = ("TemperatureLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper", "MinPLogitsWarper", "MaxLengthCriteria",
              "EosTokenCriteria", "MinLengthLogitsProcessor", "MinNewTokensLengthLogitsProcessor")
_INTEGERS = ("eos_token_id", "pad_token_id", "max_new_tokens", "max_length", "min_new_tokens", "min_length")


@dataclass(frozen=True)
class Job:
    """A call as requests: ``prompts`` without padding, ``ids`` (rows, length) as given, ``pad`` for rows that end early."""

    ids: torch.Tensor
    prompts: list[list[int]]
    params: SamplingParams
    pad: int
    streamer: Any
    return_dict: bool


@dataclass(frozen=True)
class Served:
    """A call that an engine serves: as requests, or without a ``job`` in lockstep. ``note``: what the caller should know.
    ``instead``: for a call in lockstep whose prompts end before the row does, its arguments with the padding on the left, as
    processors and criteria must see what comes before a token."""

    job: Job | None
    note: str | None = None
    instead: dict[str, Any] | None = None


def understand(model: Any, kwargs: dict[str, Any], own_generate: Any, own_forward: Any,
               engine: Callable[[], Engine]) -> Served | str:
    """How to serve a call of ``generate`` with the arguments ``kwargs``, or the reason why transformers' own code must.
    ``own_generate``, ``own_forward``: of the instance before it was paged, or None. ``engine``: returns the engine; called if
    nothing else prevents serving."""
    given = {k: v for k, v in kwargs.items() if v is not None}
    if "inputs" in given and "input_ids" in given:
        return "it was given both inputs and input_ids"
    ids = given.get("inputs", given.get("input_ids"))
    if not isinstance(ids, torch.Tensor) or ids.dim() != 2 or ids.dtype not in (torch.int64, torch.int32):
        return "it was not given input_ids of shape (batch, length), int64 or int32"
    if not ids.shape[0]:
        return "it was given an empty batch"
    if (found := training_difference(model)) is not None:
        return (f"the model is in training mode, and {found} (paged: after model.eval(), with a rate of 0, or by "
                "generate_batch, which runs in evaluation mode)")
    injected = {name for m in model.modules() for hook in m._forward_pre_hooks.values() for name in _injected(hook)}
    if "adapter_names" in injected:
        return "each row has an adapter of its own (PEFT's adapter_names), and an engine has one for all rows"
    if injected:
        return "an aLoRA is active, which begins in the middle of a row, and an engine's adapters are of whole requests"
    if (method := own_method(model, own_generate)) is not None:
        if getattr(vars(model).get(method), "__module__", "").startswith("peft."):
            return (f"{method} is PEFT's: prompt tuning, p-tuning and prefix tuning give the model embeddings or keys, and an "
                    "engine takes token ids")
        return f"{method} is the model's own, and not transformers'"
    if (found := reads_inputs(model, own_forward)) is not None:
        return found
    if model.device.type == "meta":
        return "its weights are on the meta device (offloaded by accelerate?), and an engine needs them in memory"
    if torch.is_autocast_enabled(model.device.type):
        return "torch.autocast is on, and an engine computes in the model's own dtypes"
    if given.get("synced_gpus"):
        return "synced_gpus=True was asked for"
    # The arguments, over the given config, over the model's config: None in an argument counts (eos_token_id=None).
    own, base = model.generation_config, given.get("generation_config")
    try:
        config, rest = model._prepare_generation_config(base, **{k: v for k, v in kwargs.items() if k not in _READ})
        if other := sorted(k for k, v in rest.items() if v is not None and k not in _MAKE_PROCESSORS | _NO_EFFECT
                           and not _all_text(model, k, v, ids)):
            return f"quire does not have the arguments {other}"
        odd = any(not _of_integers(getattr(config, name, None)) for name in _INTEGERS)
        if not odd and all(v is None for v in (given.get("max_length"), getattr(base, "max_length", None), own.max_length)):
            # 20 by default, which counts new tokens, and not those of the prompt; but no more than there are positions
            config.max_length = min(ids.shape[1] + 20, getattr(model.config, "max_position_embeddings", None) or sys.maxsize)
        if config.top_k is None:
            config.top_k = 0  # asked for: what nobody said is 50 by now
        params, names = (None, options_beyond(config)) if odd else from_generation_config(config, ids.shape[1])
        eos = [] if config.eos_token_id is None else torch.as_tensor(config.eos_token_id).flatten().tolist()
    except (TypeError, ValueError) as error:
        return str(error)
    if config.cache_implementation == "paged":
        return "cache_implementation='paged' asks for generate_batch"
    if refused := [name for name in names if name not in IN_LOCKSTEP]:
        return f"quire does not have {', '.join(refused)}"
    if "num_beams" in names and "streamer" in given:
        return "beams have no tokens to stream before the search ends"
    mask, pad = given.get("attention_mask"), config.pad_token_id
    if mask is not None and mask.shape != ids.shape:
        return f"the attention_mask has shape {tuple(mask.shape)}, the ids {tuple(ids.shape)}"
    if mask is None and pad is not None and pad not in eos and bool((ids == pad).any()):
        mask = ids != pad  # transformers infers the mask so
    keep = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
    if mask is not None and bool((mask != keep).any()):
        return "the attention_mask has values beside 0 and 1, which transformers makes positions of"
    if not bool(keep.any(1).all()):
        return "all tokens of a prompt are masked"
    if "position_ids" in given and not _implied(given["position_ids"], keep):
        return "its position_ids are not those of the attention_mask"
    first = keep.int().argmax(1, keepdim=True)
    last = keep.shape[1] - 1 - keep.flip(1).int().argmax(1, keepdim=True)
    places = torch.arange(keep.shape[1], device=keep.device)
    holes = bool((~keep & (places >= first) & (places < last)).any())
    if holes and any(site.window or site.chunk for site in engine().runner.sites):
        return "the attention_mask has holes, and transformers counts them in windows and chunks"
    note = None if bool(keep[:, -1].all()) else (
        "the last token of a prompt is masked: the prompt ends before it, as if the padding were on the left. transformers' "
        "own generate goes on from the masked token (set tokenizer.padding_side = 'left')")
    if note is not None and config.token_healing:
        return ("token_healing changes the last token of a prompt, and here padding follows it (set tokenizer.padding_side = "
                "'left')")
    if not bool(keep.all()) and engine().runner.paged.counts_tokens:
        return ("the model takes no position_ids and counts padding as tokens, so that a padded prompt is another one to it, "
                "and an engine pads none")
    prompts, streamer = prompts_of(ids, mask), given.get("streamer")
    if params is not None and names and _as_processors_do(config, names, engine) and (
            "repetition_penalty" not in names or _counts_prompts(ids, keep, first, last, prompts)):
        edited, rest = with_edits(config, params, names)
        if len({*getattr(edited, "excluded", ()), *(edited.stop_token_ids or ())}) < engine().limits.num_logits:
            params, names = edited, rest  # else nothing may be left to sample
    if (limit := _outgrown(model, engine(), prompts, None if params is None else params.max_tokens)) is not None:
        return (f"a row may grow past {limit} tokens, from where on its rotary frequencies are others: this class goes on with "
                "its old keys, and an engine computes them again")
    tiny_top_p = params is not None and 0 < params.top_p < torch.finfo(torch.float32).tiny  # 0 in float32
    together = names or odd or tiny_top_p or any(given.get(k) for k in _MAKE_PROCESSORS) or (
        params is not None and bool(params.stop)) or (streamer is not None and len(ids) * (params.n if params else 2) > 1)
    if together or params is None:
        if not isinstance(model, OwnCopies):
            return f"{', '.join(names) or 'a processor'} needs quire's class of the model, and the model has another class now"
        if params is not None and params.max_tokens is not None:
            try:
                rows = max(params.n, config.num_beams or 1)
                Rows(engine(), [prompt for prompt in prompts for _ in range(rows)], params.max_tokens)
            except DoesNotFit as error:
                return str(error)
        return Served(None, note, None if note is None else _padded_left(kwargs, ids, keep, last))
    assert params.max_tokens is not None
    longest = max(map(len, prompts)) + params.max_tokens
    if longest > engine().max_model_len:
        return (f"it may make a sequence of {longest} tokens, and the engine holds {engine().max_model_len} (see max_model_len "
                "and num_pages of quire.Engine)")
    params = replace(params, ignore_eos=True, detokenize=False)  # the end tokens are among the stop_token_ids
    return Served(Job(ids, prompts, params, pad if pad is not None else (eos[0] if eos else 0), streamer,
                      bool(config.return_dict_in_generate)), note)


def _as_processors_do(config: Any, names: list[str], engine: Callable[[], Engine]) -> bool:
    """Whether requests edit their logits as transformers' processors do for those of the options ``names`` that both have."""
    from transformers.generation import utils  # which makes them

    penalty, words, limits = config.repetition_penalty, config.bad_words_ids, torch.finfo(torch.float32)
    if "repetition_penalty" in names and not (isinstance(penalty, float) and limits.tiny <= penalty <= limits.max):
        return False  # an error of transformers', or a number that float32 does not have
    if isinstance(words, list) and any(token >= engine().limits.num_logits for word in words if isinstance(word, list)
                                       for token in word if type(token) is int):
        return False  # an error of transformers'
    return all(_is_transformers(getattr(utils, processor)) for name, processor in EDITS.items() if name in names)


def _is_transformers(processor: Any) -> bool:
    """Whether a class is of transformers, with its own methods."""
    return isinstance(processor, type) and processor.__module__.partition(".")[0] == "transformers" and all(
        is_code_of(method, "transformers", "torch") for cls in processor.__mro__[:-1] for method in vars(cls).values()
        if isinstance(method, types.FunctionType))


@functools.cache
def ignores_padding() -> bool:
    """Whether transformers' repetition penalty is known to leave out the masked tokens before a prompt: older releases count
    them, and another one may not be asked in this way."""
    from transformers import GenerationConfig, GenerationMixin

    model: Any = SimpleNamespace(config=SimpleNamespace(is_encoder_decoder=False),
                                 _merge_criteria_processor_list=lambda made, own: made)
    with contextlib.suppress(Exception):
        (processor,) = GenerationMixin._get_logits_processor(
            model, GenerationConfig(repetition_penalty=2.0), 2, model_kwargs={"attention_mask": torch.tensor([[0, 1]])})
        return bool(processor(torch.tensor([[0, 1]]), torch.ones(1, 2))[0, 0] == 1)
    return False


def _counts_prompts(ids: torch.Tensor, keep: torch.Tensor, first: torch.Tensor, last: torch.Tensor, prompts: list[list[int]]
                    ) -> bool:
    """Whether the tokens of each row that transformers' repetition penalty counts are those of its prompt: it also counts what
    is masked between the ``first`` and the ``last`` (rows, 1) that is not."""
    if bool(keep.all()):
        return True
    whole = not ignores_padding()
    return all(set(prompt).issuperset(row if whole else row[a : b + 1]) for row, a, b, prompt in zip(
        ids.tolist(), first[:, 0].tolist(), last[:, 0].tolist(), prompts, strict=True))


def _all_text(model: Any, name: str, value: Any, ids: torch.Tensor) -> bool:
    """Whether the argument says that all tokens are text, which processors of images say beside every text."""
    of_images = name in ("mm_token_type_ids", "moe_mm_token_type_ids") or (
        name == "token_type_ids" and getattr(model.config, "model_type", None) in ("gemma3", "gemma3n"))  # elsewhere embedded
    return of_images and name in inspect.signature(type(model).forward).parameters and isinstance(value, torch.Tensor) and (
        value.shape == ids.shape and not bool(value.any()))


def _outgrown(model: Any, engine: Engine, prompts: list[list[int]], most: int | None) -> int | None:
    """A length up to which some prompt's frequencies (longrope) are others than those of up to ``most`` more tokens, if the
    model's class does not empty its cache there, as Phi-3's does."""
    limits = engine.runner.length_limits
    if not limits or "original_max_position_embeddings" in names_of(
            inspect.unwrap(type(model).prepare_inputs_for_generation).__code__):
        return None
    return next((limit for limit in limits for prompt in prompts
                 if len(prompt) <= limit and (most is None or len(prompt) + most - 1 > limit)), None)


def _padded_left(kwargs: dict[str, Any], ids: torch.Tensor, keep: torch.Tensor, last: torch.Tensor) -> dict[str, Any]:
    """The arguments with each row rolled so that its ``last`` (rows, 1) token that counts ends it."""
    width = ids.shape[1]
    from_ = (torch.arange(width, device=ids.device) + last + 1) % width
    moved = {"input_ids": ids.gather(1, from_), "attention_mask": keep.gather(1, from_).long()}
    return {name: x for name, x in kwargs.items() if name not in ("inputs", "position_ids")} | moved


def prompts_of(ids: torch.Tensor, mask: torch.Tensor | None) -> list[list[int]]:
    """The tokens of each row that are not masked."""
    if mask is None:
        return ids.tolist()
    return [[t for t, k in zip(row, keep, strict=True) if k] for row, keep in
            zip(ids.tolist(), mask.bool().tolist(), strict=True)]


def _injected(hook: Any) -> set[str]:
    """What a hook of PEFT's hands each of its layers about the rows of a batch."""
    if not isinstance(hook, functools.partial) or not hook.func.__module__.startswith("peft."):
        return set()
    return {"adapter_names", "alora_offsets"} & hook.keywords.keys()


def _implied(positions: Any, keep: torch.Tensor) -> bool:
    """Whether the positions of the tokens that count are 0, 1, 2, ..., in each row."""
    if not isinstance(positions, torch.Tensor) or positions.dim() != 2 or positions.shape[1] != keep.shape[1] or (
            positions.shape[0] not in (1, len(keep))):
        return False
    return bool(((positions.to(keep.device) == keep.cumsum(1) - 1) | ~keep).all())


def own_method(model: torch.nn.Module, own_generate: Any) -> str | None:
    """A method of transformers' GenerationMixin, or of a class that sampling stands for, that is the user's own; or None."""
    import transformers
    from transformers import GenerationMixin

    if own_generate is not None:
        return "generate"
    for name, method in vars(GenerationMixin).items():
        if name.startswith("__") or not callable(getattr(GenerationMixin, name)):
            continue
        found = model.__dict__.get(name) if name != "generate" else None
        found = found or getattr(type(model), name, method)
        if found is vars(OwnCopies).get(name):
            found = getattr(super(OwnCopies, type(model)), name, method)
        if not is_code_of(found, "transformers", "torch"):
            return name
    return next((f"{name}.__call__" for name in _STOOD_FOR
                 if not is_code_of(getattr(transformers.generation, name).__call__, "transformers", "torch")), None)


def _of_integers(x: Any) -> bool:
    """Whether ``x`` is None, an integer or a sequence of integers."""
    each = x if isinstance(x, (list, tuple)) else [x]
    return x is None or bool(each) and all(type(i) is int for i in each)
