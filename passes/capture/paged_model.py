"""Trace a whole model once, so that an engine can run it on ragged batches of any shape.

``PagedModel`` is what the engine, ``quire.explain`` and ``PagedKVCache.for_model`` share: it picks the route (attention
interface or raised F.sdpa), traces with Dynamo, verifies, and, asked to, compiles the lowered graph. The model itself is
left as it was: the interfaces of attention and experts are switched over only while tracing.
"""

from __future__ import annotations

import contextlib
import inspect
import re
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from torch.utils._python_dispatch import _disable_current_modes

import quire.attn_ops.kv_cache
from quire.attn_ops.attention import AttentionSite
from quire.attn_ops.backend import UnsupportedAttention
from quire.attn_ops.ops.sampling import draw_tokens
from quire.attn_ops.registry import get_backend
from quire.attn_ops.selection import Selection, select_backend
from quire.attn_ops.step import Step, current_step, running
from quire.passes.capture.hf_experts import experts_active
from quire.passes.capture.hf_interface import interface_active, uses_interface
from quire.passes.capture.traced import TracedGraph
from quire.passes.compile.ahead import CompileAhead
from quire.passes.fusions.base import FusedWeights
from quire.passes.fx import value, with_own_code
from quire.passes.options import QuireOptions
from quire.passes.pipeline import PagedGraph
from quire.passes.rewrite.own_positions import check_uncompiled
from quire.passes.start_times import stage
from quire.passes.verify.positions import check_model
from quire.passes.verify.sites import check_config

# Sizes of the traced batch. All different, none 0 or 1 (Dynamo would make them constants or one symbol).
_TOKENS, _REQS = 23, 7


class _Traced(Exception):
    """Raised by the graph when it is called only so that Dynamo traces it and keeps it."""


def _weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """The method, without keeping its object alive: Dynamo keeps backends and what they return. See NOTE [Not kept alive]."""
    found = weakref.WeakMethod(method)

    def call(*args: Any, **kwargs: Any) -> Any:
        method = found()
        assert method is not None  # whoever calls has the object
        return method(*args, **kwargs)

    return call


# transformers sets a context variable in each forward and sets it back; rotary embeddings of some kinds update themselves and
# the rope parameters of their config for the length at hand (those whose frequencies come of it are refused by their config).
_OWN_CHANGES = re.compile(r"^G\['__import_transformers_|rotary|\.config\b")


def _check_side_effects() -> None:
    """Called in a trace: refuse a model whose code changes Python objects. Dynamo would change them as often as its own code
    runs, from what they held when traced; a captured graph would not at all. Torch 2.11 cannot tell.

    Raises:
        UnsupportedAttention: names the objects.
    """
    output = torch._dynamo.symbolic_convert.InstructionTranslator.current_tx().output
    if not hasattr(output, "get_replayed_side_effect_source_refs"):
        return
    sources = [str(source) for source in output.get_replayed_side_effect_source_refs()]
    changed = [_readable(s) for s in sources if not _OWN_CHANGES.search(s)]
    if changed:
        raise UnsupportedAttention(
            f"the model's forward, or a hook of it, changes what outlives the call: {', '.join(changed[:5])}. It runs only "
            "when traced, so later changes would be lost; let it return what it makes, and remove hooks that record")


def _readable(source: str) -> str:
    """Dynamo's name of an object, in words: ``L['self']._call._modules['layers']`` is ``model.layers``."""
    where, hook, _ = source.partition("._forward_")
    where = re.sub(r"\._modules\['(\w+)'\]", r".\1", re.sub(r"^L\['self'\]\._call\b", "model", where))
    where = re.sub(r"^G\['(\w+)'\]", r"\1", re.sub(r"^G\['__import_\w+'\]\.", "", where))
    return f"what a hook of {where} holds" if hook else where


