"""Checkpoints on disk: read completely and checked against a model, and written in shards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

INDEX = "model.safetensors.index.json"


def files_of(path: Path) -> list[Path]:
    """The safetensors files of a checkpoint.

    Raises:
        FileNotFoundError: none, or one that the index names is missing.
    """
    index = path / INDEX
    if index.is_file():
        files = [path / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    else:
        files = sorted(path.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"no checkpoint at {path}: expected *.safetensors files, as save_pretrained writes them")
    for file in files:
        if not file.is_file():
            raise FileNotFoundError(f"{file}, which {index.name} names, is missing")
    return files


def read_checkpoint(path: Path, model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint in host memory, by the names of ``model``.

    Raises:
        FileNotFoundError: see ``files_of``. ValueError: a file cut short, or with a broken header, or two files with the same
            parameter; names them.
    """
    values: dict[str, torch.Tensor] = {}
    held_by: dict[str, str] = {}
    for file in files_of(path):
        try:
            with safe_open(str(file), framework="pt") as opened:
                own = {name: opened.get_tensor(name) for name in opened.keys()}
        except Exception as error:
            raise ValueError(f"{file.name} is incomplete or not a safetensors file ({error})") from error
        for name in own:
            if name in held_by:
                raise ValueError(f"{held_by[name]} and {file.name} both hold the parameter {name!r}: the folder has files of "
                                 "two checkpoints. Remove those of one")
            held_by[name] = file.name
        values |= own
    names = set(model.state_dict())
    if values.keys() <= names or not hasattr(type(model), "from_pretrained"):
        return values
    return _converted(path, model)


def _converted(path: Path, model: Any) -> dict[str, torch.Tensor]:
    """The state of a second model, which transformers loads with its renaming and merging of parameters."""
    plain = type(model).__dict__.get("_plain_class", type(model))  # quire.paged puts a subclass in the place of the class
    other, report = plain.from_pretrained(str(path), config=model.config, dtype=next(model.parameters()).dtype,
                                          output_loading_info=True)
    missing, mismatched = report["missing_keys"], report.get("mismatched_keys") or ()
    state = other.state_dict()
    for name in {*missing, *(key[0] if isinstance(key, tuple) else key for key in mismatched)}:
        state.pop(name, None)  # random values, which the caller must notice
    return state


def save_checkpoint(path: Path, model: Any, tokenizer: Any, max_size: int | str) -> None:
    """Write a model in shards; transformers models with their config, and the tokenizer if there is one."""
    if hasattr(model, "save_pretrained"):
        model.save_pretrained(str(path), max_shard_size=max_size)
    else:
        from huggingface_hub import save_torch_state_dict

        seen: set[int] = set()
        state = {}
        for name, tensor in model.state_dict(keep_vars=True).items():
            if id(tensor) not in seen:  # tied ones once; copies, since fused parameters share memory and are not tied
                seen.add(id(tensor))
                state[name] = tensor.detach().to("cpu", copy=True).contiguous()
        save_torch_state_dict(state, str(path), max_shard_size=max_size)
    if tokenizer is not None and hasattr(tokenizer, "save_pretrained"):
        tokenizer.save_pretrained(str(path))


__all__ = ["files_of", "read_checkpoint", "save_checkpoint"]
