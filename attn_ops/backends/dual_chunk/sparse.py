"""The sparse prefill of ``dual_chunk``: its options, and one sequence of a batch."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from quire.attn_ops.backend import UnsupportedAttention
from quire.attn_ops.backends.dual_chunk.divide import Piece, SparseRow
from quire.attn_ops.backends.dual_chunk.vertical_slash import (
    Lines,
    Listed,
    attend_eager,
    attend_triton,
    choose_lines,
    kernel_block,
    line_weights,
)
from quire.attn_ops.ops.merge_state import merge_state

PATTERN = "vertical_and_slash"
SCORE_BYTES = 256 << 20  # of the scores that choose keys and distances, held at a time


@dataclass(frozen=True)
class Sparse:
    """Prefills of sequences longer than ``dense_below`` are sparse; their ``last`` queries choose. ``sizes``: numbers of keys
    and of distances, of all heads, or by layer of each query head."""

    dense_below: int
    last: int
    sizes: tuple[int, int] | Mapping[int, Sequence[tuple[int, int]]]

    def of_layer(self, layer: int, heads: int) -> list[tuple[int, int]]:
        """Numbers of keys and distances of each query head. Raises UnsupportedAttention if the file is of another model."""
        if isinstance(self.sizes, tuple):
            return [self.sizes] * heads
        rows = self.sizes.get(layer)
        if rows is None or len(rows) != heads:
            have = "no such layer" if rows is None else f"{len(rows)} heads"
            raise UnsupportedAttention(f"sparse prefill: layer {layer} has {heads} query heads, the file has {have}: it is of "
                                       "another model. Give this one's sparse_attention_config.json, or VERTICAL:SLASH")
        return list(rows)

    def __str__(self) -> str:
        what = (f"{self.sizes[0]} keys and {self.sizes[1]} distances of each head" if isinstance(self.sizes, tuple)
                else "the keys and distances of its file")
        return f"prefills sequences longer than {self.dense_below} tokens over {what}"


def read_sizes(file: str) -> dict[int, list[tuple[int, int]]]:
    """Layer -> numbers of keys and distances of each query head, of a checkpoint's ``sparse_attention_config.json``: for each
    layer, in a list or by number, an object head -> [pattern, keys, distances, score]. The score is that of the search that
    found the numbers, and has no meaning afterwards. Raises ValueError for another form, heads with gaps, another pattern than
    "vertical_and_slash", a number below 1."""
    try:
        found = json.loads(Path(file).read_text())
        layers = dict(enumerate(found)) if isinstance(found, list) else {int(layer): heads for layer, heads in found.items()}
        made = {}
        for layer, heads in layers.items():
            rows = {int(head): entry for head, entry in heads.items()}
            if sorted(rows) != list(range(len(rows))):
                raise ValueError(f"layer {layer} has heads {sorted(rows)}")
            made[layer] = [_numbers(layer, head, rows[head]) for head in range(len(rows))]
        return made
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{file} is not a sparse_attention_config.json of vertical and slash lines: {error}") from error


def _numbers(layer: int, head: int, entry: Sequence[object]) -> tuple[int, int]:
    if not isinstance(entry, list) or len(entry) not in (3, 4):
        raise ValueError(f"layer {layer}, head {head} has {entry!r}, not [pattern, keys, distances, score]")
    pattern, keys, distances = entry[:3]
    if pattern != PATTERN:
        raise ValueError(f"layer {layer}, head {head} has the pattern {pattern!r}; only {PATTERN!r} is possible")
    if not (isinstance(keys, int) and isinstance(distances, int) and keys > 0 and distances > 0):
        raise ValueError(f"layer {layer}, head {head} has {keys!r} keys and {distances!r} distances; give positive integers")
    return keys, distances


def sparse_attention(row: SparseRow, rotated: Tensor, far_query: Callable[[int, slice], Tensor], keys: Tensor, values: Tensor,
                     sizes: Sequence[tuple[int, int]], last: int, *, scale: float, softcap: float | None, use_kernel: bool
                     ) -> Tensor:
    """The prefill of one sequence, ``row``: (queries, H, Dv). ``rotated``: (T, H, D), queries of the batch at their positions;
    ``far_query``: (b, some of the batch's tokens) -> those as from CHUNK + b * L. Keys and values: (total, Hkv, D or Dv).
    ``sizes``: numbers of keys and distances of each head. ``last``: queries that choose."""
    def far(b: int, begin: int, end: int) -> Tensor:
        return far_query(b, slice(row.begin + begin, row.begin + end))

    rotated = rotated[row.begin : row.begin + row.queries]
    lines = _lines(row, rotated, far, keys, sizes, last, scale, softcap)
    attend = attend_eager
    if use_kernel:
        listed = Listed.of(lines, kernel_block(rotated, values.shape[2]))
        attend = functools.partial(attend_triton, listed=listed)
    first = row.total - row.queries

    def state(query: Tensor, piece: Piece) -> tuple[Tensor, Tensor]:
        begin, _, key, end = piece
        return attend(query, keys[key:end], values[key:end], first + begin, key, lines, scale=scale, softcap=softcap)

    out = rotated.new_empty(row.queries, rotated.shape[1], values.shape[2])
    lse = torch.empty(rotated.shape[:2], dtype=torch.float32, device=rotated.device)
    for piece in row.near:
        part = slice(*piece[:2])
        out[part], lse[part] = state(rotated[part], piece)
    for b, piece in enumerate(row.far):
        part = slice(*piece[:2])
        out[part], lse[part] = merge_state(out[part], lse[part], *state(far(b, *piece[:2]), piece))
    return out


def _lines(row: SparseRow, rotated: Tensor, far_query: Callable[[int, int, int], Tensor], keys: Tensor,
           sizes: Sequence[tuple[int, int]], last: int, scale: float, softcap: float | None) -> Lines:
    """What the last queries choose, a few heads at a time."""
    count, heads, total = min(last, row.queries), rotated.shape[1], row.total
    group, start = heads // keys.shape[1], row.queries - count
    near = rotated[start:]
    far = [(max(0, begin - start), key, end, far_query(b, max(begin, start), row.queries))
           for b, (begin, _, key, end) in enumerate(row.far)]
    later = torch.arange(total, device=keys.device) > torch.arange(total - count, total, device=keys.device)[:, None]
    found = []
    at_once = max(1, SCORE_BYTES // (count * total * 4))
    for low in range(0, heads, at_once):
        some = slice(low, min(low + at_once, heads))
        key = keys[:, torch.arange(some.start, some.stop, device=keys.device) // group].transpose(0, 1).float()  # (h, N, D)
        scores = near[:, some].transpose(0, 1).float() @ key.transpose(1, 2)
        for begin, a, z, query in far:
            scores[:, begin:, a:z] = query[:, some].transpose(0, 1).float() @ key[:, a:z].transpose(1, 2)
        scores *= scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        found.append(line_weights(scores.masked_fill_(later, float("-inf"))))
    by_key, by_distance = (torch.cat(parts) for parts in zip(*found, strict=True))
    return choose_lines(by_key, by_distance, [n for n, _ in sizes], [n for _, n in sizes])
