"""The systems that are measured, behind one interface: prompts in, tokens out, the wall clock around it.

quire and its rivals are called as their users call them; each runs its own scheduling, metadata and sampling in the
measured time. All of them get random token ids, ignore the end-of-sequence token, and decode no text.
"""

from __future__ import annotations

import contextlib
import functools
import gc
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from quire.graph_runner.bench.shapes import ModelSpec, build, skeleton


class NotMeasured(Exception):
    """A system cannot run here, or not this workload; the message says why. Becomes a row of the result."""


@dataclass
class Limits:
    """What a workload asks of a system: most sequences at once, and most tokens of one."""

    max_num_seqs: int
    max_model_len: int


@dataclass
class Models:
    """The model under test, built when first needed and shared by the systems of this process."""

    spec: ModelSpec
    _model: torch.nn.Module | None = field(default=None, repr=False)

    def get(self) -> torch.nn.Module:
        if self._model is None:
            self._model = build(self.spec)
        return self._model

    @functools.cached_property
    def skeleton(self) -> torch.nn.Module:
        """The same model without storage."""
        return skeleton(self.spec)

    @property
    def counted(self) -> torch.nn.Module:
        """The model whose bytes are counted: without storage where that tells, else (quantised weights) the model itself."""
        saved = getattr(self.skeleton.config, "quantization_config", None)
        return self.get() if self.spec.quantization or saved else self.skeleton

    def drop(self) -> None:
        self._model = None
        free_memory()


def free_memory() -> None:
    """Give memory that nothing refers to back to the GPU."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


class System(ABC):
    """One system, ready to generate. Made by ``open_system``; ``close`` frees what it holds."""

    name = ""
    attention = ""
    #: of the KV cache; None: the model's
    kv_cache_dtype: torch.dtype | None = None
    #: options it runs with that are not its defaults, for the record
    options: dict[str, Any]
    #: seconds of capturing CUDA graphs, if it says
    capture_s: float | None = None
    #: its GPU memory is this process's
    in_process = True
    #: compiles for every batch size and length, so that the warm-up must have the sizes that are measured
    compiles_each_size = False

    @abstractmethod
    def generate(self, prompts: Sequence[list[int]], new_tokens: Sequence[int], temperature: float) -> int:
        """Generate exactly ``new_tokens[i]`` tokens after ``prompts[i]``; the number of tokens that came."""

    @abstractmethod
    def close(self) -> None: ...

    def peak_memory_gib(self, device: torch.device) -> float | None:
        """GPU memory in use at most since it was opened; what the allocator holds, KV cache included."""
        if device.type != "cuda":
            return None
        if self.in_process:
            return torch.cuda.max_memory_reserved(device) / 2**30
        free, total = torch.cuda.mem_get_info(device)
        return (total - free) / 2**30


class Quire(System):
    """``quire.Engine``."""

    name = "quire"

    def __init__(self, models: Models, attention: str, limits: Limits, options: dict[str, Any]) -> None:
        from quire.graph_runner.engine import Engine

        self.options = {"max_num_seqs": limits.max_num_seqs, "max_model_len": limits.max_model_len, **options}
        self.engine = Engine(models.get(), attention=attention, **self.options)
        self.attention = self.engine.runner.backend.name
        self.kv_cache_dtype = self.engine.runner.cache.dtype
        self.capture_s = self.engine.runner.graphs.stats.capture_seconds

    def generate(self, prompts: Sequence[list[int]], new_tokens: Sequence[int], temperature: float) -> int:
        from quire.graph_runner.sampling_params import SamplingParams

        params = [SamplingParams(max_tokens=n, temperature=temperature, ignore_eos=True, detokenize=False)
                  for n in new_tokens]
        outputs = self.engine.generate(list(prompts), params)
        for output in outputs:
            if output.error is not None:
                raise RuntimeError(f"request {output.index}: {output.error}")
        return sum(len(o.token_ids) for o in outputs)

    def close(self) -> None:
        self.engine.close()


def _systems() -> dict[str, Callable[[Models, str, Limits, dict[str, Any]], System]]:
    from quire.graph_runner.bench import rivals

    return {"quire": Quire, "hf-eager": rivals.HfEager, "hf-static": rivals.HfStatic,
            "hf-cb": rivals.HfContinuousBatching, "vllm": rivals.Vllm, "vllm-transformers": rivals.VllmTransformers}


NAMES = ("quire", "hf-eager", "hf-static", "hf-cb", "vllm", "vllm-transformers")


@contextlib.contextmanager
def open_system(name: str, models: Models, attention: str, limits: Limits, options: dict[str, Any]) -> Iterator[System]:
    """The system, closed and its memory freed at the end.

    Raises:
        NotMeasured: it cannot run here.
    """
    if models.spec.quantization and name.startswith("vllm"):
        raise NotMeasured(f"{name} makes its own weights; --quantize is for quire and transformers")
    free_memory()
    system = _systems()[name](models, attention, limits, options)
    try:
        yield system
    finally:
        system.close()
        del system
        free_memory()


__all__ = ["Limits", "Models", "NAMES", "NotMeasured", "System", "free_memory", "open_system"]
