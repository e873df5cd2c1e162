"""What the engine must know of a model and its tokenizer: loading, lengths, end tokens, defaults."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import torch

from quire.attn_ops.kv_quant import ALIASES

TINY_MODEL = Path(__file__).parent / "assets" / "tiny-llama"
DEFAULT_LENGTH = 2048  # for a model that does not say how long its sequences may be


def load(model: torch.nn.Module | str | Path, tokenizer: Any, **kwargs: Any) -> tuple[torch.nn.Module, Any]:
    """The model and its tokenizer; a path is loaded with transformers, on the GPU if there is one.

    Raises:
        FileNotFoundError: no folder at that path (quire loads from disk; it does not download).
    """
    if isinstance(model, torch.nn.Module):
        if next(model.parameters(), None) is None:
            raise ValueError(f"{type(model).__name__} has no parameters")
        return model, tokenizer
    path = Path(model)
    if not (path / "config.json").is_file():
        raise FileNotFoundError(f"no model at {path}: expected a folder with config.json, as save_pretrained writes it")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    device = "cuda" if torch.cuda.is_available() else "cpu"
    loaded: Any = AutoModelForCausalLM.from_pretrained(str(path), **kwargs)
    loaded = loaded.to(device).eval()
    if tokenizer is None and any((path / f).is_file() for f in ("tokenizer.json", "tokenizer_config.json")):
        tokenizer = AutoTokenizer.from_pretrained(str(path))
    return loaded, tokenizer


def _text_config(model: torch.nn.Module) -> Any:
    config = getattr(model, "config", None)
    get = getattr(config, "get_text_config", None)
    return get(decoder=True) if get is not None else config


def check_arguments(gpu_memory_utilization: float, tokenizer: Any = None, async_stepping: bool | None = None, *,
                    seed: int | None = None, num_pages: int | None = None, max_model_len: int | None = None,
                    **at_least_one: int | None) -> None:
    """Check arguments of the engine before anything is loaded; None is one that was not given. How long sequences may be is
    for ``model_length`` to say.

    Raises:
        ValueError: one that is out of range, or of the wrong type.
    """
    for name, value in (at_least_one | dict(num_pages=num_pages, max_model_len=max_model_len, seed=seed)).items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, Integral)):
            raise ValueError(f"{name} must be an integer, got {value!r}")
    for name, value in at_least_one.items():
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if num_pages is not None and num_pages < 2:
        raise ValueError(f"num_pages: a KV cache needs at least 2 pages (page 0 is the null page), got {num_pages}; None is "
                         "for as many as fit")
    share = gpu_memory_utilization
    if isinstance(share, bool) or not isinstance(share, Real) or not 0 < share <= 1:
        raise ValueError(f"gpu_memory_utilization is a share of the memory, in (0, 1]; got {share!r}")
    if async_stepping is not None and not isinstance(async_stepping, bool):
        raise ValueError(f"async_stepping must be True, False, or None for what suits the device; got {async_stepping!r}")
    if tokenizer is not None and (isinstance(tokenizer, type) or not callable(getattr(tokenizer, "decode", None))):
        raise ValueError(
            f"tokenizer must be an object with a decode method, such as transformers' AutoTokenizer.from_pretrained(...) "
            f"returns, got {str(tokenizer)[:60]!r}; for token ids alone leave it out")


def model_length(model: torch.nn.Module, asked: int | None) -> int:
    """Most tokens of a sequence. Raises ValueError if more are asked for than the model has positions."""
    config = _text_config(model)
    own = next((getattr(config, n) for n in ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx")
                if isinstance(getattr(config, n, None), int)), None)
    if asked is not None and asked < 2:
        raise ValueError(f"max_model_len must be at least 2 (a prompt token and a generated one), got {asked}")
    if asked is not None and own is not None and asked > own:
        raise ValueError(f"max_model_len={asked}, but the model has {own} positions")
    return asked or own or DEFAULT_LENGTH


def vocab_size(model: torch.nn.Module) -> int:
    """Rows of the input embedding: ids from there on cannot be looked up."""
    get = getattr(model, "get_input_embeddings", None)
    embedding = get() if get is not None else None
    if hasattr(embedding, "weight"):
        return int(embedding.weight.shape[0])  # type: ignore[union-attr]
    found = [m.num_embeddings for m in model.modules() if isinstance(m, torch.nn.Embedding)]
    if not found:
        raise ValueError(f"{type(model).__name__} has no embedding; quire cannot tell its vocabulary")
    return max(found)


def eos_token_ids(model: torch.nn.Module, tokenizer: Any) -> frozenset[int]:
    """Tokens that end a sequence, from the generation config, else the config, else the tokenizer."""
    for owner in (getattr(model, "generation_config", None), _text_config(model), tokenizer):
        ids = getattr(owner, "eos_token_id", None)
        if ids is not None:
            return frozenset([ids] if isinstance(ids, int) else ids)
    return frozenset()


def kv_dtype(name: str | torch.dtype) -> torch.dtype | None:
    """The dtype of the KV cache; None for "auto". "fp8" and "fp8_e4m3" are float8_e4m3fn, "fp8_e5m2" is float8_e5m2.

    Raises:
        ValueError: a name that is none.
    """
    if isinstance(name, torch.dtype):
        return name
    if name == "auto":
        return None
    dtype = ALIASES.get(name, getattr(torch, name, None)) if isinstance(name, str) else None
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"kv_cache_dtype {name!r} is neither 'auto' nor a torch dtype such as 'bfloat16' or 'int8' nor one of "
                         f"{', '.join(map(repr, ALIASES))}")
    return dtype


def default_compiler(name: str, device: torch.device) -> str:
    """"auto" resolved. On a CPU the lowered graph runs op by op: no C++ compiler needed, and no minutes of compiling."""
    return name if name != "auto" else "inductor" if device.type == "cuda" else "eager"


def progress_bar(items: Sequence[Any], description: str) -> Iterator[Any]:
    """Go through ``items`` with a bar that goes away in the end."""
    from rich.progress import track

    yield from track(items, description=description, transient=True)
