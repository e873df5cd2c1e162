"""The passes in their order, from the graph that Dynamo traced to a callable for paged steps. ``TracedGraph`` runs them.

1. ``raise_graph``: attention calls become the semantic op, and the model is verified.
2. ``select_backend`` (``attn_ops/selection.py``), with the attention sites found.
3. ``lower_graph``: fusions, lowering to the ops of the backend, fusions of the lowered graph.
4. ``compile_graph``: Inductor, or the graph as it is.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._guards import TracingContext, tracing

from quire.attn_ops.attention import AttentionSite
from quire.attn_ops.backend import UnsupportedAttention
from quire.attn_ops.step import Step
from quire.passes.compile.ahead import CompileAhead, StepShape
from quire.passes.compile.inductor import compile_lowered
from quire.passes.compile.size_guards import Assumptions, checked, forget_bounds, watched
from quire.passes.fusions.base import FusedInputs, FusedWeights
from quire.passes.fusions.registry import apply_fusions, apply_lowered_fusions
from quire.passes.fx import (
    LONGEST,
    copy_graph,
    erase_dead,
    inline_checkpoints,
    longest_shown,
    placeholders,
    shape_conditions,
    source_name,
    value,
)
from quire.passes.rewrite.device_numbers import numbers_on_device
from quire.passes.rewrite.last_alone import take_wanted_rows
from quire.passes.rewrite.last_rows import keep_last_rows
from quire.passes.rewrite.length_rope import choose_per_sequence, use_short_frequencies
from quire.passes.rewrite.lower import ADDED_INPUTS, Lowered, LoweringTarget, lower
from quire.passes.rewrite.own_positions import TABLES, given_tables, use_given_positions
from quire.passes.rewrite.raise_mla import raise_mla, with_latents
from quire.passes.rewrite.raise_sdpa import raise_sdpa
from quire.passes.start_times import timed
from quire.passes.verify.breaks import check_names
from quire.passes.verify.quantized import check_rows
from quire.passes.verify.shared_kv import KV_SOURCES, shared_layers, with_sources
from quire.passes.verify.sites import check_positions, site_nodes, site_of, verify
from quire.passes.verify.tokens import check_tokens

#: Runs the proof of a graph, or does not where it is known to be passed.
Prove = Callable[[fx.Graph, Callable[[], object]], None]


def each_time(graph: fx.Graph, run: Callable[[], object]) -> None:
    run()


def raise_graph(traced: fx.GraphModule, inputs: Sequence[Any], config: Any, any_shape: bool, *, row_data: str | None = None,
                max_length: int | None = None, prove: Prove = each_time) -> tuple[fx.GraphModule, list[AttentionSite]]:
    """A copy of ``traced`` in which every attention call is the semantic op, and its attention sites. Raises
    UnsupportedAttention if the model cannot be served.

    Args:
        inputs: real values of the placeholders.  config: of a transformers model, to verify against; None for any other module.
        any_shape: the graph will run for batches of any shape, whatever Dynamo's guards were.
        row_data: source of the inputs that hold a number for each row whose logits are asked for, and pick no rows.
        max_length: no sequence will be longer; None: unknown, and ``check_longest`` checks every step.
        prove: runs the proof that tokens meet in attention only.
    """
    gm = copy_graph(traced)
    inline_checkpoints(gm)
    check_names(gm.graph)
    for node in gm.graph.find_nodes(op="call_function", target=torch._C._set_grad_enabled):
        gm.graph.erase_node(node)  # steps have no gradients, and leaving a no_grad of the model would turn them on
    real = dict(zip(placeholders(gm.graph), inputs, strict=True))
    emitted = len(site_nodes(gm.graph))

    erase_dead(gm.graph, list(gm.graph.nodes))  # a mean of attention weights that nobody reads, say
    raised, refusals = raise_sdpa(gm, {node.name: x for node, x in real.items()})
    erase_dead(gm.graph, list(gm.graph.nodes))
    sites = [site_of(node) for node in site_nodes(gm.graph)]
    if emitted and len(sites) > emitted:
        raise UnsupportedAttention(
            f"{emitted} attention sites came through transformers' attention interface and {len(sites) - emitted} as "
            "F.scaled_dot_product_attention; quire does not mix the two in one model")
    verify(gm.graph, sites, config, refusals)
    tokens = value(site_nodes(gm.graph)[0].args[0]).shape[2]
    for node, site in zip(site_nodes(gm.graph), sites, strict=True):
        shape = tuple(value(node.args[0]).shape)
        if any_shape and str(shape[0]) != "1":
            raise UnsupportedAttention(f"attention site {site.layer} ({site.name}) calls attention with queries of shape "
                                       f"{shape} for one row of tokens; need (1, H, S, D)")
        for x in map(value, node.args[1:3]):
            if str(x.shape[0]) != str(shape[0]):
                raise UnsupportedAttention(f"attention site {site.layer} ({site.name}) calls attention with keys or values of "
                                           f"shape {tuple(x.shape)} for queries of shape {shape}; need one batch for all")
    use_given_positions(gm, tokens, config is not None)
    take_wanted_rows(gm, tokens)
    if config is not None and max_length is not None:
        use_short_frequencies(gm, config, max_length)
    choose_per_sequence(gm, tokens)
    check_positions(gm.graph, tokens, config is not None)
    prove(gm.graph, lambda: check_tokens(gm.graph, tokens, _row_data(gm, row_data)))
    check_rows(gm.graph, real)
    gm.meta[KV_SOURCES], gm.meta[ADDED_INPUTS] = shared_layers(gm.graph), {}
    _check_lengths(gm, tokens, raised > 0, max_length)
    if any_shape:  # else Dynamo has yet to make guards of the bounds
        forget_bounds(tokens)
    return gm, with_sources(gm, with_latents(gm, sites))


def lower_graph(raised: fx.GraphModule, inputs: Sequence[Any], target: LoweringTarget, fusions: str | Sequence[str],
                weights: FusedWeights, small: bool = False, last_rows: bool = False, row_data: str | None = None
                ) -> tuple[Lowered, FusedInputs]:
    """A copy of ``raised``, fused and lowered. ``small``: for steps of at most MAX_TOKENS tokens. ``last_rows``: layers that
    share keys and values run on the wanted tokens alone (``passes/rewrite/last_rows.py``); raises UnsupportedAttention if the
    graph is not proved to allow it. ``row_data``: as for ``raise_graph``."""
    gm = copy_graph(raised)
    numbers_on_device(gm)
    if last_rows:
        keep_last_rows(gm, _row_data(gm, row_data))
    if target.latent:
        raise_mla(gm)  # before fusions, which may change what becomes of kv_b
    fused = apply_fusions(gm, inputs, fusions, weights, small)
    lowered = lower(gm, target)
    apply_lowered_fusions(lowered, fusions, small)
    return lowered, fused


def _row_data(gm: fx.GraphModule, source: str | None) -> list[fx.Node]:
    return [n for n in placeholders(gm.graph) if source and source_name(n).startswith(source)]


def compile_graph(lowered: Lowered, compiler: str, context: TracingContext | None, earlier: list[Any],
                  ahead: CompileAhead | None = None, fits: Callable[[StepShape], bool] = lambda shape: True
                  ) -> tuple[Callable[..., Any], Assumptions]:
    """``lowered`` as a callable, and what the compiler assumed about sizes, which the callable checks. ``context``: Dynamo's
    when it traced the graph. ``earlier``: see ``watched``. ``ahead`` compiles kernels for steps that ``fits`` accepts."""
    # Of fakes: fused parameters have moved since tracing. A size that the trace has settled is behind a guard of Dynamo's.
    inputs = [value(n) for n in placeholders(lowered.gm.graph)]
    dynamic = [size for x in inputs if isinstance(x, torch.Tensor) for size in x.shape
               if isinstance(size, torch.SymInt) and not _settled(size)]
    active = context is None or TracingContext.try_get() is context  # as inside a backend's call
    within: Any = contextlib.nullcontext() if active else tracing(context)
    with torch.no_grad(), within, watched(lowered.gm.graph, earlier) as assumed, timed("compile"):
        look = None if ahead is None else functools.partial(ahead.start, roles=assumed.roles, fits=fits)
        run = compile_lowered(lowered, compiler, look)
    for size in dynamic:  # as code of tensor subclasses or custom ops may: no guard would notice another size
        if _settled(size):
            raise UnsupportedAttention(
                f"compiling the model settled a size that changes from batch to batch (at {size}): an operation in "
                "it, such as a quantized layer, depends on the number of tokens. compiler='eager' runs it as it is.")
    return checked(run, assumed), assumed


def _check_lengths(gm: fx.GraphModule, tokens: Any, raised: bool, max_length: int | None) -> None:
    """Refuse a trace that does not show what the model computes for sequences of up to ``max_length`` tokens: of a path that
    it takes for some numbers of tokens only, or of a stored mask or table that ends before. If none is given, note how far it
    does."""
    conditions = shape_conditions(tokens, longest=max_length)
    if (last := gm.meta["quire_mask_length"]) is not None and (max_length is None or last < max_length):
        conditions[f"its stored mask has {last} positions"] = last + 1
    tables = gm.meta.get(TABLES, {})
    if max_length is not None:  # of steps by hand the caller chooses positions
        tables = {**given_tables(gm.graph, tokens), **tables}
    for where, rows in tables.items():
        if max_length is None or rows < max_length:
            conditions[f"its table of positions at {where} has {rows} rows"] = rows + 1
    longest = min(conditions.values(), default=0) - 1
    if conditions and (max_length is not None or longest < 2):
        raise UnsupportedAttention(
            f"the model takes a path of its own, or cannot run, for some numbers of tokens ({', '.join(conditions)}), so one "
            "trace does not show what it computes for others; " + ("" if longest < 2 else f"set max_model_len={longest}, or ")
            + "let its forward not depend on the length of its input.")
    if conditions:
        gm.meta[LONGEST] = longest, ", ".join(conditions)
    if raised and isinstance(tokens, int):
        raise UnsupportedAttention(
            f"the graph was traced for exactly {tokens} tokens, too few to tell what its masks mean for longer "
            "sequences; compile with dynamic=True and give at least 2 tokens")


def check_longest(raised: fx.GraphModule, step: Step) -> None:
    """Raises UnsupportedAttention for a step with a sequence longer than those for which the graph is the model's path."""
    longest, conditions = longest_shown(raised) or (None, "")
    if longest is not None and step.metadata.max_seq_len > longest:
        raise UnsupportedAttention(
            f"the model takes a path of its own, or cannot run, for some numbers of tokens ({conditions}), so this trace shows "
            f"what it computes for sequences of at most {longest} tokens, and the step has one of {step.metadata.max_seq_len}; "
            "make shorter sequences, or let its forward not depend on the length of its input.")


def _settled(size: Any) -> bool:
    return size.node.shape_env.replace(size.node.expr).is_number
