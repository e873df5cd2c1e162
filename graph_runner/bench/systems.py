"""The systems under test behind one interface: prompts in, tokens out.

    quire              ``quire.Engine``
    hf-eager           ``model.generate``, no compilation, dynamic cache
    hf-static          ``model.generate`` with the static cache; decode steps are compiled on a GPU
    hf-cb              transformers' continuous batching, with CUDA graphs on a GPU
    vllm               vLLM with its own implementation of the model
    vllm-transformers  vLLM with its Transformers backend

Each system is called as its users call it, with its defaults for speed, and runs its own scheduling, metadata and sampling in
the measured time. All get random token ids, ignore the end-of-sequence token and decode no text.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from quire.attn_ops.backend import dtype_name
from quire.graph_runner.bench.models import Models, ModelSpec, config_of, free_memory
from quire.graph_runner.bench.roofline import has_experts


class NotMeasured(Exception):
    """A system cannot run here, or cannot run this workload; the message says why. Becomes a row of the result."""


@dataclass(frozen=True)
class Limits:
    """What a workload needs of a system: the most sequences at once, and the most tokens per sequence."""

    max_num_seqs: int
    max_model_len: int


class System(ABC):
    """One system, ready to generate; see ``open_system``. Raises NotMeasured where it cannot run."""

    name: ClassVar[str]
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

    @abstractmethod
    def __init__(self, models: Models, attention: str, limits: Limits, options: dict[str, Any]) -> None: ...

    @abstractmethod
    def generate(self, prompts: Sequence[list[int]], new_tokens: Sequence[int], temperature: float) -> int:
        """Generate exactly ``new_tokens[i]`` tokens after ``prompts[i]``; returns the number of tokens that came."""

    @abstractmethod
    def close(self) -> None: ...

    def facts(self, device: torch.device) -> dict[str, Any]:
        """Columns of a row that say how the system ran; memory of the GPU is the peak since the system was opened, as reserved
        by the allocator; of another process, what is in use."""
        peak = None
        if device.type == "cuda":
            free, total = torch.cuda.mem_get_info(device)
            peak = (torch.cuda.max_memory_reserved(device) if self.in_process else total - free) / 2**30
        return {"attention": self.attention, "capture_s": self.capture_s, "engine_options": self.options,
                "peak_memory_gib": peak}


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
        self.engine = Engine(models.model, attention=attention, **self.options)
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


class HfEager(System):
    """transformers' ``generate``: one batch, with one prompt length and one number of new tokens."""

    name = "hf-eager"

    def __init__(self, models: Models, attention: str, limits: Limits, options: dict[str, Any]) -> None:
        self.model: Any = models.model
        self.attention = str(getattr(self.model.config, "_attn_implementation", ""))
        self.options = {}

    def generate(self, prompts: Sequence[list[int]], new_tokens: Sequence[int], temperature: float) -> int:
        if len({len(p) for p in prompts}) > 1 or len(set(new_tokens)) > 1:
            raise NotMeasured("transformers' generate runs one batch of one length; see hf-cb for mixed lengths")
        ids = torch.tensor(prompts, device=self.model.device)
        with torch.no_grad():
            out = self.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens[0],
                                      eos_token_id=None, pad_token_id=0, **_sampling(temperature), **self.options)
        return out[:, ids.shape[1]:].cpu().numel()

    def close(self) -> None:
        self.model = None


class HfStatic(HfEager):
    name, compiles_each_size = "hf-static", True

    def __init__(self, models: Models, attention: str, limits: Limits, options: dict[str, Any]) -> None:
        super().__init__(models, attention, limits, options)
        self.options = {"cache_implementation": "static"}

    def close(self) -> None:
        for name in ("_cache", "_compiled_call"):  # generate keeps both on the model
            self.model.__dict__.pop(name, None)
        torch.compiler.reset()
        super().close()


def _sampling(temperature: float) -> dict[str, Any]:
    if temperature == 0:
        return {"do_sample": False}
    return {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}


