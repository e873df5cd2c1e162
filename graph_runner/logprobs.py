"""Log probabilities of a step: computed on the device, copied to the host, and given to the requests.

They are computed after the step's graph, from its logits, so steps without them pay nothing: the sampled token's in two
launches (``attn_ops/ops/logprobs.py``), the likeliest tokens (``topk``), other tokens by id, and prompt tokens. Nothing waits
for the device before ``StepLogprobs.rows``.

Prompt tokens need logits at every position, which the LM head gives only where it is asked to: a step with *scored* rows passes
their positions too, at most ``SCORED_ROWS`` (``Scheduler`` cuts prompts into such chunks), so memory does not grow with
prompt x vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from quire.attn_ops.ops.logprobs import TokenLogprobs, scaled, token_logprobs
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


def to_device(values: np.ndarray, device: torch.device) -> torch.Tensor:
    """Copy to the device without waiting for it."""
    host = torch.from_numpy(values)
    return (host.pin_memory() if device.type == "cuda" else host).to(device, non_blocking=True)


class _More(NamedTuple):
    """Tokens beside the sampled or scored ones: for some ``rows``, the ``top`` likeliest and those with given ``ids``, both as
    (values, tokens, ranks), each (rows, n)."""

    rows: list[int]
    top: tuple[torch.Tensor, ...]
    ids: tuple[torch.Tensor, ...]


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
    """Results of a launched step, on their way to the host (normalizers stay). Each tensor is read after the step is done."""

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
        for part in (more.top, more.ids):
            values, ids, ranks = (t.tolist() for t in part)
            for i, row in enumerate(more.rows):
                for value, token, rank in zip(values[i], ids[i], ranks[i], strict=True):
                    if token >= 0:  # else padding
                        found[row].setdefault(token, Logprob(value, rank))
    return found


def step_logprobs(batch: ScheduledBatch, logits: torch.Tensor, tokens: torch.Tensor,
                  temperature: torch.Tensor, sampled: Sampled | None, scored: ScoredRows | None, *,
                  to_host: Callable[[torch.Tensor], torch.Tensor]) -> StepLogprobs | None:
    """Compute what the batch asks for and start copying it to the host; None if it asks for nothing.

    Args:
        logits: (B + N, V) of the padded batch's B rows, then of the N scored ones.
        tokens: (B,) sampled.
        temperature: (B,) ``SamplingParams.logprob_temperature`` of each row.
        sampled: what rows with filters were drawn from, if there are any.
        to_host: starts copying a tensor.
    """
    rows = len(batch.rows)
    wanting = [i for i, row in enumerate(batch.rows) if row.samples and row.request.params.wants_logprobs]
    found = StepLogprobs(batch, to_host(tokens), None, None, None, None, None)
    if wanting:
        own, threshold = logits[: len(tokens)], None
        if sampled is not None:
            processed = np.zeros((len(tokens), 1), np.bool_)
            processed[wanting, 0] = [batch.rows[i].request.params.logprobs_mode == "processed_logprobs" for i in wanting]
            on = to_device(processed, logits.device)
            own = torch.where(on, sampled.logits, own)
            if sampled.threshold is not None:
                threshold = torch.where(on[:, 0], sampled.threshold, float("-inf"))
        of_token = token_logprobs(own, tokens, temperature, threshold)
        found.sampled = of_token._replace(logprobs=to_host(of_token.logprobs), ranks=to_host(of_token.ranks))
        asks = [(i, p.logprobs or 0, p.logprob_token_ids) for i in wanting for p in (batch.rows[i].request.params,)]
        found.sampled_more = _more(asks, own, temperature, of_token.normalizers, threshold, to_host)
    if scored is not None:
        own = logits[len(tokens) :]
        ones = torch.ones(len(own), device=logits.device)
        of_token = token_logprobs(own, scored.targets, ones)
        found.scored = of_token._replace(logprobs=to_host(of_token.logprobs), ranks=to_host(of_token.ranks))
        found.scored_targets = to_host(scored.targets)
        asks, at = [], 0
        for row in batch.rows[:rows]:
            p = row.request.params
            asks += [(i, p.prompt_logprobs or 0, ()) for i in range(at, at + row.num_scored)]
            at += row.num_scored
        found.scored_more = _more(asks, own, ones, of_token.normalizers, None, to_host)
    return found if wanting or scored is not None else None


def _more(asks: Sequence[tuple[int, int, Sequence[int] | None]], logits: torch.Tensor, temperature: torch.Tensor,
          normalizers: torch.Tensor, threshold: torch.Tensor | None, to_host: Callable[[torch.Tensor], torch.Tensor]
          ) -> _More | None:
    """For each (row, k, ids): the k likeliest tokens of the row, and those with the ids. -1 is the whole vocabulary."""
    vocabulary = logits.shape[1]
    wanted = [(row, vocabulary if k < 0 else min(k, vocabulary), list(ids or ())) for row, k, ids in asks if k or ids]
    if not wanted:
        return None
    rows = [row for row, _, _ in wanted]
    at = to_device(np.array(rows, np.int64), logits.device)
    x, heat, norm = logits[at], temperature[at], normalizers[at]
    bound = None if threshold is None else threshold[at]

    def values(of: torch.Tensor) -> torch.Tensor:
        return to_host(scaled(of, heat, bound) - norm[:, None])

    counts = np.array([k for _, k, _ in wanted], np.int64)
    top, tokens = x.topk(int(counts.max()), dim=-1)
    column = torch.arange(tokens.shape[1], device=x.device)
    beyond = column >= to_device(counts, x.device)[:, None]
    most = max(len(some) for _, _, some in wanted)
    given = np.full((len(wanted), most), -1, np.int64)
    for i, (_, _, some) in enumerate(wanted):
        given[i, : len(some)] = some
    ids = to_device(given, x.device)
    chosen = x.gather(1, ids.clamp_min(0))
    ranks = [(x > chosen[:, j : j + 1]).sum(-1, keepdim=True) + 1 for j in range(most)]
    return _More(rows, (values(top), to_host(tokens.masked_fill(beyond, -1)), to_host((column + 1).expand(tokens.shape))),
                 (values(chosen), to_host(ids), to_host(torch.cat(ranks, 1) if ranks else ids)))


__all__ = ["SCORED_ROWS", "RowLogprobs", "ScoredRows", "StepLogprobs", "step_logprobs", "to_device"]
