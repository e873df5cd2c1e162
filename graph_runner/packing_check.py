"""A trial batch before serving: sequences in one batch must not affect each other, nor tokens those before them.

Engines pack sequences into one row of tokens, and only attention knows where each begins. The passes refuse graphs that are
not proved to keep tokens apart (``passes/verify/tokens.py``); this second check knows no operations. It runs two short
sequences, of lengths drawn at random, in one batch: as they are; with the later tokens of the first one changed; with the first
one made of a single token, the one with the largest embedding (for what happens rarely); and in the other order, so that the
longer one is on either side. Whatever a token must not depend on has changed then, and its logits must not have.

NOTE [Two trials]: The batch runs in two ways.

* As it is served: compiled, by the backend, in the model's dtype. Equal kernels on equal shapes give equal bits, so that the
  logits of a sequence beside another neighbour of its length, and of tokens before others, are the same to the last bit. Where
  the order of sums depends on other rows (a mixture of experts gathers tokens by expert), or on the shape, a difference may be
  rounding, and in half precision that hides a leak of some percent.
* In float32 (``passes/capture/in_float32.py``): the traced graph, operation by operation, with attention by its definition
  for each sequence. (Left out if the model is served in float32 and only last bits differed.) Here a difference can only be
  the order of summation. How much that does is measured: the batch runs once more with each matrix product in two sums. Up to
  ``_TIMES`` as much, and at least ``_LAST_BITS`` of the largest logit (for other sums), is rounding, and more is a leak.
  Kernels that take no float32 run in half precision; what their rounding does is measured in the same way.

The model's own forward, in float32, must give what the batch gives for the first sequence, the same without positions as with
0, 1, 2, ..., the same for a first token with and without tokens behind it, and where code of the user's is in it, the same with
a KV cache and beside another row (``own_cache.py``).

Where code of the user's is in a model with windows, one more sequence for each, longer than it, must have the logits of the
model's own forward: transformers makes more masks in a trace than elsewhere, and code may change those that there are, or make
some where there are none. So of a transformers model whose code chooses its attention or makes its masks, which is traced as it
is, another sequence is as long as may be, and runs with a KV cache too.

Of a model in half precision, what is found in float32 is kept with the trace (``kept_trial.py``).
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from quire.attn_ops.attention import AttentionSite
from quire.attn_ops.backend import AttentionBackend, UnsupportedAttention
from quire.attn_ops.kv_cache import Layout, PagedKVCache, pages_for
from quire.attn_ops.kv_quant import QUANTIZED_KV_DTYPES, KVScales
from quire.attn_ops.metadata import CommonAttentionMetadata
from quire.attn_ops.step import Step
from quire.graph_runner.kept_trial import KeptTrial
from quire.graph_runner.loading import check_vocabulary
from quire.graph_runner.own_cache import both_ways, has_users_code
from quire.graph_runner.step_buffers import BatchShape
from quire.passes.capture.evaluating import ChangedWhileTraced
from quire.passes.capture.in_float32 import EXACT, HALVES, InFloat32, exact_products
from quire.passes.capture.paged_model import PagedModel
from quire.passes.fx import value

logger = logging.getLogger(__name__)
_SAME = 2  # tokens at the start of the first sequence that are never changed
TRIAL = BatchShape(13, 2)
#: Operations whose sums may be in an order that depends on other rows.
_ROUTING = frozenset({"expert_linear", "grouped_mm_fallback", "_grouped_mm", "grouped_mm", "index_add", "index_add_",
                      "index_put_", "scatter_add", "scatter_add_", "split", "sort", "argsort"})
#: Largest change that is rounding in the trial as served, as a share of the change in the sequence's own logits.
_ROUNDING = {torch.float32: 1e-3, torch.float64: 1e-3}
_ROUNDING_OF_HALVES = 0.1
#: Rounding in float32, see NOTE [Two trials]. 32: a sum in two halves is one other order of many, and the largest of a few
#: hundred differences of one kind is within some standard deviations of that of others.
_TIMES, _LAST_BITS = 32, 2.0**-20
#: Tokens behind the largest window in the sequence that shows it, and the longest such sequence: of larger windows none is run.
_BEHIND, _LONGEST = 8, 4200
_LONGEST_ON_CPU = 512  # where no window is known
#: In float32, a last bit may choose another expert: a difference of a model with experts must show in as many draws.
_DRAWS_OF_EXPERTS = 3
_PLACE = "its place in the batch"

Run = Callable[..., list[torch.Tensor]]  # logits (T, V) float32 of each of two sequences in one batch


@dataclass(frozen=True)
class _Sequences:
    """Token ids (T,): two sequences; the first one with other tokens behind its first ones, and of rare ones."""

    first: torch.Tensor
    second: torch.Tensor
    changed: torch.Tensor
    rare: torch.Tensor

    @classmethod
    def draw(cls, model: torch.nn.Module, vocab_size: int, max_model_len: int, seed: int, again: int = 0) -> _Sequences:
        """``again``: other tokens for each number, and the same lengths, so that what is rare happens as often."""
        generator = torch.Generator().manual_seed(seed)
        longer = int(torch.randint(TRIAL.num_tokens // 2 + 1, TRIAL.num_tokens - 2, (), generator=generator))
        order = 1 if torch.rand((), generator=generator) < 0.5 else -1
        sizes = [min(n, max_model_len) for n in (longer, TRIAL.num_tokens - longer)[::order]]
        if again:
            generator.manual_seed(seed + again)
        first, second, shift = (torch.randint(vocab_size, (n,), generator=generator) for n in (*sizes, sizes[0]))
        changed = torch.cat([first[:_SAME], (first[_SAME:] + 1 + shift[_SAME:] % max(1, vocab_size - 1)) % vocab_size])
        return cls(first, second, changed, _rare(model, first, vocab_size))


def check_packing(paged: PagedModel, sites: Sequence[AttentionSite], backend: AttentionBackend, *, page_size: int,
                  kv_dtype: torch.dtype | None, layout: Layout | None, device: torch.device, vocab_size: int,
                  max_model_len: int, kv_scales: KVScales | None = None, adapters: torch.Tensor | None = None) -> None:
    """Run the trials. ``kv_scales``: of the cache. ``adapters``: those that are active in the model, for some tokens
    (``Step.adapters``). Raises UnsupportedAttention if tokens of one sequence reach another, or earlier ones, outside
    attention; if the logits with ``kv_sharing_fast_prefill``, or of the model's own forward, are others; or by
    ``check_vocabulary``."""
    check_vocabulary(paged.model, paged.graph.rows_by_ids, paged.num_logits)
    vocab_size = min(vocab_size, paged.num_logits)
    seed = vocab_size + 31 * len(sites)
    ids = _Sequences.draw(paged.model, vocab_size, max_model_len, seed)
    if len(ids.first) <= _SAME or vocab_size < 2:
        logger.info("packing check: left out, sequences of %d tokens tell nothing", len(ids.first))
        return
    routed = any(_name(n) in _ROUTING for n in paged.graph.raised.graph.nodes)

    def step_of(*sequences: torch.Tensor, last: bool = False) -> tuple[Step, torch.Tensor]:
        lengths = [len(s) for s in sequences]
        pages = [pages_for(n, page_size) for n in lengths]
        cache = PagedKVCache.for_sites(sites, num_pages=1 + sum(pages), page_size=page_size, device=device, dtype=kv_dtype,
                                       layout=layout, kv_scales=kv_scales)
        table = [list(range(1 + sum(pages[:i]), 1 + sum(pages[: i + 1]))) for i in range(len(pages))]
        # As wide as the engine's table, by which kernels are chosen.
        table = [[*row, *[0] * (pages_for(max_model_len, page_size) - len(row))] for row in table]
        meta = CommonAttentionMetadata.build(lengths, lengths, table, page_size=page_size, device=device)
        if last:
            meta = replace(meta, logits_indices_padded=meta.logits_indices, num_logits_indices=len(lengths))
        of_tokens = None if adapters is None else adapters[:1].repeat(sum(lengths))
        return Step(cache, meta, backend, adapters=of_tokens), torch.cat(sequences).to(device)

    def in_float32(graph: bool) -> tuple[torch.Tensor | None, bool]:
        for draw in range(draws := _DRAWS_OF_EXPERTS if routed else 1):
            drawn = _Sequences.draw(paged.model, vocab_size, max_model_len, seed, again=draw)
            try:
                return _check_in_float32(paged, step_of, routed, drawn, graph, max_model_len)
            except UnsupportedAttention:
                if draw == draws - 1:
                    raise
        raise AssertionError

    with exact_products():
        for length, window in _longer(paged, sites, max_model_len, device):
            drawn = torch.randint(vocab_size, (length,), generator=torch.Generator().manual_seed(seed))
            _check_long(paged, drawn, window, step_of, routed)
    coarse = kv_dtype in QUANTIZED_KV_DTYPES  # a last bit of a key can move it by a whole step
    precise = not coarse and not routed and _is_precise(paged, sites[0].dtype)
    all_ids = torch.cat([ids.first, ids.second, ids.changed, ids.rare])[:max_model_len].to(device)
    kept = None if precise else KeptTrial.of(paged, all_ids, _half(paged), vocab_size, len(sites), max_model_len)
    plain = None
    if kept is None or not kept.passed():
        plain, complete = in_float32(not precise)
        if kept is not None and complete:
            kept.keep()

    def served(*sequences: torch.Tensor) -> list[torch.Tensor]:
        step, row = step_of(*sequences)
        out = paged(step, row, step.metadata.positions, torch.arange(len(row), device=device))
        return list(out.float().split([len(s) for s in sequences]))

    rounding = _ROUNDING.get(sites[0].dtype, _ROUNDING_OF_HALVES)
    limit = _ROUNDING_OF_HALVES if coarse else rounding
    found = _compare(served, ids, routed, lambda found: limit * found.effect)
    if found is None:
        return
    if paged.options.kv_sharing_fast_prefill:
        step, row = step_of(ids.first, ids.second, last=True)
        wanted = step.metadata.logits_indices_padded
        assert wanted is not None
        last = paged(step, row, step.metadata.positions, wanted).float()
        gap = max(_gap(of_all[-1], alone).max().item() for of_all, alone in zip((found.one, found.two), last, strict=True))
        if not gap <= limit * found.effect:
            raise UnsupportedAttention(
                "kv_sharing_fast_prefill=True: a trial batch has other logits than without it: they differ by "
                f"{gap / found.effect:.2g} times what another token in its past changes. Leave the option out, and please "
                "report it.")
    if precise:
        if plain is not None:
            _check_own_forward(found, plain, rounding * found.effect, backend.approximate)
        if found.most > _LAST_BITS * max(_largest(found.one), _largest(found.two)):
            in_float32(True)
        if plain is not None:
            _check_one_token(paged, ids.first.to(device), plain, InFloat32(torch.bfloat16))
    logger.info("packing check: passed")


def _check_in_float32(paged: PagedModel, step_of: Callable[..., tuple[Step, torch.Tensor]], routed: bool, ids: _Sequences,
                      graph: bool, most: int) -> tuple[torch.Tensor | None, bool]:
    """The trial in float32, of the model's own forward, on up to ``most`` tokens, and of its ``graph``. Returns logits (T, V)
    of the former for the first sequence, None if it does not run so; and whether all of both ran in float32."""
    half, quantized = _half(paged), _is_quantized(paged)
    own = InFloat32(half)
    kept: set[str] = set()

    def run(*sequences: torch.Tensor, reordered: bool = False) -> list[torch.Tensor]:
        step, row = step_of(*sequences)
        mode = InFloat32(half, lengths := [len(s) for s in sequences], reordered)
        out = paged.in_mode(mode, step, row, step.metadata.positions)
        kept.update(mode.kept)
        return list(out.float().split(lengths))

    @functools.cache
    def rounding(found: _Found) -> float:
        again = run(ids.first, ids.second, reordered=True)
        noise = max(_gap(a, b).max().item() for a, b in zip((found.one, found.two), again, strict=True))
        least = max(_largest(found.one), _largest(found.two)) * _LAST_BITS
        return min(max(_TIMES * noise, least), _ROUNDING_OF_HALVES * found.effect)

    with exact_products():
        first = ids.first.to(step_of(ids.first)[1].device)
        plain, found = _check_own_positions(paged, first, own), None
        if plain is not None:
            tokens = torch.cat([ids.first, ids.second, ids.changed])[:most].to(first.device)
            _check_own_cache(paged, tokens, own, quantized)
        try:
            found = _compare(run, ids, routed, rounding) if graph else None
        except (UnsupportedAttention, ChangedWhileTraced):
            raise
        except Exception as error:
            logger.warning("packing check: the model does not run in float32, so a leak below %d %% may not be seen: %s: %s",
                           round(100 * _ROUNDING_OF_HALVES), type(error).__name__, error)
        if found is not None and plain is not None and not own.kept:
            limit = (_ROUNDING_OF_HALVES if quantized else _ROUNDING[torch.float32]) * found.effect
            _check_own_forward(found, plain, max(limit, rounding(found) if kept else 0.0))
        if plain is not None and graph:
            _check_one_token(paged, first, plain, own)
    if kept or own.kept:
        logger.info("packing check: in half precision, for want of float32: %s", ", ".join(sorted(kept | own.kept)))
    plain = plain if not own.kept else None
    return plain, plain is not None and found is not None and not kept and not quantized


def _half(paged: PagedModel) -> torch.dtype:
    return next((t.dtype for t in _tensors(paged) if t.dtype in HALVES), torch.bfloat16)


def _is_quantized(paged: PagedModel) -> bool:
    """Whether activations may be quantized: a last bit moves one by a whole step."""
    return any(type(t) not in (torch.Tensor, torch.nn.Parameter) for t in _tensors(paged))


def _tensors(paged: PagedModel) -> list[torch.Tensor]:
    return [*paged.model.parameters(), *paged.model.buffers()]


@dataclass(frozen=True, eq=False)
class _Found:
    """Logits of both sequences; the largest change that other tokens in its own past made to the first one's, and the largest
    one that must be rounding."""

    one: torch.Tensor
    two: torch.Tensor
    effect: float
    most: float


def _compare(run: Run, ids: _Sequences, routed: bool, rounding: Callable[[_Found], float]) -> _Found | None:
    """What changed, or None: the logits depend on nothing, so that the trial tells nothing. Raises UnsupportedAttention if
    logits change with what they must not depend on, by more than ``rounding``."""
    (one, two), (one_changed, two_beside_changed), (_, two_beside_rare), (two_in_front, _) = (
        run(ids.first, ids.second), run(ids.changed, ids.second), run(ids.rare, ids.second), run(ids.second, ids.first))
    gaps = {"its neighbour in the batch": torch.maximum(_gap(two, two_beside_changed), _gap(two, two_beside_rare)),
            _PLACE: _gap(two, two_in_front), "tokens after it": _gap(one, one_changed)[:_SAME]}
    most = {what: gap.max().item() for what, gap in gaps.items()}
    found = _Found(one, two, _largest(_gap(one, one_changed)[_SAME:]), max(most.values()))
    if found.effect == 0 or one.isnan().all():
        logger.warning("the trial batch tells nothing: the model's logits do not depend on the tokens before (or are NaN), so "
                       "it is not known whether sequences in one batch leave each other alone")
        return None

    @functools.cache
    def exact() -> bool:  # not so with kernels that add up in any order
        return not routed and all(map(torch.equal, run(ids.first, ids.second), (one, two)))

    for what, gap in most.items():
        if gap and not gap <= (0 if what != _PLACE and exact() else rounding(found)):
            raise UnsupportedAttention(
                f"a trial batch of two short sequences shows that a token's logits depend on {what}: they change by "
                f"{gap / found.effect:.2g} times what another token in its own past changes. Something outside the "
                "attention sites mixes tokens (a convolution, a shift, a norm or a sum over the row, positions counted from "
                "the row's start); quire cannot serve such a model in packed batches.")
    return found


def _check_own_forward(found: _Found, plain: torch.Tensor, limit: float, approximate: str = "") -> None:
    most = _gap(found.one, plain.to(found.one)).max().item()
    if not most <= limit:
        if approximate:
            raise UnsupportedAttention(
                f"a trial sequence of {len(found.one)} tokens has other logits than by the model's own forward, by "
                f"{most / found.effect:.2g} times what another token in its past changes: the attention backend {approximate}. "
                "Give it larger sizes, so that short sequences are exact")
        raise UnsupportedAttention(
            "a trial sequence has other logits paged than by the model's own forward: they differ by "
            f"{most / found.effect:.2g} times what another token in its past changes. The forward may do something else when "
            "it is compiled (torch.compiler.is_compiling), its attention may leave out what it is given (softcap, in sdpa of "
            "older releases of transformers: attn_implementation='eager' has it), or an attention call is understood wrongly: "
            "please report it.")


def _is_precise(paged: PagedModel, dtype: torch.dtype) -> bool:
    """Whether the model as served differs from its own forward by rounding of float32 at most: no tensor of the graph and no
    weight is of another floating-point dtype or quantized, and products are not rounded to TF32."""
    weights = [*paged.model.parameters(), *paged.model.buffers()]
    # By device: torch.get_float32_matmul_precision() raises an error where one of these was set.
    products = (torch.backends.cuda if weights[0].is_cuda else torch.backends.mkldnn).matmul
    if dtype not in _ROUNDING or products.fp32_precision not in EXACT:
        return False
    floats = [v for n in paged.graph.raised.graph.nodes if isinstance(v := value(n), torch.Tensor) and v.is_floating_point()]
    return all(type(w) in (torch.Tensor, torch.nn.Parameter) and (w.dtype.itemsize > 2 or w.dtype == torch.bool)
               for w in weights) and all(v.dtype.itemsize > 2 for v in floats)


def _by_itself(paged: PagedModel, ids: torch.Tensor, positions: torch.Tensor | None, mode: InFloat32, how: str, behind: int = 0
               ) -> torch.Tensor | None:
    """Logits (T, V) of the model's own forward, of the tokens from ``behind`` on; None: it does not run so."""
    try:
        with mode:
            return paged.by_itself(ids, positions, behind).float()
    except ChangedWhileTraced:
        raise
    except Exception as error:
        logger.info("packing check: the model does not run %s: %s: %s", how, type(error).__name__, error)
        return None


