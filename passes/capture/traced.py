"""A graph that Dynamo traced, and how it runs: as it is outside paged steps, raised, lowered and compiled inside.

``passes/backend.py`` makes one of each graph that Dynamo gives it, ``PagedModel`` one of a whole model.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import fx
from torch._guards import TracingContext

from quire.attn_ops.attention import AttentionSite
from quire.attn_ops.backend import AttentionBackend, UnsupportedAttention
from quire.attn_ops.long_prefill import build_seconds
from quire.attn_ops.ops.small_linear import MAX_TOKENS
from quire.attn_ops.registry import all_backends
from quire.attn_ops.selection import Selection, select_backend, select_latent_or_dense
from quire.attn_ops.step import Step, current_step, ensure_planned
from quire.passes.capture.kept_trace import proving_once
from quire.passes.capture.own_attention import check_callers, check_code, check_mask_makers, functions_beside, names_around
from quire.passes.capture.own_masks import check_masks
from quire.passes.capture.retrace import AnyLength, TracedCall, is_static
from quire.passes.capture.side_effects import check_changes, note_changes
from quire.passes.compile.ahead import CompileAhead, StepShape
from quire.passes.compile.size_guards import Assumptions
from quire.passes.eager import check_step
from quire.passes.fusions.base import FusedInputs, FusedWeights
from quire.passes.fusions.registry import has_small_passes
from quire.passes.fx import copy_graph, is_module_tensor, last_key, placeholders, target_name, value, written
from quire.passes.options import QuireOptions
from quire.passes.pipeline import check_longest, compile_graph, each_time, lower_graph, raise_graph
from quire.passes.rewrite.last_rows import LAST_ROWS
from quire.passes.rewrite.length_rope import LIMITS, check_lengths
from quire.passes.rewrite.lower import Lowered, LoweringTarget
from quire.passes.rewrite.own_positions import adds_positions, positions_of
from quire.passes.verify.breaks import check_whole, note_breaks
from quire.passes.verify.sites import check_config, check_model, site_nodes

logger = logging.getLogger(__name__)
#: Functions and methods that give the same numbers, or some of them.
_SAME_NUMBERS = frozenset({"view", "reshape", "flatten", "squeeze", "unsqueeze", "expand", "transpose", "contiguous", "clone",
                           "detach", "to", "long", "int", "type", "getitem"})


class Run(NamedTuple):
    """A compiled graph: the callable, the inputs that fusions added to it, and what the compiler assumed about sizes."""

    call: Callable[..., Any]
    fused: FusedInputs
    assumed: Assumptions


@dataclass
class CompiledGraph:
    """A graph compiled for one backend, cache format and set of fusions. ``small``: for at most MAX_TOKENS tokens. ``last``:
    for steps whose metadata say which tokens' logits are wanted (``passes/rewrite/last_rows.py``), those of the input number
    ``wanted``. ``run``: for all others."""

    lowered: Lowered
    selection: Selection
    run: Run
    small: Run | None = None
    last: Run | None = None
    wanted: int = 0

    @property
    def runs(self) -> list[Run]:
        return [run for run in (self.run, self.small, self.last) if run is not None]

    def __call__(self, step: Step, tokens: int | None, args: Sequence[Any]) -> Any:
        """Run in ``step`` with the inputs of the traced graph, for ``tokens`` tokens (None: unknown)."""
        lowered, wanted = self.lowered, step.metadata.logits_indices_padded
        ensure_planned(step, lowered.target.backend, list(lowered.sites))
        step.served.update(site.layer for site in lowered.sites)
        run = self.small if self.small and tokens is not None and tokens <= MAX_TOKENS else self.run
        if self.last and wanted is not None:
            if args[self.wanted].data_ptr() != wanted.data_ptr():
                raise ValueError("a step whose metadata have logits_indices_padded runs its last layers on those tokens: give "
                                 "the model that tensor as logits_indices, or metadata without it")
            run = self.last
        with torch.no_grad():
            return run.call(*args, *run.fused.tensors, *lowered.inputs.of(step))


class TracedGraph:
    """One graph that Dynamo traced; call it with the graph's inputs.

    NOTE [Not kept alive]: Dynamo keeps what a backend returns for as long as the process lives, in the globals of the traced
    code's module. So nothing that is reachable from there may hold a model's parameters and buffers, or they would stay in
    memory after the model.

    Args:
        gm: as Dynamo gave it; never changed.  inputs: real values of its placeholders. See NOTE [Not kept alive].
        weights: made by fusions; graphs of one model share them.
        config, any_shape, row_data: see ``raise_graph``.  ahead: compiles kernels of the lowered graph in other processes.
        trace_file: where the trace is kept on disk, and what is found out about it.
        call: what Dynamo is tracing. It is traced again for steps that this graph cannot serve: ``passes/capture/retrace.py``.
    """

    def __init__(self, gm: fx.GraphModule, inputs: Sequence[Any], options: QuireOptions, weights: FusedWeights, *,
                 config: Any = None, any_shape: bool = False, ahead: CompileAhead | None = None,
                 row_data: str | None = None, call: TracedCall | None = None, trace_file: Path | None = None) -> None:
        self.gm, self.options, self.weights = gm, options, weights
        self.config, self.any_shape, self.ahead, self.row_data = config, any_shape, ahead, row_data
        self.trace_file = trace_file
        self.compilations: dict[Any, CompiledGraph] = {}  # by what ``compiled`` makes them for
        note_breaks(gm)
        note_changes(gm)
        self._inputs = [weakref.ref(x) if isinstance(x, torch.Tensor) and is_module_tensor(n) else x
                        for n, x in zip(placeholders(gm.graph), inputs, strict=True)]
        self._call, self._static = call, is_static(gm)
        self._context = TracingContext.try_get()
        self._guards: list[Any] = []
        self._selected: dict[Any, Selection] = {}
        self._plain: Callable[..., Any] | None = None
        self._warned = self._compared = False

    def __call__(self, *args: Any) -> Any:
        """Run in the step in progress, or outside any as traced."""
        step = current_step()
        if step is not None:
            return self.run_paged(step, *args)
        if self._plain is None and self.options.compiler == "eager":
            self._plain = self.gm.forward
        elif self._plain is None:
            # Its own guards: this may be long after tracing. Sizes that were found to vary are not made constants again.
            varies = any(isinstance(x, torch.SymInt) for x in self.inputs)
            self._plain = torch.compile(written(copy_graph(self.gm)), backend="inductor", dynamic=True if varies else None)
        return self._plain(*args)

    def run_paged(self, step: Step, *args: Any) -> Any:
        if self._other is not None:
            graph, adapter = self._other
            check_step(step, adapter.num_tokens(args))
            if not self._compared:
                whole = AnyLength(self.gm, graph.gm, graph._query.shape[2], None)  # without the padding of one token
                whole.compare(self.gm, graph.gm, args)
                self._compared = True
            return adapter.outputs(graph.run_paged(adapter.step(step), *adapter.inputs(args)))
        compiled = self.compiled(step)
        tokens = self.num_tokens(args)
        if tokens is not None:
            check_step(step, tokens)
        check_longest(self.raised, step)
        self.raised.meta["quire_stored_masks"].check(args)
        args = self.with_positions(step, args)
        if step.by_hand and self.length_limits:
            check_lengths(step, self.length_limits)
        if not all(run.fused.hold(args) for run in compiled.runs):
            if not self._warned:
                self._warned = True
                logger.warning("parameters are not those that were fused (replaced, or another module's): running unfused")
            compiled = self.compiled(step, fusions=False)
        return compiled(step, tokens, args)

    def with_positions(self, step: Step, args: Sequence[Any]) -> tuple[Any, ...]:
        """The inputs of the raised graph, from those of the traced one: also positions, for a model that is given none."""
        return (*args, positions_of(step)) if self.adds_positions else tuple(args)

    @functools.cached_property
    def adds_positions(self) -> bool:
        """Whether the model is given no positions, and its raised graph takes them. Raises UnsupportedAttention."""
        return adds_positions(self.raised)

    @property
    def static(self) -> bool:
        """Whether this graph is for rows of one length, so that steps run another."""
        return self._static and self._call is not None and self._call.tokens is not None

    def prepare(self, step: Step) -> None:
        """Compile for ``step`` while Dynamo traces, so that errors are errors of the compilation; not where another graph will
        run, which is traced at the first call. Raises UnsupportedAttention."""
        if self.static:
            return
        try:
            self.compiled(step)
        except UnsupportedAttention:
            if self._call is None or self._call.tokens is None or self._call.model is None:
                raise

    @functools.cached_property
    def _other(self) -> tuple[TracedGraph, AnyLength] | None:
        """The graph that steps run in the place of this one: if this is for one length of rows, or its attention cannot be
        raised but is behind transformers' interface. Raises UnsupportedAttention."""
        call = self._call
        if call is None or call.tokens is None:
            return None
        check_whole(self.gm.graph)
        graph = self._traced_again() if self.static else self
        try:
            _ = graph.raised
        except UnsupportedAttention:
            if call.model is None:
                raise
            graph = self._traced_again(call.model)
        if graph is self:
            return None
        return graph, AnyLength(self.gm, graph.gm, graph._query.shape[2], call.tokens if self._static else None)

    def _traced_again(self, model: torch.nn.Module | None = None) -> TracedGraph:
        """For rows of any length. ``model``: by the attention interface of this transformers model."""
        call, found = self._call, list[TracedGraph]()
        assert call is not None
        config = self.config
        if model is not None:
            config = model.config
            check_config(config)
            check_model(model)
            beside = functions_beside(model)
            check_code(model, beside)
            check_masks(model, beside)
        call.trace(lambda gm, inputs: found.append(
            TracedGraph(gm, inputs, self.options, self.weights, config=config, any_shape=True)), model)
        if not found:
            raise UnsupportedAttention(f"{call.code.co_name} could not be traced for rows of any length; give steps at "
                                       "least 2 tokens (metadata.padded), or use quire.Engine")
        if model is not None:
            check_callers(found[0].gm.graph)
            check_mask_makers(found[0].gm.graph, names_around(found[0].gm.graph))
        return found[0]

    @property
    def inputs(self) -> list[Any]:
        """Real values of the placeholders; None for freed parameters and buffers."""
        return [x() if isinstance(x, weakref.ref) else x for x in self._inputs]

    @functools.cached_property
    def _raised(self) -> tuple[fx.GraphModule, list[AttentionSite]]:
        check_changes(self.gm)
        check_whole(self.gm.graph)
        prove = each_time if self.trace_file is None else proving_once(self.trace_file)
        return raise_graph(self.gm, self.inputs, self.config, self.any_shape, row_data=self.row_data,
                           max_length=self.options.max_model_len, prove=prove)

    @property
    def raised(self) -> fx.GraphModule:
        """The graph in which every attention call is the semantic op; copy it before rewriting. Raises UnsupportedAttention."""
        return self._raised[0]

    @property
    def sites(self) -> list[AttentionSite]:
        """The attention sites in graph order. Raises UnsupportedAttention."""
        return self._raised[1]

    @property
    def length_limits(self) -> tuple[int, ...]:
        """Lengths beyond which a sequence has other rotary frequencies, so that all its keys must be computed again."""
        return self.raised.meta.get(LIMITS, ())

    @property
    def rows_by_ids(self) -> list[int]:
        """The rows of each table in which token ids are looked up as they are. Raises UnsupportedAttention."""
        return _rows_by(next((n for n in placeholders(self.raised.graph) if last_key(n) == "input_ids"), None))

    @functools.cached_property
    def _query(self) -> torch.Tensor:
        """The fake query (B, H, S, D) of the first attention site; S is the size of the token dimension in the trace."""
        return value(site_nodes(self.raised.graph)[0].args[0])

    def num_tokens(self, args: Sequence[Any]) -> int | None:
        """Tokens of a call with ``args``, from the first input of the ragged row; None if no input shows it."""
        return None if self._row is None else args[self._row].shape[0] * args[self._row].shape[1]

    @functools.cached_property
    def _row(self) -> int | None:
        shape = str(torch.Size((self._query.shape[0], self._query.shape[2])))
        return next((i for i, x in enumerate(map(value, placeholders(self.gm.graph))) if isinstance(x, torch.Tensor)
                     and not x.is_floating_point() and str(x.shape) == shape), None)

    def compiled(self, step: Step | None = None, fusions: bool = True) -> CompiledGraph:
        """The graph compiled for ``step``, or without one for the options. ``fusions`` False: for parameters that are not the
        fused ones. Raises UnsupportedAttention if no backend, or not the chosen one, can serve it, ValueError if the options
        and the step's cache differ."""
        target, selection = self._target(step)
        key = (*replace(target, kv_dtype=target.kv_dtype or self.sites[0].dtype).key, fusions)
        if key not in self.compilations:  # by the backend's name: "auto" and that name share a compilation
            self.compilations[key] = self._compile(target, selection, self.options.fusions if fusions else "none")
        return self.compilations[key]

    def _target(self, step: Step | None) -> tuple[LoweringTarget, Selection]:
        options = self.options
        attention: Any = options.attention
        page_size, kv_dtype, layout = options.page_size, options.kv_cache_dtype, options.layout or "NHD"
        fixed = bool(options.fixed_kv_scale)
        if step is not None:
            if step.attention != "auto":
                attention = step.attention
            page_size, kv_dtype, layout = step.cache.page_size, step.cache.dtype, step.cache.layout
            fixed = step.cache.fixed_scale
            for option, given, found in (("page_size", options.page_size, page_size), ("layout", options.layout, layout),
                                         ("kv_cache_dtype", options.kv_cache_dtype, kv_dtype),
                                         ("fixed_kv_scale", options.fixed_kv_scale, fixed)):
                if given is not None and given != found:
                    raise ValueError(f"the model is compiled with {option}={given}, and the step's cache has {found}; leave "
                                     "the option out, or make a cache that goes with it")
        assert page_size is not None
        sites = self.sites if step is None else self._sites_in(step)
        latent, shared = _latent_and_shared(sites)
        key = (attention.name if isinstance(attention, AttentionBackend) else attention, page_size, kv_dtype, fixed, layout,
               latent, shared)
        if key not in self._selected:
            select = select_latent_or_dense if step is None else select_backend
            self._selected[key] = select(attention, sites, device=self._query.device, page_size=page_size, kv_dtype=kv_dtype,
                                         layout=layout, fixed_scale=fixed)
            if shared and step is None and self._selected[key].backend.every_step:  # what it keeps is of one layer
                self._selected[key] = replace(self._selected[key], sites=tuple(map(_unshared, self._selected[key].sites)))
        selection = self._selected[key]
        latent, shared = _latent_and_shared(selection.sites)
        if shared and selection.backend.every_step:
            raise ValueError(f"attention={selection.backend.name!r} keeps data about the keys of each layer, and layers of the "
                             "step's cache have theirs in common; use quire.Engine")
        backend = selection.backend
        tables = options.window_tables and (backend.plan is None or backend.plans_windows)
        return LoweringTarget(backend, page_size, kv_dtype, layout, latent, tables, shared, fixed), selection

    def _sites_in(self, step: Step) -> list[AttentionSite]:
        """The sites as the step's cache holds them: latent or not, keys and values in common or not. Raises ValueError."""
        latent = any(step.cache.is_latent(s.layer) for s in self.sites)
        sites = self.sites if latent else [s.dense for s in self.sites]
        for site in sites:
            if step.cache.is_latent(site.layer) != (site.latent is not None):
                kind = "latent" if site.latent is None else "not latent"
                raise ValueError(f"layer {site.layer} of the step's cache is {kind}, and "
                                 f"the model's needs {site.needs()}; make the cache with PagedKVCache.for_model")
            step.cache.check(site)
        sources, layers = step.cache.kv_sources, {s.layer for s in sites}
        for site in sites:
            source = sources.get(site.layer)
            if source in layers and source != site.kv_source:
                raise ValueError(f"layer {site.layer} of the step's cache has the keys and values of layer {source}, and the "
                                 f"model's needs {site.needs()}; make the cache with PagedKVCache.for_model")
        shared = all(s.layer in sources for s in sites if s.kv_source is not None)
        return sites if shared else list(map(_unshared, sites))

    def lowered(self, target: LoweringTarget, fusions: str | Sequence[str], small: bool = False, last_rows: bool = False
                ) -> tuple[Lowered, FusedInputs]:
        """Lowered and fused, not compiled. ``small``, ``last_rows``: see ``lower_graph``."""
        return lower_graph(self.raised, self.inputs, target, fusions, self.weights, small, last_rows, self.row_data)

    def _compile(self, target: LoweringTarget, selection: Selection, fusions: str | Sequence[str]) -> CompiledGraph:
        device = self._query.device
        if self.ahead is not None and target.backend.begin_warm_up is not None:
            target.backend.begin_warm_up(selection.sites, device, build_seconds())
        last = self._last_rows(target, fusions) if self.options.kv_sharing_fast_prefill else None
        whole = self.lowered(target, fusions)
        small = self.lowered(target, fusions, small=True) if has_small_passes(fusions) else None
        if small is not None and self.ahead is not None:
            self.ahead.start_tuning(self.weights.small_linears, device)

        def compiled(graph: tuple[Lowered, FusedInputs], fits: Callable[[StepShape], bool]) -> Run:
            call, assumed = compile_graph(graph[0], self.options.compiler, self._context, self._guards, self.ahead, fits)
            return Run(call, graph[1], assumed)

        made = CompiledGraph(whole[0], selection, compiled(whole, lambda shape: small is None or shape.tokens > MAX_TOKENS))
        if small is not None:
            made.small = compiled(small, lambda shape: shape.tokens <= MAX_TOKENS)
        if last is not None:
            made.last = compiled(last, lambda shape: shape.tokens > shape.rows)
            made.wanted = placeholders(last[0].gm.graph).index(last[0].gm.meta[LAST_ROWS].index)
        return made

    def _last_rows(self, target: LoweringTarget, fusions: str | Sequence[str]) -> tuple[Lowered, FusedInputs]:
        """The graph for steps whose metadata say which logits are wanted. Raises UnsupportedAttention."""
        backend = target.backend
        if not backend.any_batch:
            can = [name for name, b in all_backends().items() if b.any_batch and b.available(self._query.device) is None]
            raise UnsupportedAttention(
                f"kv_sharing_fast_prefill=True: attention={backend.name!r} plans or reads a step as a whole, and some layers "
                f"would run on a part of it. Backends that can, here: {', '.join(can) or 'none'}; or leave the option out")
        return self.lowered(target, fusions, last_rows=True)

    def drop(self) -> None:
        """Forget what was compiled, and the weights that fusions made."""
        if self.__dict__.get("_other"):  # kept: another model of the class may run these graphs
            self._other[0].drop()  # type: ignore[index]
        self.compilations.clear()
        self.weights.drop()

    def restore(self) -> None:
        """Forget what was compiled, and give the model's parameters memory of their own again."""
        self.compilations.clear()  # first, so that the fused weights are freed one by one
        self.weights.restore()


def _latent_and_shared(sites: Sequence[AttentionSite]) -> tuple[bool, bool]:
    """Whether layers are on latent vectors, and whether any attends to another's keys and values."""
    return any(s.latent is not None for s in sites), any(s.kv_source is not None for s in sites)


def _unshared(site: AttentionSite) -> AttentionSite:
    return replace(site, kv_source=None)


def _rows_by(ids: fx.Node | None) -> list[int]:
    found, same = list[int](), [] if ids is None else [ids]
    for node in same:
        for user in node.users:
            name, first = target_name(user), user.args[0] if user.args else None
            others = [x for x in user.all_input_nodes if x is not node and isinstance(value(x), torch.Tensor)]
            if name in _SAME_NUMBERS and first is node:
                same += [user] if user not in same else []
            elif len(others) == 1 and (name == "embedding" or (first is others[0] and (
                    (name == "getitem" and (user.args[1] is node or user.args[1] == (node,)))
                    or (name == "index_select" and user.args[1] == 0)))):
                found.append(int(value(others[0]).shape[0]))
    return found
