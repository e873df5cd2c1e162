"""The systems that quire is compared with, each with its defaults for speed. Importing this file registers them.

    hf-eager           ``model.generate``, no compilation, dynamic cache
    hf-static          ``model.generate`` with the static cache; decode steps are compiled on a GPU
    hf-cb              transformers' continuous batching, with CUDA graphs on a GPU
    vllm               vLLM with its own implementation of the model
    vllm-transformers  vLLM with its Transformers backend
"""

from __future__ import annotations

import importlib.util
import logging
import tempfile
from collections.abc import Sequence
from typing import Any

import torch

from quire.attn_ops.backend import dtype_name
from quire.graph_runner.bench.models import Models, ModelSpec, config_of
from quire.graph_runner.bench.roofline import has_experts
from quire.graph_runner.bench.systems import Limits, NotMeasured, SteppedSystem, System


class HfEager(System):
    """transformers' ``generate``: one batch, with one prompt length and one number of new tokens."""

    name = "hf-eager"

    def __init__(self, models: Models, attention: str, limits: Limits, options: dict[str, Any]) -> None:
        self.model: Any = models.get()
        self.attention = str(getattr(self.model.config, "_attn_implementation", ""))
        self.options = {}

    def generate(self, prompts: Sequence[list[int]], new_tokens: Sequence[int], temperature: float) -> int:
        if len({len(p) for p in prompts}) > 1 or len(set(new_tokens)) > 1:
            raise NotMeasured("transformers' generate runs one batch of one length; see hf-cb for mixed lengths")
        ids = torch.tensor(prompts, device=self.model.device)
        with torch.no_grad():
            out = self.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens[0],
                                      eos_token_id=None, pad_token_id=0, **_sampling(temperature), **self.options)
            tokens = out[:, ids.shape[1]:].cpu()
        return tokens.numel()

    def close(self) -> None:
        self.model = None


class HfStatic(HfEager):
    name, compiles_each_size = "hf-static", True

    def __init__(self, models: Models, attention: str, limits: Limits, options: dict[str, Any]) -> None:
        super().__init__(models, attention, limits, options)
        self.options = {"cache_implementation": "static"}

    def close(self) -> None:
        for name in ("_cache", "_compiled_call"):  # generate keeps both on the model
            if name in self.model.__dict__:
                delattr(self.model, name)
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
        self.options = {"use_cuda_graph": True} if models.spec.device.type == "cuda" else {}
        if models.spec.device.type != "cuda":
            pages = limits.max_num_seqs * -(-limits.max_model_len // 256) + 8
            self.options.update(num_blocks=pages, max_batch_tokens=1024)
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
    """Give routers weights that choose experts evenly. vLLM's dummy weights are at most 0.001, so that all experts score alike
    after rounding, and every token gets the first ones. Raises NotMeasured if no parameter has the name of a router's."""
    routers = [p for name, p in model.named_parameters() if name.endswith(ROUTERS)]
    if not routers:
        raise NotMeasured("vLLM's dummy weights give all tokens the same experts, and no router was found to change that")
    for weight in routers:
        weight.normal_(std=10.0)


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
        self.llm: Any = LLM(**source, skip_tokenizer_init=True, dtype=dtype_name(models.spec.dtype),
                            **self.options)
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
