"""``quire.paged``: one line on a Hugging Face model, or a decorator on a forward.

On a model: ``model.generate`` runs on an engine, and the rest of the model stays as it is (lm-eval's log-likelihoods come from
the engine too: ``whole_logits.py``). A call whose tokens follow from sampling parameters alone is a batch of requests; one with
other processors or criteria of transformers, or with beams, runs in lockstep (``lockstep.py``). Calls that the engine cannot
honour (assistants, embeddings as input, methods of the model's own, ...) go to the model's own ``generate``, with one warning
per reason. docs/generation.md lists every argument.

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

from quire.attn_ops.backend import UnsupportedAttention
from quire.attn_ops.context import setting
from quire.attn_ops.step import current_step
from quire.graph_runner import lockstep
from quire.graph_runner.config import EngineConfig
from quire.graph_runner.continuous import Manager, engine_options
from quire.graph_runner.engine import Engine
from quire.graph_runner.hf_generate import Job, Served, own_method, prompts_of, understand
from quire.graph_runner.on_instance import SAMPLING, OnInstance, OwnCopies, restore_attribute, set_own_copies
from quire.graph_runner.own_cache import switches_of, users_around
from quire.graph_runner.own_training import differs_in_training
from quire.graph_runner.paged_forward import PagedForward, own_forward
from quire.graph_runner.whole_logits import difference, limits_of, whole_logits
from quire.passes.backend import QuireBackend
from quire.passes.capture.errors import unwrapped
from quire.passes.capture.unserved_adapters import check_adapters_served
from quire.passes.fx import with_own_code
from quire.passes.options import QuireOptions
from quire.passes.verify.sites import transformers_config


def paged(model: Any = None, **options: Any) -> Any:
    """Make a model's ``generate`` paged, batched and graph-captured; or decorate a forward.

    Args:
        model: a transformers causal LM, which is returned, also in PEFT's wrapper; or a forward function (decorator use). With
            options only, a decorator is returned.
        options: of ``quire.Engine`` for a model; ``attention``, ``compiler`` and ``fusions`` for a forward.

    Returns:
        The same model object. ``model.generate`` now runs on an engine that is made at its first call and kept;
        ``model.generate.close()`` gives everything back.

    Raises:
        TypeError: neither a model with transformers' ``generate`` nor a function, or an unknown option.
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
        if transformers_config(model) is None and adapted_model(model) is None:  # nanoGPT's, say
            raise TypeError(f"the generate() of {type(model).__name__} is its own, and not transformers'; use "
                            "quire.Engine(model), whose generate() and stream() run its forward")
        EngineConfig.of({k: v for k, v in options.items() if k != "tokenizer"})  # checked now, not at the first generate
        if (inner := adapted_model(model)) is not None:
            paged(inner, **options)
            object.__setattr__(model, "generate", AdaptedGenerate(model))
            return model
        if isinstance(model.generate, PagedGenerate):
            model.generate.close()
        object.__setattr__(model, "generate", PagedGenerate(model, options))
        object.__setattr__(model, "forward", PagedForward(model, options.get("attention", "auto")))
        set_own_copies(model, True)
        return model
    if callable(model):
        return _decorate(model, options)
    raise TypeError(f"quire.paged takes a model or a forward function, got {type(model).__name__}")


def adapted_model(model: Any) -> Any:
    """The model inside PEFT's wrapper, whose ``generate`` calls that of the model; None if ``model`` is no such wrapper."""
    if not any(cls.__module__.startswith("peft.") and cls.__name__ in ("PeftModel", "PeftMixedModel")
               for cls in type(model).__mro__):
        return None
    base = model.base_model  # of prompt tuning the model, else a tuner around it
    return base.model if type(base).__module__.startswith("peft.") else base


class AdaptedGenerate:
    """``generate`` of PEFT's wrapper of a paged model: the wrapper's own, which ends in the model's."""

    def __init__(self, wrapper: Any) -> None:
        self.wrapper = wrapper

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return type(self.wrapper).generate(self.wrapper, *args, **kwargs)

    @property
    def engine(self) -> Engine:
        """See ``PagedGenerate.engine``. Raises UnsupportedAttention for what only the wrapper does, such as prompt learning."""
        check_adapters_served(self.wrapper)
        return adapted_model(self.wrapper).generate.engine

    def close(self) -> None:
        """See ``PagedGenerate.close``."""
        vars(self.wrapper).pop("generate", None)
        generate = adapted_model(self.wrapper).generate
        if isinstance(generate, PagedGenerate):
            generate.close()


