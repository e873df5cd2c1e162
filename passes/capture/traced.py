"""A graph as Dynamo traced it, and what was found out about it: its attention sites, raised and verified.

Two callers make one: ``torch.compile(backend="quire")`` of each graph that Dynamo gives it (``passes/backend.py``), and
``PagedModel`` of the one graph of a whole model (``passes/capture/paged_model.py``). The second runs it for any batch shape, whatever
Dynamo's guards said, and is refused more for it.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch._guards import TracingContext

from quire.attn_ops.attention import AttentionSite
from quire.attn_ops.backend import UnsupportedAttention
from quire.passes.fx import copy_graph, is_module_tensor, placeholders, shape_conditions, symbolic, value
from quire.passes.rewrite.own_positions import use_given_positions
from quire.passes.rewrite.raise_sdpa import raise_sdpa
from quire.passes.verify.breaks import note_breaks
from quire.passes.verify.quantized import check_rows
from quire.passes.verify.sites import check_positions, site_nodes, site_of, verify
from quire.passes.verify.tokens import check_tokens


class TracedGraph:
    """One graph that Dynamo traced.

    NOTE [Not kept alive]: Dynamo keeps what a backend returns for as long as the process lives, in the globals of the traced
    code's module. So nothing that is reachable from there may hold a model's parameters and buffers, or they would stay in
    memory after the model.

    Args:
        gm: as Dynamo gave it; never changed.
        inputs: real values of its placeholders. See NOTE [Not kept alive].
        config: of a transformers model, to verify against; None for any other module.
        any_shape: the graph will run for batches of any shape, without guards.

    Attributes:
        context: Dynamo's tracing context, for compiling later.
    """

    def __init__(self, gm: fx.GraphModule, inputs: Sequence[Any], config: Any = None, any_shape: bool = False) -> None:
        self.gm, self.config, self.any_shape = gm, config, any_shape
        note_breaks(gm)
        self._inputs = [weakref.ref(x) if isinstance(x, torch.Tensor) and is_module_tensor(n) else x
                        for n, x in zip(placeholders(gm.graph), inputs, strict=True)]
        self.context = TracingContext.try_get()

    @property
    def inputs(self) -> list[Any]:
        """Real values of the placeholders; None for parameters and buffers that are no more."""
        return [x() if isinstance(x, weakref.ref) else x for x in self._inputs]

    @property
    def module_tensors(self) -> list[torch.Tensor]:
        """The parameters and buffers among the inputs that are still there."""
        return [t for x in self._inputs if isinstance(x, weakref.ref) and (t := x()) is not None]

    @property
    def sites(self) -> list[AttentionSite]:
        """The attention sites in graph order. Raises UnsupportedAttention."""
        return self._raised[1]

    @property
    def raised(self) -> fx.GraphModule:
        """The graph in which every attention call is the semantic op; copy it before rewriting. Raises UnsupportedAttention."""
        return self._raised[0]

    @property
    def device(self) -> torch.device:
        """Where attention runs."""
        return value(site_nodes(self.raised.graph)[0].args[0]).device

    @functools.cached_property
    def _raised(self) -> tuple[fx.GraphModule, list[AttentionSite]]:
        gm = copy_graph(self.gm)
        for node in gm.graph.find_nodes(op="call_function", target=torch._C._set_grad_enabled):
            gm.graph.erase_node(node)  # a step gives no gradients, and the end of a no_grad in the model would turn them on
        real = dict(zip(placeholders(gm.graph), self.inputs, strict=True))
        numbered = [n.kwargs["layer"] for n in site_nodes(gm.graph)]
        raised, refusals = raise_sdpa(gm, {node.name: x for node, x in real.items()})
        found = [site_of(n) for n in site_nodes(gm.graph)]
        if numbered and len(found) > len(numbered):
            raise UnsupportedAttention(
                f"{len(numbered)} attention sites came through transformers' attention interface and "
                f"{len(found) - len(numbered)} as F.scaled_dot_product_attention; quire does not mix the two in one model")
        verify(gm.graph, found, self.config, refusals)
        tokens = value(site_nodes(gm.graph)[0].args[0]).shape[2]
        if self.any_shape:
            self._check_one_row(gm, found)
        if self.config is not None:
            use_given_positions(gm, tokens)
        check_positions(gm.graph, tokens, self.config is not None)
        check_tokens(gm.graph, tokens)
        check_rows(gm.graph, real)
        if raised or self.any_shape:
            self._check_shape_conditions(gm, raised > 0)
        return gm, found

    def _check_one_row(self, gm: fx.GraphModule, found: list[AttentionSite]) -> None:
        for node, site in zip(site_nodes(gm.graph), found, strict=True):
            if str(value(node.args[0]).shape[0]) != "1":
                raise UnsupportedAttention(
                    f"attention site {site.layer} ({site.name}) calls attention with queries of shape "
                    f"{tuple(value(node.args[0]).shape)} for one row of tokens; need (1, H, S, D)")

    def _check_shape_conditions(self, gm: fx.GraphModule, raised: bool) -> None:
        """A mask that the model chooses by the number of tokens was seen for some of them only; so were dropped guards."""
        q = value(site_nodes(gm.graph)[0].args[0])
        squares = {x.shape[-1] for x in self.inputs if isinstance(x, torch.Tensor) and x.dim() >= 2
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

    def num_tokens(self, args: Sequence[Any]) -> int | None:
        """Tokens of a call with ``args``, from the first input of the ragged row; None if the graph does not tell."""
        if self._row is None:
            return None
        shape = args[self._row].shape
        return shape[0] * shape[1]

    @functools.cached_property
    def _row(self) -> int | None:
        q = value(site_nodes(self.raised.graph)[0].args[0])
        for i, node in enumerate(placeholders(self.gm.graph)):
            val = value(node)
            if isinstance(val, torch.Tensor) and not val.is_floating_point() and val.dim() == 2 \
                    and str(val.shape) == str(torch.Size((q.shape[0], q.shape[2]))):
                return i
        return None


__all__ = ["TracedGraph"]