class HfContinuousBatching(HfEager):
    """``model.init_continuous_batching``. The manager is kept between calls, so its start-up is not measured."""

    name = "hf-cb"

    def __init__(self, models: Models, attention: str, limits: Limits, options: dict[str, Any]) -> None:
        super().__init__(models, attention, limits, options)
        if not hasattr(self.model, "init_continuous_batching"):
            raise NotMeasured("this model has no continuous batching in the installed transformers")
        pages = limits.max_num_seqs * -(-limits.max_model_len // 256) + 8
        self.options = ({"use_cuda_graph": True} if models.spec.device.type == "cuda" else
                        {"num_blocks": pages, "max_batch_tokens": 1024})
        self._manager: Any = None
        self._temperature: float | None = None

    def _start(self, temperature: float) -> None:
        from transformers import GenerationConfig
        from transformers.generation import ContinuousBatchingConfig

        self._stop()  # each manager takes most of the memory
        config = GenerationConfig(eos_token_id=-1, pad_token_id=0, max_new_tokens=16, **_sampling(temperature))
        self._manager = self.model.init_continuous_batching(
            generation_config=config, continuous_batching_config=ContinuousBatchingConfig(**self.options))
        self._manager.start()
        self._temperature = temperature

    def generate(self, prompts: Sequence[list[int]], new_tokens: Sequence[int], temperature: float) -> int:
        if temperature != self._temperature:
            self._start(temperature)
        manager = self._manager
        for prompt, n in zip(prompts, new_tokens, strict=True):
            manager.add_request(list(prompt), max_new_tokens=n, eos_token_id=-1)
        count = done = 0
        while done < len(prompts):
            result = manager.get_result(timeout=1)
            if result is None:
                if not manager.is_running():
                    raise RuntimeError("transformers' continuous batching thread ended; its log says why")
            elif result.is_finished():
                if result.error is not None:
                    raise RuntimeError(f"transformers' continuous batching: {result.error}")
                done += 1
                count += len(result.generated_tokens)
        return count

    def _stop(self) -> None:
        if self._manager is not None:
            self._manager.stop(block=True, timeout=30)
            if hasattr(self._manager, "destroy"):
                self._manager.destroy()
        self._manager = self._temperature = None

    def close(self) -> None:
        before = self.attention
        self._stop()
        if getattr(self.model.config, "_attn_implementation", before) != before:  # the manager switches to a paged one
            self.model.set_attn_implementation(before)
        super().close()


ROUTERS = (".gate.weight", ".router.weight")


@torch.no_grad()
def spread_tokens(model: torch.nn.Module) -> None:
    """Give routers weights that choose experts evenly, and all layers biases of zero, as models have that are not trained.
    vLLM's dummy weights are at most 0.001, so that all experts score alike after rounding, and every token gets the first ones;
    its dummy biases are as large, and outweigh what differs between tokens. Raises NotMeasured if no parameter has the name of
    a router's."""
    routers = [p for name, p in model.named_parameters() if name.endswith(ROUTERS)]
    if not routers:
        raise NotMeasured("vLLM's dummy weights give all tokens the same experts, and no router was found to change that")
    for weight in routers:
        weight.normal_(std=10.0)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.zero_()


def require_vllm(device: torch.device) -> None:
    """Raises NotMeasured where vLLM cannot run."""
    if importlib.util.find_spec("vllm") is None:
        raise NotMeasured("vllm is not installed here")
    if device.type != "cuda":
        raise NotMeasured("vllm is measured on a GPU only")


def save_config(spec: ModelSpec, model: type, folder: str) -> None:
    """Write the config of a shape, from which vLLM makes the model with dummy weights."""
    config = config_of(spec)
    config.architectures, config.dtype = [model.__name__], spec.dtype
    config.save_pretrained(folder)


def shut_down(llm: Any) -> None:
    """End the engine of a vLLM ``LLM``."""
    core: Any = getattr(getattr(llm, "llm_engine", None), "engine_core", None)
    if hasattr(core, "shutdown"):
        core.shutdown()


class Vllm(SteppedSystem):
    """vLLM's ``LLM``, with dummy weights for a shape. The model under test is dropped from memory first."""

    name, in_process, quantizes, starts = "vllm", False, False, True
    model_impl = "auto"

    def __init__(self, models: Models, attention: str, limits: Limits, options: dict[str, Any]) -> None:
        require_vllm(models.spec.device)
        models.drop()
        from vllm import LLM

        self._folder = tempfile.TemporaryDirectory()
        self.options = {"max_model_len": limits.max_model_len, "model_impl": self.model_impl}
        source: dict[str, Any] = {"model": models.spec.name}
        if not models.spec.is_path:
            save_config(models.spec, type(models.skeleton), self._folder.name)
            source = {"model": self._folder.name, "load_format": "dummy"}
        logging.getLogger("vllm").setLevel(logging.WARNING)
        self._submitted = 0
        self.llm: Any = LLM(**source, skip_tokenizer_init=True, dtype=dtype_name(models.spec.dtype), **self.options)
        if not models.spec.is_path and has_experts(models.skeleton):
            self.llm.apply_model(spread_tokens)

    def submit(self, prompt: list[int], new_tokens: int, temperature: float = 0.0, *, stream: bool = False) -> int:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        self._submitted += 1
        kind = RequestOutputKind.DELTA if stream else RequestOutputKind.FINAL_ONLY
        params = SamplingParams(max_tokens=new_tokens, temperature=temperature, ignore_eos=True, detokenize=False,
                                output_kind=kind)
        self.llm.llm_engine.add_request(str(self._submitted), {"prompt_token_ids": prompt}, params)
        return self._submitted

    def step(self) -> list[int]:
        return [int(output.request_id) for output in self.llm.llm_engine.step() for _ in output.outputs[0].token_ids]

    def abort(self, requests: Sequence[int] | None = None) -> None:
        chosen = range(1, self._submitted + 1) if requests is None else requests
        self.llm.llm_engine.abort_request([str(request) for request in chosen])

    @property
    def busy(self) -> bool:
        return bool(self.llm.llm_engine.has_unfinished_requests())

    def close(self) -> None:
        shut_down(self.llm)
        self.llm = None
        self._folder.cleanup()


class VllmTransformers(Vllm):
    name, model_impl = "vllm-transformers", "transformers"


SYSTEMS: dict[str, type[System]] = {
    system.name: system for system in (Quire, HfEager, HfStatic, HfContinuousBatching, Vllm, VllmTransformers)}


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
