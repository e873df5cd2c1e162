"""``torch.compile(model, backend="quire")``: one traced graph, two ways to run it.

With no paged step in progress the graph runs as it is, through Inductor: the model behaves as under plain ``torch.compile``,
training included. Inside ``quire.step`` the same graph runs raised, verified, lowered and fused, on the step's KV cache.
Which one is decided at each call, so no guard and no second trace is needed.

Order of the passes on the paged way: raise_sdpa, verify, select the backend, lower, fusions, Inductor.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import fx
from torch._guards import TracingContext, tracing

from attn_ops.attention import AttentionSite
from attn_ops.backend import AttentionBackend, Selection, UnsupportedAttention, select_backend
from attn_ops.kv_cache import Layout
from attn_ops.small_linear import MAX_TOKENS
from attn_ops.step import Step, current_step, ensure_planned
from passes.eager import check_step
from passes.fusion import FusedWeights, apply_fusions, apply_lowered_fusions, fusion_names, has_small_passes
from passes.graph_tools import copy_graph, placeholders, shape_conditions, symbolic, value
from passes.lowering import Lowered, LoweringTarget, lower
from passes.quantized import check_rows
from passes.raising import raise_sdpa
from passes.regions import compile_by_regions
from passes.sites import check_mixing, check_positions, site_nodes, site_of, verify
from passes.size_guards import Assumptions, checked, watched
from passes.stages import stage

logger = logging.getLogger(__name__)


COMPILERS = ("inductor", "inductor-whole", "eager")


class Traced(Exception):
    """Raised by a traced graph that was called only so that Dynamo traces it."""


@dataclass(frozen=True)
class QuireOptions:
    """Options of ``torch.compile(backend="quire", options={...})``.

    Args:
        attention: backend name, or "auto".
        compiler: "inductor", which compiles each distinct layer once (``passes/regions.py``); "inductor-whole", the whole graph
            at once; or "eager", the lowered graph op by op (no C++ compiler needed; for debugging).
        fusions: fusion passes to run: names (a sequence, or with commas between), "all" or "none"; see ``passes/fusion.py``.
        page_size, kv_cache_dtype, layout: of the cache. None: whatever the step in progress has; else that must have them.
        max_model_len: no sequence will be longer; some models can be served only up to a length. (For ``PagedModel`` only.)
    """

    attention: str = "auto"
    compiler: str = "inductor"
    fusions: str | Sequence[str] = "none"
    page_size: int | None = None
    kv_cache_dtype: torch.dtype | None = None
    layout: Layout | None = None
    max_model_len: int | None = None

    def __post_init__(self) -> None:
        if self.compiler not in COMPILERS:
            raise ValueError(f"compiler must be one of {', '.join(COMPILERS)}; got {self.compiler!r}")
        if isinstance(self.fusions, str) and self.fusions not in ("all", "none"):
            object.__setattr__(self, "fusions", tuple(name.strip() for name in self.fusions.split(",")))
        if self.layout not in (None, "NHD", "HND"):
            raise ValueError(f"layout must be 'NHD' or 'HND', got {self.layout!r}")
        names = () if self.fusions in ("all", "none") else self.fusions
        unknown = [n for n in names if n not in fusion_names()]
        if unknown:
            raise ValueError(f"unknown fusions {unknown}; there are {fusion_names()}, 'all' and 'none'")

    @classmethod
    def of(cls, options: dict[str, Any] | None) -> QuireOptions:
        known = {f.name for f in fields(cls)}
        unknown = sorted(set(options or {}) - known)
        if unknown:
            raise TypeError(f"unknown options for backend 'quire': {unknown}; it takes {sorted(known)}")
        return cls(**(options or {}))


@dataclass(eq=False)  # Dynamo compares backends with ==
class QuireBackend:
    """The Dynamo backend as an object: the engine keeps one and reads ``graphs``; torch.compile users get it by name.

    ``guards_dropped``: the caller runs the graphs for any batch shape, whatever Dynamo guarded. ``trace_only``: graphs made
    while it is set raise Traced when called with no step in progress, after Dynamo has kept them;
    with ``compile_ahead`` they are lowered and compiled at once, before the cache exists.
    """

    options: QuireOptions
    config: Any = None
    trace_only: bool = False
    guards_dropped: bool = False
    compile_ahead: bool = False
    weights: FusedWeights = field(default_factory=FusedWeights)
    graphs: list[QuireGraph] = field(default_factory=list)

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> QuireGraph:
        if self.trace_only and self.graphs:  # a second trace, in another situation than the first, would be another graph
            raise RuntimeError("the trace of this model is gone (torch._dynamo.reset() drops all of them): close the engine "
                               "and make a new one")
        graph = QuireGraph(gm, list(example_inputs), self)
        self.graphs.append(graph)
        if self.compile_ahead and self.options.page_size is not None:
            graph.paged(None)
        elif current_step() is not None:
            graph.paged(current_step())
        return graph


@dataclass
class _Paged:
    """The paged way of one graph: for one backend, cache format and set of fusions."""

    lowered: Lowered
    backend: AttentionBackend
    selection: Selection
    run: Callable[..., Any]
    run_small: Callable[..., Any] | None = None  # for at most MAX_TOKENS tokens


class QuireGraph:
    """One graph that Dynamo traced, callable with its inputs."""

    def __init__(self, gm: fx.GraphModule, example_inputs: list[Any], owner: QuireBackend) -> None:
        self.gm, self.example_inputs, self.owner = gm, example_inputs, owner
        self.context = TracingContext.try_get()
        self._unfused = False
        self._guards: list[Any] = []
        self.assumed: list[Assumptions] = []  # by the compiler, about sizes; of each compilation
        self._plain: Callable[..., Any] | None = None
        self._selected: dict[Any, Selection] = {}
        self._paged: dict[Any, _Paged] = {}
        self._raised: tuple[fx.GraphModule, list[AttentionSite]] | None = None

    def __call__(self, *args: Any) -> Any:
        step = current_step()
        if step is None:
            if self.owner.trace_only:
                raise Traced
            if self._plain is None:
                self._plain = self._compile_plain()
            return self._plain(*args)
        paged = self.paged(step)
        tokens = self._tokens(args)
        if tokens is not None:
            check_step(step, tokens)
        fused = self.owner.weights.tensors_of(self)
        if fused and not self.owner.weights.hold(self, args):
            if not self._unfused:
                self._unfused = True
                logger.warning("parameters are not those that were fused (replaced, or another module's): running unfused")
            paged, fused = self.paged(step, fusions=False), []
        ensure_planned(step, paged.backend, list(paged.lowered.sites))
        step.served.update(paged.lowered.inputs.layers)
        run = paged.run_small if paged.run_small and tokens is not None and tokens <= MAX_TOKENS else paged.run
        with torch.no_grad():
            return run(*args, *fused, *paged.lowered.inputs.of(step))

    # -- analysis ---------------------------------------------------------------------------------------------------

    def sites(self) -> list[AttentionSite]:
        """Raise and verify (once); the attention sites in graph order. Raises UnsupportedAttention."""
        return self._raised_graph()[1]

    def _raised_graph(self) -> tuple[fx.GraphModule, list[AttentionSite]]:
        if self._raised is None:
            gm = copy_graph(self.gm)
            real = {n.name: x for n, x in zip(placeholders(gm.graph), self.example_inputs, strict=True)}
            refusals: dict[str, str] = {}
            numbered = [n.kwargs["layer"] for n in site_nodes(gm.graph)]
            raised, refusals = raise_sdpa(gm, real)
            found = [site_of(n) for n in site_nodes(gm.graph)]
            if numbered and len(found) > len(numbered):
                raise UnsupportedAttention(
                    f"{len(numbered)} attention sites came through transformers' attention interface and "
                    f"{len(found) - len(numbered)} as F.scaled_dot_product_attention; quire does not mix the two in one model")
            verify(gm.graph, found, self.owner.config, refusals)
            tokens = value(site_nodes(gm.graph)[0].args[0]).shape[2]
            for node, site in zip(site_nodes(gm.graph), found, strict=True):
                if self.owner.guards_dropped and str(value(node.args[0]).shape[0]) != "1":
                    raise UnsupportedAttention(
                        f"attention site {site.layer} ({site.name}) calls attention with queries of shape "
                        f"{tuple(value(node.args[0]).shape)} for one row of tokens; need (1, H, S, D)")
            check_positions(gm.graph, tokens, self.owner.config is not None)
            check_mixing(gm.graph, tokens)
            check_rows(gm.graph, dict(zip(placeholders(gm.graph), self.example_inputs, strict=True)))
            self._check_shape_conditions(gm, raised > 0)
            self._raised = gm, found
        return self._raised

    def _check_shape_conditions(self, gm: fx.GraphModule, raised: bool) -> None:
        """A mask that the model chooses by the number of tokens was seen for some of them only; so were dropped guards."""
        if not raised and not self.owner.guards_dropped:
            return
        q = value(site_nodes(gm.graph)[0].args[0])
        squares = {x.shape[-1] for x in self.example_inputs if isinstance(x, torch.Tensor) and x.dim() >= 2
                   and x.shape[-1] == x.shape[-2] and isinstance(x.shape[-1], int)}  # stored masks
        conditions = shape_conditions(gm.graph, q.shape[2], squares)
        if conditions:
            raise UnsupportedAttention(
                f"the model takes a path of its own for some numbers of tokens ({', '.join(conditions)}), so its masks cannot "
                "be read off one trace. quire.paged and quire.Engine capture transformers models without masks.")
        if raised and not symbolic(q.shape[2]):
            raise UnsupportedAttention(
                f"the graph was traced for exactly {q.shape[2]} tokens, too few to tell what its masks mean for longer "
                "sequences; compile with dynamic=True and give at least 2 tokens")

    def _tokens(self, args: Sequence[Any]) -> int | None:
        """Tokens of this call, from the first input of the ragged row; None if the graph does not tell."""
        if self._row is None:
            return None
        shape = args[self._row].shape
        return shape[0] * shape[1]

    @property
    def _row(self) -> int | None:
        if not hasattr(self, "_row_index"):
            self._row_index = None
            q = value(site_nodes(self._raised_graph()[0].graph)[0].args[0])
            for i, node in enumerate(placeholders(self.gm.graph)):
                val = value(node)
                if isinstance(val, torch.Tensor) and not val.is_floating_point() and val.dim() == 2 \
                        and str(val.shape) == str(torch.Size((q.shape[0], q.shape[2]))):
                    self._row_index = i
                    break
        return self._row_index

    # -- compilation ------------------------------------------------------------------------------------------------

    def paged(self, step: Step | None, fusions: bool = True) -> _Paged:
        """The compiled paged way for ``step`` (or for the owner's options, before there is one). ``fusions`` False: without
        them, for parameters that are not those which were fused."""
        opts = self.owner.options
        attention: Any = opts.attention
        if step is not None:
            if step.attention != "auto":
                attention = step.attention
            kv_dtype: torch.dtype | None
            page_size, kv_dtype, layout = step.cache.page_size, step.cache.dtype, step.cache.layout
            for option, given, found in (("page_size", opts.page_size, page_size), ("layout", opts.layout, layout),
                                         ("kv_cache_dtype", opts.kv_cache_dtype, kv_dtype)):
                if given is not None and given != found:
                    raise ValueError(f"the model is compiled with {option}={given}, and the step's cache has {found}; leave "
                                     "the option out, or make a cache that goes with it")
        else:
            assert opts.page_size is not None
            page_size, kv_dtype, layout = opts.page_size, opts.kv_cache_dtype, opts.layout or "NHD"
        name = attention.name if isinstance(attention, AttentionBackend) else attention
        sites = self.sites()
        asked = (name, page_size, kv_dtype or sites[0].dtype, layout)
        if asked not in self._selected:
            device = next(value(n.args[0]).device for n in site_nodes(self._raised_graph()[0].graph))
            self._selected[asked] = select_backend(attention, sites, device=device, page_size=page_size, kv_dtype=kv_dtype,
                                                   layout=layout)
        selection = self._selected[asked]
        key = (selection.backend.name, *asked[1:], fusions)  # by name or as "auto", it is compiled once
        if key not in self._paged:
            target = LoweringTarget(selection.backend, page_size, kv_dtype, layout)
            self._paged[key] = self._compile_paged(target, selection, fusions)
        return self._paged[key]

    def _compile_paged(self, target: LoweringTarget, selection: Selection, fusions: bool) -> _Paged:
        names = self.owner.options.fusions if fusions else "none"
        lowered, run = self._compile_variant(target, names, small=False)
        run_small = self._compile_variant(target, names, small=True)[1] if has_small_passes(names) else None
        return _Paged(lowered, target.backend, selection, run, run_small)

    def _compile_variant(self, target: LoweringTarget, fusions: str | Sequence[str], small: bool
                         ) -> tuple[Lowered, Callable[..., Any]]:
        gm = copy_graph(self._raised_graph()[0])
        apply_fusions(self, gm, self.example_inputs, fusions, self.owner.weights, small)
        lowered = lower(gm, target)
        apply_lowered_fusions(lowered, fusions, small)
        inputs = [value(n) for n in placeholders(lowered.gm.graph)]  # fakes: fused parameters have moved since tracing
        with torch.no_grad(), _traced_in(self.context), watched(
                lowered.gm.graph, self._guards) as assumed, stage("compile"):
            run = _compile(lowered, self.owner.options.compiler)
        self._check_still_dynamic(inputs)
        self.assumed.append(assumed)
        return lowered, checked(run, assumed)

    def _check_still_dynamic(self, inputs: list[Any]) -> None:
        """Tensor subclasses (quantised weights) and custom ops run Python code while the compiler traces them, and that may
        settle the number of tokens: the compiled code would then serve this number alone, and nobody guards it."""
        for x in inputs:
            size: Any
            for size in x.shape if isinstance(x, torch.Tensor) else ():
                if symbolic(size) and size.node.shape_env.replace(size.node.expr).is_number:
                    raise UnsupportedAttention(
                        f"compiling the model settled a size that changes from batch to batch (at {size}): an operation in "
                        "it, such as a quantised layer, depends on the number of tokens. compiler='eager' runs it as it is.")

    def _compile_plain(self) -> Callable[..., Any]:
        if self.owner.options.compiler == "eager":
            return self.gm.forward
        # Its own guards: this may be long after tracing. Sizes that were found to vary are not made constants again.
        varies = any(isinstance(x, torch.SymInt) for x in self.example_inputs)
        return torch.compile(copy_graph(self.gm), backend="inductor", dynamic=True if varies else None)


def _traced_in(context: TracingContext | None) -> Any:
    """The tracing context Dynamo had: still there inside the backend call, put back if we compile later."""
    if context is None or TracingContext.try_get() is context:
        return torch.no_grad()
    return tracing(context)


def _compile(lowered: Lowered, compiler: str) -> Callable[..., Any]:
    if compiler == "eager":
        return lowered.gm.forward
    if compiler == "inductor-whole":
        return _inductor(lowered.gm, [value(n) for n in placeholders(lowered.gm.graph)])
    return compile_by_regions(lowered, _inductor)


def _inductor(gm: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    """Compile for fake ``inputs``. CUDA graphs are ours to capture; Inductor's own would record again for every new cache."""
    from torch._dynamo.exc import TensorifyScalarRestartAnalysis
    from torch._dynamo.symbolic_convert import TensorifyState
    from torch._inductor.compile_fx import compile_fx

    compiled: Any = functools.partial(compile_fx, gm, inputs, config_patches={"triton.cudagraphs": False})
    before = set(TensorifyState.force_specializations)
    try:
        return compiled()
    except TensorifyScalarRestartAnalysis:
        # Floats that Dynamo made inputs (dynamic=True does so) and that must be constants are noted by now. Dynamo would trace
        # anew; the second try makes guards of their values, which ``watched`` sees.
        return compiled()
    finally:
        TensorifyState.force_specializations.intersection_update(before)


def quire_backend(gm: fx.GraphModule, example_inputs: Sequence[Any], *, options: dict[str, Any] | None = None,
                  mode: str | None = None) -> Callable[..., Any]:
    """Entry point ``torch_dynamo_backends: quire``. ``options``: see QuireOptions.

    Raises:
        TypeError: an unknown option. ValueError: a ``mode`` (Inductor's modes would bring their own CUDA graphs).
    """
    if mode not in (None, "default"):
        raise ValueError(f"backend 'quire' takes no mode (got {mode!r}): CUDA graphs are quire's own. Use options={{...}}")
    chosen = QuireOptions.of(options)
    if chosen.max_model_len is not None:
        raise ValueError("max_model_len is an option of quire.Engine; in a step by hand sequences are as long as you make them")
    return QuireBackend(chosen)(gm, example_inputs)


__all__ = ["QuireBackend", "QuireGraph", "QuireOptions", "Traced", "quire_backend"]
