"""The model under test: a shape with random weights made on the device, or a saved model.

The time of a step does not depend on the values of the weights, apart from which experts a router picks (random weights
spread the tokens almost evenly).
"""

from __future__ import annotations

import functools
import gc
import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from quire.graph_runner.bench.shapes import NAMES, QUANTIZATIONS, SHAPES
from quire.graph_runner.loading import TINY_MODEL


@dataclass(frozen=True)
class ModelSpec:
    """Which model to measure: a name of SHAPES, "tiny" (the shipped model's shape), or the path of a saved model; its first
    ``layers`` (None: all); a quantization of QUANTIZATIONS, or None. Raises ValueError for an unknown quantization,
    ModuleNotFoundError without torchao."""

    name: str
    dtype: torch.dtype
    device: torch.device
    layers: int | None = None
    quantization: str | None = None

    def __post_init__(self) -> None:
        if self.quantization is not None and self.quantization not in QUANTIZATIONS:
            raise ValueError(f"unknown quantization {self.quantization!r}; there are: {', '.join(QUANTIZATIONS)}")
        if self.quantization is not None and importlib.util.find_spec("torchao") is None:
            raise ModuleNotFoundError("quantizing needs torchao, which is not installed: pip install 'quire[torchao]'")

    @property
    def label(self) -> str:
        """The name for tables and files; a path's last part."""
        name = Path(self.name).name if self.is_path else self.name
        return name if self.layers is None else f"{name}/{self.layers}l"

    @property
    def is_path(self) -> bool:
        return self.name not in NAMES


def layers_asked(given: int | None) -> int | None:
    """``--layers``, else the environment variable LAYERS, else None. Raises ValueError below 1."""
    text = os.environ.get("LAYERS")
    layers = given if given is not None else int(text) if text else None
    if layers is not None and layers < 1:
        raise ValueError(f"--layers must be at least 1, got {layers}")
    return layers


def config_of(spec: ModelSpec) -> Any:
    """The transformers config of the model, cut to ``spec.layers``. Raises ValueError if the name is neither a shape nor a
    folder with config.json, or the model has fewer layers."""
    import transformers

    if spec.name in SHAPES:
        kind, options = SHAPES[spec.name]
        config = getattr(transformers, kind)(**options)
    else:
        path = TINY_MODEL if spec.name == "tiny" else Path(spec.name)
        if not (path / "config.json").is_file():
            raise ValueError(f"{spec.name!r} is neither a shape ({', '.join(NAMES)}) nor a folder with a config.json")
        config = transformers.AutoConfig.from_pretrained(str(path))
    if spec.layers is not None:
        text = config.get_text_config(decoder=True)
        if spec.layers > text.num_hidden_layers:
            raise ValueError(f"--layers {spec.layers}, but the model has {text.num_hidden_layers}")
        text.num_hidden_layers = spec.layers
        for name in ("layer_types", "mlp_layer_types"):
            if getattr(text, name, None):
                setattr(text, name, getattr(text, name)[: spec.layers])
    return config


def build(spec: ModelSpec, *, positions: int = 0) -> torch.nn.Module:
    """The model in eval mode, quantized if ``spec`` says so: a path's saved weights, else random ones from the model's own
    initialization, with at least ``positions`` positions."""
    from transformers import AutoModelForCausalLM

    config = config_of(spec)
    model: Any
    if spec.is_path:
        if spec.layers is not None:
            raise ValueError("--layers goes with a shape's random weights, not with a saved model")
        model = AutoModelForCausalLM.from_pretrained(spec.name, dtype=spec.dtype)
        model.to(spec.device)
    else:
        text = config.get_text_config(decoder=True)
        text.max_position_embeddings = max(positions, text.max_position_embeddings)
        torch.manual_seed(0)
        with spec.device, torch.no_grad():
            model = AutoModelForCausalLM.from_config(config, dtype=spec.dtype)
    if spec.quantization is not None:
        import torchao.quantization as torchao

        kind, options = QUANTIZATIONS[spec.quantization]
        options = {k: getattr(torchao, v)() if k == "granularity" else v for k, v in options.items()}
        with torch.no_grad():  # set_inductor_config=True would change Inductor's settings for the whole process
            torchao.quantize_(model, getattr(torchao, kind)(**options, set_inductor_config=False))
    if spec.device.type == "cuda":
        torch.cuda.synchronize(spec.device)
    return model.eval()


def skeleton(spec: ModelSpec) -> torch.nn.Module:
    """The model on the meta device: parameters and config without storage."""
    import transformers

    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config_of(spec), dtype=spec.dtype)


class Models:
    """The model under test, built at first use and shared by the systems of this process."""

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec

    @functools.cached_property
    def model(self) -> torch.nn.Module:
        return build(self.spec)

    @functools.cached_property
    def skeleton(self) -> torch.nn.Module:
        return skeleton(self.spec)

    @property
    def counted(self) -> torch.nn.Module:
        """The model whose bytes are counted: the skeleton, or the model itself where weights are quantized."""
        saved = getattr(self.skeleton.config, "quantization_config", None)
        return self.model if self.spec.quantization or saved else self.skeleton

    def drop(self) -> None:
        self.__dict__.pop("model", None)
        free_memory()


def free_memory() -> None:
    """Return unreferenced memory to the GPU and reset its peak statistics."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
