"""A whole model traced once, so that an engine can run it on ragged batches of any shape.

``PagedModel`` picks the route (attention interface or raised F.sdpa), traces with Dynamo, verifies and, with a page size,
compiles. The interfaces of attention and experts are switched over only while tracing.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._guards import tracing
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils._python_dispatch import _disable_current_modes

from quire.attn_ops.attention import AttentionSite
from quire.attn_ops.backend import UnsupportedAttention
from quire.attn_ops.kv_cache import PagedKVCache, register_site_finder
from quire.attn_ops.ops.sampling import sample_tokens
from quire.attn_ops.registry import get_backend
from quire.attn_ops.selection import Selection, select_latent_or_dense
from quire.attn_ops.step import Step, current_step, running
from quire.passes.capture import four_bit
from quire.passes.capture.arguments import Arguments, wrapped
from quire.passes.capture.errors import is_first_read, unwrapped, without_warnings_once
from quire.passes.capture.evaluating import ChangedWhileTraced, evaluating, without_backward
from quire.passes.capture.gradients import may_ask_unseen
from quire.passes.capture.hf_experts import experts_active
from quire.passes.capture.hf_interface import interface_active, uses_interface
from quire.passes.capture.in_float32 import InFloat32
from quire.passes.capture.kept_trace import TraceFile
from quire.passes.capture.lora import LoraPlaces, adapter_layers, adapters_per_token
from quire.passes.capture.own_attention import check_callers, check_code, check_mask_makers
from quire.passes.capture.own_masks import ChosenByUser, check_masks
from quire.passes.capture.reads import Reads
from quire.passes.capture.results import check_first, check_rows, logits_of, vocabulary
from quire.passes.capture.retrace import Traced, traced_on_many_or_few
from quire.passes.capture.side_effects import check_side_effects
from quire.passes.capture.traced import TracedGraph
from quire.passes.capture.unserved_adapters import check_adapters_served
from quire.passes.capture.wrapped_parts import check_wrapped_parts
from quire.passes.compile.ahead import CompileAhead
from quire.passes.fusions.base import FusedWeights
from quire.passes.fx import is_stored, placeholders, source_name, value, with_own_code
from quire.passes.options import QuireOptions
from quire.passes.rewrite.adapted_matrices import multiply_adapted_matrices
from quire.passes.rewrite.last_alone import LAST_ALONE, rows_of_last
from quire.passes.rewrite.own_positions import check_uncompiled
from quire.passes.start_times import timed
from quire.passes.verify.quantized import check_layers
from quire.passes.verify.sites import check_checkpoint, check_config, check_logits, check_model, transformers_config

logger = logging.getLogger(__name__)
_REQS = 7  # rows of the traced batch: not 0, 1 or its tokens, which Dynamo would make constants or the same symbol


class PagedModel:
    """A causal LM traced for paged steps: call it inside a step with (T,) token ids and positions.

    Args:
        model: a transformers causal LM, or any module whose forward can do with token ids (1, T) and maybe ``position_ids``
            (1, T) (``arguments.py``), and returns logits (1, T, V), or (1, 1, V) of the last token
            (``passes/rewrite/last_alone.py``), as a tensor, as ``.logits``, or first in a tuple (``results.py``).
        options: with ``page_size`` set the graph is compiled here, else at the first step.
        draws: the graph also draws the tokens of rows with a temperature (``attn_ops/ops/sampling.py``).
        ahead: starts on the kernels of the graph while it is compiled; the caller waits for it.
        adapters: of PEFT's LoRA, of which each token has its own (``passes/capture/lora.py``); None: the active ones, for all.
        places: for adapters that the model may get, after those of ``adapters``.
        as_it_is: modules in training mode are traced in it, as they will run.

    Raises:
        UnsupportedAttention: the model cannot be served; the message names the site and the reason.
        ValueError: an unknown backend in ``options``.
    """

    def __init__(self, model: torch.nn.Module, options: QuireOptions | None = None, *, draws: bool = False,
                 ahead: CompileAhead | None = None, adapters: Sequence[str] | None = None,
                 places: LoraPlaces | None = None, as_it_is: bool = False) -> None:
        self.adapters, self.places, self.options = adapters, places, options or QuireOptions()
        if self.options.attention != "auto":
            get_backend(self.options.attention)  # here, and not inside Dynamo
        self.model, self.config, self.draws, self.weights = model, transformers_config(model), draws, FusedWeights()
        if self.config is not None:
            check_config(self.config)
            check_checkpoint(model)
        for check in (check_model, check_adapters_served, check_wrapped_parts, check_layers):
            check(model)
        self._ids_name, self.takes_positions, self._keep_name, self._use_cache = Arguments.of(model, self.config is not None)
        self._vocabulary = vocabulary(model)
        self.reads = Reads()  # what the trace read
        self.stand_ins: Mapping[int, torch.Tensor] = {}  # tensors to use in the places of the model's own, by their ids
        self._chosen = ""  # why the model is not traced by transformers' attention interface, if its own code is why
        self._call = model  # under this name, which fx.module_path drops from the paths of modules
        self._ahead, self._closed, self.last_alone = ahead, False, False
        self._mode: InFloat32 | None = None
        self._graph: TracedGraph | None = None
        self._disk: TraceFile | None = None  # while it is traced
        self._read_call: Callable[[Mapping[str, Any]], tuple[Any, ...]] | None = None  # of a graph from the disk
        try:
            with timed("trace"), contextlib.nullcontext() if as_it_is else evaluating(model):
                self._compiled = self._traced_by_interface() or self._trace(False)
        except BaseException as error:
            self.close()
            if isinstance(error, UnsupportedAttention) and self.config is None and (hint := wrapped(model)):
                raise UnsupportedAttention(str(error).rstrip(".") + hint) from error
            if isinstance(error, UnsupportedAttention) and self._chosen:
                raise UnsupportedAttention(f"{error}\nIt was traced with the attention that it has: {self._chosen}") from error
            raise

    def _traced_by_interface(self) -> Any:
        """None: the model's attention does not go through transformers' interface, or not by transformers' choice alone."""
        if self.config is None or not uses_interface(self.model):
            return None
        try:
            check_code(self.model, {})
            check_masks(self.model, {})
            return self._trace(True)
        except ChosenByUser as error:
            logger.info("%s; traced with the functions that it has", error)
            self._chosen = str(error)
            self._forget()

    def _forget(self) -> None:
        """What was traced."""
        if self._graph is not None:  # fusions may have moved parameters
            self._graph.restore()
        self._graph, self.reads = None, Reads()

    def _trace(self, by_interface: bool) -> Any:
        return traced_on_many_or_few(functools.partial(self._trace_on, by_interface), self._forget, self.options.max_model_len)

    def _trace_on(self, by_interface: bool, tokens: int) -> Any:
        self.by_interface, device = by_interface, next(self.model.parameters()).device
        # Guards are dropped: one graph serves every batch shape. ``raise_graph`` refuses a trace whose guards mattered.
        forward, found = types.MethodType(with_own_code(type(self)._forward), self), weakref.ref(self)
        scope = forward.__func__.__globals__

        def drop(guards: Sequence[Any]) -> list[bool]:
            if (traced := found()) is not None:
                traced.reads.add(guards, traced, scope)
                if traced._disk is not None:
                    traced._disk.note_guards(guards, traced, scope)
            return [False] * len(guards)

        ids, positions = torch.zeros(1, tokens, dtype=torch.int64, device=device), torch.arange(tokens, device=device)[None]
        keep = torch.arange(_REQS, device=device)
        sampling = self._all_greedy(keep)
        for tensor, dim in ((ids, 1), (positions, 1), *((each, 0) for each in (keep, *sampling))):
            torch._dynamo.mark_dynamic(tensor, dim)
        route = interface_active(self.model) if by_interface else contextlib.nullcontext()
        # Else Dynamo makes a symbol of every number that differs from the model traced before (its scale, its window).
        static = torch._dynamo.config.patch(automatic_dynamic_shapes=False)
        if four_bit.layers(self.model):
            self._settle(ids[0], positions[0])
        adapters = adapters_per_token(self.model, self.adapters, self.places)
        call = {"input_ids": ids, "position_ids": positions, "logits_indices": keep, "sampling": sampling}
        with (route, experts_active(self.model), adapters as self._kept, static, torch.no_grad(),
              without_backward(self.model), without_warnings_once()):
            if not self.adapters and self.places is None:
                self._disk = TraceFile.of(self.model, call, by_interface, len(sampling))
            taken = self._take(scope)
            compiled = self._run_kept if taken else torch.compile(
                forward, backend=_weakly(self._capture), fullgraph=True, options={"guard_filter_fn": drop})
            try:
                with contextlib.suppress(Traced):
                    try:
                        if not taken:
                            compiled(ids, positions, keep, *sampling)
                    except Exception as error:
                        if not is_first_read(error):
                            raise
                        self.by_itself(ids[0], positions[0])  # the first call
                        compiled(ids, positions, keep, *sampling)
            except Exception as error:
                raise unwrapped(error, self.model, lambda: self.by_itself(ids[0], positions[0])) from error
            if by_interface:
                if not taken:  # a graph from the disk was checked before it was written, and has no stacks
                    check_callers(self.graph.gm.graph)
                    check_mask_makers(self.graph.gm.graph, {getattr(f, "__name__", "") for f in self.reads.values().values()})
                check_code(None, self.reads.values())
                check_masks(self.model, self.reads.values())
            self.last_alone = LAST_ALONE in self.graph.raised.meta  # verified here, not at the first step
            check_logits(self.model, self.num_logits)
            if self._disk is not None and not taken and not self._disk.write(self.graph.gm, scope, self.reads.stored()):
                self.graph.trace_file = None
            self._disk = None
        return compiled

    def _take(self, scope: Mapping[str, Any]) -> bool:
        """Take the graph of the model from the disk, if it is there and good."""
        found = None if self._disk is None else self._disk.take(self, scope)
        if found is None:
            return False
        try:
            self.reads.restore(found.reads, self, found.scope)
            with tracing(found.context):
                self._keep(found.gm, found.inputs)
                _ = self.sites
        except Exception:
            logger.warning("the trace that is kept on disk cannot be used; the model is traced", exc_info=True)
            self._forget()
            return False
        self._read_call = found.read
        return True

    def _run_kept(self, input_ids: torch.Tensor, position_ids: torch.Tensor, logits_indices: torch.Tensor,
                  *sampling: torch.Tensor) -> Any:
        """Stands for the traced ``_forward``, with a graph from the disk."""
        assert self._read_call is not None
        return self._run(*self._read_call({"self": self, "input_ids": input_ids, "position_ids": position_ids,
                                           "logits_indices": logits_indices, "sampling": sampling}))

    def _forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor, logits_indices: torch.Tensor,
                 *sampling: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if not torch.compiler.is_compiling():  # the model's own code would run, without the cache
            raise UnsupportedAttention(
                "torch.compile is switched off here (torch.compiler.set_stance('force_eager'), TORCH_COMPILE_DISABLE, a "
                "TorchDispatchMode that is active), and quire runs models that it traces; switch it on")
        if self.places is not None:  # under this name the trace reads them at each call, and not by a layer's forward
            _ = self.places.count
        options = self.given(input_ids, position_ids)
        if self._keep_name is not None:
            options[self._keep_name] = logits_indices
        out = self._call(**options)
        check_first(out, self._vocabulary)
        out = logits_of(out)
        check_rows(out)
        # Some models take logits_to_keep and ignore it.
        kept = self._keep_name is not None and not statically_known_true(out.shape[1] == input_ids.shape[1])
        alone = statically_known_true(out.shape[1] == 1)
        logits = rows_of_last(out, logits_indices) if alone else out[0] if kept else out[0][logits_indices]
        # Tokens are chosen here, inside the compiled graph; -1 where logits are NaN, or all -inf.
        if sampling:
            return logits, sample_tokens(logits, *sampling)
        highest, token = logits.max(dim=-1)
        return logits, torch.where(highest > float("-inf"), token, -1)  # false for NaN, too

    def _capture(self, gm: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
        """The Dynamo backend: keeps the one graph of the model."""
        if self._graph is not None:  # a second trace, maybe in another state of the model
            raise RuntimeError("the trace of this model is gone (torch._dynamo.reset() drops all of them): close the engine "
                               "and make a new one")
        held, self.reads.gradients = check_side_effects(), may_ask_unseen(gm)
        multiply_adapted_matrices(gm)
        if self._disk is not None:
            self._disk.note_graph(gm, held)
        self._keep(gm, inputs)
        return _weakly(self._run)

    def _keep(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> None:
        self._graph = TracedGraph(gm, inputs, self.options, self.weights, config=self.config, any_shape=True,
                                  ahead=self._ahead, row_data="L['sampling']",
                                  trace_file=None if self._disk is None else self._disk.path)
        # For owners that never call ``close``. Not at exit: no model is saved after it.
        weakref.finalize(self, _restore, self._graph).atexit = False
        if self.options.page_size is not None:  # compiled before the cache exists
            self._graph.compiled()

    def _run(self, *args: Any) -> Any:
        step = current_step()
        if step is None or self._graph is None:
            raise Traced
        if self.stand_ins:
            args = tuple(self.stand_ins.get(id(x), x) for x in args)
        if self._mode is not None:
            with self._mode:
                return fx.Interpreter(self._graph.raised).run(*self._graph.with_positions(step, args))
        return self._graph.run_paged(step, *args)

    @property
    def graph(self) -> TracedGraph:
        """The traced graph, and how it runs in steps."""
        assert self._graph is not None
        return self._graph

    @property
    def traced_code(self) -> types.CodeType:
        """The code object under which Dynamo keeps the trace."""
        return self._compiled._torchdynamo_orig_callable.__code__

    @property
    def traced(self) -> bool:
        """Whether the trace is still there; ``torch._dynamo.reset`` drops all of them."""
        return self._read_call is not None or bool(_debug_get_cache_entry_list(self.traced_code))

    @property
    def sites(self) -> list[AttentionSite]:
        """The attention sites, in the order of the graph."""
        return self.graph.sites

    @property
    def counts_tokens(self) -> bool:
        """Whether the model's own forward takes no positions and counts the tokens of a row, padding included."""
        return self.graph.adds_positions

    def other_tensors(self) -> list[torch.Tensor | None]:
        """Other tensors than parameters and buffers that the graph reads, as they are now; None for one that is gone, or made
        for each call, of a NumPy array say: its changes are not counted."""
        found = [self.reads.now(source_name(node)) if is_stored(node) else None for node in self._other_inputs]
        return [x for x in found if x is None or isinstance(x, torch.Tensor)]

    @functools.cached_property
    def _other_inputs(self) -> list[fx.Node]:
        own = {id(x) for x in (*self.model.parameters(), *self.model.buffers())}  # not those of a module that only a hook holds
        return [node for node in placeholders(self.graph.gm.graph) if (
            id(self.reads.now(source_name(node))) not in own if is_stored(node)
            else isinstance(value(node), torch.Tensor) and not source_name(node).startswith("L["))]

    @property
    def num_logits(self) -> int:
        """The width V of the logits."""
        logits = self.graph.gm.graph.output_node().args[0][0]  # type: ignore[index]
        return int(value(logits).shape[-1])

    @property
    def selection(self) -> Selection:
        """The backend chosen and why others were passed over; only with options.page_size set."""
        return self.graph.compiled().selection

    def select(self, page_size: int) -> Selection:
        """The backend for pages of ``page_size`` tokens. Raises UnsupportedAttention if there is none."""
        device = next(self.model.parameters()).device
        return select_latent_or_dense(self.options.attention, self.sites, device=device, page_size=page_size)

    def check_sizes(self, num_tokens: int, num_reqs: int) -> None:
        """Raises ValueError, which gives the condition, if a compiled graph assumes smaller steps."""
        known = {"tokens": num_tokens, "rows": num_reqs}
        for assumed in (run.assumed for compiled in self.graph.compilations.values() for run in compiled.runs):
            condition = assumed.broken({symbol: known[role] for symbol, role in assumed.roles.items() if role in known})
            if condition is not None:
                raise ValueError(f"steps of up to {num_tokens} tokens and {num_reqs} rows are more than the compiled model "
                                 f"allows: it assumes {condition}. Lower max_num_batched_tokens, or use compiler='eager'")

    def __call__(self, step: Step, input_ids: torch.Tensor, positions: torch.Tensor,
                 logits_indices: torch.Tensor) -> torch.Tensor:
        """One forward in ``step``: ids and positions (T,) int64, logits_indices (B,) int64 -> logits (B, V)."""
        return self.run(step, input_ids, positions, logits_indices)[0]

    def run(self, step: Step, input_ids: torch.Tensor, positions: torch.Tensor, logits_indices: torch.Tensor,
            sampling: Sequence[torch.Tensor] | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """As a call, and also the tokens (B,) int64: argmax for greedy rows (the first if several), -1 where logits are NaN.
        ``sampling``: temperature (B,) float32, seed (B,) int64 and position (B,) int64 of the token to draw; None: all rows are
        greedy. Raises ValueError for ``sampling`` without ``draws``, RuntimeError after ``close``."""
        if sampling is not None and not self.draws:
            raise ValueError("this PagedModel was traced with draws=False: its graph takes greedy tokens only")
        if self._closed:
            raise RuntimeError("this PagedModel is closed, and the model as it was before; make a new one")
        step.positions = positions
        with running(step), torch.no_grad():
            sampling = self._all_greedy(logits_indices) if sampling is None else sampling
            return self._compiled(input_ids[None], positions[None], logits_indices, *sampling)

    def _all_greedy(self, logits_indices: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Sampling inputs of greedy rows; none for a graph that does not draw."""
        if not self.draws:
            return ()
        like = torch.zeros_like(logits_indices)
        return like.float(), like, torch.zeros_like(like)

    def given(self, input_ids: torch.Tensor, position_ids: torch.Tensor | None) -> dict[str, Any]:
        """The arguments of the model's forward, for rows of tokens and positions (1, T)."""
        options: dict[str, Any] = {self._ids_name: input_ids} | ({"use_cache": False} if self._use_cache else {})
        if self.takes_positions and position_ids is not None:
            options["position_ids"] = position_ids
        return options

    def by_itself(self, input_ids: torch.Tensor, position_ids: torch.Tensor | None, behind: int = 0) -> torch.Tensor:
        """Logits (T - behind, V) of the model's own forward of one sequence (T,), without quire: of the tokens from ``behind``
        on. A model that gives those of the last token alone is run on each beginning. Raises what its forward raises."""
        places = None if position_ids is None else position_ids[None]
        with evaluating(self.model), torch.no_grad():
            ends = range(behind + 1, len(input_ids) + 1) if self.last_alone else (len(input_ids),)
            each = [logits_of(self.model(**self.given(input_ids[None, :end], None if places is None else places[:, :end])))
                    for end in ends]
        for logits in each:
            check_rows(logits)
        return torch.cat([logits[0] for logits in each]) if self.last_alone else each[0][0][behind:]

    def _settle(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> None:
        """Let layers in 4 bits do what they do at their first call, so that the traced one changes nothing."""
        four_bit.check_version(self.model)
        packing = four_bit.Packing(self.model)
        try:
            self.by_itself(input_ids, position_ids)
        except ChangedWhileTraced:
            raise
        except Exception as error:
            raise UnsupportedAttention(f"{type(self.model).__name__}'s own forward fails before it is traced: "
                                       f"{type(error).__name__}: {error}") from error
        if packing.change() is not None and adapter_layers(self.model):
            logger.warning("bitsandbytes has packed the weights for this CPU, as at any first call in evaluation mode, and "
                           "does not give gradients through packed weights: load the model again before training it")

    def in_mode(self, mode: InFloat32, step: Step, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Logits (T, V) of ids and positions (T,) int64: the traced graph, neither lowered nor compiled, operation by operation
        in ``mode``, which knows the lengths of the sequences. Without the KV cache, so whole sequences only."""
        self._mode = mode
        try:
            return self(step, input_ids, positions, torch.arange(len(input_ids), device=input_ids.device))
        finally:
            self._mode = None

    def close(self) -> None:
        """Undo what tracing and fusion did to the model."""
        self._closed, self.places = True, None
        if self._graph is not None:
            self._graph.restore()


def _weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """The method, without keeping its object alive: Dynamo keeps backends and what they return. See NOTE [Not kept alive]."""
    found = weakref.WeakMethod(method)

    def call(*args: Any, **kwargs: Any) -> Any:
        method = found()
        assert method is not None  # the caller has the object
        return method(*args, **kwargs)

    return call


def _restore(graph: TracedGraph) -> None:
    """For the garbage collector, which may run inside a trace: no mode may see the copies."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        graph.restore()


@register_site_finder
def find_sites(model: torch.nn.Module) -> list[AttentionSite]:
    """The attention sites of ``model``, found by tracing it; nothing is compiled or computed."""
    with contextlib.closing(PagedModel(model, QuireOptions(compiler="eager"))) as paged:
        return paged.sites


def prove_uncompiled(model: torch.nn.Module) -> Reads:
    """Refuse a model that would be wrong in paged steps uncompiled, in the modes of its modules. Returns what that rests on."""
    with contextlib.closing(PagedModel(model, QuireOptions(compiler="eager"), as_it_is=True)) as paged:
        check_uncompiled(paged.graph.raised)
        return paged.reads


__all__ = ["PagedKVCache", "PagedModel", "find_sites", "prove_uncompiled"]  # with PagedKVCache ``for_model`` has its finder
