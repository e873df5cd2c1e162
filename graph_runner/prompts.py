"""What a caller may give as prompts, and what the engine makes of it: token ids, and their sampling parameters."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

from quire.graph_runner.sampling_params import SamplingParams

#: Text; token ids; a chat, that is a list of messages {"role": ..., "content": ...}; or vLLM's {"prompt": text} and
#: {"prompt_token_ids": ids}.
Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]] | Mapping[str, Any]


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """The prompts as a list. A string, a sequence of integers (arrays and tensors included), a chat or a dict is one prompt;
    what a tokenizer returns for several texts ("input_ids" and "attention_mask") is one per row. Raises ValueError for a mask
    that does not fit the ids, or with holes."""
    if isinstance(prompts, Mapping):
        return _rows(prompts) if "input_ids" in prompts else [prompts]
    tolist = getattr(prompts, "tolist", None)
    many: Any = prompts if tolist is None else tolist()
    if isinstance(many, str) or not isinstance(many, Sequence) or (len(many) and (_is_int(many[0]) or _is_message(many[0]))):
        return [many]
    return list(many)


def _rows(encoding: Mapping[str, Any]) -> list[Prompt]:
    """The rows of a tokenizer's result, without their padding."""
    ids = as_prompts(encoding["input_ids"])
    if encoding.get("attention_mask") is None:
        return ids
    masks: list[Any] = as_prompts(encoding["attention_mask"])
    if list(map(len, masks)) != list(map(len, ids)):
        raise ValueError("input_ids and attention_mask have different shapes")
    found: list[Prompt] = []
    for row, mask in zip(ids, masks, strict=True):
        keep = [bool(m) for m in mask]
        first, count = (keep.index(True) if any(keep) else 0), sum(keep)
        if not all(keep[first : first + count]):
            raise ValueError(f"the attention_mask of row {len(found)} has zeros between ones; only padding at the ends can be "
                             "masked")
        found.append(list(row)[first : first + count])  # type: ignore[arg-type]
    return found


def _is_message(item: Any) -> bool:
    return isinstance(item, Mapping) and "role" in item


def _is_int(item: Any) -> bool:
    try:
        operator.index(item)
    except Exception:  # a tensor on the meta device, say, raises errors of its own
        return False
    return getattr(item, "ndim", 0) == 0  # a 1-D tensor of one token is a prompt


def params_of(params: SamplingParams | None) -> SamplingParams:
    """``params``, or the defaults for None. Raises TypeError for other types."""
    if params is not None and not isinstance(params, SamplingParams):
        example = ", ".join(f"{k}={v!r}" for k, v in params.items()) if isinstance(params, dict) else "max_tokens=16"
        raise TypeError(f"params must be SamplingParams, got {str(params)[:60]!r}; write SamplingParams({example})")
    return SamplingParams() if params is None else params


def each_of(name: str, given: Any, count: int) -> list[Any]:
    """One value for each of ``count`` prompts: ``given`` for all, or its items. Raises ValueError for another number."""
    if not isinstance(given, Sequence) or isinstance(given, str):
        return [given] * count
    if len(given) != count:
        raise ValueError(f"{count} prompts but {len(given)} {name}; give one for all or one for each")
    return list(given)


def pairs_of(prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
             ) -> list[tuple[Prompt, SamplingParams]]:
    """Each prompt with its params: one SamplingParams for all, or one per prompt. Raises ValueError for different numbers of
    them, TypeError for params of another type."""
    batch = as_prompts(prompts)
    many = isinstance(params, Sequence) and not isinstance(params, str)
    checked: Any = [params_of(p) for p in params] if many else params_of(params)  # type: ignore[union-attr,arg-type]
    return list(zip(batch, each_of("SamplingParams", checked, len(batch)), strict=True))


def text_of(prompt: Prompt) -> str | None:
    """The prompt's text, if it was given as text."""
    text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
    return text if isinstance(text, str) else None


def token_ids_of(prompt: Prompt, tokenizer: Any, vocab_size: int, max_model_len: int, keep: int | None = None) -> list[int]:
    """The token ids of a prompt, of more than ``keep`` the last ones. Raises ValueError or TypeError for a prompt that cannot
    be served."""
    given: Any = _content(prompt) if isinstance(prompt, Mapping) else prompt
    if isinstance(given, Sequence) and not isinstance(given, str) and given and _is_message(given[0]):
        ids = _encode(render_chat(given, tokenizer), tokenizer, add_special_tokens=False)  # the template has them
    elif isinstance(given, str):
        ids = _encode(given, tokenizer)
    else:
        try:
            if isinstance(given, (bytes, bytearray, memoryview)):  # text that was not decoded, and a sequence of integers
                raise TypeError
            plain = type(given) is list and set(map(type, given)) == {int}
            ids = given[:] if plain else [operator.index(i) for i in given]
            if not plain and any(isinstance(i, bool) for i in given):  # a mask
                raise TypeError
        except TypeError:
            raise TypeError(f"a prompt is text or a list of token ids, got {str(given)[:60]!r}") from None
    ids = ids if keep is None else ids[-keep:]
    if not ids:
        raise ValueError("the prompt is empty; give at least one token")
    if min(ids) < 0 or max(ids) >= vocab_size:
        bad = [i for i in ids if not 0 <= i < vocab_size]
        raise ValueError(f"token ids {bad[:5]} are outside the vocabulary of {vocab_size} tokens")
    if len(ids) >= max_model_len:
        raise ValueError(
            f"the prompt has {len(ids)} tokens; a request may have {max_model_len}, prompt and continuation, and needs room "
            "for a new token, also where none is asked for (the limit is the smallest of max_model_len, the model's length "
            "and what the KV cache holds). Shorten the prompt, or raise num_pages or max_model_len")
    return ids


