"""Log probabilities of a step: computed on the device, copied to the host, and given to the requests.

The sampled token's are part of the step's graph (``attn_ops/ops/logprobs.py``), which skips rows that ask for none, and reach
the host in one copy. After the graph, from its logits: those of rows whose token is sampled there, the likeliest tokens
(``topk``), other tokens by id, and prompt tokens. Nothing waits for the device before ``StepLogprobs.rows``.

Prompt tokens need logits at every position, which the LM head gives only where it is asked to: a step with *scored* rows passes
their positions too, at most ``SCORED_ROWS`` (``Scheduler`` cuts prompts into such chunks), so memory does not grow with
prompt x vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from quire.attn_ops.metadata.core import to_device
from quire.attn_ops.ops.logprobs import TokenLogprobs, token_logprobs
from quire.graph_runner.request import Logprob, Request, ScheduledBatch
from quire.graph_runner.sampler import Sampled

#: Prompt tokens whose log probabilities one step computes: rows of logits beside those of the batch.
SCORED_ROWS = 256


class ScoredRows(NamedTuple):
    """Prompt tokens to score in a step, on the device: index of the row of hidden states that predicts each, (N,) int64, and
    the token, (N,) int64."""

    indices: torch.Tensor
    targets: torch.Tensor

    @classmethod
    def of(cls, batch: ScheduledBatch, device: torch.device) -> ScoredRows | None:
        """The scored rows of a batch, or None."""
        if not batch.num_scored:
            return None
        indices: list[int] = []
        targets: list[int] = []
        at = 0
        for row in batch.rows:
            if row.num_scored:
                first = row.request.num_scored - row.num_scored  # the first target
                offset = at + first - 1 - row.start
                indices += range(offset, offset + row.num_scored)
                targets += row.request.prompt_token_ids[first : first + row.num_scored]
            at += row.num_new
        return cls(to_device(np.array(indices, np.int64), device), to_device(np.array(targets, np.int64), device))


class _More(NamedTuple):
    """Logits of tokens beside the sampled or scored ones, on their way to the host, where the rest is computed: launches cost
    more than a few numbers.

    ``rows``: their indices in the batch, n of them; of each how many of the likeliest tokens it wants (``counts``), the
    temperature that divides its logits (``heat``), and the logit under which tokens are excluded (``threshold``, None: none
    are). ``top``: None, or logits and ids, each (n, k), of the likeliest tokens. ``chosen``: None, or logits and ranks, each
    (n, m), of the tokens with the ids ``ids``."""

    rows: list[int]
    counts: list[int]
    heat: np.ndarray
    threshold: torch.Tensor | None
    top: tuple[torch.Tensor, torch.Tensor] | None
    ids: list[list[int]]
    chosen: tuple[torch.Tensor, torch.Tensor] | None

    def entries(self, normalizers: np.ndarray) -> Iterator[tuple[int, Iterable[tuple[int, float, int]]]]:
        """For each row its index in the batch, and (token, log probability, rank) of its tokens."""
        bound = None if self.threshold is None else self.threshold.numpy()[:, None]

        def values(logits: torch.Tensor) -> list[list[float]]:
            x = logits.float().numpy()
            kept = x > -np.inf if bound is None else (x >= bound) & (x > -np.inf)
            with np.errstate(invalid="ignore"):  # -inf where it is not kept
                found = x / self.heat[:, None] - normalizers[self.rows][:, None]
            return np.where(kept | np.isnan(x), found, -np.inf).tolist()

        if self.top is not None:
            for row, k, some, ids in zip(self.rows, self.counts, values(self.top[0]), self.top[1].tolist(), strict=True):
                yield row, zip(ids[:k], some[:k], range(1, k + 1), strict=True)
        if self.chosen is not None:
            for row, ids, some, ranks in zip(self.rows, self.ids, values(self.chosen[0]), self.chosen[1].tolist(), strict=True):
                yield row, zip(ids, some, ranks, strict=False)  # padding follows


class RowLogprobs(NamedTuple):
    """Log probabilities that a step found for one row: of the sampled token, or None, and of scored prompt tokens."""

    sampled: dict[int, Logprob] | None
    prompt: list[dict[int, Logprob]]

    def give(self, request: Request, token: int) -> None:
        """Add them to the request's output. ``token``: the sampled one, negative if there is none."""
        output = request.output
        if output.prompt_logprobs is not None:
            output.prompt_logprobs += [_decoded(request, found) for found in self.prompt]
        if self.sampled is not None and token >= 0 and output.logprobs is not None and output.cumulative_logprob is not None:
            output.logprobs.append(_decoded(request, self.sampled))
            output.cumulative_logprob += self.sampled[token].logprob


def _decoded(request: Request, found: dict[int, Logprob]) -> dict[int, Logprob]:
    if request.detokenizer is None:
        return found
    decode = request.detokenizer.token_text
    return {token: Logprob(each.logprob, each.rank, decode(token)) for token, each in found.items()}