class PagedGenerate(OnInstance):
    """``model.generate`` after ``quire.paged``. Callable like transformers' own."""

    def __init__(self, model: torch.nn.Module, options: dict[str, Any]) -> None:
        self.model, self._asked, self._options = model, options, options  # of quire.paged, and of the engine now
        self._original = model.__dict__.get("generate")
        self._engine: Engine | None = None
        self.warned: set[str] = set()
        self._making = threading.RLock()  # threads that share the model share its engine
        self._unserved: str | None = None  # why no engine can be made of the model
        self._refused: tuple[list[Any], str] = [], ""  # hooks with which it was not served last, and why
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
        return {name: self.__dict__[name] for name in ("model", "_asked", "_options", "_original", "warned")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _engine=None, _unserved=None, _refused=([], ""), warned=set(state["warned"]),
                             _making=threading.RLock(), _class_generate=type(state["model"]).generate)

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
        if given is None:
            return self._fall_back("its arguments do not fit the signature of generate", args, kwargs)
        forward, hooks = vars(self.model).get("forward"), users_around(self.model)
        if self._refused[1] and hooks + switches_of(hooks) == self._refused[0]:  # without another trace
            return self._fall_back(self._refused[1], args, kwargs)
        try:
            call = understand(self.model, given, self._original, getattr(forward, "original", forward), lambda: self.engine)
            if hooks and isinstance(call, Served):
                self._follow(self.engine)
        except (UnsupportedAttention, RuntimeError) as error:
            if not hooks or not any(isinstance(e, UnsupportedAttention) for e in (error, error.__cause__)):
                raise
            why = f"the model has hooks, or forwards of its own around parts, and with them {error}"
            self._refused = hooks + switches_of(hooks), why
            return self._fall_back(self._refused[1], args, kwargs)
        if isinstance(call, str):
            return self._fall_back(call, args, kwargs)
        ids = next(x for name in ("inputs", "input_ids") if (x := given.get(name)) is not None)
        if (differs := self._in_training(ids)) is not None:
            return self._fall_back(differs, args, kwargs)
        if call.note is not None:
            self._warn(call.note)
        if call.job is not None:
            return self._run(call.job)
        with setting(SAMPLING, (self.model, self._decode)):
            if call.instead is None:
                return self._plain(*args, **kwargs)
            return _with_prompts(self._plain(**call.instead), ids)

    def _follow(self, engine: Engine) -> None:
        """Take in now how the model has changed, and not in the next step, whose errors end the call."""
        with engine.lock.hold():
            if not (engine._closed or engine.runner.editor.in_processor):
                engine._follow(everything=True)

    def _in_training(self, ids: Any) -> str | None:
        """Why the model in training mode gives something else, by running it (``own_training.py``); None: it does not."""
        if not any(module.training for module in self.model.modules()):
            return None
        engine = self.engine
        with engine.lock.hold(), own_forward(self.model):  # no other thread sees the modes meanwhile
            found = differs_in_training(self.model, ids, engine.runner.paged.reads.values())
        return None if found is None else f"the model is in training mode, and {found} (paged: after model.eval())"

    def _warn(self, message: str, stacklevel: int = 3) -> None:
        if message not in self.warned:
            self.warned.add(message)
            warnings.warn(f"quire: {message}", stacklevel=stacklevel)

    def _fall_back(self, why: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._warn(f"generate() runs on transformers' own code, not paged, because {why}", 4)
        with setting(SAMPLING, None):  # of a call that this one is inside of
            return self._plain(*args, **kwargs)

    def _decode(self, plain: Callable[..., Any], input_ids: torch.Tensor, *, logits_processor: Any, stopping_criteria: Any,
                generation_config: Any, streamer: Any = None, **rest: Any) -> Any:
        """In the place of ``plain``, which is the model's ``_sample``, ``_beam_search`` or ``_assisted_decoding``."""
        prompts = prompts_of(input_ids, rest.get("attention_mask"))
        prepared = dict(logits_processor=logits_processor, stopping_criteria=stopping_criteria,
                        generation_config=generation_config)
        try:
            rows = lockstep.Rows(self.engine, prompts, generation_config.max_length - input_ids.shape[1])
        except lockstep.DoesNotFit as error:
            self._warn(f"generate() runs on transformers' own code, not paged, because {error}")
            if streamer is not None:
                rest["streamer"] = streamer
            with setting(SAMPLING, None):
                return plain(input_ids, **prepared, **rest)
        if plain.__name__ == "_beam_search":
            return lockstep.beam_search(plain, rows, input_ids, **prepared)
        return lockstep.sample(rows, input_ids, **prepared, streamer=streamer)

    def init_continuous_batching(self, generation_config: Any = None, continuous_batching_config: Any = None,
                                 workload_hints: Any = None) -> Any:
        """transformers' continuous batching, by this engine, which a config with other sizes replaces when it is idle. Raises
        ValueError for an option that quire does not have, RuntimeError where requests run on an engine of other sizes."""
        from transformers.generation import ContinuousBatchingConfig

        why = own_method(self.model, self._original)
        if why is not None:
            self._warn(f"continuous batching runs on transformers' own code, because {why} is the model's own", 4)
            plain: Any = super(OwnCopies, self.model)
            return plain.init_continuous_batching(generation_config, continuous_batching_config, workload_hints)
        generation_config = generation_config or self.model.generation_config
        config = continuous_batching_config or getattr(generation_config, "continuous_batching_config", None)
        config = config if config is not None else ContinuousBatchingConfig()
        asked = engine_options(config, self._asked.get("num_pages"), workload_hints)
        options = self._asked | asked
        try:
            EngineConfig.of({k: v for k, v in options.items() if k != "tokenizer"})
        except ValueError as error:
            raise ValueError(f"the continuous_batching_config makes {asked} of the engine's options: {error}") from error
        with self._making:
            if options != self._options:
                if self._engine is not None and self._engine.requests:
                    raise RuntimeError("requests run on the engine, so a continuous_batching_config with other sizes cannot "
                                       "replace it; wait for them, or give the sizes to quire.paged")
                if self._engine is not None:
                    self._engine.close()
                    self._engine = None
                self._options = options
        return Manager(lambda: self.engine, generation_config, config)

    def forward_logits(self, given: dict[str, Any], own_forward: Any) -> torch.Tensor | None:
        """The logits (B, L, V) of a call of the forward that reads nothing else; None, with a warning, if an engine might not
        give the same (``whole_logits.py``)."""
        why = difference(self.model, given, own_forward) or self._unserved
        if why is None:
            try:
                ids, engine = given["input_ids"], self.engine
            except (RuntimeError, ValueError) as error:  # the plain forward needs none
                why = self._unserved = str(error)
        if why is None:
            why = self._in_training(ids)
        if why is None and (why := limits_of(engine, ids)) is None:
            try:
                return whole_logits(engine, ids)
            except (lockstep.DoesNotFit, UnsupportedAttention) as error:
                why = str(error)
        self._warn(f"lm-eval's log-likelihoods run on transformers' own code, not paged, because {why}", 7)
        return None

    def _run(self, job: Job) -> Any:
        ids, params, streamer = job.ids, job.params, job.streamer
        if params.seed is None and not params.greedy:  # follow torch.manual_seed, as transformers does
            params = replace(params, seed=int(torch.randint(0, 2**62, ()).item()))
        each = [replace(params, seed=((params.seed or 0) + i * 1_000_003) % 2**62) for i in range(len(job.prompts))]
        if streamer is not None:
            streamer.put(ids.cpu())
        outputs = []
        for event in self.engine.stream(job.prompts, each, raise_on_error=False):
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
        rows = [torch.tensor(output.token_ids, dtype=torch.int64) for output in outputs]
        new = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=job.pad)
        sequences = torch.cat([ids.repeat_interleave(params.n, 0), new.to(ids.device)], dim=1)
        return lockstep.output_dict(sequences) if job.return_dict else sequences


