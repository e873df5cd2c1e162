"""``quire.paged``: one line on a Hugging Face model, or a decorator on a forward.

On a model: ``model.generate`` runs on an engine, and the rest of the model stays as it is. Calls that the engine cannot honour
(beam search, penalties, assistants, embeddings as input, methods of the model's own, ...) go to the model's own ``generate``,
with one warning per reason.

On a forward: inside ``quire.step`` it is traced, lowered to paged attention and compiled; outside it is the plain forward.
"""

from __future__ import annotations

import functools
import inspect
import threading
import types
import warnings
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from quire.attn_ops.step import current_step
from quire.graph_runner.config import EngineConfig
from quire.graph_runner.engine import Engine
from quire.graph_runner.hf_generation_config import from_generation_config
from quire.graph_runner.on_instance import OnInstance, restore_attribute, set_own_copies
from quire.graph_runner.paged_forward import PagedForward
from quire.graph_runner.sampling_params import SamplingParams
from quire.passes.backend import QuireBackend
from quire.passes.capture.errors import unwrapped
from quire.passes.fx import with_own_code
from quire.passes.options import QuireOptions

#: Arguments of ``generate`` beside the generation config that the engine honours.
_HONOURED = frozenset({"input_ids", "inputs", "attention_mask", "generation_config", "streamer"})
_INTEGERS = ("eos_token_id", "pad_token_id", "max_new_tokens", "max_length", "min_new_tokens", "min_length")


def paged(model: Any = None, **options: Any) -> Any:
    """Make a model's ``generate`` paged, batched and graph-captured; or decorate a forward.

    Args:
        model: a transformers causal LM, which is returned; or a forward function (decorator use). With options only, a
            decorator is returned.
        options: of ``quire.Engine`` for a model; ``attention``, ``compiler`` and ``fusions`` for a forward.

    Returns:
        The same model object. ``model.generate`` now runs on an engine that is made at its first call and kept;
        ``model.generate.close()`` gives everything back.

    Raises:
        TypeError: neither a model with ``generate`` nor a function, or an unknown option.
    """
    if model is None:
        return functools.partial(paged, **options)
    if isinstance(model, torch.nn.Module):
        if isinstance(getattr(model, "_orig_mod", None), torch.nn.Module):  # torch.compile's, which only passes generate on
            raise TypeError("quire.paged takes the model itself, not what torch.compile made of it. Page it first: "
                            "model = quire.paged(model), whose generate() compiles by itself; torch.compile(model) after that "
                            "compiles its plain forward")
        if not hasattr(type(model), "generate"):
            raise TypeError(f"{type(model).__name__} has no generate(); decorate its forward with quire.paged, or use "
                            "quire.Engine(model)")
        EngineConfig.of({k: v for k, v in options.items() if k != "tokenizer"})  # checked now, not at the first generate
        if isinstance(model.generate, PagedGenerate):
            model.generate.close()
        object.__setattr__(model, "generate", PagedGenerate(model, options))
        object.__setattr__(model, "forward", PagedForward(model, options.get("attention", "auto")))
        set_own_copies(model, True)
        return model
    if callable(model):
        return _decorate(model, options)
    raise TypeError(f"quire.paged takes a model or a forward function, got {type(model).__name__}")


