"""The systems under test behind one interface: prompts in, tokens out. The rivals are in ``graph_runner/bench/rivals.py``.

Each system is called as its users call it and runs its own scheduling, metadata and sampling in the measured time. All get
random token ids, ignore the end-of-sequence token and decode no text.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from quire.graph_runner.bench.models import Models, free_memory

#: Every system by name, filled in as the classes are defined.
SYSTEMS: dict[str, type[System]] = {}


class NotMeasured(Exception):
    """A system cannot run here, or cannot run this workload; the message says why. Becomes a row of the result."""


@dataclass(frozen=True)
class Limits:
    """What a workload needs of a system: the most sequences at once, and the most tokens per sequence."""

    max_num_seqs: int
    max_model_len: int


class System(ABC):
    """One system, ready to generate; see ``open_system``. A subclass with a ``name`` is registered in SYSTEMS. Raises
    NotMeasured where it cannot run."""

    name: ClassVar[str] = ""
    #: memory is allocated by this process
    in_process: ClassVar[bool] = True
    #: compiles for each batch size and length, so the warm-up must have the measured ones
    compiles_each_size: ClassVar[bool] = False
    #: can quantize the model under test
    quantizes: ClassVar[bool] = True
    #: the time to start it can be measured: it compiles when it is made, not at the first batch
    starts: ClassVar[bool] = False
    attention: str = ""
    #: of the KV cache; None: the model's
    kv_cache_dtype: torch.dtype | None = None
    #: seconds of CUDA-graph capture, where the system reports them
    capture_s: float | None = None
    #: non-default options, for the record
    options: dict[str, Any]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "name" in cls.__dict__:
            SYSTEMS[cls.name] = cls

    @abstractmethod
    def __init__(self, models: Models, attention: str, limits: Limits, options: dict[str, Any]) -> None: ...

    @abstractmethod
    def generate(self, prompts: Sequence[list[int]], new_tokens: Sequence[int], temperature: float) -> int:
        """Generate exactly ``new_tokens[i]`` tokens after ``prompts[i]``; returns the number of tokens that came."""

    @abstractmethod
    def close(self) -> None: ...

    def peak_memory_gib(self, device: torch.device) -> float | None:
        """Peak GPU memory since the system was opened, as reserved by the allocator; of another process, what is in use."""
        if device.type != "cuda":
            return None
        if self.in_process:
            return torch.cuda.max_memory_reserved(device) / 2**30
        free, total = torch.cuda.mem_get_info(device)
        return (total - free) / 2**30

    def facts(self, device: torch.device) -> dict[str, Any]:
        """Columns of a row that say how the system ran."""
        return {"attention": self.attention, "capture_s": self.capture_s, "engine_options": self.options,
                "peak_memory_gib": self.peak_memory_gib(device)}


class SteppedSystem(System):
    """A system whose users can also drive it step by step."""

    @abstractmethod
    def submit(self, prompt: list[int], new_tokens: int, temperature: float = 0.0, *, stream: bool = False) -> int:
        """Queue a request of exactly ``new_tokens`` tokens; returns its id."""

    @abstractmethod
    def step(self) -> list[int]:
        """Run one engine step. Returns the id of a request once per token that reached the host: after each step for a request
        that streams, at the latest with its last token for others."""

    @abstractmethod
    def abort(self, requests: Sequence[int] | None = None) -> None:
        """End these requests; None: all."""

    @property
    @abstractmethod
    def busy(self) -> bool:
        """Whether submitted requests are unfinished."""

    def generate(self, prompts: Sequence[list[int]], new_tokens: Sequence[int], temperature: float) -> int:
        for prompt, n in zip(prompts, new_tokens, strict=True):
            self.submit(prompt, n, temperature)
        count = 0
        while self.busy:
            count += len(self.step())
        return count


class Quire(SteppedSystem):
    """``quire.Engine``."""

    name, starts = "quire", True

    def __init__(self, models: Models, attention: str, limits: Limits, options: dict[str, Any]) -> None:
        from quire.graph_runner.engine import Engine

        self.options = {"max_num_seqs": limits.max_num_seqs, "max_model_len": limits.max_model_len, **options}
        self.engine = Engine(models.get(), attention=attention, **self.options)
        self.attention = self.engine.runner.backend.name
        self.kv_cache_dtype = self.engine.runner.cache.dtype
        self.capture_s = self.engine.runner.graphs.stats.capture_seconds

    def submit(self, prompt: list[int], new_tokens: int, temperature: float = 0.0, *, stream: bool = False) -> int:
        from quire.graph_runner.sampling_params import SamplingParams

        (request,) = self.engine.add_request(prompt, SamplingParams(max_tokens=new_tokens, temperature=temperature,
                                                                    ignore_eos=True, detokenize=False))
        return request

    def step(self) -> list[int]:
        events = self.engine.step()
        if failed := next((event for event in events if event.output.error is not None), None):
            raise RuntimeError(f"request {failed.index}: {failed.output.error}")
        return [event.index for event in events for _ in event.token_ids]

    def abort(self, requests: Sequence[int] | None = None) -> None:
        for request in list(self.engine.requests) if requests is None else requests:
            self.engine.abort(request)

    @property
    def busy(self) -> bool:
        return bool(self.engine.requests)

    def close(self) -> None:
        self.engine.close()


@contextlib.contextmanager
def open_system(name: str, models: Models, attention: str, limits: Limits, options: dict[str, Any]) -> Iterator[System]:
    """The system; closed, and its memory freed, at the end. Raises NotMeasured if it cannot run here."""
    if models.spec.quantization and not SYSTEMS[name].quantizes:
        raise NotMeasured(f"{name} makes its own weights; --quantize is for quire and transformers")
    free_memory()
    system = SYSTEMS[name](models, attention, limits, options)
    try:
        yield system
    finally:
        system.close()
        del system
        free_memory()
