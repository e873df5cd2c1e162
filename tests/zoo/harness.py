"""What the zoo tests share: sequences served together in ragged steps, and the logits of each sequence run alone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from quire import AttentionSite, CommonAttentionMetadata, Step
from quire.attn_ops.kv_cache import PagedKVCache, pages_for
from quire.passes.capture.paged_model import PagedModel
from tests.steps import serve as in_steps

LENGTHS = (11, 6, 21)
# Tokens that each step schedules of each sequence: chunked prefill beside decode, a lone token, sequences that wait.
STEPS = ((4, 3, 1), (1, 2, 6), (6, 0, 1), (0, 1, 12), (0, 0, 1))
assert tuple(map(sum, zip(*STEPS, strict=True))) == LENGTHS

#: Largest difference to the reference, relative to the largest logit. Both sides compute in float32 (eps 1.2e-7) and
#: differ in the order of sums over up to 96 terms in each of 2 to 6 layers: 1e-6 to 2e-6 here. A wrong mask gives 1e-2.
TOLERANCE = 1e-5


@dataclass(frozen=True)
class Batch:
    """Token ids of each sequence, and its logits (length, V) from a forward of its own."""

    ids: tuple[torch.Tensor, ...]
    logits: tuple[torch.Tensor, ...]

    @property
    def scale(self) -> float:
        """The largest logit, to which errors are relative."""
        return max(t.abs().max().item() for t in self.logits)


def reference(model: torch.nn.Module, seed: int = 0) -> Batch:
    """Random sequences, each run through ``model`` alone, with no cache and no padding."""
    generator = torch.Generator().manual_seed(seed)
    device = next(model.parameters()).device
    ids = tuple(torch.randint(3, 64, (n,), generator=generator).to(device) for n in LENGTHS)
    with torch.no_grad():
        logits = tuple(model(input_ids=i[None], use_cache=False).logits[0] for i in ids)
    return Batch(ids, logits)


def noisy_cache(sites: list[AttentionSite], page_size: int, *, device: torch.device,
                layout: Any = "NHD") -> PagedKVCache:
    """A cache for the batch that holds noise far larger than any key, so that reading a slot not yet written shows."""
    pages = 1 + sum(pages_for(n, page_size) for n in LENGTHS) + 3
    cache = PagedKVCache.for_sites(sites, num_pages=pages, page_size=page_size, device=device, layout=layout)
    generator = torch.Generator(device).manual_seed(1)
    for tensor in [*cache.k, *cache.v]:
        tensor.normal_(0, 30, generator=generator)
    return cache


def serve(model: PagedModel, batch: Batch, *, page_size: int, layout: Any = "NHD", attention: str = "auto",
          pad: tuple[int, int] = (0, 0), mutation: dict[str, Any] | None = None, backwards: bool = False,
          dense: bool = False) -> list[torch.Tensor]:
    """Serve the batch in STEPS; the logits (length, V) of each sequence.

    Args:
        pad: tokens and rows that each step is padded by.
        mutation: what to change in every lowered attention op; see ``mutated``.
        backwards: ask for the rows of logits in the other order than that of the tokens.
        dense: MLA layers with the keys and values of all heads in the cache.
    """
    device = batch.ids[0].device
    cache = noisy_cache([s.dense for s in model.sites] if dense else model.sites, page_size, device=device, layout=layout)

    def call(ids: torch.Tensor, meta: CommonAttentionMetadata) -> torch.Tensor:
        meta = meta.padded(meta.num_tokens + pad[0], meta.num_reqs + pad[1])
        step, wanted = Step(cache, meta, attention=attention), torch.arange(len(ids), device=device)
        with mutated(model, step, mutation or {}):
            out = model(step, torch.cat([ids, ids.new_zeros(pad[0])]), meta.positions, wanted.flip(0) if backwards else wanted)
        return out.flip(0) if backwards else out

    return in_steps(call, batch.ids, STEPS, page_size, device)


@contextlib.contextmanager
def mutated(model: PagedModel, step: Step, change: dict[str, Any]) -> Iterator[None]:
    """While inside, every lowered attention op of ``model`` has the options in ``change`` instead of its own."""
    paged = model.graph.compiled(step)
    graph = paged.lowered.gm
    before = {n: (n.args, n.kwargs) for n in graph.graph.nodes if n.target in paged.lowered.target.backend.ops}
    assert before, "the lowered graph has no paged op"
    run = paged.run
    if change:
        for node in before:
            names = [a.name for a in node.target._schema.arguments]
            node.args = tuple(change.get(name, a) for name, a in zip(names, node.args, strict=False))
            node.kwargs = {name: change.get(name, a) for name, a in node.kwargs.items()}
        graph.recompile()
        paged.run = run._replace(call=graph.forward)
    try:
        yield
    finally:
        if change:
            for node, (args, kwargs) in before.items():
                node.args, node.kwargs = args, kwargs
            graph.recompile()
            paged.run = run


def error(got: list[torch.Tensor], batch: Batch) -> float:
    """The largest difference from the reference, relative to the largest logit."""
    return max((g - w).abs().max().item() for g, w in zip(got, batch.logits, strict=True)) / batch.scale
