"""``quire.paged``: one line on a Hugging Face model, or a decorator on a forward.

On a model: ``model.generate`` runs on an engine of quire, and everything else of the model stays as it is. What the engine
cannot honour (beam search, penalties, assistants, embeddings as input, ...) goes to the model's own ``generate``, with one
warning that says why: the result is then Hugging Face's, slower but never different from what was asked.

On a forward: inside ``quire.step`` it is traced, lowered to paged attention and compiled; outside it is the plain forward.
"""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from attn_ops.step import current_step
from graph_runner.engine import Engine
from graph_runner.paged_forward import PagedForward, restore_attribute
from graph_runner.sampling_params import SamplingParams
from passes.capture import unwrapped
from passes.dynamo_backend import QuireBackend
from passes.options import QuireOptions

logger = logging.getLogger(__name__)
#: Arguments of ``generate`` beside the generation config that the engine honours.
_HONOURED = frozenset({"input_ids", "inputs", "attention_mask", "generation_config", "streamer"})


def paged(model: Any = None, **options: Any) -> Any:
    """Make a model's ``generate`` paged, batched and graph-captured; or decorate a forward.

    Args:
        model: a transformers causal LM, which is returned; or a forward function (decorator use). With options only, a
            decorator is returned.
        options: of ``quire.Engine`` for a model; ``attention``, ``compiler`` and ``fusions`` for a forward.

    Returns:
        The same model object. ``model.generate`` now runs on an engine that is made at its first call and kept;
        ``model.generate.close()`` gives everything back.
    """
    if model is None:
        return functools.partial(paged, **options)
    if isinstance(model, torch.nn.Module):
        if not hasattr(model, "generate"):
            raise TypeError(f"{type(model).__name__} has no generate(); decorate its forward with quire.paged, or use "
                            "quire.Engine(model)")
        if isinstance(model.generate, PagedGenerate):
            model.generate.close()
        object.__setattr__(model, "generate", PagedGenerate(model, options))
        object.__setattr__(model, "forward", PagedForward(model, options.get("attention", "auto")))
        return model
    if callable(model):
        return _decorate(model, options)
    raise TypeError(f"quire.paged takes a model or a forward function, got {type(model).__name__}")