class PagedGenerate(OnInstance):
    """``model.generate`` after ``quire.paged``. Callable like transformers' own."""

    def __init__(self, model: torch.nn.Module, options: dict[str, Any]) -> None:
        self.model, self._options = model, options
        self._original = model.__dict__.get("generate")
        self._engine: Engine | None = None
        self.warned: set[str] = set()
        self._making = threading.RLock()  # threads that share the model share its engine
        self._class_generate: Callable[..., Any] = getattr(type(model), "generate")  # noqa: B009
        functools.update_wrapper(self, self._class_generate)

    def _plain(self, *args: Any, **kwargs: Any) -> Any:
        if self._original is not None:
            return self._original(*args, **kwargs)
        return self._class_generate(self.model, *args, **kwargs)

    @property
    def engine(self) -> Engine:
        """The engine behind it, made at the first call; it follows changes of the model by itself."""
        with self._making:
            if self._engine is None:
                self._engine = Engine(self.model, **self._options)
            return self._engine

    def close(self) -> None:
        """Free the engine and put the model's own ``generate`` and forward back."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None
        forward = self.model.__dict__.get("forward")
        if isinstance(forward, PagedForward):
            restore_attribute(self.model, "forward", forward.original)
        if self.model.__dict__.get("generate") is self:
            restore_attribute(self.model, "generate", self._original)
        set_own_copies(self.model, False)

    def __getstate__(self) -> dict[str, Any]:
        """For pickling and copying: without the engine, which a copy makes for itself."""
        return {name: self.__dict__[name] for name in ("model", "_options", "_original", "warned")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _engine=None, warned=set(state["warned"]), _making=threading.RLock(),
                             _class_generate=type(state["model"]).generate)

    def _bound(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any] | None:
        """The arguments of a call by name; None if they do not fit transformers' generate, which then raises."""
        signature = inspect.signature(self._class_generate)
        try:
            given = dict(signature.bind(self.model, *args, **kwargs).arguments)
        except TypeError:
            return None
        given.pop(next(iter(given)))  # self
        for parameter in signature.parameters.values():
            if parameter.kind is parameter.VAR_KEYWORD:
                given |= given.pop(parameter.name, {})
            elif parameter.kind is parameter.VAR_POSITIONAL:  # the generate of a wrapper
                rest = given.pop(parameter.name, ())
                if len(rest) > 1 or (rest and "inputs" in given):
                    return None
                given |= {"inputs": rest[0]} if rest else {}
        return given

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = self._bound(args, kwargs)
        why, job = ("its arguments do not fit the signature of generate", None) if given is None else self._understand(given)
        if job is None:
            if why not in self.warned:
                self.warned.add(why)
                warnings.warn(f"quire: generate() runs on transformers' own code, not paged, because {why}", stacklevel=2)
            return self._plain(*args, **kwargs)
        return self._run(*job)

    def _understand(self, kwargs: dict[str, Any]) -> tuple[str, Any]:
        """("", the arguments of ``_run``), or the reason why the engine cannot serve the call, and None."""
        model: Any = self.model
        given = {k: v for k, v in kwargs.items() if v is not None}
        if "inputs" in given and "input_ids" in given:
            return "it was given both inputs and input_ids", None
        ids = given.get("inputs", given.get("input_ids"))
        if not isinstance(ids, torch.Tensor) or ids.dim() != 2 or ids.is_floating_point():
            return "it was not given input_ids of shape (batch, length)", None
        if not ids.shape[0]:
            return "it was given an empty batch", None
        if model.training:
            return "the model is in training mode", None
        if (method := _own_method(model, self._original)) is not None:
            return f"{method} is the model's own, and not transformers'", None
        if torch.is_autocast_enabled(model.device.type):
            return "torch.autocast is on, and an engine computes in the model's own dtypes", None
        # The arguments, over the given config, over the model's config: None in an argument counts (eos_token_id=None).
        options = {k: v for k, v in kwargs.items() if k not in _HONOURED}
        own, base = model.generation_config, given.get("generation_config")
        try:
            config, rest = model._prepare_generation_config(base, **options)
            odd = [name for name in _INTEGERS if not _of_integers(getattr(config, name, None))]
            if odd:
                return f"{', '.join(odd)} is not of integers", None
            if all(v is None for v in (given.get("max_length"), getattr(base, "max_length", None), own.max_length)):
                config.max_length = None  # 20 by default, which counts new tokens, and not those of the prompt
            params, unsupported = from_generation_config(config, ids.shape[1])
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
        if 0 < params.top_p < torch.finfo(torch.float32).tiny:
            return "top_p is 0 in float32", None
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
        holes = any(False in ks[ks.index(True) :] for ks in keep if True in ks)
        if holes and any(site.window or site.chunk for site in self.engine.runner.sites):
            return "the attention_mask has holes, and transformers counts them in windows and chunks", None
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
        for event in self.engine.stream(prompts, each, raise_on_error=False):
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
            if output.finish_reason == "abort":  # the engine was closed meanwhile: the row is incomplete
                raise RuntimeError(f"row {output.index // params.n} was aborted after {len(output.token_ids)} tokens: the "
                                   "engine was closed or replaced while generate() ran")
        longest = max(len(o.token_ids) for o in outputs)
        new = torch.full((len(outputs), longest), pad)
        for i, output in enumerate(outputs):
            new[i, : len(output.token_ids)] = torch.tensor(output.token_ids)
        return torch.cat([ids.repeat_interleave(params.n, 0), new.to(ids.device)], dim=1)


def _own_method(model: torch.nn.Module, generate: Any) -> str | None:
    """A method of transformers' GenerationMixin that the model, or a class of its own, has redefined; None if there is none."""
    from transformers import GenerationMixin

    if generate is not None:
        return "generate"
    for name, method in vars(GenerationMixin).items():
        if name.startswith("__") or not callable(getattr(GenerationMixin, name)):
            continue
        found = model.__dict__.get(name) if name != "generate" else None
        found = found or inspect.unwrap(getattr(type(model), name, method))
        if not getattr(found, "__module__", "").startswith("transformers."):
            return name
    return None


def _of_integers(x: Any) -> bool:
    """Whether ``x`` is None, an integer or a sequence of integers."""
    return x is None or all(isinstance(each, int) for each in (x if isinstance(x, (list, tuple)) else [x]))


def _decorate(forward: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    """The decorator: inside paged steps it calls a version of the forward compiled for each module."""
    opts = QuireOptions.of({"compiler": "inductor" if torch.cuda.is_available() else "eager", **options})
    # One per module, as Dynamo traces a code object at most eight times. A plain function has one.
    compiled: weakref.WeakKeyDictionary[Any, Callable[..., Any]] = weakref.WeakKeyDictionary()

    @functools.wraps(forward)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or current_step() is None:
            return forward(self, *args, **kwargs)
        owner = self if isinstance(self, torch.nn.Module) else wrapper
        call = compiled.get(owner)
        if call is None:
            own = with_own_code(forward) if isinstance(forward, types.FunctionType) else forward
            call = compiled[owner] = torch.compile(own, backend=QuireBackend(opts), fullgraph=True)
        try:
            return call(self, *args, **kwargs)
        except torch._dynamo.exc.BackendCompilerFailed as error:
            raise unwrapped(error, self) from error

    return wrapper


__all__ = ["PagedGenerate", "paged"]
