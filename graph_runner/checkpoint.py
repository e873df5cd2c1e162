"""Checkpoints on disk: read completely and checked against a model, and written in shards."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from quire.graph_runner.on_instance import class_of

#: Settings by which no model computes in evaluation: what each call says, and what only training reads; beside names that end
#: with "dropout" or "dropout_prob". ``max_position_embeddings`` too where no rope is made of it (``_ROPES``).
_HARMLESS = frozenset((
    "transformers_version", "architectures", "auto_map", "dtype", "torch_dtype", "quantization_config", "tokenizer_class",
    "id2label", "label2id", "problem_type", "task_specific_params", "finetuning_task", "return_dict", "use_cache",
    "output_attentions", "output_hidden_states", "output_router_logits", "chunk_size_feed_forward", "gradient_checkpointing",
    "initializer_range", "initializer_factor", "init_std", "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id",
    "cls_token_id", "mask_token_id", "decoder_start_token_id", "router_aux_loss_coef", "aux_loss_alpha", "seq_aux",
    "resid_pdrop", "embd_pdrop", "attn_pdrop", "neftune_noise_alpha", "torchscript", "use_bfloat16", "tie_encoder_decoder",
    "prefix", "pretraining_tp", "keys_to_ignore_at_inference", "model_max_length", "transformers.js_config",
    "axolotl_config_path", "unsloth_version", "unsloth_fixed"))
_ROPES = ("default", "linear", "llama3", None)
INDEX, WHOLE = "model.safetensors.index.json", "model.safetensors"


class CheckpointError(ValueError):
    """A checkpoint that cannot be taken; ``name``: of a parameter that is the reason, if one is known."""

    def __init__(self, message: str, name: str | None = None) -> None:
        super().__init__(message)
        self.name = name


def files_of(path: Path) -> list[Path]:
    """The safetensors files of a checkpoint. Raises FileNotFoundError if there is none, or one that the index names is missing;
    CheckpointError for a whole one beside one in shards."""
    index = path / INDEX
    holds: dict[str, str] = {}
    if index.is_file():
        holds = {name: parameter for parameter, name in reversed(json.loads(index.read_text())["weight_map"].items())}
        files = [path / name for name in sorted(holds)]
        if (path / WHOLE).is_file() and WHOLE not in holds:
            if any(file.is_file() for file in files):
                raise CheckpointError(f"{WHOLE} and {index.name} are of two checkpoints. Remove the files of one")
            files = [path / WHOLE]  # an index whose shards are gone: transformers leaves it when it saves a model whole
    else:
        files = sorted(path.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"no checkpoint at {path}: expected *.safetensors files, as save_pretrained writes them")
    for file in files:
        if not file.is_file():
            raise FileNotFoundError(f"{file}, which {index.name} names, is missing, and the parameter {holds[file.name]!r} "
                                    "with it")
    return files


def read_checkpoint(path: Path, model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint in host memory, by the names of ``model``. Raises FileNotFoundError as ``files_of``;
    CheckpointError, with their names, for a file cut short, or with a broken header, or two files with the same parameter; a
    parameter that the model has not; a quantized checkpoint for a model that is not."""
    values: dict[str, torch.Tensor] = {}
    held_by: dict[str, str] = {}
    for file in files_of(path):
        try:
            with safe_open(str(file), framework="pt") as opened:
                own = {name: opened.get_tensor(name) for name in opened.keys()}
        except Exception as error:
            lost = _lost(file, path)
            raise CheckpointError(f"{file.name} is incomplete or not a safetensors file ({error})" + (
                f"; the parameter {lost!r} cannot be read" if lost else ""), lost) from error
        for name in own:
            if name in held_by:
                raise CheckpointError(f"{held_by[name]} and {file.name} both hold the parameter {name!r}: the folder has files "
                                      "of two checkpoints. Remove those of one", name)
            held_by[name] = file.name
        values |= own
    names = set(model.state_dict())
    _check_config(path, model)
    if values.keys() <= names or not hasattr(type(model), "from_pretrained"):
        return values
    return _converted(path, model)


def _check_config(path: Path, model: Any) -> None:
    """Refuse a quantized checkpoint for a model that is not quantized, whose codes would be taken for weights, and one of a
    model that computes otherwise, such as with another rope."""
    file = path / "config.json"
    own: Any = getattr(model, "config", None)
    if not file.is_file() or not hasattr(type(own), "from_pretrained"):
        return
    saved = json.loads(file.read_text())
    quantization, theirs = saved.get("quantization_config"), None
    if saved.get("model_type") == own.model_type:
        theirs = type(own).from_pretrained(str(path))
    else:  # a language model of one with images
        part = next((v for v in saved.values() if isinstance(v, dict) and v.get("model_type") == own.model_type), None)
        theirs = None if part is None else type(own).from_dict(part)
    if theirs is None:
        raise CheckpointError(f"it is of a {saved.get('model_type')}, the model that is served a {own.model_type}: the same "
                              "weights may give other logits. Make an engine from that path")
    if (other := _difference(theirs.to_dict(), own.to_dict())) is not None:
        name, there, here = other
        raise CheckpointError(f"its config has {name}={there}, the model that is served {here}: the same weights give other "
                              "logits. Make an engine from that path; or, if that setting does nothing, give the tensors to "
                              "update_weights_from_tensors")
    if quantization and getattr(own, "quantization_config", None) is None:
        raise CheckpointError(f"it is quantized ({quantization.get('quant_method', 'unknown method')}), and the model that is "
                              "served is not. Give a checkpoint in the model's own dtype, or make an engine from that path")