@dataclass
class StepLogprobs:
    """Results of a launched step, on their way to the host. Each tensor is read after the step is done."""

    batch: ScheduledBatch
    tokens: torch.Tensor
    sampled: TokenLogprobs | None
    sampled_more: _More | None
    scored: TokenLogprobs | None
    scored_targets: torch.Tensor | None
    scored_more: _More | None

    def rows(self) -> list[RowLogprobs]:
        """For each row of the batch. Call it when the step is done."""
        tokens = self.tokens.tolist()
        sampled = _dicts(tokens, self.sampled, self.sampled_more)
        prompt = _dicts(self.scored_targets.tolist(), self.scored, self.scored_more) if self.scored_targets is not None else []
        found, at = [], 0
        for i, row in enumerate(self.batch.rows):
            wanted = sampled and row.samples and row.request.params.wants_logprobs
            found.append(RowLogprobs(sampled[i] if wanted else None, prompt[at : at + row.num_scored]))
            at += row.num_scored
        return found


def _dicts(tokens: Sequence[int], of_token: TokenLogprobs | None, more: _More | None) -> list[dict[int, Logprob]]:
    if of_token is None:
        return []
    columns = zip(tokens, of_token.logprobs.tolist(), of_token.ranks.tolist(), strict=False)  # padding rows follow
    found = [{token: Logprob(logprob, rank)} for token, logprob, rank in columns]
    if more is not None:
        for row, entries in more.entries(of_token.normalizers.numpy()):
            for token, logprob, rank in entries:
                found[row].setdefault(token, Logprob(logprob, rank))
    return found


def step_logprobs(batch: ScheduledBatch, logits: torch.Tensor, tokens: torch.Tensor, host_tokens: torch.Tensor,
                  temperature: torch.Tensor, in_graph: TokenLogprobs, sampled: Sampled | None, scored: ScoredRows | None, *,
                  to_host: Callable[[torch.Tensor], torch.Tensor]) -> StepLogprobs | None:
    """Compute what the batch asks for and start copying it to the host; None if it asks for nothing.

    Args:
        logits: (B + N, V) of the padded batch's B rows, then of the N scored ones.
        tokens: (B,) sampled; host_tokens: where they will be on the host.
        temperature: (B,) ``SamplingParams.logprob_temperature`` of each row.
        in_graph: those of the graph's tokens, from its logits.
        sampled: what rows with filters were drawn from after the graph, if there are any.
    """
    wanting = [i for i, row in enumerate(batch.rows) if row.samples and row.request.params.wants_logprobs]
    found = StepLogprobs(batch, host_tokens, None, None, None, None, None)
    if wanting:
        own, threshold, of_token = logits[: len(tokens)], None, in_graph
        if sampled is not None:
            processed = np.zeros((len(tokens), 1), np.bool_)
            processed[wanting, 0] = [batch.rows[i].request.params.logprobs_mode == "processed_logprobs" for i in wanting]
            on = to_device(processed, logits.device)
            own = torch.where(on, sampled.logits, own)
            if sampled.threshold is not None:
                threshold = torch.where(on[:, 0], sampled.threshold, float("-inf"))
            of_token = token_logprobs(own, tokens, temperature, threshold)
        found.sampled = TokenLogprobs(to_host(of_token.packed))
        found.sampled_more = _more([(i, p.logprobs or 0, p.logprob_token_ids, p.logprob_temperature) for i in wanting
                                    for p in (batch.rows[i].request.params,)], own, threshold, to_host)
    if scored is not None:
        own = logits[len(tokens) :]
        of_token = token_logprobs(own, scored.targets, torch.ones(len(own), dtype=torch.float32, device=logits.device))
        found.scored, found.scored_targets = TokenLogprobs(to_host(of_token.packed)), to_host(scored.targets)
        per_row = [row.request.params.prompt_logprobs or 0 for row in batch.rows for _ in range(row.num_scored)]
        found.scored_more = _more([(i, k, (), 1.0) for i, k in enumerate(per_row)], own, None, to_host)
    return found if wanting or scored is not None else None


def _more(asks: Sequence[tuple[int, int, Sequence[int] | None, float]], logits: torch.Tensor, threshold: torch.Tensor | None,
          to_host: Callable[[torch.Tensor], torch.Tensor]) -> _More | None:
    """For each (row, k, ids, temperature): the k likeliest tokens, all for k = -1, and those with the ids."""
    vocabulary = logits.shape[1]
    wanted = [(row, vocabulary if k < 0 else min(k, vocabulary), list(ids or ()), heat)
              for row, k, ids, heat in asks if k or ids]
    if not wanted:
        return None
    rows, counts, ids, heat = (list(column) for column in zip(*wanted, strict=True))
    if rows == list(range(len(rows))):  # as usual: nothing to gather
        x, bound = logits[: len(rows)], None if threshold is None else threshold[: len(rows)]
    else:
        at = to_device(np.array(rows, np.int64), logits.device)
        x, bound = logits[at], None if threshold is None else threshold[at]
    top = chosen = None
    if most := max(counts):
        values, tokens = x.topk(most, dim=-1)
        top = to_host(values), to_host(tokens)
    if most := max(map(len, ids)):
        padded = to_device(np.array([[*some, *[0] * (most - len(some))] for some in ids], np.int64), logits.device)
        values = x.gather(1, padded)
        ranks = [(x > values[:, j : j + 1]).sum(-1) + 1 for j in range(most)]
        chosen = to_host(values), to_host(torch.stack(ranks, 1))
    return _More(rows, counts, np.array(heat, np.float32), None if bound is None else to_host(bound), top, ids, chosen)