def _check_own_positions(paged: PagedModel, ids: torch.Tensor, mode: InFloat32) -> torch.Tensor | None:
    """Refuse a model whose own positions are not 0, 1, 2, ... (RoBERTa's begin at padding_idx + 1). The same kernels run with
    and without positions, so a difference is not rounding. Returns its logits with positions; None: it does not run so."""
    plain = _by_itself(paged, ids, torch.arange(len(ids), device=ids.device), mode, "by itself")
    if plain is None or not paged.takes_positions:
        return plain
    own = _by_itself(paged, ids, None, mode, "by itself without positions")
    if own is None:  # it may need them, or something else that the engine does without
        return plain
    limit = (_ROUNDING_OF_HALVES if mode.kept else _ROUNDING[torch.float32]) * _largest(own)
    most = _gap(own, plain).max().item()
    if most > limit:
        with mode:
            again = _gap(own, paged.by_itself(ids, None).float()).max().item()
        if most > 3 * again:
            raise UnsupportedAttention(
                "the model counts positions in a way of its own: with position_ids 0, 1, 2, ... its logits differ by "
                f"{most / max(_largest(own), 1e-30):.2g} of the largest from those without position_ids. quire gives a model "
                "the positions of each token in its sequence, from 0.")
    return plain


def _check_own_cache(paged: PagedModel, ids: torch.Tensor, mode: InFloat32, quantized: bool) -> None:
    """Refuse a model with code of the user's that computes something else where there is a KV cache, or another row."""
    if (found := both_ways(paged, ids, mode)) is None:
        return
    plain, cached = found
    rounding = _ROUNDING_OF_HALVES if mode.kept or quantized else _ROUNDING[torch.float32]
    most = _gap(cached, plain).max().item()
    if most > rounding * _largest(plain):
        raise UnsupportedAttention(
            f"{type(paged.model).__name__} computes something else where it has a KV cache, or other rows beside one: the "
            f"logits of {len(ids)} tokens differ by {most / max(_largest(plain), 1e-30):.2g} of the largest from those without "
            "them. A forward, hook or wrapper of your own asks for the cache or for what comes with it, mixes rows, or does "
            "something for some of them only; quire computes without a cache, each row alone. Do the same in all cases.")