def appended_to_texts(tokenizer: Any, ids: Sequence[int]) -> list[int]:
    """The tokens that the tokenizer puts behind every text, such as an end token, if ``ids`` of a text that is not empty end
    with them: those of no text at all, but for what they begin with as ``ids`` do."""
    of_nothing = _encode("", tokenizer)
    before = next((i for i, (a, b) in enumerate(zip(of_nothing, ids, strict=False)) if a != b), len(of_nothing))
    found = of_nothing[before:]
    return found if found and list(ids[-len(found):]) == found else []


def _content(prompt: Mapping[str, Any]) -> Any:
    """The content of a prompt given as a dict, in vLLM's form."""
    given = {key: value for key, value in prompt.items() if value is not None}
    if "prompt_token_ids" in given and given.keys() <= {"prompt", "prompt_token_ids"}:
        return given["prompt_token_ids"]
    if given.keys() != {"prompt"}:
        raise ValueError("a prompt given as a dict has the key prompt or prompt_token_ids, got "
                         f"{', '.join(map(str, given)) or 'none'}; quire serves text")
    return given["prompt"]


def render_chat(messages: Sequence[Mapping[str, Any]], tokenizer: Any, **options: Any) -> str:
    """The text of a chat, by default up to where the assistant's answer begins. ``options``: of ``apply_chat_template``. Raises
    ValueError if there is no template, it does not take these messages, or they have more than text."""
    if not callable(getattr(tokenizer, "apply_chat_template", None)) or not (
            getattr(tokenizer, "chat_template", None) or options.get("chat_template")):
        raise ValueError("the prompt is a list of messages, and the engine has no tokenizer with a chat template; set "
                         "tokenizer.chat_template, or give text or token ids")
    parts = {i: m["content"] for i, m in enumerate(messages) if isinstance(m.get("content"), (list, tuple))}
    kinds = {str(part.get("type") if isinstance(part, Mapping) else part) for content in parts.values() for part in content}
    if kinds - {"text"}:
        raise ValueError(f"a message has parts of type {', '.join(sorted(kinds - {'text'}))}; quire serves text")
    options = {"add_generation_prompt": True, **options, "tokenize": False}
    try:
        text = tokenizer.apply_chat_template(list(messages), **options)
        if any(str(content) in text for content in parts.values()):  # a template for strings has printed the lists
            plain = [{**m, "content": "\n".join(p["text"] for p in parts[i])} if i in parts else m
                     for i, m in enumerate(messages)]
            text = tokenizer.apply_chat_template(plain, **options)
    except Exception as error:  # of the template's own code
        raise ValueError(f"the tokenizer's chat template does not take these messages: {error}") from error
    assert isinstance(text, str)
    return text


def chat_prompt(messages: Prompt, tokenizer: Any, **options: Any) -> Prompt:
    """A chat as its text and token ids. Raises TypeError for another prompt; see ``render_chat``."""
    if isinstance(messages, (str, Mapping)) or not isinstance(messages, Sequence) or not messages or not _is_message(
            messages[0]):
        raise TypeError(f"a chat is a list of messages {{'role': ..., 'content': ...}}, got {str(messages)[:60]!r}")
    text = render_chat(messages, tokenizer, **options)  # type: ignore[arg-type]
    return {"prompt": text, "prompt_token_ids": _encode(text, tokenizer, add_special_tokens=False)}  # the template has them


def _encode(text: str, tokenizer: Any, **options: Any) -> list[int]:
    if tokenizer is None:
        raise TypeError("the prompt is text, but the engine has no tokenizer; pass one, or give token ids")
    if not callable(tokenizer):
        raise TypeError(f"the prompt is text, and the tokenizer, {type(tokenizer).__name__}, cannot be called with it as "
                        "those of transformers can; pass one of these, or give token ids")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"the prompt is not valid text: character {error.start} is {text[error.start]!r}, half of a surrogate pair, "
            "as from bytes that are not UTF-8 (errors='surrogateescape'); decode them with errors='replace'") from None
    return list(tokenizer(text, **options)["input_ids"])