class _OneGraph:
    """The Dynamo backend of a ``PagedModel``: keeps the one graph of the model, for batches of any shape."""

    def __init__(self, options: QuireOptions, config: Any, ahead: CompileAhead | None) -> None:
        self.options, self.config, self.ahead, self.weights = options, config, ahead, FusedWeights()
        self.graph: PagedGraph | None = None

    def __call__(self, gm: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
        if self.graph is not None:  # a second trace, in another situation than the first, would be another graph
            raise RuntimeError("the trace of this model is gone (torch._dynamo.reset() drops all of them): close the engine "
                               "and make a new one")
        _check_side_effects()
        self.graph = PagedGraph(TracedGraph(gm, inputs, self.config, any_shape=True), self.options, self.weights,
                                self.ahead)
        if self.options.page_size is not None:  # lowered and compiled before the cache exists
            self.graph.compiled()
        return _weakly(self._run)

    def restore(self) -> None:
        """Give the model's parameters memory of their own again, group by group: what was compiled holds the fused ones."""
        if self.graph is not None:
            self.graph.compilations.clear()
        self.weights.restore()

    def _run(self, *args: Any) -> Any:
        step = current_step()
        if step is None or self.graph is None:
            raise _Traced
        return self.graph(step, *args)


class PagedModel:
    """A causal LM traced for paged steps: call it inside a step with (T,) token ids and positions.

    Args:
        model: a transformers causal LM, or any module whose forward takes ``input_ids`` (1, T) and ``position_ids`` (1, T) and
            returns logits (1, T, V), as a tensor or as ``.logits``.
        options: see QuireOptions. With ``page_size`` set the graph is compiled here, else at the first step.
        draws: the graph draws the tokens of rows with a temperature too (``attn_ops/ops/sampling.py``): in one pass over the logits
            on CUDA, or compiled; op by op on a CPU, each operation of it would be a pass.
        ahead: starts on the kernels of the graph while it is compiled; the caller waits for it.

    Raises:
        UnsupportedAttention: the model cannot be served; the message names the site and the reason.
        ValueError: there is no backend of the name in ``options``.
    """

    def __init__(self, model: torch.nn.Module, options: QuireOptions | None = None, *, draws: bool = False,
                 ahead: CompileAhead | None = None) -> None:
        options = options or QuireOptions()
        if options.attention != "auto":
            get_backend(options.attention)  # a wrong name raises ValueError now, not from inside Dynamo
        self.model, self.config, self.draws = model, getattr(model, "config", None), draws
        if self.config is not None:
            check_config(self.config, options.max_model_len)
        check_model(model, options.max_model_len)
        parameters = inspect.signature(model.forward).parameters
        takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        missing = [n for n in ("input_ids", "position_ids") if n not in parameters and not takes_any]
        if missing:
            raise UnsupportedAttention(
                f"{type(model).__name__}.forward takes no {' and no '.join(missing)}; a ragged batch cannot be given to it. "
                "quire serves causal LMs whose forward takes input_ids and position_ids.")
        self._keep_name = "logits_to_keep" if "logits_to_keep" in parameters else None
        self._use_cache = "use_cache" in parameters or (takes_any and self.config is not None)
        self._call = model  # by a name of its own, which graph_tools.module_path drops from the paths of modules
        self.options, self._backend, self._closed = options, _OneGraph(options, self.config, ahead), False
        # For owners that never call ``close``. Not at exit: nobody saves a model after it.
        weakref.finalize(self, _restore, self._backend).atexit = False
        try:
            with stage("trace"), evaluating(model):
                self._compiled = self._trace()
        except BaseException:
            self.close()
            raise

    def by_itself(self, input_ids: torch.Tensor, position_ids: torch.Tensor | None) -> torch.Tensor:
        """Logits (T, V) of the model's own forward of one sequence (T,), with nothing of quire's. Without positions the model
        counts its own; raises what its forward raises."""
        options: dict[str, Any] = {"use_cache": False} if self._use_cache else {}
        if position_ids is not None:
            options["position_ids"] = position_ids[None]
        with evaluating(self.model), torch.no_grad():
            out = self.model(input_ids=input_ids[None], **options)
        return (out if isinstance(out, torch.Tensor) else out[0] if isinstance(out, tuple) else out.logits)[0]

    def _forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor, logits_indices: torch.Tensor,
                 *sampling: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        options: dict[str, Any] = {}
        if self._use_cache:
            options["use_cache"] = False
        if self._keep_name is not None:
            options[self._keep_name] = logits_indices
        out = self._call(input_ids=input_ids, position_ids=position_ids, **options)
        logits = out if isinstance(out, torch.Tensor) else out[0] if isinstance(out, tuple) else out.logits
        logits = logits[0] if self._keep_name is not None else logits[0][logits_indices]
        # The token is chosen here, where the compiler puts it into the graph; -1 where logits are NaN, or all -inf.
        if sampling:
            return logits, draw_tokens(logits, *sampling)
        highest, token = logits.max(dim=-1)
        return logits, torch.where(highest > float("-inf"), token, -1)  # not so for NaN, too

    def _trace(self) -> Any:
        device = next(self.model.parameters()).device
        # Guards are dropped: one graph serves every batch shape. TracedGraph refuses a trace whose guards meant something.
        forward = types.MethodType(with_own_code(type(self)._forward), self)
        compiled = torch.compile(forward, backend=_weakly(self._backend.__call__), fullgraph=True,
                                 options={"guard_filter_fn": lambda guards: [False] * len(guards)})
        ids = torch.zeros(1, _TOKENS, dtype=torch.int64, device=device)
        positions = torch.arange(_TOKENS, device=device)[None]
        keep = torch.arange(_REQS, device=device)
        sampling = self._all_greedy(keep)
        for tensor, dim in ((ids, 1), (positions, 1), *((each, 0) for each in (keep, *sampling))):
            torch._dynamo.mark_dynamic(tensor, dim)
        by_interface = self.config is not None and uses_interface(self.model)
        route = interface_active(self.model) if by_interface else contextlib.nullcontext()
        # Else Dynamo makes a symbol of every number that differs from the model traced before (its scale, its window).
        static = torch._dynamo.config.patch(automatic_dynamic_shapes=False)
        with route, experts_active(self.model), static, torch.no_grad():
            try:
                compiled(ids, positions, keep, *sampling)
            except _Traced:
                pass
            except Exception as error:
                raise unwrapped(error, self.model) from error
        _ = self.sites  # verified here, not at the first step
        return compiled

    @property
    def graph(self) -> PagedGraph:
        """The traced graph, and how it runs in steps."""
        assert self._backend.graph is not None
        return self._backend.graph

    @property
    def traced(self) -> bool:
        """Whether the trace is still there; ``torch._dynamo.reset`` drops all of them."""
        return bool(_debug_get_cache_entry_list(self._compiled._torchdynamo_orig_callable.__code__))

    @property
    def weights(self) -> FusedWeights:
        """Tensors that fusions made of the model's parameters."""
        return self._backend.weights

    @property
    def sites(self) -> list[AttentionSite]:
        """The attention sites, in the order of the graph."""
        return self.graph.traced.sites

    @property
    def num_logits(self) -> int:
        """Logits a token has: V."""
        logits = self.graph.traced.gm.graph.output_node().args[0][0]  # type: ignore[index]
        return int(value(logits).shape[-1])

    @property
    def selection(self) -> Selection:
        """The backend chosen and why others were passed over; only with options.page_size set."""
        return self.graph.compiled().selection

    def check_sizes(self, num_tokens: int, num_reqs: int) -> None:
        """Would the compiled graphs run a step of that size?

        Raises:
            ValueError: the compiler assumed that steps are smaller; gives the condition.
        """
        for assumed in self.graph.assumed:
            known = {"tokens": num_tokens, "rows": num_reqs}
            sizes = {symbol: known[role] for symbol, role in assumed.roles.items() if role in known}
            condition = assumed.broken(sizes)
            if condition is not None:
                raise ValueError(f"steps of up to {num_tokens} tokens and {num_reqs} rows are more than the compiled model "
                                 f"allows: it assumes {condition}. Lower max_num_batched_tokens, or use compiler='eager'")

    def select(self, page_size: int) -> Selection:
        """The backend that would be chosen for pages of ``page_size`` tokens. Raises UnsupportedAttention if there is none."""
        device = next(self.model.parameters()).device
        return select_backend(self.options.attention, self.sites, device=device, page_size=page_size)

    def __call__(self, step: Step, input_ids: torch.Tensor, positions: torch.Tensor,
                 logits_indices: torch.Tensor) -> torch.Tensor:
        """One forward in ``step``: ids and positions (T,) int64, logits_indices (B,) int64 -> logits (B, V)."""
        return self.run(step, input_ids, positions, logits_indices)[0]

    def run(self, step: Step, input_ids: torch.Tensor, positions: torch.Tensor, logits_indices: torch.Tensor,
            sampling: Sequence[torch.Tensor] | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """As a call, and the tokens (B,) int64 too: of a greedy row the first of the largest logits; -1 where they are NaN.

        Args:
            sampling: temperature (B,) float32, seed (B,) int64 and position (B,) int64 of the token to draw; None: all rows
                are greedy. Needs ``draws``.

        Raises:
            ValueError: ``sampling`` for a graph that does not draw. RuntimeError: after ``close``.
        """
        if sampling is not None and not self.draws:
            raise ValueError("this PagedModel was traced with draws=False: its graph takes greedy tokens only")
        if self._closed:
            raise RuntimeError("this PagedModel is closed, and the model as it was before; make a new one")
        with running(step), torch.no_grad():
            sampling = self._all_greedy(logits_indices) if sampling is None else sampling
            return self._compiled(input_ids[None], positions[None], logits_indices, *sampling)

    def _all_greedy(self, logits_indices: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Sampling inputs of as many greedy rows; none for a graph that does not draw."""
        if not self.draws:
            return ()
        like = torch.zeros_like(logits_indices)
        return like.float(), like, torch.zeros_like(like)

    def close(self) -> None:
        """Undo what tracing and fusion did to the model."""
        self._closed = True
        self._backend.restore()


def _restore(backend: _OneGraph) -> None:
    """For the garbage collector, which comes anywhere, inside of a trace too: no mode may see the copies."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        backend.restore()


@contextlib.contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """While inside, no module of the model is in training mode: no dropout."""
    training = [m for m in model.modules() if m.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


def unwrapped(error: Exception, model: torch.nn.Module) -> Exception:
    """Dynamo wraps what a backend raises; users get our own error, or one that names the model."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, UnsupportedAttention):
            return UnsupportedAttention(str(cause))
        inner = getattr(cause, "inner_exception", None)
        cause = inner or cause.__cause__ or cause.__context__
    ours = re.search(r"UnsupportedAttention\((.*)\)$", str(error), re.MULTILINE)
    if ours is not None:  # an exception raised while tracing reaches us as a part of Dynamo's text
        plain = re.search(r"ConstantVariable\(str: (['\"])(.*)\1\)", ours[1])  # so torch 2.11 shows it
        return UnsupportedAttention(plain[2] if plain else ours[1].strip("'\""))
    error = getattr(error, "inner_exception", None) or error  # not Dynamo's line, which prints the whole backend
    first = str(error).strip().splitlines()[0] if str(error).strip() else ""
    return UnsupportedAttention(f"{type(model).__name__} could not be traced into one graph: {type(error).__name__}: {first}"
                                f"{_reason(str(error))}")


def _reason(text: str) -> str:
    """What Dynamo says behind its first line that helps: what it met, and where in the user's code."""
    met = re.search(r"Developer debug context: *(\S.*)", text)
    places = re.findall(r'^ *(File ".*", line \d+)', text.partition("from user code")[2], re.MULTILINE)
    found = [part for part in (met and met[1].strip()[:200], places and places[-1][-90:]) if part]
    return f" ({'; '.join(found)})" if found else ""


def find_sites(model: torch.nn.Module, *, uncompiled: bool = False) -> list[AttentionSite]:
    """The attention sites of ``model``, found by tracing it; nothing is compiled or computed. ``uncompiled``: refuse one that
    is right only when it is compiled."""
    paged = PagedModel(model, QuireOptions(compiler="eager"))
    try:
        if uncompiled:
            check_uncompiled(paged.graph.traced.raised)
        return paged.sites
    finally:
        paged.close()


quire.attn_ops.kv_cache.find_sites = find_sites

__all__ = ["PagedModel", "find_sites", "unwrapped"]