def _with_prompts(found: Any, ids: Any) -> Any:
    """The result of ``generate`` with the prompts ``ids`` as they were given, for each of which it has as many sequences."""
    sequences = found if isinstance(found, torch.Tensor) else found.sequences
    given = ids.repeat_interleave(len(sequences) // len(ids), 0).to(sequences)
    sequences = torch.cat([given, sequences[:, ids.shape[1]:]], 1)
    if isinstance(found, torch.Tensor):
        return sequences
    found.sequences = sequences
    return found


def _decorate(forward: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    """The decorator: inside paged steps it calls a version of the forward compiled for each module."""
    opts = QuireOptions.of({"compiler": "inductor" if torch.cuda.is_available() else "eager", **options})
    # One per module, as Dynamo traces a code object at most eight times. A plain function has one.
    compiled: weakref.WeakKeyDictionary[Any, Callable[..., Any]] = weakref.WeakKeyDictionary()

    @functools.wraps(forward)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or current_step() is None:
            return forward(*args, **kwargs)
        owner = args[0] if args and isinstance(args[0], torch.nn.Module) else wrapper
        call = compiled.get(owner)
        if call is None:
            own = with_own_code(forward) if isinstance(forward, types.FunctionType) else forward
            call = compiled[owner] = torch.compile(own, backend=QuireBackend(opts), fullgraph=True)
        try:
            return call(*args, **kwargs)
        except torch._dynamo.exc.TorchDynamoException as error:
            raise unwrapped(error, args[0] if args else None) from error

    return wrapper