def _difference(theirs: dict[str, Any], own: dict[str, Any], prefix: str = "") -> tuple[str, Any, Any] | None:
    """The first setting in which two configs differ, and its values; None: in none by which a model computes."""
    for name in dict.fromkeys([*theirs, *own]):
        there, here = (_rope(name, of.get(name)) for of in (theirs, own))
        if there == here or name[0] == "_" or name in _HARMLESS or name.endswith(("dropout", "dropout_prob")):
            continue
        if name == "max_position_embeddings" and all(kind in _ROPES for kind in _rope_types(own.get("rope_parameters"))):
            continue
        if isinstance(there, dict) and isinstance(here, dict) and "model_type" in there and "model_type" in here:
            found = _difference(there, here, f"{prefix}{name}.")
            if found is not None:
                return found
        else:
            return prefix + name, there, here
    return None


def _rope(name: str, setting: Any) -> Any:
    """Parameters of a rope without an older name that says the same; any other setting as it is."""
    if name != "rope_parameters" or not isinstance(setting, dict):
        return setting
    return {key: _rope(name, x) for key, x in setting.items() if key != "type" or x != setting.get("rope_type")}


def _rope_types(parameters: Any) -> list[Any]:
    """Of ``rope_parameters``, which a config may have for each kind of layer."""
    if not isinstance(parameters, dict):
        return []
    nested = [p for p in parameters.values() if isinstance(p, dict)]
    return [p.get("rope_type") for p in nested or [parameters]]


def _lost(file: Path, path: Path) -> str | None:
    """The first parameter that a file cut short does not hold whole: by its header, or by the index where that is cut too."""
    try:
        size = file.stat().st_size
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(min(length, size)))
        ends = {name: 8 + length + entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"}
        return next((name for name in sorted(ends, key=ends.__getitem__) if ends[name] > size), None)
    except (ValueError, KeyError, TypeError, AttributeError):
        if not (path / INDEX).is_file():
            return None
        held = json.loads((path / INDEX).read_text())["weight_map"]
        return next((name for name in held if held[name] == file.name), None)


def _converted(path: Path, model: Any) -> dict[str, torch.Tensor]:
    """The state of a second model, which transformers loads with its renaming and merging of parameters."""
    plain: Any = class_of(model)
    dtypes = {p.dtype for p in model.parameters() if p.dtype.is_floating_point}
    dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32  # parameters of more than one: none is rounded on the way
    other, report = plain.from_pretrained(str(path), config=model.config, dtype=dtype, output_loading_info=True)
    if unexpected := sorted(report.get("unexpected_keys") or ()):  # such as a bias, or the scales of codes
        more = f" and {len(unexpected) - 1} others" if len(unexpected) > 1 else ""
        raise CheckpointError(f"it holds the parameter {unexpected[0]!r}{more}, which {plain.__name__} has not. Give the "
                              "parameters that the model has with update_weights_from_tensors, or make an engine of a model "
                              "that has them all", unexpected[0])
    missing, mismatched = report["missing_keys"], report.get("mismatched_keys") or ()
    state = other.state_dict()
    for name in {*missing, *(key[0] if isinstance(key, tuple) else key for key in mismatched)}:
        state.pop(name, None)  # random values, which the caller must notice
    return state


def save_checkpoint(path: Path, model: Any, tokenizer: Any, max_size: int | str) -> None:
    """Write a model in shards; transformers models with their config, and the tokenizer if there is one. Raises CheckpointError
    for a parameter whose codes and scales safetensors cannot hold, unless transformers quantized the model and knows how to
    write it, and writes nothing."""
    if getattr(getattr(model, "config", None), "quantization_config", None) is None:
        for name, tensor in model.state_dict(keep_vars=True).items():
            if is_traceable_wrapper_subclass(tensor):
                raise CheckpointError(
                    f"the parameter {name!r} is quantized ({type(tensor).__name__}), which safetensors files cannot hold. Save "
                    "the model before it is quantized, quantize it with from_pretrained(..., quantization_config=...), or keep "
                    "its state_dict with torch.save", name)
    with _replacing(path / INDEX, path / WHOLE):  # a whole checkpoint would stay beside one in shards, or an index beside it
        _save(path, model, max_size)
    if tokenizer is not None and hasattr(tokenizer, "save_pretrained"):
        tokenizer.save_pretrained(str(path))


@contextmanager
def _replacing(*files: Path) -> Iterator[None]:
    """Put these files away, and back where what follows fails."""
    away = {file: file.with_name(file.name + ".before") for file in files if file.is_file()}
    for file, other in away.items():
        file.rename(other)
    try:
        yield
    except BaseException:
        for file, other in away.items():
            other.rename(file)
        raise
    for other in away.values():
        other.unlink()


def _save(path: Path, model: Any, max_size: int | str) -> None:
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