class PagedGenerate:
    """``model.generate`` after ``quire.paged``. Callable like transformers' own."""

    def __init__(self, model: torch.nn.Module, options: dict[str, Any]) -> None:
        self._model, self._options = model, options
        self._original = model.__dict__.get("generate")
        self._engine: Engine | None = None
        self._warned: set[str] = set()
        self._class_generate: Callable[..., Any] = getattr(type(model), "generate")  # noqa: B009
        functools.update_wrapper(self, self._class_generate)

    def _plain(self, *args: Any, **kwargs: Any) -> Any:
        if self._original is not None:
            return self._original(*args, **kwargs)
        return self._class_generate(self._model, *args, **kwargs)

    @property
    def engine(self) -> Engine:
        """The engine behind it, made when first asked for, and again when the model has changed (a hook, a layer)."""
        if self._engine is not None and (change := self._engine.watch.change()) is not None:
            logger.info("a new engine for %s: %s", type(self._model).__name__, change)
            self._engine.close()
            self._engine = None
        if self._engine is None:
            self._engine = Engine(self._model, **self._options)
        return self._engine

    def close(self) -> None:
        """Free the engine and put the model's own ``generate`` and forward back."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None
        forward = self._model.__dict__.get("forward")
        if isinstance(forward, PagedForward):
            restore_attribute(self._model, "forward", forward.original)
        if self._model.__dict__.get("generate") is self:
            restore_attribute(self._model, "generate", self._original)

    def __getstate__(self) -> dict[str, Any]:
        """For pickling and copying: all but the engine, which a copy makes for itself, and the wrapped function's looks."""
        return {name: self.__dict__[name] for name in ("_model", "_options", "_original", "_warned")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _engine=None, _class_generate=type(state["_model"]).generate)

    def __call__(self, inputs: torch.Tensor | None = None, **kwargs: Any) -> Any:
        why, job = self._understand(inputs, kwargs)
        if job is None:
            if why not in self._warned:
                self._warned.add(why)
                warnings.warn(f"quire: generate() runs on transformers' own code, not paged, because {why}", stacklevel=2)
            return self._plain(inputs, **kwargs)
        return self._run(*job)

    def _understand(self, inputs: torch.Tensor | None, kwargs: dict[str, Any]) -> tuple[str, Any]:
        """The call as the arguments of ``_run``; or None and the reason it cannot be served."""
        model: Any = self._model
        given = {k: v for k, v in kwargs.items() if v is not None}
        ids = inputs if inputs is not None else given.get("input_ids", given.get("inputs"))
        if not isinstance(ids, torch.Tensor) or ids.dim() != 2 or ids.is_floating_point():
            return "it was not given input_ids of shape (batch, length)", None
        if not ids.shape[0]:
            return "it was given an empty batch", None
        if model.training:
            return "the model is in training mode", None
        # The arguments, over the given config, over the model's config: None in an argument counts (eos_token_id=None).
        options = {k: v for k, v in kwargs.items() if k not in _HONOURED}
        own, base = model.generation_config, given.get("generation_config")
        try:
            config, rest = model._prepare_generation_config(base, **options)
            if all(v is None for v in (given.get("max_length"), getattr(base, "max_length", None), own.max_length)):
                config.max_length = None  # 20 by default, which counts new tokens, and not those of the prompt
            params, unsupported = SamplingParams.from_generation_config(config, prompt_length=ids.shape[1])
        except ValueError as error:
            return str(error), None
        other = sorted(k for k, v in rest.items() if v is not None)
        if other:
            return f"quire does not have the arguments {other}", None
        if config.use_cache is False:
            return "use_cache=False was asked for", None
        if config.return_dict_in_generate:
            return "return_dict_in_generate was asked for, and quire returns token ids", None
        if params.stop:
            return "quire does not have stop_strings in generate", None
        if unsupported:
            return f"quire does not have {', '.join(unsupported)}", None
        mask = given.get("attention_mask")
        if mask is not None and mask.shape != ids.shape:
            return f"the attention_mask has shape {tuple(mask.shape)}, the ids {tuple(ids.shape)}", None
        if mask is not None and not bool(mask[:, -1].bool().all()):
            return "the last token of a prompt is masked (set tokenizer.padding_side = 'left')", None
        streamer = given.get("streamer")
        if streamer is not None and (len(ids) > 1 or params.n > 1):
            return "a streamer with several sequences", None
        eos, pad = config.eos_token_id, config.pad_token_id
        eos = [] if eos is None else [eos] if isinstance(eos, int) else [int(e) for e in eos]
        if mask is None and pad is not None and pad not in eos and bool((ids == pad).any()):
            mask = ids != pad  # transformers infers the mask so
            if not bool(mask[:, -1].all()):
                return "the last token of a prompt is padding (set tokenizer.padding_side = 'left')", None
        rows = ids.tolist()
        keep = [[True] * ids.shape[1]] * len(rows) if mask is None else mask.bool().tolist()
        prompts = [[t for t, k in zip(row, ks, strict=True) if k] for row, ks in zip(rows, keep, strict=True)]
        assert params.max_tokens is not None
        longest = max(map(len, prompts), default=0) + params.max_tokens
        if longest > self.engine.max_model_len:
            return (f"it may make a sequence of {longest} tokens, and the engine holds {self.engine.max_model_len} (see "
                    "max_model_len and num_pages of quire.Engine)"), None
        params = replace(params, ignore_eos=True, detokenize=False)  # the end tokens are among the stop_token_ids
        return "", (ids, prompts, params, pad if pad is not None else (eos[0] if eos else 0), streamer)

    def _run(self, ids: torch.Tensor, prompts: list[list[int]], params: SamplingParams, pad: int,
             streamer: Any) -> torch.Tensor:
        if params.seed is None and not params.greedy:  # follow torch.manual_seed, as transformers does
            params = replace(params, seed=int(torch.randint(0, 2**62, ()).item()))
        each = [replace(params, seed=((params.seed or 0) + i * 1_000_003) % 2**62) for i in range(len(prompts))]
        if streamer is not None:
            streamer.put(ids.cpu())
        outputs = []
        for event in self.engine.stream(prompts, each):
            if streamer is not None and event.token_ids:
                streamer.put(torch.tensor(event.token_ids))
            if event.finished:
                outputs.append(event.output)
        if streamer is not None:
            streamer.end()
        outputs.sort(key=lambda o: o.index)
        for output in outputs:
            if output.error is not None:
                raise ValueError(f"row {output.index // params.n}: {output.error}")
        longest = max(len(o.token_ids) for o in outputs)
        new = torch.full((len(outputs), longest), pad)
        for i, output in enumerate(outputs):
            new[i, : len(output.token_ids)] = torch.tensor(output.token_ids)
        return torch.cat([ids.repeat_interleave(params.n, 0), new.to(ids.device)], dim=1)


def _decorate(forward: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    """The decorator: one compiled version of the forward, used inside paged steps."""
    opts = QuireOptions.of({"compiler": "inductor" if torch.cuda.is_available() else "eager", **options})
    compiled: dict[str, Any] = {}

    @functools.wraps(forward)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or current_step() is None:
            return forward(self, *args, **kwargs)
        if "call" not in compiled:
            compiled["call"] = torch.compile(forward, backend=QuireBackend(opts), fullgraph=True)
        try:
            return compiled["call"](self, *args, **kwargs)
        except torch._dynamo.exc.BackendCompilerFailed as error:
            raise unwrapped(error, self) from error

    return wrapper


__all__ = ["PagedGenerate", "paged"]
