"""Buckets: the batch shapes that are captured as CUDA graphs.

A graph replays one shape only, so a batch is padded to the smallest captured shape that holds it. A decode batch, in
which every sequence has as many tokens, is measured in sequences (`decode_buckets`); a mixed batch of prefill and
decode in tokens (`token_buckets`). A batch that fits no bucket (`pick_bucket` gives None) runs without a graph.

The steps grow with the size, so that padding wastes a bounded share of a large batch and few graphs are captured. Both
ladders follow SGLang 0.5.23, with 8 in place of its 8 and 12.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from numbers import Integral

# (last size, step): sizes go up by `step`, starting one step above the last size of the rung before.
_DECODE_LADDER = ((256, 8), (512, 16))
_DECODE_LAST_STEP = 32
_SMALL_DECODE_SIZES = (1, 2, 4)  # single users and small teams are the common case; padding 1 to 8 costs them
_TOKEN_LADDER = ((32, 4), (256, 16), (512, 32), (1024, 64), (4096, 256))
_TOKEN_LAST_STEP = 512


def decode_buckets(
    max_num_seqs: int,
    *,
    sizes: Iterable[int] | None = None,
    padding: bool = True,
    multiple_of: int = 1,
) -> list[int]:
    """Batch sizes, in sequences, of the decode graphs.

    Args:
        max_num_seqs: most sequences in a batch, >= 1.
        sizes: the user's own list, in any order. Taken as it is; a batch larger than its largest size has no graph.
        padding: False when batches must not be padded, so that every size needs a graph of its own. Ask `pick_bucket`
            with ``exact=True`` then. A list in `sizes` stays what it is.
        multiple_of: every size is a multiple of this: the tensor-parallel size where tokens are scattered over the
            ranks, 2 for two-batch overlap. The default sizes are rounded up to it.

    Returns:
        Ascending sizes without duplicates. Without `sizes`, the last one is max_num_seqs rounded up to `multiple_of`,
        so it can be larger than max_num_seqs and static buffers must be sized by it.

    Raises:
        ValueError: a maximum or multiple below 1; `sizes` is empty, or has a size that is no integer, below 1, not a
            multiple of `multiple_of`, or larger than any batch can be.
    """
    _check_positive("max_num_seqs", max_num_seqs)
    _check_positive("multiple_of", multiple_of)
    largest = _round_up(max_num_seqs, multiple_of)
    if sizes is not None:
        return _validated(sizes, largest, multiple_of, what="batch size", limit=f"max_num_seqs={max_num_seqs}")
    if not padding:
        return list(range(multiple_of, largest + 1, multiple_of))
    ladder = [*_SMALL_DECODE_SIZES, *_climb(_DECODE_LADDER, _DECODE_LAST_STEP, max_num_seqs)]
    return sorted({_round_up(size, multiple_of) for size in (*ladder, max_num_seqs) if size <= max_num_seqs})


def token_buckets(
    max_num_batched_tokens: int, *, sizes: Iterable[int] | None = None, multiple_of: int = 1
) -> list[int]:
    """Token counts of the graphs of mixed prefill and decode batches.

    Args:
        max_num_batched_tokens: most tokens in a step, >= 1.
        sizes: the user's own list, in any order. Taken as it is; a step with more tokens than its largest has no graph.
        multiple_of: every count is a multiple of this, as in `decode_buckets`.

    Returns:
        Ascending counts without duplicates. Without `sizes`: 4 to 32 by 4, to 256 by 16, to 512 by 32, to 1024 by 64,
        to 4096 by 256, then by 512, each rounded up to `multiple_of`; the last one is the maximum, rounded up.

    Raises:
        ValueError: as for `decode_buckets`.
    """
    _check_positive("max_num_batched_tokens", max_num_batched_tokens)
    _check_positive("multiple_of", multiple_of)
    largest = _round_up(max_num_batched_tokens, multiple_of)
    if sizes is not None:
        limit = f"max_num_batched_tokens={max_num_batched_tokens}"
        return _validated(sizes, largest, multiple_of, what="token count", limit=limit)
    ladder = _climb(_TOKEN_LADDER, _TOKEN_LAST_STEP, max_num_batched_tokens)
    return sorted({_round_up(size, multiple_of) for size in (*ladder, max_num_batched_tokens)})


def decode_token_counts(buckets: Sequence[int], *, tokens_per_seq: int = 1) -> list[int]:
    """Tokens of a step of each decode bucket, in the same order.

    Args:
        buckets: batch sizes in sequences, from `decode_buckets`.
        tokens_per_seq: tokens that every sequence brings to a step: 1, or in a speculative step 1 + the drafted tokens.

    Raises:
        ValueError: `tokens_per_seq` is below 1.
    """
    _check_positive("tokens_per_seq", tokens_per_seq)
    return [size * tokens_per_seq for size in buckets]


def pick_bucket(buckets: Sequence[int], n: int, *, exact: bool = False) -> int | None:
    """The smallest bucket that holds `n`, or None where none does.

    Args:
        buckets: ascending sizes, from one of the functions above.
        n: sequences or tokens of the batch.
        exact: accept only a bucket of size `n`, for when padding is off.
    """
    i = bisect_left(buckets, n)
    if i == len(buckets) or (exact and buckets[i] != n):
        return None
    return buckets[i]


def _climb(ladder: Sequence[tuple[int, int]], last_step: int, limit: int) -> list[int]:
    """The sizes of a ladder up to `limit`."""
    found: list[int] = []
    below = 0
    for top, step in (*ladder, (limit, last_step)):
        found += range(below + step, min(top, limit) + 1, step)
        below = top
    return found


def _validated(sizes: Iterable[int], largest: int, multiple_of: int, *, what: str, limit: str) -> list[int]:
    """A user's list, ascending and without duplicates, or ValueError."""
    given = list(sizes)
    if not given:
        raise ValueError(f"the list of {what}s to capture is empty; give at least one, or None for the default list")
    for size in given:
        _check_positive(f"{what} {size!r} in the list to capture", size)
        if size % multiple_of:
            raise ValueError(f"{what} {size} in the list to capture is not a multiple of {multiple_of}; the next one "
                             f"is {_round_up(size, multiple_of)}")
        if size > largest:
            raise ValueError(f"{what} {size} in the list to capture is larger than any batch can be ({limit}, rounded "
                             f"up to {largest}); remove it, or raise the limit")
    return sorted({int(size) for size in given})


def _check_positive(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
        raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")


def _round_up(value: int, multiple_of: int) -> int:
    return -(-value // multiple_of) * multiple_of


__all__ = ["decode_buckets", "decode_token_counts", "pick_bucket", "token_buckets"]
