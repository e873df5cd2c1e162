"""Buckets: the batch shapes that are captured as CUDA graphs.

A graph replays one shape only, so a batch is padded to the smallest captured shape that holds it. A decode batch, in
which every sequence has as many tokens, is measured in sequences (`decode_buckets`); a mixed batch of prefill and
decode in tokens (`token_buckets`). A batch that fits no bucket (`pick_bucket` returns None) runs without a graph.

The steps between sizes grow with the size, so that padding wastes a bounded share of a large batch and few graphs are
captured. Decode sizes follow SGLang 0.5.23, with 8 in place of its 8 and 12; token counts too, with steps of 128 from 1024 to
2048, so that from 128 tokens on padding is at most an eighth. Other lists have names (`POLICIES`):

sglang   decode 1, 2, 4, 8, 12, then 16 to 256 by 8, to 512 by 16, then by 32; tokens as the default's, to 4096 by 256
vllm     1, 2, 4, then 8 to 248 by 8, then from 256 by 16
powers   1, 2, 4, 8, ...

All end with the maximum, so that no batch is too large for its graphs (the systems' own lists may miss it).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from numbers import Integral
from typing import Literal, get_args

# (last size, step): sizes go up by `step`, starting one step above the last size of the rung before.
_DECODE_LADDER = ((256, 8), (512, 16))
_DECODE_LAST_STEP = 32
_SMALL_DECODE_SIZES = (1, 2, 4)  # batches of one to four are common; padding 1 to 8 is expensive
Policy = Literal["sglang", "vllm", "powers"]
POLICIES: tuple[str, ...] = get_args(Policy)
_TOKEN_LADDER = ((32, 4), (256, 16), (512, 32), (1024, 64), (2048, 128), (4096, 256))
_SGLANG_TOKEN_LADDER = ((32, 4), (256, 16), (512, 32), (1024, 64), (4096, 256))
_TOKEN_LAST_STEP = 512


def decode_buckets(max_num_seqs: int, sizes: Iterable[int] | str | None = None) -> list[int]:
    """Batch sizes, in sequences, of the decode graphs: ascending, without duplicates, up to `max_num_seqs`. `sizes`: the name
    of a list, or the user's list, in any order, used unchanged; larger batches then have no graph. Raises ValueError for a
    maximum below 1, an unknown name, and `sizes` that are empty or not integers from 1 to the largest batch."""
    _check_positive("max_num_seqs", max_num_seqs)
    if isinstance(sizes, str):
        found = _named(sizes, max_num_seqs) if sizes != "sglang" else [
            1, 2, 4, 8, 12, *_climb(_DECODE_LADDER, _DECODE_LAST_STEP, max_num_seqs)[1:]]
    elif sizes is not None:
        return _validated(sizes, max_num_seqs, "batch size", "max_num_seqs")
    else:
        found = [*_SMALL_DECODE_SIZES, *_climb(_DECODE_LADDER, _DECODE_LAST_STEP, max_num_seqs)]
    return sorted({size for size in (*found, max_num_seqs) if size <= max_num_seqs})


def token_buckets(max_num_batched_tokens: int, sizes: Iterable[int] | str | None = None) -> list[int]:
    """Token counts of the graphs of mixed prefill and decode batches, else as `decode_buckets`. Without `sizes`: 4 to 32 by 4,
    to 256 by 16, to 512 by 32, to 1024 by 64, to 2048 by 128, to 4096 by 256, then by 512, and the maximum."""
    _check_positive("max_num_batched_tokens", max_num_batched_tokens)
    if isinstance(sizes, str) and sizes != "sglang":
        return sorted({*_named(sizes, max_num_batched_tokens), max_num_batched_tokens})
    if sizes is not None and not isinstance(sizes, str):
        return _validated(sizes, max_num_batched_tokens, "token count", "max_num_batched_tokens")
    ladder = _TOKEN_LADDER if sizes is None else _SGLANG_TOKEN_LADDER
    return sorted({*_climb(ladder, _TOKEN_LAST_STEP, max_num_batched_tokens), max_num_batched_tokens})


def pick_bucket(buckets: Sequence[int], n: int) -> int | None:
    """The smallest of the ascending `buckets` that holds `n` sequences or tokens, or None."""
    i = bisect_left(buckets, n)
    return None if i == len(buckets) else buckets[i]


def _named(policy: str, limit: int) -> list[int]:
    """The sizes of vllm's or powers' list up to ``limit``."""
    if policy == "vllm":
        return [size for size in (1, 2, 4, *range(8, 256, 8), *range(256, limit + 1, 16)) if size <= limit]
    if policy == "powers":
        return [2**i for i in range(limit.bit_length())]
    raise ValueError(f"no list of capture sizes is called {policy!r}; there are {', '.join(POLICIES)}, or give a list")


def _climb(ladder: Sequence[tuple[int, int]], last_step: int, limit: int) -> list[int]:
    """The sizes of a ladder up to `limit`."""
    found: list[int] = []
    below = 0
    for top, step in (*ladder, (limit, last_step)):
        found += range(below + step, min(top, limit) + 1, step)
        below = top
    return found


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
