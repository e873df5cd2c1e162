"""Buckets: the batch shapes that are captured as CUDA graphs.

A graph replays one shape only, so a batch is padded to the smallest captured shape that holds it. A decode batch, in
which every sequence has as many tokens, is measured in sequences (`decode_buckets`); a mixed batch of prefill and
decode in tokens (`token_buckets`). A batch that fits no bucket (`pick_bucket` returns None) runs without a graph.

The steps between sizes grow with the size, so that padding wastes a bounded share of a large batch and few graphs are
captured. Decode sizes follow SGLang 0.5.23, with 8 in place of its 8 and 12; token counts too, with steps of 128 from 1024 to
2048, so that from 128 tokens on padding is at most an eighth. Other lists have names (`POLICIES`). All end with the maximum, so
that no batch is too large for its graphs (the systems' own lists may miss it).
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Literal, get_args

Policy = Literal["sglang", "vllm", "powers"]
POLICIES: tuple[str, ...] = get_args(Policy)
# Sizes one by one, then (last size, step): sizes go up by `step`, starting one step above the last size of the rung before.
_List = tuple[Sequence[int], Sequence[tuple[int, int]]]
_ON = sys.maxsize
_DECODE_RUNGS = (256, 8), (512, 16), (_ON, 32)
_VLLM, _POWERS = ((1, 2, 4), ((256, 8), (_ON, 16))), (tuple(2**i for i in range(63)), ())
_DECODE: dict[str | None, _List] = {  # None: batches of one to four are common; padding 1 to 8 is expensive
    None: ((1, 2, 4), _DECODE_RUNGS), "sglang": ((1, 2, 4, 8, 12), _DECODE_RUNGS), "vllm": _VLLM, "powers": _POWERS}
_TOKENS: dict[str | None, _List] = {
    None: ((), ((32, 4), (256, 16), (512, 32), (1024, 64), (2048, 128), (4096, 256), (_ON, 512))),
    "sglang": ((), ((32, 4), (256, 16), (512, 32), (1024, 64), (4096, 256), (_ON, 512))), "vllm": _VLLM, "powers": _POWERS}


def decode_buckets(max_num_seqs: int, sizes: Iterable[int] | str | None = None) -> list[int]:
    """Batch sizes, in sequences, of the decode graphs: ascending, without duplicates, up to `max_num_seqs`. `sizes`: the name
    of a list, or the user's list, in any order, used unchanged; larger batches then have no graph. Raises ValueError for a
    maximum below 1, an unknown name, and `sizes` that are empty or not integers from 1 to the largest batch."""
    return _buckets(_DECODE, "batch size", "max_num_seqs", max_num_seqs, sizes)


def token_buckets(max_num_batched_tokens: int, sizes: Iterable[int] | str | None = None) -> list[int]:
    """Token counts of the graphs of mixed prefill and decode batches, else as `decode_buckets`."""
    return _buckets(_TOKENS, "token count", "max_num_batched_tokens", max_num_batched_tokens, sizes)


def pick_bucket(buckets: Sequence[int], n: int) -> int | None:
    """The smallest of the ascending `buckets` that holds `n` sequences or tokens, or None."""
    i = bisect_left(buckets, n)
    return None if i == len(buckets) else buckets[i]


def _buckets(lists: Mapping[str | None, _List], what: str, limit: str, largest: int, sizes: Iterable[int] | str | None
             ) -> list[int]:
    _check_positive(limit, largest)
    if sizes is not None and not isinstance(sizes, str):
        return _validated(sizes, largest, what, limit)
    if sizes not in lists:
        raise ValueError(f"no list of capture sizes is called {sizes!r}; there are {', '.join(POLICIES)}, or give a list")
    singles, rungs = lists[sizes]
    found, below = {*singles, largest}, 0
    for top, step in rungs:
        found.update(range(below + step, min(top, largest) + 1, step))
        below = top
    return sorted(size for size in found if size <= largest)


def _validated(sizes: Iterable[int], largest: int, what: str, limit: str) -> list[int]:
    """A user's list, ascending and without duplicates, or ValueError."""
    given = list(sizes)
    if not given:
        raise ValueError(f"the list of {what}s to capture is empty; give at least one, or None for the default list")
    for size in given:
        _check_positive(f"{what} {size!r} in the list to capture", size)
        if size > largest:
            raise ValueError(f"{what} {size} in the list to capture is larger than any batch can be ({limit}={largest}); "
                             "remove it, or raise the limit")
    return sorted({int(size) for size in given})


def _check_positive(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
        raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")
