"""What the engine reads from a model and its tokenizer: files, lengths, vocabulary, end tokens, dtypes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from quire.attn_ops.backend import UnsupportedAttention
from quire.graph_runner.config import EngineConfig
from quire.passes.verify.sites import check_config, text_config, transformers_config

T = TypeVar("T")
TINY_MODEL = Path(__file__).parent / "assets" / "tiny-llama"
DEFAULT_LENGTH = 2048  # for a model whose config has no maximum


def load(model: torch.nn.Module | str | Path, tokenizer: Any, dtype: torch.dtype | str | None = None
         ) -> tuple[torch.nn.Module, Any]:
    """The model and its tokenizer; a path is loaded with transformers, on the GPU if there is one, in ``dtype`` (None: the
    checkpoint's). A model that is there already stays as it is.

    Raises:
        FileNotFoundError: no folder at that path (quire loads from disk; it does not download).
        ValueError: ``tokenizer`` has no ``decode``, ``model`` no parameters, or weights are missing or cut short.
        UnsupportedAttention: the checkpoint is not one of a causal LM.
    """
    if tokenizer is not None and (isinstance(tokenizer, type) or not callable(getattr(tokenizer, "decode", None))):
        raise ValueError(
            f"tokenizer must be an object with a decode method, such as transformers' AutoTokenizer.from_pretrained(...) "
            f"returns, got {str(tokenizer)[:60]!r}; omit it to use token ids only")
    if isinstance(model, torch.nn.Module):
        if next(model.parameters(), None) is None:
            raise ValueError(f"{type(model).__name__} has no parameters")
        return model, tokenizer
    path = Path(model)
    if not (path / "config.json").is_file():
        raise FileNotFoundError(f"no model at {path}: expected a folder with config.json, as save_pretrained writes it")
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    _check_checkpoint(path, AutoConfig.from_pretrained(str(path)))
    from safetensors import SafetensorError

    loader: Any = AutoModelForCausalLM
    try:
        options = {} if dtype is None else {"dtype": dtype}
        loaded, report = loader.from_pretrained(str(path), output_loading_info=True, **options)
    except SafetensorError as error:
        raise ValueError(f"the weights at {path} are incomplete or not a safetensors file ({error})") from error
    if missing := sorted(report["missing_keys"]):
        raise ValueError(f"the checkpoint at {path} lacks {len(missing)} of the weights of {type(loaded).__name__}, which "
                         f"would be random: {', '.join(missing[:3])}{', ...' if len(missing) > 3 else ''}")
    loaded = loaded.to("cuda" if torch.cuda.is_available() else "cpu").eval()
    if tokenizer is None and any((path / f).is_file() for f in ("tokenizer.json", "tokenizer_config.json")):
        tokenizer = AutoTokenizer.from_pretrained(str(path))
    return loaded, tokenizer


def readable(path: Any, load: Callable[[], T]) -> T:
    """The result of ``load``, which reads the files at ``path``. Raises ValueError for missing or corrupt weights, invalid
    JSON, a setting of the wrong type."""
    from huggingface_hub import errors
    from safetensors import SafetensorError

    wrong = (OSError, TypeError, json.JSONDecodeError, SafetensorError, getattr(errors, "StrictDataclassError", OSError))
    try:
        return load()
    except FileNotFoundError:
        raise
    except wrong as error:
        raise ValueError(f"the model at {path} cannot be loaded: {' '.join(str(error).split())}") from error


def model_of_command(path: str | None, text: bool = False) -> tuple[Any, Any]:
    """The model at a path of the command line, or the shipped one, and its tokenizer. Raises ValueError as ``readable``, and
    without a tokenizer where ``text`` needs one; others as ``load``."""
    model, tokenizer = readable(path or TINY_MODEL, lambda: load(path or TINY_MODEL, None))
    if text and tokenizer is None:
        raise ValueError(f"{path} has no tokenizer (tokenizer.json or tokenizer_config.json)")
    return model, tokenizer


def _check_checkpoint(path: Path, config: Any) -> None:
    """Refuse a checkpoint that AutoModelForCausalLM cannot load, or only with a random language-model head."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    if getattr(config, "auto_map", None):  # its own code says what it is
        return
    check_config(config)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UnsupportedAttention(f"the model at {path} is a {config.model_type}, which transformers' AutoModelForCausalLM "
                                   "does not know; load the model yourself and pass it instead of the path")
    saved = config.architectures or []
    saved = [saved] if isinstance(saved, str) else saved
    known: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if saved and not any(name == known.__name__ or name.endswith(("ForCausalLM", "LMHeadModel")) for name in saved):
        raise UnsupportedAttention(f"the model at {path} was saved as {', '.join(saved)}, without a language-model head; quire "
                                   "serves causal LMs")


def check_model(model: torch.nn.Module) -> None:
    """Refuse a model that is not a causal LM, before anything else is read from it. Raises UnsupportedAttention, which says
    why."""
    config = transformers_config(model)
    if config is not None:
        check_config(config)
    can_generate = getattr(model, "can_generate", None)
    head = getattr(model, "get_output_embeddings", None)
    if callable(can_generate) and callable(head) and not can_generate() and head() is None:
        raise UnsupportedAttention(f"{type(model).__name__} has no language-model head; quire serves causal LMs, such as a "
                                   "...ForCausalLM class of transformers")
    empty = next((name for name, p in model.named_parameters() if p.device.type == "meta"), None)
    if empty is not None:
        raise UnsupportedAttention(f"{empty} is on the meta device, so it has no values (weights that accelerate offloads to "
                                   "the CPU or a disk are there too). Load the model whole onto one device")


def limited(config: EngineConfig, model: torch.nn.Module) -> EngineConfig:
    """``config`` with ``max_model_len`` set, and no larger steps than its requests can fill. Raises ValueError if
    ``max_model_len`` is more than the model has positions."""
    length = model_length(model, config.max_model_len)
    if config.num_pages is not None and config.max_model_len is None:  # else the engine limits it, where pages are not reused
        length = max(2, min(length, (config.num_pages - 1) * config.page_size))
    return replace(config, max_model_len=length,
                   max_num_batched_tokens=min(config.max_num_batched_tokens, length * config.max_num_seqs))


def model_length(model: torch.nn.Module, requested: int | None) -> int:
    """Maximum tokens of a sequence. Raises ValueError if more are requested than the model has positions."""
    config = text_config(getattr(model, "config", None))
    own = next((getattr(config, n) for n in ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", "block_size")
                if isinstance(length := getattr(config, n, None), int) and length > 0), None)  # XLNet's is -1: no maximum
    if requested is not None and own is not None and requested > own:
        raise ValueError(f"max_model_len={requested}, but the model has {own} positions")
    return requested or own or DEFAULT_LENGTH


def input_embedding(model: torch.nn.Module) -> Any:
    """The input embedding of a transformers model, which has a ``weight``; None for others."""
    get = getattr(model, "get_input_embeddings", None)
    embedding = get() if get is not None else None
    return embedding if hasattr(embedding, "weight") else None


def vocab_size(model: torch.nn.Module) -> int:
    """Rows of the input embedding, the bound of token ids. Of a model that names none one of its embeddings is taken for it, as
    others may be for positions: that with the rows of the config's vocabulary, with the weight of a linear layer, or with a row
    for each output of one (the last such), and else the longest. ``check_vocabulary`` asks the trace if that was right."""
    if (embedding := input_embedding(model)) is not None:
        return int(embedding.weight.shape[0])
    found = {m.num_embeddings: m.weight for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    if not found:
        raise ValueError(f"{type(model).__name__} has no embedding, so its vocabulary size is unknown")
    named = getattr(getattr(model, "config", None), "vocab_size", None)
    if named in found:
        return int(named)
    heads = [m for m in model.modules() if isinstance(m, torch.nn.Linear)]
    tied = [rows for rows, weight in found.items() if any(head.weight is weight for head in heads)]
    return next((rows for rows in (*tied, *(head.out_features for head in reversed(heads))) if rows in found), max(found))


def check_vocabulary(model: torch.nn.Module, tables: Sequence[int], num_logits: int) -> None:
    """Refuse a model that names no input embedding, and whose ``vocab_size`` is not that of its token ids: those beyond its
    table would fail a step, with all requests in it. ``tables``: rows of each table that the trace looks token ids up in; if
    there is none, as many ids as the model gives logits of are good. Raises UnsupportedAttention."""
    if input_embedding(model) is not None:
        return
    chosen = vocab_size(model)
    rows = min(tables, default=min(chosen, num_logits))
    if chosen != rows:
        found = f"token ids are looked up in {rows} rows" if tables else f"it gives logits of {rows} tokens"
        raise UnsupportedAttention(
            f"{type(model).__name__} does not say which of its tables is for token ids: its vocabulary was taken for "
            f"{chosen}, by the sizes of its modules, and {found}. Give it a method get_input_embeddings(self) that returns "
            "the embedding of token ids.")


def eos_token_ids(model: torch.nn.Module, tokenizer: Any) -> frozenset[int]:
    """Tokens that end a sequence: from the generation config, else the config, else the tokenizer."""
    for owner in (getattr(model, "generation_config", None), text_config(getattr(model, "config", None)), tokenizer):
        ids = getattr(owner, "eos_token_id", None)
        if ids is not None:
            return frozenset([ids] if isinstance(ids, int) else ids)
    return frozenset()


def progress_bar(items: Sequence[Any], description: str) -> Iterator[Any]:
    """Iterate over ``items`` with a progress bar that disappears at the end."""
    from rich.progress import track

    yield from track(items, description=description, transient=True)
