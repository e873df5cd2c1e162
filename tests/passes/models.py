"""Tiny hand-written models for the tests of the passes, with masks and repeats as arguments; to trace and run them."""

from __future__ import annotations

import contextlib
import difflib
import re
import textwrap
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from quire.attn_ops.kv_cache import PagedKVCache
from quire.attn_ops.metadata import CommonAttentionMetadata
from quire.attn_ops.step import Step, running
from quire.passes.backend import QuireBackend
from quire.passes.capture.traced import TracedGraph
from quire.passes.fusions.base import FusedWeights, Fusion
from quire.passes.fx import copy_graph
from quire.passes.options import QuireOptions
from tests.steps import serve

VOCAB, HIDDEN, DIM = 32, 16, 4

Mask = Callable[..., torch.Tensor | None]
Repeat = Callable[[torch.Tensor, int], torch.Tensor]


def plain_repeat(x: torch.Tensor, times: int) -> torch.Tensor:
    return x.repeat_interleave(times, dim=1)


class Attention(nn.Module):
    """Attention from F.scaled_dot_product_attention. ``mask(module, position_ids)`` makes attn_mask."""

    def __init__(self, heads: int, kv_heads: int, *, mask: Mask | None = None, repeat: Repeat | None = plain_repeat,
                 **sdpa: Any) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.mask, self.repeat, self.sdpa = heads, kv_heads, mask, repeat, sdpa
        self.qkv = nn.Linear(HIDDEN, (heads + 2 * kv_heads) * DIM)
        self.out = nn.Linear(heads * DIM, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor, extra: dict[str, torch.Tensor]) -> torch.Tensor:
        batch, length, _ = x.shape
        sizes = [self.heads * DIM, self.kv_heads * DIM, self.kv_heads * DIM]
        q, k, v = (t.view(batch, length, -1, DIM).transpose(1, 2) for t in self.qkv(x).split(sizes, dim=-1))
        if self.repeat is not None and self.heads != self.kv_heads:
            k, v = (self.repeat(t, self.heads // self.kv_heads) for t in (k, v))
        mask = self.mask(self, position_ids, **extra) if self.mask is not None else None
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **self.sdpa)
        return self.out(out.transpose(1, 2).reshape(batch, length, -1))


class RMSNorm(nn.Module):
    """Llama's, as transformers has it; with an ``offset`` Gemma's."""

    def __init__(self, width: int, dtype: torch.dtype = torch.float32, offset: float = 0.0) -> None:
        super().__init__()
        self.weight, self.offset = nn.Parameter(torch.rand(width, dtype=dtype) + 0.5), offset

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.float32)
        if self.offset:
            wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
            return (wide * (self.offset + self.weight.float())).to(x.dtype)
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


class Tiny(nn.Module):
    """A causal LM of residual attention layers. More keyword arguments of forward go to the masks."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.place = nn.Embedding(VOCAB, HIDDEN), nn.Embedding(4096, HIDDEN)
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor, **extra: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids) + self.place(position_ids)
        for layer in self.layers:
            x = x + layer(x, position_ids, extra)
        return self.head(x)


def tiny(heads: int = 4, kv_heads: int = 2, **options: Any) -> Tiny:
    """Tiny with two layers of attention, causal by ``is_causal`` unless a mask is given."""
    if "mask" not in options:
        options.setdefault("is_causal", True)
    return Tiny(*(Attention(heads, kv_heads, **options) for _ in range(2))).eval()


def inputs(*lengths: int, seed: int = 0) -> list[torch.Tensor]:
    """Random token ids of some sequences, (length,) each."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(VOCAB, (n,), generator=generator) for n in lengths]


class _Traced(Exception):
    """Raised in the place of running a graph."""


def capture(function: Callable[..., Any], *args: torch.Tensor, dynamic: bool | None = None) -> tuple[fx.GraphModule, list[Any]]:
    """The graph that Dynamo makes of a function, to be rewritten, and the real tensors behind its placeholders; not run."""
    found: list[Any] = []

    def stop(*inputs: Any) -> Any:
        raise _Traced

    def keep(gm: fx.GraphModule, inputs: list[Any]) -> Any:
        found.append((copy_graph(gm), list(inputs)))
        return stop

    with torch.no_grad(), contextlib.suppress(_Traced):
        torch.compile(function, backend=keep, dynamic=dynamic, fullgraph=True)(*args)
    ((graph, inputs),) = found
    return graph, inputs


