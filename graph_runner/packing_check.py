"""A trial batch before serving: sequences in one batch must not affect each other, nor tokens those before them.

Engines pack sequences into one row of tokens, and only attention knows where each begins. The passes refuse graphs that are
not proved to keep tokens apart (``passes/verify/tokens.py``); this second check knows no operations. It runs two short
sequences, of lengths drawn at random, through the compiled model: as they are; with the later tokens of the first one changed;
with the first one made of a single token, the one with the largest embedding (for what happens rarely); and in the other order,
so that the longer one is on either side. Whatever a token must not depend on has changed then, and its logits must not have.
A model that computes in float32 throughout must also give what its own forward gives for the first one alone
(``_is_precise``), and its own forward must give a first token the same logits with and without tokens after it.

Equal kernels on equal shapes give equal bits, so that in any dtype the logits of a sequence beside another neighbour of its
length, and of tokens before others, are the same to the last bit: a bfloat16 model needs no float32 copy for that. Where the
order of sums depends on other rows (a mixture of experts gathers tokens by expert), or on the shape, a difference is rounding:
it is measured against what the changed tokens did to the logits of their own sequence, which is what a leak would be like.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from quire.attn_ops.attention import AttentionSite
from quire.attn_ops.backend import AttentionBackend, UnsupportedAttention
from quire.attn_ops.kv_cache import Layout, PagedKVCache, pages_for
from quire.attn_ops.kv_quant import QUANTIZED_KV_DTYPES
from quire.attn_ops.metadata import CommonAttentionMetadata
from quire.attn_ops.step import Step
from quire.graph_runner.step_buffers import BatchShape
from quire.passes.capture.evaluating import ChangedWhileTraced
from quire.passes.capture.paged_model import PagedModel
from quire.passes.fx import value

logger = logging.getLogger(__name__)
_SAME = 2  # tokens at the start of the first sequence that are never changed
TRIAL = BatchShape(13, 2)
#: Operations whose sums may be in an order that depends on other rows.
_ROUTING = frozenset({"expert_linear", "grouped_mm_fallback", "_grouped_mm", "grouped_mm", "index_add", "index_add_",
                      "index_put_", "scatter_add", "scatter_add_", "split", "sort", "argsort"})
#: Largest change that is rounding, as a share of the change in the sequence's own logits.
_ROUNDING = {torch.float32: 1e-3, torch.float64: 1e-3}
_ROUNDING_OF_HALVES = 0.1


def check_packing(paged: PagedModel, sites: Sequence[AttentionSite], backend: AttentionBackend, *, page_size: int,
                  kv_dtype: torch.dtype | None, layout: Layout | None, device: torch.device, vocab_size: int,
                  max_model_len: int, adapters: torch.Tensor | None = None) -> None:
    """Run the trial. ``adapters``: those that are active in the model, for each token (``Step.adapters``).

    Raises:
        UnsupportedAttention: tokens of one sequence reach another, or earlier ones, outside attention; or the logits with
            ``kv_sharing_fast_prefill`` are others.
    """
    vocab_size = min(vocab_size, paged.num_logits)
    generator = torch.Generator().manual_seed(vocab_size + 31 * len(sites))
    longer = int(torch.randint(TRIAL.num_tokens // 2 + 1, TRIAL.num_tokens - 2, (), generator=generator))
    order = 1 if torch.rand((), generator=generator) < 0.5 else -1
    sizes = [min(n, max_model_len) for n in (longer, TRIAL.num_tokens - longer)[::order]]
    if sizes[0] <= _SAME or vocab_size < 2:
        logger.info("packing check: left out, sequences of %d tokens tell nothing", sizes[0])
        return
    coarse = kv_dtype in QUANTIZED_KV_DTYPES  # a last bit of a key can move it by a whole step
    rounding = _ROUNDING.get(sites[0].dtype, _ROUNDING_OF_HALVES)
    first, second, shift = (torch.randint(vocab_size, (n,), generator=generator) for n in (*sizes, sizes[0]))
    changed = torch.cat([first[:_SAME], (first[_SAME:] + 1 + shift[_SAME:] % (vocab_size - 1)) % vocab_size])

    routed = any(_name(n) in _ROUTING for n in paged.graph.raised.graph.nodes)
    plain = _check_own_positions(paged, first.to(device), rounding)

    def logits(*sequences: torch.Tensor, last: bool = False) -> list[torch.Tensor]:
        lengths = [len(s) for s in sequences]
        pages = [pages_for(n, page_size) for n in lengths]
        cache = PagedKVCache.for_sites(sites, num_pages=1 + sum(pages), page_size=page_size, device=device, dtype=kv_dtype,
                                       layout=layout)
        table = [list(range(1 + sum(pages[:i]), 1 + sum(pages[: i + 1]))) for i in range(len(pages))]
        # As wide as the engine's table, by which kernels are chosen.
        table = [[*row, *[0] * (pages_for(max_model_len, page_size) - len(row))] for row in table]
        meta = CommonAttentionMetadata.build(lengths, lengths, table, page_size=page_size, device=device)
        ids = torch.cat(sequences).to(device)
        if last:
            wanted = meta.logits_indices
            meta = replace(meta, logits_indices_padded=wanted, num_logits_indices=len(lengths))
            return list(paged(Step(cache, meta, backend, adapters=adapters), ids, meta.positions, wanted).float())
        out = paged(Step(cache, meta, backend, adapters=adapters), ids, meta.positions, torch.arange(len(ids), device=device))
        return list(out.float().split(lengths))

    (one, two), (one_changed, two_beside_changed), (_, two_beside_rare), (two_in_front, _) = (
        logits(first, second), logits(changed, second), logits(_rare(paged.model, first, vocab_size), second),
        logits(second, first))
    exact = not routed and all(
        map(torch.equal, logits(first, second), (one, two)))  # not so with kernels that add up in any order
    effects = _gap(one, one_changed)[_SAME:]
    effect = effects[effects.isfinite()].max().item() if effects.isfinite().any() else 0.0
    if effect == 0 or one.isnan().all():
        logger.warning("the trial batch tells nothing: the model's logits do not depend on the tokens before (or are NaN), so "
                       "it is not known whether sequences in one batch leave each other alone")
        return
    limit = _ROUNDING_OF_HALVES if coarse else rounding
    beside = torch.maximum(_gap(two, two_beside_changed), _gap(two, two_beside_rare))
    found: dict[str, Any] = {
        "its neighbour in the batch": beside,
        "its place in the batch": _gap(two, two_in_front),
        "tokens after it": _gap(one, one_changed)[:_SAME],
    }
    for what, difference in found.items():
        share = difference.max().item() / effect
        if not share <= (0 if exact and what != "its place in the batch" else limit):
            raise UnsupportedAttention(
                f"a trial batch of two short sequences shows that a token's logits depend on {what}: they change by "
                f"{share:.2g} times what another token in its own past changes. Something outside the attention sites mixes "
                "tokens (a convolution, a shift, a norm or a sum over the row, positions counted from the row's start); quire "
                "cannot serve such a model in packed batches.")
    if paged.options.kv_sharing_fast_prefill:
        gaps = [_gap(of_all[-1], alone).max().item() for of_all, alone in zip(
            (one, two), logits(first, second, last=True), strict=True)]
        if not max(gaps) <= limit * effect:
            raise UnsupportedAttention(
                "kv_sharing_fast_prefill=True: a trial batch has other logits than without it: they differ by "
                f"{max(gaps) / effect:.2g} times what another token in its past changes. Leave the option out, and please "
                "report it.")
    if plain is not None and not coarse and not routed and _is_precise(paged, plain.dtype):
        share = _gap(one, plain.to(one)).max().item() / effect
        if not share <= rounding:
            raise UnsupportedAttention(
                f"a trial sequence has other logits paged than by the model's own forward: they differ by {share:.2g} times "
                "what another token in its past changes. The forward may do something else when it is compiled "
                "(torch.compiler.is_compiling), or an attention call is understood wrongly: please report it.")
    if plain is not None and not routed:
        _check_one_token(paged, first.to(device), plain)
    logger.info("packing check: passed")


def _is_precise(paged: PagedModel, dtype: torch.dtype) -> bool:
    """Whether two kernels for the same operation differ by rounding of float32 at most: no tensor of the graph and no weight is
    of another floating-point dtype or quantized, and products are not rounded to TF32. (What routes tokens to experts may take
    another expert for the last bit.)"""
    weights = [*paged.model.parameters(), *paged.model.buffers()]
    # By device: torch.get_float32_matmul_precision() raises an error where one of these was set.
    products = (torch.backends.cuda if weights[0].is_cuda else torch.backends.mkldnn).matmul
    if dtype not in _ROUNDING or products.fp32_precision not in ("none", "ieee"):
        return False
    floats = [v for n in paged.graph.raised.graph.nodes if isinstance(v := value(n), torch.Tensor) and v.is_floating_point()]
    return all(type(w) in (torch.Tensor, torch.nn.Parameter) and (w.dtype.itemsize > 2 or w.dtype == torch.bool)
               for w in weights) and all(v.dtype.itemsize > 2 for v in floats)


def _check_own_positions(paged: PagedModel, ids: torch.Tensor, limit: float) -> torch.Tensor | None:
    """Refuse a model whose own positions are not 0, 1, 2, ... (RoBERTa's begin at padding_idx + 1). The same kernels run with
    and without positions, so a difference is not rounding. Returns its logits with positions; None: it does not run so."""
    positions = torch.arange(len(ids), device=ids.device)
    try:
        plain = paged.by_itself(ids, positions)
    except Exception as error:
        logger.info("packing check: the model does not run by itself: %s: %s", type(error).__name__, error)
        return None
    try:
        own = paged.by_itself(ids, None).float()
    except ChangedWhileTraced:
        raise
    except Exception as error:  # it may need them, or something else that the engine does without
        logger.info("packing check: the model does not run by itself without positions: %s: %s", type(error).__name__, error)
        return plain
    given = plain.float()
    difference, largest = _gap(own, given).max().item(), own[own.isfinite()].abs().max().item() if own.isfinite().any() else 0.0
    if difference > limit * largest and difference > 3 * _gap(own, paged.by_itself(ids, None).float()).max().item():
        raise UnsupportedAttention(
            "the model counts positions in a way of its own: with position_ids 0, 1, 2, ... its logits differ by "
            f"{difference / max(largest, 1e-30):.2g} of the largest from those without position_ids. quire gives a model the "
            "positions of each token in its sequence, from 0.")
    return plain


def _check_one_token(paged: PagedModel, ids: torch.Tensor, plain: torch.Tensor) -> None:
    """Refuse a model that computes something else for a row of one token: a trace for rows of any length does not show it, as
    Dynamo takes lengths other than 1 for granted. ``plain``: logits of all ``ids``."""
    try:
        one, first = paged.by_itself(ids[:1], torch.zeros_like(ids[:1])).float(), plain[:1].float()
    except ChangedWhileTraced:
        raise
    except Exception as error:
        logger.info("packing check: the model does not run on one token: %s: %s", type(error).__name__, error)
        return
    limit = _ROUNDING[plain.dtype] if _is_precise(paged, plain.dtype) else _ROUNDING_OF_HALVES
    largest = first[first.isfinite()].abs().max().item() if first.isfinite().any() else 0.0
    difference = _gap(one, first).max().item()
    if difference > limit * largest:
        raise UnsupportedAttention(
            "the model computes something else for a row of one token than for longer ones: the logits of a first token differ "
            f"by {difference / max(largest, 1e-30):.2g} of the largest. Its forward branches on the length of its input, or "
            "attends to later tokens. A packed row has the tokens of several sequences, so that its length means nothing to "
            "them; let the forward branch on position_ids, or not at all.")


def _rare(model: torch.nn.Module, first: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """A sequence as long as ``first``, of the token with the largest embedding; the last one where embeddings are unknown."""
    tables = [m.weight for m in model.modules() if isinstance(m, torch.nn.Embedding) and len(m.weight) >= vocab_size]
    plain = tables and type(tables[0]) in (torch.Tensor, torch.nn.Parameter)
    token = int(torch.linalg.vector_norm(tables[0][:vocab_size].detach(), torch.inf, -1).argmax()) if plain else vocab_size - 1
    return torch.full_like(first, token)


def _name(node: Any) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "").partition(".")[0]


def _gap(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """|a - b|; zero where both are the same infinity or NaN (vocabulary that a model masks), infinite where one of them is."""
    same = (a == b) | (a.isnan() & b.isnan())
    return (a - b).abs().masked_fill(same, 0.0).nan_to_num(nan=float("inf"), posinf=float("inf"))


__all__ = ["TRIAL", "check_packing"]