def _longer(paged: PagedModel, sites: Sequence[AttentionSite], most: int, device: torch.device) -> list[tuple[int, int]]:
    """Lengths of more sequences to try, of up to ``most`` tokens, and the window of the graph, or chunk, that each shows; 0: it
    shows none. Empty for a model without code of the user's."""
    if not has_users_code(paged.model):
        return []
    windows = sorted({size for s in sites for size in (s.window, s.chunk) if size is not None})
    found = [(length, size) for size in windows if size < (length := min(size + _BEHIND, most)) <= _LONGEST]
    if paged.config is not None and not paged.by_interface:  # other rotary frequencies are others with a cache
        longest = min(_LONGEST if device.type == "cuda" else _LONGEST_ON_CPU, *paged.graph.length_limits, most)
        found.append((longest, 0))
    return found


def _check_long(paged: PagedModel, ids: torch.Tensor, window: int, step_of: Callable[..., tuple[Step, torch.Tensor]],
                routed: bool) -> None:
    """Refuse a model whose own forward computes something else for the last of so many tokens (T,). ``window``: of the graph,
    which they show, or 0."""
    length, behind = len(ids), max(window, len(ids) - 8 * _BEHIND)
    step, row = step_of(ids)
    own, mode = InFloat32(_half(paged)), InFloat32(_half(paged), [length])
    plain = _by_itself(paged, row, step.metadata.positions, own, f"by itself on {length} tokens", behind)
    if plain is None:
        return
    try:
        found = paged.in_mode(mode, step, row, step.metadata.positions)[behind:].float()
    except (UnsupportedAttention, ChangedWhileTraced):
        raise
    except Exception as error:
        logger.warning("packing check: %d tokens do not run in float32, so what masks do to them is not compared: %s: %s",
                       length, type(error).__name__, error)
        return
    rounded = bool(own.kept or mode.kept) or _is_quantized(paged)
    limit = (_ROUNDING_OF_HALVES if rounded else _ROUNDING[torch.float32]) * _largest(plain)
    gaps = _gap(found, plain).amax(-1)
    off = (gaps.min() if routed else gaps.max()).item()  # a last bit may choose another expert for some token
    if not off <= limit:
        shows = f", longer than the window of {window}," if window else ""
        raise UnsupportedAttention(
            f"a trial sequence of {length} tokens{shows} has other logits paged than by the model's own forward: they differ "
            f"by {off / max(_largest(plain), 1e-30):.2g} of the largest. Code of yours may change the attention_mask only "
            "where it gets one, or make one only where it gets none: transformers makes none for a plain causal sequence, but "
            "where it is traced. Make the mask in both cases, or name a window in the config (sliding_window).")
    if not window:
        _check_own_cache(paged, row, own, rounded)


def _check_one_token(paged: PagedModel, ids: torch.Tensor, plain: torch.Tensor, mode: InFloat32) -> None:
    """Refuse a model that computes something else for a row of one token: a trace for rows of any length does not show it, as
    Dynamo takes lengths other than 1 for granted. ``plain``: logits of all ``ids``."""
    first, one = plain[:1], _by_itself(paged, ids[:1], torch.zeros_like(ids[:1]), mode, "on one token")
    if one is None:
        return
    limit = (_ROUNDING_OF_HALVES if mode.kept else _ROUNDING[torch.float32]) * _largest(first)
    most = _gap(one, first).max().item()
    if most > limit:
        raise UnsupportedAttention(
            "the model computes something else for a row of one token than for longer ones: the logits of a first token differ "
            f"by {most / max(_largest(first), 1e-30):.2g} of the largest. Its forward branches on the length of its input, or "
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


def _largest(x: torch.Tensor) -> float:
    """The largest finite number by its absolute value; 0 if there is none."""
    return x.abs().masked_fill(~x.isfinite(), 0.0).max().item() if x.numel() else 0.0