def after(model: nn.Module, x: torch.Tensor,
          *passes: Callable[[Fusion], int]) -> tuple[list[int], fx.GraphModule, torch.Tensor]:
    """The matches of each pass, the graph of the model after all of them, and its result on x (1, any length, ...)."""
    torch._dynamo.mark_dynamic(x, 1)
    weights = FusedWeights()
    graph, inputs = capture(model, x)
    work = Fusion(graph, inputs, weights)
    matches = [run(work) for run in passes]
    graph.graph.lint()
    graph.recompile()
    with torch.no_grad():
        out = graph(*[x.shape[1] if isinstance(e, (int, torch.SymInt)) else e for e in inputs], *work.added)[0]
    weights.restore()
    return matches, graph, out


def after_one(run: Callable[[Fusion], int], function: Callable[..., Any], *args: torch.Tensor
              ) -> tuple[int, fx.GraphModule, list[Any]]:
    """The matches of a pass on the graph of ``function`` at these sizes, the graph after it, and its inputs."""
    torch._dynamo.reset()
    graph, inputs = capture(function, *args)
    matches = run(Fusion(graph, inputs, FusedWeights()))
    graph.graph.lint()
    graph.recompile()
    return matches, graph, inputs


def trace(model: nn.Module, *, dynamic: bool | None = True, length: int = 23, compiler: str = "eager",
          **extra: Any) -> TracedGraph:
    """The one graph that torch.compile makes of ``model``, before any pass."""
    backend = QuireBackend(QuireOptions(compiler=compiler))
    ids = inputs(length)[0][None]
    with torch.no_grad():
        torch.compile(model, backend=backend, dynamic=dynamic, fullgraph=True)(ids, torch.arange(length)[None], **extra)
    (graph,) = backend.graphs
    graph.model, graph.owner = model, backend  # type: ignore[attr-defined]  # a graph holds its model's tensors weakly
    return graph


def served(graph: TracedGraph, model: nn.Module, *, page_size: int = 4, layout: Any = "NHD", attention: str = "auto") -> float:
    """Run the model through ``graph`` in two ragged steps; the largest difference from the plain forwards."""
    compiled = torch.compile(model, backend=graph.owner, dynamic=True, fullgraph=True)
    sequences = inputs(13, 5, 22, seed=1)
    with torch.no_grad():
        expected = [model(s[None], torch.arange(len(s))[None])[0] for s in sequences]
    cache = PagedKVCache.for_sites(graph.sites, num_pages=50, page_size=page_size, device="cpu", layout=layout)

    def call(tokens: torch.Tensor, meta: CommonAttentionMetadata) -> torch.Tensor:
        with running(Step(cache, meta, attention=attention)), torch.no_grad():
            return compiled(tokens[None], meta.positions[None])[0]

    got = serve(call, sequences, ([6, 4, 20], [7, 1, 2]), page_size)
    worst = max((g - want).abs().max().item() for g, want in zip(got, expected, strict=True))
    assert graph.owner.graphs == [graph], "a second graph was traced"
    return worst


def listing(graph: fx.Graph) -> str:
    """A graph in short, the same on every version of torch: a line for each node, symbols numbered as they appear."""
    symbols: dict[str, str] = {}

    def renamed(text: Any) -> str:
        return re.sub(r"\bs\d+\b", lambda match: symbols.setdefault(match[0], f"s{len(symbols)}"), str(text))

    lines = []
    for node in graph.nodes:
        if node.op == "placeholder":
            val = node.meta["example_value"]
            shape = f"[{', '.join(map(str, val.shape))}]" if isinstance(val, torch.Tensor) else f"size {val}"
            line = f"{node.name}: {shape}"
        elif node.op == "output":
            line = f"return {node.args[0]}"
        else:
            target = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
            arguments = [*map(str, node.args), *(f"{k}={v}" for k, v in node.kwargs.items())]
            line = f"{node.name} = {target}({', '.join(arguments)})"
        lines += textwrap.wrap(renamed(line), 110, subsequent_indent="    ")
    return "\n".join(lines)


def changes(before: str, after: str) -> str:
    """The lines of two listings that differ, with - and +."""
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), n=0, lineterm="")
    return "\n".join(line for line in lines if not line.startswith(("---", "+++", "@@")))
